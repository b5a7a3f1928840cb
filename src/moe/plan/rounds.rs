//! How activations are rounded: x before GEMM1, and GEMM1's output before GEMM2. `rounding.rs` chooses the launches that do it; on CPUs
//! functions of `crate::cpu` do it.

use super::call::{CallDesc, Source, X};
use super::steps::{At, Buffer, Gemm, Order, RoundLaunch};
use super::workspace::Workspace;
use super::{e4m3_columns, fp8_sm90, Counters};
use crate::desc::LayerDesc;
use crate::params::Fp8Scaling;
use crate::quant::fp8::GROUP;
use crate::quant::{fp8_ops, Activations};

/// The rounding of x or of GEMM1's output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Round {
    pub to: Numbers,
    pub which: Which,
    pub from: At,
    pub out: At,
    /// The scales of the rounded rows, if there are any.
    pub scales: At,
    pub rows: i64,
    pub columns: i32,
    /// Columns of the output, padding included.
    pub out_columns: i32,
    /// True if the launch before this one does not write `from`.
    pub x_is_older: bool,
}

/// Numbers that rows are rounded to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Numbers {
    /// e4m3 with fp32 scales of groups of columns.
    Fp8(Fp8),
    /// The fp32 scales alone, for e4m3 codes that the caller made.
    Fp8Scales,
    /// e4m3 with one fp32 scale a row.
    E4m3,
    Mxfp8,
    Nvfp4(Nvfp4),
}

/// Details of rounding to e4m3 with fp32 scales of groups of columns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fp8 {
    pub scaling: Fp8Scaling,
    /// The number that all rows share: the largest magnitude, or a scale that was made before.
    pub of_all: At,
    /// Distances between the scales of neighbouring rows and groups.
    pub strides: (i64, i64),
    /// Whether a row is written once for each of its slots, in the order of places.
    pub to_places: bool,
}

/// Details of rounding to NVFP4.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nvfp4 {
    /// The scales of an x that came as codes and is expanded.
    pub codes_scales: At,
    /// The factors of experts, by which their rows are multiplied before they are rounded.
    pub factors: At,
    /// Whether a row of x is that of the place's slot, divided by `row_divisor`; otherwise it is the place itself.
    pub gathers: bool,
    pub row_divisor: i32,
    /// Whether rows of the output are places even if the step gathers.
    pub by_place: bool,
}

/// Rows that a step takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    All,
    /// The rows of a routed call that have a place.
    Placed,
    /// The rows that the schedule's tiles name.
    OfTiles,
}

/// The data beside the call that decides where rounded rows lie.
pub struct On<'a> {
    pub ws: &'a Workspace,
    /// Most tokens of a tile of GEMM1's schedule.
    pub tile_tokens: i32,
    pub gpu: bool,
    /// Whether both GEMMs are one launch.
    pub both_gemms: bool,
}

/// The roundings of x and of GEMM1's output. `gemms` then read the rounded rows.
pub fn of(call: &CallDesc, gemms: &mut [Gemm; 2], on: &On<'_>) -> [Option<Round>; 2] {
    match call.activations {
        Activations::Kept => [None; 2],
        Activations::Fp8(scaling) => fp8(call, scaling, gemms, on),
        Activations::E4m3Rows => e4m3(call, gemms, on).map(Some),
        Activations::Mxfp8 => mxfp8(call, gemms, on).map(Some),
        Activations::Nvfp4 => nvfp4(call, gemms, on).map(Some),
    }
}

/// The launches for a call's x. `of_numbers`: the launches for an x of numbers.
pub fn launches_of_x(call: &CallDesc, of_numbers: [Option<RoundLaunch>; 2]) -> [Option<RoundLaunch>; 2] {
    match (call.x, call.activations) {
        (X::Codes, Activations::Fp8(_)) => [None; 2],
        (X::LooseCodes, Activations::Fp8(_)) => {
            [None, Some(RoundLaunch::Fp8Scales(fp8_ops::expansion(call.rows(), groups(&call.layer))))]
        }
        // A launch that rounds numbers to NVFP4 expands codes too.
        _ => of_numbers,
    }
}

/// Groups of columns of x.
fn groups(layer: &LayerDesc) -> i64 {
    layer.hidden / GROUP as i64
}

/// The roundings to e4m3 with fp32 scales of groups of columns.
fn fp8(call: &CallDesc, scaling: Fp8Scaling, gemms: &mut [Gemm; 2], on: &On<'_>) -> [Option<Round>; 2] {
    let (ws, slots, routed) = (on.ws, call.slots(), matches!(call.source, Source::Routed(_)));
    let in_order = fp8_sm90::in_order(on.tile_tokens);
    let [up, down] = gemms;
    let of = |(from, columns), rows, (codes, scales), (peak, factors)| Round {
        to: Numbers::Fp8(Fp8 {
            scaling,
            of_all: match scaling {
                Fp8Scaling::Given => At::start(factors),
                _ => At::range(&ws.counters).plus(peak * size_of::<i32>()),
            },
            // The kernel for rows in order reads scales fastest if those of neighbouring rows lie beside each other.
            strides: if in_order { (1, slots) } else { (columns / GROUP as i64, 1) },
            to_places: false,
        }),
        which: if routed { Which::Placed } else { Which::OfTiles },
        from,
        out: At::range(codes),
        scales: At::range(scales),
        rows,
        columns: columns as i32,
        out_columns: columns as i32,
        x_is_older: false,
    };
    let of_x = (Counters::PEAK_X, Buffer::UpFactors);
    let of_hidden = (Counters::PEAK_HIDDEN, Buffer::DownFactors);
    let mut x = of((up.x, call.layer.hidden), call.rows(), (&ws.x_codes, &ws.x_scales), of_x);
    let hidden = of((up.out, call.layer.inner()), slots, (&ws.hidden_codes, &ws.hidden_scales), of_hidden);
    if routed {
        x.which = Which::All;
        // If one scale serves all rows, the routing first sets it to 0.
        x.x_is_older = !in_order && scaling != Fp8Scaling::Peak;
    }
    if let (true, true, Numbers::Fp8(numbers)) = (routed, in_order, &mut x.to) {
        // GEMM2 writes to these rows once GEMM1 has read them.
        numbers.to_places = true;
        x.out = At::range(&ws.rows);
        x.scales = x.out.plus((slots * call.layer.hidden) as usize);
    }
    let strides = |round: &Round| match round.to {
        Numbers::Fp8(numbers) => numbers.strides,
        _ => (0, 0),
    };
    let (mut x_strides, hidden_strides) = (strides(&x), strides(&hidden));
    (down.x, down.x_scales) = (hidden.out, hidden.scales);
    let x = match call.x {
        X::Plain => {
            (up.x, up.x_scales) = (x.out, x.scales);
            Some(x)
        }
        X::Codes => {
            up.x_scales = At::start(Buffer::XScales);
            if !routed {
                x_strides = (groups(&call.layer), 1);
            }
            None
        }
        X::LooseCodes => {
            up.x_scales = x.scales;
            let from = At::start(Buffer::XScales);
            Some(Round { to: Numbers::Fp8Scales, which: Which::All, from, out: At::NONE, x_is_older: true, ..x })
        }
    };
    up.order = Order { rows: slots, x_scales: x_strides, out_scales: hidden_strides };
    down.order = Order { rows: slots, x_scales: hidden_strides, out_scales: (0, 0) };
    [x, Some(hidden)]
}

/// The roundings to e4m3 with one fp32 scale a row. GPU kernels take codes, in rows that are padded with zeros to whole blocks of packed
/// weights, and count pairs of columns; the CPU takes bf16 numbers.
fn e4m3(call: &CallDesc, gemms: &mut [Gemm; 2], on: &On<'_>) -> [Round; 2] {
    let (ws, routed) = (on.ws, matches!(call.source, Source::Routed(_)));
    let [of_x, of_hidden] = match (on.gpu, routed) {
        // GEMM2 writes to the rows once GEMM1 is done.
        (true, true) => [At::range(&ws.rows), At::range(&ws.hidden_e4m3)],
        (false, true) => [At::range(&ws.rows), At::range(&ws.hidden)],
        // GEMM1's output is written over x, once GEMM1 has read x.
        (true, false) => [At::range(&ws.hidden_e4m3); 2],
        (false, false) => [At::start(Buffer::Out), At::range(&ws.hidden)],
    };
    let [up, down] = gemms;
    let round = |gemm: &mut Gemm, out, rows, which| {
        let columns = gemm.k;
        let out_columns = if on.gpu { e4m3_columns(columns.into()) as i32 } else { columns };
        let (from, scales) = (gemm.x, At::range(&ws.row_scales));
        (gemm.x, gemm.row_scales) = (out, scales);
        if on.gpu {
            gemm.k = out_columns / 2;
        }
        let x_is_older = which == Which::All;
        Round { to: Numbers::E4m3, which, from, out, scales, rows, columns, out_columns, x_is_older }
    };
    let [x, hidden] = walks(routed);
    [round(up, of_x, call.rows(), x), round(down, of_hidden, call.slots(), hidden)]
}

/// The roundings to the numbers of MXFP8. GEMM1's output is rounded in its place.
fn mxfp8(call: &CallDesc, gemms: &mut [Gemm; 2], on: &On<'_>) -> [Round; 2] {
    let (ws, routed) = (on.ws, matches!(call.source, Source::Routed(_)));
    // With rows in order x is rounded into the output. GEMM2 writes to the output's rows once GEMM1 has read them.
    let rounded_x = if routed { At::range(&ws.x_rounded) } else { At::start(Buffer::Out) };
    let round = |gemm: &mut Gemm, out, rows, which| {
        let from = std::mem::replace(&mut gemm.x, out);
        let (columns, x_is_older) = (gemm.k, which == Which::All);
        Round {
            to: Numbers::Mxfp8,
            which,
            from,
            out,
            scales: At::NONE,
            rows,
            columns,
            out_columns: columns,
            x_is_older,
        }
    };
    let [up, down] = gemms;
    let [x, hidden] = walks(routed);
    [round(up, rounded_x, call.rows(), x), round(down, At::range(&ws.hidden), call.slots(), hidden)]
}

/// The rows of x and of GEMM1's output that a call rounds.
fn walks(routed: bool) -> [Which; 2] {
    if routed {
        [Which::All, Which::Placed]
    } else {
        [Which::OfTiles; 2]
    }
}

/// The roundings to the numbers of NVFP4. An expert may have a factor of its own: then a token has a row for each of its slots. GEMM1's
/// output is rounded in its place. A launch of both GEMMs rounds GEMM1's output itself. In such a launch GEMM2 writes to the memory of the
/// slots while GEMM1 still reads it. So rows of x lie there by place, and GEMM2 writes a row once GEMM1 has read it.
fn nvfp4(call: &CallDesc, gemms: &mut [Gemm; 2], on: &On<'_>) -> [Round; 2] {
    let (ws, [up, down]) = (on.ws, gemms);
    let in_codes = call.x != X::Plain;
    let by_place = on.both_gemms && up.gathers;
    let round = |gemm: &Gemm, out, factors, (codes_scales, by_place)| Round {
        to: Numbers::Nvfp4(Nvfp4 {
            codes_scales,
            factors: At::start(factors),
            gathers: gemm.gathers,
            row_divisor: gemm.row_divisor,
            by_place,
        }),
        which: Which::OfTiles,
        from: gemm.x,
        out,
        scales: At::NONE,
        rows: 0,
        columns: gemm.k,
        out_columns: gemm.k,
        x_is_older: false,
    };
    let routed = matches!(call.source, Source::Routed(_));
    let slots = if routed { At::range(&ws.rows) } else { At::start(Buffer::Out) };
    let codes_scales = if in_codes { At::start(Buffer::XScales) } else { At::NONE };
    let hidden = round(down, up.out, Buffer::DownFactors, (At::NONE, false));
    let x = if on.gpu && routed && (call.one_x_factor || in_codes) {
        // The numbers of a row are the same for each of its slots.
        let x = round(up, At::range(&ws.x_rounded), Buffer::UpFactors, (codes_scales, false));
        Round { which: Which::All, rows: call.rows(), x_is_older: true, ..x }
    } else {
        let x = round(up, slots, Buffer::UpFactors, (codes_scales, by_place));
        up.row_divisor = i32::from(!by_place);
        x
    };
    up.x = x.out;
    if on.both_gemms {
        up.out_factors = At::start(Buffer::DownFactors);
    }
    [x, hidden]
}
