"""SGLang's `sglang.srt.platforms` entry point: called while SGLang is imported, before it defines its operators.

Brings no platform: SGLang stays on its own. Imports nothing of SGLang.
"""

from __future__ import annotations

from oxmoe.sglang import setting, sglang_version


def activate() -> None:
    """Defines the operators that OXMOE_SGLANG asks for; returns None, which to SGLang is "not this platform"."""
    try:
        requested = setting.read(sglang_version())
    except (RuntimeError, ValueError):
        return  # `plugin` says it, where it ends the process
    if any(swap.name == "allreduce" for swap in requested):
        from oxmoe.sglang import collective

        collective.define()
