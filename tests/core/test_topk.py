"""topk against the reference, the reference against a loop over Python numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import tie_free_groups, tie_free_logits
from oxmoe import reference

SCORING = ("softmax", "sigmoid", "sqrtsoftplus", "softmax_topk", "identity")
# (experts, top_k): sizes of lanes, sizes with more than one register of experts a lane, the limits 1024 and 32.
SIZES = (
    *((4, 1), (8, 2), (16, 16), (32, 4), (60, 4), (64, 6), (72, 6), (128, 8)),
    *((256, 8), (384, 8), (512, 32), (896, 16), (1024, 32)),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(logits: Tensor, top_k: int, ids_tolerance: float = 0.0, **options: object) -> None:
    """Compares ids with the reference's, unless two choice values are closer than the tolerance; weights to a few fp32
    ulps."""
    poison = torch.full((logits.shape[0], top_k), torch.nan, device=logits.device)
    junk = torch.full((logits.shape[0], top_k), -77, dtype=torch.int32, device=logits.device)
    weights, ids = oxmoe.topk(logits, top_k, topk_weights=poison, topk_ids=junk, **options)
    assert weights is poison and ids is junk
    expected_weights, expected_ids = reference.topk(logits, top_k, **options)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    if ids_tolerance:
        names = ("scoring_func", "correction_bias", "num_expert_group", "topk_group", "group_score")
        choice = reference.choice_values(logits, **{name: options[name] for name in names if name in options})
        of_ours, of_expected = (choice.gather(1, i.long().clamp(min=0)) for i in (ids, expected_ids))
        torch.testing.assert_close(of_ours, of_expected, rtol=ids_tolerance, atol=ids_tolerance)
        assert all(len(set(row)) == top_k for row in ids.tolist())
    else:
        assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=2e-6 + ids_tolerance, atol=1e-7 + ids_tolerance)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scoring(device: str, dtype: torch.dtype, scoring: str, renormalize: bool, rng: torch.Generator) -> None:
    logits = tie_free_logits(33, 64, rng).to(dtype).to(device)
    check(logits, 6, scoring_func=scoring, renormalize=renormalize)


@pytest.mark.parametrize("experts,top_k", SIZES)
@pytest.mark.parametrize("tokens", [0, 1, 5, 130])
def test_sizes(device: str, experts: int, top_k: int, tokens: int, rng: torch.Generator) -> None:
    check(tie_free_logits(tokens, experts, rng).to(device), top_k)


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus", "softmax", "softmax_topk"])
def test_correction_bias_chooses_but_does_not_weigh(device: str, scoring: str, rng: torch.Generator) -> None:
    logits = torch.randn((65, 96), generator=rng).to(device)
    bias = torch.randn(96, generator=rng).to(device)
    check(logits, 8, ids_tolerance=1e-6, scoring_func=scoring, correction_bias=bias)
    # A bias larger than any score decides alone.
    bias = (torch.randperm(96, generator=rng) * 100.0).to(device)
    weights, ids = oxmoe.topk(logits, 8, scoring_func="sigmoid", correction_bias=bias, renormalize=False)
    assert torch.equal(ids.long(), bias.argsort(descending=True)[:8].expand(65, -1))
    torch.testing.assert_close(weights, torch.sigmoid(logits).gather(1, ids.long()))


@pytest.mark.parametrize("group_score", [None, "max", "top2"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize(
    "experts,groups,topk_group,top_k",
    [(256, 8, 4, 8), (64, 8, 3, 6), (160, 8, 1, 6), (384, 1, 1, 8), (16, 8, 8, 16), (12, 6, 1, 2)],
)
def test_groups(
    device: str,
    experts: int,
    groups: int,
    topk_group: int,
    top_k: int,
    scoring: str,
    biased: bool,
    group_score: str | None,
    rng: torch.Generator,
) -> None:
    logits = tie_free_groups(40, experts, rng).to(device)
    bias = (torch.randint(0, 32, (experts,), generator=rng) / 8).to(device) if biased else None
    check(
        logits,
        top_k,
        ids_tolerance=1e-5,
        scoring_func=scoring,
        correction_bias=bias,
        num_expert_group=groups,
        topk_group=topk_group,
        group_score=group_score,
    )
    _, ids = oxmoe.topk(
        logits,
        top_k,
        scoring_func=scoring,
        correction_bias=bias,
        num_expert_group=groups,
        topk_group=topk_group,
        group_score=group_score,
    )
    assert all(len({expert // (experts // groups) for expert in row}) <= topk_group for row in ids.tolist())


@pytest.mark.parametrize("scoring", SCORING)
def test_ties_go_to_the_lower_id(device: str, scoring: str, rng: torch.Generator) -> None:
    logits = torch.randint(0, 3, (50, 128), generator=rng).float().to(device)
    check(logits, 8, scoring_func=scoring)
    _, ids = oxmoe.topk(torch.zeros((3, 40), device=device), 5, scoring_func=scoring)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("groups", [0, 8])
def test_equal_groups_go_to_the_lower_id(device: str, groups: int) -> None:
    options = {"num_expert_group": groups, "topk_group": 2} if groups else {}
    _, ids = oxmoe.topk(torch.zeros((2, 64), device=device), 4, scoring_func="sigmoid", **options)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("on_output", [True, False])
@pytest.mark.parametrize("renormalize", [True, False])
def test_shared_experts_and_scale(
    device: str, shared: int, on_output: bool, renormalize: bool, rng: torch.Generator
) -> None:
    logits = tie_free_logits(21, 64, rng).to(device)
    options = {
        "num_fused_shared_experts": shared,
        "routed_scaling_factor": 2.5,
        "apply_routed_scaling_factor_on_output": on_output,
        "renormalize": renormalize,
        "scoring_func": "sigmoid",
    }
    check(logits, 6 + shared, **options)
    weights, ids = oxmoe.topk(logits, 6 + shared, **options)
    assert ids[:, 6:].tolist() == [list(range(64, 64 + shared))] * 21
    if renormalize:
        routed, of_shared = (2.5, 1.0) if on_output else (1.0, 0.4)
        torch.testing.assert_close(weights[:, :6].sum(1), torch.full((21,), routed, device=device))
        torch.testing.assert_close(weights[:, 6:], torch.full((21, shared), of_shared, device=device))


@pytest.mark.parametrize("tokens,top_k", [(37, 9), (256, 8), (1, 9), (512, 16)])
def test_padded_region(device: str, tokens: int, top_k: int, rng: torch.Generator) -> None:
    logits = tie_free_logits(tokens, 64, rng).to(device)
    for valid in sorted({0, 1, min(5, tokens), tokens - 1, tokens}):
        count = torch.tensor(valid, dtype=torch.int32, device=device)
        weights, ids = oxmoe.topk(logits, top_k, num_token_non_padded=count)
        expected_weights, expected_ids = reference.topk(logits[:valid], top_k)
        assert torch.equal(ids[:valid], expected_ids)
        torch.testing.assert_close(weights[:valid], expected_weights, rtol=2e-6, atol=1e-7)
        assert bool((ids[valid:] == -1).all()) and bool((weights[valid:] == 0).all())
        # A one-element tensor is as good as a scalar.
        again = oxmoe.topk(logits, top_k, num_token_non_padded=count.view(1))
        assert torch.equal(again[1], ids)


def test_degenerate_scores_renormalize(device: str) -> None:
    """Sigmoids all but vanish beside a large bias; weights are finite, and nothing is divided by zero."""
    logits = torch.full((5, 256), -100.0, device=device)
    bias = torch.linspace(11.1, 11.3, 256, device=device)
    weights, ids = oxmoe.topk(logits, 8, scoring_func="sigmoid", correction_bias=bias)
    assert bool(weights.isfinite().all())
    torch.testing.assert_close(
        weights, reference.topk(logits, 8, scoring_func="sigmoid", correction_bias=bias)[0], rtol=1e-3, atol=1e-6
    )
    assert bool(((ids >= 0) & (ids < 256)).all())


def test_extreme_logits(device: str) -> None:
    logits = torch.tensor(
        [[3e38, -3e38, 1.0, 0.0], [-math.inf, 5.0, -math.inf, 4.0], [-3e38, -3e38, -3e38, -3e38]], device=device
    )
    for scoring in ("softmax", "sigmoid", "softmax_topk"):
        weights, ids = oxmoe.topk(logits, 2, scoring_func=scoring)
        expected_weights, expected_ids = reference.topk(logits, 2, scoring_func=scoring)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights, rtol=2e-6, atol=1e-7)


def test_reference_against_a_loop(rng: torch.Generator) -> None:
    """The loop spells out DeepSeek-V3's grouped choice."""
    logits = torch.randn((9, 32), generator=rng)
    bias = torch.randn(32, generator=rng)
    weights, ids = reference.topk(
        logits, 4, scoring_func="sigmoid", correction_bias=bias, num_expert_group=4, topk_group=2
    )
    for token in range(9):
        score = [1 / (1 + math.exp(-value)) for value in logits[token].tolist()]
        choice = [s + b for s, b in zip(score, bias.tolist(), strict=True)]
        groups = [sum(sorted(choice[g * 8 : g * 8 + 8])[-2:]) for g in range(4)]
        kept = sorted(range(4), key=lambda g: -groups[g])[:2]
        order = sorted((e for e in range(32) if e // 8 in kept), key=lambda e: (-choice[e], e))[:4]
        assert ids[token].tolist() == order
        total = sum(score[e] for e in order)
        assert weights[token].tolist() == pytest.approx([score[e] / total for e in order], rel=1e-5)


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
def test_columns_by_id(device: str, scoring_func: str, rng: torch.Generator) -> None:
    logits = tie_free_logits(37, 60, rng).to(device)
    options = {"scoring_func": scoring_func, "num_fused_shared_experts": 1, "order": "id"}
    check(logits, 7, **options)
    ids = oxmoe.topk(logits, 7, **options)[1][:, :6]
    assert torch.equal(ids, ids.sort(dim=1).values)
