// Top-k: router logits [tokens, experts] to ids and weights [tokens, top_k], one warp a token. See SelectParams for the rules.
//
// Every lane holds up to kExpertsPerLane consecutive experts as sorted lists of order-preserving words; a round takes the largest
// head of the warp.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/pdl.cuh"
#include "slot_sort.cuh"

namespace oxmoe {

// Unsigned order of the keys = order of the floats, -0 equal to +0, every NaN (the sum makes it the positive one) above all; 0 is
// below every float's key.
__device__ __forceinline__ uint32_t key_of(float value) {
    const uint32_t bits = __float_as_uint(value + 0.0f);
    return bits ^ (uint32_t(int(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float float_of(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

template <typename T>
struct alignas(4 * sizeof(T)) Quad {
    T value[4];
};

// One warp's view of the problem: which experts this lane holds, and the steps from logits to a column's id and weight.
template <int kExpertsPerLane>
class Selector {
    static constexpr int kOwn = kExpertsPerLane, kLength = kOwn < 4 ? kOwn : 4, kLists = kOwn / kLength;
    static_assert(kOwn >= 1 && kOwn % kLength == 0, "the lists of a lane have equal lengths");

    const SelectParams& params_;
    const int lane_, routed_;
    int first_, count_;   // this lane's experts
    int lanes_log2_ = 5;  // lanes that share a group of experts
    bool grouped_, wide_;

public:
    __device__ explicit Selector(const SelectParams& params)
        : params_(params), lane_(threadIdx.x % 32), routed_(params.top_k - params.shared_experts) {
        grouped_ = params.group_score != GroupScore::None && params.topk_group < params.groups;
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
                reinterpret_cast<uintptr_t>(params.correction_bias) % 16 == 0;
    }

    // This lane's logits of one token; -inf where there is no expert.
    __device__ __forceinline__ void load(float (&logit)[kOwn], int token) const {
        const size_t at = size_t(token) * params_.experts + first_;
        switch (params_.logits_dtype) {
            case Dtype::F32:
                return load_row(logit, reinterpret_cast<const float*>(params_.logits) + at);
            case Dtype::F16:
                return load_row(logit, reinterpret_cast<const __half*>(params_.logits) + at);
            case Dtype::Bf16:
                return load_row(logit, reinterpret_cast<const __nv_bfloat16*>(params_.logits) + at);
        }
    }

    // This lane's correction bias; 0 where there is none.
    __device__ __forceinline__ void load_bias(float (&bias)[kOwn]) const {
        if (params_.correction_bias != nullptr) return load_row(bias, params_.correction_bias + first_);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) bias[i] = 0.0f;
    }

    // Whether experts are chosen on their logits, which order them like every score does.
    __device__ __forceinline__ bool on_logit() const { return params_.correction_bias == nullptr && !grouped_; }

    // Lane j < top_k gets the id and the weight of column j. kOnLogit is on_logit().
    template <bool kOnLogit>
    __device__ __forceinline__ void choose(const float (&logit)[kOwn], const float (&bias)[kOwn], int token, int& id,
                                           float& weight) const {
        const Scoring scoring = params_.scoring;
        const bool biased = !kOnLogit && params_.correction_bias != nullptr;
        // Softmax over the chosen equals softmax over all experts once it is renormalized, and needs no sum over all.
        const bool over_chosen =
            scoring == Scoring::SoftmaxTopk || (kOnLogit && scoring == Scoring::Softmax && params_.renormalize);
        const bool scored = scoring != Scoring::SoftmaxTopk && scoring != Scoring::Identity;

        float top = 0.0f, sum = 1.0f;
        if (scoring == Scoring::Softmax && !over_chosen) softmax_terms(logit, top, sum);
        bool in = true;  // whether this lane's group is among the best
        if constexpr (kOnLogit) {
            id = take_best<true>(logit);
        } else {
            float choice[kOwn];
#pragma unroll
            for (int i = 0; i < kOwn; ++i) choice[i] = (scored ? score(logit[i], top, sum) : logit[i]) + bias[i];
            if (grouped_) {
                in = group_is_in(choice);
                // 0 for scores without bias, which are never below it.
                const float out = scored && !biased ? 0.0f : -INFINITY;
#pragma unroll
                for (int i = 0; i < kOwn; ++i) choice[i] = in ? choice[i] : out;
            }
            id = take_best<false>(choice);
        }

        const bool mine = lane_ < routed_;
        const float value = mine ? load_one(size_t(token) * params_.experts + id) : 0.0f;
        float term;
        if (over_chosen) {
            const float most = biased ? float_of(__reduce_max_sync(~0u, mine ? key_of(value) : 0)) : __shfl_sync(~0u, value, 0);
            term = mine ? expf(value - most) : 0.0f;
            term /= sum_of_columns(term);
        } else {
            term = mine ? score(value, top, sum) : 0.0f;
            if (!kOnLogit && grouped_ && !biased && scored) {
                const int lane_of_group = mine ? id / (params_.experts / params_.groups) << lanes_log2_ : 0;
                if (!__shfl_sync(~0u, in, lane_of_group)) term = 0.0f;
            }
            if (params_.renormalize) term /= sum_of_columns(term) + 1e-20f;
        }
        weight = term * params_.scale;
        if (params_.order_by_id) order_by_id(id, weight);
        if (!mine) id = params_.experts + lane_ - routed_, weight = params_.shared_weight;
    }

private:
    template <typename T>
    __device__ __forceinline__ void load_row(float (&value)[kOwn], const T* row) const {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) value[i] = -INFINITY;
        if (kOwn % 4 == 0 && wide_) {
#pragma unroll
            for (int i = 0; i < kOwn; i += 4) {
                if (i >= count_) continue;
                const Quad<T> quad = *reinterpret_cast<const Quad<T>*>(row + i);
#pragma unroll
                for (int j = 0; j < 4 && i + j < kOwn; ++j) value[i + j] = float(quad.value[j]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kOwn; ++i)
                if (i < count_) value[i] = float(row[i]);
        }
    }

    __device__ __forceinline__ float load_one(size_t at) const {
        switch (params_.logits_dtype) {
            case Dtype::F16:
                return float(reinterpret_cast<const __half*>(params_.logits)[at]);
            case Dtype::Bf16:
                return float(reinterpret_cast<const __nv_bfloat16*>(params_.logits)[at]);
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

    // Whether this lane's group is among the best; ties to the lower group.
    __device__ __forceinline__ bool group_is_in(const float (&choice)[kOwn]) const {
        float most = -INFINITY, second = -INFINITY;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            if (i >= count_) continue;
            second = fmaxf(second, fminf(most, choice[i]));
            most = fmaxf(most, choice[i]);
        }
        for (int d = 1; d >> lanes_log2_ == 0; d *= 2) {
            const float most_there = __shfl_xor_sync(~0u, most, d), second_there = __shfl_xor_sync(~0u, second, d);
            second = fmaxf(fminf(most, most_there), fmaxf(second, second_there));
            most = fmaxf(most, most_there);
        }
        const uint32_t mine = key_of(params_.group_score == GroupScore::Top2 ? most + second : most);
        int better = 0;
#pragma unroll 8
        for (int g = 0; g < params_.groups; ++g) {
            const uint32_t other = __shfl_sync(~0u, mine, g << lanes_log2_);
            better += other > mine || (other == mine && g < lane_ >> lanes_log2_);
        }
        return better < params_.topk_group;
    }

    // The key of this lane's i-th expert. Missing experts: 0, or that of -inf with an id above all others when chosen on logits.
    template <bool kOnLogit>
    __device__ __forceinline__ uint32_t key_at(const float (&value)[kOwn], int i) const {
        return kOnLogit || i < count_ ? key_of(value[i]) : 0;
    }

    // The id of the j-th best in lane j < routed.
    //
    // The upper 23 bits of the key and 9 bits that fall with the id make one word, so a round is one reduction. Experts that
    // share the upper bits follow each other; only if there are any among the best, and the lower bits tell them apart, the keys
    // are taken whole.
    template <bool kOnLogit>
    __device__ __forceinline__ int take_best(const float (&value)[kOwn]) const {
        constexpr uint32_t kLow = 511;
        uint32_t word[kLists][kLength];
#pragma unroll
        for (int l = 0; l < kLists; ++l) {
#pragma unroll
            for (int i = 0; i < kLength; ++i)
                word[l][i] = (key_at<kOnLogit>(value, l * kLength + i) & ~kLow) | ((kLow - first_ - l * kLength - i) & kLow);
#pragma unroll
            for (int end = kLength - 1; end > 0; --end)
#pragma unroll
                for (int i = 0; i < end; ++i) {
                    const uint32_t a = word[l][i], b = word[l][i + 1];
                    word[l][i] = max(a, b), word[l][i + 1] = min(a, b);
                }
        }
        uint32_t mine = 0, best = 0;
#pragma unroll 4
        for (int j = 0; j <= routed_; ++j) {  // one more than asked for: the last one's successor
            uint32_t head = word[0][0];
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
        }
        const uint32_t after = __shfl_down_sync(~0u, mine, 1), next = lane_ < routed_ - 1 ? after : best;
        if (__any_sync(~0u, lane_ < routed_ && (mine ^ next) <= kLow)) {
            uint32_t dropped = 0;  // not 0: the lower bits of some key say more than its sign
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                const uint32_t key = key_at<kOnLogit>(value, i);
                dropped |= (key ^ ((key >> 31) - 1)) & kLow;
            }
            if (__any_sync(~0u, dropped)) return take_best_whole<kOnLogit>(value);
        }
        return kLow - (mine & kLow);
    }

    // The same from whole keys.
    template <bool kOnLogit>
    __device__ __forceinline__ int take_best_whole(const float (&value)[kOwn]) const {
        uint32_t taken = 0;
        int id = 0;
#pragma unroll 1
        for (int j = 0; j < routed_; ++j) {
            uint32_t head = 0;
            int number = 0;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                const uint32_t key = taken >> i & 1 ? 0 : key_at<kOnLogit>(value, i);
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

    // Column j of the routed ones gets the expert with the j-th lowest id.
    __device__ __forceinline__ void order_by_id(int& id, float& weight) const {
        int column = 0, source = lane_;
        for (int j = 0; j < routed_; ++j) column += __shfl_sync(~0u, id, j) < id;
        for (int j = 0; j < routed_; ++j)
            if (__shfl_sync(~0u, column, j) == lane_) source = j;
        id = __shfl_sync(~0u, id, source), weight = __shfl_sync(~0u, weight, source);
    }

    // The same sum in every lane < top_k, always added in the same order.
    __device__ __forceinline__ float sum_of_columns(float value) const {
        for (int d = 1; d < params_.top_k; d *= 2) value += __shfl_xor_sync(~0u, value, d);
        return value;
    }
};

template <bool kOnLogit, int kExpertsPerLane, typename Take>
__device__ __forceinline__ void select_tokens_by(const Selector<kExpertsPerLane>& selector, const SelectParams& params, int first,
                                                 int count, Take take) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int tokens = params.num_token_non_padded ? *params.num_token_non_padded : params.tokens;
    for (int t = warp; t < count; t += warps) {
        float logit[kExpertsPerLane], bias[kExpertsPerLane];
        selector.load(logit, first + t);
        if (!kOnLogit) selector.load_bias(bias);
        int id;
        float weight;
        selector.template choose<kOnLogit>(logit, bias, first + t, id, weight);
        if (first + t >= tokens) id = -1, weight = 0.0f;
        if (lane < params.top_k) {
            const size_t slot = size_t(first + t) * params.top_k + lane;
            params.ids[slot] = id;
            params.weights[slot] = weight;
            take(t, lane, id);
        }
    }
}

// Tokens [first, first + count), one warp a token. `take(t, column, id)` follows the writes of token first + t.
template <int kExpertsPerLane, typename Take>
__device__ __forceinline__ void select_tokens(const Selector<kExpertsPerLane>& selector, const SelectParams& params, int first,
                                              int count, Take take) {
    if (selector.on_logit())
        select_tokens_by<true>(selector, params, first, count, take);
    else
        select_tokens_by<false>(selector, params, first, count, take);
}

// Top-k alone, or as the first of two launches: then route.block_histogram gets the slots per expert of each CTA's tokens.
// Grid: any number of CTAs, each with an equal share of the tokens. Shared memory: BlockHistogram's, none when alone.
template <int kExpertsPerLane>
struct Select {
    static constexpr int kMaxThreads = 1024;

    static __device__ __forceinline__ void run(const SelectParams& select, const RouteParams& route) {
        const int share = (select.tokens + gridDim.x - 1) / gridDim.x;
        const int first = min(int(blockIdx.x) * share, select.tokens), count = min(share, select.tokens - first);
        const bool counting = route.block_histogram != nullptr;
        const Selector<kExpertsPerLane> selector(select);
        BlockHistogram histogram(route);

        pdl::launch_dependents();
        if (counting) histogram.clear();
        pdl::wait();
        select_tokens(selector, select, first, count, [&](int, int, int id) {
            if (counting) histogram.add(id);
        });
        if (counting) histogram.write();
    }
};

}  // namespace oxmoe
