"""Records of calls under the stand-in driver."""

from __future__ import annotations

import json
import os

from tensors import Tensor

import oxmoe._oxmoe as oxmoe

_read = 0


def records() -> list[dict]:
    """Returns what the driver was asked since the last time."""
    global _read
    if not os.path.exists(os.environ.get("FAKE_LOG", "")):
        return []
    with open(os.environ["FAKE_LOG"]) as log:
        log.seek(_read)
        lines = log.read()
        _read = log.tell()
    return [json.loads(line) for line in lines.splitlines()]


def attempt(function, *arguments, **options) -> str | None:
    """ "RuntimeError: text" of what the call raised."""
    try:
        function(*arguments, **options)
    except BaseException as error:  # a panic is a BaseException
        return f"{type(error).__name__}: {error}"
    return None


def router_as_planned(router) -> dict:
    """Returns the options of `explain` for a router as `moe` takes it."""
    return {"num_expert_group": router.get("num_expert_group", 0), "correction_bias": "correction_bias" in router}


def layer_calls(weights, top_k, tokens, experts, hidden, intermediate, **router) -> list[dict]:
    """Runs the layer from router logits at each token count: plan as text, addresses, records."""
    calls = []
    for count in tokens:
        x, out = (Tensor((count, hidden)) for _ in range(2))
        workspace = Tensor((oxmoe.workspace_bytes(weights, count, top_k),), "uint8")
        logits = Tensor((count, experts), "float32")
        oxmoe.moe(x, weights, router_logits=logits, top_k=top_k, out=out, workspace=workspace, **router)
        options = {"format": weights.format, "gated": weights.gated, "routing": "logits"} | router_as_planned(router)
        plan = oxmoe.explain(experts, top_k, hidden, intermediate, count, **options)
        given = {"x": x.address, "out": out.address, "workspace": workspace.address}
        calls.append({"tokens": count, "explain": plan, "records": records(), **given})
    return calls
