"""Calls on a GPU in a child of fork()."""

from __future__ import annotations

import os

from recording import attempt
from tensors import Tensor

import oxmoe._oxmoe as oxmoe


def _topk() -> str | None:
    return attempt(oxmoe.topk, Tensor((4, 8), "float32"), 2)


def cuda_after_fork(opens):
    """Returns what a call in a child raises. `opens`: the parent opens its GPU before."""
    if opens:
        oxmoe.device_info()
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, str(_topk()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.wait()
    return text


def failed_start():
    """Returns what a call raises in a process that was not forked."""
    return _topk()
