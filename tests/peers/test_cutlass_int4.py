"""int4 weights in flashinfer's `cutlass_fused_moe`: against an fp64 layer of the same numbers, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Shape, make_routing, make_x
from flashinfer_int4 import Experts, draw
from oxmoe import int4
from oxmoe.peers import flashinfer_cutlass
from oxmoe.peers.flashinfer_cutlass_int4 import InputScaledExperts
from oxmoe.testing import relative_norm, same_bits

SMALL = Shape("int4", 6, 3, 256, 384, bias=True)
QWEN = Shape("qwen3-30b-a3b", 128, 8, 2048, 768)
# x, weights, scales, intermediates and the output are rounded to bf16. Activations rounded to e4m3 would be 3e-2 away.
FAR = 1e-2
NOTHING = {"fc1_expert_weights": None, "fc2_expert_weights": None, "quant_scales": None}
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    flashinfer_cutlass.cache.clear()


def operands(
    shape: Shape,
    tokens: int,
    device: str,
    rng: torch.Generator,
    *,
    experts: int | None = None,
    pattern: str = "uniform",
) -> tuple[Tensor, Tensor, Tensor]:
    gates, ids = make_routing(pattern, tokens, experts or shape.experts, shape.top_k, rng)
    return make_x(tokens, shape, torch.bfloat16, device, rng), gates.to(device), ids.to(device)


def fused(x: Tensor, gates: Tensor, ids: Tensor, **given: Any) -> Tensor:
    """Runs the call with a poisoned output."""
    out = torch.full_like(x, torch.nan)
    routing = {"token_selected_experts": ids, "token_final_scales": gates}
    (result,) = oxmoe.cutlass_fused_moe(input=x, **routing, output=out, **{"output_dtype": x.dtype, **given})
    assert result is out
    return out


def check(result: Tensor, expected: Tensor, far: float = FAR) -> None:
    assert bool(expected.any()) and bool(result.isfinite().all())
    assert relative_norm(result, expected) < far


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("acts", ["columns", "groups", "one", "none"])
def test_layers(acts: str, tokens: int, device: str, rng: torch.Generator) -> None:
    made = draw(SMALL, device, rng, acts=acts)
    x, gates, ids = operands(SMALL, tokens, device, rng)
    expected = made.expected(x, gates, ids)
    given = made.arguments()
    result = fused(x, gates, ids, **given)
    check(result, expected)
    # The call is repeated from the cache, then prepared, then with the scales of flashinfer 0.6.11.
    assert same_bits(fused(x, gates, ids.long(), **given), result) and len(flashinfer_cutlass.cache) == 1
    weights = oxmoe.prepare_cutlass_fused_moe(**given)
    assert isinstance(weights, InputScaledExperts) == (acts == "columns")
    assert same_bits(fused(x, gates, ids, **NOTHING, weights=weights), result)
    assert same_bits(fused(x, gates, ids, **made.arguments("0.6")), result)
    # Factors of 1 change no bits.
    if acts == "none":
        ones = given["quant_scales"][:2] + [
            torch.ones(size, dtype=dtype, device=device)
            for size, dtype in ((256, x.dtype), (384, x.dtype), (0, x.dtype), (0, x.dtype), (6, None), (6, None))
        ]
        assert same_bits(fused(x, gates, ids, **given | {"quant_scales": ones}), result)
        plain = oxmoe.ExpertWeights.int4(
            made.w13 ^ 0x88, made.w2 ^ 0x88, made.w13_scale, made.w2_scale, b13=made.b13, b2=made.b2, layout="up_gate"
        )
        assert same_bits(oxmoe.moe(x, plain, gates, ids), result)


@pytest.mark.parametrize(
    ("device", "tokens"),
    [("cpu", 3), *(pytest.param("cuda", tokens, marks=pytest.mark.gpu) for tokens in (1, 7, 65))],
)
def test_a_models_layer(device: str, tokens: int, rng: torch.Generator) -> None:
    made = draw(QWEN, device, rng)
    x, gates, ids = operands(QWEN, tokens, device, rng)
    weights = oxmoe.prepare_cutlass_fused_moe(**made.arguments())
    check(fused(x, gates, ids, **NOTHING, weights=weights), made.expected(x, gates, ids))


@pytest.mark.parametrize("pattern", ["holes", "one_expert", "duplicates", "all_holes"])
def test_routings(pattern: str, device: str, rng: torch.Generator) -> None:
    """An id of -1 is no expert, and its weight is not read."""
    made = draw(SMALL, device, rng)
    x, gates, ids = operands(SMALL, 21, device, rng, pattern=pattern)
    result = fused(x, gates, ids, **made.arguments())
    if pattern == "all_holes":
        assert not result.any()
    else:
        check(result, made.expected(x, gates.nan_to_num(0.0), ids))


def test_no_tokens(device: str, rng: torch.Generator) -> None:
    made = draw(SMALL, device, rng)
    x, gates, ids = operands(SMALL, 0, device, rng)
    assert fused(x, gates, ids, **made.arguments()).shape == (0, 256)


def test_ranks(device: str, rng: torch.Generator) -> None:
    """ids are global ids of two ranks' experts; the bias of fc2 counts on tp_rank 0 alone."""
    made = draw(SMALL, device, rng)
    x, gates, ids = operands(SMALL, 19, device, rng, experts=12)
    given = made.arguments()
    for rank in range(2):
        expected = made.expected(x, gates, ids, first=6 * rank)
        check(fused(x, gates, ids, **given, ep_size=2, ep_rank=rank), expected)
    expected = made.expected(x, gates, ids, first=6, has_b2=False)
    check(fused(x, gates, ids, **given, ep_size=2, ep_rank=1, tp_size=2, tp_rank=1), expected)


def test_tensor_parallel_ranks(device: str, rng: torch.Generator) -> None:
    """Two ranks have 256 and 128 of the 384 columns between the GEMMs, and of fc2's activation scales."""
    made = draw(SMALL, device, rng)
    x, gates, ids = operands(SMALL, 19, device, rng)
    total = torch.zeros(x.shape, dtype=torch.float64, device=device)
    for rank, part in enumerate((slice(0, 256), slice(256, 384))):
        shape = Shape("part", 6, 3, 256, part.stop - part.start, bias=True)
        rows = torch.cat([torch.arange(384)[part], 384 + torch.arange(384)[part]])
        assert made.b13 is not None
        octets, groups = (slice(part.start // size, part.stop // size) for size in (2, 128))
        own = Experts(
            shape, made.w13[:, rows].contiguous(), made.w2[:, :, octets].contiguous(), made.w13_scale[:, rows],
            made.w2_scale[:, :, groups].contiguous(), (made.acts[0], made.acts[1][part].contiguous()), made.alphas,
            made.b13[:, rows].contiguous(), made.b2,
        )  # fmt: skip
        total += fused(x, gates, ids, **own.arguments(), tp_size=2, tp_rank=rank).double()
    check(total, made.expected(x, gates, ids))


ACTIVATIONS = ("Swiglu", "SwigluStep", "Geglu", "GegluTanh", "Situ", "Silu", "Gelu", "Relu2")


@pytest.mark.parametrize("acts", ["columns", "groups"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, acts: str, device: str, rng: torch.Generator) -> None:
    gated = name not in ("Silu", "Gelu", "Relu2")
    made = draw(SMALL if gated else SMALL.with_options(gated=False), device, rng, acts=acts)
    x, gates, ids = operands(SMALL, 21, device, rng)
    x = 12 * x if name == "SwigluStep" else x  # its limit cuts then
    given = made.arguments() | {"activation_type": SimpleNamespace(name=name)}
    if acts == "columns" and name in ("SwigluStep", "Situ", "Silu", "Gelu"):
        words = (
            r"quant_scales\[3\]: no kernel for scales of fc2's input that differ within 128 columns and (silu|ge|situ)"
        )
        with pytest.raises(NotImplementedError, match=words):
            fused(x, gates, ids, **given)
        # fc1's may differ with every activation.
        made.acts = (made.acts[0], torch.full_like(made.acts[1], 3.0))
        given = made.arguments() | {"activation_type": SimpleNamespace(name=name)}
    check(fused(x, gates, ids, **given), made.expected(x, gates, ids, name=name), 2 * FAR if name == "Relu2" else FAR)


def test_numbers_of_swiglu(device: str, rng: torch.Generator) -> None:
    made = draw(SMALL, device, rng, acts="groups")
    x, gates, ids = operands(SMALL, 21, device, rng)
    numbers = {"alpha": 1.7, "beta": 1.0, "limit": 1.5}
    given = {f"swiglu_{name}": torch.full((6,), number, device=device) for name, number in numbers.items()}
    check(fused(x, gates, ids, **made.arguments(), **given), made.expected(x, gates, ids, **numbers))
    # Scales that differ within a group are served with an alpha and a beta of 0.
    made = draw(SMALL, device, rng)
    given = {"swiglu_alpha": given["swiglu_alpha"], "swiglu_beta": torch.zeros(6, device=device)}
    check(fused(x, gates, ids, **made.arguments(), **given), made.expected(x, gates, ids, alpha=1.7))
    for name, words in (("limit", "silu with limit"), ("beta", "silu with beta")):
        given = {f"swiglu_{name}": torch.ones(6, device=device)}
        with pytest.raises(NotImplementedError, match=rf"^quant_scales\[3\]: no kernel .* {words}; served are gated"):
            fused(x, gates, ids, **made.arguments(), **given)


@pytest.mark.parametrize("name", ["f16", "f32"])
def test_other_dtypes_on_cpus(name: str, rng: torch.Generator) -> None:
    """With an f16 input flashinfer's callers view the bits of bf16 scales as f16."""
    dtype = DTYPES[name]
    made = draw(SMALL, "cpu", rng, dtype=dtype)
    x, gates, ids = operands(SMALL, 9, "cpu", rng)
    x = x.to(dtype)
    result = fused(x, gates, ids, **made.arguments(dtype=torch.float16))
    assert result.dtype == dtype
    check(result, made.expected(x, gates, ids), FAR / 8 if name == "f16" else 1e-5)
    weights = oxmoe.prepare_cutlass_fused_moe(**made.arguments(), dtype=name)  # type: ignore[arg-type]
    assert same_bits(fused(x, gates, ids, **NOTHING, weights=weights), result)


@pytest.mark.gpu
def test_f16_on_gpus_is_refused(rng: torch.Generator) -> None:
    made = draw(SMALL, "cuda", rng, dtype=torch.float16)
    x, gates, ids = operands(SMALL, 9, "cuda", rng)
    with pytest.raises(NotImplementedError, match=r"output_dtype: no int4 kernel for f16; served is torch.bfloat16"):
        fused(x.half(), gates, ids, **made.arguments())


def test_workspace(device: str, rng: torch.Generator) -> None:
    made = draw(SMALL, device, rng)
    x, gates, ids = operands(SMALL, 13, device, rng)
    flags = {"use_w4_group_scaling": True, "use_packed_weights": True}
    dtypes = {"x_dtype": x.dtype, "weight_dtype": torch.uint8}
    size = oxmoe.cutlass_fused_moe_workspace_size(13, 256, 384, 6, 3, **dtypes, **flags, device=device)
    weights = oxmoe.prepare_cutlass_fused_moe(**made.arguments())
    assert isinstance(weights, InputScaledExperts)
    assert size == oxmoe.workspace_bytes(weights.weights, 13, 3)
    space = torch.empty(size + 256, dtype=torch.uint8, device=device)
    space = space[-space.data_ptr() % 256 :][:size]
    given = NOTHING | {"weights": weights}
    assert same_bits(fused(x, gates, ids, **given, workspace_buffer=space), fused(x, gates, ids, **given))
    with pytest.raises(RuntimeError, match=r"workspace_buffer too small"):
        fused(x, gates, ids, **given, workspace_buffer=space[:-256])
    with pytest.raises(NotImplementedError, match=r"served are .*int4 weights with use_w4_group_scaling and"):
        oxmoe.cutlass_fused_moe_workspace_size(13, 256, 384, 6, 3, **dtypes, use_packed_weights=True)


def test_the_input_is_not_written(device: str, rng: torch.Generator) -> None:
    """The factors of columns make a new tensor, also of an input with padded rows."""
    made = draw(SMALL, device, rng)
    x, gates, ids = operands(SMALL, 9, device, rng)
    weights = oxmoe.prepare_cutlass_fused_moe(**made.arguments())
    wide = torch.zeros(9, 264, dtype=x.dtype, device=device)
    wide[:, :256] = x
    before = wide.clone()
    (result,) = oxmoe.cutlass_fused_moe(wide[:, :256], ids, gates, None, None, x.dtype, None, weights=weights)
    assert same_bits(wide, before) and same_bits(result, fused(x, gates, ids, **NOTHING, weights=weights))


def test_written_scales_are_seen(device: str, rng: torch.Generator) -> None:
    made = draw(SMALL, device, rng)
    x, gates, ids = operands(SMALL, 9, device, rng)
    given = made.arguments()
    fused(x, gates, ids, **given)
    made.alphas[1].mul_(2.0)
    check(fused(x, gates, ids, **given), made.expected(x, gates, ids))


def test_under_torch_compile(rng: torch.Generator) -> None:
    made = draw(SMALL, "cpu", rng)
    weights = oxmoe.prepare_cutlass_fused_moe(**made.arguments())
    x, gates, ids = operands(SMALL, 5, "cpu", rng)

    def call(x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
        return oxmoe.cutlass_fused_moe(x, ids, gates, None, None, x.dtype, None, weights=weights)[0]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(x, gates, ids), call(x, gates, ids))


def test_refusals(rng: torch.Generator) -> None:
    made = draw(SMALL, "cpu", rng)
    x, gates, ids = operands(SMALL, 5, "cpu", rng)
    given = made.arguments()
    call: dict[str, Any] = {"x": x, "gates": gates, "ids": ids, **given}

    def scales(place: int, tensor: Tensor) -> dict[str, Any]:
        changed = list(given["quant_scales"])
        changed[place] = tensor
        return {"quant_scales": changed}

    codes = x.to(torch.float8_e4m3fn)
    bf16 = {"dtype": torch.bfloat16}
    for error, words, changed in (
        (NotImplementedError, "no kernel for use_packed_weights with .* uint8 .int4., which take use_w4_group_scaling "
         "and use_packed_weights alone", {"use_w4_group_scaling": False}),
        (NotImplementedError, "no kernel for use_w4_group_scaling, use_mxfp8_act_scaling, use_packed_weights with",
         {"use_mxfp8_act_scaling": True}),
        (NotImplementedError, "no kernel for input of float8_e4m3fn and int4 weights",
         {"x": codes, "output_dtype": torch.bfloat16}),
        (ValueError, "quant_scales: expected the scales, activation scales, zero points and alphas, each of fc1 and of "
         "fc2, got 2 tensors", {"quant_scales": given["quant_scales"][:2]}),
        (NotImplementedError, r"quant_scales\[4\]: no kernel for zero points .* got shape \(6, 768, 2\)",
         scales(4, torch.zeros(6, 768, 2))),
        (NotImplementedError, r"quant_scales\[5\]: no kernel for zero points", scales(5, torch.zeros(1))),
        (ValueError, r"quant_scales\[2\]: expected 256 numbers \(hidden\) .* got bfloat16 of shape \(6, 256\)",
         scales(2, torch.ones(6, 256, **bf16))),  # type: ignore[call-overload]
        (ValueError, r"quant_scales\[3\]: expected 384 numbers \(intermediate\) .* got", scales(3, torch.ones(256))),
        (ValueError, r"quant_scales\[6\]: expected 6 numbers \(experts\) .* got", scales(6, torch.ones(1))),
        (ValueError, r"quant_scales\[7\]: expected 6 numbers \(experts\) .* got int64", scales(7, torch.arange(6))),
        (ValueError, r"quant_scales\[0\]: expected shape \[6, 12, 2, 8, 8\] or \[6, 1, 1536\], got \[6, 768, 2\]",
         scales(0, made.w13_scale)),
        (ValueError, r"quant_scales\[1\]: expected bfloat16, got float32", scales(1, torch.ones(6, 4, 3, 8, 8))),
        (ValueError, r"fc2_expert_weights: dimension 2: expected a multiple of 64, got 96",
         {"fc2_expert_weights": given["fc2_expert_weights"][:, :, :96]}),
        (ValueError, r"fc1_expert_weights: dimension 1: expected a multiple of 64, got 700",
         {"fc1_expert_weights": given["fc1_expert_weights"][:, :700]}),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            fused(**call | changed)
    weights = oxmoe.prepare_cutlass_fused_moe(**given)
    with pytest.raises(ValueError, match=r"input: expected \[T, 256\], got shape \(5, 128\)"):
        fused(x[:, :128].contiguous(), gates, ids, **NOTHING, weights=weights)
    with pytest.raises((TypeError, ValueError), match="weights"):
        oxmoe.moe(x, weights, gates, ids)  # type: ignore[arg-type]


def test_groups_are_of_the_weights(rng: torch.Generator) -> None:
    """Factors that the columns of a group share are exact in the scales, if they are powers of two."""
    made = draw(SMALL, "cpu", rng, acts="groups")

    def powers(size: int) -> Tensor:
        return 2.0 ** torch.randint(-2, 3, (size,), generator=rng).float()

    made.acts = powers(2).repeat_interleave(128), powers(3).repeat_interleave(128)
    made.alphas = powers(6), powers(6)
    x, gates, ids = operands(SMALL, 9, "cpu", rng)
    plain = []
    for scale, act, alpha in zip((made.w13_scale, made.w2_scale), made.acts, made.alphas, strict=True):
        plain.append((scale.double() * act.view(-1, 128)[:, 0].double() * alpha.double()[:, None, None]).bfloat16())
    weights = oxmoe.ExpertWeights.int4(
        made.w13 ^ 0x88, made.w2 ^ 0x88, *plain, b13=made.b13, b2=made.b2, layout="up_gate"
    )
    assert same_bits(fused(x, gates, ids, **made.arguments()), oxmoe.moe(x, weights, gates, ids))
    assert int4.from_sm90(made.arguments()["fc1_expert_weights"], made.arguments()["quant_scales"][0]).zeros is None
