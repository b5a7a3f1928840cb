"""fp8 experts in SGLang's layers: block scales under its runner "deep_gemm" and by "oxmoe", MXFP8 by "oxmoe"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import Shape, draws, make_routing
from fp8_cases import CPU_BAR, Fp8, make_fp8
from mxfp8_cases import Mxfp8, make_mxfp8
from oxmoe import reference
from oxmoe.testing import FP8_BAR, assert_close_ulp, same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.moe.moe_runner.deep_gemm import DeepGemmMoeQuantInfo
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

from sglang_server import NEW, FusedMoE, MoeRunnerConfig, addresses_of, installed, server

SHAPE = Shape("sglang-fp8", 8, 2, 256, 384)
CHECKPOINT = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP8 = {"quant_method": "mxfp8", "activation_scheme": "dynamic"}
ONE_SCALE = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


def fp8_layer(
    layer: Fp8 | Mxfp8, quantization: str, checkpoint: dict[str, Any] = CHECKPOINT, **options: Any
) -> FusedMoE:
    """Returns SGLang's layer, loaded by its own loader from a checkpoint's tensors, expert by expert."""
    shape = layer.shape
    with torch.device(layer.w13.device):
        module = FusedMoE(
            num_experts=shape.experts,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            layer_id=0,
            top_k=shape.top_k,
            params_dtype=torch.bfloat16,
            quant_config=get_quantization_config(quantization).from_config(checkpoint),
            **options,
        )
    load_fp8(module, layer, quantization)
    return module


def load_fp8(module: FusedMoE, layer: Fp8 | Mxfp8, quantization: str) -> None:
    tensors = (("weight", layer.w13, layer.w2), ("weight_scale_inv", layer.w13_scale, layer.w2_scale))
    for expert in range(layer.shape.experts):
        for suffix, w13, w2 in tensors:
            halves = w13[expert].chunk(2)
            for shard, tensor in (("w1", halves[0]), ("w3", halves[1]), ("w2", w2[expert])):
                parameter = getattr(module, f"{'w2' if shard == 'w2' else 'w13'}_{suffix}")
                full = f"experts.{expert}.{shard}.{suffix}"
                parameter.weight_loader(parameter, tensor, full, shard_id=shard, expert_id=expert)
    # SGLang's own method would pack weights for AMX on a CPU.
    if quantization == "oxmoe" or layer.w13.is_cuda:
        module.quant_method.process_weights_after_loading(module)


def forward(module: FusedMoE, x: Tensor, topk: Any) -> Tensor:
    """Runs the layer as it runs on CUDA."""
    return module.quant_method.apply(module, module.dispatcher.dispatch(x, topk)).hidden_states


def operands(tokens: int, device: str, rng: torch.Generator, pattern: str = "holes") -> tuple[Fp8, Tensor, Any]:
    layer = make_fp8(SHAPE, device, rng)
    weights, ids = make_routing(pattern, tokens, SHAPE.experts, SHAPE.top_k, rng)
    return layer, layer.x(tokens, rng), StandardTopKOutput(weights.to(device), ids.to(device), None)


def expected(layer: Fp8, x: Tensor, topk: Any, **options: Any) -> Tensor:
    scales = {"w13_scale": layer.w13_scale, "w2_scale": layer.w2_scale}
    return reference.moe(x, layer.w13, layer.w2, topk.topk_weights, topk.topk_ids, **scales, **options)


def close(result: Tensor, truth: Tensor) -> None:
    assert_close_ulp(result, truth, FP8_BAR if result.is_cuda else CPU_BAR)


@pytest.mark.parametrize("options", [{}, {"routed_scaling_factor": 2.5}, {"swiglu_limit": 0.5}], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("quantization", ["fp8", "oxmoe"])
def test_layer(device: str, quantization: str, tokens: int, options: dict[str, Any], rng: torch.Generator) -> None:
    """Under "fp8" the layer has SGLang's method with its runner deep_gemm. Under "oxmoe" it has oxmoe's method. The
    tokens stay in both."""
    layer, x, topk = operands(tokens, device, rng)
    meant = {"limit": 0.5, "clamp": "before"} if "swiglu_limit" in options else options
    results, truths = [], []
    with server("deep_gemm" if quantization == "fp8" else "auto"):
        module = fp8_layer(layer, quantization, **options)
        for drawn in draws(x):
            given = drawn.clone()
            results.append(forward(module, given, topk))
            truths.append(expected(layer, drawn, topk, **meant))
            assert same_bits(given, drawn)
    close(torch.cat(results), torch.cat(truths))


@pytest.mark.parametrize("backend", ["auto", "triton", "deep_gemm"])
def test_quantization_needs_no_backend(backend: str, rng: torch.Generator) -> None:
    layer, x, topk = operands(5, "cpu", rng)
    with server(backend):
        module = fp8_layer(layer, "oxmoe", inplace=False)
        assert module.quant_method.oxmoe
        close(forward(module, x, topk), expected(layer, x, topk))


def test_weights_are_used_as_they_lie(rng: torch.Generator) -> None:
    """The layer follows a later update in the same memory."""
    layer, x, topk = operands(5, "cpu", rng)
    other = make_fp8(SHAPE, "cpu", rng)
    with server():
        module = fp8_layer(layer, "oxmoe", inplace=False)
        forward(module, x, topk)
        for name, tensor in (("weight", other.w13), ("weight_scale_inv", other.w13_scale)):
            getattr(module, f"w13_{name}").data.copy_(tensor)
        for name, tensor in (("weight", other.w2), ("weight_scale_inv", other.w2_scale)):
            getattr(module, f"w2_{name}").data.copy_(tensor)
        close(forward(module, x, topk), expected(other, x, topk))


def test_one_scale_an_expert_under_deep_gemm(device: str, rng: torch.Generator) -> None:
    """SGLang spreads such a scale over blocks anew at each call."""
    layer, x, topk = operands(9, device, rng)
    layer.w13_scale = (torch.rand(SHAPE.experts, generator=rng) * 0.01 + 0.001).to(device)
    layer.w2_scale = (torch.rand(SHAPE.experts, generator=rng) * 0.01 + 0.001).to(device)
    with server("deep_gemm"):
        module = one_scale_layer(layer)
        results = [forward(module, x, topk) for _ in range(2)]
    w13_scale, w2_scale = (
        scale[:, None, None].expand(-1, rows // 128, columns // 128).contiguous()
        for scale, (_, rows, columns) in ((layer.w13_scale, layer.w13.shape), (layer.w2_scale, layer.w2.shape))
    )
    spread = Fp8(SHAPE, layer.w13, layer.w2, w13_scale, w2_scale, None, None)
    close(results[0], expected(spread, x, topk))
    assert same_bits(*results)


def one_scale_layer(layer: Fp8) -> FusedMoE:
    """Returns a layer as process_weights_after_loading leaves it, which asks a GPU's kernels to quantise anew."""
    with torch.device(layer.w13.device):
        module = FusedMoE(
            num_experts=SHAPE.experts,
            hidden_size=SHAPE.hidden,
            intermediate_size=SHAPE.intermediate,
            layer_id=0,
            top_k=SHAPE.top_k,
            params_dtype=torch.bfloat16,
            quant_config=get_quantization_config("fp8").from_config(ONE_SCALE),
        )
    module.w13_weight.data.copy_(layer.w13)
    module.w2_weight.data.copy_(layer.w2)
    module.w13_weight_scale = torch.nn.Parameter(layer.w13_scale, requires_grad=False)
    module.w2_weight_scale.data.copy_(layer.w2_scale)
    return module


@pytest.mark.parametrize("options", [{}, {"routed_scaling_factor": 2.5}], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_mxfp8_layer(device: str, tokens: int, options: dict[str, Any], rng: torch.Generator) -> None:
    layer = make_mxfp8(SHAPE, device, rng)
    x = layer.x(tokens, rng)
    weights, ids = (part.to(device) for part in make_routing("holes", tokens, SHAPE.experts, SHAPE.top_k, rng))
    before = x.clone()
    with server():
        truth = layer.reference(x, weights, ids, **options)
        module = fp8_layer(layer, "oxmoe", MXFP8, **options)
        result = forward(module, x, StandardTopKOutput(weights, ids, None))
    close(result, truth)
    assert same_bits(x, before)


def test_mxfp8_weights_are_updated_in_place(device: str, rng: torch.Generator) -> None:
    """CUDA graphs know addresses: after an update every tensor is where it was."""
    first, second = (make_mxfp8(SHAPE, device, rng) for _ in range(2))
    x = first.x(9, rng)
    weights, ids = (part.to(device) for part in make_routing("uniform", 9, SHAPE.experts, SHAPE.top_k, rng))
    with server():
        module = fp8_layer(first, "oxmoe", MXFP8)
        addresses = addresses_of(module.quant_method.weights)
        module.quant_method.restore_weights_before_loading(module)
        load_fp8(module, second, "oxmoe")
        assert addresses_of(module.quant_method.weights) == addresses
        result = forward(module, x, StandardTopKOutput(weights, ids, None))
    close(result, second.reference(x, weights, ids))


@pytest.mark.gpu
def test_mxfp8_checkpoint_is_packed_in_its_own_memory(rng: torch.Generator) -> None:
    with server():
        module = fp8_layer(make_mxfp8(SHAPE, "cuda", rng), "oxmoe", MXFP8)
    weights = module.quant_method.weights
    assert weights.w13_packed[0].data_ptr() == module.w13_weight.data_ptr()
    assert weights.w2_packed[0].data_ptr() == module.w2_weight.data_ptr()


def _info(kind: str, **fields: Any) -> Any:
    w13, w2 = (torch.zeros(8, *size, dtype=torch.float8_e4m3fn) for size in ((768, 256), (256, 384)))
    scales = {"w13_scale": torch.ones(8, 6, 2), "w2_scale": torch.ones(8, 2, 3), "block_shape": [128, 128]}
    given = {**scales, **fields}
    if kind == "deep_gemm":
        return DeepGemmMoeQuantInfo(w13, w2, True, **given)
    return TritonMoeQuantInfo(w13, w2, use_fp8_w8a8=True, **given)


@pytest.mark.parametrize(
    ("kind", "fields", "options", "message"),
    [
        ("deep_gemm", {"is_fp4_experts": True}, {}, "DeepGemmMoeQuantInfo with is_fp4_experts"),
        ("deep_gemm", {"block_shape": [1, 32]}, {}, r"DeepGemmMoeQuantInfo with block_shape \[1, 32\]"),
        ("deep_gemm", {"block_shape": [64, 128]}, {}, r"DeepGemmMoeQuantInfo with block_shape \[64, 128\]"),
        (
            "deep_gemm",
            {"w2_scale": torch.ones(8, 2, 3, dtype=torch.int32)},
            {},
            r"scales of torch.float32, torch.int32",
        ),
        ("deep_gemm", {}, {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, "deep_gemm hands over no biases"),
        ("triton", {"block_shape": None}, {}, "TritonMoeQuantInfo with one scale an expert"),
        ("triton", {"a13_scale": torch.ones(1)}, {}, "TritonMoeQuantInfo with a13_scale"),
        ("triton", {"per_channel_quant": True}, {}, "TritonMoeQuantInfo with per_channel_quant"),
    ],
    ids=["fp4", "mxfp8", "block", "scales", "gpt-oss", "tensor", "static", "channel"],
)
def test_refused(kind: str, fields: dict[str, Any], options: dict[str, Any], message: str) -> None:
    from oxmoe.sglang.experts import Experts

    topk = StandardTopKOutput(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int32), None)
    dispatched = StandardDispatchOutput(torch.zeros(1, 256, dtype=torch.bfloat16), None, topk)
    runner_config = MoeRunnerConfig(num_experts=8, num_local_experts=8, top_k=2, inplace=False, **options)
    with pytest.raises(NotImplementedError, match=message):
        Experts().run(dispatched, _info(kind, **fields), runner_config)


@pytest.mark.parametrize(("checkpoint", "name"), [(CHECKPOINT, "fp8"), (MXFP8, "MXFP8")], ids=["fp8", "mxfp8"])
def test_refuses_other_tokens(checkpoint: dict[str, Any], name: str) -> None:
    message = rf"{name} experts need --dtype bfloat16, got torch\.float16"
    with server(), pytest.raises(NotImplementedError, match=message):
        FusedMoE(
            num_experts=8,
            hidden_size=256,
            intermediate_size=128,
            layer_id=0,
            top_k=2,
            params_dtype=torch.float16,
            quant_config=get_quantization_config("oxmoe").from_config(checkpoint),
        )


@pytest.mark.parametrize(
    ("checkpoint", "asked", "answer"),
    [
        (CHECKPOINT, None, "oxmoe"),
        (CHECKPOINT, "fp8", "oxmoe"),
        (CHECKPOINT, "oxmoe", "oxmoe"),
        (CHECKPOINT, "w8a8_fp8", None),
        (ONE_SCALE, None, "oxmoe"),
        ({**CHECKPOINT, "weight_block_size": [1, 32]}, None, None),
        (MXFP8, None, "oxmoe"),
        (MXFP8, "mxfp8", "oxmoe"),
        (MXFP8, "fp8", None),
    ],
    ids=["blocks", "fp8", "oxmoe", "other", "tensor", "rows", "mxfp8", "mxfp8-asked", "mxfp8-as-fp8"],
)
def test_checkpoints_that_are_ours(checkpoint: dict[str, Any], asked: str | None, answer: str | None) -> None:
    assert QUANTIZATION_METHODS["oxmoe"].override_quantization_method(checkpoint, asked) == answer


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ({**CHECKPOINT, "weight_block_size": [64, 128]}, r"checkpoint of fp8 with blocks of \[64, 128\]; served are"),
        ({"quant_method": "w8a8_fp8"}, "checkpoint of w8a8_fp8"),
    ],
    ids=["block", "other"],
)
def test_quantization_refuses_other_checkpoints(checkpoint: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        get_quantization_config("oxmoe").from_config(checkpoint)


def test_layers_that_a_checkpoint_leaves_unquantised() -> None:
    quant_config = get_quantization_config("oxmoe").from_config(
        {**CHECKPOINT, "modules_to_not_convert": ["model.layers.0.mlp.experts"]}
    )
    with server("oxmoe" if NEW else "auto"):
        layers = [
            FusedMoE(
                num_experts=8,
                hidden_size=256,
                intermediate_size=128,
                layer_id=number,
                top_k=2,
                params_dtype=torch.bfloat16,
                quant_config=quant_config,
                prefix=f"model.layers.{number}.mlp.experts",
            )
            for number in (0, 1)
        ]
    assert isinstance(layers[0].quant_method, UnquantizedFusedMoEMethod) and layers[0].quant_method.oxmoe
    assert not isinstance(layers[1].quant_method, UnquantizedFusedMoEMethod) and layers[1].quant_method.oxmoe


def test_mxfp8_begins_with_hopper() -> None:
    """SGLang's own MXFP8 begins with Blackwell."""
    assert get_quantization_config("oxmoe").from_config(MXFP8).get_min_capability() == 90
    assert get_quantization_config("fp8").from_config(MXFP8).get_min_capability() == 100


def from_model(tmp_path: Path, checkpoint: dict[str, Any]) -> tuple[str, Any, FusedMoE]:
    """Returns what SGLang's own code makes of a config.json without a flag: the quantization, its configuration, a
    layer."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.weight_utils import get_quant_config

    model_config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "quantization_config": checkpoint,
    }
    (tmp_path / "config.json").write_text(json.dumps(model_config))
    with server():
        model = ModelConfig(model_path=str(tmp_path), dtype="bfloat16")
        quant_config = get_quant_config(model, LoadConfig(), {})
        options: dict[str, Any] = {"num_experts": 8, "hidden_size": 256, "intermediate_size": 128, "layer_id": 0}
        options |= {"top_k": 2, "params_dtype": torch.bfloat16, "prefix": "model.layers.0.mlp.experts"}
        return model.quantization, quant_config, FusedMoE(**options, quant_config=quant_config)


def test_an_fp8_checkpoint_comes_to_us(tmp_path: Path) -> None:
    quantization, quant_config, layer = from_model(tmp_path, CHECKPOINT)
    assert quantization == "oxmoe" and layer.quant_method.oxmoe
    assert quant_config.get_name() == "fp8", "by which models choose what they do with other layers"
