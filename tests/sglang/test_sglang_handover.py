"""Steps that SGLang takes with a layer by the server's --moe-runner-backend, whichever method the layer has, unless the
layer decides: rows of w13 that its loader swaps, ids of all ranks' experts, top-k weights that hold the scaling
factor."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Shape, make_layer, make_routing, make_x
from fp8_cases import make_fp8
from mxfp8_cases import make_mxfp8
from oxmoe import reference
from oxmoe.sglang import capabilities
from oxmoe.testing import assert_close_ulp, same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import BypassedTopKOutput, StandardTopKOutput, TopKConfig
from sglang.srt.layers.quantization import get_quantization_config

from sglang_server import HAS_CONTEXT, FusedMoE, installed, server

DECIDES = capabilities.layer_decides()

SHAPE = Shape("handover", 4, 2, 128, 128)
PADDED = Shape("handover-padded", 4, 2, 128, 96)
TRTLLM = ("flashinfer_trtllm", "flashinfer_trtllm_routed")
KEEPS_GLOBAL_IDS = ("flashinfer_cutlass", "flashinfer_cutedsl", "flashinfer_trtllm_routed")
FORMATS = {
    "bf16": None,
    "fp8_block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "fp8_tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "mxfp8": {"quant_method": "mxfp8", "activation_scheme": "dynamic"},
}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


def checkpoint(kind: str, shape: Shape, rng: torch.Generator) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns w13 [gate; up] and w2 for each suffix of a checkpoint's names."""
    if kind == "bf16":
        layer = make_layer(shape, torch.bfloat16, "cpu", rng)
        return {"weight": (layer.w13, layer.w2)}
    if kind == "mxfp8":
        mxfp8 = make_mxfp8(shape, "cpu", rng)
        return {"weight": (mxfp8.w13, mxfp8.w2), "weight_scale_inv": (mxfp8.w13_scale, mxfp8.w2_scale)}
    fp8 = make_fp8(shape, "cpu", rng)
    if kind == "fp8_block":
        return {"weight": (fp8.w13, fp8.w2), "weight_scale_inv": (fp8.w13_scale, fp8.w2_scale)}
    # Gate and up have scales of their own, apart by an order of magnitude.
    w13_scale = torch.rand(shape.experts, 2, generator=rng) * 0.001 + torch.tensor([0.001, 0.01])
    return {"weight": (fp8.w13, fp8.w2), "weight_scale": (w13_scale, torch.rand(shape.experts, generator=rng) * 0.01)}


def made(kind: str, tensors: dict[str, tuple[Tensor, Tensor]]) -> oxmoe.ExpertWeights:
    """Makes ExpertWeights of the checkpoint without SGLang."""
    (w13, w2), *scales = tensors.values()
    make = getattr(oxmoe.ExpertWeights, kind)
    return make(w13, w2, *scales[0]) if scales else make(w13, w2)


def loaded(
    kind: str, tensors: dict[str, tuple[Tensor, Tensor]], shape: Shape, experts: int | None = None, **options: Any
) -> FusedMoE:
    """Returns SGLang's layer, loaded expert by expert by its own loader."""
    config = get_quantization_config("oxmoe")
    module = FusedMoE(
        num_experts=experts or shape.experts,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        layer_id=0,
        top_k=shape.top_k,
        params_dtype=torch.bfloat16,
        quant_config=config() if FORMATS[kind] is None else config.from_config(FORMATS[kind]),
        **options,
    )
    for suffix, (w13, w2) in tensors.items():
        for expert in range(w2.shape[0]):
            for shard, tensor in zip(("w1", "w3", "w2"), (*w13[expert].chunk(2), w2[expert]), strict=True):
                parameter = getattr(module, f"{'w2' if shard == 'w2' else 'w13'}_{suffix}")
                # A scale of a matrix is a number.
                value = tensor.squeeze(0) if suffix == "weight_scale" and tensor.ndim else tensor
                module.weight_loader(parameter, value, f"experts.{suffix}", shard, expert)
    module.quant_method.process_weights_after_loading(module)
    return module


def forward(module: FusedMoE, x: Tensor, topk: Any) -> Tensor:
    """Runs the layer as it runs on CUDA."""
    return module.quant_method.apply(module, module.dispatcher.dispatch(x.clone(), topk)).hidden_states


def tokens(shape: Shape, experts: int, rng: torch.Generator) -> tuple[Tensor, StandardTopKOutput]:
    weights, ids = make_routing("uniform", 5, experts, shape.top_k, rng)
    return make_x(5, shape, torch.bfloat16, "cpu", rng), StandardTopKOutput(weights, ids, None)


# Rows of w13


@pytest.mark.parametrize("backend", TRTLLM)
@pytest.mark.parametrize("kind", FORMATS)
def test_gate_and_up_that_the_loader_swaps(kind: str, backend: str, rng: torch.Generator) -> None:
    tensors = checkpoint(kind, SHAPE, rng)
    x, topk = tokens(SHAPE, SHAPE.experts, rng)
    with server(backend):
        module = loaded(kind, tensors, SHAPE)
        assert not torch.equal(module.w13_weight.view(torch.uint8), tensors["weight"][0].view(torch.uint8)) or DECIDES
        result = forward(module, x, topk)
    assert same_bits(result, oxmoe.moe(x, made(kind, tensors), topk.topk_weights, topk.topk_ids))


@pytest.mark.parametrize("backend", TRTLLM)
def test_rows_that_the_loader_pads(backend: str, rng: torch.Generator) -> None:
    """The loader pads to multiples of 128 of each half, whatever the method is, unless the layer decides."""
    tensors = checkpoint("bf16", PADDED, rng)
    x, topk = tokens(PADDED, PADDED.experts, rng)
    with server(backend):
        result = forward(loaded("bf16", tensors, PADDED), x, topk)
    (w13, w2) = tensors["weight"]
    assert_close_ulp(result, reference.moe(x, w13, w2, topk.topk_weights, topk.topk_ids))


@pytest.mark.skipif(not DECIDES, reason="in this SGLang every layer's loader follows --moe-runner-backend")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_ranks_columns_that_sglang_pads(rank: int, rng: torch.Generator) -> None:
    """It pads a layer of another runner to multiples of 128, too, but cuts the checkpoint at the rank's own columns."""
    whole = Shape("handover-ranks", 4, 2, 128, 2 * PADDED.intermediate)
    tensors = checkpoint("mxfp8", whole, rng)
    x, topk = tokens(whole, whole.experts, rng)
    ranks = {"moe_tp_size": 2, "moe_tp_rank": rank, "tp_size": 2, "tp_rank": rank, "attn_tp_size": 2}
    with server("flashinfer_trtllm", **ranks, attn_tp_rank=rank):
        result = forward(loaded("mxfp8", tensors, whole), x, topk)
    own = {suffix: _of_rank(*pair, rank) for suffix, pair in tensors.items()}
    assert same_bits(result, oxmoe.moe(x, made("mxfp8", own), topk.topk_weights, topk.topk_ids))


def _of_rank(w13: Tensor, w2: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Returns a rank's half of the rows of gate and of up, and of w2's columns."""
    gate_and_up = [rows.chunk(2, dim=1)[rank] for rows in w13.chunk(2, dim=1)]
    return torch.cat(gate_and_up, dim=1), w2.chunk(2, dim=-1)[rank].contiguous()


@pytest.mark.parametrize("backend", TRTLLM)
def test_experts_without_gates(backend: str, rng: torch.Generator) -> None:
    shape = Shape("plain", 4, 2, 128, 128, options=(("activation", "relu2"),))
    layer = make_layer(shape, torch.bfloat16, "cpu", rng)
    x, topk = tokens(shape, shape.experts, rng)
    with server(backend):
        module = FusedMoE(
            num_experts=shape.experts,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            layer_id=0,
            top_k=shape.top_k,
            params_dtype=torch.bfloat16,
            quant_config=get_quantization_config("oxmoe")(),
            activation="relu2",
            is_gated=False,
        )
        for expert in range(shape.experts):
            for shard, parameter, tensor in (("w1", module.w13_weight, layer.w13), ("w2", module.w2_weight, layer.w2)):
                module.weight_loader(parameter, tensor[expert], "experts.weight", shard, expert)
        module.quant_method.process_weights_after_loading(module)
        result = forward(module, x, topk)
    expected = reference.moe(x, layer.w13, layer.w2, topk.topk_weights, topk.topk_ids, activation="relu2", gated=False)
    assert_close_ulp(result, expected)


@pytest.mark.skipif(DECIDES, reason="the layer's own runner decides how this SGLang loads it")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_weight_loader_fused": True}, "loads gate and up together, and with --moe-runner-backend"),
        ({"gemm1_alpha": 1.702}, "have alternating rows of both; choose another --moe-runner-backend"),
    ],
    ids=["fused", "alternating"],
)
@pytest.mark.parametrize("kind", FORMATS)
def test_refuses_other_orders_of_rows(kind: str, options: dict[str, Any], message: str, rng: torch.Generator) -> None:
    with server("flashinfer_trtllm"):
        module = FusedMoE(4, 128, 128, 0, 2, params_dtype=torch.bfloat16, **_config(kind), **options)
        with pytest.raises(NotImplementedError, match=message):
            module.quant_method.process_weights_after_loading(module)


@pytest.mark.skipif(DECIDES, reason="the layer's own runner decides how this SGLang loads it")
@pytest.mark.parametrize("kind", FORMATS)
def test_refuses_weights_that_the_loader_transposes(kind: str, rng: torch.Generator) -> None:
    """The error comes before any weight is loaded: with a square matrix nothing else would tell."""
    with server("triton_kernel"), pytest.raises(NotImplementedError, match="of every layer transposed; the quantizat"):
        loaded(kind, checkpoint(kind, SHAPE, rng), SHAPE)


def _config(kind: str = "bf16") -> dict[str, Any]:
    config, given = get_quantization_config("oxmoe"), FORMATS[kind]
    return {"quant_config": config() if given is None else config.from_config(given)}


# Ids of experts


def second_of_two(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns what a context overrides on rank 1 of 2 expert-parallel ranks; older releases need their functions
    replaced."""
    standard = importlib.import_module("sglang.srt.layers.moe.token_dispatcher.standard")
    monkeypatch.setattr(standard, "get_device", lambda: "cpu")
    if HAS_CONTEXT:
        sizes = dict.fromkeys(("moe_ep_size", "tp_size", "attn_tp_size"), 2)
        return {**sizes, **dict.fromkeys(("moe_ep_rank", "tp_rank", "attn_tp_rank"), 1)}
    layers = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.layer")
    for module in (layers, standard):
        monkeypatch.setattr(module, "get_moe_expert_parallel_world_size", lambda: 2)
        monkeypatch.setattr(module, "get_moe_expert_parallel_rank", lambda: 1)
    return {}


def all_experts(kind: str, rng: torch.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a checkpoint of twice as many experts, and its second half."""
    tensors = checkpoint(kind, Shape("all", 2 * SHAPE.experts, SHAPE.top_k, SHAPE.hidden, SHAPE.intermediate), rng)
    second = {name: tuple(half[SHAPE.experts :].contiguous() for half in pair) for name, pair in tensors.items()}
    return tensors, second


@pytest.mark.parametrize("backend", ["auto", *KEEPS_GLOBAL_IDS])
@pytest.mark.parametrize("kind", FORMATS)
def test_ids_of_all_ranks_experts(
    kind: str, backend: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, second = all_experts(kind, rng)
    x, topk = tokens(SHAPE, 2 * SHAPE.experts, rng)
    ranks = second_of_two(monkeypatch)
    with server(backend, **ranks):
        module = loaded(kind, tensors, SHAPE, experts=2 * SHAPE.experts)
        result = forward(module, x, topk)
    expected = oxmoe.moe(x, made(kind, second), topk.topk_weights, topk.topk_ids, ep_size=2, ep_rank=1)
    assert same_bits(result, expected)


def test_bypassed_topk_of_all_ranks(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The top-k result is the form that SGLang hands over with --moe-runner-backend flashinfer_trtllm."""
    tensors, second = all_experts("bf16", rng)
    x, _ = tokens(SHAPE, 2 * SHAPE.experts, rng)
    logits = torch.randn(5, 2 * SHAPE.experts, generator=rng)
    ranks = second_of_two(monkeypatch)
    with server("flashinfer_trtllm", **ranks):
        module = loaded("bf16", tensors, SHAPE, experts=2 * SHAPE.experts)
        result = forward(module, x, BypassedTopKOutput(x, logits, TopKConfig(top_k=2)))
    assert same_bits(result, oxmoe.moe(x, made("bf16", second), router_logits=logits, top_k=2, ep_size=2, ep_rank=1))


@pytest.mark.skipif(DECIDES, reason="this SGLang makes local ids for our runner")
def test_refuses_global_ids_with_shared_experts_on_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with server("flashinfer_cutlass", **second_of_two(monkeypatch)):
        module = FusedMoE(9, 128, 128, 0, 2, 1, params_dtype=torch.bfloat16, **_config())
        with pytest.raises(NotImplementedError, match="fused shared experts are on each rank; start with --disable-sh"):
            module.quant_method.process_weights_after_loading(module)


# The scaling factor


@pytest.mark.parametrize(
    ("kind", "backend"),
    [*((kind, "flashinfer_trtllm_routed") for kind in FORMATS), ("bf16", "cutlass")],
)
def test_the_scaling_factor_counts_once(kind: str, backend: str, rng: torch.Generator) -> None:
    """Models ask `should_fuse_routed_scaling_factor_in_topk` whether their top-k multiplies by it."""
    tensors = checkpoint(kind, SHAPE, rng)
    x, topk = tokens(SHAPE, SHAPE.experts, rng)
    with server(backend):
        module = loaded(kind, tensors, SHAPE, routed_scaling_factor=2.0)
        if module.should_fuse_routed_scaling_factor_in_topk:
            topk = topk._replace(topk_weights=2.0 * topk.topk_weights)
        dispatched = StandardDispatchOutput(x.clone(), None, topk)
        result = module.quant_method.apply(module, dispatched).hidden_states
    weights = topk.topk_weights * (1.0 if module.should_fuse_routed_scaling_factor_in_topk else 2.0)
    assert same_bits(result, oxmoe.moe(x, made(kind, tensors), weights, topk.topk_ids))
