"""The extension module's functions. Tensors are torch tensors, or numpy arrays on CPU; each is borrowed for the call.

Letters: T tokens, k experts a token (top_k), E experts of the model, El experts held here, H hidden size,
I intermediate size.

Errors, everywhere: ValueError for an operand that breaks its contract (the message names operand, dimension,
expected, got), NotImplementedError for a combination no kernel serves (it lists what is served), RuntimeError for a
missing driver, a GPU this wheel has no kernels for, or a CUDA error. When an error is raised nothing has been written.
"""

from typing import Any, Literal, final

Tensor = Any

__version__: str

class ExpertWeights:
    """The experts of one MoE layer: checked, described and (on Hopper) tensor maps encoded once, at load. Immutable.

    Keeps the tensors that it reads alive and copies none of them. Packed experts (MXFP4, MXFP8, NVFP4 and int4 on CUDA)
    read the packed form alone, which is made once.
    """

    @staticmethod
    def bf16(
        w13: Tensor,
        w2: Tensor,
        *,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
        layout: Literal["gate_up", "up_gate", "interleaved"] = "gate_up",
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
    ) -> ExpertWeights:
        """bf16 experts. GPT-OSS: layout="interleaved", alpha=1.702, beta=1.0, limit=7.0.

        alpha, beta and limit may be fp32 tensors [El] on the weights' device, a number for each expert (swiglu_alpha,
        swiglu_beta and swiglu_limit of flashinfer's cutlass_fused_moe). They are read at every call. What is in them is
        checked on CPU only: alpha and beta are finite, limits positive (inf: none). One number for all is faster.

        w13: [El, 2I, H], or [El, I, H] when not gated.
        w2: [El, H, I].
        b13: [El, 2I] bf16 or fp32.
        b2: [El, H] bf16 or fp32.
        layout: of the rows of w13: [gate; up], [up; gate], or a gate row and an up row in turn.
        gated: True where w13 has gate and up rows; the default is True, but False for relu2.
        alpha, beta, limit: of gated silu alone: g sigmoid(alpha g) (u + beta), where g <= limit and |u| <= limit.
        clamp: with "after" the limit bounds g sigmoid(alpha g) instead of g.
        """

    @staticmethod
    def f16(w13: Tensor, w2: Tensor, **options: Any) -> ExpertWeights:
        """fp16 experts; options as for bf16 (biases fp16 or fp32)."""

    @staticmethod
    def f32(w13: Tensor, w2: Tensor, **options: Any) -> ExpertWeights:
        """fp32 experts, CPU only; options as for bf16 (biases fp32)."""

    @staticmethod
    def mxfp4(
        w13: Tensor,
        w2: Tensor,
        w13_scale: Tensor,
        w2_scale: Tensor,
        *,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
        layout: Literal["gate_up", "up_gate", "interleaved"] = "gate_up",
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
        dtype: Literal["bf16", "f16", "f32"] = "bf16",
        hidden_size: int | None = None,
        in_place: bool = False,
        activation_dtype: Any = None,
    ) -> ExpertWeights:
        """MXFP4 experts; H and I are multiples of 32. GPT-OSS: layout="interleaved", alpha=1.702, beta=1.0,
        limit=7.0, and the checkpoint's blocks [E, 2I, H / 32, 16] flattened to [E, 2I, H / 2].

        A weight is its e2m1 code times the scale 2^(byte - 127) of its 32 neighbours along the row (OCP Microscaling
        Formats v1.0), the even column in the low nibble; codes may be int8 or float4_e2m1fn_x2 too. The layer
        multiplies these numbers in dtype. They are exact for scale bytes up to 252 in bf16 and f32, and 104 to 140 in
        f16. Byte 255 makes its block NaN. fp32 scales must be powers of two (or NaN): ValueError.

        On CPU the bits are those of ExpertWeights.bf16 (.f16, .f32) of what oxmoe.quantize.dequantize makes of the
        weights in dtype: beyond those bytes numbers are rounded to nearest and saturate at the largest finite one, and
        below 2^-126 they count as zero where the CPU multiplies bf16 itself (avx512_bf16), as bf16 weights do.

        With hidden_size below H, columns of w13, rows of w2 and elements of b2 from hidden_size on are never read.

        On CUDA dtype is "bf16", and the weights are packed on the GPU, once: into new tensors (w13_packed, w2_packed),
        after which the four given may be freed, or with in_place into those given, which hold no checkpoint's weights
        any more then. That needs rows and columns that are multiples of 64 and at most 63 columns beyond hidden_size;
        32 MiB (or one expert) are copied at a time. fp32 scales are waited for, since one may be no power of two.
        Where a matrix's largest scale byte (255 aside) is E > 128, its sums are taken of weights 2^(E - 128) times
        smaller and multiplied back in fp32: no weight saturates, and scales below 2^(E - 260) lose bits.

        activation_dtype=torch.float8_e4m3fn (dtype "bf16"; sm_90 with hidden_size a multiple of 8, and CPU): rows of x,
        and rows of GEMM1's output rounded to bf16, become e4m3 with one fp32 scale each, as oxmoe.quantize.rows_e4m3
        makes them, and products are those of e4m3 numbers. Of a matrix whose largest scale byte (255 aside) is E,
        weights with bytes below max(E, 7) - 11 are rounded to e2m1 numbers times that scale, to nearest even: off by at
        most 2^-13 of the largest scale. Sums are fp32 on CPU; on Hopper they are the tensor cores', which add products
        with about 14 bits. docs/kernels/grouped_gemm_mxfp4_e4m3_sm90.md has the error.

        w13: uint8 [El, 2I, H / 2], or [El, I, H / 2] when not gated: two e2m1 codes a byte.
        w2: uint8 [El, H, I / 2].
        w13_scale: E8M0 [El, 2I, H / 32]: uint8, float8_e8m0fnu, or its value as fp32.
        w2_scale: E8M0 [El, H, I / 32].
        b13: [El, 2I] bf16, f16 or fp32.
        b2: [El, H] bf16, f16 or fp32.
        layout, activation, gated, alpha, beta, limit, clamp: as for bf16.
        dtype: of x, of the output and of the products.
        hidden_size: columns of x and of the output where w13 and w2 are padded: at most H.
        in_place: on CUDA the weights are packed into the memory of the four tensors.
        activation_dtype: None, or torch.float8_e4m3fn or its name (W4A8, on Hopper and CPU).
        """

    @staticmethod
    def fp8_block(
        w13: Tensor,
        w2: Tensor,
        w13_scale: Tensor,
        w2_scale: Tensor,
        *,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
        layout: Literal["gate_up", "up_gate"] = "gate_up",
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
    ) -> ExpertWeights:
        """fp8 experts with block scales, as DeepSeek's and Qwen's checkpoints have them: a weight is its code times the
        scale of its 128 x 128 block. H and I are multiples of 128: NotImplementedError for others, as for
        layout="interleaved".

        x is bf16. Its rows, and GEMM1's activated output rounded to bf16, are quantised for each 128 columns
        (oxmoe.quantize.per_token_group_quant_fp8). The products of 128 columns are added to fp32 sums times the scale
        of the row and that of the block.

        w13: float8_e4m3fn [El, 2I, H], or [El, I, H] when not gated.
        w2: float8_e4m3fn [El, H, I].
        w13_scale: fp32 [El, 2I / 128, H / 128]: SGLang's w13_weight_scale_inv.
        w2_scale: fp32 [El, H / 128, I / 128].
        b13: [El, 2I] bf16 or fp32.
        b2: [El, H] bf16 or fp32.
        layout, activation, gated, alpha, beta, limit, clamp: as for bf16.
        """

    @staticmethod
    def fp8_tensor(
        w13: Tensor,
        w2: Tensor,
        w13_scale: Tensor,
        w2_scale: Tensor,
        *,
        a13_scale: Tensor | None = None,
        a2_scale: Tensor | None = None,
        per_token: bool | None = None,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
        layout: Literal["gate_up", "up_gate"] = "gate_up",
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
    ) -> ExpertWeights:
        """fp8 experts with one scale for an expert's matrix, as SGLang's Fp8MoEMethod holds them: a weight is its code
        times that scale; or with one for each row of the matrix, as compressed-tensors' "channel" strategy has them.
        H is a multiple of 128 and I of 16: NotImplementedError for others and for layout="interleaved".

        x is bf16. Its rows, and GEMM1's activated output rounded to bf16, become e4m3: x times the rounded reciprocal
        of the scale, to nearest, ties to even, at most 448. Scales that are not given are amax / 448, amax at least
        1e-10: that of a row, so that a token's result does not depend on the batch around it; or with per_token=False
        that of all rows of x (of all placed rows of GEMM1's output), as in SGLang's own kernels, which makes rows
        depend on each other: another token can move one by several percent. Sums are fp8_block's: the products of 128
        columns are added to fp32 sums times both scales; a scale of a row of weights multiplies the sum of all.
        SGLang's Triton kernel multiplies the whole sum by every scale; results differ by what fp32 rounds.

        w13_scale and w2_scale of the result are tables as fp8_block takes them, made of those given; a change of the
        scales given has no effect. Those of rows are the tensors given. Where I is no multiple of 128 a Hopper GPU
        reads copies of w13's scales of rows and of b13 that have zeros behind each half; w13_scale and b13 of the
        result are then these.

        w13: float8_e4m3fn [El, 2I, H], or [El, I, H] when not gated.
        w2: float8_e4m3fn [El, H, I].
        w13_scale: fp32 [El], [El, 2] (one for each half of w13's rows), one number, or [El, 2I].
        w2_scale: fp32 [El], one number, or [El, H]; of rows both may have a last dimension of 1.
        a13_scale: of x: fp32, one number or [El], of which the largest counts.
        a2_scale: the same, of GEMM1's output; both are given, or neither.
        per_token: where activations have no given scales: one scale for each row (the default), or with False one for
            all rows of a call.
        b13: [El, 2I] bf16 or fp32.
        b2: [El, H] bf16 or fp32.
        layout, activation, gated, alpha, beta, limit, clamp: as for bf16.
        """

    @staticmethod
    def mxfp8(
        w13: Tensor,
        w2: Tensor,
        w13_scale: Tensor,
        w2_scale: Tensor,
        *,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
        layout: Literal["gate_up", "up_gate", "interleaved"] = "gate_up",
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
        hidden_size: int | None = None,
        in_place: bool = False,
    ) -> ExpertWeights:
        """MXFP8 experts (OCP Microscaling Formats v1.0); H and I are multiples of 32. A weight is its e4m3 code times
        the scale 2^(byte - 127) of its 32 neighbours along the row; byte 255 makes its block NaN.

        x is bf16. Each 32 columns of its rows, and of GEMM1's activated output rounded to bf16, are rounded to MXFP8:
        scale 2^ceil(log2(amax / 448)), numbers to the nearest e4m3 times scale, ties to even. Products of these numbers
        are exact, sums fp32. NaN stays NaN; an infinity becomes NaN and the finite numbers of its group 0, as numbers
        of groups below 448 * 2^-127 do.

        On CUDA the weights are packed at load as those of ExpertWeights.mxfp4, with 4096 bytes of codes a block
        (csrc/common/mxfp8.cuh). Where a matrix's largest scale byte (255 aside) is E > 134, its sums are taken of
        weights 2^(E - 134) times smaller and multiplied back in fp32: no weight saturates, and weights below
        2^(E - 267) lose bits.

        w13: float8_e4m3fn (or its bytes as uint8) [El, 2I, H], or [El, I, H] when not gated.
        w2: float8_e4m3fn [El, H, I].
        w13_scale: E8M0 [El, 2I, H / 32]: uint8, float8_e8m0fnu, or its value as fp32.
        w2_scale: E8M0 [El, H, I / 32].
        b13: [El, 2I] bf16, f16 or fp32.
        b2: [El, H] bf16, f16 or fp32.
        layout, activation, gated, alpha, beta, limit, clamp: as for bf16.
        hidden_size: columns of x and of the output where w13 and w2 are padded: a multiple of 32.
        in_place: on CUDA the weights are packed into the memory of the four tensors.
        """

    @staticmethod
    def nvfp4(
        w13: Tensor,
        w2: Tensor,
        w13_scale: Tensor,
        w2_scale: Tensor,
        w13_global_scale: float | Tensor,
        w2_global_scale: float | Tensor,
        *,
        input_global_scale: float | Tensor | None = None,
        a2_global_scale: float | Tensor | None = None,
        scale_layout: Literal["plain", "swizzled"] | None = None,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
        layout: Literal["gate_up", "up_gate", "interleaved", "gate_up_64", "up_gate_64"] = "gate_up",
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
        dtype: Literal["bf16", "f16", "f32"] = "bf16",
    ) -> ExpertWeights:
        """NVFP4 experts, on CPU tensors and on CUDA, there in bf16 and packed at load into new tensors. H and I are
        multiples of 16.

        An element is its e2m1 code times the e4m3 scale of its 16 neighbours along the row, which every dtype holds
        exactly; products are summed in fp32, and a global scale multiplies the sums (before bias and activation).

        With input_global_scale and a2_global_scale (W4A4), rows of x and of GEMM1's output, rounded to dtype, are
        quantised as oxmoe.nvfp4.fp4_quantize does with these numbers, and their elements times block scales are
        multiplied. Nothing divides by them again: w13_global_scale and w2_global_scale then are the peers' alphas,
        weight_scale_2 / input_global_scale.

        Scales lie row by row ("plain"), in tiles as oxmoe.nvfp4.swizzle_blockscale makes them ("swizzled"), or are a
        view [32, 4, row tiles, 4, column tiles, El] of those (convert_sf_to_mma_layout). None: told by the shape;
        where both fit, plain. Layouts "..._64" have 64 gate and 64 up rows in turn (interleave_w13_halves).

        w13: uint8 [El, 2I, H / 2], or [El, I, H / 2] when not gated: two e2m1 codes a byte.
        w2: uint8 [El, H, I / 2].
        w13_scale: e4m3 (float8_e4m3fn, or its bytes as uint8) [El, 2I, H / 16], see scale_layout.
        w2_scale: e4m3 [El, H, I / 16].
        w13_global_scale: fp32: one number, [El], or [El, 2] for gate and up.
        w2_global_scale: fp32: one number, or [El].
        input_global_scale: fp32, one number or [El], with which x is rounded to NVFP4.
        a2_global_scale: the same of GEMM1's output; both are given, or neither.
        b13: [El, 2I] bf16, f16 or fp32.
        b2: [El, H] bf16, f16 or fp32.
        layout, activation, gated, alpha, beta, limit, clamp: as for bf16.
        dtype: of x, of the output and of the products.
        """

    @staticmethod
    def int4(
        w13: Tensor,
        w2: Tensor,
        w13_scale: Tensor,
        w2_scale: Tensor,
        *,
        w13_zeros: Tensor | None = None,
        w2_zeros: Tensor | None = None,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
        layout: Literal["gate_up", "up_gate", "interleaved"] = "gate_up",
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
        dtype: Literal["bf16", "f16", "f32"] = "bf16",
    ) -> ExpertWeights:
        """int4 experts (W4A16), on CPU tensors and on CUDA, there in bf16 and packed at load into new tensors. H and I
        are multiples of 32.

        A weight is (code - zero point) * scale. The scale is rounded to dtype first, the difference is exact, and the
        product is rounded to dtype once: the layer has the bits of one of these plain weights. Products are summed in
        fp32.

        Codes are integers from 0 to 15, the lower column in the lower four bits, as the pack-quantized checkpoints of
        compressed-tensors have them (weight_packed, int32) and as oxmoe.int4 makes them of AWQ's and GPTQ's. A group of
        columns shares a scale: H / groups and I / groups are multiples of 32, such as 32, 64, 128 or a whole row. The
        packed form has a scale for 32 columns of longer groups, too.

        w13: [El, 2I, H / 2] uint8 or [El, 2I, H / 8] int32, or [El, I, ...] when not gated.
        w2: [El, H, I / 2] uint8 or [El, H, I / 8] int32.
        w13_scale: bf16, f16 or fp32 [El, 2I, groups of H].
        w2_scale: bf16, f16 or fp32 [El, H, groups of I].
        w13_zeros: uint8 [El, 2I, groups of H], zero points from 0 to 16; None: 8 everywhere (symmetric codes).
        w2_zeros: uint8 [El, H, groups of I]; both are given, or neither.
        b13: [El, 2I] bf16, f16 or fp32.
        b2: [El, H] bf16, f16 or fp32.
        layout, activation, gated, alpha, beta, limit, clamp: as for bf16.
        dtype: of x, of the output and of the products.
        """

    @property
    def w13(self) -> Tensor | None:
        """The w13 that was given. None where the weights were packed."""

    @property
    def w2(self) -> Tensor | None:
        """The w2 that was given. None where the weights were packed."""

    @property
    def b13(self) -> Tensor | None:
        """The b13 that was given."""

    @property
    def b2(self) -> Tensor | None:
        """The b2 that was given."""

    @property
    def w13_scale(self) -> Tensor | None:
        """The scales of w13 that kernels read: the given ones, the E8M0 bytes of given fp32 ones, or the table that
        fp8_tensor makes. None for formats without scales and where the weights were packed."""

    @property
    def w2_scale(self) -> Tensor | None:
        """The scales of w2, as w13_scale."""

    @property
    def a13_scale(self) -> Tensor | None:
        """The scale of x that kernels read, of fp8_tensor experts with given scales of activations; else None."""

    @property
    def a2_scale(self) -> Tensor | None:
        """The scale of GEMM1's output, as a13_scale."""

    @property
    def w13_packed(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """(codes, scales, expert_scales) of MXFP4, MXFP8, NVFP4 and int4 experts on CUDA, else None.

        Those of MXFP4 are as oxmoe.quantize.mxfp4_pack gives them of the columns up to hidden_size, or (in_place) the
        given codes and scales with the same bytes.
        """

    @property
    def w2_packed(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The packed w2, as w13_packed."""

    @property
    def layout(self) -> str:
        """The layout that was given."""

    @property
    def activation(self) -> str:
        """The activation that was given."""

    @property
    def alpha(self) -> float | Tensor:
        """The alpha that was given."""

    @property
    def beta(self) -> float | Tensor:
        """The beta that was given."""

    @property
    def limit(self) -> float | Tensor | None:
        """The limit that was given."""

    @property
    def clamp(self) -> str:
        """The clamp that was given."""

    @property
    def format(self) -> str:
        """One of "bf16", "f16", "f32", "mxfp4", "mxfp4-a8" (with an activation_dtype), "fp8_block", "mxfp8", "nvfp4",
        "nvfp4-a4" (on CUDA, with an input_global_scale), "fp8_tensor" (with per_token=False), "fp8_tensor-token" and
        "fp8_tensor-static" (with a13_scale and a2_scale).
        """

    @property
    def dtype(self) -> str:
        """The dtype of x and of the output: "bf16", "f16" or "f32"."""

    @property
    def handle(self) -> int:
        """The number by which operators of torch name these experts where they are no plain tensors: those of
        `torch.ops` whose names end in `_held`. No other experts of this process have it or had it, and it keeps
        nothing alive.
        """

    @property
    def num_experts(self) -> int:
        """The number of experts held here, El."""

    @property
    def hidden_size(self) -> int:
        """Columns of x and of the output."""

    @property
    def intermediate_size(self) -> int:
        """Columns of GEMM1's output."""

    @property
    def gated(self) -> bool:
        """Whether w13 has gate and up rows."""

    @property
    def device(self) -> str:
        """Where the weights are: "cpu", "cuda:0", ..."""

def experts_of(handle: int) -> ExpertWeights:
    """The experts whose `ExpertWeights.handle` this is.

    Raises:
        ValueError: no experts have this handle: they were freed, or the handle is of another process.
    """

def moe(
    x: Tensor,
    weights: ExpertWeights,
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    *,
    router_logits: Tensor | None = None,
    top_k: int = 0,
    scoring_func: Literal["softmax", "sigmoid", "sqrtsoftplus", "softmax_topk", "identity"] = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    num_expert_group: int = 0,
    topk_group: int = 0,
    num_token_non_padded: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    apply_router_weight_on_input: bool = False,
    no_combine: bool = False,
    keep_router_weight: bool = False,
    ep_size: int = 1,
    ep_rank: int = 0,
    x_scale: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """out[t] = routed_scaling_factor * sum_j topk_weights[t, j] * expert(topk_ids[t, j], x[t]),
    expert(e, x) = w2[e] act(w13[e] x + b13[e]) + b2[e].

    Sums in fp32; rounded to the dtype after the activation, after the second GEMM (b2 included) and at the end.
    An id that is neither -1 nor an expert's is a ValueError on CPU, and on GPUs with OXMOE_CHECK_IDS=1 in the
    environment, but not while a CUDA graph is captured; else its slot adds nothing.

    Deterministic; a row's bits do not depend on the batch around it, but with fp8_tensor(per_token=False). Scales
    of quantised tokens that are not fp32 [T, H / 128] row by row are brought into that order by a small kernel.

    x: [T, hidden_size] in weights.dtype, or codes with x_scale.
    topk_weights: fp32 [T, k].
    topk_ids: int32 or int64 [T, k]; -1: no expert, else 0 to ep_size El - 1.
    router_logits: fp32, bf16 or f16 [T, E], instead of topk_weights and topk_ids.
    top_k: experts a token, with router_logits.
    scoring_func to topk_group: with router_logits, as for `topk`.
    num_token_non_padded: with router_logits: int32 scalar tensor on x's device.
    routed_scaling_factor: multiplies the combined output.
    apply_router_weight_on_input: weights multiply GEMM1's sums instead of the outputs.
    no_combine: out is [T, k, H], unweighted.
    keep_router_weight: with no_combine the rows are weighted all the same.
    ep_size, ep_rank: with ep_size > 1 ids are global, and these weights hold experts [ep_rank El, (ep_rank + 1) El).
    x_scale: of float8_e4m3fn x, with fp8 experts: fp32 [T, H / 128] with any strides, [T, 1] or one number, or E8M0
        bytes, four groups of 128 columns an int32, [T, ceil(H / 512)] with any strides. Of uint8 x [T, H / 2] (e2m1
        pairs), with nvfp4 experts that have an input_global_scale: e4m3 [T, H / 16].
    out: [T, H]; may be x itself.
    workspace: uint8 [>= workspace_bytes(...)], 256-byte aligned.
    """

def workspace_bytes(weights: ExpertWeights, num_tokens: int, top_k: int) -> int:
    """Bytes of workspace that `moe` needs for up to num_tokens tokens: exact, never decreasing in num_tokens."""

def moe_masked(
    x: Tensor,
    weights: ExpertWeights,
    masked_m: Tensor,
    *,
    x_scale: Tensor | None = None,
    expected_m: int | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """out[e, i] = expert(e, x[e, i]) for i < masked_m[e]; other rows are neither read nor written.
    `oxmoe.moe_masked`.

    x: [El, m, hidden_size] in weights.dtype, or codes with x_scale.
    masked_m: int32 [El].
    x_scale: fp32 [El, m, hidden_size / 128]; W4A4 nvfp4: e4m3 [El, m, hidden_size / 16].
    expected_m: rows an expert that tiles are chosen for; default: m / 32.
    out: [El, m, hidden_size]; may be x itself.
    workspace: uint8 [>= masked_workspace_bytes(weights, El m)], 256-byte aligned.
    """

def moe_contiguous(
    x: Tensor,
    weights: ExpertWeights,
    counts: Tensor,
    *,
    alignment: int = 1,
    x_scale: Tensor | None = None,
    expected_m: int | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Every expert on its rows: the first counts[0] rows are expert 0's, those of the next expert begin at the next
    multiple of alignment, and so on. Rows of out that are nobody's are not written. `oxmoe.moe_contiguous`.

    x: [M, hidden_size] in weights.dtype, or codes with x_scale.
    counts: int32 [El].
    alignment: each expert's first row is a multiple of it.
    x_scale: fp32 [M, hidden_size / 128]; W4A4 nvfp4: e4m3 [M, hidden_size / 16].
    expected_m: rows an expert that tiles are chosen for; default: M / El.
    out: [M, hidden_size]; may be x itself.
    workspace: uint8 [>= masked_workspace_bytes(weights, M)], 256-byte aligned.
    """

def masked_workspace_bytes(weights: ExpertWeights, num_rows: int) -> int:
    """Bytes of workspace that `moe_masked` needs for El x m rows, and `moe_contiguous` for M rows: exact, never
    decreasing in num_rows."""

def topk(
    router_logits: Tensor,
    top_k: int,
    *,
    scoring_func: Literal["softmax", "sigmoid", "sqrtsoftplus", "softmax_topk", "identity"] = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    num_expert_group: int = 0,
    topk_group: int = 0,
    group_score: Literal["max", "top2"] | None = None,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    apply_routed_scaling_factor_on_output: bool = False,
    num_token_non_padded: Tensor | None = None,
    order: Literal["weight", "id"] = "weight",
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(topk_weights fp32 [T, k], topk_ids int32 [T, k]), best first, ties to the lower id.

    docs/architecture.md, "Top-k", says what is chosen and what the weights are.

    router_logits: fp32, bf16 or f16 [T, E], E <= 512.
    top_k: at most 32, fused shared experts included.
    correction_bias: fp32 [E], added to the score for the choice only.
    num_expert_group, topk_group: experts are chosen from the best topk_group of num_expert_group groups; 0: no groups.
    group_score: what a group is judged by; the default is "top2" with a bias and "max" without.
    num_fused_shared_experts: of the top_k; they take the last columns with ids E, E + 1, ...
    apply_routed_scaling_factor_on_output: weights are multiplied by routed_scaling_factor.
    num_token_non_padded: int32 scalar tensor on the logits' device; rows from it on get ids -1 and weights 0.
    order: of the columns: best first, or by expert id.
    topk_weights, topk_ids: outputs fp32 and int32 [T, k], written instead of new tensors.
    """

def sort_by_expert(
    topk_ids: Tensor,
    num_experts: int,
    *,
    first_expert: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stable sort of the T k slots by expert: (histogram int32 [E], offsets int32 [E + 1], place_of_slot int32 [T k],
    slot_of_place int32 [T k]); -1 where there is none.

    With first_expert these are experts first_expert to first_expert + num_experts - 1, and ids of others, which other
    ranks hold, are skipped. Without it ids are -1 or 0 to num_experts - 1.

    topk_ids: int32 or int64 [T, k].
    """

def routing_tables(
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    *,
    gate_dtype: Literal["float32", "float16", "bfloat16"] = "float32",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(gate_scal [T k], expt_hist int32 [E], slice_offs int32 [E + 1], combine_indx int32 [T k],
    dispatch_indx int32 [T k], block_offs_data int32 [4, E + 1], block_schedule_data int32 [4, N]): triton_kernels'
    tables of a routed batch.

    A slot is t * k + j. combine_indx: place -> slot, grouped by expert, stable in the slot; dispatch_indx: slot ->
    place; -1 where there is none. gate_scal: weight of each place's slot in gate_dtype; 0 where there is none. For row
    i of the two block tables a block is 16 << i rows of one expert: block_offs_data is the running sum of
    ceil(hist / block), and block_schedule_data lists block << 16 | expert, expert by expert, then -1.
    N = T k if T k <= E, else E - 1 - floor((E - T k - 1) / 16).

    topk_weights: fp32 [T, k].
    topk_ids: int32 or int64 [T, k]; -1: none.
    gate_dtype: of gate_scal.
    """

def moe_tensors(x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, **options: Any) -> Tensor:
    """`moe` on bare weight tensors, with the options of ExpertWeights and of moe's given-ids form; MXFP4 experts take
    w13_scale, w2_scale and format="mxfp4", on CPU (on CUDA they are packed once, by ExpertWeights.mxfp4).

    Describes the weights at every call, so nothing can go stale when a caller swaps or moves them.
    """

def quantize_fp8(
    x: Tensor,
    group: int,
    eps: float,
    *,
    column_major: bool = False,
    row_multiple: int = 1,
    powers: bool = False,
) -> tuple[Tensor, Tensor]:
    """(codes float8_e4m3fn [..., K], scales) of what `oxmoe.quantize.per_token_group_quant_fp8` gives; column-major
    scales [K / group, rows rounded up to row_multiple] and powers of two [ceil(K / group / 4), the same] as they lie in
    memory.

    x: bf16, f16 or fp32 [..., K], K a multiple of group, on CPU or CUDA.
    group: columns that share a scale: 16, 32, 64 or 128.
    eps: the least amax of a group.
    """

def quantize_mxfp8(
    x: Tensor,
    *,
    layout: str = "128x4",
    alignment: int = 32,
) -> tuple[Tensor, Tensor]:
    """MXFP8 of x: (codes float8_e4m3fn [..., K rounded up to alignment], scales uint8 E8M0, flat).
    `oxmoe.quantize.mxfp8`; `oxmoe.mxfp8_quantize` says more.

    x: bf16, f16 or fp32 [..., K], K a multiple of 32, on CPU or CUDA.
    layout: of the scales: "128x4", "8x4" or "linear".
    """

def dequantize_mxfp8(
    codes: Tensor,
    scales: Tensor,
    dtype: Any = None,
    *,
    layout: str = "128x4",
) -> Tensor:
    """The dtype (float32, float16 or bfloat16, or its name) [..., K] of MXFP8: element times 2^(byte - 127), rounded
    once; the byte 255 makes its 32 elements NaN. `oxmoe.quantize.dequantize_mxfp8`.

    codes: float8_e4m3fn or uint8 [..., K].
    scales: uint8, flat, as quantize_mxfp8 gives them.
    layout: of the scales: "128x4", "8x4" or "linear".
    """

def mm_mxfp8(
    a: Tensor,
    b: Tensor,
    a_descale: Tensor,
    b_descale: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: Any = None,
    use_8x4_sf_layout: bool = False,
) -> Tensor:
    """a times b, bf16, f16 or fp32 [m, n]: sums in fp32, rounded once. `oxmoe.mm_mxfp8`; out_dtype may be float32 too.

    Elements times their scales are exact wherever bf16 holds them.

    a: float8_e4m3fn [m, k].
    b: float8_e4m3fn [k, n], strides (1, k).
    a_descale: E8M0 uint8 [m, k / 32] of any strides, or flat in the 128x4 (use_8x4_sf_layout: 8x4) order.
    b_descale: E8M0 uint8 [k / 32, n] of any strides, or flat in the 128x4 order of [n, k / 32].
    """

def quantize_mxfp4(
    x: Tensor,
    *,
    rounding: Literal["up", "down"] = "up",
) -> tuple[Tensor, Tensor]:
    """MXFP4 of x: (codes uint8 [..., K / 2], scales uint8 E8M0 [..., K / 32]). `oxmoe.quantize.mxfp4`.

    Two e2m1 elements a byte, the low nibble first; one scale 2^(byte - 127) for 32 of them. Elements are rounded to
    nearest, ties to even, and saturate at 6 scales. rounding of the scale, amax being a block's largest magnitude:
    "up": 2^ceil(log2(amax / 6)), which clips nothing (triton_kernels' ROUND_UP, its default);
    "down": 2^(floor(log2(amax)) - 2), the rule of the OCP Microscaling Formats specification 1.0, section 6.3
    (triton_kernels' ROUND_DOWN). Bits are those of triton_kernels' downcast_to_mxfp_torch, also where x is not finite:
    then "down" marks the block with the scale 255 (NaN), and so does "up" for infinity; for NaN, "up" gives 0.

    x: bf16, f16 or fp32 [..., K], K a multiple of 32, on CPU or CUDA.
    """

def dequantize_mxfp4(
    codes: Tensor,
    scales: Tensor,
    dtype: Any = None,
) -> Tensor:
    """The numbers of MXFP4 codes, [..., K]: element times scale, rounded once. `oxmoe.quantize.dequantize`.

    Saturates at the dtype's largest finite value. A scale byte b is 2^(b - 127), 0 included, and 255 makes its 32
    elements NaN (OCP Microscaling Formats 1.0). Bits are those of triton_kernels' upcast_from_mxfp_torch for the bytes
    1 to 254; it reads 0 as 0.0, and 255 as infinity.

    codes: uint8 [..., K / 2], on CPU or CUDA.
    scales: uint8 or float8_e8m0fnu [..., K / 32].
    dtype: "float32" (default), "float16", "bfloat16", or the torch or numpy dtype.
    """

def swizzle_hopper_mxfp4(
    codes: Tensor,
    scales: Tensor,
    *,
    num_warps: int = 8,
    row_multiple: int = 64,
) -> tuple[Tensor, Tensor]:
    """Checkpoint MXFP4 weights as triton_kernels holds them on Hopper: HopperMXValueLayout (mma_version 3) and
    HopperMXScaleLayout along K.

    (values uint8 [..., 4 ceil64(K / 2), R' / 4], scales uint8 [..., 32 ceil2(G), R'' / 32]), both contiguous in their
    last dimension but one, as `storage.data` is. R' is R rounded up to row_multiple, R'' to 32 num_warps; padding is 0.

    codes: uint8 [..., R, K / 2], on CPU or CUDA.
    scales: uint8 [..., R, G], G >= K / 32.
    num_warps: of the scale layout: a power of two.
    row_multiple: 64 in triton_kernels 3.6 (sglang-kernel 0.4.2), 256 in 3.8 (0.4.10).
    """

def unswizzle_hopper_mxfp4(
    values: Tensor,
    scales: Tensor,
    *,
    rows: int,
    columns: int,
    num_warps: int = 8,
) -> tuple[Tensor, Tensor]:
    """The inverse of swizzle_hopper_mxfp4, for any row_multiple: what a `triton_kernel` layer of SGLang holds, back in
    the checkpoint's form (codes uint8 [..., rows, columns / 2], scales uint8 [..., rows, columns / 32]).

    values: `storage.data` of the weight with its strides, on CPU or CUDA.
    scales: `storage.data` of the weight's scale.
    rows: of the weight without padding: its shape[-1].
    columns: K, its shape[-2].
    num_warps: of the scale's layout; SGLang's is 8.
    """

def interleave_sm90_mxfp4(
    codes: Tensor,
    scales: Tensor,
    *,
    flashinfer: Literal["0.6", "0.7"] = "0.7",
) -> tuple[Tensor, Tensor]:
    """Checkpoint MXFP4 weights as flashinfer's CUTLASS MoE for Hopper reads them: the results of its
    interleave_moe_weights_for_sm90_mixed_gemm ("fp4") and interleave_moe_scales_for_sm90_mixed_gemm.

    (codes uint8 [..., R, K / 2], scales uint8), scales [..., K / 128, 4 R] for flashinfer 0.6.11, where R is a multiple
    of 16, and [..., R / 64, K / 128, 16, 16] for 0.7.2, where R is a multiple of 64; codes differ too. Rows keep their
    order: flashinfer wants [up; gate].

    codes: uint8 [..., R, K / 2], on CPU or CUDA; K a multiple of 128.
    scales: uint8 [..., R, K / 32].
    """

def deinterleave_sm90_mxfp4(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of interleave_sm90_mxfp4: what a `flashinfer_mxfp4` layer of SGLang holds on Hopper, back in the
    checkpoint's form (codes uint8 [..., R, K / 2], scales uint8 [..., R, K / 32]), on CPU or CUDA.

    The scales' dimensions tell which flashinfer it was: as many as the codes have (0.6), or two more (0.7). Rows keep
    their order, [up; gate], and rows and columns that SGLang added as padding stay, with scales 0 and elements 0.
    """

def pack_mxfp4(
    codes: Tensor,
    scales: Tensor,
    *,
    gated: bool = False,
    layout: Literal["gate_up", "up_gate", "interleaved"] = "gate_up",
    activation_dtype: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Checkpoint MXFP4 weights as oxmoe's GPU kernels read them (csrc/common/mxfp4.cuh). `oxmoe.quantize.mxfp4_pack`.

    (codes uint8 [..., ceil(R / 64), ceil(K / 64), 2048], scales uint8 [..., ceil(R / 64), ceil(K / 64), 128],
    expert_scales fp32 [...]), padding 0. expert_scales are powers of two: 1, or 2^(E - 128) where a matrix's largest
    scale byte E (255, NaN, does not count) is above 128. The packed form of gated rows is the same for every layout.
    For e4m3 activations it is that of csrc/common/mxfp4_e4m3.cuh, with expert_scales 2^(max(E, 7) - 133); then scales
    below max(E, 7) - 11 are brought up to it and their codes rounded, to nearest even, so that unpack_mxfp4 has no
    inverse for it.

    codes: uint8 [..., R, K / 2], on CPU or CUDA; K a multiple of 32.
    scales: uint8 or float8_e8m0fnu [..., R, K / 32].
    gated: rows are gate and up rows.
    layout: of gate and up rows.
    activation_dtype: None, or torch.float8_e4m3fn for the kernels of e4m3 activations.
    """

def unpack_mxfp4(
    codes: Tensor,
    scales: Tensor,
    expert_scales: Tensor,
    *,
    rows: int,
    columns: int,
    gated: bool = False,
    layout: Literal["gate_up", "up_gate", "interleaved"] = "gate_up",
) -> tuple[Tensor, Tensor]:
    """The inverse of pack_mxfp4: (codes uint8 [..., rows, columns / 2], scales uint8 [..., rows, columns / 32]), the
    checkpoint's form. `oxmoe.quantize.mxfp4_unpack`.

    Codes of blocks whose scale is 255 (NaN) are 0: packing drops them. All else comes back.

    codes: uint8 [..., ceil(rows / 64), ceil(columns / 64), 2048], on CPU or CUDA.
    scales: uint8 [..., ceil(rows / 64), ceil(columns / 64), 128].
    expert_scales: fp32 [...].
    columns: a multiple of 32.
    """

def quantize_nvfp4(
    x: Tensor,
    global_scale: Tensor | None = None,
    *,
    block: int = 16,
    scale_dtype: Literal["e4m3", "e8m0"] = "e4m3",
    scale_layout: Literal["128x4", "8x4", "linear"] = "128x4",
    inverse: bool = False,
    masked_m: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x in e2m1 with a scale for each block of columns: (codes uint8 [B, M, K / 2], scales uint8 [B, M', G']).
    `oxmoe.nvfp4` has it under flashinfer's names.

    The scale is e4m3(global_scale amax / 6), or (e8m0) that rounded up to a power of two; elements are x times
    global_scale over the scale, rounded to nearest even. NaN counts for no scale and becomes 6 of them. M' and G' are
    M and K / block, padded to whole tiles with zeros where scale_layout has tiles. Codes and scales of rows beyond
    masked_m stay undefined.

    x: bf16, f16 or fp32 [B, M, K], K a multiple of block, on CPU or CUDA.
    global_scale: fp32 [1] or [B], which multiplies x; None: 1.
    block: columns that share a scale: 16 or 32.
    inverse: x is divided by global_scale.
    masked_m: int32 [B], the rows of each batch that count.
    """

def quantize_rows_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in e4m3 with one scale a row: (codes uint8 [..., K], scales fp32 [...]). `oxmoe.quantize.rows_e4m3`.

    scale = amax / 448, or 1 where that is less than 2^-126; codes are x * (1 / scale) in fp32, rounded to nearest even.
    A NaN makes its row NaN; of a row with an infinity, infinities become NaN and the rest 0.

    x: bf16 [..., K], on CPU, or on sm_90 with K a multiple of 8.
    """

def shape_workspace_bytes(
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    num_tokens: int,
    *,
    format: str = "bf16",
    gated: bool = True,
) -> int:
    """Bytes of workspace that `moe` needs for up to num_tokens tokens of a layer of this shape, whose weights need not
    be there: workspace_bytes of them. `oxmoe.cutlass_fused_moe_workspace_size`.

    num_experts: of this rank.
    format: as ExpertWeights.format.
    """

def explain(
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    num_tokens: int,
    *,
    format: str = "bf16",
    gated: bool = True,
    arch: str | None = None,
) -> str:
    """The plan for a shape, as text: kernels, tiles, warps, stages, grids, shared memory, workspace, roofline floor.

    format: as ExpertWeights.format; "f32" has no kernels on GPUs.
    arch: "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121" or "cpu";
    default: this machine's first GPU, else the CPU.
    """

def device_info() -> dict[str, Any]:
    """What this build and this machine are, as doctor prints it: version, commit (None where the build knew none; with
    "-dirty" where files differed from it), kernels, nvcc, archs with kernels in the wheel, weight formats with the
    devices that run them, driver (whether there is one), driver_cuda (the CUDA version that it speaks, or None),
    needed_cuda (the one that this build needs), gpus (name, arch, multiprocessors, shared_bytes, kernels), CPU
    instructions and threads."""

def stats(*, reset: bool = False) -> dict[str, dict[str, Any]]:
    """What this process has done so far, for a server's metrics.

    reset: sets every count to 0 as it is read.

    Returns:
        calls: for each of moe, moe_masked, moe_contiguous, topk, mm_mxfp8 and allreduce_fusion the calls and their
            rows (tokens; rows that there is room for).
        launches: for each kernel that was launched, by its symbol, how often, on all GPUs.

    A replay of a CUDA graph is no call and counts nothing: what was captured counts once. Calls of no rows and calls
    that raised an error are not counted.
    """

def allreduce_message(operands: Any) -> tuple[int, Tensor]:
    """(shape word, message) of one call: message [T, H] is what this rank contributes. Checks every operand.

    operands: the arguments of oxmoe.allreduce_fusion, as attributes.
    """

def allreduce_finish(operands: Any, messages: list[Tensor | bytes]) -> Tensor:
    """Writes the outputs from every rank's message, in rank order (tensors, or raw bytes of [T, H]).

    Returns norm_out, else quant_out, else residual_out, else output.
    """

@final
class AllReduceMemory:
    """One rank's all-reduce memory on a GPU, mapped by all ranks. `create_allreduce_fusion_workspace` makes it.

    bytes: of the largest message.
    dtype: whose kernels are loaded now; those of others are at their first call.
    """

    def __new__(
        cls,
        device: int,
        world_size: int,
        rank: int,
        bytes: int,
        dtype: str,
        *,
        force_oneshot_support: bool = False,
    ) -> AllReduceMemory: ...
    @property
    def device(self) -> int:
        """The GPU's number."""

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's workspace."""

    def descriptor(self) -> int:
        """The file descriptor that peers map this memory by. It stays this object's; `open` closes it."""

    def open(self, descriptors: list[int]) -> None:
        """Maps every peer's memory; descriptors by rank, this rank's is not looked at. The caller closes them."""

    def launch(self, operands: Any, deadline: float, use_oneshot: bool | None = None) -> Tensor:
        """One all-reduce on torch's current stream. Returns what `allreduce_finish` returns.

        deadline: seconds that ranks wait for each other.
        use_oneshot: the kernel; None: the one that suits the size.
        """

    def fault(self) -> tuple[bool, str] | None:
        """What went wrong on the GPU, as far as is known without waiting: (whether it was a wait, text)."""

    def synchronize(self) -> None:
        """Waits for this GPU; then `fault` knows what peers have reported too."""

    def close(self) -> None:
        """Waits for this GPU and unmaps everything. A second call does nothing."""

def allreduce_unsupported(device: int, world_size: int) -> str | None:
    """Why a group of world_size ranks on GPU `device` cannot all-reduce CUDA tensors; None if it can."""

def allreduce_shape(word: int) -> str:
    """A shape word in words: "pattern kAllReduce of bfloat16 [6, 2880]"."""

def allreduce_bytes(
    world_size: int,
    max_token_num: int,
    hidden_dim: int,
    dtype: str,
    *,
    device: str = "cpu",
    force_oneshot_support: bool = False,
) -> int:
    """Bytes of an all-reduce workspace on each rank, exact, for messages of up to max_token_num x hidden_dim elements.

    dtype: "bfloat16", "float16" or "float32".
    device: "cpu" or "cuda".
    """
