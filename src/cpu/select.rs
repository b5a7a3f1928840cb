//! Top-k: router logits to expert ids and weights, one token at a time.

use rayon::prelude::*;

use super::{for_dtype, Element};
use crate::params::{GroupScore, Scoring, SelectParams};

const MAX_EXPERTS: usize = 512;
/// Keeps a division by a sum of vanished scores from being 0 / 0.
const SUM_EPSILON: f32 = 1e-20;
/// torch's softplus is the identity above this.
const SOFTPLUS_THRESHOLD: f32 = 20.0;
/// Tokens that one task takes: a token costs well under a microsecond.
const TOKENS_PER_TASK: usize = 16;

/// Chooses the experts of every token, all arithmetic in fp32.
///
/// - Order: choices compare as numbers with `-0 == +0` and every NaN equal and above `+inf`; equal choices go to the lower id. Columns
///   are best first.
/// - The choice is the logit itself when there is neither a bias nor a group, and for `SoftmaxTopk` and `Identity`; else the score. The
///   bias is added to it.
/// - A group is `experts / groups` neighbours. Its score is its best choice (`Max`), or the sum of its two best (`Top2`; of its only one in
///   groups of one). NaN wins as above, ties go to the lower group.
/// - Experts outside the `topk_group` best groups are not removed but masked, as in SGLang: `Max` without a bias on scores that cannot be negative
///   (softmax, sigmoid, sqrtsoftplus) masks choice and weight with 0; every other form masks the choice with -inf and leaves
///   the weight the expert's score. It shows only when the kept groups hold fewer than `top_k` usable experts.
/// - Softmax sums over experts in id order and divides by the sum: NaN or +inf among a token's logits makes all its weights NaN.
///   `SoftmaxTopk` sums in column order over the chosen; `renormalize` changes nothing there.
/// - Renormalising divides by the sum in column order, plus 1e-20 for sigmoid, sqrtsoftplus and identity.
/// - A shared expert's weight is the sum in column order of the routed weights after renormalising and before `scale`, times
///   `shared_scale`; `scale` does not touch it.
/// - Padded rows get id -1 and weight 0 in every column, the shared ones included.
///
/// # Safety
/// The pointers must be valid for the shapes in [`SelectParams`], `ids` and `weights` must be writable and overlap nothing, and
/// `experts <= 512`, `top_k - shared_experts <= experts`, `groups` must divide `experts`.
pub unsafe fn select(p: &SelectParams) {
    if p.tokens > 0 && p.top_k > 0 {
        // SAFETY: the caller's contract, unchanged.
        for_dtype!(p.logits_dtype, T => unsafe { select_typed::<T>(p) })
    }
}

/// # Safety
/// As for [`select`]; the logits are of type `T`.
unsafe fn select_typed<T: Element>(p: &SelectParams) {
    let (tokens, experts, top_k) = (p.tokens as usize, p.experts as usize, p.top_k as usize);
    // SAFETY: the shapes of `SelectParams`, valid by the caller's contract.
    let (logits, ids, weights, bias, valid) = unsafe {
        (
            std::slice::from_raw_parts(p.logits.cast::<T>(), tokens * experts),
            std::slice::from_raw_parts_mut(p.ids, tokens * top_k),
            std::slice::from_raw_parts_mut(p.weights, tokens * top_k),
            (!p.correction_bias.is_null()).then(|| std::slice::from_raw_parts(p.correction_bias, experts)),
            p.num_token_non_padded.as_ref().map_or(tokens, |&n| n.max(0) as usize),
        )
    };
    let rules = Rules {
        bias,
        scoring: p.scoring,
        renormalize: p.renormalize,
        scale: p.scale,
        group_score: p.group_score,
        groups: p.groups as usize,
        topk_group: p.topk_group as usize,
        routed: top_k - p.shared_experts as usize,
        shared_scale: p.shared_scale,
    };
    let rows = ids.par_chunks_mut(top_k).zip(weights.par_chunks_mut(top_k)).enumerate();
    rows.with_min_len(TOKENS_PER_TASK).for_each(|(token, (ids, weights))| {
        if token >= valid {
            ids.fill(-1);
            weights.fill(0.0);
            return;
        }
        let mut row = [0.0; MAX_EXPERTS];
        let row = &mut row[..experts];
        for (value, &logit) in row.iter_mut().zip(&logits[token * experts..]) {
            *value = logit.to_f32();
        }
        rules.select_token(row, ids, weights);
    });
}

/// What is the same for all tokens.
struct Rules<'a> {
    bias: Option<&'a [f32]>,
    scoring: Scoring,
    renormalize: bool,
    scale: f32,
    group_score: GroupScore,
    groups: usize,
    topk_group: usize,
    routed: usize,
    shared_scale: f32,
}

impl Rules<'_> {
    fn select_token(&self, logits: &[f32], ids: &mut [i32], weights: &mut [f32]) {
        let experts = logits.len();
        let scorer = Scorer::new(self.scoring, logits);
        let grouped = self.group_score != GroupScore::None;

        // Choices, as integers that order like them.
        let mut choice = [0.0; MAX_EXPERTS];
        let choice = &mut choice[..experts];
        choice.copy_from_slice(logits);
        if self.bias.is_some() || grouped {
            choice.iter_mut().for_each(|x| *x = scorer.score(*x));
        }
        if let Some(bias) = self.bias {
            choice.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
        }
        let masks_weight = self.group_score == GroupScore::Max && self.bias.is_none() && scorer.never_negative();
        let mut masked = [false; MAX_EXPERTS];
        if grouped {
            self.mask_groups(choice, &mut masked[..experts]);
            let mask = if masks_weight { 0.0 } else { f32::NEG_INFINITY };
            choice.iter_mut().zip(&masked).filter(|(_, &out)| out).for_each(|(x, _)| *x = mask);
        }

        let (routed_ids, shared_ids) = ids.split_at_mut(self.routed);
        let (routed_weights, shared_weights) = weights.split_at_mut(self.routed);
        top(choice, routed_ids);
        for (weight, &id) in routed_weights.iter_mut().zip(&*routed_ids) {
            let id = id as usize;
            *weight = if masks_weight && masked[id] { 0.0 } else { scorer.score(logits[id]) };
        }
        if self.scoring == Scoring::SoftmaxTopk {
            softmax(routed_weights);
        } else if self.renormalize {
            let epsilon = if self.scoring == Scoring::Softmax { 0.0 } else { SUM_EPSILON };
            let sum = sum(routed_weights) + epsilon;
            routed_weights.iter_mut().for_each(|w| *w /= sum);
        }
        shared_weights.fill(sum(routed_weights) * self.shared_scale);
        for (i, id) in shared_ids.iter_mut().enumerate() {
            *id = (experts + i) as i32;
        }
        routed_weights.iter_mut().for_each(|w| *w *= self.scale);
    }

    /// Marks the experts of all groups but the `topk_group` best.
    fn mask_groups(&self, choice: &[f32], masked: &mut [bool]) {
        let size = choice.len() / self.groups;
        let mut score = [0.0; MAX_EXPERTS];
        for (score, group) in score.iter_mut().zip(choice.chunks_exact(size)) {
            let mut best = [0; 2];
            let best = &mut best[..size.min(if self.group_score == GroupScore::Top2 { 2 } else { 1 })];
            top(group, best);
            *score = best.iter().map(|&i| group[i as usize]).reduce(|a, b| a + b).unwrap_or_default();
        }
        let mut kept = [0; MAX_EXPERTS];
        let kept = &mut kept[..self.topk_group.min(self.groups)];
        top(&score[..self.groups], kept);
        masked.fill(true);
        for &group in &*kept {
            masked[group as usize * size..][..size].fill(false);
        }
    }
}

/// Logit to score, with what the softmax needs of the whole token.
struct Scorer {
    scoring: Scoring,
    max: f32,
    sum: f32,
}

impl Scorer {
    fn new(scoring: Scoring, logits: &[f32]) -> Self {
        let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
        if scoring == Scoring::Softmax {
            max = maximum(logits);
            sum = logits.iter().fold(0.0, |sum, x| sum + (x - max).exp());
        }
        Self { scoring, max, sum }
    }

    fn score(&self, x: f32) -> f32 {
        match self.scoring {
            Scoring::Softmax => (x - self.max).exp() / self.sum,
            Scoring::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Scoring::SqrtSoftplus => (if x > SOFTPLUS_THRESHOLD { x } else { x.exp().ln_1p() }).sqrt(),
            // SoftmaxTopk takes its softmax over the chosen logits afterwards.
            _ => x,
        }
    }

    fn never_negative(&self) -> bool {
        matches!(self.scoring, Scoring::Softmax | Scoring::Sigmoid | Scoring::SqrtSoftplus)
    }
}

/// An integer that orders like the number: `-0 == +0`, NaN on top.
fn order(x: f32) -> u32 {
    let bits = x.to_bits();
    if x.is_nan() {
        u32::MAX
    } else if x == 0.0 {
        1 << 31
    } else if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    }
}

/// Indices of the `best.len()` largest values, largest first, ties to the lower index.
fn top(values: &[f32], best: &mut [i32]) {
    let mut keys = [0; MAX_EXPERTS];
    let mut found = 0;
    for (i, &value) in values.iter().enumerate() {
        let key = order(value);
        if found == best.len() {
            if found == 0 || key <= keys[found - 1] {
                continue;
            }
            found -= 1;
        }
        let mut at = found;
        while at > 0 && keys[at - 1] < key {
            keys[at] = keys[at - 1];
            best[at] = best[at - 1];
            at -= 1;
        }
        keys[at] = key;
        best[at] = i as i32;
        found += 1;
    }
}

/// The largest value; NaN if there is one.
fn maximum(values: &[f32]) -> f32 {
    values.iter().fold(f32::NEG_INFINITY, |max, &x| if x > max || x.is_nan() { x } else { max })
}

fn sum(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |sum, x| sum + x)
}

fn softmax(values: &mut [f32]) {
    let max = maximum(values);
    values.iter_mut().for_each(|x| *x = (*x - max).exp());
    let sum = sum(values);
    values.iter_mut().for_each(|x| *x /= sum);
}
