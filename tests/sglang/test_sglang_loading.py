"""An update of a layer's weights leaves nothing behind, and a layer's ExpertWeights know the tensors that they were
made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Shape, make_layer, make_routing, make_x
from fp8_cases import make_fp8, make_fp8_tensor
from mxfp4_cases import make_blocks
from mxfp8_cases import make_mxfp8
from oxmoe import reference
from oxmoe.testing import assert_close_ulp, same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.moe.moe_runner.triton_kernels import TritonKernelsQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput

from oxmoe.sglang.experts import Experts
from oxmoe.sglang.loading import renewed
from sglang_server import MoeRunnerConfig

SHAPE = Shape("renewed", 6, 2, 256, 128, bias=True)


def made(format: str, rng: torch.Generator) -> oxmoe.ExpertWeights:
    """Makes a layer with everything that its format can have: biases, scales of weights and of activations."""
    if format in ("bf16", "f16"):
        return make_layer(SHAPE, {"bf16": torch.bfloat16, "f16": torch.float16}[format], "cpu", rng).weights()
    if format == "fp8_block":
        return make_fp8(SHAPE, "cpu", rng).weights()
    if format.startswith("fp8_tensor"):
        layer = make_fp8_tensor(SHAPE, "cpu", rng, of_rows=format.endswith("rows"))
        # Each layer has other scales, as other checkpoints have.
        for scale in (layer.a13_scale, layer.a2_scale):
            scale *= 1 + torch.rand((), generator=rng)
        return layer.weights("static")
    if format == "mxfp8":
        return make_mxfp8(SHAPE, "cpu", rng).weights()
    return make_blocks(SHAPE, "bf16", "cpu", rng).weights()


def tensors_of(weights: oxmoe.ExpertWeights) -> dict[str, Tensor]:
    """Returns every tensor that the object shows."""
    public = {name: getattr(weights, name) for name in dir(weights) if not name.startswith("_")}
    return {name: value for name, value in public.items() if isinstance(value, Tensor)}


FORMATS = ["bf16", "f16", "fp8_block", "fp8_tensor", "fp8_tensor of rows", "mxfp8", "mxfp4"]


@pytest.mark.parametrize("format", FORMATS)
def test_an_update_leaves_nothing_of_the_old_weights(format: str, rng: torch.Generator) -> None:
    """Every tensor has the new numbers at the old address: CUDA graphs know addresses."""
    old, new = made(format, rng), made(format, rng)
    before, wanted = tensors_of(old), tensors_of(new)
    needed = {"w13", "w2", "b13", "b2"} | ({"a13_scale", "a2_scale"} if "tensor" in format else set())
    assert needed <= set(before) and before.keys() == wanted.keys()
    assert not any(same_bits(before[name], wanted[name]) for name in before), "the two layers differ in every tensor"
    addresses = {name: tensor.data_ptr() for name, tensor in before.items()}
    x = make_x(9, SHAPE, torch.float16 if format == "f16" else torch.bfloat16, "cpu", rng)
    routing = make_routing("uniform", 9, SHAPE.experts, SHAPE.top_k, rng)
    expected = oxmoe.moe(x, new, *routing)

    assert renewed(old, new) is old
    after = tensors_of(old)
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == addresses
    for name, tensor in after.items():
        assert same_bits(tensor, wanted[name]), f"{name} is the old one"
    assert same_bits(oxmoe.moe(x, old, *routing), expected)


def test_the_first_weights_are_taken_as_they_are(rng: torch.Generator) -> None:
    weights = made("bf16", rng)
    assert renewed(None, weights) is weights


def test_new_weights_at_an_old_address_are_seen(rng: torch.Generator) -> None:
    """Tensors that experts were made of are kept, so other weights cannot get their addresses and pass for the old
    ones.

    TritonKernelsQuantInfo's matrices are copied, so that nothing but Experts keeps them alive.
    """
    shape = Shape("copied", 4, 2, 64, 96)
    experts, config = Experts(), MoeRunnerConfig(num_experts=4, num_local_experts=4, top_k=2, inplace=False)
    x = make_x(5, shape, torch.bfloat16, "cpu", rng)
    routing = make_routing("uniform", 5, shape.experts, shape.top_k, rng)
    dispatched = StandardDispatchOutput(x, None, StandardTopKOutput(*routing, None))
    layers = [make_layer(shape, torch.bfloat16, "cpu", rng) for _ in range(10)]
    expected = [reference.moe(x, layer.w13, layers[0].w2, *routing) for layer in layers]
    w2 = layers[0].w2.mT.contiguous()
    for layer, wanted in zip(layers, expected, strict=True):
        # The allocator hands out again the memory that it took back last, if it took any.
        w13 = layer.w13.mT.contiguous()
        result = experts.run(dispatched, TritonKernelsQuantInfo(w13, w2), config)
        del w13
        assert_close_ulp(result, wanted)
