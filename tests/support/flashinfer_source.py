"""Parts of flashinfer's sources that run on a CPU: torch code, and a CUDA kernel that is built for the CPU.

NOTE: the package is found, not imported. An import would want a GPU, its compilers and other packages.
"""

from __future__ import annotations

import ast
import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

_UTILS = "data/csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_mixed_utils.cu"

# A harness that runs the kernel's threads one after the other.
_HARNESS = """
#include <cstdint>
#define __global__ static
static struct {{ int x, y; }} blockIdx, threadIdx, gridDim, blockDim;
{kernel}
extern "C" void interleave(uint8_t* from, uint8_t* to, int rows, int columns) {{
  gridDim.x = blockDim.y = 1;
  for (threadIdx.x = 0; threadIdx.x < {lanes}; threadIdx.x++)
    interleave_{kind}_weights_for_sm90_mixed_gemm_kernel(from, to, rows, columns);
}}
"""


def root() -> Path:
    """Returns flashinfer's folder, or skips the test if its sources are not installed."""
    spec = find_spec("flashinfer")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / _UTILS).exists():
            return Path(folder)
    pytest.skip("flashinfer with its sources is not installed")


def take(path: Path, names: set[str], given: dict[str, Any]) -> dict[str, Any]:
    """Runs the functions and constants of these names of a file, without decorators and without the imports inside
    functions. `given` has what they use, and gets them."""
    kept: list[ast.stmt] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list = []
            node.body = [part for part in node.body if not isinstance(part, ast.ImportFrom)]
            kept.append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id in names for target in targets):
                kept.append(node)
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *kept], []), str(path), "exec"), given)
    missing = names - given.keys()
    assert not missing, f"{path}: {missing}"
    return given


def weight_interleave(kind: str, folder: Path) -> Callable[[Tensor], Tensor]:
    """Returns interleave_moe_weights_for_sm90_mixed_gemm for kind "fp4" or "int4": the CUDA kernel, built for the
    CPU."""
    compiler = shutil.which("c++") or shutil.which("g++")
    source = (root() / _UTILS).read_text()
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    name = f"interleave_{kind}_weights_for_sm90_mixed_gemm"
    kernel = re.search(rf"__global__ void {name}_kernel.*?\n}}\n", source, re.DOTALL)
    launcher = re.search(rf"\nvoid {name}\(.*?dim3 block\((\d+),", source, re.DOTALL)
    assert kernel and launcher
    program, library = folder / f"{name}.cpp", folder / f"{name}.so"
    program.write_text(_HARNESS.format(kernel=kernel[0], lanes=launcher[1], kind=kind))
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, program], check=True)
    interleave = ctypes.CDLL(str(library)).interleave

    def values(codes: Tensor) -> Tensor:
        out = torch.full_like(codes, 0xAA)
        for one, to in zip(codes, out, strict=True):
            interleave(*(ctypes.c_void_p(t.data_ptr()) for t in (one, to)), one.shape[0], one.shape[1] * 2)
        return out

    return values


def scale_interleave() -> tuple[str, Callable[..., Tensor]]:
    """Returns (release, its interleave_moe_scales_for_sm90_mixed_gemm)."""
    folder, name = root(), "interleave_moe_scales_for_sm90_mixed_gemm"
    for release, file in (("0.7", "prepare.py"), ("0.6", "core.py")):
        path = folder / "fused_moe" / file
        if path.exists() and f"def {name}" in path.read_text():
            return release, take(path, {name}, {"torch": torch})[name]
    pytest.fail(f"flashinfer's {name} was not found")
