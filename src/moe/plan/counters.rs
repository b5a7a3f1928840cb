//! The counters in the workspace, in which the kernels of a layer count.

use super::sm90;

/// The contents of the workspace range `counters`: i32 that the routing or the schedule sets to 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counters {
    tiles: i32,
    row_blocks: i32,
}

pub fn counters(max_tiles: i32, hidden: i64) -> Counters {
    Counters { tiles: max_tiles, row_blocks: (hidden as u32).div_ceil(sm90::LAYER_ROWS) as i32 }
}

impl Counters {
    /// Index of `next_unit` of GEMM1, or of both GEMMs in a fused layer.
    pub const NEXT_UP: usize = 0;
    /// Index of `next_unit` of GEMM2.
    pub const NEXT_DOWN: usize = 1;
    /// First index of `LayerParams::tiles_done`.
    pub const TILES_DONE: usize = 2;
    /// First index of `GroupedGemmParams::done`, i32 `[1 + experts]`. Layers in one launch have `TILES_DONE` there.
    pub const DONE: usize = 2;
    /// Index of the largest magnitude of x, for e4m3 with one scale for all rows of a call. Layers in one launch have `TILES_DONE` there.
    pub const PEAK_X: usize = 2;
    /// Index of the largest magnitude of GEMM1's output, for e4m3 with one scale for all rows of a call.
    pub const PEAK_HIDDEN: usize = 3;

    /// How many counters a call with `DONE` has.
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
