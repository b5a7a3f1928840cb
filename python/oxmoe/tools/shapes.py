"""The sizes of MoE layers of real models. The bench times them, and `python -m oxmoe explain --layer` knows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SITU = {"activation": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0}  # Kimi-K3's numbers
GPT_OSS = {"layout": "interleaved", "alpha": 1.702, "beta": 1.0, "limit": 7.0}


@dataclass(frozen=True)
class Shape:
    """One MoE layer. It has gated silu or SiTU, rows [gate; up] and no biases, or GPT-OSS's clamped form, interleaved
    rows and biases."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    gpt_oss: bool = False
    limit: float | None = None  # bound of gate and |up|, for DeepSeek-V4; GPT-OSS has its own
    situ: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Returns the options of ExpertWeights and of the reference, without the biases."""
        if self.gpt_oss:
            return dict(GPT_OSS)
        if self.situ:
            return dict(SITU)
        return {} if self.limit is None else {"limit": self.limit}


@dataclass(frozen=True)
class ModelShape(Shape):
    """A layer whose options `Shape` does not have: another activation, another clamp, other numbers."""

    more: tuple[tuple[str, Any], ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        return super().options | dict(self.more)


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "qwen3-30b-a3b-tp4": Shape(128, 8, 2048, 192),
    "qwen3-30b-a3b-tp8": Shape(128, 8, 2048, 96),
    "qwen3-235b": Shape(128, 8, 4096, 1536),
    "qwen3-235b-tp4": Shape(128, 8, 4096, 384),
    "qwen3-235b-tp8": Shape(128, 8, 4096, 192),
    "mixtral-8x7b-tp2": Shape(8, 2, 4096, 7168),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, gpt_oss=True),
    "gpt-oss-120b": Shape(128, 4, 2880, 2880, gpt_oss=True),
    "deepseek-v4-like": Shape(256, 6, 4096, 2048, limit=10.0),
    "kimi-k2-tp8": Shape(384, 8, 7168, 256),
    "kimi-k3-ep8": Shape(112, 16, 3584, 3072, situ=True),  # its experts have a latent size
    "glm-4.5-air-tp2": Shape(128, 8, 4096, 704),
    "glm-4.5-air-tp4": Shape(128, 8, 4096, 352),
    "glm-4.5-air-tp8": Shape(128, 8, 4096, 176),
    "deepseek-v2-lite": Shape(64, 6, 2048, 1408),
    "dsv3-tp8": Shape(256, 8, 7168, 256),
    "dsv3-ep8": Shape(32, 8, 7168, 2048),
    "e256-h2048-i512": Shape(256, 8, 2048, 512),  # flashinfer's MonoMoE is built for this size
    "granite-1b-a400m": Shape(32, 8, 1024, 512),
}
