"""What SGLang's releases differ in, for `python -m oxmoe check`."""

from __future__ import annotations

import re

from oxmoe.check.checkpoint import Refused
from oxmoe.sglang import setting


def check(version: str) -> None:
    """Refused for a release that oxmoe does not serve."""
    if version not in setting.SWAPS:
        raise Refused(f"SGLang {version} is not served; served are {' and '.join(setting.SWAPS)}")


def _at_least(version: str, first: str) -> bool:
    given, wanted = ([int(number) for number in re.findall(r"\d+", text)] for text in (version, first))
    return given >= wanted


def has_nvfp4(version: str) -> bool:
    """Whether there are NVFP4 layers of compressed-tensors below Blackwell."""
    return _at_least(version, "0.5.22")


def layer_decides(version: str) -> bool:
    """Whether a layer's own runner says how tokens come, and not the server's --moe-runner-backend."""
    return _at_least(version, "0.5.23")
