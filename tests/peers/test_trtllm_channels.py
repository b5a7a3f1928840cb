"""flashinfer's trtllm_fp8_per_channel_scale_moe and its routed form, against fp64 and against oxmoe's own form."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import make_routing, tie_free_logits
from oxmoe.peers import flashinfer_trtllm_formats
from oxmoe.testing import same_bits
from trtllm_layouts import shuffle

E, K, H, I = 8, 3, 256, 128  # experts, top_k, hidden and intermediate size  # noqa: E741
E4M3 = torch.float8_e4m3fn
Layer = dict[str, Any]


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    flashinfer_trtllm_formats.cache.clear()


def drawn(rng: torch.Generator, gated: bool = True) -> Layer:
    """Plain operands: codes, a scale for each row, and three numbers an expert. Rows of a gated w13 are [up; gate]."""
    rows = 2 * I if gated else I

    def codes(rows: int, columns: int) -> Tensor:
        return (torch.randn((E, rows, columns), generator=rng) * 100).clamp(-448, 448).to(E4M3)

    def scales(*shape: int, size: float) -> Tensor:
        return (torch.rand(shape, generator=rng) + 0.5) * size

    return {
        "w13": codes(rows, H),
        "w13_scale": scales(E, rows, size=1 / 100),
        # Without a gate oxmoe multiplies by it after rounding, which is the same for a power of two.
        "up": scales(E, size=1.0) if gated else 2.0 ** torch.randint(-3, 4, (E,), generator=rng),
        "gate": scales(E, size=1.5),
        "w2": codes(H, I),
        "w2_scale": scales(E, H, size=1 / 100),
        "out": scales(E, size=1.0),
    }


def as_flashinfer(layer: Layer, device: str, gated: bool = True) -> dict[str, Any]:
    given = {
        "gemm1_weights": shuffle(layer["w13"].view(torch.uint8), gated).view(E4M3),
        "gemm1_per_channel_weight_scale": shuffle(layer["w13_scale"], gated),
        "output1_scale_scalar": layer["up"],
        "output1_scale_gate_scalar": layer["gate"],
        "gemm2_weights": shuffle(layer["w2"].view(torch.uint8), False).view(E4M3),
        "gemm2_per_channel_weight_scale": shuffle(layer["w2_scale"], False),
        "output2_scale_scalar": layer["out"],
    }
    return {name: tensor.to(device) for name, tensor in given.items()}


def tokens_of(tokens: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn((tokens, H), generator=rng)
    scale = x.abs().amax(1, keepdim=True) / 448 * (torch.rand((tokens, 1), generator=rng) + 1)
    return (x / scale).to(E4M3), scale


ACTIVATIONS = {
    "Swiglu": lambda up, gate: gate * torch.sigmoid(gate) * up,
    "GegluTanh": lambda up, gate: torch.nn.functional.gelu(gate, approximate="tanh") * up,
    "Relu2": lambda up, gate: gate.relu().square() * up,
}


# A sum of GEMM1 that lies between two bf16 numbers may be a row's largest, and then decides all of its e4m3 codes. A
# number between two codes goes either way, too. These are relative distances of a device's sums and quotients from
# fp64's.
NEAR, NEAR_QUOTIENT = {"cpu": 2e-6, "cuda": 4e-4}, 1e-6
MOVED = {
    device: ((0.0, 0.0), *product((-near, near), (-NEAR_QUOTIENT, NEAR_QUOTIENT))) for device, near in NEAR.items()
}


def truth(layer: Layer, x: Tensor, scale: Tensor, gates: Tensor, ids: Tensor, name: str, first: int = 0) -> Tensor:
    """Computes the slots of flashinfer's layer in fp64, with the two roundings of GEMM1's output: [10, T, K, H].

    The ten have moved as in MOVED, first those of CPUs.
    """
    x64, gated = x.double() * scale.double(), name != "Relu2"
    moved, quotients = torch.tensor([pair for pairs in MOVED.values() for pair in pairs], dtype=torch.double).T
    slots = torch.zeros((len(moved), len(x), K, H), dtype=torch.double)
    for token, slot in ((t, j) for t in range(len(x)) for j in range(K)):
        e = int(ids[token, slot]) - first
        if not 0 <= e < E:
            continue
        rows = (layer["w13"][e].double() @ x64[token]) * layer["w13_scale"][e].double() * (1 + moved)[:, None]
        # Without a gate the number of up multiplies the activation's output.
        up = rows[:, :I] * layer["up"][e].double() if gated else layer["up"][e].double()
        gate = (rows[:, I:] if gated else rows) * layer["gate"][e].double()
        h = ACTIVATIONS[name](up, gate).bfloat16().double()
        peak = h.abs().amax(1, keepdim=True).clamp(min=1e-10) / 448
        h = (h / peak * (1 + quotients)[:, None]).clamp(-448, 448).to(E4M3).double() * peak
        y = (h @ layer["w2"][e].double().T) * layer["w2_scale"][e].double() * layer["out"][e].double()
        slots[:, token, slot] = gates[token, slot].double() * y
    return slots


def sizes(**others: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"routing_bias": None, "num_experts": E, "top_k": K, "n_group": None, "topk_group": None}
    given |= {"intermediate_size": I, "local_expert_offset": 0, "local_num_experts": E, "routed_scaling_factor": None}
    return {**given, "use_routing_scales_on_input": False, **others}


def close(result: Tensor, expected: Tensor) -> None:
    """Compares with `truth`. Each slot may have the codes of any sums that the device may have."""
    first = 0 if result.device.type == "cpu" else len(MOVED["cpu"])
    places = range(first, first + len(MOVED["cpu"]))
    sums = expected[0].sum(1)
    assert result.dtype == torch.bfloat16 and result.shape == sums.shape
    if sums.numel():
        every = [sum(expected[i, :, j] for j, i in enumerate(chosen)) for chosen in product(places, repeat=K)]
        apart = (result.cpu().double() - torch.stack(every)).norm(dim=2).amin(0)
        assert float(apart.norm()) < 8e-3 * float(sums.norm())


@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_close_to_fp64(name: str, tokens: int, device: str, rng: torch.Generator) -> None:
    gated = name != "Relu2"
    layer, (x, scale) = drawn(rng, gated), tokens_of(tokens, rng)
    given = {**as_flashinfer(layer, device, gated), "hidden_states": x.to(device)}
    given |= {"hidden_states_scale": scale.to(device), "activation_type": SimpleNamespace(name=name)}
    gates, ids = make_routing("uniform", tokens, E, K, rng)
    if tokens:
        ids[0, 1] = -1
    expected = truth(layer, x, scale, gates, ids, name)
    pair = ids.to(device), gates.to(device)
    result = oxmoe.trtllm_fp8_per_channel_scale_routed_moe(pair, **given, **sizes())
    close(result, expected)
    # The call runs again from the cache, and with prepared weights.
    again = oxmoe.trtllm_fp8_per_channel_scale_routed_moe(pair, **given, **sizes())
    assert same_bits(again, result) and len(flashinfer_trtllm_formats.cache) == 1
    tensors = {part: value for part, value in given.items() if not part.startswith("hidden")}
    made = oxmoe.prepare_trtllm_fp8_per_channel_scale_moe(**tensors)
    assert made.format == "fp8_tensor-token"
    assert same_bits(oxmoe.trtllm_fp8_per_channel_scale_routed_moe(pair, **given, **sizes(), weights=made), result)
    packed = oxmoe.pack_topk(gates.nan_to_num().to(device), ids.to(device))
    rounded = gates.nan_to_num().bfloat16().float().to(device)
    assert same_bits(
        oxmoe.trtllm_fp8_per_channel_scale_routed_moe(packed, **given, **sizes()),
        oxmoe.trtllm_fp8_per_channel_scale_routed_moe((ids.to(device), rounded), **given, **sizes()),
    )
    logits = tie_free_logits(tokens, E, rng)
    gates, ids = logits.softmax(1).topk(K)
    gates = gates / gates.sum(1, keepdim=True)
    result = oxmoe.trtllm_fp8_per_channel_scale_moe(logits.to(device), **given, **sizes(), routing_method_type=1)
    close(result, truth(layer, x, scale, gates, ids, name))


def test_any_number_without_a_gate(device: str, rng: torch.Generator) -> None:
    """The number multiplies after both roundings, where flashinfer's kernel has it before."""
    layer, (x, scale) = drawn(rng, gated=False), tokens_of(64, rng)
    layer["up"] = torch.rand(E, generator=rng) + 0.3
    given = {**as_flashinfer(layer, device, gated=False), "hidden_states": x.to(device)}
    given |= {"hidden_states_scale": scale.to(device), "activation_type": 6}
    gates, ids = make_routing("uniform", 64, E, K, rng)
    result = oxmoe.trtllm_fp8_per_channel_scale_routed_moe((ids.to(device), gates.to(device)), **given, **sizes())
    behind = {**layer, "up": torch.ones(E), "out": layer["out"] * layer["up"]}
    close(result, truth(behind, x, scale, gates, ids, "Relu2"))


def test_ranks(device: str, rng: torch.Generator) -> None:
    layer, (x, scale) = drawn(rng), tokens_of(9, rng)
    given = {**as_flashinfer(layer, device), "hidden_states": x.to(device), "hidden_states_scale": scale.to(device)}
    gates, ids = make_routing("uniform", 9, 2 * E, K, rng)
    for offset in (0, 8, 3):
        part = sizes(num_experts=2 * E, local_expert_offset=offset)
        result = oxmoe.trtllm_fp8_per_channel_scale_routed_moe((ids.to(device), gates.to(device)), **given, **part)
        close(result, truth(layer, x, scale, gates, ids, "Swiglu", offset))


def test_weights_on_input(device: str, rng: torch.Generator) -> None:
    """Weights multiply GEMM1's sums: the layer of one expert whose numbers of gate and up are multiplied."""
    layer, (x, scale) = drawn(rng), tokens_of(5, rng)
    given = {**as_flashinfer(layer, device), "hidden_states": x.to(device), "hidden_states_scale": scale.to(device)}
    gates, ids = torch.full((5, 1), 0.75), torch.arange(5).int()[:, None]
    part = sizes(top_k=1, use_routing_scales_on_input=True)
    result = oxmoe.trtllm_fp8_per_channel_scale_routed_moe((ids.to(device), gates.to(device)), **given, **part)
    scaled = {**layer, "up": layer["up"] * 0.75, "gate": layer["gate"] * 0.75}
    ones, none = torch.ones(5, K), torch.full((5, K - 1), -1)
    close(result, truth(scaled, x, scale, ones, torch.cat((ids, none), 1), "Swiglu"))


def test_workspace_buffer(device: str, rng: torch.Generator) -> None:
    layer, (x, scale) = drawn(rng), tokens_of(9, rng)
    given = {**as_flashinfer(layer, device), "hidden_states": x.to(device), "hidden_states_scale": scale.to(device)}
    pair = tuple(part.to(device) for part in reversed(make_routing("uniform", 9, E, K, rng)))
    expected = oxmoe.trtllm_fp8_per_channel_scale_routed_moe(pair, **given, **sizes())
    size = oxmoe.trtllm_fused_moe_workspace_size(9, H, I, E, K, quant_mode="fp8_per_channel", device=device)
    for room in (size, size - 1):
        memory = torch.full((size + 256,), 0x5A, dtype=torch.uint8, device=device)
        start = -memory.data_ptr() % 256
        buffer = memory[start : start + room]
        result = oxmoe.trtllm_fp8_per_channel_scale_routed_moe(pair, **given, **sizes(), workspace_buffer=buffer)
        assert same_bits(result, expected) and bool((buffer != 0x5A).any()) == (room == size)


def test_without_finalize(device: str, rng: torch.Generator) -> None:
    layer, (x, scale) = drawn(rng), tokens_of(9, rng)
    given = {**as_flashinfer(layer, device), "hidden_states": x.to(device), "hidden_states_scale": scale.to(device)}
    gates, ids = make_routing("uniform", 9, E, K, rng)
    pair = ids.to(device), gates.to(device)
    rows, factors, places = oxmoe.trtllm_fp8_per_channel_scale_routed_moe(pair, **given, **sizes(), do_finalize=False)
    assert torch.equal(places.cpu(), torch.arange(27, dtype=torch.int32))
    total = (rows.double().view(9, K, H) * factors.double()[..., None]).sum(1)
    close(total.bfloat16(), truth(layer, x, scale, gates, ids, "Swiglu"))


def test_refusals(rng: torch.Generator) -> None:
    layer, (x, scale) = drawn(rng), tokens_of(5, rng)
    given = {**as_flashinfer(layer, "cpu"), "hidden_states": x, "hidden_states_scale": scale}
    gates, ids = make_routing("uniform", 5, E, K, rng)
    name = "gemm1_per_channel_weight_scale"
    calls: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "hidden_states: expected dtype float8_e4m3fn, got bfloat16", {"hidden_states": x.bfloat16()}),
        (ValueError, "hidden_states_scale: expected dtype float32, got bf", {"hidden_states_scale": scale.bfloat16()}),
        (ValueError, r"hidden_states_scale: expected shape \[5, 1\], got \[5\]", {"hidden_states_scale": scale[:, 0]}),
        (ValueError, rf"{name}: expected shape \[8, 256\], got \[8, 128\]", {name: given[name][:, :128]}),
        (ValueError, rf"{name}: expected dtype float32, got float64", {name: given[name].double()}),
        (ValueError, r"output2_scale_scalar: expected shape \[8\], got \[1\]", {"output2_scale_scalar": torch.ones(1)}),
        (ValueError, "gemm2_weights: expected 3 dimensions", {"gemm2_weights": given["gemm2_weights"][0]}),
        (NotImplementedError, "activation_type: no kernel for 'Situ'", {"activation_type": 10}),
        (NotImplementedError, "no kernel for 'SwigluStep'", {"activation_type": SimpleNamespace(name="SwigluStep")}),
        (NotImplementedError, "activation_type: no kernel for 7", {"activation_type": 7}),
        (ValueError, r"gemm1_weights: expected 4 experts \(local_num_experts\)", {"local_num_experts": 4}),
        (ValueError, "weights: expected ExpertWeights, got str", {"weights": "none"}),
    ]
    for error, words, changed in calls:
        with pytest.raises(error, match=words):
            oxmoe.trtllm_fp8_per_channel_scale_routed_moe((ids, gates), **{**given, **sizes(), **changed})
