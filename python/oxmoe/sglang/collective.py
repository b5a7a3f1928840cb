"""Defines SGLang's all-reduce operators before SGLang does. SGLang then uses the operators that it finds.

Imports nothing of SGLang before an operator is called.
"""

from __future__ import annotations

import logging
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oxmoe.allreduce import AllReduceFusionPattern, allreduce_fusion, create_allreduce_fusion_workspace
from oxmoe.sglang import capabilities

if TYPE_CHECKING:
    from oxmoe.allreduce import AllReduceFusionWorkspace

logger = logging.getLogger(__name__)

# The libraries that define the operators, held because an operator lives only as long as its library.
_libraries: list[torch.library.Library] = []
_defined: set[str] = set()
_workspaces: dict[tuple[Any, ...], AllReduceFusionWorkspace] = {}
# Workspaces that were replaced. Captured graphs may still use them.
_outgrown: list[AllReduceFusionWorkspace] = []
_spans_hosts: dict[str, bool] = {}
# Operators whose first call was logged.
_ran: set[str] = set()
# Bytes of a host's id or name that ranks tell each other. Linux allows 64 for a name.
_HOST_BYTES = 256


def define() -> None:
    """Defines the operators of the installed SGLang, once. Raises RuntimeError if SGLang has already defined one."""
    for name, schema in capabilities.schemas().items():
        if name in _defined:
            continue
        if hasattr(torch.ops.sglang, name):
            raise RuntimeError(
                f"torch.ops.sglang.{name} is SGLang's own already: oxmoe's platform entry point was not called while "
                "SGLang was imported. Unset SGLANG_PLATFORM, let SGLANG_PLUGINS name oxmoe, and see that oxmoe is "
                "installed with its entry points (pip install, not a folder on PYTHONPATH)"
            )
        library = torch.library.Library("sglang", "FRAGMENT")
        library.define(schema)
        kernel, fake = (_fused, _fake_fused) if name == capabilities.FUSED else (_plain, _fake_plain)
        library.impl(name, kernel, "CUDA")
        library.impl(name, kernel, "CPU")
        torch.library.register_fake(f"sglang::{name}", fake, lib=library)
        _libraries.append(library)
        _defined.add(name)


def defined() -> tuple[str, ...]:
    """Returns the operators of SGLang that oxmoe has defined in this process."""
    return tuple(sorted(_defined))


def install() -> str:
    """Checks that the operators are those that `oxmoe.sglang.platform` has defined. Returns what is taken over."""
    define()
    operators = "operator" if len(_defined) == 1 else "operators"
    return f"{operators} {', '.join(defined())}: bf16, f16 and fp32; called with {capabilities.fusion_flag()}"


def group_of(use_attn_tp_group: bool) -> Any:
    """Returns the SGLang GroupCoordinator that the flag selects: that of attention, or the one over which experts
    are summed."""
    from sglang.srt.layers import flashinfer_comm_fusion as fusion

    if hasattr(fusion, "resolve_fusion_group"):
        return fusion.resolve_fusion_group(use_attn_tp_group=use_attn_tp_group)[2]
    # Older releases have no such function, so this makes the choice of their ensure_workspace_initialized.
    if use_attn_tp_group:
        return fusion.get_attn_tp_group()
    if hasattr(fusion, "get_moe_expert_parallel_world_size"):
        expert_ranks = fusion.get_moe_expert_parallel_world_size()
    else:
        expert_ranks = fusion.get_parallel().moe_ep_size
    return fusion.get_moe_ep_group() if expert_ranks > 1 else fusion.get_moe_tp_group()


def host() -> tuple[str, str]:
    """Returns (an id that tells this host from others, its name). Containers on one host have names of their own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = platform.node()
    return (boot.read_text().strip() if boot.exists() else name), name


def _bytes_of(*texts: str) -> Tensor:
    """Returns one row of bytes for each text, which is cut or filled with zeros. Ranks send each other bytes and no
    pickles."""
    rows = [text.encode(errors="surrogateescape")[:_HOST_BYTES].ljust(_HOST_BYTES, b"\0") for text in texts]
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(texts), _HOST_BYTES)


def _text_of(row: Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")


def spans_hosts(group: Any) -> bool:
    """Whether the ranks of the group are on several hosts. GPUs of different hosts cannot map each other's memory.

    All ranks find this out together at the first call, which is in SGLang's warm-up, and log it.
    """
    if group.unique_name in _spans_hosts:
        return _spans_hosts[group.unique_name]
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "oxmoe: the hosts of an all-reduce's group are found at the first call of its ranks, which a CUDA graph "
            "cannot capture; run the model once before the capture (SGLang does, unless its warm-up was skipped)"
        )
    texts = [torch.empty(2, _HOST_BYTES, dtype=torch.uint8) for _ in range(group.world_size)]
    torch.distributed.all_gather(texts, _bytes_of(*host()), group=group.cpu_group)
    found = [tuple(_text_of(row) for row in rows) for rows in texts]
    several = len({identity for identity, _ in found}) > 1
    if several:
        names = ", ".join(dict.fromkeys(name for _, name in found))
        logger.warning(
            "oxmoe: allreduce: group %s has ranks on several hosts (%s), which oxmoe's kernels do not join: it is "
            "summed by torch.distributed (NCCL on GPUs) and normalised by torch. Start without allreduce to have "
            "SGLang's kernels",
            group.unique_name,
            names,
        )
    _spans_hosts[group.unique_name] = several
    return several


def _sum_over_hosts(tensor: Tensor, group: Any) -> Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(result, group=group.device_group)
    return result


def _say_that_it_ran(name: str, group: Any) -> None:
    """Logs an operator's first call. SGLang may have its fusion on and never call it, as for some of its groups."""
    if name not in _ran:
        _ran.add(name)
        if group.rank_in_group == 0:
            logger.info("oxmoe: allreduce: %s ran on oxmoe, in group %s", name, group.unique_name)


def _workspace(group: Any, max_token_num: int, like: Tensor) -> AllReduceFusionWorkspace:
    """Returns the group's workspace for tensors like this one. All its ranks make it together at the first call."""
    key = (group.unique_name, like.shape[1], like.dtype, like.device)
    workspace = _workspaces.get(key)
    if workspace is not None and workspace.max_token_num >= like.shape[0] and not workspace.destroyed:
        return workspace
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "oxmoe: the all-reduce workspace of a group is made at the first call of its ranks, which a CUDA graph "
            "cannot capture; run the model once before the capture (SGLang does, unless its warm-up was skipped)"
        )
    if workspace is not None and not workspace.destroyed:
        _outgrown.append(workspace)
    _workspaces[key] = create_allreduce_fusion_workspace(
        max_token_num=max(max_token_num, like.shape[0]),
        hidden_dim=like.shape[1],
        dtype=like.dtype,
        group=group.cpu_group,
    )
    return _workspaces[key]


def _fused(
    input_tensor: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    max_token_num: int = 2048,
    use_oneshot: bool | None = None,
    trigger_completion_at_end: bool = False,
    fp32_acc: bool = True,
    use_attn_tp_group: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns (norm, residual) of the sum over the group's ranks. It never declines, because older releases would
    then sum nothing.

    Sums are fp32 with any fp32_acc; input_tensor, residual and weight stay as they are.
    """
    group = group_of(use_attn_tp_group)
    if spans_hosts(group):
        summed = _sum_over_hosts(input_tensor, group).float() + residual.float()
        residual_out = summed.to(residual.dtype)
        norm = torch.nn.functional.rms_norm(residual_out.float(), weight.shape, weight.float(), eps)
        return norm.to(input_tensor.dtype), residual_out
    _say_that_it_ran(capabilities.FUSED, group)
    x, residual = input_tensor.contiguous(), residual.contiguous()
    norm, residual_out = torch.empty_like(x), torch.empty_like(residual)
    allreduce_fusion(
        x,
        _workspace(group, max_token_num, x),
        AllReduceFusionPattern.kARResidualRMSNorm,
        launch_with_pdl=True,
        trigger_completion_at_end=trigger_completion_at_end,
        residual_out=residual_out,
        norm_out=norm,
        residual_in=residual,
        rms_gamma=weight.contiguous(),
        rms_eps=eps,
        use_oneshot=use_oneshot,
    )
    return norm, residual_out


def _fake_fused(input_tensor: Tensor, residual: Tensor, weight: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input_tensor), torch.empty_like(residual)


def _plain(tensor: Tensor, group_name: str) -> Tensor:
    from sglang.srt.distributed.parallel_state import _groups

    group = _groups[group_name]()
    if group is None:
        raise ValueError(f"group {group_name} is destroyed")
    if spans_hosts(group):
        return _sum_over_hosts(tensor, group)
    _say_that_it_ran(capabilities.PLAIN, group)
    # The size is SGLang's own bound for this operator, so that graphs of few tokens need no workspace that grows.
    workspace = _workspace(group, 2048, tensor)
    return allreduce_fusion(tensor, workspace, AllReduceFusionPattern.kAllReduce, output=torch.empty_like(tensor))


def _fake_plain(tensor: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(tensor)
