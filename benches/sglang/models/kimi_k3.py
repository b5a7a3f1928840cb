"""Kimi-K3's language model: heads and experts' columns are those of one rank of eight.

Three of four layers have linear attention (KDA), the fourth has MLA with a gate. Experts work in a latent space of half
the hidden size, with SiTU, beside shared experts in bf16. Each layer reads a mixture of the residual stream and of its
earlier states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.common import VOCABULARY, Latent, Model, Weights, gated, named, norms, ones

_TAPS = 4  # of the convolution before a KDA layer's attention


class KimiK3(Model):
    def __init__(self, weights: Weights, layers: int) -> None:
        self.weights, self.layers, small = weights, layers, weights.small
        self.hidden, self.latent, self.heads, self.of, chosen, self.inner = (
            (512, 256, 4, 8, 2, 128) if small else (7168, 3584, 12, 896, 16, 384)
        )
        self.attention = Latent(64, 64, 32, 16, 32) if small else Latent(1536, 512, 128, 64, 128)
        self.head = self.attention.value  # columns of a head of linear attention
        self.shared = 2 * self.inner  # columns of both shared experts
        full = range(4, layers + 1, 4)  # numbers of layers with MLA, from 1 on
        self.kda = [n for n in range(1, layers + 1) if n not in full]
        self.config = {
            "architectures": ["KimiK3LinearForCausalLM"],
            "model_type": "kimi_linear",
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            **self.attention.config(),
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "linear_attn_config": {
                "kda_layers": self.kda,
                "full_attn_layers": list(full),
                "head_dim": self.head,
                "num_heads": self.heads,
                "short_conv_kernel_size": _TAPS,
                "use_full_rank_gate": True,
                "gate_lower_bound": -5.0,
            },
            "attn_res_block_size": 2,
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
            "num_experts": self.of,
            "num_experts_per_token": chosen,
            "num_shared_experts": 2,
            "num_expert_group": 1,
            "topk_group": 1,
            "moe_router_activation_func": "sigmoid",
            "moe_renormalize": True,
            "routed_scaling_factor": 2.5,
            "moe_intermediate_size": self.inner,
            "routed_expert_hidden_size": self.latent,
            "latent_moe_use_norm": True,
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "num_nextn_predict_layers": 0,
            "vocab_size": VOCABULARY,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        }

    def layer(self, n: int) -> dict[str, Tensor]:
        w, H, p = self.weights, self.hidden, f"model.layers.{n}."
        t = norms(p, H) | (self._kda(p) if n + 1 in self.kda else self._mla(p))
        for part in ("self_attention", "mlp"):
            t |= self._mixture(f"{p}{part}_res")
        t |= {
            p + "mlp.gate.weight": w.randn(self.of, H),
            p + "mlp.gate.e_score_correction_bias": w.randn(self.of, scale=0.1).float(),
            p + "mlp.routed_expert_down_proj.weight": w.randn(self.latent, H),
            p + "mlp.routed_expert_norm.weight": ones(self.latent),
            p + "mlp.routed_expert_up_proj.weight": w.randn(H, self.latent),
        }
        for e in range(self.of):
            for name, size in (("w1", (self.inner, self.latent)), ("w3", (self.inner, self.latent))):
                t |= named(f"{p}mlp.experts.{e}.{name}", w.expert(*size))
            t |= named(f"{p}mlp.experts.{e}.w2", w.expert(self.latent, self.inner))
        t |= gated(lambda *size: {"weight": w.randn(*size)}, p + "mlp.shared_experts", H, self.shared)
        # The mixture after all layers is in the last layer's file.
        return t | (self._mixture("model.output_attn_res") if n + 1 == self.layers else {})

    def _mixture(self, name: str) -> dict[str, Tensor]:
        """The scores of the stream's states, of which the softmax says how they are mixed."""
        return {f"{name}_norm.weight": ones(self.hidden), f"{name}_proj.weight": self.weights.randn(1, self.hidden)}

    def _kda(self, p: str) -> dict[str, Tensor]:
        w, H, columns = self.weights, self.hidden, self.heads * self.head
        t = {f"{p}self_attn.{name}_proj.weight": w.randn(columns, H) for name in ("q", "k", "v", "g")}
        t |= {f"{p}self_attn.{name}_conv1d.weight": w.randn(columns, 1, _TAPS).float() for name in ("q", "k", "v")}
        return t | {
            p + "self_attn.b_proj.weight": w.randn(self.heads, H),
            p + "self_attn.f_a_proj.weight": w.randn(self.head, H),
            p + "self_attn.f_b_proj.weight": w.randn(columns, self.head),
            p + "self_attn.dt_bias": w.randn(columns, scale=0.5).float(),
            p + "self_attn.A_log": torch.log(1 + 15 * torch.rand(self.heads, generator=w.rng, device=w.device)).cpu(),
            p + "self_attn.o_norm.weight": ones(self.head),
            p + "self_attn.o_proj.weight": w.randn(H, columns),
        }

    def _mla(self, p: str) -> dict[str, Tensor]:
        gate = self.weights.randn(self.heads * self.attention.value, self.hidden)
        tensors = self.attention.tensors(self.weights, p, self.hidden, self.heads)
        return tensors | {p + "self_attn.g_proj.weight": gate}
