"""routing: triton_kernels' tables, checked by invariants, against the reference and against a loop."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import Tensor

import oxmoe
from cases import tie_free_logits
from oxmoe import reference
from oxmoe.testing import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ((0, 8, 2), (1, 32, 4), (1, 128, 8), (7, 8, 3), (61, 32, 4), (300, 128, 8), (2000, 16, 2))


def check(logits: Tensor, top_k: int, **options: object) -> tuple[oxmoe.RoutingData, Tensor, Tensor]:
    """Compares all seven tables with the reference, and then checks what a grouped GEMM relies on without the
    reference."""
    data, gather, scatter = oxmoe.routing(logits, top_k, **options)
    gates, *tables = reference.routing_tables(logits, top_k, **options)
    metadata = data.expt_data
    assert metadata is not None
    combine, dispatch = gather.src_indx, gather.dst_indx
    assert scatter.src_indx is dispatch and scatter.dst_indx is combine
    ours = (
        data.expt_hist,
        metadata.slice_offs,
        combine,
        dispatch,
        metadata.block_offs_data,
        metadata.block_schedule_data,
    )
    names = ("expt_hist", "slice_offs", "combine", "dispatch", "block_offs_data", "block_schedule_data")
    for name, table, expected in zip(names, ours, tables, strict=True):
        assert table.dtype == torch.int32 and torch.equal(table, expected), name
    placed = combine >= 0
    assert data.gate_scal.dtype == logits.dtype and data.gate_scal.shape == combine.shape
    # The bar is one rounding of an fp32 softmax to the logits' dtype: half an ulp, and the softmax's own last bits.
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[logits.dtype]
    assert_close(data.gate_scal[placed], gates[placed], rtol=tolerance, atol=1e-7)

    slots = combine[placed].long()
    assert torch.equal(dispatch[slots].long(), torch.arange(slots.numel(), device=slots.device))
    assert int(data.expt_hist.sum()) == slots.numel()
    for size in metadata.block_sizes():
        schedule = metadata.block_schedule(size)
        used = schedule[schedule >= 0]
        assert int(metadata.block_offs(size)[-1]) == used.numel() <= data.n_blocks(combine.numel(), size)
        rows = (data.expt_hist[(used & 0xFFFF).long()] - (used >> 16) * size).clamp(max=size)
        assert bool((rows > 0).all()) and int(rows.sum()) == slots.numel()
    return data, combine, dispatch


@pytest.mark.parametrize("sm_first", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens,experts,top_k", SIZES)
def test_chosen(
    device: str, tokens: int, experts: int, top_k: int, dtype: torch.dtype, sm_first: bool, rng: torch.Generator
) -> None:
    # NOTE: the step is wide enough that a softmax rounded to half precision keeps the chosen apart.
    logits = tie_free_logits(tokens, experts, rng, step=1 / 8).to(dtype).to(device)
    data, _, _ = check(logits, top_k, sm_first=sm_first)
    assert data.n_expts_tot == experts and data.n_expts_act == top_k


def test_hot_expert(device: str, rng: torch.Generator) -> None:
    logits = tie_free_logits(500, 64, rng)
    logits[:, 11] += 8
    data, _, _ = check(logits.to(device), 4)
    assert int(data.expt_hist[11]) == 500


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_given_experts(device: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    logits = torch.randn((50, 16), generator=rng).to(device)
    given = torch.stack([torch.randperm(16, generator=rng)[:3] for _ in range(50)])
    _, combine, _ = check(logits, 3, expt_indx=given.to(dtype).to(device))
    assert torch.equal(given.view(-1)[combine.long().cpu()], given.view(-1).sort(stable=True).values)


@pytest.mark.parametrize("sm_first", [False, True])
def test_given_ids_of_no_expert(device: str, sm_first: bool, rng: torch.Generator) -> None:
    """-1 and numbers from E on, anywhere in a row, have no slot and no part in its softmax."""
    logits = torch.randn((4, 8), generator=rng)
    given = torch.tensor([[1, -1, 3], [8, 2, 1 << 20], [-1, -1, -1], [0, 7, 5]])
    data, combine, dispatch = oxmoe.routing(logits.to(device), 3, sm_first, expt_indx=given.to(device))
    rows = [[expert for expert in row if 0 <= expert < 8] for row in given.tolist()]
    assert data.expt_hist.tolist() == [sum(row.count(expert) for row in rows) for expert in range(8)]
    slots = {expert: 3 * t + given[t].tolist().index(expert) for t, row in enumerate(rows) for expert in row}
    in_order = [slots[expert] for expert in sorted(slots)]
    assert combine.src_indx.tolist() == in_order + [-1] * 6
    assert [dispatch.src_indx[slot].item() for slot in in_order] == list(range(6))
    weights = [
        (logits[t].softmax(0) if sm_first else logits[t][rows[t]].softmax(0))[expert if sm_first else i].item()
        for t in range(4)
        for i, expert in enumerate(rows[t])
    ]
    by_expert = dict(zip([expert for row in rows for expert in row], weights, strict=True))
    expected = torch.tensor([by_expert[expert] for expert in sorted(by_expert)] + [0.0] * 6)
    torch.testing.assert_close(data.gate_scal.cpu(), expected)


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("valid", [0, 1, 20, 49, 50])
def test_padding_rows(device: str, valid: int, as_tensor: bool, rng: torch.Generator) -> None:
    logits = tie_free_logits(50, 32, rng).to(device)
    n_rows = torch.tensor(valid, dtype=torch.int32, device=device) if as_tensor else valid
    data, combine, _ = check(logits, 4, n_rows=n_rows)
    assert int(data.expt_hist.sum()) == valid * 4
    assert bool((combine[valid * 4 :] == -1).all())


@pytest.mark.parametrize("simulated_ep", [2, 4])
@pytest.mark.parametrize("tokens", [1, 30, 200])
def test_simulated_expert_parallelism(device: str, tokens: int, simulated_ep: int, rng: torch.Generator) -> None:
    """Only the first rank's experts count, and their slots are at the front of each row."""
    logits = tie_free_logits(tokens, 32, rng)
    data, combine, dispatch = check(logits.to(device), 4, simulated_ep=simulated_ep)
    local = 32 // simulated_ep
    assert data.n_expts_tot == local and data.expt_hist.shape == (local,)
    ids = reference.topk(logits, 4, scoring_func="softmax_topk", order="id")[1].tolist()
    kept = [[expert for expert in row if expert < local] for row in ids]
    assert data.expt_hist.tolist() == [sum(row.count(expert) for row in kept) for expert in range(local)]
    present = [slot >= 0 for slot in dispatch.tolist()]
    assert present == [slot < len(row) for row in kept for slot in range(4)]
    expert_of_slot = {t * 4 + j: expert for t, row in enumerate(kept) for j, expert in enumerate(row)}
    experts = [expert_of_slot[slot] for slot in combine.tolist() if slot >= 0]
    assert experts == sorted(experts)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("sm_first", [False, True])
def test_numpy(sm_first: bool, given: bool, rng: torch.Generator) -> None:
    """numpy arrays give numpy arrays with the numbers of torch tensors."""
    logits = tie_free_logits(9, 12, rng)
    ids = oxmoe.topk(logits, 3)[1] if given else None
    of_torch = oxmoe.routing(logits, 3, sm_first, ids, 2, torch.tensor(7, dtype=torch.int32))
    of_numpy = oxmoe.routing(
        logits.numpy(),
        3,
        sm_first,
        None if ids is None else ids.numpy(),
        2,
        numpy.array(7, dtype=numpy.int32),  # type: ignore[arg-type]
    )
    pairs = [(of_torch[0].gate_scal, of_numpy[0].gate_scal), (of_torch[0].expt_hist, of_numpy[0].expt_hist)]
    tables = "slice_sizes", "slice_offs", "block_offs_data", "block_schedule_data"
    pairs += [(getattr(of_torch[0].expt_data, name), getattr(of_numpy[0].expt_data, name)) for name in tables]
    for ours, theirs in zip(of_torch[1:], of_numpy[1:], strict=True):
        pairs += [(ours.src_indx, theirs.src_indx), (ours.dst_indx, theirs.dst_indx)]  # type: ignore[attr-defined]
    for tensor, array in pairs:
        assert isinstance(array, numpy.ndarray) and array.dtype == tensor.numpy().dtype
        assert (array == tensor.numpy()).all()
    assert of_numpy[0].n_expts_tot == of_torch[0].n_expts_tot == 6


def test_arrays_that_torch_does_not_take() -> None:
    logits = numpy.zeros((2, 4), dtype=numpy.float32)
    logits.flags.writeable = False
    assert isinstance(oxmoe.routing(logits, 2)[0].gate_scal, numpy.ndarray)  # type: ignore[arg-type]
    for wrong in (logits.astype(">f4"), logits.copy()[::-1]):
        with pytest.raises(ValueError, match=r"^logits: "):
            oxmoe.routing(wrong, 2)  # type: ignore[arg-type]


def test_older_names() -> None:
    """ExptData's fields are views of the same tables."""
    metadata = oxmoe.routing(torch.arange(64.0).view(4, 16), 2)[0].expt_data
    assert isinstance(metadata, oxmoe.ExptData)
    assert metadata.hist is metadata.slice_sizes and metadata.token_offs_raw is metadata.slice_offs
    assert list(metadata.token_offs_pad) == list(metadata.block_pid_map) == [16, 32, 64, 128]
    assert torch.equal(metadata.block_pid_map[64], metadata.block_schedule_data[2])
    assert metadata.max_n_blocks(16, 8) == 8 and metadata.block_schedule_data.shape[1] == 8


def test_block_tables_against_the_documented_example() -> None:
    """The example is that of triton_kernels' docstring: slices of 15, 17, 0 and 127 rows."""
    offsets, schedule = reference.block_tables(torch.tensor([15, 17, 0, 127]), 159)
    assert offsets.tolist() == [[0, 1, 3, 3, 11], [0, 1, 2, 2, 6], [0, 1, 2, 2, 4], [0, 1, 2, 2, 3]]
    pairs = [(entry >> 16, entry & 0xFFFF) for entry in schedule[2].tolist() if entry >= 0]
    assert pairs == [(0, 0), (0, 1), (0, 3), (1, 3)]
    assert schedule.shape[1] == reference.max_blocks(4, 159) == 13
