"""flashinfer's `CuteDslMoEWrapper` and `cute_dsl_fused_moe`: a layer of NVFP4 or MXFP8 experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from oxmoe._oxmoe import ExpertWeights, workspace_bytes
from oxmoe.functions import dequantize_mxfp8, moe
from oxmoe.operands import WRONG_TYPES, check_tensor, name_argument
from oxmoe.peers.expert_ranks import by_rank, check_part
from oxmoe.peers.flashinfer_cutlass_formats import FP32_MAX, situ_options
from oxmoe.peers.kept import Cache

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CuteDslMoEWrapper", "cute_dsl_fused_moe", "cute_dsl_fused_moe_nvfp4"]

SWIGLU, RELU2 = 3, 6  # flashinfer's ActivationType, the same numbers in 0.6.11 and 0.7
_BLOCK = 16
# flashinfer's activation name -> (activation, gated). Other names have no arithmetic here.
_ACTIVATIONS: dict[str, tuple[Any, bool]] = {
    "Swiglu": ("silu", True),
    "GegluTanh": ("gelu_tanh", True),
    "Relu2": ("relu2", False),
}
_NAMES = {SWIGLU: "Swiglu", RELU2: "Relu2"}
_MODES = ("w4a4", "w4a16", "mxfp8")
# Rows of up that lie before as many rows of gate: flashinfer's order, and the one of swap_ab.
_GROUP, _SWAPPED_GROUP = 64, 16
# The experts that `cute_dsl_fused_moe` made of its weights, kept while these live.
cache = Cache()


def _of_activation(activation_type: Any) -> tuple[Any, bool]:
    """Returns (activation, gated). NOTE: GegluTanh goes by name: 8 is Identity in some of flashinfer's releases."""
    name = getattr(activation_type, "name", None) or _NAMES.get(activation_type, activation_type)
    if name not in _ACTIVATIONS:
        raise NotImplementedError(
            f"activation_type: no arithmetic for {name!r}; served are flashinfer's ActivationType.Swiglu (3), "
            "ActivationType.Relu2 (6) and, as a member of the enumeration, ActivationType.GegluTanh"
        )
    return _ACTIVATIONS[name]


def _mode(quant_mode: str) -> str:
    mode = {"nvfp4": "w4a4"}.get(str(quant_mode).lower(), str(quant_mode).lower())
    served = ", ".join(map(repr, _MODES))
    if mode == "w4a8":
        raise NotImplementedError(
            f"quant_mode {mode!r} (MXFP8 tokens, MXFP4 weights): no arithmetic for it; served: {served}"
        )
    if mode not in _MODES:
        raise ValueError(f"quant_mode: expected one of {served}, got {quant_mode!r}")
    return mode


class CuteDslMoEWrapper:
    """flashinfer's class of this name (0.6.11 to 0.7.4) on ExpertWeights.nvfp4 or mxfp8, wherever those run.

    num_experts, top_k, hidden_size H and intermediate_size N describe the layer. This rank holds num_local_experts
    (default: all) from local_expert_offset on, and the output is their part of the sum.

    use_cuda_graph with a max_num_tokens: this object owns the output and the workspace, made for that many tokens on
    `device`. So a call allocates nothing, and overwrites the output of the last call (as in flashinfer 0.6.11, whose
    default is 4096). More tokens are a ValueError then. With max_num_tokens None (the default, as in 0.7, which
    ignores a number), or without use_cuda_graph, torch's allocator provides both. While a graph is captured, they come
    from that graph's memory.

    quant_mode: with "w4a4" ("nvfp4") tokens come as NVFP4, and GEMM1's output is rounded to NVFP4 with fc2_input_scale.
    With "w4a16" tokens have output_dtype, and nothing is rounded. With "mxfp8" tokens and weights are MXFP8, and so is
    GEMM1's output; output_dtype is bf16. activation_type: Swiglu, GegluTanh, or Relu2 (w1 then has N rows). swap_ab: w1
    has 16 rows of up and of gate in turn, not 64; the rows are put in order in a copy. swiglu_alpha, swiglu_beta and
    swiglu_limit are ExpertWeights' alpha, beta and limit. situ_beta selects SiTU, with activation_type Swiglu as in
    flashinfer; situ_linear_beta bounds up, which is not bounded without it. output_dtype is the dtype of the
    computation: bf16, on CPUs also f16 or fp32.

    tile_size, enable_pdl and use_fused_finalize have no meaning: tiles are planned by shape, and sums are never
    atomic. These are refused by name: a sf_vec_size other than 16 (32 with "mxfp8"), "w4a8", clamped_relu2_limit, and
    the arguments per_token_scale, tactic and nvfp4_4over6 of `run`.

    One object serves one stream at a time.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        use_cuda_graph: bool = False,
        max_num_tokens: int | None = None,
        num_local_experts: int | None = None,
        local_expert_offset: int = 0,
        tile_size: int = 128,
        sf_vec_size: int = 16,
        output_dtype: Any = None,
        device: str = "cuda",
        enable_pdl: bool = True,
        activation_type: Any = SWIGLU,
        swiglu_alpha: float = 1.0,
        swiglu_beta: float = 0.0,
        swiglu_limit: float = FP32_MAX,
        situ_beta: float | None = None,
        situ_linear_beta: float | None = None,
        use_fused_finalize: bool = True,
        quant_mode: str = "w4a4",
        clamped_relu2_limit: Tensor | None = None,
        swap_ab: bool = False,
    ) -> None:
        import torch

        self.quant_mode = _mode(quant_mode)
        # flashinfer's default is 16 in every mode.
        blocks = (_BLOCK, 32) if self.quant_mode == "mxfp8" else (_BLOCK,)
        unserved = {
            f"sf_vec_size {sf_vec_size}": sf_vec_size not in blocks,
            "clamped_relu2_limit": clamped_relu2_limit is not None,
        }
        if any(unserved.values()):
            given = ", ".join(name for name, used in unserved.items() if used)
            raise NotImplementedError(f"CuteDslMoEWrapper: no arithmetic for {given}; served: sf_vec_size 16")
        self.swap_ab = bool(swap_ab)
        self._activation, self.gated = _of_activation(activation_type)
        self.output_dtype = torch.bfloat16 if output_dtype is None else output_dtype
        dtypes: dict[Any, Literal["bf16", "f16", "f32"]]
        dtypes = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
        if self.output_dtype not in dtypes:
            raise ValueError(f"output_dtype: expected {', '.join(map(str, dtypes))}, got {self.output_dtype}")
        self._dtype = dtypes[self.output_dtype]
        if self.quant_mode == "mxfp8" and self._dtype != "bf16":
            raise ValueError(f"output_dtype: expected torch.bfloat16 with quant_mode 'mxfp8', got {self.output_dtype}")
        swiglu = (swiglu_alpha, swiglu_beta, swiglu_limit)
        if self._activation != "silu" and swiglu != (1.0, 0.0, FP32_MAX):
            raise ValueError(f"swiglu_alpha, swiglu_beta, swiglu_limit: only with Swiglu, got {swiglu}")
        name = "Swiglu" if self._activation == "silu" else str(self._activation)
        self._situ = situ_options(name, situ_beta, situ_linear_beta, swiglu)
        self._activation = self._situ.pop("activation", self._activation)
        local = num_experts if num_local_experts is None else num_local_experts
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k: expected 1 to num_experts {num_experts}, got {top_k}")
        check_part(num_experts, local_expert_offset, local, "num_local_experts")
        if max_num_tokens is not None and max_num_tokens < 1:
            raise ValueError(f"max_num_tokens: expected 1 or more, got {max_num_tokens}")
        self.num_experts, self.top_k = num_experts, top_k
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.use_cuda_graph, self.max_num_tokens = use_cuda_graph, max_num_tokens
        self.num_local_experts, self.local_expert_offset = local, local_expert_offset
        self.tile_size, self.sf_vec_size, self.device, self.enable_pdl = tile_size, sf_vec_size, device, enable_pdl
        self.activation_type, self.use_fused_finalize = activation_type, use_fused_finalize
        self.swiglu_alpha, self.swiglu_beta, self.swiglu_limit = swiglu_alpha, swiglu_beta, swiglu_limit
        self.situ_beta, self.situ_linear_beta = situ_beta, situ_linear_beta
        self._cache = Cache()
        # Everything that `prepare` makes experts by.
        self._key: tuple[Any, ...] = (self.quant_mode, self.swap_ab, str(self._activation), self._dtype, swiglu)
        self._key += (situ_beta, situ_linear_beta, local, hidden_size, intermediate_size)
        self._workspace: Tensor | None = None
        self._output: Tensor | None = None
        if use_cuda_graph and max_num_tokens is not None:
            with torch.inference_mode(False):
                self._output = torch.empty((max_num_tokens, hidden_size), dtype=self.output_dtype, device=device)

    def get_valid_tactics(self) -> list[Any]:
        """Returns None, because plans are functions of the shape."""
        return []

    def prepare(
        self,
        w1_weight: Tensor,
        w1_weight_sf: Tensor,
        w1_alpha: Tensor,
        fc2_input_scale: Tensor | None,
        w2_weight: Tensor,
        w2_weight_sf: Tensor,
        w2_alpha: Tensor,
    ) -> ExpertWeights:
        """Makes what `run` would make of these tensors at its first call with them. Pass the result as `weights`."""
        if (fc2_input_scale is None) != (self.quant_mode != "w4a4"):
            raise ValueError(
                f"fc2_input_scale: expected {'one number' if self.quant_mode == 'w4a4' else 'None'} with quant_mode "
                f"{self.quant_mode!r}, got {None if fc2_input_scale is None else tuple(fc2_input_scale.shape)}"
            )
        if fc2_input_scale is not None and fc2_input_scale.numel() != 1:
            raise ValueError(f"fc2_input_scale: expected one number, got shape {tuple(fc2_input_scale.shape)}")
        rows, each = (2 if self.gated else 1) * self.intermediate_size, 1 if self.quant_mode == "mxfp8" else 2
        for name, tensor, shape in (
            ("w1_weight", w1_weight, (self.num_local_experts, rows, self.hidden_size // each)),
            ("w2_weight", w2_weight, (self.num_local_experts, self.hidden_size, self.intermediate_size // each)),
        ):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
        options: dict[str, Any] = {**self._situ}
        if self._activation == "silu":
            limit = self.swiglu_limit if self.swiglu_limit < FP32_MAX else None
            options = {"alpha": self.swiglu_alpha, "beta": self.swiglu_beta, "limit": limit}
        options |= {"activation": self._activation, "gated": self.gated}
        if self.quant_mode == "mxfp8":
            return self._mxfp8(w1_weight, w1_weight_sf, w1_alpha, w2_weight, w2_weight_sf, w2_alpha, options)
        if fc2_input_scale is not None:
            # Tokens come quantised, so nothing asks for the number that would round them.
            options.update(input_global_scale=1.0, a2_global_scale=fc2_input_scale.reshape(-1).float())
        options |= {"scale_layout": "swizzled", "layout": "up_gate_64", "dtype": self._dtype}
        if self.swap_ab and self.gated:
            w1_weight, w1_weight_sf = self._in_order(w1_weight, self._plain("w1_weight_sf", w1_weight_sf, w1_weight))
            w2_weight_sf = self._plain("w2_weight_sf", w2_weight_sf, w2_weight)
            options |= {"scale_layout": "plain", "layout": "up_gate"}
        return ExpertWeights.nvfp4(w1_weight, w2_weight, w1_weight_sf, w2_weight_sf, w1_alpha, w2_alpha, **options)

    def _mxfp8(
        self,
        w1: Tensor,
        w1_sf: Tensor,
        w1_alpha: Tensor,
        w2: Tensor,
        w2_sf: Tensor,
        w2_alpha: Tensor,
        options: dict[str, Any],
    ) -> ExpertWeights:
        w1_sf, w2_sf = self._plain("w1_weight_sf", w1_sf, w1), self._plain("w2_weight_sf", w2_sf, w2)
        if self.gated:
            w1, w1_sf = self._in_order(w1, w1_sf)
            options["layout"] = "up_gate"
        w1_sf, w2_sf = _times("w1_alpha", w1_alpha, w1_sf), _times("w2_alpha", w2_alpha, w2_sf)
        return ExpertWeights.mxfp8(w1, w2, w1_sf, w2_sf, **options)

    def _plain(self, name: str, scales: Tensor, weights: Tensor) -> Tensor:
        """Returns scales [El, rows, K / block] of scales that lie in tiles: an MMA view, or [El, M', G']."""
        import torch

        from oxmoe.formats.nvfp4 import convert_sf_from_mma_layout, untiled

        check_tensor(name, scales)
        if scales.element_size() != 1:
            raise ValueError(f"{name}: expected a dtype of one byte, got {str(scales.dtype).rpartition('.')[2]}")
        block, each = (32, 1) if self.quant_mode == "mxfp8" else (_BLOCK, 2)
        experts, rows, columns = weights.shape[0], weights.shape[1], weights.shape[2] * each
        blocks = -(-columns // block)
        padded = -(-rows // 128) * 128, -(-blocks // 4) * 4
        if scales.dim() == 6:
            tiles = (32, 4, padded[0] // 128, 4, padded[1] // 4, experts)
            if tuple(scales.shape) != tiles:
                raise ValueError(f"{name}: expected shape {tiles}, got {tuple(scales.shape)}")
            scales = convert_sf_from_mma_layout(scales.view(torch.uint8), rows, columns, experts, block)
        if scales.numel() != experts * padded[0] * padded[1]:
            raise ValueError(f"{name}: expected {experts} x {padded[0]} x {padded[1]} scales, got {scales.numel()}")
        plain = untiled(scales.view(torch.uint8).reshape(experts, *padded), rows, blocks)
        return plain if self.quant_mode == "mxfp8" else plain.view(torch.float8_e4m3fn)

    def _in_order(self, weights: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Returns copies with rows [up; gate]."""
        import torch

        from oxmoe.formats.nvfp4 import deinterleave_w13_halves

        group = _SWAPPED_GROUP if self.swap_ab else _GROUP
        if self.intermediate_size % group:
            raise ValueError(
                f"w1_weight: expected intermediate_size to be a multiple of {group} rows (up and gate in turn), got "
                f"{self.intermediate_size}"
            )
        codes, of_rows = (deinterleave_w13_halves(part.view(torch.uint8), group) for part in (weights, scales))
        return codes.view(weights.dtype), of_rows.view(scales.dtype)

    def _kept(self, blocks: tuple[Tensor, ...], others: tuple[Tensor | None, ...]) -> ExpertWeights:
        """Returns the experts of these tensors, and drops those of earlier tensors."""
        w1, w1_sf, w2, w2_sf = blocks
        w1_alpha, fc2, w2_alpha = others

        def make() -> ExpertWeights:
            if self._cache is not cache:
                self._cache.clear()
            assert w1_alpha is not None and w2_alpha is not None
            return self.prepare(w1, w1_sf, w1_alpha, fc2, w2, w2_sf, w2_alpha)

        return self._cache.get(blocks, others, self._key, make)

    def run(
        self,
        x: Tensor,
        x_sf: Tensor | None,
        token_selected_experts: Tensor,
        token_final_scales: Tensor,
        w1_weight: Tensor | None,
        w1_weight_sf: Tensor | None,
        w1_alpha: Tensor | None,
        fc2_input_scale: Tensor | None,
        w2_weight: Tensor | None,
        w2_weight_sf: Tensor | None,
        w2_alpha: Tensor | None,
        tactic: Any = None,
        *,
        per_token_scale: Tensor | None = None,
        nvfp4_4over6: Any = None,
        weights: ExpertWeights | None = None,
    ) -> Tensor:
        """flashinfer's method. Returns this rank's part of out [T, hidden_size] in output_dtype.

        x uint8 [T, H / 2] with x_sf e4m3 (float8_e4m3fn or its bytes) of T H / 16 scales row by row, as
        fp4_quantize(is_sf_swizzled_layout=False) gives them, or with "w4a16" [T, H] of output_dtype without x_sf. With
        "mxfp8" float8_e4m3fn [T, H] with x_sf E8M0 (uint8 or float8_e8m0fnu) of T H / 32 scales row by row.
        token_selected_experts int32 or int64 [T, top_k], global ids, -1 for none; token_final_scales fp32 [T, top_k].

        w1_weight uint8 [El, 2N, H / 2], 64 up and 64 gate rows in turn (interleave_w13_halves of [up; gate]), w2_weight
        uint8 [El, H, N / 2]; their scales e4m3 as convert_sf_to_mma_layout makes them, or [El, M', G'] in tiles;
        w1_alpha and w2_alpha fp32, one number or [El]; fc2_input_scale fp32 [1], with "w4a16" and "mxfp8" None. With
        "mxfp8" weights are float8_e4m3fn [El, 2N, H] and [El, H, N], their scales E8M0 in the same layouts, and the
        alphas powers of two, which go into the scales. Checked and described at the first call with these tensors,
        which a CUDA graph cannot capture, and kept until others come. weights: what `prepare` made, in their place.
        """
        return self._run(
            x, x_sf, token_selected_experts, token_final_scales, w1_weight, w1_weight_sf, w1_alpha, fc2_input_scale,
            w2_weight, w2_weight_sf, w2_alpha, tactic, per_token_scale, nvfp4_4over6, weights, None,
        )  # fmt: skip

    def _run(
        self,
        x: Tensor,
        x_sf: Tensor | None,
        token_selected_experts: Tensor,
        token_final_scales: Tensor,
        w1_weight: Tensor | None,
        w1_weight_sf: Tensor | None,
        w1_alpha: Tensor | None,
        fc2_input_scale: Tensor | None,
        w2_weight: Tensor | None,
        w2_weight_sf: Tensor | None,
        w2_alpha: Tensor | None,
        tactic: Any,
        per_token_scale: Tensor | None,
        nvfp4_4over6: Any,
        weights: ExpertWeights | None,
        out: Tensor | None,
    ) -> Tensor:
        import torch

        if tactic is not None:
            raise NotImplementedError("tactic: kernels are planned by shape, there is none to choose; supported: None")
        if per_token_scale is not None:
            raise NotImplementedError(
                "per_token_scale: no scale of its own for each token beside its blocks'; supported: None"
            )
        if nvfp4_4over6 is not None:
            raise NotImplementedError("nvfp4_4over6: no search between two scales; supported: None")
        check_tensor("x", x, "T", "columns")
        tokens = x.shape[0]
        for name, tensor in (
            ("token_selected_experts", token_selected_experts),
            ("token_final_scales", token_final_scales),
        ):
            check_tensor(name, tensor)
            if tuple(tensor.shape) != (tokens, self.top_k):
                raise ValueError(f"{name}: expected shape ({tokens}, {self.top_k}), got {tuple(tensor.shape)}")
        buffers = self._output is not None
        if self._output is not None and tokens > len(self._output):
            raise ValueError(
                f"num_tokens ({tokens}) exceeds max_num_tokens ({self.max_num_tokens}), for which use_cuda_graph made "
                "the buffers"
            )
        columns = self.hidden_size
        if self.quant_mode == "w4a16":
            if x_sf is not None:
                raise ValueError("x_sf: expected None with quant_mode 'w4a16'")
        elif x_sf is None:
            raise ValueError(f"x_sf: needed with quant_mode {self.quant_mode!r}")
        else:
            check_tensor("x_sf", x_sf)
            block = 32 if self.quant_mode == "mxfp8" else _BLOCK
            blocks_of_row = columns // block
            if x_sf.numel() != tokens * blocks_of_row:
                raise ValueError(
                    f"x_sf: expected {tokens * blocks_of_row} scales ({tokens} tokens x hidden_size {columns} / "
                    f"{block}), got shape {tuple(x_sf.shape)}"
                )
            x_sf = x_sf.reshape(tokens, blocks_of_row)
            columns //= 2 if self.quant_mode == "w4a4" else 1
        if tuple(x.shape) != (tokens, columns):
            raise ValueError(f"x: expected shape ({tokens}, {columns}), got {tuple(x.shape)}")
        if self.quant_mode == "mxfp8" and x_sf is not None:
            for name, tensor, dtypes in (
                ("x", x, (torch.float8_e4m3fn,)),
                ("x_sf", x_sf, (torch.uint8, torch.float8_e8m0fnu)),
            ):
                if tensor.dtype not in dtypes:
                    expected = " or ".join(str(dtype).rpartition(".")[2] for dtype in dtypes)
                    got = str(tensor.dtype).rpartition(".")[2]
                    raise ValueError(f"{name}: expected dtype {expected} with quant_mode 'mxfp8', got {got}")
            # The conversion is exact: these numbers do not change when they are rounded to MXFP8 once more.
            x = dequantize_mxfp8(x, x_sf.reshape(-1).view(torch.uint8), torch.bfloat16, layout="linear")
            x_sf = None
        if weights is None:
            blocks = {"w1_weight": w1_weight, "w1_weight_sf": w1_weight_sf, "w2_weight": w2_weight}
            blocks["w2_weight_sf"] = w2_weight_sf
            needed = {**blocks, "w1_alpha": w1_alpha, "w2_alpha": w2_alpha}
            missing = [name for name, tensor in needed.items() if tensor is None]
            if missing:
                raise ValueError(f"{', '.join(missing)}: needed where weights is None")
            for name, operand in needed.items():
                check_tensor(name, operand)
            if fc2_input_scale is not None:
                check_tensor("fc2_input_scale", fc2_input_scale)
            given = tuple(tensor for tensor in blocks.values() if tensor is not None)
            weights = self._kept(given, (w1_alpha, fc2_input_scale, w2_alpha))
        if weights.num_experts != self.num_local_experts:
            raise ValueError(
                f"weights: expected {self.num_local_experts} experts (num_local_experts), got {weights.num_experts}"
            )
        expected = "mxfp8" if self.quant_mode == "mxfp8" else "nvfp4"
        if weights.format.removesuffix("-a4") != expected:
            raise ValueError(f"weights: expected {expected} experts (quant_mode), got {weights.format}")
        ids, ep = by_rank(token_selected_experts, self.num_experts, self.local_expert_offset, self.num_local_experts)
        if self._output is not None and out is None:
            out = self._output[:tokens]
            if out.device != x.device:
                raise ValueError(f"x: is on {x.device}, but the buffers of use_cuda_graph are on {out.device}")
        workspace = self._room(weights, x) if buffers else None
        return moe(x, weights, token_final_scales, ids, x_scale=x_sf, out=out, workspace=workspace, **ep)

    def _room(self, weights: ExpertWeights, x: Tensor) -> Tensor:
        import torch

        assert self.max_num_tokens is not None
        size = workspace_bytes(weights, self.max_num_tokens, self.top_k)
        if self._workspace is None or len(self._workspace) < size:
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "workspace: made at the first call, which a CUDA graph cannot capture; call once before"
                )
            with torch.inference_mode(False):
                self._workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
        return self._workspace


def _times(name: str, alpha: Tensor, scales: Tensor) -> Tensor:
    """Returns E8M0 scales [El, rows, blocks] times alpha, which is one number or [El]."""
    import torch

    check_tensor(name, alpha)
    numbers = alpha.float().reshape(-1)
    if numbers.numel() not in (1, scales.shape[0]):
        raise ValueError(f"{name}: expected 1 or {scales.shape[0]} numbers, got {numbers.numel()}")
    fraction, exponent = torch.frexp(numbers)
    if bool((fraction != 0.5).any()):
        raise NotImplementedError(f"{name}: no arithmetic for numbers other than powers of two with quant_mode 'mxfp8'")
    moved = scales.int() + (exponent - 1)[:, None, None]
    # 255 is NaN whatever it is multiplied by.
    if bool((((moved < 0) | (moved > 254)) & (scales != 255)).any()):
        raise ValueError(f"{name}: its product with a scale is no E8M0 number (2^-127 to 2^127)")
    return moved.where(scales != 255, 255).to(torch.uint8)


def cute_dsl_fused_moe(
    x: Tensor,
    x_sf: Tensor | None,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    w1_weight: Tensor,
    w1_weight_sf: Tensor,
    w1_alpha: Tensor,
    fc2_input_scale: Tensor | None,
    w2_weight: Tensor,
    w2_weight_sf: Tensor,
    w2_alpha: Tensor,
    num_experts: int,
    top_k: int,
    num_local_experts: int | None = None,
    local_expert_offset: int = 0,
    output_dtype: Any = None,
    use_fused_finalize: bool = True,
    moe_output: Tensor | None = None,
    aux_stream: Any = None,
    enable_pdl: bool = True,
    activation_type: Any = SWIGLU,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float = FP32_MAX,
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
    *,
    quant_mode: str = "w4a4",
    per_token_scale: Tensor | None = None,
    tactic: Any = None,
    localized_weights: Any = None,
    localized_streams: Any = None,
    localized_sm_count: int | None = None,
    localized_memset_stream: Any = None,
    localized_allow_nonlocalized: bool = False,
    autotune_use_cuda_graph: bool = False,
    nvfp4_4over6: Any = None,
    clamped_relu2_limit: Tensor | None = None,
    swap_ab: bool = False,
    weights: ExpertWeights | None = None,
) -> Tensor:
    """flashinfer's call (0.7.4): what `CuteDslMoEWrapper` made of these numbers computes in `run`.

    The experts are described at the first call with these weights, which a CUDA graph cannot capture, and kept while
    the weights live (`oxmoe.peers.flashinfer_cutedsl.cache`). weights: what `CuteDslMoEWrapper.prepare` made, in their
    place. moe_output: [T, H] of output_dtype. aux_stream, enable_pdl, use_fused_finalize and autotune_use_cuda_graph
    have no meaning; localized_* (parts of a GPU of two dies) are refused.
    """
    try:
        localized = {"localized_weights": localized_weights, "localized_streams": localized_streams}
        localized |= {"localized_sm_count": localized_sm_count, "localized_memset_stream": localized_memset_stream}
        localized |= {"localized_allow_nonlocalized": localized_allow_nonlocalized or None}
        if given := ", ".join(name for name, value in localized.items() if value is not None):
            raise NotImplementedError(f"cute_dsl_fused_moe: no kernel for {given}")
        check_tensor("w2_weight", w2_weight, "experts", "hidden", "K")
        layer = CuteDslMoEWrapper(
            num_experts,
            top_k,
            w2_weight.shape[1],
            w2_weight.shape[2] * (1 if _mode(quant_mode) == "mxfp8" else 2),
            num_local_experts=num_local_experts,
            local_expert_offset=local_expert_offset,
            output_dtype=output_dtype,
            activation_type=activation_type,
            swiglu_alpha=swiglu_alpha,
            swiglu_beta=swiglu_beta,
            swiglu_limit=swiglu_limit,
            situ_beta=situ_beta,
            situ_linear_beta=situ_linear_beta,
            quant_mode=quant_mode,
            clamped_relu2_limit=clamped_relu2_limit,
            swap_ab=swap_ab,
        )
        layer._cache = cache
        return layer._run(
            x, x_sf, token_selected_experts, token_final_scales, w1_weight, w1_weight_sf, w1_alpha, fc2_input_scale,
            w2_weight, w2_weight_sf, w2_alpha, tactic, per_token_scale, nvfp4_4over6, weights, moe_output,
        )  # fmt: skip
    except WRONG_TYPES as error:
        name_argument(error, cute_dsl_fused_moe, locals())
        raise


# flashinfer's old name of the same call.
cute_dsl_fused_moe_nvfp4 = cute_dsl_fused_moe
