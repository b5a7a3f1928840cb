"""Models of checkpoints: the config and the tensors of each, with random weights of the model's sizes.

A model is made for a number of layers, from a source of random weights that knows the experts' format. `small` sizes
are for a machine without a GPU.
"""

from __future__ import annotations

from models.common import VOCABULARY, Model, Weights
from models.deepseek_v3 import DeepSeekV3
from models.deepseek_v4 import DeepSeekV4
from models.gpt_oss import GptOss
from models.kimi_k3 import KimiK3
from models.llama4 import Llama4
from models.minimax_m3 import MiniMaxM3
from models.mixtral import Mixtral
from models.qwen3 import Glm4, Qwen3

__all__ = ["MODELS", "VOCABULARY", "Model", "Weights"]


MODELS: dict[str, type[Model]] = {
    "gpt": GptOss,
    "mixtral": Mixtral,
    "llama4": Llama4,
    "qwen": Qwen3,
    "glm": Glm4,
    "deepseek": DeepSeekV3,
    "minimax-m3": MiniMaxM3,
    "kimi-k3": KimiK3,
    "deepseek-v4": DeepSeekV4,
}
