//! Parameters of the dense MXFP8 GEMM for few tokens.

#[cxx::bridge(namespace = "oxmoe")]
pub mod ffi {
    unsafe extern "C++" {
        include!("oxmoe/src/params/quant.rs.h");
        type MmMxfp8Params = crate::params::quant::ffi::MmMxfp8Params;
    }

    /// A product whose CTAs take `passes` passes of `pass_rows` rows of b each, one after the other.
    #[derive(Clone, Copy, Debug)]
    struct MmMxfp8FewParams {
        product: MmMxfp8Params,
        passes: i32,
        /// Rows of b in a pass, a multiple of 4.
        pass_rows: i32,
    }
}
