"""Experts of checkpoints in each format: what a matrix is stored as, and what the checkpoint's config says of it.

A matrix comes in bf16, `[rows, columns]`, on the generator's device. Each format returns tensors by the ends of their
names, as the models' own checkpoints have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Config = dict[str, Any]

E4M3_MAX, E2M1 = 448.0, (0, 0.5, 1, 1.5, 2, 3, 4, 6)
COLUMNS = 128  # of a group of AWQ and GPTQ
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the numbers of a word, from its lowest bits up
INPUT_SCALE = 0.02  # activations up to 9 are in range


def some_power(rng: torch.Generator) -> Tensor:
    """A number from 1/2 to 2: with it two matrices have scales that differ, and a wrong one shows."""
    return torch.exp2(2 * torch.rand((), generator=rng, device=rng.device) - 1)


def plain(weight: Tensor, rng: torch.Generator) -> Tensors:
    return {"weight": weight}


def to_e4m3(weight: Tensor, rows: int, columns: int, powers: bool = False) -> tuple[Tensor, Tensor]:
    """Codes, and the scale of each block of so many rows and columns. Blocks at the end may be smaller.

    powers: scales are powers of two.
    """
    height, width = weight.shape
    whole = torch.nn.functional.pad(weight.float(), (0, -width % columns, 0, -height % rows))
    blocks = whole.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = blocks.abs().amax((1, 3)) / E4M3_MAX
    if powers:
        scale = torch.exp2(scale.log2().ceil())
    codes = (blocks / scale[:, None, :, None]).view(whole.shape).to(torch.float8_e4m3fn)
    return codes[:height, :width], scale


def fp8(weight: Tensor, rng: torch.Generator) -> Tensors:
    codes, scale = to_e4m3(weight, 128, 128)
    return {"weight": codes, "weight_scale_inv": scale}


def fp8_tensor(weight: Tensor, rng: torch.Generator) -> Tensors:
    codes, scale = to_e4m3(weight, *weight.shape)
    return {"weight": codes, "weight_scale": scale.view(()) * some_power(rng)}


def fp8_static(weight: Tensor, rng: torch.Generator) -> Tensors:
    return fp8_tensor(weight, rng) | {"input_scale": torch.tensor(INPUT_SCALE)}


def fp8_channel(weight: Tensor, rng: torch.Generator) -> Tensors:
    codes, scale = to_e4m3(weight, 1, weight.shape[1])
    return {"weight": codes, "weight_scale": scale.bfloat16()}


def mxfp8(weight: Tensor, rng: torch.Generator) -> Tensors:
    """e4m3 codes, and the exponent of each 32 columns' scale."""
    groups = weight.float().unflatten(1, (-1, 32))
    power = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True))) - 8
    codes = (groups / torch.exp2(power)).clamp(-E4M3_MAX, E4M3_MAX).flatten(1).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": (power[..., 0] + 127).to(torch.uint8)}


def mxfp8_numbers(weight: Tensor, rng: torch.Generator) -> Tensors:
    """The numbers of `mxfp8`, all of which bf16 has."""
    stored = mxfp8(weight, rng)
    scales = torch.exp2(stored["weight_scale_inv"].float() - 127).repeat_interleave(32, 1)
    return {"weight": (stored["weight"].float() * scales).bfloat16()}


def to_e2m1(blocks: Tensor) -> Tensor:
    """The nearest codes of e2m1 of numbers `[rows, blocks, columns of one]`, two of them in a byte of a row."""
    near = blocks.abs()[..., None].sub(torch.tensor(E2M1, device=blocks.device)).abs().argmin(-1) + 8 * (blocks < 0)
    codes = near.flatten(1).to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def mxfp4(weight: Tensor, rng: torch.Generator) -> Tensors:
    """e2m1 codes, and the exponent of each 32 columns' scale."""
    groups = weight.float().unflatten(1, (-1, 32))
    power = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True))) - 2
    codes = to_e2m1(groups / torch.exp2(power))
    return {"weight_packed": codes, "weight_scale": (power[..., 0] + 127).to(torch.uint8)}


def nvfp4(weight: Tensor, rng: torch.Generator) -> Tensors:
    """Codes, scales of 16 columns, and the matrix's own scale, a power of two so that the numbers are bf16's.

    In a small checkpoint gate and up differ in their own scales. In a large one they do not: Marlin takes one for both.
    """
    if rng.device.type == "cpu":
        most, other = float(weight.abs().amax()), 2 * float(torch.rand((), generator=rng))
    else:
        # No number of a matrix of this many columns is larger than six standard deviations.
        most, other = 6 * weight.shape[1] ** -0.5, 1.0
    own = 2.0 ** round(math.log2(most / (6 * E4M3_MAX)) + other)
    blocks = weight.float().unflatten(1, (-1, 16)) / own
    scale = (blocks.abs().amax(-1, keepdim=True) / 6).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    return {
        "weight": to_e2m1(blocks / scale.float()),
        "weight_scale": scale[..., 0],
        "weight_scale_2": torch.tensor(own),
        "input_scale": torch.tensor(0.01),
    }


def words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 `[..., c / 8]` of codes of four bits `[..., c]`; order: which of eight is in the lowest bits, and so on."""
    eights = codes.long().unflatten(-1, (-1, 8))[..., list(order)]
    whole = (eights << 4 * torch.arange(8, device=codes.device)).sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


def to_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes from 0 to 15, of which 8 is zero, and the scale of each group of columns."""
    groups = weight.float().unflatten(1, (-1, group))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16()
    return (groups / scale.float()).round().clamp(-8, 7).flatten(1).long() + 8, scale[..., 0]


def int4(weight: Tensor, rng: torch.Generator) -> Tensors:
    codes, scale = to_int4(weight, 32)
    return {"weight_packed": words(codes), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def awq(weight: Tensor, rng: torch.Generator) -> Tensors:
    """Asymmetric: each group's codes are moved by 0 to 3, and so is its zero point."""
    codes, scale = to_int4(weight, COLUMNS)
    by = torch.randint(4, scale.shape, generator=rng, device=rng.device)
    moved = (codes.unflatten(1, (-1, COLUMNS)) - by[..., None]).clamp(min=0).flatten(1)
    zeros = (8 - by).t()
    return {
        "qweight": words(moved.t(), AWQ_ORDER),
        "scales": scale.t(),
        "qzeros": words(zeros, AWQ_ORDER),
    }


def gptq(weight: Tensor, rng: torch.Generator) -> Tensors:
    """Symmetric: each zero point is 8, and is stored less 1."""
    codes, scale = to_int4(weight, COLUMNS)
    return {
        "qweight": words(codes).t(),
        "scales": scale.t(),
        "qzeros": words(torch.full_like(scale.t(), 7)),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // COLUMNS,
    }


def w4afp8(weight: Tensor, rng: torch.Generator) -> Tensors:
    """Symmetric: two codes of a byte are in two's complement. Activations have one scale a matrix."""
    codes, scale = to_int4(weight, 128)
    signed = (codes - 8) & 15
    return {
        "weight": (signed[:, 0::2] | signed[:, 1::2] << 4).to(torch.uint8).view(torch.int8),
        "weight_scale_inv": scale,
        "input_scale": torch.tensor(INPUT_SCALE, dtype=torch.bfloat16),
    }


def _left(layers: int) -> list[str]:
    """Modules that are not quantised, by name."""
    attention = [f"self_attn.{name}_proj" for name in ("q", "k", "v", "o", "q_b", "kv_b", "q_a")]
    attention += ["self_attn.kv_a_proj_with_mqa", "self_attn.fused_qkv_a_proj_with_mqa"]
    return [*(f"model.layers.{n}.{module}" for n in range(layers) for module in (*attention, "mlp.gate")), "lm_head"]


def _fp8(layers: int, **more: Any) -> Config:
    left = {"modules_to_not_convert": _left(layers)}
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **left, **more}


def _mxfp8(layers: int) -> Config:
    left = [f"model.layers.{n}.mlp.gate" for n in range(layers)]
    blocks = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
    return {**blocks, "modules_to_not_convert": [*left, "lm_head"]}


def _compressed(weights: Config, inputs: Config | None, **more: Any) -> Config:
    every = {"symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": {**every, **weights}, "input_activations": inputs}
    left = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$", "re:.*shared_experts.*"]
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": left, **more}


def _modelopt_left(layers: int) -> list[str]:
    return [f"model.layers.{n}.{module}" for n in range(layers) for module in ("self_attn*", "mlp.gate")] + ["lm_head"]


def _modelopt(layers: int) -> Config:
    weights = {"num_bits": 4, "type": "float", "group_size": 16}
    group = {"weights": weights, "input_activations": weights, "targets": ["Linear"]}
    named = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": group}}
    return {**named, "ignore": _modelopt_left(layers), "producer": {"name": "modelopt", "version": "0.39"}}


def _modelopt_file(algorithm: str, **more: Any) -> Callable[[int], Config]:
    def file(layers: int) -> Config:
        section = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": _modelopt_left(layers)}
        return {"producer": {"name": "modelopt", "version": "0.39"}, "quantization": {**section, **more}}

    return file


_TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": None}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": COLUMNS, "version": "gemm", "zero_point": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": COLUMNS, "desc_act": False, "sym": True}


@dataclass(frozen=True)
class Format:
    """The experts of a checkpoint, and of so many layers the `quantization_config`, or all of hf_quant_config.json."""

    store: Callable[[Tensor, torch.Generator], Tensors] = plain
    config: Callable[[int], Config] | None = None
    file: Callable[[int], Config] | None = None
    small_inner: int = 96  # intermediate size of a small model
    # Matrices of the attention, and shared experts. None: they are in bf16, except DeepSeek's shared expert, which is
    # like the others.
    linear: Callable[[Tensor, torch.Generator], Tensors] | None = None


FORMATS = {
    "": Format(),
    "fp8": Format(fp8, lambda n: _fp8(n, weight_block_size=[128, 128]), small_inner=256),
    "fp8-tensor": Format(fp8_tensor, _fp8, small_inner=256),
    "fp8-static": Format(fp8_static, lambda n: _fp8(n, activation_scheme="static"), small_inner=176),
    "fp8-channel": Format(
        fp8_channel, lambda n: _compressed(_CHANNEL, _TOKEN, format="float-quantized"), small_inner=176
    ),
    "mxfp8": Format(mxfp8, _mxfp8, linear=mxfp8),
    "mxfp8-numbers": Format(mxfp8_numbers, linear=mxfp8_numbers),
    "int4": Format(int4, lambda n: _compressed(_GROUP, None, format="pack-quantized")),
    "awq": Format(awq, lambda n: {**_AWQ, "modules_to_not_convert": ["self_attn", "gate."]}, small_inner=256),
    "gptq": Format(
        gptq, lambda n: {**_GPTQ, "dynamic": {r"-:.*self_attn.*": {}, r"-:.*mlp\.gate$": {}}}, small_inner=256
    ),
    "mxfp4": Format(mxfp4, lambda n: _compressed(_MXFP4, None, format="mxfp4-pack-quantized")),
    "nvfp4": Format(nvfp4, _modelopt),
    "nvfp4-file": Format(nvfp4, file=_modelopt_file("NVFP4", group_size=16)),
    "w4afp8": Format(w4afp8, lambda n: {"quant_method": "w4afp8"}, small_inner=256, linear=fp8),
    "modelopt-fp8": Format(fp8_static, file=_modelopt_file("FP8"), small_inner=176),
}
