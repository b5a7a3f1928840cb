"""Weight updates of SGLang's layers on oxmoe: each is right, or is refused before anything of the layer is written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sglang")

from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.model_loader.loader import DefaultModelLoader

from cases import make_routing
from mxfp8_cases import make_mxfp8
from oxmoe.sglang import capabilities, layers, loading, updates
from oxmoe.testing import same_bits
from sglang_server import SHAPE as BF16_SHAPE
from sglang_server import FusedMoE, fused_moe, installed, server
from sglang_server import operands as bf16_operands
from test_sglang_compressed import MODES, SHAPE, drawn, empty_layer, fp8_tensors, load
from test_sglang_fp8 import MXFP8, forward, fp8_layer

only_announced = pytest.mark.skipif(not capabilities.announces_updates(), reason="this SGLang announces no updates")
ONE_SCALE = ("tensor", "static", "fp8", "fp8-static")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


def write(module: FusedMoE, tensors: dict[str, Any], experts: range | None = None) -> None:
    """Writes by SGLang's own loader, as a model's load_weights does; nothing is processed."""
    for expert in experts or range(module.num_experts):
        for suffix, tensor in tensors.items():
            for shard in ("w1", "w3", "w2"):
                parameter = getattr(module, f"{'w2' if shard == 'w2' else 'w13'}_{suffix}")
                name = f"experts.{expert}.{shard}.{suffix}"
                parameter.weight_loader(parameter, tensor(expert, shard), name, shard_id=shard, expert_id=expert)


def bits(module: FusedMoE) -> list[Tensor]:
    return [parameter.data.clone() for parameter in module.parameters(recurse=False)]


def without_input_scales(name: str, rng: torch.Generator, device: str = "cpu") -> dict[str, Any]:
    """Returns tensors without input scales: SGLang's loader refuses other ones than those that are there, so these
    stay."""
    tensors = fp8_tensors(drawn(name, device, rng), MODES[name][1])
    tensors.pop("input_scale", None)
    return tensors


def given(device: str, rng: torch.Generator) -> tuple[Tensor, StandardTopKOutput]:
    x = torch.randn((9, SHAPE.hidden), generator=rng).bfloat16().to(device)
    weights, ids = make_routing("uniform", 9, SHAPE.experts, SHAPE.top_k, rng)
    return x, StandardTopKOutput(weights.to(device), ids.to(device), None)


class Model(nn.Module):
    """One MoE layer, whose load_weights writes this checkpoint, in threads as some models' do."""

    def __init__(self, experts: FusedMoE, *, threads: bool = False) -> None:
        super().__init__()
        self.experts, self.threads = experts, threads

    def load_weights(self, weights: Any) -> None:
        if not self.threads:
            return write(self.experts, dict(weights))
        with ThreadPoolExecutor(2) as pool:
            pool.submit(write, self.experts, dict(weights)).result()


@pytest.mark.parametrize("name", ONE_SCALE)
def test_an_update_that_is_not_processed_is_refused(name: str, rng: torch.Generator) -> None:
    """These are update_weights_from_tensor and _from_distributed without begin_weight_update, as all are in older
    releases."""
    config, mode = MODES[name]
    first, x_and_topk = drawn(name, "cpu", rng), given("cpu", rng)
    with server():
        module = empty_layer(SHAPE, config, "cpu")
        load(module, fp8_tensors(first, mode))
        before, result = bits(module), forward(module, *x_and_topk)
        with pytest.raises(RuntimeError, match=r"layer 0: .* experts were prepared at load.*begin_weight_update"):
            write(module, without_input_scales(name, rng))
        assert all(same_bits(*pair) for pair in zip(bits(module), before, strict=True))
        assert same_bits(forward(module, *x_and_topk), result)


@pytest.mark.parametrize("threads", [False, True], ids=["one-thread", "threads"])
@pytest.mark.parametrize("name", ONE_SCALE)
def test_an_update_by_sglangs_loader_is_right(name: str, threads: bool, rng: torch.Generator) -> None:
    """This is update_weights_from_disk."""
    config, mode = MODES[name]
    x_and_topk = given("cpu", rng)
    tensors = fp8_tensors(drawn(name, "cpu", rng), mode)
    second = tensors | without_input_scales(name, rng)
    with server():
        module, fresh = (empty_layer(SHAPE, config, "cpu") for _ in range(2))
        load(module, tensors)
        forward(module, *x_and_topk)
        changed = {suffix: tensor for suffix, tensor in second.items() if suffix != "input_scale"}
        model = Model(module, threads=threads)
        DefaultModelLoader.load_weights_and_postprocess(model, list(changed.items()), torch.device("cpu"))
        load(fresh, second)
        assert same_bits(forward(module, *x_and_topk), forward(fresh, *x_and_topk))
        with pytest.raises(RuntimeError, match="prepared at load"):
            write(module, without_input_scales(name, rng))


def test_who_processes_weights_is_known_by_name() -> None:
    """One of them is update_weights_from_ipc, whose checkpoint engine is not installed here."""
    source = "def {}(ask):\n    return ask()\n"
    for module, name, known in (
        ("sglang.srt.checkpoint_engine.checkpoint_engine_worker", "update_weights_from_ipc", True),
        ("sglang.srt.model_executor.model_runner", "update_weights_from_tensor", False),
        ("other", "update_weights_from_ipc", False),
    ):
        space: dict[str, Any] = {"__name__": module}
        exec(source.format(name), space)
        assert space[name](updates.post_processing_follows) is known


def test_those_functions_are_there_and_process_weights() -> None:
    from importlib.util import find_spec
    from pathlib import Path

    worker = find_spec("sglang.srt.checkpoint_engine.checkpoint_engine_worker")
    assert worker is not None and worker.origin is not None
    text = Path(worker.origin).read_text()
    assert f"def {updates.POST_PROCESS[1]}(" in text and "process_weights_after_loading(" in text
    assert hasattr(DefaultModelLoader, updates.POST_PROCESS[0])


@only_announced
@pytest.mark.parametrize("name", ONE_SCALE)
def test_an_announced_update_is_right(name: str, rng: torch.Generator) -> None:
    """An announced update has begin_weight_update, requests that write, and end_weight_update."""
    config, mode = MODES[name]
    x_and_topk = given("cpu", rng)
    tensors = fp8_tensors(drawn(name, "cpu", rng), mode)
    second = tensors | without_input_scales(name, rng)
    changed = {suffix: tensor for suffix, tensor in second.items() if suffix != "input_scale"}
    with server():
        module, fresh = (empty_layer(SHAPE, config, "cpu") for _ in range(2))
        load(module, tensors)
        model, cpu = Model(module), torch.device("cpu")
        DefaultModelLoader.restore_weights_before_loading(model, cpu)
        write(module, changed, range(3))
        write(module, changed, range(3, SHAPE.experts))
        DefaultModelLoader.postprocess_weights(model, cpu)
        load(fresh, second)
        assert same_bits(forward(module, *x_and_topk), forward(fresh, *x_and_topk))


def test_weights_that_lie_as_sglang_has_them_take_every_update(rng: torch.Generator) -> None:
    x_and_topk = given("cpu", rng)
    first, second = (fp8_tensors(drawn("channel", "cpu", rng), "token") for _ in range(2))
    with server():
        module, fresh = (empty_layer(SHAPE, MODES["channel"][0], "cpu") for _ in range(2))
        load(module, first)
        forward(module, *x_and_topk)
        write(module, second)
        load(fresh, second)
        assert same_bits(forward(module, *x_and_topk), forward(fresh, *x_and_topk))


@pytest.mark.parametrize("name", ["channel", "tensor"])
def test_a_parameter_that_got_other_memory_is_an_error(name: str, rng: torch.Generator) -> None:
    """ExpertWeights own the tensors that they were made of: without the error a call would have the old numbers."""
    config, mode = MODES[name]
    with server():
        module = empty_layer(SHAPE, config, "cpu")
        load(module, fp8_tensors(drawn(name, "cpu", rng), mode))
        x_and_topk = given("cpu", rng)
        result = forward(module, *x_and_topk)
        module.w2_weight.data = module.w2_weight.data.clone()
        with pytest.raises(RuntimeError, match="layer 0: w2_weight got other memory"):
            forward(module, *x_and_topk)
        module.quant_method.process_weights_after_loading(module)
        assert same_bits(forward(module, *x_and_topk), result)


PACKED = ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv")


def mxfp8_tensors(layer: Any) -> dict[str, Any]:
    def part(w13: Tensor, w2: Tensor) -> Any:
        return lambda expert, shard: w2[expert] if shard == "w2" else w13[expert].chunk(2)[shard == "w3"]

    return {"weight": part(layer.w13, layer.w2), "weight_scale_inv": part(layer.w13_scale, layer.w2_scale)}


def packed_layer(device: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> FusedMoE:
    """Makes MXFP8 experts, packed in their parameters' memory on a GPU; on a CPU they only count as packed."""
    if device == "cpu":
        monkeypatch.setattr(loading, "packed_parameters", lambda layer, weights: set(PACKED))
        monkeypatch.setattr(loading, "is_derived", lambda layer, weights: True)
    return fp8_layer(make_mxfp8(SHAPE, device, rng), "oxmoe", MXFP8)


def count_makes(module: FusedMoE, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    made: list[None] = []
    make = module.quant_method.make
    monkeypatch.setattr(module.quant_method, "make", lambda *a, **named: made.append(None) or make(*a, **named))
    return made


def test_packed_weights_are_not_packed_again(
    device: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """end_weight_update processes every layer, also those that the update did not write."""
    with server():
        module = packed_layer(device, rng, monkeypatch)
        x_and_topk = given(device, rng)
        before, result, made = bits(module), forward(module, *x_and_topk), count_makes(module, monkeypatch)
        for _ in range(2):
            module.quant_method.restore_weights_before_loading(module)
            module.quant_method.process_weights_after_loading(module)
        assert not made
        assert all(same_bits(*pair) for pair in zip(bits(module), before, strict=True))
        assert same_bits(forward(module, *x_and_topk), result)
        with pytest.raises(RuntimeError, match="MXFP8 experts were prepared at load"):
            write(module, mxfp8_tensors(make_mxfp8(SHAPE, device, rng)))


def test_part_of_packed_weights_is_refused(device: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    other = mxfp8_tensors(make_mxfp8(SHAPE, device, rng))
    with server():
        module, fresh = (packed_layer(device, rng, monkeypatch) for _ in range(2))
        module.quant_method.restore_weights_before_loading(module)
        write(module, other, range(3))
        parts = rf"w13_weight 6 of {2 * SHAPE.experts}, .* w2_weight 3 of {SHAPE.experts}"
        with pytest.raises(RuntimeError, match=rf"layer 0: a weight update wrote parts of packed MXFP8.*{parts}"):
            module.quant_method.process_weights_after_loading(module)
        with pytest.raises(RuntimeError, match="Load the whole layer again"):
            forward(module, *given(device, rng))
        write(module, other, range(3, SHAPE.experts))
        module.quant_method.process_weights_after_loading(module)
        fresh.quant_method.restore_weights_before_loading(fresh)
        load(fresh, other)
        x_and_topk = given(device, rng)
        assert same_bits(forward(module, *x_and_topk), forward(fresh, *x_and_topk))


def test_what_packed_weights_are_made_of_is_not_written_alone(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales that are no part of the packed memory (global ones, or of long groups) are in it all the same."""
    other = mxfp8_tensors(make_mxfp8(SHAPE, "cpu", rng))
    with server():
        module = packed_layer("cpu", rng, monkeypatch)
        monkeypatch.setattr(module.quant_method, "packed", frozenset({"w13_weight", "w2_weight"}))
        module.quant_method.restore_weights_before_loading(module)
        write(module, {"weight_scale_inv": other["weight_scale_inv"]})
        said = r"w13_weight 0 of .*w2_weight 0 of \d+ parts; and w13_weight_scale_inv, w2_weight_scale_inv\)"
        with pytest.raises(RuntimeError, match=rf"wrote parts of packed MXFP8 experts \({said}"):
            module.quant_method.process_weights_after_loading(module)
        with pytest.raises(RuntimeError, match="Load the whole layer again"):
            forward(module, *given("cpu", rng))


@only_announced
def test_layers_on_copies_refuse_updates_by_name(rng: torch.Generator) -> None:
    """SGLang asks for the reason before it writes anything."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import _unsupported_derived_weight_cache_error

    layer = bf16_operands(BF16_SHAPE, 1, "cpu", rng)[0]
    with server("triton_kernel"):
        copied = Model(fused_moe(layer, quantized=False))
        layers.check_layer(copied.experts)
    with server():
        own = Model(fused_moe(layer))
        layers.check_layer(own.experts)
    assert "second copies of its weights" in _unsupported_derived_weight_cache_error(copied)
    assert _unsupported_derived_weight_cache_error(own) is None
