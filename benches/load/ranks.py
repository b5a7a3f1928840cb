"""Scenarios of benches/reliability.py in which ranks all-reduce together."""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import oxmoe
from load.common import Failed, Memory, Row, Wrong, checksum
from load.layers import HOST_SLACK, need_gpu
from oxmoe import AllReduceFusionPattern as Pattern
from oxmoe import _oxmoe
from oxmoe.allreduce.fusion import _Operands
from oxmoe.tools.bench import layers
from oxmoe.tools.bench.backend import Oxmoe
from oxmoe.tools.bench.layers import Shape


class Rank:
    """The argument of a function that runs on every rank: the rank, and its groups."""

    def __init__(self, rank: int, world: int, folder: str, device: str) -> None:
        torch.set_num_threads(1)
        self.rank, self.world, self.device = rank, world, device
        # The store is a file, because a store in a rank would end with that rank.
        store = dist.FileStore(os.path.join(folder, "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        if device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())

    def workspace(self, tokens: int, hidden: int, dtype: torch.dtype, deadline: float = 30.0) -> Any:
        return oxmoe.create_allreduce_fusion_workspace(
            max_token_num=tokens,
            hidden_dim=hidden,
            dtype=dtype,
            group=dist.group.WORLD,
            device=self.device,
            deadline=deadline,
            force_oneshot_support=self.device == "cuda",
        )

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _work(pipe: Any, function: Callable[..., Row], rank: int, world: int, folder: str, device: str, args: Any) -> None:
    # gloo uses the loopback interface, whatever the machine's name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["RAYON_NUM_THREADS"] = "1"
    try:
        pipe.send((None, function(Rank(rank, world, folder, device), *args)))
    except Exception as error:
        pipe.send((f"{type(error).__name__}: {error}; {traceback.format_exc(limit=-2)}", None))
    os._exit(0)


class Group:
    """Processes that each run a function as a rank of a group."""

    def __init__(self, function: Callable[..., Row], world: int, device: str, *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "oxmoe"])
        self._folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            given = (theirs, function, rank, world, self._folder.name, device, args)
            process = context.Process(target=_work, args=given, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def result(self, rank: int, end: float) -> Row:
        """Returns what the function returned on this rank. Raises Failed if it raised, hangs at `end` (time.monotonic)
        or is gone."""
        pipe = self.pipes[rank]
        if not pipe.poll(max(end - time.monotonic(), 0.0)):
            raise Failed(f"rank {rank} hangs")
        try:
            failure, row = pipe.recv()
        except EOFError:
            self.processes[rank].join(5)
            raise Failed(f"rank {rank} ended with {self.processes[rank].exitcode}") from None
        if failure is not None:
            raise Failed(f"rank {rank}: {failure}")
        return row

    def close(self) -> None:
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
        for pipe in self.pipes:
            pipe.close()
        self._folder.cleanup()


def on_every_rank(function: Callable[..., Row], device: str, limit_s: float, *args: Any, world: int = 2) -> list[Row]:
    """Returns the results of all ranks."""
    group, end = Group(function, world, device, *args), time.monotonic() + limit_s
    try:
        return [group.result(rank, end) for rank in range(world)]
    finally:
        group.close()


# Random calls

PATTERNS = (
    Pattern.kAllReduce,
    Pattern.kARResidualRMSNorm,
    Pattern.kARResidualRMSNormFP8Quant,
    Pattern.kARResidualRMSNormOutDynamicFP8Quant,
)
HIDDEN = (64, 704, 1408, 2880, 4096, 7168, 8192)
MOST_TOKENS = 128
POISON = -0x5A5A5A5B  # 0xA5 in every byte


class Call:
    """One all-reduce with fixed inputs. Its outputs lie in one buffer beside each other, as the expected bits do."""

    def __init__(self, rank: int, world: int, rng: random.Random, tokens: int, hidden: int, device: str) -> None:
        self.pattern, dtype = rng.choice(PATTERNS), torch.bfloat16
        self.one_shot = rng.choice((None, True, False))
        draw = torch.Generator().manual_seed(rng.getrandbits(32))
        parts = [torch.randn(tokens, hidden, generator=draw).to(dtype) for _ in range(world)]
        residual, gamma = (torch.randn(*size, generator=draw).to(dtype) for size in ((tokens, hidden), (hidden,)))
        inputs: dict[str, Any] = {}
        if self.pattern != Pattern.kAllReduce:
            inputs = {"residual_in": residual, "rms_gamma": gamma}
        if self.pattern == Pattern.kARResidualRMSNormFP8Quant:
            inputs["scale_factor"] = 0.037
        self.expected, on_cpu = self._outputs(tokens, hidden, "cpu")
        defaults: dict[str, Any] = dict.fromkeys(_Operands.__dataclass_fields__) | {"rms_eps": 1e-6, "weight_bias": 0.0}
        operands = _Operands(**defaults | {"input": parts[0], "pattern": int(self.pattern)} | inputs | on_cpu)
        _oxmoe.allreduce_finish(operands, parts)
        self.expected = self.expected.to(device)
        self.got, outputs = self._outputs(tokens, hidden, device)
        moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        self.x, self.options = parts[rank].to(device), {**moved, **outputs, "use_oneshot": self.one_shot}

    def _outputs(self, tokens: int, hidden: int, device: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the buffer and the outputs in it, at multiples of 256 bytes."""
        sizes: dict[str, tuple[tuple[int, int], torch.dtype]] = {"output": ((tokens, hidden), torch.bfloat16)}
        if self.pattern != Pattern.kAllReduce:
            sizes = {"residual_out": sizes["output"]}
            if self.pattern != Pattern.kARResidualRMSNormFP8Quant:
                sizes["norm_out"] = sizes["residual_out"]
            if self.pattern != Pattern.kARResidualRMSNorm:
                sizes["quant_out"] = ((tokens, hidden), torch.float8_e4m3fn)
            if self.pattern == Pattern.kARResidualRMSNormOutDynamicFP8Quant:
                sizes["scale_out"] = ((tokens, 1), torch.float32)
        places, offset = {}, 0
        for name, (size, dtype) in sizes.items():
            count = size[0] * size[1] * dtype.itemsize
            places[name] = (offset, count)
            offset += -(-count // 256) * 256
        buffer = torch.full((offset // 4,), POISON, dtype=torch.int32, device=device).view(torch.uint8)
        views = {}
        for name, (at, count) in places.items():
            size, dtype = sizes[name]
            views[name] = buffer[at : at + count].view(dtype).view(size)
        return buffer.view(torch.int32), views

    def run(self, workspace: Any, wrong: Wrong) -> None:
        self.got.fill_(POISON)
        oxmoe.allreduce_fusion(self.x, workspace, self.pattern, **self.options)
        wrong.compare(self.got, self.expected)


def _random_calls(me: Rank, calls: int, kinds: int, seed: int) -> Row:
    rng = random.Random(seed)
    most = (MOST_TOKENS, max(HIDDEN)) if me.device == "cuda" else (16, 1408)
    sizes = [hidden for hidden in HIDDEN if hidden <= most[1]]
    drawn = []
    for number in range(kinds):
        tokens = 0 if number == 0 else int(most[0] ** rng.random())
        drawn.append(Call(me.rank, me.world, rng, tokens, rng.choice(sizes), me.device))
    space = me.workspace(*most, torch.bfloat16)
    wrong = Wrong(me.device, max(call.got.numel() for call in drawn) + 1)
    for call in drawn:
        call.run(space, wrong)
    me.wait()
    memory = Memory(me.device, HOST_SLACK)
    memory.begin()
    started = time.monotonic()
    for number in range(len(drawn), calls):
        drawn[rng.randrange(kinds)].run(space, wrong)
        if number % 50_000 == 0:
            me.wait()
            space.check()
            memory.look()
    me.wait()
    space.check()
    seconds = time.monotonic() - started
    memory.look()
    fields = memory.fields()
    space.destroy()
    return {"wrong": wrong.read(), "calls_s": round(seconds, 1), **fields}


def _of_all(rows: list[Row], **fields: Any) -> Row:
    """Returns one row: rank 0's row, with all ranks' wrong values."""
    return {**rows[0], "wrong": sum(row["wrong"] for row in rows), "ranks": len(rows), **fields}


def allreduce(device: str, calls: int, seed: int, limit_s: float, ranks: int = 2) -> Row:
    """Makes calls of random shapes, patterns and kernels in a row, and waits for none. Every output is compared with
    the CPU backend's bits."""
    kinds = 256 if device == "cuda" else 32
    if device == "cuda":
        need_gpu(device, ranks)
    rows = on_every_rank(_random_calls, device, limit_s, calls, kinds, seed, world=ranks)
    return _of_all(rows, calls=calls, kinds=kinds, patterns=len(PATTERNS))


# Replays


def _replays(me: Rank, replays: int, seed: int) -> Row:
    """Replays layers of all ranks, with an all-reduce, residual and norm after each layer."""
    rng, shape, depth, variants = random.Random(seed), Shape(16, 4, 1024, 256), 2, 16
    torch.manual_seed(seed + me.rank)
    weights = [Oxmoe(shape, layers.weights_of(name, shape, "cuda", 1)).experts[0] for name in ("bf16", "fp8_block")]
    gamma = torch.ones(shape.hidden, dtype=torch.bfloat16, device="cuda")
    space = me.workspace(64, shape.hidden, torch.bfloat16)
    wrong, graphs = Wrong("cuda", 2 * 64 * shape.hidden), []
    for tokens in (1, 2, 8, 64):
        draw = torch.Generator().manual_seed(seed + tokens)
        xs = [torch.randn(tokens, shape.hidden, generator=draw).bfloat16().cuda() for _ in range(variants)]
        logits = [torch.randn(tokens, shape.experts, generator=draw).cuda() for _ in range(variants)]
        x, chosen = xs[0].clone(), logits[0].clone()
        outs = torch.empty(2, tokens, shape.hidden, dtype=torch.bfloat16, device="cuda")

        def chain(x: Tensor, chosen: Tensor, outs: Tensor, tokens: int) -> None:
            hidden, residual = x, x
            for index in range(depth):
                part = oxmoe.moe(hidden, weights[index], router_logits=chosen, top_k=shape.top_k)
                last = index == depth - 1
                residual_out = outs[1] if last else torch.empty_like(x)
                norm_out = outs[0] if last else torch.empty_like(x)
                oxmoe.allreduce_fusion(
                    part, space, 1, residual_in=residual, rms_gamma=gamma, residual_out=residual_out, norm_out=norm_out
                )
                hidden, residual = norm_out, residual_out

        expected = []
        for variant in range(variants):
            chain(xs[variant], logits[variant], outs, tokens)
            torch.cuda.synchronize()
            expected.append(outs.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain(x, chosen, outs, tokens)
        graphs.append((graph, x, chosen, outs, xs, logits, expected))
    memory = Memory("cuda", HOST_SLACK)
    begun = 0.0
    for number in range(replays):
        if number == 200:
            memory.begin()
            begun = time.monotonic()
        graph, x, chosen, outs, xs, logits, expected = graphs[rng.randrange(len(graphs))]
        variant = rng.randrange(variants)
        x.copy_(xs[variant])
        chosen.copy_(logits[variant])
        outs.fill_(torch.nan)
        graph.replay()
        wrong.compare(outs, expected[variant])
        if number % 10_000 == 9_999:
            torch.cuda.synchronize()
            space.check()
            memory.look()
    torch.cuda.synchronize()
    space.check()
    seconds = time.monotonic() - begun
    memory.look()
    fields = memory.fields()
    space.destroy()
    bits = checksum(expected for graph in graphs for expected in graph[-1])
    return {"wrong": wrong.read(), "bits": bits, "replays_s": round(seconds, 1), "graphs": len(graphs), **fields}


def replays(device: str, replays: int, seed: int, limit_s: float, ranks: int = 2) -> Row:
    """Replays random graphs of MoE layers and all-reduces, with another input and routing in each replay."""
    need_gpu(device, ranks)
    if replays < 1000:
        raise Failed(f"--replays: expected at least 1000, got {replays}")
    rows = on_every_rank(_replays, device, limit_s, replays, seed, world=ranks)
    if len({row["bits"] for row in rows}) > 1:
        raise Failed("the ranks' results differ")
    return _of_all(rows, replays=replays)


# Workspaces that are made and destroyed


def _cycles(me: Rank, count: int) -> Row:
    wrong, memory = Wrong(me.device, 8 * 1408), Memory(me.device, HOST_SLACK)
    expected = torch.full((8, 1408), float(me.world), dtype=torch.bfloat16, device=me.device)
    out = torch.empty_like(expected)
    x = torch.ones_like(expected)
    warm = max(2, count // 10)
    for number in range(count):
        space = me.workspace(8, 1408, torch.bfloat16)
        oxmoe.allreduce_fusion(x, space, 0, output=out.fill_(torch.nan))
        wrong.compare(out, expected)
        me.wait()
        space.destroy()
        del space
        if number == warm:
            memory.begin()
        elif number > warm and number % 50 == 0:
            memory.look()
    memory.look()
    return {"wrong": wrong.read(), **memory.fields()}


def cycles(device: str, count: int, limit_s: float, ranks: int = 2) -> Row:
    """Makes all-reduce workspaces, uses each once and destroys it. Memory, descriptors and threads stay."""
    if device == "cuda":
        need_gpu(device, ranks)
    rows = on_every_rank(_cycles, device, limit_s, count, world=ranks)
    return _of_all(rows, workspaces=count, calls=count)


SCENARIOS: dict[str, Callable[..., Row]] = {"allreduce": allreduce, "replays": replays, "cycles": cycles}
