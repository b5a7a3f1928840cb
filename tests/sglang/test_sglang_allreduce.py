"""SGLang's all-reduce operators as oxmoe defines them: its schemas, its groups, its own modules calling them."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import forked
from oxmoe.sglang import capabilities, collective, setting
from ranks import Crew, Rank, check_norm, crc, draw, same_bits, seed_of, total

if find_spec("sglang") is None:
    # SGLang is not imported here, because the ranks set OXMOE_SGLANG first.
    pytest.skip("needs sglang", allow_module_level=True)

NAMES = tuple(sorted(capabilities.schemas()))
HAS_PLAIN = capabilities.PLAIN in NAMES
only_plain = pytest.mark.skipif(not HAS_PLAIN, reason="this SGLang has no operator for an all-reduce alone")

OURS = """
import torch
import sglang.srt.layers.layernorm
from sglang.srt.layers import flashinfer_comm_fusion
from sglang.srt.distributed import parallel_state
from oxmoe.sglang import collective
from sglang.srt.plugins import load_plugins
load_plugins()
print("defined", *collective.defined())
for name in {names}:
    print(getattr(torch.ops.sglang, name).default._schema)
called = getattr(parallel_state, "flashinfer_allreduce", None)
for function in (flashinfer_comm_fusion.flashinfer_allreduce_residual_rmsnorm, called):
    print("sglang calls", getattr(function, "__name__", function))
"""


def process(**environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    return forked.run("-c", OURS.format(names=NAMES), env=env, packages=forked.SGLANG)


def test_schemas_are_sglangs() -> None:
    """A process runs twice: with SGLang's own definitions, and with oxmoe's in their place."""
    theirs, ours = process(OXMOE_SGLANG=""), process(OXMOE_SGLANG="allreduce")
    assert theirs.returncode == 0 and ours.returncode == 0, theirs.stderr + ours.stderr
    names = " ".join(NAMES)
    first, *rest = ours.stdout.splitlines()
    assert first == f"defined {names}"
    assert theirs.stdout.splitlines()[0] == "defined"
    schemas = slice(0, len(NAMES))
    assert rest[schemas] == theirs.stdout.splitlines()[1:][schemas]


def test_operators_that_sglang_has_already_are_an_error() -> None:
    """SGLang is imported with SGLANG_PLUGINS without oxmoe, and then the plugin is called: it is too late, and says
    so."""
    code = (
        "from sglang.srt.layers import flashinfer_comm_fusion; import os; os.environ['OXMOE_SGLANG'] = 'allreduce';"
        "import oxmoe.sglang; oxmoe.sglang.plugin()"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OXMOE_SGLANG": ""}
    result = forked.run("-c", code, env=env, packages=forked.SGLANG)
    assert result.returncode == 1
    assert "flashinfer_allreduce_residual_rmsnorm is SGLang's own already" in result.stderr.splitlines()[-1]
    assert "Unset SGLANG_PLATFORM" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("text", ["", "moe", "moe=nonsense"])
def test_platform_defines_nothing_that_is_not_asked_for(text: str) -> None:
    code = (
        "import oxmoe.sglang.platform as p, oxmoe.sglang.collective as c, sys; assert p.activate() is None;"
        "assert c.defined() == () and not any(name.startswith('sglang') for name in sys.modules)"
    )
    result = forked.run("-c", code, env={**os.environ, "OXMOE_SGLANG": text})
    assert result.returncode == 0, result.stderr


# Ranks with SGLang's groups


@pytest.fixture(scope="module")
def four() -> Iterator[Crew]:
    crew = Crew(4)
    crew.run(start)
    yield crew
    crew.close()


_stack = ExitStack()


def start(me: Rank) -> None:
    """Makes SGLang's groups on this rank: 4 ranks of attention, pairs of expert parallelism."""
    os.environ[setting.SETTING] = "allreduce"
    # A model's file does this: with the first of its layers SGLang looks for platforms, and calls oxmoe's entry point.
    importlib.import_module("sglang.srt.layers.layernorm")
    importlib.import_module("sglang.srt.layers.flashinfer_comm_fusion")
    assert collective.defined() == NAMES

    from sglang.srt.distributed import parallel_state

    parallel_state.init_distributed_environment(world_size=4, rank=me.rank, local_rank=me.rank, backend="gloo")

    def group(name: str, *ranks: list[int]) -> Any:
        # The group is made without NCCL, which initialize_model_parallel would ask for.
        return parallel_state.init_model_parallel_group(
            list(ranks), me.rank, "gloo", use_pynccl=False, use_custom_allreduce=False, group_name=name
        )

    attention, experts = group("attention", [0, 1, 2, 3]), group("experts", [0, 2], [1, 3])
    parallel_state._ATTN_TP, parallel_state._MOE_EP = attention, experts
    if find_spec("sglang.srt.runtime_context") is None:
        return
    from sglang.srt.runtime_context import get_context, get_parallel

    if hasattr(get_context(), "override_server_args"):
        _stack.enter_context(get_context().override_server_args(model_path="dummy"))
    sizes = {"tp_size": 4, "attn_tp_size": 4, "moe_ep_size": 2, "moe_dp_size": 2, "moe_tp_size": 1}
    ranks = {"tp_rank": me.rank, "attn_tp_rank": me.rank, "moe_ep_rank": me.rank // 2, "moe_tp_rank": 0}
    _stack.enter_context(get_parallel().override(**sizes, **ranks, attn_tp_group=attention, moe_ep_group=experts))


def fused(me: Rank, seed: int, tokens: int, hidden: int, attention: bool, dtype: torch.dtype) -> Any:
    """Returns (what is wrong, checksums) of the operator through SGLang's function."""
    from sglang.srt.layers import flashinfer_comm_fusion as fusion

    group = collective.group_of(attention)
    parts = [draw(seed, f"input {rank}", tokens, hidden, dtype=dtype) for rank in range(4)]
    residual, gamma = draw(seed, "residual", tokens, hidden, dtype=dtype), draw(seed, "gamma", hidden, dtype=dtype)
    given = [tensor.clone() for tensor in (parts[me.rank], residual, gamma)]
    function = fusion.flashinfer_allreduce_residual_rmsnorm
    with torch.no_grad():
        norm, residual_out = function(*given, eps=1e-5, use_attn_tp_group=attention)
    expected = (total([parts[rank] for rank in group.ranks]).float() + residual.float()).to(dtype)
    wrong = [] if group.world_size == (4 if attention else 2) else [f"group of {group.world_size}"]
    if not same_bits(residual_out, expected):
        wrong.append("residual")
    wrong.append(check_norm(norm, expected, gamma, 1e-5, 0.0))
    wrong += [
        "an operand changed"
        for a, b in zip(given, (parts[me.rank], residual, gamma), strict=True)
        if a is not b and not same_bits(a, b)
    ]
    return [what for what in wrong if what], crc(norm, residual_out), group.ranks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("attention", [True, False], ids=["attention", "experts"])
def test_fused_operator(four: Crew, attention: bool, dtype: torch.dtype, rng: torch.Generator) -> None:
    for tokens in (1, 7, 0, 64):
        results = four.run(fused, seed_of(rng), tokens, 128, attention, dtype)
        for rank, (wrong, sums, ranks) in enumerate(results):
            assert wrong == [], f"rank {rank}, {tokens} tokens: {wrong}"
            assert rank in ranks and sums == results[ranks[0]][1]


def larger(me: Rank, seed: int) -> list[str]:
    """With more tokens than the workspace was made for, all ranks make another one; the old one stays for graphs."""
    before = list(collective._outgrown)
    operator = torch.ops.sglang.flashinfer_allreduce_residual_rmsnorm
    wrong = []
    for tokens in (3, 40, 3):
        parts = [draw(seed, f"{tokens} {rank}", tokens, 64) for rank in range(4)]
        zeros, ones = torch.zeros(tokens, 64), torch.ones(64)
        _, residual = operator(parts[me.rank], zeros, ones, max_token_num=16)
        if not same_bits(residual, total(parts)):
            wrong.append(f"{tokens} tokens")
    kept = collective._outgrown[len(before) :]
    if len(kept) != 1 or kept[0].destroyed:
        wrong.append(f"outgrown: {kept}")
    return wrong


def test_workspace_grows(four: Crew, rng: torch.Generator) -> None:
    assert four.run(larger, seed_of(rng)) == [[]] * 4


def plain(me: Rank, seed: int) -> list[str]:
    parts = [draw(seed, f"plain {rank}", 5, 64, dtype=torch.bfloat16) for rank in range(4)]
    group = collective.group_of(True)
    result = torch.ops.sglang.flashinfer_allreduce(parts[me.rank], group.unique_name)
    return [] if same_bits(result, total(parts)) else ["sum"]


@only_plain
def test_plain_operator(four: Crew, rng: torch.Generator) -> None:
    assert four.run(plain, seed_of(rng)) == [[]] * 4


def on_two_hosts(me: Rank, seed: int) -> list[Any]:
    """Returns (what is wrong, lines of the log) of the operators if ranks 2 and 3 say that they are on another host."""
    import logging
    from unittest.mock import patch

    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    name = f"host-{me.rank // 2}"
    # Numbers are integers, so that no order of the sum rounds.
    parts = [draw(seed, f"hosts {rank}", 5, 64).mul(8).round() for rank in range(4)]
    residual, gamma = torch.ones(5, 64), draw(seed, "gamma", 64)
    collective.logger.addHandler(handler)
    known, made = dict(collective._spans_hosts), dict(collective._workspaces)
    collective._spans_hosts.clear()
    wrong = []
    try:
        with patch.object(collective, "host", lambda: (name, name)):
            for _ in range(2):
                norm, residual_out = torch.ops.sglang.flashinfer_allreduce_residual_rmsnorm(
                    parts[me.rank], residual, gamma, eps=1e-5
                )
                expected = total(parts) + residual
                wrong += [] if same_bits(residual_out, expected) else ["residual"]
                wrong += [what] if (what := check_norm(norm, expected, gamma, 1e-5, 0.0)) else []
            if HAS_PLAIN:
                group = collective.group_of(True)
                result = torch.ops.sglang.flashinfer_allreduce(parts[me.rank], group.unique_name)
                wrong += [] if same_bits(result, total(parts)) else ["sum"]
        wrong += [] if collective._workspaces.keys() == made.keys() else ["a workspace was made"]
    finally:
        collective.logger.removeHandler(handler)
        collective._spans_hosts.clear()
        collective._spans_hosts.update(known)
    return [wrong, lines]


def test_a_group_that_spans_hosts(four: Crew, rng: torch.Generator) -> None:
    """The log names such a group once, and it is summed without oxmoe's kernels: it neither hangs nor ends."""
    for wrong, lines in four.run(on_two_hosts, seed_of(rng)):
        assert wrong == []
        assert len(lines) == 1 and "several hosts (host-0, host-1)" in lines[0]


def traced(me: Rank) -> list[tuple[int, ...]]:
    """Returns shapes without computing, as torch.compile and graph capture on meta tensors ask for them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(5, 64, dtype=torch.bfloat16)
        outputs = list(torch.ops.sglang.flashinfer_allreduce_residual_rmsnorm(x, x.clone(), x[0].clone()))
        if HAS_PLAIN:
            outputs.append(torch.ops.sglang.flashinfer_allreduce(x, "no group"))
        return [tuple(output.shape) for output in outputs]


def test_operators_can_be_traced(four: Crew) -> None:
    assert four.run(traced) == [[(5, 64)] * (3 if HAS_PLAIN else 2)] * 4
