"""SGLang's routers of DeepSeek-V4, and the MoE blocks of its model, with the MXFP4 experts on oxmoe."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from oxmoe.sglang import layers, setting

pytest.importorskip("sglang")

from sglang.srt.layers.moe import topk as sglang_topk
from sglang.srt.layers.moe.hash_topk import HashTopK
from sglang.srt.layers.moe.topk import TopK, TopKOutputFormat
from sglang.srt.model_loader.loader import DefaultModelLoader

from cases import Shape, make_x
from check_command import in_folder, moe
from deepseek_v4_cases import CHECKPOINT, close, config, drawn, expected, layer_of, tensors_of
from sglang_cpu.checkpoints import LAYERS, make
from sglang_server import ADAPTER, VERSION, installed, only_cores, server
from test_sglang_fp8 import forward


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Looks at layers as a server with oxmoe does: so a layer knows its block, and what that does with the result."""
    monkeypatch.setenv(setting.SETTING, "moe")
    layers.watch(setting.read(VERSION), ADAPTER, lambda: None)
    yield
    layers.unwatch()


# Older releases have this score in another function.
IN_TORCH = "sqrtsoftplus" in inspect.getsource(sglang_topk.fused_topk_torch_native)


@pytest.fixture
def in_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes routers use torch on a CPU: their kernels need a GPU."""
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cuda":
        return
    for name in ("SGLANG_OPT_USE_FUSED_HASH_TOPK", "SGLANG_OPT_USE_JIT_KERNEL_FUSED_TOPK"):
        monkeypatch.setenv(name, "0")


def true_topk(scores: Tensor, choice: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    ids = choice.topk(top_k, dim=1).indices
    weights = scores.gather(1, ids)
    return weights / weights.sum(1, keepdim=True), ids


@pytest.mark.parametrize("experts", [256, 384])
@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("hashed", [False, True], ids=["top-k", "hash"])
@pytest.mark.usefixtures("in_torch")
def test_routers(device: str, hashed: bool, tokens: int, experts: int, rng: torch.Generator) -> None:
    """The routers are SGLang's: sqrt(softplus) with a bias for the choice, and the first layers' table of token ids."""
    shape = Shape("v4-routed", experts, 6, 128, 64)
    blocks, x = drawn(shape, device, rng), make_x(tokens, shape, torch.bfloat16, device, rng)
    logits, bias = (torch.randn(size, generator=rng).to(device) for size in ((tokens, experts), (experts,)))
    scores = torch.nn.functional.softplus(logits.double()).sqrt()
    with server():
        module = layer_of(blocks)
        if hashed:
            fused = (
                {}
                if "num_fused_shared_experts" not in HashTopK.__init__.__code__.co_varnames
                else {"num_fused_shared_experts": 0}
            )
            with torch.device(device):
                router = HashTopK(6, experts, vocab_size=512, **fused)
            with torch.no_grad():
                router.tid2eid.copy_(torch.rand((512, experts), generator=rng).topk(6).indices)
            tokens_of = torch.randint(512, (tokens,), generator=rng).to(device)
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
                # In a server a layer's experts name the format.
                output_format=TopKOutputFormat.STANDARD,
            )
            with torch.compiler.set_stance("force_eager"):
                on_a_cpu = router.forward_native if IN_TORCH else router.forward_cpu
                topk = (on_a_cpu if device == "cpu" else router.forward_cuda)(x, logits)
            weights, ids = true_topk(scores, scores + bias, 6)
        close(forward(module, x, topk), expected(blocks, x, weights, ids))


class NoExperts(torch.nn.Module):
    """Stands for the shared experts, whose fp8 linear layers need a GPU."""

    gate_up_proj = SimpleNamespace(weight=torch.empty(0), quant_method=None)

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        return torch.zeros_like(x)


def model_of(layer_ids: tuple[int, ...], shape: Shape) -> Any:
    """Returns SGLang's class of the model with these layers' MoE blocks alone: its attention needs a GPU."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE
    from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM

    of_model = SimpleNamespace(
        n_routed_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        n_shared_experts=None,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
        scoring_func="sqrtsoftplus",
        swiglu_limit=10.0,
        n_group=8,
        topk_group=8,
        topk_method="noaux_tc",
        hidden_act="silu",
        num_hash_layers=3,
        num_hidden_layers=4,
        vocab_size=512,
        model_type="deepseek_v4",
        quantization_config=CHECKPOINT,
    )

    class Blocks(DeepseekV4ForCausalLM):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.config, self.quant_config, self.vision, self.wo_a_fp8 = of_model, config(), None, True
            self.num_fused_shared_experts = 0
            self.pp_group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
            self.model = torch.nn.Module()
            self.model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(4))
            for number in layer_ids:
                self.model.layers[number].mlp = DeepseekV2MoE(
                    of_model,
                    number,
                    quant_config=self.quant_config,
                    prefix=f"model.layers.{number}.mlp",
                    is_deepseek_v4=True,
                )

        def post_load_weights(self, **given: Any) -> None:
            """Does nothing: SGLang's method is for the attention."""

        _prewarm_mhc_kernels = post_load_weights

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Blocks()
    finally:
        torch.set_default_dtype(default)


def checkpoint_of(number: int, blocks: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields a layer's tensors of experts by the names that DeepSeek's files have."""
    for suffix, tensor in zip(("weight", "scale"), tensors_of(blocks).values(), strict=True):
        for expert in range(blocks.shape.experts):
            for shard in ("w1", "w2", "w3"):
                yield f"layers.{number}.ffn.experts.{expert}.{shard}.{suffix}", tensor(expert, shard)


@only_cores
@pytest.mark.usefixtures("in_torch", "watched")
def test_the_models_moe_blocks(rng: torch.Generator) -> None:
    """SGLang's model loads a checkpoint, then runs gate, router (a table of ids in layer 0), dispatcher and experts."""
    shape = Shape("v4-block", 64, 6, 256, 64)
    x, tokens = make_x(11, shape, torch.bfloat16, "cpu", rng), torch.randint(512, (11,), generator=rng)
    table = torch.rand((512, 64), generator=rng).topk(6).indices.int()
    gates = {number: torch.randn((64, 256), generator=rng).mul_(0.1).bfloat16() for number in (0, 3)}
    # The model's logits are rounded to bf16. Biases are drawn until the chosen experts stand out from the others.
    scores = torch.nn.functional.softplus(x.double() @ gates[3].double().T).sqrt()
    gap = 0.0
    while gap < 0.05:
        bias = torch.randperm(64, generator=rng) * 0.5
        best = (scores + bias).topk(7, dim=1).values
        gap = float((best[:, 5] - best[:, 6]).min())
    experts = {number: drawn(shape, "cpu", rng) for number in (0, 3)}
    with server():
        model = model_of((0, 3), shape)
        given = [(f"layers.{number}.ffn.gate.weight", gate) for number, gate in gates.items()]
        given += [("layers.0.ffn.gate.tid2eid", table), ("layers.3.ffn.gate.bias", bias)]
        given += [tensor for number, blocks in experts.items() for tensor in checkpoint_of(number, blocks)]
        DefaultModelLoader.load_weights_and_postprocess(model, iter(given), torch.device("cpu"))
        for number, blocks in experts.items():
            block = model.model.layers[number].mlp
            block.shared_experts, block._moe_quant_once = NoExperts(), False
            scores = torch.nn.functional.softplus(x.double() @ gates[number].double().T).sqrt()
            if number == 0:
                assert isinstance(block.topk, HashTopK)
                ids = table[tokens].long()
                weights = scores.gather(1, ids)
                weights = weights / weights.sum(1, keepdim=True)
            else:
                weights, ids = true_topk(scores, scores + bias, 6)
            with torch.no_grad():
                result = block.forward(x.clone(), input_ids=tokens, input_ids_global=tokens)
            # Without CUDA, SGLang's block multiplies by the factor, so the layer does not. Its logits are bf16.
            error = (result.double() - expected(blocks, x, weights, ids, factor=1.5)).norm(dim=1)
            assert (error / result.double().norm(dim=1)).max() < 0.02


@only_cores
def test_the_written_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SGLang and `python -m oxmoe check` find MXFP4 experts in it, and SGLang knows all names beside the attention."""
    from safetensors import safe_open
    from sglang.srt.configs.deepseek_v4 import try_detect_fp4_experts
    from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM

    folder = make(tmp_path / "model", "deepseek-v4", 5)
    assert try_detect_fp4_experts(str(folder)) is True
    capsys.readouterr()
    (kind,) = moe(in_folder(folder, capsys))
    assert (kind["count"], kind["format"]) == (LAYERS, "MXFP4 in an fp8 checkpoint")
    with server():
        known = {name for name, _ in model_of((0, 1), Shape("v4-written", 8, 2, 256, 128)).named_parameters()}
    with safe_open(folder / "layer0.safetensors", "pt") as file:
        names = {DeepseekV4ForCausalLM.remap_weight_name_to_dpsk_hf_format(name) for name in file.keys()}
    for name in names:
        if ".experts." not in name and ".shared_experts." not in name and ".mlp." in name:
            assert name in known
