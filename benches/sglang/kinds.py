"""Kinds of checkpoints (checkpoint.py) that serve.py runs, and the options of their servers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    label: str
    on: tuple[str, ...] = ()  # options of the server with oxmoe
    off: tuple[str, ...] = ()  # options of the server without
    options: tuple[str, ...] = ()  # of both
    sm90_layout: bool = False  # whether the server with oxmoe gets that plugin
    updates: bool = True  # whether the weights are updated


KINDS = {
    # SGLang chooses triton_kernels for GPT-OSS. Its release for SGLang 0.5.23 needs a newer Triton than 3.6. Marlin
    # does not.
    "gpt": Kind("GPT-OSS-20B, MXFP4", off=("--moe-runner-backend", "marlin")),
    # A bf16 checkpoint gets oxmoe's quantization by name; other checkpoints get it by themselves.
    "qwen": Kind("Qwen3-30B-A3B, bf16", on=("--quantization", "oxmoe")),
    "qwen-fp8": Kind("Qwen3-30B-A3B, fp8 blocks"),
    "qwen-int4": Kind("Qwen3-30B-A3B, int4 of compressed-tensors"),
    "qwen-awq": Kind("Qwen3-30B-A3B, AWQ"),
    # SGLang's Marlin layer of GPTQ takes activations in f16 alone.
    "qwen-gptq": Kind("Qwen3-30B-A3B, GPTQ", off=("--dtype", "half")),
    "qwen-nvfp4": Kind("Qwen3-30B-A3B, NVFP4 of ModelOpt"),
    "deepseek-fp8": Kind("DeepSeek-V3, fp8 blocks, a rank's part of eight"),
    "deepseek-w4afp8": Kind("DeepSeek-V3, W4AFP8, a rank's part of eight"),
    # SGLang's call of flashinfer leaves SiTU out, and Marlin does not. Neither server can update these weights: their
    # parameters are laid out anew after loading.
    "kimi-k3-mxfp4": Kind(
        "Kimi-K3, MXFP4, a rank's part of eight",
        on=("--moe-runner-backend", "flashinfer_mxfp4"),
        off=("--moe-runner-backend", "marlin"),
        # Otherwise the states of linear attention would take the memory of another server on this GPU.
        options=("--max-mamba-cache-size", "256"),
        sm90_layout=True,
        updates=False,
    ),
}
