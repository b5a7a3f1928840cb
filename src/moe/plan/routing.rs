//! Launch shapes of routing: a pure function of the problem and the architecture, the same on every rank.
//!
//! Few tokens take one launch of one CTA. More tokens take one launch of a cluster, whose CTAs talk through distributed shared memory. Many
//! tokens take two launches: Select (or Histogram, if ids are given) and Place.

use super::steps::RouteLaunch;
use crate::kernel::Launch;
use crate::params::{RaggedParams, RouteParams};
use crate::variants::routing::{place, route, select, EXPERTS_PER_LANE, HISTOGRAM, RAGGED, ROUTE_GIVEN};
use crate::variants::signature::SelectAndSort;
use crate::variants::{Kernel, Variant};

/// The problem that is routed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutingDesc {
    pub tokens: u32,
    /// Slots of a token, those of fused shared experts included.
    pub top_k: u32,
    /// Experts to sort by (`RouteParams::experts`), fused shared experts included.
    pub experts: u32,
    /// Experts with a logit, and the groups in which they are chosen (1: no groups). `None` if ids are given.
    pub logits: Option<Logits>,
    /// Architecture of the GPU: 80, 86, 89, 90, 100, 103 or 120.
    pub sm: u32,
}

/// The router logits of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logits {
    pub experts: u32,
    pub groups: u32,
    /// Whether there is no correction bias, there are no groups, and columns are best first.
    pub plain: bool,
}

/// The launches of the routing: one, or two in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutingPlan {
    pub first: RouteLaunch,
    pub second: Option<Launch<RouteParams>>,
}

/// Most experts with a logit, and most experts by which slots are sorted, since each has a thread of a CTA. Slots are also sorted by fused
/// shared experts.
pub const MAX_EXPERTS: u32 = 1024;
/// Most slots of a token.
pub const MAX_TOP_K: u32 = 32;

impl Logits {
    /// Experts that a lane holds. Groups are aligned to lanes: their number, rounded up to a power of two, divides the warp.
    pub fn per_lane(self) -> Option<u32> {
        if self.experts == 0
            || self.experts > MAX_EXPERTS
            || self.groups == 0
            || self.groups > 32
            || !self.experts.is_multiple_of(self.groups)
        {
            return None;
        }
        let lanes = 32 / self.groups.next_power_of_two();
        let need = (self.experts / self.groups).div_ceil(lanes);
        EXPERTS_PER_LANE.into_iter().find(|&n| n >= need)
    }
}

impl RoutingPlan {
    /// The plan, or `None` if the kernels do not take so many experts, groups or slots a token.
    pub fn new(desc: &RoutingDesc) -> Option<Self> {
        let d = desc;
        if d.experts == 0 || d.experts > MAX_EXPERTS || d.top_k == 0 || d.top_k > MAX_TOP_K {
            return None;
        }
        Some(match d.logits {
            Some(logits @ Logits { plain, .. }) => {
                let experts_per_lane = logits.per_lane()?;
                d.plan((route(experts_per_lane, plain), select(experts_per_lane, plain)), RouteLaunch::Select)
            }
            None => d.plan((ROUTE_GIVEN, HISTOGRAM.kernel()), RouteLaunch::Sort),
        })
    }

    pub fn launches(&self) -> impl Iterator<Item = RouteLaunch> {
        [Some(self.first), self.second.map(RouteLaunch::Sort)].into_iter().flatten()
    }
}

/// The launch of top-k without a sort. `None` if the kernel does not take so many experts or groups.
pub fn select_alone(tokens: u32, logits: Logits) -> Option<Launch<SelectAndSort>> {
    let warps = tokens.clamp(1, 8);
    Some(Launch {
        kernel: select(logits.per_lane()?, logits.plain),
        grid: tokens.div_ceil(warps).clamp(1, 2048),
        block: 32 * warps,
        cluster: 1,
        shared_bytes: 0,
    })
}

/// The launch that makes triton_kernels' tables. A CTA takes 4096 slots.
pub fn ragged(slots: u32) -> Launch<RaggedParams> {
    let kernel = RAGGED.kernel();
    Launch { kernel, grid: slots.div_ceil(4096).clamp(1, 64), block: kernel.threads(), cluster: 1, shared_bytes: 0 }
}

/// Most slots of a block of tokens, because a block's counts have 16 bits.
const MOST_BLOCK_SLOTS: u32 = 65535;

/// The bytes of `RouteParams::block_histogram` that two launches need on any architecture. They never decrease with more tokens.
pub fn block_histogram_bytes(tokens: u32, experts: u32, top_k: u32) -> usize {
    let blocks = tokens.clamp(1, 128).max(tokens.div_ceil(MOST_BLOCK_SLOTS / top_k));
    blocks as usize * experts.div_ceil(2) as usize * 4
}

/// Every kernel that some plan can choose.
pub fn variants() -> Vec<Variant> {
    let mut all = vec![ROUTE_GIVEN.variant(), HISTOGRAM.kernel().variant(), RAGGED.kernel().variant()];
    for plain in [true, false] {
        all.extend(EXPERTS_PER_LANE.map(|experts| select(experts, plain).variant()));
        all.extend(EXPERTS_PER_LANE.map(|experts| route(experts, plain).variant()));
        all.push(place(plain).variant());
    }
    all
}

impl RoutingDesc {
    /// CTAs and threads of the one-launch form. 0 CTAs: it is too much work for one launch. The borders were measured on H200 (E 8 to 256).
    /// With logits one launch is better as long as every token has its warp and CTAs leave room for the CTAs of the kernel before. Beyond
    /// that, 16 multiprocessors take longer to choose than a second launch costs.
    fn one_launch_shape(&self) -> (u32, u32) {
        let most_ctas = match self.sm {
            90 | 100 | 103 => 16,
            120 => 8,
            _ => 1,
        };
        // Shapes are (most tokens, or most slots if ids are given; CTAs; threads), the best first.
        let (work, shapes): (u32, &[(u32, u32, u32)]) = match self.logits {
            // The shapes for more than 16 experts a lane follow those below, with enough threads for the experts. They were not measured.
            Some(l) if l.per_lane() > Some(16) => {
                (self.tokens, &[(8, 4, 512), (64, 8, 512), (256, 16, 512), (128, 8, 512)])
            }
            Some(_) => (
                self.tokens,
                &[(4, 1, 256), (8, 4, 256), (32, 8, 256), (64, 8, 512), (256, 16, 512), (128, 8, 512), (32, 1, 1024)],
            ),
            None => (
                self.slots(),
                &[
                    (128, 1, 256),
                    (256, 4, 256),
                    (2048, 8, 256),
                    (4096, 16, 256),
                    (8192, 16, 512),
                    (16384, 16, 1024),
                    (512, 1, 512),
                ],
            ),
        };
        let found = shapes.iter().find(|&&(most, ctas, _)| work <= most && ctas <= most_ctas);
        found.map_or((0, 0), |&(_, ctas, threads)| (ctas, threads))
    }

    /// The plan with one of these kernels, which `launch` names by their parameters: the kernel of the one-launch form, or the first of two.
    fn plan<P>(&self, (one, first): (Kernel<P>, Kernel<P>), launch: fn(Launch<P>) -> RouteLaunch) -> RoutingPlan {
        let (cluster, threads) = self.one_launch_shape();
        // A CTA of 512 threads chooses for more experts than it has threads; the cluster has a thread for each.
        let block = self.block(threads).min(one.threads());
        let one = Launch { kernel: one, grid: cluster, block, cluster, shared_bytes: self.route_bytes(cluster) };
        if cluster > 0 && one.shared_bytes <= self.max_shared_bytes() {
            return RoutingPlan { first: launch(one), second: None };
        }
        let (first, second) = self.two_launches(first);
        RoutingPlan { first: launch(first), second: Some(second) }
    }

    /// The two launches, which have the same blocks of tokens. Their shapes were measured on H200.
    fn two_launches<P>(&self, first: Kernel<P>) -> (Launch<P>, Launch<RouteParams>) {
        let (wanted, many) = match self.logits {
            Some(_) => (self.tokens.div_ceil(8), self.tokens > 1024),
            None => (self.slots().div_ceil(256), self.slots() > 65536),
        };
        let blocks = wanted
            .clamp(1, if many { 128 } else { 64 })
            .max(self.tokens.div_ceil(MOST_BLOCK_SLOTS / self.top_k))
            .min(self.tokens.max(1));
        let block_tokens = self.tokens.div_ceil(blocks);
        let block_slots = block_tokens.saturating_mul(self.top_k);

        let block = match self.logits {
            Some(_) if block_tokens <= 16 => 512,
            Some(_) => first.threads(),
            None => block_slots.next_power_of_two().clamp(256, 1024),
        };
        // A CTA of the first launch takes more than half of a multiprocessor's shared memory. CTAs of the second launch may already wait
        // there, and two CTAs of the first must not share what is left of a multiprocessor.
        let apart = if self.sm >= 90 { self.max_shared_bytes() / 2 + 2048 } else { 0 };
        let shared_bytes = (self.experts.next_multiple_of(4) * 4).max(apart);
        let first = Launch { kernel: first, grid: blocks, block, cluster: 1, shared_bytes };

        // With many blocks most of the time goes into adding up their counts, so an expert has 4 threads.
        let useful = if many { block_slots.max(4 * self.experts) } else { block_slots };
        let block = match self.logits {
            Some(_) => self.block(useful.next_power_of_two().clamp(512, 1024)),
            None => 1024,
        };
        let shared_bytes = self.place_bytes(blocks, block);
        let kernel = place(self.logits.is_some());
        (first, Launch { kernel, grid: blocks, block, cluster: 1, shared_bytes })
    }

    fn slots(&self) -> u32 {
        self.tokens.saturating_mul(self.top_k)
    }

    /// Threads of a CTA, at least `threads` and one for each expert.
    fn block(&self, threads: u32) -> u32 {
        threads.max(self.experts.next_multiple_of(32))
    }

    /// Bytes of Schedule in csrc/moe/slot_sort.cuh.
    fn schedule_bytes(&self) -> u32 {
        256 + 16 * self.experts
    }

    /// (units of all tokens, slots of a unit), the units of csrc/moe/slot_sort.cuh.
    fn units(&self) -> (u64, u64) {
        let (tokens, top_k) = (u64::from(self.tokens), u64::from(self.top_k));
        if self.logits.is_some() {
            (tokens, top_k)
        } else {
            (tokens * top_k, 1)
        }
    }

    /// Bytes of UnitBits for this many units.
    fn unit_bytes(&self, units: u64) -> u64 {
        (units * self.units().1 * 2).next_multiple_of(16) + units.div_ceil(32) * u64::from(self.columns()) * 8
    }

    fn columns(&self) -> u32 {
        self.experts.next_multiple_of(8)
    }

    /// Shared memory of csrc/moe/place.cuh. The starts of UnitBits first hold the sums over the blocks.
    fn place_bytes(&self, blocks: u32, threads: u32) -> u32 {
        let most = match self.logits {
            Some(_) => 4 * 32,
            None if self.experts <= 256 => 32 * 32,
            None if self.experts <= 544 => 16 * 32,
            None => 8 * 32,
        };
        let units =
            (self.units().0 / u64::from(self.tokens.max(1)) * u64::from(self.tokens.div_ceil(blocks))).min(most);
        let segments = (threads / self.experts.div_ceil(4)).min(threads / 64);
        let starts = units.div_ceil(32) as u32 * self.columns() * 4;
        let sums = 2 * segments * self.columns() * 4;
        self.schedule_bytes() + self.unit_bytes(units) as u32 + sums.saturating_sub(starts)
    }

    /// Shared memory of csrc/moe/route.cuh. The number saturates, so that the caller sees that a CTA's share is too large.
    fn route_bytes(&self, ctas: u32) -> u32 {
        let ctas = u64::from(ctas.max(1));
        let counts = u64::from(self.columns()) * 2 * if ctas > 1 { ctas + 1 } else { 1 };
        let bytes = u64::from(self.schedule_bytes()) + counts + 16 + self.unit_bytes(self.units().0.div_ceil(ctas));
        u32::try_from(bytes).unwrap_or(u32::MAX)
    }

    fn max_shared_bytes(&self) -> u32 {
        match self.sm {
            90 | 100 | 103 => 227 * 1024,
            _ => 99 * 1024,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::variants::Family;

    const TOKENS: [u32; 13] = [1, 2, 16, 17, 64, 100, 256, 650, 1024, 2048, 4096, 16384, 65536];

    fn descs() -> impl Iterator<Item = RoutingDesc> {
        let shapes = [
            (1, 1, 1),
            (8, 1, 2),
            (60, 1, 4),
            (128, 1, 8),
            (160, 8, 6),
            (256, 8, 8),
            (384, 1, 8),
            (511, 1, 10),
            (512, 1, 32),
            (513, 1, 1),
            (896, 1, 16),
            (992, 8, 32),
        ];
        shapes.into_iter().flat_map(|(experts, groups, top_k)| {
            [80, 86, 89, 90, 100, 103, 120].into_iter().flat_map(move |sm| {
                TOKENS.into_iter().flat_map(move |tokens| {
                    [Some(Logits { experts, groups, plain: groups == 1 }), None].into_iter().flat_map(move |logits| {
                        [0, 1, 32].map(|shared| RoutingDesc { tokens, top_k, experts: experts + shared, logits, sm })
                    })
                })
            })
        })
    }

    #[test]
    fn every_shape_fits_its_gpu() {
        for d in descs() {
            let plan = RoutingPlan::new(&d).unwrap();
            for l in plan.launches().map(RouteLaunch::any) {
                assert!(l.block >= 32 && l.block <= 1024 && l.block % 32 == 0, "{d:?} {l:?}");
                assert!(
                    l.shared_bytes <= if matches!(d.sm, 90 | 100 | 103) { 227 * 1024 } else { 99 * 1024 },
                    "{d:?} {l:?}"
                );
                assert!(l.grid >= 1 && l.grid % l.cluster == 0, "{d:?} {l:?}");
                match d.sm {
                    90 | 100 | 103 => assert!(l.cluster <= 16, "{d:?} {l:?}"),
                    120 => assert!(l.cluster <= 8, "{d:?} {l:?}"),
                    _ => assert_eq!(l.cluster, 1, "{d:?} {l:?}"),
                }
            }
        }
    }

    #[test]
    fn kernels_find_what_they_assume() {
        for d in descs() {
            let plan = RoutingPlan::new(&d).unwrap();
            let first = plan.first.any();
            match plan.second {
                None => {
                    assert!(d.tokens * d.top_k <= 65535, "{d:?}");
                    assert!(matches!(first.variant.family, Family::Route | Family::RouteGivenIds));
                    assert_eq!(first.grid, first.cluster, "{d:?}");
                    assert!(first.block >= d.experts.div_ceil(8) * 4, "{d:?}");
                    assert!(first.block * first.grid >= d.experts, "{d:?}");
                }
                Some(place) => {
                    assert_eq!(place.kernel, super::place(d.logits.is_some()));
                    assert_eq!(place.grid, first.grid, "{d:?}");
                    assert!(place.block >= 64 && place.block >= d.experts, "{d:?}");
                    assert!(d.tokens.div_ceil(place.grid) * d.top_k <= 65535, "{d:?}");
                    assert!(place.grid <= d.tokens, "{d:?}");
                    let bytes = block_histogram_bytes(d.tokens, d.experts, d.top_k);
                    assert!(bytes >= place.grid as usize * d.experts.div_ceil(2) as usize * 4, "{d:?}");
                }
            }
        }
    }

    #[test]
    fn lanes_hold_all_experts() {
        for (experts, groups, per_lane) in [
            (1, 1, 1),
            (32, 1, 1),
            (33, 1, 2),
            (128, 1, 4),
            (160, 8, 8),
            (256, 8, 8),
            (256, 1, 8),
            (384, 1, 12),
            (385, 1, 16),
            (512, 8, 16),
            (513, 1, 32),
            (896, 1, 32),
            (1024, 32, 32),
        ] {
            assert_eq!(Logits { experts, groups, plain: false }.per_lane(), Some(per_lane), "{experts} in {groups}");
        }
        for (experts, groups) in [(0, 1), (1025, 1), (256, 33), (256, 7), (1023, 31), (1020, 17), (990, 5)] {
            assert_eq!(Logits { experts, groups, plain: false }.per_lane(), None, "{experts} in {groups}");
        }
    }

    #[test]
    fn few_tokens_take_one_launch() {
        for tokens in [1, 8, 32] {
            for sm in [80, 89, 90, 100, 120] {
                for logits in [Some(Logits { experts: 128, groups: 1, plain: true }), None] {
                    let d = RoutingDesc { tokens, top_k: 8, experts: 128, logits, sm };
                    assert_eq!(RoutingPlan::new(&d).unwrap().second, None, "{d:?}");
                }
            }
        }
    }

    #[test]
    fn one_launch_on_hopper() {
        let of =
            |tokens, logits| RoutingPlan::new(&RoutingDesc { tokens, top_k: 8, experts: 128, logits, sm: 90 }).unwrap();
        let logits = Some(Logits { experts: 128, groups: 1, plain: true });
        assert_eq!((of(256, logits).second, of(2048, None).second), (None, None));
        assert!(of(257, logits).second.is_some() && of(2049, None).second.is_some());
    }

    #[test]
    fn plain_choices_have_kernels_of_their_own() {
        for (plain, symbols) in [(true, ["route_e4", "select_e4"]), (false, ["route_e4_any", "select_e4_any"])] {
            let made = [1, 5000].map(|tokens| {
                let logits = Some(Logits { experts: 128, groups: 1, plain });
                let d = RoutingDesc { tokens, top_k: 8, experts: 128, logits, sm: 90 };
                RoutingPlan::new(&d).unwrap().first.any().variant.symbol()
            });
            assert_eq!(made, symbols);
        }
    }

    #[test]
    fn million_tokens_keep_16_bit_counts() {
        let d = RoutingDesc { tokens: 1 << 20, top_k: 32, experts: 512, logits: None, sm: 90 };
        let plan = RoutingPlan::new(&d).unwrap();
        assert!(d.tokens.div_ceil(plan.first.any().grid) * d.top_k <= 65535);
    }

    #[test]
    fn refuses_what_no_kernel_takes() {
        let d = RoutingDesc {
            tokens: 1,
            top_k: 8,
            experts: 128,
            logits: Some(Logits { experts: 128, groups: 1, plain: true }),
            sm: 90,
        };
        assert!(RoutingPlan::new(&d).is_some());
        assert_eq!(RoutingPlan::new(&RoutingDesc { top_k: 33, ..d }), None);
        assert_eq!(RoutingPlan::new(&RoutingDesc { experts: MAX_EXPERTS + 1, logits: None, ..d }), None);
    }
}
