"""Results that SGLang wants of a layer beside its output: the experts that were chosen, and where the output lies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import oxmoe
from oxmoe.sglang import sources
from oxmoe.testing import same_bits

pytest.importorskip("sglang")

from sglang.srt.distributed.device_communicators import pynccl_allocator
from sglang.srt.environ import envs
from sglang.srt.eplb import expert_distribution
from sglang.srt.layers import dp_attention
from sglang.srt.layers.moe import topk as topk_module
from sglang.srt.layers.moe.topk import BypassedTopKOutput, StandardTopKOutput, TopKConfig
from sglang.srt.state_capturer import routed_experts

from sglang_server import HAS_CONTEXT, SHAPE, fused_moe, installed, operands, server


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


class Seen:
    """Stands for SGLang's capturer and for its recorder."""

    def __init__(self) -> None:
        self.layers: list[Any] = []

    def capture(self, layer_id: Any = None, topk_ids: Any = None, **_: Any) -> None:
        self.layers.append(layer_id)

    def on_select_experts(self, topk_ids: Any = None, **_: Any) -> None:
        self.layers.append("recorded")

    def get_current_pass_count_buffer(self, layer_id: int) -> None:
        return None


@pytest.mark.parametrize("observer", ["capturer", "recorder"])
def test_chosen_experts_are_observed(observer: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """--enable-return-routed-experts and the expert recorder, with a top-k result that oxmoe would choose from."""
    seen = Seen()
    owner, name = (
        (routed_experts, "get_global_experts_capturer")
        if observer == "capturer"
        else (expert_distribution, "get_global_expert_distribution_recorder")
    )
    for module_of_name in (owner, topk_module):
        monkeypatch.setattr(module_of_name, name, lambda: seen)
    layer, x, _, _ = operands(SHAPE, 9, "cpu", rng)
    logits = torch.randn((9, SHAPE.experts), generator=rng)
    # The choice is made in torch, because SGLang's kernels for CUDA cannot run here.
    bypassed = BypassedTopKOutput(x, logits, TopKConfig(top_k=SHAPE.top_k, torch_native=True))
    with server():
        module = fused_moe(layer)
        module.quant_method.apply(module, module.dispatcher.dispatch(x, bypassed))
    assert (0 in seen.layers) if observer == "capturer" else ("recorded" in seen.layers)


SIMULATED = [name for name in ("UNIFORM", "ROUND_ROBIN") if hasattr(envs, f"SGLANG_SIMULATE_{name}_EXPERTS")]


@pytest.mark.parametrize("how", SIMULATED)
def test_simulated_experts(how: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLANG_SIMULATE_UNIFORM_EXPERTS and _ROUND_ROBIN_EXPERTS, with a top-k result that oxmoe would choose from."""

    def simulate(topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, **_: Any) -> None:
        """Stands for SGLang's kernel, which cannot run on a CPU."""
        slots = torch.arange(topk_ids.numel(), dtype=topk_ids.dtype)
        topk_ids.copy_((slots % num_experts).view_as(topk_ids))
        topk_weights.fill_(1 / topk_ids.shape[1])

    if hasattr(topk_module, "_simulate_balanced_routing"):
        monkeypatch.setattr(topk_module, "_simulate_balanced_routing", simulate)
    chosen: list[StandardTopKOutput] = []
    choose = topk_module.select_experts

    def select_experts(*arguments: Any, **named: Any) -> StandardTopKOutput:
        chosen.append(choose(*arguments, **named))
        return chosen[-1]

    monkeypatch.setattr(topk_module, "select_experts", select_experts)
    monkeypatch.setenv(f"SGLANG_SIMULATE_{how}_EXPERTS", "1")
    layer, x, _, _ = operands(SHAPE, 9, "cpu", rng)
    # Every token would choose the experts 0 and 1.
    logits = torch.zeros(9, SHAPE.experts)
    logits[:, :2] = 9
    bypassed = BypassedTopKOutput(x, logits, TopKConfig(top_k=SHAPE.top_k, torch_native=True))
    with server():
        module = fused_moe(layer)
        result = module.quant_method.apply(module, module.dispatcher.dispatch(x, bypassed)).hidden_states
    (choice,) = chosen
    assert int(choice.topk_ids.max()) > 1
    assert same_bits(result, oxmoe.moe(x, layer.weights(), choice.topk_weights, choice.topk_ids))


def test_releases_that_simulate_are_known() -> None:
    """The variables' names are looked up, and a release that renames them would leave them without effect."""
    simulates = "SGLANG_SIMULATE_" in (sources.folder() / "srt/layers/moe/topk.py").read_text(encoding="utf-8")
    assert SIMULATED == (["UNIFORM", "ROUND_ROBIN"] if simulates else [])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("enabled", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("padded", [False, True], ids=["different-tokens", "same-tokens"])
def test_the_output_is_in_symmetric_memory(
    padded: bool, enabled: bool, ranks: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --enable-symm-mem, under the conditions of SGLang's own runners, the output lies in a stand-in pool;
    intermediates do not."""
    layer, x, weights, ids = operands(SHAPE, 9, "cpu", rng)
    topk = StandardTopKOutput(weights, ids, None)
    group, pool = SimpleNamespace(world_size=ranks), []
    empty_like = torch.empty_like

    @contextmanager
    def context(of: Any) -> Iterator[None]:
        def allocate(*arguments: Any, **named: Any) -> torch.Tensor:
            pool.append(empty_like(*arguments, **named))
            return pool[-1]

        assert of is group
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty_like", allocate)
            yield

    with server():
        module = fused_moe(layer)
        plain = module.quant_method.apply(module, module.dispatcher.dispatch(x, topk)).hidden_states
        assert not pool
        monkeypatch.setattr(pynccl_allocator, "is_symmetric_memory_enabled", lambda: enabled)
        monkeypatch.setattr(pynccl_allocator, "SymmetricMemoryContext", context)
        monkeypatch.setattr(dp_attention, "is_allocation_symmetric", lambda: padded)
        if HAS_CONTEXT:
            monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(tp_group=group))
        else:
            monkeypatch.setattr("sglang.srt.distributed.get_tp_group", lambda: group)
        result = module.quant_method.apply(module, module.dispatcher.dispatch(x, topk)).hidden_states
    assert same_bits(result, plain)
    wanted = enabled and padded and ranks == 2
    assert [tensor.data_ptr() for tensor in pool] == ([result.data_ptr()] if wanted else [])
