"""W4AFP8 checkpoints in SGLang's layers, by its own loader: int4 experts with bf16 activations."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Shape, make_routing
from int4_cases import Int4, make
from oxmoe import reference
from oxmoe.testing import assert_close_ulp, relative_norm, same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import QUANTIZATION_METHODS, w4afp8
from sglang.srt.model_loader.loader import DefaultModelLoader

from oxmoe.sglang import int4, layers
from sglang_server import installed, only_cores, server
from test_sglang_compressed import empty_layer, load, rank
from test_sglang_deepep import check as check_dispatched
from test_sglang_deepep import poisoned
from test_sglang_eplb import PLACES, move
from test_sglang_fp8 import forward
from test_sglang_int4 import part_of
from test_sglang_updates import Model, bits, write

__all__ = ["poisoned"]

CONFIG = {"quant_method": "w4afp8"}
SHAPE = Shape("sglang-w4afp8", 4, 2, 256, 256)
Tensors = dict[str, Callable[[int, str], Tensor]]


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


def drawn(rng: torch.Generator) -> Int4:
    return make(SHAPE, rng, group=128)


def twos_complement(codes: Tensor) -> Tensor:
    """Returns int8 as such a checkpoint holds the same weights: each code from 0 to 15 less 8, in four bits."""
    low, high = ((part.to(torch.int16) - 8) & 15 for part in (codes & 15, codes >> 4))
    return (low | high << 4).to(torch.uint8).view(torch.int8)


def tensors(layer: Int4, input_scale: float = 0.03, of_up: float = 2.0) -> Tensors:
    """of_up: the scale of up's activations over that of gate's. SGLang's own loader refuses two that differ."""

    def of(w13: Tensor, w2: Tensor) -> Callable[[int, str], Tensor]:
        return lambda expert, shard: w2[expert] if shard == "w2" else w13[expert].chunk(2)[shard == "w3"]

    return {
        "weight": of(twos_complement(layer.w13), twos_complement(layer.w2)),
        "weight_scale_inv": of(layer.w13_scale, layer.w2_scale),
        "input_scale": lambda expert, shard: torch.tensor(input_scale * (of_up if shard == "w3" else 1)).bfloat16(),
    }


def made(device: str, layer: Int4 | None = None, **options: Any) -> Any:
    module = empty_layer(SHAPE, CONFIG, device, of="w4afp8", **options)
    if layer is not None:
        load(module, tensors(layer))
    return module


def given(rng: torch.Generator, tokens: int = 9, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Any]:
    weights, ids = (part.to(device) for part in make_routing("uniform", tokens, SHAPE.experts, SHAPE.top_k, rng))
    x = torch.randn((tokens, SHAPE.hidden), generator=rng).bfloat16().to(device)
    return x, weights, ids, StandardTopKOutput(weights, ids, None)


@pytest.mark.parametrize("options", [{}, {"routed_scaling_factor": 2.5}], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_layers(device: str, tokens: int, options: dict[str, Any], rng: torch.Generator) -> None:
    """The layer has the bits of ExpertWeights.int4, and near the numbers of the weights that codes and scales stand
    for."""
    layer = drawn(rng)
    x, weights, ids, topk = given(rng, tokens, device)
    with server():
        module = made(device, layer, **options)
        assert type(module.quant_method) is int4.OxmoeW4AFp8MoEMethod
        layers.check_layer(module)
        result = forward(module, x, topk)
    layer = layer.to(device)
    assert same_bits(result, oxmoe.moe(x, layer.weights(), weights, ids, **options))
    if tokens:
        wanted = reference.moe(x, *layer.plain(), topk_weights=weights, topk_ids=ids, **options)
        assert_close_ulp(result, wanted)


def test_numbers_are_the_checkpoints(rng: torch.Generator) -> None:
    """The numbers are computed apart: a signed number of four bits times its group's scale."""
    layer = drawn(rng)
    signed = twos_complement(layer.w2).to(torch.int16)
    low, high = (signed << 12) >> 12, signed >> 4
    numbers = torch.stack([low, high], -1).flatten(-2).float()
    plain = (numbers * layer.w2_scale.float().repeat_interleave(128, -1)).bfloat16()
    assert same_bits(plain, layer.plain()[1])


def test_scales_in_fp32_are_rounded_as_sglangs(rng: torch.Generator) -> None:
    layer = make(SHAPE, rng, group=128, scale_dtype=torch.float32)
    x, weights, ids, topk = given(rng)
    with server():
        result = forward(made("cpu", layer), x, topk)
    rounded = dataclasses.replace(layer, w13_scale=layer.w13_scale.bfloat16(), w2_scale=layer.w2_scale.bfloat16())
    assert same_bits(result, oxmoe.moe(x, rounded.weights(), weights, ids))


def test_scales_of_activations_are_not_used(rng: torch.Generator) -> None:
    layer = drawn(rng)
    x, _, _, topk = given(rng)
    with server():
        results = []
        for scale in (0.001, 100.0):
            module = made("cpu")
            load(module, tensors(layer, scale))
            results.append(forward(module, x, topk))
    assert same_bits(*results)


def test_codes_are_in_memory_once(rng: torch.Generator) -> None:
    with server():
        module = made("cpu", drawn(rng))
    for name in ("w13", "w2"):
        own, weights = getattr(module, f"{name}_weight"), module.quant_method.weights
        assert own.data_ptr() == getattr(weights, name).data_ptr()


@pytest.mark.gpu
def test_packed_weights_are_in_memory_once(rng: torch.Generator) -> None:
    """Parameters have the packed codes' memory. After an update addresses are as before, and weights are the new
    ones."""
    x, weights, ids, topk = given(rng, 33, "cuda")
    with server():
        module, addresses = made("cuda"), []
        for _ in range(2):
            layer = drawn(rng)
            module.quant_method.restore_weights_before_loading(module)
            load(module, tensors(layer))
            packed = [*module.quant_method.weights.w13_packed, *module.quant_method.weights.w2_packed]
            addresses.append([tensor.data_ptr() for tensor in packed])
            assert module.w13_weight.data_ptr() == packed[0].data_ptr()
            assert module.w2_weight.data_ptr() == packed[3].data_ptr()
            assert same_bits(forward(module, x, topk), oxmoe.moe(x, layer.to("cuda").weights(), weights, ids))
    assert addresses[0] == addresses[1]


@pytest.mark.gpu
@only_cores
def test_beside_sglangs_own_method(rng: torch.Generator) -> None:
    """SGLang's kernels round activations to e4m3 by the checkpoint's scales: that is 2 to 4 % in norm. oxmoe's layer
    is nearer to the weights' numbers."""
    pytest.importorskip("sgl_kernel")
    shape = Shape("sglang-w4afp8-large", 8, 2, 1024, 512)
    layer = make(shape, rng, group=128)
    weights, ids = (part.cuda() for part in make_routing("skewed", 33, shape.experts, shape.top_k, rng))
    topk = StandardTopKOutput(weights, ids, torch.zeros((33, shape.experts), device="cuda"))
    x, results = torch.randn((33, shape.hidden), generator=rng).bfloat16().cuda(), []
    with server():
        for of in ("w4afp8", w4afp8.W4AFp8Config):
            module = empty_layer(shape, CONFIG, "cuda", of=of, inplace=False)
            assert isinstance(module.quant_method, int4.OxmoeW4AFp8MoEMethod) == (of == "w4afp8")
            load(module, tensors(layer, of_up=1))
            results.append(forward(module, x.clone(), topk).double())
    plain = [matrix.cuda().double() for matrix in layer.plain()]
    exact = reference.moe(x.double(), *plain, topk_weights=weights.double(), topk_ids=ids)
    ours, theirs = (relative_norm(result, exact) for result in results)
    assert ours < 5e-3 and ours < theirs < 6e-2


@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json"])
def test_checkpoints_come_to_us(place: str, tmp_path: Path) -> None:
    """The configs are those of DeepSeek-V3.1-Terminus-W4AFP8 and DeepSeek-R1-W4AFP8."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.weight_utils import get_quant_config

    config: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    config |= {"num_hidden_layers": 1, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 64}
    if place == "config.json":
        config["quantization_config"] = CONFIG
    else:
        beside = {"quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}}
        (tmp_path / place).write_text(json.dumps(beside))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with server():
        model = ModelConfig(model_path=str(tmp_path), dtype="bfloat16")
        found = get_quant_config(model, LoadConfig(), {})
    assert model.quantization == "w4afp8" and type(found) is int4.OxmoeW4AFp8Config
    # SGLang's models and loaders choose by this name.
    assert found.get_name() == "w4afp8"


def test_parameters_have_the_names_of_sglangs() -> None:
    with server():
        module = made("cpu")
        theirs = torch.nn.Module()
        method = w4afp8.W4AFp8MoEMethod(module.quant_config)
        loader = module.w13_weight.weight_loader
        method.create_weights(
            theirs, SHAPE.experts, SHAPE.hidden, SHAPE.intermediate, torch.bfloat16, weight_loader=loader
        )
    assert {name for name, _ in theirs.named_parameters()} == {name for name, _ in module.named_parameters()}
    for name in ("w13_weight", "w2_weight", "w13_weight_scale_inv", "w2_weight_scale_inv"):
        assert getattr(theirs, name).shape == getattr(module, name).shape


def test_another_checkpoint_is_refused_at_load(rng: torch.Generator) -> None:
    """Older releases of SGLang take each mixture of ModelOpt's for W4AFP8: NVFP4's codes have the same shapes."""
    given_tensors = tensors(drawn(rng))
    del given_tensors["weight_scale_inv"], given_tensors["input_scale"]
    with server():
        module = made("cpu")
        with pytest.raises(ValueError, match=r"no w13_weight_scale_inv .* no w2_weight_scale_inv .* not W4AFP8"):
            load(module, given_tensors)


def test_what_is_not_served_is_refused_by_name() -> None:
    with server():
        with pytest.raises(NotImplementedError, match=r"W4AFP8 experts need --dtype bfloat16, got torch\.float16"):
            empty_layer(SHAPE, CONFIG, "cpu", of="w4afp8", params_dtype=torch.float16)
        with pytest.raises(NotImplementedError, match="hidden_size 192 is no multiple of the group size 128"):
            empty_layer(dataclasses.replace(SHAPE, hidden=192), CONFIG, "cpu", of="w4afp8")
    message = (
        r"mooncake .* always sends fp8, but oxmoe with int4.* start with another --moe-a2a-backend \(none, deepep,"
    )
    with server(a2a="mooncake"), pytest.raises(ValueError, match=message):
        empty_layer(SHAPE, CONFIG, "cpu", of="w4afp8")


@only_cores
@pytest.mark.parametrize(("ranks", "number"), [(2, 0), (2, 1)])
def test_tensor_parallel_rank(ranks: int, number: int, rng: torch.Generator) -> None:
    layer = drawn(rng)
    x, weights, ids, topk = given(rng)
    with server(**rank(number, "moe_tp")):
        module = made("cpu", layer)
        result = forward(module, x, topk)
    part = part_of(layer, number, ranks, 128).weights()
    assert part.intermediate_size == 128 and same_bits(result, oxmoe.moe(x, part, weights, ids))


@only_cores
def test_expert_parallel_rank(rng: torch.Generator) -> None:
    """The layer is that of the second of two ranks: its experts' tensors and ids."""
    half, layer = SHAPE.experts // 2, drawn(rng)
    x, weights, ids, _ = given(rng)
    with server(**rank(1, "moe_ep")):
        module = made("cpu", layer)
        assert module.quant_method.weights.num_experts == half
        local = StandardTopKOutput(weights, torch.where(ids >= half, ids - half, -1).int(), None)
        result = module.quant_method.apply(module, StandardDispatchOutput(x, None, local)).hidden_states
    assert same_bits(result, oxmoe.moe(x, layer.weights(), weights, torch.where(ids >= half, ids, -1).int()))


@pytest.mark.usefixtures("poisoned")
def test_behind_an_all_to_all(rng: torch.Generator) -> None:
    """DeepEP's bf16 tokens in both modes give the bits of `moe`."""
    layer = drawn(rng)
    x, weights, ids, _ = given(rng, 11)
    with server():
        module = made("cpu", layer)
    with server(a2a="deepep"):
        check_dispatched(
            lambda dispatched: module.quant_method.apply(module, dispatched),
            layer.weights(),
            lambda *operands: torch.empty(0),  # stands for a call on GPUs
            x,
            (weights, ids),
            SHAPE.experts,
        )


def test_experts_move_with_rows_of_parameters(rng: torch.Generator) -> None:
    x, weights, ids, topk = given(rng)
    with server():
        module = made("cpu", drawn(rng))
        before = forward(module, x, topk)
        move(module)
        moved = StandardTopKOutput(weights, torch.argsort(PLACES)[ids.long()].int(), None)
        assert not same_bits(forward(module, x, topk), before)
        assert same_bits(forward(module, x, moved), before)


# Updates


def test_an_update_by_sglangs_loader_is_right(device: str, rng: torch.Generator) -> None:
    """An update may have other scales of activations, or none; the codes are turned once."""
    old, new = drawn(rng), drawn(rng)
    x, weights, ids, topk = given(rng, device=device)
    with server():
        module = made(device, old)
        forward(module, x, topk)
        target = torch.device(device)
        DefaultModelLoader.load_weights_and_postprocess(Model(module), list(tensors(new, 0.5).items()), target)
        result = forward(module, x, topk)
        DefaultModelLoader.load_weights_and_postprocess(Model(module), [], target)
        assert same_bits(forward(module, x, topk), result)
    assert same_bits(result, oxmoe.moe(x, new.to(device).weights(), weights, ids))


def test_an_update_that_is_not_processed_is_refused(rng: torch.Generator) -> None:
    x, _, _, topk = given(rng)
    with server():
        module = made("cpu", drawn(rng))
        before, result = bits(module), forward(module, x, topk)
        with pytest.raises(RuntimeError, match="layer 0: W4AFP8 experts were prepared at load"):
            write(module, tensors(drawn(rng)))
        assert all(same_bits(*pair) for pair in zip(bits(module), before, strict=True))
        assert same_bits(forward(module, x, topk), result)


def test_the_quantization_is_replaced_once() -> None:
    assert QUANTIZATION_METHODS["w4afp8"] is int4.OxmoeW4AFp8Config
    assert issubclass(int4.OxmoeW4AFp8Config, w4afp8.W4AFp8Config)
