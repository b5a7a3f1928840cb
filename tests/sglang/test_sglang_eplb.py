"""SGLang's expert load balancer moves rows of a layer's parameters: oxmoe's layers follow, or are refused at load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import Shape, make_layer, make_routing, make_x
from oxmoe.sglang import layers, setting
from oxmoe.sglang import server as oxmoe_server
from oxmoe.testing import same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import filter_moe_weight_param_global_expert
from sglang.srt.layers.quantization import get_quantization_config

from sglang_server import ADAPTER, NEW, VERSION, FusedMoE, argument, fused_moe, installed, server
from test_sglang_compressed import only_nvfp4

SHAPE = Shape("eplb", 4, 2, 256, 128)
PLACES = torch.tensor([2, 3, 1, 0])  # the expert that moves to each place


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """Returns a quantization_config as llm-compressor writes it."""
    arguments = {"type": "float", "symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": arguments | weights,
        "input_activations": inputs and arguments | {"dynamic": True} | inputs,
    }
    packed = "nvfp4-pack-quantized" if weights["num_bits"] == 4 else "float-quantized"
    return {"quant_method": "compressed-tensors", "format": packed, "config_groups": {"group_0": group}, "ignore": []}


STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
FORMATS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "fp8_block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "fp8_tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8_static": STATIC,
    "mxfp8": {"quant_method": "mxfp8", "activation_scheme": "dynamic"},
    "mxfp4": {"quant_method": "mxfp4"},
    "channel": compressed({"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "token"}),
    "tensor": compressed({"num_bits": 8, "strategy": "tensor"}, {"num_bits": 8, "strategy": "tensor"}),
}
W4A16 = compressed({"num_bits": 4, "strategy": "tensor_group", "group_size": 16}, None)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


@contextmanager
def balanced() -> Iterator[None]:
    """Sets up the server of `server` with --enable-eplb."""
    with argument("exec.moe", "enable_eplb", True):
        yield


def fill(parameter: Tensor, name: str, rng: torch.Generator) -> None:
    """Fills a parameter with numbers of sensible sizes, different for each expert."""
    shape, dtype = parameter.shape, parameter.dtype
    if dtype == torch.int32:
        if "g_idx" not in name:  # a g_idx without a tensor in the checkpoint stays as it is
            parameter.copy_(torch.randint(-(1 << 31), 1 << 31, shape, generator=rng))
        return
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        # Scales of some experts are above 128; packed weights then have a factor.
        experts = torch.arange(shape[0]).view(-1, *(1 for _ in shape[1:]))
        drawn = torch.randint(118, 124, shape, generator=rng, dtype=torch.uint8) + 4 * experts.to(torch.uint8)
        drawn = drawn if "scale" in name else torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)
        parameter.view(torch.uint8).copy_(drawn)
        return
    drawn = torch.randn(shape, generator=rng)
    if "global" in name:
        drawn = torch.rand(shape, generator=rng) * 50 + 50
    elif "input_scale" in name:
        drawn = torch.full(shape, 0.05)
    elif "scale" in name:
        drawn = drawn.abs() + 1 if dtype == torch.float8_e4m3fn else drawn.abs() * 0.01 + 0.001
    elif dtype != torch.float8_e4m3fn:
        drawn *= 0.1
    parameter.copy_(drawn.to(dtype))


def empty(quantization: str, checkpoint: dict[str, Any] | None, device: str = "cpu") -> FusedMoE:
    """Returns SGLang's layer before its checkpoint is loaded."""
    config = get_quantization_config(quantization)
    gpt_oss = {"with_bias": True, "gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}
    with torch.device(device):
        return FusedMoE(
            num_experts=SHAPE.experts,
            hidden_size=SHAPE.hidden,
            intermediate_size=SHAPE.intermediate,
            layer_id=0,
            top_k=SHAPE.top_k,
            params_dtype=torch.bfloat16,
            quant_config=config() if checkpoint is None else config.from_config(checkpoint),
            prefix="model.layers.0.mlp.experts",
            **(gpt_oss if checkpoint == FORMATS["mxfp4"] else {}),
        )


def filled(module: FusedMoE, rng: torch.Generator) -> FusedMoE:
    for name, parameter in module.named_parameters():
        fill(parameter.data, name, rng)
    return module


def make(checkpoint: dict[str, Any] | None, device: str, rng: torch.Generator) -> FusedMoE:
    module = filled(empty("oxmoe", checkpoint, device), rng)
    module.quant_method.process_weights_after_loading(module)
    return module


def run(module: FusedMoE, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    dispatched = StandardDispatchOutput(x.clone(), None, StandardTopKOutput(weights, ids.int().to(x.device), None))
    return module.quant_method.apply(module, dispatched).hidden_states


def move(module: FusedMoE) -> None:
    """Moves experts in place, in the tensors that SGLang's models list for it (`get_moe_weights`)."""
    for name, parameter in module.named_parameters():
        if filter_moe_weight_param_global_expert(name, parameter, module.num_local_experts):
            rows = parameter.data.view(torch.uint8) if parameter.element_size() == 1 else parameter.data
            rows.copy_(rows[PLACES.to(rows.device)].clone())


def check_moved(checkpoint: dict[str, Any] | None, device: str, rng: torch.Generator) -> None:
    weights, ids = make_routing("uniform", 9, SHAPE.experts, SHAPE.top_k, rng)
    x, weights = make_x(9, SHAPE, torch.bfloat16, device, rng), weights.to(device)
    with server("oxmoe" if NEW else "auto"):
        module = make(checkpoint, device, rng)
        before, elsewhere = run(module, x, weights, ids), run(module, x, weights, ids.flip(1))
        assert before.isfinite().all() and not same_bits(before, elsewhere)
        move(module)
        assert not same_bits(run(module, x, weights, ids), before)
        assert same_bits(run(module, x, weights, torch.argsort(PLACES)[ids.long()]), before)


@pytest.mark.parametrize("kind", FORMATS)
def test_experts_move_with_rows_of_parameters(kind: str, device: str, rng: torch.Generator) -> None:
    check_moved(FORMATS[kind], device, rng)


@pytest.mark.gpu
@only_nvfp4
def test_nvfp4_experts_move_with_rows_of_parameters(rng: torch.Generator) -> None:
    check_moved(W4A16, "cuda", rng)


def test_tables_are_parameters_once(rng: torch.Generator) -> None:
    """The tables are also parameters after an update of the weights, in the same place."""
    with server():
        module = make(FORMATS["fp8_tensor"], "cpu", rng)
        first = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
        assert {name for name in first if name.startswith("oxmoe")} == {"oxmoe_w13_scale", "oxmoe_w2_scale"}
        assert not any(
            parameter.requires_grad for parameter in module.parameters() if parameter.dtype != torch.bfloat16
        )
        module.w13_weight_scale.data.mul_(2)
        before = module.oxmoe_w13_scale.clone()
        module.quant_method.process_weights_after_loading(module)
        assert {name: parameter.data_ptr() for name, parameter in module.named_parameters()} == first
        assert torch.equal(module.oxmoe_w13_scale, 2 * before)


# With --enable-eplb


def test_the_servers_flag() -> None:
    with server():
        assert not oxmoe_server.balances_experts()
        with balanced():
            assert oxmoe_server.balances_experts()
        assert not oxmoe_server.balances_experts()


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "fp8_static"])
def test_served_with_a_balancer(kind: str, rng: torch.Generator) -> None:
    with server(), balanced():
        make(FORMATS[kind], "cpu", rng)


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (STATIC, "given scales of activations are not served with --enable-eplb"),
        pytest.param(
            W4A16,
            "NVFP4 experts on a CPU are not served with --enable-eplb",
            marks=only_nvfp4,
        ),
    ],
    ids=["static", "nvfp4"],
)
def test_refused_with_a_balancer(checkpoint: dict[str, Any], message: str, rng: torch.Generator) -> None:
    with server(), balanced(), pytest.raises(NotImplementedError, match=message):
        make(checkpoint, "cpu", rng)


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("backend", ["triton_kernel", "deep_gemm"])
def test_copies_are_refused_while_the_model_is_built(
    backend: str, on: bool, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting.SETTING, "moe")
    layers.watch(setting.read(VERSION), ADAPTER, lambda: None)
    layer = make_layer(Shape("copies", 4, 2, 128, 96), torch.bfloat16, "cpu", rng)
    message = "layer 0: with --moe-runner-backend triton_kernel oxmoe keeps copies of the weights, which --enable-eplb"
    try:
        with server(backend):
            module = fused_moe(layer, quantized=False)
            monkeypatch.setattr(oxmoe_server, "balances_experts", lambda: on)
            if on and backend == "triton_kernel":
                with pytest.raises(RuntimeError, match=message):
                    torch.nn.ModuleList([module])
            else:
                torch.nn.ModuleList([module])
    finally:
        layers.unwatch()


def test_copied_scales_are_refused_while_the_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8 experts have one scale each, which deep_gemm's quant_info spreads over blocks."""
    monkeypatch.setenv(setting.SETTING, "moe=deep_gemm")
    layers.watch(setting.read(VERSION), ADAPTER, lambda: None)
    try:
        with server("deep_gemm"):
            quant_config = get_quantization_config("fp8").from_config(FORMATS["fp8_tensor"])
            module = FusedMoE(4, 256, 128, 0, 2, params_dtype=torch.bfloat16, quant_config=quant_config)
            torch.nn.ModuleList([module])
            with (
                balanced(),
                pytest.raises(RuntimeError, match="keeps copies of fp8 experts' scales, which --enable-eplb"),
            ):
                torch.nn.ModuleList([module])
    finally:
        layers.unwatch()
