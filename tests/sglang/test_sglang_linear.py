"""MXFP8 linear layers in SGLang by the quantization "oxmoe": each kind of layer, loaded by SGLang's own loaders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from oxmoe import quantize
from oxmoe.testing import assert_close_ulp, same_bits

pytest.importorskip("sglang")

from sglang.srt.layers import linear as theirs
from sglang.srt.layers.quantization import get_quantization_config
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from oxmoe.sglang import linear
from sglang_server import NEW, installed, server

CHECKPOINT = {"quant_method": "mxfp8", "activation_scheme": "dynamic"}
HIDDEN, OUT = 96, 64
# Newer releases take their ranks from the state that server() sets.
NO_GROUP: dict[str, Any] = {} if NEW else {"tp_rank": 0, "tp_size": 1}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


def config(**more: Any) -> Any:
    return get_quantization_config("oxmoe").from_config({**CHECKPOINT, **more})


def weight(rows: int, columns: int, device: str, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns (codes, scales) of a checkpoint."""
    codes, scales = quantize.mxfp8(
        torch.randn((rows, columns), generator=rng, device="cpu").bfloat16(), layout="linear"
    )
    return codes.to(device), scales.view(rows, columns // 32).to(device)


def load(layer: Any, parts: list[tuple[Tensor, Tensor]], shards: list[Any]) -> None:
    for (codes, scales), shard in zip(parts, shards, strict=True):
        for parameter, tensor in ((layer.weight, codes), (layer.weight_scale_inv, scales)):
            parameter.weight_loader(parameter, tensor, *([] if shard is None else [shard]))
    layer.quant_method.process_weights_after_loading(layer)


def made(
    kind: str, device: str, rng: torch.Generator, scales_as: torch.dtype = torch.uint8
) -> tuple[Any, Tensor, Tensor]:
    """Returns (SGLang's layer, the codes [n, k] and scales that it should hold). scales_as: the checkpoint's dtype."""
    common = {"quant_config": config(), "params_dtype": torch.bfloat16, "prefix": f"model.layers.0.{kind}"}
    with server(), torch.device(device):
        if kind == "replicated":
            layer, sizes, shards = theirs.ReplicatedLinear(HIDDEN, OUT, bias=False, **common), [OUT], [None]
        elif kind == "column":
            layer = theirs.ColumnParallelLinear(HIDDEN, OUT, bias=False, **common, **NO_GROUP)
            sizes, shards = [OUT], [None]
        elif kind == "merged":
            layer = theirs.MergedColumnParallelLinear(HIDDEN, [OUT, 160], bias=False, **common, **NO_GROUP)
            sizes, shards = [OUT, 160], [0, 1]
        elif kind == "qkv":
            layer = theirs.QKVParallelLinear(HIDDEN, 32, 4, 2, bias=False, **common, **NO_GROUP)
            sizes, shards = [128, 64, 64], ["q", "k", "v"]
        else:
            layer = theirs.RowParallelLinear(HIDDEN, OUT, bias=False, reduce_results=False, **common, **NO_GROUP)
            sizes, shards = [OUT], [None]
        parts = [weight(size, HIDDEN, device, rng) for size in sizes]
        load(layer, [(codes, scales.view(scales_as)) for codes, scales in parts], shards)
    codes, scales = (torch.cat([part[place].view(torch.uint8) for part in parts]) for place in (0, 1))
    return layer, codes.view(torch.float8_e4m3fn), scales


KINDS = ("replicated", "column", "merged", "qkv", "row")


@pytest.mark.parametrize("kind", KINDS)
def test_scales_in_e8m0(kind: str, rng: torch.Generator) -> None:
    """SGLang's loaders refuse this dtype for a parameter of bytes, or convert its numbers."""
    layer, _, scales = made(kind, "cpu", rng, torch.float8_e8m0fnu)
    assert layer.weight_scale_inv.dtype == torch.uint8 and torch.equal(layer.weight_scale_inv.data, scales)


@pytest.mark.parametrize("kind", KINDS)
def test_layer(kind: str, device: str, rng: torch.Generator) -> None:
    layer, codes, scales = made(kind, device, rng)
    assert layer.quant_method.oxmoe
    assert same_bits(layer.weight.data, codes) and torch.equal(layer.weight_scale_inv.data, scales)
    matrix = quantize.dequantize_mxfp8(codes, scales.flatten(), layout="linear").double()
    for shape in ((0, HIDDEN), (1, HIDDEN), (3, 7, HIDDEN)):
        x = torch.randn(shape, generator=rng).bfloat16().to(device)
        rows = quantize.dequantize_mxfp8(*quantize.mxfp8(x)).double()
        with server():
            result, bias = layer(x)
        assert bias is None and result.shape == (*shape[:-1], len(codes))
        assert_close_ulp(result, (rows @ matrix.t()).bfloat16())


def test_bias_and_quantised_input(device: str, rng: torch.Generator) -> None:
    layer, codes, scales = made("replicated", device, rng)
    x = torch.randn((5, HIDDEN), generator=rng).bfloat16().to(device)
    bias = torch.randn(OUT, generator=rng).bfloat16().to(device)
    expected = oxmoe.mxfp8_linear(x, codes, scales, bias=bias)
    assert same_bits(layer.quant_method.apply(layer, x, bias), expected)
    assert same_bits(layer.quant_method.apply(layer, quantize.mxfp8(x), bias), expected)


def test_an_update_of_the_weights_is_seen(rng: torch.Generator) -> None:
    layer, _, _ = made("replicated", "cpu", rng)
    codes, scales = weight(OUT, HIDDEN, "cpu", rng)
    layer.weight.data.copy_(codes)
    layer.weight_scale_inv.data.copy_(scales)
    x = torch.randn((5, HIDDEN), generator=rng).bfloat16()
    assert same_bits(layer(x)[0], oxmoe.mxfp8_linear(x, codes, scales))


def test_layers_that_stay_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are layers that a checkpoint leaves out, layers of fp8 checkpoints, and all layers on GPUs that SGLang has
    kernels for."""

    def chosen(quant_config: Any) -> Any:
        with server():
            return theirs.ReplicatedLinear(
                128,
                128,
                bias=False,
                quant_config=quant_config,
                params_dtype=torch.bfloat16,
                prefix="model.layers.0.gate",
            ).quant_method

    assert type(chosen(config())) is linear.Fp8LinearMethod
    assert isinstance(chosen(config(modules_to_not_convert=["model.layers.0.gate"])), UnquantizedLinearMethod)
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert type(chosen(get_quantization_config("oxmoe").from_config(blocks))) is Fp8LinearMethod
    monkeypatch.setattr(linear, "ours", lambda: False)
    assert type(chosen(config())) is Fp8LinearMethod


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), True), ((8, 9), False), ((10, 0), False)])
def test_gpus(capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert linear.ours() == expected


def test_refuses_other_sizes() -> None:
    with server():
        layer = theirs.ReplicatedLinear(80, 64, bias=False, quant_config=config(), params_dtype=torch.bfloat16)
        with pytest.raises(NotImplementedError, match="an MXFP8 linear layer with 80 columns on this rank; served are"):
            layer.quant_method.process_weights_after_loading(layer)
