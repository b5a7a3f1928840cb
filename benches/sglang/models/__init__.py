"""Models of checkpoints: the config and the tensors of each, with random weights of the model's sizes.

A model is made for a number of layers, from a source of random weights that knows the experts' format. `small` sizes
are for a machine without a GPU. A model may have `rest`: tensors of no layer, by their names, besides the embedding,
the head and the norm before the head. And it may have `special`: tokens that its tokenizer has besides the others'.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from models.common import VOCABULARY, Weights
from models.deepseek_v3 import DeepSeekV3
from models.deepseek_v4 import DeepSeekV4
from models.gpt_oss import GptOss
from models.llama4 import Llama4
from models.mixtral import Mixtral
from models.qwen3 import Glm4, Qwen3

__all__ = ["MODELS", "VOCABULARY", "Model", "Weights"]


class Model(Protocol):
    formats: bool  # whether the experts may be in any format of experts.py
    config: dict  # config.json without the format
    hidden: int
    root: str  # of every tensor's name

    def __init__(self, weights: Weights, layers: int) -> None: ...

    def layer(self, n: int) -> dict[str, Tensor]:
        """Makes the tensors of layer n by their names."""
        ...


MODELS: dict[str, type[Model]] = {
    "gpt": GptOss,
    "mixtral": Mixtral,
    "llama4": Llama4,
    "qwen": Qwen3,
    "glm": Glm4,
    "deepseek": DeepSeekV3,
    "deepseek-v4": DeepSeekV4,
}
