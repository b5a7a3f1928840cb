"""SGLang's own server as a process on a CPU: it is started, asked over HTTP, and ended."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import forked
import oxmoe

HERE = Path(__file__).parent
READY = "The server is fired up and ready to roll!"
# Limits in seconds. A start takes 15 to 20 on two quiet cores.
START_LIMIT, ANSWER_LIMIT, END_LIMIT = 300.0, 120.0, 30.0

_METADATA = "Metadata-Version: 2.1\nName: sglang-cpu-platform\nVersion: 1\n"
_ENTRY_POINTS = """[sglang.srt.platforms]
cpu = sglang_cpu_platform:activate

[sglang.srt.plugins]
cpu = sglang_cpu_platform:register
"""


@dataclass(frozen=True)
class Release:
    """An installed SGLang, by folders that go before the environment's packages."""

    version: str
    folders: tuple[Path, ...] = ()
    # Whether the release has log-probabilities of prompts without a GPU.
    prompt_logprobs: bool = True
    end_status: int = 0


NEWEST = Release("0.5.23")
# The oldest release. When it has drained its requests, it kills all of its processes, and itself too.
OLDEST = Release(
    "0.5.12.post1",
    (Path(sys.prefix) / "sglang-0.5.12.post1", HERE / "path_0_5_12_post1"),
    prompt_logprobs=False,
    end_status=-signal.SIGKILL,
)


@dataclass(frozen=True)
class Answer:
    """A server's tokens, and log-probabilities that end with those of the tokens; before them are the prompt's, if
    asked for."""

    tokens: list[int]
    logprobs: list[float]


def _free_port() -> int:
    """Returns a port below those that systems give away; SGLang takes further ports at a distance from it, up to
    10000."""
    draw = random.SystemRandom()
    for _ in range(100):
        port = draw.randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError("no free port between 20000 and 32000")


def _checkout() -> list[Path]:
    """Returns the folder of a package that is tested in its checkout, not where it is installed."""
    folder = Path(oxmoe.__file__).parents[1]
    return [] if str(folder) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")) else [folder]


def _two_cores() -> str:
    """Returns one core for each of two ranks, as SGLang wants them on a CPU; the same core if there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    return f"{cores[0]}|{cores[-1]}"


class Server:
    """A server in a process group of its own, which finds oxmoe as a user's does: by its installed entry points."""

    def __init__(
        self,
        folder: Path,
        checkpoint: Path,
        *options: str,
        setting: str = "moe",
        release: Release = NEWEST,
        ranks: int = 1,
        spares: bool = True,
    ) -> None:
        self.log = folder / "server.log"
        self.release = release
        self.port = _free_port()
        information = folder / "sglang_cpu_platform-1.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(_METADATA)
        (information / "entry_points.txt").write_text(_ENTRY_POINTS)
        path = [*release.folders, folder, HERE / "path", *_checkout()]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "OXMOE_"))},
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "OXMOE_SGLANG": setting,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "RAYON_NUM_THREADS": "1",
            **({"SGLANG_CPU_OMP_THREADS_BIND": _two_cores()} if ranks == 2 else {}),
        }
        command = ["sglang.launch_server", "--model-path", str(checkpoint)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu", "--dtype", "bfloat16"]
        command += ["--tp-size", str(ranks)]
        # A radix cache would need the torch that SGLang pins; an idle scheduler would take a whole core.
        command += ["--disable-radix-cache", "--sleep-on-idle", "--max-total-tokens", "16384"]
        command += ["--sampling-backend", "pytorch", "--grammar-backend", "none", *options]
        self.process: subprocess.Popen[bytes] | forked.Started
        with self.log.open("w") as log:
            if spares:
                # Spare processes become a scheduler for each rank, and the detokenizer.
                self.process = forked.start(
                    HERE / "spares.py",
                    str(ranks + 1),
                    *command,
                    env=environment,
                    output=log,
                    cwd=folder,
                    packages=forked.SGLANG,
                    before={
                        "PYTHONPATH": os.pathsep.join(map(str, release.folders)),
                        **{name: environment[name] for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")},
                    },
                )
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", *command],
                    env=environment,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        # The guard ends the group when its input ends: a test run that is killed leaves no server behind.
        self.guard = subprocess.Popen(
            ["/bin/sh", "-c", f"cat; kill -s KILL -- -{self.process.pid}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    # Life

    def ready(self) -> Server:
        """Waits for SGLang's own warm-up request. Raises AssertionError with the log's end if the start ends or
        hangs."""
        until = time.monotonic() + START_LIMIT
        while READY not in self.log.read_text(errors="replace"):
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}\n{self.tail()}"
            assert time.monotonic() < until, f"the server was not up after {START_LIMIT:.0f} s\n{self.tail()}"
            time.sleep(0.1)
        return self

    def failed_start(self) -> int:
        """Waits for the end of a start that must be refused. Returns its exit status."""
        until = time.monotonic() + START_LIMIT
        while self.process.poll() is None:
            assert READY not in self.log.read_text(errors="replace"), f"the server started\n{self.tail()}"
            assert time.monotonic() < until, f"the start had not ended after {START_LIMIT:.0f} s\n{self.tail()}"
            time.sleep(0.1)
        return self.process.returncode

    def end(self) -> None:
        """Ends the server as a user does, and checks that it ends well: its status, no process left, no traceback."""
        try:
            running = self.process.poll() is None
            assert running, f"the server had ended with {self.process.returncode}\n{self.tail()}"
            self.process.send_signal(signal.SIGTERM)
            status = self.process.wait(END_LIMIT)
            until = time.monotonic() + END_LIMIT
            while self._group_lives():
                assert time.monotonic() < until, f"processes of the server are left\n{self.tail()}"
                time.sleep(0.05)
            assert status == self.release.end_status, f"the server ended with {status}\n{self.tail()}"
            served = self.log.read_text(errors="replace").partition(READY)[2]
            assert "Traceback" not in served, self.tail()
        finally:
            self.kill()

    def kill(self) -> None:
        """Kills all that is left of the server's process group."""
        self.guard.communicate()
        self.process.wait(END_LIMIT)

    def _group_lives(self) -> bool:
        """Whether a process of the group runs; one that nobody has waited for does not."""
        for process in psutil.process_iter(["status"]):
            try:
                if os.getpgid(process.pid) == self.process.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                    return True
            except ProcessLookupError:
                continue
        return False

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def tail(self) -> str:
        return "\n".join([f"--- end of {self.log}", *self.lines()[-60:]])

    # Requests

    def _request(self, path: str, body: dict[str, Any]) -> urllib.request.Request:
        header = {"Content-Type": "application/json"}
        return urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), header)

    def post(self, path: str, body: dict[str, Any], *, limit: float = ANSWER_LIMIT) -> Any:
        try:
            with urllib.request.urlopen(self._request(path, body), timeout=limit) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read().decode()[:500]}\n{self.tail()}") from error
        except OSError as error:
            raise AssertionError(f"{path}: {error}\n{self.tail()}") from error
        return json.loads(text) if text else None

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=ANSWER_LIMIT) as answer:
            return str(answer.read().decode())

    def first_line(self, path: str, body: dict[str, Any]) -> bytes:
        """Returns the first line of an answer, and then closes the connection."""
        with urllib.request.urlopen(self._request(path, body), timeout=ANSWER_LIMIT) as answer:
            return answer.readline()

    def generate(self, prompts: list[list[int]], new: int | list[int] = 16) -> list[Answer]:
        """Returns greedy tokens for prompts of ids, all in one request."""
        counts = [new] * len(prompts) if isinstance(new, int) else new
        sampling = [{"temperature": 0, "max_new_tokens": count, "ignore_eos": True} for count in counts]
        body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
        if self.release.prompt_logprobs:
            body["logprob_start_len"] = 0
        answers = []
        for answer, count in zip(self.post("/generate", body), counts, strict=True):
            meta = answer["meta_info"]
            assert len(answer["output_ids"]) == count, answer
            # The first token has no log-probability, because nothing is before it.
            rows = [*meta.get("input_token_logprobs", [])[1:], *meta["output_token_logprobs"]]
            answers.append(Answer(answer["output_ids"], [row[0] for row in rows]))
        return answers

    def generate_beside_each_other(self, prompts: list[list[int]], new: list[int]) -> list[Answer]:
        """Returns greedy tokens with a request for each prompt, all sent at a time."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt, count: self.generate([prompt], [count])[0], prompts, new))

    def update(self, checkpoint: Path) -> None:
        """Calls /update_weights_from_disk."""
        answer = self.post("/update_weights_from_disk", {"model_path": str(checkpoint)})
        assert answer["success"], f"{answer}\n{self.tail()}"
