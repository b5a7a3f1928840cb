"""DeepSeek-V4-Flash's first layers: MXFP4 experts in an fp8 checkpoint, and attention to compressed keys.

Each kind of layer is among the first four: two with a window alone, then one that joins 4 keys and one that joins 128.
The first three choose experts by a table of token ids, the fourth by its router.
"""

from __future__ import annotations

import math

import torch
from experts import to_e4m3
from torch import Tensor

from models.common import VOCABULARY, Model, Weights, named, ones

JOINED = (0, 0, 4, 128)  # keys, of each layer; 0: the layer has none but those in its window
BY_TOKEN = 3  # layers
STREAMS = 4  # residuals of a token
SPECIAL = ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant")
E8M0 = torch.float8_e8m0fnu


class DeepSeekV4(Model):
    formats = False
    # SGLang writes this model's chats with DeepSeek's own package, which asks the tokenizer for these.
    special = (*(f"<｜{name}｜>" for name in SPECIAL), "<think>", "</think>")  # noqa: RUF001

    def __init__(self, weights: Weights, layers: int) -> None:
        self.weights, small = weights, weights.small
        self.joined = [JOINED[min(n, 2 + n % 2)] for n in range(layers)]
        self.hidden, self.heads, self.head, self.of, self.chosen, self.inner = (
            (256, 4, 64, 8, 2, 128) if small else (4096, 64, 512, 256, 6, 2048)
        )
        self.q_rank, self.groups, self.o_rank = (128, 2, 64) if small else (1024, 8, 1024)
        self.index_heads, self.index_head = (4, 32) if small else (64, 128)
        self.config = {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.inner,
            "num_hidden_layers": layers,
            "num_nextn_predict_layers": 0,
            "num_hash_layers": BY_TOKEN,
            "n_routed_experts": self.of,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.chosen,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
            "expert_dtype": "fp4",
            "num_attention_heads": self.heads,
            "num_key_value_heads": 1,
            "head_dim": self.head,
            "qk_rope_head_dim": self.head // 8,
            "q_lora_rank": self.q_rank,
            "o_groups": self.groups,
            "o_lora_rank": self.o_rank,
            "sliding_window": 128,
            "compress_ratios": self.joined,
            "compress_rope_theta": 160000,
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_head,
            "index_topk": 512,
            "hc_mult": STREAMS,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "vocab_size": VOCABULARY,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 65536,
            },
            "max_position_embeddings": 1048576,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "scale_fmt": "ue8m0",
            },
        }

    def rest(self) -> dict[str, Tensor]:
        return {"hc_head_fn": self._mix(STREAMS), "hc_head_base": self._base(STREAMS), "hc_head_scale": _ones(1)}

    def layer(self, n: int) -> dict[str, Tensor]:
        w, H, p = self.weights, self.hidden, f"layers.{n}."
        t = {p + "attn_norm.weight": ones(H), p + "ffn_norm.weight": ones(H)} | self._attention(f"{p}attn.", n)
        for part in ("attn", "ffn"):
            mixed = (2 + STREAMS) * STREAMS
            t |= {
                f"{p}hc_{part}_fn": self._mix(mixed),
                f"{p}hc_{part}_base": self._base(mixed),
                f"{p}hc_{part}_scale": _ones(3),
            }
        t[p + "ffn.gate.weight"] = w.randn(self.of, H)
        if n < BY_TOKEN:
            of_tokens = torch.rand(VOCABULARY, self.of, generator=w.rng, device=w.device).topk(self.chosen).indices
            t[p + "ffn.gate.tid2eid"] = of_tokens.int().cpu()
        else:
            t[p + "ffn.gate.bias"] = w.randn(self.of, scale=0.1).float()
        for e in range(self.of):
            t |= self._gated(self._expert, f"{p}ffn.experts.{e}")
        return t | self._gated(self._fp8, f"{p}ffn.shared_experts")

    def _attention(self, p: str, n: int) -> dict[str, Tensor]:
        w, H, joined = self.weights, self.hidden, self.joined[n]
        t = {
            p + "attn_sink": w.randn(self.heads, scale=1.0).float(),
            p + "q_norm.weight": ones(self.q_rank),
            p + "kv_norm.weight": ones(self.head),
        }
        for name, rows, columns in (
            ("wq_a", self.q_rank, H),
            ("wq_b", self.heads * self.head, self.q_rank),
            ("wkv", self.head, H),
            ("wo_a", self.groups * self.o_rank, self.heads * self.head // self.groups),
            ("wo_b", H, self.groups * self.o_rank),
        ):
            t |= named(p + name, self._fp8(rows, columns))
        if joined:
            t |= self._compressor(f"{p}compressor.", joined, self.head)
        if joined == 4:
            t |= self._compressor(f"{p}indexer.compressor.", joined, self.index_head)
            t |= named(f"{p}indexer.wq_b", self._fp8(self.index_heads * self.index_head, self.q_rank))
            t[p + "indexer.weights_proj.weight"] = w.randn(self.index_heads, H)
        return t

    def _compressor(self, p: str, joined: int, head: int) -> dict[str, Tensor]:
        """Blocks of four keys overlap, so they have two columns for each one."""
        w, width = self.weights, head * (2 if joined == 4 else 1)
        return {
            p + "ape": w.randn(joined, width, scale=0.1).float(),
            p + "norm.weight": ones(head),
            p + "wkv.weight": w.randn(width, self.hidden),
            p + "wgate.weight": w.randn(width, self.hidden),
        }

    def _gated(self, make, p: str) -> dict[str, Tensor]:
        t = {}
        for name, rows, columns in (
            ("w1", self.inner, self.hidden),
            ("w2", self.hidden, self.inner),
            ("w3", self.inner, self.hidden),
        ):
            t |= named(f"{p}.{name}", make(rows, columns))
        return t

    def _fp8(self, rows: int, columns: int) -> dict[str, Tensor]:
        """e4m3 codes, and a power of two for each block of 128 rows and columns."""
        numbers = torch.randn(rows, columns, generator=self.weights.rng, device=self.weights.device) * columns**-0.5
        codes, scale = to_e4m3(numbers, 128, 128, powers=True)
        return {"weight": codes.cpu(), "scale": scale.to(E8M0).cpu()}

    def _expert(self, rows: int, columns: int) -> dict[str, Tensor]:
        """Two codes of e2m1 in a byte, and a power of two for each 32 columns, near that of the other weights' size."""
        w, power = self.weights, 125 - round(math.log2(columns) / 2)
        codes = w.integers(0, 256, rows, columns // 2).view(torch.int8)
        return {"weight": codes, "scale": w.integers(power, power + 2, rows, columns // 32).view(E8M0)}

    def _mix(self, rows: int) -> Tensor:
        return self.weights.randn(rows, STREAMS * self.hidden).float()

    def _base(self, rows: int) -> Tensor:
        return self.weights.randn(rows, scale=0.1).float()


def _ones(n: int) -> Tensor:
    return torch.ones(n)
