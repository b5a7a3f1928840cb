"""The floors of a layer: the bytes and products of any algorithm, those of oxmoe's, and the ceilings they are made
of."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oxmoe import __main__, testing
from oxmoe.tools.bench import floors, layers, masked, report, timing

# A GPU on which a byte takes a microsecond, and bf16 multiplies eight times as slowly as e4m3.
SLOW = floors.Ceilings(memory=1e6, matrix=2e6, e4m3_matrix=16e6, measured=True)
FAST = floors.Ceilings(memory=1e6, matrix=2e15, e4m3_matrix=2e15, measured=True)


def test_the_published_floor_is_still_the_ideal_one() -> None:
    """The floor of dsv3-tp8, 4096 tokens, fp8 blocks on an H200 is that of `oxmoe.testing.roofline`."""
    known = floors.TABLE["H200"]
    call = floors.Call(4096, 4096 * 8, 7168, 256, 256)
    floor = testing.roofline(
        tokens=4096,
        top_k=8,
        hidden_size=7168,
        intermediate_size=256,
        active_experts=256,
        weight_bits=8.0,
        matrix_flops=testing.FP8_MATRIX_FLOPS_PER_SECOND,
    )
    assert floors.floors(call, "fp8_block", 8.0, known).ideal == pytest.approx(floor.us)


def test_own_floor_of_bytes() -> None:
    """With 3 tokens x 2 experts, H 5, I 7, and two experts with rows, each number that is moved is counted by hand."""
    call = floors.Call(3, 6, 5, 7, 2)
    x, row, between, weights = 3 * 5, 6 * 5, 6 * 7, 2 * 5 * 7
    plain = floors.floors(call, "bf16", 16.0, FAST)
    assert plain.ideal == pytest.approx(3 * weights * 2 + 2 * x * 2)
    gemm1, gemm2 = 2 * weights * 2 + x * 2 + between * 2, weights * 2 + between * 2 + row * 2
    assert plain.own == pytest.approx(gemm1 + gemm2 + row * 2 + x * 2)
    # Rows are e4m3: x and the rows between the GEMMs are read and written again, in half as many bytes.
    rounded = floors.floors(call, "fp8_tensor-token", 8.0, FAST)
    gemm1, gemm2 = 2 * weights + x + between * 2, weights + between + row * 2
    assert rounded.own == pytest.approx(x * 3 + gemm1 + between * 3 + gemm2 + row * 2 + x * 2)
    assert rounded.ideal == pytest.approx(3 * weights + 2 * x * 2)
    # GEMM1's epilogue quantises, so nothing is read again.
    blocks = floors.floors(call, "fp8_block", 8.0, FAST)
    gemm1, gemm2 = 2 * weights + (x + between) * 8.25 / 8, weights + between * 8.25 / 8 + row * 2
    assert blocks.own == pytest.approx(x * (2 + 8.25 / 8) + gemm1 + gemm2 + row * 2 + x * 2)


def test_own_floor_of_packed_weights() -> None:
    """The packed form of int4 with zero points has more bits than the checkpoint's; the ideal floor has the
    checkpoint's bits."""
    call = floors.Call(1, 1, 64, 64, 1)
    narrow, wide = (floors.floors(call, name, 4.1875, FAST) for name in ("int4", "int4-zeros"))
    assert narrow.ideal == wide.ideal and wide.own - narrow.own == pytest.approx(3 * 64 * 64 * (4.75 - 4.1875) / 8)


def test_a_step_is_as_long_as_its_bytes_or_its_flops() -> None:
    """Products of bf16 take longer than the bytes here, and those of e4m3 do not."""
    call = floors.Call(100, 200, 4, 4, 2, combined=False)
    bf16 = floors.floors(call, "bf16", 16.0, SLOW)
    assert bf16.ideal == pytest.approx(200 * 3 * 4 * 4)
    gemm2 = max(200 * 16, 2 * 16 * 2 + 200 * 4 * 2 + 200 * 4 * 2)
    assert bf16.own == pytest.approx(200 * 2 * 16 + gemm2)
    e4m3 = floors.floors(call, "fp8_block", 8.0, SLOW)
    assert e4m3.ideal == pytest.approx(2 * 3 * 16 + 100 * 4 * 4)


def test_rows_in_order_are_neither_combined_nor_rounded_where_they_came_so() -> None:
    call = floors.Call(6, 6, 5, 7, 2, combined=False, bf16_x=False)
    weights, x, between = 2 * 5 * 7, 6 * 5, 6 * 7
    made = floors.floors(call, "fp8_block", 8.0, FAST)
    assert made.own == pytest.approx(3 * weights + (x + 2 * between) * 8.25 / 8 + x * 2)
    assert made.ideal == pytest.approx(3 * weights + x * 8.25 / 8 + x * 2)


def test_every_format_of_the_bench_names_its_algorithm() -> None:
    assert set(floors.ALGORITHMS) <= set(layers.FORMATS)
    assert all(floors.ALGORITHMS[name].rounded for name in layers.FORMATS if name.startswith("fp8"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Makes a stand-in GPU whose calls take the milliseconds of `ms`, by the name of the torch function."""
    made = SimpleNamespace(name="NVIDIA H100 80GB HBM3", capability=(9, 0), now=0.0, ms={}, called=[])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = made.now

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def call(name: str) -> Any:
        def run(*operands: Any, **options: Any) -> None:
            made.called.append(name)
            made.now += made.ms[name]

        return run

    tensors = SimpleNamespace(copy_=call("copy"), bfloat16=lambda: tensors, to=lambda dtype: tensors, t=lambda: tensors)
    for name, stand_in in {
        "Event": Event,
        "synchronize": lambda: None,
        "get_device_name": lambda *device: made.name,
        "get_device_capability": lambda *device: made.capability,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name in ("empty", "empty_like", "randn", "ones"):
        monkeypatch.setattr(torch, name, lambda *size, **options: tensors)
    monkeypatch.setattr(torch, "mm", call("mm"))
    monkeypatch.setattr(torch, "_scaled_mm", call("scaled"))
    monkeypatch.setattr(floors, "SUSTAINED_S", 0.0)
    floors.ceilings.cache_clear()
    yield made
    floors.ceilings.cache_clear()


def test_ceilings_of_a_gpu_that_is_not_in_the_table(gpu: SimpleNamespace) -> None:
    gpu.ms = {"copy": 0.8, "mm": 2.0, "scaled": 1.0}
    known = floors.ceilings("cuda")
    assert known is not None and known.measured
    assert known.memory == pytest.approx(2 * floors.COPY_BYTES / 0.8e-3)
    assert known.matrix == pytest.approx(2 * floors.PRODUCT**3 / 2.0e-3)
    assert known.e4m3_matrix == pytest.approx(2 * floors.PRODUCT**3 / 1.0e-3)
    times = len(gpu.called)
    assert floors.ceilings("cuda") is known and len(gpu.called) == times, "measured once in a run"


def test_ceilings_without_instructions_of_e4m3(gpu: SimpleNamespace) -> None:
    gpu.ms, gpu.capability = {"copy": 1.0, "mm": 2.0}, (8, 0)
    known = floors.ceilings("cuda")
    assert known is not None and known.matrix == known.e4m3_matrix


def test_a_gpu_of_the_table_is_not_measured(gpu: SimpleNamespace) -> None:
    gpu.name = "NVIDIA H200"
    assert floors.ceilings("cuda") == floors.TABLE["H200"] and not gpu.called
    assert floors.ceilings("cpu") is None


def test_both_floors_in_table_and_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run has a stand-in for the ceilings: each of 9 tokens chooses 2 of 4 experts."""
    monkeypatch.setitem(layers.SHAPES, "small", layers.Shape(4, 2, 128, 128))
    monkeypatch.setitem(masked.LAYERS, "few", masked.Layer(4, 2, 2, 128, 128))
    monkeypatch.setattr(floors, "ceilings", lambda device: SLOW)
    monkeypatch.setattr(timing, "wall_time_us", lambda call: (call(), timing.Times([2e5]))[1])
    path = tmp_path / "rows.jsonl"
    arguments = ["bench", "--device", "cpu", "--json", str(path), "--peers", "none"]
    assert __main__.main([*arguments, "--shapes", "small", "--tokens", "9"]) == 0
    said = capsys.readouterr().out
    assert "floors are made of: copies 0.00 TB/s" in said and "measured in this run" in said
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    flops = 3 * 18 * 128 * 128
    assert row["floor_us"] == pytest.approx(max(flops, 3 * 4 * 128 * 128 * 2 + 9 * 128 * 4))
    assert row["own_floor_us"] > row["floor_us"] and row["ceilings"] == vars(SLOW)
    shown = said.splitlines()[-1].split()
    assert shown[-5:] == [
        *("200000.0", f"{row['floor_us']:.1f}", f"{2e5 / row['floor_us']:.2f}"),
        *(f"{row['own_floor_us']:.1f}", f"{2e5 / row['own_floor_us']:.2f}"),
    ]
    table = report.markdown([row]).splitlines()
    assert table[0] == "| layer | M | oxmoe | floor | x floor | own floor | x own | best peer / oxmoe |"
    assert table[2].split(" | ")[5] == f"{row['own_floor_us']:.1f}"
    path.unlink()
    assert __main__.main([*arguments, "--layout", "masked", "--shapes", "few", "--tokens", "3"]) == 0
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert row["own_floor_us"] > row["floor_us"] > 0 and row["ceilings"] == vars(SLOW)
    line = next(text for text in capsys.readouterr().out.splitlines() if text.startswith("| few")).split(" | ")
    assert line[6:10] == [
        text for us in (row["floor_us"], row["own_floor_us"]) for text in (f"{us:.1f}", f"{2e5 / us:.2f}")
    ]


def test_no_ceilings_no_floors(capsys: pytest.CaptureFixture[str]) -> None:
    floors.say(None)
    assert capsys.readouterr().out == ""
