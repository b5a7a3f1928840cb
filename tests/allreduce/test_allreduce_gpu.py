"""allreduce_fusion between GPUs, one process for each, against the CPU implementation bit for bit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import oxmoe
from oxmoe import AllReduceFusionPattern as Pattern
from ranks import DTYPES, WORLDS, Crew, Rank, alike, crc, crews, draw, make, on_cpu, poison, raised, same_bits, seed_of

_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

crew = crews(WORLDS, gpus=True)
alone = crews(1, gpus=True)
# Starts four ranks on the GPUs of this machine. Ranks on one GPU take turns in slices of milliseconds, so calls
# are slow.
shared = crews(4, gpus=True)


def compare(
    space: Any, parts: list[torch.Tensor], residual: torch.Tensor, gamma: torch.Tensor, what: str, **options: Any
) -> tuple[list[str], list[int]]:
    """Runs both patterns on the GPU and on the CPU. Returns (what differs, checksums)."""
    tokens, hidden = parts[0].shape
    dtype = parts[0].dtype
    new = lambda: poison(tokens, hidden, dtype=dtype)  # noqa: E731
    expected = {name: new() for name in ("output", "residual_out", "norm_out")}
    on_cpu(parts, 0, output=expected["output"])
    outputs = {name: expected[name] for name in ("residual_out", "norm_out")}
    on_cpu(parts, 1, residual_in=residual, rms_gamma=gamma, rms_eps=1e-5, weight_bias=1.0, **outputs)
    mine = parts[space.rank].cuda()
    got = {name: new().cuda() for name in expected}
    result = oxmoe.allreduce_fusion(mine, space, Pattern.kAllReduce, output=got["output"], **options)
    wrong = [] if result is got["output"] else [f"{what}: returns something else"]
    outputs = {name: got[name] for name in ("residual_out", "norm_out")}
    operands = {"residual_in": residual.cuda(), "rms_gamma": gamma.cuda(), "rms_eps": 1e-5, "weight_bias": 1.0}
    oxmoe.allreduce_fusion(mine, space, Pattern.kARResidualRMSNorm, **operands, **outputs, **options)
    torch.cuda.synchronize()
    space.check()
    wrong += [f"{what}: {name}" for name in expected if not same_bits(got[name].cpu(), expected[name])]
    return wrong, crc(*(got[name].cpu() for name in expected))


def shapes(
    me: Rank, seed: int, dtype: torch.dtype, cases: list[tuple[int, int]], size: int | None = None, deadline: int = 20
) -> tuple[list[str], list[int]]:
    size = size or me.world
    most = max(tokens * hidden for tokens, hidden in cases)
    space = make(me, most // 64 + 1, 64, dtype, size, force_oneshot_support=True, deadline=deadline)
    first = me.rank // size * size
    wrong, sums = [], []
    for tokens, hidden in cases:
        parts = [draw(seed, f"{tokens} {first + i}", tokens, hidden, dtype=dtype) for i in range(size)]
        residual, gamma = draw(seed, "residual", tokens, hidden, dtype=dtype), draw(seed, "gamma", hidden, dtype=dtype)
        found = [
            compare(space, parts, residual, gamma, f"{tokens} x {hidden}, use_oneshot {use}", use_oneshot=use)
            for use in (None, True, False)
        ]
        wrong += [text for texts, _ in found for text in texts]
        sums += found[0][1]
        if any(found[0][1] != other for _, other in found):
            wrong.append(f"{tokens} x {hidden}: one-shot and two-shot differ")
    space.destroy()
    return wrong, sums


CASES = [
    (1, 2880),
    (1, 7168),
    (3, 704),
    (8, 7168),
    (33, 1408),
    (64, 2880),
    (130, 7168),
    (5, 24),
    (300, 640),
    (2, 16384),
    (3, 32768),
    (140, 20480),
]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_cpu(crew: Crew, rng: torch.Generator, dtype: str) -> None:
    cases = [(tokens, hidden // 2 if dtype == "f32" and hidden > 8192 else hidden) for tokens, hidden in CASES]
    alike(crew.run(shapes, seed_of(rng), DTYPES[dtype], cases), len(crew.processes))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rank(alone: Crew, rng: torch.Generator, dtype: str) -> None:
    alike(alone.run(shapes, seed_of(rng), DTYPES[dtype], CASES[:8], 1), 1)


@pytest.mark.gpu
@pytest.mark.skipif(_GPUS >= 4, reason="there is a GPU for each of four ranks")
@pytest.mark.parametrize("dtype", DTYPES)
def test_four_ranks_on_fewer_gpus(shared: Crew, rng: torch.Generator, dtype: str) -> None:
    cases = [(1, 2880), (9, 1408), (130, 3584), (2, 8192), (1, 16384)] + [(1, 32768)] * (dtype != "f32")
    alike(shared.run(shapes, seed_of(rng), DTYPES[dtype], cases), 4)
    alike(shared.run(shapes, seed_of(rng), DTYPES[dtype], cases[:2], 2), 2)


@pytest.fixture
def eight() -> Iterator[Crew]:
    crew = Crew(8, gpus=True)
    yield crew
    crew.close()


@pytest.mark.multi_gpu
@pytest.mark.skipif(_GPUS >= 8, reason="there is a GPU for each of eight ranks")
def test_eight_ranks_on_fewer_gpus(eight: Crew, rng: torch.Generator) -> None:
    """Ranks of one GPU take turns, and each waits for all: a few small calls take seconds."""
    cases = [(1, 2880), (9, 1408), (40, 512)]
    alike(eight.run(shapes, seed_of(rng), torch.bfloat16, cases, None, 60, patience=180), 8)


@pytest.mark.multi_gpu
def test_subgroups(crew: Crew, rng: torch.Generator) -> None:
    if len(crew.processes) < 4:
        pytest.skip("a group of two ranks has no subgroups")
    alike(crew.run(shapes, seed_of(rng), torch.bfloat16, CASES[:4], 2), 2)


def strange(me: Rank, seed: int, dtype: torch.dtype) -> tuple[list[str], list[int]]:
    """Sums any bits: NaNs of every payload, also the bits of an empty slot, -0.0, infinities, subnormals."""
    tokens, hidden = 8, 2880
    ints, bits = (torch.int32, 32) if dtype == torch.float32 else (torch.int16, 16)
    parts = []
    for i in range(me.world):
        rng = torch.Generator().manual_seed(seed + i)
        part = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (tokens, hidden), generator=rng).to(ints)
        part[1] = -(2 ** (bits - 1))
        part[2] = -1
        part[3] &= 0x7F if bits == 16 else 0x7FFFFF
        part[4, ::3] = -1
        parts.append(part.view(dtype))
    residual, gamma = torch.zeros(tokens, hidden, dtype=dtype), torch.ones(hidden, dtype=dtype)
    space = make(me, tokens, hidden, dtype)
    found = [compare(space, parts, residual, gamma, f"strange, {use}", use_oneshot=use) for use in (True, False)]
    space.destroy()
    return [text for wrong, _ in found for text in wrong], []


@pytest.mark.multi_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_strange_values(crew: Crew, rng: torch.Generator, dtype: str) -> None:
    alike(crew.run(strange, seed_of(rng), DTYPES[dtype]), len(crew.processes))


def many_calls(me: Rank, seed: int, rounds: int) -> list[str]:
    """Makes calls of changing shape and kind, eager and replayed, and waits for none. Every result is compared on the
    device."""
    dtype, kinds = torch.bfloat16, [(1, 2880), (5, 7168), (40, 2880), (128, 7168), (0, 64), (9, 8192)]
    space = make(me, 128, 7168, dtype, force_oneshot_support=True)
    pool = [draw(seed, f"pool {i}", 1 << 21, dtype=dtype).cuda() for i in range(me.world)]
    zeros = torch.zeros(128 * 7168, dtype=dtype, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def total(offset: int, tokens: int, hidden: int) -> torch.Tensor:
        rows = [part[offset : offset + tokens * hidden].view(tokens, hidden).float() for part in pool]
        result = rows[0]
        for row in rows[1:]:
            result = result + row
        return result.to(dtype)

    graphs: list[Callable[[int], None]] = []
    for use in (True, False):
        static = [(t, h, torch.empty(t, h, dtype=dtype, device="cuda")) for t, h in kinds[:4]]
        outs = [torch.empty_like(x) for _, _, x in static]
        for (_, _, x), out in zip(static, outs, strict=True):
            oxmoe.allreduce_fusion(x.fill_(1), space, 0, output=out, use_oneshot=use)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for (_, _, x), out in zip(static, outs, strict=True):
                oxmoe.allreduce_fusion(x, space, 0, output=out, use_oneshot=use)

        def replay(offset: int, graph: Any = graph, static: Any = static, outs: Any = outs) -> None:
            for (t, h, x), out in zip(static, outs, strict=True):
                x.copy_(pool[me.rank][offset : offset + t * h].view(t, h))
                out.fill_(float("nan"))
            graph.replay()
            for (t, h, _), out in zip(static, outs, strict=True):
                wrong.add_((out != total(offset, t, h)).sum())

        graphs.append(replay)
    draws = torch.randint(0, 1 << 16, (rounds, 3), generator=torch.Generator().manual_seed(seed)).tolist()
    for first, kind, use in draws:
        offset = first * 8
        if kind % 8 < 2:
            graphs[kind % 8](offset)
            continue
        t, h = kinds[kind % len(kinds)]
        x = pool[me.rank][offset : offset + t * h].view(t, h)
        out, way = torch.full((t, h), float("nan"), dtype=dtype, device="cuda"), (None, True, False)[use % 3]
        if use % 2:
            oxmoe.allreduce_fusion(x, space, 0, output=out, use_oneshot=way)
        else:
            extra = {"residual_in": zeros[: t * h].view(t, h), "residual_out": out, "rms_gamma": zeros[:h]}
            if use % 4:
                quant = torch.empty(t, h, dtype=torch.uint8, device="cuda")
                scales = torch.empty(t, 1, device="cuda")
                oxmoe.allreduce_fusion(x, space, 10, quant_out=quant, scale_out=scales, use_oneshot=way, **extra)
            else:
                oxmoe.allreduce_fusion(x, space, 1, norm_out=torch.empty_like(x), use_oneshot=way, **extra)
        wrong += (out != total(offset, t, h)).sum()
    torch.cuda.synchronize()
    space.check()
    space.destroy()
    return [f"{int(wrong)} values"] if int(wrong) else []


@pytest.mark.multi_gpu
def test_many_calls_and_graphs(crew: Crew, rng: torch.Generator, request: pytest.FixtureRequest) -> None:
    calls = request.config.getoption("--allreduce-calls")
    assert crew.run(many_calls, seed_of(rng), calls, patience=600) == [[]] * len(crew.processes)


def long_replay(me: Rank, replays: int) -> list[str]:
    """Replays two graphs that share a workspace in turn; the input changes on the device."""
    space = make(me, 16, 2880, torch.float32)
    x = torch.zeros(16, 2880, device="cuda")
    outs = [torch.empty_like(x) for _ in range(2)]
    oxmoe.allreduce_fusion(x, space, 0, output=outs[0])
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in outs]
    for graph, out in zip(graphs, outs, strict=True):
        with torch.cuda.graph(graph):
            x.add_(me.rank + 1)
            oxmoe.allreduce_fusion(x, space, 0, output=out)
    for i in range(replays):
        graphs[i % 2].replay()
    torch.cuda.synchronize()
    space.check()
    space.destroy()
    each = sum(range(1, me.world + 1))
    expected = [each * (replays - 1), each * replays]
    return [f"{o.unique().tolist()} for {e}" for o, e in zip(outs, expected, strict=True) if not bool((o == e).all())]


@pytest.mark.multi_gpu
def test_ten_thousand_replays(crew: Crew) -> None:
    assert crew.run(long_replay, 10_000) == [[]] * len(crew.processes)


def absent(me: Rank, use: bool) -> list[Any]:
    """The last rank does not come. All others say so in time, and it finds out too."""
    space = make(me, 8, 2880, torch.bfloat16)
    x = torch.ones(8, 2880, dtype=torch.bfloat16, device="cuda")
    oxmoe.allreduce_fusion(x, space, 0, use_oneshot=use)
    torch.cuda.synchronize()
    dist.barrier(me.all)
    start = time.monotonic()
    if me.rank < me.world - 1:
        oxmoe.allreduce_fusion(x, space, 0, use_oneshot=use, deadline=0.2)
        torch.cuda.synchronize()
    seconds = time.monotonic() - start
    dist.barrier(me.all)
    first = raised(lambda: oxmoe.allreduce_fusion(x, space, 0, use_oneshot=use))
    torch.cuda.synchronize()
    second = raised(lambda: oxmoe.allreduce_fusion(x, space, 0, use_oneshot=use))
    start = time.monotonic()
    space.destroy()
    space.destroy()
    # A new workspace in the same group works.
    again = make(me, 8, 2880, torch.bfloat16)
    out = oxmoe.allreduce_fusion(x, again, 0, use_oneshot=use)
    torch.cuda.synchronize()
    again.check()
    right = bool((out == me.world).all())
    again.destroy()
    return [seconds, first, second, time.monotonic() - start, right]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("use", [True, False])
def test_a_rank_that_never_comes(crew: Crew, use: bool) -> None:
    says_who_never_came(crew.run(absent, use))


@pytest.mark.gpu
@pytest.mark.skipif(_GPUS >= 4, reason="there is a GPU for each of four ranks")
@pytest.mark.parametrize("use", [True, False])
def test_one_of_four_on_fewer_gpus_never_comes(shared: Crew, use: bool) -> None:
    says_who_never_came(shared.run(absent, use))


def says_who_never_came(results: list[list[Any]]) -> None:
    last = len(results) - 1
    for rank, (seconds, first, second, destroyed, right) in enumerate(results):
        if rank < last:
            assert 0.1 < seconds < 2 and first[0] == "TimeoutError"
            assert f"waited for peer {last} in call 1" in first[1] and "of bfloat16 [8, 2880]" in first[1]
        else:
            # This rank had not heard of the fault when it launched; its kernel found it at once.
            assert first[0] == "nothing"
        assert second[0] == ("RuntimeError" if rank < last else "TimeoutError"), second
        assert destroyed < 5 and right


def disagree(me: Rank) -> list[Any]:
    """One rank calls another shape, and all hear of it long before the deadline."""
    space = make(me, 16, 2880, torch.bfloat16)
    tokens = 8 if me.rank else 7
    x = torch.ones(tokens, 2880, dtype=torch.bfloat16, device="cuda")
    start = time.monotonic()
    oxmoe.allreduce_fusion(x, space, 0)
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    # A rank that saw no other shape hears of it from the others.
    dist.barrier(me.all)
    space._memory.synchronize()
    result = raised(space.check)
    space.destroy()
    return [seconds, result]


@pytest.mark.multi_gpu
def test_ranks_that_disagree(crew: Crew) -> None:
    for seconds, (kind, text) in crew.run(disagree):
        assert seconds < 5 and kind == "ValueError" and "disagree on the shape in call 0" in text, text


def refused(me: Rank) -> list[tuple[str, str]]:
    space = make(me, 8, 2880, torch.bfloat16)
    x = torch.ones(8, 2880, dtype=torch.bfloat16, device="cuda")
    flat = torch.ones(8 * 2880 + 1, dtype=torch.bfloat16, device="cuda")
    gamma = x[0].clone()
    fp8 = torch.empty(8, 2880, dtype=torch.uint8, device="cuda")
    scales = torch.empty(8, 8, dtype=torch.int32, device="cuda").t()[:, :8]
    norm = {"residual_in": x, "residual_out": x, "rms_gamma": gamma}
    results = [
        raised(lambda: oxmoe.allreduce_fusion(flat[1:].view(8, 2880), space, 0)),
        raised(lambda: oxmoe.allreduce_fusion(x.repeat(2, 1), space, 0)),
        raised(
            lambda: oxmoe.allreduce_fusion(
                x, space, 8, quant_out=fp8, scale_out=scales, block_quant_group_size=96, **norm
            )
        ),
        raised(lambda: oxmoe.allreduce_fusion(x, space, 1, norm_out=x.cpu(), **norm)),
    ]
    # CPU tensors work too, and nothing of this harmed the workspace.
    on_gpu = oxmoe.allreduce_fusion(x, space, 0)
    host = oxmoe.allreduce_fusion(x.cpu(), space, 0)
    results.append(("equal", str(bool((on_gpu.cpu() == host).all() and (host == me.world).all()))))
    space.destroy()
    return results


@pytest.mark.multi_gpu
def test_refusals(crew: Crew) -> None:
    for result in crew.run(refused):
        assert result[0] == ("ValueError", "input: expected an address divisible by 16")
        assert result[1][0] == "ValueError" and "the workspace was made for" in result[1][1]
        assert result[2][0] == "NotImplementedError" and "up to 512 are served, got 96 bfloat16" in result[2][1]
        assert result[3][0] == "ValueError" and result[3][1].startswith("norm_out: is on cpu")
        assert result[4] == ("equal", "True")


def killed(me: Rank) -> tuple[str, str]:
    space = make(me, 8, 2880, torch.bfloat16)
    x = torch.ones(8, 2880, dtype=torch.bfloat16, device="cuda")
    oxmoe.allreduce_fusion(x, space, 0)
    torch.cuda.synchronize()
    dist.barrier(me.all)
    if me.rank == me.world - 1:
        os._exit(1)
    oxmoe.allreduce_fusion(x, space, 0, deadline=1)
    torch.cuda.synchronize()
    result = raised(space.check)
    space.destroy()
    return result


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", WORLDS)
def test_a_killed_rank(world: int) -> None:
    crew = Crew(world, gpus=True)
    try:
        for kind, text in crew.run(killed, gone=(world - 1,)):
            assert kind == "TimeoutError" and f"waited for peer {world - 1} in call 1" in text, text
    finally:
        crew.close()
