"""DeepSeek-V3: heads and experts' columns are those of one rank of eight. Routing is grouped, with a shared expert."""

from __future__ import annotations

from torch import Tensor

from models.common import VOCABULARY, Latent, Model, Weights, gated, norms


class DeepSeekV3(Model):
    def __init__(self, weights: Weights, layers: int) -> None:
        self.weights, small = weights, weights.small
        self.hidden, self.heads, self.of, chosen, self.inner = (256, 4, 8, 2, 128) if small else (7168, 16, 256, 8, 256)
        self.attention = Latent(64, 64, 32, 16, 32) if small else Latent(1536, 512, 128, 64, 128)
        self.config = {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "moe_intermediate_size": self.inner,
            "num_hidden_layers": layers,
            "num_nextn_predict_layers": 0,
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
            "n_routed_experts": self.of,
            "n_shared_experts": 1,
            "num_experts_per_tok": chosen,
            "n_group": 4 if small else 8,
            "topk_group": 2 if small else 4,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            **self.attention.config(),
            "vocab_size": VOCABULARY,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 4096,
            },
            "max_position_embeddings": 163840,
            "attention_bias": False,
            "tie_word_embeddings": False,
        }

    def layer(self, n: int) -> dict[str, Tensor]:
        w, H, p = self.weights, self.hidden, f"model.layers.{n}."
        t = norms(p, H) | self.attention.tensors(w, p, H, self.heads)
        t[p + "mlp.gate.weight"] = w.randn(self.of, H)
        t[p + "mlp.gate.e_score_correction_bias"] = w.randn(self.of, scale=0.1).float()
        for e in range(self.of):
            t |= gated(w.expert, f"{p}mlp.experts.{e}", H, self.inner)
        # The shared expert is like the others, unless the format says what other matrices are stored as.
        return t | gated(w.linear if w.experts.linear else w.expert, f"{p}mlp.shared_experts", H, self.inner)
