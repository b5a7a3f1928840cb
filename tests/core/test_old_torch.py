"""torch before 2.10: results have the same bits.

Its DLPack has no exchange table and refuses floats of eight bits. On CPUs it cannot index these by a tensor.

`make torch-test` runs all tests on torch 2.9 itself. Here a newer torch refuses what 2.9 refuses: a process takes the
table away from it, and lets its function for capsules refuse such floats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import forked
from oxmoe import reference
from oxmoe.testing import same_bits

FOLDER = Path(__file__).parent

PROGRAM = """
import sys

import torch

made, folder, old = sys.argv[1], sys.argv[2], sys.argv[3] == "old"
export, exported = torch._C._to_dlpack_versioned, []

def refusing(tensor, *args, **named):
    name = str(tensor.dtype)
    if "float8" in name or "float4" in name:
        raise BufferError(f"{name.removeprefix('torch.')[:6]} types are not supported by dlpack")
    exported.append(name)
    return export(tensor, *args, **named)

if old:
    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        del torch.Tensor.__dlpack_c_exchange_api__
    torch._C._to_dlpack_versioned = refusing

import oxmoe

sys.path.insert(0, folder)
from test_memory import E, FORMATS, H, INTER, K, T, make, operands

rng = torch.Generator().manual_seed(int(sys.argv[4]))
results = {}
for format in FORMATS:
    dtype = {"f16": torch.float16, "f32": torch.float32}.get(format, torch.bfloat16)
    x = torch.randn(T, H, generator=rng).to(dtype)
    ids = torch.rand(T, E, generator=rng).topk(K).indices.int()
    given = operands(format, "cpu", rng)
    results[format] = oxmoe.moe(x, make(format, given), torch.rand(T, K, generator=rng), ids)
    if format == "mxfp8":
        given |= {name: given[name].view(torch.float8_e8m0fnu) for name in ("w13_scale", "w2_scale")}
        results["mxfp8 with e8m0 scales"] = oxmoe.moe(x, make(format, given), torch.ones(T, K), ids)
    if format == "fp8_block":
        # Tokens in e4m3.
        codes = x.to(torch.float8_e4m3fn)
        scale = torch.rand(T, H // 128, generator=rng)
        experts = make(format, given)
        results["fp8 tokens"] = oxmoe.moe(codes, experts, torch.ones(T, K), ids, x_scale=scale)
    if format == "nvfp4":
        given |= {name: given[name].view(torch.float4_e2m1fn_x2) for name in ("w13", "w2")}
        results["pairs of four bits"] = oxmoe.moe(x, make(format, given), torch.ones(T, K), ids)
codes, scales = oxmoe.mxfp8_quantize(torch.randn(T, H, generator=rng).bfloat16())
results["codes"], results["scales"] = codes.view(torch.uint8), scales.view(torch.uint8)

try:
    oxmoe.moe(x.to(torch.float8_e5m2), experts, torch.ones(T, K), ids)
except (ValueError, NotImplementedError) as error:
    results["error"] = str(error)
torch.save((results, len(exported)), made)
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, tuple[dict, int]]:
    """Returns results of the torch that is installed, and of one like 2.9, with how many capsules each has made."""
    found = {}
    for name in ("new", "old"):
        file = tmp_path_factory.mktemp("torch") / name
        done = forked.run("-c", PROGRAM, str(file), str(FOLDER), name, str(request.config.option.seed), timeout=120)
        assert done.returncode == 0, done.stderr
        found[name] = torch.load(file)
    return found


def test_results_have_the_same_bits(both: dict[str, tuple[dict, int]]) -> None:
    (new, no_capsules), (old, capsules) = both["new"], both["old"]
    assert no_capsules == 0 and capsules > 100
    assert old.keys() == new.keys() and "error" in new
    for name, result in new.items():
        if isinstance(result, str):
            assert old[name] == result and "float8_e5m2" in result
        else:
            assert result.count_nonzero() > 0 and same_bits(old[name], result), name


class _OldIndex(TorchDispatchMode):
    """Refuses to index floats of eight bits by a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor and "float8" in str(args[0].dtype):
            raise NotImplementedError(f'"index_cpu" not implemented for {args[0].dtype}')
        return func(*args, **(kwargs or {}))


def test_the_reference_indexes_no_floats_of_eight_bits(rng: torch.Generator) -> None:
    tokens, experts, hidden, intermediate = 7, 3, 256, 128

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    x, ids = draw(tokens, hidden).bfloat16(), torch.randint(-1, experts, (tokens, 2), generator=rng)
    w13 = draw(experts, 2 * intermediate, hidden).to(torch.float8_e4m3fn)
    w2 = draw(experts, hidden, intermediate).to(torch.float8_e4m3fn)
    scales = {"w13_scale": draw(experts, 2, 2).abs() / 16, "w2_scale": draw(experts, 2, 1).abs() / 16}
    factors = draw(tokens, 2)
    expected = reference.moe(x, w13, w2, factors, ids, **scales)
    with _OldIndex():
        with pytest.raises(NotImplementedError, match="index_cpu"):
            w13[0][ids[0].abs()]
        result = reference.moe(x, w13, w2, factors, ids, **scales)
    assert expected.count_nonzero() > 0 and same_bits(result, expected)
