"""Top-k of csrc/moe/select.cuh on the host, a thread a fiber, and random problems that tell implementations apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from host_cta import HostCtas
from oxmoe import reference

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus", "softmax_topk", "identity")
EXPERTS_PER_LANE = (1, 2, 4, 8, 12, 16, 32)
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

# The code that select.cuh and slot_sort.cuh use beside host_cta.py's instructions, and Select as a kernel of one
# struct.
WRAPPER = """
struct int2 { int x, y; };
static int2 make_int2(int x, int y) { return {x, y}; }
static uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static int __popc(uint32_t x) { return __builtin_popcount(x); }
static int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static int __ffs(int x) { return __builtin_ffs(x); }
static float __fdividef(float a, float b) { return a / b; }
static __half __ushort_as_half(uint16_t bits) { return {bits}; }
static int atomicAdd(int* at, int value) { return std::exchange(*at, *at + value); }
static uint32_t atomicOr(uint32_t* at, uint32_t value) { return std::exchange(*at, *at | value); }
static uint32_t __ballot_sync(uint32_t, bool value) {
    const auto all = exchange(uint32_t(value));
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= uint32_t(all[i][0] != 0) << i;
    return bits;
}
template <typename Number>
static Number __shfl_down_sync(uint32_t, Number value, int distance) {
    const int lane = threadIdx.x % 32;
    return __shfl_sync(0, value, lane + distance < 32 ? lane + distance : lane);
}
#include "csrc/moe/select.cuh"
namespace oxmoe {
uint32_t routing_shared[16];
template <int kExpertsPerLane, bool kPlain>
struct HostSelect {
    static constexpr int kThreads = 64, kSharedBytes = 0;
    static void run(const SelectParams& p) { Select<kExpertsPerLane, kPlain>::run(p, RouteParams{}); }
};
}
"""


def per_lane(experts: int, groups: int) -> int | None:
    """Returns the experts that a lane holds, as src/moe/plan/routing.rs has them. None: more than kernels serve."""
    lanes = 32 >> (groups - 1).bit_length()
    need = -(-(experts // groups) // lanes)
    return next((count for count in EXPERTS_PER_LANE if count >= need), None)


class HostSelect(HostCtas):
    def __init__(self, folder: Path) -> None:
        wrapper = folder / "host_select.cuh"
        wrapper.write_text(WRAPPER)
        kernels = {
            f"select_e{count}{'' if plain else '_any'}": (f"HostSelect<{count}, {str(plain).lower()}>", "SelectParams")
            for count in EXPERTS_PER_LANE
            for plain in (True, False)
        }
        # The sum makes every NaN the positive one on GPUs.
        replaced = ((" = __float_as_uint(value + 0.0f)", " = __float_as_uint(__fadd_rn(value, 0.0f))"),)
        super().__init__(folder, [str(wrapper)], kernels, 800, replaced)

    def topk(self, logits: Tensor, top_k: int, seed: int, **options: Any) -> tuple[Tensor, Tensor]:
        """Runs `oxmoe.topk` by the kernel that a GPU would run."""
        tokens, experts = logits.shape
        groups, kept = options["num_expert_group"], options["topk_group"]
        bias, valid = options["correction_bias"], options["num_token_non_padded"]
        factor, on_output = options["routed_scaling_factor"], options["apply_routed_scaling_factor_on_output"]
        score = options["group_score"] or ("max" if bias is None else "top2")
        plain = bias is None and groups <= 1 and options["order"] == "weight"
        weights = torch.full((tokens, top_k), torch.nan)
        ids = torch.full((tokens, top_k), -77, dtype=torch.int32)
        self.run(
            f"select_e{per_lane(experts, max(groups, 1))}{'' if plain else '_any'}",
            grid=2,
            seed=seed,
            logits=logits.data_ptr(),
            logits_dtype=DTYPES[logits.dtype],
            tokens=tokens,
            experts=experts,
            top_k=top_k,
            correction_bias=0 if bias is None else bias.data_ptr(),
            scoring=SCORINGS.index(options["scoring_func"]),
            renormalize=options["renormalize"],
            scale=factor if on_output else 1.0,
            group_score=0 if groups <= 1 else 1 + (score == "top2"),
            groups=groups,
            topk_group=kept,
            shared_experts=options["num_fused_shared_experts"],
            shared_weight=1.0 if on_output else 1.0 / factor,
            order_by_id=options["order"] == "id",
            num_token_non_padded=0 if valid is None else valid.data_ptr(),
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
        )
        return weights, ids


@dataclass
class Problem:
    """The operands of one call of topk."""

    logits: Tensor
    top_k: int
    options: dict[str, Any] = field(default_factory=dict)

    def to(self, device: str) -> Problem:
        moved = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in self.options.items()}
        return Problem(self.logits.to(device), self.top_k, moved)

    @property
    def routed(self) -> int:
        return self.top_k - self.options["num_fused_shared_experts"]

    @property
    def valid(self) -> int:
        given = self.options["num_token_non_padded"]
        return len(self.logits) if given is None else min(max(int(given), 0), len(self.logits))


def draw(rng: torch.Generator, served_by_gpus: bool) -> Problem:
    """Draws ties, infinities, NaN of both signs and zeros of both signs; odd numbers of experts, with groups and
    without."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=rng))

    def one_of(*values: Any) -> Any:
        return values[number(0, len(values) - 1)]

    groups = one_of(0, 0, 1, number(2, 32), one_of(2, 4, 8, 16, 32))
    while True:
        size = number(1, one_of(4, 16, 512 // max(groups, 1), 1024 // max(groups, 1)))
        if not served_by_gpus or per_lane(size * max(groups, 1), max(groups, 1)):
            break
    experts, kept = size * max(groups, 1), number(1, max(groups, 1)) if groups else 0
    shared = one_of(0, 0, number(1, 3))
    routed = number(1, min(32 - shared, size * kept if groups else experts))
    # Sometimes all experts that may be chosen are routed.
    routed = one_of(routed, routed, min(32 - shared, size * kept if groups else experts))
    tokens = number(1, 9)
    rate = one_of(0.0, 0.02, 0.3, 0.9)  # share of special numbers
    special = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, -math.inf, 0.0, -0.0, 3e4, -3e4])

    def numbers(*shape: int) -> Tensor:
        # Neither the sigmoids of two of these numbers nor sums of two are equal up to rounding; many are equal.
        grid = torch.randint(-12, one_of(-10, 13), shape, generator=rng) * 0.37 + 0.11
        which = special[torch.randint(0, len(special), shape, generator=rng)]
        return torch.where(torch.rand(shape, generator=rng) < rate, which, grid)

    bias = one_of(None, numbers(experts) * 0.313)
    options = {
        "scoring_func": one_of(*SCORINGS),
        "renormalize": one_of(True, False),
        "correction_bias": bias,
        "num_expert_group": groups,
        "topk_group": kept,
        "group_score": one_of(None, "max", "top2") if groups and size > 1 else "max" if groups else None,
        "num_fused_shared_experts": shared,
        "routed_scaling_factor": one_of(1.0, 2.5),
        "apply_routed_scaling_factor_on_output": one_of(True, False),
        "num_token_non_padded": one_of(None, torch.tensor(number(-1, tokens + 1), dtype=torch.int32)),
        "order": one_of("weight", "weight", "id"),
    }
    return Problem(numbers(tokens, experts).to(one_of(*DTYPES)), routed + shared, options)


# Choices that are closer than this but not equal may be ordered either way.
TIE = 1e-5


def _close(a: Tensor, b: Tensor, size: float) -> Tensor:
    """Returns where two finite numbers are equal up to rounding, but not equal. `size`: size of the terms that made
    them."""
    gap = (a - b).abs()
    return (gap > 0) & gap.isfinite() & (gap <= TIE * b.abs().clamp(min=size))


def ambiguous(problem: Problem) -> Tensor:
    """Returns rows whose choice depends on rounding, found with scores in fp64."""
    options = problem.options
    logits = problem.logits.double()
    scored = {
        "softmax": lambda x: torch.softmax(x, -1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
    }
    groups, kept, bias = options["num_expert_group"], options["topk_group"], options["correction_bias"]
    grouped = kept < groups
    choice = logits
    if bias is not None or grouped:
        choice = scored.get(options["scoring_func"], lambda x: x)(logits)
    size = 0.0
    if bias is not None:
        choice, size = choice + bias.double(), 1.0
    unclear = torch.zeros(len(logits), dtype=torch.bool)
    if grouped:
        of_group = choice.view(len(logits), groups, -1).sort(-1, descending=True).values
        score = options["group_score"] or ("max" if bias is None else "top2")
        of_group = of_group[..., :1] if score == "max" else of_group[..., :2]
        best = of_group.sum(-1).sort(dim=-1, descending=True, stable=True)
        terms = of_group.gather(1, best.indices[..., None].expand(of_group.shape))
        # At the border there are close sums, or equal sums of other terms.
        last, next_ = best.values[:, kept - 1], best.values[:, kept]
        other = (terms[:, kept - 1] != terms[:, kept]).any(-1) & last.isfinite() & (last == next_)
        unclear |= _close(last, next_, size) | other
        keep = torch.zeros(len(logits), groups, dtype=torch.bool)
        keep.scatter_(1, reference.best(of_group.sum(-1), kept), True)
        choice = torch.where(keep.repeat_interleave(choice.shape[1] // groups, 1), choice, -math.inf)
    best = choice.sort(-1, descending=True).values[:, : problem.routed + 1]
    return unclear | _close(best[:, 1:], best[:, :-1], size).any(-1)


def _condition(problem: Problem, ids: Tensor) -> Tensor:
    """Returns by how much the sum of a row's scores makes errors of its terms larger."""
    chosen = ids[:, : problem.routed].long()
    terms = reference.scores(problem.logits, problem.options["scoring_func"]).double()
    terms = terms.gather(1, chosen.clamp(min=0, max=problem.logits.shape[1] - 1))
    condition = terms.abs().sum(-1) / terms.sum(-1).abs()
    return torch.where(condition.isnan() | terms.isinf().any(-1), 1.0, condition)[:, None]


def compare(problem: Problem, got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> int:
    """Checks that both are equal but for rounding. Returns the number of rows that rounding decides; their ids are not
    compared."""
    (weights, ids), (expected_weights, expected_ids) = got, expected
    named = {name: "given" if isinstance(v, Tensor) else v for name, v in problem.options.items()}
    what = f"{named}, {problem.logits.dtype} {list(problem.logits.shape)}, top_k {problem.top_k}"
    unclear = ambiguous(problem)
    unclear[problem.valid :] = False
    differ = (ids != expected_ids).any(-1)
    bad = differ & ~unclear
    assert not bool(bad.any()), f"{what}\n{ids[bad].tolist()}\n{expected_ids[bad].tolist()}"
    rows = ~differ
    weights, expected_weights = weights[rows].double(), expected_weights[rows].double()
    condition = _condition(problem, ids)[rows]
    condition = condition if problem.options["renormalize"] else torch.ones_like(condition)
    clear = (condition < 1e3).expand(weights.shape)
    exact = (weights == expected_weights) | (weights.isnan() & expected_weights.isnan())
    near = (weights - expected_weights).abs() <= 2e-5 * condition * expected_weights.abs() + 1e-30
    wrong = clear & ~exact & ~near
    assert not bool(wrong.any()), f"{what}\n{weights[wrong].tolist()}\n{expected_weights[wrong].tolist()}"
    return int(unclear.sum())
