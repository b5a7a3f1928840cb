"""Scenarios of benches/reliability.py with MoE layers on one device."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import oxmoe
from load.common import Failed, Memory, Row, Skipped, Wrong, checksum
from oxmoe.tools.bench import layers
from oxmoe.tools.bench.backend import Oxmoe
from oxmoe.tools.bench.layers import FORMATS, Shape

# Bytes by which the host's memory may grow after the warm-up: allocators keep what is freed.
HOST_SLACK = 32 << 20
# Formats whose layers may have GPT-OSS's form. No checkpoint of the other formats has it.
INTERLEAVED = ("bf16", "f16", "mxfp4", "mxfp4-a8")


def served(device: str) -> list[str]:
    known = oxmoe.device_info()["formats"]
    return [name for name in FORMATS if device in known.get(name, [device])]


def need_gpu(device: str, count: int = 1) -> None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device != "cuda" or found < count:
        raise Skipped(f"needs {count} CUDA GPU{'s' * (count > 1)}, found {found if device == 'cuda' else 'a CPU'}")


@dataclass(frozen=True)
class Case:
    """A layer with inputs, and its first result."""

    experts: oxmoe.ExpertWeights
    top_k: int
    x: Tensor
    routing: dict[str, Any]
    workspace_bytes: int
    expected: Tensor


def _room(size: int, device: str) -> Tensor:
    room = torch.empty(size + 256, dtype=torch.uint8, device=device)
    start = -room.data_ptr() % 256
    return room[start : start + size]


class DrawnOnHost(TorchFunctionMode):
    """Draws random numbers on the CPU. On a GPU they would depend on its number of multiprocessors, which MPS
    limits."""

    FUNCTIONS = (torch.randn, torch.rand, torch.randint, torch.randperm)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.pop("device", "cpu") if function in self.FUNCTIONS else None
        drawn = function(*args, **kwargs)
        return drawn if device is None else drawn.to(device)


def draw_cases(device: str, seed: int, shapes: int, batches: int, formats: list[str]) -> list[Case]:
    """Draws layers of random shapes in these formats, `shapes` of each, with `batches` numbers of tokens each. A
    layer's result for the first of them is compared with the reference: it has so many tokens that a moved row is not
    all of it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    most_hidden, most_columns, most_tokens = (8, 6, 2048) if device == "cuda" else (2, 2, 48)
    cases = []
    for name in formats:
        for _ in range(shapes):
            experts = rng.choice([8, 16, 32, 64] if device == "cuda" else [4, 8, 32])
            top_k = rng.choice([1, 2, 4, 8] if experts > 8 else [1, 2, 4])
            hidden, columns = 256 * rng.randint(1, most_hidden), 128 * rng.randint(1, most_columns)
            shape = Shape(experts, top_k, hidden, columns, gpt_oss=name in INTERLEAVED and rng.random() < 0.5)
            weights = layers.weights_of(name, shape, device, 1)
            made = Oxmoe(shape, weights).experts[0]
            counts = [rng.randint(24, 48), *(int(most_tokens ** rng.random()) for _ in range(batches - 1))]
            for number, tokens in enumerate(counts):
                pattern = rng.choice(layers.PATTERNS)
                (inputs,) = layers.make_inputs(shape, tokens, FORMATS[name][0], device, 1, pattern)
                routing = inputs.routing(top_k)
                first = oxmoe.moe(inputs.x, made, **routing)
                if number == 0:
                    wrong = layers.error(first, layers.expected(shape, weights[0], inputs), name)
                    if wrong is not None:
                        raise Failed(f"{name}, {shape}, {tokens} tokens: {wrong}")
                size = oxmoe.workspace_bytes(made, tokens, top_k)
                cases.append(Case(made, top_k, inputs.x, routing, size, first))
    return cases


def soak(
    device: str,
    seconds: float,
    seed: int,
    shapes: int,
    batches: int,
    alone: bool = True,
    formats: list[str] | None = None,
) -> Row:
    """Makes random calls for this long, and compares each with the first result of the same input. Memory is watched.

    A call allocates its output and its workspace, or is given its output, or both. Given memory is poisoned before
    some calls.
    """
    started = time.monotonic()
    formats = served(device) if formats is None else formats
    with DrawnOnHost():
        cases = draw_cases(device, seed, shapes, batches, formats)
    rng = random.Random(seed + 1)
    workspace = _room(max(case.workspace_bytes for case in cases), device)
    room = _room(max(case.x.nbytes for case in cases), device)
    wrong = Wrong(device, max(case.x.numel() for case in cases))

    def call(case: Case, way: int) -> None:
        given = {}
        if way:
            out = room[: case.x.nbytes].view(case.x.dtype).view(case.x.shape)
            given["out"] = out.fill_(torch.nan)
        if way >= 2:
            given["workspace"] = workspace[: case.workspace_bytes]
            if way == 3:
                given["workspace"].fill_(255)
        wrong.compare(oxmoe.moe(case.x, case.experts, **case.routing, **given), case.expected)

    for case in cases:
        for way in range(4):
            call(case, way)
    calls = warm = 4 * len(cases)
    memory = Memory(device, HOST_SLACK, alone=alone)
    begun = looked = time.monotonic()
    warm_until, end, watching = begun + seconds / 5, begun + seconds, False
    while (now := time.monotonic()) < end:
        if not watching and now >= warm_until:
            memory.begin()
            watching, looked, warm = True, now, calls
        elif watching and now - looked > max(1.0, seconds / 100):
            memory.look()
            looked = time.monotonic()
        for _ in range(32):
            call(rng.choice(cases), rng.choice((0, 1, 2, 2, 2, 3)))
        calls += 32
        if device == "cuda":
            torch.cuda.current_stream().synchronize()
    if watching:
        memory.look()
    else:
        memory.begin()
    return {
        "wrong": wrong.read(),
        "calls": calls,
        "calls_watched": calls - warm if watching else 0,
        "formats": len(formats),
        "layers": len({id(case.experts) for case in cases}),
        "inputs": len(cases),
        "bits": checksum(case.expected for case in cases),
        "setup_s": round(begun - started, 1),
        **memory.fields(),
    }


# Workspaces


def workspaces(device: str, count: int, seed: int) -> Row:
    """Makes `count` workspaces that live beside each other, and uses each three times in random order."""
    torch.manual_seed(seed)
    rng, wrong, calls, tables = random.Random(seed), Wrong(device, 1 << 16), 0, {}
    fields: Row = {}
    for name, tokens in (("bf16", 5), ("fp8_block", 2), ("mxfp4", 1)):
        shape = Shape(16, 4, 512, 256)
        made = Oxmoe(shape, layers.weights_of(name, shape, device, 1)).experts[0]
        (inputs,) = layers.make_inputs(shape, tokens, torch.bfloat16, device, 1)
        routing = inputs.routing(shape.top_k)
        expected = oxmoe.moe(inputs.x, made, *oxmoe.topk(inputs.router_logits, shape.top_k))
        size = oxmoe.workspace_bytes(made, tokens, shape.top_k)
        step = -(-size // 256) * 256
        room = _room(count * step, device).fill_(255)
        places = [place for _ in range(3) for place in range(count)]
        rng.shuffle(places)
        out, memory = torch.empty_like(inputs.x), Memory(device, HOST_SLACK)
        for number, place in enumerate(places):
            space = room[place * step : place * step + size]
            oxmoe.moe(inputs.x, made, **routing, out=out.fill_(torch.nan), workspace=space)
            wrong.compare(out, expected)
            if number == count:
                memory.begin()
            elif number % 1024 == 0 and device == "cuda":
                torch.cuda.synchronize()
        memory.look()
        fields = memory.fields()
        calls += len(places)
        tables[name] = size
        del room
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    return {"wrong": wrong.read(), "calls": calls, "workspaces": 3 * count, "bytes_each": tables, **fields}


# Updates between replays


def _held(weights: oxmoe.ExpertWeights) -> list[Tensor | None]:
    own = [weights.w13, weights.w2, weights.w13_scale, weights.w2_scale, weights.a13_scale, weights.a2_scale]
    return [*own, weights.b13, weights.b2, *(weights.w13_packed or ()), *(weights.w2_packed or ())]


def updates(device: str, replays: int, seed: int) -> Row:
    """Replays graphs of a layer whose weights are overwritten between replays. The results follow the weights."""
    need_gpu(device)
    torch.manual_seed(seed)
    rng, shape, tokens, sets = random.Random(seed), Shape(16, 4, 512, 256), 8, 4
    wrong, replayed = Wrong(device, tokens * shape.hidden), 0
    per_format = -(-replays // len(served(device)))
    for name in served(device):
        (inputs,) = layers.make_inputs(shape, tokens, FORMATS[name][0], device, 1)
        drawn = [Oxmoe(shape, layers.weights_of(name, shape, device, 1)).experts[0] for _ in range(sets + 1)]
        live, others = drawn[0], drawn[1:]
        routing = inputs.routing(shape.top_k)
        expected = [oxmoe.moe(inputs.x, other, **routing) for other in others]
        if any(bool((a == b).all()) for a, b in itertools.pairwise(expected)):
            raise Failed(f"{name}: two sets of weights have the same result, so the scenario would notice nothing")
        out = torch.empty_like(inputs.x)
        workspace = _room(oxmoe.workspace_bytes(live, tokens, shape.top_k), device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            oxmoe.moe(inputs.x, live, **routing, out=out, workspace=workspace)
        tensors = [
            [(to, tensor) for to, tensor in zip(_held(live), _held(other), strict=True) if to is not None]
            for other in others
        ]
        for number in range(per_format):
            chosen = rng.randrange(sets)
            for to, tensor in tensors[chosen]:
                assert tensor is not None
                to.copy_(tensor)
            out.fill_(torch.nan)
            graph.replay()
            wrong.compare(out, expected[chosen])
            if number % 256 == 0:
                torch.cuda.synchronize()
        replayed += per_format
    return {"wrong": wrong.read(), "replays": replayed, "updates": replayed, "formats": len(served(device))}


# Missing memory


def oom(device: str, rounds: int, seed: int) -> Row:
    """Uses up device memory in the middle of a capture. The calls after it, and a new capture, are right."""
    need_gpu(device)
    if rounds < 4:
        raise Failed(f"--rounds: expected at least 4, as three warm up, got {rounds}")
    torch.manual_seed(seed)
    rng = random.Random(seed)
    shape, few, many = Shape(16, 4, 2048, 512), 16, 8192
    made = [Oxmoe(shape, layers.weights_of(name, shape, device, 1)).experts[0] for name in ("bf16", "mxfp4")]
    inputs = {tokens: layers.make_inputs(shape, tokens, torch.bfloat16, device, 1)[0] for tokens in (few, many)}

    def call(weights: oxmoe.ExpertWeights, tokens: int, **given: Tensor) -> Tensor:
        return oxmoe.moe(inputs[tokens].x, weights, **inputs[tokens].routing(shape.top_k), **given)

    expected = {(i, tokens): call(weights, tokens) for i, weights in enumerate(made) for tokens in (few, many)}
    outs = [torch.empty_like(inputs[few].x) for _ in made]
    spaces = [_room(oxmoe.workspace_bytes(weights, few, shape.top_k), device) for weights in made]
    wrong = Wrong(device, many * shape.hidden)
    # The stream of all captures: torch would make one in each round, and there is no memory for it then.
    stream = torch.cuda.Stream()

    def small(i: int) -> None:
        call(made[i], few, out=outs[i].fill_(torch.nan), workspace=spaces[i])

    def check_small() -> None:
        for i in range(len(made)):
            small(i)
            wrong.compare(outs[i], expected[i, few])

    def one_round() -> str:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # The hog takes blocks of falling size, until less is left than the large call takes.
        hog, size = [], torch.cuda.mem_get_info()[0]
        while size >= 4 << 20:
            try:
                hog.append(torch.empty(size, dtype=torch.uint8, device=device))
            except torch.OutOfMemoryError:
                size //= 2
        before, graph, error = rng.randint(1, 4), torch.cuda.CUDAGraph(), ""
        try:
            with torch.cuda.graph(graph, stream=stream):
                for number in range(before):
                    small(number % len(made))
                try:
                    call(made[rng.randrange(len(made))], many)
                except (torch.OutOfMemoryError, MemoryError) as failure:
                    error = type(failure).__name__
                    raise
        except (RuntimeError, MemoryError):
            # The end of a broken capture may raise, too.
            if not error:
                raise
        if not error:
            raise Failed("the large call of a capture found memory: the scenario did not happen")
        del graph
        check_small()
        torch.cuda.synchronize()
        hog.clear()
        torch.cuda.empty_cache()
        for i, weights in enumerate(made):
            wrong.compare(call(weights, many), expected[i, many])
        again = torch.cuda.CUDAGraph()
        with torch.cuda.graph(again, stream=stream):
            results = [call(weights, many) for weights in made]
            for i in range(len(made)):
                small(i)
        for tensor in (*results, *outs):
            tensor.fill_(torch.nan)
        again.replay()
        for i in range(len(made)):
            wrong.compare(results[i], expected[i, many])
            wrong.compare(outs[i], expected[i, few])
        return error

    errors: dict[str, int] = {}
    memory = Memory(device, HOST_SLACK)
    for number in range(rounds):
        error = one_round()
        errors[error] = errors.get(error, 0) + 1
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if number == 2:
            memory.begin()
        elif number > 2:
            memory.look()
    return {"wrong": wrong.read(), "rounds": rounds, "errors": errors, **memory.fields()}


SCENARIOS: dict[str, Callable[..., Row]] = {"soak": soak, "workspaces": workspaces, "updates": updates, "oom": oom}
