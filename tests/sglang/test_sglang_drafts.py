"""Layers of drafts of speculative decoding: models give some of them no quantization, so SGLang's flag chooses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

import oxmoe
from oxmoe.sglang import layers, setting
from oxmoe.sglang import server as oxmoe_server
from oxmoe.testing import same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.moe import utils
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import MoeRunnerBackend, speculative_moe_backend_context

from sglang_server import ADAPTER, SHAPE, VERSION, argument, fused_moe, installed, operands, server


@contextmanager
def speculating(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sets up a server with --quantization oxmoe and --speculative-algorithm, while it builds its draft."""
    monkeypatch.setenv(setting.SETTING, "moe")
    layers.watch(setting.read(VERSION), ADAPTER, lambda: None)
    with ExitStack() as stack:
        stack.callback(layers.unwatch)
        stack.enter_context(server())
        stack.enter_context(argument("spec", "speculative_algorithm", "EAGLE"))
        if hasattr(utils, "SPECULATIVE_MOE_RUNNER_BACKEND"):
            monkeypatch.setattr(utils, "SPECULATIVE_MOE_RUNNER_BACKEND", MoeRunnerBackend(backend))
        else:
            from sglang.srt.runtime_context import get_flags

            flags: Any = get_flags().moe.override(speculative_runner_backend=MoeRunnerBackend(backend))
            stack.enter_context(flags)
        stack.enter_context(speculative_moe_backend_context())
        yield


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


def test_a_draft_without_quantization_names_the_flag(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"does not run on oxmoe: .*of the draft .* start with --speculative-moe-runner-backend deep_gemm"
    with speculating("auto", monkeypatch):
        assert oxmoe_server.speculates()
        with pytest.raises(RuntimeError, match=message):
            torch.nn.ModuleList([fused_moe(operands(SHAPE, 1, "cpu", rng)[0], quantized=False)])


def test_a_server_without_drafts_does_not_name_it(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(setting.SETTING, "moe")
    layers.watch(setting.read(VERSION), ADAPTER, lambda: None)
    try:
        with server():
            assert not oxmoe_server.speculates()
            with pytest.raises(RuntimeError, match="does not run on oxmoe") as caught:
                torch.nn.ModuleList([fused_moe(operands(SHAPE, 1, "cpu", rng)[0], quantized=False)])
    finally:
        layers.unwatch()
    assert "--speculative" not in str(caught.value)


def test_the_flag_serves_it(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, weights, ids = operands(SHAPE, 5, "cpu", rng)
    expected = oxmoe.moe(x, oxmoe.ExpertWeights.bf16(layer.w13, layer.w2), weights, ids)
    with speculating("deep_gemm", monkeypatch):
        module = fused_moe(layer, quantized=False)
        torch.nn.ModuleList([module])
        dispatched = module.dispatcher.dispatch(x, StandardTopKOutput(weights, ids, None))
        info = _quant_info(module)
        assert same_bits(module.quant_method.runner.run(dispatched, info).hidden_states, expected)


def _quant_info(module: Any) -> Any:
    """Returns the quant_info that SGLang's method hands to its runner on CUDA."""
    from sglang.srt.layers.moe.moe_runner.deep_gemm import DeepGemmMoeQuantInfo

    return DeepGemmMoeQuantInfo(module.w13_weight, module.w2_weight, use_fp8=False)


def test_mixtral_without_moe_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang makes Mixtral of linear layers if it does not know the quantization's name, which nothing else would
    say."""
    from types import SimpleNamespace

    from sglang.srt.model_loader.utils import get_model_architecture

    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["MixtralForCausalLM"]), quantization="oxmoe")
    config.is_embedding_gemma, config.model_impl = False, "auto"
    made, _ = get_model_architecture(config)
    of_layers = sys.modules[made.__module__].MixtralMoE
    layer = of_layers.__new__(of_layers)
    torch.nn.Module.__init__(layer)
    monkeypatch.setenv(setting.SETTING, "moe")
    with pytest.raises(RuntimeError, match=r"builds Mixtral without MoE layers.*--moe-runner-backend deep_gemm"):
        layers.check_layer(layer)
