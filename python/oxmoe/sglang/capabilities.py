"""Answers what the installed SGLang has. The adapters and all other modules ask here, and never for a version.

The releases FIRST to LAST are served. A newer release is served with one warning if it has everything that NEEDS
lists; an older one is refused. docs/sglang_releases.md says how to add a release. The module imports nothing of
SGLang.
"""

from __future__ import annotations

import ast
import inspect
import re
import typing
from typing import Any

from oxmoe.sglang import sources

FIRST, LAST = "0.5.12.post1", "0.5.23"
RANGE = f"{FIRST} to {LAST}"

_VERSION = re.compile(r"(\d+(?:\.\d+)*)(?:\.?(?:a|b|rc)\d*)?(?:\.post(\d+))?(?:\.dev\d*)?")
_RUNNERS = "srt.layers.moe.moe_runner"
_LAYER = "srt.layers.moe.fused_moe_triton.layer"
_FUSION = "srt.layers.flashinfer_comm_fusion"
_GROUPS = "srt.distributed.parallel_state"
_ARGUMENTS = "srt.server_args"
_MODELOPT = "srt.layers.quantization.modelopt_quant"
_FIELDS = "srt.arg_groups.fields"

FUSED = "flashinfer_allreduce_residual_rmsnorm"
PLAIN = "flashinfer_allreduce"
_OPERATORS = {FUSED: _FUSION, PLAIN: _GROUPS}
# The parameters that oxmoe's operators take, in this order.
PARAMETERS = {
    FUSED: "input_tensor residual weight eps max_token_num use_oneshot trigger_completion_at_end fp32_acc "
    "use_attn_tp_group",
    PLAIN: "tensor group_name",
}


def order(version: str) -> tuple[tuple[int, ...], int, int]:
    """Returns a key that orders versions, with release candidates and development builds before their release.
    Raises ValueError for text that is not a version."""
    match = _VERSION.fullmatch(version)
    if match is None:
        raise ValueError(f"SGLang {version} is no version that oxmoe can compare; served are {RANGE}")
    release, post = match.groups()
    numbers = tuple(int(number) for number in release.split("."))
    while numbers and numbers[-1] == 0:
        numbers = numbers[:-1]
    early = version != f"{release}.post{post}" if post else version != release
    return numbers, int(post or 0), 0 if early else 1


def is_old(version: str) -> bool:
    """Whether a release is older than those that are served."""
    return order(version) < order(FIRST)


def is_new(version: str) -> bool:
    """Whether a release is newer than those that oxmoe is tested with."""
    return order(version) > order(LAST)


# The features that a release has


def has_cores() -> bool:
    """Whether SGLang takes MoE runners under names of others. Older releases take fused functions for their own
    names only."""
    return "register_moe_runner_core" in sources.names(_RUNNERS)


def layer_decides() -> bool:
    """Whether a layer's loader, top-k and dispatcher follow the layer's own runner. In older releases they follow
    --moe-runner-backend."""
    return "_set_runner_flags" in sources.members(_LAYER, "FusedMoE")


def announces_updates() -> bool:
    """Whether SGLang tells quantization methods about a weight update before it writes, and processes the weights
    afterwards."""
    return sources.mentions("srt.model_executor.model_runner_components.weight_updater", "begin_weight_update") and (
        sources.mentions("srt.model_loader.loader", "restore_weights_before_loading")
    )


def finds_modelopt_by_name() -> bool:
    """Whether SGLang looks up ModelOpt's configurations in its table of quantizations, also for a file beside the
    checkpoint's config.json."""
    found = sources.function("srt.model_loader.weight_utils", "get_quant_config")
    calls = (node.func for node in ast.walk(found) if isinstance(node, ast.Call)) if found is not None else ()
    return any(getattr(call, "id", "") == "issubclass" for call in calls)


def lists_experts_early(model: str) -> bool:
    """Whether a model, named as in "srt.models.bailing_moe", lists the tensors that --enable-eplb moves while it loads
    its weights. Other models do so when they are asked first, after SGLang has processed the weights."""
    lists = sources.assigned(model, "load_weights", "routed_experts_weights_of_layer")
    return any(getattr(getattr(value, "func", None), "id", "") != "LazyValue" for value in lists)


def has_argument(name: str) -> bool:
    """Whether the server has this argument."""
    if name in sources.members(_ARGUMENTS, "ServerArgs"):
        return True
    return any(name in fields for fields in sources.fields_of_classes(_FIELDS))


def fusion_flag() -> str:
    """Returns the flag that turns on SGLang's fused all-reduce."""
    if has_argument("flashinfer_allreduce_fusion_backend"):
        return "--flashinfer-allreduce-fusion-backend auto"
    return "--enable-flashinfer-allreduce-fusion"


def a2a_backends() -> frozenset[str]:
    """Returns the names that --moe-a2a-backend takes."""
    return sources.constants("srt.layers.moe.utils", "MoeA2ABackend")


def swaps() -> dict[str, tuple[str, ...]]:
    """Returns what oxmoe can take over: each swap with its parts. "moe=part+part" names some parts; the swap alone
    means all of them."""
    runners = ("oxmoe", "triton_kernel", "deep_gemm", "flashinfer_mxfp4")
    # SGLang's fused function for flashinfer_mxfp4 is there before a plugin is called; a core goes before it.
    return {"moe": runners if has_cores() else runners[:-1], "allreduce": ()}


def schemas() -> dict[str, str]:
    """Returns SGLang's all-reduce operators as name -> schema. The schema is exact, because callers and fake kernels
    rely on it."""
    return {name: _schema(function) for name, function in _operators().items()}


def _operators() -> dict[str, sources.Function]:
    found = {name: sources.function(module, name) for name, module in _OPERATORS.items()}
    return {name: function for name, function in found.items() if function is not None and _decorator(function)}


def _decorator(function: sources.Function) -> ast.Call | None:
    """Returns the call of `register_custom_op` that makes an operator of the function."""
    calls = (node for node in function.decorator_list if isinstance(node, ast.Call))
    return next((call for call in calls if getattr(call.func, "id", "") == "register_custom_op"), None)


def _schema(function: sources.Function) -> str:
    """Returns the schema that torch infers from the function's signature, as SGLang does it."""
    import torch

    decorator = _decorator(function)
    assert decorator is not None
    named = {keyword.arg: keyword.value for keyword in decorator.keywords}

    def prototype() -> None: ...

    try:
        mutated = ast.literal_eval(named["mutates_args"]) if "mutates_args" in named else ()
        prototype.__signature__ = _signature(function)  # type: ignore[attr-defined]
        return function.name + torch.library.infer_schema(prototype, mutates_args=mutated)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"the signature of SGLang's {function.name} is not understood: {error}") from error


def _signature(function: sources.Function) -> inspect.Signature:
    """Returns the function's signature without running SGLang's code. Annotations are looked up, and defaults are
    literals."""
    of, kinds = function.args, inspect.Parameter
    if of.vararg or of.kwarg or of.posonlyargs:
        raise ValueError(f"it takes {ast.unparse(of)}")
    required = [None] * (len(of.args) - len(of.defaults))
    parameters = [
        *((kinds.POSITIONAL_OR_KEYWORD, *pair) for pair in zip(of.args, [*required, *of.defaults], strict=True)),
        *((kinds.KEYWORD_ONLY, *pair) for pair in zip(of.kwonlyargs, of.kw_defaults, strict=True)),
    ]
    return inspect.Signature(
        [
            kinds(
                argument.arg,
                kind,
                default=kinds.empty if default is None else _literal(default),
                annotation=_type(argument.annotation),
            )
            for kind, argument, default in parameters
        ],
        return_annotation=_type(function.returns),
    )


def _literal(default: ast.expr) -> Any:
    try:
        return ast.literal_eval(default)
    except ValueError as error:
        raise ValueError(f"it has the default {ast.unparse(default)}") from error


def _type(annotation: ast.expr | None) -> Any:
    """Returns what an annotation names: something of torch or typing, or a builtin type."""
    import torch

    match annotation:
        case None | ast.Constant(value=None):
            return None
        case ast.Name(id="torch"):
            return torch
        case ast.Name(id=name) if name in typing.__all__:
            return getattr(typing, name)
        case ast.Name(id=name):
            return {of.__name__: of for of in (bool, int, float, str, list, tuple)}[name]
        case ast.Attribute(value=value, attr=name):
            return getattr(_type(value), name)
        case ast.Tuple(elts=parts):
            return tuple(_type(part) for part in parts)
        case ast.Subscript(value=value, slice=part):
            return _type(value)[_type(part)]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return typing.Union[_type(left), _type(right)]  # noqa: UP007
    raise ValueError(f"it has the annotation {ast.unparse(annotation)}")


# The names that a release must have


# Part of a swap -> module, or "module:Class" -> names. For some names oxmoe only looks, and takes their absence for an
# older release or a server without the feature. Nothing else would then say that SGLang has renamed them.
NEEDS: dict[str, dict[str, str]] = {
    "moe": {
        "srt.layers.quantization": "QUANTIZATION_METHODS",
        _ARGUMENTS: "add_moe_runner_backend_choices add_quantization_method_choices",
        _RUNNERS: "MoeRunner MoeRunnerConfig register_moe_runner_core",
        f"{_RUNNERS}.base": "DispatchMoeRunnerCore MoeQuantInfo",
        f"{_RUNNERS}.base:FusedOpPool": "get_fused_func",
        f"{_RUNNERS}.base:MoeRunnerConfig": "activation is_gated gemm1_alpha gemm1_clamp_limit swiglu_limit inplace "
        "no_combine apply_router_weight_on_input routed_scaling_factor num_experts num_local_experts layer_id "
        "moe_ep_size moe_ep_rank moe_tp_rank",
        f"{_RUNNERS}.runner:MoeRunner": "fused_func runner_core runner_backend",
        "srt.layers.moe.utils": "MoeRunnerBackendLike get_moe_a2a_backend resolve_moe_runner_backend",
        "srt.layers.moe.token_dispatcher.base": "DispatchOutput",
        "srt.layers.moe.token_dispatcher.standard": "StandardCombineInput",
        "srt.layers.moe.token_dispatcher.standard:StandardDispatcher": "skip_local_expert_mapping",
        "srt.layers.moe.token_dispatcher.deepep": "DeepEPNormalCombineInput DeepEPLLCombineInput",
        f"{_LAYER}:FusedMoE": "quant_method moe_runner_config dispatcher moe_ep_size moe_ep_rank num_local_experts "
        "num_fused_shared_experts should_fuse_routed_scaling_factor_in_topk use_flashinfer_trtllm_moe "
        "hidden_size_unpadded weight_loader_fused _set_runner_flags _map_global_expert_id_to_local_expert_id "
        "_num_global_routed _has_fused_shared uses_expert_location",
        "srt.layers.linear": "LinearBase",
        "srt.layers.quantization.base_config": "FusedMoEMethodBase QuantizationConfig QuantizeMethodBase",
        "srt.layers.quantization.base_config:FusedMoEMethodBase": "get_moe_runner_backend",
        "srt.layers.quantization.fp8": "Fp8Config Fp8LinearMethod Fp8MoEMethod",
        "srt.layers.quantization.fp8:Fp8Config": "is_fp4_experts dequant_fp4_to_fp8",
        "srt.layers.quantization.mxfp4": "Mxfp4Config",
        _MODELOPT: "ModelOptFp4LinearMethod ModelOptNvFp4FusedMoEMethod ModelOptFp8MoEMethod HybridFp8NvFp4Config",
        f"{_MODELOPT}:ModelOptQuantConfig": "is_layer_excluded",
        f"{_MODELOPT}:ModelOptFp4Config": "is_checkpoint_nvfp4_serialized is_awq group_size get_quant_method",
        f"{_MODELOPT}:ModelOptFp8Config": "get_quant_method override_quantization_method",
        f"{_MODELOPT}:ModelOptMixedPrecisionConfig": "get_quant_method _resolve_quant_algo fp8_config nvfp4_config "
        "nvfp4a16_config mxfp8_config fp8_block_config",
        f"{_MODELOPT}:HybridFp8NvFp4Config": "nvfp4_config",
        "srt.layers.quantization.unquant": "UnquantizedFusedMoEMethod UnquantizedLinearMethod",
        "srt.layers.quantization.utils": "is_layer_skipped",
        "srt.layers.quantization.compressed_tensors.schemes": "CompressedTensorsW8A8Fp8MoE "
        "CompressedTensorsW4A16Nvfp4MoE",
        "srt.batch_overlap.single_batch_overlap:SboFlags": "enable_combine_down_gemm_two_stream_overlap",
        "srt.distributed.device_communicators.pynccl_allocator": "is_symmetric_memory_enabled use_symmetric_memory",
        "srt.layers.dp_attention": "is_allocation_symmetric",
        "srt.state_capturer.routed_experts": "get_global_experts_capturer",
        "srt.eplb.expert_distribution": "get_global_expert_distribution_recorder _ExpertDistributionRecorderNoop",
        "srt.eplb.expert_location": "get_global_expert_location_metadata",
        "srt.eplb.expert_location:ExpertLocationMetadata": "num_logical_experts logical_to_all_physical",
        "srt.runtime_context": "get_exec get_parallel get_server_args get_spec",
        "srt.lora.layers": "FusedMoEWithLoRA",
    },
    "triton_kernel": {f"{_RUNNERS}.triton_kernels": "TritonKernelsQuantInfo"},
    "deep_gemm": {f"{_RUNNERS}.deep_gemm": "DeepGemmMoeQuantInfo"},
    "flashinfer_mxfp4": {f"{_RUNNERS}.flashinfer_cutlass": "FlashInferCutlassMxfp4MoeQuantInfo"},
    "allreduce": {
        _FUSION: f"{FUSED} resolve_fusion_group",
        _GROUPS: f"{PLAIN} _groups",
        "srt.runtime_context": "get_exec get_server_args",
    },
}
# Part -> module -> what its code must mention: calls that SGLang makes, attributes that it looks for.
MENTIONS: dict[str, dict[str, str]] = {
    "moe": {
        "srt.model_executor.model_runner_components.weight_updater": "_derived_weight_cache_error begin_weight_update "
        "update_weights_from_ipc",
        "srt.model_loader.loader": "load_weights_and_postprocess restore_weights_before_loading is_fp4_experts",
    },
}
ARGUMENTS: dict[str, str] = {
    "moe": "enable_eplb ep_num_redundant_experts enable_torch_compile speculative_algorithm",
    "allreduce": "flashinfer_allreduce_fusion_backend",
}


def missing(parts: tuple[str, ...]) -> list[str]:
    """Returns what these parts need and the installed SGLang lacks, under the names of the newest release that is
    served."""
    lacking = []
    for part in parts:
        for place, wanted in NEEDS.get(part, {}).items():
            module, _, owner = place.partition(":")
            have = sources.members(module, owner) if owner else sources.names(module)
            lacking += [f"{name} in {place}" for name in wanted.split() if name not in have]
        for module, wanted in MENTIONS.get(part, {}).items():
            lacking += [f"{name} in {module}" for name in wanted.split() if not sources.mentions(module, name)]
        lacking += [f"the argument {name}" for name in ARGUMENTS.get(part, "").split() if not has_argument(name)]
    if "allreduce" in parts:
        lacking += _other_operators()
    return list(dict.fromkeys(lacking))


def _other_operators() -> list[str]:
    """Returns the operators that take other parameters than oxmoe's."""
    operators = _operators()
    lacking = []
    for name, expected in PARAMETERS.items():
        arguments = operators[name].args if name in operators else None
        given = "" if arguments is None else " ".join(argument.arg for argument in arguments.args)
        if given != expected:
            lacking.append(f"the operator {name}({expected.replace(' ', ', ')})")
    if not lacking:
        try:
            schemas()
        except RuntimeError as error:
            lacking.append(str(error))
    return lacking
