// grouped_gemm_fp8_wide_sm90.cuh, bit for bit, with tokens from registers instead of shared memory.
//
// At wgmma's full rate m64n128 reads 96 bytes a clock of both operands, and the next stage comes in at 47: together more than the
// 128 that shared memory gives. Here a warp loads its 16 tokens of a K block once for both blocks of weight rows: 64 + 16 + 47.
#pragma once
#include <cstdint>
#include <cuda.h>

#include "grouped_gemm_fp8_wide_sm90.cuh"

namespace oxmoe {
namespace sm90 {

// clang-format off
#define SUM(i) MODE "f"(d[i])
#define SUMS8(i) SUM(i), SUM(i + 1), SUM(i + 2), SUM(i + 3), SUM(i + 4), SUM(i + 5), SUM(i + 6), SUM(i + 7)
#define SUMS64 SUMS8(0), SUMS8(8), SUMS8(16), SUMS8(24), SUMS8(32), SUMS8(40), SUMS8(48), SUMS8(56)
#define MODE "="
// clang-format on

// d[64 x 128] = a[64 x 32] b[128 x 32]^T: what d was does not count. A's fragments are WgmmaE4m3FromRegisters'.
__device__ __forceinline__ void start_wgmma_e4m3_128_from_registers(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "
        "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "
        "%39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, "
        "%63}, {%64, %65, %66, %67}, %68, keep, 1, 1;\n}"
        : SUMS64
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef MODE
#undef SUMS64
#undef SUMS8
#undef SUM

// Four 8 x 16-byte tiles, lanes 8 i ... 8 i + 7 giving the addresses of tile i's rows.
__device__ __forceinline__ void load_tiles(uint32_t address, uint32_t (&tiles)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(address)
                 : "memory");
}

}  // namespace sm90

template <bool Gated, int Stages>
struct GroupedGemmFp8WideRegistersSm90 {
    using Wide = GroupedGemmFp8WideSm90<Gated, Stages>;
    using Base = typename Wide::Base;
    using Shared = typename Wide::Shared;
    static constexpr int kThreads = Wide::kThreads, kSharedBytes = Wide::kSharedBytes, kCtas = Wide::kCtas;
    static constexpr int kSums = Wide::kBlockRows / 2;

    static __device__ __forceinline__ void run(const CUtensorMap& weights, const GroupedGemmParams& p) {
        extern __shared__ __align__(1024) uint8_t dynamic_shared[];
        Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
        if (threadIdx.x == 0) {
            Base::init_barriers(shared, Wide::kReaders * Wide::kConsumers);
            sm90::prefetch_tensor_map(&weights);
        }
        __syncthreads();
        // NOTE: with an older schedule only x is in flight, and only who reads it waits.
        if (!p.schedule_is_older) pdl::wait();
        if (threadIdx.x < 128) {
            sm90::registers_decrease<40>();
            const int warp = threadIdx.x / 32;
            if (warp == 0)
                Wide::copy_weights(weights, p, shared);
            else if (warp == 1)
                Base::schedule(p, shared);
            else
                Base::gather(p, shared);
        } else {
            sm90::registers_increase<232>();
            consume(p, shared);
        }
    }

private:
    static __device__ __forceinline__ void consume(const GroupedGemmParams& p, Shared& shared) {
        const int consumer = Base::consumer_index(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const int k_blocks = Base::k_blocks(p), row = consumer * 64 + warp * 16 + lane / 4;
        RingPosition<Wide::kUnitSlots> units;
        RingPosition<Stages> ring;
        pdl::wait();
        typename Wide::Part part = Wide::take_unit(p, shared, units, row);
        while (part.work.expert >= 0) {
            if (consumer * 64 >= part.work.count) {
                for (int block = 0; block < k_blocks; ++block, ring.advance()) {
                    sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
                    sm90::barrier_arrive_if(&shared.empty[ring.slot], lane == 0);
                }
                part = Wide::take_unit(p, shared, units, row);
                continue;
            }
            typename Wide::Sums sums;
#pragma unroll
            for (int i = 0; i < Wide::kBlocks * kSums; ++i) {
                asm volatile("mov.b32 %0, 0;" : "=f"(sums[i / kSums][i % kSums]));
            }
            multiply(p, part, sums, shared, ring);
            if constexpr (Gated) {
                Wide::finish(p, part.work, row, sums);
                part = Wide::take_unit(p, shared, units, row);
            } else {
                const WorkUnit work = part.work;
                part = Wide::take_unit(p, shared, units, row);
                Wide::finish(p, work, row, sums);
            }
        }
    }

    static __device__ __forceinline__ void multiply(const GroupedGemmParams& p, const typename Wide::Part& part,
                                                    typename Wide::Sums& sums, Shared& shared, RingPosition<Stages>& ring) {
        const int consumer = Base::consumer_index(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        // Tiles of ldmatrix: rows 0 to 7 and 8 to 15 of the warp's, first and second 16 bytes of a step's 32.
        const uint32_t row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
        const uint32_t own = consumer * 8192 + row * 128 + (lane / 16 ^ row % 8) * 16;
        // NOTE: offsets, since four pointers would be as many registers as spills.
        const float* const weight_scales = reinterpret_cast<const float*>(p.block_scales);
        uint32_t token_at[Wide::kRows], weight_at[Wide::kBlocks];
#pragma unroll
        for (int i = 0; i < Wide::kRows; ++i) {
            token_at[i] = uint32_t(part.scales.token[i] - p.x_scales);
            weight_at[i] = uint32_t(part.scales.weight[i] - weight_scales);
        }
        const int k_blocks = Base::k_blocks(p);
        typename Wide::Scales next = part.first;
#pragma unroll 1
        for (int block = 0; block < k_blocks; ++block, ring.advance()) {
            const typename Wide::Scales scales = next;
            if (block + 1 < k_blocks) {
#pragma unroll
                for (int i = 0; i < Wide::kRows; ++i) {
                    next.token[i] = p.x_scales[token_at[i] + block + 1];
                    next.weight[i] = weight_scales[weight_at[i] + block + 1];
                }
            }
            sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
            const uint32_t tokens = sm90::shared_address(shared.stage[ring.slot].tokens) + own;
            const uint32_t weights = sm90::shared_address(shared.stage[ring.slot].weights[0]);
            uint32_t a[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) sm90::load_tiles(tokens ^ i * 32, a[i]);
#pragma unroll
            for (int b = 0; b < Wide::kBlocks; ++b) {
                float product[kSums];
                sm90::wgmma_fence();
                sm90::start_wgmma_e4m3_128_from_registers(product, a[0], sm90::descriptor_128b(weights, b * Wide::kBlockBytes));
#pragma unroll
                for (int i = 1; i < 4; ++i) {
                    sm90::WgmmaE4m3FromRegisters<Wide::kBlockRows>::multiply(
                        product, a[i], sm90::descriptor_128b(weights, b * Wide::kBlockBytes + i * 32));
                }
                sm90::wgmma_commit();
                const float low = __fmul_rn(scales.token[0], scales.weight[b]),
                            high = __fmul_rn(scales.token[1], scales.weight[b]);
                sm90::wgmma_wait<0>();
                if (b == Wide::kBlocks - 1) sm90::barrier_arrive_if(&shared.empty[ring.slot], lane == 0);
#pragma unroll
                for (int i = 0; i < kSums; ++i) sums[b][i] = __fmaf_rn(product[i], i % 4 < 2 ? low : high, sums[b][i]);
            }
        }
    }
};

}  // namespace oxmoe
