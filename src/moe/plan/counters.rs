//! What kernels of a layer count in.

use super::sm90;

/// What the workspace range `counters` holds, all i32 that routing sets to 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counters {
    tiles: i32,
    row_blocks: i32,
}

pub fn counters(max_tiles: i32, hidden: i64) -> Counters {
    Counters { tiles: max_tiles, row_blocks: (hidden as u32).div_ceil(sm90::LAYER_ROWS) as i32 }
}

impl Counters {
    /// `next_unit` of GEMM1 (of the fused layer: of both) and of GEMM2.
    pub const NEXT_UP: usize = 0;
    pub const NEXT_DOWN: usize = 1;
    pub const TILES_DONE: usize = 2;
    /// i32 `[1 + experts]`: `GroupedGemmParams::done`, where layers in one launch count tiles.
    pub const DONE: usize = 2;
    /// Of e4m3 with one scale for all of a call: the largest magnitudes of x and of GEMM1's output, where layers in one launch count tiles.
    pub const PEAK_X: usize = 2;
    pub const PEAK_HIDDEN: usize = 3;

    /// Of those that a call has, with `DONE`.
    pub fn with_done(experts: i64) -> i32 {
        Self::DONE as i32 + 1 + experts as i32
    }

    pub fn rows_done(self) -> usize {
        Self::TILES_DONE + self.tiles as usize
    }

    pub fn count(self) -> i32 {
        self.rows_done() as i32 + self.row_blocks
    }
}
