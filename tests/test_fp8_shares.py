"""fp8's GEMMs of many tokens where consumers share the tiles of up to 64: on the host, their launches, their bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import PATTERNS, Shape, make_routing
from fake_cuda.harness import STRUCTS, asked, execute, launches, parameters_of, planned
from fp8_cases import make_fp8
from host_hopper import HostFp8
from oxmoe import reference
from oxmoe.testing import Bar, assert_close_ulp, same_bits

HERE = Path(__file__).parent
COUNTS = [128, 44, 64, 65, 1, 17, 100, 60]
SWIGLU, IDENTITY, RELU2, GEGLU = 1, 0, 4, 2
KINDS = {
    "gated": {"activation": SWIGLU},
    "gated-quantised": {"activation": SWIGLU, "quantised": True},
    "gated-up-gate": {"activation": GEGLU, "layout": 1, "bias": True, "weighted": True},
    "plain": {"activation": IDENTITY, "bias": True},
    "plain-activated": {"activation": RELU2, "weighted": True, "quantised": True},
    "stationary": {"activation": IDENTITY, "bias": True, "inner": 256},
    "stationary-long": {"activation": IDENTITY, "inner": 512, "columns": 640},
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostFp8:
    return HostFp8(tmp_path_factory.mktemp("fp8_shares"))


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_on_the_host(kernels: HostFp8, kind: str, rng: torch.Generator) -> None:
    """Bits of the kernel that does not share, and close to the reference."""
    given = {
        "inner": 384,
        "columns": 384,
        "layout": 0,
        "bias": False,
        "weighted": False,
        "quantised": False,
        **KINDS[kind],
    }
    name, gated = kind.split("-")[0], kind.startswith("gated")
    inner, columns, experts, top_k = given["inner"], given["columns"], 3, 2
    rows = 2 * columns if gated else columns
    # Three experts' tiles; the same expert's lie beside each other.
    owners = [0, 0, 0, 1, 1, 2, 2, 2]
    firsts = torch.tensor([0, *COUNTS]).cumsum(0).tolist()
    tiles = torch.tensor([[*tile, 0] for tile in zip(owners, firsts, COUNTS, strict=False)], dtype=torch.int32)
    places = firsts[-1]
    expert_of = torch.tensor(owners).repeat_interleave(torch.tensor(COUNTS))
    slots = torch.randperm(places, generator=rng).int()
    divisor = top_k if gated else 1
    source = slots.long() // divisor if gated else torch.arange(places)
    x = torch.randn((places, inner), generator=rng).to(torch.float8_e4m3fn)
    x_scales = torch.rand((places, inner // 128), generator=rng) + 0.5
    weights = torch.randn((experts, rows, inner), generator=rng).to(torch.float8_e4m3fn)
    scales = torch.rand((experts, rows // 128, inner // 128), generator=rng) / 16 + 0.01
    bias = torch.randn((experts, rows), generator=rng).bfloat16() if given["bias"] else None
    factors = torch.rand(places, generator=rng) + 0.5 if given["weighted"] else None

    expected = torch.empty((places, columns))
    for expert in range(experts):
        mine = expert_of == expert
        sums = reference.fp8_product((x[source[mine]], x_scales[source[mine]]), weights[expert], scales[expert])
        sums = sums if bias is None else sums + bias[expert].float()
        if factors is not None:
            sums = sums * factors[slots.long()[mine] if gated else torch.nonzero(mine)[:, 0]][:, None]
        if gated:
            gate, up = sums.chunk(2, 1)[:: -1 if given["layout"] else 1]
            act = torch.nn.functional.silu if given["activation"] == SWIGLU else torch.nn.functional.gelu
            sums = act(gate) * up
        expected[mine] = sums.relu().square() if given["activation"] == RELU2 else sums

    results: list[tuple[Tensor, Tensor]] = []
    infinity = float("inf")
    activation = STRUCTS["Activation"](
        kind=given["activation"], alpha=1.0, beta=0.0, gate_limit=infinity, silu_limit=infinity, up_limit=infinity
    )
    count = torch.tensor([len(COUNTS)], dtype=torch.int32)
    for shares in ("", "_shares"):
        out = torch.full((places, columns), torch.nan).to(torch.float8_e4m3fn if given["quantised"] else torch.bfloat16)
        out_scales = torch.full((places, columns // 128), torch.nan)
        next_unit = torch.zeros(1, dtype=torch.int32)
        ended = kernels.run(
            name + shares, inner, 3, int(torch.randint(1 << 31, (), generator=rng)), x=x.data_ptr(),
            x_scales=x_scales.data_ptr(), slot_of_place=slots.data_ptr() if gated else 0, row_divisor=divisor,
            tiles=tiles.data_ptr(), tile_count=count.data_ptr(), next_unit=next_unit.data_ptr(),
            weights=weights.data_ptr(), block_scales=scales.data_ptr(), rows=rows, k=inner // 2, out_columns=columns,
            bias=bias.data_ptr() if bias is not None else 0, bias_dtype=2, layout=given["layout"],
            slot_weights=factors.data_ptr() if factors is not None else 0, activation=activation, out=out.data_ptr(),
            out_scales=out_scales.data_ptr() if given["quantised"] else 0,
        )  # fmt: skip
        assert ended, "deadlock"
        results.append((out, out_scales if given["quantised"] else torch.zeros(0)))
    (separate, shared), (scales_before, scales_now) = zip(*results, strict=True)
    assert same_bits(shared, separate) and same_bits(scales_now, scales_before)
    if given["quantised"]:
        numbers = shared.float() * scales_now.repeat_interleave(128, 1)
        assert (numbers - expected).abs().max() <= expected.abs().max() / 14
    else:
        assert_close_ulp(shared, expected.bfloat16(), Bar(max_ulp=4.0, ulps=1.1, share=2e-2))


@pytest.mark.usefixtures("kernels_for_hopper")
def test_launches(driver: Path, tmp_path: Path) -> None:
    """With the switch tiles are cut into full ones and a rest, and both GEMMs share it."""
    arguments = {"experts": 128, "hidden": 2048, "intermediate": 768, "top_k": 8, "tokens": [64, 1024, 4096]}
    for experimental in (True, False):
        result = execute(driver, tmp_path, "fp8_calls", arguments, experimental=experimental)
        for call in result["calls"]:
            made = launches(call["records"])
            assert [asked(launch) for launch in made] == planned(call["explain"])
            wide = [
                launch["kernel"] for launch in made if "wide" in launch["kernel"] or "stationary" in launch["kernel"]
            ]
            assert bool(wide) == (call["tokens"] > 64) and all(n.endswith("_shares") == experimental for n in wide)
            if wide:
                routes = [p for launch in made for p in parameters_of(launch) if hasattr(p, "tile_step")]
                assert routes and {p.tile_step for p in routes} == {64 if experimental or call["tokens"] > 3072 else 16}


# Bits, on a GPU

SMALL = Shape("small", 32, 8, 512, 256)
CASES: dict[str, tuple[Shape, int, str]] = {
    "i256": (SMALL, 700, "uniform"),
    "bias": (Shape("bias", 16, 4, 384, 384, bias=True), 1500, "uniform"),
    "qwen3-30b-a3b": (Shape("qwen3-30b-a3b", 128, 8, 2048, 768), 4096, "uniform"),
    "dsv3-tp8": (Shape("dsv3-tp8", 256, 8, 7168, 256), 1024, "uniform"),
    "dsv3-ep8": (Shape("dsv3-ep8", 32, 8, 7168, 2048), 1024, "uniform"),
    "i1408": (Shape("i1408", 8, 2, 256, 1408), 601, "uniform"),
    "up-gate": (Shape("up", 6, 2, 256, 1408, options=(("layout", "up_gate"),)), 601, "holes"),
    "plain": (Shape("plain", 4, 2, 512, 384, options=(("activation", "relu2"),)), 500, "uniform"),
    **{pattern: (SMALL, 1111, pattern) for pattern in PATTERNS},
}


def outputs(name: str, seed: int) -> Tensor:
    """Three calls of one case, with fresh inputs each, on one workspace."""
    shape, tokens, pattern = CASES[name]
    rng = torch.Generator().manual_seed(seed)
    layer = make_fp8(shape, "cuda", rng)
    weights, results = layer.weights(), []
    size = oxmoe.workspace_bytes(weights, tokens, shape.top_k)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        topk_weights, ids = make_routing(pattern, tokens, shape.experts, shape.top_k, rng)
        results.append(oxmoe.moe(layer.x(tokens, rng), weights, topk_weights.cuda(), ids.cuda(), workspace=workspace))
    return torch.stack(results)


def save(name: str, seed: int, path: str) -> None:
    assert os.environ.get("OXMOE_EXPERIMENTAL") != "1"
    torch.save(outputs(name, seed).cpu(), path)


@pytest.mark.gpu
@pytest.mark.usefixtures("experimental")
@pytest.mark.parametrize("name", CASES)
def test_bits_of_kernels_that_do_not_share(name: str, rng: torch.Generator, tmp_path: Path) -> None:
    shape, tokens, _ = CASES[name]
    sizes = shape.experts, shape.top_k, shape.hidden, shape.intermediate, tokens
    assert "_shares" in oxmoe.explain(*sizes, format="fp8_block", gated=shape.gated)
    seed, path = int(torch.randint(1 << 31, (), generator=rng)), tmp_path / "separate.pt"
    # The switch is read once in a process.
    script = f"import test_fp8_shares as t; t.save({name!r}, {seed}, {json.dumps(str(path))})"
    environment = {**os.environ, "OXMOE_EXPERIMENTAL": "0"}
    subprocess.run([sys.executable, "-c", script], cwd=HERE, env=environment, check=True, timeout=600)
    assert same_bits(outputs(name, seed).cpu(), torch.load(path))
