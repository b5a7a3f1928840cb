"""`python -m oxmoe demo` checks and times one MoE layer of Qwen3-30B-A3B on this machine, with torch or with numpy
only.

It runs on a GPU if torch sees one that this build has kernels for, and otherwise on the CPU.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from oxmoe import ExpertWeights, device_info, explain, moe
from oxmoe.hopper import untried
from oxmoe.tools.command import Listed, listed, whole

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
CPU_TOKENS, GPU_TOKENS = (1, 16, 64), (1, 16, 64, 256, 1024, 4096)
# The bar of ||result - reference|| / ||reference||: what three roundings to the dtype leave, with room.
ERROR_BARS = {"bf16": 1e-2, "f16": 1.5e-3}
CHECKED_TOKENS = 4


class Numpy:
    """numpy arrays on the CPU, in f16 because numpy has no bf16."""

    format, where, tokens, make_weights = "f16", "CPU", CPU_TOKENS, ExpertWeights.f16

    def __init__(self) -> None:
        import numpy

        self.numpy, self.random = numpy, numpy.random.default_rng(0)
        self.exp = numpy.exp

    def normal(self, shape: tuple[int, ...], scale: float, dtype: str = "float16") -> Any:
        result = self.empty(shape, dtype)
        for part in result:
            part[...] = self.random.standard_normal(shape[1:], dtype="float32") * scale
        return result

    def empty(self, shape: tuple[int, ...], dtype: str = "float16") -> Any:
        return self.numpy.empty(shape, dtype)

    def double(self, array: Any) -> Any:
        return array.astype("float64")

    def microseconds(self, call: Callable[[], object]) -> float:
        return best_of(call)


class Torch:
    """torch tensors in bf16."""

    format, make_weights = "bf16", ExpertWeights.bf16

    def __init__(self, gpu: bool) -> None:
        import torch

        self.torch, self.device = torch, "cuda" if gpu else "cpu"
        self.where = torch.cuda.get_device_name() if gpu else "CPU"
        self.tokens = GPU_TOKENS if gpu else CPU_TOKENS
        self.exp = torch.exp
        torch.manual_seed(0)

    def normal(self, shape: tuple[int, ...], scale: float, dtype: str = "bfloat16") -> Any:
        return self.empty(shape, dtype).normal_(0, scale)

    def empty(self, shape: tuple[int, ...], dtype: str = "bfloat16") -> Any:
        return self.torch.empty(shape, dtype=getattr(self.torch, dtype), device=self.device)

    def double(self, tensor: Any) -> Any:
        return tensor.double()

    def microseconds(self, call: Callable[[], object]) -> float:
        if self.device == "cpu":
            return best_of(call)
        from oxmoe.testing import graph_time_us

        return graph_time_us([call])


def best_of(call: Callable[[], object], seconds: float = 1.0) -> float:
    """Returns the microseconds of the fastest call, after one call that warms up."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def reference(library: Any, x: Any, logits: list[float], w13: Any, w2: Any) -> Any:
    """Computes one token in fp64, with the layer written out plainly."""
    chosen = sorted(range(EXPERTS), key=lambda expert: (-logits[expert], expert))[:TOP_K]
    shares = [math.exp(logits[expert] - logits[chosen[0]]) for expert in chosen]
    result = 0.0
    for expert, share in zip(chosen, shares, strict=True):
        sums = library.double(w13[expert]) @ library.double(x)
        gate, up = sums[:INTERMEDIATE], sums[INTERMEDIATE:]
        hidden = gate / (1.0 + library.exp(-gate)) * up
        result = result + share / sum(shares) * (library.double(w2[expert]) @ hidden)
    return result


def choose() -> tuple[Any, str]:
    """Returns the library and device to run on, and remarks about the choice."""
    info = device_info()
    if find_spec("torch") is None:
        return Numpy(), "torch is not installed: numpy arrays, on the CPU" if info["gpus"] else ""
    import torch

    if not torch.cuda.is_available():
        return Torch(gpu=False), "torch cannot use the GPU" if info["gpus"] else ""
    gpu = info["gpus"][0]
    if gpu["arch"] == "not supported":
        return Torch(gpu=False), f"{gpu['name']}: on the CPU"
    if not gpu["kernels"]:
        return Torch(gpu=False), f"this build has kernels for {info['archs']}, not for {gpu['arch']}: on the CPU"
    return Torch(gpu=True), untried(gpu["arch"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens",
        type=listed(whole(1, 1 << 20)),
        nargs="+",
        action=Listed,
        help="batch sizes (default: some that suit the machine)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demo. Returns 0 if every checked value is right."""
    info = device_info()
    library, remark = choose()
    on_gpu, bar = library.where != "CPU", ERROR_BARS[library.format]
    machine = library.where if on_gpu else f"CPU ({info['cpu']}, {info['threads']} threads)"
    print(f"oxmoe {info['version']}: Qwen3-30B-A3B's MoE layer on {machine}")
    shape = f"{EXPERTS} experts, top-{TOP_K}, hidden {HIDDEN}, intermediate {INTERMEDIATE}"
    print(f"{shape}, {library.format}, router included")
    if remark:
        print(remark)

    w13 = library.normal((EXPERTS, 2 * INTERMEDIATE, HIDDEN), HIDDEN**-0.5)
    w2 = library.normal((EXPERTS, HIDDEN, INTERMEDIATE), INTERMEDIATE**-0.5)
    weights = library.make_weights(w13, w2)
    print(f"\n{'tokens':>6} {'us':>9} {'us/token':>9} {'TFLOP/s':>8} {'error':>8}")
    wrong, batches = 0, args.tokens or library.tokens
    for tokens in batches:
        x = library.normal((tokens, HIDDEN), 1.0)
        logits = library.normal((tokens, EXPERTS), 1.0, "float32")
        call = partial(moe, x, weights, router_logits=logits, top_k=TOP_K, out=library.empty(x.shape))
        out = call()
        square_error = square = 0.0
        for token in range(0, tokens, -(-tokens // CHECKED_TOKENS)):
            expected = reference(library, x[token], logits[token].tolist(), w13, w2)
            square_error += float(((library.double(out[token]) - expected) ** 2).sum())
            square += float((expected**2).sum())
        error = math.sqrt(square_error / square)
        wrong += not error <= bar
        us = library.microseconds(call)
        rate = tokens * TOP_K * 6 * HIDDEN * INTERMEDIATE / us * 1e-6
        print(f"{tokens:6} {us:9.1f} {us / tokens:9.2f} {rate:8.2f} {error:8.1e}")

    verdict = f"{wrong} WRONG, the bar is" if wrong else "all below the bar of"
    print(f"\nerror: relative norm against fp64 on up to {CHECKED_TOKENS} tokens: {verdict} {bar:g}")
    arch = None if on_gpu else "cpu"
    print(f"\n{explain(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, batches[-1], format=library.format, arch=arch)}", end="")
    return 1 if wrong else 0
