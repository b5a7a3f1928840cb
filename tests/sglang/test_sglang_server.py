"""Whole SGLang servers on a CPU: HTTP, tokenizer, scheduler, loader and model with oxmoe's CPU kernels, without a GPU.

A class owns its servers. `make test` runs this file on its own and gives each class to one process (--dist loadscope),
so that no server is started twice and as many start at a time as there are processes.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from sglang_cpu.checkpoints import LAYERS, Reference, dequantised, make
from sglang_cpu.launch import OLDEST, Answer, Server

pytestmark = pytest.mark.server
needs_oldest = pytest.mark.skipif(
    not OLDEST.folders[0].is_dir(), reason=f"SGLang {OLDEST.version} is not in {OLDEST.folders[0].name}"
)

_random = random.Random(3)
PROMPTS = [[_random.randrange(3, 1024) for _ in range(length)] for length in (1, 2, 9, 33, 64, 150)]
# Median distance of log-probabilities from fp32 by kind of checkpoint. On an idle CPU it is a quarter to a half of it;
# a factor of 1.1 in w2 makes it 0.036 or more (GPT-OSS: 0.011), gate and up swapped 0.3 (0.1), stale scales 0.48.
BARS = {
    **{"qwen": 0.02, "qwen-int4": 0.02, "qwen-awq": 0.02, "qwen-gptq": 0.02, "qwen-nvfp4": 0.02, "gpt": 0.01},
    **{"qwen-fp8": 0.03, "qwen-fp8-tensor": 0.06, "glm-fp8-channel": 0.06, "qwen-fp8-static": 0.06},
    "qwen-modelopt-fp8": 0.06,
    "llama4": 0.02,
}

Checkpoints = Callable[[str, int], Path]
Start = Callable[..., Server]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Returns a function that makes a checkpoint of a kind: number 0 or 1, which differ in every weight."""
    made: dict[tuple[str, int], Path] = {}

    def of(kind: str, number: int) -> Path:
        if (kind, number) not in made:
            made[kind, number] = make(tmp_path_factory.mktemp(f"{kind}-{number}-"), kind, 5 + 2 * number)
        return made[kind, number]

    return of


@pytest.fixture(scope="class")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts servers, which end with the class. One that does not end well is an error of the class's last test."""
    started: list[Server] = []
    up: list[Server] = []

    def new(checkpoint: Path, *options: str, **how: object) -> Server:
        started.append(Server(tmp_path_factory.mktemp("server"), checkpoint, *options, **how))
        up.append(started[-1].ready())
        return up[-1]

    try:
        yield new
        with ThreadPoolExecutor() as pool:
            list(pool.map(Server.end, up))
    finally:
        for server in started:
            server.kill()


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def assert_near(answers: list[Answer], folder: Path, kind: str) -> None:
    """Compares a server's log-probabilities of PROMPTS and of its own tokens with transformers' model in fp32.

    The median counts: if two experts are nearly as good as each other, another choice is no error, but far away.
    """
    reference = Reference(folder)
    distances = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = reference.logprobs(prompt + answer.tokens)[-len(answer.logprobs) :]
        distances.append((torch.tensor(answer.logprobs) - expected).abs())
    median = float(torch.cat(distances).median())
    assert median < BARS[kind], [float(rows.median()) for rows in distances]


def assert_runs_on_oxmoe(server: Server) -> None:
    """The server's log says once before the first request what it will do, and after the warm-up what it did."""
    lines = server.lines()
    through = f"in SGLang {server.release.version}: MoE layers run on oxmoe through --quantization oxmoe"
    for said in (through, f"oxmoe: {LAYERS} of {LAYERS} MoE layers ran on oxmoe"):
        assert sum(said in line for line in lines) == 1, server.tail()
    assert not any("not yet: " in line for line in lines)


def assert_counts_calls(server: Server, ranks: int) -> None:
    """The server's metrics have the calls of each rank, a few seconds after they were made."""
    until = time.monotonic() + 60
    while True:
        counts = dict(
            re.findall(r'^oxmoe_calls_total\{function="moe",rank="(\d+)"\} (\S+)$', server.get("/metrics"), re.M)
        )
        if len(counts) == ranks and all(float(count) >= LAYERS for count in counts.values()):
            return
        assert time.monotonic() < until, f"{counts}\n{server.tail()}"
        time.sleep(0.5)


# bf16: SGLang alone, with oxmoe, with two ranks


@pytest.fixture(scope="class")
def on(start: Start, checkpoint: Checkpoints) -> Server:
    """Starts this server as users do, each of whose processes imports everything by itself."""
    return start(checkpoint("qwen", 0), "--quantization", "oxmoe", spares=False)


@pytest.fixture(scope="class")
def off_and_fresh(start: Start, checkpoint: Checkpoints) -> tuple[Server, list[Answer]]:
    """Runs SGLang alone. Returns it, with its answers on the second checkpoint, before it was updated to the first
    one."""
    off = start(checkpoint("qwen", 1), setting="")
    fresh = off.generate(PROMPTS)
    off.update(checkpoint("qwen", 0))
    return off, fresh


class TestBf16:
    def test_log_probabilities(self, on: Server, checkpoint: Checkpoints) -> None:
        assert_near(on.generate(PROMPTS), checkpoint("qwen", 0), "qwen")
        assert_runs_on_oxmoe(on)

    def test_tokens_are_those_of_sglang(self, on: Server, off_and_fresh: tuple[Server, list[Answer]]) -> None:
        off, _ = off_and_fresh
        assert tokens(on.generate(PROMPTS)) == tokens(off.generate(PROMPTS))
        assert not any("oxmoe" in line for line in off.lines())

    def test_update(self, on: Server, off_and_fresh: tuple[Server, list[Answer]], checkpoint: Checkpoints) -> None:
        _, fresh = off_and_fresh
        before = on.generate(PROMPTS)
        on.update(checkpoint("qwen", 1))
        after = on.generate(PROMPTS)
        on.update(checkpoint("qwen", 0))
        assert tokens(after) == tokens(fresh) != tokens(before)
        assert_near(after, checkpoint("qwen", 1), "qwen")
        assert on.generate(PROMPTS) == before

    def test_two_ranks(self, on: Server, start: Start, checkpoint: Checkpoints) -> None:
        two = start(checkpoint("qwen", 0), "--quantization", "oxmoe", "--enable-metrics", ranks=2)
        assert tokens(two.generate(PROMPTS)) == tokens(on.generate(PROMPTS))
        assert_runs_on_oxmoe(two)
        assert_counts_calls(two, 2)

    def test_text_and_chat(self, on: Server) -> None:
        prompt = "<bos>user: hi\n<bos>assistant: "
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        text = on.post("/generate", {"text": prompt, "sampling_params": sampling})
        body = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 12}
        chat = on.post("/v1/chat/completions", {**body, "ignore_eos": True})
        assert chat["choices"][0]["message"]["content"] == text["text"] != ""
        assert chat["choices"][0]["finish_reason"] == "length"
        # There is a token for each byte, and one for each <bos>.
        assert chat["usage"]["prompt_tokens"] == text["meta_info"]["prompt_tokens"] == len("user: hi\nassistant: ") + 2
        assert chat["usage"]["completion_tokens"] == 12

    def test_requests_beside_each_other(self, on: Server) -> None:
        draw = random.Random(4)
        prompts = [[draw.randrange(3, 1024) for _ in range(draw.choice((1, 7, 30, 90, 200)))] for _ in range(40)]
        new = [draw.randrange(1, 24) for _ in prompts]
        one_by_one = [on.generate([prompt], [count])[0] for prompt, count in zip(prompts, new, strict=True)]
        assert tokens(on.generate_beside_each_other(prompts, new)) == tokens(one_by_one)
        assert tokens(on.generate(prompts, new)) == tokens(one_by_one)

    def test_aborted_requests(self, on: Server) -> None:
        before = on.generate(PROMPTS)
        sampling = {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True}
        body = {"input_ids": PROMPTS[2], "sampling_params": sampling}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(on.post, "/generate", {**body, "rid": "long"})
            time.sleep(0.5)
            beside = on.generate(PROMPTS)
            assert not answer.done()
            on.post("/abort_request", {"rid": "long"})
            meta = answer.result()["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert 0 < meta["completion_tokens"] < 3000
        # A client goes away after its first token.
        on.first_line("/generate", {**body, "stream": True})
        assert tokens(beside) == tokens(before)
        assert on.generate(PROMPTS) == before


# fp8 with a scale for each block: one rank, and two with half of the experts each


@pytest.fixture(scope="class")
def blocks(start: Start, checkpoint: Checkpoints) -> Server:
    return start(checkpoint("qwen-fp8", 0))


@pytest.fixture(scope="class")
def blocks_of_two_ranks(start: Start, checkpoint: Checkpoints) -> Server:
    """Starts two ranks on the other checkpoint."""
    return start(checkpoint("qwen-fp8", 1), "--ep-size", "2", ranks=2)


class TestFp8Blocks:
    def test_log_probabilities(self, blocks: Server, checkpoint: Checkpoints) -> None:
        assert_near(blocks.generate(PROMPTS), checkpoint("qwen-fp8", 0), "qwen-fp8")
        assert_runs_on_oxmoe(blocks)

    def test_expert_parallel_and_updates(
        self, blocks: Server, blocks_of_two_ranks: Server, checkpoint: Checkpoints
    ) -> None:
        one, two = blocks, blocks_of_two_ranks
        first, second = one.generate(PROMPTS), two.generate(PROMPTS)
        one.update(checkpoint("qwen-fp8", 1))
        two.update(checkpoint("qwen-fp8", 0))
        assert tokens(one.generate(PROMPTS)) == tokens(second) != tokens(first)
        assert tokens(two.generate(PROMPTS)) == tokens(first)
        assert_near(second, checkpoint("qwen-fp8", 1), "qwen-fp8")
        assert_runs_on_oxmoe(two)
        one.update(checkpoint("qwen-fp8", 0))
        assert one.generate(PROMPTS) == first


# Formats that SGLang alone has no CPU kernels for


def assert_right_and_updated(server: Server, kind: str, checkpoint: Checkpoints) -> None:
    before = server.generate(PROMPTS)
    assert_near(before, checkpoint(kind, 0), kind)
    assert_runs_on_oxmoe(server)
    server.update(checkpoint(kind, 1))
    assert_near(server.generate(PROMPTS), checkpoint(kind, 1), kind)
    server.update(checkpoint(kind, 0))
    assert server.generate(PROMPTS) == before


class TestFp8OneScale:
    def test_answers_and_update(self, start: Start, checkpoint: Checkpoints) -> None:
        server = start(checkpoint("qwen-fp8-tensor", 0))
        assert_right_and_updated(server, "qwen-fp8-tensor", checkpoint)


class TestInt4:
    def test_answers_and_update(self, start: Start, checkpoint: Checkpoints) -> None:
        assert_right_and_updated(start(checkpoint("qwen-int4", 0)), "qwen-int4", checkpoint)


# MXFP8 is not among them: without a GPU SGLang refuses blocks that are not square.
@pytest.mark.parametrize("kind", ["glm-fp8-channel", "qwen-fp8-static", "qwen-awq", "qwen-gptq", "qwen-modelopt-fp8"])
class TestOtherFormats:
    def test_answers_and_update(self, start: Start, checkpoint: Checkpoints, kind: str) -> None:
        assert_right_and_updated(start(checkpoint(kind, 0)), kind, checkpoint)


class TestGptOss:
    def test_answers_and_update(self, start: Start, checkpoint: Checkpoints) -> None:
        # The platform's attention runs under a name that SGLang lets this model have.
        server = start(checkpoint("gpt", 0), "--attention-backend", "aiter")
        assert_right_and_updated(server, "gpt", checkpoint)


class TestLlama4:
    """The router's weight goes to the input of its one expert, and the model's own loader writes the experts."""

    def test_answers_and_update(self, start: Start, checkpoint: Checkpoints) -> None:
        server = start(checkpoint("llama4", 0), "--quantization", "oxmoe")
        assert_right_and_updated(server, "llama4", checkpoint)


class TestModelOptNvfp4:
    def test_tokens_are_those_of_the_same_numbers_in_bf16(
        self, start: Start, checkpoint: Checkpoints, tmp_path: Path
    ) -> None:
        """hf_quant_config.json names the format; the update is to a checkpoint with all in config.json."""
        server = start(checkpoint("qwen-nvfp4-file", 0))
        plain = start(dequantised(checkpoint("qwen-nvfp4-file", 0), tmp_path), "--quantization", "oxmoe")
        answers = server.generate(PROMPTS)
        assert tokens(answers) == tokens(plain.generate(PROMPTS))
        assert_near(answers, checkpoint("qwen-nvfp4-file", 0), "qwen-nvfp4")
        assert_runs_on_oxmoe(server)
        server.update(checkpoint("qwen-nvfp4", 1))
        after = server.generate(PROMPTS)
        assert tokens(after) != tokens(answers)
        assert_near(after, checkpoint("qwen-nvfp4", 1), "qwen-nvfp4")


# The oldest release, and refusals


@needs_oldest
class TestOldest:
    def test_tokens_are_those_of_sglang(self, start: Start, checkpoint: Checkpoints) -> None:
        on = start(checkpoint("qwen", 0), "--quantization", "oxmoe", release=OLDEST)
        off = start(checkpoint("qwen", 0), setting="", release=OLDEST)
        answers = on.generate(PROMPTS)
        assert tokens(answers) == tokens(off.generate(PROMPTS))
        assert_right_and_updated(on, "qwen", checkpoint)


@pytest.fixture
def refused(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts a server that must end by itself with an error, and returns its log."""
    servers: list[Server] = []

    def of(checkpoint: Path, *options: str, **how: object) -> str:
        servers.append(Server(tmp_path / "server", checkpoint, *options, **how))
        assert servers[-1].failed_start() != 0
        return servers[-1].log.read_text()

    yield of
    for server in servers:
        server.kill()


class TestRefused:
    def test_a_format_without_kernels(
        self, refused: Callable[..., str], tmp_path: Path, checkpoint: Checkpoints
    ) -> None:
        folder = shutil.copytree(checkpoint("qwen", 0), tmp_path / "int8")
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "w8a8_int8"}
        (folder / "config.json").write_text(json.dumps(config))
        log = refused(folder)
        assert "OXMOE_SGLANG=moe: layer 0 (FusedMoE, W8A8Int8MoEMethod" in log, log[-3000:]
        assert "oxmoe has no kernels for its format; serve this model without moe" in log

    @needs_oldest
    def test_a_runner_that_sglang_does_not_call(self, refused: Callable[..., str], checkpoint: Checkpoints) -> None:
        """On a CPU 0.5.12.post1 gives this layer a runner of oxmoe, and then goes its own way."""
        log = refused(checkpoint("qwen", 0), "--moe-runner-backend", "deep_gemm", release=OLDEST)
        assert "oxmoe: layer 0 (FusedMoE, UnquantizedFusedMoEMethod) ran without oxmoe" in log, log[-3000:]
