"""int4 experts as flashinfer's `cutlass_fused_moe` takes them (W4A8), and the fp64 layer of the same numbers, whose
activations are not rounded."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from cases import Shape
from oxmoe import int4

GROUP = 128


@dataclasses.dataclass
class Experts:
    """Codes are two's complement. A weight is its code times its scale."""

    shape: Shape
    w13: Tensor  # uint8 [E, 2I, H / 2], rows [up; gate]
    w2: Tensor  # uint8 [E, H, I / 2]
    w13_scale: Tensor  # bf16 [E, 2I, H / 128]
    w2_scale: Tensor
    acts: tuple[Tensor, Tensor]  # [H] and [I], or empty
    alphas: tuple[Tensor, Tensor]  # fp32 [E], or empty
    b13: Tensor | None
    b2: Tensor | None

    def arguments(self, release: str = "0.7", dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
        """Returns the arguments of flashinfer's call. Scales are bits of bf16 viewed as dtype, as its tests have
        them."""
        w13, s13 = int4.interleave_sm90(self.w13 ^ 0x88, self.w13_scale, flashinfer=release)
        w2, s2 = int4.interleave_sm90(self.w2 ^ 0x88, self.w2_scale, flashinfer=release)
        empty = self.w13_scale.new_empty(0)
        scales = [s13.view(dtype), s2.view(dtype), *self.acts, empty, empty.clone(), *self.alphas]
        return {
            "fc1_expert_weights": w13,
            "fc2_expert_weights": w2,
            "quant_scales": scales,
            "fc1_expert_biases": self.b13,
            "fc2_expert_biases": self.b2,
            "use_w4_group_scaling": True,
            "use_packed_weights": True,
        }

    def matrices(self, expert: int) -> tuple[Tensor, Tensor]:
        """Returns fp64 w13 and w2 of an expert, with all factors multiplied in."""
        made = []
        for codes, scales, act, alpha in zip(
            (self.w13, self.w2), (self.w13_scale, self.w2_scale), self.acts, self.alphas, strict=True
        ):
            numbers = torch.stack([codes[expert] & 15, codes[expert] >> 4], dim=-1).flatten(-2).double()
            numbers = numbers - 16 * (numbers >= 8)
            numbers *= scales[expert].double().repeat_interleave(GROUP, dim=-1)
            if act.numel():
                numbers *= act.double()
            made.append(numbers * (alpha[expert].double() if alpha.numel() else 1.0))
        return made[0], made[1]

    def expected(
        self, x: Tensor, gates: Tensor, ids: Tensor, *, first: int = 0, has_b2: bool = True, **options: Any
    ) -> Tensor:
        """Returns the fp64 layer of experts `first` and on. options go to `activate`."""
        out = torch.zeros(x.shape[0], self.shape.hidden, dtype=torch.float64, device=x.device)
        for expert in range(self.shape.experts):
            token, slot = torch.nonzero(ids.long() == expert + first, as_tuple=True)
            if not token.numel():
                continue
            w13, w2 = self.matrices(expert)
            sums = x[token].double() @ w13.T
            if self.b13 is not None:
                sums += self.b13[expert].double()
            rows = activate(sums, **options) @ w2.T
            if self.b2 is not None and has_b2:
                rows += self.b2[expert].double()
            out.index_add_(0, token, rows * gates[token, slot].double()[:, None])
        return out


def activate(
    sums: Tensor, name: str = "Swiglu", alpha: float = 1.0, beta: float = 0.0, limit: float | None = None
) -> Tensor:
    """flashinfer's activations (csrc/fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh) in the dtype of sums."""
    if name == "Relu2":
        return sums.clamp(min=0) ** 2
    if name in ("Silu", "Gelu"):
        return sums * torch.sigmoid(sums) if name == "Silu" else torch.nn.functional.gelu(sums)
    up, gate = sums.chunk(2, dim=-1)
    if name == "SwigluStep":
        return (gate * torch.sigmoid(gate)).clamp(max=7.0) * up.clamp(-7.0, 7.0)
    if name == "Situ":
        return 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate) * 25.0 * torch.tanh(up / 25.0)
    if name.startswith("Geglu"):
        return torch.nn.functional.gelu(gate, approximate="tanh" if name == "GegluTanh" else "none") * up
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def draw(
    shape: Shape, device: str, rng: torch.Generator, *, acts: str = "columns", dtype: torch.dtype = torch.bfloat16
) -> Experts:
    """Draws experts with results of size one, some scales negative. acts: scales of the GEMMs' inputs, "columns"
    (AWQ's), "groups" (each 128 columns share one), "one" or "none" (empty tensors, and alphas empty, too)."""
    experts, rows, hidden, intermediate = shape.experts, shape.w13_rows, shape.hidden, shape.intermediate

    def codes(rows: int, columns: int) -> Tensor:
        return torch.randint(256, (experts, rows, columns // 2), generator=rng, dtype=torch.uint8).to(device)

    def scales(rows: int, columns: int) -> Tensor:
        size = (experts, rows, columns // GROUP)
        signs = 1 - 2 * torch.randint(0, 2, size, generator=rng)
        return (signs * (torch.rand(size, generator=rng) + 0.5) / (4.6 * columns**0.5)).bfloat16().to(device)

    def inputs(columns: int) -> tuple[Tensor, Tensor]:
        """Returns activation scales (pre-quantisation scales over the input's) and alphas."""
        if acts == "none":
            return torch.empty(0, dtype=dtype, device=device), torch.empty(0, device=device)
        of_input = torch.rand((), generator=rng) * 0.2 + 0.1
        size = {"columns": columns, "groups": columns // GROUP, "one": 1}[acts]
        smooth = torch.rand(size, generator=rng) + 0.5
        smooth = smooth.repeat_interleave(columns // size)
        alpha = of_input * (torch.rand(experts, generator=rng) + 0.5)
        return (smooth / of_input).to(dtype).to(device), alpha.float().to(device)

    def bias(rows: int) -> Tensor | None:
        return torch.randn((experts, rows), generator=rng).mul(0.5).to(dtype).to(device) if shape.bias else None

    (act1, alpha1), (act2, alpha2) = inputs(hidden), inputs(intermediate)
    return Experts(
        shape, codes(rows, hidden), codes(hidden, intermediate), scales(rows, hidden), scales(hidden, intermediate),
        (act1, act2), (alpha1, alpha2), bias(rows), bias(hidden),
    )  # fmt: skip
