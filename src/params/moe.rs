//! Routing, grouped GEMMs, combine and whole layers.

#[cxx::bridge(namespace = "oxmoe")]
pub mod ffi {
    unsafe extern "C++" {
        include!("oxmoe/src/params/common.rs.h");
        type Dtype = crate::params::common::ffi::Dtype;
        type W13Layout = crate::params::common::ffi::W13Layout;
        type Tile = crate::params::common::ffi::Tile;
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
        /// The schedule's largest `Tile::count`, 8 or a multiple of 16. An expert's slots are cut evenly in steps of `tile_step`, the
        /// first tiles having a step more.
        tile_tokens: i32,
        /// 16 (8 for tiles of 8), or what a tile is multiplied by at a time where that is more.
        tile_step: i32,
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

    /// Rows that lie expert by expert: the schedule of their grouped GEMMs.
    #[derive(Clone, Copy, Debug)]
    struct ScheduleParams {
        /// i32 `[experts]`: rows of each expert. Those beyond `rows_each` or `rows` do not count.
        row_counts: *const i32,
        experts: i32,
        /// Rows between the first ones of two experts. 0: an expert's begin where those before end, rounded up to `alignment` each.
        rows_each: i32,
        alignment: i32,
        /// Rows there are.
        rows: i32,
        /// As in RouteParams.
        tile_tokens: i32,
        tile_step: i32,
        tiles: *mut Tile,
        tile_count: *mut i32,
        /// i32 `[counter_count]` that get zeros.
        counters: *mut i32,
        counter_count: i32,
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
        /// i32 or null: row of x = `slot_of_place[place] / row_divisor`, or the place itself. In a pair `row_divisor` may be 0: rows of x are
        /// places, and `slot_of_place` is for `slot_weights` alone.
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
        /// Packed: E8M0 (`weights`: codes, both as in csrc/common/mxfp4.cuh, mxfp8.cuh). fp8: fp32 `[experts, rows / 128, k / 128]`. Else
        /// null.
        block_scales: *const u8,
        /// fp8 (`x` and `weights`: e4m3): fp32 `[*, k / 128]`, one for 128 columns of a row of x, else null.
        x_scales: *const f32,
        /// fp32 `[experts]`, packed: powers of two that multiply an expert's sums. NVFP4: any numbers, where gated `[experts, 2]`,
        /// of gate and up. fp8 with a scale for each weight row: `[experts, rows]`, any numbers. Else null.
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
        /// i32 `[1 + experts]`, 0 before the launch, or null. CTAs that have ended, then what is there of an expert's `out`, in rows x
        /// units (csrc/moe/gemm_overlap_sm90.cuh).
        done: *mut i32,
        /// `done` of the launch before this one, whose `out` is x, or null. Then this one waits for that and not for the launch.
        awaited: *const i32,
        /// Its CTAs, and its units for a tile.
        awaited_ctas: i32,
        awaited_units: i32,
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
        /// fp32 `[experts]` or null, of packed NVFP4 weights on Hopper: with it `out` is rounded to NVFP4's numbers, an expert's rows multiplied by
        /// its number before.
        out_global_scales: *const f32,
    }

    /// Both GEMMs of a layer, GEMM2 of GEMM1's output; of one that is not there `rows` is 0. Schedule and counter are `up`'s.
    #[derive(Clone, Copy, Debug)]
    struct GemmPairParams {
        up: GroupedGemmParams,
        down: GroupedGemmParams,
        /// The schedule, whose `Tile::done` are counted.
        tiles: *mut Tile,
        /// i32 `[experts]` or null. With it there is no schedule: rows lie expert by expert, and each CTA finds their tiles. The other numbers
        /// are as in `ScheduleParams`.
        row_counts: *const i32,
        /// At most 128.
        experts: i32,
        rows_each: i32,
        tile_tokens: i32,
        tile_step: i32,
        /// With `row_counts`: `PairCounters`, 0 before the launch and after it; `up.next_unit` is the first of them.
        counters: *mut i32,
        /// The GPU's multiprocessors. So many CTAs come to rest on one each; the next ones, which share theirs, take their first unit
        /// later.
        wave: i32,
    }

    /// A grouped GEMM whose rows of x lie in the order of places. Scales lie in any order, given as distances in numbers between those
    /// of neighbouring rows and groups of columns.
    #[derive(Clone, Copy, Debug)]
    struct OrderedGemmParams {
        /// `slot_of_place` serves `slot_weights` alone.
        gemm: GroupedGemmParams,
        x_scale_row: i32,
        x_scale_group: i32,
        out_scale_row: i32,
        out_scale_group: i32,
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
        /// `LayerCounters`: those of an earlier launch, or 0. Launches that may overlap have different ones.
        counters: *mut i32,
        /// Local experts, as in `RouteParams`.
        experts: i32,
        first_expert: i32,
        /// Rounds of GEMM2's units for the CTAs alone that have one unit of GEMM1 less: as many as have the bytes of one.
        extra_rounds: i32,
    }
}
