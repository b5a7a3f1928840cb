//! The kernel of csrc/moe/schedule.cuh on host memory.

use crate::params::{ScheduleParams, Tile};

/// # Safety
/// The pointers must be valid for the shapes in [`ScheduleParams`], and `max_tiles` must hold the schedule.
pub unsafe fn schedule(p: &ScheduleParams) {
    let (mut tiles, mut next) = (0, 0);
    for expert in 0..p.experts {
        // SAFETY: the caller's contract.
        let wanted = unsafe { *p.row_counts.add(expert as usize) }.clamp(0, p.rows);
        let (first, count) = if p.rows_each > 0 {
            (expert * p.rows_each, wanted.min(p.rows_each))
        } else {
            (next, wanted.min(p.rows - next))
        };
        next = (i64::from(next) + i64::from(wanted + p.alignment - 1) / i64::from(p.alignment) * i64::from(p.alignment))
            .min(p.rows.into()) as i32;
        let parts = ((count + p.tile_tokens - 1) / p.tile_tokens).max(1);
        let size = match parts {
            1 => p.tile_tokens,
            _ => ((count + parts - 1) / parts + p.tile_step - 1) / p.tile_step * p.tile_step,
        };
        for start in (0..count).step_by(size as usize) {
            let tile = Tile { expert, first: first + start, count: (count - start).min(size), reserved: 0 };
            // SAFETY: the caller's contract.
            unsafe { *p.tiles.add(tiles) = tile };
            tiles += 1;
        }
    }
    // SAFETY: the caller's contract.
    unsafe {
        *p.tile_count = tiles as i32;
        for i in 0..p.counter_count as usize {
            *p.counters.add(i) = 0;
        }
    }
}

/// The rows of a schedule.
///
/// # Safety
/// A schedule that is written.
pub unsafe fn rows(tiles: *const Tile, tile_count: *const i32) -> Vec<usize> {
    // SAFETY: the caller's contract.
    let tiles = unsafe {
        match *tile_count {
            0 => &[],
            count => std::slice::from_raw_parts(tiles, count as usize),
        }
    };
    tiles.iter().flat_map(|tile| (tile.first..tile.first + tile.count).map(|row| row as usize)).collect()
}
