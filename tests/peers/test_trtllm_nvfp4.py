"""flashinfer's trtllm-gen layers of NVFP4 with biases, alpha, beta and limits, against its definition in fp64.

The definition is that of trtllm-gen's BatchedGemmInterface and of flashinfer's tests (FP4Moe of
tests/moe/trtllm_gen_fused_moe_utils.py): biases, beta and limit are in units of the GEMMs' sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import make_routing, tie_free_logits
from oxmoe import reference
from oxmoe.peers import flashinfer_trtllm_formats
from oxmoe.testing import same_bits
from trtllm_layouts import interleave, shuffle

EXPERTS, TOP_K = 6, 2
E4M3 = torch.float8_e4m3fn
# Activations whose output1_scale_scalar only quantises.
UNSCALED = ("Relu2", "Situ")
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
# An fp32 sum that rounds to bf16's other neighbour may move a code or a block's scale.
BAR = 0.03
# A layer without one of its operands must be farther from the layer with it.
FAR = 2 * BAR


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    flashinfer_trtllm_formats.cache.clear()


def numbers(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns the fp64 elements of e2m1 codes [..., K / 2] and their e4m3 scales [..., K / 16]."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    elements = MAGNITUDES[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)
    return elements * scales.view(E4M3).double().repeat_interleave(16, -1)


def rounded(rows: Tensor) -> Tensor:
    """Rounds fp64 rows to NVFP4: each block of 16 has the e4m3 scale of its largest number over 6."""
    blocks = rows.unflatten(-1, (-1, 16))
    scales = (blocks.abs().amax(-1, keepdim=True) / 6).clamp(max=448).to(E4M3).double()
    scaled = (blocks / scales.where(scales > 0, 1.0)).clamp(-6, 6)
    middles = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    # The code below a middle is odd if the one above is even, and a tie goes to the even one.
    above = torch.bucketize(scaled.abs(), middles)
    above = above + ((above % 2 == 1) & (scaled.abs() == middles[above.clamp(max=6)])).long()
    return (MAGNITUDES[above] * scaled.sign() * scales).flatten(-2)


@dataclass
class Layer:
    """Plain operands in flashinfer's terms: rows of w13 and of its bias are [up; gate]."""

    kind: str
    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    given: dict[str, Tensor | None]

    @property
    def gated(self) -> bool:
        return self.kind != "Relu2"

    @cached_property
    def numbers(self) -> tuple[Tensor, Tensor]:
        return numbers(self.w13, self.w13_scale), numbers(self.w2, self.w2_scale)

    @cached_property
    def forms(self) -> dict[str, Tensor]:
        return {
            "gemm1_weights": shuffle(self.w13, self.gated),
            "gemm1_weights_scale": interleave(shuffle(self.w13_scale, self.gated)).view(E4M3),
            "gemm2_weights": shuffle(self.w2, False),
            "gemm2_weights_scale": interleave(shuffle(self.w2_scale, False)).view(E4M3),
        }

    def call(self, **changed: Any) -> dict[str, Any]:
        """Returns the arguments of flashinfer's call."""
        given = self.given | changed
        biases = {"gemm1_bias": self.gated, "gemm2_bias": False}
        for name, gated in biases.items():
            bias = given[name]
            given[name] = None if bias is None else shuffle(bias, gated)
        return {**self.forms, **given, "activation_type": SimpleNamespace(name=self.kind)}

    def expected(self, x: Tensor, weights: Tensor, ids: Tensor, **changed: Any) -> Tensor:
        """Computes the layer of fp64 rows x as trtllm-gen's kernels define it."""
        given = {name: value if value is None else value.double() for name, value in (self.given | changed).items()}
        out = torch.zeros(len(x), self.w2.shape[1], dtype=torch.float64)
        for token in range(len(x)):
            for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
                one = {name: None if value is None else value[expert] for name, value in given.items()}
                sums = self.numbers[0][expert] @ x[token]
                sums = sums if one["gemm1_bias"] is None else sums + one["gemm1_bias"]
                # oxmoe rounds the dequantised output to bf16 first, which flashinfer's kernels do not.
                factor = one["output1_scale_scalar"]
                factor = factor if self.kind in UNSCALED else factor / one["output1_scale_gate_scalar"]
                hidden = rounded((self.activated(sums, one) / factor).bfloat16().double() * factor)
                result = self.numbers[1][expert] @ hidden
                result = result if one["gemm2_bias"] is None else result + one["gemm2_bias"]
                out[token] += weight * result * one["output2_scale_scalar"]
        return out

    def activated(self, sums: Tensor, one: dict[str, Any]) -> Tensor:
        of_sums, of_output = one["output1_scale_gate_scalar"], one["output1_scale_scalar"]
        if self.kind == "Relu2":
            return of_output * (of_sums * sums).clamp(min=0) ** 2
        up, gate = sums.chunk(2)
        alpha, beta, limit = (one[f"gemm1_{name}"] for name in ("alpha", "beta", "clamp_limit"))
        if self.kind == "Situ":
            up, gate = of_sums * up, of_sums * gate
            left = beta * torch.tanh(up / beta)
            return of_output * left * alpha * torch.tanh(gate / alpha) * gate.sigmoid()
        if self.kind == "SwigluStep":
            silu = torch.minimum(of_sums * gate * (of_sums * gate).sigmoid(), of_sums * limit)
            return of_output * up.clamp(-limit, limit) * silu
        if limit is not None:
            up, gate = up.clamp(-limit, limit), gate.clamp(max=limit)
        gate = of_sums * gate
        alpha, beta = 1.0 if alpha is None else alpha, 0.0 if beta is None else beta
        if self.kind == "Geglu":
            return of_output * (up + beta) * torch.nn.functional.gelu(gate)
        return of_output * (up + beta) * gate * torch.sigmoid(alpha * gate)


def make(kind: str, hidden: int, intermediate: int, rng: torch.Generator) -> Layer:
    """Draws a layer whose dequantised sums are about one. Each expert has its own scalars."""

    def drawn(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(EXPERTS, generator=rng)

    def codes(rows: int, columns: int) -> Tensor:
        return torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=rng, dtype=torch.uint8)

    def scales(rows: int, columns: int) -> Tensor:
        made = 8 * (torch.rand((EXPERTS, rows, columns // 16), generator=rng) + 0.5)
        return made.to(E4M3).view(torch.uint8)

    rows = intermediate * (1 if kind == "Relu2" else 2)
    of_sums, quantises = drawn(0.5, 1.5) / (23 * hidden**0.5), drawn(20.0, 50.0)
    of_outputs = drawn(1.0, 2.0) / (23 * intermediate**0.5) / quantises
    bias1, bias2 = (torch.randn((EXPERTS, size), generator=rng) for size in (rows, hidden))
    given: dict[str, Tensor | None] = {
        "output1_scale_gate_scalar": of_sums,
        "output1_scale_scalar": quantises if kind in UNSCALED else quantises * of_sums,
        "output2_scale_scalar": of_outputs,
        "gemm1_bias": bias1 / of_sums[:, None],
        "gemm2_bias": bias2 / of_outputs[:, None],
        **dict.fromkeys(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")),
    }
    if kind == "Swiglu":
        given |= {"gemm1_alpha": drawn(2.0, 4.0), "gemm1_beta": drawn(0.5, 1.5) / of_sums}
    if kind == "Situ":
        given |= {"gemm1_alpha": drawn(0.3, 0.7), "gemm1_beta": drawn(0.3, 0.7)}
    if kind in ("Swiglu", "SwigluStep"):
        given["gemm1_clamp_limit"] = drawn(0.4, 1.0) / of_sums
    weights = (codes(rows, hidden), scales(rows, hidden), codes(hidden, intermediate), scales(hidden, intermediate))
    return Layer(kind, *weights, given)


def tokens_of(tokens: int, hidden: int, rng: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Returns flashinfer's operands of NVFP4 tokens, and their numbers."""
    x = torch.randn((tokens, hidden), generator=rng).bfloat16()
    codes, scales = oxmoe.nvfp4.fp4_quantize(x, torch.ones(1), is_sf_swizzled_layout=False)
    scales = scales.view(torch.uint8).reshape(tokens, hidden // 16)
    return {"hidden_states": codes, "hidden_states_scale": scales.view(E4M3)}, numbers(codes, scales)


def sizes(intermediate: int) -> dict[str, Any]:
    return {
        **{"num_experts": EXPERTS, "top_k": TOP_K, "n_group": None, "topk_group": None},
        **{"intermediate_size": intermediate, "local_expert_offset": 0, "local_num_experts": EXPERTS},
        **{"routing_bias": None, "routed_scaling_factor": None},
    }


def far(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


KINDS = ("Swiglu", "SwigluStep", "Geglu", "Situ", "Relu2")


@pytest.mark.parametrize(("hidden", "intermediate"), [(128, 64), (384, 192), (256, 128)])
@pytest.mark.parametrize("kind", KINDS)
def test_is_the_definition(kind: str, hidden: int, intermediate: int, rng: torch.Generator) -> None:
    """Every operand counts, and in flashinfer's units."""
    intermediate *= 2 if kind == "Relu2" else 1  # rows of w13 are whole tiles of scales
    layer = make(kind, hidden, intermediate, rng)
    tokens, x = tokens_of(17, hidden, rng)
    weights, ids = make_routing("uniform", 17, EXPERTS, TOP_K, rng)
    call = {"topk_ids": (ids.int(), weights), **tokens, **sizes(intermediate)}
    output = torch.full((17, hidden), torch.nan, dtype=torch.bfloat16)
    (result,) = oxmoe.trtllm_fp4_block_scale_routed_moe(**layer.call(), **call, output=output)
    assert result is output and bool(output.isfinite().all())
    expected = layer.expected(x, weights, ids)
    assert far(result, expected) < BAR
    prepared = oxmoe.prepare_trtllm_fp4_block_scale_moe(**layer.call())
    nothing = {name: None for name in layer.given if name.startswith(("gemm", "output"))}
    (again,) = oxmoe.trtllm_fp4_block_scale_routed_moe(**layer.call(**nothing), **call, weights=prepared)
    assert same_bits(again, result)
    for name, value in layer.given.items():
        if value is None or name.startswith("output"):
            continue
        if name == "gemm1_clamp_limit" and kind == "SwigluStep":  # without it the limit is 7
            continue
        without: Any = {name: None if kind != "Situ" or "bias" in name else torch.ones(EXPERTS)}
        (other,) = oxmoe.trtllm_fp4_block_scale_routed_moe(**layer.call(**without), **call)
        assert far(other, layer.expected(x, weights, ids, **without)) < BAR, name
        assert far(other, expected) > FAR, name


@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_by_logits(tokens: int, rng: torch.Generator) -> None:
    layer = make("Swiglu", 128, 64, rng)
    given, x = tokens_of(tokens, 128, rng)
    logits = tie_free_logits(tokens, EXPERTS, rng)
    call = {"routing_logits": logits, "routing_method_type": 1, **given, **sizes(64)}
    output = torch.full((tokens, 128), torch.nan, dtype=torch.bfloat16)
    (result,) = oxmoe.trtllm_fp4_block_scale_moe(**layer.call(), **call, output=output)
    assert result is output and result.shape == (tokens, 128) and bool(result.isfinite().all())
    if tokens:
        weights, ids = reference.topk(logits, TOP_K, scoring_func="softmax_topk", renormalize=False)
        assert far(result, layer.expected(x, weights, ids)) < BAR


def test_experts_of_a_rank_and_changed_operands(rng: torch.Generator) -> None:
    """A rank's part is the sum over its own experts. An operand that changes in place is seen at the next call."""
    layer = make("Swiglu", 128, 64, rng)
    tokens, x = tokens_of(9, 128, rng)
    weights, ids = make_routing("uniform", 9, 2 * EXPERTS, TOP_K, rng)
    part = {**sizes(64), "num_experts": 2 * EXPERTS, "local_expert_offset": EXPERTS}
    arguments = layer.call()
    call = {"topk_ids": (ids.int(), weights), **tokens, **part}
    local, counted = (ids - EXPERTS).clamp(min=0), weights.where(ids >= EXPERTS, 0.0)
    (result,) = oxmoe.trtllm_fp4_block_scale_routed_moe(**arguments, **call)
    assert far(result, layer.expected(x, counted, local)) < BAR
    changed: dict[str, Any] = {}
    for name, factor in (("gemm1_bias", -1.0), ("gemm2_bias", 3.0), ("gemm1_clamp_limit", 0.25), ("gemm1_beta", -2.0)):
        value = layer.given[name]
        assert value is not None
        changed[name] = value * factor
        arguments[name].mul_(factor)
        before = result
        (result,) = oxmoe.trtllm_fp4_block_scale_routed_moe(**arguments, **call)
        assert far(result, layer.expected(x, counted, local, **changed)) < BAR, name
        assert far(result, before) > FAR, name


@pytest.mark.parametrize(("hidden", "intermediate"), [(96, 48), (16, 80)])
@pytest.mark.parametrize("kind", KINDS)
def test_odd_sizes_are_padded(kind: str, hidden: int, intermediate: int, rng: torch.Generator) -> None:
    """Rows of padding drop out of biases, too."""
    layer = make(kind, hidden, intermediate, rng)
    tokens, x = tokens_of(9, hidden, rng)
    weights, ids = make_routing("uniform", 9, EXPERTS, TOP_K, rng)
    padded = oxmoe.pad_trtllm_moe_weights(
        *(layer.w13, layer.w13_scale, layer.w2, layer.w2_scale, hidden, intermediate),
        is_gated_act=layer.gated,
        hidden_alignment=128,
    )
    biases = {}
    for name, halves, size in (("gemm1_bias", 2 if layer.gated else 1, intermediate), ("gemm2_bias", 1, hidden)):
        bias = layer.given[name]
        assert bias is not None
        # The padding's numbers are not read.
        biases[name] = torch.full((EXPERTS, halves, 128), torch.nan)
        biases[name][:, :, :size] = bias.unflatten(1, (halves, size))
        biases[name] = biases[name].flatten(1)
    other = Layer(kind, *padded[:4], {**layer.given, **biases})
    rest = 128 - hidden
    operands = {
        "hidden_states": torch.nn.functional.pad(tokens["hidden_states"], (0, rest // 2)),
        "hidden_states_scale": torch.nn.functional.pad(
            tokens["hidden_states_scale"].view(torch.uint8), (0, rest // 16)
        ),
    }
    valid = {"valid_hidden_size": hidden, "valid_intermediate_size": intermediate}
    call = {"topk_ids": (ids.int(), weights), **operands, **sizes(128), **valid}
    output = torch.full((9, hidden), torch.nan, dtype=torch.bfloat16)
    (result,) = oxmoe.trtllm_fp4_block_scale_routed_moe(**other.call(), **call, output=output)
    assert result is output and far(result, layer.expected(x, weights, ids)) < BAR


def test_refusals(rng: torch.Generator) -> None:
    layer = make("Swiglu", 128, 64, rng)
    step, geglu, situ = (make(kind, 128, 64, rng) for kind in ("SwigluStep", "Geglu", "Situ"))
    relu2 = make("Relu2", 128, 128, rng)
    tokens, _ = tokens_of(5, 128, rng)
    weights, ids = make_routing("uniform", 5, EXPERTS, TOP_K, rng)
    call = {"topk_ids": (ids.int(), weights), **tokens, **sizes(64)}
    two = torch.full((EXPERTS,), 2.0)
    cases: list[tuple[type[Exception], str, Layer, dict[str, Any]]] = [
        (ValueError, r"gemm1_bias: expected shape \[6, 128\], got \[6, 64\]", layer, {"gemm1_bias": torch.ones(6, 64)}),
        (
            ValueError,
            r"gemm2_bias: expected shape \[6, 128\], got \[3, 128\]",
            layer,
            {"gemm2_bias": torch.ones(3, 128)},
        ),
        (ValueError, r"gemm1_beta: expected 6 numbers \(local experts\), got 3", layer, {"gemm1_beta": torch.ones(3)}),
        (ValueError, "gemm1_clamp_limit: expected 6 numbers", layer, {"gemm1_clamp_limit": torch.ones(3)}),
        (ValueError, "gemm1_beta: SwigluStep takes gemm1_clamp_limit alone", step, {"gemm1_beta": two}),
        (ValueError, 'alpha, beta, limit: only for activation "silu"', geglu, {"gemm1_alpha": two}),
        (ValueError, 'alpha, beta, limit: only for activation "silu"', relu2, {"gemm1_clamp_limit": two}),
        (NotImplementedError, "gemm1_clamp_limit: no kernel for Situ with a limit", situ, {"gemm1_clamp_limit": two}),
        (ValueError, "output1_scale_gate_scalar: needed", layer, {"output1_scale_gate_scalar": None}),
    ]
    for error, words, one, changed in cases:
        with pytest.raises(error, match=words):
            oxmoe.trtllm_fp4_block_scale_routed_moe(**{**one.call(), **changed}, **call)
    # Ones, which flashinfer's own preparation gives, are no alpha.
    for one in (geglu, relu2):
        ones = {"gemm1_alpha": torch.ones(EXPERTS)}
        (plain,) = oxmoe.trtllm_fp4_block_scale_routed_moe(**one.call(), **call)
        assert same_bits(oxmoe.trtllm_fp4_block_scale_routed_moe(**{**one.call(), **ones}, **call)[0], plain)
    # flashinfer has no kernels of NVFP4 weights for tokens that are not NVFP4.
    for x in (torch.zeros(5, 128, dtype=torch.bfloat16), torch.zeros(5, 128, dtype=torch.uint8).view(E4M3)):
        with pytest.raises(NotImplementedError, match=r"no kernel for hidden_states of .* with nvfp4 weights"):
            oxmoe.trtllm_fp4_block_scale_routed_moe(**layer.call(), **call | {"hidden_states": x})
