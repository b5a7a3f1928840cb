//! Tensor maps. Only this module calls cuTensorMapEncodeTiled.

use crate::device::cuda_error;
use crate::error::Result;
use cudarc::driver::sys;

/// A tensor map as a kernel takes it (`const __grid_constant__ CUtensorMap`).
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct TensorMap(pub sys::CUtensorMap);

// SAFETY: a tensor map is 128 bytes of plain data.
unsafe impl Send for TensorMap {}
// SAFETY: a tensor map is 128 bytes of plain data.
unsafe impl Sync for TensorMap {}

/// e4m3 rows [rows, columns] in boxes of 64 rows x 128 columns, in the 128-byte swizzle. Rows beyond the last are read as zeros.
pub fn encode_rows_e4m3(base: *const u8, rows: u64, columns: u64) -> Result<TensorMap> {
    use sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8;
    encode(base, CU_TENSOR_MAP_DATA_TYPE_UINT8, &[columns, rows], &[columns], &[128, 64])
}

/// One dimension after the contiguous one: (size, distance in rows of the matrix, box).
pub type Dim = (u64, u64, u32);

/// A matrix of 2-byte elements with `columns` contiguous columns, read in boxes of 64 columns (128 bytes) in the 128-byte swizzle. The
/// other dimensions need not be ordered by their distance. So gate and up rows are interleaved without repacking.
pub fn encode_16bit(base: *const u8, bf16: bool, columns: u64, dims: &[Dim; 4]) -> Result<TensorMap> {
    use sys::CUtensorMapDataType::{CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16};
    let mut sizes = [columns; 5];
    let mut strides = [0u64; 4];
    let mut boxes = [64u32; 5];
    for (i, &(size, rows, extent)) in dims.iter().enumerate() {
        sizes[i + 1] = size;
        strides[i] = rows * columns * 2;
        boxes[i + 1] = extent;
    }
    let kind = if bf16 { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 } else { CU_TENSOR_MAP_DATA_TYPE_FLOAT16 };
    encode(base, kind, &sizes, &strides, &boxes)
}

/// Makes a map of up to five dimensions. `sizes` and `boxes` are those of each dimension, and `strides` in bytes those of each dimension
/// but the first.
fn encode(
    base: *const u8,
    kind: sys::CUtensorMapDataType,
    sizes: &[u64],
    strides: &[u64],
    boxes: &[u32],
) -> Result<TensorMap> {
    use sys::*;
    debug_assert!(sizes.len() <= 5 && strides.len() + 1 == sizes.len() && boxes.len() == sizes.len());
    let steps = [1u32; 5];
    let mut map = std::mem::MaybeUninit::<CUtensorMap>::zeroed();
    // SAFETY: sizes, boxes and steps have as many elements as the rank, and strides has one less. The call writes the map. The driver
    // checks the values themselves and reports CUDA_ERROR_INVALID_VALUE.
    unsafe {
        cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            kind,
            sizes.len() as u32,
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
