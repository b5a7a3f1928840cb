"""Times allreduce_fusion between the GPUs of this host, one process each, beside NCCL + norm and flashinfer."""

from __future__ import annotations

import os
import socket
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import oxmoe

# (tokens, hidden): decode and prefill of GPT-OSS and DeepSeek.
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
CALLS = 20  # in one graph
REPLAYS = 9  # of which the median counts
SLEEP_CYCLES = 200_000  # long enough for the host to queue what follows
LINK = 366e9  # bytes a second and direction that stores reach between two H200s
Call = Callable[[], object]


class Clock:
    """Median time of a call in a CUDA graph, ranks in step."""

    def __init__(self, group: Any, space: Any) -> None:
        self.group, self.space = group, space
        self.step = torch.zeros(1, 64, dtype=torch.bfloat16, device="cuda")
        self.here = torch.zeros_like(self.step)

    def us(self, call: Call) -> float:
        """The slowest rank's."""
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
        graph.replay()
        times = []
        for _ in range(REPLAYS):
            torch.cuda.synchronize()
            dist.barrier(self.group)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(SLEEP_CYCLES)
            # Ranks leave this together.
            oxmoe.allreduce_fusion(self.step, self.space, 0, output=self.here)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / CALLS)
        mine = torch.tensor([statistics.median(times)])
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self.group)
        return float(mine)


def _flashinfer(nccl: Any, most: tuple[int, int]) -> Callable[..., Call]:
    """Its fused kernel, one-shot or two-shot as it chooses."""
    from flashinfer.comm import AllReduceFusionPattern, allreduce_fusion, create_allreduce_fusion_workspace

    space = create_allreduce_fusion_workspace(
        backend="trtllm",
        world_size=dist.get_world_size(nccl),
        rank=dist.get_rank(nccl),
        max_token_num=most[0],
        hidden_dim=most[1],
        dtype=torch.bfloat16,
        group=nccl,
    )

    def prepare(x: Tensor, residual: Tensor, gamma: Tensor, residual_out: Tensor, norm_out: Tensor) -> Call:
        return lambda: allreduce_fusion(
            input=x,
            workspace=space,
            pattern=AllReduceFusionPattern.kARResidualRMSNorm,
            launch_with_pdl=True,
            trigger_completion_at_end=True,
            residual_in=residual,
            residual_out=residual_out,
            norm_out=norm_out,
            rms_gamma=gamma,
            rms_eps=1e-6,
            fp32_acc=True,
        )

    return prepare


def _nccl(nccl: Any) -> Callable[..., Call]:
    """NCCL's all-reduce, then residual and norm in torch."""

    def prepare(x: Tensor, residual: Tensor, gamma: Tensor, residual_out: Tensor, norm_out: Tensor) -> Call:
        total = x.clone()

        def call() -> None:
            total.copy_(x)
            dist.all_reduce(total, group=nccl)
            torch.add(total, residual, out=residual_out)
            norm_out.copy_(torch.nn.functional.rms_norm(residual_out, (x.shape[1],), gamma, 1e-6))

        return call

    return prepare


def _rank(rank: int, world: int, port: int, shapes: list[tuple[int, int]], peers: bool) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Everybody here does without multicast.
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if peers else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    group = dist.new_group(backend="gloo")
    rows = max(tokens * hidden for tokens, hidden in shapes)
    dtype = torch.bfloat16
    space = oxmoe.create_allreduce_fusion_workspace(
        max_token_num=-(-rows // 64), hidden_dim=64, dtype=dtype, group=group, device="cuda"
    )
    clock = Clock(group, space)
    others: dict[str, Callable[..., Call]] = {}
    if peers:
        others["NCCL + norm"] = _nccl(dist.group.WORLD)
        try:
            most = max(tokens for tokens, _ in shapes), max(hidden for _, hidden in shapes)
            others["flashinfer"] = _flashinfer(dist.group.WORLD, most)
        except Exception as error:  # a peer is foreign code: whatever it raises is a reason to go on without it
            if rank == 0:
                print(f"flashinfer: {type(error).__name__}: {error}")
    if rank == 0:
        print(f"{world} x {torch.cuda.get_device_name()}, bf16, us a call in a CUDA graph, slowest rank")
        print("| tokens x hidden | KB | link | all-reduce | + residual + norm | " + " | ".join(others) + " |")
        print("|---" * (5 + len(others)) + "|")
    for tokens, hidden in shapes:
        torch.manual_seed(rank)
        x, residual = (torch.randn(tokens, hidden, device="cuda", dtype=dtype) for _ in range(2))
        gamma = torch.rand(hidden, device="cuda", dtype=dtype)
        outs = torch.empty_like(x), torch.empty_like(x)
        fused = {"residual_in": residual, "rms_gamma": gamma, "residual_out": outs[0], "norm_out": outs[1]}
        alone = clock.us(lambda x=x, out=outs[0]: oxmoe.allreduce_fusion(x, space, 0, output=out))  # type: ignore[misc]
        ours = clock.us(lambda x=x, fused=fused: oxmoe.allreduce_fusion(x, space, 1, **fused))  # type: ignore[misc]
        space.check()
        theirs = []
        for name, prepare in others.items():
            try:
                theirs.append(f"{clock.us(prepare(x, residual, gamma, *outs)):.2f}")
            except Exception as error:
                theirs.append(type(error).__name__)
                if rank == 0:
                    print(f"{name}: {error}")
        link = 2 * (world - 1) / world * x.nbytes / LINK * 1e6
        if rank == 0:
            cells = [f"{tokens} x {hidden}", f"{x.nbytes >> 10}", f"{link:.1f}", f"{alone:.2f}", f"{ours:.2f}", *theirs]
            print("| " + " | ".join(cells) + " |", flush=True)
    space.destroy()
    dist.destroy_process_group()


def run(world: int, tokens: list[int] | None, peers: bool) -> int:
    """Prints a table; tokens: only shapes with these. Where `peers`, those that are installed run too."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if world not in (2, 4, 8) or there < world:
        raise SystemExit(f"bench: --allreduce: expected 2, 4 or 8 of {there} GPUs, got {world}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shapes = [shape for shape in SHAPES if tokens is None or shape[0] in tokens]
    if not shapes:
        raise SystemExit(f"bench: --tokens: none of {sorted({shape[0] for shape in SHAPES})}")
    torch.multiprocessing.spawn(_rank, (world, port, shapes, peers), nprocs=world)  # type: ignore[no-untyped-call]
    return 0
