use super::{Random, Routed, Tensor, DTYPES};
use crate::{
    cpu::{self, InstructionSet},
    params::{Activation, ActivationKind, Dtype, GroupedGemmParams, W13Layout},
    quant::{
        blocks::Blocks,
        e2m1,
        mxfp4::{BLOCK, BLOCKS},
    },
};

const INF: f32 = f32::INFINITY;
const EXPERTS: usize = 3;

/// MXFP4 weights give the same bits as plain weights with the same numbers: for every instruction set, dtype and layout, few tokens and
/// many, rows that are padded (`k` < `columns`, `out_columns` below the rows) and rows that are not.
#[test]
fn expanded_weights_are_plain_weights() {
    let mut random = Random(12);
    let layouts = [W13Layout::GateUp, W13Layout::UpGate, W13Layout::Interleaved];
    let cases = [
        (32, 32, 5, 5),
        (96, 96, 21, 21),
        (40, 64, 9, 12),
        (40, 64, 9, 9),
        (2880, 2880, 25, 25),
        (1, 32, 4, 4),
        (704, 736, 200, 260),
    ];
    for (case, (k, columns, out_columns, all_columns)) in cases.into_iter().enumerate() {
        for dtype in DTYPES {
            for gated in [true, false] {
                if gated && out_columns != all_columns {
                    continue;
                }
                let rows = all_columns * if gated { 2 } else { 1 };
                let codes: Vec<u8> = (0..EXPERTS * rows * columns / 2).map(|_| random.next() as u8).collect();
                let scales: Vec<u8> =
                    (0..EXPERTS * rows * columns / BLOCK).map(|_| 118 + random.below(10) as u8).collect();
                let numbers: Vec<f32> = (0..EXPERTS * rows * columns)
                    .filter(|i| i % columns < k)
                    .map(|i| {
                        e2m1::VALUES[(codes[i / 2] >> (4 * (i % 2)) & 15) as usize] * e2m1::scale(scales[i / BLOCK])
                    })
                    .collect();
                let plain = Tensor::new(dtype, &numbers);
                for tokens in [1, 7, 40] {
                    let ids: Vec<i32> = (0..2 * tokens).map(|_| random.below(EXPERTS + 1) as i32 - 1).collect();
                    let routed = Routed::new(&ids, 2, EXPERTS, 16);
                    let x = Tensor::random(dtype, &mut random, tokens * k, 1.0);
                    let mut out = [(); 2].map(|()| Tensor::unset(dtype, ids.len() * out_columns));
                    for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
                        let blocks = Blocks::new(&BLOCKS, scales.as_ptr(), columns / BLOCK);
                        let forms = [(plain.bytes.as_ptr(), None), (codes.as_ptr(), Some(blocks))];
                        for ((weights, blocks), out) in forms.into_iter().zip(&mut out) {
                            let p = GroupedGemmParams {
                                x: x.bytes.as_ptr(),
                                row_scales: std::ptr::null(),
                                slot_of_place: routed.slot_of_place.as_ptr(),
                                row_divisor: 2,
                                tiles: routed.tiles.as_ptr(),
                                tile_count: &routed.tile_count,
                                next_unit: std::ptr::null_mut(),
                                schedule_is_older: false,
                                weights,
                                block_scales: std::ptr::null(),
                                x_scales: std::ptr::null(),
                                expert_scales: std::ptr::null(),
                                bias: std::ptr::null(),
                                bias_dtype: Dtype::F32,
                                slot_weights: std::ptr::null(),
                                out: out.bytes.as_mut_ptr(),
                                out_scales: std::ptr::null_mut(),
                                done: std::ptr::null_mut(),
                                awaited: std::ptr::null(),
                                awaited_ctas: 0,
                                awaited_units: 0,
                                rows: rows as i32,
                                k: k as i32,
                                out_columns: out_columns as i32,
                                layout: layouts[case % 3],
                                activation: Activation {
                                    kind: if gated { ActivationKind::Swiglu } else { ActivationKind::Identity },
                                    alpha: 1.0,
                                    beta: 0.0,
                                    gate_limit: INF,
                                    silu_limit: INF,
                                    up_limit: INF,
                                },
                                expert_alpha: std::ptr::null(),
                                expert_beta: std::ptr::null(),
                                expert_limit: std::ptr::null(),
                                expert_limit_after: false,
                                out_global_scales: std::ptr::null(),
                            };
                            // SAFETY: the buffers above have the documented shapes; `set` is available.
                            unsafe { cpu::grouped_gemm_on(set, &p, dtype, blocks) };
                        }
                        assert_eq!(out[0].bytes, out[1].bytes, "{set:?} {dtype:?} k {k} gated {gated} tokens {tokens}");
                    }
                }
            }
        }
    }
}
