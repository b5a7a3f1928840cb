"""SGLang's all-reduce operators as oxmoe defines them, between two GPUs in SGLang's own groups, beside NCCL."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oxmoe.sglang import capabilities, collective, setting
from ranks import Crew, Rank, check_norm, crc, draw, raised, same_bits, seed_of

if find_spec("sglang") is None or find_spec("sgl_kernel") is None:
    # SGLang is not imported here, because the ranks set OXMOE_SGLANG first.
    pytest.skip("needs sglang and sgl_kernel", allow_module_level=True)

NAMES = tuple(sorted(capabilities.schemas()))
EPS = 1e-5

pytestmark = pytest.mark.multi_gpu


@pytest.fixture(scope="module")
def pair() -> Iterator[Crew]:
    crew = Crew(2, gpus=True)
    crew.run(start, patience=180)
    yield crew
    crew.close()


_stack = ExitStack()


def start(me: Rank) -> None:
    """Makes SGLang's groups of a server with --tp-size 2 --ep-size 2, with NCCL beneath; no multicast anywhere."""
    os.environ.update({setting.SETTING: "allreduce", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"})
    importlib.import_module("sglang.srt.layers.layernorm")
    importlib.import_module("sglang.srt.layers.flashinfer_comm_fusion")
    assert collective.defined() == NAMES

    from sglang.srt.distributed import parallel_state

    parallel_state.init_distributed_environment(world_size=2, rank=me.rank, local_rank=me.rank, backend="nccl")

    def group(name: str) -> Any:
        return parallel_state.init_model_parallel_group(
            [[0, 1]],
            me.rank,
            "nccl",
            use_pynccl=False,
            use_custom_allreduce=False,
            use_torch_symm_mem_allreduce=False,
            group_name=name,
        )

    attention, experts = group("attention"), group("experts")
    parallel_state._ATTN_TP, parallel_state._MOE_EP = attention, experts
    if find_spec("sglang.srt.runtime_context") is None:
        return
    from sglang.srt.runtime_context import get_context, get_parallel

    if hasattr(get_context(), "override_server_args"):
        _stack.enter_context(get_context().override_server_args(model_path="dummy"))
    sizes = {"tp_size": 2, "attn_tp_size": 2, "moe_ep_size": 2, "moe_tp_size": 1}
    ranks = {"tp_rank": me.rank, "attn_tp_rank": me.rank, "moe_ep_rank": me.rank, "moe_tp_rank": 0}
    _stack.enter_context(get_parallel().override(**sizes, **ranks, attn_tp_group=attention, moe_ep_group=experts))


def given(me: Rank, seed: int, tokens: int, hidden: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns this rank's rows, residual and gamma."""
    shapes = {f"input {me.rank}": (tokens, hidden), "residual": (tokens, hidden), "gamma": (hidden,)}
    return [draw(seed, name, *shape, dtype=dtype).cuda() for name, shape in shapes.items()]


def summed(x: Tensor, group: Any) -> Tensor:
    """Returns NCCL's sum."""
    total = x.clone()
    if total.numel():
        dist.all_reduce(total, group=group.device_group)
    return total


def compare(group: Any, operands: list[Tensor], norm: Tensor, residual_out: Tensor) -> list[str]:
    """Returns what differs from NCCL's sum, an addition and the norm."""
    x, residual, gamma = operands
    total = summed(x, group)
    expected = (total.float() + residual.float()).to(x.dtype)
    wrong = [] if same_bits(residual_out.cpu(), expected.cpu()) else ["residual"]
    return [what for what in (*wrong, check_norm(norm.cpu(), expected.cpu(), gamma.cpu(), EPS, 0.0)) if what]


def operator(operands: list[Tensor], attention: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """Calls the operator as SGLang does."""
    from sglang.srt.layers import flashinfer_comm_fusion as fusion

    with torch.no_grad():
        function = fusion.flashinfer_allreduce_residual_rmsnorm
        return function(*operands, eps=EPS, use_attn_tp_group=attention, **options)


def eager(me: Rank, seed: int, tokens: int, hidden: int, attention: bool, dtype: torch.dtype) -> Any:
    operands = given(me, seed, tokens, hidden, dtype)
    before = [tensor.clone() for tensor in operands]
    norm, residual_out = operator(operands, attention)
    wrong = compare(collective.group_of(attention), operands, norm, residual_out)
    wrong += ["an operand changed" for a, b in zip(operands, before, strict=True) if not same_bits(a.cpu(), b.cpu())]
    return wrong, crc(norm.cpu(), residual_out.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", [True, False], ids=["attention", "experts"])
def test_beside_nccl(pair: Crew, attention: bool, dtype: torch.dtype, rng: torch.Generator) -> None:
    for tokens, hidden in ((1, 2880), (7, 7168), (0, 128), (64, 2880), (2048, 4096)):
        results = pair.run(eager, seed_of(rng), tokens, hidden, attention, dtype)
        assert [wrong for wrong, _ in results] == [[], []], f"{tokens} x {hidden}"
        assert results[0][1] == results[1][1], "both ranks have the same bits"


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def replayed(me: Rank, seed: int) -> list[str]:
    """Replays a graph of several calls. Replays follow what the operands hold, also after the workspace was
    outgrown."""
    hidden, dtype, wrong = 2880, torch.bfloat16, []
    group = collective.group_of(True)
    operands = given(me, seed, 8, hidden, dtype)
    graph, results = capture(lambda: [operator(operands, True, max_token_num=8) for _ in range(3)])
    outgrown = len(collective._outgrown)
    for turn in range(3):
        for tensor, fresh in zip(operands, given(me, seed + 1 + turn, 8, hidden, dtype), strict=True):
            tensor.copy_(fresh)
        if turn == 2:
            more = given(me, seed, 3000, hidden, dtype)
            wrong += compare(group, more, *operator(more, True, max_token_num=8))
        graph.replay()
        torch.cuda.synchronize()
        for norm, residual_out in results:
            wrong += [f"replay {turn}: {what}" for what in compare(group, operands, norm, residual_out)]
    if len(collective._outgrown) == outgrown:
        wrong.append("the workspace did not grow")
    return wrong


def test_graph_and_outgrown_workspace(pair: Crew, rng: torch.Generator) -> None:
    assert pair.run(replayed, seed_of(rng)) == [[], []]


def unprepared(me: Rank, seed: int) -> str:
    """The first call of its kind is inside a capture."""
    operands = given(me, seed, 4, 1280, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()

    def call() -> None:
        with torch.cuda.graph(graph):
            operator(operands, True)

    return " ".join(raised(call))


def test_capture_without_a_call_before(pair: Crew, rng: torch.Generator) -> None:
    for message in pair.run(unprepared, seed_of(rng)):
        assert "RuntimeError" in message and "made at the first call of its ranks" in message


def never_declines(me: Rank, seed: int) -> list[str]:
    """Operands that flashinfer's kernel declines are summed all the same; operands that cannot be summed raise."""
    group, wrong = collective.group_of(True), []
    for tokens, hidden, options in (
        (5, 24, {}),
        (33, 2880, {"max_token_num": 16}),
        (4096, 2880, {"use_oneshot": True}),
        (1, 2880, {"use_oneshot": False}),
        (3, 2880, {"fp32_acc": False, "trigger_completion_at_end": True}),
    ):
        operands = given(me, seed, tokens, hidden, torch.bfloat16)
        results = operator(operands, True, **options)
        if not all(isinstance(result, Tensor) for result in results):
            wrong.append(f"{tokens} x {hidden}, {options}: {results}")
            continue
        wrong += [f"{tokens} x {hidden}, {options}: {what}" for what in compare(group, operands, *results)]
    # The rows are not contiguous.
    x, residual, gamma = given(me, seed, 6, 5760, torch.bfloat16)
    strided = [x[:, ::2], residual[:, ::2], gamma[::2]]
    wrong += [f"strided: {what}" for what in compare(group, strided, *operator(strided, True))]
    kind, _ = raised(lambda: operator(given(me, seed, 2, 30, torch.float64), True))
    if kind == "nothing":
        wrong.append("float64 was taken")
    return wrong


def test_never_declines(pair: Crew, rng: torch.Generator) -> None:
    assert pair.run(never_declines, seed_of(rng)) == [[], []]


def plain(me: Rank, seed: int) -> list[str]:
    group, wrong = collective.group_of(True), []
    for tokens, hidden in ((1, 2880), (64, 7168), (0, 128)):
        x = given(me, seed, tokens, hidden, torch.bfloat16)[0]
        if not same_bits(torch.ops.sglang.flashinfer_allreduce(x, group.unique_name).cpu(), summed(x, group).cpu()):
            wrong.append(f"{tokens} x {hidden}")
    held = given(me, seed, 9, 2880, torch.bfloat16)[0]
    graph, result = capture(lambda: torch.ops.sglang.flashinfer_allreduce(held, group.unique_name))
    held.copy_(given(me, seed + 1, 9, 2880, torch.bfloat16)[0])
    graph.replay()
    if not same_bits(result.cpu(), summed(held, group).cpu()):
        wrong.append("replay")
    return wrong


@pytest.mark.skipif(capabilities.PLAIN not in NAMES, reason="this SGLang has no operator for an all-reduce alone")
def test_plain_operator(pair: Crew, rng: torch.Generator) -> None:
    assert pair.run(plain, seed_of(rng)) == [[], []]
