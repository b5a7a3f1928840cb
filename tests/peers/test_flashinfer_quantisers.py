"""batch_invariant of flashinfer 0.7.4's quantisers: a row's bits depend on that row alone, and are those of
flashinfer's own reference for CPUs."""

from __future__ import annotations

import importlib
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import oxmoe
from oxmoe import SfLayout, nvfp4
from oxmoe.testing import same_bits

LAYOUTS = {"128x4": SfLayout.layout_128x4, "8x4": SfLayout.layout_8x4, "linear": SfLayout.layout_linear}
DTYPES = (torch.bfloat16, torch.float16)


def drawn(rng: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Returns finite rows: groups of 32 of very different sizes, zeros of both signs, the largest number, and the
    smallest group whose scale byte is not 0. Below it flashinfer's reference has codes where oxmoe has zeros."""
    powers = torch.randint(-20, 9, (200, 8), generator=rng).float()
    x = (torch.randn((200, 256), generator=rng) * torch.exp2(powers).repeat_interleave(32, 1)).to(dtype)
    x[3], x[4, 32:64], x[5, 0], x[6] = (
        0,
        -0.0,
        torch.finfo(dtype).max,
        max(torch.finfo(dtype).smallest_normal, 2.0**-118),
    )
    return x


def mxfp8(x: torch.Tensor, layout: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return oxmoe.mxfp8_quantize(x, sf_swizzle_layout=LAYOUTS[layout], **options)


def mxfp4(x: torch.Tensor, layout: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options |= {"is_sf_swizzled_layout": layout != "linear", "is_sf_8x4_layout": layout == "8x4"}
    return nvfp4.fp4_quantize(x, sf_vec_size=32, sf_use_ue8m0=True, **options)


QUANTISERS = {"MXFP8": mxfp8, "MXFP4": mxfp4}


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    """flashinfer's module of its reference, without the packages around it, whose imports want a GPU's compilers."""
    spec = find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("flashinfer with its sources is not installed")
    root = Path(spec.origin).parent
    if not (root / "batch_invariant" / "quantization" / "mx_reference.py").is_file():
        pytest.skip("flashinfer's batch-invariant quantisers are not in this release")
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("", ".batch_invariant", ".batch_invariant.quantization", ".batch_invariant.fp_interface"):
        package = types.ModuleType(f"flashinfer{name}")
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, package.__name__, package)
    yield importlib.import_module("flashinfer.batch_invariant.quantization.mx_reference")
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", QUANTISERS)
def test_as_flashinfers(
    format: str, dtype: torch.dtype, layout: str, device: str, reference: Any, rng: torch.Generator
) -> None:
    x = drawn(rng, dtype)
    expected, of_scales, _ = reference.quantize_mx_reference(x, getattr(reference.S, format), swizzled=layout)
    codes, scales = QUANTISERS[format](x.to(device), layout, batch_invariant=True)
    assert same_bits(codes.view(torch.uint8).cpu(), expected.view(torch.uint8).view(codes.shape))
    assert same_bits(scales.view(torch.uint8).cpu().reshape(-1), of_scales)


@pytest.mark.parametrize("format", QUANTISERS)
def test_rows_alone(format: str, device: str, rng: torch.Generator) -> None:
    x = drawn(rng, torch.bfloat16).to(device)
    codes, scales = QUANTISERS[format](x, "linear", batch_invariant=True)
    for row in (0, 17, 199):
        own, of_own = QUANTISERS[format](x[row : row + 1], "linear", batch_invariant=True)
        assert same_bits(own[0], codes[row])
        assert same_bits(of_own.reshape(-1), scales.reshape(200, 8)[row])


def test_refusals() -> None:
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    for quantise in QUANTISERS.values():
        with pytest.raises(ValueError, match="batch_invariant: expected backend 'auto' with it, got 'cuda'"):
            quantise(x, "linear", backend="cuda", batch_invariant=True)
        with pytest.raises(ValueError, match="backend: expected 'auto', 'cuda' or 'cute-dsl', got 'cutile'"):
            quantise(x, "linear", backend="cutile")
    codes, scales = oxmoe.mxfp8_quantize(x)
    with pytest.raises(NotImplementedError, match="mm_mxfp8: no kernel for batch_invariant"):
        oxmoe.mm_mxfp8(codes, codes.t(), scales, scales, batch_invariant=True)
