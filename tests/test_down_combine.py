"""GEMM2 and combine in one launch: its walk over panels on the host, its launches, its bits."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import PATTERNS, Shape, make_routing
from fake_cuda.harness import STRUCTS, asked, execute, launches, parameters_of, planned
from fp8_cases import make_fp8, make_fp8_tensor
from host_cooperative import HostDownCombine
from oxmoe import reference
from oxmoe.testing import Bar, assert_close_ulp, same_bits
from test_graph_capture import check_replays
from test_launch_fp8 import ranges_of

HERE = Path(__file__).parent
KERNEL = "down_combine_fp8_sm90"

# The walk over panels (tests/panels.cpp)


@pytest.fixture(scope="module")
def panels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("panels") / "panels.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", library, HERE / "panels.cpp"], check=True)
    return ctypes.CDLL(str(library))


RIGHT, WRONG, DEADLOCK = range(3)
RULES = (
    "store before arriving",
    "read before giving back",
    "wait for the buffer",
    "wait for all",
    "wait for one's own",
)


@pytest.mark.parametrize("ctas", [1, 2, 5])
@pytest.mark.parametrize("buffers", [1, 2, 3, 8])
def test_every_panel_is_read_as_it_was_written(
    panels: ctypes.CDLL, buffers: int, ctas: int, rng: torch.Generator
) -> None:
    for panel_count, chunks, stages in ((1, 1, 4), (7, 1, 5), (4, 3, 4), (20, 1, 11)):
        for seed in torch.randint(1 << 31, (6,), generator=rng).tolist():
            result = panels.panels_walk(seed, ctas, buffers, panel_count, chunks, stages, 0)
            assert result == RIGHT, (seed, panel_count, chunks, stages, result)


@pytest.mark.parametrize("rule", range(1, 7), ids=[*RULES, "wait for free stages"])
def test_a_broken_rule_is_found(panels: ctypes.CDLL, rule: int, rng: torch.Generator) -> None:
    """So that the test above means something."""
    seeds = torch.randint(1 << 31, (60,), generator=rng).tolist()
    found = sum(panels.panels_walk(seed, 3, 2, 5, 2, 4, rule) != RIGHT for seed in seeds)
    assert found > 30


@pytest.mark.parametrize(
    "experts, top_k, tokens, chunks, pattern",
    [
        (256, 8, 1000, 1, "uniform"),
        (256, 8, 3001, 3, "uniform"),
        (300, 4, 777, 2, "skewed"),
        (7, 3, 500, 2, "one_expert"),
        (5, 2, 129, 4, "holes"),
        (64, 2, 300, 2, "all_holes"),
        (130, 4, 200, 1, "uneven"),
    ],
)
def test_division_into_blocks(
    panels: ctypes.CDLL, experts: int, top_k: int, tokens: int, chunks: int, pattern: str, rng: torch.Generator
) -> None:
    """Every place of a chunk's tokens lies in one block, of its own expert, and blocks are handed out evenly."""
    _, ids = make_routing(pattern, tokens, experts, top_k, rng)
    flat = ids.flatten().tolist()
    slots = sorted((slot for slot, expert in enumerate(flat) if expert >= 0), key=lambda slot: flat[slot])
    counts = [flat.count(expert) for expert in range(experts)]
    offsets = [0, *itertools.accumulate(counts)]
    chunk_tokens, ctas, most = -(-tokens // chunks), 6, 10_000
    given = [(ctypes.c_int * max(len(values), 1))(*values) for values in (offsets, slots)]
    for chunk in range(chunks):
        room = (ctypes.c_int * (4 * most))()
        found, sizes = [], []
        for cta in range(ctas):
            count = panels.panels_divide(*given, experts, chunk, chunks, chunk_tokens * top_k, cta, ctas, room)
            blocks = [tuple(room[4 * i : 4 * i + 4]) for i in range(count)]
            for i, (expert, first, size, end) in enumerate(blocks):
                assert 0 < size <= 64 and offsets[expert] <= first and first + size <= offsets[expert + 1]
                assert {block[0] for block in blocks[i:end]} == {expert}
                assert end == count or blocks[end][0] != expert
                found += range(first, first + size)
            sizes.append(count)
        first, end = chunk * chunk_tokens * top_k, (chunk + 1) * chunk_tokens * top_k
        assert found == [place for place, slot in enumerate(slots) if first <= slot < end]
        of_chunk = [sum(flat[slot] == expert for slot in slots if first <= slot < end) for expert in range(experts)]
        assert sum(sizes) == sum(-(-count // 64) for count in of_chunk) and max(sizes) - min(sizes) <= 1


# Launches


DSV3 = {"experts": 256, "hidden": 7168, "intermediate": 256, "top_k": 8}


@pytest.mark.usefixtures("kernels_for_hopper")
def test_launches(driver: Path, tmp_path: Path) -> None:
    arguments = {**DSV3, "tokens": [16, 200, 1024, 4096, 16383, 40000]}
    taken = {}
    for experimental in (True, False):
        result = execute(driver, tmp_path, "fp8_calls", arguments, experimental=experimental)
        for call in result["calls"]:
            made, ranges, tokens = launches(call["records"]), ranges_of(call), call["tokens"]
            assert [asked(launch) for launch in made] == planned(call["explain"])
            names = [launch["kernel"] for launch in made]
            if KERNEL not in names:
                continue
            assert names[-1] == KERNEL and "combine_bf16" not in names
            last, up = made[-1], made[-2]
            assert last["cooperative"] and last["pdl"] and last["grid"][0] == 132
            _, p = parameters_of(last)
            _, gemm1 = parameters_of(up)
            (*_, route) = parameters_of(made[-4])
            assert (p.down.x, p.down.x_scales) == (ranges["hidden_codes"], ranges["hidden_scales"])
            assert (p.down.x, p.down.x_scales) == (gemm1.out, gemm1.out_scales)
            assert p.down.out == p.combine.y == ranges["rows"] and p.combine.out == call["out"]
            assert (p.down.k, p.down.rows, p.down.weights) == (128, 7168, result["addresses"]["w2"])
            assert (p.offsets, p.slot_of_place) == (ranges["offsets"], ranges["slot_of_place"])
            assert (p.experts, p.slots, p.combine.place_of_slot) == (256, 8 * tokens, ranges["place_of_slot"])
            assert p.chunks * p.chunk_tokens >= tokens > (p.chunks - 1) * p.chunk_tokens
            assert up["kernel"] == "grouped_gemm_fp8_wide_sm90_gated_s4"
            assert p.counters == ranges["counters"] + 16 == route.counters + 16
            assert route.counter_count == 4 + 2 * p.chunks * 7168 // 128
            # Blocks of 64 tokens, at worst one of each expert not full; panels in the room of whole rows.
            slots = 8 * p.chunk_tokens
            assert p.token_blocks <= 10 and 132 * p.token_blocks >= 256 + (slots - 256) // 64
            assert 2 <= p.buffers <= 8 and p.buffers * 128 <= 7168
            taken[tokens] = (p.chunks, p.buffers)
            assert experimental
    assert taken == {1024: (1, 8), 4096: (1, 4), 16383: (2, 2), 40000: (5, 2)}


# The kernel on the host


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> HostDownCombine:
    return HostDownCombine(tmp_path_factory.mktemp("down_combine"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True, "scale": 2.5},
        {"chunks": 2, "pattern": "holes"},
        {"chunks": 3, "buffers": 1, "top_k": 10, "tokens": 101},
        {"keep_slots": True, "pattern": "holes", "tokens": 60},
        {"weighted": False, "pattern": "one_expert", "chunks": 2},
        {"pattern": "all_holes", "tokens": 40},
        {"pattern": "uneven", "tokens": 1, "ctas": 4},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_kernel_on_the_host(kernel: HostDownCombine, options: dict[str, Any], rng: torch.Generator) -> None:
    given = {"tokens": 131, "top_k": 3, "chunks": 1, "buffers": 2, "ctas": 2, "pattern": "uniform", "scale": 1.0}
    given |= {"bias": False, "keep_slots": False, "weighted": True, **options}
    tokens, top_k, chunks, keep = (given[name] for name in ("tokens", "top_k", "chunks", "keep_slots"))
    experts, hidden, inner = 5, 384, 256
    topk_weights, ids = make_routing(given["pattern"], tokens, experts, top_k, rng)
    slots, flat = tokens * top_k, ids.flatten().long()
    slot_of_place = torch.argsort(torch.where(flat < 0, experts, flat), stable=True)[: int((flat >= 0).sum())]
    counts = torch.bincount(flat[slot_of_place], minlength=experts)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    place_of_slot = torch.full((slots,), -1)
    place_of_slot[slot_of_place] = torch.arange(len(slot_of_place))

    x = torch.randn((slots, inner), generator=rng).to(torch.float8_e4m3fn)
    w2 = torch.randn((experts, hidden, inner), generator=rng).to(torch.float8_e4m3fn)
    x_scales = torch.rand((slots, 2), generator=rng) + 0.5
    w2_scale = torch.rand((experts, hidden // 128, 2), generator=rng) / 16 + 0.01
    bias = torch.randn((experts, hidden), generator=rng).bfloat16() if given["bias"] else None
    rows = torch.full((slots, hidden), torch.nan).bfloat16()
    for expert in range(experts):
        places = slice(int(offsets[expert]), int(offsets[expert + 1]))
        sums = reference.fp8_product((x[places], x_scales[places]), w2[expert], w2_scale[expert])
        rows[places] = (sums if bias is None else sums + bias[expert].float()).bfloat16()
    factor = topk_weights if given["weighted"] else torch.ones_like(topk_weights)
    terms = torch.where((place_of_slot < 0)[:, None], 0.0, rows[place_of_slot.clamp(min=0)].float())
    terms = terms.view(tokens, top_k, hidden) * factor.nan_to_num(0.0)[:, :, None]
    expected = (given["scale"] * (terms if keep else terms.sum(1))).bfloat16()

    panels = torch.full((given["buffers"], slots, 128), torch.nan).bfloat16()
    out = torch.full(expected.shape, torch.nan).bfloat16()
    chunk_tokens = -(-tokens // chunks)
    chunk_slots = chunk_tokens * top_k
    most = min(chunk_slots, experts) + max(chunk_slots - experts, 0) // 64
    counters = torch.zeros(2 * chunks * hidden // 128, dtype=torch.int32)
    tables = [table.int().contiguous() for table in (offsets, slot_of_place, place_of_slot)]
    gemm = STRUCTS["GroupedGemmParams"](
        x=x.data_ptr(), x_scales=x_scales.data_ptr(), weights=w2.data_ptr(), block_scales=w2_scale.data_ptr(),
        bias=bias.data_ptr() if bias is not None else 0, bias_dtype=2, out=panels.data_ptr(), rows=hidden,
        k=inner // 2, out_columns=hidden,
    )  # fmt: skip
    combine = STRUCTS["CombineParams"](
        y=panels.data_ptr(), place_of_slot=tables[2].data_ptr(), out=out.data_ptr(), tokens=tokens, top_k=top_k,
        weights=topk_weights.data_ptr() if given["weighted"] else 0, hidden=hidden, scale=given["scale"],
        keep_slots=keep,
    )  # fmt: skip
    ended = kernel.run(
        inner, given["ctas"], int(torch.randint(1 << 31, (), generator=rng)), down=gemm, combine=combine,
        offsets=tables[0].data_ptr(), slot_of_place=tables[1].data_ptr(), experts=experts, chunks=chunks,
        chunk_tokens=chunk_tokens, token_blocks=max(-(-most // given["ctas"]), 1), buffers=given["buffers"],
        slots=slots, counters=counters.data_ptr(),
    )  # fmt: skip
    assert ended, "deadlock"
    assert counters.tolist() == [given["ctas"]] * len(counters)
    assert_close_ulp(out, expected, Bar(max_ulp=2.0, ulps=0.9, share=2e-2))


# Values, on a GPU

WIDE = Shape("wide", 256, 8, 512, 256)
CASES: dict[str, tuple[Shape, int, str, str, dict[str, Any]]] = {
    "few": (WIDE, 1024, "uniform", "block", {}),
    "odd": (WIDE, 4097, "uniform", "block", {}),
    "bias": (Shape("bias", 256, 8, 384, 256, bias=True), 1500, "uniform", "block", {}),
    "chunks": (WIDE, 16384, "uniform", "block", {}),
    "odd-chunks": (WIDE, 20001, "skewed", "block", {}),
    "one-panel": (Shape("one-panel", 256, 8, 128, 256), 9999, "uniform", "block", {}),
    "top-10": (Shape("top-10", 512, 10, 2048, 256), 3000, "uniform", "block", {}),
    "top-1": (Shape("top-1", 256, 1, 512, 256), 8200, "uniform", "block", {}),
    "experts-elsewhere": (WIDE, 6000, "uniform", "block", {"ep_size": 2, "ep_rank": 1}),
    "no-combine": (WIDE, 1100, "holes", "block", {"no_combine": True}),
    "input-weights": (WIDE, 1100, "uniform", "block", {"apply_router_weight_on_input": True}),
    "factor": (WIDE, 1100, "uniform", "block", {"routed_scaling_factor": 2.5}),
    "static": (WIDE, 3000, "uniform", "static", {}),
    "tensor": (WIDE, 3000, "uniform", "tensor", {}),
    "token": (WIDE, 3000, "holes", "token", {}),
    "dsv3-tp8": (Shape("dsv3-tp8", 256, 8, 7168, 256), 4096, "uniform", "block", {}),
    **{pattern: (WIDE, 2111, pattern, "block", {}) for pattern in PATTERNS},
}


def outputs(name: str, seed: int) -> Tensor:
    """Three calls of one case, with fresh inputs each, on one workspace."""
    shape, tokens, pattern, kind, options = CASES[name]
    rng = torch.Generator().manual_seed(seed)
    layer = make_fp8(shape, "cuda", rng) if kind == "block" else make_fp8_tensor(shape, "cuda", rng)
    weights = layer.weights() if kind == "block" else layer.weights(kind)
    workspace = torch.full(
        (oxmoe.workspace_bytes(weights, tokens, shape.top_k),), 255, dtype=torch.uint8, device="cuda"
    )
    results = []
    for _ in range(3):
        topk_weights, ids = make_routing(pattern, tokens, shape.experts * options.get("ep_size", 1), shape.top_k, rng)
        x = layer.x(tokens, rng)
        results.append(oxmoe.moe(x, weights, topk_weights.cuda(), ids.cuda(), workspace=workspace, **options))
    return torch.stack(results)


def save(name: str, seed: int, path: str) -> None:
    assert os.environ.get("OXMOE_EXPERIMENTAL") != "1"
    torch.save(outputs(name, seed).cpu(), path)


@pytest.mark.gpu
@pytest.mark.usefixtures("experimental")
@pytest.mark.parametrize("name", CASES)
def test_bits_of_separate_launches(name: str, rng: torch.Generator, tmp_path: Path) -> None:
    shape, tokens, _, kind, _ = CASES[name]
    sizes = shape.experts, shape.top_k, shape.hidden, shape.intermediate, tokens
    formats = {"block": "fp8_block", "tensor": "fp8_tensor"}
    plan = oxmoe.explain(*sizes, format=formats.get(kind, f"fp8_tensor-{kind}"), gated=shape.gated)
    assert KERNEL in plan
    seed, path = int(torch.randint(1 << 31, (), generator=rng)), tmp_path / "separate.pt"
    # The switch is read once in a process.
    script = f"import test_down_combine as t; t.save({name!r}, {seed}, {json.dumps(str(path))})"
    environment = {**os.environ, "OXMOE_EXPERIMENTAL": "0"}
    subprocess.run([sys.executable, "-c", script], cwd=HERE, env=environment, check=True, timeout=600)
    assert same_bits(outputs(name, seed).cpu(), torch.load(path))


@pytest.mark.gpu
@pytest.mark.usefixtures("experimental")
@pytest.mark.parametrize("tokens", [1100, 16390])
def test_replays(tokens: int, rng: torch.Generator) -> None:
    """Counters are zero again in every replay of a graph."""
    check_replays(make_fp8(WIDE, "cuda", rng).weights(), WIDE, tokens, rng, replays=200)


@pytest.mark.gpu
@pytest.mark.usefixtures("experimental")
def test_streams_beside_each_other(rng: torch.Generator) -> None:
    """All CTAs of a launch start, or none: two launches that each need the whole GPU wait for one another."""
    layer = make_fp8(WIDE, "cuda", rng)
    weights, x = layer.weights(), layer.x(4096, rng)
    chosen = [part.cuda() for part in make_routing("uniform", 4096, WIDE.experts, WIDE.top_k, rng)]
    expected = oxmoe.moe(x, weights, *chosen)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(oxmoe.moe(x, weights, *chosen))
    torch.cuda.synchronize()
    assert all(same_bits(result, expected) for result in results)
