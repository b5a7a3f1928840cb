"""`python -m oxmoe check` on input that says nothing, or that was made to mislead it."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forked
from check_command import RELEASE, written
from check_configs import (
    FP8,
    GPTQ,
    INT4,
    MODELOPT_FP8,
    SERVED,
    Config,
    gpt_oss,
    minimax_m3,
    qwen3_30b,
    step,
)
from oxmoe import __main__
from oxmoe.tools.check.checkpoint import Checkpoint, Fields, Unreadable
from oxmoe.tools.check.layers import Server, judge


def without(name: str) -> Config:
    return {key: value for key, value in qwen3_30b(FP8).items() if key != name}


HUGE = 10**400
UNREADABLE: dict[str, tuple[Any, str]] = {
    "truncated": (json.dumps(qwen3_30b())[:70], "no JSON: "),
    "empty": ("", "no JSON: "),
    "a list": ("[1]", r"expected a JSON object, got \[1\]"),
    "deep": ("[" * 200_000, "no JSON: "),
    "a huge integer": ('{"architectures": ' + "1" * 5000 + "}", "no JSON: "),
    "no architectures": (without("architectures"), "architectures is missing"),
    "architectures of numbers": (qwen3_30b(FP8) | {"architectures": [3]}, "architectures: expected a list of str"),
    "architectures as text": (qwen3_30b(FP8) | {"architectures": "Qwen3MoeForCausalLM"}, "expected a list of str"),
    "no layers": (without("num_hidden_layers"), "num_hidden_layers is missing"),
    "no experts": (without("num_experts"), "n_routed_experts or num_experts or num_local_experts is missing"),
    "no top-k": (without("num_experts_per_tok"), "num_experts_per_tok is missing"),
    "no hidden size": (without("hidden_size"), "hidden_size is missing"),
    "experts as text": (qwen3_30b() | {"num_experts": "128"}, "expected a whole number .* got '128'"),
    "experts as true": (qwen3_30b() | {"num_experts": True}, "expected a whole number .* got True"),
    "no expert": (qwen3_30b() | {"num_experts": 0}, "from 1 to"),
    "experts below none": (qwen3_30b() | {"num_experts": -1}, "from 1 to"),
    "a fraction": (qwen3_30b() | {"hidden_size": 2048.5}, "expected a whole number"),
    "a huge size": (qwen3_30b() | {"hidden_size": HUGE}, "expected a whole number"),
    "limits as text": (step() | {"swiglu_limits": ["7"] * 48}, "swiglu_limits: expected a list of number"),
    "a huge limit": (step() | {"swiglu_limits": [HUGE] * 48}, "swiglu_limits: expected numbers, got 1000"),
    "no limit but infinity": (step() | {"swiglu_limits": [float("inf")] * 48}, "swiglu_limits: expected numbers"),
    "huge layers": (qwen3_30b() | {"num_hidden_layers": 10**7}, "expected up to 4096"),
    "quantisation as text": (qwen3_30b() | {"quantization_config": "fp8"}, "quantization_config: expected an object"),
    "method as number": (qwen3_30b({"quant_method": 8}), "quant_method: expected text"),
    "groups as list": (
        qwen3_30b({"quant_method": "compressed-tensors", "config_groups": [1]}),
        "config_groups: expected an object",
    ),
    "a group as text": (
        qwen3_30b({"quant_method": "compressed-tensors", "config_groups": {"g": "x"}}),
        "g: expected an object",
    ),
    "ignored as text": (qwen3_30b({**FP8, "ignored_layers": "lm_head"}), "ignored_layers: expected a list of str"),
    "a limit as text": (gpt_oss() | {"swiglu_limit": "7"}, "swiglu_limit: expected a number"),
    "a limit that is none": (gpt_oss() | {"swiglu_limit": float("nan")}, "swiglu_limit: expected a number"),
    "too few layers listed": (minimax_m3() | {"text_config": {**minimax_m3()["text_config"], "moe_layer_freq": [1]}},
                              "expected one for each of 60 layers, got 1 of them"),
    "text_config as list": (minimax_m3() | {"text_config": []}, "text_config: expected an object"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints one line on standard error and nothing on standard output, and its status is 2."""
    config, message = UNREADABLE[name]
    text = config if isinstance(config, str) else json.dumps(config)
    assert __main__.main(["check", written(tmp_path / "config.json", text)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and re.search(message, err)
    assert str(tmp_path / "config.json") in err, "one of several folders is named"
    assert len(err) < 600


JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    1 << 24,
    10**30,
    0.5,
    float("inf"),
    "",
    "x",
    [],
    [1],
    ["x"],
    [None],
    {},
    {"x": 1},
]


def places(config: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the way to every value of a JSON object."""
    items = config.items() if isinstance(config, dict) else enumerate(config[:3]) if isinstance(config, list) else ()
    return [found for key, value in items for found in ((*prefix, key), *places(value, (*prefix, key)))]


VARIED = ["DeepSeek-V3", "Qwen3.6-35B-A3B-FP8", "GLM-4.5-Air-FP8", "gpt-oss-20b", "MiniMax-M3", "Step-3.5-Flash"]
VARIED += ["Nemotron-3-Nano", "ERNIE-4.5", "Laguna", "Llama-4-Scout", "LongCat-Flash-FP8", "Gemma-4-26B-A4B"]


@pytest.mark.parametrize("name", VARIED)
def test_any_value_in_any_place(name: str) -> None:
    """Whatever a field holds, there is one answer or one Unreadable."""
    config, tp, *_ = SERVED[name]
    for *way, last in places(config):
        for junk in JUNK:
            broken = copy.deepcopy(config)
            owner = functools.reduce(lambda value, key: value[key], way, broken)
            owner[last] = junk
            try:
                report = judge(Checkpoint(Fields(broken, "config.json")), Server("0.5.23", tp, 1, "sm_90"), [1])
            except Unreadable as error:
                assert str(error).startswith("config.json: ") and "\n" not in str(error)
            else:
                assert report.served or report.refused
                json.dumps(report.json())


@pytest.mark.parametrize("header", [b"", b"{", b'{"model.layers.0.mlp.experts.0.w1.weight": 3}', b'{"a": {}}'])
def test_unreadable_safetensors(header: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "config.json", qwen3_30b())
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert __main__.main(["check", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "model.safetensors" in err


def test_a_header_longer_than_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "config.json", qwen3_30b())
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    assert __main__.main(["check", str(tmp_path)]) == 2
    assert "no safetensors file" in capsys.readouterr().err


def with_header(folder: Path, header: dict[str, Any]) -> list[str]:
    written(folder / "config.json", qwen3_30b())
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return ["check", str(folder), *RELEASE]


def test_a_layer_of_5000_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"model.layers.{'9' * 5000}.mlp.experts.0.gate_proj.weight"
    assert __main__.main(with_header(tmp_path, {name: {"dtype": "BF16"}})) == 0
    assert "served by SGLang" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file(place: str, kind: str, tmp_path: Path) -> None:
    """A pipe without a writer waits, and a device has no end."""
    if place != "config.json":
        written(tmp_path / "config.json", qwen3_30b())
    if kind == "pipe":
        os.mkfifo(tmp_path / place)
    else:
        (tmp_path / place).symlink_to("/dev/zero")
    code = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30)); from oxmoe import __main__; "
    code += f"raise SystemExit(__main__.main(['check', {str(tmp_path)!r}]))"
    done = forked.run("-c", code, timeout=60)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr[-500:]
    assert place in done.stderr and done.stderr.endswith(": expected a regular file\n")


PATTERN = "(([a-z0-9._]+)+)+!"
GROUP = INT4["config_groups"]["group_0"]
ENDLESS: dict[str, Config] = {
    "ignore": {**INT4, "ignore": [f"re:{PATTERN}"]},
    "targets": {**INT4, "config_groups": {"g": {**GROUP, "targets": [f"re:{PATTERN}"]}}},
    "dynamic": {**GPTQ, "dynamic": {f"-:{PATTERN}": {}}},
}


@pytest.mark.parametrize("name", [*ENDLESS, "tensor"])
def test_patterns_without_end(name: str, tmp_path: Path) -> None:
    """A regular expression of a config, or a name in a header, that would take years ends with one line."""
    if name == "tensor":
        with_header(tmp_path, {".1" * 200_000: {"dtype": "BF16"}})
    else:
        written(tmp_path / "config.json", qwen3_30b(ENDLESS[name]))
    code = "import sys; from oxmoe import __main__; from oxmoe.tools.check import checkpoint; "
    code += "checkpoint.MOST_SECONDS = 0.3; raise SystemExit(__main__.main(sys.argv[1:]))"
    done = forked.run("-c", code, "check", tmp_path, *RELEASE, timeout=60)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr[-500:]
    assert done.stderr.endswith(": its names and patterns took more than 0.3 seconds\n")


@pytest.mark.parametrize("words", ["\x1b[2J", "a\n  start: sh", "\ud800", "\u202e", "\r"])
def test_words_that_steer_a_terminal(words: str, tmp_path: Path) -> None:
    """Architecture, method and dtype are the file's words: they are printed as they would be in Python's source."""
    configs = [{"architectures": [words]}, qwen3_30b({"quant_method": words})]
    commands = []
    for i, config in enumerate(configs):
        commands.append(["check", written(tmp_path / f"{i}.json", config), *RELEASE])
    commands.append(with_header(tmp_path, {"model.layers.1.mlp.experts.0.gate_proj.weight": {"dtype": words}}))
    for command in commands:
        done = forked.run("-m", "oxmoe", *command, timeout=60)
        text = done.stdout + done.stderr
        assert done.returncode == 1 and "NOT SERVED" in text, text
        assert all(letter.isprintable() for letter in text.replace("\n", "")) and "\n  start" not in text, text


WRONG_PATTERNS = ["(", "(" * 5000 + ")" * 5000, "a{99999999999999999999}", "(?<=a+)b", "[[\\", "*("]


@pytest.mark.parametrize("pattern", WRONG_PATTERNS, ids=range(len(WRONG_PATTERNS)))
@pytest.mark.parametrize("place", [*ENDLESS, "modelopt"])
def test_patterns_that_are_none(place: str, pattern: str, tmp_path: Path) -> None:
    """One reason, and nothing else: neither a traceback nor a warning about a line of this program."""
    if place == "modelopt":
        quantization: Config = {**MODELOPT_FP8, "ignore": [pattern]}
    else:
        quantization = json.loads(json.dumps(ENDLESS[place]).replace(PATTERN, json.dumps(pattern)[1:-1]))
    path = written(tmp_path / "config.json", qwen3_30b(quantization))
    done = forked.run("-m", "oxmoe", "check", path, *RELEASE)
    assert done.returncode == 1 and done.stderr == "", done.stderr[-500:]
    assert "no regular expression that can be used" in done.stdout and done.stdout.count("\n") == 2, done.stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_words_that_an_output_has_no_letters_for(encoding: str, tmp_path: Path) -> None:
    path = written(tmp_path / "config.json", {"architectures": ["Modèle\u2603"]})
    # The command needs no torch, whose import would take longer than everything else.
    program = (
        "import sys; sys.modules['torch'] = None; from oxmoe import __main__; sys.exit(__main__.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "check", path, *RELEASE]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert done.returncode == 1 and done.stderr == b"" and b"NOT SERVED" in done.stdout, done.stderr
    assert done.stdout.decode(encoding).startswith("Mod")


def test_words_of_a_megabyte(tmp_path: Path) -> None:
    """They are cut, in the first line and in a reason."""
    for config in ({"architectures": ["x" * (1 << 20)]}, qwen3_30b({"quant_method": "y" * (1 << 20)})):
        path = written(tmp_path / "config.json", config)
        done = forked.run("-m", "oxmoe", "check", path, *RELEASE, timeout=60)
        assert done.returncode == 1 and "NOT SERVED" in done.stdout and len(done.stdout) < 6000


def test_values_too_deep_to_show() -> None:
    """A value that JSON's reader took, a few calls above the depth at which repr ends."""
    value: list[Any] = []
    for _ in range(10**5):
        value = [value]
    fields = Fields({"hidden_size": value}, "config.json")
    with pytest.raises(Unreadable, match=r"hidden_size: expected a whole number .* got list of great depth"):
        fields.whole("hidden_size")
    while value:
        value = value.pop()
