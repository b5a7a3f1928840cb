"""Kinds of checkpoints (checkpoint.py) that serve.py runs, and the options of their servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    label: str
    layers: int  # of the model, for --whole
    on: tuple[str, ...] = ()  # options of the server with oxmoe
    off: tuple[str, ...] = ()  # options of the server without
    options: tuple[str, ...] = ()  # of both
    without: str = ""  # kind of the checkpoint of the server without oxmoe, with equal numbers; "": the same checkpoint
    dense: int = 0  # layers without experts
    updates: bool = True  # whether SGLang's model can load weights again
    sm90_layout: bool = False  # whether the server with oxmoe gets that plugin


# Pages have the size of the model's blocks, as with the attention that SGLang chooses for it on Hopper. SGLang's model
# joins projections while it loads weights, and frees what they were made of, so it cannot load weights again.
MINIMAX_M3: dict[str, Any] = {"options": ("--page-size", "128"), "dense": 1, "updates": False}

KINDS = {
    # SGLang chooses triton_kernels for GPT-OSS. Its release for SGLang 0.5.23 needs a newer Triton than 3.6. Marlin
    # does not.
    "gpt": Kind("GPT-OSS-20B, MXFP4", 24, off=("--moe-runner-backend", "marlin")),
    # A bf16 checkpoint gets oxmoe's quantization by name; other checkpoints get it by themselves.
    "qwen": Kind("Qwen3-30B-A3B, bf16", 48, on=("--quantization", "oxmoe")),
    "qwen-fp8": Kind("Qwen3-30B-A3B, fp8 blocks", 48),
    "qwen-int4": Kind("Qwen3-30B-A3B, int4 of compressed-tensors", 48),
    "qwen-awq": Kind("Qwen3-30B-A3B, AWQ", 48),
    # SGLang's Marlin layer of GPTQ takes activations in f16 alone.
    "qwen-gptq": Kind("Qwen3-30B-A3B, GPTQ", 48, off=("--dtype", "half")),
    "qwen-nvfp4": Kind("Qwen3-30B-A3B, NVFP4 of ModelOpt", 48),
    "deepseek-fp8": Kind("DeepSeek-V3, fp8 blocks, a rank's part of eight", 58),
    "deepseek-w4afp8": Kind("DeepSeek-V3, W4AFP8, a rank's part of eight", 58),
    "minimax-m3": Kind("MiniMax-M3, bf16, a rank's part of eight", 58, on=("--quantization", "oxmoe"), **MINIMAX_M3),
    # SGLang's own MXFP8 experts run on Blackwell alone. For such a checkpoint it chooses flashinfer_trtllm, which oxmoe
    # takes over, and then imports flashinfer to tune it.
    "minimax-m3-mxfp8": Kind(
        "MiniMax-M3, MXFP8, a rank's part of eight; without oxmoe its numbers in bf16",
        58,
        on=("--disable-flashinfer-autotune",),
        without="minimax-m3-mxfp8-numbers",
        **MINIMAX_M3,
    ),
    # SGLang's call of flashinfer leaves SiTU out, and Marlin does not. Neither server can update these weights: their
    # parameters are laid out anew after loading.
    "kimi-k3-mxfp4": Kind(
        "Kimi-K3, MXFP4, a rank's part of eight",
        92,
        on=("--moe-runner-backend", "flashinfer_mxfp4"),
        off=("--moe-runner-backend", "marlin"),
        # Otherwise the states of linear attention would take the memory of another server on this GPU.
        options=("--max-mamba-cache-size", "256"),
        sm90_layout=True,
        updates=False,
    ),
}
