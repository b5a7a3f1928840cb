"""Times moe_masked, the layer on DeepEP's low-latency layout, beside DeepGEMM's and Humming's masked GEMMs.

The layer is one rank's share: x [El, m, H] with the first masked_m[e] rows of each expert valid. Rows come from a
share of m (--fill) or from tokens that every rank sends (--tokens), each to top_k experts drawn at random.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import oxmoe
from oxmoe.formats.drawn import own_formats
from oxmoe.tools.bench import deep_gemm, floors, humming, layers, report
from oxmoe.tools.bench.backend import Oxmoe
from oxmoe.tools.bench.timing import Protocol, fields, times_us

# Formats of weights, by the names of the other benches. Tokens are bf16, except for fp8_block: its tokens are e4m3, as
# DeepEP sends them. fp8_block-bf16 takes bf16 tokens.
FP8_TENSOR = ("fp8_tensor", "fp8_tensor-token", "fp8_tensor-static")
PACKED = ("mxfp4", "mxfp4-a8", "mxfp8", "nvfp4", "nvfp4-a4", *own_formats())
FORMATS = ("bf16", "f16", *PACKED, "fp8_block", "fp8_block-bf16", *FP8_TENSOR)
ROOM = 256  # tokens of a rank that there is room for, if it sends no more
FILL_ROOM = 1024  # m of a layer of which a share is filled
CHECKED = 8192  # rows of a call that are checked, about


@dataclass(frozen=True)
class Layer:
    """One rank's part of a layer with ranks x experts experts."""

    experts: int
    ranks: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def shape(self) -> layers.Shape:
        return layers.Shape(self.experts, 1, self.hidden, self.intermediate)


LAYERS = {
    "dsv3-ep8": Layer(32, 8, 8, 7168, 2048),
    "dsv3-ep2": Layer(128, 2, 8, 7168, 2048),
    "qwen3-30b-ep2": Layer(64, 2, 8, 2048, 768),
}
DEFAULT_LAYERS = ("dsv3-ep8", "dsv3-ep2")
DEFAULT_FILL, DEFAULT_TOKENS = (1.0, 10.0, 100.0), (16, 64, 256)


@dataclass(frozen=True)
class Rows:
    """The operands of one call."""

    x: Tensor  # [El, m, H]; rows beyond the mask are noise too
    counts: Tensor  # int32 [El]
    expected: int  # rows that an expert is expected to have


Drawn = tuple[int, list[int]]  # m and the rows of each expert
Case = tuple[str, Callable[[Layer, torch.Generator], Drawn]]


def share(layer: Layer, _rng: torch.Generator, percent: float) -> Drawn:
    """Returns a share of m, the same for every expert, at least one row."""
    return FILL_ROOM, [max(1, int(FILL_ROOM * percent / 100))] * layer.experts


def sent(layer: Layer, rng: torch.Generator, tokens: int) -> Drawn:
    """Returns the rows that arrive when every rank sends this many tokens."""
    chosen = torch.rand(layer.ranks * tokens, layer.ranks * layer.experts, generator=rng).topk(layer.top_k).indices
    counts = torch.bincount(chosen.flatten(), minlength=layer.ranks * layer.experts)[: layer.experts]
    return layer.ranks * max(tokens, ROOM), counts.tolist()


def make_rows(layer: Layer, room: int, counts: Sequence[int], expected: int, dtype: torch.dtype, device: str) -> Rows:
    x = torch.randn((layer.experts, room, layer.hidden), dtype=dtype, device=device)
    return Rows(x, torch.tensor(counts, dtype=torch.int32, device=device), expected)


def floors_of(
    layer: Layer, drawn: Sequence[Sequence[int]], format_name: str, weight_bits: float, device: str
) -> floors.Floors | None:
    """Returns the mean floors of several layers whose experts have these rows; None on a CPU."""
    known = floors.ceilings(device)
    if known is None:
        return None
    sent_as_bf16 = format_name != "fp8_block"

    def of_one(counts: Sequence[int]) -> floors.Floors:
        rows, active = sum(counts), sum(count > 0 for count in counts)
        sizes = layer.hidden, layer.intermediate, active
        call = floors.Call(rows, rows, *sizes, combined=False, bf16_x=sent_as_bf16)
        return floors.floors(call, format_name.removesuffix("-bf16"), weight_bits, known)

    return floors.mean([of_one(counts) for counts in drawn])


class Backend:
    """A way to run the layer on rows in expert order."""

    name: ClassVar[str]
    formats: ClassVar[tuple[str, ...]] = ("fp8_block",)
    excludes: ClassVar[str | None] = None  # the work that ours contains and this one does not
    most_error: float = deep_gemm.MOST_ERROR  # relative norm that a peer's error stays below
    rounds_activations = True  # whether it rounds them as the reference does; False: MXFP8's stay in bf16
    detail: str | None = None  # what ran, for the record

    def __init__(self, layer: Layer, weights: Sequence[layers.Weights], format_name: str):
        self.layer, self.weights, self.format = layer, weights, format_name

    @classmethod
    def missing(cls, device: str) -> str | None:
        """Returns why the backend cannot run here, or None if it can."""
        return deep_gemm.missing(device)

    def call(self, index: int, rows: Rows) -> Callable[[], Tensor]:
        """Returns a call that can be captured and returns [El, m, H]."""
        raise NotImplementedError


class Ours(Backend):
    name = Oxmoe.name
    formats = FORMATS

    @classmethod
    def missing(cls, device: str) -> str | None:
        return None

    def __init__(self, layer: Layer, weights: Sequence[layers.Weights], format_name: str):
        super().__init__(layer, weights, format_name)
        self.experts = Oxmoe(layer.shape, weights).experts
        self.room: Tensor | None = None

    def workspace(self, experts: oxmoe.ExpertWeights, rows: int, device: torch.device) -> Tensor:
        """Returns the workspace, which all layers share."""
        size = oxmoe.masked_workspace_bytes(experts, rows)
        if self.room is None or self.room.numel() < size + 256:
            self.room = torch.empty(size + 256, dtype=torch.uint8, device=device)
        start = -self.room.data_ptr() % 256
        return self.room[start : start + size]

    def call(self, index: int, rows: Rows) -> Callable[[], Tensor]:
        experts, x, scale = self.experts[index], rows.x, None
        if self.format == "fp8_block":
            x, scale = deep_gemm.quantised(rows.x)
        out = torch.empty_like(rows.x)
        workspace = self.workspace(experts, rows.x.shape[0] * rows.x.shape[1], out.device)

        def run() -> Tensor:
            return oxmoe.moe_masked(
                x, experts, rows.counts, x_scale=scale, expected_m=rows.expected, out=out, workspace=workspace
            )

        return run


class DeepGemmMasked(Backend):
    """Two calls of DeepGEMM's masked GEMM; GEMM2's input is made before the clock runs."""

    name = "deep-gemm"
    excludes: ClassVar[str | None] = "activation, quantisation"

    def __init__(self, layer: Layer, weights: Sequence[layers.Weights], format_name: str):
        super().__init__(layer, weights, format_name)
        self.gemm = deep_gemm.gemm("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked")

    def call(self, index: int, rows: Rows) -> Callable[[], Tensor]:
        weights, (experts, room, _) = self.weights[index], rows.x.shape
        w13, w2 = ((w.codes, w.scales) for w in (weights.w13, weights.w2))
        tokens, out = deep_gemm.quantised(rows.x), torch.empty_like(rows.x)
        sums = out.new_zeros((experts, room, 2 * self.layer.intermediate))
        self.gemm(tokens, w13, sums, rows.counts, rows.expected)
        hidden = deep_gemm.quantised(layers.activated(sums.float(), self.layer.shape).to(sums.dtype))

        def run() -> Tensor:
            self.gemm(tokens, w13, sums, rows.counts, rows.expected)
            self.gemm(hidden, w2, out, rows.counts, rows.expected)
            return out

        return run


class SglangDeepGemm(DeepGemmMasked):
    """The whole layer: DeepGEMM's masked GEMMs, with SGLang's masked activation and quantiser (Triton) between them."""

    name = "sglang-deep-gemm"
    excludes = None

    @classmethod
    def missing(cls, device: str) -> str | None:
        from importlib.util import find_spec

        return deep_gemm.missing(device) or (None if find_spec("sglang") else "sglang is not installed")

    def __init__(self, layer: Layer, weights: Sequence[layers.Weights], format_name: str):
        super().__init__(layer, weights, format_name)
        from sglang.srt.layers.moe.ep_moe.kernels import silu_and_mul_masked_post_quant_fwd

        self.activate = silu_and_mul_masked_post_quant_fwd

    def call(self, index: int, rows: Rows) -> Callable[[], Tensor]:
        weights, (experts, room, _) = self.weights[index], rows.x.shape
        w13, w2 = ((w.codes, w.scales) for w in (weights.w13, weights.w2))
        tokens, out = deep_gemm.quantised(rows.x), torch.empty_like(rows.x)
        sums = out.new_empty((experts, room, 2 * self.layer.intermediate))
        codes = sums.new_zeros((experts, room, self.layer.intermediate), dtype=torch.float8_e4m3fn)
        scales = deep_gemm.column_major(
            torch.zeros((experts, room, self.layer.intermediate // deep_gemm.GROUP), device=out.device)
        )

        def run() -> Tensor:
            self.gemm(tokens, w13, sums, rows.counts, rows.expected)
            self.activate(sums, codes, scales, deep_gemm.GROUP, rows.counts)
            self.gemm((codes, scales), w2, out, rows.counts, rows.expected)
            return out

        return run


class HummingMasked(Backend):
    """The whole layer: Humming's masked GEMMs, with its own activation between them."""

    name = humming.Humming.name
    formats = ("mxfp4", "mxfp8", "nvfp4", "int4", "int4-zeros")
    most_error = humming.Humming.most_error

    @classmethod
    def missing(cls, device: str) -> str | None:
        return humming.missing(device)

    def __init__(self, layer: Layer, weights: Sequence[layers.Weights], format_name: str):
        super().__init__(layer, weights, format_name)
        self.rounds_activations = format_name != "mxfp8"
        self.detail = f"humming-kernels {humming.release()}"
        self.modules = [humming.make_module(layer.shape, item, humming.PADS, False) for item in weights]

    def call(self, index: int, rows: Rows) -> Callable[[], Tensor]:
        from humming.layer import HummingMethod

        layer, module, metas = self.layer, self.modules[index], self.modules[index].humming_metas
        total, valid = rows.x.shape[0] * rows.x.shape[1], rows.expected * layer.experts
        humming.compile_kernels(metas, [("masked", valid)])
        tunings = {name: json.dumps(humming.tuning_config(metas[name], "masked", valid)) for name in ("w13", "w2")}
        x, out = rows.x.view(total, layer.hidden), torch.empty_like(rows.x)
        sums, hidden = (x.new_empty((total, times * layer.intermediate)) for times in (2, 1))
        activation = humming.activation(layer.shape)
        options = {
            **{"layer": module, "compute_config": humming.compute_config("masked")},
            **{"valid_shape_m": valid, "expert_layout": rows.counts},
        }

        def run() -> Tensor:
            HummingMethod.forward_layer(
                inputs=x, outputs=sums, sublayer_name="w13", tuning_config=tunings["w13"], **options
            )
            HummingMethod.may_process_input(
                module,
                sums,
                outputs=hidden,
                sublayer_name="w2",
                layout="grouped_mask",
                expert_tokens=rows.counts,
                **activation,
            )
            HummingMethod.forward_layer(
                inputs=hidden, outputs=out.view(x.shape), sublayer_name="w2", tuning_config=tunings["w2"], **options
            )
            return out

        return run


PEERS: dict[str, type[Backend]] = {peer.name: peer for peer in (DeepGemmMasked, SglangDeepGemm, HummingMasked)}


def checked(rows: Rows, every: bool) -> tuple[Tensor, Tensor]:
    """Returns (expert, place) of valid rows. Of many rows it takes every third, fifth and so on, unless `every` asks
    for all."""
    valid = torch.arange(rows.x.shape[1], device=rows.x.device)[None, :] < rows.counts[:, None]
    experts, places = valid.nonzero(as_tuple=True)
    step = 1 if every else -(-len(experts) // CHECKED) | 1
    return experts[::step], places[::step]


def expected(layer: Layer, weights: layers.Weights, rows: Tensor, experts: Tensor, *, rounded: bool) -> Tensor:
    """Returns the reference's rows. rounded: see `layers.expected`."""
    ids = experts[:, None].to(torch.int32)
    inputs = layers.Inputs(rows, torch.empty(0), (torch.ones(ids.shape, device=ids.device), ids))
    return layers.expected(layer.shape, weights, inputs, rounded=rounded)


def _line(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


class _Bench:
    def __init__(self, device: str, protocol: Protocol, peers: Sequence[str], environment: dict[str, Any], path: Any):
        self.device, self.protocol, self.environment, self.json_path = device, protocol, environment, path
        self.right = True
        self.said: set[str] = set()
        reasons = {peer: PEERS[peer].missing(device) for peer in peers}
        for peer, reason in reasons.items():
            if reason is not None:
                self.skip(peer, reason)
        self.peers = [peer for peer, reason in reasons.items() if reason is None]

    def skip(self, what: str, reason: str) -> None:
        if what + reason not in self.said:
            self.said.add(what + reason)
            print(f"skipped {what}: {reason}", flush=True)

    def head(self) -> None:
        without = {peer: PEERS[peer].excludes for peer in self.peers}
        names = [f"{peer} (no {what})" if what else peer for peer, what in without.items()]
        heads = ["layer", "format", "rows from", "m", "rows", "oxmoe", *report.FLOORS, *names, "best peer / oxmoe"]
        _line(heads)
        _line(["---"] * len(heads))

    def layer(self, name: str, format_name: str, dtype: torch.dtype, bits: float, cases: Sequence[Case]) -> None:
        layer = LAYERS[name]
        weights = layers.weights_of(format_name, layer.shape, self.device, self.protocol.layers)
        backends: list[Backend] = [Ours(layer, weights, format_name)]
        for peer in self.peers:
            if format_name not in PEERS[peer].formats:
                self.skip(peer, f"has no {format_name} weights")
                continue
            try:
                backends.append(PEERS[peer](layer, weights, format_name))
            except Exception as error:  # a peer is foreign code: whatever it raises is a reason to go on without it
                self.skip(peer, f"does not start: {type(error).__name__}: {error}")
        for case, draw in cases:
            # Rows are the same in every run and for every format, so that times of two builds can be compared.
            rng = torch.Generator().manual_seed(0)
            drawn = [draw(layer, rng) for _ in weights]
            mean = max(1, -(-sum(sum(counts) for _, counts in drawn) // (len(drawn) * layer.experts)))
            given = [make_rows(layer, room, counts, mean, dtype, self.device) for room, counts in drawn]
            least = floors_of(layer, [counts for _, counts in drawn], format_name, bits, self.device)
            self.cell(name, format_name, case, backends, weights, given, least)

    def cell(
        self,
        name: str,
        format_name: str,
        case: str,
        backends: list[Backend],
        weights: list[layers.Weights],
        given: list[Rows],
        least: floors.Floors | None,
    ) -> None:
        # fp8_tensor has one scale for all rows of a call, so the reference needs all rows.
        where, places = f"{name} {format_name} {case}", checked(given[0], every=format_name == "fp8_tensor")
        truths = {
            rounded: expected(LAYERS[name], weights[0], given[0].x[places], places[0], rounded=rounded)
            for rounded in {backend.rounds_activations for backend in backends}
        }
        calls: dict[str, list[Callable[[], Tensor]]] = {}
        for backend in backends:
            try:
                made = [backend.call(index, rows) for index, rows in enumerate(given)]
                result = made[0]()[places]
            except Exception as error:
                if isinstance(backend, Ours) and not isinstance(error, NotImplementedError):
                    raise
                self.skip(f"{backend.name} at {where}", f"failed: {type(error).__name__}: {error}")
                if isinstance(backend, Ours):
                    return
                continue
            truth = truths[backend.rounds_activations]
            if isinstance(backend, Ours):
                wrong = layers.error(result, truth, format_name.removesuffix("-bf16"))
                if wrong is not None:
                    self.right = False
                    print(f"WRONG {where}, not timed: {wrong}", flush=True)
                    return
            else:
                wrong = layers.peer_error(result, truth, backend.most_error)
                if wrong is not None:
                    self.skip(f"{backend.name} at {where}", wrong)
                    continue
            calls[backend.name] = made
        times, failed = times_us(calls, self.device, self.protocol, ours=Ours.name)
        for peer, reason in failed.items():
            self.skip(f"{peer} at {where}", f"failed: {reason}")
        details = {backend.name: backend.detail for backend in backends if backend.detail is not None}
        self.report(name, format_name, case, given, least, times, details)

    def report(
        self,
        name: str,
        format_name: str,
        case: str,
        given: list[Rows],
        least: floors.Floors | None,
        times: dict[str, float],
        details: dict[str, str],
    ) -> None:
        ours, room = times[Ours.name], given[0].x.shape[1]
        rows = sum(int(item.counts.sum()) for item in given) / len(given)
        best = min((us for peer, us in times.items() if peer != Ours.name), default=None)
        _line(
            [
                *(name, format_name, case, str(room), f"{rows:.0f}", f"**{ours:.1f}**"),
                *(["" for _ in range(4)] if least is None else report.shown_floors(ours, least.ideal, least.own)),
                *("" if peer not in times else f"{times[peer]:.1f}" for peer in self.peers),
                "" if best is None else f"{best / ours:.2f}",
            ]
        )
        common = {
            "op": "moe_masked",
            "shape": name,
            **vars(LAYERS[name]),
            "format": format_name,
            "case": case,
            "m": room,
            "rows": rows,
            "floor_us": None if least is None else least.ideal,
            "own_floor_us": None if least is None else least.own,
            "ceilings": floors.described(floors.ceilings(self.device)),
        }
        lines = []
        for backend, us in times.items():
            excludes = PEERS[backend].excludes if backend in PEERS else None
            said = {"excludes": excludes, "detail": details.get(backend)}
            extra = {key: text for key, text in said.items() if text is not None}
            lines.append(
                {**common, "backend": backend, **fields(us), **extra, **vars(self.protocol), **self.environment}
            )
        report.append_json(self.json_path, lines)


def run(
    names: Sequence[str],
    formats: dict[str, tuple[torch.dtype, float]],
    cases: Sequence[Case],
    peers: Sequence[str],
    device: str,
    protocol: Protocol,
    environment: dict[str, Any],
    json_path: str | None,
) -> bool:
    """Prints a Markdown table. Returns whether all of oxmoe's results were right. formats: dtype of tokens and bits of
    a weight."""
    print(", ".join(f"{key} {value}" for key, value in environment.items() if key != "command" and value))
    bench = _Bench(device, protocol, peers, environment, json_path)
    bench.head()
    for format_name, (dtype, bits) in formats.items():
        for name in names:
            bench.layer(name, format_name, dtype, bits, cases)
            if device == "cuda":
                torch.cuda.empty_cache()
    return bench.right
