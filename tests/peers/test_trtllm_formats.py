"""flashinfer's trtllm-gen layers of bf16, fp8 with one scale, MXFP4 and NVFP4: each against the layer of the same
numbers in oxmoe's own form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import oxmoe
from cases import make_x, tie_free_logits
from fp8_cases import make_fp8
from oxmoe.peers import flashinfer_trtllm_formats
from oxmoe.testing import same_bits
from trtllm_cases import CALLS, FORMATS, LAYERS, SHAPE, bf16, mxfp4, nv, routed, run, sizes, tokens_of


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    flashinfer_trtllm_formats.cache.clear()


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
