//! The layer on rows that lie expert by expert, as DeepEP and DeepGEMM hand them over: no routing and no combine. Places of the schedule
//! are rows of x, of GEMM1's output and of the output, so nothing is gathered or scattered.

use super::gemms::{self, Gemms};
use super::grouped_gemm;
use super::layer::Layer;
use super::plan::masked::{self, workspace, MaskedDesc, MaskedPlan};
use super::plan::{self, MoeWorkspace};
use super::scratch::Scratch;
use super::weights::ExpertWeights;
use super::{elem, formats, nvfp4};
use crate::contract;
use crate::cpu;
use crate::desc::LayerDesc;
use crate::device::gpu;
use crate::error::{guard, Error, Result};
use crate::kernel::Stream;
use crate::params::ScheduleParams;
use crate::quant::fp8::GROUP;
use crate::quant::nvfp4::BLOCK;
use crate::quant::Weights;
use crate::stats;
use crate::tensor::{Borrowed, Contract, Dim, Elem, Place, View};
use pyo3::prelude::*;

/// The parameter structs of the stages; device and CPU run the same ones.
#[derive(Clone, Copy)]
struct Stages {
    schedule: ScheduleParams,
    gemms: Gemms,
}

const NAMES: gemms::Names = gemms::Names {
    x: "moe_masked: quantisation of x",
    up: "moe_masked: GEMM1",
    hidden: "moe_masked: quantisation of GEMM1's output",
    down: "moe_masked: GEMM2",
    both: "moe_masked: GEMM1 and GEMM2",
};

/// How rows are divided among experts.
struct Division<'a> {
    counts: &'a View,
    /// As in `ScheduleParams`.
    rows_each: i64,
    alignment: i64,
    rows: i64,
}

impl Stages {
    fn new(
        layer: &Layer,
        division: &Division<'_>,
        (x, x_scales): (&View, Option<&View>),
        out: &View,
        (ws, base): (&MoeWorkspace, *mut u8),
        (tile_tokens, in_one_launch): (i32, bool),
    ) -> Stages {
        let schedule = ScheduleParams {
            row_counts: division.counts.data.cast::<i32>().cast_const(),
            experts: layer.desc.experts as i32,
            rows_each: division.rows_each as i32,
            alignment: division.alignment as i32,
            rows: division.rows as i32,
            tile_tokens,
            tile_step: plan::masked::tile_step(layer.desc.format, tile_tokens),
            tiles: ws.tiles.at(base),
            tile_count: ws.tile_count.at(base),
            counters: ws.counters.at(base),
            counter_count: masked::counters(&layer.desc),
        };
        let [mut up, mut down] = grouped_gemm::params(
            layer,
            &grouped_gemm::Rows {
                x: x.data,
                slot_of_place: std::ptr::null(),
                row_divisor: 1,
                slot_weights: std::ptr::null(),
                tiles: schedule.tiles,
                tile_count: schedule.tile_count,
                counters: schedule.counters,
                hidden: ws.hidden.at(base),
                out: out.data,
            },
        );
        let x_scales = x_scales.map(|scales| scales.data.cast_const());
        let to = (out.data, &schedule, in_one_launch);
        let (rounding, fp8) = formats::round_rows(layer, (ws, base), to, x_scales, (&mut up, &mut down));
        Stages { schedule, gemms: Gemms { up, down, rounding, fp8 } }
    }

    fn run_cuda(&self, stream: &Stream<'_>, plan: &MaskedPlan, layer: &Layer, workspace: *mut u8) -> Result<()> {
        let Some(schedule) = plan.schedule else {
            let gemms = (&self.gemms.up, &self.gemms.down);
            return grouped_gemm::launch_both_of_rows(
                stream,
                NAMES.both,
                &plan.gemms.up,
                gemms,
                &self.schedule,
                workspace,
            );
        };
        stream.launch("moe_masked: schedule", &schedule, &self.schedule)?;
        self.gemms.run_cuda(stream, &NAMES, &plan.gemms, layer, self.schedule.counters)
    }

    fn run_cpu(&self, layer: &Layer) {
        // SAFETY: every pointer is into a tensor that the contract checked or into the workspace, whose ranges come from the plan.
        unsafe {
            cpu::schedule(&self.schedule);
            self.gemms.run_cpu(layer);
        }
    }
}

/// An error where kernels could not count the rows: rows in 31 bits, vectors of 8 elements (1 in odd rows) in 32.
fn require_countable(operand: &str, layer: &LayerDesc, rows: i64) -> Result<()> {
    let vector = if layer.hidden % 8 == 0 { 8 } else { 1 };
    let elements = rows.saturating_mul(layer.hidden.max(layer.inner()));
    if rows > i64::from(i32::MAX) / 2 || elements / vector > i64::from(i32::MAX) {
        return Err(Error::Unsupported(format!(
            "{operand}: {rows} rows are beyond 2^30, or beyond {vector} x 2^31 elements; split the batch"
        )));
    }
    Ok(())
}

/// What both functions share: operands that their contracts have checked but for x_scale, out and workspace.
struct Call<'a, 'py> {
    layer: &'a Layer,
    x: Borrowed<'py>,
    x_scale: Option<&'a Bound<'py, PyAny>>,
    division: Division<'a>,
    /// Dimensions before the columns.
    lead: Vec<Dim>,
    expected: i64,
    out: Option<&'a Bound<'py, PyAny>>,
    workspace: Option<&'a Bound<'py, PyAny>>,
}

impl<'py> Call<'_, 'py> {
    fn run(self, mut contract: Contract<'_>) -> Result<Bound<'py, PyAny>> {
        let (x, layer, rows) = (&self.x, self.layer, self.division.rows);
        let py = x.object().py();
        let dims = |last: Dim| [self.lead.as_slice(), &[last]].concat();
        let x_scale = self.x_scale.map(|scale| contract.input("x_scale", scale)).transpose()?;
        if let Some(scale) = &x_scale {
            if layer.desc.format.weights() == Weights::Nvfp4 {
                let blocks = Dim::Is("hidden / 16", layer.desc.hidden / BLOCK as i64);
                contract.check("x_scale", scale, &dims(blocks), &nvfp4::SCALES)?;
            } else {
                let groups = Dim::Is("hidden / 128", layer.desc.hidden / GROUP as i64);
                contract.check("x_scale", scale, &dims(groups), &[Elem::F32])?;
            }
        }
        require_countable("x", &layer.desc, rows)?;
        let out = match self.out {
            // GEMM1 has read a row of x before GEMM2 writes it.
            Some(object) => contract.output_over("out", object, &["x"])?,
            None => {
                let columns = [layer.desc.hidden];
                let shape = [&x.shape()[..self.lead.len()], &columns].concat();
                contract.new_output("out", x, &shape, elem(layer.desc.dtype))?
            }
        };
        contract.check("out", &out, &dims(Dim::Named("hidden")), &[elem(layer.desc.dtype)])?;
        if x.place != Place::Cpu && layer.desc.hidden % 8 == 0 {
            for (name, t) in [("x", x), ("out", &out)] {
                if !(t.data as usize).is_multiple_of(16) {
                    contract!("{name}: must start at a multiple of 16 bytes, got address {:p}", t.data);
                }
            }
        }
        if rows == 0 && self.workspace.is_none() {
            contract.finish()?;
            return Ok(out.into_object());
        }
        let ws = workspace(&layer.desc, rows);
        let scratch = Scratch::new(x, self.workspace, &mut contract, ws.bytes)?;
        let checked = contract.finish()?;
        if rows == 0 {
            return Ok(out.into_object());
        }
        let stages = |tile_tokens, in_one_launch| {
            let x = (&**x, x_scale.as_deref());
            Stages::new(layer, &self.division, x, &out, (&ws, scratch.base), (tile_tokens, in_one_launch))
        };
        match x.place {
            Place::Cpu => {
                let stages = stages(plan::CPU_TILE_TOKENS, false);
                checked.on_cpu(py, || stages.run_cpu(layer));
            }
            Place::Cuda(ordinal) => {
                let gpu = gpu(ordinal)?;
                let quantizes_x = x_scale.is_none();
                let finds_tiles = self.division.rows_each > 0;
                let desc = MaskedDesc { layer: layer.desc, rows, expected: self.expected, quantizes_x, finds_tiles };
                let plan = MaskedPlan::new(&desc, &gpu.device)?;
                stats::log_plan(|| format!("{desc:?} on {ordinal}"), || plan.explain(&desc));
                let stream = Stream::new(gpu, x.current_stream(py)?, &checked)?;
                stages(plan.gemms.tile_tokens, plan.gemms.down.is_none()).run_cuda(
                    &stream,
                    &plan,
                    layer,
                    scratch.base,
                )?;
            }
        }
        let call = if self.division.rows_each > 0 { stats::Call::MoeMasked } else { stats::Call::MoeContiguous };
        stats::count(call, rows);
        Ok(out.into_object())
    }
}

/// The dtypes of x: the weights', or with x_scale e4m3.
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
        let lead = vec![Dim::Named("experts"), Dim::Named("m")];
        let dims = [lead.as_slice(), &[Dim::Named("hidden")]].concat();
        check_x(&mut contract, layer, &x_ref, &dims, x_scale.is_some())?;
        contract.check("masked_m", &counts, &[Dim::Named("experts")], &[Elem::I32])?;
        let m = x_ref.shape()[1];
        let rows = layer.desc.experts.saturating_mul(m);
        // A full batch of tokens that choose 8 of 256 experts.
        let expected = expected_rows(expected_m, (m + 31) / 32)?;
        let division = Division { counts: &counts, rows_each: m, alignment: 1, rows };
        Call { layer, x: x_ref, x_scale, division, lead, expected, out, workspace }.run(contract)
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
        let lead = vec![Dim::Named("M")];
        check_x(&mut contract, layer, &x_ref, &[lead[0], Dim::Named("hidden")], x_scale.is_some())?;
        contract.check("counts", &counts_ref, &[Dim::Named("experts")], &[Elem::I32])?;
        if !(1..=1 << 16).contains(&alignment) {
            contract!("alignment: expected 1 to 65536, got {alignment}");
        }
        let (rows, experts) = (x_ref.shape()[0], layer.desc.experts);
        let expected = expected_rows(expected_m, (rows + experts - 1) / experts)?;
        let division = Division { counts: &counts_ref, rows_each: 0, alignment, rows };
        Call { layer, x: x_ref, x_scale, division, lead, expected, out, workspace }.run(contract)
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
        require_countable("num_rows", layer, num_rows)?;
        Ok(workspace(layer, num_rows).bytes)
    })
}
