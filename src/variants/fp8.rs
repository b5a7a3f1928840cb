//! Kernels of e4m3 with block scales.

use super::{any_name, gated_name, PortableForm, PortableTile, FP8_PORTABLE_TILES};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8 {
    /// wgmma + TMA, weights as A. `tokens`: largest token tile (wgmma N); 64 weight rows for each of `consumers` warpgroups.
    GroupedGemmFp8Sm90 {
        gated: bool,
        tokens: u32,
        consumers: u32,
        stages: u32,
    },
    /// The same for many tokens, which are A: 128 of them, and 256 weight rows.
    GroupedGemmFp8WideSm90 {
        gated: bool,
        stages: u32,
    },
    /// As the wide one, 192 tokens and 128 weight rows, gated 256, where rows of x lie in the order of places.
    GroupedGemmFp8OrderedSm90 {
        gated: bool,
        stages: u32,
    },
    /// GEMM2 of many tokens with few columns between the GEMMs: a tile's tokens stay while `blocks` x 128 weight rows pass by.
    GroupedGemmFp8StationarySm90 {
        blocks: u32,
    },
    /// A layer of few tokens in one launch, routing and quantisation inside. `experts`: most with a router logit. `plain`: as `Select`'s.
    RoutedLayerFp8Sm90 {
        gated: bool,
        experts: u32,
        ctas: u32,
        plain: bool,
    },
    /// mma.sync + cp.async, any GPU from sm_80.
    GroupedGemmFp8Portable {
        gated: bool,
        tokens: u32,
        rows: u32,
        warps: u32,
        stages: u32,
    },
    /// Rows to e4m3 with a scale for each group of columns.
    RowsToE4m3,
    /// The same of a schedule's rows.
    TilesToE4m3,
    /// Of rows that go to several places each.
    RowsToSlots,
    /// With one scale a row, which its groups get.
    WholeRowsToE4m3,
    /// The largest magnitude of all rows.
    PeakOfRows,
    /// Both of a schedule's rows.
    WholeRowsOfTiles,
    PeakOfTiles,
    /// A caller's scales in the order that GEMMs read.
    ExpandScales,
}
use Fp8::*;

/// By tokens. The first is for few work units, the last is the wide kernel's.
pub const FP8_TILES: [Fp8Tile; 4] = [
    Fp8Tile { tokens: 16, consumers: 1, stages: 7 },
    Fp8Tile { tokens: 16, consumers: 2, stages: 4 },
    Fp8Tile { tokens: 64, consumers: 2, stages: 8 },
    Fp8Tile { tokens: WIDE_TOKENS, consumers: 2, stages: 4 },
];
pub const WIDE_TOKENS: u32 = 128;
pub const WIDE_UNIT_ROWS: u32 = 256;
pub const ORDERED_TOKENS: u32 = 192;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Tile {
    pub tokens: u32,
    pub consumers: u32,
    pub stages: u32,
}

/// Blocks of 128 weight rows of the units that tokens stay for.
pub const FP8_STATIONARY_BLOCKS: [u32; 2] = [4, 16];

/// (most experts, CTAs on an SM) of the layers in one launch. One CTA has the deeper ring.
pub const FP8_LAYERS: [(u32, u32); 3] = [(128, 2), (256, 2), (256, 1)];

impl Fp8Tile {
    pub fn kernel(self, gated: bool) -> Fp8 {
        let Fp8Tile { tokens, consumers, stages } = self;
        if tokens == WIDE_TOKENS {
            GroupedGemmFp8WideSm90 { gated, stages }
        } else {
            GroupedGemmFp8Sm90 { gated, tokens, consumers, stages }
        }
    }

    /// Whether its epilogue can: two consumers' staged outputs have room for those of a group.
    pub fn quantises(self) -> bool {
        self.consumers == 2
    }

    /// Weight rows of a work unit.
    pub fn unit_rows(self) -> u32 {
        if self.tokens == WIDE_TOKENS {
            WIDE_UNIT_ROWS
        } else {
            64 * self.consumers
        }
    }
}

pub fn all() -> Vec<Fp8> {
    let gemms = FP8_TILES.iter().flat_map(|tile| [true, false].map(|gated| tile.kernel(gated)));
    gemms
        .chain([true, false].into_iter().flat_map(layers))
        .chain([true, false].map(ordered))
        .chain(stationary())
        .chain(portable())
        .chain([
            RowsToE4m3,
            TilesToE4m3,
            RowsToSlots,
            WholeRowsToE4m3,
            PeakOfRows,
            WholeRowsOfTiles,
            PeakOfTiles,
            ExpandScales,
        ])
        .collect()
}

fn portable() -> impl Iterator<Item = Fp8> {
    let kernel = |tile: &PortableTile, gated| {
        let PortableTile { tokens, rows, warps, stages, .. } = *tile;
        GroupedGemmFp8Portable { gated, tokens, rows, warps, stages }
    };
    FP8_PORTABLE_TILES.iter().flat_map(move |tile| [true, false].map(|gated| kernel(tile, gated)))
}

/// Gated, the sums of gate rows leave less room for stages.
pub fn ordered(gated: bool) -> Fp8 {
    GroupedGemmFp8OrderedSm90 { gated, stages: if gated { 3 } else { 5 } }
}

pub fn stationary() -> impl Iterator<Item = Fp8> {
    FP8_STATIONARY_BLOCKS.into_iter().map(|blocks| GroupedGemmFp8StationarySm90 { blocks })
}

/// Routers with bias or groups have gated layers.
pub fn layers(gated: bool) -> impl Iterator<Item = Fp8> {
    let kernels = FP8_LAYERS
        .into_iter()
        .flat_map(move |(experts, ctas)| [true, false].map(|plain| RoutedLayerFp8Sm90 { gated, experts, ctas, plain }));
    kernels.filter(move |kernel| gated || matches!(kernel, RoutedLayerFp8Sm90 { plain: true, .. }))
}

impl Fp8 {
    pub fn symbol(&self) -> String {
        match *self {
            GroupedGemmFp8Sm90 { gated, tokens, consumers, stages } => {
                format!("grouped_gemm_fp8_sm90_{}_t{tokens}_c{consumers}_s{stages}", gated_name(gated))
            }
            GroupedGemmFp8WideSm90 { gated, stages } => {
                format!("grouped_gemm_fp8_wide_sm90_{}_s{stages}", gated_name(gated))
            }
            GroupedGemmFp8OrderedSm90 { gated, stages } => {
                format!("grouped_gemm_fp8_ordered_sm90_{}_s{stages}", gated_name(gated))
            }
            GroupedGemmFp8StationarySm90 { blocks } => format!("grouped_gemm_fp8_stationary_sm90_b{blocks}"),
            RoutedLayerFp8Sm90 { gated, experts, ctas, plain } => {
                format!("routed_layer_fp8_sm90_{}_e{experts}_x{ctas}{}", gated_name(gated), any_name(plain))
            }
            GroupedGemmFp8Portable { gated, tokens, rows, warps, stages } => {
                format!("grouped_gemm_fp8_portable_{}_t{tokens}_r{rows}_w{warps}_s{stages}", gated_name(gated))
            }
            RowsToE4m3 => "quantize_fp8".into(),
            TilesToE4m3 => "quantize_fp8_tiles".into(),
            RowsToSlots => "quantize_fp8_slots".into(),
            WholeRowsToE4m3 => "quantize_fp8_rows".into(),
            PeakOfRows => "quantize_fp8_peak".into(),
            WholeRowsOfTiles => "quantize_fp8_tile_rows".into(),
            PeakOfTiles => "quantize_fp8_tile_peak".into(),
            ExpandScales => "expand_scales".into(),
        }
    }

    pub fn device_type(&self) -> String {
        match *self {
            GroupedGemmFp8Sm90 { gated, tokens, consumers, stages } => {
                format!("oxmoe::GroupedGemmFp8Sm90<{gated}, {tokens}, {consumers}, {stages}>")
            }
            GroupedGemmFp8WideSm90 { gated, stages } => format!("oxmoe::GroupedGemmFp8WideSm90<{gated}, {stages}>"),
            GroupedGemmFp8OrderedSm90 { gated, stages } => {
                format!("oxmoe::GroupedGemmFp8OrderedSm90<{gated}, {stages}>")
            }
            GroupedGemmFp8StationarySm90 { blocks } => format!("oxmoe::GroupedGemmFp8StationarySm90<{blocks}>"),
            RoutedLayerFp8Sm90 { gated, experts, ctas, plain } => {
                format!("oxmoe::RoutedLayerFp8Sm90<{gated}, {experts}, {ctas}, {plain}>")
            }
            GroupedGemmFp8Portable { gated, tokens, rows, warps, stages } => {
                format!("oxmoe::GroupedGemmFp8Portable<{gated}, {tokens}, {rows}, {warps}, {stages}>")
            }
            RowsToE4m3 => "oxmoe::QuantizeFp8".into(),
            TilesToE4m3 => "oxmoe::QuantizeFp8Tiles".into(),
            RowsToSlots => "oxmoe::QuantizeFp8Slots".into(),
            WholeRowsToE4m3 => "oxmoe::QuantizeFp8Rows".into(),
            PeakOfRows => "oxmoe::QuantizeFp8Peak".into(),
            WholeRowsOfTiles => "oxmoe::QuantizeFp8TileRows".into(),
            PeakOfTiles => "oxmoe::QuantizeFp8TilePeak".into(),
            ExpandScales => "oxmoe::ExpandScales".into(),
        }
    }

    pub fn header(&self) -> &'static str {
        match self {
            GroupedGemmFp8Sm90 { .. } => "moe/grouped_gemm_fp8_sm90.cuh",
            GroupedGemmFp8WideSm90 { .. } => "moe/grouped_gemm_fp8_wide_sm90.cuh",
            GroupedGemmFp8OrderedSm90 { .. } => "moe/grouped_gemm_fp8_ordered_sm90.cuh",
            GroupedGemmFp8StationarySm90 { .. } => "moe/grouped_gemm_fp8_stationary_sm90.cuh",
            RoutedLayerFp8Sm90 { .. } => "moe/routed_layer_fp8_sm90.cuh",
            GroupedGemmFp8Portable { .. } => "moe/grouped_gemm_fp8_portable.cuh",
            RowsToE4m3 => "quant/quantize_fp8.cuh",
            TilesToE4m3 => "quant/quantize_fp8.cuh",
            RowsToSlots => "quant/quantize_fp8_slots.cuh",
            WholeRowsToE4m3 | PeakOfRows => "quant/quantize_fp8_rows.cuh",
            WholeRowsOfTiles | PeakOfTiles => "quant/quantize_fp8_rows.cuh",
            ExpandScales => "quant/expand_scales.cuh",
        }
    }

    pub fn signature(&self) -> (&'static str, &'static str) {
        match self {
            RowsToE4m3 | TilesToE4m3 | RowsToSlots | WholeRowsToE4m3 | PeakOfRows | WholeRowsOfTiles | PeakOfTiles => {
                ("const __grid_constant__ oxmoe::QuantizeFp8Params p", "p")
            }
            ExpandScales => ("const __grid_constant__ oxmoe::ExpandScalesParams p", "p"),
            GroupedGemmFp8Portable { .. } => ("const __grid_constant__ oxmoe::GroupedGemmParams p", "p"),
            GroupedGemmFp8OrderedSm90 { .. } => (
                "const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap tokens, const __grid_constant__ oxmoe::OrderedGemmParams p",
                "weights, tokens, p",
            ),
            RoutedLayerFp8Sm90 { .. } => (
                "const __grid_constant__ CUtensorMap up_weights, const __grid_constant__ CUtensorMap down_weights, const __grid_constant__ oxmoe::RoutedLayerParams p",
                "up_weights, down_weights, p",
            ),
            _ => (
                "const __grid_constant__ CUtensorMap weights, const __grid_constant__ oxmoe::GroupedGemmParams p",
                "weights, p",
            ),
        }
    }

    pub fn runs_on(&self, arch: &str) -> bool {
        let sm90 = matches!(
            self,
            GroupedGemmFp8Sm90 { .. }
                | GroupedGemmFp8WideSm90 { .. }
                | GroupedGemmFp8OrderedSm90 { .. }
                | GroupedGemmFp8StationarySm90 { .. }
                | RoutedLayerFp8Sm90 { .. }
                | RowsToSlots
        );
        !sm90 || arch == "90a"
    }

    fn portable_tile(&self) -> Option<PortableTile> {
        match *self {
            GroupedGemmFp8Portable { tokens, rows, warps, stages, .. } => {
                Some(PortableTile { form: PortableForm::Fp8, tokens, rows, warps, stages, vector: 8 })
            }
            _ => None,
        }
    }

    pub fn threads(&self) -> u32 {
        match *self {
            GroupedGemmFp8Sm90 { consumers, .. } => 128 * (1 + consumers),
            GroupedGemmFp8WideSm90 { .. } | GroupedGemmFp8StationarySm90 { .. } => 384,
            GroupedGemmFp8OrderedSm90 { .. } => 512,
            GroupedGemmFp8Portable { warps, .. } => 32 * warps,
            RoutedLayerFp8Sm90 { .. } | ExpandScales => 256,
            RowsToE4m3 | TilesToE4m3 | RowsToSlots | WholeRowsToE4m3 | PeakOfRows | WholeRowsOfTiles | PeakOfTiles => {
                256
            }
        }
    }

    /// Bytes of `Shared`: stages with scales, staged outputs (two chunks a consumer), row offsets and work units (two of each), barriers.
    pub fn shared_bytes(&self) -> u32 {
        let rest = |tokens, stages| 2 * tokens * 4 + 2 * 16 + 8 * (2 * stages + 5);
        // Two barriers where units are announced.
        let announced = |tokens, stages| rest(tokens, stages) + 2 * 8;
        let bytes = match *self {
            GroupedGemmFp8Sm90 { gated, tokens, consumers, stages } => {
                let stage = tokens * 128 + consumers * 8192 + tokens * 4 + consumers * 8;
                let chunk = if gated { tokens.min(64) * 64 } else { tokens.min(32) * 128 };
                stages * stage + 2 * consumers * chunk + announced(tokens, stages)
            }
            // Two scales of each token in a stage.
            GroupedGemmFp8WideSm90 { stages, .. } => {
                stages * ((128 + 256) * 128 + WIDE_TOKENS * 2 * 4) + announced(WIDE_TOKENS, stages)
            }
            // A scale of each token in a stage; gated, the sums of 128 gate rows.
            GroupedGemmFp8OrderedSm90 { gated, stages } => {
                let stage = (ORDERED_TOKENS + 128) * 128 + ORDERED_TOKENS * 4;
                stages * stage + if gated { ORDERED_TOKENS * 128 * 4 } else { 512 } + announced(ORDERED_TOKENS, stages)
            }
            // A ring of 8 K blocks of tokens and one of 6 of weights.
            GroupedGemmFp8StationarySm90 { .. } => (8 + 6) * 128 * 128 + rest(WIDE_TOKENS, 8 + 6),
            // All that its CTAs can have.
            RoutedLayerFp8Sm90 { ctas, .. } => 228 * 1024 / ctas - 1024,
            GroupedGemmFp8Portable { .. } => self.portable_tile().map_or(0, PortableTile::shared_bytes),
            RowsToE4m3 | TilesToE4m3 | RowsToSlots | WholeRowsToE4m3 | PeakOfRows | ExpandScales => 0,
            WholeRowsOfTiles | PeakOfTiles => 0,
        };
        bytes.next_multiple_of(128)
    }

    /// CTAs on one SM: 228 KB, 1 KB of it the system's for each CTA, and 65536 registers.
    pub fn ctas(&self) -> u32 {
        match *self {
            GroupedGemmFp8Sm90 { tokens, .. } => {
                let by_registers = if tokens > 32 { 512 } else { 1152 } / self.threads();
                (228 * 1024 / (self.shared_bytes() + 1024)).min(by_registers)
            }
            GroupedGemmFp8WideSm90 { .. } | GroupedGemmFp8OrderedSm90 { .. } | GroupedGemmFp8StationarySm90 { .. } => 1,
            RoutedLayerFp8Sm90 { ctas, .. } => ctas,
            GroupedGemmFp8Portable { .. } => self.portable_tile().map_or(1, PortableTile::ctas),
            RowsToE4m3 | TilesToE4m3 | RowsToSlots | WholeRowsToE4m3 | PeakOfRows | ExpandScales => 6,
            WholeRowsOfTiles | PeakOfTiles => 6,
        }
    }
}
