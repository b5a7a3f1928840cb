"""flashinfer's fused all-reduce beside oxmoe's between two GPUs, both against fp64: oxmoe's is no further from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer_call import require
from flashinfer_ranks import CASES, EPS, SCALE, both
from oxmoe.testing import relative_norm

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

# The bar is two roundings of the output's format, as a norm relative to fp64's; e4m3 rounds by 2^-4 of a number.
APART = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
CODES_APART = 3e-2


def exact(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    total = case["parts"].double().sum(0)
    residual = total + case["residual_in"].double()
    norm = residual * (residual.square().mean(-1, keepdim=True) + EPS).rsqrt() * case["gamma"].double()
    return {"sum": total, "residual": residual, "norm": norm, "residual8": residual, "codes": norm / SCALE}


def compare(case: dict[str, Any]) -> list[str]:
    """Returns what is wrong with a case."""
    wrong = []
    for name, expected in exact(case).items():
        ours, theirs = (case[who][name].double() for who in ("ours", "theirs"))
        near, their_near = relative_norm(ours, expected), relative_norm(theirs, expected)
        between = float((ours - theirs).norm() / expected.norm())
        apart = CODES_APART if name == "codes" else APART[case["parts"].dtype]
        if not near <= 1.05 * their_near:
            wrong.append(f"{name}: from fp64: oxmoe {near:.3e}, flashinfer {their_near:.3e}")
        if not between <= apart:
            wrong.append(f"{name}: apart {between:.3e}, expected at most {apart:.0e}")
    return wrong


def test_allreduce_fusion(rng: torch.Generator, tmp_path: Path) -> None:
    require("trtllm_comm")
    cases = both(2, tmp_path, int(torch.randint(1 << 20, (1,), generator=rng)))
    assert len(cases) == len(CASES)
    assert [wrong for case in cases for wrong in compare(case)] == []
