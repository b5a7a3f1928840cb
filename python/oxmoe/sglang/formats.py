"""Says which formats and sizes of experts oxmoe serves in SGLang. The adapters and `python -m oxmoe check` use these
rules.

The module imports neither SGLang nor torch.
"""

from __future__ import annotations

from typing import Any

from oxmoe.sglang import int4_schemes

FP8_BLOCK = 128  # rows and columns of one fp8 scale
NVFP4_BLOCK = 16  # weights of one NVFP4 scale
MXFP4_BLOCK = 32  # weights of one MXFP4 scale
# Formats whose experts may have biases. Of MXFP4 these are GPT-OSS's.
WITH_BIASES = ("bf16", "f16", "fp8_block", "fp8_tensor", "mxfp8")
COMPRESSED = ("compressed-tensors", "compressed_tensors")  # quant_method of a compressed-tensors checkpoint
# Format -> multiples of hidden_size and of a rank's intermediate_size that kernels need, as `oxmoe.explain` has them.
# SGLang's layers of MXFP4 round up.
MULTIPLES = {
    "fp8_block": (FP8_BLOCK, FP8_BLOCK),
    "fp8_tensor": (FP8_BLOCK, 16),
    "mxfp8": (32, 32),
    "mxfp4": (32, 32),
    "nvfp4": (NVFP4_BLOCK, NVFP4_BLOCK),
    "int4": (int4_schemes.BLOCK, int4_schemes.BLOCK),
}


def check_sizes(format: str, hidden_size: int, intermediate_size: int, *, of: str) -> None:
    """Raises NotImplementedError if no kernel takes experts of this format and these sizes. of: the name of the
    experts in the error."""
    multiples = dict(zip(("hidden_size", "intermediate_size of a rank"), MULTIPLES.get(format, (1, 1)), strict=True))
    sizes = zip(multiples.items(), (hidden_size, intermediate_size), strict=True)
    wrong = [f"{name} {size}" for (name, multiple), size in sizes if size % multiple]
    if wrong:
        of_hidden, of_columns = multiples.values()
        rule = (
            f"hidden_size and intermediate_size of a rank must be multiples of {of_hidden}"
            if of_hidden == of_columns
            else f"hidden_size must be a multiple of {of_hidden} and intermediate_size of a rank one of {of_columns}"
        )
        raise NotImplementedError(
            f"oxmoe: {of}: {rule}, got {' and '.join(wrong)}; start with --ep-size, so that fewer ranks share an "
            "expert, with another --tp-size, or without moe"
        )


def served_fp8(checkpoint: dict[str, Any] | None) -> bool:
    """Whether a checkpoint's quantization_config is MXFP8, or fp8 with a scale a matrix or a 128 x 128 block."""
    config = checkpoint or {}
    if config.get("quant_method") == "mxfp8":
        return not has_other_experts(config)
    return config.get("quant_method") == "fp8" and config.get("weight_block_size") in (None, [FP8_BLOCK, FP8_BLOCK])


def has_other_experts(checkpoint: dict[str, Any]) -> bool:
    """Whether an MXFP8 quantization_config says that its experts have another format, as MiniMax-M3.1's in NVFP4."""
    return bool(checkpoint.get("moe_quant_algo") or checkpoint.get("moe_quant_format"))


def is_hybrid(checkpoint: dict[str, Any]) -> bool:
    """Whether the experts of this fp8 quantization_config are ModelOpt's NVFP4, by SGLang's own rule."""
    named = [str(checkpoint.get(name, "")).upper() for name in ("quant_algo", "moe_quant_algo")]
    return named == ["MIXED_PRECISION", "NVFP4"] and checkpoint.get("group_size") is not None


def compressed_kind(weights: Any) -> str | None:
    """Returns "fp8", "nvfp4" or "mxfp4" for the weights of a config_group. It is None for other weights, and for
    malformed entries. "mxfp4" is served in Kimi-K3 alone, by a runner of SGLang's."""
    given = weights if isinstance(weights, dict) else {}
    if given.get("type") != "float":
        return None
    strategy = given.get("strategy")
    if given.get("num_bits") == 8:
        blocks = strategy == "block" and given.get("block_structure") == [FP8_BLOCK, FP8_BLOCK]
        return "fp8" if blocks or strategy in ("tensor", "channel") else None
    if given.get("num_bits") == 4 and strategy == "group" and given.get("group_size") == MXFP4_BLOCK:
        return "mxfp4"
    nvfp4 = given.get("num_bits") == 4 and strategy == "tensor_group" and given.get("group_size") == NVFP4_BLOCK
    return "nvfp4" if nvfp4 else None


# Formats of a compressed-tensors checkpoint, or of its groups, in which SGLang reads input_activations.
WITH_ACTIVATIONS = ("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "pack-quantized")


def compressed_fp8_served(weights: str | None, inputs: str | None) -> bool:
    """Whether SGLang has fp8 experts of compressed-tensors with these strategies of weights and activations."""
    return weights == "block" or (weights, inputs) in (("tensor", "tensor"), ("channel", "token"))


def compressed_served(checkpoint: dict[str, Any], *, nvfp4: bool) -> bool:
    """Whether oxmoe has experts for the formats of all layers in a compressed-tensors quantization_config.

    nvfp4: whether SGLang's release and the GPU have NVFP4 layers that oxmoe can take over.
    """
    groups = checkpoint.get("config_groups")
    listed = groups.values() if isinstance(groups, dict) else ()
    kinds = {_kind_of_group(group) for group in listed}
    return bool(kinds) and kinds <= {"fp8", "nvfp4", "int4"} and ("nvfp4" not in kinds or nvfp4)


def _kind_of_group(group: Any) -> str | None:
    """Returns the kind of a config_group. It is "int4" for integers that are not served, too: the layer that has them
    refuses them by name."""
    if int4_schemes.is_packed(group):
        return "int4"
    return compressed_kind(group.get("weights") if isinstance(group, dict) else None)
