"""Says what oxmoe finds on this machine: its build, GPUs, CPU, torch, SGLang and what oxmoe takes over in it, and
the peers.

The exit status is 1 if something that the user asked for does not work: OXMOE_SGLANG, a layer on this CPU, or a
layer on a GPU here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import oxmoe
import oxmoe.sglang
import oxmoe.sglang.platform
from oxmoe.hopper import untried

UNLOADED = "a server would start on SGLang's own kernels and say nothing"


@dataclass(frozen=True)
class Finding:
    name: str
    text: str
    broken: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no arguments."""


def run(args: argparse.Namespace) -> int:
    broken = 0
    for finding in findings():
        print(f"{finding.name:<16}{'BROKEN: ' if finding.broken else ''}{finding.text}", flush=True)
        broken += finding.broken
    return 1 if broken else 0


def findings() -> Iterator[Finding]:
    try:
        info = oxmoe.device_info()
    except RuntimeError as error:  # the driver does not start
        yield Finding("driver", str(error), broken=True)
    else:
        yield from build_and_devices(info)
        yield from torch_layers(info)
    yield from sglang()
    yield from peers()


def build_and_devices(info: dict[str, Any]) -> Iterator[Finding]:
    archs = ", ".join(f"sm_{arch}" for arch in info["archs"]) or "none"
    yield Finding("oxmoe", f"{info['version']}, {info['kernels']} kernels for {archs}, built with nvcc {info['nvcc']}")
    everywhere: list[str] = []
    on_cpu: list[str] = []
    for name, devices in info["formats"].items():
        (everywhere if "cuda" in devices else on_cpu).append(name)
    yield Finding("formats", f"{', '.join(everywhere)}; on CPU also {', '.join(on_cpu)}")
    yield Finding("cpu", f"{info['cpu']}, {info['threads']} threads")
    yield driver(info)
    for number, gpu in enumerate(info["gpus"]):
        if gpu["arch"] == "not supported":
            yield Finding(f"gpu {number}", gpu["name"], broken=True)
            continue
        remark = untried(gpu["arch"]) if gpu["kernels"] else f"this wheel has no kernels for {gpu['arch']}"
        text = f"{gpu['name']}, {gpu['arch']}, {gpu['multiprocessors']} multiprocessors"
        yield Finding(f"gpu {number}", f"{text}; {remark}" if remark else text, broken=not gpu["kernels"])


def driver(info: dict[str, Any]) -> Finding:
    if not info["driver"]:
        return Finding("driver", "none: CPU only")
    speaks, needed = info["driver_cuda"], info["needed_cuda"]
    if tuple(map(int, speaks.split("."))) >= tuple(map(int, needed.split("."))):
        return Finding("driver", f"speaks CUDA {speaks}; this build needs {needed}")
    # The driver's message at the first use of a GPU, without "driver" before it. It stands in place of each GPU's name.
    reasons = [gpu["name"].removeprefix("driver ") for gpu in info["gpus"]]
    return Finding("driver", reasons[0] if reasons else f"speaks CUDA {speaks}, no GPU", broken=bool(reasons))


def torch_layers(info: dict[str, Any]) -> Iterator[Finding]:
    """Reports torch, and compares one small layer with the reference on the CPU and on each GPU."""
    if find_spec("torch") is None:
        yield Finding("torch", "not installed: numpy arrays on CPU only")
        return
    import torch

    yield Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{number}" for number, gpu in enumerate(info["gpus"]) if gpu["kernels"]]
    elif info["gpus"]:
        yield Finding("torch", "sees no GPU, though the driver does", broken=True)
    for device in devices:
        try:
            yield Finding(f"layer on {device}", f"right, {small_layer_us(device):.0f} us for the first call")
        except Exception as error:  # whatever it is, the user came to see it
            yield Finding(f"layer on {device}", f"{type(error).__name__}: {error}", broken=True)


def small_layer_us(device: str) -> float:
    """Returns the microseconds of the first call of a bf16 layer. Raises an error if the result is wrong."""
    import torch

    from oxmoe import reference
    from oxmoe.testing import assert_close_ulp

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=rng).mul_(size[-1] ** -0.5).bfloat16().to(device)

    rng = torch.Generator().manual_seed(0)
    x, w13, w2 = randn(5, 128), randn(8, 192, 128), randn(8, 128, 96)
    router_logits = torch.randn(5, 8, generator=rng).to(device)
    weights = oxmoe.ExpertWeights.bf16(w13, w2)
    start = time.perf_counter()
    result = oxmoe.moe(x, weights, router_logits=router_logits, top_k=2).cpu()
    us = (time.perf_counter() - start) * 1e6
    assert_close_ulp(result, reference.moe(x, w13, w2, router_logits=router_logits, top_k=2).cpu())
    return us


def sglang() -> Iterator[Finding]:
    setting = oxmoe.sglang.setting.text()
    asked = f"{oxmoe.sglang.SETTING}={setting}"
    if find_spec("sglang") is None:
        yield Finding("sglang", f"not installed{f'; {asked} asks for it' if setting else ''}", broken=bool(setting))
        return
    version = oxmoe.sglang.sglang_version()
    yield Finding("sglang", f"{version}, {_served(version)}{_incomplete('sglang')}")
    if not setting:
        yield Finding("taken over", f"nothing: {oxmoe.sglang.SETTING} is empty")
        return
    yield from entry_points()
    try:
        swaps = {swap.name: swap.parts for swap in oxmoe.sglang.requested()}
        if "allreduce" in swaps:
            oxmoe.sglang.platform.activate()  # SGLang does this while it is imported
            if find_spec("flashinfer") is None:
                reason = "SGLang fuses its all-reduce only where it can import flashinfer: install flashinfer-python"
                yield Finding("allreduce", reason, broken=True)
        oxmoe.sglang.install()
    except Exception as error:  # a server would not start with it
        yield Finding("taken over", f"nothing, {asked}: {type(error).__name__}: {error}", broken=True)
    for swap in oxmoe.sglang.active():
        yield Finding("taken over", f"{swap.name}: {swap.effect}")


def _served(version: str) -> str:
    capabilities = oxmoe.sglang.capabilities
    try:
        if not capabilities.is_new(version):
            return "not served; served are " + capabilities.RANGE if capabilities.is_old(version) else "served"
    except ValueError as error:
        return f"not served: {error}"
    tested = f"newer than {capabilities.LAST}, the newest that oxmoe is tested with"
    lacking = capabilities.missing(tuple(capabilities.NEEDS))
    if not lacking:
        return f"{tested}; all that oxmoe takes over is there"
    return f"{tested}, and has not {'; '.join(lacking)}"


def entry_points() -> Iterator[Finding]:
    """Reports what keeps SGLang from calling oxmoe."""
    for group in ("sglang.srt.plugins", "sglang.srt.platforms"):
        if not importlib.metadata.entry_points(group=group, name="oxmoe"):
            reason = (
                f"SGLang cannot find oxmoe: its entry point {group} is not installed (pip install its sources or wheel)"
            )
            yield Finding("plugin", reason, broken=True)
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and "oxmoe" not in [name.strip() for name in allowed.split(",")]:
        yield Finding(
            "plugin", f"SGLANG_PLUGINS={allowed} leaves oxmoe out: add it, or unset it; {UNLOADED}", broken=True
        )
    platform = os.environ.get("SGLANG_PLATFORM", "")
    if platform:
        reason = (
            f"SGLANG_PLATFORM={platform} keeps SGLang from loading oxmoe, which is no platform: unset it; {UNLOADED}"
        )
        yield Finding("plugin", reason, broken=True)


def peers() -> Iterator[Finding]:
    for module, distribution in (("sgl_kernel", "sglang-kernel"), ("flashinfer", "flashinfer-python")):
        if find_spec(module) is None:
            yield Finding(module, "not installed")
        else:
            yield Finding(module, f"{_version(distribution)}{_incomplete(distribution)}")
    spec = find_spec("triton_kernels")
    if spec is None:
        yield Finding("triton_kernels", "not installed")
    elif not any(Path(folder, "topk.py").exists() for folder in spec.submodule_search_locations or []):
        yield Finding(
            "triton_kernels",
            "another package of this name (PyPI's triton-kernels); sglang-kernel carries the real one",
        )
    else:
        owners = sorted(set(importlib.metadata.packages_distributions().get("triton_kernels", ["no distribution"])))
        yield Finding("triton_kernels", f"the one with matmul kernels, from {', '.join(owners)}")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _incomplete(distribution: str) -> str:
    """Returns '; half installed ...' if something that the distribution requires is absent: its imports fail in odd
    places."""
    if find_spec("packaging") is None:
        return "; requirements not checked (packaging is not installed)"
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires(distribution) or []]
    except importlib.metadata.PackageNotFoundError:
        return f"; no metadata of {distribution}"
    needed = [item for item in requirements if item.marker is None or item.marker.evaluate({"extra": ""})]
    absent = [item.name for item in needed if _version(item.name) == "of unknown version"]
    if not absent:
        return ""
    more = f" and {len(absent) - 4} more" if len(absent) > 4 else ""
    return f"; half installed, without {', '.join(absent[:4])}{more}"
