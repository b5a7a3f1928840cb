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

    Keeps the tensors alive; does not copy them, but for MXFP4 experts on CUDA, which are packed.
    """

    @staticmethod
    def bf16(
        w13: Tensor,  # [El, 2I, H], or [El, I, H] when not gated
        w2: Tensor,  # [El, H, I]
        *,
        b13: Tensor | None = None,  # [El, 2I] bf16 or fp32
        b2: Tensor | None = None,  # [El, H] bf16 or fp32
        layout: Literal["gate_up", "up_gate", "interleaved"] = "gate_up",
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu",
        gated: bool | None = None,  # default: True, but False for relu2
        alpha: float | Tensor = 1.0,  # silu only: x sigmoid(alpha x)
        beta: float | Tensor = 0.0,  # silu only: added to up
        limit: float | Tensor | None = None,  # silu only: gate <= limit, |up| <= limit
        clamp: Literal["before", "after"] = "before",  # gate is bounded before the sigmoid, or silu(gate) after it
    ) -> ExpertWeights:
        """bf16 experts. GPT-OSS: layout="interleaved", alpha=1.702, beta=1.0, limit=7.0.

        alpha, beta and limit may be fp32 tensors [El] on the weights' device, a number for each expert (swiglu_alpha,
        swiglu_beta and swiglu_limit of flashinfer's cutlass_fused_moe). They are read at every call. What is in them is
        checked on CPU only: alpha and beta are finite, limits positive (inf: none). One number for all is faster.
        """

    @staticmethod
    def f16(w13: Tensor, w2: Tensor, **options: Any) -> ExpertWeights:
        """fp16 experts; options as for bf16 (biases fp16 or fp32)."""

    @staticmethod
    def f32(w13: Tensor, w2: Tensor, **options: Any) -> ExpertWeights:
        """fp32 experts, CPU only; options as for bf16 (biases fp32)."""

    @staticmethod
    def mxfp4(
        w13: Tensor,  # uint8 [El, 2I, H / 2], or [El, I, H / 2] when not gated: two e2m1 codes a byte
        w2: Tensor,  # uint8 [El, H, I / 2]
        w13_scale: Tensor,  # E8M0 [El, 2I, H / 32]: uint8, float8_e8m0fnu, or its value as fp32
        w2_scale: Tensor,  # E8M0 [El, H, I / 32]
        *,
        b13: Tensor | None = None,  # [El, 2I] bf16, f16 or fp32
        b2: Tensor | None = None,  # [El, H] bf16, f16 or fp32
        layout: Literal["gate_up", "up_gate", "interleaved"] = "gate_up",
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,  # as for bf16, these three also fp32 [El]
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
        dtype: Literal["bf16", "f16", "f32"] = "bf16",  # of x, the output and the products
        hidden_size: int | None = None,  # columns of x and the output where w13 and w2 are padded: up to H
        in_place: bool = False,  # on CUDA: pack into the memory of the four tensors
        activation_dtype: Any = None,  # torch.float8_e4m3fn, or its name: W4A8, on Hopper and CPU
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
        """

    @staticmethod
    def fp8_block(
        w13: Tensor,  # float8_e4m3fn [El, 2I, H], or [El, I, H] when not gated
        w2: Tensor,  # float8_e4m3fn [El, H, I]
        w13_scale: Tensor,  # fp32 [El, 2I / 128, H / 128]: SGLang's w13_weight_scale_inv
        w2_scale: Tensor,  # fp32 [El, H / 128, I / 128]
        *,
        b13: Tensor | None = None,  # [El, 2I] bf16 or fp32
        b2: Tensor | None = None,  # [El, H] bf16 or fp32
        layout: Literal["gate_up", "up_gate"] = "gate_up",
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,  # as for bf16, these three also fp32 [El]
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
        """

    @staticmethod
    def fp8_tensor(
        w13: Tensor,  # float8_e4m3fn [El, 2I, H], or [El, I, H] when not gated
        w2: Tensor,  # float8_e4m3fn [El, H, I]
        w13_scale: Tensor,  # fp32 [El], [El, 2] (one for each half of w13's rows), one number, or [El, 2I]
        w2_scale: Tensor,  # fp32 [El], one number, or [El, H]; of rows both may have a last dimension of 1
        *,
        a13_scale: Tensor | None = None,  # fp32, one number or [El], of which the largest counts
        a2_scale: Tensor | None = None,  # the same, of GEMM1's output; both or none
        per_token: bool | None = None,  # without them: a scale for each row (the default), or False: one for all rows
        b13: Tensor | None = None,  # [El, 2I] bf16 or fp32
        b2: Tensor | None = None,  # [El, H] bf16 or fp32
        layout: Literal["gate_up", "up_gate"] = "gate_up",
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,  # as for bf16, these three also fp32 [El]
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
    ) -> ExpertWeights:
        """fp8 experts with one scale for an expert's matrix, as SGLang's Fp8MoEMethod holds them: a weight is its code
        times that scale; or with one for each row of the matrix, as compressed-tensors' "channel" strategy has them.
        H and I are multiples of 128: NotImplementedError for others and for layout="interleaved".

        x is bf16. Its rows, and GEMM1's activated output rounded to bf16, become e4m3: x times the rounded reciprocal
        of the scale, to nearest, ties to even, at most 448. Scales that are not given are amax / 448, amax at least
        1e-10: that of a row, so that a token's result does not depend on the batch around it; or with per_token=False
        that of all rows of x (of all placed rows of GEMM1's output), as in SGLang's own kernels, which makes rows
        depend on each other: another token can move one by several percent. Sums are fp8_block's: the products of 128
        columns are added to fp32 sums times both scales; a scale of a row of weights multiplies the sum of all.
        SGLang's Triton kernel multiplies the whole sum by every scale; results differ by what fp32 rounds.

        w13_scale and w2_scale of the result are tables as fp8_block takes them, made of those given; a change of the
        scales given has no effect. Those of rows are the tensors given.
        """

    @staticmethod
    def mxfp8(
        w13: Tensor,  # float8_e4m3fn (or its bytes as uint8) [El, 2I, H], or [El, I, H] when not gated
        w2: Tensor,  # float8_e4m3fn [El, H, I]
        w13_scale: Tensor,  # E8M0 [El, 2I, H / 32]: uint8, float8_e8m0fnu, or its value as fp32
        w2_scale: Tensor,  # E8M0 [El, H, I / 32]
        *,
        b13: Tensor | None = None,  # [El, 2I] bf16, f16 or fp32
        b2: Tensor | None = None,  # [El, H] bf16, f16 or fp32
        layout: Literal["gate_up", "up_gate", "interleaved"] = "gate_up",
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,  # as for bf16, these three also fp32 [El]
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
        hidden_size: int | None = None,  # columns of x and the output where w13 and w2 are padded: a multiple of 32
        in_place: bool = False,  # on CUDA: pack into the memory of the four tensors
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
        """

    @staticmethod
    def nvfp4(
        w13: Tensor,  # uint8 [El, 2I, H / 2], or [El, I, H / 2] when not gated: two e2m1 codes a byte
        w2: Tensor,  # uint8 [El, H, I / 2]
        w13_scale: Tensor,  # e4m3 (float8_e4m3fn, or its bytes as uint8) [El, 2I, H / 16], see scale_layout
        w2_scale: Tensor,  # e4m3 [El, H, I / 16]
        w13_global_scale: float | Tensor,  # fp32: one number, [El], or [El, 2] for gate and up
        w2_global_scale: float | Tensor,  # fp32: one number, or [El]
        *,
        input_global_scale: float | Tensor | None = None,  # fp32, one number or [El]: x is rounded to NVFP4
        a2_global_scale: float | Tensor | None = None,  # and so is GEMM1's output; both or neither
        scale_layout: Literal["plain", "swizzled"] | None = None,
        b13: Tensor | None = None,  # [El, 2I] bf16, f16 or fp32
        b2: Tensor | None = None,  # [El, H] bf16, f16 or fp32
        layout: Literal["gate_up", "up_gate", "interleaved", "gate_up_64", "up_gate_64"] = "gate_up",
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu",
        gated: bool | None = None,
        alpha: float | Tensor = 1.0,  # as for bf16, these three also fp32 [El]
        beta: float | Tensor = 0.0,
        limit: float | Tensor | None = None,
        clamp: Literal["before", "after"] = "before",
        dtype: Literal["bf16", "f16", "f32"] = "bf16",  # of x, the output and the products
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
        """

    # The arguments, as given (fp32 scales of MXFP4 as E8M0 bytes): torch.compile and the operators take experts apart
    # through these. Of packed experts the weights and scales are None.
    w13: Tensor | None
    w2: Tensor | None
    b13: Tensor | None
    b2: Tensor | None
    w13_scale: Tensor | None  # formats with block scales, else None
    w2_scale: Tensor | None
    a13_scale: Tensor | None  # fp8_tensor with scales of activations, else None
    a2_scale: Tensor | None
    # MXFP4, MXFP8 and NVFP4 on CUDA, else None: (codes, scales, expert_scales), MXFP4's as oxmoe.quantize.mxfp4_pack
    # gives them of the columns up to hidden_size, or (in_place) the given codes and scales with the same bytes.
    w13_packed: tuple[Tensor, Tensor, Tensor] | None
    w2_packed: tuple[Tensor, Tensor, Tensor] | None
    layout: str
    activation: str
    alpha: float | Tensor
    beta: float | Tensor
    limit: float | Tensor | None
    clamp: str

    # "bf16", "f16", "f32", "mxfp4", "mxfp4-a8" (with an activation_dtype), "fp8_block", "mxfp8", "nvfp4",
    # "nvfp4-a4" (on CUDA, with an input_global_scale), "fp8_tensor" (with per_token=False), "fp8_tensor-token",
    # "fp8_tensor-static" (with a13_scale and a2_scale)
    format: str
    dtype: str  # of x and the output: "bf16", "f16", "f32"
    num_experts: int  # El
    hidden_size: int
    intermediate_size: int
    gated: bool
    device: str  # "cpu" or "cuda:0"

def moe(
    x: Tensor,  # [T, hidden_size] in weights.dtype, or codes with x_scale
    weights: ExpertWeights,
    topk_weights: Tensor | None = None,  # fp32 [T, k]
    topk_ids: Tensor | None = None,  # int32 or int64 [T, k]; -1: no expert, else 0 to ep_size El - 1
    *,
    router_logits: Tensor | None = None,  # fp32, bf16 or f16 [T, E], instead of topk_weights and topk_ids
    top_k: int = 0,  # with router_logits
    scoring_func: Literal["softmax", "sigmoid", "sqrtsoftplus", "softmax_topk", "identity"] = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,  # fp32 [E]
    num_expert_group: int = 0,
    topk_group: int = 0,
    num_token_non_padded: Tensor | None = None,  # int32 scalar tensor on x's device
    routed_scaling_factor: float = 1.0,  # multiplies the combined output
    apply_router_weight_on_input: bool = False,  # weights multiply GEMM1's sums instead of the outputs
    no_combine: bool = False,  # out is [T, k, H], unweighted
    keep_router_weight: bool = False,  # with no_combine: weighted all the same
    ep_size: int = 1,  # > 1: topk_ids are global, these weights hold experts [ep_rank El, (ep_rank + 1) El)
    ep_rank: int = 0,
    # Of float8_e4m3fn x, with fp8 experts: fp32 [T, H / 128] with any strides, [T, 1] or one number, or E8M0 bytes,
    # four groups of 128 columns an int32, [T, ceil(H / 512)] with any strides. Of uint8 x [T, H / 2] (e2m1 pairs), with
    # nvfp4 experts that have an input_global_scale: e4m3 [T, H / 16].
    x_scale: Tensor | None = None,
    out: Tensor | None = None,  # [T, H]; may be x itself
    workspace: Tensor | None = None,  # uint8 [>= workspace_bytes(...)], 256-byte aligned
) -> Tensor:
    """out[t] = routed_scaling_factor * sum_j topk_weights[t, j] * expert(topk_ids[t, j], x[t]),
    expert(e, x) = w2[e] act(w13[e] x + b13[e]) + b2[e].

    Sums in fp32; rounded to the dtype after the activation, after the second GEMM (b2 included) and at the end.
    An id that is neither -1 nor an expert's is a ValueError on CPU, and on GPUs with OXMOE_CHECK_IDS=1 in the
    environment, but not while a CUDA graph is captured; else its slot adds nothing.

    Deterministic; a row's bits do not depend on the batch around it, but with fp8_tensor(per_token=False). Scales
    of quantised tokens that are not fp32 [T, H / 128] row by row are brought into that order by a small kernel.
    """

def workspace_bytes(weights: ExpertWeights, num_tokens: int, top_k: int) -> int:
    """Bytes of workspace that `moe` needs for up to num_tokens tokens: exact, never decreasing in num_tokens."""

def moe_masked(
    x: Tensor,  # [El, m, hidden_size] in weights.dtype, or codes with x_scale
    weights: ExpertWeights,
    masked_m: Tensor,  # int32 [El]
    *,
    x_scale: Tensor | None = None,  # fp32 [El, m, hidden_size / 128]; W4A4 nvfp4: e4m3 [El, m, hidden_size / 16]
    expected_m: int | None = None,  # chooses the tile; default: m / 32
    out: Tensor | None = None,  # [El, m, hidden_size]; may be x itself
    workspace: Tensor | None = None,  # uint8 [>= masked_workspace_bytes(weights, El m)], 256-byte aligned
) -> Tensor:
    """out[e, i] = expert(e, x[e, i]) for i < masked_m[e]; other rows are neither read nor written.
    `oxmoe.moe_masked`."""

def moe_contiguous(
    x: Tensor,  # [M, hidden_size] in weights.dtype, or codes with x_scale
    weights: ExpertWeights,
    counts: Tensor,  # int32 [El]
    *,
    alignment: int = 1,  # of each expert's first row
    x_scale: Tensor | None = None,  # fp32 [M, hidden_size / 128]; W4A4 nvfp4: e4m3 [M, hidden_size / 16]
    expected_m: int | None = None,  # chooses the tile; default: M / El
    out: Tensor | None = None,  # [M, hidden_size]; may be x itself
    workspace: Tensor | None = None,  # uint8 [>= masked_workspace_bytes(weights, M)], 256-byte aligned
) -> Tensor:
    """Every expert on its rows, which follow each other. `oxmoe.moe_contiguous`."""

def masked_workspace_bytes(weights: ExpertWeights, num_rows: int) -> int:
    """Bytes of workspace that `moe_masked` needs for El x m rows, and `moe_contiguous` for M rows: exact, never
    decreasing in num_rows."""

def topk(
    router_logits: Tensor,  # fp32, bf16 or f16 [T, E], E <= 512
    top_k: int,  # <= 32, fused shared experts included
    *,
    scoring_func: Literal["softmax", "sigmoid", "sqrtsoftplus", "softmax_topk", "identity"] = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,  # fp32 [E]: added to the score for the choice only
    num_expert_group: int = 0,
    topk_group: int = 0,
    group_score: Literal["max", "top2"] | None = None,  # default: top2 with a bias, max without
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    apply_routed_scaling_factor_on_output: bool = False,  # weights times routed_scaling_factor
    num_token_non_padded: Tensor | None = None,
    order: Literal["weight", "id"] = "weight",  # of the columns: best first, or by expert id
    topk_weights: Tensor | None = None,  # fp32 [T, k] output
    topk_ids: Tensor | None = None,  # int32 [T, k] output
) -> tuple[Tensor, Tensor]:
    """(topk_weights fp32 [T, k], topk_ids int32 [T, k]), best first, ties to the lower id."""

def sort_by_expert(
    topk_ids: Tensor,  # int32 or int64 [T, k]
    num_experts: int,
    *,
    first_expert: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(histogram int32 [E], offsets int32 [E + 1], place_of_slot int32 [T k], slot_of_place int32 [T k]).

    -1 where there is none. With first_expert these are experts first_expert to first_expert + num_experts - 1, and ids
    of others, which other ranks hold, are skipped. Without it ids are -1 or 0 to num_experts - 1.
    """

def routing_tables(
    topk_weights: Tensor,  # fp32 [T, k]
    topk_ids: Tensor,  # int32 or int64 [T, k]; -1: none
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
    """

def moe_tensors(x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, **options: Any) -> Tensor:
    """`moe` on bare weight tensors, with the options of ExpertWeights and of moe's given-ids form; MXFP4 experts take
    w13_scale, w2_scale and format="mxfp4", on CPU (on CUDA they are packed once, by ExpertWeights.mxfp4).

    Describes the weights at every call, so nothing can go stale when a caller swaps or moves them.
    """

def quantize_fp8(
    x: Tensor,  # bf16, f16 or fp32 [..., K], K a multiple of group, on CPU or CUDA
    group: int,  # 16, 32, 64 or 128
    eps: float,
    *,
    column_major: bool = False,
    row_multiple: int = 1,
    powers: bool = False,
) -> tuple[Tensor, Tensor]:
    """(codes float8_e4m3fn [..., K], scales) of what `oxmoe.quantize.per_token_group_quant_fp8` gives; column-major
    scales [K / group, rows rounded up to row_multiple] and powers of two [ceil(K / group / 4), the same] as they lie in
    memory.
    """

def quantize_mxfp8(
    x: Tensor,  # bf16, f16 or fp32 [..., K], K a multiple of 32, on CPU or CUDA
    *,
    layout: str = "128x4",  # "8x4", "linear"
    alignment: int = 32,
) -> tuple[Tensor, Tensor]:
    """MXFP8 of x: (codes float8_e4m3fn [..., K rounded up to alignment], scales uint8 E8M0, flat).
    `oxmoe.quantize.mxfp8`; `oxmoe.mxfp8_quantize` says more.
    """

def dequantize_mxfp8(
    codes: Tensor,  # float8_e4m3fn or uint8 [..., K]
    scales: Tensor,  # uint8, flat, as quantize_mxfp8 gives them
    dtype: Any = None,
    *,
    layout: str = "128x4",  # "8x4", "linear"
) -> Tensor:
    """The dtype (float32, float16 or bfloat16, or its name) [..., K] of MXFP8: element times 2^(byte - 127), rounded
    once; the byte 255 makes its 32 elements NaN. `oxmoe.quantize.dequantize_mxfp8`.
    """

def mm_mxfp8(
    a: Tensor,  # float8_e4m3fn [m, k]
    b: Tensor,  # float8_e4m3fn [k, n], strides (1, k)
    a_descale: Tensor,  # uint8 [m, k / 32], or flat
    b_descale: Tensor,  # uint8 [k / 32, n], or flat
    *,
    out: Tensor | None = None,
    out_dtype: Any = None,
    use_8x4_sf_layout: bool = False,
) -> Tensor:
    """`oxmoe.mm_mxfp8`; out_dtype may be float32 too."""

def quantize_mxfp4(
    x: Tensor,  # bf16, f16 or fp32 [..., K], K a multiple of 32, on CPU or CUDA
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
    """

def dequantize_mxfp4(
    codes: Tensor,  # uint8 [..., K / 2], on CPU or CUDA
    scales: Tensor,  # uint8 or float8_e8m0fnu [..., K / 32]
    dtype: Any = None,  # "float32" (default), "float16", "bfloat16", or the torch or numpy dtype
) -> Tensor:
    """The numbers of MXFP4 codes, [..., K]: element times scale, rounded once. `oxmoe.quantize.dequantize`.

    Saturates at the dtype's largest finite value. A scale byte b is 2^(b - 127), 0 included, and 255 makes its 32
    elements NaN (OCP Microscaling Formats 1.0). Bits are those of triton_kernels' upcast_from_mxfp_torch for the bytes
    1 to 254; it reads 0 as 0.0, and 255 as infinity.
    """

def swizzle_hopper_mxfp4(
    codes: Tensor,  # uint8 [..., R, K / 2], on CPU or CUDA
    scales: Tensor,  # uint8 [..., R, G], G >= K / 32
    *,
    num_warps: int = 8,  # of the scale layout: a power of two
    row_multiple: int = 64,  # 64: triton_kernels 3.6 (sglang-kernel 0.4.2); 256: 3.8 (0.4.10)
) -> tuple[Tensor, Tensor]:
    """Checkpoint MXFP4 weights as triton_kernels holds them on Hopper: HopperMXValueLayout (mma_version 3) and
    HopperMXScaleLayout along K.

    (values uint8 [..., 4 ceil64(K / 2), R' / 4], scales uint8 [..., 32 ceil2(G), R'' / 32]), both contiguous in their
    last dimension but one, as `storage.data` is. R' is R rounded up to row_multiple, R'' to 32 num_warps; padding is 0.
    """

def unswizzle_hopper_mxfp4(
    values: Tensor,  # `storage.data` of the weight with its strides, on CPU or CUDA
    scales: Tensor,  # `storage.data` of the weight's scale
    *,
    rows: int,  # of the weight without padding: its shape[-1]
    columns: int,  # K, its shape[-2]
    num_warps: int = 8,  # of the scale's layout; SGLang's is 8
) -> tuple[Tensor, Tensor]:
    """The inverse of swizzle_hopper_mxfp4, for any row_multiple: what a `triton_kernel` layer of SGLang holds, back in
    the checkpoint's form (codes uint8 [..., rows, columns / 2], scales uint8 [..., rows, columns / 32])."""

def interleave_sm90_mxfp4(
    codes: Tensor,  # uint8 [..., R, K / 2], on CPU or CUDA; K a multiple of 128
    scales: Tensor,  # uint8 [..., R, K / 32]
    *,
    flashinfer: Literal["0.6", "0.7"] = "0.7",
) -> tuple[Tensor, Tensor]:
    """Checkpoint MXFP4 weights as flashinfer's CUTLASS MoE for Hopper reads them: the results of its
    interleave_moe_weights_for_sm90_mixed_gemm ("fp4") and interleave_moe_scales_for_sm90_mixed_gemm.

    (codes uint8 [..., R, K / 2], scales uint8), scales [..., K / 128, 4 R] for flashinfer 0.6.11, where R is a multiple
    of 16, and [..., R / 64, K / 128, 16, 16] for 0.7.2, where R is a multiple of 64; codes differ too. Rows keep their
    order: flashinfer wants [up; gate].
    """

def deinterleave_sm90_mxfp4(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of interleave_sm90_mxfp4: what a `flashinfer_mxfp4` layer of SGLang holds on Hopper, back in the
    checkpoint's form (codes uint8 [..., R, K / 2], scales uint8 [..., R, K / 32]), on CPU or CUDA.

    The scales' dimensions tell which flashinfer it was: as many as the codes have (0.6), or two more (0.7). Rows keep
    their order, [up; gate], and rows and columns that SGLang added as padding stay, with scales 0 and elements 0.
    """

def pack_mxfp4(
    codes: Tensor,  # uint8 [..., R, K / 2], on CPU or CUDA; K a multiple of 32
    scales: Tensor,  # uint8 or float8_e8m0fnu [..., R, K / 32]
    *,
    gated: bool = False,  # rows are gate and up rows
    layout: Literal["gate_up", "up_gate", "interleaved"] = "gate_up",  # of gate and up rows
    activation_dtype: Any = None,  # torch.float8_e4m3fn: for the kernels of e4m3 activations
) -> tuple[Tensor, Tensor, Tensor]:
    """Checkpoint MXFP4 weights as oxmoe's GPU kernels read them (csrc/common/mxfp4.cuh). `oxmoe.quantize.mxfp4_pack`.

    (codes uint8 [..., ceil(R / 64), ceil(K / 64), 2048], scales uint8 [..., ceil(R / 64), ceil(K / 64), 128],
    expert_scales fp32 [...]), padding 0. expert_scales are powers of two: 1, or 2^(E - 128) where a matrix's largest
    scale byte E (255, NaN, does not count) is above 128. The packed form of gated rows is the same for every layout.
    For e4m3 activations it is that of csrc/common/mxfp4_e4m3.cuh, with expert_scales 2^(max(E, 7) - 133); then scales
    below max(E, 7) - 11 are brought up to it and their codes rounded, to nearest even, so that unpack_mxfp4 has no
    inverse for it.
    """

def unpack_mxfp4(
    codes: Tensor,  # uint8 [..., ceil(rows / 64), ceil(columns / 64), 2048], on CPU or CUDA
    scales: Tensor,  # uint8 [..., ceil(rows / 64), ceil(columns / 64), 128]
    expert_scales: Tensor,  # fp32 [...]
    *,
    rows: int,
    columns: int,  # a multiple of 32
    gated: bool = False,
    layout: Literal["gate_up", "up_gate", "interleaved"] = "gate_up",
) -> tuple[Tensor, Tensor]:
    """The inverse of pack_mxfp4: (codes uint8 [..., rows, columns / 2], scales uint8 [..., rows, columns / 32]), the
    checkpoint's form. `oxmoe.quantize.mxfp4_unpack`.

    Codes of blocks whose scale is 255 (NaN) are 0: packing drops them. All else comes back.
    """

def quantize_nvfp4(
    x: Tensor,  # bf16, f16 or fp32 [B, M, K], K a multiple of block, on CPU or CUDA
    global_scale: Tensor | None = None,  # fp32 [1] or [B]: multiplies x; None: 1
    *,
    block: int = 16,  # or 32
    scale_dtype: Literal["e4m3", "e8m0"] = "e4m3",
    scale_layout: Literal["128x4", "8x4", "linear"] = "128x4",
    inverse: bool = False,  # x is divided by global_scale
    masked_m: Tensor | None = None,  # int32 [B]: rows of each batch
) -> tuple[Tensor, Tensor]:
    """x in e2m1 with a scale for each block of columns: (codes uint8 [B, M, K / 2], scales uint8 [B, M', G']).
    `oxmoe.nvfp4` has it under flashinfer's names.

    The scale is e4m3(global_scale amax / 6), or (e8m0) that rounded up to a power of two; elements are x times
    global_scale over the scale, rounded to nearest even. NaN counts for no scale and becomes 6 of them. M' and G' are
    M and K / block, padded to whole tiles with zeros where scale_layout has tiles. Codes and scales of rows beyond
    masked_m stay undefined.
    """

def quantize_rows_e4m3(
    x: Tensor,  # bf16 [..., K], on CPU, or on sm_90 with K a multiple of 8
) -> tuple[Tensor, Tensor]:
    """x in e4m3 with one scale a row: (codes uint8 [..., K], scales fp32 [...]). `oxmoe.quantize.rows_e4m3`.

    scale = amax / 448, or 1 where that is less than 2^-126; codes are x * (1 / scale) in fp32, rounded to nearest even.
    A NaN makes its row NaN; of a row with an infinity, infinities become NaN and the rest 0.
    """

def explain(
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    num_tokens: int,
    *,
    format: str = "bf16",  # as ExpertWeights.format; "f32" has no kernels on GPUs
    gated: bool = True,
    arch: str | None = None,  # "sm_80", "sm_90", "sm_100", "sm_120", "cpu"; default: this machine's
) -> str:
    """The plan for a shape, as text: kernels, tiles, warps, stages, grids, shared memory, workspace, roofline floor."""

def device_info() -> dict[str, Any]:
    """What doctor prints: driver, GPUs (name, arch, SMs, memory), archs in the wheel, nvcc, weight formats with the
    devices that run them, CPU instructions."""

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
    """One rank's all-reduce memory on a GPU, mapped by all ranks. `create_allreduce_fusion_workspace` makes it."""

    def __new__(
        cls,
        device: int,
        world_size: int,
        rank: int,
        bytes: int,  # of the largest message
        dtype: str,  # whose kernels are loaded now; others at their first call
        *,
        force_oneshot_support: bool = False,
    ) -> AllReduceMemory: ...
    @property
    def device(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def descriptor(self) -> int:
        """The file descriptor that peers map this memory by. It stays this object's; `open` closes it."""

    def open(self, descriptors: list[int]) -> None:
        """Maps every peer's memory; descriptors by rank, this rank's is not looked at. The caller closes them."""

    def launch(self, operands: Any, deadline: float, use_oneshot: bool | None = None) -> Tensor:
        """One all-reduce on torch's current stream. Returns what `allreduce_finish` returns. deadline: seconds."""

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
    dtype: str,  # "bfloat16", "float16", "float32"
    *,
    device: str = "cpu",  # or "cuda"
    force_oneshot_support: bool = False,
) -> int:
    """Bytes of an all-reduce workspace on each rank, exact."""
