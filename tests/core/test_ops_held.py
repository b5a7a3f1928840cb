"""Operators whose experts are a handle (packed, NVFP4 and int4 experts): traced code sees the calls, and bits stay."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import int4_cases
import nvfp4_cases
import oxmoe
from cases import Shape, make_routing, make_workspace, make_x, tie_free_logits
from mxfp4_cases import make_blocks
from mxfp8_cases import make_mxfp8
from op_checks import fakes_are_real, opcheck
from oxmoe.testing import same_bits

SHAPE = Shape("held", 4, 2, 128, 64, bias=True)
ops = torch.ops.oxmoe

# Formats whose experts are no plain tensors on the device.
HELD = [
    pytest.param("nvfp4", "cpu"),
    pytest.param("nvfp4-a4", "cpu"),
    pytest.param("int4", "cpu"),
    pytest.param("int4-zeros", "cpu"),
    *(
        pytest.param(name, "cuda", marks=pytest.mark.gpu)
        for name in ("nvfp4", "nvfp4-a4", "int4", "int4-zeros", "mxfp4", "mxfp4-a8", "mxfp8")
    ),
]


@pytest.fixture(autouse=True)
def no_programs() -> None:
    """Begins each test without compiled programs, because torch compiles a function anew for a few formats, then no
    more."""
    torch._dynamo.reset()


def make_held(name: str, device: str, rng: torch.Generator) -> oxmoe.ExpertWeights:
    if name == "mxfp8":
        return make_mxfp8(SHAPE, device, rng).weights()
    if name.startswith("mxfp4"):
        activations = "float8_e4m3fn" if name.endswith("a8") else None
        return make_blocks(SHAPE, "bf16", device, rng).weights(activation_dtype=activations)
    if name.startswith("int4"):
        return int4_cases.make(SHAPE, rng, zeros=name.endswith("zeros")).to(device).weights()
    layer = nvfp4_cases.make(SHAPE, rng, a4=name.endswith("a4"))
    fields = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    moved = {name: value.to(device) for name, value in fields.items() if isinstance(value, Tensor)}
    return dataclasses.replace(layer, **moved).weights()


def compiled(program: Callable[..., Tensor], *given: Tensor) -> Tensor:
    return torch.compile(program, fullgraph=True, backend="aot_eager")(*given)


@pytest.mark.parametrize(("name", "device"), HELD)
def test_layer(name: str, device: str, rng: torch.Generator) -> None:
    weights, x = make_held(name, device, rng), make_x(5, SHAPE, torch.bfloat16, device, rng)
    topk = [t.to(device) for t in make_routing("uniform", 5, SHAPE.experts, SHAPE.top_k, rng)]
    logits = tie_free_logits(5, SHAPE.experts, rng).to(device)
    by_handle = (weights.handle, weights.hidden_size, torch.bfloat16)
    for given, options in (
        (topk, {}),
        (topk, {"no_combine": True, "keep_router_weight": True}),
        ([None, None], {"router_logits": logits, "top_k": 2, "routed_scaling_factor": 2.5}),
    ):
        opcheck(ops.moe_held.default, (x, *by_handle, *given), options)
        fakes_are_real(ops.moe_held.default, (x, *by_handle, *given), options)
        expected = oxmoe.moe(x, weights, *given, **options)

        def program(x: Tensor, given: list[Tensor | None] = given, options: dict[str, object] = options) -> Tensor:
            return oxmoe.moe(x * 1, weights, *given, **options) + 0

        assert same_bits(compiled(program, x), expected + 0)


@pytest.mark.parametrize(("name", "device"), HELD)
def test_out_and_workspace(name: str, device: str, rng: torch.Generator) -> None:
    weights, x = make_held(name, device, rng), make_x(5, SHAPE, torch.bfloat16, device, rng)
    topk = [t.to(device) for t in make_routing("uniform", 5, SHAPE.experts, SHAPE.top_k, rng)]
    workspace = make_workspace(oxmoe.workspace_bytes(weights, 5, 2), device)
    expected = oxmoe.moe(x, weights, *topk)

    def into(x: Tensor, out: Tensor) -> Tensor:
        oxmoe.moe(x, weights, *topk, out=out, workspace=workspace)
        return out + 0

    assert same_bits(compiled(into, x, torch.full_like(x, torch.nan)), expected + 0)

    def with_workspace(x: Tensor) -> Tensor:
        return oxmoe.moe(x, weights, *topk, workspace=workspace) + 0

    assert same_bits(compiled(with_workspace, x), expected + 0)


@pytest.mark.parametrize(("name", "device"), HELD)
def test_rows_in_order(name: str, device: str, rng: torch.Generator) -> None:
    weights = make_held(name, device, rng)
    x = torch.stack([make_x(6, SHAPE, torch.bfloat16, device, rng) for _ in range(SHAPE.experts)])
    counts = torch.tensor([6, 0, 3, 1], dtype=torch.int32, device=device)
    by_handle = (weights.handle, weights.hidden_size, torch.bfloat16, counts)
    opcheck(ops.moe_masked_held.out, (x, *by_handle), {"out": torch.zeros_like(x)})
    fakes_are_real(ops.moe_contiguous_held.default, (x.flatten(0, 1), *by_handle), {"alignment": 6})

    def masked(x: Tensor, counts: Tensor) -> Tensor:
        return oxmoe.moe_masked(x, weights, counts, out=torch.zeros_like(x)) + 0

    def contiguous(x: Tensor, counts: Tensor) -> Tensor:
        out = torch.zeros_like(x).flatten(0, 1)
        return oxmoe.moe_contiguous(x.flatten(0, 1), weights, counts, alignment=6, out=out) + 0

    for program in (masked, contiguous):
        assert same_bits(compiled(program, x, counts), program(x, counts))


def test_one_program_serves_several_layers(rng: torch.Generator) -> None:
    """A handle is a number of the graph's input: layers beyond the second compile nothing."""
    layers, x = [make_held("nvfp4", "cpu", rng) for _ in range(6)], make_x(5, SHAPE, torch.bfloat16, "cpu", rng)
    topk = make_routing("uniform", 5, SHAPE.experts, SHAPE.top_k, rng)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def layer(x: Tensor, weights: oxmoe.ExpertWeights) -> Tensor:
        return oxmoe.moe(x, weights, *topk)

    for weights in layers:
        assert same_bits(layer(x, weights), oxmoe.moe(x, weights, *topk))
    assert counter.frame_count <= 2


def test_fakes_need_no_experts() -> None:
    with FakeTensorMode():
        x, ids = torch.empty((7, 64)), torch.empty((7, 3), dtype=torch.int32)
        out = ops.moe_held(x, 1 << 40, 128, torch.bfloat16, torch.empty((7, 3)), ids, no_combine=True)
    assert (out.shape, out.dtype) == ((7, 3, 128), torch.bfloat16)


def test_handles(rng: torch.Generator) -> None:
    weights = make_held("nvfp4", "cpu", rng)
    handle = weights.handle
    assert oxmoe._oxmoe.experts_of(handle) is weights and weights.handle == handle
    assert make_held("nvfp4", "cpu", rng).handle != handle
    x, topk = make_x(3, SHAPE, torch.bfloat16, "cpu", rng), make_routing("uniform", 3, 4, 2, rng)
    del weights
    gc.collect()
    with pytest.raises(ValueError, match=f"no ExpertWeights has the handle {handle}; they were freed"):
        ops.moe_held(x, handle, 128, torch.bfloat16, *topk)
