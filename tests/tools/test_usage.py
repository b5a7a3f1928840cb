"""`python -m oxmoe` with arguments that it cannot take: one line, exit status 2, before anything is measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import oxmoe
from oxmoe import __main__
from oxmoe.tools import command, shapes
from oxmoe.tools.bench import layers, masked, report


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the one line on standard error."""
    with pytest.raises(SystemExit) as exit:
        __main__.main(arguments)
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and not out and err.count("\n") == 1
    return err


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in (
        "oxmoe.tools.bench.layers.make_weights",
        "oxmoe.tools.bench.overhead.measure",
        "oxmoe.tools.bench.distance.run",
    ):
        monkeypatch.setattr(name, measured)
    monkeypatch.setattr("oxmoe.tools.demo.choose", measured)


NUMBERS = [
    ("demo --tokens 0", "--tokens: expected a whole number from 1 to 1048576, got '0'"),
    ("demo --tokens 4 x", "--tokens: expected a whole number from 1 to 1048576, got 'x'"),
    ("demo --tokens 99999999999999999999", "--tokens: expected a whole number"),
    ("bench --tokens -3", "--tokens: expected a whole number from 1 to 16777216, got '-3'"),
    ("bench --tokens 4,", "--tokens: expected a whole number from 1 to 16777216, got ''"),
    ("bench --tokens 1.5", "got '1.5'"),
    ("bench --layers 0", "--layers: expected a whole number from 1 to 64, got '0'"),
    ("bench --rounds -1", "--rounds: expected a whole number from 1 to 1000, got '-1'"),
    ("bench --replays 0", "--replays: expected a whole number"),
    ("bench --sustain -1", "--sustain: expected a number from 0 to 3600, got '-1'"),
    ("bench --sustain nan", "--sustain: expected a number from 0 to 3600, got 'nan'"),
    ("bench --layout masked --fill 101", "--fill: expected a number from 0 to 100, got '101'"),
    ("bench --allreduce 1", "--allreduce: expected a whole number from 2 to 8, got '1'"),
    ("bench --allreduce 3", "expected 2, 4 or 8, but no more than torch's 0 GPUs, got 3"),
    ("bench --shapes ,", "--shapes: expected a name, got nothing"),
    ("bench --device cuda", "--device cuda: torch sees no CUDA GPU here"),
    ("bench --device tpu", "--device: invalid choice: 'tpu'"),
    ("bench --layout masked --format fp9", "unknown format fp9; known: bf16, "),
    ("bench --format fp9", "unknown format fp9; known: bf16, "),
    ("bench --pattern none", "unknown pattern none; known: uniform, "),
    ("explain --tokens -1", "--tokens: expected a whole number from 0 to 16777216, got '-1'"),
    ("explain --experts 8 --top-k 9 --hidden 64 --intermediate 64", "top_k: expected 1 to 8, got 9"),
    ("explain --experts 8 --hidden 64", "needed: --layer, or --top-k, --intermediate"),
    ("explain --layer dsv3-tp8 --groups 7", "num_expert_group: expected 0 or a divisor of 256 experts up to 32, got 7"),
    ("explain --layer dsv3-tp8 --groups 8 --routing ids", "num_expert_group: a call with given ids has no router"),
    ("explain --layer dsv3-tp8 --bias --routing ids", "correction_bias: a call with given ids has no router"),
    (
        "explain --experts 2000 --top-k 2 --hidden 64 --intermediate 64 --arch cpu",
        'num_experts: 2000 with router logits; supported: 1 to 1024; routing "ids" shows a call with given ids',
    ),
    (
        "explain --experts 2000 --top-k 2 --hidden 64 --intermediate 64 --arch sm_90 --routing ids",
        "routing 2000 experts with top-2 and given ids; supported on GPUs: up to 1024 experts",
    ),
    ("explain --layer nothing", "unknown layer nothing; known: qwen3-30b-a3b, "),
    ("explain --layer qwen3-30b-a3b --format fp9", "unknown format fp9; known: bf16, "),
    ("explain --layer qwen3-30b-a3b --arch sm_95", "--arch: expected one of sm_80 (A100, A30), sm_86 (A10, "),
    ("check . --gpu h1000", "--gpu: expected one of sm_80 (A100, A30), sm_86 (A10, "),
    ("check . --gpu cpu", "--gpu: expected a GPU, got 'cpu'"),
    (
        "explain --layer kimi-k2-tp8 --arch sm_90 --format f32 --dtype f16",
        "f32 weights are planned for f32 activations",
    ),
    ("explain --layer gpt-oss-20b --arch sm_90 --format fp8_block", "expected a multiple of 128 for format"),
    ("", "the following arguments are required: command"),
    ("measure", "invalid choice: 'measure' (choose from"),
]


@pytest.mark.parametrize(("arguments", "message"), NUMBERS, ids=[arguments for arguments, _ in NUMBERS])
def test_wrong_arguments(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(arguments.split(), capsys)


UNREAD = [
    ("bench --overhead --distance", "--overhead and --distance are runs of their own"),
    ("bench --overhead --table x", "--table and --overhead are runs of their own"),
    ("bench --table x --json y", "--table does not read --json"),
    ("bench --overhead --tokens 3 --format bf16", "--overhead does not read --tokens, --format"),
    ("bench --overhead --layout masked", "--overhead does not read --layout"),
    ("bench --distance --json x", "--distance does not read --json"),
    ("bench --allreduce 2 --shapes dsv3-tp8", "--allreduce does not read --shapes"),
    ("bench --layout masked --pattern hot --plot x", "--layout masked does not read --pattern, --plot"),
    ("bench --fill 3", "--fill belongs to --layout masked: give it, too"),
    ("bench --tp 8", "--tp belongs to --model: give it, too"),
    ("bench --layout routed --fill 3", "--layout routed does not read --fill"),
    ("bench --device cpu --layers 3 --sustain 0", "a run on the CPU does not read --layers, --sustain"),
    ("explain --layer qwen3-30b-a3b --hidden 64", "--layer brings --hidden"),
    ("bench --run x", "--run names the rows of --json: give --json, too"),
    ("bench --distance --run x", "--distance does not read --run"),
    ("doctor --tokens 3", "unrecognized arguments: --tokens 3"),
]


@pytest.mark.parametrize(("arguments", "message"), UNREAD, ids=[arguments for arguments, _ in UNREAD])
def test_a_flag_that_is_not_read_is_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(arguments.split(), capsys)


@pytest.mark.parametrize("run", [["--layout", "masked"], ["--layout", "routed"], ["--overhead"]], ids=" ".join)
def test_results_that_cannot_be_written(run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing, folder = tmp_path / "missing" / "rows.jsonl", tmp_path / "folder"
    folder.mkdir()
    for path, reason in ((missing, "No such file or directory"), (folder, "Is a directory")):
        said = refused(["bench", *run, "--device", "cpu", "--json", str(path)], capsys)
        assert f"--json: cannot open {path}: {reason}" in said
    assert list(tmp_path.iterdir()) == [folder]


def test_a_plot_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oxmoe.tools.bench.find_spec", lambda name: object())
    said = refused(["bench", "--device", "cpu", "--plot", str(tmp_path / "missing" / "a.png")], capsys)
    assert "--plot: cannot open" in said


def test_a_file_to_write_is_left_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is refused for another reason neither makes the file nor changes it."""
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.write_text("{}\n")
    for path in (old, new):
        with pytest.raises(AssertionError, match="measured"):
            __main__.main(["bench", "--device", "cpu", "--tokens", "1", "--json", str(path)])
    assert old.read_text() == "{}\n" and not new.exists()


def test_tables_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    assert f"--table: cannot read {path}: No such file" in refused(["bench", "--table", str(path)], capsys)
    assert f"--table: cannot read {tmp_path}: Is a directory" in refused(["bench", "--table", str(tmp_path)], capsys)
    assert f"--against: cannot read {path}: No such file" in refused(["bench", "--against", str(path)], capsys)
    path.write_bytes(b"\xff\xfe\n")
    assert f"--table: cannot read {path}: it is no text" in refused(["bench", "--table", str(path)], capsys)
    whole = '{"op": "moe", "shape": "a", "format": "bf16", "tokens": 1, "backend": "oxmoe", "us": 1.0, "date": "d"'
    for line in ("{", "[]", "3", '{"op": 3}', '{"op": "moe"}', f"{whole}}}"):
        path.write_text(f'{{"op": "overhead"}}\n\n{line}\n')
        said = refused(["bench", "--table", str(path)], capsys)
        assert f"--table: {path}, line 3: expected a JSON object with the fields of a measurement" in said


# Right arguments


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        __main__.main(["--version"])
    assert capsys.readouterr().out == f"oxmoe {oxmoe.__version__}\n"


@pytest.mark.parametrize("command", sorted(__main__.COMMANDS))
def test_help_is_words(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """argparse puts its own objects where a help has a single percent sign."""
    with pytest.raises(SystemExit, match="0"):
        __main__.main([command, "--help"])
    text = capsys.readouterr().out
    assert not re.search("[{'(]option_strings|<argparse|object at 0x", text), text


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--experts", "128", "--top-k", "8", "--hidden", "2048", "--intermediate", "768"]
    for shape in (arguments, ["--layer", "qwen3-30b-a3b"]):
        rest = ["--tokens", "1", "64", "--arch", "sm_90"]
        for format_name in (["--format", "fp8_block"], ["--format", "fp8-block"]):
            assert __main__.main(["explain", *shape, *rest, *format_name]) == 0
            plans = [oxmoe.explain(128, 8, 2048, 768, count, format="fp8_block", arch="sm_90") for count in (1, 64)]
            assert capsys.readouterr().out == "\n".join(plans)
    assert __main__.main(["explain", *arguments, "--dtype", "f16", "--plain", "--arch", "cpu"]) == 0
    assert capsys.readouterr().out == oxmoe.explain(128, 8, 2048, 768, 1, format="f16", gated=False, arch="cpu")


def launches_of(plan: str) -> list[str]:
    return re.findall(r"^launch \d+: (\w+):", plan, re.MULTILINE)


def test_explain_says_what_given_ids_change() -> None:
    """By default the plan is that of router logits, and the launches that are different with given ids follow."""
    words = "with topk_ids in place of router logits:"

    def plans(tokens: int, **options: Any) -> tuple[str, str, str]:
        sizes = 128, 8, 2048, 768, tokens
        logits, ids = (oxmoe.explain(*sizes, routing=source, **options) for source in ("logits", "ids"))
        both = oxmoe.explain(*sizes, **options)
        assert both == oxmoe.explain(*sizes, routing=None, **options) and words not in logits + ids
        assert both.partition("workspace")[2] == logits.partition("workspace")[2] == ids.partition("workspace")[2]
        return both, logits, ids

    # Few tokens are one launch with either, and CPUs have no launches.
    for options in ({"arch": "sm_90"}, {"arch": "sm_90", "format": "mxfp4"}, {"arch": "cpu"}):
        both, logits, ids = plans(1, **options)
        assert both == logits == ids and len(launches_of(ids)) == (options["arch"] != "cpu")
    # The routing alone is different.
    both, logits, ids = plans(64, arch="sm_90")
    changed = f"{words} launch 0: route_e0: 8 CTAs in clusters of 8 x 8 warps, 6800 bytes of shared memory\n"
    assert both.replace(changed, "") == logits and both.count(words) == 1
    assert (launches_of(logits)[0], launches_of(ids)[0]) == ("route_e4", "route_e0")
    assert launches_of(logits)[1:] == launches_of(ids)[1:]
    # The routing has another number of launches: all are printed.
    both, logits, ids = plans(300, arch="sm_90")
    assert launches_of(both) == launches_of(logits) + launches_of(ids)
    assert (launches_of(logits)[:2], launches_of(ids)[:1]) == (["select_e4", "place_chosen"], ["route_e0"])


def test_explain_takes_one_routing(capsys: pytest.CaptureFixture[str]) -> None:
    for source in ("logits", "ids"):
        arguments = ["--layer", "qwen3-30b-a3b", "--tokens", "64", "--arch", "sm_90", "--routing", source]
        assert __main__.main(["explain", *arguments]) == 0
        assert capsys.readouterr().out == oxmoe.explain(128, 8, 2048, 768, 64, arch="sm_90", routing=source)
    message = 'routing: expected "logits", "ids" or None for both, got "topk"'
    with pytest.raises(ValueError, match=message):
        oxmoe.explain(128, 8, 2048, 768, 64, routing="topk")  # type: ignore[arg-type]


def test_explain_takes_a_router(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek-V3's router has 8 groups and a bias."""
    options: dict[str, Any] = {"format": "fp8_block", "arch": "sm_90"}
    arguments = ["--layer", "dsv3-tp8", "--format", "fp8_block", "--tokens", "64", "--arch", "sm_90"]
    assert __main__.main(["explain", *arguments, "--groups", "8", "--bias"]) == 0
    plan = oxmoe.explain(256, 8, 7168, 256, 64, num_expert_group=8, correction_bias=True, **options)
    assert capsys.readouterr().out == plan
    plain = oxmoe.explain(256, 8, 7168, 256, 64, **options)
    assert launches_of(plan) == ["route_e8_any", *launches_of(plain)[1:]] and launches_of(plain)[0] == "route_e8"
    assert launches_of(oxmoe.explain(256, 8, 7168, 256, 64, num_expert_group=1, **options)) == launches_of(plain)


def test_explain_knows_every_layer_of_the_bench() -> None:
    assert layers.SHAPES is shapes.SHAPES
    for name, shape in shapes.SHAPES.items():
        sizes = shape.experts, shape.top_k, shape.hidden, shape.intermediate
        assert oxmoe.explain(*sizes, 3, arch="sm_90").startswith(f"MoE layer: {shape.experts} experts"), name


def test_explain_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; from oxmoe.__main__ import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["explain", "--layer", "gpt-oss-20b", "--format", "mxfp4", "--arch", "sm_121"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "on GB10 (DGX Spark) (sm_121, 48 multiprocessors, 99 KiB" in done.stdout


GPUS = {
    **{"sm_80": ("A100", 108, 163), "sm_86": ("A40", 84, 99), "sm_87": ("Jetson AGX Orin", 16, 163)},
    **{"sm_89": ("L40S", 142, 99), "sm_90": ("H200", 132, 227), "sm_100": ("B200", 148, 227)},
    **{"sm_103": ("B300", 148, 227), "sm_110": ("Jetson AGX Thor", 20, 227)},
    **{"sm_120": ("RTX PRO 6000 Blackwell", 188, 99), "sm_121": ("GB10 (DGX Spark)", 48, 99)},
}


@pytest.mark.parametrize("arch", GPUS)
def test_explain_knows_every_gpu_by_its_own_name(arch: str) -> None:
    name, multiprocessors, shared = GPUS[arch]
    for text in (arch, arch.removeprefix("sm_"), f"{arch}a", f"{arch}f"):
        plan = oxmoe.explain(128, 8, 2048, 768, 16, arch=text)
        assert f"on {name} ({arch}, {multiprocessors} multiprocessors, {shared} KiB shared memory a CTA)" in plan


@pytest.mark.parametrize(
    "arch", ["sm_75", "sm_88", "sm_95", "sm_101", "sm_115", "sm_129", "sm_", "sm_sm_90", "h100", ""]
)
def test_what_is_no_gpu_is_refused(arch: str) -> None:
    with pytest.raises(ValueError, match=r'arch: expected "cpu" or one of sm_80, .*, sm_121, got '):
        oxmoe.explain(128, 8, 2048, 768, 16, arch=arch)


def test_formats_have_one_spelling() -> None:
    own = oxmoe.device_info()["formats"]
    for kinds in (layers.FORMATS, [name.removesuffix("-bf16") for name in masked.FORMATS]):
        assert set(kinds) <= set(own) and len(set(kinds)) >= len(own) - 1
    for name in own:
        sizes = 8, 2, 256, 256, 3
        for other in (name.replace("-", "_"), name.replace("_", "-")):
            assert oxmoe.explain(*sizes, format=other, arch="cpu") == oxmoe.explain(*sizes, format=name, arch="cpu")


def test_a_dispatch_takes_either_spelling() -> None:
    options = {"a2a_backend": "deepep", "runner_backend": "oxmoe", "mode": "low_latency"}
    first, second = (oxmoe.sglang.dispatch_dtype(**options, weights=name) for name in ("fp8_block", "fp8-block"))
    assert first == second and first.dtype == "fp8"


def test_old_results_have_todays_spelling(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    names = {"fp8-block": "fp8_block", "fp8-tensor-token": "fp8_tensor-token", "mxfp4-a8": "mxfp4-a8", "x-y": "x-y"}
    report.append_json(str(path), [{"op": "moe_masked", "format": name} for name in names])
    assert [row["format"] for row in report.read_json([str(path)])] == list(names.values())


@pytest.mark.parametrize(
    ("card", "arch"),
    [("h200", "sm_90"), ("L40S", "sm_89"), ("rtx-5090", "sm_120"), ("SM90", "sm_90"), ("sm_100f", "sm_100")],
)
def test_cards_by_name(card: str, arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Users know a card's name better than its architecture."""
    plan = ["explain", "--layer", "qwen3-30b-a3b", "--arch"]
    assert __main__.main([*plan, card]) == 0
    by_card = capsys.readouterr().out
    assert __main__.main([*plan, arch]) == 0
    assert by_card == capsys.readouterr().out and arch in by_card
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    answers = []
    for name in (card, arch):
        assert __main__.main(["check", str(tmp_path), "--gpu", name]) == 2
        answers.append(capsys.readouterr().err)
    assert answers[0] == answers[1] and "is missing" in answers[0]


def test_cards_are_those_of_the_planner() -> None:
    """Each architecture that has a plan has a card's name."""
    with pytest.raises(ValueError, match="arch") as error:
        oxmoe.explain(8, 2, 64, 64, 1, arch="sm_1")
    assert f"one of {', '.join(command.CARDS)}, got" in str(error.value)
