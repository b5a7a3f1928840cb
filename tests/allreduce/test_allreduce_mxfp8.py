"""The all-reduce with MXFP8 of flashinfer 0.7.4, and the arguments that are new there, on CPU tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import oxmoe
from oxmoe import AllReduceFusionPattern as Pattern
from oxmoe import QuantizationSFLayout as Layout
from ranks import DTYPES, Crew, Rank, alike, crc, crews, draw, poison, raised, same_bits, seed_of, total

PLAIN, OUT = Pattern.kARResidualRMSNormMXFP8Quant, Pattern.kARResidualRMSNormOutMXFP8Quant
two = crews(2)


def places(tokens: int, groups: int, layout: int) -> tuple[int, list[int]]:
    """Returns how many scales a matrix has, and the place of each, row by row."""
    if layout == Layout.LINEAR:
        return tokens * groups, list(range(tokens * groups))
    tiles = math.ceil(groups / 4)
    cells = [(row, group) for row in range(tokens) for group in range(groups)]
    found = [((r // 128 * tiles + g // 4) * 32 + r % 32) * 16 + r % 128 // 32 * 4 + g % 4 for r, g in cells]
    return math.ceil(tokens / 128) * tiles * 512, found


def mxfp8(norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes and scale bytes [T, H / 32] of finite numbers, by fp64."""
    groups = norm.double().unflatten(1, (-1, 32))
    largest = groups.abs().amax(-1)
    powers = torch.where(largest > 0, torch.log2(largest / 448).ceil(), torch.tensor(-127.0).double())
    # A logarithm may be rounded across a whole number.
    powers += ((largest / 448) > torch.exp2(powers)).double() - ((largest / 448) <= torch.exp2(powers - 1)).double()
    powers = torch.where(largest > 0, powers, torch.tensor(-127.0).double())
    codes = (groups * torch.exp2(-powers)[..., None]).float().to(torch.float8_e4m3fn)
    return codes.flatten(1), (powers + 127).to(torch.uint8)


def by_patterns(me: Rank, seed: int, dtype: torch.dtype, tokens: int, hidden: int) -> tuple[list[str], list[int]]:
    workspace = oxmoe.create_allreduce_fusion_workspace(
        max_token_num=tokens, hidden_dim=hidden, dtype=dtype, group=me.all, deadline=20
    )
    parts = [draw(seed, f"input {rank}", tokens, hidden, dtype=dtype) for rank in range(me.world)]
    residual_in, gamma = draw(seed, "residual", tokens, hidden, dtype=dtype), draw(seed, "gamma", hidden, dtype=dtype)
    gamma[:32] = 0
    residual = (total(parts).float() + residual_in.float()).to(dtype)
    given: dict[str, Any] = {"residual_in": residual_in, "rms_gamma": gamma, "rms_eps": 1e-5}
    norm = poison(tokens, hidden, dtype=dtype)
    oxmoe.allreduce_fusion(
        parts[me.rank], workspace, Pattern.kARResidualRMSNorm, **given, residual_out=residual.clone(), norm_out=norm
    )
    codes, scales = mxfp8(norm)
    wrong, sums = [], []
    for pattern, layout in ((PLAIN, None), (OUT, 0), (PLAIN, 2), (OUT, 2)):
        count, found = places(tokens, hidden // 32, layout or 0)
        quant_out = torch.full((tokens, hidden), 0x55, dtype=torch.uint8).view(torch.float8_e4m3fn)
        scale_out = torch.full((count + 7,), 0xAB, dtype=torch.uint8)
        residual_out, norm_out = (poison(tokens, hidden, dtype=dtype) for _ in range(2))
        result = oxmoe.allreduce_fusion(
            parts[me.rank], workspace, int(pattern), **given, residual_out=residual_out, quant_out=quant_out,
            norm_out=norm_out if pattern is OUT else None, scale_out=scale_out, layout_code=layout,
        )  # fmt: skip
        name = f"{pattern.name} {layout}"
        wrong += [f"{name}: another tensor"] if result is not quant_out else []
        wrong += [] if same_bits(residual_out, residual) else [f"{name}: residual_out"]
        wrong += [] if pattern is PLAIN or same_bits(norm_out, norm) else [f"{name}: norm_out"]
        wrong += [] if same_bits(quant_out, codes) else [f"{name}: quant_out"]
        wrong += [] if torch.equal(scale_out[found], scales.flatten()) else [f"{name}: scale_out"]
        wrong += [] if (scale_out[count:] == 0xAB).all() else [f"{name}: wrote beyond scale_out"]
        sums += crc(quant_out, scale_out)
    # The older name takes flat memory, and leaves norm_out alone where the pattern does not write it.
    quant_out, scale_out = (
        torch.zeros(tokens * hidden, dtype=torch.float8_e4m3fn),
        torch.zeros(count, dtype=torch.uint8),
    )
    oxmoe.trtllm_allreduce_fusion(
        parts[me.rank], me.world, me.rank, tokens, hidden, workspace, True, True, False, PLAIN, None, None, residual_in,
        residual.clone(), norm, quant_out, scale_out, gamma, 1e-5, None, 2,
    )  # fmt: skip
    wrong += [] if same_bits(quant_out.view(tokens, hidden), codes) else ["older name: quant_out"]
    wrong += [] if torch.equal(scale_out, scales.flatten()) else ["older name: scale_out"]
    workspace.destroy()
    return wrong, sums


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 2880), (130, 160), (7, 64)])
def test_patterns(two: Crew, rng: torch.Generator, dtype: str, tokens: int, hidden: int) -> None:
    alike(two.run(by_patterns, seed_of(rng), DTYPES[dtype], tokens, hidden), 2)


def one_rank_is_wrong(me: Rank) -> list[tuple[str, str]]:
    """Rank 1 gives operands that are refused. Returns each rank's errors, and that of a call that is right again."""
    workspace = oxmoe.create_allreduce_fusion_workspace(
        max_token_num=4, hidden_dim=64, dtype=torch.bfloat16, group=me.all, deadline=20
    )
    x, gamma = torch.ones(4, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    right: dict[str, Any] = {"residual_in": x, "residual_out": torch.empty_like(x), "rms_gamma": gamma}
    right |= {
        "quant_out": torch.zeros(4, 64, dtype=torch.float8_e4m3fn),
        "scale_out": torch.zeros(512, dtype=torch.uint8),
    }
    narrow = {"input": x[:, :48].contiguous()}
    errors = []
    for changed in (
        {"quant_out": None},
        {"quant_out": torch.zeros(4, 64)},
        {"scale_out": torch.zeros(511, dtype=torch.uint8)},
        {"scale_out": torch.zeros(512, dtype=torch.int8)},
        {"layout_code": 1},
        {"norm_out": torch.empty_like(x)},
        {"pattern": OUT},
        {"pattern": Pattern.kMoEFinalizeARResidualRMSNormFP8Quant},
        narrow,
        {"moe_finalize_backend": "cake"},
        {"moe_finalize_backend": "mnnvl"},
        {},
    ):  # fmt: skip
        given = {"input": x, "workspace": workspace, "pattern": PLAIN, **right} | (changed if me.rank else {})
        errors.append(raised(lambda given=given: oxmoe.allreduce_fusion(**given)))  # type: ignore[misc]
    workspace.destroy()
    return errors


def test_a_refusal_keeps_nobody_waiting(two: Crew) -> None:
    other, own = two.run(one_rank_is_wrong)
    expected = [
        ("ValueError", "quant_out: pattern kARResidualRMSNormMXFP8Quant needs it, got None"),
        ("ValueError", "quant_out: expected float8_e4m3fn [4, 64], got float32 [4, 64]"),
        ("ValueError", "scale_out: expected 512 or more of uint8, got 511 of uint8"),
        ("ValueError", "scale_out: expected 512 or more of uint8, got 512 of int8"),
        ("ValueError", "layout_code: expected SWIZZLED_128x4 (0) or LINEAR (2) for MXFP8, got 1"),
        ("ValueError", "norm_out: pattern kARResidualRMSNormMXFP8Quant neither reads nor writes it; pass None"),
        ("ValueError", "norm_out: pattern kARResidualRMSNormOutMXFP8Quant needs it, got None"),
        ("NotImplementedError", "pattern: no kernel for kMoEFinalizeARResidualRMSNormFP8Quant, which flashinfer has"),
        ("ValueError", 'input: dimension 1 "H": expected a multiple of 32 for MXFP8, got 48'),
        ("NotImplementedError", 'moe_finalize_backend: no kernel for "cake", which flashinfer has for Blackwell'),
        ("ValueError", "moe_finalize_backend: expected \"trtllm\", got 'mnnvl'"),
    ]
    for found, (kind, text), peer in zip(own, expected, other, strict=False):
        assert found[0] == kind and found[1].startswith(text), found
        assert peer[0] == "RuntimeError" and "rank 1 refused call" in peer[1], peer
    assert own[-1] == other[-1] == raised(lambda: None)


def test_arguments_of_multicast() -> None:
    sizes: dict[str, Any] = {"world_size": 1, "rank": 0, "max_token_num": 4, "hidden_dim": 64, "dtype": "bfloat16"}
    make = oxmoe.create_allreduce_fusion_workspace
    names = "top_k rms_eps weight_bias routed_scaling_factor include_shared_expert add_residual write_residual_output"
    names += " apply_rms_norm output_dtype dynamic_fp8 write_norm_output config"
    workspace = make("trtllm", **sizes, **dict.fromkeys(names.split()))
    workspace.destroy()
    with pytest.raises(ValueError, match=r'^rms_eps, dynamic_fp8: only backend="mnnvl-cutedsl" takes these'):
        make("trtllm", **sizes, rms_eps=1e-5, dynamic_fp8=False)
    with pytest.raises(NotImplementedError, match='backend: "mnnvl-cutedsl" sums through NVLink multicast'):
        make("mnnvl-cutedsl", **sizes, top_k=8)
    with pytest.raises(TypeError, match="unexpected keyword argument 'topk'"):
        make("trtllm", **sizes, topk=None)


def by_other_patterns(me: Rank) -> list[tuple[str, str]]:
    workspace = oxmoe.create_allreduce_fusion_workspace(
        max_token_num=8, hidden_dim=64, dtype=torch.bfloat16, group=me.all, deadline=20
    )
    x = torch.ones(6, 64, dtype=torch.bfloat16)

    def call(pattern: Pattern) -> Any:
        quantised = {} if pattern is Pattern.kARResidualRMSNorm else {
            "quant_out": torch.zeros(6, 64, dtype=torch.float8_e4m3fn),
            "scale_out": torch.zeros(512, dtype=torch.uint8),
        }  # fmt: skip
        norm_out = None if pattern is PLAIN else torch.zeros_like(x)
        return oxmoe.allreduce_fusion(
            x, workspace, pattern, residual_in=x, residual_out=torch.zeros_like(x), norm_out=norm_out,
            rms_gamma=torch.ones(64, dtype=torch.bfloat16), **quantised,
        )  # fmt: skip

    mixed = ((Pattern.kARResidualRMSNorm, PLAIN), (OUT, Pattern.kARResidualRMSNorm), (PLAIN, OUT))
    results = [raised(lambda pair=pair: call(pair[me.rank])) for pair in mixed]
    # The workspace is still good.
    results.append((str(bool(call(OUT).float().any())), ""))
    workspace.destroy()
    return results


def test_ranks_with_other_patterns_are_told(two: Crew) -> None:
    for rank, (first, second, third, last) in enumerate(two.run(by_other_patterns)):
        for kind, text in (first, second, third):
            assert kind == "ValueError" and f"rank {rank}, call " in text and "disagree on the shape" in text, text
        assert "rank 0: pattern kARResidualRMSNorm of bfloat16 [6, 64]" in first[1]
        assert "rank 1: pattern kARResidualRMSNormMXFP8Quant of bfloat16 [6, 64]" in first[1]
        assert "rank 0: pattern kARResidualRMSNormOutMXFP8Quant of" in second[1]
        assert last[0] == "True"
