"""Says which int4 checkpoints oxmoe serves in SGLang. The adapters and `python -m oxmoe check` use these rules.

The module imports neither SGLang nor torch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

BLOCK = 32  # the least number of columns that share a scale
PACK_QUANTIZED = "pack-quantized"  # compressed-tensors' name of the layout
SERVED = f"int4 with groups of a multiple of {BLOCK} columns or whole rows, without an activation order of groups"
METHODS = ("awq", "gptq")  # quant_method of AWQ's and GPTQ's checkpoints
W4AFP8 = "w4afp8"  # SGLang's name of a checkpoint with int4 experts and fp8 linear layers, and of its layout


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint stores its experts' weights."""

    layout: str  # "pack-quantized", "awq", "gptq" or "w4afp8"
    group: int | None  # columns that share a scale; None: a row
    zeros: bool  # whether there are zero points
    version: int = 1  # version of GPTQ's zero points

    def __str__(self) -> str:
        groups = "a scale a row" if self.group is None else f"groups of {self.group}"
        if self.layout == W4AFP8:
            return f"int4 of W4AFP8, {groups}, bf16 activations (its fp8 scales of activations are not used)"
        name = "compressed-tensors" if self.layout == PACK_QUANTIZED else self.layout.upper()
        return f"int4 of {name}, {groups}{', zero points' if self.zeros else ''}"


def _refused(what: str, why: str) -> NotImplementedError:
    return NotImplementedError(f"oxmoe: {what}: {why}; served is {SERVED}")


def _group(what: str, size: Any) -> int | None:
    """Returns the columns of a group. None stands for -1, a whole row."""
    if size == -1:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < BLOCK or size % BLOCK:
        raise _refused(what, f"group size {size}")
    return size


# compressed-tensors


def is_packed(group: Any) -> bool:
    """Whether a config_group has integer weights with 16-bit activations, whether these are served or not."""
    weights = group.get("weights") if isinstance(group, dict) else None
    return isinstance(weights, dict) and weights.get("type") == "int" and not group.get("input_activations")


def of_weights(weights: dict[str, Any], layout: Any) -> Scheme:
    """Returns the scheme of a config_group's weights and format. Raises NotImplementedError if it is not served."""
    what = "experts of compressed-tensors"
    if layout != PACK_QUANTIZED:
        raise _refused(what, f"integers in the format {layout}")
    if weights.get("num_bits") != 4:
        raise _refused(what, f"integers of {weights.get('num_bits')} bits")
    if weights.get("dynamic"):
        raise _refused(what, "weights with dynamic scales")
    order = weights.get("actorder")
    # "weight" and its alias "static" leave columns where they are.
    if order not in (None, False, "weight", "static"):
        raise _refused(what, f"actorder {order}: groups have columns in activation order")
    size, strategy = weights.get("group_size"), weights.get("strategy")
    # compressed-tensors infers the strategy in this way.
    strategy = strategy or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in ("group", "channel"):
        raise _refused(what, f"a scale a {strategy}")
    group = None if strategy == "channel" else _group(what, size)
    return Scheme(PACK_QUANTIZED, group, weights.get("symmetric") is False)


# AWQ and GPTQ


def of_checkpoint(config: dict[str, Any]) -> Scheme:
    """Returns the scheme of an AWQ or GPTQ quantization_config. Raises NotImplementedError if it is not served."""
    method = str(config.get("quant_method", "")).lower()
    what = f"experts of a checkpoint of {method}"
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise _refused(what, f"integers of {bits} bits")
    group = _group(what, config.get("group_size", config.get("q_group_size")))
    return _awq(what, config, group) if method == "awq" else _gptq(what, config, group)


def _awq(what: str, config: dict[str, Any], group: int | None) -> Scheme:
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm":
        raise _refused(what, f"version {version}, whose words have another order")
    if config.get("zero_point") is not True:
        raise _refused(what, "zero_point false: whether the weights have zero points is not known")
    return Scheme("awq", group, True)


def _gptq(what: str, config: dict[str, Any], group: int | None) -> Scheme:
    layout = config.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise _refused(what, f"checkpoint_format {'marlin' if layout == 'gptq' else layout}")
    if "desc_act" not in config:
        raise _refused(what, "no desc_act, which SGLang asks for")
    if config.get("desc_act") and group is not None:
        raise _refused(what, "desc_act: groups have columns in activation order")
    return Scheme("gptq", group, config.get("sym") is not True, 2 if layout == "gptq_v2" else 1)


def skips(config: dict[str, Any], prefix: str) -> bool:
    """Whether SGLang reads the experts under this prefix as not quantised in such a checkpoint.

    Raises NotImplementedError if GPTQ's rules (`dynamic`) change their format, or leave out some of their
    projections.
    """
    if str(config.get("quant_method", "")).lower() == "awq":
        return any(name in prefix for name in config.get("modules_to_not_convert") or ())
    names = [f"{prefix}.0.{part}_proj" for part in ("gate", "up", "down")]
    found = [_rule(config.get("dynamic") or {}, name) for name in names]
    if all(rule is None for rule in found) or all(rule is False for rule in found):
        return found[0] is False
    raise _refused(f"experts of a checkpoint of gptq ({prefix})", "rules of their own (dynamic)")


def _rule(rules: dict[str, Any], name: str) -> bool | None:
    """Returns False for not quantised, True for another format, and None if no rule names it. The first rule that
    matches counts."""
    for pattern, changes in rules.items():
        if pattern.startswith("-:"):
            if re.match(pattern[2:], name):
                return False
        elif re.match(pattern.removeprefix("+:"), name):
            return True if changes else None
    return None


# Sizes


def groups_of(scheme: Scheme, hidden_size: int, intermediate_size: int, ranks: int) -> tuple[int | None, int | None]:
    """Returns the columns of a group of w13 and of w2, if each of `ranks` ranks has this part of the intermediate
    size.

    A group of w2 that two ranks share is cut into parts with the same scale. Raises NotImplementedError for sizes
    without kernels, and for sizes that the groups do not divide evenly.
    """
    group, whole = scheme.group, intermediate_size * ranks
    if group is None:
        return None, None
    sizes = {"hidden_size": hidden_size, "intermediate_size": whole}
    wrong = [f"{name} {size}" for name, size in sizes.items() if size % group]
    if wrong:
        raise NotImplementedError(f"oxmoe: {scheme}: {' and '.join(wrong)} is no multiple of the group size {group}")
    return group, math.gcd(group, intermediate_size)
