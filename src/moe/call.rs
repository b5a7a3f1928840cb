//! A call of a layer on borrowed tensors: the contract of its output and workspace, then its program. Routed calls and calls on rows in
//! order both run here.

use super::elem;
use super::formats::nvfp4;
use super::layer::Layer;
use super::parameters::{Memory, Operands, Parameters};
use super::plan::steps::Buffer;
use super::plan::{self, CallDesc, InOrder, Program, Routed, Source, Workspace, X};
use super::run;
use super::scratch::Scratch;
use crate::contract;
use crate::desc::LayerDesc;
use crate::device::{gpu, Device};
use crate::error::{Error, Result};
use crate::kernel::Stream;
use crate::quant::Activations;
use crate::stats;
use crate::tensor::{Borrowed, Contract, Dim, Place};
use pyo3::prelude::*;

/// A call whose operands its contract has checked, except `out` and `workspace`.
pub struct Call<'a, 'py> {
    /// The call's name in errors.
    pub name: &'static str,
    pub counted_as: stats::Call,
    pub layer: &'a Layer,
    pub desc: CallDesc,
    pub operands: Operands,
    pub x: Borrowed<'py>,
    /// Buffers that the call reads beside x and the layer: scales of x, then two operands of its own.
    pub inputs: [(Buffer, *const u8); 3],
    /// The output's dimensions before its columns, with their sizes.
    pub lead: &'a [(Dim, i64)],
    pub out: Option<&'a Bound<'py, PyAny>>,
    pub workspace: Option<&'a Bound<'py, PyAny>>,
}

/// The description of a call, from which its program is made.
pub fn describe(layer: &Layer, source: Source, x: X) -> CallDesc {
    let format = layer.desc.format;
    // On CPUs the layer and not its format says whether activations become NVFP4.
    let activations = if nvfp4::rounds(layer) { Activations::Nvfp4 } else { format.activations() };
    CallDesc { layer: layer.desc, source, x, activations, one_x_factor: layer.up.one_x_scale }
}

/// An error if kernels cannot count a batch. They count slots in 31 bits, and vectors of 8 elements (1 element in odd rows) in 32: those of
/// x and of the output by tokens, and those of GEMM1's output, which GEMM2 gathers, by slots.
pub fn require_countable(operand: &str, layer: &LayerDesc, source: Source) -> Result<()> {
    let vector = if layer.hidden % 8 == 0 { 8 } else { 1 };
    let slots = match source {
        Source::Routed(Routed { tokens, top_k, .. }) => tokens.saturating_mul(top_k),
        Source::InOrder(InOrder { rows, .. }) => rows,
    };
    let rows = match source {
        // NVFP4 may round rows once for each of their slots.
        Source::Routed(Routed { tokens, .. }) if layer.format.activations() != Activations::Nvfp4 => tokens,
        _ => slots,
    };
    let elements = rows.saturating_mul(layer.hidden.max(layer.inner()));
    let most = i64::from(i32::MAX);
    if slots <= most / 2 && elements / vector <= most {
        let inner = layer.inner();
        return match slots.saturating_mul(inner) / 8 <= most {
            true => Ok(()),
            false => Err(Error::Unsupported(format!(
                "{operand}: {slots} slots (tokens x top-k) of {inner} columns between the GEMMs are beyond 8 x 2^31 elements; split the batch"
            ))),
        };
    }
    Err(Error::Unsupported(match source {
        Source::Routed(Routed { tokens, top_k, .. }) => format!(
            "{operand}: {tokens} tokens x top-{top_k} is beyond 2^30 slots or {vector} x 2^31 elements; split the batch"
        ),
        Source::InOrder(_) => {
            format!("{operand}: {rows} rows are beyond 2^30, or beyond {vector} x 2^31 elements; split the batch")
        }
    }))
}

impl<'py> Call<'_, 'py> {
    /// Checks `out` and `workspace`, then runs the steps. Returns `out`.
    pub fn run(self, mut contract: Contract<'_>) -> Result<Bound<'py, PyAny>> {
        let (x, layer, desc) = (&self.x, self.layer, &self.desc);
        let py = x.object().py();
        require_countable("x", &layer.desc, desc.source)?;
        let (lead, hidden, out_elem) = (self.lead, layer.desc.hidden, elem(layer.desc.dtype));
        let mut dims = [Dim::Named("hidden"); 3];
        let mut sizes = [hidden; 3];
        for (i, &(dim, size)) in lead.iter().enumerate() {
            (dims[i], sizes[i]) = (dim, size);
        }
        let out = match self.out {
            // GEMM1 has read a row of x before anything is written to its row of out.
            Some(object) => contract.output_over("out", object, &["x"])?,
            None => contract.new_output("out", x, &sizes[..=lead.len()], out_elem)?,
        };
        contract.check("out", &out, &dims[..=lead.len()], &[out_elem])?;
        if x.place != Place::Cpu && hidden % 8 == 0 {
            for (name, t) in [("x", x), ("out", &out)] {
                if !(t.data as usize).is_multiple_of(16) {
                    contract!(
                        "{name}: must start at a multiple of 16 bytes, got address {:p}; pass {name}.clone()",
                        t.data
                    );
                }
            }
        }
        let rows = desc.rows();
        if rows == 0 && self.workspace.is_none() {
            contract.finish()?;
            return Ok(out.into_object());
        }
        let ws = Workspace::of(desc);
        let scratch = Scratch::new(x, self.workspace, &mut contract, ws.bytes)?;
        let checked = contract.finish()?;
        if rows == 0 {
            return Ok(out.into_object());
        }
        let [scales, first, second] = self.inputs;
        let memory = Memory::new([
            (Buffer::X, x.data.cast_const()),
            (Buffer::Out, out.data),
            (Buffer::Workspace, scratch.base),
            (Buffer::UpFactors, layer.up.x_scale.cast()),
            (Buffer::DownFactors, layer.down.x_scale.cast()),
            scales,
            first,
            second,
        ]);
        let explained = |device: Option<&Device>| plan::explain(desc, device).unwrap_or_else(|e| e.to_string());
        match x.place {
            Place::Cpu => {
                stats::log_plan(|| format!("{desc:?} on the CPU"), || explained(None));
                let program = plan::program(desc, None)?;
                let parameters = self.parameters(&memory, &program);
                // SAFETY: every place is in a tensor that the contract checked, in the layer, or in the workspace, whose ranges are the
                // program's.
                checked.on_cpu(py, || unsafe { run::on_cpu(self.name, &parameters) })??;
            }
            Place::Cuda(ordinal) => {
                let stream = Stream::new(gpu(ordinal)?, x.current_stream(py)?, &checked)?;
                let run = |device: &Device| {
                    let program = plan::program(desc, Some(device))?;
                    stats::log_plan(|| format!("{desc:?} on {ordinal}, {}", device.whole), || explained(Some(device)));
                    run::on_gpu(&stream, self.name, &self.parameters(&memory, &program), scratch.base)
                };
                match run(stream.device()) {
                    // The stream has too small a part of the GPU for a launch whose CTAs wait for each other. Separate launches have the
                    // same bits. The routing may have been launched by then: it is done anew in the same workspace.
                    Err(Error::TooLarge(_)) => run(&Device { whole: false, ..stream.device().clone() })?,
                    done => done?,
                }
            }
        }
        stats::count(self.counted_as, rows);
        Ok(out.into_object())
    }

    fn parameters<'a>(&'a self, memory: &'a Memory, program: &'a Program) -> Parameters<'a> {
        Parameters { layer: self.layer, call: &self.desc, program, operands: &self.operands, memory }
    }
}
