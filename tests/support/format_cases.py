"""Random experts of every format, by the format's name: the one list for tests that run with each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import oxmoe
from cases import Shape, make_layer
from fp8_cases import make_fp8, make_fp8_tensor
from int4_cases import make as make_int4
from mxfp4_cases import make_blocks
from mxfp8_cases import make_mxfp8
from nvfp4_cases import make as make_nvfp4
from nvfp4_cases import on_cuda

Make = Callable[[Shape, str, torch.Generator], oxmoe.ExpertWeights]

DTYPES = {"f32": torch.float32, "f16": torch.float16}


def _plain(dtype: torch.dtype) -> Make:
    return lambda shape, device, rng: make_layer(shape, dtype, device, rng).weights()


def _fp8_tensor(of_rows: bool = False, mode: str | None = None) -> Make:
    def make(shape: Shape, device: str, rng: torch.Generator) -> oxmoe.ExpertWeights:
        layer = make_fp8_tensor(shape, device, rng, of_rows=of_rows)
        scales = layer.scaling(mode) if mode else {}
        return oxmoe.ExpertWeights.fp8_tensor(*layer.operands, **scales, **layer.options)

    return make


def _mxfp4(**options: Any) -> Make:
    return lambda shape, device, rng: make_blocks(shape, "bf16", device, rng).weights(**options)


def _nvfp4(a4: bool = False, **options: Any) -> Make:
    def make(shape: Shape, device: str, rng: torch.Generator) -> oxmoe.ExpertWeights:
        layer = make_nvfp4(shape, rng, a4)
        return (layer if device == "cpu" else on_cuda(layer)).weights(**options)

    return make


def _int4(zeros: bool = False) -> Make:
    return lambda shape, device, rng: make_int4(shape, rng, zeros=zeros).to(device).weights()


# "fp8_tensor" quantises each token by itself, and "-call" has one scale for all rows of a call.
EXPERTS: dict[str, Make] = {
    "f32": _plain(torch.float32),
    "bf16": _plain(torch.bfloat16),
    "f16": _plain(torch.float16),
    "fp8_block": lambda shape, device, rng: make_fp8(shape, device, rng).weights(),
    "fp8_tensor": _fp8_tensor(),
    "fp8_tensor-rows": _fp8_tensor(of_rows=True),
    "fp8_tensor-static": _fp8_tensor(mode="static"),
    "fp8_tensor-call": _fp8_tensor(mode="tensor"),
    "mxfp8": lambda shape, device, rng: make_mxfp8(shape, device, rng).weights(),
    "mxfp4": _mxfp4(),
    "mxfp4-a8": _mxfp4(activation_dtype=torch.float8_e4m3fn),
    "nvfp4": _nvfp4(),
    "nvfp4-a4": _nvfp4(a4=True),
    "nvfp4-a4-one": _nvfp4(a4=True, input_global_scale=100.0, a2_global_scale=100.0),
    "int4": _int4(),
    "int4-zeros": _int4(zeros=True),
}

# Formats of which Hopper has layers of few tokens in one launch.
IN_ONE_LAUNCH = ("bf16", "f16", "fp8_block", "mxfp4", "mxfp8", "nvfp4", "int4", "int4-zeros")


def dtype_of(format: str) -> torch.dtype:
    """Returns the dtype of tokens."""
    return DTYPES.get(format, torch.bfloat16)
