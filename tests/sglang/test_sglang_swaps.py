"""oxmoe under SGLang's own runner names, on the weights that its layers hold for them; and its MXFP4 method."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import GPT_OSS, Shape, make_layer, tie_free_logits
from oxmoe import reference
from oxmoe.sglang import capabilities, sources
from oxmoe.testing import assert_close, assert_close_ulp, same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.moe.moe_runner.deep_gemm import DeepGemmMoeQuantInfo
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.moe_runner.triton_kernels import TritonKernelsQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import BypassedTopKOutput, StandardTopKOutput, TopKConfig, TritonKernelTopKOutput
from sglang.srt.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

from mxfp4_blocks import SWIGLU, Blocks, experts_of
from sglang_server import (
    SHAPE,
    FusedMoE,
    MoeRunner,
    MoeRunnerBackend,
    MoeRunnerConfig,
    addresses_of,
    fused_moe,
    installed,
    only_cores,
    operands,
    server,
)

GPT_OSS_BF16 = Shape("gpt-oss", 8, 4, 120, 120, True, tuple(GPT_OSS.items()))
# Whether triton_kernels' form of a top-k result is the newer one, which came with another layout of MXFP4 weights.
RAGGED = "a_ragged_metadata" in TritonKernelTopKOutput._fields
GPT_OSS_CONFIG = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


def config(experts: int = 8, **options: Any) -> MoeRunnerConfig:
    return MoeRunnerConfig(num_experts=experts, num_local_experts=experts, top_k=2, **options)


def routed(form: str, x: Tensor, logits: Tensor, top_k: int) -> Any:
    """Returns one routing in each form that SGLang's top-k has."""
    if form == "bypassed":
        return BypassedTopKOutput(x, logits, TopKConfig(top_k=top_k))
    if form == "standard":
        weights, ids = oxmoe.topk(logits, top_k)
        return StandardTopKOutput(weights, ids, logits)
    data, gather, scatter = oxmoe.routing(logits, top_k)
    if RAGGED:
        tables = data.expt_data, gather.src_indx // top_k, scatter.dst_indx, data.gate_scal, top_k
        return TritonKernelTopKOutput(*tables)
    return TritonKernelTopKOutput(data, gather, scatter)


# --moe-runner-backend triton_kernel and deep_gemm: whole layers of 16-bit weights.


def forward(module: FusedMoE, x: Tensor, topk: Any) -> Tensor:
    """Runs the layer as it runs on CUDA: SGLang's own method has other code for CPU tensors."""
    if x.is_cuda:
        return module(x, topk)
    dispatched = module.dispatcher.dispatch(x, topk)
    return module.quant_method.forward_cuda(layer=module, dispatch_output=dispatched).hidden_states


@pytest.mark.parametrize("form", ["triton_kernel", "standard", "bypassed"])
@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize(
    ("shape", "options"),
    [(SHAPE, {}), (SHAPE, {"routed_scaling_factor": 2.5}), (GPT_OSS_BF16, GPT_OSS_CONFIG)],
    ids=["plain", "scaled", "gpt-oss"],
)
def test_triton_kernel_layer(
    device: str, form: str, tokens: int, shape: Shape, options: dict[str, Any], rng: torch.Generator
) -> None:
    layer, x, _, _ = operands(shape, tokens, device, rng)
    logits = tie_free_logits(tokens, shape.experts, rng).to(device)
    if tokens == 0 and form == "triton_kernel":
        pytest.skip("triton_kernels' tables have rows")
    with server("triton_kernel"):
        module = fused_moe(layer, quantized=False, **options)
        before = x.clone()
        result = forward(module, x, routed(form, x, logits, shape.top_k))
    expected = reference.moe(
        x, layer.w13, layer.w2, router_logits=logits, top_k=shape.top_k, **layer.reference_options, **_scale(options)
    )
    assert_close_ulp(result, expected)
    assert same_bits(x, before), "this runner leaves its input"


def _scale(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("routed_scaling_factor",) if name in options}


@pytest.mark.parametrize("options", [{}, {"routed_scaling_factor": 2.5}, {"swiglu_limit": 0.5}], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_deep_gemm_layer(device: str, tokens: int, options: dict[str, Any], rng: torch.Generator) -> None:
    layer, x, weights, ids = operands(SHAPE, tokens, device, rng, "holes")
    with server("deep_gemm"):
        module = fused_moe(layer, quantized=False, **options)
        result = forward(module, x, StandardTopKOutput(weights, ids, None))
    limit = {"limit": 0.5, "clamp": "before"} if "swiglu_limit" in options else {}
    assert_close_ulp(result, reference.moe(x, layer.w13, layer.w2, weights, ids, **_scale(options), **limit))


def run(backend: str, info: Any, x: Tensor, topk: Any, runner_config: MoeRunnerConfig) -> Tensor:
    with server(backend):
        runner = MoeRunner(MoeRunnerBackend(backend), runner_config)
        return runner.run(StandardDispatchOutput(x, None, topk), info).hidden_states


@pytest.mark.parametrize(
    ("backend", "info", "options", "message"),
    [
        ("deep_gemm", {"gemm": True}, GPT_OSS_CONFIG, "deep_gemm hands over no biases"),
        (
            "deep_gemm",
            {"gemm": True, "w13_scale": torch.ones(8), "block_shape": [128, 128]},
            {},
            "of torch.bfloat16 with",
        ),
        ("triton_kernel", {"w13_bias": torch.ones(8, 192)}, GPT_OSS_CONFIG, r"with w13_bias and gemm1_alpha 1\.702"),
        ("triton_kernel", {}, GPT_OSS_CONFIG, r"with no bias and gemm1_alpha 1\.702"),
        ("triton_kernel", {}, {"no_combine": True, "inplace": False}, "no_combine is not served"),
    ],
    ids=["gpt-oss", "fp8", "one-bias", "no-bias", "no-combine"],
)
def test_refused(backend: str, info: dict[str, Any], options: dict[str, Any], message: str) -> None:
    fields = dict(info)
    weights = torch.zeros(8, 192, 128, dtype=torch.bfloat16), torch.zeros(8, 128, 96, dtype=torch.bfloat16)
    if fields.pop("gemm", False):
        quant_info = DeepGemmMoeQuantInfo(*weights, use_fp8=True, **fields)
    else:
        quant_info = TritonKernelsQuantInfo(*(weight.transpose(1, 2) for weight in weights), **fields)
    topk = StandardTopKOutput(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int32), None)
    with pytest.raises(NotImplementedError, match=message):
        run(backend, quant_info, torch.zeros(1, 128, dtype=torch.bfloat16), topk, config(**options))


@only_cores
def test_core_refuses_an_all_to_all() -> None:
    with server("deep_gemm", a2a="mori"):
        with pytest.raises(NotImplementedError, match="--moe-a2a-backend mori is not served; served are none, deepep"):
            MoeRunner(MoeRunnerBackend.DEEP_GEMM, MoeRunnerConfig())


# The runner "oxmoe"


@pytest.fixture
def ours() -> Iterator[Any]:
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

    with server("oxmoe"):
        yield resolve_moe_runner_backend("oxmoe")


@only_cores
@pytest.mark.parametrize("keep", [False, True])
def test_runner_without_combine(ours: Any, device: str, keep: bool, rng: torch.Generator) -> None:
    if keep and not hasattr(MoeRunnerConfig, "no_combine_keep_router_weight"):
        pytest.skip("this SGLang never weights what is not combined")
    layer, x, weights, ids = operands(SHAPE, 7, device, rng)
    options = {"no_combine_keep_router_weight": True} if keep else {}
    runner = MoeRunner(ours, config(inplace=False, no_combine=True, **options))
    dispatched = StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids, None))
    result = runner.run(dispatched, TritonMoeQuantInfo(layer.w13, layer.w2)).hidden_states
    expected = reference.moe(x, layer.w13, layer.w2, weights, ids, no_combine=True, keep_router_weight=keep)
    assert_close_ulp(result, expected)


@only_cores
def test_runner_takes_interleaved_rows(ours: Any, device: str, rng: torch.Generator) -> None:
    layer, x, weights, ids = operands(SHAPE, 7, device, rng)
    info = TritonMoeQuantInfo(layer.w13, layer.w2, fuse_swiglu_interleaved=True)
    dispatched = StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids, None))
    result = MoeRunner(ours, config(inplace=False)).run(dispatched, info).hidden_states
    assert_close_ulp(result, reference.moe(x, layer.w13, layer.w2, weights, ids, layout="interleaved"))


@only_cores
@pytest.mark.parametrize("name", ["oxmoe", "triton_kernel", "deep_gemm", "flashinfer_mxfp4"])
def test_core_names_its_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.moe.moe_runner.base import FusedOpPool
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

    # Another test of this process may have imported SGLang's module that registers this function. A server has not.
    monkeypatch.delitem(FusedOpPool._fused_funcs, ("none", name), raising=False)
    with server(name):
        runner = MoeRunner(resolve_moe_runner_backend(name), MoeRunnerConfig())
    assert runner.runner_core.oxmoe and runner.runner_core.runner_backend.value == name
    assert runner.fused_func is None


# MXFP4 experts as --moe-runner-backend triton_kernel holds them


@pytest.mark.parametrize("form", ["triton_kernel", "standard", "bypassed"])
@pytest.mark.parametrize("tokens", [1, 33])
def test_triton_kernel_mxfp4(device: str, form: str, tokens: int, rng: torch.Generator) -> None:
    blocks = Blocks(8, 256, 128, device, rng)
    given = experts_of(blocks, "3.8" if RAGGED else "3.6")
    info = TritonKernelsQuantInfo(given["w1"], given["w2"], given["b1"], given["b2"], given["w1_pcg"], given["w2_pcg"])
    x = torch.randn(tokens, 256, generator=rng).bfloat16().to(device)
    logits = tie_free_logits(tokens, 8, rng).to(device)
    result = run("triton_kernel", info, x, routed(form, x, logits, 2), config(**GPT_OSS_CONFIG))
    weights, ids = oxmoe.topk(logits, 2)
    assert_close_ulp(result, blocks.expected(x, weights, ids, **SWIGLU, layout="interleaved"))


# MXFP4 experts as --moe-runner-backend flashinfer_mxfp4 holds them on Hopper


_RUNNERS = "srt.layers.moe.moe_runner"
CUTLASS_MXFP4 = {
    f"{_RUNNERS}.flashinfer_cutlass": "FlashInferCutlassMxfp4MoeQuantInfo",
    f"{_RUNNERS}.flashinfer_mxfp4": "FlashInferMxfp4CutlassMoeQuantInfo",
}
OF_CUTLASS = [(module, name) for module, name in CUTLASS_MXFP4.items() if name in sources.names(module)][:1]
only_cutlass = pytest.mark.skipif(not OF_CUTLASS, reason="this SGLang calls flashinfer's kernels itself")


def flashinfer_info(blocks: Blocks, release: str, config: MoeRunnerConfig, **fields: Any) -> Any:
    ((module, name),) = OF_CUTLASS
    kind = getattr(importlib.import_module(f"sglang.{module}"), name)
    if "moe_ep_rank" in {field.name for field in dataclasses.fields(kind)}:
        # The configuration does not say it, so this quant_info does.
        size = config.num_experts // config.num_local_experts
        fields |= {"moe_ep_size": size, "moe_ep_rank": size - 1}
    given = blocks.interleaved(release)
    return kind(
        w13_weight=given["fc1_expert_weights"],
        w2_weight=given["fc2_expert_weights"],
        w13_weight_scale=given["quant_scales"][0],
        w2_weight_scale=given["quant_scales"][1],
        w13_bias=given["fc1_expert_biases"],
        w2_bias=given["fc2_expert_biases"],
        **fields,
    )


def expert_parallel(experts: int, rank: int, size: int) -> MoeRunnerConfig:
    """Returns a configuration whose layer is the last of `size` ranks."""
    if not hasattr(MoeRunnerConfig, "moe_ep_rank"):
        return MoeRunnerConfig(num_experts=experts * size, num_local_experts=experts, top_k=2)
    layer = SimpleNamespace(
        **{"moe_tp_size": 1, "moe_tp_rank": 0, "moe_ep_size": size, "moe_ep_rank": rank},
        should_fuse_routed_scaling_factor_in_topk=True,
    )
    return MoeRunnerConfig(num_experts=experts * size, num_local_experts=experts, top_k=2, layer=layer)


@only_cutlass
@pytest.mark.parametrize("form", ["standard", "bypassed"])
@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("size", [1, 2])
def test_flashinfer_mxfp4(device: str, form: str, tokens: int, size: int, rng: torch.Generator) -> None:
    """The layer is that of the last of `size` ranks, and ids are those of all experts."""
    from oxmoe.sglang.experts import Experts

    blocks = Blocks(8, 256, 128, device, rng)
    x = torch.randn(tokens, 256, generator=rng).bfloat16().to(device)
    logits = tie_free_logits(tokens, 8 * size, rng).to(device)
    runner_config = expert_parallel(8, size - 1, size)
    dispatched = StandardDispatchOutput(x, None, routed(form, x, logits, 2))
    result = Experts().run(dispatched, flashinfer_info(blocks, "0.7", runner_config), runner_config)
    assert (result is x) is (tokens == 0)
    weights, ids = oxmoe.topk(logits, 2)
    assert_close_ulp(result, blocks.expected(x, weights, ids, ep_size=size, ep_rank=size - 1))


@only_cutlass
def test_flashinfer_mxfp4_takes_unpadded_tokens(rng: torch.Generator) -> None:
    from oxmoe.sglang.experts import Experts

    blocks = Blocks(8, 256, 128, "cpu", rng)
    x = torch.randn(5, 192, generator=rng).bfloat16()
    logits = tie_free_logits(5, 8, rng)
    dispatched = StandardDispatchOutput(x, None, routed("bypassed", x, logits, 2))
    info = flashinfer_info(blocks, "0.7", expert_parallel(8, 0, 1), padded_hidden=256)
    result = Experts().run(dispatched, info, expert_parallel(8, 0, 1))
    weights, ids = oxmoe.topk(logits, 2)
    padded = torch.nn.functional.pad(x, (0, 64))
    assert_close_ulp(result, blocks.expected(padded, weights, ids)[:, :192])


@only_cutlass
def test_flashinfer_mxfp4_runs_situ(device: str, rng: torch.Generator) -> None:
    """The configuration's activation selects SiTU. SGLang's quant_info may have made SwiGLU's numbers of the two
    bounds."""
    from oxmoe.sglang.experts import Experts

    blocks = Blocks(8, 256, 128, device, rng)
    x = torch.randn(9, 256, generator=rng).bfloat16().to(device)
    logits = tie_free_logits(9, 8, rng).to(device)
    bounds = {"gemm1_alpha": 1.5, "gemm1_clamp_limit": 0.75}
    config = dataclasses.replace(expert_parallel(8, 0, 1), activation="situ", **bounds)
    info = flashinfer_info(blocks, "0.7", config, swiglu_alpha=torch.full((8,), 1.5, device=device))
    result = Experts().run(StandardDispatchOutput(x, None, routed("standard", x, logits, 2)), info, config)
    weights, ids = oxmoe.topk(logits, 2)
    options = {"activation": "situ", "situ_beta": 1.5, "situ_linear_beta": 0.75}
    assert_close_ulp(result, blocks.expected(x, weights, ids, **options))
    config = dataclasses.replace(config, gemm1_clamp_limit=None)
    with pytest.raises(NotImplementedError, match="serves no SiTU without a bound of up"):
        Experts().prepare(info, config)


@only_cutlass
@pytest.mark.parametrize("field", ["mxfp4_weight_global_scale", "w13_humming_residual_scale"])
def test_flashinfer_mxfp4_refuses_8_bit_tokens(field: str, rng: torch.Generator) -> None:
    from oxmoe.sglang.experts import Experts

    if all(field not in sources.members(*of) for of in OF_CUTLASS):
        pytest.skip(f"this SGLang has no {field}")
    given = {field: torch.ones(8)}
    info = flashinfer_info(Blocks(8, 256, 128, "cpu", rng), "0.7", expert_parallel(8, 0, 1), **given)
    with pytest.raises(NotImplementedError, match=f"FlashInferCutlassMxfp4MoeQuantInfo with {field}"):
        Experts().prepare(info, expert_parallel(8, 0, 1))


def halves_of_the_best(gating_output: Tensor, topk: int, **_: Any) -> tuple[Tensor, Tensor]:
    return torch.full((gating_output.shape[0], topk), 0.5), gating_output.topk(topk).indices


@only_cores
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
    info = flashinfer_info(Blocks(8, 128, 128, "cpu", rng, bias=False), "0.7", expert_parallel(8, 0, 1))
    x = torch.randn(7, 128, generator=rng).bfloat16()
    topk = BypassedTopKOutput(x, tie_free_logits(7, 8, rng), TopKConfig(top_k=2, torch_native=True, **chosen))
    result = oxmoe.fused_experts_flashinfer_mxfp4(x, topk, info, MoeRunnerConfig())
    expected = oxmoe.fused_experts_flashinfer_mxfp4(x, topk.to_standard(), info, MoeRunnerConfig())
    assert_close(result, expected, rtol=2e-2, atol=2e-2)
    assert (result == expected).float().mean() > 0.9, "weights may differ in their last bit, experts may not"
    assert oxmoe.fused_experts_flashinfer_mxfp4(x[:0], topk, info, MoeRunnerConfig()).shape == (0, 128)


# MXFP4 checkpoints on the quantization "oxmoe"


def mxfp4_layer(blocks: Blocks, **options: Any) -> FusedMoE:
    """Returns SGLang's layer, loaded by its own loader from a checkpoint's tensors."""
    quant_config = get_quantization_config("oxmoe").from_config({"quant_method": "mxfp4"})
    with torch.device(blocks.device):
        module = FusedMoE(
            num_experts=blocks.experts,
            hidden_size=blocks.hidden,
            intermediate_size=blocks.intermediate,
            layer_id=0,
            top_k=2,
            params_dtype=torch.bfloat16,
            with_bias=True,
            quant_config=quant_config,
            **{**GPT_OSS_CONFIG, **options},
        )
    load_mxfp4(module, blocks)
    return module


def load_mxfp4(module: FusedMoE, blocks: Blocks) -> None:
    tensors = zip(("w13", "w2"), blocks.codes, blocks.scales, blocks.biases, strict=True)
    for name, *parts in tensors:
        for suffix, tensor in zip(("", "_scale", "_bias"), parts, strict=True):
            parameter = getattr(module, f"{name}_weight{suffix}")
            parameter.weight_loader(
                parameter, tensor, weight_name=f"experts.{name}_weight{suffix}", shard_id=None, expert_id=None
            )
    module.quant_method.process_weights_after_loading(module)


@pytest.mark.parametrize("backend", ["auto", "triton_kernel"])
@pytest.mark.parametrize("intermediate", [128, 96], ids=["whole", "padded"])
@pytest.mark.parametrize("form", ["triton_kernel", "standard", "bypassed"])
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_mxfp4_checkpoint(
    device: str, tokens: int, form: str, intermediate: int, backend: str, rng: torch.Generator
) -> None:
    """SGLang chooses triton_kernel for GPT-OSS if it finds triton_kernels."""
    if tokens == 0 and form == "triton_kernel":
        pytest.skip("triton_kernels' tables have rows")
    blocks = Blocks(8, 256, intermediate, device, rng)
    x = torch.randn(tokens, 256, generator=rng).bfloat16().to(device)
    logits = tie_free_logits(tokens, 8, rng).to(device)
    weights, ids = oxmoe.topk(logits, 2)
    expected = blocks.expected(x, weights, ids, **SWIGLU, layout="interleaved", routed_scaling_factor=2.5)
    with server(backend):
        module = mxfp4_layer(blocks, routed_scaling_factor=2.5)
        before = x.clone()
        result = module(x, routed(form, x, logits, 2))
    assert_close_ulp(result, expected)
    assert same_bits(x, before)


def test_mxfp4_checkpoint_takes_holes(device: str, rng: torch.Generator) -> None:
    blocks = Blocks(8, 256, 128, device, rng)
    x = torch.randn(9, 256, generator=rng).bfloat16().to(device)
    weights = torch.rand(9, 2, generator=rng).to(device)
    ids = torch.randint(-1, 8, (9, 2), generator=rng, dtype=torch.int32).to(device)
    with server():
        result = mxfp4_layer(blocks)(x, StandardTopKOutput(weights, ids, None))
    assert_close_ulp(result, blocks.expected(x, weights, ids, **SWIGLU, layout="interleaved"))


@pytest.mark.gpu
def test_mxfp4_checkpoint_is_packed_in_its_own_memory(rng: torch.Generator) -> None:
    blocks = Blocks(8, 256, 128, "cuda", rng)
    with server():
        module = mxfp4_layer(blocks)
    weights = module.quant_method.weights
    assert weights.w13_packed[0].data_ptr() == module.w13_weight.data_ptr()
    assert weights.w2_packed[0].data_ptr() == module.w2_weight.data_ptr()


@pytest.mark.parametrize("hidden", [256, 288], ids=["whole", "a-second-copy"])
def test_mxfp4_weights_are_updated_in_place(device: str, hidden: int, rng: torch.Generator) -> None:
    """CUDA graphs know addresses: after an update every tensor is where it was, packed in place or not."""
    first, second = (Blocks(8, hidden, 128, device, rng, bytes_=bytes_) for bytes_ in ((120, 124), (123, 127)))
    x = torch.randn(9, hidden, generator=rng).bfloat16().to(device)
    logits = tie_free_logits(9, 8, rng).to(device)
    with server():
        module = mxfp4_layer(first)
        addresses = addresses_of(module.quant_method.weights)
        module.quant_method.restore_weights_before_loading(module)
        load_mxfp4(module, second)
        assert addresses_of(module.quant_method.weights) == addresses
        result = module(x, routed("standard", x, logits, 2))
    assert_close_ulp(result, second.expected(x, *oxmoe.topk(logits, 2), **SWIGLU, layout="interleaved"))


@pytest.mark.parametrize("kind", ["mxfp4", "triton_kernel"])
@pytest.mark.gpu
def test_layer_in_cuda_graph(kind: str, rng: torch.Generator) -> None:
    """A graph takes the layer after one call; replays follow x."""
    blocks = Blocks(8, 256, 128, "cuda", rng)
    x, logits = torch.randn(5, 256, generator=rng).bfloat16().cuda(), tie_free_logits(5, 8, rng).cuda()
    topk = routed("standard", x, logits, 2)
    graph = torch.cuda.CUDAGraph()
    with server("auto" if kind == "mxfp4" else "triton_kernel"):
        if kind == "mxfp4":
            module = mxfp4_layer(blocks)
        else:
            module = fused_moe(make_layer(SHAPE, torch.bfloat16, "cuda", rng), quantized=False)
            x = x[:, : SHAPE.hidden].contiguous()
            # Weights are transposed at the first call, and a capture says so.
            with pytest.raises(RuntimeError, match="prepared at its first call"), torch.cuda.graph(graph):
                module(x, topk)
        module(x, topk)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = module(x, topk)
        x.copy_(x.roll(1, 0))
        graph.replay()
        assert same_bits(result, module(x, topk))


@pytest.mark.skipif(capabilities.layer_decides(), reason="the layer's own runner decides how this SGLang loads it")
def test_quantization_refuses_a_backend_that_transposes(rng: torch.Generator) -> None:
    layer = operands(SHAPE, 1, "cpu", rng)[0]
    with (
        server("triton_kernel"),
        pytest.raises(NotImplementedError, match="loads the weights of every layer transposed"),
    ):
        fused_moe(layer)


def test_mxfp4_checkpoint_refuses_other_rows(rng: torch.Generator) -> None:
    with server(), pytest.raises(NotImplementedError, match="MXFP4 checkpoint without gemm1_alpha"):
        mxfp4_layer(Blocks(8, 256, 128, "cpu", rng), gemm1_alpha=None)


def test_mxfp4_checkpoint_refuses_other_dtypes() -> None:
    with server(), pytest.raises(NotImplementedError, match=r"need --dtype bfloat16, got torch\.float16"):
        FusedMoE(
            num_experts=8,
            hidden_size=64,
            intermediate_size=64,
            layer_id=0,
            top_k=2,
            params_dtype=torch.float16,
            quant_config=get_quantization_config("oxmoe").from_config({"quant_method": "mxfp4"}),
        )


@pytest.mark.parametrize(
    ("checkpoint", "asked", "expected"),
    [
        ({"quant_method": "mxfp4"}, None, "oxmoe"),
        ({"quant_method": "mxfp4"}, "mxfp4", "oxmoe"),
        ({"quant_method": "mxfp4"}, "oxmoe", "oxmoe"),
        ({"quant_method": "mxfp4"}, "quark_mxfp4", None),
        ({"quant_method": "w8a8_fp8"}, None, None),
        ({"quant_method": "w8a8_fp8"}, "oxmoe", None),
    ],
    ids=str,
)
def test_checkpoints_that_are_ours(checkpoint: dict[str, Any], asked: str | None, expected: str | None) -> None:
    """ModelConfig asks every quantization in this way."""
    answers = {name: method.override_quantization_method(checkpoint, asked) for name, method in _methods().items()}
    assert answers["oxmoe"] == expected


def _methods() -> dict[str, Any]:
    return {name: method for name, method in QUANTIZATION_METHODS.items() if hasattr(method, "get_name")}


def test_quantization_refuses_other_checkpoints() -> None:
    with pytest.raises(
        NotImplementedError, match="no kernel for a checkpoint of bitsandbytes; served are bf16, f16, mxfp4, mxfp8"
    ):
        get_quantization_config("oxmoe").from_config({"quant_method": "bitsandbytes"})


def test_a_gpt_oss_checkpoint_comes_to_us(tmp_path: Path) -> None:
    """A config.json leads to the layers' method by SGLang's own code, without a flag."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.weight_utils import get_quant_config

    checkpoint = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 256,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["full_attention"],
        "vocab_size": 1024,
        "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (tmp_path / "config.json").write_text(json.dumps(checkpoint))
    with server():
        model = ModelConfig(model_path=str(tmp_path), dtype="bfloat16")
        quant_config = get_quant_config(model, LoadConfig(), {})
        assert model.quantization == "oxmoe"
        assert quant_config.get_name() == "mxfp4", "by which GPT-OSS chooses its loader"
        options: dict[str, Any] = {"num_experts": 8, "hidden_size": 256, "intermediate_size": 128, "layer_id": 0}
        layer = FusedMoE(
            **options, **GPT_OSS_CONFIG, top_k=2, params_dtype=torch.bfloat16, with_bias=True, quant_config=quant_config
        )
    assert layer.quant_method.oxmoe
