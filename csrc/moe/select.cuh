// Top-k: router logits [tokens, experts] to ids and weights [tokens, top_k], with one warp for each token. The rules are those of
// src/cpu/select.rs. NaN is above all numbers, of experts and of groups. Experts outside the best groups are never chosen.
//
// Every lane holds up to kExpertsPerLane consecutive experts as sorted lists of order-preserving words; a round takes the largest
// head of the warp. A token is picked (ids), then weighed (weights): work that needs only ids does not wait for the weights.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/pdl.cuh"
#include "slot_sort.cuh"

namespace oxmoe {

// The unsigned order of the keys is the order of the floats. -0 is equal to +0, and every NaN (the sum makes it the positive one)
// is above all. 0 is below every float's key.
__device__ __forceinline__ uint32_t key_of(float value) {
    const uint32_t bits = __float_as_uint(value + 0.0f);
    return bits ^ (uint32_t(int(bits) >> 31) | 0x80000000u);
}
constexpr uint32_t kLowestKey = 0x007FFFFFu;  // the key of -inf

__device__ __forceinline__ float float_of(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// A lane's state of a token between its id and its weight. Lane j < top_k holds column j.
struct Choice {
    int id;          // in the final order of columns
    int source;      // lane with the value of this lane's column, before order_by_id
    float value;     // logit of the j-th best in lane j, -inf for other lanes
    float top, sum;  // softmax over all experts is exp(x - top) / sum
};

// One warp's view of the problem: which experts this lane holds, and the steps from logits to a column's id and weight.
// kPlain: there are no bias and no groups, and columns are ordered best first. The other instance serves every case.
template <int kExpertsPerLane, bool kPlain = false>
class Selector {
    static constexpr int kOwn = kExpertsPerLane, kLength = kOwn < 4 ? kOwn : 4, kLists = kOwn / kLength;
    // The bits of a key in which take_best() puts the id. The key of an expert that is missing or may not be chosen is below
    // every number's, and these bits say no more than its sign.
    static constexpr uint32_t kLow = kOwn <= 16 ? 511 : 1023, kNobody = kLow;
    static_assert(kOwn >= 1 && kOwn % kLength == 0, "the lists of a lane have equal lengths");
    static_assert(kOwn <= 32, "a lane marks its experts in the bits of a word");

    const SelectParams& params_;
    const int lane_, routed_;
    int first_, count_;   // this lane's experts
    int lanes_log2_ = 5;  // lanes that share a group of experts
    bool grouped_, wide_;

public:
    __device__ explicit Selector(const SelectParams& params)
        : params_(params), lane_(threadIdx.x % 32), routed_(params.top_k - params.shared_experts) {
        grouped_ = !kPlain && params.group_score != GroupScore::None && params.topk_group < params.groups;
        int size = params.experts, own = kOwn;
        if (grouped_) {
            lanes_log2_ = __clz(params.groups - 1) - 27;
            size = params.experts / params.groups;
            own = (size + (1 << lanes_log2_) - 1) >> lanes_log2_;
        }
        const int group = lane_ >> lanes_log2_, before = (lane_ & ((1 << lanes_log2_) - 1)) * own;
        first_ = group * size + before;
        count_ = grouped_ && group >= params.groups ? 0 : max(0, min(own, size - before));
        wide_ = (params.experts | size | own) % 4 == 0 && reinterpret_cast<uintptr_t>(params.logits) % 16 == 0 &&
                (kPlain || reinterpret_cast<uintptr_t>(params.correction_bias) % 16 == 0);
    }

    // This lane's logits as they lie in memory. A word has one logit, or two 16-bit ones.
    struct Row {
        uint32_t word[kOwn];
    };

    // Begins to read this lane's logits of one token; values() waits for them. A missing expert has -inf.
    __device__ __forceinline__ void fetch(Row& row, int token) const {
        const size_t at = size_t(token) * params_.experts + first_;
        if (params_.logits_dtype == Dtype::F32) {
            fetch_row(row, reinterpret_cast<const uint32_t*>(params_.logits) + at, 0xFF800000u);
        } else {
            const uint32_t lowest = params_.logits_dtype == Dtype::F16 ? 0xFC00FC00u : 0xFF80FF80u;
            fetch_row(row, reinterpret_cast<const uint16_t*>(params_.logits) + at, lowest);
        }
    }

    __device__ __forceinline__ void values(float (&logit)[kOwn], const Row& row) const {
        if (params_.logits_dtype == Dtype::F32) {
#pragma unroll
            for (int i = 0; i < kOwn; ++i) logit[i] = __uint_as_float(row.word[i]);
        } else if (params_.logits_dtype == Dtype::F16) {
#pragma unroll
            for (int i = 0; i < kOwn; ++i) logit[i] = __half2float(__ushort_as_half(uint16_t(row.word[i / 2] >> 16 * (i % 2))));
        } else {
#pragma unroll
            for (int i = 0; i < kOwn; ++i)
                logit[i] = __uint_as_float(i % 2 ? row.word[i / 2] & 0xFFFF0000u : row.word[i / 2] << 16);
        }
    }

    // Reads this lane's logits of one token, and waits for them.
    __device__ __forceinline__ void load(float (&logit)[kOwn], int token) const {
        Row row;
        fetch(row, token);
        values(logit, row);
    }

    // Reads this lane's correction bias, which is 0 if there is none.
    __device__ __forceinline__ void load_bias(float (&bias)[kOwn]) const {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) bias[i] = 0.0f;
        if (!biased()) return;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
            if (i < count_) bias[i] = params_.correction_bias[first_ + i];
    }

    // Whether experts are chosen on their logits, which order them like every score does.
    __device__ __forceinline__ bool on_logit() const { return kPlain || (params_.correction_bias == nullptr && !grouped_); }

    // Picks the ids of a token, column j in lane j < top_k; weigh() computes the weights. kOnLogit is on_logit().
    template <bool kOnLogit>
    __device__ __forceinline__ Choice pick(const float (&logit)[kOwn], const float (&bias)[kOwn], int token) const {
        Choice choice;
        choice.source = lane_;
        choice.top = 0.0f, choice.sum = 1.0f;
        if (params_.scoring == Scoring::Softmax && !over_chosen()) softmax_terms(logit, choice.top, choice.sum);
        int id;
        if constexpr (kOnLogit) {
            id = take_best(logit);
        } else {
            const bool scored = chosen_on_score();
            uint32_t key[kOwn];
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                const float value = (scored ? score(logit[i], choice.top, choice.sum) : logit[i]) + bias[i];
                key[i] = i < count_ ? key_of(value) : kNobody;
            }
            if (grouped_) {
                const bool in = group_is_in(key);
#pragma unroll
                for (int i = 0; i < kOwn; ++i) key[i] = in ? key[i] : kNobody;
            }
            id = take_best(key);
        }
        choice.value = -INFINITY;
        if (lane_ < routed_) choice.value = load_one(size_t(token) * params_.experts + id);
        if (!kPlain && params_.order_by_id) {
            choice.source = lane_of_column(id);
            id = __shfl_sync(~0u, id, choice.source);
        }
        choice.id = lane_ < routed_ ? id : params_.experts + lane_ - routed_;
        return choice;
    }

    // The weight of this lane's column.
    __device__ __forceinline__ float weigh(const Choice& choice) const {
        const bool mine = lane_ < routed_;
        float term;
        if (over_chosen()) {
            const float most =
                biased() ? float_of(__reduce_max_sync(~0u, mine ? key_of(choice.value) : 0)) : __shfl_sync(~0u, choice.value, 0);
            term = mine ? expf(choice.value - most) : 0.0f;
            term /= sum_of_columns(term);
        } else {
            term = mine ? score(choice.value, choice.top, choice.sum) : 0.0f;
            if (params_.renormalize) term /= sum_of_columns(term) + 1e-20f;
        }
        float weight = term * params_.scale;
        if (!kPlain && params_.order_by_id) weight = __shfl_sync(~0u, weight, choice.source);
        return mine ? weight : params_.shared_weight;
    }

private:
    __device__ __forceinline__ bool biased() const { return !kPlain && params_.correction_bias != nullptr; }

    // Softmax over the chosen experts equals softmax over all experts once it is renormalized, and needs no sum over all.
    __device__ __forceinline__ bool over_chosen() const {
        return params_.scoring == Scoring::SoftmaxTopk ||
               (params_.scoring == Scoring::Softmax && params_.renormalize && on_logit());
    }

    // Whether experts are chosen on scores, not on logits.
    __device__ __forceinline__ bool chosen_on_score() const {
        return params_.scoring != Scoring::SoftmaxTopk && params_.scoring != Scoring::Identity && !on_logit();
    }

    template <typename T>
    __device__ __forceinline__ void fetch_row(Row& row, const T* from, uint32_t lowest) const {
        constexpr int kEach = 4 / sizeof(T), kWords = (kOwn + kEach - 1) / kEach;
#pragma unroll
        for (int w = 0; w < kWords; ++w) row.word[w] = lowest;
        if (kOwn % 4 == 0 && wide_) {
#pragma unroll
            for (int i = 0; i < kOwn; i += 4) {
                if (i >= count_) continue;
                if constexpr (kEach == 1) {
                    const uint4 quad = *reinterpret_cast<const uint4*>(from + i);
                    row.word[i] = quad.x, row.word[(i + 1) % kOwn] = quad.y;
                    row.word[(i + 2) % kOwn] = quad.z, row.word[(i + 3) % kOwn] = quad.w;
                } else {
                    const uint2 quad = *reinterpret_cast<const uint2*>(from + i);
                    row.word[i / 2] = quad.x, row.word[(i / 2 + 1) % kOwn] = quad.y;
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                if (i >= count_) continue;
                const uint32_t value = from[i];
                if constexpr (kEach == 1)
                    row.word[i] = value;
                else
                    row.word[i / 2] = i % 2 ? __byte_perm(row.word[i / 2], value, 0x5410) : __byte_perm(lowest, value, 0x3254);
            }
        }
    }

    __device__ __forceinline__ float load_one(size_t at) const {
        switch (params_.logits_dtype) {
            case Dtype::F16:
                return __half2float(reinterpret_cast<const __half*>(params_.logits)[at]);
            case Dtype::Bf16:
                return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(params_.logits)[at]);
            default:
                return reinterpret_cast<const float*>(params_.logits)[at];
        }
    }

    // Softmax is exp(x - top) / sum over all experts of the token.
    __device__ __forceinline__ void softmax_terms(const float (&logit)[kOwn], float& top, float& sum) const {
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) most = max(most, key_of(logit[i]));
        top = float_of(__reduce_max_sync(~0u, most));
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) sum += expf(logit[i] - top);
#pragma unroll
        for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    }

    __device__ __forceinline__ float score(float x, float top, float sum) const {
        switch (params_.scoring) {
            case Scoring::Softmax:
                return expf(x - top) / sum;
            case Scoring::Sigmoid:
                return 1.0f / (1.0f + expf(-x));
            case Scoring::SqrtSoftplus:
                return sqrtf(x > 20.0f ? x : log1pf(expf(x)));
            default:
                return x;
        }
    }

    // Whether this lane's group is among the best; in a tie the lower group wins. Keys are compared: a NaN makes its group the
    // best.
    __device__ __forceinline__ bool group_is_in(const uint32_t (&key)[kOwn]) const {
        uint32_t most = kLowestKey, second = kLowestKey;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            second = max(second, min(most, key[i]));
            most = max(most, key[i]);
        }
        for (int d = 1; d >> lanes_log2_ == 0; d *= 2) {
            const uint32_t most_there = __shfl_xor_sync(~0u, most, d), second_there = __shfl_xor_sync(~0u, second, d);
            second = max(min(most, most_there), max(second, second_there));
            most = max(most, most_there);
        }
        const uint32_t mine = params_.group_score == GroupScore::Top2 ? key_of(float_of(most) + float_of(second)) : most;
        int better = 0;
#pragma unroll(kOwn > 8 ? 1 : 4)
        for (int g = 0; g < params_.groups; ++g) {
            const uint32_t other = __shfl_sync(~0u, mine, g << lanes_log2_);
            better += other > mine || (other == mine && g < lane_ >> lanes_log2_);
        }
        return better < params_.topk_group;
    }

    // Returns the key that take_best() compares, from a logit or a key. Missing experts have the logit -inf, and ids above all
    // others.
    static __device__ __forceinline__ uint32_t key_at(const float (&logit)[kOwn], int i) { return key_of(logit[i]); }
    static __device__ __forceinline__ uint32_t key_at(const uint32_t (&key)[kOwn], int i) { return key[i]; }

    // Returns the id of the j-th best in lane j < routed.
    //
    // The upper bits of the key and kLow's bits, which fall with the id, make one word, so a round is one reduction. Experts that
    // share the upper bits follow each other. If there are such experts among the best, and the lower bits tell them apart, whole
    // keys are compared instead.
    template <typename Value>
    __device__ __forceinline__ int take_best(const Value (&value)[kOwn]) const {
        uint32_t word[kLists][kLength];
#pragma unroll
        for (int l = 0; l < kLists; ++l) {
#pragma unroll
            for (int i = 0; i < kLength; ++i)
                word[l][i] = (key_at(value, l * kLength + i) & ~kLow) | ((kLow - first_ - l * kLength - i) & kLow);
#pragma unroll
            for (int end = kLength - 1; end > 0; --end)
#pragma unroll
                for (int i = 0; i < end; ++i) {
                    const uint32_t a = word[l][i], b = word[l][i + 1];
                    word[l][i] = max(a, b), word[l][i + 1] = min(a, b);
                }
        }
        // Lane j gets the word of rank j. There are as many rounds as columns, or one more.
        uint32_t mine = 0, best = 0, head = 0;
        int rounds = 0;
        const auto round = [&](int j) {
            head = word[0][0];
#pragma unroll
            for (int l = 1; l < kLists; ++l) head = max(head, word[l][0]);
            best = __reduce_max_sync(~0u, head);
            if (lane_ == j) mine = best;
#pragma unroll
            for (int l = 0; l < kLists; ++l) {
                if (word[l][0] != best) continue;
#pragma unroll
                for (int i = 0; i + 1 < kLength; ++i) word[l][i] = word[l][i + 1];
                word[l][kLength - 1] = 0;
            }
        };
#pragma unroll 1
        for (;;) {
            round(rounds), round(rounds + 1);
            if ((rounds += 2) >= routed_) break;
            round(rounds), round(rounds + 1);
            if ((rounds += 2) >= routed_) break;
        }
        // Two of the best are twins if their upper bits are the same. The successor of the last one is in a lane, or is the best
        // of the rest.
        head = word[0][0];
#pragma unroll
        for (int l = 1; l < kLists; ++l) head = max(head, word[l][0]);
        const uint32_t after = __shfl_down_sync(~0u, mine, 1);
        const bool twins = lane_ < min(routed_, 31) && (mine ^ after) <= kLow;
        if (__any_sync(~0u, twins || (rounds == routed_ && (head ^ best) <= kLow))) {
            uint32_t dropped = 0;  // not 0: the lower bits of some key say more than its sign
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                const uint32_t key = key_at(value, i);
                dropped |= (key ^ ((key >> 31) - 1)) & kLow;
            }
            if (__any_sync(~0u, dropped)) return take_best_whole(value);
        }
        return kLow - (mine & kLow);
    }

    // Returns the id of the j-th best in lane j < routed, from whole keys.
    template <typename Value>
    __device__ __forceinline__ int take_best_whole(const Value (&value)[kOwn]) const {
        uint32_t taken = 0;
        int id = 0;
#pragma unroll 1
        for (int j = 0; j < routed_; ++j) {
            uint32_t head = 0;
            int number = 0;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                const uint32_t key = taken >> i & 1 ? 0 : key_at(value, i);
                if (key > head) head = key, number = i;
            }
            const uint32_t best = __reduce_max_sync(~0u, head);
            const int winner = __ffs(__ballot_sync(~0u, head == best)) - 1;
            if (lane_ == winner) taken |= 1u << number;
            const int best_id = __shfl_sync(~0u, first_ + number, winner);
            if (lane_ == j) id = best_id;
        }
        return id;
    }

    // The lane whose id is this lane's column when the routed columns are in the order of their ids.
    __device__ __forceinline__ int lane_of_column(int id) const {
        int column = 0, source = lane_;
        for (int j = 0; j < routed_; ++j) column += __shfl_sync(~0u, id, j) < id;
        for (int j = 0; j < routed_; ++j)
            if (__shfl_sync(~0u, column, j) == lane_) source = j;
        return source;
    }

    // Returns the same sum in every lane < top_k, always added in the same order.
    __device__ __forceinline__ float sum_of_columns(float value) const {
        for (int d = 1; d < params_.top_k; d *= 2) value += __shfl_xor_sync(~0u, value, d);
        return value;
    }
};

// Top-k of tokens [first, first + count), with one warp for each token. `warp` is this warp's number, from warp_of_block().
template <int kExpertsPerLane, bool kPlain>
class TokenLoop {
    // If there are enough registers, the next token is read early, and the last one's weights are computed late.
    static constexpr bool kAhead = kPlain && kExpertsPerLane <= 8, kLate = kPlain || kExpertsPerLane <= 8;

    const SelectParams& params_;
    const Selector<kExpertsPerLane, kPlain> selector_;
    const int first_, count_;
    const int warps_, warp_;  // the last warp of the CTA is 0: the first warps compute the sums over the experts
    int valid_;               // tokens that are no padding

    int pending_ = -1;  // token of this warp that was picked and not yet weighed
    Choice choice_;

public:
    __device__ TokenLoop(const SelectParams& params, int warp, int first, int count)
        : params_(params), selector_(params), first_(first), count_(count), warps_(blockDim.x / 32), warp_(warps_ - 1 - warp) {
        // This brings parameters into the constant cache early.
        if (kPlain && kExpertsPerLane <= 4) asm volatile("" ::"l"(params.ids), "l"(params.weights), "f"(params.scale));
    }

    // Calls `mark(t, column, id)` with the id of each column of token first + t, -1 for padding. Ids and weights are stored one
    // token later, after the loads of the next token; finish() stores the last one's.
    template <typename Mark>
    __device__ __forceinline__ void pick(Mark mark) {
        const int lane = threadIdx.x % 32;
        typename Selector<kExpertsPerLane, kPlain>::Row row;
        if (kAhead && warp_ < count_) selector_.fetch(row, first_ + warp_);
        if (kLate) read_valid();
#pragma unroll 1
        for (int t = warp_; t < count_; t += warps_) {
            float logit[kExpertsPerLane], bias[kExpertsPerLane];
            if (!kAhead) selector_.fetch(row, first_ + t);
            if (!kPlain) selector_.load_bias(bias);
            selector_.values(logit, row);
            if (kAhead && t + warps_ < count_) selector_.fetch(row, first_ + t + warps_);
            if (kLate && pending_ >= 0) weigh();
            choice_ = selector_.template pick<kPlain>(logit, bias, first_ + t);
            pending_ = first_ + t;
            if (!kLate) read_valid();
            if (pending_ >= valid_) choice_.id = -1;
            if (lane < params_.top_k) mark(t, lane, choice_.id);
            if (!kLate) weigh();
        }
    }

    // Calls `body(t, column)` for each column that pick() gave to mark(), in the same threads.
    template <typename Body>
    __device__ __forceinline__ void columns(Body body) const {
        const int lane = threadIdx.x % 32;
        if (lane >= params_.top_k) return;
#pragma unroll 1
        for (int t = warp_; t < count_; t += warps_) body(t, lane);
    }

    // Stores the last token's ids and weights.
    __device__ __forceinline__ void finish() {
        if (kLate && pending_ >= 0) weigh();
    }

private:
    __device__ __forceinline__ void read_valid() {
        valid_ = params_.num_token_non_padded ? *params_.num_token_non_padded : params_.tokens;
    }

    __device__ __forceinline__ void weigh() {
        const int lane = threadIdx.x % 32;
        const float weight = selector_.weigh(choice_);
        if (lane < params_.top_k) {
            const size_t slot = size_t(pending_) * params_.top_k + lane;
            params_.ids[slot] = choice_.id;
            params_.weights[slot] = pending_ < valid_ ? weight : 0.0f;
        }
    }
};

// Top-k alone, or as the first of two launches: then route.block_histogram gets the slots per expert of each CTA's tokens. Grid:
// any number of CTAs, each with an equal share of the tokens. The shared memory is BlockHistogram's; top-k alone needs none.
template <int kExpertsPerLane, bool kPlain>
struct Select {
    static constexpr int kMaxThreads = kExpertsPerLane <= 16 ? 1024 : 512;

    static __device__ __forceinline__ void run(const SelectParams& select, const RouteParams& route) {
        const int share = (select.tokens + gridDim.x - 1) / gridDim.x;
        const int first = min(int(blockIdx.x) * share, select.tokens), count = min(share, select.tokens - first);
        const bool counting = route.block_histogram != nullptr;
        TokenLoop<kExpertsPerLane, kPlain> tokens(select, warp_of_block(), first, count);
        BlockHistogram histogram(route);

        if (counting) histogram.clear();
        pdl::wait();
        pdl::launch_dependents();  // not before the wait: the kernel that prepares tokens for GEMM1 may run beside routing
        tokens.pick([&](int, int, int id) {
            if (counting) histogram.add(id);
        });
        if (counting) histogram.write(share);
        tokens.finish();
    }
};

}  // namespace oxmoe
