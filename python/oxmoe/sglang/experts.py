"""Runs SGLang's experts on oxmoe's kernels. It knows what SGLang's layers hand over, in all releases that are
served.

The module imports nothing of SGLang. It tells SGLang's types apart by name, so that no module is loaded for a format
that a server does not use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oxmoe import ExpertWeights, moe, prepare_cutlass_fused_moe, prepare_triton_kernel_experts
from oxmoe.peers.sglang import check_config, expert_options
from oxmoe.peers.topk_forms import routing_arguments
from oxmoe.sglang import calls, deepep, server, symmetric
from oxmoe.sglang.dispatch import STANDARD
from oxmoe.sglang.formats import FP8_BLOCK as BLOCK
from oxmoe.weights import expert_weights

if TYPE_CHECKING:
    from oxmoe.peers.expert_ranks import Ranks

SERVED = (
    "served are bf16 and f16 experts (TritonMoeQuantInfo, TritonKernelsQuantInfo, DeepGemmMoeQuantInfo), fp8 experts "
    "with a scale for each 128 x 128 block (TritonMoeQuantInfo, DeepGemmMoeQuantInfo) and MXFP4 experts with 16-bit "
    "activations (TritonKernelsQuantInfo, FlashInferCutlassMxfp4MoeQuantInfo)"
)


@dataclass(frozen=True)
class _Kind:
    """The properties of one type of quant_info."""

    fields: frozenset[str]  # the fields that are read; another one that is set is a format that is not served
    tensors: Callable[[Any], list[Any]]  # the tensors that the weights are made of
    # Makes the weights of quant_info, runner configuration, columns of the input, and whether rows of w13 are [up;
    # gate].
    make: Callable[[Any, Any, int | None, bool], ExpertWeights]
    inplace: bool = False  # whether SGLang's own runner writes its result over the tokens where `inplace` allows it
    global_ids: bool = False  # top-k ids are of all ranks' experts


@dataclass(frozen=True)
class Handover:
    """The steps that SGLang takes with a layer and that its MoeRunnerConfig does not tell.

    Unless `capabilities.layer_decides()`, the layer's loader, top-k and dispatcher follow the server's
    --moe-runner-backend, whichever method the layer has.
    """

    up_first: bool = False  # the loader puts rows of w13 as [up; gate]
    global_ids: bool = False  # the dispatcher leaves ids of all ranks' experts
    scaled: bool = False  # top-k multiplies its weights by the routed scaling factor
    ep_size: int = 1
    ep_rank: int = 0


def activation(config: Any, *, fuse_swiglu_interleaved: bool = False, up_first: bool = False) -> dict[str, Any]:
    """Returns a MoeRunnerConfig's activation, and the order of w13's rows, as options of ExpertWeights."""
    options = expert_options(
        activation=config.activation,
        is_gated=config.is_gated,
        gemm1_alpha=config.gemm1_alpha,
        gemm1_beta=getattr(config, "gemm1_beta", None),
        gemm1_limit=config.gemm1_clamp_limit,
        swiglu_limit=config.swiglu_limit,
        gate_up_interleaved=getattr(config, "gate_up_interleaved", True),
        fuse_swiglu_interleaved=fuse_swiglu_interleaved,
    )
    if up_first and config.is_gated:
        if options["layout"] != "gate_up":
            raise NotImplementedError(
                "oxmoe: SGLang's loader swaps gate and up with this --moe-runner-backend, but these experts have "
                "alternating rows of both; choose another --moe-runner-backend"
            )
        options["layout"] = "up_gate"
    return options


def _fp8_block(info: Any, **options: Any) -> ExpertWeights:
    """Makes fp8 experts from either quant_info. It refuses by name all that are not blocks with fp32 scales."""
    name, block, scales = type(info).__name__, info.block_shape, (info.w13_scale, info.w2_scale)
    if info.w13_weight.dtype != torch.float8_e4m3fn:
        raise NotImplementedError(f"oxmoe: no kernel for {name} of {info.w13_weight.dtype} with scales; {SERVED}")
    if block is None:
        raise NotImplementedError(f"oxmoe: no kernel for {name} with one scale an expert (no block_shape); {SERVED}")
    if list(block) != [BLOCK, BLOCK]:
        raise NotImplementedError(f"oxmoe: no kernel for {name} with block_shape {list(block)}; {SERVED}")
    if any(scale is None or scale.dtype != torch.float32 for scale in scales):
        given = ", ".join("none" if scale is None else str(scale.dtype) for scale in scales)
        raise NotImplementedError(f"oxmoe: no kernel for {name} with scales of {given}, but of float32; {SERVED}")
    return expert_weights(
        info.w13_weight, info.w2_weight, format="fp8_block", w13_scale=scales[0], w2_scale=scales[1], **options
    )


def _with_scales(info: Any) -> list[Any]:
    """Returns the weights, and those scales that belong to the layer. One scale an expert is spread over blocks anew
    at each call, so it is left out."""
    scales = [scale for scale in (info.w13_scale, info.w2_scale) if isinstance(scale, torch.nn.Parameter)]
    return [info.w13_weight, info.w2_weight, *scales]


def _triton(info: Any, config: Any, columns: int | None, up_first: bool) -> ExpertWeights:
    if info.use_fp8_w8a8:
        return _fp8_block(info, b13=info.b13, b2=info.b2, **activation(config, up_first=up_first))
    if info.w13_scale is not None or info.w2_scale is not None or info.block_shape is not None:
        raise NotImplementedError(f"oxmoe: no kernel for TritonMoeQuantInfo with scales, but not fp8; {SERVED}")
    interleaved = getattr(info, "fuse_swiglu_interleaved", False)
    options = activation(config, fuse_swiglu_interleaved=interleaved, up_first=up_first)
    return expert_weights(info.w13_weight, info.w2_weight, b13=info.b13, b2=info.b2, **options)


def _deep_gemm(info: Any, config: Any, columns: int | None, up_first: bool) -> ExpertWeights:
    if config.gemm1_alpha is not None and config.activation != "situ":
        # GPT-OSS's layers have biases, which DeepGEMM's quant_info leaves out.
        raise NotImplementedError(
            "oxmoe: --moe-runner-backend deep_gemm hands over no biases, and experts with gemm1_alpha have them; use "
            "--moe-runner-backend triton_kernel or --quantization oxmoe"
        )
    if info.w13_weight.dtype not in (torch.bfloat16, torch.float16) or info.w13_scale is not None:
        return _fp8_block(info, **activation(config))
    # use_fp8 tells how tokens travel between ranks; weights and tokens are 16-bit here.
    return expert_weights(info.w13_weight, info.w2_weight, **activation(config))


def _triton_kernels(info: Any, config: Any, columns: int | None, up_first: bool) -> ExpertWeights:
    biases = {"w13_bias": info.w13_bias, "w2_bias": info.w2_bias}
    if config.activation == "situ" and info.w13_precision_config is not None:
        raise NotImplementedError(
            "oxmoe: MXFP4 experts of --moe-runner-backend triton_kernel have no SiTU; choose another"
        )
    plain = config.gemm1_alpha is None or config.activation == "situ"
    if len({bias is None for bias in biases.values()}) != 1 or (info.w13_bias is None) != plain:
        given = [name for name, bias in biases.items() if bias is not None]
        raise NotImplementedError(
            f"oxmoe: TritonKernelsQuantInfo with {', '.join(given) or 'no bias'} and gemm1_alpha {config.gemm1_alpha}; "
            "served are both biases with gemm1_alpha (GPT-OSS) or none of the three"
        )
    if config.no_combine:
        raise NotImplementedError("oxmoe: no_combine is not served with --moe-runner-backend triton_kernel")
    if config.apply_router_weight_on_input and info.w13_bias is not None:
        raise NotImplementedError("oxmoe: apply_router_weight_on_input is not served for experts with biases")
    if info.w13_precision_config is not None:
        return prepare_triton_kernel_experts(
            info.w13_weight,
            info.w13_precision_config,
            info.w13_bias,
            info.w2_weight,
            info.w2_precision_config,
            info.w2_bias,
            gemm1_alpha=config.gemm1_alpha,
            gemm1_clamp_limit=config.gemm1_clamp_limit,
        )
    # Weights are [E, H, 2I] and [E, I, H] here, so they are transposed back into memory of their own.
    w13, w2 = (weight.transpose(1, 2).contiguous() for weight in (info.w13_weight, info.w2_weight))
    return expert_weights(w13, w2, b13=info.w13_bias, b2=info.w2_bias, **activation(config))


def _flashinfer_mxfp4(info: Any, config: Any, columns: int | None, up_first: bool) -> ExpertWeights:
    padded = 2 * info.w13_weight.shape[-1] * info.w13_weight.element_size()
    name = "SwigluStep" if getattr(info, "use_swiglu_step", False) else "Swiglu"
    numbers = {"swiglu_alpha": info.swiglu_alpha, "swiglu_beta": info.swiglu_beta, "swiglu_limit": info.swiglu_limit}
    if config.activation == "situ":
        # SGLang's own call leaves the activation out, so it would compute SwiGLU.
        options = activation(config)
        if options["situ_linear_beta"] is None:
            raise NotImplementedError(
                "oxmoe: --moe-runner-backend flashinfer_mxfp4 serves no SiTU without a bound of up"
            )
        name, numbers = "Situ", {option: options[option] for option in ("situ_beta", "situ_linear_beta")}
    made = prepare_cutlass_fused_moe(
        info.w13_weight,
        info.w2_weight,
        (info.w13_weight_scale, info.w2_weight_scale),
        info.w13_bias,
        info.w2_bias,
        tp_rank=_placed(info, config, "moe_tp_rank"),
        activation_type=name,
        **numbers,
        hidden_size=None if columns == padded else columns,
    )
    assert isinstance(made, ExpertWeights)  # InputScaledExperts are int4's alone
    return made


def _placed(info: Any, config: Any, name: str) -> int:
    """Returns the rank's place among the experts. The configuration has it, or in older releases this quant_info."""
    return int(getattr(info if hasattr(info, name) else config, name))


def _memory(*tensors: Any) -> list[Any]:
    """Returns the tensors inside triton_kernels' wrappers, or the tensors themselves."""
    return [getattr(getattr(tensor, "storage", None), "data", tensor) for tensor in tensors]


# This quant_info exists from 0.5.13 on. It is named FlashInferMxfp4CutlassMoeQuantInfo before 0.5.15, and has its
# rank's place before 0.5.22.
_CUTLASS_MXFP4 = _Kind(
    frozenset({"w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_bias", "w2_bias"})
    | {"swiglu_alpha", "swiglu_beta", "swiglu_limit", "use_swiglu_step", "padded_hidden"}
    | {"moe_tp_size", "moe_tp_rank", "moe_ep_size", "moe_ep_rank"},
    lambda info: [info.w13_weight, info.w2_weight, info.w13_weight_scale, info.w2_weight_scale],
    _flashinfer_mxfp4,
    global_ids=True,
)
_KINDS = {
    "TritonMoeQuantInfo": _Kind(
        frozenset({"w13_weight", "w2_weight", "b13", "b2", "fuse_swiglu_interleaved"})
        | {"use_fp8_w8a8", "w13_scale", "w2_scale", "block_shape"},
        lambda info: [*_with_scales(info), info.b13, info.b2],
        _triton,
        inplace=True,
    ),
    "TritonKernelsQuantInfo": _Kind(
        frozenset(
            {"w13_weight", "w2_weight", "w13_bias", "w2_bias", "w13_precision_config", "w2_precision_config"}
            | {"global_num_experts"}
        ),
        lambda info: _memory(info.w13_weight, info.w2_weight, info.w13_bias, info.w2_bias),
        _triton_kernels,
    ),
    "DeepGemmMoeQuantInfo": _Kind(
        frozenset({"w13_weight", "w2_weight", "use_fp8", "w13_scale", "w2_scale", "block_shape"}),
        _with_scales,
        _deep_gemm,
    ),
    "FlashInferCutlassMxfp4MoeQuantInfo": _CUTLASS_MXFP4,
    "FlashInferMxfp4CutlassMoeQuantInfo": _CUTLASS_MXFP4,
}


def _kind(info: Any) -> _Kind:
    name = type(info).__name__
    if name not in _KINDS:
        raise NotImplementedError(f"oxmoe: no kernel for {name}; {SERVED}")
    # NOTE: fields are looked at one by one, so that a format which SGLang adds as a field is refused and not misread.
    given = {field.name: getattr(info, field.name) for field in fields(info) if field.name not in _KINDS[name].fields}
    used = [field for field, value in given.items() if value is not None and value is not False]
    if used:
        raise NotImplementedError(f"oxmoe: no kernel for {name} with {', '.join(used)}; {SERVED}")
    return _KINDS[name]


class Experts:
    """Holds one layer's ExpertWeights. They are made once for each set of weight tensors that SGLang gives the
    layer."""

    def __init__(self) -> None:
        self._made_for: tuple[int, ...] | None = None
        self._weights: ExpertWeights | None = None
        self._kind: _Kind | None = None
        self._sources: list[Tensor] = []
        self._handover = Handover()
        self._offloaded = False

    def forget(self) -> None:
        """Drops the weights, and the tensors that they were made of."""
        self._made_for, self._weights, self._sources = None, None, []

    def follow(self, handover: Handover) -> None:
        """Sets the layer's handover."""
        self._handover = handover

    def prepare(self, quant_info: Any, config: Any, columns: int | None = None) -> ExpertWeights:
        """Returns the layer's ExpertWeights. It is the same object until SGLang gives the layer other tensors.

        columns: the columns of the input, beyond which weights may be padded. The weights are made at the first
        call, which SGLang makes before it captures graphs. Inside a capture it is a RuntimeError.
        """
        if type(quant_info).__name__ not in _KINDS:
            _kind(quant_info)
        tensors = _KINDS[type(quant_info).__name__].tensors(quant_info)
        # NOTE: addresses tell tensors apart, not objects: SGLang gives a parameter other memory by assigning its
        # `.data`.
        identity = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        if self._weights is not None and identity == self._made_for:
            return self._weights
        self._kind = _kind(quant_info)
        check_config(config)
        if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "oxmoe: a MoE layer's weights are prepared at its first call, which a CUDA graph cannot capture; run "
                "the model once before the capture (SGLang does, unless its warm-up was skipped). With "
                "--cpu-offload-gb or --offload-group-size every call gets other weights: start with "
                "--disable-cuda-graph"
            )
        self._offloaded = server.offloads() is not None
        self._weights = self._kind.make(quant_info, config, columns, self._handover.up_first)
        self._made_for = identity
        # While they are held, no other tensor gets their addresses.
        self._sources = [tensor.detach() for tensor in tensors if tensor is not None]
        return self._weights

    def run(self, dispatch_output: Any, quant_info: Any, config: Any, hooks: Any = None) -> Tensor:
        """Runs SGLang's dispatched tokens. Returns [T, H], or with no_combine [T, k, H], or behind an all-to-all
        what `deepep.run` returns."""
        result = self._run(dispatch_output, quant_info, config, hooks)
        if self._offloaded:
            # SGLang gave the layer copies of its weights for this call alone; kept, they would fill the GPU.
            self.forget()
        return result

    def _run(self, dispatch_output: Any, quant_info: Any, config: Any, hooks: Any) -> Tensor:
        if hooks is not None:
            raise NotImplementedError(
                "oxmoe: LoRA on MoE layers is not served; run LoRA models without moe in OXMOE_SGLANG"
            )
        x, form = dispatch_output.hidden_states, deepep.layout(dispatch_output)
        weights = self.prepare(quant_info, config, x.shape[-1])
        assert self._kind is not None
        calls.ran(config)
        if form != STANDARD:
            if self._kind.global_ids:
                raise NotImplementedError(f"oxmoe: {type(quant_info).__name__} is not served behind an all-to-all")
            return deepep.run(dispatch_output, form, weights, config)
        topk_output = dispatch_output.topk_output
        if self._kind.inplace and config.inplace and config.no_combine:
            raise ValueError("oxmoe: inplace and no_combine exclude each other (the result is [T, k, H])")
        if self._kind.global_ids:
            if x.shape[0] == 0:
                return x
            layer = calls.layer_of(config)
            # Top-k says by the layer whether its weights contain the factor.
            scaled = layer is None or layer.should_fuse_routed_scaling_factor_in_topk
            factor = scaling_factor(x, config, scaled=scaled)
            ranks: Ranks = {
                "ep_size": _placed(quant_info, config, "moe_ep_size"),
                "ep_rank": _placed(quant_info, config, "moe_ep_rank"),
            }
            given = routing(topk_output, config)
            return moe(x, weights, **given, **ranks, routed_scaling_factor=factor, out=symmetric.output_like(x))
        return run_local(x, topk_output, weights, config, self._handover)


def run_dispatched(dispatch_output: Any, weights: ExpertWeights, config: Any, handover: Handover) -> Any:
    """Runs a layer's tokens on weights that were made at load. Returns what SGLang's dispatcher combines."""
    calls.ran(config)
    form = deepep.layout(dispatch_output)
    if form == STANDARD:
        x, topk_output = dispatch_output.hidden_states, dispatch_output.topk_output
        result = run_local(x, topk_output, weights, config, handover)
    else:
        result = deepep.run(dispatch_output, form, weights, config)
    return deepep.combine_input(dispatch_output, result)


def _choices_are_observed() -> bool:
    """Whether SGLang records which experts tokens choose: --enable-return-routed-experts, or its expert recorder."""
    capturers = sys.modules.get("sglang.srt.state_capturer.routed_experts")
    if capturers is not None and capturers.get_global_experts_capturer() is not None:
        return True
    recorders = sys.modules.get("sglang.srt.eplb.expert_distribution")
    if recorders is None:
        return False
    return type(recorders.get_global_expert_distribution_recorder()).__name__ != "_ExpertDistributionRecorderNoop"


def _choices_are_simulated() -> bool:
    """Whether SGLang overwrites the choice of experts with a balanced one, for benchmarks."""
    variables = getattr(sys.modules.get("sglang.srt.environ"), "envs", None)
    # Older releases have none of them.
    named = (getattr(variables, f"SGLANG_SIMULATE_{how}_EXPERTS", None) for how in ("UNIFORM", "ROUND_ROBIN"))
    return any(variable is not None and variable.get() for variable in named)


# SGLang's operator for piecewise CUDA graphs gets these fields of a TopKConfig. The others have their defaults there.
_TOLD = ("top_k", "topk_group", "num_expert_group", "renormalize")
_APART = ("correction_bias", "allow_routed_experts_capture", "layer_id")


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_part_of(given: Any, whole: Any) -> bool:
    """Whether SGLang's operator for piecewise CUDA graphs may have made the TopKConfig `given` of `whole`."""
    others = [field for field in fields(given) if field.init and field.name not in (*_TOLD, *_APART)]
    return (
        all(getattr(given, name) == getattr(whole, name) for name in _TOLD)
        and _address(given.correction_bias) == _address(whole.correction_bias)
        and all(field.default is MISSING or getattr(given, field.name) == field.default for field in others)
    )


def complete(topk_output: Any, config: Any) -> Any:
    """Returns a BypassedTopKOutput with the model's own TopKConfig, and other forms as they are.

    Inside a piecewise CUDA graph SGLang runs a layer as one operator, which makes the result anew without scores,
    groups, a function of the model's and expert placement. SGLang's own kernels know the scores from elsewhere.
    """
    given = getattr(topk_output, "topk_config", None)
    own = calls.choices(config) if given is not None else []
    if any(choice is given for choice in own):
        return topk_output
    found = [choice for choice in own if _is_part_of(given, choice)]
    if not found:
        return topk_output
    if len(found) > 1:
        raise NotImplementedError(
            f"oxmoe: layer {config.layer_id}: a piecewise CUDA graph tells oxmoe too little of how experts are chosen, "
            "and the layer's block chooses in several ways; start without piecewise CUDA graphs, or with another "
            "--moe-runner-backend"
        )
    changes = {"topk_config": found[0]}
    places = sys.modules.get("sglang.srt.eplb.expert_location")
    if places is not None and places.get_global_expert_location_metadata() is not None:
        dispatch = sys.modules["sglang.srt.eplb.expert_location_dispatch"]
        changes["expert_location_dispatch_info"] = dispatch.ExpertLocationDispatchInfo.init_new(config.layer_id)
    return topk_output._replace(**changes)


def routing(topk_output: Any, config: Any) -> dict[str, Any]:
    """Returns the top-k result as arguments of `moe`. Raises NotImplementedError for a form that has no weights and
    ids.

    config: the layer's MoeRunnerConfig.

    If SGLang records the choice or simulates it, SGLang chooses from a BypassedTopKOutput for this layer.
    """
    forms = ("topk_ids", "topk_config", "routing_data", "a_ragged_metadata")
    if not any(hasattr(topk_output, form) for form in forms):
        raise NotImplementedError(
            f"oxmoe: no kernel for {type(topk_output).__name__}; served are StandardTopKOutput, TritonKernelTopKOutput "
            "and BypassedTopKOutput"
        )
    topk_output = complete(topk_output, config)
    bypassed = not hasattr(topk_output, "topk_ids") and hasattr(topk_output, "to_standard")
    if bypassed and (_choices_are_observed() or _choices_are_simulated()):
        topk_output = topk_output.to_standard(layer_id=config.layer_id)
    return routing_arguments(topk_output)


def scaling_factor(x: Tensor, config: Any, *, scaled: bool) -> float:
    """Returns what this layer multiplies its result by, so that the routed scaling factor counts once.

    scaled: whether the weights of top-k contain the factor. Some models multiply once more if SGLang does not run on
    CUDA, because SGLang's kernels do not do it there.
    """
    factor = config.routed_scaling_factor
    if factor is None:
        return 1.0
    once = 1.0 if scaled else float(factor)
    return once / factor if not x.is_cuda and calls.block_scales(config) else once


def run_local(x: Tensor, topk_output: Any, weights: ExpertWeights, config: Any, handover: Handover) -> Tensor:
    """Runs this rank's part of the layer. Ids are those of its experts, with -1 for other ranks' experts, or, if
    `handover` says so, those of all ranks' experts.

    The tokens stay as they are, also where `inplace` allows to write over them. In captured graphs models may run their
    shared experts on these tokens at the same time, on another stream.
    """
    ranks: Ranks = {}
    if handover.ep_size > 1 and (handover.global_ids or hasattr(topk_output, "topk_config")):
        if config.num_experts != handover.ep_size * config.num_local_experts:
            raise NotImplementedError(
                f"oxmoe: {type(topk_output).__name__} has ids of all ranks' experts, and fused shared experts are on "
                "each rank; start with --disable-shared-experts-fusion"
            )
        ranks = {"ep_size": handover.ep_size, "ep_rank": handover.ep_rank}
    elif not hasattr(topk_output, "topk_ids") and config.num_experts != config.num_local_experts:
        raise NotImplementedError(
            f"oxmoe: {type(topk_output).__name__} has ids of all ranks' experts; with --ep-size above 1 served is "
            "StandardTopKOutput"
        )
    # Without a combine nothing is reduced, so the output needs no symmetric memory.
    out = None if config.no_combine else symmetric.output_like(x)
    return moe(
        x,
        weights,
        **routing(topk_output, config),
        **ranks,
        # SGLang applies the scale in its combine, so it applies none without a combine.
        routed_scaling_factor=1.0 if config.no_combine else scaling_factor(x, config, scaled=handover.scaled),
        apply_router_weight_on_input=config.apply_router_weight_on_input,
        no_combine=config.no_combine,
        keep_router_weight=getattr(config, "no_combine_keep_router_weight", False),
        out=out,
    )
