// Rings of stages in shared memory.
#pragma once
#include <cstdint>

namespace oxmoe {

// Position in a ring of `Slots` and the parity of its current use.
template <int Slots>
struct RingPosition {
    int slot = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == Slots) {
            slot = 0;
            parity ^= 1;
        }
    }
};

}  // namespace oxmoe
