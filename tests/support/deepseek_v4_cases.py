"""Layers of DeepSeek-V4's MXFP4 experts in SGLang, their checkpoint's tensors, and fp64 arithmetic on these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import get_quantization_config
from torch import Tensor

from cases import Shape, make_routing, make_x
from mxfp4_cases import Blocks, make_blocks
from sglang_server import FusedMoE

CHECKPOINT = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "scale_fmt": "ue8m0",
}
V4 = {"swiglu_limit": 10.0, "routed_scaling_factor": 1.5}
SMALL = Shape("v4-small", 8, 3, 256, 192)
NOT_PACKED_IN_PLACE = Shape("v4-odd", 8, 3, 256, 96)
# Experts of true sizes, but fewer: Flash whole, and the part of Pro that a rank of eight has.
FLASH, PRO_TP8 = Shape("v4-flash", 8, 6, 4096, 2048), Shape("v4-pro-tp8", 8, 6, 7168, 384)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Tensors = dict[str, Callable[[int, str], Tensor]]


def config(**fields: Any) -> Any:
    """Returns the configuration as SGLang's loader leaves it when it has seen MXFP4 experts."""
    quant_config = get_quantization_config("oxmoe").from_config(dict(CHECKPOINT))
    for name, value in {"is_fp4_experts": True, **fields}.items():
        setattr(quant_config, name, value)
    return quant_config


def empty(shape: Shape, device: str = "cpu", quant_config: Any = None, **options: Any) -> FusedMoE:
    with torch.device(device):
        return FusedMoE(
            num_experts=shape.experts,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            top_k=shape.top_k,
            quant_config=quant_config or config(),
            prefix="model.layers.0.mlp.experts",
            **{"layer_id": 0, "params_dtype": torch.bfloat16, **V4, **options},
        )


def drawn(shape: Shape, device: str, rng: torch.Generator) -> Blocks:
    """Makes a layer: some experts' sums are far beyond the limit of 10, others' are within."""
    blocks = make_blocks(shape, "bf16", device, rng)
    blocks.w13_scale[::2] += 4
    return blocks


def parts(w13: Tensor, w2: Tensor) -> Callable[[int, str], Tensor]:
    """Returns a function that gives the part of gate, up or down of [E, 2I, ...] and [E, ...]."""
    return lambda expert, shard: w2[expert] if shard == "w2" else w13[expert].chunk(2)[shard == "w3"]


def tensors_of(blocks: Blocks, *, codes: torch.dtype = torch.int8, scales: Any = torch.float8_e8m0fnu) -> Tensors:
    """Returns a checkpoint's tensors, by the dtypes that it may have."""
    bytes_of = blocks.w13_scale, blocks.w2_scale
    of_scales = [scale.view(torch.float8_e8m0fnu) for scale in bytes_of]
    kept = bytes_of if scales is torch.uint8 else [scale.to(scales) for scale in of_scales]
    return {
        "weight": parts(blocks.w13.view(codes), blocks.w2.view(codes)),
        "weight_scale_inv": parts(*kept),
    }


def write(module: FusedMoE, tensors: Tensors, experts: Any = None) -> None:
    """Writes by SGLang's own loader, as the model's load_weights does; nothing is processed."""
    for expert in experts if experts is not None else range(module.num_experts):
        for suffix, tensor in tensors.items():
            for shard in ("w1", "w3", "w2"):
                parameter = getattr(module, f"{'w2' if shard == 'w2' else 'w13'}_{suffix}")
                name = f"model.layers.0.mlp.experts.{'w2' if shard == 'w2' else 'w13'}_{suffix}"
                parameter.weight_loader(parameter, tensor(expert, shard), name, shard_id=shard, expert_id=expert)


def load(module: FusedMoE, tensors: Tensors) -> None:
    write(module, tensors)
    module.quant_method.process_weights_after_loading(module)


def layer_of(blocks: Blocks, **options: Any) -> FusedMoE:
    module = empty(blocks.shape, blocks.w13.device.type, **options)
    load(module, tensors_of(blocks))
    return module


def numbers(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns [R, C] of codes [R, C / 2], the even column in the low nibble, and scale bytes [R, C / 32]."""
    of_nibbles = torch.cat([E2M1, -E2M1])
    of_bytes = torch.stack([of_nibbles.repeat(16), of_nibbles.repeat_interleave(16)], 1).to(codes.device)
    # torch takes single elements four times as fast as pairs: a pair of fp32 numbers is seen as one of eight bytes.
    pairs = of_bytes.view(torch.int64).flatten().index_select(0, codes.reshape(-1).view(torch.uint8).int())
    exact = pairs.view(torch.float32).view(*codes.shape[:-1], -1, 32)
    return (exact * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).double()


def expected(blocks: Blocks, x: Tensor, weights: Tensor, ids: Tensor, *, factor: float = 1.5) -> Tensor:
    """Computes the layer in fp64, without a rounding between: the gate bounded from above, up on both sides, then
    SiLU."""
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids[ids >= 0].unique().tolist():
        tokens, slots = torch.where(ids == expert)
        w13, w2 = (
            numbers(blocks.w13[expert], blocks.w13_scale[expert]),
            numbers(blocks.w2[expert], blocks.w2_scale[expert]),
        )
        gate, up = (x[tokens].double() @ w13.T).chunk(2, -1)
        gate, up = gate.clamp(max=10.0), up.clamp(-10.0, 10.0)
        hidden = gate * torch.sigmoid(gate) * up
        result.index_add_(0, tokens, hidden @ w2.T * weights[tokens, slots, None].double())
    return factor * result


def close(result: Tensor, truth: Tensor) -> None:
    """Compares row by row: GEMM1's output and the result are rounded to bf16."""
    assert result.shape == truth.shape and result.dtype == torch.bfloat16
    errors = (result.double() - truth).norm(dim=1) / truth.norm(dim=1).clamp(min=1e-30)
    assert not (errors > 0.006).any(), errors.max()


def routed(shape: Shape, tokens: int, device: str, rng: torch.Generator, pattern: str = "uniform") -> Any:
    weights, ids = make_routing(pattern, tokens, shape.experts, shape.top_k, rng)
    return StandardTopKOutput(weights.to(device), ids.to(device), None)


def given(shape: Shape, tokens: int, device: str, rng: torch.Generator, pattern: str = "uniform") -> tuple[Tensor, Any]:
    return make_x(tokens, shape, torch.bfloat16, device, rng), routed(shape, tokens, device, rng, pattern)
