"""flashinfer's trtllm-gen layers of bf16, fp8 with one scale, MXFP4 and NVFP4: each against the layer of the same
numbers in oxmoe's own form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Shape, make_layer, make_routing, make_x, tie_free_logits
from fp8_cases import make_fp8, make_fp8_tensor
from mxfp4_cases import make_blocks
from nvfp4_cases import make as make_nvfp4
from oxmoe import nvfp4
from oxmoe.peers import flashinfer_trtllm_formats
from oxmoe.testing import same_bits
from trtllm_layouts import blocked, interleave, shuffle

# I and H in whole tiles of scales, 128 rows by 4 blocks, as flashinfer's shuffle needs them.
SHAPE = Shape("trtllm-formats", 8, 3, 256, 128, options=(("layout", "up_gate"),))
BIASED = Shape("trtllm-formats", 8, 3, 256, 128, bias=True, options=(("layout", "up_gate"),))
FORMATS = ("bf16", "fp8", "mxfp4", "nvfp4")
Call = tuple[oxmoe.ExpertWeights, dict[str, Any], dict[str, Any]]


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    flashinfer_trtllm_formats.cache.clear()


def on(device: str, tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: part.to(device) if isinstance(part, Tensor) else part for name, part in tensors.items()}


def codes(weights: Tensor, gated: bool) -> Tensor:
    return shuffle(weights.cpu().view(torch.uint8), gated)


def bf16(device: str, rng: torch.Generator, *, shuffled: bool = True, layout: int = 2, gated: bool = True) -> Call:
    shape = SHAPE if gated else SHAPE.with_options(gated=False)
    made: Any = make_layer(shape, torch.bfloat16, device, rng)
    forms = []
    for weights, of_halves in ((made.w13, gated), (made.w2, False)):
        form = shuffle(weights.cpu(), of_halves) if shuffled else weights.cpu()
        forms.append((blocked(form) if layout == 2 else form).to(device))
    options = {} if gated else {"activation_type": SimpleNamespace(name="Relu2")}
    given = {"gemm1_weights": forms[0], "gemm2_weights": forms[1], "use_shuffled_weight": shuffled}
    own = {"activation": "silu", "layout": "up_gate"} if gated else {"activation": "relu2", "gated": False}
    return oxmoe.ExpertWeights.bf16(made.w13, made.w2, **own), given | {"weight_layout": layout} | options, {}  # type: ignore[arg-type]


def fp8(device: str, rng: torch.Generator, *, gated: bool = True) -> Call:
    """Activation scales are powers of two, whose products and quotients are exact."""
    shape = SHAPE if gated else SHAPE.with_options(gated=False, activation="relu2")
    made: Any = make_fp8_tensor(shape, device, rng, mode="static")
    made.a13_scale, made.a2_scale = torch.ones(1, device=device), torch.tensor([2.0**-8], device=device)
    of_x, quantises = 2.0**-7, 2.0**8
    of_sums = made.w13_scale.reshape(-1) * of_x
    assert of_sums.numel() == SHAPE.experts
    made.w13_scale = of_sums
    given = {
        "gemm1_weights": codes(made.w13, gated).view(torch.float8_e4m3fn),
        "gemm2_weights": codes(made.w2, False).view(torch.float8_e4m3fn),
        "output1_scales_gate_scalar": of_sums,
        "output1_scales_scalar": of_sums * quantises if gated else torch.full_like(of_sums, quantises),
        "output2_scales_scalar": made.w2_scale.reshape(-1) / quantises,
        "activation_type": 3 if gated else SimpleNamespace(name="Relu2"),
    }
    return made.weights(), on(device, given), {"x_scale": torch.ones(1, device=device)}


def mxfp4(device: str, rng: torch.Generator) -> Call:
    made: Any = make_blocks(BIASED, "bf16", device, rng, bias_dtype=torch.float32)
    numbers = {name: torch.full((SHAPE.experts,), value) for name, value in (("alpha", 1.7), ("beta", 1.0))}
    given = {
        "gemm1_weights": codes(made.w13, True),
        "gemm1_weights_scale": interleave(codes(made.w13_scale, True)).view(made.w13_scale.shape),
        "gemm2_weights": codes(made.w2, False),
        "gemm2_weights_scale": interleave(codes(made.w2_scale, False)).view(made.w2_scale.shape),
        "gemm1_bias": shuffle(made.b13.cpu(), True),
        "gemm2_bias": shuffle(made.b2.cpu(), False),
        "gemm1_clamp_limit": None,
        **{f"gemm1_{name}": value for name, value in numbers.items()},
        **dict.fromkeys(("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")),
    }
    return made.weights(alpha=1.7, beta=1.0), on(device, given), {}


def nv(device: str, rng: torch.Generator) -> Call:
    """W4A4, the factor of GEMM1's output a power of two."""
    made: Any = make_nvfp4(SHAPE, rng)
    of_sums, quantises = made.w13_global[:, 0].contiguous(), 128.0
    own = (made.w13, made.w2, made.w13_scale, made.w2_scale, of_sums, made.w2_global)
    weights = oxmoe.ExpertWeights.nvfp4(
        *(part.to(device) for part in own), input_global_scale=1.0, a2_global_scale=quantises, layout="up_gate"
    )
    scales = [part.view(torch.uint8) for part in (made.w13_scale, made.w2_scale)]
    given = {
        "gemm1_weights": codes(made.w13, True),
        "gemm1_weights_scale": interleave(shuffle(scales[0], True)).view(scales[0].shape).view(torch.float8_e4m3fn),
        "gemm2_weights": codes(made.w2, False),
        "gemm2_weights_scale": interleave(shuffle(scales[1], False)).view(scales[1].shape).view(torch.float8_e4m3fn),
        **dict.fromkeys(("gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_bias")),
        "output1_scale_scalar": of_sums * quantises,
        "output1_scale_gate_scalar": of_sums,
        "output2_scale_scalar": made.w2_global,
    }
    return weights, on(device, given), {}


LAYERS: dict[str, Any] = {"bf16": bf16, "fp8": fp8, "mxfp4": mxfp4, "nvfp4": nv}
CALLS = {
    "bf16": (oxmoe.trtllm_bf16_moe, oxmoe.trtllm_bf16_routed_moe, oxmoe.prepare_trtllm_bf16_moe),
    "fp8": (
        oxmoe.trtllm_fp8_per_tensor_scale_moe,
        oxmoe.trtllm_fp8_per_tensor_scale_routed_moe,
        oxmoe.prepare_trtllm_fp8_per_tensor_scale_moe,
    ),
    "mxfp4": (
        oxmoe.trtllm_fp4_block_scale_moe,
        oxmoe.trtllm_fp4_block_scale_routed_moe,
        oxmoe.prepare_trtllm_fp4_block_scale_moe,
    ),
}
CALLS["nvfp4"] = CALLS["mxfp4"]


def tokens_of(format: str, tokens: int, device: str, rng: torch.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (hidden_states and its scale as flashinfer has them, x and x_scale of `moe`)."""
    x = make_x(tokens, SHAPE, torch.bfloat16, device, rng)
    if format == "fp8":
        x = (x.float() * 2.0**7).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"hidden_states": x}, {"x": x}
    if format == "nvfp4":
        x, scales = nvfp4.fp4_quantize(x, torch.ones(1, device=device), is_sf_swizzled_layout=False)
        scales = scales.view(torch.float8_e4m3fn).reshape(tokens, SHAPE.hidden // 16)
        return {"hidden_states": x, "hidden_states_scale": scales}, {"x": x, "x_scale": scales}
    return {"hidden_states": x} | ({"hidden_states_scale": None} if format == "mxfp4" else {}), {"x": x}


def sizes(**others: Any) -> dict[str, Any]:
    return {
        "num_experts": SHAPE.experts,
        "top_k": SHAPE.top_k,
        "n_group": None,
        "topk_group": None,
        "intermediate_size": SHAPE.intermediate,
        "local_expert_offset": 0,
        "local_num_experts": SHAPE.experts,
        "routed_scaling_factor": None,
        **others,
    }


def run(call: Any, format: str, **given: Any) -> Tensor:
    if format == "fp8":
        given = {"use_routing_scales_on_input": False} | given
    if call is not oxmoe.trtllm_bf16_routed_moe:
        given = {"routing_bias": None} | given
    result = call(**given)
    if format in ("mxfp4", "nvfp4"):
        (result,) = result
    assert isinstance(result, Tensor)
    return result


def routed(tokens: int, device: str, rng: torch.Generator, experts: int = SHAPE.experts) -> tuple[Tensor, Tensor]:
    gates, ids = (part.to(device) for part in make_routing("uniform", tokens, experts, SHAPE.top_k, rng))
    return gates, ids.int()


@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("format", FORMATS)
def test_layers(format: str, tokens: int, device: str, rng: torch.Generator) -> None:
    weights, given, scale = LAYERS[format](device, rng)
    hidden, own = tokens_of(format, tokens, device, rng)
    by_logits, by_ids, prepare = CALLS[format]
    logits = tie_free_logits(tokens, SHAPE.experts, rng).to(device)
    method_own = {"router_logits": logits, "top_k": 3, "scoring_func": "softmax_topk", "renormalize": False}
    expected = oxmoe.moe(**own, **scale, **method_own, weights=weights)
    assert tokens == 0 or (bool(expected.any()) and bool(expected.isfinite().all()))
    out, replay = torch.full_like(expected, torch.nan), torch.full((tokens + 2, 3), -7, dtype=torch.int16)
    method = {"routing_logits": logits, "routing_method_type": 1}
    assert run(by_logits, format, **method, **hidden, **given, **sizes(), output=out) is out and same_bits(
        out, expected
    )
    # The call runs again, from the cache, and writes the chosen ids.
    replay = replay.to(device)
    again = run(by_logits, format, **method, **hidden, **given, **sizes(), routing_replay_out=replay)
    assert same_bits(again, expected) and len(flashinfer_trtllm_formats.cache) == 1
    best = logits.float().topk(3).indices.short()
    assert torch.equal(replay[:tokens], best) and bool((replay[tokens:] == -7).all())
    gates, ids = routed(tokens, device, rng)
    expected = oxmoe.moe(**own, **scale, weights=weights, topk_weights=gates, topk_ids=ids)
    assert same_bits(run(by_ids, format, topk_ids=(ids, gates), **hidden, **given, **sizes()), expected)
    rounded = gates.bfloat16().float()
    expected = oxmoe.moe(**own, **scale, weights=weights, topk_weights=rounded, topk_ids=ids)
    packed = oxmoe.pack_topk(gates, ids)
    assert same_bits(run(by_ids, format, topk_ids=packed, **hidden, **given, **sizes()), expected)
    made = prepare(**{name: value for name, value in given.items()})
    nothing = dict.fromkeys(name for name in given if name.startswith(("gemm", "output")))
    result = run(by_ids, format, topk_ids=packed, **hidden, **given | nothing, **sizes(), weights=made)
    assert same_bits(result, expected)


@pytest.mark.parametrize("format", FORMATS)
def test_ranks(format: str, device: str, rng: torch.Generator) -> None:
    weights, given, scale = LAYERS[format](device, rng)
    hidden, own = tokens_of(format, 9, device, rng)
    gates, ids = routed(9, device, rng, 16)
    for rank in range(2):
        expected = oxmoe.moe(**own, **scale, weights=weights, topk_weights=gates, topk_ids=ids, ep_size=2, ep_rank=rank)
        part = sizes(num_experts=16, local_expert_offset=8 * rank)
        result = run(CALLS[format][1], format, topk_ids=(ids, gates), **hidden, **given, **part)
        assert bool(result.any()) and same_bits(result, expected)
    with pytest.raises(ValueError, match=r"gemm1_weights: expected 4 experts \(local_num_experts\), got 8"):
        run(CALLS[format][1], format, topk_ids=(ids, gates), **hidden, **given, **sizes(local_num_experts=4))
    # Ranks that are no equal parts: experts 3 to 10 of 16, and 8 of 11.
    logits = tie_free_logits(9, 16, rng).to(device)
    for experts, offset in ((16, 3), (11, 3), (11, 0)):
        part = sizes(num_experts=experts, local_expert_offset=offset)
        some = ids.where(ids < experts, -1)
        local = torch.where((some >= offset) & (some < offset + 8), some - offset, -1)
        expected = oxmoe.moe(**own, **scale, weights=weights, topk_weights=gates, topk_ids=local)
        result = run(CALLS[format][1], format, topk_ids=(some, gates), **hidden, **given, **part)
        assert bool(result.any()) and same_bits(result, expected)
        chosen, places = oxmoe.topk(logits[:, :experts].contiguous(), 3, scoring_func="softmax")
        local = torch.where((places >= offset) & (places < offset + 8), places - offset, -1)
        expected = oxmoe.moe(**own, **scale, weights=weights, topk_weights=chosen, topk_ids=local)
        method = {"routing_logits": logits[:, :experts].contiguous(), "routing_method_type": 4}
        result = run(CALLS[format][0], format, **method, **hidden, **given, **part)
        assert bool(result.any()) and float((result - expected).float().norm()) < 1e-2 * float(expected.float().norm())
    with pytest.raises(ValueError, match=r"local_expert_offset: experts 9 to 17 \(local_num_experts 8\) are not among"):
        part = sizes(num_experts=16, local_expert_offset=9)
        run(CALLS[format][1], format, topk_ids=(ids, gates), **hidden, **given, **part)


@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("format", FORMATS)
def test_without_finalize(format: str, tokens: int, device: str, rng: torch.Generator) -> None:
    """flashinfer's list of rows, weights and places gives the finished output when its parts are put together."""
    _, given, _ = LAYERS[format](device, rng)
    hidden, _ = tokens_of(format, tokens, device, rng)
    logits = tie_free_logits(tokens, 16, rng).to(device)
    gates, ids = routed(tokens, device, rng, 16)
    if tokens:
        # An expert that both ranks hold, none, and one that neither holds.
        ids[0] = torch.tensor([9, -1, 2])
    for rank, (experts, offset) in enumerate(((16, 8), (16, 3))):
        part = sizes(num_experts=experts, local_expert_offset=offset, routed_scaling_factor=2.5)
        method = {"routing_logits": logits, "routing_method_type": 2, "routing_bias": torch.zeros(16, device=device)}
        for name, call, routing in (
            ("logits", CALLS[format][0], method),
            ("ids", CALLS[format][1], {"topk_ids": (ids, gates)}),
        ):
            arguments = {**routing, **hidden, **given, **part}
            if format == "fp8":
                arguments = {"use_routing_scales_on_input": False} | arguments
            if call is not oxmoe.trtllm_bf16_routed_moe:
                arguments = {"routing_bias": None} | arguments
            finished = run(call, format, **arguments)
            rows, factors, places = call(**arguments, do_finalize=False)
            assert rows.shape == (tokens * 3, 256) and places.shape == (tokens * 3,) and places.dtype == torch.int32
            assert factors.shape == (tokens, 3) and rows.dtype == torch.bfloat16
            assert factors.dtype == (torch.bfloat16 if name == "logits" else torch.float32)
            absent = places.long() < 0
            taken = rows[places.long().clamp(min=0)].double() if tokens else rows.double()
            taken = taken.masked_fill(absent[:, None], 0).view(tokens, 3, 256) * factors.double()[..., None]
            total = taken.sum(1)
            assert bool(absent.any()) or tokens == 0 or name == "logits"
            assert tokens == 0 or name == "logits" or bool(finished[0].any())
            # The weights of the finished sum are not rounded to bf16.
            error = (total - finished.double()).norm()
            assert error <= 6e-3 * finished.double().norm(), (name, rank, error)
            made = call(**arguments, do_finalize=False, weights=CALLS[format][2](**prepared(format, given)))
            assert all(same_bits(a, b) for a, b in zip(made, (rows, factors, places), strict=True))
    with pytest.raises(ValueError, match="output: not with do_finalize=False"):
        call(**arguments, do_finalize=False, output=finished)
    if format == "fp8":
        with pytest.raises(NotImplementedError, match="use_routing_scales_on_input: no kernel for it with do_finalize"):
            call(**arguments | {"use_routing_scales_on_input": True}, do_finalize=False)


def prepared(format: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `prepare_...` among those of the call."""
    return {name: value for name, value in given.items() if not name.startswith("hidden_states")}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("layout", [0, 2])
@pytest.mark.parametrize("shuffled", [True, False])
def test_bf16_forms(shuffled: bool, layout: int, gated: bool, device: str, rng: torch.Generator) -> None:
    weights, given, _ = bf16(device, rng, shuffled=shuffled, layout=layout, gated=gated)
    hidden, own = tokens_of("bf16", 9, device, rng)
    gates, ids = routed(9, device, rng)
    expected = oxmoe.moe(**own, weights=weights, topk_weights=gates, topk_ids=ids)
    call = {"topk_ids": (ids, gates), **hidden, **given, **sizes()}
    result = oxmoe.trtllm_bf16_routed_moe(**call)
    assert bool(result.any()) and same_bits(result, expected)
    # Weights that lie plainly are read as they are; of the others a copy is kept, which a write makes anew.
    assert len(flashinfer_trtllm_formats.cache) == int(shuffled or layout == 2)
    given["gemm2_weights"].zero_()
    assert not oxmoe.trtllm_bf16_routed_moe(**call).any()


def test_swiglu_numbers(device: str, rng: torch.Generator) -> None:
    """alpha, beta and limit of bf16 experts count as they are; SwigluStep has a limit of 7 if none is given."""
    _, given, _ = bf16(device, rng, shuffled=False, layout=0)
    hidden, own = tokens_of("bf16", 9, device, rng)
    gates, ids = routed(9, device, rng)
    numbers = {name: (torch.rand(8, generator=rng) + 0.2).to(device) for name in ("alpha", "beta", "limit")}
    named = {f"gemm1_{'clamp_limit' if name == 'limit' else name}": value for name, value in numbers.items()}
    for options, own_options in (
        (named, numbers),
        ({"activation_type": SimpleNamespace(name="SwigluStep")}, {"clamp": "after", "limit": 7.0}),
    ):
        weights = oxmoe.ExpertWeights.bf16(
            given["gemm1_weights"], given["gemm2_weights"], layout="up_gate", **own_options  # type: ignore[arg-type]
        )  # fmt: skip
        expected = oxmoe.moe(**own, weights=weights, topk_weights=gates, topk_ids=ids)
        result = oxmoe.trtllm_bf16_routed_moe(topk_ids=(ids, gates), **hidden, **given, **sizes(), **options)
        assert bool(result.any()) and same_bits(result, expected)


def test_situ(device: str, rng: torch.Generator) -> None:
    """gemm1_alpha and gemm1_beta are the bounds of gate and up, of dequantised numbers also in NVFP4, and 1 by default.
    There output1_scale_scalar is the factor of GEMM1's output alone."""
    bounds = {"situ_beta": torch.rand(8, generator=rng) + 0.5, "situ_linear_beta": torch.rand(8, generator=rng) + 0.5}
    bounds = {name: value.to(device) for name, value in bounds.items()}
    named = {"gemm1_alpha": bounds["situ_beta"], "gemm1_beta": bounds["situ_linear_beta"]}
    ones = {"situ_beta": 1.0, "situ_linear_beta": 1.0}
    nothing = dict.fromkeys(("gemm1_alpha", "gemm1_beta"))
    for format in ("bf16", "mxfp4", "nvfp4"):
        options: dict[str, Any] = {"shuffled": True, "layout": 0} if format == "bf16" else {}
        _, given, _ = LAYERS[format](device, rng, **options)
        hidden, own = tokens_of(format, 9, device, rng)
        gates, ids = routed(9, device, rng)
        if format == "nvfp4":
            given["output1_scale_scalar"] = torch.full_like(given["output1_scale_gate_scalar"], 128.0)
        for kind, numbers, expected_numbers in ((10, named, bounds), (SimpleNamespace(name="Situ"), nothing, ones)):
            call = {**given, **numbers, "activation_type": kind}
            prepared = CALLS[format][2](**call)
            assert prepared.activation == "situ"
            for name, value in expected_numbers.items():
                assert getattr(prepared, name) is value or getattr(prepared, name) == value
            result = run(CALLS[format][1], format, topk_ids=(ids, gates), **hidden, **call, **sizes())
            expected = oxmoe.moe(**own, weights=prepared, topk_weights=gates, topk_ids=ids)
            assert bool(result.any()) and same_bits(result, expected)
        with pytest.raises(NotImplementedError, match="gemm1_clamp_limit: no kernel for Situ with a limit"):
            CALLS[format][2](**{**call, "gemm1_clamp_limit": torch.ones(8, device=device)})
    _, given, _ = fp8(device, rng)
    hidden, _ = tokens_of("fp8", 9, device, rng)
    with pytest.raises(NotImplementedError, match="no kernel for 'Situ' with fp8 weights of one scale"):
        run(CALLS["fp8"][1], "fp8", topk_ids=(ids, gates), **hidden, **{**given, "activation_type": 10}, **sizes())


def test_situ_of_nvfp4_is_the_layers(device: str, rng: torch.Generator) -> None:
    _, given, _ = nv(device, torch.Generator().manual_seed(3))
    made: Any = make_nvfp4(SHAPE, torch.Generator().manual_seed(3))
    own = (made.w13, made.w2, made.w13_scale, made.w2_scale, made.w13_global[:, 0].contiguous(), made.w2_global)
    numbers = {"situ_beta": 4.0, "situ_linear_beta": 25.0}
    weights = oxmoe.ExpertWeights.nvfp4(
        *(part.to(device) for part in own), input_global_scale=1.0, a2_global_scale=128.0, layout="up_gate",
        activation="situ", **numbers,
    )  # fmt: skip
    given |= {"gemm1_alpha": torch.full((8,), 4.0), "gemm1_beta": torch.full((8,), 25.0), "activation_type": 10}
    given["output1_scale_scalar"] = torch.full_like(given["output1_scale_gate_scalar"], 128.0)
    hidden, tokens = tokens_of("nvfp4", 9, device, rng)
    gates, ids = routed(9, device, rng)
    expected = oxmoe.moe(**tokens, weights=weights, topk_weights=gates, topk_ids=ids)
    result = run(CALLS["nvfp4"][1], "nvfp4", topk_ids=(ids, gates), **hidden, **on(device, given), **sizes())
    assert bool(result.any()) and same_bits(result, expected)


def test_fp8_without_a_gate_and_weights_on_input(device: str, rng: torch.Generator) -> None:
    for gated in (False, True):
        weights, given, scale = fp8(device, rng, gated=gated)
        hidden, own = tokens_of("fp8", 9, device, rng)
        gates, ids = routed(9, device, rng)
        operands = {"weights": weights, "topk_weights": gates, "topk_ids": ids, **own, **scale}
        call = {"topk_ids": (ids, gates), **hidden, **given, **sizes()}
        for on_input in (False, True):
            expected = oxmoe.moe(**operands, apply_router_weight_on_input=on_input)
            result = run(CALLS["fp8"][1], "fp8", **call, use_routing_scales_on_input=on_input)
            assert bool(result.any()) and same_bits(result, expected)


def test_fp8_numbers_of_experts(device: str, rng: torch.Generator) -> None:
    """A limit is in units of GEMM1's sums; all experts quantise with the smallest factor."""
    _, given, scale = fp8(device, rng)
    hidden, own = tokens_of("fp8", 9, device, rng)
    gates, ids = routed(9, device, rng)
    of_sums, limits = given["output1_scales_gate_scalar"], torch.full((8,), 0.75, device=device)
    factors = (2.0 ** torch.randint(6, 10, (8,), generator=rng)).to(device)
    factors[0] = 2.0**6
    changed = {
        "output1_scales_scalar": of_sums * factors,
        "output2_scales_scalar": given["output2_scales_scalar"] * 2.0**8 / factors,
        "gemm1_clamp_limit": limits / of_sums,
        "activation_type": SimpleNamespace(name="SwigluStep"),
    }
    plain = {name: given[name].cpu().view(torch.uint8) for name in ("gemm1_weights", "gemm2_weights")}
    rows = torch.arange(256).view(1, 256, 1)
    places = shuffle(rows, True)[0, :, 0].argsort(), shuffle(rows, False)[0, :, 0].argsort()
    w13, w2 = (
        plain[name][:, order].contiguous().view(torch.float8_e4m3fn).to(device)
        for name, order in zip(plain, places, strict=True)
    )
    weights = oxmoe.ExpertWeights.fp8_tensor(
        w13, w2, of_sums, given["output2_scales_scalar"] * 2.0**8, a13_scale=torch.ones(1, device=device),
        a2_scale=torch.tensor([2.0**-6], device=device), layout="up_gate", clamp="after",
        limit=(limits / of_sums) * of_sums,
    )  # fmt: skip
    expected = oxmoe.moe(**own, **scale, weights=weights, topk_weights=gates, topk_ids=ids)
    result = run(CALLS["fp8"][1], "fp8", topk_ids=(ids, gates), **hidden, **given | changed, **sizes())
    assert bool(result.any()) and same_bits(result, expected)


def test_step_of_nvfp4(device: str, rng: torch.Generator) -> None:
    """SwigluStep's limit is in units of GEMM1's sums, and 7 of dequantised numbers by default. An alpha of ones, which
    flashinfer's own preparation gives, changes nothing."""
    seed = int(torch.randint(1 << 20, (), generator=rng))
    weights, given, _ = nv(device, torch.Generator().manual_seed(seed))
    made: Any = make_nvfp4(SHAPE, torch.Generator().manual_seed(seed))
    of_sums = made.w13_global[:, 0].contiguous()
    own = (made.w13, made.w2, made.w13_scale, made.w2_scale, of_sums, made.w2_global)
    hidden, tokens = tokens_of("nvfp4", 9, device, rng)
    gates, ids = routed(9, device, rng)
    call = {"topk_ids": (ids, gates), **hidden, **given, **sizes()}
    expected = oxmoe.moe(**tokens, weights=weights, topk_weights=gates, topk_ids=ids)
    assert same_bits(run(CALLS["nvfp4"][1], "nvfp4", **call | {"gemm1_alpha": torch.ones(8, device=device)}), expected)
    powers = 2.0 ** torch.randint(-3, 1, (8,), generator=rng)
    for limit, raw in ((powers, powers / of_sums), (7.0, None)):
        step = {"layout": "up_gate", "clamp": "after", "limit": limit if raw is None else (raw * of_sums).to(device)}
        weights = oxmoe.ExpertWeights.nvfp4(
            *(part.to(device) for part in own), input_global_scale=1.0, a2_global_scale=128.0, **step
        )
        expected = oxmoe.moe(**tokens, weights=weights, topk_weights=gates, topk_ids=ids)
        changed = {"activation_type": SimpleNamespace(name="SwigluStep")}
        changed["gemm1_clamp_limit"] = None if raw is None else raw.to(device)
        result = run(CALLS["nvfp4"][1], "nvfp4", **call | changed)
        assert bool(result.any()) and same_bits(result, expected)
    with pytest.raises(ValueError, match="gemm1_alpha: SwigluStep takes gemm1_clamp_limit alone"):
        run(CALLS["nvfp4"][1], "nvfp4", **call | changed | {"gemm1_alpha": torch.ones(8, device=device)})


MODES = {"bf16": "bf16", "fp8": "fp8_per_tensor", "mxfp4": "mxfp4_bf16", "nvfp4": "nvfp4"}


@pytest.mark.parametrize("format", FORMATS)
def test_workspace_buffer(format: str, device: str, rng: torch.Generator) -> None:
    """A buffer of the right size is written to; a smaller one is left alone, and the result is the same."""
    _, given, _ = LAYERS[format](device, rng)
    hidden, _ = tokens_of(format, 9, device, rng)
    gates, ids = routed(9, device, rng)
    call = {"topk_ids": (ids, gates), **hidden, **given, **sizes()}
    logits = {"routing_logits": tie_free_logits(9, 8, rng).to(device), "routing_method_type": 1, **hidden, **given}
    size = oxmoe.trtllm_fused_moe_workspace_size(9, 256, 128, 8, 3, quant_mode=MODES[format], device=device)
    prepared = CALLS[format][2](**given)
    assert size == oxmoe.workspace_bytes(prepared, 9, 3)
    for by, arguments in ((CALLS[format][1], call), (CALLS[format][0], {**logits, **sizes()})):
        expected = run(by, format, **arguments)
        for room, weights in ((size, None), (size, prepared), (size - 1, None)):
            memory = torch.full((size + 256,), 0x5A, dtype=torch.uint8, device=device)
            start = -memory.data_ptr() % 256
            buffer = memory[start : start + room]
            result = run(by, format, **arguments, workspace_buffer=buffer.view(torch.int8), weights=weights)
            assert bool(result.any()) and same_bits(result, expected)
            assert bool((buffer != 0x5A).any()) == (room == size)
    with pytest.raises(RuntimeError, match="workspace_buffer: dtype must be int8 or uint8, got float32"):
        run(CALLS[format][1], format, **call, workspace_buffer=torch.zeros(size, device=device))
    with pytest.raises(ValueError, match=r"workspace_buffer: must be 1-D, got shape \[2, 256\]"):
        buffer = torch.zeros(2, 256, dtype=torch.uint8, device=device)
        run(CALLS[format][1], format, **call, workspace_buffer=buffer)


def test_workspace_size() -> None:
    size = oxmoe.trtllm_fused_moe_workspace_size
    whole = (32, 256, 128, 8, 3)
    for mode, format in (("fp8_block_scale", "fp8_block"), ("mxfp8", "mxfp8"), ("mxint4", "int4")):
        own = oxmoe._oxmoe.shape_workspace_bytes(4, 3, 256, 128, 32, format=format)
        assert size(*whole, quant_mode=mode, local_num_experts=4, tactic=(8, -1)) == own > 0
    with_shared = size(*whole, quant_mode="mxfp8", num_fused_shared_experts=2)
    assert with_shared == oxmoe._oxmoe.shape_workspace_bytes(10, 5, 256, 128, 32, format="mxfp8") > 0
    plain = size(*whole, quant_mode="bf16", activation_type=SimpleNamespace(name="Relu2"))
    assert plain == oxmoe._oxmoe.shape_workspace_bytes(8, 3, 256, 128, 32, gated=False)
    calls: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "quant_mode: expected one of 'bf16', .*, got 'fp4'", {"quant_mode": "fp4"}),
        (NotImplementedError, "quant_mode: no kernel for 'mxfp4_mxfp8'; served are", {"quant_mode": "mxfp4_mxfp8"}),
        (
            ValueError,
            "num_fused_shared_experts: expected 0 or more, and with them all 8 experts here, got 1 with local_num_exp",
            {"num_fused_shared_experts": 1, "local_num_experts": 4},
        ),
        (
            NotImplementedError,
            "no kernel for num_fused_shared_experts with bf16",
            {"num_fused_shared_experts": 1, "quant_mode": "bf16"},
        ),
        (NotImplementedError, "no kernel for use_per_token_scale", {"use_per_token_scale": True}),
        (ValueError, "valid_intermediate_size: expected 1 to 128 .*, got 0", {"valid_intermediate_size": 0}),
        (ValueError, "local_num_experts: expected at most num_experts 8, got 9", {"local_num_experts": 9}),
        (ValueError, "local_num_experts: expected 1 or more, got 0", {"local_num_experts": 0}),
    ]
    for error, words, options in calls:
        with pytest.raises(error, match=words):
            size(*whole, **{"quant_mode": "nvfp4"} | options)
    with pytest.raises(ValueError, match="max_num_tokens: expected 1 or more, got 0"):
        size(0, *whole[1:], quant_mode="bf16")


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "fp8_block"])
def test_fused_shared_experts(format: str, shared: int, device: str, rng: torch.Generator) -> None:
    """The last experts are every token's, with weight 1. The others are routed as DeepSeek-V3 does it."""
    tokens, routed_experts = 9, SHAPE.experts - shared
    if format == "fp8_block":
        made = make_fp8(SHAPE, device, rng)
        weights, call = made.weights(), oxmoe.trtllm_fp8_block_scale_moe
        x, x_scale = oxmoe.quantize.per_token_group_quant_fp8(make_x(tokens, SHAPE, torch.bfloat16, device, rng), 128)
        hidden = {"hidden_states": x, "hidden_states_scale": x_scale.t().contiguous()}
        own: dict[str, Any] = {"x": x, "x_scale": x_scale}
        names = ("gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale")
        given = dict(zip(names, (made.w13, made.w13_scale, made.w2, made.w2_scale), strict=True))
    else:
        weights, given, _ = LAYERS[format](device, rng)
        hidden, own = tokens_of(format, tokens, device, rng)
        call = CALLS[format][0]
    logits = tie_free_logits(tokens, routed_experts, rng).to(device)
    bias = (0.1 * torch.randn(routed_experts, generator=rng)).to(device)
    part = sizes(num_experts=routed_experts, local_num_experts=routed_experts, routed_scaling_factor=2.5)
    method = {"routing_logits": logits, "routing_method_type": 2, "routing_bias": bias}
    arguments = {**method, **hidden, **given, **part, "num_fused_shared_experts": shared}
    replay = torch.full((tokens + 1, SHAPE.top_k), -7, dtype=torch.int16, device=device)
    out = torch.full((tokens, SHAPE.hidden), torch.nan, dtype=torch.bfloat16, device=device)
    result = call(**arguments, output=out, routing_replay_out=replay)
    assert (result[0] if isinstance(result, list) else result) is out
    # The definition, in fp64 and with the ids that it chooses.
    scores = logits.double().sigmoid()
    ids = (scores + bias.double()).topk(SHAPE.top_k).indices
    chosen = scores.gather(1, ids)
    chosen = torch.cat([2.5 * chosen / chosen.sum(1, keepdim=True), chosen.new_ones(tokens, shared)], 1).float()
    all_ids = torch.cat([ids, torch.arange(routed_experts, SHAPE.experts, device=device).expand(tokens, shared)], 1)
    expected = oxmoe.moe(**own, weights=weights, topk_weights=chosen, topk_ids=all_ids)
    assert bool(expected.any()) and float((out - expected).float().norm()) < 1e-2 * float(expected.float().norm())
    assert torch.equal(replay[:tokens].long(), ids) and bool((replay[tokens:] == -7).all())
    rows, gates, places = call(**arguments, do_finalize=False)
    assert gates.shape == (tokens, SHAPE.top_k + shared) and gates.dtype == torch.bfloat16
    assert rows.shape == (places.numel(), SHAPE.hidden) and bool((gates[:, SHAPE.top_k :] == 1).all())
    for words, changed in (
        (r"expected all \d experts here .*, got local_expert_offset 0, local_num_experts 4", {"local_num_experts": 4}),
        (r"expected routing_method_type DeepSeekV3 \(2\), got 1", {"routing_method_type": 1}),
    ):
        with pytest.raises(ValueError, match=f"num_fused_shared_experts: {words}"):
            call(**{**arguments, **changed})
    with pytest.raises(ValueError, match=r"gemm1_weights: expected \d+ experts \(local_num_experts\), got 8"):
        call(**{**arguments, "num_fused_shared_experts": shared + 1})


def test_refusals(rng: torch.Generator) -> None:
    gates, ids = routed(5, "cpu", rng)
    for format in FORMATS:
        _, given, _ = LAYERS[format]("cpu", rng)
        hidden, _ = tokens_of(format, 5, "cpu", rng)
        call = {"topk_ids": (ids, gates), **hidden, **given, **sizes()}
        by_ids = CALLS[format][1]
        with pytest.raises(NotImplementedError, match="activation_type: no kernel for 'Relu'"):
            run(by_ids, format, **call | {"activation_type": SimpleNamespace(name="Relu")})
        with pytest.raises(ValueError, match="weights: expected ExpertWeights, got str"):
            run(by_ids, format, **call, weights="none")
        other = torch.zeros(5, 256, dtype=torch.float8_e4m3fn if format != "fp8" else torch.bfloat16)
        with pytest.raises((ValueError, NotImplementedError), match=r"no kernel for hidden_states of|^x: "):
            run(by_ids, format, **call | {"hidden_states": other})
    _, given, _ = nv("cpu", rng)
    hidden, _ = tokens_of("nvfp4", 5, "cpu", rng)
    call = {"topk_ids": (ids, gates), **hidden, **given, **sizes()}
    for error, words, changed in (
        (NotImplementedError, "no kernel for per_token_scale", {"per_token_scale": torch.ones(5)}),
        (NotImplementedError, "no kernel for nvfp4_4over6", {"nvfp4_4over6": object()}),
        (NotImplementedError, "no kernel for routing_metadata", {"routing_metadata": object()}),
        (NotImplementedError, "no kernel for gemm1_lora_delta", {"gemm1_lora_delta": torch.ones(5)}),
        (NotImplementedError, "no kernel for num_fused_shared_experts", {"num_fused_shared_experts": 1}),
        (NotImplementedError, "no kernel for hidden_states_scale_layout 0", {"hidden_states_scale_layout": 0}),
        (ValueError, "valid_hidden_size: expected 1 to 256 .*, got 257", {"valid_hidden_size": 257}),
        (ValueError, "output2_scale_scalar: needed with NVFP4 weights", {"output2_scale_scalar": None}),
        (ValueError, r"output1_scale_scalar: expected 8 numbers", {"output1_scale_scalar": torch.ones(3)}),
        (ValueError, r"hidden_states_scale: expected e4m3 of shape \[5, 16\], got None", {"hidden_states_scale": None}),
        (ValueError, "gemm1_weights_scale: expected a scale for 32", {"gemm1_weights_scale": torch.ones(8, 8)}),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            run(CALLS["nvfp4"][1], "nvfp4", **call | changed)
    _, given, _ = mxfp4("cpu", rng)
    hidden, _ = tokens_of("mxfp4", 5, "cpu", rng)
    call = {"topk_ids": (ids, gates), **hidden, **given, **sizes()}
    assert run(CALLS["mxfp4"][1], "mxfp4", **call | {"output1_scale_scalar": torch.ones(8)}).any()
    for name, size in (("gemm1_bias", 256), ("gemm2_bias", 256)):
        with pytest.raises(ValueError, match=rf"{name}: expected shape \[8, {size}\], got \[8, {size // 2}\]"):
            run(CALLS["mxfp4"][1], "mxfp4", **call | {name: torch.ones(8, size // 2)})
    with pytest.raises(NotImplementedError, match="output1_scale_scalar: no kernel for MXFP4 weights with other"):
        run(CALLS["mxfp4"][1], "mxfp4", **call | {"output1_scale_scalar": torch.full((8,), 2.0)})
    with pytest.raises(NotImplementedError, match="output2_scale_scalar: no kernel for MXFP4 weights with other"):
        run(CALLS["mxfp4"][1], "mxfp4", **call | {"output2_scale_scalar": torch.arange(8.0)})
    with pytest.raises(ValueError, match="hidden_states_scale: hidden_states of bfloat16 have none"):
        run(CALLS["mxfp4"][1], "mxfp4", **call | {"hidden_states_scale": torch.ones(5, 8)})
    _, given, _ = bf16("cpu", rng)
    hidden, _ = tokens_of("bf16", 5, "cpu", rng)
    with pytest.raises(NotImplementedError, match="weight_layout: no kernel for 1; served are MajorK"):
        oxmoe.trtllm_bf16_routed_moe((ids, gates), **hidden, **given | {"weight_layout": 1}, **sizes())
    with pytest.raises(ValueError, match=r"weights: expected shape \[E, K / 64, rows, 64\] with weight_layout Block"):
        oxmoe.trtllm_bf16_routed_moe(
            (ids, gates), **hidden, **given | {"gemm1_weights": given["gemm1_weights"].flatten(1, 2)}, **sizes()
        )
