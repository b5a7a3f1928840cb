// Both grouped GEMMs of a layer for Hopper, with packed weights and bf16 tokens: out[place] = activation(weights[expert(place)]
// x[row(place)] + bias[expert(place)]), then GEMM2 does the same with these rows, without an activation. A launch may also have
// one of the GEMMs alone. The products are exact if weights are bf16 numbers, such as e2m1 or e4m3 times a power of two, or e2m1
// times e4m3.
//
// `Form` is the packed form of the weights: blocks of 64 rows x 64 K, each for four warps; see mxfp4::Form, mxfp8::Form,
// nvfp4::Form. A thread reads its part of a block and decodes it into the A fragments of four k16 steps.
//
// Work units, schedule, wide gathering and epilogue are GroupedGemmSm90's. Weights come in their order in memory (MXFP4: 4.25
// bits each), and are decoded in registers. A warp decodes 64 x 64 weights in 52 of 75 instructions; the rate of memory leaves
// about 125 cycles for them (MXFP8: 250).
//
// For up to 32 tokens a warp multiplies with mma.sync, during which it goes on decoding: wgmma with A in registers would hold it
// up. Wider tiles use wgmma with several warpgroups in a CTA, so that one decodes while another multiplies. Both give the same
// bits. Either way a stage's K blocks are one straight run of code.
//
// Units of GEMM2 follow those of GEMM1 without a break. w2 is in flight while the last of w13 is multiplied. Only the tokens of a
// unit wait, until all of GEMM1's output for them is there.
//
// Progress: CTAs take all their units, also the first one, from one counter, GEMM1's before GEMM2's. So a unit waits only for
// units that running CTAs have, and these are earlier units than itself. CTAs need not be on the GPU all at once.
//
// Needs k % 8 == 0, rows % 16 == 0 (gated: out_columns % 8 == 0), 16-byte aligned x, weights and out.
#pragma once
#include <cstdint>
#include <utility>

#include "../common/sm80.cuh"
#include "packed_pipeline_sm90.cuh"
#include "pair_schedule_sm90.cuh"

namespace oxmoe {

template <bool Gated, typename Form, int MaxTokens, int Consumers, int Stages, int Blocks>
struct GroupedGemmPackedSm90 {
    using Pipeline = PackedPipelineSm90<Form, Gated, MaxTokens, Consumers, Stages, Blocks, false>;
    using Base = typename Pipeline::Base;    // GEMM1
    using Plain = typename Pipeline::Plain;  // GEMM2
    using Producers = PairProducers<Pipeline>;
    using Shared = typename Pipeline::Shared;
    using Stage = typename Pipeline::Stage;

    static constexpr int kThreads = Base::kThreads;
    static constexpr int kUnitSlots = Base::kUnitSlots;
    static constexpr int kSharedBytes = sizeof(Shared);
    static constexpr int kCtas = Pipeline::kCtas;
    static constexpr int kSteps = Pipeline::kSteps;                           // k16 steps in a group of wgmma
    static constexpr int kGroups = 4 / Form::kGroupSteps;                     // groups of a block's K that have a scale each
    static constexpr int kFactors = Gated && Form::kFactorsOfHalves ? 2 : 1;  // factors of an expert
    static constexpr bool kMmaSync = MaxTokens <= 32;
    // Arrivals of a warpgroup that free a stage, or that announce a stored unit.
    static constexpr int kReaders = kMmaSync ? 4 : 128;

    static __device__ __forceinline__ void run(const GemmPairParams& p) {
        extern __shared__ __align__(1024) uint8_t dynamic_shared[];
        Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
        if (threadIdx.x == 0) {
            for (uint64_t& stored : shared.stored) sm90::barrier_init(&stored, kReaders * Consumers);
            Base::init_barriers(shared, kReaders * Consumers);
        }
        __syncthreads();
        // NOTE: with an older schedule only x is in flight, and only the gathering warps wait.
        if (!p.up.schedule_is_older) pdl::wait();
        if (threadIdx.x < 128) {
            if constexpr (Pipeline::kMovesRegisters) sm90::registers_decrease<Pipeline::kProducerRegisters>();
            const int warp = threadIdx.x / 32;
            if (warp == 0)
                Pipeline::copy_weights(p, shared);
            else if (warp == 1)
                Producers::schedule(p, shared);
            else
                Producers::gather(p, shared);
        } else {
            if constexpr (Pipeline::kMovesRegisters) sm90::registers_increase<Pipeline::kConsumerRegisters>();
            consume(p, shared);
        }
    }

private:
    // ---- consumers ----

    static __device__ __forceinline__ void consume(const GemmPairParams& p, Shared& shared) {
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        uint32_t staging = 0;
        for (;; units.advance()) {
            sm90::barrier_wait(&shared.unit_full[units.slot], units.parity);
            PairUnit work = shared.unit[units.slot];
            sm90::barrier_arrive(&shared.unit_empty[units.slot]);
            make_uniform(work);
            work.stored = __shfl_sync(0xFFFFFFFF, work.stored, 0);
            if (work.expert < 0) break;
            const int k_blocks = __shfl_sync(0xFFFFFFFF, Base::k_blocks(gemm_of(p, work)), 0);
            if (!Base::has_rows(gemm_of(p, work), work, Base::consumer_index())) {
                for (int block = 0; block < k_blocks; block += Blocks, ring.advance()) {
                    sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
                    release(&shared.empty[ring.slot], true);
                }
                if (!work.is_down()) release(&shared.stored[work.stored], true);
                continue;
            }
            // NOTE: these are loaded before the multiplication, so that no warp waits for them after it.
            typename Base::Biases bias;
            float factors[kFactors];
            if (work.is_down())
                load<Plain>(work, p.down, bias, factors);
            else
                load<Base>(work, p.up, bias, factors);
            float sums[1][MaxTokens / 2];
#pragma unroll
            for (int i = 0; i < MaxTokens / 2; ++i) asm volatile("mov.b32 %0, 0;" : "=f"(sums[0][i]));
            Pipeline::at_width(work.count, [&](auto width) {
                if constexpr (kMmaSync)
                    multiply_by_warp<decltype(width)::value>(k_blocks, sums[0], shared, ring);
                else
                    multiply<decltype(width)::value>(k_blocks, sums[0], shared, ring);
            });
            if (work.is_down()) {
                finish<Plain, sm90::Unchanged>(work, p.down, sums, bias, factors, shared, staging);
                continue;
            }
            finish<Base, Form>(work, p.up, sums, bias, factors, shared, staging);
            release(&shared.stored[work.stored], true);
        }
    }

    // Loads the biases of a lane's rows, and the factors of the expert's sums: gate and up rows may have different ones.
    template <typename Gemm>
    static __device__ __forceinline__ void load(const WorkUnit& work, const GroupedGemmParams& p, typename Base::Biases& bias,
                                                float (&factors)[kFactors]) {
        constexpr int kOwn = Gemm::kGated ? kFactors : 1;
        Gemm::template load_biases<true>(work, p, bias);
#pragma unroll
        for (int i = 0; i < kFactors; ++i) factors[i] = p.expert_scales[kOwn * work.expert + i % kOwn];
    }

    // Finishes a unit's sums. `After` is what outputs go through before they are stored.
    template <typename Gemm, typename After>
    static __device__ __forceinline__ void finish(const WorkUnit& work, const GroupedGemmParams& p,
                                                  float (&sums)[1][MaxTokens / 2], const typename Base::Biases& bias,
                                                  const float (&factors)[kFactors], Shared& shared, uint32_t& staging) {
#pragma unroll
        for (int i = 0; i < MaxTokens / 2; ++i) sums[0][i] *= factors[i % 4 < 2 ? 0 : kFactors - 1];
        if constexpr (Gated && !Gemm::kGated) {  // GEMM2 has no activation
            Gemm::add_biases(sums, bias, p);
            Gemm::template store<true, After>(work, sums, p, shared, staging);
        } else {
            const bool activated = Gemm::template prepare_sums<true>(work, sums, bias, p);
            if (!Gated || activated)
                Gemm::template store<true, After>(work, sums, p, shared, staging);
            else
                Gemm::template store<false, After>(work, sums, p, shared, staging);
        }
    }

    // Frees a stage that all lanes of a warp have read. NOTE: beside wgmma every lane arrives, because ptxas takes a warp for
    // converged there. It drops the instruction that would hold one lane's arrival back until the others have read.
    static __device__ __forceinline__ void release(uint64_t* empty, bool condition) {
        if constexpr (kMmaSync) __syncwarp();
        sm90::barrier_arrive_if(empty, condition && (!kMmaSync || threadIdx.x % 32 == 0));
    }

    // The multipliers of a group of a block's K.
    using Multipliers = decltype(Form::multipliers(std::declval<const typename Form::Scales&>(), 0));

    // A block's weights and half a block's tokens in registers.
    struct Weights {
        typename Form::Codes codes;
        typename Form::Scales scales;

        __device__ __forceinline__ void load(const uint8_t* my_codes, const uint8_t* my_scales, int block) {
            codes = Form::load_codes(my_codes + block * Form::kCodeBytes);
            scales = Form::load_scales(my_scales + block * Form::kScaleBytes);
        }
    };
    template <int Width>
    struct Tokens {
        uint32_t tiles[Width / 8][4];

        // `mine`: addresses of this lane's rows in the two halves of a block's 64 K.
        __device__ __forceinline__ void load(const uint32_t (&mine)[2], int block, int half) {
#pragma unroll
            for (int n = 0; n < Width / 8; ++n) {
                sm80::load_matrix_4(tiles[n], mine[half] + block * Base::kTokenBytes + n * 1024);
            }
        }
    };

    template <int Width>
    static __device__ __forceinline__ void multiply_half(float* sums, const Weights& weights, const Tokens<Width>& tokens,
                                                         int half) {
        Multipliers multipliers[kGroups / 2];
#pragma unroll
        for (int i = 0; i < kGroups / 2; ++i) multipliers[i] = Form::multipliers(weights.scales, half * (kGroups / 2) + i);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            uint32_t a[4];
            Form::decode(weights.codes, half * 2 + step, multipliers[step / Form::kGroupSteps], a);
#pragma unroll
            for (int n = 0; n < Width / 8; ++n) {
                float (&tile)[4] = *reinterpret_cast<float (*)[4]>(&sums[4 * n]);
                sm80::multiply_add<__nv_bfloat16>(tile, a, tokens.tiles[n][step * 2], tokens.tiles[n][step * 2 + 1]);
            }
        }
    }

    // Multiplies with mma.sync, which does not hold its warp up, so decoding overlaps with it within a warp.
    template <int Width>
    static __device__ __forceinline__ void multiply_by_warp(int k_blocks, float* sums, Shared& shared,
                                                            RingPosition<Stages>& ring) {
        const int consumer = Base::consumer_index(), thread = threadIdx.x % 128, lane = threadIdx.x % 32;
        // Tile i of the four has tokens 0 to 7 and chunk i of 64 bytes.
        const uint32_t swizzled = lane % 8 * 128 + ((lane / 8) ^ (lane % 8)) * 16;
#pragma unroll 1
        for (int block = 0; block < k_blocks; block += Blocks, ring.advance()) {
            const Stage& stage = shared.stage[ring.slot];
            const uint8_t* my_codes = stage.codes[consumer] + thread * Form::kThreadCodes;
            const uint8_t* my_scales = stage.scales[consumer] + thread / 4 * Form::kQuadScales;
            const uint32_t first_half = sm90::shared_address(stage.tokens) + swizzled,
                           my_tokens[2] = {first_half, first_half ^ 64};
            sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
            if (block + Blocks <= k_blocks) {
                Weights weights[2];
                Tokens<Width> tokens[2];
                weights[0].load(my_codes, my_scales, 0);
                tokens[0].load(my_tokens, 0, 0);
#pragma unroll
                for (int half = 0; half < 2 * Blocks; ++half) {
                    const int next = half + 1;
                    if (next % 2 == 0 && next < 2 * Blocks) weights[next / 2 % 2].load(my_codes, my_scales, next / 2);
                    if (next < 2 * Blocks) tokens[next % 2].load(my_tokens, next / 2, next % 2);
                    multiply_half<Width>(sums, weights[half / 2 % 2], tokens[half % 2], half % 2);
                }
            } else {
#pragma unroll 1
                for (int i = 0; block + i < k_blocks; ++i) {
                    Weights weights;
                    weights.load(my_codes, my_scales, i);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        Tokens<Width> tokens;
                        tokens.load(my_tokens, i, half);
                        multiply_half<Width>(sums, weights, tokens, half);
                    }
                }
            }
            release(&shared.empty[ring.slot], true);
        }
    }

    template <int Width>
    static __device__ __forceinline__ void multiply(int k_blocks, float* sums, Shared& shared, RingPosition<Stages>& ring) {
        const int consumer = Base::consumer_index();
        int previous = 0, block = 0;
#pragma unroll 1
        for (; block + Blocks <= k_blocks; block += Blocks, ring.advance()) {
            sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
            sm90::fence_async_proxy();
            multiply_blocks<Width, Blocks>(sums, shared.stage[ring.slot], consumer, 0,
                                           [&] { release(&shared.empty[previous], block > 0); });
            previous = ring.slot;
        }
        sm90::wgmma_wait<0>();
        release(&shared.empty[previous], block > 0);
        // NOTE: nothing is in flight here: a second path beside one with A registers in flight makes ptxas serialize (C7513).
        if (Blocks == 1 || block == k_blocks) return;
        sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
        sm90::fence_async_proxy();
#pragma unroll 1
        for (int i = 0; block + i < k_blocks; ++i) {
            multiply_blocks<Width, 1>(sums, shared.stage[ring.slot], consumer, i, [] {});
            sm90::wgmma_wait<0>();
        }
        release(&shared.empty[ring.slot], true);
        ring.advance();
    }

    // Multiplies `Run` K blocks of a stage from block `first` on. While the tensor cores work on a group, the next group is
    // decoded, and the next block is loaded from shared memory. On return one group is in flight. `earlier_done` is called once
    // everything older than this call has finished.
    template <int Width, int Run, typename F>
    static __device__ __forceinline__ void multiply_blocks(float* sums, const Stage& stage, int consumer, int first,
                                                           F earlier_done) {
        const int thread = threadIdx.x % 128;
        const uint8_t* my_codes = stage.codes[consumer] + first * Form::kCodeBytes + thread * Form::kThreadCodes;
        const uint8_t* my_scales = stage.scales[consumer] + first * Form::kScaleBytes + thread / 4 * Form::kQuadScales;
        const uint32_t tokens = sm90::shared_address(stage.tokens) + first * Base::kTokenBytes;
        Weights next;
        next.load(my_codes, my_scales, 0);
#pragma unroll
        for (int block = 0; block < Run; ++block) {
            const Weights weights = next;
            Multipliers multipliers[kGroups];
#pragma unroll
            for (int i = 0; i < kGroups; ++i) multipliers[i] = Form::multipliers(weights.scales, i);
            if (block + 1 < Run) next.load(my_codes, my_scales, block + 1);
#pragma unroll
            for (int step = 0; step < 4; step += kSteps) {
                uint32_t a[kSteps][4];
#pragma unroll
                for (int i = 0; i < kSteps; ++i)
                    Form::decode(weights.codes, step + i, multipliers[(step + i) / Form::kGroupSteps], a[i]);
                sm90::wgmma_fence();
#pragma unroll
                for (int i = 0; i < kSteps; ++i) {
                    sm90::WgmmaFromRegisters<Width>::multiply(
                        sums, a[i], sm90::descriptor_128b(tokens, block * Base::kTokenBytes + (step + i) * 32));
                }
                sm90::wgmma_commit();
                sm90::wgmma_wait<1>();
                if (block + step == 0) earlier_done();
            }
        }
    }
};

}  // namespace oxmoe
