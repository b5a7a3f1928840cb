"""Reads the arguments of this process's server. Imports nothing of SGLang before a function is called."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def read(of_context: Callable[[Any], Any], of_arguments: Callable[[Any], Any]) -> Any:
    """Returns what SGLang's runtime context says, or in older releases its global arguments. It is None without a
    server."""
    try:
        return of_context(importlib.import_module("sglang.srt.runtime_context"))
    except (AttributeError, ImportError, LookupError, RuntimeError, ValueError):
        pass  # older releases have no runtime context, or less in it
    try:
        return of_arguments(importlib.import_module("sglang.srt.server_args").get_global_server_args())
    except (AttributeError, RuntimeError, ValueError):
        return None


def balances_experts() -> bool:
    """Whether the server has --enable-eplb."""
    return bool(read(lambda context: context.get_exec().moe.enable_eplb, lambda arguments: arguments.enable_eplb))


def redundant_experts() -> int:
    """Returns --ep-num-redundant-experts."""

    def of(moe: Any) -> int:
        return int(moe.ep_num_redundant_experts or 0)

    return read(lambda context: of(context.get_exec().moe), of) or 0


def backs_up_experts() -> bool:
    """Whether the server has --enable-elastic-expert-backup, with which SGLang writes a checkpoint's bytes into the
    parameters of experts without telling anybody."""

    def of(moe: Any) -> bool:
        return bool(moe.enable_elastic_expert_backup) and moe.elastic_ep_backend is not None

    return bool(read(lambda context: of(context.get_exec().moe), of))


def offloads() -> str | None:
    """Returns the flag with which SGLang keeps weights on the host and gives a layer copies of them at each call, or
    None."""

    def of(offload: Any) -> str | None:
        names = ("cpu_offload_gb", "offload_group_size")
        return next((_flag(name) for name in names if (getattr(offload, name) or 0) > 0), None)

    return read(lambda context: of(context.get_exec().offload), of)


def moves_parameters() -> str | None:
    """Returns the flag with which SGLang gives a layer's parameters other memory after it has processed them, or
    None."""

    def of(parallel: Any) -> str | None:
        return _flag("dwdp_size") if (parallel.dwdp_size or 1) > 1 else None

    return offloads() or read(lambda context: of(context.get_parallel()), of)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def multiplexes() -> bool:
    """Whether the server has --enable-pdmux: it prefills and decodes at the same time on two streams."""
    return bool(read(lambda context: context.get_disagg().enable_pdmux, lambda arguments: arguments.enable_pdmux))


def is_deterministic() -> bool:
    """Whether the server has --enable-deterministic-inference."""
    return bool(
        read(
            lambda context: context.get_exec().deterministic.enable_deterministic_inference,
            lambda arguments: arguments.enable_deterministic_inference,
        )
    )


def replaces_model() -> str | None:
    """Returns the flag with which kernels of a whole model take the place of its layers, or None."""

    def of(kernel: Any) -> str | None:
        names = ("enable_nvidia_megakernel", "enable_amd_monokernel")
        return next((_flag(name) for name in names if getattr(kernel, name, False)), None)

    return read(lambda context: of(context.get_exec().kernel), of)


def load_format() -> tuple[str, str]:
    """Returns --load-format, and the backend of "remote_instance". Without a server both are empty."""

    def of(arguments: Any) -> tuple[str, str]:
        backend = getattr(arguments, "remote_instance_weight_loader_backend", "")
        loader, source = (str(getattr(name, "value", name) or "") for name in (arguments.load_format, backend))
        return loader, source

    return read(lambda context: of(context.get_model()), of) or ("", "")


def restores_processed() -> bool:
    """Whether SGLang writes parameters after it has processed them: they are those of another server, as that one had
    processed them."""
    return load_format()[0] in ("sharded_state", "presharded", "remote")


def skips_processing() -> bool:
    """Whether SGLang takes the parameters of another server that runs, and does not process them."""
    return load_format() in {("remote_instance", backend) for backend in ("nccl", "transfer_engine")}


def compiles() -> bool:
    """Whether the server has --enable-torch-compile."""
    return bool(
        read(
            lambda context: context.get_exec().graph.enable_torch_compile,
            lambda arguments: arguments.enable_torch_compile,
        )
    )


def exports_metrics() -> bool:
    """Whether the server has --enable-metrics."""
    return bool(
        read(
            lambda context: context.get_observability().enable_metrics,
            lambda arguments: arguments.enable_metrics,
        )
    )


def speculates() -> bool:
    """Whether the server has --speculative-algorithm."""
    algorithm = read(
        lambda context: context.get_spec().speculative_algorithm, lambda arguments: arguments.speculative_algorithm
    )
    return algorithm is not None


def fuses_allreduce() -> bool | None:
    """Whether the server fuses its all-reduce. It is None if there is nothing to reduce, or no server."""

    def of_context(context: Any) -> tuple[int, bool]:
        backend = context.get_exec().comm.flashinfer_allreduce_fusion_backend
        return context.get_server_args().tp_size, backend is not None

    def of_arguments(arguments: Any) -> tuple[int, bool]:
        backend = getattr(arguments, "flashinfer_allreduce_fusion_backend", None)
        return arguments.tp_size, backend is not None or arguments.enable_flashinfer_allreduce_fusion

    found = read(of_context, of_arguments)
    return None if found is None or found[0] == 1 else bool(found[1])


def allreduce_backend() -> str | None:
    """Returns --flashinfer-allreduce-fusion-backend as SGLang resolved it, or None."""
    return read(
        lambda context: context.get_exec().comm.flashinfer_allreduce_fusion_backend,
        lambda arguments: getattr(arguments, "flashinfer_allreduce_fusion_backend", None),
    )
