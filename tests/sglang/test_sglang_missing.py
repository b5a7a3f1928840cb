"""A tensor that a checkpoint lacks ends the load with an error that names it, in every format and by every loader of
SGLang's; loads that are whole, partial updates, and layers into which nothing is loaded are legal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oxmoe.testing import same_bits

pytest.importorskip("sglang")

from sglang.srt.eplb import expert_location
from sglang.srt.layers.quantization import get_quantization_config

from drawn_checkpoints import (
    NAMES,
    PREFIX,
    Drawn,
    draw,
    on_a_cpu,  # noqa: F401 - a fixture that every test here uses
    routed,
)
from oxmoe.sglang import loading, updates
from sglang_server import NEW, FusedMoE, argument, installed, server
from test_sglang_fp8 import forward

# Formats whose kernels read the checkpoint's scales of activations.
READ = ("fp8 static", "ModelOpt fp8")
SHARDS = ("w1", "w3", "w2")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


def small(name: str, rng: torch.Generator, experts: int = 4, **options: Any) -> Drawn:
    return draw(name, rng, experts=experts, hidden=128, intermediate=256, **options)


def tokens(rng: torch.Generator) -> tuple[torch.Tensor, Any]:
    """Returns x, and the experts of each token."""
    return torch.randn((9, 128), generator=rng).bfloat16(), routed(9, 4, 2, rng)[2]


def result(made: Drawn, x: torch.Tensor, topk: Any) -> torch.Tensor:
    """Returns the output of a layer into which everything is loaded."""
    module = made.layer()
    made.load(module)
    return forward(module, x.clone(), topk)


def needed(made: Drawn) -> list[str]:
    """Returns the suffixes of tensors that a layer reads."""
    unread = {"weight_shape", "g_idx"} | (set() if made.name in READ else {"input_scale"})
    # Symmetric checkpoints of GPTQ have zero points, too.
    unread |= {"qzeros"} if made.name in ("int4 gptq", "int4 gptq-rows") else set()
    return [suffix for suffix in made.tensors if suffix not in unread]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "bf16"])
def test_a_suffix_that_is_missing(name: str, rng: torch.Generator) -> None:
    made = small(name, rng)
    for suffix in needed(made):
        with server():
            module = made.layer()
            of_w13 = rf"w13_{suffix} for experts 0 to 3 \(w1, w3\)"
            with pytest.raises(
                ValueError, match=rf"layer 0: the checkpoint has no {of_w13} and no w2_{suffix} for experts 0 to 3 \(w2"
            ):
                made.load(module, but=suffix)


@pytest.mark.parametrize("name", NAMES)
def test_a_single_tensor_that_is_missing(name: str, rng: torch.Generator) -> None:
    """The error names the parameter, the expert and its part. Loading that tensor makes the layer whole."""
    made = small(name, rng)
    x, topk = tokens(rng)
    with server():
        expected = result(made, x, topk)
        for suffix in needed(made):
            for shard in SHARDS:
                if name in READ and suffix == "input_scale" and shard != "w2":
                    continue  # gate and up have one place, which either fills
                expert, module = int(torch.randint(4, (), generator=rng)), made.layer()
                parameter = f"{'w2' if shard == 'w2' else 'w13'}_{suffix}"
                with pytest.raises(
                    ValueError, match=rf"no {parameter} for experts {expert} \({shard}\)(, or has NaN|\.)"
                ):
                    made.load(module, but=(suffix, shard, expert))
                made.write(module, suffix, shard, expert)
                module.quant_method.process_weights_after_loading(module)
                assert same_bits(forward(module, x.clone(), topk), expected)


@pytest.mark.parametrize("name", READ)
def test_either_scale_of_gate_and_up_is_enough(name: str, rng: torch.Generator) -> None:
    made = small(name, rng)
    with server():
        for shard in ("w1", "w3"):
            made.load(made.layer(), but=("input_scale", shard, 2))
        module = made.layer()
        entries = [entry for entry in made.entries() if entry[0] != "input_scale" or entry[1:] == ("w2", 2)]
        for entry in entries:
            made.write(module, *entry)
        lacking = r"no w13_input_scale for experts 0 to 3 \(w1, w3\) and no w2_input_scale for experts 0 to 1, 3 \(w2\)"
        with pytest.raises(ValueError, match=lacking):
            module.quant_method.process_weights_after_loading(module)


@pytest.mark.parametrize("name", ["bf16", "fp8", "MXFP8", "ModelOpt NVFP4"])
def test_experts_without_a_gate(name: str, rng: torch.Generator) -> None:
    made = small(name, rng, gated=False)
    with server():
        made.load(made.layer())
        with pytest.raises(ValueError, match=r"no w13_weight for experts 3 \(w1\)\."):
            made.load(made.layer(), but=("weight", "w1", 3))


def test_the_error_lists_experts_in_short() -> None:
    lacking = {expert: ("w1", "w3") for expert in range(3)} | {5: ("w3",), 6: ("w3",), 9: ("w3",)} | {11: ()}
    assert loading._listed(lacking) == "0 to 2 (w1, w3) and 5 to 6, 9 (w3) and 11"
    assert loading._listed({expert: ("w2",) for expert in range(0, 40, 2)}) == (
        "0, 2, 4, 6, 8, 10, 12, 14, ... (20 in all) (w2)"
    )


# Which experts a rank has


@pytest.mark.skipif(not NEW, reason="older releases' tests have one rank")
@pytest.mark.parametrize("name", ["bf16", "fp8 blocks", "MXFP8", "int4 zeros"])
def test_only_a_ranks_own_experts_count(name: str, rng: torch.Generator) -> None:
    """A rank reads a whole checkpoint. What other ranks' experts lack is theirs to tell, and the ranks that share an
    expert all tell it."""
    made = small(name, rng)
    suffix = next(iter(made.tensors))
    for number, tells in enumerate((False, False, True, True)):
        sizes = {"moe_tp_size": 2, "moe_ep_size": 2, "tp_size": 4, "attn_tp_size": 4}
        with server(**sizes, moe_tp_rank=number % 2, moe_ep_rank=number // 2, tp_rank=number):
            module = made.layer()
            if not tells:
                made.load(module, but=(suffix, "w3", 2))
                continue
            with pytest.raises(ValueError, match=rf"no w13_{suffix} for experts 2 \(w3\)"):
                made.load(module, but=(suffix, "w3", 2))


@contextmanager
def placed(experts: list[int]) -> Iterator[None]:
    """Sets up a load balancer that has put these experts of a checkpoint in a layer's places."""
    places = {expert: [place for place, own in enumerate(experts) if own == expert] for expert in experts}
    location = SimpleNamespace(
        num_logical_experts=len(places), logical_to_all_physical=lambda layer, expert, *_: list(places[expert])
    )
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(expert_location, "_global_expert_location_metadata"):
            patch.setattr(expert_location, "_global_expert_location_metadata", location)
        else:
            from sglang.srt.runtime_context import get_resources

            patch.setattr(get_resources(), "expert_location_metadata", location)
        yield


@pytest.mark.parametrize("name", ["bf16", "fp8 static", "MXFP8"])
def test_redundant_experts(name: str, rng: torch.Generator) -> None:
    """An expert of the checkpoint that has two places fills both, and is named once."""
    made = small(name, rng)
    with server(), placed([2, 0, 1, 3, 2, 0]):
        module = made.layer(num_experts=6)
        made.load(module)
        with pytest.raises(ValueError, match=r"no w2_weight for experts 2 \(w2\)\."):
            made.load(made.layer(num_experts=6), but=("weight", "w2", 2))
        assert updates.experts_of_checkpoint(module) == dict(enumerate([2, 0, 1, 3, 2, 0]))


@pytest.mark.parametrize("name", ["bf16", "fp8 blocks", "fp8 static", "MXFP8", "ModelOpt fp8", "ModelOpt NVFP4"])
def test_redundant_experts_that_a_draft_does_not_fill(name: str, rng: torch.Generator) -> None:
    """A draft's layers have rows for the server's redundant experts, and its experts lie in order. Tokens never go to
    those rows, and what they hold changes nothing."""
    made = small(name, rng)
    x, topk = tokens(rng)
    with server():
        expected = result(made, x, topk)
        with argument("exec.moe", "ep_num_redundant_experts", 2):
            module = made.layer(num_experts=6)
            made.load(module)
            assert same_bits(forward(module, x.clone(), topk), expected)
            with pytest.raises(ValueError, match=r"no w13_weight for experts 3 \(w1\)\."):
                made.load(made.layer(num_experts=6), but=("weight", "w1", 3))


def test_an_update_of_a_drafts_packed_layer(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is whole without the rows that no expert of the checkpoint fills. On a CPU weights only count as packed."""
    made, other = small("MXFP8", rng), small("MXFP8", rng)
    packed = {f"{name}_{suffix}" for name in ("w13", "w2") for suffix in made.tensors}
    monkeypatch.setattr(loading, "packed_parameters", lambda layer, weights: packed)
    monkeypatch.setattr(loading, "is_derived", lambda layer, weights: True)
    with server(), argument("exec.moe", "ep_num_redundant_experts", 2):
        module = made.layer(num_experts=6)
        made.load(module)
        for experts, whole in ((range(3), False), (range(4), True)):
            module.quant_method.restore_weights_before_loading(module)
            for entry in other.entries():
                if entry[2] in experts:
                    other.write(module, *entry)
            if whole:
                module.quant_method.process_weights_after_loading(module)
            else:
                with pytest.raises(RuntimeError, match=r"w13_weight 6 of 8, .* w2_weight 3 of 4, "):
                    module.quant_method.process_weights_after_loading(module)


@pytest.mark.parametrize("name", ["bf16", "MXFP8"])
def test_a_fused_shared_expert(name: str, rng: torch.Generator) -> None:
    made = small(name, rng, experts=5)
    with server():
        made.load(made.layer(num_fused_shared_experts=1))
        with pytest.raises(ValueError, match=r"no w2_weight for experts 4 \(w2\)\."):
            made.load(made.layer(num_fused_shared_experts=1), but=("weight", "w2", 4))


# Loaders of whole parameters


def gpt_oss(name: str) -> FusedMoE:
    kind: Any = get_quantization_config("oxmoe")
    fused = {"use_weight_loader_fused": True} if name == "bf16" else {}
    return FusedMoE(
        num_experts=4,
        hidden_size=128,
        intermediate_size=64,
        layer_id=0,
        top_k=2,
        params_dtype=torch.bfloat16,
        quant_config=kind() if name == "bf16" else kind.from_config({"quant_method": "mxfp4"}),
        prefix=PREFIX,
        with_bias=True,
        gemm1_alpha=1.702,
        gemm1_clamp_limit=7.0,
        **fused,
    )


def whole(name: str, rng: torch.Generator, scales_as: torch.dtype = torch.uint8) -> dict[str, torch.Tensor]:
    """Returns the tensors of a GPT-OSS checkpoint by parameter, each for all experts."""
    biases = {
        "w13_weight_bias": torch.randn((4, 128), generator=rng),
        "w2_weight_bias": torch.randn((4, 128), generator=rng),
    }
    if name == "bf16":
        sizes = {"w13_weight": (4, 128, 128), "w2_weight": (4, 128, 64)}
        made = {key: torch.randn(size, generator=rng) / 16 for key, size in sizes.items()}
        return {key: tensor.bfloat16() for key, tensor in (made | biases).items()}
    made = {}
    for key, rows, columns in (("w13", 128, 128), ("w2", 128, 64)):
        made[f"{key}_weight"] = torch.randint(0, 256, (4, rows, columns // 2), generator=rng, dtype=torch.uint8)
        scales = torch.randint(118, 122, (4, rows, columns // 32), generator=rng, dtype=torch.uint8)
        made[f"{key}_weight_scale"] = scales.view(scales_as)
    return made | {key: tensor.bfloat16() for key, tensor in biases.items()}


def load_whole(module: FusedMoE, tensors: dict[str, torch.Tensor], *, but: str = "") -> None:
    """Loads as SGLang's model of GPT-OSS does."""
    for name, tensor in tensors.items():
        if name != but:
            parameter = getattr(module, name)
            shard = name.partition("_")[0]
            if "bf16" in str(tensor.dtype) or not hasattr(module.quant_method, "hidden"):
                parameter.weight_loader(parameter, tensor, name, shard_id=shard)
            else:
                parameter.weight_loader(parameter, tensor, weight_name=name, shard_id=None, expert_id=None)
    module.quant_method.process_weights_after_loading(module)


@pytest.mark.parametrize("name", ["bf16", "MXFP4"])
def test_a_whole_parameter_that_is_missing(name: str, rng: torch.Generator) -> None:
    tensors = whole(name, rng)
    with server():
        load_whole(gpt_oss(name), tensors)
        for but in tensors:
            parts = "w1, w3" if but.startswith("w13") else "w2"
            with pytest.raises(ValueError, match=rf"no {but} for experts 0 to 3 \({re.escape(parts)}\)\."):
                load_whole(gpt_oss(name), tensors, but=but)


def test_scales_of_mxfp4_in_e8m0(rng: torch.Generator) -> None:
    """They are bytes in both dtypes. fp32 would be converted to other bytes."""
    (x, topk), tensors, results = tokens(rng), whole("MXFP4", rng), []
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        scales = {name: tensor.view(dtype) for name, tensor in tensors.items() if name.endswith("scale")}
        with server():
            module = gpt_oss("MXFP4")
            load_whole(module, tensors | scales)
            results.append(forward(module, x.clone(), topk))
    assert same_bits(*results)
    with (
        server(),
        pytest.raises(ValueError, match=r"has torch.float32 for w13_weight_scale of MXFP4 experts, w"),
    ):
        load_whole(gpt_oss("MXFP4"), tensors | {"w13_weight_scale": torch.ones(4, 128, 4)})


# Loads that stay legal


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_into_which_nothing_is_loaded(name: str, rng: torch.Generator) -> None:
    """--load-format dummy, sharded_state and others write parameters, or nothing at all."""
    made = small(name, rng)
    with server():
        module = made.layer()
        for key, parameter in module.named_parameters():
            if not key.endswith("g_idx"):
                parameter.data.view(torch.uint8).fill_(1)
        module.quant_method.process_weights_after_loading(module)


@pytest.mark.parametrize("name", ["bf16", "fp8 blocks", "fp8", "compressed channel"])
def test_a_partial_update_is_legal(name: str, rng: torch.Generator) -> None:
    """An update may write any part of a layer that is loaded, and SGLang may process every layer after it."""
    made, other = small(name, rng), small(name, rng)
    x, topk = tokens(rng)
    entries = [entry for entry in other.entries() if entry[1:] in (("w3", 1), ("w2", 2))]
    with server():
        module = made.layer()
        made.load(module)
        if hasattr(module.quant_method, "restore_weights_before_loading"):
            module.quant_method.restore_weights_before_loading(module)
        for entry in entries:
            other.write(module, *entry)
        module.quant_method.process_weights_after_loading(module)
        for suffix, shard, expert in entries:
            made.tensors[suffix][shard][expert] = other.tensors[suffix][shard][expert]
        assert same_bits(forward(module, x.clone(), topk), result(made, x, topk))
