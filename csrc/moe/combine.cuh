// The weighted sum of a token's rows: out[t] = scale * sum_j weights[t, j] * y[place_of_slot[t * top_k + j]], in slot order, in
// fp32, rounded once. Grid: any; a thread takes 8 columns of a token (1 when hidden % 8 != 0) at a time.
#pragma once
#include <cstdint>

#include "../common/element.cuh"
#include "../common/pdl.cuh"
#include "oxmoe/src/params.rs.h"

namespace oxmoe {

template <typename Element>
struct Combine {
    static constexpr int kThreads = 128;
    static constexpr int kSharedBytes = 0;
    static constexpr int kBatch = 8;  // rows in flight a thread

    static __device__ __forceinline__ void run(const CombineParams& p) {
        pdl::launch_dependents();
        if (p.hidden % 8 == 0)
            sum_rows<uint4>(p);
        else
            sum_rows<uint16_t>(p);
    }

    // One vector of one token. `ready()` comes after the maps and weights are read and before y is; false: nothing is summed.
    template <typename Vector, typename Ready>
    static __device__ __forceinline__ void sum_vector(const CombineParams& p, uint32_t token, uint32_t column, Ready ready) {
        constexpr int kWidth = sizeof(Vector) / 2;
        const uint32_t row_vectors = p.hidden / kWidth;
        const Vector* y = reinterpret_cast<const Vector*>(p.y);
        Vector* out = reinterpret_cast<Vector*>(p.out);
        float sums[kWidth] = {};
        for (int first = 0; first < p.top_k; first += kBatch) {
            int place[kBatch];
            float weight[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const size_t slot = size_t(token) * p.top_k + first + i;
                place[i] = first + i < p.top_k ? p.place_of_slot[slot] : -1;
                weight[i] = p.weights && first + i < p.top_k ? p.weights[slot] : 1.f;
            }
            if (!ready()) return;
            Vector rows[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (place[i] >= 0) rows[i] = y[size_t(place[i]) * row_vectors + column];
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (place[i] >= 0) add(sums, rows[i], weight[i]);
                if (p.keep_slots && first + i < p.top_k) {
                    round(sums, p.scale, &out[(size_t(token) * p.top_k + first + i) * row_vectors + column]);
#pragma unroll
                    for (int j = 0; j < kWidth; ++j) sums[j] = 0.f;
                }
            }
        }
        if (!p.keep_slots) round(sums, p.scale, &out[size_t(token) * row_vectors + column]);
    }

private:
    static __device__ __forceinline__ void add(float (&sums)[8], const uint4& row, float weight) {
        const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = unpack<Element>(words[i]);
            sums[2 * i] = fmaf(weight, pair.x, sums[2 * i]);
            sums[2 * i + 1] = fmaf(weight, pair.y, sums[2 * i + 1]);
        }
    }
    static __device__ __forceinline__ void add(float (&sums)[1], const uint16_t& row, float weight) {
        sums[0] = fmaf(weight, unpack<Element>(row).x, sums[0]);
    }

    static __device__ __forceinline__ void round(const float (&sums)[8], float scale, uint4* out) {
        *out = {pack<Element>(scale * sums[0], scale * sums[1]), pack<Element>(scale * sums[2], scale * sums[3]),
                pack<Element>(scale * sums[4], scale * sums[5]), pack<Element>(scale * sums[6], scale * sums[7])};
    }
    static __device__ __forceinline__ void round(const float (&sums)[1], float scale, uint16_t* out) {
        *out = uint16_t(pack<Element>(scale * sums[0], 0.f));
    }

    template <typename Vector>
    static __device__ __forceinline__ void sum_rows(const CombineParams& p) {
        const uint32_t row_vectors = p.hidden / (sizeof(Vector) / 2), vectors = p.tokens * row_vectors;
        bool waited = false;
        for (uint32_t vector = blockIdx.x * kThreads + threadIdx.x; vector < vectors; vector += gridDim.x * kThreads) {
            // NOTE: the maps and weights are older than the kernel before this one, which let this one start after its own wait.
            sum_vector<Vector>(p, vector / row_vectors, vector % row_vectors, [&] {
                if (!waited) pdl::wait();
                return waited = true;
            });
        }
        if (!waited) pdl::wait();
    }
};

}  // namespace oxmoe
