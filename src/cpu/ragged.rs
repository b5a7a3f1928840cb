//! triton_kernels' tables of a sorted batch; the twin of csrc/moe/ragged.cuh.

use super::{slice, slice_mut};
use crate::params::{Dtype, RaggedParams};
use half::{bf16, f16};

/// # Safety
/// All pointers are valid for the shapes stated at `RaggedParams`; outputs overlap nothing.
pub unsafe fn ragged(p: &RaggedParams) {
    let (experts, slots, most) = (p.experts as usize, p.slots as usize, p.max_blocks as usize);
    // SAFETY: the caller's contract. Without slots, tables of slots may be null.
    let (histogram, slot_of_place, weights, offsets, schedule) = unsafe {
        (
            slice(p.histogram, experts),
            slice(p.slot_of_place, slots),
            slice(p.slot_weights, slots),
            slice_mut(p.block_offsets, 4 * (experts + 1)),
            slice_mut(p.block_schedule, 4 * most),
        )
    };
    schedule.fill(-1);
    for size in 0..4 {
        let (offsets, schedule) = (&mut offsets[size * (experts + 1)..], &mut schedule[size * most..]);
        let mut next = 0;
        for (expert, &rows) in histogram.iter().enumerate() {
            offsets[expert] = next as i32;
            let blocks = (rows as usize).div_ceil(16 << size);
            for block in 0..blocks {
                schedule[next + block] = (block << 16 | expert) as i32;
            }
            next += blocks;
        }
        offsets[experts] = next as i32;
    }
    for (place, &slot) in slot_of_place.iter().enumerate() {
        let weight = if slot < 0 { 0.0 } else { weights[slot as usize] };
        // SAFETY: `gate` has `slots` elements of `gate_dtype`.
        unsafe {
            match p.gate_dtype {
                Dtype::F16 => *p.gate.cast::<f16>().add(place) = f16::from_f32(weight),
                Dtype::Bf16 => *p.gate.cast::<bf16>().add(place) = bf16::from_f32(weight),
                _ => *p.gate.cast::<f32>().add(place) = weight,
            }
        }
    }
}
