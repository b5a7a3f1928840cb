"""Modes of a server that change when a layer's weights move, who multiplies its result, or which kernels run: each is
right, or refused before the first request by the name of its flag."""

from __future__ import annotations

import importlib
import logging
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxmoe
from cases import make_routing, make_x
from oxmoe.sglang import calls, capabilities, collective, experts, layers, setting, sources
from oxmoe.testing import same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import get_quantization_config

from sglang_server import ADAPTER, SHAPE, VERSION, FusedMoE, argument, fused_moe, installed, operands, server
from test_sglang_eplb import SHAPE as OF_FORMATS
from test_sglang_eplb import filled
from test_sglang_load_formats import CHECKPOINTS, PLAIN, empty

FACTOR = 2.5
HAS_CUTEDSL = bool(sources.function("srt.layers.flashinfer_comm_fusion", "uses_cutedsl_ar_fusion"))
PREPARED = [kind for kind in CHECKPOINTS if kind not in PLAIN]


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    installed()
    monkeypatch.setenv(setting.SETTING, "moe")
    layers.watch(setting.read(VERSION), ADAPTER, lambda: None)
    yield
    layers.unwatch()


def has(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not capabilities.has_argument(name), reason=f"this SGLang has no argument {name}")


# The routed scaling factor


def block_of(place: str | None) -> nn.Module:
    """Returns a block with the name of a model's, or a block of no model. Without a GPU not every release can import
    these models; `test_the_blocks_that_scale_are_known` reads their names."""
    if place is None:
        return nn.Module()
    kind = type(calls.SCALING[place], (nn.Module,), {"__module__": f"sglang.srt.models.{place}"})
    # Other models inherit from it.
    return type("Block", (kind,), {"__module__": "sglang.srt.models.another"})()  # type: ignore[no-any-return]


def run(module: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    dispatched = StandardDispatchOutput(x.clone(), None, StandardTopKOutput(topk_weights, topk_ids, None))
    return module.quant_method.apply(module, dispatched).hidden_states  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "place", [None, *(place for place in calls.SCALING if sources.names(f"srt.models.{place}"))], ids=str
)
def test_the_scaling_factor_counts_once_without_cuda(place: str | None, rng: torch.Generator) -> None:
    """Some models multiply the result of their experts by the factor if SGLang does not run on CUDA."""
    layer, x, topk_weights, topk_ids = operands(SHAPE, 9, "cpu", rng)
    with server():
        block = block_of(place)
        block.experts = fused_moe(layer, routed_scaling_factor=FACTOR)
        result = run(block.experts, x, topk_weights, topk_ids)
        config = block.experts.moe_runner_config
        # NVFP4 of ModelOpt has the factor in its top-k weights.
        in_topk = experts.scaling_factor(x, config, scaled=True)
    here = FACTOR if place is None else 1.0
    expected = oxmoe.moe(x, layer.weights(), topk_weights, topk_ids, routed_scaling_factor=here)
    assert same_bits(result, expected)
    assert in_topk == here / FACTOR


def test_experts_on_the_cpu_beside_the_gpu_are_refused(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.moe import kt_ep_wrapper

    monkeypatch.setattr(kt_ep_wrapper, "KTRANSFORMERS_AVAILABLE", True)
    with server():
        module = fused_moe(operands(SHAPE, 1, "cpu", rng)[0])
        method = module.quant_method
        del module.quant_method
        module.quant_method = kt_ep_wrapper.KTEPWrapperMethod(method, SimpleNamespace(num_gpu_experts=4))
        with pytest.raises(RuntimeError, match=r"--kt-weight-path.* routed scaling factor.*start without --kt-weight"):
            nn.ModuleList([module])


# Weights that move


@contextmanager
def given(place: str, name: str, value: int) -> Iterator[None]:
    """Sets an argument that some releases have in a bag of their own behind the context's ranks."""
    with ExitStack() as stack:
        try:
            stack.enter_context(argument(place, name, value))
        except ValueError:
            from sglang.srt.runtime_context import get_parallel

            stack.enter_context(get_parallel()._config.override(**{name: value}))
        yield


MOVES = [
    pytest.param("exec.offload", "cpu_offload_gb", 4, marks=has("cpu_offload_gb")),
    pytest.param("exec.offload", "offload_group_size", 2, marks=has("offload_group_size")),
    pytest.param("parallel", "dwdp_size", 2, marks=has("dwdp_size")),
]


@pytest.mark.parametrize(("place", "name", "value"), MOVES)
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_prepared_experts_are_refused_before_they_are_loaded(kind: str, place: str, name: str, value: int) -> None:
    flag = f"--{name.replace('_', '-')}"
    with server(), given(place, name, value):
        if kind in PLAIN:
            empty(*CHECKPOINTS[kind])
            return
        with pytest.raises(NotImplementedError, match=f"experts are prepared after they are loaded, and {flag} gives"):
            empty(*CHECKPOINTS[kind])


@pytest.mark.parametrize(("place", "name", "value"), MOVES)
def test_copies_are_refused(place: str, name: str, value: int, rng: torch.Generator) -> None:
    flag = f"--{name.replace('_', '-')}"
    with server("triton_kernel"), given(place, name, value):
        module = fused_moe(operands(SHAPE, 1, "cpu", rng)[0], quantized=False)
        with pytest.raises(RuntimeError, match=f"keeps copies of the weights, which {flag} does not reach"):
            nn.ModuleList([module])


@has("cpu_offload_gb")
def test_offloaded_weights_are_not_kept(rng: torch.Generator) -> None:
    """SGLang's forward of an offloaded layer gets copies of its parameters on the GPU, which live as long as the
    call."""
    layer, x, topk_weights, topk_ids = operands(SHAPE, 9, "cpu", rng)
    expected = oxmoe.moe(x, layer.weights(), topk_weights, topk_ids)
    topk = StandardTopKOutput(topk_weights, topk_ids, None)
    with server(), argument("exec.offload", "cpu_offload_gb", 4):
        module = fused_moe(layer)
        for _ in range(3):
            lent = {name: own.detach().clone() for name, own in module.named_parameters()}
            alive = [weakref.ref(tensor.untyped_storage()) for tensor in lent.values()]
            dispatched = StandardDispatchOutput(x.clone(), None, topk)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "forward", lambda given: module.quant_method.apply(module, given), raising=False)
                result = torch.func.functional_call(module, lent, (dispatched,)).hidden_states
            assert same_bits(result, expected)
            del lent, dispatched
            assert len(alive) == 2 and not any(storage() is not None for storage in alive)


@has("enable_elastic_expert_backup")
@pytest.mark.parametrize("kind", ["bf16", "fp8_block", "fp8_tensor"])
def test_bytes_of_a_checkpoint_in_prepared_weights(kind: str, rng: torch.Generator) -> None:
    """--enable-elastic-expert-backup writes them there after a rank is lost."""
    topk = make_routing("uniform", 5, OF_FORMATS.experts, OF_FORMATS.top_k, rng)
    with (
        server(),
        argument("exec.moe", "elastic_ep_backend", "mooncake"),
        argument("exec.moe", "enable_elastic_expert_backup", True),
    ):
        module = filled(empty(*CHECKPOINTS[kind]), rng)
        if kind in PLAIN:
            module.quant_method.process_weights_after_loading(module)
            run(module, make_x(5, OF_FORMATS, torch.bfloat16, "cpu", rng), *topk)
            return
        with pytest.raises(NotImplementedError, match="not served with --enable-elastic-expert-backup"):
            module.quant_method.process_weights_after_loading(module)


EARLY = [
    place for place in ("bailing_moe", "sarvam_moe", "llada2", "qwen3_moe") if sources.names(f"srt.models.{place}")
]


def lists_early(place: str) -> bool:
    return not (
        place == "qwen3_moe" or (place == "llada2" and capabilities.order(VERSION) >= capabilities.order("0.5.18"))
    )


@pytest.mark.parametrize("place", EARLY)
@pytest.mark.parametrize("kind", ["fp8_block", "fp8_tensor"])
def test_models_that_list_their_experts_before_they_are_prepared(kind: str, place: str, rng: torch.Generator) -> None:
    """--enable-eplb moves what a model lists. Tables that are made later would stay with another expert."""
    models = importlib.import_module(f"sglang.srt.models.{place}")
    (block_class,) = (own for name, own in vars(models).items() if name.endswith("SparseMoeBlock"))
    block = block_class.__new__(block_class)
    nn.Module.__init__(block)
    with server(), argument("exec.moe", "enable_eplb", True):
        block.experts = module = filled(empty(*CHECKPOINTS[kind]), rng)
        if kind == "fp8_tensor" and lists_early(place):
            with pytest.raises(
                NotImplementedError, match=rf"--enable-eplb in a model of srt\.models\.{place}: it lists"
            ):
                module.quant_method.process_weights_after_loading(module)
            return
        module.quant_method.process_weights_after_loading(module)


# Variables


def test_layers_that_a_variable_leaves_unquantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLANG_FP8_IGNORED_LAYERS, with experts among the layers."""
    first, second = (f"model.layers.{number}.mlp.experts" for number in range(2))
    monkeypatch.setenv("SGLANG_FP8_IGNORED_LAYERS", first)
    checkpoint = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config = get_quantization_config("oxmoe").from_config(checkpoint)
    with server():
        made = [
            FusedMoE(4, 128, 128, 0, 2, params_dtype=torch.bfloat16, quant_config=config, prefix=prefix)
            for prefix in (first, second)
        ]
    assert [type(layer.quant_method).__name__ for layer in made] == [
        "OxmoeUnquantizedFusedMoEMethod",
        "OxmoeFp8MoEMethod",
    ]


# All-to-alls


UNSERVED = [
    name for name in ("flashinfer", "megamoe", "flashinfer_megamoe", "mori") if name in capabilities.a2a_backends()
]


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_an_all_to_all_is_refused_before_the_checkpoint_is_read(kind: str) -> None:
    for name in UNSERVED:
        with server(a2a=name), pytest.raises(NotImplementedError, match=f"--moe-a2a-backend {name}.* not served"):
            empty(*CHECKPOINTS[kind])


# Kernels of others


def test_lora_on_a_layer_is_refused_by_name(rng: torch.Generator) -> None:
    """SGLang's own layer for it looks for a runner, and would find none of its own."""
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    with server():
        module = fused_moe(operands(SHAPE, 1, "cpu", rng)[0])
        with pytest.raises(RuntimeError, match="LoRA on MoE layers is not served; start without LoRA or without moe"):
            FusedMoEWithLoRA(module, SimpleNamespace(name="triton", max_loras_per_batch=1))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=has(name)) for name in ("enable_nvidia_megakernel", "enable_amd_monokernel")],
)
def test_kernels_of_a_whole_model_are_refused(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    with server(), argument("exec.kernel", name, True):
        with pytest.raises(RuntimeError, match=f"with {flag} kernels of the whole model run .*start without {flag}"):
            nn.ModuleList([LinearBase(8, 8)])


# The all-reduce


def check_allreduce(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.utils

    monkeypatch.setattr(sglang.srt.utils, "is_flashinfer_available", lambda: True)
    adapter = SimpleNamespace(allreduce_fusion=lambda: asked, FUSION_FLAG=ADAPTER.FUSION_FLAG)
    layers.check_allreduce(adapter)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_all_reduce_is_one_line(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang may have its fusion on and never call the operator. Then the line is missing."""
    group = SimpleNamespace(unique_name="tp:0", rank_in_group=rank)
    for name, value in (
        ("group_of", lambda _: group),
        ("spans_hosts", lambda _: False),
        ("_workspace", lambda *_: None),
        ("allreduce_fusion", lambda *_, **__: None),
    ):
        monkeypatch.setattr(collective, name, value)
    monkeypatch.setattr(collective, "_ran", set())
    x, weight = torch.zeros(2, 8), torch.ones(8)
    with caplog.at_level(logging.INFO, logger="oxmoe.sglang"):
        for _ in range(2):
            collective._fused(x, x, weight)
    assert caplog.messages == [
        f"oxmoe: allreduce: {capabilities.FUSED} ran on oxmoe, in group tp:0" for _ in range(rank, 1)
    ]


def test_two_streams_in_one_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang gives prefills a group of their own in place of the tensor-parallel one, but no other groups."""
    with server():
        check_allreduce(True, monkeypatch)
        with argument("disagg", "enable_pdmux", True):
            with pytest.raises(
                RuntimeError, match=r"with --enable-pdmux .*start without --enable-pdmux or without all"
            ):
                check_allreduce(True, monkeypatch)


def test_deterministic_inference_turns_the_fusion_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(), argument("exec.deterministic", "enable_deterministic_inference", True):
        message = "which --enable-deterministic-inference turns off; start without allreduce"
        with pytest.raises(RuntimeError, match=message):
            check_allreduce(False, monkeypatch)


@pytest.mark.skipif(not HAS_CUTEDSL, reason="this SGLang has no such backend")
def test_kernels_that_are_called_in_another_way_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "flashinfer_allreduce_fusion_backend"
    with server():
        with argument("exec.comm", name, "auto"):
            check_allreduce(True, monkeypatch)
        with argument("exec.comm", name, "cutedsl"):
            message = "with --flashinfer-allreduce-fusion-backend cutedsl SGLang never calls .*start with"
            with pytest.raises(RuntimeError, match=message):
                check_allreduce(True, monkeypatch)


def test_a_variable_that_turns_the_fusion_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_FLASHINFER_MNNVL_CUTEDSL_AR_FUSION", "1")
    with server(), pytest.raises(RuntimeError, match="which SGLANG_FLASHINFER_MNNVL_CUTEDSL_AR_FUSION turns off"):
        check_allreduce(False, monkeypatch)
