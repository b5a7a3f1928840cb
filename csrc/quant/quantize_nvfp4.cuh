// Quantises numbers to e2m1 with a scale for each block of 16 or 32 columns: NVFP4 or MXFP4. src/cpu/quantize_nvfp4.rs is the
// same on the host.
#pragma once
#include <cstdint>
#include <cuda_fp16.h>

#include "../common/nvfp4.cuh"
#include "oxmoe/src/params/quant.rs.h"
#include "walk.cuh"

namespace oxmoe {

// Each thread takes a block; threads of padding blocks only write scales. Needs x aligned to 16 bytes, and codes to half a block.
// There are fewer than 2^32 threads.
template <int Block>
struct QuantizeNvfp4 : Cta<256> {
    static __device__ __forceinline__ void run(const QuantizeNvfp4Params& p) {
        walk::begin();
        // Tiles are 128 or 8 rows by 4 blocks. All indices of blocks fit into 32 bits.
        const uint32_t tile = p.tile_rows ? p.tile_rows : 1, across = p.tile_rows ? 4 : 1;
        const uint32_t blocks = uint32_t(p.columns) / Block, padded_blocks = (blocks + across - 1) & ~(across - 1);
        const uint32_t padded_rows = (p.rows + tile - 1) & ~(tile - 1);
        const uint32_t thread = blockIdx.x * kThreads + threadIdx.x, number = thread / padded_blocks;
        const uint32_t block = thread - number * padded_blocks;
        const uint32_t batch = number < padded_rows ? 0 : number / padded_rows, row = number - batch * padded_rows;
        if (batch >= uint32_t(p.batches) || (p.row_counts && int(row) >= p.row_counts[batch])) return;
        uint32_t byte = 0;
        if (row < uint32_t(p.rows) && block < blocks) {
            const uint32_t at = (batch * p.rows + row) * blocks + block;
            float scale = p.global_scale ? p.global_scale[p.of_batch ? batch : 0] : 1.f;
            if (p.inverse) scale = __fdiv_rn(1.f, scale);
            if (p.dtype == Dtype::Bf16)
                byte = quantize<Dtype::Bf16>(p, at, scale);
            else if (p.dtype == Dtype::F16)
                byte = quantize<Dtype::F16>(p, at, scale);
            else
                byte = quantize<Dtype::F32>(p, at, scale);
        }
        // This is block_scale_offset() among the batch's scales.
        uint32_t offset = number * padded_blocks + block;
        if (p.tile_rows) {
            const uint32_t in_tile = row & (tile - 1);
            offset = (batch * padded_rows + row - in_tile) * padded_blocks + block / 4 * 4 * tile + block % 4;
            offset += tile == 128 ? in_tile % 32 * 16 + in_tile / 32 * 4 : in_tile * 4;
        }
        p.scales[offset] = uint8_t(byte);
    }

private:
    // A block's numbers as they lie in memory.
    template <Dtype Type>
    struct Numbers {
        static constexpr int kOfWord = Type == Dtype::F32 ? 1 : 2;
        uint32_t words[Block / kOfWord];

        __device__ __forceinline__ float operator[](int i) const {
            const uint32_t word = words[i / kOfWord];
            if (Type == Dtype::F32) return __uint_as_float(word);
            if (Type == Dtype::Bf16) return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
            return __half2float(__ushort_as_half(uint16_t(i % 2 ? word >> 16 : word)));
        }

        // Gives the largest magnitude; returns false if there is a NaN.
        __device__ __forceinline__ bool peak(float& result) const {
            constexpr uint32_t kMagnitude = Type == Dtype::F32 ? 0x7FFFFFFFu : 0x7FFF7FFFu;
            uint32_t most = 0;
#pragma unroll
            for (const uint32_t word : words) {
                const uint32_t size = word & kMagnitude;
                most = Type != Dtype::F32 ? __vmaxu2(most, size) : size > most ? size : most;
            }
            if (Type == Dtype::F32) {
                result = __uint_as_float(most);
                return most <= 0x7F800000u;
            }
            const uint32_t low = most & 0xFFFF, high = most >> 16, half = low > high ? low : high;
            result = Type == Dtype::Bf16 ? __uint_as_float(half << 16) : __half2float(__ushort_as_half(uint16_t(half)));
            return half <= (Type == Dtype::Bf16 ? 0x7F80u : 0x7C00u);
        }

        __device__ __forceinline__ float peak_of_numbers() const {
            float result = 0;
#pragma unroll
            for (int i = 0; i < Block; ++i) result = fmaxf(fabsf((*this)[i]), result);
            return result;
        }

        // Gives numbers the signs of their products with any factor. A negative factor turns the sign, and a NaN product has
        // none.
        __device__ __forceinline__ void correct_signs(float factor) {
#pragma unroll
            for (int i = 0; i < Block; ++i) {
                const float y = __fmul_rn((*this)[i], factor);
                const uint32_t sign = kOfWord == 1 || i % 2 ? 0x80000000u : 0x8000u;
                words[i / kOfWord] ^= __float_as_uint(factor) >> 31 ? sign : 0;
                if (y != y) words[i / kOfWord] &= ~sign;
            }
        }

        // The highest bytes of four numbers, which have their signs.
        __device__ __forceinline__ uint32_t signs(int first) const {
            const uint32_t* from = words + first / kOfWord;
            if (Type != Dtype::F32) return __byte_perm(from[0], from[1], 0x7531);
            return __byte_perm(__byte_perm(from[0], from[1], 0x0073), __byte_perm(from[2], from[3], 0x0073), 0x5410);
        }
    };

    // The three lower bits of the result are those of e2m1_magnitude(); NaN gives 7. The rounded number of steps comes six too
    // high. It also comes with the exponent of `many`, which is 149 for steps of 0.5, twice.
    static __device__ __forceinline__ uint32_t code(float x, float factor) {
        const float y = fminf(fabsf(__fmul_rn(x, factor)), 6.f);
        const uint32_t bits = __float_as_uint(y), one = 0x3F800000u;
        const uint32_t many = ((bits > one ? bits : one) & 0x7F800000u) + (22u << 23) + 6;
        return __float_as_uint(__fadd_rn(y, __uint_as_float(many))) + (many >> 22);
    }

    // Packs four codes, in the lower halves of bytes, into two bytes: the first and the third.
    template <Dtype Type>
    static __device__ __forceinline__ uint32_t four(const Numbers<Type>& x, int first, float factor) {
        const uint32_t low = __byte_perm(code(x[first], factor), code(x[first + 1], factor), 0x0040);
        const uint32_t high = __byte_perm(code(x[first + 2], factor), code(x[first + 3], factor), 0x0040);
        const uint32_t magnitudes = __byte_perm(low, high, 0x5410), mask = 0x07070707u;
        const uint32_t codes = (magnitudes & mask) | (x.signs(first) >> 4 & ~mask);
        return (codes & 0x0F0F0F0Fu) | (codes >> 4 & 0xF0F0F0F0u);
    }

    // Stores the block's codes, and returns the byte of its scale.
    template <Dtype Type>
    static __device__ __forceinline__ uint32_t quantize(const QuantizeNvfp4Params& p, uint32_t at, float scale) {
        Numbers<Type> x;
        constexpr int kVectors = sizeof x.words / 16;
        const uint4* from = reinterpret_cast<const uint4*>(p.x) + uint64_t(at) * kVectors;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const uint4 vector = from[i];
            x.words[4 * i] = vector.x, x.words[4 * i + 1] = vector.y, x.words[4 * i + 2] = vector.z,
                        x.words[4 * i + 3] = vector.w;
        }
        float peak;
        const bool whole = x.peak(peak);
        if (!whole) peak = x.peak_of_numbers();
        uint32_t byte;
        float narrow;
        if (p.powers) {
            const uint32_t most = 254u << 23,
                           power = __float_as_uint(power_of_two_above(__fmul_rn(scale, __fmul_rn(peak, 1.f / 6.f))));
            narrow = __uint_as_float(power < most ? power : most);
            byte = __float_as_uint(narrow) >> 23;
        } else {
            // This is nvfp4_scale().
            byte = e4m3_pair(__fmul_rn(scale, __fmul_rn(peak, 1.f / 6.f)), 0.f) & 0xFF;
            narrow = e4m3_value(byte);
        }
        const float factor = block_factor(scale, narrow);
        // A NaN product has no sign. It comes from a NaN, from an infinity and a factor of 0, or from a factor that is NaN.
        const bool wild = __float_as_uint(peak) >= 0x7F800000u || __float_as_uint(factor) >= 0x7F800000u;
        if (!whole || wild) x.correct_signs(factor);
        uint32_t codes[Block / 8];
#pragma unroll
        for (int i = 0; i < Block / 8; ++i)
            codes[i] = __byte_perm(four<Type>(x, 8 * i, factor), four<Type>(x, 8 * i + 4, factor), 0x6420);
        if constexpr (Block == 32)
            reinterpret_cast<uint4*>(p.codes)[at] = make_uint4(codes[0], codes[1], codes[2], codes[3]);
        else
            reinterpret_cast<uint2*>(p.codes)[at] = uint2{codes[0], codes[1]};
        return byte;
    }
};

}  // namespace oxmoe
