"""GPT-OSS-20B: MXFP4 experts with biases, a bias of the router, and attention sinks."""

from __future__ import annotations

import torch
from torch import Tensor

from models.common import VOCABULARY, Model, Weights, attention, norms


class GptOss(Model):
    formats = False

    def __init__(self, weights: Weights, layers: int) -> None:
        self.weights = weights
        self.hidden, self.heads, self.key_heads, self.head, self.of, chosen, self.inner = (
            (256, 4, 2, 64, 8, 2, 128) if weights.small else (2880, 64, 8, 64, 32, 4, 2880)
        )
        self.config = {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": layers,
            "num_local_experts": self.of,
            "num_experts_per_tok": chosen,
            "experts_per_token": chosen,
            "head_dim": self.head,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
            "sliding_window": 128,
            "max_position_embeddings": 4096,
            "initial_context_length": 4096,
            "vocab_size": VOCABULARY,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000,
            "swiglu_limit": 7.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            },
        }

    def layer(self, n: int) -> dict[str, Tensor]:
        w, H, p = self.weights, self.hidden, f"model.layers.{n}."
        t = norms(p, H) | attention(w, p, H, self.heads, self.key_heads, self.head)
        for name, rows in (("q", self.heads), ("k", self.key_heads), ("v", self.key_heads)):
            t[f"{p}self_attn.{name}_proj.bias"] = w.randn(rows * self.head, scale=0.1)
        t[p + "self_attn.o_proj.bias"] = w.randn(H, scale=0.1)
        t |= {
            # SGLang's torch attention, which a CPU runs, leaves sinks out; sinks of -100 count for nothing.
            p + "self_attn.sinks": torch.full((self.heads,), -100.0).bfloat16()
            if w.small
            else w.randn(self.heads, scale=1.0),
            p + "mlp.router.weight": w.randn(self.of, H),
            p + "mlp.router.bias": w.randn(self.of, scale=0.1),
        }
        for name, rows, columns in (("gate_up_proj", 2 * self.inner, H), ("down_proj", H, self.inner)):
            t[f"{p}mlp.experts.{name}_blocks"] = w.integers(0, 256, self.of, rows, columns // 32, 16)
            # These scales give numbers of the size of the other weights.
            low = 120 if w.small else 119
            t[f"{p}mlp.experts.{name}_scales"] = w.integers(low, low + 2, self.of, rows, columns // 32)
            t[f"{p}mlp.experts.{name}_bias"] = w.randn(self.of, rows, scale=0.1)
        return t
