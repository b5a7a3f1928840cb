"""Knows the differences between SGLang's releases, for `python -m oxmoe check`."""

from __future__ import annotations

from oxmoe.sglang import capabilities
from oxmoe.tools.check.checkpoint import Refused


def check(version: str) -> None:
    """Raises Refused for a release that oxmoe does not serve, or does not know."""
    try:
        old, new = capabilities.is_old(version), capabilities.is_new(version)
    except ValueError as error:
        raise Refused(str(error)) from error
    if old:
        raise Refused(f"SGLang {version} is not served; served are {capabilities.RANGE}")
    if new:
        raise Refused(
            f"SGLang {version} is newer than {capabilities.LAST}: whether it has what oxmoe takes over is not known "
            "here; its start says so, and python -m oxmoe doctor beside it"
        )


def _since(version: str, first: str) -> bool:
    return capabilities.order(version) >= capabilities.order(first)


def has_cores(version: str) -> bool:
    """Whether the release takes MoE runners under names of others, also in place of its own."""
    return _since(version, "0.5.19")


def has_nvfp4(version: str) -> bool:
    """Whether the release has NVFP4 layers of compressed-tensors below Blackwell."""
    return _since(version, "0.5.22")


def has_nvfp4_linear(version: str) -> bool:
    """Whether the release has ModelOpt's NVFP4 linear layers below Blackwell."""
    return _since(version, "0.5.13")


# ModelOpt's algorithm or form -> the release from which SGLang reads it.
_MODELOPT = {"hybrid": "0.5.14", "W4A16_NVFP4": "0.5.19", "group_size": "0.5.17", "MXFP8": "0.5.18"}
# The release from which a mixture may name the layers of a text model in other ways.
_MORE_NAMES = "0.5.20"
_IN_MIXTURES = {"W4A16_NVFP4": "0.5.15", "MXFP8": "0.5.17", "FP8_PB_WO": "0.5.18", "FP8_BLOCK_SCALES": "0.5.20"}


def reads_modelopt(version: str, what: str, *, in_mixture: bool = False) -> bool:
    """Whether SGLang reads a quant_algo; a "hybrid" of fp8 and NVFP4; NVFP4 whose "group_size" is not given."""
    return _since(version, (_IN_MIXTURES if in_mixture else _MODELOPT).get(what, capabilities.FIRST))


def reads_flat_files(version: str) -> bool:
    """Whether SGLang reads an hf_quant_config.json whose fields are not in an object `quantization`."""
    return _since(version, "0.5.20")


def completes_mixtures(version: str) -> bool:
    """Whether SGLang reads hf_quant_config.json in place of a mixture in config.json that has no word of the KV
    cache."""
    return _since(version, "0.5.15")


def names_in_mixtures(version: str, name: str) -> list[str]:
    """Returns the names of a layer under which SGLang looks into a mixture's quantized_layers."""
    found, wrapped, inner = [name], "language_model.model.", "model.language_model."
    if not _since(version, "0.5.15"):
        return found
    if name.startswith(wrapped):
        found.append(inner + name.removeprefix(wrapped))
    elif name.startswith(inner):
        found.append(wrapped + name.removeprefix(inner))
        found += ["model." + name.removeprefix(inner)] * _since(version, _MORE_NAMES)
    elif name.startswith("model.") and _since(version, _MORE_NAMES):
        found.append(inner + name.removeprefix("model."))
    return found


def more_excluded_of_mixtures(version: str) -> tuple[str, ...]:
    """Returns the fields that SGLang reads for a mixture's excluded layers if there is no `ignore`."""
    return ("exclude_modules",) if _since(version, "0.5.18") else ()


def more_excluded_of_nvfp4(version: str) -> tuple[str, ...]:
    """Returns the fields that SGLang reads for excluded layers of NVFP4 if there is no `ignore`."""
    return ("modules_to_not_convert", "exclude_modules") if _since(version, "0.5.23") else ()


def tells_mixtures(version: str) -> bool:
    """Whether SGLang tells a mixture with NVFP4 layers from W4AFP8 by these layers."""
    return _since(version, "0.5.15")


def layer_decides(version: str) -> bool:
    """Whether a layer's own runner decides how tokens come. In older releases the server's --moe-runner-backend
    does."""
    return _since(version, "0.5.23")


def fp4_fields(version: str) -> frozenset[str]:
    """Returns the fields of an fp8 checkpoint's config that can say that experts are MXFP4, and that the release
    reads."""
    since = {"routed_experts_quant_method": "0.5.19", "store_dtype": "0.5.20"}
    return frozenset(name for name, first in since.items() if _since(version, first))
