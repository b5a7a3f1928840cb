"""Kimi-K3's MXFP4 checkpoint in SGLang: its model makes SGLang's own configuration of the experts, whose runner of
--moe-runner-backend flashinfer_mxfp4 oxmoe takes over on Hopper."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import make_routing
from mxfp4_blocks import Blocks
from oxmoe.testing import assert_close_ulp

pytest.importorskip("sglang")

from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.moe_runner.base import FusedOpPool
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import mxfp4

from oxmoe.sglang import layers
from sglang_server import installed, only_cores, server
from test_sglang_fp8 import forward

kimi_k3 = pytest.importorskip("sglang.srt.models.kimi_k3", reason="this SGLang has no Kimi-K3")
_LAYOUT = Path(__file__).parents[2] / "benches" / "sglang" / "sm90_layout.py"
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 2, 256, 128
BOUNDS = {"gemm1_alpha": 4.0, "gemm1_clamp_limit": 1.5}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


def test_the_model_makes_sglangs_own_configuration() -> None:
    """Whatever the checkpoint's configuration is. If this fails, docs/sglang_formats.md has another reason to give."""
    source = inspect.getsource(kimi_k3.KimiK3MoE.__init__)
    assert "moe_quant_config = Mxfp4Config(is_checkpoint_mxfp4_serialized=True)" in source
    assert '"mxfp4" in quant_config.quant_format' in source


@contextmanager
def hopper(monkeypatch: pytest.MonkeyPatch, **topology: Any) -> Iterator[None]:
    """SGLang's choices on a Hopper GPU with flashinfer, whose functions of the layout are those of the benches'
    plugin."""
    for name in ("interleave_moe_weights_for_sm90_mixed_gemm", "interleave_moe_scales_for_sm90_mixed_gemm"):
        monkeypatch.setattr(mxfp4, name, None, raising=False)
    monkeypatch.setattr(mxfp4, "_FI_HAS_SM90_CUTLASS_MXFP4", False)
    runpy.run_path(str(_LAYOUT))["register"]()
    monkeypatch.setattr(mxfp4, "_is_cpu", False)
    # The first call of such a layer imports SGLang's own function of this runner. This is the state before it.
    monkeypatch.delitem(FusedOpPool._fused_funcs, ("none", "flashinfer_mxfp4"), raising=False)
    monkeypatch.setattr("sglang.srt.utils.common.is_sm90_supported", lambda *_: True)
    with server("flashinfer_mxfp4", **topology):
        yield


def layer_of(device: str, **options: Any) -> Any:
    """As KimiK3MoE makes it."""
    with torch.device(device):
        return FusedMoE(
            num_experts=EXPERTS,
            top_k=TOP_K,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            layer_id=1,
            quant_config=mxfp4.Mxfp4Config(is_checkpoint_mxfp4_serialized=True),
            params_dtype=torch.bfloat16,
            activation="situ",
            gate_up_interleaved=False,
            **BOUNDS,
            **options,
        )


def load(module: Any, blocks: Blocks) -> None:
    """Expert by expert, as its checkpoint has them: w1 is gate, w3 is up."""
    for suffix, (w13, w2) in (("weight", blocks.codes), ("weight_scale", blocks.scales)):
        for expert in range(EXPERTS):
            gate, up = w13[expert].chunk(2)
            for shard, name, tensor in (("w1", "w13", gate), ("w3", "w13", up), ("w2", "w2", w2[expert])):
                parameter = getattr(module, f"{name}_{suffix}")
                given = f"experts.{expert}.{shard}.{suffix}"
                parameter.weight_loader(parameter, tensor, given, shard_id=shard, expert_id=expert)
    module.quant_method.process_weights_after_loading(module)


@only_cores
@pytest.mark.parametrize("tokens", [1, 17])
def test_experts_on_hopper(device: str, tokens: int, monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    blocks = Blocks(EXPERTS, HIDDEN, INTERMEDIATE, device, rng, bias=False)
    x = torch.randn((tokens, HIDDEN), generator=rng).bfloat16().to(device)
    weights, ids = (part.to(device) for part in make_routing("uniform", tokens, EXPERTS, TOP_K, rng))
    with hopper(monkeypatch):
        module = layer_of(device)
        assert type(module.quant_method) is mxfp4.Mxfp4MoEMethod
        layers.check_layer(module)
        load(module, blocks)
        result = forward(module, x, StandardTopKOutput(weights, ids, None))
    options = {"activation": "situ", "situ_beta": 4.0, "situ_linear_beta": 1.5, "layout": "gate_up"}
    assert_close_ulp(result, blocks.expected(x, weights, ids, **options))


@only_cores
def test_the_routed_factor(monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    """The model's TopK multiplies by it only where the layer asks for that, which a layer of this method does not."""
    blocks = Blocks(EXPERTS, HIDDEN, INTERMEDIATE, "cpu", rng, bias=False)
    x = torch.randn((5, HIDDEN), generator=rng).bfloat16()
    topk = StandardTopKOutput(*make_routing("uniform", 5, EXPERTS, TOP_K, rng), None)
    with hopper(monkeypatch):
        results = []
        for factor in (None, 4.0):
            module = layer_of("cpu", routed_scaling_factor=factor)
            assert not module.should_fuse_routed_scaling_factor_in_topk
            layers.check_layer(module)
            load(module, blocks)
            results.append(forward(module, x, topk))
    assert torch.equal(results[1], 4 * results[0])
