"""Numbers of experts as `prepare_...` functions hand them on, and the dtypes and defaults of cutlass_fused_moe."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from typing import Any

import pytest
import torch

import oxmoe
from mxfp4_blocks import Blocks, inputs
from oxmoe.peers.kept import Cache, number
from oxmoe.testing import assert_close_ulp
from test_peer_calls import fused


@pytest.mark.parametrize(
    "old, new",
    [
        ("cutlass_moe", "flashinfer_cutlass"),
        ("triton_kernels_moe", "triton_kernels"),
        ("trtllm_moe", "flashinfer_trtllm"),
    ],
)
def test_caches_under_the_names_that_docstrings_had(old: str, new: str) -> None:
    assert getattr(oxmoe, old).cache is importlib.import_module(f"oxmoe.peers.{new}").cache


def test_a_number_that_all_experts_share_is_one() -> None:
    assert number(None) is None
    for shared in ([3.0], [0.5, 0.5, 0.5]):
        assert number(torch.tensor(shared)) == shared[0]
    for given in ([1.0, 1.0, 2.0], [2.0, 1.0, 1.0], [1.0, 2.0], []):
        tensor = torch.tensor(given)
        assert number(tensor) is tensor
    # A shape other than [El] is the caller's error, which ExpertWeights names.
    square = torch.ones(2, 2)
    assert number(square) is square


def test_threads_add_to_a_cache_at_the_same_time() -> None:
    cache, errors = Cache(), list[Exception]()

    def add() -> None:
        try:
            for _ in range(200):
                tensors = [torch.zeros(1) for _ in range(5)]
                for tensor in tensors:
                    assert cache.get([tensor], [None], (), lambda tensor=tensor: tensor.data_ptr()) == tensor.data_ptr()
        except Exception as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=add) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_cutlass_fused_moe_of_other_dtypes(dtype: torch.dtype, rng: torch.Generator) -> None:
    blocks = Blocks(4, 128, 128, "cpu", rng, bias=False)
    x, weights, ids = inputs(blocks, 9, 2, rng)
    x = x.to(dtype)
    arguments = {"output_dtype": dtype, "use_w4_group_scaling": True, **blocks.interleaved("0.7")}
    (result,) = oxmoe.cutlass_fused_moe(input=x, token_selected_experts=ids, token_final_scales=weights, **arguments)
    assert_close_ulp(result, blocks.expected(x, weights, ids))
    prepared = oxmoe.prepare_cutlass_fused_moe(
        **blocks.interleaved("0.7"), dtype={torch.float16: "f16", torch.float32: "f32"}[dtype]
    )
    assert prepared.dtype == {torch.float16: "f16", torch.float32: "f32"}[dtype]


def test_cutlass_fused_moe_names_a_dtype_that_it_has_not(rng: torch.Generator) -> None:
    blocks = Blocks(2, 128, 128, "cpu", rng, bias=False)
    x, weights, ids = inputs(blocks, 3, 2, rng)
    with pytest.raises(ValueError, match="float64"):
        oxmoe.cutlass_fused_moe(
            input=x.double(),
            token_selected_experts=ids,
            token_final_scales=weights,
            output_dtype=torch.float64,
            use_w4_group_scaling=True,
            **blocks.interleaved("0.7"),
        )


def test_defaults_are_flashinfers() -> None:
    """Defaults are those of cutlass_fused_moe in 0.7.4: a call that leaves a parameter out means the same here."""
    parameters = inspect.signature(oxmoe.cutlass_fused_moe).parameters
    defaults: dict[str, Any] = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    expected = {
        **dict.fromkeys(("fc1_expert_biases", "fc2_expert_biases", "input_sf", "output", "enable_pdl", "weights")),
        **dict.fromkeys(("swiglu_alpha", "swiglu_beta", "swiglu_limit")),
        **{f"{kind}_{what}": int(what == "size") for kind in ("tp", "ep", "cluster") for what in ("size", "rank")},
        **dict.fromkeys(("enable_alltoall", "use_deepseek_fp8_block_scale", "use_w4_group_scaling"), False),
        **dict.fromkeys(("use_mxfp8_act_scaling", "min_latency_mode", "use_packed_weights"), False),
        "use_wfp4afp8_humming": False,
        "tune_max_num_tokens": 8192,
        "activation_type": 3,
        "swizzled_input_sf": True,
        **dict.fromkeys(("profile_ids", "workspace_buffer", "clamped_relu2_limit", "situ_beta", "situ_linear_beta")),
        **dict.fromkeys(("use_fused_finalize", "nvfp4_4over6")),
        "backend": "cutlass",
    }
    assert defaults == expected


def test_every_missing_weight_is_noticed(rng: torch.Generator) -> None:
    blocks = Blocks(2, 128, 128, "cpu", rng, bias=False)
    x, weights, ids = inputs(blocks, 3, 2, rng)
    given = blocks.interleaved("0.7")
    for name in ("fc1_expert_weights", "fc2_expert_weights", "quant_scales"):
        with pytest.raises(ValueError, match="fc1_expert_weights, fc2_expert_weights and quant_scales: needed where"):
            fused(x, weights, ids, **{**given, name: None})
    with pytest.raises(ValueError, match="quant_scales: expected the scales of fc1 and fc2, got 1 tensors"):
        fused(x, weights, ids, **{**given, "quant_scales": given["quant_scales"][:1]})
