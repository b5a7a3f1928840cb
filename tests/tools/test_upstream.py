"""The command that runs flashinfer's own tests on oxmoe, on a checkout that this test writes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

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
    fuzz = "test_unified_gemm_fuzz.py"
    assert names == ["test_mm_mxfp8.py", "test_fp4_quantize.py", fuzz, "test_monomoe.py", "all"]


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
    folders = ("tests/", "sgl-kernel/tests/", "test/registered/")
    assert len(pairs) > 10 and all(len(pair) == 2 and pair[0].startswith(folders) and pair[1] for pair in pairs)


SGLANG = """
import pytest, torch
from sgl_kernel import kimi_k2_moe_fused_gate, moe_fused_gate, something_else, topk_sigmoid, topk_softmax

def out(k):
    return torch.empty(5, k, device="cuda"), torch.empty(5, k, dtype=torch.int32, device="cuda")

def test_topk():
    logits, bias = torch.randn(5, 16, device="cuda"), torch.randn(16, device="cuda")
    for scores, function in ((logits.softmax(1), topk_softmax), (logits.sigmoid(), topk_sigmoid)):
        for form in ((logits,), (logits, True)):
            weights, ids = out(3)
            function(weights, ids, *form)
            best = scores.topk(3)
            expected = best.values / best.values.sum(1, keepdim=True) if len(form) > 1 else best.values
            assert torch.equal(ids, best.indices.int()) and torch.allclose(weights, expected, atol=1e-6)
    weights, ids = out(3)
    topk_softmax(weights, ids, torch.empty_like(ids), logits)
    assert torch.equal(ids, logits.topk(3).indices.int())
    topk_sigmoid(weights, ids, logits, True, correction_bias=bias)
    assert torch.equal(ids, (logits.sigmoid() + bias).topk(3).indices.int())

def test_gates():
    logits, bias = torch.randn(5, 16, device="cuda"), torch.rand(16, device="cuda")
    weights, ids = kimi_k2_moe_fused_gate(logits, bias, 3, True, 2.5, True)
    assert torch.allclose(weights.sum(1), torch.full((5,), 2.5)) and ids.max() < 16
    weights, ids = moe_fused_gate(logits, bias, 4, 1, 4, 1, 2.0)
    assert bool((ids[:, 3] == 16).all()) and bool((ids[:, :3] // 4 == ids[:, :1] // 4).all())
    assert torch.allclose(weights[:, :3].sum(1), torch.ones(5)) and torch.allclose(weights[:, 3], torch.full((5,), 0.5))

def test_not_served():
    something_else(1)
"""


def test_sglang(tmp_path: Path) -> None:
    """sgl-kernel's names are oxmoe's in a checkout of SGLang."""
    folder = tmp_path / "sgl-kernel" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_moe_topk_softmax.py").write_text(SGLANG)
    code, said = upstream(tmp_path, "topk_softmax", "test_moe_fused_gate", "--on-cpu")
    assert code == 0 and "sgl-kernel/tests/test_moe_topk_softmax.py: 2 passed, 1 not served in " in said, said
    assert "sgl-kernel/tests/test_moe_fused_gate.py: is not in this checkout" in said


LAYERS = """
import pytest, torch
from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_moe
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopKConfig, select_experts

def layer(hidden, dtype=torch.bfloat16):
    x, logits = torch.randn(5, hidden, dtype=dtype, device="cuda"), torch.randn(5, 4, device="cuda")
    w13, w2 = torch.randn(4, 64, hidden, dtype=dtype), torch.randn(4, hidden, 32, dtype=dtype)
    return x, logits, w13 / 8, w2 / 8

def test_layer():
    x, logits, w13, w2 = layer(64)
    before = x.clone()
    chosen = select_experts(hidden_states=x, router_logits=logits, topk_config=TopKConfig(top_k=2, renormalize=True))
    out = fused_moe(x, w13, w2, chosen)
    assert torch.equal(x, before)
    weights, ids = logits.softmax(1).topk(2)
    weights = weights / weights.sum(1, keepdim=True)
    expected = torch.zeros(5, 64)
    for token in range(5):
        for weight, expert in zip(weights[token], ids[token]):
            gate, up = (w13[expert].float() @ x[token].float()).chunk(2)
            expected[token] += weight * (w2[expert].float() @ (torch.nn.functional.silu(gate) * up))
    assert (out.float() - expected).norm() < 0.02 * expected.norm()

@pytest.mark.parametrize("hidden", [63])
def test_refused(hidden):
    x, logits, w13, w2 = layer(hidden)
    fused_moe(x, w13, w2, StandardTopKOutput(torch.ones(5, 1), torch.zeros(5, 1, dtype=torch.int32), logits))

def test_operators():
    kernel, x = torch.ops.sgl_kernel, torch.randn(5, 64, dtype=torch.bfloat16)
    logits, bias = torch.randn(5, 16), torch.randn(16)
    weights, ids = kernel.topk_sigmoid_cpu(x, logits, 3, False, bias)
    best = (logits.sigmoid() + bias).topk(3).indices
    assert torch.equal(ids.long(), best) and torch.allclose(weights, logits.sigmoid().gather(1, best), atol=1e-6)
    weights, ids = kernel.biased_grouped_topk_cpu(x, logits, bias, 3, True, 4, 1, 0, 2.0, None)
    assert bool((ids // 4 == ids[:, :1] // 4).all()) and torch.allclose(weights.sum(1), torch.full((5,), 2.0))
    w13, w2 = torch.randn(4, 64, 64).bfloat16() / 8, torch.randn(4, 64, 32).bfloat16() / 8
    chosen = torch.ones(5, 1), torch.full((5, 1), 2, dtype=torch.int32)
    given = [kernel.convert_weight_packed(w13), w2, *chosen, False, 0]
    out = kernel.fused_experts_cpu(x, *given, *[None] * 9, True, "gelu")
    gate, up = (x.float() @ w13[2].float().t()).chunk(2, 1)
    expected = (torch.nn.functional.gelu(gate) * up) @ w2[2].float().t()
    assert (out.float() - expected).norm() < 0.02 * expected.norm()
    kernel.fused_experts_cpu(x, *given[:5], 1, *[None] * 9, True, "silu")
"""


def test_registered_tests_of_sglang(tmp_path: Path) -> None:
    """Functions and operators of SGLang's registered tests are oxmoe's, and what oxmoe refuses is not served."""
    pytest.importorskip("sglang")
    folder = tmp_path / "test" / "registered" / "moe"
    folder.mkdir(parents=True)
    (folder / "test_fused_moe.py").write_text(LAYERS)
    code, said = upstream(tmp_path, "--on-cpu")
    assert code == 0 and "test/registered/moe/test_fused_moe.py: 1 passed, 2 not served in " in said, said
    lines = (tmp_path / "out" / "test_fused_moe.tsv").read_text()
    assert "not served: hidden size 63 is no multiple of 8" in lines and "not served: int8 weights" in lines
