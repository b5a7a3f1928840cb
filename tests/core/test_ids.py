"""Ids that name no expert: -1, ids of other ranks, and what is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
import oxmoe._oxmoe as extension
from cases import Shape, make_layer, make_routing, make_x
from fake_cuda.harness import execute
from fp8_cases import make_fp8
from oxmoe import reference
from oxmoe.testing import assert_close_ulp, same_bits

E, K, T = 6, 2, 9
SHAPE = Shape("ids", E, K, 128, 128)
DTYPES = [torch.int32, torch.int64]


def drawn(rng: torch.Generator, device: str = "cpu", dtype: torch.dtype = torch.int32) -> Any:
    layer = make_layer(SHAPE, torch.bfloat16, device, rng)
    x = make_x(T, SHAPE, torch.bfloat16, device, rng)
    weights, ids = make_routing("holes", T, E, K, rng)
    return layer, x, weights.nan_to_num(0.5).to(device), ids.to(device, dtype)


def calls(rng: torch.Generator, dtype: torch.dtype) -> tuple[dict[str, Callable[[Tensor], Any]], Tensor, list[Tensor]]:
    """Returns functions of ids by name, ids that each takes, and the tensors that keep their bytes if a call is an
    error."""
    layer, x, weights, ids = drawn(rng, dtype=dtype)
    experts, out = layer.weights(), torch.full_like(x, 7)
    workspace = torch.full((oxmoe.workspace_bytes(experts, T, K),), 7, dtype=torch.uint8)
    config = SimpleNamespace(activation="silu", is_gated=True, inplace=False)
    fp8 = make_fp8(SHAPE.with_options(layout="up_gate"), "cpu", rng)
    codes, scales = reference.fp8_groups(x)

    def routed(ids: Tensor) -> Tensor:
        return oxmoe.trtllm_fp8_block_scale_routed_moe(
            oxmoe.pack_topk(weights, ids), None, codes, scales.t().contiguous(), fp8.w13, fp8.w13_scale, fp8.w2,
            fp8.w2_scale, num_experts=E, top_k=K, n_group=None, topk_group=None, intermediate_size=128,
            local_expert_offset=0, local_num_experts=E, routed_scaling_factor=None,
        )  # fmt: skip

    found: dict[str, Callable[[Tensor], Any]] = {
        "moe": lambda ids: oxmoe.moe(x, experts, weights, ids, out=out, workspace=workspace),
        "operator": lambda ids: torch.ops.oxmoe.moe.out(x, layer.w13, layer.w2, weights, ids, out=out),
        "no_combine": lambda ids: oxmoe.moe(x, experts, weights, ids, no_combine=True),
        "moe_tensors": lambda ids: extension.moe_tensors(x, layer.w13, layer.w2, weights, ids, out=out),
        "fused_experts": lambda ids: oxmoe.fused_experts(x, layer.w13, layer.w2, (weights, ids), config),
        "m_indices": lambda ids: oxmoe.moe_contiguous(x, experts, m_indices=ids.flatten()[::K].contiguous()),
        "sort_by_expert": lambda ids: oxmoe.sort_by_expert(ids, E),
        "routing_tables": lambda ids: extension.routing_tables(weights, ids, E),
        "trtllm": routed,
    }
    return found, ids, [out, workspace, x]


NAMES = (
    *("moe", "operator", "no_combine", "moe_tensors", "fused_experts", "m_indices", "sort_by_expert"),
    *("routing_tables", "trtllm"),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", [E, -2, 200, 1 << 30, 1 << 40])
@pytest.mark.parametrize("name", NAMES)
def test_an_id_of_no_expert(name: str, wrong: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    """The call raises ValueError with token and slot, or with the row, and writes nothing."""
    if (wrong == 1 << 40 and dtype == torch.int32) or (name == "trtllm" and wrong > 200):
        pytest.skip("no such number in this type")
    found, ids, written = calls(rng, dtype)
    found[name](ids)
    ids[5, 0] = wrong
    before = [tensor.clone() for tensor in written]
    place = "m_indices: row 5" if name == "m_indices" else "topk_ids: token 5, slot 0"
    with pytest.raises(ValueError, match=rf"{place}: expected -1 \(no expert\) or 0 to 5"):
        found[name](ids)
    assert all(same_bits(now, then) for now, then in zip(written, before, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_wrong_one_is_named(dtype: torch.dtype, rng: torch.Generator) -> None:
    layer, x, weights, ids = drawn(rng, dtype=dtype)
    ids[7, 1], ids[8, 0] = 12, -3
    with pytest.raises(ValueError, match=r"token 7, slot 1: .* got 12; ids of other ranks' experts need ep_size"):
        oxmoe.moe(x, layer.weights(), weights, ids)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ids_of_other_ranks(device: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Ids below ep_size times the experts are other ranks' ids; ids beyond them are errors."""
    layer, x, weights, ids = drawn(rng, device, dtype)
    ids = ids * 3 + torch.arange(T, device=device)[:, None] % 3  # 0 to 3 E - 1; -1 becomes -3 to -1
    ids = ids.masked_fill(ids < 0, -1).to(dtype)
    for rank in range(3):
        result = oxmoe.moe(x, layer.weights(), weights, ids, ep_size=3, ep_rank=rank)
        expected = reference.moe(x, layer.w13, layer.w2, weights, ids, ep_size=3, ep_rank=rank)
        assert_close_ulp(result, expected)
        local = ids.where((ids >= rank * E) & (ids < (rank + 1) * E), -1)
        assert same_bits(result, oxmoe.moe(x, layer.weights(), weights, (local - rank * E).clamp(min=-1)))
    if device == "cpu":
        ids[0, 0] = 3 * E
        with pytest.raises(ValueError, match=rf"token 0, slot 0: expected -1 \(no expert\) or 0 to {3 * E - 1}, got"):
            oxmoe.moe(x, layer.weights(), weights, ids, ep_size=3, ep_rank=0)


def test_windows_of_sort_by_expert(rng: torch.Generator) -> None:
    """With first_expert, ids of other ranks are skipped, also in the first window."""
    ids = torch.tensor([[0, 9], [5, -1], [1 << 30, 0]])
    for first in (0, 3):
        tables = oxmoe.sort_by_expert(ids, 5, first_expert=first)
        expected = reference.sort_by_expert(ids, 5, first_expert=first)
        assert all(torch.equal(a, b) for a, b in zip(tables, expected, strict=True))
    ids[1, 1] = -2
    with pytest.raises(ValueError, match=r"topk_ids: token 1, slot 1: expected -1 \(no expert\) or more, got -2"):
        oxmoe.sort_by_expert(ids, 5, first_expert=0)


RANKS = [(1 << 40, 1 << 29), (1 << 62, 1), (1 << 31, 1 << 30), ((1 << 31) // E + 1, 0)]


@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("routing", ["ids", "logits"])
def test_more_ranks_than_ids(routing: str, ranks: tuple[int, int], rng: torch.Generator) -> None:
    """Numbers of experts beyond int32 do not wrap to another rank's."""
    layer, x, weights, ids = drawn(rng)
    given = {"topk_weights": weights, "topk_ids": ids}
    if routing == "logits":
        given = {"router_logits": torch.randn(T, E), "top_k": K}
    with pytest.raises(ValueError, match=rf"ep_size: {ranks[0]} ranks of {E} experts each are beyond 2\^31 - 1"):
        oxmoe.moe(x, layer.weights(), **given, ep_size=ranks[0], ep_rank=ranks[1])


def test_windows_beyond_int32(rng: torch.Generator) -> None:
    for first in (1 << 31, 1 << 40, (1 << 32) + 1, -1):
        with pytest.raises(ValueError, match="first_expert"):
            oxmoe.sort_by_expert(torch.zeros((2, 2), dtype=torch.int64), 5, first_expert=first)


# OXMOE_CHECK_IDS, the switch for GPUs


CASES = [
    ([[0, 3], [-1, 4]], "int32", None, None),
    ([[0, 3], [-1, 5]], "int32", None, "token 1, slot 1: expected -1 (no expert) or 0 to 4, got 5"),
    ([[0, 3], [-1 << 40, 1]], "int64", None, f"token 1, slot 0: expected -1 (no expert) or 0 to 4, got {-1 << 40}"),
    ([[0, 3], [7, 1]], "int64", 5, None),
    ([[0, -9], [7, 1]], "int64", 5, "token 0, slot 1: expected -1 (no expert) or more, got -9"),
]


@pytest.mark.parametrize(("rows", "dtype", "first", "error"), CASES)
def test_ids_on_a_gpu(
    rows: list[list[int]], dtype: str, first: int | None, error: str | None, driver: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With OXMOE_CHECK_IDS=1 ids are read back, but not from a graph that is being captured. Without it nothing is
    read."""
    arguments = {"rows": rows, "dtype": dtype, "experts": 5, "first_expert": first}
    for value in (None, "0", ""):
        monkeypatch.delenv("OXMOE_CHECK_IDS", raising=False)
        if value is not None:
            monkeypatch.setenv("OXMOE_CHECK_IDS", value)
        result = execute(driver, tmp_path, "ids_on_a_gpu", arguments)
        assert result["reads"] == [] and "topk_ids: token" not in str(result["error"])
    monkeypatch.setenv("OXMOE_CHECK_IDS", "1")
    result = execute(driver, tmp_path, "ids_on_a_gpu", arguments)
    assert result["reads"] == ["cuStreamIsCapturing", "cuMemcpyDtoHAsync", "cuStreamSynchronize"]
    assert (result["error"] or "").startswith(f"ValueError: topk_ids: {error}") == (error is not None)
    result = execute(driver, tmp_path, "ids_on_a_gpu", arguments, capturing=1)
    assert result["reads"] == ["cuStreamIsCapturing"] and "topk_ids: token" not in str(result["error"])


ON_A_GPU = """
import torch, oxmoe
torch.manual_seed(0)
w13, w2 = torch.randn(6, 256, 128, device="cuda").bfloat16() / 8, torch.randn(6, 128, 128, device="cuda").bfloat16() / 8
weights = oxmoe.ExpertWeights.bf16(w13, w2)
x = torch.randn(9, 128, device="cuda").bfloat16()
gates, ids = torch.rand(9, 2, device="cuda"), torch.randint(6, (9, 2), device="cuda", dtype=torch.int32)
oxmoe.moe(x, weights, gates, ids)
ids[4, 1] = 17
try:
    oxmoe.moe(x, weights, gates, ids)
    print("no error")
except ValueError as error:
    print(error)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = oxmoe.moe(x, weights, gates, ids)
graph.replay()
ids[4, 1] = -1
without = torch.empty_like(out).copy_(out)
graph.replay()
torch.cuda.synchronize()
print(torch.equal(out, without))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("value", ["0", "1"])
def test_the_switch(value: str) -> None:
    environment = os.environ | {"OXMOE_CHECK_IDS": value}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(extension.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, "-c", ON_A_GPU], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    first, same = done.stdout.splitlines()
    expected = "topk_ids: token 4, slot 1: expected -1 (no expert) or 0 to 5, got 17"
    assert first.startswith(expected) if value == "1" else first == "no error"
    assert same == "True"
