//! Experts whose weights are plain numbers of bf16, f16 or f32.

use super::Source;
use crate::contract;
use crate::desc::LayerDesc;
use crate::device::gpu;
use crate::error::Result;
use crate::moe::layer::{Layer, Matrix};
use crate::moe::operands::{check_biases, check_sizes, check_w2, intermediate_size, Operands};
use crate::moe::options::Options;
use crate::moe::weight_maps;
use crate::quant::Format;
use crate::tensor::{Contract, Dim, Elem, Place};

/// Plain weights of this element type.
#[derive(Clone, Copy, Debug)]
pub struct Plain(pub Elem);

impl Source for Plain {
    /// Describes the layer. Biases may be fp32 or of the weights' dtype.
    fn layer(&self, operands: &Operands<'_>, options: &Options<'_, '_>) -> Result<Layer> {
        let Plain(elem) = *self;
        let Operands { w13, w2, b13, b2, scales } = operands;
        let (layout, activation, gated) = (options.layout()?, options.activation()?, options.gated());
        let Some(dtype) = elem.dtype() else { contract!("w13: {elem} is no compute type") };
        let format = Format::plain(dtype);
        if scales.is_some() {
            contract!("w13_scale and w2_scale: format {:?} has no scales", format.spec().name);
        }
        let mut contract = Contract::new();
        contract.check(
            "w13",
            w13,
            &[Dim::Named("experts"), Dim::Named("rows of w13"), Dim::Named("hidden")],
            &[elem],
        )?;
        let (experts, rows, hidden) = (w13.shape()[0], w13.shape()[1], w13.shape()[2]);
        let intermediate = intermediate_size(w13, gated)?;
        check_w2(
            &mut contract,
            w13,
            w2,
            &[Dim::Named("experts"), Dim::Named("hidden"), Dim::Is("intermediate", intermediate)],
            &[elem],
            gated,
        )?;
        check_biases(&mut contract, operands, Dim::Named("hidden"), &[elem, Elem::F32])?;
        check_sizes(w13, hidden)?;
        let up = Matrix::new(w13, b13, dtype, (rows, hidden));
        let down = Matrix::new(w2, b2, dtype, (hidden, intermediate));
        let desc = LayerDesc { experts, hidden, intermediate, gated, dtype, format };
        let mut layer = Layer::described((desc, w13.place), [up, down], (layout, activation));
        if let Place::Cuda(ordinal) = layer.place {
            format.require_cuda()?;
            for (name, t) in [("w13", w13), ("w2", w2)] {
                if !(t.data as usize).is_multiple_of(16) {
                    contract!(
                        "{name}: must start at a multiple of 16 bytes, got address {:p}; pass {name}.clone()",
                        t.data
                    );
                }
            }
            let gpu = gpu(ordinal)?;
            layer.up_maps = weight_maps::encode(&gpu.device, &layer.desc, layer.up.extent(), gated, layout)?;
            layer.down_maps = weight_maps::encode(&gpu.device, &layer.desc, layer.down.extent(), false, layout)?;
        }
        Ok(layer)
    }
}
