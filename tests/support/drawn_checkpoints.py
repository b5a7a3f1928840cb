"""Random checkpoints of experts in every format that SGLang with oxmoe loads by a layer's own loader: their configs,
tensors, and the numbers that these stand for."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from sglang.srt.layers.moe.token_dispatcher import standard
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import get_quantization_config
from torch import Tensor

import int4_checkpoints
import modelopt_cases
from deepseek_v4_cases import config as of_deepseek_v4
from deepseek_v4_cases import numbers as mxfp4_numbers
from oxmoe.sglang import compressed_tensors
from sglang_server import FusedMoE

E4M3 = torch.float8_e4m3fn
PREFIX = "model.layers.0.mlp.experts"


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets SGLang's dispatcher put its table of experts on the CPU."""
    monkeypatch.setattr(standard, "get_device", lambda *_: "cpu", raising=False)


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, layout: str) -> dict[str, Any]:
    of_all = {"type": "float", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": {**of_all, **weights}, "input_activations": inputs and of_all | inputs}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}, "ignore": []}


_FP8, _FLOAT = {"num_bits": 8}, "float-quantized"
_BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
_NVFP4 = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
_IN_GROUPS = {**_FP8, "strategy": "group", "group_size": 128, "dynamic": True}
_IN_TOKENS = {**_FP8, "strategy": "token", "dynamic": True}
_IN_TENSORS = {**_FP8, "strategy": "tensor", "dynamic": True}
# Name -> quantization that reads it, quantization_config.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("oxmoe", {}),
    "fp8 blocks": (
        "oxmoe",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "fp8": ("oxmoe", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8 static": ("oxmoe", {"quant_method": "fp8", "activation_scheme": "static"}),
    "MXFP8": ("oxmoe", {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}),
    "MXFP4 in fp8": ("", {}),
    "compressed blocks": ("oxmoe", _compressed(_FP8 | _BLOCKS, _IN_GROUPS, _FLOAT)),
    "compressed tensor": ("oxmoe", _compressed(_FP8 | {"strategy": "tensor"}, _IN_TENSORS, _FLOAT)),
    "compressed channel": ("oxmoe", _compressed(_FP8 | {"strategy": "channel"}, _IN_TOKENS, _FLOAT)),
    "compressed NVFP4": ("oxmoe", _compressed(_NVFP4, None, "nvfp4-pack-quantized")),
    "ModelOpt NVFP4": ("modelopt_fp4", modelopt_cases.NVFP4),
    "ModelOpt fp8": ("modelopt_fp8", modelopt_cases.FP8),
    "W4AFP8": ("w4afp8", {"quant_method": "w4afp8"}),
    **{f"int4 {name}": ("oxmoe", kind.config) for name, kind in int4_checkpoints.KINDS.items()},
}
# The formats that this release of SGLang has.
NAMES = [name for name in CONFIGS if name != "compressed NVFP4" or "NVFP4" in compressed_tensors.KINDS]
# Formats whose activations are e4m3.
QUANTISES = {"fp8 blocks", "fp8", "fp8 static", "MXFP8", "ModelOpt fp8"} | {
    f"compressed {of}" for of in ("blocks", "tensor", "channel")
}
# Format -> multiple of hidden_size, multiple of a rank's columns; others take 128 and 32.
MULTIPLES = {"bf16": (8, 8), "fp8 blocks": (128, 128), "compressed blocks": (128, 128), "fp8": (128, 16)}
MULTIPLES |= {"compressed NVFP4": (16, 16), "ModelOpt NVFP4": (16, 16), "MXFP8": (32, 32), "MXFP4 in fp8": (32, 32)}


def group_of(name: str) -> int | None:
    """Returns the columns that share an int4 scale."""
    return 128 if name == "W4AFP8" else int4_checkpoints.KINDS[name[5:]].group if name.startswith("int4 ") else None


@dataclass
class Drawn:
    """A checkpoint's tensors by suffix and shard ("w1", "w3", "w2"), each for all experts, and its numbers in fp64."""

    name: str
    gated: bool
    experts: int
    hidden: int
    intermediate: int
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    numbers: dict[str, Tensor] = field(default_factory=dict)

    def entries(self) -> Iterator[tuple[str, str, int]]:
        """Yields suffix, shard and expert of each tensor."""
        for suffix, shards in self.tensors.items():
            for shard in shards:
                yield from ((suffix, shard, expert) for expert in range(self.experts))

    def layer(self, **options: Any) -> FusedMoE:
        """Makes SGLang's layer without weights."""
        of, config = CONFIGS[self.name]
        kind: Any = get_quantization_config(of) if of else None
        made = of_deepseek_v4() if kind is None else kind.from_config(copy.deepcopy(config)) if config else kind()
        plain = {} if self.gated else {"activation": "relu2", "is_gated": False}
        return FusedMoE(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            layer_id=0,
            params_dtype=torch.bfloat16,
            quant_config=made,
            prefix=PREFIX,
            **{"num_experts": self.experts, "top_k": 2, **plain, **options},
        )

    def write(self, module: FusedMoE, suffix: str, shard: str, expert: int, tensor: Tensor | None = None) -> None:
        """Writes one tensor, or another one in its place, by SGLang's own loader."""
        name = f"{'w2' if shard == 'w2' else 'w13'}_{suffix}"
        parameter = getattr(module, name)
        given = self.tensors[suffix][shard][expert].clone() if tensor is None else tensor
        parameter.weight_loader(parameter, given, f"{PREFIX}.{name}", shard_id=shard, expert_id=expert)

    def load(self, module: FusedMoE, *, but: str | tuple[str, str, int] = "") -> None:
        """Writes all tensors, except for those of a suffix, or for one of them, and prepares the weights."""
        for entry in self.entries():
            if but not in (entry, entry[0]):
                self.write(module, *entry)
        module.quant_method.process_weights_after_loading(module)

    def expected(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Computes the layer in fp64, without a rounding between its products."""
        result = torch.zeros(x.shape, dtype=torch.float64)
        for expert in range(self.experts):
            tokens, slots = torch.where(ids == expert)
            first = x[tokens].double() @ self.numbers["w1"][expert].T
            if self.gated:
                up = x[tokens].double() @ self.numbers["w3"][expert].T
                inner = torch.nn.functional.silu(first) * up
            else:
                inner = first.clamp(min=0).square()
            result.index_add_(0, tokens, weights[tokens, slots, None] * (inner @ self.numbers["w2"][expert].T))
        return result


def routed(tokens: int, experts: int, top_k: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Any]:
    weights, ids = torch.randn((tokens, experts), generator=rng).softmax(1).topk(top_k)
    return weights, ids.int(), StandardTopKOutput(weights.clone(), ids.int(), None)


def draw(name: str, rng: torch.Generator, *, experts: int, hidden: int, intermediate: int, gated: bool = True) -> Drawn:
    made = Drawn(name, gated, experts, hidden, intermediate)
    for shard in ("w1", "w3", "w2") if gated else ("w1", "w2"):
        rows, columns = (hidden, intermediate) if shard == "w2" else (intermediate, hidden)
        for suffix, tensor in _tensors(made, shard, rows, columns, rng).items():
            made.tensors[suffix][shard] = tensor.contiguous()
    return made


def _tensors(made: Drawn, shard: str, rows: int, columns: int, rng: torch.Generator) -> dict[str, Tensor]:
    name, size = made.name, (made.experts, rows, columns)
    if name == "W4AFP8" or name.startswith("int4 "):
        return _int4(made, shard, size, rng)
    if "NVFP4" in name:
        return _nvfp4(made, shard, size, rng)
    if name == "MXFP4 in fp8":
        codes = torch.randint(0, 256, (*size[:2], columns // 2), generator=rng, dtype=torch.uint8)
        middle = 127 + round(math.log2(1 / (2.9 * columns**0.5)))
        scales = torch.randint(middle - 1, middle + 2, (*size[:2], columns // 32), generator=rng, dtype=torch.uint8)
        made.numbers[shard] = mxfp4_numbers(codes, scales)
        return {"weight": codes.view(torch.int8), "weight_scale_inv": scales.view(torch.float8_e8m0fnu)}
    drawn = torch.randn(size, generator=rng) * columns**-0.5 * (torch.rand((size[0], 1, 1), generator=rng) + 0.5)
    if name == "bf16":
        made.numbers[shard] = drawn.bfloat16().double()
        return {"weight": drawn.bfloat16()}
    return _fp8(made, shard, drawn)


def _fp8(made: Drawn, shard: str, drawn: Tensor) -> dict[str, Tensor]:
    name, experts = made.name, drawn.shape[0]
    if name == "MXFP8":
        blocks = drawn.double().unflatten(2, (-1, 32))
        scales = (torch.floor(torch.log2(blocks.abs().amax(-1))) - 8 + 127).to(torch.uint8)
        factors = torch.exp2(scales.double() - 127)[..., None]
        codes = (blocks / factors).clamp(-448, 448).float().to(E4M3)
        made.numbers[shard] = (codes.double() * factors).flatten(2)
        return {"weight": codes.flatten(2), "weight_scale_inv": scales}
    if name.endswith("blocks"):
        scale = drawn.unflatten(1, (-1, 128)).unflatten(3, (-1, 128)).abs().amax((2, 4)) / 448
        whole = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    else:
        scale = whole = drawn.abs().amax(2 if name.endswith("channel") else (1, 2), keepdim=True) / 448
    codes = (drawn / whole).to(E4M3)
    made.numbers[shard] = codes.double() * whole.double()
    if name == "fp8 blocks":
        return {"weight": codes, "weight_scale_inv": scale}
    of_matrices = not name.endswith(("blocks", "channel"))
    tensors = {"weight": codes, "weight_scale": scale.flatten() if of_matrices else scale}
    if name in ("fp8 static", "ModelOpt fp8"):
        # No drawn number of an activation is larger: where some are, e4m3 cuts them off and results are further away.
        tensors["input_scale"] = torch.full((experts,), (6 if shard != "w2" else 60) / 448)
    return tensors


def _nvfp4(made: Drawn, shard: str, size: tuple[int, int, int], rng: torch.Generator) -> dict[str, Tensor]:
    codes = torch.randint(0, 256, (*size[:2], size[2] // 2), generator=rng, dtype=torch.uint8)
    scale = (8 * (torch.rand((*size[:2], size[2] // 16), generator=rng) + 0.5)).to(E4M3)
    of_matrix = (torch.rand(size[0], generator=rng) + 0.5) / (23 * size[2] ** 0.5)
    elements = modelopt_cases.E2M1_PAIRS[codes.long()].view(*scale.shape, 16) * scale.double()[..., None]
    made.numbers[shard] = (elements * of_matrix.double()[:, None, None, None]).view(size)
    if made.name == "ModelOpt NVFP4":
        tensors = {"weight": codes, "weight_scale": scale, "weight_scale_2": of_matrix}
        return {**tensors, "input_scale": torch.full((size[0],), 3.0)}
    return {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": 1 / of_matrix}


def _int4(made: Drawn, shard: str, size: tuple[int, int, int], rng: torch.Generator) -> dict[str, Tensor]:
    group = group_of(made.name) or size[2]
    codes = torch.randint(0, 16, size, generator=rng)
    scale = ((torch.rand((*size[:2], size[2] // group), generator=rng) + 0.5) / (4.6 * size[2] ** 0.5)).bfloat16()
    kind = int4_checkpoints.KINDS.get(made.name[5:])
    zeros = torch.full(scale.shape, 8)
    if kind is not None and kind.zeros:
        zeros = torch.randint(kind.less, 16 + kind.less, scale.shape, generator=rng)
    made.numbers[shard] = (codes - zeros.repeat_interleave(group, 2)) * scale.double().repeat_interleave(group, 2)
    if kind is None:
        nibbles = (codes - 8) & 15
        packed = (nibbles[..., ::2] | nibbles[..., 1::2] << 4).to(torch.uint8).view(torch.int8)
        inputs = torch.full((size[0],), 0.03).bfloat16()
        return {"weight": packed, "weight_scale_inv": scale, "input_scale": inputs}
    words = int4_checkpoints.words
    if kind.config["quant_method"] == "compressed-tensors":
        tensors = {"weight_packed": words(codes), "weight_scale": scale}
        tensors["weight_shape"] = torch.tensor([size[1:]] * size[0])
        return tensors | ({"weight_zero_point": words(zeros.mT).mT} if kind.zeros else {})
    if kind.config["quant_method"] == "awq":
        order = int4_checkpoints.AWQ
        return {"qweight": words(codes.mT, order), "scales": scale.mT, "qzeros": words(zeros.mT, order)}
    of_columns = (torch.arange(size[2]) // group).int().expand(size[0], -1)
    tensors = {"qweight": words(codes).mT, "scales": scale.mT, "qzeros": words(zeros.mT - kind.less)}
    return {**tensors, "g_idx": of_columns}
