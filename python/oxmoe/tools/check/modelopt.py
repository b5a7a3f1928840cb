"""Finds the format of each layer's experts in checkpoints of NVIDIA's ModelOpt, or the reason why oxmoe does not
take it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oxmoe.sglang import formats
from oxmoe.tools.check import int4, releases, skipping
from oxmoe.tools.check.checkpoint import Checkpoint, Fields, Refused, patterns, shown
from oxmoe.tools.check.families import Family, name_of_experts, renamed
from oxmoe.tools.check.format import Format
from oxmoe.tools.check.quantization import BF16, FP8_BLOCK, MXFP8, Formats, as_mxfp8, check_scheme

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


# quant_method -> the algorithms that SGLang takes under it. "modelopt" and no name stand for all.
_ONLY = {"modelopt_fp4": ("NVFP4", "NVFP4_AWQ", _W4A16), "modelopt_fp8": ("FP8",), "modelopt_mixed": (MIXED,)}


def of_layers(
    checkpoint: Checkpoint,
    config: Fields | None,
    architecture: str,
    family: Family,
    others: Callable[[], Formats],
    *,
    gpu: str,
    version: str,
) -> Formats:
    """Returns the format of each layer's experts. config: a checkpoint's quantization_config. others: the function
    for checkpoints that ModelOpt did not make."""
    if config is None:
        return others()
    file = checkpoint.quant_file
    if file is config and not releases.reads_flat_files(version):
        raise Refused(f"hf_quant_config.json without an object quantization: SGLang {version} does not read it")
    if formats.served_fp8(config.values) and formats.is_hybrid(config.values):
        return _hybrid(config, family, others, gpu=gpu, version=version)
    method, algorithm = config.text("quant_method"), config.text("quant_algo")
    if (method is not None and not method.startswith("modelopt")) or algorithm is None:
        return others()
    if method in _ONLY and algorithm not in _ONLY[method]:
        raise Refused(f"quant_method {method} with quant_algo {shown(algorithm)}: SGLang refuses it")
    nested = file is not None and config.values is file.values.get("quantization")
    if algorithm == MIXED:
        in_config = not nested and config is not file and (method == "modelopt_mixed" or _has_nvfp4(config))
        if in_config and releases.completes_mixtures(version):
            config, nested = _complete(config, file)
        found: Formats = _mixture(config, architecture, family, gpu=gpu, version=version)
        if not config.values.get("quantized_layers"):
            return found  # W4AFP8, of which SGLang excludes no experts
        places = ("exclude_modules",) if nested else ("ignore", *releases.more_excluded_of_mixtures(version))
    elif algorithm in ("NVFP4", _W4A16) and releases.reads_modelopt(version, algorithm):
        _check_nvfp4(_common_group_size(config, file) if nested else _group_size(config, version), gpu)
        found = _all(NVFP4)
        places = ("exclude_modules",) if nested else ("ignore", *releases.more_excluded_of_nvfp4(version))
        first = next((place for place in places if place in config.values), None)
        if first is not None and config.values[first] is None:
            raise Refused(f"NVFP4 whose {first} is null: SGLang refuses it")
    elif algorithm == "FP8":
        _check_fp8(gpu)
        found = _all(FP8)
        places = ("exclude_modules",) if nested else ("ignore",)
    elif algorithm == "MXFP8" and releases.reads_modelopt(version, algorithm):
        if config is file or nested:
            raise Refused("MXFP8 in hf_quant_config.json: SGLang does not read its layers there")
        excluded = config.listed("exclude_modules", str) if "exclude_modules" in config.values else None
        return as_mxfp8(family, excluded if "exclude_modules" in config.values else config.listed("ignore", str))
    else:
        raise Refused(f"ModelOpt's quant_algo {algorithm} is not served in SGLang {version}")
    # The first field that is there counts, also if it is null.
    place = next((place for place in places if place in config.values), places[0])
    return _unless(config.listed(place, str) or [], found, _all(BF16), family)


def _has_nvfp4(config: Fields) -> bool:
    """Whether a mixture has NVFP4 layers, by which SGLang tells it from W4AFP8."""
    layers = config.values.get("quantized_layers")
    listed = layers.values() if isinstance(layers, dict) else ()
    return any(str(of.get("quant_algo", "")).upper() in ("NVFP4", _W4A16) for of in listed if isinstance(of, dict))


def _complete(config: Fields, file: Fields | None) -> tuple[Fields, bool]:
    """Returns what SGLang reads of a mixture in config.json, and whether that is an hf_quant_config.json's object
    `quantization`: without a word of the KV cache it reads the file in its place."""
    if "kv_cache_quant_algo" in config.values or "kv_cache_scheme" in config.values:
        return config, False
    section = file and file.within("quantization")
    if file is None or (section or file).text("quant_algo") != MIXED:
        raise Refused(
            f"{MIXED} in config.json without kv_cache_quant_algo: SGLang looks for an hf_quant_config.json that says "
            "the same"
        )
    return section or file, section is not None


def _all(format: Format) -> Formats:
    return lambda layer: format


def _unless(excluded: list[str], found: Formats, left: Formats, family: Family) -> Formats:
    """Returns `left` for layers that the checkpoint excludes."""

    def of_layer(layer: int) -> Format:
        with patterns("quantization_config: ignore or exclude_modules"):
            skipped = skipping.modelopt_skips(name_of_experts(family, layer), excluded, family.renames)
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


def _common_group_size(section: Fields, file: Fields | None) -> Any:
    """Reads the group size of an hf_quant_config.json, all of whose places must agree."""
    places = [section.values, *([file.values] if file is not None else [])]
    groups = file.within("config_groups") if file is not None else None
    for name in groups.values if groups is not None else ():
        group = groups.within(name) if groups is not None else None
        if group is not None:
            places += [group.values, *(part for part in group.values.values() if isinstance(part, dict))]
    sizes = {size for place in places if isinstance(size := place.get("group_size"), int)}
    if len(sizes) != 1:
        raise Refused(f"hf_quant_config.json: expected one group_size, got {shown(sorted(sizes))}: SGLang refuses it")
    return sizes.pop()


def _hybrid(config: Fields, family: Family, others: Callable[[], Formats], *, gpu: str, version: str) -> Formats:
    """Reads an fp8 checkpoint whose experts are NVFP4. Experts of excluded layers have another format."""
    if not releases.reads_modelopt(version, "hybrid"):
        raise Refused(f"moe_quant_algo NVFP4 in an fp8 checkpoint: SGLang {version} does not load it")
    _check_nvfp4(config.get("group_size"), gpu)
    check_scheme(config)
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
    layers = dict(zip(renamed(family, given.values), map(given.within, given.values), strict=True))
    algorithms = {name: (fields.text("quant_algo") or "").upper() for name, fields in layers.items() if fields}
    if unnamed := [name for name, fields in layers.items() if fields is None or fields.text("quant_algo") is None]:
        raise Refused(f"quantized_layers: {shown(unnamed[0])} has no quant_algo: SGLang refuses it")
    ours = not {"NVFP4", _W4A16}.isdisjoint(algorithms.values()) if told else architecture.startswith("NemotronH")
    if config.text("quant_method") != "modelopt_mixed" and not ours:
        why = "without NVFP4 layers" if told else "but of Nemotron-H"
        raise Refused(f"{MIXED} {why}: SGLang {version} takes it for W4AFP8")

    # SGLang has one group size for all NVFP4 layers, the first one's, and one block size.
    of_nvfp4 = [layers[name] for name, algorithm in algorithms.items() if algorithm in ("NVFP4", _W4A16)]
    group = of_nvfp4[0].values.get("group_size", formats.NVFP4_BLOCK) if of_nvfp4 and of_nvfp4[0] else None
    of_blocks = (layers[name] for name, algorithm in algorithms.items() if algorithm in _BLOCKS)
    blocks = {str(of.values.get("group_size", formats.FP8_BLOCK)): of for of in of_blocks if of is not None}
    if len(blocks) > 1 or "None" in blocks:
        raise Refused(f"quantized_layers: fp8 with blocks of {shown(sorted(blocks))}: SGLang refuses it")

    def of_layer(layer: int) -> Format:
        names = releases.names_in_mixtures(version, name_of_experts(family, layer))
        listed = [*(name for name in names if name in algorithms)]
        listed += [name for own in names for name in algorithms if name.startswith(f"{own}.")]
        if listed:
            algorithm = algorithms[listed[0]]
            size = group if algorithm.endswith("NVFP4") else layers[listed[0]].values.get("group_size")  # type: ignore[union-attr]
            return _of_mixture(algorithm, size, gpu, version)
        return BF16

    return of_layer


def _of_mixture(algorithm: str, size: Any, gpu: str, version: str) -> Format:
    if algorithm not in _OF_MIXTURES or not releases.reads_modelopt(version, algorithm, in_mixture=True):
        raise Refused(f"experts of quant_algo {shown(algorithm)} in a mixture are not served in SGLang {version}")
    if _OF_MIXTURES[algorithm] is NVFP4:
        _check_nvfp4(formats.NVFP4_BLOCK if size is None else size, gpu)  # SGLang's default, too
    if algorithm in _BLOCKS and size not in (None, formats.FP8_BLOCK):
        raise Refused(f"oxmoe has no kernels for fp8 with blocks of {shown(size)}, but of {formats.FP8_BLOCK}")
    if algorithm == "FP8":
        _check_fp8(gpu)
    return _OF_MIXTURES[algorithm]
