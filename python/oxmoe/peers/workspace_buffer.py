"""The `workspace_buffer` of flashinfer's calls as the workspace of `moe`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oxmoe._oxmoe import ExpertWeights, workspace_bytes
from oxmoe.peers.flashinfer_cutlass_formats import name_of

if TYPE_CHECKING:
    from torch import Tensor

# Alignment in bytes of flashinfer's workspace_buffer, which `moe` also asks of a workspace.
_ALIGNMENT = 256


class WorkspaceError(ValueError, RuntimeError):
    """The error of a workspace_buffer that cannot be used. It is oxmoe's ValueError, and also the RuntimeError that
    flashinfer raises."""


def workspace_of(buffer: Tensor, input: Tensor) -> Tensor:
    """Returns the buffer in the form that `moe` takes. The error is in flashinfer's words if that is impossible."""
    import torch

    problem = None
    if not isinstance(buffer, torch.Tensor):
        raise WorkspaceError(f"workspace_buffer: expected a torch tensor, got {type(buffer).__name__}")
    if buffer.dtype not in (torch.int8, torch.uint8):
        problem = f"dtype must be int8 or uint8, got {name_of(buffer.dtype)}"
    elif input.is_cuda and not buffer.is_cuda:
        problem = f"must be a CUDA tensor, got {buffer.device}"
    elif buffer.device != input.device:
        problem = f"its device {buffer.device} does not match input device {input.device}"
    elif buffer.dim() != 1:
        problem = f"must be 1-D, got shape {list(buffer.shape)}"
    elif not buffer.is_contiguous():
        problem = f"must be contiguous, got stride {buffer.stride(0)}"
    elif buffer.data_ptr() % _ALIGNMENT:
        problem = f"must be aligned to {_ALIGNMENT} bytes, got address {buffer.data_ptr():#x}"
    if problem is not None:
        raise WorkspaceError(f"workspace_buffer: {problem}")
    return buffer.view(torch.uint8)


def with_workspace(call: Any, *operands: Any, workspace: Tensor | None, **options: Any) -> Tensor:
    """Runs `call`, and turns its error about the workspace into one about the workspace_buffer."""
    try:
        result: Tensor = call(*operands, workspace=workspace, **options)
    except ValueError as error:
        if workspace is None or not str(error).startswith("workspace: "):
            raise
        raise WorkspaceError(f"workspace_buffer too small or not apart: {error}") from error
    return result


def if_it_fits(buffer: Tensor | None, x: Tensor, weights: ExpertWeights, top_k: int) -> Tensor | None:
    """Returns the workspace for `moe`, or None for a buffer that is too small for x: trtllm's calls then allocate."""
    if buffer is None:
        return None
    workspace = workspace_of(buffer, x)
    return workspace if workspace.numel() >= workspace_bytes(weights, x.shape[0], top_k) else None
