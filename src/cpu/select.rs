//! Top-k: router logits to expert ids and weights, one token at a time.

use crate::parallel::*;

use super::{for_dtype, Element};
use crate::params::{GroupScore, Scoring, SelectParams};

const MAX_EXPERTS: usize = 1024;
/// The largest number of columns of a token, and of groups.
const MOST_CHOSEN: usize = 32;
/// Keeps a division by a sum of vanished scores from being 0 / 0. SGLang adds the same number.
const SUM_EPSILON: f32 = 1e-20;
/// torch's softplus is the identity above this.
const SOFTPLUS_THRESHOLD: f32 = 20.0;
/// Tokens that one task takes: a token costs well under a microsecond.
const TOKENS_PER_TASK: usize = 16;

/// Chooses the experts of every token, all arithmetic in fp32. csrc/moe/select.cuh and python/oxmoe/reference/routing.py have the same rules.
///
/// - Order: choices compare as numbers, `-0 == +0`, every NaN equal and above `+inf`; equal choices go to the lower id.
///   Columns are best first.
/// - Groups count only when `topk_group < groups`. A group is `experts / groups` neighbours; its score is its best
///   choice (`Max`) or the sum of its two best (`Top2`; its only one in groups of one). Groups compare as choices do, so
///   one that holds a NaN, or `+inf` and `-inf` as its two best, is above all others; equal groups go to the lower one.
/// - Experts outside the best groups are never chosen, not even for one whose choice is `-inf`: SGLang gives them 0 or
///   `-inf` for a choice, which differs only where that ties with an expert of the best groups.
/// - Without bias and groups the choice is the logit. Otherwise it is the score plus the bias. With `SoftmaxTopk` and `Identity`
///   the score is the logit here.
/// - weight = score, without the bias.
/// - A softmax over all experts sums in id order: NaN or +inf among the logits makes all weights of the token NaN. A
///   softmax over the chosen (`SoftmaxTopk`, or `Softmax` renormalized without bias and groups) sums in column order.
/// - Any other renormalizing divides by the sum in column order plus 1e-20.
/// - Sums on GPUs have another order, which is the same in every call.
/// - A shared expert's weight is `shared_weight`.
/// - Padded rows get id -1 and weight 0 in every column, also in the columns of shared experts.
///
/// # Safety
/// The pointers must be valid for the shapes in [`SelectParams`], `ids` and `weights` must be writable and overlap
/// nothing, and `experts <= 1024`, `top_k <= 32`, `groups <= 32`, `groups` must divide `experts`, and all experts, or those of `topk_group` groups, must be at
/// least `top_k - shared_experts`.
pub unsafe fn select(p: &SelectParams) {
    if p.tokens > 0 && p.top_k > 0 {
        // SAFETY: the caller's contract, unchanged.
        for_dtype!(p.logits_dtype, T => unsafe { select_typed::<T>(p) })
    }
}

/// # Safety
/// The pointers must be valid for the shapes in [`SelectParams`]; see [`select`]. The logits are of type `T`.
unsafe fn select_typed<T: Element>(p: &SelectParams) {
    let (tokens, experts, top_k) = (p.tokens as usize, p.experts as usize, p.top_k as usize);
    // SAFETY: the slices have the shapes of `SelectParams`, by the caller's contract.
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
        groups: (p.group_score != GroupScore::None && p.topk_group < p.groups).then_some(Groups {
            score: p.group_score,
            count: p.groups as usize,
            kept: p.topk_group as usize,
        }),
        routed: top_k - p.shared_experts as usize,
        shared_weight: p.shared_weight,
        order_by_id: p.order_by_id,
    };
    let rows = ids.par_chunks_mut(top_k).zip(weights.par_chunks_mut(top_k)).enumerate();
    rows.for_each_least(TOKENS_PER_TASK, |(token, (ids, weights))| {
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

/// The rules that are the same for all tokens.
struct Rules<'a> {
    bias: Option<&'a [f32]>,
    scoring: Scoring,
    renormalize: bool,
    scale: f32,
    groups: Option<Groups>,
    routed: usize,
    shared_weight: f32,
    order_by_id: bool,
}

impl Rules<'_> {
    fn select_token(&self, logits: &[f32], ids: &mut [i32], weights: &mut [f32]) {
        let on_logit = self.bias.is_none() && self.groups.is_none();
        let over_chosen =
            self.scoring == Scoring::SoftmaxTopk || (self.scoring == Scoring::Softmax && self.renormalize && on_logit);
        let scorer = Scorer::new(if over_chosen { Scoring::Identity } else { self.scoring }, logits);

        let mut choice = [0.0; MAX_EXPERTS];
        let choice = &mut choice[..logits.len()];
        choice.copy_from_slice(logits);
        if !on_logit {
            choice.iter_mut().for_each(|x| *x = scorer.score(*x));
        }
        if let Some(bias) = self.bias {
            choice.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
        }
        let mut keys = [0; MAX_EXPERTS];
        let keys = keys_of(choice, &mut keys);
        if let Some(groups) = &self.groups {
            groups.mask(choice, keys);
        }

        let (routed_ids, shared_ids) = ids.split_at_mut(self.routed);
        let (routed_weights, shared_weights) = weights.split_at_mut(self.routed);
        top(keys, routed_ids);
        for (weight, &id) in routed_weights.iter_mut().zip(&*routed_ids) {
            *weight = scorer.score(logits[id as usize]);
        }
        if over_chosen {
            softmax(routed_weights);
        } else if self.renormalize {
            let sum = sum(routed_weights) + SUM_EPSILON;
            routed_weights.iter_mut().for_each(|w| *w /= sum);
        }
        shared_weights.fill(self.shared_weight);
        for (i, id) in shared_ids.iter_mut().enumerate() {
            *id = (logits.len() + i) as i32;
        }
        routed_weights.iter_mut().for_each(|w| *w *= self.scale);
        if self.order_by_id {
            // This is an insertion sort of both rows, which have a handful of columns.
            for end in 1..routed_ids.len() {
                let mut i = end;
                while i > 0 && routed_ids[i - 1] > routed_ids[i] {
                    routed_ids.swap(i - 1, i);
                    routed_weights.swap(i - 1, i);
                    i -= 1;
                }
            }
        }
    }
}

/// Groups of experts. Fewer groups are kept than there are.
struct Groups {
    score: GroupScore,
    count: usize,
    kept: usize,
}

impl Groups {
    /// Removes the keys of all groups but the best.
    fn mask(&self, choice: &[f32], keys: &mut [u32]) {
        let size = choice.len() / self.count;
        let mut score = [0.0; MOST_CHOSEN];
        let score = &mut score[..self.count];
        for ((score, choice), keys) in score.iter_mut().zip(choice.chunks_exact(size)).zip(keys.chunks_exact(size)) {
            let mut best = [0; 2];
            let best = &mut best[..size.min(if self.score == GroupScore::Top2 { 2 } else { 1 })];
            top(keys, best);
            *score = best.iter().map(|&i| choice[i as usize]).reduce(|a, b| a + b).unwrap_or_default();
        }
        let (mut score_keys, mut kept) = ([0; MOST_CHOSEN], [0; MOST_CHOSEN]);
        let kept = &mut kept[..self.kept];
        top(keys_of(score, &mut score_keys), kept);
        for (group, keys) in keys.chunks_exact_mut(size).enumerate() {
            if !kept.contains(&(group as i32)) {
                keys.fill(NOBODY);
            }
        }
    }
}

/// Turns a logit into a score, with the numbers that the softmax needs of the whole token.
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
}

/// A key below the key of every number.
const NOBODY: u32 = 0;

/// The keys of some numbers, at the start of `room`.
fn keys_of<'a>(values: &[f32], room: &'a mut [u32]) -> &'a mut [u32] {
    let keys = &mut room[..values.len()];
    keys.iter_mut().zip(values).for_each(|(key, &value)| *key = order(value));
    keys
}

/// An integer that orders like the number, with `-0 == +0` and NaN above all others.
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

/// Indices of the `best.len()` largest keys, at most MOST_CHOSEN. The largest key comes first, and ties go to the lower index.
fn top(keys: &[u32], best: &mut [i32]) {
    let mut taken = [NOBODY; MOST_CHOSEN];
    let mut found = 0;
    for (i, &key) in keys.iter().enumerate() {
        if found == best.len() {
            if found == 0 || key <= taken[found - 1] {
                continue;
            }
            found -= 1;
        }
        let mut at = found;
        while at > 0 && taken[at - 1] < key {
            taken[at] = taken[at - 1];
            best[at] = best[at - 1];
            at -= 1;
        }
        taken[at] = key;
        best[at] = i as i32;
        found += 1;
    }
}

/// The largest value, or NaN if any value is NaN.
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
