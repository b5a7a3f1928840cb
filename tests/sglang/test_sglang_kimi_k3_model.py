"""Kimi-K3's whole model as SGLang builds and loads it: the checkpoint that servers are measured with
(benches/sglang/models/kimi_k3.py), and the MoE block around its experts on oxmoe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from oxmoe import reference
from oxmoe.sglang import layers

pytest.importorskip("sglang")

from safetensors.torch import load_file
from sglang.srt.layers.quantization import get_quantization_config

from sglang_cpu.checkpoints import make
from sglang_server import installed, only_cores
from test_sglang_kimi_k3 import hopper, kimi_k3

LAYERS = 4  # of which the last one has MLA


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("kimi-k3"), "kimi-k3-mxfp4", 5, layers=LAYERS)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the model's streams, which need a GPU, and returns the places of one rank."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    group = SimpleNamespace(world_size=1, rank=0, rank_in_group=0, is_first_rank=True, is_last_rank=True, ca_comm=None)
    sizes = {"attn_tp_size": 1, "attn_tp_rank": 0, "pp_size": 1, "pp_rank": 0, "attn_dcp_size": 1}
    return {**sizes, "attn_tp_group": group, "pp_group": group}


@pytest.fixture
def model(checkpoint: Path, one_rank: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's model with the checkpoint's weights, whose missing ones would be NaN."""
    fields = json.loads((checkpoint / "config.json").read_text())
    quantised = get_quantization_config("compressed-tensors").from_config(fields["quantization_config"])
    default = torch.get_default_dtype()
    with hopper(monkeypatch, **one_rank):
        torch.set_default_dtype(torch.bfloat16)
        try:
            made = kimi_k3.KimiK3LinearForCausalLM(kimi_k3.KimiLinearConfig(**fields), quantised)
        finally:
            torch.set_default_dtype(default)
        for name, parameter in made.named_parameters():
            if not name.endswith("weight_bias"):  # the experts have none, so these stay zeros
                parameter.data.fill_(torch.nan if parameter.is_floating_point() else 0)
        yield made


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


@only_cores
def test_the_loader_reads_every_name(checkpoint: Path, model: Any) -> None:
    """Each name that the loader reads is one of a parameter's, and no parameter stays without a weight."""
    weights = weights_of(checkpoint)
    parameters = dict(model.named_parameters())
    loaded = model.load_weights(iter(weights.items()))
    assert loaded and loaded <= parameters.keys()
    without = [name for name, value in parameters.items() if not value.count_nonzero() or value.isnan().any()]
    assert [name for name in without if not name.endswith("weight_bias")] == []
    kinds = [type(layer.self_attn).__name__ for layer in model.model.layers]
    assert kinds == ["KimiK3DeltaAttention"] * (LAYERS - 1) + ["KimiK3MLAAttention"]


def situ(gate: Tensor, up: Tensor) -> Tensor:
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)


def tokens_of_clear_choice(
    tokens: int, weights: dict[str, Tensor], layer: int, fields: dict[str, Any], rng: torch.Generator
) -> Tensor:
    """Returns bf16 tokens [tokens, hidden_size] whose chosen experts stand out by more than bf16 rounds."""
    gate, bias = (weights[f"model.layers.{layer}.mlp.gate.{name}"] for name in ("weight", "e_score_correction_bias"))
    drawn = torch.randn((16 * tokens, fields["hidden_size"]), generator=rng).bfloat16()
    top_k = fields["num_experts_per_token"]
    best = (torch.sigmoid(drawn.float() @ gate.float().t()) + bias).topk(top_k + 1).values
    clear = drawn[best[:, top_k - 1] - best[:, top_k] > 0.05]
    assert len(clear) >= tokens
    return clear[:tokens]


def expected(x: Tensor, weights: dict[str, Tensor], layer: int, fields: dict[str, Any]) -> Tensor:
    """The MoE block in fp32, with the tensors that lie in memory rounded to bf16."""
    of = f"model.layers.{layer}.mlp."

    def project(rows: Tensor, name: str) -> Tensor:
        return (rows.float() @ weights[f"{of}{name}.weight"].float().t()).bfloat16()

    scores = torch.sigmoid(project(x, "gate").float())  # without a GPU SGLang's router has its scores in bf16
    ids = (scores + weights[of + "gate.e_score_correction_bias"]).topk(fields["num_experts_per_token"]).indices
    chosen = scores.gather(1, ids)
    chosen = chosen / chosen.sum(1, keepdim=True)

    def dense(expert: int, name: str) -> Tensor:
        codes, scales = (weights[f"{of}experts.{expert}.{name}.{end}"] for end in ("weight_packed", "weight_scale"))
        return reference.mxfp4_weights(codes, scales)

    experts = range(fields["num_experts"])
    w13 = torch.stack([torch.cat((dense(expert, "w1"), dense(expert, "w3"))) for expert in experts])
    w2 = torch.stack([dense(expert, "w2") for expert in experts])
    options = {"activation": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0, "layout": "gate_up"}
    routed = reference.moe(project(x, "routed_expert_down_proj"), w13, w2, chosen, ids.int(), **options)
    routed = fields["routed_scaling_factor"] * routed.float()
    latent = routed * torch.rsqrt(routed.square().mean(1, keepdim=True) + fields["rms_norm_eps"])
    shared = situ(*(project(x, f"shared_experts.{name}_proj").float() for name in ("gate", "up"))).bfloat16()
    return project(latent.bfloat16(), "routed_expert_up_proj").float() + project(shared, "shared_experts.down_proj")


@only_cores
@pytest.mark.parametrize("tokens", [1, 17])
def test_the_moe_block(checkpoint: Path, model: Any, tokens: int, rng: torch.Generator) -> None:
    """Its router, its latent experts on oxmoe, their norm, its shared experts and the pending residual."""
    weights = weights_of(checkpoint)
    fields = json.loads((checkpoint / "config.json").read_text())
    model.load_weights(iter(weights.items()))
    for number in (0, LAYERS - 1):
        block = model.model.layers[number].mlp
        block.experts.quant_method.process_weights_after_loading(block.experts)
        layers.check_layer(block.experts)
        x = tokens_of_clear_choice(tokens, weights, number, fields, rng)
        pending = torch.randn(x.shape, generator=rng).bfloat16()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            result = block(x, prefix_sum=pending)
        wanted = expected(x, weights, number, fields) + pending.float()
        assert float((result.float() - wanted).norm() / wanted.norm()) < 0.01
