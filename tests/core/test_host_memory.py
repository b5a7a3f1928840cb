"""Calls that the host has no memory for end in a MemoryError, not with the process."""

import subprocess
import sys

import pytest

# The limit leaves `room` bytes more than the process has mapped after a small call, which starts the worker threads.
SCRIPT = """
import resource
import numpy as np
import oxmoe

def limit(room):
    mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + room, resource.RLIM_INFINITY))

def must_raise(call, text):
    try:
        call()
    except MemoryError as error:
        assert text in str(error), error
    else:
        raise SystemExit("no MemoryError")

{body}
print("done")
"""

MM_MXFP8 = """
# The product of each row of a and column of b is k / 4096.
def operands(m, n, k):
    a, b = np.full((m, k), 0x38, np.uint8), np.full((n, k), 0x38, np.uint8)
    return a, b.T, np.full((m, k // 32), 115, np.uint8), np.full((k // 32, n), 127, np.uint8)

def call(*operands, out):
    return oxmoe.mm_mxfp8(*operands, out=out, out_dtype="float16")

small = np.zeros((2, 8), np.float16)
call(*operands(2, 8, 64), out=small)
assert (small == 64 / 4096).all()
many, out = operands({m}, {n}, {k}), np.full(({m}, {n}), -7, np.float16)
limit(64 << 20)
must_raise(lambda: call(*many, out=out), "{text}")
assert (out == -7).all()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
call(*many, out=out)
assert (out == {k} / 4096).all()
"""

ALLREDUCE = """
from types import SimpleNamespace
from oxmoe import _oxmoe

ABSENT = (
    "quant_out scale_out residual_out norm_out residual_in rms_gamma scale_factor layout_code"
    " moe_reduction_device_num_experts moe_reduction_scale_input moe_reduction_active_experts_token_input"
    " moe_reduction_token_input expanded_idx_to_permuted_idx expert_scale_factor shared_expert_output"
    " block_quant_group_size"
).split()

def finish(tokens):
    rows = np.ones((tokens, 1024), np.float32)
    out = np.full_like(rows, -7)
    given = dict(input=rows, pattern=0, output=out, rms_eps=1e-6, weight_bias=0.0, **dict.fromkeys(ABSENT))
    messages = [rows.tobytes()] * 2
    return out, lambda: _oxmoe.allreduce_finish(SimpleNamespace(**given), messages)

out, call = finish(2)
call()
assert (out == 2).all()
out, call = finish(1 << 14)
limit(96 << 20)
must_raise(call, "an aligned copy of a message needs 67108864 bytes")
assert (out == -7).all()
"""


def run(body: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(body=body)], capture_output=True, text=True)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "m, n, k, text",
    [
        pytest.param(16384, 2, 4096, "mm_mxfp8: a expanded to fp32 needs 268435456 bytes", id="a"),
        pytest.param(1, 8, 1 << 22, "mm_mxfp8: rows of b expanded to fp32 needs", id="b"),
    ],
)
def test_mm_mxfp8_without_memory(m, n, k, text):
    run(MM_MXFP8.format(m=m, n=n, k=k, text=text))


def test_allreduce_without_memory():
    run(ALLREDUCE)
