"""e4m3, MXFP8 and NVFP4 experts on the kernels for any GPU; on Hopper with OXMOE_PORTABLE=1.

The other files of these formats also run on these kernels then. Here are the kernels' own sizes and batches.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch

import oxmoe
from cases import Shape, make_routing, make_workspace, make_x
from fp8_cases import MODES, Fp8, check, check_graph, check_tensor, make_fp8, make_fp8_tensor
from mxfp4_cases import call
from mxfp8_cases import Mxfp8, make_mxfp8
from mxfp8_cases import check as check_mxfp8
from nvfp4_cases import make as make_nvfp4
from nvfp4_cases import on_cuda
from oxmoe.testing import same_bits
from test_nvfp4_gpu import check as check_nvfp4

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("portable")]

FP8 = (
    Shape("qwen3-30b-a3b", 128, 8, 2048, 768),
    Shape("dsv3-tp8", 256, 8, 7168, 256),
    Shape("i1408", 4, 2, 256, 1408, bias=True),
    Shape("one-block", 3, 2, 128, 128, bias=True),
)
MXFP8 = (
    Shape("qwen3-30b-a3b", 128, 8, 2048, 768),
    Shape("gpt-oss-20b", 32, 4, 2880, 2880, bias=True),
    Shape("h704-i1408", 4, 2, 704, 1408),
    Shape("h32-i96", 4, 2, 32, 96),
)
NVFP4 = (
    Shape("dsv3-rows", 8, 2, 7168, 256),
    Shape("h2880-i720", 5, 2, 2880, 720, bias=True),
    Shape("h720-i1408", 4, 2, 720, 1408),
    Shape("h16-i16", 4, 2, 16, 16),
)
TOKENS = (0, 1, 3, 17, 64, 129, 700, 2500)


@pytest.fixture(scope="module")
def portable() -> None:
    if torch.cuda.get_device_capability() == (9, 0) and os.environ.get("OXMOE_PORTABLE") != "1":
        pytest.skip("a Hopper GPU needs OXMOE_PORTABLE=1")


def plan_of(shape: Shape, tokens: int, format: str) -> str:
    return oxmoe.explain(shape.experts, shape.top_k, shape.hidden, shape.intermediate, tokens, format=format)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", FP8, ids=lambda s: s.name)
def test_fp8_block(shape: Shape, tokens: int, rng: torch.Generator) -> None:
    layer = make_fp8(shape, "cuda", rng)
    assert not tokens or "grouped_gemm_fp8_portable_gated" in plan_of(shape, tokens, "fp8_block")
    check(layer, layer.x(tokens, rng), *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


@pytest.mark.parametrize("of_rows", [False, True], ids=["of-matrix", "of-rows"])
@pytest.mark.parametrize("tokens", [1, 40, 700])
@pytest.mark.parametrize("mode", MODES)
def test_fp8_tensor(mode: str, tokens: int, of_rows: bool, rng: torch.Generator) -> None:
    shape = FP8[0]
    layer = make_fp8_tensor(shape, "cuda", rng, of_rows=of_rows)
    routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
    check_tensor(layer, layer.x(tokens, rng), *routing, mode=mode)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", MXFP8, ids=lambda s: s.name)
def test_mxfp8(shape: Shape, tokens: int, rng: torch.Generator) -> None:
    layer = make_mxfp8(shape, "cuda", rng)
    assert not tokens or "grouped_gemm_mxfp8_portable_gated" in plan_of(shape, tokens, "mxfp8")
    check_mxfp8(layer, layer.x(tokens, rng), *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


@pytest.mark.parametrize("a4", [False, True], ids=["w4a16", "w4a4"])
@pytest.mark.parametrize("tokens", [0, 1, 17, 64, 300])
@pytest.mark.parametrize("shape", NVFP4, ids=lambda s: s.name)
def test_nvfp4(shape: Shape, tokens: int, a4: bool, rng: torch.Generator) -> None:
    layer = make_nvfp4(shape, rng, a4)
    assert not tokens or "grouped_gemm_nvfp4_portable_gated" in plan_of(shape, tokens, "nvfp4")
    x = make_x(tokens, shape, torch.bfloat16, "cpu", rng)
    check_nvfp4(layer, x, *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


def made(format: str, shape: Shape, rng: torch.Generator) -> Fp8 | Mxfp8:
    return make_fp8(shape, "cuda", rng) if format == "fp8_block" else make_mxfp8(shape, "cuda", rng)


@pytest.mark.parametrize("pattern", ["one_expert", "holes", "all_holes", "skewed"])
@pytest.mark.parametrize("format", ["fp8_block", "mxfp8"])
def test_patterns(format: str, pattern: str, rng: torch.Generator) -> None:
    shape = Shape("small", 5, 3, 384, 640, bias=True)
    layer = made(format, shape, rng)
    checked: Any = check if format == "fp8_block" else check_mxfp8
    for tokens in (5, 150):
        checked(layer, layer.x(tokens, rng), *make_routing(pattern, tokens, shape.experts, shape.top_k, rng))


@pytest.mark.parametrize("format", ["fp8_block", "mxfp8"])
def test_a_row_does_not_depend_on_the_others(format: str, rng: torch.Generator) -> None:
    """A row has the same bits alone, in tiles of 16 and of 64, and in a workspace of any bytes."""
    shape = Shape("small", 5, 3, 384, 640, bias=True)
    layer = made(format, shape, rng)
    weights, x = layer.weights(), layer.x(700, rng)
    gates, ids = (part.cuda() for part in make_routing("uniform", 700, shape.experts, shape.top_k, rng))
    whole = call(x, weights, gates, ids)
    for count in (1, 8, 17, 100, 333):
        workspace = make_workspace(oxmoe.workspace_bytes(weights, count, shape.top_k), x.device)
        workspace.fill_(0x7F)
        out = torch.full((count, shape.hidden), math.nan, dtype=torch.bfloat16, device="cuda")
        oxmoe.moe(x[:count], weights, gates[:count], ids[:count], out=out, workspace=workspace)
        assert same_bits(out, whole[:count])


@pytest.mark.parametrize("format", ["fp8_block", "mxfp8"])
def test_not_finite(format: str, rng: torch.Generator) -> None:
    """NaN in x stays in its row, and NaN codes of w2 stay in their column."""
    shape = Shape("small", 2, 1, 256, 128)
    layer = made(format, shape, rng)
    x, gates, ids = layer.x(8, rng), torch.ones((8, 1)), torch.zeros((8, 1), dtype=torch.int32)
    good = call(x, layer.weights(), gates, ids)
    x[1, 3], x[2, 40] = math.nan, math.inf
    layer.w2.view(torch.uint8)[0, 5, 63] = 0xFF
    result = call(x, layer.weights(), gates, ids)
    assert bool(result[1:3].isnan().all()) and bool(result[:, 5].isnan().all())
    kept = [0, *range(3, 8)]
    result[:, 5] = good[:, 5]
    assert same_bits(result[kept], good[kept])


@pytest.mark.parametrize("format", ["fp8_block", "mxfp8"])
def test_graph_takes_other_routing(format: str, rng: torch.Generator) -> None:
    check_graph(made(format, Shape("small", 5, 3, 384, 640), rng), 90, "uniform", rng)


@pytest.mark.parametrize("format", ["fp8_block", "mxfp8", "fp8_tensor", "fp8_tensor-token", "nvfp4", "nvfp4-a4"])
def test_rows_in_expert_order(format: str, rng: torch.Generator) -> None:
    """Masked rows, whose padding is NaN, are compared with the layer on the same rows."""
    shape = Shape("small", 5, 1, 384, 640)
    if format.startswith("fp8_tensor"):
        weights = make_fp8_tensor(shape, "cuda", rng).weights("token" if "token" in format else "tensor")
    elif format.startswith("nvfp4"):
        weights = on_cuda(make_nvfp4(shape, rng, format == "nvfp4-a4")).weights()
    else:
        weights = made(format, shape, rng).weights()
    room = 70
    counts = torch.tensor([70, 0, 1, 17, 64], dtype=torch.int32, device="cuda")
    x = make_x(5 * room, shape, torch.bfloat16, "cuda", rng).view(5, room, 384)
    real = torch.arange(room, device="cuda")[None] < counts[:, None]
    x[~real] = math.nan
    for expected in (1, 70):
        result = oxmoe.moe_masked(x, weights, counts, expected_m=expected)
        rows, experts = x[real], real.nonzero()[:, :1].int()
        given = call(rows, weights, torch.ones_like(experts, dtype=torch.float32), experts)
        assert same_bits(result[real], given)
