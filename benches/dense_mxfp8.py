"""Times oxmoe.mm_mxfp8 beside torch's bf16 matmul (cuBLAS) on a GPU, with cold L2: `python benches/dense_mxfp8.py`.

Several weights of a shape are multiplied in turn in a CUDA graph, so that none is in L2 when its turn comes. Graphs are
replayed in rounds, one after the other, each behind a pause in which the host is done with its launch. The floor is the
larger of the bytes of b, a, scales and output over memory's measured 4.3 TB/s and of flops over bf16's measured 790
TFLOP/s (docs/measured_kernels.md).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import oxmoe
from oxmoe.tools.bench import machine
from oxmoe.tools.bench.timing import Times, fields

SHAPES = [(7168, 16384), (4096, 7168), (18432, 7168), (2112, 7168), (24576, 1536), (7168, 2304)]  # (n, k)
TOKENS = [1, 8, 16, 32, 64, 128, 256, 1024, 4096]
COLD_BYTES = 240e6
ROUNDS = 7
# The least number of calls in a graph, so that the beginning of the graph hardly counts.
CALLS = 12
PAUSE_CYCLES = 60_000


def graph_of(calls: list[Callable[[], Tensor]]) -> torch.cuda.CUDAGraph:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    del kept
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(PAUSE_CYCLES)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def measure(n: int, k: int, m: int) -> tuple[float, dict[str, Times]]:
    """Returns (floor, times) in us."""
    count = max(2, int(COLD_BYTES / (n * k)) + 1)
    rounds = -(-CALLS // count)
    x = torch.randn((m, k), device="cuda", dtype=torch.bfloat16)
    dense = [torch.randn((n, k), device="cuda", dtype=torch.bfloat16) / k**0.5 for _ in range(count)]
    weights = [oxmoe.mxfp8_quantize(weight) for weight in dense]
    a, a_scales = oxmoe.mxfp8_quantize(x)
    graphs = {
        "mm_mxfp8": graph_of([partial(oxmoe.mm_mxfp8, a, w[0].t(), a_scales, w[1]) for w in weights * rounds]),
        "mxfp8_linear": graph_of([partial(oxmoe.mxfp8_linear, x, *w) for w in weights * rounds]),
        "cublas_bf16": graph_of([partial(torch.matmul, x, w.t()) for w in dense * rounds]),
    }
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name].append(microseconds(graph) / (count * rounds))
    floor = max((n * k + m * k) * 33 / 32 + 2 * m * n, 2 * m * n * k / 790e12 * 4.3e12) / 4.3e6
    now = machine.clocks("cuda")
    return floor, {name: Times(values, now) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a JSON line for each time")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--shapes", nargs="+", help="as 7168x16384", default=[f"{n}x{k}" for n, k in SHAPES])
    arguments = parser.parse_args()
    environment: dict[str, Any] = machine.environment("cuda", "benches/dense_mxfp8.py")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, oxmoe {oxmoe.__version__}; us")
    for n, k in (map(int, shape.split("x")) for shape in arguments.shapes):
        for m in arguments.tokens:
            floor, times = measure(n, k, m)
            if arguments.json:
                common = {"op": "mm_mxfp8", "n": n, "k": k, "m": m, "floor_us": floor}
                for name, us in times.items():
                    print(json.dumps({**common, "backend": name, **fields(us), **environment}), flush=True)
                continue
            ours, cublas = times["mm_mxfp8"], times["cublas_bf16"]
            line = f"{n:6} x {k:6} m {m:5}: floor {floor:8.2f}"
            line += f"  mm_mxfp8 {ours:8.2f} ({ours / floor:.2f} x)"
            line += f"  mxfp8_linear {times['mxfp8_linear']:8.2f}  cuBLAS bf16 {cublas:8.2f} ({cublas / ours:.2f} x)"
            print(line, flush=True)


if __name__ == "__main__":
    main()
