"""Humming, Marlin and SGLang's Triton against stand-ins of their packages: the operands that they get, and that a layer
comes of it.

The stand-ins compute in plain torch what the real functions are defined to, on the layouts that those take. They refuse
operands that those do not take.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from oxmoe import __main__
from oxmoe.tools.bench import humming, layers, marlin, masked, sglang, timing
from oxmoe.tools.bench.humming import Humming
from oxmoe.tools.bench.marlin import Marlin
from oxmoe.tools.bench.sglang import SglangTriton

SHAPES = {
    "plain": layers.Shape(6, 2, 256, 128),
    "clamped": layers.Shape(6, 2, 128, 256, limit=0.5),
    "gpt": layers.Shape(5, 2, 128, 128, gpt_oss=True),
}


def e2m1(codes: Tensor) -> Tensor:
    """Returns fp32 numbers [..., K] of pairs of codes as bytes [..., K / 2]."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat((table, -table))
    return torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).flatten(-2)


def words_to_nibbles(words: Tensor) -> Tensor:
    """Returns fp32 [..., K] of int32 words [..., K / 8], the first number in the low bits."""
    return ((words[..., None] >> torch.arange(0, 32, 4)) & 15).flatten(-2).float()


def e8m0(scales: Tensor) -> Tensor:
    return torch.exp2(scales.view(torch.uint8).float() - 127)


# Humming


class Schema:
    """The schema of a checkpoint: its config, and the dequantised weights."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    from_config = classmethod(lambda cls, config: cls(config))

    def convert_humming(
        self,
        *,
        tensors: dict[str, Tensor],
        shape_n_stacks: list[int],
        shape_k_stacks: list[int],
        num_experts: int,
        param_dtype: torch.dtype,
    ) -> tuple[Schema, dict[str, Tensor]]:
        rows, (columns,) = sum(shape_n_stacks), shape_k_stacks
        assert param_dtype == torch.bfloat16
        kind = self.config.get("quant_algo", self.config["quant_method"])
        if kind == "compressed-tensors":
            words, scales = tensors["weight_packed"], tensors["weight_scale"].float()
            assert words.dtype == torch.int32 and words.shape == (num_experts, rows, columns // 8)
            zeros: Any = 8.0
            if not self.config["symmetric"]:
                packed = tensors["weight_zero_point"]
                assert packed.dtype == torch.int32 and packed.shape == (num_experts, rows // 8, scales.shape[2])
                zeros = words_to_nibbles(packed.transpose(1, 2).contiguous()).transpose(1, 2)
                zeros = zeros.repeat_interleave(self.config["group_size"], -1)
            weights = (words_to_nibbles(words) - zeros) * scales.repeat_interleave(self.config["group_size"], -1)
        elif kind == "mxfp8":
            weights = tensors["weight"].float() * e8m0(tensors["weight_scale"]).repeat_interleave(32, -1)
        else:
            block = {"mxfp4": 32, "nvfp4": 16}[kind]
            scales = tensors["weight_scale"]
            scales = scales.float() if kind == "nvfp4" else e8m0(scales)
            weights = e2m1(tensors["weight"]) * scales.repeat_interleave(block, -1)
            if kind == "nvfp4":
                weights = weights * tensors["weight_scale_2"][:, None, None]
        assert weights.shape == (num_experts, rows, columns)
        return self, {"weight": weights, **({"bias": tensors["bias"]} if "bias" in tensors else {})}


def c_expression(text: str, a: Tensor, b: Tensor) -> Tensor:
    """Returns the value of a line of C for the gate and up."""
    functions = {
        "fminf": lambda x, y: x.clamp(max=y),
        "fmaxf": lambda x, y: x.clamp(min=y),
        "__expf": torch.exp,
        "a": a,
        "b": b,
    }
    result: Tensor = eval(re.sub(r"(\d)f\b", r"\1", text), {"__builtins__": {}}, functions)
    return result


class HummingMethod:
    @staticmethod
    def prepare_layer_meta(
        *, layer: Any, shape_n: int, shape_k: int, has_bias: bool, sublayer_name: str, **options: Any
    ) -> None:
        assert options["torch_dtype"] == torch.bfloat16 and has_bias == hasattr(layer, f"{sublayer_name}_bias")
        metas = getattr(layer, "humming_metas", {})
        layer.humming_metas = metas | {sublayer_name: SimpleNamespace(b_dtype="uint4")}

    @staticmethod
    def transform_humming_layer(layer: Any, sublayer_name: str) -> None:
        assert sublayer_name in layer.humming_metas

    @staticmethod
    def may_process_input(
        layer: Any,
        inputs: Tensor,
        *,
        outputs: Tensor,
        sublayer_name: str,
        layout: str = "normal",
        scatter_idx: Tensor | None = None,
        expert_tokens: Tensor | None = None,
        activation_type: str = "none",
        activation_impl: str = "",
    ) -> tuple[Tensor, None, None]:
        if scatter_idx is not None:
            assert layout == "scatter" and scatter_idx.shape[0] == len(inputs)
            outputs[scatter_idx.flatten().long()] = inputs.repeat_interleave(scatter_idx.shape[1], 0)
            return outputs, None, None
        assert (layout == "grouped_mask") == (expert_tokens is not None)
        halves = inputs.float().chunk(2, -1)
        if activation_type == "binary_interleaved":
            halves = inputs.float()[..., 0::2], inputs.float()[..., 1::2]
        outputs.copy_(c_expression(activation_impl, *halves))
        return outputs, None, None

    @staticmethod
    def forward_layer(
        *,
        layer: Any,
        inputs: Tensor,
        outputs: Tensor,
        sublayer_name: str,
        compute_config: str,
        tuning_config: str,
        valid_shape_m: int,
        input_scale: None = None,
        sorted_ids: Tensor | None = None,
        expert_ids: Tensor | None = None,
        num_tokens_padded: Tensor | None = None,
        expert_layout: Tensor | None = None,
        top_k: int = 1,
    ) -> None:
        weights, bias = getattr(layer, f"{sublayer_name}_weight"), getattr(layer, f"{sublayer_name}_bias", None)
        block, kind = json.loads(tuning_config)["block_shape"][0], json.loads(compute_config)["gemm_type"]
        assert valid_shape_m > 0

        def product(rows: Tensor, expert: int) -> Tensor:
            sums = rows.float() @ weights[expert].t()
            return (sums if bias is None else sums + bias[expert].float()).to(outputs.dtype)

        if kind == "indexed":
            assert sorted_ids is not None and expert_ids is not None and num_tokens_padded is not None
            for place in range(0, int(num_tokens_padded), block):
                slots = sorted_ids[place : place + block]
                slots = slots[slots < len(outputs)].long()
                outputs[slots] = product(inputs[slots // top_k], int(expert_ids[place // block]))
        elif kind == "grouped_contiguous":
            assert expert_layout is not None
            for expert, (first, last) in enumerate(itertools.pairwise(expert_layout.tolist())):
                outputs[first:last] = product(inputs[first:last], expert)
        else:
            assert kind == "grouped_masked" and expert_layout is not None
            room = len(outputs) // len(expert_layout)
            for expert, count in enumerate(expert_layout.tolist()):
                rows = slice(expert * room, expert * room + count)
                outputs[rows] = product(inputs[rows], expert)


def aligned(slot_of_place: Tensor, offsets: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    ids, owners = [], []
    for expert in range(experts):
        slots = slot_of_place[int(offsets[expert]) : int(offsets[expert + 1])]
        for first in range(0, len(slots), block):
            part = slots[first : first + block]
            ids.append(torch.nn.functional.pad(part, (0, block - len(part)), value=slot_of_place.numel()))
            owners.append(expert)
    return torch.cat(ids), torch.tensor(owners), torch.tensor([len(owners) * block])


def weighted_sum(rows: Tensor, weights: Tensor, places: Tensor | None, out: Tensor) -> Tensor:
    rows = rows if places is None else rows[places.flatten().long()]
    return out.copy_((rows.view(*weights.shape, -1).float() * weights[..., None]).sum(1))


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    made = ModuleType(name)
    vars(made).update(members)
    monkeypatch.setitem(sys.modules, name, made)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in SHAPES.items():
        monkeypatch.setitem(layers.SHAPES, name, shape)
    monkeypatch.setitem(masked.LAYERS, "few", masked.Layer(4, 2, 2, 256, 128))
    monkeypatch.setattr(masked, "FILL_ROOM", 30)
    monkeypatch.setattr(masked, "ROOM", 9)
    monkeypatch.setattr(timing, "wall_time_us", lambda call: (call(), 1.0)[1])


@pytest.fixture
def humming_stand_in(monkeypatch: pytest.MonkeyPatch, stand_in: None) -> list[str]:
    """Returns the kinds of GEMMs that were compiled ahead."""
    compiled: list[str] = []
    heuristics = {"get_heuristics_config": lambda meta, shape_m, gemm_type: {"block_shape": [4, 64, 64]}}
    module(monkeypatch, "humming")
    module(monkeypatch, "humming.layer", HummingMethod=HummingMethod)
    module(monkeypatch, "humming.schema", BaseWeightSchema=Schema, HummingInputSchema=lambda **options: options)
    module(monkeypatch, "humming.config", GemmType=lambda name: name)
    module(monkeypatch, "humming.tune", **heuristics)
    kernels = SimpleNamespace(aligned=aligned, weighted_sum=weighted_sum)
    monkeypatch.setitem(sys.modules, "oxmoe.tools.bench.humming_kernels", kernels)
    import oxmoe.tools.bench as package

    monkeypatch.setattr(package, "humming_kernels", kernels, raising=False)
    monkeypatch.setattr(humming, "compile_kernels", lambda metas, gemms: compiled.extend(gemm for gemm, _ in gemms))
    monkeypatch.setattr(humming, "prepare_environment", lambda: None)
    monkeypatch.setattr(humming, "MANY", 9)
    times = iter(float(10 - index % 7) for index in range(10_000))
    monkeypatch.setattr(humming, "graph_time_us", lambda calls, replays, warmups: (calls[0](), next(times))[1])
    monkeypatch.setattr(humming, "missing", lambda device: None)
    monkeypatch.setattr(humming, "release", lambda: "0.1.20")
    return compiled


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_humming_beside_the_routed_layer(
    humming_stand_in: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ["bench", "--shapes", ",".join(SHAPES), "--tokens", "1,5,9", "--peers", "humming", "--device", "cpu"]
    formats = "mxfp4,nvfp4,int4,int4-zeros,mxfp8,bf16"
    assert __main__.main([*arguments, "--format", formats, "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "skipped humming: has no bf16 weights" in said and "computes something else" not in said
    assert "failed" not in said and "does not start" not in said
    peers = [row for row in rows_of(path) if row["backend"] == "humming"]
    assert len(peers) == 5 * 3 * 3
    release = "humming-kernels 0.1.20: "
    ran = [(row["tokens"], row["detail"].split(",")[0]) for row in peers]
    assert {gemm for tokens, gemm in ran if tokens == 9} == {release + "indexed", release + "contiguous"}
    assert {gemm for tokens, gemm in ran if tokens < 9} == {release + "indexed"}
    assert set(humming_stand_in) == {"indexed", "contiguous"} and all("as uint4" in row["detail"] for row in peers)


def test_humming_that_computes_something_else(
    humming_stand_in: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(humming, "packed_zeros", lambda zeros: torch.zeros_like(zeros[:, ::8], dtype=torch.int32))
    arguments = ["bench", "--shapes", "plain", "--tokens", "5", "--peers", "humming", "--device", "cpu"]
    assert __main__.main([*arguments, "--format", "int4-zeros"]) == 0
    assert "skipped humming at plain int4-zeros uniform M=5: computes something else" in capsys.readouterr().out


def test_humming_in_expert_order(
    humming_stand_in: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ["bench", "--layout", "masked", "--shapes", "few", "--fill", "10,100", "--tokens", "5"]
    arguments += ["--format", "mxfp4,nvfp4,int4,int4-zeros,mxfp8,bf16", "--device", "cpu", "--peers", "humming"]
    assert __main__.main([*arguments, "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "computes something else" not in said and "failed" not in said and "has no bf16 weights" in said
    peers = [row["detail"] for row in rows_of(path) if row["backend"] == "humming"]
    assert peers == ["humming-kernels 0.1.20"] * 5 * 3
    assert set(humming_stand_in) == {"masked"}


def test_zero_points_in_words(rng: torch.Generator) -> None:
    zeros = torch.randint(16, (3, 16, 5), dtype=torch.uint8, generator=rng)
    words = humming.packed_zeros(zeros)
    assert words.shape == (3, 2, 5) and words.dtype == torch.int32
    for row in range(16):
        assert torch.equal((words[:, row // 8] >> 4 * (row % 8)) & 15, zeros[:, row].int())


def test_variants_of_a_layer() -> None:
    """The variants are SGLang's padding, and a narrower one only if SGLang's pads and the narrower one does not."""
    names = [str(variant) for variant in humming.variants(layers.Shape(32, 4, 2880, 2880), 4096)]
    assert names[0] == "indexed, weights padded to 256 x 128" and names[-1].startswith("contiguous")
    assert [str(each) for each in humming.variants(layers.SHAPES["kimi-k2-tp8"], 64)] == names[:1]
    assert len(humming.variants(layers.Shape(8, 2, 256, 192), 1)) == 2


def test_the_triton_kernels_around_humming(tmp_path: Path) -> None:
    """The real kernels run in Triton's interpreter: slots of experts in blocks, and a weighted sum."""
    pytest.importorskip("triton")
    code = """
import torch
from oxmoe.tools.bench import humming_kernels as kernels
torch.manual_seed(int(__import__("sys").argv[1]))
for experts, tokens, top_k, block in ((5, 7, 2, 4), (3, 1, 3, 8), (6, 40, 2, 16), (4, 9, 1, 48)):
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).flatten()
    order = ids.argsort(stable=True).int()
    counts = torch.bincount(ids, minlength=experts)
    offsets = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    sorted_ids, owners, padded = kernels.aligned(order, offsets, experts, block)
    blocks = (counts + block - 1) // block
    assert int(padded) == int(blocks.sum()) * block
    assert owners[: int(blocks.sum())].tolist() == torch.repeat_interleave(torch.arange(experts), blocks).tolist()
    for expert in range(experts):
        first = int(blocks[:expert].sum()) * block
        mine = sorted_ids[first : first + int(blocks[expert]) * block].tolist()
        slots = order[int(offsets[expert]) : int(offsets[expert + 1])].tolist()
        assert mine == slots + [len(ids)] * (len(mine) - len(slots))
    rows, weights = torch.randn(tokens * top_k, 1100), torch.rand(tokens, top_k)
    places = torch.randperm(tokens * top_k).int()
    out = torch.full((tokens, 1100), float("nan"))
    for given, picked in ((None, rows), (places, rows[places.long()])):
        kernels.weighted_sum(rows, weights, given, out)
        expected = (picked.view(tokens, top_k, -1) * weights[..., None]).sum(1)
        torch.testing.assert_close(out, expected)
print("fine")
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(torch.initial_seed() % 1000)],
        env={**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0 and "fine" in run.stdout, run.stderr[-2000:]


def test_the_triton_kernels_around_humming_compile_for_hopper(tmp_path: Path) -> None:
    """Triton's compiler refuses what its interpreter runs, such as annotations of other types than tl.constexpr."""
    pytest.importorskip("triton")
    code = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from oxmoe.tools.bench import humming_kernels as kernels
pointers = dict.fromkeys(("slot_of_place", "offsets", "sorted_ids", "expert_ids", "padded"), "*i32")
align = pointers | {"slots": "i32", "experts": "i32"}
total = {"rows": "*bf16", "weights": "*fp32", "places": "*i32", "out": "*bf16"}
for kernel, types, numbers in (
    (kernels._align, align, {"BLOCK": 16, "BLOCK2": 16, "EXPERTS2": 512}),
    (kernels._sum, total, {"TOP_K": 8, "SIZE": 7168, "PLACED": True, "BLOCK": 1024}),
    (kernels._sum, total, {"TOP_K": 8, "SIZE": 7168, "PLACED": False, "BLOCK": 1024}),
):
    source = ASTSource(kernel, types | dict.fromkeys(numbers, "constexpr"), numbers)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
print("fine")
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0 and "fine" in run.stdout, run.stderr[-2000:]


# Marlin and SGLang's Triton


def split_halves(tensor: Tensor) -> Tensor:
    """Returns interleaved rows as SGLang's deinterleave_moe_mxfp4_w13_for_marlin orders them."""
    return torch.cat((tensor[:, 0::2], tensor[:, 1::2]), 1)


def deinterleave(layer: Any) -> None:
    for name in ("w13_weight", "w13_weight_scale", "w13_weight_bias"):
        getattr(layer, name).data = split_halves(getattr(layer, name).data)


def prepare_mxfp4(layer: Any) -> None:
    for name in ("w13", "w2"):
        codes, scales = getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data
        assert codes.dtype == torch.int8 and scales.dtype == torch.uint8
        # The method has padded hidden sizes to what Marlin's tiles divide.
        assert (2 * codes.shape[2] if name == "w13" else codes.shape[1]) % 256 == 0
        numbers = e2m1(codes.view(torch.uint8)) * e8m0(scales).repeat_interleave(32, -1)
        setattr(layer, f"{name}_weight", marlin.parameter(numbers))


def prepare_nvfp4(layer: Any) -> None:
    assert layer.quant_config.group_size == 16 and layer.params_dtype == torch.bfloat16
    assert layer.moe_runner_config.is_gated and layer.intermediate_size_per_partition * 2 == len(layer.w13_weight[0])
    for name in ("w13", "w2"):
        codes, scales = getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data
        numbers = e2m1(codes) * scales.float().repeat_interleave(16, -1)
        setattr(layer, f"{name}_weight", marlin.parameter(numbers))
        assert getattr(layer, f"{name}_weight_scale_2").shape == (len(codes),)


def repack(words: Tensor, perm: Tensor, size_k: int, size_n: int, num_bits: int) -> Tensor:
    assert words.shape == (len(perm), size_k // 8, size_n) and words.dtype == torch.int32 and num_bits == 4
    return words


def permute_scales(scales: Tensor, size_k: int, size_n: int, group_size: int) -> Tensor:
    assert scales.shape[1:] == (size_k // group_size, size_n) and scales.is_contiguous()
    return scales


def fused_marlin_moe(
    *,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    w1_scale: Tensor,
    w2_scale: Tensor,
    gating_output: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    workspace: Tensor,
    num_bits: int,
    inplace: bool,
    clamp_limit: float | None,
    gemm1_alpha: float | None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    w1_global_scale: Tensor | None = None,
    w2_global_scale: Tensor | None = None,
    **indices: Tensor,
) -> Tensor:
    assert num_bits == 4 and not inplace and len(gating_output) == len(hidden_states) and workspace.dtype == torch.int32
    assert hidden_states.dtype == torch.bfloat16 and all(index.shape[1] == 0 for index in indices.values())

    def matrix(weights: Tensor, scales: Tensor, factor: Tensor | None) -> Tensor:
        if weights.dtype == torch.int32:
            numbers = words_to_nibbles(weights.transpose(1, 2).contiguous()) - 8
            return numbers * scales.transpose(1, 2).float().repeat_interleave(numbers.shape[2] // scales.shape[1], -1)
        return weights if factor is None else weights * factor[:, None, None]

    first, second = matrix(w1, w1_scale, w1_global_scale), matrix(w2, w2_scale, w2_global_scale)
    total = torch.zeros(hidden_states.shape)
    for token, slot in torch.cartesian_prod(*(torch.arange(size) for size in topk_ids.shape)).tolist():
        expert = int(topk_ids[token, slot])
        sums = first[expert] @ hidden_states[token].float()
        gate, up = (sums if w1_bias is None else sums + w1_bias[expert].float()).chunk(2)
        if clamp_limit is not None:
            gate, up = gate.clamp(max=clamp_limit), up.clamp(-clamp_limit, clamp_limit)
        alpha = 1.0 if gemm1_alpha is None else gemm1_alpha
        hidden = gate * torch.sigmoid(alpha * gate) * (up if gemm1_alpha is None else up + 1)
        rows = second[expert] @ hidden
        total[token] += topk_weights[token, slot] * (rows if w2_bias is None else rows + w2_bias[expert].float())
    return total.bfloat16()


@pytest.fixture
def marlin_stand_in(monkeypatch: pytest.MonkeyPatch, stand_in: None) -> list[tuple[Any, ...]]:
    """Returns the modules of GEMMs that were compiled ahead."""
    compiled: list[tuple[Any, ...]] = []
    quantization = "sglang.srt.layers.quantization"
    module(
        monkeypatch,
        "sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe",
        fused_marlin_moe=fused_marlin_moe,
    )
    module(
        monkeypatch,
        f"{quantization}.marlin_utils",
        check_moe_marlin_supports_layer=lambda layer, group, allow_tile_padding: layer.hidden_size != 64,
        marlin_make_workspace=lambda device, max_blocks_per_sm: torch.zeros(max_blocks_per_sm, dtype=torch.int32),
        marlin_moe_permute_scales=permute_scales,
        marlin_permute_bias=lambda bias: bias,
    )
    module(
        monkeypatch,
        f"{quantization}.marlin_utils_fp4",
        deinterleave_moe_mxfp4_w13_for_marlin=deinterleave,
        prepare_moe_mxfp4_layer_for_marlin=prepare_mxfp4,
        prepare_moe_nvfp4_layer_for_marlin=prepare_nvfp4,
    )
    package = SimpleNamespace(marlin_utils_fp4=sys.modules[f"{quantization}.marlin_utils_fp4"])
    monkeypatch.setitem(sys.modules, quantization, package)
    module(
        monkeypatch,
        "sglang.srt.hardware_backend.gpu.quantization.gptq_kernels",
        gptq_marlin_moe_repack=repack,
    )
    module(
        monkeypatch,
        "sglang.kernels.ops.moe.moe_wna16_marlin",
        _jit_moe_wna16_marlin_module=lambda *arguments: compiled.append(arguments),
    )
    monkeypatch.setattr(sglang, "prepare", lambda: None)
    monkeypatch.setattr(sglang, "router", lambda top_k: lambda inputs: layers.choose(inputs, top_k))
    monkeypatch.setattr(sglang, "missing", lambda device, versions: None)
    return compiled


def test_marlin_beside_the_routed_layer(
    marlin_stand_in: list[tuple[Any, ...]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(layers.SHAPES, "odd", layers.Shape(4, 2, 64, 128))
    path = tmp_path / "rows.jsonl"
    arguments = ["bench", "--shapes", "plain,clamped,gpt", "--tokens", "1,5", "--peers", "marlin", "--device", "cpu"]
    assert __main__.main([*arguments, "--format", "mxfp4,nvfp4,int4,int4-zeros", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "skipped marlin: has no int4-zeros weights" in said
    assert "computes something else" not in said and "failed" not in said and "does not start" not in said
    assert len([row for row in rows_of(path) if row["backend"] == "marlin"]) == 3 * 3 * 2
    # The modules are those of both GEMMs, with and without biases.
    assert {(kind[2], kind[4]) for kind in marlin_stand_in} == {(bias, zero) for bias in (0, 1) for zero in (0, 1)}
    assert __main__.main(["bench", "--shapes", "odd", *arguments[3:], "--format", "int4"]) == 0
    assert "NotImplementedError: SGLang refuses hidden size 64 with 128 a rank" in capsys.readouterr().out


@pytest.mark.parametrize("format_name", ["bf16", "int4", "fp8_block", "fp8_tensor-token", "fp8_tensor-static"])
def test_formats_whose_activations_sglang_rounds(format_name: str) -> None:
    (weights,) = layers.weights_of(format_name, layers.Shape(3, 2, 256, 128), "cpu", 1)
    assert sglang.rounds_activations(weights) == format_name.startswith("fp8")


@pytest.mark.parametrize("format_name", ["int4", "int4-zeros"])
def test_int4_that_sglang_is_handed(format_name: str) -> None:
    """Scales of groups stay as they are, and zero points come two rows a byte."""
    (weights,) = layers.weights_of(format_name, layers.Shape(3, 2, 256, 128), "cpu", 1)
    options = SglangTriton._scales(weights)
    group = 32 if format_name == "int4" else 128
    assert (
        options["use_int4_w4a16"]
        and options["block_shape"] == [0, group]
        and options["w1_scale"].shape == (3, 256, 256 // group)
    )
    if format_name == "int4":
        assert "w1_zp" not in options
        return
    for name, matrix in (("w1_zp", weights.w13), ("w2_zp", weights.w2)):
        packed = options[name]
        assert packed.shape == (3, matrix.zeros.shape[1] // 2, matrix.zeros.shape[2]) and packed.dtype == torch.uint8
        assert torch.equal(packed[:, 3] & 15, matrix.zeros[:, 6]) and torch.equal(packed[:, 3] >> 4, matrix.zeros[:, 7])


@pytest.mark.parametrize("peer", [Humming, Marlin, SglangTriton])
def test_packages_that_are_missing_are_named(peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert peer.missing("cpu") == "needs a GPU"
    for owner in (humming, sglang):
        monkeypatch.setattr(owner, "find_spec", lambda name: None)
    assert "not installed" in peer.missing("cuda")
    for owner in (humming, sglang):
        monkeypatch.setattr(owner, "find_spec", lambda name: object())
    monkeypatch.setattr(humming, "version", lambda name: "0.1.0")
    module(monkeypatch, "sglang", __version__="0.4.0")
    assert "is written for" in peer.missing("cuda") and re.search(r"found 0\.[14]\.0", peer.missing("cuda"))


@pytest.mark.parametrize("release", humming.VERSIONS)
def test_every_release_of_humming_that_was_read_runs(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(humming, "find_spec", lambda name: object())
    monkeypatch.setattr(humming, "version", lambda name: release)
    assert humming.missing("cuda") is None
