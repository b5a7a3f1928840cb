"""The calls of SGLang and flashinfer on their own form of MXFP4 weights, against the reference of the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import oxmoe
from cases import GPT_OSS, draws, tie_free_logits
from mxfp4_blocks import (
    SWIGLU,
    Blocks,
    experts_of,
    inputs,
)
from oxmoe import reference
from oxmoe.peers import flashinfer_cutlass, triton_kernels
from oxmoe.peers.kept import Cache
from oxmoe.peers.topk_forms import slots_of
from oxmoe.testing import assert_close_ulp, same_bits

RELEASES = ("0.6", "0.7")


@pytest.fixture(autouse=True)
def empty_caches() -> None:
    flashinfer_cutlass.cache.clear()
    triton_kernels.cache.clear()


def fused(x: Tensor, final_scales: Tensor, ids: Tensor, **arguments: Any) -> Tensor:
    (result,) = oxmoe.cutlass_fused_moe(
        input=x,
        token_selected_experts=ids,
        token_final_scales=final_scales,
        output_dtype=torch.bfloat16,
        use_w4_group_scaling=True,
        **arguments,
    )
    return result


def swiglu(experts: int, device: str, numbers: dict[str, float] | None) -> dict[str, Tensor]:
    if numbers is None:
        return {}
    return {f"swiglu_{name}": torch.full((experts,), value, device=device) for name, value in numbers.items()}


def check_fused(blocks: Blocks, tokens: int, top_k: int, release: str, numbers: Any, rng: torch.Generator) -> None:
    x, weights, ids = inputs(blocks, tokens, top_k, rng)
    arguments = {**blocks.interleaved(release), **swiglu(blocks.experts, blocks.device, numbers)}
    results, expected = [], []
    for drawn in draws(x):
        output = torch.full_like(drawn, torch.nan)
        results.append(fused(drawn, weights, ids, **arguments, output=output))
        assert results[-1] is output
        expected.append(blocks.expected(drawn, weights, ids, **(numbers or {})))
    assert_close_ulp(torch.cat(results), torch.cat(expected))


# cutlass_fused_moe: the shapes of SGLang's test_mxfp4_sm90_cutlass (192 padded to 256, as it pads), and flashinfer's.

SGLANG = [(4, 4, 256, 256, 2), (16, 8, 768, 384, 2), (8, 4, 256, 256, 2)]
SGLANG_FULL = [(32, 8, 1024, 1024, 4), (256, 8, 1024, 1024, 4), (16, 4, 2944, 2944, 2)]
NUMBERS = [None, {"alpha": 0.5, "beta": 0.0, "limit": 7.0}, SWIGLU, {"alpha": 1.0, "beta": 0.0, "limit": 10.0}]


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("tokens,experts,hidden,intermediate,top_k", SGLANG)
def test_sglangs_shapes(
    tokens: int,
    experts: int,
    hidden: int,
    intermediate: int,
    top_k: int,
    release: str,
    numbers: Any,
    device: str,
    rng: torch.Generator,
) -> None:
    blocks = Blocks(experts, hidden, intermediate, device, rng, bytes_=(125, 130))
    check_fused(blocks, tokens, top_k, release, numbers, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("tokens,experts,hidden,intermediate,top_k", SGLANG_FULL)
def test_sglangs_full_shapes(
    tokens: int, experts: int, hidden: int, intermediate: int, top_k: int, numbers: Any, rng: torch.Generator
) -> None:
    check_fused(Blocks(experts, hidden, intermediate, "cuda", rng), tokens, top_k, "0.7", numbers, rng)


@pytest.mark.parametrize("numbers", NUMBERS[:3], ids=str)
@pytest.mark.parametrize("release", RELEASES)
def test_flashinfers_shape(release: str, numbers: Any, device: str, rng: torch.Generator) -> None:
    check_fused(Blocks(2, 128, 128, device, rng, bytes_=(118, 123), bias=False), 1, 2, release, numbers, rng)


def test_numbers_of_experts_and_swiglu_step(device: str, rng: torch.Generator) -> None:
    blocks = Blocks(4, 128, 128, device, rng)
    x, weights, ids = inputs(blocks, 12, 2, rng)
    own = {name: (torch.rand(4, generator=rng) + 0.2).to(device) for name in ("alpha", "beta", "limit")}
    arguments = {**blocks.interleaved("0.7"), **{f"swiglu_{name}": value for name, value in own.items()}}
    for name, clamp in (("Swiglu", "before"), ("SwigluStep", "after")):
        result = fused(x, weights, ids, **arguments, activation_type=SimpleNamespace(name=name))
        assert_close_ulp(result, blocks.expected(x, weights, ids, **own, clamp=clamp))


def test_prepared_weights_have_the_same_bits(device: str, rng: torch.Generator) -> None:
    blocks = Blocks(4, 128, 256, device, rng)
    operands, arguments = inputs(blocks, 9, 2, rng), blocks.interleaved("0.7")
    numbers = swiglu(4, device, SWIGLU)
    prepared = oxmoe.prepare_cutlass_fused_moe(**arguments, **numbers)
    assert (prepared.alpha, prepared.beta, prepared.limit) == (pytest.approx(1.702), 1.0, 7.0)
    nothing = {"fc1_expert_weights": None, "fc2_expert_weights": None, "quant_scales": None}
    result = fused(*operands, **nothing, weights=prepared)
    assert len(flashinfer_cutlass.cache) == 0
    assert same_bits(result, fused(*operands, **arguments, **numbers)) and len(flashinfer_cutlass.cache) == 1


def test_expert_parallel(device: str, rng: torch.Generator) -> None:
    """Ids are global, and each rank computes its part alone."""
    blocks = Blocks(3, 128, 128, device, rng)
    x, weights, ids = inputs(blocks, 15, 2, rng, experts=6)
    for rank in range(2):
        result = fused(x, weights, ids, **blocks.interleaved("0.7"), ep_size=2, ep_rank=rank)
        assert_close_ulp(result, blocks.expected(x, weights, ids, ep_size=2, ep_rank=rank))


def test_tensor_parallel(device: str, rng: torch.Generator) -> None:
    """The bias of the second GEMM counts on rank 0 alone."""
    blocks = Blocks(3, 128, 128, device, rng)
    x, weights, ids = inputs(blocks, 15, 2, rng)
    results = [fused(x, weights, ids, **blocks.interleaved("0.7"), tp_size=2, tp_rank=rank) for rank in (0, 1)]
    assert_close_ulp(results[0], blocks.expected(x, weights, ids))
    assert_close_ulp(results[1], blocks.expected(x, weights, ids, b2=None))
    with pytest.raises(ValueError, match="tp_rank: expected 0 <= tp_rank < tp_size, got tp_rank 2, tp_size 2"):
        fused(x, weights, ids, **blocks.interleaved("0.7"), tp_size=2, tp_rank=2)


def padded_rows(tensor: Tensor, half: int, rows: int, columns: int) -> Tensor:
    """Pads [E, 2 half, C] to [E, 2 rows, columns], with zeros behind each half."""
    halves = tensor.split(half, dim=1)
    return torch.cat([pad(part, (0, columns - tensor.shape[2], 0, rows - half)) for part in halves], dim=1)


def padded(blocks: Blocks, hidden: int, intermediate: int) -> Blocks:
    """Pads a layer whose sizes are no multiples of 128, as SGLang does: with zero codes, scales and biases."""
    result = object.__new__(Blocks)
    result.experts, result.hidden, result.intermediate = blocks.experts, hidden, intermediate
    result.device = blocks.device
    half = blocks.intermediate

    def pair(tensors: tuple[Tensor, Tensor], width: int) -> tuple[Tensor, Tensor]:
        w2 = tensors[1]
        down = pad(w2, (0, intermediate // width - w2.shape[2], 0, hidden - w2.shape[1]))
        return padded_rows(tensors[0], half, intermediate, hidden // width), down

    result.codes, result.scales = pair(blocks.codes, 2), pair(blocks.scales, 32)
    b13, b2 = blocks.biases
    assert b13 is not None and b2 is not None
    result.biases = (
        padded_rows(b13[..., None], half, intermediate, 1)[..., 0].contiguous(),
        pad(b2, (0, hidden - b2.shape[1])),
    )
    return result


def quant_info(blocks: Blocks, release: str, numbers: Any, padded_hidden: int | None) -> SimpleNamespace:
    given = blocks.interleaved(release)
    numbers = {name: None for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit")} | swiglu(
        blocks.experts, blocks.device, numbers
    )
    return SimpleNamespace(
        w13_weight=given["fc1_expert_weights"],
        w2_weight=given["fc2_expert_weights"],
        w13_weight_scale=given["quant_scales"][0].view(torch.uint8),
        w2_weight_scale=given["quant_scales"][1].view(torch.uint8),
        mxfp4_weight_global_scale=None,
        w13_humming_residual_scale=None,
        w13_bias=blocks.biases[0],
        w2_bias=blocks.biases[1],
        **numbers,
        use_swiglu_step=False,
        padded_hidden=padded_hidden,
    )


@pytest.mark.parametrize("size", [192, 288])
@pytest.mark.parametrize("release", RELEASES)
def test_padded_layer_of_sglang(release: str, size: int, device: str, rng: torch.Generator) -> None:
    """Input and output are narrower than the weights, which replaces a padded copy and a trimmed one."""
    blocks = Blocks(4, size, size, device, rng)
    wide = padded(blocks, 256 if size < 256 else 384, 256 if size < 256 else 384)
    x, weights, ids = inputs(blocks, 10, 2, rng)
    info = quant_info(wide, release, SWIGLU, wide.hidden)
    topk_output = SimpleNamespace(topk_weights=weights, topk_ids=ids, router_logits=None)
    out = torch.full_like(x, torch.nan)
    result = oxmoe.fused_experts_flashinfer_mxfp4(x, topk_output, info, SimpleNamespace(), output=out)
    assert result is out
    assert_close_ulp(result, blocks.expected(x, weights, ids, **SWIGLU))
    arguments = {**wide.interleaved(release), **swiglu(4, device, SWIGLU)}
    trimmed = fused(pad(x, (0, wide.hidden - size)), weights, ids, **arguments)
    assert_close_ulp(trimmed[:, :size], blocks.expected(x, weights, ids, **SWIGLU))


def bypassed(x: Tensor, logits: Tensor, top_k: int, **config: Any) -> SimpleNamespace:
    return SimpleNamespace(
        hidden_states=x, raw_router_logits=logits, topk_config=SimpleNamespace(top_k=top_k, renormalize=True, **config)
    )


def test_bypassed_topk(device: str, rng: torch.Generator) -> None:
    blocks = Blocks(8, 128, 128, device, rng)
    x, _, _ = inputs(blocks, 7, 2, rng)
    logits = tie_free_logits(7, 8, rng).to(device)
    info = quant_info(blocks, "0.7", SWIGLU, None)
    config = SimpleNamespace(moe_ep_size=1, moe_ep_rank=0, moe_tp_size=4, moe_tp_rank=3)
    result = oxmoe.fused_experts_flashinfer_mxfp4(x, bypassed(x, logits, 2), info, config)
    routed = reference.topk(logits, 2)
    assert_close_ulp(result, blocks.expected(x, *routed, **SWIGLU, b2=None))
    half = Blocks(4, 128, 128, device, rng)
    config = SimpleNamespace(moe_ep_size=2, moe_ep_rank=1, moe_tp_size=1, moe_tp_rank=0)
    info = quant_info(half, "0.7", SWIGLU, None)
    result = oxmoe.fused_experts_flashinfer_mxfp4(x, bypassed(x, logits, 2), info, config)
    assert_close_ulp(result, half.expected(x, *routed, **SWIGLU, ep_size=2, ep_rank=1))


def test_swiglu_step_of_sglangs_call(rng: torch.Generator) -> None:
    """With quant_info.use_swiglu_step the limit bounds the gate behind its SiLU; without that field, before it."""
    blocks = Blocks(4, 128, 128, "cpu", rng)
    x, weights, ids = inputs(blocks, 9, 2, rng)
    numbers = {"alpha": 1.0, "beta": 0.0, "limit": 0.05}
    topk_output = SimpleNamespace(topk_weights=weights, topk_ids=ids)
    results = []
    for step, clamp in ((True, "after"), (False, "before"), (None, "before")):
        info = quant_info(blocks, "0.7", numbers, None)
        info.use_swiglu_step = step
        if step is None:
            del info.use_swiglu_step
        flashinfer_cutlass.cache.clear()
        results.append(oxmoe.fused_experts_flashinfer_mxfp4(x, topk_output, info, SimpleNamespace()))
        assert_close_ulp(results[-1], blocks.expected(x, weights, ids, **numbers, clamp=clamp))
    assert not same_bits(results[0], results[1]) and same_bits(results[1], results[2])


def test_what_sglangs_call_refuses(rng: torch.Generator) -> None:
    blocks = Blocks(2, 128, 128, "cpu", rng)
    x, weights, ids = inputs(blocks, 3, 2, rng)
    topk_output = SimpleNamespace(topk_weights=weights, topk_ids=ids)
    names = ("mxfp4_weight_global_scale", "w13_humming_residual_scale", "w2_humming_residual_scale")
    for given in ((name,) for name in names):
        info = quant_info(blocks, "0.7", SWIGLU, None)
        vars(info).update(dict.fromkeys(given, torch.ones(2)))
        with pytest.raises(NotImplementedError, match=f"quant_info: no kernel for {given[0]}; served are MXFP4"):
            oxmoe.fused_experts_flashinfer_mxfp4(x, topk_output, info, SimpleNamespace())
    info = quant_info(blocks, "0.7", SWIGLU, None)
    vars(info).update(dict.fromkeys(names, torch.ones(2)))
    with pytest.raises(NotImplementedError, match=f"no kernel for {', '.join(names)}; served"):
        oxmoe.fused_experts_flashinfer_mxfp4(x, topk_output, info, SimpleNamespace())
    info = quant_info(blocks, "0.7", SWIGLU, None)
    for rank in (-1, 2):
        config = SimpleNamespace(moe_tp_size=2, moe_tp_rank=rank)
        with pytest.raises(ValueError, match=rf"expected 0 <= moe_tp_rank < moe_tp_size, got {rank} and 2"):
            oxmoe.fused_experts_flashinfer_mxfp4(x, topk_output, info, config)


def test_no_tokens() -> None:
    """Without tokens nothing else is looked at, and SGLang's form returns its input."""
    x, ids = torch.empty((0, 64), dtype=torch.bfloat16), torch.empty((0, 2), dtype=torch.int32)
    assert oxmoe.fused_experts_flashinfer_mxfp4(x, None, None, None) is x
    nothing = {"fc1_expert_weights": None, "fc2_expert_weights": None, "quant_scales": None}
    result = fused(x, ids.float(), ids, **nothing)
    assert result.shape == (0, 64) and result.dtype == torch.bfloat16
    assert fused(x, ids.float(), ids, **nothing, output=x) is x
    result = oxmoe.triton_kernel_fused_experts_with_bias(
        x, None, None, None, None, None, None, topk_output=SimpleNamespace()
    )
    assert result.shape == (0, 64)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"use_w4_group_scaling": False}, "no kernel for fc1_expert_weights of uint8 with 2 quant_scales; served"),
        (
            {"enable_alltoall": True, "min_latency_mode": True},
            "no kernel for enable_alltoall, min_latency_mode; served",
        ),
        ({"input_sf": torch.ones(1)}, "no kernel for input of bfloat16 with input_sf and mxfp4 weights; served"),
        ({"use_wfp4afp8_humming": True}, "no kernel for use_wfp4afp8_humming"),
        ({"output_dtype": torch.float16}, "output_dtype: no kernel for float16 of bfloat16 input; expected bfloat16"),
        ({"activation_type": 7}, "activation_type: no kernel for 7; served"),
        ({"activation_type": SimpleNamespace(name="Relu")}, "no kernel for 'Relu'"),
    ],
    ids=str,
)
def test_what_cutlass_fused_moe_refuses(change: dict[str, Any], message: str, rng: torch.Generator) -> None:
    blocks = Blocks(2, 128, 128, "cpu", rng)
    x, weights, ids = inputs(blocks, 3, 2, rng)
    arguments = {"output_dtype": torch.bfloat16, "use_w4_group_scaling": True, **blocks.interleaved("0.7"), **change}
    with pytest.raises(NotImplementedError, match=message):
        oxmoe.cutlass_fused_moe(input=x, token_selected_experts=ids, token_final_scales=weights, **arguments)


# The cache


def counted(made: list[int]) -> Callable[[], Any]:
    def make() -> Any:
        made.append(1)
        return SimpleNamespace()

    return make


def test_cache_knows_tensors_by_memory_and_version() -> None:
    cache, made = Cache(), []
    weight, bias = torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4)
    first = cache.get([weight, weight[0]], [bias, None], ("bf16",), counted(made))
    view = weight.view(torch.int32).view(torch.uint8)
    assert cache.get([view, weight[0]], [bias, None], ("bf16",), counted(made)) is first
    assert len(made) == len(cache) == 1
    assert cache.get([weight, weight[0]], [bias, None], ("f16",), counted(made)) is not first
    assert cache.get([weight, weight[1]], [bias, None], ("bf16",), counted(made)) is not first
    assert cache.get([weight, weight[0]], [None, bias], ("bf16",), counted(made)) is not first
    assert len(made) == len(cache) == 4
    weight[0, 0] = 1
    second = cache.get([weight, weight[0]], [bias, None], ("bf16",), counted(made))
    assert second is not first and len(cache) == 4, "the stale entry is replaced"
    bias += 1
    assert cache.get([weight, weight[0]], [bias, None], ("bf16",), counted(made)) is not second


def test_cache_lets_go_of_freed_weights() -> None:
    """A new tensor at an old address is a new tensor."""
    cache, made = Cache(), []
    for _ in range(20):
        weight = torch.zeros(1 << 12, dtype=torch.uint8)
        cache.get([weight], [], (), counted(made))
        del weight
    assert len(made) == 20 and len(cache) == 1


def test_cache_refuses_tensors_without_versions() -> None:
    with torch.inference_mode():
        weight = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="made in inference mode count no versions"):
        Cache().get([weight], [], (), counted([]))


def test_weights_that_change_are_prepared_again(rng: torch.Generator) -> None:
    blocks = Blocks(2, 128, 128, "cpu", rng)
    x, weights, ids = inputs(blocks, 5, 2, rng)
    arguments = {**blocks.interleaved("0.7"), **swiglu(2, "cpu", SWIGLU)}
    fused(x, weights, ids, **arguments)
    other = Blocks(2, 128, 128, "cpu", rng)
    arguments["fc1_expert_weights"].copy_(other.interleaved("0.7")["fc1_expert_weights"])
    arguments["swiglu_limit"].fill_(0.5)
    blocks.codes = other.codes[0], blocks.codes[1]
    with torch.inference_mode():
        result = fused(x, weights, ids, **arguments)
    assert_close_ulp(result, blocks.expected(x, weights, ids, **{**SWIGLU, "limit": 0.5}))


@pytest.mark.gpu
def test_capture(rng: torch.Generator) -> None:
    """A CUDA graph holds calls, not the preparation of weights."""
    blocks = Blocks(4, 128, 128, "cuda", rng)
    operands, arguments = inputs(blocks, 6, 2, rng), blocks.interleaved("0.7")
    stream = torch.cuda.Stream()
    with pytest.raises(RuntimeError, match="which a CUDA graph cannot capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            fused(*operands, **arguments)
    expected, graph = fused(*operands, **arguments), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        result = fused(*operands, **arguments)
    result.fill_(torch.nan)
    graph.replay()
    assert same_bits(result, expected)


# triton_kernel_fused_experts_with_bias


NUMBERS_OF_GPT_OSS: dict[str, Any] = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}


@pytest.mark.parametrize("kind", ["3.6", "3.8", "strided"])
@pytest.mark.parametrize("hidden,intermediate", [(96, 64), (2880, 32), (64, 720 * 2)])
def test_triton_kernels_weights(hidden: int, intermediate: int, kind: str, device: str, rng: torch.Generator) -> None:
    blocks = Blocks(4, hidden, intermediate, device, rng)
    x, weights, ids = inputs(blocks, 9, 2, rng)
    operands = experts_of(blocks, kind)
    topk_output = SimpleNamespace(topk_weights=weights, topk_ids=ids)
    run = oxmoe.triton_kernel_fused_experts_with_bias
    out = torch.full_like(x, torch.nan)
    result = run(x, **operands, topk_output=topk_output, **NUMBERS_OF_GPT_OSS, output=out)
    assert result is out
    assert_close_ulp(result, blocks.expected(x, weights, ids, **GPT_OSS))
    assert same_bits(run(x, **operands, topk_output=topk_output, **NUMBERS_OF_GPT_OSS), result)
    assert len(triton_kernels.cache) == 1
    prepared = oxmoe.prepare_triton_kernel_experts(**operands, **NUMBERS_OF_GPT_OSS)
    nothing = dict.fromkeys(operands)
    assert same_bits(run(x, **nothing, topk_output=topk_output, weights=prepared), result)


@pytest.mark.parametrize("tokens", [1, 11])
def test_tables_of_triton_kernels(tokens: int, device: str, rng: torch.Generator) -> None:
    """The calls are those of SGLang 0.5.12 (a sum) and 0.5.23 (rows), with their top-k outputs."""
    blocks = Blocks(8, 64, 96, device, rng)
    x, _, _ = inputs(blocks, tokens, 2, rng)
    logits = tie_free_logits(tokens, 8, rng).to(device)
    data, gather, scatter = oxmoe.routing(logits, 2)
    weights, ids = reference.topk(logits, 2, scoring_func="softmax_topk", renormalize=False, order="id")
    back = slots_of(data.expt_hist, scatter.dst_indx, data.gate_scal, 2)
    assert torch.equal(back[1], ids)
    torch.testing.assert_close(back[0], weights)

    operands = {**experts_of(blocks, "3.6"), **NUMBERS_OF_GPT_OSS}
    run, expected = oxmoe.triton_kernel_fused_experts_with_bias, blocks.expected(x, weights, ids, **GPT_OSS)
    old = {"routing_data": data, "gather_indx": gather, "scatter_indx": scatter}
    result = run(x, **operands, **old)
    assert_close_ulp(result, expected)
    combine = scatter.dst_indx
    new = {"a_ragged_metadata": data.expt_data, "gather_indx": combine // 2, "scatter_indx": combine}
    new |= {"gate_scal": data.gate_scal, "n_expts_act": 2}
    rows = run(x, **operands, **new)
    assert rows.shape == (tokens * 2, 64)
    in_rows = blocks.expected(x, weights, ids, **GPT_OSS, no_combine=True, keep_router_weight=True)
    assert_close_ulp(rows, in_rows.view(-1, 64))
    for tables in (old, new):
        assert same_bits(run(x, **operands, topk_output=SimpleNamespace(**tables)), result)
    logits_alone = bypassed(x, logits, 2)
    assert_close_ulp(run(x, **operands, topk_output=logits_alone), expected)


@pytest.mark.parametrize(
    "change,error,message",
    [
        ({"use_fp8_w8a8": True}, NotImplementedError, "no kernel for use_fp8_w8a8; served"),
        ({"apply_router_weight_on_input": True}, NotImplementedError, "apply_router_weight_on_input"),
        ({"w1": torch.zeros(1)}, NotImplementedError, "w1: no kernel for Tensor; served are MXFP4 weights"),
        ({"w2_pcg": SimpleNamespace()}, NotImplementedError, "w2_pcg: has no weight_scale and no b_mx_scale"),
        ({"gemm1_alpha": None}, ValueError, "gemm1_alpha: needed"),
        ({"topk_output": None}, ValueError, "routing: expected one of"),
        ({"topk_output": None, "routing_data": 1}, NotImplementedError, "scatter_indx: needed"),
    ],
    ids=str,
)
def test_what_the_triton_call_refuses(
    change: dict[str, Any], error: type[Exception], message: str, rng: torch.Generator
) -> None:
    blocks = Blocks(2, 64, 64, "cpu", rng)
    x, weights, ids = inputs(blocks, 3, 2, rng)
    topk_output = SimpleNamespace(topk_weights=weights, topk_ids=ids)
    operands = {**experts_of(blocks, "3.6"), **NUMBERS_OF_GPT_OSS, "topk_output": topk_output, **change}
    with pytest.raises(error, match=message):
        oxmoe.triton_kernel_fused_experts_with_bias(x, **operands)


def test_other_layouts_are_refused(rng: torch.Generator) -> None:
    blocks = Blocks(2, 64, 64, "cpu", rng)
    operands = experts_of(blocks, "3.6")
    operands["w1"].storage.layout = SimpleNamespace()
    with pytest.raises(NotImplementedError, match="w1: no kernel for layouts SimpleNamespace and HopperMXScaleLayout"):
        oxmoe.prepare_triton_kernel_experts(**operands, **NUMBERS_OF_GPT_OSS)
