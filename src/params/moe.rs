//! Parameters of routing, grouped GEMMs, combine and whole layers.

#[cxx::bridge(namespace = "oxmoe")]
pub mod ffi {
    unsafe extern "C++" {
        include!("oxmoe/src/params/common.rs.h");
        type Dtype = crate::params::common::ffi::Dtype;
        type W13Layout = crate::params::common::ffi::W13Layout;
        type Tile = crate::params::common::ffi::Tile;
    }

    /// The function that GEMM1's epilogue applies to its sums. Gated kinds take (gate, up) pairs, the others one value.
    #[repr(i32)]
    #[derive(Debug)]
    enum ActivationKind {
        /// No function: the sums are stored as they are (GEMM2).
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
        /// gated, SiTU: `alpha tanh(g / alpha) sigmoid(g) * beta tanh(u / beta)`. With beta +inf the factor of u is u itself. The limits
        /// are not read. `GroupedGemmParams::expert_alpha` and `expert_beta` have each expert's own numbers, if they are not null.
        Situ = 9,
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
    /// choice = score + bias (with `SoftmaxTopk` and `Identity`: logit + bias). It is the logit itself if there is neither bias nor groups,
    /// since the logit orders experts like every score does. Experts of groups that are not among the `topk_group` best get the choice
    /// -inf, or 0 if the choice is a score without bias. weight = score without bias, optionally divided by the sum over the chosen +
    /// 1e-20, times `scale`. In the unbiased grouped form the choice stands for the score, so it is 0 outside the best groups. A
    /// renormalized Softmax without bias and groups is computed as SoftmaxTopk, which is equal and needs no 1e-20.
    #[derive(Clone, Copy, Debug)]
    struct SelectParams {
        logits: *const u8,
        logits_dtype: Dtype,
        tokens: i32,
        /// Experts with a logit, at most 1024, a multiple of `groups` (at most 32).
        experts: i32,
        /// Columns of `ids` and `weights`, shared experts included, at most 32.
        top_k: i32,
        /// Bias of the experts' scores, fp32 `[experts]`, or null.
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
        /// Columns are in the order of their ids (triton_kernels) instead of best first; shared experts stay last.
        order_by_id: bool,
        /// Device scalar or null. Rows from this number on get id -1 and weight 0.
        num_token_non_padded: *const i32,
        /// Chosen experts, i32 `[tokens, top_k]`.
        ids: *mut i32,
        /// Weights of the chosen experts, f32 `[tokens, top_k]`.
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
        /// The schedule's largest `Tile::count`, 8 or a multiple of 16. An expert's slots are cut evenly in steps of `tile_step`; the first
        /// tiles have a step more than the others.
        tile_tokens: i32,
        /// 16 (8 for tiles of 8), or the number of slots that a kernel multiplies at a time, if that is more.
        tile_step: i32,
        /// Length of `tiles`. A shorter schedule ends with at least one expert -1.
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
        /// i32 `[counter_count]`, in which the kernels after this one count (`GroupedGemmParams::next_unit`, `LayerParams`). This kernel
        /// sets them to 0. It may be null if `counter_count` is 0.
        counters: *mut i32,
        counter_count: i32,
        /// Scratch of the two-launch form: slots per expert in each block of tokens, 8 or 16 bits each.
        /// It has `[blocks, at most ceil(experts / 2)]` words. Null in Route and in a Select that stands alone.
        block_histogram: *mut i32,
    }

    /// The schedule of grouped GEMMs on rows that lie expert by expert.
    #[derive(Clone, Copy, Debug)]
    struct ScheduleParams {
        /// i32 `[experts]`: rows of each expert. Rows beyond `rows_each` or `rows` do not count.
        row_counts: *const i32,
        experts: i32,
        /// Rows between the first rows of two neighbouring experts. If it is 0, an expert's rows begin where the rows of the expert before
        /// it end, rounded up to a multiple of `alignment`.
        rows_each: i32,
        alignment: i32,
        /// Rows for which there is room.
        rows: i32,
        /// The tiles' largest count and the step in which rows are cut; see `RouteParams`.
        tile_tokens: i32,
        tile_step: i32,
        tiles: *mut Tile,
        tile_count: *mut i32,
        /// i32 `[counter_count]`, which this kernel sets to 0.
        counters: *mut i32,
        counter_count: i32,
    }

    /// triton_kernels' tables of a sorted batch, for blocks of 16, 32, 64 and 128 rows.
    #[derive(Clone, Copy, Debug)]
    struct RaggedParams {
        /// i32 `[experts]`: rows of each expert.
        histogram: *const i32,
        /// i32 `[slots]`: place to slot, -1 if the place has none.
        slot_of_place: *const i32,
        /// Weights of the slots, f32 `[slots]`.
        slot_weights: *const f32,
        /// `gate_dtype` `[slots]`: weight of each place's slot, 0 if the place has none.
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
        /// `[*, k]` row-major. With `row_scales` x is e4m3: on GPUs `[*, 2 * k]` with k a multiple of 32, on CPUs bf16 numbers `[*, k]`.
        x: *const u8,
        /// fp32 `[*]`: the number by which a row of e4m3 x is multiplied. Null if x has no scales of rows.
        row_scales: *const f32,
        /// i32 or null. The row of x of a place is `slot_of_place[place] / row_divisor`, or the place itself if this is null. In a pair of
        /// GEMMs `row_divisor` may be 0: then rows of x are places, and `slot_of_place` serves `slot_weights` alone.
        slot_of_place: *const i32,
        row_divisor: i32,
        tiles: *const Tile,
        tile_count: *const i32,
        /// An i32 counter that is 0 before the launch, or null. With it the Hopper kernel hands out its work units one by one as CTAs
        /// become free, without it in a fixed stride.
        next_unit: *mut i32,
        /// The kernel before this one in the stream writes neither the schedule nor `slot_of_place` nor `next_unit`. It also let this
        /// one start only after its own wait. So weights may be fetched before this kernel waits (GEMM2 after GEMM1).
        schedule_is_older: bool,
        /// `[experts, rows, k]` row-major; the Hopper kernel reads it through a tensor map instead.
        weights: *const u8,
        /// Packed weights: E8M0 scales; `weights` are then codes, and csrc/common/mxfp4.cuh and mxfp8.cuh say how both lie.
        /// fp8: fp32 `[experts, rows / 128, columns of x / 128]`. Null in every other format.
        block_scales: *const u8,
        /// fp8 (`x` and `weights` are e4m3): fp32 `[*, columns of x / 128]`, one scale for 128 columns of a row. Null in every other
        /// format.
        x_scales: *const f32,
        /// Packed weights: fp32 `[experts]`, powers of two that multiply an expert's sums. NVFP4: any numbers, `[experts, 2]` of gate and
        /// up in a gated GEMM. fp8 with a scale for each weight row: `[experts, rows]`, any numbers. Null in every other format.
        expert_scales: *const f32,
        /// `[experts, rows]` in `bias_dtype`, or null.
        bias: *const u8,
        bias_dtype: Dtype,
        /// fp32 `[slots]` or null. The weights multiply the sums after the bias and before the activation (`apply_router_weight_on_input`).
        slot_weights: *const f32,
        /// The output `[places, out_columns]`.
        out: *mut u8,
        /// fp32 `[places, out_columns / 128]`: the scales of an e4m3 `out`. Null if `out` is not e4m3.
        out_scales: *mut f32,
        /// i32 `[1 + experts]`, 0 before the launch, or null. The first number counts the CTAs that have ended. The others count what is
        /// stored of each expert's `out`, in rows x units (csrc/moe/gemm_overlap_sm90.cuh).
        done: *mut i32,
        /// `done` of the launch before this one, whose `out` is x, or null. With it this kernel waits for these counters and not for the
        /// launch.
        awaited: *const i32,
        /// CTAs of the launch that counts in `awaited`.
        awaited_ctas: i32,
        /// Units that the launch which counts in `awaited` has for a tile.
        awaited_units: i32,
        /// Weight rows of an expert: `2 * out_columns` if gated, otherwise `out_columns`.
        rows: i32,
        /// Columns of x. GPU kernels with e4m3 x count pairs of columns.
        k: i32,
        out_columns: i32,
        layout: W13Layout,
        activation: Activation,
        /// ExpertSwiglu and Situ: fp32 `[experts]` each, or null. They are an expert's numbers in place of `activation`'s alpha, beta and
        /// limits.
        expert_alpha: *const f32,
        expert_beta: *const f32,
        expert_limit: *const f32,
        /// Whether `expert_limit` is up_limit and silu_limit. Otherwise it is up_limit and gate_limit.
        expert_limit_after: bool,
        /// Packed NVFP4 weights on Hopper: fp32 `[experts]` or null. With it an expert's rows of `out` are multiplied by its number, then
        /// rounded to NVFP4's numbers.
        out_global_scales: *const f32,
    }

    /// Both GEMMs of a layer: GEMM2 multiplies GEMM1's output. A GEMM that does not run has `rows` 0. Schedule and counter are `up`'s.
    #[derive(Clone, Copy, Debug)]
    struct GemmPairParams {
        up: GroupedGemmParams,
        down: GroupedGemmParams,
        /// The schedule, in whose `Tile::done` the kernel counts.
        tiles: *mut Tile,
        /// i32 `[experts]` or null: rows of each expert. With it there is no schedule: rows lie expert by expert, and each CTA finds their
        /// tiles from the fields below. These fields have the same meaning in `ScheduleParams`.
        row_counts: *const i32,
        /// Experts, at most 128.
        experts: i32,
        rows_each: i32,
        tile_tokens: i32,
        tile_step: i32,
        /// With `row_counts`: `PairCounters`, which are 0 before the launch and after it; `up.next_unit` is the first of them.
        counters: *mut i32,
        /// Multiprocessors of the GPU. The first `wave` CTAs have one each. Later CTAs share a multiprocessor, and take their first unit
        /// later.
        wave: i32,
    }

    /// A grouped GEMM whose rows of x lie in the order of places. Scales may lie in any order: each stride is the distance, in numbers,
    /// between the scales of neighbouring rows or neighbouring groups of columns.
    #[derive(Clone, Copy, Debug)]
    struct OrderedGemmParams {
        /// The GEMM, whose `slot_of_place` serves `slot_weights` alone.
        gemm: GroupedGemmParams,
        x_scale_row: i32,
        x_scale_group: i32,
        out_scale_row: i32,
        out_scale_group: i32,
    }

    /// `out[t] = scale * sum_j weights[t, j] * y[place_of_slot[t * top_k + j]]` in slot order, fp32, rounded once.
    #[derive(Clone, Copy, Debug)]
    struct CombineParams {
        /// GEMM2's output `[places, hidden]`.
        y: *const u8,
        place_of_slot: *const i32,
        /// fp32 `[tokens, top_k]` or null (all ones).
        weights: *const f32,
        /// The output `[tokens, hidden]`, or `[tokens, top_k, hidden]` if `keep_slots`.
        out: *mut u8,
        tokens: i32,
        top_k: i32,
        hidden: i32,
        scale: f32,
        /// There is no sum: `out[t, j] = scale * weights[t, j] * y[...]`, zeros for skipped slots (`no_combine`).
        keep_slots: bool,
        /// Columns that a thread of the kernel takes: 8, 4 or 2 if `hidden` is a multiple of 8, otherwise 1.
        columns: i32,
    }

    /// GEMM1, GEMM2 and combine in one launch. The kernel does not read `next_unit` and `schedule_is_older`.
    #[derive(Clone, Copy, Debug)]
    struct LayerParams {
        up: GroupedGemmParams,
        down: GroupedGemmParams,
        combine: CombineParams,
        /// Length of the schedule: `RouteParams::max_tiles`.
        max_tiles: i32,
        /// i32 `[max_tiles]`, 0 before the launch: row blocks of GEMM1 that are done, for each tile of the schedule.
        tiles_done: *mut i32,
        /// i32 `[ceil(hidden / 64)]`, 0 before the launch: tiles of GEMM2 that are done, for each row block.
        rows_done: *mut i32,
    }

    /// A layer of few tokens in one launch. The kernel does not read the schedule, `slot_of_place`, `place_of_slot`, `slot_weights` and the
    /// counters of `layer`. For `combine.weights` it only checks whether it is null.
    #[derive(Clone, Copy, Debug)]
    struct RoutedLayerParams {
        layer: LayerParams,
        /// The top-k, without bias and groups unless the kernel knows them. Its `ids` and `weights` are not written. If `logits` is null,
        /// ids and weights are given: `ids` points to i32 or i64.
        select: SelectParams,
        ids_are_i64: bool,
        /// `LayerCounters`, as an earlier launch left them, or 0. Launches that may overlap have different counters.
        counters: *mut i32,
        /// Local experts, which begin at the global id `first_expert`.
        experts: i32,
        first_expert: i32,
        /// Rounds of GEMM2's units that go only to the CTAs with one unit of GEMM1 less. So many units of GEMM2 have the bytes of one unit
        /// of GEMM1.
        extra_rounds: i32,
    }
}
