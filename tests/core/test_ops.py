"""torch.ops.oxmoe.*: opcheck, torch.compile(fullgraph), make_fx and export see every call and change no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import oxmoe
from cases import GPT_OSS, Shape, make_layer, make_routing, make_workspace, make_x, tie_free_logits
from fp8_cases import MODES, make_fp8, make_fp8_tensor
from op_checks import fakes_are_real, opcheck
from oxmoe import reference
from oxmoe.testing import same_bits

SHAPE = Shape("ops", 6, 2, 32, 24, bias=True, options=tuple(GPT_OSS.items()))
ops = torch.ops.oxmoe


class Config:
    """The fields of MoeRunnerConfig that differ from their defaults."""

    inplace = False
    routed_scaling_factor = 1.5


@pytest.fixture
def operands(device: str, rng: torch.Generator) -> dict[str, Any]:
    layer = make_layer(SHAPE, torch.bfloat16, device, rng)
    topk_weights, topk_ids = make_routing("uniform", 5, SHAPE.experts, SHAPE.top_k, rng)
    return {
        "layer": layer,
        "weights": layer.weights(),
        "x": make_x(5, SHAPE, torch.bfloat16, device, rng),
        "topk_weights": topk_weights.to(device),
        "topk_ids": topk_ids.to(device),
        "logits": tie_free_logits(5, SHAPE.experts, rng).to(device),
    }


def calls(o: dict[str, Any]) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Returns name -> (operator, operands, options) for each overload."""
    layer, x, weights, ids, logits = o["layer"], o["x"], o["topk_weights"], o["topk_ids"], o["logits"]
    moe = (x, layer.w13, layer.w2, weights, ids, layer.b13, layer.b2)
    fused = (x, layer.w13, layer.w2, weights, ids, layer.b13, layer.b2)
    # NOTE: opcheck clones operands, and on CPU a clone is not 256-byte aligned.
    workspace = make_workspace(oxmoe.workspace_bytes(o["weights"], 5, 2), x.device) if x.is_cuda else None
    new_ids = torch.empty_like(ids)
    return {
        "moe": (ops.moe.default, moe, dict(GPT_OSS)),
        "moe-no-combine": (ops.moe.default, moe, {"no_combine": True}),
        "moe-logits": (ops.moe.default, (*moe[:3], None, None), {"router_logits": logits, "top_k": 2}),
        "moe.out": (ops.moe.out, moe, {**GPT_OSS, "out": torch.empty_like(x), "workspace": workspace}),
        "fused_experts": (ops.fused_experts.default, fused, {"gemm1_alpha": 1.702, "gemm1_limit": 7.0}),
        "fused_experts.out": (ops.fused_experts.out, fused, {"activation": "gelu", "out": torch.empty_like(x)}),
        "topk": (ops.topk.default, (logits, 2), {"scoring_func": "sigmoid"}),
        "topk.out": (ops.topk.out, (logits, 2), {"topk_weights": torch.empty_like(weights), "topk_ids": new_ids}),
        "sort_by_expert": (ops.sort_by_expert.default, (ids, 6), {"first_expert": 2}),
        "routing_tables": (ops.routing_tables.default, (weights, ids, 8), {"gate_dtype": "bfloat16"}),
    }


CALLS = (
    *("moe", "moe-no-combine", "moe-logits", "moe.out", "fused_experts", "fused_experts.out"),
    *("topk", "topk.out", "sort_by_expert", "routing_tables"),
)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(operands: dict[str, Any], name: str) -> None:
    operator, arguments, options = calls(operands)[name]
    torch.library.opcheck(operator, arguments, options)


@pytest.mark.parametrize("name", CALLS)
def test_fakes_have_the_real_shapes(operands: dict[str, Any], name: str) -> None:
    operator, arguments, options = calls(operands)[name]
    fakes_are_real(operator, arguments, options)


def programs(o: dict[str, Any]) -> dict[str, Callable[[Tensor], Any]]:
    """Returns public calls inside a little computation of their own."""
    layer, weights, topk_weights, topk_ids = o["layer"], o["weights"], o["topk_weights"], o["topk_ids"]
    logits = o["logits"]

    def into_x(x: Tensor) -> Tensor:
        y = x + 1
        oxmoe.moe(y, weights, topk_weights, topk_ids, out=y)
        return y * 2

    def in_place_experts(x: Tensor) -> Tensor:
        config = Config()
        config.inplace = True
        y = x * 1
        z = oxmoe.fused_experts(y, layer.w13, layer.w2, (topk_weights, topk_ids, None), config, layer.b13, layer.b2)
        return y + z

    def into_given(x: Tensor) -> Tensor:
        w, ids = torch.empty_like(topk_weights), torch.empty_like(topk_ids)
        oxmoe.topk(logits, 2, topk_weights=w, topk_ids=ids)
        return oxmoe.moe(x, weights, w, ids)

    return {
        "moe": lambda x: oxmoe.moe(x * 2, weights, topk_weights, topk_ids, routed_scaling_factor=0.5) + x,
        "logits": lambda x: oxmoe.moe(x, weights, router_logits=logits, top_k=2).relu(),
        "into_x": into_x,
        "topk": lambda x: oxmoe.moe(x, weights, *oxmoe.topk(logits * 2, 2, scoring_func="sigmoid")),
        "into_given": into_given,
        "sort": lambda x: oxmoe.sort_by_expert(topk_ids + 0, 6)[2] + 1,
        "routing": lambda x: oxmoe.routing(logits + 1, 2, n_rows=3)[0].expt_data.block_schedule(64) + 1,
        "fused_experts": lambda x: (
            oxmoe.fused_experts(x + 1, layer.w13, layer.w2, (topk_weights, topk_ids, None), Config()) * 2
        ),
        "in_place_experts": in_place_experts,
    }


PROGRAMS = "moe logits into_x topk into_given sort routing fused_experts in_place_experts".split()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_compile_fullgraph(operands: dict[str, Any], name: str, backend: str) -> None:
    torch._dynamo.reset()
    program, x = programs(operands)[name], operands["x"]
    expected = program(x)
    assert same_bits(torch.compile(program, fullgraph=True, backend=backend)(x), expected)


@pytest.mark.gpu
def test_compile_with_workspace(rng: torch.Generator) -> None:
    torch._dynamo.reset()
    layer = make_layer(SHAPE, torch.bfloat16, "cuda", rng)
    weights, x = layer.weights(), make_x(5, SHAPE, torch.bfloat16, "cuda", rng)
    topk_weights, topk_ids = (t.cuda() for t in make_routing("uniform", 5, SHAPE.experts, SHAPE.top_k, rng))
    size = oxmoe.workspace_bytes(weights, 5, 2)

    def program(x: Tensor) -> Tensor:
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        return oxmoe.moe(x, weights, topk_weights, topk_ids, workspace=workspace) + 1

    assert same_bits(torch.compile(program, fullgraph=True)(x), program(x))


def test_compiled_once_for_every_layer(device: str, rng: torch.Generator) -> None:
    """Layers of one shape and kind share a graph: ExpertWeights is read through its attributes, not by identity."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(
        lambda x, weights, w, ids: oxmoe.moe(x, weights, w, ids) + 1, fullgraph=True, backend=counter
    )
    topk_weights, topk_ids = (t.to(device) for t in make_routing("uniform", 5, SHAPE.experts, SHAPE.top_k, rng))
    for _ in range(3):
        weights = make_layer(SHAPE, torch.bfloat16, device, rng).weights()
        x = make_x(5, SHAPE, torch.bfloat16, device, rng)
        expected = oxmoe.moe(x, weights, topk_weights, topk_ids) + 1
        assert same_bits(compiled(x, weights, topk_weights, topk_ids), expected)
    assert counter.frame_count == 1


def test_compile_with_changing_batch(operands: dict[str, Any], device: str, rng: torch.Generator) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    weights = operands["weights"]
    compiled = torch.compile(
        lambda x, logits: oxmoe.moe(x, weights, *oxmoe.topk(logits, 2)), fullgraph=True, backend=counter, dynamic=True
    )
    compiled(operands["x"], operands["logits"])
    # NOTE: float options make dynamo start its first compilation over, which counts twice.
    count = counter.frame_count
    for tokens in (4, 7, 33, 128):
        x, logits = (
            make_x(tokens, SHAPE, torch.bfloat16, device, rng),
            tie_free_logits(tokens, SHAPE.experts, rng).to(device),
        )
        assert same_bits(compiled(x, logits), oxmoe.moe(x, weights, *oxmoe.topk(logits, 2)))
    assert counter.frame_count == count


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_make_fx(operands: dict[str, Any], name: str, mode: str) -> None:
    """A call that goes straight to the extension would leave no node behind."""
    program, x = programs(operands)[name], operands["x"]
    expected = program(x)
    graph = make_fx(program, tracing_mode=mode, _allow_non_fake_inputs=True)(x)
    assert any(str(node.target).startswith("oxmoe.") for node in graph.graph.nodes)
    assert same_bits(graph(x), expected)


def test_export(operands: dict[str, Any]) -> None:
    weights = operands["weights"]

    class Module(torch.nn.Module):
        def forward(self, x: Tensor, logits: Tensor) -> Tensor:
            return oxmoe.moe(x, weights, router_logits=logits, top_k=2)

    x, logits = operands["x"], operands["logits"]
    exported = torch.export.export(Module(), (x, logits))
    assert same_bits(exported.module()(x, logits), Module()(x, logits))


def test_fake_tensor_mode(operands: dict[str, Any]) -> None:
    weights = operands["weights"]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, topk_weights, topk_ids = (mode.from_tensor(operands[name]) for name in ("x", "topk_weights", "topk_ids"))
        assert oxmoe.moe(x, weights, topk_weights, topk_ids).shape == x.shape


def test_operators_refuse_as_the_builtin_does(operands: dict[str, Any]) -> None:
    layer, x = operands["layer"], operands["x"]
    with pytest.raises(ValueError, match=r'^x: dimension 1 ".*32.*31'):
        ops.moe(x[:, 1:].contiguous(), layer.w13, layer.w2, operands["topk_weights"], operands["topk_ids"])
    with pytest.raises(NotImplementedError, match=r"float8"):
        ops.moe(x, layer.w13.to(torch.float8_e4m3fn), layer.w2, operands["topk_weights"], operands["topk_ids"])


# Experts of e4m3

FP8_SHAPE = Shape("fp8-ops", 5, 2, 256, 128)
FP8_CALLS = ("fp8_block", *(f"fp8_tensor-{mode}" for mode in MODES))


def fp8_layer(name: str, device: str, rng: torch.Generator) -> tuple[Any, oxmoe.ExpertWeights]:
    if name == "fp8_block":
        layer = make_fp8(FP8_SHAPE, device, rng)
        return layer, layer.weights()
    tensor = make_fp8_tensor(FP8_SHAPE, device, rng, halves=True)
    return tensor, tensor.weights(name.rpartition("-")[2])


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("name", FP8_CALLS)
def test_fp8_opcheck(name: str, quantised: bool, device: str, rng: torch.Generator) -> None:
    layer, weights = fp8_layer(name, device, rng)
    x = make_x(5, FP8_SHAPE, torch.bfloat16, device, rng)
    routing = tuple(t.to(device) for t in make_routing("uniform", 5, 5, 2, rng))
    options: dict[str, Any] = {"format": weights.format, "w13_scale": weights.w13_scale, "w2_scale": weights.w2_scale}
    options.update(
        {key: getattr(weights, key) for key in ("a13_scale", "a2_scale") if getattr(weights, key) is not None}
    )
    expected = oxmoe.moe(x, weights, *routing)
    if quantised:
        x, options["x_scale"] = reference.fp8_groups(x)
        expected = oxmoe.moe(x, weights, *routing, x_scale=options["x_scale"])
    operands = x, layer.w13, layer.w2, *routing
    opcheck(ops.moe.default, operands, options)
    assert same_bits(ops.moe(*operands, **options), expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = ops.moe(mode.from_tensor(x), *operands[1:], **options)
    assert (fake.shape, fake.dtype) == (expected.shape, torch.bfloat16)


@pytest.mark.parametrize("name", FP8_CALLS)
def test_fp8_compiled(name: str, device: str, rng: torch.Generator) -> None:
    torch._dynamo.reset()
    layer, weights = fp8_layer(name, device, rng)
    x = make_x(5, FP8_SHAPE, torch.bfloat16, device, rng)
    routing = tuple(t.to(device) for t in make_routing("uniform", 5, 5, 2, rng))
    codes, scales = reference.fp8_groups(x)
    static = {"a1_scale": weights.a13_scale, "a2_scale": weights.a2_scale} if name.endswith("static") else {}
    blocks = {"block_shape": [128, 128]} if name == "fp8_block" else {}

    def program(x: Tensor, codes: Tensor) -> Tensor:
        result = oxmoe.moe(x, weights, *routing) + oxmoe.moe(codes, weights, *routing, x_scale=scales)
        given = {"w1_scale": layer.w13_scale, "w2_scale": layer.w2_scale, **static, **blocks}
        given["per_channel_quant"] = name.endswith("token")
        experts = oxmoe.fused_experts(
            x, layer.w13, layer.w2, (*routing, None), Config(), layer.b13, layer.b2, use_fp8_w8a8=True, **given
        )
        return result + experts

    expected = program(x, codes)
    assert same_bits(torch.compile(program, fullgraph=True, backend="aot_eager")(x, codes), expected)


def test_options_of_logits_beside_ids(operands: dict[str, Any]) -> None:
    """Traced calls and operators refuse options that they would not read, as eager calls do."""
    layer, routing = operands["layer"], (operands["topk_weights"], operands["topk_ids"])
    plain = (operands["x"], layer.w13, layer.w2, *routing)
    for options in (
        {"top_k": 2},
        {"scoring_func": "sigmoid"},
        {"renormalize": False},
        {"num_expert_group": 2},
        {"correction_bias": operands["logits"][0].contiguous()},
        {"router_logits": operands["logits"], "top_k": 2},
    ):
        calls: list[Callable[[], Tensor]] = [
            lambda options=options: oxmoe.moe(operands["x"], operands["weights"], *routing, **options),
            lambda options=options: ops.moe(*plain, **options),
            lambda options=options: ops.moe.out(*plain, out=torch.empty_like(operands["x"]), **options),
            lambda options=options: torch.compile(
                lambda x: oxmoe.moe(x, operands["weights"], *routing, **options), backend="eager", fullgraph=True
            )(operands["x"]),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="router_logits"):
                call()
