"""Right calls of the public API with small random operands, and what their results must be.

`draw` makes one; `fuzz_mutations.py` spoils some, `fuzz_api.py` calls them and judges. A call's `check` sees clones of
the operands as they were before the call, so what a mutation made of them is judged by the same reference.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import oxmoe
from cases import ACTIVATIONS, PATTERNS, Shape, make_layer, make_routing, tie_free_groups
from fp8_cases import make_fp8, make_fp8_tensor
from fuzz_dlpack import Foreign
from fuzz_expected import E4M3, Operands, expected_moe, fp32, parts
from int4_cases import make as make_int4
from mxfp4_cases import DTYPES, make_blocks
from mxfp8_cases import make_mxfp8
from nvfp4_cases import make as make_nvfp4
from oxmoe import _oxmoe, reference
from oxmoe.testing import Bar, assert_close_ulp, relative_norm

FORMATS = ("f32", "bf16", "f16", "mxfp4", "mxfp4-a8", "fp8_block", "fp8_tensor", "mxfp8", "nvfp4", "nvfp4-a4", "int4")
# Layers are tiny and have a few rows: one value of GEMM1's output that rounds to its neighbour moves a whole row by an
# ulp or two. These bars look for a wrong row, expert, scale or option; tests/core/test_moe.py has the bars of accuracy.
BARS = {
    torch.float32: Bar(max_ulp=4096.0, ulps=512.0, share=1e-2),
    torch.bfloat16: Bar(max_ulp=16.0, ulps=4.0, share=5e-2),
    torch.float16: Bar(max_ulp=16.0, ulps=4.0, share=5e-2),
}
# The bar of the difference's relative norm, for formats whose activations are quantised.
NORMS = {"mxfp4-a8": 0.1, "fp8_block": 0.1, "fp8_tensor": 0.15, "mxfp8": 0.1, "nvfp4-a4": 0.35}


@dataclass
class Call:
    """One call by name. Names with a dot are operands of ExpertWeights, which `run` makes first."""

    name: str
    run: Callable[[Operands], Any]
    operands: Operands
    check: Callable[[Operands, Any], None]
    # Operands that the call writes.
    outputs: tuple[str, ...] = ()
    # The mutations of the call, in words.
    mutations: list[str] = field(default_factory=list)
    # Called between the making of ExpertWeights and their use.
    between: Callable[[], None] | None = None


def contract(operands: Operands, **shapes: str) -> dict[str, int]:
    """Returns sizes by letter. Raises AssertionError if a tensor's shape does not have its letters, or if two tensors
    disagree."""
    sizes: dict[str, int] = {}
    for name, letters in shapes.items():
        value = operands.get(name.replace("__", "."))
        if value is None:
            continue
        assert isinstance(value, Tensor), f"{name}: {type(value).__name__} was taken for a tensor"
        assert value.ndim == len(letters.split()), f"{name}: shape {tuple(value.shape)} was taken for [{letters}]"
        for letter, size in zip(letters.split(), value.shape, strict=True):
            wanted = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
            assert wanted == size, f"{name}: {letter} is {size}, elsewhere {wanted}"
    return sizes


def same(actual: Any, expected: Tensor, what: str) -> None:
    got = as_torch(actual)
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if got.numel() == 0:
        return
    got, expected = (t.float() if t.dtype == E4M3 else t for t in (got, expected))
    equal = (got == expected) | (got.isnan() & expected.isnan() if got.is_floating_point() else got == expected)
    assert bool(equal.all()), f"{what}: {int((~equal).sum())} of {equal.numel()} differ"


def as_torch(value: Any) -> Tensor:
    value = value.array if isinstance(value, Foreign) else value
    return value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))


def close(actual: Any, x: Tensor, reference_of: Callable[[Tensor], Tensor], norm: float | None = None) -> None:
    """Compares a result with that of the reference, reference_of(x). norm: the bar of formats that quantise rows."""
    got, expected = as_torch(actual), reference_of(x)
    assert got.shape == expected.shape and got.dtype == expected.dtype, f"{tuple(got.shape)}, {got.dtype}"
    # Sums near the largest number overflow in one order and not in another, and make others infinity or NaN.
    small = expected.isfinite() & (expected.abs() < torch.finfo(expected.dtype).max / 64)
    calm = small.flatten(1).all(1) if expected.ndim > 1 else small
    if norm is not None:
        return close_in_norm(got[calm], expected[calm], norm)
    if expected.dtype == torch.float32 and expected.ndim > 1 and expected.shape[-1] > 1:
        try:
            return assert_close_ulp(got[calm], expected[calm], BARS[expected.dtype])
        except AssertionError:
            # A row whose terms cancel has a size that their roundings decide. It is compared with how far it moves.
            nudged = x * (1 + 2.0**-22 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).sign())
            moved, error = ((other.double() - expected.double()).norm(dim=-1) for other in (reference_of(nudged), got))
            steady = moved <= 1e-5 * expected.double().norm(dim=-1)
            beyond = error[calm] > 64 * moved[calm]
            assert not bool((beyond & ~steady[calm]).any()), "a row that cancels is wrong by more than its roundings"
            calm = calm.view(-1, *[1] * (steady.ndim - 1)) & steady
            return assert_close_ulp(got[calm], expected[calm], BARS[expected.dtype])
    got, expected = got[calm], expected[calm]
    if expected.ndim > 1 and expected.shape[-1] == 1:
        # A row of one number has no size of its own if its sum cancels, so all rows together are one.
        got, expected = got.reshape(1, -1), expected.reshape(1, -1)
    return assert_close_ulp(got, expected, BARS[expected.dtype])


def close_in_norm(got: Tensor, expected: Tensor, norm: float) -> None:
    """Compares the difference's norm with a bar. Two numbers below the smallest normal one may round to neighbours."""
    kind = torch.finfo(expected.dtype)
    step = kind.smallest_normal * kind.eps
    off = got.double() - expected.double()
    off = torch.where(expected.abs() < kind.smallest_normal, off.sign() * (off.abs() - step).clamp(min=0), off)
    error = relative_norm(expected.double() + off, expected)
    assert error <= norm, f"relative norm {error:.3g}, bar {norm:g}"


# Experts


def draw_experts(rng: random.Random, generator: torch.Generator, top_k: int, experts: int) -> tuple[str, Operands]:
    """Returns (format, operands of its ExpertWeights, with the prefix "experts.")."""
    format = rng.choice(FORMATS)
    step = {"fp8": 128, "mxf": 32, "nvf": 16, "int": 32}.get(format[:3], 1)
    hidden, intermediate = (step * rng.randint(1, 2 if step == 128 else 4 if step > 1 else 70) for _ in range(2))
    options = dict(rng.choice(list(ACTIVATIONS.values())))
    if format.startswith(("fp8", "nvfp4")) and options.get("layout") == "interleaved":
        options["layout"] = "up_gate" if format.startswith("fp8") else "gate_up"
    if format.startswith("nvfp4") and options.get("layout") == "up_gate":
        options["layout"] = "gate_up"
    shape = Shape("fuzz", experts, top_k, hidden, intermediate, rng.random() < 0.5).with_options(**options)
    operands = _experts(format, shape, rng, generator)
    if shape.gated and options.get("activation", "silu") == "silu" and rng.random() < 0.2:
        operands["experts.alpha"] = torch.rand(experts, generator=generator) + 0.5
        if rng.random() < 0.5:
            operands["experts.beta"] = torch.rand(experts, generator=generator)
            operands["experts.limit"] = torch.rand(experts, generator=generator) + 1
    if options.get("activation") == "situ" and rng.random() < 0.3:
        for name in rng.choice((("situ_beta",), ("situ_linear_beta",), ("situ_beta", "situ_linear_beta"))):
            operands[f"experts.{name}"] = torch.rand(experts, generator=generator) + 0.5
    return format, operands


def _experts(format: str, shape: Shape, rng: random.Random, generator: torch.Generator) -> Operands:
    extra: Operands = {}
    if format in ("f32", "bf16", "f16"):
        layer = make_layer(shape, DTYPES[format], "cpu", generator)
        tensors: Operands = {"w13": layer.w13, "w2": layer.w2}
    elif format.startswith("mxfp4"):
        dtype = "bf16" if format == "mxfp4-a8" else rng.choice(list(DTYPES))
        layer = make_blocks(shape, dtype, "cpu", generator)
        extra = {"activation_dtype": E4M3} if format == "mxfp4-a8" else {"dtype": dtype}
    elif format == "fp8_block":
        layer = make_fp8(shape, "cpu", generator)
    elif format == "fp8_tensor":
        layer = make_fp8_tensor(shape, "cpu", generator, halves=shape.gated, of_rows=rng.random() < 0.3)
        extra = {"per_token": True} if rng.random() < 0.6 else layer.scaling("static")
    elif format == "mxfp8":
        layer = make_mxfp8(shape, "cpu", generator)
    elif format == "int4":
        dtype, group = rng.choice(list(DTYPES)), rng.choice((32, None))
        kind = DTYPES[rng.choice(list(DTYPES))]
        layer = make_int4(shape, generator, group=group, zeros=rng.random() < 0.5, scale_dtype=kind)
        extra = {"dtype": dtype, "w13_zeros": layer.w13_zeros, "w2_zeros": layer.w2_zeros}
    else:
        layer = make_nvfp4(shape, generator, a4=format.endswith("a4"))
        extra = {"w13_global_scale": layer.w13_global, "w2_global_scale": layer.w2_global}
        if layer.roundings is not None:
            extra.update(input_global_scale=layer.roundings[0], a2_global_scale=layer.roundings[1])
    if format not in ("f32", "bf16", "f16"):
        names = ("w13", "w2", "w13_scale", "w2_scale")
        tensors = {name: getattr(layer, name) for name in names}
    tensors |= {"b13": layer.b13, "b2": layer.b2, **dict(shape.options), **extra}
    return {f"experts.{name}": value for name, value in tensors.items() if value is not None}


def builder(format: str) -> Callable[..., oxmoe.ExpertWeights]:
    return getattr(oxmoe.ExpertWeights, format.partition("-")[0])


def check_experts(format: str, operands: Operands, tokens: str = "T H") -> None:
    """Checks the contract of the weights' shapes and of x."""
    gated = operands.get("experts.gated")
    gated = operands.get("experts.activation") != "relu2" if gated is None else gated
    sizes = contract(operands, experts__w13="E W K", experts__w2="E N J", x=tokens)
    per = {"mxfp4": 2, "nvfp4": 2, "int4": 2}.get(format[:5], 1)
    hidden, intermediate = sizes["K"] * per, sizes["J"] * per
    sizes |= {"H": hidden} if "H" not in sizes else {}
    assert sizes["N"] == hidden == sizes["H"], "columns of x, w13 and rows of w2 differ"
    assert sizes["W"] == intermediate * (2 if gated else 1), "rows of w13 and columns of w2 differ"
    contract(operands, experts__w13="E W K", experts__w2="E H J", experts__b13="E W", experts__b2="E H")
    for name in ("alpha", "beta", "limit", "situ_beta", "situ_linear_beta"):
        if isinstance(operands.get(f"experts.{name}"), Tensor):
            assert operands[f"experts.{name}"].shape == (sizes["E"],), f"{name}: one number an expert"


def draw_x(format: str, operands: Operands, rng: random.Random, generator: torch.Generator, *rows: int) -> Tensor:
    hidden = operands["experts.w2"].shape[1]
    dtype = DTYPES.get(operands.get("experts.dtype", format), torch.bfloat16)
    return torch.randn((*rows, hidden), generator=generator).to(dtype)


def draw_tokens(rng: random.Random) -> int:
    return rng.choice((0, 1, 1, 2, 3, 5, 8, 9, 17, 33))


def build_and(function: Callable[..., Any], call: Call, format: str) -> Callable[[Operands], Any]:
    def run(operands: Operands) -> Any:
        experts, options = parts(operands)
        if options.get("weights") is ...:
            options["weights"] = builder(format)(**experts)
        if call.between is not None:
            call.between()
        return function(**options)

    return run


def workspace_of(rng: random.Random, size: int) -> Tensor:
    room = torch.full((size + 512,), 0xFF, dtype=torch.uint8)
    start = -room.data_ptr() % 256
    return room[start : start + size + rng.choice((0, 0, 1, 255))]


def draw_moe(rng: random.Random, generator: torch.Generator) -> Call:
    experts, tokens = rng.randint(1, 6), draw_tokens(rng)
    top_k = rng.randint(1, min(experts, 4))
    format, operands = draw_experts(rng, generator, top_k, experts)
    x = draw_x(format, operands, rng, generator, tokens)
    operands |= {"x": x, "weights": ...}
    if rng.random() < 0.6:
        weights, ids = make_routing(rng.choice(PATTERNS), tokens, experts, top_k, generator)
        operands |= {"topk_weights": weights, "topk_ids": ids.long() if rng.random() < 0.3 else ids}
    else:
        operands |= draw_selection(rng, generator, tokens, experts, top_k)
    if rng.random() < 0.3:
        operands["routed_scaling_factor"] = rng.choice((2.5, 0.5, 1.0))
    if rng.random() < 0.2 and not format.startswith("nvfp4"):
        operands["apply_router_weight_on_input"] = True
    shape = x.shape
    if rng.random() < 0.2:
        operands["no_combine"], shape = True, (tokens, top_k, x.shape[1])
        if rng.random() < 0.5 and "apply_router_weight_on_input" not in operands:
            operands["keep_router_weight"] = True
    if rng.random() < 0.15 and "topk_ids" in operands:
        operands |= {"ep_size": 2, "ep_rank": rng.randint(0, 1)}
    if rng.random() < 0.5:
        operands["out"] = torch.full(shape, 7.0, dtype=x.dtype)
        if rng.random() < 0.3 and not operands.get("no_combine"):
            operands["out"] = x
    call = Call(f"moe {format}", lambda operands: None, operands, lambda before, result: None, ("out", "workspace"))
    if rng.random() < 0.5:
        weights = builder(format)(**parts(operands)[0])
        operands["workspace"] = workspace_of(rng, oxmoe.workspace_bytes(weights, tokens, top_k))
    call.run = build_and(oxmoe.moe, call, format)

    def check(before: Operands, result: Any) -> None:
        check_experts(format, before)
        letters = "T E" if before.get("ep_size", 1) == 1 and before.get("topk_ids") is None else "T G"
        contract(before, x="T H", router_logits=letters, topk_weights="T k", topk_ids="T k", experts__w13="E W K")
        close(result, before["x"], lambda x: expected_moe(format, before | {"x": x}), NORMS.get(format))

    call.check = check
    if format in ("f32", "bf16", "f16", "mxfp4", "fp8_block") and "topk_ids" in operands and rng.random() < 0.4:
        return as_moe_tensors(call, format)
    return call


def as_moe_tensors(call: Call, format: str) -> Call:
    """Returns the call through `moe_tensors`."""
    operands = call.operands
    del operands["weights"]
    if format in ("mxfp4", "fp8_block"):
        operands["format"] = format

    def run(operands: Operands) -> Any:
        experts, options = parts(operands)
        return _oxmoe.moe_tensors(**experts, **options)

    call.name, call.run = f"moe_tensors {format}", run
    return call


@dataclass
class Config:
    """The fields of SGLang's MoeRunnerConfig that oxmoe reads."""

    activation: Any = "silu"
    is_gated: Any = True
    inplace: Any = False
    no_combine: Any = False
    apply_router_weight_on_input: Any = False
    routed_scaling_factor: Any = None
    gemm1_alpha: Any = None
    gemm1_clamp_limit: Any = None


def draw_fused(rng: random.Random, generator: torch.Generator) -> Call:
    experts, tokens = rng.randint(1, 6), draw_tokens(rng)
    top_k = rng.randint(1, min(experts, 4))
    shape = Shape("fuzz", experts, top_k, rng.randint(1, 70), rng.randint(1, 70), rng.random() < 0.5)
    format = rng.choice(("f32", "bf16", "f16"))
    layer = make_layer(shape, DTYPES[format], "cpu", generator)
    x = torch.randn((tokens, shape.hidden), generator=generator).to(DTYPES[format])
    weights, ids = make_routing(rng.choice(PATTERNS), tokens, experts, top_k, generator)
    operands: Operands = {"hidden_states": x, "w1": layer.w13, "w2": layer.w2, "b1": layer.b13, "b2": layer.b2}
    operands |= {"topk_weights": weights, "topk_ids": ids}
    fields: Operands = {"activation": rng.choice(("silu", "gelu", "gelu_tanh"))}
    fields["routed_scaling_factor"] = rng.choice((None, 2.5))
    inplace = rng.random() < 0.5
    if not inplace and rng.random() < 0.3:
        fields["no_combine"] = True
    operands |= {f"config_{name}": value for name, value in fields.items()}

    def run(operands: Operands) -> Any:
        plain = {name: value for name, value in operands.items() if not name.startswith(("config_", "topk_"))}
        config = Config(
            inplace=inplace, **{name[7:]: value for name, value in operands.items() if name.startswith("config_")}
        )
        output = (operands.get("topk_weights"), operands.get("topk_ids"), None)
        return oxmoe.fused_experts(**plain, topk_output=output, moe_runner_config=config)

    def check(before: Operands, result: Any) -> None:
        contract(before, hidden_states="T H", w1="E W H", w2="E H I", topk_weights="T k", topk_ids="T k")
        contract(before, w1="E W H", b1="E W", b2="E H")
        no_combine = before.get("config_no_combine", False)
        factor = fp32("routed_scaling_factor", before.get("config_routed_scaling_factor"))
        operands = before["w1"], before["w2"], before["topk_weights"], before["topk_ids"]
        options = {"b13": before.get("b1"), "b2": before.get("b2"), "no_combine": no_combine}
        options["activation"] = before.get("config_activation", "silu")
        options["routed_scaling_factor"] = 1.0 if factor is None or no_combine else factor
        close(result, before["hidden_states"], lambda x: reference.moe(x, *operands, **options))

    outputs = ("hidden_states",) if inplace else ()
    return Call(f"fused_experts {format}", run, operands, check, outputs)


def draw_rows(rng: random.Random, generator: torch.Generator) -> Call:
    """Draws a call of moe_masked or moe_contiguous."""
    experts, masked = rng.randint(1, 5), rng.random() < 0.5
    format, operands = draw_experts(rng, generator, 1, experts)
    rows = rng.choice((0, 1, 2, 5, 9, 18))
    x = draw_x(format, operands, rng, generator, *((experts, rows) if masked else (experts * rows,)))
    operands |= {"x": x, "weights": ...}
    counts = torch.randint(0, rows + 1, (experts,), generator=generator, dtype=torch.int32)
    if masked:
        operands["masked_m"] = counts
    elif rng.random() < 0.6:
        operands |= {"counts": counts, "alignment": rng.choice((1, 1, max(rows, 1)))}
    else:
        operands["m_indices"] = torch.randint(-1, experts, (x.shape[0],), generator=generator, dtype=torch.int32)
    if rng.random() < 0.3 and "m_indices" not in operands:
        operands["expected_m"] = rng.choice((1, 3, 1000))
    if rng.random() < 0.5:
        operands["out"] = torch.full(x.shape, 7.0, dtype=x.dtype) if rng.random() < 0.7 else x
    function = oxmoe.moe_masked if masked else oxmoe.moe_contiguous
    call = Call(f"{function.__name__} {format}", lambda o: None, operands, lambda b, r: None, ("out", "workspace"))
    if rng.random() < 0.3 and "m_indices" not in operands:
        weights = builder(format)(**parts(operands)[0])
        size = oxmoe.masked_workspace_bytes(weights, experts * rows)
        operands["workspace"] = workspace_of(rng, size)
    call.run = build_and(function, call, format)

    def check(before: Operands, result: Any) -> None:
        check_experts(format, before, "E R H" if masked else "R H")
        contract(before, experts__w13="E W K", x="E R H" if masked else "R H", masked_m="E", counts="E", m_indices="R")
        flat = before["x"].reshape(-1, before["x"].shape[-1])
        ids = _experts_of_rows(before, masked, flat.shape[0])
        plain = {name: value for name, value in before.items() if "." in name}
        given = {**plain, "topk_weights": torch.ones((flat.shape[0], 1)), "topk_ids": ids[:, None]}
        got = as_torch(result).reshape(flat.shape)
        counted = ids >= 0 if before.get("m_indices") is None else torch.ones_like(ids, dtype=torch.bool)
        close(got[counted], flat, lambda x: expected_moe(format, given | {"x": x})[counted], NORMS.get(format))
        if before.get("out") is not None:
            same(got[~counted], before["out"].reshape(flat.shape)[~counted], "rows beyond the counts")

    call.check = check
    return call


def _experts_of_rows(before: Operands, masked: bool, rows: int) -> Tensor:
    if before.get("m_indices") is not None:
        return before["m_indices"].long()
    ids = torch.full((rows,), -1)
    if masked:
        m = before["x"].shape[1]
        for expert, count in enumerate(before["masked_m"].tolist()):
            ids[expert * m : expert * m + max(0, min(count, m))] = expert
        return ids
    start, alignment = 0, before.get("alignment", 1)
    for expert, count in enumerate(before["counts"].tolist()):
        start = -(-start // alignment) * alignment
        ids[start : start + max(count, 0)] = expert
        start += max(count, 0)
    return ids


# Routing


def draw_selection(
    rng: random.Random, generator: torch.Generator, tokens: int, experts: int, top_k: int, *, groups: bool = True
) -> Operands:
    logits = tie_free_groups(tokens, experts, generator)
    operands: Operands = {"router_logits": logits, "top_k": top_k}
    operands["scoring_func"] = rng.choice(("softmax", "sigmoid", "sqrtsoftplus", "softmax_topk", "identity"))
    if operands["scoring_func"] == "identity":
        operands["router_logits"] = logits.abs()
    operands["renormalize"] = rng.random() < 0.5
    if rng.random() < 0.3:
        operands["correction_bias"] = torch.randn(experts, generator=generator)
    divisors = [n for n in range(2, min(experts // 2, 32) + 1) if experts % n == 0]
    if groups and divisors and rng.random() < 0.4:
        count = rng.choice(divisors)
        kept = rng.randint(1, count)
        if kept * (experts // count) >= top_k:
            operands |= {"num_expert_group": count, "topk_group": kept}
    if rng.random() < 0.2:
        operands["num_token_non_padded"] = torch.tensor(rng.randint(0, tokens), dtype=torch.int32)
    return operands


def groups_that_tie(options: Operands, got_ids: Tensor) -> Tensor:
    """Returns the rows in which the worst group that is kept and the best one that is not differ by rounding alone:
    large logits have sigmoids of almost 1. The chosen experts of such a row must still be of groups that may be kept.
    """
    count, kept = int(options.get("num_expert_group", 0)), int(options.get("topk_group", 0))
    logits, bias = options["router_logits"], options.get("correction_bias")
    tokens, experts = logits.shape
    if not 0 < kept < count or tokens == 0:
        return torch.zeros(tokens, dtype=torch.bool)
    zeros = torch.zeros(experts)
    scoring = {"scoring_func": options["scoring_func"]} if "scoring_func" in options else {}
    choice = reference.choice_values(logits, **scoring, correction_bias=zeros if bias is None else bias)
    best = choice.view(tokens, count, experts // count).sort(-1, descending=True).values
    top2 = (options.get("group_score") or ("max" if bias is None else "top2")) == "top2"
    score = best[..., 0] + best[..., 1] if top2 else best[..., 0]
    ordered = score.sort(1, descending=True).values
    room = 1e-6 * ordered[:, kept].abs().clamp(min=1e-30)
    ties = ordered[:, kept - 1] - ordered[:, kept] <= room
    for row in ties.nonzero().flatten().tolist():
        chosen = [i for i in got_ids[row].tolist() if 0 <= i < experts]
        assert len(chosen) == len(set(chosen)), f"token {row} has an expert twice: {chosen}"
        worst = min((float(score[row, i // (experts // count)]) for i in chosen), default=math.inf)
        least = float(ordered[row, kept] - room[row])
        assert worst >= least, f"token {row} has an expert of a group with score {worst}, and {least} is kept"
    return ties


def draw_topk(rng: random.Random, generator: torch.Generator) -> Call:
    tokens, experts = draw_tokens(rng), rng.choice((1, 2, 4, 6, 8, 16, 33, 60, 64, 128, 160, 256, 512, 896))
    top_k = rng.randint(1, min(experts, 9))
    operands = draw_selection(rng, generator, tokens, experts, top_k)
    if experts <= 128 and rng.random() < 0.4:
        operands["router_logits"] = operands["router_logits"].to(rng.choice((torch.bfloat16, torch.float16)))
    operands["order"] = rng.choice(("weight", "weight", "id"))
    if rng.random() < 0.2:
        operands["num_fused_shared_experts"] = 1
        operands["top_k"] = top_k + 1
        operands["routed_scaling_factor"] = 2.5
    if rng.random() < 0.2:
        operands["apply_routed_scaling_factor_on_output"] = True
        operands["routed_scaling_factor"] = 2.5
    if rng.random() < 0.5:
        operands["topk_weights"] = torch.full((tokens, operands["top_k"]), 7.0)
        operands["topk_ids"] = torch.full((tokens, operands["top_k"]), 7, dtype=torch.int32)

    def check(before: Operands, result: Any) -> None:
        contract(before, router_logits="T E", correction_bias="E", topk_weights="T k", topk_ids="T k")
        options = {name: value for name, value in before.items() if name not in ("topk_weights", "topk_ids")}
        if not 1e-30 < abs(options.get("routed_scaling_factor", 1.0)) < 1e30:
            return  # fp32 has no such number, or not its reciprocal
        weights, ids = reference.topk(**options)
        got_weights, got_ids = (as_torch(part) for part in result)
        assert got_weights.shape == weights.shape and got_ids.shape == ids.shape, f"shape {tuple(got_ids.shape)}"
        decided = ~groups_that_tie(options, got_ids)
        weights, ids, got_weights, got_ids = (part[decided] for part in (weights, ids, got_weights, got_ids))
        options["router_logits"] = options["router_logits"][decided]
        # If two scores differ by their rounding, either choice is right: the score of the chosen expert decides.
        if not torch.equal(got_ids, ids):
            names = ("scoring_func", "correction_bias", "num_expert_group", "topk_group", "group_score")
            choice = reference.choice_values(
                options["router_logits"], **{name: options[name] for name in names if name in options}
            )
            routed = (ids < choice.shape[1]).all(0)
            pairs = [choice.gather(1, part[:, routed].long().clamp(0, choice.shape[1] - 1)) for part in (got_ids, ids)]
            sides = [part.sort(1).values for part in pairs]
            torch.testing.assert_close(*sides, rtol=1e-5, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(got_weights, weights, rtol=2e-4, atol=1e-5, equal_nan=True)

    def run(operands: Operands) -> Any:
        return oxmoe.topk(**operands)

    return Call("topk", run, operands, check, ("topk_weights", "topk_ids"))


def draw_sort(rng: random.Random, generator: torch.Generator) -> Call:
    tokens, experts = draw_tokens(rng), rng.choice((1, 2, 5, 32, 257, 900))
    shares = rng.random() < 0.3
    # With first_expert, ids of other ranks' experts are skipped; without it there are no such ids.
    ids = torch.randint(-1, experts + shares, (tokens, rng.randint(1, 5)), generator=generator)
    operands: Operands = {"topk_ids": ids if rng.random() < 0.3 else ids.int(), "num_experts": experts}
    if shares:
        operands["first_expert"] = rng.randint(0, experts)

    def check(before: Operands, result: Any) -> None:
        contract(before, topk_ids="T k")
        given = [name for name in ("num_experts", "first_expert") if before.get(name) is not None]
        before |= {name: int(before[name]) for name in given}  # True is 1
        names = ("histogram", "offsets", "place_of_slot", "slot_of_place")
        for name, got, expected in zip(names, result, reference.sort_by_expert(**before), strict=True):
            same(got, expected, name)

    return Call("sort_by_expert", lambda operands: oxmoe.sort_by_expert(**operands), operands, check)


def draw_routing(rng: random.Random, generator: torch.Generator) -> Call:
    tokens, experts = draw_tokens(rng), rng.choice((1, 2, 4, 6, 32, 128))
    logits = tie_free_groups(tokens, experts, generator)
    operands: Operands = {"logits": logits, "n_expts_act": rng.randint(1, min(experts, 6))}
    operands["sm_first"] = rng.random() < 0.5
    if rng.random() < 0.3 and experts % 2 == 0:
        operands["simulated_ep"] = 2
    if rng.random() < 0.3:
        operands["n_rows"] = rng.choice(
            (rng.randint(0, tokens), torch.tensor(rng.randint(0, tokens), dtype=torch.int32))
        )

    def check(before: Operands, result: Any) -> None:
        contract(before, logits="T E")
        rows = before["logits"].shape[0]
        if isinstance(before.get("n_rows"), int):
            before["n_rows"] = max(0, min(before["n_rows"], rows))
        gates, *tables = reference.routing_tables(**before)
        data, gather, scatter = result
        metadata = data.expt_data
        got = (data.expt_hist, metadata.slice_offs, gather.src_indx, gather.dst_indx)
        got += (metadata.block_offs_data, metadata.block_schedule_data)
        for number, (one, expected) in enumerate(zip(got, tables, strict=True)):
            same(as_torch(one), expected, f"table {number}")
        torch.testing.assert_close(as_torch(data.gate_scal), gates, rtol=2e-2, atol=1e-5, equal_nan=True)
        same(as_torch(scatter.src_indx), tables[3], "scatter")

    return Call("routing", lambda operands: oxmoe.routing(**operands), operands, check)
