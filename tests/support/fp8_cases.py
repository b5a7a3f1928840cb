"""Operands of fp8 layers, and how their results are checked."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

import oxmoe
from cases import Shape, draws, make_layer, make_routing, make_workspace, make_x
from mxfp4_cases import call
from oxmoe import reference
from oxmoe.testing import FP8_BAR, assert_close_ulp, relative_norm, same_bits

# Shapes with a model's ratios, one block, an odd number of blocks in every place, and sizes that others pad.
SHAPES = (
    Shape("qwen3-small", 16, 8, 256, 128),
    Shape("one-block", 3, 2, 128, 128, bias=True),
    Shape("odd-blocks", 5, 3, 384, 640, bias=True),
    Shape("i1408", 4, 2, 256, 1408),
)
# Shapes whose gate and up rows, and columns of w2, end inside a block (fp8_tensor): the least, less than a block,
# GLM-4.5-Air's between 2, 4 and 8 ranks, and many.
CUT_SHAPES = (
    Shape("i16", 3, 2, 128, 16, bias=True),
    Shape("i96", 4, 2, 256, 96),
    Shape("i176", 5, 2, 384, 176, bias=True),
    Shape("i192", 16, 8, 256, 192),
    Shape("i352", 4, 3, 128, 352, bias=True),
    Shape("i704", 4, 2, 256, 704),
    Shape("i1424", 3, 2, 128, 1424, bias=True),
)
CUT_MODELS = (
    Shape("glm-4.5-air-tp2", 128, 8, 4096, 704),
    Shape("glm-4.5-air-tp4", 128, 8, 4096, 352),
    Shape("glm-4.5-air-tp8", 128, 8, 4096, 176),
    Shape("qwen3-235b-tp8", 128, 8, 4096, 192),
    Shape("qwen3-30b-tp8", 128, 8, 2048, 96),
    Shape("nemotron-3-nano", 128, 6, 2688, 1856).with_options(activation="relu2", gated=False),
)
MODELS = (Shape("qwen3-30b-a3b", 128, 8, 2048, 768), Shape("dsv3-tp8", 256, 8, 7168, 256))

# On CPUs sums differ in the last bits of fp32 alone.
CPU_BAR = dataclasses.replace(FP8_BAR, share=5e-2)
NORM = 1.2e-2
# The bar of the norm if every code may move, for all draws together. A largest number that is a step of bf16 away makes
# 2.2e-2 on average, but in one of a hundred rows of 128 columns above 4.5e-2.
TENSOR_NORM = 4e-2

# Options that a call may have beside its routing.
CALL_OPTIONS: list[dict[str, Any]] = [
    {"no_combine": True},
    {"apply_router_weight_on_input": True},
    {"routed_scaling_factor": 2.5},
    {"ep_size": 2, "ep_rank": 1},
]


@dataclasses.dataclass
class Quantised:
    """The operands of one layer."""

    shape: Shape
    w13: Tensor
    w2: Tensor
    w13_scale: Tensor
    w2_scale: Tensor
    b13: Tensor | None
    b2: Tensor | None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.w13, self.w2, self.w13_scale, self.w2_scale

    @property
    def options(self) -> dict[str, Any]:
        return {"b13": self.b13, "b2": self.b2, **dict(self.shape.options)}

    def x(self, tokens: int, rng: torch.Generator) -> Tensor:
        return make_x(tokens, self.shape, torch.bfloat16, self.w13.device.type, rng)


class Fp8(Quantised):
    """The operands of a layer with a scale for each 128 x 128 block."""

    def weights(self, **options: Any) -> oxmoe.ExpertWeights:
        return oxmoe.ExpertWeights.fp8_block(*self.operands, **{**self.options, **options})


def chosen(codes: Tensor, index: Tensor) -> Tensor:
    """Returns rows of e4m3 codes. torch 2.9 has no index of these by a tensor on CPUs, but one of their bytes."""
    return codes.view(torch.uint8)[index].view(codes.dtype)


def quantize_blocks(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns e4m3 [E, N, K] and fp32 scales [E, N / 128, K / 128]."""
    experts, rows, columns = weights.shape
    codes = torch.empty(weights.shape, dtype=torch.float8_e4m3fn, device=weights.device)
    scales = torch.empty((experts, rows // 128, columns // 128), device=weights.device)
    for expert in range(experts):
        blocks = weights[expert].float().view(rows // 128, 128, columns // 128, 128)
        scale = blocks.abs().amax((1, 3)).clamp(min=1e-10) / 448
        codes[expert] = (blocks / scale[:, None, :, None]).clamp(-448, 448).view(rows, columns).to(codes.dtype)
        scales[expert] = scale
    return codes, scales


def make_fp8(shape: Shape, device: str, rng: torch.Generator, *, bias_dtype: torch.dtype | None = None) -> Fp8:
    plain = make_layer(shape, torch.bfloat16, device, rng, bias_dtype=bias_dtype)
    (w13, w13_scale), (w2, w2_scale) = quantize_blocks(plain.w13), quantize_blocks(plain.w2)
    return Fp8(shape, w13, w2, w13_scale, w2_scale, plain.b13, plain.b2)


def fp8_draws(x: Tensor, intermediate: int) -> list[Tensor]:
    """Returns more draws on a GPU. Its sums have another order than the reference's, so a few in a thousand of GEMM1's
    outputs are another code, a step of an eighth. Many numbers make that a share, not luck.

    intermediate: columns of GEMM1's output. Of 64 rows with 16 of them the norm exceeds NORM in one of a hundred draws
    of a layer, by a model of the tensor cores' sums; of the rows here it stays below 1e-2 in 456 layers.
    """
    return draws(x, max(8, 8192 // min(x.shape[1], intermediate)) if x.is_cuda else 8)


def check(layer: Fp8, x: Tensor, *routing: Tensor, made: oxmoe.ExpertWeights | None = None, **options: Any) -> Tensor:
    """Checks that the result is close to the reference, and returns it."""
    weights = made or layer.weights()
    given = [part.to(x.device) for part in routing]
    results = [call(drawn, weights, *given, **options) for drawn in fp8_draws(x, layer.shape.intermediate)]
    scales = {"w13_scale": layer.w13_scale, "w2_scale": layer.w2_scale}
    expected = [
        reference.moe(drawn, layer.w13, layer.w2, *given, **layer.options, **scales, **options)
        for drawn in fp8_draws(x, layer.shape.intermediate)
    ]
    result, truth = torch.cat(results), torch.cat(expected)
    assert_close_ulp(result, truth, FP8_BAR if x.is_cuda else CPU_BAR)
    finite = truth.isfinite()
    norm = relative_norm(result[finite], truth[finite])
    assert norm < NORM, f"norm {norm:.3g} of the difference to the reference, bar {NORM}"
    return results[0]


# One scale for an expert's matrix

MODES = ("tensor", "token", "static")


@dataclasses.dataclass
class Fp8Tensor:
    """Operands of one layer; a13_scale and a2_scale are near what x and GEMM1's outputs need."""

    shape: Shape
    w13: Tensor
    w2: Tensor
    w13_scale: Tensor  # [E], or [E, 2], or of rows [E, 2I, 1]
    w2_scale: Tensor  # [E], or of rows [E, H, 1]
    a13_scale: Tensor
    a2_scale: Tensor
    b13: Tensor | None
    b2: Tensor | None
    mode: str = "tensor"

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.w13, self.w2, self.w13_scale, self.w2_scale

    @property
    def options(self) -> dict[str, Any]:
        return {"b13": self.b13, "b2": self.b2, **dict(self.shape.options)}

    def scaling(self, mode: str) -> dict[str, Any]:
        """Returns options of ExpertWeights."""
        if mode == "static":
            return {"a13_scale": self.a13_scale, "a2_scale": self.a2_scale}
        return {"per_token": mode == "token"}

    def weights(self, mode: str | None = None) -> oxmoe.ExpertWeights:
        return oxmoe.ExpertWeights.fp8_tensor(*self.operands, **self.scaling(mode or self.mode), **self.options)

    def reference(self, x: Tensor, *routing: Tensor, scales: Any, **options: Any) -> Tensor:
        """Computes the reference. scales: "tensor", "token", or the scales of x and of GEMM1's output."""
        tables = dict(zip(("w13_scale", "w2_scale"), self.tables, strict=True))
        given = [part.to(x.device) for part in routing]
        return reference.moe(
            x, self.w13, self.w2, *given, **self.options, **tables, activation_scales=scales, **options
        )

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Returns scales of w13 and w2 as the reference takes them."""
        return blocks_of(self.w13_scale, self.w13), blocks_of(self.w2_scale, self.w2)

    def x(self, tokens: int, rng: torch.Generator) -> Tensor:
        return make_x(tokens, self.shape, torch.bfloat16, self.w13.device.type, rng)


def blocks_of(scale: Tensor, weights: Tensor) -> Tensor:
    """Returns [E] or [E, 2] as [E, N / 128, K / 128], or as [E, N, 1] if N or K are no multiples of 128. Scales of rows
    stay as they are."""
    experts, rows, columns = weights.shape
    if scale.shape[1:2] == (rows,):
        return scale
    parts = scale.view(experts, -1)
    if rows // parts.shape[1] % 128 or columns % 128:
        return parts.repeat_interleave(rows // parts.shape[1], 1)[..., None]
    return parts.repeat_interleave(rows // 128 // parts.shape[1], 1)[..., None].repeat(1, 1, columns // 128)


def make_fp8_tensor(
    shape: Shape,
    device: str,
    rng: torch.Generator,
    *,
    halves: bool = False,
    of_rows: bool = False,
    mode: str = "tensor",
) -> Fp8Tensor:
    plain = make_layer(shape, torch.bfloat16, device, rng)

    def quantize(weights: Tensor, parts: int) -> tuple[Tensor, Tensor]:
        if of_rows:
            # Rows have different sizes, so that each scale must meet its own row.
            sized = weights.float() * (torch.rand((*weights.shape[:2], 1), generator=rng).to(device) + 0.5)
            scale = sized.abs().amax(-1, keepdim=True) / 448
            return (sized / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale
        halved = weights.float().view(weights.shape[0], parts, -1)
        scale = halved.abs().amax(-1) / 448
        codes = (halved / scale[..., None]).clamp(-448, 448).view(weights.shape).to(torch.float8_e4m3fn)
        return codes, scale if parts > 1 else scale[:, 0]

    (w13, w13_scale), (w2, w2_scale) = quantize(plain.w13, 2 if halves else 1), quantize(plain.w2, 1)
    a13_scale, a2_scale = torch.tensor(3.5 / 448, device=device), torch.tensor([3.0 / 448], device=device)
    return Fp8Tensor(shape, w13, w2, w13_scale, w2_scale, a13_scale, a2_scale, plain.b13, plain.b2, mode)


def peaks_of(workspace: Tensor, layer: Fp8Tensor, tokens: int, slots: int) -> Tensor:
    """Returns the largest magnitudes of x and of GEMM1's output, which a call with one scale for each left in its
    workspace."""
    shape = layer.shape
    text = oxmoe.explain(
        shape.experts,
        slots,
        shape.hidden,
        shape.intermediate,
        tokens,
        format="fp8_tensor",
        gated=shape.gated,
        arch="cpu",
    )
    (counters,) = (int(line.split()[0]) for line in text.splitlines() if line.endswith(" counters"))
    return workspace[counters + 8 : counters + 16].view(torch.float32)


def check_tensor(layer: Fp8Tensor, x: Tensor, *routing: Tensor, mode: str, **options: Any) -> Tensor:
    """Checks that the result is close to the reference, and returns it.

    With one scale for a call, a number of GEMM1's output that rounds to its neighbour moves every code if it is the
    largest. So the reference has the scale that the kernel made, which is that of a number one step of bf16 away.
    """
    weights = layer.weights(mode)
    given = [part.to(x.device) for part in routing]
    slots = given[1].shape[1] if given else options["top_k"]
    results, expected, independents = [], [], []
    for drawn in fp8_draws(x, layer.shape.intermediate):
        workspace = make_workspace(oxmoe.workspace_bytes(weights, drawn.shape[0], slots), x.device)
        results.append(oxmoe.moe(drawn, weights, *given, **options, workspace=workspace))
        scales: Any = (layer.a13_scale, layer.a2_scale) if mode == "static" else mode
        if mode == "tensor" and drawn.shape[0]:
            peaks = peaks_of(workspace, layer, drawn.shape[0], slots)
            acts: list[Tensor] = []
            independents.append(layer.reference(drawn, *given, scales=mode, acts=acts, **options))
            largest = torch.cat(acts).float().abs().nan_to_num(nan=0.0)
            assert peaks[0] == drawn.float().abs().nan_to_num(nan=0.0).max()
            torch.testing.assert_close(peaks[1], largest.max() if largest.numel() else peaks[1] * 0, rtol=2**-7, atol=0)
            scales = tuple(peaks.clamp(min=1e-10) / torch.tensor(448.0, device=x.device))
        expected.append(layer.reference(drawn, *given, scales=scales, **options))
    result, truth = torch.cat(results), torch.cat(expected)
    if independents:
        norm = relative_norm(result.nan_to_num(), torch.cat(independents).nan_to_num())
        assert norm < TENSOR_NORM, f"norm {norm:.3g} with the reference's own scale, bar {TENSOR_NORM}"
    # A code's step is that of the largest number under its scale, a row's or a call's. If sums round otherwise, small
    # results move by many of their own ulp, and the norm tells. test_fp8_stages.py has a bar for every step.
    if not x.is_cuda:
        assert_close_ulp(result, truth, CPU_BAR)
    finite = truth.isfinite()
    norm = relative_norm(result[finite], truth[finite])
    assert norm < NORM, f"norm {norm:.3g} of the difference to the reference, bar {NORM}"
    return results[0]


def check_graph(layer: Any, tokens: int, pattern: str, rng: torch.Generator) -> None:
    """Replays a CUDA graph with other routing each time. `layer`: anything with shape, weights() and x()."""
    shape, made, x = layer.shape, layer.weights(), layer.x(tokens, rng)
    first, second = (
        [part.cuda() for part in make_routing(pattern, tokens, shape.experts, shape.top_k, rng)] for _ in range(2)
    )
    given, out = [part.clone() for part in first], torch.empty_like(x)
    oxmoe.moe(x, made, *given, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        oxmoe.moe(x, made, *given, out=out)
    for routing in (second, first):
        for place, part in zip(given, routing, strict=True):
            place.copy_(part)
        out.fill_(math.nan)
        graph.replay()
        assert same_bits(out, call(x, made, *routing))
