// A whole layer of few tokens and packed MXFP4 weights in one launch, for Hopper: routing, GEMM1, GEMM2 and combine.
//
// This is RoutedLayerSm90 for packed weights, with other units. A layer is too little work for units of 64 rows: gpt-oss has 4.1
// of them an SM. Here a unit is a slice, 16 weight rows and all of K, and belongs to one warp. The warp copies the slice's codes
// and scales into a ring that no other warp sees, decodes and multiplies. So units spread evenly, warps wait only for memory, and
// GEMM2's weights come into the ring while GEMM1 ends.
//
// All tokens lie in shared memory, and so do the rows of GEMM1's output that the CTA's units of GEMM2 need. These are rows of two
// tiles at most, since its units are neighbours. The rings have the rest of half an SM's shared memory: the next launch's CTAs
// lie in the other half and wait when this one ends. Deeper rings do not help: a warp waits until it can issue its copies in one
// go, and it should multiply meanwhile.
//
// The warps are consumers, the first 8 of which route, and 4 helpers. Helpers copy tokens, mark outputs absent, wait for GEMM1's
// results and combine. Sums, their K order and rounding are GroupedGemmMxfp4Sm90's and Combine's, and so are the bits. The other
// parts are RoutedLayerSm90's, which also says why CTAs may wait for each other.
#pragma once
#include <cstdint>

#include "../common/absent.cuh"
#include "../common/mxfp4.cuh"
#include "../common/sm80.cuh"
#include "few_slots.cuh"
#include "grouped_gemm_sm90.cuh"
#include "layer_parts.cuh"

namespace oxmoe {

template <bool Gated, int Consumers, int Blocks, int Stages>
struct RoutedLayerMxfp4Sm90 {
    using Element = __nv_bfloat16;
    using Up = GroupedGemmSm90<Element, Gated, 16, 1, 1, 2>;
    using Down = GroupedGemmSm90<Element, false, 16, 1, 1, 2>;

    static constexpr int kConsumers = Consumers, kHelpers = 4, kThreads = 32 * (kConsumers + kHelpers);
    static constexpr int kSliceRows = 16;
    static constexpr int kSliceCodes = mxfp4::kCodeBytes / 4, kSliceScales = mxfp4::kScaleBytes / 4;  // bytes of a K block
    static constexpr int kBlocks = Blocks, kStageBytes = kBlocks * (kSliceCodes + kSliceScales), kMostStages = Stages;
    static constexpr int kTiles = 2;  // tiles of a CTA's units of GEMM2
    static constexpr int kSharedBytes = 113 * 1024;

    struct alignas(128) Shared {
        FewSlots slots;
        uint64_t full[kConsumers][kMostStages];
        uint64_t input, inner[kTiles];  // tokens of GEMM1, and of each tile of GEMM2
        uint64_t up_done;               // passes when this CTA's units of GEMM1 are done
        uint64_t marked;                // passes once, when all CTAs have marked their parts
    };
    static_assert(sizeof(Shared) == (sizeof(FewSlots) + 8 * (kConsumers * kMostStages + 5) + 127) / 128 * 128, "variants.rs");

    static __device__ __forceinline__ void run(const RoutedLayerParams& p) {
        extern __shared__ __align__(1024) uint8_t dynamic_shared[];
        Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
        const int warp = warp_of_block();
        // These constants would otherwise be fetched when they are needed.
        LayerCounters* counters_at = reinterpret_cast<LayerCounters*>(p.counters);
        asm volatile("" : "+l"(counters_at));
        asm volatile("" ::"l"(p.select.logits), "l"(p.layer.up.x), "r"(p.layer.down.rows), "l"(p.layer.combine.out));
        shared.slots.clear();
        if (threadIdx.x < kConsumers * kMostStages) {
            sm90::barrier_init(&shared.full[0][0] + threadIdx.x, 32);
            if (threadIdx.x == 0) {
                sm90::barrier_init(&shared.input, 32 * kHelpers);
                sm90::barrier_init(&shared.inner[0], 32 * kHelpers);
                sm90::barrier_init(&shared.inner[1], 32 * kHelpers);
                sm90::barrier_init(&shared.up_done, kConsumers);
                sm90::barrier_init(&shared.marked, 1);
            }
            sm90::barrier_init_fence();
        }
        __syncthreads();
        pdl::wait();
        pdl::launch_dependents();
        if (warp < kConsumers)
            consume(p, shared);
        else
            help(p, *counters_at, shared);
    }

private:
    static __device__ __forceinline__ int divide(int n, int d) { return layer_parts::divide(n, d); }
    static __device__ __forceinline__ int k_blocks(const GroupedGemmParams& p) {
        return (p.k + mxfp4::kBlockK - 1) / mxfp4::kBlockK;
    }
    static __device__ __forceinline__ int slices(const GroupedGemmParams& p) { return (p.rows + kSliceRows - 1) / kSliceRows; }
    // Bytes after a CTA's tokens and after each of its tiles: they are read ahead of the last token's last block, and not used.
    static constexpr int kReadAhead = 64;
    // Bytes of a token in shared memory: an odd number of 16, so that 8 tokens lie in different banks.
    static __device__ __forceinline__ int pitch(const GroupedGemmParams& p) { return k_blocks(p) * 128 + 16; }

    // ---- units ----

    struct Unit {
        int tile, slice;  // tile is its number in the schedule
        bool down;
    };

    // This CTA's units, first GEMM1's then GEMM2's; the units of each GEMM are neighbours. GEMM2's odd units go first to the CTAs
    // that have no odd unit of GEMM1.
    struct Units {
        int up_first, up_count, down_first, count;

        __device__ __forceinline__ Units(const LayerParams& p, int tiles) {
            const int grid = gridDim.x, cta = blockIdx.x;
            const int up = tiles * slices(p.up), up_each = divide(up, grid), up_odd = up - up_each * grid;
            const int down = tiles * slices(p.down), down_each = divide(down, grid), down_odd = down - down_each * grid;
            up_first = cta * up_each + min(cta, up_odd);
            up_count = up_each + (cta < up_odd);
            // Odd units of GEMM2 before CTA i: CTAs from up_odd on come first, then those from 0 on.
            const auto odd = [&](int i) {
                return min(max(i - up_odd, 0), down_odd) + min(i, max(down_odd - (grid - up_odd), 0));
            };
            down_first = cta * down_each + odd(cta);
            count = up_count + (cta + 1) * down_each + odd(cta + 1) - down_first;
        }

        __device__ __forceinline__ Unit unit(const LayerParams& p, int index) const {
            const bool down = index >= up_count;
            const int number = down ? down_first + index - up_count : up_first + index, each = slices(down ? p.down : p.up);
            const int tile = divide(number, each);
            return {tile, number - tile * each, down};
        }
    };

    // ---- shared memory after Shared: tokens, GEMM1's results, rings ----

    struct Layout {
        uint32_t input, first_inner, second_inner, rings;
        int first_tile, tiles, stages;  // first_tile and tiles count tiles of this CTA's units of GEMM2

        __device__ __forceinline__ Layout(const RoutedLayerParams& p, const Shared& shared, const Units& units) {
            const int each = slices(p.layer.down), row = pitch(p.layer.down), downs = units.count - units.up_count;
            first_tile = divide(units.down_first, each);
            tiles = downs > 0 ? divide(units.down_first + downs - 1, each) - first_tile + 1 : 0;
            input = input_of(shared);
            first_inner = input + p.select.tokens * pitch(p.layer.up) + kReadAhead;
            second_inner = first_inner + (tiles > 0 ? shared.slots.tile(first_tile).count * row + kReadAhead : 0);
            rings = second_inner + (tiles > 1 ? shared.slots.tile(first_tile + 1).count * row + kReadAhead : 0);
            const int left = sm90::shared_address(&shared) + kSharedBytes - rings;
            stages = min(kMostStages, divide(left, kConsumers * kStageBytes));
        }

        __device__ __forceinline__ uint32_t inner_of(int i) const { return i == 0 ? first_inner : second_inner; }
    };

    static __device__ __forceinline__ uint32_t input_of(const Shared& shared) {
        return sm90::shared_address(&shared) + sizeof(Shared);
    }

    // ---- weights: every warp copies its own ----

    // The weights that the warp copies next.
    struct Source {
        const uint8_t *codes, *scales;  // addresses of this lane
        int blocks, index;              // K blocks left of the unit, and the unit's index

        // Copies the next stage. Call this once all lanes have read the stage's buffer, or before its first use.
        __device__ __forceinline__ void fill(const LayerParams& p, const Units& units, const FewSlots& slots, uint32_t stage,
                                             uint32_t full) {
            const int lane = threadIdx.x % 32;
            if (blocks == 0) {
                index += kConsumers;
                if (index >= units.count) return;
                const Unit unit = units.unit(p, index);
                const GroupedGemmParams& gemm = unit.down ? p.down : p.up;
                blocks = k_blocks(gemm);
                const int row_tiles = (gemm.rows + mxfp4::kBlockRows - 1) / mxfp4::kBlockRows;
                const size_t first = size_t(slots.tile(unit.tile).expert * row_tiles + unit.slice / 4) * blocks;
                codes = gemm.weights + first * mxfp4::kCodeBytes + unit.slice % 4 * kSliceCodes + lane * 16;
                scales = gemm.block_scales + first * mxfp4::kScaleBytes + unit.slice % 4 * kSliceScales +
                         lane / 2 * mxfp4::kScaleBytes + lane % 2 * 16;
            }
            const int now = min(blocks, kBlocks);
            if (now == kBlocks) {
#pragma unroll
                for (int i = 0; i < kBlocks; ++i)
                    sm90::copy_16_async(stage + i * kSliceCodes + lane * 16, codes + i * mxfp4::kCodeBytes, true);
            } else {
#pragma unroll 1
                for (int i = 0; i < now; ++i)
                    sm90::copy_16_async(stage + i * kSliceCodes + lane * 16, codes + i * mxfp4::kCodeBytes, true);
            }
            if (lane < 2 * now) sm90::copy_16_async(stage + kBlocks * kSliceCodes + lane * 16, scales, true);
            copy_async_arrive(full);
            codes += kBlocks * mxfp4::kCodeBytes, scales += kBlocks * mxfp4::kScaleBytes;
            blocks -= now;
        }
    };

    // ---- consumers ----

    static __device__ __forceinline__ void consume(const RoutedLayerParams& params, Shared& shared) {
        const LayerParams& p = params.layer;
        shared.slots.template route<32 * kConsumers>(params.select, params.experts, params.first_expert);
        asm volatile("bar.arrive 2, %0;" ::"n"(kThreads) : "memory");  // the tables are there
        const int warp = warp_of_block(), lane = threadIdx.x % 32;
        const Units units(p, shared.slots.tile_count());
        const Layout layout(params, shared, units);
        Ring ring{layout.rings + warp * layout.stages * kStageBytes, layout.stages, sm90::shared_address(&shared.full[warp][0])};
        Source source{nullptr, nullptr, 0, warp - kConsumers};
#pragma unroll 1
        for (int i = 0; i < layout.stages; ++i)
            source.fill(p, units, shared.slots, ring.stages + i * kStageBytes, ring.full + i * 8);
        bool up_done = false;
        Weights weights[2];
        if (warp < units.count) {
            ring.wait();
            weights[0].load(ring.stages, 0);
        }
        sm90::barrier_wait(&shared.input, 0);
#pragma unroll 1
        for (int index = warp; index < units.count; index += kConsumers) {
            const Unit unit = units.unit(p, index);
            const GroupedGemmParams& gemm = unit.down ? p.down : p.up;
            const Tile tile = shared.slots.tile(unit.tile);
            const WorkUnit work{tile.expert, tile.first, tile.count, 0};
            const float scale = gemm.expert_scales[tile.expert];
            const int token = min(lane % 8, tile.count - 1), blocks = __shfl_sync(0xFFFFFFFF, k_blocks(gemm), 0);
            float bias[1][2] = {}, sums[1][8] = {};
            uint32_t tokens;
            if (unit.down) {
                if (!up_done && lane == 0) sm90::barrier_arrive(&shared.up_done);
                up_done = true;
                load_biases<Down>(gemm, tile.expert, unit.slice, bias);
                const int which = unit.tile - layout.first_tile;
                tokens = layout.inner_of(which) + token * pitch(gemm);
                sm90::barrier_wait(&shared.inner[which], 0);
            } else {
                load_biases<Up>(gemm, tile.expert, unit.slice, bias);
                const int row = divide(shared.slots.slot_of_place[tile.first + token], gemm.row_divisor);
                tokens = layout.input + row * pitch(gemm);
            }
            multiply(blocks, index + kConsumers < units.count, sums[0], tokens + lane / 8 * 16, weights, ring,
                     [&](uint32_t stage, uint32_t full) { source.fill(p, units, shared.slots, stage, full); });
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[0][i] *= scale;
            if (unit.down) {
                // The unit's tokens came after the marks, so there is no wait for marks here.
                Down::add_biases(sums, bias, p.down);
                layer_parts::store<Element, false, true>(tile.first, tile.count, unit.slice, sums[0], p.down);
            } else {
                sm90::barrier_wait(&shared.marked, 0);
                const bool activated = Up::template prepare_sums<true, false>(work, sums, bias, p.up);
                if (Gated && !activated)
                    layer_parts::store<Element, Gated, false>(tile.first, tile.count, unit.slice, sums[0], p.up);
                else
                    layer_parts::store<Element, Gated, true>(tile.first, tile.count, unit.slice, sums[0], p.up);
            }
        }
        if (!up_done && lane == 0) sm90::barrier_arrive(&shared.up_done);
    }

    template <typename Gemm>
    static __device__ __forceinline__ void load_biases(const GroupedGemmParams& p, int expert, int slice, float (&bias)[1][2]) {
        if (!p.bias) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = Gemm::template weight_row<true>(p, slice / 4, slice % 4, half, threadIdx.x % 32 / 4);
            bias[0][half] = Gemm::load_bias(p, size_t(expert) * p.rows + row);
        }
    }

    static __device__ __forceinline__ void copy_async_arrive(uint32_t full) {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
    }

    struct Ring {
        uint32_t stages;  // address of the first stage
        int count;
        uint32_t full;  // address of the first stage's barrier
        int slot = 0;
        uint32_t parity = 0;

        __device__ __forceinline__ uint32_t stage() const { return stages + slot * kStageBytes; }
        __device__ __forceinline__ uint32_t barrier() const { return full + slot * 8; }
        __device__ __forceinline__ void advance() {
            if (++slot == count) slot = 0, parity ^= 1;
        }
        __device__ __forceinline__ void wait() const { wait(barrier(), parity); }
        static __device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
            asm volatile(
                "{\n.reg .pred done;\n"
                "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                "@!done bra again;\n}" ::"r"(barrier),
                "r"(parity)
                : "memory");
        }
    };

    // A K block's weights in registers.
    struct Weights {
        uint32_t codes[4], scales;

        __device__ __forceinline__ void load(uint32_t stage, int block) {
            const int lane = threadIdx.x % 32;
            sm80::load_shared_16(codes, stage + lane * 16 + block * kSliceCodes);
            scales = sm80::load_shared_4(stage + lane / 4 * 4 + kBlocks * kSliceCodes + block * kSliceScales);
        }

        __device__ __forceinline__ void multiply_half(float (&sums)[4], const uint32_t (&tokens)[4], int half) const {
            const uint32_t multipliers = mxfp4::unpack_scales(scales, half);
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                uint32_t a[4];
                mxfp4::decode(codes[half * 2 + step], multipliers, a);
                sm80::multiply_add<Element>(sums, a, tokens[step * 2], tokens[step * 2 + 1]);
            }
        }
    };

    // `mine` is the address of this lane's row of the tokens' 8 x 8 tiles. weights[0] has the unit's first block; on return it
    // has the first block of the next unit, if there is one. The next block's weights and the next half's tokens are loaded
    // meanwhile.
    template <typename Refill>
    static __device__ __forceinline__ void multiply(int blocks, bool goes_on, float* all_sums, uint32_t mine,
                                                    Weights (&weights)[2], Ring& ring, Refill refill) {
        float (&sums)[4] = *reinterpret_cast<float (*)[4]>(all_sums);
        uint32_t tokens[2][4];
        sm80::load_matrix_4(tokens[0], mine);
        int block = 0;
#pragma unroll 1
        for (; block + kBlocks <= blocks; block += kBlocks) {
            const uint32_t stage = ring.stage(), full = ring.barrier(), parity = ring.parity;
            ring.advance();
            const bool more = goes_on || block + kBlocks < blocks;
#pragma unroll
            for (int i = 0; i < kBlocks; ++i) {
                if (i + 1 < kBlocks) {
                    weights[(i + 1) % 2].load(stage, i + 1);
                } else {
                    // Without a next stage this loads the present one again.
                    Ring::wait(more ? ring.barrier() : full, more ? ring.parity : parity);
                    weights[(i + 1) % 2].load(ring.stage(), 0);
                }
                sm80::load_matrix_4(tokens[1], mine + i * 128 + 64);
                weights[i % 2].multiply_half(sums, tokens[0], 0);
                // NOTE: the next token and kReadAhead lie after the last block, so this address is valid.
                sm80::load_matrix_4(tokens[0], mine + i * 128 + 128);
                weights[i % 2].multiply_half(sums, tokens[1], 1);
            }
            mine += kBlocks * 128;
            __syncwarp();
            refill(stage, full);
        }
        if (block == blocks) return;
        const uint32_t stage = ring.stage(), full = ring.barrier();
        ring.advance();
#pragma unroll 1
        for (int i = 0;; ++i, mine += 128) {
            sm80::load_matrix_4(tokens[1], mine + 64);
            weights[0].multiply_half(sums, tokens[0], 0);
            sm80::load_matrix_4(tokens[0], mine + 128);
            weights[0].multiply_half(sums, tokens[1], 1);
            if (block + i + 1 == blocks) break;
            weights[0].load(stage, i + 1);
        }
        if (goes_on) {
            ring.wait();
            weights[0].load(ring.stage(), 0);
        }
        __syncwarp();
        refill(stage, full);
    }
    static_assert(kBlocks % 2 == 0, "weights take turns");

    // ---- helpers ----

    static __device__ __forceinline__ void help(const RoutedLayerParams& params, LayerCounters& counters, Shared& shared) {
        constexpr int kHelperThreads = 32 * kHelpers;
        const LayerParams& p = params.layer;
        const int thread = threadIdx.x - 32 * kConsumers;
        const uint32_t share = layer_parts::share_of_launch();
        uint32_t launch = 0;
        if (thread == 0) launch = atomicAdd(&counters.started, share) / LayerCounters::kLaunch;
        copy_input(p.up, params.select.tokens, thread, input_of(shared));
        sm90::copy_async_arrive(&shared.input);
        layer_parts::mark_absent(p.up, params.select, thread, kHelperThreads);
        layer_parts::mark_absent(p.down, params.select, thread, kHelperThreads);
        sm90::named_barrier(1, kHelperThreads);
        if (thread == 0) layer_parts::await_marks(counters, share, launch, &shared.marked);
        sm90::named_barrier(2, kThreads);
        const Units units(p, shared.slots.tile_count());
        const Layout layout(params, shared, units);
        sm90::barrier_wait(&shared.marked, 0);
        // NOTE: this does not start earlier, since its polls would delay other CTAs' weights.
        sm90::barrier_wait(&shared.up_done, 0);
#pragma unroll 1
        for (int i = 0; i < layout.tiles; ++i) {
            copy_inner(p.down, shared.slots.tile(layout.first_tile + i), thread, layout.inner_of(i));
            sm90::barrier_arrive(&shared.inner[i]);
        }
        layer_parts::combine<Element>(p.combine, shared.slots, thread);
    }

    static __device__ __forceinline__ void copy_input(const GroupedGemmParams& p, int tokens, int thread, uint32_t input) {
        const int columns = p.k / 8, padded = k_blocks(p) * 8;
#pragma unroll 1
        for (int token = 0; token < tokens; ++token) {
            const uint4* source = reinterpret_cast<const uint4*>(p.x) + size_t(token) * columns;
            // NOTE: beyond k the tokens must be zero as well as the weights: 0 * NaN is NaN.
#pragma unroll 1
            for (int i = thread; i < padded; i += 32 * kHelpers)
                sm90::copy_16_async(input + token * pitch(p) + i * 16, source + (i < columns ? i : 0), i < columns);
        }
    }

    // Copies a tile's rows of GEMM1's output, as soon as they are there.
    static __device__ __forceinline__ void copy_inner(const GroupedGemmParams& p, const Tile& tile, int thread, uint32_t inner) {
        layer_parts::copy_inner<32 * kHelpers>(p, tile.first, tile.count, thread,
                                               [&](int token, int column) { return inner + token * pitch(p) + column * 16; });
    }
};

}  // namespace oxmoe
