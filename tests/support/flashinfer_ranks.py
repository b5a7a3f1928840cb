"""Runs flashinfer's all-reduce and oxmoe's on the same tensors, each rank a process: usage: RANK WORLD PORT FOLDER.

Rank 0 writes what both made of each case, and what they were given, to FOLDER/made.pt.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CASES = [
    (tokens, hidden, dtype) for tokens, hidden in ((1, 2880), (16, 7168), (300, 4096)) for dtype in ("bf16", "f16")
]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
EPS, SCALE = 1e-5, 0.25
Made = dict[str, torch.Tensor]


def both(world: int, folder: Path, seed: int) -> list[dict[str, Any]]:
    """Runs a process for each rank. Returns for each case its inputs, and `ours` and `theirs`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # flashinfer's workspace is torch's symmetric memory, which would use multicast.
    env = os.environ | {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    commands = [
        [sys.executable, __file__, str(rank), str(world), port, str(folder), str(seed)] for rank in range(world)
    ]
    logs = [(folder / f"rank{rank}.log").open("w") for rank in range(world)]
    ranks = [subprocess.Popen(c, env=env, stdout=log, stderr=log) for c, log in zip(commands, logs, strict=True)]
    codes = [rank.wait(timeout=600) for rank in ranks]
    for log in logs:
        log.close()
    assert codes == [0] * world, (folder / "rank0.log").read_text()[-4000:]
    cases: list[dict[str, Any]] = torch.load(folder / "made.pt", weights_only=True)
    return cases


def call(
    function: Any, workspace: Any, pattern: Any, x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor
) -> Made:
    """Returns outputs of the plain sum, of the norm, and of the norm as e4m3 with one scale."""
    outs = {name: torch.empty_like(x) for name in ("sum", "residual", "norm", "residual8")}
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    function(input=x.clone(), workspace=workspace, pattern=pattern.kAllReduce, output=outs["sum"])
    of_norm = {"residual_in": residual, "rms_gamma": gamma, "rms_eps": EPS}
    function(
        input=x.clone(), workspace=workspace, pattern=pattern.kARResidualRMSNorm, residual_out=outs["residual"],
        norm_out=outs["norm"], fp32_acc=True, **of_norm,
    )  # fmt: skip
    function(
        input=x.clone(), workspace=workspace, pattern=pattern.kARResidualRMSNormFP8Quant, fp32_acc=True,
        residual_out=outs["residual8"], quant_out=codes, scale_factor=torch.tensor([SCALE], device=x.device), **of_norm,
    )  # fmt: skip
    torch.cuda.synchronize()
    return {**{name: tensor.cpu() for name, tensor in outs.items()}, "codes": codes.float().cpu()}


def main(rank: int, world: int, port: str, folder: Path, seed: int) -> None:
    ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    import flashinfer.comm as comm
    from flashinfer.comm.mnnvl import TorchDistBackend

    import oxmoe

    made = []
    for tokens, hidden, name in CASES:
        dtype, rng = DTYPES[name], torch.Generator().manual_seed(seed + tokens)
        parts = torch.randn(world, tokens, hidden, generator=rng).to(dtype)
        residual, gamma = (
            torch.randn(tokens, hidden, generator=rng).to(dtype),
            torch.rand(hidden, generator=rng).to(dtype),
        )
        operands = [tensor.cuda() for tensor in (parts[rank], residual, gamma)]
        of_case: dict[str, Any] = {"parts": parts, "residual_in": residual, "gamma": gamma}
        for who, package in (("theirs", comm), ("ours", oxmoe)):
            options = {"world_size": world, "rank": rank, "max_token_num": tokens, "hidden_dim": hidden, "dtype": dtype}
            options["comm_backend"] = TorchDistBackend()
            workspace = package.create_allreduce_fusion_workspace(backend="trtllm", **options)
            of_case[who] = call(package.allreduce_fusion, workspace, package.AllReduceFusionPattern, *operands)
            dist.barrier()
            workspace.destroy()
        made.append(of_case)
    if rank == 0:
        torch.save(made, folder / "made.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
