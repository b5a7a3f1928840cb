"""allreduce_fusion with ranks that disagree, refuse, come late or die, and with exchange functions that do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import oxmoe
from ranks import Crew, Rank, crews, of_two, raised, same_bits, total

four = crews(4)


# Several processes


def unequal_counts(me: Rank) -> list[tuple[str, str]]:
    make = oxmoe.create_allreduce_fusion_workspace
    workspace = make(max_token_num=8, hidden_dim=64, dtype=torch.bfloat16, group=me.all, deadline=20)
    x = torch.ones(6 + (me.rank == 2), 64, dtype=torch.bfloat16)
    results = [raised(lambda: oxmoe.allreduce_fusion(x, workspace, 0))]
    # Rank 0 has no rows, and other ranks have some.
    results.append(raised(lambda: oxmoe.allreduce_fusion(x[: me.rank], workspace, 0)))
    # Rank 1 has the shape in another dtype of the same size.
    other = x[:6].to(torch.float16) if me.rank == 1 else x[:6]
    results.append(raised(lambda: oxmoe.allreduce_fusion(other, workspace, 0)))
    # The workspace is still good.
    ok = oxmoe.allreduce_fusion(x[:6], workspace, 0)
    results.append((str(bool((ok == me.world).all())), ""))
    workspace.destroy()
    return results


def test_unequal_shapes_are_a_value_error_everywhere(four: Crew) -> None:
    for rank, results in enumerate(four.run(unequal_counts)):
        for kind, text in results[:3]:
            assert kind == "ValueError" and f"rank {rank}" in text and "disagree" in text, (kind, text)
        assert "rank 2: pattern kAllReduce of bfloat16 [7, 64]" in results[0][1]
        assert "rank 0: pattern kAllReduce of bfloat16 [0, 64]" in results[1][1]
        assert "rank 1: pattern kAllReduce of float16 [6, 64]" in results[2][1]
        assert results[3][0] == "True"


def one_rank_raises(me: Rank) -> tuple[float, list[tuple[str, str]], bool]:
    make = oxmoe.create_allreduce_fusion_workspace
    workspace = make(max_token_num=8, hidden_dim=64, dtype=torch.bfloat16, group=me.all, deadline=20)
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    started, results = time.monotonic(), []
    for _ in range(3):
        # One rank refuses again and again, so that headers of refused calls pile up.
        bad = me.rank == 1
        gamma = torch.ones(32 if bad else 64, dtype=torch.bfloat16)
        outputs = {"residual_out": torch.empty_like(x), "norm_out": torch.empty_like(x)}
        call = lambda g=gamma, o=outputs: oxmoe.allreduce_fusion(x, workspace, 1, residual_in=x, rms_gamma=g, **o)  # noqa: E731
        results.append(raised(call))
    took = time.monotonic() - started
    ok = bool((oxmoe.allreduce_fusion(x, workspace, 0) == me.world).all())
    workspace.destroy()
    # No rank makes a workspace that one rank cannot make, and the next attempt works.
    hidden = 63 if me.rank == 3 else 64
    results.append(raised(lambda: make(max_token_num=8, hidden_dim=hidden, dtype=torch.bfloat16, group=me.all)))
    results.append(raised(lambda: make(max_token_num=8 + me.rank, hidden_dim=64, dtype="float16", group=me.all)))
    make(max_token_num=8, hidden_dim=64, dtype=torch.float16, group=me.all).destroy()
    return took, results, ok


def test_a_rank_that_raises_keeps_nobody_waiting(four: Crew) -> None:
    for rank, (took, results, ok) in enumerate(four.run(one_rank_raises)):
        assert took < 10 and ok
        for kind, text in results[:3]:
            if rank == 1:
                assert kind == "ValueError" and "rms_gamma" in text
            else:
                assert kind == "RuntimeError" and "rank 1 refused" in text and "rms_gamma" in text
        kind, text = results[3]
        assert "hidden_dim" in text and kind == ("ValueError" if rank == 3 else "RuntimeError")
        assert results[4][0] == "ValueError" and "max_token_num" in results[4][1]


# Arguments that are wrong before the extension sees the operands, and what the error says.
ARGUMENTS: list[tuple[dict[str, Any], str, str]] = [
    ({"deadline": -1}, "ValueError", "deadline: expected a positive number of seconds, got -1"),
    ({"deadline": "5"}, "ValueError", "deadline: expected a positive number of seconds, got '5'"),
    ({"pattern": None}, "TypeError", "pattern: expected int, got NoneType"),
    ({"pattern": "kAllReduce"}, "TypeError", "pattern: expected int, got str"),
    ({"pattern": 1.0}, "TypeError", "pattern: expected int, got float"),
    ({"input": None}, "ValueError", "input: expected a torch tensor or a numpy array, got NoneType"),
    ({"input": None, "pattern": 13}, "NotImplementedError", "input: kARResidualRMSNormMXFP8Quant takes torch's"),
    ({"rms_eps": "small"}, "TypeError", "rms_eps: must be real number, not str"),
    ({"layout_code": 2**70}, "ValueError", "layout_code: Python int too large"),
    ({"moe_finalize_backend": "cake"}, "NotImplementedError", "moe_finalize_backend: no kernel"),
    ({"pattern": 12}, "NotImplementedError", "pattern: no kernel for kMoEFinalizeARResidualRMSNormFP8Quant"),
]


def wrong_arguments(me: Rank) -> tuple[float, list[tuple[str, str]], bool]:
    make = oxmoe.create_allreduce_fusion_workspace
    workspace = make(max_token_num=8, hidden_dim=64, dtype=torch.bfloat16, group=me.all, deadline=20)
    x = torch.full((4, 64), 2.0**me.rank, dtype=torch.bfloat16)
    started, results, right = time.monotonic(), [], True
    for wrong, _, _ in ARGUMENTS:
        given: dict[str, Any] = {"input": x, "pattern": 0} | (wrong if me.rank == 1 else {})
        results.append(raised(lambda g=given: oxmoe.allreduce_fusion(workspace=workspace, **g)))
    # flashinfer's older name, which compares its arguments itself.
    out, nothing = torch.empty_like(x), (None,) * 10
    rows = 3 if me.rank == 1 else 4
    options = (False, False, False, 0, None)
    results.append(
        raised(
            lambda: oxmoe.trtllm_allreduce_fusion(x, me.world, me.rank, rows, 64, workspace, *options, out, *nothing)
        )
    )
    took = time.monotonic() - started
    # The ranks are still in step: the next call has the rows of the next call.
    for scale in (1, 3):
        result = oxmoe.allreduce_fusion(x * scale, workspace, 0)
        right = right and bool((result == scale * (2**me.world - 1)).all())
    workspace.destroy()
    return took, results, right


def test_arguments_that_are_wrong_on_one_rank(four: Crew) -> None:
    """All ranks raise, wherever an argument is refused. Before, the others took this rank's next call for its part."""
    expected = [*ARGUMENTS, ({}, "ValueError", "allreduce_in: expected 3 x 64 contiguous numbers")]
    for rank, (took, results, right) in enumerate(four.run(wrong_arguments)):
        assert took < 10 and right, (rank, took)
        for (kind, text), (_, of_kind, says) in zip(results, expected, strict=True):
            if rank == 1:
                assert kind == of_kind and text.startswith(says), (kind, text)
            else:
                assert kind == "RuntimeError" and "rank 1 refused call" in text and says[:40] in text, (kind, text)


def long_deadlines(me: Rank) -> list[tuple[str, str]]:
    make = oxmoe.create_allreduce_fusion_workspace
    x, results = torch.ones(4, 64, dtype=torch.bfloat16), []
    for deadline in (1e12, 1e30, 10**400):

        def body(seconds: Any = deadline) -> None:
            workspace = make(max_token_num=8, hidden_dim=64, dtype="bfloat16", group=me.all, deadline=seconds)
            assert bool((oxmoe.allreduce_fusion(x, workspace, 0) == me.world).all())
            assert bool((oxmoe.allreduce_fusion(x, workspace, 0, deadline=seconds) == me.world).all())
            workspace.destroy()

        results.append(raised(body))
    return results


def test_deadlines_that_never_come(four: Crew) -> None:
    assert four.run(long_deadlines) == [[("nothing", "")] * 3] * 4
    # The wait for a function is one of Python's.
    assert of_two(lambda data: [data, data], deadline=1e30) == ("nothing", "")


def numbers_start_again(me: Rank) -> list[str]:
    """Makes calls whose numbers pass 2^32, while one rank refuses those before and at the end."""
    make = oxmoe.create_allreduce_fusion_workspace
    workspace = make(max_token_num=8, hidden_dim=64, dtype=torch.bfloat16, group=me.all, deadline=20)
    workspace._epoch = 2**32 - 3
    x, kinds = torch.ones(4, 64, dtype=torch.bfloat16), []
    for turn in range(6):
        wrong = me.rank == 1 and turn in (1, 2)
        kinds.append(raised(lambda w=wrong: oxmoe.allreduce_fusion(None if w else x, workspace, 0))[0])
    assert workspace._epoch == 3
    workspace.destroy()
    return kinds


def test_numbers_of_calls_start_again(four: Crew) -> None:
    for rank, kinds in enumerate(four.run(numbers_start_again)):
        refused = "ValueError" if rank == 1 else "RuntimeError"
        assert kinds == ["nothing", refused, refused, "nothing", "nothing", "nothing"], (rank, kinds)


def forked_child(me: Rank, what: str) -> tuple[list[float], tuple[str, str]]:
    """One rank forks, and its child uses the parent's workspace. Returns (values of later calls, what the child
    raised)."""
    make = oxmoe.create_allreduce_fusion_workspace
    workspace = make(max_token_num=8, hidden_dim=64, dtype=torch.bfloat16, group=me.all, deadline=20)
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    values, child = [float(oxmoe.allreduce_fusion(x, workspace, 0)[0, 0])], ("", "")
    if me.rank == 1:
        ours, theirs = os.pipe()
        if (pid := os.fork()) == 0:
            wrong = {"call": lambda: oxmoe.allreduce_fusion(x * 7, workspace, 0), "destroy": workspace.destroy}[what]
            os.write(theirs, "\n".join(raised(wrong)).encode())
            os._exit(0)
        os.close(theirs)
        os.waitpid(pid, 0)
        with os.fdopen(ours) as pipe:
            kind, _, text = pipe.read().partition("\n")
        child = kind, text
    values += [float(oxmoe.allreduce_fusion(x, workspace, 0)[0, 0]) for _ in range(2)]
    workspace.destroy()
    return values, child


@pytest.mark.parametrize("what", ["call", "destroy"])
def test_a_child_of_fork_leaves_its_parents_workspace_alone(what: str) -> None:
    """A child's send would end the parent: gloo's thread there meets an answer to a call that it does not know."""
    crew = Crew(2)
    (values, _), (others, (kind, text)) = crew.run(forked_child, what)
    crew.close()
    assert values == others == [2.0, 2.0, 2.0]
    if what == "call":
        assert kind == "RuntimeError" and text.startswith("workspace: process ") and "child" in text, (kind, text)
    else:
        assert (kind, text) == ("nothing", "")


def killed_rank(me: Rank) -> tuple[float, list[tuple[str, str]]]:
    make = oxmoe.create_allreduce_fusion_workspace
    workspace = make(max_token_num=8, hidden_dim=64, dtype=torch.bfloat16, group=me.all, deadline=15)
    x = torch.ones(5, 64, dtype=torch.bfloat16)
    oxmoe.allreduce_fusion(x, workspace, 0)
    if me.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    results = [raised(lambda: oxmoe.allreduce_fusion(x, workspace, 0)) for _ in range(2)]
    took = time.monotonic() - started
    workspace.destroy()
    return took, results


def test_a_killed_rank_is_named() -> None:
    crew = Crew(3)
    for rank, (took, results) in enumerate(crew.run(killed_rank, gone=(2,))):
        (kind, text), (again, reminder) = results
        assert kind == "TimeoutError" and took < 14
        assert f"rank {rank} waited for peer 2 in call 1" in text and "bfloat16 [5, 64]" in text, text
        assert again == "RuntimeError" and "failed before" in reminder
    crew.close()


def late_rank(me: Rank) -> tuple[float, str, str]:
    make = oxmoe.create_allreduce_fusion_workspace
    workspace = make(max_token_num=8, hidden_dim=64, dtype=torch.bfloat16, group=me.all, deadline=15)
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    oxmoe.allreduce_fusion(x, workspace, 0)
    if me.rank == 1:
        time.sleep(5)
    started = time.monotonic()
    kind, text = raised(lambda: oxmoe.allreduce_fusion(x, workspace, 0, deadline=1.0))
    took = time.monotonic() - started
    workspace.destroy()
    return took, kind, text


def test_a_late_rank_ends_in_a_timeout_everywhere() -> None:
    crew = Crew(2)
    (took, kind, text), (_, late_kind, late_text) = crew.run(late_rank)
    assert kind == "TimeoutError" and 0.9 < took < 4.9
    assert "rank 0 waited for peer 1 in call 1" in text and "[3, 64]" in text and "deadline" in text
    assert late_kind == "TimeoutError" and "rank 1 waited for peer 0 in call 1" in late_text
    crew.close()


def destroyed_elsewhere(me: Rank) -> tuple[str, str]:
    make = oxmoe.create_allreduce_fusion_workspace
    workspace = make(max_token_num=8, hidden_dim=64, dtype=torch.bfloat16, group=me.pair, deadline=15)
    if me.rank % 2:
        return raised(workspace.destroy)
    result = raised(lambda: oxmoe.allreduce_fusion(torch.ones(2, 64, dtype=torch.bfloat16), workspace, 0))
    workspace.destroy()
    return result


def test_destroy_against_a_call(four: Crew) -> None:
    for rank, (kind, text) in enumerate(four.run(destroyed_elsewhere)):
        assert kind == "RuntimeError" and (
            "destroys the workspace while" in text if rank % 2 else "destroyed its" in text
        )


# One process


class Meeting:
    """An all-gather between threads."""

    def __init__(self, size: int) -> None:
        import threading

        self.size = size
        self.barrier = threading.Barrier(size)
        self.parts: list[bytes] = [b""] * size

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def exchange(data: bytes) -> list[bytes]:
            self.barrier.wait(20)
            self.parts[rank] = data
            self.barrier.wait(20)
            return list(self.parts)

        return exchange


def in_threads(size: int, body: Callable[[int, Meeting], Any]) -> list[Any]:
    from concurrent.futures import ThreadPoolExecutor

    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: body(rank, meeting), range(size)))


def test_exchange_function(rng: torch.Generator) -> None:
    parts = [torch.randn(4, 64, generator=rng).to(torch.bfloat16) for _ in range(3)]

    def body(rank: int, meeting: Meeting) -> tuple[torch.Tensor, str]:
        workspace = oxmoe.create_allreduce_fusion_workspace(
            world_size=3, rank=rank, max_token_num=4, hidden_dim=64, dtype="bfloat16", exchange=meeting.of(rank)
        )
        result = oxmoe.allreduce_fusion(parts[rank], workspace, 0)
        wrong = raised(lambda: oxmoe.allreduce_fusion(parts[rank][: 3 + (rank == 0)], workspace, 0))
        workspace.destroy()
        return result, wrong[0]

    for result, wrong in in_threads(3, body):
        assert same_bits(result, total(parts)) and wrong == "ValueError"


def test_exchange_function_that_never_returns() -> None:
    gate = multiprocessing.get_context("spawn").Event()
    calls = []

    def exchange(data: bytes) -> list[bytes]:
        calls.append(data)
        if len(calls) > 1:
            gate.wait(10)
        return [data, data]

    workspace = oxmoe.create_allreduce_fusion_workspace(
        world_size=2, rank=0, max_token_num=4, hidden_dim=64, dtype=torch.bfloat16, exchange=exchange, deadline=1.0
    )
    kind, text = raised(lambda: oxmoe.allreduce_fusion(torch.ones(4, 64, dtype=torch.bfloat16), workspace, 0))
    gate.set()
    assert kind == "TimeoutError" and "rank 0 waited for a peer in call 0" in text and "[4, 64]" in text
    workspace.destroy()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda data: None, "raised TypeError"),
        (lambda data: [data], "returned 1 items for 2 ranks"),
        (lambda data: iter(lambda: data, None), "returned more than 2 items for 2 ranks"),
        (lambda data: [data, 10**12], "returned int in place of rank 1's bytes"),
        (lambda data: [data, len(data)], "returned int in place of rank 1's bytes"),
        (lambda data: [data, "a" * len(data)], "returned str in place of rank 1's bytes"),
        (lambda data: [data, None], "returned NoneType in place of rank 1's bytes"),
        (lambda data: [data, data[:-1]], "returned [220, 219] bytes for 2 ranks of 220"),
        (lambda data: [data[:-1] + b"!", data], "returned something else in place of rank 0's own bytes"),
    ],
)
def test_what_an_exchange_function_returns(answer: Callable[[bytes], Any], expected: str) -> None:
    kind, text = of_two(answer)
    assert kind == "TimeoutError" and "waited for a peer" in text and expected in text, (kind, text)


def test_headers_that_an_exchange_function_makes_up() -> None:
    # Nobody reads the words of a rank that agrees, so they need not be text.
    assert of_two(lambda data: [data, data[:20] + b"\xff" * 200]) == ("nothing", "")
    for made_up in (b"\0" * 220, b"oxar" + b"\xff" * 216, b"oxar" + (9).to_bytes(4, "little") + b"\0" * 212):
        kind, text = of_two(lambda data, made_up=made_up: [data, made_up])  # type: ignore[misc]
        assert kind == "RuntimeError" and "no all-reduce header" in text, (kind, text)

    def leaves(data: bytes) -> list[bytes]:
        raise SystemExit(3)

    started = time.monotonic()
    with pytest.raises(SystemExit):
        of_two(leaves)
    assert time.monotonic() - started < 4


def test_a_second_thread_does_not_use_the_workspace() -> None:
    """Two calls at a time would take each other's messages. The later one raises, and the first one is right."""
    inside, go = threading.Event(), threading.Event()

    def exchange(data: bytes) -> list[bytes]:
        if inside.is_set():
            return [data, data]
        if len(data) == 2 * 64 * 4:
            inside.set()
            go.wait(20)
        return [data, data]

    workspace = oxmoe.create_allreduce_fusion_workspace(
        world_size=2, rank=0, max_token_num=2, hidden_dim=64, dtype=torch.float32, exchange=exchange, device="cpu"
    )
    x = torch.rand(2, 64)
    results: list[torch.Tensor] = []
    first = threading.Thread(target=lambda: results.append(oxmoe.allreduce_fusion(x, workspace, 0)))
    first.start()
    assert inside.wait(20)
    for call in (lambda: oxmoe.allreduce_fusion(x, workspace, 0), workspace.destroy):
        kind, text = raised(call)
        assert kind == "ValueError" and text.startswith("workspace: a call on another thread uses it"), (kind, text)
    # A wrong call sends no refusal into the other one, either.
    assert raised(lambda: oxmoe.allreduce_fusion(x, workspace, 0, deadline=0))[0] == "ValueError"
    go.set()
    first.join(20)
    assert torch.equal(results[0], 2 * x)
    assert torch.equal(oxmoe.allreduce_fusion(x, workspace, 0), 2 * x)
    workspace.destroy()


def test_an_interrupted_call_fails_the_workspace() -> None:
    """Rows of the interrupted call may still arrive, and the next call would take them for its own."""
    calls = []

    def exchange(data: bytes) -> list[bytes]:
        calls.append(data)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return [data, data]

    workspace = oxmoe.create_allreduce_fusion_workspace(
        world_size=2, rank=0, max_token_num=4, hidden_dim=64, dtype=torch.bfloat16, exchange=exchange, device="cpu"
    )
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    with pytest.raises(KeyboardInterrupt):
        oxmoe.allreduce_fusion(x, workspace, 0)
    kind, text = raised(lambda: oxmoe.allreduce_fusion(x, workspace, 0))
    assert kind == "RuntimeError" and "failed before (rank 0, call 0" in text and "KeyboardInterrupt" in text, text
    workspace.destroy()
    assert len(calls) == 3


# Errors of a connection


class Failing:
    """A process group of two ranks. Everything fails with an error of these arguments."""

    def __init__(self, *args: str) -> None:
        self.args = args

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def send(self, *_: Any) -> Any:
        raise RuntimeError(*self.args)

    recv = wait = send


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        ([], "RuntimeError"),
        ([""], "RuntimeError"),
        (["\n \n"], "RuntimeError"),
        (["\n  closed \nby whom"], "closed"),
        (["closed"], "closed"),
    ],
    ids=repr,
)
def test_errors_of_a_connection_without_a_text(args: list[str], shown: str) -> None:
    from oxmoe.allreduce.exchange import GroupLink, PeerLost

    group = Failing(*args)
    link = GroupLink(group)
    link.reserve(4)
    end = time.monotonic() + 20
    calls: list[Callable[[], Any]] = [
        lambda: link.post(b"header"),
        lambda: link.headers(end, 4, lambda _: False),
        lambda: link.agree(end),
        lambda: link._wait(1, group, end),
    ]
    for call in calls:
        with pytest.raises(PeerLost) as lost:
            call()
        assert str(lost.value) == f"the connection is lost ({shown})" and lost.value.peer == 1
