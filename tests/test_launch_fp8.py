"""What fp8 experts ask of the driver: launches, parameters and tensor maps (see test_launch.py)."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

import oxmoe._oxmoe as extension
from fake_cuda.harness import asked, build, cuda_headers, execute, launches, named, parameters_of, planned

STREAM = 0x1234
LAYERS = [
    {"experts": 128, "hidden": 2048, "intermediate": 768},
    {"experts": 256, "hidden": 7168, "intermediate": 256},
    {"experts": 5, "hidden": 384, "intermediate": 640},
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if cuda_headers() is None:
        pytest.skip("no cuda.h: neither in the nvidia Python packages nor under CUDA_HOME")
    if "90a" not in extension.device_info()["archs"]:
        pytest.skip("this wheel has no kernels for 90a")
    folder = tmp_path_factory.mktemp("driver")
    build(folder)
    return folder


def ranges_of(call: dict[str, Any]) -> dict[str, int]:
    found = re.findall(r"^ +(\d+) \+ \d+ +(\w+)$", call["explain"], re.MULTILINE)
    return {name: call["workspace"] + int(offset) for offset, name in found}


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: str(layer["hidden"]))
def test_calls(layer: dict[str, Any], driver: Path, tmp_path: Path) -> None:
    result = execute(driver, tmp_path, "fp8_calls", {**layer, "top_k": 4, "tokens": [1, 7, 64, 300, 2000, 20000]})
    experts, hidden, intermediate = layer["experts"], layer["hidden"], layer["intermediate"]
    maps = {record["map"]: record for record in named(result["load"], "cuTensorMapEncodeTiled")}
    kernels = set()
    for call in result["calls"]:
        made, ranges, tokens = launches(call["records"]), ranges_of(call), call["tokens"]
        assert {record["call"] for record in call["records"]} <= {"cuLaunchKernelEx", "cuCtxSetCurrent"}
        assert [asked(launch) for launch in made] == planned(call["explain"])
        assert all(launch["stream"] == STREAM and launch["pdl"] for launch in made)
        first = next(i for i, launch in enumerate(made) if launch["kernel"] == "quantize_fp8")
        *stages, combine = made[first:]
        assert first in (1, 2) and combine["kernel"] == "combine_bf16"
        inside = len(stages) == 3
        quantize, up, *between, down = stages
        kernels |= {up["kernel"], down["kernel"]}
        assert inside == ("wide" in up["kernel"]) == ("wide" in down["kernel"])
        (of_x,), (up_map, p), (down_map, q) = (parameters_of(launch) for launch in (quantize, up, down))
        assert (of_x.x, of_x.codes, of_x.scales) == (call["x"], ranges["x_codes"], ranges["x_scales"])
        assert (of_x.rows, of_x.columns, of_x.group, of_x.row_count) == (tokens, hidden, 128, 0)
        assert (of_x.row_stride, of_x.group_stride, of_x.powers) == (hidden // 128, 1, False)
        if between:
            (of_hidden,) = parameters_of(between[0])
            assert (of_hidden.x, of_hidden.codes) == (ranges["hidden"], ranges["hidden_codes"])
            assert of_hidden.scales == ranges["hidden_scales"]
            assert (of_hidden.rows, of_hidden.columns) == (4 * tokens, intermediate)
            # The number of placed slots: the end of the last expert's range.
            assert of_hidden.row_count == ranges["offsets"] + 4 * experts
            assert (p.out, p.out_scales) == (ranges["hidden"], 0)
        else:
            assert (p.out, p.out_scales) == (ranges["hidden_codes"], ranges["hidden_scales"])
        assert (p.x, p.x_scales) == (ranges["x_codes"], ranges["x_scales"])
        assert (q.x, q.x_scales) == (ranges["hidden_codes"], ranges["hidden_scales"])
        assert (q.out, q.out_scales, p.schedule_is_older, q.schedule_is_older) == (ranges["rows"], 0, True, True)
        for gemm, tensor_map, name in ((p, up_map, "w13"), (q, down_map, "w2")):
            assert gemm.weights == tensor_map[1] == result["addresses"][name]
            assert gemm.block_scales == result["addresses"][f"{name}_scale"]
            rows = math.prod(maps[tensor_map[0]]["box"][1:])
            assert rows == (128 if inside else 64 if "c1" in (up if name == "w13" else down)["kernel"] else 128)
    assert any("wide" in name for name in kernels) and any("wide" not in name for name in kernels)
