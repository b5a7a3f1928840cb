"""Calls of experts whose weights are packed, MXFP4, MXFP8, NVFP4 and int4, for calls.py."""

from __future__ import annotations

from recording import attempt, layer_calls, records
from tensors import Tensor

import oxmoe._oxmoe as oxmoe


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
