"""`python -m oxmoe check`: its answers for the models that people serve, and for input that says nothing."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forked
import oxmoe
from check_configs import (
    CHANNEL,
    FP8,
    GPTQ,
    HYBRID,
    INT4,
    K3_MXFP4,
    MODELOPT,
    MODELOPT_FP8,
    NVFP4,
    REFUSED,
    SERVED,
    Config,
    deepseek_v3,
    deepseek_v4,
    glm_air,
    gpt_oss,
    kimi_k3,
    mimo,
    minimax_m3,
    mixed,
    nemotron,
    qwen3_30b,
    qwen3_235b,
    step,
)
from oxmoe import __main__
from oxmoe.sglang import formats
from oxmoe.tools.check.checkpoint import Checkpoint, Fields, Unreadable
from oxmoe.tools.check.layers import Server, judge

RELEASE = ["--sglang", "0.5.23"]


def written(path: Path, config: Any) -> str:
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


def check(folder: Path, capsys: pytest.CaptureFixture[str], config: Config, *arguments: str) -> dict[str, Any]:
    """Returns the answer as JSON; exit status and text agree with it."""
    path = written(folder / "config.json", config)
    given = [path, *RELEASE, *arguments]
    status = __main__.main(["check", *given, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert status == (0 if report["served"] else 1)
    assert __main__.main(["check", *given]) == status
    lines = capsys.readouterr().out.splitlines()
    assert ("NOT SERVED" in lines[0]) == bool(status)
    assert [line for line in lines if line.startswith("  refused: ")] == [f"  refused: {r}" for r in report["refused"]]
    return report


def moe(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [kind for kind in report["kinds"] if kind["kind"] == "moe"]


@pytest.mark.parametrize("name", SERVED)
def test_served(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, tp, format_name, layers, flags = SERVED[name]
    report = check(tmp_path, capsys, config, "--tp", str(tp))
    assert report["served"] and not report["refused"]
    assert report["flags"] == [*([f"--tp-size {tp}"] if tp > 1 else []), *flags]
    kinds = moe(report)
    assert {kind["format"] for kind in kinds} == {format_name}
    assert sum(kind["count"] for kind in kinds) == layers == len({n for kind in kinds for n in kind["layers"]})
    for kind in kinds:
        assert kind["served"] and kind["taken_by"] == (
            "moe=flashinfer_mxfp4" if name == "Kimi-K3-MXFP4" else "moe=oxmoe"
        )
        assert kind["sizes"]["intermediate_per_rank"] == kind["sizes"]["intermediate"] // tp
        assert [row["tokens"] for row in kind["times"]] == [1, 64, 4096]
        assert all(0 < row["us"] == max(row["memory_us"], row["arithmetic_us"]) for row in kind["times"])


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, tp, message = REFUSED[name]
    report = check(tmp_path, capsys, config, "--tp", str(tp))
    assert not report["served"] and not any(kind["served"] for kind in report["kinds"])
    assert re.search(message, " ".join(report["refused"]))


def test_expert_parallelism_makes_sizes_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = check(tmp_path, capsys, qwen3_235b(), "--tp", "8", "--ep", "2")
    assert report["served"] and report["flags"] == ["--tp-size 8", "--ep-size 2"]
    (kind,) = moe(report)
    assert (kind["sizes"]["experts_per_rank"], kind["sizes"]["intermediate_per_rank"]) == (64, 384)
    # Gate, up and down have a byte for each weight, and an fp32 scale for 128 x 128 of them.
    weights = 94 * 64 * 3 * 4096 * 384
    assert kind["bytes_per_rank"] == round(weights * (1 + 4 / 128**2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "4", "--ep", "3"], "--ep-size 3 does not divide --tp-size 4"),
        (["--tp", "256", "--ep", "256"], "--ep-size 256 does not divide 128 experts"),
        (["--sglang", "0.4.0"], "SGLang 0.4.0 is not served"),
        (["--sglang", "0.9.0"], "SGLang 0.9.0 is newer than"),
        (["--sglang", "main"], "SGLang main is no version"),
    ],
)
def test_servers_that_cannot_be(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "config.json", qwen3_30b())
    assert __main__.main(["check", path, *RELEASE, *arguments]) == 1
    assert message in capsys.readouterr().out


def test_more_ranks_than_experts_of_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank holds fewer experts than a token chooses."""
    (kind,) = moe(check(tmp_path, capsys, qwen3_30b(), "--tp", "64", "--ep", "64"))
    assert kind["sizes"]["experts_per_rank"] == 2 and kind["served"]


def test_the_oldest_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The release's NVFP4 layers are for Blackwell, and its dispatcher follows --moe-runner-backend."""
    old = ["--sglang", "0.5.12.post1"]
    assert check(tmp_path, capsys, qwen3_30b(), *old)["flags"] == ["--quantization oxmoe"]
    assert not check(tmp_path, capsys, qwen3_30b(NVFP4), *old)["served"]
    ranks = ["--tp-size 2", "--ep-size 2"]
    report = check(tmp_path, capsys, gpt_oss(), *old, "--tp", "2", "--ep", "2")
    assert report["served"] and report["flags"] == [*ranks, "--moe-runner-backend triton"]
    assert check(tmp_path, capsys, gpt_oss(), "--tp", "2", "--ep", "2")["flags"] == ranks


@pytest.mark.parametrize(("version", "served"), [("0.5.21", False), ("0.5.22", True), ("0.5.22.post1", True)])
def test_releases_between(version: str, served: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NVFP4 of compressed-tensors is for Blackwell alone before 0.5.22."""
    assert check(tmp_path, capsys, qwen3_30b(NVFP4), "--sglang", version)["served"] is served


def test_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not check(tmp_path, capsys, qwen3_30b(NVFP4), "--gpu", "sm_100")["served"]
    assert not check(tmp_path, capsys, minimax_m3({"quant_method": "mxfp8", "activation_scheme": "dynamic"}),
                     "--gpu", "sm_89")["served"]  # fmt: skip
    report = check(tmp_path, capsys, qwen3_30b(FP8), "--gpu", "sm_80")
    assert report["served"] and any("have not run there" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (qwen3_30b(FP8, torch_dtype="float16"), ["--dtype bfloat16"]),
        (qwen3_30b(torch_dtype="float16"), ["--quantization oxmoe"]),
        (qwen3_30b(torch_dtype="float32"), ["--dtype bfloat16", "--quantization oxmoe"]),
        (qwen3_30b(torch_dtype=None), ["--dtype bfloat16", "--quantization oxmoe"]),
        (qwen3_30b(torch_dtype=None, dtype="bfloat16"), ["--quantization oxmoe"]),
    ],
)
def test_dtypes(config: Config, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = check(tmp_path, capsys, config)
    assert report["served"] and report["flags"] == flags


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (deepseek_v3({**FP8, "modules_to_not_convert": ["model.layers.7.mlp"]}), [7]),
        (deepseek_v3({**FP8, "ignored_layers": ["layers.7", "lm_head"]}), [7]),
        (deepseek_v3({**FP8, "modules_to_not_convert": ["model.layers.7.mlp.experts.0.gate_proj"]}), [7]),
        (deepseek_v3({**FP8, "modules_to_not_convert": ["mlp.gate", "model.layers.7.mlp.shared_experts"]}), []),
        (glm_air({**CHANNEL, "ignore": ["re:.*layers[.]7[.]mlp.*"]}), [7]),
        (glm_air({**CHANNEL, "ignore": ["model.layers.7.mlp.experts.0"]}), []),
    ],
)
def test_layers_that_are_left_as_they_are(
    config: Config, plain: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint's own list names such layers; they need no flag, as the checkpoint is quantised."""
    report = check(tmp_path, capsys, config)
    assert report["served"] and report["flags"] == []
    by_format = {kind["format"]: kind["layers"] for kind in moe(report)}
    assert by_format.get("bf16", []) == plain
    assert len(by_format) == 1 + bool(plain)


def test_one_expert_left_out_of_three_projections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = glm_air({**CHANNEL, "ignore": ["model.layers.7.mlp.experts.0.up_proj"]})
    report = check(tmp_path, capsys, config)
    assert report["refused"] == ["layer 7: gate, up and down projections of experts have different formats"]


def test_drafts_and_shared_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = check(tmp_path, capsys, deepseek_v3(), "--tp", "8")
    kinds = {kind["kind"]: kind for kind in report["kinds"]}
    assert kinds["dense"]["count"] == 3 and kinds["dense"]["served"] is None
    assert kinds["shared"]["sizes"] == {"n_shared_experts": 1} and kinds["shared"]["served"] is None
    assert kinds["draft"]["layers"] == [61] and kinds["draft"]["served"] is True
    assert any("--speculative-moe-runner-backend deep_gemm" in note for note in kinds["draft"]["notes"])
    left = deepseek_v3({**FP8, "modules_to_not_convert": ["model.layers.61"]})
    kinds = {kind["kind"]: kind for kind in check(tmp_path, capsys, left, "--tp", "8")["kinds"]}
    assert kinds["draft"]["served"] is None and "not judged" in kinds["draft"]["notes"][-1]


def shard(path: Path, tensors: dict[str, str], header: bytes | None = None) -> None:
    """Writes a safetensors file with these dtypes and no data, which a check does not read."""
    text = (
        header
        or json.dumps(
            {"__metadata__": {"format": "pt"}}
            | {name: {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]} for name, dtype in tensors.items()}
        ).encode()
    )
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def in_folder(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    __main__.main(["check", str(folder), *RELEASE, "--json", *arguments])
    return json.loads(capsys.readouterr().out)


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


def test_the_largest_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A size that a config may have, but no kernel, is refused without an overflow."""
    most = 1 << 24
    for name in ("num_experts", "moe_intermediate_size", "hidden_size", "num_experts_per_tok"):
        check(tmp_path, capsys, qwen3_30b() | {name: most})
    everything = dict.fromkeys(("num_experts", "moe_intermediate_size", "hidden_size"), most)
    assert not check(tmp_path, capsys, qwen3_30b() | everything)["served"]


@pytest.mark.parametrize("format_name", ["bf16", "fp8_block", "fp8_tensor-token", "mxfp8", "mxfp4", "nvfp4", "int4"])
def test_plans_of_the_largest_sizes(format_name: str) -> None:
    """Counts of a plan stay at the most that 32 bits hold. A debug build ends a sum or a product that wraps."""
    most = 1 << 24
    for arch in ("sm_80", "sm_90", "sm_120", "cpu"):
        for sizes in [(1024, 8, most, most), (1024, 1, 4096, most), (8, 1, most, 4096)]:
            plan = oxmoe.explain(*sizes, most, format=format_name, arch=arch)
            grids = [int(grid) for grid in re.findall(r"^launch .*: (\d+) CTAs", plan, re.MULTILINE)]
            # A product that wraps is a grid without CTAs here, or an error in a debug build.
            assert arch == "cpu" or (len(grids) > 2 and min(grids) > 0), plan


def without(name: str) -> Config:
    return {key: value for key, value in qwen3_30b(FP8).items() if key != name}


HUGE = 10**400
UNREADABLE: dict[str, tuple[Any, str]] = {
    "truncated": (json.dumps(qwen3_30b())[:70], "no JSON: "),
    "empty": ("", "no JSON: "),
    "a list": ("[1]", r"expected a JSON object, got \[1\]"),
    "deep": ("[" * 200_000, "no JSON: "),
    "a huge integer": ('{"architectures": ' + "1" * 5000 + "}", "no JSON: "),
    "no architectures": (without("architectures"), "architectures is missing"),
    "architectures of numbers": (qwen3_30b(FP8) | {"architectures": [3]}, "architectures: expected a list of str"),
    "architectures as text": (qwen3_30b(FP8) | {"architectures": "Qwen3MoeForCausalLM"}, "expected a list of str"),
    "no layers": (without("num_hidden_layers"), "num_hidden_layers is missing"),
    "no experts": (without("num_experts"), "n_routed_experts or num_experts or num_local_experts is missing"),
    "no top-k": (without("num_experts_per_tok"), "num_experts_per_tok is missing"),
    "no hidden size": (without("hidden_size"), "hidden_size is missing"),
    "experts as text": (qwen3_30b() | {"num_experts": "128"}, "expected a whole number .* got '128'"),
    "experts as true": (qwen3_30b() | {"num_experts": True}, "expected a whole number .* got True"),
    "no expert": (qwen3_30b() | {"num_experts": 0}, "from 1 to"),
    "experts below none": (qwen3_30b() | {"num_experts": -1}, "from 1 to"),
    "a fraction": (qwen3_30b() | {"hidden_size": 2048.5}, "expected a whole number"),
    "a huge size": (qwen3_30b() | {"hidden_size": HUGE}, "expected a whole number"),
    "limits as text": (step() | {"swiglu_limits": ["7"] * 48}, "swiglu_limits: expected a list of number"),
    "a huge limit": (step() | {"swiglu_limits": [HUGE] * 48}, "swiglu_limits: expected numbers, got 1000"),
    "no limit but infinity": (step() | {"swiglu_limits": [float("inf")] * 48}, "swiglu_limits: expected numbers"),
    "huge layers": (qwen3_30b() | {"num_hidden_layers": 10**7}, "expected up to 4096"),
    "quantisation as text": (qwen3_30b() | {"quantization_config": "fp8"}, "quantization_config: expected an object"),
    "method as number": (qwen3_30b({"quant_method": 8}), "quant_method: expected text"),
    "groups as list": (
        qwen3_30b({"quant_method": "compressed-tensors", "config_groups": [1]}),
        "config_groups: expected an object",
    ),
    "a group as text": (
        qwen3_30b({"quant_method": "compressed-tensors", "config_groups": {"g": "x"}}),
        "g: expected an object",
    ),
    "ignored as text": (qwen3_30b({**FP8, "ignored_layers": "lm_head"}), "ignored_layers: expected a list of str"),
    "a limit as text": (gpt_oss() | {"swiglu_limit": "7"}, "swiglu_limit: expected a number"),
    "a limit that is none": (gpt_oss() | {"swiglu_limit": float("nan")}, "swiglu_limit: expected a number"),
    "too few layers listed": (minimax_m3() | {"text_config": {**minimax_m3()["text_config"], "moe_layer_freq": [1]}},
                              "expected one for each of 60 layers, got 1 of them"),
    "text_config as list": (minimax_m3() | {"text_config": []}, "text_config: expected an object"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints one line on standard error and nothing on standard output, and its status is 2."""
    config, message = UNREADABLE[name]
    text = config if isinstance(config, str) else json.dumps(config)
    assert __main__.main(["check", written(tmp_path / "config.json", text)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and re.search(message, err)
    assert len(err) < 600


JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    1 << 24,
    10**30,
    0.5,
    float("inf"),
    "",
    "x",
    [],
    [1],
    ["x"],
    [None],
    {},
    {"x": 1},
]


def places(config: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the way to every value of a JSON object."""
    items = config.items() if isinstance(config, dict) else enumerate(config[:3]) if isinstance(config, list) else ()
    return [found for key, value in items for found in ((*prefix, key), *places(value, (*prefix, key)))]


VARIED = ["DeepSeek-V3", "Qwen3.6-35B-A3B-FP8", "GLM-4.5-Air-FP8", "gpt-oss-20b", "MiniMax-M3", "Step-3.5-Flash"]
VARIED += ["Nemotron-3-Nano", "ERNIE-4.5", "Laguna", "Llama-4-Scout", "LongCat-Flash-FP8", "Gemma-4-26B-A4B"]


@pytest.mark.parametrize("name", VARIED)
def test_any_value_in_any_place(name: str) -> None:
    """Whatever a field holds, there is one answer or one Unreadable."""
    config, tp, *_ = SERVED[name]
    for *way, last in places(config):
        for junk in JUNK:
            broken = copy.deepcopy(config)
            owner = functools.reduce(lambda value, key: value[key], way, broken)
            owner[last] = junk
            try:
                report = judge(Checkpoint(Fields(broken, "config.json")), Server("0.5.23", tp, 1, "sm_90"), [1])
            except Unreadable as error:
                assert str(error).startswith("config.json: ") and "\n" not in str(error)
            else:
                assert report.served or report.refused
                json.dumps(report.json())


@pytest.mark.parametrize("header", [b"", b"{", b'{"model.layers.0.mlp.experts.0.w1.weight": 3}', b'{"a": {}}'])
def test_unreadable_safetensors(header: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "config.json", qwen3_30b())
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert __main__.main(["check", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "model.safetensors" in err


def test_a_header_longer_than_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "config.json", qwen3_30b())
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    assert __main__.main(["check", str(tmp_path)]) == 2
    assert "no safetensors file" in capsys.readouterr().err


def with_header(folder: Path, header: dict[str, Any]) -> list[str]:
    written(folder / "config.json", qwen3_30b())
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return ["check", str(folder), *RELEASE]


def test_a_layer_of_5000_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"model.layers.{'9' * 5000}.mlp.experts.0.gate_proj.weight"
    assert __main__.main(with_header(tmp_path, {name: {"dtype": "BF16"}})) == 0
    assert "served by SGLang" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file(place: str, kind: str, tmp_path: Path) -> None:
    """A pipe without a writer waits, and a device has no end."""
    if place != "config.json":
        written(tmp_path / "config.json", qwen3_30b())
    if kind == "pipe":
        os.mkfifo(tmp_path / place)
    else:
        (tmp_path / place).symlink_to("/dev/zero")
    code = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30)); from oxmoe import __main__; "
    code += f"raise SystemExit(__main__.main(['check', {str(tmp_path)!r}]))"
    done = forked.run("-c", code, timeout=60)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr[-500:]
    assert place in done.stderr and done.stderr.endswith(": expected a regular file\n")


PATTERN = "(([a-z0-9._]+)+)+!"
GROUP = INT4["config_groups"]["group_0"]
ENDLESS: dict[str, Config] = {
    "ignore": {**INT4, "ignore": [f"re:{PATTERN}"]},
    "targets": {**INT4, "config_groups": {"g": {**GROUP, "targets": [f"re:{PATTERN}"]}}},
    "dynamic": {**GPTQ, "dynamic": {f"-:{PATTERN}": {}}},
}


@pytest.mark.parametrize("name", [*ENDLESS, "tensor"])
def test_patterns_without_end(name: str, tmp_path: Path) -> None:
    """A regular expression of a config, or a name in a header, that would take years ends with one line."""
    if name == "tensor":
        with_header(tmp_path, {".1" * 200_000: {"dtype": "BF16"}})
    else:
        written(tmp_path / "config.json", qwen3_30b(ENDLESS[name]))
    code = "import sys; from oxmoe import __main__; from oxmoe.tools.check import checkpoint; "
    code += "checkpoint.MOST_SECONDS = 0.3; raise SystemExit(__main__.main(sys.argv[1:]))"
    done = forked.run("-c", code, "check", tmp_path, *RELEASE, timeout=60)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr[-500:]
    assert done.stderr.endswith(": its names and patterns took more than 0.3 seconds\n")


@pytest.mark.parametrize("words", ["\x1b[2J", "a\n  start: sh", "\ud800", "\u202e", "\r"])
def test_words_that_steer_a_terminal(words: str, tmp_path: Path) -> None:
    """Architecture, method and dtype are the file's words: they are printed as they would be in Python's source."""
    configs = [{"architectures": [words]}, qwen3_30b({"quant_method": words})]
    commands = []
    for i, config in enumerate(configs):
        commands.append(["check", written(tmp_path / f"{i}.json", config), *RELEASE])
    commands.append(with_header(tmp_path, {"model.layers.1.mlp.experts.0.gate_proj.weight": {"dtype": words}}))
    for command in commands:
        done = forked.run("-m", "oxmoe", *command, timeout=60)
        text = done.stdout + done.stderr
        assert done.returncode == 1 and "NOT SERVED" in text, text
        assert all(letter.isprintable() for letter in text.replace("\n", "")) and "\n  start" not in text, text


WRONG_PATTERNS = ["(", "(" * 5000 + ")" * 5000, "a{99999999999999999999}", "(?<=a+)b", "[[\\", "*("]


@pytest.mark.parametrize("pattern", WRONG_PATTERNS, ids=range(len(WRONG_PATTERNS)))
@pytest.mark.parametrize("place", [*ENDLESS, "modelopt"])
def test_patterns_that_are_none(place: str, pattern: str, tmp_path: Path) -> None:
    """One reason, and nothing else: neither a traceback nor a warning about a line of this program."""
    if place == "modelopt":
        quantization: Config = {**MODELOPT_FP8, "ignore": [pattern]}
    else:
        quantization = json.loads(json.dumps(ENDLESS[place]).replace(PATTERN, json.dumps(pattern)[1:-1]))
    path = written(tmp_path / "config.json", qwen3_30b(quantization))
    done = forked.run("-m", "oxmoe", "check", path, *RELEASE)
    assert done.returncode == 1 and done.stderr == "", done.stderr[-500:]
    assert "no regular expression that can be used" in done.stdout and done.stdout.count("\n") == 2, done.stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_words_that_an_output_has_no_letters_for(encoding: str, tmp_path: Path) -> None:
    path = written(tmp_path / "config.json", {"architectures": ["Modèle\u2603"]})
    # The command needs no torch, whose import would take longer than everything else.
    program = (
        "import sys; sys.modules['torch'] = None; from oxmoe import __main__; sys.exit(__main__.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "check", path, *RELEASE]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert done.returncode == 1 and done.stderr == b"" and b"NOT SERVED" in done.stdout, done.stderr
    assert done.stdout.decode(encoding).startswith("Mod")


def test_words_of_a_megabyte(tmp_path: Path) -> None:
    """They are cut, in the first line and in a reason."""
    for config in ({"architectures": ["x" * (1 << 20)]}, qwen3_30b({"quant_method": "y" * (1 << 20)})):
        path = written(tmp_path / "config.json", config)
        done = forked.run("-m", "oxmoe", "check", path, *RELEASE, timeout=60)
        assert done.returncode == 1 and "NOT SERVED" in done.stdout and len(done.stdout) < 6000


def test_values_too_deep_to_show() -> None:
    """A value that JSON's reader took, a few calls above the depth at which repr ends."""
    value: list[Any] = []
    for _ in range(10**5):
        value = [value]
    fields = Fields({"hidden_size": value}, "config.json")
    with pytest.raises(Unreadable, match=r"hidden_size: expected a whole number .* got list of great depth"):
        fields.whole("hidden_size")
    while value:
        value = value.pop()


def test_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "none.json", tmp_path / "none" / "config.json"):
        assert __main__.main(["check", str(path)]) == 2
        assert "No such file" in capsys.readouterr().err
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert __main__.main(["check", str(tmp_path)]) == 2
    assert "no JSON" in capsys.readouterr().err


def test_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "config.json", qwen3_30b())
    for wrong in (["--tp", "0"], ["--gpu", "sm_35"], ["--tokens", "x"], ["--ep", "-1"]):
        with pytest.raises(SystemExit, match="2"):
            __main__.main(["check", path, *wrong])
        assert capsys.readouterr().err.count("\n") == 1


def test_it_needs_neither_torch_nor_sglang(tmp_path: Path) -> None:
    path = written(tmp_path / "config.json", qwen3_30b())
    program = f"""
import sys
sys.modules["torch"] = sys.modules["sglang"] = None
from oxmoe import __main__
assert __main__.main(["check", {path!r}, "--sglang", "0.5.23"]) == 0
assert not any(name.startswith(("torch.", "sglang.")) for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, capture_output=True)


@pytest.mark.parametrize("format_name", ["bf16", "fp8_block", "fp8_tensor-token", "mxfp8", "mxfp4", "nvfp4", "int4"])
def test_sizes_are_those_that_have_kernels(format_name: str) -> None:
    """`formats.check_sizes`, which refuses a layer early, has the rule of the kernels."""
    name = format_name.removesuffix("-token")
    for hidden, intermediate in [(512, 512 + more) for more in range(1, 129)] + [(512 + more, 512) for more in (8, 96)]:
        try:
            formats.check_sizes(name, hidden, intermediate, of=name)
            early = None
        except NotImplementedError as error:
            early = str(error)
        try:
            oxmoe.explain(8, 2, hidden, intermediate, 4, format=format_name, arch="sm_90")
            assert early is None
        except ValueError:
            assert early is not None and "must be" in early and "multiple" in early
