"""flashinfer's trtllm_fp8_block_scale_moe and its routed form: routing methods, packed routing, layouts of weights."""

from __future__ import annotations

import functools
import inspect
import math
import struct
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Shape, make_routing, tie_free_groups, tie_free_logits
from fp8_cases import CPU_BAR, FP8_BAR, Fp8, call, make_fp8
from oxmoe import reference
from oxmoe.peers import flashinfer_trtllm
from oxmoe.testing import assert_close_ulp, same_bits

SHAPE = Shape("trtllm", 16, 4, 256, 128).with_options(layout="up_gate")

# The parameters before those that 0.7 moved, and the others of both versions.
FIRST = (
    "routing_bias hidden_states hidden_states_scale gemm1_weights gemm1_weights_scale gemm2_weights "
    "gemm2_weights_scale num_experts top_k n_group topk_group intermediate_size local_expert_offset local_num_experts "
    "routed_scaling_factor routing_method_type use_shuffled_weight weight_layout do_finalize enable_pdl"
).split()


class Method(IntEnum):
    """RoutingMethodType of flashinfer 0.7.2."""

    Default = 0
    Renormalize = 1
    DeepSeekV3 = 2
    Llama4 = 3
    RenormalizeNaive = 4
    TopK = 5
    SigmoidRenorm = 6
    MiniMax2 = 7
    Sigmoid = 8
    TopKSigmoid = 9
    Unspecified = 10


def packed_word(expert: int, weight: float) -> int:
    """Returns one int32, written out."""
    bits = torch.tensor(weight).bfloat16().view(torch.int16).item() % (1 << 16)
    (word,) = struct.unpack("<i", struct.pack("<Hh", bits, expert))
    return word


def test_pack(device: str, rng: torch.Generator) -> None:
    ids = torch.randint(-1, 512, (40, 8), generator=rng)
    ids[0, :4] = torch.tensor([-1, 0, 32767, -32768])
    weights = torch.randn((40, 8), generator=rng)
    weights[1, :4] = torch.tensor([-0.0, math.inf, -1.0, 1e-40])
    words = [
        [packed_word(e, w) for e, w in zip(*row, strict=True)]
        for row in zip(ids.tolist(), weights.tolist(), strict=True)
    ]
    for dtype in (torch.int32, torch.int64):
        packed = oxmoe.pack_topk(weights.to(device), ids.to(device, dtype))
        assert packed.dtype == torch.int32 and packed.tolist() == words
    back_weights, back_ids = oxmoe.unpack_topk(packed)
    assert back_ids.dtype == torch.int32 and torch.equal(back_ids.cpu().long(), ids)
    assert back_weights.dtype == torch.float32 and same_bits(back_weights.cpu(), weights.bfloat16().float())
    nan = oxmoe.pack_topk(torch.full((1, 1), math.nan, device=device), torch.full((1, 1), 7, device=device))
    back_weights, back_ids = oxmoe.unpack_topk(nan)
    assert math.isnan(back_weights.item()) and back_ids.item() == 7


def test_pack_refused() -> None:
    weights, ids = torch.zeros((2, 3)), torch.zeros((2, 3), dtype=torch.int32)
    with pytest.raises(ValueError, match="topk_weights: expected dtype float32 or bfloat16 or float16, got int32"):
        oxmoe.pack_topk(ids, ids)
    with pytest.raises(ValueError, match=r"topk_ids: expected shape \[2, 3\], got \[2, 2\]"):
        oxmoe.pack_topk(weights, ids[:, :2])
    with pytest.raises(ValueError, match="packed: expected dtype int32, got float32"):
        oxmoe.unpack_topk(weights)
    with pytest.raises(ValueError, match=r"packed: expected 2 dimensions \[tokens, top_k\], got shape \[3\]"):
        oxmoe.unpack_topk(ids[0])


def choose(method: Method, logits: Tensor, top_k: int, bias: Tensor | None, groups: tuple[int, int]) -> Any:
    """Returns (weights, ids) of one method, in plain torch."""
    logits = logits.float()
    if method in (Method.Renormalize, Method.TopK, Method.TopKSigmoid):
        values, ids = logits.topk(top_k)
        if method == Method.Renormalize:
            return values.softmax(-1), ids
        return (values if method == Method.TopK else values.sigmoid()), ids
    if method in (Method.Default, Method.RenormalizeNaive):
        weights, ids = logits.softmax(-1).topk(top_k)
        return (weights if method == Method.Default else weights / weights.sum(-1, keepdim=True)), ids
    scores = logits.sigmoid()
    choice = scores if bias is None else scores + bias.float()
    if groups[0] > 1:
        in_groups = choice.unflatten(1, (groups[0], -1))
        best = in_groups.topk(2).values.sum(-1).topk(groups[1]).indices
        kept = torch.zeros_like(in_groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
        choice = in_groups.masked_fill(~kept[..., None], -math.inf).flatten(1)
    ids = choice.topk(top_k).indices
    weights = scores.gather(1, ids)
    if method in (Method.DeepSeekV3, Method.MiniMax2, Method.SigmoidRenorm):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids


def arguments(layer: Fp8, x: Tensor, **options: Any) -> dict[str, Any]:
    codes, scales = reference.fp8_groups(x)
    shape = layer.shape
    given: dict[str, Any] = {
        "routing_bias": None,
        "hidden_states": codes,
        "hidden_states_scale": scales.t().contiguous(),
        "gemm1_weights": layer.w13,
        "gemm1_weights_scale": layer.w13_scale,
        "gemm2_weights": layer.w2,
        "gemm2_weights_scale": layer.w2_scale,
        "num_experts": shape.experts,
        "top_k": shape.top_k,
        "n_group": None,
        "topk_group": None,
        "intermediate_size": shape.intermediate,
        "local_expert_offset": 0,
        "local_num_experts": shape.experts,
        "routed_scaling_factor": None,
    }
    return {**given, **options}


@pytest.mark.parametrize("method", [m for m in Method if m != Method.Unspecified], ids=lambda m: m.name)
@pytest.mark.parametrize("tokens", [1, 50])
def test_routing_methods(method: Method, tokens: int, device: str, rng: torch.Generator) -> None:
    layer, top_k = make_fp8(SHAPE, device, rng), 1 if method == Method.Llama4 else SHAPE.top_k
    x, logits = layer.x(tokens, rng), tie_free_groups(tokens, SHAPE.experts, rng).to(device)
    biased = method in (Method.DeepSeekV3, Method.MiniMax2)
    # The bias is exact in bf16, and gives every expert another sum.
    bias = (torch.randperm(SHAPE.experts, generator=rng) / 64).bfloat16().to(device) if biased else None
    groups = (4, 2) if method == Method.DeepSeekV3 else (0, 0)
    factor = 2.5 if biased else 1.0
    weights, ids = choose(method, logits, top_k, bias, groups)
    expected = call(x, layer.weights(), weights, ids.int(), routed_scaling_factor=factor)
    options = {"top_k": top_k, "routing_bias": bias, "n_group": groups[0], "topk_group": groups[1]}
    given = arguments(layer, x, routed_scaling_factor=2.5, **options)
    for chosen in (method, int(method)):
        result = oxmoe.trtllm_fp8_block_scale_moe(logits, **given, routing_method_type=chosen)
        assert result.dtype == torch.bfloat16
        assert_close_ulp(result, expected)
    replay = torch.full((tokens + 2, top_k), -7, dtype=torch.int16, device=device)
    again = oxmoe.trtllm_fp8_block_scale_moe(
        logits, **given, routing_method_type=method, routing_replay_out=replay, output=torch.empty_like(x)
    )
    assert_close_ulp(again, expected)
    assert torch.equal(replay[:tokens].sort(1).values.long(), ids.sort(1).values) and bool(
        (replay[tokens:] == -7).all()
    )


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_norm_topk_prob(norm_topk_prob: bool, rng: torch.Generator) -> None:
    layer = make_fp8(SHAPE, "cpu", rng)
    x, logits = layer.x(9, rng), tie_free_logits(9, SHAPE.experts, rng)
    method = Method.SigmoidRenorm if norm_topk_prob else Method.Sigmoid
    weights, ids = choose(method, logits, 4, None, (0, 0))
    expected = call(x, layer.weights(), weights, ids.int())
    given = arguments(layer, x)
    result = oxmoe.trtllm_fp8_block_scale_moe(logits, **given, routing_method_type=6, norm_topk_prob=norm_topk_prob)
    assert_close_ulp(result, expected)


@pytest.mark.parametrize("tokens", [1, 20, 300])
def test_deepseek_v3_from_logits_to_output(tokens: int, device: str, rng: torch.Generator) -> None:
    """Grouped routing with bias is compared, as a whole layer, with the reference that routes by itself."""
    shape = Shape("dsv3-small", 64, 8, 384, 256)
    layer = make_fp8(shape, device, rng)
    x, logits = layer.x(tokens, rng), tie_free_groups(tokens, 64, rng).to(device)
    bias = (torch.randperm(64, generator=rng) / 64 - 0.5).to(device)
    routing = {
        "router_logits": logits,
        "top_k": 8,
        "scoring_func": "sigmoid",
        "correction_bias": bias,
        "num_expert_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    }
    scales = {"w13_scale": layer.w13_scale, "w2_scale": layer.w2_scale}
    truth = reference.moe(x, layer.w13, layer.w2, **scales, **routing)
    if tokens >= 8:
        assert_close_ulp(call(x, layer.weights(), **routing), truth, FP8_BAR if device == "cuda" else CPU_BAR)
    other = make_fp8(shape.with_options(layout="up_gate"), device, rng)
    expected = call(x, other.weights(), **routing)
    options = {"routing_bias": bias, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
    given = arguments(other, x, **options, routing_method_type=Method.DeepSeekV3)
    assert same_bits(oxmoe.trtllm_fp8_block_scale_moe(logits, **given), expected)


@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_routed(tokens: int, device: str, rng: torch.Generator) -> None:
    """ids are packed, or a pair; some name no expert, and some weights are negative."""
    layer = make_fp8(SHAPE, device, rng)
    x = layer.x(tokens, rng)
    weights, ids = make_routing("holes", tokens, SHAPE.experts, SHAPE.top_k, rng)
    signs = torch.where(torch.rand(weights.shape, generator=rng) < 0.5, -1, 1)
    weights, ids = (weights.nan_to_num(nan=-0.5) * signs).bfloat16().to(device), ids.to(device)
    expected = call(x, layer.weights(), weights.float(), ids)
    given = arguments(layer, x, routing_method_type=5)
    packed = oxmoe.pack_topk(weights, ids)
    for routing in (packed, (ids, weights), (ids, weights.float())):
        assert same_bits(oxmoe.trtllm_fp8_block_scale_routed_moe(routing, **given), expected)
    out = torch.full_like(x, math.nan)
    result = oxmoe.trtllm_fp8_block_scale_routed_moe(packed, **given, output=out)
    assert result is out and same_bits(out, expected)
    made = oxmoe.prepare_trtllm_fp8_block_scale_moe(layer.w13, layer.w13_scale, layer.w2, layer.w2_scale)
    assert same_bits(oxmoe.trtllm_fp8_block_scale_routed_moe(packed, **given, weights=made), expected)


def test_experts_of_two_ranks(device: str, rng: torch.Generator) -> None:
    layer = make_fp8(SHAPE, device, rng)
    x, logits = layer.x(30, rng), tie_free_logits(30, SHAPE.experts, rng).to(device)
    made = layer.weights()
    for rank in range(2):
        part = slice(8 * rank, 8 * rank + 8)
        mine = Fp8(SHAPE, layer.w13[part], layer.w2[part], layer.w13_scale[part], layer.w2_scale[part], None, None)
        given = arguments(mine, x, local_expert_offset=8 * rank, local_num_experts=8, routing_method_type=1)
        result = oxmoe.trtllm_fp8_block_scale_moe(logits, **given)
        options = {"router_logits": logits, "top_k": 4, "scoring_func": "softmax_topk", "ep_size": 2, "ep_rank": rank}
        assert same_bits(result, call(x, mine.weights(), **options))
    assert made.num_experts == 16


def shuffle(weights: Tensor) -> Tensor:
    """Orders rows of each expert as flashinfer's shuffle_matrix_a with epilogue_tile_m 64 does: row r of 16 goes to
    place[r]."""
    place = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
    shuffled = torch.empty_like(weights)
    for row in range(weights.shape[1]):
        shuffled[:, row // 16 * 16 + place[row % 16]] = weights[:, row]
    return shuffled


def blocked(weights: Tensor) -> Tensor:
    """Returns [E, R, K] as [E, K / 128, R, 128]."""
    return torch.stack(weights.split(128, dim=2), dim=1)


@pytest.mark.parametrize("weight_layout", [0, 2])
@pytest.mark.parametrize("shuffled", [False, True])
def test_layouts_of_weights(shuffled: bool, weight_layout: int, device: str, rng: torch.Generator) -> None:
    layer = make_fp8(SHAPE, device, rng)
    x, logits = layer.x(20, rng), tie_free_logits(20, SHAPE.experts, rng).to(device)
    expected = oxmoe.trtllm_fp8_block_scale_moe(logits, **arguments(layer, x))
    tensors = [layer.w13.view(torch.uint8), layer.w2.view(torch.uint8)]
    if shuffled:
        tensors = [shuffle(tensor) for tensor in tensors]
    if weight_layout == 2:
        tensors = [blocked(tensor) for tensor in tensors]
    w13, w2 = (tensor.view(torch.float8_e4m3fn) for tensor in tensors)
    given = arguments(layer, x, gemm1_weights=w13, gemm2_weights=w2)
    form = {"use_shuffled_weight": shuffled, "weight_layout": weight_layout}
    flashinfer_trtllm.cache.clear()
    for _ in range(2):
        assert same_bits(oxmoe.trtllm_fp8_block_scale_moe(logits, **given, **form), expected)
    assert len(flashinfer_trtllm.cache) == int(shuffled or weight_layout == 2)
    scales = layer.w13_scale, layer.w2_scale
    made = oxmoe.prepare_trtllm_fp8_block_scale_moe(w13, scales[0], w2, scales[1], **form)
    assert same_bits(oxmoe.trtllm_fp8_block_scale_moe(logits, **arguments(layer, x), weights=made), expected)
    flashinfer_trtllm.cache.clear()


@pytest.mark.parametrize("shuffled", [False, True])
def test_numbers_of_experts_and_biases(shuffled: bool, device: str, rng: torch.Generator) -> None:
    layer = make_fp8(SHAPE, device, rng)
    x, logits = layer.x(20, rng), tie_free_logits(20, SHAPE.experts, rng).to(device)
    numbers = {name: (torch.rand(16, generator=rng) + 0.5).to(device) for name in ("alpha", "beta", "limit")}
    biases = {"b13": torch.randn((16, 256), generator=rng), "b2": torch.randn((16, 256), generator=rng)}
    biases = {name: bias.bfloat16().to(device) for name, bias in biases.items()}
    made = layer.weights(**numbers, **biases)
    expected = call(x, made, router_logits=logits, top_k=4, renormalize=False)
    given = arguments(layer, x, use_shuffled_weight=shuffled)
    if shuffled:
        biases = {name: shuffle(bias) for name, bias in biases.items()}
        for name in ("gemm1_weights", "gemm2_weights"):
            given[name] = shuffle(given[name].view(torch.uint8)).view(torch.float8_e4m3fn)
    result = oxmoe.trtllm_fp8_block_scale_moe(
        logits,
        **given,
        gemm1_alpha=numbers["alpha"],
        gemm1_beta=numbers["beta"],
        gemm1_clamp_limit=numbers["limit"],
        gemm1_bias=biases["b13"],
        gemm2_bias=biases["b2"],
    )
    assert same_bits(result, expected)


def test_bf16_tokens(rng: torch.Generator) -> None:
    layer = make_fp8(SHAPE, "cpu", rng)
    x, logits = layer.x(5, rng), tie_free_logits(5, SHAPE.experts, rng)
    given = arguments(layer, x)
    expected = oxmoe.trtllm_fp8_block_scale_moe(logits, **given)
    given.update(hidden_states=x, hidden_states_scale=None)
    assert same_bits(oxmoe.trtllm_fp8_block_scale_moe(logits, **given), expected)


def test_signatures() -> None:
    logits, routed = (
        list(inspect.signature(function).parameters)
        for function in (oxmoe.trtllm_fp8_block_scale_moe, oxmoe.trtllm_fp8_block_scale_routed_moe)
    )
    assert logits[: len(FIRST) + 1] == ["routing_logits", *FIRST] and routed[: len(FIRST) + 1] == ["topk_ids", *FIRST]
    both = {"tune_max_num_tokens", "fp8_quantization_type", "activation_type", "output", "gemm1_alpha", "gemm1_beta"}
    both |= {"gemm1_clamp_limit", "valid_hidden_size", "valid_intermediate_size", "weights"}
    both |= {"workspace_buffer"}
    more = {"num_fused_shared_experts", "norm_topk_prob", "routing_replay_out", "gemm1_bias", "gemm2_bias"}
    assert set(logits[len(FIRST) + 1 :]) == both | more and set(routed[len(FIRST) + 1 :]) == both | {"gemm1_lora_delta"}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"fp8_quantization_type": 4}, "no kernel for fp8_quantization_type 4; served: fp8_quantization_type DeepSeek"),
        ({"activation_type": 4}, "no kernel for activation_type 4"),
        ({"valid_hidden_size": 200}, "no kernel for valid_hidden_size, valid_intermediate_size with DeepSeekFp8"),
        ({"routing_method_type": Method.Unspecified}, "routing_method_type: no kernel for .*; served are Default"),
        ({"weight_layout": 1, "use_shuffled_weight": True}, "weight_layout: no kernel for 1; served are MajorK"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_not_served(options: dict[str, Any], match: str, rng: torch.Generator) -> None:
    layer = make_fp8(SHAPE, "cpu", rng)
    x, logits = layer.x(5, rng), tie_free_logits(5, SHAPE.experts, rng)
    with pytest.raises(NotImplementedError, match=match):
        oxmoe.trtllm_fp8_block_scale_moe(logits, **{**arguments(layer, x), **options})


def test_routing_options() -> None:
    """Methods come as numbers and names; an option that a method has no use for is dropped."""
    options = functools.partial(flashinfer_trtllm.routing_options, top_k=4)
    sigmoid = {"top_k": 4, "scoring_func": "sigmoid"}
    assert options(6) == {**sigmoid, "renormalize": True} == options(SimpleNamespace(name="SigmoidRenorm"))
    assert options(6, norm_topk_prob=False) == {**sigmoid, "renormalize": False}
    bias = torch.ones(8).bfloat16()
    given: dict[str, Any] = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "routing_bias": bias}
    deepseek, minimax = options(Method.DeepSeekV3, **given), options(Method.MiniMax2, **given)
    assert deepseek.pop("correction_bias").dtype == minimax.pop("correction_bias").dtype == torch.float32
    assert minimax == {**sigmoid, "renormalize": True, "routed_scaling_factor": 2.5}
    assert deepseek == {**minimax, "num_expert_group": 2, "topk_group": 1}
    assert options(2, n_group=1, topk_group=1) == options(2) == {**sigmoid, "renormalize": True}
    for method in (Method.Default, Method.Renormalize, Method.TopK, Method.Sigmoid):
        assert options(method, **given) == options(int(method)) and options(method)["renormalize"] is False
    for method in (-1, 10, 11, 1.0, "Default", None, SimpleNamespace(name="Other")):
        with pytest.raises(NotImplementedError, match=r"routing_method_type: no kernel for .*; served are Default"):
            options(method)


def test_what_the_routed_form_hands_on(rng: torch.Generator) -> None:
    """The routed form takes shuffled weights; sizes are those of the layer or refused."""
    layer = make_fp8(SHAPE, "cpu", rng)
    x = layer.x(5, rng)
    weights, ids = make_routing("uniform", 5, SHAPE.experts, SHAPE.top_k, rng)
    run = functools.partial(oxmoe.trtllm_fp8_block_scale_routed_moe, (ids, weights))
    given = arguments(layer, x)
    expected = run(**given)
    shuffled = [shuffle(w.view(torch.uint8)).view(torch.float8_e4m3fn) for w in (layer.w13, layer.w2)]
    moved = {**given, "gemm1_weights": shuffled[0], "gemm2_weights": shuffled[1], "use_shuffled_weight": True}
    assert same_bits(run(**moved), expected)
    sizes = {"valid_hidden_size": SHAPE.hidden, "valid_intermediate_size": SHAPE.intermediate}
    assert same_bits(run(**given, **sizes), expected)
    for name in sizes:
        with pytest.raises(NotImplementedError, match="trtllm_fp8_block_scale_routed_moe: no kernel for valid_hidden"):
            run(**given, **{**sizes, name: 64})
    with pytest.raises(ValueError, match=r"valid_hidden_size: expected 1 to \d+ \(the padded size\), got 9999"):
        run(**given, valid_hidden_size=9999)
    logits = tie_free_logits(5, SHAPE.experts, rng)
    plain = oxmoe.trtllm_fp8_block_scale_moe(logits, **given)
    assert same_bits(oxmoe.trtllm_fp8_block_scale_moe(logits, **given, **sizes), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_topk_of_deepseek(tokens: int, dtype: torch.dtype, device: str, rng: torch.Generator) -> None:
    """fused_topk_deepseek against fp64, with groups and without, where no two numbers that decide are nearly equal."""

    def apart(best: Tensor) -> Tensor:
        return (best[:, :-1] - best[:, 1:]).amin(1) > 1e-5

    for experts, groups, best, top_k in ((64, 8, 3, 6), (48, 1, 1, 8)):
        scores = torch.randn((tokens, experts), generator=rng).to(dtype)
        bias = torch.randn(experts, generator=rng).to(dtype)
        sigmoid = scores.double().sigmoid()
        judged = (sigmoid + bias.double()).view(tokens, groups, experts // groups)
        clear = torch.ones(tokens, dtype=torch.bool)
        if groups > 1:
            of_groups = judged.topk(2).values.sum(-1)
            kept, clear = of_groups.topk(best).indices, apart(of_groups.topk(best + 1).values)
            judged = torch.full_like(judged, -torch.inf).scatter(
                1, kept[..., None].expand(-1, -1, experts // groups), judged.gather(
                    1, kept[..., None].expand(-1, -1, experts // groups)
                )
            )  # fmt: skip
        ids, clear = judged.flatten(1).topk(top_k).indices, clear & apart(judged.flatten(1).topk(top_k + 1).values)
        assert int(clear.sum()) >= tokens // 2
        chosen = sigmoid.gather(1, ids)
        expected = 2.5 * chosen / chosen.sum(1, keepdim=True)
        values = torch.full((tokens, top_k), torch.nan, dtype=dtype, device=device)
        indices = torch.full((tokens, top_k), -7, dtype=torch.int32, device=device)
        replay = torch.full((tokens + 2, top_k), -7, dtype=torch.int16, device=device)
        arguments = (scores.to(device), bias.to(device), groups, best, top_k, 2.5)
        assert oxmoe.fused_topk_deepseek(*arguments, values, indices, True, replay) is None  # type: ignore[func-returns-value]
        assert torch.equal(indices.cpu().long()[clear], ids[clear])
        assert torch.equal(replay[:tokens].cpu().long(), indices.cpu().long()) and bool((replay[tokens:] == -7).all())
        rtol = max(torch.finfo(dtype).eps, 1e-6)
        assert torch.allclose(values.cpu().double()[clear], expected[clear], rtol=rtol)
    good = {"topk_values": values, "topk_indices": indices}
    for words, changed in (
        ("topk_values: expected dtype", {"topk_values": values.double()}),
        ("topk_indices: expected dtype int32, got int64", {"topk_indices": indices.long()}),
        (r"topk_indices: expected shape \[\d+, 8\], got", {"topk_indices": indices[:, :3]}),
        ("routing_replay_out: expected", {"routing_replay_out": replay[:, :2]}),
    ):
        with pytest.raises(ValueError, match=words):
            oxmoe.fused_topk_deepseek(*arguments, **{**good, **changed})  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="backend: no kernel for 'cake'"):
        oxmoe.fused_topk_deepseek(*arguments, **good, backend="cake")


def test_of_two_faults_the_dtype_is_named(rng: torch.Generator) -> None:
    """flashinfer names the dtype of hidden_states and of the weights before shapes, scales and numbers of experts."""
    layer = make_fp8(SHAPE, "cpu", rng)
    x, logits = layer.x(5, rng), tie_free_logits(5, SHAPE.experts, rng)
    given = arguments(layer, x)
    wrong = {"hidden_states": x.half(), "hidden_states_scale": torch.ones(3, 3), "local_num_experts": 4}
    with pytest.raises(ValueError, match=r"^hidden_states: expected dtype float8_e4m3fn or bfloat16, got float16"):
        oxmoe.trtllm_fp8_block_scale_moe(logits, **{**given, **wrong})
    for name in ("gemm1_weights", "gemm2_weights"):
        wrong = {name: given[name][:2].to(torch.int8), "hidden_states_scale": torch.ones(3, 3)}
        with pytest.raises(ValueError, match=rf"^{name}: expected dtype float8_e4m3fn, got int8"):
            oxmoe.trtllm_fp8_block_scale_moe(logits, **{**given, **wrong})
    sizes = {name: given[name] for name in given if not name.startswith(("hidden", "gemm", "use", "weight", "fp8"))}
    for function, dtype, others in (
        (oxmoe.trtllm_bf16_moe, "bfloat16", {"hidden_states": x}),
        (
            oxmoe.trtllm_fp8_per_tensor_scale_moe,
            "float8_e4m3fn",
            {
                "hidden_states": x.to(torch.float8_e4m3fn),
                "use_routing_scales_on_input": False,
                **dict.fromkeys(("output1_scales_scalar", "output1_scales_gate_scalar"), torch.ones(1)),
                "output2_scales_scalar": torch.ones(1),
            },
        ),
    ):
        weights = {"gemm1_weights": torch.zeros(2, 8, 3), "gemm2_weights": torch.zeros(2, 3)}
        with pytest.raises(ValueError, match=f"^gemm1_weights: expected dtype {dtype}, got float32"):
            function(logits, **{**sizes, **others, **weights})  # type: ignore[operator]


def test_refused(rng: torch.Generator) -> None:
    layer = make_fp8(SHAPE, "cpu", rng)
    x, logits = layer.x(5, rng), tie_free_logits(5, SHAPE.experts, rng)
    given = arguments(layer, x)
    with pytest.raises(ValueError, match="top_k: routing method Llama4 has 1, got 4"):
        oxmoe.trtllm_fp8_block_scale_moe(logits, **given, routing_method_type=3)
    with pytest.raises(ValueError, match=r"hidden_states_scale: expected shape \[hidden / 128, 5\], got \[5, 2\]"):
        scale = given["hidden_states_scale"].t()
        oxmoe.trtllm_fp8_block_scale_moe(logits, **{**given, "hidden_states_scale": scale})
    with pytest.raises(ValueError, match=r"topk_ids: expected shape \[tokens, 4\] \(top_k\), got \[5, 3\]"):
        oxmoe.trtllm_fp8_block_scale_routed_moe(torch.zeros((5, 3), dtype=torch.int32), **given)
    for offset, local, last in ((0, 0, 0), (-8, 8, 0), (16, 8, 24), (12, 8, 20)):
        options = {"local_expert_offset": offset, "local_num_experts": local}
        message = rf"local_expert_offset: experts {offset} to {last} \(local_num_experts {local}\) are not among num_ex"
        with pytest.raises(ValueError, match=message):
            oxmoe.trtllm_fp8_block_scale_moe(logits, **{**given, **options})
    for rows, columns in ((4, 4), (5, 3), (5, 5)):
        replay = torch.zeros((rows, columns), dtype=torch.int16)
        message = rf"routing_replay_out: expected \[5 or more, 4\], got shape \({rows}, {columns}\)"
        with pytest.raises(ValueError, match=message):
            oxmoe.trtllm_fp8_block_scale_moe(logits, **given, routing_replay_out=replay)
    exact = torch.zeros((5, 4), dtype=torch.int16)
    oxmoe.trtllm_fp8_block_scale_moe(logits, **given, routing_replay_out=exact)
    assert bool((exact.sum(1) > 0).all())
    with pytest.raises(ValueError, match=r"^routing_replay_out: expected \[T, top_k\], got shape \(4,\)"):
        oxmoe.trtllm_fp8_block_scale_moe(logits, **given, routing_replay_out=exact[0])
    with pytest.raises(ValueError, match=r"^hidden_states: expected \[T, H\], got shape \(256,\)"):
        oxmoe.trtllm_fp8_block_scale_moe(logits, **{**given, "hidden_states": given["hidden_states"][0]})
    pair = torch.zeros((5, 4), dtype=torch.int32), torch.ones(5, 4)
    for place in (0, 1):
        wrong = tuple("x" if place == index else part for index, part in enumerate(pair))
        with pytest.raises((ValueError, TypeError), match=rf"^topk_ids\[{place}\]: "):
            oxmoe.trtllm_fp8_block_scale_routed_moe(wrong, **given)
    with pytest.raises(NotImplementedError, match="no kernel for gemm1_lora_delta"):
        ids = torch.zeros((5, 4), dtype=torch.int32)
        oxmoe.trtllm_fp8_block_scale_routed_moe(ids, **given, gemm1_lora_delta=x)
