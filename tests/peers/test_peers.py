"""oxmoe against the projects whose interfaces it has, if they are installed: triton_kernels and SGLang's Triton
kernels."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch

import oxmoe
from cases import MODELS, Shape, make_layer, make_routing, make_x, tie_free_logits
from oxmoe.testing import Bar, assert_close, assert_close_ulp, relative_norm
from oxmoe.tools.bench import layers
from oxmoe.tools.bench.backend import Oxmoe
from oxmoe.tools.bench.peers import SglangTriton, TritonKernels

pytestmark = pytest.mark.gpu


def real_triton_kernels() -> ModuleType:
    """Returns triton_kernels' module. NOTE: an unrelated package of the same name exists: only the real one has
    topk."""
    if importlib.util.find_spec("triton_kernels") is None or importlib.util.find_spec("triton_kernels.topk") is None:
        pytest.skip("triton_kernels is not installed")
    return pytest.importorskip("triton_kernels.topk")


@pytest.mark.parametrize("sm_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens,experts,top_k", [(1, 32, 4), (7, 128, 8), (333, 128, 4), (2000, 64, 2)])
def test_triton_kernels_routing(
    tokens: int, experts: int, top_k: int, dtype: torch.dtype, sm_first: bool, rng: torch.Generator
) -> None:
    topk = real_triton_kernels().topk
    try:
        from triton_kernels.tensor import make_ragged_tensor_metadata
    except ImportError:
        from triton_kernels.tensor_details.ragged_tensor import make_ragged_tensor_metadata
    logits = tie_free_logits(tokens, experts, rng, step=1 / 8).to(dtype).cuda()
    theirs = topk(torch.softmax(logits, -1) if sm_first else logits, top_k, apply_softmax=not sm_first)
    combine, dispatch = theirs.mask_metadata.col_sorted_indx, theirs.mask_metadata.row_sorted_indx
    metadata = make_ragged_tensor_metadata(theirs.mask_metadata.col_sum, dispatch.shape[0])

    data, gather, scatter = oxmoe.routing(logits, top_k, sm_first=sm_first)
    assert torch.equal(gather.src_indx, combine) and torch.equal(gather.dst_indx, dispatch)
    assert torch.equal(scatter.src_indx, dispatch) and torch.equal(scatter.dst_indx, combine)
    assert torch.equal(data.expt_hist, theirs.mask_metadata.col_sum)
    ours = data.expt_data
    assert ours is not None
    their_offsets = getattr(metadata, "slice_offs", None)
    assert torch.equal(ours.slice_offs, metadata.batch_offs if their_offsets is None else their_offsets)
    assert torch.equal(ours.block_offs_data, metadata.block_offs_data)
    assert torch.equal(ours.block_schedule_data, metadata.block_schedule_data)
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert_close(data.gate_scal, theirs.vals.flatten()[combine.long()], rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("tokens", [1, 33, 500])
@pytest.mark.parametrize(
    "shape", [Shape("small", 8, 4, 256, 192), MODELS["qwen3-30b-a3b"]], ids=lambda shape: shape.name
)
def test_sglang_fused_experts(shape: Shape, tokens: int, rng: torch.Generator) -> None:
    reason = SglangTriton.missing("cuda")
    if reason is not None:
        pytest.skip(reason)
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe as theirs

    SglangTriton.prepare()

    layer, x = make_layer(shape, torch.bfloat16, "cuda", rng), make_x(tokens, shape, torch.bfloat16, "cuda", rng)
    topk_output = (*(t.cuda() for t in make_routing("uniform", tokens, shape.experts, shape.top_k, rng)), None)
    config = MoeRunnerConfig(
        num_experts=shape.experts,
        num_local_experts=shape.experts,
        hidden_size=shape.hidden,
        intermediate_size_per_partition=shape.intermediate,
        top_k=shape.top_k,
        inplace=False,
    )
    expected = theirs.fused_experts(x, layer.w13, layer.w2, topk_output, config)
    # SGLang rounds twice more: GEMM1's sums before the activation, and each weighted row before the sum.
    assert_close_ulp(
        oxmoe.fused_experts(x, layer.w13, layer.w2, topk_output, config), expected, Bar(max_ulp=16, ulps=4, share=1e-2)
    )


@pytest.mark.parametrize("tokens", [1, 33, 500])
@pytest.mark.parametrize("size", [256, 2880])
def test_triton_kernels_mxfp4(size: int, tokens: int, rng: torch.Generator) -> None:
    """Both run GPT-OSS's layer on the same MXFP4 weights, from router logits to the combined output."""
    reason = TritonKernels.missing("cuda")
    if reason is not None:
        pytest.skip(reason)
    torch.manual_seed(int(torch.randint(1 << 62, (), generator=rng)))
    shape = layers.Shape(8, 4, size, size, gpt_oss=True)
    weights = layers.make_weights(shape, torch.bfloat16, "cuda", 1, mxfp4=True)
    inputs = layers.make_inputs(shape, tokens, torch.bfloat16, "cuda", 1)
    (ours,), (theirs,) = (backend(shape, weights).calls(inputs) for backend in (Oxmoe, TritonKernels))
    result, expected = ours(), theirs()
    assert result.shape == expected.shape and result.dtype == expected.dtype
    # The sums have another order, and SwiGLU has its own roundings.
    assert relative_norm(result, expected) < 1e-2
