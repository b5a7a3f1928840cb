"""`python -m oxmoe check` says what SGLang's layer classes do with oxmoe's quantization."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases import Shape
from check_configs import (
    AWQ,
    GPTQ,
    INT4,
    MODELOPT,
    MODELOPT_FP8,
    MXFP4,
    MXFP8,
    ONE_SCALE,
    Config,
    changed,
    gpt_oss,
    qwen3_30b,
)
from oxmoe import __main__
from oxmoe.sglang import capabilities
from oxmoe.tools.check import skipping

pytest.importorskip("sglang")

from sglang.srt.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from sglang.srt.layers.quantization.compressed_tensors.utils import find_matched_target, should_ignore_layer
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.utils import is_layer_skipped

from sglang_server import VERSION, FusedMoE, installed, server
from test_sglang_compressed import BLOCKS, CHANNEL, FP8_STATIC, STATIC, TENSOR, W4A4, W4A16, checkpoint, empty_layer
from test_sglang_fp8 import CHECKPOINT

only_newest = pytest.mark.skipif(VERSION != capabilities.LAST, reason="names and ranks are the newest release's")
BLOCKS_OF_64 = {**CHECKPOINT, "weight_block_size": [64, 64]}
W8A16 = checkpoint({"num_bits": 8, "strategy": "channel"}, None)
QUANTISED: dict[str, Config | None] = {
    "bf16": None,
    "fp8 blocks": CHECKPOINT,
    "fp8 blocks, static": {**CHECKPOINT, "activation_scheme": "static"},
    "fp8 without a scheme": {"quant_method": "fp8"},
    "fp8 blocks of 64": BLOCKS_OF_64,
    "fp8 one scale": ONE_SCALE,
    "fp8 static": FP8_STATIC,
    "MXFP8": MXFP8,
    "channel": CHANNEL,
    "tensor": TENSOR,
    "tensor, static": STATIC,
    "compressed blocks": BLOCKS,
    "W8A16": W8A16,
    "W4A16": W4A16,
    "W4A4": W4A4,
    "int4": INT4,
    "int8": changed(INT4, num_bits=8),
    "int4 with zeros": changed(INT4, symmetric=False, group_size=64),
    "int4, groups of 16": changed(INT4, group_size=16),
    "awq": AWQ | {"group_size": 32},
    "awq of 64": AWQ | {"group_size": 64},
    "awq without a size": {"quant_method": "awq"},
    "awq, experts left": AWQ | {"modules_to_not_convert": ["experts"]},
    "gptq": GPTQ | {"group_size": 32},
    "gptq with an order": GPTQ | {"desc_act": True},
    "gptq, experts left": GPTQ | {"dynamic": {r"-:.*\.experts\..*": {}}},
    "ModelOpt": MODELOPT,
    "ModelOpt W4A16": {**MODELOPT, "quant_algo": "W4A16_NVFP4"},
    "ModelOpt AWQ": {**MODELOPT, "quant_algo": "NVFP4_AWQ"},
    "ModelOpt fp8": MODELOPT_FP8,
    "MXFP4 without alpha": MXFP4,
}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


def checked(folder: Path, config: Config, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    capsys.readouterr()
    status = __main__.main(["check", str(path), "--sglang", VERSION, "--json", *arguments])
    report = json.loads(capsys.readouterr().out)
    assert status == (0 if report["served"] else 1)
    return report


def fill(module: torch.nn.Module) -> None:
    """Fills weights with zeros and scales with one, in place of a checkpoint."""
    for name, parameter in module.named_parameters():
        if parameter.dtype == torch.float32:
            parameter.data.fill_(1)
        elif "g_idx" not in name:  # a parameter without a tensor in the checkpoint stays as it is
            parameter.data.view(torch.uint8).zero_()


def runs(shape: Shape, quantised: Config | None, **options: Any) -> str | None:
    """Loads SGLang's layer as a server would. Returns why that cannot be, or None."""
    try:
        if quantised is not None and quantised["quant_method"] == "modelopt":
            name = "modelopt_fp8" if quantised["quant_algo"] == "FP8" else "modelopt_fp4"
            module = empty_layer(shape, quantised, "cpu", of=name, **options)
        elif quantised is not None:
            ours = QUANTIZATION_METHODS["oxmoe"].override_quantization_method(copy.deepcopy(quantised), None)
            if ours != "oxmoe":
                return "SGLang's own method"
            module = empty_layer(shape, quantised, "cpu", **options)
        else:
            module = FusedMoE(
                num_experts=shape.experts,
                hidden_size=shape.hidden,
                intermediate_size=shape.intermediate,
                layer_id=0,
                top_k=shape.top_k,
                params_dtype=torch.bfloat16,
                quant_config=get_quantization_config("oxmoe")(),
                **options,
            )
        if not getattr(module.quant_method, "oxmoe", False):
            return f"{type(module.quant_method).__name__}"
        fill(module)
        module.quant_method.process_weights_after_loading(module)
    except (AssertionError, NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


MIXTURE = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
OF_FP8 = {"model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "FP8"}}
OF_NVFP4 = {"model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
# Each text of hf_quant_config.json has the words by which `check` names the format or its refusal.
BESIDE: dict[str, tuple[Config, dict[str, str]]] = {
    "no layers": (MIXTURE, {"w4afp8": "int4 of W4AFP8"}),
    "empty layers": ({**MIXTURE, "quantized_layers": {}}, {"w4afp8": "int4 of W4AFP8"}),
    "fp8 layers": ({**MIXTURE, "quantized_layers": OF_FP8}, {"w4afp8": "takes it for W4AFP8"}),
    "NVFP4 layers": (
        {**MIXTURE, "quantized_layers": OF_NVFP4},
        {"w4afp8": "takes it for W4AFP8", "modelopt_mixed": "NVFP4 of ModelOpt"},
    ),
}


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json"])
def test_mixtures_are_read_as_sglang_reads_them(
    place: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.weight_utils import get_quant_config

    said, words = BESIDE[name]
    config = qwen3_30b(None) | {"model_type": "qwen3_moe", "num_attention_heads": 32, "vocab_size": 64}
    if place == "config.json":
        config["quantization_config"] = {**said, "quant_method": "modelopt"}
    else:
        (tmp_path / place).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with server():
        model = ModelConfig(model_path=str(tmp_path), dtype="bfloat16")
        found = get_quant_config(model, LoadConfig(), {})
    __main__.main(["check", str(tmp_path), "--sglang", VERSION, "--json"])
    report = json.loads(capsys.readouterr().out)
    answers = [*report["refused"], *(kind["format"] for kind in report["kinds"] if kind["kind"] == "moe")]
    assert found.get_name() == model.quantization and any(words[model.quantization] in answer for answer in answers)
    assert model.quantization != "w4afp8" or found.get_min_capability() == 90
    assert report["served"] is ("takes it" not in words[model.quantization])


def small(config: Config, shape: Shape, intermediate: str) -> Config:
    sizes = {"num_experts_per_tok": shape.top_k, "hidden_size": shape.hidden, intermediate: shape.intermediate}
    experts = "num_experts" if "num_experts" in config else "num_local_experts"
    return {**config, **sizes, experts: shape.experts, "num_hidden_layers": 1}


@pytest.mark.parametrize("intermediate", [256, 192, 96, 80, 88])
@pytest.mark.parametrize("name", QUANTISED)
def test_formats(name: str, intermediate: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised, shape = QUANTISED[name], Shape("check", 8, 2, 256, intermediate)
    report = checked(tmp_path, small(qwen3_30b(quantised), shape, "moe_intermediate_size"), capsys)
    with server():
        why = runs(shape, quantised)
    assert report["served"] == (why is None), (why, report["refused"])


@pytest.mark.parametrize("intermediate", [256, 192, 90])
@pytest.mark.parametrize("name", ["MXFP4", "bf16", "fp8 blocks", "fp8 one scale", "MXFP8"])
def test_gpt_oss(name: str, intermediate: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised = {**QUANTISED, "MXFP4": MXFP4}[name]
    shape = Shape("check", 8, 2, 256, intermediate, bias=True)
    report = checked(tmp_path, small(gpt_oss(quantised=quantised), shape, "intermediate_size"), capsys)
    with server():
        why = runs(shape, quantised, with_bias=True, gemm1_alpha=1.702, gemm1_clamp_limit=7.0)
    assert report["flags"] == (["--quantization oxmoe"] if quantised is None else [])
    assert report["served"] == (why is None), (why, report["refused"])


@only_newest
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize(
    "name", ["bf16", "fp8 blocks", "fp8 one scale", "MXFP8", "W4A16", "ModelOpt", "int4", "int4 with zeros", "gptq"]
)
def test_ranks(name: str, tp: int, ep: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised, shape = QUANTISED[name], Shape("check", 8, 2, 256, 384)
    config = small(qwen3_30b(quantised), shape, "moe_intermediate_size")
    report = checked(tmp_path, config, capsys, "--tp", str(tp), "--ep", str(ep))
    with server(moe_tp_size=tp // ep, moe_ep_size=ep, tp_size=tp, attn_tp_size=tp):
        why = runs(shape, quantised)
    assert report["served"] == (why is None), (why, report["refused"])


@pytest.mark.parametrize("name", ["fp8 one scale", "fp8 static", "channel", "tensor", "tensor, static"])
def test_sizes_are_refused_before_a_checkpoint_is_read(name: str) -> None:
    """The error comes while SGLang builds the layer, and says what to do."""
    message = "must be a multiple of 128 and .* one of 16, got intermediate_size of a rank 200; start with --ep-size"
    quantised = QUANTISED[name]
    assert quantised is not None
    with server():
        with pytest.raises(NotImplementedError, match=message):
            empty_layer(Shape("check", 8, 2, 256, 200), quantised, "cpu")
        with pytest.raises(NotImplementedError, match="one of 16, got hidden_size 192; start"):
            empty_layer(Shape("check", 8, 2, 192, 176), quantised, "cpu")
        layer = empty_layer(Shape("check", 8, 2, 256, 176), quantised, "cpu")
    assert layer.w13_weight.shape == (8, 352, 256) and layer.w2_weight.shape == (8, 256, 176)


@pytest.mark.parametrize("name", ["fp8 blocks", "compressed blocks"])
@pytest.mark.parametrize("intermediate", [192, 160])
def test_blocks_that_ranks_cut_are_refused_before_a_checkpoint_is_read(name: str, intermediate: int) -> None:
    """The sizes are Qwen3-235B's, MiniMax-M2's and Step-3.5's on eight ranks."""
    message = f"must be multiples of 128, got intermediate_size of a rank {intermediate}; start with --ep-size"
    quantised = QUANTISED[name]
    assert quantised is not None
    with server(), pytest.raises(NotImplementedError, match=message):
        empty_layer(Shape("check", 8, 2, 256, intermediate), quantised, "cpu")


NAMES = [f"model.layers.{layer}.mlp.experts" for layer in (1, 7, 17)]
IGNORED = [
    [],
    ["lm_head"],
    ["model.layers.7"],
    ["layers.7."],
    ["mlp"],
    ["mlp.gate", "model.layers.7.mlp.gate"],
    ["model.layers.7.mlp.experts.0.gate_proj"],
    ["model.layers.1.mlp.shared_experts"],
    ["experts"],
    ["model.layers.17.mlp.experts"],
]


@only_newest
@pytest.mark.parametrize("ignored", IGNORED, ids=str)
def test_layers_that_fp8_leaves(ignored: list[str]) -> None:
    config = Fp8Config.from_config({**CHECKPOINT, "modules_to_not_convert": list(ignored)})
    for name in NAMES:
        assert skipping.fp8_skips(name, ignored) == is_layer_skipped(name, config.ignored_layers)


@only_newest
@pytest.mark.parametrize(
    "ignored",
    [*IGNORED, ["*mlp*"], ["model.layers.7*"], ["7"], ["expert*"], ["*.mixer.*"], ["model.layers.1.mlp.expert"]],
    ids=str,
)
def test_layers_that_modelopt_leaves(ignored: list[str]) -> None:
    config = get_quantization_config("modelopt_fp4").from_config({**MODELOPT, "ignore": list(ignored)})
    for name in [*NAMES, "language_model.model.layers.7.mlp.experts", "backbone.layers.7.mixer.experts"]:
        assert skipping.modelopt_skips(name, ignored) == config.is_layer_excluded(name)


@only_newest
@pytest.mark.parametrize(
    "ignored",
    [*IGNORED, ["re:.*7.*"], ["re:mlp"], ["re:.*gate_proj$"], ["experts.0.up_proj"], ["0.up_proj"], ["proj"]],
    ids=str,
)
def test_layers_that_compressed_tensors_leave(ignored: list[str]) -> None:
    for name in NAMES:
        for part in ("gate", "up", "down"):
            full = f"{name}.0.{part}_proj"
            assert skipping.compressed_skips(full, ignored) == should_ignore_layer(full, ignored)


@pytest.mark.parametrize(
    "targets",
    [
        ["Linear"],
        ["FusedMoE"],
        ["re:.*self_attn.*", "Linear"],
        ["Linear", "re:.*experts.*"],
        ["re:.*experts.*", "Linear"],
        ["re:.*self_attn.*"],
        ["MoE", "Linear"],
        ["model.layers.7.mlp.experts.0.gate_proj", "Linear"],
    ],
    ids=str,
)
def test_config_groups(targets: list[str]) -> None:
    """The rule gives the name that SGLang finds after it has added FusedMoE if Linear is there."""
    added = [*targets, "FusedMoE", "DeepEPMoE"] if "Linear" in targets and "FusedMoE" not in targets else targets
    layer: Any = type("FusedMoE", (SimpleNamespace,), {})()
    for name in (f"{name}.0.gate_proj" for name in NAMES):
        try:
            theirs = find_matched_target(name, layer, added)
        except ValueError:
            theirs = None
        theirs = "Linear" if theirs not in targets and theirs is not None else theirs
        assert skipping.compressed_target(name, targets) == theirs
