//! Parameters for NVFP4 activations of layers.

#[cxx::bridge(namespace = "oxmoe")]
pub mod ffi {
    unsafe extern "C++" {
        include!("oxmoe/src/params/common.rs.h");
        type Dtype = crate::params::common::ffi::Dtype;
        type Tile = crate::params::common::ffi::Tile;
    }

    /// Rows that are rounded to NVFP4 or expanded from it; the result is numbers of the compute type.
    #[derive(Clone, Copy, Debug)]
    struct RoundNvfp4Params {
        /// Numbers `[*, columns]` of `dtype`, or with `scales` codes `[*, columns / 2]`.
        x: *const u8,
        /// Scales of codes, e4m3 `[*, columns / 16]`. Null if x has numbers.
        scales: *const u8,
        /// Numbers `[*, columns]` of `dtype`, one row for each slot, or for each place if `slot_of_place` is null. It may be x.
        out: *mut u8,
        /// Type of the numbers; kernels take bf16 alone.
        dtype: Dtype,
        columns: i32,
        /// Rows of x and out, if there is no schedule.
        rows: i32,
        /// A schedule of tiles of up to `tile_rows` rows; rows outside it are left alone. If it is null, all rows are taken, with the first
        /// of `global_scales`.
        tiles: *const Tile,
        tile_count: *const i32,
        tile_rows: i32,
        /// The row of x of a place is `slot_of_place[place] / row_divisor`; null if slots are places.
        slot_of_place: *const i32,
        row_divisor: i32,
        /// Kernels alone: rows of `out` are places even if `slot_of_place` is given.
        by_place: bool,
        /// fp32 `[experts]`: the number by which an expert's rows are multiplied before they are rounded.
        global_scales: *const f32,
        /// The launch before this one does not write x, so the kernel runs beside it (`pdl::run`).
        x_is_older: bool,
    }
}
