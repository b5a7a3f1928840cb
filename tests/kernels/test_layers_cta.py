"""Layers of few tokens in one launch, as whole CTAs on the host (host_layers.py): what CTAs hand each other, and when.

Several launches follow each other on one workspace, so that each finds the rows of the one before. Whatever the order
of warps and stores, a launch has the bits that it has alone, and these are near the reference's numbers.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import tie_free_logits
from cta_operands import DTYPES, NAMES, RELU2, SWIGLU, activation, seed_of
from fake_cuda.harness import STRUCTS
from host_layers import HostLayers
from oxmoe import reference
from oxmoe.testing import same_bits

BF16, F32 = torch.bfloat16, torch.float32
# Instances of src/variants/.
KERNELS = {
    "layer_gated": "LayerSm90<__nv_bfloat16, true, 8, 12>",
    "layer_plain": "LayerSm90<__nv_bfloat16, false, 8, 12>",
    "bf16_gated": "RoutedLayerSm90<__nv_bfloat16, true, 8, 8>",
    "bf16_plain": "RoutedLayerSm90<__nv_bfloat16, false, 8, 8>",
    "fp8_gated": "RoutedLayerFp8Sm90<true, 128, 2, true>",
    "fp8_plain": "RoutedLayerFp8Sm90<false, 256, 1, true>",
    "fp8_gated_any": "RoutedLayerFp8Sm90<true, 256, 2, false>",
    "mxfp4_gated": "RoutedLayerPackedSm90<true, mxfp4::Form, 12, 4, 3, 128, true>",
    "mxfp4_plain": "RoutedLayerPackedSm90<false, mxfp4::Form, 12, 4, 3, 128, true>",
    "mxfp4_gated_any": "RoutedLayerPackedSm90<true, mxfp4::Form, 8, 4, 4, 384, false>",
    "mxfp8_gated_any": "RoutedLayerPackedSm90<true, mxfp8::Form, 8, 2, 4, 384, false>",
    "mxfp8_plain_any": "RoutedLayerPackedSm90<false, mxfp8::Form, 8, 2, 4, 384, false>",
    "nvfp4_gated_any": "RoutedLayerPackedSm90<true, nvfp4::Form, 8, 4, 4, 384, false>",
    "int4_gated_any": "RoutedLayerPackedSm90<true, int4::Form<false>, 8, 4, 4, 384, false>",
    "int4_plain_any": "RoutedLayerPackedSm90<false, int4::Form<false>, 8, 4, 4, 384, false>",
}
# GEMMs of separate launches: tokens, consumers, stages and blocks of a stage. Those of 16 bits have tokens, row tiles,
# consumers and stages.
PAIRS = {
    f"{kind}_t{sizes[0]}": f"GroupedGemmPackedSm90<{gate}, {form}, {', '.join(map(str, sizes))}>"
    for kind, gate, form, all_sizes in (
        ("mxfp4_gated", "true", "mxfp4::Form", ((16, 1, 3, 5), (32, 3, 3, 5), (64, 4, 3, 4), (128, 3, 4, 2))),
        ("mxfp4_plain", "false", "mxfp4::Form", ((192, 3, 5, 1),)),
        ("mxfp8_gated", "true", "mxfp8::Form", ((16, 1, 3, 3), (48, 4, 4, 2))),
        ("mxfp8_plain", "false", "mxfp8::Form", ((32, 3, 3, 4),)),
        ("nvfp4_gated", "true", "nvfp4::Form", ((16, 2, 3, 5), (80, 3, 4, 3))),
        ("int4_gated", "true", "int4::Form<false>", ((48, 4, 3, 4),)),
        ("int4_plain", "false", "int4::Form<false>", ((32, 2, 2, 5),)),
    )
    for sizes in all_sizes
} | {
    f"bf16_{kind}_t{sizes[0]}": f"GroupedGemmSm90<__nv_bfloat16, {gate}, {', '.join(map(str, sizes))}>"
    for kind, gate in (("gated", "true"), ("plain", "false"))
    for sizes in ((16, 1, 2, 5), (64, 1, 2, 4))
}  # fmt: skip
LAUNCH = 1024  # what a launch adds to either of its counters
GUARD = 3  # rows behind outputs that nobody may write


@dataclasses.dataclass
class Case:
    kernel: str
    tokens: int
    top_k: int
    hidden: int
    intermediate: int
    ids: torch.dtype | None = None  # of given ids; none: from router logits
    experts: int = 5
    bias: torch.dtype | None = None
    repeats: bool = False  # a token names an expert twice
    rank: bool = False  # the layer has some of the experts
    padded: bool = False  # the last token is padding
    grid: int = 5
    launches: int = 3

    @property
    def form(self) -> str:
        """Returns the format of the weights."""
        return self.kernel.split("_")[0].replace("layer", "bf16")

    @property
    def routes(self) -> bool:
        """Whether the kernel makes the tables of slots and tiles."""
        return "layer" not in self.kernel

    @property
    def gated(self) -> bool:
        return "gated" in self.kernel

    @property
    def all_experts(self) -> int:
        return 2 * self.experts if self.rank else self.experts


I32, I64 = torch.int32, torch.int64
# Rows and K end inside blocks. A CTA of a packed form has at least as many units of GEMM2 as there are tiles.
CASES = {
    "layer": Case("layer_gated", 3, 3, 144, 136, I32, bias=BF16, rank=True),
    "layer-repeats": Case("layer_gated", 6, 3, 80, 72, I32, bias=F32, experts=3, repeats=True, grid=9),
    "layer-plain": Case("layer_plain", 4, 1, 208, 80, I32),
    "bf16": Case("bf16_gated", 2, 2, 144, 72, bias=BF16),
    "bf16-ids": Case("bf16_gated", 3, 3, 80, 72, I64, rank=True),
    "bf16-repeats": Case("bf16_gated", 2, 3, 144, 136, I32, bias=F32, repeats=True),
    "bf16-plain": Case("bf16_plain", 4, 1, 144, 80, padded=True),
    "fp8": Case("fp8_gated", 2, 2, 256, 256),
    "fp8-ids": Case("fp8_gated_any", 3, 2, 256, 512, I32, rank=True, repeats=True),
    "fp8-plain": Case("fp8_plain", 1, 3, 512, 256, bias=F32),
    "fp8-two-ctas": Case("fp8_gated", 2, 3, 512, 256, I64, experts=8, grid=2, launches=2),
    "mxfp4": Case("mxfp4_gated", 1, 3, 192, 96, bias=BF16),
    "mxfp4-padded": Case("mxfp4_gated", 2, 2, 96, 352, padded=True, grid=4),
    "mxfp4-ids": Case("mxfp4_gated_any", 2, 2, 320, 64, I64, rank=True),
    "mxfp4-idle": Case("mxfp4_gated", 1, 2, 352, 32, grid=6),
    "mxfp4-plain": Case("mxfp4_plain", 2, 2, 160, 96, I32, repeats=True, bias=F32),
    "mxfp8": Case("mxfp8_gated_any", 2, 2, 160, 96, bias=BF16, grid=4),
    "mxfp8-ids": Case("mxfp8_gated_any", 2, 3, 96, 160, I64, repeats=True, rank=True, grid=6),
    "mxfp8-idle": Case("mxfp8_gated_any", 1, 2, 352, 32, grid=6),
    "mxfp8-plain": Case("mxfp8_plain_any", 3, 1, 352, 64, grid=3, padded=True),
    "nvfp4": Case("nvfp4_gated_any", 2, 2, 160, 96, bias=BF16, grid=4),
    "int4-ids": Case("int4_gated_any", 2, 3, 96, 160, I32, repeats=True, grid=6),
    "int4-plain": Case("int4_plain_any", 3, 1, 352, 64, grid=3),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostLayers:
    return HostLayers(tmp_path_factory.mktemp("layers_cta"), KERNELS, pairs=PAIRS)


class Matrix:
    """Weights [experts, rows, k] of a form, as a kernel reads them and as plain numbers."""

    def __init__(self, kernels: HostLayers, form: str, shape: tuple[int, int, int], gated: bool, rng: torch.Generator):
        experts, rows, k = shape
        self.scales, self.factors, self.block_scales = None, None, None
        if form == "bf16":
            self.held = self.numbers = (torch.randn(shape, generator=rng) / k**0.5).bfloat16()
            return
        if form == "fp8":
            self.held = self.numbers = (torch.randn(shape, generator=rng) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
            size = (experts, rows // 128, k // 128)
            self.scales = self.block_scales = (torch.rand(size, generator=rng) + 0.5) / (60 * k**0.5)
            return
        if form == "mxfp8":
            self.numbers = (torch.randn(shape, generator=rng) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
            self.scales = torch.randint(116, 119, (experts, rows, k // 32), generator=rng, dtype=torch.uint8)
            self.factors = torch.ones(experts)
            codes, scales = self.numbers.view(torch.uint8), self.scales.to(torch.int16)
            self.held, self.block_scales = kernels.pack(form, codes, scales, gated)
            return
        codes = torch.randint(16, shape, generator=rng, dtype=torch.uint8)
        pairs = codes[..., 0::2] | codes[..., 1::2] << 4
        self.factors = torch.ones(experts)
        if form == "mxfp4":
            scales = torch.randint(122, 127, (experts, rows, k // 32), generator=rng)
            self.numbers = reference.mxfp4_weights(pairs, scales.to(torch.uint8))
        elif form == "nvfp4":
            values = (torch.rand((experts, rows, k // 16), generator=rng) / 16 + 0.02).to(torch.float8_e4m3fn)
            scales = values.view(torch.uint8)
            # Gate rows and up rows have factors of their own: powers of two, so that bf16 holds the products.
            parts = torch.exp2(torch.randint(-2, 2, (experts, 2 if gated else 1), generator=rng).float())
            self.factors = (128 * parts).contiguous()
            of_rows = parts.repeat_interleave(rows // parts.shape[1], dim=1)
            self.numbers = (reference.nvfp4_numbers(pairs, values) * of_rows[..., None]).bfloat16()
        else:
            values = ((torch.rand((experts, rows, k // 32), generator=rng) + 0.5) / 32).bfloat16()
            scales = values.view(torch.int16)
            self.numbers = reference.int4_weights(pairs, values)
        self.held, self.block_scales = kernels.pack(form, codes, scales.to(torch.int16).contiguous(), gated)


@dataclasses.dataclass
class Call:
    """What one launch of a chain gets and gives."""

    x: Tensor
    logits: Tensor | None
    ids: Tensor
    weights: Tensor
    out: Tensor
    expected: Tensor
    valid: Tensor | None


class Layer:
    """A layer's weights, the workspace that its launches share, and the calls."""

    def __init__(self, kernels: HostLayers, case: Case, rng: torch.Generator) -> None:
        self.kernels, self.case = kernels, case
        rows = case.intermediate * (2 if case.gated else 1)
        self.up = Matrix(kernels, case.form, (case.experts, rows, case.hidden), case.gated, rng)
        self.down = Matrix(kernels, case.form, (case.experts, case.hidden, case.intermediate), False, rng)
        self.biases: list[Tensor | None] = [None, None]
        if case.bias:
            sizes = (rows, case.hidden)
            self.biases = [torch.randn((case.experts, size), generator=rng).to(case.bias) for size in sizes]
        self.calls = [self.draw(rng) for _ in range(case.launches)]

    def draw(self, rng: torch.Generator) -> Call:
        case, first = self.case, self.case.experts if self.case.rank else 0
        size, experts = (case.tokens, case.top_k), case.all_experts
        x = torch.randn((case.tokens, case.hidden), generator=rng).bfloat16()
        logits, valid = None, None
        if case.ids is None:
            logits = tie_free_logits(case.tokens, experts, rng, step=1 / 4).bfloat16()
            ids = logits.float().topk(case.top_k).indices
            weights = logits.float().gather(1, ids).softmax(-1)
            if case.padded:
                valid = torch.tensor([case.tokens - 1], dtype=I32)
                ids[-1] = -1
        else:
            ids = torch.stack([torch.randperm(experts, generator=rng)[: case.top_k] for _ in range(case.tokens)])
            if case.repeats:
                ids[0, -1] = ids[0, 0]
                ids[-1, 0] = -1
            weights = torch.rand(size, generator=rng) + 0.1
        scales = {"w13_scale": self.up.scales, "w2_scale": self.down.scales}
        expected = reference.moe(
            x, self.up.numbers, self.down.numbers, weights, torch.where(ids >= first, ids - first, -1),
            b13=self.biases[0], b2=self.biases[1], activation=NAMES[SWIGLU if case.gated else RELU2],
            gated=case.gated, **scales,
        )  # fmt: skip
        out = torch.empty((case.tokens + GUARD, case.hidden), dtype=BF16)
        return Call(x, logits, ids.to(case.ids or I32), weights, out, expected, valid)

    def workspace(self) -> None:
        """Makes a workspace that holds the rows of an earlier layer."""
        case, slots = self.case, self.case.tokens * self.case.top_k
        columns = {"inner": case.intermediate, "rows": case.hidden}
        self.rows = {name: torch.ones((slots + GUARD, size), dtype=BF16) for name, size in columns.items()}
        self.counters = torch.zeros(2, dtype=I32)
        self.kept: list[dict[str, Tensor]] = []  # until the launches have run

    def gemm(self, matrix: Matrix, x: Tensor, out: Tensor, bias: Tensor | None, **others: Any) -> Any:
        _, rows, k = matrix.numbers.shape
        scales, factors = (0 if t is None else t.data_ptr() for t in (matrix.block_scales, matrix.factors))
        return STRUCTS["GroupedGemmParams"](
            x=x.data_ptr(), weights=matrix.held.data_ptr(), block_scales=scales, expert_scales=factors,
            bias=0 if bias is None else bias.data_ptr(), bias_dtype=DTYPES[self.case.bias or F32], out=out.data_ptr(),
            rows=rows, k=k // (2 if self.case.form == "fp8" else 1), **others,
        )  # fmt: skip

    def parts(self, call: Call, tables: dict[str, Tensor]) -> dict[str, Any]:
        """Returns the parameters of GEMM1, GEMM2 and combine. `tables` is empty if a kernel makes them."""
        case = self.case
        at = {name: tensor.data_ptr() for name, tensor in tables.items()}
        tiles = {name: at[name] for name in ("tiles", "tile_count") if at}
        up = self.gemm(
            self.up, call.x, self.rows["inner"], self.biases[0], row_divisor=case.top_k, out_columns=case.intermediate,
            activation=activation(SWIGLU if case.gated else RELU2), slot_of_place=at.get("slot_of_place", 0),
            next_unit=at.get("next_unit", 0), **tiles,
        )  # fmt: skip
        down = self.gemm(
            self.down, self.rows["inner"], self.rows["rows"], self.biases[1], row_divisor=1, out_columns=case.hidden,
            activation=activation(0), **tiles,
        )  # fmt: skip
        combine = STRUCTS["CombineParams"](
            y=self.rows["rows"].data_ptr(), weights=call.weights.data_ptr(), out=call.out.data_ptr(),
            tokens=case.tokens, top_k=case.top_k, hidden=case.hidden, scale=1.0, columns=2,
            place_of_slot=at.get("place_of_slot", 0),
        )  # fmt: skip
        return {"up": up, "down": down, "combine": combine}

    def add(self, call: Call, grid: int) -> None:
        """Adds the layer in one launch."""
        case = self.case
        tables = {} if case.routes else self.tables(call, 8)
        counters = {name: tables[name].data_ptr() for name in ("tiles_done", "rows_done") if tables}
        layer = STRUCTS["LayerParams"](**self.parts(call, tables), max_tiles=len(tables.get("tiles", ())), **counters)
        select = STRUCTS["SelectParams"](
            logits=0 if call.logits is None else call.logits.data_ptr(), logits_dtype=DTYPES[BF16], tokens=case.tokens,
            experts=case.all_experts, top_k=case.top_k, renormalize=True, scale=1.0,
            num_token_non_padded=0 if call.valid is None else call.valid.data_ptr(),
            ids=call.ids.data_ptr(), weights=call.weights.data_ptr(),
        )  # fmt: skip
        params = STRUCTS["RoutedLayerParams"](
            layer=layer, select=select, ids_are_i64=case.ids == I64, counters=self.counters.data_ptr(),
            experts=case.experts, first_expert=case.experts if case.rank else 0, extra_rounds=1,
        )  # fmt: skip
        self.kernels.add(case.kernel, grid, params)

    def add_pair(self, call: Call, grid: int, name: str, tile_tokens: int) -> None:
        """Adds a launch of both GEMMs, and one of the combine."""
        tables = self.tables(call, tile_tokens)
        if self.case.form == "mxfp8":  # a launch before rounds x
            call = dataclasses.replace(call, x=reference.mxfp8_rows(call.x).contiguous())
            tables["x"] = call.x
        parts = self.parts(call, tables)
        combine = parts.pop("combine")
        pair = STRUCTS["GemmPairParams"](
            **parts,
            tiles=tables["tiles"].data_ptr(),
            tile_tokens=tile_tokens,
            tile_step=16,
            wave=grid,
            # The maps of 16-bit weights have so many.
            experts=self.case.experts if self.case.form == "bf16" else 0,
        )
        self.kernels.add(name, grid, pair)
        self.kernels.add("combine", 2, combine)

    def tables(self, call: Call, most: int) -> dict[str, Tensor]:
        """Returns the tables of slots, of tiles of at most `most` slots, and the counters."""
        case, first = self.case, self.case.experts if self.case.rank else 0
        local = torch.where(call.ids.flatten() >= first, call.ids.flatten() - first, -1).int()
        order = [slot for expert in range(case.experts) for slot in torch.nonzero(local == expert).flatten().tolist()]
        tiles: list[list[int]] = []
        for place, slot in enumerate(order):
            if not tiles or tiles[-1][0] != int(local[slot]) or tiles[-1][2] == most:
                tiles.append([int(local[slot]), place, 0, 0])
            tiles[-1][2] += 1
        place_of_slot = torch.full_like(local, -1)
        place_of_slot[order] = torch.arange(len(order), dtype=I32)
        tables = {
            "tiles": torch.tensor([*tiles, *[[-1, 0, 0, 0]] * 2], dtype=I32), "place_of_slot": place_of_slot,
            "tile_count": torch.tensor([len(tiles)], dtype=I32), "slot_of_place": torch.tensor(order, dtype=I32),
            "next_unit": torch.zeros(1, dtype=I32), "tiles_done": torch.zeros(len(tiles), dtype=I32),
            "rows_done": torch.zeros(-(-case.hidden // 64), dtype=I32),
        }  # fmt: skip
        self.kept.append(tables)
        return tables

    def run(
        self, calls: list[Call], grid: int, rng: torch.Generator, pair: tuple[str, int] | None = None
    ) -> list[Tensor]:
        """Runs a chain of launches on one workspace: layers in one launch, or by a pair of GEMMs (its name, and the
        tokens of a tile). Returns their outputs."""
        self.workspace()
        for call in calls:
            call.out.fill_(torch.nan)
            if pair:
                self.add_pair(call, grid, *pair)
            else:
                self.add(call, grid)
        failure = self.kernels.run(seed_of(rng))
        assert not failure, failure
        assert self.counters.tolist() == [LAUNCH * len(calls) * (self.case.routes and not pair)] * 2
        guards = [*(rows[-GUARD:] == 1 for rows in self.rows.values()), *(c.out[-GUARD:].isnan() for c in calls)]
        assert all(map(torch.all, guards)), "rows behind an output"
        return [call.out[:-GUARD].clone() for call in calls]

    def compare(self, out: Tensor, call: Call) -> None:
        # Approximations move numbers to their neighbours, also those between the GEMMs, and codes of 8 bits with them.
        tolerance, expected = 0.04 if self.case.form in ("fp8", "mxfp8") else 0.015, call.expected.float()
        assert float((out.float() - expected).abs().max()) <= tolerance * float(expected.abs().max())


def check(kernels: HostLayers, case: Case, rng: torch.Generator) -> None:
    layer = Layer(kernels, case, rng)
    alone = [layer.run([call], case.grid + 1, rng)[0] for call in layer.calls]
    for out, call in zip(alone, layer.calls, strict=True):
        layer.compare(out, call)
    assert all(map(same_bits, layer.run(layer.calls, case.grid, rng), alone))


@pytest.mark.parametrize("name", CASES)
def test_launches_on_one_workspace(kernels: HostLayers, name: str, rng: torch.Generator) -> None:
    check(kernels, CASES[name], rng)


def pairs_of(case: Case) -> dict[str, int]:
    """Returns the packed GEMMs of a case's weights: name -> tokens of a tile."""
    kind = f"{case.form}_{case.kernel.split('_')[1]}"
    return {name: int(name.rsplit("_t")[-1]) for name in PAIRS if name.startswith(f"{kind}_t")}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if pairs_of(case)])
def test_separate_launches_have_the_same_bits(kernels: HostLayers, name: str, rng: torch.Generator) -> None:
    # The combine of separate launches gets weights that torch made, so both get them.
    case = dataclasses.replace(CASES[name], ids=CASES[name].ids or I32, padded=False)
    layer = Layer(kernels, case, rng)
    alone = layer.run(layer.calls, case.grid, rng)
    for pair in pairs_of(case).items():
        assert all(map(same_bits, layer.run(layer.calls, 3, rng, pair), alone)), pair


def test_fewest_stages(tmp_path: Path, rng: torch.Generator) -> None:
    """fp8's layer waits for two stages at once. Four CTAs a multiprocessor, which no kernel has, leave two beside 3072
    columns, and one beside 4096."""
    kernels = HostLayers(tmp_path, {"fp8_gated": "RoutedLayerFp8Sm90<true, 128, 4, true>"})
    case = Case("fp8_gated", 1, 2, 3072, 512, experts=3, grid=2, launches=1)
    check(kernels, case, rng)
    with pytest.raises(AssertionError, match="nobody can go on"):
        check(kernels, dataclasses.replace(case, hidden=4096), rng)


# Tiles of many rows, and an expert that has several.
MANY = {
    "mxfp4": Case("mxfp4_gated", 70, 2, 96, 160, I32, experts=3, bias=BF16, launches=2),
    "mxfp4-plain": Case("mxfp4_plain", 150, 2, 160, 64, I32, experts=2, bias=F32, rank=True, launches=1),
    "mxfp8": Case("mxfp8_gated", 60, 2, 128, 96, I32, experts=3, bias=BF16, launches=2),
    "nvfp4": Case("nvfp4_gated", 50, 3, 128, 96, I32, experts=4, rank=True, launches=2),
    "int4": Case("int4_gated", 60, 1, 352, 64, I32, experts=2, bias=F32, launches=2),
}


@pytest.mark.parametrize("name", MANY)
def test_many_tokens(kernels: HostLayers, name: str, rng: torch.Generator) -> None:
    """Every tile gives the same bits."""
    layer = Layer(kernels, MANY[name], rng)
    first, *others = (layer.run(layer.calls, 3, rng, pair) for pair in pairs_of(MANY[name]).items())
    for out, call in zip(first, layer.calls, strict=True):
        layer.compare(out, call)
    assert all(all(map(same_bits, outs, first)) for outs in others)


# Waits and fences that a kernel must not do without: (kernel, case, the lines, the lines without it).
FAULTS = {
    # Helpers without weights combined before all CTAs had marked their rows, until 2026-11-28.
    "packed-combine": (
        "mxfp4_gated", "mxfp4",
        "        sm90::barrier_wait(&shared.marked, 0);\n"
        "        layer_parts::combine<Element>(p.combine, shared.slots, thread);",
        "        layer_parts::combine<Element>(p.combine, shared.slots, thread);",
    ),
    "bf16-tokens": (
        "bf16_gated", "bf16",
        "            sm90::barrier_wait(&shared.marked, 0);\n            sm90::barrier_wait(&shared.inner_empty",
        "            sm90::barrier_wait(&shared.inner_empty",
    ),
    "fp8-store": (
        "fp8_gated", "fp8",
        "            sm90::barrier_wait(&shared.marked, 0);\n            const bool activated",
        "            const bool activated",
    ),
    "layer-tokens": (
        "layer_gated", "layer",
        "counter::wait_for(&p.tiles_done[unit.tile], row_blocks(p.up));", "{}",
    ),
    "layer-fence": (
        "layer_gated", "layer",
        "            sm90::fence_async_proxy();\n            const uint32_t tokens = sm90::shared_address(",
        "            const uint32_t tokens = sm90::shared_address(",
    ),
    "bf16-fence": (
        "bf16_gated", "bf16",
        "int before = 0, previous = 0;\n        sm90::fence_async_proxy();", "int before = 0, previous = 0;",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_show(tmp_path: Path, fault: str, rng: torch.Generator) -> None:
    kernel, name, lines, without = FAULTS[fault]
    faulty = HostLayers(tmp_path, {kernel: KERNELS[kernel]}, (lines, without))
    with pytest.raises(AssertionError):
        for _ in range(4):
            check(faulty, CASES[name], rng)
