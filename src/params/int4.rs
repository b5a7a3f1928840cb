//! Parameters of the packer of int4 weights.

#[cxx::bridge(namespace = "oxmoe")]
pub mod ffi {
    unsafe extern "C++" {
        include!("oxmoe/src/params/common.rs.h");
        type Dtype = crate::params::common::ffi::Dtype;
        type W13Layout = crate::params::common::ffi::W13Layout;
    }

    /// A checkpoint's int4 matrices and the packed form that is made of them (csrc/common/int4.cuh).
    #[derive(Clone, Copy, Debug)]
    struct PackInt4Params {
        /// Codes: `[experts, rows, k / 2]` bytes, the lower column in the lower half.
        codes: *const u8,
        /// Scales `[experts, rows, k / group]` of `scale_dtype`.
        scales: *const u8,
        scale_dtype: Dtype,
        /// Zero points `[experts, rows, k / group]` from 0 to 16. Null if all are 8.
        zeros: *const u8,
        /// Columns that share a scale.
        group: i32,
        experts: i32,
        rows: i32,
        k: i32,
        /// Whether rows are gate and up rows, in `layout`.
        gated: bool,
        layout: W13Layout,
        packed_codes: *mut u8,
        packed_scales: *mut u8,
        /// fp32 `[experts]`, which the packer fills with ones.
        expert_scales: *mut f32,
    }
}
