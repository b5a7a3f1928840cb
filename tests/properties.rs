//! Properties of plans, workspaces, layouts and number formats for random sizes, without a GPU or Python.
//!
//! Draws depend on OXMOE_TEST_SEED if it is set: `.ci/run` sets it from the commit. A failing value is shrunk and printed.

mod legal;

use _oxmoe::cpu::narrow::{e2m1, e4m3, e4m3_value};
use _oxmoe::cpu::{cut, pack_mxfp4, unpack_mxfp4};
use _oxmoe::dense::plan::MmPlan;
use _oxmoe::desc::LayerDesc;
use _oxmoe::device::{Arch, Device};
use _oxmoe::moe::plan::routing::Logits;
use _oxmoe::moe::plan::{self, CallDesc, InOrder, Routed, Source, Workspace, X};
use _oxmoe::params::{PackMxfp4Params, Tile, W13Layout};
use _oxmoe::quant::layouts::{cutlass, hopper, Conversion, Layout, Matrices};
use _oxmoe::quant::nvfp4::ScaleLayout;
use _oxmoe::quant::packed::Extent;
use _oxmoe::quant::{fp8, mxfp4, mxfp8, Format};
use _oxmoe::variants::Form;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// The time for which one property is tried.
const BOX: Duration = Duration::from_millis(1500);

/// Holds `property` against random values until the time is over.
fn check<S: Strategy>(values: S, property: impl Fn(S::Value))
where
    S::Value: std::fmt::Debug + Clone,
{
    let seed: u64 = match std::env::var("OXMOE_TEST_SEED") {
        Ok(text) => text.parse().expect("OXMOE_TEST_SEED is a number"),
        Err(_) => std::process::id().into(),
    };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { cases: 32, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let begun = Instant::now();
    while begun.elapsed() < BOX {
        let result = runner.run(&values, |value| {
            property(value);
            Ok(())
        });
        match result {
            Ok(()) => {}
            Err(TestError::Fail(reason, value)) => panic!("OXMOE_TEST_SEED={seed}: {value:?}: {reason}"),
            Err(TestError::Abort(reason)) => panic!("OXMOE_TEST_SEED={seed}: {reason}"),
        }
    }
}

// Plans

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

/// Sizes of every magnitude up to 2^bits.
fn size(bits: u32) -> impl Strategy<Value = i64> {
    (0..=bits).prop_flat_map(|bits| (1 << bits >> 1)..=(1i64 << bits)).prop_map(|size| size.max(1))
}

/// GPUs of every architecture, also slices of them, and Hopper GPUs that run the portable kernels.
fn devices() -> impl Strategy<Value = Device> {
    let arch = prop::sample::select(vec![80, 86, 89, 90, 90, 90, 100, 103, 120]);
    (arch, prop::option::of(1u32..=200), prop::bool::weighted(0.2)).prop_map(|(arch, multiprocessors, portable)| {
        let typical = Device::typical(Arch(arch));
        let multiprocessors = multiprocessors.unwrap_or(typical.multiprocessors);
        Device { multiprocessors, portable: portable && arch == 90, ..typical }
    })
}

fn layers() -> impl Strategy<Value = LayerDesc> {
    (prop::sample::select(&FORMATS[..]), size(10), size(13), size(13), any::<bool>()).prop_map(
        |(format, experts, hidden, intermediate, gated)| {
            let unit = format.spec().block;
            let whole = |size: i64| (size + unit - 1) / unit * unit;
            let (hidden, intermediate) = (whole(hidden), whole(intermediate));
            LayerDesc { experts: experts.min(1024), hidden, intermediate, gated, dtype: format.spec().compute, format }
        },
    )
}

fn routed_calls() -> impl Strategy<Value = (CallDesc, Routed)> {
    let x = prop::sample::select(&[X::Plain, X::Codes, X::LooseCodes][..]);
    (layers(), size(17), size(5), any::<(bool, bool, bool)>(), x).prop_map(
        |(layer, tokens, top_k, (given, plain, routes_inside), x)| {
            let logits = (!given).then_some(Logits { experts: layer.experts as u32, groups: 1, plain });
            // A launch with the routing inside rounds x from numbers, so it takes no codes.
            let routes_inside = routes_inside && x == X::Plain;
            let routed = Routed { tokens, top_k: top_k.min(layer.experts), logits, routes_inside };
            (CallDesc { x, ..CallDesc::new(layer, Source::Routed(routed)) }, routed)
        },
    )
}

#[test]
fn every_routed_program_fits_its_device() {
    check((routed_calls(), devices()), |((call, routed), device)| {
        let say = || format!("{call:?} on {device:?}");
        if plan::require(&call.layer, &device).is_err() {
            return;
        }
        let program = plan::program(&call, Some(&device)).unwrap_or_else(|e| panic!("{}: {e}", say()));
        let loaded: HashSet<_> = plan::reachable(&device, &call.layer).into_iter().collect();
        for l in program.launches() {
            assert!(loaded.contains(&l.variant), "{l:?} {}", say());
            legal::assert_launch(&l, &device, &|| format!("{l:?} {}", say()));
        }
        let w = program.workspace;
        assert_eq!(w, Workspace::of_slots(&call.layer, routed.tokens, routed.top_k), "{}", say());
        assert!(program.max_tiles as usize * size_of::<Tile>() <= w.tiles.bytes, "{}", say());
        assert!(program.counter_count as usize * 4 <= w.counters.bytes, "{}", say());
        assert_eq!(plan::program(&call, Some(&device)).expect("as before"), program, "{}", say());
    });
}

/// Calls up to the limits of what kernels count: 2^30 slots, and 2^31 vectors of 8 elements (of one element in odd rows).
fn extreme_calls() -> impl Strategy<Value = (CallDesc, i64)> {
    let source = (size(30), size(5), any::<(bool, bool, bool)>());
    let sizes = (prop::sample::select(&FORMATS[..]), size(10), size(30), size(30), any::<bool>());
    (sizes, source).prop_map(
        |((format, experts, hidden, intermediate, gated), (rows, top_k, (given, plain, routed)))| {
            let limit = i64::from(i32::MAX / 2);
            let whole = |size: i64, unit: i64| (size / unit).clamp(1, limit / 2 / unit) * unit;
            let (hidden, intermediate) = (whole(hidden, format.spec().block), whole(intermediate, format.spec().block));
            let layer = LayerDesc { experts, hidden, intermediate, gated, dtype: format.spec().compute, format };
            let most = (1 << 31) * if hidden % 8 == 0 { 8 } else { 1 } / hidden.max(layer.inner());
            let top_k = top_k.min(experts);
            // NVFP4 may round rows once for each of their slots.
            let rows = rows.min(limit).min(most) / top_k;
            let logits = (!given).then_some(Logits { experts: experts as u32, groups: 1, plain });
            let source = match routed {
                true => Source::Routed(Routed { tokens: rows.max(1), top_k, logits, routes_inside: true }),
                false => Source::InOrder(InOrder {
                    rows: rows.max(1),
                    expected: i64::MAX >> (top_k - 1),
                    finds_tiles: given,
                }),
            };
            (CallDesc::new(layer, source), rows)
        },
    )
}

/// Sizes that no GPU's memory holds wrap nowhere, and their launches are legal.
#[test]
fn calls_at_the_limits_of_sizes_fit() {
    check((extreme_calls(), devices()), |((call, rows), device)| {
        if rows == 0 || plan::require(&call.layer, &device).is_err() {
            return;
        }
        let say = || format!("{call:?} on {device:?}");
        let program = plan::program(&call, Some(&device)).unwrap_or_else(|e| panic!("{}: {e}", say()));
        for l in program.launches() {
            legal::assert_launch(&l, &device, &|| format!("{l:?} {}", say()));
        }
        legal::assert_workspace(&program.workspace, &say);
        assert!(program.max_tiles > 0 && program.counter_count >= 0, "{}", say());
        // However many rows an expert has, none of its tiles has more than a kernel takes.
        let schedules = [Some(&program.schedule), program.down_schedule.as_ref()];
        for s in schedules.into_iter().flatten() {
            let widest = |rows| cut(rows, s.tile_tokens, s.tile_step).map(|(_, count)| count).max();
            assert!((1..=5 * s.tile_tokens).all(|rows| widest(rows) <= Some(s.tile_tokens)), "{s:?} {}", say());
        }
    });
}

#[test]
fn every_program_of_rows_in_order_fits_its_device() {
    let rows = (size(12), 0..=4096i64, any::<(bool, bool)>());
    check((layers(), rows, devices()), |(layer, (expected, each, (quantizes_x, finds_tiles)), device)| {
        if plan::require(&layer, &device).is_err() {
            return;
        }
        let rows = each * layer.experts;
        let source = Source::InOrder(InOrder { rows, expected, finds_tiles });
        let call = CallDesc { x: if quantizes_x { X::Plain } else { X::Codes }, ..CallDesc::new(layer, source) };
        let say = || format!("{call:?} on {device:?}");
        let program = plan::program(&call, Some(&device)).unwrap_or_else(|e| panic!("{}: {e}", say()));
        for l in program.launches() {
            legal::assert_launch(&l, &device, &|| format!("{l:?} {}", say()));
        }
        let w = program.workspace;
        legal::assert_workspace(&w, &say);
        assert!(program.max_tiles as usize * size_of::<Tile>() <= w.tiles.bytes, "{}", say());
        assert!(Workspace::of_rows(&layer, rows + 1).bytes >= w.bytes, "{}", say());
    });
}

#[test]
fn workspaces_are_ranges_apart_and_grow_with_tokens() {
    check((layers(), size(17), size(17), size(5)), |(layer, tokens, more, top_k)| {
        let say = || format!("{layer:?}, {tokens} and {more} more tokens, top-{top_k}");
        let w = Workspace::of_slots(&layer, tokens, top_k);
        legal::assert_workspace(&w, &say);
        assert!(Workspace::of_slots(&layer, tokens + more, top_k).bytes >= w.bytes, "{}", say());
        let slots = (tokens * top_k) as usize;
        assert_eq!(w.hidden.bytes, slots * layer.intermediate as usize * 2, "{}", say());
    });
}

#[test]
fn every_dense_plan_fits_its_device() {
    check((size(16), size(15), size(10), 1..=200u32), |(m, n, k, multiprocessors)| {
        let device = Device { multiprocessors, ..Device::typical(Arch::SM90) };
        let plan = MmPlan::new(m, n, 32 * k, &device);
        let say = || format!("{m} x {n} x {}: {plan:?}", 32 * k);
        for l in plan.launches() {
            assert!(
                l.grid >= 1 && l.grid.is_multiple_of(l.cluster) && l.block.is_multiple_of(32) && l.block <= 1024,
                "{}",
                say()
            );
            assert!(l.shared_bytes <= device.shared_bytes, "{}", say());
        }
        assert!(plan.partial_bytes >= 0 && plan.launches().count() >= 1, "{}", say());
    });
}

// Layouts

fn matrices(row_unit: usize, column_unit: usize) -> impl Strategy<Value = Matrices> {
    let sizes = (1..=3usize, 1..=(256 / row_unit).max(2), 1..=(512 / column_unit).max(2));
    sizes.prop_map(move |(count, rows, columns)| Matrices {
        count,
        rows: rows * row_unit,
        columns: columns * column_unit,
    })
}

/// `bytes` bytes of a generator that starts at `seed`. A test that fails needs to shrink only the sizes.
fn bytes_of(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed | 1;
    (0..bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        })
        .collect()
}

/// Checks that converted bytes come back, and that a conversion only moves scales, or the bits of codes.
fn there_and_back(layout: Layout, scales: bool, plain: Matrices, held: Matrices, seed: u64) {
    let conversion = Conversion { layout, scales, back: false, plain, held };
    let from = bytes_of(seed, plain.bytes());
    let (mut to, mut back) = (vec![0xAA; held.bytes()], vec![0xAA; plain.bytes()]);
    conversion.on_host(&from, &mut to);
    Conversion { back: true, ..conversion }.on_host(&to, &mut back);
    assert_eq!(back, from, "{conversion:?}");
    if !scales {
        // A conversion takes codes apart and puts them together again. Their bits move, and none is lost.
        let bits = |bytes: &[u8]| bytes.iter().map(|byte| byte.count_ones()).sum::<u32>();
        assert_eq!(bits(&from), bits(&to), "{conversion:?}: other codes, or padding that is not 0");
        return;
    }
    let sorted = |bytes: &[u8], padding: usize| {
        let mut bytes = [bytes, &vec![0; padding]].concat();
        bytes.sort_unstable();
        bytes
    };
    let padding = held.bytes() - plain.bytes();
    assert!(sorted(&from, padding) == sorted(&to, 0), "{conversion:?}: other scales, or padding that is not 0");
}

#[test]
fn hopper_layouts_come_back() {
    check((matrices(1, 1), prop::sample::select(vec![64usize, 256]), any::<u64>()), |(plain, rows, seed)| {
        let plain = Matrices { columns: plain.columns * 16, ..plain };
        let held = hopper::padded_values(plain, rows);
        there_and_back(Layout::Hopper { num_warps: 8 }, false, plain, held, seed);
    });
    check((matrices(1, 1), 0..=4u32, any::<u64>()), |(plain, warps, seed)| {
        let held = hopper::padded_scales(plain, 1 << warps);
        there_and_back(Layout::Hopper { num_warps: 1 << warps }, true, plain, held, seed);
    });
}

#[test]
fn cutlass_layouts_come_back() {
    for release in [cutlass::Release::V0_6, cutlass::Release::V0_7] {
        check((matrices(cutlass::ROWS, cutlass::COLUMNS), any::<u64>()), |(plain, seed)| {
            there_and_back(Layout::Cutlass(release), false, plain, plain, seed);
        });
        let rows = if release == cutlass::Release::V0_6 { cutlass::ROWS } else { cutlass::FOLDED_ROWS };
        check((matrices(rows, cutlass::GROUPS), any::<u64>()), |(plain, seed)| {
            there_and_back(Layout::Cutlass(release), true, plain, plain, seed);
        });
    }
}

#[test]
fn swizzled_scales_have_places_of_their_own() {
    for layout in [ScaleLayout::Swizzled128x4, ScaleLayout::Swizzled8x4, ScaleLayout::Linear] {
        check((1..=300usize, 1..=40usize), |(rows, blocks)| {
            let mut taken = vec![false; layout.bytes(rows, blocks)];
            let (padded_rows, padded_blocks) = layout.padded(rows, blocks);
            for (row, block) in (0..padded_rows).flat_map(|row| (0..padded_blocks).map(move |block| (row, block))) {
                let place = layout.offset(row, block, padded_blocks);
                assert!(!std::mem::replace(&mut taken[place], true), "{layout:?}: {row}, {block} of {rows} x {blocks}");
            }
            assert!(taken.iter().all(|&taken| taken), "{layout:?}: a place of {rows} x {blocks} is nobody's");
        });
    }
}

#[test]
fn packed_mxfp4_comes_back() {
    let layouts = [W13Layout::GateUp, W13Layout::UpGate, W13Layout::Interleaved];
    let sizes = (1..=3i32, 1..=200i32, 1..=9i32, prop::option::of(prop::sample::select(layouts.to_vec())));
    check((sizes, 0..=243u8, any::<u64>()), |((experts, rows, row_blocks, layout), least, seed)| {
        let rows = if layout.is_some() { 2 * rows } else { rows };
        let scaled = (experts * rows * row_blocks) as usize;
        let codes = bytes_of(seed, 16 * scaled);
        // Each scale byte is NaN's, or one of the 12 binades that a matrix keeps exactly.
        let drawn = bytes_of(!seed, scaled).into_iter();
        let scales: Vec<u8> = drawn.map(|byte| if byte > 250 { 255 } else { least + byte % 12 }).collect();
        let extent =
            Extent { form: Form::Mxfp4, experts: experts.into(), rows: rows.into(), k: (32 * row_blocks).into() };
        let (mut given, mut given_scales) = (codes.clone(), scales.clone());
        let mut packed = (vec![0xAA; extent.code_bytes()], vec![0xAA; extent.scale_bytes()]);
        let mut expert_scales = vec![f32::NAN; experts as usize];
        let mut params = PackMxfp4Params {
            codes: given.as_mut_ptr(),
            scales: given_scales.as_mut_ptr(),
            row_blocks,
            experts,
            rows,
            used_rows: rows,
            k: 32 * row_blocks,
            gated: layout.is_some(),
            layout: layout.unwrap_or(W13Layout::GateUp),
            packed_codes: packed.0.as_mut_ptr(),
            packed_scales: packed.1.as_mut_ptr(),
            expert_scales: expert_scales.as_mut_ptr(),
            e4m3: false,
        };
        // SAFETY: every pointer is to as much memory as the sizes say.
        unsafe { pack_mxfp4(&params) };
        assert_eq!((&given, &given_scales), (&codes, &scales), "the checkpoint's were changed");
        let (mut back, mut back_scales) = (vec![0xAA; codes.len()], vec![0xAA; scales.len()]);
        (params.codes, params.scales) = (back.as_mut_ptr(), back_scales.as_mut_ptr());
        // SAFETY: every pointer is to as much memory as the sizes say.
        unsafe { unpack_mxfp4(&params) };
        assert_eq!(back_scales, scales);
        for (block, &scale) in scales.iter().enumerate() {
            let place = 16 * block..16 * block + 16;
            // Packing drops the codes of NaN blocks.
            let expected = if scale == 255 { &[0; 16][..] } else { &codes[place.clone()] };
            assert_eq!(&back[place], expected, "block {block}");
        }
    });
}

// Numbers

/// Random numbers of every binade, with infinities and NaN among them.
fn numbers(count: usize) -> impl Strategy<Value = Vec<f32>> {
    vec(prop_oneof![4 => any::<u32>().prop_map(f32::from_bits), 4 => -8.0f32..8.0, 1 => Just(0.0)], count)
}

#[test]
fn narrow_numbers_are_the_nearest() {
    type Grid = (fn(f32) -> f32, Vec<f32>, f32);
    let grids: [Grid; 2] = [
        (|x| e4m3_value(e4m3(x)), (0..=0x7E).map(e4m3_value).collect(), 448.0),
        (
            |x| [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(e2m1(x) & 7)],
            vec![0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
            6.0,
        ),
    ];
    for (narrow, grid, most) in &grids {
        for &value in grid {
            assert_eq!(narrow(value), value);
        }
        check(numbers(64), |numbers| {
            for x in numbers.into_iter().filter(|x| !x.is_nan()).map(f32::abs) {
                let x = f64::from(x.min(*most));
                let error = (f64::from(narrow(x as f32)) - x).abs();
                let nearest = grid.iter().map(|&value| (f64::from(value) - x).abs()).fold(f64::INFINITY, f64::min);
                assert_eq!(error, nearest, "{x}");
            }
        });
    }
}

/// Replaces numbers that may become infinite when they are rounded to fewer bits: infinities, NaN, and the largest binade, whose largest
/// number rounds to 2^128.
fn stay_finite(x: &mut [f32]) {
    let most = 2.0f32.powi(127);
    x.iter_mut().filter(|x| !(-most..=most).contains(*x)).for_each(|x| *x = 1.0);
}

#[test]
fn quantised_numbers_stay_when_quantised_again() {
    check(numbers(128), |mut x| {
        stay_finite(&mut x);
        for rounding in [mxfp4::Rounding::Up, mxfp4::Rounding::Down] {
            let (mut codes, mut scales) = (vec![0; x.len() / 2], vec![0; x.len() / 32]);
            mxfp4::quantize(&x, rounding, &mut codes, &mut scales);
            let mut once = vec![f32::NAN; x.len()];
            mxfp4::dequantize(&codes, &scales, &mut once);
            let mut twice = vec![f32::NAN; x.len()];
            mxfp4::quantize(&once, rounding, &mut codes, &mut scales);
            mxfp4::dequantize(&codes, &scales, &mut twice);
            assert_eq!(once, twice, "{rounding:?}");
        }
    });
    check(numbers(32), |mut x| {
        stay_finite(&mut x);
        let quantised = |x: &[f32]| {
            let (scale, codes) = mxfp8::quantize_group(x.try_into().expect("32 numbers"));
            codes.map(|code| mxfp8::value(code, scale))
        };
        let once = quantised(&x);
        assert_eq!(once, quantised(&once));
    });
}

#[test]
fn quantised_groups_are_half_a_step_off_at_most() {
    check((numbers(128), any::<bool>()), |(mut x, powers)| {
        // Small and large numbers become 0, so that squares and reciprocals of the scale stay normal.
        x.iter_mut().filter(|x| !(1e-20..1e20).contains(&x.abs())).for_each(|x| *x = 0.0);
        let mut codes = [0; 128];
        let scale = fp8::quantize_group(&x, 1e-10, powers, &mut codes);
        let amax = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        assert!(scale * 448.0 >= amax * (1.0 - 1e-6), "{scale} clips {amax}");
        for (&x, &code) in x.iter().zip(&codes) {
            // The bound is half a step of three mantissa bits, or of the smallest numbers. The reciprocal of the scale is rounded, too.
            let most = (x.abs() / 16.0 * 1.000_01).max(scale / 1024.0 * 1.000_01);
            assert!((e4m3_value(code) * scale - x).abs() <= most, "{x} became {} x {scale}", e4m3_value(code));
        }
    });
}
