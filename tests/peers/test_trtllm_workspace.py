"""The workspace that flashinfer's trtllm-gen calls take: its size, and when it is written to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import oxmoe
from cases import tie_free_logits
from oxmoe.peers import flashinfer_trtllm_formats
from oxmoe.testing import same_bits
from trtllm_cases import CALLS, FORMATS, LAYERS, routed, run, sizes, tokens_of

MODES = {"bf16": "bf16", "fp8": "fp8_per_tensor", "mxfp4": "mxfp4_bf16", "nvfp4": "nvfp4"}


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    flashinfer_trtllm_formats.cache.clear()


@pytest.mark.parametrize("format", FORMATS)
def test_workspace_buffer(format: str, device: str, rng: torch.Generator) -> None:
    """A buffer of the right size is written to; a smaller one is left alone, and the result is the same."""
    _, given, _ = LAYERS[format](device, rng)
    hidden, _ = tokens_of(format, 9, device, rng)
    gates, ids = routed(9, device, rng)
    call = {"topk_ids": (ids, gates), **hidden, **given, **sizes()}
    logits = {"routing_logits": tie_free_logits(9, 8, rng).to(device), "routing_method_type": 1, **hidden, **given}
    size = oxmoe.trtllm_fused_moe_workspace_size(9, 256, 128, 8, 3, quant_mode=MODES[format], device=device)
    prepared = CALLS[format][2](**given)
    assert size == oxmoe.workspace_bytes(prepared, 9, 3)
    for by, arguments in ((CALLS[format][1], call), (CALLS[format][0], {**logits, **sizes()})):
        expected = run(by, format, **arguments)
        for room, weights in ((size, None), (size, prepared), (size - 1, None)):
            memory = torch.full((size + 256,), 0x5A, dtype=torch.uint8, device=device)
            start = -memory.data_ptr() % 256
            buffer = memory[start : start + room]
            result = run(by, format, **arguments, workspace_buffer=buffer.view(torch.int8), weights=weights)
            assert bool(result.any()) and same_bits(result, expected)
            assert bool((buffer != 0x5A).any()) == (room == size)
    with pytest.raises(RuntimeError, match="workspace_buffer: dtype must be int8 or uint8, got float32"):
        run(CALLS[format][1], format, **call, workspace_buffer=torch.zeros(size, device=device))
    with pytest.raises(ValueError, match=r"workspace_buffer: must be 1-D, got shape \[2, 256\]"):
        buffer = torch.zeros(2, 256, dtype=torch.uint8, device=device)
        run(CALLS[format][1], format, **call, workspace_buffer=buffer)


def test_workspace_size() -> None:
    size = oxmoe.trtllm_fused_moe_workspace_size
    whole = (32, 256, 128, 8, 3)
    for mode, format in (("fp8_block_scale", "fp8_block"), ("mxfp8", "mxfp8"), ("mxint4", "int4")):
        own = oxmoe._oxmoe.shape_workspace_bytes(4, 3, 256, 128, 32, format=format)
        assert size(*whole, quant_mode=mode, local_num_experts=4, tactic=(8, -1)) == own > 0
    with_shared = size(*whole, quant_mode="mxfp8", num_fused_shared_experts=2)
    assert with_shared == oxmoe._oxmoe.shape_workspace_bytes(10, 5, 256, 128, 32, format="mxfp8") > 0
    plain = size(*whole, quant_mode="bf16", activation_type=SimpleNamespace(name="Relu2"))
    assert plain == oxmoe._oxmoe.shape_workspace_bytes(8, 3, 256, 128, 32, gated=False)
    calls: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "quant_mode: expected one of 'bf16', .*, got 'fp4'", {"quant_mode": "fp4"}),
        (NotImplementedError, "quant_mode: no kernel for 'mxfp4_mxfp8'; served are", {"quant_mode": "mxfp4_mxfp8"}),
        (
            ValueError,
            "num_fused_shared_experts: expected 0 or more, and with them all 8 experts here, got 1 with local_num_exp",
            {"num_fused_shared_experts": 1, "local_num_experts": 4},
        ),
        (
            NotImplementedError,
            "no kernel for num_fused_shared_experts with bf16",
            {"num_fused_shared_experts": 1, "quant_mode": "bf16"},
        ),
        (NotImplementedError, "no kernel for use_per_token_scale", {"use_per_token_scale": True}),
        (ValueError, "valid_intermediate_size: expected 1 to 128 .*, got 0", {"valid_intermediate_size": 0}),
        (ValueError, "local_num_experts: expected at most num_experts 8, got 9", {"local_num_experts": 9}),
        (ValueError, "local_num_experts: expected 1 or more, got 0", {"local_num_experts": 0}),
    ]
    for error, words, options in calls:
        with pytest.raises(error, match=words):
            size(*whole, **{"quant_mode": "nvfp4"} | options)
    with pytest.raises(ValueError, match="max_num_tokens: expected 1 or more, got 0"):
        size(0, *whole[1:], quant_mode="bf16")
