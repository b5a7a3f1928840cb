"""Rows that lie expert by expert: masked and contiguous layouts against `moe`, the references and an index formula."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import oxmoe
from cases import ACTIVATIONS, GPT_OSS, TINY, Shape, make_layer, make_workspace, make_x
from fp8_cases import chosen, make_fp8, make_fp8_tensor
from host_cta import HostCtas
from mxfp4_cases import make_blocks
from mxfp8_cases import make_mxfp8
from oxmoe import quantize
from oxmoe.testing import relative_norm, same_bits

FP8_TENSOR = ("fp8_tensor", "fp8_tensor-token", "fp8_tensor-static")
CPU_FORMATS = ("f32", "f16", "bf16", "mxfp4", "mxfp4-a8", "mxfp8", "fp8_block", *FP8_TENSOR)
cuda_formats = [pytest.param("cuda", format, marks=pytest.mark.gpu) for format in CPU_FORMATS[1:]]
formats = pytest.mark.parametrize(("device", "format"), [*(("cpu", format) for format in CPU_FORMATS), *cuda_formats])
# Formats whose rows of x are quantised in launches of their own.
quantised_formats = pytest.mark.parametrize("format", ["mxfp8", "mxfp4-a8", *FP8_TENSOR])
SHAPES = (
    Shape("small", 6, 1, 256, 128, bias=True),
    Shape("wide", 3, 1, 384, 640, bias=True, options=tuple({**GPT_OSS, "layout": "up_gate"}.items())),
    Shape("odd-blocks", 5, 1, 128, 1408),
)
DTYPES = {"f32": torch.float32, "f16": torch.float16}


def make_operands(format: str, shape: Shape, device: str, rng: torch.Generator) -> Any:
    if format == "fp8_block":
        return make_fp8(shape, device, rng)
    if format in FP8_TENSOR:
        mode = format.partition("-")[2] or "tensor"
        return make_fp8_tensor(shape, device, rng, halves=shape.gated, mode=mode)
    if format == "mxfp8":
        return make_mxfp8(shape, device, rng)
    if format.startswith("mxfp4"):
        return make_blocks(shape, "bf16", device, rng)
    return make_layer(shape, DTYPES.get(format, torch.bfloat16), device, rng)


def weights_of(format: str, operands: Any) -> oxmoe.ExpertWeights:
    return operands.weights(**({"activation_dtype": torch.float8_e4m3fn} if format == "mxfp4-a8" else {}))


def make(format: str, shape: Shape, device: str, rng: torch.Generator) -> oxmoe.ExpertWeights:
    return weights_of(format, make_operands(format, shape, device, rng))


def draw(shape: Shape, format: str, m: int, device: str, rng: torch.Generator) -> Tensor:
    x = torch.randn((shape.experts, m, shape.hidden), generator=rng)
    return x.to(DTYPES.get(format, torch.bfloat16)).to(device)


def some_counts(experts: int, m: int, rng: torch.Generator) -> Tensor:
    """Returns counts that are 0, m, 1, and random."""
    counts = torch.randint(0, m + 1, (experts,), generator=rng)
    counts[torch.randperm(experts, generator=rng)[:3]] = torch.tensor([0, m, min(1, m)])
    return counts.int()


def by_moe(rows: Tensor, experts: Tensor, weights: oxmoe.ExpertWeights) -> Tensor:
    """Computes every row with its expert through `moe`."""
    ones = torch.ones((len(rows), 1), device=rows.device)
    return oxmoe.moe(rows, weights, ones, experts[:, None].to(rows.device, torch.int32))


def check_masked(
    x: Tensor, weights: oxmoe.ExpertWeights, counts: Tensor, *, given: Tensor | None = None, **options: Any
) -> None:
    """Checks that valid rows have moe's bits, and that no other row is read or written. `given`: the tensor passed for
    x."""
    experts, m = x.shape[:2]
    valid = torch.arange(m)[None, :] < counts[:, None]
    poisoned = (x if given is None else given).clone()
    if poisoned.dtype != torch.float8_e4m3fn:
        poisoned[~valid.to(x.device)] = torch.nan
    out = torch.full_like(x, torch.nan)
    poison = out.clone()
    workspace = make_workspace(oxmoe.masked_workspace_bytes(weights, experts * m), x.device)
    before = poisoned.view(torch.uint8).clone()
    arguments = (poisoned, weights, counts.to(x.device))
    assert oxmoe.moe_masked(*arguments, out=out, workspace=workspace, **options) is out
    assert same_bits(poisoned.view(torch.uint8), before)
    places = valid.to(x.device)
    expected = by_moe(x[places], torch.arange(experts)[:, None].expand(-1, m)[valid], weights)
    assert same_bits(out[places], expected)
    assert same_bits(out[~places], poison[~places])
    # The next call has its own workspace and output; the one after it works in place.
    again = oxmoe.moe_masked(*arguments, **options)
    assert again.shape == x.shape and same_bits(again[places], expected)
    if given is None:
        assert oxmoe.moe_masked(*arguments, out=poisoned, **options) is poisoned
        assert same_bits(poisoned[places], expected)


@formats
@pytest.mark.parametrize("m", [1, 5, 33, 130])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_masked(device: str, format: str, shape: Shape, m: int, rng: torch.Generator) -> None:
    weights = make(format, shape, device, rng)
    x = draw(shape, format, m, device, rng)
    for expected_m in (None, 1, 20, 50, 1000) if device == "cuda" else (None,):
        check_masked(x, weights, some_counts(shape.experts, m, rng), expected_m=expected_m)


@formats
def test_edges(device: str, format: str, rng: torch.Generator) -> None:
    """Experts have no rows, counts beyond m and below 0, and m = 0."""
    shape = SHAPES[0]
    weights = make(format, shape, device, rng)
    x = draw(shape, format, 7, device, rng)
    check_masked(x, weights, torch.zeros(6, dtype=torch.int32))
    check_masked(x, weights, torch.full((6,), 7, dtype=torch.int32))
    for wild, meant in (([99, -5, 2**31 - 1, 0, 7, 8], [7, 0, 7, 0, 7, 7]), ([-(2**31)] * 6, [0] * 6)):
        wanted = oxmoe.moe_masked(x, weights, torch.tensor(meant, dtype=torch.int32, device=device))
        got = oxmoe.moe_masked(x, weights, torch.tensor(wild, dtype=torch.int32, device=device))
        for expert, count in enumerate(meant):
            assert same_bits(got[expert, :count], wanted[expert, :count])
    empty = oxmoe.moe_masked(x[:, :0], weights, torch.zeros(6, dtype=torch.int32, device=device))
    assert empty.shape == (6, 0, shape.hidden)


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [1, 64, 128, 129])
def test_tiles_of_many_experts(experts: int, rng: torch.Generator) -> None:
    """With up to 128 experts, one launch finds their tiles and runs both GEMMs."""
    shape = Shape("many", experts, 1, 256, 64)
    weights = make("mxfp4", shape, "cuda", rng)
    x = draw(shape, "mxfp4", 40, "cuda", rng)
    for expected_m in (1, 12, 40):
        counts = some_counts(experts, 40, rng) if experts > 3 else torch.tensor([17], dtype=torch.int32)
        check_masked(x, weights, counts, expected_m=expected_m)


@pytest.mark.gpu
def test_two_streams_and_any_workspace(rng: torch.Generator) -> None:
    """Calls that may overlap have separate counters, also on more workspaces than there are counters for."""
    shape, m = Shape("streams", 16, 1, 512, 256), 24
    weights = make("mxfp4", shape, "cuda", rng)
    inputs = [draw(shape, "mxfp4", m, "cuda", rng) for _ in range(2)]
    counts = [some_counts(16, m, rng).cuda() for _ in range(2)]
    size = -(-oxmoe.masked_workspace_bytes(weights, 16 * m) // 1024) * 1024
    room = make_workspace(300 * size, torch.device("cuda"))
    spaces = [room[i * size : (i + 1) * size] for i in range(300)]
    valid = [torch.arange(m, device="cuda")[None] < count[:, None] for count in counts]
    expected = [
        oxmoe.moe_masked(*given)[rows] for *given, rows in zip(inputs, [weights] * 2, counts, valid, strict=True)
    ]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results: list[tuple[int, Tensor]] = []
    for _ in range(100):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results.append((i, oxmoe.moe_masked(inputs[i], weights, counts[i], workspace=spaces[i])))
    torch.cuda.synchronize()
    results += [(0, oxmoe.moe_masked(inputs[0], weights, counts[0], workspace=space)) for space in spaces]
    for i, result in results:
        assert same_bits(result[valid[i]], expected[i])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(device: str, name: str, rng: torch.Generator) -> None:
    shape = Shape(name, 4, 1, 136, 136).with_options(**ACTIVATIONS[name])
    weights = make("bf16", shape, device, rng)
    check_masked(draw(shape, "bf16", 20, device, rng), weights, some_counts(4, 20, rng))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("format", ["bf16", "mxfp4"])
def test_portable_shapes(device: str, format: str, rng: torch.Generator) -> None:
    """Hopper's kernels do not take these numbers of columns."""
    shape = Shape("h130-i70", 3, 1, 130, 70, bias=True)
    if format == "mxfp4":
        shape = Shape("h160-i96", 3, 1, 160, 96, bias=True)
        weights = make_blocks(shape, "bf16", device, rng).weights(hidden_size=150)
        x = torch.randn((3, 21, 150), generator=rng).bfloat16().to(device)
    else:
        weights, x = make(format, shape, device, rng), draw(shape, format, 21, device, rng)
    check_masked(x, weights, some_counts(3, 21, rng))


@pytest.mark.parametrize("m", [9, 300])
def test_one_scale_for_all_rows(device: str, m: int, rng: torch.Generator) -> None:
    """fp8_tensor takes the largest magnitude of the rows that count, not of rows beyond the mask."""
    shape = SHAPES[0]
    weights, x = make("fp8_tensor", shape, device, rng), draw(shape, "fp8_tensor", m, device, rng)
    counts = some_counts(shape.experts, m, rng).to(device)
    valid = torch.arange(m, device=device)[None, :] < counts[:, None]
    wild = x.where(valid[..., None], 1e4)
    for expected_m in (1, 20, 100):
        got, wanted = (oxmoe.moe_masked(given, weights, counts, expected_m=expected_m)[valid] for given in (wild, x))
        assert same_bits(got, wanted)


@pytest.mark.parametrize("m", [21, 300])
@pytest.mark.parametrize("format", FP8_TENSOR)
def test_quantised_x_of_one_scale_a_matrix(device: str, format: str, m: int, rng: torch.Generator) -> None:
    """GEMM1 reads e4m3 rows with scales of 128 columns as they are."""
    shape = SHAPES[0]
    weights, x = make(format, shape, device, rng), draw(shape, format, m, device, rng)
    counts = some_counts(shape.experts, m, rng).to(device)
    valid = torch.arange(m, device=device)[None, :] < counts[:, None]
    codes, scales = quantize.per_token_group_quant_fp8(x, 128)
    owners = torch.arange(shape.experts, device=device)[:, None].expand(-1, m)[valid][:, None].int()
    ones = torch.ones(owners.shape, device=device)
    expected = oxmoe.moe(chosen(codes, valid), weights, ones, owners, x_scale=scales[valid])
    for expected_m in (1, 20, 100):
        got = oxmoe.moe_masked(codes, weights, counts, x_scale=scales, expected_m=expected_m)
        assert same_bits(got[valid], expected)


def on_cpu(operands: Any) -> Any:
    """Returns the same layer's operands on the CPU."""
    fields = {field.name: getattr(operands, field.name) for field in dataclasses.fields(operands)}
    return dataclasses.replace(operands, **{k: v.cpu() for k, v in fields.items() if isinstance(v, Tensor)})


def devices_norm(format: str) -> float:
    """Returns the bar of the norm between GPU and CPU. Sums of tensor cores keep 14 bits. A number that rounds
    otherwise moves the second GEMM's codes: all of a row or of a call, if it is the largest."""
    return 4e-2 if format in ("mxfp4-a8", "fp8_tensor") else 2e-2


@pytest.mark.gpu
@quantised_formats
@pytest.mark.parametrize("counts", [[0, 1, 33, 130, 7, 2], [130] * 6, [0, 0, 130, 0, 0, 0], [1] * 6], ids=str)
@pytest.mark.parametrize("expected_m", [1, 15, 30, 80, 200])
def test_both_devices(format: str, counts: list[int], expected_m: int, rng: torch.Generator) -> None:
    """The GPU has the CPU backend's results in every tile, with NaN in rows beyond the counts."""
    shape, m = Shape("both", 6, 1, 512, 384, bias=True), 130
    operands = make_operands(format, shape, "cuda", rng)
    x, mask = draw(shape, format, m, "cuda", rng), torch.tensor(counts, dtype=torch.int32)
    valid = torch.arange(m)[None, :] < mask[:, None]
    x[~valid.cuda()] = torch.nan
    out = torch.full_like(x, 7.0)
    oxmoe.moe_masked(x, weights_of(format, operands), mask.cuda(), expected_m=expected_m, out=out)
    assert bool((out[~valid.cuda()] == 7.0).all())
    wanted = oxmoe.moe_masked(x.cpu(), weights_of(format, on_cpu(operands)), mask)
    assert relative_norm(out.cpu()[valid], wanted[valid]) < devices_norm(format)


@pytest.mark.gpu
@quantised_formats
def test_twice_in_a_row(format: str, rng: torch.Generator) -> None:
    """Calls that are queued up behind each other in one workspace, with other counts, give what each gives alone."""
    shape, m = Shape("queued", 16, 1, 1024, 512), 128
    weights = make(format, shape, "cuda", rng)
    inputs = [draw(shape, format, m, "cuda", rng) for _ in range(8)]
    masks = [some_counts(16, m, rng).cuda() for _ in range(8)]
    workspace = make_workspace(oxmoe.masked_workspace_bytes(weights, 16 * m), "cuda")
    alone = [oxmoe.moe_masked(*call) for call in zip(inputs, [weights] * 8, masks, strict=True)]
    torch.cuda.synchronize()
    outs = [torch.full_like(x, 7.0) for x in inputs]
    for x, mask, out in zip(inputs, masks, outs, strict=True):
        oxmoe.moe_masked(x, weights, mask, out=out, workspace=workspace)
    for out, expected, mask in zip(outs, alone, masks, strict=True):
        valid = torch.arange(m, device="cuda")[None, :] < mask[:, None]
        assert same_bits(out[valid], expected[valid]) and bool((out[~valid] == 7.0).all())


@pytest.mark.gpu
def test_a_part_of_the_columns(rng: torch.Generator) -> None:
    """mxfp4-a8 pads the codes of rows to whole blocks."""
    shape = Shape("h160-i96", 3, 1, 160, 96, bias=True)
    weights = make_blocks(shape, "bf16", "cuda", rng).weights(activation_dtype=torch.float8_e4m3fn, hidden_size=152)
    x = torch.randn((3, 21, 152), generator=rng).bfloat16().cuda()
    for expected_m in (1, 21, 100):
        check_masked(x, weights, some_counts(3, 21, rng), expected_m=expected_m)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("form", ["rows", "columns", "packed"])
def test_quantised_x(device: str, form: str, rng: torch.Generator) -> None:
    """x comes as DeepEP sends it: e4m3 with scales row by row, column-major, or packed powers of two."""
    shape, m = Shape("fp8", 5, 1, 640, 256), 37
    weights = make("fp8_block", shape, device, rng)
    x = draw(shape, "fp8_block", m, device, rng)
    counts = some_counts(5, m, rng)
    codes, scales = quantize.per_token_group_quant_fp8(x, 128)
    if form == "rows":
        check_masked(x, weights, counts, given=codes, x_scale=scales)
        return
    if form == "columns":
        turned = scales.transpose(1, 2).contiguous().transpose(1, 2)
        assert not turned.is_contiguous()
        check_masked(x, weights, counts, given=codes, x_scale=turned)
        return
    powers = torch.randint(118, 123, (5, m, 5), generator=rng, dtype=torch.int32)
    plain = (powers << 23).view(torch.float32).to(device)
    room = torch.nn.functional.pad(powers, (0, 3)).view(5, m, 2, 4)
    packed = sum(room[..., i] << 8 * i for i in range(4)).to(torch.int32).to(device)
    packed = packed.transpose(1, 2).contiguous().transpose(1, 2)
    mask = counts.to(device)
    got = oxmoe.moe_masked(codes, weights, mask, x_scale=packed)
    wanted = oxmoe.moe_masked(codes, weights, mask, x_scale=plain)
    for expert, count in enumerate(counts.tolist()):
        assert same_bits(got[expert, :count], wanted[expert, :count])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("m", [1, 37])
@pytest.mark.parametrize("hidden", [128, 512])
def test_packed_scales_of_one_column(device: str, hidden: int, m: int, rng: torch.Generator) -> None:
    """Column-major scales have one int32 a row: torch takes such a tensor for a contiguous one, whatever its strides
    are."""
    shape = Shape("fp8", 3, 1, hidden, 128)
    weights = make("fp8_block", shape, device, rng)
    codes, _ = quantize.per_token_group_quant_fp8(draw(shape, "fp8_block", m, device, rng), 128)
    powers = torch.randint(118, 123, (3, m, hidden // 128), generator=rng, dtype=torch.int32)
    plain = (powers << 23).view(torch.float32).to(device)
    word = sum(powers[..., i] << 8 * i for i in range(hidden // 128)).to(device)
    # DeepEP aligns columns: they are a multiple of four rows apart in every expert.
    packed = torch.empty(3, 1, -(-m // 4) * 4, dtype=torch.int32, device=device).transpose(1, 2)[:, :m]
    packed.copy_(word[..., None])
    assert packed.stride(-1) != 1
    mask = torch.full((3,), m, dtype=torch.int32, device=device)
    wanted = oxmoe.moe_masked(codes, weights, mask, x_scale=plain)
    assert same_bits(oxmoe.moe_masked(codes, weights, mask, x_scale=packed), wanted)
    column = torch.empty_strided((3 * m, 1), (1, 4 * m), dtype=torch.int32, device=device).copy_(word.reshape(-1, 1))
    assert column.is_contiguous() and column.stride(-1) != 1
    flat = oxmoe.moe_contiguous(codes.reshape(3 * m, hidden), weights, mask, x_scale=column)
    assert same_bits(flat.view_as(wanted), wanted)


# Contiguous rows


@formats
@pytest.mark.parametrize("alignment", [1, 8, 128])
def test_contiguous(device: str, format: str, alignment: int, rng: torch.Generator) -> None:
    shape = SHAPES[0]
    weights = make(format, shape, device, rng)
    counts = some_counts(6, 40, rng)
    starts, end = [], 0
    for count in counts.tolist():
        starts.append(end)
        end += -(-count // alignment) * alignment
    rows = end + 3
    owner = torch.full((rows,), -1)
    for expert, (start, count) in enumerate(zip(starts, counts.tolist(), strict=True)):
        owner[start : start + count] = expert
    x = torch.randn((rows, shape.hidden), generator=rng).to(DTYPES.get(format, torch.bfloat16)).to(device)
    places = (owner >= 0).to(device)
    expected = by_moe(x[places], owner[owner >= 0], weights)
    poisoned = x.clone()
    poisoned[~places] = torch.nan
    out = torch.full_like(x, torch.nan)
    workspace = make_workspace(oxmoe.masked_workspace_bytes(weights, rows), device)
    poison = out.clone()
    oxmoe.moe_contiguous(poisoned, weights, counts.to(device), alignment=alignment, out=out, workspace=workspace)
    assert same_bits(out[places], expected) and same_bits(out[~places], poison[~places])
    if format == "fp8_tensor":
        return  # one scale for all rows: fewer rows would change it
    # Rows beyond the end of x do not count.
    cut = rows - 20
    short = oxmoe.moe_contiguous(x[:cut].contiguous(), weights, counts.to(device), alignment=alignment)
    assert same_bits(short[places[:cut]], expected[: int(places[:cut].sum())])
    # m_indices gives every row's expert, in any order.
    order = torch.randperm(rows, generator=rng)
    shuffled, owners = x[order.to(device)], owner[order].int().to(device)
    mixed = oxmoe.moe_contiguous(shuffled, weights, m_indices=owners)
    out = torch.full_like(x, torch.nan)
    workspace = make_workspace(oxmoe.workspace_bytes(weights, rows, 1), device)
    given = oxmoe.moe_contiguous(shuffled, weights, m_indices=owners, out=out, workspace=workspace)
    assert given is out and same_bits(out, mixed)
    # A workspace that is too small is refused, so the given one is used.
    with pytest.raises(ValueError, match="workspace: expected at least"):
        oxmoe.moe_contiguous(shuffled, weights, m_indices=owners, workspace=make_workspace(0, device))
    back = torch.empty_like(mixed)
    back[order.to(device)] = mixed
    assert same_bits(back[places], expected) and bool((back[~places] == 0).all())


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_indices_of_numpy(dtype: str, rng: torch.Generator) -> None:
    """With numpy arrays the indices are one, too, as the ids of `moe` are."""
    layer = make_layer(TINY, torch.float32, "cpu", rng)
    x, owners = make_x(7, TINY, torch.float32, "cpu", rng), torch.tensor([5, -1, 0, 3, 3, -1, 1])
    expected = oxmoe.moe_contiguous(x, layer.weights(), m_indices=owners)
    weights = oxmoe.ExpertWeights.f32(layer.w13.numpy(), layer.w2.numpy())
    made = oxmoe.moe_contiguous(x.numpy(), weights, m_indices=owners.numpy().astype(dtype))  # type: ignore[arg-type]
    assert isinstance(made, numpy.ndarray) and same_bits(torch.from_numpy(made), expected)
    assert bool(expected[0].any()) and not expected[1].any()
    wrong = numpy.array([0, 1, 2, 3, 4, 5, 6], dtype=dtype)
    with pytest.raises(ValueError, match=r"^m_indices: row 6: expected -1 \(no expert\) or 0 to 5, got 6$"):
        oxmoe.moe_contiguous(x.numpy(), weights, m_indices=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^m_indices: expected dtype int32 or int64, got uint8$"):
        oxmoe.moe_contiguous(x.numpy(), weights, m_indices=wrong.astype("uint8"))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("form", ["rows", "columns", "packed"])
def test_quantised_rows_with_their_experts(device: str, form: str, rng: torch.Generator) -> None:
    """With m_indices and x_scale, rows come in any order, as with counts."""
    shape, rows = Shape("fp8", 5, 1, 640, 256), 37
    weights = make("fp8_block", shape, device, rng)
    counts = some_counts(5, rows // 5, rng)
    owner = torch.arange(5).repeat_interleave(counts)
    x = torch.randn((len(owner), 640), generator=rng).bfloat16().to(device)
    codes, plain = quantize.per_token_group_quant_fp8(x, 128)
    powers = torch.randint(118, 123, plain.shape, generator=rng, dtype=torch.int32)
    scales = plain
    if form == "packed":
        plain = (powers << 23).view(torch.float32).to(device)
        room = torch.nn.functional.pad(powers, (0, 3)).view(len(owner), 2, 4)
        scales = sum(room[..., i] << 8 * i for i in range(4)).to(torch.int32).T.contiguous().T.to(device)
    wanted = oxmoe.moe_contiguous(codes, weights, counts.to(device), x_scale=plain)
    order = torch.randperm(len(owner), generator=rng)
    there = order.to(device)
    mixed_scales = scales[there] if form == "rows" else scales[there].T.contiguous().T
    owners = owner[order].int().to(device)
    mixed = oxmoe.moe_contiguous(chosen(codes, there), weights, m_indices=owners, x_scale=mixed_scales)
    assert same_bits(mixed, wanted[there])


# Refusals


def test_what_is_refused(rng: torch.Generator) -> None:
    shape = SHAPES[0]
    weights = make("bf16", shape, "cpu", rng)
    x, counts = draw(shape, "bf16", 4, "cpu", rng), torch.ones(6, dtype=torch.int32)
    room = torch.zeros((7, 4, shape.hidden), dtype=torch.bfloat16)
    masked: Callable[..., Tensor] = functools.partial(oxmoe.moe_masked, x, weights)
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, "masked_m: expected dtype int32", lambda: masked(counts.long())),
        (ValueError, "masked_m: dimension 0", lambda: masked(counts[:5])),
        (ValueError, "x: expected 3 dimensions", lambda: oxmoe.moe_masked(x[0], weights, counts)),
        (ValueError, 'x: dimension 2 "hidden"', lambda: oxmoe.moe_masked(x[..., :8].contiguous(), weights, counts)),
        (ValueError, 'x: dimension 0 "experts"', lambda: oxmoe.moe_masked(x[:5], weights, counts)),
        (ValueError, "x: expected dtype bfloat16", lambda: oxmoe.moe_masked(x.half(), weights, counts)),
        (NotImplementedError, "x_scale with bf16", lambda: masked(counts, x_scale=torch.ones(6, 4, 2))),
        (ValueError, "expected_m", lambda: masked(counts, expected_m=-1)),
        (ValueError, "out: overlaps x", lambda: oxmoe.moe_masked(room[:-1], weights, counts, out=room[1:])),
        (ValueError, "workspace: expected at least", lambda: masked(counts, workspace=make_workspace(64, "cpu"))),
        (ValueError, "out: dimension 1", lambda: masked(counts, out=torch.empty_like(x[:, :3]).contiguous())),
        (ValueError, "one of the two", lambda: oxmoe.moe_contiguous(x[0], weights)),
        (ValueError, "alignment", lambda: oxmoe.moe_contiguous(x[0], weights, counts, alignment=0)),
        (ValueError, "expected_m", lambda: oxmoe.moe_contiguous(x[0], weights, counts, expected_m=-1)),
        (
            ValueError,
            "alignment: is an option of counts, but m_indices were given, got 4",
            lambda: oxmoe.moe_contiguous(x[0], weights, m_indices=counts[:4], alignment=4),
        ),
        (
            ValueError,
            "workspace: expected at least",
            lambda: oxmoe.moe_contiguous(x[0], weights, counts, workspace=make_workspace(64, "cpu")),
        ),
        (ValueError, r"m_indices: expected \[M\]", lambda: oxmoe.moe_contiguous(x[0], weights, m_indices=counts[None])),
    ]
    for error, words, call in cases:
        with pytest.raises(error, match=words):
            call()
    codes = x.to(torch.float8_e4m3fn)
    fp8 = make("fp8_block", shape, "cpu", rng)
    with pytest.raises(ValueError, match="x_scale: dimension 2"):
        oxmoe.moe_masked(codes, fp8, counts, x_scale=torch.ones(6, 4, 3))
    with pytest.raises(ValueError, match="x: expected dtype bfloat16"):
        oxmoe.moe_masked(codes, fp8, counts)


# The schedule kernel


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> HostCtas:
    kernels = {"schedule": ("Schedule", "ScheduleParams")}
    return HostCtas(tmp_path_factory.mktemp("schedule"), ["moe/schedule.cuh"], kernels, 900)


def ceil(size: int, parts: int) -> int:
    return (size + parts - 1) // parts


def tiles_of(counts: list[int], rows_each: int, alignment: int, rows: int, sizes: tuple[int, int]) -> list[list[int]]:
    tile, step = sizes
    tiles, following = [], 0
    for expert, given in enumerate(counts):
        wanted = min(max(given, 0), rows)
        first = expert * rows_each if rows_each else min(following, rows)
        count = min(wanted, rows_each if rows_each else rows - first)
        following += ceil(wanted, alignment) * alignment
        parts, steps, start = ceil(count, tile), ceil(count, step), 0
        for part in range(parts):
            size = min((steps // parts + (part < steps % parts)) * step, count - start)
            tiles.append([expert, first + start, size, 0])
            start += size
    return tiles


@pytest.mark.parametrize("sizes", [(16, 16), (64, 16), (192, 16), (192, 64)], ids=str)
@pytest.mark.parametrize("experts", [1, 31, 32, 33, 70, 256, 1024, 1057, 2100])
def test_schedule_kernel(kernel: HostCtas, experts: int, sizes: tuple[int, int], rng: torch.Generator) -> None:
    """The GPU kernel's code runs on the host."""
    most = 120 if sizes[0] < 120 else 900
    each = most - 20
    for rows_each, alignment, rows in (
        (each, 1, each * experts),
        (0, 1, each // 2 * experts),
        (0, 128, 900),
        (0, 8, 2**30),
    ):
        counts = torch.randint(-3, most, (experts,), generator=rng).int()
        counts[torch.randperm(experts, generator=rng)[: experts // 8]] = 0
        if rows == 900:
            counts[:2] = 2**31 - 1
        expected = tiles_of(counts.tolist(), rows_each, alignment, rows, sizes)
        tiles = torch.full((len(expected) + 2, 4), -7, dtype=torch.int32)
        counters, total = torch.full((3,), -7, dtype=torch.int32), torch.full((2,), -7, dtype=torch.int32)
        kernel.run(
            "schedule",
            1,
            experts,
            row_counts=counts.data_ptr(),
            experts=experts,
            rows_each=rows_each,
            alignment=alignment,
            rows=rows,
            tile_tokens=sizes[0],
            tile_step=sizes[1],
            tiles=tiles.data_ptr(),
            tile_count=total.data_ptr(),
            counters=counters.data_ptr(),
            counter_count=2,
        )
        assert total.tolist() == [len(expected), -7] and counters.tolist() == [0, 0, -7]
        assert tiles.tolist() == [*expected, [-7] * 4, [-7] * 4]


# CUDA graphs


@pytest.mark.parametrize(("device", "format"), cuda_formats)
@pytest.mark.parametrize("expected_m", [1, 24, 100])
def test_replays(device: str, format: str, expected_m: int, rng: torch.Generator) -> None:
    """One graph is replayed with other counts and rows each time, and replays are queued up behind each other."""
    shape, m = Shape("graph", 16, 1, 512, 384), 200
    weights = make(format, shape, "cuda", rng)
    x, counts = draw(shape, format, m, "cuda", rng), torch.zeros(16, dtype=torch.int32, device="cuda")
    out, workspace = torch.empty_like(x), make_workspace(oxmoe.masked_workspace_bytes(weights, 16 * m), "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        oxmoe.moe_masked(x, weights, counts, expected_m=expected_m, out=out, workspace=workspace)
    inputs = [draw(shape, format, m, "cuda", rng) for _ in "abc"]
    masks = [some_counts(16, m, rng).cuda() for _ in range(20)] + [torch.zeros_like(counts)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    wanted = [oxmoe.moe_masked(inputs[i % 3], weights, mask) for i, mask in enumerate(masks)]
    for replay in range(210):
        mask = masks[replay % 21]
        x.copy_(inputs[replay % 21 % 3])
        counts.copy_(mask)
        out.fill_(7.0)
        graph.replay()
        valid = torch.arange(m, device="cuda")[None, :] < mask[:, None]
        wrong += ((out != wanted[replay % 21]).any(-1) & valid).sum() + ((out != 7.0).any(-1) & ~valid).sum()
    assert int(wrong) == 0


def test_packed_scales_are_those_of_moe(rng: torch.Generator) -> None:
    """Every byte stands for the same number, the least and NaN included, and other numbers of words are refused."""
    hidden, intermediate = 640, 128
    tables = torch.full((2, 2, 5), 2.0**100), torch.full((2, 5, 1), 2.0**20)
    codes = torch.ones((2, 256, hidden)).to(torch.float8_e4m3fn), torch.ones((2, hidden, 128)).to(torch.float8_e4m3fn)
    weights = oxmoe.ExpertWeights.fp8_block(*codes, *tables)
    assert weights.intermediate_size == intermediate
    x = torch.ones((2, 1, hidden)).to(torch.float8_e4m3fn)
    ones, ids = torch.ones((2, 1)), torch.arange(2, dtype=torch.int32)[:, None]
    counts = torch.ones(2, dtype=torch.int32)
    for byte in (0, 1, 20, 255):
        scales = torch.full((2, 1, 8), byte, dtype=torch.uint8).view(torch.int32)
        expected = oxmoe.moe(x[:, 0], weights, ones, ids, x_scale=scales[:, 0])
        assert bool((expected != 0).all()), f"byte {byte} shows nothing"
        assert same_bits(oxmoe.moe_masked(x, weights, counts, x_scale=scales)[:, 0], expected)
        in_order = oxmoe.moe_contiguous(x[:, 0], weights, counts, x_scale=scales[:, 0].contiguous())
        assert same_bits(in_order, expected)
    for words in (1, 3):
        scales = torch.full((2, 1, words), 0x7F7F7F7F, dtype=torch.int32)
        with pytest.raises(ValueError, match=rf"x_scale: expected int32 \[2, 1, 2\] .* got shape \[2, 1, {words}\]"):
            oxmoe.moe_masked(x, weights, counts, x_scale=scales)
