"""SGLang's all-reduce operators, defined before SGLang defines them: it then uses the operators that it finds.

Imports nothing of SGLang before an operator is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oxmoe.allreduce import AllReduceFusionPattern, allreduce_fusion, create_allreduce_fusion_workspace

if TYPE_CHECKING:
    from oxmoe.allreduce import AllReduceFusionWorkspace

FUSED = "flashinfer_allreduce_residual_rmsnorm"
PLAIN = "flashinfer_allreduce"

# SGLang's schemas, word for word: its callers and its own fake kernels rely on them.
_FUSED_SCHEMA = (
    f"{FUSED}(Tensor(a0!) input_tensor, Tensor(a1!) residual, Tensor(a2!) weight, float eps=1e-06, "
    "SymInt max_token_num=2048, bool? use_oneshot=None, bool trigger_completion_at_end=False, "
    "bool fp32_acc={fp32_acc}, bool use_attn_tp_group=True) -> (Tensor, Tensor)"
)
_PLAIN_SCHEMA = f"{PLAIN}(Tensor tensor, str group_name) -> Tensor"
SCHEMAS = {
    "0.5.12.post1": {FUSED: _FUSED_SCHEMA.format(fp32_acc=False)},
    "0.5.23": {FUSED: _FUSED_SCHEMA.format(fp32_acc=True), PLAIN: _PLAIN_SCHEMA},
}

# A library's operators live as long as it does.
_libraries: list[torch.library.Library] = []
_defined: set[str] = set()
_workspaces: dict[tuple[Any, ...], AllReduceFusionWorkspace] = {}
# Captured graphs may use them still.
_outgrown: list[AllReduceFusionWorkspace] = []


def define(version: str) -> None:
    """Defines this SGLang version's operators, once. RuntimeError where SGLang has defined one already."""
    for name, schema in SCHEMAS[version].items():
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
        kernel, fake = (_fused, _fake_fused) if name == FUSED else (_plain, _fake_plain)
        library.impl(name, kernel, "CUDA")
        library.impl(name, kernel, "CPU")
        torch.library.register_fake(f"sglang::{name}", fake, lib=library)
        _libraries.append(library)
        _defined.add(name)


def defined() -> tuple[str, ...]:
    """The operators of SGLang that are oxmoe's in this process."""
    return tuple(sorted(_defined))


def group_of(use_attn_tp_group: bool) -> Any:
    """SGLang's GroupCoordinator behind the flag: that of attention, or the one that experts are summed over."""
    from sglang.srt.layers import flashinfer_comm_fusion as fusion

    if hasattr(fusion, "resolve_fusion_group"):
        return fusion.resolve_fusion_group(use_attn_tp_group=use_attn_tp_group)[2]
    # 0.5.12.post1 has no such function: the choice of its ensure_workspace_initialized.
    if use_attn_tp_group:
        return fusion.get_attn_tp_group()
    return fusion.get_moe_ep_group() if fusion.get_moe_expert_parallel_world_size() > 1 else fusion.get_moe_tp_group()


def _workspace(group: Any, max_token_num: int, like: Tensor) -> AllReduceFusionWorkspace:
    """The group's workspace for tensors like this one; made at the first call, by all its ranks together."""
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
    """(norm, residual) of the sum over the group's ranks. Never declines: 0.5.12.post1 would then sum nothing.

    Sums are fp32 with any fp32_acc; input_tensor, residual and weight stay as they are.
    """
    x, residual = input_tensor.contiguous(), residual.contiguous()
    norm, residual_out = torch.empty_like(x), torch.empty_like(residual)
    allreduce_fusion(
        x,
        _workspace(group_of(use_attn_tp_group), max_token_num, x),
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
    # SGLang's own bound for it, so that graphs of few tokens need no workspace that grows.
    workspace = _workspace(group, 2048, tensor)
    return allreduce_fusion(tensor, workspace, AllReduceFusionPattern.kAllReduce, output=torch.empty_like(tensor))


def _fake_plain(tensor: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(tensor)
