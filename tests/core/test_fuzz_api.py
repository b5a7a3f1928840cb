"""Random calls of the public API (`fuzz_api.py`, which runs longer by hand), and that the fuzzer finds faults."""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import fuzz_api
import fuzz_calls
import fuzz_dlpack
import fuzz_public
import oxmoe
from fuzz_calls import Call
from public_calls import OF_RANKS

PARTS, CALLS, SECONDS = 4, 20000, 60


@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls(part: int, request: pytest.FixtureRequest) -> None:
    """Each call is right or one clear error, and nothing else is written. Parts run beside each other if there are
    cores."""
    each = CALLS // PARTS
    run = fuzz_api.fuzz(request.config.option.seed, each, SECONDS, first=part * each)
    assert not run.failures, "\n\n".join(run.failures)
    # NOTE: the box of time is for machines that are slow; a run that stopped early all the same must have begun.
    assert run.calls >= each // 20, f"{run.calls} calls in {SECONDS} seconds"
    ended = Counter[str]()
    for name, count in run.outcomes.items():
        ended[name.rpartition(" ")[2]] += count
    assert ended["result"] >= 0.15 * run.calls, ended
    assert ended["error"] >= 0.3 * run.calls, ended


def test_every_public_function_is_drawn() -> None:
    """Every function of `oxmoe.__all__` is called, but for the collective ones and two without operands."""
    drawn = {*fuzz_public.NAMES}
    for draw in set(fuzz_api.DRAWS) - {fuzz_public.draw_public}:
        for number in range(12):
            call = draw(random.Random(number), torch.Generator().manual_seed(number))
            drawn.add(call.name.partition(" ")[0])
    functions = {name for name in oxmoe.__all__ if callable(getattr(oxmoe, name))}
    classes = {name for name in functions if isinstance(getattr(oxmoe, name), type)}
    assert functions - classes - drawn == OF_RANKS | {"device_info", "stats"}


def faulty(run: Any, outputs: tuple[str, ...] = ()) -> str | None:
    """Returns what the fuzzer says of a function that copies x to out."""
    operands = {"x": torch.arange(6.0), "out": torch.full((6,), 7.0)}

    def check(before: dict[str, Any], result: Any) -> None:
        assert torch.equal(result, before["x"]), "out is not x"

    return fuzz_api.judge(Call("copy", run, operands, check, outputs))[1]


def raising(error: Exception, write: str | None = None) -> Any:
    def run(operands: dict[str, Any]) -> Any:
        if write is not None:
            operands[write][0] = 3.0
        raise error

    return run


def test_faults_are_found() -> None:
    assert faulty(lambda o: o["out"].copy_(o["x"]), ("out",)) is None
    assert "wrong result" in str(faulty(lambda o: o["out"].fill_(1.0), ("out",)))
    assert "changed out" in str(faulty(lambda o: o["out"].copy_(o["x"])))
    assert "changed x" in str(faulty(lambda o: o["out"].copy_(o["x"].add_(1)), ("out",)))
    assert "changed out and raised" in str(faulty(raising(ValueError("x"), "out"), ("out",)))
    assert "raised KeyError" in str(faulty(raising(KeyError("x"))))
    assert "raised RuntimeError" in str(faulty(raising(RuntimeError("internal error"))))
    assert "a right call raised" in str(faulty(raising(ValueError("x"))))


def test_a_call_that_ends_the_process_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """After such a call the run goes on with the next one."""
    program = tmp_path / "fuzz_api_crashing.py"
    program.write_text(
        "import ctypes, fuzz_api\n"
        "judge = fuzz_api.judge\n"
        "def crash(call):\n"
        "    crash.made += 1\n"
        "    return ctypes.string_at(0) if crash.made == 3 else judge(call)\n"
        "crash.made = 0\n"
        "fuzz_api.judge = crash\n"
        "fuzz_api.main()\n"
    )
    monkeypatch.setattr(fuzz_api, "__file__", str(program))
    run = fuzz_api.fuzz(5, 6, 60.0)
    assert run.calls == 6
    (crash, *_) = run.failures
    assert crash.startswith("call 2 of seed 5: ended the process (signal SIGSEGV)") and "--seed 5 --call 2" in crash


def test_draws_depend_on_seed_and_number_alone() -> None:
    first, again, other = (fuzz_api.describe(fuzz_api.draw(seed, 7)) for seed in (3, 3, 4))
    assert first == again != other


def test_memory_beside_an_output_is_watched() -> None:
    """The fuzzer watches bytes of the output's storage that are not the output's."""
    room = torch.zeros(8)
    operands = {"out": room[2:4]}
    snapshot = fuzz_api.Snapshot.of(operands)
    allowed = [fuzz_api.extent_of(operands["out"])]
    room[2:4] = 1
    assert snapshot.changed(allowed) == []
    ctypes.memset(room.data_ptr() + 16, 1, 1)
    assert snapshot.changed(allowed) == ["out"]


def test_the_oracle_sees_what_a_lie_of_bytes_tells() -> None:
    """Bytes may lie anywhere, so a capsule that begins one byte later and ends before the end tells the truth."""
    lying = fuzz_dlpack.Lying(np.arange(12, dtype=np.uint8).reshape(3, 4), random.Random(0))
    lying.lie, lying.versioned = "unaligned", False
    assert lying.seen.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert torch.from_dlpack(lying).equal(torch.from_numpy(lying.seen))
    wide = fuzz_dlpack.Lying(np.zeros((3, 4), dtype=np.float32), random.Random(0))
    wide.lie = "unaligned"
    assert wide.seen is wide.array


def test_rows_that_cancel_are_compared_with_their_roundings() -> None:
    """A row whose terms cancel may be off by their roundings, and by no more."""
    generator = torch.Generator().manual_seed(3)
    x, weights, columns = (torch.randn(shape, generator=generator).double() for shape in ((40, 24), (24,), (12,)))
    x[5] -= (x[5] @ weights - 1e-4) / weights.square().sum() * weights
    x = x.float()

    def reference_of(x: torch.Tensor) -> torch.Tensor:
        return ((x.double() @ weights)[:, None] * columns).float()

    expected, off = reference_of(x), torch.zeros(40, 1)
    off[5] = 2e-7
    fuzz_calls.close(expected + off * columns.float(), x, reference_of)
    off[5] = 1e-3
    with pytest.raises(AssertionError, match="a row that cancels is wrong by more than its roundings"):
        fuzz_calls.close(expected + off * columns.float(), x, reference_of)
    off[5], off[7] = 2e-7, 1e-2
    with pytest.raises(AssertionError, match=" ulp at "):
        fuzz_calls.close(expected + off * columns.float(), x, reference_of)


def test_numbers_below_the_smallest_normal_may_round_to_neighbours() -> None:
    step = 2.0**-133
    expected = torch.full((4, 8), 3 * step, dtype=torch.bfloat16)
    fuzz_calls.close(expected + step, expected, lambda x: x, norm=0.1)
    for factor in (0, 5 / 3):
        with pytest.raises(AssertionError, match="relative norm"):
            fuzz_calls.close(expected * factor, expected, lambda x: x, norm=0.1)
