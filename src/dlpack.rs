//! The DLPack 1.x ABI as far as an importing library needs it (github.com/dmlc/dlpack, include/dlpack/dlpack.h).

use std::ffi::{c_char, c_void, CStr};

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRef {
    pub device_type: i32,
    pub device_id: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    pub data: *mut c_void,
    pub device: DeviceRef,
    pub ndim: i32,
    pub dtype: DataType,
    pub shape: *mut i64,
    /// Strides in elements. Null means row-major contiguous.
    pub strides: *mut i64,
    pub byte_offset: u64,
}

#[repr(C)]
pub struct Managed {
    pub tensor: Tensor,
    pub manager: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
pub struct ManagedVersioned {
    pub version: Version,
    pub manager: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    pub flags: u64,
    pub tensor: Tensor,
}

type SetError = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char);

/// The table that a tensor type publishes as `__dlpack_c_exchange_api__`. Every function needs the GIL, and returns 0, or -1 with a Python
/// error set.
#[repr(C)]
pub struct ExchangeApi {
    pub version: Version,
    pub previous: *mut ExchangeApi,
    pub allocate: Option<unsafe extern "C" fn(*mut Tensor, *mut *mut ManagedVersioned, *mut c_void, SetError) -> i32>,
    pub managed_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut *mut ManagedVersioned) -> i32>,
    pub managed_to_object: Option<unsafe extern "C" fn(*mut ManagedVersioned, *mut *mut c_void) -> i32>,
    /// Fills a borrowed tensor whose shape and strides point into the object.
    pub tensor_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut Tensor) -> i32>,
    pub current_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> i32>,
}

/// Flag of a versioned tensor whose memory must not be written.
pub const READ_ONLY: u64 = 1;

pub const CPU: i32 = 1;
pub const CUDA: i32 = 2;
pub const EXCHANGE_CAPSULE: &CStr = c"dlpack_exchange_api";
pub const CAPSULE: &CStr = c"dltensor";
pub const CAPSULE_VERSIONED: &CStr = c"dltensor_versioned";

const _: () =
    assert!(size_of::<Tensor>() == 48 && size_of::<ManagedVersioned>() == 80 && size_of::<ExchangeApi>() == 56);
const _: () =
    assert!(std::mem::offset_of!(Tensor, byte_offset) == 40 && std::mem::offset_of!(ManagedVersioned, tensor) == 32);
