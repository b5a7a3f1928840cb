"""Checkpoints for servers on a CPU (benches/sglang/checkpoint.py makes them), and what transformers makes of one."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

_MAKE = Path(__file__).parents[3] / "benches" / "sglang" / "checkpoint.py"
LAYERS = 2

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E2M1 = torch.cat((_E2M1, -_E2M1))


def make(folder: Path, kind: str, seed: int) -> Path:
    """The folder, with this kind of checkpoint in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(_MAKE), str(folder), kind, str(LAYERS), str(seed)])
        patch.setattr(torch.cuda, "is_available", lambda: False)
        runpy.run_path(str(_MAKE), run_name="__main__")
    assert (folder / "tokenizer.json").is_file()
    return folder


def _numbers(name: str, weights: dict[str, Tensor]) -> tuple[str, Tensor]:
    """A weight's name and fp32 numbers as a model without a quantization has them."""
    weight = weights[name]
    if name.endswith("weight_packed"):
        codes = (weight[..., None].long() >> 4 * torch.arange(8)) & 15
        scales = weights[f"{name.removesuffix('_packed')}_scale"]
        # The product is rounded once, as it is in every bf16 layer of such weights.
        numbers = (codes.flatten(1) - 8) * scales.float().repeat_interleave(32, 1)
        return name.removesuffix("_packed"), numbers.bfloat16().float()
    if f"{name}_scale_2" in weights:
        codes = torch.stack((weight & 15, weight >> 4), -1).flatten(-2).long()
        scales = weights[f"{name}_scale"].float().repeat_interleave(16, -1) * weights[f"{name}_scale_2"]
        return name, _E2M1[codes] * scales
    if weight.dtype == torch.float8_e4m3fn:
        blocks = weights.get(f"{name}_scale_inv")
        if blocks is None:
            return name, weight.float() * weights[f"{name}_scale"]
        return name, weight.float() * blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
    if name.endswith("_blocks"):
        name = name.removesuffix("_blocks")
        codes = torch.stack((weight & 15, weight >> 4), -1).flatten(-2).long()
        scales = torch.exp2(weights[f"{name}_scales"].float() - 127)
        return name, (_E2M1[codes] * scales[..., None]).flatten(-2).transpose(1, 2).contiguous()
    return name, weight.float()


def _read(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def _plain(weights: dict[str, Tensor]) -> list[str]:
    return [name for name in weights if not name.endswith(("_scale", "_scale_inv", "_scales", "_scale_2", "_shape"))]


def dequantised(checkpoint: Path, folder: Path) -> Path:
    """The folder, with a checkpoint of the same numbers in bf16."""
    from safetensors.torch import save_file

    weights = _read(checkpoint)
    numbers = {name: value.bfloat16() for name, value in (_numbers(name, weights) for name in _plain(weights))}
    for name, value in (_numbers(name, weights) for name in _plain(weights)):
        assert torch.equal(numbers[name].float(), value), f"{name} has numbers that bf16 has not"
    save_file(numbers, folder / "model.safetensors")
    for file in checkpoint.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Reference:
    """transformers' own model in fp32 on the checkpoint's numbers: no line of SGLang or oxmoe takes part."""

    def __init__(self, folder: Path) -> None:
        import transformers

        weights = _read(folder)
        config = transformers.AutoConfig.from_pretrained(folder)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
        self.model: Any = getattr(transformers, architecture).from_pretrained(
            None,
            config=config,
            state_dict=dict(_numbers(name, weights) for name in _plain(weights)),
            dtype=torch.float32,
            attn_implementation="eager",
        )

    def logprobs(self, tokens: list[int]) -> Tensor:
        """Of each token but the first, given those before it."""
        with torch.no_grad():
            rows = self.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return rows[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
