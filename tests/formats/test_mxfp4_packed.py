"""The packed form of MXFP4 weights against the words of csrc/common/mxfp4.cuh, on both devices."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oxmoe
from host_build import compiled, cxx
from oxmoe import quantize
from oxmoe.testing import same_bits

HEADER = Path(__file__).parents[2] / "csrc" / "common" / "mxfp4.cuh"

# (experts, rows, K): whole blocks, GPT-OSS's 45 blocks, sizes that fill no block, the least sizes, nothing.
SHAPES = [
    (2, 64, 64),
    (1, 2880, 96),
    (2, 32, 2880),
    (3, 96, 704),
    (2, 80, 32),
    (1, 2, 1408),
    (1, 194, 160),
    (2, 0, 64),
    (2, 64, 0),
    (0, 64, 64),
]
FORMS: list[dict[str, Any]] = [
    {},
    {"gated": True, "layout": "gate_up"},
    {"gated": True, "layout": "up_gate"},
    {"gated": True, "layout": "interleaved"},
]
forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.get("layout", "plain"))


def random_weights(experts: int, rows: int, k: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns random codes, -0 among them, and scales: all bytes for the first expert, others within one shift's
    reach."""

    def draw(low: int, high: int, columns: int) -> Tensor:
        return torch.randint(low, high, (experts, rows, columns), dtype=torch.uint8, generator=rng)

    codes, scales = draw(0, 256, k // 2), draw(100, 129, k // 32)
    scales[:1] = draw(0, 256, k // 32)[:1]
    scales[1:] = torch.where(draw(0, 20, k // 32)[1:] == 0, 255, scales[1:])
    for place, byte in zip(scales[:1].flatten().split(1), (0, 127, 254, 255), strict=False):
        place.fill_(byte)
    return codes, scales


def source_rows(rows: int, form: dict[str, Any]) -> Tensor:
    """Returns the weight row of [row tiles, warp, g, 0: g or 1: g + 8], -1 for padding."""
    tiles = -(-rows // 64)
    s, g = torch.arange(4 * tiles)[:, None, None], torch.arange(8)[None, :, None]
    half = torch.arange(2)[None, None, :]
    if not form:
        row = 16 * s + 8 * half + g
        return torch.where(row < rows, row, -1).view(tiles, 4, 8, 2)
    column, columns = 8 * s + g, rows // 2
    row = {
        "gate_up": half * columns + column,
        "up_gate": (1 - half) * columns + column,
        "interleaved": 2 * column + half,
    }[form["layout"]]
    return torch.where(column < columns, row, -1).view(tiles, 4, 8, 2)


def decoded(packed: tuple[Tensor, ...], rows: int, k: int, form: dict[str, Any]) -> Tensor:
    """Decodes what a kernel multiplies: fp64 [experts, rows, k] from the words, by the header's shifts and masks."""
    codes, scales, factors = (t.cpu().numpy() for t in packed)
    experts, tiles, blocks = codes.shape[:3]
    word = codes.reshape(experts, tiles, blocks, 4, 8, 4, 16).view(np.uint32).astype(np.int64)  # warp, g, c, step
    word &= 0xFFFFFFFF
    in_place = [
        word & 0x81808180 | word >> 8 & 0x00400040,
        word << 2 & 0x81C081C0,
        word << 6 & 0x81C081C0,
        (word << 12 | word >> 20) & 0x81C081C0,
    ]
    scale = scales.reshape(experts, tiles, blocks, 4, 8, 4).view(np.uint32).astype(np.int64)[..., 0]
    multipliers = [scale & 0x7F807F80, (scale << 8 | scale >> 24) & 0x7F807F80]

    def number(bits: np.ndarray) -> np.ndarray:
        return ((bits & 0xFFFF) << 16).astype(np.uint32).view(np.float32).astype(np.float64)

    out = np.full((experts, rows + 1, 64 * blocks), np.nan)  # the last row takes the padding
    row_of = source_rows(rows, form).numpy()  # tile, warp, g, half
    for register in range(4):
        half = register % 2
        for side in range(2):
            for step in range(4):
                value = number(in_place[register][..., step] >> 16 * side)  # experts, tile, block, warp, g, c
                factor = number(multipliers[step // 2] >> 16 * half)[..., None]
                with np.errstate(invalid="ignore"):
                    value = value * factor * factors[:, None, None, None, None, None]
                column = 16 * step + 2 * np.arange(4) + side + register // 2 * 8
                for block in range(blocks):
                    place = row_of[..., half][..., None], 64 * block + column
                    out[:, place[0], place[1]] = value[:, :, block]
                    padding = value[:, :, block][:, row_of[..., half] < 0]
                    assert not padding.any(), "padding is zero"
    assert not out[:, :rows, k:].any()
    return torch.from_numpy(out[:, :rows, :k])


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns the checkpoint's numbers in fp64; 2^-127 beside 2^127 is 0 (the multiplier has no mantissa)."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    numbers = torch.cat([numbers, -numbers])
    elements = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    powers = torch.where(scales == 255, torch.nan, torch.exp2(scales.double() - 127))
    powers[(scales == 0) & (scales == 254).flatten(1).any(1)[:, None, None]] = 0
    return numbers[elements] * powers.repeat_interleave(32, -1)


@forms
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_words(shape: tuple[int, int, int], form: dict[str, Any], device: str, rng: torch.Generator) -> None:
    """The words decode to the checkpoint's numbers at their rows and columns, and the rest is zero."""
    (experts, rows, k), (codes, scales) = shape, random_weights(*shape, rng)
    packed = quantize.mxfp4_pack(codes.to(device), scales.to(device), **form)
    tiles, blocks = -(-rows // 64), -(-k // 64)
    assert [tuple(t.shape) for t in packed] == [
        (experts, tiles, blocks, 2048),
        (experts, tiles, blocks, 128),
        (experts,),
    ]
    assert [t.dtype for t in packed] == [torch.uint8, torch.uint8, torch.float32] and packed[0].device.type == device
    counted = torch.where(scales == 255, 0, scales).flatten(1).long()
    peaks = counted.amax(1) if counted.numel() else torch.zeros(experts)
    assert same_bits(packed[2].cpu(), torch.exp2((peaks - 128).clamp(min=0).float()))
    if packed[0].numel():
        expected = values(codes, scales)
        result = decoded(packed, rows, k, form)
        assert result.isnan().equal(expected.isnan())
        assert same_bits(result.nan_to_num(0.0), expected.nan_to_num(0.0)), "numbers and signs of zeros"


@forms
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip(shape: tuple[int, int, int], form: dict[str, Any], device: str, rng: torch.Generator) -> None:
    codes, scales = random_weights(*shape, rng)
    packed = quantize.mxfp4_pack(codes.to(device), scales.to(device), **form)
    back = quantize.mxfp4_unpack(*packed, rows=shape[1], columns=shape[2], **form)
    nan = (scales == 255).repeat_interleave(16, -1)
    assert back[0].cpu().equal(torch.where(nan, 0, codes)) and back[1].cpu().equal(scales)
    again = quantize.mxfp4_pack(*back, **form)
    assert all(same_bits(a, b) for a, b in zip(again, packed, strict=True))


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("shape", [*SHAPES, (4, 5760, 2880), (5, 2880, 2944)], ids=str)
def test_gpu_packs_the_same_bits(shape: tuple[int, int, int], form: dict[str, Any], rng: torch.Generator) -> None:
    codes, scales = random_weights(*shape, rng)
    expected = quantize.mxfp4_pack(codes, scales, **form)
    packed = quantize.mxfp4_pack(codes.cuda(), scales.cuda(), **form)
    assert all(same_bits(a.cpu(), b) for a, b in zip(packed, expected, strict=True))


def test_gated_layouts_pack_alike(device: str, rng: torch.Generator) -> None:
    codes, scales = (t.to(device) for t in random_weights(3, 96, 160, rng))
    orders = {
        "up_gate": lambda t: t.roll(48, 1),
        "interleaved": lambda t: t.view(3, 2, 48, -1).transpose(1, 2).reshape(t.shape),
    }
    expected = quantize.mxfp4_pack(codes, scales, gated=True)
    for layout, order in orders.items():
        packed = quantize.mxfp4_pack(order(codes), order(scales), gated=True, layout=layout)
        assert all(same_bits(a, b) for a, b in zip(packed, expected, strict=True))


def test_leading_dimensions_and_numpy(rng: torch.Generator) -> None:
    codes, scales = random_weights(6, 80, 96, rng)
    expected = quantize.mxfp4_pack(codes, scales)
    nested = quantize.mxfp4_pack(codes.view(2, 3, 80, 48), scales.view(torch.float8_e8m0fnu).view(2, 3, 80, 3))
    assert nested[2].shape == (2, 3)
    single = quantize.mxfp4_pack(codes[0], scales[0])
    assert single[2].shape == ()
    arrays = quantize.mxfp4_pack(codes.numpy(), scales.numpy())
    for a, b, c, d in zip(expected, nested, single, arrays, strict=True):
        assert same_bits(a, b.flatten(0, 1)) and same_bits(a[:1], c[None]) and a.numpy().tobytes() == d.tobytes()
    back = quantize.mxfp4_unpack(*nested, rows=80, columns=96)
    assert back[1].equal(scales.view(2, 3, 80, 3))


def test_header(tmp_path: Path) -> None:
    """The header's own functions put codes and scales in these places, on the host."""
    compiler = cxx()
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "header.cpp"
    source.write_text(
        "#define __host__\n#define __device__\n"
        f'#include "{HEADER}"\nusing namespace oxmoe::mxfp4;\n'
        'extern "C" uint32_t at(uint32_t code, int reg, int half) { return place(code, reg, half); }\n'
        'extern "C" uint32_t field(int byte, int shift) { return scale_field(byte, shift); }\n'
        'extern "C" uint32_t scales(uint32_t a, uint32_t b, uint32_t c, uint32_t d) '
        "{ return place_scales(a, b, c, d); }\n"
    )
    header = ctypes.CDLL(str(compiled(compiler, ["-std=c++17", "-Wall", "-Werror"], source)))
    for name in ("at", "field", "scales"):
        getattr(header, name).restype = ctypes.c_uint32

    def word(packed: tuple[Tensor, ...], thread: int, step: int) -> int:
        return int.from_bytes(packed[0][0, 0, 16 * thread + 4 * step :][:4].numpy().tobytes(), "little")

    for row, column in ((0, 0), (9, 17), (8, 58), (37, 45), (63, 63), (16, 9)):
        w, g, half = row // 16, row % 8, row // 8 % 2
        step, c, side, right = column // 16, column % 8 // 2, column % 2, column // 8 % 2
        for code in range(16):
            codes = torch.zeros((64, 32), dtype=torch.uint8)
            codes[row, column // 2] = code << 4 * (column % 2)
            packed = quantize.mxfp4_pack(codes, torch.full((64, 2), 127, dtype=torch.uint8))
            expected = header.at(code, 2 * right + half, side)
            assert word(packed, 32 * w + 4 * g + c, step) == expected
            assert int(packed[0].count_nonzero()) == sum(byte != 0 for byte in expected.to_bytes(4, "little"))
    for peak in (0, 127, 128, 129, 200, 254):
        shift = max(peak - 128, 0)
        for byte in (0, 1, 126, 127, 128, 129, 254, 255):
            if byte > peak and byte != 255:
                continue
            scales = torch.full((64, 2), peak, dtype=torch.uint8)
            scales[26] = torch.tensor([byte, 255], dtype=torch.uint8)
            packed = quantize.mxfp4_pack(torch.zeros((64, 32), dtype=torch.uint8), scales)
            assert packed[2].item() == 2.0**shift
            got = int.from_bytes(packed[1][0, 0, 4 * (8 + 2) :][:4].numpy().tobytes(), "little")
            same = header.field(peak, shift)
            # Row 26 is g + 8 of g = 2 in warp 1.
            assert got == header.scales(same, header.field(byte, shift), same, header.field(255, shift))


def test_contract(rng: torch.Generator) -> None:
    codes, scales = random_weights(2, 96, 128, rng)
    packed = quantize.mxfp4_pack(codes, scales)

    def refuse(message: str, function: Any, *operands: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            function(*operands, **options)

    pack, unpack, sizes = quantize.mxfp4_pack, quantize.mxfp4_unpack, {"rows": 96, "columns": 128}
    refuse(r"^codes: expected dtype uint8, got int8", pack, codes.view(torch.int8), scales)
    refuse(r"^codes: expected \[\.\.\., rows, K / 2\]", pack, codes[0, 0], scales[0, 0])
    refuse(
        r'^codes: dimension 2 "K / 2": expected a multiple of 16, got 24', pack, codes[..., :24].contiguous(), scales
    )
    refuse(r'^scales: dimension 2 "K / 32": expected 4, got 3', pack, codes, scales[..., :3].contiguous())
    refuse(r"^codes: .*contiguous", pack, codes.mT.contiguous().mT, scales)
    refuse(r"must be even, got 95", pack, codes[:, 1:].contiguous(), scales[:, 1:].contiguous(), gated=True)
    refuse(r'^layout: expected "gate_up"', pack, codes, scales, layout="sideways")
    refuse(r'^codes: dimension 1 "ceil\(rows / 64\)": expected 3, got 2', unpack, *packed, rows=129, columns=128)
    refuse(r'^codes: dimension 2 "ceil\(columns / 64\)": expected 3, got 2', unpack, *packed, rows=96, columns=160)
    refuse(r"columns a multiple of 32", unpack, *packed, rows=96, columns=100)
    refuse(r"^scales: .*expected 128, got 64", unpack, packed[0], packed[1][..., :64].contiguous(), packed[2], **sizes)
    refuse(r"^expert_scales: expected 1 dimensions", unpack, *packed[:2], packed[2][0], **sizes)
    refuse(r"^expert_scales: expected powers of two", unpack, *packed[:2], packed[2] * 3, **sizes)


# Experts


def operands(rng: torch.Generator, hidden: int, intermediate: int, rows: int) -> list[Tensor]:
    (c13, s13), (c2, s2) = random_weights(3, rows, hidden, rng), random_weights(3, hidden, intermediate, rng)
    return [t.cuda() for t in (c13, c2, s13, s2)]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(128, 64), (2880, 96), (96, 32), (192, 704)], ids=str)
@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved", "plain"])
def test_experts_are_packed(sizes: tuple[int, int], layout: str, rng: torch.Generator) -> None:
    hidden, intermediate = sizes
    form = {} if layout == "plain" else {"gated": True, "layout": layout}
    given = operands(rng, hidden, intermediate, intermediate * (2 if form else 1))
    options = {"gated": bool(form), "layout": form.get("layout", "gate_up")}
    before = [t.clone() for t in given]
    weights = oxmoe.ExpertWeights.mxfp4(*given, **options)
    assert all(a.equal(b) for a, b in zip(given, before, strict=True))
    assert (weights.w13, weights.w2, weights.w13_scale, weights.w2_scale) == (None,) * 4
    assert (weights.format, weights.dtype, weights.device) == ("mxfp4", "bf16", "cuda:0")
    expected = quantize.mxfp4_pack(given[0], given[2], **form), quantize.mxfp4_pack(given[1], given[3])
    for packed, wanted in zip((weights.w13_packed, weights.w2_packed), expected, strict=True):
        assert all(same_bits(a, b) for a, b in zip(packed, wanted, strict=True))
    # Scales may be fp32.
    powers = [t.view(torch.float8_e8m0fnu).float() for t in given[2:]]
    weights = oxmoe.ExpertWeights.mxfp4(*given[:2], *powers, **options)
    for packed, wanted in zip((weights.w13_packed, weights.w2_packed), expected, strict=True):
        assert all(same_bits(a, b) for a, b in zip(packed, wanted, strict=True))
    # Experts may be packed in the given memory.
    if any(size % 64 for size in (hidden, intermediate, given[0].shape[1])):
        with pytest.raises(ValueError, match=r"^w(13|2): in_place needs rows and columns that are multiples of 64"):
            oxmoe.ExpertWeights.mxfp4(*given, **options, in_place=True)
        assert all(a.equal(b) for a, b in zip(given, before, strict=True))
        return
    weights = oxmoe.ExpertWeights.mxfp4(*given, **options, in_place=True)
    pairs = ((weights.w13_packed, expected[0], given[0]), (weights.w2_packed, expected[1], given[1]))
    for packed, wanted, tensor in pairs:
        assert packed[0] is tensor
        assert all(same_bits(a.flatten(), b.flatten()) for a, b in zip(packed, wanted, strict=True))


@pytest.mark.gpu
def test_padding_of_experts_is_not_packed(rng: torch.Generator) -> None:
    """Columns and rows beyond hidden_size, and their scales, have no part in the packed form."""
    given = operands(rng, 192, 64, 128)
    given[2][:, :, 3:], given[3][:, 100:] = 254, 254
    weights = oxmoe.ExpertWeights.mxfp4(*given, hidden_size=90)
    c13, c2, s13, s2 = (t.clone() for t in given)
    c13[:, :, 45:], s2[:, 90:], c2[:, 90:] = 0, 0, 0
    s13, c13 = s13[:, :, :3].contiguous(), c13[:, :, :48].contiguous()
    assert weights.w13_packed is not None and weights.w2_packed is not None
    up, down = quantize.mxfp4_pack(c13, s13, gated=True), quantize.mxfp4_pack(c2, s2)
    assert all(same_bits(a, b) for a, b in zip(weights.w13_packed, up, strict=True))
    assert same_bits(weights.w2_packed[2], down[2]) and same_bits(weights.w2_packed[0], down[0])
    # Scales of rows that are not packed have the field 0. Scales of packed zeros have the byte's own field.
    back = quantize.mxfp4_unpack(*weights.w2_packed, rows=192, columns=64)
    c2.view(*s2.shape, 16)[s2 == 255] = 0  # blocks of NaN keep no codes
    assert back[0].equal(c2) and back[1][:, :90].equal(s2[:, :90]) and not back[1][:, 90:].any()


@pytest.mark.gpu
def test_large_experts_in_place(rng: torch.Generator) -> None:
    """The matrices are copied in more than one part, and the last part is smaller."""
    experts, hidden, intermediate = 5, 2880, 2880
    shape = (experts, 2 * intermediate, hidden // 2)
    c13 = torch.randint(256, shape, dtype=torch.uint8, device="cuda")
    s13 = torch.randint(100, 160, (*shape[:2], hidden // 32), dtype=torch.uint8, device="cuda")
    c2, s2 = c13[:, :hidden].contiguous(), s13[:, :hidden].contiguous()
    expected = quantize.mxfp4_pack(c13, s13, gated=True), quantize.mxfp4_pack(c2, s2)
    weights = oxmoe.ExpertWeights.mxfp4(c13, c2, s13, s2, in_place=True)
    for packed, wanted in zip((weights.w13_packed, weights.w2_packed), expected, strict=True):
        assert all(same_bits(a.flatten(), b.flatten()) for a, b in zip(packed, wanted, strict=True))


@pytest.mark.gpu
def test_experts_on_gpus_are_checked(rng: torch.Generator) -> None:
    given = operands(rng, 128, 64, 128)
    with pytest.raises(NotImplementedError, match=r'dtype: "f16" for mxfp4 experts on cuda:0; .*"bf16"'):
        oxmoe.ExpertWeights.mxfp4(*given, dtype="f16")
    powers = given[2].view(torch.float8_e8m0fnu).float()
    powers[1, 77, 2], powers[2, 0, 0] = 3.0, -1.0
    with pytest.raises(ValueError, match=r"^w13_scale: expected powers of two .*, got 3e0 at \[1, 77, 2\]"):
        oxmoe.ExpertWeights.mxfp4(*given[:2], powers, given[3])
    room = torch.zeros(given[0].numel() + 1, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match=r"^w13: must start at a multiple of 16 bytes"):
        oxmoe.ExpertWeights.mxfp4(room[1:].view(given[0].shape), *given[1:])
    with pytest.raises(ValueError, match=r"^w2: overlaps w13"):
        oxmoe.ExpertWeights.mxfp4(
            given[0], given[0].flatten()[: given[1].numel()].view(given[1].shape), *given[2:], in_place=True
        )
    x = torch.zeros((2, 128), dtype=torch.bfloat16, device="cuda")
    routing = torch.ones((2, 1), device="cuda"), torch.zeros((2, 1), dtype=torch.int32, device="cuda")
    scales = {"w13_scale": given[2], "w2_scale": given[3], "format": "mxfp4"}
    with pytest.raises(NotImplementedError, match=r"mxfp4 experts on cuda:0 as bare tensors; supported"):
        torch.ops.oxmoe.moe(x, *given[:2], *routing, **scales)
    with pytest.raises(NotImplementedError, match=r"mxfp4 experts on cuda:0 as bare tensors; supported"):
        torch.ops.oxmoe.moe(x, *given[:2], **scales, router_logits=torch.zeros((2, 3), device="cuda"), top_k=1)


def test_in_place_is_for_gpus(rng: torch.Generator) -> None:
    (c13, s13), (c2, s2) = random_weights(2, 128, 64, rng), random_weights(2, 64, 64, rng)
    with pytest.raises(ValueError, match=r"^in_place: only for weights on CUDA, w13 is on cpu"):
        oxmoe.ExpertWeights.mxfp4(c13, c2, s13, s2, in_place=True)
    weights = oxmoe.ExpertWeights.mxfp4(c13, c2, s13, s2)
    assert weights.w13_packed is None and weights.w2_packed is None and weights.w13 is c13
