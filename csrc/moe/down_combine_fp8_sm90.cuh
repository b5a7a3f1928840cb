// GEMM2 and combine in one launch for Hopper, with e4m3 weights and tokens and block scales, for many tokens with 256 columns
// between the GEMMs: as grouped_gemm_fp8_stationary_sm90.cuh and combine.cuh one after the other, bit for bit, without GEMM2's
// output in memory.
//
// The output is made in panels of 128 columns, which go through a few buffers that stay in L2: while a panel is multiplied, the
// one before it is summed over the slots. A CTA has the same tokens in every panel: up to ten blocks of 64, which stay in shared
// memory while the weights of the panels pass by, once for all blocks of an expert. Where a batch has more tokens than the CTAs
// have room for, it is done chunk by chunk; an expert's places are in the order of their tokens, so a chunk has a range of them.
//
// Warpgroups: 0 weight copies and what waits for other CTAs (panels.cuh), a warp each; 1 and 2 multiply, a block of tokens at a
// time, on their own; 3 divides the work and sums. CTAs wait for each other, so all of them must fit on the GPU at once.
//
// `p.down.k` counts pairs of elements. Weights' tensor map and a lane's outputs are the wide kernel's. Plain, bf16 out, no
// activation, no router weights in GEMM2; needs k = 128 pairs, rows % 128 == 0, 16-byte aligned x, weights and out.
#pragma once
#include <cstdint>
#include <cuda.h>

#include "../common/counter.cuh"
#include "fp8_block_pair_sm90.cuh"
#include "grouped_gemm_fp8_wide_sm90.cuh"
#include "oxmoe/src/params/down_combine.rs.h"
#include "panels.cuh"

namespace oxmoe {

struct DownCombineFp8Sm90 {
    using Wide = GroupedGemmFp8WideSm90<false, 4>;
    using Pair = Fp8BlockPair;
    using Turn = panels::Turn;
    using Block = panels::Block;

    static constexpr int kColumns = 128, kRowBytes = 2 * kColumns;                  // of a panel
    static constexpr int kTokens = panels::kBlockTokens, kTokenVectors = 256 / 16;  // of a block; of a token
    static constexpr int kBlockBytes = 16384, kHalfBytes = kBlockBytes / 2;         // a block of tokens, or a K block of weights
    static constexpr int kBlocks = 14, kMostTokenBlocks = 10, kMostBuffers = 8;
    static constexpr int kConsumers = 2, kGroup = 128;
    static_assert(kTokens * 2 * 128 == kBlockBytes && kColumns * 128 == kBlockBytes, "two K blocks of tokens, one of weights");

    // Weights have the blocks of shared memory that tokens leave.
    struct alignas(128) Shared {
        uint8_t block[kBlocks][kBlockBytes];
        Block list[kMostTokenBlocks];
        int count;  // of `list`
        int sums[kGroup];
        uint64_t full[kBlocks], empty[kBlocks];
        uint64_t stored[kMostBuffers], ready[kMostBuffers], free[kMostBuffers];
    };
    static constexpr int kThreads = kGroup * (2 + kConsumers);
    static constexpr int kSharedBytes = sizeof(Shared);
    static constexpr int kCtas = 1;

    static __device__ __forceinline__ void run(const CUtensorMap& weights, const DownCombineParams& p) {
        extern __shared__ __align__(1024) uint8_t dynamic_shared[];
        Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
        if (threadIdx.x == 0) {
            init_barriers(shared);
            sm90::prefetch_tensor_map(&weights);
        }
        const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / kGroup, 0);
        if (group == 0) {
            sm90::registers_decrease<32>();
            const int warp = threadIdx.x / 32;
            if (warp == 0)
                copy_weights(weights, p, shared);
            else
                signal(p, shared, warp);
        } else if (group <= kConsumers) {
            sm90::registers_increase<184>();
            consume(p, shared, group - 1);
        } else {
            sm90::registers_decrease<112>();
            sum(p, shared);
        }
    }

private:
    static __device__ __forceinline__ void init_barriers(Shared& shared) {
#pragma unroll 1
        for (int s = 0; s < kBlocks; ++s) {
            sm90::barrier_init(&shared.full[s], 1);
            sm90::barrier_init(&shared.empty[s], 4 * kConsumers);
        }
#pragma unroll 1
        for (int b = 0; b < kMostBuffers; ++b) {
            sm90::barrier_init(&shared.stored[b], kGroup * kConsumers);
            sm90::barrier_init(&shared.ready[b], 1);
            sm90::barrier_init(&shared.free[b], 1);
        }
        sm90::barrier_init_fence();
    }

    static __device__ __forceinline__ int panels_of(const DownCombineParams& p) { return p.down.rows / kColumns; }

    // Everybody meets twice a chunk: before the last one's tokens are overwritten, and when its own blocks are listed.
    static __device__ __forceinline__ void meet() { __syncthreads(); }

    // Of K blocks of weights.
    struct Ring {
        int slot = 0;
        uint32_t parity = 0;

        __device__ __forceinline__ void advance(int stages) {
            if (++slot == stages) {
                slot = 0;
                parity ^= 1;
            }
        }
    };
    static __device__ __forceinline__ int stages(const DownCombineParams& p) { return kBlocks - p.token_blocks; }

    static __device__ __forceinline__ uint64_t evict_first() {
        uint64_t policy;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        return policy;
    }

    // ---- weights: one thread, a K block a stage ----

    // Read once a chunk: panels are to stay in L2 before them.
    static __device__ __forceinline__ void copy_block(void* destination, const CUtensorMap* map, int k, int strip,
                                                      uint64_t* barrier, uint64_t policy) {
        asm volatile(
            "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %3, "
            "%3, %4}], [%5], %6;" ::"r"(sm90::shared_address(destination)),
            "l"(map), "r"(k), "r"(0), "r"(strip), "r"(sm90::shared_address(barrier)), "l"(policy)
            : "memory");
    }

    static __device__ __forceinline__ void copy_weights(const CUtensorMap& weights, const DownCombineParams& p, Shared& shared) {
        const uint64_t policy = evict_first();
        Ring ring;
#pragma unroll 1
        for (int chunk = 0; chunk < p.chunks; ++chunk) {
            meet();
            meet();
            if (threadIdx.x == 0) {
                const int count = shared.count;
#pragma unroll 1
                for (int panel = 0; panel < panels_of(p); ++panel) {
#pragma unroll 1
                    for (int at = 0; at < count; at = shared.list[at].run_end) {
                        const int strip = (shared.list[at].expert * panels_of(p) + panel) * Wide::kBlockStrips;
#pragma unroll 1
                        for (int k = 0; k < 2; ++k, ring.advance(stages(p))) {
                            sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
                            sm90::barrier_arrive_expect(&shared.full[ring.slot], kBlockBytes);
                            copy_block(shared.block[p.token_blocks + ring.slot], &weights, k * Wide::Base::kBlockK, strip,
                                       &shared.full[ring.slot], policy);
                        }
                    }
                }
            }
            __syncwarp();
        }
    }

    // ---- what a CTA tells the others and hears from them: a thread each ----

    // The barriers and counters of panels.cuh.
    struct Cta {
        Shared& shared;
        const DownCombineParams& p;

        __device__ __forceinline__ int buffers() const { return p.buffers; }
        __device__ __forceinline__ int* written(int panel) const { return p.counters + panel; }
        __device__ __forceinline__ int* read(int panel) const { return p.counters + p.chunks * panels_of(p) + panel; }

        __device__ __forceinline__ void wait_stored(int slot, uint32_t parity) {
            sm90::barrier_wait(&shared.stored[slot], parity);
        }
        __device__ __forceinline__ void wait_free(int slot, uint32_t parity) { sm90::barrier_wait(&shared.free[slot], parity); }
        __device__ __forceinline__ void arrive_ready(int slot) { sm90::barrier_arrive(&shared.ready[slot]); }
        __device__ __forceinline__ void arrive_free(int slot) { sm90::barrier_arrive(&shared.free[slot]); }
        __device__ __forceinline__ void add_written(int panel) { counter::add_only(written(panel)); }
        __device__ __forceinline__ void wait_written(int panel) { wait_for_all(written(panel)); }
        __device__ __forceinline__ void wait_read(int panel) { wait_for_all(read(panel)); }

        // NOTE: one fence at the end, not an acquire each time: that empties the first-level cache.
        static __device__ __forceinline__ void wait_for_all(const int* counter) {
            int now;
            do {
                asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
            } while (now < int(gridDim.x));
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
        }
    };

    static __device__ __forceinline__ void signal(const DownCombineParams& p, Shared& shared, int warp) {
        Cta cta{shared, p};
        Turn turn;
#pragma unroll 1
        for (int chunk = 1; chunk <= p.chunks; ++chunk) {
            meet();
            meet();
            // NOTE: not before these: all meet there, and the division and the first weights wait for nobody.
            if (chunk == 1) pdl::wait();
            if (threadIdx.x % 32 == 0) {
                const int end = chunk * panels_of(p);
                if (warp == 1)
                    panels::announce(cta, turn, end);
                else if (warp == 2)
                    panels::hand_over(cta, turn, end);
                else
                    panels::give_back(cta, turn, end);
            }
            __syncwarp();
        }
    }

    // ---- consumers: every second block of the CTA's list each ----

    // Outputs of a block on their way out: where in a panel a lane's tokens are, null without a token, and pairs of outputs.
    struct Outputs {
        uint8_t* row[2] = {nullptr, nullptr};
        uint32_t pairs[2][Wide::kLaneColumns / 2];
        Turn turn;
        bool first = false, last = false;  // of the consumer's blocks in the panel

        __device__ __forceinline__ void store() const {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sm90::store_global_16_if(
                        row[half] + i * Wide::kRunStride * 2,
                        {pairs[half][4 * i], pairs[half][4 * i + 1], pairs[half][4 * i + 2], pairs[half][4 * i + 3]},
                        row[half] != nullptr);
                }
            }
        }
    };

    // The tokens of a consumer's blocks: 8 neighbouring threads copy 128 bytes; rows without a token keep old bytes.
    static __device__ __forceinline__ void load_tokens(const DownCombineParams& p, Shared& shared, int consumer) {
        const int thread = threadIdx.x % kGroup, chunk = thread % 8, first = thread / 8;
#pragma unroll 1
        for (int j = consumer; j < shared.count; j += kConsumers) {
            const Block block = shared.list[j];
            const uint4* x = reinterpret_cast<const uint4*>(p.down.x) + size_t(block.first) * kTokenVectors + chunk;
            const uint32_t to = sm90::shared_address(shared.block[j]) + (chunk ^ first % 8) * 16;
#pragma unroll
            for (int n = 0; n < kTokens; n += kGroup / 8) {
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    if (first + n < block.count) {
                        sm90::copy_16_async(to + k * kHalfBytes + (first + n) * 128, x + (first + n) * kTokenVectors + k * 8,
                                            true);
                    }
                }
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        sm90::fence_async_proxy();
        sm90::named_barrier(1 + consumer, kGroup);
    }

    static __device__ __forceinline__ Pair::Scales load_scales(const DownCombineParams& p, const Block& block, int panel,
                                                               int row) {
        const float2* tokens = reinterpret_cast<const float2*>(p.down.x_scales) + block.first;
        return {{tokens[row < block.count ? row : 0], tokens[row + 8 < block.count ? row + 8 : 0]},
                reinterpret_cast<const float2*>(p.down.block_scales)[block.expert * panels_of(p) + panel]};
    }

    static __device__ __forceinline__ void consume(const DownCombineParams& p, Shared& shared, int consumer) {
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = warp * 16 + lane / 4;
        const int lane_column = lane % 4 * Wide::kRun, panel_count = panels_of(p);
        const bool is_lane_0 = lane == 0;
        Cta cta{shared, p};
        Turn turn;
        Ring ring;
#pragma unroll 1
        for (int chunk = 0; chunk < p.chunks; ++chunk) {
            meet();
            meet();
            pdl::wait();
            load_tokens(p, shared, consumer);
            // The same in all lanes, but ptxas must know: then loops and descriptors live in uniform registers.
            const int count = __shfl_sync(0xFFFFFFFF, shared.count, 0);
            const bool none = consumer >= count;
            Pair::Scales next{};
            if (!none) next = load_scales(p, shared.list[consumer], 0, row);
            Outputs outputs;
#pragma unroll 1
            for (int panel = 0; panel < panel_count; ++panel, turn.advance(p.buffers)) {
                uint8_t* const buffer = p.down.out + size_t(turn.slot) * p.slots * kRowBytes + lane_column * 2;
#pragma unroll 1
                for (int at = 0, end; at < count; at = end) {
                    end = __shfl_sync(0xFFFFFFFF, shared.list[at].run_end, 0);
                    Ring behind = ring;
                    behind.advance(stages(p));
                    sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
                    sm90::barrier_wait(&shared.full[behind.slot], behind.parity);
                    int j = at + ((at ^ consumer) & 1);
                    if (j >= end) {
                        sm90::barrier_arrive_if(&shared.empty[ring.slot], is_lane_0);
                        sm90::barrier_arrive_if(&shared.empty[behind.slot], is_lane_0);
                    }
#pragma unroll 1
                    for (; j < end; j += kConsumers) {
                        if (outputs.first) panels::wait_free(cta, outputs.turn);
                        const Pair::Scales scales = next;
                        const uint32_t tokens = sm90::shared_address(shared.block[j]);
                        const uint32_t weights[2] = {sm90::shared_address(shared.block[p.token_blocks + ring.slot]),
                                                     sm90::shared_address(shared.block[p.token_blocks + behind.slot])};
                        float products[2][Pair::kSums];
                        Pair::start(products, [&](int b) { return tokens + b * kHalfBytes; }, [&](int b) { return weights[b]; });
                        const bool last = j + kConsumers >= count;
                        // NOTE: behind a chunk's last the same once more, which are there.
                        next = load_scales(p, shared.list[last ? consumer : j + kConsumers],
                                           last ? min(panel + 1, panel_count - 1) : panel, row);
                        outputs.store();
                        sm90::barrier_arrive_if(&shared.stored[outputs.turn.slot], outputs.last);
                        Pair::Sums sums;
                        Pair::finish<true>(sums, products, scales, {&shared.empty[ring.slot], &shared.empty[behind.slot]},
                                           is_lane_0 && j + kConsumers >= end);
                        const Block block = shared.list[j];
                        if (p.down.bias) {
                            Wide::add_bias(p.down, size_t(block.expert) * p.down.rows + panel * kColumns + lane_column, sums);
                        }
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
#pragma unroll
                            for (int i = 0; i < Wide::kLaneColumns / 2; ++i) {
                                outputs.pairs[half][i] = pack<__nv_bfloat16>(sums[Wide::sum_index(2 * i, half)],
                                                                             sums[Wide::sum_index(2 * i + 1, half)]);
                            }
                            const int n = row + 8 * half;
                            outputs.row[half] = n < block.count ? buffer + size_t(block.first + n) * kRowBytes : nullptr;
                        }
                        outputs.turn = turn, outputs.first = j < kConsumers, outputs.last = last;
                    }
                    ring = behind, ring.advance(stages(p));
                }
                if (none) {
                    panels::wait_free(cta, turn);
                    sm90::barrier_arrive(&shared.stored[turn.slot]);
                }
            }
            if (!none) {
                if (outputs.first) panels::wait_free(cta, outputs.turn);
                outputs.store();
                sm90::barrier_arrive(&shared.stored[outputs.turn.slot]);
            }
        }
    }

    // ---- division into blocks, and the sums: 16 threads a row of a panel, two rows each ----

    static constexpr int kRowThreads = kRowBytes / 16, kRowsAtOnce = kGroup / kRowThreads, kRows = 2, kBatch = 8;

    static __device__ __forceinline__ void divide(const DownCombineParams& p, Shared& shared, int chunk) {
        const int thread = threadIdx.x % kGroup, top_k = p.combine.top_k, chunk_slots = p.chunk_tokens * top_k;
        // Where tokens come to be: nobody reads them yet.
        int2* places = reinterpret_cast<int2*>(shared.block[0]);
        const panels::Division<kGroup> division{
            p.offsets,  p.slot_of_place,      p.experts, chunk * chunk_slots, (chunk + 1) * chunk_slots,
            chunk == 0, chunk == p.chunks - 1};
        shared.sums[thread] = division.count(thread, places);
        sm90::named_barrier(3, kGroup);
        int before = 0, all = 0;
#pragma unroll 8
        for (int i = 0; i < kGroup; ++i) {
            const int sum = shared.sums[i];
            all += sum;
            before += i < thread ? sum : 0;
        }
        const panels::Share share(all, blockIdx.x, gridDim.x);
        if (thread == 0) shared.count = share.end - share.first;
        division.list(thread, places, before, share, shared.list);
    }

    static __device__ __forceinline__ uint4 load_row(const uint8_t* address, bool there) {
        uint4 value;
        asm volatile(
            "{\n.reg .pred now;\nsetp.ne.b32 now, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
            "@now ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
            : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
            : "l"(address), "r"(int(there))
            : "memory");
        return value;
    }

    // -1 for a skipped slot. NOTE: in asm, so that it stays behind the rows, of which all are asked for first.
    static __device__ __forceinline__ float load_weight(const float* weights, uint32_t slot, bool there) {
        float weight = there ? 1.f : -1.f;
        asm volatile("{\n.reg .pred now;\nsetp.ne.b32 now, %2, 0;\n@now ld.global.f32 %0, [%1];\n}"
                     : "+f"(weight)
                     : "l"(weights + slot), "r"(int(there && weights))
                     : "memory");
        return weight;
    }

    static __device__ __forceinline__ void sum(const DownCombineParams& p, Shared& shared) {
        Turn turn;
#pragma unroll 1
        for (int chunk = 0; chunk < p.chunks; ++chunk) {
            meet();
            divide(p, shared, chunk);
            meet();
            pdl::wait();
            pdl::launch_dependents();
            const int token_rows = p.combine.keep_slots ? p.combine.top_k : 1;
            const int first = chunk * p.chunk_tokens, end = min(first + p.chunk_tokens, p.combine.tokens);
            panels::Share rows((end - first) * token_rows, blockIdx.x, gridDim.x);
            rows.first += first * token_rows, rows.end += first * token_rows;
#pragma unroll 1
            for (int panel = 0; panel < panels_of(p); ++panel, turn.advance(p.buffers)) {
                sum_panel(p, shared, turn, panel, rows);
                sm90::named_barrier(3, kGroup);
                if (threadIdx.x % kGroup == 0) counter::add_only(Cta{shared, p}.read(turn.panel));
            }
        }
    }

    // kBatch terms of kRows rows, kRowsAtOnce apart. `First`: their first.
    template <bool First, typename Ready>
    static __device__ __forceinline__ void add_terms(const CombineParams& c, const uint8_t* buffer, int row, int end, int batch,
                                                     int terms, float (&sums)[kRows][8], Ready ready) {
        int place[kRows][kBatch];
        const uint32_t first = uint32_t(row) * terms + batch, distance = kRowsAtOnce * terms;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const bool inside = row + r * kRowsAtOnce < end && batch + i < terms;
                place[r][i] = inside ? c.place_of_slot[first + r * distance + i] : -1;
            }
        }
        ready();
        uint4 y[kRows][kBatch];
        uint32_t there[kRows] = {};
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                y[r][i] = load_row(buffer + size_t(uint32_t(place[r][i])) * kRowBytes, place[r][i] >= 0);
                there[r] |= uint32_t(place[r][i] >= 0) << i;
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                // NOTE: a skipped slot adds -1 * 0 = -0, which changes no sum.
                const float weight = load_weight(c.weights, first + r * distance + i, there[r] >> i & 1);
                const uint32_t words[4] = {y[r][i].x, y[r][i].y, y[r][i].z, y[r][i].w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float2 pair = unpack<__nv_bfloat16>(words[j]);
                    sums[r][2 * j] = fmaf(weight, pair.x, First && i == 0 ? 0.f : sums[r][2 * j]);
                    sums[r][2 * j + 1] = fmaf(weight, pair.y, First && i == 0 ? 0.f : sums[r][2 * j + 1]);
                }
            }
        }
    }

    static __device__ __forceinline__ void sum_panel(const DownCombineParams& p, Shared& shared, const Turn& turn, int panel,
                                                     const panels::Share& rows) {
        const CombineParams& c = p.combine;
        const int thread = threadIdx.x % kGroup, vector = thread % kRowThreads, terms = c.keep_slots ? 1 : c.top_k;
        const uint8_t* const buffer = c.y + size_t(turn.slot) * p.slots * kRowBytes + vector * 16;
        bool waited = false;
        auto ready = [&] {
            if (!waited) sm90::barrier_wait(&shared.ready[turn.slot], turn.parity);
            waited = true;
        };
#pragma unroll 1
        for (int row = rows.first + thread / kRowThreads; row < rows.end; row += kRows * kRowsAtOnce) {
            float sums[kRows][8];
            add_terms<true>(c, buffer, row, rows.end, 0, terms, sums, ready);
#pragma unroll 1
            for (int batch = kBatch; batch < terms; batch += kBatch)
                add_terms<false>(c, buffer, row, rows.end, batch, terms, sums, [] {});
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                if (row + r * kRowsAtOnce >= rows.end) break;
                uint32_t words[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    words[j] = pack<__nv_bfloat16>(c.scale * sums[r][2 * j], c.scale * sums[r][2 * j + 1]);
                uint8_t* out = c.out + (size_t(row + r * kRowsAtOnce) * c.hidden + panel * kColumns) * 2 + vector * 16;
                asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(out), "r"(words[0]), "r"(words[1]),
                             "r"(words[2]), "r"(words[3])
                             : "memory");
            }
        }
        ready();
    }
};

}  // namespace oxmoe
