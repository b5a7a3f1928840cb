"""Finds the format of each layer's experts in int4 checkpoints, or the reason why oxmoe does not take it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oxmoe.sglang import int4_schemes
from oxmoe.sglang.int4_schemes import Scheme
from oxmoe.tools.check.checkpoint import Fields, Refused, patterns
from oxmoe.tools.check.families import Family, name_of_experts
from oxmoe.tools.check.format import Format

# Groups for which SGLang has linear layers that take bf16.
_LINEAR = (None, 32, 64, 128)
_W4AFP8_FROM = 90  # SGLang's least GPU of such checkpoints


def of_group(group: Fields, config: Fields) -> Format:
    """Returns the format of a config_group of compressed-tensors."""
    weights = group.within("weights")
    assert weights is not None
    layout = group.text("format") or config.text("format")
    return _format(_asked(int4_schemes.of_weights, weights.values, layout))


def of_layers(config: Fields, family: Family, left: Format) -> Callable[[int], Format]:
    """Returns the format of each layer's experts for an AWQ or GPTQ quantization_config. left: the format of layers
    that the checkpoint leaves as they are."""
    scheme = _asked(int4_schemes.of_checkpoint, config.values)
    if scheme.group not in _LINEAR or (scheme.layout == "gptq" and scheme.zeros):
        what = "sym false" if scheme.layout == "gptq" and scheme.zeros else f"group size {scheme.group}"
        raise Refused(f"{scheme.layout.upper()} with {what}: SGLang's linear layers of it take f16 alone, oxmoe bf16")
    quantised = _format(scheme)
    config.listed("modules_to_not_convert", str)
    config.within("dynamic")

    def of_layer(layer: int) -> Format:
        return left if _asked(int4_schemes.skips, config.values, name_of_experts(family, layer)) else quantised

    return of_layer


def of_w4afp8(gpu: str) -> Format:
    """Returns the format of the experts of a W4AFP8 checkpoint."""
    if int(gpu.removeprefix("sm_")) < _W4AFP8_FROM:
        raise Refused(f"SGLang serves W4AFP8 from sm_{_W4AFP8_FROM} on, not on {gpu}")
    scheme = Scheme(int4_schemes.W4AFP8, 128, False)
    return Format("int4", str(scheme), "int4", 4 + 16 / 32, frozenset({"I8", "U8"}), scheme)


def _asked(rule: Callable[..., Any], *values: Any) -> Any:
    """Returns what a rule of SGLang's adapters says."""
    try:
        with patterns("quantization_config: dynamic"):
            return rule(*values)
    except NotImplementedError as error:
        raise Refused(str(error).removeprefix("oxmoe: ")) from error


def _format(scheme: Scheme) -> Format:
    planned = "int4-zeros" if scheme.zeros else "int4"
    return Format("int4", str(scheme), planned, 4 + (24 if scheme.zeros else 16) / 32, frozenset({"I32"}), scheme)
