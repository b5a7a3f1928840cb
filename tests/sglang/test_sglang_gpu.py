"""On a GPU: a layer on oxmoe beside the same layer on SGLang's own kernels, eagerly and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import GPT_OSS, Shape, make_layer, make_x, tie_free_logits
from fp8_cases import NORM, Fp8, fp8_draws, make_fp8
from oxmoe import reference
from oxmoe.testing import relative_norm, same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.moe.moe_runner.base import PermuteMethodPool
from sglang.srt.layers.moe.moe_runner.triton_kernels import TritonKernelsRunnerCore
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopK
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config

import oxmoe
from mxfp4_blocks import Blocks
from sglang_server import NEW, FusedMoE, fused_moe, installed, server
from test_sglang_fp8 import expected, fp8_layer
from test_sglang_swaps import GPT_OSS_CONFIG, mxfp4_layer

pytestmark = pytest.mark.gpu

QWEN3 = Shape("qwen3-30b-a3b", 128, 8, 2048, 768)
GPT_OSS_20B = Shape("gpt-oss-20b", 32, 4, 2880, 2880, True, tuple(GPT_OSS.items()))
FEW_OF_DSV3 = Shape("dsv3-tp8-32-experts", 32, 8, 7168, 256)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if find_spec("sgl_kernel") is None:
        pytest.skip("needs sgl_kernel, on which SGLang's own layers stand")


def close(ours: Tensor, theirs: Tensor) -> None:
    """Compares two implementations that round at the same places, in other orders of summation."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    difference = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    assert difference < 8e-3, f"relative norm {difference:.2e}"


def captured(call: Callable[[], Tensor], x: Tensor, other: Tensor, *, exact: bool = False) -> Tensor:
    """Captures a graph with what x held, after one call, and returns its result for `other`. exact: the bits must be
    equal."""
    held = x.clone()
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    x.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    result = result.clone()
    assert not exact or same_bits(result, call())
    x.copy_(held)
    return result


@pytest.mark.parametrize("tokens", [1, 5, 64, 333])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(QWEN3, torch.bfloat16), (GPT_OSS_20B, torch.bfloat16), (QWEN3, torch.float16)],
    ids=["qwen3-bf16", "gpt-oss-bf16", "qwen3-f16"],
)
def test_16_bit_layer_beside_sglangs_triton(
    shape: Shape, dtype: torch.dtype, tokens: int, rng: torch.Generator
) -> None:
    layer = make_layer(shape, dtype, "cuda", rng, bias_dtype=torch.float32)
    x, other = (make_x(tokens, shape, dtype, "cuda", rng) for _ in range(2))
    weights, ids = oxmoe.topk(tie_free_logits(tokens, shape.experts, rng).cuda(), shape.top_k)
    topk = StandardTopKOutput(weights, ids, None)
    options: dict[str, Any] = {"inplace": False, **(GPT_OSS_CONFIG if shape.bias else {})}
    with server():
        theirs, ours = (fused_moe(layer, quantized=quantized, **options) for quantized in (False, True))
        close(ours(x, topk), theirs(x, topk))
        graphs = [
            captured(lambda module=module: module(x, topk), x, other, exact=module is ours) for module in (ours, theirs)
        ]
        close(*graphs)


# The bar of SGLang's distance from a reference that rounds where oxmoe does. SGLang rounds gate and up to bf16 before
# it multiplies them, and some e4m3 codes of the product are then others: that alone is 1.3 to 1.7 % in norm.
SGLANGS_NORM = 4e-2


def plain(layer: Fp8) -> tuple[Tensor, Tensor]:
    """Returns fp32 weights."""
    pairs = ((layer.w13, layer.w13_scale), (layer.w2, layer.w2_scale))
    w13, w2 = (codes.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2) for codes, scale in pairs)
    return w13, w2


@pytest.mark.parametrize("tokens", [1, 5, 64, 333])
@pytest.mark.parametrize("shape", [QWEN3, FEW_OF_DSV3], ids=lambda shape: shape.name)
def test_fp8_layer_beside_sglangs_triton(shape: Shape, tokens: int, rng: torch.Generator) -> None:
    """Both quantise rows of x and of the activated output for each 128 columns. oxmoe is no farther from the layer with
    unquantised tokens than SGLang is."""
    layer = make_fp8(shape, "cuda", rng)
    x, other = (layer.x(tokens, rng) for _ in range(2))
    weights, ids = oxmoe.topk(tie_free_logits(tokens, shape.experts, rng).cuda(), shape.top_k)
    topk = StandardTopKOutput(weights, ids, None)
    with server():
        theirs, ours = (fp8_layer(layer, name, inplace=False) for name in ("fp8", "oxmoe"))
        eager = ours(x, topk), theirs(x, topk)
        graphs = [
            captured(lambda module=module: module(x, topk), x, other, exact=module is ours) for module in (ours, theirs)
        ]
        more = [(drawn, ours(drawn, topk), theirs(drawn, topk)) for drawn in fp8_draws(x, shape.intermediate)[1:]]
    calls = [(x, *eager), (other, *graphs)]
    # Few tokens count together: in one token a few codes that round to their neighbours are much of the norm.
    for part in [[*calls, *more]] if more else [[call] for call in calls]:
        tokens_of, results, sglangs = zip(*part, strict=True)
        result, sglang = torch.cat(results), torch.cat(sglangs)
        rounded = torch.cat([expected(layer, drawn, topk) for drawn in tokens_of])
        assert relative_norm(result, rounded) < NORM and relative_norm(sglang, rounded) < SGLANGS_NORM
        exact = torch.cat([reference.moe(drawn.float(), *plain(layer), weights, ids) for drawn in tokens_of])
        assert relative_norm(result, exact) <= 1.1 * relative_norm(sglang, exact)
    with server("deep_gemm"):
        assert same_bits(fp8_layer(layer, "fp8")(x, topk), eager[0]), "under SGLang's own name"


def stock_mxfp4_layer(blocks: Blocks) -> FusedMoE:
    """Returns SGLang's own MXFP4 layer: swizzled after loading for triton_kernels, or with the backend triton made
    bf16."""
    with torch.device("cuda"):
        module = FusedMoE(
            num_experts=blocks.experts,
            hidden_size=blocks.hidden,
            intermediate_size=blocks.intermediate,
            layer_id=0,
            top_k=4,
            params_dtype=torch.bfloat16,
            with_bias=True,
            quant_config=Mxfp4Config(is_checkpoint_mxfp4_serialized=True),
            **GPT_OSS_CONFIG,
        )
    for name, *parts in zip(("w13", "w2"), blocks.codes, blocks.scales, blocks.biases, strict=True):
        for suffix, tensor in zip(("", "_scale", "_bias"), parts, strict=True):
            parameter = getattr(module, f"{name}_weight{suffix}")
            full = f"experts.{name}_weight{suffix}"
            parameter.weight_loader(parameter, tensor, weight_name=full, shard_id=None, expert_id=None)
    module.quant_method.process_weights_after_loading(module)
    return module


def stock(module: FusedMoE, x: Tensor, topk: Any) -> Tensor:
    """Runs SGLang's own core on what the layer hands over, whatever is registered under its name."""
    given = SimpleNamespace(
        run=lambda dispatched, info: (dispatched, info), runner_backend=module.quant_method.runner.runner_backend
    )
    runner, module.quant_method.runner = module.quant_method.runner, given
    dispatched, info = module.quant_method.apply(module, module.dispatcher.dispatch(x, topk))
    module.quant_method.runner = runner
    core = TritonKernelsRunnerCore(module.moe_runner_config)
    state: dict[str, Any] = {}
    names = dispatched.format.value, core.runner_backend.value
    prepared = PermuteMethodPool.get_pre_permute(*names)(dispatched, info, module.moe_runner_config, state)
    output = core.run(prepared, info, state)
    finish = PermuteMethodPool.get_post_permute(names[1], names[0])
    return finish(output, info, module.moe_runner_config, state).hidden_states


@pytest.mark.parametrize("tokens", [1, 5, 64, 333])
@pytest.mark.parametrize("size", [(8, 256, 256), (8, 2880, 2880)], ids=["small", "gpt-oss"])
def test_mxfp4_layer_beside_triton_kernels(size: tuple[int, int, int], tokens: int, rng: torch.Generator) -> None:
    pytest.importorskip("triton_kernels.matmul" if NEW else "triton_kernels.matmul_ogs")
    blocks = Blocks(*size, "cuda", rng, bytes_=(118, 121))
    x, other = (torch.randn(tokens, size[1], generator=rng).bfloat16().cuda() for _ in range(2))
    logits = tie_free_logits(tokens, size[0], rng).cuda()
    with server("triton_kernel"):
        theirs, ours = stock_mxfp4_layer(blocks), mxfp4_layer(blocks)
        choose = TopK(top_k=4, layer_id=0)
        if hasattr(choose, "bind_runner_backend"):
            choose.bind_runner_backend(theirs.runner_backend)
        topk = choose.forward_cuda(x, logits)
        expected = stock(theirs, x, topk)
        close(theirs(x, topk), expected)  # the swap under SGLang's own name, on the same swizzled weights
        close(ours(x, topk), expected)  # oxmoe's own method
        close(
            captured(lambda: theirs(x, topk), x, other, exact=True),
            captured(lambda: stock(theirs, x, topk), x, other),
        )


@pytest.mark.parametrize("tokens", [1, 5, 64, 333])
def test_mxfp4_layer_beside_sglangs_triton(tokens: int, rng: torch.Generator) -> None:
    """SGLang's own layer runs on the same weights made bf16, which have exactly the numbers of oxmoe's."""
    pytest.importorskip("triton_kernels.numerics_details.mxfp")
    blocks = Blocks(8, 2880, 2880, "cuda", rng, bytes_=(118, 121))
    x, other = (torch.randn(tokens, 2880, generator=rng).bfloat16().cuda() for _ in range(2))
    weights, ids = oxmoe.topk(tie_free_logits(tokens, 8, rng).cuda(), 4)
    topk = StandardTopKOutput(weights, ids, None)
    with server("triton"):
        theirs, ours = stock_mxfp4_layer(blocks), mxfp4_layer(blocks)
        close(ours(x, topk), theirs(x.clone(), topk))
        close(
            captured(lambda: ours(x, topk), x, other, exact=True),
            captured(lambda: theirs(x.clone(), topk), x, other),
        )
