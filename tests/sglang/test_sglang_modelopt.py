"""ModelOpt's checkpoints in SGLang: its configurations, layers and loader, with experts on oxmoe."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import modelopt_cases as cases
from cases import make_routing
from modelopt_cases import FP8, HYBRID, MIXED, NVFP4, PREFIX, Experts, flat, nested
from oxmoe.testing import relative_norm, same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import QUANTIZATION_METHODS, get_quantization_config, modelopt_quant

from oxmoe.sglang import capabilities, layers, modelopt
from oxmoe.sglang.updates import Writes
from sglang_server import FusedMoE, addresses_of, argument, installed, only_cores, server
from test_sglang_compressed import rank
from test_sglang_deepep import low_latency, poisoned
from test_sglang_fp8 import forward

__all__ = ["poisoned"]

BAR = 4e-3  # for bf16 activations and output
FP8_BAR = 1.5e-2  # codes of activations between the products may be neighbours
E, K, H, I = 8, 2, 256, 384  # noqa: E741
RELU2 = {"activation": "relu2", "is_gated": False}
KINDS = [pytest.param({}, id="gated"), pytest.param(RELU2, id="relu2")]
MAKE = {"modelopt_fp4": (NVFP4, cases.nvfp4, BAR), "modelopt_fp8": (FP8, cases.fp8, FP8_BAR)}
HAS_HYBRIDS = hasattr(modelopt_quant, "HybridFp8NvFp4Config")
has_mixtures = pytest.mark.skipif(not HAS_HYBRIDS, reason="this SGLang has two formats of a mixture, and no hybrid")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


def quant_config(name: str, checkpoint: dict[str, Any]) -> Any:
    return get_quantization_config(name).from_config(with_names(checkpoint))


def with_names(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns the checkpoint as SGLang's loader hands it over."""
    return {**copy.deepcopy(checkpoint), "packed_modules_mapping": {}}


def empty_layer(
    config: Any,
    device: str = "cpu",
    *,
    experts: int = E,
    hidden: int = H,
    intermediate: int = I,
    prefix: str = PREFIX,
    **options: Any,
) -> FusedMoE:
    with torch.device(device):
        return FusedMoE(
            num_experts=experts,
            hidden_size=hidden,
            intermediate_size=intermediate,
            layer_id=0,
            quant_config=config,
            prefix=prefix,
            **{"top_k": K, "params_dtype": torch.bfloat16, **options},
        )


def load(module: FusedMoE, made: Experts) -> None:
    """Loads by SGLang's own loader, as its models call it."""
    for suffix, shard, expert, tensor in made.named():
        name = f"{'w2' if shard == 'w2' else 'w13'}_{suffix}"
        parameter = getattr(module, name)
        parameter.weight_loader(parameter, tensor, f"{PREFIX}.{name}", shard_id=shard, expert_id=expert)
    module.quant_method.process_weights_after_loading(module)


def routed(tokens: int, device: str, rng: torch.Generator, experts: int = E, k: int = K) -> tuple[Tensor, Tensor, Any]:
    weights, ids = (part.to(device) for part in make_routing("holes", tokens, experts, k, rng))
    return weights, ids, StandardTopKOutput(weights, ids, None)


def drawn_x(tokens: int, hidden: int, device: str, rng: torch.Generator) -> Tensor:
    return torch.randn((tokens, hidden), generator=rng).bfloat16().to(device)


def assert_near(result: Tensor, expected: Tensor, bar: float) -> None:
    assert result.dtype == torch.bfloat16 and result.shape == expected.shape
    if expected.any():
        distance = relative_norm(result.cpu().double(), expected)
        assert distance < bar, distance


# Values


@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("name", MAKE)
def test_values(device: str, name: str, options: dict[str, Any], tokens: int, rng: torch.Generator) -> None:
    """The layer is compared with fp64 on the checkpoint's numbers. There is a routed scaling factor, which top-k has
    applied if the layer says so, as SGLang's models ask it."""
    checkpoint, make, bar = MAKE[name]
    made = make(E, H, I, rng, gated=not options)
    x, (weights, ids, topk) = drawn_x(tokens, H, device, rng), routed(tokens, device, rng)
    with server():
        module = empty_layer(quant_config(name, checkpoint), device, routed_scaling_factor=2.5, **options)
        load(module, made)
        result = forward(module, x, topk)
    assert module.should_fuse_routed_scaling_factor_in_topk is (name == "modelopt_fp4")
    expected = cases.moe(x, made, weights, ids)
    assert_near(result, expected if name == "modelopt_fp4" else 2.5 * expected, bar)
    assert type(module.quant_method).__name__.startswith("OxmoeModelOpt") and module.quant_method.oxmoe


# (format, experts, hidden size, a rank's columns, options) of a model's layers with fewer experts.
MODELS = {
    "DeepSeek-R1-NVFP4, TP 8": ("modelopt_fp4", 4, 7168, 256, {}),
    "DeepSeek-V4-Flash-NVFP4": ("modelopt_fp4", 2, 4096, 2048, {"swiglu_limit": 10.0}),
    "Nemotron-3-Nano-NVFP4": ("modelopt_fp4", 3, 2688, 1856, RELU2),
    "Nemotron-3-Super-NVFP4": ("modelopt_fp4", 3, 1024, 2688, RELU2),
    "Nemotron-3-Super-FP8": ("modelopt_fp8", 3, 1024, 2688, RELU2),
    "Llama-4-Scout-FP8, TP 8": ("modelopt_fp8", 2, 5120, 1024, {}),
    "one block of scales": ("modelopt_fp4", 3, 16, 16, {}),
    "sizes that nothing divides": ("modelopt_fp4", 3, 176, 48, RELU2),
}


@pytest.mark.parametrize("model", MODELS)
def test_layers_of_models(device: str, model: str, rng: torch.Generator) -> None:
    name, experts, hidden, intermediate, options = MODELS[model]
    checkpoint, make, bar = MAKE[name]
    made = make(experts, hidden, intermediate, rng, gated="is_gated" not in options)
    x, (weights, ids, topk) = drawn_x(5, hidden, device, rng), routed(5, device, rng, experts)
    with server():
        module = empty_layer(
            quant_config(name, checkpoint),
            device,
            experts=experts,
            hidden=hidden,
            intermediate=intermediate,
            **options,
        )
        load(module, made)
        result = forward(module, x, topk)
    assert_near(result, cases.moe(x, made, weights, ids, limit=options.get("swiglu_limit")), bar)


def test_scales_are_there_once() -> None:
    """Nothing is laid out for other kernels."""
    with server():
        module = empty_layer(quant_config("modelopt_fp4", NVFP4))
    names = {f"{matrix}_{of}" for matrix in ("w13", "w2") for of in cases.nvfp4(1, 16, 16, torch.Generator()).tensors}
    assert {name for name, _ in module.named_parameters()} == names


# Ranks


@only_cores
@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("name", MAKE)
def test_tensor_parallel_ranks(name: str, options: dict[str, Any], rng: torch.Generator) -> None:
    """Results of two ranks add up to the layer's result."""
    checkpoint, make, bar = MAKE[name]
    made = make(E, H, 2 * I, rng, gated=not options)
    x, (weights, ids, topk) = drawn_x(9, H, "cpu", rng), routed(9, "cpu", rng)
    total = torch.zeros(x.shape, dtype=torch.float64)
    for number in range(2):
        with server(**rank(number, "moe_tp")):
            module = empty_layer(quant_config(name, checkpoint), intermediate=2 * I, **options)
            load(module, made)
            assert module.quant_method.weights.intermediate_size == I
            total += forward(module, x, topk).double()
    distance = relative_norm(total, cases.moe(x, made, weights, ids))
    assert distance < bar, distance


@only_cores
@pytest.mark.parametrize("options", KINDS)
def test_expert_parallel_ranks(options: dict[str, Any], rng: torch.Generator) -> None:
    """Each rank has half of the experts, with their own scales."""
    half = E // 2
    made = cases.nvfp4(E, H, I, rng, gated=not options)
    x, (weights, ids, _) = drawn_x(9, H, "cpu", rng), routed(9, "cpu", rng)
    for number in range(2):
        with server(**rank(number, "moe_ep")):
            module = empty_layer(quant_config("modelopt_fp4", NVFP4), **options)
            load(module, made)
            ours = range(number * half, (number + 1) * half)
            # The ids are those that the dispatcher would make, which needs a GPU.
            local = torch.where((ids >= ours.start) & (ids < ours.stop), ids - ours.start, -1).int()
            topk = StandardTopKOutput(weights, local, None)
            result = module.quant_method.apply(module, StandardDispatchOutput(x, None, topk)).hidden_states
        assert_near(result, cases.moe(x, made, weights, ids, experts=ours), BAR)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", MAKE)
def test_behind_an_all_to_all(name: str, rng: torch.Generator) -> None:
    """The tokens are DeepEP's in low latency mode; the model applies the routed scaling factor."""
    checkpoint, make, bar = MAKE[name]
    made = make(E, H, I, rng)
    x, (weights, ids, _) = drawn_x(11, H, "cpu", rng), routed(11, "cpu", rng)
    with server():
        module = empty_layer(quant_config(name, checkpoint), routed_scaling_factor=2.5)
        load(module, made)
    with server(a2a="deepep"):
        result = low_latency(
            lambda dispatched: module.quant_method.apply(module, dispatched), x, None, (weights, ids), E
        )
    assert_near(result, cases.moe(x, made, weights, ids), max(bar, 6e-3))


# Updates and load balancing


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("name", MAKE)
def test_updates(device: str, name: str, options: dict[str, Any], rng: torch.Generator) -> None:
    """The layer then runs on a second checkpoint. On GPUs, and with fp8, every tensor stays where it was."""
    checkpoint, make, bar = MAKE[name]
    x, (weights, ids, topk) = drawn_x(96, H, device, rng), routed(96, device, rng)
    with server():
        module = empty_layer(quant_config(name, checkpoint), device, **options)
        addresses = []
        for _ in range(2):
            made = make(E, H, I, rng, gated=not options)
            module.quant_method.restore_weights_before_loading(module)
            load(module, made)
            addresses.append(addresses_of(module.quant_method.weights))
            assert_near(forward(module, x, topk), cases.moe(x, made, weights, ids), bar)
            if module.quant_method.weights.w13_packed is not None:
                assert module.w13_weight.data_ptr() == module.quant_method.weights.w13_packed[0].data_ptr()
        if name == "modelopt_fp8" or device == "cuda":
            assert addresses[0] == addresses[1]
        parameter = module.w2_weight
        with pytest.raises(RuntimeError, match=f"{module.quant_method.of} experts were prepared at load"):
            parameter.weight_loader(parameter, parameter.data[0], "w2_weight", shard_id="w2", expert_id=0)


def test_experts_without_a_gate_have_one_part() -> None:
    """Packed w13 was written whole when each expert was; with a gate both of its parts must be written."""
    for gated, given in ((False, {}), (True, {"w13_weight": {"w3": [0, 1, 2, 3]}})):
        layer = torch.nn.Module()
        layer.moe_runner_config = SimpleNamespace(is_gated=gated)
        layer.num_local_experts = layer._num_global_routed = 4
        layer.layer_id, layer.num_fused_shared_experts, layer._has_fused_shared = 0, 0, False
        layer.uses_expert_location = False
        layer._map_global_expert_id_to_local_expert_id = lambda expert: expert
        writes = Writes()
        for expert in range(4):
            writes.add("w13_weight", "w1", expert)
        assert writes.missing(layer, {"w13_weight"}) == given
        for name, parts in given.items():
            assert writes.counted(layer, parts, name) == (4, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("options", KINDS)
def test_experts_that_move(options: dict[str, Any], rng: torch.Generator) -> None:
    """Rows of the parameters in another order, and ids that follow, give the same bits."""
    made = cases.nvfp4(E, H, I, rng, gated=not options)
    x, (weights, ids, topk) = drawn_x(9, H, "cuda", rng), routed(9, "cuda", rng)
    order = torch.randperm(E, generator=rng).cuda()
    with server(), argument("exec.moe", "enable_eplb", True):
        module = empty_layer(quant_config("modelopt_fp4", NVFP4), "cuda", **options)
        load(module, made)
        before = forward(module, x, topk)
        for parameter in module.parameters():
            if parameter.shape[:1] == (E,):
                rows = parameter.data.view(E, -1).view(torch.uint8)
                rows.copy_(rows[order])
        places = order.argsort()
        moved = torch.where(ids < 0, ids, places[ids.clamp(min=0).long()].int())
        assert same_bits(forward(module, x, StandardTopKOutput(weights, moved, None)), before)


@pytest.mark.parametrize(
    ("name", "why"),
    [("modelopt_fp4", "NVFP4 experts on a CPU"), ("modelopt_fp8", "experts with given scales of activations")],
)
def test_balancing_that_is_not_served(name: str, why: str, rng: torch.Generator) -> None:
    checkpoint, make, _ = MAKE[name]
    with server(), argument("exec.moe", "enable_eplb", True), pytest.raises(NotImplementedError, match=why):
        load(empty_layer(quant_config(name, checkpoint)), make(E, H, I, rng))


@pytest.mark.gpu
@pytest.mark.parametrize("options", KINDS)
def test_beside_sglangs_own_method(options: dict[str, Any], rng: torch.Generator) -> None:
    """SGLang has Marlin's kernels for Hopper; they take one global scale of gate and up."""
    pytest.importorskip("sgl_kernel")
    if modelopt_quant.ModelOptFp4Config.get_min_capability() > 90 or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("SGLang runs ModelOpt's NVFP4 on Hopper from 0.5.13 on")
    made = cases.nvfp4(E, H, I, rng, gated=not options, alike=True)
    # SGLang's Marlin asks for router logits, of which it reads the number of tokens, and has no ids of -1.
    weights, ids = (part.cuda() for part in make_routing("skewed", 33, E, K, rng))
    topk = StandardTopKOutput(weights, ids, torch.zeros((33, E), device="cuda"))
    x, results = drawn_x(33, H, "cuda", rng), []
    with server():
        for kind in (get_quantization_config("modelopt_fp4"), modelopt_quant.ModelOptFp4Config):
            module = empty_layer(kind.from_config(with_names(NVFP4)), "cuda", inplace=False, **options)
            load(module, made)
            results.append(forward(module, x.clone(), topk))
    assert relative_norm(results[0].double(), results[1].double()) < 1e-2
    assert_near(results[0], cases.moe(x, made, weights, ids), BAR)


# Checkpoints that SGLang's own code gives to oxmoe


def from_folder(folder: Path, config: dict[str, Any] | None, beside: dict[str, Any] | None) -> tuple[str, Any]:
    """Returns the quantization and its configuration for a config.json and an hf_quant_config.json, without a flag."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.weight_utils import get_quant_config

    sizes = {"hidden_size": H, "intermediate_size": H, "moe_intermediate_size": I, "num_hidden_layers": 8}
    heads = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024}
    model_config: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    model_config |= {"num_experts": E, "num_experts_per_tok": K, **sizes, **heads}
    if config is not None:
        model_config["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(model_config))
    if beside is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    with server():
        model = ModelConfig(model_path=str(folder), dtype="bfloat16")
        return model.quantization, get_quant_config(model, LoadConfig(), {})


METHODS = {
    "NVFP4": modelopt.OxmoeModelOptNvFp4MoEMethod,
    "FP8": modelopt.OxmoeModelOptFp8MoEMethod,
    "MIXED_PRECISION": modelopt.OxmoeModelOptNvFp4MoEMethod,
}
NAMES = {"NVFP4": "modelopt_fp4", "FP8": "modelopt_fp8", "MIXED_PRECISION": "modelopt_mixed"}


@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json", "both"])
@pytest.mark.parametrize("algorithm", METHODS)
def test_checkpoints_come_to_us(algorithm: str, place: str, tmp_path: Path) -> None:
    fields = {"quantized_layers": cases.LAYERS} if algorithm == "MIXED_PRECISION" else {}
    of_config = flat(algorithm, kv_cache_quant_algo=None, **fields) if place != "hf_quant_config.json" else None
    beside = nested(algorithm, **fields) if place != "config.json" else None
    quantization, config = from_folder(tmp_path, of_config, beside)
    name = NAMES[algorithm]
    if algorithm == "MIXED_PRECISION" and not HAS_HYBRIDS:
        assert quantization == "w4afp8", "as which such a release reads every mixture"
        return
    assert quantization in (name, modelopt.second_name(name))
    # SGLang's models and loaders choose by this name.
    assert config.get_name() == name
    with server():
        layer = empty_layer(config)
        assert type(layer.quant_method) is METHODS[algorithm]
        excluded = empty_layer(config, prefix="model.layers.7.mlp.experts")
        assert type(excluded.quant_method).__name__ == "OxmoeUnquantizedFusedMoEMethod"
        layers.check_layer(layer)
        layers.check_layer(excluded)


def test_a_file_beside_the_config_in_older_releases() -> None:
    """If SGLang takes its own configuration for such a file, oxmoe's second name leads to oxmoe's configuration."""
    name = QUANTIZATION_METHODS["modelopt"].override_quantization_method({"quant_method": "modelopt_fp4"}, None)
    if capabilities.finds_modelopt_by_name():
        assert name == "modelopt_fp4" and "oxmoe_modelopt_fp4" not in QUANTIZATION_METHODS
    else:
        assert name == "oxmoe_modelopt_fp4"
    assert issubclass(QUANTIZATION_METHODS[name], modelopt.OxmoeModelOptFp4Config)


@pytest.mark.parametrize("name", MAKE)
def test_linear_layers_are_sglangs(name: str) -> None:
    """Linear layers keep the method that SGLang's own configuration gives."""
    checkpoint = MAKE[name][0]
    config = quant_config(name, checkpoint)
    theirs = next(kind for kind in type(config).__mro__ if kind.__module__.startswith("sglang."))
    with server():
        for prefix in ("model.layers.0.self_attn.o_proj", "lm_head"):
            layer = ReplicatedLinear(64, 64, bias=False, params_dtype=torch.bfloat16, prefix=prefix)
            expected = theirs.from_config(with_names(checkpoint)).get_quant_method(layer, prefix)
            assert type(config.get_quant_method(layer, prefix)) is type(expected)


@has_mixtures
def test_a_mixture() -> None:
    """Each layer follows its own quant_algo."""
    config = quant_config("modelopt_mixed", MIXED)
    names = ["OxmoeModelOptNvFp4MoEMethod", "OxmoeModelOptFp8MoEMethod", "OxmoeModelOptNvFp4MoEMethod"]
    names += ["OxmoeMxfp8MoEMethod", "OxmoeFp8MoEMethod"] if hasattr(config, "fp8_block_config") else []
    with server():
        for layer, name in enumerate(names):
            module = empty_layer(config, prefix=f"model.layers.{layer}.mlp.experts")
            assert type(module.quant_method).__name__ == name
        module = empty_layer(config, prefix="model.layers.6.mlp.experts")
        assert type(module.quant_method).__name__ == "OxmoeUnquantizedFusedMoEMethod"
        with pytest.raises(NotImplementedError, match=r"layers\.5.* experts of quant_algo INT4_AWQ are not served"):
            empty_layer(config, prefix="model.layers.5.mlp.experts")
        linear = ReplicatedLinear(64, 64, bias=False, params_dtype=torch.bfloat16)
        method = config.get_quant_method(linear, "model.layers.0.self_attn.o_proj")
        assert type(method) is modelopt_quant.ModelOptFp8LinearMethod


@has_mixtures
def test_a_hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    """SGLang's loader makes a hybrid of oxmoe's fp8 configuration. NVFP4 experts run on oxmoe, names of layers are
    mapped, and layers that are left out have their own formats."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.model_loader import loader
    from sglang.srt.models.utils import WeightsMapper

    mapper = WeightsMapper(orig_to_new_prefix={"model.": "renamed."})
    model_class = SimpleNamespace(hf_to_sglang_mapper=mapper, packed_modules_mapping={})
    monkeypatch.setattr(loader, "get_model_architecture", lambda config: (model_class, ""))
    from_folder(tmp_path, HYBRID, None)
    made = cases.nvfp4(E, H, I, rng)
    x, (weights, ids, topk) = drawn_x(9, H, "cpu", rng), routed(9, "cpu", rng)
    with server():
        model = ModelConfig(model_path=str(tmp_path), dtype="bfloat16")
        assert model.quantization == "oxmoe"
        config = loader._get_quantization_config(model, LoadConfig())
        assert type(config) is modelopt_quant.HybridFp8NvFp4Config
        module = empty_layer(config, prefix="renamed.layers.0.mlp.experts")
        assert type(module.quant_method) is modelopt.OxmoeModelOptNvFp4MoEMethod
        load(module, made)
        assert_near(forward(module, x, topk), cases.moe(x, made, weights, ids), BAR)
        for prefix in ("renamed.layers.7.mlp.experts", "renamed.decoder.mlp.experts"):
            left = empty_layer(config, prefix=prefix)
            assert type(left.quant_method).__name__ == "OxmoeFp8MoEMethod"
        for prefix, kind in (("self_attn.o_proj", UnquantizedLinearMethod), ("self_attn.q_proj", Fp8LinearMethod)):
            linear = ReplicatedLinear(
                128, 128, params_dtype=torch.bfloat16, quant_config=config, prefix=f"renamed.layers.0.{prefix}"
            )
            assert type(linear.quant_method) is kind


@pytest.mark.skipif(HAS_HYBRIDS, reason="this SGLang has hybrids")
def test_a_hybrid_that_sglang_does_not_load() -> None:
    with pytest.raises(NotImplementedError, match=r"NVFP4 .*, which this SGLang does not load"):
        quant_config("oxmoe", HYBRID)


# Refusals, by GPU


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"is_awq": True}, {}, "NVFP4_AWQ experts are not served"),
        ({"group_size": 32}, {}, "group_size 32 are not served, but with 16"),
        ({}, {"params_dtype": torch.float16}, "ModelOpt NVFP4 experts need --dtype bfloat16"),
        ({}, {"intermediate": 24}, "multiples of 16, got intermediate_size of a rank 24"),
        ({}, {"activation": "relu"}, 'no kernel for "relu"'),
        ({}, {"with_bias": True}, "ModelOpt NVFP4 experts with biases are not served"),
    ],
)
def test_refuses(fields: dict[str, Any], options: dict[str, Any], message: str, rng: torch.Generator) -> None:
    config = quant_config("modelopt_fp4", NVFP4)
    for name, value in fields.items():
        setattr(config, name, value)
    with server(), pytest.raises(NotImplementedError, match=message):
        load(empty_layer(config, **options), cases.nvfp4(E, H, I, rng))


def test_refuses_other_experts_of_fp8() -> None:
    config = quant_config("modelopt_fp8", FP8)
    with server(), pytest.raises(NotImplementedError, match="ModelOpt fp8 experts need --dtype bfloat16"):
        empty_layer(config, params_dtype=torch.float16)
    with server(), pytest.raises(NotImplementedError, match="ModelOpt fp8 experts with biases"):
        empty_layer(config, with_bias=True)
    with server(), pytest.raises(NotImplementedError, match="got intermediate_size of a rank 1848"):
        empty_layer(config, intermediate=1848, **RELU2)


def test_runners_that_swap_gate_and_up(rng: torch.Generator) -> None:
    """Newer releases ignore the server's --moe-runner-backend here; older ones' loader follows it."""
    config, made = quant_config("modelopt_fp4", NVFP4), cases.nvfp4(E, H, I, rng)
    x, (weights, ids, topk) = drawn_x(9, H, "cpu", rng), routed(9, "cpu", rng)
    for backend in ("flashinfer_cutlass", "flashinfer_cutedsl", "flashinfer_trtllm"):
        with server(backend):
            if backend == "flashinfer_trtllm" and not capabilities.layer_decides():
                with pytest.raises(NotImplementedError, match="swaps gate and up of ModelOpt's NVFP4 experts"):
                    empty_layer(config)
                continue
            module = empty_layer(config)
            load(module, made)
            topk_output = StandardDispatchOutput(x, None, topk)
            result = module.quant_method.apply(module, topk_output).hidden_states
            assert_near(result, cases.moe(x, made, weights, ids), BAR)


def test_tokens_that_travel_as_fp4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelopt, "should_use_flashinfer_cutlass_moe_fp4_allgather", lambda: True)
    with server(), pytest.raises(NotImplementedError, match="SGLang gathers tokens as NVFP4"):
        empty_layer(quant_config("modelopt_fp4", NVFP4))


@pytest.mark.parametrize(("capability", "ours"), [((9, 0), True), ((10, 0), False), ((8, 9), False)])
def test_nvfp4_is_for_hopper(capability: tuple[int, int], ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    taken: list[Any] = []
    monkeypatch.setattr(modelopt, "OxmoeModelOptNvFp4MoEMethod", lambda config: taken.append(True))
    monkeypatch.setattr(modelopt_quant, "ModelOptNvFp4FusedMoEMethod", lambda config: taken.append(False))
    modelopt.nvfp4_method(None)
    assert taken == [ours]


def test_linear_layers_that_older_releases_have_for_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts run on Hopper all the same; an NVFP4 linear layer there ends the start if SGLang has no kernel."""
    kind = get_quantization_config("modelopt_fp4")
    assert kind.get_min_capability() <= 90 and get_quantization_config("modelopt_mixed").get_min_capability() <= 90
    config = quant_config("modelopt_fp4", NVFP4)
    with server():
        layer = ReplicatedLinear(64, 64, bias=False, params_dtype=torch.bfloat16)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        if modelopt_quant.ModelOptFp4Config.get_min_capability() > 90:
            with pytest.raises(NotImplementedError, match=r"o_proj is an NVFP4 linear layer, .* from sm_100 on"):
                config.get_quant_method(layer, "model.layers.0.self_attn.o_proj")
        else:
            method = config.get_quant_method(layer, "model.layers.0.self_attn.o_proj")
            assert type(method) is modelopt_quant.ModelOptFp4LinearMethod


def test_experts_that_sglang_quantises_while_it_loads_them() -> None:
    """These experts stay SGLang's own, and its method asks for another GPU."""
    config = quant_config("modelopt_fp4", flat("FP8", group_size=16))
    assert not config.is_checkpoint_nvfp4_serialized
    with server(), pytest.raises(ValueError, match="platform does not support NVFP4"):
        empty_layer(config)


def test_layers_of_sglangs_own_method() -> None:
    """Without moe=oxmoe the start ends, and says what to do."""
    with server():
        module = empty_layer(modelopt_quant.ModelOptFp8Config.from_config(copy.deepcopy(FP8)))
    with pytest.raises(RuntimeError, match="let OXMOE_SGLANG name moe=oxmoe, which takes ModelOpt's fp8 layers"):
        layers.check_layer(module)
