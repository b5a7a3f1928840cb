"""fp8 with one scale a matrix or one a row whose intermediate size is no multiple of 128: gate and up rows, and columns
of w2, end inside a block, as tensor parallelism leaves them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import ACTIVATIONS, Shape, make_routing, make_workspace
from fp8_cases import (
    CALL_OPTIONS,
    CUT_MODELS,
    CUT_SHAPES,
    MODES,
    Fp8Tensor,
    call,
    check_graph,
    check_tensor,
    make_fp8_tensor,
)
from oxmoe.testing import relative_norm, same_bits

SCALES: dict[str, dict[str, bool]] = {"one": {}, "halves": {"halves": True}, "rows": {"of_rows": True}}
I176, I704 = CUT_SHAPES[2], CUT_SHAPES[5]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def guarded(codes: Tensor) -> Tensor:
    """Returns the codes between others that are NaN, so that a read before the first or behind the last code shows."""
    room = torch.full((codes.numel() + 2 * 4096,), 0x7F, dtype=torch.uint8, device=codes.device)
    own = room[4096 : 4096 + codes.numel()].view(codes.dtype).view(codes.shape)
    return own.copy_(codes)


def make(shape: Shape, scales: str, device: str, rng: torch.Generator) -> Fp8Tensor:
    layer = make_fp8_tensor(shape, device, rng, **SCALES[scales])
    return dataclasses.replace(layer, w13=guarded(layer.w13), w2=guarded(layer.w2))


@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 300])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("shape", CUT_SHAPES, ids=lambda s: s.name)
def test_layer(shape: Shape, scales: str, tokens: int, mode: str, device: str, rng: torch.Generator) -> None:
    layer = make(shape, scales, device, rng)
    routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
    check_tensor(layer, layer.x(tokens, rng), *routing, mode=mode)


@pytest.mark.parametrize("name", ["swiglu-up-gate", "gpt-oss-halves", "situ", "relu2", "gelu-plain"])
@pytest.mark.parametrize("shape", [I176, I704], ids=lambda s: s.name)
@pytest.mark.parametrize("tokens", [6, 300])
def test_activations(name: str, shape: Shape, tokens: int, device: str, rng: torch.Generator) -> None:
    shape = shape.with_options(**ACTIVATIONS[name])
    layer = make(shape, "rows", device, rng)
    routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
    check_tensor(layer, layer.x(tokens, rng), *routing, mode="token")


@pytest.mark.parametrize("options", CALL_OPTIONS, ids="-".join)
def test_call_options(options: dict[str, Any], mode: str, device: str, rng: torch.Generator) -> None:
    layer = make(I176, "halves", device, rng)
    experts = I176.experts * options.get("ep_size", 1)
    for tokens in (9, 300):
        routing = make_routing("holes", tokens, experts, I176.top_k, rng)
        check_tensor(layer, layer.x(tokens, rng), *routing, mode=mode, **options)


def in_fp64(layer: Fp8Tensor, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Computes the layer in fp64 with a scale for each row, by an index formula. Rows are bf16 between the GEMMs and
    after GEMM2."""
    columns = layer.shape.intermediate
    w13 = layer.w13.double() * layer.w13_scale.double().view(layer.shape.experts, -1, 1)
    w2 = layer.w2.double() * layer.w2_scale.double().view(layer.shape.experts, -1, 1)

    def quantised(row: Tensor) -> Tensor:
        scale = row.abs().max().double() / 448
        return (row.double() / scale).float().to(torch.float8_e4m3fn).double() * scale

    out = torch.zeros_like(x, dtype=torch.float64)
    for token, slot in torch.cartesian_prod(torch.arange(len(x)), torch.arange(ids.shape[1])).tolist():
        expert = int(ids[token, slot])
        sums = w13[expert] @ quantised(x[token])
        sums = sums if layer.b13 is None else sums + layer.b13[expert].double()
        gate, up = sums[:columns], sums[columns:]
        row = w2[expert] @ quantised((gate * gate.sigmoid() * up).bfloat16())
        row = row if layer.b2 is None else row + layer.b2[expert].double()
        out[token] += weights[token, slot].double() * row.bfloat16().double()
    return out


@pytest.mark.parametrize("scales", ["one", "rows"])
@pytest.mark.parametrize("shape", CUT_SHAPES, ids=lambda s: s.name)
def test_against_fp64(shape: Shape, scales: str, rng: torch.Generator) -> None:
    layer = make(shape, scales, "cpu", rng)
    # A code on its border moves by an eighth. A row of few columns moves much with it, so there are many rows.
    tokens = 96
    x, routing = layer.x(tokens, rng), make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
    result, truth = call(x, layer.weights("token"), *routing).double(), in_fp64(layer, x, *routing)
    norm = relative_norm(result, truth)
    assert norm < 1.5e-2, f"norm {norm:.3g}"


def rows_between(workspace: Tensor, name: str, shape: Shape, tokens: int, dtype: torch.dtype) -> Tensor:
    """Returns the row between the GEMMs that a call left in its workspace for each slot."""
    sizes = shape.experts, shape.top_k, shape.hidden, shape.intermediate, tokens
    text = oxmoe.explain(*sizes, format="fp8_tensor-token", gated=shape.gated, arch="cpu")
    found = re.search(rf"^ +(\d+) \+ (\d+) +{name}$", text, re.MULTILINE)
    assert found is not None
    first, count = (int(number) for number in found.groups())
    return workspace[first : first + count].view(dtype).view(tokens * shape.top_k, -1)


@pytest.mark.parametrize("shape", CUT_SHAPES, ids=lambda s: s.name)
@pytest.mark.parametrize("tokens", [3, 300])
def test_rows_end_in_zeros(shape: Shape, tokens: int, device: str, rng: torch.Generator) -> None:
    """Rows are whole blocks in a workspace that was all NaN; a row's scale is that of its own columns."""
    layer = make(shape, "rows", device, rng)
    made, x = layer.weights("token"), layer.x(tokens, rng)
    routing = [part.to(device) for part in make_routing("uniform", tokens, shape.experts, shape.top_k, rng)]
    workspace = make_workspace(oxmoe.workspace_bytes(made, tokens, shape.top_k), x.device)
    oxmoe.moe(x, made, *routing, workspace=workspace)
    rows = rows_between(workspace, "hidden", shape, tokens, torch.bfloat16)
    codes = rows_between(workspace, "hidden_codes", shape, tokens, torch.uint8)
    assert rows.shape[1] == codes.shape[1] == -(-shape.intermediate // 128) * 128
    own, behind = rows[:, : shape.intermediate], rows[:, shape.intermediate :]
    assert bool((behind == 0).all()) and bool((codes[:, shape.intermediate :] & 0x7F == 0).all())
    scales = rows_between(workspace, "hidden_scales", shape, tokens, torch.float32)
    expected = own.abs().amax(1, keepdim=True).float() / torch.tensor(448.0, device=x.device)
    assert same_bits(scales, expected.expand(scales.shape).contiguous())


@pytest.mark.parametrize("mode", ["token", "static"])
def test_a_row_does_not_depend_on_the_others(mode: str, device: str, rng: torch.Generator) -> None:
    """A row has the same bits alone, in a tile of few tokens, and in one of many."""
    layer = make(I704, "halves", device, rng)
    made, x = layer.weights(mode), layer.x(700, rng)
    weights, ids = (part.to(device) for part in make_routing("uniform", 700, I704.experts, I704.top_k, rng))
    whole = call(x, made, weights, ids)
    for count in (1, 8, 33, 100, 333):
        assert same_bits(call(x[:count], made, weights[:count], ids[:count]), whole[:count])


@pytest.mark.parametrize("scales", SCALES)
def test_is_the_layer_with_zeros_behind(scales: str, mode: str, device: str, rng: torch.Generator) -> None:
    """Weights that were padded with zeros to whole blocks give the same bits."""
    for shape in (I176, I704):
        layer = make(shape, scales, device, rng)
        rows, columns = -(-shape.intermediate // 128) * 128, shape.intermediate

        def padded(tensor: Tensor | None, rows: int = rows, columns: int = columns) -> Any:
            if tensor is None or tensor.shape[1:2] != (2 * columns,):
                return tensor
            halves = tensor.view(len(tensor), 2, columns, -1)
            whole = halves.new_zeros((len(tensor), 2, rows, halves.shape[-1]), dtype=torch.float32)
            whole[:, :, :columns] = halves.float()
            return whole.to(tensor.dtype).view(len(tensor), 2 * rows, *tensor.shape[2:])

        w2 = layer.w2.float().new_zeros((*layer.w2.shape[:2], rows))
        w2[..., :columns] = layer.w2.float()
        whole = dataclasses.replace(
            layer,
            shape=dataclasses.replace(shape, intermediate=rows),
            w13=padded(layer.w13),
            w13_scale=padded(layer.w13_scale),
            w2=w2.to(layer.w2.dtype),
            b13=padded(layer.b13),
        )
        for tokens in (5, 300):
            x, routing = layer.x(tokens, rng), make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
            assert same_bits(call(x, layer.weights(mode), *routing), call(x, whole.weights(mode), *routing))


@pytest.mark.parametrize("scales", SCALES)
def test_rows_in_expert_order(scales: str, mode: str, device: str, rng: torch.Generator) -> None:
    """`moe_masked` and `moe_contiguous` have moe's bits, unless all rows of a call share a scale: the rows of a call
    differ."""
    if mode == "tensor":
        pytest.skip("one scale for all rows of a call")
    for shape in (I176, I704):
        made = make(shape, scales, device, rng).weights(mode)
        for m, expected in ((4, None), (150, 150)):
            counts = torch.tensor([0, m, 1, m // 2, m][: shape.experts]).int().to(device)
            x = torch.randn((shape.experts, m, shape.hidden), generator=rng).bfloat16().to(device)
            out = oxmoe.moe_masked(x, made, counts, expected_m=expected)
            for expert, count in enumerate(counts.tolist()):
                ids = torch.full((count, 1), expert, dtype=torch.int32, device=device)
                ones = torch.ones((count, 1), device=device)
                assert same_bits(out[expert, :count], call(x[expert, :count].contiguous(), made, ones, ids))


@pytest.mark.parametrize("scales", SCALES)
def test_bare_tensors(scales: str, device: str, rng: torch.Generator) -> None:
    layer = make(I176, scales, device, rng)
    routing = [part.to(device) for part in make_routing("uniform", 20, I176.experts, I176.top_k, rng)]
    x, of = layer.x(20, rng), {"w13_scale": layer.w13_scale, "w2_scale": layer.w2_scale, "format": "fp8_tensor-token"}
    result = oxmoe._oxmoe.moe_tensors(x, layer.w13, layer.w2, *routing, **layer.options, **of)
    assert same_bits(result, call(x, layer.weights("token"), *routing))


def test_what_is_said_of_it(rng: torch.Generator) -> None:
    layer = make(I176, "rows", "cpu", rng)
    made = layer.weights("token")
    assert (made.intermediate_size, made.w13, made.w13_scale, made.b13) == (
        176,
        layer.w13,
        layer.w13_scale,
        layer.b13,
    )
    assert "intermediate=176" in repr(made)
    text = oxmoe.explain(128, 8, 4096, 176, 3000, format="fp8_tensor-token", arch="sm_90")
    assert "intermediate 176" in text and "grouped_gemm_fp8_wide_cut_sm90_gated" in text
    assert "cut" not in oxmoe.explain(128, 8, 4096, 256, 3000, format="fp8_tensor-token", arch="sm_90")
    sizes = 128, 8, 4096, 176, 300
    assert oxmoe._oxmoe.shape_workspace_bytes(*sizes, format="fp8_tensor") >= 300 * 8 * 256 * 3
    with pytest.raises(
        ValueError, match='intermediate_size: expected a multiple of 16 for format "fp8_tensor", got 24'
    ):
        oxmoe.explain(128, 8, 4096, 24, 300, format="fp8_tensor", arch="cpu")
    with pytest.raises(
        ValueError, match='intermediate_size: expected a multiple of 128 for format "fp8_block", got 192'
    ):
        oxmoe.explain(128, 8, 4096, 192, 300, format="fp8_block", arch="cpu")


def test_refused() -> None:
    def codes(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float8_e4m3fn)

    one = torch.ones(1)
    with pytest.raises(
        NotImplementedError, match=r"gives intermediate 24 for fp8_tensor experts; supported: multiples of 16$"
    ):
        oxmoe.ExpertWeights.fp8_tensor(codes(3, 48, 128), codes(3, 128, 24), one, one)
    with pytest.raises(
        NotImplementedError, match=r"gives hidden 64 for fp8_tensor experts; supported: multiples of 128 \(a block"
    ):
        oxmoe.ExpertWeights.fp8_tensor(codes(3, 64, 64), codes(3, 64, 32), one, one)
    with pytest.raises(
        NotImplementedError, match=r"gives intermediate 192 for fp8_block experts; supported: multiples of 128 \(a"
    ):
        oxmoe.ExpertWeights.fp8_block(codes(3, 384, 128), codes(3, 128, 192), torch.ones(3, 3, 1), torch.ones(3, 1, 2))
    with pytest.raises(ValueError, match='w2: dimension 2 "intermediate": expected 176, got 192'):
        oxmoe.ExpertWeights.fp8_tensor(codes(3, 352, 128), codes(3, 128, 192), one, one)
    with pytest.raises(
        ValueError, match=r"w13_scale: expected shape \[3\], \[3, 2\], \[3, 352\] or one number, got \[3, 512\]"
    ):
        oxmoe.ExpertWeights.fp8_tensor(codes(3, 352, 128), codes(3, 128, 176), torch.ones(3, 512), one)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 300, 3000])
@pytest.mark.parametrize("scales", ["one", "rows"])
@pytest.mark.parametrize("shape", CUT_MODELS, ids=lambda s: s.name)
def test_models(shape: Shape, scales: str, tokens: int, rng: torch.Generator) -> None:
    layer = make(shape, scales, "cuda", rng)
    routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
    check_tensor(layer, layer.x(tokens, rng), *routing, mode="token")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("mode", ["tensor", "static"])
@pytest.mark.parametrize("shape", [CUT_MODELS[0], CUT_MODELS[4]], ids=lambda s: s.name)
def test_models_with_other_scales_of_activations(shape: Shape, mode: str, tokens: int, rng: torch.Generator) -> None:
    layer = make(shape, "halves", "cuda", rng)
    routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
    check_tensor(layer, layer.x(tokens, rng), *routing, mode=mode)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4, 300])
def test_graph_takes_other_routing(tokens: int, rng: torch.Generator) -> None:
    check_graph(dataclasses.replace(make(I704, "rows", "cuda", rng), mode="token"), tokens, "uniform", rng)


@pytest.mark.gpu
def test_numbers_of_rows_are_copied_on_hopper_alone(rng: torch.Generator) -> None:
    """Weights are read where they lie. Kernels for Hopper read whole blocks of scales and biases; others read as many
    as exist."""
    layer = make(I176, "rows", "cuda", rng)
    made = layer.weights("token")
    assert made.w13 is layer.w13 and made.w2 is layer.w2 and made.w2_scale is layer.w2_scale and made.b2 is layer.b2
    if "portable" in oxmoe.explain(*(5, 3, 384, 176, 300), format="fp8_tensor-token"):
        assert made.w13_scale is layer.w13_scale and made.b13 is layer.b13
        return
    for whole, own in ((made.w13_scale, layer.w13_scale), (made.b13, layer.b13)):
        assert whole is not None and own is not None and whole.shape == (5, 512)
        parts = whole.view(5, 2, 256)
        assert same_bits(parts[..., :176].reshape(5, 352), own.reshape(5, 352))
        assert not bool(parts[..., 176:].any())
