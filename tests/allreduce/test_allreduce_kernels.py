"""The all-reduce kernels' code on host threads: bits against the CPU implementation, slots, epochs and faults."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

import oxmoe._oxmoe as extension
from fake_cuda.harness import STRUCTS
from host_allreduce import ELEMENTS, WORKS, HostAllReduce, on_every_rank
from oxmoe.allreduce.fusion import _Operands
from ranks import draw, poison, quant_operands, same_bits, seed_of

EMPTY = -1  # an empty slot, as an int64 word
ROOM = 8192  # bytes of the largest message
MINUTE, SHORT = 60_000_000_000, 1_000_000_000  # deadlines in ns


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostAllReduce:
    return HostAllReduce(tmp_path_factory.mktemp("kernels"))


class Group:
    """Ranks with their workspaces, laid out as src/allreduce/protocol.rs does, and a way to launch calls."""

    def __init__(self, kernels: HostAllReduce, ranks: int, dtype: torch.dtype, deadline: int = MINUTE) -> None:
        self.kernels, self.ranks, self.dtype, self.deadline = kernels, ranks, dtype, deadline
        self.twoshot = -(-ROOM // (128 * ranks)) * 128 * ranks
        self.scatter = 1024 + 2 * ranks * ROOM
        self.gathered = self.scatter + 2 * self.twoshot
        whole = [torch.full((self.gathered + self.twoshot + 128,), 0xFF, dtype=torch.uint8) for _ in range(ranks)]
        self.memory = [raw[-raw.data_ptr() % 128 :][: self.gathered + self.twoshot] for raw in whole]
        for memory in self.memory:
            memory[:128] = 0
        self.reports = [torch.zeros(8, dtype=torch.int64) for _ in range(ranks)]

    def call(
        self,
        rank: int,
        turn: int,
        x: torch.Tensor,
        two: bool,
        chunks: int = 0,
        pattern: int | None = None,
        **given: Any,
    ) -> None:
        """Launches a call. `given`: tensors, whose addresses are passed, and whole structs. chunks 0: the least of the
        kernel."""
        tokens, hidden = x.shape
        row_chunks = hidden * x.element_size() // 16
        total = tokens * row_chunks
        stages = (1, 1, 1 + (turn + rank) % 2) if two else (0, 0, 0)
        workspaces = STRUCTS["Workspaces"](*[memory.data_ptr() for memory in self.memory])
        pattern = int("gamma" in given) if pattern is None else pattern
        work = ("Sum", "Norm", "All")[min(pattern, 2)]
        chunks = chunks or WORKS[work][0]
        name = f"{'twoshot' if two else 'oneshot'}_{str(self.dtype).rpartition('.')[2]}_{self.ranks}_{work}"
        self.kernels.launch(
            f"{name}_{chunks}" if two else name,
            sum(stages) if two else max(1, min(tokens, 1 + (turn + rank) % 3)),
            -(-row_chunks // (chunks if two else 1) // 32) * 32 or 32,
            seed=turn * 131 + rank,
            workspaces=workspaces,
            report=self.reports[rank].data_ptr(),
            input=x.data_ptr(),
            slots=self.scatter if two else 1024,
            slot_bytes=self.twoshot // self.ranks if two else ROOM,
            gathered=self.gathered,
            deadline_ns=self.deadline,
            shape=tokens << 32 | hidden << 8 | two << 5 | pattern,
            rank=rank,
            tokens=tokens,
            row_chunks=row_chunks,
            range=max(math.ceil(math.ceil(total / self.ranks) / 8) * 8, 8),
            scatter_ctas=stages[0],
            reduce_ctas=stages[1],
            finish_ctas=stages[2],
            inverse_hidden=1 / hidden,
            epsilon=1e-5,
            weight_bias=1.0,
            **{name: value.data_ptr() if torch.is_tensor(value) else value for name, value in given.items()},
        )

    def fault(self, rank: int) -> tuple[int, int, int, int]:
        """Returns a rank's fault as (kind, finder, peer, epoch)."""
        word = int(self.reports[rank][0])
        return word >> 56 & 0xFF, word >> 48 & 0xFF, word >> 40 & 0xFF, word & 0xFFFFFFFF


def on_cpu(parts: list[torch.Tensor], pattern: int, **operands: Any) -> None:
    given: dict[str, Any] = dict.fromkeys(_Operands.__dataclass_fields__) | operands
    given |= {"input": parts[0], "pattern": pattern, "rms_eps": 1e-5, "weight_bias": 1.0}
    extension.allreduce_finish(_Operands(**given), parts)


def rows(rng: torch.Generator, tokens: int, hidden: int, dtype: torch.dtype, strange: bool) -> torch.Tensor:
    x = (torch.randn(tokens, hidden, generator=rng) * 3).to(dtype)
    if strange and dtype != torch.float32:
        # The operands have any bits: NaNs that look empty, -0.0, infinities, subnormals.
        bits = torch.randint(-(2**15), 2**15, (tokens, hidden), generator=rng).to(torch.int16)
        bits[:, ::3] = -1
        bits[:, 1::5] = -(2**15)
        some = torch.rand(tokens, 1, generator=rng) < 0.5
        x = torch.where(some, bits, x.view(torch.int16)).view(dtype)
    return x


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_bits_slots_and_epochs(kernels: HostAllReduce, rng: torch.Generator, dtype: str, ranks: int) -> None:
    kind, calls = getattr(torch, dtype), 9 if ranks < 8 else 4
    group = Group(kernels, ranks, kind)
    unit = 16 // kind.itemsize
    plan = []
    for turn in range(calls):
        pick = torch.randint(0, 1000, (4,), generator=rng).tolist()
        hidden = (1 + pick[0] % 44) * unit
        tokens = min(pick[1] % 8, ROOM // (hidden * kind.itemsize)) if turn != 1 else 0
        two = ranks > 2 and tokens > 0 and pick[2] % 2 == 1
        parts = [rows(rng, tokens, hidden, kind, pick[3] % 3 == 0) for _ in range(ranks)]
        residual, gamma = rows(rng, tokens, hidden, kind, False), rows(rng, 1, hidden, kind, False)[0]
        outputs = [{name: poison(tokens, hidden, dtype=kind) for name in ("output", "norm_out")} for _ in parts]
        norm = pick[3] % 2
        chunks = WORKS[("Sum", "Norm")[norm]]
        plan.append((turn, parts, residual, gamma, outputs, two, chunks[pick[2] // 2 % len(chunks)], norm))

    residuals = [[call[2].clone() for call in plan] for _ in range(ranks)]

    def stream(rank: int) -> None:
        for turn, parts, _, gamma, outputs, two, chunks, norm in plan:
            given = {"output": outputs[rank]["output"]}
            if norm:
                residual = residuals[rank][turn]  # residual_out is residual_in
                given = {"residual_in": residual, "residual_out": residual, "gamma": gamma}
                given["norm_out"] = outputs[rank]["norm_out"]
            group.call(rank, turn, parts[rank], two, chunks, **given)

    on_every_rank(ranks, stream)
    for turn, parts, residual, gamma, outputs, two, _, norm in plan:
        expected = [poison(*parts[0].shape, dtype=kind) for _ in range(2)]
        if norm:
            operands = {"residual_out": expected[0], "norm_out": expected[1]}
            on_cpu(parts, 1, residual_in=residual, rms_gamma=gamma, **operands)
        else:
            on_cpu(parts, 0, output=expected[0])
        for rank in range(ranks):
            got = [residuals[rank][turn], outputs[rank]["norm_out"]] if norm else [outputs[rank]["output"]]
            for a, b in zip(got, expected, strict=False):
                assert same_bits(a, b), f"call {turn}, rank {rank}, {tuple(parts[0].shape)}, {'two' if two else 'one'}"
    for memory, report in zip(group.memory, group.reports, strict=True):
        words = memory.view(torch.int64)
        # The epoch counts calls, nobody is left in it, and every header and slot is empty again.
        assert words[0] == 0 and words[1] == calls and int(report[0]) == 0
        assert bool((words[16:] == EMPTY).all())


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def narrowing(kind: str, operands: dict[str, Any], item: int) -> Any:
    scale, scale_out = operands.get("scale_factor"), operands.get("scale_out")
    return STRUCTS["Narrowing"](
        kind=1 + ("fp8", "fp4", "group", "token").index(kind),
        quant_out=address(operands["quant_out"]),
        scale_out=address(scale_out),
        scale_factor=address(scale) if torch.is_tensor(scale) else 0,
        scale=scale if isinstance(scale, float) else 0.0,
        tile_rows={0: 128, 1: 8, 2: 0}[operands.get("layout_code", 0)],
        group_chunks=operands.get("block_quant_group_size", 0) * item // 16,
        column_stride=0 if kind != "group" or scale_out is None else scale_out.stride(1),
    )


def all_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all bytes of a tensor, also those between the columns of a strided one."""
    base = tensor if tensor._base is None else tensor._base
    return base.contiguous().view(-1).view(torch.uint8)


PATTERNS = {"fp8": (2, 4), "fp4": (3, 5), "group": (8, 9), "token": (10, 11)}


@pytest.mark.parametrize(("ranks", "two"), [(1, False), (2, False), (4, True)])
@pytest.mark.parametrize(
    ("kind", "layout"), [("fp8", 0), ("fp4", 0), ("fp4", 1), ("fp4", 2), ("group", 0), ("token", 0)]
)
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_quantised_patterns(
    kernels: HostAllReduce, rng: torch.Generator, dtype: str, kind: str, layout: int, ranks: int, two: bool
) -> None:
    element = getattr(torch, dtype)
    group = Group(kernels, ranks, element)
    plan = []
    for turn, pattern in enumerate(PATTERNS[kind]):
        pick = torch.randint(0, 1000, (3,), generator=rng).tolist()
        size = (64, 32, 128)[pick[0] % 3]  # size of a scale group
        hidden = size * (1 + pick[1] % (4 if size == 128 else 7))
        tokens = min(1 + pick[2] % 9, ROOM // (hidden * element.itemsize))
        parts = [rows(rng, tokens, hidden, element, turn == 1) for _ in range(ranks)]
        residual, gamma = rows(rng, tokens, hidden, element, False), rows(rng, 1, hidden, element, False)[0]
        parts[0][0, :16], residual[0, :16] = 0, 0
        quant = [quant_operands(kind, tokens, hidden, layout, size, turn == 1) for _ in range(ranks + 1)]
        outputs = [{n: poison(tokens, hidden, dtype=element) for n in ("residual_out", "norm_out")} for _ in quant]
        for given in outputs if turn == 0 else ():
            del given["norm_out"]
        plan.append((turn, pattern, parts, residual, gamma, quant, outputs))

    def stream(rank: int) -> None:
        for turn, pattern, parts, residual, gamma, quant, outputs in plan:
            given = {"residual_in": residual, "gamma": gamma, **outputs[rank]}
            given["narrowing"] = narrowing(kind, quant[rank], element.itemsize)
            group.call(rank, turn, parts[rank], two, WORKS["All"][turn], pattern, **given)

    on_every_rank(ranks, stream)
    for _, pattern, parts, residual, gamma, quant, outputs in plan:
        on_cpu(parts, pattern, residual_in=residual, rms_gamma=gamma, **quant[ranks], **outputs[ranks])
        for rank in range(ranks):
            what = f"{pattern}, rank {rank}, {tuple(residual.shape)}"
            for name, expected in outputs[ranks].items():
                assert same_bits(outputs[rank][name], expected), f"{name}, {what}"
            for name in {"quant_out", "scale_out"} & set(quant[ranks]):
                assert torch.equal(all_bytes(quant[rank][name]), all_bytes(quant[ranks][name])), f"{name}, {what}"


@pytest.mark.parametrize(("ranks", "two"), [(1, False), (2, False), (4, True)])
@pytest.mark.parametrize("weight_dtype", [None, "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_experts_rows(
    kernels: HostAllReduce, rng: torch.Generator, dtype: str, weight_dtype: str | None, ranks: int, two: bool
) -> None:
    """Runs patterns 6 and 7, also with a row number that is out of range."""
    element, seed, tokens, hidden, count = getattr(torch, dtype), seed_of(rng), 5, 256, 23
    group = Group(kernels, ranks, element)
    top_k = 3 + seed % 3
    residual, gamma = rows(rng, tokens, hidden, element, False), rows(rng, 1, hidden, element, False)[0]
    nothing, calls = dict.fromkeys(_Operands.__dataclass_fields__), []
    for pattern in (6, 7):
        if pattern == 6 and weight_dtype != "float32":
            continue
        given, structs = [], []
        for rank in range(ranks):
            gemm2 = draw(seed, f"gemm2 {rank}", top_k * tokens if pattern == 6 else count, hidden, dtype=element)
            shape = (top_k, tokens) if pattern == 6 else (tokens, top_k)
            weights = None
            if weight_dtype is not None:
                weights = draw(seed, f"weights {rank}", *shape, dtype=getattr(torch, weight_dtype))
            shared = (
                draw(seed, f"shared {rank}", tokens, hidden, dtype=element) if pattern == 6 or rank % 2 == 0 else None
            )
            places = torch.randint(-1, count, (tokens, top_k), generator=rng, dtype=torch.int32)
            if pattern == 6:
                names = {"input": shared, "moe_reduction_token_input": shared, "moe_reduction_scale_input": weights}
                names |= {"moe_reduction_device_num_experts": top_k, "moe_reduction_active_experts_token_input": gemm2}
            else:
                names = {"input": gemm2, "expanded_idx_to_permuted_idx": places, "expert_scale_factor": weights}
                names["shared_expert_output"] = shared
            given.append(names | {"residual_in": residual, "rms_gamma": gamma, "pattern": pattern})
            structs.append(
                STRUCTS["ExpertRows"](
                    rows=gemm2.data_ptr(),
                    row_count=gemm2.shape[0],
                    row_of_slot=places.data_ptr() if pattern == 7 else 0,
                    weights=address(weights),
                    weight_dtype={None: 0, "float32": 0, "float16": 1, "bfloat16": 2}[weight_dtype],
                    top_k=top_k,
                    shared=address(shared),
                )
            )
        outputs = [
            {n: poison(tokens, hidden, dtype=element) for n in ("residual_out", "norm_out")} for _ in range(ranks + 1)
        ]
        if pattern == 6:
            outputs = [
                {"output": poison(tokens, hidden, dtype=element), "norm_out": names["norm_out"]} for names in outputs
            ]
        calls.append((pattern, given, structs, outputs))

    def stream(rank: int) -> None:
        for turn, (pattern, _, structs, outputs) in enumerate(calls):
            more = {"residual_in": residual, "gamma": gamma, "experts": structs[rank], **outputs[rank]}
            group.call(rank, turn, residual, two, WORKS["All"][turn], pattern, **more)

    on_every_rank(ranks, stream)
    for pattern, given, _, outputs in calls:
        whole = [{**nothing, "rms_eps": 1e-5, "weight_bias": 1.0, **names, **outputs[ranks]} for names in given]
        messages = [extension.allreduce_message(_Operands(**names))[1] for names in whole]
        extension.allreduce_finish(_Operands(**whole[0]), messages)
        for rank in range(ranks):
            for name, expected in outputs[ranks].items():
                assert same_bits(outputs[rank][name], expected), f"{name}, pattern {pattern}, rank {rank}"
    # The host cannot check row numbers.
    given[0]["expanded_idx_to_permuted_idx"][2, 1] = count
    wrong = [{"residual_out": torch.zeros(tokens, hidden, dtype=element)} for _ in range(ranks)]
    for struct in structs:
        struct.shared = 0

    def once_more(rank: int) -> None:
        more = {"residual_in": residual, "gamma": gamma, "experts": structs[rank], **wrong[rank]}
        group.call(rank, 9, residual, two, WORKS["All"][0], 7, **more)

    on_every_rank(ranks, once_more)
    assert all(out["residual_out"].isnan().any(-1).tolist() == [False, False, True, False, False] for out in wrong)


@pytest.mark.parametrize(("ranks", "two"), [(2, False), (4, False), (4, True)])
def test_a_rank_that_never_comes(kernels: HostAllReduce, ranks: int, two: bool) -> None:
    group = Group(kernels, ranks, torch.bfloat16, SHORT)
    x, last = torch.ones(3, 256, dtype=torch.bfloat16), ranks - 1
    outputs = [torch.empty_like(x) for _ in range(ranks)]
    on_every_rank(ranks, lambda rank: group.call(rank, 0, x, two, output=outputs[rank]))
    assert all(bool((output == ranks).all()) for output in outputs)
    start = time.monotonic()
    on_every_rank(last, lambda rank: group.call(rank, 1, x, two, output=outputs[rank]))
    assert 0.9 < time.monotonic() - start < 10
    for rank in range(last):
        kind, finder, peer, epoch = group.fault(rank)
        assert (kind, peer, epoch) == (1, last, 1) and finder < last and group.fault(rank) == group.fault(0)
        assert int(group.reports[rank][1]) == 3 << 32 | 256 << 8 | two << 5
    # The last rank finds the fault at once when it comes, and so does every rank that calls again.
    assert int(group.reports[last][0]) == 0
    start = time.monotonic()
    on_every_rank(ranks, lambda rank: group.call(rank, 2, x, two, output=outputs[rank]))
    assert group.fault(last) == group.fault(0) and time.monotonic() - start < 10


@pytest.mark.parametrize(("ranks", "two"), [(2, False), (4, False), (4, True)])
def test_a_rank_that_has_given_up_sends_nothing_more(kernels: HostAllReduce, ranks: int, two: bool) -> None:
    """A rank's stream goes on after a fault. Peers may still wait in the call of the fault, so its slots keep that
    call's rows, and no sum of which a part is missing comes to anybody."""
    group = Group(kernels, ranks, torch.float32, SHORT // 20)
    tokens, hidden = 2, 128
    output = torch.empty(tokens, hidden)
    for turn, value in enumerate((1.0, 100.0, 1000.0)):
        group.call(0, turn, torch.full((tokens, hidden), value), two, output=output)
    kind, finder, _, epoch = group.fault(0)
    assert (kind, finder, epoch) == (1, 0, 0)
    start, slot = (group.scatter, group.twoshot // ranks) if two else (1024, ROOM)
    headers = 128, 16
    for peer in range(1, ranks):
        memory = group.memory[peer]
        for parity in range(2):
            at = start + parity * ranks * slot
            words = memory[at : at + slot].view(torch.int32)
            sent = words[words != EMPTY].view(torch.float32)
            # Two-shot sends a peer the rows that it adds.
            count = tokens * hidden // ranks if two else tokens * hidden
            assert sent.tolist() == [1.0] * (0 if parity else count), (peer, parity)
            at = headers[0] + parity * 8 * headers[1]
            assert (int(memory[at : at + 8].view(torch.int64)) == EMPTY) == bool(parity)
    if two:
        for memory in group.memory:
            assert bool((memory[group.gathered :].view(torch.int64) == EMPTY).all())


@pytest.mark.parametrize("tokens", [0, 2, 5])
@pytest.mark.parametrize(("ranks", "two"), [(2, False), (4, False), (4, True)])
def test_ranks_that_disagree(kernels: HostAllReduce, ranks: int, two: bool, tokens: int) -> None:
    group = Group(kernels, ranks, torch.float16)
    shapes = [(3, 128)] * (ranks - 1) + [(tokens, 128)]
    inputs = [torch.ones(*shape, dtype=torch.float16) for shape in shapes]
    start = time.monotonic()
    on_every_rank(
        ranks,
        lambda rank: group.call(rank, 0, inputs[rank], two and bool(tokens), output=torch.empty_like(inputs[rank])),
    )
    # The call ends long before the deadline.
    assert time.monotonic() - start < 30
    for rank in range(ranks):
        kind, finder, peer, epoch = group.fault(rank)
        assert (kind, epoch) == (2, 0) and ranks - 1 in (finder, peer)
        assert int(group.reports[rank][1]) >> 32 == shapes[rank][0]
