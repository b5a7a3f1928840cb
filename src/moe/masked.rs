//! The layer on rows that lie expert by expert, as DeepEP and DeepGEMM hand them over: no routing and no combine. Places of the schedule
//! are rows of x, of GEMM1's output and of the output, so nothing is gathered or scattered.

use super::call::{describe, require_countable, Call};
use super::elem;
use super::formats::nvfp4;
use super::layer::Layer;
use super::parameters::Operands;
use super::plan::steps::Buffer;
use super::plan::{InOrder, Source, Workspace, X};
use super::weights::ExpertWeights;
use crate::contract;
use crate::error::{guard, Error, Result};
use crate::quant::fp8::GROUP;
use crate::quant::nvfp4::BLOCK;
use crate::quant::Weights;
use crate::stats;
use crate::tensor::{Borrowed, Contract, Dim, Elem, View};
use pyo3::prelude::*;

/// How rows are divided among experts.
struct Division<'a> {
    counts: &'a View,
    /// Rows between the first rows of two neighbouring experts. If it is 0, the experts' rows follow each other, each number of rows
    /// rounded up to a multiple of `alignment`.
    rows_each: i64,
    alignment: i64,
    /// Rows for which there is room.
    rows: i64,
    /// Expected rows of an expert.
    expected: i64,
}

/// Runs `moe_masked` or `moe_contiguous`, once x and the counts are checked.
fn run<'py>(
    mut contract: Contract<'_>,
    layer: &Layer,
    (x, x_scale): (Borrowed<'py>, Option<&Bound<'py, PyAny>>),
    division: &Division<'_>,
    lead: &[(Dim, i64)],
    (out, workspace): (Option<&Bound<'py, PyAny>>, Option<&Bound<'py, PyAny>>),
) -> Result<Bound<'py, PyAny>> {
    let x_scale = x_scale.map(|scale| contract.input("x_scale", scale)).transpose()?;
    if let Some(scale) = &x_scale {
        let (columns, elems): (_, &[Elem]) = match layer.desc.format.weights() {
            Weights::Nvfp4 => (Dim::Is("hidden / 16", layer.desc.hidden / BLOCK as i64), &nvfp4::SCALES),
            _ => (Dim::Is("hidden / 128", layer.desc.hidden / GROUP as i64), &[Elem::F32]),
        };
        let dims: Vec<Dim> = lead.iter().map(|&(dim, _)| dim).chain([columns]).collect();
        contract.check("x_scale", scale, &dims, elems)?;
    }
    let Division { rows_each, alignment, rows, expected, .. } = *division;
    let finds_tiles = rows_each > 0;
    let source = Source::InOrder(InOrder { rows, expected, finds_tiles });
    let x_scales = x_scale.as_ref().map_or(std::ptr::null(), |scale| scale.data.cast_const());
    let call = Call {
        name: "moe_masked",
        counted_as: if finds_tiles { stats::Call::MoeMasked } else { stats::Call::MoeContiguous },
        layer,
        desc: describe(layer, source, if x_scale.is_some() { X::Codes } else { X::Plain }),
        operands: Operands { rows_each: rows_each as i32, alignment: alignment as i32, ..Operands::NONE },
        x,
        inputs: [
            (Buffer::XScales, x_scales),
            (Buffer::RowCounts, division.counts.data.cast_const()),
            (Buffer::None, std::ptr::null()),
        ],
        lead,
        out,
        workspace,
    };
    call.run(contract)
}

/// Checks the type and shape of x: numbers of the weights' dtype, or codes if there is an `x_scale`.
fn check_x(contract: &mut Contract<'_>, layer: &Layer, x: &View, dims: &[Dim], scaled: bool) -> Result<()> {
    if !scaled {
        return contract.check("x", x, dims, &[elem(layer.desc.dtype)]);
    }
    match layer.desc.format {
        format if format.is_fp8() => contract.check("x", x, dims, &[Elem::E4M3]),
        _ if nvfp4::rounds(layer) => {
            let pairs = Dim::Is("hidden / 2", layer.desc.hidden / 2);
            contract.check("x", x, &[&dims[..dims.len() - 1], &[pairs]].concat(), &nvfp4::CODES)
        }
        other => Err(Error::Unsupported(format!(
            "x_scale with {} experts; supported: fp8_block, fp8_tensor, and nvfp4 with an input_global_scale",
            other.spec().name
        ))),
    }
}

fn expected_rows(given: Option<i64>, default: i64) -> Result<i64> {
    match given {
        Some(wrong) if wrong < 0 => contract!("expected_m: expected 0 or more, got {wrong}"),
        given => Ok(given.unwrap_or(default).max(1)),
    }
}

#[doc = crate::help!("moe_masked")]
#[pyfunction(crate = "crate::python")]
#[allow(clippy::too_many_arguments)] // keyword arguments of Python
#[pyo3(signature = (x, weights, masked_m, *, x_scale=None, expected_m=None, out=None, workspace=None))]
pub fn moe_masked<'py>(
    x: &Bound<'py, PyAny>,
    weights: &Bound<'py, ExpertWeights>,
    masked_m: &Bound<'py, PyAny>,
    x_scale: Option<&Bound<'py, PyAny>>,
    expected_m: Option<i64>,
    out: Option<&Bound<'py, PyAny>>,
    workspace: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    guard(|| {
        let (layer, spans) = (weights.get().layer(x.py())?, weights.get().spans());
        let sizes = [("hidden", layer.desc.hidden), ("experts", layer.desc.experts)];
        let mut contract = Contract::new().reads_layer(spans).with("weights", layer.place, &sizes);
        let x_ref = contract.input("x", x)?;
        let counts = contract.input("masked_m", masked_m)?;
        let dims = [Dim::Named("experts"), Dim::Named("m"), Dim::Named("hidden")];
        check_x(&mut contract, layer, &x_ref, &dims, x_scale.is_some())?;
        contract.check("masked_m", &counts, &[Dim::Named("experts")], &[Elem::I32])?;
        let m = x_ref.shape()[1];
        let rows = layer.desc.experts.saturating_mul(m);
        // The default holds for a full batch of tokens that choose 8 of 256 experts.
        let expected = expected_rows(expected_m, (m + 31) / 32)?;
        let division = Division { counts: &counts, rows_each: m, alignment: 1, rows, expected };
        let lead = [(dims[0], layer.desc.experts), (dims[1], m)];
        run(contract, layer, (x_ref, x_scale), &division, &lead, (out, workspace))
    })
}

#[doc = crate::help!("moe_contiguous")]
#[pyfunction(crate = "crate::python")]
#[allow(clippy::too_many_arguments)] // keyword arguments of Python
#[pyo3(signature = (x, weights, counts, *, alignment=1, x_scale=None, expected_m=None, out=None, workspace=None))]
pub fn moe_contiguous<'py>(
    x: &Bound<'py, PyAny>,
    weights: &Bound<'py, ExpertWeights>,
    counts: &Bound<'py, PyAny>,
    alignment: i64,
    x_scale: Option<&Bound<'py, PyAny>>,
    expected_m: Option<i64>,
    out: Option<&Bound<'py, PyAny>>,
    workspace: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    guard(|| {
        let (layer, spans) = (weights.get().layer(x.py())?, weights.get().spans());
        let sizes = [("hidden", layer.desc.hidden), ("experts", layer.desc.experts)];
        let mut contract = Contract::new().reads_layer(spans).with("weights", layer.place, &sizes);
        let x_ref = contract.input("x", x)?;
        let counts_ref = contract.input("counts", counts)?;
        check_x(&mut contract, layer, &x_ref, &[Dim::Named("M"), Dim::Named("hidden")], x_scale.is_some())?;
        contract.check("counts", &counts_ref, &[Dim::Named("experts")], &[Elem::I32])?;
        if !(1..=1 << 16).contains(&alignment) {
            contract!("alignment: expected 1 to 65536, got {alignment}");
        }
        let (rows, experts) = (x_ref.shape()[0], layer.desc.experts);
        let expected = expected_rows(expected_m, (rows + experts - 1) / experts)?;
        let division = Division { counts: &counts_ref, rows_each: 0, alignment, rows, expected };
        run(contract, layer, (x_ref, x_scale), &division, &[(Dim::Named("M"), rows)], (out, workspace))
    })
}

#[doc = crate::help!("masked_workspace_bytes")]
#[pyfunction(crate = "crate::python")]
pub fn masked_workspace_bytes(weights: &Bound<'_, ExpertWeights>, num_rows: i64) -> PyResult<usize> {
    guard(|| {
        if num_rows < 0 {
            contract!("num_rows: expected 0 or more, got {num_rows}");
        }
        let layer = weights.get().desc();
        let source = InOrder { rows: num_rows, expected: 1, finds_tiles: false };
        require_countable("num_rows", layer, Source::InOrder(source))?;
        Ok(Workspace::of_rows(layer, num_rows).bytes)
    })
}
