"""Verdicts of `python -m oxmoe check` that SGLang's layers once contradicted (tests/sglang/test_sglang_check_random.py
compares the two)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from check_command import check, in_folder, moe, written
from check_configs import (
    AWQ,
    CHANNEL,
    FP8,
    GPTQ,
    HYBRID,
    INT4,
    MODELOPT,
    MODELOPT_FP8,
    NVFP4,
    Config,
    changed,
    compressed,
    gpt_oss,
    nemotron,
    qwen3_30b,
)

PER_TENSOR = compressed(
    {"num_bits": 8, "strategy": "tensor"},
    {"num_bits": 8, "strategy": "token", "dynamic": True},
    format="float-quantized",
)
SEVENTH = ["model.layers.7.mlp.experts"]
MIXTURE = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {f"{SEVENTH[0]}.0.up_proj": {"quant_algo": "NVFP4"}}}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (qwen3_30b({key: value for key, value in GPTQ.items() if key != "desc_act"}), "no desc_act"),
        (qwen3_30b(changed(INT4, strategy=None, group_size=None)), "a scale a tensor"),
        (qwen3_30b(PER_TENSOR), "no fp8 experts of compressed-tensors by tensor and token"),
        (qwen3_30b({**CHANNEL, "format": None}), "with these activations"),
        (qwen3_30b({**CHANNEL, "ignore": None}), "ignore is null"),
        (qwen3_30b({**HYBRID, "activation_scheme": None}), "activation_scheme None"),
        (qwen3_30b({**MODELOPT, "quant_algo": "nvfp4"}), "quant_algo nvfp4 is not served"),
        (qwen3_30b({**MODELOPT, "ignore": None}), "NVFP4 whose ignore is null"),
        (qwen3_30b({**MODELOPT, "quant_method": "modelopt_fp8"}), "quant_method modelopt_fp8 with quant_algo 'NVFP4'"),
        (qwen3_30b({**MIXTURE, "quant_method": "modelopt"}), "without kv_cache_quant_algo"),
        (
            qwen3_30b({**MIXTURE, "quantized_layers": {"model.layers.7.mlp": {}}, "quant_method": "modelopt_mixed"}
                      | {"kv_cache_quant_algo": None}),
            "'model.layers.7.mlp' has no quant_algo",
        ),
        (nemotron({"quant_method": "w4afp8"}, moe_intermediate_size=2048), "W4AFP8 experts without a gate"),
        *(
            (gpt_oss(quantised=quantised), "no such experts with biases")
            for quantised in (AWQ | {"group_size": 32}, GPTQ | {"group_size": 32}, INT4, NVFP4, MODELOPT)
        ),
    ],
)  # fmt: skip
def test_refused(config: Config, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = check(tmp_path, capsys, config)
    assert not report["served"] and why in report["refused"][0]


def without_ignore(quantised: Config) -> Config:
    return {name: value for name, value in quantised.items() if name != "ignore"}


def plain_layers(report: dict[str, Any]) -> list[int]:
    return [layer for kind in moe(report) if kind["format"] == "bf16" for layer in kind["layers"]]


@pytest.mark.parametrize(
    ("quantised", "plain"),
    [
        # The first field that is there counts.
        ({**FP8, "ignored_layers": None, "modules_to_not_convert": SEVENTH}, []),
        ({**FP8, "ignored_layers": [], "modules_to_not_convert": SEVENTH}, []),
        ({**FP8, "modules_to_not_convert": SEVENTH}, [7]),
        # In a config.json ModelOpt's field is `ignore`, for FP8 alone.
        ({**MODELOPT_FP8, "ignore": SEVENTH}, [7]),
        ({key: value for key, value in {**MODELOPT_FP8, "exclude_modules": SEVENTH}.items() if key != "ignore"}, []),
        (
            {key: value for key, value in {**MODELOPT, "modules_to_not_convert": SEVENTH}.items() if key != "ignore"},
            [7],
        ),
        ({**MODELOPT, "modules_to_not_convert": SEVENTH}, []),
    ],
)
def test_layers_that_are_left(
    quantised: Config, plain: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check(tmp_path, capsys, qwen3_30b(quantised))
    assert report["served"] and plain_layers(report) == plain


@pytest.mark.parametrize(
    ("file", "plain", "why"),
    [
        ({"quant_algo": "FP8", "exclude_modules": SEVENTH}, [7], None),
        ({"quant_algo": "FP8", "ignore": SEVENTH}, [], None),
        ({"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": SEVENTH}, [7], None),
        ({"quant_algo": "NVFP4", "exclude_modules": SEVENTH}, [], "expected one group_size, got []"),
        ({"quant_algo": "MXFP8", "exclude_modules": SEVENTH}, [], "MXFP8 in hf_quant_config.json"),
    ],
)
def test_hf_quant_config(
    file: Config, plain: list[int], why: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "config.json", qwen3_30b())
    written(tmp_path / "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": file})
    report = in_folder(tmp_path, capsys)
    assert report["served"] is (why is None) and plain_layers(report) == plain
    assert why is None or why in report["refused"][0]


def test_fields_outside_of_quantization(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Newer releases read an hf_quant_config.json that is flat."""
    written(tmp_path / "config.json", qwen3_30b())
    written(tmp_path / "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quant_algo": "FP8"})
    assert in_folder(tmp_path, capsys)["served"]
    assert "does not read it" in in_folder(tmp_path, capsys, "--sglang", "0.5.18")["refused"][0]


def test_mxfp8_of_modelopt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": SEVENTH}
    report = check(tmp_path, capsys, qwen3_30b(quantised))
    assert report["served"] and plain_layers(report) == [7]
    assert {kind["format"] for kind in moe(report)} == {"MXFP8", "bf16"}
    assert not check(tmp_path, capsys, qwen3_30b(quantised), "--sglang", "0.5.15")["served"]


def test_a_mixture_has_one_group_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SGLang takes the first NVFP4 layer's for all, and one block size."""
    names = [f"model.layers.{layer}.mlp.experts.0.up_proj" for layer in (0, 1)]
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
    nvfp4 = {"quant_algo": "NVFP4", "group_size": 32}, {"quant_algo": "NVFP4", "group_size": 16}
    for given, served in ((nvfp4, False), (nvfp4[::-1], True)):
        listed = dict(zip(names, given, strict=True))
        assert check(tmp_path, capsys, qwen3_30b({**config, "quantized_layers": listed}))["served"] is served
    blocks = {
        name: {"quant_algo": "FP8_PB_WO", "group_size": size} for name, size in zip(names, (128, 64), strict=True)
    }
    listed = {**blocks, "model.layers.2.mlp.experts": nvfp4[1]}
    report = check(tmp_path, capsys, qwen3_30b({**config, "quantized_layers": listed}))
    assert "fp8 with blocks of ['128', '64']: SGLang refuses it" in report["refused"][0]
