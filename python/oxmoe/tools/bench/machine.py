"""Says where a row was measured: build, versions, driver, and the GPU's clocks and power."""

from __future__ import annotations

import ctypes
import datetime
import functools
import importlib.metadata
import os
import shlex
import sys
from typing import Any

import torch

import oxmoe

# NVML's numbers: nvml.h.
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_GPU_TEMPERATURE = 0


class Nvml:
    """The driver's own answers, through its library. An answer that the driver does not know is None."""

    def __init__(self, library: Any) -> None:
        """library: libnvidia-ml.so.1. Raises OSError if it does not start."""
        self.library = library
        status = library.nvmlInit_v2()
        if status:
            raise OSError(f"nvmlInit_v2 gave {status}")

    def driver(self) -> str | None:
        text = ctypes.create_string_buffer(96)
        return None if self.library.nvmlSystemGetDriverVersion(text, len(text)) else text.value.decode()

    def clocks(self, uuid: str) -> dict[str, float | None] | None:
        """Returns MHz, watts and degrees of one GPU at this moment; None for a GPU that NVML does not know."""
        device = ctypes.c_void_p()
        if self.library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)):
            return None

        def ask(name: str, *arguments: int) -> int | None:
            answer = ctypes.c_uint()
            status = getattr(self.library, name)(device, *arguments, ctypes.byref(answer))
            return None if status else answer.value

        def watts(name: str) -> float | None:
            milliwatts = ask(name)
            return None if milliwatts is None else milliwatts / 1000

        return {
            "sm_mhz": ask("nvmlDeviceGetClockInfo", _SM_CLOCK),
            "sm_max_mhz": ask("nvmlDeviceGetMaxClockInfo", _SM_CLOCK),
            "memory_mhz": ask("nvmlDeviceGetClockInfo", _MEMORY_CLOCK),
            "power_w": watts("nvmlDeviceGetPowerUsage"),
            "power_limit_w": watts("nvmlDeviceGetEnforcedPowerLimit"),
            "temperature_c": ask("nvmlDeviceGetTemperature", _GPU_TEMPERATURE),
        }


@functools.cache
def nvml() -> Nvml | None:
    """Returns the driver's library, or None if it is missing or does not start."""
    try:
        return Nvml(ctypes.CDLL("libnvidia-ml.so.1"))
    except OSError:
        return None


def clocks(device: str) -> dict[str, float | None] | None:
    """Returns the clocks of torch's current GPU; None on CPU, and if the driver's library does not tell."""
    library = nvml() if device == "cuda" else None
    return None if library is None else library.clocks(f"GPU-{torch.cuda.get_device_properties().uuid}")


def without_paths(arguments: list[str]) -> list[str]:
    """Returns the command for the record, without the paths of this machine. A model's path becomes its last part."""
    kept: list[str] = []
    for previous, argument in zip(["", *arguments], arguments, strict=False):
        if previous == "--model":
            kept.append(os.path.basename(argument.rstrip("/")))
        elif argument.startswith("--model="):
            kept.append(f"--model={os.path.basename(argument.rstrip('/'))}")
        elif previous not in ("--json", "--plot") and not argument.startswith(("--json", "--plot")):
            kept.append(argument)
    return kept


def environment(device: str, program: str = "-m oxmoe") -> dict[str, Any]:
    """Returns what is the same in all rows of a run. program: how python was told to run it."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    info, library = oxmoe.device_info(), nvml() if device == "cuda" else None
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "driver": None if library is None else library.driver(),
        "cpu": info["cpu"],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": triton,
        "oxmoe": oxmoe.__version__,
        "commit": info["commit"],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *program.split(), *without_paths(sys.argv[1:])]),
        "portable": os.environ.get("OXMOE_PORTABLE") == "1",
    }
