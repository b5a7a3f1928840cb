"""allreduce_fusion on CUDA tensors without a GPU: ranks are processes under a stand-in driver.

The processes really share the driver's memory; kernels are recorded, not run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import oxmoe._oxmoe as extension
from fake_cuda.harness import STRUCTS, execute, parameters_of

STREAM = 0x1234
EMPTY = 2**64 - 1
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


pytestmark = pytest.mark.usefixtures("kernels_for_hopper")


def run(driver: Path, tmp_path: Path, call: str = "pair", world: int = 2, **arguments: Any) -> Any:
    results = execute(driver, tmp_path, call, {"world": world, **arguments}, devices=world)
    assert all(result is not None for result in results), results
    return results


CALLS = [
    (1, 2880, 1, None),
    (1, 7168, 0, None),
    (33, 7168, 1, None),
    (128, 7168, 1, None),
    (128, 7168, 0, True),
    (8, 7168, 1, False),
    (0, 64, 1, None),
    (3, 704, 0, None),
]


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_launches(driver: Path, tmp_path: Path, world: int, dtype: str) -> None:
    results = run(driver, tmp_path, world=world, calls=CALLS, dtype=dtype, most=[128, 7168], force=True)
    size = 128 * 7168 * BYTES[dtype]
    for rank, result in enumerate(results):
        assert result["raised"] == [None] * (len(CALLS) + 1) and result["again"] is None and result["refused"] == []
        assert result["after"] == "ValueError: workspace: was destroyed"
        assert result["device"] == f"cuda:{rank}"
        # Calls ask the driver for launches alone; the kernels were loaded with the workspace.
        assert set(result["other"]) <= {"cuCtxSetCurrent"}
        assert result["unmapped"] == world
        for (tokens, hidden, _, use_oneshot), launch, given in zip(
            CALLS, result["launches"], result["tensors"], strict=True
        ):
            (p,) = parameters_of(launch)
            bytes_, two = tokens * hidden * BYTES[dtype], "twoshot" in launch["kernel"]
            assert two == (world > 2 and (use_oneshot is False or (use_oneshot is None and bytes_ > 600 << 10)))
            assert launch["stream"] == STREAM and launch["pdl"] == 1 and launch["context"] == 0xC000 + rank
            assert f"_{SHORT[dtype]}_n{world}" in launch["kernel"]
            assert (p.input, p.output or 0) == (given["input"] if tokens else 0, given.get("output", 0))
            assert p.gamma == given.get("rms_gamma", 0) and (p.weight_bias, p.tokens, p.rank) == (1.0, tokens, rank)
            assert p.epsilon == pytest.approx(1e-5)
            if tokens:
                assert (p.residual_in, p.residual_out) == (given.get("residual_in", 0),) * 2
            assert p.row_chunks == hidden * BYTES[dtype] // 16 and p.deadline_ns == 2_500_000_000
            shape = extension.allreduce_shape(p.shape & ~(1 << 5))
            assert shape.endswith(f"of {dtype} [{tokens}, {hidden}]")
            assert bool(p.shape >> 5 & 1) == two
            cluster = launch["cluster"][0]
            if two:
                assert cluster == 1 and p.scatter_ctas + p.reduce_ctas + p.finish_ctas == launch["grid"][0]
                assert p.range * world * 16 >= bytes_ and p.range * 16 <= p.slot_bytes
                assert p.gathered + bytes_ <= result["nbytes"]
                assert p.slots + 2 * world * p.slot_bytes <= p.gathered
            else:
                assert launch["block"][0] * cluster >= p.row_chunks
                assert p.slot_bytes >= bytes_ and p.slots + 2 * world * p.slot_bytes <= result["nbytes"]
        assert result["nbytes"] >= 1024 + 2 * world * size


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("world", [2, 4])
def test_launches_of_other_patterns(driver: Path, tmp_path: Path, world: int, dtype: str) -> None:
    calls = [(t, 7168, pattern, two) for pattern in (4, 5, 7, 9, 11) for t, two in ((8, None), (128, None), (8, False))]
    for result in run(driver, tmp_path, world=world, calls=calls, dtype=dtype, most=[128, 7168]):
        assert result["raised"] == [None] * (len(calls) + 1) and result["refused"] == []
        for (tokens, hidden, pattern, _), launch, given in zip(
            calls, result["launches"], result["tensors"], strict=True
        ):
            (p,) = parameters_of(launch)
            n, e = p.narrowing, p.experts
            assert "_all" in launch["kernel"] and p.inverse_hidden == pytest.approx(1 / hidden)
            assert (p.gamma, p.norm_out, p.residual_out) == tuple(
                given[name] for name in ("rms_gamma", "norm_out", "residual_out")
            )
            assert (n.kind, n.scale) == {4: (1, 0.5), 5: (2, 31.0), 7: (0, 0), 9: (3, 0), 11: (4, 0)}[pattern]
            assert ((n.quant_out or 0), (n.scale_out or 0)) == (given.get("quant_out", 0), given.get("scale_out", 0))
            assert n.tile_rows == (8 if pattern == 5 else 0)
            item = BYTES[dtype]
            assert (n.group_chunks, n.column_stride) == ((128 * item // 16, tokens) if pattern == 9 else (0, 0))
            if pattern == 7:
                assert (e.rows, e.row_count, e.top_k, e.weight_dtype) == (given["input"], 9, 2, 0)
                assert e.row_of_slot == given["expanded_idx_to_permuted_idx"] and not p.input
                assert (e.weights, e.shared) == (given["expert_scale_factor"], given["shared_expert_output"])
            else:
                assert not e.rows and p.input == given["input"]


@pytest.mark.parametrize("world", [2, 4])
def test_memory_is_empty_and_shared(driver: Path, tmp_path: Path, world: int) -> None:
    calls = [(1, 64, 0, None)]
    for rank, result in enumerate(run(driver, tmp_path, world=world, calls=calls, dtype="bfloat16", most=[8, 64])):
        # Control words are zero; headers and slots look empty, on every rank, before any rank may send.
        for memory in result["memory"]:
            assert memory[:16] == [0] * 16 and memory[16:] == [EMPTY] * 48
        assert result["tail"] == [EMPTY]
        assert result["heard"] == 1000 + (rank - 1) % world
        assert len(set(result["workspaces"][:world])) == world and result["workspaces"][world:] == [0] * (8 - world)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (1, "TimeoutError: all-reduce: rank 1 waited for peer 0 in call 7: nothing came"),
        (2, "ValueError: all-reduce: ranks 1 and 0 disagree on the shape in call 7"),
    ],
)
def test_a_fault_that_a_peer_reported(driver: Path, tmp_path: Path, kind: int, expected: str) -> None:
    fault = kind << 56 | 1 << 48 | 0 << 40 | 7
    calls = [(1, 64, 0, None)]
    results = run(driver, tmp_path, calls=calls, dtype="float16", most=[8, 64], fault=fault)
    for result in results:
        # A kernel reports the fault to the host. Without a kernel, the workspace finds it when it waits for its GPU.
        assert result["unknown"] is None and result["known"].startswith(expected)
        assert result["next"].startswith("RuntimeError: workspace: failed before (r")
        # No rank waits for peers any more, and everything is released.
        assert result["raised"] == [None, None] and result["unmapped"] == 2


def test_a_rank_that_refuses_a_call_alone_disagrees_at_the_next(driver: Path, tmp_path: Path) -> None:
    """A refused call launches nothing. The rank's next call must not be taken for the one that it refused."""
    calm, refusing = run(driver, tmp_path, "refusal", shape_at=STRUCTS["AllReduceParams"].shape.offset)
    assert calm["raised"] == [None, None]
    before, gamma, deadline, after = refusing["raised"]
    assert before is None and after is None
    assert gamma.startswith("ValueError: rms_gamma: ") and deadline.startswith("ValueError: deadline: ")
    first, second = ([parameters_of(launch)[0].shape for launch in result["launches"]] for result in (calm, refusing))
    assert len(first) == len(second) == 2 and first[0] == first[1] == second[0]
    assert second[1] == first[1] | 2 << 24
    same = "pattern kAllReduce of bfloat16 [2, 64]"
    for rank, result in enumerate((calm, refusing)):
        assert result["found"].startswith("ValueError: all-reduce: ranks 0 and 1 disagree on the shape in call 1")
        one, other = (f"rank {rank} calls {same}", f"a peer calls {same}")
        told = " and has refused 2 calls before"
        assert f"{one}{told if rank else ''}, {other}{'' if rank else told}" in result["found"], result["found"]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    "fail",
    [
        "cuMemCreate:1:2",
        "cuMemExportToShareableHandle:1:999",
        "cuMemSetAccess:1:1",
        "cuMemImportFromShareableHandle:1:999",
        "cuMemSetAccess:2:217",
        "cuMemHostAlloc:1:2",
        "cuModuleLoadData:1:209",
        "cuCtxSynchronize:1:719",
    ],
)
def test_one_rank_fails_and_all_raise(driver: Path, tmp_path: Path, fail: str, failing: int) -> None:
    results = run(driver, tmp_path, "failure", fail=fail, failing=failing)
    assert results[failing]["raised"].startswith("RuntimeError: ") and "CUDA_ERROR" in results[failing]["raised"]
    expected = f"RuntimeError: rank {1 - failing}: rank {failing} made no workspace: RuntimeError"
    assert results[1 - failing]["raised"].startswith(expected)
    # A mapping that got no access is unmapped too.
    assert all(result["mapped"] <= 0 for result in results)


def test_groups_and_patterns_without_kernels(driver: Path, tmp_path: Path) -> None:
    results = run(driver, tmp_path, "failure", world=3, fail="", failing=0)
    for result in results:
        assert "all-reduces on GPUs serve [1, 2, 4, 8] ranks, got 3" in result["raised"]
    calls = [(1, 64, 2, None), (16, 64, 0, None), (1, 96, 0, None)]
    for result in run(driver, tmp_path, calls=calls, dtype="bfloat16", most=[8, 64]):
        refused = result["raised"][:2]
        assert refused[0].startswith("ValueError: ")
        assert refused[1].endswith("has 2048 bytes, the workspace was made for 1024")
        assert len(result["launches"]) == 1


def test_descriptors_that_the_driver_did_not_export(driver: Path, tmp_path: Path) -> None:
    result = execute(driver, tmp_path, "strange_descriptors", {"folder": str(tmp_path)})
    raised = result["raised"]
    assert raised.pop("right") is None and raised.pop("no answer") is None
    for name, text in raised.items():
        assert text is not None and text.startswith("ValueError: descriptors: rank 1's "), (name, text)
    assert raised["missing"].endswith("is missing") and raised["closed"].endswith("(1000) is not open")
    assert "a file of" in raised["plain"] and "a device of major number 1," in raised["device"]
    assert "expected a GPU's" in raised["host memory"] and result["left"] == 0
