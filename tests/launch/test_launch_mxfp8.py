"""The driver calls of MXFP8 experts: packing, launches and parameters (see test_launch.py)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fake_cuda.harness import asked, execute, launches, parameters_of, planned

STREAM = 0x1234
LAYERS = [
    {"experts": 128, "hidden": 2048, "intermediate": 768, "in_place": True},
    {"experts": 5, "hidden": 352, "intermediate": 672, "in_place": False},
]


pytestmark = pytest.mark.usefixtures("kernels_for_hopper")


def check_weights(gemms: tuple[Any, Any], packed: list[Any]) -> None:
    for gemm, (codes, scales, factors) in zip(gemms, packed, strict=True):
        assert (gemm.weights, gemm.block_scales, gemm.expert_scales) == (codes[0], scales[0], factors[0])


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: str(layer["hidden"]))
def test_calls(layer: dict[str, int], driver: Path, tmp_path: Path) -> None:
    tokens = [1, 7, 20, 40, 64, 110, 300, 1000, 1500, 2000, 2700, 20000]
    result = execute(driver, tmp_path, "mxfp8_calls", {**layer, "top_k": 4, "tokens": tokens})
    experts, hidden, intermediate = layer["experts"], layer["hidden"], layer["intermediate"]
    addresses, packed = result["addresses"], result["packed"]
    packing = [launch["kernel"] for launch in launches(result["load"])]
    assert set(packing) == {"mxfp8_peak", "mxfp8_pack"} and packing.count("mxfp8_peak") == 2
    for name, (codes, scales, factors), rows, columns in (
        ("w13", packed[0], 2 * intermediate, hidden),
        ("w2", packed[1], hidden, intermediate),
    ):
        if layer["in_place"]:
            assert (codes[0], scales[0]) == (addresses[name], addresses[f"{name}_scale"])
        else:
            blocks = [experts, -(-rows // 64), -(-columns // 64)]
            assert (codes[1], scales[1], factors[1]) == ([*blocks, 4096], [*blocks, 128], [experts])
    kernels = set()
    for call in result["calls"]:
        made, count = launches(call["records"]), call["tokens"]
        found = re.findall(r"^ +(\d+) \+ \d+ +(\w+)$", call["explain"], re.MULTILINE)
        ranges = {name: call["workspace"] + int(offset) for offset, name in found}
        assert [asked(launch) for launch in made] == planned(call["explain"])
        assert all(launch["stream"] == STREAM and launch["pdl"] for launch in made)
        if count == 1:
            # The launch rounds x and GEMM1's output itself.
            (one,) = made
            assert one["kernel"] == "routed_layer_mxfp8_sm90_gated_e384_any" and one["cooperative"]
            (whole,) = parameters_of(one)
            p, q = whole.layer.up, whole.layer.down
            assert (whole.experts, whole.select.tokens) == (experts, 1)
            assert (p.x, p.out, q.x, q.out) == (call["x"], ranges["hidden"], ranges["hidden"], ranges["rows"])
            check_weights((p, q), packed)
            continue
        *_, of_x, both, combine = made
        assert (of_x["kernel"], combine["kernel"]) == ("round_rows_mxfp8", "combine_bf16")
        kernels.add(both["kernel"])
        (r,), (pair,) = (parameters_of(launch) for launch in (of_x, both))
        p, q = pair.up, pair.down
        assert (pair.tiles, pair.row_counts) == (ranges["tiles"], 0)
        # Rounded x has room of its own: GEMM2 writes while GEMM1 may still read.
        assert (r.x, r.out, r.rows, r.columns, r.tiles) == (call["x"], ranges["x_rounded"], count, hidden, 0)
        assert r.x_is_older, "x is rounded while it is routed"
        assert (p.x, p.out, q.x, q.out) == (ranges["x_rounded"], ranges["hidden"], ranges["hidden"], ranges["rows"])
        assert p.schedule_is_older and q.schedule_is_older
        check_weights((p, q), packed)
    assert all(name.startswith("grouped_gemm_mxfp8_sm90_") for name in kernels) and len(kernels) > 5
