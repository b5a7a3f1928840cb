//! Programs of calls: the steps that they have, and that each step reads what was given or what an earlier step has written.

use _oxmoe::desc::LayerDesc;
use _oxmoe::device::{Arch, Device};
use _oxmoe::moe::plan::rounds::Numbers;
use _oxmoe::moe::plan::routing::Logits;
use _oxmoe::moe::plan::steps::{At, Buffer};
use _oxmoe::moe::plan::{self, CallDesc, InOrder, Program, Routed, Source, Task, X};
use _oxmoe::quant::{Activations, Format, Weights, FORMATS};

/// A usual GPU of each generation, a Hopper GPU with the portable kernels, a part of a Hopper GPU, and the CPU.
fn devices() -> Vec<Option<Device>> {
    let portable = Device { portable: true, ..Device::typical(Arch::SM90) };
    let part = Device { whole: false, ..Device::typical(Arch::SM90) };
    let gpus = [80, 89, 90, 100, 120].map(|arch| Device::typical(Arch(arch)));
    gpus.into_iter().chain([portable, part]).map(Some).chain([None]).collect()
}

fn layer(format: Format, (experts, hidden, intermediate): (i64, i64, i64)) -> LayerDesc {
    LayerDesc { experts, hidden, intermediate, gated: true, dtype: format.spec().compute, format }
}

fn routed(tokens: i64, logits: bool) -> Source {
    let logits = logits.then_some(Logits { experts: 8, groups: 1, plain: true });
    Source::Routed(Routed { tokens, top_k: 2, logits, routes_inside: logits.is_some() })
}

fn in_order(rows: i64, finds_tiles: bool) -> Source {
    Source::InOrder(InOrder { rows, expected: rows / 8, finds_tiles })
}

/// Calls of every format that a device serves, in all forms.
fn calls(device: Option<&Device>) -> Vec<CallDesc> {
    let sizes = [(8, 256, 128), (8, 2048, 768), (8, 1024, 1024), (8, 4096, 7168), (8, 256, 144)];
    let mut all = Vec::new();
    for (spec, size) in FORMATS.iter().flat_map(|spec| sizes.map(|size| (spec, size))) {
        let layer = layer(spec.format, size);
        let whole = size.1 % spec.block == 0 && size.2 % spec.inner_block == 0;
        // Two formats on GPUs can be one format of layers on CPUs.
        if !whole || device.is_some_and(|device| plan::require(&layer, device).is_err()) {
            continue;
        }
        let sources = [1, 8, 300, 4096, 16384].map(|tokens| [routed(tokens, true), routed(tokens, false)]);
        let in_orders = [8, 512, 8192].map(|rows| [in_order(rows, true), in_order(rows, false)]);
        for source in sources.into_iter().chain(in_orders).flatten() {
            let call = CallDesc::new(layer, source);
            all.push(call);
            let codes = match (spec.weights, source) {
                (Weights::Fp8, Source::Routed(_)) => &[X::Codes, X::LooseCodes][..],
                (Weights::Fp8, Source::InOrder(_)) => &[X::Codes],
                _ if spec.activations == Activations::Nvfp4 => &[X::Codes],
                _ => &[],
            };
            let source = match source {
                // A launch with the routing inside rounds x from numbers, so it takes no codes.
                Source::Routed(of_numbers) => Source::Routed(Routed { routes_inside: false, ..of_numbers }),
                other => other,
            };
            all.extend(codes.iter().map(|&x| CallDesc { x, source, ..call }));
            if spec.activations == Activations::Nvfp4 {
                all.push(CallDesc { one_x_factor: true, ..call });
            }
        }
    }
    all
}

fn program(call: &CallDesc, device: Option<&Device>) -> Program {
    plan::program(call, device).unwrap_or_else(|e| panic!("{call:?} on {device:?}: {e}"))
}

fn tasks(call: &CallDesc, device: Option<&Device>) -> Vec<Task> {
    program(call, device).steps().map(|step| step.task()).collect()
}

/// Places that hold data.
struct Written(Vec<At>);

impl Written {
    fn write(&mut self, places: &[At]) {
        self.0.extend(places.iter().filter(|at| at.buffer != Buffer::None));
    }

    fn require(&self, places: &[At], say: &dyn Fn() -> String) {
        for at in places {
            assert!(at.buffer == Buffer::None || self.0.contains(at), "{at:?} holds nothing: {}", say());
        }
    }
}

#[test]
fn steps_read_what_is_there() {
    for device in devices() {
        for call in calls(device.as_ref()) {
            let program = program(&call, device.as_ref());
            let (ws, [up, down]) = (&program.workspace, &program.gemms);
            let given = [Buffer::X, Buffer::UpFactors, Buffer::DownFactors].map(At::start);
            let mut written = Written(given.to_vec());
            if call.x != X::Plain {
                written.write(&[At::start(Buffer::XScales)]);
            }
            match call.source {
                Source::Routed(Routed { logits: None, .. }) => {
                    written.write(&[Buffer::Ids, Buffer::SlotWeights].map(At::start));
                }
                Source::Routed(_) => {}
                Source::InOrder(_) => written.write(&[At::start(Buffer::RowCounts)]),
            }
            let counters = At::range(&ws.counters);
            for step in program.steps() {
                let say = || format!("{step:?} of {call:?} on {device:?}: {program:?}");
                assert_eq!(step.launch().is_some(), device.is_some(), "{}", say());
                match step.task() {
                    Task::Select => written.write(&[program.ids, program.slot_weights]),
                    Task::Route => {
                        if device.is_none() {
                            written.require(&[program.ids], &say);
                        }
                        let tables = [&ws.histogram, &ws.offsets, &ws.place_of_slot, &ws.slot_of_place];
                        written.write(&tables.map(At::range));
                        written.write(&[program.ids, program.slot_weights, program.schedule.tiles, counters]);
                    }
                    Task::Schedule => {
                        written.require(&[program.schedule.row_counts], &say);
                        written.write(&[program.schedule.tiles, counters]);
                    }
                    Task::DownSchedule => {
                        let own = program.down_schedule.unwrap_or_else(|| panic!("{}", say()));
                        written.require(&[own.row_counts], &say);
                        written.write(&[own.tiles]);
                    }
                    Task::RoundX | Task::RoundHidden => {
                        let round = program.rounds[usize::from(step.task() == Task::RoundHidden)];
                        let round = round.unwrap_or_else(|| panic!("{}", say()));
                        written.require(&[round.from], &say);
                        if let Numbers::Nvfp4(own) = round.to {
                            written.require(&[own.codes_scales, own.factors], &say);
                        }
                        written.write(&[round.out, round.scales]);
                    }
                    Task::Gemm1 | Task::Gemm2 => {
                        let (gemm, schedule) = match step.task() {
                            Task::Gemm1 => (up, &program.schedule),
                            _ => (down, program.down_schedule.as_ref().unwrap_or(&program.schedule)),
                        };
                        written.require(&[gemm.x, gemm.x_scales, gemm.row_scales, schedule.tiles], &say);
                        if gemm.gathers {
                            written.require(&[At::range(&ws.slot_of_place)], &say);
                        }
                        written.write(&[gemm.out, gemm.out_scales]);
                    }
                    Task::BothGemms | Task::BothGemmsOfRows => {
                        let schedule = if step.task() == Task::BothGemms { program.schedule.tiles } else { At::NONE };
                        written.require(&[up.x, up.x_scales, up.row_scales, schedule], &say);
                        written.write(&[up.out, up.out_scales]);
                        written.require(&[down.x], &say);
                        written.write(&[down.out]);
                    }
                    Task::Layer => {
                        let place_of_slot = At::range(&ws.place_of_slot);
                        written.require(&[up.x, program.schedule.tiles, counters, place_of_slot], &say);
                        written.write(&[At::start(Buffer::Out)]);
                    }
                    Task::RoutedLayer => {
                        written.require(&[up.x], &say);
                        assert_eq!(down.x, up.out, "{}", say());
                        written.write(&[At::start(Buffer::Out)]);
                    }
                    Task::Combine => {
                        let place_of_slot = At::range(&ws.place_of_slot);
                        written.require(&[down.out, place_of_slot, program.slot_weights], &say);
                        written.write(&[At::start(Buffer::Out)]);
                    }
                }
            }
            let done = || format!("{call:?} on {device:?}: {program:?}");
            written.require(&[At::start(Buffer::Out)], &done);
        }
    }
}

#[test]
fn calls_differ_in_what_stands_around_the_gemms() {
    let gemms = |tasks: &[Task]| {
        let around = [Task::Select, Task::Route, Task::Schedule, Task::DownSchedule, Task::Combine];
        tasks.iter().copied().filter(|task| !around.contains(task)).collect::<Vec<_>>()
    };
    for device in devices() {
        for spec in FORMATS.iter().filter(|spec| device.is_none() || spec.cuda) {
            let layer = layer(spec.format, (8, 256, 128));
            if device.as_ref().is_some_and(|device| plan::require(&layer, device).is_err()) {
                continue;
            }
            let of = |source| tasks(&CallDesc::new(layer, source), device.as_ref());
            let (slots, rows) = (of(routed(256, false)), of(in_order(512, false)));
            assert_eq!(gemms(&slots), gemms(&rows), "{spec:?} on {device:?}");
            assert_eq!((slots[0], *slots.last().unwrap()), (Task::Route, Task::Combine), "{spec:?} on {device:?}");
            assert_eq!(rows[0], Task::Schedule, "{spec:?} on {device:?}");
        }
    }
}

#[test]
fn steps_of_known_calls() {
    use Task::*;
    let hopper = Device::typical(Arch::SM90);
    let of = |format, size, source| tasks(&CallDesc::new(layer(format, size), source), Some(&hopper));
    let small = (8, 2048, 768);
    assert_eq!(of(Format::Bf16, small, routed(8, true)), [RoutedLayer]);
    assert_eq!(of(Format::Bf16, (8, 4096, 7168), routed(1, false)), [Route, Layer]);
    assert_eq!(of(Format::Bf16, small, routed(300, true)), [Route, Route, Gemm1, Gemm2, Combine]);
    assert_eq!(of(Format::Mxfp4, small, in_order(512, true)), [BothGemmsOfRows]);
    assert_eq!(of(Format::Mxfp4, small, in_order(512, false)), [Schedule, BothGemms]);
    assert_eq!(of(Format::Nvfp4A4, small, routed(64, false)), [Route, RoundX, BothGemms, Combine]);
    let peaks = [Route, RoundX, RoundX, Gemm1, RoundHidden, RoundHidden, Gemm2, Combine];
    assert_eq!(of(Format::Fp8Tensor, small, routed(64, false)), peaks);
    let many = of(Format::Fp8Block, small, routed(1024, false));
    assert_eq!(many, [Route, DownSchedule, RoundX, Gemm1, Gemm2, Combine]);
    let fp8 = CallDesc::new(layer(Format::Fp8Block, small), routed(64, false));
    // Eight experts have fewer groups of GEMM1's output than there are multiprocessors, so a launch of its own rounds that output.
    let of_codes = |x| tasks(&CallDesc { x, ..fp8 }, Some(&hopper));
    assert_eq!(of_codes(X::Codes), [Route, Gemm1, RoundHidden, Gemm2, Combine]);
    assert_eq!(of_codes(X::LooseCodes), [Route, RoundX, Gemm1, RoundHidden, Gemm2, Combine]);
    // A part of a GPU may not hold all CTAs of a launch at once.
    let part = Device { whole: false, ..hopper.clone() };
    let apart = tasks(&CallDesc::new(layer(Format::Bf16, small), routed(8, true)), Some(&part));
    assert_eq!(apart, [Route, Gemm1, Gemm2, Combine]);

    let on_cpu = |call: &CallDesc| tasks(call, None);
    assert_eq!(on_cpu(&fp8), [Route, RoundX, Gemm1, RoundHidden, Gemm2, Combine]);
    assert_eq!(on_cpu(&CallDesc { x: X::Codes, ..fp8 }), [Route, Gemm1, RoundHidden, Gemm2, Combine]);
    let bf16 = CallDesc::new(layer(Format::Bf16, small), routed(64, true));
    assert_eq!(on_cpu(&bf16), [Select, Route, Gemm1, Gemm2, Combine]);
    // On CPUs the layer says whether activations become NVFP4.
    let nvfp4 = CallDesc::new(layer(Format::Nvfp4, small), in_order(512, true));
    assert_eq!(on_cpu(&nvfp4), [Schedule, Gemm1, Gemm2]);
    let rounded = CallDesc { activations: Activations::Nvfp4, ..nvfp4 };
    assert_eq!(on_cpu(&rounded), [Schedule, RoundX, Gemm1, RoundHidden, Gemm2]);
}

#[test]
fn kernels_of_e4m3_count_pairs_of_columns() {
    let call = CallDesc::new(layer(Format::Fp8TensorToken, (8, 256, 144)), routed(64, false));
    let columns = |device: Option<&Device>| program(&call, device).gemms.map(|gemm| gemm.k);
    // Hopper's kernels count whole blocks of 128 columns. The portable kernels count the columns that there are.
    assert_eq!(columns(Some(&Device::typical(Arch::SM90))), [128, 128]);
    assert_eq!(columns(Some(&Device::typical(Arch::SM120))), [128, 72]);
    assert_eq!(columns(None), [256, 144]);
}
