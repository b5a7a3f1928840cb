"""Checkpoints of compressed-tensors, and fp8 ones with a scale a matrix, in SGLang's layers by quantization "oxmoe"."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Shape, make_routing, make_x
from fp8_cases import NORM, Fp8, Fp8Tensor, make_fp8, make_fp8_tensor
from nvfp4_cases import Nvfp4
from nvfp4_cases import make as make_nvfp4
from oxmoe.testing import assert_close_ulp, relative_norm, same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

from oxmoe.sglang import compressed_tensors
from oxmoe.sglang.loading import loaded, share_memory
from sglang_server import NEW, FusedMoE, addresses_of, installed, only_cores, server
from test_sglang_deepep import check as check_dispatched
from test_sglang_deepep import poisoned
from test_sglang_fp8 import expected, forward, from_model

__all__ = ["poisoned"]

SHAPE = Shape("sglang-compressed", 8, 2, 256, 384)
FOR_TWO = Shape("sglang-two-ranks", 8, 2, 256, 512)
PREFIX = "model.layers.0.mlp.experts"
HAS_NVFP4 = "NVFP4" in compressed_tensors.KINDS
only_nvfp4 = pytest.mark.skipif(not HAS_NVFP4, reason="this SGLang has NVFP4 layers for Blackwell alone")
OF_NVFP4 = pytest.param("nvfp4", marks=only_nvfp4)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


def checkpoint(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """Returns a quantization_config as llm-compressor writes it."""
    arguments = {"type": "float", "symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": {**arguments, **weights},
        "input_activations": inputs and {**arguments, **inputs},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized" if weights["num_bits"] == 4 else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "model.layers.1.mlp.experts.0.gate_proj", "re:.*mlp.gate$"],
    }


NVFP4 = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
CHANNEL = checkpoint({"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "token", "dynamic": True})
TENSOR = checkpoint({"num_bits": 8, "strategy": "tensor"}, {"num_bits": 8, "strategy": "tensor", "dynamic": True})
STATIC = checkpoint({"num_bits": 8, "strategy": "tensor"}, {"num_bits": 8, "strategy": "tensor"})
BLOCKS = checkpoint(
    {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
    {"num_bits": 8, "strategy": "group", "group_size": 128, "dynamic": True},
)
W4A4 = checkpoint(NVFP4, {**NVFP4, "dynamic": "local"})
W4A16 = checkpoint(NVFP4, None)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FP8_STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
MODES = {"channel": (CHANNEL, "token"), "tensor": (TENSOR, "token"), "static": (STATIC, "static")}
MODES |= {"fp8": (FP8, "token"), "fp8-static": (FP8_STATIC, "static")}


def empty_layer(
    shape: Shape,
    config: dict[str, Any],
    device: str,
    prefix: str = PREFIX,
    *,
    of: str | type[Any] = "oxmoe",
    **options: Any,
) -> FusedMoE:
    """Makes a layer without weights. of: the quantization whose checkpoint it is, or a class of SGLang's own."""
    own = get_quantization_config(of) if isinstance(of, str) else of
    quant_config = own.from_config(copy.deepcopy(config))
    with torch.device(device):
        return FusedMoE(
            num_experts=shape.experts,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            layer_id=0,
            top_k=shape.top_k,
            **{"params_dtype": torch.bfloat16, **options},
            quant_config=quant_config,
            prefix=prefix,
        )


def load(module: FusedMoE, tensors: dict[str, Callable[[int, str], Tensor]]) -> None:
    """Loads a checkpoint's tensors of (expert, shard) by SGLang's own loader, expert by expert."""
    for expert in range(module.num_experts):
        for suffix, tensor in tensors.items():
            for shard in ("w1", "w3", "w2"):
                parameter = getattr(module, f"{'w2' if shard == 'w2' else 'w13'}_{suffix}")
                name = f"experts.{expert}.{shard}.{suffix}"
                parameter.weight_loader(parameter, tensor(expert, shard), name, shard_id=shard, expert_id=expert)
    module.quant_method.process_weights_after_loading(module)


def parts(w13: Tensor, w2: Tensor) -> Callable[[int, str], Tensor]:
    """Returns a function that gives the part of gate, up or down of [E, 2, ...] or [E, 2I, ...] and [E, ...]."""
    return lambda expert, shard: w2[expert] if shard == "w2" else w13[expert].chunk(2)[shard == "w3"]


def fp8_tensors(layer: Fp8Tensor, mode: str) -> dict[str, Callable[[int, str], Tensor]]:
    tensors = {"weight": parts(layer.w13, layer.w2), "weight_scale": parts(layer.w13_scale, layer.w2_scale)}
    if mode == "static":
        of_experts = [layer.w13_scale.new_full((), float(scale)) for scale in (layer.a13_scale, layer.a2_scale)]
        # The largest scale counts.
        tensors["input_scale"] = lambda expert, shard: of_experts[shard == "w2"] * (1 if expert == 5 else 0.5)
    return tensors


def drawn(name: str, device: str, rng: torch.Generator, shape: Shape = SHAPE) -> Fp8Tensor:
    channel = name == "channel"
    return make_fp8_tensor(shape, device, rng, halves=not channel, of_rows=channel)


def routed(tokens: int, device: str, rng: torch.Generator) -> tuple[Tensor, Tensor, Any]:
    weights, ids = (part.to(device) for part in make_routing("holes", tokens, SHAPE.experts, SHAPE.top_k, rng))
    return weights, ids, StandardTopKOutput(weights, ids, None)


@pytest.mark.parametrize("options", [{}, {"routed_scaling_factor": 2.5}], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("name", MODES)
def test_fp8(device: str, name: str, tokens: int, options: dict[str, Any], rng: torch.Generator) -> None:
    """Gate and up have scales of their own, which SGLang's methods make one. The bits are those of
    ExpertWeights.fp8_tensor. Few tokens have the bits of the same tokens among 33, because one token has too few
    numbers for the reference's bar."""
    config, mode = MODES[name]
    layer = drawn(name, device, rng)
    x, (weights, ids, topk) = layer.x(33, rng), routed(33, device, rng)
    few = StandardTopKOutput(weights[:tokens], ids[:tokens], None)
    with server():
        module = empty_layer(SHAPE, config, device, **options)
        load(module, fp8_tensors(layer, mode))
        assert module.quant_method.weights.w13.data_ptr() == module.w13_weight.data_ptr()
        result, among_others = forward(module, x[:tokens], few), forward(module, x, topk)
    assert result.shape == (tokens, SHAPE.hidden)
    assert same_bits(result, oxmoe.moe(x[:tokens], layer.weights(mode), weights[:tokens], ids[:tokens], **options))
    assert same_bits(result, among_others[:tokens])
    scales: Any = (layer.a13_scale, layer.a2_scale) if mode == "static" else mode
    assert relative_norm(among_others, layer.reference(x, weights, ids, scales=scales, **options)) < NORM


@pytest.mark.parametrize("intermediate", [176, 96])
@pytest.mark.parametrize("name", MODES)
def test_parts_of_ranks_that_end_inside_a_block(
    device: str, name: str, intermediate: int, rng: torch.Generator
) -> None:
    """The layer has the bits of ExpertWeights.fp8_tensor on the parameters' own weights."""
    shape, (config, mode) = dataclasses.replace(SHAPE, intermediate=intermediate), MODES[name]
    layer = drawn(name, device, rng, shape)
    with server():
        module = empty_layer(shape, config, device)
        load(module, fp8_tensors(layer, mode))
        assert module.quant_method.weights.w13.data_ptr() == module.w13_weight.data_ptr()
        x, (weights, ids, topk) = layer.x(300, rng), routed(300, device, rng)
        result = forward(module, x, topk)
        assert same_bits(result, oxmoe.moe(x, layer.weights(mode), weights, ids))
        scales: Any = (layer.a13_scale, layer.a2_scale) if mode == "static" else mode
        assert relative_norm(result, layer.reference(x, weights, ids, scales=scales)) < NORM
        for tokens in (1, 33):
            few = StandardTopKOutput(weights[:tokens], ids[:tokens], None)
            assert same_bits(forward(module, x[:tokens], few), result[:tokens])


@pytest.mark.parametrize("tokens", [0, 33])
def test_blocks(device: str, tokens: int, rng: torch.Generator) -> None:
    layer: Fp8 = make_fp8(SHAPE, device, rng)
    x, (weights, ids, topk) = layer.x(tokens, rng), routed(tokens, device, rng)
    with server():
        module = empty_layer(SHAPE, BLOCKS, device)
        scales = parts(layer.w13_scale, layer.w2_scale)
        load(module, {"weight": parts(layer.w13, layer.w2), "weight_scale": scales})
        result = forward(module, x, topk)
    made = oxmoe.ExpertWeights.fp8_block(layer.w13, layer.w2, layer.w13_scale, layer.w2_scale)
    assert same_bits(result, oxmoe.moe(x, made, weights, ids))
    if tokens:
        assert relative_norm(result, expected(layer, x, topk)) < NORM


def nvfp4_layer(shape: Shape, device: str, rng: torch.Generator) -> tuple[Nvfp4, dict[str, Any]]:
    """Returns a layer and its checkpoint, which has the numbers that global scales divide by."""
    layer = make_nvfp4(shape, rng)
    divisors = 1 / layer.w13_global, 1 / layer.w2_global
    moved = {
        field.name: value.to(device)
        for field in dataclasses.fields(layer)
        if isinstance(value := getattr(layer, field.name), Tensor)
    }
    layer = dataclasses.replace(layer, **moved | {"w13_global": 1 / divisors[0], "w2_global": 1 / divisors[1]})
    layer = dataclasses.replace(layer, w13_global=layer.w13_global.to(device), w2_global=layer.w2_global.to(device))
    codes = layer.w13_scale.view(torch.float8_e4m3fn), layer.w2_scale.view(torch.float8_e4m3fn)
    return layer, {
        "weight_packed": parts(layer.w13, layer.w2),
        "weight_scale": parts(*codes),
        "weight_global_scale": parts(divisors[0].to(device), divisors[1].to(device)),
    }


@only_nvfp4
@pytest.mark.parametrize("intermediate", [384, 176])
@pytest.mark.parametrize("config", [W4A16, W4A4], ids=["w4a16", "w4a4"])
def test_nvfp4(device: str, config: dict[str, Any], intermediate: int, rng: torch.Generator) -> None:
    """Gate and up have global scales of their own, which SGLang refuses if they differ; activations are bf16."""
    shape = Shape("sglang-nvfp4", 8, 1, 256, intermediate)
    layer, tensors = nvfp4_layer(shape, device, rng)
    if config is W4A4:
        tensors["input_global_scale"] = lambda expert, shard: torch.tensor(3.0, device=device)
    x = make_x(33, shape, torch.bfloat16, device, rng)
    experts = torch.randint(shape.experts, (33,), generator=rng).to(device)
    topk = StandardTopKOutput(torch.ones((33, 1), device=device), experts[:, None].int(), None)
    with server():
        module = empty_layer(shape, config, device)
        load(module, tensors)
        result = forward(module, x, topk)
    assert same_bits(result, oxmoe.moe(x, layer.weights(), topk.topk_weights, topk.topk_ids))
    assert_close_ulp(result, layer.expected(x, experts))


@pytest.mark.gpu
@only_nvfp4
def test_nvfp4_is_in_memory_once(rng: torch.Generator) -> None:
    """Parameters have the packed weights' memory. After an update addresses are as before, and weights are the new
    ones."""
    shape = Shape("sglang-nvfp4", 8, 1, 256, 384)
    x = make_x(33, shape, torch.bfloat16, "cuda", rng)
    ids = torch.randint(shape.experts, (33, 1), generator=rng).int().cuda()
    topk = StandardTopKOutput(torch.ones((33, 1), device="cuda"), ids, None)
    with server():
        module = empty_layer(shape, W4A16, "cuda")
        addresses = []
        for _ in range(2):
            layer, tensors = nvfp4_layer(shape, "cuda", rng)
            module.quant_method.restore_weights_before_loading(module)
            load(module, tensors)
            packed = [*module.quant_method.weights.w13_packed, *module.quant_method.weights.w2_packed]
            addresses.append([tensor.data_ptr() for tensor in packed])
            for parameter, tensor in ((module.w13_weight_packed, packed[0]), (module.w2_weight_scale, packed[4])):
                assert parameter.data_ptr() == tensor.data_ptr()
            result = forward(module, x, topk)
            assert same_bits(result, oxmoe.moe(x, layer.weights(), topk.topk_weights, ids))
    assert addresses[0] == addresses[1]


@pytest.mark.parametrize("intermediate", [384, 176])
@pytest.mark.parametrize("name", MODES)
def test_weights_are_updated_in_place(device: str, name: str, intermediate: int, rng: torch.Generator) -> None:
    """CUDA graphs know addresses: after an update every tensor is where it was."""
    shape, (config, mode) = dataclasses.replace(SHAPE, intermediate=intermediate), MODES[name]
    layers = [drawn(name, device, rng, shape) for _ in range(2)]
    layers[1].a13_scale *= 2
    x, (weights, ids, topk) = layers[0].x(9, rng), routed(9, device, rng)
    with server():
        module = empty_layer(shape, config, device)
        load(module, fp8_tensors(layers[0], mode))
        addresses = addresses_of(module.quant_method.weights)
        if mode == "static":
            # SGLang's loader refuses a scale other than the one that is there.
            for parameter in (module.w13_input_scale, module.w2_input_scale):
                parameter.data.fill_(1)
        module.quant_method.restore_weights_before_loading(module)
        load(module, fp8_tensors(layers[1], mode))
        assert addresses_of(module.quant_method.weights) == addresses
        assert same_bits(forward(module, x, topk), oxmoe.moe(x, layers[1].weights(mode), weights, ids))


def test_packed_weights_take_a_parameters_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 64, 4, dtype=torch.float8_e4m3fn), requires_grad=False)
    packed = torch.randint(0, 255, (2, 1, 1, 256), dtype=torch.uint8)
    share_memory(parameter, packed)
    assert parameter.data_ptr() == packed.data_ptr()
    assert (parameter.shape, parameter.dtype) == ((2, 64, 4), torch.float8_e4m3fn)
    larger = torch.zeros(2, 1, 1, 512, dtype=torch.uint8)
    share_memory(parameter, larger)
    assert parameter.data_ptr() == packed.data_ptr()


def changed(config: dict[str, Any], **weights: Any) -> dict[str, Any]:
    other = copy.deepcopy(config)
    other["config_groups"]["group_0"]["weights"].update(weights)
    return other


INT4 = changed(CHANNEL, type="int", num_bits=4, strategy="group", group_size=128)


@pytest.mark.parametrize(
    ("config", "asked", "answer"),
    [
        (CHANNEL, None, "oxmoe"),
        (CHANNEL, "compressed-tensors", "oxmoe"),
        (CHANNEL, "w8a8_fp8", None),
        (TENSOR, None, "oxmoe"),
        (BLOCKS, None, "oxmoe"),
        (W4A4, None, "oxmoe" if HAS_NVFP4 else None),
        (FP8, None, "oxmoe"),
        (FP8_STATIC, "fp8", "oxmoe"),
        (changed(BLOCKS, block_structure=[64, 64]), None, None),
        (INT4, None, None),
        ({**CHANNEL, "config_groups": {}}, None, None),
        ({**CHANNEL, "config_groups": {**CHANNEL["config_groups"], "1": INT4["config_groups"]["group_0"]}}, None, None),
        # These forms are not those that a config's numbers and names should have.
        ({**CHANNEL, "config_groups": [CHANNEL["config_groups"]["group_0"]]}, None, None),
        ({**CHANNEL, "config_groups": {"0": "weights"}}, None, None),
        ({**CHANNEL, "config_groups": {"0": {"weights": [8, "float"]}}}, None, None),
    ],
    ids=[
        *("channel", "asked", "other", "tensor", "block", "nvfp4", "fp8", "static", "64", "int4", "none", "mixed"),
        *("a list", "no group", "no weights"),
    ],
)
def test_checkpoints_that_are_ours(config: dict[str, Any], asked: str | None, answer: str | None) -> None:
    assert QUANTIZATION_METHODS["oxmoe"].override_quantization_method(config, asked) == answer


@only_nvfp4
@pytest.mark.parametrize(("capability", "ours"), [((9, 0), True), ((10, 0), False), ((8, 9), False)])
def test_nvfp4_is_for_hopper(capability: tuple[int, int], ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert compressed_tensors.served(W4A16) is ours and compressed_tensors.served(CHANNEL)


def test_refuses_other_checkpoints_and_tokens() -> None:
    with pytest.raises(NotImplementedError, match="compressed-tensors with layers of fp8 with a scale a tensor"):
        get_quantization_config("oxmoe").from_config(copy.deepcopy(INT4))
    message = r"{} experts need --dtype bfloat16, got torch\.float16"
    for config, name in ((CHANNEL, "compressed-tensors"), (FP8, "fp8")):
        with server(), pytest.raises(NotImplementedError, match=message.format(name)):
            empty_layer(SHAPE, config, "cpu", params_dtype=torch.float16)
    with server(), pytest.raises(NotImplementedError, match=r"intermediate_size of a rank one of 16, got .* 200"):
        empty_layer(dataclasses.replace(SHAPE, intermediate=200), CHANNEL, "cpu")


def test_layers_that_a_checkpoint_leaves_unquantised() -> None:
    ignored = {**CHANNEL, "ignore": [f"re:{PREFIX}.*"]}
    with server("oxmoe" if NEW else "auto"):
        module = empty_layer(SHAPE, ignored, "cpu")
    assert module.quant_method.oxmoe and module.w13_weight.dtype == torch.bfloat16


def test_projections_of_different_schemes() -> None:
    groups = copy.deepcopy(CHANNEL["config_groups"])
    groups["group_1"] = {**copy.deepcopy(TENSOR["config_groups"]["group_0"]), "targets": ["re:.*down_proj"]}
    with server(), pytest.raises(ValueError, match="projections of experts have different schemes"):
        empty_layer(SHAPE, {**CHANNEL, "config_groups": groups}, "cpu")


@pytest.mark.parametrize("name", MODES)
def test_dispatchers_are_told(name: str, rng: torch.Generator) -> None:
    """An all-to-all brings bf16, whatever the scales of activations are."""
    told: list[dict[str, Any]] = []
    layer = SimpleNamespace(dispatcher=SimpleNamespace(set_quant_config=told.append))
    with server(a2a="deepep"):
        loaded(layer, drawn(name, "cpu", rng).weights(MODES[name][1]))
    assert told == [{"dispatcher_output_dtype": "bf16", "bf16_dispatch": True}]


TWO = {"tp_size": 2, "attn_tp_size": 2}


def rank(number: int, of: str) -> dict[str, int]:
    """Returns a server's context: one of two ranks that share experts' columns (moe_tp) or the experts (moe_ep)."""
    return {**TWO, "tp_rank": number, "attn_tp_rank": number, f"{of}_size": 2, f"{of}_rank": number}


@only_cores
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("share", [FOR_TWO.intermediate // 2, 176])
@pytest.mark.parametrize("name", [*MODES, OF_NVFP4])
def test_tensor_parallel_rank(name: str, share: int, number: int, rng: torch.Generator) -> None:
    """SGLang's loader gives a rank its part of every tensor of the checkpoint."""
    whole = dataclasses.replace(FOR_TWO, intermediate=2 * share)
    ours = slice(number * share, (number + 1) * share)
    of_w13 = lambda rows: torch.cat([half[:, ours] for half in rows.chunk(2, 1)], 1)  # noqa: E731
    x, (weights, ids, topk) = make_x(9, SHAPE, torch.bfloat16, "cpu", rng), routed(9, "cpu", rng)
    with server(**rank(number, "moe_tp")):
        if name == "nvfp4":
            nvfp4, tensors = nvfp4_layer(whole, "cpu", rng)
            module = empty_layer(whole, W4A16, "cpu")
            codes, block = slice(ours.start // 2, ours.stop // 2), slice(ours.start // 16, ours.stop // 16)
            own = {"w13": of_w13(nvfp4.w13), "w13_scale": of_w13(nvfp4.w13_scale)}
            own |= {"w2": nvfp4.w2[..., codes], "w2_scale": nvfp4.w2_scale[..., block]}
            own = {field: tensor.contiguous() for field, tensor in own.items()}
            made = dataclasses.replace(nvfp4, **own).weights()
        else:
            config, mode = MODES[name]
            layer = drawn(name, "cpu", rng, whole)
            module, tensors = empty_layer(whole, config, "cpu"), fp8_tensors(layer, mode)
            own = {"w13": of_w13(layer.w13), "w2": layer.w2[..., ours].contiguous()}
            if name == "channel":
                own["w13_scale"] = of_w13(layer.w13_scale)
            made = dataclasses.replace(layer, **own).weights(mode)
        load(module, tensors)
        result = forward(module, x, topk)
    assert made.intermediate_size == share and same_bits(result, oxmoe.moe(x, made, weights, ids))


@only_cores
@pytest.mark.parametrize("name", ["channel", "static", OF_NVFP4])
def test_expert_parallel_rank(name: str, rng: torch.Generator) -> None:
    """The layer is that of the second of two ranks: its experts' tensors and ids."""
    half = SHAPE.experts // 2
    x, (weights, ids, _) = make_x(9, SHAPE, torch.bfloat16, "cpu", rng), routed(9, "cpu", rng)
    with server(**rank(1, "moe_ep")):
        if name == "nvfp4":
            nvfp4, tensors = nvfp4_layer(SHAPE, "cpu", rng)
            module, made = empty_layer(SHAPE, W4A16, "cpu"), nvfp4.weights()
        else:
            config, mode = MODES[name]
            layer = drawn(name, "cpu", rng)
            module, tensors, made = empty_layer(SHAPE, config, "cpu"), fp8_tensors(layer, mode), layer.weights(mode)
        load(module, tensors)
        assert module.quant_method.weights.num_experts == half
        # The ids are those that the dispatcher would make, which needs a GPU.
        local = StandardTopKOutput(weights, torch.where(ids >= half, ids - half, -1).int(), None)
        result = module.quant_method.apply(module, StandardDispatchOutput(x, None, local)).hidden_states
    theirs = torch.where(ids >= half, ids, -1).int()
    assert same_bits(result, oxmoe.moe(x, made, weights, theirs))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", ["channel", "static", "fp8-static", OF_NVFP4])
def test_behind_an_all_to_all(name: str, rng: torch.Generator) -> None:
    """DeepEP's tokens in both modes give the bits of `moe`."""
    with server():
        if name == "nvfp4":
            nvfp4, tensors = nvfp4_layer(SHAPE, "cpu", rng)
            module = empty_layer(SHAPE, W4A16, "cpu")
            made = nvfp4.weights()
        else:
            config, mode = MODES[name]
            layer = drawn(name, "cpu", rng)
            module, tensors, made = empty_layer(SHAPE, config, "cpu"), fp8_tensors(layer, mode), layer.weights(mode)
        load(module, tensors)
    weights, ids, _ = routed(11, "cpu", rng)
    x = make_x(11, SHAPE, torch.bfloat16, "cpu", rng)
    with server(a2a="deepep"):
        check_dispatched(
            lambda dispatched: module.quant_method.apply(module, dispatched),
            made,
            lambda *operands: torch.empty(0),  # stands for a call on GPUs
            x,
            (weights, ids),
            SHAPE.experts,
        )


@pytest.mark.parametrize("config", [CHANNEL, FP8], ids=["compressed-tensors", "fp8"])
def test_a_checkpoint_comes_to_us(config: dict[str, Any], tmp_path: Path) -> None:
    quantization, quant_config, layer = from_model(tmp_path, config)
    assert quantization == "oxmoe" and layer.quant_method.oxmoe
    assert quant_config.get_name() == ("fp8" if config is FP8 else "compressed_tensors")
