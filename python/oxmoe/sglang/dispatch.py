"""Says which layout and activation dtype SGLang's all-to-all backends must bring to which MoE runner. Imports
nothing of SGLang.

docs/sglang_modes.md has the same rules as a table. Tests compare them with what SGLang's dispatchers send.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from oxmoe.sglang import capabilities

__all__ = ["MASKED", "STANDARD", "TOKENS", "Dispatch", "dispatch_dtype", "modes"]

STANDARD = "standard"  # every token with its top-k result, as without an all-to-all
TOKENS = "deepep_normal"  # [T, H], the tokens that have an expert here, with local top-k ids
MASKED = "deepep_ll"  # [El, m, H], each expert's rows, with counts


class Dispatch(NamedTuple):
    """How tokens must arrive."""

    layout: str  # SGLang's DispatchOutputFormat: "standard", "deepep_normal" or "deepep_ll"
    dtype: str  # "bf16", "fp8" (e4m3, an fp32 scale for each 128 columns) or "nvfp4"
    call: str  # oxmoe's function for such tokens
    options: dict[str, bool]  # keyword arguments of DeepEP's low_latency_dispatch that say so


# --moe-a2a-backend: mode -> layout. `_ALWAYS` has the dtype of a backend that has only one.
_LAYOUTS: dict[str, dict[str, str]] = {
    "none": {"": STANDARD},
    "deepep": {"normal": TOKENS, "low_latency": MASKED},
    "mooncake": {"low_latency": MASKED},
    "nixl": {"low_latency": MASKED},
    "pplx": {"low_latency": MASKED},
}
_ALWAYS = {"mooncake": "fp8"}
# Name -> the release that it came with, if it is not in the first release that is served. This also covers the
# all-to-alls and runners below.
_SINCE = {
    "ascend_tp": "0.5.16",
    "humming": "0.5.16",
    "pplx": "0.5.17",
    "deepep_v2": "0.5.19",
    "flashinfer_megamoe": "0.5.20",
}
# Backends whose tokens meet no runner that oxmoe could stand for.
_UNSERVED = {
    "flashinfer": "its dispatcher keeps its tokens in flashinfer's workspace, in a format of its own",
    "deepep_v2": "SGLang lets DeepGEMM alone run behind it",
    "megamoe": "its kernel sends the tokens itself",
    "flashinfer_megamoe": "its kernel sends the tokens itself",
    "mori": "it runs on AMD GPUs",
    "ascend_fuseep": "it runs on Ascend NPUs",
    "ascend_tp": "it runs on Ascend NPUs",
    "customized": "its dispatcher is the provider's own",
}
# Runner: weights -> dtype of tokens, or one for each mode.
_RUNNERS: dict[str, dict[str, str | dict[str, str]]] = {
    "oxmoe": {
        "bf16": "bf16",
        "fp8_block": "fp8",
        "fp8_tensor": "bf16",
        "mxfp4": "bf16",
        "mxfp8": "bf16",
        "nvfp4": "bf16",
        "int4": "bf16",
    },
    "deep_gemm": {"bf16": "bf16", "fp8_block": "fp8"},
    "flashinfer_cutedsl": {"nvfp4": "bf16"},
    "cutlass": {"w4afp8": {"normal": "bf16", "low_latency": "fp8"}},
    "humming": {weights: "bf16" for weights in ("bf16", "fp8_block", "mxfp4", "nvfp4")},
}
# From the first of these releases until the second SGLang sent W4AFP8's tokens as bf16 in both modes.
_W4AFP8_AS_BF16 = ("0.5.13", "0.5.16")
_MODES = {"flashinfer_cutedsl": "low_latency"}  # the only mode of a runner
_CALLS = {STANDARD: "oxmoe.moe", TOKENS: "oxmoe.moe", MASKED: "oxmoe.moe_masked"}
# The options that tell DeepEP a dtype, and the options of fp8 alone, which give int32 scales whatever the dtype is.
_SENT = {"bf16": {"use_fp8": False}, "fp8": {"use_fp8": True}, "nvfp4": {"use_fp8": False, "use_nvfp4": True}}
_OF_FP8 = ("round_scale", "use_ue8m0")


def _has(version: str, name: str) -> bool:
    return name not in _SINCE or capabilities.order(version) >= capabilities.order(_SINCE[name])


def modes(a2a_backend: str) -> tuple[str | None, ...]:
    """Returns the modes of an all-to-all. It is (None,) for one that has none or is not served."""
    return tuple(mode or None for mode in _LAYOUTS.get(a2a_backend, {"": ""}))


def _mode(a2a_backend: str, mode: str | None) -> str:
    known = _LAYOUTS[a2a_backend]
    if mode is None and len(known) == 1:
        return next(iter(known))
    if mode not in known:
        expected = " or ".join(repr(name) for name in known) if any(known) else "None"
        raise ValueError(f"mode: expected {expected} for --moe-a2a-backend {a2a_backend}, got {mode!r}")
    return mode


def dispatch_dtype(
    a2a_backend: str,
    runner_backend: str = "oxmoe",
    *,
    weights: str,
    mode: str | None = None,
    nvfp4: bool = False,
    options: Mapping[str, Any] | None = None,
    version: str = capabilities.LAST,
) -> Dispatch:
    """Says how tokens must reach a MoE runner: layout, dtype, oxmoe's call for them, and DeepEP's options.

    a2a_backend and runner_backend: names of SGLang's --moe-a2a-backend and --moe-runner-backend, or the runner
    "oxmoe"; weights: the experts' format ("bf16", "fp8_block", "fp8_tensor", "mxfp4", "mxfp8", "nvfp4",
    "int4", "w4afp8"). mode: DeepEP's, "normal" or "low_latency" ("auto" is the first in prefill, the second in
    decoding).
    nvfp4: tokens are to travel as NVFP4 (SGLANG_MOE_NVFP4_DISPATCH), for nvfp4 weights in low_latency mode.

    options: what is about to be given to low_latency_dispatch, checked against the result: ValueError where they ask
    for another dtype, or carry round_scale or use_ue8m0, which are fp8's, on a dispatch that is not.

    ValueError for names that the SGLang version has not, or that do not go together; NotImplementedError for an
    all-to-all that oxmoe does not serve.
    """
    if capabilities.is_old(version):
        raise ValueError(f"version: expected {capabilities.RANGE} or newer, got {version!r}")
    weights = weights.replace("-", "_")
    known = [name for name in (*_LAYOUTS, *_UNSERVED) if _has(version, name)]
    if a2a_backend not in known:
        raise ValueError(f"a2a_backend: SGLang {version} has {', '.join(known)}; got {a2a_backend!r}")
    if a2a_backend in _UNSERVED:
        served = ", ".join(name for name in _LAYOUTS if _has(version, name))
        raise NotImplementedError(
            f"--moe-a2a-backend {a2a_backend}: not served: {_UNSERVED[a2a_backend]}; start with one of {served}"
        )
    mode = _mode(a2a_backend, mode)
    layout = _LAYOUTS[a2a_backend][mode]
    where = f"--moe-a2a-backend {a2a_backend}{f' ({mode})' if mode else ''}"
    if layout == STANDARD:
        dtype = "bf16"  # Every runner of SGLang's quantises for itself.
    else:
        runners = [name for name in _RUNNERS if _has(version, name)]
        if runner_backend not in runners:
            raise ValueError(
                f"runner_backend: {where} brings tokens to {', '.join(runners)} alone; got {runner_backend!r}"
            )
        formats = _RUNNERS[runner_backend]
        if weights not in formats:
            raise ValueError(f"weights: {runner_backend} behind {where} takes {', '.join(formats)}; got {weights!r}")
        if _MODES.get(runner_backend, mode) != mode:
            raise ValueError(f"mode: {runner_backend} takes {_MODES[runner_backend]!r} alone, got {mode!r}")
        found = formats[weights]
        dtype = found if isinstance(found, str) else found[mode]
        first, after = map(capabilities.order, _W4AFP8_AS_BF16)
        if weights == "w4afp8" and first <= capabilities.order(version) < after:
            dtype = "bf16"
    if nvfp4:
        if weights != "nvfp4" or (a2a_backend, layout) != ("deepep", MASKED):
            raise ValueError(f"nvfp4: only of nvfp4 weights behind deepep (low_latency), got {weights} behind {where}")
        dtype = "nvfp4"
    if dtype != _ALWAYS.get(a2a_backend, dtype):
        others = ", ".join(name for name in _LAYOUTS if name not in _ALWAYS and _has(version, name))
        raise ValueError(
            f"{where} always sends {_ALWAYS[a2a_backend]}, but {runner_backend} with {weights} weights needs {dtype}; "
            f"start with another --moe-a2a-backend ({others})"
        )
    result = Dispatch(layout, dtype, _CALLS[layout], dict(_SENT[dtype]) if layout == MASKED else {})
    if options is not None:
        _check(options, result, f"{runner_backend} with {weights} weights behind {where}")
    return result


def _check(options: Mapping[str, Any], wanted: Dispatch, what: str) -> None:
    """Raises ValueError if the options of a dispatch do not belong to the dtype that is needed."""
    wrong = [
        f"{name}={options.get(name, False)}"
        for name in ("use_fp8", "use_nvfp4")
        if bool(options.get(name, False)) != wanted.options.get(name, False)
    ]
    extra = [f"{name}={options[name]}" for name in _OF_FP8 if options.get(name) and wanted.dtype != "fp8"]
    if not wrong and not extra:
        return
    needed = [f"{name}={value}" for name, value in wanted.options.items()]
    needed += [f"no {name}" for name in _OF_FP8 if wanted.dtype != "fp8"]
    why = ", of which round_scale and use_ue8m0 are options of an fp8 dispatch (int32 scales)" if extra else ""
    raise ValueError(
        f"options: {what} takes a {wanted.dtype} dispatch: needed {', '.join(needed)}; "
        f"given {', '.join(wrong + extra)}{why}"
    )
