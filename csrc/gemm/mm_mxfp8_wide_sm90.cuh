// Dense MXFP8 GEMM for many tokens on Hopper. b is wgmma's A, decoded to bf16 in registers, 64 rows for each warpgroup; tokens
// are wgmma's N. MmMxfp8Tokens first converts a to bf16 rows, in the order that they have in shared memory.
//
// A stage is 128 K: rows of b in the 128-byte swizzle, copied by cp.async, and tokens in one bulk copy. One warpgroup decodes
// while another multiplies. MmShare divides tiles, or parts of their K, among CTAs. Grid: at most one CTA for each
// multiprocessor, or clusters.
//
// Needs k % 32 == 0, a and b aligned to 16 bytes.
#pragma once
#include <cstdint>

#include "../common/counter.cuh"
#include "../common/pdl.cuh"
#include "../common/ring.cuh"
#include "../common/sm90.cuh"
#include "../common/wgmma.cuh"
#include "mxfp8_operand.cuh"

namespace oxmoe {

// The K blocks [first, last) of a tile.
struct MmSegment {
    int tile, first, last;
};

// The segments that a CTA multiplies, one after the other. The CTAs of a cluster share the K of one tile. Without clusters, the
// first `shared_tiles` tiles would leave CTAs idle in the end: they are cut into as many runs of K blocks as there are CTAs. The
// CTAs take the other tiles whole.
//
// A run goes from its end to its beginning. So the CTA with a tile's first blocks multiplies them before anything else. The CTA
// with the tile's last blocks has a higher number, and adds the sums that it finds (`MmMxfp8WideSm90::add_others`).
class MmShare {
    const int blocks_, shared_tiles_, tiles_;
    int first_, end_, whole_;

public:
    static constexpr int kLeast = 2;  // blocks that are worth a run of their own

    __device__ __forceinline__ MmShare(int tiles, int shared_tiles, int blocks, int splits)
        : blocks_(blocks), shared_tiles_(shared_tiles), tiles_(tiles) {
        if (splits > 1) {
            const int rank = blockIdx.x % splits, start = blockIdx.x / splits * blocks;
            first_ = start + blocks * rank / splits, end_ = start + blocks * (rank + 1) / splits, whole_ = tiles;
            return;
        }
        first_ = begin_of(blockIdx.x), end_ = begin_of(blockIdx.x + 1);
        whole_ = shared_tiles_ + blockIdx.x;
    }

    // First block of the run of a CTA, counted through all shared tiles.
    __device__ __forceinline__ int begin_of(int cta) const {
        const int at = int(int64_t(shared_tiles_) * blocks_ * cta / gridDim.x), in_tile = at % blocks_;
        return in_tile <= kLeast ? at - in_tile : in_tile >= blocks_ - kLeast ? at - in_tile + blocks_ : at;
    }

    // Returns the next segment. Its tile is -1 if there is none left.
    __device__ __forceinline__ MmSegment next() {
        MmSegment segment = {-1, 0, 0};
        if (first_ < end_) {
            const int tile = (end_ - 1) / blocks_, start = tile * blocks_;
            segment = {tile, max(first_ - start, 0), end_ - start};
            end_ = start + segment.first;
        } else if (whole_ < tiles_) {
            segment = {whole_, 0, blocks_};
            whole_ += gridDim.x;
        }
        // The segment is the same in all lanes, but ptxas must know that: then loops and descriptors live in uniform registers.
        segment.tile = __shfl_sync(0xFFFFFFFF, segment.tile, 0);
        segment.first = __shfl_sync(0xFFFFFFFF, segment.first, 0);
        segment.last = __shfl_sync(0xFFFFFFFF, segment.last, 0);
        return segment;
    }
};

template <int Tokens, int Consumers, int Stages>
struct MmMxfp8WideSm90 {
    static constexpr int kThreads = 128 * (1 + Consumers), kRows = 64 * Consumers;
    static constexpr int kTokenBytes = Tokens * 128;  // bytes of 64 K of the tokens
    static constexpr int kPitch = kRows + 4;
    static constexpr int kGroupBlocks = 8;  // row blocks of a group, whose CTAs share tokens
    static constexpr int kPassRows = 16;

    struct alignas(1024) Stage {
        uint8_t tokens[2 * kTokenBytes], rows[kRows * 128];
    };
    struct Shared {
        union {
            Stage stage[Stages];
            float sums[Tokens * kPitch];
        };
        uint64_t full[Stages], empty[Stages];
    };
    static constexpr int kSharedBytes = (sizeof(Shared) + 127) / 128 * 128;
    static_assert(Tokens % 16 == 0 && Tokens * kPitch * 4 <= Stages * int(sizeof(Stage)), "sums lie where stages were");

    static __device__ __forceinline__ void run(const MmMxfp8Params& p) {
        extern __shared__ __align__(1024) uint8_t dynamic_shared[];
        Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
        if (threadIdx.x == 0) {
            for (int i = 0; i < Stages; ++i) {
                sm90::barrier_init(&shared.full[i], 128 + 1);
                sm90::barrier_init(&shared.empty[i], 128 * Consumers);
            }
            sm90::barrier_init_fence();
        }
        __syncthreads();
        Work work(p);
        pdl::wait();
        pdl::launch_dependents();
        if (threadIdx.x < 128) {
            if constexpr (Consumers > 1) sm90::registers_decrease<kProducerRegisters>();
            produce(p, shared, work);
            if (p.splits > 1) __syncthreads();  // the barrier in consume()
        } else {
            if constexpr (Consumers > 1) sm90::registers_increase<kConsumerRegisters>();
            consume(p, shared, work);
        }
        if (p.splits == 1) return;
        __syncthreads();
        const Tile tile = work.grid.at(blockIdx.x / p.splits);
        mxfp8_dense::reduce_and_store<Tokens, kRows, kPitch>(p, shared.sums, tile.token_tile * Tokens, tile.first_row);
    }

private:
    static constexpr int kProducerRegisters = Consumers == 3 ? 56 : 40, kConsumerRegisters = Consumers == 3 ? 152 : 232;

    struct Tile {
        int token_tile, first_row;
    };
    struct Grid {
        int row_blocks, token_tiles, blocks;

        __device__ __forceinline__ explicit Grid(const MmMxfp8Params& p)
            : row_blocks((p.n + kRows - 1) / kRows), token_tiles((p.m + Tokens - 1) / Tokens), blocks(mxfp8_dense::k_blocks(p)) {}

        // Tiles are ordered by group of row blocks, then by token tile, then by row block of the group.
        __device__ __forceinline__ Tile at(int tile) const {
            const int group = tile / (kGroupBlocks * token_tiles), of_group = tile - group * kGroupBlocks * token_tiles;
            const int group_blocks = min(kGroupBlocks, row_blocks - group * kGroupBlocks);
            return {of_group / group_blocks, (group * kGroupBlocks + of_group % group_blocks) * kRows};
        }
    };

    // The segments that a CTA has left. Each role walks through its own copy.
    struct Work {
        Grid grid;
        MmShare share;
        MmSegment segment;
        Tile tile;

        __device__ __forceinline__ explicit Work(const MmMxfp8Params& p)
            : grid(p), share(grid.row_blocks * grid.token_tiles, p.shared_tiles, grid.blocks, p.splits) {
            advance();
        }
        __device__ __forceinline__ bool is_done() const { return segment.tile < 0; }
        __device__ __forceinline__ void advance() {
            segment = share.next();
            if (!is_done()) tile = grid.at(segment.tile);
        }
    };

    static __device__ __forceinline__ void produce(const MmMxfp8Params& p, Shared& shared, Work work) {
        using namespace mxfp8_dense;
        const int chunk = threadIdx.x % 8, row = threadIdx.x / 8, chunks = p.k / 16;
        const uint32_t swizzled = row * 128 + (chunk ^ row % 8) * 16;
        RingPosition<Stages> ring;
#pragma unroll 1
        for (; !work.is_done(); work.advance()) {
            const int first_row = work.tile.first_row + row;
            const uint8_t* b = p.b + int64_t(first_row) * p.k + chunk * 16;
            const uint8_t* tokens = p.tokens + int64_t(work.tile.token_tile) * work.grid.blocks * (2 * kTokenBytes);
#pragma unroll 1
            for (int block = work.segment.first; block < work.segment.last; ++block, ring.advance()) {
                Stage& stage = shared.stage[ring.slot];
                uint64_t* full = &shared.full[ring.slot];
                sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
                if (threadIdx.x == 0) {
                    sm90::barrier_arrive_expect(full, 2 * kTokenBytes);
                    sm90::copy_bulk(stage.tokens, tokens + int64_t(block) * (2 * kTokenBytes), 2 * kTokenBytes, full);
                }
                const bool inside = block * 8 + chunk < chunks;
                const uint32_t to = sm90::shared_address(stage.rows) + swizzled;
                const uint8_t* from = b + block * kBlockK;
#pragma unroll
                for (int i = 0; i < kRows / kPassRows; ++i) {
                    const bool real = inside && first_row + i * kPassRows < p.n;
                    sm90::copy_16_async(to + i * kPassRows * 128, real ? from + i * kPassRows * p.k : p.b, real);
                }
                sm90::copy_async_arrive(full);
            }
        }
    }

    static __device__ __forceinline__ void consume(const MmMxfp8Params& p, Shared& shared, Work work) {
        RingPosition<Stages> ring;
        Scales scales;
        scales.begin(p, work);
        float sums[Tokens / 2];
#pragma unroll 1
        while (!work.is_done()) {
            multiply(p, shared, work.segment, scales, ring, sums);
            if (p.splits > 1) break;
            const MmSegment segment = work.segment;
            const Tile tile = work.tile;
            work.advance();
            scales.begin(p, work);  // loads of scales are in flight while sums are stored
            if (segment.last < work.grid.blocks) {
                hand_over(p, sums);
                continue;
            }
            add_others(p, work.share, segment, work.grid.blocks, sums);
            const int first_row = tile.first_row + own_row() - lane_row();
            if (p.out_dtype == Dtype::Bf16)
                store<__nv_bfloat16>(p, tile.token_tile * Tokens, first_row, sums);
            else if (p.out_dtype == Dtype::F16)
                store<__half>(p, tile.token_tile * Tokens, first_row, sums);
            else
                store_fp32(p, tile.token_tile * Tokens, first_row, sums);
        }
        if (p.splits == 1) return;
        // All stages have been read, and no copy into one is in flight. NOTE: this is a barrier of all threads. If only the
        // consumers met at a barrier, racecheck would not see it between these sums and their readers.
        __syncthreads();
        float* const at = shared.sums + 2 * (threadIdx.x % 4) * kPitch + own_row();
#pragma unroll
        for (int i = 0; i < Tokens / 8; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) at[(8 * i + j % 2) * kPitch + j / 2 * 8] = sums[4 * i + j];
        }
    }

    // lane_row() is a lane's row of eight, own_row() its row of the tile. The lane also has the row 8 after it.
    static __device__ __forceinline__ int lane_row() { return threadIdx.x % 32 / 4; }
    static __device__ __forceinline__ int own_row() {
        return (threadIdx.x / 128 - 1) * 64 + threadIdx.x % 128 / 32 * 16 + lane_row();
    }

    // The scales of a lane's rows for its columns, loaded one block ahead.
    struct Scales {
        const uint8_t* rows[2];
        int64_t step;
        uint32_t bytes[2];

        __device__ __forceinline__ void begin(const MmMxfp8Params& p, const Work& work) {
            if (work.is_done()) return;
            const int row = work.tile.first_row + own_row();
#pragma unroll
            for (int i = 0; i < 2; ++i)
                rows[i] = row + 8 * i < p.n ? scale_address(p.b_scales, row + 8 * i, threadIdx.x % 4, p.k / 32) : nullptr;
            step = four_blocks(p.b_scales);
            load(p, work.segment.first);
        }
        __device__ __forceinline__ void load(const MmMxfp8Params& p, int block) {
            const bool inside = block * mxfp8_dense::kBlockGroups + int(threadIdx.x % 4) < p.k / 32;
#pragma unroll
            for (int i = 0; i < 2; ++i) bytes[i] = inside && rows[i] ? rows[i][block * step] : 127;
        }
    };

    // Sets sums to the products of a segment.
    static __device__ __forceinline__ void multiply(const MmMxfp8Params& p, Shared& shared, const MmSegment& segment,
                                                    Scales& scales, RingPosition<Stages>& ring, float (&sums)[Tokens / 2]) {
        using namespace mxfp8_dense;
#pragma unroll
        for (int i = 0; i < Tokens / 2; ++i) asm volatile("mov.b32 %0, 0;" : "=f"(sums[i]));
        // Offsets of the thread's chunks in its first row. Its second row is 8 rows on, with its chunks in the same order.
        uint32_t mine[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            mine[half] = own_row() * 128 + ((2 * (threadIdx.x % 4) + half) ^ lane_row()) * 16;
            asm volatile("" : "+r"(mine[half]));  // keeps it in a register instead of computing it for each block
        }
        int previous = 0;
#pragma unroll 1
        for (int block = segment.first; block < segment.last; ++block, ring.advance()) {
            const float scale[2] = {scale_value(scales.bytes[0]), scale_value(scales.bytes[1])};
            if (block + 1 < segment.last) scales.load(p, block + 1);
            sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
            const Stage& stage = shared.stage[ring.slot];
            const uint32_t rows = sm90::shared_address(stage.rows), tokens = sm90::shared_address(stage.tokens);
            uint4 words[2][2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                words[half][0] = sm90::load_shared_16(rows + mine[half]);
                words[half][1] = sm90::load_shared_16(rows + mine[half] + 8 * 128);
            }
#pragma unroll
            for (int step = 0; step < 8; ++step) {
                const int half = step / 4, word = step % 4;
                uint32_t a[4];
                decode(word_of(words[half][0], word), scale[0], a[0], a[2]);
                decode(word_of(words[half][1], word), scale[1], a[1], a[3]);
                sm90::wgmma_fence();
                sm90::WgmmaFromRegisters<Tokens>::multiply(sums, a,
                                                           sm90::descriptor_128b(tokens, half * kTokenBytes + word * 32));
                sm90::wgmma_commit();
                sm90::wgmma_wait<1>();
                if (step == 0) sm90::barrier_arrive_if(&shared.empty[previous], block > segment.first);
            }
            previous = ring.slot;
        }
        sm90::wgmma_wait<0>();
        sm90::barrier_arrive(&shared.empty[previous]);
    }

    // The sums that a warpgroup of CTA `cta` leaves for the CTA that ends their tile. They are vectors of four; each thread has
    // Tokens / 8 of them, 128 vectors apart.
    static __device__ __forceinline__ float4* left_by(const MmMxfp8Params& p, int cta) {
        const int64_t warpgroup = int64_t(cta) * Consumers + threadIdx.x / 128 - 1;
        return reinterpret_cast<float4*>(p.partial_sums) + warpgroup * (Tokens / 8) * 128 + threadIdx.x % 128;
    }
    static __device__ __forceinline__ int* arrived(const MmMxfp8Params& p, int cta) {
        return p.arrived + cta * Consumers + threadIdx.x / 128 - 1;
    }

    static __device__ __forceinline__ void hand_over(const MmMxfp8Params& p, const float (&sums)[Tokens / 2]) {
        float4* const to = left_by(p, blockIdx.x);
#pragma unroll
        for (int i = 0; i < Tokens / 8; ++i) to[i * 128] = float4{sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
        sm90::named_barrier(threadIdx.x / 128, 128);
        if (threadIdx.x % 128 == 0) counter::add_only(arrived(p, blockIdx.x));
    }

    // Adds the sums that other CTAs have of the tile, from the nearest CTA on: the order is fixed.
    static __device__ __forceinline__ void add_others(const MmMxfp8Params& p, const MmShare& share, const MmSegment& segment,
                                                      int blocks, float (&sums)[Tokens / 2]) {
        if (segment.first == 0) return;
        const int start = segment.tile * blocks;
        for (int cta = blockIdx.x, first = start + segment.first; first > start;) {
            first = share.begin_of(--cta);
            if (first == share.begin_of(cta + 1)) continue;  // this CTA's run is empty
            counter::wait_for_in_warp(arrived(p, cta), 1);
            const float4* const from = left_by(p, cta);
#pragma unroll
            for (int i = 0; i < Tokens / 8; ++i) {
                const float4 more = __ldcg(from + i * 128);
                sums[4 * i] += more.x, sums[4 * i + 1] += more.y, sums[4 * i + 2] += more.z, sums[4 * i + 3] += more.w;
            }
        }
    }

    // Stores the warp's 16 rows from first_row on. 8 x 8 tiles are transposed, so that a lane has two neighbouring rows of a
    // token. Then a quad exchanges pairs of rows of two tokens, so that a lane has eight rows of a token.
    template <typename Element>
    static __device__ __forceinline__ void store(const MmMxfp8Params& p, int first_token, int first_row,
                                                 const float (&sums)[Tokens / 2]) {
        const int c = threadIdx.x % 4;
        const bool vectors = p.n % 8 == 0;
#pragma unroll
        for (int i = 0; i < Tokens / 16; ++i) {
            uint32_t pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) pairs[j] = sm90::turn_tile(pack<Element>(sums[8 * i + 2 * j], sums[8 * i + 2 * j + 1]));
            exchange_in_quad(pairs, c);
            const int token = first_token + 16 * i + c / 2 * 8 + lane_row(), row = first_row + c % 2 * 8;
            if (token >= p.m) continue;
            uint16_t* const out = reinterpret_cast<uint16_t*>(p.out) + int64_t(token) * p.n + row;
            if (vectors) {
                if (row < p.n) sm90::store_global_16(out, uint4{pairs[0], pairs[1], pairs[2], pairs[3]});
                continue;
            }
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (row + j < p.n) out[j] = uint16_t(pairs[j / 2] >> j % 2 * 16);
        }
    }

    // Exchanges words in a quad: words[j] of lane c becomes words[c] of lane j.
    static __device__ __forceinline__ void exchange_in_quad(uint32_t (&words)[4], int c) {
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
            const bool upper = c & distance;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (j & distance) continue;
                const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, upper ? words[j] : words[j + distance], distance);
                if (upper)
                    words[j] = other;
                else
                    words[j + distance] = other;
            }
        }
    }

    static __device__ __forceinline__ void store_fp32(const MmMxfp8Params& p, int first_token, int first_row,
                                                      const float (&sums)[Tokens / 2]) {
        const int row = first_row + lane_row();
#pragma unroll
        for (int i = 0; i < Tokens / 2; ++i) {
            const int token = first_token + i / 4 * 8 + 2 * (threadIdx.x % 4) + i % 2, at = row + i % 4 / 2 * 8;
            if (token < p.m && at < p.n) reinterpret_cast<float*>(p.out)[int64_t(token) * p.n + at] = sums[i];
        }
    }
};

// Converts a to what MmMxfp8WideSm90 reads: [token tiles][blocks of 128 K][2][tile_tokens][64] bf16 in the 128-byte swizzle, with
// zeros beyond m and k. A thread converts 8 numbers. Grid: any.
struct MmMxfp8Tokens {
    static constexpr int kThreads = 256;
    static constexpr int kSharedBytes = 0;

    static __device__ __forceinline__ void run(const MmMxfp8Params& p) {
        using namespace mxfp8_dense;
        pdl::wait();
        pdl::launch_dependents();
        const int groups = p.k / kGroup, blocks = k_blocks(p), tiles = (p.m + p.tile_tokens - 1) / p.tile_tokens;
        if (blockIdx.x == 0)
            for (int i = threadIdx.x; i < p.arrivals; i += kThreads) p.arrived[i] = 0;
        const int64_t units = int64_t(tiles) * p.tile_tokens * blocks * 16;
        for (int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x; unit < units; unit += int64_t(gridDim.x) * kThreads) {
            // Neighbouring threads take chunks of a row, then rows, halves of a block, and blocks.
            const int place = unit % 8, chunk = place ^ (unit / 8 % 8);
            const int64_t rows = unit / 8;
            const int in_tile = rows % p.tile_tokens, half = rows / p.tile_tokens % 2;
            const int64_t at_block = rows / (2 * p.tile_tokens);
            const int block = at_block % blocks, token = int(at_block / blocks) * p.tile_tokens + in_tile;
            uint32_t pairs[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int group = block * kBlockGroups + c;
                pairs[c] = 0;
                if (token >= p.m || group >= groups) continue;
                const int column = group * kGroup + half * 16 + chunk / 2 * 4 + chunk % 2 * 2;
                const uint16_t codes = *reinterpret_cast<const uint16_t*>(p.a + int64_t(token) * p.k + column);
                pairs[c] = decode_pair(codes, scale_value(*scale_address(p.a_scales, token, group, groups)));
            }
            reinterpret_cast<uint4*>(p.tokens)[unit] = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
        }
    }
};

}  // namespace oxmoe
