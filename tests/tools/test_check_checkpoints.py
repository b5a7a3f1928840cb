"""`python -m oxmoe check` on checkpoints whose tensors or second config say what the config does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from check_command import check, in_folder, moe, shard, written
from check_configs import (
    FP8,
    HYBRID,
    K3_MXFP4,
    MODELOPT,
    MODELOPT_FP8,
    deepseek_v3,
    deepseek_v4,
    gpt_oss,
    kimi_k3,
    mimo,
    mixed,
    nemotron,
    qwen3_30b,
)


def test_a_folder_with_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "config.json", qwen3_30b(FP8))
    experts = "model.layers.3.mlp.experts.5"
    shard(
        tmp_path / "model-1.safetensors",
        {
            f"{experts}.gate_proj.weight": "F8_E4M3",
            f"{experts}.gate_proj.weight_scale_inv": "F32",
            "model.layers.3.mlp.shared_experts.up_proj.weight": "BF16",
            "model.layers.3.self_attn.q_proj.weight": "BF16",
        },
    )
    assert in_folder(tmp_path, capsys)["served"]
    shard(tmp_path / "model-2.safetensors", {"model.layers.4.mlp.experts.0.up_proj.weight": "I32"})
    report = in_folder(tmp_path, capsys)
    assert not report["served"] and "layer 4: by the config" in report["refused"][0] and "I32" in report["refused"][0]


@pytest.mark.parametrize(
    ("dtype", "format_name"),
    [
        ("F8_E4M3", "fp8, 128 x 128 blocks"),
        *((dtype, "MXFP4 in an fp8 checkpoint") for dtype in ("I8", "U8", "F4")),
        ("BF16", None),
    ],
)
@pytest.mark.parametrize("version", ["0.5.12.post1", "0.5.23"])
def test_deepseek_v4_by_its_tensors(
    version: str, dtype: str, format_name: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "config.json", deepseek_v4())
    shard(tmp_path / "model.safetensors", {"layers.0.ffn.experts.0.w1.weight": dtype})
    report = in_folder(tmp_path, capsys, "--sglang", version)
    assert report["served"] is (format_name is not None)
    if format_name is not None:
        assert {kind["format"] for kind in moe(report)} == {format_name} and report["flags"] == []
        (draft,) = (kind for kind in report["kinds"] if kind["kind"] == "draft")
        assert draft["served"] is True


def test_the_bytes_of_deepseek_v4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Expert parallelism needs no flag of its own in any release. A weight has four bits, and 32 weights share eight
    more."""
    ranks = ["--tp", "8", "--ep", "4"]
    for version in ("0.5.12.post1", "0.5.23"):
        report = check(tmp_path, capsys, deepseek_v4(), "--sglang", version, *ranks)
        assert report["served"] and report["flags"] == ["--tp-size 8", "--ep-size 4"]
        (kind,) = moe(report)
        assert kind["bytes_per_rank"] == 43 * 64 * 3 * 4096 * 1024 * (4 + 8 / 32) / 8


def test_fp4_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = deepseek_v3({**FP8, "routed_experts_quant_method": "mxfp4"})
    report = check(tmp_path, capsys, named, "--sglang", "0.5.18")
    assert "by routed_experts_quant_method the experts of this fp8 checkpoint are MXFP4, but" in report["refused"][0]
    assert check(tmp_path, capsys, named, "--sglang", "0.5.19")["served"]
    stored = mimo({**FP8, "store_dtype": "MXFP4"})
    report = check(tmp_path, capsys, stored, "--sglang", "0.5.19")
    assert "by store_dtype the experts of this fp8 checkpoint are MXFP4, but" in report["refused"][0]
    report = check(tmp_path, capsys, stored, "--sglang", "0.5.20")
    assert {kind["format"] for kind in moe(report)} == {"MXFP4 in an fp8 checkpoint"}
    other = deepseek_v4({**FP8, "routed_experts_quant_method": "fp8"})
    assert {kind["format"] for kind in moe(check(tmp_path, capsys, other))} == {"fp8, 128 x 128 blocks"}


def test_fused_experts_of_gpt_oss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "config.json", gpt_oss())
    names = {"blocks": "U8", "scales": "U8", "bias": "BF16"}
    tensors = {f"model.layers.0.mlp.experts.gate_up_proj_{part}": dtype for part, dtype in names.items()}
    shard(tmp_path / "model.safetensors", tensors)
    assert in_folder(tmp_path, capsys)["served"]
    shard(tmp_path / "model.safetensors", {"model.layers.0.mlp.experts.gate_up_proj": "BF16"})
    assert not in_folder(tmp_path, capsys)["served"]


def test_modelopt_beside_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "config.json", qwen3_30b())
    assert in_folder(tmp_path, capsys)["served"]
    written(tmp_path / "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "group_size": 16}})
    (kind,) = in_folder(tmp_path, capsys)["kinds"]
    assert kind["served"] and kind["format"] == "NVFP4 of ModelOpt, bf16 activations"
    written(tmp_path / "hf_quant_config.json", {"quantization": {}})
    assert "is not known" in in_folder(tmp_path, capsys)["refused"][0]
    # config.json's word comes first, as in SGLang.
    written(tmp_path / "config.json", qwen3_30b(FP8))
    assert in_folder(tmp_path, capsys)["served"]


def test_mxfp4_of_kimi_k3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its model leaves oxmoe one place: SGLang's runner flashinfer_mxfp4, on Hopper."""
    report = check(tmp_path, capsys, kimi_k3(K3_MXFP4), "--tp", "8")
    (kind,) = moe(report)
    assert kind["taken_by"] == "moe=flashinfer_mxfp4" and "in memory twice" in kind["notes"][0]
    sizes = kind["sizes"]
    columns = -(-sizes["intermediate_per_rank"] // 128) * 128
    weights = kind["count"] * sizes["experts_per_rank"] * 3 * sizes["hidden"] * columns
    assert kind["bytes_per_rank"] == 2 * weights * (4 + 8 / 32) / 8
    for options in (["--sglang", "0.5.18"], ["--gpu", "sm_100"]):
        report = check(tmp_path, capsys, kimi_k3(K3_MXFP4), "--tp", "8", *options)
        assert "takes over their runner flashinfer_mxfp4, on sm_90 from SGLang 0.5.19 on" in report["refused"][0]
    plain = kimi_k3(K3_MXFP4)
    plain["text_config"]["activation_situ_linear_beta"] = None
    assert "no SiTU without a bound of up" in check(tmp_path, capsys, plain, "--tp", "8")["refused"][0]


W4AFP8_FILE = {"quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}}


def test_w4afp8_beside_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As DeepSeek-R1-W4AFP8 says it: a mixture that names no layers, which SGLang takes for W4AFP8 as it is."""
    written(tmp_path / "config.json", deepseek_v3(None))
    written(tmp_path / "hf_quant_config.json", W4AFP8_FILE)
    for version in ("0.5.12.post1", "0.5.23"):
        report = in_folder(tmp_path, capsys, "--tp", "8", "--sglang", version)
        (kind,) = moe(report)
        assert (
            report["served"]
            and kind["format"].startswith("int4 of W4AFP8, groups of 128")
            and report["flags"][1:] == []
        )
        assert "SGLang takes it for W4AFP8. Name the folder with its safetensors" in report["notes"][0]
    excluded = {"quantization": {**W4AFP8_FILE["quantization"], "exclude_modules": ["model.layers.3*"]}}
    written(tmp_path / "hf_quant_config.json", excluded)
    assert len(moe(in_folder(tmp_path, capsys, "--tp", "8"))) == 1, "of which SGLang's W4AFP8 excludes nothing"
    shard(tmp_path / "model.safetensors", {"model.layers.3.mlp.experts.0.up_proj.weight": "I8"})
    report = in_folder(tmp_path, capsys, "--tp", "8")
    assert report["served"] and report["notes"] == []
    shard(tmp_path / "model.safetensors", {"model.layers.3.mlp.experts.0.up_proj.weight": "F8_E4M3"})
    assert "F8_E4M3: the format is not known" in in_folder(tmp_path, capsys, "--tp", "8")["refused"][0]


def test_a_mixture_of_nemotron_that_names_no_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0.5.12.post1 takes each mixture of this model for ModelOpt's, and refuses one without layers."""
    written(tmp_path / "config.json", nemotron(None, moe_intermediate_size=2688))
    written(tmp_path / "hf_quant_config.json", W4AFP8_FILE)
    report = in_folder(tmp_path, capsys, "--sglang", "0.5.12.post1")
    assert report["refused"] == ["MIXED_PRECISION without quantized_layers: SGLang refuses it"]


def test_w4afp8_on_older_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = check(tmp_path, capsys, deepseek_v3({"quant_method": "w4afp8"}), "--tp", "8", "--gpu", "sm_89")
    assert report["refused"] == ["SGLang serves W4AFP8 from sm_90 on, not on sm_89"]
    written(tmp_path / "config.json", deepseek_v3(None))
    written(tmp_path / "hf_quant_config.json", W4AFP8_FILE)
    assert in_folder(tmp_path, capsys, "--tp", "8", "--gpu", "sm_89")["refused"] == report["refused"]


MIXED = nemotron(mixed(backbone_layers_1="NVFP4", backbone_layers_4="FP8"), moe_intermediate_size=2688)
OLDER = {
    "NVFP4": (deepseek_v3(MODELOPT), "0.5.12.post1", None),
    "no group_size": (deepseek_v3({**MODELOPT, "group_size": None}), "0.5.17", None),
    "no group_size before": (deepseek_v3({**MODELOPT, "group_size": None}), "0.5.16", "group_size None"),
    "W4A16": (deepseek_v3({**MODELOPT, "quant_algo": "W4A16_NVFP4"}), "0.5.19", None),
    "W4A16 before": (deepseek_v3({**MODELOPT, "quant_algo": "W4A16_NVFP4"}), "0.5.18", "W4A16_NVFP4 is not served"),
    "hybrid": (deepseek_v4(HYBRID), "0.5.14", None),
    "hybrid before": (deepseek_v4(HYBRID), "0.5.13", "SGLang 0.5.13 does not load it"),
    "mixture": (MIXED, "0.5.12.post1", None),
    "mixture of another model before": (deepseek_v3(mixed(model_layers_3="NVFP4")), "0.5.14", "for W4AFP8"),
}


@pytest.mark.parametrize("case", OLDER)
def test_modelopt_in_older_releases(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, release, why = OLDER[case]
    report = check(tmp_path, capsys, config, "--sglang", release)
    assert report["served"] is (why is None)
    assert why is None or why in report["refused"][0]
    notes = [note for kind in report["kinds"] for note in kind["notes"] if "NVFP4 linear layers" in note]
    assert bool(notes) is (release == "0.5.12.post1")


def test_a_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The layers have their own quant_algo, or none."""
    report = check(tmp_path, capsys, MIXED)
    kinds = {kind["format"]: kind["layers"] for kind in report["kinds"] if kind["kind"] == "moe"}
    names = ["NVFP4 of ModelOpt, bf16 activations", "fp8, a scale a matrix, static activations", "bf16"]
    assert report["served"] and list(kinds) == names
    assert kinds[names[0]] == [1] and kinds[names[1]] == [4] and len(kinds["bf16"]) == 19


@pytest.mark.parametrize(
    ("config", "gpu", "why"),
    [
        (deepseek_v3(MODELOPT), "sm_100", "NVFP4 experts on sm_90, not on sm_100"),
        (qwen3_30b(MODELOPT_FP8), "sm_80", "SGLang serves ModelOpt's fp8 from sm_89 on, not on sm_80"),
        (qwen3_30b(MODELOPT_FP8), "sm_89", None),
    ],
)
def test_modelopt_on_other_gpus(
    config: dict[str, Any], gpu: str, why: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check(tmp_path, capsys, config, "--gpu", gpu, "--tp", "2")
    assert report["served"] is (why is None) and (why is None or why in report["refused"][0])
