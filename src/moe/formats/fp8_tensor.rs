//! e4m3 experts whose matrices have one scale, or one for each row: the block scales that kernels read, and the scales of activations.

use super::fp8::{pads, Activations, Scaling};
use crate::contract;
use crate::desc::LayerDesc;
use crate::error::{Error, Result};
use crate::moe::operands::Extra;
use crate::params::Dtype;
use crate::quant::fp8::{GROUP, LEAST_COLUMNS};
use crate::quant::Format;
use crate::tensor::{self, Borrowed, Contract, Dim, Elem, Origin, Place, View};
use pyo3::prelude::*;

pub struct Fp8Tensor<'py> {
    /// Scales of w13 and w2, one for each 128 x 128 block.
    pub tables: [Bound<'py, PyAny>; 2],
    /// Scales of each row of w13 and w2. If there are any, the table of the matrix has ones.
    rows: [Option<Borrowed<'py>>; 2],
    /// b13 with zeros up to whole blocks, if kernels read whole blocks alone.
    bias: Option<Borrowed<'py>>,
    activations: Activations,
    /// The scales at which `Activations::Static` points.
    scales: Option<[Borrowed<'py>; 2]>,
}

const OF_ROWS: [&str; 2] = ["w13_scale", "w2_scale"];
const OF_ACTIVATIONS: [&str; 2] = ["a13_scale", "a2_scale"];

impl<'py> Fp8Tensor<'py> {
    pub fn scaling(&self) -> Scaling {
        let address =
            |rows: &Option<Borrowed<'_>>| rows.as_ref().map_or(std::ptr::null(), |t| t.data.cast_const().cast());
        let bias = self.bias.as_ref().map_or(std::ptr::null(), |bias| bias.data.cast_const());
        Scaling { activations: self.activations, rows: self.rows.each_ref().map(address), bias }
    }

    /// The tensors that the layer reads beside the tables.
    pub fn tensors(&self) -> Vec<Extra<'py>> {
        let rows = OF_ROWS.into_iter().zip(&self.rows).filter_map(|(name, rows)| Some((name, rows.clone()?)));
        let scales = self.scales.iter().flatten().cloned();
        let bias = self.bias.iter().map(|bias| ("b13", bias.clone()));
        rows.chain(OF_ACTIVATIONS.into_iter().zip(scales)).chain(bias).collect()
    }

    /// Makes attributes of the tensors that are read: the scales of rows in place of the tables of w13 and w2, the scales of activations,
    /// and b13 in whole blocks.
    pub fn show(self, [w13_scale, w2_scale, a13_scale, a2_scale, b13]: [&mut Option<Py<PyAny>>; 5]) {
        let object = |tensor: Borrowed<'_>| Some(tensor.into_object().unbind());
        if let Some(bias) = self.bias {
            *b13 = object(bias);
        }
        for (rows, attribute) in self.rows.into_iter().zip([w13_scale, w2_scale]) {
            if let Some(rows) = rows {
                *attribute = object(rows);
            }
        }
        if let Some([x, hidden]) = self.scales {
            (*a13_scale, *a2_scale) = (object(x), object(hidden));
        }
    }
}

/// Makes the block scales that kernels read. `given`: scales of activations, both or none. If there are none, activations get a scale for
/// each row, or with `per_token` false one scale for all rows of a call.
pub fn prepare<'py>(
    contract: &mut Contract<'_>,
    (w13, w2, b13): (&Bound<'py, PyAny>, &Bound<'py, PyAny>, Option<&Bound<'py, PyAny>>),
    scales: [Option<&Bound<'py, PyAny>>; 2],
    given: [Option<&Bound<'py, PyAny>>; 2],
    per_token: Option<bool>,
    gated: bool,
) -> Result<Fp8Tensor<'py>> {
    let [Some(w13_scale), Some(w2_scale)] = scales else {
        contract!("w13_scale and w2_scale: both are needed for format \"fp8_tensor\"");
    };
    let (w13, w2) = (tensor::describe("w13", w13)?, tensor::describe("w2", w2)?);
    let up = Parts::new(if gated { 2 } else { 1 }, &w13)?;
    let (w13_table, w13_rows) = table(contract, "w13_scale", w13_scale, &w13, up)?;
    let (w2_table, w2_rows) = table(contract, "w2_scale", w2_scale, &w2, Parts { count: 1, rows: 0, pads: false })?;
    let bias = match b13 {
        Some(bias) if up.pads => up.padded(contract, "b13", bias)?,
        _ => None,
    };
    let (activations, scales) = match given {
        [None, None] if per_token.unwrap_or(true) => (Activations::Token, None),
        [None, None] => (Activations::Tensor, None),
        [Some(_), Some(_)] if per_token == Some(true) => {
            contract!("per_token: excludes a13_scale and a2_scale");
        }
        [Some(x), Some(hidden)] => {
            let mut of = |name, object| of_activations(contract, name, object, &w13);
            let scales = [of("a13_scale", x)?, of("a2_scale", hidden)?];
            (Activations::Static(scales.each_ref().map(|scale| scale.data.cast_const().cast())), Some(scales))
        }
        _ => contract!("a13_scale and a2_scale: give both or none"),
    };
    Ok(Fp8Tensor { tables: [w13_table, w2_table], rows: [w13_rows, w2_rows], bias, activations, scales })
}

/// The parts of an expert's rows whose scales may differ: the halves of a gated w13, otherwise all rows.
#[derive(Clone, Copy)]
struct Parts {
    count: i64,
    /// Rows of all parts.
    rows: i64,
    /// Whether kernels read the numbers of rows in whole blocks, and a part does not fill them.
    pads: bool,
}

impl Parts {
    /// The parts of w13.
    fn new(count: i64, w13: &View) -> Result<Parts> {
        let &[experts, rows, hidden] = w13.shape() else { return Ok(Parts { count, rows: 0, pads: false }) };
        let (intermediate, format) = (rows / count, Format::Fp8TensorToken);
        let desc = LayerDesc { experts, hidden, intermediate, gated: count == 2, dtype: Dtype::Bf16, format };
        Ok(Parts { count, rows, pads: rows % (count * LEAST_COLUMNS) == 0 && pads(w13.place, &desc)? })
    }

    /// A copy of numbers of rows, [experts, rows], in which zeros follow each part up to whole blocks. None if the shape is another one,
    /// which the contract of the layer refuses.
    fn padded<'py>(
        self,
        contract: &mut Contract<'_>,
        name: &'static str,
        object: &Bound<'py, PyAny>,
    ) -> Result<Option<Borrowed<'py>>> {
        let given = contract.input(name, object)?;
        let experts = match *given.shape() {
            [experts, rows] | [experts, rows, 1] if rows == self.rows => experts,
            _ => return Ok(None),
        };
        let (own, block) = (self.rows / self.count, GROUP as i64);
        let whole = (own + block - 1) / block * block;
        let parts = object.call_method1("reshape", ((experts, self.count, own),))?;
        let padded = object.call_method1("new_zeros", ((experts, self.count, whole),))?;
        padded.call_method1("narrow", (2, 0, own))?.call_method1("copy_", (parts,))?;
        let padded = padded.call_method1("view", ((experts, self.count * whole),))?;
        Ok(Some(contract.input(name, &padded)?))
    }
}

/// (table of the scales of `weights`' blocks, scales of rows if given). A scale of the matrix or of a part is repeated in the table. A
/// given table stays as it is. With scales of rows the table has ones.
fn table<'py>(
    contract: &mut Contract<'_>,
    name: &'static str,
    object: &Bound<'py, PyAny>,
    weights: &View,
    of: Parts,
) -> Result<(Bound<'py, PyAny>, Option<Borrowed<'py>>)> {
    let (block, parts) = (GROUP as i64, of.count);
    let &[experts, rows, columns] = weights.shape() else { return Ok((object.clone(), None)) };
    if rows % (parts * LEAST_COLUMNS) != 0 || columns % LEAST_COLUMNS != 0 {
        // The contract of the weights refuses this shape.
        return Ok((object.clone(), None));
    }
    let scale = contract.input(name, object)?;
    let blocks = |size: i64| (size + block - 1) / block;
    let shape = [experts, parts * blocks(rows / parts), blocks(columns)];
    if scale.shape() == shape {
        return Ok((object.clone(), None));
    }
    if scale.elem != Elem::F32 {
        contract!("{name}: expected dtype {}, got {}", Elem::F32, scale.elem);
    }
    let (count, of_rows) = match *scale.shape() {
        [] | [1] => (1, 1),
        [e] | [e, 1] | [e, 1, 1] if e == experts => (experts, 1),
        [e, p] if e == experts && p == parts => (experts, parts),
        [e, r] | [e, r, 1] if e == experts && r == rows => {
            refuse_numpy(name, &scale)?;
            let dims = [Dim::Is("experts", experts), Dim::Is("rows of weights", rows), Dim::Is("one", 1)];
            Contract::new().with("the weights", weights.place, &[]).check(
                name,
                &scale,
                &dims[..scale.shape().len()],
                &[Elem::F32],
            )?;
            let alignment = if weights.place == Place::Cpu { 4 } else { 16 };
            if !(scale.data as usize).is_multiple_of(alignment) {
                contract!(
                    "{name}: must start at a multiple of {alignment} bytes, got address {:p}; pass {name}.clone()",
                    scale.data
                );
            }
            let ones = object.call_method1("new_ones", (shape,))?;
            let padded = if of.pads { of.padded(contract, name, object)? } else { None };
            return Ok((ones, Some(padded.unwrap_or(scale))));
        }
        _ => {
            let halves = if parts > 1 { format!(", [{experts}, {parts}]") } else { String::new() };
            contract!(
                "{name}: expected shape [{experts}]{halves}, [{experts}, {rows}] or one number, got {:?}",
                scale.shape()
            )
        }
    };
    refuse_numpy(name, &scale)?;
    let [experts, blocks, columns] = shape;
    let repeated = object
        .call_method1("reshape", ((count, of_rows, 1, 1),))?
        .call_method1("expand", ((experts, of_rows, blocks / of_rows, columns),))?;
    Ok((repeated.call_method1("reshape", ((experts, blocks, columns),))?.call_method0("contiguous")?, None))
}

fn refuse_numpy(name: &str, scale: &View) -> Result<()> {
    if scale.origin == Origin::Other {
        return Err(Error::Unsupported(format!("{name}: numpy; supported for fp8_tensor experts: torch tensors")));
    }
    Ok(())
}

/// The scale of activations as one number. If there is a number for each expert, it is the largest.
fn of_activations<'py>(
    contract: &mut Contract<'_>,
    name: &'static str,
    object: &Bound<'py, PyAny>,
    weights: &View,
) -> Result<Borrowed<'py>> {
    let scale = contract.input(name, object)?;
    if scale.elem != Elem::F32 {
        contract!("{name}: expected dtype {}, got {}", Elem::F32, scale.elem);
    }
    if scale.place != weights.place {
        contract!("{name}: is on {}, but w13 is on {}", scale.place, weights.place);
    }
    match *scale.shape() {
        [] | [1] => Ok(scale),
        [experts] | [experts, 1] if Some(&experts) == weights.shape().first() => {
            contract.input(name, &object.call_method0("max")?)
        }
        _ => contract!("{name}: expected one number or one for each expert, got shape {:?}", scale.shape()),
    }
}
