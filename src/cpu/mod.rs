//! The kernels of `csrc/` on host memory: they take the same parameter structs and give the same results up to rounding.
//!
//! A row's bits depend on that row, the weights and the instruction set only: never on the batch around it, the
//! schedule or the number of threads.

mod activation;
mod allreduce;
mod combine;
mod e4m3;
pub mod element;
mod gemm;
pub mod instructions;
mod mm_mxfp8;
mod mxfp8;
pub mod narrow;
mod pack_mxfp4;
mod quantize_fp8;
mod quantize_mxfp8;
mod quantize_nvfp4;
mod ragged;
mod round_nvfp4;
mod route;
mod schedule;
mod select;

pub use activation::is_gated;
pub use allreduce::{canonical, contribute, reduce_rows, Contribution, Quantise, ReduceRows, ScaleLayout};
pub use combine::combine;
pub use e4m3::{quantize_rows_e4m3, round_rows_to_e4m3};
use element::for_dtype;
pub use element::Element;
pub use gemm::{grouped_gemm, grouped_gemm_on};
pub use instructions::{instruction_set, InstructionSet};
pub use mm_mxfp8::mm_mxfp8;
pub use mxfp8::round_rows_mxfp8;
#[cfg(test)]
pub use narrow::{e2m1, e4m3_value};
pub use pack_mxfp4::{pack_mxfp4, unpack_mxfp4};
pub use quantize_fp8::{expand_scales, quantize_fp8};
pub use quantize_mxfp8::{dequantize_mxfp8, quantize_mxfp8};
pub use quantize_nvfp4::quantize_nvfp4;
pub use ragged::ragged;
pub use round_nvfp4::round_to_nvfp4;
pub use route::route;
pub use schedule::{cut, schedule};
pub use select::select;

#[cfg(test)]
mod tests;

/// # Safety
/// `data` must be valid for reads of `len` values. If `len` is 0, `data` may be any pointer.
pub(crate) unsafe fn slice<'a, T>(data: *const T, len: usize) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts(data, len) }
}

/// # Safety
/// `data` must be valid for reads and writes of `len` values that nothing else refers to. If `len` is 0, `data` may be any pointer.
pub(crate) unsafe fn slice_mut<'a, T>(data: *mut T, len: usize) -> &'a mut [T] {
    if len == 0 {
        return &mut [];
    }
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts_mut(data, len) }
}

/// Lets worker threads share a parameter struct. Each thread writes only the rows it was given.
struct Shared<'a, P>(&'a P);

impl<'a, P> Shared<'a, P> {
    /// NOTE: a closure that names the field instead would capture the bare reference.
    fn get(&self) -> &'a P {
        self.0
    }
}

macro_rules! shared_between_threads {
    ($($params:path),* $(,)?) => {$(
        // SAFETY: the struct is plain data. Only kernels, and CPU loops within their own bounds, follow the addresses in it. The loops
        // divide the memory that they write among their tasks.
        unsafe impl Send for $params {}
        // SAFETY: the struct is plain data, and the loops divide the memory that they write among their tasks.
        unsafe impl Sync for $params {}
    )*};
}
shared_between_threads!(
    Contribution,
    ReduceRows,
    crate::params::CombineParams,
    crate::params::ExpandScalesParams,
    crate::params::GroupedGemmParams,
    crate::params::MmMxfp8Params,
    crate::params::PackMxfp4Params,
    crate::params::QuantizeFp8Params,
    crate::params::QuantizeMxfp8Params,
    crate::params::QuantizeNvfp4Params,
    crate::params::QuantizeRowsParams,
    crate::params::RaggedParams,
    crate::params::RoundNvfp4Params,
    crate::params::RouteParams,
    crate::params::ScheduleParams,
    crate::params::SelectParams,
);
