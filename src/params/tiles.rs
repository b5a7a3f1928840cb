//! Parameters of kernels that take the rows of a schedule's tiles.

#[cxx::bridge(namespace = "oxmoe")]
pub mod ffi {
    unsafe extern "C++" {
        include!("oxmoe/src/params/quant.rs.h");
        type QuantizeRowsParams = crate::params::quant::ffi::QuantizeRowsParams;
    }

    /// The rows that a schedule names, and no others.
    #[derive(Clone, Copy, Debug)]
    struct TileRowsParams {
        /// The rows, with a schedule: rows of x, `out` and `scales` are places.
        rows: QuantizeRowsParams,
        /// Most rows of a tile.
        tile_rows: i32,
    }
}
