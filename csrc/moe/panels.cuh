// Output in column panels that the CTAs of one launch write and read together: who waits for what (down_combine_fp8_sm90.cuh).
//
// Panel g lies in buffer g % buffers. In each CTA, whose barriers a buffer has three of,
//   writers            wait `free` (from panel `buffers` on), write their part, arrive at `stored`
//   announce           waits `stored`, adds 1 to the panel's `written`
//   hand_over          waits until `written` has all CTAs', arrives at `ready`
//   readers            wait `ready`, read their part, add 1 to the panel's `read`
//   give_back          waits until `read` of the buffer's last panel has all CTAs', arrives at `free`
// Each is a warp or warps of its own, so none waits for what does not concern it. docs/kernels/down_combine_fp8_sm90.md argues
// that this ends and that no barrier gets a whole phase ahead of who waits for it.
//
// No CUDA in here: tests run it on host threads. `Cta` has the barriers and counters.
#pragma once
#include <cstdint>

namespace oxmoe::panels {

// A panel, its buffer, and the parity of the buffer's use.
struct Turn {
    int panel = 0, slot = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance(int buffers) {
        ++panel;
        if (++slot == buffers) {
            slot = 0;
            parity ^= 1;
        }
    }
};

template <typename Cta>
__device__ __forceinline__ void announce(Cta& cta, Turn& turn, int end) {
    for (; turn.panel < end; turn.advance(cta.buffers())) {
        cta.wait_stored(turn.slot, turn.parity);
        cta.add_written(turn.panel);
    }
}

template <typename Cta>
__device__ __forceinline__ void hand_over(Cta& cta, Turn& turn, int end) {
    for (; turn.panel < end; turn.advance(cta.buffers())) {
        cta.wait_written(turn.panel);
        cta.arrive_ready(turn.slot);
    }
}

template <typename Cta>
__device__ __forceinline__ void give_back(Cta& cta, Turn& turn, int end) {
    for (; turn.panel < end; turn.advance(cta.buffers())) {
        if (turn.panel < cta.buffers()) continue;
        cta.wait_read(turn.panel - cta.buffers());
        cta.arrive_free(turn.slot);
    }
}

// A writer, before its first store to a panel.
template <typename Cta>
__device__ __forceinline__ void wait_free(Cta& cta, const Turn& turn) {
    // The first use is free from the start: the second waits for phase 0.
    if (turn.panel >= cta.buffers()) cta.wait_free(turn.slot, turn.parity ^ 1);
}

// Part `part` of `parts` of n things.
struct Share {
    int first, end;

    __device__ __forceinline__ Share(int n, int part, int parts)
        : first(int(int64_t(n) * part / parts)), end(int(int64_t(n) * (part + 1) / parts)) {}
};

// The first of places [low, high), which are in the order of their slots, whose slot is `slot` or a later one.
__device__ __forceinline__ int first_place(const int* slot_of_place, int low, int high, int slot) {
    while (low < high) {
        const int middle = (low + high) / 2;
        if (slot_of_place[middle] < slot)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// Up to 64 tokens of one expert in a CTA; `run_end`: behind the last block of this expert in the CTA's list.
struct alignas(16) Block {
    int expert, first, count, run_end;
};
constexpr int kBlockTokens = 64;

// The places of a chunk's tokens and how they are cut into blocks: `Threads` threads, each with neighbouring experts.
template <int Threads>
struct Division {
    const int *offsets, *slot_of_place;
    int experts, first_slot, end_slot;
    bool is_first, is_last;  // chunks begin and end where their neighbours' slots do, those at the ends where experts do

    __device__ __forceinline__ int experts_each() const { return (experts + Threads - 1) / Threads; }

    static __device__ __forceinline__ int blocks(int count) { return (count + kBlockTokens - 1) / kBlockTokens; }

    // First and last place + 1 of its experts to `places`; the number of their blocks.
    __device__ __forceinline__ int count(int thread, int2* places) const {
        int sum = 0;
        for (int i = 0; i < experts_each(); ++i) {
            const int expert = thread * experts_each() + i;
            if (expert >= experts) break;
            const int low = offsets[expert], high = offsets[expert + 1];
            const int first = is_first ? low : first_place(slot_of_place, low, high, first_slot);
            const int end = is_last ? high : first_place(slot_of_place, first, high, end_slot);
            places[expert] = {first, end};
            sum += blocks(end - first);
        }
        return sum;
    }

    // What of `share` of all blocks the thread's experts have, to `list`. `before`: blocks of the threads before.
    __device__ __forceinline__ void list(int thread, const int2* places, int before, const Share& share, Block* list) const {
        for (int i = 0; i < experts_each(); ++i) {
            const int expert = thread * experts_each() + i;
            if (expert >= experts) break;
            const auto [first, end] = places[expert];
            const int behind = before + blocks(end - first), last = behind < share.end ? behind : share.end;
            for (int n = before > share.first ? before : share.first; n < last; ++n) {
                const int place = first + (n - before) * kBlockTokens, left = end - place;
                list[n - share.first] = {expert, place, left < kBlockTokens ? left : kBlockTokens, last - share.first};
            }
            before = behind;
        }
    }
};

}  // namespace oxmoe::panels
