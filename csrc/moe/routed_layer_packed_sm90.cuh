// A whole layer of few tokens and packed weights in one launch, for Hopper: routing, GEMM1, GEMM2 and combine. `Form` is the
// packed form of the weights, such as mxfp4::Form. If the form rounds tokens, as mxfp8::Form does, each CTA rounds the tokens and
// the rows of GEMM1's output that it copies to its shared memory.
//
// This is RoutedLayerSm90 for packed weights, with other units. Four warps, a quad, take a unit and share a ring of stages, into
// which a helper warp copies codes and scales in bulk: a consumer issues no copy. A unit is a block of 64 weight rows and all of
// K, and each warp multiplies 16 rows. If GEMM2 has few such blocks, its unit is half a block, and two warps of a quad have one
// each. GEMM2's weights come into the ring while GEMM1 ends. Quads without a unit of GEMM1 fill their rings with them at once.
//
// All tokens lie in shared memory, and so do the rows of GEMM1's output that the CTA's units of GEMM2 need. These are rows of two
// tiles at most, since its units are neighbours. A CTA has half an SM's shared memory: the next launch's CTAs lie in the other
// half and wait when this one ends.
//
// The warps are consumers, the first 8 of which route, and 4 helpers. Helpers copy tokens, mark outputs absent, copy weights
// (one for each quad) and combine. Consumers copy GEMM1's results, as soon as they are there. Sums, their K order and rounding
// are GroupedGemmPackedSm90's and Combine's, and so are the bits. The other parts are RoutedLayerSm90's, which also says why CTAs
// may wait for each other.
#pragma once
#include <cstdint>
#include <cstring>

#include "../common/absent.cuh"
#include "../common/sm80.cuh"
#include "few_slots.cuh"
#include "grouped_gemm_sm90.cuh"
#include "layer_parts.cuh"

namespace oxmoe {

// Plain: the router has neither bias nor groups; see Selector.
template <bool Gated, typename Form, int Consumers, int Blocks, int Stages, int Experts, bool Plain>
struct RoutedLayerPackedSm90 {
    using Element = __nv_bfloat16;
    using Slots = FewSlotsOf<Experts>;
    using Up = GroupedGemmSm90<Element, Gated, 16, 1, 1, 2>;
    using Down = GroupedGemmSm90<Element, false, 16, 1, 1, 2>;

    static constexpr int kConsumers = Consumers, kHelpers = 4, kThreads = 32 * (kConsumers + kHelpers);
    static constexpr int kQuads = kConsumers / 4;
    static_assert(kConsumers % 4 == 0 && kQuads < kHelpers, "a helper copies weights for each quad, and one waits for the marks");
    static_assert(Form::kThreadCodes == 16, "a stage's codes lie as mxfp4::Form's do");
    static constexpr int kBlockRows = 64, kBlockK = 64, kSliceRows = 16;
    static constexpr int kCodeBytes = Form::kCodeBytes, kScaleBytes = Form::kScaleBytes;  // bytes of a K block
    // A block's codes are parts, in each of which a thread has 16 bytes.
    static constexpr int kPartBytes = 128 * Form::kThreadCodes, kParts = kCodeBytes / kPartBytes;
    static_assert(kParts <= 2 && kParts * kPartBytes == kCodeBytes, "a part has the codes of all steps, or of half of them");
    static constexpr int kSliceCodes = kPartBytes / 4, kSliceScales = kScaleBytes / 4;
    // A stage has kBlocks blocks of codes, then their scales. GEMM2's half blocks of codes lie where they lie in whole ones.
    static constexpr int kBlocks = Blocks, kStageCodes = kBlocks * kCodeBytes;
    static constexpr int kStageBytes = kStageCodes + kBlocks * kScaleBytes, kStages = Stages;
    static constexpr int kRingBytes = kStages * kStageBytes;
    static constexpr int kGroups = 4 / Form::kGroupSteps;                     // groups of a block's K that have a scale each
    static constexpr int kFactors = Gated && Form::kFactorsOfHalves ? 2 : 1;  // factors of an expert
    static constexpr int kTiles = 2;                                          // tiles of a CTA's units of GEMM2
    static constexpr int kSharedBytes = 113 * 1024;

    struct alignas(128) Shared {
        Slots slots;
        uint64_t full[kQuads][kStages], empty[kQuads][kStages];
        uint64_t input, inner[kTiles];  // tokens of GEMM1, and of each tile of GEMM2
        uint64_t up_done;               // passes when this CTA's units of GEMM1 are done
        uint64_t marked;                // passes once, when all CTAs have marked their parts
    };
    static_assert(sizeof(Shared) == (sizeof(Slots) + 8 * (2 * kQuads * kStages + 5) + 127) / 128 * 128, "packed.rs");

    static __device__ __forceinline__ void run(const RoutedLayerParams& p) {
        extern __shared__ __align__(1024) uint8_t dynamic_shared[];
        Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
        const int warp = warp_of_block();
        // These constants would otherwise be fetched when they are needed.
        LayerCounters* counters_at = reinterpret_cast<LayerCounters*>(p.counters);
        asm volatile("" : "+l"(counters_at));
        asm volatile("" ::"l"(p.select.logits), "l"(p.layer.up.x), "r"(p.layer.down.rows), "l"(p.layer.combine.out));
        shared.slots.clear();
        if (threadIdx.x < kQuads * kStages) {
            sm90::barrier_init(&shared.full[0][0] + threadIdx.x, 1);
            sm90::barrier_init(&shared.empty[0][0] + threadIdx.x, 4);
            if (threadIdx.x == 0) {
                sm90::barrier_init(&shared.input, 32 * kHelpers);
                sm90::barrier_init(&shared.inner[0], 32 * kConsumers);
                sm90::barrier_init(&shared.inner[1], 32 * kConsumers);
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
    static __device__ __forceinline__ int k_blocks(const GroupedGemmParams& p) { return (p.k + kBlockK - 1) / kBlockK; }
    static __device__ __forceinline__ int row_tiles(const GroupedGemmParams& p) { return (p.rows + kBlockRows - 1) / kBlockRows; }
    // Bytes after a CTA's tokens and after each of its tiles: they are read ahead of the last token's last block, and not used.
    static constexpr int kReadAhead = 64;
    // Bytes of a token in shared memory: an odd number of 16, so that 8 tokens lie in different banks.
    static __device__ __forceinline__ int pitch(const GroupedGemmParams& p) { return k_blocks(p) * 128 + 16; }

    // ---- units ----

    struct Unit {
        int tile, number;  // tile is its number in the schedule; number is that of the unit in the tile
        bool down;
    };

    // This CTA's units, first GEMM1's then GEMM2's. GEMM1's are `gridDim.x` apart, so that the first is soon known. GEMM2's are
    // neighbours, and odd ones go first to the CTAs that have no odd unit of GEMM1.
    struct Units {
        int tiles, up;
        bool narrow;  // GEMM2's units are half blocks: every CTA has at most one of them for each quad

        __device__ __forceinline__ Units(const LayerParams& p, int tiles)
            : tiles(tiles), up(tiles * row_tiles(p.up)), narrow(tiles * half_tiles(p.down) <= kQuads * int(gridDim.x)) {}

        static __device__ __forceinline__ int half_tiles(const GroupedGemmParams& p) { return (p.rows + 31) / 32; }

        __device__ __forceinline__ int each_down(const LayerParams& p) const {
            return narrow ? half_tiles(p.down) : row_tiles(p.down);
        }

        __device__ __forceinline__ int up_count() const { return divide(up + int(gridDim.x) - 1 - int(blockIdx.x), gridDim.x); }

        // Returns GEMM2's first unit, and sets the number of them.
        __device__ __forceinline__ int first_down(const LayerParams& p, int& count) const {
            const int grid = gridDim.x, cta = blockIdx.x, up_odd = up - divide(up, grid) * grid;
            const int down = tiles * each_down(p), down_each = divide(down, grid), down_odd = down - down_each * grid;
            // Odd units of GEMM2 before CTA i: CTAs from up_odd on come first, then those from 0 on.
            const auto odd = [&](int i) {
                return min(max(i - up_odd, 0), down_odd) + min(i, max(down_odd - (grid - up_odd), 0));
            };
            const int first = cta * down_each + odd(cta);
            count = (cta + 1) * down_each + odd(cta + 1) - first;
            return first;
        }

        // Returns whether there is a unit `index`.
        __device__ __forceinline__ bool find(const LayerParams& p, int index, Unit& unit) const {
            int number = blockIdx.x + index * gridDim.x, each = row_tiles(p.up);
            unit.down = number >= up;
            if (unit.down) {
                int count;
                const int first = first_down(p, count), place = index - up_count();
                if (place >= count) return false;
                number = first + place, each = each_down(p);
            }
            unit.tile = divide(number, each);
            unit.number = number - unit.tile * each;
            return true;
        }
    };

    // ---- shared memory after Shared: rings, tokens, GEMM1's results ----

    struct Layout {
        uint32_t first_inner, second_inner;
        int first_tile, tiles;  // of this CTA's units of GEMM2

        __device__ __forceinline__ Layout(const RoutedLayerParams& p, const Shared& shared, const Units& units) {
            int downs;
            const int first = units.first_down(p.layer, downs), each = units.each_down(p.layer);
            first_tile = divide(first, each);
            tiles = downs > 0 ? divide(first + downs - 1, each) - first_tile + 1 : 0;
            first_inner = input_of(shared) + p.select.tokens * pitch(p.layer.up) + kReadAhead;
            second_inner = first_inner + (tiles > 0 ? shared.slots.tile(first_tile).count * pitch(p.layer.down) + kReadAhead : 0);
        }

        __device__ __forceinline__ uint32_t inner_of(int i) const { return i == 0 ? first_inner : second_inner; }
    };

    static __device__ __forceinline__ uint8_t* ring_of(Shared& shared, int quad) {
        return reinterpret_cast<uint8_t*>(&shared) + sizeof(Shared) + quad * kRingBytes;
    }
    static __device__ __forceinline__ uint32_t input_of(const Shared& shared) {
        return sm90::shared_address(&shared) + sizeof(Shared) + kQuads * kRingBytes;
    }

    // ---- consumers ----

    struct Ring {
        uint32_t stages;       // address of the first stage
        uint32_t full, empty;  // addresses of the first stage's barriers
        int slot = 0;
        uint32_t parity = 0;

        __device__ __forceinline__ uint32_t stage() const { return stages + slot * kStageBytes; }
        __device__ __forceinline__ uint32_t barrier() const { return full + slot * 8; }
        __device__ __forceinline__ void advance() {
            if (++slot == kStages) slot = 0, parity ^= 1;
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
        // Says that `warps` warps have read a stage: this one, and those that do not read it.
        __device__ __forceinline__ void release(int slot, int warps) const {
            __syncwarp();
            if (threadIdx.x % 32 == 0)
                asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(empty + slot * 8), "r"(warps) : "memory");
        }
    };

    static __device__ __forceinline__ void consume(const RoutedLayerParams& params, Shared& shared) {
        const LayerParams& p = params.layer;
        shared.slots.template route<32 * kConsumers, Plain>(params);
        asm volatile("bar.arrive 2, %0;" ::"n"(kThreads) : "memory");  // the tables are there
        const int warp = warp_of_block(), lane = threadIdx.x % 32, quad = warp / 4;
        const Units units(p, shared.slots.tile_count());
        Ring ring{sm90::shared_address(ring_of(shared, quad)), sm90::shared_address(&shared.full[quad][0]),
                  sm90::shared_address(&shared.empty[quad][0])};
        sm90::barrier_wait(&shared.input, 0);
        const Layout layout(params, shared, units);
        bool copied = false;
#pragma unroll 1
        for (int index = quad;; index += kQuads) {
            Unit unit{0, 0, false};
            const bool more = units.find(p, index, unit);
            if (!copied && (!more || unit.down)) {
                copied = true;
                copy_rows(params, shared, layout);
            }
            const bool narrow = unit.down && units.narrow;
            // Two warps have a half block: of neighbouring quads they are on other schedulers.
            if (!more || (narrow && warp % 4 / 2 != quad % 2)) break;
            const int slice = narrow ? unit.number * 2 + warp % 2 : unit.number * 4 + warp % 4;
            const GroupedGemmParams& gemm = unit.down ? p.down : p.up;
            const Tile tile = shared.slots.tile(unit.tile);
            const WorkUnit work{tile.expert, tile.first, tile.count, 0};
            // Gate rows and up rows may have factors of their own. GEMM2 has one factor for both.
            const int own = unit.down ? 1 : kFactors;
            const float* factors = gemm.expert_scales + own * tile.expert;
            const float factor = factors[0], up_factor = kFactors > 1 ? factors[own - 1] : factor;
            const int token = min(lane % 8, tile.count - 1), blocks = __shfl_sync(0xFFFFFFFF, k_blocks(gemm), 0);
            const bool has_rows = slice * kSliceRows < gemm.rows;  // a block of 64 rows may end with slices that have none
            float bias[1][2] = {}, sums[1][8] = {};
            uint32_t tokens;
            if (unit.down) {
                if (has_rows) load_biases<Down>(gemm, tile.expert, slice, bias);
                const int which = unit.tile - layout.first_tile;
                tokens = layout.inner_of(which) + token * pitch(gemm);
                sm90::barrier_wait(&shared.inner[which], 0);
            } else {
                if (has_rows) load_biases<Up>(gemm, tile.expert, slice, bias);
                const int row = divide(shared.slots.slot_of_place[tile.first + token], gemm.row_divisor);
                tokens = input_of(shared) + row * pitch(gemm);
            }
            multiply(blocks, slice % 4, narrow ? 2 : 1, sums[0], tokens + lane / 8 * 16, ring);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[0][i] *= i < 2 ? factor : up_factor;
            if (!has_rows) continue;
            if (unit.down) {
                // The unit's tokens came after the marks, so there is no wait for marks here.
                Down::add_biases(sums, bias, p.down);
                layer_parts::store<Element, false, true>(tile.first, tile.count, slice, sums[0], p.down);
            } else {
                sm90::barrier_wait(&shared.marked, 0);
                const bool activated = Up::template prepare_sums<true, false>(work, sums, bias, p.up);
                if (Gated && !activated)
                    layer_parts::store<Element, Gated, false>(tile.first, tile.count, slice, sums[0], p.up);
                else
                    layer_parts::store<Element, Gated, true>(tile.first, tile.count, slice, sums[0], p.up);
            }
        }
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

    // Copies the rows of GEMM1's output that this CTA's units of GEMM2 need, as soon as they are there.
    static __device__ __forceinline__ void copy_rows(const RoutedLayerParams& params, Shared& shared, const Layout& layout) {
        const GroupedGemmParams& p = params.layer.down;
        // NOTE: this does not start before all warps of the CTA are here, since its polls would delay other CTAs' weights.
        __syncwarp();
        if (threadIdx.x % 32 == 0) sm90::barrier_arrive(&shared.up_done);
        sm90::barrier_wait(&shared.marked, 0);
        sm90::barrier_wait(&shared.up_done, 0);
#pragma unroll 1
        for (int i = 0; i < layout.tiles; ++i) {
            const Tile tile = shared.slots.tile(layout.first_tile + i);
            const uint32_t inner = layout.inner_of(i);
            const auto address = [&](int token, int column) { return inner + token * pitch(p) + column * 16; };
            if constexpr (Form::kRoundsTokens)
                layer_parts::copy_inner<32 * kConsumers>(p, tile.first, tile.count, threadIdx.x, address,
                                                         [](const uint4& numbers) { return Form::round_tokens(numbers); });
            else
                layer_parts::copy_inner<32 * kConsumers>(p, tile.first, tile.count, threadIdx.x, address);
            sm90::barrier_arrive(&shared.inner[i]);
        }
    }

    // A K block's weights in registers.
    struct Weights {
        uint32_t codes[kParts][4], scales[Form::kQuadScales / 4];

        // `place`: the address of this lane's codes in the stage's first block; `scales_place`: of its scales.
        __device__ __forceinline__ void load(uint32_t place, uint32_t scales_place, int block) {
#pragma unroll
            for (int i = 0; i < kParts; ++i) sm80::load_shared_16(codes[i], place + block * kCodeBytes + i * kPartBytes);
            const uint32_t from = scales_place + block * kScaleBytes;
            if constexpr (Form::kQuadScales == 8) {
                sm80::load_shared_8(scales, from);
            } else {
#pragma unroll
                for (int i = 0; i < Form::kQuadScales / 4; ++i) scales[i] = sm80::load_shared_4(from + 4 * i);
            }
        }

        __device__ __forceinline__ void multiply_half(float (&sums)[4], const uint32_t (&tokens)[4], int half) const {
            typename Form::Scales own;
            static_assert(sizeof own == sizeof scales, "the words of a quad's scales");
            memcpy(&own, scales, sizeof own);
            decltype(Form::multipliers(own, 0)) multipliers[kGroups / 2];
#pragma unroll
            for (int i = 0; i < kGroups / 2; ++i) multipliers[i] = Form::multipliers(own, half * (kGroups / 2) + i);
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                uint32_t a[4];
                Form::decode_words(codes[half * kParts / 2], half * 2 + step, multipliers[step / Form::kGroupSteps], a);
                sm80::multiply_add<Element>(sums, a, tokens[step * 2], tokens[step * 2 + 1]);
            }
        }
    };

    // Multiplies slice `slice` of a unit's blocks. `mine` is the address of this lane's row of the tokens' 8 x 8 tiles. The next
    // block's weights and the next half's tokens are loaded meanwhile.
    static __device__ __forceinline__ void multiply(int blocks, int slice, int warps, float* all_sums, uint32_t mine,
                                                    Ring& ring) {
        float (&sums)[4] = *reinterpret_cast<float (*)[4]>(all_sums);
        const int lane = threadIdx.x % 32;
        const uint32_t codes = slice * kSliceCodes + lane * 16;
        const uint32_t scales = kStageCodes + slice * kSliceScales + lane / 4 * Form::kQuadScales;
        Weights weights[2];
        uint32_t tokens[2][4];
        ring.wait();
        weights[0].load(ring.stage() + codes, ring.stage() + scales, 0);
        sm80::load_matrix_4(tokens[0], mine);
        int block = 0;
#pragma unroll 1
        for (; block + kBlocks <= blocks; block += kBlocks) {
            const uint32_t stage = ring.stage(), full = ring.barrier(), parity = ring.parity;
            const int slot = ring.slot;
            ring.advance();
            const bool more = block + kBlocks < blocks;
#pragma unroll
            for (int i = 0; i < kBlocks; ++i) {
                if (i + 1 < kBlocks) {
                    weights[(i + 1) % 2].load(stage + codes, stage + scales, i + 1);
                } else {
                    // Without a next stage this loads the present one again.
                    Ring::wait(more ? ring.barrier() : full, more ? ring.parity : parity);
                    const uint32_t next = more ? ring.stage() : stage;
                    weights[(i + 1) % 2].load(next + codes, next + scales, 0);
                }
                sm80::load_matrix_4(tokens[1], mine + i * 128 + 64);
                weights[i % 2].multiply_half(sums, tokens[0], 0);
                // NOTE: the next token and kReadAhead lie after the last block, so this address is valid.
                sm80::load_matrix_4(tokens[0], mine + i * 128 + 128);
                weights[i % 2].multiply_half(sums, tokens[1], 1);
            }
            mine += kBlocks * 128;
            ring.release(slot, warps);
        }
        if (block == blocks) return;
        const uint32_t stage = ring.stage();
#pragma unroll 1
        for (int i = 0;; ++i, mine += 128) {
            sm80::load_matrix_4(tokens[1], mine + 64);
            weights[0].multiply_half(sums, tokens[0], 0);
            sm80::load_matrix_4(tokens[0], mine + 128);
            weights[0].multiply_half(sums, tokens[1], 1);
            if (block + i + 1 == blocks) break;
            weights[0].load(stage + codes, stage + scales, i + 1);
        }
        ring.release(ring.slot, warps);
        ring.advance();
    }
    static_assert(kBlocks % 2 == 0, "weights take turns");

    // ---- helpers ----

    static __device__ __forceinline__ void help(const RoutedLayerParams& params, LayerCounters& counters, Shared& shared) {
        constexpr int kHelperThreads = 32 * kHelpers;
        const LayerParams& p = params.layer;
        const int thread = threadIdx.x - 32 * kConsumers, helper = warp_of_block() - kConsumers;
        const bool waits = thread == kHelperThreads - 32;  // this thread's warp copies no weights
        const uint32_t share = layer_parts::share_of_launch();
        uint32_t launch = 0;
        if (waits) launch = atomicAdd(&counters.started, share) / LayerCounters::kLaunch;
        if constexpr (Form::kRoundsTokens) {
            round_input(p.up, params.select.tokens, thread, input_of(shared));
            sm90::barrier_arrive(&shared.input);
        } else {
            copy_input(p.up, params.select.tokens, thread, input_of(shared));
            sm90::copy_async_arrive(&shared.input);
        }
        layer_parts::mark_absent(p.up, params.select, thread, kHelperThreads);
        layer_parts::mark_absent(p.down, params.select, thread, kHelperThreads);
        sm90::named_barrier(2, kThreads);  // all helpers have marked, and the tables are there
        if (helper < kQuads) copy_weights(p, shared, helper);
        if (waits) layer_parts::await_marks(counters, share, launch, &shared.marked);
        __syncwarp();
        // NOTE: a helper without weights to copy comes here before other CTAs have marked their parts, which still hold old rows.
        sm90::barrier_wait(&shared.marked, 0);
        layer_parts::combine<Element>(p.combine, shared.slots, thread);
    }

    // Copies the weights of a quad's units.
    static __device__ __forceinline__ void copy_weights(const LayerParams& p, Shared& shared, int quad) {
        const Units units(p, __shfl_sync(0xFFFFFFFF, shared.slots.tile_count(), 0));
        uint8_t* ring = ring_of(shared, quad);
        int slot = 0;
        uint32_t parity = 1;
        Unit unit{0, 0, false};
#pragma unroll 1
        for (int index = quad; units.find(p, index, unit); index += kQuads) {
            const GroupedGemmParams& gemm = unit.down ? p.down : p.up;
            const bool narrow = unit.down && units.narrow;
            const int blocks = k_blocks(gemm), row_tile = narrow ? unit.number / 2 : unit.number;
            const int half = narrow ? unit.number % 2 * (kPartBytes / 2) : 0;  // where a half block's codes begin in a part
            const int expert = __shfl_sync(0xFFFFFFFF, shared.slots.tile(unit.tile).expert, 0);
            const size_t first = size_t(expert * row_tiles(gemm) + row_tile) * blocks;
            const uint8_t *codes = gemm.weights + first * kCodeBytes, *scales = gemm.block_scales + first * kScaleBytes;
#pragma unroll 1
            for (int block = 0; block < blocks; block += kBlocks) {
                const int now = min(blocks - block, kBlocks);
                uint8_t* stage = ring + slot * kStageBytes;
                uint64_t* full = &shared.full[quad][slot];
                sm90::barrier_wait(&shared.empty[quad][slot], parity);
                if (threadIdx.x % 32 == 0) {
                    const int code_bytes = narrow ? kCodeBytes / 2 : kCodeBytes;
                    sm90::barrier_arrive_expect(full, now * (code_bytes + kScaleBytes));
                    // A whole unit's blocks of codes follow each other.
                    const int pieces = narrow ? now * kParts : 1, bytes = narrow ? code_bytes / kParts : now * code_bytes;
#pragma unroll 1
                    for (int i = 0; i < pieces; ++i) {
                        const int at = half + i * kPartBytes;
                        sm90::copy_bulk(stage + at, codes + at, bytes, full);
                    }
                    sm90::copy_bulk(stage + kStageCodes, scales, now * kScaleBytes, full);
                }
                __syncwarp();
                codes += kBlocks * kCodeBytes, scales += kBlocks * kScaleBytes;
                if (++slot == kStages) slot = 0, parity ^= 1;
            }
        }
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

    // Lanes exchange values when they round, so all lanes of a warp go on together. Columns beyond k become zeros here too.
    static __device__ __forceinline__ void round_input(const GroupedGemmParams& p, int tokens, int thread, uint32_t input) {
        constexpr int kBatch = 4, kHelperThreads = 32 * kHelpers;
        const int columns = p.k / 8, padded = k_blocks(p) * 8, items = tokens * padded;
#pragma unroll 1
        for (int first = thread; first - thread % 32 < items; first += kBatch * kHelperThreads) {
            uint4 value[kBatch] = {};
            uint32_t to[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int item = first + i * kHelperThreads, token = divide(item, padded), column = item - token * padded;
                to[i] = input + token * pitch(p) + column * 16;
                if (item < items && column < columns)
                    value[i] = __ldcg(reinterpret_cast<const uint4*>(p.x) + size_t(token) * columns + column);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const uint4 rounded = Form::round_tokens(value[i]);
                if (first + i * kHelperThreads < items) sm90::store_shared_16(to[i], rounded);
            }
        }
    }
};

}  // namespace oxmoe
