"""A whole FusedMoE layer of the real SGLang package on oxmoe: the quantization "oxmoe" of both versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import GPT_OSS, Layer, Shape, make_layer, make_x, tie_free_logits
from oxmoe import reference
from oxmoe.peers.sglang import _unknown_fields
from oxmoe.sglang.experts import Experts
from oxmoe.testing import assert_close, assert_close_ulp, same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import BypassedTopKOutput, StandardTopKOutput, TopK, TopKConfig
from sglang.srt.layers.quantization import get_quantization_config

from sglang_server import NEW, SHAPE, MoeRunnerConfig, fused_moe, installed, only_cores, operands, server

SECOND_OF_TWO_EP_RANKS = {
    "moe_ep_size": 2,
    "moe_ep_rank": 1,
    "tp_size": 2,
    "tp_rank": 1,
    "attn_tp_size": 2,
    "attn_tp_rank": 1,
}


@pytest.fixture(autouse=True)
def ours() -> Iterator[None]:
    installed()
    with server("oxmoe" if NEW else "auto"):
        yield


def check_layer(
    layer: Layer, x: Tensor, weights: Tensor, ids: Tensor, expected_options: dict[str, Any], **options: Any
) -> None:
    """Compares the module with the reference. The tokens stay, also with inplace (the default): in captured graphs
    SGLang's models run shared experts on them at the same time."""
    before = x.clone()
    result = fused_moe(layer, **options)(x, StandardTopKOutput(weights, ids, None))
    expected = reference.moe(before, layer.w13, layer.w2, weights, ids, **layer.reference_options, **expected_options)
    assert_close_ulp(result, expected)
    assert same_bits(x, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_layer(device: str, tokens: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    check_layer(*operands(SHAPE, tokens, device, rng, dtype=dtype), {})


@pytest.mark.parametrize("pattern", ["holes", "all_holes", "one_expert", "duplicates"])
def test_layer_routings(device: str, pattern: str, rng: torch.Generator) -> None:
    check_layer(*operands(SHAPE, 9, device, rng, pattern), {})


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (
            {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0},
            Shape("gpt-oss", 8, 4, 120, 120, True, tuple(GPT_OSS.items())),
        ),
        pytest.param(
            {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "gate_up_interleaved": False},
            SHAPE.with_options(**{**GPT_OSS, "layout": "gate_up"}),
            marks=only_cores,
        ),
        ({"gemm1_clamp_limit": 0.25}, SHAPE.with_options(limit=0.25, clamp="after")),
        ({"swiglu_limit": 0.5}, SHAPE.with_options(limit=0.5, clamp="before")),
        ({"activation": "gelu"}, SHAPE.with_options(activation="gelu")),
        (
            {"activation": "situ", "gemm1_alpha": 1.25, "gemm1_clamp_limit": 0.75},
            SHAPE.with_options(activation="situ", situ_beta=1.25, situ_linear_beta=0.75),
        ),
        ({"activation": "situ"}, SHAPE.with_options(activation="situ")),
        ({"activation": "relu2"}, SHAPE.with_options(activation="relu2")),
        ({"activation": "silu"}, SHAPE.with_options(activation="silu", gated=False)),
    ],
    ids=[
        "gpt-oss",
        "gpt-oss-halves",
        "limit-after",
        "limit-before",
        "gelu",
        "situ",
        "situ-unbounded",
        "relu2",
        "silu-plain",
    ],
)
def test_layer_activations(device: str, options: dict[str, Any], shape: Shape, rng: torch.Generator) -> None:
    check_layer(*operands(shape, 9, device, rng), {}, **options)


@pytest.mark.parametrize("linear_beta", [None, 25.0])
def test_sglangs_own_situ(linear_beta: float | None, rng: torch.Generator) -> None:
    """The reference is the activation that SGLang's Kimi-K3 has."""
    from sglang.srt.layers import activation

    if not hasattr(activation, "SituAndMul"):
        pytest.skip("this SGLang has no SiTU")
    sums = torch.randn((9, 64), generator=rng) * 20
    wanted = activation.SituAndMul(beta=4.0, linear_beta=linear_beta).forward_native(sums)
    got = reference.activate(sums, activation="situ", situ_beta=4.0, situ_linear_beta=linear_beta)
    assert_close(got, wanted, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"routed_scaling_factor": 2.5}, {"routed_scaling_factor": 2.5}),
        ({"inplace": False}, {}),
        ({"inplace": False, "no_combine": True, "routed_scaling_factor": 2.5}, {"no_combine": True}),
        ({"apply_router_weight_on_input": True}, {"apply_router_weight_on_input": True}),
    ],
    ids=["scaled", "out-of-place", "no-combine", "weight-on-input"],
)
def test_layer_options(device: str, options: dict[str, Any], expected: dict[str, Any], rng: torch.Generator) -> None:
    check_layer(*operands(SHAPE, 9, device, rng), expected, **options)


def test_topk_feeds_layer(device: str, rng: torch.Generator) -> None:
    layer, x, _, _ = operands(SHAPE, 33, device, rng)
    logits = tie_free_logits(33, SHAPE.experts, rng).to(device)
    routed = TopK(top_k=SHAPE.top_k, layer_id=0).forward_native(x, logits)
    expected = reference.moe(x.clone(), layer.w13, layer.w2, router_logits=logits, top_k=SHAPE.top_k)
    assert_close_ulp(fused_moe(layer)(x, routed), expected)


def test_bypassed_topk_feeds_layer(device: str, rng: torch.Generator) -> None:
    layer, x, _, _ = operands(SHAPE, 33, device, rng)
    logits = tie_free_logits(33, SHAPE.experts, rng).to(device)
    routed = BypassedTopKOutput(x, logits, TopKConfig(top_k=SHAPE.top_k))
    expected = reference.moe(x.clone(), layer.w13, layer.w2, router_logits=logits, top_k=SHAPE.top_k)
    assert_close_ulp(fused_moe(layer)(x, routed), expected)


def test_layer_keeps_its_attributes(device: str, rng: torch.Generator) -> None:
    layer, x, weights, ids = operands(SHAPE, 3, device, rng)
    module = fused_moe(layer)
    owners = (module, module.quant_method, module.dispatcher, module.moe_runner_config)
    before = [{name: id(value) for name, value in vars(owner).items()} for owner in owners]
    module(x, StandardTopKOutput(weights, ids, None))
    assert [{name: id(value) for name, value in vars(owner).items()} for owner in owners] == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_topk_weights_of_other_dtypes(device: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    layer, x, weights, ids = operands(SHAPE, 5, device, rng)
    module, weights = fused_moe(layer, inplace=False), weights.to(dtype)
    result = module(x, StandardTopKOutput(weights, ids, None))
    assert same_bits(result, module(x, StandardTopKOutput(weights.float(), ids, None)))


def test_llama4s_own_routing(device: str, rng: torch.Generator) -> None:
    """Llama-4's weights are the sigmoid of logits of the model's dtype, and multiply the layer's input."""
    from sglang.srt.models.llama4 import Llama4MoE

    layer, x, _, _ = operands(SHAPE, 5, device, rng)
    logits = tie_free_logits(5, SHAPE.experts, rng).to(torch.bfloat16).to(device)
    custom = Llama4MoE.custom_routing_function
    routed = TopK(top_k=1, layer_id=0, renormalize=False, custom_routing_function=custom).forward_native(x, logits)
    assert routed.topk_weights.dtype == torch.bfloat16
    result = fused_moe(layer, inplace=False, apply_router_weight_on_input=True)(x, routed)
    weights, ids = routed.topk_weights.float(), routed.topk_ids
    expected = oxmoe.moe(
        x, oxmoe.ExpertWeights.bf16(layer.w13, layer.w2), weights, ids, apply_router_weight_on_input=True
    )
    assert same_bits(result, expected)


def described(module: Any) -> oxmoe.ExpertWeights:
    method = module.quant_method
    core = getattr(method.runner, "runner_core", method)
    return core.experts.prepare(method.get_triton_quant_info(module), method.moe_runner_config)


def test_weights_are_described_once(device: str, rng: torch.Generator) -> None:
    layer, x, weights, ids = operands(SHAPE, 5, device, rng)
    module, routed = fused_moe(layer, inplace=False), StandardTopKOutput(weights, ids, None)
    first = described(module)
    module(x, routed)
    assert described(module) is first

    # The parameter gets other memory, as a weight update may leave it.
    changed = make_layer(SHAPE, torch.bfloat16, device, rng)
    module.w13_weight.data, module.w2_weight.data = changed.w13, changed.w2
    assert_close_ulp(module(x, routed), reference.moe(x, changed.w13, changed.w2, weights, ids))
    assert described(module) is not first


@pytest.mark.gpu
def test_layer_in_cuda_graph(rng: torch.Generator) -> None:
    layer, x, weights, ids = operands(SHAPE, 33, "cuda", rng)
    module, routed = fused_moe(layer, inplace=False), StandardTopKOutput(weights, ids, None)
    module(x, routed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = module(x, routed)
    x.copy_(make_x(33, SHAPE, torch.bfloat16, "cuda", rng))
    graph.replay()
    assert same_bits(result, module(x, routed))


@only_cores
@pytest.mark.gpu
def test_expert_parallel_layer(rng: torch.Generator) -> None:
    """The layer is that of the second of two ranks: SGLang's dispatcher makes local ids, -1 for the first rank's
    experts."""
    _, x, weights, ids = operands(SHAPE, 33, "cuda", rng)
    local = make_layer(SHAPE, torch.bfloat16, "cuda", rng, local_experts=SHAPE.experts // 2)
    with server("oxmoe", **SECOND_OF_TWO_EP_RANKS):
        result = fused_moe(local, inplace=False)(x, StandardTopKOutput(weights, ids, None))
    assert_close_ulp(result, reference.moe(x, local.w13, local.w2, weights, ids, ep_size=2, ep_rank=1))


# Refusals, by name


def refused(
    rng: torch.Generator, info: Any = None, *, dispatched: Any = None, hooks: Any = None, **config: Any
) -> None:
    layer, x, weights, ids = operands(SHAPE, 7, "cpu", rng)
    dispatched = dispatched or StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids, None))
    options = {"num_experts": 8, "num_local_experts": 8, "top_k": 2, "inplace": False, **config}
    info = info or TritonMoeQuantInfo(layer.w13, layer.w2)
    Experts().run(dispatched, info, MoeRunnerConfig(**options), hooks)


def test_refuses_lora(rng: torch.Generator) -> None:
    with pytest.raises(NotImplementedError, match="LoRA"):
        refused(rng, hooks=object())


def test_refuses_other_quant_info(rng: torch.Generator) -> None:
    with pytest.raises(NotImplementedError, match="no kernel for SimpleNamespace; served are bf16 and f16"):
        refused(rng, SimpleNamespace())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_fp8_w8a8": True, "block_shape": [128, 128]}, "of torch.bfloat16 with scales"),
        ({"w13_scale": torch.ones(8)}, "with scales, but not fp8"),
        ({"use_int4_w4a16": True}, "with use_int4_w4a16"),
    ],
    ids=["fp8", "scale", "int4"],
)
def test_refuses_quantised_experts(fields: dict[str, Any], message: str, rng: torch.Generator) -> None:
    weight = torch.zeros(8, 192, 128, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=f"{message}; served"):
        refused(rng, TritonMoeQuantInfo(weight, weight, **fields))


def test_refuses_unknown_activation(rng: torch.Generator) -> None:
    with pytest.raises(NotImplementedError, match='no kernel for "relu"'):
        refused(rng, activation="relu")


def test_every_field_of_this_release_is_known() -> None:
    """A field may also be one that SGLang sets for DeepGEMM and GGUF alone."""
    unknown = {name for name, _ in _unknown_fields(MoeRunnerConfig)}
    assert unknown <= {"use_tp_all_gather_activation", "silu_mul_keep_fp32"}


@dataclass
class OfALaterRelease(MoeRunnerConfig):
    fused_norm: bool = False


@pytest.mark.parametrize("method", [None, {"quant_method": "fp8", "activation_scheme": "dynamic"}], ids=["bf16", "fp8"])
def test_refuses_fields_that_are_not_known_while_a_layer_is_made(
    method: dict[str, Any] | None, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.moe.fused_moe_triton import layer

    config = get_quantization_config("oxmoe")
    quant_config = config() if method is None else config.from_config(method)
    options = {"params_dtype": torch.bfloat16, "quant_config": quant_config}
    monkeypatch.setattr(layer, "MoeRunnerConfig", OfALaterRelease)
    layer.FusedMoE(8, 128, 128, 0, 2, **options)
    monkeypatch.setattr(layer, "MoeRunnerConfig", lambda **fields: OfALaterRelease(**fields, fused_norm=True))
    with pytest.raises(
        NotImplementedError, match=r"does not know the field fused_norm, which is True here \(by default F"
    ):
        layer.FusedMoE(8, 128, 128, 0, 2, **options)


def test_refuses_fields_that_are_not_known(rng: torch.Generator) -> None:
    layer, x, weights, ids = operands(SHAPE, 7, "cpu", rng)
    dispatched = StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids, None))
    config = OfALaterRelease(num_experts=8, num_local_experts=8, top_k=2, fused_norm=True)
    with pytest.raises(NotImplementedError, match="does not know the field fused_norm"):
        Experts().run(dispatched, TritonMoeQuantInfo(layer.w13, layer.w2), config)


def test_refuses_inplace_without_combine(rng: torch.Generator) -> None:
    with pytest.raises(ValueError, match="inplace and no_combine"):
        refused(rng, inplace=True, no_combine=True)


def test_refuses_tokens_of_an_all_to_all(rng: torch.Generator) -> None:
    """DeepEP's formats have no topk_output: the error is a message instead of a missing attribute."""
    deepep = SimpleNamespace(hidden_states=torch.zeros(1, 4, 128), topk_ids=None, masked_m=None)
    with pytest.raises(NotImplementedError, match=r"tokens in SimpleNamespace; served are --moe-a2a-backend none"):
        refused(rng, dispatched=deepep)


def test_refuses_quantised_tokens(rng: torch.Generator) -> None:
    tokens = SimpleNamespace(hidden_states=torch.zeros(4, 128), hidden_states_scale=torch.ones(4), topk_output=None)
    with pytest.raises(NotImplementedError, match="quantised tokens"):
        refused(rng, dispatched=tokens)


def test_refuses_global_ids_of_local_experts(rng: torch.Generator) -> None:
    x = torch.zeros(7, 128, dtype=torch.bfloat16)
    routed = BypassedTopKOutput(x, torch.zeros(7, 16), TopKConfig(top_k=2))
    with pytest.raises(NotImplementedError, match="BypassedTopKOutput has ids of all ranks' experts"):
        refused(rng, dispatched=StandardDispatchOutput(x, None, routed), num_experts=16)


def test_refuses_packed_topk(rng: torch.Generator) -> None:
    x = torch.zeros(7, 128, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="no kernel for SimpleNamespace; served are StandardTopKOutput"):
        refused(rng, dispatched=StandardDispatchOutput(x, None, SimpleNamespace(packed=1)))
