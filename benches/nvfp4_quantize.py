"""Times oxmoe.nvfp4.fp4_quantize on a GPU, with cold L2: `python benches/nvfp4_quantize.py`.

Several tensors of a shape are quantised in turn in a CUDA graph. The floor is the bytes of numbers, codes and scales at
4.3 TB/s (docs/measured_kernels.md).
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

import oxmoe
from oxmoe import nvfp4
from oxmoe.tools.bench import machine
from oxmoe.tools.bench.timing import Times, fields

SHAPES = [(1, 7168), (64, 7168), (512, 7168), (4096, 7168), (4096, 2880)]
LAYOUTS = {"128x4": {}, "8x4": {"is_sf_8x4_layout": True}, "linear": {"is_sf_swizzled_layout": False}}
COLD_BYTES = 240e6
ROUNDS = 7


def measure(rows: int, columns: int, dtype: torch.dtype, options: dict[str, bool]) -> tuple[float, Times]:
    """Returns (floor, times) in us."""
    size = rows * columns * dtype.itemsize
    count = min(64, max(2, int(COLD_BYTES / size) + 1))
    numbers = [torch.randn((rows, columns), device="cuda").to(dtype) for _ in range(count)]
    scale = torch.ones(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    nvfp4.fp4_quantize(numbers[0], scale, **options)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kept = [nvfp4.fp4_quantize(x, scale, **options) for x in numbers]
    del kept
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(ROUNDS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / count)
    return (size + rows * columns * 9 / 16) / 4.3e6, Times(times, machine.clocks("cuda"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a JSON line for each size")
    arguments = parser.parse_args()
    environment: dict[str, Any] = machine.environment("cuda", "benches/nvfp4_quantize.py")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, oxmoe {oxmoe.__version__}; us")
    for rows, columns in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            for layout, options in LAYOUTS.items():
                floor, time = measure(rows, columns, dtype, options)
                name = str(dtype).removeprefix("torch.")
                if arguments.json:
                    row = {"op": "fp4_quantize", "rows": rows, "columns": columns, "dtype": name, "layout": layout}
                    row |= {"floor_us": floor, "backend": "oxmoe", **fields(time), **environment}
                    print(json.dumps(row), flush=True)
                    continue
                print(
                    f"{rows:5} x {columns} {name:8} {layout:6}: floor {floor:6.2f}  {time:7.2f} ({time / floor:.2f} x)"
                )


if __name__ == "__main__":
    main()
