"""flashinfer's layers beside oxmoe's on the same inputs, both against fp64: oxmoe's are no further from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import tie_free_groups
from flashinfer_call import peer, release, require, require_blackwell
from oxmoe import quantize
from oxmoe.testing import relative_norm, same_bits

pytestmark = pytest.mark.gpu

E, K, H, N = 8, 2, 256, 512
BLOCK = 128
# The distance that the two may have, as a norm relative to fp64's: two roundings of the output's format, or of
# activations to e4m3 in other places.
APART = {"bf16": 6e-3, "f16": 1e-3, "fp8_tensor": 6e-2, "fp8_block": 6e-2, "mxfp4": 6e-3}
FLAGS = {"fp8_block": "use_deepseek_fp8_block_scale", "mxfp4": "use_w4_group_scaling"}
# The most that oxmoe's distance from fp64 may be, over flashinfer's. Another order of the same sums may give more than
# 1.
NO_FURTHER = 1.05
# The distances are of this many tokens or more. Where both sides round activations to e4m3, the ratio of one token's
# distances has a standard deviation of 0.036 from one draw to the next, and that of sixteen tokens has one of 0.007.
TOKENS = 16


def blocks(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns e4m3 [E, R, C] and fp32 scales of blocks of 128 x 128."""
    tiles = weights.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    scales = tiles.abs().amax((2, 4)) / 448
    codes = (tiles / scales[:, :, None, :, None]).to(torch.float8_e4m3fn)
    return codes.flatten(3, 4).flatten(1, 2), scales


def experts(format: str, rng: torch.Generator) -> tuple[list[Tensor], Any, list[Tensor]]:
    """Returns weights, quant_scales and the numbers that they stand for, in fp64; rows of w13 are [up; gate]."""
    plain = [torch.randn(E, 2 * N, H, generator=rng) * 0.06, torch.randn(E, H, N, generator=rng) * 0.04]
    if format in ("bf16", "f16"):
        weights = [w.to(torch.bfloat16 if format == "bf16" else torch.float16) for w in plain]
        return weights, None, [w.double() for w in weights]
    if format == "fp8_tensor":
        factors = [w.abs().amax((1, 2)) / 448 for w in plain]
        weights = [(w / f[:, None, None]).to(torch.float8_e4m3fn) for w, f in zip(plain, factors, strict=True)]
        of_x, of_hidden = torch.tensor(2.0**-6), torch.tensor(2.0**-5)
        scales = [factors[0] * of_x, 1 / of_hidden, factors[1] * of_hidden, of_x]
        return weights, scales, [w.double() * f[:, None, None] for w, f in zip(weights, factors, strict=True)]
    if format == "fp8_block":
        pairs = [blocks(w) for w in plain]
        wide = [s.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2).double() for _, s in pairs]
        weights = [codes for codes, _ in pairs]
        return weights, [s for _, s in pairs], [w.double() * s for w, s in zip(weights, wide, strict=True)]
    made = [quantize.mxfp4(w) for w in plain]
    numbers = [quantize.dequantize(codes, scales).double() for codes, scales in made]
    return [codes for codes, _ in made], [scales for _, scales in made], numbers


def exact(x: Tensor, numbers: list[Tensor], ids: Tensor, gates: Tensor) -> Tensor:
    """Computes the layer in fp64 without a rounding."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(numbers[0].shape[0]):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        up, gate = (x[tokens].double() @ numbers[0][expert].T).chunk(2, -1)
        rows = (torch.nn.functional.silu(gate) * up) @ numbers[1][expert].T
        out.index_add_(0, tokens, rows * gates[tokens, slots, None].double())
    return out


def no_further(ours: Tensor, theirs: Tensor, expected: Tensor, apart: float) -> None:
    near, their_near = (relative_norm(result.double().cpu(), expected) for result in (ours, theirs))
    assert 0 < near <= NO_FURTHER * their_near, f"from fp64: oxmoe {near:.3e}, flashinfer {their_near:.3e}"
    between = float((ours.double().cpu() - theirs.double().cpu()).norm() / expected.norm())
    assert between <= apart, f"apart: {between:.3e}, expected at most {apart:.0e}"


@pytest.mark.parametrize("tokens", [1, 16, 200])
@pytest.mark.parametrize("format", APART)
def test_cutlass(format: str, tokens: int, rng: torch.Generator, tmp_path: Path) -> None:
    """`tokens` are those of one call."""
    require("fused_moe_90")
    weights, scales, numbers = experts(format, rng)
    rows = max(tokens, TOKENS)
    x = torch.randn(rows, H, generator=rng).to(torch.float16 if format == "f16" else torch.bfloat16)
    top = torch.randn(rows, E, generator=rng).softmax(-1).topk(K)
    ids, gates = top.indices.int(), top.values / top.values.sum(-1, keepdim=True)
    if format == "fp8_tensor":
        x = (x.float() / scales[3]).to(torch.float8_e4m3fn)
    flags = {FLAGS[format]: True} if format in FLAGS else {}
    operands = {"x": x, "ids": ids, "gates": gates, "w13": weights[0], "w2": weights[1], "scales": scales, **flags}
    theirs = peer(f"cutlass-{format}", {**operands, "tokens": tokens}, tmp_path)["out"]
    given = [scale.cuda() for scale in scales] if scales else None
    w13, w2 = (w.cuda() for w in weights)
    if format == "mxfp4":
        assert given is not None
        pairs = [
            quantize.interleave_sm90_mxfp4(w, s, flashinfer=release()) for w, s in zip((w13, w2), given, strict=True)
        ]
        (w13, w2), given = (pair[0] for pair in pairs), [pair[1] for pair in pairs]
    dtype = theirs.dtype
    parts = zip(*(part.cuda().split(tokens) for part in (x, ids, gates)), strict=True)
    ours = torch.cat([oxmoe.cutlass_fused_moe(*part, w13, w2, dtype, given, **flags)[0] for part in parts])
    meant = x.double() * scales[3] if format == "fp8_tensor" else x
    no_further(ours, theirs, exact(meant, numbers, ids, gates), APART[format])


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_mono_moe(tokens: int, rng: torch.Generator, tmp_path: Path) -> None:
    """flashinfer's one-kernel fp8 layer, whose shape is fixed; rows of w13 are [gate; up]."""
    require("monomoe")
    experts_, hidden, width = 256, 2048, 512
    (w13, s13), (w2, s2) = (
        blocks(torch.randn(experts_, rows, columns, generator=rng) * 0.05)
        for rows, columns in ((2 * width, hidden), (hidden, width))
    )
    x = torch.randn(tokens, hidden, generator=rng).bfloat16()
    logits = torch.randn(tokens, experts_, generator=rng).bfloat16()
    operands = {"x": x, "logits": logits, "w13": w13, "w2": w2, "scales": [s13, s2]}
    theirs = peer("mono", operands, tmp_path)["out"]
    weights = oxmoe.ExpertWeights.fp8_block(w13.cuda(), w2.cuda(), s13.cuda(), s2.cuda())
    ours = oxmoe.moe(x.cuda(), weights, router_logits=logits.cuda(), top_k=8)
    top = logits.double().softmax(-1).topk(8)
    gates = top.values / top.values.sum(-1, keepdim=True)
    chosen = top.indices.unique()
    numbers = [
        codes.index_select(0, chosen).double()
        * scale[chosen].repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2).double()
        for codes, scale in ((w13.roll(width, 1), s13.roll(width // BLOCK, 1)), (w2, s2))
    ]
    no_further(ours, theirs, exact(x, numbers, torch.searchsorted(chosen, top.indices), gates), 6e-2)


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mxfp4_quantiser(dtype: torch.dtype, swizzled: bool, rng: torch.Generator, tmp_path: Path) -> None:
    """Scales are powers of two, so nothing is approximate and the bits are equal."""
    require_blackwell("fp4_quantize")
    x = torch.randn(130, 512, generator=rng).to(dtype)
    options = {"sf_vec_size": 32, "sf_use_ue8m0": True, "is_sf_swizzled_layout": swizzled}
    theirs = peer("fp4", {"x": x, "scale": None, **options}, tmp_path)
    codes, scales = oxmoe.nvfp4.fp4_quantize(x.cuda(), None, **options)
    assert same_bits(codes.cpu(), theirs["codes"].view(codes.shape))
    assert same_bits(scales.cpu().reshape(-1), theirs["scales"].reshape(-1))


def test_nvfp4_quantiser(rng: torch.Generator, tmp_path: Path) -> None:
    """flashinfer's kernels take approximate reciprocals: scales are the same, few codes beside a tie differ by one."""
    require_blackwell("fp4_quantize")
    x = torch.randn(130, 512, generator=rng).bfloat16()
    scale = 448 * 6 / x.float().abs().amax().reshape(1)
    theirs = peer("fp4", {"x": x, "scale": scale}, tmp_path)
    codes, scales = oxmoe.nvfp4.fp4_quantize(x.cuda(), scale.cuda())
    of_scales = (scales.cpu().reshape(-1) != theirs["scales"].reshape(-1)).float().mean()
    of_codes = (codes.cpu() != theirs["codes"].view(codes.shape)).float().mean()
    assert of_scales <= 1e-3 and of_codes <= 1e-2, f"scales {of_scales:.1e}, codes {of_codes:.1e} differ"


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mxfp8_quantiser(dtype: torch.dtype, swizzled: bool, rng: torch.Generator, tmp_path: Path) -> None:
    """Scales are powers of two, so nothing is approximate and the bits are equal."""
    require_blackwell("mxfp8_quantize")
    x = torch.randn(130, 512, generator=rng).to(dtype)
    theirs = peer("mxfp8", {"x": x, "is_sf_swizzled_layout": swizzled}, tmp_path)
    codes, scales = oxmoe.mxfp8_quantize(x.cuda(), swizzled)
    assert same_bits(codes.cpu().view(torch.uint8), theirs["codes"].view(codes.shape))
    assert same_bits(scales.cpu().view(torch.uint8).reshape(-1), theirs["scales"].reshape(-1))


@pytest.mark.parametrize("column_major", [False, True])
def test_per_token_group_quantiser(column_major: bool, rng: torch.Generator, tmp_path: Path) -> None:
    """Scales are amax / 448 rounded to fp32; a code may be the other neighbour where a quotient is rounded first."""
    require()
    x = torch.randn(130, 512, generator=rng).bfloat16()
    theirs = peer("group8", {"x": x, "column_major_scales": column_major}, tmp_path)
    codes, scales = quantize.per_token_group_quant_fp8(x.cuda(), 128, column_major_scales=column_major)
    assert torch.allclose(scales.cpu(), theirs["scales"], rtol=2e-7, atol=0)
    of_codes = (codes.cpu().view(torch.uint8) != theirs["codes"]).float().mean()
    assert of_codes <= 1e-3, f"codes: {of_codes:.1e} differ"


@pytest.mark.parametrize("rows", [256, 512])
def test_interleaved_mxfp4(rows: int, rng: torch.Generator, tmp_path: Path) -> None:
    """The bytes of MXFP4 weights and scales as flashinfer's Hopper kernels read them."""
    require("fused_moe_90")
    codes = torch.randint(256, (E, rows, H // 2), dtype=torch.uint8, generator=rng)
    scales = torch.randint(120, 130, (E, rows, H // 32), dtype=torch.uint8, generator=rng)
    theirs = peer("interleave", {"codes": codes, "scales": scales}, tmp_path)
    ours = quantize.interleave_sm90_mxfp4(codes, scales, flashinfer=release())
    for name, part in zip(("codes", "scales"), ours, strict=True):
        assert same_bits(part.view(torch.uint8).reshape(-1), theirs[name].reshape(-1)), name


@pytest.mark.parametrize(("experts", "groups", "best", "k"), [(256, 8, 4, 8), (64, 8, 3, 6), (128, 4, 2, 8)])
def test_routing_of_deepseek(
    experts: int, groups: int, best: int, k: int, rng: torch.Generator, tmp_path: Path
) -> None:
    """flashinfer's kernel takes an approximate tanh, so two experts whose scores are near may change places there."""
    require("dsv3_fused_routing")
    tokens, factor = 200, 2.5
    logits = tie_free_groups(tokens, experts, rng).float()
    bias = torch.randint(-8, 8, (experts,), generator=rng).float() / 64
    scores = logits.double().sigmoid()
    choice = scores + bias.double()
    if groups > 1:
        of_groups = choice.unflatten(1, (groups, -1)).topk(2).values.sum(-1)
        kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, of_groups.topk(best).indices, True)
        choice = choice.masked_fill(~kept.repeat_interleave(experts // groups, 1), -torch.inf)
    exact_ids = choice.topk(k).indices.sort(-1).values
    exact_weights = scores.gather(1, exact_ids)
    exact_weights = factor * exact_weights / exact_weights.sum(-1, keepdim=True)
    options = {"n_group": groups, "topk_group": best, "topk": k, "routed_scaling_factor": factor}
    theirs = peer("deepseek", {"logits": logits, "bias": bias, **options}, tmp_path)
    grouped = {"num_expert_group": groups, "topk_group": best} if groups > 1 else {}
    weights, ids = oxmoe.topk(
        logits.cuda(), k, scoring_func="sigmoid", correction_bias=bias.cuda(), routed_scaling_factor=factor,
        apply_routed_scaling_factor_on_output=True, **grouped,
    )  # fmt: skip
    for name, given_weights, given_ids, differ, apart in (
        ("oxmoe", weights, ids, 0.01, 1e-5), ("flashinfer", theirs["weights"], theirs["ids"], 0.05, 1e-2),
    ):  # fmt: skip
        order = given_ids.cpu().long().sort(-1)
        same = (order.values == exact_ids).all(-1)
        assert float((~same).float().mean()) <= differ, f"{name}: {int((~same).sum())} tokens have other experts"
        near = relative_norm(given_weights.cpu().double().gather(1, order.indices)[same], exact_weights[same])
        assert near <= apart, f"{name}: {near:.1e} from fp64"
