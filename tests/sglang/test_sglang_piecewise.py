"""SGLang's piecewise CUDA graphs run a MoE layer as one operator. It makes a bypassed top-k result anew, and leaves out
most of how the model's TopK chooses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import Shape
from oxmoe.peers.topk_forms import routing_arguments
from oxmoe.sglang import capabilities, layers, setting
from oxmoe.sglang.experts import routing
from oxmoe.testing import same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.moe.topk import BypassedTopKOutput, TopK, TopKConfig, TopKOutputFormat

from sglang_server import ADAPTER, VERSION, fused_moe, installed, operands, server

SHAPE = Shape("piecewise", 8, 2, 128, 128)
FACTOR = 2.5
# Newer releases have bypassed results for the layers of few runners alone.
BACKEND = "auto" if capabilities.layer_decides() else "flashinfer_trtllm"


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(setting.SETTING, "moe")
    layers.watch(setting.read(VERSION), ADAPTER, lambda: None)
    yield
    layers.unwatch()


def bias() -> Tensor:
    return torch.linspace(-1, 1, SHAPE.experts)


def scaled(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> Any:
    """A model's own routing function."""
    weights, ids = torch.topk(torch.tanh(gating_output), topk, dim=-1)
    return weights.float(), ids.int()


CHOICES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid with a bias": {"scoring_func": "sigmoid", "correction_bias": bias()},
    "groups": {
        "use_grouped_topk": True,
        "num_expert_group": 4,
        "topk_group": 2,
        "scoring_func": "sigmoid",
        "correction_bias": bias(),
    },
    "scaled": {
        "use_grouped_topk": True,
        "num_expert_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": FACTOR,
        "apply_routed_scaling_factor_on_output": True,
    },
    "function": {"custom_routing_function": scaled},
}


class Block(nn.Module):
    """A model's block: its experts, and how it chooses among them."""

    def __init__(self, layer: Any, choice: dict[str, Any]) -> None:
        super().__init__()
        self.topk = TopK(top_k=SHAPE.top_k, layer_id=0, output_format=TopKOutputFormat.BYPASSED, **choice)
        # The choice is made in torch, because SGLang's kernels for CUDA cannot run here.
        self.topk.topk_config.torch_native = True
        self.experts = fused_moe(layer)


def remade(config: TopKConfig, **changes: Any) -> TopKConfig:
    """Returns what SGLang's operator makes of a configuration, of its own arguments
    (fused_moe_bypassed_piecewise_cuda_graph_impl)."""
    names = ("top_k", "topk_group", "num_expert_group", "correction_bias", "renormalize")
    return TopKConfig(**{name: getattr(config, name) for name in names} | changes)


def run(block: Block, x: Tensor, logits: Tensor, config: TopKConfig) -> Tensor:
    return block.experts.forward_impl(x.clone(), BypassedTopKOutput(x, logits, config))


@pytest.mark.parametrize("choice", CHOICES)
def test_the_operator_chooses_as_the_model_does(choice: str, rng: torch.Generator) -> None:
    layer, x, _, _ = operands(SHAPE, 9, "cpu", rng)
    logits = torch.randn((9, SHAPE.experts), generator=rng)
    with server(BACKEND):
        block = Block(layer, CHOICES[choice])
        config = block.topk.topk_config
        eager = run(block, x, logits, config)
        # The operator's tensors are other objects in the same memory.
        changes = {"correction_bias": config.correction_bias.view(-1)} if config.correction_bias is not None else {}
        assert same_bits(run(block, x, logits, remade(config, **changes)), eager)


@pytest.mark.parametrize(
    "changes", [{"renormalize": False}, {"correction_bias": None}, {"scoring_func": "sqrtsoftplus"}]
)
def test_another_configuration_is_taken_as_it_is(changes: dict[str, Any], rng: torch.Generator) -> None:
    layer, x, _, _ = operands(SHAPE, 9, "cpu", rng)
    logits = torch.randn((9, SHAPE.experts), generator=rng)
    with server(BACKEND):
        block = Block(layer, CHOICES["sigmoid with a bias"])
        other = remade(block.topk.topk_config, **changes)
        expected = routing_arguments(BypassedTopKOutput(x, logits, other))
        assert routing(BypassedTopKOutput(x, logits, other), block.experts.moe_runner_config) == expected


def test_two_ways_to_choose_are_not_guessed_at(rng: torch.Generator) -> None:
    layer, x, _, _ = operands(SHAPE, 9, "cpu", rng)
    logits = torch.randn((9, SHAPE.experts), generator=rng)
    with server(BACKEND):
        block = Block(layer, CHOICES["sigmoid with a bias"])
        block.other_topk = TopK(top_k=SHAPE.top_k, layer_id=0, correction_bias=block.topk.topk_config.correction_bias)
        config = remade(block.topk.topk_config)
        with pytest.raises(NotImplementedError, match="a piecewise CUDA graph tells oxmoe too little"):
            run(block, x, logits, config)
