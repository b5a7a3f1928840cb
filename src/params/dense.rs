//! The dense MXFP8 GEMM for few tokens.

#[cxx::bridge(namespace = "oxmoe")]
pub mod ffi {
    unsafe extern "C++" {
        include!("oxmoe/src/params/quant.rs.h");
        type MmMxfp8Params = crate::params::quant::ffi::MmMxfp8Params;
    }

    /// The product whose CTAs have `passes` of `pass_rows` rows of b each, one after the other.
    #[derive(Clone, Copy, Debug)]
    struct MmMxfp8FewParams {
        product: MmMxfp8Params,
        passes: i32,
        /// A multiple of 4.
        pass_rows: i32,
    }
}
