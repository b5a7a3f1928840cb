"""ModelOpt's checkpoints: their configurations, random experts in their formats, and results in fp64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
# The two numbers of each byte, the low nibble's first.
E2M1_PAIRS = torch.cartesian_prod(torch.cat([E2M1, -E2M1]), torch.cat([E2M1, -E2M1])).flip(1)
E4M3 = torch.float8_e4m3fn
IGNORE = ["lm_head", "model.layers.0.mlp.gate", "model.layers.7.mlp.experts*"]
PREFIX = "model.layers.0.mlp.experts"

GROUP = {
    "weights": {"num_bits": 4, "type": "float", "group_size": 16},
    "input_activations": {"num_bits": 4, "type": "float", "group_size": 16},
    "targets": ["Linear"],
}


def flat(algorithm: str, **fields: Any) -> dict[str, Any]:
    """Returns a quantization_config of a config.json."""
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": IGNORE, **fields}
    if "NVFP4" in algorithm:
        config["config_groups"] = {"group_0": copy.deepcopy(GROUP)}
    return {**config, "producer": {"name": "modelopt", "version": "0.39"}}


def nested(algorithm: str, **fields: Any) -> dict[str, Any]:
    """Returns an hf_quant_config.json."""
    section = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": IGNORE, **fields}
    if "NVFP4" in algorithm:
        section["group_size"] = 16
    return {"producer": {"name": "modelopt", "version": "0.39"}, "quantization": section}


NVFP4, FP8 = flat("NVFP4"), flat("FP8")
LAYERS = {
    "model.layers.0.mlp.experts.0.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.1.mlp.experts.0.gate_proj": {"quant_algo": "FP8"},
    "model.layers.2.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    "model.layers.3.mlp.experts": {"quant_algo": "MXFP8"},
    "model.layers.4.mlp.experts": {"quant_algo": "FP8_PB_WO", "group_size": 128},
    "model.layers.5.mlp.experts": {"quant_algo": "INT4_AWQ"},
    "model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"},
}
MIXED = {**flat("MIXED_PRECISION", quantized_layers=LAYERS), "kv_cache_quant_algo": None, "quant_method": "modelopt"}
HYBRID = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "quant_algo": "MIXED_PRECISION",
    "moe_quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["model.layers.7.mlp.experts*"],
    "modules_to_not_convert": ["model.layers.0.self_attn.o_proj"],
}


@dataclass
class Experts:
    """A checkpoint's tensors of experts by suffix and shard, and the numbers that they stand for, in fp64.

    shards: "w1" and "w3" (gate and up) and "w2"; without a gate "w1" and "w2".
    """

    gated: bool
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    numbers: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)  # given scales of activations

    @property
    def shards(self) -> tuple[str, ...]:
        return ("w1", "w3", "w2") if self.gated else ("w1", "w2")

    def named(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """Yields suffix, shard, expert and tensor, as a checkpoint has them."""
        for suffix, shards in self.tensors.items():
            for shard, of_experts in shards.items():
                for expert, tensor in enumerate(of_experts):
                    yield suffix, shard, expert, tensor

    def put(self, suffix: str, shard: str, tensor: Tensor) -> None:
        self.tensors.setdefault(suffix, {})[shard] = tensor


def _sizes(experts: int, hidden: int, intermediate: int, gated: bool) -> dict[str, tuple[int, int, int]]:
    up = (experts, intermediate, hidden)
    return {"w1": up, **({"w3": up} if gated else {}), "w2": (experts, hidden, intermediate)}


def nvfp4(
    experts: int, hidden: int, intermediate: int, rng: torch.Generator, *, gated: bool = True, alike: bool = False
) -> Experts:
    """Draws random codes. Every matrix has its own size, so that a wrong matrix's scale shows. alike: gate and up share
    one."""
    made = Experts(gated)
    for shard, (_, rows, columns) in _sizes(experts, hidden, intermediate, gated).items():
        codes = torch.randint(0, 256, (experts, rows, columns // 2), generator=rng, dtype=torch.uint8)
        scale = (8 * (torch.rand((experts, rows, columns // 16), generator=rng) + 0.5)).to(E4M3)
        scale_2 = (torch.rand(experts, generator=rng) + 0.5) / (23 * columns**0.5)
        if alike and shard == "w3":
            scale_2 = made.tensors["weight_scale_2"]["w1"]
        elements = E2M1_PAIRS.index_select(0, codes.flatten().int()).view(*scale.shape, 16)
        elements.mul_(scale.double()[..., None]).mul_(scale_2.double()[:, None, None, None])
        made.numbers[shard] = elements.view(experts, rows, columns)
        made.put("weight", shard, codes)
        made.put("weight_scale", shard, scale)
        made.put("weight_scale_2", shard, scale_2)
        # SGLang quantises activations with these scales if it can; oxmoe leaves them out.
        made.put("input_scale", shard, torch.full((experts,), 1e3))
    return made


def fp8(experts: int, hidden: int, intermediate: int, rng: torch.Generator, *, gated: bool = True) -> Experts:
    made = Experts(gated)
    for shard, (_, rows, columns) in _sizes(experts, hidden, intermediate, gated).items():
        drawn = torch.randn((experts, rows, columns), generator=rng) * columns**-0.5
        drawn *= (torch.rand((experts, 1, 1), generator=rng) + 0.5).to(drawn)
        scale = drawn.abs().amax((1, 2)) / 448
        codes = (drawn / scale[:, None, None]).clamp(-448, 448).to(E4M3)
        made.numbers[shard] = codes.double() * scale.double()[:, None, None]
        made.put("weight", shard, codes)
        made.put("weight_scale", shard, scale)
        # The largest scale of the experts counts.
        largest = 5.0 / 448 if shard != "w2" else (4.0 if gated else 12.0) / 448
        of_experts = torch.full((experts,), largest / 2)
        of_experts[experts - 1] = largest
        made.put("input_scale", shard, of_experts)
        made.inputs[shard] = torch.tensor(largest)
    return made


def moe(
    x: Tensor, made: Experts, weights: Tensor, ids: Tensor, *, experts: range | None = None, limit: float | None = None
) -> Tensor:
    """Computes the layer in fp64 on the checkpoint's numbers, rounded to bf16 where a layer rounds between its
    products.

    experts: the experts of this rank; results of others are left out.
    """

    def quantised(rows: Tensor, shard: str) -> Tensor:
        scale = made.inputs.get(shard)
        if scale is None:
            return rows
        return (rows / scale.double()).clamp(-448, 448).float().to(E4M3).double() * scale.double()

    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            if expert < 0 or (experts is not None and expert not in experts):
                continue
            row = quantised(x[token].double().cpu(), "w1")
            first = made.numbers["w1"][expert] @ row
            if made.gated:
                up = made.numbers["w3"][expert] @ row
                if limit is not None:
                    first, up = first.clamp(max=limit), up.clamp(-limit, limit)
                inner = torch.nn.functional.silu(first) * up
            else:
                inner = first.clamp(min=0).square()
            inner = quantised(inner.bfloat16().double(), "w2")
            out[token] += weight * (made.numbers["w2"][expert] @ inner)
    return out
