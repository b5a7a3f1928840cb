"""DeepSeek-V4's MXFP4 experts, which an fp8 checkpoint holds, in SGLang's layers, loaders and routers, beside fp64
arithmetic on the dequantised weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import Shape, make_x
from check_configs import deepseek_v4
from oxmoe.testing import same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.model_loader.loader import DefaultModelLoader

from deepseek_v4_cases import (
    CHECKPOINT,
    FLASH,
    NOT_PACKED_IN_PLACE,
    PRO_TP8,
    SMALL,
    close,
    config,
    drawn,
    empty,
    expected,
    given,
    layer_of,
    load,
    routed,
    tensors_of,
    write,
)
from oxmoe.sglang import capabilities, layers, loading, setting, updates
from oxmoe.sglang.deepseek_v4 import SCALES, OxmoeFp8Mxfp4MoEMethod
from sglang_server import ADAPTER, HAS_CONTEXT, NEW, VERSION, FusedMoE, addresses_of, installed, only_cores, server
from test_sglang_check import checked
from test_sglang_compressed import rank
from test_sglang_deepep import check as check_dispatched
from test_sglang_deepep import poisoned
from test_sglang_eplb import PLACES, balanced, move
from test_sglang_fp8 import forward

__all__ = ["poisoned"]


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


# Numbers


@pytest.mark.parametrize("shape", [FLASH, PRO_TP8, NOT_PACKED_IN_PLACE], ids=lambda shape: shape.name)
def test_sizes(shape: Shape, device: str, rng: torch.Generator) -> None:
    """Calls have no token, one token and some."""
    blocks, (x, topk) = drawn(shape, device, rng), given(shape, 6, device, rng)
    weights, ids = topk.topk_weights, topk.topk_ids
    truth, before = expected(blocks, x, weights, ids), x.clone()
    with server():
        module = layer_of(blocks)
        for tokens in (slice(0, 0), slice(0, 1), slice(1, 6)):
            result = forward(module, x[tokens], StandardTopKOutput(weights[tokens], ids[tokens], None))
            close(result, truth[tokens])
    assert same_bits(x, before)


@pytest.mark.parametrize(
    "backend", ["auto", "marlin", "flashinfer_mxfp4", "deep_gemm", "flashinfer_trtllm", "flashinfer_trtllm_routed"]
)
@pytest.mark.parametrize("pattern", ["holes", "one_expert", "all_holes"])
def test_layer(backend: str, pattern: str, device: str, rng: torch.Generator) -> None:
    """The runners are those that SGLang, or a user, chooses for this model, and those that swap fp8's gate and up."""
    blocks, (x, topk) = drawn(SMALL, device, rng), given(SMALL, 33, device, rng, pattern)
    with server(backend):
        module = layer_of(blocks)
        # If top-k has the factor, a layer must not apply it.
        factor = 1.0 if module.should_fuse_routed_scaling_factor_in_topk else 1.5
        truth = expected(blocks, x, topk.topk_weights.nan_to_num(), topk.topk_ids, factor=factor)
        close(forward(module, x, topk), truth)


def test_the_limit_and_the_factor_count(rng: torch.Generator) -> None:
    blocks, (x, topk) = drawn(SMALL, "cpu", rng), given(SMALL, 9, "cpu", rng)
    with server():
        ours = forward(layer_of(blocks), x, topk)
        unlimited = forward(layer_of(blocks, swiglu_limit=None), x, topk)
        unscaled = forward(layer_of(blocks, routed_scaling_factor=None), x, topk)
    close(unscaled, expected(blocks, x, topk.topk_weights, topk.topk_ids, factor=1.0))
    assert (unlimited.float() - ours.float()).norm() > ours.float().norm()


@pytest.mark.parametrize("scales", [torch.float8_e8m0fnu, torch.uint8, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codes", [torch.int8, torch.uint8, torch.float4_e2m1fn_x2], ids=str)
def test_dtypes_of_a_checkpoint(codes: torch.dtype, scales: torch.dtype, rng: torch.Generator) -> None:
    """All dtypes have the same bits; so has E8M0's whole range, which fp32 has as powers of two."""
    blocks, (x, topk) = drawn(SMALL, "cpu", rng), given(SMALL, 9, "cpu", rng)
    with server():
        module, other = layer_of(blocks), empty(SMALL)
        load(other, tensors_of(blocks, codes=codes, scales=scales))
        assert same_bits(forward(other, x, topk), forward(module, x, topk))
        blocks.w2_scale[0].view(-1)[:255] = torch.arange(255, dtype=torch.uint8)
        load(empty(SMALL), tensors_of(blocks, codes=codes, scales=scales))
        wide = empty(SMALL)
        load(wide, tensors_of(blocks, codes=codes, scales=scales))
    assert torch.equal(wide.w2_weight_scale_inv.view(torch.uint8), blocks.w2_scale)


@pytest.mark.parametrize("scale", [0.0, 3.0, -1.0, 2.0**-128, float("inf")])
@pytest.mark.parametrize("shard", ["w3", "w2"])
def test_scales_that_are_no_powers_of_two(shard: str, scale: float, rng: torch.Generator) -> None:
    blocks = drawn(SMALL, "cpu", rng)
    with server():
        module = layer_of(blocks)
        before = [parameter.data.clone() for parameter in module.parameters()]
        module.quant_method.restore_weights_before_loading(module)
        wrong = tensors_of(blocks, scales=torch.float32)["weight_scale_inv"](1, shard).clone()
        wrong[2, 1] = scale
        name = f"{'w2' if shard == 'w2' else 'w13'}_weight_scale_inv"
        parameter = getattr(module, name)
        with pytest.raises(ValueError, match=rf"layer 0: {name}: scales of MXFP4 experts must be powers of two.*got"):
            parameter.weight_loader(parameter, wrong, name, shard_id=shard, expert_id=1)
    assert all(same_bits(*pair) for pair in zip((p.data for p in module.parameters()), before, strict=True))


# Ranks


@only_cores
@pytest.mark.parametrize("number", [0, 1])
def test_tensor_parallel_rank(number: int, rng: torch.Generator) -> None:
    blocks, (x, topk) = drawn(SMALL, "cpu", rng), given(SMALL, 9, "cpu", rng)
    share = SMALL.intermediate // 2
    own = slice(number * share, (number + 1) * share)

    def of_w13(whole: Tensor) -> Tensor:
        return torch.cat([half[:, own] for half in whole.chunk(2, 1)], 1)

    mine = dataclasses.replace(blocks, w13=of_w13(blocks.w13), w13_scale=of_w13(blocks.w13_scale))
    mine.w2 = blocks.w2[..., own.start // 2 : own.stop // 2]
    mine.w2_scale = blocks.w2_scale[..., own.start // 32 : own.stop // 32]
    with server(**rank(number, "moe_tp")):
        module = layer_of(blocks)
        assert module.quant_method.weights.intermediate_size == share
        close(forward(module, x, topk), expected(mine, x, topk.topk_weights, topk.topk_ids))


@only_cores
@pytest.mark.parametrize("pattern", ["uniform", "none"])
@pytest.mark.parametrize("backend", ["auto", "flashinfer_mxfp4"])
def test_expert_parallel_rank(backend: str, pattern: str, rng: torch.Generator) -> None:
    """The layer is that of the second of two ranks, also if no token has one of its experts. Before 0.5.23 the second
    backend leaves ids of all ranks' experts."""
    half = SMALL.experts // 2
    blocks, (x, topk) = drawn(SMALL, "cpu", rng), given(SMALL, 9, "cpu", rng)
    weights, ids = topk.topk_weights, topk.topk_ids
    ids = ids % half if pattern == "none" else ids
    with server(backend, **rank(1, "moe_ep")):
        module = layer_of(blocks)
        assert module.quant_method.weights.num_experts == half
        stay = getattr(module.dispatcher, "skip_local_expert_mapping", False)
        assert stay == (backend == "flashinfer_mxfp4" and not capabilities.layer_decides())
        # The ids are those that the dispatcher would make, which needs a GPU.
        local = ids if stay else torch.where(ids >= half, ids - half, -1).int()
        dispatched = StandardDispatchOutput(x, None, StandardTopKOutput(weights, local, None))
        result = module.quant_method.apply(module, dispatched).hidden_states
    close(result, expected(blocks, x, weights, torch.where(ids >= half, ids, -1)))
    assert pattern != "none" or not result.any()


@pytest.mark.usefixtures("poisoned")
def test_behind_an_all_to_all(rng: torch.Generator) -> None:
    """DeepEP's tokens in both modes give the bits of `moe`."""
    shape = SMALL.with_options(limit=10.0)
    blocks = drawn(shape, "cpu", rng)
    with server():
        module = layer_of(blocks)
    topk = routed(shape, 11, "cpu", rng, "holes")
    with server(a2a="deepep"):
        check_dispatched(
            lambda dispatched: module.quant_method.apply(module, dispatched),
            blocks.weights(),
            lambda *operands: torch.empty(0),  # stands for a call on GPUs
            make_x(11, shape, torch.bfloat16, "cpu", rng),
            (topk.topk_weights, topk.topk_ids),
            shape.experts,
        )


# Updates and moved experts


def test_experts_move_with_rows_of_parameters(device: str, rng: torch.Generator) -> None:
    blocks, (x, topk) = drawn(SMALL, device, rng), given(SMALL, 9, device, rng)
    places = torch.cat([PLACES, torch.arange(4, 8)])
    with server(), balanced():
        module = layer_of(blocks)
        # NCCL sends no E8M0.
        assert not {p.dtype for p in module.parameters()} - {torch.int8, torch.uint8, torch.float32}
        before = forward(module, x, topk)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("test_sglang_eplb.PLACES", places)
            move(module)
        assert not same_bits(forward(module, x, topk), before)
        moved = torch.argsort(places)[topk.topk_ids.long().cpu()].int().to(device)
        assert same_bits(forward(module, x, StandardTopKOutput(topk.topk_weights, moved, None)), before)


class Model(torch.nn.Module):
    def __init__(self, experts: FusedMoE) -> None:
        super().__init__()
        self.experts = experts

    def load_weights(self, weights: Any) -> None:
        write(self.experts, dict(weights))


@pytest.fixture
def packed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the weights only count as packed."""
    if device == "cpu":
        names = {"w13_weight", "w2_weight", *SCALES}
        monkeypatch.setattr(loading, "packed_parameters", lambda layer, weights: names)
        monkeypatch.setattr(loading, "is_derived", lambda layer, weights: True)


@pytest.mark.usefixtures("packed")
def test_updates(device: str, rng: torch.Generator) -> None:
    """Updates by SGLang's loader are right, with all addresses kept. They are refused if nothing is processed, or if
    only a part is written."""
    first, second = (drawn(SMALL, device, rng) for _ in range(2))
    x, topk = given(SMALL, 9, device, rng)
    with server():
        module = layer_of(first)
        before, addresses = forward(module, x, topk), addresses_of(module.quant_method.weights)
        with pytest.raises(RuntimeError, match="MXFP4 experts were prepared at load"):
            write(module, tensors_of(second))
        assert same_bits(forward(module, x, topk), before)
        DefaultModelLoader.load_weights_and_postprocess(
            Model(module), list(tensors_of(second).items()), torch.device(device)
        )
        close(forward(module, x, topk), expected(second, x, topk.topk_weights, topk.topk_ids))
        assert addresses_of(module.quant_method.weights) == addresses
        module.quant_method.restore_weights_before_loading(module)
        write(module, tensors_of(first), range(3))
        with pytest.raises(RuntimeError, match="wrote parts of packed MXFP4 experts"):
            module.quant_method.process_weights_after_loading(module)
        write(module, tensors_of(first), range(3, SMALL.experts))
        module.quant_method.process_weights_after_loading(module)
        assert same_bits(forward(module, x, topk), before)
    assert not updates.post_processing_follows()


HAS_FP8_SHARED = hasattr(FusedMoE, "_maybe_load_fp8_shared_expert_as_fp4")


@pytest.mark.skipif(not HAS_FP8_SHARED, reason="this SGLang fuses no fp8 shared expert into MXFP4 experts")
def test_a_fused_shared_expert(rng: torch.Generator) -> None:
    """With --enforce-shared-experts-fusion SGLang quantises the fp8 shared expert, and adds it as one more expert."""
    shape = Shape("v4-shared", 8, 3, 256, 256)
    routed_blocks = drawn(shape, "cpu", rng)
    weights = torch.randn((768, 256), generator=rng)
    scales = torch.exp2(torch.randint(-12, -9, (6, 2), generator=rng).float())
    fp8 = (weights * 20).to(torch.float8_e4m3fn)
    dequantised = fp8.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    with server():
        module = empty(dataclasses.replace(shape, experts=9, top_k=4), num_fused_shared_experts=1)
        write(module, tensors_of(routed_blocks), range(8))
        shared = {
            "weight": lambda expert, shard: fp8.chunk(3)[("w1", "w3", "w2").index(shard)],
            "weight_scale_inv": lambda expert, shard: scales.chunk(3)[("w1", "w3", "w2").index(shard)],
        }
        write(module, shared, [8])
        module.quant_method.process_weights_after_loading(module)
        x = make_x(5, shape, torch.bfloat16, "cpu", rng)
        only = StandardTopKOutput(torch.ones((5, 1)), torch.full((5, 1), 8, dtype=torch.int32), None)
        result = forward(module, x, only)
        topk = routed(shape, 5, "cpu", rng)
        close(forward(module, x, topk), expected(routed_blocks, x, topk.topk_weights, topk.topk_ids))
    gate, up = (x.float() @ dequantised[:512].T).chunk(2, -1)
    truth = 1.5 * (torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)) @ dequantised[512:].T
    # The bar is what MXFP4 does to numbers of a normal distribution.
    assert 0.02 < (result.float() - truth).norm() / truth.norm() < 0.35


# Checkpoints that oxmoe gets, and refusals


def model_folder(folder: Path, dtype: str, **fields: Any) -> Path:
    """Writes a config.json, and one tensor of an expert, which has a header and no bytes."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2}
    model = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "num_hidden_layers": 4, **sizes}
    model |= {"vocab_size": 512, "quantization_config": {**CHECKPOINT, **fields}, "max_position_embeddings": 4096}
    model |= {"rope_scaling": {"factor": 16, "original_max_position_embeddings": 256, "type": "yarn"}}
    model |= {"index_head_dim": 128, "head_dim": 512, "qk_rope_head_dim": 64, "num_attention_heads": 4, "o_groups": 2}
    model |= {
        "compress_ratios": [0, 0, 4, 128],
        "sliding_window": 128,
        "topk_method": "noaux_tc",
        "n_shared_experts": 1,
    }
    (folder / "config.json").write_text(json.dumps(model))
    header = {"layers.3.ffn.experts.0.w1.weight": {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return folder


@pytest.mark.parametrize(("dtype", "fp4"), [("I8", True), ("U8", True), ("F8_E4M3", False)])
def test_a_checkpoint_comes_to_us(dtype: str, fp4: bool, tmp_path: Path) -> None:
    """The checkpoint's files lead to oxmoe by SGLang's own code, without a flag."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.weight_utils import get_quant_config

    with server():
        model = ModelConfig(model_path=str(model_folder(tmp_path, dtype)), dtype="bfloat16")
        assert (model.quantization, model.is_fp4_experts) == ("oxmoe", fp4)
        quant_config = get_quant_config(model, LoadConfig(), {})
        assert quant_config.get_name() == "fp8", "by which models choose what they do with other layers"
        # SGLang's loader does this for each Fp8Config, in a function that asks for a GPU.
        quant_config.is_fp4_experts = model.is_fp4_experts
        module = empty(Shape("v4", 8, 2, 256, 128), quant_config=quant_config)
    assert module.quant_method.oxmoe and isinstance(module.quant_method, OxmoeFp8Mxfp4MoEMethod) is fp4


def test_layers_that_a_checkpoint_leaves_unquantised() -> None:
    with server("oxmoe" if NEW else "auto"):
        module = empty(SMALL, quant_config=config(ignored_layers=["model.layers.0.mlp.experts"]))
    assert module.quant_method.oxmoe and module.w13_weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({}, {"params_dtype": torch.float16}, r"MXFP4 experts need --dtype bfloat16, got torch\.float16"),
        ({}, {"intermediate_size": 80}, "must be multiples of 32, got intermediate_size of a rank 80"),
        ({}, {"with_bias": True}, "not served with biases"),
        ({"dequant_fp4_to_fp8": True}, {}, "SGLANG_DSV4_FP4_DEQUANT=1 would make fp8"),
    ],
    ids=["f16", "sizes", "biases", "dequantised"],
)
def test_refused_while_the_model_is_built(fields: dict[str, Any], options: dict[str, Any], message: str) -> None:
    shape = dataclasses.replace(SMALL, intermediate=options.pop("intermediate_size", SMALL.intermediate))
    with server(), pytest.raises(NotImplementedError, match=message):
        empty(shape, quant_config=config(**fields), **options)


@pytest.mark.parametrize(
    ("a2a", "error", "message"),
    [
        ("mooncake", ValueError, "mooncake.* always sends fp8, but oxmoe with mxfp4 weights needs bf16"),
        ("megamoe", NotImplementedError, "--moe-a2a-backend megamoe: not served"),
    ],
)
def test_all_to_alls_are_refused_while_the_model_is_built(a2a: str, error: type[Exception], message: str) -> None:
    layer = torch.nn.Module()
    layer.moe_runner_config = SimpleNamespace(is_gated=True)
    with server(a2a=a2a), pytest.raises(error, match=message):
        OxmoeFp8Mxfp4MoEMethod(config()).create_weights(layer, 8, 256, 128, torch.bfloat16)
    assert not list(layer.parameters())


def test_other_methods_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """OXMOE_SGLANG leaves out the part that takes such experts."""
    monkeypatch.setenv(setting.SETTING, "moe=deep_gemm")
    method = type("Mxfp4MarlinMoEMethod", (), {})()
    layers.watch(setting.read(VERSION), ADAPTER, lambda: None)
    try:
        with server():
            module = empty(SMALL)
        module.quant_method = method
        with pytest.raises(RuntimeError, match="let OXMOE_SGLANG name moe=oxmoe, which takes the MXFP4 experts of fp8"):
            layers.check_layer(module)
    finally:
        layers.unwatch()


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("intermediate", [256, 192, 96])
@only_cores
def test_what_the_check_says(intermediate: int, tp: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": intermediate, "n_routed_experts": 8}
    report = checked(tmp_path, {**deepseek_v4(CHECKPOINT), **sizes}, capsys, "--tp", str(tp))
    why = None
    with server(moe_tp_size=tp, tp_size=tp, attn_tp_size=tp):
        try:
            empty(dataclasses.replace(SMALL, intermediate=intermediate))
        except NotImplementedError as error:
            why = str(error)
    assert report["served"] == (why is None), (why, report["refused"])


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [256, 384])
def test_weights_are_packed_in_their_own_memory(experts: int, rng: torch.Generator) -> None:
    shape = Shape("v4-packed", experts, 6, 4096, 2048) if experts == 256 else Shape("v4-packed", experts, 6, 7168, 384)
    blocks, (x, topk) = drawn(shape, "cuda", rng), given(shape, 17, "cuda", rng)
    truth = expected(blocks, x, topk.topk_weights, topk.topk_ids)
    with server():
        module = layer_of(blocks)
        weights = module.quant_method.weights
        for name, packed in (("w13", weights.w13_packed), ("w2", weights.w2_packed)):
            assert packed[0].data_ptr() == getattr(module, f"{name}_weight").data_ptr()
            assert packed[1].data_ptr() == getattr(module, f"{name}_weight_scale_inv").data_ptr()
        close(forward(module, x, topk), truth)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CONTEXT, reason="older releases' Marlin method asks for more of a server")
def test_beside_sglangs_marlin(rng: torch.Generator) -> None:
    """SGLang's own method for these experts runs on the same checkpoint."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    shape = Shape("v4-marlin", 64, 6, 4096, 2048)
    blocks, (x, topk) = drawn(shape, "cuda", rng), given(shape, 33, "cuda", rng)
    topk = topk._replace(router_logits=torch.zeros((33, shape.experts), device="cuda"))
    theirs = Fp8Config.from_config(dict(CHECKPOINT))
    theirs.is_fp4_experts = True
    with server("marlin"):
        module = empty(shape, "cuda", theirs)
        load(module, tensors_of(blocks))
        truth = expected(blocks, x, topk.topk_weights, topk.topk_ids)
        marlin = forward(module, x.clone(), topk).double()
        # SGLang's own top-k has the factor for this method.
        marlin *= 1.5 if module.should_fuse_routed_scaling_factor_in_topk else 1.0
        ours = forward(layer_of(blocks), x, topk)
    close(ours, truth)
    assert (ours.double() - truth).norm() <= 1.05 * (marlin - truth).norm()
