"""Right calls of the public functions that are written in Python, for the fuzzer. See `fuzz_calls.py`.

Their own tests compare them with references. Here a call that was mutated must give what it gives for plain copies of
the operands: what lies in memory in another way, has another owner or stands in numpy's arrays is the same call.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import oxmoe
import public_calls
from fuzz_calls import Call, Operands, as_torch, same
from oxmoe.peers import (
    flashinfer_cutedsl,
    flashinfer_cutlass,
    flashinfer_hopper,
    flashinfer_trtllm,
    flashinfer_trtllm_formats,
    triton_kernels,
)

CACHES = [
    module.cache
    for module in (
        *(flashinfer_cutedsl, flashinfer_cutlass, flashinfer_hopper, flashinfer_trtllm),
        *(flashinfer_trtllm_formats, triton_kernels),
    )
]
OUTPUTS = ("output", "out", "moe_output", "topk_values", "topk_indices", "routing_replay_out")
# Other draws of the fuzzer have these.
ELSEWHERE = {
    "fused_experts",
    "routing",
    "mm_mxfp8",
    "mxfp8_linear",
    "mxfp8_quantize",
    "mxfp8_dequantize_host",
    "pack_topk",
}
NAMES = sorted(set(public_calls.MAKERS) - ELSEWHERE)


def tensors(result: Any) -> list[Tensor]:
    """Returns the tensors of a result."""
    if isinstance(result, tuple | list):
        return [tensor for part in result for tensor in tensors(part)]
    return [as_torch(result)] if hasattr(result, "__dlpack__") else []


def draw_public(rng: random.Random, generator: torch.Generator) -> Call:
    name = rng.choice(NAMES)
    operands: Operands = public_calls.MAKERS[name](public_calls.Draws(generator))
    function = getattr(oxmoe, name)
    outputs = tuple(output for output in OUTPUTS if output in operands)

    def run(operands: Operands) -> Any:
        try:
            result = function(**operands)
            # A call may write its results alone.
            return (
                result if result is not None else [operands[name] for name in outputs if operands.get(name) is not None]
            )
        finally:
            for cache in CACHES:
                cache.clear()

    def check(before: Operands, result: Any) -> None:
        if any(tensor.is_meta or hasattr(tensor, "fake_mode") for tensor in tensors(result)):
            return  # There are shapes alone.
        results = result, run(before)
        if isinstance(result, int):
            assert results[0] == results[1], f"{results[0]}, and {results[1]} of plain operands"
        sides = [tensors(one) for one in results]
        assert len(sides[0]) == len(sides[1]), f"{len(sides[0])} tensors, and {len(sides[1])} of plain operands"
        for number, pair in enumerate(zip(*sides, strict=True)):
            same(*pair, f"tensor {number}")

    return Call(name, run, operands, check, outputs)
