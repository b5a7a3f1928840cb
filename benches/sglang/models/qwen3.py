"""Qwen3-30B-A3B, and GLM-4.5-Air, whose shared expert is in bf16 whatever the experts' format is."""

from __future__ import annotations

from torch import Tensor

from models.common import Model, Weights, attention, attention_config, gated, norms, ones


class Qwen3(Model):
    sizes = (2048, 32, 4, 128, 128, 8, 768)

    def __init__(self, weights: Weights, layers: int) -> None:
        self.weights = weights
        self.hidden, self.heads, self.key_heads, self.head, self.of, chosen, self.inner = (
            (256, 4, 2, 64, 8, 2, weights.experts.small_inner) if weights.small else self.sizes
        )
        self.config = attention_config(self.hidden, layers, self.heads, self.key_heads, self.head) | {
            "num_experts_per_tok": chosen,
            "moe_intermediate_size": self.inner,
            "norm_topk_prob": True,
        }
        self.config |= self._own()

    def _own(self) -> dict:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "intermediate_size": 4 * self.hidden,
            "num_experts": self.of,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def layer(self, n: int) -> dict[str, Tensor]:
        w, p = self.weights, f"model.layers.{n}."
        t = norms(p, self.hidden) | attention(w, p, self.hidden, self.heads, self.key_heads, self.head)
        t |= self._beside_experts(p)
        for e in range(self.of):
            t |= gated(w.expert, f"{p}mlp.experts.{e}", self.hidden, self.inner)
        return t

    def _beside_experts(self, p: str) -> dict[str, Tensor]:
        return {
            p + "self_attn.q_norm.weight": ones(self.head),
            p + "self_attn.k_norm.weight": ones(self.head),
            p + "mlp.gate.weight": self.weights.randn(self.of, self.hidden),
        }


class Glm4(Qwen3):
    sizes = (4096, 96, 8, 128, 128, 8, 1408)

    def _own(self) -> dict:
        return {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "intermediate_size": 2 * self.hidden,
            "n_routed_experts": self.of,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "num_nextn_predict_layers": 0,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5 if self.weights.small else 1.0,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
        }

    def _beside_experts(self, p: str) -> dict[str, Tensor]:
        return {
            p + "mlp.gate.weight": self.weights.randn(self.of, self.hidden),
            p + "mlp.gate.e_score_correction_bias": self.weights.randn(self.of, scale=0.1).float(),
        }

    def layer(self, n: int) -> dict[str, Tensor]:
        shared = f"model.layers.{n}.mlp.shared_experts"
        return super().layer(n) | gated(self.weights.linear, shared, self.hidden, self.inner)
