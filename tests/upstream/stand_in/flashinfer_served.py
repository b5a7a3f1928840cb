"""The names that flashinfer's tests get from oxmoe: flashinfer's name, and oxmoe's function in flashinfer's form."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from typing import Any

import flashinfer_layouts
import pytest
import torch

import oxmoe
import oxmoe.int4
import oxmoe.nvfp4
import oxmoe.quantize
from oxmoe import AllReduceFusionPattern as _Pattern
from oxmoe.allreduce import trtllm
from oxmoe.peers import flashinfer_hopper
from oxmoe.peers.flashinfer_cutlass_formats import FP32_MAX, situ_options

# The GPU's capability, which tests ask for before they call. The plug-in sets it for each test file.
capability = (9, 0)


def get_compute_capability(device: Any = None) -> tuple[int, int]:
    return capability


class ActivationType(enum.IntEnum):
    Gelu, Relu, Silu, Swiglu, Geglu, SwigluBias, Relu2, SwigluStep, GegluTanh, Identity, Situ, InvalidType = range(12)
    ClampedRelu2, PowLU = 12, 13

    @property
    def is_gated(self) -> bool:
        return self.name in ("Swiglu", "Geglu", "SwigluBias", "SwigluStep", "GegluTanh", "Situ", "PowLU")


class RoutingMethodType(enum.IntEnum):
    (Default, Renormalize, DeepSeekV3, Llama4, RenormalizeNaive, TopK, SigmoidRenorm, MiniMax2, Sigmoid) = range(9)
    TopKSigmoid, Unspecified = 9, 10


class Fp8QuantizationType(enum.IntEnum):
    NoneFp8, DeepSeekFp8, MxFp8, PerTensorFp8 = range(4)


class WeightLayout(enum.IntEnum):
    MajorK, MajorMn, BlockMajorK = range(3)


class MmMxfp8:
    """flashinfer's decorated function, which can be asked for its backends."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return oxmoe.mm_mxfp8(*args, **kwargs)

    def is_backend_supported(self, backend: str, compute_capability: int | None = None) -> bool:
        return backend in ("auto", "cutlass")

    def is_compute_capability_supported(self, compute_capability: int) -> bool:
        return compute_capability == 90


def _interleaved(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return oxmoe.quantize.interleave_sm90_mxfp4(codes.contiguous(), scales.contiguous(), flashinfer="0.7")


def interleave_weights(weight: torch.Tensor, quant_type: str = "fp4") -> torch.Tensor:
    if quant_type == "int4":
        codes = weight.contiguous() ^ 0x88
        scales = torch.zeros((*codes.shape[:-1], codes.shape[-1] // 64), dtype=torch.bfloat16, device=codes.device)
        return oxmoe.int4.interleave_sm90(codes, scales)[0]
    if quant_type != "fp4":
        pytest.skip(f"not served: interleave_moe_weights_for_sm90_mixed_gemm({quant_type!r})")
    codes = weight.view(torch.uint8)
    return _interleaved(codes, codes.new_zeros((*codes.shape[:-1], codes.shape[-1] // 16)))[0]


def interleave_scales(scales: torch.Tensor, group_size: int = 32) -> torch.Tensor:
    if group_size == 128:
        codes = torch.zeros((*scales.shape[:-1], scales.shape[-1] * 64), dtype=torch.uint8, device=scales.device)
        return oxmoe.int4.interleave_sm90(codes, scales.view(torch.bfloat16))[1].view(scales.dtype)
    scales = scales.view(torch.uint8)
    return _interleaved(scales.new_zeros((*scales.shape[:-1], scales.shape[-1] * 16)), scales)[1]


def _scale_layout(layout: Any) -> dict[str, bool]:
    return {"is_sf_swizzled_layout": int(layout) != 2, "is_sf_8x4_layout": int(layout) == 1}


def mxfp4_quantize(
    a: torch.Tensor, backend: str = "auto", enable_pdl: Any = None, sfLayout: Any = 0, *, batch_invariant: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    options = _scale_layout(sfLayout) | {"backend": backend, "batch_invariant": batch_invariant}
    return oxmoe.nvfp4.fp4_quantize(a, sf_vec_size=32, sf_use_ue8m0=True, **options)


def nvfp4_quantize(
    a: torch.Tensor,
    a_global_sf: torch.Tensor | float,
    sfLayout: Any = 0,
    do_shuffle: bool = False,
    sf_vec_size: int = 16,
    enable_pdl: Any = None,
    backend: str = "auto",
    per_token_activation: bool = False,
    expanded_idx_to_permuted_idx: Any = None,
    batch_invariant: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if do_shuffle or per_token_activation or any(value is not None for value in others.values()):
        pytest.skip("not served: nvfp4_quantize with do_shuffle, per_token_activation or nvfp4_4over6")
    if not isinstance(a_global_sf, torch.Tensor):
        a_global_sf = torch.tensor([a_global_sf], dtype=torch.float32, device=a.device)
    options = _scale_layout(sfLayout) | {"backend": backend, "batch_invariant": batch_invariant}
    return oxmoe.nvfp4.fp4_quantize(a, a_global_sf, sf_vec_size, **options)


def nvfp4_batched_quantize(
    a: torch.Tensor, a_global_sf: torch.Tensor, sf_vec_size: int = 16, **others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    batches = [oxmoe.nvfp4.fp4_quantize(batch, a_global_sf, sf_vec_size) for batch in a]
    return torch.stack([codes for codes, _ in batches]), torch.stack([scales.reshape(-1) for _, scales in batches])


def block_scale_interleave(scales: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    if out is not None:
        return out.copy_(block_scale_interleave(scales))
    if scales.dtype == torch.bfloat16:  # the low bytes, then the high bytes
        halves = scales.contiguous().view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
        made = [block_scale_interleave(half.contiguous()) for half in halves]
        return torch.stack(made, dim=-1).view(torch.bfloat16).flatten()
    plain = scales.view(torch.uint8).view(torch.float8_e4m3fn)
    return oxmoe.nvfp4.swizzle_blockscale(plain).view(torch.uint8).reshape(-1)


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_to_float(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    sf_vec_size: int = 16,
    ufp8_type: int = 1,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
) -> torch.Tensor:
    """Decodes with torch alone, on the CPU: tests measure oxmoe's quantisers with it."""
    codes, scales = codes.cpu().view(torch.uint8), scales.cpu().view(torch.uint8).reshape(-1)
    rows, blocks = codes.numel() // codes.shape[-1], codes.shape[-1] * 2 // sf_vec_size
    if is_sf_swizzled_layout:
        scales = oxmoe.quantize.unswizzle_scales(scales, rows, blocks, "8x4" if is_sf_8x4_layout else "128x4")
    number = torch.exp2(scales.float() - 127) if ufp8_type == 0 else scales.view(torch.float8_e4m3fn).float()
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device="cpu")
    values = table[torch.stack([codes & 15, codes >> 4], -1).long()].reshape(rows, blocks, sf_vec_size)
    values = values * number.reshape(rows, blocks, 1)
    if global_scale is not None:
        values = values * global_scale.cpu().float()
    return values.reshape(*codes.shape[:-1], -1)


def mxfp4_dequantize(codes: torch.Tensor, scales: torch.Tensor, sfLayout: Any = 0) -> torch.Tensor:
    return e2m1_to_float(codes, scales, None, 32, 0, **_scale_layout(sfLayout))


def mxfp4_dequantize_host(weight: torch.Tensor, scale: torch.Tensor, group_size: int = 32) -> torch.Tensor:
    return e2m1_to_float(weight, scale, None, group_size, 0, is_sf_swizzled_layout=False)


def rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, **options: Any) -> torch.Tensor:
    """The reference of the all-reduce's tests, which do not test a call of oxmoe's here."""
    return torch.nn.functional.rms_norm(input.float(), weight.shape, weight.float(), eps).to(input.dtype)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, **options: Any
) -> None:
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(torch.nn.functional.rms_norm(total, weight.shape, 1 + weight.float(), eps))


def allreduce_fusion(input: torch.Tensor, workspace: Any, pattern: int, *args: Any, **kwargs: Any) -> Any:
    """oxmoe refuses a tensor that the pattern neither reads nor writes; flashinfer's tests pass all of them always."""
    if args or pattern in (_Pattern.kMoEReductionARResidualRMSNorm, _Pattern.kMoEFinalizeARResidualRMSNorm):
        return oxmoe.allreduce_fusion(input, workspace, pattern, *args, **kwargs)
    names = ("output", "residual_in", "residual_out", "norm_out", "quant_out", "scale_out", "rms_gamma")
    operands = {name: kwargs.pop(name, None) for name in names}
    operands["quant_out"], operands["scale_out"] = trtllm.quantised_outputs(
        pattern, *input.shape, operands["quant_out"], operands["scale_out"], kwargs.get("layout_code")
    )
    return oxmoe.allreduce_fusion(input, workspace, pattern, **trtllm.read_or_written(pattern, operands), **kwargs)


def moe_finalize_allreduce_fusion(**kwargs: Any) -> None:
    """Calls without quant_out and scale_out, which flashinfer's test passes without a scale and does not look at."""
    oxmoe.trtllm_moe_finalize_allreduce_fusion(**kwargs | {"quant_out": None, "scale_out": None})


def compute_fp4_swizzled_layout_sf_size(total_row: int, total_column: int) -> int:
    """Returns the bytes of scales in tiles of 128 x 4."""
    return -(-total_row // 128) * 128 * (-(-total_column // 4) * 4)


def mpi_barrier() -> None:
    from mpi4py import MPI

    MPI.COMM_WORLD.barrier()


class TorchDistBackend:
    """flashinfer's way to exchange between ranks."""

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def Get_rank(self) -> int:
        return torch.distributed.get_rank(self._group)

    def Get_size(self) -> int:
        return torch.distributed.get_world_size(self._group)

    def allgather(self, data: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.Get_size()
        torch.distributed.all_gather_object(gathered, data, group=self._group)
        return gathered

    def barrier(self) -> None:
        torch.distributed.barrier(group=self._group)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP44Over6Config:
    """A choice between two scales, which oxmoe's quantisers refuse; tests make lists of it."""

    err_mode: Any = None
    err_use_fast_math: bool = False
    e4m3_max: Any = None


def nvfp4_e4m3_max(nvfp4_4over6_config: NVFP44Over6Config | None = None) -> float:
    """Returns the largest scale of a block, which tests take for their own scale of the tensor."""
    return 448.0 if nvfp4_4over6_config is None else float(nvfp4_4over6_config.e4m3_max)


def cute_dsl_activation(activation_type: Any, supported: Any = None, **options: Any) -> tuple[ActivationType, bool]:
    """The activation of the CuTe DSL layers, and whether it has a gate."""
    kind = ActivationType(int(activation_type))
    if kind.name not in ("Swiglu", "GegluTanh", "Relu2", "ClampedRelu2"):
        raise ValueError(f"unsupported activation_type: {kind!r}")
    return kind, kind.is_gated


def check_situ(activation: Any, situ_beta: float | None, situ_linear_beta: float | None) -> None:
    """The checks of the numbers of SiTU, in oxmoe's words."""
    situ_options(ActivationType(int(activation)).name, situ_beta, situ_linear_beta, (1.0, 0.0, FP32_MAX))


class LibraryError(Exception):
    """An error of a library of NVIDIA's, which tests catch."""


class AutoTuner:
    """flashinfer's search for tactics, whose results tests throw away between calls."""

    @classmethod
    def get(cls) -> AutoTuner:
        return cls()

    def clear_cache(self) -> None:
        pass

    def choose_one(self, *args: Any, **kwargs: Any) -> Any:
        """Tests put a choice of their own in its place. No call of oxmoe's asks for a tactic."""
        raise AssertionError("oxmoe plans by shape and has no tactics to choose from")


class MissingJITCacheError(RuntimeError):
    """An error of flashinfer's own builds, which its conftest catches."""


def is_confidential_compute() -> bool:
    return False


is_confidential_compute.cache_clear = lambda: None  # type: ignore[attr-defined]

NAMES: dict[str, Any] = {
    **{name: getattr(oxmoe, name) for name in oxmoe.__all__ if hasattr(oxmoe, name)},
    **{name: getattr(oxmoe.nvfp4, name) for name in oxmoe.nvfp4.__all__},
    **{name: getattr(flashinfer_hopper, name) for name in ("has_monomoe", "alloc_scratchpad")},
    **flashinfer_layouts.NAMES,
    "mm_mxfp8": MmMxfp8(),
    "per_token_group_quant_8bit": oxmoe.quantize.per_token_group_quant_fp8,
    "interleave_moe_weights_for_sm90_mixed_gemm": interleave_weights,
    "interleave_moe_scales_for_sm90_mixed_gemm": interleave_scales,
    "mxfp4_quantize": mxfp4_quantize,
    "mxfp4_dequantize": mxfp4_dequantize,
    "mxfp4_dequantize_host": mxfp4_dequantize_host,
    "nvfp4_quantize": nvfp4_quantize,
    "nvfp4_batched_quantize": nvfp4_batched_quantize,
    "block_scale_interleave": block_scale_interleave,
    "nvfp4_block_scale_interleave": block_scale_interleave,
    "e2m1_and_ufp8sf_scale_to_float": e2m1_to_float,
    "allreduce_fusion": allreduce_fusion,
    "trtllm_moe_finalize_allreduce_fusion": moe_finalize_allreduce_fusion,
    # flashinfer's older name of the same function.
    "trtllm_destroy_ipc_workspace_for_all_reduce": oxmoe.trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
    "compute_fp4_swizzled_layout_sf_size": compute_fp4_swizzled_layout_sf_size,
    "mpi_barrier": mpi_barrier,
    # Names that tests need beside the calls that they test.
    "ActivationType": ActivationType,
    "RoutingMethodType": RoutingMethodType,
    "Fp8QuantizationType": Fp8QuantizationType,
    "WeightLayout": WeightLayout,
    "is_gated_activation": lambda activation: ActivationType(activation).is_gated,
    "LibraryError": LibraryError,
    "normalize_cute_dsl_moe_activation_type": cute_dsl_activation,
    "validate_cute_dsl_moe_situ_config": check_situ,
    "DEFAULT_SWIGLU_ALPHA": 1.0,
    "DEFAULT_SWIGLU_BETA": 0.0,
    "DEFAULT_SWIGLU_LIMIT": torch.finfo(torch.float32).max,
    "AutoTuner": AutoTuner,
    "autotune": lambda *args, **kwargs: contextlib.nullcontext(),
    "get_compute_capability": get_compute_capability,
    "is_sm90a_supported": lambda device=None: capability[0] == 9,
    "is_sm100a_supported": lambda device=None: capability[0] == 10,
    "is_sm110a_supported": lambda device=None: False,
    "is_sm12x_supported": lambda device=None: False,
    "is_sm120a_supported": lambda device=None: False,
    "is_sm121a_supported": lambda device=None: False,
    "is_cute_dsl_available": lambda *args, **kwargs: True,
    "is_cute_dsl_arch_supported": lambda *args, **kwargs: True,
    "is_cuda_tile_available": lambda: False,
    "_b12x_mxfp8_dsl_supported": lambda *args: False,
    "device_support_pdl": lambda device=None: True,
    "is_confidential_compute": is_confidential_compute,
    "DEFAULT_SITU_BETA": 4.0,
    "DEFAULT_SITU_LINEAR_BETA": 25.0,
    "available_backends": lambda: (),
    "NVFP4_QUANT_ENV_VARS": (),
    "NVFP44Over6Config": NVFP44Over6Config,
    "nvfp4_e4m3_max": nvfp4_e4m3_max,
    "MissingJITCacheError": MissingJITCacheError,
    "TorchDistBackend": TorchDistBackend,
    "rmsnorm": rmsnorm,
    "gemma_fused_add_rmsnorm": gemma_fused_add_rmsnorm,
}
