"""Right calls, on CPU tensors, of the public functions that are written in Python: `oxmoe.__all__`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import oxmoe
from mxfp4_blocks import Blocks, experts_of

# Collective calls, whose operands need other ranks. tests/allreduce calls them.
OF_RANKS = {
    *("allreduce_fusion", "create_allreduce_fusion_workspace", "TRTLLMAllReduceFusionWorkspace"),
    *("trtllm_allreduce_fusion", "trtllm_moe_allreduce_fusion", "trtllm_moe_finalize_allreduce_fusion"),
    "trtllm_create_ipc_workspace_for_all_reduce_fusion",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
}
Operands = dict[str, Any]
E, K, T, H, I = 4, 2, 3, 128, 128  # experts, top-k, tokens, hidden and intermediate size  # noqa: E741
E4M3 = torch.float8_e4m3fn


class Draws:
    """Draws operands of these sizes."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def plain(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def bytes(self, *shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.uint8)

    def e4m3(self, *shape: int) -> Tensor:
        return self.plain(*shape).to(E4M3)

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) + 0.5

    def exponents(self, *shape: int) -> Tensor:
        """E8M0 scales."""
        return self.bytes(*shape, low=118, high=122)

    def block_scales(self, *shape: int) -> Tensor:
        """NVFP4 scales."""
        return self.positive(*shape).to(E4M3)

    def ids(self, experts: int = E) -> Tensor:
        return torch.rand((T, experts), generator=self.generator).topk(K).indices.int()

    def gates(self) -> Tensor:
        return self.positive(T, K)


def _sizes() -> Operands:
    return {
        **{"num_experts": E, "top_k": K, "n_group": 2, "topk_group": 1, "intermediate_size": I},
        **{"local_expert_offset": 0, "local_num_experts": E, "routed_scaling_factor": 2.5, "routing_method_type": 2},
    }


def _by_logits(d: Draws) -> Operands:
    return {"routing_logits": d.plain(T, E, dtype=torch.float32), "routing_bias": d.positive(E)}


def _by_ids(d: Draws) -> Operands:
    return {"topk_ids": (d.ids(), d.gates()), "routing_bias": None}


def _bf16(d: Draws) -> Operands:
    return {
        "gemm1_weights": d.plain(E, 2 * I, H),
        "gemm2_weights": d.plain(E, H, I),
        **{f"gemm1_{name}": d.positive(E) for name in ("alpha", "beta", "clamp_limit")},
        **{"weight_layout": 0, "use_shuffled_weight": True, "activation_type": 3},
    }


def _fp8_block(d: Draws) -> Operands:
    return {
        **{"gemm1_weights": d.e4m3(E, 2 * I, H), "gemm1_weights_scale": d.positive(E, 2 * I // 128, H // 128)},
        **{"gemm2_weights": d.e4m3(E, H, I), "gemm2_weights_scale": d.positive(E, H // 128, I // 128)},
    }


def _fp8_tensor(d: Draws) -> Operands:
    return {
        "gemm1_weights": d.e4m3(E, 2 * I, H),
        "output1_scales_scalar": d.positive(E),
        "output1_scales_gate_scalar": d.positive(E),
        "gemm2_weights": d.e4m3(E, H, I),
        "output2_scales_scalar": d.positive(E),
        "activation_type": 3,
        "gemm1_clamp_limit": d.positive(E),
    }


def _fp8_channels(d: Draws) -> Operands:
    return {
        **{"gemm1_weights": d.e4m3(E, 2 * I, H), "gemm1_per_channel_weight_scale": d.positive(E, 2 * I)},
        **{"output1_scale_scalar": d.positive(E), "output1_scale_gate_scalar": d.positive(E)},
        **{"gemm2_weights": d.e4m3(E, H, I), "gemm2_per_channel_weight_scale": d.positive(E, H)},
        **{"output2_scale_scalar": d.positive(E), "activation_type": 3},
    }


def _mxfp4(d: Draws) -> Operands:
    return {
        **{"gemm1_weights": d.bytes(E, 2 * I, H // 2), "gemm1_weights_scale": d.exponents(E, 2 * I, H // 32)},
        **{"gemm2_weights": d.bytes(E, H, I // 2), "gemm2_weights_scale": d.exponents(E, H, I // 32)},
        **{"gemm1_bias": d.positive(E, 2 * I), "gemm2_bias": d.positive(E, H), "activation_type": 3},
        **{f"gemm1_{name}": d.positive(E) for name in ("alpha", "beta", "clamp_limit")},
        **dict.fromkeys(("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")),
    }


def _nvfp4(d: Draws) -> Operands:
    scalars = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
    return {
        **_mxfp4(d),
        "gemm1_weights_scale": d.block_scales(E, 2 * I, H // 16),
        "gemm2_weights_scale": d.block_scales(E, H, I // 16),
        **{name: d.positive(E) for name in scalars},
    }


def _int4(d: Draws) -> Operands:
    return {
        **{"gemm1_weights": d.bytes(E, 1, 512, 128), "gemm1_weights_scale": d.plain(E, 512, 8)},
        **{"gemm2_weights": d.bytes(E, 1, 256, 128), "gemm2_weights_scale": d.plain(E, 256, 8)},
        **{f"gemm1_{name}": d.positive(E) for name in ("alpha", "beta", "clamp_limit")},
    }


def _int4_layer(d: Draws) -> Operands:
    return {"hidden_states": d.plain(T, 256), **_int4(d), **_sizes(), "intermediate_size": 256}


def _nvfp4_tokens(d: Draws) -> Operands:
    return {"hidden_states": d.bytes(T, H // 2), "hidden_states_scale": d.block_scales(T, H // 16)}


def _cutlass(d: Draws) -> Operands:
    return {
        **{"input": d.plain(T, H), "token_selected_experts": d.ids(), "token_final_scales": d.gates()},
        **{"fc1_expert_weights": d.plain(E, 2 * I, H), "fc2_expert_weights": d.plain(E, H, I)},
        **{"output_dtype": torch.bfloat16, "quant_scales": []},
        **{"fc1_expert_biases": d.plain(E, 2 * I), "fc2_expert_biases": d.plain(E, H)},
        **{f"swiglu_{name}": d.positive(E) for name in ("alpha", "beta", "limit")},
        "output": torch.zeros(T, H, dtype=torch.bfloat16),
    }


def _cutlass_nvfp4(d: Draws) -> Operands:
    return {
        **{"fc1_expert_weights": d.bytes(E, 2 * I, H // 2), "fc2_expert_weights": d.bytes(E, H, I // 2)},
        "quant_scales": [
            *(d.positive(1), d.block_scales(E, 2 * I, H // 16), d.positive(E)),
            *(d.positive(1), d.block_scales(E, H, I // 16), d.positive(E)),
        ],
        **{"fc1_expert_biases": d.plain(E, 2 * I), "fc2_expert_biases": d.plain(E, H)},
        **{f"swiglu_{name}": d.positive(E) for name in ("alpha", "beta", "limit")},
    }


def _cute_dsl(d: Draws) -> Operands:
    return {
        **{"x": d.bytes(T, H // 2), "x_sf": d.block_scales(T, H // 16)},
        **{"token_selected_experts": d.ids(), "token_final_scales": d.gates()},
        **{"w1_weight": d.bytes(E, 2 * I, H // 2), "w1_weight_sf": d.block_scales(E, 2 * I, H // 16)},
        **{"w1_alpha": d.positive(E), "fc2_input_scale": d.positive(1), "w2_weight": d.bytes(E, H, I // 2)},
        **{"w2_weight_sf": d.block_scales(E, H, I // 16), "w2_alpha": d.positive(E), "num_experts": E, "top_k": K},
        "moe_output": torch.zeros(T, H, dtype=torch.bfloat16),
    }


def _cute_dsl_bf16(d: Draws) -> Operands:
    return {
        **{"x": d.plain(T, H), "token_selected_experts": d.ids(), "token_final_scales": d.gates()},
        **{"w1_weight": d.plain(E, 2 * I, H), "w2_weight": d.plain(E, H, I), "num_experts": E, "top_k": K},
        "moe_output": torch.zeros(T, H, dtype=torch.bfloat16),
    }


def _mono(d: Draws) -> Operands:
    return {
        **{"activations_in": d.plain(T, H), "router_logits": d.plain(T, E)},
        **{"expert_weights_up": d.e4m3(E, 2 * I, H), "expert_scales_up": d.positive(E, 2 * I // 128, H // 128)},
        **{"expert_weights_down": d.e4m3(E, H, I), "expert_scales_down": d.positive(E, H // 128, I // 128)},
        **{"top_k": K, "out": torch.zeros(T, H, dtype=torch.bfloat16)},
    }


def _padding(d: Draws) -> Operands:
    return {
        **{"gemm1_weights": d.bytes(E, 128, 48), "gemm1_weights_scale": d.exponents(E, 128, 3)},
        **{"gemm2_weights": d.bytes(E, 96, 32), "gemm2_weights_scale": d.exponents(E, 96, 2)},
        **{"hidden_size": 96, "intermediate_size": 64},
    }


def _triton(d: Draws) -> Operands:
    return experts_of(Blocks(E, H, I, "cpu", d.generator), "3.6")


def _triton_layer(d: Draws) -> Operands:
    topk_output = SimpleNamespace(topk_weights=d.gates(), topk_ids=d.ids())
    return {**_x(d), **_triton(d), "topk_output": topk_output, "gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}


def _sglang_mxfp4(d: Draws) -> Operands:
    made = Blocks(E, H, I, "cpu", d.generator).interleaved("0.7")
    scales = made["quant_scales"]
    info = {
        **{"w13_weight": made["fc1_expert_weights"], "w2_weight": made["fc2_expert_weights"]},
        **{"w13_weight_scale": scales[0], "w2_weight_scale": scales[1]},
        **{"w13_bias": made["fc1_expert_biases"], "w2_bias": made["fc2_expert_biases"]},
        **dict.fromkeys(("swiglu_alpha", "swiglu_beta", "swiglu_limit", "padded_hidden")),
    }
    topk_output = SimpleNamespace(topk_weights=d.gates(), topk_ids=d.ids())
    return {
        **_x(d),
        **{"topk_output": topk_output, "quant_info": SimpleNamespace(**info), "runner_config": SimpleNamespace()},
        "output": torch.zeros(T, H, dtype=torch.bfloat16),
    }


def _deepseek(d: Draws) -> Operands:
    return {
        **{"scores": d.plain(T, 8, dtype=torch.float32), "bias": d.plain(8, dtype=torch.float32)},
        **{"n_group": 2, "topk_group": 1, "topk": K, "routed_scaling_factor": 2.5},
        **{"topk_values": torch.zeros(T, K), "topk_indices": torch.zeros(T, K, dtype=torch.int32)},
        "routing_replay_out": torch.zeros(T, K, dtype=torch.int16),
    }


def _hash(d: Draws) -> Operands:
    table = torch.rand((11, E), generator=d.generator).topk(K).indices.int()
    tokens = torch.randint(0, 11, (T,), generator=d.generator)
    return {"router_logits": d.plain(T, E, dtype=torch.float32), "input_ids": tokens, "tid2eid": table} | {
        "num_fused_shared_experts": 1,
        "routed_scaling_factor": 2.5,
    }


def _fused_experts(d: Draws) -> Operands:
    config = SimpleNamespace(activation="silu", is_gated=True, inplace=False, no_combine=False)
    return {
        **{"hidden_states": d.plain(T, H), "w1": d.plain(E, 2 * I, H), "w2": d.plain(E, H, I)},
        **{"topk_output": (d.gates(), d.ids(), None), "moe_runner_config": config},
        **{"b1": d.plain(E, 2 * I), "b2": d.plain(E, H)},
    }


def _dense(d: Draws) -> Operands:
    a, b = d.e4m3(T, H), d.e4m3(H, H)
    return {
        **{"a": a, "b": b.t(), "a_descale": d.exponents(T, H // 32), "b_descale": d.exponents(H, H // 32).t()},
        "out": torch.zeros(T, H, dtype=torch.bfloat16),
    }


def _x(d: Draws) -> Operands:
    return {"hidden_states": d.plain(T, H)}


def _e4m3_x(d: Draws) -> Operands:
    return {"hidden_states": d.e4m3(T, H)}


def _output() -> Operands:
    return {"output": torch.zeros(T, H, dtype=torch.bfloat16)}


Maker = Callable[[Draws], Operands]


def _both_forms(name: str, *parts: Maker) -> dict[str, Maker]:
    """Returns the makers of a trtllm_*_moe by logits and of its routed form."""

    def maker(call: str, routing: Maker) -> tuple[str, Maker]:
        def make(d: Draws) -> Operands:
            made = {operand: value for part in (routing, *parts) for operand, value in part(d).items()}
            # Two of the routed forms have no routing_bias.
            return {
                operand: made[operand]
                for operand in inspect.signature(getattr(oxmoe, call)).parameters
                if operand in made
            }

        return call, make

    return dict((maker(f"trtllm_{name}_moe", _by_logits), maker(f"trtllm_{name}_routed_moe", _by_ids)))


def _layer(d: Draws) -> Operands:
    return {**_sizes(), **_output()}


def _fp8_block_layer(d: Draws) -> Operands:
    return {**_e4m3_x(d), "hidden_states_scale": d.positive(H // 128, T), **_fp8_block(d), **_layer(d)}


def _fp8_tensor_layer(d: Draws) -> Operands:
    return {**_e4m3_x(d), **_fp8_tensor(d), **_layer(d), "use_routing_scales_on_input": False}


def _fp8_channels_layer(d: Draws) -> Operands:
    scale = {"hidden_states_scale": d.positive(T, 1)}
    return {**_e4m3_x(d), **scale, **_fp8_channels(d), **_sizes(), "use_routing_scales_on_input": False}


MAKERS: dict[str, Maker] = {
    "cute_dsl_fused_moe": _cute_dsl,
    "cute_dsl_fused_moe_nvfp4": _cute_dsl,
    "cute_dsl_fused_moe_bf16": _cute_dsl_bf16,
    "cutlass_fused_moe": _cutlass,
    "prepare_cutlass_fused_moe": _cutlass_nvfp4,
    "cutlass_fused_moe_workspace_size": lambda d: {
        **{"max_num_tokens": T, "hidden_size": H, "intermediate_size": I, "num_experts_total": E, "top_k": K},
        **{"x_dtype": torch.bfloat16, "weight_dtype": torch.bfloat16},
    },
    "fused_experts": _fused_experts,
    "fused_topk_deepseek": _deepseek,
    "hash_topk": _hash,
    "mono_moe": _mono,
    "mm_mxfp8": _dense,
    "mxfp8_linear": lambda d: {
        **{"input": d.plain(T, H), "weight": d.e4m3(H, H), "weight_scale": d.exponents(H, H // 32)},
        "bias": d.plain(H),
    },
    "mxfp8_quantize": lambda d: {"input": d.plain(T, H)},
    "mxfp8_dequantize_host": lambda d: dict(
        zip(("input", "scale_tensor"), oxmoe.mxfp8_quantize(d.plain(T, H)), strict=True)
    ),
    "pack_topk": lambda d: {"topk_weights": d.gates(), "topk_ids": d.ids()},
    "unpack_topk": lambda d: {"packed": oxmoe.pack_topk(d.gates(), d.ids())},
    "pad_trtllm_moe_weights": _padding,
    "routing": lambda d: {"logits": d.plain(T, E, dtype=torch.float32), "n_expts_act": K},
    "trtllm_fused_moe_workspace_size": lambda d: {
        **{"max_num_tokens": T, "hidden_size": H, "intermediate_size": I, "num_experts": E, "top_k": K},
        "quant_mode": "nvfp4",
    },
    "prepare_trtllm_bf16_moe": _bf16,
    "prepare_trtllm_fp4_block_scale_moe": _nvfp4,
    "prepare_trtllm_fp8_block_scale_moe": _fp8_block,
    "prepare_trtllm_fp8_per_channel_scale_moe": _fp8_channels,
    "prepare_trtllm_fp8_per_tensor_scale_moe": _fp8_tensor,
    "prepare_trtllm_mxint4_block_scale_moe": _int4,
    "prepare_triton_kernel_experts": lambda d: {**_triton(d), "gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0},
    "triton_kernel_fused_experts_with_bias": _triton_layer,
    "fused_experts_flashinfer_mxfp4": _sglang_mxfp4,
    **_both_forms("bf16", _x, _bf16, _layer),
    **_both_forms("fp8_block_scale", _fp8_block_layer),
    **_both_forms("fp8_per_tensor_scale", _fp8_tensor_layer),
    **_both_forms("fp8_per_channel_scale", _fp8_channels_layer),
    **_both_forms("fp4_block_scale", _nvfp4_tokens, _nvfp4, _layer),
    **_both_forms("mxint4_block_scale", _int4_layer),
}
