"""Random problems of top-k for the CPU, the reference, the kernels' code on the host and, on a GPU, the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import oxmoe
from host_topk import SCORINGS, HostSelect, Problem, compare, draw
from oxmoe import reference

# Rounding decides 1.2 % of the rows, of some problems all. Of 400 problems once 3.2 % were so, so there are more.
CALLS = 1600


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostSelect:
    return HostSelect(tmp_path_factory.mktemp("select"))


def on_cpu(problem: Problem) -> tuple[Tensor, Tensor]:
    weights = torch.full((len(problem.logits), problem.top_k), torch.nan)
    ids = torch.full(weights.shape, -77, dtype=torch.int32)
    return oxmoe.topk(problem.logits, problem.top_k, **problem.options, topk_weights=weights, topk_ids=ids)


def fuzz(rng: torch.Generator, calls: int, run: Callable[[Problem], tuple[Tensor, Tensor]], gpus: bool) -> None:
    rows = unclear = 0
    for _ in range(calls):
        problem = draw(rng, served_by_gpus=gpus)
        rows += problem.valid
        unclear += compare(problem, run(problem), on_cpu(problem))
    assert unclear < 0.03 * rows, "too few rows were compared"


def test_reference_and_cpu(rng: torch.Generator) -> None:
    fuzz(rng, CALLS, lambda p: reference.topk(p.logits, p.top_k, **p.options), gpus=False)


def test_kernels_on_the_host_and_cpu(host: HostSelect, rng: torch.Generator) -> None:
    fuzz(rng, CALLS, lambda p: host.topk(p.logits, p.top_k, seed=len(p.logits), **p.options), gpus=True)


@pytest.mark.gpu
def test_gpu_and_cpu(rng: torch.Generator) -> None:
    def on_gpu(problem: Problem) -> tuple[Tensor, Tensor]:
        there = problem.to("cuda")
        weights, ids = oxmoe.topk(there.logits, there.top_k, **there.options)
        return weights.cpu(), ids.cpu()

    fuzz(rng, 4000, on_gpu, gpus=True)


def everywhere(host: HostSelect, problem: Problem) -> list[tuple[Tensor, Tensor]]:
    return [
        on_cpu(problem),
        reference.topk(problem.logits, problem.top_k, **problem.options),
        host.topk(problem.logits, problem.top_k, seed=7, **problem.options),
    ]


def options(**given: object) -> dict[str, object]:
    defaults = {"renormalize": True, "correction_bias": None, "num_expert_group": 0, "topk_group": 0}
    defaults |= {"group_score": None, "num_fused_shared_experts": 0, "routed_scaling_factor": 1.0, "order": "weight"}
    return {**defaults, "apply_routed_scaling_factor_on_output": False, "num_token_non_padded": None, **given}


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("group_score", ["max", "top2"])
@pytest.mark.parametrize("biased", [True, False])
def test_a_group_with_a_nan_is_the_best(host: HostSelect, scoring: str, group_score: str, biased: bool) -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0, -3.0, 2.0, -math.nan, 7.0, 7.0]])
    bias = torch.full((8,), 0.5) if biased else None
    given = options(
        scoring_func=scoring, num_expert_group=4, topk_group=1, group_score=group_score, correction_bias=bias
    )
    # A softmax over all experts makes every score NaN, so all groups are equal.
    expected = [0, 1] if scoring == "softmax" else [5, 4]
    for _, ids in everywhere(host, Problem(logits, 2, given)):
        assert ids.tolist() == [expected]


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("biased", [True, False])
def test_other_groups_are_never_chosen(host: HostSelect, scoring: str, biased: bool) -> None:
    """384 experts are in 32 groups, of which three are best. Each group has one number and eleven -inf, which tie with
    the numbers that SGLang's mask would give to experts of other groups."""
    logits = torch.full((1, 384), -math.inf)
    logits[0, ::12] = torch.arange(32.0) / 4
    bias = torch.zeros(384) if biased else None
    given = options(scoring_func=scoring, num_expert_group=32, topk_group=3, group_score="max", correction_bias=bias)
    results = everywhere(host, Problem(logits, 24, given))
    expected = [31 * 12, 30 * 12, 29 * 12]
    expected += [29 * 12 + i for i in range(1, 12)] + [30 * 12 + i for i in range(1, 11)]
    for weights, ids in results:
        assert ids.tolist() == [expected]
        torch.testing.assert_close(weights, results[0][0], rtol=2e-6, atol=0, equal_nan=True)
