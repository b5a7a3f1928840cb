"""flashinfer's CuteDslMoEWrapper over NVFP4 experts: its bits are those of `moe`, its errors name the argument."""

from __future__ import annotations

import enum
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import draws, make_routing, make_x
from cutedsl_cases import SHAPE, drawn, operands, quantised, wrapper
from mxfp4_cases import DTYPES
from nvfp4_cases import A4_BAR, E4M3, Nvfp4
from oxmoe.testing import assert_close_ulp, relative_norm, same_bits

RUN = (
    "x x_sf token_selected_experts token_final_scales w1_weight w1_weight_sf w1_alpha fc2_input_scale w2_weight "
    "w2_weight_sf w2_alpha tactic"
).split()


class ActivationType(enum.IntEnum):
    """flashinfer 0.7.2's numbers of the activations that are served, and of one that is not."""

    Swiglu = 3
    Geglu = 4
    Relu2 = 6
    GegluTanh = 8


def run(
    moe: oxmoe.CuteDslMoEWrapper, layer: Nvfp4, tokens: Tensor, routing: tuple[Tensor, Tensor], **given: Any
) -> Tensor:
    codes, scales = quantised(layer, tokens)
    weights, ids = routing
    arguments = {"x": codes, "x_sf": scales, "token_selected_experts": ids, "token_final_scales": weights}
    return moe.run(**{**arguments, **operands(layer), **given})


def expected(layer: Nvfp4, x: Tensor, routing: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the weighted sum of a reference's rows."""
    weights, ids = routing
    rows = [layer.expected(x, ids[:, j]).float() * weights[:, j, None] for j in range(ids.shape[1])]
    return torch.stack(rows).sum(0).to(x.dtype)


@pytest.mark.parametrize("a4", [True, False], ids=["w4a4", "w4a16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "activation", [3, ActivationType.GegluTanh, ActivationType.Relu2], ids=["swiglu", "geglu", "relu2"]
)
def test_run(activation: Any, dtype: str, a4: bool, rng: torch.Generator) -> None:
    names = {3: "silu", 8: "gelu_tanh", 6: "relu2"}
    shape = SHAPE.with_options(activation=names[int(activation)])
    layer = drawn(shape, rng, a4)
    moe = wrapper(shape, a4, activation_type=activation, output_dtype=DTYPES[dtype])
    results, wanted = [], []
    for tokens in (1, 7, 40):
        x = make_x(tokens, shape, DTYPES[dtype], "cpu", rng)
        routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
        for one in draws(x):
            out = run(moe, layer, one, routing)
            assert out.shape == x.shape and out.dtype == x.dtype
            # The layer rounds x itself.
            assert same_bits(out, oxmoe.moe(one, layer.weights(dtype=dtype), *routing))
            results.append(out)
            wanted.append(expected(layer, one, routing))
    got, reference = torch.cat(results), torch.cat(wanted)
    if a4:
        assert relative_norm(got, reference) < 2e-2
        if dtype == "bf16":
            assert_close_ulp(got, reference, A4_BAR)
    else:
        assert_close_ulp(got, reference)


def test_swiglu_of_gpt_oss(rng: torch.Generator) -> None:
    options = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
    shape = SHAPE.with_options(**options)
    layer, x = drawn(shape, rng), make_x(20, SHAPE, torch.bfloat16, "cpu", rng)
    routing = make_routing("uniform", 20, shape.experts, shape.top_k, rng)
    moe = wrapper(shape, **{f"swiglu_{name}": value for name, value in options.items()})
    assert same_bits(run(moe, layer, x, routing), oxmoe.moe(x, layer.weights(), *routing))


@pytest.mark.parametrize("numbers", [{"situ_beta": 4.0}, {"situ_beta": 1.5, "situ_linear_beta": 0.75}], ids=str)
def test_situ(numbers: dict[str, float], rng: torch.Generator) -> None:
    """flashinfer selects SiTU by situ_beta, with the activation Swiglu."""
    shape = SHAPE.with_options(activation="situ", **numbers)
    layer, x = drawn(shape, rng), make_x(20, SHAPE, torch.bfloat16, "cpu", rng)
    routing = make_routing("uniform", 20, shape.experts, shape.top_k, rng)
    moe = wrapper(shape, **numbers)
    assert same_bits(run(moe, layer, x, routing), oxmoe.moe(x, layer.weights(), *routing))
    assert not same_bits(run(wrapper(SHAPE), layer, x, routing), run(moe, layer, x, routing))


def test_codes_are_not_rounded_again(rng: torch.Generator) -> None:
    """The blocks' largest code is not 6, so a second rounding would give them other scales."""
    layer, tokens = drawn(SHAPE, rng), 12
    routing = make_routing("uniform", tokens, SHAPE.experts, SHAPE.top_k, rng)
    codes = torch.randint(0, 256, (tokens, SHAPE.hidden // 2), generator=rng, dtype=torch.uint8) & 0xBB
    scales = (8 * torch.rand((tokens, SHAPE.hidden // 16), generator=rng) + 1).to(E4M3)
    x = oxmoe.reference.nvfp4_numbers(codes, scales).to(torch.bfloat16)
    out = run(wrapper(SHAPE), layer, x, routing, x=codes, x_sf=scales)
    # GEMM1 does not round these numbers, so the comparison goes through moe_masked, which takes codes too.
    weights, ids = routing
    rows = torch.empty((tokens, SHAPE.top_k, SHAPE.hidden), dtype=torch.bfloat16)
    experts, counts = layer.weights(), torch.full((SHAPE.experts,), tokens, dtype=torch.int32)
    each = oxmoe.moe_masked(
        codes.expand(SHAPE.experts, -1, -1).contiguous(),
        experts,
        counts,
        x_scale=scales.view(torch.uint8).expand(SHAPE.experts, -1, -1).contiguous().view(E4M3),
    )
    for t in range(tokens):
        rows[t] = each[ids[t].long(), t]
    total = torch.zeros((tokens, SHAPE.hidden))
    for j in range(SHAPE.top_k):
        total += weights[:, j, None] * rows[:, j].float()
    assert_close_ulp(out, total.to(torch.bfloat16))
    assert not same_bits(out, oxmoe.moe(x, experts, *routing))
    for form in (scales.view(torch.uint8), scales.unsqueeze(-1), scales.flatten()):
        assert same_bits(run(wrapper(SHAPE), layer, x, routing, x=codes, x_sf=form), out)


@pytest.mark.parametrize("a4", [True, False], ids=["w4a4", "w4a16"])
@pytest.mark.parametrize("local", [(0, 4), (4, 4), (2, 2), (3, 3), (1, 7), (5, 3)])
def test_local_experts(local: tuple[int, int], a4: bool, rng: torch.Generator) -> None:
    """The rank's experts begin at any offset, and the output is their part of the sum."""
    layer, (offset, count) = drawn(SHAPE, rng, a4), local
    x, part = make_x(17, SHAPE, torch.bfloat16, "cpu", rng), slice(offset, offset + count)
    weights, ids = make_routing("uniform", 17, SHAPE.experts, SHAPE.top_k, rng)
    ids[3, 1] = -1
    moe = wrapper(SHAPE, a4, num_local_experts=count, local_expert_offset=offset)
    for given in (ids, ids.long()):
        out = run(moe, layer, x, (weights, given), **operands(layer, part))
        kept = ids.where((ids >= offset) & (ids < offset + count), -1)
        assert same_bits(out, oxmoe.moe(x, layer.weights(), weights, kept))


@pytest.mark.parametrize("a4", [True, False], ids=["w4a4", "w4a16"])
def test_buffers(a4: bool, rng: torch.Generator) -> None:
    """With use_cuda_graph there is one output and one workspace for up to max_num_tokens; more tokens are an error."""
    layer = drawn(SHAPE, rng, a4)
    moe, free = wrapper(SHAPE, a4, use_cuda_graph=True, max_num_tokens=24), wrapper(SHAPE, a4, max_num_tokens=24)
    unbound = wrapper(SHAPE, a4, use_cuda_graph=True, max_num_tokens=None)
    addresses, rooms = set(), set()
    for tokens in (24, 1, 9, 24, 0):
        x = make_x(tokens, SHAPE, torch.bfloat16, "cpu", rng)
        routing = make_routing("uniform", tokens, SHAPE.experts, SHAPE.top_k, rng)
        out = run(moe, layer, x, routing)
        assert out.shape == x.shape and same_bits(out, run(free, layer, x, routing))
        assert same_bits(out, run(unbound, layer, x, routing))
        if tokens:
            addresses.add(out.data_ptr())
            assert moe._workspace is not None
            rooms.add(moe._workspace.data_ptr())
    assert len(addresses) == len(rooms) == 1
    x, routing = make_x(25, SHAPE, torch.bfloat16, "cpu", rng), make_routing("uniform", 25, 8, 3, rng)
    with pytest.raises(ValueError, match=r"num_tokens \(25\) exceeds max_num_tokens \(24\)"):
        run(moe, layer, x, routing)
    assert same_bits(run(free, layer, x, routing), run(unbound, layer, x, routing))


def test_made_in_inference_mode(rng: torch.Generator) -> None:
    """SGLang makes the object in a dummy run; calls outside of inference mode write to its buffers all the same."""
    layer, x = drawn(SHAPE, rng), make_x(5, SHAPE, torch.bfloat16, "cpu", rng)
    routing, tensors = make_routing("uniform", 5, SHAPE.experts, SHAPE.top_k, rng), operands(layer)
    with torch.inference_mode():
        moe = wrapper(SHAPE, use_cuda_graph=True, max_num_tokens=8)
        first = run(moe, layer, x, routing, **tensors).clone()
    out = run(moe, layer, x, routing, **tensors)
    assert same_bits(out, first) and not out.is_inference() and moe._workspace is not None
    assert not moe._workspace.is_inference()
    out.add_(1)


def test_experts_are_kept(rng: torch.Generator) -> None:
    """Experts are described once, and again when a tensor is written to or another one comes. The old ones are then let
    go."""
    layer, x = drawn(SHAPE, rng), make_x(6, SHAPE, torch.bfloat16, "cpu", rng)
    routing = make_routing("uniform", 6, SHAPE.experts, SHAPE.top_k, rng)
    moe, tensors = wrapper(SHAPE), operands(layer)
    first = run(moe, layer, x, routing, **tensors)
    made = [id(entry.weights) for entry in moe._cache._entries.values()]
    assert same_bits(run(moe, layer, x, routing, **tensors), first)
    assert made == [id(entry.weights) for entry in moe._cache._entries.values()]
    tensors["w2_alpha"].mul_(2)
    doubled = run(moe, layer, x, routing, **tensors)
    assert not same_bits(doubled, first) and relative_norm(doubled, first * 2) < 1e-2
    again = run(moe, layer, x, routing, **{**tensors, "w1_weight": tensors["w1_weight"].clone()})
    assert same_bits(again, doubled) and len(moe._cache) == 1
    weights = wrapper(SHAPE).prepare(**tensors)
    nothing = {name: None for name in tensors}
    assert same_bits(run(wrapper(SHAPE), layer, x, routing, **nothing, weights=weights), doubled)


def test_flashinfers_signatures() -> None:
    """The class has every parameter of 0.6.11 to 0.7.4, in their order."""
    made = list(inspect.signature(oxmoe.CuteDslMoEWrapper).parameters)
    assert (
        made
        == (
            "num_experts top_k hidden_size intermediate_size use_cuda_graph max_num_tokens num_local_experts "
            "local_expert_offset tile_size sf_vec_size output_dtype device enable_pdl activation_type swiglu_alpha "
            "swiglu_beta swiglu_limit situ_beta situ_linear_beta use_fused_finalize quant_mode "
            "clamped_relu2_limit swap_ab"
        ).split()
    )
    parameters = inspect.signature(oxmoe.CuteDslMoEWrapper.run).parameters
    assert list(parameters)[1:] == [*RUN, "per_token_scale", "nvfp4_4over6", "weights"]
    moe = oxmoe.CuteDslMoEWrapper(4, 2, 128, 64, False, 7, None, 0, 256, 16, torch.float16, "cpu", False)
    assert (moe.max_num_tokens, moe.num_local_experts, moe.tile_size, moe.gated) == (7, 4, 256, True)
    assert moe.get_valid_tactics() == []


def test_what_is_refused(rng: torch.Generator) -> None:
    made: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (NotImplementedError, "sf_vec_size 32", {"sf_vec_size": 32}),
        (ValueError, "situ_linear_beta: needs situ_beta", {"situ_linear_beta": 1.0}),
        (ValueError, "situ_beta: expected ActivationType.Swiglu", {"situ_beta": 4.0, "activation_type": 6}),
        (ValueError, "not with situ_beta", {"situ_beta": 4.0, "swiglu_limit": 7.0}),
        (NotImplementedError, "quant_mode 'w4a8'", {"quant_mode": "w4a8"}),
        (ValueError, "output_dtype: expected torch.bfloat16 with", {"quant_mode": "mxfp8", "output_dtype": torch.half}),
        (NotImplementedError, "no arithmetic for sf_vec_size 64", {"quant_mode": "mxfp8", "sf_vec_size": 64}),
        (NotImplementedError, "no arithmetic for clamped_relu2_limit", {"clamped_relu2_limit": torch.ones(1)}),
        (ValueError, "quant_mode: expected", {"quant_mode": "w8a8"}),
        (NotImplementedError, "activation_type: no arithmetic for 'Geglu'", {"activation_type": ActivationType.Geglu}),
        (NotImplementedError, "activation_type: no arithmetic for 7", {"activation_type": 7}),
        (ValueError, "only with Swiglu", {"activation_type": 6, "swiglu_limit": 7.0}),
        (ValueError, "output_dtype", {"output_dtype": torch.float8_e4m3fn}),
        (ValueError, "local_expert_offset: experts 6 to 10", {"num_local_experts": 4, "local_expert_offset": 6}),
        (ValueError, "max_num_tokens: expected 1", {"max_num_tokens": 0}),
    ]
    for error, words, options in made:
        with pytest.raises(error, match=words):
            wrapper(SHAPE, **options)
    with pytest.raises(ValueError, match="top_k: expected 1 to num_experts 2"):
        oxmoe.CuteDslMoEWrapper(2, 3, 128, 64)
    assert wrapper(SHAPE, quant_mode="nvfp4").quant_mode == "w4a4"
    layer, x = drawn(SHAPE, rng), make_x(6, SHAPE, torch.bfloat16, "cpu", rng)
    routing, moe, tensors = make_routing("uniform", 6, 8, 3, rng), wrapper(SHAPE), operands(layer)
    weights, ids = routing
    codes, scales = quantised(layer, x)
    assert scales is not None
    calls: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (NotImplementedError, "tactic", {"tactic": (128,)}),
        (NotImplementedError, "per_token_scale", {"per_token_scale": torch.ones(6)}),
        (NotImplementedError, "nvfp4_4over6", {"nvfp4_4over6": object()}),
        (ValueError, "token_selected_experts: expected shape", {"token_selected_experts": ids[:, :2]}),
        (ValueError, "token_final_scales: expected shape", {"token_final_scales": weights[:5]}),
        (ValueError, "x_sf: needed", {"x_sf": None}),
        (ValueError, "x_sf: expected 96 scales", {"x_sf": scales[:5]}),
        (ValueError, "x: expected shape", {"x": x}),
        (ValueError, "x: expected dtype", {"x": codes.to(torch.int16)}),
        (ValueError, "fc2_input_scale: expected one number", {"fc2_input_scale": None}),
        (ValueError, "fc2_input_scale: expected one number, got shape", {"fc2_input_scale": torch.ones(3)}),
        (ValueError, "w1_weight: expected shape", {"w1_weight": tensors["w1_weight"][:, :128]}),
        (ValueError, "w2_weight, w2_alpha: needed", {"w2_weight": None, "w2_alpha": None}),
        (ValueError, "w2_global_scale", {"w2_alpha": torch.ones(3)}),
    ]
    for error, words, given in calls:
        with pytest.raises(error, match=words):
            run(moe, layer, x, routing, **{**tensors, **given})
    plain = wrapper(SHAPE, False)
    for words, given in (("x_sf: expected None", {"x_sf": scales}), ("fc2_input_scale: expected None", {"x_sf": None})):
        with pytest.raises(ValueError, match=words):
            run(plain, layer, x, routing, **{**tensors, "x": x, **given})
