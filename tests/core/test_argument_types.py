"""An argument of a wrong type is an error whose text names the argument, for every argument of every builtin and of
every public function that is written in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

import oxmoe
import public_calls
from oxmoe import ExpertWeights, _oxmoe
from oxmoe.allreduce.fusion import _Operands
from oxmoe.operands import named_arguments

E, K, H, T = 4, 2, 128, 3
BYTES, E4M3 = torch.uint8, torch.float8_e4m3fn


def plain(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def bf16_experts() -> ExpertWeights:
    return ExpertWeights.bf16(plain(E, 2 * H, H), plain(E, H, H))


def biases() -> dict[str, Any]:
    return {"b13": plain(E, 2 * H), "b2": plain(E, H)}


def chosen() -> dict[str, Any]:
    return {"topk_weights": torch.zeros(T, K), "topk_ids": torch.zeros(T, K, dtype=torch.int32)}


def matrices() -> dict[str, Any]:
    return {"w13": plain(E, 2 * H, H), "w2": plain(E, H, H)}


def codes_of(dtype: torch.dtype, scale: torch.dtype, columns: int, rows_of_scales: int, group: int) -> dict[str, Any]:
    return {
        "w13": plain(E, 2 * H, columns, dtype=BYTES).view(dtype),
        "w2": plain(E, H, columns, dtype=BYTES).view(dtype),
        "w13_scale": plain(E, 2 * H // rows_of_scales, H // group, dtype=scale),
        "w2_scale": plain(E, H // rows_of_scales, H // group, dtype=scale),
    }


def fp8_tensor(**more: Any) -> dict[str, Any]:
    scales = {"w13_scale": torch.ones(E), "w2_scale": torch.ones(E)}
    return {**codes_of(E4M3, torch.float32, H, 128, 128), **scales, **more}


def fp8_experts() -> ExpertWeights:
    return ExpertWeights.fp8_block(**codes_of(E4M3, torch.float32, H, 128, 128))


def e4m3(*shape: int) -> dict[str, Any]:
    return {"x": plain(*shape, dtype=BYTES).view(E4M3), "x_scale": torch.ones(*shape[:-1], 1)}


def packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _oxmoe.pack_mxfp4(plain(E, 64, 32, dtype=BYTES), plain(E, 64, 2, dtype=BYTES))


def operands() -> SimpleNamespace:
    """Returns the operands of an all-reduce with residual and norm."""
    x = plain(T, H)
    outputs = {"residual_out": x.clone(), "norm_out": x.clone()}
    given = {"input": x, "pattern": 1, "residual_in": x, "rms_gamma": plain(H), "rms_eps": 1e-6, "weight_bias": 0.0}
    return SimpleNamespace(**{**dict.fromkeys(get_type_hints(_Operands)), **given, **outputs})


MX = codes_of(BYTES, BYTES, H // 2, 1, 32)
GLOBAL = {"w13_global_scale": torch.ones(E), "w2_global_scale": torch.ones(E)}
ROUNDED = {"input_global_scale": torch.ones(1), "a2_global_scale": torch.ones(1)}
SF, DENSE = plain(T, H // 32, dtype=BYTES), plain(H, H, dtype=BYTES).view(E4M3)

HELD = bf16_experts()

# A right call of each builtin, with every argument whose type can be wrong.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "bf16": (ExpertWeights.bf16, lambda: {**matrices(), **biases(), "limit": 7.0}),
    "f16": (
        ExpertWeights.f16,
        lambda: {n: t.half() for n, t in {**matrices(), **biases()}.items()} | {"limit": 7.0},
    ),
    "f32": (
        ExpertWeights.f32,
        lambda: {n: t.float() for n, t in {**matrices(), **biases()}.items()} | {"limit": 7.0},
    ),
    "mxfp4": (ExpertWeights.mxfp4, lambda: {**MX, **biases(), "limit": 7.0}),
    "mxfp8": (ExpertWeights.mxfp8, lambda: {**codes_of(E4M3, BYTES, H, 1, 32), **biases(), "limit": 7.0}),
    "fp8_block": (
        ExpertWeights.fp8_block,
        lambda: {**codes_of(E4M3, torch.float32, H, 128, 128), **biases(), "limit": 7.0},
    ),
    "fp8_tensor": (ExpertWeights.fp8_tensor, lambda: fp8_tensor(**biases(), limit=7.0)),
    "fp8_tensor, static": (
        ExpertWeights.fp8_tensor,
        lambda: fp8_tensor(a13_scale=torch.ones(1), a2_scale=torch.ones(1)),
    ),
    "nvfp4": (
        ExpertWeights.nvfp4,
        lambda: {**codes_of(BYTES, BYTES, H // 2, 1, 16), **GLOBAL, **ROUNDED, **biases(), "limit": 7.0},
    ),
    "int4": (
        ExpertWeights.int4,
        lambda: {
            **codes_of(BYTES, torch.bfloat16, H // 2, 1, 32),
            **{"w13_zeros": torch.full((E, 2 * H, H // 32), 8, dtype=BYTES)},
            **{"w2_zeros": torch.full((E, H, H // 32), 8, dtype=BYTES), **biases(), "limit": 7.0},
        },
    ),
    "moe": (_oxmoe.moe, lambda: {"x": plain(T, H), "weights": bf16_experts(), **chosen(), "out": plain(T, H)}),
    "moe, workspace": (
        _oxmoe.moe,
        lambda: {"x": plain(T, H), "weights": bf16_experts(), **chosen(), "workspace": plain(1 << 20, dtype=BYTES)},
    ),
    "moe, e4m3 tokens": (_oxmoe.moe, lambda: {**e4m3(T, H), "weights": fp8_experts(), **chosen()}),
    "moe, from logits": (
        _oxmoe.moe,
        lambda: {
            **{"x": plain(T, H), "weights": bf16_experts(), "router_logits": torch.zeros(T, E), "top_k": K},
            **{"correction_bias": torch.zeros(E), "num_token_non_padded": torch.tensor(T, dtype=torch.int32)},
            "scoring_func": "sigmoid",
        },
    ),
    "moe_tensors": (_oxmoe.moe_tensors, lambda: {"x": plain(T, H), **matrices(), **chosen(), **biases()}),
    "moe_tensors, mxfp4": (
        _oxmoe.moe_tensors,
        lambda: {"x": plain(T, H), **MX, **chosen(), "format": "mxfp4"},
    ),
    "moe_masked": (
        _oxmoe.moe_masked,
        lambda: {
            **{"x": plain(E, T, H), "weights": bf16_experts(), "masked_m": torch.zeros(E, dtype=torch.int32)},
            **{"out": plain(E, T, H), "workspace": plain(1 << 20, dtype=BYTES)},
        },
    ),
    "moe_contiguous": (
        _oxmoe.moe_contiguous,
        lambda: {
            **{"x": plain(T, H), "weights": bf16_experts(), "counts": torch.zeros(E, dtype=torch.int32)},
            **{"out": plain(T, H), "workspace": plain(1 << 20, dtype=BYTES)},
        },
    ),
    "moe_masked, e4m3 tokens": (
        _oxmoe.moe_masked,
        lambda: {**e4m3(E, T, H), "weights": fp8_experts(), "masked_m": torch.zeros(E, dtype=torch.int32)},
    ),
    "moe_contiguous, e4m3 tokens": (
        _oxmoe.moe_contiguous,
        lambda: {**e4m3(T, H), "weights": fp8_experts(), "counts": torch.zeros(E, dtype=torch.int32)},
    ),
    "stats": (_oxmoe.stats, lambda: {"reset": False}),
    "experts_of": (_oxmoe.experts_of, lambda: {"handle": HELD.handle}),
    "workspace_bytes": (
        _oxmoe.workspace_bytes,
        lambda: {"weights": bf16_experts(), "num_tokens": T, "top_k": K},
    ),
    "shape_workspace_bytes": (
        _oxmoe.shape_workspace_bytes,
        lambda: (
            {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": H, "num_tokens": T}
            | {"format": "bf16", "gated": True}
        ),
    ),
    "masked_workspace_bytes": (
        _oxmoe.masked_workspace_bytes,
        lambda: {"weights": bf16_experts(), "num_rows": T},
    ),
    "topk": (
        _oxmoe.topk,
        lambda: {
            **{"router_logits": torch.zeros(T, E), "top_k": K, "correction_bias": torch.zeros(E), **chosen()},
            **{"num_token_non_padded": torch.tensor(T, dtype=torch.int32), "scoring_func": "sigmoid"},
        },
    ),
    "sort_by_expert": (_oxmoe.sort_by_expert, lambda: {"topk_ids": chosen()["topk_ids"], "num_experts": E}),
    "routing_tables": (_oxmoe.routing_tables, lambda: {**chosen(), "num_experts": E}),
    "quantize_fp8": (_oxmoe.quantize_fp8, lambda: {"x": plain(T, H), "group": 128, "eps": 1e-10}),
    "quantize_mxfp8": (_oxmoe.quantize_mxfp8, lambda: {"x": plain(T, H)}),
    "dequantize_mxfp8": (
        _oxmoe.dequantize_mxfp8,
        lambda: dict(zip(("codes", "scales"), _oxmoe.quantize_mxfp8(plain(T, H)), strict=True)),
    ),
    "mm_mxfp8": (
        _oxmoe.mm_mxfp8,
        lambda: {
            **{"a": DENSE[:T], "b": DENSE.t(), "a_descale": SF, "b_descale": plain(H // 32, H, dtype=BYTES)},
            "out": plain(T, H),
        },
    ),
    "quantize_mxfp4": (_oxmoe.quantize_mxfp4, lambda: {"x": plain(T, H)}),
    "dequantize_mxfp4": (_oxmoe.dequantize_mxfp4, lambda: {"codes": MX["w13"], "scales": MX["w13_scale"]}),
    "swizzle_hopper_mxfp4": (
        _oxmoe.swizzle_hopper_mxfp4,
        lambda: {"codes": MX["w13"], "scales": MX["w13_scale"]},
    ),
    "unswizzle_hopper_mxfp4": (
        _oxmoe.unswizzle_hopper_mxfp4,
        lambda: {
            **dict(
                zip(("values", "scales"), _oxmoe.swizzle_hopper_mxfp4(MX["w13"], MX["w13_scale"]), strict=True),
            ),
            **{"rows": 2 * H, "columns": H},
        },
    ),
    "interleave_sm90_mxfp4": (
        _oxmoe.interleave_sm90_mxfp4,
        lambda: {"codes": MX["w13"], "scales": MX["w13_scale"]},
    ),
    "deinterleave_sm90_mxfp4": (
        _oxmoe.deinterleave_sm90_mxfp4,
        lambda: dict(
            zip(("codes", "scales"), _oxmoe.interleave_sm90_mxfp4(MX["w13"], MX["w13_scale"]), strict=True),
        ),
    ),
    "pack_mxfp4": (_oxmoe.pack_mxfp4, lambda: {"codes": MX["w13"], "scales": MX["w13_scale"]}),
    "unpack_mxfp4": (
        _oxmoe.unpack_mxfp4,
        lambda: {
            **dict(zip(("codes", "scales", "expert_scales"), packed(), strict=True)),
            **{"rows": 64, "columns": 64},
        },
    ),
    "quantize_nvfp4": (
        _oxmoe.quantize_nvfp4,
        lambda: {"x": plain(1, T, H), "global_scale": torch.ones(1), "masked_m": torch.ones(1, dtype=torch.int32)},
    ),
    "quantize_rows_e4m3": (_oxmoe.quantize_rows_e4m3, lambda: {"x": plain(T, H)}),
    "explain": (
        _oxmoe.explain,
        lambda: {
            **{"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": H, "num_tokens": T},
            "arch": "sm_90",
        },
    ),
    "allreduce_unsupported": (_oxmoe.allreduce_unsupported, lambda: {"device": 0, "world_size": 2}),
    "allreduce_shape": (_oxmoe.allreduce_shape, lambda: {"word": _oxmoe.allreduce_message(operands())[0]}),
    "allreduce_bytes": (
        _oxmoe.allreduce_bytes,
        lambda: {"world_size": 2, "max_token_num": T, "hidden_dim": H, "dtype": "bfloat16"},
    ),
    "allreduce_finish": (
        _oxmoe.allreduce_finish,
        lambda: {"operands": operands(), "messages": [plain(T, H), plain(T, H)]},
    ),
}
# `operands` may be any object: its attributes are read.
NOT_READ = {
    "allreduce_finish": {"operands"},
}
ARGUMENTS = [
    (name, argument)
    for name, (function, _) in CALLS.items()
    for argument in inspect.signature(function).parameters
    if argument not in NOT_READ.get(name, ())
]


def builtins() -> set[str]:
    constructors = {name for name, value in vars(ExpertWeights).items() if isinstance(value, staticmethod)}
    return constructors | {name for name, value in vars(_oxmoe).items() if inspect.isbuiltin(value)}


def test_every_builtin_is_here() -> None:
    without_arguments_of_their_own = {"device_info", "allreduce_message"}
    assert {name.split(",")[0] for name in CALLS} | without_arguments_of_their_own == builtins()


@pytest.mark.parametrize("name", CALLS)
def test_right_call(name: str) -> None:
    function, arguments = CALLS[name]
    function(**arguments())


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_wrong_type(name: str, argument: str) -> None:
    function, arguments = CALLS[name]
    # A call refuses an argument of a type that it does not take, whatever the value is.
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
        function(**{**arguments(), argument: object()})
    assert argument in str(raised.value), str(raised.value)


@pytest.mark.parametrize("argument", ["input", "residual_in", "residual_out", "norm_out", "rms_gamma", "rms_eps"])
def test_wrong_attribute_of_allreduce_operands(argument: str) -> None:
    given = operands()
    setattr(given, argument, object())
    with pytest.raises((TypeError, ValueError)) as raised:
        _oxmoe.allreduce_message(given)
    assert argument in str(raised.value), str(raised.value)


@pytest.mark.parametrize("argument", ["device", "world_size", "rank", "bytes", "dtype", "force_oneshot_support"])
def test_wrong_argument_of_allreduce_memory(argument: str) -> None:
    right = {"device": 0, "world_size": 2, "rank": 0, "bytes": 1024, "dtype": "bfloat16"}
    with pytest.raises(TypeError, match=f"^{argument}: "):
        _oxmoe.AllReduceMemory(**{**right, argument: object()})


@pytest.mark.parametrize("number", [2**80, -(2**80)])
def test_numbers_that_fit_no_integer(number: int) -> None:
    with pytest.raises(ValueError, match=r"^num_tokens: "):
        _oxmoe.workspace_bytes(bf16_experts(), number, K)
    with pytest.raises(ValueError, match=r"^world_size: "):
        _oxmoe.allreduce_bytes(number, T, H, "bfloat16")


# Functions written in Python: `oxmoe.__all__`, with the calls of public_calls.py.

# An argument -> the name that `moe`, `ExpertWeights`, the quantiser and mm_mxfp8 have for it in their errors.
OWN_NAMES = {
    **{"output": "out", "moe_output": "out", "output_dtype": "out_dtype", "n_rows": "num_token_non_padded"},
    **{"input": "x", "hidden_states": "x", "activations_in": "x", "routing_logits": "router_logits"},
    **{"token_selected_experts": "topk_ids", "token_final_scales": "topk_weights"},
    **{"gemm1_bias": "b13", "fc1_expert_biases": "b13", "gemm2_bias": "b2", "fc2_expert_biases": "b2"},
    **{"gemm1_weights": "w13", "gemm1_weights_scale": "w13_scale"},
    **{"gemm2_weights": "w2", "gemm2_weights_scale": "w2_scale", "scale_tensor": "scales"},
}
# Arguments without a meaning in oxmoe.
WITHOUT_MEANING = {
    *("enable_pdl", "launch_with_pdl", "tune_max_num_tokens", "use_fused_finalize", "aux_stream"),
    *("profile_ids", "cluster_rank", "scratchpad", "intermediate_buffer", "activation", "global_num_experts"),
}
ROUTING = {"routing_bias", "n_group", "topk_group", "routed_scaling_factor", "routing_method_type"}
WEIGHTS_OF_A_SIZE = {"gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale", "weight_layout"}
# Arguments that these calls do not read: the format, the routing or the other operands say what they would.
UNREAD: dict[str, set[str]] = {
    "cutlass_fused_moe_workspace_size": {"x_dtype", "output_dtype", "device"},
    "trtllm_fused_moe_workspace_size": WEIGHTS_OF_A_SIZE | {"device", "tactic"},
    "cute_dsl_fused_moe_bf16": {"tactic"},
    "prepare_cutlass_fused_moe": {"hidden_size"},
    "triton_kernel_fused_experts_with_bias": {"gate_scal", "gather_indx", "scatter_indx", "n_expts_act"},
    # Any object with some of the fields of SGLang's configuration.
    "fused_experts": {"moe_runner_config"},
    "fused_experts_flashinfer_mxfp4": {"runner_config"},
    **{name: ROUTING for name in public_calls.MAKERS if name.endswith("_routed_moe")},
}
PUBLIC = [
    (name, argument)
    for name in public_calls.MAKERS
    for argument, parameter in inspect.signature(getattr(oxmoe, name)).parameters.items()
    # Everything is true or false.
    if "bool" not in str(parameter.annotation)
]


def public_operands(name: str) -> dict[str, Any]:
    return public_calls.MAKERS[name](public_calls.Draws(torch.Generator().manual_seed(7)))


def test_every_public_function_is_here() -> None:
    functions = {name for name in oxmoe.__all__ if callable(getattr(oxmoe, name))}
    classes = {name for name in functions if isinstance(getattr(oxmoe, name), type)}
    assert functions - classes - builtins() - public_calls.OF_RANKS <= set(public_calls.MAKERS)
    assert set(public_calls.MAKERS) <= functions and not set(public_calls.MAKERS) & public_calls.OF_RANKS
    assert functions >= public_calls.OF_RANKS


@pytest.mark.parametrize("name", public_calls.MAKERS)
def test_right_call_of_a_public_function(name: str) -> None:
    getattr(oxmoe, name)(**public_operands(name))


@pytest.mark.parametrize(("name", "argument"), PUBLIC)
def test_wrong_type_in_a_public_function(name: str, argument: str) -> None:
    operands = {**public_operands(name), argument: object()}
    if argument in WITHOUT_MEANING | UNREAD.get(name, set()):
        getattr(oxmoe, name)(**operands)
        return
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
        getattr(oxmoe, name)(**operands)
    words = str(raised.value)
    own = "codes" if (name, argument) == ("mxfp8_dequantize_host", "input") else OWN_NAMES.get(argument, argument)
    assert argument in words or words.startswith(f"{own}: "), words


def test_a_wrong_argument_is_told_with_its_annotation() -> None:
    operands = public_operands("trtllm_bf16_moe")
    with pytest.raises(TypeError, match=r"^gemm1_alpha: expected Tensor \| None, got list"):
        oxmoe.trtllm_bf16_moe(**{**operands, "gemm1_alpha": [1.0]})
    with pytest.raises(TypeError, match=r"^local_num_experts: expected int, got str"):
        oxmoe.trtllm_bf16_moe(**{**operands, "local_num_experts": "4"})
    with pytest.raises(TypeError, match=r"^weight_layout: expected int, got float"):
        oxmoe.trtllm_bf16_moe(**{**operands, "weight_layout": float("inf")})
    # Python's own words name arguments that are missing or unknown.
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'hidden_states'"):
        oxmoe.trtllm_bf16_moe(**{name: value for name, value in operands.items() if name != "hidden_states"})
    with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
        oxmoe.trtllm_bf16_moe(**operands, unknown=1)

    # An array is to blame if nothing else is.
    array = np.ones(4, dtype=np.float32)
    with pytest.raises(TypeError, match=r"^gemm1_alpha: expected Tensor \| None, got ndarray"):
        oxmoe.trtllm_bf16_moe(**{**operands, "gemm1_alpha": array})
    with pytest.raises(TypeError, match=r"^local_num_experts: expected int, got str"):
        oxmoe.trtllm_bf16_moe(**{**operands, "gemm1_alpha": array, "local_num_experts": "4"})


def test_an_error_of_no_argument_stays() -> None:
    @named_arguments
    def call(number: int, other: Any = None) -> int:
        return number + other

    assert call(1, 2) == 3
    with pytest.raises(TypeError, match="unsupported operand"):
        call(1, "x")
    with pytest.raises(TypeError, match=r"^number: expected int, got str"):
        call("1", 2)
