"""The layouts that tests/upstream makes for flashinfer's own tests: against loops over rows and bytes, against
flashinfer's functions, and against what oxmoe undoes. Padded weights are flashinfer's, too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Shape
from flashinfer_source import root, take
from mxfp4_cases import make_blocks
from mxfp8_cases import make_mxfp8
from nvfp4_cases import make as make_nvfp4
from oxmoe import nvfp4
from oxmoe.peers import flashinfer_trtllm_layouts as own
from oxmoe.testing import same_bits
from trtllm_layouts import blocked, interleave, shuffle

FILE = Path(__file__).parents[1] / "upstream" / "stand_in" / "flashinfer_layouts.py"


def interleaved(scales: Tensor, **options: Any) -> Tensor:
    return nvfp4.swizzle_blockscale(scales.view(torch.float8_e4m3fn)).view(torch.uint8).reshape(-1)


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("flashinfer_layouts", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "flashinfer_served", SimpleNamespace(block_scale_interleave=interleaved))
    return module


def drawn(rng: torch.Generator, rows: int = 256, columns: int = 128) -> Tensor:
    return torch.randint(256, (rows, columns), dtype=torch.uint8, generator=rng)


def test_shuffles(layouts: ModuleType, rng: torch.Generator) -> None:
    weights, scales = drawn(rng), drawn(rng, columns=6)
    assert torch.equal(layouts.shuffle_matrix_a(weights, 128), shuffle(weights[None], False)[0])
    gated = layouts.reorder_rows_for_gated_act_gemm(weights)
    assert torch.equal(layouts.shuffle_matrix_a(gated, 128), shuffle(weights[None], True)[0])
    for halves in (False, True):
        rows = layouts.w3_w1_permute_indices({}, weights, 128, is_gated_act_gemm=halves)
        assert torch.equal(weights[rows], shuffle(weights[None], halves)[0])
    assert torch.equal(weights[layouts.w2_permute_indices({}, weights, 128)], shuffle(weights[None], False)[0])
    expected = interleave(shuffle(scales[None], False))[0]
    assert torch.equal(layouts.shuffle_matrix_sf_a(scales, 128), expected)
    assert torch.equal(layouts.convert_to_block_layout(weights, 128), blocked(weights[None])[0])
    small = layouts.shuffle_matrix_a(torch.arange(32)[:, None], 64)[:, 0].tolist()
    assert small == [*range(0, 16, 2), *range(1, 16, 2), *range(16, 32, 2), *range(17, 32, 2)]
    turns = torch.arange(12)[:, None]
    assert layouts.deinterleave_gated_rows(turns, 3)[:, 0].tolist() == [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]
    assert torch.equal(layouts.deinterleave_gated_rows(gated, 1), weights)


def test_oxmoe_undoes_them(layouts: ModuleType, rng: torch.Generator) -> None:
    weights = drawn(rng)
    for of_shuffle, epilogue_tile_m in ((own.SHUFFLED_ROWS, 128), (own.DEEPSEEK_ROWS, 64)):
        assert torch.equal(
            own.unshuffled(layouts.shuffle_matrix_a(weights, epilogue_tile_m)[None], of_shuffle)[0], weights
        )
    assert torch.equal(own.halves(layouts.reorder_rows_for_gated_act_gemm(weights)[None])[0], weights)
    assert torch.equal(own.major_k(layouts.convert_to_block_layout(weights, 128)[None], own.BLOCK_MAJOR_K)[0], weights)


@pytest.mark.parametrize("epilogue_tile_m", [64, 128])
def test_as_flashinfers(layouts: ModuleType, epilogue_tile_m: int, rng: torch.Generator) -> None:
    names = {"get_shuffle_block_size", "get_shuffle_matrix_a_row_indices", "srcToDstBlk16RowMap", "srcToDstBlk32RowMap"}
    theirs = take(root() / "utils.py", names, {"torch": torch})
    weights = drawn(rng)
    rows = theirs["get_shuffle_matrix_a_row_indices"](weights, epilogue_tile_m)
    assert torch.equal(layouts.shuffle_matrix_a(weights, epilogue_tile_m), weights[rows])


@pytest.mark.parametrize("gated", [True, False])
def test_flashinfers_padding(gated: bool, rng: torch.Generator) -> None:
    """flashinfer's own function gives the same bytes."""
    file = root() / "fused_moe" / "core.py"
    if "def pad_trtllm_moe_weights" not in file.read_text():
        pytest.skip("this release has no pad_trtllm_moe_weights")
    given: dict[str, Any] = {"torch": torch, "TrtllmMoePaddedWeights": oxmoe.TrtllmMoePaddedWeights}
    names = {"_TRTLLM_MOE_PAD_HIDDEN_ALIGNMENT", "_TRTLLM_MOE_PAD_INTERMEDIATE_ALIGNMENT", "_round_up", "_pad_bytes"}
    names |= {"_TRTLLM_MOE_OUTPUT_HIDDEN_ALIGNMENT", "pad_trtllm_moe_weights"}
    take(file, names, given)
    shape = Shape("padded", 6, 3, 160, 96).with_options(**({} if gated else {"activation": "relu2"}))
    for made in (
        make_mxfp8(shape, "cpu", rng),
        make_nvfp4(shape, rng, a4=True),
        make_blocks(shape, "bf16", "cpu", rng),
    ):
        parts: Any = (made.w13, made.w13_scale, made.w2, made.w2_scale)
        for alignments in ({}, {"hidden_alignment": 256, "intermediate_alignment": 256}):
            theirs = given["pad_trtllm_moe_weights"](*parts, 160, 96, is_gated_act=gated, **alignments)
            ours = oxmoe.pad_trtllm_moe_weights(*parts, 160, 96, is_gated_act=gated, **alignments)
            assert tuple(theirs)[4:] == tuple(ours)[4:]
            assert all(same_bits(a, b) for a, b in zip(tuple(theirs)[:4], tuple(ours)[:4], strict=True))
