"""Right calls of the quantisers, of dense MXFP8 and of the functions of numbers alone. See `fuzz_calls.py`."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

import oxmoe
from cases import Shape, make_layer
from fuzz_calls import E4M3, Call, Operands, as_torch, contract, same
from oxmoe import _oxmoe, dense, nvfp4, quantize, reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def draw_matrix(rng: random.Random, generator: torch.Generator, step: int, *, dtypes: Any = FLOATS) -> Tensor:
    """Returns [..., K], K a multiple of step, with numbers over many binades."""
    columns = step * rng.choice((1, 1, 2, 3, 5))
    rows = rng.choice(((), (0,), (1,), (3,), (9,), (33,), (2, 5)))
    powers = torch.exp2(torch.randint(-6, 7, (*rows, columns), generator=generator).float())
    return (torch.randn((*rows, columns), generator=generator) * powers).to(rng.choice(dtypes))


def rows_of(x: Tensor) -> Tensor:
    assert x.dtype in FLOATS and x.ndim >= 1, f"{x.dtype} {tuple(x.shape)} was taken"
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def draw_mxfp8_quantize(rng: random.Random, generator: torch.Generator) -> Call:
    operands: Operands = {"input": draw_matrix(rng, generator, 32)}
    if rng.random() < 0.5:
        operands["alignment"] = rng.choice((32, 64, 128))
    if rng.random() < 0.5:
        operands["sf_swizzle_layout"] = rng.choice((0, 1, 2))

    def check(before: Operands, result: Any) -> None:
        x = rows_of(before["input"])
        if x.numel() == 0:
            return None
        codes, scales = reference.mxfp8_groups(x)
        got, got_scales = (as_torch(part) for part in result)
        alignment = before.get("alignment", 32)
        columns = -(-x.shape[1] // alignment) * alignment
        assert got.shape == (*before["input"].shape[:-1], columns), f"codes: shape {tuple(got.shape)}"
        got = got.reshape(-1, columns)
        same(got[:, : x.shape[1]].contiguous().view(E4M3), codes, "codes")
        padded = torch.zeros((x.shape[0], columns // 32), dtype=torch.uint8)
        padded[:, : scales.shape[1]] = scales
        layout = before.get("sf_swizzle_layout")
        if layout == 2:
            return same(got_scales, padded.flatten(), "scales")
        return same(got_scales, quantize.swizzle_scales(padded, "8x4" if layout == 1 else "128x4"), "scales")

    return Call("mxfp8_quantize", lambda operands: dense.mxfp8_quantize(**operands), operands, check)


def draw_mxfp8_dequantize(rng: random.Random, generator: torch.Generator) -> Call:
    x = draw_matrix(rng, generator, 32)
    layout = rng.choice((0, 1, 2))
    codes, scales = oxmoe.mxfp8_quantize(x, sf_swizzle_layout=layout)
    operands: Operands = {"input": codes, "scale_tensor": scales, "sf_swizzle_layout": layout}

    def check(before: Operands, result: Any) -> None:
        codes, scales, layout = (before.get(name) for name in ("input", "scale_tensor", "sf_swizzle_layout"))
        assert codes.dtype in (E4M3, torch.uint8), f"{codes.dtype} was taken"
        rows, blocks = math.prod(codes.shape[:-1]), codes.shape[-1] // 32
        if layout == 2:
            plain = scales.view(rows, blocks)
        else:
            plain = quantize.unswizzle_scales(scales, rows, blocks, "8x4" if layout == 1 else "128x4")
        expected = reference.mxfp8_weights(codes, plain.view(*codes.shape[:-1], blocks), torch.float32)
        # Numbers beyond fp32 are infinity here; the reference is that of weights, which saturate.
        largest = torch.finfo(torch.float32).max
        expected = torch.where(expected.abs() == largest, expected.sign() * math.inf, expected)
        same(result, expected, "numbers")

    def run(operands: Operands) -> Any:
        return dense.mxfp8_dequantize_host(**operands)

    return Call("mxfp8_dequantize_host", run, operands, check)


def draw_mxfp4(rng: random.Random, generator: torch.Generator) -> Call:
    operands: Operands = {"x": draw_matrix(rng, generator, 32)}
    if rng.random() < 0.5:
        operands["rounding"] = rng.choice(("up", "down"))

    def check(before: Operands, result: Any) -> None:
        x = rows_of(before["x"])
        codes, scales = (as_torch(part) for part in result)
        assert codes.shape == (*before["x"].shape[:-1], x.shape[1] // 2), f"codes: shape {tuple(codes.shape)}"
        numbers = reference.mxfp4_weights(codes, scales, torch.float32).reshape(x.shape)
        # A step between 4 and 6 is 2 scales, so a number that is not clipped is off by at most one; 6 is the largest
        # number.
        steps = torch.exp2(scales.reshape(x.shape[0], x.shape[1] // 32).double() - 127).repeat_interleave(32, 1)
        if not bool(x.isfinite().all()):
            return
        error = (numbers.double() - x.double()).abs()
        assert bool((error <= steps * (1 if before.get("rounding", "up") == "up" else 2)).all()), "numbers are off"

    return Call("quantize.mxfp4", lambda operands: quantize.mxfp4(**operands), operands, check)


def draw_dequantize(rng: random.Random, generator: torch.Generator) -> Call:
    rows, blocks = rng.choice((0, 1, 3, 9)), rng.randint(1, 4)
    operands: Operands = {
        "codes": torch.randint(0, 256, (rows, 16 * blocks), generator=generator, dtype=torch.uint8),
        "scales": torch.randint(0, 256, (rows, blocks), generator=generator, dtype=torch.uint8),
    }
    if rng.random() < 0.5:
        operands["dtype"] = rng.choice(("float32", "float16", "bfloat16", torch.float16))

    def check(before: Operands, result: Any) -> None:
        codes, scales = before["codes"], before["scales"]
        lead = "A B D E F".split()[: max(codes.ndim - 1, 0)] if isinstance(codes, Tensor) else ["R"]
        contract(before, codes=" ".join([*lead, "C"]), scales=" ".join([*lead, "G"]))
        name = str(before.get("dtype") or "float32").rpartition(".")[2]
        flat = (part.reshape(math.prod(part.shape[:-1]), part.shape[-1]) for part in (codes, scales))
        expected = reference.mxfp4_weights(*flat, getattr(torch, name))
        same(result, expected.view(*codes.shape[:-1], 2 * codes.shape[-1]), "numbers")

    return Call("quantize.dequantize", lambda operands: quantize.dequantize(**operands), operands, check)


def draw_rows_e4m3(rng: random.Random, generator: torch.Generator) -> Call:
    operands: Operands = {"x": draw_matrix(rng, generator, rng.choice((1, 8, 32)), dtypes=(torch.bfloat16,))}

    def check(before: Operands, result: Any) -> None:
        if before["x"].shape[-1] == 0:
            return
        codes, scales = reference.rows_e4m3(before["x"])
        same(as_torch(result[1]), scales, "scales")
        same(as_torch(result[0]).view(E4M3), codes, "codes")

    return Call("quantize.rows_e4m3", lambda operands: quantize.rows_e4m3(**operands), operands, check)


def draw_groups(rng: random.Random, generator: torch.Generator) -> Call:
    group = rng.choice((16, 32, 64, 128))
    operands: Operands = {"x": draw_matrix(rng, generator, group), "group_size": group}
    if rng.random() < 0.3:
        operands["eps"] = rng.choice((1e-10, 1e-6, 1.0))
    if operands["x"].ndim == 2 and rng.random() < 0.5:
        operands["column_major_scales"] = True
        operands["scale_tma_aligned"] = rng.random() < 0.5

    def check(before: Operands, result: Any) -> None:
        x = before["x"]
        if rows_of(x).numel() == 0:
            return
        codes, scales = reference.fp8_groups(x, before["group_size"], before.get("eps", 1e-10))
        same(as_torch(result[1]), scales, "scales")
        same(as_torch(result[0]).view(E4M3), codes, "codes")

    def run(operands: Operands) -> Any:
        return quantize.per_token_group_quant_fp8(**operands)

    return Call("per_token_group_quant_fp8", run, operands, check)


def draw_fp4(rng: random.Random, generator: torch.Generator) -> Call:
    x = draw_matrix(rng, generator, 16)
    operands: Operands = {"input": x[None] if x.ndim == 1 else x, "is_sf_swizzled_layout": False}
    if rng.random() < 0.7:
        operands["global_scale"] = torch.rand(1, generator=generator) + 0.5

    columns_first = []

    def run(operands: Operands) -> Any:
        x = operands.get("input")
        columns_first.append(isinstance(x, Tensor) and x.ndim > 1 and x.stride(-2) == 1)
        return nvfp4.fp4_quantize(**operands)

    def check(before: Operands, result: Any) -> None:
        x = before["input"]
        scale = before.get("global_scale")
        if x.dtype == E4M3 and (scale is None or scale.numel() == 1):
            x = (x.float() * (6.0 / (1.0 if scale is None else scale.float().cpu().reshape(())))).half()
        x = rows_of(x)
        if x.numel() == 0 or columns_first[-1] or (scale is not None and not 0 < scale.item() < math.inf):
            return
        codes, scales = reference.nvfp4(x, 1.0 if scale is None else scale.item())
        got = as_torch(result[0]).reshape(x.shape[0], x.shape[1] // 2)
        same(got, codes[:, 0::2] | codes[:, 1::2] << 4, "codes")
        if not before.get("is_sf_swizzled_layout", True):
            same(as_torch(result[1]).view(E4M3).reshape(scales.shape), scales.to(E4M3), "scales")

    return Call("nvfp4.fp4_quantize", run, operands, check)


def draw_pack(rng: random.Random, generator: torch.Generator) -> Call:
    """Draws codes and scales that go through one of the layouts and back."""
    batch, rows, blocks = rng.choice(((), (1,), (3,))), rng.choice((1, 2, 8, 64, 66, 130)), rng.randint(1, 5)
    name = rng.choice(("pack_mxfp4", "swizzle_hopper_mxfp4", "interleave_sm90_mxfp4"))
    options: Operands = {}
    if name == "pack_mxfp4" and rng.random() < 0.5:
        rows += rows % 2
        options = {"gated": True, "layout": rng.choice(("gate_up", "up_gate", "interleaved"))}
    elif name == "swizzle_hopper_mxfp4":
        options = {"num_warps": rng.choice((4, 8)), "row_multiple": rng.choice((64, 256))}
    elif name == "interleave_sm90_mxfp4":
        options = {"flashinfer": rng.choice(("0.6", "0.7"))}
        rows, blocks = 64 * rng.randint(1, 3), 4 * rng.randint(1, 2)
    operands: Operands = {
        "codes": torch.randint(0, 256, (*batch, rows, 16 * blocks), generator=generator, dtype=torch.uint8),
        "scales": torch.randint(0, 255, (*batch, rows, blocks), generator=generator, dtype=torch.uint8),
        **options,
    }

    def run(operands: Operands) -> Any:
        return getattr(_oxmoe, name)(**operands)

    def check(before: Operands, result: Any) -> None:
        codes, scales = before["codes"], before["scales"].view(torch.uint8)
        given = tuple(as_torch(part) for part in result)
        sizes = {"rows": codes.shape[-2], "columns": 2 * codes.shape[-1]}
        if name == "pack_mxfp4":
            chosen = {key: before[key] for key in ("gated", "layout") if key in before}
            back = _oxmoe.unpack_mxfp4(*given, **sizes, **chosen)
            # Packing drops the codes of NaN blocks.
            codes = codes.masked_fill((scales == 255).repeat_interleave(16, -1), 0)
        elif name == "swizzle_hopper_mxfp4":
            back = _oxmoe.unswizzle_hopper_mxfp4(*given, **sizes, num_warps=before.get("num_warps", 8))
        else:
            back = _oxmoe.deinterleave_sm90_mxfp4(*given)
        same(back[0], codes.view(torch.uint8), "codes there and back")
        same(back[1], scales[..., : back[1].shape[-1]], "scales there and back")

    return Call(name, run, operands, check)


def draw_unpack(rng: random.Random, generator: torch.Generator) -> Call:
    """Draws a packed weight that goes back to its checkpoint's form."""
    batch, rows, blocks = rng.choice(((), (2,))), rng.choice((1, 64, 66)), rng.randint(1, 3)
    codes = torch.randint(0, 256, (*batch, rows, 16 * blocks), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (*batch, rows, blocks), generator=generator, dtype=torch.uint8)
    packed = _oxmoe.pack_mxfp4(codes, scales)
    operands: Operands = dict(zip(("codes", "scales", "expert_scales"), packed, strict=True))
    operands |= {"rows": rows, "columns": 32 * blocks}

    def check(before: Operands, result: Any) -> None:
        if not torch.equal(before["codes"], packed[0]) or not torch.equal(
            before["scales"].view(torch.uint8), packed[1]
        ):
            return
        fewer, columns = int(before["rows"]), int(before["columns"])
        assert 0 <= fewer <= -(-rows // 64) * 64 and 0 <= columns <= 64 * -(-blocks // 2), (
            "more was taken than there is"
        )
        # The result may have more rows and columns than the weight: those beyond are padding, which is 0.
        padded = torch.zeros((2, *batch, fewer, columns // 2), dtype=torch.uint8)
        both = min(rows, fewer), min(columns, 32 * blocks)
        padded[0][..., : both[0], : both[1] // 2] = codes[..., : both[0], : both[1] // 2]
        padded[1][..., : both[0], : both[1] // 32] = scales[..., : both[0], : both[1] // 32]
        same(result[0], padded[0], "codes")
        same(result[1], padded[1][..., : columns // 32], "scales")

    return Call("unpack_mxfp4", lambda operands: _oxmoe.unpack_mxfp4(**operands), operands, check)


def draw_dense(rng: random.Random, generator: torch.Generator) -> Call:
    m, n, k = rng.choice((0, 1, 3, 17)), rng.choice((1, 7, 40)), 32 * rng.randint(1, 4)

    def draw(rows: int) -> tuple[Tensor, Tensor]:
        codes = torch.randn((rows, k), generator=generator).mul_(100).clamp_(-448, 448).to(E4M3)
        return codes, torch.randint(118, 124, (rows, k // 32), generator=generator, dtype=torch.uint8)

    (a, a_scale), (b, b_scale) = draw(m), draw(n)
    operands: Operands = {"a": a, "b": b.t(), "a_descale": a_scale, "b_descale": b_scale.t()}
    if rng.random() < 0.5:
        operands["a_descale"] = quantize.swizzle_scales(a_scale)
    dtype = rng.choice((torch.bfloat16, torch.float16))
    if rng.random() < 0.5:
        operands |= {"out_dtype": dtype}
        if rng.random() < 0.6:
            operands["out"] = torch.full((m, n), 7.0, dtype=dtype)

    def check(before: Operands, result: Any) -> None:
        contract(before, a="M K", b="K N", out="M N")
        a, b, a_scale, b_scale = (before[name] for name in ("a", "b", "a_descale", "b_descale"))
        rows, columns = a.shape
        if a_scale.ndim == 1:
            layout = "8x4" if before.get("use_8x4_sf_layout") else "128x4"
            a_scale = quantize.unswizzle_scales(a_scale, rows, columns // 32, layout)
        if b_scale.ndim == 1:
            b_scale = quantize.unswizzle_scales(b_scale, b.shape[1], columns // 32).t()
        left = reference.mxfp8_weights(a, a_scale, torch.float32).double()
        right = reference.mxfp8_weights(b.t().contiguous(), b_scale.t().contiguous(), torch.float32).double()
        name = str(before.get("out_dtype") or "bfloat16").rpartition(".")[2]
        expected = (left @ right.T).to(getattr(torch, name))
        got = as_torch(result)
        assert got.dtype == expected.dtype and got.shape == expected.shape, f"{got.dtype} {tuple(got.shape)}"
        # Beyond 2^128, elements times scales are infinity when they are multiplied.
        calm = (left.abs().amax(1) < 2.0**100).logical_and(left.isfinite().all(1)) if columns else torch.ones(rows) > 0
        got, expected = got[calm], expected[calm]
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3, equal_nan=True)

    return Call("mm_mxfp8", lambda operands: oxmoe.mm_mxfp8(**operands), operands, check, ("out",))


def draw_linear(rng: random.Random, generator: torch.Generator) -> Call:
    n, k = rng.choice((1, 7, 40)), 32 * rng.randint(1, 4)
    x = torch.randn((*rng.choice(((), (0,), (3,), (2, 4))), k), generator=generator).to(rng.choice(FLOATS))
    weight = torch.randn((n, k), generator=generator).mul_(100).clamp_(-448, 448).to(E4M3)
    operands: Operands = {"input": x, "weight": weight}
    operands["weight_scale"] = torch.randint(118, 124, (n, k // 32), generator=generator, dtype=torch.uint8)
    if rng.random() < 0.5:
        operands["bias"] = torch.randn(n, generator=generator).to(x.dtype)

    def check(before: Operands, result: Any) -> None:
        contract(before, weight="N K", weight_scale="N G", bias="N")
        rows = reference.mxfp8_weights(*reference.mxfp8_groups(before["input"]), torch.float32).double()
        right = reference.mxfp8_weights(before["weight"], before["weight_scale"], torch.float32).double()
        dtype = before.get("output_dtype") or before["input"].dtype
        expected = (rows @ right.T).to(dtype)
        if before.get("bias") is not None:
            expected = (expected + before["bias"]).to(dtype)
        # An element of x may lie on the border of two codes, a step of its block's scale apart.
        calm = expected.isfinite()
        torch.testing.assert_close(as_torch(result)[calm], expected[calm], rtol=2e-2, atol=3e-2)

    return Call("mxfp8_linear", lambda operands: oxmoe.mxfp8_linear(**operands), operands, check)


def draw_packed_topk(rng: random.Random, generator: torch.Generator) -> Call:
    shape = (rng.choice((0, 1, 5)), rng.randint(1, 4))
    operands: Operands = {
        "topk_weights": torch.rand(shape, generator=generator).to(rng.choice(FLOATS)),
        "topk_ids": torch.randint(-1, 300, shape, generator=generator),
    }

    def check(before: Operands, result: Any) -> None:
        if result.device.type == "meta":
            return  # the operands are meta tensors
        contract(before, topk_weights="T k", topk_ids="T k")
        weights, ids = oxmoe.unpack_topk(result)
        same(weights, before["topk_weights"].to(torch.bfloat16).float(), "weights")
        same(ids, before["topk_ids"].to(torch.int32), "ids")

    return Call("pack_topk", lambda operands: oxmoe.pack_topk(**operands), operands, check)


# Functions of numbers


def draw_bytes(rng: random.Random, generator: torch.Generator) -> Call:
    layer = make_layer(Shape("fuzz", 3, 2, 16, 16), torch.bfloat16, "cpu", generator)
    masked = rng.random() < 0.5
    operands: Operands = {"weights": layer.weights(), "num_rows" if masked else "num_tokens": rng.randint(0, 5000)}
    if not masked:
        operands["top_k"] = rng.randint(1, 3)
    function = oxmoe.masked_workspace_bytes if masked else oxmoe.workspace_bytes

    def check(before: Operands, result: Any) -> None:
        # A mutated number may be a tensor of a narrow integer type, whose products would wrap.
        rows = int(before["num_rows"]) if masked else int(before["num_tokens"]) * int(before["top_k"])
        # The rows of GEMM1 and GEMM2 alone take 2 x 16 bf16 each.
        assert isinstance(result, int) and result >= rows * (32 if masked else 64), f"{result} bytes for {rows} rows"
        assert result % 256 == 0, f"{result} bytes"

    return Call(function.__name__, lambda operands: function(**operands), operands, check)


def draw_explain(rng: random.Random, generator: torch.Generator) -> Call:
    experts = rng.randint(1, 256)
    operands: Operands = {
        "num_experts": experts,
        "top_k": rng.randint(1, min(experts, 9)),
        "hidden_size": 128 * rng.randint(1, 60),
        "intermediate_size": 128 * rng.randint(1, 60),
        "num_tokens": rng.choice((1, 2, 8, 100, 5000)),
        "format": rng.choice(("bf16", "f16", "mxfp4", "mxfp4-a8", "fp8_block", "fp8_tensor", "mxfp8", "nvfp4", "int4")),
        "gated": rng.random() < 0.8,
        "arch": rng.choice(("sm_80", "sm_90", "sm_100", "sm_120", "cpu")),
        "routing": rng.choice((None, "logits", "ids")),
    }
    if operands["format"] == "mxfp4-a8":
        operands["arch"] = rng.choice(("sm_90", "cpu"))

    def check(before: Operands, result: Any) -> None:
        assert isinstance(result, str) and "workspace" in result, result
        assert "-" not in result.partition("workspace")[2][:12], result

    return Call("explain", lambda operands: oxmoe.explain(**operands), operands, check)


def draw_allreduce_bytes(rng: random.Random, generator: torch.Generator) -> Call:
    operands: Operands = {
        "world_size": rng.choice((2, 4, 8)),
        "max_token_num": rng.randint(1, 4096),
        "hidden_dim": 8 * rng.randint(1, 1024),
        "dtype": rng.choice(("bfloat16", "float16", "float32")),
        "device": rng.choice(("cpu", "cuda")),
    }

    def check(before: Operands, result: Any) -> None:
        message = int(before["max_token_num"]) * int(before["hidden_dim"]) * (4 if before["dtype"] == "float32" else 2)
        assert isinstance(result, int), result
        assert result >= (message if before.get("device", "cpu") == "cuda" else 0), (
            f"{result} bytes for messages of {message}"
        )

    return Call("allreduce_bytes", lambda operands: _oxmoe.allreduce_bytes(**operands), operands, check)
