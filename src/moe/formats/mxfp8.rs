//! The contract of MXFP8 experts.

use super::mxfp4::{self, BIASES, SCALES};
use super::Source;
use crate::contract;
use crate::desc::LayerDesc;
use crate::device::gpu;
use crate::error::Result;
use crate::moe::layer::{Layer, Matrix};
use crate::moe::operands::{check_biases, check_sizes, check_w2, intermediate_size, Operands, PackedTensors};
use crate::moe::options::Options;
use crate::moe::plan;
use crate::params::Dtype;
use crate::quant::blocks::Blocks;
use crate::quant::mxfp8::{BLOCK, BLOCKS, PACKERS};
use crate::quant::Format;
use crate::tensor::{Contract, Dim, Elem, Place};

const CODES: [Elem; 2] = [Elem::E4M3, Elem::U8];

/// The properties of MXFP8 experts that codes, scales and biases do not show.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Columns of x and of the output, at most H. None means H. Weights beyond these columns are padding that is never read.
    pub hidden: Option<i64>,
    /// Whether packing overwrites the given tensors with the packed form.
    pub in_place: bool,
}

impl Source for Spec {
    /// Checks w13 [E, 2I, H], w2 [E, H, I], their scales [E, 2I, H / 32] and [E, H, I / 32], and biases.
    fn layer(&self, operands: &Operands<'_>, options: &Options<'_, '_>) -> Result<Layer> {
        let Operands { w13, w2, b13, b2, scales } = operands;
        let (layout, activation, gated) = (options.layout()?, options.activation()?, options.gated());
        let Some([w13_scale, w2_scale]) = scales else {
            contract!("w13_scale and w2_scale: both are needed for format \"mxfp8\"");
        };
        let (block, experts) = (BLOCK as i64, Dim::Named("experts"));
        let mut contract = Contract::new();
        contract.check("w13", w13, &[experts, Dim::Named("rows of w13"), Dim::Named("hidden")], &CODES)?;
        let (rows, columns, intermediate) = (w13.shape()[1], w13.shape()[2], intermediate_size(w13, gated)?);
        check_sizes(w13, columns)?;
        for (name, size, dimension) in [("hidden", columns, 2), ("intermediate", intermediate, 1)] {
            if size % block != 0 {
                contract!("w13: dimension {dimension} gives {name} {size}, expected a multiple of {block} (a block has one scale)");
            }
        }
        let (of_hidden, of_intermediate) =
            (Dim::Is("hidden / 32", columns / block), Dim::Is("intermediate / 32", intermediate / block));
        check_w2(
            &mut contract,
            w13,
            w2,
            &[experts, Dim::Named("hidden"), Dim::Is("intermediate", intermediate)],
            &CODES,
            gated,
        )?;
        contract.check("w13_scale", w13_scale, &[experts, Dim::Named("rows of w13"), of_hidden], &SCALES)?;
        contract.check("w2_scale", w2_scale, &[experts, Dim::Named("hidden"), of_intermediate], &SCALES)?;
        check_biases(&mut contract, operands, Dim::Named("hidden"), &BIASES)?;
        let columns_of_x = self.hidden.unwrap_or(columns);
        if !(1..=columns).contains(&columns_of_x) || columns_of_x % block != 0 {
            contract!("hidden_size: expected a multiple of {block} up to {columns} (from w13), got {columns_of_x}");
        }
        let [up, down] = [
            (w13, w13_scale, b13, columns, (rows, columns_of_x)),
            (w2, w2_scale, b2, intermediate, (columns, intermediate)),
        ]
        .map(|(t, scales, bias, columns, size)| Matrix {
            blocks: Some(Blocks::new(&BLOCKS, scales.data, columns as usize / BLOCK)),
            ..Matrix::new(t, bias, Dtype::Bf16, size)
        });
        let (experts, dtype, format) = (w13.shape()[0], Dtype::Bf16, Format::Mxfp8);
        let desc = LayerDesc { experts, hidden: columns_of_x, intermediate, gated, dtype, format };
        let layer = Layer::described((desc, w13.place), [up, down], (layout, activation));
        if let Place::Cuda(ordinal) = layer.place {
            plan::require(&layer.desc, &gpu(ordinal)?.device)?;
        }
        Ok(layer)
    }

    fn has_e8m0_scales(&self) -> bool {
        true
    }

    fn in_place(&self) -> bool {
        self.in_place
    }

    fn pack<'py>(
        &self,
        layer: &mut Layer,
        contract: &mut Contract<'_>,
        operands: &Operands<'py>,
    ) -> Result<[PackedTensors<'py>; 2]> {
        mxfp4::pack(layer, contract, operands, PACKERS, self.in_place)
    }
}
