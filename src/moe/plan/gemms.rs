//! The launches of both GEMMs of a layer. The sets of kernels are a table; the first set that serves a layer on a device runs it. Which set
//! serves depends on the weights, never on the batch: a row's bits must not depend on the batch around it.

use super::kernels::{GemmLaunches, Gemms, KernelSet};
use super::steps::RoundLaunch;
use super::{fp8_sm90, packed_sm90, portable, rounding, sm90, Overlap};
use crate::desc::LayerDesc;
use crate::device::Device;

static SETS: [KernelSet; 4] = [packed_sm90::KERNELS, fp8_sm90::KERNELS, sm90::KERNELS, portable::KERNELS];

/// The set that runs a layer. The last set serves all layers.
pub fn set_of(device: &Device, layer: &LayerDesc) -> &'static KernelSet {
    let serving = SETS.iter().find(|set| (set.serves)(device, layer));
    serving.unwrap_or(&SETS[SETS.len() - 1])
}

/// The launches of both GEMMs, and the launches that round their rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmsPlan {
    /// Most tokens of a tile of the schedule.
    pub tile_tokens: i32,
    /// Most tokens of a tile of GEMM2's own schedule, if it has one.
    pub down_tile_tokens: Option<i32>,
    /// The launches, up to two each, that round x before GEMM1, and GEMM1's output if GEMM1 does not round it itself.
    pub quantize: [[Option<RoundLaunch>; 2]; 2],
    /// GEMM1 and GEMM2.
    pub launches: GemmLaunches,
    /// The facts of GEMM1 that GEMM2 needs, if GEMM2 begins where GEMM1 ends.
    pub overlap: Option<Overlap>,
}

impl GemmsPlan {
    pub fn new(set: &KernelSet, gemms: &Gemms<'_>) -> GemmsPlan {
        let tile_tokens = (set.tile_tokens)(gemms);
        let inside = (set.rounds_inside)(gemms, tile_tokens);
        let launches = (set.launches)(gemms, tile_tokens);
        GemmsPlan {
            tile_tokens,
            down_tile_tokens: (set.down_tile_tokens)(gemms, tile_tokens),
            quantize: rounding::launches(gemms, tile_tokens, inside),
            launches,
            overlap: match launches {
                GemmLaunches::Apart([up, _]) => (set.overlap)(gemms, tile_tokens, up.any()),
                GemmLaunches::Together(_) => None,
            },
        }
    }
}
