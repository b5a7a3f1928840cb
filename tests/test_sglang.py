"""The real SGLang package drives oxmoe: registration, a whole FusedMoE layer, MoeRunner alone, what is refused."""

from __future__ import annotations

import argparse
import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe.sglang
from cases import GPT_OSS, Layer, Shape, make_layer, make_routing, make_x, tie_free_logits
from oxmoe import reference
from oxmoe.testing import assert_close_ulp, same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.base import MoeQuantInfo
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import BypassedTopKOutput, StandardTopKOutput, TopK, TopKConfig
from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend, resolve_moe_runner_backend
from sglang.srt.layers.quantization import get_quantization_config
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.plugins import load_plugins_by_group
from sglang.srt.runtime_context import get_context, get_flags, get_parallel
from sglang.srt.server_args import ServerArgs

SHAPE = Shape("sglang", 8, 2, 128, 96)
ONE_RANK = {
    "moe_ep_size": 1,
    "moe_ep_rank": 0,
    "moe_tp_size": 1,
    "moe_tp_rank": 0,
    "tp_size": 1,
    "tp_rank": 0,
    "tp_group": None,
}
SECOND_OF_TWO_EP_RANKS = {
    **ONE_RANK,
    "moe_ep_size": 2,
    "moe_ep_rank": 1,
    "tp_size": 2,
    "tp_rank": 1,
    "attn_tp_size": 2,
    "attn_tp_rank": 1,
}

# Everything of SGLang whose contents `install` may change.
REGISTRIES = {
    "sglang.srt.layers.moe.moe_runner.runner._CUSTOM_RUNNER_CORE_FACTORIES",
    "sglang.srt.layers.moe.utils._REGISTERED_MOE_RUNNER_BACKEND_NAMES",
    "sglang.srt.layers.quantization.QUANTIZATION_METHODS",
    "sglang.srt.arg_groups.choices.MOE_RUNNER_BACKEND_CHOICES",
    "sglang.srt.arg_groups.choices.QUANTIZATION_CHOICES",
}


def attributes() -> dict[str, tuple[int, Any]]:
    """Every attribute of SGLang's modules and classes: which object it is, and what a container holds."""
    found = {}

    def add(prefix: str, owner: ModuleType | type) -> None:
        for name, value in list(vars(owner).items()):
            if isinstance(value, dict) and name != "__builtins__":
                contents: Any = [(key, id(item)) for key, item in value.items()]
            else:
                contents = list(value) if isinstance(value, list | set) else None
            found[f"{prefix}.{name}"] = (id(value), contents)
            if isinstance(value, type) and value.__module__ == prefix:
                add(f"{prefix}.{name}", value)

    for name, module in list(sys.modules.items()):
        if name == "sglang" or name.startswith("sglang."):
            add(name, module)
    return found


@pytest.fixture(scope="session")
def installed() -> dict[str, set[str]]:
    """The swap, installed once for all tests; what it changed in SGLang: {"replaced": names, "filled": names}."""
    # What SGLang imports for the adapter is no change of ours.
    importlib.import_module(oxmoe.sglang.ADAPTERS["0.5.23"])

    before = attributes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(oxmoe.sglang.SETTING, "moe")
        oxmoe.sglang.install()
    after = attributes()
    common = before.keys() & after.keys()
    return {
        "added": after.keys() ^ before.keys(),
        "replaced": {name for name in common if after[name][0] != before[name][0]},
        "filled": {name for name in common if after[name][1] != before[name][1]},
    }


@pytest.fixture
def ours(installed: dict[str, set[str]]) -> Iterator[Any]:
    """The backend name, with the server state that SGLang's layers ask for."""
    backend = resolve_moe_runner_backend("oxmoe")
    with ExitStack() as stack:
        stack.enter_context(get_context().override_server_args(model_path="dummy"))
        stack.enter_context(get_flags().moe.override(runner_backend=backend, a2a_backend=MoeA2ABackend.NONE))
        stack.enter_context(get_parallel().override(**ONE_RANK))
        yield backend


def fused_moe(layer: Layer, *, experts: int | None = None, **options: Any) -> FusedMoE:
    """SGLang's layer with these weights, loaded as its model loader would end."""
    shape, dtype = layer.shape, layer.w13.dtype
    with torch.device(layer.w13.device):
        module = FusedMoE(
            num_experts=experts or shape.experts,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            layer_id=0,
            top_k=shape.top_k,
            params_dtype=dtype,
            with_bias=shape.bias,
            is_gated=shape.gated,
            quant_config=get_quantization_config("oxmoe")(),
            **options,
        )
    with torch.no_grad():
        module.w13_weight.copy_(layer.w13)
        module.w2_weight.copy_(layer.w2)
        if shape.bias:
            module.w13_weight_bias.copy_(layer.b13)
            module.w2_weight_bias.copy_(layer.b2)
    module.quant_method.process_weights_after_loading(module)
    return module


def operands(
    shape: Shape,
    tokens: int,
    device: str,
    rng: torch.Generator,
    pattern: str = "uniform",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Layer, Tensor, Tensor, Tensor]:
    layer = make_layer(shape, dtype, device, rng, bias_dtype=torch.float32)
    topk_weights, topk_ids = make_routing(pattern, tokens, shape.experts, shape.top_k, rng)
    return layer, make_x(tokens, shape, dtype, device, rng), topk_weights.to(device), topk_ids.to(device)


def check_layer(
    layer: Layer, x: Tensor, weights: Tensor, ids: Tensor, expected_options: dict[str, Any], **options: Any
) -> None:
    """The module against the reference; with inplace (the default) the result is x itself."""
    before = x.clone()
    result = fused_moe(layer, **options)(x, StandardTopKOutput(weights, ids, None))
    expected = reference.moe(before, layer.w13, layer.w2, weights, ids, **layer.reference_options, **expected_options)
    assert_close_ulp(result, expected)
    assert same_bits(x, result if options.get("inplace", True) else before)


# Registration


def test_only_registries_are_touched(installed: dict[str, set[str]]) -> None:
    assert installed["added"] == set()
    assert installed["replaced"] == set()
    # Modules that import a registry show it too: they are told apart by the last part of the name.
    names = {name.rpartition(".")[2] for name in REGISTRIES}
    assert {name for name in installed["filled"] if name.rpartition(".")[2] not in names} == set()
    assert REGISTRIES <= installed["filled"]


def test_swap_is_reported(installed: dict[str, set[str]]) -> None:
    (swap,) = oxmoe.sglang.active()
    assert (swap.name, swap.sglang_version) == ("moe", "0.5.23")


def test_second_install_changes_nothing(installed: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(oxmoe.sglang.SETTING, "moe")
    before = attributes()
    oxmoe.sglang.install()
    assert attributes() == before


def test_one_log_line(
    installed: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(oxmoe.sglang.SETTING, "moe")
    monkeypatch.setattr(oxmoe.sglang, "_active", {})
    monkeypatch.setattr(sys.modules[oxmoe.sglang.ADAPTERS["0.5.23"]], "SWAPS", {"moe": lambda: "what was taken over"})
    with caplog.at_level(logging.INFO, logger="oxmoe.sglang"):
        oxmoe.sglang.install()
    assert caplog.messages == ["oxmoe: moe in SGLang 0.5.23: what was taken over"]


def test_off_by_default() -> None:
    code = "import sys, oxmoe.sglang as s; s.install(); assert not s.active(); assert 'sglang.srt' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", f"import os; os.environ.pop('{oxmoe.sglang.SETTING}', None); {code}"], check=True
    )


def test_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(oxmoe.sglang.SETTING, "moe")
    monkeypatch.setattr(oxmoe.sglang, "_active", {})
    monkeypatch.setattr(oxmoe.sglang, "sglang_version", lambda: "0.4.99")
    with pytest.raises(RuntimeError, match=r"SGLang 0\.4\.99 is not supported; supported: 0\.5\.23"):
        oxmoe.sglang.install()


def test_unknown_swap(installed: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(oxmoe.sglang.SETTING, "moe, attention")
    with pytest.raises(ValueError, match=r"unknown attention; SGLang 0\.5\.23 can have: moe"):
        oxmoe.sglang.install()
    assert [swap.name for swap in oxmoe.sglang.active()] == ["moe"]


def test_entry_point() -> None:
    plugins = load_plugins_by_group("sglang.srt.plugins")
    assert plugins["oxmoe"][0] is oxmoe.sglang.install


def test_command_line(installed: dict[str, set[str]]) -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    args = parser.parse_args(["--model-path", "m", "--moe-runner-backend", "oxmoe", "--quantization", "oxmoe"])
    assert (args.moe_runner_backend, args.quantization) == ("oxmoe", "oxmoe")


def test_other_layers_stay(installed: dict[str, set[str]]) -> None:
    from sglang.srt.layers.linear import LinearBase

    config = get_quantization_config("oxmoe")()
    assert type(config.get_quant_method(LinearBase(8, 8), "")) is UnquantizedLinearMethod
    assert config.get_quant_method(torch.nn.Identity(), "") is None


# A whole layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_layer(ours: Any, device: str, tokens: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    check_layer(*operands(SHAPE, tokens, device, rng, dtype=dtype), {})


@pytest.mark.parametrize("pattern", ["holes", "all_holes", "one_expert", "duplicates"])
def test_layer_routings(ours: Any, device: str, pattern: str, rng: torch.Generator) -> None:
    check_layer(*operands(SHAPE, 9, device, rng, pattern), {})


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (
            {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0},
            Shape("gpt-oss", 8, 4, 120, 120, True, tuple(GPT_OSS.items())),
        ),
        (
            {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "gate_up_interleaved": False},
            SHAPE.with_options(**{**GPT_OSS, "layout": "gate_up"}),
        ),
        ({"gemm1_clamp_limit": 0.25}, SHAPE.with_options(limit=0.25, clamp="after")),
        ({"swiglu_limit": 0.5}, SHAPE.with_options(limit=0.5, clamp="before")),
        ({"activation": "gelu"}, SHAPE.with_options(activation="gelu")),
        ({"activation": "relu2"}, SHAPE.with_options(activation="relu2")),
        ({"activation": "silu"}, SHAPE.with_options(activation="silu", gated=False)),
    ],
    ids=["gpt-oss", "gpt-oss-halves", "limit-after", "limit-before", "gelu", "relu2", "silu-plain"],
)
def test_layer_activations(ours: Any, device: str, options: dict[str, Any], shape: Shape, rng: torch.Generator) -> None:
    check_layer(*operands(shape, 9, device, rng), {}, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"routed_scaling_factor": 2.5}, {"routed_scaling_factor": 2.5}),
        ({"inplace": False}, {}),
        ({"inplace": False, "no_combine": True, "routed_scaling_factor": 2.5}, {"no_combine": True}),
        ({"apply_router_weight_on_input": True}, {"apply_router_weight_on_input": True}),
    ],
    ids=["scaled", "out-of-place", "no-combine", "weight-on-input"],
)
def test_layer_options(
    ours: Any, device: str, options: dict[str, Any], expected: dict[str, Any], rng: torch.Generator
) -> None:
    check_layer(*operands(SHAPE, 9, device, rng), expected, **options)


def test_topk_feeds_layer(ours: Any, device: str, rng: torch.Generator) -> None:
    layer, x, _, _ = operands(SHAPE, 33, device, rng)
    logits = tie_free_logits(33, SHAPE.experts, rng).to(device)
    routed = TopK(top_k=SHAPE.top_k, layer_id=0).forward_native(x, logits)
    expected = reference.moe(x.clone(), layer.w13, layer.w2, router_logits=logits, top_k=SHAPE.top_k)
    assert_close_ulp(fused_moe(layer)(x, routed), expected)


def test_layer_keeps_its_attributes(ours: Any, device: str, rng: torch.Generator) -> None:
    layer, x, weights, ids = operands(SHAPE, 3, device, rng)
    module = fused_moe(layer)
    owners = (module, module.quant_method, module.dispatcher, module.moe_runner_config)
    before = [{name: id(value) for name, value in vars(owner).items()} for owner in owners]
    module(x, StandardTopKOutput(weights, ids, None))
    assert [{name: id(value) for name, value in vars(owner).items()} for owner in owners] == before


def test_weights_are_described_once(ours: Any, device: str, rng: torch.Generator) -> None:
    layer, x, weights, ids = operands(SHAPE, 5, device, rng)
    module = fused_moe(layer, inplace=False)
    core, routed = module.quant_method.runner.runner_core, StandardTopKOutput(weights, ids, None)
    described = core.prepare(module.quant_method.get_triton_quant_info(module))
    module(x, routed)
    assert core.prepare(module.quant_method.get_triton_quant_info(module)) is described

    # Other memory behind the same parameter, as a weight update may leave it.
    changed = make_layer(SHAPE, torch.bfloat16, device, rng)
    module.w13_weight.data, module.w2_weight.data = changed.w13, changed.w2
    assert_close_ulp(module(x, routed), reference.moe(x, changed.w13, changed.w2, weights, ids))
    assert core.prepare(module.quant_method.get_triton_quant_info(module)) is not described


@pytest.mark.gpu
def test_layer_in_cuda_graph(ours: Any, rng: torch.Generator) -> None:
    layer, x, weights, ids = operands(SHAPE, 33, "cuda", rng)
    module, routed = fused_moe(layer, inplace=False), StandardTopKOutput(weights, ids, None)
    module(x, routed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = module(x, routed)
    x.copy_(make_x(33, SHAPE, torch.bfloat16, "cuda", rng))
    graph.replay()
    assert same_bits(result, module(x, routed))


@pytest.mark.gpu
def test_expert_parallel_layer(ours: Any, rng: torch.Generator) -> None:
    """The second of two ranks: SGLang's dispatcher makes local ids, -1 for the first rank's experts."""
    _, x, weights, ids = operands(SHAPE, 33, "cuda", rng)
    local = make_layer(SHAPE, torch.bfloat16, "cuda", rng, local_experts=SHAPE.experts // 2)
    with get_parallel().override(**SECOND_OF_TWO_EP_RANKS):
        result = fused_moe(local, inplace=False)(x, StandardTopKOutput(weights, ids, None))
    assert_close_ulp(result, reference.moe(x, local.w13, local.w2, weights, ids, ep_size=2, ep_rank=1))


# MoeRunner alone


def runner_operands(
    device: str, rng: torch.Generator, **config: Any
) -> tuple[Layer, StandardDispatchOutput, MoeRunnerConfig]:
    layer, x, weights, ids = operands(SHAPE, 7, device, rng)
    options = {"num_experts": SHAPE.experts, "num_local_experts": SHAPE.experts, "top_k": SHAPE.top_k, "inplace": False}
    return (
        layer,
        StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids, None)),
        MoeRunnerConfig(**{**options, **config}),
    )


@pytest.mark.parametrize("keep", [False, True])
def test_runner_without_combine(ours: Any, device: str, keep: bool, rng: torch.Generator) -> None:
    layer, dispatched, config = runner_operands(device, rng, no_combine=True, no_combine_keep_router_weight=keep)
    result = MoeRunner(ours, config).run(dispatched, TritonMoeQuantInfo(layer.w13, layer.w2)).hidden_states
    x, topk = dispatched.hidden_states, dispatched.topk_output
    expected = reference.moe(
        x, layer.w13, layer.w2, topk.topk_weights, topk.topk_ids, no_combine=True, keep_router_weight=keep
    )
    assert_close_ulp(result, expected)


def test_runner_takes_interleaved_rows(ours: Any, device: str, rng: torch.Generator) -> None:
    layer, dispatched, config = runner_operands(device, rng)
    info = TritonMoeQuantInfo(layer.w13, layer.w2, fuse_swiglu_interleaved=True)
    result = MoeRunner(ours, config).run(dispatched, info).hidden_states
    x, topk = dispatched.hidden_states, dispatched.topk_output
    assert_close_ulp(
        result, reference.moe(x, layer.w13, layer.w2, topk.topk_weights, topk.topk_ids, layout="interleaved")
    )


def test_core_names_its_backend(ours: Any) -> None:
    runner = MoeRunner(ours, MoeRunnerConfig())
    assert runner.runner_core.runner_backend == ours and runner.fused_func is None
    assert ours not in list(MoeRunnerBackend)


# What is refused, by name


def refused(
    ours: Any, rng: torch.Generator, info: Any = None, *, topk: Any = None, hooks: Any = None, **config: Any
) -> None:
    layer, dispatched, runner_config = runner_operands("cpu", rng, **config)
    if topk is not None:
        dispatched = dispatched._replace(topk_output=topk)
    core = MoeRunner(ours, runner_config).runner_core
    core.run_from_dispatch(dispatched, info or TritonMoeQuantInfo(layer.w13, layer.w2), runner_config, hooks=hooks)


def test_refuses_lora(ours: Any, rng: torch.Generator) -> None:
    with pytest.raises(NotImplementedError, match="LoRA"):
        refused(ours, rng, hooks=object())


def test_refuses_other_quant_info(ours: Any, rng: torch.Generator) -> None:
    class Fp3QuantInfo(MoeQuantInfo):
        pass

    with pytest.raises(
        NotImplementedError, match="no kernel for Fp3QuantInfo; served: TritonMoeQuantInfo with unquantised"
    ):
        refused(ours, rng, Fp3QuantInfo())


@pytest.mark.parametrize(
    "fields",
    [{"use_fp8_w8a8": True, "block_shape": [128, 128]}, {"w13_scale": torch.ones(8)}, {"use_int4_w4a16": True}],
    ids=["fp8", "scale", "int4"],
)
def test_refuses_quantised_experts(ours: Any, fields: dict[str, Any], rng: torch.Generator) -> None:
    weight = torch.zeros(8, 192, 128, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=f"with {', '.join(fields)}; served"):
        refused(ours, rng, TritonMoeQuantInfo(weight, weight, **fields))


def test_refuses_unmaterialised_routing(ours: Any, rng: torch.Generator) -> None:
    topk = BypassedTopKOutput(torch.zeros(7, 128), torch.zeros(7, 8), TopKConfig(top_k=2))
    with pytest.raises(NotImplementedError, match="no kernel for BypassedTopKOutput; served: StandardTopKOutput"):
        refused(ours, rng, topk=topk)


def test_refuses_unknown_activation(ours: Any, rng: torch.Generator) -> None:
    with pytest.raises(NotImplementedError, match="situ"):
        refused(ours, rng, activation="situ")


def test_refuses_inplace_without_combine(ours: Any, rng: torch.Generator) -> None:
    with pytest.raises(ValueError, match="inplace and no_combine"):
        refused(ours, rng, inplace=True, no_combine=True)


# The call behind SGLang's MXFP4 experts on Hopper, with SGLang's own objects.


def halves_of_the_best(gating_output: Tensor, topk: int, **_: Any) -> tuple[Tensor, Tensor]:
    return torch.full((gating_output.shape[0], topk), 0.5), gating_output.topk(topk).indices


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"renormalize": False},
        {"scoring_func": "sigmoid", "correction_bias": torch.linspace(-0.5, 0.5, 8)},
        {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "correction_bias": torch.linspace(1, 2, 8)},
        {"custom_routing_function": halves_of_the_best},
    ],
    ids=lambda chosen: ",".join(chosen) or "softmax",
)
def test_mxfp4_call_routes_as_sglang(chosen: dict[str, Any], rng: torch.Generator) -> None:
    from sglang.srt.layers.moe.moe_runner.flashinfer_cutlass import FlashInferCutlassMxfp4MoeQuantInfo

    def blocks(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(256, (8, rows, columns // 2), dtype=torch.uint8, generator=rng)
        scales = torch.randint(120, 124, (8, rows, columns // 32), dtype=torch.uint8, generator=rng)
        return oxmoe.quantize.interleave_sm90_mxfp4(codes, scales)

    (w13, w13_scale), (w2, w2_scale) = blocks(256, 128), blocks(128, 128)
    info = FlashInferCutlassMxfp4MoeQuantInfo(
        w13_weight=w13, w2_weight=w2, w13_weight_scale=w13_scale, w2_weight_scale=w2_scale
    )
    x = torch.randn(7, 128, generator=rng).bfloat16()
    topk = BypassedTopKOutput(x, tie_free_logits(7, 8, rng), TopKConfig(top_k=2, torch_native=True, **chosen))
    config = MoeRunnerConfig()
    result = oxmoe.fused_experts_flashinfer_mxfp4(x, topk, info, config)
    standard = topk.to_standard()
    expected = oxmoe.fused_experts_flashinfer_mxfp4(x, standard, info, config)
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    assert (result == expected).float().mean() > 0.9, "weights may differ in their last bit, experts may not"
    assert oxmoe.fused_experts_flashinfer_mxfp4(x[:0], topk, info, config).shape == (0, 128)
