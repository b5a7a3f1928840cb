"""The layer on rows that lie expert by expert already, as DeepEP hands them over and DeepGEMM takes them."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from oxmoe import _oxmoe
from oxmoe.functions import moe
from oxmoe.functions import moe_contiguous as rows_in_order
from oxmoe.functions import moe_masked as masked_rows
from oxmoe.operands import check_tensor
from oxmoe.tracing import HAS_TORCH, tracing

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["masked_workspace_bytes", "moe_contiguous", "moe_masked"]

masked_workspace_bytes = _oxmoe.masked_workspace_bytes


def _row_major(scale: Any, x: Any) -> Any:
    """Returns x's fp32 scales [..., columns / 128] in row-major order. `scale` has such scales in any order of
    memory, or DeepEP's packed powers of two: int32 [..., ceil(columns / 512)] of four E8M0 bytes each, the first
    group lowest."""
    if not HAS_TORCH:
        return scale
    import torch

    if not isinstance(scale, torch.Tensor):
        return scale
    check_tensor("x_scale", scale)
    if scale.dtype != torch.int32:
        return scale.contiguous()
    check_tensor("x", x)
    expected = (*x.shape[:-1], -(-x.shape[-1] // 512))
    if scale.shape != expected:
        raise ValueError(f"x_scale: expected int32 {list(expected)} of E8M0 bytes, got shape {list(scale.shape)}")
    if scale.stride(-1) != 1:
        # NOTE: contiguous() does not do here: if the last dimension is 1, torch takes column-major scales for
        # contiguous ones, but a view as bytes needs the stride 1.
        scale = scale.clone(memory_format=torch.contiguous_format)
    return scale.contiguous().view(torch.float8_e8m0fnu)[..., : x.shape[-1] // 128].float()


def moe_masked(
    x: Tensor,
    weights: _oxmoe.ExpertWeights,
    masked_m: Tensor,
    *,
    x_scale: Tensor | None = None,
    expected_m: int | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """out[e, i] = expert(e, x[e, i]) for i < masked_m[e], without routing and combine (DeepEP's low-latency layout).

    x [El, m, H] of weights.dtype, masked_m int32 [El] on the same device; out [El, m, H], new or given, may be x
    itself. Rows of x from masked_m[e] on are not read, and those of out not written; masked_m counts up to m. Time
    follows the rows that are there, the workspace (masked_workspace_bytes(weights, El m)) the room for them.

    fp8 experts also take x as float8_e4m3fn with x_scale, one number for each 128 columns of a row: fp32
    [El, m, H / 128] in any order of memory (DeepEP's is column-major), or int32 [El, m, ceil(H / 512)] of packed E8M0.
    nvfp4 experts with an input_global_scale take x as uint8 [El, m, H / 2] with x_scale float8_e4m3fn [El, m, H / 16].

    expected_m: rows that an expert is expected to have (DeepEP's expected_m); it chooses the kernels' tile and changes
    no bit. Default: m / 32, a full batch with 8 of 256 experts a token. Launches depend on shapes and expected_m only,
    so a CUDA graph can be replayed with other counts. Bits are those of `moe` with one expert a token.
    """
    if x_scale is not None:
        x_scale = _row_major(x_scale, x)
    return masked_rows(x, weights, masked_m, x_scale=x_scale, expected_m=expected_m, out=out, workspace=workspace)


def moe_contiguous(
    x: Tensor,
    weights: _oxmoe.ExpertWeights,
    counts: Tensor | None = None,
    *,
    m_indices: Tensor | None = None,
    alignment: int = 1,
    x_scale: Tensor | None = None,
    expected_m: int | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """out[i] = expert(i's expert, x[i]) of rows that are permuted already, without combine (DeepEP's normal layout,
    DeepGEMM's contiguous one). x [M, H]; the rest is as for moe_masked.

    counts int32 [El]: the first counts[0] rows are expert 0's, each next expert's begin at the next multiple of
    alignment; other rows of out are not written. Or m_indices int32 or int64 [M]: every row's expert, in any order;
    rows with -1 become 0, and workspace is that of `moe` with one expert a token.
    """
    if (counts is None) == (m_indices is None):
        raise ValueError("counts and m_indices: expected one of the two")
    if m_indices is not None and alignment != 1:
        raise ValueError(f"alignment: is an option of counts, but m_indices were given, got {alignment}")
    if x_scale is not None:
        x_scale = _row_major(x_scale, x)
    if m_indices is None:
        assert counts is not None
        return rows_in_order(
            x,
            weights,
            counts,
            alignment=alignment,
            x_scale=x_scale,
            expected_m=expected_m,
            out=out,
            workspace=workspace,
        )
    ones = _ones(m_indices, x)
    given: dict[str, Any] = {"x_scale": x_scale, "out": out, "workspace": workspace}
    if tracing():
        return moe(x, weights, ones, m_indices[:, None], **given)
    try:
        return moe(x, weights, ones, m_indices[:, None], **given)
    except ValueError as error:
        raise _renamed(error) from None


def _ones(m_indices: Any, x: Any) -> Any:
    """Checks m_indices, a torch tensor or a numpy array, and returns a weight of one for each of them."""
    numpy = sys.modules.get("numpy")
    of_numpy = numpy is not None and isinstance(m_indices, numpy.ndarray)
    if not of_numpy:
        check_tensor("m_indices", m_indices)
    if m_indices.ndim != 1:
        raise ValueError(f"m_indices: expected [M], got shape {tuple(m_indices.shape)}")
    name = str(m_indices.dtype).rpartition(".")[2]
    if name not in ("int32", "int64"):
        raise ValueError(f"m_indices: expected dtype int32 or int64, got {name}")
    rows = m_indices.shape[0]
    if getattr(x, "ndim", None) == 2 and rows != x.shape[0]:
        raise ValueError(f'm_indices: dimension 0 "M": expected {x.shape[0]} (from x), got {rows}')
    if of_numpy:
        return numpy.ones((rows, 1), dtype=numpy.float32)  # type: ignore[union-attr]
    import torch

    return torch.ones((rows, 1), dtype=torch.float32, device=m_indices.device)


def _renamed(error: ValueError) -> ValueError:
    """Returns an error of `moe` in the words of a call with m_indices, which are ids of one expert a token."""
    text = re.sub(r"^topk_ids: token (\d+), slot 0:", r"m_indices: row \1:", str(error))
    text = re.sub(r"; ids of other ranks' experts need .*$", "", text)
    return ValueError(re.sub(r"\btopk_(ids|weights)\b", "m_indices", text))
