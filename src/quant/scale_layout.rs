//! The places of the scales of blocks, as other projects lay them out.

/// The place of the scale of a row's block of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleLayout {
    /// Tiles of 128 rows by 4 blocks: [rows / 128][blocks / 4][32][4][4], row r of a tile at [r % 32][r / 32].
    Swizzled128x4,
    /// Tiles of 8 rows by 4 blocks: [rows / 8][blocks / 4][8][4].
    Swizzled8x4,
    /// Row-major order.
    Linear,
}

impl ScaleLayout {
    /// Rows of a tile, or 0 if there are no tiles.
    pub fn tile_rows(self) -> i32 {
        match self {
            ScaleLayout::Swizzled128x4 => 128,
            ScaleLayout::Swizzled8x4 => 8,
            ScaleLayout::Linear => 0,
        }
    }

    /// The layout whose tiles have `rows` rows: the inverse of `tile_rows`.
    pub fn of_tile_rows(rows: i32) -> ScaleLayout {
        match rows {
            128 => ScaleLayout::Swizzled128x4,
            8 => ScaleLayout::Swizzled8x4,
            _ => ScaleLayout::Linear,
        }
    }

    /// The numbers of rows and blocks with padding.
    pub fn padded(self, rows: usize, blocks: usize) -> (usize, usize) {
        match self {
            ScaleLayout::Linear => (rows, blocks),
            tiled => (rows.next_multiple_of(tiled.tile_rows() as usize), blocks.next_multiple_of(4)),
        }
    }

    /// Bytes of the scales of a matrix.
    pub fn bytes(self, rows: usize, blocks: usize) -> usize {
        let (rows, blocks) = self.padded(rows, blocks);
        rows * blocks
    }

    pub fn offset(self, row: usize, block: usize, blocks: usize) -> usize {
        let tiles = blocks.div_ceil(4);
        match self {
            ScaleLayout::Swizzled128x4 => {
                (row / 128 * tiles + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4
            }
            ScaleLayout::Swizzled8x4 => (row / 8 * tiles + block / 4) * 32 + row % 8 * 4 + block % 4,
            ScaleLayout::Linear => row * blocks + block,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scale_has_its_place() {
        for layout in [ScaleLayout::Swizzled128x4, ScaleLayout::Swizzled8x4, ScaleLayout::Linear] {
            assert_eq!(ScaleLayout::of_tile_rows(layout.tile_rows()), layout);
            for (rows, blocks) in [(1, 1), (7, 4), (128, 3), (130, 9), (300, 8)] {
                let mut taken = vec![false; layout.bytes(rows, blocks)];
                for row in 0..rows {
                    for block in 0..blocks {
                        assert!(!std::mem::replace(&mut taken[layout.offset(row, block, blocks)], true));
                    }
                }
            }
        }
        assert_eq!(ScaleLayout::Swizzled128x4.offset(129 + 32, 5, 9), (3 + 1) * 512 + 16 + 4 + 1);
    }
}
