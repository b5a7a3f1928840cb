"""serve.py OUT: runs SGLang's whole HTTP server without and with oxmoe, and measures both as a user feels them.

It runs in SGLang's environment, on a machine with a GPU (without a GPU it runs small models, for a try):

    python benches/sglang/serve.py out --cells gpt deepseek-fp8 qwen-fp8 qwen --budget 400
    python benches/sglang/serve.py out --cells qwen:2 qwen-fp8:2 --budget 280    # two ranks

A cell is a kind of checkpoint (checkpoint.py: layers of a model's sizes with random weights) and a number of ranks. For
each cell, both servers answer the same greedy requests: one at a time, 16 and 64 at a time, of mixed lengths, with
chunked prefill, beside aborted ones, and after an update of the weights. Where SGLang has no kernels for a checkpoint,
the server without oxmoe has one with the same numbers in bf16 (kinds.py). With --together both servers are up and
answer in turn, which is the way to compare their speeds: a server alone is timed on whatever the machine does then.
With --ahead the servers of all cells start at a time, before the first cell is measured, which saves time. OUT gets
serve.jsonl, a line for each server and each comparison as it comes, and the servers' logs. The status is not 0 if
something is wrong; see `judge`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import client
import sm90_layout
from judging import Seen, compared, judge, without_list
from kinds import KINDS

HERE = Path(__file__).parent
READY = "The server is fired up and ready to roll!"
VOCABULARY, LONGEST = 1024, 1800
END_LIMIT = 8.0
OPTIONS = (
    "--attention-backend triton --sampling-backend pytorch --grammar-backend none --mem-fraction-static 0.5 "
    "--max-total-tokens 131072 --chunked-prefill-size 512 --cuda-graph-max-bs-decode 64"
)
NO_PREFILL_GRAPHS = "--cuda-graph-backend-prefill disabled"
# With --ahead a scheduler without requests would take a whole core from the servers that are measured.
IDLE = ["--sleep-on-idle"]


class Problem(Exception):
    """The reason why a cell stops."""


@dataclass(frozen=True)
class Cell:
    kind: str
    ranks: int

    @classmethod
    def of(cls, text: str) -> Cell:
        kind, _, ranks = text.partition(":")
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(f"cell {text}: the kind is one of {', '.join(KINDS)}, got {kind}")
        return cls(kind, int(ranks or 1))

    def __str__(self) -> str:
        return f"{self.kind}-tp{self.ranks}"


class Deadline:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()

    def check(self, what: str) -> None:
        if self.left() <= 0:
            raise Problem(f"the budget of time was spent before {what}")


class Server:
    """A server in its own process group, with its own caches of compiled kernels."""

    def __init__(self, mode: str, cell: Cell, checkpoint: Path, out: Path, arguments: argparse.Namespace) -> None:
        self.mode, self.log = mode, out / f"{cell}-{mode}.log"
        self.setting = ("moe,allreduce" if arguments.allreduce and cell.ranks > 1 else "moe") if mode == "on" else ""
        self.port = _free_port()
        self.options = [*shlex.split(arguments.server_args), "--incremental-streaming-output"]
        if not arguments.prefill_graphs:
            self.options += shlex.split(NO_PREFILL_GRAPHS)
        self.options += ["--disable-radix-cache"] if arguments.no_radix_cache else []
        if cell.ranks > 1:
            self.options += ["--tp-size", str(cell.ranks)]
            self.options += ["--flashinfer-allreduce-fusion-backend", "auto"] if arguments.allreduce else []
        kind = KINDS[cell.kind]
        self.options += [*kind.options, *(kind.on if mode == "on" else kind.off)]
        self.options += IDLE if arguments.ahead else []
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *self.options]
        caches = checkpoint.parent / f"caches-{cell}-{mode}"
        caches.mkdir()
        environment = {**os.environ, **kind.environment, "OXMOE_SGLANG": self.setting, "HF_HUB_OFFLINE": "1"}
        environment.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", "0")
        environment["TRITON_CACHE_DIR"] = str(caches / "triton")
        if mode == "on" and kind.sm90_layout:
            sm90_layout.install(caches / "plugin")
            path = [str(caches / "plugin"), os.environ.get("PYTHONPATH")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        self._start = time.monotonic()
        self.start_seconds: float | None = None
        self.start_limit = arguments.start_limit
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        threading.Thread(target=self._watch, daemon=True).start()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def _watch(self) -> None:
        """Notes the time of the start, also for a server that nobody waits for yet."""
        while self.process.poll() is None:
            if READY in self.text():
                self.start_seconds = time.monotonic() - self._start
                return
            time.sleep(0.1)

    def ready(self, deadline: Deadline) -> None:
        until = time.monotonic() + min(self.start_limit, deadline.left())
        while self.start_seconds is None:
            if self.process.poll() is not None:
                raise Problem(f"the server ended with {self.process.returncode}: {self._reason()}")
            if "Scheduler hit an exception" in self.text():
                time.sleep(0.5)
                raise Problem(f"the scheduler ended: {self._reason()}")
            if time.monotonic() > until:
                raise Problem(f"the server was not up after {time.monotonic() - self._start:.0f} s: {self._reason()}")
            time.sleep(0.1)

    def _reason(self) -> str:
        """Returns the log's last line that names an error, or its last line."""
        lines = [line for line in self.text().splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return (errors or lines or ["no line in its log"])[-1][:500]

    def end(self) -> None:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sign)
            except ProcessLookupError:
                break
            try:
                self.process.wait(END_LIMIT)
            except subprocess.TimeoutExpired:
                continue

    def layers_on_oxmoe(self) -> list[tuple[int, int]]:
        """Returns (layers that ran on oxmoe, all layers), as each rank's log says after its warm-up."""
        found = re.findall(r"oxmoe: (\d+) of (\d+) MoE layers ran on oxmoe", self.text())
        return [(int(ran), int(of)) for ran, of in found]

    def log_numbers(self) -> dict[str, Any]:
        """Returns what SGLang says of its start: seconds of loading and of capturing graphs, the largest of all
        ranks."""
        text = self.text()
        seconds: dict[str, float] = {}
        for name, value in re.findall(r"(Load weight|Capture [\w ]*?)\s?end\. .*?elapsed=([\d.]+) s", text):
            seconds[name.strip()] = max(seconds.get(name.strip(), 0.0), float(value))
        load = seconds.pop("Load weight", None)
        untuned = bool(re.search(r"[Uu]sing default MoE kernel config|Performance might be sub-optimal", text))
        return {"load_s": load, "capture_s": seconds, "untuned_moe_config": untuned}


def _free_port() -> int:
    """Returns a port below those that systems give away; SGLang takes further ports at a distance from it."""
    for port in range(20000 + os.getpid() % 500, 32000, 1009):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _given:
            _given.add(port)
            return port
    raise RuntimeError("no free port between 20000 and 32000")


_given: set[int] = set()


def make_checkpoint(folder: Path, kind: str, layers: int) -> None:
    command = [sys.executable, str(HERE / "checkpoint.py"), str(folder), kind, str(layers)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def swapped(folder: Path, other: Path) -> None:
    """Writes the checkpoint with its first two layers in each other's place: other weights of the same sizes."""
    from safetensors.torch import load_file, save_file

    other.mkdir()
    for file in folder.iterdir():
        if file.name not in ("layer0.safetensors", "layer1.safetensors"):
            os.link(file, other / file.name)
    for old, new in ((0, 1), (1, 0)):
        tensors = load_file(folder / f"layer{old}.safetensors")
        renamed = {name.replace(f"layers.{old}.", f"layers.{new}."): value for name, value in tensors.items()}
        save_file(renamed, other / f"layer{new}.safetensors")


class Measurement:
    def __init__(self, load: client.Load, requests: int, updates: dict[str, Path], deadline: Deadline) -> None:
        """updates: for each server the folder of other weights, if it is to load them."""
        self.load, self.updates, self.deadline = load, updates, deadline
        few = max(requests // 3, 4)
        self.loads = {
            "1": (client.mix(12, 1, VOCABULARY, LONGEST), 1, True),
            "16": (client.mix(few, 16, VOCABULARY, LONGEST), 16, True),
            "64": (client.mix(requests, 64, VOCABULARY, LONGEST), 64, False),
        }
        self.warm = client.mix(few, 5, VOCABULARY, LONGEST)
        self.probe = client.mix(8, 7, VOCABULARY, 200)

    def requests(self, name: str) -> list[client.Request]:
        return self.probe if name in ("updated", "beside aborted") else self.loads[name.removesuffix(" again")][0]

    def warmed(self, server: Server, seen: Seen) -> None:
        """Sends the first requests, which compile kernels and are not timed."""
        seen.row["chat"] = client.chat(server.port)
        self.load.run(server.port, self.warm, 16, False)

    def round(self, server: Server, seen: Seen) -> None:
        """Sends every load once; a round's answers and seconds are added to those of the rounds before."""
        for name, (requests, concurrency, stream) in self.loads.items():
            self.deadline.check(f"{concurrency} requests at a time")
            answers, seconds = self.load.run(server.port, requests, concurrency, stream)
            seen.tokens.setdefault(name, [answer.tokens for answer in answers])
            timed = seen.timed.setdefault(name, [])
            timed.append((answers, seconds))
            together = [answer for answers, _ in timed for answer in answers]
            row = client.numbers(together, sum(seconds for _, seconds in timed))
            rounds = [client.numbers(answers, seconds)["tokens_per_s"] for answers, seconds in timed]
            loads = seen.row.setdefault("loads", {})
            loads[name] = {"concurrency": concurrency, **row, "tokens_per_s_of_rounds": rounds}

    def rest(self, server: Server, seen: Seen) -> None:
        """Measures what is not timed: how much a server's own tokens and log-probabilities change with what else is in
        a batch; log-probabilities; requests beside aborted ones."""
        answers, _ = self.load.run(server.port, self.loads["16"][0], 16, False)
        seen.tokens["16 again"] = [answer.tokens for answer in answers]
        seen.row["same_server_twice"] = without_list(client.compare(seen.tokens["16 again"], seen.tokens["16"]))
        prompts = [request.prompt for request in self.probe]
        seen.logprobs = client.logprobs(server.port, prompts)
        together = client.logprobs(server.port, prompts, len(prompts))
        seen.row["logprobs_beside_others"] = client.spread(together, seen.logprobs)
        self._aborted(server, seen)

    def _aborted(self, server: Server, seen: Seen) -> None:
        ended: list[Any] = []

        def abort() -> None:
            try:
                ended.append(client.aborted(server.port, self.probe[0].prompt))
            except Exception as error:
                ended.append(error)

        thread = threading.Thread(target=abort)
        thread.start()
        answers, _ = self.load.run(server.port, self.probe, 8, False)
        thread.join()
        if isinstance(ended[0], Exception):
            raise Problem(f"aborted requests: {ended[0]}")
        seen.row["aborted"] = ended[0]
        seen.tokens["beside aborted"] = [answer.tokens for answer in answers]

    def updated(self, server: Server, seen: Seen) -> None:
        """Asks after /update_weights_from_disk: a checkpoint with other weights, and its answers."""
        self.deadline.check("the update of weights")
        start = time.monotonic()
        answer = client.post(server.port, "/update_weights_from_disk", {"model_path": str(self.updates[server.mode])})
        if not answer.get("success"):
            raise Problem(f"the update of weights: {answer}")
        answers, _ = self.load.run(server.port, self.probe, 8, False)
        seen.tokens["updated"] = [answer.tokens for answer in answers]
        seen.updated = True
        changed = client.compare(seen.tokens["updated"], seen.tokens["beside aborted"])
        seen.row["update"] = {"seconds": time.monotonic() - start, "answers_that_changed": len(changed["divergences"])}


def machine() -> dict[str, Any]:
    """Says where this runs: card, driver and versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
        names, drivers = zip(*(line.split(", ") for line in lines), strict=True)
        found: dict[str, Any] = {"gpu": names[0], "gpus": len(names), "driver": drivers[0]}
    except (OSError, subprocess.CalledProcessError, ValueError):
        found = {"gpu": None, "gpus": 0, "driver": None}
    for package in ("torch", "triton", "sglang", "sglang-kernel", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


@dataclass
class Begun:
    """A cell whose checkpoints are made, and its servers."""

    cell: Cell
    work: Path
    checkpoints: dict[str, Path]  # of each server
    measurement: Measurement
    servers: dict[str, Server] = field(default_factory=dict)


class Run:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.deadline = Deadline(arguments.budget)
        self.load = client.Load()
        self.always = {"commit": arguments.commit, **machine()}
        self.wrong: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def write(self, row: dict[str, Any]) -> None:
        row = {**row, **self.always, "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
        self.rows.append(row)
        with (self.arguments.out / "serve.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def layers(self, cell: Cell) -> int:
        return KINDS[cell.kind].layers if self.arguments.whole else self.arguments.layers

    def begin(self, cell: Cell) -> Begun:
        """Makes a cell's checkpoints, and starts its servers if both are to be up."""
        work = self.arguments.work / str(cell)
        work.mkdir(parents=True)
        start, kind = time.monotonic(), KINDS[cell.kind]
        checkpoints = dict.fromkeys(("off", "on"), work / "model")
        make_checkpoint(checkpoints["on"], cell.kind, self.layers(cell))
        if kind.without:
            checkpoints["off"] = work / "without"
            make_checkpoint(checkpoints["off"], kind.without, self.layers(cell))
        updates = {}
        if kind.updates:
            others = {folder: folder.with_name(f"other-{folder.name}") for folder in checkpoints.values()}
            for folder, other in others.items():
                swapped(folder, other)
            updates = {mode: others[folder] for mode, folder in checkpoints.items()}
        _say(f"{cell}: checkpoints after {time.monotonic() - start:.0f} s, {self.deadline.left():.0f} s left")
        measurement = Measurement(self.load, self.arguments.requests, updates, self.deadline)
        begun = Begun(cell, work, checkpoints, measurement)
        if self.arguments.together:
            for mode in ("off", "on"):
                begun.servers[mode] = Server(mode, cell, checkpoints[mode], self.arguments.out, self.arguments)
        return begun

    def cell(self, begun: Begun) -> None:
        cell, work, measurement, servers = begun.cell, begun.work, begun.measurement, begun.servers
        of = {"cell": str(cell), "kind": cell.kind, "label": f"{KINDS[cell.kind].label}, TP{cell.ranks}"}
        seen = {mode: Seen(mode, {**of, "mode": mode}) for mode in ("off", "on")}
        comparison: dict[str, Any] = {}
        try:
            if self.arguments.together:
                # Both servers are up. Their rounds alternate, so that both see the same machine, and both are asked
                # about the places where their answers part.
                self._measure(servers, seen, measurement)
                self._compare(servers, seen, measurement, comparison)
            for mode in ("off", "on"):
                if mode not in servers:
                    servers[mode] = Server(mode, cell, begun.checkpoints[mode], self.arguments.out, self.arguments)
                    self._measure({mode: servers[mode]}, seen, measurement)
                    if mode == "on":
                        self._compare({mode: servers[mode]}, seen, measurement, comparison)
                self._finish(cell, servers[mode], seen[mode], measurement)
        finally:
            # The rows of a run that is stopped are written, too.
            for mode, server in servers.items():
                self._write_server(cell, server, seen[mode])
                server.end()
            shutil.rmtree(work, ignore_errors=True)
        if comparison and all(each.updated for each in seen.values()):
            after = client.compare(seen["on"].tokens["updated"], seen["off"].tokens["updated"])
            comparison["tokens"]["updated"] = {**after, "divergences": after["divergences"][:12]}
        layers = self.layers(cell) - KINDS[cell.kind].dense
        wrong = judge(layers, seen["off"], seen["on"], comparison)
        self.wrong += [f"{cell}: {text}" for text in wrong]
        self.write({**of, "mode": "compared", "wrong": wrong, **comparison})

    def _measure(self, servers: dict[str, Server], seen: dict[str, Seen], measurement: Measurement) -> None:
        self._each(servers, seen, lambda mode: servers[mode].ready(self.deadline))
        self._each(servers, seen, lambda mode: measurement.warmed(servers[mode], seen[mode]))
        for _ in range(self.arguments.rounds):
            self._each(servers, seen, lambda mode: measurement.round(servers[mode], seen[mode]))
        self._each(servers, seen, lambda mode: measurement.rest(servers[mode], seen[mode]))

    def _compare(
        self, servers: dict[str, Server], seen: dict[str, Seen], measurement: Measurement, comparison: dict[str, Any]
    ) -> None:
        """Fills `comparison` with how the answers of both servers compare, if both gave all of them."""
        if any("error" in each.row or not each.logprobs for each in seen.values()):
            return
        ports = {mode: server.port for mode, server in servers.items()}

        def compare(_: str) -> None:
            comparison.update(compared(seen["off"], seen["on"], ports, measurement.requests))

        self._each({"on": servers["on"]}, seen, compare)

    def _each(self, servers: dict[str, Server], seen: dict[str, Seen], step: Callable[[str], None]) -> None:
        """Runs a step for each server in turn. A server whose step fails has no further steps, and its row says why."""
        for mode in servers:
            if "error" not in seen[mode].row:
                try:
                    step(mode)
                except Exception as error:
                    self._failed(seen[mode], error)

    def _failed(self, mine: Seen, error: Exception) -> None:
        mine.row["error"] = f"{type(error).__name__}: {error}"[:800]
        if not isinstance(error, Problem | RuntimeError):
            traceback.print_exc()

    def _finish(self, cell: Cell, server: Server, mine: Seen, measurement: Measurement) -> None:
        """Updates the server's weights, writes its row and ends it."""
        if "error" not in mine.row and KINDS[cell.kind].updates:
            self._updated(server, mine, measurement)
        self._write_server(cell, server, mine)
        server.end()
        _say(f"{cell} {server.mode}: {mine.row.get('error') or 'measured'}, {self.deadline.left():.0f} s left")

    def _write_server(self, cell: Cell, server: Server, mine: Seen) -> None:
        """Writes a server's row, once."""
        if mine.written:
            return
        started = "ahead" if self.arguments.ahead else "together" if self.arguments.together else "alone"
        mine.row |= {"setting": server.setting, "options": server.options, "ranks": cell.ranks, "started": started}
        mine.row |= {"layers": self.layers(cell), "start_s": server.start_seconds}
        mine.row |= {"layers_on_oxmoe": [list(pair) for pair in server.layers_on_oxmoe()], **server.log_numbers()}
        self.write(mine.row)
        mine.written = True

    def _updated(self, server: Server, mine: Seen, measurement: Measurement) -> None:
        """Updates the server's weights. Not every part of SGLang can do so (GPT-OSS on triton_kernels): that is no
        error of the rest."""
        try:
            measurement.updated(server, mine)
        except (OSError, RuntimeError, Problem) as error:
            mine.row["update_error"] = f"{type(error).__name__}: {error}"[:500]

    def all(self) -> None:
        begun: dict[Cell, Begun] = {}
        try:
            if self.arguments.ahead:
                for cell in self.arguments.cells:
                    self._guarded(cell, lambda cell=cell: begun.update({cell: self.begin(cell)}))
                self._all_up([server for cell in begun.values() for server in cell.servers.values()])
            for cell in self.arguments.cells:
                if self.deadline.left() < self.arguments.least:
                    self.wrong.append(f"{cell}: not begun, {self.deadline.left():.0f} s were left")
                elif not self.arguments.ahead or cell in begun:
                    self._guarded(cell, lambda cell=cell: self.cell(begun.get(cell) or self.begin(cell)))
        finally:
            for cell in begun.values():
                for server in cell.servers.values():
                    server.end()
        self.load.close()

    def _all_up(self, servers: list[Server]) -> None:
        """Waits until no server starts any more: a start would disturb what is timed."""
        until = time.monotonic() + min(self.arguments.start_limit, self.deadline.left())
        while time.monotonic() < until and any(
            server.start_seconds is None and server.process.poll() is None for server in servers
        ):
            time.sleep(0.1)

    def _guarded(self, cell: Cell, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            traceback.print_exc()
            self.wrong.append(f"{cell}: {type(error).__name__}: {error}")


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--cells", type=Cell.of, nargs="+", default=[Cell(kind, 1) for kind in KINDS])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--whole", action="store_true", help="as many layers as the model has")
    parser.add_argument("--requests", type=int, default=200, help="of the load with 64 at a time")
    parser.add_argument("--rounds", type=int, default=3, help="how often each load is timed")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for everything")
    parser.add_argument("--least", type=float, default=60.0, help="seconds without which no cell is begun")
    parser.add_argument(
        "--start-limit", type=float, default=300.0, help="seconds of a start; SGLang compiles Marlin's for minutes"
    )
    parser.add_argument("--together", action="store_true", help="both servers of a cell are up, rounds alternate")
    parser.add_argument("--ahead", action="store_true", help="with --together: all cells' servers start at a time")
    parser.add_argument("--no-radix-cache", action="store_true", help="SGLang 0.5.23's needs torch 2.14")
    parser.add_argument("--prefill-graphs", action="store_true", help="with CUDA graphs of the prefill")
    parser.add_argument(
        "--allreduce", action="store_true", help="of several ranks, with the part allreduce; needs flashinfer"
    )
    parser.add_argument("--server-args", default=OPTIONS, help="options of every server")
    parser.add_argument("--commit", default=None, help="of oxmoe, for the rows")
    parser.add_argument(
        "--work", type=Path, help="where a folder for checkpoints and caches is made, which is removed at the end"
    )
    arguments = parser.parse_args()
    if arguments.ahead and not arguments.together:
        parser.error("--ahead needs --together")
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # SIGTERM ends the servers, too, and not only the client.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.work is not None:
        arguments.work = arguments.work.resolve()
        arguments.work.mkdir(parents=True, exist_ok=True)
    # The folder is new and this user's alone (0700): a name that others know could be theirs already.
    with tempfile.TemporaryDirectory(prefix="oxmoe-serve-", dir=arguments.work, ignore_cleanup_errors=True) as folder:
        arguments.work = Path(folder)
        run = Run(arguments)
        run.all()
    import serve_table

    _say(serve_table.render(run.rows))
    for text in run.wrong:
        _say(f"WRONG {text}")
    return 1 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
