"""Allocates a layer's output in NCCL's symmetric memory (--enable-symm-mem), so that the all-reduce after it is the
fast one.

SGLang's own runners allocate the sum over experts under the same conditions. The module imports nothing of SGLang
before a call.
"""

from __future__ import annotations

import importlib
import sys

import torch
from torch import Tensor

_ALLOCATOR = "sglang.srt.distributed.device_communicators.pynccl_allocator"


def output_like(x: Tensor) -> Tensor | None:
    """Returns an output for tokens x in the pool of the tensor-parallel group, or None if SGLang would not allocate
    it there.

    SGLang does not do so without --enable-symm-mem, with one rank, and while ranks of DP attention have different
    numbers of tokens.
    """
    # SGLang's layers have imported the allocator, if it is in use.
    allocator = sys.modules.get(_ALLOCATOR)
    if allocator is None or not allocator.is_symmetric_memory_enabled():
        return None
    wanted = importlib.import_module("sglang.srt.layers.dp_attention").is_allocation_symmetric()
    if not wanted:
        return None
    # Older releases have no such context, or a context without groups.
    parallel = getattr(sys.modules.get("sglang.srt.runtime_context"), "get_parallel", None)
    group = parallel().tp_group if parallel else importlib.import_module("sglang.srt.distributed").get_tp_group()
    if group.world_size == 1:
        return None
    with allocator.use_symmetric_memory(group):
        return torch.empty_like(x)
