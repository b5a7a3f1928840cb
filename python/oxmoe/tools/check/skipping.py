"""Finds which layers a quantised checkpoint leaves as they are, by the names in its config.

SGLang 0.5.23 has these rules in functions that are not available without it. Tests compare the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable


def fp8_skips(name: str, ignored: Iterable[str], rename: Callable[[str], str] | None = None) -> bool:
    """Applies an fp8 checkpoint's `ignored_layers` or `modules_to_not_convert` to the experts of this name.
    rename: what SGLang's class of the model does with their names."""
    bases = [entry.removeprefix("model.") for entry in ignored]
    listed = [*bases, *(f"model.{base}" for base in bases)]
    listed = listed if rename is None else [rename(entry) for entry in listed]
    inside = any(f".{entry.rstrip('.')}." in f".{name.rstrip('.')}." for entry in listed)
    return inside or any(name in entry for entry in listed if "experts" in entry)


def modelopt_skips(name: str, patterns: Iterable[str], rename: Callable[[str], str] | None = None) -> bool:
    """Applies ModelOpt's `ignore` or `exclude_modules` to the experts of this name: to all of it, or to a part
    between dots. rename: what SGLang's class of the model does with their names."""
    if rename is not None:
        mapped = [rename(pattern) for pattern in patterns]
        # Where a class renames, SGLang also takes the names without the wrapper's.
        patterns = [*mapped, *(own.removeprefix("language_model.") for own in mapped)]
    names = [name, *([name.removeprefix("language_model.")] if name.startswith("language_model.") else [])]
    listed = [re.compile(pattern.replace(".", r"\.").replace("*", r".*")) for pattern in patterns]
    return any(entry.fullmatch(part) for entry in listed for whole in names for part in (whole, *whole.split(".")))


def compressed_skips(name: str, ignored: Iterable[str]) -> bool:
    """Applies compressed-tensors' `ignore` to one projection of an expert: an exact name, an end of one, or
    "re:..."."""
    return any(
        re.match(entry[3:], name) is not None if entry.startswith("re:") else f".{name}".endswith(f".{entry}")
        for entry in ignored
    )


def compressed_target(name: str, targets: Iterable[str]) -> str | None:
    """Returns the target whose config_group counts for one projection of an expert, or None."""
    listed = list(targets)
    # SGLang applies to its layer "FusedMoE" what the config says of "Linear".
    named = [*listed, "FusedMoE"] if "Linear" in listed and "FusedMoE" not in listed else listed
    by_name = [target for target in named if _matches(name, target, target == name)]
    by_class = [target for target in named if _matches("FusedMoE", target, target.lower() in "fusedmoe")]
    found = next(iter(by_name + by_class), None)
    return "Linear" if found == "FusedMoE" and found not in listed else found


def _matches(value: str, target: str, plain: bool) -> bool:
    return re.match(target[3:], value) is not None if target.startswith("re:") else plain
