//! Weight formats. A format is a value: what the weights are made of. New ones are rows here.

pub mod e2m1;
pub mod layouts;
pub mod mxfp4;
pub mod ops;

use crate::params::Dtype;

/// What a format's weights are made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantSpec {
    /// The name in `ExpertWeights.<name>` and on the command line.
    pub name: &'static str,
    /// Type that activations have and products are taken in.
    pub compute: Dtype,
    /// Weight bits with scales, for the roofline.
    pub bits_per_weight: f64,
    /// Whether CUDA kernels exist.
    pub cuda: bool,
}

pub const FORMATS: [QuantSpec; 3] = [
    QuantSpec { name: "bf16", compute: Dtype::Bf16, bits_per_weight: 16.0, cuda: true },
    QuantSpec { name: "f16", compute: Dtype::F16, bits_per_weight: 16.0, cuda: true },
    QuantSpec { name: "f32", compute: Dtype::F32, bits_per_weight: 32.0, cuda: false },
];

pub fn by_name(name: &str) -> Option<&'static QuantSpec> {
    FORMATS.iter().find(|f| f.name == name)
}

pub fn name(dtype: Dtype) -> &'static str {
    FORMATS.iter().find(|f| f.compute == dtype).map_or("unknown", |f| f.name)
}
