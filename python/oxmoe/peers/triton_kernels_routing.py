"""triton_kernels' `routing`: top-k, sort by expert and block schedules, in its data classes and with its meanings."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oxmoe.functions import routing_tables, topk
from oxmoe.operands import WRONG_TYPES, check_tensor, name_argument
from oxmoe.tracing import HAS_TORCH

if HAS_TORCH:
    import torch
if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class GatherIndx:
    """Y = X[src_indx], and dst_indx inverts it: dst_indx[src_indx[i]] = i."""

    src_indx: Tensor
    dst_indx: Tensor


@dataclass
class ScatterIndx:
    """Y[dst_indx] = X, and src_indx inverts it: dst_indx[src_indx[i]] = i."""

    src_indx: Tensor
    dst_indx: Tensor


@dataclass
class RaggedTensorMetadata:
    """Rows sorted by expert, and the blocks of 16, 32, 64 and 128 rows that a grouped GEMM walks. int32 throughout.

    The properties are the names that older triton_kernels (`ExptData`) had for the same tables.
    """

    slice_sizes: Tensor  # [E]: rows of each expert
    slice_offs: Tensor  # [E + 1]: first row of each expert, then the number of rows
    block_offs_data: Tensor  # [4, E + 1]: first block of each expert, then the number of blocks
    block_schedule_data: Tensor  # [4, max_n_blocks]: block << 16 | expert, -1 after the last

    @property
    def n_slices(self) -> int:
        return self.slice_sizes.shape[0]

    @staticmethod
    def block_sizes() -> list[int]:
        return [16, 32, 64, 128]

    @staticmethod
    def max_n_blocks(n_slices: int, n_total_rows: int) -> int:
        """Returns the most blocks of the smallest size that n_total_rows rows can need, however they fall on
        n_slices experts."""
        if n_total_rows <= n_slices:
            return n_total_rows
        return n_slices - 1 - ((n_slices - n_total_rows - 1) // min(RaggedTensorMetadata.block_sizes()))

    def block_offs(self, block_size: int) -> Tensor:
        return self.block_offs_data[self.block_sizes().index(block_size)]

    def block_schedule(self, block_size: int) -> Tensor:
        return self.block_schedule_data[self.block_sizes().index(block_size)]

    @property
    def hist(self) -> Tensor:
        return self.slice_sizes

    @property
    def token_offs_raw(self) -> Tensor:
        return self.slice_offs

    @property
    def token_offs_pad(self) -> dict[int, Tensor]:
        return {size: self.block_offs(size) for size in self.block_sizes()}

    @property
    def block_pid_map(self) -> dict[int, Tensor]:
        return {size: self.block_schedule(size) for size in self.block_sizes()}


ExptData = RaggedTensorMetadata


@dataclass
class RoutingData:
    """Gate weights in expert order, rows of each expert, and the block tables."""

    gate_scal: Tensor  # [T k], dtype of the logits
    expt_hist: Tensor  # [E]
    n_expts_tot: int
    n_expts_act: int
    expt_data: RaggedTensorMetadata | None = None
    expected_tokens_per_expt: int | None = None

    def n_blocks(self, n_rows: int, block_m: int) -> int:
        """Returns the most blocks of block_m rows that n_rows rows can need, however they fall on the experts."""
        if n_rows <= self.n_expts_tot:
            return n_rows
        return -(-max(n_rows - self.n_expts_tot + 1, 0) // block_m) + self.n_expts_tot - 1


def _choose(
    logits: Tensor, top_k: int, sm_first: bool, expt_indx: Tensor | None, n_rows: Tensor | int | None
) -> tuple[Tensor, Tensor]:
    """Returns (weights fp32, ids int32) [T, k]. Ids are -1 in padding rows."""
    values = logits.softmax(-1) if sm_first else logits
    if isinstance(n_rows, int):
        n_rows = logits.new_full((), max(0, min(n_rows, logits.shape[0])), dtype=torch.int32)
    if expt_indx is None:
        return topk(
            values,
            top_k,
            scoring_func="identity" if sm_first else "softmax_topk",
            renormalize=False,
            num_token_non_padded=n_rows,
            order="id",
        )
    check_tensor("expt_indx", expt_indx)
    if expt_indx.shape != (logits.shape[0], top_k):
        raise ValueError(f'expt_indx: dimension 1 "n_expts_act": expected {top_k}, got shape {tuple(expt_indx.shape)}')
    if expt_indx.device != logits.device:
        raise ValueError(f"expt_indx: expected device {logits.device} (from logits), got {expt_indx.device}")
    # NOTE: on CUDA an id beyond the row would end the process's context.
    none = (expt_indx < 0) | (expt_indx >= logits.shape[1])
    weights = values.gather(1, expt_indx.long().masked_fill(none, 0)).float()
    weights = weights.masked_fill(none, 0 if sm_first else -torch.inf)
    ids = expt_indx.int().masked_fill(none, -1)
    if n_rows is not None:
        ids = ids.masked_fill(torch.arange(ids.shape[0], device=ids.device)[:, None] >= n_rows, -1)
    return (weights if sm_first else weights.softmax(-1).masked_fill(none, 0)), ids


def _first_rank(weights: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Keeps experts below num_experts. What a row keeps moves to its front, and the rest becomes -1."""
    gone = (ids < 0) | (ids >= num_experts)
    order = gone.int().argsort(dim=1, stable=True)
    return weights.gather(1, order), ids.masked_fill(gone, -1).gather(1, order)


def _as_tensor(name: str, array: Any) -> Any:
    """Returns the numpy array as a tensor. One that may not be written is copied, because torch warns of it."""
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def _as_numpy(value: Any) -> Any:
    """Returns the tables with numpy arrays in place of tensors."""
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _as_numpy(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return type(value)(**fields)
    return value


def routing(
    logits: Tensor,
    n_expts_act: int,
    sm_first: bool = False,
    expt_indx: Tensor | None = None,
    simulated_ep: int = 1,
    n_rows: Tensor | int | None = None,
) -> tuple[RoutingData, GatherIndx, ScatterIndx]:
    """Routes logits [T, E] (fp32, bf16 or f16) to n_expts_act experts a row.

    sm_first: softmax over all experts, rounded to the logits' dtype, then the choice; else the choice, then softmax
    over the chosen. A row's chosen experts are in the order of their ids. expt_indx [T, k]: experts that are given, not
    chosen; other numbers than 0 to E - 1 are no expert. simulated_ep: as on the first of that many expert-parallel
    ranks. n_rows: rows from this one on are padding. With numpy arrays the tables are numpy arrays, too.
    """
    try:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(logits, numpy.ndarray):
            given = {"logits": logits, "expt_indx": expt_indx, "n_rows": n_rows}
            arrays = {name: value for name, value in given.items() if isinstance(value, numpy.ndarray)}
            given |= {name: _as_tensor(name, array) for name, array in arrays.items()}
            made = routing(given["logits"], n_expts_act, sm_first, given["expt_indx"], simulated_ep, given["n_rows"])
            data, gather, scatter = map(_as_numpy, made)
            return data, gather, scatter
        check_tensor("logits", logits, "T", "E")
        experts = logits.shape[1]
        if simulated_ep < 1 or experts % simulated_ep:
            raise ValueError(f"simulated_ep: expected a divisor of {experts} experts, got {simulated_ep}")
        if not 1 <= n_expts_act <= experts:
            raise ValueError(f"n_expts_act: expected 1 to {experts} (from logits), got {n_expts_act}")
        weights, ids = _choose(logits, n_expts_act, sm_first, expt_indx, n_rows)
        experts //= simulated_ep
        if simulated_ep > 1:
            weights, ids = _first_rank(weights, ids, experts)
        gate_dtype: Any = str(logits.dtype).rpartition(".")[2]
        gate_scal, histogram, offsets, combine_indx, dispatch_indx, block_offs, block_schedule = routing_tables(
            weights.contiguous(), ids.contiguous(), experts, gate_dtype=gate_dtype
        )
        metadata = RaggedTensorMetadata(histogram, offsets, block_offs, block_schedule)
        data = RoutingData(gate_scal, histogram, experts, n_expts_act, metadata)
        return data, GatherIndx(combine_indx, dispatch_indx), ScatterIndx(dispatch_indx, combine_indx)
    except WRONG_TYPES as error:
        name_argument(error, routing, locals())
        raise
