"""Calls of e4m3 experts for calls.py."""

from __future__ import annotations

from recording import attempt, layer_calls, records
from tensors import Tensor

import oxmoe._oxmoe as oxmoe


def fp8_calls(top_k, tokens, experts, hidden, intermediate, groups=0):
    """Runs experts of e4m3 with block scales at each token count: plan as text, addresses, records.

    groups: the number of groups of a router with bias, such as DeepSeek-V3's.
    """
    router = {}
    if groups:
        router = {"scoring_func": "sigmoid", "num_expert_group": groups, "topk_group": max(groups // 2, 1)}
        router["correction_bias"] = Tensor((experts,), "float32")
    rows = 2 * intermediate
    shapes = {"w13": (experts, rows, hidden), "w2": (experts, hidden, intermediate)}
    tensors = {name: Tensor(shape, "float8_e4m3fn") for name, shape in shapes.items()}
    for name, (_, height, width) in shapes.items():
        tensors[f"{name}_scale"] = Tensor((experts, height // 128, width // 128), "float32")
    weights = oxmoe.ExpertWeights.fp8_block(**tensors)
    load = records()
    calls = layer_calls(weights, top_k, tokens, experts, hidden, intermediate, **router)
    addresses = {name: tensor.address for name, tensor in tensors.items()}
    return {"addresses": addresses, "load": load, "calls": calls}


def fp8_quantized(shape, dtype, group, **options):
    """Runs quantize_fp8: addresses of numbers, codes and scales, shapes of the last two, records."""
    x = Tensor(shape, dtype)
    made = oxmoe.quantize_fp8(x, group, 1e-10, **options)
    return {
        "addresses": [t.address for t in (x, *made)],
        "shapes": [list(t.shape) for t in made],
        "records": records(),
    }


def refused_fp8():
    """Returns the errors of fp8 experts for each operand that begins 4 bytes too late, and for operands that begin
    right."""
    shapes = {"w13": (2, 512, 384), "w2": (2, 384, 256)}
    tensors = {name: Tensor(shape, "float8_e4m3fn") for name, shape in shapes.items()}
    for name, (_, height, width) in shapes.items():
        tensors[f"{name}_scale"] = Tensor((2, height // 128, width // 128), "float32")
    tensors |= {"b13": Tensor((2, 512)), "b2": Tensor((2, 384), "float32")}
    errors = {"right": attempt(oxmoe.ExpertWeights.fp8_block, **tensors)}
    for name, tensor in tensors.items():
        tensor.address += 4
        errors[name] = attempt(oxmoe.ExpertWeights.fp8_block, **tensors)
        tensor.address -= 4
    for name, (_, height, _) in shapes.items():
        tensors[f"{name}_scale"] = Tensor((2, height), "float32")
        tensors[f"{name}_scale"].address += 4
        errors[f"{name}_scale of rows"] = attempt(oxmoe.ExpertWeights.fp8_tensor, **tensors)
        tensors[f"{name}_scale"].address -= 4
    errors["rows"] = attempt(oxmoe.ExpertWeights.fp8_tensor, **tensors)
    return errors


def fp8_tensor_calls(top_k, tokens, experts, hidden, intermediate, mode, of_rows=False, bias=False, gated=True):
    """Runs experts of e4m3 with one scale a matrix, or one a row; and, if a mode is "given", with tokens that are
    e4m3."""
    rows = intermediate * (2 if gated else 1)
    shapes = {"w13": (experts, rows, hidden), "w2": (experts, hidden, intermediate)}
    tensors = {name: Tensor(shape, "float8_e4m3fn") for name, shape in shapes.items()}
    if bias:
        tensors |= {"b13": Tensor((experts, rows)), "b2": Tensor((experts, hidden), "float32")}
    scales = {
        f"{name}_scale": Tensor((experts, height) if of_rows else (experts,), "float32")
        for name, (_, height, _) in shapes.items()
    }
    given = {name: Tensor((), "float32") for name in ("a13_scale", "a2_scale")} if mode == "static" else {}
    options = {"per_token": mode == "token", "gated": gated, "activation": "silu" if gated else "relu2"}
    weights = oxmoe.ExpertWeights.fp8_tensor(**tensors, **scales, **given, **options)
    load = records()
    calls = layer_calls(weights, top_k, tokens, experts, hidden, intermediate)
    tables = {name: getattr(weights, name) for name in [*scales, *(["b13", "b2"] if bias else [])]}
    addresses = {name: tensor.address for name, tensor in {**tensors, **tables, **given}.items()}
    shapes = {name: tensor.shape for name, tensor in tables.items()}
    return {"addresses": addresses, "shapes": shapes, "load": load, "calls": calls}


def fp8_tokens(tokens, form, experts=8, top_k=2, hidden=384, intermediate=256):
    """Makes a call with e4m3 tokens. form: the form of their scales."""
    shapes = {"w13": (experts, 2 * intermediate, hidden), "w2": (experts, hidden, intermediate)}
    tensors = {name: Tensor(shape, "float8_e4m3fn") for name, shape in shapes.items()}
    for name, (_, height, width) in shapes.items():
        tensors[f"{name}_scale"] = Tensor((experts, height // 128, width // 128), "float32")
    weights = oxmoe.ExpertWeights.fp8_block(**tensors)
    scale = {
        "rows": lambda: Tensor((tokens, 3), "float32"),
        "columns": lambda: Tensor((3, tokens), "float32").swapaxes(0, 1),
        "packed": lambda: Tensor((1, tokens), "int32").swapaxes(0, 1),
        "token": lambda: Tensor((tokens, 1), "float32"),
        "one": lambda: Tensor((), "float32"),
    }[form]()
    x, out = Tensor((tokens, hidden), "float8_e4m3fn"), Tensor((tokens, hidden))
    workspace = Tensor((oxmoe.workspace_bytes(weights, tokens, top_k),), "uint8")
    plan = oxmoe.explain(experts, top_k, hidden, intermediate, tokens, format="fp8_block")
    ids, gates = Tensor((tokens, top_k), "int32"), Tensor((tokens, top_k), "float32")
    records()
    oxmoe.moe(x, weights, gates, ids, x_scale=scale, out=out, workspace=workspace)
    addresses = {"x": x.address, "scale": scale.address, "workspace": workspace.address}
    return {"records": records(), "explain": plan, **addresses}
