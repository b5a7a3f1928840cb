"""Tokens of SGLang's all-to-all dispatchers on oxmoe's experts, in both of its versions, without the all-to-all. The
tokens that it would send are compared with `dispatch_dtype`; those that it would bring are made here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import make_routing
from fp8_cases import NORM, make_fp8
from mxfp8_cases import make_mxfp8
from oxmoe import quantize, reference
from oxmoe.testing import FP8_BAR, assert_close_ulp, relative_norm, same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.moe.moe_runner.deep_gemm import DeepGemmMoeQuantInfo
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher import deepep as sglang_deepep
from sglang.srt.layers.moe.token_dispatcher.deepep import (
    DeepEPLLCombineInput,
    DeepEPLLDispatchOutput,
    DeepEPNormalCombineInput,
    DeepEPNormalDispatchOutput,
)
from sglang.srt.layers.moe.utils import MoeA2ABackend

from mxfp4_blocks import SWIGLU, Blocks
from oxmoe.sglang import deepep, dispatch, dispatch_dtype
from oxmoe.sglang.deepep import A2A_BACKENDS, tell_dispatcher
from oxmoe.sglang.layers import check_layer
from sglang_server import (
    ADAPTER,
    NEW,
    SHAPE,
    VERSION,
    MoeRunner,
    MoeRunnerBackend,
    MoeRunnerConfig,
    fused_moe,
    installed,
    only_cores,
    server,
)
from sglang_server import operands as plain_operands
from test_sglang_fp8 import MXFP8, fp8_layer
from test_sglang_fp8 import SHAPE as FP8
from test_sglang_swaps import mxfp4_layer


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


# Tokens that are sent


def test_sglangs_names() -> None:
    """Every --moe-a2a-backend of this SGLang is served or refused by name, and none is invented."""
    for name in (member.value for member in MoeA2ABackend):
        if name in A2A_BACKENDS:
            for mode in dispatch.modes(name):
                # mooncake sends fp8 and nothing else.
                found = dispatch_dtype(name, weights="fp8_block", mode=mode, version=VERSION)
                assert (found.layout, found.dtype) == (
                    dispatch._LAYOUTS[name][mode or ""],
                    "bf16" if name == "none" else "fp8",
                )
        else:
            with pytest.raises(NotImplementedError, match=f"--moe-a2a-backend {name}: not served"):
                dispatch_dtype(name, weights="bf16", version=VERSION)
    known = {member.value for member in MoeA2ABackend}
    for name in (*dispatch._LAYOUTS, *dispatch._UNSERVED):
        if name not in known:
            with pytest.raises(ValueError, match=f"SGLang {re.escape(VERSION)} has none, deepep, .*; got '{name}'"):
                dispatch_dtype(name, weights="bf16", version=VERSION)
    runners = {member.value for member in MoeRunnerBackend}
    for name in dispatch._RUNNERS:
        assert name in runners or name == "oxmoe" or not dispatch._has(VERSION, name)


class _Buffer:
    group_size = 1

    def low_latency_dispatch(self, *arguments: Any, **options: Any) -> tuple[None, ...]:
        self.sent = options
        return (None,) * 5


def sent(runner: str, quant_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the options with which SGLang's own dispatcher calls DeepEP."""
    implementation = sglang_deepep._DeepEPDispatcherImplLowLatency
    dispatcher, buffer = implementation.__new__(implementation), _Buffer()
    dispatcher.num_max_dispatch_tokens_per_rank, dispatcher.num_experts = 16, 8
    dispatcher.return_recv_hook, dispatcher._get_buffer = True, lambda: buffer
    with server(runner, a2a="deepep"):
        if NEW:
            from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

            dispatcher.runner_backend = resolve_moe_runner_backend(runner)
        dispatcher.set_quant_config(quant_config)
        none = torch.empty(0)
        dispatcher._dispatch_core(*(none for _ in inspect.signature(dispatcher._dispatch_core).parameters))
    return buffer.sent


class _Layer:
    """The attributes of a layer that tell_dispatcher sets."""

    def __init__(self) -> None:
        self.dispatcher = self
        self.quant_config: dict[str, Any] = {}

    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        self.quant_config = quant_config


def told(weights: str) -> dict[str, Any]:
    layer = _Layer()
    with server(a2a="deepep"):
        tell_dispatcher(layer, weights, VERSION)
    return layer.quant_config


CASES: list[tuple[str, str, dict[str, Any], bool]] = [
    ("flashinfer_cutedsl", "nvfp4", {}, False),
    ("flashinfer_cutedsl", "nvfp4", {"input_global_scale": torch.ones(1)}, True),
    ("deep_gemm", "fp8_block", {}, False),
    ("deep_gemm", "bf16", {"dispatcher_output_dtype": "bf16", "bf16_dispatch": True}, False),
    ("cutlass", "w4afp8", {"low_latency_dispatcher_output_dtype": "fp8"}, False),
]


@pytest.mark.parametrize(("runner", "weights", "quant_config", "nvfp4"), CASES)
def test_what_sglang_sends(runner: str, weights: str, quant_config: dict[str, Any], nvfp4: bool) -> None:
    options = sent(runner, quant_config)
    found = dispatch_dtype(
        "deepep", runner, weights=weights, mode="low_latency", nvfp4=nvfp4, options=options, version=VERSION
    )
    assert found.options == {name: options[name] for name in found.options}
    assert options["use_fp8"] == (found.dtype == "fp8") and ("use_nvfp4" in options) == nvfp4


@pytest.mark.parametrize("weights", ["bf16", "fp8_block", "mxfp4", "mxfp8"])
def test_what_oxmoe_asks_for(weights: str) -> None:
    runner = "oxmoe" if NEW else "auto"
    options = sent(runner, told(weights))
    dispatch_dtype("deepep", weights=weights, mode="low_latency", options=options, version=VERSION)


def test_the_mix_up() -> None:
    """fp8's options on a bf16 or NVFP4 dispatch are one error with what is needed and what was given."""
    wrong = {"use_fp8": False, "round_scale": True, "use_ue8m0": True, "async_finish": False}
    words = (
        "options: flashinfer_cutedsl with nvfp4 weights behind --moe-a2a-backend deepep (low_latency) takes a bf16 "
        "dispatch: needed use_fp8=False, no round_scale, no use_ue8m0; given round_scale=True, use_ue8m0=True, of "
        "which round_scale and use_ue8m0 are options of an fp8 dispatch (int32 scales)"
    )
    given: dict[str, Any] = {"weights": "nvfp4", "mode": "low_latency", "version": VERSION}
    with pytest.raises(ValueError, match=re.escape(words)):
        dispatch_dtype("deepep", "flashinfer_cutedsl", options=wrong, **given)
    with pytest.raises(
        ValueError, match="takes a nvfp4 dispatch: needed use_fp8=False, use_nvfp4=True, no round_scale"
    ):
        dispatch_dtype("deepep", "flashinfer_cutedsl", options={**wrong, "use_nvfp4": True}, nvfp4=True, **given)
    with pytest.raises(ValueError, match="needed use_fp8=True; given use_fp8=False"):
        dispatch_dtype("deepep", weights="fp8_block", mode="low_latency", options={"use_fp8": False}, version=VERSION)
    # Options that are switched off ask for nothing.
    dispatch_dtype("deepep", "flashinfer_cutedsl", options={**wrong, "round_scale": False, "use_ue8m0": False}, **given)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (("deepep",), {"weights": "bf16"}, ValueError, "mode: expected 'normal' or 'low_latency'"),
        (("deepep", "triton"), {"weights": "bf16", "mode": "normal"}, ValueError, "alone; got 'triton'"),
        (("deepep",), {"weights": "int8", "mode": "normal"}, ValueError, "oxmoe behind .* takes bf16, .*; got 'int8'"),
        (("deepep", "flashinfer_cutedsl"), {"weights": "nvfp4", "mode": "normal"}, ValueError, "takes 'low_latency'"),
        (
            ("mooncake",),
            {"weights": "mxfp4"},
            ValueError,
            r"mooncake .* always sends fp8, but oxmoe with mxfp4 .* with another --moe-a2a-backend \(none, .*, pplx\)",
        ),
        (
            ("mooncake",),
            {"weights": "bf16", "version": "0.5.12.post1"},
            ValueError,
            r"--moe-a2a-backend \(none, deepep, nixl\)",
        ),
        (
            ("megamoe",),
            {"weights": "bf16"},
            NotImplementedError,
            "megamoe: not served: its kernel .*; start with one of none, deepep, mooncake, nixl, pplx",
        ),
        (("deepep",), {"weights": "bf16", "mode": "low_latency", "nvfp4": True}, ValueError, "nvfp4: only of nvfp4"),
        (("none",), {"weights": "bf16", "mode": "normal"}, ValueError, "mode: expected None"),
        (("none",), {"weights": "bf16", "version": "0.4"}, ValueError, "version: expected 0.5.12.post1 to 0.5.23 or n"),
        (
            ("deepep", "humming"),
            {"weights": "bf16", "mode": "normal", "version": "0.5.12.post1"},
            ValueError,
            "humming",
        ),
    ],
)
def test_what_dispatch_dtype_refuses(
    arguments: tuple[str, ...], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        dispatch_dtype(*arguments, **options)


@pytest.mark.parametrize(("a2a", "weights"), [("mooncake", "bf16"), ("deepep", "f16"), ("flashinfer", "bf16")])
def test_refused_at_load(a2a: str, weights: str) -> None:
    with server(a2a=a2a), pytest.raises((ValueError, NotImplementedError)):
        tell_dispatcher(_Layer(), weights, VERSION)


# Tokens that arrive

# All formats have FP8's sizes, which Hopper's kernels take. A share of moved elements needs many elements on a GPU.
TOKENS = {"cpu": 11, "cuda": 64}
UNTOUCHED = -12345.0
Truth = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes moe_masked write into an output of UNTOUCHED, so that rows that it does not write show."""

    def masked(x: Tensor, *operands: Any, **options: Any) -> Tensor:
        out = torch.full(x.shape, UNTOUCHED, dtype=torch.bfloat16, device=x.device)
        return oxmoe.moe_masked(x, *operands, **options, out=out)

    monkeypatch.setattr(deepep, "moe_masked", masked)


def routing(device: str, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    weights, ids = make_routing("holes", TOKENS[device], FP8.experts, FP8.top_k, rng)
    return weights.to(device), ids.to(device)


def in_rows(x: Tensor, ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns low latency's layout of tokens: rows [El, m, H], poisoned beyond the counts; counts; each slot's row."""
    given, ids = x.float().cpu(), ids.cpu()
    rows = torch.full((experts, 2 * len(x) + 1, *x.shape[1:]), torch.nan)
    counts, places = torch.zeros(experts, dtype=torch.int32), torch.zeros_like(ids)
    for t, j in ((t, j) for t in range(ids.shape[0]) for j in range(ids.shape[1])):
        expert = int(ids[t, j])
        if expert >= 0:
            rows[expert, counts[expert]] = given[t]
            places[t, j] = counts[expert]
            counts[expert] += 1
    return rows.to(x.dtype).to(x.device), counts.to(x.device), places.to(x.device)


def combined(out: Tensor, weights: Tensor, ids: Tensor, places: Tensor) -> Tensor:
    """Returns the weighted sums that DeepEP's combine makes."""
    total = torch.zeros((ids.shape[0], out.shape[-1]), device=out.device)
    for j in range(ids.shape[1]):
        own = out[ids[:, j].clamp(min=0).long(), places[:, j].long()].float() * weights[:, j, None]
        total += own.where(ids[:, j, None] >= 0, 0.0)
    return total.to(out.dtype)


def low_latency(apply: Any, x: Tensor, x_scale: Tensor | None, topk: tuple[Tensor, Tensor], experts: int) -> Tensor:
    """Returns a layer's combined results in this layout; x_scale is sent column-major."""
    weights, ids = topk
    rows, counts, places = in_rows(x, ids, experts)
    scale = None if x_scale is None else in_rows(x_scale, ids, experts)[0].transpose(1, 2).contiguous().transpose(1, 2)
    low = apply(DeepEPLLDispatchOutput(rows, scale, ids.long(), weights, counts, 3))
    out = low.hidden_states
    assert isinstance(low, DeepEPLLCombineInput) and out.shape == rows.shape and out.device == x.device
    beyond = out[torch.arange(rows.shape[1], device=x.device)[None, :] >= counts[:, None]]
    assert same_bits(beyond, torch.full_like(beyond, UNTOUCHED)), "rows beyond the counts were written"
    return combined(out, weights, ids, places)


def agrees(result: Tensor, weights: oxmoe.ExpertWeights, truth: Truth, x: Tensor, topk: tuple[Tensor, Tensor]) -> None:
    """Checks for the bits of `moe` on CPUs, and on GPUs for results close to the reference truth(x, weights, ids)."""
    if not x.is_cuda:
        assert same_bits(result, oxmoe.moe(x, weights, *topk))
        return
    expected, quantised = truth(x, *topk), weights.format in ("fp8_block", "mxfp8")
    assert_close_ulp(result, expected, FP8_BAR if quantised else None)
    assert not quantised or relative_norm(result, expected) < NORM


def check(
    apply: Any, made: oxmoe.ExpertWeights, truth: Truth, x: Tensor, topk: tuple[Tensor, Tensor], experts: int
) -> None:
    """Checks both layouts."""
    weights, ids = topk
    normal = apply(DeepEPNormalDispatchOutput(x, None, ids.long(), weights, [1] * experts))
    assert isinstance(normal, DeepEPNormalCombineInput)
    agrees(normal.hidden_states, made, truth, x, topk)
    assert normal.topk_weights is weights and normal.topk_ids.dtype == torch.int64
    agrees(low_latency(apply, x, None, topk, experts), made, truth, x, topk)
    nobody = low_latency(apply, x, None, (weights, torch.full_like(ids, -1)), experts)
    assert same_bits(nobody, torch.zeros_like(x))
    empty = apply(DeepEPNormalDispatchOutput(x[:0], None, ids[:0].long(), weights[:0], [0] * experts))
    assert empty.hidden_states.shape == x[:0].shape


def runner_of(name: str, config: MoeRunnerConfig) -> MoeRunner:
    if name != "oxmoe":
        return MoeRunner(MoeRunnerBackend(name), config)
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

    return MoeRunner(resolve_moe_runner_backend(name), config)


RUNNERS = ["deep_gemm", pytest.param("oxmoe", marks=only_cores)]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("a2a", ["deepep", "nixl"])
@pytest.mark.parametrize("name", RUNNERS)
def test_runner_of_bf16(device: str, name: str, a2a: str, rng: torch.Generator) -> None:
    layer, x, weights, ids = plain_operands(FP8, TOKENS[device], device, rng, "holes")
    config = MoeRunnerConfig(num_experts=8, num_local_experts=8, top_k=2, routed_scaling_factor=2.5)
    info = DeepGemmMoeQuantInfo if name == "deep_gemm" else TritonMoeQuantInfo
    options = {"use_fp8": False} if name == "deep_gemm" else {}
    with server(name, a2a=a2a):
        runner = runner_of(name, config)
        check(
            lambda dispatched: runner.run(dispatched, info(w13_weight=layer.w13, w2_weight=layer.w2, **options)),
            layer.weights(),
            lambda x, weights, ids: reference.moe(x, layer.w13, layer.w2, weights, ids),
            x,
            (weights, ids),
            8,
        )


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("a2a", ["deepep", "mooncake"])
@pytest.mark.parametrize("name", RUNNERS)
def test_runner_of_fp8(device: str, name: str, a2a: str, rng: torch.Generator) -> None:
    """Tokens are bf16, or were quantised before they were sent."""
    layer = make_fp8(FP8, device, rng)
    x, topk = layer.x(TOKENS[device], rng), routing(device, rng)
    config = MoeRunnerConfig(num_experts=FP8.experts, num_local_experts=FP8.experts, top_k=FP8.top_k)
    scales = {
        "w13_scale": torch.nn.Parameter(layer.w13_scale, requires_grad=False),
        "w2_scale": torch.nn.Parameter(layer.w2_scale, requires_grad=False),
    }
    kind = DeepGemmMoeQuantInfo if name == "deep_gemm" else TritonMoeQuantInfo
    fp8 = {"use_fp8": True} if name == "deep_gemm" else {"use_fp8_w8a8": True}
    info = kind(w13_weight=layer.w13, w2_weight=layer.w2, block_shape=[128, 128], **scales, **fp8)
    made = layer.weights()
    with server(name, a2a=a2a):
        runner = runner_of(name, config)
        apply = lambda dispatched: runner.run(dispatched, info)  # noqa: E731
        truth = lambda x, weights, ids: reference.moe(x, layer.w13, layer.w2, weights, ids, **scales)  # noqa: E731
        check(apply, made, truth, x, topk, FP8.experts)
        codes, scale = quantize.per_token_group_quant_fp8(x, 128)
        out = apply(DeepEPNormalDispatchOutput(codes, scale.t().contiguous().t(), topk[1].long(), topk[0], []))
        agrees(out.hidden_states, made, truth, x, topk)
        agrees(low_latency(apply, codes, scale, topk, FP8.experts), made, truth, x, topk)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("format", ["bf16", "fp8_block", "mxfp8", "mxfp4"])
def test_methods(device: str, format: str, rng: torch.Generator) -> None:
    """Whole layers of the quantization "oxmoe" tell their dispatchers what to bring."""
    layer, x, weights, ids = plain_operands(FP8, TOKENS[device], device, rng, "holes")
    scales: dict[str, Tensor] = {}
    with server():
        if format == "bf16":
            module = fused_moe(layer)
            made = layer.weights()
        elif format == "mxfp4":
            blocks = Blocks(FP8.experts, FP8.hidden, 128, device, rng)
            module = mxfp4_layer(blocks)
            made = module.quant_method.weights
        else:
            checkpoint = {"checkpoint": MXFP8} if format == "mxfp8" else {}
            layer = (make_mxfp8 if format == "mxfp8" else make_fp8)(FP8, device, rng)
            module, made = fp8_layer(layer, "oxmoe", **checkpoint), layer.weights()
            scales = {"w13_scale": layer.w13_scale, "w2_scale": layer.w2_scale}

    def truth(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if format == "mxfp4":
            return blocks.expected(x, weights, ids, **SWIGLU, layout="interleaved")
        return reference.moe(x, layer.w13, layer.w2, weights, ids, **scales)

    with server(a2a="deepep"):
        check(
            lambda dispatched: module.quant_method.apply(module, dispatched),
            made,
            truth,
            x,
            (weights, ids),
            FP8.experts,
        )
    module.dispatcher = _Layer()
    with server(a2a="deepep"):
        module.quant_method.process_weights_after_loading(module)
    dtype = "fp8" if format == "fp8_block" else "bf16"
    assert module.dispatcher.quant_config == {"dispatcher_output_dtype": dtype, "bf16_dispatch": dtype == "bf16"}


def test_what_is_refused(rng: torch.Generator) -> None:
    layer, x, weights, ids = plain_operands(SHAPE, 4, "cpu", rng)
    ids = ids.long()
    codes, scale = quantize.per_token_group_quant_fp8(x, 128)
    info = DeepGemmMoeQuantInfo(w13_weight=layer.w13, w2_weight=layer.w2, use_fp8=False)
    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ValueError, "tokens came as fp8 .*but bf16 experts take bf16: send them as bf16", (codes, scale), {}),
        (ValueError, "tokens came as torch.float16 without scales to bf16 experts", (x.half(), None), {}),
        (ValueError, "tokens came as torch.uint8 with scales", (x.view(torch.uint8), scale), {}),
        (NotImplementedError, "no_combine is not served behind", (x, None), {"no_combine": True, "inplace": False}),
        (NotImplementedError, "apply_router_weight", (x, None), {"apply_router_weight_on_input": True}),
    ]
    for error, words, tokens, options in cases:
        config = MoeRunnerConfig(num_experts=8, num_local_experts=8, top_k=2, **options)
        with server("deep_gemm", a2a="deepep"), pytest.raises(error, match=words):
            runner_of("deep_gemm", config).run(DeepEPNormalDispatchOutput(*tokens, ids, weights, []), info)


def test_overlap_is_refused(rng: torch.Generator) -> None:
    """With --enable-single-batch-overlap SGLang's combine would wait for signals of the down projection."""
    layer, _, _, _ = plain_operands(SHAPE, 1, "cpu", rng)
    with server():
        module = fused_moe(layer)
        module.dispatcher = _Layer()
    with server("deep_gemm", a2a="deepep", overlap=True):
        with pytest.raises(NotImplementedError, match=r"--enable-single-batch-overlap .*down_signals"):
            module.quant_method.process_weights_after_loading(module)
        if NEW:
            with pytest.raises(NotImplementedError, match="--enable-single-batch-overlap"):
                runner_of("deep_gemm", MoeRunnerConfig(num_experts=8, num_local_experts=8, top_k=2))
        else:
            # Some releases refuse an overlap for fused functions, too; in others the combine would wait for ever.
            config = MoeRunnerConfig(num_experts=8, num_local_experts=8, top_k=2)
            with pytest.raises(NotImplementedError, match="--enable-single-batch-overlap"):
                ADAPTER.fused_experts(None, None, config)


def test_a_layer_that_does_not_ask_its_method(rng: torch.Generator) -> None:
    """The layer is SGLang's DeepEPMoE without DeepGEMM, or of 16-bit weights without SGLANG_DEEPEP_BF16_DISPATCH."""
    layer, _, _, _ = plain_operands(SHAPE, 1, "cpu", rng)
    with server():
        module = fused_moe(layer)
    check_layer(module)
    module.deprecate_flag = True
    check_layer(module)
    module.deprecate_flag = False
    with pytest.raises(RuntimeError, match=r"does not ask its method for results; install DeepGEMM, .*BF16_DISPATCH=1"):
        check_layer(module)
