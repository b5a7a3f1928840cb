"""Finds the format of each layer's experts in a checkpoint's quantization_config, or the reason why oxmoe does not
take it."""

from __future__ import annotations

import re
from collections.abc import Callable

from oxmoe.sglang import formats, int4_schemes
from oxmoe.tools.check import int4, skipping
from oxmoe.tools.check.checkpoint import Checkpoint, Fields, Refused, patterns, shown
from oxmoe.tools.check.families import Family, name_of_experts, renamed
from oxmoe.tools.check.format import Format


def _format(name: str, label: str, bits: float, stored: str, planned: str | None = None) -> Format:
    return Format(name, label, planned or name, bits, frozenset(stored.split()))


BF16 = _format("bf16", "bf16", 16, "BF16 F16 F32")
F16 = _format("f16", "f16", 16, "BF16 F16 F32")
FP8_BLOCK = _format("fp8_block", "fp8, 128 x 128 blocks", 8 + 32 / 128**2, "F8_E4M3")
MXFP8 = _format("mxfp8", "MXFP8", 8 + 8 / 32, "F8_E4M3")
MXFP4 = _format("mxfp4", "MXFP4", 4 + 8 / 32, "U8")
FP8_MXFP4 = _format("mxfp4", "MXFP4 in an fp8 checkpoint", 4 + 8 / 32, "U8 I8 F4")
NVFP4 = _format("nvfp4", "NVFP4 of compressed-tensors, bf16 activations", 4 + 8 / 16, "U8")
K3_MXFP4 = _format("mxfp4", "MXFP4 of compressed-tensors, bf16 activations", 4 + 8 / 32, "U8")
_ONE_SCALE = "fp8, a scale a matrix, {} activations"
_CHANNEL = "fp8, a scale a channel, {} activations"

# Returns the format of a layer by its number.
Formats = Callable[[int], Format]

_INT4 = "oxmoe takes int4 weights of compressed-tensors, awq, gptq and w4afp8 alone"
_METHODS = {
    "auto-round": _INT4,
    "moe_wna16": _INT4,
    "bitsandbytes": "oxmoe has no kernels for bitsandbytes' weights",
    "quark": "oxmoe has no kernels for Quark's checkpoints in SGLang",
}
# Architectures whose SGLang configuration lifts a quantization_config out of text_config.
_LIFTS = ("KimiK25ForConditionalGeneration",)


def found(checkpoint: Checkpoint, text: Fields, architecture: str) -> Fields | None:
    """Returns the quantization_config that SGLang will find, or None for weights that are not quantised."""
    given = checkpoint.config.within("quantization_config")
    nested = text.within("quantization_config") if text is not checkpoint.config else None
    if given is None and nested is not None:
        if architecture not in _LIFTS:
            raise Refused("quantization_config lies in the text model's config: whether SGLang reads it is not known")
        given = nested
    if given is None:
        given = checkpoint.config.within("compression_config")
    if given is None and checkpoint.quant_file is not None:
        given = checkpoint.quant_file.within("quantization") or checkpoint.quant_file
        if given.text("quant_algo") is None:
            raise Refused("hf_quant_config.json: without quant_algo its format is not known")
    return given


def of_layers(
    checkpoint: Checkpoint,
    text: Fields,
    architecture: str,
    family: Family,
    *,
    gpu: str,
    nvfp4: bool,
    k3_mxfp4: bool,
    f16: bool,
    fp4_fields: frozenset[str],
) -> Formats:
    """Returns the format of each layer's experts. nvfp4: whether release and GPU have compressed-tensors' NVFP4.
    k3_mxfp4: whether they have a runner that oxmoe takes over for Kimi-K3's MXFP4.
    f16: whether unquantised layers are f16. fp4_fields: the fields by which an fp8 config can say that experts are
    MXFP4."""
    config, plain = found(checkpoint, text, architecture), F16 if f16 else BF16
    if config is None:
        return lambda layer: plain
    method = config.text("quant_method")
    if method is None:
        raise Refused("quantization_config has no quant_method: its format is not known")
    if method == "mxfp4":
        return lambda layer: MXFP4
    if method in ("fp8", "mxfp8"):
        return _fp8(checkpoint, config, architecture, family, fp4_fields)
    if method in formats.COMPRESSED:
        return _compressed(config, architecture, family, nvfp4=nvfp4, k3_mxfp4=k3_mxfp4)
    if method in int4_schemes.METHODS:
        return int4.of_layers(config, family, BF16)
    if method == int4_schemes.W4AFP8:
        w4afp8 = int4.of_w4afp8(gpu)
        return lambda layer: w4afp8
    raise Refused(f"quant_method {method}: {_METHODS.get(method, 'is not known')}")


def _fp8(
    checkpoint: Checkpoint, config: Fields, architecture: str, family: Family, fp4_fields: frozenset[str]
) -> Formats:
    blocks, scheme = config.get("weight_block_size"), config.text("activation_scheme")
    if config.text("quant_method") == "mxfp8" and formats.has_other_experts(config.values):
        given = config.get("moe_quant_algo", "moe_quant_format")
        raise Refused(
            f"the experts of this MXFP8 checkpoint are {shown(given)}: oxmoe does not take them over in SGLang"
        )
    if not formats.served_fp8(config.values):
        raise Refused(f"oxmoe has no kernels for fp8 with weight_block_size {shown(blocks)}, but for [128, 128]")
    mxfp8 = config.text("quant_method") == "mxfp8"
    check_scheme(config)
    fp4 = _has_fp4(checkpoint, config, architecture, family, fp4_fields)
    # The first field that is there counts, also if it is null.
    place = "ignored_layers" if "ignored_layers" in config.values else "modules_to_not_convert"
    label = _ONE_SCALE.format(scheme)
    one_scale = _format(
        "fp8_tensor", label, 8, "F8_E4M3", "fp8_tensor-static" if scheme == "static" else "fp8_tensor-token"
    )
    quantised = FP8_MXFP4 if fp4 else MXFP8 if mxfp8 else one_scale if blocks is None else FP8_BLOCK
    return _unless(family, config.listed(place, str), quantised)


def check_scheme(config: Fields) -> None:
    """Raises Refused if SGLang does not take the activation_scheme of an fp8 or MXFP8 checkpoint."""
    scheme, mxfp8 = config.text("activation_scheme"), config.text("quant_method") == "mxfp8"
    if scheme not in ("dynamic", "static") or (
        scheme == "static" and (mxfp8 or config.get("weight_block_size") is not None)
    ):
        raise Refused(f"activation_scheme {shown(scheme)}: SGLang refuses it for this checkpoint")


def as_mxfp8(family: Family, ignored: list[str] | None) -> Formats:
    """Returns MXFP8 for all layers but the ignored ones."""
    return _unless(family, ignored, MXFP8)


def _unless(family: Family, ignored: list[str] | None, quantised: Format) -> Formats:
    def of_layer(layer: int) -> Format:
        skipped = skipping.fp8_skips(name_of_experts(family, layer), ignored or (), family.renames)
        return BF16 if skipped else quantised

    return of_layer


def _has_fp4(checkpoint: Checkpoint, config: Fields, architecture: str, family: Family, fields: frozenset[str]) -> bool:
    """Whether the experts are MXFP4, by SGLang's rule: the config decides, for DeepSeek-V4 the tensors, and
    otherwise SGLang's default."""
    named = config.text("routed_experts_quant_method")
    if family.fp4_by_default and (named is None or "routed_experts_quant_method" not in fields):
        return set().union(*checkpoint.dtypes.values()) != {"F8_E4M3"}
    stored = config.text("store_dtype") if architecture.startswith("MiMoV2") else None
    telling = {"routed_experts_quant_method": named, "store_dtype": (stored or "").lower()}
    by = [field for field, value in telling.items() if value == "mxfp4"]
    if by and not fields.intersection(by):
        raise Refused(f"by {by[0]} the experts of this fp8 checkpoint are MXFP4, but this SGLang does not read it")
    return bool(by)


def _compressed(config: Fields, architecture: str, family: Family, *, nvfp4: bool, k3_mxfp4: bool) -> Formats:
    groups: dict[str, Fields] = {}
    all_groups = config.within("config_groups")
    for name in all_groups.values if all_groups is not None else ():
        group = all_groups.within(name) if all_groups is not None else None
        targets = (group.listed("targets", str) if group is not None else None) or ()
        for target in renamed(family, targets):
            assert group is not None
            groups[target] = group
    kinds = {formats.compressed_kind(group.values.get("weights")) for group in groups.values()}
    of_k3 = kinds == {"mxfp4"} and architecture.startswith("KimiK3")
    if of_k3 and not k3_mxfp4:
        raise Refused(
            "Kimi-K3 makes SGLang's own configuration of its MXFP4 experts. oxmoe takes over their runner "
            "flashinfer_mxfp4, on sm_90 from SGLang 0.5.19 on"
        )
    if not of_k3 and not formats.compressed_served(config.values, nvfp4=nvfp4):
        what = "; ".join(dict.fromkeys(_weights(group) for group in groups.values())) or "no config_groups"
        also = "" if nvfp4 else " (NVFP4 from SGLang 0.5.22 on, on sm_90)"
        raise Refused(
            f"compressed-tensors with {what}: served are layers of fp8 with a scale a tensor, a channel or a "
            f"[128, 128] block, of {int4_schemes.SERVED}, and of NVFP4{also}"
        )
    if "ignore" in config.values and config.values["ignore"] is None:
        raise Refused("compressed-tensors whose ignore is null: SGLang refuses it")
    ignored = renamed(family, config.listed("ignore", str) or [])
    _check_patterns([*ignored, *groups])

    def of_layer(layer: int) -> Format:
        names = [f"{name_of_experts(family, layer)}.0.{part}_proj" for part in ("gate", "up", "down")]
        skipped = [skipping.compressed_skips(name, ignored) for name in names]
        if all(skipped):
            return BF16
        if any(skipped):
            raise Refused(f"layer {layer}: gate, up and down projections of experts have different formats")
        targets = {skipping.compressed_target(name, groups) for name in names}
        if len(targets) > 1 or None in targets:
            raise Refused(f"layer {layer}: no config_group, or more than one, is for its experts")
        group = groups[str(targets.pop())]
        return int4.of_group(group, config) if int4_schemes.is_packed(group.values) else _of_group(group, config)

    return of_layer


def _check_patterns(entries: list[str]) -> None:
    for entry in entries:
        if entry.startswith("re:"):
            with patterns(shown(entry)):
                re.compile(entry[3:])


def _weights(group: Fields) -> str:
    weights = group.within("weights")
    if weights is None:
        return "layers without weights"
    return " ".join(
        f"{name} {shown(weights.values[name])}"
        for name in ("type", "num_bits", "strategy", "group_size", "block_structure")
        if weights.values.get(name) is not None
    )


def _of_group(group: Fields, config: Fields) -> Format:
    weights, inputs = group.within("weights"), group.within("input_activations")
    if (group.text("format") or config.text("format")) not in formats.WITH_ACTIVATIONS:
        inputs = None  # SGLang does not read them
    kind = formats.compressed_kind(weights and weights.values)
    if kind in ("nvfp4", "mxfp4"):
        return NVFP4 if kind == "nvfp4" else K3_MXFP4
    assert weights is not None
    symmetric = weights.get("symmetric") is not False and not weights.get("dynamic")
    static = inputs is not None and not inputs.get("dynamic")
    if inputs is None or inputs.text("type") != "float" or not symmetric:
        raise Refused(f"oxmoe has no kernels for compressed-tensors' {_weights(group)} with these activations")
    if static and (inputs.text("strategy") != "tensor" or inputs.get("symmetric") is False):
        raise Refused("oxmoe has no kernels for compressed-tensors' fp8 with given scales but one a tensor")
    strategies = weights.text("strategy") or "", _strategy(inputs)
    if not formats.compressed_fp8_served(*strategies):
        raise Refused(f"SGLang has no fp8 experts of compressed-tensors by {' and '.join(strategies)}")
    if weights.text("strategy") == "block":
        return FP8_BLOCK
    label = (_CHANNEL if weights.text("strategy") == "channel" else _ONE_SCALE).format(
        "static" if static else "dynamic"
    )
    return _format("fp8_tensor", label, 8, "F8_E4M3", "fp8_tensor-static" if static else "fp8_tensor-token")


def _strategy(inputs: Fields) -> str:
    """Returns the strategy of activations, or the one that their group_size stands for."""
    size = inputs.get("group_size")
    return inputs.text("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
