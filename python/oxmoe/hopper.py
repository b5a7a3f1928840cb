"""Remarks about GPUs on which oxmoe's kernels have not run."""

from __future__ import annotations

HOPPER = "sm_90"


def untried(arch: str) -> str:
    """Returns a remark on a GPU of this architecture. It is empty if the kernels have run on one."""
    if arch == HOPPER:
        return ""
    return f"oxmoe's kernels are compiled for {arch} and have not run there: Hopper ({HOPPER}) alone has run them"
