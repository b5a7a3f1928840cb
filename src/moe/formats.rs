//! Formats of a layer's weights. Each format has its own file here, with the constructor, the checks of its tensors, and the packing for
//! GPUs. Another file of the format, in `quant`, defines its numbers.

pub mod fp8;
pub mod fp8_tensor;
mod int4;
pub mod mxfp4;
mod mxfp4_a8;
pub mod mxfp8;
pub mod nvfp4;
mod nvfp4_gpu;
pub mod plain;

use super::layer::Layer;
use super::operands::{Operands, PackedTensors};
use super::options::Options;
use super::packing;
use crate::error::Result;
use crate::tensor::Contract;
use pyo3::prelude::*;

/// The properties of a layer's weights that a constructor or a call gives beside the tensors. Each format has a type of its own for them.
pub trait Source {
    /// Checks the tensors, and describes the layer.
    fn layer(&self, operands: &Operands<'_>, options: &Options<'_, '_>) -> Result<Layer>;

    /// Whether scales of blocks are powers of two. Scales that are given in fp32 then become E8M0 bytes.
    fn has_e8m0_scales(&self) -> bool {
        false
    }

    /// Whether packing overwrites the given weights and scales with the packed form.
    fn in_place(&self) -> bool {
        false
    }

    /// Packs a CUDA layer's weights; `layer` then describes the packed form.
    fn pack<'py>(
        &self,
        layer: &mut Layer,
        contract: &mut Contract<'_>,
        operands: &Operands<'py>,
    ) -> Result<[PackedTensors<'py>; 2]> {
        packing::pack_both(layer, contract, operands)
    }
}

/// Adds the constructors that formats have in their own files to `ExpertWeights`.
pub fn add_constructors(class: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = class.py();
    let staticmethod = py.import("builtins")?.getattr("staticmethod")?;
    for constructor in [pyo3::wrap_pyfunction!(nvfp4::nvfp4, py)?, pyo3::wrap_pyfunction!(int4::int4, py)?] {
        let name: String = constructor.getattr("__name__")?.extract()?;
        class.setattr(name, staticmethod.call1((constructor,))?)?;
    }
    Ok(())
}

/// Checks the tensors of a layer, and describes it.
pub fn layer(operands: &Operands<'_>, source: &dyn Source, options: &Options<'_, '_>) -> Result<Layer> {
    let mut layer = source.layer(operands, options)?;
    if options.scalars.of_experts() {
        layer.per_expert = options.scalars.pointers(layer.place, layer.desc.experts, options.clamp == "after")?;
    }
    Ok(layer)
}
