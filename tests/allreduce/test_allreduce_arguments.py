"""Arguments of allreduce_fusion and of its workspace in one process: types, numbers, operands, sizes, names."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import oxmoe
from fake_cuda.tensors import Tensor as CudaTensor
from oxmoe import AllReduceFusionPattern as Pattern
from ranks import alone, of_two, raised


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_token_num", "16"),
        ("max_token_num", 16.0),
        ("hidden_dim", [64]),
        ("world_size", "2"),
        ("world_size", 2.0),
        ("rank", "0"),
        ("rank", 0.0),
    ],
)
def test_types_that_no_workspace_has(name: str, value: Any) -> None:
    kind, text = of_two(lambda data: [data, data], **{name: value})
    assert (kind, text) == ("TypeError", f"{name}: expected int, got {type(value).__name__}")
    assert of_two(lambda data: [data, data], max_token_num=torch.tensor(4)) == ("nothing", "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("world_size", 0),
        ("max_token_num", 2**64),
        ("max_token_num", -(2**70)),
        ("max_token_num", 2**62),
        ("hidden_dim", 2**64),
        ("deadline", None),
        ("deadline", "5"),
        ("deadline", float("nan")),
        ("device", "cuda:99999999999"),
    ],
)
def test_numbers_that_no_workspace_has(name: str, value: Any) -> None:
    kind, text = of_two(lambda data: [data, data], **{name: value})
    assert kind == "ValueError" and text.startswith(f"{name}: "), (kind, text)


def test_numpy(rng: torch.Generator) -> None:
    x = torch.randn(3, 32, generator=rng)
    workspace = alone(3, 32, torch.float32)
    assert torch.equal(torch.from_numpy(oxmoe.allreduce_fusion(x.numpy(), workspace, 0)), x)
    workspace.destroy()


def test_operands_are_named() -> None:
    workspace = alone(4, 64)
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    gamma = torch.ones(64, dtype=torch.bfloat16)
    good = {"residual_in": x, "rms_gamma": gamma, "residual_out": torch.empty_like(x), "norm_out": torch.empty_like(x)}
    fp8 = torch.empty(4, 64, dtype=torch.float8_e4m3fn)
    plain = {**good, "norm_out": None}
    packed = torch.empty_strided((4, 1), (1, 4), dtype=torch.int32)
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("pattern: expected one of", 15, good),
        ("pattern: expected one of", -1, good),
        *((f"{name}: pattern kARResidualRMSNorm needs it", 1, {**good, name: None}) for name in good),
        ("quant_out: pattern kARResidualRMSNorm neither reads nor writes it", 1, {**good, "quant_out": fp8}),
        ("output: pattern kARResidualRMSNorm neither", 1, {**good, "output": torch.empty_like(x)}),
        ("norm_out: pattern kARResidualRMSNormFP8Quant neither", 2, {**good, "quant_out": fp8, "scale_factor": 1.0}),
        ("scale_factor: pattern kARResidualRMSNormFP8Quant needs it", 2, {**plain, "quant_out": fp8}),
        ("scale_factor: expected a number", 2, {**plain, "quant_out": fp8, "scale_factor": torch.ones(2)}),
        ("quant_out: expected dtype", 2, {**plain, "quant_out": x.clone(), "scale_factor": 1.0}),
        ("scale_out: pattern kARResidualRMSNormFP4Quant needs it", 3, {**plain, "quant_out": fp8, "scale_factor": 1.0}),
        (
            "scale_out: expected 512 bytes",
            3,
            {
                **plain,
                "quant_out": torch.empty(4, 32, dtype=torch.uint8),
                "scale_out": torch.empty(4, 4, dtype=torch.uint8),
                "scale_factor": 1.0,
            },
        ),
        (
            "layout_code: expected 0",
            3,
            {
                **plain,
                "quant_out": torch.empty(4, 32, dtype=torch.uint8),
                "scale_out": torch.empty(4, 4, dtype=torch.uint8),
                "scale_factor": 1.0,
                "layout_code": 3,
            },
        ),
        ("block_quant_group_size: pattern", 8, {**plain, "quant_out": fp8, "scale_out": packed}),
        (
            "block_quant_group_size: expected a divisor",
            8,
            {**plain, "quant_out": fp8, "scale_out": packed, "block_quant_group_size": 24},
        ),
        (
            "scale_out: expected int32 of shape [4, 2] and strides [1, 4]",
            8,
            {**plain, "quant_out": fp8, "scale_out": packed, "block_quant_group_size": 8},
        ),
        ("scale_out: expected dtype float32", 10, {**plain, "quant_out": fp8, "scale_out": packed}),
        ("residual_in: dimension 0", 1, {**good, "residual_in": x[:3]}),
        ("rms_gamma: expected dtype bfloat16", 1, {**good, "rms_gamma": gamma.float()}),
        ("norm_out: overlaps residual_out", 1, {**good, "norm_out": good["residual_out"]}),
        ("residual_out: is not contiguous", 1, {**good, "residual_out": torch.empty(64, 4, dtype=torch.bfloat16).T}),
        ("expanded_idx_to_permuted_idx: pattern", 7, good),
        (
            "expanded_idx_to_permuted_idx: slot 3",
            7,
            {**good, "expanded_idx_to_permuted_idx": torch.tensor([[0], [1], [-1], [4]], dtype=torch.int32)},
        ),
        ("moe_reduction_device_num_experts: pattern", 6, good),
    ]
    for expected, pattern, operands in cases:
        kind, text = raised(lambda p=pattern, o=operands: oxmoe.allreduce_fusion(x, workspace, p, **o))  # type: ignore[misc]
        assert kind == "ValueError" and text.startswith(expected), (expected, kind, text)
    for expected, wrong in (
        ("input: is not contiguous", torch.ones(64, 4, dtype=torch.bfloat16).T),
        ("input: expected dtype", x.double()),
        ("input: expected a hidden size", torch.ones(4, 60, dtype=torch.bfloat16)),
        ("input: pattern kAllReduce of bfloat16 [5, 64] has 640 bytes", torch.ones(5, 64, dtype=torch.bfloat16)),
    ):
        kind, text = raised(lambda w=wrong: oxmoe.allreduce_fusion(w, workspace, 0))  # type: ignore[misc]
        assert kind == "ValueError" and text.startswith(expected), (expected, kind, text)
    assert raised(lambda: oxmoe.allreduce_fusion(x, None, 0))[0] == "ValueError"  # type: ignore[arg-type]
    # None of these calls harmed the workspace.
    assert torch.equal(oxmoe.allreduce_fusion(x, workspace, 0), x)
    workspace.destroy()
    assert "destroyed" in raised(lambda: oxmoe.allreduce_fusion(x, workspace, 0))[1]


def test_cuda_tensors_are_refused() -> None:
    workspace = alone(4, 64)
    x = CudaTensor((4, 64), "bfloat16")
    operands = {name: CudaTensor((4, 64), "bfloat16") for name in ("residual_in", "residual_out", "norm_out")}
    operands["rms_gamma"] = CudaTensor((64,), "bfloat16")
    kind, text = raised(lambda: oxmoe.allreduce_fusion(x, workspace, 1, **operands))
    assert kind == "NotImplementedError" and text.startswith(
        "input: is on cuda:0; this workspace serves tensors on cpu"
    )
    workspace.destroy()


def test_groups_are_explicit() -> None:
    make = oxmoe.create_allreduce_fusion_workspace
    shape = {"max_token_num": 4, "hidden_dim": 64, "dtype": torch.bfloat16}
    for expected, arguments in (
        ("group: expected a torch ProcessGroup", {"world_size": 2, "rank": 0}),
        ("world_size: is needed", {}),
        ("rank: expected 0 to 1", {"world_size": 2, "rank": 2, "exchange": list}),
        ("group: expected a torch ProcessGroup", {"group": object()}),
        ("exchange: group was given too", {"group": object(), "exchange": list}),
        ("exchange: expected a function", {"exchange": 3, "world_size": 2, "rank": 0}),
        ("comm_backend: expected", {"comm_backend": 3, "world_size": 2, "rank": 0}),
        ("backend: expected", {"backend": "nccl", "world_size": 1, "rank": 0}),
        ("deadline: expected", {"deadline": 0, "world_size": 1, "rank": 0}),
    ):
        kind, text = raised(lambda a=arguments: make(**{**shape, **a}))  # type: ignore[misc]
        assert kind == "ValueError" and text.startswith(expected), (expected, kind, text)
    for name in shape:
        kind, text = raised(lambda n=name: make(world_size=1, rank=0, **{**shape, n: None}))  # type: ignore[misc]
        assert kind == "ValueError" and text.startswith(f"{name}: is needed")
    assert raised(lambda: make(world_size=1, rank=0, **{**shape, "dtype": torch.int32}))[0] == "ValueError"
    kind, text = raised(lambda: make("mnnvl", world_size=1, rank=0, **shape))
    assert kind == "NotImplementedError" and text.startswith('backend: "mnnvl" sums through NVLink multicast')


def test_sizes() -> None:
    from oxmoe.allreduce import workspace_bytes

    workspace = alone(16, 128)
    assert workspace.is_buffer_size_sufficient(1, 16, 128, torch.bfloat16)
    assert workspace.is_buffer_size_sufficient(1, 8, 128, torch.float32, use_oneshot=True)
    for arguments in ((2, 1, 128, torch.bfloat16), (1, 17, 128, torch.bfloat16), (1, 16, 128, torch.float32)):
        with pytest.warns(UserWarning, match="not enough"):
            assert not workspace.is_buffer_size_sufficient(*arguments)
    assert workspace.nbytes == workspace_bytes(1, 16, 128, torch.bfloat16) == 0
    assert workspace_bytes(4, 16, 128, torch.float32) == 3 * 16 * 128 * 4
    # A rank has control words and two slots. Above the crossover, four ranks also have two scatter buffers and the
    # sums.
    assert workspace_bytes(2, 16, 128, torch.bfloat16, device="cuda") == 1024 + 2 * 2 * 4096
    large = 1024 * 1024 * 2
    assert workspace_bytes(4, 1024, 1024, torch.bfloat16, device="cuda") == 1024 + 2 * 4 * (600 << 10) + 3 * large
    everything = workspace_bytes(4, 1024, 1024, torch.bfloat16, device="cuda", force_oneshot_support=True)
    assert everything == 1024 + 2 * 4 * large + 3 * large
    workspace.destroy()
    forgotten = alone(4, 64)
    with pytest.warns(ResourceWarning, match="never destroyed"):
        del forgotten


def test_names_values_and_signatures() -> None:
    values = {
        "kAllReduce": 0,
        "kARResidualRMSNorm": 1,
        "kARResidualRMSNormFP8Quant": 2,
        "kARResidualRMSNormFP4Quant": 3,
        "kARResidualRMSNormOutFP8Quant": 4,
        "kARResidualRMSNormOutFP4Quant": 5,
        "kMoEReductionARResidualRMSNorm": 6,
        "kMoEFinalizeARResidualRMSNorm": 7,
        "kARResidualRMSNormPerTokenGroupFP8PackedQuant": 8,
        "kARResidualRMSNormOutPerTokenGroupFP8PackedQuant": 9,
        "kARResidualRMSNormDynamicFP8Quant": 10,
        "kARResidualRMSNormOutDynamicFP8Quant": 11,
        "kMoEFinalizeARResidualRMSNormFP8Quant": 12,
        "kARResidualRMSNormMXFP8Quant": 13,
        "kARResidualRMSNormOutMXFP8Quant": 14,
    }
    assert {p.name: p.value for p in Pattern} == values
    assert {p.name: p.value for p in oxmoe.QuantizationSFLayout} == {
        "SWIZZLED_128x4": 0,
        "SWIZZLED_8x4": 1,
        "LINEAR": 2,
    }
    # SGLang looks for these parameters, and the order of arguments is flashinfer's.
    assert {"group", "comm_backend"} <= set(inspect.signature(oxmoe.create_allreduce_fusion_workspace).parameters)
    names = list(inspect.signature(oxmoe.allreduce_fusion).parameters)
    assert names[:5] == ["input", "workspace", "pattern", "launch_with_pdl", "trigger_completion_at_end"]
    assert names[5:10] == ["output", "residual_out", "norm_out", "quant_out", "scale_out"]
    for function in vars(oxmoe._oxmoe).values():
        if callable(function) and getattr(function, "__name__", "").startswith("allreduce"):
            assert inspect.signature(function)
    for name in ("is_buffer_size_sufficient", "destroy"):
        assert inspect.signature(getattr(oxmoe.AllReduceFusionWorkspace, name))
