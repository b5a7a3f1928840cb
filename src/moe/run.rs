//! Runs a program: each step is a launch on a GPU's stream, or a function of the CPU backend.

use super::parameters::{Parameters, Side};
use super::plan::steps::{GemmLaunch, RoundLaunch, RouteLaunch, RoutedLayerLaunch};
use super::plan::{sm90, Step, Task};
use super::rounds;
use crate::counters::{self, Counts};
use crate::cpu;
use crate::error::{Error, Result};
use crate::kernel::Stream;
use crate::tma::{self, TensorMap};
use std::fmt;

/// The name of a step in errors: its call and its task.
#[derive(Clone, Copy)]
struct Name<'a>(&'a str, Task);

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0, self.1.name())
    }
}

/// The error for a program with a step that its device does not run.
fn misplaced(op: &str, task: Task) -> Error {
    Error::Cuda(format!("oxmoe: internal error, please report it: {op}: {task:?} on the wrong device"))
}

/// Launches all steps. `call`: the call's name in errors. `workspace`: its address, by which the counters of some launches are found.
pub fn on_gpu(stream: &Stream<'_>, call: &str, parameters: &Parameters<'_>, workspace: *mut u8) -> Result<()> {
    // A launch whose CTAs wait for each other may be too large for the stream. If that is known, it is an error before anything is
    // launched.
    let waits = |step: &Step| matches!(step, Step::Layer(_) | Step::RoutedLayer(_));
    let too_large = |step: &Step| waits(step) && step.launch().is_some_and(|launch| !stream.holds(&launch));
    if parameters.program.steps().any(too_large) {
        return Err(Error::TooLarge(format!(
            "{call}: this stream has too few multiprocessors for all CTAs of a launch at once"
        )));
    }
    let runner = Runner { stream, call, parameters, workspace };
    parameters.program.steps().try_for_each(|step| runner.launch(step))
}

struct Runner<'a> {
    stream: &'a Stream<'a>,
    call: &'a str,
    parameters: &'a Parameters<'a>,
    workspace: *mut u8,
}

impl Runner<'_> {
    fn launch(&self, step: &Step) -> Result<()> {
        let (p, program, task) = (self.parameters, self.parameters.program, step.task());
        let (stream, name) = (self.stream, Name(self.call, task));
        let multiprocessors = stream.device().multiprocessors;
        let misplaced = || misplaced(self.call, task);
        let round = |launch: &RoundLaunch, side: Side| {
            let round = program.rounds[side as usize].as_ref().ok_or_else(misplaced)?;
            rounds::launch(stream, name, launch, p, round)
        };
        match step {
            Step::Route(Some(RouteLaunch::Select(launch))) => {
                let select = p.select().ok_or_else(misplaced)?;
                stream.launch(name, launch, (&select, &p.route()))
            }
            Step::Route(Some(RouteLaunch::Sort(launch))) => stream.launch(name, launch, &p.route()),
            Step::Schedule(Some(launch)) => stream.launch(name, launch, &p.schedule()),
            Step::DownSchedule(launch) => {
                let own = program.down_schedule.as_ref().ok_or_else(misplaced)?;
                stream.launch(name, launch, &p.down_schedule(own))
            }
            Step::RoundX(Some(launch)) => round(launch, Side::Up),
            Step::RoundHidden(Some(launch)) => round(launch, Side::Down),
            Step::Gemm1(Some(launch)) => self.launch_gemm(name, launch, Side::Up),
            Step::Gemm2(Some(launch)) => self.launch_gemm(name, launch, Side::Down),
            Step::BothGemms(launch) => stream.launch(name, launch, &p.gemm_pair(multiprocessors)),
            Step::BothGemmsOfRows(launch) => {
                let counters = self.own_counters(name, Counts::Pair { experts: p.layer.desc.experts })?;
                stream.launch(name, launch, &p.gemm_pair_of_rows(multiprocessors, counters))
            }
            Step::Layer(launch) => {
                let (up, down) = self.layer_maps(name)?;
                stream.launch(name, launch, (up, down, &p.layer()))
            }
            Step::RoutedLayer(launch) => {
                let params = p.routed_layer(self.own_counters(name, Counts::Layer)?);
                match launch {
                    RoutedLayerLaunch::Plain(launch) => stream.launch(name, launch, &params),
                    RoutedLayerLaunch::Mapped(launch) => {
                        let (up, down) = self.layer_maps(name)?;
                        stream.launch(name, launch, (up, down, &params))
                    }
                }
            }
            Step::Combine(Some(launch)) => stream.launch(name, launch, &p.combine()),
            Step::Select
            | Step::Route(None)
            | Step::Schedule(None)
            | Step::RoundX(None)
            | Step::RoundHidden(None)
            | Step::Gemm1(None)
            | Step::Gemm2(None)
            | Step::Combine(None) => Err(misplaced()),
        }
    }

    /// Counters of a launch before which no other launch sets them to 0.
    fn own_counters(&self, name: Name<'_>, counts: Counts) -> Result<*mut i32> {
        counters::of_launch(self.stream, name, counts, self.workspace, self.parameters.counters())
    }

    fn launch_gemm(&self, name: Name<'_>, launch: &GemmLaunch, side: Side) -> Result<()> {
        let (p, layer) = (self.parameters, self.parameters.layer);
        let maps = if side == Side::Up { &layer.up_maps } else { &layer.down_maps };
        let map = |(row_tiles, consumers)| maps.get(name, row_tiles, consumers);
        match launch {
            GemmLaunch::Plain(launch) => self.stream.launch(name, launch, &p.gemm(side)),
            GemmLaunch::Mapped(launch) => {
                self.stream.launch(name, launch, (map(launch.kernel.map_shape())?, &p.gemm(side)))
            }
            GemmLaunch::Ordered(launch) => {
                let ordered = p.ordered_gemm(side);
                let (rows, columns) = (p.program.gemms[side as usize].order.rows, 2 * ordered.gemm.k);
                // NOTE: the map is encoded here and not at load, because x lies elsewhere in every call.
                let tokens = tma::encode_rows_e4m3(ordered.gemm.x, rows as u64, columns as u64)?;
                self.stream.launch(name, launch, (map(launch.kernel.map_shape())?, &tokens, &ordered))
            }
        }
    }

    /// The maps of both weights for a layer in one launch.
    fn layer_maps(&self, name: Name<'_>) -> Result<(&TensorMap, &TensorMap)> {
        let ((row_tiles, consumers), layer) = (sm90::LAYER_SHAPE, self.parameters.layer);
        Ok((layer.up_maps.get(name, row_tiles, consumers)?, layer.down_maps.get(name, row_tiles, consumers)?))
    }
}

/// Does all steps on the CPU.
///
/// # Safety
/// Every place that the program names is valid for the call's shapes.
pub unsafe fn on_cpu(call: &str, parameters: &Parameters<'_>) -> Result<()> {
    // SAFETY: the caller's contract holds for each step.
    parameters.program.steps().try_for_each(|step| unsafe { step_on_cpu(call, parameters, step.task()) })
}

/// # Safety
/// Every place that the program names is valid for the call's shapes, and the steps before this one are done.
unsafe fn step_on_cpu(call: &str, p: &Parameters<'_>, task: Task) -> Result<()> {
    let (layer, dtype) = (p.layer, p.layer.desc.dtype);
    // SAFETY: the caller's contract.
    unsafe {
        match (task, p.select(), p.program.rounds) {
            (Task::Select, Some(select), _) => cpu::select(&select),
            (Task::Route, ..) => cpu::route(&p.route()),
            (Task::Schedule, ..) => cpu::schedule(&p.schedule()),
            (Task::RoundX, _, [Some(x), _]) => rounds::on_cpu(p, &x),
            (Task::RoundHidden, _, [_, Some(hidden)]) => rounds::on_cpu(p, &hidden),
            (Task::Gemm1, ..) => cpu::grouped_gemm(&p.gemm(Side::Up), dtype, layer.up.blocks),
            (Task::Gemm2, ..) => cpu::grouped_gemm(&p.gemm(Side::Down), dtype, layer.down.blocks),
            (Task::Combine, ..) => cpu::combine(&p.combine(), dtype),
            _ => return Err(misplaced(call, task)),
        }
    }
    Ok(())
}
