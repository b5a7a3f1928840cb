"""Operands that torch handles before the extension sees them: values that are no dense tensor of the right
dimensions."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import oxmoe
from oxmoe import nvfp4, quantize

E, K, H, INTER, T = 4, 2, 128, 128, 5
Call = tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]


def calls() -> dict[str, Call]:
    """Returns by name: a function, arguments that it takes, and the names of those that must be tensors."""
    x = torch.randn(T, H).bfloat16()
    rows = torch.randn(E, 6, H).bfloat16()
    counts = torch.tensor([1, 0, 6, 3], dtype=torch.int32)
    w13, w2 = torch.randn(E, 2 * INTER, H).bfloat16(), torch.randn(E, H, INTER).bfloat16()
    e4m3 = [w.to(torch.float8_e4m3fn) for w in (w13, w2)]
    blocks = torch.ones(E, 2 * INTER // 128, H // 128), torch.ones(E, H // 128, INTER // 128)
    logits = torch.randn(T, E)
    chosen, ids = oxmoe.topk(logits, K)
    packed = oxmoe.pack_topk(chosen, ids)
    codes, scales = oxmoe.mxfp8_quantize(torch.randn(64, H).bfloat16())
    x8, x_scale = quantize.per_token_group_quant_fp8(x, 128)
    scales4 = torch.ones(E, 2 * INTER, H // 16).to(torch.float8_e4m3fn)
    swizzled = nvfp4.swizzle_blockscale(scales4)
    x4, x4_scale = nvfp4.fp4_quantize(x, torch.ones(1), is_sf_swizzled_layout=False)
    bytes13, bytes2 = (torch.randint(255, (E, rows, H // 2), dtype=torch.uint8) for rows in (2 * INTER, H))
    numbers = torch.ones(E)
    config = SimpleNamespace(activation="silu", is_gated=True, inplace=False)
    trtllm: dict[str, Any] = {
        "routing_bias": None,
        "hidden_states": x8,
        "hidden_states_scale": x_scale.T,
        "gemm1_weights": e4m3[0],
        "gemm1_weights_scale": blocks[0],
        "gemm2_weights": e4m3[1],
        "gemm2_weights_scale": blocks[1],
        "num_experts": E,
        "top_k": K,
        "n_group": None,
        "topk_group": None,
        "intermediate_size": INTER,
        "local_expert_offset": 0,
        "local_num_experts": E,
        "routed_scaling_factor": None,
        "routing_method_type": 1,
    }
    gemms = "gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale"
    cutedsl = {
        "x": x4,
        "x_sf": x4_scale,
        "token_selected_experts": ids,
        "token_final_scales": chosen,
        "w1_weight": bytes13,
        "w1_weight_sf": swizzled,
        "w1_alpha": numbers,
        "fc2_input_scale": torch.ones(1),
        "w2_weight": bytes2,
        "w2_weight_sf": nvfp4.swizzle_blockscale(torch.ones(E, H, INTER // 16).to(torch.float8_e4m3fn)),
        "w2_alpha": numbers,
    }

    def layer(**operands: Any) -> torch.Tensor:
        return oxmoe.CuteDslMoEWrapper(E, K, H, INTER, device="cpu").run(**operands)

    mma = nvfp4.convert_sf_to_mma_layout(swizzled, 2 * INTER, H, E)
    sizes = {"m": 2 * INTER, "k": H, "num_groups": E}
    weights = oxmoe.ExpertWeights.bf16(w13, w2)
    return {
        "pack": (oxmoe.pack_topk, {"topk_weights": chosen, "topk_ids": ids}, ("topk_weights", "topk_ids")),
        "unpack": (oxmoe.unpack_topk, {"packed": packed}, ("packed",)),
        "routing": (
            oxmoe.routing,
            {"logits": logits, "n_expts_act": K, "expt_indx": ids},
            ("logits", "expt_indx"),
        ),
        "contiguous": (
            oxmoe.moe_contiguous,
            {"x": rows[0], "weights": weights, "m_indices": torch.tensor([0, 3, -1, 1, 1, 2], dtype=torch.int32)},
            ("m_indices",),
        ),
        "linear": (
            oxmoe.mxfp8_linear,
            {"input": x, "weight": codes, "weight_scale": scales, "bias": torch.ones(64)},
            ("input", "weight", "weight_scale", "bias"),
        ),
        "fused": (
            oxmoe.fused_experts,
            {"hidden_states": x, "w1": w13, "w2": w2, "topk_output": (chosen, ids), "moe_runner_config": config},
            ("w1",),
        ),
        "fp4": (nvfp4.fp4_quantize, {"input": x, "global_scale": torch.ones(1)}, ("input", "global_scale")),
        "grouped": (
            nvfp4.scaled_fp4_grouped_quantize,
            {"a": rows, "mask": counts, "a_global_sf": numbers},
            ("a",),
        ),
        "swizzle": (nvfp4.swizzle_blockscale, {"scale": scales4}, ("scale",)),
        "unswizzle": (
            nvfp4.unswizzle_blockscale,
            {"scale": swizzled, "rows": 2 * INTER, "columns": H // 16},
            ("scale",),
        ),
        "swizzle-mx": (quantize.swizzle_scales, {"scales": torch.zeros((9, 4), dtype=torch.uint8)}, ("scales",)),
        "unswizzle-mx": (quantize.unswizzle_scales, {"scales": scales, "rows": 64, "blocks": 4}, ("scales",)),
        "to-mma": (nvfp4.convert_sf_to_mma_layout, {"sf": swizzled, **sizes}, ("sf",)),
        "from-mma": (nvfp4.convert_sf_from_mma_layout, {"sf_6d": mma, **sizes}, ("sf_6d",)),
        "interleave": (nvfp4.interleave_w13_halves, {"tensor": w13}, ("tensor",)),
        "trtllm": (
            oxmoe.trtllm_fp8_block_scale_moe,
            {"routing_logits": logits, **trtllm},
            ("hidden_states", *gemms),
        ),
        "trtllm-routed": (
            oxmoe.trtllm_fp8_block_scale_routed_moe,
            {"topk_ids": packed, **trtllm},
            ("hidden_states", *gemms),
        ),
        "cutedsl": (layer, cutedsl, tuple(cutedsl)),
    }


ARRAYS = ("routing", "contiguous")  # These calls take numpy arrays.


@pytest.mark.parametrize("name", calls())
def test_operands(name: str) -> None:
    function, given, tensors = calls()[name]
    function(**given)
    for operand in tensors:
        tensor = given[operand]
        for wrong, got in ((7, "int"), ([1.0], "list"), (tensor.float().numpy(), "ndarray")):
            if got == "ndarray" and name in ARRAYS:
                continue
            message = f"{operand}: expected a torch tensor, got {got}"
            with pytest.raises(ValueError, match="^" + re.escape(message)):
                function(**{**given, operand: wrong})
        with pytest.raises(ValueError, match=f"^{operand}: expected a dense tensor, got layout sparse_coo"):
            function(**{**given, operand: tensor.float().to_sparse()})


def test_dimensions() -> None:
    logits = torch.randn(3, 8)
    with pytest.raises(ValueError, match=r"^logits: expected \[T, E\], got shape \(8,\)"):
        oxmoe.routing(logits[0], 2)
    with pytest.raises(ValueError, match=r"^expt_indx: expected device cpu \(from logits\), got meta"):
        oxmoe.routing(logits, 2, expt_indx=torch.zeros((3, 2), dtype=torch.int32, device="meta"))
    with pytest.raises(ValueError, match=r"^topk_ids: expected device cpu \(from topk_weights\), got meta"):
        oxmoe.pack_topk(logits, torch.zeros((3, 8), dtype=torch.int32, device="meta"))
    with pytest.raises(ValueError, match=r"^dim: expected a dimension of the tensor's 2, got 2"):
        nvfp4.interleave_w13_halves(torch.zeros(128, 256), dim=2)
    with pytest.raises(ValueError, match=r"^scale: expected a dtype of one byte, got float32"):
        nvfp4.unswizzle_blockscale(torch.zeros(128, 4), 128, 4)
    with pytest.raises(ValueError, match=r"^sf_vec_size: expected 1 or more, got 0"):
        nvfp4.convert_sf_to_mma_layout(torch.zeros(128, 4), 128, 64, sf_vec_size=0)
    codes, scales = oxmoe.mxfp8_quantize(torch.randn(64, 128).bfloat16())
    with pytest.raises(ValueError, match=r'^bias: dimension 0 "n": expected 64 \(from weight\), got 63'):
        oxmoe.mxfp8_linear(torch.zeros(1, 128).bfloat16(), codes, scales, bias=torch.zeros(63))


def test_nothing_to_convert() -> None:
    """The matrices have no rows or no columns."""
    for shape in ((0, 8), (3, 0, 8), (3, 5, 0)):
        scales = torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
        swizzled = nvfp4.swizzle_blockscale(scales)
        assert nvfp4.unswizzle_blockscale(swizzled, *shape[-2:]).shape == shape
    codes, _ = nvfp4.fp4_quantize(torch.zeros(0, 32), torch.ones(1))
    assert codes.shape == (0, 16)
    x = torch.zeros(0, 128).bfloat16()
    codes8, scales8 = oxmoe.mxfp8_quantize(torch.randn(64, 128).bfloat16())
    assert oxmoe.mxfp8_linear(x, codes8, scales8).shape == (0, 64)


def test_strides_of_dimensions_of_one_mean_nothing() -> None:
    """Such tensors count as contiguous, as in torch and numpy; strides of other dimensions count."""
    logits = torch.randn(3, 8)
    expected = oxmoe.topk(logits[:1], 2)
    one_row = logits.as_strided((1, 8), (77, 1))
    as_array = np.lib.stride_tricks.as_strided(logits.numpy(), (1, 8), (4 * 77, 4))
    for given in (one_row, as_array):
        result = [torch.as_tensor(part) for part in oxmoe.topk(given, 2)]
        assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])
    one_expert = logits.as_strided((3, 1), (1, 77))
    assert oxmoe.topk(one_expert, 1)[1].tolist() == [[0]] * 3
    for strided in (logits.as_strided((2, 4), (1, 2)), logits.as_strided((1, 4), (77, 2)), logits[:, :4]):
        with pytest.raises(ValueError, match="router_logits: is not contiguous"):
            oxmoe.topk(strided, 2)
