"""Mistakes of a first hour with oxmoe: each is one error that names the operand and says what is expected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import oxmoe
from oxmoe import __main__, quantize

E, K, H, INTER, T = 4, 2, 128, 128, 5
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x, w13, w2 = (torch.randn(shape).to(BF16) for shape in ((T, H), (E, 2 * INTER, H), (E, H, INTER)))
    return x, w13, w2, *oxmoe.topk(torch.randn(T, E), K)


def flashinfer(**changed: Any) -> Any:
    x, w13, w2, weights, ids = layer()
    call = {
        **{"input": x, "token_selected_experts": ids, "token_final_scales": weights},
        **{"fc1_expert_weights": w13, "fc2_expert_weights": w2, "output_dtype": BF16, "quant_scales": None},
    }
    return oxmoe.cutlass_fused_moe(**{**call, **changed})


def workspace_size(dtype: Any) -> int:
    return oxmoe.cutlass_fused_moe_workspace_size(T, H, INTER, E, K, x_dtype=BF16, weight_dtype=dtype)


def contiguous(indices: torch.Tensor) -> Any:
    x, w13, w2, _, _ = layer()
    return oxmoe.moe_contiguous(x, oxmoe.ExpertWeights.bf16(w13, w2), m_indices=indices)


def on_bare_weights() -> Any:
    x, w13, _, weights, ids = layer()
    return oxmoe.moe(x, w13, weights, ids)  # type: ignore[arg-type]


def fused_experts(topk_output: Any) -> Any:
    x, w13, w2, _, _ = layer()
    return oxmoe.fused_experts(x, w13, w2, topk_output, None)


def fnuz() -> Any:
    _, w13, w2, _, _ = layer()
    codes = [w.to(torch.float8_e4m3fnuz) for w in (w13, w2)]
    return oxmoe.ExpertWeights.fp8_block(*codes, torch.ones(E, 2, 1), torch.ones(E, 1, 1))


def linear_scale() -> Any:
    codes, _ = quantize.mxfp8(torch.randn(64, H).to(BF16))
    return oxmoe.mxfp8_linear(torch.randn(T, H).to(BF16), codes, torch.ones((3, 3), dtype=torch.uint8))


def workspace_bytes(tokens: int, top_k: int) -> int:
    _, w13, w2, _, _ = layer()
    return oxmoe.workspace_bytes(oxmoe.ExpertWeights.bf16(w13, w2), tokens, top_k)


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "flashinfer, list": (lambda: flashinfer(input=[[1.0]]), ValueError, "input: expected a torch tensor, got list"),
    "flashinfer, one row": (
        lambda: flashinfer(input=torch.zeros(H, dtype=BF16)),
        ValueError,
        "input: expected [T, H], got shape (128,)",
    ),
    "flashinfer, weights as a list": (
        lambda: flashinfer(fc1_expert_weights=[1.0]),
        ValueError,
        "fc1_expert_weights: expected a torch tensor, got list",
    ),
    "flashinfer, scales in one tensor": (
        lambda: flashinfer(quant_scales=torch.ones(3)),
        ValueError,
        "quant_scales: expected a list of tensors or None, got Tensor",
    ),
    "flashinfer, scales as numbers": (
        lambda: flashinfer(quant_scales=[1.0, 1.0]),
        ValueError,
        "quant_scales[0]: expected a torch tensor, got float",
    ),
    "flashinfer, bare weights": (
        lambda: flashinfer(weights=torch.zeros(1)),
        ValueError,
        "weights: expected what prepare_cutlass_fused_moe returns, or None, got Tensor",
    ),
    "flashinfer, workspace": (
        lambda: flashinfer(workspace_buffer=[1]),
        ValueError,
        "workspace_buffer: expected a torch tensor, got list",
    ),
    "flashinfer, unknown dtype": (
        lambda: workspace_size("bf16"),
        NotImplementedError,
        "weight_dtype: no kernel for bf16; served are bfloat16, float16, float32, float8_e4m3fn, uint8,",
    ),
    "flashinfer, BlockMajorK": (
        lambda: oxmoe.trtllm_bf16_moe(
            torch.zeros(T, E), None, *layer()[:3], E, K, None, None, INTER, 0, E, routing_method_type=1
        ),
        ValueError,
        "gemm1_weights, gemm2_weights: expected shape [E, K / 64, rows, 64] with weight_layout BlockMajorK",
    ),
    "DeepGEMM, indices of other rows": (
        lambda: contiguous(torch.zeros(T - 1, dtype=torch.int32)),
        ValueError,
        'm_indices: dimension 0 "M": expected 5 (from x), got 4',
    ),
    "DeepGEMM, indices of another dtype": (
        lambda: contiguous(torch.zeros(T)),
        ValueError,
        "m_indices: expected dtype int32 or int64, got float32",
    ),
    "bare weights": (on_bare_weights, TypeError, "; make them once, with a constructor such as oxmoe.ExpertWeights."),
    "SGLang, no top-k": (
        lambda: fused_experts(None),
        ValueError,
        "topk_output: expected a tuple (topk_weights, topk_ids, ...), got NoneType",
    ),
    "SGLang, weights alone": (
        lambda: fused_experts(torch.zeros(T, K)),
        ValueError,
        "topk_output: expected a tuple (topk_weights, topk_ids, ...), got Tensor",
    ),
    "fnuz": (fnuz, ValueError, "w13: expected dtype float8_e4m3fn, got float8_e4m3fnuz"),
    "MXFP8 scale": (linear_scale, ValueError, "weight_scale: expected shape (64, 4), or flat in the 128x4 order, got"),
    "no top_k": (
        lambda: oxmoe.topk(torch.zeros(T, E), 0),
        ValueError,
        "top_k: expected 1 to 4 (the experts of router_logits), got 0",
    ),
    "tokens below 0": (lambda: workspace_bytes(-1, K), ValueError, "num_tokens: expected 0 or more, got -1"),
    "top_k of 33": (lambda: workspace_bytes(T, 33), ValueError, "top_k: expected 1 to 32, got 33"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name: str) -> None:
    call, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_compiled_code_has_no_backward_either() -> None:
    """An eager call refuses operands that require grad. A compiled one made a result without a gradient of them."""
    x, w13, w2, weights, ids = layer()
    experts = oxmoe.ExpertWeights.bf16(w13, w2)
    compiled = torch.compile(lambda x: oxmoe.moe(x, experts, weights, ids), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"x: requires grad; oxmoe has no backward"):
        compiled(x.clone().requires_grad_())
    with torch.no_grad():
        assert torch.equal(compiled(x.clone().requires_grad_()), oxmoe.moe(x, experts, weights, ids))


def test_a_name_on_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["check", "openai/gpt-oss-20b"]) == 2
    assert "this command downloads nothing" in capsys.readouterr().err


def test_a_release_with_its_v(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tags of SGLang's images begin with a v."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    __main__.main(["check", str(tmp_path), "--sglang", "v0.5.23"])
    assert "SGLang 0.5.23" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", [["1", "64"], ["1,64"], ["1,64", "8"]], ids=" ".join)
def test_lists_of_tokens(tokens: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A list of tokens may have commas or spaces."""
    assert __main__.main(["explain", "--layer", "granite-1b-a400m", "--arch", "cpu", "--tokens", *tokens]) == 0
    printed = re.findall(r", (\d+) tokens$", capsys.readouterr().out, re.M)
    assert printed == ",".join(tokens).split(",")
