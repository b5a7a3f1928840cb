"""flashinfer's CUTLASS fused MoE on Hopper, which takes routed tokens: MXFP4 weights with bf16 activations, and e4m3
weights with block scales, whose GEMMs are DeepGEMM's."""

from __future__ import annotations

import ctypes
import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from oxmoe.tools.bench.backend import Backend
from oxmoe.tools.bench.deep_gemm import GROUP, MOST_ERROR
from oxmoe.tools.bench.layers import Inputs, Shape, Weights, choose

ALIGNMENT = 128  # hidden and intermediate sizes are padded to multiples of it


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def padded(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """Pads [E, R, C] with zeros up to rows and columns."""
    return pad(tensor, (0, columns - tensor.shape[2], 0, rows - tensor.shape[1]))


def up_gate(tensor: Tensor, rows: int, columns: int, *, interleaved: bool) -> Tensor:
    """Returns w13's `[E, 2I, C]` as [up; gate], each half padded to `rows` rows."""
    gate, up = (tensor[:, 0::2], tensor[:, 1::2]) if interleaved else tensor.chunk(2, dim=1)
    return torch.cat((padded(up, rows, columns), padded(gate, rows, columns)), dim=1)


class CutlassFusedMoe(Backend):
    """flashinfer's cutlass_fused_moe. Top-k is made and inputs are padded to 128 columns before the clock starts."""

    excludes = "routing"
    flags: ClassVar[dict[str, bool]]  # flags of cutlass_fused_moe that say which weights it has
    tuned: ClassVar[bool]  # whether flashinfer's autotuner has a choice
    VERSION: ClassVar[str] = "0.6.11.post1"

    @classmethod
    def missing(cls, device: str) -> str | None:
        if device != "cuda" or torch.cuda.get_device_capability()[0] != 9:
            return "needs a Hopper GPU"
        spec = find_spec("flashinfer")
        if spec is None:
            return "flashinfer-python is not installed"
        try:
            found = version("flashinfer-python")
        except PackageNotFoundError:
            found = "an unknown version"
        if found != cls.VERSION:
            return f"is written for flashinfer {cls.VERSION}, found {found}"
        built = Path("data", "aot", "fused_moe_90", "fused_moe_90.so")
        if not any(Path(folder, built).exists() for folder in spec.submodule_search_locations or []):
            return "its module fused_moe_90 is not built, and would take most of an hour to compile at the first call"
        return None

    def __init__(self, shape: Shape, weights: Sequence[Weights]):
        super().__init__(shape, weights)
        ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)  # the module has symbols of the driver and does not load it
        from flashinfer.autotuner import autotune
        from flashinfer.fused_moe import core, cutlass_fused_moe

        self.run, self.autotune, self.core = cutlass_fused_moe, autotune, core
        self.hidden, self.intermediate = aligned(shape.hidden), aligned(shape.intermediate)
        self.options = [{**self._operands(item), **self._swiglu(item.w13.codes.device)} for item in weights]

    @abstractmethod
    def _operands(self, item: Weights) -> dict[str, Any]:
        """Returns weights, scales and biases as cutlass_fused_moe takes them: w13 as [up; gate]."""

    def same_layer(self) -> bool:
        return not self.shape.situ

    def _swiglu(self, device: torch.device) -> dict[str, Tensor]:
        if "limit" not in self.shape.options:
            return {}
        given = {"alpha": 1.0, "beta": 0.0, **self.shape.options}
        return {
            f"swiglu_{name}": torch.full((self.shape.experts,), given[name], device=device)
            for name in ("alpha", "beta", "limit")
        }

    def layer(self, index: int, inputs: Inputs) -> Tensor:
        raise NotImplementedError("runs by calls(), which tunes and compiles")

    def calls(self, inputs: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        hidden, tokens = self.shape.hidden, inputs[0].x.shape[0]

        def call(item: Inputs, options: dict[str, Any]) -> Callable[[], Tensor]:
            scales, ids = choose(item, self.shape.top_k)
            x = pad(item.x, (0, self.hidden - hidden))
            out = torch.empty_like(x)
            run = functools.partial(
                self.run,
                input=x,
                token_selected_experts=ids.int().contiguous(),
                token_final_scales=scales.contiguous(),
                output_dtype=x.dtype,
                output=out,
                tune_max_num_tokens=1 << (tokens - 1).bit_length(),
                **self.flags,
                **options,
            )

            def layer() -> Tensor:
                with torch.inference_mode():
                    run()
                return out[:, :hidden]

            return layer

        calls = [call(item, options) for item, options in zip(inputs, self.options, strict=True)]
        with self.autotune(self.tuned):
            calls[0]()
        return calls


class FlashinferCutlass(CutlassFusedMoe):
    """MXFP4 (use_w4_group_scaling=True) as SGLang calls it, after flashinfer's own autotuning."""

    name = "flashinfer-cutlass"
    formats = ("mxfp4",)
    flags: ClassVar[dict[str, bool]] = {"use_w4_group_scaling": True}
    tuned = True

    def _operands(self, item: Weights) -> dict[str, Any]:
        up, rows, hidden = self._up, self.intermediate, self.hidden
        values = self.core.interleave_moe_weights_for_sm90_mixed_gemm
        scales = self.core.interleave_moe_scales_for_sm90_mixed_gemm
        operands: dict[str, Any] = {
            "fc1_expert_weights": values(up(item.w13.codes, hidden // 2)),
            "fc2_expert_weights": values(padded(item.w2.codes, hidden, rows // 2)),
            "quant_scales": [
                scales(up(item.w13.scales, hidden // 32)).view(torch.int32),
                scales(padded(item.w2.scales, hidden, rows // 32)).view(torch.int32),
            ],
        }
        if item.b13 is not None and item.b2 is not None:
            operands["fc1_expert_biases"] = up(item.b13[..., None], 1)[..., 0].contiguous()
            operands["fc2_expert_biases"] = padded(item.b2[..., None], hidden, 1)[..., 0].contiguous()
        return operands

    def _up(self, tensor: Tensor, columns: int) -> Tensor:
        return up_gate(tensor, self.intermediate, columns, interleaved=self.shape.gpt_oss)


class FlashinferFp8(CutlassFusedMoe):
    """e4m3 weights with block scales (use_deepseek_fp8_block_scale=True). Top-k is made before the clock starts, as for
    MXFP4. The call sorts and quantises bf16 rows itself. Its GEMMs are DeepGEMM's, compiled with nvcc at the first call
    with a shape if flashinfer finds none compiled. They have nothing to tune.
    """

    name = "flashinfer-fp8"
    formats = ("fp8_block",)
    most_error = MOST_ERROR
    flags: ClassVar[dict[str, bool]] = {"use_deepseek_fp8_block_scale": True}
    tuned = False

    def _operands(self, item: Weights) -> dict[str, Any]:
        up_first = functools.partial(up_gate, interleaved=False)
        rows, hidden = self.intermediate, self.hidden
        codes = up_first(item.w13.codes.view(torch.uint8), rows, hidden)
        return {
            "fc1_expert_weights": codes.view(item.w13.codes.dtype),
            "fc2_expert_weights": item.w2.codes,
            "quant_scales": [up_first(item.w13.scales, rows // GROUP, hidden // GROUP), item.w2.scales],
        }

    def calls(self, inputs: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        for item in inputs:
            ids = choose(item, self.shape.top_k)[1].sort(dim=1).values
            if bool((ids[:, 1:] == ids[:, :-1]).any()):
                raise NotImplementedError("counts an expert once a token: a second slot of it would be read unwritten")
        return super().calls(inputs)
