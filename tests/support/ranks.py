"""Processes over gloo on loopback for the all-reduce tests, and a reference in plain torch."""

from __future__ import annotations

import multiprocessing
import os
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import oxmoe
import oxmoe._oxmoe as extension
from oxmoe import AllReduceFusionPattern as Pattern
from oxmoe.allreduce.fusion import _Operands
from oxmoe.tools.bench.allreduce_peers import WITHOUT_MULTICAST

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
# Sizes of groups in which every rank has its own GPU.
WORLDS = [pytest.param(n, marks=pytest.mark.skipif(GPUS < n, reason=f"needs {n} GPUs")) for n in (2, 4, 8)]

# Processes


class Rank:
    """The argument of a function that runs on every rank: the rank, and its groups."""

    def __init__(self, rank: int, world: int, store: dist.Store) -> None:
        torch.set_num_threads(1)
        self.rank, self.world = rank, world
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        self.all = dist.group.WORLD
        # Every process takes part in making every group.
        groups = [dist.new_group([first, first + 1]) for first in range(0, world - 1, 2)]
        self.pair = groups[min(rank // 2, len(groups) - 1)] if groups else self.all

        self._nccl: dist.ProcessGroup | None = None

    def group(self, size: int) -> dist.ProcessGroup:
        return self.all if size == self.world else self.pair

    def nccl(self) -> dist.ProcessGroup:
        """Returns a group of all ranks for tensors on GPUs. All ranks make it together."""
        if self._nccl is None:
            self._nccl = dist.new_group(backend="nccl")
        return self._nccl


def _work(connection: Any, rank: int, world: int, port: int, gpus: bool) -> None:
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # gloo uses the loopback interface, whatever the machine's name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ |= WITHOUT_MULTICAST
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, wait_for_workers=False)
    if rank == 0:
        connection.send(store.port)
    me = Rank(rank, world, store)
    if gpus:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            connection.send((None, function(me, *args)))
        except Exception as error:
            connection.send((f"{type(error).__name__}: {error}\n{traceback.format_exc()}", None))


class Crew:
    """Processes that wait for functions to run, one a rank; with `gpus` each has GPU number rank as its current one."""

    def __init__(self, world: int, gpus: bool = False) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "oxmoe"])
        port = 0  # rank 0 listens at a port of the system's choice; one that is only looked up may be taken by then
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, rank, world, port, gpus), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
            if rank == 0:
                assert ours.poll(60), "rank 0 does not start"
                port = ours.recv()

    def run(
        self, function: Callable[..., Any], *args: Any, gone: tuple[int, ...] = (), patience: float = 60
    ) -> list[Any]:
        """Returns the results of all ranks; a rank in `gone` gives none. patience: seconds."""
        for pipe in self.pipes:
            pipe.send((function, args))
        results, failures = [], []
        for rank, pipe in enumerate(self.pipes):
            if rank in gone:
                continue
            assert pipe.poll(patience), f"rank {rank} hangs"
            failure, result = pipe.recv()
            results.append(result)
            if failure is not None:
                failures.append(f"rank {rank}: {failure}")
        assert not failures, "\n".join(failures)
        return results

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(2)
            if process.is_alive():
                process.kill()


def crews(worlds: int | Sequence[Any], gpus: bool = False) -> Any:
    """Makes a fixture: a crew of so many ranks for the tests of a module, or crews of several sizes one after the
    other."""

    @pytest.fixture(scope="module", params=None if isinstance(worlds, int) else worlds)
    def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
        made = Crew(worlds if isinstance(worlds, int) else request.param, gpus)
        yield made
        made.close()

    return crew


def raised(call: Callable[[], Any]) -> tuple[str, str]:
    """Returns (type, message) of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def on_cpu(parts: list[torch.Tensor], pattern: int, **operands: Any) -> None:
    """Runs the CPU implementation on every rank's rows."""
    names = _Operands.__dataclass_fields__
    given: dict[str, Any] = dict.fromkeys(names) | {"rms_eps": 1e-6, "weight_bias": 0.0} | operands
    extension.allreduce_finish(_Operands(**given | {"input": parts[0], "pattern": pattern}), parts)


def make(me: Rank, tokens: int, hidden: int, dtype: torch.dtype, size: int | None = None, **options: Any) -> Any:
    options.setdefault("deadline", 20)
    return oxmoe.create_allreduce_fusion_workspace(
        max_token_num=tokens, hidden_dim=hidden, dtype=dtype, group=me.group(size or me.world), device="cuda", **options
    )


# Reference


def alone(tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> oxmoe.AllReduceFusionWorkspace:
    """Returns the workspace of a group of this process alone."""
    return oxmoe.create_allreduce_fusion_workspace(
        world_size=1, rank=0, max_token_num=tokens, hidden_dim=hidden, dtype=dtype
    )


def of_two(exchange: Callable[[bytes], Any], **options: Any) -> tuple[str, str]:
    """Returns what the making of rank 0's workspace of two raises."""
    return raised(
        lambda: oxmoe.create_allreduce_fusion_workspace(
            **{"world_size": 2, "rank": 0, "max_token_num": 4, "hidden_dim": 64, "dtype": "bfloat16", "deadline": 5.0}
            | {"exchange": exchange}
            | options
        )
    )


def draw(seed: int, name: str, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Draws numbers that are equal on every rank for the same name."""
    rng = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return (torch.randn(*shape, generator=rng) * scale).to(dtype)


def poison(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns memory that no correct result looks like."""
    item = torch.empty((), dtype=dtype).element_size()
    return torch.full((*shape[:-1], shape[-1] * item), 0xA5, dtype=torch.uint8).view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, but for the payloads of NaNs."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    nan = a.float().isnan() & b.float().isnan()
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool((nan | (a.contiguous().view(ints) == b.contiguous().view(ints))).all())


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    result = parts[0].float()
    for part in parts[1:]:
        result = result + part.float()
    return result.to(parts[0].dtype)


def check_norm(norm: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, eps: float, bias: float) -> str:
    """Checks for one rounding of the fp64 norm of the given rows, with NaN exactly at its NaN."""
    rows = residual.double()
    expected = rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt() * (bias + gamma.double())
    bar = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-21}[norm.dtype]
    tiny = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-140}[norm.dtype]
    finite = expected.isfinite()
    if not bool((norm.double().isnan() == expected.isnan()).all()):
        return "norm has NaN in other places"
    error = ((norm.double() - expected).abs() - tiny)[finite] / expected.abs()[finite].clamp(min=1e-300)
    worst = float(error.max()) if error.numel() else 0.0
    return "" if worst <= 1.02 * bar else f"norm is off by {worst:.3g}"


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Returns the codes of the nearest values; of two codes the even one."""
    distance = (x.double().abs().clamp(max=6.0)[..., None] - E2M1).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    code = (nearest * (2 - torch.arange(8) % 2)).argmax(-1)
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def nvfp4(norm: torch.Tensor, scale: float, layout: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (pairs uint8 [T, H / 2], scales in memory order)."""
    tokens, hidden = norm.shape
    blocks = norm.float().view(tokens, hidden // 16, 16)
    factors = to_e4m3(torch.tensor(scale) * (blocks.abs().amax(-1) * torch.tensor(1.0 / 6.0)))
    wide = torch.where(factors.float() != 0, torch.tensor(scale) / factors.float(), 0.0)
    codes = to_e2m1(blocks * wide[..., None]).view(tokens, hidden)
    pairs = codes[:, 0::2] | codes[:, 1::2] << 4
    if layout == 2:
        return pairs, factors.view(torch.uint8).flatten()
    tile = 128 if layout == 0 else 8
    rows, columns = -(-tokens // tile) * tile, -(-hidden // 64) * 4
    padded = torch.zeros(rows, columns, dtype=torch.uint8)
    padded[:tokens, : hidden // 16] = factors.view(torch.uint8)
    if layout == 0:
        return pairs, padded.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).flatten()
    return pairs, padded.view(rows // 8, 8, columns // 4, 4).permute(0, 2, 1, 3).flatten()


def groups_fp8(norm: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (e4m3 [T, H], exponent bytes [T, 4 ceil(groups / 4)])."""
    tokens, hidden = norm.shape
    values = norm.float().view(tokens, hidden // group, group)
    mantissa, exponent = torch.frexp((values.abs().amax(-1) / 448).clamp(min=1e-10))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    quant = to_e4m3(values / torch.exp2(exponent.float())[..., None]).view(tokens, hidden)
    packed = torch.zeros(tokens, -(-(hidden // group) // 4) * 4, dtype=torch.uint8)
    packed[:, : hidden // group] = (exponent + 127).to(torch.uint8)
    return quant, packed


# Patterns

QUANT = {
    "fp8": (Pattern.kARResidualRMSNormFP8Quant, Pattern.kARResidualRMSNormOutFP8Quant),
    "fp4": (Pattern.kARResidualRMSNormFP4Quant, Pattern.kARResidualRMSNormOutFP4Quant),
    "group": (
        Pattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant,
        Pattern.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant,
    ),
    "token": (Pattern.kARResidualRMSNormDynamicFP8Quant, Pattern.kARResidualRMSNormOutDynamicFP8Quant),
}


def quant_operands(kind: str, tokens: int, hidden: int, layout: int, group: int, tensor: bool) -> dict[str, Any]:
    operands: dict[str, Any] = {"quant_out": poison(tokens, hidden, dtype=torch.float8_e4m3fn)}
    scale: Any = torch.tensor([0.037]) if tensor else 0.037
    if kind == "fp8":
        return {**operands, "scale_factor": scale}
    if kind == "token":
        return {**operands, "scale_out": poison(tokens, 1, dtype=torch.float32)}
    if kind == "group":
        packs, stride = -(-(hidden // group) // 4), max(-(-tokens // 4) * 4, 1)
        scale_out = torch.full((packs * stride,), 0x5A5A5A5A, dtype=torch.int32)
        return {
            **operands,
            "scale_out": scale_out.as_strided((tokens, packs), (1, stride)),
            "block_quant_group_size": group,
        }
    tile = {0: 128, 1: 8, 2: 1}[layout]
    columns = hidden // 16 if layout == 2 else -(-hidden // 64) * 4
    return {
        "quant_out": poison(tokens, hidden // 2, dtype=torch.uint8),
        "scale_out": poison(-(-tokens // tile) * tile, columns, dtype=torch.uint8),
        "scale_factor": 31.0 if not tensor else torch.tensor(31.0),
        "layout_code": layout,
    }


def check_quant(kind: str, norm: torch.Tensor, operands: dict[str, Any]) -> list[str]:
    """Compares with the quantisation of oxmoe's own norm, bit for bit."""
    tokens = norm.shape[0]
    quant, scales = operands["quant_out"], operands.get("scale_out")
    wrong = []
    if kind == "fp8":
        wrong.append(same_bits(quant, to_e4m3(norm.float() * (torch.tensor(1.0) / torch.tensor(0.037)))))
    elif kind == "token":
        expected = (norm.float().abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-9 / 448)
        wrong += [same_bits(scales, expected), same_bits(quant, to_e4m3(norm.float() / expected))]
    elif kind == "group" and tokens:
        values, packed = groups_fp8(norm, operands["block_quant_group_size"])
        wrong += [
            same_bits(quant, values),
            torch.equal(scales.clone(memory_format=torch.contiguous_format).view(torch.uint8), packed),
        ]
        stride = -(-tokens // 4) * 4
        padding = scales.as_strided(
            (stride - tokens, scales.shape[1] - 1), (1, stride), scales.storage_offset() + tokens
        )
        wrong.append(bool((padding == 0).all()))
    elif kind == "fp4":
        pairs, packed = nvfp4(norm, 31.0, operands["layout_code"])
        wrong += [torch.equal(quant, pairs), torch.equal(scales.flatten(), packed)]
    return [f"{kind}: result {i} differs" for i, right in enumerate(wrong) if not right]


def crc(*tensors: torch.Tensor) -> list[int]:
    return [zlib.crc32(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) for t in tensors]


def alike(results: list[tuple[list[str], list[int]]], size: int) -> None:
    """Checks that nothing is wrong, and that every rank of a group has the same bits."""
    for rank, (wrong, sums) in enumerate(results):
        assert not wrong, f"rank {rank}: {wrong}"
        assert sums == results[rank // size * size][1], f"rank {rank}"


def seed_of(rng: torch.Generator) -> int:
    return int(torch.randint(2**31, (), generator=rng))
