"""allreduce_fusion's quantised and MoE patterns between GPUs, against the CPU implementation bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oxmoe
import oxmoe._oxmoe as extension
from oxmoe import AllReduceFusionPattern as Pattern
from oxmoe.allreduce.fusion import _Operands
from ranks import (
    DTYPES,
    GPUS,
    QUANT,
    WORLDS,
    Crew,
    Rank,
    alike,
    crc,
    crews,
    draw,
    make,
    on_cpu,
    poison,
    quant_operands,
    same_bits,
    seed_of,
)

crew = crews(WORLDS, gpus=True)
alone = crews(1, gpus=True)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor, with the bytes between its columns."""
    return tensor if tensor._base is None else tensor._base


def on_gpu(operands: dict[str, Any]) -> dict[str, Any]:
    """Returns copies on the GPU with the same strides."""
    return {
        name: whole(x).cuda().as_strided(x.shape, x.stride()) if torch.is_tensor(x) else x
        for name, x in operands.items()
    }


# Starts four ranks on the GPUs of this machine, in time slices.
shared = crews(4, gpus=True)


# (tokens, hidden, NVFP4's layout, scale group).
CASES = [
    (1, 2880, 0, 64),
    (7, 7168, 1, 128),
    (33, 1408, 2, 64),
    (130, 640, 0, 128),
    (5, 704, 1, 32),
    (300, 2880, 0, 64),
    (0, 256, 0, 128),
    (2, 24576, 0, 128),
    (70, 20480, 2, 128),
]


def quantised(
    me: Rank, seed: int, dtype: torch.dtype, cases: list[tuple[int, int, int, int]], uses: tuple[bool, ...]
) -> tuple[list[str], list[int]]:
    most = max(tokens * hidden for tokens, hidden, *_ in cases)
    space = make(me, most // 64 + 1, 64, dtype, force_oneshot_support=True)
    wrong, sums = [], []
    for tokens, hidden, layout, group in cases:
        parts = [draw(seed, f"{tokens} {i}", tokens, hidden, dtype=dtype) for i in range(me.world)]
        residual, gamma = draw(seed, "residual", tokens, hidden, dtype=dtype), draw(seed, "gamma", hidden, dtype=dtype)
        if tokens:
            for row in (*parts, residual):
                row[0, :16] = 0
        common = {"residual_in": residual, "rms_gamma": gamma, "rms_eps": 1e-5, "weight_bias": 1.0}
        for kind, pair in QUANT.items():
            for pattern in pair:
                out = pattern is pair[1]
                outputs = ("residual_out", "norm_out") if out else ("residual_out",)

                def fresh(
                    kind: str = kind,
                    case: tuple[int, int, int, int] = (tokens, hidden, layout, group),
                    outputs: tuple[str, ...] = outputs,
                ) -> dict[str, Any]:
                    operands = quant_operands(kind, *case, tensor=len(outputs) == 2)
                    return operands | {name: poison(*case[:2], dtype=dtype) for name in outputs}

                expected = fresh()
                on_cpu(parts, pattern, **common, **expected)
                for use in uses:
                    got = on_gpu(fresh())
                    result = oxmoe.allreduce_fusion(
                        parts[me.rank].cuda(), space, pattern, use_oneshot=use, **on_gpu(common), **got
                    )
                    torch.cuda.synchronize()
                    space.check()
                    what = f"{pattern.name}, {tokens} x {hidden}, use_oneshot {use}"
                    if result is not got["norm_out" if out else "quant_out"]:
                        wrong.append(f"{what} returns something else")
                    for name in {*outputs, "quant_out", "scale_out"} & set(expected):
                        if not same_bits(whole(got[name]).cpu(), whole(expected[name])):
                            wrong.append(f"{what}: {name}")
                    sums += crc(got["quant_out"].cpu()) if use is uses[0] else []
    space.destroy()
    return wrong, sums


@pytest.mark.multi_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_patterns(crew: Crew, rng: torch.Generator, dtype: str) -> None:
    cases = [(t, h // 2 if dtype == "f32" and h > 16384 else h, layout, group) for t, h, layout, group in CASES]
    alike(crew.run(quantised, seed_of(rng), DTYPES[dtype], cases, (True, False)), len(crew.processes))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_patterns_of_one_rank(alone: Crew, rng: torch.Generator, dtype: str) -> None:
    alike(alone.run(quantised, seed_of(rng), DTYPES[dtype], CASES[:5], (True,)), 1)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS >= 4, reason="there is a GPU for each of four ranks")
@pytest.mark.parametrize("dtype", DTYPES)
def test_four_ranks_on_fewer_gpus(shared: Crew, rng: torch.Generator, dtype: str) -> None:
    cases = [(1, 2880, 0, 64), (37, 1408, 1, 128), (2, 16384, 0, 128)]
    alike(shared.run(quantised, seed_of(rng), DTYPES[dtype], cases, (True, False), patience=90), 4)
    alike(shared.run(experts_rows, seed_of(rng), DTYPES[dtype], 21, 1408, (True, False), patience=90), 4)


def experts_rows(
    me: Rank, seed: int, dtype: torch.dtype, tokens: int, hidden: int, uses: tuple[bool, ...]
) -> tuple[list[str], list[int]]:
    """Runs patterns 6 and 7 with NVFP4 and without, and with one of the optional outputs alone; also in a CUDA
    graph."""
    space = make(me, max(tokens, 1), hidden, dtype, force_oneshot_support=True)
    residual, gamma = draw(seed, "residual", tokens, hidden, dtype=dtype), draw(seed, "gamma", hidden, dtype=dtype)
    experts, top_k, rows = 3, 5, 2 * tokens + 3

    def finalize(rank: int) -> dict[str, Any]:
        rng = torch.Generator().manual_seed(seed + rank)
        return {
            "input": draw(seed, f"gemm2 {rank}", rows, hidden, dtype=dtype),
            "expanded_idx_to_permuted_idx": torch.randint(-1, rows, (tokens, top_k), generator=rng).int(),
            "expert_scale_factor": draw(seed, f"weights {rank}", tokens, top_k, dtype=(torch.float32, dtype)[rank % 2]),
            "shared_expert_output": draw(seed, f"shared {rank}", tokens, hidden, dtype=dtype),
        }

    def reduction(rank: int) -> dict[str, Any]:
        token_input = draw(seed, f"tokens {rank}", tokens, hidden, dtype=dtype)
        return {
            "input": token_input,
            "moe_reduction_device_num_experts": experts,
            "moe_reduction_scale_input": draw(seed, f"scales {rank}", experts, tokens),
            "moe_reduction_active_experts_token_input": draw(
                seed, f"active {rank}", experts * tokens, hidden, dtype=dtype
            ),
            "moe_reduction_token_input": token_input,
        }

    wrong, sums = [], []
    for pattern, given in (
        (Pattern.kMoEFinalizeARResidualRMSNorm, finalize),
        (Pattern.kMoEReductionARResidualRMSNorm, reduction),
    ):
        names = dict.fromkeys(_Operands.__dataclass_fields__) | {"rms_eps": 1e-6, "weight_bias": 0.0}
        common = {"residual_in": residual, "rms_gamma": gamma}
        expected = {name: poison(tokens, hidden, dtype=dtype) for name in ("residual_out", "norm_out")}
        expected |= quant_operands("fp4", tokens, hidden, 0, 0, True)
        if given is reduction:
            expected["output"] = poison(tokens, hidden, dtype=dtype)
        blank = on_gpu(expected)
        calls = [names | {"pattern": int(pattern)} | common | given(rank) | expected for rank in range(me.world)]
        messages = [extension.allreduce_message(_Operands(**call))[1] for call in calls]
        extension.allreduce_finish(_Operands(**calls[0]), messages)
        mine = on_gpu(common | given(me.rank))
        for use in uses:
            got = {name: x.clone() if torch.is_tensor(x) else x for name, x in blank.items()}
            alone = torch.full((tokens, hidden), float("nan"), dtype=dtype, device="cuda")

            def call(
                mine: Any = mine, got: Any = got, alone: Any = alone, pattern: Any = pattern, use: bool = use
            ) -> None:
                options = {"workspace": space, "pattern": pattern, "use_oneshot": use}
                oxmoe.allreduce_fusion(**mine, **got, **options)
                oxmoe.allreduce_fusion(**mine, norm_out=alone, **options)

            for captured in (False, True):
                for name, x in got.items():
                    if torch.is_tensor(x) and name != "scale_factor":
                        x.copy_(blank[name])
                if captured:
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        call()
                    graph.replay()
                else:
                    call()
                torch.cuda.synchronize()
                space.check()
                what = f"{pattern.name}, {tokens} x {hidden}, use_oneshot {use}, captured {captured}"
                same = {name: same_bits(x.cpu(), expected[name]) for name, x in got.items() if torch.is_tensor(x)}
                wrong += [f"{what}: {name}" for name, right in same.items() if not right]
                wrong += [] if same_bits(alone.cpu(), expected["norm_out"]) else [f"{what}: norm_out alone"]
            sums += crc(got["norm_out"].cpu()) if use is uses[0] else []
    space.destroy()
    return wrong, sums


@pytest.mark.multi_gpu
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 7168), (40, 2880), (130, 1408), (0, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_rows(crew: Crew, rng: torch.Generator, dtype: str, tokens: int, hidden: int) -> None:
    alike(crew.run(experts_rows, seed_of(rng), DTYPES[dtype], tokens, hidden, (True, False)), len(crew.processes))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_rows_of_one_rank(alone: Crew, rng: torch.Generator, dtype: str) -> None:
    alike(alone.run(experts_rows, seed_of(rng), DTYPES[dtype], 9, 2880, (True,)), 1)
