"""The reference of every operation in plain torch: fp32 sums and the rounding points of the kernels, slow and obvious.

The tests use it on CPU and on GPU. Loops run over experts or slots; nothing here is tuned. `experts` has what experts
compute, `numbers` what the codes and scales of formats mean, `routing` what routing does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oxmoe import deprecation
from oxmoe.reference.experts import (
    activate,
    fp8_product,
    moe,
    nvfp4_expert,
    split_rows,
)
from oxmoe.reference.numbers import (
    e4m3_numbers,
    fp8_groups,
    fp8_rows,
    int4_weights,
    mxfp4_weights,
    mxfp4_window,
    mxfp8_groups,
    mxfp8_rows,
    mxfp8_weights,
    nvfp4,
    nvfp4_numbers,
    rows_e4m3,
)
from oxmoe.reference.routing import (
    BLOCK_SIZES,
    best,
    block_tables,
    choice_values,
    max_blocks,
    routing_tables,
    scores,
    sort_by_expert,
    topk,
)

if not TYPE_CHECKING:
    __getattr__ = deprecation.lookup(__name__)

__all__ = [
    "BLOCK_SIZES",
    "activate",
    "best",
    "block_tables",
    "choice_values",
    "e4m3_numbers",
    "fp8_groups",
    "fp8_product",
    "fp8_rows",
    "int4_weights",
    "max_blocks",
    "moe",
    "mxfp4_weights",
    "mxfp4_window",
    "mxfp8_groups",
    "mxfp8_rows",
    "mxfp8_weights",
    "nvfp4",
    "nvfp4_expert",
    "nvfp4_numbers",
    "routing_tables",
    "rows_e4m3",
    "scores",
    "sort_by_expert",
    "split_rows",
    "topk",
]
