"""Llama-4's own loader on oxmoe's layers.

It writes the scales of ModelOpt's fp8 checkpoints into the parameters, and not through their weight_loader, so oxmoe
does not see these writes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modelopt_cases as cases
from modelopt_cases import FP8, Experts
from oxmoe.sglang.updates import Updates
from oxmoe.testing import same_bits

pytest.importorskip("sglang")

from sglang.srt.model_loader.loader import DefaultModelLoader

from sglang_server import FusedMoE, installed, server
from test_sglang_fp8 import forward
from test_sglang_modelopt import E, H, I, drawn_x, empty_layer, quant_config, routed
from test_sglang_modelopt import load as load_each

try:
    from sglang.srt.models.mllama4 import Llama4ForConditionalGeneration
except (AttributeError, ImportError, RuntimeError) as error:
    pytest.skip(f"this SGLang cannot import Llama-4 without a GPU: {error}", allow_module_level=True)

PREFIX = "language_model.model.layers.0.feed_forward.experts"


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


def drawn(rng: torch.Generator) -> Experts:
    """Draws experts that share one scale for gate and up and one for down, as ModelOpt exports Llama-4's."""
    made = cases.fp8(E, H, I, rng)
    for suffix in ("weight_scale", "input_scale"):
        for shards in (("w1", "w3"), ("w2",)):
            one = torch.rand(1, generator=rng) / 100 + 0.01
            for shard in shards:
                made.put(suffix, shard, one.expand(E))
    return made


def named(made: Experts) -> Iterator[tuple[str, Tensor]]:
    """Yields the checkpoint's tensors: all experts in one, with columns and rows exchanged, and a number as scale."""
    weight = made.tensors["weight"]
    yield f"{PREFIX}.gate_up_proj", torch.cat([weight["w1"], weight["w3"]], 1).transpose(1, 2).contiguous()
    yield f"{PREFIX}.down_proj", weight["w2"].transpose(1, 2).contiguous()
    for suffix in ("weight_scale", "input_scale"):
        for name, shard in (("gate_up_proj", "w1"), ("down_proj", "w2")):
            yield f"{PREFIX}.{name}_{suffix}", made.tensors[suffix][shard][0].clone()


def experts() -> FusedMoE:
    return empty_layer(quant_config("modelopt_fp8", FP8), prefix=PREFIX, apply_router_weight_on_input=True, top_k=1)


def model_of(experts: FusedMoE) -> Any:
    """Returns SGLang's model with this layer alone."""
    model = Llama4ForConditionalGeneration.__new__(Llama4ForConditionalGeneration)
    nn.Module.__init__(model)
    model.config, model.has_vision = SimpleNamespace(num_local_experts=E), False
    owner: nn.Module = model
    *path, last = PREFIX.split(".")
    for name in path:
        owner.add_module(name, nn.Module())
        owner = owner.get_submodule(name)
    owner.add_module(last, experts)
    return model


def operands(rng: torch.Generator) -> tuple[Tensor, Any]:
    return drawn_x(9, H, "cpu", rng), routed(9, "cpu", rng, k=1)[2]


def expected(made: Experts, x: Tensor, topk: Any) -> Tensor:
    """Returns the result of a layer whose loader is given each tensor of each expert."""
    module = experts()
    load_each(module, made)
    return forward(module, x, topk)


def test_loaded_and_updated_from_disk(rng: torch.Generator) -> None:
    first, second, (x, topk) = drawn(rng), drawn(rng), operands(rng)
    with server():
        module = experts()
        for made in (first, second, first):
            DefaultModelLoader.load_weights_and_postprocess(model_of(module), named(made), torch.device("cpu"))
            assert same_bits(forward(module, x, topk), expected(made, x, topk))


def test_an_update_that_is_not_processed_is_refused(rng: torch.Generator) -> None:
    """The weights come through weight_loader, whatever comes first."""
    first, (x, topk) = drawn(rng), operands(rng)
    with server():
        module = experts()
        model = model_of(module)
        DefaultModelLoader.load_weights_and_postprocess(model, named(first), torch.device("cpu"))
        result = forward(module, x, topk)
        update = list(named(drawn(rng)))
        for tensors in (update, update[::-1]):
            with pytest.raises(RuntimeError, match="layer 0: ModelOpt fp8 experts were prepared at load"):
                model.load_weights(tensors)
            assert same_bits(forward(module, x, topk), result)


def test_the_loader_writes_scales_past_the_parameters_loader(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is why the docs tell not to update these scales alone. If a release mends it, the sentence may go."""
    seen = []
    monkeypatch.setattr(Updates, "_check", lambda *arguments: seen.append(arguments))
    with server():
        module = experts()
        module.w13_weight_scale.data.zero_()
        model_of(module).load_weights((name, own) for name, own in named(drawn(rng)) if name.endswith("weight_scale"))
    assert bool(module.w13_weight_scale.all()) and not seen


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("gate_up_proj", r"w13_weight for experts 0 to \d+ \(w1, w3\)\."),
        ("down_proj_weight_scale", r"w2_weight_scale for experts 0 to \d+ \(w2\), or has NaN there\."),
        ("down_proj_input_scale", r"w2_input_scale for experts 0 to \d+ \(w2\), or has NaN there\."),
    ],
)
def test_a_tensor_that_is_missing(name: str, lacking: str, rng: torch.Generator) -> None:
    """Codes are counted; scales that the loader does not see are looked at."""
    tensors = [(own, tensor) for own, tensor in named(drawn(rng)) if not own.endswith(f".{name}")]
    with server(), pytest.raises(ValueError, match=rf"layer 0: the checkpoint has no {lacking}"):
        DefaultModelLoader.load_weights_and_postprocess(model_of(experts()), tensors, torch.device("cpu"))
