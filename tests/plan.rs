//! Tests of plans against the kernel table and against brute force, without a GPU or Python.

mod legal;

use _oxmoe::desc::LayerDesc;
use _oxmoe::device::{Arch, Device};
use _oxmoe::kernel::AnyLaunch;
use _oxmoe::moe::plan::routing::{self, Logits};
use _oxmoe::moe::plan::{self, CallDesc, InOrder, Program, Routed, Source, Step, Task, Workspace, X};
use _oxmoe::params::{Dtype, Tile};
use _oxmoe::quant::{Format, Weights};
use _oxmoe::variants::{self, Family, Kernel, Variant};
use _oxmoe::workspace::ALIGNMENT;
use std::collections::HashSet;

const ARCHS: [u32; 7] = [80, 86, 89, 90, 100, 103, 120];

/// (experts, top_k, hidden, intermediate) of models' layers, of their slices under tensor and expert parallelism, and of awkward sizes.
const LAYERS: [(i64, i64, i64, i64); 20] = [
    (128, 8, 2048, 768),
    (128, 8, 4096, 1536),
    (128, 8, 2048, 192),
    (8, 2, 4096, 14336),
    (8, 2, 4096, 3584),
    (32, 4, 2880, 2880),
    (128, 4, 2880, 360),
    (256, 8, 7168, 2048),
    (256, 8, 7168, 256),
    (384, 8, 7168, 512),
    (512, 10, 2048, 512),
    (896, 16, 3584, 384),
    (64, 6, 2048, 1408),
    (128, 8, 4096, 704),
    (4, 2, 128, 16),
    (1, 1, 64, 32),
    (5, 2, 136, 136),
    (3, 2, 130, 70),
    (16, 16, 8, 8),
    (4, 2, 90, 64),
];

const TOKENS: [i64; 18] = [1, 2, 3, 4, 7, 16, 17, 64, 100, 129, 256, 700, 1024, 1025, 4096, 16384, 65536, 300_000];

const FORMATS: [Format; 13] = [
    Format::Bf16,
    Format::F16,
    Format::Mxfp4,
    Format::Mxfp4A8,
    Format::Mxfp8,
    Format::Fp8Block,
    Format::Fp8Tensor,
    Format::Fp8TensorToken,
    Format::Fp8TensorStatic,
    Format::Nvfp4,
    Format::Nvfp4A4,
    Format::Int4,
    Format::Int4Zeros,
];

fn layers() -> impl Iterator<Item = (LayerDesc, i64)> {
    LAYERS.into_iter().flat_map(|(experts, top_k, hidden, intermediate)| {
        // The hidden size may be a part of the columns of MXFP4 weights, so it may be any number.
        let fits = move |format: Format| {
            let whole = |size: i64, block: i64| size % block == 0;
            match format {
                Format::Fp8Block => whole(hidden, 128) && whole(intermediate, 128),
                _ if format.is_fp8() => whole(hidden, 128) && whole(intermediate, 16),
                Format::Mxfp8 | Format::Int4 | Format::Int4Zeros => whole(hidden, 32) && whole(intermediate, 32),
                _ if format.weights() == Weights::Nvfp4 => whole(hidden, 16) && whole(intermediate, 16),
                _ => whole(intermediate, format.spec().block),
            }
        };
        FORMATS.into_iter().filter(move |&format| fits(format)).flat_map(move |format| {
            [true, false].map(|gated| {
                let dtype = format.spec().compute;
                (LayerDesc { experts, hidden, intermediate, gated, dtype, format }, top_k)
            })
        })
    })
}

fn layers_on(device: &Device) -> impl Iterator<Item = (LayerDesc, i64)> + '_ {
    layers().filter(|(layer, _)| plan::require(layer, device).is_ok())
}

/// A usual GPU of every architecture, and a Hopper GPU that runs the portable kernels.
fn devices() -> impl Iterator<Item = Device> {
    let portable = Device { portable: true, ..Device::typical(Arch::SM90) };
    ARCHS.into_iter().map(|arch| Device::typical(Arch(arch))).chain([portable])
}

/// A routed call whose x is numbers.
fn routed(layer: LayerDesc, tokens: i64, top_k: i64) -> Routed {
    assert!(top_k <= layer.experts);
    Routed { tokens, top_k, logits: None, routes_inside: false }
}

/// Every layer that a device serves, with every number of tokens, with logits and with given ids.
fn routed_calls(device: &Device) -> impl Iterator<Item = (CallDesc, Routed)> + '_ {
    layers_on(device).flat_map(|(layer, top_k)| {
        TOKENS.into_iter().flat_map(move |tokens| {
            let logits = |plain| Some(Logits { experts: layer.experts as u32, groups: 1, plain });
            [(logits(true), true), (logits(true), false), (logits(false), true), (None, false)].map(
                |(logits, routes_inside)| {
                    let routed = Routed { logits, routes_inside, ..routed(layer, tokens, top_k) };
                    (CallDesc::new(layer, Source::Routed(routed)), routed)
                },
            )
        })
    })
}

fn program_of(call: &CallDesc, device: &Device) -> Program {
    plan::program(call, Some(device)).unwrap_or_else(|e| panic!("{call:?} on {device:?}: {e}"))
}

fn has(program: &Program, task: Task) -> bool {
    program.steps().any(|step| step.task() == task)
}

/// The launches with GEMMs in them.
fn gemms(program: &Program) -> Vec<AnyLaunch> {
    let tasks = [Task::Gemm1, Task::Gemm2, Task::BothGemms, Task::BothGemmsOfRows, Task::Layer, Task::RoutedLayer];
    program.steps().filter(|step| tasks.contains(&step.task())).filter_map(Step::launch).collect()
}

/// A call on rows in order.
fn in_order(layer: LayerDesc, rows: InOrder, quantizes_x: bool) -> CallDesc {
    CallDesc { x: if quantizes_x { X::Plain } else { X::Codes }, ..CallDesc::new(layer, Source::InOrder(rows)) }
}

/// Every layer that a device serves, called on rows in order, with expected rows and room for rows.
fn calls_in_order(device: &Device) -> impl Iterator<Item = (CallDesc, InOrder)> + '_ {
    layers_on(device).flat_map(|(layer, _)| {
        [(1, 1), (1, 64), (9, 128), (30, 1000), (64, 64), (200, 4096)].into_iter().flat_map(move |(expected, most)| {
            [(true, true), (false, true), (true, false)].map(|(quantizes_x, finds_tiles)| {
                let rows = InOrder { rows: most * layer.experts, expected, finds_tiles };
                (in_order(layer, rows, quantizes_x), rows)
            })
        })
    })
}

#[test]
fn programs_of_rows_in_order_fit() {
    for device in devices() {
        for (call, in_order) in calls_in_order(&device) {
            let (program, layer) = (program_of(&call, &device), call.layer);
            let (w, tile_tokens) = (program.workspace, program.schedule.tile_tokens);
            assert_eq!(w, Workspace::of_rows(&layer, in_order.rows), "not the same on every GPU");
            let tiles =
                layer.experts as u64 * (in_order.rows as u64 / layer.experts as u64).div_ceil(tile_tokens as u64);
            assert!(tiles <= program.max_tiles as u64 && tile_tokens % 16 == 0, "{call:?} on {device:?}");
            assert!(program.max_tiles as usize * size_of::<Tile>() <= w.tiles.bytes, "{call:?} on {device:?}");
            let counts = layer.format == Format::Fp8Block || layer.format.spec().block == 1;
            let awaited = if counts { 3 + layer.experts as usize } else { 0 };
            // A launch without a schedule counts in `counters`. x in codes belongs to fp8 formats.
            let alone = has(&program, Task::BothGemmsOfRows) && call.x == X::Plain;
            assert!(!alone || w.counters.bytes >= 4 * (2 + layer.experts as usize), "{call:?} on {device:?}");
            let finds = matches!(layer.format, Format::Mxfp4 | Format::Nvfp4 | Format::Int4 | Format::Int4Zeros)
                && layer.experts <= 128;
            let own = if finds { 2 + layer.experts as usize } else { 0 };
            assert_eq!(w.counters.bytes, 4 * awaited.max(own).max(4));
            let asked: Vec<AnyLaunch> = program.launches().collect();
            assert!(asked.iter().all(|l| l.grid > 0 && l.shared_bytes <= device.shared_bytes), "{asked:?}");
            let loaded: HashSet<Variant> = plan::reachable(&device, &layer).into_iter().collect();
            for l in &asked {
                assert!(
                    loaded.contains(&l.variant) && l.variant.runs_on(device.arch.image()),
                    "{call:?} on {device:?}: {l}"
                );
            }
            // The range holds the codes of x, and then those of GEMM1's output.
            let widest = layer.hidden.max(layer.intermediate);
            let codes = if layer.format == Format::Mxfp4A8 { plan::e4m3_columns(widest) } else { 0 };
            assert_eq!(w.hidden_e4m3.bytes, in_order.rows as usize * codes);
            // The number of expected rows decides only the tile and GEMM2's kernel.
            let expected = InOrder { expected: in_order.expected + 1, ..in_order };
            let other = program_of(&CallDesc { source: Source::InOrder(expected), ..call }, &device);
            let but_gemm2 = |program: &Program| {
                program.steps().copied().filter(|step| step.task() != Task::Gemm2).collect::<Vec<_>>()
            };
            let like =
                (other.gemms, other.rounds, but_gemm2(&other)) == (program.gemms, program.rounds, but_gemm2(&program));
            assert!(other.schedule.tile_tokens != tile_tokens || like, "{call:?} on {device:?}");
        }
    }
}

#[test]
fn programs_of_rows_in_order_quantise_what_gemm1_does_not() {
    let device = Device::typical(Arch::SM90);
    let names_of = |intermediate, format: Format, expected| {
        let layer =
            LayerDesc { experts: 32, hidden: 7168, intermediate, gated: true, dtype: format.spec().compute, format };
        let rows = InOrder { rows: 32 * 1024, expected, finds_tiles: true };
        let program = program_of(&in_order(layer, rows, true), &device);
        assert!(program.launches().all(|l| l.grid <= 8 * device.multiprocessors), "{program:?}");
        [Task::RoundX, Task::RoundHidden]
            .map(|task| program.launches_of(task).map(|l| l.variant.symbol()).collect::<Vec<_>>())
    };
    let names = |format, expected| names_of(2048, format, expected);
    for expected in [10, 102, 1024] {
        let tiles = ["quantize_fp8_tiles"].as_slice();
        assert_eq!(names(Format::Fp8Block, expected), [tiles, &[]]);
        // With 512 columns, GEMM1's output has fewer groups than there are multiprocessors.
        let after = if expected == 10 { tiles } else { &[] };
        assert_eq!(names_of(512, Format::Fp8Block, expected), [tiles, after]);
        assert_eq!(names(Format::Fp8TensorStatic, expected), [tiles; 2]);
        assert_eq!(names(Format::Fp8TensorToken, expected), [["quantize_fp8_tile_rows"]; 2]);
        assert_eq!(names(Format::Fp8Tensor, expected), [["quantize_fp8_tile_peak", "quantize_fp8_tiles"]; 2]);
        assert_eq!(names(Format::Mxfp4A8, expected), [["quantize_tiles_e4m3"]; 2]);
        assert_eq!(names(Format::Mxfp8, expected), [["round_tiles_mxfp8"].as_slice(), &[]]);
        assert_eq!(names(Format::Mxfp4, expected), [[""; 0]; 2]);
    }
}

#[test]
fn every_variant_is_chosen_and_every_choice_is_a_variant() {
    let table: HashSet<Variant> = variants::all().into_iter().collect();
    assert_eq!(table.len(), variants::all().len(), "a row is there twice");
    let mut chosen = HashSet::new();
    for device in devices() {
        for (call, routed) in routed_calls(&device) {
            chosen.extend(program_of(&call, &device).launches().map(|l| l.variant));
            let alone = routed.logits.and_then(|logits| routing::select_alone(routed.tokens as u32, logits));
            chosen.extend(alone.map(|l| l.kernel.variant()));
        }
        for (call, _) in calls_in_order(&device) {
            chosen.extend(program_of(&call, &device).launches().map(|l| l.variant));
        }
        chosen.insert(routing::ragged(1).kernel.variant());
    }
    // Loading weights is no part of a layer's plan, nor are all-reduces and the dense GEMM, whose own plans are tested beside them.
    chosen.extend(variants::quant::CONVERSIONS);
    chosen.extend([Family::Mxfp8Peak, Family::Mxfp8Pack].map(Variant::of));
    chosen.extend(variants::forms::FORMS.iter().filter_map(|row| row.pack).map(Kernel::variant));
    // This kernel reads the scales of tokens that a caller quantised.
    chosen.insert(Variant::of(Family::ExpandScales));
    // These kernels quantise dense tensors.
    chosen.extend([Family::QuantizeMxfp8, Family::DequantizeMxfp8].map(Variant::of));
    chosen.extend([16, 32].map(|block| variants::quant::quantize_nvfp4(block).variant()));
    chosen.extend(variants::dense::all());
    chosen.extend(variants::allreduce::all());
    let unknown: Vec<_> = chosen.difference(&table).collect();
    assert!(unknown.is_empty(), "chosen and not built: {unknown:#?}");
    let idle: Vec<_> = table.difference(&chosen).collect();
    assert!(idle.is_empty(), "built and never chosen: {idle:#?}");
}

#[test]
fn variants_of_one_unit_run_on_the_same_gpus() {
    let all = variants::all();
    for arch in ["80", "90a", "100f", "120f"] {
        for variant in &all {
            let first = all.iter().find(|other| other.unit() == variant.unit()).unwrap();
            assert_eq!(variant.runs_on(arch), first.runs_on(arch), "{} on {arch}", variant.symbol());
        }
    }
}

#[test]
fn families_are_in_their_order() {
    for (number, row) in variants::FAMILIES.iter().enumerate() {
        assert_eq!(row.family as usize, number, "{}", row.name);
        assert!(variants::all().iter().any(|variant| variant.family == row.family), "{} has no kernel", row.name);
    }
}

#[test]
fn symbols_are_unique() {
    let symbols: HashSet<String> = variants::all().iter().map(Variant::symbol).collect();
    assert_eq!(symbols.len(), variants::all().len());
}

#[test]
fn every_launch_is_legal_and_loaded_with_the_weights() {
    for device in devices() {
        for (layer, top_k) in layers_on(&device) {
            let loaded: HashSet<Variant> = plan::reachable(&device, &layer).into_iter().collect();
            let of_layer = |(call, routed): &(CallDesc, Routed)| call.layer == layer && routed.top_k == top_k;
            for (call, _) in routed_calls(&device).filter(of_layer) {
                for l in program_of(&call, &device).launches() {
                    let say = || format!("{call:?} on {device:?}: {l:?}");
                    assert!(loaded.contains(&l.variant), "{}", say());
                    legal::assert_launch(&l, &device, &say);
                }
            }
        }
    }
}

#[test]
fn a_layer_keeps_its_kernel_family_at_every_batch_size() {
    let hopper = |l: &AnyLaunch| l.variant.row().hopper;
    for device in devices() {
        for (layer, top_k) in layers_on(&device) {
            let programs = TOKENS.iter().map(|&tokens| {
                let call = CallDesc::new(layer, Source::Routed(routed(layer, tokens, top_k)));
                program_of(&call, &device)
            });
            let families: HashSet<bool> =
                programs.flat_map(|program| gemms(&program).iter().map(hopper).collect::<Vec<_>>()).collect();
            assert_eq!(families.len(), 1, "{layer:?} on {device:?}");
        }
    }
}

#[test]
fn e4m3_on_other_gpus_is_portable() {
    for device in devices().filter(|device| !device.is_hopper()) {
        for (layer, top_k) in layers().filter(|(layer, _)| layer.format.is_fp8() || layer.format == Format::Mxfp8) {
            let program = program_of(&CallDesc::new(layer, Source::Routed(routed(layer, 64, top_k))), &device);
            assert!(gemms(&program).iter().all(|l| l.variant.symbol().contains("8_portable_")), "{program:?}");
            // GEMM1 leaves bf16. A later launch rounds its output to e4m3, or to bf16 numbers of MXFP8.
            assert!(has(&program, Task::RoundX) && has(&program, Task::RoundHidden), "{program:?}");
            let odd = LayerDesc { hidden: layer.hidden + 32, ..layer };
            assert_eq!(plan::require(&odd, &device).is_err(), layer.format.is_fp8());
        }
    }
}

#[test]
fn nvfp4_on_other_gpus_is_portable() {
    for device in devices().filter(|device| !device.is_hopper()) {
        for (layer, top_k) in layers().filter(|(layer, _)| layer.format.weights() == Weights::Nvfp4) {
            let program = program_of(&CallDesc::new(layer, Source::Routed(routed(layer, 64, top_k))), &device);
            assert!(gemms(&program).iter().all(|l| l.variant.symbol().contains("nvfp4_portable_")), "{program:?}");
            let rounds = [layer.format == Format::Nvfp4A4; 2];
            assert_eq!([Task::RoundX, Task::RoundHidden].map(|task| has(&program, task)), rounds, "{program:?}");
        }
    }
}

#[test]
fn both_gemms_are_one_launch_and_find_masked_tiles_where_x_stays_as_it_is() {
    let mut alone = HashSet::new();
    for device in devices() {
        for (call, _) in routed_calls(&device) {
            let program = program_of(&call, &device);
            let both = has(&program, Task::BothGemms);
            let rounds_between = both && has(&program, Task::RoundHidden);
            let has_both = program.launches().any(|l| l.variant.has_both_gemms());
            assert_eq!((both, rounds_between), (has_both, false), "{program:?}");
        }
        for (call, in_order) in calls_in_order(&device) {
            let program = program_of(&call, &device);
            let both = has(&program, Task::BothGemms) || has(&program, Task::BothGemmsOfRows);
            let both_alone = both && !has(&program, Task::RoundX) && !has(&program, Task::RoundHidden);
            let finds = has(&program, Task::BothGemmsOfRows);
            assert_eq!(finds, both_alone && in_order.finds_tiles && call.layer.experts <= 128, "{program:?}");
            assert_eq!(has(&program, Task::Schedule), !finds, "{program:?}");
            let rounds_between = both && has(&program, Task::RoundHidden);
            let has_both = program.launches().any(|l| l.variant.has_both_gemms());
            assert_eq!((both, rounds_between), (has_both, false), "{program:?}");
            // x in codes belongs to fp8 formats.
            let numbers = finds && call.x == X::Plain;
            alone.extend(numbers.then_some(call.layer.format.spec().name));
        }
    }
    assert_eq!(alone, HashSet::from(["mxfp4", "nvfp4", "int4", "int4-zeros"]));
}

#[test]
fn a_fused_layer_fits_on_the_gpu_at_once() {
    for device in devices() {
        for (call, _) in routed_calls(&device) {
            let program = program_of(&call, &device);
            let together = program.steps().find(|step| matches!(step.task(), Task::Layer | Task::RoutedLayer));
            assert_eq!(has(&program, Task::Combine), together.is_none(), "{call:?} on {device:?}");
            let Some(launch) = together.and_then(Step::launch) else { continue };
            let most = device.multiprocessors * launch.variant.ctas_per_multiprocessor();
            assert!(launch.grid <= most, "{call:?} on {device:?}: {launch}");
        }
    }
}

/// The most tiles that any distribution of `slots` slots over `experts` experts needs, found by trying all of them.
fn most_tiles(slots: i64, experts: i64, tile_tokens: i64) -> i64 {
    let tiles = |count: i64| (count + tile_tokens - 1) / tile_tokens;
    if experts == 1 {
        return tiles(slots);
    }
    (0..=slots).map(|count| tiles(count) + most_tiles(slots - count, experts - 1, tile_tokens)).max().unwrap_or(0)
}

#[test]
fn max_tiles_is_the_worst_case() {
    for tile_tokens in [1, 2, 3, 4, 8] {
        for experts in 1..5 {
            for slots in 0..22 {
                let bound = plan::max_tiles(slots, experts, tile_tokens as i32) as i64;
                assert_eq!(
                    bound,
                    most_tiles(slots, experts, tile_tokens),
                    "{slots} slots, {experts} experts, {tile_tokens}"
                );
            }
        }
    }
}

#[test]
fn schedule_fits_its_range() {
    for device in devices() {
        for (call, routed) in routed_calls(&device) {
            let (program, layer) = (program_of(&call, &device), call.layer);
            let (w, tile_tokens) = (program.workspace, program.schedule.tile_tokens);
            assert_eq!(program.max_tiles, plan::max_tiles(call.slots(), layer.experts, tile_tokens), "{call:?}");
            assert!(program.max_tiles as usize * size_of::<Tile>() <= w.tiles.bytes, "{call:?} on {device:?}");
            // The schedule cuts experts in steps of 16 places, and a kernel takes tiles of up to its own width.
            let width = |l: &AnyLaunch| {
                assert!(l.variant.tokens > 0, "{} is no GEMM", l.variant.symbol());
                l.variant.tokens
            };
            assert!(tile_tokens == 8 || tile_tokens % 16 == 0, "{call:?} on {device:?}");
            assert!(gemms(&program).iter().all(|l| width(l) >= tile_tokens as u32), "{call:?} on {device:?}");
            assert!(program.counter_count as usize * 4 <= w.counters.bytes, "{call:?} on {device:?}");
            assert!(w.counters.bytes >= 8, "LayerCounters");
            assert_eq!(w, Workspace::of_slots(&layer, routed.tokens, routed.top_k), "not the same on every GPU");
        }
    }
    let cpu = LayerDesc { experts: 7, hidden: 8, intermediate: 8, gated: true, dtype: Dtype::F32, format: Format::F32 };
    for tokens in 0..200 {
        let most = plan::max_tiles(tokens * 3, cpu.experts, plan::CPU_TILE_TOKENS) as usize;
        assert!(most * size_of::<Tile>() <= Workspace::of_slots(&cpu, tokens, 3).tiles.bytes);
    }
}

/// (offset, bytes, bytes that kernels need) of each range, in their order.
fn needs(w: &Workspace, layer: &LayerDesc, tokens: i64, top_k: i64) -> [(usize, usize, usize); 17] {
    let (slots, experts) = ((tokens * top_k) as usize, layer.experts as usize);
    let element = if layer.dtype == Dtype::F32 { 4 } else { 2 };
    let inner = (layer.intermediate as usize).next_multiple_of(if layer.format.is_fp8() { 128 } else { 1 });
    let (x, hidden) = (tokens as usize * layer.hidden as usize, slots * inner);
    let fp8 = usize::from(layer.format.is_fp8());
    let e4m3 = usize::from(layer.format == Format::Mxfp4A8);
    let rounded = usize::from(matches!(layer.format, Format::Mxfp8 | Format::Nvfp4A4));
    let padded = |columns: i64| (columns as usize).next_multiple_of(64);
    let x_e4m3 = e4m3 * tokens as usize * padded(layer.hidden);
    [
        (w.ids.offset, w.ids.bytes, slots * 4),
        (w.weights.offset, w.weights.bytes, slots * 4),
        (w.histogram.offset, w.histogram.bytes, experts * 4),
        (w.offsets.offset, w.offsets.bytes, (experts + 1) * 4),
        (w.place_of_slot.offset, w.place_of_slot.bytes, slots * 4),
        (w.slot_of_place.offset, w.slot_of_place.bytes, slots * 4),
        (w.tile_count.offset, w.tile_count.bytes, 4),
        (w.hidden.offset, w.hidden.bytes, hidden * element),
        (w.rows.offset, w.rows.bytes, x_e4m3.max(slots * layer.hidden as usize * element)),
        (w.x_codes.offset, w.x_codes.bytes, fp8 * x),
        (w.x_scales.offset, w.x_scales.bytes, fp8 * x / 128 * 4),
        (w.hidden_codes.offset, w.hidden_codes.bytes, fp8 * hidden),
        (w.hidden_scales.offset, w.hidden_scales.bytes, fp8 * hidden / 128 * 4),
        (w.hidden_e4m3.offset, w.hidden_e4m3.bytes, e4m3 * slots * padded(layer.intermediate)),
        (w.row_scales.offset, w.row_scales.bytes, e4m3 * slots * 4),
        (w.down_tile_count.offset, w.down_tile_count.bytes, fp8 * 4),
        (w.x_rounded.offset, w.x_rounded.bytes, rounded * x * element),
    ]
}

#[test]
fn workspace_is_exact_aligned_and_disjoint() {
    for (layer, top_k) in layers() {
        for tokens in [0, 1, 5, 130, 4096] {
            let w = Workspace::of_slots(&layer, tokens, top_k);
            let mut ranges = needs(&w, &layer, tokens, top_k).to_vec();
            for &(_, bytes, need) in &ranges {
                assert_eq!(bytes, need, "{layer:?} {tokens}");
            }
            for range in [w.tiles, w.block_histogram, w.counters, w.down_tiles] {
                ranges.push((range.offset, range.bytes, 0));
            }
            ranges.sort_unstable();
            let mut end = 0;
            for (offset, bytes, _) in ranges {
                assert_eq!(offset % ALIGNMENT, 0);
                assert_eq!(offset, end, "a gap or an overlap: {w:?}");
                end = offset + bytes.next_multiple_of(ALIGNMENT);
            }
            assert_eq!(w.bytes, end, "{layer:?} {tokens}");
        }
    }
}

#[test]
fn workspace_never_shrinks_with_tokens() {
    for (layer, top_k) in layers() {
        let mut before = 0;
        for tokens in (0..2000).chain((2000..70_000).step_by(997)) {
            let bytes = Workspace::of_slots(&layer, tokens, top_k).bytes;
            assert!(bytes >= before, "{layer:?}: {tokens} tokens need {bytes}, fewer needed {before}");
            before = bytes;
        }
    }
}

#[test]
fn kernels_ask_for_no_more_threads_than_an_sm_has() {
    for variant in variants::all() {
        // A multiprocessor of sm_86, 89 and 120 has 1536 threads, and ptxas holds launch bounds to that.
        let most = if variant.runs_on("80") { 1536 } else { 2048 };
        assert!(variant.threads() * variant.ctas_per_multiprocessor() <= most, "{}", variant.symbol());
    }
}

/// Checks floors that were computed by hand, on a device that moves 1e12 bytes and does 1e14 flops a second.
#[test]
fn floor_of_known_layers() {
    let device = Device { bandwidth: 1e12, flops: 1e14, ..Device::typical(Arch::SM90) };
    let check = |format: Format, gated, (tokens, top_k), (memory, compute): (f64, f64)| {
        let dtype = format.spec().compute;
        let layer = LayerDesc { experts: 8, hidden: 1000, intermediate: 500, gated, dtype, format };
        let got = plan::floor(&layer, &routed(layer, tokens, top_k), &device);
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b.abs();
        assert!(near(got.0, memory) && near(got.1, compute), "{format:?}, {tokens} tokens: {got:?}");
    };
    // An expert has 3 x 500 000 weights. One token activates top_k experts: 2 x 3 MB, and 4 KB of x and output.
    check(Format::Bf16, true, (1, 2), (6.004, 0.06));
    // Without a gate an expert has 2 x 500 000 weights.
    check(Format::F16, false, (1, 2), (4.004, 0.04));
    // Four tokens with one expert each activate 8 (1 - (7 / 8)^4) experts.
    check(Format::Bf16, true, (4, 1), (3.0 * 8.0 * (1.0 - 2401.0 / 4096.0) + 0.016, 0.12));
    check(Format::Bf16, true, (100, 8), (24.4, 24.0));
    check(Format::Bf16, true, (0, 2), (0.0, 0.0));
    // MXFP4 has 4.25 bits for a weight and the rate of bf16. fp8 has 8 bits for a weight and the rate of e4m3.
    check(Format::Mxfp4, true, (1, 2), (1.59375 + 0.004, 0.06));
    check(Format::Fp8Tensor, true, (1, 2), (3.004, 0.06 / 1.77));
}
