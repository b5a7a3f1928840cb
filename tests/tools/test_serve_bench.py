"""benches/sglang/serve.py without a server: it reads streams, compares answers, and judges cells."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benches" / "sglang"


@pytest.fixture(scope="module")
def serve() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import serve

        yield serve
    for name in ("serve", "serve_table", "client"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def client(serve: ModuleType) -> ModuleType:
    return serve.client


def line(tokens: list[int], cached: int = 0) -> bytes:
    return b"data: " + json.dumps({"output_ids": tokens, "meta_info": {"cached_tokens": cached}}).encode() + b"\n"


def test_a_stream(client: ModuleType) -> None:
    lines = [(0.5, line([7])), (0.6, line([8, 9], 3)), (0.9, line([], 3)), (1.0, line([1])), (1.1, b"data: [DONE]\n")]
    answer = client._of_lines(lines)
    assert answer.tokens == [7, 8, 9, 1]
    assert (answer.first, answer.seconds, answer.cached) == (0.5, 1.0, 3)
    assert answer.between == pytest.approx([0.05, 0.05, 0.4])


def test_an_error_in_a_stream(client: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        client._of_lines([(0.1, b'data: {"error": {"message": "out of memory"}}')])


def test_compare(client: ModuleType) -> None:
    result = client.compare([[1, 2, 3, 4], [5, 6]], [[1, 9, 3, 4], [5, 6]])
    assert (result["tokens"], result["equal"], result["before_first_difference"]) == (6, 5, 3)
    assert (result["requests"], result["whole_requests"]) == (2, 1)
    assert result["divergences"] == [{"request": 0, "position": 1, "off": 9, "on": 2}]
    with pytest.raises(ValueError):
        client.compare([[1]], [[1, 2]])


def test_the_mix_is_the_same_each_time_and_shares_a_beginning(client: ModuleType) -> None:
    requests = client.mix(60, 3, 1024, 1800)
    assert requests == client.mix(60, 3, 1024, 1800) != client.mix(60, 4, 1024, 1800)
    assert max(len(request.prompt) for request in requests) > 2 * 512
    beginnings = [request.prompt[:64] for request in requests if len(request.prompt) > 64]
    assert max(map(beginnings.count, beginnings)) > 10


def judged(serve: ModuleType, *, on: dict[str, Any] | None = None, margin: float = 0.0, updated: int = 1) -> list[str]:
    seen = {mode: serve.Seen(mode, {"update": {"answers_that_changed": updated}}) for mode in ("off", "on")}
    seen["on"].row |= {"layers_on_oxmoe": [[4, 4]], **(on or {})}
    seen["on"].updated = True
    divergence = {"request": 3, "position": 9, "off": 1, "on": 2, "margin": margin}
    comparison = {"logprobs": {"most": 0.05}, "tokens": {"16": {"divergences": [divergence]}}}
    return serve.judge(4, seen["off"], seen["on"], comparison)


def test_judge(serve: ModuleType) -> None:
    assert judged(serve, margin=0.09) == []
    assert "answer 3 parts at 9" in judged(serve, margin=0.11)[0]
    assert "[4, 4]" in judged(serve, on={"layers_on_oxmoe": [[3, 4]]})[0]
    assert "[4, 4]" in judged(serve, on={"layers_on_oxmoe": []})[0]
    assert "no answer changed" in judged(serve, updated=0)[0]
    assert judged(serve, on={"error": "Problem: it ended"}) == ["on: Problem: it ended"]


@pytest.mark.parametrize("up", [("off", "on"), ("on",)], ids="-".join)
def test_servers_that_are_up_are_asked_where_answers_part(
    serve: ModuleType, client: ModuleType, monkeypatch: pytest.MonkeyPatch, up: tuple[str, ...]
) -> None:
    """Both servers are asked about the two tokens, after the prompt and what both answered before."""
    asked: list[tuple[int, list[int], int, int]] = []

    def margin(port: int, prefix: list[int], chosen: int, other: int) -> float:
        asked.append((port, prefix, chosen, other))
        return float(port)

    monkeypatch.setattr(client, "margin", margin)
    seen = {mode: serve.Seen(mode, {}, logprobs=[[-1.0]]) for mode in ("off", "on")}
    seen["off"].tokens, seen["on"].tokens = {"16": [[4, 5], [6, 7]]}, {"16": [[4, 5], [6, 8]]}
    ports = {mode: {"off": 1, "on": 2}[mode] for mode in up}
    row = serve.compared(seen["off"], seen["on"], ports, lambda name: [client.Request((n, n), 2) for n in (1, 2)])
    (part,) = row["tokens"]["16"]["divergences"]
    assert asked == [(port, [2, 2, 6], 8, 7) for port in ((2, 1) if "off" in up else (2,))]
    assert part["margin"] == 2.0 and part.get("margin_without") == (1.0 if "off" in up else None)
    (said,) = serve.judge(4, serve.Seen("off", {}), serve.Seen("on", {"layers_on_oxmoe": [[4, 4]]}), row)
    assert said == "16: answer 1 parts at 1, margin 2.000" + (", without oxmoe 1.000" if "off" in up else "")


def test_cells(serve: ModuleType) -> None:
    assert str(serve.Cell.of("qwen-fp8:2")) == "qwen-fp8-tp2"
    with pytest.raises(Exception, match="got llama"):
        serve.Cell.of("llama")


def test_the_other_checkpoint_has_its_layers_swapped(serve: ModuleType, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    folder = tmp_path / "model"
    folder.mkdir()
    for n in range(3):
        safetensors.save_file({f"model.layers.{n}.w": torch.full((2,), float(n))}, folder / f"layer{n}.safetensors")
    (folder / "config.json").write_text("{}")
    serve.swapped(folder, tmp_path / "other")
    found: dict[str, float] = {}
    for file in (tmp_path / "other").glob("*.safetensors"):
        found |= {name: float(value[0]) for name, value in safetensors.load_file(file).items()}
    assert found == {"model.layers.0.w": 1.0, "model.layers.1.w": 0.0, "model.layers.2.w": 2.0}
    assert (tmp_path / "other" / "config.json").read_text() == "{}"


def test_the_tables(serve: ModuleType) -> None:
    import serve_table

    where = {"gpus": 1, "gpu": "card", "driver": "1", "commit": "abc", "cell": "qwen-tp1"}
    load = {"tokens_per_s": 100.0, "first_token_ms": {"median": 10.0}, "between_tokens_ms": {"median": 2.0}}
    server = {**where, "loads": {"16": load}, "start_s": 30.0, "load_s": 2.0, "capture_s": {"Capture decode": 3.0}}
    faster = {**server, "mode": "on", "loads": {"16": {**load, "tokens_per_s": 150.0}}}
    equal = {"tokens": 10, "equal": 9, "before_first_difference": 8, "requests": 2, "divergences": [{"margin": -0.02}]}
    text = serve_table.render(
        [{**server, "mode": "off"}, faster, {**where, "mode": "compared", "tokens": {"16": equal}}]
    )
    assert "| qwen-tp1 | 16 | 100 / 150 | 1.50x | 10.0 / 10.0 | 2.00 / 2.00 |" in text
    assert "| qwen-tp1 | 30.0 / 30.0 | 2.0 / 2.0 | 3.0 / 3.0 |" in text
    assert "| qwen-tp1 | 2 | 9 of 10 | 8 | 0.020 | |" in text.replace("|  |", "| |")
    # A server that did not start leaves its places empty.
    alone = serve_table.render([{**where, "mode": "off", "error": "it ended"}, faster])
    assert "| qwen-tp1 | 16 |  / 150 |" in alone


def test_the_section_says_what_did_not_run(serve: ModuleType) -> None:
    import serve_table

    where = {"gpus": 1, "gpu": "card", "driver": "1", "commit": "abc", "cell": "gpt-tp1"}
    server = {**where, "layers": 4, "started": "alone"}
    rows = [{**server, "mode": "off", "error": "it ended"}, {**server, "mode": "on", "loads": {}}]
    text = serve_table.section(rows, ["h100.jsonl"])
    assert "- gpt-tp1, off: it ended" in text
    assert "- 1 x card, driver 1" in text
    assert "started at a time" not in text
    assert "`h100.jsonl`" in text


@pytest.fixture
def timed(serve: ModuleType, client: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Puts stand-ins in the place of servers. Returns (port, number) of each load of one request at a time."""
    timed: list[tuple[int, int]] = []

    class Server:
        start_seconds = 1.0
        setting, options = "", ()

        def __init__(self, mode: str, *_: object) -> None:
            self.mode, self.port = mode, {"off": 1, "on": 2}[mode]
            started.append(len(timed))

        ready = end = lambda self, *_: None
        log_numbers = dict

        def layers_on_oxmoe(self) -> list[tuple[int, int]]:
            return [(4, 4)] if self.mode == "on" else []

    class Load:
        def run(self, port: int, requests: list[Any], concurrency: int, stream: bool) -> tuple[list[Any], float]:
            if concurrency == 1:
                timed.append((port, len(timed)))
            seconds = float(len(timed))
            return [client.Answer([1] * request.new, 1.0, 0.5, [0.25, 0.5]) for request in requests], seconds

        def close(self) -> None: ...

    started: list[int] = []
    monkeypatch.setattr(serve, "Server", Server)
    folders: list[tuple[Path, int]] = []

    def checkpoint(folder: Path, *_: Any) -> None:
        folders.append((folder, folder.parents[1].stat().st_mode & 0o777))

    monkeypatch.setattr(serve, "make_checkpoint", checkpoint)
    monkeypatch.setattr(serve, "started", started, raising=False)
    monkeypatch.setattr(serve, "folders", folders, raising=False)
    monkeypatch.setattr(serve, "swapped", lambda *_: None)
    monkeypatch.setattr(client, "Load", Load)
    monkeypatch.setattr(client, "chat", lambda port: {})
    monkeypatch.setattr(client, "logprobs", lambda port, prompts, at_once=1: [[-float(at_once)] for _ in prompts])
    monkeypatch.setattr(client, "aborted", lambda port, prompt: {})
    monkeypatch.setattr(client, "post", lambda *_: {"success": True})
    return timed


@pytest.mark.parametrize("how", ["together", "alone"])
def test_rounds_of_two_servers_alternate(
    serve: ModuleType, timed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    """With both servers up, rounds follow each other in turn; each load's numbers are those of all its rounds."""
    together = how == "together"
    arguments = [
        "serve.py",
        str(tmp_path / "out"),
        "--cells",
        "qwen",
        "--rounds",
        "3",
        "--work",
        str(tmp_path / "work"),
    ]
    # A file that somebody else has left in the folder stays.
    (tmp_path / "work").mkdir(mode=0o755)
    (tmp_path / "work" / "kept").touch()
    monkeypatch.setattr(sys, "argv", arguments + ["--together"] * together)
    # The answers of these servers do not change with their weights, which is wrong.
    assert serve.main() == 1
    # The checkpoints' folder was new and nobody else's, and it is gone.
    (made, mode), *others = serve.folders
    assert others == [] and made.parents[2] == tmp_path / "work" and mode == 0o700
    assert os.listdir(tmp_path / "work") == ["kept"]
    assert [port for port, _ in timed] == ([1, 2, 1, 2, 1, 2] if together else [1, 1, 1, 2, 2, 2])
    rows = {row["mode"]: row for row in map(json.loads, (tmp_path / "out" / "serve.jsonl").read_text().splitlines())}
    assert rows["compared"]["wrong"] == [
        "off: no answer changed with the weights",
        "on: no answer changed with the weights",
    ]
    for mode, seconds in (("off", (1, 3, 5) if together else (1, 2, 3)), ("on", (2, 4, 6) if together else (4, 5, 6))):
        load = rows[mode]["loads"]["1"]
        tokens = load["tokens"] / 3
        assert load["seconds"] == sum(seconds) and load["requests"] == 3 * 12
        assert load["tokens_per_s_of_rounds"] == [tokens / value for value in seconds]
        assert rows[mode]["started"] == ("together" if together else "alone")
        # Eight prompts of one log-probability were asked by themselves, and then at a time.
        assert rows[mode]["logprobs_beside_others"] == {"count": 8, "median": 7, "p99": 7, "most": 7}


@pytest.mark.parametrize("ahead", [True, False])
def test_servers_of_all_cells_start_before_the_first_is_measured(
    serve: ModuleType, timed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ahead: bool
) -> None:
    arguments = ["serve.py", str(tmp_path / "out"), "--cells", "qwen-awq", "gpt", "--rounds", "1", "--together"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--work", str(tmp_path / "work"), *["--ahead"] * ahead])
    assert serve.main() == 1
    # So many loads with one request at a time were timed when each of the four servers started.
    assert serve.started == ([0, 0, 0, 0] if ahead else [0, 0, 2, 2])
    rows = list(map(json.loads, (tmp_path / "out" / "serve.jsonl").read_text().splitlines()))
    assert [row["cell"] for row in rows] == ["qwen-awq-tp1"] * 3 + ["gpt-tp1"] * 3
    assert {row["started"] for row in rows if row["mode"] != "compared"} == {"ahead" if ahead else "together"}


def test_the_rows_of_a_run_that_is_stopped_are_written(
    serve: ModuleType, client: ModuleType, timed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stopped(*_: Any) -> None:
        sys.exit(143)

    monkeypatch.setattr(client, "logprobs", stopped)
    arguments = ["serve.py", str(tmp_path / "out"), "--cells", "qwen", "--rounds", "1", "--together"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--work", str(tmp_path / "work")])
    with pytest.raises(SystemExit):
        serve.main()
    rows = list(map(json.loads, (tmp_path / "out" / "serve.jsonl").read_text().splitlines()))
    assert [row["mode"] for row in rows] == ["off", "on"] and all(row["loads"] for row in rows)
