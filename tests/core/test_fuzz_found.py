"""Faults that `fuzz_api.py` found, each as a call of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import oxmoe
import public_calls
from fuzz_dlpack import Foreign
from oxmoe import nvfp4, quantize, reference
from oxmoe.testing import same_bits


def test_routing_of_no_tokens() -> None:
    """Empty tensors have no address, and no slice may be made of one: a build that checks this would end the
    process."""
    data, gather, _ = oxmoe.routing(torch.zeros((0, 4)), 2)
    assert data.expt_hist.tolist() == [0, 0, 0, 0] and gather.src_indx.shape == (0,)


@pytest.mark.parametrize("shape", [(3, 0), (0, 32), (0,)])
def test_quantisers_of_nothing(shape: tuple[int, ...]) -> None:
    codes, scales = quantize.rows_e4m3(torch.zeros(shape, dtype=torch.bfloat16))
    assert codes.shape == shape and scales.shape == shape[:-1]
    codes, scales = quantize.per_token_group_quant_fp8(torch.zeros(shape), 32)
    assert codes.shape == shape and scales.numel() == 0


def test_pack_topk_of_negated_weights() -> None:
    weights, ids = torch.tensor([[0.5, -0.25]], dtype=torch.bfloat16), torch.tensor([[3, -1]])
    negated = torch._neg_view(weights)
    assert negated.is_neg()
    assert oxmoe.pack_topk(negated, ids).equal(oxmoe.pack_topk(-weights, ids))


@pytest.mark.parametrize("one", [-(2**15) - 1, 2**15, 2**31, -(2**63)])
def test_pack_topk_of_ids_beyond_16_bits(one: int) -> None:
    with pytest.raises(ValueError, match=rf"^topk_ids: expected ids from -32768 to 32767, got .*{one}"):
        oxmoe.pack_topk(torch.ones((1, 2)), torch.tensor([[0, one]]))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.float8_e5m2], ids=str)
def test_bias_of_another_dtype(dtype: torch.dtype) -> None:
    weight, scale = torch.zeros((8, 32), dtype=torch.float8_e4m3fn), torch.full((8, 1), 127, dtype=torch.uint8)
    got = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"^bias: expected dtype bfloat16, float16 or float32, got {got}"):
        oxmoe.mxfp8_linear(torch.zeros((3, 32)), weight, scale, bias=torch.zeros(8).to(dtype))
    with pytest.raises(ValueError, match=r"^bias: expected device cpu \(from input\), got meta"):
        oxmoe.mxfp8_linear(torch.zeros((3, 32)), weight, scale, bias=torch.zeros(8, device="meta"))


def test_complex_global_scale() -> None:
    with pytest.raises(ValueError, match=r"^global_scale: expected a real number, got complex64"):
        nvfp4.fp4_quantize(torch.zeros((2, 16)), torch.ones(1, dtype=torch.complex64))


def test_column_major_scales_of_another_package() -> None:
    """The input is an array that has `__dlpack__` and no shape."""
    x = np.arange(3 * 64, dtype=np.float32).reshape(3, 64)
    options = {"column_major_scales": True, "scale_tma_aligned": True}
    results = [quantize.per_token_group_quant_fp8(given, 32, **options) for given in (x, Foreign(x))]
    for of_numpy, of_foreign in zip(*results, strict=True):
        assert of_foreign.shape == of_numpy.shape and np.array_equal(of_foreign, of_numpy)


@pytest.mark.parametrize(
    "given",
    [
        *({"limit": 2**64}, {"alpha": 2**64}, {"beta": 2**64}, {"routed_scaling_factor": 2**64}),
        *({"activation": "situ", "situ_beta": 2**64}, {"activation": "situ", "situ_linear_beta": 2**64}),
    ],
    ids=lambda given: list(given)[-1],
)
def test_the_reference_takes_integers_of_more_than_64_bits(given: dict[str, object]) -> None:
    """They are floats of the layer, to which Python makes them."""
    w13, w2, x, weights = (torch.ones(shape) for shape in ((2, 8, 4), (2, 4, 4), (3, 4), (3, 1)))
    ids = torch.zeros((3, 1), dtype=torch.int32)
    floats = {name: float(value) if isinstance(value, int) else value for name, value in given.items()}
    expected = reference.moe(x, w13, w2, weights, ids, **floats)
    assert reference.moe(x, w13, w2, weights, ids, **given).equal(expected)


def test_the_reference_of_groups_takes_integers_of_more_than_64_bits() -> None:
    x = torch.ones((2, 128))
    (codes, scales), (expected, expected_scales) = (reference.fp8_groups(x, eps=eps) for eps in (2**64, 2.0**64))
    assert same_bits(codes, expected) and scales.equal(expected_scales)
    quantised, theirs = quantize.per_token_group_quant_fp8(x, 128, eps=2**64)
    assert same_bits(quantised, codes) and theirs.equal(scales)


def public(name: str, **changed: Any) -> Any:
    """Makes a right call of a public function with some operands changed."""
    operands = public_calls.MAKERS[name](public_calls.Draws(torch.Generator().manual_seed(3)))
    return getattr(oxmoe, name)(**{**operands, **changed})


def freed(*shape: int) -> torch.Tensor:
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_freed_operands_of_flashinfers_calls() -> None:
    """Reading these ended the process, or was an error of torch's that named no operand."""
    with pytest.raises(ValueError, match=r"^output1_scales_gate_scalar: its storage has 0 bytes"):
        public("prepare_trtllm_fp8_per_tensor_scale_moe", output1_scales_gate_scalar=freed(4))
    with pytest.raises(ValueError, match=r"^hidden_states_scale: its storage has 0 bytes"):
        public("trtllm_fp8_block_scale_moe", hidden_states_scale=freed(1, 3))
    for operand in ("gemm1_beta", "output1_scale_scalar"):
        with pytest.raises(ValueError, match=f"^{operand}: expected a tensor in memory, got Tensor on meta"):
            public("trtllm_fp4_block_scale_moe", **{operand: torch.ones(4, device="meta")})


def test_outputs_of_fused_topk_deepseek_are_written_all_or_none() -> None:
    ids = torch.zeros(3, 2, dtype=torch.int32)
    with torch.inference_mode():
        of_inference = torch.zeros(3, 2, dtype=torch.int16)
    for words, changed in (
        ("topk_values: its elements overlap in memory", {"topk_values": torch.zeros(1, 2).expand(3, 2)}),
        ("topk_indices: shares memory with topk_values", {"topk_values": ids.view(torch.float32), "topk_indices": ids}),
        ("topk_indices: expected device cpu, got meta", {"topk_indices": ids.to("meta")}),
        ("routing_replay_out: was made in inference mode", {"routing_replay_out": of_inference}),
        (
            r"routing_replay_out: expected \[3 or more, 2\], got shape \(2, 2\)",
            {"routing_replay_out": torch.zeros(2, 2, dtype=torch.int16)},
        ),
    ):
        values = torch.full((3, 2), 7.0)
        with pytest.raises(ValueError, match=words):
            public("fused_topk_deepseek", **{"topk_values": values, **changed})
        assert bool((values == 7).all())


def test_operands_of_flashinfers_calls_that_no_check_named() -> None:
    for name, words, changed in (
        ("trtllm_fp4_block_scale_moe", "gemm1_weights: expected dtype uint8 or", {"gemm1_weights": torch.bool}),
        ("trtllm_fp4_block_scale_moe", "hidden_states_scale: expected dtype", {"hidden_states_scale": torch.bool}),
        (
            "prepare_trtllm_fp4_block_scale_moe",
            "gemm2_weights_scale: expected dtype",
            {"gemm2_weights_scale": torch.bool},
        ),
    ):
        operands = public_calls.MAKERS[name](public_calls.Draws(torch.Generator().manual_seed(3)))
        with pytest.raises(ValueError, match=words):
            public(name, **{operand: operands[operand].view(dtype) for operand, dtype in changed.items()})
    with pytest.raises(ValueError, match=r"^hidden_states: expected \[T, H\], got shape \(\)"):
        public("triton_kernel_fused_experts_with_bias", hidden_states=torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"^hidden_states: expected \[T, H\], got shape \(\)"):
        public("fused_experts_flashinfer_mxfp4", hidden_states=torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"^token_selected_experts: expected \[T, top_k\], got shape \(\)"):
        public("cute_dsl_fused_moe_bf16", token_selected_experts=torch.tensor(1))
    with pytest.raises(
        ValueError, match=r"^local_num_experts: expected a number of experts, got 1267650600228229401496"
    ):
        public("trtllm_fp8_block_scale_moe", num_experts=torch.tensor(4), local_num_experts=1 << 100)
    with pytest.raises(ValueError, match="tp_rank: expected 0 or more, got -1"):
        public("prepare_cutlass_fused_moe", tp_rank=-1)
    with pytest.raises(NotImplementedError, match="valid_hidden_size: no kernel for padded weights with DeepSeekFp8"):
        public("prepare_trtllm_fp8_block_scale_moe", valid_hidden_size=96)
