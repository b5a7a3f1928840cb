"""int4 checkpoints of compressed-tensors, AWQ and GPTQ in SGLang's layers, by its own loader."""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxmoe
from cases import Shape, make_routing
from int4_cases import Int4, make
from int4_checkpoints import KINDS, Kind, awq, gptq, pack_quantized, tensors
from oxmoe import reference
from oxmoe.testing import assert_close_ulp, relative_norm, same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from sglang.srt.layers.quantization.compressed_tensors import schemes
from sglang.srt.model_loader.loader import DefaultModelLoader

from oxmoe.sglang import int4, int4_schemes
from sglang_server import NEW, installed, only_cores, server
from test_sglang_compressed import empty_layer, load, rank
from test_sglang_deepep import check as check_dispatched
from test_sglang_deepep import poisoned
from test_sglang_eplb import check_moved
from test_sglang_fp8 import forward, from_model
from test_sglang_updates import Model, bits, write

__all__ = ["poisoned"]

SHAPE = Shape("sglang-int4", 8, 2, 128, 192)
PREFIX = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


def drawn(kind: Kind, rng: torch.Generator, shape: Shape = SHAPE) -> Int4:
    layer = make(shape, rng, group=kind.group, zeros=kind.zeros)
    # Zero points are stored in four bits.
    for zeros in (layer.w13_zeros, layer.w2_zeros):
        if zeros is not None:
            zeros.clamp_(kind.less, 15 + kind.less)
    return layer


def given(rng: torch.Generator, tokens: int = 9, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Any]:
    weights, ids = (part.to(device) for part in make_routing("uniform", tokens, SHAPE.experts, SHAPE.top_k, rng))
    x = torch.randn((tokens, SHAPE.hidden), generator=rng).bfloat16().to(device)
    return x, weights, ids, StandardTopKOutput(weights, ids, None)


@pytest.mark.parametrize("options", [{}, {"routed_scaling_factor": 2.5}], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("name", KINDS)
def test_layers(device: str, name: str, tokens: int, options: dict[str, Any], rng: torch.Generator) -> None:
    """The layer has the bits of ExpertWeights.int4, and near the numbers of the weights that codes and scales stand
    for."""
    kind = KINDS[name]
    layer = drawn(kind, rng)
    x, weights, ids, topk = given(rng, tokens, device)
    with server():
        module = empty_layer(SHAPE, kind.config, device, **options)
        assert type(module.quant_method) is int4.OxmoeInt4MoEMethod
        load(module, tensors(layer, kind))
        result = forward(module, x, topk)
    layer = layer.to(device)
    assert same_bits(result, oxmoe.moe(x, layer.weights(), weights, ids, **options))
    if tokens:
        wanted = reference.moe(x, *layer.plain(), topk_weights=weights, topk_ids=ids, **options)
        assert_close_ulp(result, wanted)


def test_compressed_tensors_codes_are_in_memory_once(rng: torch.Generator) -> None:
    """On a CPU compressed-tensors' codes stay as they lie; those of AWQ and GPTQ are turned in their own memory."""
    with server():
        for name in ("kimi", "awq", "gptq"):
            kind = KINDS[name]
            module = empty_layer(SHAPE, kind.config, "cpu")
            load(module, tensors(drawn(kind, rng), kind))
            made = module.quant_method.weights
            for matrix in ("w13", "w2"):
                own = getattr(module, f"{matrix}_{module.quant_method.names.codes}")
                assert own.data_ptr() == getattr(made, matrix).data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_packed_weights_are_in_memory_once(name: str, rng: torch.Generator) -> None:
    """Parameters have the packed codes' memory. After an update addresses are as before, and weights are the new
    ones."""
    kind, shape = KINDS[name], dataclasses.replace(SHAPE, hidden=128, intermediate=192)
    x, weights, ids, topk = given(rng, 33, "cuda")
    with server():
        module = empty_layer(shape, kind.config, "cuda")
        addresses = []
        for _ in range(2):
            layer = drawn(kind, rng, shape)
            module.quant_method.restore_weights_before_loading(module)
            load(module, tensors(layer, kind))
            packed = [*module.quant_method.weights.w13_packed, *module.quant_method.weights.w2_packed]
            addresses.append([tensor.data_ptr() for tensor in packed])
            codes = module.quant_method.names.codes
            assert getattr(module, f"w13_{codes}").data_ptr() == packed[0].data_ptr()
            assert getattr(module, f"w2_{codes}").data_ptr() == packed[3].data_ptr()
            result = forward(module, x, topk)
            assert same_bits(result, oxmoe.moe(x, layer.to("cuda").weights(), weights, ids))
    assert addresses[0] == addresses[1]


def sglangs_own(method: str) -> type[Any]:
    """Returns SGLang's configuration for Marlin, which oxmoe replaces in the table of quantizations."""
    if method == "awq":
        from sglang.srt.layers.quantization.awq import AWQMarlinConfig

        return AWQMarlinConfig
    if method == "gptq":
        from sglang.srt.layers.quantization.gptq import GPTQMarlinConfig

        return GPTQMarlinConfig
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    return CompressedTensorsConfig


@pytest.mark.gpu
@only_cores
@pytest.mark.parametrize("name", ["kimi", "static", "channel", "awq-64", "awq-128", "gptq", "gptq-rows"])
def test_beside_sglangs_own_method(name: str, rng: torch.Generator) -> None:
    """SGLang's own method lays the same checkpoint out for Marlin. Groups of 32 columns with zero points are not
    compared: Marlin reads wrong zero points for them (sgl-project/sglang#37759)."""
    pytest.importorskip("sgl_kernel")
    kinds = {**KINDS, "awq-128": Kind(awq(group_size=128), 128, True)}
    kind, shape = kinds[name], dataclasses.replace(SHAPE, hidden=256, intermediate=256)
    # Marlin's ids are not -1, and its method reads the number of tokens from the logits.
    weights, ids = (part.cuda() for part in make_routing("skewed", 33, shape.experts, shape.top_k, rng))
    topk = StandardTopKOutput(weights, ids, torch.zeros((33, shape.experts), device="cuda"))
    x = torch.randn((33, shape.hidden), generator=rng).bfloat16().cuda()
    layer, results = drawn(kind, rng, shape), []
    with server():
        for of in ("oxmoe", sglangs_own(kind.config["quant_method"])):
            module = empty_layer(shape, kind.config, "cuda", of=of, inplace=False)
            assert isinstance(module.quant_method, int4.OxmoeInt4MoEMethod) == (of == "oxmoe")
            load(module, tensors(layer, kind))
            # SGLang keeps GPTQ's scales in f16, and Marlin takes activations of the scales' type.
            given = x.half() if of != "oxmoe" and kind.config["quant_method"] == "gptq" else x.clone()
            results.append(forward(module, given, topk))
    assert relative_norm(results[0].double(), results[1].double()) < 1e-2


# Checkpoints that oxmoe takes


@pytest.mark.parametrize(
    ("config", "asked", "answer"),
    [
        *((KINDS[name].config, None, "oxmoe") for name in KINDS),
        (pack_quantized(), "compressed-tensors", "oxmoe"),
        (pack_quantized(), "oxmoe", "oxmoe"),
        (pack_quantized({"num_bits": 8}), None, "oxmoe"),  # refused by name when a MoE layer is built
        (awq(), "oxmoe", "oxmoe"),
        (awq(), "awq", None),
        (awq(bits=8), None, None),
        (awq(bits=8), "oxmoe", "oxmoe"),
        (gptq(desc_act=True), None, None),
        (gptq(), "moe_wna16", None),
    ],
)
def test_checkpoints_that_are_ours(config: dict[str, Any], asked: str | None, answer: str | None) -> None:
    assert QUANTIZATION_METHODS["oxmoe"].override_quantization_method(config, asked) == answer


REFUSED: list[tuple[dict[str, Any], str]] = [
    (pack_quantized({"num_bits": 8}), "integers of 8 bits"),
    (pack_quantized({"group_size": 16}), "group size 16"),
    (pack_quantized({"group_size": 48}), "group size 48"),
    (pack_quantized({"actorder": "group"}), "actorder group: groups have columns in activation order"),
    (pack_quantized({"strategy": "tensor", "group_size": None}), "a scale a tensor"),
    (pack_quantized(format="marlin-24"), "integers in the format marlin-24"),
    (awq(bits=8), "integers of 8 bits"),
    (awq(version="gemv"), "version gemv, whose words have another order"),
    (awq(zero_point=False), "zero_point false"),
    (gptq(desc_act=True), "desc_act: groups have columns in activation order"),
    (gptq(group_size=16), "group size 16"),
    (gptq(checkpoint_format="marlin"), "checkpoint_format marlin"),
    (gptq(is_marlin_format=True), "checkpoint_format marlin"),
    (gptq(dynamic={r"+:.*experts.*": {"bits": 8}}), "rules of their own"),
    (gptq(dynamic={r"-:.*down_proj": {}}), "rules of their own"),
    (pack_quantized({"group_size": 128}), "intermediate_size 192 is no multiple of the group size 128"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_not_served_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    """The error comes when SGLang builds the layer, before it reads the checkpoint."""
    try:
        get_quantization_config("oxmoe").from_config(copy.deepcopy(config))
    except ValueError:
        # SGLang itself refuses the config, or the package compressed-tensors does.
        with pytest.raises(NotImplementedError, match=message):
            _scheme(Kind(config))
        return
    with server(), pytest.raises(NotImplementedError, match=message):
        empty_layer(SHAPE, config, "cpu")


def test_sizes_and_dtypes_are_refused_by_name() -> None:
    with server():
        for field, size in (("hidden", 144), ("intermediate", 80)):
            with pytest.raises(NotImplementedError, match=f"int4 experts: .* multiples of 32, got .* {size}"):
                empty_layer(dataclasses.replace(SHAPE, **{field: size}), pack_quantized(), "cpu")
        with pytest.raises(NotImplementedError, match=r"int4 experts need --dtype bfloat16, got torch\.float16"):
            empty_layer(SHAPE, awq(), "cpu", params_dtype=torch.float16)


@pytest.mark.parametrize(
    "config",
    [
        pack_quantized(ignore=[f"re:{PREFIX}.*"]),
        awq(modules_to_not_convert=["mlp.experts"]),
        gptq(dynamic={r"-:.*\.experts\..*": {}}),
    ],
    ids=["compressed-tensors", "awq", "gptq"],
)
def test_layers_that_a_checkpoint_leaves_unquantised(config: dict[str, Any]) -> None:
    with server("oxmoe" if NEW else "auto"):
        module = empty_layer(SHAPE, config, "cpu")
    assert module.quant_method.oxmoe and module.w13_weight.dtype == torch.bfloat16


def test_a_group_in_activation_order_is_seen_at_load(rng: torch.Generator) -> None:
    """The checkpoint's g_idx is not what its config says."""
    kind = KINDS["gptq"]
    given_tensors = tensors(drawn(kind, rng), kind)
    plain = given_tensors["g_idx"]
    given_tensors["g_idx"] = lambda expert, shard: plain(expert, shard).flip(0)
    with server():
        module = empty_layer(SHAPE, kind.config, "cpu")
        with pytest.raises(NotImplementedError, match="layer 0: g_idx of experts has columns in activation order"):
            load(module, given_tensors)
        module = empty_layer(SHAPE, kind.config, "cpu")
        given_tensors.pop("g_idx")
        load(module, given_tensors)


@pytest.mark.parametrize("config", [pack_quantized(), pack_quantized({"symmetric": False})], ids=["plain", "zeros"])
def test_parameters_have_the_names_of_sglangs(config: dict[str, Any]) -> None:
    """The parameters are those that SGLang's own scheme takes from a checkpoint, except the order of columns."""
    with server():
        module = empty_layer(SHAPE, config, "cpu")
        quant_config = module.quant_config
        weights = quant_config.target_scheme_map["Linear"]["weights"]
        scheme = schemes.CompressedTensorsWNA16MoE.__new__(schemes.CompressedTensorsWNA16MoE)
        theirs = nn.Module()
        theirs.moe_tp_size = 1
        scheme.packed_factor, scheme.strategy, scheme.group_size = 8, weights.strategy, weights.group_size
        scheme.actorder, scheme.sym, scheme.num_bits = weights.actorder, weights.symmetric, 4
        theirs.moe_runner_config = module.moe_runner_config
        scheme.create_weights(theirs, SHAPE.experts, SHAPE.hidden, SHAPE.intermediate, params_dtype=torch.bfloat16)
    names = {name for name, _ in theirs.named_parameters() if "g_idx" not in name}
    more = {name for name, _ in module.named_parameters()} - names
    # Older releases have no zero points.
    assert names <= {name for name, _ in module.named_parameters()} and all("zero_point" in name for name in more)


@pytest.mark.parametrize("name", ["awq_marlin", "gptq_marlin"])
def test_sglangs_configurations_for_marlin_have_our_experts(name: str) -> None:
    """SGLang gives these configurations the checkpoints before it asks others; names and linear layers stay its own."""
    config = awq() if name == "awq_marlin" else gptq()
    of_marlin = QUANTIZATION_METHODS[name]
    base = of_marlin.__mro__[2]
    assert base.__module__.startswith("sglang.") and of_marlin.get_name() == base.get_name() == name
    made = of_marlin.__new__(of_marlin)
    made.checkpoint, made.dynamic = config, {}
    with server():
        layer = empty_layer(SHAPE, pack_quantized(), "cpu")
        assert type(made.get_quant_method(layer, PREFIX)) is int4.OxmoeInt4MoEMethod
    assert made.get_quant_method(nn.Linear(1, 1), "x") is None
    int4.install(None)
    assert QUANTIZATION_METHODS[name] is of_marlin


@pytest.mark.parametrize("name", ["kimi", "awq", "gptq", "gptq-zeros"])
def test_a_checkpoint_comes_to_us(name: str, tmp_path: Path) -> None:
    """On a machine without a GPU, where SGLang's configurations for Marlin claim nothing."""
    quantization, _, layer = from_model(tmp_path, KINDS[name].config)
    assert quantization == "oxmoe" and type(layer.quant_method) is int4.OxmoeInt4MoEMethod


LEFT = {"awq": {"modules_to_not_convert": ["self_attn"]}, "gptq": {"dynamic": {r"-:.*self_attn.*": {}}}}


@pytest.mark.parametrize("config", [awq(), gptq(), gptq(sym=False)], ids=["awq", "gptq", "zeros"])
def test_linear_layers_without_bf16_kernels_are_refused_by_name(config: dict[str, Any]) -> None:
    """Without Marlin SGLang's linear layers of AWQ and GPTQ take f16, and oxmoe's experts bf16."""
    name = config["quant_method"]
    ours = get_quantization_config("oxmoe").from_config({**config, **LEFT[name]})
    assert torch.bfloat16 in ours.get_supported_act_dtypes() and torch.float16 in ours.get_supported_act_dtypes()
    with server():
        layer = ReplicatedLinear(64, 64, bias=False, quant_config=None, params_dtype=torch.bfloat16)
    prefix = "model.layers.0.{}.o_proj"
    assert type(ours.get_quant_method(layer, prefix.format("self_attn"))).__name__ == "UnquantizedLinearMethod"
    message = rf"layers\.0\.mlp\.o_proj is a linear layer of {name.upper()}, which"
    with pytest.raises(NotImplementedError, match=message):
        ours.get_quant_method(layer, prefix.format("mlp"))


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_a_checkpoint_for_marlin_comes_to_us(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own configuration claims the checkpoint under its own name, and is oxmoe's."""
    of_marlin = QUANTIZATION_METHODS[f"{name}_marlin"]
    module = sys.modules[of_marlin.__mro__[2].__module__]
    monkeypatch.setattr(of_marlin, f"is_{name}_marlin_compatible", classmethod(lambda cls, config: True))
    # This function asks for the GPU.
    monkeypatch.setattr(module, "verify_marlin_supported", lambda *given, **named: None, raising=False)
    quantization, quant_config, layer = from_model(tmp_path, KINDS[name].config)
    assert quantization == quant_config.get_name() == f"{name}_marlin"
    assert type(layer.quant_method) is int4.OxmoeInt4MoEMethod


# Ranks


def part_of(layer: Int4, number: int, ranks: int, group: int | None) -> Int4:
    """Returns a rank's columns of the intermediate size; w2's have groups of `group`."""
    share = layer.shape.intermediate // ranks
    ours = slice(number * share, (number + 1) * share)

    def of_w13(whole: Tensor | None) -> Tensor | None:
        return None if whole is None else torch.cat([half[:, ours] for half in whole.chunk(2, 1)], 1).contiguous()

    def of_w2(whole: Tensor | None) -> Tensor | None:
        if whole is None or whole.shape[2] == 1:
            return whole
        spread = whole.repeat_interleave(layer.shape.intermediate // whole.shape[2], 2)[..., ours]
        return spread[..., :: group or share].contiguous()

    return dataclasses.replace(
        layer,
        shape=dataclasses.replace(layer.shape, intermediate=share),
        w13=of_w13(layer.w13),
        w13_scale=of_w13(layer.w13_scale),
        w13_zeros=of_w13(layer.w13_zeros),
        w2=layer.w2[..., ours.start // 2 : ours.stop // 2].contiguous(),
        w2_scale=of_w2(layer.w2_scale),
        w2_zeros=of_w2(layer.w2_zeros),
    )


@only_cores
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", KINDS)
def test_tensor_parallel_rank(name: str, number: int, rng: torch.Generator) -> None:
    """SGLang's loader gives a rank its part; a group of 64 columns that two ranks share is cut."""
    kind = KINDS[name]
    layer = drawn(kind, rng)
    x, weights, ids, topk = given(rng)
    with server(**rank(number, "moe_tp")):
        module = empty_layer(SHAPE, kind.config, "cpu")
        load(module, tensors(layer, kind))
        result = forward(module, x, topk)
    made = part_of(layer, number, 2, kind.group and 32).weights()
    assert made.intermediate_size == 96 and same_bits(result, oxmoe.moe(x, made, weights, ids))


@only_cores
@pytest.mark.parametrize("name", ["kimi", "zeros", "awq", "gptq"])
def test_expert_parallel_rank(name: str, rng: torch.Generator) -> None:
    """The layer is that of the second of two ranks: its experts' tensors and ids."""
    kind, half = KINDS[name], SHAPE.experts // 2
    layer = drawn(kind, rng)
    x, weights, ids, _ = given(rng)
    with server(**rank(1, "moe_ep")):
        module = empty_layer(SHAPE, kind.config, "cpu")
        load(module, tensors(layer, kind))
        assert module.quant_method.weights.num_experts == half
        local = StandardTopKOutput(weights, torch.where(ids >= half, ids - half, -1).int(), None)
        result = module.quant_method.apply(module, StandardDispatchOutput(x, None, local)).hidden_states
    assert same_bits(result, oxmoe.moe(x, layer.weights(), weights, torch.where(ids >= half, ids, -1).int()))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", ["kimi", "zeros", "awq", "gptq"])
def test_behind_an_all_to_all(name: str, rng: torch.Generator) -> None:
    """DeepEP's tokens in both modes give the bits of `moe`."""
    kind = KINDS[name]
    layer = drawn(kind, rng)
    x, weights, ids, _ = given(rng, 11)
    with server():
        module = empty_layer(SHAPE, kind.config, "cpu")
        load(module, tensors(layer, kind))
    with server(a2a="deepep"):
        check_dispatched(
            lambda dispatched: module.quant_method.apply(module, dispatched),
            layer.weights(),
            lambda *operands: torch.empty(0),  # stands for a call on GPUs
            x,
            (weights, ids),
            SHAPE.experts,
        )


@pytest.mark.parametrize("name", KINDS)
def test_experts_move_with_rows_of_parameters(name: str, device: str, rng: torch.Generator) -> None:
    check_moved(KINDS[name].config, device, rng)


# Updates

DERIVED = [name for name, kind in KINDS.items() if kind.zeros or kind.config["quant_method"] != "compressed-tensors"]


@pytest.mark.parametrize("name", KINDS)
def test_an_update_by_sglangs_loader_is_right(name: str, device: str, rng: torch.Generator) -> None:
    kind = KINDS[name]
    layers = [drawn(kind, rng) for _ in range(2)]
    x, weights, ids, topk = given(rng, device=device)
    with server():
        module = empty_layer(SHAPE, kind.config, device)
        load(module, tensors(layers[0], kind))
        forward(module, x, topk)
        DefaultModelLoader.load_weights_and_postprocess(
            Model(module), list(tensors(layers[1], kind).items()), torch.device(device)
        )
        result = forward(module, x, topk)
        # A layer that an update leaves out stays as it is.
        DefaultModelLoader.load_weights_and_postprocess(Model(module), [], torch.device(device))
        assert same_bits(forward(module, x, topk), result)
    assert same_bits(result, oxmoe.moe(x, layers[1].to(device).weights(), weights, ids))


@pytest.mark.parametrize("name", DERIVED)
def test_an_update_that_is_not_processed_is_refused(name: str, rng: torch.Generator) -> None:
    kind = KINDS[name]
    x, _, _, topk = given(rng)
    with server():
        module = empty_layer(SHAPE, kind.config, "cpu")
        load(module, tensors(drawn(kind, rng), kind))
        before, result = bits(module), forward(module, x, topk)
        with pytest.raises(RuntimeError, match="layer 0: int4 experts were prepared at load"):
            write(module, tensors(drawn(kind, rng), kind))
        assert all(same_bits(*pair) for pair in zip(bits(module), before, strict=True))
        assert same_bits(forward(module, x, topk), result)


def test_symmetric_weights_take_every_update(rng: torch.Generator) -> None:
    """On a CPU compressed-tensors' weights are read as they lie."""
    kind = KINDS["kimi"]
    layer = drawn(kind, rng)
    x, weights, ids, topk = given(rng)
    with server():
        module = empty_layer(SHAPE, kind.config, "cpu")
        load(module, tensors(drawn(kind, rng), kind))
        forward(module, x, topk)
        write(module, tensors(layer, kind))
        assert same_bits(forward(module, x, topk), oxmoe.moe(x, layer.weights(), weights, ids))


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_an_update_of_a_part_is_refused(name: str, rng: torch.Generator) -> None:
    kind = KINDS[name]
    x, _, _, topk = given(rng)
    with server():
        module = empty_layer(SHAPE, kind.config, "cpu")
        load(module, tensors(drawn(kind, rng), kind))
        module.quant_method.updates.announce()
        write(module, tensors(drawn(kind, rng), kind), range(3))
        with pytest.raises(RuntimeError, match="a weight update wrote parts of packed int4 experts"):
            module.quant_method.process_weights_after_loading(module)
        with pytest.raises(RuntimeError, match="wrote parts"):
            forward(module, x, topk)
        load(module, tensors(drawn(kind, rng), kind))
        forward(module, x, topk)


def test_schemes_say_what_they_are() -> None:
    described = {name: str(int4.OxmoeInt4MoEMethod(_scheme(kind)).scheme) for name, kind in KINDS.items()}
    assert described["kimi"] == "int4 of compressed-tensors, groups of 32"
    assert described["awq-64"] == "int4 of AWQ, groups of 64, zero points"
    assert described["gptq-rows"] == "int4 of GPTQ, a scale a row"


def _scheme(kind: Kind) -> int4_schemes.Scheme:
    if kind.config["quant_method"] != "compressed-tensors":
        return int4_schemes.of_checkpoint(kind.config)
    return int4_schemes.of_weights(kind.config["config_groups"]["group_0"]["weights"], kind.config["format"])
