// Dense MXFP8 GEMM for up to 32 tokens on Hopper with scales on the sums: out[m, n] = a[m, k] b[n, k]^T. a and b are e4m3 with
// one scale for 32 columns.
//
// e4m3 is exact in f16, and an instruction converts two numbers. A group of 32 K is two mma whose sums begin at zero. They are
// added to the fp32 sums times both scales, so no operand is ever scaled. A warp owns a part of K, its ring and its scales: there
// is no barrier before the end of a pass.
//
// There are as many CTAs as run at once. They have equally many rows of b, in passes of up to 16 RowTiles. Rings go on from pass
// to pass. The order in which groups are added depends on k alone. Needs k % 32 == 0, a and b aligned to 16 bytes.
// Grid: CTAs of p.passes passes of p.pass_rows rows, a multiple of 4.
#pragma once
#include <cstdint>

#include "../common/pdl.cuh"
#include "../common/sm80.cuh"
#include "mxfp8_operand.cuh"
#include "oxmoe/src/params/dense.rs.h"

namespace oxmoe {

template <int Tokens, int RowTiles, int Stages>
struct MmMxfp8FewSm90 {
    static constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = 16 * RowTiles, kTokenTiles = Tokens / 8;
    // K of a stage: two groups, with a chunk of 16 bytes for each of four lanes.
    static constexpr int kStageK = 64, kStageRows = kRows + Tokens, kStageBytes = kStageRows * kStageK;
    // Rows whose scales a warp fetches at a time.
    static constexpr int kScaleRows = kRows < 32 ? kRows : 32;
    // Loads of a lane in flight at once: the scales of 1024 K of 32 rows.
    static constexpr int kScalesAtOnce = 8;
    // Stages of one row tile are multiplied in pairs, because one stage has too few products to cover their latency.
    static constexpr bool kTwoAtOnce = RowTiles == 1 && Stages > 4;
    // Rows whose sums are in shared memory at a time.
    static constexpr int kSumRows = kScaleRows, kPitch = kSumRows + 4;
    static constexpr int kRingBytes = kWarps * Stages * kStageBytes, kSumBytes = kWarps * Tokens * kPitch * 4;
    // Bytes without the scales, which come after them; the bytes of the scales depend on k.
    static constexpr int kSharedBytes = kRingBytes + kSumBytes;
    static_assert(Tokens <= 32, "a lane has a token's scales");

    static __device__ __forceinline__ void run(const MmMxfp8FewParams& params) {
        extern __shared__ __align__(128) uint8_t shared[];
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
        const MmMxfp8Params& p = params.product;
        const int passes = params.passes, pass_rows = params.pass_rows;
        const int first_row = blockIdx.x * passes * pass_rows;
        const int blocks = (p.k + kStageK - 1) / kStageK;
        const int first = blocks * warp / kWarps, count = blocks * (warp + 1) / kWarps - first;
        const uint32_t ring = warp * Stages * kStageBytes;
        uint8_t* const scales = shared + kSharedBytes + warp * ((blocks + kWarps - 1) / kWarps) * kStageRows * 2;

        // Prefetches go to L2, where other kernels' writes arrive, so they cannot keep old data.
        prefetch_scales(p, first_row, first, count, lane);
        pdl::wait();
        pdl::launch_dependents();

        // Four neighbouring lanes copy 64 bytes of a row. Row r has the 32 bytes of group j at position j ^ r / 2 % 2.
        const int row_of_eight = lane / 4, chunk = lane % 4;
        const uint32_t to =
            sm80::shared_address(shared) + ring + row_of_eight * kStageK + (chunk ^ row_of_eight / 2 % 2 * 2) * 16;
        const int64_t eight_rows = 8 * int64_t(p.k), to_next_pass = int64_t(pass_rows) * p.k - count * kStageK;
        const int tokens_left = p.m - row_of_eight;
        int copied = 0, copied_row = first_row, rows_left = min(pass_rows, p.n - first_row) - row_of_eight;
        int k_left = p.k - first * kStageK - chunk * 16;
        const uint8_t *next_b = p.b + int64_t(first_row + row_of_eight) * p.k + first * kStageK + chunk * 16,
                      *next_a = p.a + int64_t(row_of_eight) * p.k + first * kStageK + chunk * 16;
        const auto copy_next = [&](int slot) {
            const int rows = k_left > 0 ? rows_left : 0, tokens = k_left > 0 ? tokens_left : 0;
            const uint8_t *b = next_b, *a = next_a;
            const uint32_t at = to + slot * kStageBytes;
#pragma unroll
            for (int i = 0; i < kRows / 8; ++i, b += eight_rows) sm80::copy_16_async(at + i * 8 * kStageK, b, 8 * i < rows);
#pragma unroll
            for (int i = 0; i < Tokens / 8; ++i, a += eight_rows)
                sm80::copy_16_async(at + (kRows + i * 8) * kStageK, a, 8 * i < tokens);
            next_b += kStageK, next_a += kStageK, k_left -= kStageK;
            if (++copied == count) {
                copied = 0, copied_row += pass_rows, rows_left = min(pass_rows, p.n - copied_row) - row_of_eight;
                next_b += to_next_pass;
                next_a -= count * kStageK, k_left += count * kStageK;
            }
        };
        // Stages whose copies have not started.
        int left = passes * count;
#pragma unroll 1
        for (int i = 0; i < Stages - (kTwoAtOnce ? 2 : 1); ++i) {
            if (left > 0) copy_next(i);
            --left;
            sm80::copy_commit();
        }
        const Scales of_a(p.a_scales, 0, p.m, p.k, lane, Tokens);
        const bool extreme_tokens = of_a.template keep<Tokens>(scales + kRows * 2, first, count);
        int slot = 0;
#pragma unroll 1
        for (int pass = 0, row = first_row; pass < passes; ++pass, row += pass_rows) {
            // The previous pass has finished with its scales after this barrier.
            __syncwarp();
            bool extreme = extreme_tokens;
#pragma unroll 1
            for (int part = 0; part < kRows; part += kScaleRows) {
                const Scales of_b(p.b_scales, min(row + part, p.n - 1), p.n, p.k, lane, kScaleRows);
                extreme |= of_b.template keep<kScaleRows>(scales + part * 2, first, count);
            }
            if (pass + 1 < passes) prefetch_scales(p, row + pass_rows, first, count, lane);
            // The whole warp takes the slow path if one lane needs it: the results of other rows are the same on both paths.
            extreme = __any_sync(0xFFFFFFFF, extreme);

            float sums[RowTiles][kTokenTiles][4] = {};
            const auto loop = [&](auto of_any_size) {
                const auto part = [&](int block) {
                    multiply<of_any_size.value>(sums, shared + ring + slot * kStageBytes, scales + block * kStageRows * 2, g, c);
                    slot = slot + 1 == Stages ? 0 : slot + 1;
                };
                const auto refill = [&](int back) {
                    if (left > 0) copy_next(slot < back ? slot + Stages - back : slot - back);
                    --left;
                    sm80::copy_commit();
                };
                int block = 0;
                if constexpr (kTwoAtOnce) {
                    // Both stages before this one are free again, because they were multiplied together.
#pragma unroll 1
                    for (; block + 1 < count; block += 2) {
                        sm80::copy_wait<Stages - 4>();
                        __syncwarp();
                        refill(2), refill(1);
                        part(block), part(block + 1);
                    }
                }
#pragma unroll 1
                for (; block < count; ++block) {
                    sm80::copy_wait<kTwoAtOnce ? Stages - 3 : Stages - 2>();
                    __syncwarp();  // all lanes' copies have landed, and all lanes have read the stage that is written next
                    refill(kTwoAtOnce ? 2 : 1);
                    part(block);
                }
            };
            if (extreme)
                loop(std::true_type{});
            else
                loop(std::false_type{});
            add_up(p, sums, shared + kRingBytes, row, pass_rows, pass == 0, warp, g, c);
        }
        sm80::copy_wait<0>();
    }

private:
    // Scales of up to 32 rows. They are fetched four groups at a time, as scale tiles hold them, and kept in pairs, one pair for
    // each stage.
    struct Scales {
        const uint8_t* row;
        int groups, lane;
        // Distances from a group to the next one, and to the fourth one after it.
        int64_t one, four;
        bool words;

        // A lane whose row does not exist takes the last row.
        __device__ __forceinline__ Scales(const ScaleView& view, int first, int rows, int k, int lane, int lanes)
            : groups(k / mxfp8_dense::kGroup), lane(lane), one(view.tile_rows ? 1 : view.block_stride), four(four_blocks(view)) {
            row = scale_address(view, min(first + lane % lanes, rows - 1), 0, groups);
            words = view.tile_rows || (one == 1 && groups % 4 == 0);
            words = words && ((uint64_t(view.data) | view.row_stride) & 3) == 0;
        }

        template <int Rows>
        __device__ __forceinline__ void prefetch_all(int first, int count) const {
#pragma unroll 1
            for (int i = first / 2 + lane / Rows; i < (first + count + 1) / 2; i += 32 / Rows) prefetch(row + i * four);
        }

        // Stores the scale bytes of stages [first, first + count). Returns whether a scale is special or outside 2^-63 to 2^64.
        template <int Rows>
        __device__ __forceinline__ bool keep(uint8_t* to, int first, int count) const {
            if (words) {
                return keep_by<Rows, kScalesAtOnce>(to, first, count, [&](int quad) {
                    const uint32_t bytes = *reinterpret_cast<const uint32_t*>(row + quad * four);
                    // The padding of a tile's last four scales may have any value.
                    const int left = groups - 4 * quad;
                    return left >= 4 ? bytes : (bytes & ((1u << 8 * left) - 1)) | 0x7F7F7F7Fu << 8 * left;
                });
            }
            return keep_by<Rows, 1>(to, first, count, [&](int quad) {
                const uint8_t* from = row + quad * four;
                uint32_t bytes = from[0];
#pragma unroll
                for (int i = 1; i < 4; ++i) bytes |= from[4 * quad + i < groups ? i * one : 0] << 8 * i;
                return bytes;
            });
        }

    private:
        // `load` returns the scale bytes of four groups. Bytes beyond the row's groups multiply zeros.
        template <int Rows, int AtOnce, typename Load>
        __device__ __forceinline__ bool keep_by(uint8_t* to, int first, int count, Load load) const {
            constexpr int kStep = 32 / Rows;
            const int last = count ? (first + count - 1) / 2 : -1;
            bool extreme = false;
#pragma unroll 1
            for (int i = first / 2 + lane / Rows; i <= last; i += AtOnce * kStep) {
                uint32_t bytes[AtOnce];
#pragma unroll
                for (int j = 0; j < AtOnce; ++j) bytes[j] = load(min(i + j * kStep, last));
#pragma unroll
                for (int j = 0; j < AtOnce; ++j) {
                    const int stage = 2 * min(i + j * kStep, last) - first;
                    uint16_t* const pair = reinterpret_cast<uint16_t*>(to) + stage * kStageRows + lane % Rows;
                    extreme |= ((bytes[j] ^ bytes[j] << 1) & 0x80808080) != 0x80808080;
                    if (stage >= 0) pair[0] = uint16_t(bytes[j]);
                    if (stage + 1 < count) pair[kStageRows] = uint16_t(bytes[j] >> 16);
                }
            }
            return extreme;
        }
    };

    // The value of a scale byte.
    template <bool AnySize>
    static __device__ __forceinline__ float scale(uint32_t bytes, int group) {
        const uint32_t byte = group ? bytes >> 8 & 0xFF : bytes & 0xFF;
        return AnySize ? mxfp8_dense::scale_value(byte) : __uint_as_float(byte << 23);
    }

    // sum + part x a x b. If a and b lie on different sides of 1, fp32 holds a x b. Otherwise the product is multiplied by one
    // after the other, which ends where the exact result does.
    template <bool AnySize>
    static __device__ __forceinline__ float add(float sum, float part, float a, float b) {
        if (!AnySize) return fmaf(part * a, b, sum);
        const bool apart = (a > 1) != (b > 1);
        return fmaf(part * (apart ? a * b : a), apart ? 1.f : b, sum);
    }

    // Converts the four e4m3 numbers of a word to f16: `low` gets the first two, `high` the last two.
    static __device__ __forceinline__ void decode(uint32_t word, uint32_t& low, uint32_t& high) {
        asm("{\n.reg .b16 first, second;\n"
            "mov.b32 {first, second}, %2;\n"
            "cvt.rn.f16x2.e4m3x2 %0, first;\n"
            "cvt.rn.f16x2.e4m3x2 %1, second;\n}"
            : "=r"(low), "=r"(high)
            : "r"(word));
    }

    // Multiplies a stage: 64 K of kRows rows of b, and of the tokens after them. Lane c has 8 neighbouring K of each group, 4 for
    // each step.
    template <bool AnySize>
    static __device__ __forceinline__ void multiply(float (&sums)[RowTiles][kTokenTiles][4], const uint8_t* stage,
                                                    const uint8_t* scales, int g, int c) {
        const uint16_t* const of_rows = reinterpret_cast<const uint16_t*>(scales) + g;
        const uint32_t* const of_tokens = reinterpret_cast<const uint32_t*>(scales + kRows * 2) + c;
        uint32_t row_bytes[2 * RowTiles], token_bytes[kTokenTiles];
#pragma unroll
        for (int i = 0; i < 2 * RowTiles; ++i) row_bytes[i] = of_rows[8 * i];
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i) token_bytes[i] = of_tokens[4 * i];
#pragma unroll(AnySize ? 1 : 2)
        for (int group = 0; group < 2; ++group) {
            const uint8_t* const at = stage + g * kStageK + (group ^ g / 2 % 2) * 32 + 8 * c;
            uint32_t tokens[kTokenTiles][4];
            float token_scale[kTokenTiles][2];
#pragma unroll
            for (int i = 0; i < kTokenTiles; ++i) {
                const uint2 words = *reinterpret_cast<const uint2*>(at + (kRows + 8 * i) * kStageK);
                decode(words.x, tokens[i][0], tokens[i][1]);
                decode(words.y, tokens[i][2], tokens[i][3]);
                token_scale[i][0] = scale<AnySize>(token_bytes[i], group);
                token_scale[i][1] = scale<AnySize>(token_bytes[i] >> 16, group);
            }
#pragma unroll
            for (int r = 0; r < RowTiles; ++r) {
                uint32_t rows[2][4];
                float row_scale[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint2 words = *reinterpret_cast<const uint2*>(at + (16 * r + 8 * half) * kStageK);
                    decode(words.x, rows[0][half], rows[0][2 + half]);
                    decode(words.y, rows[1][half], rows[1][2 + half]);
                    row_scale[half] = scale<AnySize>(row_bytes[2 * r + half], group);
                }
#pragma unroll
                for (int i = 0; i < kTokenTiles; ++i) {
                    float part[4] = {};
                    sm80::multiply_add<__half>(part, rows[0], tokens[i][0], tokens[i][1]);
                    sm80::multiply_add<__half>(part, rows[1], tokens[i][2], tokens[i][3]);
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        sums[r][i][j] = add<AnySize>(sums[r][i][j], part[j], token_scale[i][j % 2], row_scale[j / 2]);
                }
            }
        }
    }

    static __device__ __forceinline__ void add_up(const MmMxfp8Params& p, float (&sums)[RowTiles][kTokenTiles][4], uint8_t* to,
                                                  int row, int pass_rows, bool free, int warp, int g, int c) {
        float* const all = reinterpret_cast<float*>(to);
        float* const mine = all + warp * Tokens * kPitch + 2 * c * kPitch + g;
        constexpr int kTiles = kSumRows / 16, kFours = kSumRows / 4;
#pragma unroll
        for (int part = 0; part < RowTiles; part += kTiles) {
            if (part > 0 || !free) __syncthreads();  // the previous sums have been read
#pragma unroll
            for (int r = 0; r < kTiles; ++r) {
#pragma unroll
                for (int i = 0; i < kTokenTiles; ++i) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) mine[(8 * i + j % 2) * kPitch + 16 * r + j / 2 * 8] = sums[part + r][i][j];
                }
            }
            __syncthreads();
            for (int i = threadIdx.x; i < Tokens * kFours; i += kThreads) {
                const int token = i / kFours, four = i % kFours;
                if (token >= p.m) break;
                if (part * 16 + four * 4 >= pass_rows) continue;
                const float4* at = reinterpret_cast<const float4*>(all + token * kPitch) + four;
                float4 total = *at;
#pragma unroll
                for (int other = 1; other < kWarps; ++other) {
                    const float4 more = at[other * (Tokens * kPitch / 4)];
                    total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
                }
                store(p, token, row + part * 16 + four * 4, total);
            }
        }
    }

    static __device__ __forceinline__ void store(const MmMxfp8Params& p, int token, int row, const float4& sums) {
        if (p.out_dtype == Dtype::Bf16)
            mxfp8_dense::store_four<__nv_bfloat16>(p, token, row, sums);
        else if (p.out_dtype == Dtype::F32)
            mxfp8_dense::store_four_fp32(p, token, row, sums);
        else
            mxfp8_dense::store_four<__half>(p, token, row, sums);
    }

    static __device__ __forceinline__ void prefetch_scales(const MmMxfp8Params& p, int row, int first, int count, int lane) {
#pragma unroll 1
        for (int part = 0; part < kRows; part += kScaleRows) {
            const Scales of_b(p.b_scales, min(row + part, p.n - 1), p.n, p.k, lane, kScaleRows);
            of_b.template prefetch_all<kScaleRows>(first, count);
        }
    }

    static __device__ __forceinline__ void prefetch(const uint8_t* from) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
    }
};

}  // namespace oxmoe
