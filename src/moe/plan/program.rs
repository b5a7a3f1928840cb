//! A call as a program: the list of its steps, with the data from which their parameters are made. It is a pure function of the call's
//! shapes and the device, the same on every rank. The GPU runner, the CPU backend and `explain` walk the same list.

use super::call::{CallDesc, InOrder, Routed, Source, X};
use super::gemms::{set_of, GemmsPlan};
use super::kernels::{GemmLaunches, Gemms, Rows};
use super::rounds::{self, Round};
use super::routing::RoutingPlan;
use super::steps::{At, Buffer, Gemm, Order, Schedule, Step, Task};
use super::workspace::{counters_of_rows, Workspace};
use super::{counters, element, fp8_sm90, max_tiles, sm90, Counters, Overlap, CPU_TILE_TOKENS};
use crate::counters::MOST_EXPERTS;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::AnyLaunch;
use crate::params::Fp8Scaling;
use crate::quant::Activations;
use crate::workspace::Range;

/// The most steps that a call has.
const MOST_STEPS: usize = 10;

/// A call: its steps, and the data from which their parameters are made.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    steps: [Option<Step>; MOST_STEPS],
    /// GEMM1's schedule.
    pub schedule: Schedule,
    /// GEMM2's schedule, if it has its own.
    pub down_schedule: Option<Schedule>,
    /// Length of GEMM1's schedule.
    pub max_tiles: i32,
    /// Number of counters that the routing or the schedule sets to 0.
    pub counter_count: i32,
    /// A routed call: ids and weights of the slots.
    pub ids: At,
    pub slot_weights: At,
    pub gemms: [Gemm; 2],
    /// The roundings of x and of GEMM1's output. None if it is not rounded.
    pub rounds: [Option<Round>; 2],
    /// The facts of GEMM1 that GEMM2 needs, if GEMM2 begins where GEMM1 ends.
    pub overlap: Option<Overlap>,
    pub workspace: Workspace,
}

/// The parts of a program that the device decides.
struct Choice {
    tile_tokens: i32,
    down_tile_tokens: Option<i32>,
    overlap: Option<Overlap>,
    counter_count: i32,
    form: Form,
}

/// How a layer is divided into launches.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    /// There are no launches: the CPU runs the steps.
    Cpu,
    /// Each GEMM has a launch. `rounds_inside`: GEMM1 rounds its output.
    Apart {
        rounds_inside: bool,
    },
    BothGemms,
    Layer,
    RoutedLayer,
}

impl Choice {
    fn new(tile_tokens: i32, counter_count: i32, form: Form) -> Choice {
        Choice { tile_tokens, down_tile_tokens: None, overlap: None, counter_count, form }
    }
}

/// The program of a call. `device`: None for the CPU backend.
pub fn program(call: &CallDesc, device: Option<&Device>) -> Result<Program> {
    match device {
        Some(device) => on_gpu(call, device),
        None => Ok(on_cpu(call)),
    }
}

fn on_cpu(call: &CallDesc) -> Program {
    let counter_count = match call.source {
        Source::Routed(_) => 0,
        Source::InOrder(_) => counters_of_rows(&call.layer),
    };
    let mut program = Program::new(call, None, &Choice::new(CPU_TILE_TOKENS, counter_count, Form::Cpu));
    let rounds = program.rounds.map(|round| round.is_some());
    let (before, behind): (&[_], &[_]) = match call.source {
        Source::Routed(Routed { logits: Some(_), .. }) => (&[Step::Select, Step::Route(None)], &[Step::Combine(None)]),
        Source::Routed(_) => (&[Step::Route(None)], &[Step::Combine(None)]),
        Source::InOrder(_) => (&[Step::Schedule(None)], &[]),
    };
    let (up, down) = ((Step::RoundX(None), Step::Gemm1(None)), (Step::RoundHidden(None), Step::Gemm2(None)));
    let gemms = [(up.0, rounds[0]), (up.1, true), (down.0, rounds[1]), (down.1, true)];
    let gemms = gemms.iter().filter(|(_, is_there)| *is_there).map(|(step, _)| step);
    program.append(before.iter().chain(gemms).chain(behind).copied());
    program
}

fn on_gpu(call: &CallDesc, device: &Device) -> Result<Program> {
    let layer = &call.layer;
    super::require(layer, device)?;
    let rows = match call.source {
        Source::Routed(Routed { tokens, .. }) => Rows::Gathered { tokens, plain_x: call.x == X::Plain },
        Source::InOrder(InOrder { expected, .. }) => Rows::InOrder { expected, quantizes_x: call.x == X::Plain },
    };
    let (set, gemms) = (set_of(device, layer), Gemms::new(layer, call.slots(), rows, device));
    if let Source::Routed(routed) = &call.source {
        let one_launch = if device.whole { (set.one_launch)(routed, &gemms) } else { None };
        let routing = super::routing(routed.tokens, routed.top_k, layer.experts, routed.logits, device)?;
        return Ok(match one_launch {
            Some(step) => in_one_launch(call, device, routing, step),
            None => routed_program(call, routed, routing, &GemmsPlan::new(set, &gemms), device),
        });
    }
    Ok(program_in_order(call, &GemmsPlan::new(set, &gemms), device))
}

/// The program of a routed call whose layer is one launch.
fn in_one_launch(call: &CallDesc, device: &Device, routing: RoutingPlan, step: Step) -> Program {
    let (tile_tokens, layer) = (sm90::LAYER_TOKENS, &call.layer);
    let max_tiles = max_tiles(call.slots(), layer.experts, tile_tokens);
    let (counter_count, form) = match step {
        Step::RoutedLayer(_) => (0, Form::RoutedLayer),
        _ => (counters(max_tiles, layer.hidden).count(), Form::Layer),
    };
    let mut program = Program::new(call, Some(device), &Choice::new(tile_tokens, counter_count, form));
    if form == Form::Layer {
        program.append(routing.launches().map(|launch| Step::Route(Some(launch))));
    }
    program.append([step]);
    program
}

/// The program of a routed call: routing, the GEMMs, combine.
fn routed_program(
    call: &CallDesc,
    routed: &Routed,
    routing: RoutingPlan,
    gemms: &GemmsPlan,
    device: &Device,
) -> Program {
    let layer = &call.layer;
    let counter_count = match layer.format.activations() {
        Activations::Fp8(Fp8Scaling::Peak) => Counters::PEAK_HIDDEN as i32 + 1,
        _ if gemms.overlap.is_some() => Counters::with_done(layer.experts),
        _ => Counters::TILES_DONE as i32,
    };
    let mut program = Program::new(call, Some(device), &gemms.choice(counter_count));
    let down_schedule = gemms.down_tile_tokens.map(|_| Step::DownSchedule(super::schedule()));
    program.append(routing.launches().map(|launch| Step::Route(Some(launch))));
    program.append(down_schedule);
    program.append_gemms(call, gemms);
    program.append([Step::Combine(Some(super::combine(routed.tokens, layer.hidden, element(layer.dtype))))]);
    program
}

/// The program of a call on rows in the experts' order: a schedule of the rows, the GEMMs.
fn program_in_order(call: &CallDesc, gemms: &GemmsPlan, device: &Device) -> Program {
    let layer = &call.layer;
    let mut program = Program::new(call, Some(device), &gemms.choice(counters_of_rows(layer)));
    let finds_tiles = matches!(call.source, Source::InOrder(InOrder { finds_tiles: true, .. }));
    // A launch that rounds rows needs a schedule too.
    let rounds = gemms.quantize.iter().flatten().any(Option::is_some);
    match gemms.launches {
        GemmLaunches::Together(launch) if finds_tiles && !rounds && layer.experts <= MOST_EXPERTS => {
            program.append([Step::BothGemmsOfRows(launch)]);
        }
        _ => {
            program.append([Step::Schedule(Some(super::schedule()))]);
            program.append_gemms(call, gemms);
        }
    }
    program
}

impl GemmsPlan {
    fn choice(&self, counter_count: i32) -> Choice {
        let form = match self.launches {
            GemmLaunches::Apart(_) => Form::Apart { rounds_inside: self.quantize[1] == [None; 2] },
            GemmLaunches::Together(_) => Form::BothGemms,
        };
        let GemmsPlan { tile_tokens, down_tile_tokens, overlap, .. } = *self;
        Choice { tile_tokens, down_tile_tokens, overlap, counter_count, form }
    }
}

impl Program {
    /// A program without steps.
    fn new(call: &CallDesc, device: Option<&Device>, choice: &Choice) -> Program {
        let (ws, layer) = (Workspace::of(call), &call.layer);
        let routed = matches!(call.source, Source::Routed(_));
        let row_counts = if routed { At::range(&ws.histogram) } else { At::start(Buffer::RowCounts) };
        let schedule = |tile_tokens, (tiles, tile_count): (&Range, &Range)| Schedule {
            row_counts,
            tile_tokens,
            tile_step: tile_step(call, tile_tokens),
            tiles: At::range(tiles),
            tile_count: At::range(tile_count),
        };
        let (ids, slot_weights) = match call.source {
            Source::Routed(Routed { logits: Some(_), .. }) => (At::range(&ws.ids), At::range(&ws.weights)),
            Source::Routed(_) => (At::start(Buffer::Ids), At::start(Buffer::SlotWeights)),
            Source::InOrder(_) => (At::NONE, At::NONE),
        };
        let mut program = Program {
            steps: [None; MOST_STEPS],
            schedule: schedule(choice.tile_tokens, (&ws.tiles, &ws.tile_count)),
            down_schedule: choice.down_tile_tokens.map(|own| schedule(own, (&ws.down_tiles, &ws.down_tile_count))),
            max_tiles: max_tiles(call.slots(), layer.experts, choice.tile_tokens),
            counter_count: choice.counter_count,
            ids,
            slot_weights,
            gemms: gemms(call, &ws, device),
            rounds: [None; 2],
            overlap: choice.overlap,
            workspace: ws,
        };
        program.rounds = rounds::of(
            call,
            &mut program.gemms,
            &rounds::On {
                ws: &ws,
                tile_tokens: choice.tile_tokens,
                gpu: device.is_some(),
                both_gemms: choice.form == Form::BothGemms,
            },
        );
        program.finish_gemms(call, choice.form);
        program
    }

    /// Adapts the GEMMs' places and K to the launches' form.
    fn finish_gemms(&mut self, call: &CallDesc, form: Form) {
        let [up, down] = &mut self.gemms;
        if form == Form::RoutedLayer {
            // Such a launch itself rounds x and GEMM1's output.
            (up.x, down.x) = (At::start(Buffer::X), up.out);
        }
        if form == Form::Cpu || !matches!(call.activations, Activations::Fp8(_)) {
            return;
        }
        if form == (Form::Apart { rounds_inside: true }) {
            (up.out, up.out_scales) = (down.x, down.x_scales);
        }
        // Kernels of e4m3 count pairs of columns.
        (up.k, down.k) = (up.k / 2, down.k / 2);
    }

    fn append(&mut self, steps: impl IntoIterator<Item = Step>) {
        let first = self.steps().count();
        for (number, step) in steps.into_iter().enumerate() {
            self.steps[first + number] = Some(step);
        }
    }

    /// The steps of the GEMMs' launches.
    fn append_gemms(&mut self, call: &CallDesc, gemms: &GemmsPlan) {
        let [x, hidden] = gemms.quantize;
        let x = rounds::launches_of_x(call, x);
        // A launch for x stands between the schedule and GEMM1, which then need not wait for the schedule.
        self.gemms[0].schedule_is_older = x.iter().any(Option::is_some);
        self.append(x.into_iter().flatten().map(|launch| Step::RoundX(Some(launch))));
        match gemms.launches {
            GemmLaunches::Together(launch) => self.append([Step::BothGemms(launch)]),
            GemmLaunches::Apart([up, down]) => {
                self.append([Step::Gemm1(Some(up))]);
                self.append(hidden.into_iter().flatten().map(|launch| Step::RoundHidden(Some(launch))));
                self.append([Step::Gemm2(Some(down))]);
            }
        }
    }

    /// The steps, in their order.
    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        self.steps.iter().flatten()
    }

    /// The launches, in their order. A program for the CPU has none.
    pub fn launches(&self) -> impl Iterator<Item = AnyLaunch> + '_ {
        self.steps().filter_map(Step::launch)
    }

    /// The launches of the steps with this task.
    pub fn launches_of(&self, task: Task) -> impl Iterator<Item = AnyLaunch> + '_ {
        self.steps().filter(move |step| step.task() == task).filter_map(Step::launch)
    }
}

/// The step in which an expert's rows are cut into tiles.
fn tile_step(call: &CallDesc, tile_tokens: i32) -> i32 {
    match call.source {
        Source::Routed(_) if call.layer.format.is_fp8() => {
            fp8_sm90::tile_step(call.slots(), call.layer.experts, tile_tokens)
        }
        Source::Routed(_) => tile_tokens.min(16),
        Source::InOrder(_) if call.layer.format.is_fp8() && fp8_sm90::in_order(tile_tokens) => tile_tokens / 3,
        Source::InOrder(_) => 16,
    }
}

/// The places that both GEMMs read and write, in a call whose activations are not rounded.
fn gemms(call: &CallDesc, ws: &Workspace, device: Option<&Device>) -> [Gemm; 2] {
    let layer = &call.layer;
    let (gathers, row_divisor, out) = match call.source {
        Source::Routed(Routed { top_k, .. }) => (true, top_k as i32, At::range(&ws.rows)),
        Source::InOrder(_) => (false, 1, At::start(Buffer::Out)),
    };
    let up = Gemm {
        x: At::start(Buffer::X),
        x_scales: At::NONE,
        row_scales: At::NONE,
        gathers,
        row_divisor,
        k: layer.hidden as i32,
        out: At::range(&ws.hidden),
        out_scales: At::NONE,
        out_factors: At::NONE,
        schedule_is_older: false,
        order: Order::default(),
    };
    // Kernels that count whole blocks of w13's rows count whole blocks of w2's columns too.
    let whole_blocks = device.is_some_and(|device| fp8_sm90::serves(device, layer));
    let down = Gemm {
        x: up.out,
        gathers: false,
        row_divisor: 1,
        k: if whole_blocks { layer.inner() } else { layer.intermediate } as i32,
        out,
        // GEMM1 lets its successor start only after its own wait, so the schedule is complete by then.
        schedule_is_older: true,
        ..up
    };
    [up, down]
}
