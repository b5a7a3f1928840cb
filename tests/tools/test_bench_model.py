"""`python -m oxmoe bench --model`: layers as `check` has them, and its words about a step, with a stand-in clock."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from check_configs import FP8, REFUSED, SERVED, Config, gpt_oss, nemotron, qwen3_30b, step
from oxmoe import __main__
from oxmoe.tools import bench
from oxmoe.tools.bench import chart, layers, machine, model
from oxmoe.tools.bench.report import Cell
from oxmoe.tools.check.checkpoint import Checkpoint, Fields
from oxmoe.tools.check.command import installed
from oxmoe.tools.check.layers import Kind, RankLayer, Report, Server, judge
from oxmoe.tools.command import UsageError
from oxmoe.tools.shapes import GPT_OSS, ModelShape, Shape

FOUR_DECIMALS = 1e-4


def written(folder: Path, config: Config) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def judged(config: Config, tp: int, ep: int = 1) -> Report:
    return judge(Checkpoint(Fields(config, "config.json")), Server(installed(), tp, ep, "sm_90"), [1])


def small(quantised: Config | None = None, **fields: Any) -> Config:
    """Returns the config of a model of two layers that a CPU runs in moments."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    config = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2, "hidden_size": 256}
    config |= {"hidden_act": "silu", "torch_dtype": "bfloat16", **sizes, **fields}
    return config if quantised is None else {**config, "quantization_config": quantised}


MIXED = {**FP8, "modules_to_not_convert": ["model.layers.0.mlp.experts"]}


@pytest.mark.parametrize("name", SERVED)
def test_layers_are_those_of_check(name: str, tmp_path: Path) -> None:
    config, tp, *_ = SERVED[name]
    report = judged(config, tp)
    assert report.served, report.refused
    of_check = [kind for kind in report.kinds if kind.kind == "moe"]
    if any(kind.rank_layer is not None and not kind.rank_layer.options["gated"] for kind in of_check):
        with pytest.raises(UsageError, match="has experts without gates, and the bench draws gated ones alone"):
            model.load(written(tmp_path, config), tp, 1, "cpu")
        return
    found = model.load(written(tmp_path, config), tp, 1, "cpu")
    assert found.architecture == report.architecture and found.count == sum(kind.count for kind in of_check)
    for kind, known in zip(found.kinds, of_check, strict=True):
        assert (kind.count, kind.label) == (known.count, known.format) and kind.format in layers.FORMATS
        sizes = (known.sizes["experts_per_rank"], known.sizes["top_k"], known.sizes["hidden"])
        assert (kind.shape.experts, kind.shape.top_k, kind.shape.hidden) == sizes
        columns = known.sizes["intermediate_per_rank"]
        assert kind.shape.intermediate == (-(-columns // 64) * 64 if known.format == "MXFP4" else columns)
        # The bytes that check counts are those of these shapes.
        assert known.rank_layer is not None
        given = {key: value for key, value in known.rank_layer.options.items() if value is not None}
        assert {**model._DEFAULTS, **kind.shape.options} == {**model._DEFAULTS, **given}


def test_every_format_has_an_answer_to_what_sglang_runs() -> None:
    assert set(model.SGLANG) == set(layers.FORMATS) - {"mxfp4-a8", "nvfp4-a4", "fp8_tensor"}
    assert {peer for peers in model.SGLANG.values() for peer in peers} <= set(bench.PEERS)
    for name, peers in model.SGLANG.items():
        assert all(name in bench.PEERS[peer].formats for peer in peers)


def test_forms() -> None:
    def shape(biases: bool = False, **options: Any) -> Shape:
        of = {"activation": "silu", "gated": True, "layout": "gate_up", **options}
        return model._shape(RankLayer("bf16", 8, 2, 64, 32, of, biases, 1, 2), "Model")

    assert shape() == Shape(8, 2, 64, 32)
    assert shape(limit=10.0, clamp="before") == Shape(8, 2, 64, 32, limit=10.0)
    assert shape(biases=True, **GPT_OSS) == Shape(8, 2, 64, 32, gpt_oss=True)
    assert shape(activation="gelu") == ModelShape(8, 2, 64, 32, more=(("activation", "gelu"),))
    assert shape(limit=7.0, clamp="after").options == {"limit": 7.0, "clamp": "after"}
    assert shape(biases=True, **{**GPT_OSS, "limit": 5.0}).options == {**GPT_OSS, "limit": 5.0}


@pytest.mark.parametrize(
    ("fields", "router"),
    [
        ({}, {}),
        ({"scoring_func": "softmax", "n_group": 8, "topk_group": 3}, {}),
        ({"scoring_func": "sigmoid"}, {"scoring_func": "sigmoid", "num_expert_group": 1, "topk_group": 1}),
        (
            {"topk_method": "noaux_tc", "n_group": 4, "topk_group": 2},
            {"scoring_func": "sigmoid", "num_expert_group": 4, "topk_group": 2},
        ),
    ],
)
def test_routers(fields: Config, router: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path, small(**fields))
    (kind,) = model.load(path, 1, 1, "cpu").kinds
    assert kind.router == router
    # A rank with a part of the experts has no groups of its own.
    (kind,) = model.load(path, 2, 2, "cpu").kinds
    assert kind.router == {} and kind.shape.experts == 4


def test_a_share_of_the_tokens() -> None:
    layer = RankLayer("bf16", 32, 8, 64, 32, {}, False, 8, 8)
    assert [layer.share(tokens) for tokens in (1, 8, 64, 100)] == [1, 1, 8, 12]
    # A rank of two experts cannot take eight for each token.
    assert RankLayer("bf16", 2, 2, 64, 32, {}, False, 64, 8).share(64) == 4


# A whole run


def stand_in(monkeypatch: pytest.MonkeyPatch, times: Callable[[int], dict[str, float]]) -> list[int]:
    """Sets a clock: microseconds by backend for a number of tokens. Peers that are not in it fail."""
    asked = []

    def times_us(calls: Any, device: str, protocol: Any, *, ours: str) -> Any:
        tokens = calls[ours][0].args[0].shape[0]
        asked.append(tokens)
        us = times(tokens)
        known = {name: us[name] for name in calls if name in us}
        return known, {name: "RuntimeError: no clock" for name in calls if name not in us}

    monkeypatch.setattr(bench, "times_us", times_us)
    return asked


def run(folder: Path, config: Config, *arguments: str) -> int:
    return __main__.main(["bench", "--model", written(folder, config), "--device", "cpu", *arguments])


def test_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = stand_in(monkeypatch, lambda tokens: {"oxmoe": 10.0 + tokens, "torch-loop": 30.0 + 2 * tokens})
    plot, rows = tmp_path / "chart.svg", tmp_path / "rows.jsonl"
    assert run(tmp_path, small(), "--tokens", "512,8,1", "--plot", str(plot), "--json", str(rows)) == 0
    said = capsys.readouterr().out.splitlines()
    assert asked == [1, 8, 512]
    assert said[0] == "Qwen3MoeForCausalLM, --tp 1: 2 MoE layers a rank"
    assert said[1] == "2 of bf16: timed as bf16, 8 experts, top-2, 256 x 256, softmax"
    assert any(line.startswith("note: on this CPU") and "nothing of a GPU" in line for line in said)
    table = [line.split() for line in said if line.startswith("moe ")]
    assert [cells[4:] for cells in table] == [
        ["1", "11.0", "32.0", "2.91"],
        ["8", "18.0", "46.0", "2.56"],
        ["512", "522.0", "1054.0", "2.02"],
    ]
    against = "against torch-loop, which is not what SGLang runs)"
    assert said[-2:] == [
        "a decode step of 1 request runs 2 MoE layers: oxmoe saves 42.0 us a step (2 x (32.0 - 11.0) us, " + against,
        "a decode step of 8 requests runs 2 MoE layers: oxmoe saves 56.0 us a step (2 x (46.0 - 18.0) us, " + against,
    ]
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(found) == 6 and {row["backend"] for row in found} == {"oxmoe", "torch-loop"}
    for row in found:
        of = {"model": "Qwen3MoeForCausalLM", "tp": 1, "ep": 1, "model_layers": 2, "experts": 8, "hidden": 256}
        assert of.items() <= row.items()
    drawing = plot.read_text()
    ElementTree.fromstring(drawing)
    assert "Qwen3Moe: 2 layers of bf16" in drawing and drawing.count("<polyline") == 2


def test_kinds_are_added_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of four layers is not quantised. The peer of fp8 is slower than its stand-in."""
    monkeypatch.setattr(model, "ON_CPU", ("torch-loop",))
    monkeypatch.setattr(bench.PEERS["torch-loop"], "formats", ("bf16", "fp8_block"))
    monkeypatch.setattr(bench.PEERS["torch-loop"], "same_layer", lambda self: False)
    monkeypatch.setattr(bench.PEERS["torch-loop"], "layer", lambda self, index, inputs: inputs.x)
    monkeypatch.setattr(layers.Weights, "dense", lambda self: self)
    kinds = iter([{"oxmoe": 12.0, "torch-loop": 20.0}, {"oxmoe": 30.0, "torch-loop": 25.0}])
    stand_in(monkeypatch, lambda tokens: next(kinds))
    assert run(tmp_path, small(MIXED, num_hidden_layers=4), "--tokens", "4", "--step-ms", "1") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "a decode step of 4 requests runs 4 MoE layers: oxmoe takes 7.0 us a step more, 0.7 % of 1 ms "
        "(1 x (20.0 - 12.0) + 3 x (25.0 - 30.0) us, against torch-loop"
    ), last


def test_without_a_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(monkeypatch, lambda tokens: {"oxmoe": 12.0})
    assert run(tmp_path, small(FP8), "--tokens", "4") == 0
    said = capsys.readouterr().out
    assert "skipped torch-loop: has no fp8_block weights" in said
    assert said.splitlines()[-1].endswith("they take 24.0 us on oxmoe, and no peer ran to compare them with")
    assert run(tmp_path, small(FP8), "--tokens", "4", "--peers", "sglang-triton,marlin") == 0
    said = capsys.readouterr().out
    assert "skipped sglang-triton: needs a GPU" in said and "skipped marlin: needs a GPU" in said


def test_the_fastest_peer_counts() -> None:
    kind = model.Kind("m", 3, "bf16", RankLayer("bf16", 8, 2, 64, 32, {}, False, 2, 2), Shape(8, 2, 64, 32), {})
    of = model.Model("M", 2, 2, [kind])
    cell = Cell("moe", "m", "bf16", "uniform", 4, 1.0, {"oxmoe": 10.0, "slow": 40.0, "fast": 12.0})
    assert model.gain(of, [{4: cell}], 8, None) == (
        "a decode step of 8 requests runs 3 MoE layers: oxmoe saves 6.0 us a step (3 x (12.0 - 10.0) us, against fast)"
    )
    assert model.gain(of, [{}], 8, None).endswith("runs 3 MoE layers: not all were timed")


@pytest.mark.parametrize("form", ["gelu", "after", "gpt_oss"])
def test_layers_of_other_forms_are_right(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """oxmoe and the peer are compared with the reference, as in every run of the bench."""
    stand_in(monkeypatch, lambda tokens: {"oxmoe": 1.0, "torch-loop": 2.0})
    config = small()
    if form == "gelu":
        config |= {"architectures": ["Gemma4ForCausalLM"], "enable_moe_block": True, "top_k_experts": 2}
    elif form == "after":
        config = {**step(), "num_hidden_layers": 2, "hidden_size": 256, "moe_intermediate_size": 128}
        config |= {"moe_num_experts": 8, "moe_top_k": 2, "moe_layers_enum": "0,1", "swiglu_limits": [7.0, 7.0]}
    else:
        config = {**gpt_oss(8, 2, None), "hidden_size": 256, "intermediate_size": 128, "swiglu_limit": 5.0}
    plot = tmp_path / "chart.svg"
    assert run(tmp_path, config, "--tokens", "16", "--plot", str(plot)) == 0
    assert "torch-loop" in plot.read_text()


@pytest.mark.parametrize("name", REFUSED)
def test_what_check_refuses(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, tp, _ = REFUSED[name]
    report = judged(config, tp)
    if report.served:  # refused on another GPU or by another release than those of this run
        pytest.skip("refused with other arguments alone")
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, config, "--tp", str(tp))
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert all(reason in said for reason in report.refused)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp", "0"], "argument --tp/--tp-size: expected a whole number from 1 to 1024, got '0'"),
        (["--tp", "two"], "expected a whole number from 1 to 1024, got 'two'"),
        (["--tp", "3"], "3 ranks that share an expert do not divide its intermediate size 256"),
        (["--tp", "2", "--ep", "4"], "--ep-size 4 does not divide --tp-size 2"),
        (["--step-ms", "20"], "--step-ms is the time of one step: give its number of requests as --tokens"),
        (["--step-ms", "20", "--tokens", "1,2"], "give its number of requests as --tokens"),
        (["--plot", "chart.png"], "--plot: with --model expected FILE.svg, got chart.png"),
        (["--peers", "nobody"], "unknown peer nobody"),
        (["--shapes", "dsv3-tp8"], "--model does not read --shapes"),
        (["--format", "bf16"], "--model does not read --format"),
    ],
)
def test_arguments(arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, small(), *arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and words in said and said.count("\n") == 1


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, words in (
        (tmp_path / "none.json", "No such file"),
        (tmp_path, "config.json: No such file or directory; name a folder that has one"),
    ):
        with pytest.raises(SystemExit):
            __main__.main(["bench", "--model", str(path), "--device", "cpu"])
        assert words in capsys.readouterr().err
    dense = {"architectures": ["Lfm2MoeForCausalLM"], "num_hidden_layers": 2, "num_dense_layers": 2, "hidden_size": 64}
    with pytest.raises(SystemExit):
        run(tmp_path, dense)
    assert "the model has no MoE layers: there is nothing for oxmoe to take over" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        __main__.main(["bench", "--device", "cpu", "--tp", "2", "--step-ms", "3"])
    assert "--tp belongs to --model: give it, too" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(tmp_path, nemotron())
    assert "NemotronHForCausalLM has experts without gates" in capsys.readouterr().err


def test_missing_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(model.os, "sysconf", lambda name: {"SC_AVPHYS_PAGES": 1 << 18, "SC_PAGE_SIZE": 4096}[name])
    with pytest.raises(SystemExit):
        run(tmp_path, qwen3_30b())
    said = capsys.readouterr().err
    # The number is two times 3 x 128 x 2048 x 768 numbers of 16 bits.
    assert "--model: 1 layer, ours and a peer's, need 2.2 GiB, 1.0 GiB are free: give a larger --tp or --ep" in said


def test_a_gpu_judges_by_its_own_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert model.gpu_of("cuda") == "sm_89" and model.gpu_of("cpu") == "sm_90"


def test_commands_without_paths() -> None:
    given = ["bench", "--model", "/data/models/Qwen3/", "--model=/data/config.json", "--json", "/data/rows.jsonl"]
    assert machine.without_paths(given) == ["bench", "--model", "Qwen3", "--model=config.json"]


def test_check_does_not_print_what_the_bench_reads() -> None:
    report = judged(small(), 1)
    assert isinstance(report.kinds[0], Kind) and report.kinds[0].rank_layer is not None
    assert all("rank_layer" not in kind for kind in report.json()["kinds"])


# The chart


def test_a_chart() -> None:
    series = {"oxmoe": [(1, 10.0), (16, 40.0)], "a <b>": [(1, 20.0)], "floor": [(1, 5.0), (16, 20.0)]}
    drawing = ElementTree.fromstring(chart.svg({"one & two": series, "other": {"oxmoe": [(4, 7.0)]}}))
    inside = dict.fromkeys(("x", "x1", "x2", "cx"), 2) | dict.fromkeys(("y", "y1", "y2", "cy"), 3)
    size = [float(number) for number in drawing.attrib["viewBox"].split()]
    for element in drawing:
        for name, place in inside.items():
            assert 0 <= float(element.attrib.get(name, 0)) <= size[place], element.attrib
    texts = [element.text for element in drawing if element.tag.endswith("text")]
    assert {"one & two", "a <b>", "oxmoe", "floor", "other"} <= set(texts)
    lines = [element.attrib["points"] for element in drawing if element.tag.endswith("polyline")]
    ours, floor = ([tuple(map(float, point.split(","))) for point in line.split()] for line in lines)
    # Four times as long is as far up as from 5 to 20 on the floor; more time is further up.
    assert ours[0][0] == floor[0][0] and ours[1][1] < ours[0][1] < floor[0][1]
    assert abs((ours[0][1] - ours[1][1]) - (floor[0][1] - floor[1][1])) < 0.2


@pytest.mark.parametrize("least,most", [(1.0, 1.0), (3.0, 900.0), (5.0, 5.1), (0.02, 7.0), (999.0, 1001.0)])
def test_ticks(least: float, most: float) -> None:
    ticks = chart._ticks(least, most)
    assert ticks[0] <= least * (1 + FOUR_DECIMALS) and ticks[-1] >= most * (1 - FOUR_DECIMALS)
    assert all(re.fullmatch(r"[125]0*|0\.0*[125]", f"{tick:g}") for tick in ticks)
