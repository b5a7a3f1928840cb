//! How an all-reduce is launched on a GPU: a function of shape, ranks and device. Ranks need to agree only on the algorithm, because slots
//! belong to chunks, not to CTAs.

use super::pattern::{self, Narrow, Source};
use super::protocol::{algorithm, owned, Algorithm, Layout, Shape, CHUNK_BYTES};
use crate::device::{Arch, Device};
use crate::error::{Error, Result};
use crate::kernel::Launch;
use crate::params::AllReduceParams;
use crate::params::Dtype;
use crate::variants::allreduce::{one_shot, two_shot, RANKS_SERVED};
use crate::variants::{Element, Kernel, Work};

/// Chunks of a row that the kernels can hold. Without clusters, the limit is the number of threads of a CTA.
pub const MAX_ROW_CHUNKS: u32 = 4096;
/// The most tokens for which several CTAs of a cluster share a row. At 1 x 7168, 8 CTAs take 3.10 us where one takes 3.80 (H200, two
/// ranks). With many rows the cluster's barrier costs more than it gains.
const FEW_TOKENS: u32 = 32;
const LANES: u32 = 32;
/// The most chunks of a message, 16 GB. Kernels number chunks, and e4m3's words of 4 bytes, of which a chunk has up to two, in 32 bits.
/// The ranges of two-shot are rounded up, and they end below 2^31 as well.
const MAX_CHUNKS: u64 = 1 << 30;

/// The launch of one all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllReducePlan {
    pub algorithm: Algorithm,
    pub launch: Launch<AllReduceParams>,
    /// Chunks of a row.
    pub row_chunks: u32,
    /// Two-shot: chunks that one rank owns.
    pub range: u32,
    pub stages: [u32; 3],
}

impl AllReducePlan {
    /// `use_oneshot` is the algorithm that the caller prefers. It counts if the workspace has room for it and kernels exist.
    pub fn new(shape: &Shape, layout: &Layout, device: &Device, use_oneshot: Option<bool>) -> Result<AllReducePlan> {
        let (element, item) = match shape.dtype {
            Dtype::F32 => (Element::F32, 4),
            Dtype::F16 => (Element::F16, 2),
            _ => (Element::Bf16, 2),
        };
        let ranks = layout.ranks as u32;
        serves(ranks)?;
        let bytes = shape.tokens as u64 * shape.hidden as u64 * item;
        let row_chunks = (shape.hidden as u64 * item / CHUNK_BYTES) as u32;
        let widest = if device.arch >= Arch::SM90 { MAX_ROW_CHUNKS } else { 1024 };
        if row_chunks > widest || bytes / CHUNK_BYTES > MAX_CHUNKS {
            return Err(Error::Unsupported(format!(
                "input: all-reduces on {} serve rows of up to {} bytes and messages of up to {} bytes, got {} rows of {}",
                device.arch,
                widest as u64 * CHUNK_BYTES,
                MAX_CHUNKS * CHUNK_BYTES,
                shape.tokens,
                row_chunks as u64 * CHUNK_BYTES
            )));
        }
        let algorithm = match use_oneshot {
            Some(true) if bytes <= layout.oneshot => Algorithm::OneShot,
            Some(false) if ranks > 2 && bytes > 0 && bytes <= layout.twoshot => Algorithm::TwoShot,
            _ => algorithm(bytes, layout.ranks),
        };
        let work = work(shape.pattern);
        Ok(match algorithm {
            Algorithm::OneShot => oneshot(element, ranks, work, shape.tokens, row_chunks, device),
            Algorithm::TwoShot => twoshot(element, ranks, work, shape.tokens, row_chunks, device),
        })
    }
}

/// The least work that serves a pattern.
fn work(pattern: u8) -> Work {
    match pattern::of(pattern.into()) {
        Some(p) if !p.norm => Work::Sum,
        Some(p) if p.source == Source::Input && p.narrow == Narrow::None => Work::Norm,
        _ => Work::All,
    }
}

/// Refuses groups that have no kernels.
pub fn serves(ranks: u32) -> Result<()> {
    if RANKS_SERVED.contains(&ranks) {
        return Ok(());
    }
    Err(Error::Unsupported(format!("world_size: all-reduces on GPUs serve {RANKS_SERVED:?} ranks, got {ranks}")))
}

/// The one-shot launch: one chunk for each thread, and as many rows at once as fit. Each cluster pushes its next row before it waits for
/// the present one.
fn oneshot(element: Element, ranks: u32, work: Work, tokens: u32, row_chunks: u32, device: &Device) -> AllReducePlan {
    let wanted = match (tokens <= FEW_TOKENS, row_chunks) {
        _ if device.arch < Arch::SM90 => 1,
        (true, 512..) => 8,
        (true, _) => 4,
        (false, _) => row_chunks.div_ceil(1024).next_power_of_two(),
    };
    // Each CTA has at least one warp.
    let warps = row_chunks.div_ceil(LANES);
    let cluster = (0..=3).rev().map(|i| 1 << i).find(|&n| n <= wanted && n <= warps).unwrap_or(1);
    let kernel = one_shot(element, ranks, work, work == Work::Norm && cluster == 1);
    let block = row_chunks.div_ceil(cluster).next_multiple_of(LANES);
    let rows = (resident(&kernel, block, device) / cluster).clamp(1, tokens.max(1));
    let launch = Launch { kernel, grid: rows * cluster, block, cluster, shared_bytes: 0 };
    AllReducePlan { algorithm: Algorithm::OneShot, launch, row_chunks, range: 0, stages: [0; 3] }
}

/// The two-shot launch, of all CTAs that are resident together. 1/12 of them scatter, 1/4 reduce, the rest finish. On an H200 a scatter of
/// 1/4 changes 3 %, a reduce of 1/8 costs 17 %, and a finish of 1/4 costs 19 %.
fn twoshot(element: Element, ranks: u32, work: Work, tokens: u32, row_chunks: u32, device: &Device) -> AllReducePlan {
    let chunks = work.chunks().iter().copied().find(|n| row_chunks <= n * 512).unwrap_or(MAX_ROW_CHUNKS / 512);
    let kernel = two_shot(element, ranks, work, chunks);
    let block = row_chunks.div_ceil(chunks).next_multiple_of(LANES);
    let grid = resident(&kernel, block, device);
    let (scatter, reduce) = (grid / 12, grid / 4);
    let total = tokens as u64 * row_chunks as u64;
    AllReducePlan {
        algorithm: Algorithm::TwoShot,
        launch: Launch { kernel, grid, block, cluster: 1, shared_bytes: 0 },
        row_chunks,
        range: owned(total, ranks as usize, 0).end as u32,
        stages: [scatter, reduce, grid - scatter - reduce],
    }
}

/// CTAs of `block` threads that registers allow on the whole GPU.
fn resident(kernel: &Kernel<AllReduceParams>, block: u32, device: &Device) -> u32 {
    (kernel.threads() * kernel.ctas_per_multiprocessor() / block).min(32) * device.multiprocessors
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::variants::{Family, Variant};
    use std::collections::HashSet;

    const SHAPES: [(u32, u32); 16] = [
        (0, 8),
        (1, 8),
        (1, 2880),
        (3, 704),
        (8, 7168),
        (16, 8192),
        (32, 24),
        (33, 16384),
        (2, 32768),
        (65, 24576),
        (64, 2880),
        (128, 7168),
        (300, 1408),
        (2048, 7168),
        (4096, 2880),
        (100_000, 64),
    ];

    #[test]
    fn every_kernel_is_chosen_and_every_launch_is_legal() {
        let mut chosen = HashSet::new();
        for arch in [80, 90, 100, 120] {
            let device = Device::typical(Arch(arch));
            for (tokens, hidden) in SHAPES {
                for (dtype, item) in [(Dtype::Bf16, 2), (Dtype::F16, 2), (Dtype::F32, 4)] {
                    for (ranks, use_oneshot, pattern) in RANKS_SERVED.into_iter().flat_map(|n| {
                        [None, Some(true), Some(false)].into_iter().flat_map(move |u| [0, 1, 7, 9].map(|p| (n, u, p)))
                    }) {
                        let shape = Shape { pattern, dtype, tokens, hidden };
                        let bytes = tokens as u64 * hidden as u64 * item;
                        let layout = Layout::new(bytes, ranks as usize, false);
                        let row_chunks = hidden as u64 * item / CHUNK_BYTES;
                        let Ok(plan) = AllReducePlan::new(&shape, &layout, &device, use_oneshot) else {
                            assert!(row_chunks > if arch < 90 { 1024 } else { 4096 });
                            continue;
                        };
                        let Launch { kernel, grid, block, cluster, .. } = plan.launch;
                        chosen.insert(kernel.variant());
                        assert!(grid > 0 && grid % cluster == 0 && block % LANES == 0, "{plan:?}");
                        assert!(block > 0 && block <= kernel.threads() && cluster <= 8, "{plan:?}");
                        match plan.algorithm {
                            Algorithm::OneShot => {
                                assert!(bytes <= layout.oneshot);
                                assert!((block * cluster) as u64 >= row_chunks && (grid / cluster) <= tokens.max(1));
                            }
                            Algorithm::TwoShot => {
                                assert!(bytes > 0 && bytes <= layout.twoshot && cluster == 1 && ranks > 2);
                                assert!(plan.stages.iter().all(|&n| n > 0) && plan.stages.iter().sum::<u32>() == grid);
                                assert!(plan.range as u64 * ranks as u64 * CHUNK_BYTES >= bytes);
                                assert!(plan.range as u64 * CHUNK_BYTES <= layout.twoshot / ranks as u64);
                            }
                        }
                    }
                }
            }
        }
        let table: HashSet<Variant> = crate::variants::allreduce::all().into_iter().collect();
        assert_eq!(chosen, table);
    }

    fn plan(arch: u32, tokens: u32, hidden: u32, pattern: u8, use_oneshot: Option<bool>) -> AllReducePlan {
        let shape = Shape { pattern, dtype: Dtype::Bf16, tokens, hidden };
        let layout = Layout::new(1 << 30, 2, false);
        AllReducePlan::new(&shape, &layout, &Device::typical(Arch(arch)), use_oneshot).unwrap()
    }

    /// With few tokens, a row has many CTAs. With many tokens, it has as few CTAs as it fits in. Below Hopper there are no clusters.
    #[test]
    fn clusters_of_rows() {
        let few = FEW_TOKENS;
        for (arch, tokens, hidden, cluster, block) in [
            (90, 1, 7168, 8, 128),
            (90, few, 7168, 8, 128),
            (90, few + 1, 7168, 1, 896),
            // 512 chunks of a row are many, 511 are not.
            (90, 1, 4096, 8, 64),
            (90, 1, 4088, 4, 128),
            (90, 1, 2880, 4, 96),
            (90, few + 1, 16384, 2, 1024),
            (90, few + 1, 8192, 1, 1024),
            (90, few + 1, 8200, 2, 544),
            // Each CTA has at least one warp.
            (90, 1, 64, 1, 32),
            (90, 1, 512, 2, 32),
            (80, 1, 7168, 1, 896),
            (120, 1, 7168, 8, 128),
        ] {
            let launch = plan(arch, tokens, hidden, 0, Some(true)).launch;
            assert_eq!((launch.cluster, launch.block), (cluster, block), "sm_{arch}, {tokens} x {hidden}");
        }
    }

    #[test]
    fn one_row_a_cluster_as_far_as_they_are_resident() {
        let device = Device::typical(Arch::SM90);
        for (tokens, hidden) in [(1, 7168), (20, 16384), (1000, 2880), (5000, 16384), (5000, 64)] {
            let Launch { kernel, grid, block, cluster, .. } = plan(90, tokens, hidden, 1, Some(true)).launch;
            assert_eq!(
                grid / cluster,
                (resident(&kernel, block, &device) / cluster).min(tokens),
                "{tokens} x {hidden}"
            );
            // The kernel with one CTA for each row serves the norm only, which needs nothing else to be kept.
            let Variant { flag: alone, work, .. } = kernel.variant();
            assert_eq!(kernel.family, Family::AllReduceOneShot);
            assert_eq!((work, alone), (Work::Norm, cluster == 1));
            let sum = plan(90, tokens, hidden, 0, Some(true)).launch.kernel;
            assert_eq!((sum.family, sum.flag, sum.work), (Family::AllReduceOneShot, false, Work::Sum));
        }
    }

    #[test]
    fn least_work_of_every_pattern() {
        let expected = [Work::Sum, Work::Norm, Work::All, Work::All, Work::All, Work::All];
        let got: Vec<Work> = (0..6).map(work).collect();
        assert_eq!(got, expected);
        // Patterns whose rows come from experts, and pattern numbers that do not exist, need all the work.
        assert!((6..12).chain([200]).all(|pattern| work(pattern) == Work::All));
    }

    /// Kernels number the chunks of a message, and the words of its e4m3 values, in 32 bits.
    #[test]
    fn messages_beyond_the_numbers_of_a_kernel_are_refused() {
        let device = Device::typical(Arch::SM90);
        for (ranks, dtype, item, pattern) in [(2, Dtype::Bf16, 2, 2), (4, Dtype::F32, 4, 0), (8, Dtype::F16, 2, 11)] {
            // A row of 512 chunks.
            let most = (MAX_CHUNKS / 512) as u32;
            let shape = |tokens| Shape { pattern, dtype, tokens, hidden: 512 * CHUNK_BYTES as u32 / item };
            let layout = Layout::new(1 << 36, ranks, false);
            let plan = AllReducePlan::new(&shape(most), &layout, &device, None).unwrap();
            let words = MAX_CHUNKS * if item == 2 { 2 } else { 1 };
            assert!(words - 1 <= i32::MAX as u64 && plan.range as u64 * ranks as u64 <= i32::MAX as u64);
            let error = AllReducePlan::new(&shape(most + 1), &layout, &device, None).unwrap_err().to_string();
            assert!(error.contains("up to 17179869184 bytes") && error.contains("2097153 rows of 8192"), "{error}");
        }
    }

    #[test]
    fn groups_without_kernels_are_refused_by_number() {
        let shape = Shape { pattern: 0, dtype: Dtype::Bf16, tokens: 1, hidden: 64 };
        for ranks in [3, 5, 6, 7] {
            let layout = Layout::new(1 << 20, ranks, false);
            let error = AllReducePlan::new(&shape, &layout, &Device::typical(Arch::SM90), None).unwrap_err();
            assert!(error.to_string().ends_with(&format!("got {ranks}")));
        }
    }
}
