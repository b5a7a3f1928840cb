//! GEMM2 and combine in one launch.

#[cxx::bridge(namespace = "oxmoe")]
pub mod ffi {
    unsafe extern "C++" {
        include!("oxmoe/src/params/moe.rs.h");
        type GroupedGemmParams = crate::params::moe::ffi::GroupedGemmParams;
        type CombineParams = crate::params::moe::ffi::CombineParams;
    }

    /// GEMM2's output goes panel by panel of 128 columns through buffers and is summed from there. Of `down`, `tiles`, `slot_of_place`
    /// and `next_unit` are not looked at, of `combine` neither `columns`; `down.out` and `combine.y` are the buffers.
    #[derive(Clone, Copy, Debug)]
    struct DownCombineParams {
        down: GroupedGemmParams,
        combine: CombineParams,
        /// i32 `[experts + 1]` and `[slots]`, as in `RouteParams`.
        offsets: *const i32,
        slot_of_place: *const i32,
        experts: i32,
        /// Tokens are done chunk by chunk: `chunks` of them, `chunk_tokens` each but the last.
        chunks: i32,
        chunk_tokens: i32,
        /// Room for blocks of 64 tokens in a CTA, no fewer than any has.
        token_blocks: i32,
        /// Panels that have a buffer, `[slots, 128]` each.
        buffers: i32,
        slots: i32,
        /// i32 `[2, chunks * hidden / 128]`, 0 before the launch: CTAs that have written a panel, and that have read it.
        counters: *mut i32,
    }
}
