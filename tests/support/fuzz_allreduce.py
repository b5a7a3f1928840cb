"""Random sequences of all-reduces on one workspace, compared with float64. Each rank draws the same calls.

`python tests/support/fuzz_allreduce.py --seconds 300 --seed 7 --ranks 4` runs longer than the tests.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import oxmoe
from oxmoe import AllReduceFusionPattern as Pattern
from ranks import (
    DTYPES,
    QUANT,
    Crew,
    Rank,
    check_norm,
    check_quant,
    crc,
    draw,
    poison,
    quant_operands,
    raised,
    same_bits,
)

# The workspace: rows of so many bytes. Calls have any shape that fits.
ROWS, ROW_BYTES = 24, 1024
# Half an ulp relative to a number, and the smallest step.
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
STEP = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149}
FP32 = 2.0**-24
KINDS = [
    "sum",
    "norm",
    "norm",
    "fp8",
    "fp4",
    "group",
    "token",
    "mxfp8",
    "finalize",
    "finalize",
    "reduction",
    "reduction",
]


@dataclass
class Call:
    """One call of a sequence. `parts` has each rank's contribution, `magnitude` bounds the sums of its terms."""

    kind: str
    seed: int
    dtype: torch.dtype
    tokens: int
    hidden: int
    rng: random.Random
    given: dict[str, Any] = field(default_factory=dict)
    parts: list[torch.Tensor] = field(default_factory=list)
    magnitude: Any = 0.0

    def draw(self, name: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return draw(self.seed, name, *shape, dtype=self.dtype, scale=scale)

    def empty(self) -> torch.Tensor:
        return poison(self.tokens, self.hidden, dtype=self.dtype)


def draw_call(rng: random.Random, kinds: list[str] = KINDS) -> Call:
    kind = rng.choice(kinds)
    dtype = DTYPES[rng.choice(list(DTYPES))]
    item = torch.empty((), dtype=dtype).element_size()
    unit = {"fp4": 16, "mxfp8": 32, "finalize": 16, "reduction": 16}.get(kind, 16 // item)
    most = ROWS * ROW_BYTES // (unit * item)
    hidden = unit * rng.choice(
        [1, 2, 3, rng.randint(1, 9), rng.randint(1, min(most, 96)), min(most, ROW_BYTES // item // unit)]
    )
    room = ROWS * ROW_BYTES // (hidden * item)
    tokens = min(room, rng.choice([0, 1, 2, 3, rng.randint(0, room), room]))
    return Call(kind, rng.randrange(2**31), dtype, tokens, hidden, random.Random(rng.randrange(2**31)))


def contribute(call: Call, size: int, rank: int) -> None:
    """Draws every rank's contribution as float64, and the operands of this rank."""
    rng, tokens, hidden = call.rng, call.tokens, call.hidden
    scale = rng.choice([1.0, 1.0, 1e-3, 30.0])
    if call.kind == "finalize":
        top_k, rows, typed, shared = (
            rng.randint(0, 4),
            rng.randint(0, 9),
            rng.choice([*DTYPES, None]),
            rng.random() < 0.5,
        )
    else:
        experts = rng.randint(0, 3)
    for i in range(size):
        if call.kind == "finalize":
            gemm2 = call.draw(f"rows {i}", rows, hidden, scale=scale)
            table = torch.randint(
                -1, rows, (tokens, top_k), generator=torch.Generator().manual_seed(call.seed + i)
            ).int()
            weights = None if typed is None else draw(call.seed, f"weights {i}", tokens, top_k, dtype=DTYPES[typed])
            last = call.draw(f"shared {i}", tokens, hidden) if shared else None
            wide = torch.cat([gemm2.double(), torch.zeros(1, hidden, dtype=torch.float64)])
            factor = torch.ones(tokens, top_k) if weights is None else weights
            terms = wide[table.long()] * factor.double()[..., None]
            given = {"input": gemm2, "expanded_idx_to_permuted_idx": table, "expert_scale_factor": weights}
            given["shared_expert_output"] = last
            terms = torch.cat(
                [terms, terms.new_zeros(tokens, 1, hidden) if last is None else last.double()[:, None]], 1
            )
        elif call.kind == "reduction":
            active = call.draw(f"active {i}", experts * tokens, hidden, scale=scale)
            factors = draw(call.seed, f"scales {i}", experts, tokens)
            tokens_in = call.draw(f"tokens {i}", tokens, hidden)
            terms = (active.double().view(experts, tokens, hidden) * factors.double()[..., None]).transpose(0, 1)
            terms = torch.cat([terms, tokens_in.double()[:, None]], 1)
            given = {
                "input": tokens_in,
                "moe_reduction_device_num_experts": experts,
                "moe_reduction_scale_input": factors,
                "moe_reduction_active_experts_token_input": active,
                "moe_reduction_token_input": tokens_in.clone(),
            }
        else:
            given = {"input": call.draw(f"input {i}", tokens, hidden, scale=scale)}
            terms = given["input"].double()[:, None]
        call.parts.append(terms.sum(1))
        # A rank of the MoE patterns rounds its own sum, too.
        rounding = 1.0 if call.kind in ("finalize", "reduction") else 0.0
        call.magnitude = (
            call.magnitude + terms.abs().sum(1) * (8 * FP32 + rounding * HALF_ULP[call.dtype]) + STEP[call.dtype]
        )
        if i == rank:
            call.given = given
    if tokens and call.kind in ("sum", "norm") and rng.random() < 0.3:
        # A NaN of this or another payload, an infinity or a zero: all ranks know it.
        where, what, at = (
            rng.randrange(size),
            rng.choice([torch.nan, -torch.nan, torch.inf, -0.0]),
            rng.randrange(hidden),
        )
        call.parts[where][tokens - 1, at] = what
        if where == rank:
            call.given["input"][tokens - 1, at] = what


def near(got: torch.Tensor, expected: torch.Tensor, error: Any) -> bool:
    """Whether rounded numbers are as near to the expected ones as their dtype allows. error: of the unrounded ones."""
    got, half, step = got.double(), HALF_ULP[got.dtype], STEP[got.dtype]
    largest = torch.finfo({2.0**-8: torch.bfloat16, 2.0**-11: torch.float16}.get(half, torch.float32)).max
    if not torch.equal(got.isnan(), expected.isnan()):
        return False
    inside = expected.abs() < 0.99 * largest
    return bool(((got - expected).abs() <= (expected.abs() + error) * half + error + step)[inside].all())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's bytes in the order of its elements, whatever its strides."""
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


class Player:
    """A rank of a sequence."""

    def __init__(self, me: Rank, seed: int) -> None:
        self.rng = random.Random(seed)
        sizes = (me.world, 2) if me.world == 4 else (me.world,)
        make = oxmoe.create_allreduce_fusion_workspace
        options: dict[str, Any] = {
            "max_token_num": ROWS,
            "hidden_dim": ROW_BYTES // 2,
            "dtype": "bfloat16",
            "deadline": 30,
        }
        self.spaces = [make(group=me.group(size), device="cpu", **options) for size in sizes]
        self.wrong: list[str] = []
        self.sums: list[list[int]] = [[] for _ in sizes]

    def note(self, call: Call, what: str, right: Any) -> None:
        if not right:
            self.wrong.append(f"{call.kind} {call.dtype} [{call.tokens}, {call.hidden}], seed {call.seed}: {what}")

    def step(self) -> None:
        """Makes a right call, or one that a rank or all ranks refuse."""
        place = self.rng.randrange(len(self.spaces))
        workspace = self.spaces[place]
        drawn = self.rng.random()
        if drawn < 0.76:
            self.right(place, draw_call(self.rng))
        elif drawn < 0.88:
            self.refused(workspace, self.rng.randrange(2) % workspace.world_size)
        else:
            self.disagree(workspace)

    # Right calls

    def right(self, place: int, call: Call) -> None:
        workspace, rng = self.spaces[place], call.rng
        contribute(call, workspace.world_size, workspace.rank)
        total = sum(call.parts[1:], call.parts[0])
        if call.kind == "sum":
            output = rng.choice([None, call.empty(), call.given["input"]])
            result = oxmoe.allreduce_fusion(call.given["input"], workspace, Pattern.kAllReduce, output=output)
            self.note(call, "another result than output", output is None or result is output)
            self.note(call, "sum", near(result, total, call.magnitude))
            self.sums[place] += crc(result)
            return
        residual_in = call.draw("residual", call.tokens, call.hidden, scale=rng.choice([1.0, 0.0, 20.0]))
        gamma = call.draw("gamma", call.hidden)
        eps, bias = rng.choice([1e-6, 1e-5, 1.0]), rng.choice([0.0, 0.0, 1.0, 0.5])
        common = {"rms_gamma": gamma, "rms_eps": eps, "weight_bias": bias}
        expected = total + residual_in.double()
        error = call.magnitude + (total.abs() + call.magnitude) * HALF_ULP[call.dtype] + STEP[call.dtype]
        if call.kind in ("finalize", "reduction"):
            self.experts(place, call, (total, expected, error), residual_in, common)
            return
        before = {
            name: value.clone()
            for name, value in {**call.given, "residual_in": residual_in, "rms_gamma": gamma}.items()
        }
        if call.kind == "norm":
            norm = call.given["input"] if rng.random() < 0.3 else call.empty()
            out = residual_in if rng.random() < 0.4 else call.empty()
            result = oxmoe.allreduce_fusion(
                **call.given,
                workspace=workspace,
                pattern=1,
                residual_in=residual_in,
                residual_out=out,
                norm_out=norm,
                **common,
            )
            self.note(call, "another result than norm_out", result is norm)
            extra = {}
        else:
            norm, out, extra = self.quantised(call, workspace, residual_in, common)
        self.note(call, "residual_out", near(out, expected, error))
        self.note(call, "norm_out", not check_norm(norm, out, gamma, eps, bias))
        for name, value in before.items():
            now = {**call.given, "residual_in": residual_in, "rms_gamma": gamma}[name]
            self.note(call, f"{name} was written", now is norm or now is out or same_bits(now, value))
        self.sums[place] += crc(out, norm, *(extra[name] for name in ("quant_out",) if name in extra))

    def quantised(
        self, call: Call, workspace: Any, residual_in: torch.Tensor, common: dict[str, Any]
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Runs both patterns of a quantisation: the one that writes the norm, and the one that does not."""
        rng, item = call.rng, call.given["input"].element_size()
        chunk = 16 // item
        groups = [group for group in (1, 2, 3, chunk, 16, 32, 64, 128) if call.hidden % group == 0]
        layout, group, tensor = rng.randrange(3), rng.choice(groups), rng.random() < 0.5
        outputs: list[dict[str, Any]] = []
        norm, residuals = call.empty(), []
        for with_norm in (True, False):
            if call.kind == "mxfp8":
                padded = -(-call.tokens // 128) * 128 * -(-call.hidden // 128) * 4
                linear = layout == 2
                count = call.tokens * call.hidden // 32 if linear else padded
                extra: dict[str, Any] = {
                    "quant_out": poison(call.tokens, call.hidden, dtype=torch.float8_e4m3fn),
                    "scale_out": torch.full((count + 3,), 0xA5, dtype=torch.uint8),
                    "layout_code": 2 if linear else rng.choice([0, None]),
                }
                patterns = Pattern.kARResidualRMSNormMXFP8Quant, Pattern.kARResidualRMSNormOutMXFP8Quant
            else:
                extra = quant_operands(call.kind, call.tokens, call.hidden, layout, group, tensor)
                patterns = QUANT[call.kind]
            residual_out = call.empty()
            residuals.append(residual_out)
            result = oxmoe.allreduce_fusion(
                **call.given, workspace=workspace, pattern=patterns[with_norm], residual_in=residual_in,
                residual_out=residual_out, norm_out=norm if with_norm else None, **common, **extra,
            )  # fmt: skip
            first = extra["quant_out"] if call.kind == "mxfp8" or not with_norm else norm
            self.note(call, "another result than the pattern's", result is first)
            outputs.append(extra)
        if call.kind == "mxfp8":
            codes, scales = oxmoe.mxfp8_quantize(norm, layout != 2)
            self.note(call, "quant_out", same_bits(outputs[0]["quant_out"], codes))
            self.note(call, "scale_out", torch.equal(outputs[0]["scale_out"][:-3], scales.view(torch.uint8).flatten()))
            self.note(call, "beyond scale_out", bool((outputs[0]["scale_out"][-3:] == 0xA5).all()))
        else:
            for text in check_quant(call.kind, norm, outputs[0]):
                self.note(call, text, False)
        self.near_norm(call, norm, outputs[0], common)
        for name in ("quant_out", "scale_out"):
            if name in outputs[0]:
                same = torch.equal(*(flat_bytes(each[name]) for each in outputs))
                self.note(call, f"{name} without norm_out differs", same)
        self.note(call, "residual_out without norm_out differs", same_bits(*residuals))
        return norm, residuals[0], outputs[0]

    def near_norm(self, call: Call, norm: torch.Tensor, extra: dict[str, Any], common: dict[str, Any]) -> None:
        """Compares what the codes of e4m3 mean with the norm."""
        if call.kind not in ("fp8", "token", "group") or not call.tokens:
            return
        codes = extra["quant_out"].double()
        if call.kind == "fp8":
            scales = torch.full((call.tokens, 1), 0.037, dtype=torch.float64)
        elif call.kind == "token":
            scales = extra["scale_out"].double()
        else:
            count = call.hidden // extra["block_quant_group_size"]
            exponents = flat_bytes(extra["scale_out"]).view(call.tokens, -1)[:, :count]
            scales = torch.exp2(exponents.double() - 127).repeat_interleave(extra["block_quant_group_size"], 1)
        wanted = (norm.double() / scales).clamp(-448, 448)
        self.note(call, "codes", bool(((codes - wanted).abs() <= wanted.abs() / 16 * 1.001 + 2.0**-10).all()))

    def experts(
        self, place: int, call: Call, sums: tuple[Any, Any, Any], residual_in: torch.Tensor, common: dict[str, Any]
    ) -> None:
        """Runs a MoE pattern. Each output is given or not, and one of them may be residual_in."""
        workspace, rng = self.spaces[place], call.rng
        total, expected, error = sums
        names = ["residual_out", "norm_out"] + ["output"] * (call.kind == "reduction")
        outputs: dict[str, Any] = {name: call.empty() for name in names if rng.random() < 0.7}
        if not outputs or rng.random() < 0.3:
            outputs[rng.choice(names)] = residual_in
        extra = (
            quant_operands("fp4", call.tokens, call.hidden, rng.randrange(3), 0, rng.random() < 0.5)
            if rng.random() < 0.4
            else {}
        )
        pattern = (
            Pattern.kMoEFinalizeARResidualRMSNorm if call.kind == "finalize" else Pattern.kMoEReductionARResidualRMSNorm
        )
        result = oxmoe.allreduce_fusion(
            **call.given, workspace=workspace, pattern=pattern, residual_in=residual_in, **common, **outputs, **extra
        )
        norm = outputs.get("norm_out", result if call.kind == "finalize" else None)
        first = norm if norm is not None else extra.get("quant_out", outputs.get("residual_out", outputs.get("output")))
        self.note(call, "another result than the first output", result is first)
        if "output" in outputs:
            self.note(call, "output", near(outputs["output"], total, call.magnitude))
        if "residual_out" in outputs:
            self.note(call, "residual_out", near(outputs["residual_out"], expected, error))
            if norm is not None:
                text = check_norm(
                    norm, outputs["residual_out"], common["rms_gamma"], common["rms_eps"], common["weight_bias"]
                )
                self.note(call, "norm_out", not text)
        elif norm is not None and call.tokens:
            root = (expected.square().mean(-1, keepdim=True) + common["rms_eps"]).sqrt()
            wanted = expected / root * (common["weight_bias"] + common["rms_gamma"].double())
            error = (error + expected.abs() * HALF_ULP[call.dtype] + STEP[call.dtype]) / root
            factor = (common["weight_bias"] + common["rms_gamma"].double()).abs()
            self.note(
                call,
                "norm_out",
                near(
                    norm,
                    wanted,
                    4 * error * factor + wanted.abs() * error.amax(-1, keepdim=True) * 4 + wanted.abs() * 2.0**-20,
                ),
            )
        if extra and norm is not None:
            for text in check_quant("fp4", norm, extra):
                self.note(call, text, False)
        self.sums[place] += crc(*outputs.values(), *(extra[name] for name in ("quant_out",) if name in extra))

    # Wrong calls

    def refused(self, workspace: Any, culprit: int) -> None:
        """One rank's operands are wrong. It says so, the others name it, and nothing is written."""
        call = draw_call(self.rng, ["norm"])
        contribute(call, workspace.world_size, workspace.rank)
        x, out, norm = call.given["input"], call.empty(), call.empty()
        operands: dict[str, Any] = {
            "input": x, "pattern": 1, "residual_in": torch.ones_like(x), "residual_out": out, "norm_out": norm,
            "rms_gamma": torch.ones(call.hidden, dtype=call.dtype),
        }  # fmt: skip
        other = torch.float32 if call.dtype != torch.float32 else torch.float16
        wrongs: list[tuple[str, Any]] = [
            ("pattern", self.rng.choice([99, -1, 12, None, "kAllReduce", 1.0])),
            ("deadline", self.rng.choice([0, -1, float("nan"), "5"])),
            ("rms_gamma", torch.ones(call.hidden + 1, dtype=call.dtype)),
            ("rms_gamma", torch.ones(call.hidden, dtype=other)),
            ("rms_eps", "small"),
            ("weight_bias", None),
            ("residual_in", torch.ones(call.tokens + 1, call.hidden, dtype=call.dtype)),
            ("residual_in", None),
            ("input", None),
            ("input", torch.ones(call.hidden, 2, dtype=call.dtype).t()),
            ("norm_out", out),
            ("norm_out", None),
            ("quant_out", torch.empty(call.tokens, call.hidden, dtype=torch.uint8)),
            ("moe_finalize_backend", self.rng.choice(["cake", "x"])),
        ]  # fmt: skip
        name, value = self.rng.choice(wrongs)
        if name == "norm_out" and value is out and not call.tokens:
            value = None
        if workspace.rank == culprit:
            operands[name] = value
        kind, text = raised(lambda: oxmoe.allreduce_fusion(workspace=workspace, **operands))
        if workspace.rank == culprit:
            clean = kind in ("ValueError", "TypeError", "NotImplementedError") and name in text
        else:
            clean = kind == "RuntimeError" and f"rank {culprit} refused call" in text and name in text
        self.note(call, f"{name}={value!r:.60} of rank {culprit}: {kind}: {text}", clean)
        untouched = call.empty()
        self.note(call, "a refused call wrote", same_bits(out, untouched) and same_bits(norm, untouched))

    def disagree(self, workspace: Any) -> None:
        """One rank makes another call, or all make one that does not fit. All say so, and nothing is written."""
        call = draw_call(self.rng, ["sum"])
        call.tokens = max(call.tokens, 1)
        what = self.rng.choice(["tokens", "dtype", "too many"])
        odd, mine = self.rng.randrange(2) % workspace.world_size, workspace.rank
        tokens, dtype = call.tokens, call.dtype
        if what == "too many":
            tokens = ROWS * ROW_BYTES // (call.hidden * torch.empty((), dtype=dtype).element_size()) + 1
        elif what == "tokens":
            tokens -= mine == odd
        elif mine == odd:
            dtype = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
            call.hidden = -(-call.hidden // 8) * 8
        if workspace.world_size == 1 and what != "too many":
            return
        x, output = torch.ones(tokens, call.hidden, dtype=dtype), poison(tokens, call.hidden, dtype=dtype)
        kind, text = raised(lambda: oxmoe.allreduce_fusion(x, workspace, 0, output=output))
        clean = kind == "ValueError" and ("disagree" in text or "the workspace was made for" in text)
        self.note(call, f"{what}: {kind}: {text}", clean)
        self.note(call, f"{what} wrote", same_bits(output, poison(tokens, call.hidden, dtype=dtype)))


def play(me: Rank, seed: int, steps: int) -> tuple[list[str], list[list[int]]]:
    """Makes a sequence of calls. Returns (what is wrong, checksums of the outputs on each workspace)."""
    player = Player(me, seed)
    for number in range(steps):
        try:
            player.step()
        except Exception as error:
            raise RuntimeError(f"step {number} of seed {seed}: {type(error).__name__}: {error}") from error
        if player.wrong:
            break
    for workspace in player.spaces:
        workspace.destroy()
    return player.wrong, player.sums


def run(crew: Crew, seed: int, steps: int, patience: float = 120) -> list[str]:
    """Plays a sequence on all ranks. Returns what is wrong."""
    results: list[tuple[list[str], list[list[int]]]] = crew.run(play, seed, steps, patience=patience)
    wrong = [f"seed {seed}, rank {rank}: {text}" for rank, (texts, _) in enumerate(results) for text in texts]
    world = len(results)
    if not wrong:
        for rank, (_, sums) in enumerate(results):
            first = results[rank // 2 * 2][1] if world == 4 else results[0][1]
            if sums[0] != results[0][1][0] or (len(sums) > 1 and sums[1] != first[1]):
                wrong.append(f"seed {seed}: ranks have other bits than rank {rank}")
    return wrong


def until(seconds: float, once: Callable[[int], list[str]], seed: int) -> tuple[int, list[str]]:
    """Plays sequences until the time is over or something is wrong. Returns (sequences, what is wrong)."""
    end, count = time.monotonic() + seconds, 0
    while True:
        wrong = once(seed + count)
        count += 1
        if wrong or time.monotonic() >= end:
            return count, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50, help="calls of a sequence on one workspace")
    options = parser.parse_args()
    crew = Crew(options.ranks)
    count, wrong = until(options.seconds, lambda seed: run(crew, seed, options.steps), options.seed)
    crew.close()
    print(f"{options.ranks} ranks, seeds {options.seed} to {options.seed + count - 1}, {options.steps} steps each")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
