"""Makes checkpoints for servers on a CPU (by benches/sglang/checkpoint.py), and runs transformers on one."""

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


def make(folder: Path, kind: str, seed: int, layers: int = LAYERS) -> Path:
    """Returns the folder, with this kind of checkpoint in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(_MAKE), str(folder), kind, str(layers), str(seed)])
        patch.syspath_prepend(str(_MAKE.parent))
        patch.setattr(torch.cuda, "is_available", lambda: False)
        runpy.run_path(str(_MAKE), run_name="__main__")
    assert (folder / "tokenizer.json").is_file()
    return folder


def _of_words(words: Tensor) -> Tensor:
    """The eight codes of four bits in each int32 of the last dimension, from the lowest bits up."""
    return ((words[..., None].long() >> 4 * torch.arange(8)) & 15).flatten(-2)


def _of_int4(name: str, weights: dict[str, Tensor]) -> Tensor:
    """Numbers [rows, columns] of an AWQ or GPTQ matrix."""
    words, zeros, scales = (weights[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
    if f"{name}.g_idx" in weights:
        group, codes, zeros = weights[f"{name}.g_idx"].long(), _of_words(words.t()).t(), _of_words(zeros) + 1
    else:
        group = torch.arange(words.shape[0]) // (words.shape[0] // scales.shape[0])
        # AWQ's word holds the numbers 0, 2, 4, 6, 1, 3, 5, 7.
        places = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
        codes, zeros = (_of_words(part).unflatten(1, (-1, 8))[..., places].flatten(1) for part in (words, zeros))
    # The product is rounded once, as it is in every bf16 layer of such weights.
    return ((codes - zeros[group]) * scales.float()[group]).t().contiguous().bfloat16().float()


def _numbers(name: str, weights: dict[str, Tensor]) -> tuple[str, Tensor]:
    """Returns a weight's name and fp32 numbers as a model without a quantization has them."""
    weight = weights[name]
    if name.endswith(".qweight"):
        name = name.removesuffix(".qweight")
        return f"{name}.weight", _of_int4(name, weights)
    if name.endswith("weight_packed"):
        scales = weights[f"{name.removesuffix('_packed')}_scale"]
        numbers = (_of_words(weight) - 8) * scales.float().repeat_interleave(32, 1)
        return name.removesuffix("_packed"), numbers.bfloat16().float()
    if f"{name}_scale_2" in weights:
        codes = torch.stack((weight & 15, weight >> 4), -1).flatten(-2).long()
        scales = weights[f"{name}_scale"].float().repeat_interleave(16, -1) * weights[f"{name}_scale_2"]
        return name, _E2M1[codes] * scales
    if weight.dtype == torch.float8_e4m3fn:
        blocks = weights.get(f"{name}_scale_inv")
        if blocks is None:
            return name, weight.float() * weights[f"{name}_scale"].float()
        if blocks.dtype == torch.uint8:
            return name, weight.float() * torch.exp2(blocks.float() - 127).repeat_interleave(32, 1)
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
    beside = ("_scale", "_scale_inv", "_scales", "_scale_2", "_shape", ".scales", ".qzeros", ".g_idx")
    return [name for name in weights if not name.endswith(beside)]


def dequantised(checkpoint: Path, folder: Path) -> Path:
    """Returns the folder, with a checkpoint of the same numbers in bf16."""
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
        """Returns the log-probability of each token but the first, given the tokens before it."""
        with torch.no_grad():
            rows = self.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return rows[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
