"""SGLang's `sglang.srt.platforms` entry point. SGLang calls it while it is imported, before it defines its
operators.

The entry point brings no platform, so SGLang stays on its own. The module imports nothing of SGLang.
"""

from __future__ import annotations

from oxmoe.sglang import setting, sglang_version


def activate() -> None:
    """Defines the operators that OXMOE_SGLANG asks for. Returns None, which SGLang reads as "not this platform"."""
    try:
        requested = setting.read(sglang_version())
    except (RuntimeError, ValueError):
        return  # `plugin` raises the same error, and there it ends the process
    if any(swap.name == "allreduce" for swap in requested):
        from oxmoe.sglang import collective

        collective.define()
