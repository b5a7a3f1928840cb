//! The contract of MXFP4 experts, and the packed form that GPUs read.

use super::{mxfp4_a8, Source};
use crate::contract;
use crate::desc::LayerDesc;
use crate::device::gpu;
use crate::error::{Error, Result};
use crate::moe::layer::{Layer, Matrix};
use crate::moe::operands::{check_biases, check_sizes, check_w2, intermediate_size, Operands, PackedTensors};
use crate::moe::options::Options;
use crate::moe::packing::{self, NewPacked, OP};
use crate::moe::plan;
use crate::params::{Dtype, PackMxfp4Params};
use crate::quant::blocks::Blocks;
use crate::quant::mxfp4::{BLOCK, BLOCKS, PACKERS};
use crate::quant::ops::check_vectors;
use crate::quant::packed::{self, Extent, Packers};
use crate::quant::{self, Format, Packing};
use crate::tensor::{self, check_dtype, Borrowed, Contract, Dim, Elem, Place, View};
use crate::variants::Form;
use pyo3::prelude::*;

const CODES: [Elem; 3] = [Elem::U8, Elem::I8, Elem::E2M1_X2];
pub const SCALES: [Elem; 3] = [Elem::U8, Elem::E8M0, Elem::F32];
pub const BIASES: [Elem; 3] = [Elem::Bf16, Elem::F16, Elem::F32];

/// The properties of MXFP4 experts that codes, scales and biases do not show.
#[derive(Clone, Debug)]
pub struct Spec {
    pub dtype: Dtype,
    /// Whether activations are quantised to e4m3.
    pub e4m3: bool,
    /// Columns of x and of the output, at most H. None means H. Weights beyond these columns are padding that is never read.
    pub hidden: Option<i64>,
    /// Whether packing overwrites the given tensors with the packed form.
    pub in_place: bool,
}

impl Source for Spec {
    /// Checks w13 [E, 2I, H / 2], w2 [E, H, I / 2], their scales [E, 2I, H / 32] and [E, H, I / 32], and biases.
    fn layer(&self, operands: &Operands<'_>, options: &Options<'_, '_>) -> Result<Layer> {
        let Spec { dtype, e4m3, hidden, .. } = *self;
        let Operands { w13, w2, b13, b2, scales } = operands;
        let (layout, activation, gated) = (options.layout()?, options.activation()?, options.gated());
        if w13.place != Place::Cpu && dtype != Dtype::Bf16 {
            return Err(Error::Unsupported(format!(
                "dtype: {:?} for mxfp4 experts on {}; supported there: \"bf16\" (others run on CPU tensors)",
                quant::name(dtype),
                w13.place
            )));
        }
        if e4m3 && dtype != Dtype::Bf16 {
            return Err(Error::Unsupported(format!(
                "dtype: {:?} for mxfp4 experts with activation_dtype float8_e4m3fn; supported: \"bf16\"",
                quant::name(dtype)
            )));
        }
        let Some([w13_scale, w2_scale]) = scales else {
            contract!("w13_scale and w2_scale: both are needed for format \"mxfp4\"");
        };
        let (block, experts) = (BLOCK as i64, Dim::Named("experts"));
        let mut contract = Contract::new();
        for (name, codes) in [("w13", w13), ("w2", w2)] {
            refuse_blocks(name, codes)?;
        }
        contract.check("w13", w13, &[experts, Dim::Named("rows of w13"), Dim::Named("hidden / 2")], &CODES)?;
        let (rows, columns, intermediate) = (w13.shape()[1], 2 * w13.shape()[2], intermediate_size(w13, gated)?);
        check_sizes(w13, columns)?;
        for (name, size, dimension) in [("hidden", columns, 2), ("intermediate", intermediate, 1)] {
            if size % block != 0 {
                contract!("w13: dimension {dimension} gives {name} {size}, expected a multiple of {block} (a block has one scale)");
            }
        }
        let (of_hidden, of_intermediate) =
            (Dim::Is("hidden / 32", columns / block), Dim::Is("intermediate / 32", intermediate / block));
        let (columns_of_x, rows_of_w2) = (hidden.unwrap_or(columns), Dim::Is("hidden", columns));
        check_w2(
            &mut contract,
            w13,
            w2,
            &[experts, rows_of_w2, Dim::Is("intermediate / 2", intermediate / 2)],
            &CODES,
            gated,
        )?;
        contract.check("w13_scale", w13_scale, &[experts, Dim::Named("rows of w13"), of_hidden], &SCALES)?;
        contract.check("w2_scale", w2_scale, &[experts, rows_of_w2, of_intermediate], &SCALES)?;
        check_biases(&mut contract, operands, rows_of_w2, &BIASES)?;
        if !(1..=columns).contains(&columns_of_x) {
            contract!("hidden_size: expected 1 to {columns} (from w13), got {columns_of_x}");
        }
        let [up, down] = [
            (w13, w13_scale, b13, columns, (rows, columns_of_x)),
            (w2, w2_scale, b2, intermediate, (columns, intermediate)),
        ]
        .map(|(t, scales, bias, columns, size)| Matrix {
            blocks: Some(Blocks::new(&BLOCKS, scales.data, columns as usize / BLOCK)),
            ..Matrix::new(t, bias, dtype, size)
        });
        let experts = w13.shape()[0];
        let format = if e4m3 { Format::Mxfp4A8 } else { Format::Mxfp4 };
        let desc = LayerDesc { experts, hidden: columns_of_x, intermediate, gated, dtype, format };
        let mut layer = Layer::described((desc, w13.place), [up, down], (layout, activation));
        if e4m3 {
            match layer.place {
                Place::Cuda(ordinal) => plan::require(&layer.desc, &gpu(ordinal)?.device)?,
                Place::Cpu => {
                    for (matrix, used_rows) in [(&mut layer.up, rows), (&mut layer.down, columns_of_x)] {
                        let Some(blocks) = &mut matrix.blocks else { continue };
                        // SAFETY: the contract has checked that the scales have these shapes.
                        let least =
                            unsafe { mxfp4_a8::least_scales(blocks, experts, (matrix.rows, used_rows), matrix.k) };
                        blocks.least = least.as_ptr();
                        layer.least_scales.push(least);
                    }
                }
            }
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
        pack(layer, contract, operands, PACKERS, self.in_place)
    }
}

/// Refuses codes in blocks, as GPT-OSS's checkpoint has them, and says how to pass them. They are the same bytes as rows.
fn refuse_blocks(name: &str, codes: &View) -> Result<()> {
    let &[experts, rows, blocks, bytes] = codes.shape() else { return Ok(()) };
    check_dtype(name, codes, &CODES)?;
    if bytes != BLOCK as i64 / 2 {
        return Ok(());
    }
    contract!(
        "{name}: expected 3 dimensions [experts, rows, columns / 2], got shape {:?}, which has the codes in blocks; pass {name}.reshape({experts}, {rows}, {})",
        codes.shape(),
        blocks * bytes
    )
}

/// Packs a CUDA layer's weights, into new tensors or into those of `operands`; `layer` then describes the packed form.
pub fn pack<'py>(
    layer: &mut Layer,
    contract: &mut Contract<'_>,
    operands: &Operands<'py>,
    packers: Packers,
    in_place: bool,
) -> Result<[PackedTensors<'py>; 2]> {
    let Some([up_scale, down_scale]) = &operands.scales else {
        contract!("w13_scale and w2_scale: both are needed for format {:?}", layer.desc.format.spec().name);
    };
    let Some(Packing { form, .. }) = layer.desc.format.spec().packing else {
        contract!("format {:?} has no packed form", layer.desc.format.spec().name);
    };
    let up = Unpacked { form, packers, names: ["w13", "w13_scale"], codes: &operands.w13, scales: up_scale };
    let down = Unpacked { form, packers, names: ["w2", "w2_scale"], codes: &operands.w2, scales: down_scale };
    let params = [up.params(layer, true), down.params(layer, false)];
    for (source, p) in [&up, &down].into_iter().zip(&params) {
        source.check(p, in_place)?;
    }
    // The contract must hold before anything is written.
    contract.finish()?;
    let [mut up_params, mut down_params] = params;
    let up = up.pack(&mut layer.up, contract, &mut up_params, in_place)?;
    Ok([up, down.pack(&mut layer.down, contract, &mut down_params, in_place)?])
}

/// A matrix to be packed: its names, codes and scales.
struct Unpacked<'a, 'py> {
    form: Form,
    packers: Packers,
    names: [&'static str; 2],
    codes: &'a Borrowed<'py>,
    scales: &'a Borrowed<'py>,
}

/// Most bytes of codes that packing in place copies at a time. It copies at least one expert's codes.
const SCRATCH: usize = 32 << 20;

impl<'py> Unpacked<'_, 'py> {
    /// The parameters of packing, without the outputs.
    fn params(&self, layer: &Layer, up: bool) -> PackMxfp4Params {
        let matrix = if up { &layer.up } else { &layer.down };
        PackMxfp4Params {
            codes: self.codes.data,
            scales: self.scales.data,
            row_blocks: matrix.blocks.map_or(0, |b| b.row_blocks) as i32,
            experts: layer.desc.experts as i32,
            rows: matrix.rows as i32,
            used_rows: if up { matrix.rows } else { layer.desc.hidden } as i32,
            k: matrix.k as i32,
            gated: up && layer.desc.gated,
            layout: layer.layout,
            packed_codes: std::ptr::null_mut(),
            packed_scales: std::ptr::null_mut(),
            expert_scales: std::ptr::null_mut(),
            e4m3: layer.desc.format == Format::Mxfp4A8,
        }
    }

    fn check(&self, p: &PackMxfp4Params, in_place: bool) -> Result<()> {
        for (name, tensor) in self.names.into_iter().zip([self.codes, self.scales]) {
            check_vectors(name, tensor)?;
        }
        if in_place && !packed::fits_in_place(Extent::of(self.form, p), p) {
            contract!(
                "{}: in_place needs rows and columns that are multiples of 64, and a hidden_size within the last 64, got {} rows, {} columns of which {} are used",
                self.names[0], p.rows, p.row_blocks * BLOCK as i32, p.k
            );
        }
        Ok(())
    }

    fn pack(
        &self,
        matrix: &mut Matrix,
        contract: &mut Contract<'_>,
        p: &mut PackMxfp4Params,
        in_place: bool,
    ) -> Result<PackedTensors<'py>> {
        let (given, form, packers, extent) = (self.codes, self.form, self.packers, Extent::of(self.form, p));
        let stream = packing::stream(self.names[0], given, contract)?;
        let made = if in_place {
            let one = Extent { experts: 1, ..extent };
            let at_once = (SCRATCH / one.code_bytes()).clamp(1, p.experts as usize) as i64;
            let mut new = |shape: &[i64], elem| packing::new_tensor(contract, given, shape, elem);
            let factors = new(&[extent.experts], Elem::F32)?;
            // The scratch tensors are freed after the launches. That is safe: torch's caching allocator reuses them in stream order.
            let scratch_codes = new(&[at_once * one.code_bytes() as i64], Elem::U8)?;
            let scratch_scales = new(&[at_once * one.scale_bytes() as i64], Elem::U8)?;
            (p.packed_codes, p.packed_scales, p.expert_scales) = (p.codes, p.scales, factors.data.cast());
            packed::launch_peak(&stream, OP, packers, p)?;
            let scratch = [scratch_codes.data, scratch_scales.data];
            // SAFETY: the extents of both forms are equal (`check`); the scratch is new.
            unsafe { packed::pack_in_place(&stream, OP, (form, packers.pack), p, scratch, at_once as i32)? };
            NewPacked { codes: self.codes.clone(), scales: self.scales.clone(), factors }
        } else {
            let made = NewPacked::new(contract, given, &extent, p.gated)?;
            (p.packed_codes, p.packed_scales) = (made.codes.data, made.scales.data);
            p.expert_scales = made.factors.data.cast();
            packed::launch_peak(&stream, OP, packers, p)?;
            packed::launch_pack(&stream, OP, packers.pack, extent, &*p)?;
            made
        };
        Ok(made.describe(form, self.names, matrix))
    }
}

/// The error for MXFP4 and MXFP8 weights on CUDA that would have to be packed at every call.
pub fn refuse_bare(w13: &Bound<'_, PyAny>, format: Format) -> Result<()> {
    let name = if format == Format::Mxfp8 { "mxfp8" } else { "mxfp4" };
    match tensor::describe("w13", w13)?.place {
        Place::Cpu => Ok(()),
        place => Err(Error::Unsupported(format!(
            "{name} experts on {place} as bare tensors; supported there: oxmoe.moe with an ExpertWeights.{name}, which packs them once"
        ))),
    }
}
