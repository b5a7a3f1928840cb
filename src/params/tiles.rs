//! Rows of a schedule's tiles, wherever they lie.

#[cxx::bridge(namespace = "oxmoe")]
pub mod ffi {
    unsafe extern "C++" {
        include!("oxmoe/src/params/quant.rs.h");
        type QuantizeRowsParams = crate::params::quant::ffi::QuantizeRowsParams;
    }

    /// Rows that a schedule names, and no others.
    #[derive(Clone, Copy, Debug)]
    struct TileRowsParams {
        /// With a schedule: rows of x, `out` and `scales` are places.
        rows: QuantizeRowsParams,
        /// Most rows of a tile.
        tile_rows: i32,
    }
}
