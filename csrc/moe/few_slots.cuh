// Routing of a few tokens by one CTA for itself, in shared memory: top-k, places, and one tile for each expert that has slots.
// Every CTA that needs the tables makes them, so nothing goes through global memory, and no launch stands before the GEMMs. Ids,
// weights and places are the same as Route's.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../common/sm90.cuh"
#include "select.cuh"
#include "slot_sort.cuh"

namespace oxmoe {

// The tables in shared memory. There are at most kMostTokens tokens, kMost slots and `Experts` experts; a token lists an expert
// at most once.
template <int Experts>
struct FewSlotsOf {
    static constexpr int kMost = 64, kMostTokens = 8, kMostExperts = Experts, kPerLane = kMostExperts / 32;
    using Id = std::conditional_t<Experts <= 128, uint8_t, uint16_t>;
    static constexpr uint32_t kNone = 255;  // the place of a skipped slot
    static constexpr Id kNobody = Id(-1);

    Id expert[kMost];  // expert of a slot; kNobody for a skipped slot, and after the last slot
    uint8_t place_of_slot[kMost], slot_of_place[kMost];
    uint32_t active[kMostExperts / 32];  // bit e: the expert has slots
    uint32_t tiles[kMost];               // expert, first place << 16, number of places << 24
    float weight[kMost];                 // weight of a slot

    // Call this before a barrier and route().
    __device__ __forceinline__ void clear() {
        if (threadIdx.x < kMost) expert[threadIdx.x] = kNobody;
        if (threadIdx.x < kMostExperts / 32) active[threadIdx.x] = 0;
    }

    __device__ __forceinline__ int tile_count() const {
        int count = 0;
#pragma unroll
        for (int i = 0; i < kMostExperts / 32; ++i) count += __popc(active[i]);
        return count;
    }

    __device__ __forceinline__ Tile tile(int number) const {
        const uint32_t word = tiles[number];
        return {int(word & 0xFFFF), int(word >> 16 & 0xFF), int(word >> 24), 0};
    }

    __device__ __forceinline__ int place(int slot) const {
        const uint32_t place = place_of_slot[slot];
        return place == kNone ? -1 : int(place);
    }

    // The first `Threads` threads of the CTA call this, at least 32 kMostTokens of them; it has two barriers. kPlain is
    // Selector's.
    template <int Threads, bool kPlain = true>
    __device__ __forceinline__ void route(const SelectParams& select, int experts, int first_expert) {
        const int warp = warp_of_block(), lane = threadIdx.x % 32, top_k = select.top_k, token = kMostTokens - 1 - warp;
        const bool routes = uint32_t(token) < uint32_t(select.tokens);
        const Selector<kPerLane, kPlain> selector(select);
        Choice choice;
        bool mine = false;
        if (routes) {
            typename Selector<kPerLane, kPlain>::Row row;
            float logit[kPerLane], bias[kPerLane];
            selector.fetch(row, token);
            const int valid = select.num_token_non_padded ? *select.num_token_non_padded : select.tokens;
            if constexpr (!kPlain) selector.load_bias(bias);
            selector.values(logit, row);
            choice = selector.template pick<kPlain>(logit, bias, token);
            mine = lane < top_k;
            const uint32_t local = uint32_t(choice.id) - uint32_t(first_expert);
            const bool here = mine && token < valid && local < uint32_t(experts);
            if (mine) expert[token * top_k + lane] = here ? Id(local) : kNobody;
            if (here) atomicOr(&active[local / 32], 1u << local % 32);
            mine = mine && token < valid;
        }
        sm90::named_barrier(0, Threads);
        if (routes) {
            const float made = selector.weigh(choice);
            if (lane < top_k) weight[token * top_k + lane] = mine ? made : 0.f;
        }
        if (int(threadIdx.x) < select.tokens * top_k) sort(threadIdx.x, select.tokens * top_k);
        sm90::named_barrier(0, Threads);
    }

private:
    // Sorts slots by expert, stable in the slot number: compares a slot with a word of others at a time.
    __device__ __forceinline__ void sort(int slot, int slots) {
        constexpr int kIds = 4 / sizeof(Id), kBits = 32 / kIds;
        const uint32_t own = expert[slot], ones = kIds == 4 ? 0x01010101u : 0x00010001u, all = own * ones;
        const uint32_t* words = reinterpret_cast<const uint32_t*>(expert);
        int less = 0, same = 0, before = 0;
#pragma unroll 1
        for (int i = 0; i < slots; i += kIds) {
            const uint32_t word = words[i / kIds];
            const uint32_t equal = (kIds == 4 ? __vcmpeq4(word, all) : __vcmpeq2(word, all)) & ones;
            const uint32_t below = (kIds == 4 ? __vcmpltu4(word, all) : __vcmpltu2(word, all)) & ones;
            // Mask of the ids of lower slots.
            const uint32_t earlier = slot <= i ? 0 : slot >= i + kIds ? ~0u : (1u << kBits * (slot - i)) - 1;
            less += __popc(below);
            same += __popc(equal);
            before += __popc(equal & earlier);
        }
        const bool skipped = own == kNobody;
        const int place = less + before;
        place_of_slot[slot] = uint8_t(skipped ? int(kNone) : place);
        if (skipped) return;
        slot_of_place[place] = uint8_t(slot);
        if (before > 0) return;
        int number = 0;
#pragma unroll
        for (int i = 0; i < kMostExperts / 32; ++i) {
            const uint32_t lower = own >= 32u * i + 32 ? ~0u : own <= 32u * i ? 0 : (1u << (own - 32 * i)) - 1;
            number += __popc(active[i] & lower);
        }
        tiles[number] = own | uint32_t(less) << 16 | uint32_t(same) << 24;
    }
};
using FewSlots = FewSlotsOf<128>;
static_assert(sizeof(FewSlots) == 720, "src/variants.rs knows it");

}  // namespace oxmoe
