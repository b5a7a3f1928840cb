"""int4 weights of flashinfer's `cutlass_fused_moe`, which it runs on Hopper as W4A8: what becomes of their scales.

Source: flashinfer/fused_moe/prepare.py, csrc/fused_moe/cutlass_backend and tests/moe/test_trtllm_cutlass_fused_moe.py
of 0.6.11 and 0.7. There a GEMM reads e4m3(input * activation scale of the column), and its sums are multiplied by the
expert's alpha. oxmoe does not round to e4m3. So alphas and activation scales become factors of the weights' scales. The
exception is a scale of fc1's input that differs within a group of columns: the input is multiplied by it at each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oxmoe._oxmoe import ExpertWeights
from oxmoe.operands import as_bytes
from oxmoe.peers.flashinfer_cutlass_formats import name_of

if TYPE_CHECKING:
    from torch import Tensor

_GROUP = 128  # columns that share a scale
# Gated activations whose output is proportional to up, if there is no limit and no beta.
_PROPORTIONAL = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class InputScaledExperts:
    """int4 experts whose input is multiplied by a number for each column before the layer. `prepare_cutlass_fused_moe`
    makes them of activation scales of fc1 that differ within 128 columns, and `cutlass_fused_moe` takes them as
    weights. `moe` would not multiply the input, and does not take them.
    """

    weights: ExpertWeights
    input_scale: Tensor  # fp32 [H]

    def scaled(self, input: Tensor) -> Tensor:
        """Returns input * input_scale in the input's dtype, rounded once."""
        import torch

        if input.shape[1] != self.input_scale.numel():
            raise ValueError(f"input: expected [T, {self.input_scale.numel()}], got shape {tuple(input.shape)}")
        return torch.mul(input, self.input_scale, out=torch.empty_like(input))


def prepared(
    fc1: Tensor, fc2: Tensor, quant_scales: Sequence[Tensor], options: dict[str, Any], *, dtype: str
) -> ExpertWeights | InputScaledExperts:
    """Makes int4 experts of interleaved weights and eight scales. They hold copies, made on the weights' device."""

    from oxmoe.formats import int4

    if dtype != "bf16" and fc1.is_cuda:
        raise NotImplementedError(f"output_dtype: no int4 kernel for {dtype}; served is torch.bfloat16")
    matrices = []
    for place, (name, weights) in enumerate((("fc1_expert_weights", fc1), ("fc2_expert_weights", fc2))):
        try:
            matrices.append(int4.from_sm90(as_bytes("weights", weights), quant_scales[place]))
        except ValueError as error:
            operand, _, rest = str(error).partition(":")
            raise ValueError(f"{name if operand == 'weights' else f'quant_scales[{place}]'}:{rest}") from error
    (w13, s13, _), (w2, s2, _) = matrices
    experts, hidden, intermediate = w13.shape[0], 2 * w13.shape[2], 2 * w2.shape[2]
    act1, act2, zeros1, zeros2, alpha1, alpha2 = quant_scales[2:]
    for place, zeros in ((4, zeros1), (5, zeros2)):
        if zeros.numel():
            raise NotImplementedError(
                f"quant_scales[{place}]: no kernel for zero points (flashinfer's kernel for Hopper reads none); "
                f"expected an empty tensor, got shape {tuple(zeros.shape)}"
            )
    of_x, of_hidden = _numbers(2, act1, hidden, "hidden"), _numbers(3, act2, intermediate, "intermediate")
    of_sums, of_outputs = (_numbers(place, alpha, experts, "experts") for place, alpha in ((6, alpha1), (7, alpha2)))
    input_scale, x_groups = _split(of_x)
    rows, hidden_groups = _split(of_hidden)
    if input_scale is not None:
        # The largest alpha stays with the input, so that experts with one alpha keep their scales exactly.
        largest = _largest(of_sums)
        input_scale, of_sums = input_scale * largest, of_sums / largest
    s13 = _times(s13, of_sums[:, None, None], x_groups)
    if rows is not None:
        largest = _largest(of_outputs)
        s13, options = _with_rows(s13, rows * largest, options)
        of_outputs = of_outputs / largest
    s2 = _times(s2, of_outputs[:, None, None], hidden_groups)
    made = ExpertWeights.int4(w13, w2, s13, s2, dtype=dtype, **options)
    return made if input_scale is None else InputScaledExperts(made, input_scale.float())


def _numbers(place: int, scale: Tensor, size: int, named: str) -> Tensor:
    """Returns fp64 [size]. An empty tensor stands for ones."""
    import torch

    if scale.numel() == 0:
        return torch.ones(size, dtype=torch.float64, device=scale.device)
    if scale.numel() != size or not scale.is_floating_point():
        raise ValueError(
            f"quant_scales[{place}]: expected {size} numbers ({named}) of floating point, or an empty tensor, got "
            f"{name_of(scale.dtype)} of shape {tuple(scale.shape)}"
        )
    return scale.reshape(-1).double()


def _split(of_columns: Tensor) -> tuple[Tensor | None, Tensor]:
    """Returns activation scales as (None, a factor for each group), or if they differ within a group, (as they are,
    ones)."""
    groups = of_columns.view(-1, _GROUP)
    if bool((groups == groups[:, :1]).all()):
        return None, groups[:, 0]
    return of_columns, groups.new_ones(groups.shape[0])


def _largest(alphas: Tensor) -> Tensor:
    """Returns the alpha of the largest magnitude, or 1 if all are zero or one is not finite."""
    largest = alphas[alphas.abs().argmax()]
    return largest if bool(largest.isfinite() & (largest != 0)) else largest.new_ones(())


def _times(scales: Tensor, *factors: Tensor) -> Tensor:
    """Returns scales times the factors in fp32, or the scales themselves if all factors are 1."""
    product = factors[0]
    for factor in factors[1:]:
        product = product * factor
    return scales if bool((product == 1).all()) else scales.float() * product.float()


def _with_rows(scales: Tensor, factors: Tensor, options: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Returns fc1's scales and options for a layer whose GEMM1's output has these factors for its columns. They become
    factors of fc1's rows of up, and of its biases."""
    import torch

    name, gated = options["activation"], options["gated"]
    beta = options.get("beta", 0.0)
    bounds = {"limit": "limit" in options, "beta": not isinstance(beta, int | float) or beta != 0}
    bounded = [option for option, is_there in bounds.items() if is_there]
    proportional = gated and name in _PROPORTIONAL and not bounded
    if not proportional and not (name == "relu2" and bool((factors >= 0).all())):
        given = f"{name}{'' if gated else ' without a gate'}{' with ' + ' and '.join(bounded) if bounded else ''}"
        raise NotImplementedError(
            f"quant_scales[3]: no kernel for scales of fc2's input that differ within {_GROUP} columns and {given}; "
            "served are gated silu and gelu without swiglu_limit and swiglu_beta, relu2 with scales of 0 or more, and "
            f"scales that each {_GROUP} columns share"
        )
    # Gated rows are [up; gate]. relu(r x)^2 is r^2 relu(x)^2.
    of_rows = torch.cat([factors, torch.ones_like(factors)]) if gated else factors.sqrt()
    bias = options["b13"]
    if bias is not None:
        options = {**options, "b13": bias.float() * of_rows.to(bias.device).float()}
    return _times(scales, of_rows[None, :, None]), options
