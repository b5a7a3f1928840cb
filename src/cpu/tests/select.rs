use super::{Random, Tensor, DTYPES};
use crate::{
    cpu,
    params::{Dtype, GroupScore, Scoring, SelectParams},
};

#[derive(Clone, Debug)]
struct Case {
    experts: usize,
    top_k: usize,
    shared: usize,
    scoring: Scoring,
    bias: Option<Vec<f32>>,
    renormalize: bool,
    scale: f32,
    shared_weight: f32,
    /// (kind, number of groups, number of kept groups)
    group: (GroupScore, usize, usize),
    valid: Option<i32>,
}

impl Case {
    fn new(experts: usize, top_k: usize, scoring: Scoring) -> Self {
        Self {
            experts,
            top_k,
            shared: 0,
            scoring,
            bias: None,
            renormalize: false,
            scale: 1.0,
            shared_weight: 1.0,
            group: (GroupScore::None, 0, 0),
            valid: None,
        }
    }

    fn run(&self, logits: &Tensor, tokens: usize) -> (Vec<i32>, Vec<f32>) {
        let mut ids = vec![-7; tokens * self.top_k];
        let mut weights = vec![f32::MAX; tokens * self.top_k];
        let p = SelectParams {
            logits: logits.bytes.as_ptr(),
            logits_dtype: logits.dtype,
            tokens: tokens as i32,
            experts: self.experts as i32,
            top_k: self.top_k as i32,
            correction_bias: self.bias.as_ref().map_or(std::ptr::null(), |b| b.as_ptr()),
            scoring: self.scoring,
            renormalize: self.renormalize,
            scale: self.scale,
            group_score: self.group.0,
            groups: self.group.1 as i32,
            topk_group: self.group.2 as i32,
            shared_experts: self.shared as i32,
            shared_weight: self.shared_weight,
            order_by_id: false,
            num_token_non_padded: self.valid.as_ref().map_or(std::ptr::null(), |v| v),
            ids: ids.as_mut_ptr(),
            weights: weights.as_mut_ptr(),
        };
        // SAFETY: the buffers above have the documented shapes.
        unsafe { cpu::select(&p) };
        (ids, weights)
    }

    fn row(&self, logits: &[f32]) -> (Vec<i32>, Vec<f32>) {
        self.run(&Tensor::new(Dtype::F32, logits), 1)
    }

    /// The expected choice of one token, by whole sorts.
    fn reference(&self, logits: &[f32]) -> (Vec<i32>, Vec<f32>) {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total: f32 = logits.iter().map(|x| (x - max).exp()).sum();
        let scores: Vec<f32> = logits
            .iter()
            .map(|&x| match self.scoring {
                Scoring::Softmax => (x - max).exp() / total,
                Scoring::Sigmoid => 1.0 / (1.0 + (-x).exp()),
                Scoring::SqrtSoftplus => x.exp().ln_1p().sqrt(),
                _ => x,
            })
            .collect();
        let plain = self.bias.is_none() && self.group.0 == GroupScore::None;
        let mut choice = if plain { logits.to_vec() } else { scores.clone() };
        if let Some(bias) = &self.bias {
            choice.iter_mut().zip(bias).for_each(|(c, b)| *c += b);
        }
        let (kind, groups, kept) = self.group;
        if kind != GroupScore::None {
            let size = self.experts / groups;
            let group_scores: Vec<f32> = choice
                .chunks(size)
                .map(|group| {
                    let best = sorted(group);
                    let first = group[best[0]];
                    if kind == GroupScore::Max {
                        first
                    } else {
                        first + best.get(1).map_or(0.0, |&i| group[i])
                    }
                })
                .collect();
            for &group in &sorted(&group_scores)[kept..] {
                choice[group * size..][..size].fill(f32::NEG_INFINITY);
            }
        }
        let routed = self.top_k - self.shared;
        let mut ids: Vec<i32> = sorted(&choice)[..routed].iter().map(|&e| e as i32).collect();
        let mut weights: Vec<f32> = ids.iter().map(|&e| scores[e as usize]).collect();
        if self.scoring == Scoring::SoftmaxTopk {
            let total: f32 = weights.iter().map(|x| (x - max).exp()).sum();
            weights.iter_mut().for_each(|x| *x = (*x - max).exp() / total);
        } else if self.renormalize {
            let total: f32 = weights.iter().sum::<f32>() + 1e-20;
            weights.iter_mut().for_each(|x| *x /= total);
        }
        weights.iter_mut().for_each(|x| *x *= self.scale);
        for i in 0..self.shared {
            ids.push((self.experts + i) as i32);
            weights.push(self.shared_weight);
        }
        (ids, weights)
    }
}

/// Indices of the values. The largest value comes first, and ties stay in order.
fn sorted(values: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].partial_cmp(&values[a]).unwrap());
    order
}

fn check(case: &Case, random: &mut Random) {
    for dtype in DTYPES {
        let tokens = 37;
        let logits = Tensor::random(dtype, random, tokens * case.experts, 6.0);
        let (ids, weights) = case.run(&logits, tokens);
        assert_eq!((ids.clone(), weights.clone()), case.run(&logits, tokens));
        for token in 0..tokens {
            let row: Vec<f32> = (0..case.experts).map(|e| logits.get(token * case.experts + e) as f32).collect();
            let (expected_ids, expected) = case.reference(&row);
            let columns = token * case.top_k..(token + 1) * case.top_k;
            assert_eq!(ids[columns.clone()], expected_ids, "{case:?} token {token}");
            for (got, expected) in weights[columns].iter().zip(expected) {
                assert!((got - expected).abs() <= 1e-5 * expected.abs() + 1e-12, "{case:?}: {got} {expected}");
            }
        }
    }
}

#[test]
fn random_logits() {
    let mut random = Random(3);
    let scorings = [Scoring::Softmax, Scoring::Sigmoid, Scoring::SqrtSoftplus, Scoring::SoftmaxTopk, Scoring::Identity];
    for scoring in scorings {
        for (experts, top_k) in [(128, 8), (8, 2), (32, 4), (512, 22), (7, 7), (1, 1), (384, 32), (896, 16), (1024, 32)]
        {
            let case = Case::new(experts, top_k, scoring);
            check(&case, &mut random);
            check(&Case { renormalize: scoring != Scoring::Identity, scale: 2.5, ..case.clone() }, &mut random);
            let bias = Some(random.uniforms(experts));
            check(&Case { bias, renormalize: scoring != Scoring::Identity, ..case.clone() }, &mut random);
            if experts > 8 {
                check(&Case { shared: 2, shared_weight: 0.4, scale: 2.5, ..case }, &mut random);
            }
        }
    }
}

#[test]
fn groups() {
    let mut random = Random(4);
    for (experts, groups, kept, top_k) in [(256, 8, 4, 8), (64, 8, 3, 6), (160, 8, 3, 6), (16, 16, 4, 4), (64, 1, 1, 8)]
    {
        for scoring in [Scoring::Softmax, Scoring::Sigmoid] {
            let case = Case { renormalize: true, ..Case::new(experts, top_k, scoring) };
            check(&Case { group: (GroupScore::Max, groups, kept), ..case.clone() }, &mut random);
            let bias = Some(random.uniforms(experts));
            check(&Case { group: (GroupScore::Top2, groups, kept), bias, shared: 1, ..case }, &mut random);
        }
    }
}

#[test]
fn experts_outside_the_best_groups_are_never_chosen() {
    let grouped =
        |scoring, score, kept| Case { group: (score, 3, kept), renormalize: true, ..Case::new(6, 3, scoring) };
    // The experts chosen in the best groups tie with the numbers that SGLang would give the other experts: -inf, or a score of 0.
    let logits = [9.0, f32::NEG_INFINITY, -3.0, -4.0, 8.0, f32::NEG_INFINITY];
    for scoring in [Scoring::Identity, Scoring::SoftmaxTopk, Scoring::Sigmoid, Scoring::SqrtSoftplus, Scoring::Softmax]
    {
        let (ids, weights) = grouped(scoring, GroupScore::Max, 2).row(&logits);
        assert_eq!(ids, [0, 4, 1], "{scoring:?}");
        let infinite = scoring == Scoring::Identity;
        assert!(if infinite { weights[0] == 0.0 } else { weights[2] == 0.0 }, "{scoring:?} {weights:?}");
    }
    let biased = Case { bias: Some(vec![-1.0; 6]), ..grouped(Scoring::Sigmoid, GroupScore::Max, 2) };
    assert_eq!(biased.row(&logits).0, [0, 4, 1]);
}

#[test]
fn groups_compare_as_choices_do() {
    let best = |score, logits: &[f32; 8]| {
        let case = Case { group: (score, 4, 1), ..Case::new(8, 2, Scoring::Identity) };
        case.row(logits).0
    };
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for score in [GroupScore::Max, GroupScore::Top2] {
        assert_eq!(best(score, &[inf, inf, 1.0, 2.0, -inf, -nan, 3.0, 4.0]), [5, 4], "{score:?}: a NaN wins");
        assert_eq!(best(score, &[0.0, 0.0, nan, 2.0, -inf, nan, nan, nan]), [2, 3], "{score:?}: every NaN is equal");
        assert_eq!(best(score, &[-0.0, -0.0, 0.0, 0.0, 0.0, -0.0, 0.0, 0.0]), [0, 1], "{score:?}: -0 is 0");
        assert_eq!(best(score, &[-inf; 8]), [0, 1], "{score:?}");
    }
    assert_eq!(best(GroupScore::Top2, &[inf, inf, inf, -inf, inf, inf, inf, inf]), [2, 3], "inf - inf is NaN");
}

#[test]
fn ties_zeros_and_nan() {
    let case = Case::new(6, 4, Scoring::Identity);
    assert_eq!(case.row(&[0.0, 1.0, 1.0, -0.0, 1.0, 0.0]).0, [1, 2, 4, 0]);
    assert_eq!(case.row(&[-0.0, -1.0, -2.0, 0.0, -1.0, -0.0]).0, [0, 3, 5, 1]);
    assert_eq!(case.row(&[f32::INFINITY, 1.0, -f32::NAN, 2.0, f32::NAN, f32::NEG_INFINITY]).0, [2, 4, 0, 3]);
    assert_eq!(case.row(&[f32::NEG_INFINITY; 6]).0, [0, 1, 2, 3]);
    // Sigmoids that round to one are ordered by their logits.
    assert_eq!(Case::new(4, 2, Scoring::Sigmoid).row(&[40.0, 50.0, 60.0, 45.0]).0, [2, 1]);
    let nan = Case::new(3, 2, Scoring::Softmax).row(&[1.0, f32::NAN, 2.0]);
    assert_eq!(nan.0, [1, 2]);
    assert!(nan.1.iter().all(|w| w.is_nan()));
}

#[test]
fn vanished_scores_do_not_divide_by_zero() {
    let case = Case { renormalize: true, bias: Some(vec![1.0; 4]), ..Case::new(4, 2, Scoring::Sigmoid) };
    assert_eq!(case.row(&[-200.0; 4]), (vec![0, 1], vec![0.0, 0.0]));
}

#[test]
fn large_logits() {
    let (_, weights) = Case::new(3, 3, Scoring::SqrtSoftplus).row(&[100.0, -100.0, 1e30]);
    assert_eq!(weights[..2], [1e15, 10.0]);
    assert!((weights[2] - (-50f32).exp()).abs() < 1e-23);
    let (_, weights) = Case::new(2, 2, Scoring::Softmax).row(&[1000.0, 1000.0]);
    assert_eq!(weights, [0.5, 0.5]);
}

#[test]
fn padded_rows() {
    let case = Case { shared: 1, valid: Some(2), ..Case::new(8, 3, Scoring::Softmax) };
    let mut random = Random(5);
    let (ids, weights) = case.run(&Tensor::random(Dtype::Bf16, &mut random, 5 * 8, 1.0), 5);
    assert!(ids[..6].iter().all(|&id| id >= 0) && ids[5] == 8);
    assert!(ids[6..].iter().all(|&id| id == -1) && weights[6..].iter().all(|&w| w == 0.0));
    let (ids, _) = Case { valid: Some(9), ..case }.run(&Tensor::random(Dtype::F16, &mut random, 5 * 8, 1.0), 5);
    assert!(ids.iter().all(|&id| id >= 0));
}
