"""What serve.py makes of the answers of two servers: where they part, and what is wrong with that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import client


@dataclass
class Seen:
    """The answers of one server, and its row."""

    mode: str
    row: dict[str, Any]
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    timed: dict[str, list[tuple[list[client.Answer], float]]] = field(default_factory=dict)
    logprobs: list[list[float]] = field(default_factory=list)
    updated: bool = False
    written: bool = False  # whether the row is in the file


def without_list(comparison: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in comparison.items() if name != "divergences"}


def compared(
    off: Seen, on: Seen, ports: dict[str, int], requests: Callable[[str], Sequence[client.Request]], limit: int = 12
) -> dict[str, Any]:
    """Compares the tokens of both servers. Where they part first, it asks each server of `ports`, with no other request
    beside, how much it prefers the token of the server with oxmoe: `margin`, and `margin_without` of the other one."""
    row: dict[str, Any] = {"logprobs": client.spread(on.logprobs, off.logprobs), "tokens": {}}
    asked = 0
    for name in on.tokens.keys() & off.tokens.keys() - {"16 again"}:
        result = client.compare(on.tokens[name], off.tokens[name])
        for at in result["divergences"]:
            if asked == limit:
                break
            asked += 1
            n, position = at["request"], at["position"]
            prefix = [*requests(name)[n].prompt, *on.tokens[name][n][:position]]
            for mode, field_of in (("on", "margin"), ("off", "margin_without")):
                if mode in ports:
                    at[field_of] = client.margin(ports[mode], prefix, at["on"], at["off"])
        result["divergences"] = result["divergences"][:limit]
        row["tokens"][name] = result
    return row


def judge(layers: int, off: Seen, on: Seen, comparison: dict[str, Any]) -> list[str]:
    """Returns what is wrong with a cell, which has so many layers of experts. comparison: empty without one.

    Two kernels round differently, so two servers part where two tokens are nearly as likely as each other. A server's
    log-probabilities are off the other's by up to `most` (measured on the same tokens). Two tokens may part if their
    distance is within twice that.
    """
    wrong = [f"{seen.mode}: {seen.row['error']}" for seen in (off, on) if "error" in seen.row]
    if "update_error" in on.row:
        wrong.append(f"on: {on.row['update_error']}")
    ran = on.row.get("layers_on_oxmoe")
    if ran is not None and "error" not in on.row and (not ran or any(pair != [layers, layers] for pair in ran)):
        wrong.append(f"the log says of layers on oxmoe {ran}, expected [{layers}, {layers}]")
    if off.row.get("layers_on_oxmoe"):
        wrong.append("the server without oxmoe ran on it")
    for seen in (off, on):
        if seen.updated and seen.row["update"]["answers_that_changed"] == 0:
            wrong.append(f"{seen.mode}: no answer changed with the weights")
    bar = 2 * comparison["logprobs"]["most"] if comparison else 0.0
    for name, result in comparison.get("tokens", {}).items():
        for at in result["divergences"]:
            if abs(at.get("margin", 0.0)) > bar:
                text = f"{name}: answer {at['request']} parts at {at['position']}, margin {at['margin']:.3f}"
                other = at.get("margin_without")
                wrong.append(text if other is None else f"{text}, without oxmoe {other:.3f}")
    return wrong
