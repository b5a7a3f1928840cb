"""What the models of checkpoints share: random weights, an attention of queries, keys and values, and its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from experts import Format, plain
from torch import Tensor

VOCABULARY = 1024


class Weights:
    """Random weights: plain ones in bf16, and matrices in the checkpoint's format."""

    def __init__(self, experts: Format, seed: int) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.small = self.device == "cpu"
        self.rng = torch.Generator(self.device).manual_seed(seed)
        self.experts = experts

    def randn(self, *size: int, scale: float | None = None) -> Tensor:
        """bf16 numbers, by default of a matrix that keeps the size of what it multiplies."""
        scale = size[-1] ** -0.5 if scale is None else scale
        return (torch.randn(size, generator=self.rng, device=self.device) * scale).bfloat16().cpu()

    def integers(self, low: int, high: int, *size: int) -> Tensor:
        """uint8 from low to high - 1."""
        return torch.randint(low, high, size, dtype=torch.uint8, generator=self.rng, device=self.device).cpu()

    def expert(self, rows: int, columns: int) -> dict[str, Tensor]:
        """An expert's matrix in the checkpoint's format: its tensors by the ends of their names."""
        numbers = torch.randn(rows, columns, generator=self.rng, device=self.device) * columns**-0.5
        return {end: tensor.cpu() for end, tensor in self.experts.store(numbers.bfloat16(), self.rng).items()}

    def linear(self, rows: int, columns: int) -> dict[str, Tensor]:
        """A matrix that is not an expert's, in the checkpoint's format of such matrices."""
        return (self.experts.linear or plain)(self.randn(rows, columns), self.rng)


class Model:
    """A model with so many layers. `config` is config.json without the format."""

    formats = True  # whether the experts may be in any format of experts.py
    root = ""  # of every tensor's name
    config: dict[str, Any]
    hidden: int

    def __init__(self, weights: Weights, layers: int) -> None:
        raise NotImplementedError

    def layer(self, n: int) -> dict[str, Tensor]:
        """Makes the tensors of layer n by their names."""
        raise NotImplementedError

    def rest(self) -> dict[str, Tensor]:
        """Makes tensors of no layer besides the embedding, the output rows and the last norm, by their names. Those of
        the same name take their place."""
        return {}


def ones(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.bfloat16)


def named(name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{end}": part for end, part in parts.items()}


def attention_config(hidden: int, layers: int, heads: int, key_heads: int, head: int) -> dict:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "head_dim": head,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": VOCABULARY,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def norms(p: str, hidden: int) -> dict[str, Tensor]:
    return {p + "input_layernorm.weight": ones(hidden), p + "post_attention_layernorm.weight": ones(hidden)}


def attention(weights: Weights, p: str, hidden: int, heads: int, key_heads: int, head: int) -> dict[str, Tensor]:
    of = {"q": (heads * head, hidden), "k": (key_heads * head, hidden), "v": (key_heads * head, hidden)}
    of["o"] = (hidden, heads * head)
    tensors = {}
    for name, size in of.items():
        tensors |= named(f"{p}self_attn.{name}_proj", weights.linear(*size))
    return tensors


@dataclass(frozen=True)
class Latent:
    """DeepSeek's attention (MLA) with queries, keys and values of low rank."""

    q_rank: int
    kv_rank: int
    nope: int  # columns of a head's queries and keys without rotation
    rope: int  # and with it
    value: int  # columns of a head's values

    def config(self) -> dict[str, int]:
        return {
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.value,
        }

    def tensors(self, weights: Weights, p: str, hidden: int, heads: int) -> dict[str, Tensor]:
        tensors = {
            p + "self_attn.q_a_layernorm.weight": ones(self.q_rank),
            p + "self_attn.kv_a_layernorm.weight": ones(self.kv_rank),
        }
        for name, rows, columns in (
            ("q_a_proj", self.q_rank, hidden),
            ("q_b_proj", heads * (self.nope + self.rope), self.q_rank),
            ("kv_a_proj_with_mqa", self.kv_rank + self.rope, hidden),
            ("kv_b_proj", heads * (self.nope + self.value), self.kv_rank),
            ("o_proj", hidden, heads * self.value),
        ):
            tensors |= named(f"{p}self_attn.{name}", weights.linear(rows, columns))
        return tensors


def gated(make, p: str, hidden: int, inner: int) -> dict[str, Tensor]:
    """The three matrices of a gated expert: `make` makes a matrix of so many rows and columns, as its tensors."""
    tensors = {}
    for name, rows, columns in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        tensors |= named(f"{p}.{name}", make(rows, columns))
    return tensors
