"""Peers of the fp8 benches against stand-ins of their packages: what they are handed and how results are put together.

The stand-ins compute in plain torch what DeepGEMM's and SGLang's functions are defined to, and refuse operands that the
real ones do not take.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from oxmoe import __main__, quantize
from oxmoe.bench import deep_gemm, layers, masked, timing
from oxmoe.bench.deep_gemm import DeepGemm
from oxmoe.bench.peers import SglangTriton

ALIGNMENT = 128
SHAPE = layers.Shape(6, 2, 256, 128)


def dequantised(pair: tuple[Tensor, Tensor], rows: int) -> Tensor:
    """fp32 of codes [..., R, K] with a scale for each rows x 128."""
    codes, scales = pair
    spread = scales.repeat_interleave(128, -1)
    return codes.float() * (spread if rows == 1 else spread.repeat_interleave(rows, -2))


def check_tokens(pair: tuple[Tensor, Tensor]) -> None:
    """Scales as the GEMM reads them, so that no kernel moves them: rows next to each other, columns 16-byte aligned."""
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
    arguments = ["bench", "--shapes", "blocks", "--tokens", "5,9,40", "--format", "fp8-block,bf16", "--device", "cpu"]
    assert __main__.main([*arguments, "--peers", "deep-gemm", "--pattern", "uniform,one", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "skipped deep-gemm: has no bf16 weights" in said and "computes something else" not in said
    peers = [row for row in rows_of(path) if row["backend"] == "deep-gemm"]
    cells = [(row["pattern"], row["tokens"]) for row in peers]
    assert cells == [(pattern, tokens) for pattern in ("uniform", "one") for tokens in (5, 9, 40)]
    assert all(row["excludes"] == "routing, quantisation, activation, combine" for row in peers)


def test_rows_are_placed_from_multiples_on() -> None:
    ids = torch.tensor([[2, 0], [2, 5], [0, 2]])
    place, rows = deep_gemm.place_rows(ids, 6, 4)
    assert rows == 12 and place.tolist() == [4, 0, 5, 8, 1, 6]


@pytest.mark.usefixtures("stand_ins")
def test_masked_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ["bench", "--layout", "masked", "--shapes", "few", "--fill", "10,50,100", "--tokens", "5"]
    arguments += ["--format", "fp8-block,fp8-block-bf16,mxfp4,bf16", "--device", "cpu", "--json", str(path)]
    assert __main__.main(arguments) == 0
    said = capsys.readouterr().out
    assert "WRONG" not in said and "computes something else" not in said and "failed" not in said
    assert "skipped deep-gemm: has no mxfp4 weights" in said
    head = next(line for line in said.splitlines() if line.startswith("| layer"))
    assert "| deep-gemm (no activation, quantisation) | sglang-deep-gemm |" in head
    rows = rows_of(path)
    fp8 = [row for row in rows if row["format"] == "fp8-block"]
    cases = ["10 % of m", "50 % of m", "100 % of m", "5 tokens a rank"]
    assert [row["case"] for row in fp8 if row["backend"] == "oxmoe"] == cases
    assert [(row["m"], row["rows"]) for row in fp8 if row["backend"] == "oxmoe"][:3] == [(30, 12), (30, 60), (30, 120)]
    assert [row["m"] for row in fp8][-1] == 18 and all(row["op"] == "moe_masked" for row in rows)
    assert {row["backend"] for row in fp8} == {"oxmoe", "deep-gemm", "sglang-deep-gemm"}
    assert {row["backend"] for row in rows if row["format"] != "fp8-block"} == {"oxmoe"}


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
    arguments = ["bench", "--layout", "masked", "--shapes", "few", "--fill", "50", "--format", "fp8-block"]
    assert __main__.main([*arguments, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "skipped sglang-deep-gemm: does not start: RuntimeError: no compiler" in said
    assert "skipped deep-gemm at few fp8-block 50 % of m: computes something else: relative norm 1" in said


def test_peers_that_are_not_there_say_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(masked.LAYERS, "few", masked.Layer(4, 2, 2, 256, 128))
    arguments = ["bench", "--layout", "masked", "--shapes", "few", "--tokens", "1", "--device", "cpu"]
    assert __main__.main([*arguments, "--format", "bf16"]) == 0
    said = capsys.readouterr().out
    assert "skipped deep-gemm: needs a GPU" in said and "skipped sglang-deep-gemm: needs a GPU" in said
    with pytest.raises(SystemExit, match="bench: unknown layer nothing; known: dsv3-ep8"):
        __main__.main(["bench", "--layout", "masked", "--shapes", "nothing"])


@pytest.mark.parametrize("format_name", ["fp8-block", "fp8-tensor", "fp8-tensor-token", "fp8-tensor-static"])
def test_scales_that_sglang_is_handed(format_name: str) -> None:
    (weights,) = layers.make_weights(
        SHAPE,
        torch.bfloat16,
        "cpu",
        1,
        fp8_block=format_name == "fp8-block",
        fp8_tensor=layers.activations(format_name),
    )
    options = SglangTriton._scales(weights)
    w13, w2 = weights.w13.scales, weights.w2.scales
    shapes = {name: tuple(value.shape) for name, value in options.items() if isinstance(value, Tensor)}
    if format_name == "fp8-block":
        assert options["block_shape"] == [128, 128] and options["w1_scale"] is w13 and options["w2_scale"] is w2
        return
    assert "block_shape" not in options
    assert torch.equal(options["w1_scale"].view(6, -1)[:, 0], w13[:, 0, 0])
    if format_name == "fp8-tensor-token":
        assert options["per_channel_quant"] and shapes == {"w1_scale": (6, 256, 1), "w2_scale": (6, 256, 1)}
    elif format_name == "fp8-tensor":
        assert shapes == {"w1_scale": (6,), "w2_scale": (6,)}
    else:
        assert shapes == {"w1_scale": (6,), "w2_scale": (6,), "a1_scale": (1,), "a2_scale": (1,)}
