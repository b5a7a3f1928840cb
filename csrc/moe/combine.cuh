// The weighted sum of a token's rows: out[t] = scale * sum_j weights[t, j] * y[place_of_slot[t * top_k + j]]. It is added in slot
// order, in fp32, and rounded once. Grid: any; a thread takes p.columns of a token.
//
// With few tokens the time goes into fetching instructions, since a layer's weights have pushed them out of every cache. So
// threads are narrow (16 bytes a thread are four times the code after the wait), and no code is here twice.
#pragma once
#include <cstdint>

#include "../common/absent.cuh"
#include "../common/element.cuh"
#include "../common/pdl.cuh"
#include "oxmoe/src/params/moe.rs.h"

namespace oxmoe {

template <typename Element>
struct Combine {
    static constexpr int kThreads = 128;
    static constexpr int kSharedBytes = 0;
    static constexpr int kBatch = 8;  // rows in flight for each thread

    static __device__ __forceinline__ void run(const CombineParams& p) {
        pdl::launch_dependents();
        if (p.columns == 2)
            sum_rows<uint32_t>(p);
        else if (p.columns == 4)
            sum_rows<uint2>(p);
        else if (p.columns == 8)
            sum_rows<uint4>(p);
        else
            sum_rows<uint16_t>(p);
    }

    // Rows of out, and rows of y that are added for each of them. With `keep_slots` every slot is a row of its own.
    static __device__ __forceinline__ int row_count(const CombineParams& p) {
        return p.keep_slots ? p.tokens * p.top_k : p.tokens;
    }
    static __device__ __forceinline__ int terms(const CombineParams& p) { return p.keep_slots ? 1 : p.top_k; }

    // Sums one vector of one row of out. `ready()` is called after the maps and weights are read and before y is read. If it
    // returns false, nothing is summed.
    template <typename Vector, typename Ready>
    static __device__ __forceinline__ void sum_vector(const CombineParams& p, uint32_t row, uint32_t column, Ready ready) {
        sum_vector<Vector>(
            p, row, column, [&](size_t slot) { return p.place_of_slot[slot]; },
            [&](size_t slot) { return p.weights ? p.weights[slot] : 1.f; }, ready);
    }

    // Sums a vector with maps of the caller: `place_of(slot)`, -1 for a skipped slot, and `weight_of(slot)`. With `Waits`, rows
    // are read again until no number of them is absent.
    template <typename Vector, bool Waits = false, typename PlaceOf, typename WeightOf, typename Ready>
    static __device__ __forceinline__ void sum_vector(const CombineParams& p, uint32_t row, uint32_t column, PlaceOf place_of,
                                                      WeightOf weight_of, Ready ready) {
        const int top_k = terms(p);
        const uint32_t row_bytes = p.hidden * 2;
        const uint8_t* y = p.y + column * sizeof(Vector);
        float sums[sizeof(Vector) / 2] = {};
#pragma unroll 1
        for (int first = 0; first < top_k; first += kBatch) {
            int place[kBatch];
            float weight[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const size_t slot = size_t(row) * top_k + first + i;
                place[i] = first + i < top_k ? place_of(slot) : -1;
                weight[i] = first + i < top_k ? weight_of(slot) : 1.f;
            }
            if (!ready()) return;
            // NOTE: a skipped slot adds -1 * 0 = -0, which changes no sum. If conditions were kept until the rows are there, the
            // registers of 8 CTAs an SM would not suffice.
            Vector rows[kBatch];
            bool waits;
            do {
                waits = false;
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    const Vector* source = reinterpret_cast<const Vector*>(y + uint64_t(uint32_t(place[i])) * row_bytes);
                    if constexpr (Waits) {
                        rows[i] = place[i] >= 0 ? absent::load(source) : Vector{};
                        waits |= absent::in(rows[i]);
                    } else {
                        rows[i] = place[i] >= 0 ? *source : Vector{};
                    }
                    if (place[i] < 0) weight[i] = -1.f;
                }
            } while (waits);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) add(sums, rows[i], weight[i]);
        }
        round(sums, p.scale, reinterpret_cast<Vector*>(p.out + uint64_t(row) * row_bytes) + column);
    }

private:
    template <int kWidth, typename Vector>
    static __device__ __forceinline__ void add(float (&sums)[kWidth], const Vector& row, float weight) {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(&row);
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) {
            const float2 pair = unpack<Element>(words[i]);
            sums[2 * i] = fmaf(weight, pair.x, sums[2 * i]);
            sums[2 * i + 1] = fmaf(weight, pair.y, sums[2 * i + 1]);
        }
    }
    static __device__ __forceinline__ void add(float (&sums)[1], const uint16_t& row, float weight) {
        sums[0] = fmaf(weight, unpack<Element>(row).x, sums[0]);
    }

    template <int kWidth, typename Vector>
    static __device__ __forceinline__ void round(const float (&sums)[kWidth], float scale, Vector* out) {
        Vector row;
        uint32_t* words = reinterpret_cast<uint32_t*>(&row);
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) words[i] = pack<Element>(scale * sums[2 * i], scale * sums[2 * i + 1]);
        *out = row;
    }
    static __device__ __forceinline__ void round(const float (&sums)[1], float scale, uint16_t* out) {
        *out = uint16_t(pack<Element>(scale * sums[0], 0.f));
    }

    template <typename Vector>
    static __device__ __forceinline__ void sum_rows(const CombineParams& p) {
        const uint32_t row_vectors = p.hidden / (sizeof(Vector) / 2), parts = (row_vectors + kThreads - 1) / kThreads;
        bool waited = false;
#pragma unroll 1
        for (uint32_t part = blockIdx.x; part < row_count(p) * parts; part += gridDim.x) {
            const uint32_t column = part % parts * kThreads + threadIdx.x;
            if (column >= row_vectors) continue;
            // NOTE: the maps and weights are older than the kernel before this one, which let this one start after its own wait.
            sum_vector<Vector>(p, part / parts, column, [&] {
                if (!waited) pdl::wait();
                return waited = true;
            });
        }
        if (!waited) pdl::wait();
    }
};

}  // namespace oxmoe
