//! The choice of the dense kernel and the number of its CTAs: a function of the shape and the device.

use crate::device::Device;
use crate::kernel::{AnyLaunch, Launch};
use crate::params::{MmMxfp8FewParams, MmMxfp8Params};
use crate::variants::dense::{scale_bytes, tile, FEW, MM_MXFP8_TOKENS, WIDE};
use crate::variants::routing::STATIC_SHARED;
use crate::variants::Kernel;

/// Columns of K in a block. CTAs take one block at a time.
const BLOCK_K: i64 = 128;

/// Most tokens that the kernels for few tokens (which apply scales to sums) take.
const MOST_FEW: i64 = 32;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MmPlan {
    /// CTAs of a cluster, which share K.
    pub splits: u32,
    /// Wide kernel: the first `shared_tiles` tiles are shared by all CTAs. This field and the four below are 0 in the kernels for few
    /// tokens.
    pub shared_tiles: u32,
    pub tile_tokens: u32,
    pub token_bytes: i64,
    /// Bytes of the partial sums that CTAs leave to other CTAs, and the number of counters that say that the sums are there.
    pub partial_bytes: i64,
    pub arrivals: u32,
    /// Kernels for few tokens: passes of a CTA, and rows of b in each pass. 0 in the wide kernel.
    pub passes: u32,
    pub pass_rows: u32,
    pub launches: MmLaunches,
}

/// The launches of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MmLaunches {
    Few(Launch<MmMxfp8FewParams>),
    /// The first launch brings the tokens into order.
    Wide([Launch<MmMxfp8Params>; 2]),
}

impl MmPlan {
    pub fn new(m: i64, n: i64, k: i64, device: &Device) -> MmPlan {
        few(m, n, k, device).unwrap_or_else(|| wide(m, n, k, device))
    }

    /// The launches, in their order.
    pub fn launches(&self) -> impl Iterator<Item = AnyLaunch> {
        let launches = match self.launches {
            MmLaunches::Few(launch) => [Some(launch.any()), None],
            MmLaunches::Wide(both) => both.map(|launch| Some(launch.any())),
        };
        launches.into_iter().flatten()
    }
}

fn few_shared_bytes(kernel: Kernel<MmMxfp8FewParams>, k: i64) -> u32 {
    kernel.least_shared_bytes().unwrap_or(0) + scale_bytes(&kernel, k as u32)
}

/// The plan of a kernel for few tokens: one or two CTAs for each multiprocessor, with equally many rows of b each. All these kernels add up
/// a row in the same way. None if there are many tokens, or if the scales of K have no room beside 32 tokens. The second condition counts
/// for fewer tokens too, because the other kernel adds up in another order.
fn few(m: i64, n: i64, k: i64, device: &Device) -> Option<MmPlan> {
    let most = device.shared_bytes - STATIC_SHARED;
    if m > MOST_FEW || few_shared_bytes(FEW[FEW.len() - 1], k) > most {
        return None;
    }
    let tokens = FEW.into_iter().map(|kernel| tile(&kernel).1).find(|&tokens| m <= i64::from(tokens))?;
    let up = |size: i64, unit: i64| up_div(size, unit) * unit;
    // The widest kernel that a CTA's rows fill. A wider kernel is better because tokens are loaded once for each pass.
    let fitting = |ctas: i64, widest: u32, room: u32| {
        let rows = up(up_div(n, ctas), 4);
        let of_pass = (rows.min(64) as u32).next_power_of_two().clamp(16, 64);
        let fits = |kernel: &Kernel<_>| {
            let (rows, of) = tile(kernel);
            of == tokens && rows <= of_pass.min(widest) && few_shared_bytes(*kernel, k) <= room
        };
        FEW.into_iter().find(fits).map(|kernel| (kernel, rows))
    };
    let ctas = i64::from(device.multiprocessors);
    // Two CTAs are faster if each fills passes of 32 rows (H200).
    let two =
        || fitting(2 * ctas, 32, (device.shared_bytes + 1024) / 2 - 1024).filter(|(kernel, _)| tile(kernel).0 == 32);
    let (kernel, rows) = two().or_else(|| fitting(ctas, 64, most))?;
    let widest = i64::from(tile(&kernel).0);
    let passes = up_div(rows, widest);
    let pass_rows = up(up_div(rows, passes), 4);
    let grid = up_div(n, passes * pass_rows);
    let launch = Launch { shared_bytes: few_shared_bytes(kernel, k), ..launch(kernel, grid, 1) };
    Some(MmPlan {
        splits: 1,
        shared_tiles: 0,
        tile_tokens: 0,
        token_bytes: 0,
        partial_bytes: 0,
        arrivals: 0,
        passes: passes as u32,
        pass_rows: pass_rows as u32,
        launches: MmLaunches::Few(launch),
    })
}

fn tiles(kernel: Kernel<MmMxfp8Params>, m: i64, n: i64) -> i64 {
    let (rows, tokens) = tile(&kernel);
    up_div(n, i64::from(rows)) * up_div(m, i64::from(tokens))
}

fn launch<P>(kernel: Kernel<P>, grid: i64, cluster: u32) -> Launch<P> {
    Launch {
        kernel,
        grid: grid as u32,
        block: kernel.threads(),
        cluster,
        shared_bytes: kernel.least_shared_bytes().unwrap_or(0),
    }
}

/// CTAs that run at once on an H200 of 132 multiprocessors, in clusters of 1 to 8 (cudaOccupancyMaxActiveClusters).
const CLUSTERED: [i64; 8] = [132, 132, 117, 120, 110, 102, 105, 120];

/// The way in which CTAs share the wide kernel's tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharing {
    /// CTAs share no tile: each CTA has whole tiles.
    Whole,
    /// The tiles that would not fill the GPU are cut into equal runs of K for all CTAs.
    Runs,
    /// A cluster of this many CTAs shares a tile.
    Cluster(i64),
}

/// Time of a tile for a K block, in tens of ns. The constants below add the time of each wave of tiles, of each part of a cluster's K, of
/// runs, and of sums that another CTA has for 16384 numbers (H200, docs/kernels/mm_mxfp8_sm90.md). The plan that these costs give was
/// within 2.4 % of the fastest in 50 of 51 sizes, and 5 % behind in the other one.
fn block_cost(kernel: Kernel<MmMxfp8Params>) -> i64 {
    match tile(&kernel) {
        (128, 64) => 81,
        (192, 64 | 96) => 103,
        (128, 128) => 82,
        (192, 128) => 111,
        (192, 192) => 155,
        _ => 147,
    }
}
const WAVE_COST: i64 = 144;
const PART_COST: i64 = 115;
const RUN_COST: i64 = 591;
const SUMS_COST: i64 = 86;
/// The fewest blocks that are worth a CTA of their own.
const LEAST_BLOCKS: i64 = 4;

fn up_div(a: i64, b: i64) -> i64 {
    (a + b - 1) / b
}

/// (CTAs that cut the first tiles into runs, number of those tiles). Those are all tiles except whole waves, and the last whole wave is
/// cut, too.
fn runs(tiles: i64, blocks: i64, ctas: i64) -> (i64, i64) {
    let grid = ctas.min(tiles * (blocks / LEAST_BLOCKS).max(1));
    (grid, tiles - (tiles / grid - 1).max(0) * grid)
}

fn cost(kernel: Kernel<MmMxfp8Params>, sharing: Sharing, tiles: i64, blocks: i64, ctas: i64) -> i64 {
    let of_block = block_cost(kernel);
    match sharing {
        Sharing::Whole => up_div(tiles, ctas) * (blocks * of_block + WAVE_COST),
        Sharing::Runs => {
            let (rows, tokens) = tile(&kernel);
            let others = up_div(ctas, tiles) * i64::from(rows * tokens);
            tiles * blocks * of_block / ctas + WAVE_COST * (tiles / ctas).max(1) + RUN_COST + others * SUMS_COST / 16384
        }
        Sharing::Cluster(parts) => up_div(blocks, parts) * of_block + WAVE_COST + parts * PART_COST,
    }
}

/// The plan with the tile and the sharing that should take the least time. All parts of a cluster's K run at once.
fn wide(m: i64, n: i64, k: i64, device: &Device) -> MmPlan {
    let blocks = up_div(k, BLOCK_K).max(1);
    let ctas = i64::from(device.multiprocessors);
    let fits = |tiles: i64, parts: i64| {
        blocks / parts >= LEAST_BLOCKS && tiles * parts <= ctas * CLUSTERED[parts as usize - 1] / CLUSTERED[0]
    };
    let (_, kernel, sharing) = WIDE
        .into_iter()
        .flat_map(|kernel| {
            let tiles = tiles(kernel, m, n);
            let clusters = (2..=8).filter(move |&parts| fits(tiles, parts)).map(Sharing::Cluster);
            [Sharing::Whole, Sharing::Runs]
                .into_iter()
                .chain(clusters)
                .map(move |sharing| (cost(kernel, sharing, tiles, blocks, ctas), kernel, sharing))
        })
        .min_by_key(|&(cost, ..)| cost)
        .expect("there are tiles");
    let tiles = tiles(kernel, m, n);
    let (grid, splits, shared_tiles) = match sharing {
        Sharing::Whole => (tiles.min(ctas), 1, 0),
        Sharing::Runs => {
            let (grid, shared) = runs(tiles, blocks, ctas);
            (grid, 1, shared)
        }
        Sharing::Cluster(parts) => (tiles * parts, parts, 0),
    };
    let (rows, tokens) = tile(&kernel);
    let sharing_ctas = if shared_tiles > 0 { grid } else { 0 };
    let token_bytes = up_div(m, i64::from(tokens)) * i64::from(tokens) * blocks * BLOCK_K * 2;
    let units = up_div(token_bytes / 16, 256);
    MmPlan {
        splits: splits as u32,
        shared_tiles: shared_tiles as u32,
        tile_tokens: tokens,
        token_bytes,
        partial_bytes: sharing_ctas * i64::from(rows * tokens) * 4,
        arrivals: sharing_ctas as u32 * (rows / 64),
        passes: 0,
        pass_rows: 0,
        launches: MmLaunches::Wide([
            launch(MM_MXFP8_TOKENS.kernel(), units.min(16 * ctas), 1),
            launch(kernel, grid, splits as u32),
        ]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Arch;

    /// n and k of models.
    const NAMED: [(i64, i64); 6] =
        [(7168, 16384), (4096, 7168), (18432, 7168), (2112, 7168), (24576, 1536), (7168, 2304)];
    /// Numbers of tokens that choose every kernel for few tokens.
    const FEW_TOKENS: [i64; 6] = [1, 8, 9, 16, 17, 32];

    /// (rows of a pass and stages of the kernel, passes of a CTA and rows of b in each).
    fn few_kernel(plan: &MmPlan) -> Option<(u32, u32, u32, u32)> {
        match plan.launches {
            MmLaunches::Few(Launch { kernel, .. }) => {
                Some((tile(&kernel).0, kernel.stages, plan.passes, plan.pass_rows))
            }
            MmLaunches::Wide(_) => None,
        }
    }

    #[test]
    fn every_kernel_is_chosen() {
        let device = Device::typical(Arch::SM90);
        let sizes = NAMED.into_iter().chain([(18432, 20480)]);
        let plans =
            sizes.flat_map(|(n, k)| [1, 16, 20, 40, 64, 65, 200, 1024, 5000].map(|m| MmPlan::new(m, n, k, &device)));
        let chosen: std::collections::HashSet<_> =
            plans.flat_map(|plan| plan.launches().map(|launch| launch.variant).collect::<Vec<_>>()).collect();
        let table = crate::variants::dense::all();
        assert_eq!(chosen, table.into_iter().collect());
    }

    /// The launches that were fastest on an H200; see docs/measured_kernels.md.
    #[test]
    fn ctas_of_models_sizes() {
        let device = Device::typical(Arch::SM90);
        for (m, ctas, kernels) in [
            (
                8,
                [256, 128, 256, 132, 256, 256],
                [(32, 4, 1, 28), (32, 8, 1, 32), (32, 4, 3, 24), (16, 8, 1, 16), (32, 4, 3, 32), (32, 4, 1, 28)],
            ),
            (
                16,
                [128, 128, 256, 132, 256, 256],
                [(64, 3, 1, 56), (32, 5, 1, 32), (32, 3, 3, 24), (16, 5, 1, 16), (32, 3, 3, 32), (32, 3, 1, 28)],
            ),
            (
                32,
                [128, 128, 128, 132, 128, 128],
                [(64, 2, 1, 56), (32, 4, 1, 32), (64, 3, 3, 48), (16, 3, 1, 16), (64, 3, 3, 64), (64, 3, 1, 56)],
            ),
        ] {
            let plans = NAMED.map(|(n, k)| MmPlan::new(m, n, k, &device));
            let grids = plans.clone().map(|plan| plan.launches().next().expect("one launch").grid);
            assert_eq!((grids, plans.map(|plan| few_kernel(&plan).expect("few tokens"))), (ctas, kernels), "{m}");
        }
    }

    /// A row must be added up alike for 1 to 32 tokens, so K alone decides which family of kernels they take.
    #[test]
    fn k_decides_for_all_tokens_alike() {
        let device = Device::typical(Arch::SM90);
        for k in [0, 32, 96, 1536, 7168, 16384, 40960, 83968, 84000, 1 << 20] {
            for n in [1, 100, 2112, 7168, 1 << 20] {
                let families = FEW_TOKENS.map(|m| few(m, n, k, &device).is_some());
                assert_eq!(families, [k <= 83968; 6], "{n} x {k}");
            }
            assert!([33, 64].iter().all(|&m| few(m, 4096, k, &device).is_none()));
        }
        // The tiles and parts of K of the wide kernel are then the same as for one tile of tokens.
        let long = |m: i64| wide(m, 7168, 1 << 17, &device);
        assert!(FEW_TOKENS.into_iter().all(|m| long(m) == long(1)));
    }

    #[test]
    fn every_row_is_of_one_pass() {
        for multiprocessors in [78, 114, 132] {
            let device = Device { multiprocessors, ..Device::typical(Arch::SM90) };
            for n in [1, 3, 4, 33, 527, 2112, 2113, 4224, 4225, 8448, 8449, 16897, 129280, 1 << 23] {
                for k in [32, 7168, 16384, 30000 / 32 * 32, 60000 / 32 * 32, 83968] {
                    for m in FEW_TOKENS {
                        let plan = few(m, n, k, &device).expect("few tokens");
                        let (launch, rows) = (plan.launches().next().expect("one"), plan.passes * plan.pass_rows);
                        let (of_pass, ..) = few_kernel(&plan).expect("few tokens");
                        assert!(plan.pass_rows <= of_pass && plan.pass_rows.is_multiple_of(4) && rows > 0);
                        let (grid, rows) = (i64::from(launch.grid), i64::from(rows));
                        assert!((grid - 1) * rows < n && n <= grid * rows, "{n} x {k}, {m}: {plan:?}");
                        // All CTAs run at once.
                        let ctas = (device.shared_bytes + 1024) / (launch.shared_bytes + 1024);
                        assert!(grid <= i64::from(ctas.min(2) * multiprocessors), "{n} x {k}, {m}: {plan:?}");
                        assert!(launch.shared_bytes <= device.shared_bytes - STATIC_SHARED);
                        assert_eq!((launch.cluster, plan.splits, launch.block), (1, 1, 256));
                    }
                }
            }
        }
    }

    #[test]
    fn sums_have_room() {
        for kernel in WIDE {
            let (rows, tokens) = tile(&kernel);
            assert!(
                tokens * (rows + 4) * 4 <= kernel.least_shared_bytes().unwrap_or(0)
                    && kernel.least_shared_bytes().unwrap_or(0) <= 227 * 1024
            );
        }
    }
}
