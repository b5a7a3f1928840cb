"""Checks that every MoE layer that SGLang builds runs on oxmoe, and stops the server at load if one does not.

torch reports each module that becomes part of another (`register_module_module_registration_hook`). So nothing of
SGLang is touched, and a running model is not slowed down.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from oxmoe.peers.sglang import check_config
from oxmoe.sglang import calls, capabilities, eplb, server, setting
from oxmoe.sglang.experts import activation

logger = logging.getLogger(__name__)
_watched: dict[str, Any] = {}


def watch(swaps: tuple[setting.Requested, ...], adapter: ModuleType, begin: Callable[[], None]) -> None:
    """Starts to look at each layer and, once, at the server's arguments. A second call does the same for its swaps.

    begin: called once, when the first layer of a model is there and SGLang has set up its log.
    """
    _watched.update(swaps={swap.name for swap in swaps}, adapter=adapter, begin=begin)
    if "hook" not in _watched:
        # Layers that were checked before belong to no server.
        calls.forget()
        _watched["hook"] = register_module_module_registration_hook(_registered)


def unwatch() -> None:
    """Ends `watch`."""
    if "hook" in _watched:
        _watched.pop("hook").remove()
    _watched.clear()
    calls.forget()


def _registered(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    if "begin" in _watched and type(module).__module__.startswith("sglang."):
        _watched.pop("begin")()
        if "moe" in _watched["swaps"] and (flag := server.replaces_model()) is not None:
            what = f"with {flag} kernels of the whole model run in place of its MoE layers"
            raise RuntimeError(_message(what, f"start without {flag} or without moe"))
        if "allreduce" in _watched["swaps"]:
            check_allreduce(_watched["adapter"])
            if "moe" not in _watched["swaps"]:
                _say(_allreduce())
    if module is not None and "moe" in _watched.get("swaps", ()):
        check_layer(module, parent)


def _class(module: str, name: str) -> Any:
    """Returns a class of SGLang if its module is loaded, or None. If it is not loaded, no object of the class exists
    either."""
    return getattr(sys.modules.get(module), name, None)


def check_layer(module: nn.Module, block: nn.Module | None = None) -> None:
    """Raises RuntimeError if this is a MoE layer of SGLang that does not run on oxmoe. The error says why, and how
    to fix it.

    A layer that does run on oxmoe is checked again when it runs (`calls`). block: the module that it becomes a part
    of.
    """
    with_lora = _class("sglang.srt.lora.layers", "FusedMoEWithLoRA")
    # Such a layer takes the MoE layer as a part first of all, before it looks for kernels.
    if with_lora is not None and (isinstance(module, with_lora) or isinstance(block, with_lora)):
        raise RuntimeError(_message("LoRA on MoE layers is not served", "start without LoRA or without moe"))
    for place, name in BLOCKS.items():
        of_release = _class(f"sglang.srt.{place}", name)
        if of_release is not None and isinstance(module, of_release):
            raise RuntimeError(_message(*_apart(place, name)))
    layers = _class("sglang.srt.layers.moe.fused_moe_triton.layer", "FusedMoE")
    if layers is None or not isinstance(module, layers):
        return
    check_config(getattr(module, "moe_runner_config", None))
    method: Any = module.quant_method
    if type(method).__name__ == "KTEPWrapperMethod":
        what = "experts on the CPU beside those on the GPU (--kt-weight-path) are not served: some of SGLang's models"
        what += " multiply their sum by the routed scaling factor, which oxmoe's part contains already"
        raise RuntimeError(_message(what, "start without --kt-weight-path or without moe"))
    if getattr(module, "deprecate_flag", True) is False:
        # SGLang's DeepEPMoE then looks for kernels of its own by the weights' format.
        why = f"layer {getattr(module, 'layer_id', '?')} ({type(module).__name__}) does not ask its method for results"
        raise RuntimeError(
            _message(why, "install DeepGEMM, and for experts other than fp8 set SGLANG_DEEPEP_BF16_DISPATCH=1")
        )
    if getattr(method, "oxmoe", False):
        return _serve(module, "--quantization oxmoe", block)
    runner = getattr(method, "runner", None)
    core, fused = getattr(runner, "runner_core", None), getattr(runner, "fused_func", None)
    ours = getattr(fused, "oxmoe", False) or (fused is None and getattr(core, "oxmoe", False))
    if runner is not None and ours:
        if (copied := eplb.copies(method, runner)) is not None:
            if (flag := _reaches_parameters_alone()) is not None:
                raise RuntimeError(
                    _message(
                        f"layer {module.layer_id}: {copied}, which {flag} does not reach",
                        f"use the quantization oxmoe, whose weights are SGLang's parameters, or start without {flag}",
                    )
                )
            module.add_module("oxmoe_copies", Copies())
        if type(method).__name__ == "UnquantizedFusedMoEMethod" and server.compiles():
            raise RuntimeError(
                _message(
                    "with --enable-torch-compile SGLang runs a single token by torch's functions, not its runner",
                    "use --quantization oxmoe, or start without --enable-torch-compile",
                )
            )
        return _serve(module, f"--moe-runner-backend {runner.runner_backend.value}", block)
    what = f"layer {getattr(module, 'layer_id', '?')} ({type(module).__name__}, {type(method).__name__}"
    what += ")" if runner is None else f", --moe-runner-backend {runner.runner_backend.value})"
    if fused is not None and getattr(core, "oxmoe", False):
        why = f"SGLang's {fused.__module__}.{fused.__name__} goes before oxmoe's core"
        mend = "use --quantization oxmoe, or another --moe-runner-backend"
    elif os.environ.get(_NO_FUSED) == "1" and runner is not None and fused is None and not capabilities.has_cores():
        why, mend = f"{_NO_FUSED}=1 leaves out fused functions, of which oxmoe's is one in this SGLang", "unset it"
    elif type(method).__name__ in _MEND:
        why, mend = "SGLang chose its own kernels for it", _MEND[type(method).__name__]
        if type(method).__name__ == "UnquantizedFusedMoEMethod" and module.quant_config is None and server.speculates():
            mend += _DRAFT
    else:
        why, mend = "oxmoe has no kernels for its format", "serve this model without moe"
    raise RuntimeError(_message(f"{what} does not run on oxmoe: {why}", mend))


def _reaches_parameters_alone() -> str | None:
    """Returns the flag with which SGLang writes or moves parameters while the server runs, or None."""
    if server.balances_experts():
        return "--enable-eplb"
    return "--enable-elastic-expert-backup" if server.backs_up_experts() else server.moves_parameters()


def _serve(module: Any, through: str, block: nn.Module | None) -> None:
    """Registers a layer that is to run on oxmoe. The first one of a model writes the line in the log.

    Raises NotImplementedError or ValueError for an activation without kernels.
    """
    activation(module.moe_runner_config)
    name = f"layer {getattr(module, 'layer_id', '?')} ({type(module).__name__}, {type(module.quant_method).__name__})"
    calls.expect(module, name, block)
    if "swaps" not in _watched or _watched.get("said") or not _leads():
        return
    _watched["said"] = True
    also = f"; {_allreduce()}" if "allreduce" in _watched["swaps"] else ""
    _say(f"MoE layers run on oxmoe through {through} ({type(module.quant_method).__name__}){also}")


def _allreduce() -> str:
    if _watched["adapter"].allreduce_fusion() is None:
        return "allreduce: one rank has nothing to reduce"
    return "the fused all-reduce runs on oxmoe"


def _leads() -> bool:
    """Whether this is the process that writes its server's log lines."""
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not ranks or torch.distributed.get_rank() == 0


def _say(what: str) -> None:
    if _leads():
        versions = (importlib.metadata.version("oxmoe"), importlib.metadata.version("sglang"))
        logger.info("oxmoe %s in SGLang %s: %s", *versions, what)


class Copies(nn.Module):
    """Tells newer releases of SGLang that this layer runs on copies of its weights, which an update would not reach.

    SGLang asks every module of a model for this reason before it updates weights, and refuses the update with it.
    """

    _derived_weight_cache_error = (
        "oxmoe runs a MoE layer's SGLang method on second copies of its weights, which an update of the weights does "
        "not reach: use --quantization oxmoe or moe=oxmoe, whose weights are SGLang's own, or restart the server "
        "(see docs/sglang_modes.md)"
    )


# Blocks of SGLang's models whose experts it runs without a MoE layer: module -> class.
BLOCKS = {
    "models.afmoe": "AfmoeMoE",
    "models.dbrx": "DbrxExperts",
    "models.deepseek": "DeepseekMoE",
    "models.inkling_common.moe": "InklingMoE",
    "models.mixtral_quant": "MixtralMoE",
    "models.xverse_moe": "XverseMoE",
    "layers.muse_spark.muse_spark_bf16_moe": "MuseSpark1xBf16Experts",
    "layers.muse_spark.muse_spark_fp4_moe": "MuseSpark1xFp4Experts",
}


def _apart(place: str, name: str) -> tuple[str, str]:
    """Returns why the experts of such a block do not run on oxmoe, and what to do."""
    if place == "models.mixtral_quant":
        what = "SGLang builds Mixtral without MoE layers for a quantization that is none of its own"
        return what, "start bf16 with --moe-runner-backend deep_gemm and without --quantization, others without moe"
    return (
        f"SGLang's {place.partition('.')[2]}.{name} calls SGLang's kernels itself, not a MoE layer",
        "serve this model without moe",
    )


# Before 0.5.23 it chooses kernels that are called in another way.
_CUTEDSL = "SGLANG_FLASHINFER_MNNVL_CUTEDSL_AR_FUSION"
# A variable of SGLang's tests.
_NO_FUSED = "SGLANG_CI_DISABLE_MOE_FUSED_FUNC"
_BACKENDS = "--moe-runner-backend triton_kernel or deep_gemm where OXMOE_SGLANG names them"
_DRAFT = (
    "; if it is a layer of the draft of speculative decoding, which some models give no quantization, start with "
    "--speculative-moe-runner-backend deep_gemm, which is taken over where OXMOE_SGLANG names it"
)
_OF_FP4 = "let OXMOE_SGLANG name moe=oxmoe, which takes the MXFP4 experts of fp8 checkpoints (DeepSeek-V4)"
_MEND = {
    "Mxfp4FlashinferCutlassMoEMethod": _OF_FP4,
    "Mxfp4MarlinMoEMethod": _OF_FP4,
    "Mxfp4HummingMoEMethod": _OF_FP4,
    "Fp8MoEMethod": "let OXMOE_SGLANG name moe=oxmoe, which takes MXFP8 checkpoints and those with one scale a matrix "
    "or weight_block_size [128, 128]; start a bf16 checkpoint with --quantization oxmoe, which does not quantise it",
    "CompressedTensorsFusedMoEMethod": "let OXMOE_SGLANG name moe=oxmoe, which takes layers of fp8 and int4, and on "
    "Hopper, where SGLang can load them there, of NVFP4; serve others without moe",
    "MoeWNA16Method": "start without --quantization moe_wna16",
    "ModelOptNvFp4FusedMoEMethod": "let OXMOE_SGLANG name moe=oxmoe, which takes ModelOpt's NVFP4 layers on Hopper; "
    "serve others, and layers that SGLang quantises while it loads them, without moe",
    "ModelOptFp8MoEMethod": "let OXMOE_SGLANG name moe=oxmoe, which takes ModelOpt's fp8 layers",
    "BeamUnquantizedFusedMoEMethod": "SGLang's model of Beam gives its bf16 experts to SGLang's Triton runner and "
    "takes no --quantization for them; serve it without moe",
    "UnquantizedFusedMoEMethod": f"start with --quantization oxmoe, or with {_BACKENDS}",
    "Mxfp4MoEMethod": "let OXMOE_SGLANG name moe=oxmoe, or start with --moe-runner-backend triton_kernel or "
    "flashinfer_mxfp4 where it names them",
}


def _message(what: str, mend: str) -> str:
    return f"{setting.SETTING}={setting.text()}: {what}; {mend} (or change {setting.SETTING}; see docs/sglang.md)"


def check_allreduce(adapter: ModuleType) -> None:
    """Raises RuntimeError if SGLang would never call the fused all-reduce with the server's arguments."""
    from sglang.srt.utils import is_flashinfer_available

    asked = adapter.allreduce_fusion()
    if asked is False and server.is_deterministic():
        what = "allreduce is called by SGLang's all-reduce fusion, which --enable-deterministic-inference turns off"
        raise RuntimeError(_message(what, "start without allreduce"))
    if asked and server.multiplexes():
        what = "with --enable-pdmux a prefill and a decoding step may both be in an all-reduce of one group at a time"
        raise RuntimeError(_message(what, "start without --enable-pdmux or without allreduce"))
    if asked is False and os.environ.get(_CUTEDSL, "0").lower() in ("1", "true", "yes", "y"):
        what = f"allreduce is called by SGLang's all-reduce fusion, which {_CUTEDSL} turns off for some models"
        raise RuntimeError(_message(what, f"unset it and start with {adapter.FUSION_FLAG}, or without allreduce"))
    if asked is False:
        what = "allreduce is called by SGLang's all-reduce fusion, which is off"
        raise RuntimeError(_message(what, f"start with {adapter.FUSION_FLAG}"))
    if asked and server.allreduce_backend() == "cutedsl":
        what = (
            "with --flashinfer-allreduce-fusion-backend cutedsl SGLang never calls the operators that allreduce takes"
        )
        raise RuntimeError(_message(what, f"start with {adapter.FUSION_FLAG}, or without allreduce"))
    if asked and not is_flashinfer_available():
        what = "SGLang fuses its all-reduce only where it can import flashinfer"
        raise RuntimeError(_message(what, "install the flashinfer-python that this SGLang release asks for"))
