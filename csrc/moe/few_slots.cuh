// Routing of a few tokens by one CTA for itself, in shared memory: top-k or given ids, places, and one tile for each expert that
// has slots. Every CTA that needs the tables makes them, so nothing goes through global memory, and no launch stands before the
// GEMMs. Ids, weights and places are the same as Route's.
//
// Given ids may name an expert several times for one token. Such an expert has several tiles, each of which has a token once.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../common/sm90.cuh"
#include "select.cuh"
#include "slot_sort.cuh"

namespace oxmoe {

// The tables in shared memory. There are at most kMostTokens tokens, kMost slots and `Experts` local experts, and at most 32
// slots a token.
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
    int tile_total;
    uint32_t repeats;  // not 0: a token names an expert several times

    // Call this before a barrier and route().
    __device__ __forceinline__ void clear() {
        if (threadIdx.x < kMost) expert[threadIdx.x] = kNobody;
        if (threadIdx.x < kMostExperts / 32) active[threadIdx.x] = 0;
        if (threadIdx.x == 0) repeats = 0;
    }

    __device__ __forceinline__ int tile_count() const { return tile_total; }

    __device__ __forceinline__ Tile tile(int number) const {
        const uint32_t word = tiles[number];
        return {int(word & 0xFFFF), int(word >> 16 & 0xFF), int(word >> 24), 0};
    }

    __device__ __forceinline__ int place(int slot) const {
        const uint32_t place = place_of_slot[slot];
        return place == kNone ? -1 : int(place);
    }

    // The first `Threads` threads of the CTA call this, at least 32 kMostTokens of them; it has two barriers, and a third one if
    // ids repeat. kPlain is Selector's. If there are no logits, `select.ids` and `select.weights` are given.
    template <int Threads, bool kPlain = true>
    __device__ __forceinline__ void route(const RoutedLayerParams& p) {
        const SelectParams& select = p.select;
        const int warp = warp_of_block(), lane = threadIdx.x % 32, top_k = select.top_k, token = kMostTokens - 1 - warp;
        const bool routes = uint32_t(token) < uint32_t(select.tokens), chooses = select.logits != nullptr;
        const Selector<kPerLane, kPlain> selector(select);
        Choice choice;
        bool mine = false;
        float made = 0.f;
        if (routes) {
            if (chooses) {
                typename Selector<kPerLane, kPlain>::Row row;
                float logit[kPerLane], bias[kPerLane];
                selector.fetch(row, token);
                const int valid = select.num_token_non_padded ? *select.num_token_non_padded : select.tokens;
                if constexpr (!kPlain) selector.load_bias(bias);
                selector.values(logit, row);
                choice = selector.template pick<kPlain>(logit, bias, token);
                mine = token < valid;
            } else {
                choice.id = -1;
                mine = true;
                if (lane < top_k) take_given(p, token * top_k + lane, choice.id, made);
            }
            const uint32_t local = uint32_t(choice.id) - uint32_t(p.first_expert);
            const bool here = mine && lane < top_k && local < uint32_t(p.experts);
            if (lane < top_k) expert[token * top_k + lane] = here ? Id(local) : kNobody;
            if (here) atomicOr(&active[local / 32], 1u << local % 32);
            if (!chooses) {
                const uint32_t same = __match_any_sync(~0u, here ? int(local) : -1 - lane);
                if (same & (same - 1)) repeats = 1;
            }
        }
        sm90::named_barrier(0, Threads);
        if (routes) {
            if (chooses) made = selector.weigh(choice);
            if (lane < top_k) weight[token * top_k + lane] = mine ? made : 0.f;
        }
        if (int(threadIdx.x) < select.tokens * top_k) sort(threadIdx.x, select.tokens * top_k);
        if (threadIdx.x == 0) count_tiles();
        sm90::named_barrier(0, Threads);
        if (repeats == 0) return;
        if (threadIdx.x == 0) cut_tiles(select.tokens * top_k, top_k);
        sm90::named_barrier(0, Threads);
    }

private:
    static __device__ __forceinline__ void take_given(const RoutedLayerParams& p, int slot, int& id, float& weight) {
        if (p.ids_are_i64) {
            const long long wide = reinterpret_cast<const long long*>(p.select.ids)[slot];
            id = wide == int(wide) ? int(wide) : -1;
        } else {
            id = p.select.ids[slot];
        }
        weight = p.select.weights[slot];
    }

    __device__ __forceinline__ void count_tiles() {
        int count = 0;
#pragma unroll
        for (int i = 0; i < kMostExperts / 32; ++i) count += __popc(active[i]);
        tile_total = count;
    }

    // Makes the tiles anew, so that each has a token once. An expert's slots of one token follow each other.
    __device__ __noinline__ void cut_tiles(int slots, int top_k) {
        int placed = 0, total = 0, first = 0;
#pragma unroll 1
        for (int slot = 0; slot < slots; ++slot) placed += expert[slot] != kNobody;
#pragma unroll 1
        for (int next = 1; next <= placed; ++next) {
            const int slot = slot_of_place[next - 1];
            if (next < placed) {
                const int other = slot_of_place[next];
                if (expert[other] == expert[slot] && other / top_k != slot / top_k) continue;
            }
            tiles[total++] = expert[slot] | uint32_t(first) << 16 | uint32_t(next - first) << 24;
            first = next;
        }
        tile_total = total;
    }

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
static_assert(sizeof(FewSlots) == 728 && sizeof(FewSlotsOf<384>) == 824, "src/variants/layer.rs knows them");

}  // namespace oxmoe
