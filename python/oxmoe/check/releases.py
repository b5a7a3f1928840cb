"""What SGLang's releases differ in, for `python -m oxmoe check`."""

from __future__ import annotations

from oxmoe.check.checkpoint import Refused
from oxmoe.sglang import setting


def check(version: str) -> None:
    """Refused for a release that oxmoe does not serve."""
    if version not in setting.SWAPS:
        raise Refused(f"SGLang {version} is not served; served are {' and '.join(setting.SWAPS)}")


def takes_quantization(version: str) -> bool:
    """Whether the command line takes --quantization oxmoe: plugins are loaded before it is parsed."""
    return version != "0.5.12.post1"


def has_nvfp4(version: str) -> bool:
    """Whether there are NVFP4 layers of compressed-tensors below Blackwell."""
    return version != "0.5.12.post1"
