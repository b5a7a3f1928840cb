//! Parameters of the packer of weights.

#[cxx::bridge(namespace = "oxmoe")]
pub mod ffi {
    unsafe extern "C++" {
        include!("oxmoe/src/params/common.rs.h");
        type Dtype = crate::params::common::ffi::Dtype;
        type W13Layout = crate::params::common::ffi::W13Layout;
    }

    /// A checkpoint's matrices of codes, and the packed form that is made of them. `quant::blocks::Blocks` describes the same matrices for
    /// CPUs.
    #[derive(Clone, Copy, Debug)]
    struct PackParams {
        /// Codes `[experts, rows, k]`, row by row. A byte has two codes of four bits, the lower column in the lower half.
        codes: *const u8,
        /// Scales `[experts, rows, k / group]`. With tiles, rows and columns of scales are padded to whole tiles.
        scales: *const u8,
        /// Columns that share a scale.
        group: i32,
        /// Formats whose scales may have any type: their type.
        scale_dtype: Dtype,
        /// Rows of a tile of scales, 128. 0 if scales lie row by row.
        tile_rows: i32,
        /// Zero points `[experts, rows, k / group]`, or null.
        zeros: *const u8,
        /// fp32 `[experts]`, or `[experts, 2]` (gate, up) if `gated`: factors of the weights. Null if the format has none.
        factors: *const f32,
        experts: i32,
        rows: i32,
        k: i32,
        /// Whether rows are gate and up rows, in `layout`.
        gated: bool,
        layout: W13Layout,
        packed_codes: *mut u8,
        packed_scales: *mut u8,
        /// The factors of an expert's sums, fp32 `[experts]`, or in the shape of `factors` if the form has factors of halves.
        expert_scales: *mut f32,
    }
}
