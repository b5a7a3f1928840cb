"""torch.ops.oxmoe.* of rows in expert order, of the quantisers of fp8 and NVFP4, of packed routing and of flashinfer's
fp8 calls: opcheck, fakes, and what torch.compile(fullgraph) makes of the public calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import oxmoe
from cases import GPT_OSS, Shape, make_layer, make_routing, tie_free_logits
from fp8_cases import make_fp8, make_fp8_tensor
from mxfp4_cases import make_blocks
from mxfp8_cases import make_mxfp8
from op_checks import fakes_are_real, opcheck, tensors
from oxmoe import nvfp4, quantize, reference
from oxmoe.testing import same_bits

SHAPE = Shape("ops-rows", 4, 2, 256, 128)
ops = torch.ops.oxmoe
# Formats that operators take as bare tensors on this device. Packed ones are refused on CUDA.
PLAIN = ("bf16", "gpt-oss", "fp8_block", "fp8_tensor-token")
FORMATS = pytest.mark.parametrize(
    ("device", "format"),
    [("cpu", name) for name in (*PLAIN, "mxfp4", "mxfp8")]
    + [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in PLAIN],
)


def compiled(program: Callable[..., Any], *tensors: Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(program, fullgraph=True, backend="aot_eager")(*tensors)


# Rows in expert order


def experts(format: str, device: str, rng: torch.Generator) -> oxmoe.ExpertWeights:
    if format == "fp8_block":
        return make_fp8(SHAPE, device, rng).weights()
    if format == "fp8_tensor-token":
        return make_fp8_tensor(SHAPE, device, rng, mode="token").weights()
    if format == "mxfp8":
        return make_mxfp8(SHAPE, device, rng).weights()
    if format == "mxfp4":
        return make_blocks(SHAPE, "bf16", device, rng).weights()
    if format == "gpt-oss":
        shape = Shape("ops-rows", 4, 2, 256, 128, bias=True, options=tuple(GPT_OSS.items()))
        return make_layer(shape, torch.bfloat16, device, rng).weights()
    return make_layer(SHAPE, torch.bfloat16, device, rng).weights()


def operands_of(weights: oxmoe.ExpertWeights) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns ((w13, w2), options with biases) of experts, as an operator takes them."""
    names = ("layout", "activation", "gated", "alpha", "beta", "limit", "clamp", "w13_scale", "w2_scale", "b13", "b2")
    options = {name: getattr(weights, name) for name in names}
    if weights.w13_scale is not None:
        options["format"] = weights.format
    return (weights.w13, weights.w2), options


@FORMATS
def test_rows_opcheck(format: str, device: str, rng: torch.Generator) -> None:
    """Masks are whole: rows beyond a mask are undefined, and would differ from run to run."""
    weights = experts(format, device, rng)
    x = torch.randn((4, 6, 256), generator=rng).bfloat16().to(device)
    counts = torch.full((4,), 6, dtype=torch.int32, device=device)
    pair, options = operands_of(weights)
    for operator, rows in ((ops.moe_masked, x), (ops.moe_contiguous, x.flatten(0, 1))):
        given = (rows, *pair, counts)
        opcheck(operator.default, given, {**options, "expected_m": 6})
        opcheck(operator.out, given, {**options, "out": torch.empty_like(rows)})
        fakes_are_real(operator.default, given, options)
    expected = oxmoe.moe_masked(x, weights, counts)
    assert same_bits(ops.moe_masked(x, *pair, counts, **options), expected)
    assert same_bits(ops.moe_contiguous(x.flatten(0, 1), *pair, counts, **options).view(x.shape), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_quantised_rows(device: str, rng: torch.Generator) -> None:
    weights = experts("fp8_block", device, rng)
    codes, scales = reference.fp8_groups(torch.randn((24, 256), generator=rng).bfloat16().to(device))
    counts = torch.full((4,), 6, dtype=torch.int32, device=device)
    pair, options = operands_of(weights)
    given = (codes.view(4, 6, 256), *pair, counts)
    options["x_scale"] = scales.view(4, 6, 2)
    opcheck(ops.moe_masked.default, given, options)
    fakes_are_real(ops.moe_masked.default, given, options)


@FORMATS
def test_rows_compiled(format: str, device: str, rng: torch.Generator) -> None:
    weights = experts(format, device, rng)
    x = torch.randn((4, 6, 256), generator=rng).bfloat16().to(device)
    counts = torch.tensor([6, 0, 3, 6], dtype=torch.int32, device=device)

    def masked(x: Tensor, counts: Tensor) -> Tensor:
        return oxmoe.moe_masked(x + 1, weights, counts, out=torch.zeros_like(x)) * 2

    def contiguous(x: Tensor, counts: Tensor) -> Tensor:
        return oxmoe.moe_contiguous(
            x.flatten(0, 1), weights, counts, alignment=6, out=torch.zeros_like(x).flatten(0, 1)
        )

    def indices(x: Tensor, ids: Tensor) -> Tensor:
        return oxmoe.moe_contiguous(x.flatten(0, 1), weights, m_indices=ids)

    ids = torch.randint(-1, 4, (24,), generator=rng).int().to(device)
    for program, given in ((masked, counts), (contiguous, counts), (indices, ids)):
        assert same_bits(compiled(program, x, given), program(x, given))


def test_mxfp8_layer(rng: torch.Generator) -> None:
    """`moe` takes MXFP8 experts as bare tensors on CPUs."""
    weights, x = experts("mxfp8", "cpu", rng), torch.randn((5, 256), generator=rng).bfloat16()
    routing = make_routing("uniform", 5, 4, 2, rng)
    pair, options = operands_of(weights)
    opcheck(ops.moe.default, (x, *pair, *routing), options)
    opcheck(ops.moe.out, (x, *pair, *routing), {**options, "out": torch.empty_like(x)})
    expected = oxmoe.moe(x, weights, *routing)
    assert same_bits(ops.moe(x, *pair, *routing, **options), expected)
    assert same_bits(compiled(lambda x: oxmoe.moe(x, weights, *routing), x), expected)


def test_padded_mxfp8_layer(rng: torch.Generator) -> None:
    """Compiled calls know the hidden_size of padded experts."""
    layer = make_mxfp8(Shape("padded", 4, 2, 96, 32), "cpu", rng)
    weights = oxmoe.ExpertWeights.mxfp8(layer.w13, layer.w2, layer.w13_scale, layer.w2_scale, hidden_size=64)
    x, counts = torch.randn((4, 3, 64), generator=rng).bfloat16(), torch.tensor([3, 0, 1, 3], dtype=torch.int32)
    routing = make_routing("uniform", 12, 4, 2, rng)
    for program, given in (
        (lambda x: oxmoe.moe(x, weights, *routing), (x.flatten(0, 1),)),
        (lambda x, counts: oxmoe.moe_masked(x, weights, counts, out=torch.zeros_like(x)), (x, counts)),
    ):
        assert same_bits(compiled(program, *given), program(*given))


@pytest.mark.parametrize("quantised", [False, True])
def test_cutedsl(quantised: bool, rng: torch.Generator) -> None:
    """NVFP4 experts are made of tensors, on CPUs."""

    def packed(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        weights = torch.randn((2, rows, columns), generator=rng).bfloat16()
        codes, scales = zip(*(nvfp4.fp4_quantize(w, torch.tensor(4.0)) for w in weights), strict=True)
        return torch.stack(codes), torch.stack(scales).view(torch.float8_e4m3fn)

    x, counts, ones = torch.randn((2, 6, 256), generator=rng).bfloat16(), torch.full((2,), 6).int(), torch.ones(2)
    (w1, w1_scale), (w2, w2_scale) = packed(256, 256), packed(256, 128)
    experts = (ones, w1, w1_scale, ones / 64, w2, ones, w2_scale, ones / 64, counts)
    hidden = nvfp4.scaled_fp4_grouped_quantize(x, counts, ones) if quantised else (x, None)
    opcheck(ops.flashinfer_cutedsl_moe_masked.default, (*hidden, *experts))
    fakes_are_real(ops.flashinfer_cutedsl_moe_masked.default, (*hidden, *experts))
    expected = nvfp4.flashinfer_cutedsl_moe_masked(hidden, *experts)

    def program(w2_alpha: Tensor) -> Tensor:
        return nvfp4.flashinfer_cutedsl_moe_masked(hidden, *experts[:7], w2_alpha, counts) + 0

    assert same_bits(compiled(program, ones / 64), expected + 0)


# Quantisers and packed routing


@pytest.mark.parametrize("options", [{}, {"column_major": True, "row_multiple": 4}, {"powers": True}], ids=str)
def test_fp8_quantiser(options: dict[str, Any], device: str, rng: torch.Generator) -> None:
    x = torch.randn((8, 640), generator=rng).bfloat16().to(device)
    options = {"column_major": True, "row_multiple": 4, **options} if "powers" in options else options
    opcheck(ops.quantize_fp8.default, (x, 128, 1e-10), options)
    # Scales are padded to whole fours of rows; the scales of missing rows are undefined.
    fakes_are_real(ops.quantize_fp8.default, (x[:5].contiguous(), 128, 1e-10), options)


@pytest.mark.parametrize("layout", ["128x4", "8x4", "linear"])
def test_nvfp4_quantiser(layout: str, device: str, rng: torch.Generator) -> None:
    x = torch.randn((2, 130, 96), generator=rng).bfloat16().to(device)
    scale = torch.tensor([2.0, 3.0], device=device)
    for block, of_scale in ((16, "e4m3"), (32, "e8m0")):
        options = {"block": block, "scale_dtype": of_scale, "scale_layout": layout}
        opcheck(ops.quantize_nvfp4.default, (x, scale), options)
        fakes_are_real(ops.quantize_nvfp4.default, (x, scale), options)


def public_quantisers() -> dict[str, Callable[[Tensor], Any]]:
    return {
        "per_token_group_quant_fp8": lambda x: quantize.per_token_group_quant_fp8(x, 128),
        "column-major": lambda x: quantize.per_token_group_quant_fp8(x, 128, column_major_scales=True),
        "mxfp8_quantize": lambda x: oxmoe.mxfp8_quantize(x),
        "fp4_quantize": lambda x: nvfp4.fp4_quantize(x, torch.ones(1, device=x.device)),
        "scaled_fp4_grouped_quantize": lambda x: nvfp4.scaled_fp4_grouped_quantize(
            x.view(2, -1, x.shape[1]),
            torch.full((2,), x.shape[0] // 2, dtype=torch.int32, device=x.device),
            torch.ones(2, device=x.device),
        ),
        "pack_topk": lambda x: oxmoe.pack_topk(x[:, :4].float(), x[:, 4:8].int()),
        "unpack_topk": lambda x: oxmoe.unpack_topk(x[:, :4].int()),
    }


@pytest.mark.parametrize("name", public_quantisers())
def test_quantisers_compiled(name: str, device: str, rng: torch.Generator) -> None:
    """The functions are also called under FakeTensorMode, which sees shapes alone."""
    program = public_quantisers()[name]
    x = torch.randn((256, 256), generator=rng).bfloat16().to(device)
    expected = tensors(program(x))
    assert all(map(same_bits, tensors(compiled(program, x)), expected))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = tensors(program(mode.from_tensor(x)))
    described = [[(t.shape, t.dtype, t.stride()) for t in results] for results in (fake, expected)]
    assert described[0] == described[1]


# flashinfer's fp8 calls


@pytest.fixture
def trtllm(device: str, rng: torch.Generator) -> dict[str, Any]:
    shape = SHAPE.with_options(layout="up_gate")
    layer = make_fp8(shape, device, rng)
    codes, scales = reference.fp8_groups(layer.x(7, rng))
    return {
        "logits": tie_free_logits(7, 4, rng).to(device),
        "routing": tuple(t.to(device) for t in make_routing("uniform", 7, 4, 2, rng)),
        "hidden_states": codes,
        "hidden_states_scale": scales.t().contiguous(),
        "gemm1_weights": layer.w13,
        "gemm1_weights_scale": layer.w13_scale,
        "gemm2_weights": layer.w2,
        "gemm2_weights_scale": layer.w2_scale,
    }


COMMON = {"routing_bias": None, "num_experts": 4, "top_k": 2, "n_group": None, "topk_group": None}
COMMON |= {"intermediate_size": 128, "local_expert_offset": 0, "local_num_experts": 4, "routed_scaling_factor": None}


@pytest.mark.parametrize("method", [1, 2, 5])
def test_trtllm_compiled(method: int, trtllm: dict[str, Any]) -> None:
    logits, (weights, ids) = trtllm.pop("logits"), trtllm.pop("routing")
    packed = oxmoe.pack_topk(weights, ids)

    def by_logits(x: Tensor, logits: Tensor) -> Tensor:
        return oxmoe.trtllm_fp8_block_scale_moe(
            logits, **{**trtllm, "hidden_states": x}, **COMMON, routing_method_type=method
        )

    def routed(x: Tensor, packed: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.bfloat16, device=x.device)
        given = {**trtllm, "hidden_states": x}
        return oxmoe.trtllm_fp8_block_scale_routed_moe(packed, **given, **COMMON, output=out) + 1

    def replayed(x: Tensor, logits: Tensor) -> Tensor:
        replay = torch.zeros((7, 2), dtype=torch.int16, device=x.device)
        given = {**trtllm, "hidden_states": x}
        result = oxmoe.trtllm_fp8_block_scale_moe(
            logits, **given, **COMMON, routing_method_type=method, routing_replay_out=replay
        )
        return result + replay.sum()

    x = trtllm["hidden_states"]
    for program, routing in ((by_logits, logits), (routed, packed), (replayed, logits)):
        assert same_bits(compiled(program, x, routing), program(x, routing))


def test_trtllm_opcheck(trtllm: dict[str, Any]) -> None:
    logits, (weights, ids) = trtllm.pop("logits"), trtllm.pop("routing")
    x, x_scale, *gemms = trtllm.values()
    form = {"quantization": 1, "shuffled": False, "weight_layout": 0}
    given = (x, x_scale, *gemms)
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    for routing in ({"router_logits": logits, "top_k": 2}, {"topk_weights": weights, "topk_ids": ids}):
        opcheck(ops.trtllm_fp8_layer.default, given, {**form, **routing})
        opcheck(ops.trtllm_fp8_layer.out, given, {**form, **routing, "out": out})
        fakes_are_real(ops.trtllm_fp8_layer.default, given, {**form, **routing})


def test_trtllm_mxfp8_in_traced_code(device: str, rng: torch.Generator) -> None:
    """The experts are packed on CUDA all the same: the operator keeps what it made, as the eager call does."""
    layer = make_mxfp8(SHAPE.with_options(layout="up_gate"), device, rng)
    x, logits = layer.x(7, rng), tie_free_logits(7, 4, rng).to(device)
    gemms = {"gemm1_weights": layer.w13, "gemm1_weights_scale": layer.w13_scale}
    gemms |= {"gemm2_weights": layer.w2, "gemm2_weights_scale": layer.w2_scale}

    def program(x: Tensor, logits: Tensor) -> Tensor:
        codes, scales = oxmoe.mxfp8_quantize(x, False)
        tokens = {"hidden_states": codes, "hidden_states_scale": scales.view(7, 8)}
        return oxmoe.trtllm_fp8_block_scale_moe(
            logits, **tokens, **gemms, **COMMON, routing_method_type=1, fp8_quantization_type=2
        )

    assert same_bits(compiled(program, x, logits), program(x, logits))
