"""Fused all-reduce + residual + RMSNorm (+ quantisation) with flashinfer's names, values and meanings.

CPU tensors: every rank's rows travel through its process group and are added by the extension, in rank order in fp32,
so all ranks get the same bits in every run. Nothing waits for ever: a peer that does not come, or is gone, is a
TimeoutError that names it.
"""

from __future__ import annotations

import struct
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from oxmoe import _oxmoe
from oxmoe.exchange import FunctionLink, GroupLink, Link, PeerLost

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from torch.distributed import ProcessGroup


class AllReduceFusionPattern(IntEnum):
    """flashinfer's patterns (flashinfer/comm/trtllm_ar.py).

    After the sum over ranks: residual add, RMSNorm, quantisation. "Out" patterns write norm_out as well as the
    quantised norm.
    """

    kAllReduce = 0
    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3
    kARResidualRMSNormOutFP8Quant = 4
    kARResidualRMSNormOutFP4Quant = 5
    kMoEReductionARResidualRMSNorm = 6
    kMoEFinalizeARResidualRMSNorm = 7
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9
    kARResidualRMSNormDynamicFP8Quant = 10
    kARResidualRMSNormOutDynamicFP8Quant = 11


class QuantizationSFLayout(IntEnum):
    """Where NVFP4's block scales lie, r = row, b = block of 16 values, B = hidden / 16 rounded up to 4.

    SWIZZLED_128x4: [rows / 128][B / 4][r % 32][r % 128 / 32][b % 4]; SWIZZLED_8x4: [rows / 8][B / 4][r % 8][b % 4],
    rows rounded up; LINEAR: [rows, hidden / 16]. Padding is written as 0.
    """

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2


@dataclass(frozen=True)
class _Operands:
    """The arguments of one call, as the extension reads them."""

    input: Any
    pattern: int
    output: Any
    residual_out: Any
    norm_out: Any
    quant_out: Any
    scale_out: Any
    residual_in: Any
    rms_gamma: Any
    rms_eps: float
    scale_factor: Any
    layout_code: int | None
    moe_reduction_device_num_experts: int | None
    moe_reduction_scale_input: Any
    moe_reduction_active_experts_token_input: Any
    moe_reduction_token_input: Any
    expanded_idx_to_permuted_idx: Any
    expert_scale_factor: Any
    shared_expert_output: Any
    block_quant_group_size: int | None
    weight_bias: float


# What ranks say to each other before the rows: kind, epoch, a word (the call's shape, or a workspace's capacity), text.
_HEADER = struct.Struct("<4sIIQ200s")
_HELLO, _CALL, _REFUSED, _GOODBYE = range(4)
_MAGIC = b"oxar"
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class _Header:
    kind: int
    epoch: int
    word: int
    text: str = ""

    def pack(self) -> bytes:
        text = self.text.encode()[:200].decode(errors="ignore").encode()
        return _HEADER.pack(_MAGIC, self.kind, self.epoch, self.word, text)

    @staticmethod
    def unpack(data: bytes) -> _Header:
        magic, kind, epoch, word, text = _HEADER.unpack(data)
        if magic != _MAGIC:
            raise RuntimeError(
                "a peer sent something that is no all-reduce header: is the group shared with other sends?"
            )
        return _Header(kind, epoch, word, text.rstrip(b"\0").decode())


class AllReduceFusionWorkspace:
    """What the ranks of one group need to all-reduce together. Made by `create_allreduce_fusion_workspace`.

    After a fault (a peer late, gone or out of step) it stays failed and every further call says so; destroy it and make
    a new one, with a new group: gloo closes the connections of a group when a wait on it times out.

    world_size, rank, max_token_num, hidden_dim, dtype (a name), deadline (seconds), nbytes (`workspace_bytes`),
    destroyed, metadata: as made.
    """

    backend = "oxmoe"

    def __init__(
        self,
        link: Link,
        world_size: int,
        rank: int,
        max_token_num: int,
        hidden_dim: int,
        dtype: str,
        deadline: float,
        force_oneshot_support: bool,
    ) -> None:
        self.world_size = world_size
        self.rank = rank
        self.max_token_num = max_token_num
        self.hidden_dim = hidden_dim
        self.dtype = dtype
        self.deadline = deadline
        self.nbytes = workspace_bytes(world_size, max_token_num, hidden_dim, dtype)
        self.metadata = {
            "tp_size": world_size,
            "tp_rank": rank,
            "max_token_num": max_token_num,
            "hidden_dim": hidden_dim,
            "dtype": dtype,
            "force_oneshot_support": force_oneshot_support,
        }
        self._link: Link | None = link
        self._epoch = 0
        self._fault: str | None = None
        link.reserve(max_token_num * hidden_dim * _ITEM_BYTES[dtype])

    @property
    def destroyed(self) -> bool:
        return self._link is None

    def is_buffer_size_sufficient(
        self, tp_size: int, num_tokens: int, hidden_dim: int, dtype: dtype | str, use_oneshot: bool | None = None
    ) -> bool:
        """Whether [num_tokens, hidden_dim] of `dtype` in a group of tp_size fits: bytes count, not the shape.

        Warns with the reason where it does not. use_oneshot changes nothing: both ways are always possible.
        """
        wanted = num_tokens * hidden_dim * _ITEM_BYTES[_dtype_name(dtype)]
        capacity = self._capacity()
        if tp_size == self.world_size and wanted <= capacity:
            return True
        warnings.warn(
            f"all-reduce workspace of {self.world_size} ranks and {capacity} bytes is not enough for {tp_size} ranks "
            f"and {wanted} bytes ([{num_tokens}, {hidden_dim}] of {_dtype_name(dtype)})",
            stacklevel=2,
        )
        return False

    def destroy(self) -> None:
        """Releases everything. Collective: waits until all ranks destroy theirs. A second call does nothing.

        A failed workspace is released without waiting. Raises TimeoutError, after the release, if a peer does not come.
        """
        link, self._link = self._link, None
        if link is None:
            return
        try:
            if self._fault is None:
                end = time.monotonic() + self.deadline
                headers = self._headers(link, _Header(_GOODBYE, self._epoch, 0), end, "destroy")
                self._drained(link, end, self._epoch, "destroy")
                for rank, header in enumerate(headers):
                    if header.kind == _CALL:
                        raise RuntimeError(
                            f"rank {self.rank}: destroys the workspace while rank {rank} makes call {header.epoch}, "
                            f"{_oxmoe.allreduce_shape(header.word)}"
                        )
        finally:
            link.close()

    def __del__(self) -> None:
        if getattr(self, "_link", None) is not None:
            warnings.warn("all-reduce workspace was never destroyed: call destroy() on all ranks", ResourceWarning, 2)

    def _capacity(self) -> int:
        return self.max_token_num * self.hidden_dim * _ITEM_BYTES[self.dtype]

    def _headers(self, link: Link, mine: _Header, end: float, what: str) -> list[_Header]:
        """Everybody's header of this epoch, in rank order."""
        try:
            link.post(mine.pack())
            headers = []
            for data in link.headers(end, _HEADER.size, lambda data: _Header.unpack(data).epoch < mine.epoch):
                headers.append(_Header.unpack(data))
        except PeerLost as error:
            raise self._failed(error, mine.epoch, what) from error
        except RuntimeError as error:
            self._fault = f"rank {self.rank}, call {mine.epoch} ({what}): {error}"
            raise
        for rank, header in enumerate(headers):
            if header.epoch != mine.epoch:
                self._fault = f"rank {rank} is at call {header.epoch}, rank {self.rank} at call {mine.epoch} ({what})"
                raise RuntimeError(f"all-reduce ranks are out of step: {self._fault}")
        return headers

    def _drained(self, link: Link, end: float, epoch: int, what: str) -> None:
        """Waits until the peers have taken what was sent: dropped earlier, it would never reach them."""
        try:
            link.drain(end)
        except PeerLost as error:
            raise self._failed(error, epoch, what) from error

    def _failed(self, error: PeerLost, epoch: int, what: str) -> TimeoutError:
        """Remembers a fault of the transport; a TimeoutError that names rank, peer, epoch and shape."""
        who = "a peer" if error.peer is None else f"peer {error.peer}"
        self._fault = f"rank {self.rank} waited for {who} in call {epoch} ({what}): {error}"
        return TimeoutError(f"all-reduce: {self._fault}")

    def _usable(self) -> Link:
        if self._link is None:
            raise ValueError("workspace: was destroyed")
        if self._fault is not None:
            raise RuntimeError(f"workspace: failed before ({self._fault}); destroy it and make a new one")
        return self._link

    def _run(self, operands: _Operands, deadline: float | None) -> Any:
        link = self._usable()
        end = time.monotonic() + (self.deadline if deadline is None else _checked_deadline(deadline))
        epoch, self._epoch = self._epoch, (self._epoch + 1) & 0xFFFFFFFF
        try:
            word, message = _oxmoe.allreduce_message(operands)
            what = _oxmoe.allreduce_shape(word)
            size = _message_bytes(message)
            if size > self._capacity():
                raise ValueError(
                    f"input: {what} has {size} bytes, the workspace was made for {self._capacity()} "
                    f"([{self.max_token_num}, {self.hidden_dim}] of {self.dtype})"
                )
        except Exception as error:
            # The others must not wait for a rank that does not come.
            self._refuse(link, epoch, error, end)
            raise
        headers = self._headers(link, _Header(_CALL, epoch, word), end, what)
        for rank, header in enumerate(headers):
            if header.kind == _REFUSED:
                raise RuntimeError(f"rank {self.rank}: rank {rank} refused call {epoch} ({what}): {header.text}")
            if header.kind == _GOODBYE:
                self._drained(link, end, epoch, what)
                self._fault = f"rank {rank} destroyed its workspace at call {epoch}"
                raise RuntimeError(f"rank {self.rank}: {self._fault}; this rank calls {what}")
        if any(header.word != word for header in headers):
            # Every rank sees the same headers, so all raise here and the next call starts clean.
            shapes = "; ".join(f"rank {i}: {_oxmoe.allreduce_shape(header.word)}" for i, header in enumerate(headers))
            raise ValueError(f"input: rank {self.rank}, call {epoch}: ranks disagree on the shape: {shapes}")
        try:
            messages = link.messages(message, size, end) if size else [message] * self.world_size
        except PeerLost as error:
            raise self._failed(error, epoch, what) from error
        self._drained(link, end, epoch, what)
        return _oxmoe.allreduce_finish(operands, messages)

    def _refuse(self, link: Link, epoch: int, error: Exception, end: float) -> None:
        try:
            link.refuse(_Header(_REFUSED, epoch, 0, f"{type(error).__name__}: {error}").pack(), end)
        except PeerLost as lost:
            self._failed(lost, epoch, "refusing a call")


def _message_bytes(message: Any) -> int:
    return int(message.nbytes)


def _dtype_name(dtype: Any) -> str:
    name = str(dtype).rpartition(".")[2]
    if name not in _ITEM_BYTES:
        raise ValueError(f"dtype: expected bfloat16, float16 or float32, got {dtype}")
    return name


def _checked_deadline(deadline: float) -> float:
    if not 0 < deadline < float("inf"):
        raise ValueError(f"deadline: expected a positive number of seconds, got {deadline}")
    return float(deadline)


def workspace_bytes(
    world_size: int,
    max_token_num: int,
    hidden_dim: int,
    dtype: dtype | str,
    *,
    device: str = "cpu",
    force_oneshot_support: bool = False,
) -> int:
    """Bytes of an all-reduce workspace on each rank, exact.

    On "cpu" a receive buffer for each peer; on "cuda" the slots of the protocol between GPUs, with room for every
    message in one shot if force_oneshot_support.
    """
    return _oxmoe.allreduce_bytes(
        world_size,
        max_token_num,
        hidden_dim,
        _dtype_name(dtype),
        device=device,
        force_oneshot_support=force_oneshot_support,
    )


def create_allreduce_fusion_workspace(
    backend: str = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: dtype | str | None = None,
    gpus_per_node: int | None = None,
    comm_backend: Any = None,
    force_oneshot_support: bool = False,
    group: ProcessGroup | None = None,
    *,
    exchange: Callable[[bytes], Sequence[bytes]] | None = None,
    deadline: float = 30.0,
) -> AllReduceFusionWorkspace:
    """A workspace for all-reduces of up to max_token_num x hidden_dim elements of `dtype`, in one group. Collective.

    The group is explicit: `group`, a torch ProcessGroup with a CPU backend (world_size and rank may be left out), or
    `exchange`, a function that every rank calls with its bytes and that returns all ranks' in rank order (world_size
    and rank must be given), or `comm_backend` with flashinfer's `allgather`. There is no default group: a subgroup
    that meets on WORLD waits for ranks that never come. Nobody outside the group is spoken to.

    backend: "auto" or "oxmoe"; gpus_per_node is not needed. deadline: seconds that a call may wait. All ranks must
    make the same calls in the same order; a group may have several workspaces if their calls are in the same order too.
    ValueError where an argument is wrong or ranks disagree on one, RuntimeError where another rank refused,
    TimeoutError where a rank does not come.
    """
    link = _link(group, exchange, comm_backend, world_size, rank)
    end = time.monotonic() + 30.0
    try:
        deadline = _checked_deadline(deadline)
        end = time.monotonic() + deadline
        for argument, given, own in (("world_size", world_size, link.size), ("rank", rank, link.rank)):
            if given is not None and given != own:
                raise ValueError(f"{argument}: expected {own} (of the group), got {given}")
        if backend not in ("auto", "oxmoe"):
            raise ValueError(f'backend: expected "auto" or "oxmoe", got {backend!r}')
        missing = [
            name
            for name, value in (("max_token_num", max_token_num), ("hidden_dim", hidden_dim), ("dtype", dtype))
            if value is None
        ]
        if missing:
            raise ValueError(f"{missing[0]}: is needed, got None")
        assert max_token_num is not None and hidden_dim is not None and dtype is not None
        workspace_bytes(link.size, max_token_num, hidden_dim, dtype)
    except Exception as error:
        # The others must not wait for this rank; it hears them out, so that the next attempt finds nothing left over.
        try:
            link.post(_Header(_REFUSED, 0, 0, f"{type(error).__name__}: {error}").pack())
            link.headers(end, _HEADER.size, lambda data: False)
            link.drain(end)
        except PeerLost:
            pass
        raise
    name = _dtype_name(dtype)
    word = max_token_num * hidden_dim * _ITEM_BYTES[name]
    text = f"[{max_token_num}, {hidden_dim}] of {name}"
    try:
        link.post(_Header(_HELLO, 0, word, text).pack())
        headers = [_Header.unpack(data) for data in link.headers(end, _HEADER.size, lambda data: False)]
        # Before anything is raised: what was sent must have been taken.
        link.drain(end)
        for other, header in enumerate(headers):
            if header.kind == _REFUSED:
                raise RuntimeError(f"rank {link.rank}: rank {other} made no workspace: {header.text}")
            if header.kind != _HELLO or header.word != word:
                raise ValueError(f"max_token_num: rank {link.rank} asks for {text}, rank {other} for {header.text}")
        link.agree(end)
    except PeerLost as error:
        raise TimeoutError(
            f"all-reduce workspace: rank {link.rank} waited for peer {error.peer} ({text}): {error}"
        ) from error
    return AllReduceFusionWorkspace(
        link, link.size, link.rank, max_token_num, hidden_dim, name, deadline, force_oneshot_support
    )


def _link(group: Any, exchange: Any, comm_backend: Any, world_size: int | None, rank: int | None) -> Link:
    if group is not None and exchange is not None:
        raise ValueError("exchange: group was given too; pass one of them")
    if exchange is None and group is None and comm_backend is not None:
        exchange = getattr(comm_backend, "allgather", None)
        if not callable(exchange):
            raise ValueError(
                "comm_backend: expected an object with allgather(bytes), got " + type(comm_backend).__name__
            )
    if group is not None:
        return GroupLink(group)
    if world_size is None or rank is None:
        raise ValueError("world_size: is needed with rank where no group is given; there is no default group")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: expected 0 to {world_size - 1}, got {rank}")
    if exchange is None:
        if world_size != 1:
            raise ValueError(
                "group: expected a torch ProcessGroup (torch.distributed.group.WORLD for all ranks), or exchange; "
                "there is no default group"
            )
        exchange = _alone
    return FunctionLink(exchange, world_size, rank)


def _alone(data: bytes) -> list[bytes]:
    return [data]


def allreduce_fusion(
    input: Tensor,
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: Tensor | None = None,
    residual_out: Tensor | None = None,
    norm_out: Tensor | None = None,
    quant_out: Tensor | None = None,
    scale_out: Tensor | None = None,
    residual_in: Tensor | None = None,
    rms_gamma: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: Tensor | float | None = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    moe_reduction_device_num_experts: int | None = None,
    moe_reduction_scale_input: Tensor | None = None,
    moe_reduction_active_experts_token_input: Tensor | None = None,
    moe_reduction_token_input: Tensor | None = None,
    expanded_idx_to_permuted_idx: Tensor | None = None,
    expert_scale_factor: Tensor | None = None,
    shared_expert_output: Tensor | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float = 0.0,
    *,
    deadline: float | None = None,
) -> Tensor:
    """The sum of all ranks' rows, with residual add, RMSNorm and quantisation as `pattern` says. Collective.

    Writes the outputs that are given and returns norm_out, else quant_out, else residual_out, else output.

    s = T(sum of input over ranks, in rank order in fp32); output = s. r = T(s + residual_in) = residual_out;
    norm_out = T(r / sqrt(mean(r^2) + rms_eps) * (weight_bias + rms_gamma)), in fp32, T the dtype of input (bf16, f16,
    fp32). input, residual_in and [T, H] outputs are contiguous; H is a multiple of 16 bytes; rms_gamma [H].
    An output may be input or residual_in itself; else no two tensors may overlap. quant_out is made of norm_out:

    - FP8: e4m3 [T, H], saturating, norm x (1 / scale_factor).
    - FP4: NVFP4, e2m1 pairs uint8 [T, H / 2], low nibble first, and one e4m3 scale per 16 values,
      e4m3(scale_factor x amax / 6), laid out by layout_code (`QuantizationSFLayout`, default SWIZZLED_128x4).
    - PerTokenGroupFP8Packed: e4m3 with a scale 2^n per block_quant_group_size values, max(amax / 448, 1e-10) rounded
      up; exponent bytes (UE8M0) packed in scale_out int32 [T, ceil(groups / 4)], strides (1, T rounded up to 4).
    - DynamicFP8: e4m3 with scale_out fp32 [T, 1] = max(amax / 448, 2^-9 / 448).

    kMoEFinalize: the contribution is sum_j expert_scale_factor[t, j] x input[expanded_idx_to_permuted_idx[t, j]]
    (int32, -1: none) + shared_expert_output[t]; kMoEReduction: sum_e moe_reduction_scale_input[e, t] (fp32 [E, T]) x
    moe_reduction_active_experts_token_input[e T + t] + moe_reduction_token_input[t]; both in fp32, rounded once, and
    with all outputs optional (quant_out: NVFP4). kAllReduce without output and kMoEFinalize without norm_out allocate
    it.

    launch_with_pdl, trigger_completion_at_end and use_oneshot choose how, not what; sums are fp32 with any fp32_acc.
    deadline: seconds, instead of the workspace's.

    ValueError names a wrong, missing or unused operand, or ranks whose patterns or shapes differ (on all ranks; the
    workspace stays usable). RuntimeError: another rank refused the call. TimeoutError names rank, peer, epoch and shape
    of a wait that took too long or whose peer is gone; the workspace then stays failed. NotImplementedError: tensors
    that are not on cpu.
    """
    if not isinstance(workspace, AllReduceFusionWorkspace):
        raise ValueError(f"workspace: expected an oxmoe AllReduceFusionWorkspace, got {type(workspace).__name__}")
    if pattern == AllReduceFusionPattern.kAllReduce and output is None:
        output = _empty_like(input)
    if pattern == AllReduceFusionPattern.kMoEFinalizeARResidualRMSNorm and norm_out is None:
        norm_out = _empty_like(residual_in)
    operands = _Operands(
        input=input,
        pattern=int(pattern),
        output=output,
        residual_out=residual_out,
        norm_out=norm_out,
        quant_out=quant_out,
        scale_out=scale_out,
        residual_in=residual_in,
        rms_gamma=rms_gamma,
        rms_eps=rms_eps,
        scale_factor=scale_factor,
        layout_code=layout_code,
        moe_reduction_device_num_experts=moe_reduction_device_num_experts,
        moe_reduction_scale_input=moe_reduction_scale_input,
        moe_reduction_active_experts_token_input=moe_reduction_active_experts_token_input,
        moe_reduction_token_input=moe_reduction_token_input,
        expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx,
        expert_scale_factor=expert_scale_factor,
        shared_expert_output=shared_expert_output,
        block_quant_group_size=block_quant_group_size,
        weight_bias=weight_bias,
    )
    return workspace._run(operands, deadline)


def _empty_like(tensor: Any) -> Any:
    """A new tensor of its package; None for what is no tensor, which the contract then refuses."""
    if hasattr(tensor, "new_empty"):
        return tensor.new_empty(tensor.shape)
    if type(tensor).__module__ == "numpy":
        import numpy

        return numpy.empty_like(tensor)
    return None
