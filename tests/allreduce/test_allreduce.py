"""allreduce_fusion on CPU tensors: real processes over gloo on loopback, against a reference in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oxmoe
from oxmoe import AllReduceFusionPattern as Pattern
from oxmoe.allreduce import takes
from ranks import (
    DTYPES,
    QUANT,
    Crew,
    Rank,
    alike,
    check_norm,
    check_quant,
    crc,
    crews,
    draw,
    poison,
    quant_operands,
    same_bits,
    seed_of,
    total,
)

four = crews(4)


def every_pattern(
    me: Rank, size: int, seed: int, dtype: torch.dtype, tokens: int, hidden: int, layout: int, group: int
) -> tuple[list[str], list[int]]:
    """Calls all patterns that add the input, on fresh tensors. Returns (what is wrong, checksums of the outputs)."""
    workspace = oxmoe.create_allreduce_fusion_workspace(
        max_token_num=max(tokens, 1), hidden_dim=hidden, dtype=dtype, group=me.group(size), deadline=20
    )
    first = me.rank // size * size
    parts = [draw(seed, f"input {first + i}", tokens, hidden, dtype=dtype) for i in range(size)]
    mine = parts[workspace.rank]
    residual_in = draw(seed, "residual", tokens, hidden, dtype=dtype)
    gamma, eps = draw(seed, "gamma", hidden, dtype=dtype), 1e-5
    expected = total(parts)
    wrong, sums = [], []
    output = poison(tokens, hidden, dtype=dtype)
    result = oxmoe.allreduce_fusion(mine, workspace, Pattern.kAllReduce, output=output)
    if result is not output or not same_bits(output, expected):
        wrong.append("kAllReduce")
    again = oxmoe.allreduce_fusion(mine.clone(), workspace, Pattern.kAllReduce)
    if not same_bits(again, output):
        wrong.append("kAllReduce twice")
    residual = (expected.float() + residual_in.float()).to(dtype)
    for bias in (0.0, 1.0):
        # residual_out may be residual_in.
        both, norm = residual_in.clone(), poison(tokens, hidden, dtype=dtype)
        result = oxmoe.allreduce_fusion(
            input=mine,
            workspace=workspace,
            pattern=Pattern.kARResidualRMSNorm,
            launch_with_pdl=True,
            trigger_completion_at_end=False,
            residual_in=both,
            residual_out=both,
            norm_out=norm,
            rms_gamma=gamma,
            rms_eps=eps,
            weight_bias=bias,
            fp32_acc=True,
        )
        if result is not norm or not same_bits(both, residual):
            wrong.append("residual_out")
        wrong.append(check_norm(norm, both, gamma, eps, bias))
        sums += crc(both, norm)
    for kind, (plain, out) in QUANT.items():
        if kind == "fp4" and hidden % 16:
            continue
        quantised = []
        for pattern in (plain, out):
            operands = quant_operands(kind, tokens, hidden, layout, group, tensor=pattern is out)
            residual_out = poison(tokens, hidden, dtype=dtype)
            norm_out = poison(tokens, hidden, dtype=dtype) if pattern is out else None
            result = oxmoe.allreduce_fusion(
                mine,
                workspace,
                int(pattern),
                residual_in=residual_in,
                residual_out=residual_out,
                norm_out=norm_out,
                rms_gamma=gamma,
                rms_eps=eps,
                weight_bias=1.0,
                **operands,
            )
            if result is not (norm_out if pattern is out else operands["quant_out"]):
                wrong.append(f"{pattern.name} returns something else")
            if not same_bits(residual_out, residual) or (norm_out is not None and not same_bits(norm_out, norm)):
                wrong.append(f"{pattern.name}: residual_out or norm_out")
            wrong += check_quant(kind, norm, operands)
            quantised.append(operands["quant_out"])
        sums += crc(*quantised)
    workspace.destroy()
    return [text for text in wrong if text], sums


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "hidden", "layout", "group"),
    [(1, 2880, 0, 96), (7, 704, 1, 64), (130, 640, 0, 128), (5, 1408, 2, 128), (3, 24, 0, 3)],
)
def test_patterns(
    four: Crew, rng: torch.Generator, size: int, dtype: str, tokens: int, hidden: int, layout: int, group: int
) -> None:
    alike(four.run(every_pattern, size, seed_of(rng), DTYPES[dtype], tokens, hidden, layout, group), size)


@pytest.mark.parametrize("size", [2, 4])
def test_no_tokens(four: Crew, rng: torch.Generator, size: int) -> None:
    alike(four.run(every_pattern, size, seed_of(rng), torch.bfloat16, 0, 64, 0, 16), size)


def strange_values(me: Rank, seed: int, dtype: torch.dtype) -> tuple[list[str], list[int]]:
    """Sums raw bit patterns: subnormals, -0.0, infinities, NaNs of every payload, and the bits of an empty slot."""
    tokens, hidden = 6, 256
    workspace = oxmoe.create_allreduce_fusion_workspace(
        max_token_num=tokens, hidden_dim=hidden, dtype=dtype, group=me.all, deadline=20
    )
    ints, bits = (torch.int32, 32) if dtype == torch.float32 else (torch.int16, 16)
    parts = []
    for i in range(me.world):
        rng = torch.Generator().manual_seed(seed + i)
        part = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (tokens, hidden), generator=rng).to(ints)
        part[1] = -(2 ** (bits - 1))  # -0.0
        part[2] = -1  # all ones
        part[3] &= 0x7F if bits == 16 else 0x7FFFFF  # subnormal
        part[4] = torch.randint(-9, 9, (hidden,), generator=rng).to(dtype).view(ints)
        part[5] = part[4]
        parts.append(part.view(dtype))
    parts[1 % me.world][5, 7] = float("inf")
    parts[0][5, 9] = float("nan")
    expected = total(parts)
    output = oxmoe.allreduce_fusion(parts[me.rank], workspace, Pattern.kAllReduce)
    wrong = [] if same_bits(output, expected) else ["sum"]
    if not bool(torch.signbit(output[1]).all()) or not bool((output[1] == 0).all()):
        wrong.append("-0.0")
    residual, norm = poison(tokens, hidden, dtype=dtype), poison(tokens, hidden, dtype=dtype)
    zeros, gamma = torch.full((tokens, hidden), -0.0, dtype=dtype), torch.ones(hidden, dtype=dtype)
    for pattern, extra in ((1, {}), (4, quant_operands("fp8", tokens, hidden, 0, 64, False))):
        oxmoe.allreduce_fusion(
            parts[me.rank],
            workspace,
            pattern,
            residual_in=zeros,
            rms_gamma=gamma,
            residual_out=residual,
            norm_out=norm,
            **extra,
        )
        wrong += [] if same_bits(residual, expected) else ["residual_out"]
    rows = torch.tensor([1, 3, 4])
    wrong += [
        check_norm(norm[rows], residual[rows], gamma, 1e-6, 0.0),
        # torch 2.9 has no index of e4m3 by a tensor on CPUs.
        *check_quant("fp8", norm[rows], {"quant_out": extra["quant_out"].index_select(0, rows)}),
    ]
    # NaN stays NaN, in its own place, also in 8 bits.
    if not bool(extra["quant_out"][2].float().isnan().all()) or not bool(norm[5].float().isnan()[9]):
        wrong.append("NaN")
    workspace.destroy()
    return [text for text in wrong if text], crc(output, residual, norm, extra["quant_out"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strange_values(four: Crew, rng: torch.Generator, dtype: str) -> None:
    alike(four.run(strange_values, seed_of(rng), DTYPES[dtype]), 4)


def moe_patterns(me: Rank, seed: int, dtype: torch.dtype, quantise: bool) -> tuple[list[str], list[int]]:
    """Compares patterns 6 and 7 with their contributions summed by kAllReduce's rule."""
    tokens, hidden, experts, top_k, rows = 5, 704, 3, 4, 23
    workspace = oxmoe.create_allreduce_fusion_workspace(
        max_token_num=tokens, hidden_dim=hidden, dtype=dtype, group=me.all, deadline=20
    )
    residual_in, gamma = draw(seed, "residual", tokens, hidden, dtype=dtype), draw(seed, "gamma", hidden, dtype=dtype)

    def operands(rank: int) -> tuple[dict[str, Any], torch.Tensor]:
        gemm2 = draw(seed, f"gemm2 {rank}", rows, hidden, dtype=dtype)
        places = torch.randint(-1, rows, (tokens, top_k), generator=torch.Generator().manual_seed(seed + rank))
        weights = draw(seed, f"weights {rank}", tokens, top_k)
        shared = draw(seed, f"shared {rank}", tokens, hidden, dtype=dtype)
        sums = torch.zeros(tokens, hidden)
        for j in range(top_k):
            term = weights[:, j, None] * gemm2[places[:, j].clamp(min=0)].float()
            sums = torch.where(places[:, j, None] >= 0, sums + term, sums)
        given = {
            "input": gemm2,
            "expanded_idx_to_permuted_idx": places.int(),
            "expert_scale_factor": weights,
            "shared_expert_output": shared,
        }
        return given, (sums + shared.float()).to(dtype)

    def reduction(rank: int) -> tuple[dict[str, Any], torch.Tensor]:
        active = draw(seed, f"active {rank}", experts * tokens, hidden, dtype=dtype)
        scales = draw(seed, f"scales {rank}", experts, tokens)
        token_input = draw(seed, f"tokens {rank}", tokens, hidden, dtype=dtype)
        sums = torch.zeros(tokens, hidden)
        for e in range(experts):
            sums = sums + scales[e, :, None] * active[e * tokens : (e + 1) * tokens].float()
        given = {
            "input": token_input,
            "moe_reduction_device_num_experts": experts,
            "moe_reduction_scale_input": scales,
            "moe_reduction_active_experts_token_input": active,
            "moe_reduction_token_input": token_input,
        }
        return given, (sums + token_input.float()).to(dtype)

    wrong, sums = [], []
    cases = ((Pattern.kMoEFinalizeARResidualRMSNorm, operands), (Pattern.kMoEReductionARResidualRMSNorm, reduction))
    for pattern, make in cases:
        expected = total([make(rank)[1] for rank in range(me.world)])
        residual_out, norm_out = poison(tokens, hidden, dtype=dtype), poison(tokens, hidden, dtype=dtype)
        extra = quant_operands("fp4", tokens, hidden, 0, 0, False) if quantise else {}
        if pattern is Pattern.kMoEReductionARResidualRMSNorm:
            extra["output"] = poison(tokens, hidden, dtype=dtype)
        result = oxmoe.allreduce_fusion(
            workspace=workspace,
            pattern=pattern,
            residual_in=residual_in,
            rms_gamma=gamma,
            residual_out=residual_out,
            norm_out=norm_out,
            **make(me.rank)[0],
            **extra,
        )
        if result is not norm_out or not same_bits(residual_out, (expected.float() + residual_in.float()).to(dtype)):
            wrong.append(f"{pattern.name}: residual_out")
        if "output" in extra and not same_bits(extra["output"], expected):
            wrong.append(f"{pattern.name}: output")
        wrong.append(check_norm(norm_out, residual_out, gamma, 1e-6, 0.0))
        wrong += check_quant("fp4", norm_out, extra) if quantise else []
        sums += crc(residual_out, norm_out)
        # Outputs are optional.
        given = {**make(me.rank)[0], "residual_in": residual_in, "rms_gamma": gamma}
        if pattern is Pattern.kMoEFinalizeARResidualRMSNorm:
            alone = oxmoe.allreduce_fusion(workspace=workspace, pattern=pattern, **given)
            wrong += [] if same_bits(alone, norm_out) else ["norm_out alone"]
        else:
            alone = poison(tokens, hidden, dtype=dtype)
            oxmoe.allreduce_fusion(workspace=workspace, pattern=pattern, residual_out=alone, **given)
            wrong += [] if same_bits(alone, residual_out) else ["residual_out alone"]
    workspace.destroy()
    return [text for text in wrong if text], sums


@pytest.mark.parametrize("quantise", [False, True], ids=["plain", "nvfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_moe_patterns(four: Crew, rng: torch.Generator, dtype: str, quantise: bool) -> None:
    alike(four.run(moe_patterns, seed_of(rng), DTYPES[dtype], quantise), 4)


def many_workspaces(me: Rank, seed: int) -> list[str]:
    """Uses workspaces of all ranks and of pairs at once, with calls of random shapes in turn; the pairs are at
    different calls."""
    dtype, hidden = torch.bfloat16, 128
    make = oxmoe.create_allreduce_fusion_workspace
    spaces = [
        (size, make(max_token_num=8, hidden_dim=hidden, dtype=dtype, group=me.group(size), deadline=20))
        for size in (4, 2, 2, 4)
    ]
    wrong = []
    for turn in range(30):
        rng = torch.Generator().manual_seed(seed + turn)
        size, workspace = spaces[int(torch.randint(4, (), generator=rng))]
        first = me.rank // size * size
        tokens = (turn * 5 + first) % 9
        parts = [draw(seed, f"{turn} {first + i}", tokens, hidden, dtype=dtype) for i in range(size)]
        if size == 2 and first == 2 and turn % 3 == 0:
            continue
        result = oxmoe.allreduce_fusion(parts[workspace.rank], workspace, 0)
        if not same_bits(result, total(parts)):
            wrong.append(f"turn {turn}, {size} ranks")
        # output may be the input itself.
        mine = parts[workspace.rank].clone()
        oxmoe.allreduce_fusion(mine, workspace, 0, output=mine)
        if not same_bits(mine, result):
            wrong.append(f"turn {turn} in place")
    for _, workspace in spaces:
        workspace.destroy()
        workspace.destroy()
        if not workspace.destroyed:
            wrong.append("destroy")
    return wrong


def test_several_workspaces_and_subgroups(four: Crew, rng: torch.Generator) -> None:
    assert four.run(many_workspaces, seed_of(rng)) == [[]] * 4


def test_rows_of_experts_are_not_written_over() -> None:
    """A rank may read a row of the MoE patterns' input for another row of the output, so no output may be the input."""
    tokens, hidden = 3, 16
    sizes = {"max_token_num": tokens, "hidden_dim": hidden, "dtype": torch.float32}
    workspace = oxmoe.create_allreduce_fusion_workspace(
        world_size=1, rank=0, exchange=lambda data: [data], device="cpu", **sizes
    )
    rows = torch.arange(tokens * hidden, dtype=torch.float32).view(tokens, hidden)
    operands = {
        "workspace": workspace,
        "pattern": Pattern.kMoEFinalizeARResidualRMSNorm,
        "input": rows,
        "residual_in": torch.ones(tokens, hidden),
        "rms_gamma": torch.ones(hidden),
        "expanded_idx_to_permuted_idx": torch.tensor([[2], [0], [1]], dtype=torch.int32),
    }
    before = rows.clone()
    try:
        with pytest.raises(ValueError, match="norm_out: overlaps input"):
            oxmoe.allreduce_fusion(norm_out=rows, **operands)
        assert torch.equal(rows, before)
        right = oxmoe.allreduce_fusion(norm_out=torch.empty_like(rows), **operands)
        residual = operands["residual_in"].clone()
        assert same_bits(oxmoe.allreduce_fusion(norm_out=residual, **{**operands, "residual_in": residual}), right)
    finally:
        workspace.destroy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_may_be_written_over_the_residual(dtype: str, rng: torch.Generator) -> None:
    """Any one output of kMoEReduction may be residual_in, also the sum, which is written before the residual is
    needed."""
    tokens, hidden, kind = 3, 64, DTYPES[dtype]
    workspace = oxmoe.create_allreduce_fusion_workspace(
        world_size=1, rank=0, max_token_num=tokens, hidden_dim=hidden, dtype=kind, device="cpu"
    )
    draw_rows = lambda rows: torch.randn(rows, hidden, generator=rng).to(kind)  # noqa: E731
    operands = {
        "workspace": workspace,
        "pattern": Pattern.kMoEReductionARResidualRMSNorm,
        "rms_gamma": draw_rows(1)[0],
        "input": draw_rows(tokens),
        "moe_reduction_device_num_experts": 2,
        "moe_reduction_scale_input": torch.randn(2, tokens, generator=rng),
        "moe_reduction_active_experts_token_input": draw_rows(2 * tokens),
        "moe_reduction_token_input": draw_rows(tokens),
    }
    residual = draw_rows(tokens)
    names = ("output", "residual_out", "norm_out")

    def run(over: str | None) -> list[torch.Tensor]:
        given = residual.clone()
        outputs = {name: given if name == over else poison(tokens, hidden, dtype=kind) for name in names}
        oxmoe.allreduce_fusion(residual_in=given, **outputs, **operands)
        return list(outputs.values())

    apart = run(None)
    for over in names:
        assert all(same_bits(a, b) for a, b in zip(run(over), apart, strict=True)), over
    workspace.destroy()


def test_a_callable_without_a_signature_takes_nothing() -> None:
    assert takes(oxmoe.allreduce_fusion, "residual_in", "fp32_acc") and takes(lambda **options: None, "anything")
    assert not takes(oxmoe.allreduce_fusion, "residual_in", "nothing")
    assert not takes(lambda x, /: None, "x")
    for mute in (type, torch.ops.aten.add.Tensor, dict.fromkeys, 7, None):
        assert takes(mute, "input") in (False, True)
    assert not takes(type, "input")
