"""MiniMax-M3's text model: heads and columns are those of one rank of eight.

As in the true model, the first layers have attention over all tokens and a dense MLP (one layer here, three there). The
others have experts, with a shared one, and attention over blocks that an index chooses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.common import Model, Weights, attention, attention_config, gated, named

DENSE = 1  # first layers without experts and without an index
NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class MiniMaxM3(Model):
    def __init__(self, weights: Weights, layers: int) -> None:
        self.weights = weights
        self.head = 128  # the model's kernel of norms and rotation takes no other
        self.hidden, self.heads, self.key_heads, self.of, chosen, self.inner, self.dense = (
            (256, 4, 1, 8, 2, weights.experts.small_inner, 192) if weights.small else (6144, 8, 1, 128, 4, 384, 1536)
        )
        others = [int(n >= DENSE) for n in range(layers)]
        self.config = attention_config(self.hidden, layers, self.heads, self.key_heads, self.head) | {
            "architectures": ["MiniMaxM3SparseForCausalLM"],
            "model_type": "minimax_m2",  # as the true text model's
            "intermediate_size": self.inner,
            "dense_intermediate_size": self.dense,
            "moe_layer_freq": others,
            "num_local_experts": self.of,
            "num_experts_per_tok": chosen,
            "n_shared_experts": 1,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "routed_scaling_factor": 2.0,
            "hidden_act": "swigluoai",
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "use_qk_norm": True,
            "qk_norm_type": "per_head",
            "use_gemma_norm": True,
            "rotary_dim": 64,
            "rope_theta": 5000000,
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_attention_freq": others,
                "sparse_disable_index_value": others,
                "sparse_index_dim": self.head,
                "sparse_num_index_heads": self.key_heads,
                "sparse_block_size": 128,
                "sparse_topk_blocks": 16,
                "sparse_init_block": 0,
                "sparse_local_block": 1,
                "sparse_score_type": "max",
            },
        }

    def rest(self) -> dict[str, Tensor]:
        # Norms multiply by one more than their weights.
        return {"model.norm.weight": torch.zeros(self.hidden, dtype=torch.bfloat16)}

    def layer(self, n: int) -> dict[str, Tensor]:
        w, p = self.weights, f"model.layers.{n}."
        t = {p + f"{place}_layernorm.weight": self._norm(self.hidden) for place in ("input", "post_attention")}
        t |= attention(w, p, self.hidden, self.heads, self.key_heads, self.head)
        t |= {p + f"self_attn.{name}_norm.weight": self._norm(self.head) for name in ("q", "k")}
        if n < DENSE:
            return t | gated(w.linear, p + "mlp", self.hidden, self.dense)
        for name, heads in (("index_q", self.key_heads), ("index_k", 1)):
            t |= named(f"{p}self_attn.{name}_proj", w.linear(heads * self.head, self.hidden))
            t[f"{p}self_attn.{name}_norm.weight"] = self._norm(self.head)
        block = p + "block_sparse_moe."
        t[block + "gate.weight"] = w.randn(self.of, self.hidden).float()
        t[block + "e_score_correction_bias"] = w.randn(self.of, scale=0.1).float()
        for e in range(self.of):
            for name, tensor in gated(w.expert, "", self.hidden, self.inner).items():
                _, matrix, end = name.split(".")
                t[f"{block}experts.{e}.{NAMES[matrix]}.{end}"] = tensor
        return t | gated(w.linear, block + "shared_experts", self.hidden, self.inner)

    def _norm(self, size: int) -> Tensor:
        return self.weights.randn(size, scale=0.1)
