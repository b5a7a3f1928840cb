"""`bench --against`: cells of result files are measured again, and those that lost are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oxmoe import __main__
from oxmoe.tools.bench import against, layers, machine, report, timing
from oxmoe.tools.command import UsageError

HERE = {"gpu": None, "cpu": "stand-in", "portable": False}
RESULTS = Path(__file__).parents[2] / "benches" / "results"


def row(us: float, tokens: int = 4, **more: Any) -> dict[str, Any]:
    sizes = {"experts": 4, "top_k": 2, "hidden": 128, "intermediate": 128}
    common = {"op": "moe", "shape": "small", "format": "bf16", "pattern": "uniform", "floor_us": None, "layers": 1}
    common |= {"backend": "oxmoe", "date": "2026-11-20T00:00:00+00:00", "commit": "abc", "sustain_s": 0.0}
    return {**common, **sizes, **HERE, "tokens": tokens, "us": us, "us_min": us - 1, "us_max": us + 1, **more}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[float]]:
    """Returns microseconds of the cells by their number of tokens: one number a measurement, the last one from then
    on."""
    times: dict[int, list[float]] = {}

    def wall(call: Any) -> timing.Times:
        given = times[len(call())]
        return timing.Times([given.pop(0) if len(given) > 1 else given[0]])

    monkeypatch.setitem(layers.SHAPES, "small", layers.Shape(4, 2, 128, 128))
    monkeypatch.setattr(timing, "wall_time_us", wall)
    environment = machine.environment
    monkeypatch.setattr(machine, "environment", lambda device: {**environment(device), **HERE})
    return times


def bench(path: Path, rows: list[dict[str, Any]], *more: str) -> int:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return __main__.main(["bench", "--device", "cpu", "--against", str(path), *more])


def test_cells_that_lost_are_named(
    clock: dict[int, list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock |= {4: [111.0, 109.0], 5: [104.9], 6: [120.0, 104.0], 7: [50.0]}
    rows = [row(100.0, tokens) for tokens in (4, 5, 6, 7)]
    rows += [row(90.0, 4, backend="torch-loop"), row(70.0, 4, cpu="another"), row(70.0, 4, portable=True)]
    assert bench(tmp_path / "old.jsonl", rows) == 1
    said = capsys.readouterr().out
    assert "measured once more: small bf16 M=4, small bf16 M=6" in said
    lost = [line for line in said.splitlines() if line.startswith("LOST")]
    assert lost == [
        "LOST 9.0 %: small bf16 M=4: 109.0 us (109.0 to 109.0), recorded 100.0 us (99.0 to 101.0) "
        "(commit abc, 2026-11-20)"
    ]
    assert said.endswith("1 of 4 cells of stand-in lost more than 5%\n")


def test_nothing_lost(clock: dict[int, list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock |= {4: [104.0]}
    path = tmp_path / "new.jsonl"
    assert bench(tmp_path / "old.jsonl", [row(100.0)], "--json", str(path)) == 0
    said = capsys.readouterr().out
    assert "LOST" not in said and "once more" not in said
    (made,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert made["us"] == 104.0 and made["shape"] == "small"
    # The file that was written has cells, too.
    clock |= {4: [200.0]}
    assert __main__.main(["bench", "--device", "cpu", "--against", str(path)]) == 1


def test_the_fastest_row_of_a_cell_counts(
    clock: dict[int, list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three losses of 4 % each are seen, although none is more than 5 % of the row before."""
    clock |= {4: [112.5]}
    rows = [row(100.0), row(104.0, date="2026-11-21"), row(108.2, date="2026-11-22")]
    assert bench(tmp_path / "old.jsonl", rows) == 1
    assert "LOST 12.5 %" in capsys.readouterr().out


def test_other_protocols_are_other_cells() -> None:
    rows = [row(100.0), row(90.0, layers=8), row(80.0, sustain_s=1.0), row(70.0, pattern="hot")]
    layers.SHAPES["small"] = layers.Shape(4, 2, 128, 128)
    try:
        cells = against.recorded(rows, HERE, against.Wanted(None, None, None))
    finally:
        del layers.SHAPES["small"]
    assert sorted(each["us"] for each in cells.values()) == [70.0, 80.0, 90.0, 100.0]
    groups = against.grouped(list(cells))
    assert len(groups) == 4 and all(tokens == [4] for tokens in groups.values())


def test_only_what_is_asked_for(
    clock: dict[int, list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock |= {4: [1.0], 5: [900.0]}
    rows = [row(100.0), row(100.0, 5), row(100.0, 4, format="f16")]
    assert bench(tmp_path / "old.jsonl", rows, "--tokens", "4", "--format", "bf16") == 0
    assert capsys.readouterr().out.endswith("0 of 1 cells of stand-in lost more than 5%\n")


def test_cells_of_another_time(
    clock: dict[int, list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock |= {4: [1.0]}
    rows = [row(100.0), row(100.0, shape="gone"), row(100.0, format="gone"), row(100.0, 5, hidden=64, experts=8)]
    assert bench(tmp_path / "old.jsonl", rows) == 0
    said = capsys.readouterr().out
    assert "skipped cells: there is no layer gone\n" in said and "skipped cells: there is no format gone\n" in said
    assert "skipped cells: small has another experts, hidden today\n" in said


def test_no_cell_of_this_card(
    clock: dict[int, list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(100.0, gpu="NVIDIA H200"), row(100.0, cpu="another")]
    with pytest.raises(SystemExit, match="2"):
        bench(tmp_path / "old.jsonl", rows)
    said = capsys.readouterr().err
    assert "--against: no cell of stand-in is among the rows asked for" in said
    assert "the files have rows of NVIDIA H200, another" in said


def test_a_wrong_result_fails_the_run(
    clock: dict[int, list[float]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock |= {4: [1.0], 5: [1.0]}
    monkeypatch.setattr(layers, "error", lambda result, truth, name: "too far" if len(truth) == 5 else None)
    assert bench(tmp_path / "old.jsonl", [row(100.0), row(100.0, 5)]) == 1
    assert "WRONG small bf16 M=5: not timed\n" in capsys.readouterr().out


@pytest.mark.parametrize("flag", [["--peers", "none"], ["--layers", "2"], ["--table", "x"]])
def test_flags_that_it_does_not_read(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["bench", "--against", "file", *flag])
    assert "--against" in capsys.readouterr().err


def test_recorded_results_are_cells() -> None:
    """The files of this repository can be read, and have cells of H100 and H200."""
    # Results of dense MXFP8 and of NVFP4's quantiser have rows of their own.
    files = [str(path) for path in RESULTS.rglob("*.jsonl") if '"op": "moe"' in path.read_text().split("\n")[0]]
    rows = report.read_json(sorted(files))
    for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        cells = against.recorded(rows, {"gpu": name, "portable": False}, against.Wanted(None, None, None))
        assert len(cells) > 8
        for key, one in cells.items():
            assert one["us"] == min(
                each["us"]
                for each in rows
                if each["op"] == "moe"
                and each["backend"] == "oxmoe"
                and each.get("gpu") == name
                and not each.get("portable")
                and against._key(each) == key
            )
    with pytest.raises(UsageError, match="no cell of NVIDIA Z9"):
        against.recorded(rows, {"gpu": "NVIDIA Z9", "portable": False}, against.Wanted(None, None, None))
