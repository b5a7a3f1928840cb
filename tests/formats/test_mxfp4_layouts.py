"""Layouts of MXFP4 weights against index formulas, and against triton_kernels and flashinfer if they are installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import flashinfer_source
import oxmoe
from flashinfer_source import scale_interleave
from oxmoe import quantize

# (experts, rows, K): the tiles' own sizes, GPT-OSS, odd ones.
SHAPES = [
    (1, 64, 128),
    (2, 96, 96),
    (3, 5, 32),
    (1, 720, 2880),
    (1, 1408, 704),
    (2, 320, 1440),
    (0, 64, 128),
    (2, 0, 64),
]
ALIGNED = [(1, 64, 128), (3, 192, 384), (1, 704, 2944), (1, 1408, 768), (2, 64, 1024), (0, 64, 128)]


def weights(experts: int, rows: int, k: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns (codes, scales) of random bytes."""

    def random(columns: int) -> Tensor:
        return torch.randint(0, 256, (experts, rows, columns), generator=rng, dtype=torch.uint8)

    return random(k // 2), random(k // 32)


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def padded(x: Tensor, rows: int, columns: int) -> Tensor:
    return pad(x, (0, columns - x.shape[-1], 0, rows - x.shape[-2]))


# The places in a word of the bits (sign, two of exponent, mantissa) of its elements: low nibble, high nibble, byte by
# byte.
SPREAD = [
    *[(15, 8, 7, 6), (31, 24, 23, 22)],
    *[(12, 5, 4, 3), (28, 21, 20, 19)],
    *[(9, 2, 1, 0), (25, 18, 17, 16)],
    *[(14, 11, 10, 13), (30, 27, 26, 29)],
]


def spread(quads: Tensor) -> Tensor:
    """Converts uint8 [..., 4] to the bytes of the words [..., 4]."""
    word = torch.zeros(quads.shape[:-1], dtype=torch.int32)
    for i, bits in enumerate(SPREAD):
        element = quads[..., i // 2].int() >> (4 * (i % 2))
        for bit, place in zip((3, 2, 1, 0), bits, strict=True):
            word |= (element >> bit & 1) << place  # little-endian, like the GPU
    return word.unsqueeze(-1).view(torch.uint8)


def hopper_values(codes: Tensor, row_multiple: int) -> Tensor:
    """Returns [.., R / 4, 4 K / 2] by axes of rows (tile, half, pair, odd) and of bytes (tile, step, half, lane)."""
    experts, rows, columns = codes.shape
    x = padded(codes, up(rows, row_multiple), up(columns, 64))
    rows, columns = x.shape[1:]
    x = x.reshape(experts, rows // 16, 2, 4, 2, columns // 32, 4, 2, 4)
    quads = x.permute(0, 1, 3, 5, 4, 8, 6, 7, 2).reshape(-1, 4)  # (column half, row half) within a word
    return spread(quads).reshape(experts, rows // 4, columns * 4)


def hopper_scales(scales: Tensor, num_warps: int) -> Tensor:
    """Returns [.., R / 32, 32 G], one index at a time."""
    experts, rows, groups = scales.shape
    x = padded(scales, up(rows, 32 * num_warps), up(groups, 2))
    rows, groups = x.shape[1:]
    row, group = torch.arange(rows)[:, None], torch.arange(groups)[None]
    band, tile, warp = row // (32 * num_warps), row // (16 * num_warps) % 2, row // 16 % num_warps
    to_row = band * num_warps + warp
    to_column = group // 2 * 64 + tile * 32 + row % 8 * 4 + group % 2 * 2 + row // 8 % 2
    out = torch.full((experts, rows // 32 * groups * 32), 7, dtype=torch.uint8)
    out[:, (to_row * groups * 32 + to_column).flatten()] = x.reshape(experts, rows * groups)
    return out.reshape(experts, rows // 32, groups * 32)


def sm90_values(codes: Tensor, flashinfer: str) -> Tensor:
    """Moves bytes (r or r + 8, c or c + 4) of a 16 x 32 tile to row r + 8 (c / 8 % 2), column c / 16 * 16 + c % 4 *
    4."""
    experts, rows, columns = codes.shape
    x = codes.reshape(experts, rows // 16, 2, 8, columns // 32, 2, 2, 2, 4)  # half, row; tile, pair, odd, half, lane
    quads = x.permute(0, 1, 6, 3, 4, 5, 8, 7, 2)  # tile of rows, odd, row, tile, pair, lane, column half, row half
    if flashinfer == "0.7":
        words = spread(quads.flatten(-2))
    else:  # per column: the low nibbles of both rows, then the high ones
        low, high = quads & 15, quads >> 4
        words = torch.stack([low[..., 0] | low[..., 1] << 4, high[..., 0] | high[..., 1] << 4], -1)
    return words.reshape(experts, rows, columns)


def sm90_scales(scales: Tensor, flashinfer: str) -> Tensor:
    experts, rows, groups = scales.shape
    if flashinfer == "0.6":
        out = torch.empty(experts, groups // 4, rows, 4, dtype=torch.uint8)
        for g in range(groups):
            out[:, g // 4, :, g % 4] = scales[:, :, g]
        return out.flatten(2)
    out = torch.empty(experts, rows // 64, groups // 4, 16, 16, dtype=torch.uint8)
    for r in range(rows):
        for f in range(4):
            out[:, r // 64, :, r % 16, r % 64 // 16 * 4 + f] = scales[:, r, f::4]
    return out


@pytest.mark.parametrize("row_multiple", [64, 256])
@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_hopper(
    shape: tuple[int, int, int], num_warps: int, row_multiple: int, device: str, rng: torch.Generator
) -> None:
    codes, scales = (t.to(device) for t in weights(*shape, rng))
    values, swizzled = quantize.swizzle_hopper_mxfp4(codes, scales, num_warps=num_warps, row_multiple=row_multiple)
    assert values.device == swizzled.device == codes.device
    if codes.numel():
        assert torch.equal(values.mT.cpu(), hopper_values(codes.cpu(), row_multiple))
        assert torch.equal(swizzled.mT.cpu(), hopper_scales(scales.cpu(), num_warps))
    else:
        assert values.numel() == swizzled.numel() == 0
    _, rows, k = shape
    back = quantize.unswizzle_hopper_mxfp4(values, swizzled, rows=rows, columns=k, num_warps=num_warps)
    assert torch.equal(back[0], codes) and torch.equal(back[1], scales)
    # With fewer rows and columns than there are, the weight's own padding goes too.
    rows, k = rows // 2, max(k - 32, 0)
    back = quantize.unswizzle_hopper_mxfp4(values, swizzled, rows=rows, columns=k, num_warps=num_warps)
    assert torch.equal(back[0], codes[:, :rows, : k // 2]) and torch.equal(back[1], scales[:, :rows, : k // 32])


@pytest.mark.parametrize("flashinfer", ["0.6", "0.7"])
@pytest.mark.parametrize("shape", [*ALIGNED, (2, 16, 128)], ids=str)
def test_sm90(shape: tuple[int, int, int], flashinfer: str, device: str, rng: torch.Generator) -> None:
    if flashinfer == "0.7" and shape[1] % 64:
        pytest.skip("flashinfer 0.7 folds the scales of 64 rows")
    codes, scales = (t.to(device) for t in weights(*shape, rng))
    interleaved = quantize.interleave_sm90_mxfp4(codes, scales, flashinfer=flashinfer)
    assert interleaved[0].device == interleaved[1].device == codes.device
    assert torch.equal(interleaved[0].cpu(), sm90_values(codes.cpu(), flashinfer))
    assert torch.equal(interleaved[1].cpu(), sm90_scales(scales.cpu(), flashinfer))
    back = quantize.deinterleave_sm90_mxfp4(*interleaved)
    assert torch.equal(back[0], codes) and torch.equal(back[1], scales)


def test_any_leading_dimensions_and_numpy(rng: torch.Generator) -> None:
    codes, scales = weights(6, 128, 256, rng)
    for convert in (
        quantize.swizzle_hopper_mxfp4,
        lambda c, s: quantize.interleave_sm90_mxfp4(c, s, flashinfer="0.6"),
        quantize.interleave_sm90_mxfp4,
    ):
        whole = convert(codes, scales)
        nested = convert(codes.unflatten(0, (2, 3)), scales.unflatten(0, (2, 3)))
        single = convert(codes[4], scales[4])
        arrays = convert(codes.numpy(), scales.numpy())
        for result, other, one, array in zip(whole, nested, single, arrays, strict=True):
            assert torch.equal(other.flatten(0, 1), result) and torch.equal(one, result[4])
            assert isinstance(array, np.ndarray) and np.array_equal(array, result.numpy())
    values, swizzled = quantize.swizzle_hopper_mxfp4(codes[0].numpy(), scales[0].numpy())
    back = quantize.unswizzle_hopper_mxfp4(values, swizzled, rows=128, columns=256)
    assert np.array_equal(back[0], codes[0].numpy()) and np.array_equal(back[1], scales[0].numpy())
    back = quantize.deinterleave_sm90_mxfp4(*quantize.interleave_sm90_mxfp4(codes[0].numpy(), scales[0].numpy()))
    assert np.array_equal(back[0], codes[0].numpy()) and np.array_equal(back[1], scales[0].numpy())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(5, 5760, 2880), (3, 2944, 2944)], ids=str)
def test_gpu_gives_the_same_bytes(shape: tuple[int, int, int], rng: torch.Generator) -> None:
    """Many matrices of a model's size are converted, on a stream of its own and in a captured graph."""
    codes, scales = weights(*shape, rng)
    sizes = {"rows": shape[1], "columns": shape[2]}

    def convert(codes: Tensor, scales: Tensor) -> list[Tensor]:
        made = [*quantize.swizzle_hopper_mxfp4(codes, scales, row_multiple=256)]
        made += quantize.unswizzle_hopper_mxfp4(*made, **sizes)
        for flashinfer in ("0.6", "0.7") if shape[2] % 128 == 0 else ():
            made += quantize.interleave_sm90_mxfp4(codes, scales, flashinfer=flashinfer)
            made += quantize.deinterleave_sm90_mxfp4(*made[-2:])
        return made

    expected, given = convert(codes, scales), (codes.cuda(), scales.cuda())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = convert(*given)
    stream.synchronize()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(results, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = convert(*given)
    for result in results:
        result.fill_(0xAA)
    graph.replay()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(results, expected, strict=True))


@pytest.mark.gpu
def test_experts_from_what_sglang_holds(rng: torch.Generator) -> None:
    """A layer's weights as its kernels hold them become packed experts without leaving the GPU."""
    experts, hidden, intermediate = 4, 256, 128
    given = [weights(experts, *size, rng) for size in ((2 * intermediate, hidden), (hidden, intermediate))]
    given = [(codes.cuda(), scales.cuda()) for codes, scales in given]
    (c13, s13), (c2, s2) = given
    expected = oxmoe.ExpertWeights.mxfp4(c13, c2, s13, s2, layout="interleaved")
    for there, back in (
        (
            lambda c, s: quantize.swizzle_hopper_mxfp4(c, s),
            lambda v, s, c: quantize.unswizzle_hopper_mxfp4(v, s, rows=c.shape[1], columns=2 * c.shape[2]),
        ),
        (
            lambda c, s: quantize.interleave_sm90_mxfp4(c, s),
            lambda v, s, c: quantize.deinterleave_sm90_mxfp4(v, s),
        ),
    ):
        (c13, s13), (c2, s2) = (back(*there(codes, scales), codes) for codes, scales in given)
        made = oxmoe.ExpertWeights.mxfp4(c13, c2, s13, s2, layout="interleaved", in_place=True)
        for name in ("w13_packed", "w2_packed"):
            for a, b in zip(getattr(made, name), getattr(expected, name), strict=True):
                assert torch.equal(a.flatten(), b.flatten())


def test_scales_padded_before_the_swizzle(device: str, rng: torch.Generator) -> None:
    """SGLang 0.5.23 pads the scales' K to whole 128 columns with 127, the scale 1."""
    codes, scales = (t.to(device) for t in weights(2, 64, 160, rng))
    longer = pad(scales, (0, 3), value=127)
    values, swizzled = quantize.swizzle_hopper_mxfp4(codes, longer, row_multiple=256)
    assert torch.equal(swizzled.mT.cpu(), hopper_scales(longer.cpu(), 8))
    back = quantize.unswizzle_hopper_mxfp4(values, swizzled, rows=64, columns=160)
    assert torch.equal(back[0], codes) and torch.equal(back[1], scales)


@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES[:6] if shape[1] % 2 == 0], ids=str)  # 3.8 has no odd rows
def test_hopper_as_triton_kernels(shape: tuple[int, int, int], num_warps: int, rng: torch.Generator) -> None:
    """The calls are those of SGLang's `_swizzle_mxfp4`, for the installed release."""
    reason = {"reason": "triton_kernels is not installed", "exc_type": ImportError}
    layout = pytest.importorskip("triton_kernels.tensor_details.layout", **reason)
    tensor = pytest.importorskip("triton_kernels.tensor", **reason)
    codes, scales = weights(*shape, rng)
    wrapped = tensor.wrap_torch_tensor(codes.mT, dtype=tensor.FP4), tensor.wrap_torch_tensor(scales.mT)
    if hasattr(layout.HopperMXValueLayout, "make_transformation"):  # 3.8: a layout is a value
        row_multiple = 256
        theirs = tensor.convert_layout(wrapped[0], layout.HopperMXValueLayout(mx_axis=-2, mma_version=3))
        their_scales = tensor.convert_layout(wrapped[1], layout.HopperMXScaleLayout(mx_axis=-2, num_warps=num_warps))
    else:  # 3.6: a class
        row_multiple = 64
        theirs = tensor.convert_layout(wrapped[0], layout.HopperMXValueLayout, mx_axis=1)
        their_scales = tensor.convert_layout(wrapped[1], layout.HopperMXScaleLayout, mx_axis=1, num_warps=num_warps)
    held, held_scales = theirs.storage.data, their_scales.storage.data
    ours = quantize.swizzle_hopper_mxfp4(codes, scales, num_warps=num_warps, row_multiple=row_multiple)
    assert torch.equal(ours[0], held) and torch.equal(ours[1], held_scales)
    assert ours[0].stride() == held.stride()
    k, rows = theirs.shape[-2:]
    assert (rows, k) == shape[1:]
    back = quantize.unswizzle_hopper_mxfp4(held, held_scales, rows=rows, columns=k, num_warps=num_warps)
    assert torch.equal(back[0], codes) and torch.equal(back[1], scales)


@pytest.fixture
def flashinfer(tmp_path: Path) -> tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Returns (release, its weight interleave, its scale interleave)."""
    weights_of, (release, scales_of) = flashinfer_source.weight_interleave("fp4", tmp_path), scale_interleave()
    return release, weights_of, scales_of


@pytest.mark.parametrize("shape", ALIGNED[:5], ids=str)
def test_sm90_as_flashinfer(
    shape: tuple[int, int, int],
    flashinfer: tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]],
    rng: torch.Generator,
) -> None:
    release, interleave_weights, interleave_scales = flashinfer
    codes, scales = weights(*shape, rng)
    theirs = interleave_weights(codes), interleave_scales(scales)
    ours = quantize.interleave_sm90_mxfp4(codes, scales, flashinfer=release)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    back = quantize.deinterleave_sm90_mxfp4(*theirs)
    assert torch.equal(back[0], codes) and torch.equal(back[1], scales)


def refused(message: str, call: Callable[..., object], *args: object, **options: object) -> None:
    with pytest.raises(ValueError, match=message):
        call(*args, **options)


def test_hopper_refusals(rng: torch.Generator) -> None:
    codes, scales = weights(2, 64, 128, rng)
    swizzle, unswizzle = quantize.swizzle_hopper_mxfp4, quantize.unswizzle_hopper_mxfp4
    refused('scales: dimension 2 "K / 32": expected 4 or more, got 3', swizzle, codes, scales[..., :3].contiguous())
    refused('scales: dimension 1 "rows": expected 64 .*, got 32', swizzle, codes, scales[:, :32].contiguous())
    refused(
        'codes: dimension 2 "K / 2": expected a multiple of 16, got 8', swizzle, codes[..., :8].contiguous(), scales
    )
    refused("num_warps: expected a power of two from 1 to 32, got 6", swizzle, codes, scales, num_warps=6)
    refused("row_multiple: expected 64 .* or 256 .*, got 128", swizzle, codes, scales, row_multiple=128)
    refused(r"codes: expected \[..., rows, K / 2\], got shape \[4\]", swizzle, codes[0, 0, :4].contiguous(), scales)

    held = swizzle(codes, scales)
    sizes = {"rows": 64, "columns": 128}
    refused(
        "values: expected triton_kernels' storage, contiguous in", unswizzle, held[0].contiguous(), held[1], **sizes
    )
    refused(
        "scales: expected triton_kernels' storage, contiguous in", unswizzle, held[0], held[1].contiguous(), **sizes
    )
    refused("rows: values of shape .* hold 64, got 65", unswizzle, *held, rows=65, columns=128)
    refused("columns: values of shape .* hold 128, got 160", unswizzle, *held, rows=64, columns=160)
    refused("rows, columns: expected sizes", unswizzle, *held, rows=64, columns=100)
    refused("rows, columns: expected sizes", unswizzle, *held, rows=-1, columns=128)
    refused('scales: dimension 2 "rows / 32": expected a multiple of 16', unswizzle, *held, **sizes, num_warps=16)
    refused("values: expected .* as triton_kernels stores it", unswizzle, held[0].flatten(), held[1], **sizes)
    refused("scales: dimension 0 .*expected 2, got 1", unswizzle, held[0], held[1][:1], **sizes)
    refused(
        'values: dimension 1 "4 K / 2": expected a multiple of 256',
        unswizzle,
        held[0][:, :128].mT.contiguous().mT,
        held[1],
        **sizes,
    )


def test_sm90_refusals(rng: torch.Generator) -> None:
    codes, scales = weights(2, 64, 128, rng)
    interleave, deinterleave = quantize.interleave_sm90_mxfp4, quantize.deinterleave_sm90_mxfp4
    refused('flashinfer: expected "0.6" or "0.7", got "0.5"', interleave, codes, scales, flashinfer="0.5")
    refused(
        'codes: dimension 1 "rows": expected a multiple of 64, got 48', interleave, codes[:, :48].contiguous(), scales
    )
    refused(
        'codes: dimension 2 "K / 2": expected a multiple of 64, got 32',
        interleave,
        codes[..., :32].contiguous(),
        scales,
    )
    refused('scales: dimension 2 "K / 32": expected 4, got 2', interleave, codes, scales[..., :2].contiguous())
    held = interleave(codes, scales)
    refused("scales: expected 3 dimensions .* or 5 .*, got shape", deinterleave, held[0], held[1][0])
    refused('scales: dimension 2 "K / 128": expected 1, got 2', deinterleave, held[0], held[1].repeat(1, 1, 2, 1, 1))
    refused('scales: dimension 1 "K / 128": expected 1, got 64', deinterleave, codes, scales)
