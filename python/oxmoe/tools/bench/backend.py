"""The interface of a backend, a way to run the layer, for the bench; and oxmoe's own backend."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

import oxmoe
from oxmoe.formats.drawn import Experts
from oxmoe.tools.bench.layers import FORMATS, Fp8Block, Inputs, Mxfp4, Mxfp8, Nvfp4, Shape, Weights
from oxmoe.weights import expert_weights


class Backend(ABC):
    """A way to run the layer, from router logits to the combined output."""

    name: ClassVar[str]
    formats: ClassVar[tuple[str, ...]] = ("bf16", "f16")  # formats of weights
    most_error: float = 2e-2  # relative norm that a peer's error stays below
    excludes: ClassVar[str | None] = None  # the work that the others' times contain and this one's do not
    rounds_activations = True  # whether it rounds them as the reference does; False: MXFP8's stay in bf16
    detail: str | None = None  # its choice for the latest calls, for the record

    def __init__(self, shape: Shape, weights: Sequence[Weights]):
        self.shape = shape
        self.weights = weights

    @classmethod
    def missing(cls, device: str) -> str | None:
        """Returns why the backend cannot run here, or None if it can."""
        return None

    def same_layer(self) -> bool:
        """Whether it computes what the reference does. If not, it has only the same bytes and flops."""
        return True

    def prepare(self, tokens: Sequence[int]) -> None:
        """Runs before the first of these token counts: a peer that compiles at its first call can do so at once."""
        return

    @abstractmethod
    def layer(self, index: int, inputs: Inputs) -> Tensor:
        """Runs layer number `index` on these inputs."""

    def calls(self, inputs: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        """Returns one call for each layer. On a GPU a call can be captured."""
        return [functools.partial(self.layer, index, item) for index, item in enumerate(inputs)]

    def result(self, index: int, output: Tensor) -> Tensor:
        """Returns the layer's result for what call number `index` returned: the output itself, if the call runs the
        whole layer."""
        return output


class Oxmoe(Backend):
    name = "oxmoe"
    formats = tuple(FORMATS)

    def __init__(self, shape: Shape, weights: Sequence[Weights]):
        super().__init__(shape, weights)
        self.experts = [self._experts(item) for item in weights]

    def _experts(self, item: Weights) -> oxmoe.ExpertWeights:
        options = {"b13": item.b13, "b2": item.b2, **self.shape.options}
        w13, w2 = item.w13, item.w2
        if isinstance(w13, Mxfp4):
            operands = w13.codes, w2.codes, w13.scales, w2.scales
            return oxmoe.ExpertWeights.mxfp4(*operands, activation_dtype=item.activation_dtype, **options)
        if isinstance(w13, Fp8Block) and item.activation_scales is not None:
            scales = item.activation_scales
            if not isinstance(scales, str):
                options |= {"a13_scale": scales[0], "a2_scale": scales[1]}
            operands = w13.codes, w2.codes, w13.scales[:, 0, 0], w2.scales[:, 0, 0]
            return oxmoe.ExpertWeights.fp8_tensor(*operands, per_token=scales == "token", **options)
        if isinstance(w13, Fp8Block):
            return oxmoe.ExpertWeights.fp8_block(w13.codes, w2.codes, w13.scales, w2.scales, **options)
        if isinstance(w13, Nvfp4):
            rounding = item.activation_rounding
            if rounding is not None:
                options |= {"input_global_scale": rounding, "a2_global_scale": rounding}
            operands = w13.codes, w2.codes, w13.scales, w2.scales
            factors = (matrix.factor / (rounding or 1.0) for matrix in (w13, w2))
            return oxmoe.ExpertWeights.nvfp4(*operands, *factors, scale_layout="plain", **options)
        if isinstance(w13, Experts):
            return w13.weights(w2, **options)
        if isinstance(w13, Mxfp8):
            return oxmoe.ExpertWeights.mxfp8(w13.codes, w2.codes, w13.scales, w2.scales, **options)
        return expert_weights(w13, w2, **options)

    def layer(self, index: int, inputs: Inputs) -> Tensor:
        return oxmoe.moe(inputs.x, self.experts[index], **inputs.routing(self.shape.top_k))

    def calls(self, inputs: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        """Returns calls with `out` and `workspace` given, as a server would do it: layers share the workspace."""
        x, top_k = inputs[0].x, self.shape.top_k
        size = oxmoe.workspace_bytes(self.experts[0], x.shape[0], top_k)
        room = torch.empty(size + 256, dtype=torch.uint8, device=x.device)
        start = -room.data_ptr() % 256
        return [
            functools.partial(
                oxmoe.moe,
                item.x,
                experts,
                **item.routing(top_k),
                out=torch.empty_like(item.x),
                workspace=room[start : start + size],
            )
            for experts, item in zip(self.experts, inputs, strict=True)
        ]
