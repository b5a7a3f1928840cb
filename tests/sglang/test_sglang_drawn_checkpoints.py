"""Random checkpoints of every format in SGLang's layers by its own loader: values on odd ranks and in any order of
tensors, and tensors of another format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oxmoe.testing import relative_norm, same_bits

pytest.importorskip("sglang")


from drawn_checkpoints import (
    MULTIPLES,
    NAMES,
    QUANTISES,
    Drawn,
    draw,
    group_of,
    on_a_cpu,  # noqa: F401 - a fixture that every test here uses
    routed,
)
from sglang_server import NEW, installed, server
from test_sglang_fp8 import forward

ORDERS = ("as drawn", "shuffled", "twice", "wrong first")
RANKS = [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)] if NEW else [(1, 1)]
TRTLLM = "flashinfer_trtllm"


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


def rank(number: int, tp: int, ep: int) -> dict[str, int]:
    ranks = tp // ep
    if tp == 1:
        return {}
    sizes = {"moe_tp_size": ranks, "moe_ep_size": ep, "tp_size": tp, "attn_tp_size": tp}
    return {**sizes, "moe_tp_rank": number % ranks, "moe_ep_rank": number // ranks, "tp_rank": number}


def choose(rng: torch.Generator, values: Any) -> Any:
    return values[int(torch.randint(len(values), (), generator=rng))]


def in_order(made: Drawn, module: Any, order: str, rng: torch.Generator) -> None:
    """Writes the tensors, as files in another order, or with some of them twice, have them."""
    entries = list(made.entries())
    if order != "as drawn":
        entries = [entries[place] for place in torch.randperm(len(entries), generator=rng).tolist()]
    if order == "wrong first":
        for suffix, shard, expert in entries[::2]:
            if suffix != "input_scale":  # SGLang refuses two that differ
                other = made.tensors[suffix][shard][(expert + 1) % made.experts].clone()
                made.write(module, suffix, shard, expert, other)
    for _ in range(2 if order == "twice" else 1):
        for entry in entries:
            made.write(module, *entry)
    module.quant_method.process_weights_after_loading(module)


def sizes(name: str, ranks: int, rng: torch.Generator) -> tuple[int, int]:
    """Returns hidden_size and intermediate_size: odd multiples of what the format takes."""
    of_hidden, of_columns = MULTIPLES.get(name, (128, 16 if "fp8" in name or name in QUANTISES else 32))
    intermediate = of_columns * choose(rng, (1, 2, 3, 5)) * ranks
    if group := group_of(name):
        intermediate = -(-intermediate // (group * ranks)) * group * ranks
    return of_hidden * choose(rng, (1, 2, 3) if of_hidden > 32 else (4, 5, 7)), intermediate


@pytest.mark.parametrize("name", NAMES)
def test_values(name: str, rng: torch.Generator) -> None:
    """The sum of all ranks' results is the layer in fp64 on the dequantised weights."""
    for _ in range(3):
        (tp, ep), order = choose(rng, RANKS), choose(rng, ORDERS)
        gated = name == "W4AFP8" or bool(torch.rand((), generator=rng) < 0.7)
        hidden, intermediate = sizes(name, tp // ep, rng)
        made = draw(name, rng, experts=6 if ep != 4 else 4, hidden=hidden, intermediate=intermediate, gated=gated)
        x = torch.randn((9, hidden), generator=rng).bfloat16()
        weights, ids, topk = routed(9, made.experts, 2, rng)
        total = torch.zeros(x.shape, dtype=torch.float64)
        for number in range(tp):
            with server(**rank(number, tp, ep)):
                module = made.layer()
                assert module.quant_method.oxmoe
                in_order(made, module, order, rng)
                total += forward(module, x.clone(), topk).double()
        distance = relative_norm(total, made.expected(x, weights, ids))
        assert distance < (0.1 if name in QUANTISES else 0.01), (distance, tp, ep, order, gated, hidden, intermediate)


def small(name: str, rng: torch.Generator, intermediate: int = 256) -> Drawn:
    return draw(name, rng, experts=4, hidden=128, intermediate=intermediate)


@pytest.mark.parametrize("name", ["bf16", *sorted(QUANTISES)])
def test_weights_of_another_format(name: str, rng: torch.Generator) -> None:
    """SGLang's loader would convert numbers of one format to another's."""
    made = small(name, rng)
    other = torch.zeros(256, 128, dtype=torch.float8_e4m3fn if name == "bf16" else torch.bfloat16)
    with server():
        module = made.layer()
        for tensor in (other, other.to(torch.uint8)):
            with pytest.raises(ValueError, match=rf"layer 0: the checkpoint has {tensor.dtype} for w13_weight of"):
                made.write(module, "weight", "w1", 0, tensor)
        if name == "bf16":
            made.write(module, "weight", "w1", 0, torch.zeros(256, 128))
            assert not module.w13_weight[0, :256].any()


def test_scales_of_mxfp8_are_bytes(rng: torch.Generator) -> None:
    """A checkpoint may have them as uint8 or as torch.float8_e8m0fnu. Their numbers in fp32 are not served."""
    made = small("MXFP8", rng)
    x = torch.randn((9, 128), generator=rng).bfloat16()
    topk, results = routed(9, 4, 2, rng)[2], []
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        for shard, scales in made.tensors["weight_scale_inv"].items():
            made.tensors["weight_scale_inv"][shard] = scales.view(dtype)
        with server():
            module = made.layer()
            made.load(module)
            results.append(forward(module, x.clone(), topk))
    assert same_bits(*results)
    with server(), pytest.raises(ValueError, match=r"has torch.float32 for w13_weight_scale_inv of MXFP8 experts, whi"):
        made.write(made.layer(), "weight_scale_inv", "w1", 0, torch.ones(256, 4))


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("bf16", "MXFP8", "fp8", "fp8 blocks", "fp8 static")]
)
def test_biases_are_not_left_out(name: str, rng: torch.Generator) -> None:
    """SGLang's models skip a bias for which a layer has no parameter."""
    with server(), pytest.raises(NotImplementedError, match="biases"):
        small(name, rng).layer(with_bias=True)


def result_of(made: Drawn, backend: str, x: Tensor, topk: Any) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.float64)
    for number in range(2):
        with server(backend, **rank(number, 2, 1)):
            module = made.layer()
            made.load(module)
            total += forward(module, x.clone(), topk).double()
    return total


@pytest.mark.skipif(not NEW, reason="older releases' tests have one rank")
@pytest.mark.parametrize(
    ("name", "intermediate", "served"),
    [
        ("fp8 blocks", 384, False),
        ("fp8 blocks", 128, False),
        ("compressed blocks", 384, False),
        ("compressed channel", 96, True),
        ("fp8", 96, True),
        ("MXFP8", 320, True),
        ("MXFP4 in fp8", 320, True),
        ("int4 kimi", 320, True),
        ("int4 zeros", 448, False),
        ("int4 awq-64", 448, False),
        ("int4 gptq", 320, False),
        ("int4 gptq-rows", 64, True),
        ("int4 channel", 64, True),
        ("W4AFP8", 384, False),
        ("bf16", 200, True),
    ],
)
def test_columns_that_sglang_rounds_up(name: str, intermediate: int, served: bool, rng: torch.Generator) -> None:
    """With flashinfer_trtllm a rank's columns become a multiple of 128. Scales that two ranks share would go to one."""
    made = draw(name, rng, experts=4, hidden=128, intermediate=intermediate)
    x = torch.randn((9, 128), generator=rng).bfloat16()
    weights, ids, topk = routed(9, 4, 2, rng)
    if served:
        distance = relative_norm(result_of(made, TRTLLM, x, topk), made.expected(x, weights, ids))
        assert distance < (0.1 if name in QUANTISES else 0.01), distance
    else:
        with pytest.raises(ValueError, match=r"2 ranks cannot share \d+ parts of w.* choose another --moe-runner-back"):
            result_of(made, TRTLLM, x, topk)
