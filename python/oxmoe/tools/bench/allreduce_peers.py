"""The peers that `python -m oxmoe bench --allreduce` runs beside allreduce_fusion. None of them uses NVLink
multicast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oxmoe.allreduce import takes

Call = Callable[[], object]
# A norm after the sum over ranks. It takes (x, residual, gamma, residual_out, norm_out).
Norm = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]

# Settings in the environment of every rank, before torch.distributed starts.
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def _torch_norm(total: Tensor, residual: Tensor, gamma: Tensor, residual_out: Tensor, norm_out: Tensor) -> None:
    torch.add(total, residual, out=residual_out)
    norm_out.copy_(torch.nn.functional.rms_norm(residual_out, (gamma.numel(),), gamma, 1e-6))


@functools.cache
def _fused_norm(device: str = "cuda") -> tuple[str, Norm]:
    """Returns the fused residual add and RMSNorm of a package whose norm runs here, or torch's. A package's norm works
    in place."""
    for package in ("sgl_kernel", "flashinfer"):
        try:
            fused = import_module(package).fused_add_rmsnorm
            row = torch.ones(1, 1024, dtype=torch.bfloat16, device=device)
            # The first call can fail: flashinfer compiles its norm then, and sgl_kernel calls flashinfer's if it can.
            fused(row, row.clone(), row[0].clone(), 1e-6)
        except Exception as error:  # a package is foreign code: whatever it raises is a reason to take the next one
            if not isinstance(error, ImportError) and (not dist.is_initialized() or dist.get_rank() == 0):
                print(f"skipped {package}'s norm: {type(error).__name__}: {str(error)[:200]}")
            continue

        def norm(
            total: Tensor, residual: Tensor, gamma: Tensor, residual_out: Tensor, norm_out: Tensor, fused: Any = fused
        ) -> None:
            fused(total, residual_out, gamma, 1e-6)

        return f"{package} norm", norm
    return "torch norm", _torch_norm


class Peer:
    """An all-reduce of a process group. A norm follows it if it has none of its own."""

    name = ""

    def __init__(self, group: Any, cpu_group: Any, most: tuple[int, int]) -> None:
        """most: tokens and hidden size that the workspace must hold."""
        self.group = group
        self.norm_name, self.norm = _fused_norm()

    @property
    def label(self) -> str:
        return f"{self.name} + {self.norm_name}"

    def capturing(self) -> AbstractContextManager[Any]:
        """Returns a context that the capture of a graph runs in."""
        return nullcontext()

    def close(self) -> None:
        """Releases the peer's memory, while the process group still exists."""

    def prepare(self, x: Tensor, residual: Tensor, gamma: Tensor, residual_out: Tensor, norm_out: Tensor) -> Call:
        reduce = self.reduction(x)

        def call() -> None:
            self.norm(reduce(), residual, gamma, residual_out, norm_out)

        return call

    def reduction(self, x: Tensor) -> Callable[[], Tensor]:
        raise NotImplementedError


class Nccl(Peer):
    name = "NCCL"

    def reduction(self, x: Tensor) -> Callable[[], Tensor]:
        total = x.clone()

        def reduce() -> Tensor:
            dist.all_reduce(total, group=self.group)
            return total

        return reduce


class _Symmetric(Peer):
    """An all-reduce in torch's symmetric memory; the time assumes that x already lies there."""

    def reduction(self, x: Tensor) -> Callable[[], Tensor]:
        import torch.distributed._symmetric_memory as symmetric

        total = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
        symmetric.rendezvous(total, self.group.group_name)
        total.copy_(x)
        return lambda: self.sum(total)

    def sum(self, total: Tensor) -> Tensor:
        raise NotImplementedError


class SymmetricOneShot(_Symmetric):
    name = "torch symm one-shot"

    def sum(self, total: Tensor) -> Tensor:
        return torch.ops.symm_mem.one_shot_all_reduce(total, "sum", self.group.group_name)


class SymmetricTwoShot(_Symmetric):
    name = "torch symm two-shot"

    def sum(self, total: Tensor) -> Tensor:
        return torch.ops.symm_mem.two_shot_all_reduce_(total, "sum", self.group.group_name)


class SGLang(Peer):
    """SGLang's custom all-reduce; it exports allocations, so torch must not use expandable segments."""

    name = "SGLang custom"

    def __init__(self, group: Any, cpu_group: Any, most: tuple[int, int]) -> None:
        super().__init__(group, cpu_group, most)
        module = import_module("sglang.srt.distributed.device_communicators.custom_all_reduce")
        self.reducer = module.CustomAllreduce(cpu_group, torch.cuda.current_device())
        if self.reducer.disabled:
            raise RuntimeError("it is disabled for this group")

    def close(self) -> None:
        self.reducer.close()

    def capturing(self) -> AbstractContextManager[Any]:
        return self.reducer.capture()

    def reduction(self, x: Tensor) -> Callable[[], Tensor]:
        if not self.reducer.should_custom_ar(x):
            raise RuntimeError("too large for it")
        return lambda: self.reducer.custom_all_reduce(x)


class FlashInfer(Peer):
    """flashinfer's fused kernel, one-shot or two-shot as flashinfer chooses, with fp32 sums."""

    name = "flashinfer"
    oneshot: bool | None = None

    def __init__(self, group: Any, cpu_group: Any, most: tuple[int, int]) -> None:
        self.comm = import_module("flashinfer.comm")
        self.space = self.comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=dist.get_world_size(group),
            rank=dist.get_rank(group),
            max_token_num=most[0],
            hidden_dim=most[1],
            dtype=torch.bfloat16,
            group=group,
        )

    @property
    def label(self) -> str:
        return self.name

    def prepare(self, x: Tensor, residual: Tensor, gamma: Tensor, residual_out: Tensor, norm_out: Tensor) -> Call:
        if self.oneshot is False and x.shape[0] <= self.space.world_size:
            raise RuntimeError("its two-shot kernel needs more tokens than ranks")
        # Older versions lack some of these options.
        options = {"launch_with_pdl": True, "trigger_completion_at_end": True, "fp32_acc": True}
        options |= {} if self.oneshot is None else {"use_oneshot": self.oneshot}
        options = {name: value for name, value in options.items() if takes(self.comm.allreduce_fusion, name)}
        return lambda: self.comm.allreduce_fusion(
            input=x,
            workspace=self.space,
            pattern=self.comm.AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=residual,
            residual_out=residual_out,
            norm_out=norm_out,
            rms_gamma=gamma,
            rms_eps=1e-6,
            **options,
        )


class FlashInferOneShot(FlashInfer):
    name = "flashinfer one-shot"
    oneshot = True


class FlashInferTwoShot(FlashInfer):
    name = "flashinfer two-shot"
    oneshot = False


PEERS: dict[str, type[Peer]] = {
    "nccl": Nccl,
    "symm-one-shot": SymmetricOneShot,
    "symm-two-shot": SymmetricTwoShot,
    "sglang-custom": SGLang,
    "flashinfer": FlashInfer,
    "flashinfer-one-shot": FlashInferOneShot,
    "flashinfer-two-shot": FlashInferTwoShot,
}
