"""The layers that are timed: shapes of real models, their operands, routings, the roofline and the check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oxmoe import reference
from oxmoe.formats.drawn import Experts, own_formats
from oxmoe.testing import FP8_BAR, assert_close_ulp, relative_norm
from oxmoe.tools.bench import floors
from oxmoe.tools.shapes import GPT_OSS as GPT_OSS
from oxmoe.tools.shapes import SHAPES as SHAPES
from oxmoe.tools.shapes import ModelShape
from oxmoe.tools.shapes import Shape as Shape

# Format -> (dtype of activations, bits of a weight with its share of a scale).
FORMATS = {
    "bf16": (torch.bfloat16, 16.0),
    "f16": (torch.float16, 16.0),
    "mxfp4": (torch.bfloat16, 4.25),
    "mxfp4-a8": (torch.bfloat16, 4.25),
    "fp8_block": (torch.bfloat16, 8.0),
    "mxfp8": (torch.bfloat16, 8.25),
    "nvfp4": (torch.bfloat16, 4.5),
    "nvfp4-a4": (torch.bfloat16, 4.5),
    **{name: (torch.bfloat16, own.bits) for name, own in own_formats().items()},
    "fp8_tensor": (torch.bfloat16, 8.0),
    "fp8_tensor-token": (torch.bfloat16, 8.0),
    "fp8_tensor-static": (torch.bfloat16, 8.0),
}

# "uniform": logits are noise. "given": ids and weights of the same choice are given. "hot": half of the tokens have
# expert 0 as their first. "one": ids are given, and every slot has expert 0. "grouped": logits are noise, and the
# router is DeepSeek-V3's: sigmoid, bias, half of the groups.
PATTERNS = ("uniform", "given", "hot", "one", "grouped")


def activations(format_name: str) -> str | None:
    """Returns where the scales of activations come from, for e4m3 experts with one scale a matrix; None for other
    formats."""
    return format_name.partition("-")[2] or "tensor" if format_name.startswith("fp8_tensor") else None


@dataclass(frozen=True)
class Mxfp4:
    """MXFP4 experts as a checkpoint has them. An index gives the bf16 numbers of one expert: no layer exists twice."""

    codes: Tensor  # uint8 [E, R, K / 2]
    scales: Tensor  # E8M0 as uint8 [E, R, K / 32]

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, columns = self.codes.shape
        return experts, rows, 2 * columns

    def __getitem__(self, expert: int) -> Tensor:
        return reference.mxfp4_weights(self.codes[expert], self.scales[expert])


@dataclass(frozen=True)
class Fp8Block:
    """e4m3 experts with a scale for each 128 x 128 weights."""

    codes: Tensor  # float8_e4m3fn [E, R, K]
    scales: Tensor  # fp32 [E, R / 128, K / 128]


@dataclass(frozen=True)
class Mxfp8:
    """e4m3 experts with an E8M0 scale for 32 columns. An index gives the bf16 numbers of one expert."""

    codes: Tensor  # float8_e4m3fn [E, R, K]
    scales: Tensor  # E8M0 as uint8 [E, R, K / 32]

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def __getitem__(self, expert: int) -> Tensor:
        return reference.mxfp8_weights(self.codes[expert], self.scales[expert])


@dataclass(frozen=True)
class Nvfp4:
    """NVFP4 experts. An index gives the bf16 numbers of one expert."""

    codes: Tensor  # uint8 [E, R, K / 2]
    scales: Tensor  # float8_e4m3fn [E, R, K / 16]
    factor: float  # the global scale, a power of two

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, columns = self.codes.shape
        return experts, rows, 2 * columns

    def __getitem__(self, expert: int) -> Tensor:
        return reference.nvfp4_numbers(self.codes[expert], self.scales[expert]).mul_(self.factor).bfloat16()


@dataclass(frozen=True)
class Weights:
    w13: Any  # [E, 2I, H]: a tensor, Mxfp4, Fp8Block, Mxfp8, Nvfp4 or Experts
    w2: Any  # [E, H, I]
    b13: Tensor | None = None  # [E, 2I]
    b2: Tensor | None = None  # [E, H]
    activation_dtype: torch.dtype | None = None  # dtype that Mxfp4's activations are quantised to
    # Scales of the activations of e4m3 experts with one scale a matrix: "tensor", "token", or the scales of x and of
    # GEMM1's output.
    activation_scales: Any = None
    # Factor of Nvfp4's rows before they are rounded to NVFP4; None: rows are not rounded.
    activation_rounding: float | None = None

    def dense(self) -> Weights:
        """Returns the same numbers as plain tensors."""
        if not isinstance(self.w13, (Mxfp4, Nvfp4, Experts)):
            return self
        w13, w2 = (torch.stack([pack[expert] for expert in range(pack.shape[0])]) for pack in (self.w13, self.w2))
        return replace(self, w13=w13, w2=w2)


@dataclass(frozen=True)
class Inputs:
    x: Tensor  # [T, H]
    router_logits: Tensor  # fp32 [T, E]
    chosen: tuple[Tensor, Tensor] | None = None  # weights fp32 and ids int32 [T, k], in place of the logits
    router: dict[str, Any] = field(default_factory=dict)  # how experts are chosen from the logits, as options of topk

    def routing(self, top_k: int) -> dict[str, Any]:
        """Returns the routing as arguments of oxmoe.moe and of the reference."""
        if self.chosen is None:
            return {"router_logits": self.router_logits, "top_k": top_k, **self.router}
        return {"topk_weights": self.chosen[0], "topk_ids": self.chosen[1]}


def make_weights(
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    count: int,
    *,
    mxfp4: bool = False,
    fp8_block: bool = False,
    fp8_tensor: str | None = None,
    mxfp8: bool = False,
    nvfp4: str | None = None,
    own: str | None = None,
    activation_dtype: torch.dtype | None = None,
) -> list[Weights]:
    """Makes `count` layers, scaled so that activations and outputs are of size one. MX scales differ by up to 4.
    fp8_tensor: where the scales of activations come from ("tensor", "token", "static"). nvfp4: "nvfp4" or "nvfp4-a4".
    own: a format of `oxmoe.formats`."""

    def e4m3(experts: int, rows: int, columns: int) -> Tensor:
        codes = torch.empty((experts, rows, columns), dtype=torch.float8_e4m3fn, device=device)
        for expert in codes:
            expert.copy_(torch.randn((rows, columns), device=device).mul_(100).clamp_(-448, 448))
        return codes

    def small(experts: int, rows: int, columns: int) -> Mxfp8:
        byte = 127 - round(math.log2(100 * columns**0.5))
        scales = torch.randint(byte - 1, byte + 2, (experts, rows, columns // 32), dtype=torch.uint8, device=device)
        return Mxfp8(e4m3(experts, rows, columns), scales)

    def fp8(experts: int, rows: int, columns: int) -> Fp8Block:
        codes = e4m3(experts, rows, columns)
        sizes = -(-rows // 128), -(-columns // 128)
        scales = torch.rand((experts, 1, 1) if fp8_tensor else (experts, *sizes), device=device) + 0.5
        scales = scales.expand(experts, *sizes).contiguous()
        return Fp8Block(codes, scales.mul_(0.01 * columns**-0.5))

    def blocks(experts: int, rows: int, columns: int) -> Mxfp4:
        codes = torch.randint(256, (experts, rows, columns // 2), dtype=torch.uint8, device=device)
        byte = 127 - round(math.log2(2.9 * columns**0.5))
        scales = torch.randint(byte - 1, byte + 2, (experts, rows, columns // 32), dtype=torch.uint8, device=device)
        return Mxfp4(codes, scales)

    def small_blocks(experts: int, rows: int, columns: int) -> Nvfp4:
        codes = torch.randint(256, (experts, rows, columns // 2), dtype=torch.uint8, device=device)
        scales = torch.rand((experts, rows, columns // 16), device=device).add_(0.5).mul_(16).to(torch.float8_e4m3fn)
        return Nvfp4(codes, scales, 2.0 ** -round(math.log2(2.9 * 16 * columns**0.5)))

    def randn(*size: int, scale: float) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device).mul_(scale)

    def layer() -> Weights:
        experts, hidden, intermediate = shape.experts, shape.hidden, shape.intermediate
        w13: Any
        w2: Any
        scales: Any = fp8_tensor
        if fp8_tensor == "static":
            scales = torch.tensor(5 / 448, device=device), torch.tensor(5 / 448, device=device)
        if fp8_block or fp8_tensor:
            w13, w2 = fp8(experts, 2 * intermediate, hidden), fp8(experts, hidden, intermediate)
        elif mxfp8:
            w13, w2 = small(experts, 2 * intermediate, hidden), small(experts, hidden, intermediate)
        elif nvfp4:
            w13, w2 = small_blocks(experts, 2 * intermediate, hidden), small_blocks(experts, hidden, intermediate)
        elif own:
            draw = own_formats()[own].draw
            w13, w2 = draw(experts, 2 * intermediate, hidden, device), draw(experts, hidden, intermediate, device)
        elif mxfp4:
            w13, w2 = blocks(experts, 2 * intermediate, hidden), blocks(experts, hidden, intermediate)
        else:
            w13 = randn(experts, 2 * intermediate, hidden, scale=hidden**-0.5)
            w2 = randn(experts, hidden, intermediate, scale=intermediate**-0.5)
        rounding = 512.0 if nvfp4 == "nvfp4-a4" else None
        if not shape.gpt_oss:
            return Weights(w13, w2, None, None, activation_dtype, scales, rounding)
        b13, b2 = randn(experts, 2 * intermediate, scale=0.5), randn(experts, hidden, scale=0.5)
        return Weights(w13, w2, b13, b2, activation_dtype, scales, rounding)

    return [layer() for _ in range(count)]


def weights_of(format_name: str, shape: Shape, device: str, count: int) -> list[Weights]:
    """Makes `count` layers of a format, by its name in FORMATS ("fp8_block-bf16" has the weights of fp8_block)."""
    dtype = FORMATS[format_name.removesuffix("-bf16")][0]
    return make_weights(
        shape,
        dtype,
        device,
        count,
        mxfp4=format_name.startswith("mxfp4"),
        fp8_block=format_name.startswith("fp8_block"),
        fp8_tensor=activations(format_name),
        mxfp8=format_name == "mxfp8",
        nvfp4=format_name if format_name.startswith("nvfp4") else None,
        own=format_name if format_name in own_formats() else None,
        activation_dtype=torch.float8_e4m3fn if format_name == "mxfp4-a8" else None,
    )


def make_inputs(
    shape: Shape,
    tokens: int,
    dtype: torch.dtype,
    device: str,
    count: int,
    pattern: str = "uniform",
    router: dict[str, Any] | None = None,
) -> list[Inputs]:
    """Makes the inputs of `count` layers. router: options of topk, with which a correction bias is drawn, too. Without
    it the pattern says how experts are chosen."""

    def layer() -> Inputs:
        x = torch.randn(tokens, shape.hidden, dtype=dtype, device=device)
        logits = torch.randn(tokens, shape.experts, device=device)
        if pattern == "one":
            weights = torch.full((tokens, shape.top_k), 1 / shape.top_k, device=device)
            return Inputs(x, logits, (weights, torch.zeros((tokens, shape.top_k), dtype=torch.int32, device=device)))
        if pattern == "hot":
            half = (tokens + 1) // 2
            logits[:half, 0] = logits[:half].amax(1) + 0.5
        if router:
            return Inputs(x, logits, None, router | {"correction_bias": torch.rand(shape.experts, device=device)})
        if pattern == "grouped":
            groups = 8 if shape.experts % 32 == 0 else 1
            drawn = {"scoring_func": "sigmoid", "num_expert_group": groups, "topk_group": (groups + 1) // 2}
            return Inputs(x, logits, None, drawn | {"correction_bias": torch.rand(shape.experts, device=device)})
        plain = Inputs(x, logits)
        if pattern == "given":
            weights, ids = choose(plain, shape.top_k)
            return replace(plain, chosen=(weights, ids.int()))
        return plain

    return [layer() for _ in range(count)]


def activated(sums: Tensor, shape: Shape) -> Tensor:
    """Returns GEMM1's sums [..., 2I] after the layer's activation, in their dtype."""
    if shape.gpt_oss or shape.situ or isinstance(shape, ModelShape):
        return reference.activate(sums, **shape.options)
    gate, up = sums.chunk(2, dim=-1)
    if shape.limit is not None:
        gate, up = gate.clamp(max=shape.limit), up.clamp(-shape.limit, shape.limit)
    return F.silu(gate) * up


def choose(inputs: Inputs, top_k: int) -> tuple[Tensor, Tensor]:
    """Returns the choice of the input's own router, or the given one, or in plain torch softmax, top-k,
    renormalised."""
    if inputs.chosen is not None:
        return inputs.chosen
    if inputs.router:
        return reference.topk(inputs.router_logits, top_k, **inputs.router)
    weights, ids = torch.softmax(inputs.router_logits, dim=-1).topk(top_k)
    return weights / weights.sum(-1, keepdim=True), ids


def floors_of(
    shape: Shape, inputs: Sequence[Inputs], device: str, format_name: str, weight_bits: float
) -> floors.Floors | None:
    """Returns the floors of one layer, with the experts that these inputs choose; None on a CPU."""
    known = floors.ceilings(device)
    if known is None:
        return None
    tokens = inputs[0].x.shape[0]
    active = sum(choose(item, shape.top_k)[1].unique().numel() for item in inputs) / len(inputs)
    call = floors.Call(tokens, tokens * shape.top_k, shape.hidden, shape.intermediate, active)
    return floors.floors(call, format_name, weight_bits, known)


def expected(shape: Shape, weights: Weights, inputs: Inputs, *, rounded: bool = True) -> Tensor:
    """Returns the reference's result. rounded=False: activations of MXFP8 weights stay as they are."""
    w13, w2, scales = weights.w13, weights.w2, {}
    if isinstance(w13, Fp8Block) or (isinstance(w13, Mxfp8) and rounded):
        scales = {"w13_scale": w13.scales, "w2_scale": w2.scales}
        w13, w2 = w13.codes, w2.codes
    return reference.moe(
        inputs.x,
        w13,
        w2,
        **scales,
        b13=weights.b13,
        b2=weights.b2,
        **shape.options,
        **inputs.routing(shape.top_k),
        activation_dtype=weights.activation_dtype,
        activation_scales=weights.activation_scales,
    )


def error(result: Tensor, truth: Tensor, format_name: str) -> str | None:
    """Returns what is wrong with oxmoe's result, or None. In some formats activations are quantised on their way."""
    if format_name == "mxfp4-a8" or format_name.startswith("fp8_tensor"):
        # A value that rounds to its neighbour in e4m3 is a sixteenth off, and perhaps its whole row with it.
        return peer_error(result, truth, most=4e-2)
    if format_name == "nvfp4-a4":
        # The reference's rows are not rounded.
        return peer_error(result, truth, most=2.5e-1)
    try:
        assert_close_ulp(result, truth, FP8_BAR if format_name in ("fp8_block", "mxfp8") else None)
    except AssertionError as failure:
        return str(failure)
    return None


def peer_error(result: Tensor, truth: Tensor, most: float = 2e-2) -> str | None:
    """Returns why a peer does not compute the same layer, or None. The bar is wide, because peers round in more
    places."""
    norm = relative_norm(result, truth)
    return None if norm < most else f"computes something else: relative norm {norm:.3g}"
