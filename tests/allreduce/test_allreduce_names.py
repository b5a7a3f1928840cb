"""flashinfer's ways to make and call an all-reduce: groups without a CPU backend, comm_backend, its older names."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import oxmoe
from oxmoe import AllReduceFusionPattern as Pattern
from oxmoe.allreduce.exchange import FunctionLink, StoreLink
from oxmoe.testing import same_bits
from ranks import Crew, Rank, crews, raised, seed_of

T, H = 5, 64

two = crews(2)


class Backend:
    """A stand-in for flashinfer's TorchDistBackend."""

    def Get_size(self) -> int:
        return dist.get_world_size()

    def Get_rank(self) -> int:
        return dist.get_rank()

    def allgather(self, data: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.Get_size()
        dist.all_gather_object(gathered, data)
        return gathered


def drawn(seed: int, world: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns each rank's input, the residual and gamma."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(world, T, H, generator=rng), torch.randn(T, H, generator=rng), torch.rand(H, generator=rng)


def normed(mine: list[torch.Tensor], residual: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    total = sum(mine) + residual
    return total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gamma


def by_ways(me: Rank, way: str, seed: int) -> list[str]:
    """Makes two workspaces in this way and calls them in turn. Returns what is wrong."""
    arguments: dict[str, Any] = {"max_token_num": T, "hidden_dim": H, "dtype": torch.float32, "device": "cpu"}
    if way == "store":
        # The group is like NCCL's: it has a backend for CUDA tensors alone.
        group = dist.new_group([0, 1], backend="cuda:gloo")
        arguments["group"] = group
    else:
        arguments["comm_backend"] = Backend()
    spaces = [oxmoe.create_allreduce_fusion_workspace("trtllm", **arguments) for _ in range(2)]
    wrong = [] if all(isinstance(space._link, FunctionLink) for space in spaces) else ["another link"]
    if way == "store" and not isinstance(spaces[0]._link, StoreLink):
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


def missing_at_the_store(me: Rank) -> list[Any]:
    """One rank does not come to a call by way of a store. Returns (kind, text, seconds) of the wait, and the seconds of
    the next use of the store by the rank that waited."""
    group = dist.new_group([0, 1], backend="cuda:gloo")
    workspace = oxmoe.create_allreduce_fusion_workspace(
        max_token_num=T, hidden_dim=H, dtype=torch.float32, group=group, device="cpu", deadline=1.0
    )
    store = dist.distributed_c10d._get_default_store()
    if me.rank == 1:
        store.get("rank 0 is done")
        workspace._fault = "this rank did not come"
        workspace.destroy()
        return []
    started = time.monotonic()
    kind, text = raised(lambda: oxmoe.allreduce_fusion(torch.ones(T, H), workspace, 0))
    waited = time.monotonic()
    store.set("rank 0 is done", "1")
    asked = time.monotonic()
    workspace.destroy()
    return [kind, text, waited - started, asked - waited]


def test_a_missing_rank_leaves_the_store_alone(two: Crew) -> None:
    """A store serves one call at a time: a wait that goes on in the background would hold up the whole process."""
    (kind, text, waited, asked), _ = two.run(missing_at_the_store)
    assert kind == "TimeoutError" and "rank 0 waited for peer 1 in call 0" in text, (kind, text)
    assert 0.9 < waited < 10 and asked < 5


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_stores_of_other_kinds(kind: str, tmp_path: Path) -> None:
    stores: list[dist.Store] = [dist.HashStore()] * 3
    if kind == "file":
        stores = [dist.PrefixStore("group", dist.FileStore(str(tmp_path / "store"), 3)) for _ in range(3)]

    def meet(rank: int) -> list[list[bytes]]:
        link, met = StoreLink(stores[rank], 3, rank), []
        for turn in range(20):
            link.post(b"%d %02d" % (rank, turn))
            met.append(link.headers(time.monotonic() + 20, 4, lambda _: False))
        return met

    with ThreadPoolExecutor(3) as pool:
        for met in pool.map(meet, range(3)):
            assert met == [[b"%d %02d" % (rank, turn) for rank in range(3)] for turn in range(20)]


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
    oxmoe.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles, group=me.all)
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


def on_world(me: Rank, seed: int) -> list[str]:
    """Makes workspaces as flashinfer's callers do who name no group: WORLD, of all ranks."""
    make = oxmoe.trtllm_create_ipc_workspace_for_all_reduce_fusion
    spaces = [
        oxmoe.TRTLLMAllReduceFusionWorkspace(me.world, me.rank, T, H, torch.float32),
        make(me.rank, me.world, T, H)[1],
    ]
    given, *_ = (part.bfloat16() for part in drawn(seed, me.world))
    for space in spaces:
        out = torch.empty(T, H, dtype=torch.bfloat16)
        oxmoe.allreduce_fusion(given[me.rank], space, Pattern.kAllReduce, output=out)
        torch.testing.assert_close(out, given.float().sum(0).bfloat16())
        space.destroy()
    # A rank of another group than WORLD is told to name it.
    try:
        oxmoe.TRTLLMAllReduceFusionWorkspace(me.world + 1, me.rank, T, H)
    except ValueError as error:
        return [] if "group: expected a torch ProcessGroup" in str(error) else [str(error)]
    return ["a group of three was found"]


def test_world_is_the_default(two: Crew, rng: torch.Generator) -> None:
    assert two.run(on_world, seed_of(rng)) == [[], []]


QUANTISED = {
    Pattern.kARResidualRMSNormFP8Quant: None,
    Pattern.kARResidualRMSNormOutFP4Quant: oxmoe.QuantizationSFLayout.SWIZZLED_128x4,
    Pattern.kARResidualRMSNormFP4Quant: oxmoe.QuantizationSFLayout.SWIZZLED_8x4,
    Pattern.kAllReduce: None,
    Pattern.kARResidualRMSNorm: None,
}


@pytest.mark.parametrize("pattern", QUANTISED, ids=lambda pattern: pattern.name)
def test_older_names_take_every_operand(pattern: Pattern, rng: torch.Generator) -> None:
    """flashinfer's tests pass all operands with every pattern, and memory of 16-bit numbers for codes and scales."""
    handles, workspace = oxmoe.trtllm_create_ipc_workspace_for_all_reduce_fusion(0, 1, T, H)
    x, residual = (torch.randn(T, H, generator=rng).bfloat16() for _ in range(2))
    gamma, layout = torch.rand(H, generator=rng).bfloat16(), QUANTISED[pattern]
    outs = {name: torch.zeros(T * H, dtype=torch.bfloat16) for name in ("all", "residual", "norm", "quant", "scale")}
    outs["scale"] = torch.zeros(128 * H, dtype=torch.bfloat16)
    oxmoe.trtllm_allreduce_fusion(
        x.view(-1), 1, 0, T, H, workspace, True, False, True, pattern, None, outs["all"], residual.view(-1),
        outs["residual"], outs["norm"], outs["quant"], outs["scale"], gamma, 1e-5, torch.tensor([0.5]), layout,
    )  # fmt: skip
    fp4 = "FP4" in pattern.name
    expected: dict[str, Any] = {}
    if pattern == Pattern.kAllReduce:
        expected = {"output": torch.empty_like(x)}
    else:
        expected = {"residual_out": torch.empty_like(x)}
        if "Quant" not in pattern.name or "Out" in pattern.name:
            expected["norm_out"] = torch.empty_like(x)
        if "Quant" in pattern.name:
            expected["quant_out"] = torch.empty(T, H // 2 if fp4 else H, dtype=torch.uint8)
        if fp4:
            rows = 128 if layout == oxmoe.QuantizationSFLayout.SWIZZLED_128x4 else 8
            expected["scale_out"] = torch.empty(rows * H // 16, dtype=torch.uint8)
    given = {} if pattern == Pattern.kAllReduce else {"residual_in": residual, "rms_gamma": gamma, "rms_eps": 1e-5}
    if "Quant" in pattern.name:
        given |= {"scale_factor": 0.5, "layout_code": layout}
    oxmoe.allreduce_fusion(x, workspace, pattern, **given, **expected)
    names = {"output": "all", **{f"{name}_out": name for name in ("residual", "norm", "quant", "scale")}}
    for name, tensor in expected.items():
        memory = outs.pop(names[name]).view(torch.uint8)
        assert same_bits(memory[: tensor.nbytes], tensor.view(-1).view(torch.uint8)), name
        assert not memory[tensor.nbytes :].any()
    assert all(not tensor.any() for tensor in outs.values())
    oxmoe.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles)
    assert workspace.destroyed


def test_older_names_of_moe(rng: torch.Generator) -> None:
    handles, workspace = oxmoe.trtllm_create_ipc_workspace_for_all_reduce_fusion(0, 1, T, H)
    residual, tokens, shared = (torch.randn(T, H, generator=rng).bfloat16() for _ in range(3))
    gamma, experts = torch.rand(H, generator=rng).bfloat16(), torch.randn(3 * T, H, generator=rng).bfloat16()
    weights = torch.rand(3, T, generator=rng)
    of_old, of_new = ([torch.zeros(T, H, dtype=torch.bfloat16) for _ in range(3)] for _ in range(2))
    oxmoe.trtllm_moe_allreduce_fusion(
        1, 0, T, H, workspace, True, residual.view(-1), gamma, 1e-5, 1.0, 3, weights.view(-1), experts.view(-1),
        tokens.view(-1), None, of_old[0].view(-1), of_old[1].view(-1), of_old[2].view(-1), None, None, 1.0,
    )  # fmt: skip
    of_norm = {"residual_in": residual, "rms_gamma": gamma, "rms_eps": 1e-5, "weight_bias": 1.0}
    oxmoe.allreduce_fusion(
        tokens, workspace, Pattern.kMoEReductionARResidualRMSNorm, output=of_new[0], residual_out=of_new[1],
        norm_out=of_new[2], moe_reduction_device_num_experts=3, moe_reduction_scale_input=weights,
        moe_reduction_active_experts_token_input=experts, moe_reduction_token_input=tokens, **of_norm,
    )  # fmt: skip
    assert all(bool(new.any()) and same_bits(old, new) for old, new in zip(of_old, of_new, strict=True))
    table = torch.randint(0, 3 * T, (T, 2), generator=rng, dtype=torch.int32)
    scales = torch.rand(T, 2, generator=rng).bfloat16()
    for factor, own in ((None, scales), (2.5, scales), (2.5, None)):
        old, new = (torch.zeros(T, H, dtype=torch.bfloat16) for _ in range(2))
        oxmoe.trtllm_moe_finalize_allreduce_fusion(
            experts,
            residual,
            gamma,
            table,
            old,
            None,
            None,
            None,
            workspace,
            True,
            0,
            1,
            1e-5,
            shared,
            own,
            factor,
            1.0,
        )
        times = (torch.ones(T, 2) if own is None else own.float()) * (factor or 1.0)
        oxmoe.allreduce_fusion(
            experts, workspace, Pattern.kMoEFinalizeARResidualRMSNorm, norm_out=new, expert_scale_factor=times,
            expanded_idx_to_permuted_idx=table, shared_expert_output=shared, **of_norm,
        )  # fmt: skip
        assert bool(new.any()) and same_bits(old, new)
    with pytest.raises(NotImplementedError, match="quant_out and scale_out have no scale_factor in this call"):
        oxmoe.trtllm_moe_finalize_allreduce_fusion(
            experts, residual, gamma, table, old, None, old, None, workspace, True, 0, 1, 1e-5, shared, scales, None
        )
    oxmoe.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles)
