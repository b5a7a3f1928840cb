"""Processes that share a GPU do not change each other's results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parent.parent / "support" / "replay_layers.py"
PROCESSES, SECONDS = 5, 8


def test_layers_of_few_tokens(rng: torch.Generator) -> None:
    """The driver takes turns between processes, also in the middle of a launch."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    seeds = torch.randint(1 << 31, (PROCESSES,), generator=rng).tolist()
    commands = [[sys.executable, str(SCRIPT), str(seed), str(SECONDS)] for seed in seeds]
    started = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        said = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * PROCESSES
    results = [json.loads(text.splitlines()[-1]) for text in said]
    assert all(min(result["replays"].values()) >= 100 for result in results)
    assert [result["wrong"] for result in results] == [dict.fromkeys(result["wrong"], 0) for result in results]
