"""flashinfer's functions that bring weights into the layouts of its trtllm-gen kernels, made anew for its tests: oxmoe
reads these layouts, and has no need to make them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

_LANES = 8


def shuffled_rows(rows: int, epilogue_tile_m: int) -> torch.Tensor:
    """Returns which row goes to each place: place 8 j + i of a block of B rows has row (B / 8) i + j. B is 32 if
    epilogue_tile_m is a multiple of 128, and else 16."""
    block = 32 if epilogue_tile_m % 128 == 0 else 16
    assert rows % block == 0, f"rows: expected a multiple of {block}, got {rows}"
    return torch.arange(rows, device="cpu").view(-1, _LANES, block // _LANES).transpose(1, 2).flatten()


def gated_rows(rows: int) -> torch.Tensor:
    """Returns which row goes to each place if the two halves alternate."""
    assert rows % 2 == 0, f"rows: expected two halves, got {rows}"
    return torch.arange(rows, device="cpu").view(2, -1).t().flatten()


def shuffle_matrix_a(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    return input_tensor[shuffled_rows(len(input_tensor), epilogue_tile_m).to(input_tensor.device)]


def shuffle_matrix_sf_a(input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16) -> torch.Tensor:
    from flashinfer_served import block_scale_interleave

    assert len(input_tensor) % 128 == 0, f"rows of scales: expected a multiple of 128, got {len(input_tensor)}"
    return block_scale_interleave(shuffle_matrix_a(input_tensor, epilogue_tile_m))


def reorder_rows_for_gated_act_gemm(x: torch.Tensor) -> torch.Tensor:
    return x[gated_rows(len(x)).to(x.device)]


def deinterleave_gated_rows(x: torch.Tensor, block: int) -> torch.Tensor:
    return x.unflatten(0, (-1, 2, block)).transpose(0, 1).flatten(0, 2)


def convert_to_block_layout(input_tensor: torch.Tensor, blockK: int) -> torch.Tensor:
    return torch.stack(input_tensor.split(blockK, dim=1))


def w3_w1_permute_indices(
    cache: dict[Hashable, torch.Tensor],
    weight: torch.Tensor,
    epilogue_tile_m: int,
    num_elts_per_sf: int | None = None,
    is_gated_act_gemm: bool = True,
) -> torch.Tensor:
    """The rows of w13 for indexing: the two halves alternate, and are shuffled then. The cache stays empty."""
    shuffled = shuffled_rows(len(weight), epilogue_tile_m)
    return (gated_rows(len(weight))[shuffled] if is_gated_act_gemm else shuffled).to(weight.device)


def w2_permute_indices(
    cache: dict[Hashable, torch.Tensor],
    weight: torch.Tensor,
    epilogue_tile_m: int,
    num_elts_per_sf: int | None = None,
    is_gated_act_gemm: bool | None = None,
) -> torch.Tensor:
    return shuffled_rows(len(weight), epilogue_tile_m).to(weight.device)


NAMES: dict[str, Any] = {
    "shuffle_matrix_a": shuffle_matrix_a,
    "shuffle_matrix_sf_a": shuffle_matrix_sf_a,
    "reorder_rows_for_gated_act_gemm": reorder_rows_for_gated_act_gemm,
    "deinterleave_gated_rows": deinterleave_gated_rows,
    "convert_to_block_layout": convert_to_block_layout,
    "_maybe_get_cached_w3_w1_permute_indices": w3_w1_permute_indices,
    "get_w2_permute_indices_with_cache": w2_permute_indices,
}
