"""Humming's packed MoE GEMMs (humming-kernels), called as SGLang's Humming backend calls them.

Routing is ours (`oxmoe.topk`, `oxmoe.sort_by_expert`) with one Triton kernel that pads each expert's slots to Humming's
blocks: three launches, as SGLang's top-k and alignment are. Then come GEMM1, Humming's own process_input as the
activation (and quantiser), GEMM2 and a weighted sum. Tunings are Humming's own choice for the number of rows.

For each cell two or three variants are tried and the fastest counts. "indexed" has SGLang's padding of the weights to
256 x 128, or less if that pads. From 1024 tokens on there is also "contiguous", whose rows are scattered before GEMM1.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import oxmoe
from oxmoe.formats.int4 import Experts as Int4
from oxmoe.testing import graph_time_us
from oxmoe.tools.bench.backend import Backend
from oxmoe.tools.bench.layers import Inputs, Mxfp4, Mxfp8, Nvfp4, Shape, Weights

VERSIONS = ("0.1.19", "0.1.20")
PADS = (256, 128)  # SGLang's: rows and columns of a matrix are padded to multiples of them
GEMMS = {"indexed": "indexed", "contiguous": "grouped_contiguous", "masked": "grouped_masked"}
MANY = 1024  # from this number of tokens on contiguous rows are tried
# The bar of the error's relative norm if activations are e4m3, which Humming rounds at another place than the
# reference.
E4M3_ERROR = 5e-2


def release() -> str:
    """Returns the version of humming-kernels that is installed."""
    try:
        return version("humming-kernels")
    except PackageNotFoundError:
        return "an unknown version"


def missing(device: str) -> str | None:
    if device != "cuda":
        return "needs a GPU"
    if find_spec("humming") is None:
        return "humming is not installed (PyPI: humming-kernels)"
    found = release()
    return None if found in VERSIONS else f"is written for humming-kernels {' and '.join(VERSIONS)}, found {found}"


def prepare_environment() -> None:
    """Sets the environment before humming is imported: no builds in the background, and NVRTC's libraries for its
    compilers."""
    os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"
    toolkit = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda", "lib64")
    folders = [toolkit, Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "lib"]
    before = os.environ.get("LD_LIBRARY_PATH")
    kept = [str(folder) for folder in folders if folder.is_dir() and str(folder) not in (before or "").split(":")]
    os.environ["LD_LIBRARY_PATH"] = ":".join([*kept, *([before] if before else [])])


def packed_zeros(zeros: Tensor) -> Tensor:
    """Packs zero points uint8 [E, R, G] to int32 [E, R / 8, G]: eight rows a word, the first in the low bits."""
    eights = zeros.unflatten(1, (-1, 8)).to(torch.int64)
    shifts = torch.arange(0, 32, 4, device=zeros.device)[None, None, :, None]
    words = (eights << shifts).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def schema_config(weights: Any) -> dict[str, Any]:
    """Returns the checkpoint's quantization config, of which Humming makes its schema."""
    if isinstance(weights, Mxfp4):
        return {"quant_method": "mxfp4"}
    if isinstance(weights, (Nvfp4, Mxfp8)):
        return {"quant_method": "modelopt", "quant_algo": "nvfp4" if isinstance(weights, Nvfp4) else "mxfp8"}
    columns = 2 * weights.codes.shape[2]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "type": "int",
        "num_bits": 4,
        "strategy": "group",
        "group_size": columns // weights.scales.shape[2],
        "symmetric": weights.zeros is None,
    }


def checkpoint_tensors(weights: Any, bias: Tensor | None) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint of that schema."""
    tensors = {"weight": weights.codes, "weight_scale": weights.scales}
    if isinstance(weights, Nvfp4):
        tensors["weight_scale_2"] = torch.full((len(weights.codes),), weights.factor, device=weights.codes.device)
    if isinstance(weights, Int4):
        tensors = {"weight_packed": weights.codes.view(torch.int32), "weight_scale": weights.scales}
        if weights.zeros is not None:
            tensors["weight_zero_point"] = packed_zeros(weights.zeros)
    return tensors if bias is None else {**tensors, "bias": bias}


def activation(shape: Shape) -> dict[str, str]:
    """Returns options of process_input; a is the gate, b is up."""
    if shape.situ:
        bounds = {"a": float(shape.options["situ_beta"]), "b": float(shape.options["situ_linear_beta"])}
        gate, up = (f"{bound}f * tanhf({name} / {bound}f)" for name, bound in bounds.items())
        return {"activation_type": "binary_split", "activation_impl": f"{gate} / (1.0f + __expf(-a)) * ({up})"}
    limit, alpha, beta = (shape.options.get(name) for name in ("limit", "alpha", "beta"))
    gate, up = "a", "b"
    if limit is not None:
        gate, up = f"fminf(a, {float(limit)}f)", f"fminf(fmaxf(b, {-float(limit)}f), {float(limit)}f)"
    if beta is not None:
        up = f"({up} + {float(beta)}f)"
    text = f"{gate} / (1.0f + __expf({-float(alpha or 1.0)}f * {gate})) * {up}"
    return {"activation_type": "binary_interleaved" if shape.gpt_oss else "binary_split", "activation_impl": text}


def make_module(shape: Shape, weights: Weights, pads: tuple[int, int], rounded: bool) -> Any:
    """Makes a layer of a checkpoint's tensors as SGLang's prepare_humming_moe_layer does. rounded: activations are
    e4m3."""
    prepare_environment()
    from humming.layer import HummingMethod
    from humming.schema import BaseWeightSchema, HummingInputSchema

    module: Any = torch.nn.Module()
    given = {"w13": (weights.w13, weights.b13), "w2": (weights.w2, weights.b2)}
    sizes = {"w13": (2 * shape.intermediate, shape.hidden), "w2": (shape.hidden, shape.intermediate)}
    for name, (rows, columns) in sizes.items():
        schema, tensors = BaseWeightSchema.from_config(schema_config(given[name][0])).convert_humming(
            tensors=checkpoint_tensors(*given[name]),
            shape_n_stacks=[rows // 2] * 2 if name == "w13" else [rows],
            shape_k_stacks=[columns],
            num_experts=shape.experts,
            param_dtype=torch.bfloat16,
        )
        for key, tensor in tensors.items():
            setattr(module, f"{name}_{key}", torch.nn.Parameter(tensor, requires_grad=False))
        HummingMethod.prepare_layer_meta(
            layer=module,
            shape_n=rows,
            shape_k=columns,
            pad_n_to_multiple=pads[0],
            pad_k_to_multiple=pads[1],
            input_schema=HummingInputSchema(a_dtype="float8e4m3") if rounded else HummingInputSchema(),
            weight_schema=schema,
            has_bias=given[name][1] is not None,
            num_experts=shape.experts,
            torch_dtype=torch.bfloat16,
            sublayer_name=name,
        )
        HummingMethod.transform_humming_layer(module, sublayer_name=name)
    module.register_buffer("locks", torch.zeros(16384, dtype=torch.int32, device=module.w13_weight.device))
    return module


def compute_config(gemm: str) -> str:
    return json.dumps({"use_f16_accum": False, "gemm_type": GEMMS[gemm]})


def tuning_config(meta: Any, gemm: str, rows: int) -> dict[str, Any]:
    """Returns Humming's own choice for this number of rows of all experts."""
    from humming.config import GemmType
    from humming.tune import get_heuristics_config

    return dict(get_heuristics_config(meta, shape_m=rows, gemm_type=GemmType(GEMMS[gemm])))


def compile_kernels(metas: dict[str, Any], gemms: Sequence[tuple[str, int]]) -> None:
    """Compiles the GEMMs for these (kind, rows of all experts) on all cores, into Humming's cache on disk."""
    from humming.kernel.humming import HummingKernel

    kernels: dict[str, dict[str, Any]] = {}
    for gemm, rows in gemms:
        for meta in metas.values():
            tuning = json.loads(json.dumps(tuning_config(meta, gemm, rows)))
            merged = {**json.loads(meta.to_str()), **json.loads(compute_config(gemm)), **tuning}
            merged = {name: value for name, value in merged.items() if name not in ("num_sms", "sublayer_name")}
            kernels[json.dumps(merged, sort_keys=True)] = merged

    def compiled(arguments: dict[str, Any]) -> None:
        with torch.cuda.device(torch.cuda.current_device()):
            HummingKernel(**arguments)

    with concurrent.futures.ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
        for done in [pool.submit(compiled, arguments) for arguments in kernels.values()]:
            done.exception()  # a kernel that does not compile fails again where it is called, and says why


@dataclass(frozen=True)
class Variant:
    gemm: str
    pads: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.gemm}, weights padded to {self.pads[0]} x {self.pads[1]}"


def variants(shape: Shape, tokens: int) -> list[Variant]:
    """Returns the variants that are tried."""
    tried = [Variant("indexed", PADS)]
    padded = any(rows % PADS[0] or columns % PADS[1] for rows, columns in _matrices(shape))
    if padded and not any(rows % 128 or columns % 64 for rows, columns in _matrices(shape)):
        tried.append(Variant("indexed", (128, 64)))
    return [*tried, *([Variant("contiguous", PADS)] if tokens >= MANY else [])]


def _matrices(shape: Shape) -> tuple[tuple[int, int], tuple[int, int]]:
    return (2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)


class _Routed:
    """The calls of one variant at one number of tokens. The layers share buffers, as in a server."""

    def __init__(self, shape: Shape, variant: Variant, modules: list[Any], inputs: Sequence[Inputs], rounded: bool):
        from humming.layer import HummingMethod

        from oxmoe.tools.bench import humming_kernels

        self.method, self.kernels = HummingMethod, humming_kernels
        self.shape, self.variant, self.modules, self.inputs, self.rounded = shape, variant, modules, inputs, rounded
        x = inputs[0].x
        self.tokens, self.slots = x.shape[0], x.shape[0] * shape.top_k
        tunings = {
            name: tuning_config(modules[0].humming_metas[name], variant.gemm, self.slots) for name in ("w13", "w2")
        }
        self.blocks = {name: tuning["block_shape"][0] for name, tuning in tunings.items()}
        self.tuning = {name: json.dumps(tuning) for name, tuning in tunings.items()}
        self.compute, self.activation = compute_config(variant.gemm), activation(shape)
        as_multiplied = torch.float8_e4m3fn if rounded else torch.bfloat16
        new = functools.partial(torch.empty, device=x.device)
        self.sums = new(self.slots, 2 * shape.intermediate, dtype=torch.bfloat16)
        self.hidden = new(self.slots, shape.intermediate, dtype=as_multiplied)
        self.rows = new(self.slots, shape.hidden, dtype=torch.bfloat16)
        scattered = variant.gemm == "contiguous"
        self.given = new(self.slots if scattered else self.tokens, shape.hidden, dtype=as_multiplied)
        self.outs = [torch.empty_like(item.x) for item in inputs]

    def route(self, index: int) -> tuple[Tensor, Tensor | None, dict[str, dict[str, Any]]]:
        """Returns (weights of the slots, rows of the slots, each GEMM's options that describe the experts' rows)."""
        shape, item = self.shape, self.inputs[index]
        if item.chosen is None:
            weights, ids = oxmoe.topk(item.router_logits, shape.top_k, **item.router)
        else:
            weights, ids = item.chosen
        _, offsets, places, order = oxmoe.sort_by_expert(ids, shape.experts)
        if self.variant.gemm == "contiguous":
            return weights, places, {name: {"expert_layout": offsets} for name in self.blocks}
        names = ("sorted_ids", "expert_ids", "num_tokens_padded")
        tables = {
            block: dict(zip(names, self.kernels.aligned(order, offsets, shape.experts, block), strict=True))
            for block in set(self.blocks.values())
        }
        counts = {"w13": shape.top_k, "w2": 1}
        return weights, None, {name: {**tables[self.blocks[name]], "top_k": counts[name]} for name in self.blocks}

    def layer(self, index: int) -> Tensor:
        weights, places, experts = self.route(index)
        module, rows, scales = self.modules[index], self.inputs[index].x, None
        if places is not None or self.rounded:
            scatter: dict[str, Any] = {}
            if places is not None:
                scatter = {"layout": "scatter", "scatter_idx": places.view(self.tokens, self.shape.top_k)}
            rows, _, scales = self.method.may_process_input(
                module, rows, outputs=self.given, sublayer_name="w13", **scatter
            )
        common = {"layer": module, "compute_config": self.compute, "valid_shape_m": self.slots}
        self.method.forward_layer(
            inputs=rows,
            input_scale=scales,
            outputs=self.sums,
            sublayer_name="w13",
            tuning_config=self.tuning["w13"],
            **common,
            **experts["w13"],
        )
        hidden, _, scales = self.method.may_process_input(
            module, self.sums, outputs=self.hidden, sublayer_name="w2", **self.activation
        )
        self.method.forward_layer(
            inputs=hidden,
            input_scale=scales,
            outputs=self.rows,
            sublayer_name="w2",
            tuning_config=self.tuning["w2"],
            **common,
            **experts["w2"],
        )
        return self.kernels.weighted_sum(self.rows, weights, places, self.outs[index])

    def calls(self) -> list[Callable[[], Tensor]]:
        return [functools.partial(self.layer, index) for index in range(len(self.modules))]


class Humming(Backend):
    name = "humming"
    formats = ("mxfp4", "mxfp4-a8", "mxfp8", "nvfp4", "int4", "int4-zeros")

    @classmethod
    def missing(cls, device: str) -> str | None:
        return missing(device)

    def __init__(self, shape: Shape, weights: Sequence[Weights]):
        super().__init__(shape, weights)
        self.rounded = weights[0].activation_dtype is not None
        if self.rounded:
            self.most_error = E4M3_ERROR
        self.rounds_activations = not isinstance(weights[0].w13, Mxfp8)
        pads = {variant.pads for variant in variants(shape, MANY)}
        self.modules = {each: [make_module(shape, item, each, self.rounded) for item in weights] for each in pads}

    def prepare(self, tokens: Sequence[int]) -> None:
        for pads, modules in self.modules.items():
            gemms = [
                (variant.gemm, count * self.shape.top_k)
                for count in tokens
                for variant in variants(self.shape, count)
                if variant.pads == pads
            ]
            compile_kernels(modules[0].humming_metas, gemms)

    def layer(self, index: int, inputs: Inputs) -> Tensor:
        raise NotImplementedError("runs by calls(), which chooses the variant")

    def calls(self, inputs: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        made: dict[Variant, list[Callable[[], Tensor]]] = {}
        times: dict[Variant, float] = {}
        failure: Exception | None = None
        for variant in variants(self.shape, inputs[0].x.shape[0]):
            try:
                calls = _Routed(self.shape, variant, self.modules[variant.pads], inputs, self.rounded).calls()
                times[variant] = graph_time_us(calls, replays=5, warmups=1)
                made[variant] = calls
            except Exception as error:  # a variant may not fit this shape
                failure = error
        if not made:
            raise RuntimeError(f"no variant runs: {failure}")
        best = min(times, key=lambda variant: times[variant])
        # int4 weights with a code of -8 stay unsigned numbers; without one Humming packs a sign and a magnitude.
        dtype = self.modules[best.pads][0].humming_metas["w13"].b_dtype
        self.detail = f"humming-kernels {release()}: {best}, as {dtype}"
        return made[best]
