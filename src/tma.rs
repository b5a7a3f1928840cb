//! Tensor maps: the only caller of cuTensorMapEncodeTiled.

use crate::device::cuda_error;
use crate::error::Result;
use cudarc::driver::sys;

/// A tensor map as a kernel takes it (`const __grid_constant__ CUtensorMap`).
#[derive(Clone, Copy, Debug)]
pub struct TensorMap(pub sys::CUtensorMap);

// SAFETY: 128 bytes of plain data.
unsafe impl Send for TensorMap {}
// SAFETY: as above.
unsafe impl Sync for TensorMap {}

/// One dimension after the contiguous one: (size, distance in rows of the matrix, box).
pub type Dim = (u64, u64, u32);

/// A matrix of 2-byte elements with `columns` contiguous columns, read in boxes of 64 columns (128 bytes) in the 128-byte swizzle.
/// The other dimensions need not be ordered by their distance: that is how gate and up rows are interleaved without repacking.
pub fn encode_16bit(base: *const u8, bf16: bool, columns: u64, dims: &[Dim; 4]) -> Result<TensorMap> {
    use sys::*;
    let mut sizes = [columns; 5];
    let mut strides = [0u64; 4];
    let mut boxes = [64u32; 5];
    for (i, &(size, rows, extent)) in dims.iter().enumerate() {
        sizes[i + 1] = size;
        strides[i] = rows * columns * 2;
        boxes[i + 1] = extent;
    }
    let kind = if bf16 {
        CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    } else {
        CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    };
    let steps = [1u32; 5];
    let mut map = std::mem::MaybeUninit::<CUtensorMap>::zeroed();
    // SAFETY: five sizes, boxes and steps and four strides are given for rank 5; the map is written by the call. The driver checks the
    // values themselves and reports CUDA_ERROR_INVALID_VALUE.
    unsafe {
        cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            kind,
            5,
            base.cast_mut().cast(),
            sizes.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            steps.as_ptr(),
            CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        .result()
        .map_err(|e| {
            cuda_error(format_args!("cuTensorMapEncodeTiled, sizes {sizes:?}, strides {strides:?}, box {boxes:?}"), e)
        })?;
        Ok(TensorMap(map.assume_init()))
    }
}
