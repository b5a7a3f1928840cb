//! The activation that GEMM1's epilogue applies to its sums, in fp32.

use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_PI};

use crate::params::{Activation, ActivationKind, GroupedGemmParams};

/// Whether the activation takes (gate, up) pairs.
pub fn is_gated(kind: ActivationKind) -> bool {
    use ActivationKind as Kind;
    matches!(kind, Kind::Swiglu | Kind::Geglu | Kind::GegluTanh | Kind::ExpertSwiglu | Kind::Situ)
}

/// The activation with an expert's own numbers.
///
/// # Safety
/// `expert_alpha`, `expert_beta` and `expert_limit` hold a number for this expert, or are null.
pub(super) unsafe fn of_expert(p: &GroupedGemmParams, expert: usize) -> Activation {
    let mut a = p.activation;
    match a.kind {
        ActivationKind::ExpertSwiglu => a.kind = ActivationKind::Swiglu,
        ActivationKind::Situ => {}
        _ => return a,
    }
    // SAFETY: the caller's contract.
    let own = |numbers: *const f32| (!numbers.is_null()).then(|| unsafe { *numbers.add(expert) });
    a.alpha = own(p.expert_alpha).unwrap_or(a.alpha);
    a.beta = own(p.expert_beta).unwrap_or(a.beta);
    if let Some(limit) = own(p.expert_limit) {
        a.up_limit = limit;
        *(if p.expert_limit_after { &mut a.silu_limit } else { &mut a.gate_limit }) = limit;
    }
    a
}

/// Replaces `gate` by the activation of `gate` and, for gated kinds, of `up`, which has the same length. NaN passes every limit.
pub(super) fn apply(a: &Activation, gate: &mut [f32], up: &[f32]) {
    match a.kind {
        ActivationKind::Swiglu => gated(gate, up, |g, u| {
            let g = at_most(g, a.gate_limit);
            let u = -at_most(-at_most(u, a.up_limit), a.up_limit);
            at_most(silu(g, a.alpha), a.silu_limit) * (u + a.beta)
        }),
        ActivationKind::Geglu => gated(gate, up, |g, u| gelu(g) * u),
        ActivationKind::GegluTanh => gated(gate, up, |g, u| gelu_tanh(g) * u),
        ActivationKind::Situ => gated(gate, up, |g, u| situ(g, u, a.alpha, a.beta)),
        ActivationKind::Relu2 => ungated(gate, |x| {
            let x = if x < 0.0 { 0.0 } else { x };
            x * x
        }),
        ActivationKind::Silu => ungated(gate, |x| silu(x, 1.0)),
        ActivationKind::Gelu => ungated(gate, gelu),
        ActivationKind::GeluTanh => ungated(gate, gelu_tanh),
        _ => {}
    }
}

fn gated(gate: &mut [f32], up: &[f32], f: impl Fn(f32, f32) -> f32) {
    gate.iter_mut().zip(up).for_each(|(g, &u)| *g = f(*g, u));
}

fn ungated(values: &mut [f32], f: impl Fn(f32) -> f32) {
    values.iter_mut().for_each(|x| *x = f(*x));
}

/// NOTE: `f32::min` would turn NaN into the limit.
fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit {
        limit
    } else {
        x
    }
}

/// `sigmoid(alpha x) x`
fn silu(x: f32, alpha: f32) -> f32 {
    x / (1.0 + (-alpha * x).exp())
}

fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + erff(x * FRAC_1_SQRT_2))
}

fn gelu_tanh(x: f32) -> f32 {
    0.5 * x * (1.0 + (FRAC_2_PI.sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

/// An infinite `linear_beta` leaves `up` as it is, even an infinite `up`.
fn situ(gate: f32, up: f32, beta: f32, linear_beta: f32) -> f32 {
    let up = if linear_beta.is_finite() { linear_beta * (up / linear_beta).tanh() } else { up };
    beta * (gate / beta).tanh() / (1.0 + (-gate).exp()) * up
}

// SAFETY: `erff` is the C library's error function. std links that library already.
unsafe extern "C" {
    safe fn erff(x: f32) -> f32;
}
