// Two K blocks of 128 e4m3 at once, 64 tokens times 128 weight rows, each into registers of its own: the second's multiplication
// covers the first's scaling.
#pragma once
#include <cstdint>

#include "../common/sm90.cuh"
#include "../common/wgmma_fp8.cuh"

namespace oxmoe {

struct Fp8BlockPair {
    static constexpr int kRows = 128, kSums = kRows / 2;
    using Sums = float[kSums];

    // Of two K blocks: a lane's tokens' and the weights'.
    struct Scales {
        float2 token[2], weight;
    };

    // `tokens_of(i)` and `weights_of(i)`: shared-memory addresses of block i.
    template <typename Tokens, typename Weights>
    static __device__ __forceinline__ void start(float (&products)[2][kSums], Tokens tokens_of, Weights weights_of) {
        sm90::wgmma_fence();
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const uint32_t tokens = tokens_of(b), weights = weights_of(b);
            sm90::start_wgmma_e4m3_128(products[b], sm90::descriptor_128b(tokens, 0), sm90::descriptor_128b(weights, 0));
#pragma unroll
            for (int i = 1; i < 4; ++i) {
                sm90::WgmmaE4m3<kRows>::multiply(products[b], sm90::descriptor_128b(tokens, i * 32),
                                                 sm90::descriptor_128b(weights, i * 32), true);
            }
            sm90::wgmma_commit();
        }
    }

    // `First`: sums start here. Where `arrives`, at `empty[i]` once block i of the weights has been read.
    template <bool First>
    static __device__ __forceinline__ void finish(Sums& sums, float (&products)[2][kSums], const Scales& scales,
                                                  uint64_t* const (&empty)[2], bool arrives) {
        float low = __fmul_rn(scales.token[0].x, scales.weight.x), high = __fmul_rn(scales.token[1].x, scales.weight.x);
        sm90::wgmma_wait<1>();
        sm90::barrier_arrive_if(empty[0], arrives);
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] = __fmaf_rn(products[0][i], i % 4 < 2 ? low : high, First ? 0.f : sums[i]);
        low = __fmul_rn(scales.token[0].y, scales.weight.y), high = __fmul_rn(scales.token[1].y, scales.weight.y);
        sm90::wgmma_wait<0>();
        sm90::barrier_arrive_if(empty[1], arrives);
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] = __fmaf_rn(products[1][i], i % 4 < 2 ? low : high, sums[i]);
    }
};

}  // namespace oxmoe
