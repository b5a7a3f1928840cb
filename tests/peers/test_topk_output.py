"""SGLang's forms of a top-k result as arguments of `moe`: router logits, weights and ids, triton_kernels' tables."""

from __future__ import annotations

from types import SimpleNamespace

import torch

import oxmoe
from cases import tie_free_logits
from oxmoe import reference
from oxmoe.peers.topk_forms import routing_arguments, slots_of
from test_peer_calls import bypassed


def test_choices_of_bypassed_topk(rng: torch.Generator) -> None:
    logits, bias = tie_free_logits(5, 8, rng), torch.randn(8, generator=rng)
    config = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
    output = bypassed(logits, logits, 2, correction_bias=bias.bfloat16(), **config)
    output.num_token_non_padded = torch.tensor([3])
    arguments = routing_arguments(output)
    assert (arguments["num_expert_group"], arguments["topk_group"], arguments["top_k"]) == (4, 2, 2)
    assert arguments["correction_bias"].dtype == torch.float32 and arguments["num_token_non_padded"].shape == ()
    assert arguments["router_logits"] is logits and arguments["scoring_func"] == "sigmoid" and arguments["renormalize"]
    # If only SGLang can route, its own function does it; 0.5.12 calls the logits by another name.
    standard = SimpleNamespace(topk_weights=torch.ones(5, 2), topk_ids=torch.zeros(5, 2, dtype=torch.int32))
    old = SimpleNamespace(router_logits=logits, topk_config=SimpleNamespace(top_k=2))
    assert routing_arguments(old)["router_logits"] is logits
    for special, of_output in (
        ({"custom_routing_function": lambda: None}, {}),
        ({"num_fused_shared_experts": 1}, {}),
        ({"shared_experts": SimpleNamespace(num_shared_topk_slots=1)}, {}),
        ({"apply_routed_scaling_factor_on_output": True}, {}),
        ({"scoring_func": "sqrtsoftplus", "sqrtsoftplus_log1p": True}, {}),
        ({}, {"expert_location_dispatch_info": SimpleNamespace()}),
    ):
        output = bypassed(logits, logits, 2, **special)
        vars(output).update(of_output, to_standard=lambda: standard)
        assert routing_arguments(output) == {"topk_weights": standard.topk_weights, "topk_ids": standard.topk_ids}


def test_arguments_of_tables(rng: torch.Generator) -> None:
    """The tables that triton_kernels' top-k gives in SGLang 0.5.12 and in 0.5.23 are read back as weights and ids."""
    logits = tie_free_logits(5, 8, rng)
    data, _, scatter = oxmoe.routing(logits, 2)
    weights, ids = reference.topk(logits, 2, scoring_func="softmax_topk", renormalize=False, order="id")
    metadata = SimpleNamespace(slice_sizes=data.expt_hist)
    new = {"a_ragged_metadata": metadata, "gate_scal": data.gate_scal, "n_expts_act": 2}
    for output in (
        SimpleNamespace(routing_data=data, scatter_indx=scatter),
        SimpleNamespace(**new, scatter_indx=scatter.dst_indx),
    ):
        arguments = routing_arguments(output)
        assert arguments.keys() == {"topk_weights", "topk_ids"} and torch.equal(arguments["topk_ids"], ids)
        torch.testing.assert_close(arguments["topk_weights"], weights)


def test_places_without_a_slot() -> None:
    """With padding rows there are fewer places than slots, and -1 behind the last."""
    logits = torch.tensor([[3.0, 2, 1, 0], [0, 1, 2, 3], [1, 3, 2, 0]])
    data, _, scatter = oxmoe.routing(logits, 2, n_rows=2)
    weights, ids = slots_of(data.expt_hist, scatter.dst_indx, data.gate_scal, 2)
    assert ids.tolist() == [[0, 1], [2, 3], [-1, -1]] and weights[2].tolist() == [0, 0]
