use super::{assert_close, element_size, Random, Routed, Tensor, DTYPES};
use crate::{
    cpu::{self, InstructionSet},
    params::{Activation, ActivationKind, Dtype, GroupedGemmParams, W13Layout},
};

const INF: f32 = f32::INFINITY;
const PLAIN: Activation =
    Activation { kind: ActivationKind::Swiglu, alpha: 1.0, beta: 0.0, gate_limit: INF, silu_limit: INF, up_limit: INF };

fn sets() -> impl Iterator<Item = InstructionSet> {
    InstructionSet::ALL.into_iter().filter(|set| set.is_available())
}

struct Case {
    dtype: Dtype,
    ids: Vec<i32>,
    top_k: usize,
    experts: usize,
    tile_tokens: i32,
    k: usize,
    out_columns: usize,
    layout: W13Layout,
    activation: Activation,
    bias: Option<Dtype>,
    slot_weights: bool,
    /// Whether rows of x are places (GEMM2) instead of gathered tokens.
    identity_rows: bool,
}

impl Case {
    fn new(dtype: Dtype, ids: Vec<i32>, k: usize, out_columns: usize) -> Self {
        Self {
            dtype,
            ids,
            top_k: 2,
            experts: 5,
            tile_tokens: 16,
            k,
            out_columns,
            layout: W13Layout::GateUp,
            activation: PLAIN,
            bias: None,
            slot_weights: false,
            identity_rows: false,
        }
    }

    fn rows(&self) -> usize {
        self.out_columns * if cpu::is_gated(self.activation.kind) { 2 } else { 1 }
    }
}

struct Data {
    x: Tensor,
    weights: Tensor,
    bias: Option<Tensor>,
    slot_weights: Vec<f32>,
}

impl Data {
    fn new(c: &Case, random: &mut Random) -> Self {
        let rows = c.experts * c.rows();
        Self {
            x: Tensor::random(c.dtype, random, c.ids.len() * c.k, 1.0),
            weights: Tensor::random(c.dtype, random, rows * c.k, 4.0 / (c.k as f32).sqrt()),
            bias: c.bias.map(|dtype| Tensor::random(dtype, random, rows, 1.0)),
            slot_weights: random.uniforms(c.ids.len()),
        }
    }

    fn run(&self, c: &Case, routed: &Routed, set: InstructionSet) -> Tensor {
        let mut out = Tensor::unset(c.dtype, c.ids.len() * c.out_columns);
        let p = GroupedGemmParams {
            x: self.x.bytes.as_ptr(),
            row_scales: std::ptr::null(),
            slot_of_place: if c.identity_rows { std::ptr::null() } else { routed.slot_of_place.as_ptr() },
            row_divisor: c.top_k as i32,
            tiles: routed.tiles.as_ptr(),
            tile_count: &routed.tile_count,
            next_unit: std::ptr::null_mut(),
            schedule_is_older: false,
            weights: self.weights.bytes.as_ptr(),
            block_scales: std::ptr::null(),
            x_scales: std::ptr::null(),
            expert_scales: std::ptr::null(),
            bias: self.bias.as_ref().map_or(std::ptr::null(), |b| b.bytes.as_ptr()),
            bias_dtype: c.bias.unwrap_or(Dtype::F32),
            slot_weights: if c.slot_weights { self.slot_weights.as_ptr() } else { std::ptr::null() },
            out: out.bytes.as_mut_ptr(),
            out_scales: std::ptr::null_mut(),
            done: std::ptr::null_mut(),
            awaited: std::ptr::null(),
            awaited_ctas: 0,
            awaited_units: 0,
            rows: c.rows() as i32,
            k: c.k as i32,
            out_columns: c.out_columns as i32,
            layout: c.layout,
            activation: c.activation,
            expert_alpha: std::ptr::null(),
            expert_beta: std::ptr::null(),
            expert_limit: std::ptr::null(),
            expert_limit_after: false,
            out_global_scales: std::ptr::null(),
        };
        // SAFETY: the buffers above have the documented shapes; `set` is available.
        unsafe { cpu::grouped_gemm_on(set, &p, c.dtype, None) };
        out
    }
}

fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / n as f64;
        sum += term / (2 * n + 1) as f64;
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}

fn activate(a: &Activation, g: f64, u: f64) -> f64 {
    let silu = |x: f64, alpha: f64| x / (1.0 + (-alpha * x).exp());
    let gelu = |x: f64| 0.5 * x * (1.0 + erf(x / 2f64.sqrt()));
    let gelu_tanh =
        |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
    match a.kind {
        ActivationKind::Swiglu => {
            let (g, limit) = (g.min(a.gate_limit.into()), f64::from(a.up_limit));
            silu(g, a.alpha.into()).min(a.silu_limit.into()) * (u.clamp(-limit, limit) + f64::from(a.beta))
        }
        ActivationKind::Situ => {
            let (b, linear) = (f64::from(a.alpha), f64::from(a.beta));
            let u = if linear.is_finite() { linear * (u / linear).tanh() } else { u };
            b * (g / b).tanh() / (1.0 + (-g).exp()) * u
        }
        ActivationKind::Geglu => gelu(g) * u,
        ActivationKind::GegluTanh => gelu_tanh(g) * u,
        ActivationKind::Relu2 => g.max(0.0).powi(2),
        ActivationKind::Silu => silu(g, 1.0),
        ActivationKind::Gelu => gelu(g),
        ActivationKind::GeluTanh => gelu_tanh(g),
        _ => g,
    }
}

fn check(c: &Case, random: &mut Random) {
    let data = Data::new(c, random);
    let routed = Routed::new(&c.ids, c.top_k, c.experts, c.tile_tokens);
    let outs: Vec<_> = sets().map(|set| (set, data.run(c, &routed, set))).collect();
    let gated = cpu::is_gated(c.activation.kind);
    let mut columns: Vec<usize> = (0..6).map(|_| random.below(c.out_columns)).collect();
    columns.extend([0, c.out_columns - 1, c.out_columns.min(33) - 1]);
    for place in 0..c.ids.len() {
        let slot = routed.slot_of_place[place];
        if slot < 0 {
            for (_, out) in &outs {
                assert!(out.get(place * c.out_columns).is_nan(), "place {place} is nobody's");
            }
            continue;
        }
        let slot = slot as usize;
        let expert = c.ids[slot] as usize;
        let x_row = if c.identity_rows { place } else { slot / c.top_k };
        let slot = if c.identity_rows { place } else { slot };
        let sum = |row: usize| {
            let row = expert * c.rows() + row;
            let dot: f64 = (0..c.k).map(|i| data.x.get(x_row * c.k + i) * data.weights.get(row * c.k + i)).sum();
            let sum = dot + data.bias.as_ref().map_or(0.0, |b| b.get(row));
            if c.slot_weights {
                sum * f64::from(data.slot_weights[slot])
            } else {
                sum
            }
        };
        for &column in &columns {
            let (gate, up) = match c.layout {
                W13Layout::GateUp => (column, column + c.out_columns),
                W13Layout::UpGate => (column + c.out_columns, column),
                _ => (2 * column, 2 * column + 1),
            };
            let expected = if gated {
                activate(&c.activation, sum(gate), sum(up))
            } else {
                activate(&c.activation, sum(column), 0.0)
            };
            for (set, out) in &outs {
                let what = (set, c.dtype, c.k, c.out_columns, &c.activation, place, column);
                assert_close(out.get(place * c.out_columns + column), expected, c.dtype, &what);
            }
        }
    }
}

/// Ids of experts with 0, 1, 3, `many` (even) and 2 slots, often twice in a token, and of slots without an expert, in random order.
fn ragged(random: &mut Random, many: usize) -> Vec<i32> {
    let mut ids = vec![-1; 8];
    for (expert, count) in [(1, 1), (2, 3), (3, many), (4, 2)] {
        ids.extend(vec![expert; count]);
    }
    for i in (1..ids.len()).rev() {
        ids.swap(i, random.below(i + 1));
    }
    ids
}

#[test]
fn sizes() {
    let mut random = Random(6);
    for dtype in DTYPES {
        for (k, out_columns) in [(2880, 192), (704, 1408), (136, 5), (7, 192), (7, 5), (2880, 5), (1, 1), (32, 33)] {
            // Large layers have many tokens with one dtype only: builds without optimisation must not take minutes.
            let many = if k * out_columns < 1 << 18 || dtype == Dtype::Bf16 { 70 } else { 10 };
            let ids = ragged(&mut random, many);
            check(&Case::new(dtype, ids, k, out_columns), &mut random);
        }
    }
}

#[test]
fn activations_layouts_and_biases() {
    let mut random = Random(7);
    let gpt_oss = Activation { alpha: 1.702, beta: 1.0, gate_limit: 1.5, up_limit: 1.5, ..PLAIN };
    let clamped = Activation { silu_limit: 0.75, up_limit: 0.5, ..PLAIN };
    let of = |kind| Activation { kind, ..PLAIN };
    let activations = [
        PLAIN,
        gpt_oss,
        clamped,
        Activation { kind: ActivationKind::Situ, alpha: 1.25, beta: 0.75, ..PLAIN },
        Activation { kind: ActivationKind::Situ, alpha: 4.0, beta: f32::INFINITY, ..PLAIN },
        of(ActivationKind::Geglu),
        of(ActivationKind::GegluTanh),
        of(ActivationKind::Relu2),
        of(ActivationKind::Silu),
        of(ActivationKind::Gelu),
        of(ActivationKind::GeluTanh),
        of(ActivationKind::Identity),
    ];
    for dtype in DTYPES {
        for activation in activations {
            for layout in [W13Layout::GateUp, W13Layout::UpGate, W13Layout::Interleaved] {
                for (bias, slot_weights, identity_rows) in
                    [(None, false, false), (Some(dtype), true, false), (Some(Dtype::F32), false, true)]
                {
                    let ids = ragged(&mut random, 70);
                    let case = Case::new(dtype, ids, 40, 21);
                    check(&Case { activation, layout, bias, slot_weights, identity_rows, ..case }, &mut random);
                }
            }
        }
    }
}

#[test]
fn no_slots() {
    let mut random = Random(8);
    check(&Case::new(Dtype::Bf16, vec![], 16, 8), &mut random);
    check(&Case::new(Dtype::Bf16, vec![-1; 6], 16, 8), &mut random);
}

#[test]
fn nan_passes_through_limits() {
    let mut random = Random(9);
    for dtype in DTYPES {
        let activation = Activation { gate_limit: 7.0, silu_limit: 7.0, up_limit: 7.0, ..PLAIN };
        let case = Case { activation, ..Case::new(dtype, vec![0, 1, 2, 3], 16, 8) };
        let mut data = Data::new(&case, &mut random);
        let size = element_size(dtype);
        let nan = Tensor::new(dtype, &[f32::NAN]);
        data.x.bytes[3 * size..4 * size].copy_from_slice(&nan.bytes);
        let routed = Routed::new(&case.ids, case.top_k, case.experts, case.tile_tokens);
        for set in sets() {
            let out = data.run(&case, &routed, set);
            // Token 0 has the NaN. It has the slots at places 0 and 1.
            assert!((0..16).all(|i| out.get(i).is_nan()));
            assert!((16..32).all(|i| out.get(i).is_finite()));
        }
    }
}

/// A token's row has the same bits alone and in a batch, in tiles of any size.
#[test]
fn batch_invariance() {
    let mut random = Random(10);
    for dtype in DTYPES {
        for (k, out_columns) in [(2880, 5), (7, 5), (136, 9)] {
            let case = |tokens, tile_tokens| Case {
                top_k: 1,
                experts: 1,
                tile_tokens,
                ..Case::new(dtype, vec![0; tokens], k, out_columns)
            };
            let all = Data::new(&case(64, 16), &mut random);
            for set in sets() {
                let alone: Vec<Tensor> = (0..7)
                    .map(|row| {
                        let x = Tensor { dtype, bytes: all.x.row(row, k).to_vec() };
                        let weights = Tensor { dtype, bytes: all.weights.bytes.clone() };
                        let data = Data { x, weights, bias: None, slot_weights: vec![] };
                        data.run(&case(1, 16), &Routed::new(&[0], 1, 1, 16), set)
                    })
                    .collect();
                for (tokens, tile_tokens) in [(7, 16), (64, 64), (64, 16), (64, 48), (64, 32)] {
                    let case = case(tokens, tile_tokens);
                    let out = all.run(&case, &Routed::new(&case.ids, 1, 1, tile_tokens), set);
                    for (row, alone) in alone.iter().enumerate() {
                        assert_eq!(out.row(row, out_columns), alone.bytes, "{set:?} {dtype:?} k {k} row {row}");
                    }
                }
            }
        }
    }
}

#[test]
fn names() {
    assert_eq!(cpu::instruction_set(), InstructionSet::detect().name());
    assert!(InstructionSet::Scalar.is_available());
}
