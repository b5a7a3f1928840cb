//! NVFP4 weights and activations of layers.

#[cxx::bridge(namespace = "oxmoe")]
pub mod ffi {
    unsafe extern "C++" {
        include!("oxmoe/src/params/common.rs.h");
        type Dtype = crate::params::common::ffi::Dtype;
        type W13Layout = crate::params::common::ffi::W13Layout;
        type Tile = crate::params::common::ffi::Tile;
    }

    /// A checkpoint's NVFP4 matrices and the packed form that is made of them (csrc/common/nvfp4_packed.cuh).
    #[derive(Clone, Copy, Debug)]
    struct PackNvfp4Params {
        /// `[experts, rows, k / 2]`.
        codes: *const u8,
        /// e4m3 `[experts, rows, k / 16]`, both padded where `tile_rows` (128; 0: row by row) has tiles.
        scales: *const u8,
        tile_rows: i32,
        /// fp32 `[experts]`, `gated` `[experts, 2]`: gate, up.
        factors: *const f32,
        experts: i32,
        rows: i32,
        k: i32,
        /// Rows are gate and up rows in `layout`.
        gated: bool,
        layout: W13Layout,
        packed_codes: *mut u8,
        packed_scales: *mut u8,
        /// The factors of sums, as `factors`.
        expert_scales: *mut f32,
    }

    /// Rows rounded to NVFP4, or expanded from it, as numbers of the compute type.
    #[derive(Clone, Copy, Debug)]
    struct RoundNvfp4Params {
        /// `[*, columns]` of `dtype`, or with `scales` codes `[*, columns / 2]`.
        x: *const u8,
        /// e4m3 `[*, columns / 16]`, or null.
        scales: *const u8,
        /// `[*, columns]` of `dtype`, a row a slot (where places are not mapped: a place); may be x.
        out: *mut u8,
        /// Of kernels bf16.
        dtype: Dtype,
        columns: i32,
        /// Of x and out, without a schedule.
        rows: i32,
        /// A schedule of tiles of up to `tile_rows` rows: rows outside it are left alone. Null: all rows, with the first of
        /// `global_scales`.
        tiles: *const Tile,
        tile_count: *const i32,
        tile_rows: i32,
        /// As in `GroupedGemmParams`.
        slot_of_place: *const i32,
        row_divisor: i32,
        /// Of kernels: rows of `out` are places all the same.
        by_place: bool,
        /// fp32 `[experts]`: what rows are multiplied by before.
        global_scales: *const f32,
        /// As in `QuantizeFp8Params`.
        x_is_older: bool,
    }
}
