// A whole layer of few tokens in one launch, for Hopper with e4m3 weights and tokens and block scales: routing, quantisation,
// GEMM1, GEMM2 and combine. The frame is RoutedLayerSm90's: every CTA routes for itself, a reader polls results until they are
// there, and nobody zeroes counters. The bits are those of quantize_fp8.cuh, grouped_gemm_fp8_sm90.cuh and combine.cuh.
//
// Every CTA quantises all tokens of x into shared memory, where they stay. A unit of GEMM1 multiplies all of them, which costs no
// more than multiplying its own tokens. It takes the columns of the tokens that go to its expert. Of GEMM1's output the CTA
// quantises the rows of the tile that its units of GEMM2 are at. These units follow each other, so that a CTA has few tiles.
//
// Warp 0 copies weights, warps 1 and 2 copy GEMM1's rows, warp 3 marks outputs absent, and warps 4 to 7 are the consumer
// warpgroup. All of them route, and all but the first quantise x.
//
// `p.layer.up.x` and `down.x` are bf16, and their `k` counts pairs of e4m3. Needs k % 256 == 0 in both GEMMs, up to 8192 columns,
// room for two stages (src/variants/fp8.rs), and what grouped_gemm_fp8_sm90.cuh needs. Progress: CTAs may wait for each other for
// the reasons that RoutedLayerSm90 gives.
#pragma once
#include <cstdint>
#include <cuda.h>

#include "../common/absent.cuh"
#include "../common/fp8.cuh"
#include "../common/wgmma_fp8.cuh"
#include "few_slots.cuh"
#include "grouped_gemm_sm90.cuh"
#include "layer_parts.cuh"

namespace oxmoe {

// Plain: the router has neither bias nor groups; see Selector.
template <bool Gated, int Experts, int Ctas, bool Plain = true>
struct RoutedLayerFp8Sm90 {
    using Element = __nv_bfloat16;
    using Slots = FewSlotsOf<Experts>;
    static constexpr int kTokens = Slots::kMostTokens;  // rows of a K block of tokens in shared memory
    static constexpr int kWidth = 16;                   // wgmma's N: 8 of its columns are not used
    using Up = GroupedGemmSm90<Element, Gated, kWidth, 1, 1, 2>;
    using Down = GroupedGemmSm90<Element, false, kWidth, 1, 1, 2>;

    static constexpr int kRows = 64, kBlockBytes = kTokens * 128, kWeightBytes = kRows * 128;
    static constexpr int kMostStages = 24, kMostBlocks = 64, kMostInnerBlocks = 16, kInnerSlots = 2;
    // Lanes of a group of x, and vectors of eight that each lane has.
    static constexpr int kCopyThreads = 64, kLanes = 4, kVectors = 4;

    struct Header {
        Slots slots;
        float input_scales[kMostBlocks][kTokens], inner_scales[kInnerSlots][kMostInnerBlocks][kTokens];
        uint64_t full[kMostStages], empty[kMostStages], inner_full[kInnerSlots], inner_empty[kInnerSlots];
        uint64_t input;   // passes once, when x is quantised
        uint64_t marked;  // passes once, when all CTAs have marked their parts
    };
    static constexpr int kHeaderBytes = 5 * 1024;
    static_assert(sizeof(Header) <= kHeaderBytes, "room for the tables");
    static_assert(kHeaderBytes == 5 * 1024 && kBlockBytes == 8 * 128 && kWeightBytes == 64 * 128 && kInnerSlots == 2,
                  "layer_stages of src/variants/fp8.rs");

    static constexpr int kThreads = 256;
    static constexpr int kSharedBytes = 228 * 1024 / Ctas - 1024;  // the system takes 1 KB for each CTA
    static constexpr int kCtas = Ctas;
    static_assert(kSharedBytes % 1024 == 0, "a ring behind it starts at a swizzle atom");

    static __device__ __forceinline__ void run(const CUtensorMap& up_weights, const CUtensorMap& down_weights,
                                               const RoutedLayerParams& p) {
        extern __shared__ __align__(1024) uint8_t dynamic_shared[];
        Header& shared = *reinterpret_cast<Header*>(dynamic_shared);
        const Layout layout(p.layer, dynamic_shared);
        const int warp = warp_of_block();
        // These constants would otherwise be fetched when they are needed.
        LayerCounters* counters_at = reinterpret_cast<LayerCounters*>(p.counters);
        asm volatile("" : "+l"(counters_at));
        asm volatile("" ::"l"(p.select.logits), "l"(p.layer.up.x), "r"(p.layer.down.rows), "l"(p.layer.combine.out));
        LayerCounters& counters = *counters_at;
        shared.slots.clear();
        if (threadIdx.x == 0) {
#pragma unroll 1
            for (int s = 0; s < kMostStages; ++s) {
                sm90::barrier_init(&shared.full[s], 1);
                sm90::barrier_init(&shared.empty[s], 4);
            }
            for (int s = 0; s < kInnerSlots; ++s) {
                sm90::barrier_init(&shared.inner_full[s], kCopyThreads);
                sm90::barrier_init(&shared.inner_empty[s], 4);
            }
            sm90::barrier_init(&shared.input, kThreads - 32);
            sm90::barrier_init(&shared.marked, 1);
            sm90::barrier_init_fence();
            sm90::prefetch_tensor_map(&up_weights);
            sm90::prefetch_tensor_map(&down_weights);
        }
        __syncthreads();
        pdl::wait();
        pdl::launch_dependents();
        const uint32_t share = layer_parts::share_of_launch();
        uint32_t launch = 0;
        if (threadIdx.x == 96) launch = atomicAdd(&counters.started, share) / LayerCounters::kLaunch;
        // NOTE: x is loaded before routing and quantised after it.
        const Input input(p);
        Vectors vectors;
        input.load(vectors);
        shared.slots.template route<kThreads, Plain>(p);
        if (warp != 0) quantise_input(input, vectors, layout, shared);
        const Units units(p.layer, shared.slots.tile_count());
        if (warp >= 4) {
            consume(p, units, layout, shared);
        } else if (warp == 0) {
            copy_weights(up_weights, down_weights, p.layer, units, layout, shared);
        } else if (warp <= kCopyThreads / 32) {
            copy_inner(p.layer.down, units, layout, shared);
        } else {
            layer_parts::mark_absent(p.layer.up, p.select, threadIdx.x % 32, 32);
            layer_parts::mark_absent(p.layer.down, p.select, threadIdx.x % 32, 32);
            __syncwarp();
            if (threadIdx.x == 96) layer_parts::await_marks(counters, share, launch, &shared.marked);
        }
    }

private:
    static __device__ __forceinline__ int k_blocks(const GroupedGemmParams& p) { return p.k / 64; }
    static __device__ __forceinline__ int divide(int n, int d) { return layer_parts::divide(n, d); }

    // Shared memory after Header: x, GEMM1's rows of two tiles, a block for reads beyond them, and the ring.
    struct Layout {
        uint32_t input, inner, inner_bytes, ring;
        int stages;

        __device__ __forceinline__ Layout(const LayerParams& p, const uint8_t* base) {
            input = sm90::shared_address(base) + kHeaderBytes;
            inner = input + k_blocks(p.up) * kBlockBytes;
            inner_bytes = k_blocks(p.down) * kBlockBytes;
            ring = inner + kInnerSlots * inner_bytes + kBlockBytes;
            stages = min(kMostStages, int(sm90::shared_address(base) + kSharedBytes - ring) / kWeightBytes);
        }
    };

    // A ring whose length is known at run time.
    struct Ring {
        int count, slot = 0;
        uint32_t parity = 0;

        __device__ __forceinline__ void advance() {
            if (++slot == count) slot = 0, parity ^= 1;
        }
    };

    // ---- units: GEMM1's units in a fixed stride, then neighbouring units of GEMM2 ----

    struct Unit {
        int tile, row_block;
        bool down;
    };

    // NOTE: every CTA has equally many units of GEMM2, however many it has of GEMM1: no unit of GEMM2 is multiplied before GEMM1
    // is done.
    struct Units {
        int up_count, count, down_first, up_blocks, down_blocks;

        __device__ __forceinline__ Units(const LayerParams& p, int tiles)
            : up_blocks(p.up.rows / kRows), down_blocks(p.down.rows / kRows) {
            const int grid = gridDim.x, cta = blockIdx.x, ups = tiles * up_blocks, downs = tiles * down_blocks;
            up_count = divide(ups - cta + grid - 1, grid);
            down_first = cta * downs / grid;
            count = up_count + (cta + 1) * downs / grid - down_first;
        }

        __device__ __forceinline__ Unit unit(int index) const {
            const bool down = index >= up_count;
            const int number = down ? down_first + index - up_count : int(blockIdx.x) + index * int(gridDim.x);
            const int blocks = down ? down_blocks : up_blocks, tile = divide(number, blocks);
            return {tile, number - tile * blocks, down};
        }
    };

    // ---- x: groups of 128, four threads each ----

    using Vectors = uint4[kVectors];
    struct Input {
        static constexpr int kGroups = (kThreads - 32) / kLanes;  // groups that a pass of the CTA takes

        const uint4* x;
        int blocks, groups, group;  // blocks of a token, groups of all tokens, and this thread's next group

        __device__ __forceinline__ explicit Input(const RoutedLayerParams& p)
            : x(reinterpret_cast<const uint4*>(p.layer.up.x)),
              blocks(k_blocks(p.layer.up)),
              groups(p.select.tokens * blocks),
              group((int(threadIdx.x) - 32) / kLanes) {}

        __device__ __forceinline__ bool inside() const { return threadIdx.x >= 32 && group < groups; }

        __device__ __forceinline__ void load(Vectors& vectors) const {
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                vectors[i] = {};
                if (inside()) vectors[i] = x[size_t(group) * 16 + threadIdx.x % kLanes + i * kLanes];
            }
        }
    };

    static __device__ __forceinline__ uint32_t larger(uint32_t peak, uint32_t pair) {
        const uint32_t magnitudes = pair & 0x7FFF7FFF;
        const __nv_bfloat162 most =
            __hmax2(reinterpret_cast<const __nv_bfloat162&>(peak), reinterpret_cast<const __nv_bfloat162&>(magnitudes));
        return reinterpret_cast<const uint32_t&>(most);
    }
    static __device__ __forceinline__ uint32_t peak_of(uint32_t peak, const uint4& v) {
        return larger(larger(larger(larger(peak, v.x), v.y), v.z), v.w);
    }

    // Stores the codes of eight numbers of a row at column `vector` of its K block.
    static __device__ __forceinline__ void store_codes(uint32_t block, int row, int vector, const uint4& v, float inverse) {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        uint32_t codes[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 low = unpack<Element>(words[2 * i]), high = unpack<Element>(words[2 * i + 1]);
            codes[i] = fp8::pack(__fmul_rn(low.x, inverse), __fmul_rn(low.y, inverse), __fmul_rn(high.x, inverse),
                                 __fmul_rn(high.y, inverse));
        }
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(block + row * 128 + ((vector / 2 ^ row) * 16) + vector % 2 * 8),
                     "r"(codes[0]), "r"(codes[1])
                     : "memory");
    }

    static __device__ __forceinline__ void quantise_input(Input input, Vectors& vectors, const Layout& layout, Header& shared) {
        const int lane = threadIdx.x % kLanes;
#pragma unroll 1
        while (true) {
            uint32_t peak = 0;
#pragma unroll
            for (int i = 0; i < kVectors; ++i) peak = peak_of(peak, vectors[i]);
#pragma unroll
            for (int distance = 1; distance < kLanes; distance *= 2)
                peak = larger(peak, __shfl_xor_sync(0xFFFFFFFF, peak, distance));
            if (input.inside()) {
                const float2 peaks = unpack<Element>(peak);
                const fp8::Scale scale(fmaxf(peaks.x, peaks.y));
                const int token = divide(input.group, input.blocks), block = input.group - token * input.blocks;
#pragma unroll
                for (int i = 0; i < kVectors; ++i)
                    store_codes(layout.input + block * kBlockBytes, token, lane + i * kLanes, vectors[i], scale.inverse);
                if (lane == 0) shared.input_scales[block][token] = scale.scale;
            }
            input.group += Input::kGroups;
            if (!__any_sync(0xFFFFFFFF, input.inside())) break;
            input.load(vectors);
        }
        sm90::fence_async_proxy();
        sm90::barrier_arrive(&shared.input);
    }

    // ---- weights: one thread copies one box for each stage ----

    static __device__ __forceinline__ void copy_weights(const CUtensorMap& up_weights, const CUtensorMap& down_weights,
                                                        const LayerParams& p, const Units& units, const Layout& layout,
                                                        Header& shared) {
        if (threadIdx.x != 0) return;
        Ring ring{layout.stages};
#pragma unroll 1
        for (int index = 0; index < units.count; ++index) {
            const Unit unit = units.unit(index);
            const CUtensorMap* weights = unit.down ? &down_weights : &up_weights;
            const int blocks = k_blocks(unit.down ? p.down : p.up), expert = shared.slots.tile(unit.tile).expert;
#pragma unroll 1
            for (int block = 0; block < blocks; ++block, ring.advance()) {
                sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
                sm90::barrier_arrive_expect(&shared.full[ring.slot], kWeightBytes);
                sm90::copy_tensor_5d(__cvta_shared_to_generic(layout.ring + ring.slot * kWeightBytes), weights,
                                     {block * 64, 0, 0, unit.row_block * (kRows / 16), expert}, &shared.full[ring.slot]);
            }
        }
    }

    // ---- GEMM1's rows, one tile after the other, as soon as they are there: 16 threads for each group of 128 ----

    static __device__ __forceinline__ void copy_inner(const GroupedGemmParams& p, const Units& units, const Layout& layout,
                                                      Header& shared) {
        constexpr int kBatch = 4;
        const int thread = threadIdx.x - 32, vectors = k_blocks(p) * 16;
        RingPosition<kInnerSlots> slot;
        sm90::barrier_wait(&shared.marked, 0);
        int last = -1;
#pragma unroll 1
        for (int index = units.up_count; index < units.count; ++index) {
            const int number = units.unit(index).tile;
            if (number == last) continue;
            last = number;
            const Tile tile = shared.slots.tile(number);
            const int items = tile.count * vectors;
            const uint4* source = reinterpret_cast<const uint4*>(p.x) + size_t(tile.first) * vectors;
            const uint32_t inner = layout.inner + slot.slot * layout.inner_bytes;
            sm90::barrier_wait(&shared.inner_empty[slot.slot], slot.parity ^ 1);
#pragma unroll 1
            for (int first = thread; first - thread < items; first += kBatch * kCopyThreads) {
                uint4 value[kBatch];
                uint32_t waiting = 0;
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    value[i] = {};
                    if (first + i * kCopyThreads < items) waiting |= 1u << i;
                }
                while (waiting) {
#pragma unroll
                    for (int i = 0; i < kBatch; ++i) {
                        if (waiting >> i & 1) value[i] = absent::load(source + first + i * kCopyThreads);
                    }
#pragma unroll
                    for (int i = 0; i < kBatch; ++i) {
                        if (!absent::in(value[i])) waiting &= ~(1u << i);
                    }
                }
                __syncwarp();
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    const int item = first + i * kCopyThreads;
                    uint32_t peak = peak_of(0, value[i]);
#pragma unroll
                    for (int distance = 1; distance < 16; distance *= 2)
                        peak = larger(peak, __shfl_xor_sync(0xFFFFFFFF, peak, distance));
                    if (item >= items) continue;
                    const float2 peaks = unpack<Element>(peak);
                    const fp8::Scale scale(fmaxf(peaks.x, peaks.y));
                    const int row = divide(item, vectors), column = item - row * vectors, block = column / 16;
                    store_codes(inner + block * kBlockBytes, row, column % 16, value[i], scale.inverse);
                    if (column % 16 == 0) shared.inner_scales[slot.slot][block][row] = scale.scale;
                }
                __syncwarp();
            }
            sm90::fence_async_proxy();
            sm90::barrier_arrive(&shared.inner_full[slot.slot]);
            slot.advance();
        }
    }

    // ---- consumers ----

    // The scales of a lane's two weight rows, eight apart, for K blocks `lane` and 32 + `lane`.
    struct WeightScales {
        float of[2][2];

        __device__ __forceinline__ void load(const GroupedGemmParams& p, int expert, int row_block, bool gated) {
            const int lane = threadIdx.x % 32, blocks = k_blocks(p);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = gated ? half * p.out_columns + row_block * 32 : row_block * 64;
                const float* from = reinterpret_cast<const float*>(p.block_scales) +
                                    size_t(expert * (p.rows / fp8::kGroup) + row / fp8::kGroup) * blocks;
#pragma unroll
                for (int i = 0; i < 2; ++i) of[half][i] = lane + 32 * i < blocks ? from[lane + 32 * i] : 0.f;
            }
        }

        __device__ __forceinline__ float operator()(int half, int block) const {
            return __shfl_sync(0xFFFFFFFF, block < 32 ? of[half][0] : of[half][1], block);
        }
    };

    static __device__ __forceinline__ void load_scales(const LayerParams& p, const Units& units, int index, const Header& shared,
                                                       WeightScales& scales) {
        if (index >= units.count) return;
        const Unit unit = units.unit(index);
        scales.load(unit.down ? p.down : p.up, shared.slots.tile(unit.tile).expert, unit.row_block, Gated && !unit.down);
    }

    static __device__ __forceinline__ void consume(const RoutedLayerParams& params, const Units& units, const Layout& layout,
                                                   Header& shared) {
        const LayerParams& p = params.layer;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        Ring ring{layout.stages};
        RingPosition<kInnerSlots> inner;
        WeightScales next;
        load_scales(p, units, 0, shared, next);
        sm90::barrier_wait(&shared.input, 0);
        sm90::fence_async_proxy();
        int last = -1;
#pragma unroll 1
        for (int index = 0; index < units.count; ++index) {
            const Unit unit = units.unit(index);
            const Tile tile = shared.slots.tile(unit.tile);
            const WorkUnit work{tile.expert, tile.first, tile.count, unit.row_block};
            const GroupedGemmParams& gemm = unit.down ? p.down : p.up;
            const int blocks = __shfl_sync(0xFFFFFFFF, k_blocks(gemm), 0), slice = unit.row_block * 4 + warp;
            const WeightScales scales = next;
            load_scales(p, units, index + 1, shared, next);
            typename Down::Biases bias;
            float sums[1][kWidth / 2] = {};
            uint32_t tokens = layout.input;
            const float* token_scales = &shared.input_scales[0][0];
            if (unit.down) {
                if (unit.tile != last) {
                    if (last >= 0) {
                        sm90::barrier_arrive_if(&shared.inner_empty[inner.slot], lane == 0);
                        inner.advance();
                    }
                    last = unit.tile;
                    sm90::barrier_wait(&shared.inner_full[inner.slot], inner.parity);
                    sm90::fence_async_proxy();
                }
                const int slot = __shfl_sync(0xFFFFFFFF, inner.slot, 0);
                tokens = layout.inner + slot * layout.inner_bytes;
                token_scales = &shared.inner_scales[slot][0][0];
                Down::load_biases(work, p.down, bias);
            } else {
                Up::load_biases(work, p.up, bias);
            }
            multiply(blocks, sums[0], tokens, token_scales + lane % 4 * 2, scales, layout, shared, ring);
            if (unit.down) {
                // The unit's tokens came after the marks, so there is no wait for marks here.
                Down::add_biases(sums, bias, p.down);
                layer_parts::store<Element, false, true>(tile.first, tile.count, slice, sums[0], p.down);
                continue;
            }
            sm90::barrier_wait(&shared.marked, 0);
            const bool activated = Up::template prepare_sums<false, false>(work, sums, bias, p.up);
            store_up(p.up, shared.slots, tile, params.select.top_k, slice, Gated && !activated, sums[0]);
        }
        sm90::barrier_wait(&shared.marked, 0);
        layer_parts::combine<Element>(p.combine, shared.slots, threadIdx.x % 128);
    }

    // Multiplies as GroupedGemmFp8Sm90::multiply does, but two K blocks at a time, each into registers of its own. NOTE: it waits
    // for both stages before it frees one.
    static __device__ __forceinline__ void multiply(int blocks, float* sums, uint32_t tokens, const float* token_scales,
                                                    const WeightScales& weight_scales, const Layout& layout, Header& shared,
                                                    Ring& ring) {
        const bool is_lane_0 = threadIdx.x % 32 == 0;
#pragma unroll 1
        for (int block = 0; block < blocks; block += 2, tokens += 2 * kBlockBytes, token_scales += 2 * kTokens) {
            Ring behind = ring;
            behind.advance();
            const int slots[2] = {ring.slot, behind.slot};
            sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
            sm90::barrier_wait(&shared.full[behind.slot], behind.parity);
            float products[2][kWidth / 2];
#pragma unroll
            for (int i = 0; i < kWidth; ++i) asm volatile("mov.b32 %0, 0;" : "=f"(products[i / 8][i % 8]));
            sm90::wgmma_fence();
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                const uint32_t weights = layout.ring + slots[b] * kWeightBytes;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sm90::WgmmaE4m3<kWidth>::multiply(products[b], sm90::descriptor_128b(weights, i * 32),
                                                      sm90::descriptor_128b(tokens, b * kBlockBytes + i * 32), i > 0);
                }
                sm90::wgmma_commit();
            }
            float2 token[2];
            float weight[2][2];
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                token[b] = *reinterpret_cast<const float2*>(token_scales + b * kTokens);
                weight[b][0] = weight_scales(0, block + b), weight[b][1] = weight_scales(1, block + b);
            }
            sm90::wgmma_wait<1>();
            sm90::barrier_arrive_if(&shared.empty[slots[0]], is_lane_0);
            promote(sums, products[0], token[0], weight[0]);
            sm90::wgmma_wait<0>();
            sm90::barrier_arrive_if(&shared.empty[slots[1]], is_lane_0);
            promote(sums, products[1], token[1], weight[1]);
            ring = behind, ring.advance();
        }
    }

    static __device__ __forceinline__ void promote(float* sums, const float (&product)[kWidth / 2], float2 token,
                                                   const float (&weight)[2]) {
        sums[0] = __fmaf_rn(product[0], __fmul_rn(token.x, weight[0]), sums[0]);
        sums[1] = __fmaf_rn(product[1], __fmul_rn(token.y, weight[0]), sums[1]);
        sums[2] = __fmaf_rn(product[2], __fmul_rn(token.x, weight[1]), sums[2]);
        sums[3] = __fmaf_rn(product[3], __fmul_rn(token.y, weight[1]), sums[3]);
    }

    // Stores outputs as layer_parts::store does, but columns are tokens: each goes to its place in the tile, if it has one.
    static __device__ __forceinline__ void store_up(const GroupedGemmParams& p, const Slots& slots, const Tile& tile, int top_k,
                                                    int slice, bool swiglu_left, const float* sums) {
        constexpr int kHalves = Gated ? 1 : 2;
        const int lane = threadIdx.x % 32, token = lane % 4 * 2;
        int place[2] = {-1, -1};
#pragma unroll 1
        for (int i = 0; i < tile.count; ++i) {
            const int owner = divide(slots.slot_of_place[tile.first + i], top_k);
            if (owner == token) place[0] = tile.first + i;
            if (owner == token + 1) place[1] = tile.first + i;
        }
        const SwigluFunction swiglu(p.activation);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            const int column = (slice * kHalves + half) * 8 + lane / 4;
            const float* d = &sums[2 * half];
            uint32_t packed =
                Gated && swiglu_left ? pack<Element>(swiglu(d[0], d[2]), swiglu(d[1], d[3])) : pack<Element>(d[0], d[1]);
            packed = absent::avoided(packed);
            Element* out = reinterpret_cast<Element*>(p.out) + column;
            absent::store_2_if(out + int64_t(place[0]) * p.out_columns, packed, place[0] >= 0);
            absent::store_2_if(out + int64_t(place[1]) * p.out_columns, packed >> 16, place[1] >= 0);
        }
    }
};

}  // namespace oxmoe
