"""Translates what flashinfer's `cutlass_fused_moe` says about its weights into oxmoe's terms: format, activation and
scales.

Source: flashinfer/fused_moe/core.py, csrc/fused_moe/cutlass_backend and tests/moe/test_trtllm_cutlass_fused_moe.py of
0.6.11 and 0.7 (to 0.7.4). Rows of fc1 are [up; gate] in every format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oxmoe import quantize
from oxmoe._oxmoe import ExpertWeights
from oxmoe.operands import as_bytes, check_tensor
from oxmoe.peers.kept import number

if TYPE_CHECKING:
    from torch import Tensor

SWIGLU, SITU = 3, 10  # flashinfer's ActivationType
SERVED = (
    "bf16, f16 and fp32 weights; float8_e4m3fn weights with one scale (4 quant_scales), with "
    "use_deepseek_fp8_block_scale, or with use_mxfp8_act_scaling; MXFP4 weights with use_w4_group_scaling and 16-bit "
    "input; int4 weights with use_w4_group_scaling and use_packed_weights (8 quant_scales); NVFP4 weights "
    "(6 quant_scales)"
)
# flashinfer's ActivationType -> (activation, gated, the value of `clamp`: where the limit bounds the gate, default
# limit).
ACTIVATIONS: dict[str, tuple[str, bool, str, float | None]] = {
    "Swiglu": ("silu", True, "before", None),
    "SwigluBias": ("silu", True, "before", None),
    "SwigluStep": ("silu", True, "after", 7.0),
    "Geglu": ("gelu", True, "before", None),
    "GegluTanh": ("gelu_tanh", True, "before", None),
    "Situ": ("situ", True, "before", None),
    "Silu": ("silu", False, "before", None),
    "Gelu": ("gelu", False, "before", None),
    "Relu2": ("relu2", False, "before", None),
}
FP32_MAX = 3.4028234663852886e38  # flashinfer's limit if none is given
# The default numbers of SiTU, flashinfer's DEFAULT_SITU_BETA and DEFAULT_SITU_LINEAR_BETA: Kimi-K3's numbers.
_SITU = {"situ_beta": 4.0, "situ_linear_beta": 25.0}
# Numbers of flashinfer's ActivationType that mean the same in every release since 0.6.11. 7 to 9 do not: 7 is Identity
# in 0.6.11 and SwigluStep in 0.7.
NUMBERED = {0: "Gelu", 2: "Silu", SWIGLU: "Swiglu", 4: "Geglu", 5: "SwigluBias", 6: "Relu2", SITU: "Situ"}
_PLAIN = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
# Formats whose weights kernels read as they lie: they are described at each call. The others are prepared once.
AS_THEY_LIE = frozenset((*_PLAIN.values(), "fp8_block", "fp8_tensor"))
_SCALES = {
    "mxfp4": "the scales of fc1 and fc2",
    "fp8_block": "the scales of fc1 and fc2",
    "fp8_tensor": "fc1's dequantisation, fc2's quantisation and dequantisation, and the input's dequantisation scale",
    "mxfp8": "the scales of fc1, one number an expert, those of fc2, and one number an expert",
    "nvfp4": "fc1's activation scale, block scales and dequantisation scale, and fc2's",
    "int4": "the scales, activation scales, zero points and alphas, each of fc1 and of fc2",
}
_COUNTS = {"mxfp4": (2,), "fp8_block": (2,), "fp8_tensor": (4,), "mxfp8": (4,), "nvfp4": (6,), "int4": (8,)}


def name_of(dtype: Any) -> str:
    """Converts torch.bfloat16 to "bfloat16"."""
    return str(dtype).rpartition(".")[2]


NAMES = ("fc1_expert_weights", "fc2_expert_weights")
# Dtypes as which flashinfer's callers view packed weights.
PACKED = ("uint8", "int8", "int64", "int32")


def activation_name(activation_type: Any) -> Any:
    """Returns the name of a member of flashinfer's ActivationType, or of a number that means the same in every release.
    Anything else is returned as it is."""
    return getattr(activation_type, "name", None) or NUMBERED.get(activation_type, activation_type)


def activation_of(activation_type: Any) -> str:
    """Returns an activation's name. NOTE: numbers whose meaning changed between flashinfer's releases are refused."""
    name = activation_name(activation_type)
    if name not in ACTIVATIONS:
        numbers = ", ".join(f"{other} ({number})" for number, other in NUMBERED.items())
        others = " and ".join(other for other in ACTIVATIONS if other not in NUMBERED.values())
        raise NotImplementedError(
            f"activation_type: no kernel for {name!r}; served are flashinfer's ActivationType {numbers} and, as "
            f"members of the enumeration, {others}"
        )
    return str(name)


def situ_options(
    name: str, situ_beta: float | None, situ_linear_beta: float | None, swiglu: tuple[float, float, float]
) -> dict[str, Any]:
    """Returns the options of ExpertWeights of flashinfer's CuTe DSL calls, which select SiTU by a situ_beta and the
    activation Swiglu. Without a situ_beta there are none. name: the activation's; swiglu: its alpha, beta and limit."""
    if situ_beta is None:
        if situ_linear_beta is not None:
            raise ValueError("situ_linear_beta: needs situ_beta")
        return {}
    if name != "Swiglu":
        raise ValueError(f"situ_beta: expected ActivationType.Swiglu with it, got {name}")
    if swiglu != (1.0, 0.0, FP32_MAX):
        raise ValueError(f"swiglu_alpha, swiglu_beta, swiglu_limit: not with situ_beta, got {swiglu}")
    return {"activation": "situ", "situ_beta": situ_beta, "situ_linear_beta": situ_linear_beta}


def format_of(
    fc1_expert_weights: Tensor,
    quant_scales: Sequence[Tensor] | None,
    *,
    use_deepseek_fp8_block_scale: bool,
    use_w4_group_scaling: bool,
    use_mxfp8_act_scaling: bool,
    use_packed_weights: bool,
) -> str:
    """Returns the name of the weights' format. Raises NotImplementedError or ValueError if flags, dtype and scales
    do not fit together."""
    dtype, scales = name_of(fc1_expert_weights.dtype), len(quant_scales or ())
    flags = {
        "use_deepseek_fp8_block_scale": use_deepseek_fp8_block_scale,
        "use_w4_group_scaling": use_w4_group_scaling,
        "use_mxfp8_act_scaling": use_mxfp8_act_scaling,
        "use_packed_weights": use_packed_weights,
    }
    given = [name for name, is_set in flags.items() if is_set]
    needed: list[str] = []
    if dtype in _PLAIN:
        format = _PLAIN[dtype]
    elif dtype == "float8_e4m3fn":
        format, needed = next(
            (
                (format, [flag])
                for format, flag in (
                    ("fp8_block", "use_deepseek_fp8_block_scale"),
                    ("mxfp8", "use_mxfp8_act_scaling"),
                )
                if flags[flag]
            ),
            ("fp8_tensor", []),
        )
    elif dtype in PACKED and use_packed_weights:
        format, needed = "int4", ["use_w4_group_scaling", "use_packed_weights"]
    elif dtype in PACKED and use_w4_group_scaling:
        format, needed = "mxfp4", ["use_w4_group_scaling"]
    elif dtype in PACKED and scales == 6:
        format = "nvfp4"
    else:
        given_scales = f"{scales} quant_scales" if scales else "no quant_scales"
        raise NotImplementedError(
            f"cutlass_fused_moe: no kernel for fc1_expert_weights of {dtype} with {given_scales}; served are {SERVED}"
        )
    if given != needed:
        expected = f"{' and '.join(needed)} alone" if needed else "none of these flags"
        raise NotImplementedError(
            f"cutlass_fused_moe: no kernel for {', '.join(given)} with fc1_expert_weights of {dtype} ({format}), which "
            f"take {expected}; served are {SERVED}"
        )
    if scales not in _COUNTS.get(format, (0,)):
        expected = _SCALES.get(format, "none")
        raise ValueError(f"quant_scales: expected {expected}, got {scales} tensors")
    return format


@dataclass(frozen=True)
class Activations:
    """fc1's activation and its numbers, and the biases of this rank."""

    name: str
    fc1_expert_biases: Tensor | None
    fc2_expert_biases: Tensor | None
    swiglu_alpha: Tensor | None
    swiglu_beta: Tensor | None
    swiglu_limit: Tensor | None
    situ_beta: Tensor | float | None = None
    situ_linear_beta: Tensor | float | None = None

    def options(self, tp_rank: int, *, once: bool) -> dict[str, Any]:
        """Returns options of ExpertWeights. once: they are made at load, so numbers may be read from the device."""
        activation, gated, clamp, limit = ACTIVATIONS[self.name]
        read: Any = number if once else lambda tensor: tensor
        given = {"alpha": read(self.swiglu_alpha), "beta": read(self.swiglu_beta), "limit": read(self.swiglu_limit)}
        given |= {"situ_beta": read(self.situ_beta), "situ_linear_beta": read(self.situ_linear_beta)}
        defaults = {"limit": limit, **(_SITU if activation == "situ" else {})}
        given |= {name: default for name, default in defaults.items() if given[name] is None}
        return {
            "activation": activation,
            "gated": gated,
            **({"layout": "up_gate"} if gated else {}),
            "clamp": clamp,
            "b13": self.fc1_expert_biases,
            "b2": self.fc2_expert_biases if tp_rank == 0 else None,
            **{name: value for name, value in given.items() if value is not None},
        }


def described(
    format: str, fc1: Tensor, fc2: Tensor, quant_scales: Sequence[Tensor], options: dict[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of `moe_tensors` for weights that are read as they lie."""
    arguments: dict[str, Any] = {"w13": fc1, "w2": fc2, **options}
    if format == "fp8_block":
        return arguments | {"format": format, "w13_scale": quant_scales[0], "w2_scale": quant_scales[1]}
    if format == "fp8_tensor":
        return arguments | {"format": format, **_one_scale(fc1.shape[0], quant_scales)}
    return arguments


def _one_scale(experts: int, quant_scales: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns the scales of weights and of activations. flashinfer gives the product of fc1's scale and the input's.
    It gives fc2's activation scale as the number that multiplies activations."""
    fc1, fc2_quant, fc2, of_input = (scale.float().reshape(-1) for scale in quant_scales)
    for name, scale, counts in (
        ("quant_scales[0]", fc1, (1, experts)),
        ("quant_scales[2]", fc2, (1, experts)),
        ("quant_scales[1]", fc2_quant, (1,)),
        ("quant_scales[3]", of_input, (1,)),
    ):
        if scale.numel() not in counts:
            expected = " or ".join(str(count) for count in dict.fromkeys(counts))
            raise ValueError(f"{name}: expected {expected} numbers, got {scale.numel()}")
    return {
        "w13_scale": (fc1 / of_input).expand(experts).contiguous(),
        "w2_scale": (fc2 * fc2_quant).expand(experts).contiguous(),
        "a13_scale": of_input.contiguous(),
        "a2_scale": fc2_quant.reciprocal(),
    }


def prepared(
    format: str,
    fc1: Tensor,
    fc2: Tensor,
    quant_scales: Sequence[Tensor],
    options: dict[str, Any],
    *,
    dtype: str,
    hidden_size: int | None,
) -> ExpertWeights:
    """Makes ExpertWeights of packed formats. They hold copies, made on the weights' device."""
    import torch

    if format == "mxfp4":
        (w13, w13_scale), (w2, w2_scale) = (
            quantize.deinterleave_sm90_mxfp4(as_bytes(name, codes), as_bytes(f"quant_scales[{place}]", scale))
            for place, (name, codes, scale) in enumerate(zip(NAMES, (fc1, fc2), quant_scales, strict=True))
        )
        return ExpertWeights.mxfp4(w13, w2, w13_scale, w2_scale, dtype=dtype, hidden_size=hidden_size, **options)
    if dtype != "bf16" and (format == "mxfp8" or fc1.is_cuda):
        raise NotImplementedError(f"output_dtype: no {format} kernel for {dtype}; served is torch.bfloat16")
    if format == "mxfp8":
        codes = [weights if weights.is_cuda else weights.clone() for weights in (fc1, fc2)]
        blocks = [
            torch.stack([quantize.unswizzle_scales(of, weights.shape[1], weights.shape[2] // 32) for of in flat])
            for weights, flat in zip(
                codes, (as_bytes(f"quant_scales[{n}]", quant_scales[n]).flatten(1) for n in (0, 2)), strict=True
            )
        ]
        return ExpertWeights.mxfp8(*codes, *blocks, hidden_size=hidden_size, **options)
    of_input, fc1_blocks, fc1_dequant, of_hidden, fc2_blocks, fc2_dequant = quant_scales
    w13, w2 = map(as_bytes, NAMES, (fc1, fc2))
    if not fc1.is_cuda:
        w13, w2 = w13.clone(), w2.clone()
    w13_scale, w2_scale = (
        as_bytes(f"quant_scales[{place}]", scale).view(torch.float8_e4m3fn).clone()
        for place, scale in ((1, fc1_blocks), (4, fc2_blocks))
    )
    return ExpertWeights.nvfp4(
        w13,
        w2,
        w13_scale,
        w2_scale,
        _one_or_experts(fc1_dequant),
        _one_or_experts(fc2_dequant),
        input_global_scale=_one_or_experts(of_input),
        a2_global_scale=_one_or_experts(of_hidden),
        scale_layout="swizzled",
        dtype=dtype,
        **options,
    )


def _one_or_experts(scale: Tensor) -> Any:
    """Returns one number if there is only one."""
    return scale.float().reshape(-1).clone() if scale.numel() > 1 else scale.item()


def quantised_input(
    format: str, input: Tensor, input_sf: Tensor | None, quant_scales: Sequence[Tensor] | None, *, swizzled: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns (x, x_scale) of `moe` for an input that may be quantised. Raises NotImplementedError for a form that
    is not served."""
    import torch

    from oxmoe.formats.nvfp4 import unswizzle_blockscale

    codes = name_of(input.dtype) in ("float8_e4m3fn", "uint8", "int8", "int64")
    if format == "fp8_tensor" and codes and input_sf is None:
        if quant_scales is None:
            raise ValueError("quant_scales: the input's dequantisation scale is needed where input is float8_e4m3fn")
        return input, quant_scales[3].float().reshape(1)
    if format == "nvfp4" and codes:
        if input_sf is None:
            raise ValueError("input_sf: needed where input is NVFP4 codes")
        check_tensor("input", input, "T", "K / 2")
        check_tensor("input_sf", input_sf)
        input, rows = as_bytes("input", input), input.shape[0]
        scales = as_bytes("input_sf", input_sf).view(torch.float8_e4m3fn)
        groups = input.shape[1] // 8
        expected = (-(-rows // 128) * 128, -(-groups // 4) * 4) if swizzled else (rows, groups)
        if scales.numel() != expected[0] * expected[1]:
            order = "swizzled" if swizzled else "row-by-row"
            raise ValueError(
                f"input_sf: expected {expected[0]} x {expected[1]} {order} scales, got shape {tuple(input_sf.shape)}"
            )
        if swizzled:
            scales = unswizzle_blockscale(scales.reshape(expected), rows, groups)
        return input, scales.reshape(rows, groups).contiguous()
    if codes or input_sf is not None:
        given = f"input of {name_of(input.dtype)}" + (" with input_sf" if input_sf is not None else "")
        raise NotImplementedError(
            f"cutlass_fused_moe: no kernel for {given} and {format} weights; served are 16-bit input, float8_e4m3fn "
            "input of weights with one scale, and NVFP4 codes with input_sf of NVFP4 weights"
        )
    return input, None
