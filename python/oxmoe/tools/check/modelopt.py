"""Finds the format of each layer's experts in checkpoints of NVIDIA's ModelOpt, or the reason why oxmoe does not
take it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oxmoe.sglang import formats
from oxmoe.tools.check import int4, releases, skipping
from oxmoe.tools.check.checkpoint import Fields, Refused, patterns, shown
from oxmoe.tools.check.families import Family, prefixes
from oxmoe.tools.check.format import Format
from oxmoe.tools.check.quantization import BF16, FP8_BLOCK, MXFP8, Formats

NVFP4 = Format("nvfp4", "NVFP4 of ModelOpt, bf16 activations", "nvfp4", 4 + 8 / 16, frozenset({"U8"}))
FP8 = Format("fp8_tensor", "fp8, a scale a matrix, static activations", "fp8_tensor-static", 8, frozenset({"F8_E4M3"}))
_BLOCKS = ("FP8_PB_WO", "FP8_BLOCK_SCALES")
MIXED = "MIXED_PRECISION"
_W4A16 = "W4A16_NVFP4"
_OF_MIXTURES = {"NVFP4": NVFP4, _W4A16: NVFP4, "FP8": FP8, "MXFP8": MXFP8, **dict.fromkeys(_BLOCKS, FP8_BLOCK)}
_FP8_FROM = 89  # SGLang's least compute capability for such checkpoints
OLD_LINEAR = (
    "NVFP4 linear layers, where the checkpoint has some, are for Blackwell alone in this release, and end the start"
)


def of_layers(
    config: Fields | None, architecture: str, family: Family, others: Callable[[], Formats], *, gpu: str, version: str
) -> Formats:
    """Returns the format of each layer's experts. config: a checkpoint's quantization_config. others: the function
    for checkpoints that ModelOpt did not make."""
    if config is None:
        return others()
    if formats.served_fp8(config.values) and formats.is_hybrid(config.values):
        return _hybrid(config, family, others, gpu=gpu, version=version)
    method, algorithm = config.text("quant_method"), config.text("quant_algo")
    if (method is not None and not method.startswith("modelopt")) or algorithm is None:
        return others()
    algorithm = algorithm.upper()
    if algorithm == MIXED:
        found: Formats = _mixture(config, architecture, family, gpu=gpu, version=version)
        if not config.values.get("quantized_layers"):
            return found  # W4AFP8, of which SGLang excludes no experts
    elif algorithm in ("NVFP4", _W4A16) and releases.reads_modelopt(version, algorithm):
        _check_nvfp4(_group_size(config, version), gpu)
        found = _all(NVFP4)
    elif algorithm == "FP8":
        _check_fp8(gpu)
        found = _all(FP8)
    elif algorithm == "MXFP8":
        raise Refused("MXFP8 as ModelOpt writes it: whether SGLang hands it to oxmoe is not known")
    else:
        raise Refused(f"ModelOpt's quant_algo {algorithm} is not served in SGLang {version}")
    excluded = config.listed("ignore", str) or config.listed("exclude_modules", str) or []
    return _unless(excluded, found, _all(BF16), family)


def _all(format: Format) -> Formats:
    return lambda layer: format


def _unless(excluded: list[str], found: Formats, left: Formats, family: Family) -> Formats:
    """Returns `left` for layers that the checkpoint excludes."""

    def of_layer(layer: int) -> Format:
        with patterns("quantization_config: ignore or exclude_modules"):
            skipped = any(skipping.modelopt_skips(name, excluded) for name in prefixes(family, layer))
        return (left if skipped else found)(layer)

    return of_layer


def _check_nvfp4(group_size: Any, gpu: str) -> None:
    if group_size != formats.NVFP4_BLOCK:
        raise Refused(f"NVFP4 with group_size {shown(group_size)}: served is {formats.NVFP4_BLOCK}")
    if gpu != "sm_90":
        raise Refused(f"oxmoe takes ModelOpt's NVFP4 experts on sm_90, not on {gpu}")


def _check_fp8(gpu: str) -> None:
    if int(gpu.removeprefix("sm_")) < _FP8_FROM:
        raise Refused(f"SGLang serves ModelOpt's fp8 from sm_{_FP8_FROM} on, not on {gpu}")


def _group_size(config: Fields, version: str) -> Any:
    """Reads the group size where SGLang looks for it."""
    groups = config.within("config_groups")
    first = groups.within(next(iter(groups.values), "")) if groups is not None else None
    weights = first.within("weights") if first is not None else None
    size = config.get("group_size") or (weights.get("group_size") if weights is not None else None)
    if size is None and releases.reads_modelopt(version, "group_size"):
        return formats.NVFP4_BLOCK
    return size


def _hybrid(config: Fields, family: Family, others: Callable[[], Formats], *, gpu: str, version: str) -> Formats:
    """Reads an fp8 checkpoint whose experts are NVFP4. Experts of excluded layers have another format."""
    if not releases.reads_modelopt(version, "hybrid"):
        raise Refused(f"moe_quant_algo NVFP4 in an fp8 checkpoint: SGLang {version} does not load it")
    _check_nvfp4(config.get("group_size"), gpu)
    return _unless(config.listed("ignore", str) or [], _all(NVFP4), lambda layer: others()(layer), family)


def _mixture(config: Fields, architecture: str, family: Family, *, gpu: str, version: str) -> Formats:
    """Reads a checkpoint that names a quant_algo for each of its layers. SGLang takes one that names none for
    W4AFP8."""
    given = config.within("quantized_layers")
    told = releases.tells_mixtures(version)
    if given is None or not given.values:
        if config.text("quant_method") == "modelopt_mixed" or (not told and architecture.startswith("NemotronH")):
            raise Refused(f"{MIXED} without quantized_layers: SGLang refuses it")
        return _all(int4.of_w4afp8(gpu))
    layers = {name: given.within(name) for name in given.values}
    algorithms = {name: (fields.text("quant_algo") or "").upper() for name, fields in layers.items() if fields}
    ours = not {"NVFP4", _W4A16}.isdisjoint(algorithms.values()) if told else architecture.startswith("NemotronH")
    if config.text("quant_method") != "modelopt_mixed" and not ours:
        why = "without NVFP4 layers" if told else "but of Nemotron-H"
        raise Refused(f"{MIXED} {why}: SGLang {version} takes it for W4AFP8")

    def of_layer(layer: int) -> Format:
        for prefix in prefixes(family, layer):
            for name, algorithm in algorithms.items():
                if name == prefix or name.startswith(f"{prefix}."):
                    return _of_mixture(algorithm, layers[name], gpu, version)
        return BF16

    return of_layer


def _of_mixture(algorithm: str, fields: Fields | None, gpu: str, version: str) -> Format:
    if algorithm not in _OF_MIXTURES or not releases.reads_modelopt(version, algorithm, in_mixture=True):
        raise Refused(f"experts of quant_algo {shown(algorithm)} in a mixture are not served in SGLang {version}")
    size = fields.get("group_size") if fields is not None else None
    if _OF_MIXTURES[algorithm] is NVFP4:
        _check_nvfp4(formats.NVFP4_BLOCK if size is None else size, gpu)
    if algorithm in _BLOCKS and size not in (None, formats.FP8_BLOCK):
        raise Refused(f"oxmoe has no kernels for fp8 with blocks of {shown(size)}, but of {formats.FP8_BLOCK}")
    if algorithm == "FP8":
        _check_fp8(gpu)
    return _OF_MIXTURES[algorithm]
