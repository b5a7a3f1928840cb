"""Kinds of checkpoints (checkpoint.py) that serve.py runs, and the options of their servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    environment: Mapping[str, str] = field(default_factory=dict)  # of both


# Pages have the size of the model's blocks, as with the attention that SGLang chooses for it on Hopper. SGLang's model
# joins projections while it loads weights, and frees what they were made of, so it cannot load weights again.
MINIMAX_M3: dict[str, Any] = {"options": ("--page-size", "128"), "dense": 1, "updates": False}

# With these SGLang's DeepSeek-V4 needs neither DeepGEMM nor flashinfer, and TileLang for one kernel alone: torch and
# Triton compute the mixing of residuals, the scores of the indexer and their top-k. SGLang takes wo_a in bf16 then. In
# the capture of graphs SGLang would compile that mixing with torch.compile, again for each size of a batch.
V4_LEAST = {
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_POST": "0",
    "SGLANG_OPT_FP8_WO_A_GEMM": "0",
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1",
    "SGLANG_OPT_DSV4_NONPAGED_INDEXER": "0",
    "TORCH_COMPILE_DISABLE": "1",
}
# torch's scores of the indexer take memory by the length of the context. Windows take room in a pool of their own.
V4_OPTIONS = ("--attention-backend", "dsv4", "--context-length", "4096", "--swa-full-tokens-ratio", "0.5")

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
    # SGLang's call of flashinfer leaves SiTU out, and Marlin does not. Before it captures graphs, SGLang imports
    # flashinfer to tune kernels that do not run with oxmoe. Neither server can update these weights: their parameters
    # are laid out anew after loading.
    "kimi-k3-mxfp4": Kind(
        "Kimi-K3, MXFP4, a rank's part of eight",
        92,
        on=("--moe-runner-backend", "flashinfer_mxfp4", "--disable-flashinfer-autotune"),
        off=("--moe-runner-backend", "marlin"),
        # Otherwise the states of linear attention would take the memory of another server on this GPU.
        options=("--max-mamba-cache-size", "256"),
        sm90_layout=True,
        updates=False,
    ),
    # SGLang would choose flashinfer for these experts. Marlin needs no flashinfer.
    "deepseek-v4": Kind(
        "DeepSeek-V4-Flash, MXFP4 experts in an fp8 checkpoint",
        43,
        options=("--moe-runner-backend", "marlin", "--dsa-topk-backend", "torch", *V4_OPTIONS),
        environment=V4_LEAST,
    ),
}
