"""Without torch: the package imports, and numpy arrays go through the same functions."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import torch

PRELUDE = """
import sys
sys.modules["torch"] = None  # any import of torch raises
import numpy as np
import oxmoe
"""


def run(program: str, seed: int = 0) -> None:
    source = f"{PRELUDE}seed = {seed}\n{textwrap.dedent(program)}"
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_import_and_names() -> None:
    run(
        """
        assert all(getattr(oxmoe, name) is not None for name in oxmoe.__all__)
        assert isinstance(oxmoe.explain(128, 8, 2048, 768, 16, arch="sm_90"), str)
        assert isinstance(oxmoe.device_info(), dict)
        assert not any(name.startswith("torch.") for name in sys.modules)
        """
    )


def test_modules_are_loaded_when_they_are_used() -> None:
    program = """
    import sys
    import oxmoe
    assert not {"sglang", "oxmoe.sglang", "oxmoe.nvfp4", "oxmoe.reference"} & set(sys.modules)
    assert oxmoe.sglang.SETTING == "OXMOE_SGLANG" and callable(oxmoe.nvfp4.flashinfer_cutedsl_moe_masked)
    assert oxmoe.reference.moe and oxmoe.testing.BARS and "sglang" not in sys.modules
    try:
        oxmoe.nothing
    except AttributeError as error:
        assert str(error) == "module 'oxmoe' has no attribute 'nothing'"
    else:
        raise AssertionError
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)


def test_a_module_that_needs_torch_says_so() -> None:
    run(
        """
        for name in ("nvfp4", "reference"):
            try:
                getattr(oxmoe, name)
            except ImportError as error:
                assert "torch" in str(error)
            else:
                raise AssertionError(name)
        """
    )


def test_moe(rng: torch.Generator) -> None:
    run(
        """
        def silu(a):
            return a / (1 + np.exp(-a))

        rng = np.random.default_rng(seed)
        make_f32, make_f16 = oxmoe.ExpertWeights.f32, oxmoe.ExpertWeights.f16
        for dtype, make, tolerance in ((np.float32, make_f32, 1e-5), (np.float16, make_f16, 1e-2)):
            w13 = (rng.standard_normal((4, 32, 24)) / 5).astype(dtype)
            w2 = (rng.standard_normal((4, 24, 16)) / 4).astype(dtype)
            x = rng.standard_normal((7, 24)).astype(dtype)
            ids = rng.integers(-1, 4, (7, 2)).astype(np.int32)
            gates = rng.random((7, 2)).astype(np.float32)
            weights = make(w13, w2)
            result = oxmoe.moe(x, weights, gates, ids)
            assert isinstance(result, np.ndarray) and result.dtype == dtype and result.shape == x.shape
            for t in range(7):
                expected = np.zeros(24)
                for gate, e in zip(gates[t], ids[t]):
                    if e >= 0:
                        sums = w13[e].astype(np.float64) @ x[t].astype(np.float64)
                        expected += gate * (w2[e].astype(np.float64) @ (silu(sums[:16]) * sums[16:]))
                assert np.allclose(result[t], expected, rtol=tolerance, atol=tolerance), (dtype, t)
            out = np.full_like(x, np.nan)
            assert oxmoe.moe(x, weights, gates, ids, out=out) is out and np.array_equal(out, result)
            assert oxmoe.moe(x[:0], weights, gates[:0], ids[:0]).shape == (0, 24)
        """,
        torch.randint(1 << 31, (), generator=rng).item(),
    )


def test_topk_and_sort() -> None:
    run(
        """
        logits = np.array([[0.0, 3.0, 1.0, 2.0], [5.0, 5.0, 0.0, 9.0]], np.float32)
        weights, ids = oxmoe.topk(logits, 2)
        assert ids.tolist() == [[1, 3], [3, 0]] and ids.dtype == np.int32 and weights.dtype == np.float32
        assert np.allclose(weights.sum(1), 1)
        histogram, offsets, place, slot = oxmoe.sort_by_expert(ids, 4)
        assert histogram.tolist() == [1, 1, 0, 2] and offsets.tolist() == [0, 1, 2, 2, 4]
        assert place.tolist() == [1, 2, 3, 0] and slot.tolist() == [3, 0, 1, 2]
        """
    )


def test_quantize(rng: torch.Generator) -> None:
    run(
        """
        x = np.random.default_rng(seed).standard_normal((2, 64, 128)).astype(np.float32)
        codes, scales = oxmoe.quantize.mxfp4(x)
        assert codes.shape == (2, 64, 64) and scales.shape == (2, 64, 4)
        back = oxmoe.quantize.dequantize(codes, scales, np.float32)
        assert (np.abs(back - x) <= np.exp2(scales.astype(np.float32) - 127).repeat(32, -1)).all()
        swizzled = oxmoe.quantize.swizzle_hopper_mxfp4(codes, scales)
        plain = oxmoe.quantize.unswizzle_hopper_mxfp4(*swizzled, rows=64, columns=128)
        interleaved = oxmoe.quantize.deinterleave_sm90_mxfp4(*oxmoe.quantize.interleave_sm90_mxfp4(codes, scales))
        for result in (plain, interleaved):
            assert np.array_equal(result[0], codes) and np.array_equal(result[1], scales)
        """,
        torch.randint(1 << 31, (), generator=rng).item(),
    )
