"""The steps of an fp8 layer, each judged from the device's own numbers before it.

A whole layer cannot be judged closely on a GPU. wgmma's sums of 128 columns are 1.25e-4 of a row's size away from fp32
ones; that moves 12 % of GEMM1's outputs to the neighbouring bf16, 1.3 % of their codes by a step (an eighth to a
sixteenth, and more of small numbers under the scale of a whole row), and with these 2 to 5 % of the layer's results by
two ulp and more. A step has none of that: codes and scales are the reference's bits, and what a GEMM gives is the
reference's but for the rounding of its last bit.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import ACTIVATIONS, PATTERNS, Shape, make_routing, make_workspace
from fp8_cases import MODELS, MODES, SHAPES, Fp8, Fp8Tensor, chosen, make_fp8, make_fp8_tensor
from oxmoe import reference
from oxmoe.testing import Bar, assert_close_ulp, same_bits, ulp

# fp32 sums differ in their order alone. wgmma's sums move a result to its neighbour if it was near the border: with
# noise of 1.25e-4 of a row's size 0.6 % of results, and with the noise of sums that stay in wgmma for 7168 columns
# (2e-3) 10 %.
CPU_BAR = Bar(max_ulp=1.1, ulps=0.9, share=2e-3)
GPU_BAR = Bar(max_ulp=3.0, ulps=0.9, share=5e-2)
# The largest number of a scale that GEMM1's epilogue makes may be two bf16 steps off.
NEAR = 2.0**-6

# GEMM2 of 256 to 1024 columns has a kernel of its own if tiles are wide.
PAIRS = Shape("pairs-of-blocks", 4, 2, 512, 512, bias=True)
# There is a group of 128 columns between the GEMMs for every multiprocessor, so GEMM1 quantises in tiles of few tokens,
# too.
GROUPS = Shape("many-groups", 48, 4, 384, 640, bias=True)
KINDS = ("block", *MODES)


@dataclasses.dataclass
class Steps:
    """The rows that a call left in its workspace: GEMM1's and GEMM2's output, in the order of places."""

    x: tuple[Tensor, Tensor]  # codes, scales
    hidden: Tensor
    hidden_e4m3: tuple[Tensor, Tensor]
    rows: Tensor
    out: Tensor
    place_of_slot: Tensor
    slots: list[Tensor]  # slots of each expert's places, in their order


def run(layer: Fp8 | Fp8Tensor, kind: str, x: Tensor, weights: Tensor, ids: Tensor) -> Steps:
    """Runs a layer in separate launches, whose steps stay in the workspace: one launch leaves none there. Behind the
    tokens follow eight without experts, too many for one launch."""
    shape, (tokens, top_k) = layer.shape, ids.shape
    made, rows = layer.weights() if isinstance(layer, Fp8) else layer.weights(kind), tokens + 8
    x, weights = (torch.cat([part, part.new_zeros((8, part.shape[1]))]) for part in (x, weights))
    ids = torch.cat([ids, ids.new_full((8, top_k), -1)])
    workspace = make_workspace(oxmoe.workspace_bytes(made, rows, top_k), x.device)
    out = oxmoe.moe(x, made, weights, ids, workspace=workspace)[:tokens]
    sizes = shape.experts, top_k, shape.hidden, shape.intermediate, rows
    text = oxmoe.explain(*sizes, format=made.format, gated=shape.gated, arch="cpu")
    parts = (line.split() for line in text.splitlines() if " + " in line)
    ranges = {name: slice(int(start), int(start) + int(size)) for start, _, size, name in parts}

    def table(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        numbers = workspace[ranges[name]].view(dtype)
        return numbers[: torch.Size(shape).numel()].view(shape)

    slots, (hidden, inner) = tokens * top_k, (shape.hidden, shape.intermediate)
    offsets = table("offsets", torch.int32, shape.experts + 1).tolist()
    placed, slot_of_place = offsets[-1], table("slot_of_place", torch.int32, slots).long()
    codes = torch.float8_e4m3fn
    return Steps(
        x=(table("x_codes", codes, tokens, hidden), table("x_scales", torch.float32, tokens, hidden // 128)),
        hidden=table("hidden", torch.bfloat16, placed, inner),
        hidden_e4m3=(
            table("hidden_codes", codes, placed, inner),
            table("hidden_scales", torch.float32, placed, inner // 128),
        ),
        rows=table("rows", torch.bfloat16, placed, hidden),
        out=out,
        place_of_slot=table("place_of_slot", torch.int32, tokens, top_k).long(),
        slots=[slot_of_place[first:end] for first, end in itertools.pairwise(offsets)],
    )


def scales_of(layer: Fp8 | Fp8Tensor, kind: str, number: int) -> dict[str, Any]:
    """Returns options of reference.fp8_rows."""
    given = (layer.a13_scale, layer.a2_scale)[number] if isinstance(layer, Fp8Tensor) and kind == "static" else None
    return {"scale": given, "dynamic": kind if kind in ("tensor", "token") else None}


def matrices(layer: Fp8 | Fp8Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales of w13 and w2 as the reference takes them."""
    if isinstance(layer, Fp8):
        return layer.w13_scale, layer.w2_scale
    return layer.tables


def check_steps(layer: Fp8 | Fp8Tensor, kind: str, x: Tensor, weights: Tensor, ids: Tensor) -> None:
    weights, ids = weights.to(x.device), ids.to(x.device)
    steps = run(layer, kind, x, weights, ids)
    shape, bar, (w13_scale, w2_scale) = layer.shape, GPU_BAR if x.is_cuda else CPU_BAR, matrices(layer)

    def check_codes(what: str, actual: tuple[Tensor, Tensor], rows: Tensor, number: int) -> None:
        codes, scales = reference.fp8_rows(rows, **scales_of(layer, kind, number))
        assert actual[1].equal(scales), f"{what}: scales"
        assert same_bits(actual[0].view(torch.uint8), codes.view(torch.uint8)), f"{what}: codes"

    check_codes("x", steps.x, x, 0)

    acts, results, first = [], [], 0
    for expert, slots in enumerate(steps.slots):
        token, places = slots // ids.shape[1], slice(first, first + len(slots))
        first = places.stop
        taken = chosen(steps.x[0], token), steps.x[1][token]
        sums = reference.fp8_product(taken, layer.w13[expert], w13_scale[expert])
        if layer.b13 is not None:
            sums = sums + layer.b13[expert].float()
        acts.append(reference.activate(sums, **dict(shape.options)).bfloat16())
        inner = steps.hidden_e4m3[0][places], steps.hidden_e4m3[1][places]
        sums = reference.fp8_product(inner, layer.w2[expert], w2_scale[expert])
        results.append((sums if layer.b2 is None else sums + layer.b2[expert].float()).bfloat16())
    act = torch.cat(acts)
    if act.numel() and bool(steps.hidden.isnan().all()):
        # GEMM1 quantises its own output.
        assert x.is_cuda and kind in ("block", "static")
        check_near(steps.hidden_e4m3, act, layer, kind)
    else:
        assert_close_ulp(steps.hidden, act, bar, what="GEMM1")
        check_codes("GEMM1's output", steps.hidden_e4m3, steps.hidden, 1)
    assert_close_ulp(steps.rows, torch.cat(results), bar, what="GEMM2")

    total = torch.zeros((len(x), shape.hidden), device=x.device)
    for slot in range(ids.shape[1]):
        place = steps.place_of_slot[:, slot]
        rows = steps.rows[place.clamp(min=0)].float() if len(steps.rows) else torch.zeros_like(total)
        total += torch.where((place >= 0)[:, None], weights[:, slot, None] * rows, 0.0)
    assert_close_ulp(steps.out, total.bfloat16(), Bar(max_ulp=1.1, ulps=0.9, share=1e-2), what="combine")


def check_near(actual: tuple[Tensor, Tensor], act: Tensor, layer: Fp8 | Fp8Tensor, kind: str) -> None:
    """Checks codes of numbers that are up to two ulp away from the numbers of act."""
    scales = reference.fp8_rows(act, **scales_of(layer, kind, 1))[1]
    if kind == "static":
        assert actual[1].equal(scales)
    else:
        torch.testing.assert_close(actual[1], scales, rtol=NEAR, atol=0)
    exact, typical = act.double(), act.double().square().mean(-1, keepdim=True).sqrt()
    away = 2 * ulp(torch.maximum(exact.abs(), typical), torch.bfloat16)
    inverse = (1.0 / actual[1]).double().repeat_interleave(128, 1)
    low, high = (
        ((exact + side * away) * inverse).clamp(-448, 448).float().to(torch.float8_e4m3fn).float() for side in (-1, 1)
    )
    codes = actual[0].float()
    assert bool(((low <= codes) & (codes <= high)).all())


def make(kind: str, shape: Shape, device: str, rng: torch.Generator) -> Fp8 | Fp8Tensor:
    return make_fp8(shape, device, rng) if kind == "block" else make_fp8_tensor(shape, device, rng, halves=shape.gated)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 70, 300])
@pytest.mark.parametrize("shape", [*SHAPES[1:], PAIRS, GROUPS], ids=lambda s: s.name)
def test_steps(shape: Shape, tokens: int, kind: str, device: str, rng: torch.Generator) -> None:
    layer = make(kind, shape, device, rng)
    check_steps(layer, kind, layer.x(tokens, rng), *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


@pytest.mark.parametrize("kind", ["block", "static"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_routing_patterns(pattern: str, kind: str, device: str, rng: torch.Generator) -> None:
    for shape in (SHAPES[2], GROUPS):
        layer = make(kind, shape, device, rng)
        check_steps(layer, kind, layer.x(100, rng), *make_routing(pattern, 100, shape.experts, shape.top_k, rng))


@pytest.mark.parametrize("kind", ["block", "static"])
@pytest.mark.parametrize("name", ["swiglu-up-gate", "gpt-oss-halves", "situ", "relu2", "gelu-plain"])
def test_activations(name: str, kind: str, device: str, rng: torch.Generator) -> None:
    for shape in (SHAPES[2], GROUPS):
        layer = make(kind, shape.with_options(**ACTIVATIONS[name]), device, rng)
        routing = make_routing("uniform", 200, shape.experts, shape.top_k, rng)
        check_steps(layer, kind, layer.x(200, rng), *routing)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 40, 3000])
@pytest.mark.parametrize("shape", MODELS, ids=lambda s: s.name)
def test_models(shape: Shape, tokens: int, kind: str, rng: torch.Generator) -> None:
    layer = make(kind, shape, "cuda", rng)
    check_steps(layer, kind, layer.x(tokens, rng), *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [40, 300, 700, 3000])
@pytest.mark.parametrize("shape", MODELS, ids=lambda s: s.name)
def test_second_gemm_reads_nothing_early(shape: Shape, tokens: int, rng: torch.Generator) -> None:
    """GEMM2 begins before GEMM1 ends: rows that GEMM1 has not written yet are NaN."""
    layer = make_fp8(shape, "cuda", rng)
    made, x = layer.weights(), layer.x(tokens, rng)
    weights, ids = (part.cuda() for part in make_routing("uniform", tokens, shape.experts, shape.top_k, rng))
    workspace = make_workspace(oxmoe.workspace_bytes(made, tokens, shape.top_k), "cuda")
    results = []
    for _ in range(30):
        workspace.fill_(0xFF)
        results.append(oxmoe.moe(x, made, weights, ids, workspace=workspace))
    assert bool(results[0].isfinite().all())
    assert all(same_bits(other, results[0]) for other in results[1:])


@pytest.mark.parametrize("gated", [True, False])
def test_a_row_has_the_same_bits_in_every_tile(gated: bool, device: str, rng: torch.Generator) -> None:
    """GEMM1's output is quantised after it, and by its epilogue in tiles of few and of many tokens."""
    options = {} if gated else ACTIVATIONS["relu2"]
    layer, tokens = make_fp8(GROUPS.with_options(**options), device, rng), 3000
    made, x = layer.weights(), layer.x(tokens, rng)
    weights, ids = (part.to(device) for part in make_routing("uniform", tokens, GROUPS.experts, GROUPS.top_k, rng))
    whole = oxmoe.moe(x, made, weights, ids)
    for count in (1, 6, 40, 90, 300, 600, 900):
        assert same_bits(oxmoe.moe(x[:count], made, weights[:count], ids[:count]), whole[:count]), count
