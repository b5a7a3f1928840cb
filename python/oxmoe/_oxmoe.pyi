"""The functions of the extension module. Tensors are torch tensors, or numpy arrays on CPUs. A call borrows them.
A call's results come from the library of its tensors. Stored is a tensor that experts hold, of either library.

Letters in shapes: T is the number of tokens, k of experts a token (top_k), E of experts of the model, and El of
experts held here. H is the hidden size and I the intermediate size.

Every function raises these errors. A ValueError says that an operand breaks its contract, and names operand,
dimension, expected and got. A TypeError says that an argument is missing, unknown, or of a type that it cannot have.
A NotImplementedError says that no kernel serves a combination, and lists what is served. A RuntimeError says that the
driver is missing, that this wheel has no kernels for the GPU, or that CUDA failed. If an error is raised, nothing has
been written.
"""

from typing import Any, Literal, TypeVar, final

import numpy
import torch

Tensor = TypeVar("Tensor", torch.Tensor, numpy.ndarray[Any, Any])
Stored = Any

__version__: str

class ExpertWeights:
    """The experts of one MoE layer, which cannot be changed.

    They are checked and described once, at load; on Hopper their tensor maps are encoded then, too. The object keeps
    the tensors that it reads alive and does not copy them. Packed experts (MXFP4, MXFP8, NVFP4 and int4 on CUDA) read
    only the packed form, which is made once.
    """

    @staticmethod
    def bf16(
        w13: Tensor,
        w2: Tensor,
        *,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
        layout: Literal["gate_up", "up_gate", "interleaved"] = "gate_up",
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2", "situ"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
        situ_beta: float | Tensor | None = None,
        situ_linear_beta: float | Tensor | None = None,
    ) -> ExpertWeights:
        """Makes bf16 experts. GPT-OSS needs layout="interleaved", alpha=1.702, beta=1.0, limit=7.0.

        alpha, beta and limit may be fp32 tensors [El] on the weights' device, with one number for each expert. These
        are swiglu_alpha, swiglu_beta and swiglu_limit of flashinfer's cutlass_fused_moe. They are read at every call.
        Their numbers are checked on CPUs only: alpha and beta must be finite, and limits positive (inf means no limit).
        One number for all experts is faster.

        w13: [El, 2I, H], or [El, I, H] when not gated.
        w2: [El, H, I].
        b13: [El, 2I] bf16 or fp32.
        b2: [El, H] bf16 or fp32.
        layout: the order of w13's rows: [gate; up], [up; gate], or a gate row and an up row in turn.
        gated: True if w13 has gate and up rows. The default is True, and False for relu2.
        alpha, beta, limit: only for gated silu, which is g sigmoid(alpha g) (u + beta) with g <= limit and |u| <=
            limit.
        clamp: with "after" the limit bounds g sigmoid(alpha g) instead of g.
        situ_beta, situ_linear_beta: only for gated situ (SiTU, Kimi-K3), which is
            b tanh(g / b) sigmoid(g) * lb tanh(u / lb). b is situ_beta, by default 4.0, and lb is situ_linear_beta.
            Without a situ_linear_beta u itself is the second factor. The sigmoid is that of g, not of the bounded g.
            This is SGLang's SituAndMul and the SituAdaptor of flashinfer's CUTLASS kernels, whose numbers have the
            same names. All of it is fp32. Kimi-K3 has 4.0 and 25.0 (activation_situ_beta and
            activation_situ_linear_beta of its configuration). Both may be fp32 tensors [El] as alpha may. Numbers are
            from 2^-60 to 2^60.
        """

    @staticmethod
    def f16(w13: Tensor, w2: Tensor, **options: Any) -> ExpertWeights:
        """Makes fp16 experts. The options are those of `bf16`; biases are fp16 or fp32."""

    @staticmethod
    def f32(w13: Tensor, w2: Tensor, **options: Any) -> ExpertWeights:
        """Makes fp32 experts, on CPUs only. The options are those of `bf16`; biases are fp32."""

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
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2", "situ"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
        situ_beta: float | Tensor | None = None,
        situ_linear_beta: float | Tensor | None = None,
        dtype: Any = "bf16",
        hidden_size: int | None = None,
        in_place: bool = False,
        activation_dtype: Any = None,
    ) -> ExpertWeights:
        """Makes MXFP4 experts. H and I are multiples of 32. GPT-OSS needs layout="interleaved", alpha=1.702, beta=1.0,
        limit=7.0, and the checkpoint's blocks [E, 2I, H / 32, 16] flattened to [E, 2I, H / 2].

        A weight is its e2m1 code times the scale 2^(byte - 127) of its block, which is 32 neighbours along the row (OCP
        Microscaling Formats v1.0). The even column is in the low nibble. Codes may be int8 or float4_e2m1fn_x2, too.
        The layer multiplies these numbers in dtype. They are exact for scale bytes up to 252 in bf16 and f32, and for
        104 to 140 in f16. The byte 255 makes its block NaN. fp32 scales must be powers of two or NaN; others are a
        ValueError.

        On CPUs the result has the bits of ExpertWeights.bf16 (.f16, .f32) with the weights that
        oxmoe.quantize.dequantize makes in dtype. Beyond the scale bytes above, numbers are rounded to nearest and
        saturate at the largest finite one. If the CPU itself multiplies bf16 (avx512_bf16), numbers below 2^-126 count
        as zero, as they do in bf16 weights.

        With hidden_size below H, the columns of w13, rows of w2 and elements of b2 from hidden_size on are never read.

        On CUDA dtype is "bf16", and the weights are packed once, on the GPU. They go into new tensors (w13_packed,
        w2_packed), and the four given tensors may be freed afterwards. With in_place they go into the given tensors,
        which then no longer hold the checkpoint's weights. in_place needs rows and columns that are multiples of 64,
        and at most 63 columns beyond hidden_size. It copies 32 MiB, or one expert, at a time. The call waits for fp32
        scales, to check that they are powers of two. If the largest scale byte E of a matrix (255 aside) is above 128,
        the kernels sum weights that are 2^(E - 128) times smaller and multiply the sums back in fp32. So no weight
        saturates, and scales below 2^(E - 260) lose bits.

        activation_dtype=torch.float8_e4m3fn makes W4A8 experts. It needs dtype "bf16", and a CPU, or sm_90 with a
        hidden_size that is a multiple of 8. Rows of x become e4m3 with one fp32 scale each, as
        oxmoe.quantize.rows_e4m3 makes them. So do rows of GEMM1's output, after rounding to bf16. Products are those of
        e4m3 numbers. If the largest scale byte of a matrix (255 aside) is E, weights with bytes below max(E, 7) - 11
        are rounded to e2m1 numbers times that scale, to nearest even. The error is at most 2^-13 of the largest scale.
        Sums are fp32 on CPUs. On Hopper they are those of the tensor cores, which add products with about 14 bits.
        docs/kernels/grouped_gemm_mxfp4_e4m3_sm90.md has the error.

        w13: uint8 [El, 2I, H / 2], or [El, I, H / 2] when not gated: two e2m1 codes a byte.
        w2: uint8 [El, H, I / 2].
        w13_scale: E8M0 [El, 2I, H / 32]: uint8, float8_e8m0fnu, or its value as fp32.
        w2_scale: E8M0 [El, H, I / 32].
        b13: [El, 2I] bf16, f16 or fp32.
        b2: [El, H] bf16, f16 or fp32.
        layout, activation, gated, alpha, beta, limit, clamp, situ_beta, situ_linear_beta: as for bf16.
        dtype: the dtype of x, of the output and of the products: "bf16", "f16" or "f32", or torch.bfloat16,
            torch.float16 or torch.float32.
        hidden_size: the columns of x and of the output, at most H. Give it if w13 and w2 are padded.
        in_place: on CUDA the weights are packed into the memory of the four tensors.
        activation_dtype: None, or torch.float8_e4m3fn or its name (W4A8, on Hopper and CPUs).
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
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2", "situ"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
        situ_beta: float | Tensor | None = None,
        situ_linear_beta: float | Tensor | None = None,
    ) -> ExpertWeights:
        """Makes fp8 experts with block scales, as DeepSeek's and Qwen's checkpoints have them. A weight is its code
        times the scale of its 128 x 128 block. H and I are multiples of 128. Other sizes and layout="interleaved" are a
        NotImplementedError.

        x is bf16. Its rows are quantised with a scale for each 128 columns, as
        oxmoe.quantize.per_token_group_quant_fp8 does it. So is GEMM1's activated output, after rounding to bf16. The
        products of 128 columns are multiplied by the scale of the row and that of the block, and added to fp32 sums.

        w13: float8_e4m3fn [El, 2I, H], or [El, I, H] when not gated.
        w2: float8_e4m3fn [El, H, I].
        w13_scale: fp32 [El, 2I / 128, H / 128]: SGLang's w13_weight_scale_inv.
        w2_scale: fp32 [El, H / 128, I / 128].
        b13: [El, 2I] bf16 or fp32.
        b2: [El, H] bf16 or fp32.
        layout, activation, gated, alpha, beta, limit, clamp, situ_beta, situ_linear_beta: as for bf16.
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
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2", "situ"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
        situ_beta: float | Tensor | None = None,
        situ_linear_beta: float | Tensor | None = None,
    ) -> ExpertWeights:
        """Makes fp8 experts with one scale for an expert's matrix, or one for each row of the matrix. A weight is its
        code times its scale. The first form is that of SGLang's Fp8MoEMethod, the second that of the "channel" strategy
        of compressed-tensors. H is a multiple of 128 and I of 16. Other sizes and layout="interleaved" are a
        NotImplementedError.

        x is bf16. Its rows become e4m3, and so does GEMM1's activated output, after rounding to bf16: x times the
        rounded reciprocal of the scale, to nearest, ties to even, at most 448. Scales that are not given are amax /
        448, with amax at least 1e-10. By default amax is that of a row, so a token's result does not depend on the
        batch around it. With per_token=False it is that of all rows of x, or of all placed rows of GEMM1's output, as
        in SGLang's own kernels. Rows then depend on each other: another token can change a row by several percent.

        Sums are those of fp8_block: the products of 128 columns are multiplied by both scales and added to fp32 sums. A
        scale of a row of weights multiplies the final sum. SGLang's Triton kernel multiplies the whole sum by every
        scale; results differ by what fp32 rounds.

        Scales may also be tables of block scales, as fp8_block takes them. If there is one scale for a matrix,
        w13_scale and w2_scale of the result are tables, made from the given scales; a later change of the given scales
        has no effect. Scales of rows are the given tensors. If I is no multiple of 128, a Hopper GPU reads copies of
        w13's scales of rows and of b13 that have zeros behind each half. w13_scale and b13 of the result are then these
        copies.

        w13: float8_e4m3fn [El, 2I, H], or [El, I, H] when not gated.
        w2: float8_e4m3fn [El, H, I].
        w13_scale: fp32 [El], [El, 2] (one for each half of w13's rows), one number, or [El, 2I].
        w2_scale: fp32 [El], one number, or [El, H]. Scales of rows may have a last dimension of 1, in both tensors.
        a13_scale: the scale of x: fp32, one number or [El], of which the largest counts.
        a2_scale: the scale of GEMM1's output, in the same form. Give both a13_scale and a2_scale, or neither.
        per_token: used if a13_scale and a2_scale are not given. True, the default, makes one scale for each row; False
            makes one for all rows of a call.
        b13: [El, 2I] bf16 or fp32.
        b2: [El, H] bf16 or fp32.
        layout, activation, gated, alpha, beta, limit, clamp, situ_beta, situ_linear_beta: as for bf16.
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
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2", "situ"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
        situ_beta: float | Tensor | None = None,
        situ_linear_beta: float | Tensor | None = None,
        hidden_size: int | None = None,
        in_place: bool = False,
    ) -> ExpertWeights:
        """Makes MXFP8 experts (OCP Microscaling Formats v1.0). H and I are multiples of 32. A weight is its e4m3 code
        times the scale 2^(byte - 127) of its block, which is 32 neighbours along the row. The byte 255 makes its block
        NaN.

        x is bf16. Each 32 columns of its rows are rounded to MXFP8, and so is GEMM1's activated output, after rounding
        to bf16. The scale is 2^ceil(log2(amax / 448)). Numbers are rounded to the nearest e4m3 times the scale, ties to
        even. Products of these numbers are exact, and sums are fp32. NaN stays NaN. An infinity becomes NaN, and the
        finite numbers of its group become 0, as do all numbers of a group below 448 * 2^-127.

        On CUDA the weights are packed at load as those of ExpertWeights.mxfp4, with 4096 bytes of codes a block
        (csrc/common/mxfp8.cuh). If the largest scale byte E of a matrix (255 aside) is above 134, the kernels sum
        weights that are 2^(E - 134) times smaller and multiply the sums back in fp32. So no weight saturates, and
        weights below 2^(E - 267) lose bits.

        w13: float8_e4m3fn (or its bytes as uint8) [El, 2I, H], or [El, I, H] when not gated.
        w2: float8_e4m3fn [El, H, I].
        w13_scale: E8M0 [El, 2I, H / 32]: uint8, float8_e8m0fnu, or its value as fp32.
        w2_scale: E8M0 [El, H, I / 32].
        b13: [El, 2I] bf16, f16 or fp32.
        b2: [El, H] bf16, f16 or fp32.
        layout, activation, gated, alpha, beta, limit, clamp, situ_beta, situ_linear_beta: as for bf16.
        hidden_size: the columns of x and of the output, a multiple of 32. Give it if w13 and w2 are padded.
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
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2", "situ"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
        situ_beta: float | Tensor | None = None,
        situ_linear_beta: float | Tensor | None = None,
        dtype: Any = "bf16",
    ) -> ExpertWeights:
        """Makes NVFP4 experts from tensors on a CPU or on CUDA. On CUDA dtype is "bf16", and the weights are packed at
        load into new tensors. H and I are multiples of 16.

        An element is its e2m1 code times the e4m3 scale of its block, which is 16 neighbours along the row. Every dtype
        holds this number exactly. Products are summed in fp32. A global scale multiplies the sums before bias and
        activation.

        With input_global_scale and a2_global_scale (W4A4), rows of x and of GEMM1's output are rounded to dtype and
        then quantised with these numbers, as oxmoe.nvfp4.fp4_quantize does it. Their elements times their block scales
        are multiplied. Nothing divides by the two numbers again. So w13_global_scale and w2_global_scale are what other
        projects call alpha: weight_scale_2 / input_global_scale.

        Scales lie row by row ("plain"), or in the tiles of oxmoe.nvfp4.swizzle_blockscale ("swizzled"). They may also
        be a view [32, 4, row tiles, 4, column tiles, El] of those tiles (convert_sf_to_mma_layout). With None the shape
        decides; if both layouts fit, it is "plain". The layouts "..._64" have 64 gate rows and 64 up rows in turn
        (interleave_w13_halves).

        w13: uint8 [El, 2I, H / 2], or [El, I, H / 2] when not gated: two e2m1 codes a byte.
        w2: uint8 [El, H, I / 2].
        w13_scale: e4m3 (float8_e4m3fn, or its bytes as uint8) [El, 2I, H / 16], in the order of scale_layout.
        w2_scale: e4m3 [El, H, I / 16].
        w13_global_scale: fp32: one number, [El], or [El, 2] for gate and up.
        w2_global_scale: fp32: one number, or [El].
        input_global_scale: fp32, one number or [El], with which x is rounded to NVFP4.
        a2_global_scale: the same for GEMM1's output. Give both, or neither.
        b13: [El, 2I] bf16, f16 or fp32.
        b2: [El, H] bf16, f16 or fp32.
        layout, activation, gated, alpha, beta, limit, clamp, situ_beta, situ_linear_beta: as for bf16.
        dtype: the dtype of x, of the output and of the products: "bf16", "f16" or "f32", or torch.bfloat16,
            torch.float16 or torch.float32.
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
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2", "situ"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
        situ_beta: float | Tensor | None = None,
        situ_linear_beta: float | Tensor | None = None,
        dtype: Any = "bf16",
    ) -> ExpertWeights:
        """Makes int4 experts (W4A16) from tensors on a CPU or on CUDA. On CUDA dtype is "bf16", and the weights are
        packed at load into new tensors. H and I are multiples of 32.

        A weight is (code - zero point) * scale. The scale is rounded to dtype first, the difference is exact, and the
        product is rounded to dtype once. So the layer has the bits of a layer of these plain weights. Products with x
        are summed in fp32.

        Codes are integers from 0 to 15, with the lower column in the lower four bits. The pack-quantized checkpoints of
        compressed-tensors have them so (weight_packed, int32), and oxmoe.int4 makes them from AWQ's and GPTQ's. A group
        of columns shares a scale: H / groups and I / groups are multiples of 32, such as 32, 64, 128 or a whole row.
        The packed form always has a scale for 32 columns.

        w13: [El, 2I, H / 2] uint8 or [El, 2I, H / 8] int32, or [El, I, ...] when not gated.
        w2: [El, H, I / 2] uint8 or [El, H, I / 8] int32.
        w13_scale: bf16, f16 or fp32 [El, 2I, groups of H].
        w2_scale: bf16, f16 or fp32 [El, H, groups of I].
        w13_zeros: uint8 [El, 2I, groups of H], zero points from 0 to 16. None stands for 8 everywhere (symmetric
            codes).
        w2_zeros: uint8 [El, H, groups of I]. Give both, or neither.
        b13: [El, 2I] bf16, f16 or fp32.
        b2: [El, H] bf16, f16 or fp32.
        layout, activation, gated, alpha, beta, limit, clamp, situ_beta, situ_linear_beta: as for bf16.
        dtype: the dtype of x, of the output and of the products: "bf16", "f16" or "f32", or torch.bfloat16,
            torch.float16 or torch.float32.
        """

    @property
    def w13(self) -> Stored | None:
        """The given w13, or None if the weights were packed."""

    @property
    def w2(self) -> Stored | None:
        """The given w2, or None if the weights were packed."""

    @property
    def b13(self) -> Stored | None:
        """The given b13. fp8_tensor may hold a copy of it."""

    @property
    def b2(self) -> Stored | None:
        """The given b2."""

    @property
    def w13_scale(self) -> Stored | None:
        """The scales of w13 that kernels read: the given ones, the E8M0 bytes of given fp32 ones, or the table that
        fp8_tensor makes. It is None for formats without scales, and if the weights were packed."""

    @property
    def w2_scale(self) -> Stored | None:
        """The scales of w2 that kernels read, in the form of w13_scale."""

    @property
    def a13_scale(self) -> Stored | None:
        """The scale of x that kernels read. Only fp8_tensor experts with given scales of activations have one; it is
        None for others."""

    @property
    def a2_scale(self) -> Stored | None:
        """The scale of GEMM1's output that kernels read, in the form of a13_scale."""

    @property
    def w13_packed(self) -> tuple[Stored, Stored, Stored] | None:
        """The packed w13 of MXFP4, MXFP8, NVFP4 and int4 experts on CUDA: (codes, scales, expert_scales). It is None
        for other experts.

        For MXFP4 these are the tensors that oxmoe.quantize.mxfp4_pack makes of the columns up to hidden_size. With
        in_place they are the given codes and scales, which then hold the same bytes.
        """

    @property
    def w2_packed(self) -> tuple[Stored, Stored, Stored] | None:
        """The packed w2, in the form of w13_packed."""

    @property
    def layout(self) -> str:
        """The given layout."""

    @property
    def activation(self) -> str:
        """The given activation."""

    @property
    def alpha(self) -> float | Stored:
        """The given alpha."""

    @property
    def beta(self) -> float | Stored:
        """The given beta."""

    @property
    def limit(self) -> float | Stored | None:
        """The given limit."""

    @property
    def situ_beta(self) -> float | Stored | None:
        """The given situ_beta, or its default. None for other activations than situ."""

    @property
    def situ_linear_beta(self) -> float | Stored | None:
        """The given situ_linear_beta."""

    @property
    def clamp(self) -> str:
        """The given clamp."""

    @property
    def format(self) -> str:
        """The format's name: "bf16", "f16", "f32", "mxfp4", "mxfp4-a8" (with an activation_dtype), "fp8_block",
        "mxfp8", "nvfp4", "nvfp4-a4" (on CUDA, with an input_global_scale), "fp8_tensor" (with per_token=False),
        "fp8_tensor-token", "fp8_tensor-static" (with a13_scale and a2_scale), "int4" or "int4-zeros" (with zero
        points).
        """

    @property
    def dtype(self) -> str:
        """The dtype of x and of the output: "bf16", "f16" or "f32"."""

    @property
    def handle(self) -> int:
        """The number by which operators of torch name these experts. The operators of `torch.ops` whose names end in
        `_held` take it, for experts that are not plain tensors. No other experts of this process have or had this
        number. It keeps nothing alive.
        """

    @property
    def num_experts(self) -> int:
        """The number of experts held here, El."""

    @property
    def hidden_size(self) -> int:
        """The number of columns of x and of the output."""

    @property
    def intermediate_size(self) -> int:
        """The number of columns of GEMM1's output."""

    @property
    def gated(self) -> bool:
        """Whether w13 has gate and up rows."""

    @property
    def device(self) -> str:
        """The device of the weights: "cpu", "cuda:0", ..."""

def experts_of(handle: int) -> ExpertWeights:
    """Returns the experts that have this `ExpertWeights.handle`.

    Raises:
        ValueError: no experts have this handle. They were freed, or the handle belongs to another process.
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
    """Computes the MoE layer. out[t] = routed_scaling_factor * sum_j topk_weights[t, j] * expert(topk_ids[t, j], x[t]),
    where expert(e, x) = w2[e] act(w13[e] x + b13[e]) + b2[e].

    Sums are fp32. Values are rounded to the dtype after the activation, after the second GEMM with b2, and at the end.

    An id that is neither -1 nor an expert's is a ValueError on CPUs. On GPUs its slot adds nothing; with
    OXMOE_CHECK_IDS=1 in the environment it is a ValueError there, too, unless a CUDA graph is being captured.

    The call is deterministic. A row's bits do not depend on the batch around it, except with
    fp8_tensor(per_token=False). Scales of quantised tokens are read where they lie if they are fp32 [T, H / 128] row by
    row. A small kernel brings other scales into that order.

    x: [T, hidden_size] in weights.dtype, or codes with x_scale.
    topk_weights: fp32 [T, k].
    topk_ids: int32 or int64 [T, k]. -1 stands for no expert; others are 0 to ep_size El - 1.
    router_logits: fp32, bf16 or f16 [T, E], instead of topk_weights and topk_ids.
    top_k: experts a token, with router_logits.
    scoring_func to topk_group: with router_logits, as for `topk`.
    num_token_non_padded: with router_logits, an int32 scalar tensor on x's device, as for `topk`.
    routed_scaling_factor: multiplies the combined output.
    apply_router_weight_on_input: weights multiply GEMM1's sums instead of the outputs.
    no_combine: out is [T, k, H], and its rows are not weighted.
    keep_router_weight: with no_combine, the rows are weighted.
    ep_size, ep_rank: with ep_size > 1 ids are global, and these weights hold experts [ep_rank El, (ep_rank + 1) El).
    x_scale: the scales of quantised x. For float8_e4m3fn x and fp8 experts: fp32 [T, H / 128] with any strides, [T, 1],
        one number, or E8M0 bytes [T, ceil(H / 512)] with any strides, of which an int32 holds four groups of 128
        columns. For uint8 x [T, H / 2] (e2m1 pairs) and nvfp4 experts with an input_global_scale: e4m3 [T, H / 16].
    out: [T, H]. It may be x itself.
    workspace: uint8 [>= workspace_bytes(...)], 256-byte aligned.
    """

def workspace_bytes(weights: ExpertWeights, num_tokens: int, top_k: int) -> int:
    """Returns how many bytes of workspace `moe` needs for up to num_tokens tokens. The number is exact, and never
    decreases as num_tokens grows."""

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
    """Computes out[e, i] = expert(e, x[e, i]) for i < masked_m[e]. Other rows are neither read nor written.
    `oxmoe.moe_masked` calls this function.

    x: [El, m, hidden_size] in weights.dtype, or codes with x_scale.
    masked_m: int32 [El], the number of rows of each expert. Numbers below 0 count as 0, and those above m as m.
    x_scale: fp32 [El, m, hidden_size / 128], or for W4A4 nvfp4 experts e4m3 [El, m, hidden_size / 16].
    expected_m: the expected rows per expert, for which tiles are chosen. The default is m / 32.
    out: [El, m, hidden_size]. It may be x itself.
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
    """Runs every expert on its rows. The first counts[0] rows belong to expert 0, the rows of the next expert begin at
    the next multiple of alignment, and so on. Rows of out that belong to no expert are not written.
    `oxmoe.moe_contiguous` calls this function.

    x: [M, hidden_size] in weights.dtype, or codes with x_scale.
    counts: int32 [El], the number of rows of each expert. Numbers below 0 count as 0. Rows beyond M do not count.
    alignment: each expert's first row is a multiple of it.
    x_scale: fp32 [M, hidden_size / 128], or for W4A4 nvfp4 experts e4m3 [M, hidden_size / 16].
    expected_m: the expected rows per expert, for which tiles are chosen. The default is M / El.
    out: [M, hidden_size]. It may be x itself.
    workspace: uint8 [>= masked_workspace_bytes(weights, M)], 256-byte aligned.
    """

def masked_workspace_bytes(weights: ExpertWeights, num_rows: int) -> int:
    """Returns how many bytes of workspace `moe_masked` needs for El x m rows, and `moe_contiguous` for M rows. The
    number is exact, and never decreases as num_rows grows."""

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
    """Chooses experts. Returns (topk_weights fp32 [T, k], topk_ids int32 [T, k]), the best expert first. A tie goes to
    the lower id.

    docs/kernels/routing.md, "Rules of top-k", says what is chosen and what the weights are.

    router_logits: fp32, bf16 or f16 [T, E], E <= 1024.
    top_k: at most 32, fused shared experts included.
    correction_bias: fp32 [E], added to the score for the choice only.
    num_expert_group, topk_group: experts are chosen from the best topk_group of num_expert_group groups. 0 means no
        groups.
    group_score: what a group is judged by. The default is "top2" with a bias and "max" without.
    num_fused_shared_experts: how many of the top_k are shared experts. They take the last columns, with ids E, E + 1,
        ...
    apply_routed_scaling_factor_on_output: weights are multiplied by routed_scaling_factor.
    num_token_non_padded: an int32 scalar tensor on the logits' device. Rows from this number on get ids of -1 and
        weights of 0.
    order: the order of the columns: best first, or by expert id.
    topk_weights, topk_ids: fp32 and int32 [T, k], which are written instead of new tensors.
    """

def sort_by_expert(
    topk_ids: Tensor,
    num_experts: int,
    *,
    first_expert: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorts the T k slots by expert, stably. Returns (histogram int32 [E], offsets int32 [E + 1], place_of_slot int32
    [T k], slot_of_place int32 [T k]). -1 stands for a slot without a place, and for a place without a slot.

    With first_expert the experts are first_expert to first_expert + num_experts - 1. Ids of other experts, which other
    ranks hold, are skipped. Without it ids are -1, or 0 to num_experts - 1.

    topk_ids: int32 or int64 [T, k].
    num_experts: 1 to 1024.
    """

def routing_tables(
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    *,
    gate_dtype: Literal["float32", "float16", "bfloat16"] = "float32",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Makes triton_kernels' tables of a routed batch. Returns (gate_scal [T k], expt_hist int32 [E], slice_offs int32
    [E + 1], combine_indx int32 [T k], dispatch_indx int32 [T k], block_offs_data int32 [4, E + 1], block_schedule_data
    int32 [4, N]).

    A slot is t * k + j. combine_indx gives the slot of each place, grouped by expert and stable in the slot.
    dispatch_indx gives the place of each slot. Both are -1 if there is none. gate_scal is the weight of each place's
    slot in gate_dtype, or 0 if there is none.

    In row i of the two block tables a block is 16 << i rows of one expert. block_offs_data is the running sum of
    ceil(hist / block). block_schedule_data lists block << 16 | expert, expert by expert, then -1.
    N = T k if T k <= E, else E - 1 - floor((E - T k - 1) / 16).

    topk_weights: fp32 [T, k].
    topk_ids: int32 or int64 [T, k]. -1 stands for no expert.
    num_experts: 1 to 512.
    gate_dtype: the dtype of gate_scal.
    """

def moe_tensors(x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, **options: Any) -> Tensor:
    """Runs `moe` on bare weight tensors, with the options of ExpertWeights and of moe's form with given ids. MXFP4
    experts take w13_scale, w2_scale and format="mxfp4", on CPUs only; on CUDA ExpertWeights.mxfp4 packs them once.

    The weights are described at every call, so nothing goes stale if the caller swaps or moves them.
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
    """Quantises x to fp8 with a scale for each group of columns. Returns (codes float8_e4m3fn [..., K], scales), with
    the numbers of `oxmoe.quantize.per_token_group_quant_fp8`.

    Column-major scales are returned as they lie in memory: [K / group, rows rounded up to row_multiple]. Powers of two
    are [ceil(K / group / 4), rows rounded up to row_multiple].

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
    """Quantises x to MXFP8. Returns (codes float8_e4m3fn [..., K rounded up to alignment], scales uint8 E8M0, flat).
    `oxmoe.quantize.mxfp8` calls this function; `oxmoe.mxfp8_quantize` says more.

    x: bf16, f16 or fp32 [..., K], K a multiple of 32, on CPU or CUDA.
    layout: the layout of the scales: "128x4", "8x4" or "linear".
    """

def dequantize_mxfp8(
    codes: Tensor,
    scales: Tensor,
    dtype: Any = None,
    *,
    layout: str = "128x4",
) -> Tensor:
    """Dequantises MXFP8 to dtype (float32, float16 or bfloat16, or its name), [..., K]. A number is the element times
    2^(byte - 127), rounded once. The byte 255 makes its 32 elements NaN. `oxmoe.quantize.dequantize_mxfp8` calls this
    function.

    codes: float8_e4m3fn or uint8 [..., K].
    scales: uint8, flat, as quantize_mxfp8 returns them.
    layout: the layout of the scales: "128x4", "8x4" or "linear".
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
    """Multiplies a by b. Returns bf16, f16 or fp32 [m, n]. Sums are fp32, rounded once. `oxmoe.mm_mxfp8` calls this
    function; out_dtype may be float32 here.

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
    """Quantises x to MXFP4. Returns (codes uint8 [..., K / 2], scales uint8 E8M0 [..., K / 32]). `oxmoe.quantize.mxfp4`
    calls this function.

    A byte holds two e2m1 elements, the low nibble first. A block of 32 elements shares a scale 2^(byte - 127). Elements
    are rounded to nearest, ties to even, and saturate at 6 scales. The option rounding decides the scale from amax, the
    largest magnitude of the block. With "up" it is 2^ceil(log2(amax / 6)), which clips nothing (triton_kernels'
    ROUND_UP, its default). With "down" it is 2^(floor(log2(amax)) - 2), the rule of the OCP Microscaling Formats
    specification 1.0, section 6.3 (triton_kernels' ROUND_DOWN).

    The bits are those of triton_kernels' downcast_to_mxfp_torch, also if x is not finite. Then "down" marks the block
    with the scale 255 (NaN). So does "up" for an infinity; for NaN "up" gives 0.

    x: bf16, f16 or fp32 [..., K], K a multiple of 32, on CPU or CUDA.
    """

def dequantize_mxfp4(
    codes: Tensor,
    scales: Tensor,
    dtype: Any = None,
) -> Tensor:
    """Dequantises MXFP4. Returns [..., K], each element times its scale, rounded once. `oxmoe.quantize.dequantize`
    calls this function.

    Numbers saturate at the dtype's largest finite value. A scale byte b, 0 included, stands for 2^(b - 127). 255 makes
    its 32 elements NaN (OCP Microscaling Formats 1.0). For the bytes 1 to 254 the bits are those of triton_kernels'
    upcast_from_mxfp_torch, which reads 0 as 0.0, and 255 as infinity.

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
    """Converts MXFP4 weights of a checkpoint to the form in which triton_kernels holds them on Hopper:
    HopperMXValueLayout (mma_version 3) and HopperMXScaleLayout along K.

    Returns (values uint8 [..., 4 ceil64(K / 2), R' / 4], scales uint8 [..., 32 ceil2(G), R'' / 32]). Both are
    contiguous in their last dimension but one, as `storage.data` is. R' is R rounded up to row_multiple, and R'' is R
    rounded up to 32 num_warps. Padding is 0.

    codes: uint8 [..., R, K / 2], on CPU or CUDA.
    scales: uint8 [..., R, G], G >= K / 32.
    num_warps: a parameter of the scale layout, a power of two.
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
    """Inverts swizzle_hopper_mxfp4, for any row_multiple. It turns what a `triton_kernel` layer of SGLang holds back
    into the checkpoint's form: (codes uint8 [..., rows, columns / 2], scales uint8 [..., rows, columns / 32]).

    values: `storage.data` of the weight with its strides, on CPU or CUDA.
    scales: `storage.data` of the weight's scale.
    rows: the rows of the weight without padding, its shape[-1].
    columns: K, its shape[-2].
    num_warps: a parameter of the scale layout; SGLang's is 8.
    """

def interleave_sm90_mxfp4(
    codes: Tensor,
    scales: Tensor,
    *,
    flashinfer: Literal["0.6", "0.7"] = "0.7",
) -> tuple[Tensor, Tensor]:
    """Converts MXFP4 weights of a checkpoint to the form that flashinfer's CUTLASS MoE for Hopper reads. These are the
    results of its interleave_moe_weights_for_sm90_mixed_gemm ("fp4") and interleave_moe_scales_for_sm90_mixed_gemm.

    Returns (codes uint8 [..., R, K / 2], scales uint8). For flashinfer 0.6.11 scales are [..., K / 128, 4 R], and R is
    a multiple of 16. For 0.7.2 they are [..., R / 64, K / 128, 16, 16], and R is a multiple of 64. The codes of the two
    differ, too. Rows keep their order; flashinfer wants [up; gate].

    codes: uint8 [..., R, K / 2], on CPU or CUDA; K a multiple of 128.
    scales: uint8 [..., R, K / 32].
    """

def deinterleave_sm90_mxfp4(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Inverts interleave_sm90_mxfp4, on CPU or CUDA. It turns what a `flashinfer_mxfp4` layer of SGLang holds on Hopper
    back into the checkpoint's form: (codes uint8 [..., R, K / 2], scales uint8 [..., R, K / 32]).

    The number of the scales' dimensions tells which flashinfer made them: as many as the codes have (0.6), or two more
    (0.7). Rows keep their order, [up; gate]. Rows and columns that SGLang added as padding stay, with scales of 0 and
    elements of 0.
    """

def pack_mxfp4(
    codes: Tensor,
    scales: Tensor,
    *,
    gated: bool = False,
    layout: Literal["gate_up", "up_gate", "interleaved"] = "gate_up",
    activation_dtype: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Converts MXFP4 weights of a checkpoint to the form that oxmoe's GPU kernels read (csrc/common/mxfp4.cuh).
    `oxmoe.quantize.mxfp4_pack` calls this function.

    Returns (codes uint8 [..., ceil(R / 64), ceil(K / 64), 2048], scales uint8 [..., ceil(R / 64), ceil(K / 64), 128],
    expert_scales fp32 [...]). Padding is 0. expert_scales are powers of two: 1, or 2^(E - 128) if the largest scale
    byte E of a matrix is above 128 (255, NaN, does not count). The packed form of gated rows is the same for every
    layout.

    For e4m3 activations the form is that of csrc/common/mxfp4_e4m3.cuh, with expert_scales 2^(max(E, 7) - 133). Scales
    below max(E, 7) - 11 are then raised to it, and their codes are rounded to nearest even. So unpack_mxfp4 cannot
    invert this form.

    codes: uint8 [..., R, K / 2], on CPU or CUDA; K a multiple of 32.
    scales: uint8 or float8_e8m0fnu [..., R, K / 32].
    gated: whether the rows are gate and up rows.
    layout: the order of gate and up rows.
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
    """Inverts pack_mxfp4. Returns the checkpoint's form: (codes uint8 [..., rows, columns / 2], scales uint8 [...,
    rows, columns / 32]). `oxmoe.quantize.mxfp4_unpack` calls this function.

    Codes of blocks whose scale is 255 (NaN) are 0, because packing drops them. All other codes and scales come back.

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
    """Quantises x to e2m1 with a scale for each block of columns. Returns (codes uint8 [B, M, K / 2], scales uint8
    [B, M', G']). `oxmoe.nvfp4` has this function under flashinfer's names.

    A scale is e4m3(global_scale amax / 6). With "e8m0" it is that number rounded up to a power of two. Elements are x
    times global_scale over the scale, rounded to nearest even. A NaN does not count for the scale, and becomes 6
    scales. M' and G' are M and K / block. If scale_layout has tiles, they are padded to whole tiles with zeros. Codes
    and scales of rows beyond masked_m are undefined.

    x: bf16, f16 or fp32 [B, M, K], K a multiple of block, on CPU or CUDA.
    global_scale: fp32 [1] or [B], which multiplies x. None stands for 1.
    block: the number of columns that share a scale: 16 or 32.
    inverse: with True, x is divided by global_scale.
    masked_m: int32 [B], the number of rows of each batch that count.
    """

def quantize_rows_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises x to e4m3 with one scale a row. Returns (codes uint8 [..., K], scales fp32 [...]).
    `oxmoe.quantize.rows_e4m3` calls this function.

    A scale is amax / 448, or 1 if that is less than 2^-126. Codes are x * (1 / scale) in fp32, rounded to nearest even.
    A NaN makes its row NaN. In a row with an infinity, infinities become NaN and all other numbers 0.

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
    """Returns how many bytes of workspace `moe` needs for up to num_tokens tokens of a layer of this shape. It is
    workspace_bytes without the weights. `oxmoe.cutlass_fused_moe_workspace_size` calls this function.

    num_experts: the number of experts of this rank.
    format: a name as ExpertWeights.format has it.
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
    routing: Literal["logits", "ids"] | None = None,
    num_expert_group: int = 0,
    correction_bias: bool = False,
) -> str:
    """Returns the plan for a shape as text: kernels, tiles, warps, stages, grids, shared memory, workspace, and the
    roofline floor.

    format: a name as ExpertWeights.format has it. "f32" has no kernels on GPUs.
    routing: "logits" for a call from router logits, and "ids" for a call with given topk_ids. The default is the plan
        from logits, and the launches that are different with ids.
    num_expert_group, correction_bias: the router's groups, and whether it has a bias, as in `moe`. "ids" refuses them,
        because such a call has no router.
    arch: "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121" or "cpu". The
        default is this machine's first GPU, or else the CPU.
    """

def device_info() -> dict[str, Any]:
    """Describes this build and this machine, as doctor prints it.

    The build has version, commit, kernels, nvcc, the archs that the wheel has kernels for, and formats with the devices
    that run them. commit is None if the build knew none, and ends in "-dirty" if files differed from it. The machine
    has driver (whether there is one), driver_cuda (the CUDA version that it supports, or None), needed_cuda (the
    version that this build needs), gpus (name, arch, multiprocessors, shared_bytes, kernels), and the CPU's
    instructions and threads.
    """

def stats(*, reset: bool = False) -> dict[str, dict[str, Any]]:
    """Returns counts of what this process has done so far, for a server's metrics.

    reset: with True, every count is set to 0 as it is read.

    Returns:
        calls: the calls of moe, moe_masked, moe_contiguous, topk, mm_mxfp8 and allreduce_fusion, and their rows. Rows
            are tokens, or for rows in expert order the rows that there is room for.
        launches: how often each kernel was launched on all GPUs, by its symbol.

    A replay of a CUDA graph counts nothing: a captured call counts once. Calls of no rows, and calls that raised an
    error, are not counted.
    """

def allreduce_message(operands: Any) -> tuple[int, Any]:
    """Checks every operand of one call. Returns (shape word, message): message [T, H] is what this rank contributes.

    operands: the arguments of oxmoe.allreduce_fusion, as attributes.
    """

def allreduce_finish(operands: Any, messages: list[Tensor | bytes]) -> Tensor:
    """Computes and writes the outputs. messages has every rank's message in rank order, as tensors or raw bytes of
    [T, H].

    Returns the first of norm_out, quant_out, residual_out and output that the call has.
    """

@final
class AllReduceMemory:
    """One rank's all-reduce memory on a GPU, which all ranks map. `create_allreduce_fusion_workspace` makes it.

    bytes: the size of the largest message.
    dtype: the dtype whose kernels are loaded now. Kernels of other dtypes are loaded at their first call.
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
        """The number of the GPU."""

    @property
    def nbytes(self) -> int:
        """The size of this rank's workspace in bytes."""

    def descriptor(self) -> int:
        """Returns the file descriptor by which peers map this memory. This object owns it, and `open` closes it."""

    def open(self, descriptors: list[int]) -> None:
        """Maps every peer's memory.

        descriptors: the descriptors in rank order. This rank's own is ignored. The caller closes them.
        """

    def launch(self, operands: Any, deadline: float, use_oneshot: bool | None = None) -> Any:
        """Launches one all-reduce on torch's current stream. Returns what `allreduce_finish` returns.

        deadline: how many seconds ranks wait for each other.
        use_oneshot: True for the one-shot kernel, False for two-shot. None chooses by the size.
        """

    def refused(self) -> None:
        """Counts a call that this rank refused before `launch`; `launch` counts those that it refuses. Ranks whose
        counts differ disagree at the next call."""

    def fault(self) -> tuple[bool, str] | None:
        """Returns what went wrong on the GPU, as far as it is known without waiting: (whether it was a wait, text).
        None means that no fault is known."""

    def synchronize(self) -> None:
        """Waits for this GPU. Afterwards `fault` also knows what peers have reported."""

    def close(self) -> None:
        """Waits for this GPU and unmaps everything. A second call does nothing."""

def allreduce_unsupported(device: int, world_size: int) -> str | None:
    """Returns why a group of world_size ranks on GPU `device` cannot all-reduce CUDA tensors, or None if it can."""

def allreduce_shape(word: int) -> str:
    """Describes a shape word, such as "pattern kAllReduce of bfloat16 [6, 2880]"."""

def allreduce_bytes(
    world_size: int,
    max_token_num: int,
    hidden_dim: int,
    dtype: str,
    *,
    device: str = "cpu",
    force_oneshot_support: bool = False,
) -> int:
    """Returns the exact size in bytes of an all-reduce workspace on each rank, for messages of up to max_token_num x
    hidden_dim elements.

    dtype: "bfloat16", "float16" or "float32".
    device: "cpu" or "cuda".
    """
