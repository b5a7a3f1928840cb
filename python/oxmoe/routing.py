"""triton_kernels' `routing`: top-k, sort by expert and block schedules, in its data classes and with its meanings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from oxmoe.dispatch import routing_tables

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
    block_offs_data: Tensor  # [4, E + 1]: the same in blocks
    block_schedule_data: Tensor  # [4, max_n_blocks]: block << 16 | expert, -1 after the last

    @property
    def n_slices(self) -> int:
        return self.slice_sizes.shape[0]

    @staticmethod
    def block_sizes() -> list[int]:
        return [16, 32, 64, 128]

    @staticmethod
    def max_n_blocks(n_slices: int, n_total_rows: int) -> int:
        """Blocks of the smallest size that n_total_rows rows can need, however they fall on n_slices experts."""
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
        """Blocks of block_m rows that n_rows rows can need, however they fall on the experts."""
        if n_rows <= self.n_expts_tot:
            return n_rows
        return -(-max(n_rows - self.n_expts_tot + 1, 0) // block_m) + self.n_expts_tot - 1


def routing(
    logits: Tensor,
    n_expts_act: int,
    sm_first: bool = False,
    expt_indx: Tensor | None = None,
    simulated_ep: int = 1,
    n_rows: Tensor | int | None = None,
) -> tuple[RoutingData, GatherIndx, ScatterIndx]:
    """Routes logits [T, E] to n_expts_act experts a row.

    sm_first: softmax over all experts, then the choice; else the choice, then softmax over the chosen.
    expt_indx [T, k]: experts that are given, not chosen. simulated_ep: as on the first of that many expert-parallel
    ranks. n_rows: rows from this one on are padding.
    """
    gate_scal, histogram, offsets, combine_indx, dispatch_indx, block_offs, block_schedule = routing_tables(
        logits, n_expts_act, sm_first=sm_first, expt_indx=expt_indx, simulated_ep=simulated_ep, n_rows=n_rows
    )
    metadata = RaggedTensorMetadata(histogram, offsets, block_offs, block_schedule)
    data = RoutingData(gate_scal, histogram, logits.shape[1] // simulated_ep, n_expts_act, metadata)
    return data, GatherIndx(combine_indx, dispatch_indx), ScatterIndx(dispatch_indx, combine_indx)
