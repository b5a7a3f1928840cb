"""The command that runs flashinfer's own tests on oxmoe, on a checkout that this test writes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import forked
import processes

UPSTREAM = Path(__file__).parents[1] / "upstream"
CONFTEST = """
import flashinfer
from flashinfer.jit import MissingJITCacheError
assert issubclass(MissingJITCacheError, Exception)
"""
TESTS = """
import pytest, torch
import flashinfer.comm as comm
from flashinfer import mxfp8_quantize, mxfp8_dequantize_host
from flashinfer.quantization.nvfp4_quantization_utils import NVFP44Over6Config, nvfp4_e4m3_max
from flashinfer.utils import get_compute_capability, something_else

@pytest.mark.parametrize("k", [32, 64])
def test_served(k):
    assert get_compute_capability(torch.device("cuda"))[0] == 10
    x = torch.randn(4, k, device="cuda").to("cuda:0").cuda()
    codes, scales = mxfp8_quantize(x)
    assert (mxfp8_dequantize_host(codes, scales) - x).abs().max() < 0.3
    assert torch.topk(torch.ones(2, 40), 3).indices.tolist() == [[0, 1, 2], [0, 1, 2]]
    values, indices = torch.tensor([1.0, 2.0, 1.0, 2.0] * 9).topk(2, largest=False)
    assert values.tolist() == [1.0, 1.0] and indices.tolist() == [0, 2]

def test_helpers():
    assert comm.compute_fp4_swizzled_layout_sf_size(129, 5) == 256 * 8
    comm.trtllm_destroy_ipc_workspace_for_all_reduce([])
    assert nvfp4_e4m3_max() == 448 and nvfp4_e4m3_max(NVFP44Over6Config(e4m3_max=256)) == 256

def test_not_served():
    something_else(1)

def test_not_served_either():
    comm.vllm_all_reduce(1)

def test_own_skip():
    pytest.skip("a reason")

def test_mxfp8_grouped_quantize_of_skips_txt():
    raise AssertionError
"""
# The package that a checkout has beside its tests. It must not come before the stand-in.
OWN_PACKAGE = "raise AssertionError('flashinfer itself was imported')"
WRONG = "\n\ndef test_wrong():\n    assert mxfp8_quantize(torch.ones(1, 32, device='cuda'))[0].shape == (2, 32)\n"


def upstream(checkout: Path, *arguments: str) -> tuple[int, str]:
    done = forked.run(UPSTREAM / "run.py", checkout, "--out", checkout / "out", *arguments)
    return done.returncode, done.stdout + done.stderr


def write(checkout: Path, tests: str) -> None:
    (checkout / "tests" / "utils").mkdir(parents=True, exist_ok=True)
    (checkout / "flashinfer").mkdir(exist_ok=True)
    (checkout / "flashinfer" / "__init__.py").write_text(OWN_PACKAGE)
    (checkout / "tests" / "conftest.py").write_text(CONFTEST)
    (checkout / "tests" / "utils" / "test_fp8_quantize.py").write_text(tests)


def test_counts(tmp_path: Path) -> None:
    write(tmp_path, TESTS)
    code, said = upstream(tmp_path, "test_fp8_quantize", "--on-cpu")
    line = "tests/utils/test_fp8_quantize.py: 3 passed, 2 not served, 1 its own skips, 1 expected in "
    assert code == 0 and line in said, said
    assert "all: 3 passed, " in said and "test_mm_mxfp8" not in said
    log = (tmp_path / "out" / "test_fp8_quantize.log").read_text()
    assert "not served: something_else" in log and "not served: vllm_all_reduce" in log
    assert "expected: not served: oxmoe quantises rows in expert order" in log
    lines = (tmp_path / "out" / "test_fp8_quantize.tsv").read_text().splitlines()
    of_tests = {line.split("\t")[1].rpartition("::")[2]: line.split("\t")[::2] for line in lines}
    assert of_tests["test_served[32]"] == ["passed", ""] and of_tests["test_own_skip"] == ["its own skips", "a reason"]
    assert of_tests["test_not_served"] == ["not served", "not served: something_else"] and len(lines) == 7


SLOW = """
import os, pathlib, subprocess

def test_slow():
    pathlib.Path(__file__).with_name("started").write_text(str(os.getsid(0)))
    subprocess.run(["sleep", "600"])
"""


def test_a_run_that_is_ended_leaves_no_process(tmp_path: Path) -> None:
    write(tmp_path, SLOW)
    started = tmp_path / "tests" / "utils" / "started"
    with (tmp_path / "said").open("w") as output:
        process = forked.start(
            UPSTREAM / "run.py",
            *(tmp_path, "test_fp8_quantize", "--on-cpu", "--out", tmp_path / "out"),
            env=dict(os.environ),
            output=output,
            cwd=tmp_path,
            packages=forked.TORCH,
            before={},
        )
    until = time.monotonic() + 120
    while not (started.exists() and (text := started.read_text())):
        assert process.poll() is None and time.monotonic() < until, (tmp_path / "said").read_text()
        time.sleep(0.1)
    session = int(text)
    assert session != os.getsid(process.pid) and processes.session_runs(session)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert processes.session_ended(session)


def test_limit(tmp_path: Path) -> None:
    """A file that takes too long is ended, with the processes that its tests started."""
    write(tmp_path, SLOW)
    start = time.monotonic()
    code, said = upstream(tmp_path, "test_fp8_quantize", "--on-cpu", "--limit", "6")
    assert code == 1 and "ended after 6 s" in said and "test_fp8_quantize.py: 1 error in " in said, said
    assert time.monotonic() - start < 200
    started = tmp_path / "tests" / "utils" / "started"
    assert not started.exists() or processes.session_ended(int(started.read_text()))


def test_order(tmp_path: Path) -> None:
    write(tmp_path, TESTS)
    _, said = upstream(tmp_path, "--on-cpu", "test_mm_mxfp8", "test_fp4_quantize.py", "tests/gemm", "test_monomoe")
    names = [line.partition(":")[0].rpartition("/")[2] for line in said.splitlines()]
    assert names == ["test_mm_mxfp8.py", "test_fp4_quantize.py", "test_monomoe.py", "all"]


def test_a_failure_is_one(tmp_path: Path) -> None:
    write(tmp_path, TESTS + WRONG)
    code, said = upstream(tmp_path, "--on-cpu", "test_fp8_quantize")
    assert code == 1 and "3 passed, 1 failed, " in said, said
    write(tmp_path, "import a_module_that_is_not_there\n")
    code, said = upstream(tmp_path, "--on-cpu", "test_fp8_quantize", "test_mm_mxfp8")
    assert code == 1 and "1 error" in said and "test_mm_mxfp8.py: is not in this checkout" in said, said


def test_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    code, said = upstream(tmp_path)
    assert code == 2 and "expected a checkout of flashinfer with its tests/" in said


def test_expected_skips_have_reasons() -> None:
    lines = [line for line in (UPSTREAM / "skips.txt").read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.split(" | ") for line in lines]
    assert len(pairs) > 10 and all(len(pair) == 2 and pair[0].startswith("tests/") and pair[1] for pair in pairs)
