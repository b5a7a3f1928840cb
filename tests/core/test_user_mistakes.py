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


def trtllm(intermediate_size: int) -> Any:
    x, w13, w2, _, _ = layer()
    form = {"routing_method_type": 1, "use_shuffled_weight": False, "weight_layout": 0}
    logits, sizes = torch.randn(T, E), (E, K, None, None, intermediate_size, 0, E)
    return oxmoe.trtllm_bf16_moe(logits, None, x, w13, w2, *sizes, **form)


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


def contiguous_of(values: list[int]) -> Any:
    return contiguous(torch.tensor(values, dtype=torch.int32))


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
    "DeepGEMM, an index beyond the experts": (
        lambda: contiguous_of([0, 1, -1, E, 0]),
        ValueError,
        "m_indices: row 3: expected -1 (no expert) or 0 to 3, got 4",
    ),
    "DeepGEMM, indices in columns": (
        lambda: contiguous(torch.zeros((2 * T, 2), dtype=torch.int32)[:, 0][::2]),
        ValueError,
        "m_indices: is not contiguous",
    ),
    "DeepGEMM, indices as a list": (
        lambda: contiguous([0] * T),  # type: ignore[arg-type]
        ValueError,
        "m_indices: expected a torch tensor, got list",
    ),
    "flashinfer, another intermediate_size": (
        lambda: trtllm(2 * INTER),
        ValueError,
        f"intermediate_size: expected {INTER} (from the weights), got {2 * INTER}",
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


def test_the_right_intermediate_size() -> None:
    assert trtllm(INTER).shape == (T, H)


@pytest.mark.parametrize("columns", [H, 2 * H])
@pytest.mark.parametrize("format", ["bf16", "f32", "fp8_block", "fp8_tensor", "mxfp8", "mxfp4", "nvfp4", "int4"])
def test_a_gate_too_many_or_too_few(format: str, columns: int) -> None:
    """w2 shows that w13 was taken to have gates, or to have none."""
    gated, rows = columns == H, 2 * INTER
    sizes = (("w13", rows, H), ("w2", H, INTER if gated else rows))
    each = {"mxfp4": 2, "nvfp4": 2, "int4": 2}.get(format, 1)
    dtypes = {"bf16": BF16, "f32": torch.float32} | dict.fromkeys(("fp8_block", "fp8_tensor", "mxfp8"), E4M3)
    operands = [torch.zeros((E, n, k // each)).to(dtypes.get(format, torch.uint8)) for _, n, k in sizes]
    block = {"mxfp4": 32, "mxfp8": 32, "int4": 32, "nvfp4": 16, "fp8_block": 128}.get(format)
    if format == "fp8_tensor":
        operands += [torch.ones(E), torch.ones(E)]
    elif block:
        scale = {"int4": BF16, "nvfp4": E4M3, "fp8_block": torch.float32}.get(format, torch.uint8)
        operands += [torch.ones((E, n // (128 if block == 128 else 1), k // block)).to(scale) for _, n, k in sizes]
    if format == "nvfp4":
        operands += [torch.ones(E), torch.ones(E)]
    make = getattr(oxmoe.ExpertWeights, format)
    assert make(*operands, gated=gated).gated == gated
    hint = "half of w13's rows are gates: pass gated=False" if not gated else "w13 has no gates: pass gated=True"
    with pytest.raises(
        ValueError, match=rf'^w2: dimension 2 ".*": expected \d+.*, got \d+; gated={not gated} .*{hint}'
    ):
        make(*operands, gated=not gated)
    # Sizes that no choice of `gated` explains have no such hint.
    operands[1] = operands[1][:, :, :-16].contiguous()
    with pytest.raises(ValueError, match=r"^w2: dimension 2 [^;]*$"):
        make(*operands, gated=gated)


@pytest.mark.parametrize("format", ["bf16", "fp8_tensor"])
def test_transposed_weights(format: str) -> None:
    """Some libraries have weights as [experts, columns, rows]. Their sizes would also fit a layer without gates."""
    dtype = E4M3 if format == "fp8_tensor" else BF16
    operands = [torch.zeros((E, H, 2 * INTER)).to(dtype), torch.zeros((E, INTER, H)).to(dtype)]
    scales = [torch.ones(E), torch.ones(E)] if format == "fp8_tensor" else []
    with pytest.raises(ValueError, match=r"^w2: dimension .*; the sizes are those of transposed weights: w13 is \[exp"):
        getattr(oxmoe.ExpertWeights, format)(*operands, *scales)


def test_the_name_of_bool() -> None:
    """The name is torch's and numpy's own."""
    with pytest.raises(ValueError, match=r"^w13: .*got bool$"):
        oxmoe.ExpertWeights.bf16(torch.zeros((E, 2 * INTER, H)).bool(), torch.zeros((E, H, INTER)).bool())


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int4"])
def test_dtype_by_torchs_own(format: str) -> None:
    """`dtype` takes a torch dtype, as activation_dtype does, or the name that ExpertWeights.dtype has."""
    block, numbers = (16, [torch.ones(E)] * 2) if format == "nvfp4" else (32, [])
    scale = {"int4": BF16, "nvfp4": E4M3, "mxfp4": torch.uint8}[format]
    codes = [torch.zeros((E, 2 * INTER, H // 2), dtype=torch.uint8), torch.zeros((E, H, INTER // 2), dtype=torch.uint8)]
    scales = [torch.ones((E, n, H // block)).to(scale) for n in (2 * INTER, H)]
    make = getattr(oxmoe.ExpertWeights, format)
    for name, dtype in (("bf16", BF16), ("f16", torch.float16), ("f32", torch.float32)):
        for given in (name, dtype):
            assert make(*codes, *scales, *numbers, dtype=given).dtype == name
    for wrong in (torch.float64, "torch.float16", "bfloat17"):
        with pytest.raises(ValueError, match=f"^dtype: expected .*got .*{re.escape(str(wrong))}"):
            make(*codes, *scales, *numbers, dtype=wrong)
    for wrong in (None, 16, BF16.itemsize):
        with pytest.raises(TypeError, match=r"^dtype: "):
            make(*codes, *scales, *numbers, dtype=wrong)


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
