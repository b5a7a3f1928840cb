"""The calls that tests make under the stand-in driver: `python calls.py <function> <keyword arguments as JSON>`.

Prints the function's result as JSON. Driver records of a call are taken from FAKE_LOG right after it.
"""

from __future__ import annotations

import ctypes
import json
import sys

sys.modules["torch"] = None  # oxmoe without torch: its builtins are called as they are

from allreduce_calls import failure, pair, strange_descriptors  # noqa: E402, F401
from fork_calls import cuda_after_fork, failed_start  # noqa: E402, F401
from fp8_calls import fp8_calls, fp8_quantized, fp8_tensor_calls, fp8_tokens, refused_fp8  # noqa: E402, F401
from id_calls import ids_on_a_gpu  # noqa: E402, F401
from recording import attempt, layer_calls, records  # noqa: E402
from tensors import Tensor, install_torch  # noqa: E402

import oxmoe._oxmoe as oxmoe  # noqa: E402

install_torch()

# Routers of calls from logits: what `explain` takes of them.
ROUTERS = {
    "logits": {},
    "groups": {"num_expert_group": 8},
    "bias": {"correction_bias": True},
    "both": {"num_expert_group": 8, "correction_bias": True},
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
            if "num_expert_group" in options:
                options["topk_group"] = 2
            if "correction_bias" in options:
                self.tensors["correction_bias"] = options["correction_bias"] = self.tensor((experts,), "float32")
            return oxmoe.moe(x, self.weights, router_logits=logits, top_k=top_k, **options)
        self.tensors["topk_weights"] = self.tensor((tokens, top_k), "float32")
        self.tensors["topk_ids"] = self.tensor((tokens, top_k), routing)
        return oxmoe.moe(x, self.weights, self.tensors["topk_weights"], self.tensors["topk_ids"], **options)

    def explain(self, tokens, routing, arch=None):
        name = "bf16" if self.dtype == "bfloat16" else "f16"
        source = "logits" if routing in ROUTERS else "ids"
        options = {"arch": arch, "routing": source, **ROUTERS.get(routing, {})}
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


def make_packed(experts, hidden, intermediate, scale_dtype="uint8", columns=None, bias=None, **options):
    """Makes MXFP4 experts with `columns` of w13 (hidden of them used), and their operands."""
    columns = columns or hidden
    rows = intermediate * (2 if options.get("gated", True) else 1)
    shapes = {
        "w13": (experts, rows, columns // 2),
        "w2": (experts, columns, intermediate // 2),
        "w13_scale": (experts, rows, columns // 32),
        "w2_scale": (experts, columns, intermediate // 32),
    }
    tensors = {
        name: Tensor(shape, scale_dtype if name.endswith("scale") else "uint8") for name, shape in shapes.items()
    }
    if bias:
        tensors |= {"b13": Tensor((experts, rows), bias), "b2": Tensor((experts, columns), bias)}
    return oxmoe.ExpertWeights.mxfp4(**tensors, hidden_size=hidden, **options), tensors


def packed_experts(**layer):
    """Returns the operands' addresses, those of their packed form, and the driver's records."""
    weights, tensors = make_packed(**layer)
    packed = [[(t.address, t.shape) for t in packed] for packed in (weights.w13_packed, weights.w2_packed)]
    return {
        "addresses": {name: tensor.address for name, tensor in tensors.items()},
        "packed": packed,
        "records": records(),
    }


def packed_calls(top_k, tokens, **layer):
    """Runs packed experts at each token count: plan as text (None if explain has no such shape), addresses, records."""
    weights, tensors = make_packed(**layer)
    packed = [[t.address for t in packed] for packed in (weights.w13_packed, weights.w2_packed)]
    shape = [layer[name] for name in ("experts", "hidden", "intermediate")]
    load, calls = records(), []
    for count in tokens:
        x, out = (Tensor((count, layer["hidden"])) for _ in range(2))
        workspace = Tensor((oxmoe.workspace_bytes(weights, count, top_k),), "uint8")
        logits = Tensor((count, shape[0]), "float32")
        oxmoe.moe(x, weights, router_logits=logits, top_k=top_k, out=out, workspace=workspace)
        asked = records()
        options = {"format": weights.format, "gated": layer.get("gated", True), "routing": "logits"}
        plan = None if shape[1] % 32 else oxmoe.explain(shape[0], top_k, *shape[1:], count, **options)
        room = [workspace.address, workspace.shape[0]]
        calls.append(
            {"tokens": count, "explain": plan, "x": x.address, "out": out.address, "workspace": room, "records": asked}
        )
    addresses = {name: tensor.address for name, tensor in tensors.items()}
    return {"addresses": addresses, "packed": packed, "load": load, "calls": calls}


def mxfp8_calls(top_k, tokens, experts, hidden, intermediate, in_place):
    """Runs MXFP8 experts at each token count: plan as text, addresses, those of their packed form, records."""
    shapes = {"w13": (experts, 2 * intermediate, hidden), "w2": (experts, hidden, intermediate)}
    tensors = {name: Tensor(shape, "float8_e4m3fn") for name, shape in shapes.items()}
    for name, (_, height, width) in shapes.items():
        tensors[f"{name}_scale"] = Tensor((experts, height, width // 32), "uint8")
    weights = oxmoe.ExpertWeights.mxfp8(**tensors, in_place=in_place)
    packed = [[(t.address, t.shape) for t in packed] for packed in (weights.w13_packed, weights.w2_packed)]
    load = records()
    calls = layer_calls(weights, top_k, tokens, experts, hidden, intermediate)
    addresses = {name: tensor.address for name, tensor in tensors.items()}
    return {"addresses": addresses, "packed": packed, "load": load, "calls": calls}


def nvfp4_operands(experts, hidden, intermediate, gated=True, swizzled=False):
    """Returns codes and scales of NVFP4 experts by name."""
    tensors = {}
    for name, (rows, columns) in {
        "w13": (intermediate * (2 if gated else 1), hidden),
        "w2": (hidden, intermediate),
    }.items():
        held = (-(-rows // 128) * 128, -(-columns // 64) * 4) if swizzled else (rows, columns // 16)
        tensors[name] = Tensor((experts, rows, columns // 2), "uint8")
        tensors[f"{name}_scale"] = Tensor((experts, *held), "float8_e4m3fn")
    return tensors


def nvfp4_roundings(experts, mode):
    """Returns the numbers that activations are rounded with."""
    each = mode == "each"
    x = Tensor((experts,), "float32") if each else 2.0
    return {} if mode == "a16" else {"input_global_scale": x, "a2_global_scale": Tensor((1,), "float32")}


def nvfp4_calls(top_k, tokens, experts, hidden, intermediate, mode, gated=True, swizzled=False):
    """Runs NVFP4 experts at each token count: plan as text, addresses, those of their packed form, records. mode:
    "a16"; "one" or "each": activations are rounded with one number or with each expert's; "codes": tokens are codes."""
    tensors = nvfp4_operands(experts, hidden, intermediate, gated, swizzled)
    options = {} if gated else {"activation": "relu2"}
    numbers = {"w13_global_scale": Tensor((experts, 2) if gated else (experts,), "float32"), "w2_global_scale": 0.25}
    weights = oxmoe.ExpertWeights.nvfp4(**tensors, **numbers, **nvfp4_roundings(experts, mode), **options)
    packed = [[(t.address, t.shape) for t in packed] for packed in (weights.w13_packed, weights.w2_packed)]
    load, calls = records(), []
    for count in tokens:
        out = Tensor((count, hidden))
        x, scale = Tensor((count, hidden)), None
        if mode == "codes":
            x, scale = Tensor((count, hidden // 2), "uint8"), Tensor((count, hidden // 16), "float8_e4m3fn")
        workspace = Tensor((oxmoe.workspace_bytes(weights, count, top_k),), "uint8")
        logits = Tensor((count, experts), "float32")
        oxmoe.moe(x, weights, router_logits=logits, top_k=top_k, x_scale=scale, out=out, workspace=workspace)
        options = {"format": weights.format, "gated": gated, "routing": "logits"}
        plan = oxmoe.explain(experts, top_k, hidden, intermediate, count, **options)
        given = {"x": x.address, "out": out.address, "workspace": workspace.address}
        given["scale"] = 0 if scale is None else scale.address
        calls.append({"tokens": count, "explain": plan, "records": records(), **given})
    addresses = {name: tensor.address for name, tensor in tensors.items()}
    return {"addresses": addresses, "packed": packed, "load": load, "calls": calls, "format": weights.format}


def refused_nvfp4():
    """Returns what NVFP4 experts raise on a GPU."""
    tensors = nvfp4_operands(4, 128, 64)
    numbers = {"w13_global_scale": 1.0, "w2_global_scale": 1.0}
    make = oxmoe.ExpertWeights.nvfp4
    errors = {
        "right": attempt(make, **tensors, **numbers),
        "f16": attempt(make, **tensors, **numbers, dtype="f16"),
        "shape": attempt(make, **tensors, **{**numbers, "w13_global_scale": Tensor((4, 3), "float32")}),
        "device": attempt(make, **tensors, **{**numbers, "w2_global_scale": Tensor((4,), "float32", device=1)}),
        "dtype": attempt(make, **tensors, **{**numbers, "w2_global_scale": Tensor((4,), "float16")}),
        "explain": attempt(oxmoe.explain, 4, 2, 128, 64, 5, format="nvfp4"),
        "explain-a4": attempt(oxmoe.explain, 4, 2, 128, 64, 5, format="nvfp4-a4"),
    }
    return errors


def int4_operands(experts, hidden, intermediate, gated=True, group=32, zeros=False, scale_dtype="bfloat16"):
    """Returns operands of int4 experts by name."""
    tensors = {}
    for name, (rows, columns) in {
        "w13": (intermediate * (2 if gated else 1), hidden),
        "w2": (hidden, intermediate),
    }.items():
        groups = columns // (group or columns)
        tensors[name] = Tensor((experts, rows, columns // 2), "uint8")
        tensors[f"{name}_scale"] = Tensor((experts, rows, groups), scale_dtype)
        if zeros:
            tensors[f"{name}_zeros"] = Tensor((experts, rows, groups), "uint8")
    return tensors


def int4_calls(top_k, tokens, experts, hidden, intermediate, gated=True, **operands):
    """Runs int4 experts at each token count: plan as text, addresses, those of their packed form, records."""
    tensors = int4_operands(experts, hidden, intermediate, gated, **operands)
    weights = oxmoe.ExpertWeights.int4(**tensors, **({} if gated else {"activation": "relu2"}))
    packed = [[(t.address, t.shape) for t in packed] for packed in (weights.w13_packed, weights.w2_packed)]
    load = records()
    calls = layer_calls(weights, top_k, tokens, experts, hidden, intermediate)
    addresses = {name: tensor.address for name, tensor in tensors.items()}
    return {"addresses": addresses, "packed": packed, "load": load, "calls": calls, "format": weights.format}


def refused_int4():
    """Returns what int4 experts raise on a GPU."""
    tensors, make = int4_operands(4, 128, 64, zeros=True), oxmoe.ExpertWeights.int4
    return {
        "right": attempt(make, **tensors),
        "f16": attempt(make, **tensors, dtype="f16"),
        "device": attempt(make, **{**tensors, "w2_zeros": Tensor((4, 128, 2), "uint8", device=1)}),
        "groups": attempt(make, **{**tensors, "w2_zeros": Tensor((4, 128, 1), "uint8")}),
        "dtype": attempt(make, **{**tensors, "w13_scale": Tensor((4, 128, 4), "uint8")}),
        "explain": attempt(oxmoe.explain, 4, 2, 128, 64, 5, format="int4"),
        "explain-zeros": attempt(oxmoe.explain, 4, 2, 128, 64, 5, format="int4-zeros"),
    }


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


def packed_functions(rows, columns):
    """Runs mxfp4_pack and mxfp4_unpack."""
    codes, scales = Tensor((3, 2, rows, columns // 2), "uint8"), Tensor((3, 2, rows, columns // 32), "uint8")
    form = {"gated": True, "layout": "up_gate"}
    packed = oxmoe.pack_mxfp4(codes, scales, **form)
    back = oxmoe.unpack_mxfp4(*packed, rows=rows, columns=columns, **form)
    addresses = [t.address for t in (codes, scales, *packed, *back)]
    return {"addresses": addresses, "shapes": [t.shape for t in (*packed, *back)], "records": records()}


def layouts(rows, columns, num_warps=8):
    """Converts to every other layout and back: [addresses of codes and scales before and after, shapes after, records]
    of each."""
    lead = (3, 2)
    codes, scales = Tensor((*lead, rows, columns // 2), "uint8"), Tensor((*lead, rows, columns // 32), "uint8")
    results = []

    def convert(function, *given, **options):
        made = function(*given, **options)
        addresses = [t.address for t in (*given, *made)]
        results.append([addresses, [list(t.shape) for t in made], records()])
        return made

    held = convert(oxmoe.swizzle_hopper_mxfp4, codes, scales, num_warps=num_warps, row_multiple=256)
    convert(oxmoe.unswizzle_hopper_mxfp4, *held, rows=rows, columns=columns, num_warps=num_warps)
    for flashinfer in ("0.6", "0.7"):
        held = convert(oxmoe.interleave_sm90_mxfp4, codes, scales, flashinfer=flashinfer)
        convert(oxmoe.deinterleave_sm90_mxfp4, *held)
    return results


def quantized(shape, dtype, rounding):
    """Runs mxfp4 and back: addresses of numbers, codes, scales and numbers again, shapes of the last three, records."""
    x = Tensor(shape, dtype)
    codes, scales = oxmoe.quantize_mxfp4(x, rounding=rounding)
    back = oxmoe.dequantize_mxfp4(codes, scales, dtype)
    addresses = [t.address for t in (x, codes, scales, back)]
    return {"addresses": addresses, "shapes": [t.shape for t in (codes, scales, back)], "records": records()}


def quantized_rows(shape):
    """Runs rows_e4m3: addresses of numbers, codes and scales, shapes of the last two, records."""
    x = Tensor(shape)
    made = oxmoe.quantize_rows_e4m3(x)
    return {
        "addresses": [t.address for t in (x, *made)],
        "shapes": [list(t.shape) for t in made],
        "records": records(),
    }


def dense_quantize(shape, dtype, layout, alignment):
    """Runs MXFP8 and back: addresses of numbers, codes, scales and numbers again, shapes of codes and scales,
    records."""
    x = Tensor(shape, dtype)
    codes, scales = oxmoe.quantize_mxfp8(x, layout=layout, alignment=alignment)
    back = oxmoe.dequantize_mxfp8(codes, scales, dtype, layout=layout)
    return {
        "addresses": [t.address for t in (x, codes, scales, back)],
        "shapes": [list(codes.shape), list(scales.shape)],
        "records": records(),
    }


def dense_mm(m, n, k, a_scales, b_scales, out_dtype="bfloat16", use_8x4=False):
    """Runs the dense MXFP8 GEMM with scales of these shapes: addresses of operands and output, records."""
    a, b = Tensor((m, k), "float8_e4m3fn"), Tensor((n, k), "float8_e4m3fn").swapaxes(0, 1)
    scales = [Tensor(shape, "uint8") for shape in (a_scales, b_scales)]
    out = oxmoe.mm_mxfp8(a, b, *scales, out_dtype=out_dtype, use_8x4_sf_layout=use_8x4)
    return {"addresses": [t.address for t in (a, b, *scales, out)], "shape": list(out.shape), "records": records()}


def nvfp4_quantized(shape, dtype, block, layout):
    """Runs NVFP4, or MXFP4 of blocks of 32: addresses of numbers, codes and scales, shapes of the last two, records."""
    x = Tensor(shape, dtype)
    kind = "e4m3" if block == 16 else "e8m0"
    codes, scales = oxmoe.quantize_nvfp4(x, block=block, scale_dtype=kind, scale_layout=layout)
    return {
        "addresses": [t.address for t in (x, codes, scales)],
        "shapes": [list(t.shape) for t in (codes, scales)],
        "records": records(),
    }


def refused_dense():
    """Returns what the dense MXFP8 GEMM raises on a GPU."""
    a, b = Tensor((4, 64), "float8_e4m3fn"), Tensor((8, 64), "float8_e4m3fn").swapaxes(0, 1)
    scales = Tensor((4, 2), "uint8"), Tensor((2, 8), "uint8")
    shifted = Tensor((4, 64), "float8_e4m3fn")
    shifted.address += 8
    return {
        "right": attempt(oxmoe.mm_mxfp8, a, b, *scales),
        "address": attempt(oxmoe.mm_mxfp8, shifted, b, *scales),
        "device": attempt(oxmoe.mm_mxfp8, a, b, scales[0], Tensor((2, 8), "uint8", device=1)),
    }


def refused_mxfp4():
    """Returns what MXFP4 experts raise on a GPU."""
    codes = Tensor((4, 128, 32), "uint8"), Tensor((4, 64, 32), "uint8")
    scales = Tensor((4, 128, 2), "uint8"), Tensor((4, 64, 2), "uint8")
    x, ids, weights = Tensor((2, 64)), Tensor((2, 1), "int32"), Tensor((2, 1), "float32")
    narrow = Tensor((4, 128, 48), "uint8"), Tensor((4, 96, 32), "uint8"), Tensor((4, 128, 3), "uint8")
    blocks = {"w13_scale": scales[0], "w2_scale": scales[1], "format": "mxfp4"}
    odd = codes[0].part(codes[0].shape)
    odd.address += 8
    numbers = Tensor((4, 64))
    numbers.address += 2
    return {
        "dtype": attempt(oxmoe.ExpertWeights.mxfp4, *codes, *scales, dtype="f16"),
        "e4m3": attempt(oxmoe.ExpertWeights.mxfp4, *codes, *scales, activation_dtype="float8_e4m3fn"),
        "e4m3 columns": attempt(
            oxmoe.ExpertWeights.mxfp4, *codes, *scales, activation_dtype="float8_e4m3fn", hidden_size=60
        ),
        "rows": attempt(oxmoe.quantize_rows_e4m3, Tensor((4, 64))),
        "bare": attempt(oxmoe.moe_tensors, x, *codes, weights, ids, **blocks),
        "vectors": attempt(oxmoe.swizzle_hopper_mxfp4, odd, scales[0]),
        "numbers": attempt(oxmoe.quantize_mxfp4, numbers),
        "bands": attempt(
            oxmoe.swizzle_hopper_mxfp4, Tensor((1, 1 << 32, 16), "uint8"), Tensor((1, 1 << 32, 1), "uint8")
        ),
        "in_place": attempt(oxmoe.ExpertWeights.mxfp4, *narrow, Tensor((4, 96, 2), "uint8"), in_place=True),
        "overlap": attempt(
            oxmoe.ExpertWeights.mxfp4, codes[0], codes[1], codes[0].part((4, 128, 2)), scales[1], in_place=True
        ),
    }


if __name__ == "__main__":
    json.dump(globals()[sys.argv[1]](**json.loads(sys.argv[2])), sys.stdout)
