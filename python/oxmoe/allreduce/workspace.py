"""The workspace of `allreduce_fusion`. It has what the ranks of a group need to all-reduce together, and their
agreement."""

from __future__ import annotations

import numbers
import os
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oxmoe import _oxmoe
from oxmoe.allreduce.exchange import Link, PeerLost, link_of, whole
from oxmoe.allreduce.memory import share

if TYPE_CHECKING:
    from torch import dtype
    from torch.distributed import ProcessGroup

# The message that ranks exchange before the rows: kind, epoch, a word (the call's shape, or a workspace's capacity),
# text.
_HEADER = struct.Struct("<4sIIQ200s")
_HELLO, _CALL, _REFUSED, _GOODBYE = range(4)
_MAGIC = b"oxar"
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# The longest wait in seconds, some 31 years. The waits of Python, torch and the kernels can all be as long.
_LONGEST = 1e9
_EPOCHS = 1 << 32


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
        if magic != _MAGIC or kind > _GOODBYE:
            raise RuntimeError(
                "a peer sent something that is no all-reduce header: is the group shared with other sends?"
            )
        return _Header(kind, epoch, word, text.rstrip(b"\0").decode(errors="replace"))

    def before(self, epoch: int) -> bool:
        """Whether the header is of an earlier call. Numbers of calls start again at 0 after 2^32 calls."""
        return 0 < (epoch - self.epoch) % _EPOCHS < _EPOCHS // 2


class AllReduceFusionWorkspace:
    """The memory and state that one group needs to all-reduce. `create_allreduce_fusion_workspace` makes it.

    After a fault (a peer is late, gone or out of step) it stays failed, and every further call says so. Destroy it
    and make a new one, with a new group: gloo closes the connections of a group when a wait on it times out.

    A child of fork() cannot use the workspaces of its parent: their connections and their memory belong to the parent.

    world_size, rank, max_token_num, hidden_dim, dtype (a name), deadline (seconds), device ("cpu" or "cuda:<n>"),
    nbytes (`workspace_bytes`), destroyed, metadata: as made. One on a GPU serves CPU tensors too.
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
        memory: _oxmoe.AllReduceMemory | None = None,
    ) -> None:
        self.world_size = world_size
        self.rank = rank
        self.max_token_num = max_token_num
        self.hidden_dim = hidden_dim
        self.dtype = dtype
        self.deadline = deadline
        self.device = "cpu" if memory is None else f"cuda:{memory.device}"
        self.nbytes = workspace_bytes(
            world_size,
            max_token_num,
            hidden_dim,
            dtype,
            device=self.device.partition(":")[0],
            force_oneshot_support=force_oneshot_support,
        )
        self.metadata = {
            "tp_size": world_size,
            "tp_rank": rank,
            "max_token_num": max_token_num,
            "hidden_dim": hidden_dim,
            "dtype": dtype,
            "force_oneshot_support": force_oneshot_support,
        }
        self._link: Link | None = link
        self._memory = memory
        self._epoch = 0
        self._fault: str | None = None
        self._process = os.getpid()
        # A call's messages take turns on the link, and all calls receive into the same memory.
        self._link_is_used = threading.Lock()
        link.reserve(max_token_num * hidden_dim * _ITEM_BYTES[dtype])

    @property
    def destroyed(self) -> bool:
        return self._link is None

    def is_buffer_size_sufficient(
        self, tp_size: int, num_tokens: int, hidden_dim: int, dtype: dtype | str, use_oneshot: bool | None = None
    ) -> bool:
        """Whether [num_tokens, hidden_dim] of `dtype` in a group of tp_size fits. The bytes count, not the shape.

        It warns with the reason if it does not fit. use_oneshot changes nothing, because every message that fits can
        be sent.
        """
        num_tokens, hidden_dim = whole("num_tokens", num_tokens), whole("hidden_dim", hidden_dim)
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
        """Releases everything. The call is collective: it waits until all ranks destroy theirs. A second call does
        nothing.

        It waits for the GPU's kernels first. A failed workspace is released without waiting for peers. If a peer
        does not come, it raises TimeoutError after the release. In a child of fork() the call only forgets the
        parent's workspace.
        """
        link = self._link
        if link is None or self._is_parents():
            self._link = None
            return
        with self._one_call():
            self._link = None
            self._destroy(link)

    def _destroy(self, link: Link) -> None:
        try:
            if self._memory is not None:
                self._memory.synchronize()
                self._look()
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
            if self._memory is not None:
                self._memory.close()

    def _one_call(self) -> threading.Lock:
        """Returns the lock that is held while this rank exchanges something. It is free now: a second thread would take
        the first one's messages."""
        if self._link_is_used.locked():
            raise ValueError("workspace: a call on another thread uses it; one call at a time can")
        return self._link_is_used

    def check(self) -> None:
        """Raises the faults that calls on the GPU have found so far, as the next call would. It does not wait for
        the calls.

        A call on the GPU returns before it has run, and a graph's replay never comes by here: after a synchronisation
        this says whether outputs may be read. TimeoutError: a peer did not come. ValueError: ranks made different
        calls. The workspace then stays failed.
        """
        fault = self._look()
        if fault is not None:
            timeout, text = fault
            raise (TimeoutError if timeout else ValueError)(f"all-reduce: {text}")

    def _look(self) -> tuple[bool, str] | None:
        """Returns a fault on the GPU that was not known before: (whether it was a wait, text)."""
        if self._memory is None or self._fault is not None:
            return None
        fault = self._memory.fault()
        if fault is not None:
            self._fault = fault[1]
        return fault

    def _is_parents(self) -> bool:
        """Whether this process is a child of fork(), and its parent made the workspace."""
        return os.getpid() != self._process

    def __del__(self) -> None:
        if getattr(self, "_link", None) is not None and not self._is_parents():
            warnings.warn("all-reduce workspace was never destroyed: call destroy() on all ranks", ResourceWarning, 2)

    def _capacity(self) -> int:
        return self.max_token_num * self.hidden_dim * _ITEM_BYTES[self.dtype]

    def _headers(self, link: Link, mine: _Header, end: float, what: str) -> list[_Header]:
        """Returns every rank's header of this epoch, in rank order."""
        try:
            link.post(mine.pack())
            headers = []
            for data in link.headers(end, _HEADER.size, lambda data: _Header.unpack(data).before(mine.epoch)):
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
        """Waits until the peers have taken what was sent. If it were dropped earlier, it would never reach them."""
        try:
            link.drain(end)
        except PeerLost as error:
            raise self._failed(error, epoch, what) from error

    def _failed(self, error: PeerLost, epoch: int, what: str) -> TimeoutError:
        """Remembers a fault of the transport, and returns a TimeoutError that names rank, peer, epoch and shape."""
        who = "a peer" if error.peer is None else f"peer {error.peer}"
        self._fault = f"rank {self.rank} waited for {who} in call {epoch} ({what}): {error}"
        return TimeoutError(f"all-reduce: {self._fault}")

    def _usable(self) -> Link:
        if self._link is None:
            raise ValueError("workspace: was destroyed")
        if self._is_parents():
            raise RuntimeError(
                f"workspace: process {self._process} made it, and this is its child {os.getpid()} of fork(); make a "
                "workspace in this process, with a group of its own"
            )
        if self._fault is not None:
            raise RuntimeError(f"workspace: failed before ({self._fault}); destroy it and make a new one")
        return self._link

    def _on_gpu(self, *leaders: Any) -> bool:
        """Whether a call of these tensors runs on the GPU. The MoE patterns' input may be something that they do not
        read."""
        return self._memory is not None and any(getattr(leader, "is_cuda", False) for leader in leaders)

    def _withdraw(self, error: Exception, *leaders: Any) -> None:
        """Tells the peers that this rank takes no part in the call that raised `error` before `_run`. On GPUs they find
        it missing, or notice at its next call that it has refused one. leaders: the call's input and residual_in."""
        if self._link is None or self._fault is not None or self._is_parents():
            return
        if self._on_gpu(*leaders):
            self._memory.refused()  # type: ignore[union-attr]
        elif not self._link_is_used.locked():
            self._refuse(self._link, self._next_epoch(), error, time.monotonic() + self.deadline)

    def _next_epoch(self) -> int:
        epoch, self._epoch = self._epoch, (self._epoch + 1) % _EPOCHS
        return epoch

    def _run(self, operands: Any, deadline: float, use_oneshot: bool | None) -> Any:
        """Runs a call whose arguments other than `operands` were checked. deadline: seconds."""
        link = self._usable()
        if self._on_gpu(operands.input, operands.residual_in):
            self.check()
            return self._memory.launch(operands, deadline, use_oneshot)  # type: ignore[union-attr]
        with self._one_call():
            return _oxmoe.allreduce_finish(operands, self._messages(link, operands, deadline))

    def _messages(self, link: Link, operands: Any, deadline: float) -> list[Any]:
        """Returns every rank's contribution to a call, in rank order."""
        end = time.monotonic() + deadline
        epoch = self._next_epoch()
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
        try:
            return self._exchange(link, _Header(_CALL, epoch, word), end, what, (message, size))
        except Exception:
            raise
        except BaseException as error:
            # After an interruption messages of this call may still arrive, which the next one would take for its own.
            self._fault = self._fault or f"rank {self.rank}, call {epoch} ({what}): {type(error).__name__}"
            raise

    def _exchange(self, link: Link, mine: _Header, end: float, what: str, message: tuple[Any, int]) -> list[Any]:
        """Returns every rank's message in rank order. message: this rank's, and its bytes."""
        epoch, (own, size) = mine.epoch, message
        headers = self._headers(link, mine, end, what)
        for rank, header in enumerate(headers):
            if header.kind == _REFUSED:
                raise RuntimeError(f"rank {self.rank}: rank {rank} refused call {epoch} ({what}): {header.text}")
            if header.kind == _GOODBYE:
                self._drained(link, end, epoch, what)
                self._fault = f"rank {rank} destroyed its workspace at call {epoch}"
                raise RuntimeError(f"rank {self.rank}: {self._fault}; this rank calls {what}")
        if any(header.word != mine.word for header in headers):
            # Every rank sees the same headers, so all raise here and the next call starts clean.
            shapes = "; ".join(f"rank {i}: {_oxmoe.allreduce_shape(header.word)}" for i, header in enumerate(headers))
            raise ValueError(f"input: rank {self.rank}, call {epoch}: ranks disagree on the shape: {shapes}")
        try:
            messages = link.messages(own, size, end) if size else [own] * self.world_size
        except PeerLost as error:
            raise self._failed(error, epoch, what) from error
        self._drained(link, end, epoch, what)
        return messages

    def _seconds(self, deadline: Any) -> float:
        """Returns how long a call waits. deadline: what the caller gave."""
        return self.deadline if deadline is None else _checked_deadline(deadline)

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


def _checked_deadline(deadline: Any) -> float:
    if not isinstance(deadline, numbers.Real) or not 0 < deadline < float("inf"):  # type: ignore[operator]
        raise ValueError(f"deadline: expected a positive number of seconds, got {deadline!r}")
    return float(deadline) if deadline < _LONGEST else _LONGEST


def workspace_bytes(
    world_size: int,
    max_token_num: int,
    hidden_dim: int,
    dtype: dtype | str,
    *,
    device: str = "cpu",
    force_oneshot_support: bool = False,
) -> int:
    """Returns the exact size in bytes of an all-reduce workspace on each rank.

    On "cpu" the workspace is a receive buffer for each peer. On "cuda" it is the slots of the protocol between GPUs,
    with room for every message in one shot if force_oneshot_support.
    """
    for name, value in (("max_token_num", max_token_num), ("hidden_dim", hidden_dim), ("world_size", world_size)):
        if abs(whole(name, value)) >= 1 << 63:
            raise ValueError(f"{name}: expected a number below 2^63, got {value}")
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
    device: Any = None,
    top_k: Any = None,
    rms_eps: Any = None,
    weight_bias: Any = None,
    routed_scaling_factor: Any = None,
    include_shared_expert: Any = None,
    add_residual: Any = None,
    write_residual_output: Any = None,
    apply_rms_norm: Any = None,
    output_dtype: Any = None,
    dynamic_fp8: Any = None,
    write_norm_output: Any = None,
    config: Any = None,
) -> AllReduceFusionWorkspace:
    """Makes a workspace for all-reduces of up to max_token_num x hidden_dim elements of `dtype`, in one group. The
    call is collective.

    Name the group in one of these ways. `group` is a torch ProcessGroup; world_size and rank may be left out. It
    exchanges through its CPU backend, or without one (NCCL alone) through the store at which its ranks met.
    `exchange` is a function that every rank calls with its bytes and that returns all ranks' bytes in rank order;
    world_size and rank must be given. `comm_backend` has flashinfer's `allgather`, Get_size and Get_rank. Without
    any of them the group is torch's WORLD, if world_size and rank are this process's there. A subgroup's ranks must
    name their group: on WORLD they would wait for ranks that never come. Nobody outside the group is contacted.

    backend: "auto", "oxmoe" or flashinfer's "trtllm", all the same; NotImplementedError for "mnnvl" and
    "mnnvl-cutedsl". Only the last takes flashinfer's arguments from top_k on, so each of them is None here.
    gpus_per_node is not needed. deadline: seconds that a call may wait. All ranks must make the same calls in the same
    order; a group may have several workspaces if their calls are in the same order too.
    device: "cuda" (torch's current one), "cuda:<n>" or a torch.device: memory on that GPU, which all ranks map, for
    CUDA tensors; 1, 2, 4 or 8 ranks on one host. "cpu": none. By default the current GPU if it and the group are
    served.
    ValueError where an argument is wrong or ranks disagree on one, RuntimeError where another rank refused,
    TimeoutError where a rank does not come, NotImplementedError where a GPU or group is not served.
    """
    # Arguments of flashinfer 0.7.4's backend "mnnvl-cutedsl", which every other backend refuses.
    of_multicast = {
        "top_k": top_k,
        "rms_eps": rms_eps,
        "weight_bias": weight_bias,
        "routed_scaling_factor": routed_scaling_factor,
        "include_shared_expert": include_shared_expert,
        "add_residual": add_residual,
        "write_residual_output": write_residual_output,
        "apply_rms_norm": apply_rms_norm,
        "output_dtype": output_dtype,
        "dynamic_fp8": dynamic_fp8,
        "write_norm_output": write_norm_output,
        "config": config,
    }
    link = link_of(group, exchange, comm_backend, world_size, rank)
    end = time.monotonic() + 30.0
    try:
        deadline = _checked_deadline(deadline)
        end = time.monotonic() + deadline
        for argument, given, own in (("world_size", world_size, link.size), ("rank", rank, link.rank)):
            if given is not None and whole(argument, given) != own:
                raise ValueError(f"{argument}: expected {own} (of the group), got {given}")
        if backend in ("mnnvl", "mnnvl-cutedsl"):
            raise NotImplementedError(
                f'backend: "{backend}" sums through NVLink multicast, for which oxmoe has no kernels; served are '
                '"auto", "oxmoe" and "trtllm"'
            )
        given_names = [name for name, value in of_multicast.items() if value is not None]
        if given_names:
            raise ValueError(f'{", ".join(given_names)}: only backend="mnnvl-cutedsl" takes these, which is not served')
        if backend not in ("auto", "oxmoe", "trtllm"):
            raise ValueError(f'backend: expected "auto", "oxmoe" or "trtllm", got {backend!r}')
        missing = [
            name
            for name, value in (("max_token_num", max_token_num), ("hidden_dim", hidden_dim), ("dtype", dtype))
            if value is None
        ]
        if missing:
            raise ValueError(f"{missing[0]}: is needed, got None")
        assert max_token_num is not None and hidden_dim is not None and dtype is not None
        max_token_num, hidden_dim = whole("max_token_num", max_token_num), whole("hidden_dim", hidden_dim)
        workspace_bytes(link.size, max_token_num, hidden_dim, dtype)
        gpu = _gpu(device, link.size)
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
    size = max_token_num * hidden_dim * _ITEM_BYTES[name]
    # The capacity, and the flags that the layout of GPU memory depends on.
    word = size << 2 | (gpu is not None) << 1 | (force_oneshot_support and gpu is not None)
    text = f"[{max_token_num}, {hidden_dim}] of {name} on {'cpu' if gpu is None else 'cuda'}"
    if gpu is not None and force_oneshot_support:
        text += " with force_oneshot_support"

    def exchange_text(error: Exception | None, mine: str) -> list[str]:
        kind, words = (_HELLO, mine) if error is None else (_REFUSED, f"{type(error).__name__}: {error}")
        headers = _rendezvous(link, _Header(kind, 0, word, words), end)
        if error is not None:
            raise error
        for other, header in enumerate(headers):
            if header.kind == _REFUSED:
                raise RuntimeError(f"rank {link.rank}: rank {other} made no workspace: {header.text}")
            if header.kind != _HELLO or header.word != word:
                raise RuntimeError(
                    f"rank {link.rank}: rank {other} is not making this workspace; is it in another call?"
                )
        return [header.text for header in headers]

    try:
        for other, header in enumerate(_rendezvous(link, _Header(_HELLO, 0, word, text), end)):
            if header.kind == _REFUSED:
                raise RuntimeError(f"rank {link.rank}: rank {other} made no workspace: {header.text}")
            if header.kind != _HELLO or header.word != word:
                raise ValueError(f"max_token_num: rank {link.rank} asks for {text}, rank {other} for {header.text}")
        link.agree(end)
        memory = None
        if gpu is not None:
            make = lambda: _oxmoe.AllReduceMemory(  # noqa: E731
                gpu, link.size, link.rank, size, name, force_oneshot_support=force_oneshot_support
            )
            memory = share(make, exchange_text, link.rank, end)
    except PeerLost as error:
        who = "a peer" if error.peer is None else f"peer {error.peer}"
        raise TimeoutError(f"all-reduce workspace: rank {link.rank} waited for {who} ({text}): {error}") from error
    return AllReduceFusionWorkspace(
        link, link.size, link.rank, max_token_num, hidden_dim, name, deadline, force_oneshot_support, memory
    )


def _rendezvous(link: Link, mine: _Header, end: float) -> list[_Header]:
    """Returns all ranks' headers of one step of making a workspace."""
    link.post(mine.pack())
    headers = [_Header.unpack(data) for data in link.headers(end, _HEADER.size, lambda data: False)]
    # Everything that was sent must have been taken before an error is raised.
    link.drain(end)
    return headers


def _gpu(device: Any, world_size: int) -> int | None:
    """Returns the ordinal of the GPU that `device` names, or None for the CPU."""
    torch = sys.modules.get("torch")
    if device is None:
        if torch is None or not torch.cuda.is_available():
            return None
        current = int(torch.cuda.current_device())
        return current if _oxmoe.allreduce_unsupported(current, world_size) is None else None
    kind, _, number = str(device).partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise ValueError(f'device: expected "cpu", "cuda" or "cuda:<n>", got {device!r}')
    if kind == "cpu":
        return None
    if not number and torch is None:
        raise ValueError('device: "cuda" means torch\'s current GPU, but torch is not imported; name it: "cuda:0"')
    if len(number) > 9:
        raise ValueError(f"device: expected the number of a GPU, got {device!r}")
    ordinal = int(number) if number else int(torch.cuda.current_device())  # type: ignore[union-attr]
    reason = _oxmoe.allreduce_unsupported(ordinal, world_size)
    if reason is not None:
        raise NotImplementedError(f"device: {device}: {reason}")
    return ordinal
