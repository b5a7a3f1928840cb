"""Mixtral 8x7B: a softmax over eight experts, in bf16."""

from __future__ import annotations

from torch import Tensor

from models.common import Model, Weights, attention, attention_config, norms


class Mixtral(Model):
    formats = False

    def __init__(self, weights: Weights, layers: int) -> None:
        self.weights = weights
        self.hidden, self.heads, self.key_heads, self.head, self.of, chosen, self.inner = (
            (256, 4, 2, 64, 8, 2, weights.experts.small_inner) if weights.small else (4096, 32, 8, 128, 8, 2, 14336)
        )
        self.config = attention_config(self.hidden, layers, self.heads, self.key_heads, self.head) | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "intermediate_size": self.inner,
            "num_local_experts": self.of,
            "num_experts_per_tok": chosen,
            "sliding_window": None,
        }

    def layer(self, n: int) -> dict[str, Tensor]:
        w, H, p = self.weights, self.hidden, f"model.layers.{n}."
        t = norms(p, H) | attention(w, p, H, self.heads, self.key_heads, self.head)
        t[p + "block_sparse_moe.gate.weight"] = w.randn(self.of, H)
        for e in range(self.of):
            for name, size in (("w1", (self.inner, H)), ("w3", (self.inner, H)), ("w2", (H, self.inner))):
                t[f"{p}block_sparse_moe.experts.{e}.{name}.weight"] = w.randn(*size)
        return t
