"""`python -m oxmoe check`: its answers for the models that people serve."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import oxmoe
from check_command import RELEASE, check, moe, written
from check_configs import (
    CHANNEL,
    FP8,
    MXFP8,
    NVFP4,
    REFUSED,
    SERVED,
    Config,
    deepseek_v3,
    glm_air,
    gpt_oss,
    minimax_m3,
    qwen3_30b,
    qwen3_235b,
)
from oxmoe import __main__
from oxmoe.sglang import formats


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


@pytest.mark.parametrize("gpu", ["sm_90", "sm_100"])
@pytest.mark.parametrize("quantised", [None, MXFP8], ids=["bf16", "MXFP8"])
def test_linear_layers_of_mxfp8(
    quantised: Config | None, gpu: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check(tmp_path, capsys, minimax_m3(quantised), "--tp", "8", "--gpu", gpu)
    said = [kind["kind"] for kind in report["kinds"] if any("oxmoe.mxfp8_linear" in note for note in kind["notes"])]
    assert said == (["dense", "shared"] if quantised and gpu == "sm_90" else [])


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
