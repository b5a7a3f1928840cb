"""Times allreduce_fusion between the GPUs of this host, one process for each, beside other all-reduces and a norm."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

import oxmoe
from oxmoe.tools.bench import report
from oxmoe.tools.bench.allreduce_peers import PEERS, WITHOUT_MULTICAST, Call, Peer
from oxmoe.tools.bench.machine import clocks
from oxmoe.tools.bench.timing import Times, fields
from oxmoe.tools.command import UsageError

# (tokens, hidden) of decode and prefill of GPT-OSS and DeepSeek.
SHAPES = (
    (1, 2880),
    (1, 7168),
    (8, 7168),
    (16, 8192),
    (64, 2880),
    (32, 7168),
    (64, 7168),
    (128, 7168),
    (512, 7168),
    (4096, 2880),
    (2048, 7168),
)
CALLS = 20  # calls in one graph
REPLAYS = 9  # replays, of which the median counts
SLEEP_CYCLES = 200_000  # long enough for the host to queue the launches that follow
LINK = 366e9  # bytes a second and direction that stores reach between two H200s


class Clock:
    """Times a call in a CUDA graph, with all ranks in step."""

    def __init__(self, group: Any, space: Any) -> None:
        self.group, self.space = group, space
        self.step = torch.zeros(1, 64, dtype=torch.bfloat16, device="cuda")
        self.here = torch.zeros_like(self.step)

    def us(self, call: Call, capturing: AbstractContextManager[Any] | None = None) -> Times:
        """Returns the times of the rank whose median is the longest. The clocks are this rank's GPU's."""
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capturing or nullcontext(), torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
        graph.replay()
        times = []
        for _ in range(REPLAYS):
            torch.cuda.synchronize()
            dist.barrier(self.group)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(SLEEP_CYCLES)
            # All ranks leave this all-reduce together.
            oxmoe.allreduce_fusion(self.step, self.space, 0, output=self.here)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / CALLS)
        now = clocks("cuda")
        everybody = [torch.empty(len(times), dtype=torch.float64) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everybody, torch.tensor(times, dtype=torch.float64), group=self.group)
        return slowest([others.tolist() for others in everybody], now)


def slowest(ranks: Sequence[Sequence[float]], now: dict[str, float | None] | None) -> Times:
    """Returns the times of the rank with the longest median."""
    return max((Times(times, now) for times in ranks), key=float)


def _line(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def _rank(
    rank: int,
    world: int,
    port: int,
    shapes: list[tuple[int, int]],
    peers: list[str],
    record: tuple[str | None, dict[str, Any]],
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= WITHOUT_MULTICAST
    torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if peers else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    group = dist.new_group(backend="gloo")
    rows = max(tokens * hidden for tokens, hidden in shapes)
    dtype = torch.bfloat16
    space = oxmoe.create_allreduce_fusion_workspace(
        max_token_num=-(-rows // 64), hidden_dim=64, dtype=dtype, group=group, device="cuda"
    )
    clock = Clock(group, space)
    most = max(tokens for tokens, _ in shapes), max(hidden for _, hidden in shapes)
    others: list[Peer] = []
    for name in peers:
        try:
            others.append(PEERS[name](dist.group.WORLD, group, most))
        except Exception as error:  # a peer is foreign code: whatever it raises is a reason to go on without it
            if rank == 0:
                print(f"skipped {name}: {type(error).__name__}: {str(error)[:200]}")
    path, environment = record
    if rank == 0:
        print(f"{world} x {torch.cuda.get_device_name()}, bf16, us a call in a CUDA graph, slowest rank")
        heads = ["tokens x hidden", "KB", "link", "all-reduce", "+ residual + norm", *(peer.label for peer in others)]
        _line(heads)
        _line(["---"] * len(heads))
    for tokens, hidden in shapes:
        torch.manual_seed(rank)
        x, residual = (torch.randn(tokens, hidden, device="cuda", dtype=dtype) for _ in range(2))
        gamma = torch.rand(hidden, device="cuda", dtype=dtype)
        outs = torch.empty_like(x), torch.empty_like(x)
        fused = {"residual_in": residual, "rms_gamma": gamma, "residual_out": outs[0], "norm_out": outs[1]}
        alone = clock.us(lambda x=x, out=outs[0]: oxmoe.allreduce_fusion(x, space, 0, output=out))  # type: ignore[misc]
        ours = clock.us(lambda x=x, fused=fused: oxmoe.allreduce_fusion(x, space, 1, **fused))  # type: ignore[misc]
        space.check()
        times = {"oxmoe": ours, "oxmoe all-reduce alone": alone}
        for peer in others:
            try:
                times[peer.label] = clock.us(peer.prepare(x, residual, gamma, *outs), peer.capturing())
            except Exception as error:
                if rank == 0:
                    print(f"skipped {peer.label} at {tokens} x {hidden}: {type(error).__name__}: {str(error)[:200]}")
        link = 2 * (world - 1) / world * x.nbytes / LINK * 1e6
        if rank == 0:
            shown = (times.get(peer.label) for peer in others)
            cells = [f"{tokens} x {hidden}", f"{x.nbytes >> 10}", f"{link:.1f}", f"{alone:.2f}", f"{ours:.2f}"]
            _line([*cells, *("" if us is None else f"{us:.2f}" for us in shown)])
            common = {"op": "allreduce", "ranks": world, "tokens": tokens, "hidden": hidden, "format": "bf16"}
            common |= {"link_us": link, "calls": CALLS, "replays": REPLAYS}
            lines = [{**common, "backend": name, **fields(us), **environment} for name, us in times.items()]
            report.append_json(path, lines)
    for peer in others:
        peer.close()
    space.destroy()
    dist.destroy_process_group()


def run(
    world: int, tokens: list[int] | None, peers: list[str], json_path: str | None, environment: dict[str, Any]
) -> int:
    """Prints a table and appends JSON lines. tokens: only shapes with these. Peers that do not start are left out."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if world not in (2, 4, 8) or there < world:
        raise UsageError(f"--allreduce: expected 2, 4 or 8, but no more than torch's {there} GPUs, got {world}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shapes = [shape for shape in SHAPES if tokens is None or shape[0] in tokens]
    if not shapes:
        raise UsageError(f"--tokens: none of {sorted({shape[0] for shape in SHAPES})}")
    arguments = (world, port, shapes, peers, (json_path, environment))
    torch.multiprocessing.spawn(_rank, arguments, nprocs=world)  # type: ignore[attr-defined, no-untyped-call]
    return 0
