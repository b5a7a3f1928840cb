// Top-k: router logits [tokens, experts] to ids and weights [tokens, top_k], one warp a token. See SelectParams for the rules.
//
// Every lane holds up to kExpertsPerLane consecutive experts as sorted lists of order-preserving 32-bit keys; a round takes the
// largest head of the warp. Lower lanes hold lower ids, so ties go to the lower id.
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
    int tokens_;          // that are not padding
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
        tokens_ = params.num_token_non_padded ? min(params.tokens, *params.num_token_non_padded) : params.tokens;
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

    // Lane j < top_k gets the id and the weight of column j.
    __device__ __forceinline__ void choose(const float (&logit)[kOwn], int token, int& id, float& weight) const {
        const Scoring scoring = params_.scoring;
        const bool biased = params_.correction_bias != nullptr, on_logit = !biased && !grouped_;
        // Softmax over the chosen equals softmax over all experts once it is renormalized, and needs no sum over all.
        const bool over_chosen =
            scoring == Scoring::SoftmaxTopk || (scoring == Scoring::Softmax && on_logit && params_.renormalize);
        const bool scored = scoring != Scoring::SoftmaxTopk && scoring != Scoring::Identity;

        uint32_t key[kOwn];
        float top = 0.0f, sum = 1.0f;
        if (scoring == Scoring::Softmax && !over_chosen) softmax_terms(logit, top, sum);
        if (on_logit) {
#pragma unroll
            for (int i = 0; i < kOwn; ++i) key[i] = i < count_ ? key_of(logit[i]) : 0;
        } else {
            float choice[kOwn];
#pragma unroll
            for (int i = 0; i < kOwn; ++i) choice[i] = scored ? score(logit[i], top, sum) : logit[i];
            if (biased) {
                float bias[kOwn];
                load_row(bias, params_.correction_bias + first_);
#pragma unroll
                for (int i = 0; i < kOwn; ++i) choice[i] += bias[i];
            }
            // Experts outside the best groups: 0 for scores without bias, which are never below it, else -inf.
            const bool in = !grouped_ || group_is_in(choice);
            const float out = scored && !biased ? 0.0f : -INFINITY;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) key[i] = i < count_ ? key_of(in ? choice[i] : out) : 0;
        }

        uint32_t best = 0;
        id = -1;
        take_best(key, best, id);

        const bool mine = lane_ < routed_;
        float value = float_of(best);  // the logit, or the score when experts were chosen on it without bias
        if (biased && mine) value = load_one(size_t(token) * params_.experts + id);
        float term;
        if (over_chosen) {
            const float most = biased ? float_of(__reduce_max_sync(~0u, mine ? key_of(value) : 0)) : __shfl_sync(~0u, value, 0);
            term = mine ? expf(value - most) : 0.0f;
            term /= sum_of_columns(term);
        } else {
            term = scored && (biased || on_logit) ? score(value, top, sum) : value;
            if (!mine) term = 0.0f;
            if (params_.renormalize) term /= sum_of_columns(term) + 1e-20f;
        }
        weight = term * params_.scale;
        if (params_.shared_experts > 0) {
            const float shared = sum_of_columns(term) * params_.shared_scale;
            if (!mine) id = params_.experts + lane_ - routed_, weight = shared;
        }
        if (token >= tokens_) id = -1, weight = 0.0f;
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
        for (int g = 0; g < params_.groups; ++g) {
            const uint32_t other = __shfl_sync(~0u, mine, g << lanes_log2_);
            better += other > mine || (other == mine && g < lane_ >> lanes_log2_);
        }
        return better < params_.topk_group;
    }

    // Lane j < routed gets the key and the id of the j-th best.
    __device__ __forceinline__ void take_best(const uint32_t (&unsorted)[kOwn], uint32_t& best_key, int& best_id) const {
        uint32_t key[kLists][kLength], order[kLists];  // order: numbers of the lane's experts, best first, one a byte
#pragma unroll
        for (int l = 0; l < kLists; ++l) {
            order[l] = 0x03020100u + 0x04040404u * l;
#pragma unroll
            for (int i = 0; i < kLength; ++i) key[l][i] = unsorted[l * kLength + i];
            // Exchanges neighbours only, and only if strictly smaller: equal keys stay in the order of their ids.
#pragma unroll
            for (int end = kLength - 1; end > 0; --end)
#pragma unroll
                for (int i = 0; i < end; ++i) {
                    constexpr uint32_t kSwap[3] = {0x3201, 0x3120, 0x2310};
                    const uint32_t a = key[l][i], b = key[l][i + 1];
                    if (a < b) order[l] = __byte_perm(order[l], 0, kSwap[i]);
                    key[l][i] = max(a, b), key[l][i + 1] = min(a, b);
                }
        }
        for (int j = 0; j < routed_; ++j) {
            uint32_t head = key[0][0];
#pragma unroll
            for (int l = 1; l < kLists; ++l) head = max(head, key[l][0]);
            const uint32_t best = __reduce_max_sync(~0u, head);
            const int winner = __ffs(__ballot_sync(~0u, head == best)) - 1;
            bool mine = lane_ == winner;
            uint32_t number = 0;
#pragma unroll
            for (int l = 0; l < kLists; ++l) {
                const bool pop = mine && key[l][0] == best;
                mine = mine && !pop;
                if (pop) {
                    number = order[l] & 0xFF;
                    order[l] >>= 8;
#pragma unroll
                    for (int i = 0; i + 1 < kLength; ++i) key[l][i] = key[l][i + 1];
                    key[l][kLength - 1] = 0;
                }
            }
            const int id = __shfl_sync(~0u, first_ + int(number), winner);
            if (lane_ == j) best_key = best, best_id = id;
        }
    }

    // The same sum in every lane < top_k, always added in the same order.
    __device__ __forceinline__ float sum_of_columns(float value) const {
        for (int d = 1; d < params_.top_k; d *= 2) value += __shfl_xor_sync(~0u, value, d);
        return value;
    }
};

// Tokens [first, first + count), one warp a token, the next token's logits in flight. `take(t, column, id)` follows the writes.
template <int kExpertsPerLane, typename Take>
__device__ __forceinline__ void select_tokens(const SelectParams& params, int first, int count, Take take) {
    const Selector<kExpertsPerLane> selector(params);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    float next[kExpertsPerLane] = {};
    // The round before the first only loads.
    for (int t = warp - warps; t < count; t += warps) {
        float logit[kExpertsPerLane];
#pragma unroll
        for (int i = 0; i < kExpertsPerLane; ++i) logit[i] = next[i];
        if (t + warps < count) selector.load(next, first + t + warps);
        if (t < 0) continue;
        int id;
        float weight;
        selector.choose(logit, first + t, id, weight);
        if (lane < params.top_k) {
            const size_t slot = size_t(first + t) * params.top_k + lane;
            params.ids[slot] = id;
            params.weights[slot] = weight;
            take(t, lane, id);
        }
    }
}

// Top-k alone, or as the first of two launches: then route.block_histogram gets the slots per expert of each CTA's tokens.
// Grid: any number of CTAs, each with an equal share of the tokens. Shared memory: histogram_bytes(route.experts), 0 when alone.
template <int kExpertsPerLane>
struct Select {
    static constexpr int kMaxThreads = 1024;

    static __device__ __forceinline__ void run(const SelectParams& select, const RouteParams& route) {
        const int share = (select.tokens + gridDim.x - 1) / gridDim.x;
        const int first = min(int(blockIdx.x) * share, select.tokens), count = min(share, select.tokens - first);
        const bool counting = route.block_histogram != nullptr;
        BlockHistogram histogram(route);

        pdl::launch_dependents();
        if (counting) histogram.clear();
        pdl::wait();
        select_tokens<kExpertsPerLane>(select, first, count, [&](int, int, int id) {
            if (counting) histogram.add(id);
        });
        if (counting) histogram.write();
    }
};

}  // namespace oxmoe
