"""Peers of the fp8 benches against stand-ins of their packages: the operands that they get, and how results are put
together.

The stand-ins compute in plain torch what DeepGEMM's, SGLang's and flashinfer's functions are defined to, and refuse
operands that the real ones do not take.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from oxmoe import __main__, quantize
from oxmoe.tools.bench import allreduce_peers, deep_gemm, layers, masked, timing
from oxmoe.tools.bench.deep_gemm import DeepGemm
from oxmoe.tools.bench.flashinfer_cutlass import FlashinferFp8
from oxmoe.tools.bench.peers import SglangTriton

ALIGNMENT = 128
SHAPE = layers.Shape(6, 2, 256, 128)


def dequantised(pair: tuple[Tensor, Tensor], rows: int) -> Tensor:
    """Returns fp32 of codes [..., R, K] with a scale for each rows x 128."""
    codes, scales = pair
    spread = scales.repeat_interleave(128, -1)
    return codes.float() * (spread if rows == 1 else spread.repeat_interleave(rows, -2))


def check_tokens(pair: tuple[Tensor, Tensor]) -> None:
    """Checks that scales lie as the GEMM reads them, so that no kernel moves them: rows side by side, columns 16-byte
    aligned."""
    codes, scales = pair
    assert codes.dtype == torch.float8_e4m3fn and codes.is_contiguous() and scales.dtype == torch.float32
    rows = -(-codes.shape[-2] // 4) * 4
    assert scales.shape == (*codes.shape[:-1], codes.shape[-1] // 128)
    assert scales.stride()[-2:] == (1, rows) and (scales.dim() == 2 or scales.stride(0) == rows * scales.shape[-1])


def contiguous(a: Any, b: Any, d: Tensor, experts: Tensor) -> None:
    check_tokens(a)
    assert experts.dtype == torch.int32 and len(experts) % ALIGNMENT == 0
    for block in range(0, len(experts), ALIGNMENT):
        mine = experts[block : block + ALIGNMENT]
        assert mine[0] >= 0 and set(mine.tolist()) <= {int(mine[0]), -1}
    weights, rows = dequantised(b, 128), dequantised(a, 1)
    for expert in range(len(weights)):
        d[experts == expert] = (rows[experts == expert] @ weights[expert].t()).to(d.dtype)


def by_mask(a: Any, b: Any, d: Tensor, masked_m: Tensor, expected_m: int) -> None:
    check_tokens(a)
    assert masked_m.dtype == torch.int32 and expected_m > 0
    weights, rows = dequantised(b, 128), dequantised(a, 1)
    for expert, count in enumerate(masked_m.tolist()):
        d[expert, :count] = (rows[expert, :count] @ weights[expert].t()).to(d.dtype)


def silu_and_mul(sums: Tensor, codes: Tensor, scales: Tensor, group: int, masked_m: Tensor) -> None:
    assert group == 128 and codes.is_contiguous()
    for expert, count in enumerate(masked_m.tolist()):
        hidden = layers.activated(sums[expert, :count].float(), SHAPE).to(torch.bfloat16)
        codes[expert, :count], scales[expert, :count] = quantize.per_token_group_quant_fp8(hidden, group)


def cutlass_fused_moe(
    *,
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[Tensor],
    output: Tensor,
    use_deepseek_fp8_block_scale: bool,
    tune_max_num_tokens: int,
    swiglu_alpha: Tensor | None = None,
    swiglu_beta: Tensor | None = None,
    swiglu_limit: Tensor | None = None,
) -> list[Tensor]:
    """Computes the layer. Rows of fc1 are [up; gate]; rows are quantised, and both GEMMs and the activation round to
    bf16."""
    assert use_deepseek_fp8_block_scale and input.dtype == output_dtype == output.dtype == torch.bfloat16
    assert token_selected_experts.dtype == torch.int32 and token_final_scales.dtype == torch.float32
    tensors = (input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output)
    assert all(tensor.is_contiguous() for tensor in (*tensors, *quant_scales)) and tune_max_num_tokens >= len(input)
    matrices = []
    for codes, scales in zip((fc1_expert_weights, fc2_expert_weights), quant_scales, strict=True):
        experts, rows, columns = codes.shape
        assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
        assert scales.shape == (experts, rows / 128, columns / 128)
        matrices.append(dequantised((codes, scales), 128))

    def product(rows: Tensor, matrix: Tensor) -> Tensor:
        pair = quantize.per_token_group_quant_fp8(rows.contiguous(), 128)
        return (dequantised(pair, 1) @ matrix.t()).bfloat16()

    total = torch.zeros(input.shape)
    for token, slot in torch.cartesian_prod(*(torch.arange(size) for size in token_selected_experts.shape)).tolist():
        expert = int(token_selected_experts[token, slot])
        up, gate = product(input[token : token + 1], matrices[0][expert]).float().chunk(2, dim=1)
        if swiglu_alpha is not None and swiglu_beta is not None and swiglu_limit is not None:
            assert swiglu_alpha[expert] == 1 and swiglu_beta[expert] == 0
            limit = float(swiglu_limit[expert])
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        hidden = (torch.nn.functional.silu(gate) * up).bfloat16()
        total[token] += token_final_scales[token, slot] * product(hidden, matrices[1][expert])[0]
    output.copy_(total)
    return [output]


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns whether the autotuner was asked to tune, call by call."""
    tuned: list[bool] = []

    def autotune(tune: bool) -> contextlib.AbstractContextManager[None]:
        tuned.append(tune)
        return contextlib.nullcontext()

    for name, module in (
        ("flashinfer", SimpleNamespace()),
        ("flashinfer.autotuner", SimpleNamespace(autotune=autotune)),
        ("flashinfer.fused_moe", SimpleNamespace(core=None, cutlass_fused_moe=cutlass_fused_moe)),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: None)
    monkeypatch.setattr(FlashinferFp8, "missing", classmethod(lambda cls, device: None))
    monkeypatch.setattr(timing, "wall_time_us", lambda call: (call(), 1.0)[1])
    monkeypatch.setitem(layers.SHAPES, "blocks", SHAPE)
    monkeypatch.setitem(layers.SHAPES, "clamped", layers.Shape(6, 2, 128, 256, limit=0.5))
    return tuned


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("deep_gemm")
    package.m_grouped_fp8_gemm_nt_contiguous = contiguous
    package.fp8_m_grouped_gemm_nt_masked = by_mask
    package.get_mk_alignment_for_contiguous_layout = lambda: ALIGNMENT
    kernels: Any = ModuleType("sglang.srt.layers.moe.ep_moe.kernels")
    kernels.silu_and_mul_masked_post_quant_fwd = silu_and_mul
    monkeypatch.setitem(sys.modules, "deep_gemm", package)
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    for peer in (DeepGemm, masked.DeepGemmMasked, masked.SglangDeepGemm):
        monkeypatch.setattr(peer, "missing", classmethod(lambda cls, device: None))
    monkeypatch.setitem(layers.SHAPES, "blocks", SHAPE)
    monkeypatch.setitem(masked.LAYERS, "few", masked.Layer(4, 2, 2, 256, 128))
    monkeypatch.setattr(timing, "wall_time_us", lambda call: (call(), 1.0)[1])
    monkeypatch.setattr(masked, "FILL_ROOM", 30)
    monkeypatch.setattr(masked, "ROOM", 9)
    monkeypatch.setattr(masked, "CHECKED", 50)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("stand_ins")
def test_deep_gemm_beside_the_routed_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ["bench", "--shapes", "blocks", "--tokens", "5,9,40", "--format", "fp8_block,bf16", "--device", "cpu"]
    assert __main__.main([*arguments, "--peers", "deep-gemm", "--pattern", "uniform,one", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "skipped deep-gemm: has no bf16 weights" in said and "computes something else" not in said
    peers = [row for row in rows_of(path) if row["backend"] == "deep-gemm"]
    cells = [(row["pattern"], row["tokens"]) for row in peers]
    assert cells == [(pattern, tokens) for pattern in ("uniform", "one") for tokens in (5, 9, 40)]
    assert all(row["excludes"] == "routing, quantisation, activation, combine" for row in peers)


def test_flashinfer_beside_the_routed_layer(
    flashinfer: list[bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ["bench", "--shapes", "blocks,clamped", "--tokens", "5,9", "--format", "fp8_block,bf16"]
    arguments += ["--device", "cpu", "--peers", "flashinfer-fp8", "--pattern", "uniform,grouped,one"]
    assert __main__.main([*arguments, "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "skipped flashinfer-fp8: has no bf16 weights" in said and "computes something else" not in said
    assert "flashinfer-fp8 at blocks fp8_block one M=5: failed: NotImplementedError: counts an expert once" in said
    peers = [row for row in rows_of(path) if row["backend"] == "flashinfer-fp8"]
    cells = [(row["shape"], row["pattern"], row["tokens"]) for row in peers]
    assert cells == [
        (shape, pattern, tokens)
        for shape in ("blocks", "clamped")
        for pattern in ("uniform", "grouped")
        for tokens in (5, 9)
    ]
    assert all(row["excludes"] == "routing" for row in peers) and flashinfer == [False] * 8


def test_rows_are_placed_from_multiples_on() -> None:
    ids = torch.tensor([[2, 0], [2, 5], [0, 2]])
    place, rows = deep_gemm.place_rows(ids, 6, 4)
    assert rows == 12 and place.tolist() == [4, 0, 5, 8, 1, 6]


@pytest.mark.usefixtures("stand_ins")
def test_masked_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ["bench", "--layout", "masked", "--shapes", "few", "--fill", "10,50,100", "--tokens", "5"]
    arguments += ["--format", "fp8_block,fp8_block-bf16,mxfp4,bf16", "--device", "cpu", "--json", str(path)]
    assert __main__.main(arguments) == 0
    said = capsys.readouterr().out
    assert "WRONG" not in said and "computes something else" not in said and "failed" not in said
    assert "skipped deep-gemm: has no mxfp4 weights" in said
    head = next(line for line in said.splitlines() if line.startswith("| layer"))
    assert "| deep-gemm (no activation, quantisation) | sglang-deep-gemm |" in head
    rows = rows_of(path)
    fp8 = [row for row in rows if row["format"] == "fp8_block"]
    cases = ["10 % of m", "50 % of m", "100 % of m", "5 tokens a rank"]
    assert [row["case"] for row in fp8 if row["backend"] == "oxmoe"] == cases
    assert [(row["m"], row["rows"]) for row in fp8 if row["backend"] == "oxmoe"][:3] == [(30, 12), (30, 60), (30, 120)]
    assert [row["m"] for row in fp8][-1] == 18 and all(row["op"] == "moe_masked" for row in rows)
    assert {row["backend"] for row in fp8} == {"oxmoe", "deep-gemm", "sglang-deep-gemm"}
    assert {row["backend"] for row in rows if row["format"] != "fp8_block"} == {"oxmoe"}


@pytest.mark.usefixtures("stand_ins")
def test_masked_formats_without_a_kernel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def call(*given: Any) -> None:
        raise NotImplementedError("no kernel for it")

    monkeypatch.setattr(masked.Ours, "call", call)
    arguments = ["bench", "--layout", "masked", "--shapes", "few", "--fill", "50", "--format", "bf16"]
    assert __main__.main([*arguments, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "skipped oxmoe at few bf16 50 % of m: failed: NotImplementedError: no kernel for it" in said


@pytest.mark.usefixtures("stand_ins")
def test_masked_peers_are_judged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(self: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(masked.SglangDeepGemm, "__init__", lambda *given: broken(given))
    call = masked.DeepGemmMasked.call
    monkeypatch.setattr(masked.DeepGemmMasked, "call", lambda *given: lambda: torch.zeros_like(call(*given)()))
    arguments = ["bench", "--layout", "masked", "--shapes", "few", "--fill", "50", "--format", "fp8_block"]
    assert __main__.main([*arguments, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "skipped sglang-deep-gemm: does not start: RuntimeError: no compiler" in said
    assert "skipped deep-gemm at few fp8_block 50 % of m: computes something else: relative norm 1" in said


def test_peers_that_are_not_there_say_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(masked.LAYERS, "few", masked.Layer(4, 2, 2, 256, 128))
    arguments = ["bench", "--layout", "masked", "--shapes", "few", "--tokens", "1", "--device", "cpu"]
    assert __main__.main([*arguments, "--format", "bf16"]) == 0
    said = capsys.readouterr().out
    assert "skipped deep-gemm: needs a GPU" in said and "skipped sglang-deep-gemm: needs a GPU" in said
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["bench", "--layout", "masked", "--shapes", "nothing"])
    assert "bench: unknown layer nothing; known: dsv3-ep8" in capsys.readouterr().err


@pytest.mark.parametrize("format_name", ["fp8_block", "fp8_tensor", "fp8_tensor-token", "fp8_tensor-static"])
def test_scales_that_sglang_is_handed(format_name: str) -> None:
    (weights,) = layers.make_weights(
        SHAPE,
        torch.bfloat16,
        "cpu",
        1,
        fp8_block=format_name == "fp8_block",
        fp8_tensor=layers.activations(format_name),
    )
    options = SglangTriton._scales(weights)
    w13, w2 = weights.w13.scales, weights.w2.scales
    shapes = {name: tuple(value.shape) for name, value in options.items() if isinstance(value, Tensor)}
    if format_name == "fp8_block":
        assert options["block_shape"] == [128, 128] and options["w1_scale"] is w13 and options["w2_scale"] is w2
        return
    assert "block_shape" not in options
    assert torch.equal(options["w1_scale"].view(6, -1)[:, 0], w13[:, 0, 0])
    if format_name == "fp8_tensor-token":
        assert options["per_channel_quant"] and shapes == {"w1_scale": (6, 256, 1), "w2_scale": (6, 256, 1)}
    elif format_name == "fp8_tensor":
        assert shapes == {"w1_scale": (6,), "w2_scale": (6,)}
    else:
        assert shapes == {"w1_scale": (6,), "w2_scale": (6,), "a1_scale": (1,), "a2_scale": (1,)}


def test_a_norm_that_does_not_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A package may have a norm that it cannot compile here. The all-reduces without a norm get the next one's."""

    def broken(*_: object) -> None:
        raise RuntimeError("Ninja build failed")

    calls: list[Tensor] = []
    for name, norm in (("sgl_kernel", broken), ("flashinfer", lambda total, *_: calls.append(total))):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(fused_add_rmsnorm=norm))
    allreduce_peers._fused_norm.cache_clear()
    label, norm = allreduce_peers._fused_norm("cpu")
    assert label == "flashinfer norm" and len(calls) == 1
    assert "skipped sgl_kernel's norm: RuntimeError: Ninja build failed" in capsys.readouterr().out
    total = torch.ones(2, 64, dtype=torch.bfloat16)
    norm(total, total, total[0], total, total)
    assert calls[-1] is total
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    allreduce_peers._fused_norm.cache_clear()
    assert allreduce_peers._fused_norm("cpu")[0] == "torch norm"
    allreduce_peers._fused_norm.cache_clear()
