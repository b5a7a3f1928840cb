"""A plugin of SGLang for servers that have no flashinfer.

SGLang's layer of --moe-runner-backend flashinfer_mxfp4 asks flashinfer for two functions, which lay weights and scales
out for its kernel on Hopper. Here they are oxmoe's own functions of that layout. oxmoe runs such a layer in place of
the kernel, so a server with oxmoe calls nothing else of flashinfer. A server without oxmoe needs flashinfer.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

_ENTRY_POINT = "[sglang.srt.plugins]\nsm90_layout = sm90_layout:register\n"


def _weights(codes: Tensor, kind: str) -> Tensor:
    from oxmoe import quantize

    scales = torch.zeros((*codes.shape[:-1], codes.shape[-1] // 16), dtype=torch.uint8, device=codes.device)
    return quantize.interleave_sm90_mxfp4(codes, scales)[0]


def _scales(scales: Tensor, group_size: int) -> Tensor:
    from oxmoe import quantize

    codes = torch.zeros((*scales.shape[:-1], scales.shape[-1] * 16), dtype=torch.uint8, device=scales.device)
    return quantize.interleave_sm90_mxfp4(codes, scales)[1]


def register() -> None:
    """The entry point. It leaves functions of an installed flashinfer as they are."""
    from sglang.srt.layers.quantization import mxfp4

    if not mxfp4._FI_HAS_SM90_CUTLASS_MXFP4:
        mxfp4.interleave_moe_weights_for_sm90_mixed_gemm = _weights
        mxfp4.interleave_moe_scales_for_sm90_mixed_gemm = _scales
        mxfp4._FI_HAS_SM90_CUTLASS_MXFP4 = True


def install(folder: Path) -> None:
    """Writes the plugin into a new folder. A process finds it there by its PYTHONPATH."""
    information = folder / "sm90_layout-1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: sm90-layout\nVersion: 1\n")
    (information / "entry_points.txt").write_text(_ENTRY_POINT)
    shutil.copy(__file__, folder)
