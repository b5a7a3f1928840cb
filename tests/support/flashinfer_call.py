"""Calls flashinfer's kernels in a process of their own: a fault of a peer must not end the tests.

`peer(...)` is for tests; as a script it reads the operands of one call from a file and writes its outputs to another.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from build_flashinfer import NOT_BUILT

Operands = dict[str, Any]
# Exit status of a call that needs something that is not installed; the last line of stderr says what.
UNAVAILABLE = 77


def require(*modules: str) -> None:
    """Skips the test, by name, if flashinfer or one of its built modules is missing: no test compiles for minutes."""
    spec = find_spec("flashinfer")
    if spec is None or spec.origin is None or not hasattr(torch, "cuda"):
        pytest.skip("flashinfer is not installed (PYTHONPATH with its package, or pip install flashinfer-python)")
    built = Path(spec.origin).parent / "data" / "aot"
    for module in modules:
        if not (built / module / f"{module}.so").is_file():
            pytest.skip(f"flashinfer's module {module} is not prebuilt (tests/support/build_flashinfer.py {module})")


def release() -> Literal["0.6", "0.7"]:
    """Returns which of its two forms of MXFP4 weights the installed flashinfer has."""
    return "0.6" if metadata.version("flashinfer-python").startswith("0.6.") else "0.7"


def require_blackwell(call: str) -> None:
    """Skips the test, by name, if its kernel writes nothing below compute capability 10.0: flashinfer compiles its body
    from there on."""
    if torch.cuda.get_device_capability() < (10, 0):
        pytest.skip(f"flashinfer's kernel of {call} has no code below compute capability 10.0")


def peer(call: str, operands: Operands, folder: Path) -> dict[str, torch.Tensor]:
    """Returns outputs of flashinfer's call on a GPU, moved to the CPU."""
    given, made = folder / f"{call}.in.pt", folder / f"{call}.out.pt"
    torch.save(operands, given)
    command = [sys.executable, __file__, call, str(given), str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode != 0 and NOT_BUILT in done.stderr:
        pytest.skip(f"flashinfer's prebuilt module has no kernels for {call}")
    if done.returncode == UNAVAILABLE:
        pytest.skip((done.stderr.splitlines() or [f"flashinfer's {call} is unavailable"])[-1])
    assert done.returncode == 0, done.stderr[-4000:]
    outputs: dict[str, torch.Tensor] = torch.load(made, weights_only=True)
    return outputs


def _cutlass(
    x: torch.Tensor,
    ids: torch.Tensor,
    gates: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    scales: Any,
    tokens: int,
    **flags: Any,
) -> dict[str, torch.Tensor]:
    """Calls the layer for `tokens` rows at a time."""
    from flashinfer.fused_moe import cutlass_fused_moe

    w4 = flags.get("use_w4_group_scaling", False)
    if w4:
        from flashinfer.fused_moe.core import interleave_moe_scales_for_sm90_mixed_gemm as of_scales
        from flashinfer.fused_moe.core import interleave_moe_weights_for_sm90_mixed_gemm as of_weights

        w13, w2 = of_weights(w13), of_weights(w2)
        scales = [of_scales(scale).view(torch.int32) for scale in scales]
    out = torch.empty(x.shape, dtype=torch.bfloat16 if x.element_size() == 1 else x.dtype, device=x.device)
    for x_, ids_, gates_, out_ in zip(*(rows.split(tokens) for rows in (x, ids, gates, out)), strict=True):
        cutlass_fused_moe(
            input=x_, token_selected_experts=ids_, token_final_scales=gates_, fc1_expert_weights=w13,
            fc2_expert_weights=w2, output_dtype=out.dtype, quant_scales=scales, output=out_, **flags,
        )  # fmt: skip
    return {"out": out}


def _mono(x: torch.Tensor, logits: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, scales: Any) -> Any:
    from flashinfer.fused_moe import monomoe

    pad = monomoe.alloc_scratchpad(x.device)
    return {"out": monomoe.mono_moe(x, logits, w13, scales[0], w2, scales[1], 8, scratchpad=pad)}


def _fp4(x: torch.Tensor, scale: torch.Tensor | None, **options: Any) -> dict[str, torch.Tensor]:
    from flashinfer import fp4_quantize

    codes, scales = fp4_quantize(x, scale, **options)
    return {"codes": codes, "scales": scales.view(torch.uint8)}


def _mxfp8(x: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    from flashinfer import mxfp8_quantize

    codes, scales = mxfp8_quantize(x, **options)
    return {"codes": codes.view(torch.uint8), "scales": scales.view(torch.uint8)}


def _group8(x: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    try:
        from flashinfer.cutile import is_cuda_tile_available
        from flashinfer.quantization import per_token_group_quant_8bit

        available = is_cuda_tile_available()
    except ImportError:
        available = False
    if not available:
        needed = "cuda.tile and a compiler of its own, tileiras, that has code for this GPU"
        print(f"flashinfer's per_token_group_quant_8bit needs {needed}", file=sys.stderr)
        sys.exit(UNAVAILABLE)
    codes, scales = per_token_group_quant_8bit(x, 128, **options)
    return {"codes": codes.view(torch.uint8), "scales": scales}


def _interleave(codes: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    from flashinfer.fused_moe import core

    made = core.interleave_moe_weights_for_sm90_mixed_gemm(codes)
    of_scales = core.interleave_moe_scales_for_sm90_mixed_gemm(scales)
    return {"codes": made.view(torch.uint8), "scales": of_scales.view(torch.uint8)}


def _deepseek(logits: torch.Tensor, bias: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    from flashinfer.fused_moe import fused_topk_deepseek

    size = logits.shape[0], options["topk"]
    weights = torch.empty(size, dtype=logits.dtype, device=logits.device)
    ids = torch.empty(size, dtype=torch.int32, device=logits.device)
    fused_topk_deepseek(logits, bias, topk_values=weights, topk_indices=ids, **options)
    return {"weights": weights.float(), "ids": ids}


_CALLS = {"cutlass": _cutlass, "mono": _mono, "fp4": _fp4, "mxfp8": _mxfp8, "group8": _group8}
_CALLS |= {"interleave": _interleave, "deepseek": _deepseek}


def _on(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_on(part, device) for part in value] if isinstance(value, list) else value


if __name__ == "__main__":
    import ctypes

    ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
    name, source, target = sys.argv[1:]
    operands = {key: _on(value, "cuda") for key, value in torch.load(source, weights_only=True).items()}
    outputs = _CALLS[name.partition("-")[0]](**operands)
    torch.cuda.synchronize()
    torch.save({key: value.cpu() for key, value in outputs.items()}, target)
