"""Sends requests to an SGLang server over HTTP, and measures what a user feels: tokens, times, and how two servers
compare."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import random
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

# Lengths of the prompts of a mix, from short questions to documents that are prefilled in several chunks.
LENGTHS = (16, 48, 128, 256, 512, 1024, 1500)
SHARED = 256
# Number of client processes. One Python process would be slower than the server.
PROCESSES = 4


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    new: int


@dataclass
class Answer:
    """Greedy tokens and times in seconds: of the whole answer, until the first token (only of a stream), between the
    others."""

    tokens: list[int]
    seconds: float
    first: float | None = None
    between: list[float] = field(default_factory=list)
    cached: int = 0


def mix(count: int, seed: int, vocabulary: int, longest: int) -> list[Request]:
    """Returns requests of mixed lengths. A third of them begin with the same tokens, which a radix cache keeps."""
    draw = random.Random(seed)
    shared = [draw.randrange(3, vocabulary) for _ in range(min(SHARED, longest // 4))]
    requests = []
    for _ in range(count):
        length = min(draw.choice(LENGTHS), longest)
        start = shared if draw.random() < 1 / 3 else []
        prompt = (start + [draw.randrange(3, vocabulary) for _ in range(length)])[:longest]
        requests.append(Request(tuple(prompt), draw.randrange(16, 97)))
    return requests


def post(port: int, path: str, body: dict[str, Any], limit: float = 120.0) -> Any:
    """Returns the answer's JSON. Raises RuntimeError for another status than 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status} {text[:500].decode(errors='replace')}")
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")


def _body(request: Request, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": request.new, "ignore_eos": True}
    return {"input_ids": list(request.prompt), "sampling_params": sampling, **more}


def _whole(port: int, request: Request) -> Answer:
    start = time.perf_counter()
    answer = post(port, "/generate", _body(request))
    meta = answer["meta_info"]
    return Answer(answer["output_ids"], time.perf_counter() - start, cached=meta.get("cached_tokens") or 0)


def _streamed(port: int, request: Request) -> Answer:
    """Sends a request as a stream. It takes the times of lines as they come, and reads the lines as JSON afterwards."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    lines: list[tuple[float, bytes]] = []
    start = time.perf_counter()
    try:
        connection.request(
            "POST", "/generate", json.dumps(_body(request, stream=True)), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"/generate: {answer.status} {answer.read(500).decode(errors='replace')}")
        while line := answer.readline():
            if line.startswith(b"data:"):
                lines.append((time.perf_counter() - start, line))
    finally:
        connection.close()
    return _of_lines(lines)


def _of_lines(lines: Sequence[tuple[float, bytes]]) -> Answer:
    """Returns the answer that lines of a stream with --incremental-streaming-output make."""
    tokens: list[int] = []
    times: list[tuple[float, int]] = []
    cached = 0
    for moment, line in lines:
        text = line[5:].strip()
        if text == b"[DONE]":
            continue
        chunk = json.loads(text)
        if "error" in chunk:
            raise RuntimeError(f"/generate: {chunk['error']}")
        if chunk["output_ids"]:
            tokens += chunk["output_ids"]
            times.append((moment, len(chunk["output_ids"])))
        cached = chunk["meta_info"].get("cached_tokens") or cached
    # A line may bring several tokens; each then took its part of the time.
    between = [(b - a) / n for (a, _), (b, n) in pairwise(times) for _ in range(n)]
    return Answer(tokens, times[-1][0], times[0][0], between, cached)


def _part(port: int, requests: Sequence[Request], threads: int, stream: bool) -> list[Answer]:
    ask = _streamed if stream else _whole
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda request: ask(port, request), requests))


class Load:
    """Client processes that are started once."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn"))
        list(self._pool.map(abs, range(PROCESSES)))

    def run(self, port: int, requests: Sequence[Request], concurrency: int, stream: bool) -> tuple[list[Answer], float]:
        """Returns answers in the order of the requests, and the seconds of all. `concurrency` requests are on the way
        at a time."""
        processes = min(PROCESSES, concurrency)
        start = time.perf_counter()
        parts = [
            self._pool.submit(_part, port, requests[n::processes], concurrency // processes, stream)
            for n in range(processes)
        ]
        answers: list[Answer] = [Answer([], 0.0)] * len(requests)
        for n, part in enumerate(parts):
            answers[n::processes] = part.result()
        seconds = time.perf_counter() - start
        for request, answer in zip(requests, answers, strict=True):
            if len(answer.tokens) != request.new:
                raise RuntimeError(f"a request for {request.new} tokens got {len(answer.tokens)}")
        return answers, seconds

    def close(self) -> None:
        self._pool.shutdown()


def numbers(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Returns what a user feels: tokens a second, and in ms the times to the first token and between tokens."""
    made = sum(len(answer.tokens) for answer in answers)
    row: dict[str, Any] = {"requests": len(answers), "tokens": made, "seconds": seconds, "tokens_per_s": made / seconds}
    row["cached_tokens"] = sum(answer.cached for answer in answers)
    firsts = [1e3 * answer.first for answer in answers if answer.first is not None]
    gaps = [1e3 * gap for answer in answers for gap in answer.between]
    for name, values in (("first_token_ms", firsts), ("between_tokens_ms", gaps)):
        if len(values) > 1:
            row[name] = {"median": median(values), "p90": quantiles(values, n=10)[-1]}
    return row


def chat(port: int) -> dict[str, Any]:
    """Sends one request of OpenAI's kind, through the tokenizer and the chat template."""
    body = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 12}
    answer = post(port, "/v1/chat/completions", {**body, "ignore_eos": True})
    return {"text": answer["choices"][0]["message"]["content"], "usage": answer["usage"]["completion_tokens"]}


def logprobs(port: int, prompts: Iterable[tuple[int, ...]], at_once: int = 1) -> list[list[float]]:
    """Returns the server's log-probability of each token of a prompt but the first, given the tokens before it. So many
    prompts are asked at a time."""

    def ask(prompt: tuple[int, ...]) -> list[float]:
        sampling = {"temperature": 0, "max_new_tokens": 1}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        meta = post(port, "/generate", body)["meta_info"]
        return [row[0] for row in meta["input_token_logprobs"][1:]]

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, prompts))


def margin(port: int, prefix: Sequence[int], chosen: int, other: int) -> float:
    """Returns by how much the server holds one next token for likelier than another one, in log-probability."""
    body = {
        "input_ids": list(prefix),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [chosen, other],
    }
    rows = post(port, "/generate", body)["meta_info"]["output_token_ids_logprobs"][0]
    of = {row[1]: row[0] for row in rows}
    return of[chosen] - of[other]


def aborted(port: int, prompt: tuple[int, ...], count: int = 4) -> dict[str, Any]:
    """Sends long requests that are aborted, one of them by a client that goes away. Returns how they ended."""
    long = Request(prompt, 2500)
    with ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(post, port, "/generate", _body(long, rid=f"long-{n}")) for n in range(count)]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        header = {"Content-Type": "application/json"}
        connection.request("POST", "/generate", json.dumps(_body(long, stream=True)), header)
        connection.getresponse().readline()
        connection.close()
        for n in range(count):
            post(port, "/abort_request", {"rid": f"long-{n}"})
        metas = [answer.result()["meta_info"] for answer in asked]
    kinds = [(meta["finish_reason"] or {}).get("type") for meta in metas]
    if kinds != ["abort"] * count:
        raise RuntimeError(f"aborted requests ended with {kinds}")
    return {"aborted": count + 1, "tokens_before": [meta["completion_tokens"] for meta in metas]}


def compare(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns how many tokens are equal, and until where. After the first difference two answers have different
    inputs."""
    equal = prefix = 0
    firsts = []
    for n, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        same = [a == b for a, b in zip(one, other, strict=True)]
        equal += sum(same)
        at = same.index(False) if False in same else len(same)
        prefix += at
        if at < len(same):
            firsts.append({"request": n, "position": at, "off": other[at], "on": one[at]})
    total = sum(map(len, ours))
    return {
        "tokens": total,
        "equal": equal,
        "before_first_difference": prefix,
        "requests": len(ours),
        "whole_requests": len(ours) - len(firsts),
        "divergences": firsts,
    }


def spread(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns distances of two servers' log-probabilities of the same tokens after the same tokens."""
    distances = sorted(
        abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)
    )
    return {
        "count": len(distances),
        "median": median(distances),
        "p99": distances[int(0.99 * (len(distances) - 1))],
        "most": distances[-1],
    }
