"""fused_experts: SGLang's call, its configuration fields of both releases, its in-place habits and its refusals."""

from __future__ import annotations

import inspect
from collections import namedtuple
from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Layer, Shape, make_layer, make_routing, make_x
from oxmoe import reference
from oxmoe.testing import assert_close_ulp, same_bits

Place = tuple[str, torch.dtype]
TopKOutput = namedtuple("TopKOutput", ["topk_weights", "topk_ids", "router_logits"])
PackedTopKOutput = namedtuple("PackedTopKOutput", ["topk_weights", "topk_ids", "router_logits", "packed_topk_ids"])


@dataclass
class Config12:
    """MoeRunnerConfig of 0.5.12.post1."""

    num_experts: int | None = None
    num_local_experts: int | None = None
    hidden_size: int | None = None
    intermediate_size_per_partition: int | None = None
    layer_id: int | None = None
    top_k: int | None = None
    num_fused_shared_experts: int | None = None
    params_dtype: torch.dtype | None = None
    routing_method_type: Any = None
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    inplace: bool = True
    no_combine: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None


@dataclass
class Config23(Config12):
    """MoeRunnerConfig of 0.5.23: the fields that it adds."""

    no_combine_keep_router_weight: bool = False
    gemm1_beta: float | None = None
    gate_up_interleaved: bool = True
    layer: Any = None


CONFIGS = pytest.mark.parametrize("config_type", [Config12, Config23], ids=["0.5.12", "0.5.23"])


def operands(
    place: Place, rng: torch.Generator, tokens: int = 11, bias: bool = False, gated: bool = True
) -> tuple[Layer, Tensor, TopKOutput]:
    device, dtype = place
    shape = Shape("fe", 6, 3, 96, 64, bias=bias).with_options(gated=gated)
    topk_weights, topk_ids = make_routing("holes", tokens, shape.experts, shape.top_k, rng)
    layer, x = make_layer(shape, dtype, device, rng), make_x(tokens, shape, dtype, device, rng)
    return layer, x, TopKOutput(topk_weights.to(device), topk_ids.to(device), None)


def call(layer: Layer, x: Tensor, topk_output: Any, config: Any, **options: Any) -> Tensor:
    return oxmoe.fused_experts(x, layer.w13, layer.w2, topk_output, config, b1=layer.b13, b2=layer.b2, **options)


def expect(layer: Layer, x: Tensor, topk_output: Any, **options: Any) -> Tensor:
    return reference.moe(x, layer.w13, layer.w2, *topk_output[:2], b13=layer.b13, b2=layer.b2, **options)


def test_signature_is_sglangs() -> None:
    """Both releases call positionally up to block_shape; 0.5.23 adds the last two."""
    names = (
        "hidden_states w1 w2 topk_output moe_runner_config b1 b2 use_fp8_w8a8 use_int8_w8a8 use_int8_w8a16 "
        "use_int4_w4a16 per_channel_quant w1_scale w2_scale w1_zp w2_zp a1_scale a2_scale block_shape a1_q "
        "fuse_swiglu_interleaved"
    )
    parameters = inspect.signature(oxmoe.fused_experts).parameters
    assert list(parameters) == names.split()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())
    assert all(p.default in (None, False) for p in list(parameters.values())[5:])


@CONFIGS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_in_place(place: Place, config_type: type, bias: bool, tokens: int, rng: torch.Generator) -> None:
    layer, x, topk_output = operands(place, rng, tokens, bias)
    expected = expect(layer, x, topk_output)
    assert call(layer, x, topk_output, config_type()) is x
    assert_close_ulp(x, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_topk_weights_of_other_dtypes(place: Place, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Weights of Llama-4 and PhiMoE have the dtype of their router."""
    layer, x, topk_output = operands(place, rng)
    given = topk_output._replace(topk_weights=topk_output.topk_weights.to(dtype))
    rounded = topk_output._replace(topk_weights=given.topk_weights.float())
    result = call(layer, x, given, Config23(inplace=False))
    assert same_bits(result, call(layer, x, rounded, Config23(inplace=False)))
    assert given.topk_weights.dtype == dtype
    with pytest.raises(ValueError, match=r"topk_weights: .* got int32"):
        call(layer, x, topk_output._replace(topk_weights=topk_output.topk_ids.int()), Config23(inplace=False))


@CONFIGS
def test_out_of_place(place: Place, config_type: type, rng: torch.Generator) -> None:
    layer, x, topk_output = operands(place, rng)
    before = x.clone()
    result = call(layer, x, topk_output, config_type(inplace=False, routed_scaling_factor=2.5))
    assert result is not x and same_bits(x, before)
    assert_close_ulp(result, expect(layer, x, topk_output, routed_scaling_factor=2.5))
    packed = PackedTopKOutput(*topk_output, None)
    assert same_bits(call(layer, x, packed, config_type(inplace=False, routed_scaling_factor=2.5)), result)


@CONFIGS
@pytest.mark.parametrize(
    "numbers", [{}, {"gemm1_alpha": 1.5}, {"gemm1_alpha": 4.0, "gemm1_clamp_limit": 25.0}], ids=str
)
def test_situ(place: Place, config_type: type, numbers: dict[str, float], rng: torch.Generator) -> None:
    """SGLang has Kimi-K3's two numbers in gemm1_alpha, by default 4, and gemm1_clamp_limit; rows are halves."""
    layer, x, topk_output = operands(place, rng, 40)
    expected = expect(
        layer, x, topk_output, activation="situ", situ_beta=numbers.get("gemm1_alpha", 4.0),
        situ_linear_beta=numbers.get("gemm1_clamp_limit"),
    )  # fmt: skip
    assert_close_ulp(call(layer, x, topk_output, config_type(inplace=False, activation="situ", **numbers)), expected)


@pytest.mark.parametrize("local_experts", [6, 12])
def test_filtered_experts_need_nothing(place: Place, local_experts: int, rng: torch.Generator) -> None:
    """SGLang's filter_expert (more experts in the model than held) is only about -1 ids, which are always skipped."""
    layer, x, topk_output = operands(place, rng)
    result = call(layer, x, topk_output, Config23(inplace=False, num_experts=12, num_local_experts=local_experts))
    assert_close_ulp(result, expect(layer, x, topk_output))


@CONFIGS
@pytest.mark.parametrize(
    "config,options",
    [
        ({"activation": "gelu"}, {"activation": "gelu"}),
        (
            {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0},
            {"alpha": 1.702, "beta": 1.0, "limit": 7.0, "layout": "interleaved"},
        ),
        (
            # Half of the sums exceed this limit; none exceeds 7.0.
            {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 0.3},
            {"alpha": 1.702, "beta": 1.0, "limit": 0.3, "layout": "interleaved"},
        ),
        ({"gemm1_clamp_limit": 0.3}, {"limit": 0.3, "clamp": "after"}),
        ({"swiglu_limit": 0.4}, {"limit": 0.4, "clamp": "before"}),
        ({"gemm1_clamp_limit": 0.3, "swiglu_limit": 0.4}, {"limit": 0.3, "clamp": "after"}),
        ({"apply_router_weight_on_input": True}, {"apply_router_weight_on_input": True}),
    ],
    ids=str,
)
def test_activations(
    place: Place, config_type: type, config: dict[str, Any], options: dict[str, Any], rng: torch.Generator
) -> None:
    layer, x, topk_output = operands(place, rng, bias=True)
    result = call(layer, x, topk_output, config_type(inplace=False, **config))
    assert_close_ulp(result, expect(layer, x, topk_output, **options))


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu2"])
def test_not_gated(place: Place, activation: str, rng: torch.Generator) -> None:
    layer, x, topk_output = operands(place, rng, bias=True, gated=False)
    result = call(layer, x, topk_output, Config12(inplace=False, activation=activation, is_gated=False))
    assert_close_ulp(result, expect(layer, x, topk_output, activation=activation, gated=False))


def test_gpt_oss_in_halves(place: Place, rng: torch.Generator) -> None:
    layer, x, topk_output = operands(place, rng, bias=True)
    config = Config23(inplace=False, gemm1_alpha=1.702, gemm1_clamp_limit=7.0, gate_up_interleaved=False)
    assert_close_ulp(
        call(layer, x, topk_output, config), expect(layer, x, topk_output, alpha=1.702, beta=1.0, limit=7.0)
    )
    # Without gemm1_alpha gate_up_interleaved says nothing about the rows.
    plain = call(layer, x, topk_output, Config23(inplace=False, gate_up_interleaved=True))
    assert_close_ulp(plain, expect(layer, x, topk_output))


def test_beta_of_the_newer_release(place: Place, rng: torch.Generator) -> None:
    layer, x, topk_output = operands(place, rng, bias=True)
    result = call(layer, x, topk_output, Config23(inplace=False, gemm1_alpha=0.9, gemm1_beta=0.25))
    assert_close_ulp(result, expect(layer, x, topk_output, alpha=0.9, beta=0.25, layout="interleaved"))


def test_a_configuration_without_fields_has_the_defaults(rng: torch.Generator) -> None:
    """The defaults are silu, gated and in place, as SGLang's fields had it before they were fields."""
    layer, x, topk_output = operands(("cpu", torch.bfloat16), rng)
    expected = expect(layer, x, topk_output)
    assert call(layer, x, topk_output, SimpleNamespace()) is x
    assert_close_ulp(x, expected)
    order = torch.arange(128).view(2, 64).T.reshape(-1)
    again, moved = expected.clone(), layer.w13[:, order].contiguous()
    result = oxmoe.fused_experts(again, moved, layer.w2, topk_output, SimpleNamespace(), fuse_swiglu_interleaved=True)
    assert result is again and same_bits(again, call(layer, expected, topk_output, SimpleNamespace()))


@dataclass
class ConfigToCome(Config23):
    """A configuration with fields that no release has."""

    future_flag: bool = False
    future_scale: float = 1.5
    future_tensor: Any = None
    future_names: Any = field(default_factory=lambda: ("a", "b"))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, None),
        ({"future_scale": 3.0 / 2, "future_names": tuple("ab")}, None),
        ({"future_flag": True}, "future_flag, which is True here \\(by default False\\)"),
        ({"future_scale": 2.0}, "future_scale, which is 2.0 here \\(by default 1.5\\)"),
        ({"future_tensor": torch.zeros(1)}, "future_tensor, which is tensor"),
        ({"future_names": ("a",)}, "future_names"),
        ({"future_names": ["a", "b"]}, "future_names"),
    ],
    ids=["defaults", "equal", "flag", "number", "tensor", "shorter", "list"],
)
def test_fields_that_are_not_known(options: dict[str, Any], name: str | None, rng: torch.Generator) -> None:
    """Unknown fields may change what a layer computes, but not as long as they are at their defaults."""
    layer, x, topk_output = operands(("cpu", torch.bfloat16), rng)
    config = ConfigToCome(inplace=False, **options)
    if name is None:
        assert_close_ulp(call(layer, x, topk_output, config), expect(layer, x, topk_output))
        return
    with pytest.raises(NotImplementedError, match=f"moe_runner_config: oxmoe does not know the field {name}"):
        call(layer, x, topk_output, config)


@pytest.mark.parametrize("value", [None, False, True, 0, "x"], ids=str)
def test_a_required_field_that_is_not_known(value: Any, rng: torch.Generator) -> None:
    """None and False are read as "not used"."""
    kind = make_dataclass("Required", [("inplace", bool), ("future", Any)])
    layer, x, topk_output = operands(("cpu", torch.bfloat16), rng)
    if value is None or value is False:
        assert_close_ulp(call(layer, x, topk_output, kind(False, value)), expect(layer, x, topk_output))
        return
    with pytest.raises(NotImplementedError, match=r"the field future, which is .* here \(by default required\)"):
        call(layer, x, topk_output, kind(False, value))


def test_swiglu_clamp_order() -> None:
    """SGLang's literal test of the DeepSeek-V4 clamp: bounded before the SiLU, up on both sides."""
    eye = torch.eye(4)
    w13 = torch.cat([eye[:2], eye[2:]])[None].bfloat16()
    x = torch.tensor([[20.0, -20.0, 30.0, -30.0], [1.0, 2.0, 3.0, 4.0]]).bfloat16()
    w2 = eye[:, :2][None].contiguous().bfloat16()
    topk_output = TopKOutput(torch.ones(2, 1), torch.zeros((2, 1), dtype=torch.int32), None)
    result = oxmoe.fused_experts(x, w13, w2, topk_output, Config12(inplace=False, swiglu_limit=10))
    gate, up = torch.tensor([[10.0, -20.0], [1.0, 2.0]]), torch.tensor([[10.0, -10.0], [3.0, 4.0]])
    expected = torch.zeros(2, 4)
    expected[:, :2] = gate * torch.sigmoid(gate) * up
    assert torch.equal(result, expected.bfloat16())


def test_interleaved_swiglu_has_the_same_bits(device: str, rng: torch.Generator) -> None:
    layer, x, topk_output = operands((device, torch.bfloat16), rng)
    order = torch.arange(128).view(2, 64).T.reshape(-1)
    moved = layer.w13[:, order].contiguous()
    result = oxmoe.fused_experts(x, moved, layer.w2, topk_output, Config23(inplace=False), fuse_swiglu_interleaved=True)
    assert same_bits(result, call(layer, x, topk_output, Config23(inplace=False)))


@pytest.mark.parametrize("keep", [False, True])
def test_no_combine(place: Place, keep: bool, rng: torch.Generator) -> None:
    layer, x, topk_output = operands(place, rng, bias=True)
    config = Config23(inplace=False, no_combine=True, no_combine_keep_router_weight=keep, routed_scaling_factor=3.0)
    result = call(layer, x, topk_output, config)
    assert result.shape == (11, 3, 96)
    assert_close_ulp(result, expect(layer, x, topk_output, no_combine=True, keep_router_weight=keep))


@pytest.mark.parametrize("name", ["use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"])
def test_quantised_flags_are_refused(name: str, rng: torch.Generator) -> None:
    layer, x, topk_output = operands(("cpu", torch.bfloat16), rng)
    before = x.clone()
    with pytest.raises(NotImplementedError, match=rf"{name}.*serves.*bfloat16"):
        call(layer, x, topk_output, Config23(), **{name: True})
    assert same_bits(x, before)


@pytest.mark.parametrize(
    "name", ["w1_scale", "w2_scale", "w1_zp", "w2_zp", "a1_scale", "a2_scale", "a1_q", "block_shape"]
)
def test_quantised_operands_are_refused(name: str, rng: torch.Generator) -> None:
    layer, x, topk_output = operands(("cpu", torch.bfloat16), rng)
    given = [128, 128] if name == "block_shape" else torch.ones(1)
    with pytest.raises(NotImplementedError, match=rf"{name}.*serves"):
        call(layer, x, topk_output, Config23(), **{name: given})


@dataclass
class Later(Config23):
    """The configuration of a later release, with fields that may change results."""

    layers: tuple[int, ...] = ()
    silu_mul_keep_fp32: bool = False
    scale: float = 1.0


@pytest.mark.parametrize(("name", "value"), [("silu_mul_keep_fp32", True), ("scale", 2.0), ("layers", (3,))])
def test_fields_of_a_configuration_that_are_not_known(name: str, value: Any, rng: torch.Generator) -> None:
    layer, x, topk_output = operands(("cpu", torch.bfloat16), rng)
    before = x.clone()
    with pytest.raises(NotImplementedError, match=f"moe_runner_config: oxmoe does not know the field {name}, which is"):
        call(layer, x, topk_output, Later(**{name: value}))
    assert same_bits(x, before)
    result = call(layer, x, topk_output, Later(inplace=False))
    assert same_bits(result, call(layer, x, topk_output, Config23(inplace=False)))


def test_other_refusals(rng: torch.Generator) -> None:
    layer, x, topk_output = operands(("cpu", torch.bfloat16), rng)
    before = x.clone()
    with pytest.raises(ValueError, match="w1: expected dtype float8_e4m3fn with use_fp8_w8a8, got bfloat16"):
        call(layer, x, topk_output, Config23(), use_fp8_w8a8=True)
    with pytest.raises(NotImplementedError, match=r'"relu"; served are "silu", "gelu", "gelu_tanh", "relu2", "situ"$'):
        call(layer, x, topk_output, Config23(activation="relu"))
    with pytest.raises(ValueError, match='"situ" takes no gemm1_beta, swiglu_limit and fuse_swiglu_interleaved'):
        call(layer, x, topk_output, Config23(activation="situ", swiglu_limit=1.0))
    with pytest.raises(ValueError, match=r"inplace and no_combine"):
        call(layer, x, topk_output, Config23(no_combine=True))
    with pytest.raises(ValueError, match=r'gemm1_alpha.*need gated "silu", got "gelu", gated$'):
        call(layer, x, topk_output, Config23(activation="gelu", gemm1_alpha=1.0))
    with pytest.raises(ValueError, match=r'gemm1_alpha.*need gated "silu", got "silu", not gated$'):
        call(layer, x, topk_output, Config23(is_gated=False, swiglu_limit=1.0))
    for options in ({"gemm1_clamp_limit": 1.0}, {"activation": "gelu"}, {"is_gated": False}):
        with pytest.raises(ValueError, match=r"fuse_swiglu_interleaved: needs plain gated silu"):
            call(layer, x, topk_output, Config23(**options), fuse_swiglu_interleaved=True)
    with pytest.raises(ValueError, match=r"fuse_swiglu_interleaved.*apply_router_weight_on_input"):
        call(layer, x, topk_output, Config23(apply_router_weight_on_input=True), fuse_swiglu_interleaved=True)
    with pytest.raises(NotImplementedError, match=r"float8.*serves"):
        oxmoe.fused_experts(x, layer.w13.to(torch.float8_e4m3fn), layer.w2, topk_output, Config23())
    assert same_bits(x, before)
