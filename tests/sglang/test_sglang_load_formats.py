"""--load-format: SGLang may write parameters after it has processed them, or may not process them at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import modelopt_cases
from cases import make_routing, make_x
from oxmoe.sglang import server as oxmoe_server
from oxmoe.testing import same_bits

pytest.importorskip("sglang")

from sglang.srt.model_loader.loader import ShardedStateLoader
from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

from int4_checkpoints import awq, gptq, pack_quantized
from sglang_server import NEW, FusedMoE, argument, installed, server
from test_sglang_compressed import only_nvfp4
from test_sglang_eplb import FORMATS, SHAPE, W4A16, empty, filled, run

MODELOPT = {
    "ModelOpt fp8": ("modelopt_fp8", modelopt_cases.flat("FP8")),
    "ModelOpt NVFP4": ("modelopt_fp4", modelopt_cases.flat("NVFP4")),
}
CHECKPOINTS: dict[str, Any] = {
    **{kind: ("oxmoe", checkpoint) for kind, checkpoint in FORMATS.items()},
    "int4": ("oxmoe", pack_quantized()),
    "AWQ": ("oxmoe", awq()),
    "GPTQ": ("oxmoe", gptq()),
    "W4AFP8": ("w4afp8", {"quant_method": "w4afp8"}),
    "ModelOpt fp8": MODELOPT["ModelOpt fp8"],
}
# These are used as they lie.
PLAIN = ("bf16", "fp8_block")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


def restore(module: FusedMoE, saved: dict[str, Tensor]) -> None:
    """Takes the steps of ShardedStateLoader.load_model, and of the loaders of "presharded" and "remote"."""
    module.quant_method.process_weights_after_loading(module)
    left = ShardedStateLoader._filter_subtensors(module.state_dict())
    for key, tensor in saved.items():
        left.pop(key).data.copy_(tensor)
    assert not left, "SGLang refuses a folder that lacks tensors"


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_layer_that_was_saved_after_processing(kind: str, rng: torch.Generator) -> None:
    weights, ids = make_routing("uniform", 9, SHAPE.experts, SHAPE.top_k, rng)
    x = make_x(9, SHAPE, torch.bfloat16, "cpu", rng)
    with server("oxmoe" if NEW else "auto"):
        module = filled(empty(*CHECKPOINTS[kind]), rng)
        module.quant_method.process_weights_after_loading(module)
        expected = run(module, x, weights, ids)
        saved = ShardedStateLoader._filter_subtensors(module.state_dict())
        restored = empty(*CHECKPOINTS[kind])
        restore(restored, {key: tensor.clone() for key, tensor in saved.items()})
        assert same_bits(run(restored, x, weights, ids), expected)


@pytest.mark.parametrize(
    "checkpoint",
    [pytest.param(("oxmoe", W4A16), marks=only_nvfp4), MODELOPT["ModelOpt NVFP4"]],
    ids=["llm", "modelopt"],
)
def test_nvfp4_on_a_cpu_cannot_be_restored(checkpoint: Any, rng: torch.Generator) -> None:
    message = "NVFP4 experts on a CPU are not served with --load-format sharded_state"
    with server(), argument("model", "load_format", "sharded_state"):
        module = filled(empty(*checkpoint), rng)
        with pytest.raises(NotImplementedError, match=message):
            module.quant_method.process_weights_after_loading(module)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_parameters_of_a_server_that_runs(kind: str, rng: torch.Generator) -> None:
    """SGLang sends them one after the other, as many as the other server has. With oxmoe's own tables it has more."""
    weights, ids = make_routing("uniform", 9, SHAPE.experts, SHAPE.top_k, rng)
    x = make_x(9, SHAPE, torch.bfloat16, "cpu", rng)
    with server(), argument("model", "load_format", "remote_instance"):
        for backend in ("nccl", "transfer_engine"):
            with argument("model", "remote_instance_weight_loader_backend", backend):
                if kind not in PLAIN:
                    with pytest.raises(NotImplementedError, match="--load-format remote_instance leaves out"):
                        empty(*CHECKPOINTS[kind])
                    continue
                module = filled(empty(*CHECKPOINTS[kind]), rng)
                names = [name for name, _ in module.named_parameters()]
                result = run(module, x, weights, ids)
                module.quant_method.process_weights_after_loading(module)
                assert [name for name, _ in module.named_parameters()] == names
                assert same_bits(run(module, x, weights, ids), result)


@pytest.mark.parametrize("kind", [kind for kind in CHECKPOINTS if kind not in PLAIN])
def test_experts_that_were_not_prepared_say_so(kind: str, rng: torch.Generator) -> None:
    weights, ids = make_routing("uniform", 3, SHAPE.experts, SHAPE.top_k, rng)
    x = make_x(3, SHAPE, torch.bfloat16, "cpu", rng)
    with server():
        module = filled(empty(*CHECKPOINTS[kind]), rng)
        with pytest.raises(RuntimeError, match=r"layer 0: the .* experts were not prepared: SGLang did not call"):
            run(module, x, weights, ids)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_dummy_weights(kind: str, rng: torch.Generator) -> None:
    weights, ids = make_routing("uniform", 3, SHAPE.experts, SHAPE.top_k, rng)
    x = make_x(3, SHAPE, torch.bfloat16, "cpu", rng)
    with server():
        module = empty(*CHECKPOINTS[kind])
        initialize_dummy_weights(torch.nn.ModuleDict({"experts": module}))
        module.quant_method.process_weights_after_loading(module)
        assert run(module, x, weights, ids).shape == x.shape


def test_the_servers_format() -> None:
    with server():
        assert oxmoe_server.load_format()[0] == "auto"
        assert not oxmoe_server.restores_processed() and not oxmoe_server.skips_processing()
        with argument("model", "load_format", "presharded"):
            assert oxmoe_server.restores_processed() and not oxmoe_server.skips_processing()
        with (
            argument("model", "load_format", "remote_instance"),
            argument("model", "remote_instance_weight_loader_backend", "modelexpress"),
        ):
            assert not oxmoe_server.restores_processed() and not oxmoe_server.skips_processing()
    assert oxmoe_server.load_format() == ("", "") or not NEW
