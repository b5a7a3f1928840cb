"""DeepSeek-V4's MXFP4 experts, which an fp8 checkpoint holds, in SGLang's layers, loaders and routers, beside fp64
arithmetic on the dequantised weights."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import Shape, make_routing, make_x
from check_configs import deepseek_v4
from mxfp4_cases import Blocks, make_blocks
from oxmoe.testing import same_bits

pytest.importorskip("sglang")

from sglang.srt.layers.moe import topk as sglang_topk
from sglang.srt.layers.moe.hash_topk import HashTopK
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopK
from sglang.srt.layers.quantization import get_quantization_config
from sglang.srt.model_loader.loader import DefaultModelLoader

from oxmoe.sglang import capabilities, layers, loading, setting, updates
from oxmoe.sglang.deepseek_v4 import SCALES, OxmoeFp8Mxfp4MoEMethod
from sglang_server import ADAPTER, HAS_CONTEXT, NEW, VERSION, FusedMoE, addresses_of, installed, only_cores, server
from test_sglang_check import checked
from test_sglang_compressed import parts, rank
from test_sglang_deepep import check as check_dispatched
from test_sglang_deepep import poisoned
from test_sglang_eplb import PLACES, balanced, move
from test_sglang_fp8 import forward

__all__ = ["poisoned"]

CHECKPOINT = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "scale_fmt": "ue8m0",
}
V4 = {"swiglu_limit": 10.0, "routed_scaling_factor": 1.5}
SMALL = Shape("v4-small", 8, 3, 256, 192)
# True sizes of an expert, fewer of them: Flash whole, and what a rank of eight has of Pro.
FLASH, PRO_TP8 = Shape("v4-flash", 8, 6, 4096, 2048), Shape("v4-pro-tp8", 8, 6, 7168, 384)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Tensors = dict[str, Callable[[int, str], Tensor]]


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


# Older releases have this score in another function.
IN_TORCH = "sqrtsoftplus" in inspect.getsource(sglang_topk.fused_topk_torch_native)


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers in torch: their kernels need a GPU."""
    for name in ("SGLANG_OPT_USE_FUSED_HASH_TOPK", "SGLANG_OPT_USE_JIT_KERNEL_FUSED_TOPK"):
        monkeypatch.setenv(name, "0")


def config(**fields: Any) -> Any:
    """As SGLang's loader leaves it when it has seen MXFP4 experts."""
    quant_config = get_quantization_config("oxmoe").from_config(dict(CHECKPOINT))
    for name, value in {"is_fp4_experts": True, **fields}.items():
        setattr(quant_config, name, value)
    return quant_config


def empty(shape: Shape, device: str = "cpu", quant_config: Any = None, **options: Any) -> FusedMoE:
    with torch.device(device):
        return FusedMoE(
            num_experts=shape.experts,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            top_k=shape.top_k,
            quant_config=quant_config or config(),
            prefix="model.layers.0.mlp.experts",
            **{"layer_id": 0, "params_dtype": torch.bfloat16, **V4, **options},
        )


def drawn(shape: Shape, device: str, rng: torch.Generator) -> Blocks:
    """Some experts' sums are far beyond the limit of 10, others' are within."""
    blocks = make_blocks(shape, "bf16", device, rng)
    blocks.w13_scale[::2] += 4
    return blocks


def tensors_of(blocks: Blocks, *, codes: torch.dtype = torch.int8, scales: Any = torch.float8_e8m0fnu) -> Tensors:
    """A checkpoint's, by the dtypes that it may have."""
    bytes_of = blocks.w13_scale, blocks.w2_scale
    of_scales = [scale.view(torch.float8_e8m0fnu) for scale in bytes_of]
    kept = bytes_of if scales is torch.uint8 else [scale.to(scales) for scale in of_scales]
    return {
        "weight": parts(blocks.w13.view(codes), blocks.w2.view(codes)),
        "weight_scale_inv": parts(*kept),
    }


def write(module: FusedMoE, tensors: Tensors, experts: Any = None) -> None:
    """By SGLang's own loader, as the model's load_weights does; nothing is processed."""
    for expert in experts if experts is not None else range(module.num_experts):
        for suffix, tensor in tensors.items():
            for shard in ("w1", "w3", "w2"):
                parameter = getattr(module, f"{'w2' if shard == 'w2' else 'w13'}_{suffix}")
                name = f"model.layers.0.mlp.experts.{'w2' if shard == 'w2' else 'w13'}_{suffix}"
                parameter.weight_loader(parameter, tensor(expert, shard), name, shard_id=shard, expert_id=expert)


def load(module: FusedMoE, tensors: Tensors) -> None:
    write(module, tensors)
    module.quant_method.process_weights_after_loading(module)


def layer_of(blocks: Blocks, **options: Any) -> FusedMoE:
    module = empty(blocks.shape, blocks.w13.device.type, **options)
    load(module, tensors_of(blocks))
    return module


def numbers(codes: Tensor, scales: Tensor) -> Tensor:
    """[R, C] of codes [R, C / 2], the even column in the low nibble, and scale bytes [R, C / 32]."""
    of_nibbles = torch.cat([E2M1, -E2M1])
    of_bytes = torch.stack([of_nibbles.repeat(16), of_nibbles.repeat_interleave(16)], 1).to(codes.device)
    exact = of_bytes[codes.int()].flatten(-2).unflatten(-1, (-1, 32))
    return (exact * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).double()


def expected(blocks: Blocks, x: Tensor, weights: Tensor, ids: Tensor, *, factor: float = 1.5) -> Tensor:
    """In fp64, without a rounding between: the gate bounded from above, up on both sides, then SiLU."""
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids[ids >= 0].unique().tolist():
        tokens, slots = torch.where(ids == expert)
        w13, w2 = (
            numbers(blocks.w13[expert], blocks.w13_scale[expert]),
            numbers(blocks.w2[expert], blocks.w2_scale[expert]),
        )
        gate, up = (x[tokens].double() @ w13.T).chunk(2, -1)
        gate, up = gate.clamp(max=10.0), up.clamp(-10.0, 10.0)
        hidden = gate * torch.sigmoid(gate) * up
        result.index_add_(0, tokens, hidden @ w2.T * weights[tokens, slots, None].double())
    return factor * result


def close(result: Tensor, truth: Tensor) -> None:
    """Row by row: GEMM1's output and the result are rounded to bf16."""
    assert result.shape == truth.shape and result.dtype == torch.bfloat16
    errors = (result.double() - truth).norm(dim=1) / truth.norm(dim=1).clamp(min=1e-30)
    assert not (errors > 0.006).any(), errors.max()


def routed(shape: Shape, tokens: int, device: str, rng: torch.Generator, pattern: str = "uniform") -> Any:
    weights, ids = make_routing(pattern, tokens, shape.experts, shape.top_k, rng)
    return StandardTopKOutput(weights.to(device), ids.to(device), None)


def given(shape: Shape, tokens: int, device: str, rng: torch.Generator, pattern: str = "uniform") -> tuple[Tensor, Any]:
    return make_x(tokens, shape, torch.bfloat16, device, rng), routed(shape, tokens, device, rng, pattern)


# Numbers


@pytest.mark.parametrize("shape", [FLASH, PRO_TP8], ids=lambda shape: shape.name)
def test_true_sizes(shape: Shape, device: str, rng: torch.Generator) -> None:
    """Calls of no token, of one and of some."""
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
    """With the runners that SGLang, or a user, chooses for this model, and with those that swap fp8's gate and up."""
    blocks, (x, topk) = drawn(SMALL, device, rng), given(SMALL, 33, device, rng, pattern)
    with server(backend):
        module = layer_of(blocks)
        # Where top-k has the factor, a layer must not.
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
    """All are the same bits; E8M0's whole range too, which fp32 numbers have as powers of two."""
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


# Routing


def true_topk(scores: Tensor, choice: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    ids = choice.topk(top_k, dim=1).indices
    weights = scores.gather(1, ids)
    return weights / weights.sum(1, keepdim=True), ids


@pytest.mark.parametrize("experts", [256, 384])
@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("hashed", [False, True], ids=["top-k", "hash"])
@pytest.mark.usefixtures("in_torch")
def test_routers(hashed: bool, tokens: int, experts: int, rng: torch.Generator) -> None:
    """sqrt(softplus) with a bias for the choice, and the first layers' table of token ids: SGLang's modules."""
    shape = Shape("v4-routed", experts, 6, 128, 64)
    blocks, x = drawn(shape, "cpu", rng), make_x(tokens, shape, torch.bfloat16, "cpu", rng)
    logits, bias = torch.randn((tokens, experts), generator=rng), torch.randn(experts, generator=rng)
    scores = torch.nn.functional.softplus(logits.double()).sqrt()
    with server():
        module = layer_of(blocks)
        if hashed:
            fused = (
                {}
                if "num_fused_shared_experts" not in HashTopK.__init__.__code__.co_varnames
                else {"num_fused_shared_experts": 0}
            )
            router = HashTopK(6, experts, vocab_size=512, **fused)
            with torch.no_grad():
                router.tid2eid.copy_(torch.rand((512, experts), generator=rng).topk(6).indices)
            tokens_of = torch.randint(512, (tokens,), generator=rng)
            topk = router(x, logits, tokens_of)
            ids = router.tid2eid[tokens_of].long()
            weights = scores.gather(1, ids)
            weights = weights / weights.sum(1, keepdim=True)
        else:
            router = TopK(
                6,
                layer_id=0,
                renormalize=True,
                use_grouped_topk=False,
                scoring_func="sqrtsoftplus",
                correction_bias=bias,
                routed_scaling_factor=1.5,
                apply_routed_scaling_factor_on_output=module.should_fuse_routed_scaling_factor_in_topk,
                is_fp4_experts=True,
            )
            with torch.compiler.set_stance("force_eager"):
                topk = (router.forward_native if IN_TORCH else router.forward_cpu)(x, logits)
            weights, ids = true_topk(scores, scores + bias, 6)
        close(forward(module, x, topk), expected(blocks, x, weights, ids))


class NoExperts(torch.nn.Module):
    """In the place of the shared experts, whose fp8 linear layers need a GPU."""

    gate_up_proj = SimpleNamespace(weight=torch.empty(0), quant_method=None)

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        return torch.zeros_like(x)


@only_cores
@pytest.mark.parametrize("layer_id", [0, 3])
@pytest.mark.usefixtures("in_torch")
def test_the_models_moe_block(layer_id: int, rng: torch.Generator) -> None:
    """SGLang's module of this model: gate, router (a table of token ids in layer 0), dispatcher, experts."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    shape = Shape("v4-block", 64, 6, 256, 64)
    blocks, x = drawn(shape, "cpu", rng), make_x(11, shape, torch.bfloat16, "cpu", rng)
    model = SimpleNamespace(
        n_routed_experts=64, num_experts_per_tok=6, hidden_size=256, moe_intermediate_size=64, n_shared_experts=None
    )
    vars(model).update(routed_scaling_factor=1.5, norm_topk_prob=True, scoring_func="sqrtsoftplus", swiglu_limit=10.0)
    vars(model).update(n_group=8, topk_group=8, topk_method="noaux_tc", hidden_act="silu", num_hash_layers=3)
    vars(model).update(vocab_size=512, model_type="deepseek_v4", quantization_config=CHECKPOINT)
    default = torch.get_default_dtype()
    tokens = torch.randint(512, (11,), generator=rng)
    with server():
        torch.set_default_dtype(torch.bfloat16)
        try:
            block = DeepseekV2MoE(
                model, layer_id, quant_config=config(), prefix="model.layers.0.mlp", is_deepseek_v4=True
            )
        finally:
            torch.set_default_dtype(default)
        block.shared_experts, block._moe_quant_once = NoExperts(), False
        load(block.experts, tensors_of(blocks))
        gate = torch.randn((64, 256), generator=rng).mul_(0.1).bfloat16()
        block.gate.weight.data.copy_(gate)
        scores = torch.nn.functional.softplus(x.double() @ gate.double().T).sqrt()
        if layer_id == 0:
            assert isinstance(block.topk, HashTopK)
            ids = block.topk.tid2eid[tokens].long()
            weights = scores.gather(1, ids)
            weights = weights / weights.sum(1, keepdim=True)
        else:
            bias = torch.arange(64).flip(0) * 0.5
            block.gate.e_score_correction_bias.data.copy_(bias)
            weights, ids = true_topk(scores, scores + bias, 6)
        with torch.no_grad():
            result = block.forward(x.clone(), input_ids=tokens, input_ids_global=tokens)
    # Where there is no CUDA, SGLang's module multiplies by the factor once more.
    error = (result.double() - expected(blocks, x, weights, ids, factor=1.5**2)).norm(dim=1)
    # The router's logits are bf16.
    assert (error / result.double().norm(dim=1)).max() < 0.02


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
    """The second of two, also when no token has one of its experts. Before 0.5.23 the second backend leaves ids of all
    ranks' experts."""
    half = SMALL.experts // 2
    blocks, (x, topk) = drawn(SMALL, "cpu", rng), given(SMALL, 9, "cpu", rng)
    weights, ids = topk.topk_weights, topk.topk_ids
    ids = ids % half if pattern == "none" else ids
    with server(backend, **rank(1, "moe_ep")):
        module = layer_of(blocks)
        assert module.quant_method.weights.num_experts == half
        stay = getattr(module.dispatcher, "skip_local_expert_mapping", False)
        assert stay == (backend == "flashinfer_mxfp4" and not capabilities.layer_decides())
        # As the dispatcher makes them, which needs a GPU.
        local = ids if stay else torch.where(ids >= half, ids - half, -1).int()
        dispatched = StandardDispatchOutput(x, None, StandardTopKOutput(weights, local, None))
        result = module.quant_method.apply(module, dispatched).hidden_states
    close(result, expected(blocks, x, weights, torch.where(ids >= half, ids, -1)))
    assert pattern != "none" or not result.any()


@pytest.mark.usefixtures("poisoned")
def test_behind_an_all_to_all(rng: torch.Generator) -> None:
    """DeepEP's tokens in both modes: the bits of `moe`."""
    shape = SMALL.with_options(limit=10.0)
    blocks = drawn(shape, "cpu", rng)
    with server():
        module = layer_of(blocks)
    topk = routed(shape, 11, "cpu", rng, "holes")
    with server(a2a="deepep"):
        check_dispatched(
            lambda dispatched: module.quant_method.apply(module, dispatched),
            blocks.weights(),
            lambda *operands: torch.empty(0),  # of GPUs
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
    """On a CPU weights only count as packed."""
    if device == "cpu":
        names = {"w13_weight", "w2_weight", *SCALES}
        monkeypatch.setattr(loading, "packed_parameters", lambda layer, weights: names)
        monkeypatch.setattr(loading, "is_derived", lambda layer, weights: True)


@pytest.mark.usefixtures("packed")
def test_updates(device: str, rng: torch.Generator) -> None:
    """Right by SGLang's loader, with all addresses; refused where nothing is processed, or a part alone is written."""
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
    """--enforce-shared-experts-fusion: SGLang quantises the fp8 shared expert, and adds it as one more."""
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
    # MXFP4 of numbers of a normal distribution.
    assert 0.02 < (result.float() - truth).norm() / truth.norm() < 0.35


# What comes to us, and what is refused


def model_folder(folder: Path, dtype: str, **fields: Any) -> Path:
    """A config.json, and one tensor of an expert, of no bytes but with a header."""
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
    """By SGLang's own code, without a flag, from the files."""
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
    """OXMOE_SGLANG without the part that takes such experts."""
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
    """SGLang's own method for these experts, on the same checkpoint."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    shape = Shape("v4-marlin", 64, 6, 4096, 2048)
    blocks, (x, topk) = drawn(shape, "cuda", rng), given(shape, 33, "cuda", rng)
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
