"""int4 layers as checkpoints have them: quantization_configs, and tensors by the shifts of each layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from int4_cases import Int4

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # numbers of a word, from its lowest bits up
Tensors = dict[str, Callable[[int, str], Tensor]]


@dataclass(frozen=True)
class Kind:
    """A checkpoint's config, and the options that its weights are made with."""

    config: dict[str, Any]
    group: int | None = 32
    zeros: bool = False
    less: int = 0  # what GPTQ's stored zero points lack


def pack_quantized(weights: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    """Returns a config like Kimi-K2-Thinking's."""
    described = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4}
    described |= {"observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int"}
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {**group, "weights": {**described, **(weights or {})}}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
        **config,
    }


def awq(**config: Any) -> dict[str, Any]:
    of_all = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    return {**of_all, "modules_to_not_convert": ["gate."], **config}


def gptq(**config: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, **config}


KINDS = {
    "kimi": Kind(pack_quantized()),
    "zeros": Kind(pack_quantized({"symmetric": False, "group_size": 64}), 64, True),
    "channel": Kind(pack_quantized({"strategy": "channel", "group_size": None}), None),
    "static": Kind(pack_quantized({"actorder": "static", "group_size": 64}), 64),
    "awq": Kind(awq(), 32, True),
    "awq-64": Kind(awq(group_size=64), 64, True),
    "gptq": Kind(gptq(), 32, False, 1),
    "gptq-zeros": Kind(gptq(group_size=64, sym=False), 64, True, 1),
    "gptq_v2": Kind(gptq(sym=False, checkpoint_format="gptq_v2"), 32, True),
    "gptq-rows": Kind(gptq(group_size=-1, desc_act=True), None, False, 1),
}


def words(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Packs [..., c] to int32 [..., c / 8]. order: which of eight is in the lowest bits, and so on."""
    eights = numbers.long().unflatten(-1, (-1, 8))
    whole = sum(eights[..., place] << (4 * i) for i, place in enumerate(order))
    assert isinstance(whole, Tensor)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


def tensors(layer: Int4, kind: Kind) -> Tensors:
    """Returns a checkpoint's tensors of (expert, shard), by their names' ends."""
    method = kind.config["quant_method"]

    def of(make: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Callable[[int, str], Tensor]:
        def one(expert: int, shard: str) -> Tensor:
            fields = ("w2", "w2_scale", "w2_zeros") if shard == "w2" else ("w13", "w13_scale", "w13_zeros")
            found = [None if (whole := getattr(layer, field)) is None else whole[expert] for field in fields]
            if shard != "w2":
                found = [None if whole is None else whole.chunk(2)[shard == "w3"] for whole in found]
            codes, scales, zeros = found
            assert codes is not None and scales is not None
            return make(torch.stack([codes & 15, codes >> 4], -1).flatten(-2), scales, zeros).contiguous()

        return one

    if method == "compressed-tensors":
        made = {
            "weight_packed": of(lambda codes, scales, zeros: words(codes)),
            "weight_scale": of(lambda codes, scales, zeros: scales),
            "weight_shape": of(lambda codes, scales, zeros: torch.tensor(codes.shape)),
        }
        if kind.zeros:
            made["weight_zero_point"] = of(lambda codes, scales, zeros: words(zeros.t()).t())  # type: ignore[union-attr]
        return made
    scales_of = of(lambda codes, scales, zeros: scales.t())
    if method == "awq":
        return {
            "qweight": of(lambda codes, scales, zeros: words(codes.t(), AWQ)),
            "scales": scales_of,
            "qzeros": of(lambda codes, scales, zeros: words(zeros.t(), AWQ)),  # type: ignore[union-attr]
        }

    def points(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        return words((torch.full_like(scales, 8) if zeros is None else zeros).t() - kind.less)

    def order(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        return torch.arange(codes.shape[1], dtype=torch.int32) // (codes.shape[1] // scales.shape[1])

    return {
        "qweight": of(lambda codes, scales, zeros: words(codes).t()),
        "scales": scales_of,
        "qzeros": of(points),
        "g_idx": of(order),
    }
