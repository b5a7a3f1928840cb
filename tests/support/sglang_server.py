"""The state that SGLang's layers ask a server for, without a server, in every release; and its MoE layer."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe.sglang
from cases import Layer, Shape, make_layer, make_routing, make_x
from oxmoe.sglang import capabilities, sources

pytest.importorskip("sglang")

from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from sglang.srt.layers.quantization import get_quantization_config
from sglang.srt.server_args import ServerArgs

VERSION = oxmoe.sglang.sglang_version()
# Whether SGLang takes MoE runners under names of others. Such releases have their state in a context, too.
NEW = capabilities.has_cores()
# Whether layers take their ranks from a context.
HAS_CONTEXT = sources.function("srt.runtime_context", "get_parallel") is not None
ADAPTER = importlib.import_module(oxmoe.sglang.adapter_name())
only_cores = pytest.mark.skipif(not NEW, reason="this SGLang takes no MoE runner under a name of others")
SHAPE = Shape("sglang", 8, 2, 128, 96)
_MEETING = tempfile.TemporaryDirectory()  # it is removed when the process ends


def _one_rank() -> None:
    """Makes groups of one rank, which older releases' layers look up. They meet at a file: another process cannot take
    it, as it could a port."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel, parallel_state

    if not parallel_state.model_parallel_is_initialized():
        address = f"file://{_MEETING.name}/store"
        init_distributed_environment(
            backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=address
        )
        initialize_model_parallel()


@contextmanager
def _new_server(backend: str, a2a: str, overlap: bool, topology: dict[str, Any]) -> Iterator[None]:
    from sglang.srt.layers.moe.utils import MoeA2ABackend, resolve_moe_runner_backend
    from sglang.srt.runtime_context import get_context, get_flags, get_parallel

    if "get_tp_group" in sources.names("srt.layers.moe.fused_moe_triton.layer"):
        _one_rank()
    one = dict.fromkeys(("moe_ep_size", "moe_tp_size", "tp_size"), 1)
    ranks = {**one, **dict.fromkeys(("moe_ep_rank", "moe_tp_rank", "tp_rank"), 0), "tp_group": None, **topology}
    with ExitStack() as stack:
        stack.enter_context(get_context().override_server_args(model_path="dummy"))
        flags = get_flags().moe.override(
            runner_backend=resolve_moe_runner_backend(backend), a2a_backend=MoeA2ABackend(a2a), sbo_enabled=overlap
        )
        stack.enter_context(flags)
        stack.enter_context(get_parallel().override(**ranks))
        yield


@contextmanager
def _old_server(backend: str, a2a: str, overlap: bool) -> Iterator[None]:
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    _one_rank()

    def start(name: str, a2a: str, overlap: bool) -> None:
        arguments = ServerArgs(model_path="dummy", moe_runner_backend=name)
        # These are set afterwards, because such a server first asks for its GPUs.
        arguments.moe_a2a_backend, arguments.enable_single_batch_overlap = a2a, overlap
        set_global_server_args_for_scheduler(arguments)
        initialize_moe_config(arguments)

    start(backend, a2a, overlap)
    try:
        yield
    finally:
        start("auto", "none", False)


@contextmanager
def server(backend: str = "auto", *, a2a: str = "none", overlap: bool = False, **topology: Any) -> Iterator[None]:
    """Sets up a server of one rank with this --moe-runner-backend and --moe-a2a-backend, with or without
    --enable-single-batch-overlap. topology: what a context overrides of its ranks."""
    if NEW:
        with _new_server(backend, a2a, overlap, topology):
            yield
        return
    with ExitStack() as stack:
        stack.enter_context(_old_server(backend, a2a, overlap))
        if topology:
            from sglang.srt.runtime_context import get_parallel

            stack.enter_context(get_parallel().override(**topology))
        yield


@contextmanager
def argument(place: str, name: str, value: Any) -> Iterator[None]:
    """Sets an argument of the server, in its place of the runtime context ("exec.moe"); older releases have it
    elsewhere."""
    top, _, rest = place.partition(".")
    if sources.function("srt.runtime_context", f"get_{top}"):
        bag = getattr(importlib.import_module("sglang.srt.runtime_context"), f"get_{top}")()
        with (getattr(bag, rest) if rest else bag).override(**{name: value}):
            yield
        return
    from sglang.srt.server_args import get_global_server_args

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_global_server_args(), name, value)
        yield


def operands(
    shape: Shape,
    tokens: int,
    device: str,
    rng: torch.Generator,
    pattern: str = "uniform",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Layer, Tensor, Tensor, Tensor]:
    layer = make_layer(shape, dtype, device, rng, bias_dtype=torch.float32)
    topk_weights, topk_ids = make_routing(pattern, tokens, shape.experts, shape.top_k, rng)
    return layer, make_x(tokens, shape, dtype, device, rng), topk_weights.to(device), topk_ids.to(device)


def fused_moe(layer: Layer, *, experts: int | None = None, quantized: bool = True, **options: Any) -> FusedMoE:
    """Returns SGLang's layer with these weights, loaded as its model loader would end.

    quantized: the layer has the quantization "oxmoe"; False: SGLang's own method, which follows --moe-runner-backend.
    """
    shape, dtype = layer.shape, layer.w13.dtype
    with torch.device(layer.w13.device):
        module = FusedMoE(
            num_experts=experts or shape.experts,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            top_k=shape.top_k,
            params_dtype=dtype,
            with_bias=shape.bias,
            is_gated=shape.gated,
            quant_config=get_quantization_config("oxmoe")() if quantized else None,
            **{"layer_id": 0, **options},
        )
    with torch.no_grad():
        for parameter, weight in ((module.w13_weight, layer.w13), (module.w2_weight, layer.w2)):
            # --moe-runner-backend triton_kernel keeps them transposed.
            transposed = not quantized and module.use_triton_kernels
            parameter.copy_(weight.transpose(1, 2) if transposed else weight)
        if shape.bias:
            module.w13_weight_bias.copy_(layer.b13)
            module.w2_weight_bias.copy_(layer.b2)
    module.quant_method.process_weights_after_loading(module)
    return module


def attributes() -> dict[str, tuple[int, Any]]:
    """Returns every attribute of SGLang's modules and classes: which object it is, and what a container holds."""
    found = {}

    def add(prefix: str, owner: ModuleType | type) -> None:
        for name, value in list(vars(owner).items()):
            if isinstance(value, dict) and name != "__builtins__":
                contents: Any = [(key, id(item)) for key, item in value.items()]
            else:
                contents = list(value) if isinstance(value, list | set) else None
            found[f"{prefix}.{name}"] = (id(value), contents)
            if isinstance(value, type) and value.__module__ == prefix:
                add(f"{prefix}.{name}", value)

    for name, module in list(sys.modules.items()):
        if name == "sglang" or name.startswith("sglang."):
            add(name, module)
    return found


_changes: dict[str, set[str]] = {}


def installed() -> dict[str, set[str]]:
    """Installs every MoE swap, once in this process. Returns which attributes of SGLang were added, replaced and
    filled."""
    if _changes:
        return _changes
    before = attributes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(oxmoe.sglang.SETTING, "moe")
        oxmoe.sglang.install()
    after = attributes()
    common = before.keys() & after.keys()
    _changes.update(
        added=after.keys() ^ before.keys(),
        replaced={name for name in common if after[name][0] != before[name][0]},
        filled={name for name in common if after[name][1] != before[name][1]},
    )
    return _changes


__all__ = [
    "ADAPTER",
    "HAS_CONTEXT",
    "NEW",
    "SHAPE",
    "VERSION",
    "FusedMoE",
    "MoeRunner",
    "MoeRunnerBackend",
    "MoeRunnerConfig",
    "argument",
    "attributes",
    "fused_moe",
    "installed",
    "only_cores",
    "operands",
    "server",
]


def addresses_of(weights: oxmoe.ExpertWeights) -> list[int]:
    """Returns the address of every tensor that a layer's launches read."""
    tensors = (weights.w13, weights.w2, weights.w13_scale, weights.w2_scale, weights.a13_scale, weights.a2_scale)
    packed = (*(weights.w13_packed or ()), *(weights.w2_packed or ()))
    return [tensor.data_ptr() for tensor in (*tensors, *packed, weights.b13, weights.b2) if tensor is not None]
