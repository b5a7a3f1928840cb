//! Every kernel parameter struct and enum, once, for Rust and CUDA: cxx turns this file into a C++ header that `csrc/` includes as
//! `oxmoe/src/params.rs.h`. Pointers are device addresses in kernel launches and host addresses in the CPU backend.

#[cxx::bridge(namespace = "oxmoe")]
pub mod ffi {
    /// Element type of a tensor.
    #[repr(i32)]
    #[derive(Debug)]
    enum Dtype {
        F32 = 0,
        F16 = 1,
        Bf16 = 2,
    }

    /// What GEMM1's epilogue does with its sums. Gated kinds take (gate, up) pairs, the others one value.
    #[repr(i32)]
    #[derive(Debug)]
    enum ActivationKind {
        /// Nothing: the sums go out as they are (GEMM2).
        Identity = 0,
        /// gated: `min(sigmoid(alpha g') g', silu_limit) * (u' + beta)`, `g' = min(g, gate_limit)`, `u' = clamp(u, up_limit)`.
        /// Plain SwiGLU has alpha 1, beta 0 and all limits +inf; GPT-OSS, limit-only and DeepSeek-V4 clamps are other values.
        Swiglu = 1,
        /// gated: `gelu(g) * u`, exact (erf).
        Geglu = 2,
        /// gated: `gelu(g) * u`, tanh approximation.
        GegluTanh = 3,
        /// not gated: `max(x, 0)^2`.
        Relu2 = 4,
        /// not gated: `x sigmoid(x)`.
        Silu = 5,
        /// not gated: exact GELU.
        Gelu = 6,
        /// not gated: tanh-approximated GELU.
        GeluTanh = 7,
        /// gated: `Swiglu`, with the numbers of `GroupedGemmParams::expert_alpha`, `expert_beta` and `expert_limit`.
        ExpertSwiglu = 8,
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Activation {
        kind: ActivationKind,
        alpha: f32,
        beta: f32,
        /// Upper bound of the gate before the sigmoid; +inf: none.
        gate_limit: f32,
        /// Upper bound of the gate after the sigmoid; +inf: none.
        silu_limit: f32,
        /// Bound of |up|; +inf: none.
        up_limit: f32,
    }

    /// How gate and up rows lie in w13 `[E, 2I, H]`.
    #[repr(i32)]
    #[derive(Debug)]
    enum W13Layout {
        /// Rows 0..I gate, I..2I up (SGLang).
        GateUp = 0,
        /// Rows 0..I up, I..2I gate (flashinfer).
        UpGate = 1,
        /// Row 2i gate, 2i + 1 up (GPT-OSS).
        Interleaved = 2,
    }

    /// Score of an expert from its router logit, in fp32.
    #[repr(i32)]
    #[derive(Debug)]
    enum Scoring {
        /// `exp(x - max) / sum` over all experts of the token.
        Softmax = 0,
        /// `1 / (1 + exp(-x))`.
        Sigmoid = 1,
        /// `sqrt(log(1 + exp(x)))`.
        SqrtSoftplus = 2,
        /// Softmax over the chosen logits only (top-k first).
        SoftmaxTopk = 3,
        /// The logit itself.
        Identity = 4,
    }

    /// How the score of a group of experts is made in grouped top-k.
    #[repr(i32)]
    #[derive(Debug)]
    enum GroupScore {
        /// No groups.
        None = 0,
        /// The best choice value of the group.
        Max = 1,
        /// The sum of the two best choice values of the group (DeepSeek-V3).
        Top2 = 2,
    }

    /// Top-k: logits `[tokens, experts]` to ids and weights `[tokens, top_k]`, best first, ties to the lower id, NaN above all.
    ///
    /// choice = score + bias (of `SoftmaxTopk` and `Identity`: logit + bias), or the logit itself when there is neither bias nor
    /// groups, since it orders experts like every score does. Experts of groups that are not among the `topk_group` best get the
    /// choice -inf, or 0 when the choice is a score without bias. weight = score without bias (of the unbiased grouped form: the
    /// choice, so 0 outside the best groups), optionally divided by the sum over the chosen + 1e-20, times `scale`. A renormalized
    /// Softmax without bias and groups is computed as SoftmaxTopk, which is equal and needs no 1e-20.
    #[derive(Clone, Copy, Debug)]
    struct SelectParams {
        logits: *const u8,
        logits_dtype: Dtype,
        tokens: i32,
        /// Experts with a logit, at most 512, a multiple of `groups` (at most 32).
        experts: i32,
        /// Columns of `ids` and `weights`, shared experts included, at most 32.
        top_k: i32,
        /// fp32 `[experts]` or null.
        correction_bias: *const f32,
        scoring: Scoring,
        renormalize: bool,
        scale: f32,
        group_score: GroupScore,
        groups: i32,
        topk_group: i32,
        /// The last `shared_experts` columns are experts `experts + i`: SGLang's fused shared experts, always chosen.
        shared_experts: i32,
        /// Weight of every shared expert; `scale` does not touch it.
        shared_weight: f32,
        /// Columns in the order of their ids (triton_kernels) instead of best first; shared experts stay last.
        order_by_id: bool,
        /// Device scalar or null: rows from this one on get id -1 and weight 0.
        num_token_non_padded: *const i32,
        /// i32 `[tokens, top_k]`.
        ids: *mut i32,
        /// f32 `[tokens, top_k]`.
        weights: *mut f32,
    }

    /// Rows `[first, first + count)` of the expert-sorted order, all of one expert. `expert` -1 ends the schedule.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    struct Tile {
        expert: i32,
        first: i32,
        count: i32,
        reserved: i32,
    }

    /// Stable sort of the `tokens * top_k` slots by expert, and the grouped GEMM's tile schedule.
    /// A slot is `t * top_k + j`; its place is its position in the sorted order.
    #[derive(Clone, Copy, Debug)]
    struct RouteParams {
        /// i32 or i64 `[tokens, top_k]`, -1: no expert. Ids outside `[first_expert, first_expert + experts)` are skipped (EP).
        ids: *const u8,
        ids_are_i64: bool,
        tokens: i32,
        top_k: i32,
        /// Local experts.
        experts: i32,
        first_expert: i32,
        /// The schedule's largest `Tile::count`, 8 or a multiple of 16. An expert's slots are cut evenly in steps of 16 (of 8).
        tile_tokens: i32,
        /// Length of `tiles`; the schedule ends with at least one -1 when shorter.
        max_tiles: i32,
        /// i32 `[experts]`: slots per expert.
        histogram: *mut i32,
        /// i32 `[experts + 1]`: first place of each expert; the last is the number of placed slots.
        offsets: *mut i32,
        /// i32 `[tokens * top_k]`: slot to place, -1 for skipped slots.
        place_of_slot: *mut i32,
        /// i32 `[tokens * top_k]`: place to slot, grouped by expert, stable in the slot number; -1 after the last place.
        slot_of_place: *mut i32,
        tiles: *mut Tile,
        tile_count: *mut i32,
        /// i32 `[counter_count]` that get zeros: what the kernels after this one count in (`GroupedGemmParams::next_unit`,
        /// `LayerParams`). May be null when there are none.
        counters: *mut i32,
        counter_count: i32,
        /// Scratch of the two-launch form, null in Route and in a Select that stands alone: slots per expert in each block of tokens,
        /// 8 or 16 bits each, `[blocks, at most ceil(experts / 2)]` words.
        block_histogram: *mut i32,
    }

    /// triton_kernels' tables of a sorted batch, for blocks of 16, 32, 64 and 128 rows.
    #[derive(Clone, Copy, Debug)]
    struct RaggedParams {
        /// i32 `[experts]`: rows of each expert.
        histogram: *const i32,
        /// i32 `[slots]`, -1: none.
        slot_of_place: *const i32,
        /// f32 `[slots]`.
        slot_weights: *const f32,
        /// `gate_dtype` `[slots]`: weight of each place's slot, 0 where there is none.
        gate: *mut u8,
        gate_dtype: Dtype,
        experts: i32,
        slots: i32,
        /// i32 `[4, experts + 1]`: first block of each expert, then the number of blocks.
        block_offsets: *mut i32,
        /// i32 `[4, max_blocks]`: block << 16 | expert, expert by expert, then -1.
        block_schedule: *mut i32,
        max_blocks: i32,
    }

    /// `out[place, :] = activation(weights[expert(place)] x[row(place), :] + bias[expert(place)])` for every place of the schedule.
    #[derive(Clone, Copy, Debug)]
    struct GroupedGemmParams {
        /// `[*, k]` row-major; with `row_scales` e4m3, on GPUs `[*, 2 * k]` with k a multiple of 32, on CPUs as bf16 numbers `[*, k]`.
        x: *const u8,
        /// fp32 `[*]`, what a row of e4m3 x is multiplied by, else null.
        row_scales: *const f32,
        /// i32 or null: row of x = `slot_of_place[place] / row_divisor`, or the place itself.
        slot_of_place: *const i32,
        row_divisor: i32,
        tiles: *const Tile,
        tile_count: *const i32,
        /// i32, 0 before the launch, or null. With it the Hopper kernel hands out its work units one by one as CTAs become free,
        /// without it in a fixed stride.
        next_unit: *mut i32,
        /// The kernel before this one in the stream neither writes the schedule, `slot_of_place` nor `next_unit`, and let this
        /// one start only after its own wait: then weights may be fetched before this kernel waits (GEMM2 after GEMM1).
        schedule_is_older: bool,
        /// `[experts, rows, k]` row-major; the Hopper kernel reads it through a tensor map instead.
        weights: *const u8,
        /// Packed MXFP4: E8M0 (`weights`: codes, both as in csrc/common/mxfp4.cuh). fp8: fp32 `[experts, rows / 128, k / 128]`. Else
        /// null.
        block_scales: *const u8,
        /// fp8 (`x` and `weights`: e4m3): fp32 `[*, k / 128]`, one for 128 columns of a row of x, else null.
        x_scales: *const f32,
        /// fp32 `[experts]`, packed MXFP4: powers of two that multiply an expert's sums, else null.
        expert_scales: *const f32,
        /// `[experts, rows]` in `bias_dtype`, or null.
        bias: *const u8,
        bias_dtype: Dtype,
        /// fp32 `[slots]` or null: multiplies the sums (after the bias) before the activation (`apply_router_weight_on_input`).
        slot_weights: *const f32,
        /// `[places, out_columns]`.
        out: *mut u8,
        /// fp32 `[places, out_columns / 128]`: then `out` is e4m3, else null.
        out_scales: *mut f32,
        /// Weight rows of an expert: `2 * out_columns` when gated, else `out_columns`.
        rows: i32,
        k: i32,
        out_columns: i32,
        layout: W13Layout,
        activation: Activation,
        /// Of ExpertSwiglu, fp32 `[experts]` each, or null: what an expert has in place of `activation`'s alpha, beta and limits.
        expert_alpha: *const f32,
        expert_beta: *const f32,
        expert_limit: *const f32,
        /// `expert_limit` is up_limit and silu_limit, not up_limit and gate_limit.
        expert_limit_after: bool,
    }

    /// `out[t] = scale * sum_j weights[t, j] * y[place_of_slot[t * top_k + j]]` in slot order, fp32, rounded once.
    #[derive(Clone, Copy, Debug)]
    struct CombineParams {
        /// `[places, hidden]`.
        y: *const u8,
        place_of_slot: *const i32,
        /// fp32 `[tokens, top_k]` or null (all ones).
        weights: *const f32,
        /// `[tokens, hidden]`, or `[tokens, top_k, hidden]` when `keep_slots`.
        out: *mut u8,
        tokens: i32,
        top_k: i32,
        hidden: i32,
        scale: f32,
        /// No sum: `out[t, j] = scale * weights[t, j] * y[...]`, zeros for skipped slots (`no_combine`).
        keep_slots: bool,
        /// Columns that a thread of the kernel takes: 8, 4 or 2 where `hidden` is a multiple of 8, else 1.
        columns: i32,
    }

    /// GEMM1, GEMM2 and combine in one launch. `next_unit` and `schedule_is_older` are not looked at.
    #[derive(Clone, Copy, Debug)]
    struct LayerParams {
        up: GroupedGemmParams,
        down: GroupedGemmParams,
        combine: CombineParams,
        /// Length of the schedule, as in `RouteParams`.
        max_tiles: i32,
        /// i32 `[max_tiles]`, 0 before the launch: row blocks of GEMM1 that are done, by tile of the schedule.
        tiles_done: *mut i32,
        /// i32 `[ceil(hidden / 64)]`, 0 before the launch: tiles of GEMM2 that are done, by row block.
        rows_done: *mut i32,
    }

    /// A layer of few tokens in one launch. Of `layer`, the schedule, `slot_of_place`, `place_of_slot`, `slot_weights` and the counters
    /// are not looked at, of `combine.weights` only whether it is null.
    #[derive(Clone, Copy, Debug)]
    struct RoutedLayerParams {
        layer: LayerParams,
        /// Plain; its `ids` and `weights` are not written.
        select: SelectParams,
        /// Local experts, as in `RouteParams`.
        experts: i32,
        first_expert: i32,
        /// Which of the kernel's counters: launches that may overlap have different ones.
        counter_slot: i32,
        /// Rounds of GEMM2's units for the CTAs alone that have one unit of GEMM1 less: as many as have the bytes of one.
        extra_rounds: i32,
    }

    /// A checkpoint's MXFP4 matrices and their packed form (csrc/common/mxfp4.cuh), either of which is made from the other, or their
    /// form for e4m3 (csrc/common/mxfp4_e4m3.cuh).
    #[derive(Clone, Copy, Debug)]
    struct PackMxfp4Params {
        /// `[experts, rows, 16 * row_blocks]` bytes of codes, E8M0 `[experts, rows, row_blocks]`.
        codes: *mut u8,
        scales: *mut u8,
        row_blocks: i32,
        experts: i32,
        rows: i32,
        /// Rows and columns that are packed; the others become padding, and no scale of theirs counts. All rows where `gated`.
        used_rows: i32,
        k: i32,
        /// Rows are gate and up rows in `layout`.
        gated: bool,
        layout: W13Layout,
        packed_codes: *mut u8,
        packed_scales: *mut u8,
        /// fp32 `[experts]`.
        expert_scales: *mut f32,
        /// Packing for e4m3 activations.
        e4m3: bool,
    }

    /// Other projects' layouts of MXFP4 weights (src/quant/layouts/).
    #[repr(i32)]
    #[derive(Debug)]
    enum Mxfp4Layout {
        /// triton_kernels.
        Hopper = 0,
        /// flashinfer's CUTLASS kernels, 0.6: rows r and r + 8 side by side.
        CutlassPairs = 1,
        /// The same, 0.7: Hopper's words in the same places.
        CutlassSpread = 2,
    }

    /// MXFP4 codes or scales of a checkpoint in another layout, or back.
    #[derive(Clone, Copy, Debug)]
    struct LayoutMxfp4Params {
        input: *const u8,
        output: *mut u8,
        layout: Mxfp4Layout,
        /// Rows that the layout keeps together.
        band_rows: u32,
        /// Of the checkpoint's matrices, columns in bytes; the layout's have its padding, which becomes zeros and is left out.
        rows: u32,
        columns: u32,
        held_rows: u32,
        held_columns: u32,
    }

    /// Numbers and their MXFP4, either of which is made from the other: blocks of 32 numbers, 16 bytes of codes and a scale byte.
    #[derive(Clone, Copy, Debug)]
    struct QuantizeMxfp4Params {
        /// In `dtype`.
        numbers: *mut u8,
        codes: *mut u8,
        scales: *mut u8,
        blocks: i64,
        dtype: Dtype,
        /// Quantising: scales are rounded so that nothing is clipped, else as the OCP specification has it.
        up: bool,
    }

    /// Every rank's all-reduce workspace (src/allreduce/protocol.rs) as it is mapped here. Kernels read it as an array.
    #[derive(Clone, Copy, Debug)]
    struct Workspaces {
        rank0: *mut u8,
        rank1: *mut u8,
        rank2: *mut u8,
        rank3: *mut u8,
        rank4: *mut u8,
        rank5: *mut u8,
        rank6: *mut u8,
        rank7: *mut u8,
    }

    /// How a row of the norm is made narrower (src/cpu/allreduce.rs, `Quantise`).
    #[repr(i32)]
    #[derive(Debug)]
    enum QuantKind {
        None = 0,
        /// e4m3 of value x (1 / scale).
        Fp8 = 1,
        /// e2m1 with an e4m3 scale per 16 values.
        Nvfp4 = 2,
        /// e4m3 with a power-of-two scale per group.
        Groups = 3,
        /// e4m3 with an fp32 scale a row.
        PerToken = 4,
    }

    #[derive(Clone, Copy, Debug)]
    struct Narrowing {
        kind: QuantKind,
        quant_out: *mut u8,
        scale_out: *mut u8,
        /// One fp32; null: `scale`.
        scale_factor: *const f32,
        scale: f32,
        /// Nvfp4: rows of a tile of scales, 128 or 8, 0 where they lie row by row.
        tile_rows: i32,
        /// Groups: chunks of a group, a power of two up to 32, and int32s between columns of `scale_out`.
        group_chunks: i32,
        column_stride: i64,
    }

    /// A rank's contribution where it is a sum of experts' rows (src/cpu/allreduce.rs, `Contribution`).
    #[derive(Clone, Copy, Debug)]
    struct ExpertRows {
        /// Null: the contribution is `input`.
        rows: *const u8,
        row_count: i64,
        /// Row of slot `t top_k + j`, -1 where there is none; null: slot j of token t is row `j tokens + t`.
        row_of_slot: *const i32,
        /// Null: all are 1.
        weights: *const u8,
        weight_dtype: Dtype,
        top_k: i32,
        /// Added last, null where there is none.
        shared: *const u8,
    }

    /// One all-reduce. Tensors are `[tokens, hidden]` and start at multiples of 16 bytes; a chunk is 16 bytes.
    #[derive(Clone, Copy, Debug)]
    struct AllReduceParams {
        workspaces: Workspaces,
        /// Host memory that the device can write: fault word (0: none), this rank's shape word, that of a peer that disagrees.
        report: *mut u64,
        input: *const u8,
        /// Those that a pattern does not read or write are null. `gamma` is `[hidden]` and no kernel before this one writes it.
        residual_in: *const u8,
        gamma: *const u8,
        output: *mut u8,
        residual_out: *mut u8,
        norm_out: *mut u8,
        /// Byte offset of the first slot in every workspace, bytes of a slot; two-shot: byte offset of the gathered sums.
        slots: u64,
        slot_bytes: u64,
        gathered: u64,
        deadline_ns: u64,
        /// What all ranks must agree on.
        shape: u64,
        rank: i32,
        tokens: i32,
        row_chunks: i32,
        /// Two-shot: chunks of an owner's range, CTAs of each stage.
        range: i32,
        scatter_ctas: i32,
        reduce_ctas: i32,
        finish_ctas: i32,
        /// fp32(1 / hidden).
        inverse_hidden: f32,
        epsilon: f32,
        /// Added to gamma.
        weight_bias: f32,
        /// Last: kernels that serve two patterns alone do not look at them.
        experts: ExpertRows,
        narrowing: Narrowing,
    }

    /// Rows of numbers to e4m3 with a scale for each group of columns: amax / 448, or the next power of two.
    #[derive(Clone, Copy, Debug)]
    struct QuantizeFp8Params {
        /// `[rows, columns]` in `dtype`.
        x: *const u8,
        dtype: Dtype,
        /// e4m3 `[rows, columns]`.
        codes: *mut u8,
        /// fp32, or E8M0 bytes, four groups of a row a word (`powers`).
        scales: *mut u8,
        rows: i64,
        /// Device scalar or null: rows from this one on are left alone.
        row_count: *const i32,
        /// A multiple of `group`: 16, 32, 64 or 128.
        columns: i32,
        group: i32,
        /// Scales (words) between neighbouring rows and groups (fours of groups).
        row_stride: i64,
        group_stride: i64,
        /// Least amax.
        eps: f32,
        /// Scales are powers of two, as bytes.
        powers: bool,
    }

    /// Rows of bf16 to e4m3 with one scale each: scale = amax / 448, or 1 where that is less than 2^-126.
    #[derive(Clone, Copy, Debug)]
    struct QuantizeRowsParams {
        /// bf16 `[rows, columns]`.
        x: *const u8,
        /// e4m3 `[rows, out_columns]`, zeros from `columns` on. The CPU backend of a layer writes bf16 numbers, perhaps over x.
        out: *mut u8,
        /// `[rows]`.
        scales: *mut f32,
        rows: i32,
        columns: i32,
        out_columns: i32,
        /// A schedule or null: rows are places, and those after its last one are left alone.
        tiles: *const Tile,
        tile_count: *const i32,
    }

    /// E8M0 bytes of fp32 powers of two.
    #[derive(Clone, Copy, Debug)]
    struct ScaleBytesParams {
        scales: *const f32,
        bytes: *mut u8,
        count: i64,
        /// Unsigned, all ones before the launch: the least index of a number that is no power of two.
        first_wrong: *mut i64,
    }
}

pub use ffi::*;

// SAFETY: plain data; the pointers are addresses that only kernels and CPU loops behind their own bounds follow.
unsafe impl Send for GroupedGemmParams {}
// SAFETY: as above.
unsafe impl Sync for GroupedGemmParams {}
// SAFETY: as above.
unsafe impl Send for QuantizeFp8Params {}
// SAFETY: as above.
unsafe impl Sync for QuantizeFp8Params {}
// SAFETY: as above.
unsafe impl Send for PackMxfp4Params {}
// SAFETY: as above.
unsafe impl Sync for PackMxfp4Params {}
// SAFETY: as above.
unsafe impl Send for QuantizeRowsParams {}
// SAFETY: as above.
unsafe impl Sync for QuantizeRowsParams {}
