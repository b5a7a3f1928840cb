"""The calls that tests make under the stand-in driver: `python calls.py <function> <keyword arguments as JSON>`.

Prints the function's result as JSON. Driver records of a call are taken from FAKE_LOG right after it.
"""

from __future__ import annotations

import ctypes
import json
import sys

sys.modules["torch"] = None  # oxmoe without torch: its builtins are called as they are

from allreduce_calls import failure, pair, refusal, strange_descriptors  # noqa: E402, F401
from fork_calls import cuda_after_fork, failed_start  # noqa: E402, F401
from fp8_calls import fp8_calls, fp8_quantized, fp8_tensor_calls, fp8_tokens, refused_fp8  # noqa: E402, F401
from id_calls import ids_on_a_gpu  # noqa: E402, F401
from number_calls import (  # noqa: E402, F401
    dense_mm,
    dense_quantize,
    layouts,
    nvfp4_quantized,
    packed_functions,
    quantized,
    quantized_rows,
    refused_dense,
)
from packed_calls import (  # noqa: E402, F401
    int4_calls,
    int4_operands,
    make_packed,
    mxfp8_calls,
    nvfp4_calls,
    nvfp4_operands,
    nvfp4_roundings,
    packed_calls,
    packed_experts,
    refused_int4,
    refused_mxfp4,
    refused_nvfp4,
)
from recording import attempt, records, router_as_planned  # noqa: E402
from tensors import Tensor, install_torch  # noqa: E402

import oxmoe._oxmoe as oxmoe  # noqa: E402

install_torch()

# The routers of calls from logits, as `moe` takes them. A bias gets its tensor with the call.
GROUPS = {"num_expert_group": 8, "topk_group": 2}
ROUTERS = {
    "logits": {},
    "groups": GROUPS,
    "bias": {"correction_bias": None},
    "both": GROUPS | {"correction_bias": None},
}


class Layer:
    """The operands of one layer and its calls."""

    def __init__(
        self, experts, top_k, hidden, intermediate, dtype="bfloat16", gated=True, bias=False, device=0, **options
    ):
        rows = 2 * intermediate if gated else intermediate
        self.shape, self.top_k, self.dtype, self.gated, self.device = (
            (experts, top_k, hidden, intermediate),
            top_k,
            dtype,
            gated,
            device,
        )
        self.tensors = {
            "w13": self.tensor((experts, rows, hidden), dtype),
            "w2": self.tensor((experts, hidden, intermediate), dtype),
        }
        if bias:
            self.tensors["b13"] = self.tensor((experts, rows), "float32")
            self.tensors["b2"] = self.tensor((experts, hidden), dtype)
        make = oxmoe.ExpertWeights.bf16 if dtype == "bfloat16" else oxmoe.ExpertWeights.f16
        if not gated:
            options.setdefault("activation", "relu2")
        self.weights = make(**self.tensors, gated=gated, **options)

    def tensor(self, shape, dtype):
        return Tensor(shape, dtype, self.device)

    def call(self, tokens, routing="logits", **options):
        experts, top_k, hidden, _ = self.shape
        self.tensors["x"] = x = self.tensor((tokens, hidden), self.dtype)
        self.tensors["out"] = self.tensor((tokens, hidden), self.dtype)
        self.tensors["workspace"] = self.tensor((oxmoe.workspace_bytes(self.weights, tokens, top_k),), "uint8")
        options |= {"out": self.tensors["out"], "workspace": self.tensors["workspace"]}
        if routing in ROUTERS:
            self.tensors["router_logits"] = logits = self.tensor((tokens, experts), "float32")
            options |= ROUTERS[routing]
            if "correction_bias" in options:
                self.tensors["correction_bias"] = options["correction_bias"] = self.tensor((experts,), "float32")
            return oxmoe.moe(x, self.weights, router_logits=logits, top_k=top_k, **options)
        self.tensors["topk_weights"] = self.tensor((tokens, top_k), "float32")
        self.tensors["topk_ids"] = self.tensor((tokens, top_k), routing)
        return oxmoe.moe(x, self.weights, self.tensors["topk_weights"], self.tensors["topk_ids"], **options)

    def explain(self, tokens, routing, arch=None):
        name = "bf16" if self.dtype == "bfloat16" else "f16"
        source = "logits" if routing in ROUTERS else "ids"
        options = {"arch": arch, "routing": source} | router_as_planned(ROUTERS.get(routing, {}))
        return oxmoe.explain(*self.shape, tokens, format=name, gated=self.gated, **options)

    def addresses(self):
        return {name: tensor.address for name, tensor in self.tensors.items()}


def sequences(layers, arch, routings=("logits", "int32", "int64")):
    """Runs every layer at each token count: its plan as text, for this GPU and by name, and what the driver was
    asked."""
    results = []
    for layer in layers:
        counts = layer.pop("tokens")
        made = Layer(**layer)
        load = records()
        for tokens in counts:
            for routing in routings:
                oxmoe.stats(reset=True)
                returned = made.call(tokens, routing) is made.tensors["out"]
                results.append(
                    {
                        "layer": layer,
                        "tokens": tokens,
                        "routing": routing,
                        "returned_out": returned,
                        "stats": oxmoe.stats(),
                        "explain": made.explain(tokens, routing),
                        "explain_by_arch": made.explain(tokens, routing, arch),
                        "addresses": made.addresses(),
                        "load": load,
                        "records": records(),
                    }
                )
    return results


def load(**layer):
    """Loads weights alone."""
    made = Layer(**layer)
    return {"addresses": made.addresses(), "records": records()}


def calls(layer, tokens, count, **options):
    """Makes the same call some times: records of loading first, then of each call."""
    made = Layer(**layer)
    every = [records()]
    for _ in range(count):
        made.call(tokens, **options)
        every.append(records())
    return every


def routing_operations(tokens, experts, top_k):
    """Runs topk with and without given outputs, sort_by_expert, routing_tables: [(records, addresses)]."""
    logits, ids = Tensor((tokens, experts), "bfloat16"), Tensor((tokens, top_k), "int32")
    weights = Tensor((tokens, top_k), "float32")
    results = []
    for result in (
        lambda: oxmoe.topk(logits, top_k, topk_weights=weights, topk_ids=ids),
        lambda: oxmoe.topk(logits, top_k),
        lambda: oxmoe.sort_by_expert(ids, experts),
        lambda: oxmoe.routing_tables(weights, ids, experts),
    ):
        tensors = result()
        results.append([records(), [tensor.address for tensor in tensors]])
    return {"logits": logits.address, "ids": ids.address, "weights": weights.address, "results": results}


def foreign_context(layer, context):
    """Calls while another context is current, and while oxmoe's is: records, and the context that is current after."""
    driver = ctypes.CDLL("libcuda.so.1")
    current = ctypes.c_void_p()

    def get():
        driver.cuCtxGetCurrent(ctypes.byref(current))
        return current.value or 0

    def put(value):
        driver.cuCtxSetCurrent(ctypes.c_void_p(value))

    put(context)
    made = Layer(**layer)
    loaded = get()
    records()
    made.call(3)
    foreign, after = records(), get()
    put(0xC000)
    records()
    made.call(3)
    return {"loaded": loaded, "foreign": foreign, "after": after, "own": records(), "after_own": get()}


def failing(layer, tokens, routing="logits"):
    """Loads and calls twice: what each attempt raised, and the launches of the last."""
    errors, made = [], None
    for _ in range(2):
        if made is None:
            try:
                made = Layer(**layer)
            except BaseException as error:
                errors.append(f"{type(error).__name__}: {error}")
                continue
        errors.append(attempt(made.call, tokens, routing))
        mark = records()
    return {"errors": errors, "records": mark}


def refused(layer, tokens):
    """Returns what loading, topk, explain and device_info say if GPU calls cannot work."""
    logits = Tensor((tokens, layer["experts"]), "float32")
    return {
        "load": attempt(Layer, **layer),
        "topk": attempt(oxmoe.topk, logits, layer["top_k"]),
        "explain": attempt(oxmoe.explain, 8, 2, 256, 128, 4),
        "device_info": attempt(oxmoe.device_info),
        "info": oxmoe.device_info() if attempt(oxmoe.device_info) is None else None,
    }


def oxmoe_device_info():
    """Returns device_info of the module without torch."""
    return oxmoe.device_info()


def expert_order_weights(format, experts, hidden, intermediate):
    """Returns experts of a format, and the addresses of the tensors that they were made of."""
    if format in ("bf16", "f16"):
        made = Layer(experts, 1, hidden, intermediate, "bfloat16" if format == "bf16" else "float16")
        return made.weights, made.tensors
    if format.startswith("mxfp4"):
        options = {"activation_dtype": "float8_e4m3fn"} if format == "mxfp4-a8" else {}
        return make_packed(experts, hidden, intermediate, **options)
    if format.startswith("nvfp4"):
        tensors = nvfp4_operands(experts, hidden, intermediate)
        roundings = nvfp4_roundings(experts, "each" if format == "nvfp4-a4" else "a16")
        made = oxmoe.ExpertWeights.nvfp4(**tensors, w13_global_scale=1.0, w2_global_scale=1.0, **roundings)
        return made, tensors
    if format.startswith("int4"):
        tensors = int4_operands(experts, hidden, intermediate, zeros=format.endswith("zeros"))
        return oxmoe.ExpertWeights.int4(**tensors), tensors
    shapes = {"w13": (experts, 2 * intermediate, hidden), "w2": (experts, hidden, intermediate)}
    tensors = {name: Tensor(shape, "float8_e4m3fn") for name, shape in shapes.items()}
    for name, (_, height, width) in shapes.items():
        scale = (height, width // 32) if format == "mxfp8" else (height // 128, width // 128)
        kind = "uint8" if format == "mxfp8" else "float32"
        tensors[f"{name}_scale"] = Tensor((experts, *(() if format.startswith("fp8_tensor") else scale)), kind)
    name, _, mode = format.partition("-")
    options = {"per_token": mode == "token"} if name == "fp8_tensor" and mode != "static" else {}
    if mode == "static":
        tensors |= {name: Tensor((), "float32") for name in ("a13_scale", "a2_scale")}
    return getattr(oxmoe.ExpertWeights, name)(**tensors, **options), tensors


def expert_order_calls(format, experts, hidden, intermediate, rooms, quantised=False):
    """Runs rows in expert order for each (m, expected) of rooms, masked [experts, m, hidden] and contiguous ones in
    128s [experts m, hidden]: addresses, records of the driver."""
    weights, tensors = expert_order_weights(format, experts, hidden, intermediate)
    packed = [None if t is None else [part.address for part in t] for t in (weights.w13_packed, weights.w2_packed)]
    load, calls = records(), []
    kind = {"f16": "float16"}.get(format, "bfloat16")
    for (m, expected), masked in ((room, masked) for room in rooms for masked in (True, False)):
        lead = (experts, m) if masked else (experts * m,)
        x, out = Tensor((*lead, hidden), "float8_e4m3fn" if quantised else kind), Tensor((*lead, hidden), kind)
        workspace = Tensor((oxmoe.masked_workspace_bytes(weights, experts * m),), "uint8")
        counts = Tensor((experts,), "int32")
        options = {"expected_m": expected, "out": out, "workspace": workspace}
        if quantised:
            options["x_scale"] = scale = Tensor((*lead, hidden // 128), "float32")
        if masked:
            returned = oxmoe.moe_masked(x, weights, counts, **options)
        else:
            returned = oxmoe.moe_contiguous(x, weights, counts, alignment=128, **options)
        addresses = {"x": x.address, "out": out.address, "counts": counts.address}
        addresses |= {"x_scale": scale.address} if quantised else {}
        room = [workspace.address, workspace.shape[0]]
        call = {"m": m, "expected": expected, "masked": masked, "workspace": room, "returned": returned is out}
        calls.append(call | {"addresses": addresses, "records": records()})
    addresses = {name: tensor.address for name, tensor in tensors.items()}
    return {"addresses": addresses, "packed": packed, "load": load, "calls": calls}


def many_workspaces(format, layer, tokens, top_k, count):
    """Calls on each of many workspaces in turn, then on the first, the last and the first again: launches and memsets.
    tokens 0: rows in expert order."""
    experts, hidden, _ = layer
    weights, _ = expert_order_weights(format, *layer)
    (array,) = [record for record in records() if record["call"] == "cuMemAlloc"]
    zeros = not any(ctypes.string_at(array["address"], array["bytes"]))
    m = 8
    lead = (tokens,) if tokens else (experts, m)
    x, out = Tensor((*lead, hidden)), Tensor((*lead, hidden))
    logits, counts = Tensor((max(tokens, 1), experts), "float32"), Tensor((experts,), "int32")
    size = (
        oxmoe.workspace_bytes(weights, tokens, top_k) if tokens else oxmoe.masked_workspace_bytes(weights, experts * m)
    )
    spaces = [Tensor((size,), "uint8") for _ in range(count)]
    calls = []
    for space in [*spaces, spaces[0], spaces[-1], spaces[0]]:
        if tokens:
            oxmoe.moe(x, weights, router_logits=logits, top_k=top_k, out=out, workspace=space)
        else:
            oxmoe.moe_masked(x, weights, counts, out=out, workspace=space)
        made = [record for record in records() if record["call"] in ("cuLaunchKernelEx", "cuMemsetD8Async")]
        calls.append({"workspace": space.address, "records": made})
    return {"array": array, "zeros": zeros, "size": size, "calls": calls}


def refused_expert_order(formats):
    """Returns what moe_masked raises on a GPU: formats by name, and operands of a right one."""
    errors, counts = {}, Tensor((4,), "int32")
    for format in formats:
        weights, _ = expert_order_weights(format, 4, 256, 256)
        kind = "float16" if format == "f16" else "bfloat16"
        errors[format] = attempt(oxmoe.moe_masked, Tensor((4, 3, 256), kind), weights, counts)
    weights, tensors = expert_order_weights("fp8_block", 4, 256, 256)
    x = Tensor((4, 3, 256))
    shifted, far = Tensor((4, 3, 256)), Tensor((4,), "int32", device=1)
    shifted.address += 2
    inside = Tensor((4, 3, 256))
    inside.address = tensors["w13"].address
    errors["right"] = attempt(oxmoe.moe_masked, x, weights, counts)
    errors["alignment"] = attempt(oxmoe.moe_masked, shifted, weights, counts)
    errors["device"] = attempt(oxmoe.moe_masked, x, weights, far)
    errors["weights"] = attempt(oxmoe.moe_masked, x, weights, counts, out=inside)
    errors["rows"] = attempt(oxmoe.moe_masked, Tensor((4, 1 << 29, 256)), weights, counts)
    short = Tensor((oxmoe.masked_workspace_bytes(weights, 11),), "uint8")
    errors["workspace"] = attempt(oxmoe.moe_masked, x, weights, counts, workspace=short)
    return errors


if __name__ == "__main__":
    json.dump(globals()[sys.argv[1]](**json.loads(sys.argv[2])), sys.stdout)
