"""MoE layers of SGLang are counted when they run on oxmoe, and one that runs without it is an error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

import oxmoe
from oxmoe.sglang import calls, layers, setting
from oxmoe.sglang import server as oxmoe_server

pytest.importorskip("sglang")

from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import get_quantization_config

from sglang_server import (
    ADAPTER,
    SHAPE,
    VERSION,
    FusedMoE,
    argument,
    fused_moe,
    installed,
    only_cores,
    operands,
    server,
)


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    installed()
    monkeypatch.setenv(setting.SETTING, "moe")
    layers.watch(setting.read(VERSION), ADAPTER, lambda: None)
    with server(), caplog.at_level(logging.INFO, logger="oxmoe.sglang"):
        yield
    layers.unwatch()


def model(count: int, rng: torch.Generator, **options: Any) -> nn.ModuleList:
    """Returns layers of a model, each with its number."""
    return nn.ModuleList(
        fused_moe(operands(SHAPE, 1, "cpu", rng)[0], layer_id=number, **options) for number in range(count)
    )


def run(module: FusedMoE | nn.Module, rng: torch.Generator) -> None:
    _, x, weights, ids = operands(SHAPE, 5, "cpu", rng)
    assert module(x, StandardTopKOutput(weights, ids, None)).shape == x.shape


def test_layers_are_counted_once(rng: torch.Generator, caplog: pytest.LogCaptureFixture) -> None:
    built = model(3, rng)
    (start,) = caplog.messages
    assert f"in SGLang {VERSION}: MoE layers run on oxmoe through --quantization oxmoe (Oxmoe" in start
    for _ in range(5):
        for layer in built:
            run(layer, rng)
    assert caplog.messages[1:] == ["oxmoe: 3 of 3 MoE layers ran on oxmoe"]
    assert not any(layer._forward_hooks for layer in built)


def test_layers_before_the_watch_do_not_count(rng: torch.Generator, caplog: pytest.LogCaptureFixture) -> None:
    """A layer that was checked before the watch, and is still alive, belongs to no server."""
    layers.unwatch()
    alone = fused_moe(operands(SHAPE, 1, "cpu", rng)[0])
    layers.check_layer(alone)
    layers.watch(setting.read(VERSION), ADAPTER, lambda: None)
    for layer in model(2, rng):
        run(layer, rng)
    assert caplog.messages[1:] == ["oxmoe: 2 of 2 MoE layers ran on oxmoe"]
    run(alone, rng)
    assert len(caplog.messages) == 2


def test_a_layer_that_never_runs_is_named(rng: torch.Generator, caplog: pytest.LogCaptureFixture) -> None:
    """A draft's layers run later than the model's."""
    built = model(3, rng)
    for _ in range(calls.PASSES + 2):
        run(built[0], rng)
        run(built[1], rng)
    (line,) = caplog.messages[1:]
    assert line.startswith("oxmoe: 2 of 3 MoE layers ran on oxmoe so far; not yet: layer 2 (FusedMoE, Oxmoe")
    run(built[2], rng)
    assert caplog.messages[2:] == ["oxmoe: 3 of 3 MoE layers ran on oxmoe"]


def test_a_second_model_is_counted_with_the_first(rng: torch.Generator, caplog: pytest.LogCaptureFixture) -> None:
    first = model(2, rng)
    for layer in first:
        run(layer, rng)
    draft = model(1, rng)
    run(draft[0], rng)
    assert caplog.messages[1:] == [f"oxmoe: {count} of {count} MoE layers ran on oxmoe" for count in (2, 3)]


def test_layers_outlive_the_watch(rng: torch.Generator) -> None:
    (layer,) = model(1, rng)
    layers.unwatch()
    run(layer, rng)


def test_other_ranks_say_nothing(
    rng: torch.Generator, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_leads", lambda: False)
    layer = fused_moe(operands(SHAPE, 1, "cpu", rng)[0])
    monkeypatch.setattr(layer, "moe_tp_rank", 1)
    run(nn.ModuleList([layer])[0], rng)
    assert caplog.messages == []


def test_a_layer_that_runs_on_something_else_is_an_error(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer's method is oxmoe's, and SGLang does not ask it."""
    (layer,) = model(1, rng)
    monkeypatch.setattr(layer.quant_method, "apply", lambda layer, dispatch_output: dispatch_output)
    monkeypatch.setattr(layer.dispatcher, "combine", lambda combine_input, **_: combine_input.hidden_states)
    with pytest.raises(RuntimeError, match=r"layer 0 \(FusedMoE, Oxmoe.*\) ran without oxmoe: SGLang took a path of"):
        run(layer, rng)


def test_a_rank_without_tokens_is_no_error(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Muse Spark's experts for CPUs return zeros without a call if no token has an expert of this rank."""
    try:
        from sglang.srt.layers.muse_spark.muse_spark_int4_moe import MuseSpark1xInt4Experts as Experts
    except ImportError:
        pytest.skip("this SGLang has no such experts")

    layer, x, weights, ids = operands(SHAPE, 5, "cpu", rng)
    # The class takes its dtype from there, as SGLang sets it while it builds a model.
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.bfloat16)
    experts = Experts(
        num_experts=SHAPE.experts,
        expert_hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.intermediate,
        top_k=SHAPE.top_k,
        layer_id=0,
        quant_config=get_quantization_config("oxmoe")(),
        prefix="experts",
    )
    with torch.no_grad():
        experts.w13_weight.copy_(layer.w13)
        experts.w2_weight.copy_(layer.w2)
    experts.quant_method.process_weights_after_loading(experts)
    (built,) = nn.ModuleList([experts])
    elsewhere = torch.full_like(ids, -1)
    for _ in range(2):
        assert not bool(built(x, weights, elsewhere).any())
        assert caplog.messages[1:] == []
    with monkeypatch.context() as patch:
        # The layer is still watched.
        patch.setattr(experts, "run_moe_core", lambda dispatched: dispatched)
        with pytest.raises(RuntimeError, match="ran without oxmoe"):
            built(x, weights, ids)
    expected = oxmoe.moe(x, layer.weights(), weights, ids)
    torch.testing.assert_close(built(x, weights, ids), expected, rtol=0.02, atol=0.02)
    assert caplog.messages[1:] == ["oxmoe: 1 of 1 MoE layers ran on oxmoe"]
    assert not built._forward_hooks


def test_layers_of_sglangs_own_methods(rng: torch.Generator, caplog: pytest.LogCaptureFixture) -> None:
    """On a CPU SGLang's method for 16-bit layers takes torch's functions, not its runner, as it does when compiled."""
    with server("deep_gemm"):
        (layer,) = model(1, rng, quantized=False)
        (start,) = caplog.messages
        assert "MoE layers run on oxmoe through --moe-runner-backend deep_gemm (UnquantizedFusedMoEMethod)" in start
        with pytest.raises(RuntimeError, match="ran without oxmoe"):
            run(layer, rng)


def test_torch_compile_with_sglangs_own_method_stops_the_load(rng: torch.Generator) -> None:
    with ExitStack() as stack:
        stack.enter_context(server("deep_gemm"))
        stack.enter_context(argument("exec.graph", "enable_torch_compile", True))
        assert oxmoe_server.compiles()
        with pytest.raises(RuntimeError, match=r"with --enable-torch-compile SGLang runs a single token .*oxmoe"):
            model(1, rng, quantized=False)
        model(1, rng)
    assert not oxmoe_server.compiles()


@pytest.mark.parametrize("backend", ["auto", pytest.param("deep_gemm", marks=only_cores)])
def test_an_activation_without_kernels_is_refused_while_the_model_is_built(backend: str) -> None:
    """The error comes before a checkpoint is read. In releases without cores SGLang's own runner asserts before."""
    config = get_quantization_config("oxmoe")() if backend == "auto" else None
    with server(backend), pytest.raises(NotImplementedError, match='activation: no kernel for "silu_rounded"'):
        nn.ModuleList([FusedMoE(4, 128, 128, 0, 2, activation="silu_rounded", quant_config=config)])


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_methods_refuse_an_activation_without_a_watch(kind: str) -> None:
    layers.unwatch()
    config = get_quantization_config("oxmoe")
    made = config() if kind == "bf16" else config.from_config({"quant_method": "fp8", "activation_scheme": "dynamic"})
    with pytest.raises(NotImplementedError, match='activation: no kernel for "relu"'):
        FusedMoE(4, 128, 128, 0, 2, params_dtype=torch.bfloat16, activation="relu", quant_config=made)


def test_a_bf16_checkpoint_that_sglang_would_quantise_is_told_of_oxmoe() -> None:
    config = get_quantization_config("fp8")()
    module = FusedMoE(4, 128, 128, 0, 2, params_dtype=torch.bfloat16, quant_config=config)
    with pytest.raises(RuntimeError, match="start a bf16 checkpoint with --quantization oxmoe"):
        nn.ModuleList([module])
