"""flashinfer's ways to make and call an all-reduce: groups without a CPU backend, comm_backend, its older names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import oxmoe
from oxmoe import AllReduceFusionPattern as Pattern
from oxmoe.allreduce.exchange import FunctionLink, StoreExchange
from oxmoe.testing import same_bits
from ranks import Crew, Rank, seed_of

T, H = 5, 64


@pytest.fixture(scope="module")
def two() -> Iterator[Crew]:
    crew = Crew(2)
    yield crew
    crew.close()


class Backend:
    """As flashinfer's TorchDistBackend."""

    def Get_size(self) -> int:
        return dist.get_world_size()

    def Get_rank(self) -> int:
        return dist.get_rank()

    def allgather(self, data: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.Get_size()
        dist.all_gather_object(gathered, data)
        return gathered


def drawn(seed: int, world: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each rank gives, the residual and gamma."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(world, T, H, generator=rng), torch.randn(T, H, generator=rng), torch.rand(H, generator=rng)


def normed(mine: list[torch.Tensor], residual: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    total = sum(mine) + residual
    return total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gamma


def by_ways(me: Rank, way: str, seed: int) -> list[str]:
    """Two workspaces of this way, called in turn; what is wrong."""
    arguments: dict[str, Any] = {"max_token_num": T, "hidden_dim": H, "dtype": torch.float32, "device": "cpu"}
    if way == "store":
        # A group like NCCL's: it has a backend for CUDA tensors alone.
        group = dist.new_group([0, 1], backend="cuda:gloo")
        arguments["group"] = group
    else:
        arguments["comm_backend"] = Backend()
    spaces = [oxmoe.create_allreduce_fusion_workspace("trtllm", **arguments) for _ in range(2)]
    wrong = [] if all(isinstance(space._link, FunctionLink) for space in spaces) else ["another link"]
    if way == "store" and not isinstance(spaces[0]._link._exchange, StoreExchange):  # type: ignore[union-attr]
        wrong.append("no store")
    for call in range(4):
        given, residual, gamma = drawn(seed + call, me.world)
        out = torch.full((T, H), torch.nan)
        oxmoe.allreduce_fusion(
            given[me.rank], spaces[call % 2], Pattern.kARResidualRMSNorm, residual_in=residual, norm_out=out,
            residual_out=torch.empty_like(out), rms_gamma=gamma,
        )  # fmt: skip
        torch.testing.assert_close(out, normed(list(given), residual, gamma))
    if spaces[0].backend != "oxmoe":
        wrong.append(spaces[0].backend)
    for space in spaces:
        space.destroy()
    return wrong


@pytest.mark.parametrize("way", ["store", "comm_backend"])
def test_ways_to_meet(two: Crew, way: str, rng: torch.Generator) -> None:
    assert two.run(by_ways, way, seed_of(rng)) == [[], []]


def by_old_names(me: Rank, dtype: torch.dtype, seed: int) -> list[str]:
    make = oxmoe.trtllm_create_ipc_workspace_for_all_reduce_fusion
    wide = dtype == torch.float32
    handles, workspace, sizes = make(me.rank, me.world, T, H, wide, group=me.all, create_metadata=True)
    wrong = [] if handles == [] and sizes["hidden_dim"] == H else ["metadata"]
    given, residual, gamma = (part.to(dtype) for part in drawn(seed, me.world))
    flat = torch.empty(T * H, dtype=dtype)
    expected = torch.empty(T, H, dtype=dtype)
    outs = [torch.full((T, H), torch.nan, dtype=dtype) for _ in range(2)]
    options = (True, False, False, Pattern.kARResidualRMSNorm, None)
    last = (None, None, gamma, 1e-5, None, None)
    oxmoe.trtllm_allreduce_fusion(
        given[me.rank].reshape(-1), me.world, me.rank, T, H, workspace, *options, None, residual.reshape(-1),
        outs[0], flat, *last, weight_bias=1.0,
    )  # fmt: skip
    oxmoe.allreduce_fusion(
        given[me.rank], workspace, Pattern.kARResidualRMSNorm, residual_in=residual, residual_out=outs[1],
        norm_out=expected, rms_gamma=gamma, rms_eps=1e-5, weight_bias=1.0,
    )  # fmt: skip
    if not same_bits(flat.view(T, H), expected) or not same_bits(*outs):
        wrong.append("another result")
    oxmoe.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(workspace)
    return wrong if workspace.destroyed else [*wrong, "not destroyed"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_older_names(two: Crew, dtype: torch.dtype, rng: torch.Generator) -> None:
    assert two.run(by_old_names, dtype, seed_of(rng)) == [[], []]


def test_older_names_refuse() -> None:
    with pytest.raises(NotImplementedError, match="use_symm_dev_mem: oxmoe's memory has no SymmDeviceMemory"):
        oxmoe.trtllm_create_ipc_workspace_for_all_reduce_fusion(0, 1, T, H, use_symm_dev_mem=True)
    _, workspace = oxmoe.trtllm_create_ipc_workspace_for_all_reduce_fusion(0, 1, T, H)
    x = torch.ones(T, H, dtype=torch.bfloat16)
    options: tuple[Any, ...] = (False, False, False, Pattern.kAllReduce, None)
    nothing = (None,) * 9

    def call(x: torch.Tensor, world: int = 1, rank: int = 0, rows: int = T, space: Any = workspace) -> torch.Tensor:
        out = torch.full((T, H), torch.nan, dtype=x.dtype)
        oxmoe.trtllm_allreduce_fusion(x, world, rank, rows, H, space, *options, out, *nothing, None)
        return out

    assert same_bits(call(x), x)
    for changed, words in (
        ({"world": 2}, "world_size: expected 1"),
        ({"rank": 1}, "world_rank: expected 0"),
        ({"rows": T + 1}, rf"allreduce_in: expected {T + 1} x {H} contiguous numbers, got shape \[{T}, {H}\]"),
        ({"space": torch.zeros(3)}, "workspace_ptrs: expected the AllReduceFusionWorkspace of oxmoe's"),
    ):
        with pytest.raises(ValueError, match=words):
            call(x, **changed)
    with pytest.raises(ValueError, match="allreduce_in: expected"):
        call(x.t())
    oxmoe.trtllm_destroy_ipc_workspace_for_all_reduce_fusion([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workspace: expected an AllReduceFusionWorkspace, got int"):
        oxmoe.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(3)  # type: ignore[arg-type]
    oxmoe.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(workspace)
    assert workspace.destroyed
