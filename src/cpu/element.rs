//! The element types of tensors that the CPU kernels read and write, and the choice among them by a `Dtype` value.

use half::{bf16, f16};

/// An element type that the CPU kernels read and write.
pub trait Element: Copy + Send + Sync + 'static {
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(x: f32) -> Self;
}

impl Element for f32 {
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Element for f16 {
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
}

impl Element for bf16 {
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
}

/// Calls a function that is generic in the element type for a `Dtype` value.
macro_rules! for_dtype {
    ($dtype:expr, $T:ident => $call:expr) => {
        match $dtype {
            crate::params::Dtype::F32 => {
                type $T = f32;
                $call
            }
            crate::params::Dtype::F16 => {
                type $T = half::f16;
                $call
            }
            crate::params::Dtype::Bf16 => {
                type $T = half::bf16;
                $call
            }
            other => unreachable!("no such dtype: {other:?}"),
        }
    };
}
pub(crate) use for_dtype;
