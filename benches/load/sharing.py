"""Scenarios of benches/reliability.py in which several processes share a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from load.common import Failed, Row, Skipped, inner
from load.layers import need_gpu

# A client of MPS without torch. It ends with a status of its own if the driver refuses it.
_PROBE = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
context, device = ctypes.c_void_p(), ctypes.c_int()
for status in (
    driver.cuInit(0), driver.cuDeviceGet(ctypes.byref(device), 0),
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
):
    if status:
        raise SystemExit(f"the driver refuses a client with {status}")
"""


def _beside(device: str, seconds: float, seed: int, limit_s: float, environments: list[dict[str, str]]) -> Row:
    """Runs a soak in each of these environments at once, with the same inputs. All find the same bits."""
    options = {"device": device, "seconds": seconds, "seed": seed, "shapes": 1, "batches": 4, "alone": False}
    with ThreadPoolExecutor(len(environments)) as pool:
        rows = list(pool.map(lambda env: inner("soak", options, limit_s, env), environments))
    for number, row in enumerate(rows):
        if row["outcome"] not in ("right", "wrong"):
            raise Failed(f"process {number}: {row['outcome']}: {row.get('reason')}")
    if len({row["bits"] for row in rows}) > 1:
        raise Failed(f"processes found different bits: {[row['bits'] for row in rows]}")
    return {
        "wrong": sum(row["wrong"] for row in rows),
        "calls": sum(row["calls"] for row in rows),
        "processes": len(rows),
        "formats": rows[0]["formats"],
        "inputs": rows[0]["inputs"],
        "bits": rows[0]["bits"],
    }


def processes(device: str, seconds: float, seed: int, limit_s: float) -> Row:
    """Runs two processes on one GPU, which takes turns between them."""
    need_gpu(device)
    return _beside(device, seconds, seed, limit_s, [{}, {}])


def mps(device: str, seconds: float, seed: int, limit_s: float) -> Row:
    """Runs a process without MPS, and then two clients of a daemon of MPS, one of them limited to a quarter of the
    multiprocessors. All three find the same bits."""
    need_gpu(device)
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        raise Skipped("nvidia-cuda-mps-control is not installed")
    alone = _beside(device, 0.0, seed, limit_s, [{}])
    with tempfile.TemporaryDirectory() as folder:
        env = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        whole = {**os.environ, **env}
        output: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        daemon = subprocess.Popen([program, "-f"], **output, env=whole)

        def tell(command: str) -> str:
            words: dict[str, Any] = {"input": command + "\n", "text": True, "capture_output": True}
            done = subprocess.run([program], **words, env=whole, timeout=20)
            return (done.stdout + done.stderr).strip()

        try:
            time.sleep(1.0)
            if daemon.poll() is not None:
                said = daemon.stdout.read().decode(errors="replace").strip() if daemon.stdout else ""
                raise Skipped(f"nvidia-cuda-mps-control ended with {daemon.returncode}: {said[-200:]}")
            try:
                command = [sys.executable, "-c", _PROBE]
                probe = subprocess.run(command, env=whole, capture_output=True, text=True, timeout=30)
            except subprocess.TimeoutExpired as error:
                raise Skipped("a client of MPS does not start within 30 s") from error
            if probe.returncode:
                raise Skipped(f"MPS takes no client here: {probe.stderr.strip()[-200:]}")
            servers = tell("get_server_list").split()
            if not servers or not all(server.isdecimal() for server in servers):
                raise Skipped(f"the daemon has started no server: {' '.join(servers)[:200] or 'an empty list'}")
            row = _beside(device, seconds, seed, limit_s, [env, env | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}])
        finally:
            try:
                tell("quit -t 5")
                daemon.wait(timeout=15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
    if row["bits"] != alone["bits"]:
        raise Failed(f"clients of MPS found bits {row['bits']}, a process without MPS {alone['bits']}")
    return {**row, "wrong": row["wrong"] + alone["wrong"], "percentages": [100, 25]}


SCENARIOS: dict[str, Callable[..., Row]] = {"processes": processes, "mps": mps}
