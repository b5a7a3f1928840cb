//! Measures the time of a whole layer: `cargo test --release layer_speed -- --ignored --nocapture`.

use std::time::Instant;

use half::bf16;

use super::{Random, Routed};
use crate::{
    cpu,
    params::{Activation, ActivationKind, CombineParams, Dtype, GroupedGemmParams, W13Layout},
};

const EXPERTS: usize = 128;
const TOP_K: usize = 8;
const HIDDEN: usize = 2048;
const INTERMEDIATE: usize = 768;

fn random_bf16(random: &mut Random, len: usize, scale: f32) -> Vec<bf16> {
    (0..len).map(|_| bf16::from_f32(random.uniform() * scale)).collect()
}

/// Measures route, GEMM1, GEMM2 and combine of Qwen3-30B-A3B's layer.
#[test]
#[ignore = "a measurement"]
#[allow(clippy::print_stdout)] // the measurement's only output
fn layer_speed() {
    let mut random = Random(11);
    let w13 = random_bf16(&mut random, EXPERTS * 2 * INTERMEDIATE * HIDDEN, 0.04);
    let w2 = random_bf16(&mut random, EXPERTS * HIDDEN * INTERMEDIATE, 0.06);
    println!("{} with {} threads", cpu::instruction_set(), crate::parallel::threads());
    for tokens in [1, 4, 16, 64, 128, 512] {
        let x = random_bf16(&mut random, tokens * HIDDEN, 1.0);
        let weights = vec![1.0 / TOP_K as f32; tokens * TOP_K];
        let mut ids: Vec<i32> = Vec::new();
        for _ in 0..tokens {
            let first = ids.len();
            while ids.len() < first + TOP_K {
                let id = random.below(EXPERTS) as i32;
                if !ids[first..].contains(&id) {
                    ids.push(id);
                }
            }
        }
        let mut middle = vec![bf16::ZERO; tokens * TOP_K * INTERMEDIATE];
        let mut y = vec![bf16::ZERO; tokens * TOP_K * HIDDEN];
        let mut out = vec![bf16::ZERO; tokens * HIDDEN];
        let mut best = [f64::INFINITY; 5];
        for _ in 0..(256 / tokens).clamp(5, 40) {
            let mut marks = vec![Instant::now()];
            let routed = Routed::new(&ids, TOP_K, EXPERTS, 8);
            marks.push(Instant::now());
            let gemm1 = GroupedGemmParams {
                x: x.as_ptr().cast(),
                row_scales: std::ptr::null(),
                slot_of_place: routed.slot_of_place.as_ptr(),
                row_divisor: TOP_K as i32,
                tiles: routed.tiles.as_ptr(),
                tile_count: &routed.tile_count,
                next_unit: std::ptr::null_mut(),
                schedule_is_older: false,
                weights: w13.as_ptr().cast(),
                block_scales: std::ptr::null(),
                x_scales: std::ptr::null(),
                expert_scales: std::ptr::null(),
                bias: std::ptr::null(),
                bias_dtype: Dtype::Bf16,
                slot_weights: std::ptr::null(),
                out: middle.as_mut_ptr().cast(),
                out_scales: std::ptr::null_mut(),
                done: std::ptr::null_mut(),
                awaited: std::ptr::null(),
                awaited_ctas: 0,
                awaited_units: 0,
                rows: 2 * INTERMEDIATE as i32,
                k: HIDDEN as i32,
                out_columns: INTERMEDIATE as i32,
                layout: W13Layout::GateUp,
                activation: Activation {
                    kind: ActivationKind::Swiglu,
                    alpha: 1.0,
                    beta: 0.0,
                    gate_limit: f32::INFINITY,
                    silu_limit: f32::INFINITY,
                    up_limit: f32::INFINITY,
                },
                expert_alpha: std::ptr::null(),
                expert_beta: std::ptr::null(),
                expert_limit: std::ptr::null(),
                expert_limit_after: false,
                out_global_scales: std::ptr::null(),
            };
            let gemm2 = GroupedGemmParams {
                x: middle.as_ptr().cast(),
                slot_of_place: std::ptr::null(),
                row_divisor: 1,
                weights: w2.as_ptr().cast(),
                block_scales: std::ptr::null(),
                x_scales: std::ptr::null(),
                expert_scales: std::ptr::null(),
                out: y.as_mut_ptr().cast(),
                out_scales: std::ptr::null_mut(),
                done: std::ptr::null_mut(),
                awaited: std::ptr::null(),
                awaited_ctas: 0,
                awaited_units: 0,
                rows: HIDDEN as i32,
                k: INTERMEDIATE as i32,
                out_columns: HIDDEN as i32,
                activation: Activation { kind: ActivationKind::Identity, ..gemm1.activation },
                ..gemm1
            };
            let combine = CombineParams {
                y: y.as_ptr().cast(),
                place_of_slot: routed.place_of_slot.as_ptr(),
                weights: weights.as_ptr(),
                out: out.as_mut_ptr().cast(),
                tokens: tokens as i32,
                top_k: TOP_K as i32,
                hidden: HIDDEN as i32,
                scale: 1.0,
                keep_slots: false,
                columns: 1,
            };
            // SAFETY: the buffers above have the documented shapes.
            unsafe {
                cpu::grouped_gemm(&gemm1, Dtype::Bf16, None);
                marks.push(Instant::now());
                cpu::grouped_gemm(&gemm2, Dtype::Bf16, None);
                marks.push(Instant::now());
                cpu::combine(&combine, Dtype::Bf16);
            }
            marks.push(Instant::now());
            let ms = |a: usize, b: usize| (marks[b] - marks[a]).as_secs_f64() * 1e3;
            for (best, ms) in best.iter_mut().zip([ms(0, 4), ms(0, 1), ms(1, 2), ms(2, 3), ms(3, 4)]) {
                *best = best.min(ms);
            }
        }
        let [layer, route, gemm1, gemm2, combine] = best;
        println!(
            "M {tokens:4}: {layer:8.3} ms (route {route:.3}, GEMM1 {gemm1:.3}, GEMM2 {gemm2:.3}, combine {combine:.3})"
        );
    }
}
