"""The test's side of the stand-in driver: it builds the driver, makes calls under it, and reads its records."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import oxmoe._oxmoe as extension
from host_build import compiled

HERE = Path(__file__).parent

# The packed forms that name kernels (variants/forms.rs).
FORMS = ("mxfp4", "mxfp8", "nvfp4", "int4")
# First words of a kernel's name -> its parameters (variants.rs, `signature`). A number is a plain size: CUtensorMap has
# 128 bytes.
SIGNATURES = {
    **{f"grouped_gemm_{form}_sm90": ("GemmPairParams",) for form in FORMS},
    **{f"grouped_gemm_{form}_portable": ("GroupedGemmParams",) for form in FORMS},
    **{f"routed_layer_{form}_sm90": ("RoutedLayerParams",) for form in FORMS},
    "grouped_gemm_sm90": (128, "GroupedGemmParams"),
    "grouped_gemm_portable": ("GroupedGemmParams",),
    "grouped_gemm_fp8_portable": ("GroupedGemmParams",),
    "round_rows_mxfp8": ("QuantizeRowsParams",),
    "round_tiles_mxfp8": ("TileRowsParams",),
    "mxfp8": ("PackMxfp4Params",),
    "grouped_gemm_fp8_sm90": (128, "GroupedGemmParams"),
    "grouped_gemm_fp8_wide_sm90": (128, "GroupedGemmParams"),
    "grouped_gemm_fp8_wide_cut_sm90": (128, "GroupedGemmParams"),
    "grouped_gemm_fp8_ordered_sm90": (128, 128, "OrderedGemmParams"),
    "grouped_gemm_fp8_stationary_sm90": (128, "GroupedGemmParams"),
    "quantize_fp8": ("QuantizeFp8Params",),
    "expand_scales": ("ExpandScalesParams",),
    "grouped_gemm_mxfp4_e4m3_sm90": ("GroupedGemmParams",),
    "quantize_rows_e4m3": ("QuantizeRowsParams",),
    "quantize_tiles_e4m3": ("TileRowsParams",),
    "layer_sm90": (128, 128, "LayerParams"),
    "routed_layer_sm90": (128, 128, "RoutedLayerParams"),
    "routed_layer_fp8_sm90": (128, 128, "RoutedLayerParams"),
    "select": ("SelectParams", "RouteParams"),
    "route": ("SelectParams", "RouteParams"),
    "route_e0": ("RouteParams",),
    "histogram": ("RouteParams",),
    "place": ("RouteParams",),
    "ragged": ("RaggedParams",),
    "schedule": ("ScheduleParams",),
    "combine": ("CombineParams",),
    "mxfp4": ("PackMxfp4Params",),
    "mxfp4_layout": ("LayoutMxfp4Params",),
    "mxfp4_quantize": ("QuantizeMxfp4Params",),
    "mxfp4_dequantize": ("QuantizeMxfp4Params",),
    "mxfp4_scale_bytes": ("ScaleBytesParams",),
    "nvfp4_quantize": ("QuantizeNvfp4Params",),
    "nvfp4_pack": ("PackParams",),
    "round_rows_nvfp4": ("RoundNvfp4Params",),
    "int4_pack": ("PackParams",),
    "allreduce": ("AllReduceParams",),
    "quantize_mxfp8": ("QuantizeMxfp8Params",),
    "dequantize_mxfp8": ("QuantizeMxfp8Params",),
    "mm_mxfp8": ("MmMxfp8Params",),
    "mm_mxfp8_few_sm90": ("MmMxfp8FewParams",),
}


def parameter_structs() -> dict[str, type[ctypes.Structure]]:
    """The structs of src/params/ as C lays them out."""
    folder = Path(__file__).parents[3] / "src" / "params"
    # Structs of these files are fields of the others' structs.
    first = ["common", "moe", "quant"]
    names = first + sorted({path.stem for path in folder.glob("*.rs")} - set(first))
    text = "".join((folder / f"{name}.rs").read_text() for name in names)
    types: dict[str, Any] = {"bool": ctypes.c_bool, "i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}
    types |= {"u32": ctypes.c_uint32, "u64": ctypes.c_uint64}
    types |= dict.fromkeys(re.findall(r"enum (\w+) \{", text), ctypes.c_int32)
    for name, body in re.findall(r"struct (\w+) \{\n(.*?)\n    \}", text, re.DOTALL):
        fields = re.findall(r"^        (\w+): (.+?),$", body, re.MULTILINE)
        kinds = [(field, ctypes.c_uint64 if kind.startswith("*") else types[kind]) for field, kind in fields]
        types[name] = type(name, (ctypes.Structure,), {"_fields_": kinds})
    return types


STRUCTS = parameter_structs()


def parameters_of(launch: dict[str, Any]) -> list[Any]:
    """Returns a launch's parameters: structs, or (map number, address) of a tensor map."""
    prefix = max((name for name in SIGNATURES if f"{launch['kernel']}_".startswith(f"{name}_")), key=len)
    values = []
    for kind, text in zip(SIGNATURES[prefix], launch["parameters"], strict=True):
        data = bytes.fromhex(text)
        if isinstance(kind, int):
            values.append((int.from_bytes(data[:8], "little"), int.from_bytes(data[8:16], "little")))
        else:
            values.append(STRUCTS[kind].from_buffer_copy(data))
    return values


def launches(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["call"] == "cuLaunchKernelEx"]


def named(records: list[dict[str, Any]], call: str) -> list[dict[str, Any]]:
    return [record for record in records if record["call"] == call]


PLANNED = re.compile(
    r"launch \d+: (\w+): (\d+) CTAs(?: in clusters of (\d+))? x (\d+) warps, (\d+) bytes of shared memory"
)


def planned(text: str) -> list[tuple[Any, ...]]:
    """Returns (kernel, CTAs, cluster, threads, shared bytes) of each launch that `explain` prints."""
    return [
        (name, int(ctas), int(size or 1), 32 * int(warps), int(shared))
        for name, ctas, size, warps, shared in PLANNED.findall(text)
    ]


def asked(launch: dict[str, Any]) -> tuple[Any, ...]:
    return (launch["kernel"], launch["grid"][0], launch["cluster"][0], launch["block"][0], launch["shared"])


def cuda_headers() -> Path | None:
    """Returns the folder of NVIDIA's cuda.h in this environment."""
    roots = [
        Path(root) for root in getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", None) or ()
    ]
    found = [path.parent for root in roots for path in sorted(root.glob("*/include/cuda.h"))]
    home = os.environ.get("CUDA_HOME")
    return next(
        (folder for folder in [*found, *([Path(home, "include")] if home else [])] if (folder / "cuda.h").exists()),
        None,
    )


def build(folder: Path) -> None:
    """Compiles the stand-in, under both names that it can be opened by."""
    flags = ["-Wall", "-Wextra", "-Werror", "-O1", "-pthread", "-Wl,-soname,libcuda.so.1", f"-isystem{cuda_headers()}"]
    (folder / "libcuda.so.1").symlink_to(compiled("cc", flags, HERE / "fake_cuda.c"))
    (folder / "libcuda.so").symlink_to("libcuda.so.1")


def execute(libraries: Path, tmp_path: Path, call: str, arguments: dict[str, Any], **settings: Any) -> Any:
    """Runs `calls.py` in a new process with that driver. It fails on a panic, and if the driver refused something."""
    sizes = {
        name: ",".join(str(kind if isinstance(kind, int) else ctypes.sizeof(STRUCTS[kind])) for kind in kinds)
        for name, kinds in SIGNATURES.items()
    }
    log = tmp_path / f"driver-{len(list(tmp_path.iterdir()))}.jsonl"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FAKE_")}
    paths = [str(HERE), str(Path(extension.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment |= {
        "LD_LIBRARY_PATH": os.pathsep.join([str(libraries), os.environ.get("LD_LIBRARY_PATH", "")]),
        "PYTHONPATH": os.pathsep.join(paths),
        "FAKE_LOG": str(log),
        "FAKE_PARAMETERS": ";".join(f"{name}:{text}" for name, text in sizes.items()),
    }
    environment |= {f"FAKE_{name.upper()}": str(value) for name, value in settings.items()}
    command = [sys.executable, str(HERE / "calls.py"), call, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
    assert "panicked" not in done.stderr, done.stderr
    if log.exists():
        assert '"refused"' not in log.read_text(), log.read_text()
    return json.loads(done.stdout)
