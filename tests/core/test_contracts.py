"""Every way to call wrongly: the right exception, operand, dimension, expected and got named, and nothing written."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import oxmoe
from cases import Shape, make_layer, make_routing, make_workspace, make_x
from oxmoe.ops import routing_tables

TOKENS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 5, 6, 3, 64, 48
SHAPE = Shape("contract", EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, bias=True)


class Call:
    """A right call of moe, whose operands a test then spoils; poisoned output and workspace must stay as they are."""

    def __init__(self, device: str, rng: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> None:
        self.layer = make_layer(SHAPE, dtype, device, rng)
        topk_weights, topk_ids = make_routing("uniform", TOKENS, EXPERTS, TOP_K, rng)
        self.options: dict[str, Any] = {
            "x": make_x(TOKENS, SHAPE, dtype, device, rng),
            "weights": self.layer.weights(),
            "topk_weights": topk_weights.to(device),
            "topk_ids": topk_ids.to(device),
            "out": torch.full((TOKENS, HIDDEN), 7.0, dtype=dtype, device=device),
            "workspace": make_workspace(oxmoe.workspace_bytes(self.layer.weights(), TOKENS, TOP_K), device),
        }

    def refuse(self, error: type[Exception] | tuple[type[Exception], ...], message: str | None, **spoiled: Any) -> None:
        out, workspace = self.options["out"], self.options["workspace"]
        with pytest.raises(error, match=message):
            oxmoe.moe(**{**self.options, **spoiled})
        assert bool((out == 7.0).all()) and bool((workspace == 0xFF).all()), "something was written"


@pytest.fixture
def right(device: str, rng: torch.Generator) -> Call:
    return Call(device, rng)


def other_dtype(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int16)


def strided(tensor: Tensor) -> Tensor:
    """Returns equal values that are not contiguous."""
    wide = torch.stack([tensor, tensor], dim=-1)
    return wide[..., 0]


def test_right_call(right: Call) -> None:
    assert bool((oxmoe.moe(**right.options) != 7.0).any())


@pytest.mark.parametrize("name", ["x", "topk_weights", "topk_ids", "out", "workspace"])
def test_dtype(right: Call, name: str) -> None:
    spoiled = other_dtype(right.options[name])
    got = str(spoiled.dtype).removeprefix("torch.")
    right.refuse(ValueError, rf"^{name}: expected dtype .*got {got}", **{name: spoiled})


def test_x_has_the_weights_dtype(right: Call) -> None:
    right.refuse(ValueError, r"^x: expected dtype bfloat16, got float16", x=right.options["x"].half())


# (operand, how its shape is spoilt, dimension, expected, got)
SHAPES: tuple[tuple[str, Callable[[Tensor], Tensor], int, int, int], ...] = (
    ("x", lambda t: t[:, :-1].contiguous(), 1, HIDDEN, HIDDEN - 1),
    ("topk_weights", lambda t: t[:-1], 0, TOKENS, TOKENS - 1),
    ("topk_weights", lambda t: t[:, 1:].contiguous(), 1, TOP_K, TOP_K - 1),
    ("topk_ids", lambda t: torch.cat([t, t]), 0, TOKENS, 2 * TOKENS),
    ("out", lambda t: t[1:], 0, TOKENS, TOKENS - 1),
    ("out", lambda t: torch.cat([t, t], 1), 1, HIDDEN, 2 * HIDDEN),
)


@pytest.mark.parametrize("name,spoil,dimension,expected,got", SHAPES)
def test_shape(
    right: Call, name: str, spoil: Callable[[Tensor], Tensor], dimension: int, expected: int, got: int
) -> None:
    """The message names an operand of the mismatch, its dimension by number and name, and both sizes."""
    with pytest.raises(ValueError) as caught:
        oxmoe.moe(**{**right.options, name: spoil(right.options[name])})
    text = str(caught.value)
    operand = text.partition(":")[0]
    assert operand == name or (name in ("topk_weights", "topk_ids") and operand in ("topk_weights", "topk_ids"))
    assert f'dimension {dimension} "' in text and str(expected) in text and str(got) in text


@pytest.mark.parametrize("name", ["x", "topk_weights", "topk_ids", "out"])
def test_rank(right: Call, name: str) -> None:
    right.refuse(ValueError, rf"^{name}: expected 2 dimensions.*got shape", **{name: right.options[name][None]})


@pytest.mark.parametrize("name", ["x", "topk_weights", "topk_ids"])
def test_contiguity(right: Call, name: str) -> None:
    right.refuse(ValueError, rf"^{name}: .*contiguous", **{name: strided(right.options[name])})


def test_requires_grad(right: Call) -> None:
    right.refuse(ValueError, r"^x: requires grad", x=right.options["x"].clone().requires_grad_())
    with torch.no_grad():
        oxmoe.moe(**{**right.options, "x": right.options["x"].clone().requires_grad_()})


@pytest.mark.parametrize("name", ["x", "topk_weights", "topk_ids", "out"])
def test_tensors_without_data(right: Call, name: str) -> None:
    right.refuse(ValueError, rf"^{name}: ", **{name: right.options[name].to("meta")})
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(right.options[name])
    right.refuse(ValueError, rf"^{name}: ", **{name: fake})


@pytest.mark.parametrize("name", ["x", "topk_weights", "topk_ids", "out"])
def test_numpy_beside_torch(rng: torch.Generator, name: str) -> None:
    right = Call("cpu", rng, torch.float32)
    array = right.options[name].numpy()
    right.refuse(ValueError, r"numpy|torch", **{name: array})


@pytest.mark.parametrize("name", ["x", "topk_weights", "topk_ids", "out"])
@pytest.mark.parametrize("thing", [[[1.0]], 3, "x", object()], ids=lambda thing: type(thing).__name__)
def test_things_that_are_no_tensors(right: Call, name: str, thing: Any) -> None:
    right.refuse((ValueError, TypeError), name, **{name: thing})


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["x", "topk_weights", "topk_ids", "out", "workspace"])
def test_other_device(rng: torch.Generator, name: str) -> None:
    right = Call("cuda", rng)
    right.refuse(ValueError, rf"^{name}: is on cpu, but .* is on cuda:0", **{name: right.options[name].cpu()})


def test_negated_views(rng: torch.Generator) -> None:
    negated = torch.imag(torch.complex(torch.ones(TOKENS, HIDDEN), torch.ones(TOKENS, HIDDEN)).conj())
    assert negated.is_neg()
    right = Call("cpu", rng, torch.float32)
    right.refuse(ValueError, r"^x: .*neg", x=negated)


def test_workspace(right: Call) -> None:
    workspace = right.options["workspace"]
    if workspace.numel() == 0:
        pytest.skip("this backend needs no workspace")
    right.refuse(ValueError, rf"^workspace: .*{workspace.numel()}.*{workspace.numel() - 1}", workspace=workspace[:-1])
    shifted = make_workspace(workspace.numel() + 16, workspace.device)[16:]
    right.refuse(ValueError, r"^workspace: .*align", workspace=shifted)
    right.refuse(ValueError, r"^workspace: ", workspace=workspace[None])


def test_overlaps(right: Call) -> None:
    """out may be x itself. No other operand may share memory with an output."""
    x = right.options["x"]
    both = torch.cat([x, x])
    right.refuse(ValueError, r"^out: .*overlap", x=both[:TOKENS], out=both[2 : TOKENS + 2])
    inside = right.layer.w2.view(-1)[: TOKENS * HIDDEN].view(TOKENS, HIDDEN)
    before = right.layer.w2.clone()
    right.refuse(ValueError, r"overlap", out=inside)
    assert torch.equal(right.layer.w2, before)
    size = right.options["workspace"].numel()
    if size:
        experts = torch.zeros(256 + max(size, right.layer.w2.nbytes), dtype=torch.uint8, device=x.device)
        start = -experts.data_ptr() % 256
        w2 = experts[start : start + right.layer.w2.nbytes].view(right.layer.w2.dtype).view(right.layer.w2.shape)
        inside = dataclasses.replace(right.layer, w2=w2).weights()
        right.refuse(ValueError, r"^workspace: overlaps w2", weights=inside, workspace=experts[start : start + size])
        start = max(size - 256, 0) // 256 * 256
        room = make_workspace(size + x.numel() * x.element_size(), x.device)
        x_inside = room[start:][: x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        right.refuse(ValueError, r"overlap", x=x_inside, workspace=room[:size])


def test_an_output_over_x_is_x(right: Call) -> None:
    """A larger output that begins where x does is not x itself: a GPU writes rows of it before it has read all of x."""
    x = right.options["x"]
    slots = torch.zeros((TOKENS, TOP_K, HIDDEN), dtype=x.dtype, device=x.device)
    inside = slots.view(-1, HIDDEN)[:TOKENS]
    inside.copy_(x)
    workspace = None
    right.refuse(
        ValueError,
        r"^out: overlaps x without being the same",
        x=inside,
        out=slots,
        no_combine=True,
        workspace=workspace,
    )
    assert torch.equal(inside, x)


def test_routing_is_given_once(right: Call, device: str) -> None:
    logits = torch.zeros((TOKENS, EXPERTS), device=device)
    right.refuse(ValueError, r"router_logits", router_logits=logits, top_k=TOP_K)
    right.refuse(ValueError, r"router_logits", topk_weights=None, topk_ids=None)
    right.refuse(ValueError, r"topk_weights", topk_weights=None)
    logits_only = {"topk_weights": None, "topk_ids": None, "router_logits": logits}
    right.refuse(ValueError, r"^top_k: ", **logits_only)
    right.refuse(ValueError, rf"^top_k: .*{EXPERTS}.*{EXPERTS + 1}", **logits_only, top_k=EXPERTS + 1, workspace=None)
    wide = torch.zeros((TOKENS, EXPERTS + 2), device=device)
    right.refuse(
        ValueError,
        rf"^router_logits: .*{EXPERTS}.*{EXPERTS + 2}",
        **{**logits_only, "router_logits": wide},
        top_k=TOP_K,
    )


def test_expert_parallel_ranks(right: Call) -> None:
    right.refuse(ValueError, r"ep_rank", ep_size=2, ep_rank=2)
    right.refuse(ValueError, r"ep_rank", ep_size=2, ep_rank=-1)
    right.refuse(ValueError, r"ep_size", ep_size=0)


def test_weights(device: str, rng: torch.Generator) -> None:
    layer = make_layer(SHAPE, torch.bfloat16, device, rng)
    w13, w2, b13, b2 = layer.w13, layer.w2, layer.b13, layer.b2
    assert b13 is not None and b2 is not None
    make = oxmoe.ExpertWeights.bf16

    def refuse(
        error: type[Exception] | tuple[type[Exception], ...], message: str | None, *operands: Tensor, **options: Any
    ) -> None:
        with pytest.raises(error, match=message):
            make(*operands, **options)

    refuse(ValueError, r"^w13: expected dtype bfloat16, got float16", w13.half(), w2)
    refuse(ValueError, r"^w2: expected dtype bfloat16, got float32", w13, w2.float())
    refuse(ValueError, rf'^w(13|2): dimension 0 ".*{EXPERTS}', w13[1:], w2)
    refuse(ValueError, rf'^w(13|2): dimension . ".*{HIDDEN}', w13[:, :, 1:].contiguous(), w2)
    refuse(ValueError, rf'^w(13|2): dimension . ".*({INTERMEDIATE}|{2 * INTERMEDIATE})', w13[:, 2:].contiguous(), w2)
    refuse(ValueError, rf'^w(13|2): dimension . ".*{INTERMEDIATE}', w13, w2, gated=False)
    refuse(ValueError, r"^w13: expected 3 dimensions", w13[0], w2)
    refuse(ValueError, r"^w13: .*contiguous", w13.transpose(1, 2).contiguous().transpose(1, 2), w2)
    refuse(ValueError, rf'^b13: dimension 1 ".*{2 * INTERMEDIATE}', w13, w2, b13=b13[:, 1:].contiguous())
    refuse(ValueError, rf'^b2: dimension 1 ".*{HIDDEN}', w13, w2, b2=b2[:, 1:].contiguous())
    refuse(ValueError, r"^b13: expected dtype .*got float16", w13, w2, b13=b13.half())
    refuse(ValueError, r'layout.*"gate_up".*"sideways"', w13, w2, layout="sideways")
    refuse(ValueError, r'activation.*"silu".*"tanh"', w13, w2, activation="tanh")
    refuse(ValueError, r'clamp.*"before".*"never"', w13, w2, clamp="never")
    refuse((ValueError, NotImplementedError), r"relu2", w13, w2, activation="relu2", gated=True)
    for option in ({"alpha": 2.0}, {"beta": 1.0}, {"limit": 7.0}):
        refuse(ValueError, r"silu", w13, w2, activation="gelu", **option)
    refuse(TypeError, None, w13, w2, unknown=1)


@pytest.mark.gpu
def test_fp32_is_for_the_cpu(rng: torch.Generator) -> None:
    layer = make_layer(SHAPE, torch.float32, "cuda", rng)
    with pytest.raises(NotImplementedError, match=r"(?i)f32|float32"):
        layer.weights()


def test_topk(device: str) -> None:
    logits = torch.zeros((4, 16), device=device)
    weights = torch.full((4, 2), 7.0, device=device)
    ids = torch.full((4, 2), 7, dtype=torch.int32, device=device)

    def refuse(
        error: type[Exception] | tuple[type[Exception], ...], message: str | None, *operands: Any, **options: Any
    ) -> None:
        with pytest.raises(error, match=message):
            oxmoe.topk(*operands, topk_weights=weights, topk_ids=ids, **options)
        assert bool((weights == 7).all()) and bool((ids == 7).all()), "something was written"

    refuse(ValueError, r"^router_logits: expected dtype .*got int32", logits.int(), 2)
    refuse(ValueError, r"^router_logits: expected 2 dimensions", logits[0], 2)
    refuse(ValueError, r"^router_logits: .*contiguous", logits.T.contiguous().T, 2)
    refuse(ValueError, r"^top_k: .*0", logits, 0)
    refuse(ValueError, r"^top_k: .*16.*17", logits, 17)
    refuse(ValueError, r'scoring_func.*"softmax".*"soft"', logits, 2, scoring_func="soft")
    refuse(
        ValueError,
        r'^correction_bias: dimension 0 ".*16.*15',
        logits,
        2,
        correction_bias=torch.zeros(15, device=device),
    )
    refuse(ValueError, r"^num_expert_group: .*16.*5", logits, 2, num_expert_group=5, topk_group=1)
    refuse(ValueError, r"^topk_group: .*4.*5", logits, 2, num_expert_group=4, topk_group=5)
    refuse(ValueError, r"^topk_group: ", logits, 2, num_expert_group=4, topk_group=0)
    refuse(ValueError, r"^top_k: ", logits, 2, num_expert_group=16, topk_group=1)
    refuse(ValueError, r'group_score.*"mean"', logits, 2, num_expert_group=4, topk_group=1, group_score="mean")
    refuse(ValueError, r"^num_expert_group: .*-4", logits, 2, num_expert_group=-4)
    refuse(ValueError, r"^topk_group: .*without num_expert_group", logits, 2, topk_group=2)
    refuse(ValueError, r"^topk_group: expected 1 to 1", logits, 2, num_expert_group=1, topk_group=0)
    refuse(ValueError, r'^group_score: expected .*"mean"', logits, 2, group_score="mean")
    refuse(ValueError, r"^group_score: needs num_expert_group", logits, 2, group_score="max")
    for factor in (0.0, -1.0, math.inf, math.nan, 1e300, 1e-45):
        for shared in (0, 1):
            refuse(
                ValueError,
                r"^routed_scaling_factor: ",
                logits,
                2,
                num_fused_shared_experts=shared,
                routed_scaling_factor=factor,
            )
    refuse(ValueError, r"^top_k: ", logits, 2, num_fused_shared_experts=2)
    refuse(ValueError, r"^top_k: ", logits, 2, num_fused_shared_experts=-(2**63))
    refuse(
        ValueError,
        r"^num_token_non_padded: expected dtype int32",
        logits,
        2,
        num_token_non_padded=torch.tensor(1.0, device=device),
    )
    with pytest.raises(ValueError, match=r'^topk_weights: dimension 1 ".*3.*2'):
        oxmoe.topk(logits, 3, topk_weights=weights)
    with pytest.raises(ValueError, match=r"^topk_ids: expected dtype int32, got int64"):
        oxmoe.topk(logits, 2, topk_ids=ids.long())
    wide = torch.zeros((1, 1025), device=device)
    with pytest.raises(NotImplementedError, match=r"^router_logits: 1025 experts; supported: 1 to 1024$"):
        oxmoe.topk(wide, 2)
    with pytest.raises(NotImplementedError, match=r"32"):
        oxmoe.topk(wide[:, :1024].contiguous(), 33)


def test_more_tokens_than_kernels_count() -> None:
    """Nothing reads the memory: the sizes alone are refused."""
    try:
        logits = torch.empty((2**31, 1), dtype=torch.bfloat16)
        ids = torch.empty((2**30, 1), dtype=torch.int32)
        weights = torch.empty((2**30, 1))
    except RuntimeError:
        pytest.skip("no room for 12 GB of addresses")
    with pytest.raises(NotImplementedError, match=r"^router_logits: 2147483648 tokens"):
        oxmoe.topk(logits, 1)
    with pytest.raises(ValueError, match=r"^topk_ids: .*fewer than 2\^30 slots"):
        oxmoe.sort_by_expert(ids, 4)
    with pytest.raises(ValueError, match=r"^topk_ids: .*fewer than 2\^30 slots"):
        routing_tables(weights, ids, 4)


def test_sort_and_routing(device: str) -> None:
    ids = torch.zeros((4, 2), dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"^topk_ids: expected dtype .*got float32"):
        oxmoe.sort_by_expert(ids.float(), 4)
    with pytest.raises(ValueError, match=r"^topk_ids: expected 2 dimensions"):
        oxmoe.sort_by_expert(ids[0], 4)
    with pytest.raises(ValueError, match=r"^num_experts: "):
        oxmoe.sort_by_expert(ids, 0)
    with pytest.raises(ValueError, match=r"^num_experts: expected 1 to 1024 .*got 1025"):
        oxmoe.sort_by_expert(ids, 1025)
    with pytest.raises(ValueError, match=r"^num_experts: expected 1 to 512 .*got 513"):
        routing_tables(torch.zeros((4, 2), device=device), ids, 513)
    logits = torch.zeros((4, 16), device=device)
    with pytest.raises(ValueError, match=r"^simulated_ep: .*16.*3"):
        oxmoe.routing(logits, 2, simulated_ep=3)
    with pytest.raises(ValueError, match=r"^n_expts_act: .*16.*17"):
        oxmoe.routing(logits, 17)
    with pytest.raises(ValueError, match=r'^expt_indx: dimension 1 ".*2.*3'):
        oxmoe.routing(logits, 2, expt_indx=torch.zeros((4, 3), dtype=torch.int32, device=device))


def test_numpy_keeps_the_same_contract() -> None:
    w13, w2 = np.zeros((2, 8, 4), np.float32), np.zeros((2, 4, 4), np.float32)
    weights = oxmoe.ExpertWeights.f32(w13, w2)
    ids, gates = np.zeros((3, 1), np.int32), np.ones((3, 1), np.float32)
    with pytest.raises(ValueError, match=r'^x: dimension 1 ".*4.*5'):
        oxmoe.moe(np.zeros((3, 5), np.float32), weights, gates, ids)
    with pytest.raises(ValueError, match=r"^x: expected dtype float32, got float16"):
        oxmoe.moe(np.zeros((3, 4), np.float16), weights, gates, ids)
    with pytest.raises(ValueError, match=r"^x: is not contiguous .*; pass x\.copy\(\)$"):
        oxmoe.moe(np.zeros((4, 3), np.float32).T, weights, gates, ids)
    unaligned = np.zeros(3 * 4 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(3, 4)
    with pytest.raises(ValueError, match=r"^x: must be aligned to 4 bytes, .*; pass x\.copy\(\)$"):
        oxmoe.moe(unaligned, weights, gates, ids)


@pytest.mark.parametrize("name", [name for name in oxmoe.__all__ if callable(getattr(oxmoe, name))])
def test_every_callable_has_a_signature(name: str) -> None:
    """SGLang probes callables with inspect.signature: one without a signature breaks its import."""
    function = getattr(oxmoe, name)
    if inspect.isclass(function):
        for method in ("bf16", "f16", "f32", "mxfp4") if name == "ExpertWeights" else ():
            assert {"w13", "w2"} <= set(inspect.signature(getattr(function, method)).parameters)
    else:
        parameters = inspect.signature(function).parameters.values()
        assert not [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def test_keyword_arguments_are_exact(right: Call) -> None:
    right.refuse(TypeError, None, renormalise=True)
    with pytest.raises(TypeError):
        oxmoe.moe(right.options["x"])
