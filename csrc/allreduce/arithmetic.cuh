// Arithmetic on chunks. Sums are in fp32 and rounded to the element type. The order of additions depends only on ranks and hidden
// size.
#pragma once
#include "../common/element.cuh"
#include "memory.cuh"

namespace oxmoe::allreduce {

constexpr int kLanes = 32;

__device__ __forceinline__ uint32_t& word(Chunk& v, int i) { return reinterpret_cast<uint32_t*>(&v)[i]; }
__device__ __forceinline__ uint32_t word(const Chunk& v, int i) { return reinterpret_cast<const uint32_t*>(&v)[i]; }

// The values of one word.
template <class Element>
struct Word {
    static constexpr int kValues = 2;
    float value[2];
    __device__ __forceinline__ explicit Word(uint32_t bits) {
        const float2 pair = unpack<Element>(bits);
        value[0] = pair.x;
        value[1] = pair.y;
    }
    __device__ __forceinline__ uint32_t rounded() const { return pack<Element>(value[0], value[1]); }
};

template <>
struct Word<float> {
    static constexpr int kValues = 1;
    float value[1];
    __device__ __forceinline__ explicit Word(uint32_t bits) { value[0] = __uint_as_float(bits); }
    __device__ __forceinline__ uint32_t rounded() const { return __float_as_uint(value[0]); }
};

template <class Element>
constexpr int kChunkValues = 4 * Word<Element>::kValues;

// Sums in rank order in fp32, rounded once: the same bits on every rank and in both kernels.
template <class Element, int kWorld>
__device__ __forceinline__ Chunk sum_in_rank_order(const Chunk (&part)[kWorld]) {
    Chunk result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Word<Element> sum(word(part[0], i));
#pragma unroll
        for (int rank = 1; rank < kWorld; ++rank) {
            const Word<Element> other(word(part[rank], i));
#pragma unroll
            for (int k = 0; k < Word<Element>::kValues; ++k) sum.value[k] += other.value[k];
        }
        word(result, i) = sum.rounded();
    }
    return result;
}

template <class Element>
__device__ __forceinline__ Chunk add(const Chunk& a, const Chunk& b) {
    const Chunk part[2] = {a, b};
    return sum_in_rank_order<Element>(part);
}

template <class Element>
__device__ __forceinline__ float sum_of_squares(const Chunk& v) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Word<Element> x(word(v, i));
#pragma unroll
        for (int k = 0; k < Word<Element>::kValues; ++k) sum = fmaf(x.value[k], x.value[k], sum);
    }
    return sum;
}

template <class Element>
__device__ __forceinline__ Chunk normalised(const Chunk& v, float scale, float weight_bias, const Chunk& gamma) {
    Chunk result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Word<Element> x(word(v, i));
        const Word<Element> weight(word(gamma, i));
#pragma unroll
        for (int k = 0; k < Word<Element>::kValues; ++k) x.value[k] = x.value[k] * scale * (weight_bias + weight.value[k]);
        word(result, i) = x.rounded();
    }
    return result;
}

template <class Element>
__device__ __forceinline__ void values_of(const Chunk& v, float (&x)[kChunkValues<Element>]) {
    constexpr int kEach = Word<Element>::kValues;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Word<Element> values(word(v, i));
#pragma unroll
        for (int k = 0; k < kEach; ++k) x[kEach * i + k] = values.value[k];
    }
}

struct Sum {
    __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// The larger of a number and NaN is the number.
struct Largest {
    __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Reduces over the lanes of a warp whose numbers differ by less than `lanes`, a power of two, with a butterfly.
template <class Op>
__device__ __forceinline__ float across(float v, int lanes = kLanes) {
#pragma unroll
    for (int distance = kLanes / 2; distance; distance /= 2) {
        if (distance >= lanes) continue;
        v = Op()(v, __shfl_xor_sync(0xFFFFFFFFu, v, distance));
    }
    return v;
}

}  // namespace oxmoe::allreduce
