"""`python -m oxmoe check` against what SGLang's own configuration classes and layers do, on random configs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases import Shape
from check_configs import AWQ, FP8, GPTQ, HYBRID, INT4, MODELOPT, MODELOPT_FP8, MXFP8, Config, changed, compressed
from oxmoe.tools.check.checkpoint import read
from oxmoe.tools.check.layers import Server, judge

pytest.importorskip("sglang")

from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader import loader

from oxmoe.sglang import capabilities
from sglang_server import VERSION, FusedMoE, installed, server
from test_sglang_check import fill

only_newest = pytest.mark.skipif(VERSION != capabilities.LAST, reason="names and fields are the newest release's")
LAYERS = 3
PLACES = {"Qwen3MoeForCausalLM": "mlp", "NemotronHForCausalLM": "mixer"}
Draw = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's loader compares a checkpoint with a Hopper GPU, and does not import the model's class."""
    monkeypatch.setattr(loader, "get_device_capability", lambda *_: (9, 0))
    nothing = (SimpleNamespace(packed_modules_mapping={}), "")
    monkeypatch.setattr(loader, "get_model_architecture", lambda *_: nothing)


def drawing(rng: torch.Generator) -> Draw:
    """Returns a function that draws one of its arguments; the first one is likely."""

    def draw(*values: Any) -> Any:
        if float(torch.rand((), generator=rng)) < 0.6:
            return values[0]
        return values[int(torch.randint(len(values), (), generator=rng))]

    return draw


ABSENT = object()


def fields(**given: Any) -> Config:
    return {name: value for name, value in given.items() if value is not ABSENT}


def names(draw: Draw, place: str) -> Any:
    of_layer = f"model.layers.1.{place}"
    listed = [f"{of_layer}.experts", of_layer, "lm_head", "experts", f"{of_layer}.experts*", f"{of_layer}.gate", "1"]
    listed += [f"re:.*layers[.]1[.]{place}.*", f"{of_layer}.experts.0.gate_proj", f"{of_layer}.shared_experts"]
    return draw(ABSENT, [draw(*listed)], [draw(*listed[1:]), draw(*listed[3:])], [])


def fp8(draw: Draw, place: str) -> Config:
    of_all = draw(FP8, FP8, MXFP8, {"quant_method": "fp8", "activation_scheme": "static"}, HYBRID)
    more = fields(
        ignored_layers=draw(ABSENT, ABSENT, None, names(draw, place)),
        modules_to_not_convert=draw(names(draw, place), ABSENT),
        ignore=names(draw, place),
        activation_scheme=draw(of_all["activation_scheme"], "static", None),
    )
    return {**of_all, **more}


def of_compressed_tensors(draw: Draw, place: str) -> Config:
    by_channel = {"num_bits": 8, "strategy": draw("channel", "tensor")}
    inputs = {"num_bits": 8, "strategy": draw("token", "tensor"), "dynamic": True}
    float8 = compressed(by_channel, inputs, format=draw("float-quantized", "dense", None))
    whole = changed(INT4, group_size=draw(32, 64, None, -1, 48), strategy=draw("group", "channel", None))
    if (group := whole["config_groups"]["group_0"]["weights"])["strategy"] != "group":
        group["group_size"] = draw(None, -1)
    elif group["group_size"] in (None, -1):
        group["group_size"] = 32
    whole = changed(whole, symmetric=draw(True, False), num_bits=draw(4, 8), actorder=draw(None, "weight"))
    return {**draw(float8, whole), **fields(ignore=names(draw, place))}


def awq_or_gptq(draw: Draw, place: str) -> Config:
    if draw(False, True):
        more = fields(zero_point=draw(True, False), version=draw("gemm", "gemv"), bits=draw(4, 8))
        return {**AWQ, **more, **fields(group_size=draw(32, 64, 16), modules_to_not_convert=names(draw, place))}
    config = {**GPTQ, "group_size": draw(32, -1, 16), "checkpoint_format": draw("gptq", "marlin")}
    config |= {"dynamic": draw({}, {r"-:.*layers\.1\..*": {}}, {".*gate_proj": {"bits": 8}})}
    config |= {"desc_act": draw(False, True)}
    if draw(False, False, True):
        del config["desc_act"]
    return config


def of_modelopt(draw: Draw, place: str) -> Config:
    config = {**draw(MODELOPT, MODELOPT_FP8), **fields(kv_cache_quant_algo=draw(ABSENT, "FP8", None))}
    config |= {"quant_method": draw("modelopt", "modelopt_fp4", "modelopt_fp8")}
    del config["ignore"]
    algorithm = draw(config["quant_algo"], "nvfp4", "MXFP8", "NVFP4_AWQ", "MIXED_PRECISION")
    excluded = {draw("ignore", "exclude_modules", "modules_to_not_convert"): draw(names(draw, place), None)}
    config |= {"quant_algo": algorithm, **fields(**excluded)}
    if algorithm == "MIXED_PRECISION":
        layers = [f"model.layers.{layer}.{place}.experts.0.up_proj" for layer in range(LAYERS)]
        of_layers = {name: {"quant_algo": draw("NVFP4", "FP8", "MXFP8", "nvfp4", "INT4_AWQ")} for name in layers}
        config["quantized_layers"] = draw(of_layers, dict(list(of_layers.items())[:2]))
    return config


KINDS = [fp8, of_compressed_tensors, awq_or_gptq, of_modelopt]


def model(architecture: str, shape: Shape) -> Config:
    sizes = {"hidden_size": shape.hidden, "moe_intermediate_size": shape.intermediate, "head_dim": 64}
    config = {"architectures": [architecture], "num_hidden_layers": LAYERS, "num_attention_heads": 4, **sizes}
    config |= {"num_key_value_heads": 2, "vocab_size": 64, "intermediate_size": 256, "torch_dtype": "bfloat16"}
    if architecture == "NemotronHForCausalLM":
        config |= {"model_type": "nemotron_h", "n_routed_experts": shape.experts, "mlp_hidden_act": "relu2"}
        config |= {"hybrid_override_pattern": "E" * LAYERS, "mamba_num_heads": 4, "mamba_head_dim": 64}
        config |= {"n_groups": 1, "ssm_state_size": 16}
    else:
        config |= {"model_type": "qwen3_moe", "num_experts": shape.experts}
    return {**config, "num_experts_per_tok": shape.top_k}


def built(folder: Path, architecture: str, shape: Shape, flags: list[str]) -> list[str]:
    """Returns the format of each layer that SGLang builds of a folder, or what it raises."""
    plain = {"activation": "relu2", "is_gated": False} if architecture == "NemotronHForCausalLM" else {}
    try:
        asked = "oxmoe" if "--quantization oxmoe" in flags else None
        of_model = ModelConfig(model_path=str(folder), dtype="bfloat16", quantization=asked)
        config = loader._get_quantization_config(of_model, LoadConfig())
        found = []
        for layer in range(LAYERS):
            module = FusedMoE(
                num_experts=shape.experts,
                hidden_size=shape.hidden,
                intermediate_size=shape.intermediate,
                layer_id=layer,
                top_k=shape.top_k,
                params_dtype=torch.bfloat16,
                quant_config=config,
                prefix=f"model.layers.{layer}.{PLACES[architecture]}.experts",
                **plain,
            )
            if not getattr(module.quant_method, "oxmoe", False):
                return [f"SGLang's {type(module.quant_method).__name__}"]
            fill(module)
            module.quant_method.process_weights_after_loading(module)
            found.append(getattr(module.quant_method, "sized_as", "bf16"))
    except (AssertionError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
        return [f"{type(error).__name__}: {error}"]
    return found


FORMATS = {"fp8, 128": "fp8_block", "fp8, a": "fp8_tensor", "MXFP8": "mxfp8", "NVFP4": "nvfp4", "int4": "int4"}


def formats_of(report: Any) -> list[str]:
    """Returns the format of each layer by `check`."""
    of_layers = {layer: kind.format for kind in report.kinds if kind.kind == "moe" for layer in kind.layers}
    short = (
        next((FORMATS[of] for of in FORMATS if text.startswith(of)), text) for _, text in sorted(of_layers.items())
    )
    return list(short)


def is_stricter(reason: str) -> bool:
    """Whether a refusal is for what the layers do not show: linear layers, or layers whose tensors are of no format."""
    of_linear = "SGLang's linear layers" in reason
    return of_linear or any(
        words in reason for words in ("takes it for W4AFP8", "no config_group", "NVFP4_AWQ is not served", "INT4_AWQ")
    )


@only_newest
@pytest.mark.parametrize("kind", KINDS)
def test_random_configs(kind: Callable[[Draw, str], Config], tmp_path: Path, rng: torch.Generator) -> None:
    draw, served = drawing(rng), 0
    for number in range(20):
        architecture = draw("Qwen3MoeForCausalLM", "NemotronHForCausalLM")
        shape = Shape("check", draw(4, 6), 2, draw(256, 128, 192), draw(256, 128, 96, 80))
        config, quantised = model(architecture, shape), kind(draw, PLACES[architecture])
        folder = tmp_path / str(number)  # SGLang remembers a config by its folder
        folder.mkdir()
        if kind is of_modelopt and draw(False, True):
            section = {name: value for name, value in quantised.items() if name != "quant_method"}
            (folder / "hf_quant_config.json").write_text(
                json.dumps({"producer": {"name": "modelopt"}, "quantization": section})
            )
            quantised = {"hf_quant_config.json": section}
        else:
            config["quantization_config"] = copy.deepcopy(quantised)
        (folder / "config.json").write_text(json.dumps(config))
        report = judge(read(str(folder)), Server(VERSION, 1, 1, "sm_90"), [1])
        with server():
            found = built(folder, architecture, shape, report.flags)
        if report.served:
            served += 1
            assert formats_of(report) == found, (architecture, shape, quantised)
        elif set(found) <= {*FORMATS.values(), "bf16"}:
            in_file = "hf_quant_config.json" in quantised and "MXFP8 in hf_quant" in report.refused[0]
            assert in_file or is_stricter(report.refused[0]), (report.refused, found, architecture, shape, quantised)
    assert served
