"""Measures how far a layer's results are from fp32 arithmetic on the same weights and inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from oxmoe import reference
from oxmoe.testing import cosine, relative_norm
from oxmoe.tools.bench import layers
from oxmoe.tools.bench.backend import Oxmoe

# Name -> (every so many columns, their factor). Models' activations have a few columns that are much larger than the
# rest.
INPUTS = {"noise": (0, 1.0), "1 % of columns x 20": (100, 20.0)}


class _Wide:
    """Experts whose numbers an index converts to fp32."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights
        self.shape = weights.codes.shape if isinstance(weights, layers.Fp8Block | layers.Mxfp8) else weights.shape

    def __getitem__(self, expert: int) -> torch.Tensor:
        weights = self.weights
        if isinstance(weights, layers.Mxfp8):
            return reference.mxfp8_weights(weights.codes[expert], weights.scales[expert], torch.float32)
        if isinstance(weights, layers.Fp8Block):
            scales = weights.scales[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
            codes = weights.codes[expert].float()
            return codes * scales[: codes.shape[0], : codes.shape[1]]
        return weights[expert].float()


def measure(name: str, format_name: str, tokens: int, inputs_name: str, device: str) -> tuple[float, float]:
    """Returns (relative norm of the error, cosine) of one layer with fresh weights and inputs."""
    shape, (dtype, _) = layers.SHAPES[name], layers.FORMATS[format_name]
    weights = layers.weights_of(format_name, shape, device, 1)
    inputs = layers.make_inputs(shape, tokens, dtype, device, 1)
    every, factor = INPUTS[inputs_name]
    if every:
        inputs[0].x[:, ::every] *= factor
    result = Oxmoe(shape, weights).layer(0, inputs[0])
    exact = dataclasses.replace(weights[0], w13=_Wide(weights[0].w13), w2=_Wide(weights[0].w2), activation_dtype=None)
    wide = dataclasses.replace(inputs[0], x=inputs[0].x.float())
    truth = reference.moe(
        wide.x, exact.w13, exact.w2, b13=exact.b13, b2=exact.b2, **shape.options, **wide.routing(shape.top_k)
    )  # fmt: skip
    return relative_norm(result, truth), cosine(result, truth)


def run(shapes: list[str], formats: list[str], tokens: list[int], device: str) -> None:
    """Prints a Markdown table."""
    print("| layer | M | inputs | format | error / fp32 | 1 - cosine |")
    print("|---|---|---|---|---|---|")
    for name in shapes:
        for number in tokens:
            for inputs_name in INPUTS:
                for format_name in formats:
                    norm, angle = measure(name, format_name, number, inputs_name, device)
                    print(
                        f"| {name} | {number} | {inputs_name} | {format_name} | {norm:.2e} | {1 - angle:.1e} |",
                        flush=True,
                    )
