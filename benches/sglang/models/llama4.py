"""Llama-4: one expert a token, whose router weight goes to the input, beside a shared one."""

from __future__ import annotations

from torch import Tensor

from models.common import VOCABULARY, Model, Weights, attention, norms


class Llama4(Model):
    formats = False
    root = "language_model."

    def __init__(self, weights: Weights, layers: int) -> None:
        self.weights, small = weights, weights.small
        self.hidden, self.heads, self.key_heads, self.head, self.of, chosen, self.inner = (
            (256, 4, 2, 64, 8, 1, 128) if small else (5120, 40, 8, 128, 16, 1, 8192)
        )
        self.config = {
            "architectures": ["Llama4ForConditionalGeneration"],
            "model_type": "llama4",
            "text_config": {
                "model_type": "llama4_text",
                "hidden_size": self.hidden,
                "intermediate_size": self.inner,
                "intermediate_size_mlp": 2 * self.inner,
                "num_hidden_layers": layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.key_heads,
                "head_dim": self.head,
                "num_local_experts": self.of,
                "num_experts_per_tok": chosen,
                "interleave_moe_layer_step": 1,
                "attention_chunk_size": 8192,
                "use_qk_norm": True,
                "rope_theta": 500000.0,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "max_position_embeddings": 4096,
                "vocab_size": VOCABULARY,
                "tie_word_embeddings": False,
                "torch_dtype": "bfloat16",
                **{"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2},
            },
            # The checkpoint has no tensors of images, so SGLang builds no part for them.
            "vision_config": {
                "model_type": "llama4_vision_model",
                "hidden_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 128,
                "image_size": 28,
                "patch_size": 14,
                **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 64),
            },
            **{"boi_token_index": 3, "eoi_token_index": 4, "image_token_index": 5},
        }
        if small:
            # On a CPU SGLang's model leaves the rotation of queries and keys out; with this factor it turns nothing.
            self.config["text_config"]["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": 1e9,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1,
            }

    def layer(self, n: int) -> dict[str, Tensor]:
        w, H, inner, p = self.weights, self.hidden, self.inner, f"model.layers.{n}."
        t = norms(p, H) | attention(w, p, H, self.heads, self.key_heads, self.head)
        t[p + "feed_forward.router.weight"] = w.randn(self.of, H)
        # All experts lie in one tensor, with columns and rows exchanged.
        t[p + "feed_forward.experts.gate_up_proj"] = w.randn(self.of, H, 2 * inner, scale=H**-0.5)
        t[p + "feed_forward.experts.down_proj"] = w.randn(self.of, inner, H, scale=inner**-0.5)
        for name, size in (("gate_proj", (inner, H)), ("up_proj", (inner, H)), ("down_proj", (H, inner))):
            t[f"{p}feed_forward.shared_expert.{name}.weight"] = w.randn(*size)
        return t
