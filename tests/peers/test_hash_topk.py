"""flashinfer's `hash_topk` against its definition in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from oxmoe.testing import same_bits

VOCAB = 41


def operands(tokens: int, experts: int, top_k: int, rng: torch.Generator) -> dict[str, Tensor]:
    rows = torch.rand((VOCAB, experts), generator=rng).topk(top_k).indices
    return {
        "router_logits": 8 * torch.randn((tokens, experts), generator=rng),
        "input_ids": torch.randint(0, VOCAB, (tokens,), generator=rng),
        "tid2eid": rows.int(),
    }


@pytest.mark.parametrize(("experts", "top_k"), [(256, 6), (384, 8), (33, 31), (5, 1), (7, 7)])
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_is_the_definition(tokens: int, experts: int, top_k: int, device: str, rng: torch.Generator) -> None:
    given = operands(tokens, experts, top_k, rng)
    given["router_logits"][::3] = 30 * torch.randn(experts, generator=rng)
    ids = given["tid2eid"][given["input_ids"]]
    chosen = given["router_logits"].double().gather(1, ids.long())
    scores = (chosen.clamp(min=0) + (-chosen.abs()).exp().log1p()).sqrt()
    expected = scores / scores.sum(1, keepdim=True)
    on = {name: tensor.to(device) for name, tensor in given.items()}
    weights, got = oxmoe.hash_topk(**on)
    assert weights.dtype == torch.float32 and got.dtype == torch.int32 and got.is_contiguous()
    assert torch.equal(got.cpu(), ids)
    torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-5, atol=1e-12)
    both, all_ids = oxmoe.hash_topk(**on, num_fused_shared_experts=1, routed_scaling_factor=2.5)
    assert both.is_contiguous() and all_ids.is_contiguous()
    assert same_bits(both[:, :top_k].contiguous(), weights) and torch.equal(all_ids[:, :top_k], got)
    assert bool((both[:, top_k] == torch.tensor(0.4)).all()) and bool((all_ids[:, top_k] == experts).all())


def test_routes_a_layer(rng: torch.Generator) -> None:
    """Ids and weights go to `moe` as they are; a table may name an expert twice."""
    given = operands(9, 8, 3, rng)
    given["tid2eid"][:, 1] = given["tid2eid"][:, 0]
    weights, ids = oxmoe.hash_topk(**given, launch_with_pdl=False)
    assert torch.equal(weights[:, 0], weights[:, 1]) and torch.equal(ids[:, 0], ids[:, 1])
    layer = oxmoe.ExpertWeights.bf16(torch.randn(8, 32, 16).bfloat16(), torch.randn(8, 16, 16).bfloat16())
    x = torch.randn((9, 16), generator=rng).bfloat16()
    out = oxmoe.moe(x, layer, weights, ids)
    once = torch.stack([weights[:, 0] * 2, weights[:, 2]], 1)
    assert torch.allclose(out.float(), oxmoe.moe(x, layer, once, ids[:, ::2].contiguous()).float(), rtol=0.03, atol=0.1)
    compiled = torch.compile(oxmoe.hash_topk, fullgraph=True, backend="eager")(**given)
    assert all(same_bits(*pair) for pair in zip(compiled, (weights, ids), strict=True))


def test_refusals(rng: torch.Generator) -> None:
    given: dict[str, Any] = operands(4, 8, 3, rng)
    wrong_token, wrong_expert = given["input_ids"].clone(), given["tid2eid"].clone()
    wrong_token[2] = VOCAB
    wrong_expert[given["input_ids"][0], 1] = -1
    cases: list[tuple[str, dict[str, Any]]] = [
        (r"router_logits: expected \[T, E\], got shape \(8,\)", {"router_logits": torch.zeros(8)}),
        ("router_logits: expected dtype float32, got bfloat16", {"router_logits": given["router_logits"].bfloat16()}),
        ("router_logits: expected a contiguous tensor", {"router_logits": torch.zeros(4, 16)[:, ::2]}),
        ("router_logits: requires grad", {"router_logits": torch.zeros(4, 8, requires_grad=True)}),
        (r"router_logits: dimension 1 \(experts\): expected 1 or more, got 0", {"router_logits": torch.zeros(4, 0)}),
        ("input_ids: expected dtype int64, got int32", {"input_ids": given["input_ids"].int()}),
        (r"input_ids: expected 4 token ids \(rows of router_logits\), got 3", {"input_ids": given["input_ids"][:3]}),
        ("input_ids: expected a torch tensor, got list", {"input_ids": [0, 1, 2, 3]}),
        (rf"input_ids: token 2 has id {VOCAB}, expected 0 to {VOCAB - 1} \(rows of tid2", {"input_ids": wrong_token}),
        ("tid2eid: expected dtype int32, got int64", {"tid2eid": given["tid2eid"].long()}),
        ("tid2eid: expected device cpu", {"tid2eid": given["tid2eid"].to("meta")}),
        (r"tid2eid: token 0 has id -1, expected 0 to 7 \(experts\)", {"tid2eid": wrong_expert}),
        (r"tid2eid: dimension 1 \(top-k\): expected 1 to 32, got 0", {"tid2eid": given["tid2eid"][:, :0]}),
        (
            r"tid2eid: dimension 1 \(top-k\): expected 1 to 31, got 32",
            {"tid2eid": torch.zeros(VOCAB, 32, dtype=torch.int32), "num_fused_shared_experts": 1},
        ),
        ("num_fused_shared_experts: expected 0 or 1, got 2", {"num_fused_shared_experts": 2}),
    ]
    cases += [
        (
            f"routed_scaling_factor: expected a positive number, got {factor}",
            {"num_fused_shared_experts": 1, "routed_scaling_factor": factor},
        )
        for factor in (0.0, -1.0, 1e-40, float("inf"), float("nan"))
    ]
    for words, changed in cases:
        with pytest.raises(ValueError, match=words):
            oxmoe.hash_topk(**{**given, **changed})
