"""Ranks of an all-reduce on stand-in GPUs: processes that share memory for real, kernels that are only recorded."""

from __future__ import annotations

import ctypes
import json
import os
import socket

from recording import attempt
from tensors import Tensor

from oxmoe import _oxmoe
from oxmoe.allreduce import allreduce_fusion
from oxmoe.allreduce.workspace import create_allreduce_fusion_workspace


def records(path):
    if not os.path.exists(path):
        return []
    with open(path) as log:
        return [json.loads(line) for line in log]


class Exchange:
    """An all-gather over stream sockets: every rank writes to every other, then reads from each."""

    def __init__(self, rank, sockets):
        self.rank, self.sockets = rank, sockets

    def __call__(self, data):
        for peer in self.sockets:
            peer.sendall(len(data).to_bytes(4, "little") + data)
        parts = [self.read(peer) for peer in self.sockets]
        parts.insert(self.rank, data)
        return parts

    @staticmethod
    def read(peer):
        def exactly(size):
            data = b""
            while len(data) < size:
                more = peer.recv(size - len(data))
                if not more:
                    raise ConnectionError("a rank is gone")
                data += more
            return data

        return exactly(int.from_bytes(exactly(4), "little"))


def on_ranks(world, function, arguments):
    """Returns results of `function(rank, exchange, ...)` in a process for each rank, each with a log of its own."""
    pairs = {(a, b): socket.socketpair() for a in range(world) for b in range(a + 1, world)}
    results = [os.pipe() for _ in range(world)]
    log = os.environ["FAKE_LOG"]
    for rank in range(world):
        if os.fork() == 0:
            os.environ["FAKE_LOG"] = f"{log}.{rank}"
            mine = [pairs[min(rank, p), max(rank, p)][rank > p] for p in range(world) if p != rank]
            for pair in pairs.values():
                for end in pair:
                    if end not in mine:
                        end.close()
            result = function(rank, Exchange(rank, mine), f"{log}.{rank}", **arguments)
            os.write(results[rank][1], json.dumps(result).encode())
            os._exit(0)
    for pair in pairs.values():
        for end in pair:
            end.close()
    parts = []
    for reader, writer in results:
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        parts.append(json.loads(text) if text else None)
    for _ in range(world):
        os.wait()
    return parts


def words(address, count):
    return list((ctypes.c_uint64 * count).from_address(address))


def operands(rank, tokens, hidden, pattern, dtype):
    new = lambda *shape, kind=dtype: Tensor(shape, kind, rank)  # noqa: E731
    given = {"input": new(tokens, hidden)}
    if pattern == 0:
        return given | {"output": new(tokens, hidden)}
    given |= {"rms_gamma": new(hidden), "norm_out": new(tokens, hidden), "residual_in": new(tokens, hidden)}
    given["residual_out"] = given["residual_in"]
    if pattern == 7:
        given["input"] = new(9, hidden)
        given["expanded_idx_to_permuted_idx"] = new(tokens, 2, kind="int32")
        given["expert_scale_factor"] = new(tokens, 2, kind="float32")
        return given | {"shared_expert_output": new(tokens, hidden)}
    if pattern == 1:
        return given
    given["quant_out"] = new(tokens, hidden // 2 if pattern == 5 else hidden, kind="uint8")
    if pattern == 4:
        return given | {"scale_factor": 0.5}
    if pattern == 5:
        given["scale_out"] = new(-(-tokens // 8) * 8, -(-hidden // 64) * 4, kind="uint8")
        return given | {"scale_factor": 31.0, "layout_code": 1}
    if pattern == 11:
        return given | {"scale_out": new(tokens, 1, kind="float32")}
    given["scale_out"] = new(-(-hidden // 512), tokens, kind="int32").swapaxes(0, 1)
    return given | {"block_quant_group_size": 128}


def workspace_of(rank, exchange, world, most, dtype, **options):
    """Returns a workspace on GPU number `rank` for messages of up to `most`, tokens and columns."""
    return create_allreduce_fusion_workspace(
        world_size=world,
        rank=rank,
        max_token_num=most[0],
        hidden_dim=most[1],
        dtype=dtype,
        exchange=exchange,
        deadline=20,
        device=f"cuda:{rank}",
        **options,
    )


def one_rank(rank, exchange, log, world, calls, dtype, most, fault=None, force=False):
    """Makes a workspace, calls, destroys. Returns launches, tensors, what lies in all ranks' memory, and what was
    raised."""
    space = workspace_of(rank, exchange, world, most, dtype, force_oneshot_support=force)
    made = len(records(log))
    tensors, raised = [], []
    for tokens, hidden, pattern, use_oneshot in calls:
        given = operands(rank, tokens, hidden, pattern, dtype)
        options = {"workspace": space, "pattern": pattern, "use_oneshot": use_oneshot, "deadline": 2.5}
        raised.append(attempt(allreduce_fusion, **given, **options, weight_bias=1.0, rms_eps=1e-5))
        tensors.append({name: x.address for name, x in given.items() if isinstance(x, Tensor)})
    launched = [record for record in records(log)[made:] if record["call"] == "cuLaunchKernelEx"]
    other = [record["call"] for record in records(log)[made:] if record["call"] != "cuLaunchKernelEx"]
    result = {"nbytes": space.nbytes, "device": space.device, "launches": launched, "tensors": tensors, "other": other}
    if launched:
        data = bytes.fromhex(launched[0]["parameters"][0])
        result["workspaces"] = [int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(8)]
        result["memory"] = [words(address, 64) for address in result["workspaces"][:world]]
        result["tail"] = words(result["workspaces"][rank] + space.nbytes - 8, 1)
        # The neighbour must see the word that is written here.
        ctypes.c_uint64.from_address(result["workspaces"][(rank + 1) % world] + 1016).value = 1000 + rank
        exchange(b"")
        result["heard"] = words(result["workspaces"][rank] + 1016, 1)[0]
    if fault is not None:
        # A peer's kernel would report a fault in this way.
        exchange(b"")
        for address in result["workspaces"][:world]:
            ctypes.c_uint64.from_address(address).value = fault
        result["unknown"] = attempt(space.check)
        space._memory.synchronize()
        result["known"] = attempt(space.check)
        result["next"] = attempt(allreduce_fusion, Tensor((1, 64), dtype, rank), space, 0)
    raised.append(attempt(space.destroy))
    result["raised"] = raised
    result["again"] = attempt(space.destroy)
    result["after"] = attempt(allreduce_fusion, Tensor((1, 64), dtype, rank), space, 0)
    result["unmapped"] = sum(record["call"] == "cuMemUnmap" for record in records(log))
    result["refused"] = [record for record in records(log) if record["call"] == "refused"]
    return result


def refusing_rank(rank, exchange, log, world, shape_at):
    """Rank 1 alone refuses two calls between two that both ranks make. Returns the launches, what was raised, and what
    `check` raises where the kernels find that their headers differ."""
    space = workspace_of(rank, exchange, world, (8, 64), "bfloat16")
    x, y, gamma = Tensor((2, 64), "bfloat16", rank), Tensor((2, 64), "bfloat16", rank), Tensor((32,), "bfloat16", rank)
    raised = [attempt(allreduce_fusion, x, space, 0, output=y)]
    if rank == 1:
        # The first is refused by the extension, the second before it.
        outputs = {"residual_out": y, "norm_out": x}
        raised.append(attempt(allreduce_fusion, x, space, 1, residual_in=x, rms_gamma=gamma, **outputs))
        raised.append(attempt(allreduce_fusion, x, space, 0, output=y, deadline=0))
    raised.append(attempt(allreduce_fusion, x, space, 0, output=y))
    launched = [record for record in records(log) if record["call"] == "cuLaunchKernelEx"]
    data = bytes.fromhex(launched[-1]["parameters"][0])
    report, shape = data[64:72], data[shape_at : shape_at + 8]
    theirs = exchange(shape)[1 - rank]
    # A kernel writes the fault, its own shape and its peer's.
    told = (ctypes.c_uint64 * 3).from_address(int.from_bytes(report, "little"))
    told[1], told[2] = int.from_bytes(shape, "little"), int.from_bytes(theirs, "little")
    told[0] = 2 << 56 | 0 << 48 | 1 << 40 | 1
    found = attempt(space.check)
    space.destroy()
    return {"launches": launched, "raised": raised, "found": found}


def failing_rank(rank, exchange, log, world, fail, failing):
    """Returns what each rank hears when one of them fails while workspaces are made, and what it leaves mapped."""
    if rank == failing:
        os.environ["FAKE_FAIL"] = fail
    else:
        os.environ.pop("FAKE_FAIL", None)
    text = attempt(workspace_of, rank, exchange, world, (8, 64), "bfloat16")
    calls = [record["call"] for record in records(log)]
    return {"raised": text, "mapped": calls.count("cuMemSetAccess") - calls.count("cuMemUnmap")}


def pair(**arguments):
    return on_ranks(arguments["world"], one_rank, arguments)


def refusal(**arguments):
    return on_ranks(arguments["world"], refusing_rank, arguments)


def failure(**arguments):
    return on_ranks(arguments["world"], failing_rank, arguments)


def strange_descriptors(folder):
    """Returns a workspace's errors for a rank's descriptors that the driver did not export, and what is left open."""

    def plain(size):
        number = os.open(os.path.join(folder, f"plain-{size}"), os.O_RDWR | os.O_CREAT)
        os.ftruncate(number, size)
        return number

    def memfd(size):
        number = os.memfd_create("strange")
        os.ftruncate(number, size)
        return number

    make = lambda: _oxmoe.AllReduceMemory(0, 2, 0, 1024, "bfloat16")  # noqa: E731
    peer, larger = make(), _oxmoe.AllReduceMemory(0, 2, 0, 8 << 20, "bfloat16")
    size = os.fstat(peer.descriptor()).st_size
    cases = {
        "missing": lambda: -1,
        "closed": lambda: 1000,
        "plain": lambda: plain(size),
        "small": lambda: memfd(size // 2),
        "large": lambda: os.dup(larger.descriptor()),
        "device": lambda: os.open("/dev/null", os.O_RDWR),
        "folder": lambda: os.open(folder, os.O_RDONLY),
        "pipe": lambda: os.pipe()[0],
        "socket": lambda: socket.socket().detach(),
        "right": lambda: os.dup(peer.descriptor()),
    }
    texts = {}
    for name, descriptor in cases.items():
        memory = make()
        number = descriptor()
        texts[name] = attempt(memory.open, [-1, number])
        memory.close()
        if 0 <= number < 1000:
            os.close(number)
    # The descriptor is imported, and then found to be no GPU's memory.
    os.environ["FAKE_LOCATION"] = "2"
    before = len(os.listdir("/proc/self/fd"))
    memory = make()
    texts["host memory"] = attempt(memory.open, [-1, os.dup(peer.descriptor())])
    memory.close()
    left = len(os.listdir("/proc/self/fd")) - before - 1
    del os.environ["FAKE_LOCATION"]
    os.environ["FAKE_FAIL"] = "cuMemGetAllocationPropertiesFromHandle:3:801"
    memory = make()
    texts["no answer"] = attempt(memory.open, [-1, os.dup(peer.descriptor())])
    memory.close()
    return {"raised": texts, "left": left}
