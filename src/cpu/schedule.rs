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
        for (start, count) in cut(count, p.tile_tokens, p.tile_step) {
            let tile = Tile { expert, first: first + start, count, done: 0 };
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

/// (first row, rows) of the tiles of an expert. There are as few tiles as hold `count` rows, cut evenly in steps; the first ones have a
/// step more. csrc/moe/tile_cut.cuh does the same.
pub fn cut(count: i32, tile_tokens: i32, tile_step: i32) -> impl Iterator<Item = (i32, i32)> {
    let tiles = (count + tile_tokens - 1) / tile_tokens;
    let steps = (count + tile_step - 1) / tile_step;
    let (each, longer) = (steps / tiles.max(1), steps % tiles.max(1));
    let first = move |tile: i32| ((tile * each + tile.min(longer)) * tile_step).min(count);
    (0..tiles).map(move |tile| (first(tile), first(tile + 1) - first(tile)))
}

/// The rows of a schedule.
///
/// # Safety
/// `tiles` and `tile_count` must be a schedule that is already written.
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
