"""MiniMax-M3's MXFP8 checkpoint in SGLang: its configuration, experts, and the projection that its attention makes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Shape, make_routing, make_x
from mxfp8_cases import Mxfp8, make_mxfp8
from oxmoe import quantize
from oxmoe.testing import same_bits

pytest.importorskip("sglang")

from safetensors.torch import load_file
from sglang.srt.layers import linear as theirs
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import fp8, get_quantization_config
from sglang.srt.layers.radix_attention import RadixAttention

from oxmoe.sglang import layers, quantization
from sglang_cpu.checkpoints import LAYERS, dequantised, make
from sglang_server import NEW, VERSION, argument, installed, only_cores, server
from test_sglang_fp8 import forward

minimax_m3 = pytest.importorskip("sglang.srt.models.minimax_m3", reason="this SGLang has no MiniMax-M3")
CHECKPOINT = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
OF_NVFP4 = {**CHECKPOINT, "moe_quant_algo": "NVFP4", "moe_quant_format": "nvfp4-pack-quantized"}
SHAPE = Shape("minimax-m3", 8, 2, 128, 192)
ALPHA, LIMIT = 1.702, 1.25  # the model has 7; here many numbers meet the bound
NO_GROUP: dict[str, Any] = {} if NEW else {"tp_rank": 0, "tp_size": 1}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


def config() -> Any:
    return get_quantization_config("oxmoe").from_config(dict(CHECKPOINT))


def test_the_checkpoint_comes_to_us(tmp_path: Path) -> None:
    """SGLang's settings of this model name its quantization, as a user could."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.weight_utils import get_quant_config

    text = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 1}
    text |= {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": 64, "quantization_config": CHECKPOINT}
    (tmp_path / "config.json").write_text(json.dumps(text))
    with server():
        model = ModelConfig(model_path=str(tmp_path), dtype="bfloat16", quantization="mxfp8")
        found = get_quant_config(model, LoadConfig(), {})
    assert model.quantization == "oxmoe" and isinstance(found, quantization.OxmoeFp8Config) and found.use_mxfp8


def test_other_experts_of_an_mxfp8_checkpoint_are_not_claimed() -> None:
    """MiniMax-M3.1's are NVFP4, by fields that releases before it do not read."""
    ours = get_quantization_config("oxmoe")
    for asked in (None, "mxfp8", "minimax_m3_nvfp4"):
        assert ours.override_quantization_method(dict(OF_NVFP4), asked) is None
    assert ours.override_quantization_method(dict(CHECKPOINT), "mxfp8") == "oxmoe"
    with pytest.raises(NotImplementedError, match="no kernel for a checkpoint of mxfp8"):
        ours.from_config(dict(OF_NVFP4))


@contextmanager
def settled() -> Iterator[None]:
    """What a server without redundant and fused shared experts has decided before it builds the model."""
    with (
        argument("exec.moe", "ep_num_redundant_experts", 0),
        argument("exec.moe", "disable_shared_experts_fusion", True),
    ):
        yield


def block(device: str) -> Any:
    """SGLang's MoE block of the model, as the model makes it."""
    of_model = SimpleNamespace(
        num_local_experts=SHAPE.experts,
        num_experts_per_tok=SHAPE.top_k,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.intermediate,
        n_shared_experts=None,
        routed_scaling_factor=2.0,
        use_routing_bias=True,
        scoring_func="sigmoid",
        hidden_act="swigluoai",
        swiglu_alpha=ALPHA,
        swiglu_limit=LIMIT,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return minimax_m3.MiniMaxM3MoE(of_model, 3, config(), prefix="model.layers.3.block_sparse_moe")
    finally:
        torch.set_default_dtype(default)


def load(experts: Any, layer: Mxfp8) -> None:
    """Writes a checkpoint's tensors through SGLang's loader: gate is w1, up is w3."""
    for suffix, w13, w2 in (("weight", layer.w13, layer.w2), ("weight_scale_inv", layer.w13_scale, layer.w2_scale)):
        up_down = {"w13": getattr(experts, f"w13_{suffix}"), "w2": getattr(experts, f"w2_{suffix}")}
        for expert in range(SHAPE.experts):
            gate, up = w13[expert].chunk(2)
            for shard, name, tensor in (("w1", "w13", gate), ("w3", "w13", up), ("w2", "w2", w2[expert])):
                parameter = up_down[name]
                given = f"experts.{expert}.{shard}.{suffix}"
                parameter.weight_loader(parameter, tensor, given, shard_id=shard, expert_id=expert)
    experts.quant_method.process_weights_after_loading(experts)


def numbers(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.double() * torch.exp2(scales.double() - 127).repeat_interleave(32, -1)


def wanted(layer: Mxfp8, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """By the model's own formula on the dequantised weights, in fp64; gate and up are halves of w13."""
    w13 = numbers(layer.w13, layer.w13_scale)
    w2 = numbers(layer.w2, layer.w2_scale)
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            gate, up = (w13[expert] @ x[token].double()).chunk(2)
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
            result[token] += weight * (w2[expert] @ (gate * torch.sigmoid(ALPHA * gate) * (up + 1)))
    return result


@only_cores
@pytest.mark.parametrize(("tokens", "backend"), [(1, "auto"), (17, "auto"), (17, "flashinfer_trtllm")])
def test_experts(device: str, tokens: int, backend: str, rng: torch.Generator) -> None:
    """Also where SGLang chooses flashinfer_trtllm, as it does for this model, and pads what a rank has of an expert."""
    layer, x = make_mxfp8(SHAPE, device, rng), make_x(tokens, SHAPE, torch.bfloat16, device, rng)
    weights, ids = (part.to(device) for part in make_routing("uniform", tokens, SHAPE.experts, SHAPE.top_k, rng))
    with server(backend), settled():
        experts = block(device).experts
        assert type(experts.quant_method) is quantization.OxmoeMxfp8MoEMethod
        load(experts, layer)
        layers.check_layer(experts)
        result = forward(experts, x, StandardTopKOutput(weights, ids, None))
    held = experts.quant_method.weights
    assert held.format == "mxfp8"
    assert (held.w13 if device == "cpu" else held.w13_packed[0]).data_ptr() == experts.w13_weight.data_ptr()
    exact = wanted(layer, x, weights, ids)
    # Activations are rounded to e4m3 twice, each time by 4 of 100 parts. Other rows or bounds give other numbers.
    assert (result.double() - exact).norm() / exact.norm() < 0.12
    options = {"alpha": ALPHA, "beta": 1.0, "limit": LIMIT, "layout": "gate_up"}
    assert same_bits(result, oxmoe.moe(x, layer.weights(**options), weights, ids))


def projection(sizes: list[int], rng: torch.Generator, device: str = "cpu") -> Any:
    """A linear layer of the attention: codes and scales of a checkpoint, through SGLang's loader."""
    with torch.device(device):
        layer = theirs.MergedColumnParallelLinear(
            128,
            sizes,
            bias=False,
            quant_config=config(),
            params_dtype=torch.bfloat16,
            prefix="model.layers.3.p",
            **NO_GROUP,
        )
    for shard, rows in enumerate(sizes):
        drawn = torch.randn((rows, 128), generator=rng).bfloat16()
        codes, scales = quantize.mxfp8(drawn, layout="linear")
        layer.weight.weight_loader(layer.weight, codes, shard)
        layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, scales.view(rows, 4), shard)
    return layer


@pytest.mark.parametrize("backend", ["UNSUPPORTED", "DEEP_GEMM", "FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS"])
def test_the_projection_that_the_attention_joins(
    device: str, backend: str, monkeypatch: pytest.MonkeyPatch, rng: torch.Generator
) -> None:
    """The model joins the parameters of two projections, and asks their method to prepare them. On Hopper SGLang then
    prepares them for DeepGEMM, or for what --fp8-gemm-backend names."""
    found = type(fp8.resolve_mxfp8_dense_gemm_backend())[backend]
    monkeypatch.setattr(fp8, "resolve_mxfp8_dense_gemm_backend", lambda: found)
    with server():
        first, second = projection([64, 32], rng, device), projection([32, 32], rng, device)
        method = first.quant_method
        assert method.oxmoe and method.use_mxfp8
        codes, scales = (
            torch.cat([getattr(layer, name).data.view(torch.uint8) for layer in (first, second)])
            for name in ("weight", "weight_scale_inv")
        )
        weight = codes.view(torch.float8_e4m3fn)
        joined = minimax_m3._FusedQKVIndexProj(method, weight.clone(), scales.clone(), 128, [96, 64], torch.bfloat16)
        x = torch.randn((5, 128), generator=rng).bfloat16().to(device)
        assert same_bits(joined(x), oxmoe.mxfp8_linear(x, weight, scales))
    assert {name for name, _ in joined.named_parameters()} == {"weight", "weight_scale_inv"}


@pytest.mark.parametrize("backend", ["DEEP_GEMM", "FLASHINFER_CUTLASS", "FLASHINFER_CUTEDSL"])
def test_activations_come_as_they_are(backend: str, monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    """Not in the layout of one of SGLang's kernels, which the model asks the method about."""
    mxfp8_input = pytest.importorskip("sglang.srt.layers.quantization.mxfp8_input")
    found = type(fp8.resolve_mxfp8_dense_gemm_backend())[backend]
    monkeypatch.setattr(fp8, "resolve_mxfp8_dense_gemm_backend", lambda: found)
    monkeypatch.setattr("sglang.srt.layers.deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0", True)
    with server():
        layer = projection([64, 64], rng)
        theirs_method = fp8.Fp8LinearMethod(layer.quant_method.quant_config)
        for asks in (mxfp8_input.accepts_mxfp8_swizzled_input, mxfp8_input.accepts_mxfp8_deepgemm_input):
            assert not asks(layer)
        layer.quant_method = theirs_method
        accepted = [
            asks(layer) for asks in (mxfp8_input.accepts_mxfp8_swizzled_input, mxfp8_input.accepts_mxfp8_deepgemm_input)
        ]
        assert any(accepted), "as SGLang's own method would have it"


@contextmanager
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank of a server whose model takes the parts that it has on CUDA; they are built, and do not run."""
    alone = SimpleNamespace(world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True, ranks=[0])
    groups = dict.fromkeys(("pp_group", "tp_group", "attn_tp_group", "attn_cp_group"), alone)
    sizes = {f"{part}_size": 1 for part in ("pp", "attn_tp", "attn_dp", "attn_cp")}
    ranks = {f"{part}_rank": 0 for part in ("pp", "attn_tp", "attn_dp", "attn_cp")}
    for name, value in (("_is_cuda", True), ("_device_sm", 90), ("get_stream", lambda name: None)):
        monkeypatch.setattr(minimax_m3, name, value)
    monkeypatch.setattr(minimax_m3, "_uses_push_plane_fusion", lambda: False)
    # SGLang's rotary embedding asks vllm for its kernel if there is no GPU.
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    kernels = ModuleType("vllm._custom_ops")
    kernels.rotary_embedding = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", kernels)
    with server(**groups, **sizes, **ranks), argument("exec.moe", "ep_num_redundant_experts", 0):
        yield


@pytest.mark.skipif(VERSION != "0.5.23", reason="a model is built with what this release has set up before")
@pytest.mark.parametrize(("kind", "asked"), [("minimax-m3", "oxmoe"), ("minimax-m3-mxfp8", "mxfp8")])
def test_a_whole_checkpoint(kind: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's loader finds a place for each tensor of the checkpoints of benches/sglang, and fills each parameter."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.moe.utils import resolve_shared_experts_config
    from sglang.srt.model_loader.weight_utils import get_quant_config
    from sglang.srt.runtime_context import get_model

    folder, of_class = make(tmp_path, kind, 5), minimax_m3.MiniMaxM3SparseForCausalLM
    given: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        given |= load_file(file)
    said: list[str] = []
    monkeypatch.setattr(minimax_m3.logger, "warning", said.append)
    default = torch.get_default_dtype()
    with on_hopper(monkeypatch):
        model_config = ModelConfig(model_path=str(folder), dtype="bfloat16", quantization=asked)
        config = get_quant_config(model_config, LoadConfig(), of_class.packed_modules_mapping)
        shared = resolve_shared_experts_config(of_class, model_config.hf_config, config)
        assert shared.num_fused_shared_experts == 1
        torch.set_default_dtype(torch.bfloat16)
        try:
            with get_model().override(shared_experts=shared):
                model = of_class(model_config.hf_config, config)
        finally:
            torch.set_default_dtype(default)
        model.load_weights(given.items())
        for module in model.modules():
            if getattr(module, "quant_method", None) is not None and not isinstance(module, RadixAttention):
                module.quant_method.process_weights_after_loading(module)
    assert not said
    held = dict(model.named_parameters())
    ends = ("weight", "weight_scale_inv") if kind.endswith("mxfp8") else ("weight",)

    def same(name: str, *parts: str) -> None:
        own, expected = held.pop(name).data, torch.cat([given.pop(part) for part in parts])
        assert same_bits(own, expected.to(own.dtype)), name

    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        same(name, name)
    for n in range(LAYERS):
        p, block = f"model.layers.{n}.", f"model.layers.{n}.block_sparse_moe."
        norms = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
        projections = [f"{p}self_attn.{name}_proj" for name in "qkv"]
        joined = f"{p}self_attn.qkv_proj"
        if n > 0:
            norms += ["self_attn.index_q_norm", "self_attn.index_k_norm"]
            projections += [f"{p}self_attn.index_{name}_proj" for name in "qk"]
            joined = f"{p}self_attn.fused_qkv_index_proj"
            same(f"{p}mlp.gate.weight", f"{block}gate.weight")
            same(f"{p}mlp.e_score_correction_bias", f"{block}e_score_correction_bias")
        for name in norms:
            same(f"{p}{name}.weight", f"{p}{name}.weight")
        for end in ends:
            same(f"{joined}.{end}", *(f"{name}.{end}" for name in projections))
            same(f"{p}self_attn.o_proj.{end}", f"{p}self_attn.o_proj.{end}")
            if n == 0:
                same(f"{p}mlp.gate_up_proj.{end}", f"{p}mlp.gate_proj.{end}", f"{p}mlp.up_proj.{end}")
                same(f"{p}mlp.down_proj.{end}", f"{p}mlp.down_proj.{end}")
                continue
            w13, w2 = held.pop(f"{p}mlp.experts.w13_{end}"), held.pop(f"{p}mlp.experts.w2_{end}")
            of_expert = [f"experts.{e}.{{}}" for e in range(w13.shape[0] - 1)] + ["shared_experts.{}"]
            for e, name in enumerate(of_expert):
                parts = ("gate_proj", "up_proj", "down_proj") if "shared" in name else ("w1", "w3", "w2")
                gate, up, down = (given.pop(f"{block}{name.format(part)}.{end}") for part in parts)
                assert same_bits(w13[e], torch.cat([gate, up])) and same_bits(w2[e], down), (n, name)
    assert not given
    # The model has joined these, and left nothing of them.
    assert all(parameter.numel() == 0 or ".attn." in name for name, parameter in held.items()), list(held)


def test_the_same_numbers_in_bf16(tmp_path: Path) -> None:
    """The server without oxmoe gets these, because SGLang's own MXFP8 experts do not run on Hopper."""
    folders = [tmp_path / name for name in ("mxfp8", "numbers", "expected")]
    for folder in folders:
        folder.mkdir()
    make(folders[0], "minimax-m3-mxfp8", 5)
    make(folders[1], "minimax-m3-mxfp8-numbers", 5)
    expected = load_file(dequantised(folders[0], folders[2]) / "model.safetensors")
    numbers: dict[str, Tensor] = {}
    for file in folders[1].glob("*.safetensors"):
        numbers |= load_file(file)
    assert numbers.keys() == expected.keys()
    assert all(torch.equal(numbers[name].bfloat16(), value) for name, value in expected.items())
    configs = [json.loads((folder / "config.json").read_text()) for folder in folders[1:]]
    assert configs[0] == configs[1]
