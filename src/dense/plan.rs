//! Which kernel multiplies, on how many CTAs: a function of the shape and the device.

use crate::device::Device;
use crate::kernel::Launch;
use crate::variants::dense::{Dense, FEW, FEW_64, NARROW, WIDE};
use crate::variants::{Variant, ROUTING_STATIC_SHARED};

/// K that CTAs take at a time.
const BLOCK_K: i64 = 128;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MmPlan {
    /// CTAs of a cluster, which share K.
    pub splits: u32,
    /// Of the wide kernel, and the bytes of its tokens; else 0.
    pub tile_tokens: u32,
    pub token_bytes: i64,
    launches: [Option<Launch>; 2],
}

impl MmPlan {
    pub fn new(m: i64, n: i64, k: i64, device: &Device) -> MmPlan {
        if let Some(launch) = few(m, n, k, device) {
            return MmPlan { splits: 1, tile_tokens: 0, token_bytes: 0, launches: [Some(launch), None] };
        }
        match NARROW.into_iter().find(|kernel| m <= i64::from(kernel.tile().1)) {
            Some(kernel) => {
                let splits = narrow_splits(n, k, device);
                MmPlan { splits, tile_tokens: 0, token_bytes: 0, launches: [Some(gemm(kernel, m, n, splits)), None] }
            }
            None => wide(m, n, k, device),
        }
    }

    pub fn launches(&self) -> impl Iterator<Item = &Launch> {
        self.launches.iter().flatten()
    }
}

/// Few tokens with scales on the sums; up to 32 of them where K's scales have room: as deep a ring as lets all CTAs run at once, or the shallowest.
fn few(m: i64, n: i64, k: i64, device: &Device) -> Option<Launch> {
    let most = device.shared_bytes - ROUTING_STATIC_SHARED;
    let shared = |kernel: Dense| kernel.shared_bytes() + kernel.scale_bytes(k as u32);
    // For every number of tokens or for none, so that a row's sums do not depend on it.
    if !device.experimental || shared(FEW[FEW.len() - 1]) > most {
        return None;
    }
    if (33..=64).contains(&m) {
        // One CTA for a multiprocessor, and not for less than half of them: its time is that of its instructions.
        let (ctas, all) = (tiles(FEW_64, m, n), i64::from(device.multiprocessors));
        let fits = shared(FEW_64) <= most && (all / 2 + 1..=all).contains(&ctas);
        return fits.then(|| Launch { shared_bytes: shared(FEW_64), ..gemm(FEW_64, m, n, 1) });
    }
    let tokens = FEW.into_iter().map(|kernel| kernel.tile().1).find(|&tokens| m <= i64::from(tokens))?;
    let mut fitting = FEW.into_iter().filter(|&kernel| kernel.tile().1 == tokens && shared(kernel) <= most).peekable();
    let at_once = |kernel: Dense| {
        let ctas = ((device.shared_bytes + 1024) / (shared(kernel) + 1024)).min(kernel.ctas());
        tiles(kernel, m, n) <= i64::from(device.multiprocessors * ctas)
    };
    while let Some(kernel) = fitting.next() {
        if at_once(kernel) || fitting.peek().is_none() {
            return Some(Launch { shared_bytes: shared(kernel), ..gemm(kernel, m, n, 1) });
        }
    }
    None
}

fn tiles(kernel: Dense, m: i64, n: i64) -> i64 {
    let (rows, tokens) = kernel.tile();
    ((n + i64::from(rows) - 1) / i64::from(rows)) * ((m + i64::from(tokens) - 1) / i64::from(tokens))
}

fn gemm(kernel: Dense, m: i64, n: i64, splits: u32) -> Launch {
    let variant = Variant::Dense(kernel);
    Launch {
        variant,
        grid: tiles(kernel, m, n) as u32 * splits,
        block: kernel.threads(),
        cluster: splits,
        shared_bytes: kernel.shared_bytes(),
    }
}

/// The parts of K: as few as leave hardly a multiprocessor without a CTA, and two where K is long and CTAs are fewer than two for each. The number of tokens does not count, so that a row's sums do not
/// depend on those beside it.
fn narrow_splits(n: i64, k: i64, device: &Device) -> u32 {
    let kernel = NARROW[0];
    let blocks = (k + BLOCK_K - 1) / BLOCK_K;
    let wanted = i64::from(device.multiprocessors) * 9 / 10;
    let mut splits = 1;
    while splits < 8 && tiles(kernel, 1, n) * splits < wanted && blocks / (2 * splits) >= 8 {
        splits *= 2;
    }
    if splits == 1 && tiles(kernel, 1, n) < 2 * i64::from(device.multiprocessors) && blocks >= 128 {
        splits = 2;
    }
    splits as u32
}

/// The tile and the parts of K that take least by what an H200 took: tiles read and decode more for what they multiply the smaller they
/// are, and clusters of four do not fill all of a GPU.
fn wide(m: i64, n: i64, k: i64, device: &Device) -> MmPlan {
    let blocks = (k + BLOCK_K - 1) / BLOCK_K;
    let ctas = i64::from(device.multiprocessors);
    let mut best: Option<(i64, Dense, i64)> = None;
    for kernel in WIDE {
        let (rows, tokens) = kernel.tile();
        for splits in [1, 2, 4] {
            let room = if splits == 4 { ctas * 6 / 7 } else { ctas };
            if splits > 1 && (blocks / splits < 8 || tiles(kernel, m, n) * splits > room) {
                break;
            }
            let waves = (tiles(kernel, m, n) * splits + ctas - 1) / ctas;
            // A wave's blocks, and about eight more for its beginning and end.
            let cost = waves * ((blocks + splits - 1) / splits + 8) * i64::from((rows + 64) * (tokens + 32));
            if best.as_ref().is_none_or(|&(least, ..)| cost < least) {
                best = Some((cost, kernel, splits));
            }
        }
    }
    let (_, kernel, splits) = best.unwrap_or((0, WIDE[0], 1));
    let tokens = i64::from(kernel.tile().1);
    let token_bytes = (m + tokens - 1) / tokens * tokens * blocks * BLOCK_K * 2;
    let variant = Variant::Dense(Dense::MmMxfp8Tokens);
    let units = (token_bytes / 16 + 255) / 256;
    let prepare =
        Launch { variant, grid: units.min(16 * ctas) as u32, block: variant.threads(), cluster: 1, shared_bytes: 0 };
    MmPlan {
        splits: splits as u32,
        tile_tokens: tokens as u32,
        token_bytes,
        launches: [Some(prepare), Some(gemm(kernel, m, n, splits as u32))],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Arch;

    #[test]
    fn few_tokens_do_not_change_the_order_of_sums() {
        let device = Device::typical(Arch::SM90);
        for (n, k) in [(7168, 16384), (4096, 7168), (2112, 7168), (24576, 1536), (128, 128), (1, 32)] {
            let splits: Vec<u32> = [1, 8, 9, 32].map(|m| MmPlan::new(m, n, k, &device).splits).to_vec();
            assert!(splits.iter().all(|&s| s == splits[0] && s.is_power_of_two() && s <= 8), "{n} {k} {splits:?}");
        }
    }

    const NAMED: [(i64, i64); 4] = [(7168, 16384), (4096, 7168), (2112, 7168), (24576, 1536)];

    fn chosen(device: &Device) -> std::collections::HashSet<Variant> {
        let plans = [1, 16, 20, 40, 64, 65, 200, 1024, 5000]
            .into_iter()
            .flat_map(|m| NAMED.map(|(n, k)| MmPlan::new(m, n, k, device)));
        plans.flat_map(|plan| plan.launches().map(|launch| launch.variant).collect::<Vec<_>>()).collect()
    }

    #[test]
    fn every_kernel_is_chosen() {
        let device = Device::typical(Arch::SM90);
        let all = |kernels: &[Dense]| kernels.iter().map(|&kernel| Variant::Dense(kernel)).collect();
        let measured = chosen(&device);
        assert_eq!(measured, all(&[&NARROW[..], &WIDE, &[Dense::MmMxfp8Tokens]].concat()));
        let experimental = chosen(&Device { experimental: true, ..device });
        assert_eq!(experimental, all(&[&FEW[..], &[FEW_64], &WIDE, &[Dense::MmMxfp8Tokens]].concat()));
    }

    /// A row must be added up alike by all kernels for few tokens, so K decides which family they are of.
    #[test]
    fn scales_decide_for_all_tokens_alike() {
        let device = Device { experimental: true, ..Device::typical(Arch::SM90) };
        for k in [32, 96, 1536, 7168, 16384, 40960, 60928, 60960, 1 << 20] {
            let families = [1, 8, 9, 16, 17, 32].map(|m| {
                let plan = MmPlan::new(m, 7168, k, &device);
                let launch = *plan.launches().next().expect("one launch");
                assert!(launch.shared_bytes <= device.shared_bytes && plan.launches().count() == 1);
                assert_eq!(launch.cluster, plan.splits);
                matches!(launch.variant, Variant::Dense(Dense::MmMxfp8Few { .. }))
            });
            assert_eq!(families, [k <= 60928; 6], "{k}");
        }
    }

    #[test]
    fn rings_are_deep_where_multiprocessors_have_few_ctas() {
        let device = Device { experimental: true, ..Device::typical(Arch::SM90) };
        let stages = |m: i64, n: i64, k: i64| match MmPlan::new(m, n, k, &device).launches().next().map(|l| l.variant) {
            Some(Variant::Dense(Dense::MmMxfp8Few { stages, .. })) => stages,
            other => panic!("{other:?}"),
        };
        assert_eq!(NAMED.map(|(n, k)| stages(1, n, k)), [3, 8, 8, 3]);
        assert_eq!(NAMED.map(|(n, k)| stages(16, n, k)), [3, 6, 6, 3]);
        assert_eq!(NAMED.map(|(n, k)| stages(32, n, k)), [3, 5, 5, 3]);
    }

    #[test]
    fn sums_have_room() {
        for kernel in NARROW.into_iter().chain(FEW).chain([FEW_64]).chain(WIDE) {
            let (rows, tokens) = kernel.tile();
            assert!(tokens * (rows + 4) * 4 <= kernel.shared_bytes() && kernel.shared_bytes() <= 227 * 1024);
        }
    }
}
