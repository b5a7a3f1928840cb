"""flashinfer's trtllm-gen layer of int4 weights with a bf16 scale for 32 columns (MXINT4): against the layer of the
same numbers, an fp64 layer, and flashinfer's own preparation of weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashinfer_source
import oxmoe
from cases import Shape, make_routing, make_x, tie_free_logits
from flashinfer_int4 import activate
from int4_cases import Int4, make
from oxmoe import int4
from oxmoe.peers import flashinfer_trtllm_formats
from oxmoe.testing import assert_close_ulp, relative_norm, same_bits
from trtllm_layouts import blocked, interleave, shuffle

SHAPE = Shape("mxint4", 8, 3, 256, 512, options=(("layout", "up_gate"),))
QWEN = Shape("qwen3-30b-a3b", 128, 8, 2048, 768, options=(("layout", "up_gate"),))
WEIGHTS = ("gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale")


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    flashinfer_trtllm_formats.cache.clear()


def arguments(made: Int4, device: str) -> dict[str, Any]:
    """Returns the weights in flashinfer's form: signed codes, shuffled rows, blocks of 128 bytes, tiles of scales."""
    given: dict[str, Any] = {}
    for name, codes, scale, gated in (
        ("gemm1_weights", made.w13, made.w13_scale, True),
        ("gemm2_weights", made.w2, made.w2_scale, False),
    ):
        given[name] = blocked(shuffle(codes.cpu() ^ 0x88, gated)).contiguous().to(device)
        given[f"{name}_scale"] = interleave(shuffle(scale.cpu(), gated)).view(scale.shape).to(device)
    return given | dict.fromkeys(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"))


def sizes(shape: Shape = SHAPE, **others: Any) -> dict[str, Any]:
    return {
        "num_experts": shape.experts,
        "top_k": shape.top_k,
        "n_group": None,
        "topk_group": None,
        "intermediate_size": shape.intermediate,
        "local_expert_offset": 0,
        "local_num_experts": shape.experts,
        "routed_scaling_factor": None,
        **others,
    }


def routed(tokens: int, shape: Shape, device: str, rng: torch.Generator, pattern: str = "uniform") -> Any:
    gates, ids = make_routing(pattern, tokens, shape.experts, shape.top_k, rng)
    return gates.to(device), ids.to(device)


def by_ids(x: Tensor, ids: Tensor | tuple[Tensor, Tensor], **given: Any) -> Tensor:
    """Runs the call with a poisoned output."""
    out = torch.full_like(x, torch.nan)
    (result,) = oxmoe.trtllm_mxint4_block_scale_routed_moe(ids, x, **given, output=out)
    assert result is out
    return out


def expected(made: Int4, x: Tensor, gates: Tensor, ids: Tensor, **options: Any) -> Tensor:
    """Returns the fp64 layer, whose weights and activations are not rounded."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)

    def numbers(codes: Tensor, scales: Tensor) -> Tensor:
        numbers = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).double() - 8
        return numbers * scales.double().repeat_interleave(32, dim=-1)

    for expert in range(made.w13.shape[0]):
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        if token.numel():
            sums = x[token].double() @ numbers(made.w13[expert], made.w13_scale[expert]).T
            rows = activate(sums, **options) @ numbers(made.w2[expert], made.w2_scale[expert]).T
            out.index_add_(0, token, rows * gates[token, slot].double()[:, None])
    return out


@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_layers(tokens: int, device: str, rng: torch.Generator) -> None:
    made = make(SHAPE, rng).to(device)
    weights, given = made.weights(), arguments(made, device)
    x = make_x(tokens, SHAPE, torch.bfloat16, device, rng)
    logits = tie_free_logits(tokens, SHAPE.experts, rng).to(device)
    own = {"router_logits": logits, "top_k": 3, "scoring_func": "softmax_topk", "renormalize": False}
    wanted = oxmoe.moe(x, weights, **own)  # type: ignore[arg-type]
    assert tokens == 0 or (bool(wanted.any()) and bool(wanted.isfinite().all()))
    out, replay = torch.full_like(x, torch.nan), torch.full((tokens + 2, 3), -7, dtype=torch.int16, device=device)
    call = {"routing_bias": None, "hidden_states": x, **given, **sizes(), "routing_method_type": 1}
    (result,) = oxmoe.trtllm_mxint4_block_scale_moe(logits, **call, output=out)
    assert result is out and same_bits(out, wanted)
    (again,) = oxmoe.trtllm_mxint4_block_scale_moe(logits, **call, routing_replay_out=replay)
    assert same_bits(again, wanted) and len(flashinfer_trtllm_formats.cache) == 1
    assert torch.equal(replay[:tokens], logits.topk(3).indices.short()) and bool((replay[tokens:] == -7).all())
    gates, ids = routed(tokens, SHAPE, device, rng)
    assert same_bits(by_ids(x, (ids, gates), **given, **sizes()), oxmoe.moe(x, weights, gates, ids))
    wanted = oxmoe.moe(x, weights, gates.bfloat16().float(), ids)
    packed = oxmoe.pack_topk(gates, ids)
    assert same_bits(by_ids(x, packed, **given, **sizes()), wanted)
    prepared = oxmoe.prepare_trtllm_mxint4_block_scale_moe(**given)
    nothing = dict.fromkeys(WEIGHTS)
    assert same_bits(by_ids(x, packed, **given | nothing, **sizes(), weights=prepared), wanted)


def test_shape_of_flashinfers_docstring(device: str, rng: torch.Generator) -> None:
    """flashinfer's kernel reads the bytes of weights whatever their shape is, and its docstring has three
    dimensions."""
    given = arguments(make(SHAPE, rng), device)
    x = make_x(9, SHAPE, torch.bfloat16, device, rng)
    gates, ids = routed(9, SHAPE, device, rng)
    wanted = by_ids(x, (ids, gates), **given, **sizes())
    flat = {"gemm1_weights": (8, 1024, 128), "gemm2_weights": (8, 256, 256)}
    given |= {name: given[name].view(shape) for name, shape in flat.items()}
    assert bool(wanted.any()) and same_bits(by_ids(x, (ids, gates), **given, **sizes()), wanted)


@pytest.mark.parametrize(
    ("device", "tokens"),
    [("cpu", 1), *(pytest.param("cuda", tokens, marks=pytest.mark.gpu) for tokens in (1, 7, 65))],
)
def test_a_models_layer(device: str, tokens: int, rng: torch.Generator) -> None:
    made = make(QWEN, rng).to(device)
    x = make_x(tokens, QWEN, torch.bfloat16, device, rng)
    gates, ids = routed(tokens, QWEN, device, rng)
    wanted = expected(made, x, gates, ids)
    result = by_ids(x, (ids, gates), **arguments(made, device), **sizes(QWEN))
    assert bool(wanted.any()) and relative_norm(result, wanted) < 1e-2


def test_no_expert(device: str, rng: torch.Generator) -> None:
    """An id of -1 is no expert, and its weight is not read."""
    made = make(SHAPE, rng).to(device)
    x = make_x(21, SHAPE, torch.bfloat16, device, rng)
    given = arguments(made, device)
    gates, ids = routed(21, SHAPE, device, rng, "holes")
    result = by_ids(x, (ids, gates), **given, **sizes())
    assert relative_norm(result, expected(made, x, gates.nan_to_num(0.0), ids)) < 1e-2
    assert not by_ids(x, (torch.full_like(ids, -1), gates), **given, **sizes()).any()


def test_ranks(device: str, rng: torch.Generator) -> None:
    made = make(SHAPE, rng).to(device)
    weights, given = made.weights(), arguments(made, device)
    x = make_x(9, SHAPE, torch.bfloat16, device, rng)
    gates, ids = routed(9, Shape("all", 16, 3, 256, 512), device, rng)
    for rank in range(2):
        part = sizes(num_experts=16, local_expert_offset=8 * rank)
        result = by_ids(x, (ids, gates), **given, **part)
        assert bool(result.any())
        assert same_bits(result, oxmoe.moe(x, weights, gates, ids, ep_size=2, ep_rank=rank))
    with pytest.raises(ValueError, match=r"gemm1_weights: expected 4 experts \(local_num_experts\), got 8"):
        by_ids(x, (ids, gates), **given, **sizes(local_num_experts=4))


def test_numbers_of_swiglu(device: str, rng: torch.Generator) -> None:
    made = make(SHAPE, rng).to(device)
    given = arguments(made, device)
    x = make_x(9, SHAPE, torch.bfloat16, device, rng)
    gates, ids = routed(9, SHAPE, device, rng)
    own = {name: (torch.rand(8, generator=rng) + 0.2).to(device) for name in ("alpha", "beta", "limit")}
    for numbers in (own, {name: torch.full((8,), 1.25, device=device) for name in own}):
        named = {f"gemm1_{'clamp_limit' if name == 'limit' else name}": value for name, value in numbers.items()}
        result = by_ids(x, (ids, gates), **given | named, **sizes())
        assert same_bits(result, oxmoe.moe(x, made.weights(**numbers), gates, ids))
    wanted = expected(made, x, gates, ids, alpha=1.25, beta=1.25, limit=1.25)
    assert relative_norm(result, wanted) < 1e-2


def test_written_weights_are_seen(device: str, rng: torch.Generator) -> None:
    made = make(SHAPE, rng).to(device)
    given = arguments(made, device)
    x = make_x(9, SHAPE, torch.bfloat16, device, rng)
    gates, ids = routed(9, SHAPE, device, rng)
    assert by_ids(x, (ids, gates), **given, **sizes()).any()
    given["gemm2_weights"].zero_()
    assert not by_ids(x, (ids, gates), **given, **sizes()).any()


@pytest.fixture
def theirs() -> dict[str, Any]:
    """Returns flashinfer's prepare_trtllm_mxint4_weights and what it calls, but for block_scale_interleave, which is a
    kernel for Blackwell (csrc/nv_internal/cpp/kernels/quantization.cu has its index)."""
    root = flashinfer_source.root()
    if not (root / "fused_moe" / "prepare.py").exists():
        pytest.skip("this flashinfer has no prepare_trtllm_mxint4_weights")
    given: dict[str, Any] = {
        "torch": torch,
        "block_scale_interleave": lambda scales: interleave(scales[None])[0],
        "_normalize_activation": lambda activation: SimpleNamespace(is_gated=True),
        "_activation_param_view": lambda *ignored: {},
    }
    names = {"get_shuffle_block_size", "get_shuffle_matrix_a_row_indices", "get_shuffle_matrix_sf_a_row_indices"}
    flashinfer_source.take(root / "utils.py", {*names, "srcToDstBlk16RowMap", "srcToDstBlk32RowMap"}, given)
    names = {"_maybe_get_cached_w3_w1_permute_indices", "get_w2_permute_indices_with_cache", "convert_to_block_layout"}
    names.add("get_reorder_rows_for_gated_act_gemm_row_indices")
    flashinfer_source.take(root / "fused_moe" / "core.py", names, given)
    names = {"_mxint4_quantize", "prepare_trtllm_mxint4_weights", "_gemm1_rows", "_TRTLLM_MXINT4_PERMUTE_CACHE"}
    return flashinfer_source.take(root / "fused_moe" / "prepare.py", names, given)


def test_as_flashinfer_prepares(theirs: dict[str, Any], rng: torch.Generator) -> None:
    """flashinfer quantises and lays out bf16 weights; the layer is near the one of the bf16 weights."""
    w13 = (torch.randn((8, 1024, 256), generator=rng) / 16).bfloat16()
    w2 = (torch.randn((8, 256, 512), generator=rng) / 22).bfloat16()
    counts = {"num_local_experts": 8, "hidden_size": 256, "intermediate_size": 512}
    given = theirs["prepare_trtllm_mxint4_weights"](w13, w2, **counts)
    assert set(given) == set(WEIGHTS)
    (q13, s13), (q2, s2) = (theirs["_mxint4_quantize"](part) for part in (w13, w2))
    plain = Int4(SHAPE, q13 ^ 0x88, q2 ^ 0x88, s13.view(8, 1024, 8), s2.view(8, 256, 16), None, None, None, None)
    ours = arguments(plain, "cpu")
    for name in WEIGHTS:
        assert same_bits(given[name].reshape(-1), ours[name].reshape(-1))
    x = make_x(9, SHAPE, torch.bfloat16, "cpu", rng)
    gates, ids = routed(9, SHAPE, "cpu", rng)
    numbers = dict.fromkeys(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"))
    result = by_ids(x, (ids, gates), **given, **numbers, **sizes())
    assert same_bits(result, oxmoe.moe(x, plain.weights(), gates, ids))
    unquantised = oxmoe.moe(x, oxmoe.ExpertWeights.bf16(w13, w2, layout="up_gate"), gates, ids)
    assert relative_norm(result, unquantised) < 0.25
    assert_close_ulp(result, oxmoe.moe(x, oxmoe.ExpertWeights.bf16(*plain.plain(), layout="up_gate"), gates, ids))


def test_cutlass_as_flashinfer_prepares(tmp_path: Path, rng: torch.Generator) -> None:
    """flashinfer's prepare_cutlass_w4a8_weights, whose activation scales and alphas are ones."""
    root = flashinfer_source.root()
    release, scales_of = flashinfer_source.scale_interleave()
    if release != "0.7":
        pytest.skip("this flashinfer has no prepare_cutlass_w4a8_weights")
    kernel = flashinfer_source.weight_interleave("int4", tmp_path)
    given: dict[str, Any] = {
        "torch": torch,
        "interleave_moe_weights_for_sm90_mixed_gemm": lambda codes, kind: kernel(codes),
        "interleave_moe_scales_for_sm90_mixed_gemm": scales_of,
        "_require_canonical_cutlass_bf16_weights": lambda w1, w2, **ignored: (w1, w2, w1.device),
    }
    names = {"_quantize_int4_grouped", "prepare_cutlass_w4a8_weights"}
    flashinfer_source.take(root / "fused_moe" / "prepare.py", names, given)
    w13 = (torch.randn((8, 1024, 256), generator=rng) / 16).bfloat16()
    w2 = (torch.randn((8, 256, 512), generator=rng) / 22).bfloat16()
    counts = {"num_local_experts": 8, "hidden_size": 256, "intermediate_size": 512}
    made = given["prepare_cutlass_w4a8_weights"](w13, w2, **counts)
    (q13, s13), (q2, s2) = (given["_quantize_int4_grouped"](part) for part in (w13, w2))
    x = make_x(9, SHAPE, torch.bfloat16, "cpu", rng)
    gates, ids = routed(9, SHAPE, "cpu", rng)
    scales = [made[f"fc{gemm}_{name}"] for name in ("expert_scales", "act_scale", "zero", "alpha") for gemm in (1, 2)]
    (result,) = oxmoe.cutlass_fused_moe(
        x, ids, gates, made["fc1_expert_weights"], made["fc2_expert_weights"], x.dtype, scales,
        use_w4_group_scaling=True, use_packed_weights=True,
    )  # fmt: skip
    weights = oxmoe.ExpertWeights.int4(q13 ^ 0x88, q2 ^ 0x88, s13, s2, layout="up_gate")
    assert same_bits(result, oxmoe.moe(x, weights, gates, ids))
    assert torch.equal(int4.from_sm90(made["fc1_expert_weights"], scales[0]).codes, q13 ^ 0x88)


def test_refusals(rng: torch.Generator) -> None:
    made = make(SHAPE, rng)
    given = arguments(made, "cpu")
    x = make_x(5, SHAPE, torch.bfloat16, "cpu", rng)
    gates, ids = routed(5, SHAPE, "cpu", rng)
    logits = torch.zeros(5, 8)
    call: dict[str, Any] = {"ids": (ids, gates), "x": x, **given, **sizes()}
    name = "trtllm_mxint4_block_scale_routed_moe"
    for error, words, changed in (
        (NotImplementedError, f"{name}: no kernel for gemm1_lora_delta", {"gemm1_lora_delta": torch.ones(5)}),
        (ValueError, r"valid_hidden_size: expected 1 to 256 \(the padded size\), got 257", {"valid_hidden_size": 257}),
        (ValueError, "valid_intermediate_size: expected 1 to 512 .*, got 0", {"valid_intermediate_size": 0}),
        (NotImplementedError, f"{name}: no kernel for hidden_states of float16; served is bfloat16", {"x": x.half()}),
        (ValueError, r"gemm1_weights: expected uint8 \[experts, K / 256, rows, 128\] .*, got uint8 \[8, 1024, 120\]",
         {"gemm1_weights": made.w13[..., :120]}),
        (ValueError, r"gemm1_weights: expected uint8 .* or its bytes as \[experts, rows, K / 2\], got uint8 \[8, 2, ",
         {"gemm1_weights": given["gemm1_weights"].view(8, 2, 1024, 64)}),
        (ValueError, r"gemm2_weights: expected uint8 .* got int8",
         {"gemm2_weights": given["gemm2_weights"].view(torch.int8)}),
        (ValueError, r"gemm1_weights: dimension 2: expected a multiple of 128 rows, got 1000",
         {"gemm1_weights": given["gemm1_weights"][:, :, :1000]}),
        (ValueError, r"gemm1_weights_scale: expected bfloat16 \[8, 1024, 8\] .* got float32",
         {"gemm1_weights_scale": given["gemm1_weights_scale"].float()}),
        (ValueError, r"gemm2_weights_scale: expected bfloat16 \[8, 256, 16\] .* got bfloat16 \[8, 256, 8\]",
         {"gemm2_weights_scale": given["gemm2_weights_scale"][:, :, :8]}),
        (ValueError, "weights: expected ExpertWeights, got str", {"weights": "none"}),
        (ValueError, "weights: expected int4 experts, got bf16",
         {"weights": oxmoe.ExpertWeights.bf16(torch.zeros(8, 64, 256).bfloat16(), torch.zeros(8, 256, 32).bfloat16())}),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            by_ids(**call | changed)
    call = {"routing_logits": logits, "routing_bias": None, "hidden_states": x, **given, **sizes()}
    assert oxmoe.trtllm_mxint4_block_scale_moe(**call, valid_hidden_size=256, valid_intermediate_size=512)[0].any()
