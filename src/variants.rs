//! The table of kernel instantiations. `build.rs` includes this file and writes one stub per row; the host looks rows up by value.
//! No dependencies: it must compile inside the build script too.

// NOTE: with paths, since the build script has this file elsewhere in its tree.
#[path = "variants/allreduce.rs"]
pub mod allreduce;
#[path = "variants/dense.rs"]
pub mod dense;
#[path = "variants/fp8.rs"]
pub mod fp8;
#[path = "variants/layer.rs"]
mod layer;
#[path = "variants/mxfp4.rs"]
mod mxfp4;
#[path = "variants/mxfp8.rs"]
pub mod mxfp8;
#[path = "variants/nvfp4.rs"]
pub mod nvfp4;
#[path = "variants/portable.rs"]
mod portable;
#[path = "variants/sm90.rs"]
mod sm90;

pub use allreduce::AllReduce;
use dense::Dense;
use fp8::Fp8;
use layer::layer_shared_bytes;
#[allow(unused_imports)] // the build script needs but some of them
pub use layer::{INNER_COLUMNS, LAYER_TILE, ROUTED_TILE};
#[allow(unused_imports)] // as above
pub use mxfp4::{
    Mxfp4LayerTile, Mxfp4Sm90Tile, MXFP4_E4M3_SM90_TILES, MXFP4_LAYER_TILE, MXFP4_SM90_FOURS, MXFP4_SM90_TILES,
};
use mxfp8::Mxfp8;
use nvfp4::Nvfp4;
#[allow(unused_imports)] // as above
pub use portable::{
    PortableForm, PortableTile, FP8_PORTABLE_TILES, MXFP4_PORTABLE_TILES, MXFP8_PORTABLE_TILES, NVFP4_PORTABLE_TILES,
    PORTABLE_TILES,
};
use sm90::{sm90_ctas, sm90_shared_bytes};
#[allow(unused_imports)] // as above
pub use sm90::{Sm90Tile, SM90_TILES};

/// Element type of activations and weights in a kernel; F32 in all-reduces alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    F16,
    Bf16,
    F32,
}

/// One kernel instantiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    /// wgmma + TMA. `tokens`: largest token tile (wgmma N); `row_tiles` x 64 weight rows for each of `consumers` warpgroups.
    GroupedGemmSm90 {
        element: Element,
        gated: bool,
        tokens: u32,
        row_tiles: u32,
        consumers: u32,
        stages: u32,
    },
    /// Both GEMMs and the combine of a small batch, perhaps the routing, in one launch, from the same pieces: 64 weight rows a unit.
    LayerSm90 {
        element: Element,
        gated: bool,
        tokens: u32,
        stages: u32,
        routed: bool,
    },
    /// Packed MXFP4 weights and bf16 or `e4m3` activations: wgmma with A in registers; bf16 up to 32 tokens mma.sync. `blocks` of 64 K
    /// a stage.
    GroupedGemmMxfp4Sm90 {
        e4m3: bool,
        gated: bool,
        tokens: u32,
        consumers: u32,
        stages: u32,
        blocks: u32,
    },
    /// A layer of a token or two with packed MXFP4 weights, routing inside, in one launch.
    RoutedLayerMxfp4Sm90 {
        gated: bool,
        tile: Mxfp4LayerTile,
    },
    /// mma.sync + cp.async, any GPU from sm_80. `vector`: elements a load (8, or 1 when k % 8 != 0).
    GroupedGemmPortable {
        element: Element,
        gated: bool,
        tokens: u32,
        rows: u32,
        warps: u32,
        stages: u32,
        vector: u32,
    },
    /// The same for packed MXFP4 weights and bf16 activations. `vector`: elements a load of activations.
    GroupedGemmMxfp4Portable {
        gated: bool,
        tokens: u32,
        rows: u32,
        warps: u32,
        stages: u32,
        vector: u32,
    },
    /// Top-k alone. `experts_per_lane` x 32 >= experts. `plain`: without bias, groups and order by id, in a third of the code.
    Select {
        experts_per_lane: u32,
        plain: bool,
    },
    /// Top-k (or given ids), sort and schedule in one launch of one CTA or one cluster; `experts_per_lane` 0 (and plain): ids are given.
    Route {
        experts_per_lane: u32,
        plain: bool,
    },
    /// Slots per expert and block of tokens, then ...
    Histogram,
    /// ... sort and schedule, for token counts beyond one cluster. `chosen`: ids come from Select, else from the caller.
    Place {
        chosen: bool,
    },
    /// triton_kernels' block tables of a sorted batch.
    Ragged,
    /// The schedule of rows that lie expert by expert.
    Schedule,
    /// Weighted sum of a token's rows.
    Combine {
        element: Element,
    },
    /// Rows of bf16 to e4m3.
    QuantizeRowsE4m3,
    /// The same of a schedule's rows.
    QuantizeTilesE4m3,
    /// MXFP4 weights to the packed form, at load: every expert's shift, then codes and scales; and back.
    Mxfp4Peak,
    Mxfp4Pack,
    Mxfp4Unpack,
    /// E8M0 bytes of fp32 powers of two.
    Mxfp4ScaleBytes,
    /// MXFP4 codes or scales to another project's layout, or back to the checkpoint's form.
    Mxfp4Layout {
        scales: bool,
        back: bool,
    },
    /// Numbers to MXFP4 and back.
    Mxfp4Quantize,
    Mxfp4Dequantize,
    AllReduce(AllReduce),
    Fp8(Fp8),
    Mxfp8(Mxfp8),
    Nvfp4(Nvfp4),
    Dense(Dense),
}

/// Static shared memory that routing kernels may use beside their dynamic part, bytes (rounded up).
pub const ROUTING_STATIC_SHARED: u32 = 12 * 1024;

/// Sort and schedule of given ids in one launch.
pub const ROUTE_GIVEN: Variant = Variant::Route { experts_per_lane: 0, plain: true };

/// What converts MXFP4 weights, to the packed form and others.
pub const CONVERSIONS: [Variant; 10] = [
    Variant::Mxfp4Peak,
    Variant::Mxfp4Pack,
    Variant::Mxfp4Unpack,
    Variant::Mxfp4ScaleBytes,
    Variant::Mxfp4Layout { scales: false, back: false },
    Variant::Mxfp4Layout { scales: false, back: true },
    Variant::Mxfp4Layout { scales: true, back: false },
    Variant::Mxfp4Layout { scales: true, back: true },
    Variant::Mxfp4Quantize,
    Variant::Mxfp4Dequantize,
];

/// Blocks of 64 x 64 weights that a CTA of Mxfp4Pack takes.
pub const PACK_BLOCKS: u32 = 4;

/// Times eight numbers that a thread of Mxfp4Quantize and Mxfp4Dequantize takes.
pub const QUANTIZE_UNITS: u32 = 2;

const ELEMENTS: [Element; 2] = [Element::Bf16, Element::F16];

/// Every kernel in the wheel. A row that no plan chooses is removed (tests/plan.rs compares).
pub fn all() -> Vec<Variant> {
    let mut rows = Vec::new();
    for element in ELEMENTS {
        for gated in [true, false] {
            rows.extend(SM90_TILES.map(|t| t.variant(element, gated)));
            rows.extend([LAYER_TILE, ROUTED_TILE].map(|t| t.variant(element, gated)));
            rows.extend(PORTABLE_TILES.map(|t| t.variant(element, gated)));
        }
        rows.push(Variant::Combine { element });
    }
    for gated in [true, false] {
        rows.extend(MXFP4_SM90_TILES.map(|t| t.variant(gated)));
        rows.extend(MXFP4_SM90_FOURS.map(|t| t.variant(gated)));
        rows.extend(MXFP4_E4M3_SM90_TILES.map(|t| t.variant(gated)));
        rows.push(MXFP4_LAYER_TILE.variant(gated));
        rows.extend(MXFP4_PORTABLE_TILES.map(|t| t.variant(Element::Bf16, gated)));
    }
    for plain in [true, false] {
        rows.extend(EXPERTS_PER_LANE.map(|experts_per_lane| Variant::Select { experts_per_lane, plain }));
        rows.extend(EXPERTS_PER_LANE.map(|experts_per_lane| Variant::Route { experts_per_lane, plain }));
        rows.push(Variant::Place { chosen: plain });
    }
    rows.extend([ROUTE_GIVEN, Variant::Histogram, Variant::Ragged, Variant::Schedule]);
    rows.extend([Variant::QuantizeRowsE4m3, Variant::QuantizeTilesE4m3]);
    rows.extend(CONVERSIONS);
    rows.extend(allreduce::all().into_iter().map(Variant::AllReduce));
    rows.extend(fp8::all().into_iter().map(Variant::Fp8));
    rows.extend(mxfp8::all().into_iter().map(Variant::Mxfp8));
    rows.extend(nvfp4::all().into_iter().map(Variant::Nvfp4));
    rows.extend(dense::all().into_iter().map(Variant::Dense));
    rows
}

impl Element {
    fn device_type(self) -> &'static str {
        match self {
            Element::F16 => "__half",
            Element::Bf16 => "__nv_bfloat16",
            Element::F32 => "float",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Element::F16 => "f16",
            Element::Bf16 => "bf16",
            Element::F32 => "f32",
        }
    }
}

fn gated_name(gated: bool) -> &'static str {
    if gated {
        "gated"
    } else {
        "plain"
    }
}

fn any_name(plain: bool) -> &'static str {
    if plain {
        ""
    } else {
        "_any"
    }
}

impl Variant {
    /// The kernel's name in the image.
    pub fn symbol(&self) -> String {
        match *self {
            Variant::Fp8(kernel) => kernel.symbol(),
            Variant::Mxfp8(kernel) => kernel.symbol(),
            Variant::Nvfp4(kernel) => kernel.symbol(),
            Variant::Dense(kernel) => kernel.symbol(),
            Variant::GroupedGemmSm90 { element, gated, tokens, row_tiles, consumers, stages } => format!(
                "grouped_gemm_sm90_{}_{}_t{tokens}_r{row_tiles}_c{consumers}_s{stages}",
                element.name(),
                gated_name(gated)
            ),
            Variant::LayerSm90 { tokens, stages, .. } => format!("{}_t{tokens}_s{stages}", self.unit()),
            Variant::GroupedGemmMxfp4Sm90 { tokens, consumers, stages, blocks, .. } => {
                format!("{}_t{tokens}_c{consumers}_s{stages}_b{blocks}", self.unit())
            }
            Variant::RoutedLayerMxfp4Sm90 { .. } => self.unit(),
            Variant::QuantizeRowsE4m3 => "quantize_rows_e4m3".into(),
            Variant::QuantizeTilesE4m3 => "quantize_tiles_e4m3".into(),
            Variant::GroupedGemmPortable { element, gated, tokens, rows, warps, stages, vector } => format!(
                "grouped_gemm_portable_{}_{}_t{tokens}_r{rows}_w{warps}_s{stages}_v{vector}",
                element.name(),
                gated_name(gated)
            ),
            Variant::GroupedGemmMxfp4Portable { gated, tokens, rows, warps, stages, vector } => format!(
                "grouped_gemm_mxfp4_portable_{}_t{tokens}_r{rows}_w{warps}_s{stages}_v{vector}",
                gated_name(gated)
            ),
            Variant::Select { experts_per_lane, plain } => format!("select_e{experts_per_lane}{}", any_name(plain)),
            Variant::Route { experts_per_lane, plain } => format!("route_e{experts_per_lane}{}", any_name(plain)),
            Variant::Histogram => "histogram".into(),
            Variant::Place { chosen } => if chosen { "place_chosen" } else { "place_given" }.into(),
            Variant::Ragged => "ragged".into(),
            Variant::Schedule => "schedule".into(),
            Variant::Combine { element } => format!("combine_{}", element.name()),
            Variant::Mxfp4Peak => "mxfp4_peak".into(),
            Variant::Mxfp4Pack => "mxfp4_pack".into(),
            Variant::Mxfp4Unpack => "mxfp4_unpack".into(),
            Variant::Mxfp4ScaleBytes => "mxfp4_scale_bytes".into(),
            Variant::Mxfp4Quantize => "mxfp4_quantize".into(),
            Variant::Mxfp4Dequantize => "mxfp4_dequantize".into(),
            Variant::Mxfp4Layout { scales, back } => {
                let (what, back) = (if scales { "scales" } else { "codes" }, if back { "_back" } else { "" });
                format!("mxfp4_layout_{what}{back}")
            }
            Variant::AllReduce(kernel) => kernel.symbol(),
        }
    }

    /// The struct whose static `run` is the kernel's body.
    pub fn device_type(&self) -> String {
        match *self {
            Variant::Fp8(kernel) => kernel.device_type(),
            Variant::Mxfp8(kernel) => kernel.device_type(),
            Variant::Nvfp4(kernel) => kernel.device_type(),
            Variant::Dense(kernel) => kernel.device_type(),
            Variant::GroupedGemmSm90 { element, gated, tokens, row_tiles, consumers, stages } => format!(
                "oxmoe::GroupedGemmSm90<{}, {gated}, {tokens}, {row_tiles}, {consumers}, {stages}>",
                element.device_type()
            ),
            Variant::LayerSm90 { element, gated, tokens, stages, routed } => {
                let name = if routed { "RoutedLayerSm90" } else { "LayerSm90" };
                format!("oxmoe::{name}<{}, {gated}, {tokens}, {stages}>", element.device_type())
            }
            Variant::GroupedGemmMxfp4Sm90 { e4m3, gated, tokens, consumers, stages, blocks } => {
                let name = if e4m3 { "GroupedGemmMxfp4E4m3Sm90" } else { "GroupedGemmMxfp4Sm90" };
                format!("oxmoe::{name}<{gated}, {tokens}, {consumers}, {stages}, {blocks}>")
            }
            Variant::RoutedLayerMxfp4Sm90 { gated, tile } => {
                format!("oxmoe::RoutedLayerMxfp4Sm90<{gated}, {}, {}, {}>", tile.warps, tile.blocks, tile.stages)
            }
            Variant::QuantizeRowsE4m3 => "oxmoe::QuantizeRowsE4m3".into(),
            Variant::QuantizeTilesE4m3 => "oxmoe::QuantizeTilesE4m3".into(),
            Variant::GroupedGemmPortable { element, gated, tokens, rows, warps, stages, vector } => format!(
                "oxmoe::GroupedGemmPortable<{}, {gated}, {tokens}, {rows}, {warps}, {stages}, {vector}>",
                element.device_type()
            ),
            Variant::GroupedGemmMxfp4Portable { gated, tokens, rows, warps, stages, vector } => {
                format!("oxmoe::GroupedGemmMxfp4Portable<{gated}, {tokens}, {rows}, {warps}, {stages}, {vector}>")
            }
            Variant::Select { experts_per_lane, plain } => format!("oxmoe::Select<{experts_per_lane}, {plain}>"),
            Variant::Route { experts_per_lane, plain } => format!("oxmoe::Route<{experts_per_lane}, {plain}>"),
            Variant::Histogram => "oxmoe::Histogram".into(),
            Variant::Place { chosen } => format!("oxmoe::Place<{chosen}>"),
            Variant::Ragged => "oxmoe::Ragged".into(),
            Variant::Schedule => "oxmoe::Schedule".into(),
            Variant::Combine { element } => format!("oxmoe::Combine<{}>", element.device_type()),
            Variant::Mxfp4Peak => "oxmoe::Mxfp4Peak".into(),
            Variant::Mxfp4Pack => "oxmoe::Mxfp4Pack".into(),
            Variant::Mxfp4Unpack => "oxmoe::Mxfp4Unpack".into(),
            Variant::Mxfp4ScaleBytes => "oxmoe::Mxfp4ScaleBytes".into(),
            Variant::Mxfp4Quantize => "oxmoe::Mxfp4Quantize".into(),
            Variant::Mxfp4Dequantize => "oxmoe::Mxfp4Dequantize".into(),
            Variant::Mxfp4Layout { scales: false, back } => format!("oxmoe::Mxfp4LayoutCodes<{back}>"),
            Variant::Mxfp4Layout { scales: true, back } => format!("oxmoe::Mxfp4LayoutScales<{back}>"),
            Variant::AllReduce(kernel) => kernel.device_type(),
        }
    }

    /// The header under csrc/ that defines it.
    pub fn header(&self) -> &'static str {
        match self {
            Variant::Fp8(kernel) => kernel.header(),
            Variant::Mxfp8(kernel) => kernel.header(),
            Variant::Nvfp4(kernel) => kernel.header(),
            Variant::Dense(kernel) => kernel.header(),
            Variant::GroupedGemmSm90 { .. } => "moe/grouped_gemm_sm90.cuh",
            Variant::LayerSm90 { routed: false, .. } => "moe/layer_sm90.cuh",
            Variant::LayerSm90 { .. } => "moe/routed_layer_sm90.cuh",
            Variant::GroupedGemmMxfp4Sm90 { e4m3: true, .. } => "moe/grouped_gemm_mxfp4_e4m3_sm90.cuh",
            Variant::GroupedGemmMxfp4Sm90 { .. } => "moe/grouped_gemm_mxfp4_sm90.cuh",
            Variant::RoutedLayerMxfp4Sm90 { .. } => "moe/routed_layer_mxfp4_sm90.cuh",
            Variant::QuantizeRowsE4m3 => "quant/quantize_rows_e4m3.cuh",
            Variant::QuantizeTilesE4m3 => "quant/quantize_rows_e4m3.cuh",
            Variant::GroupedGemmPortable { .. } => "moe/grouped_gemm_portable.cuh",
            Variant::GroupedGemmMxfp4Portable { .. } => "moe/grouped_gemm_mxfp4_portable.cuh",
            Variant::Select { .. } => "moe/select.cuh",
            Variant::Route { .. } => "moe/route.cuh",
            Variant::Histogram | Variant::Place { .. } => "moe/place.cuh",
            Variant::Ragged => "moe/ragged.cuh",
            Variant::Schedule => "moe/schedule.cuh",
            Variant::Combine { .. } => "moe/combine.cuh",
            Variant::Mxfp4Peak | Variant::Mxfp4Pack | Variant::Mxfp4Unpack | Variant::Mxfp4ScaleBytes => {
                "quant/pack_mxfp4.cuh"
            }
            Variant::Mxfp4Layout { .. } => "quant/layouts_mxfp4.cuh",
            Variant::Mxfp4Quantize | Variant::Mxfp4Dequantize => "quant/quantize_mxfp4.cuh",
            Variant::AllReduce(kernel) => kernel.header(),
        }
    }

    /// (parameter list of the kernel, arguments of `run`).
    pub fn signature(&self) -> (&'static str, &'static str) {
        match self {
            Variant::Fp8(kernel) => kernel.signature(),
            Variant::Mxfp8(kernel) => kernel.signature(),
            Variant::Nvfp4(kernel) => kernel.signature(),
            Variant::Dense(kernel) => kernel.signature(),
            Variant::GroupedGemmSm90 { .. } => (
                "const __grid_constant__ CUtensorMap weights, const __grid_constant__ oxmoe::GroupedGemmParams p",
                "weights, p",
            ),
            Variant::LayerSm90 { routed: false, .. } => (
                "const __grid_constant__ CUtensorMap up_weights, const __grid_constant__ CUtensorMap down_weights, const __grid_constant__ oxmoe::LayerParams p",
                "up_weights, down_weights, p",
            ),
            Variant::LayerSm90 { .. } => (
                "const __grid_constant__ CUtensorMap up_weights, const __grid_constant__ CUtensorMap down_weights, const __grid_constant__ oxmoe::RoutedLayerParams p",
                "up_weights, down_weights, p",
            ),
            Variant::RoutedLayerMxfp4Sm90 { .. } => ("const __grid_constant__ oxmoe::RoutedLayerParams p", "p"),
            Variant::GroupedGemmMxfp4Sm90 { e4m3: false, .. } => {
                ("const __grid_constant__ oxmoe::GemmPairParams p", "p")
            }
            Variant::GroupedGemmPortable { .. }
            | Variant::GroupedGemmMxfp4Portable { .. }
            | Variant::GroupedGemmMxfp4Sm90 { .. } => {
                ("const __grid_constant__ oxmoe::GroupedGemmParams p", "p")
            }
            Variant::Select { .. } | Variant::Route { experts_per_lane: 1.., .. } => {
                ("const __grid_constant__ oxmoe::SelectParams s, const __grid_constant__ oxmoe::RouteParams p", "s, p")
            }
            Variant::Route { .. } | Variant::Histogram | Variant::Place { .. } => {
                ("const __grid_constant__ oxmoe::RouteParams p", "p")
            }
            Variant::Ragged => ("const __grid_constant__ oxmoe::RaggedParams p", "p"),
            Variant::Schedule => ("const __grid_constant__ oxmoe::ScheduleParams p", "p"),
            Variant::Combine { .. } => ("const __grid_constant__ oxmoe::CombineParams p", "p"),
            Variant::Mxfp4Peak | Variant::Mxfp4Pack | Variant::Mxfp4Unpack => {
                ("const __grid_constant__ oxmoe::PackMxfp4Params p", "p")
            }
            Variant::Mxfp4ScaleBytes => ("const __grid_constant__ oxmoe::ScaleBytesParams p", "p"),
            Variant::Mxfp4Layout { .. } => ("const __grid_constant__ oxmoe::LayoutMxfp4Params p", "p"),
            Variant::Mxfp4Quantize | Variant::Mxfp4Dequantize => {
                ("const __grid_constant__ oxmoe::QuantizeMxfp4Params p", "p")
            }
            Variant::QuantizeRowsE4m3 => ("const __grid_constant__ oxmoe::QuantizeRowsParams p", "p"),
            Variant::QuantizeTilesE4m3 => ("const __grid_constant__ oxmoe::TileRowsParams p", "p"),
            Variant::AllReduce(_) => ("const __grid_constant__ oxmoe::AllReduceParams p", "p"),
        }
    }

    /// Variants of one unit are compiled into one image.
    pub fn unit(&self) -> String {
        let header = self.header().rsplit('/').next().unwrap_or_default().trim_end_matches(".cuh");
        match *self {
            Variant::GroupedGemmSm90 { element, gated, .. }
            | Variant::LayerSm90 { element, gated, .. }
            | Variant::GroupedGemmPortable { element, gated, .. } => {
                format!("{header}_{}_{}", element.name(), gated_name(gated))
            }
            Variant::GroupedGemmMxfp4Sm90 { gated, .. }
            | Variant::RoutedLayerMxfp4Sm90 { gated, .. }
            | Variant::GroupedGemmMxfp4Portable { gated, .. } => {
                format!("{header}_{}", gated_name(gated))
            }
            Variant::AllReduce(kernel) => kernel.unit(),
            Variant::Mxfp8(kernel) => kernel.unit(),
            Variant::Nvfp4(kernel) => kernel.unit(),
            _ => header.into(),
        }
    }

    /// Whether it is compiled for an architecture as nvcc names it ("80", "90a", ...).
    pub fn runs_on(&self, arch: &str) -> bool {
        match self {
            Variant::Fp8(kernel) => kernel.runs_on(arch),
            Variant::Mxfp8(kernel) => kernel.runs_on(arch),
            Variant::Nvfp4(kernel) => kernel.runs_on(arch),
            Variant::Dense(kernel) => kernel.runs_on(arch),
            Variant::GroupedGemmSm90 { .. } | Variant::GroupedGemmMxfp4Sm90 { .. } => arch == "90a",
            Variant::LayerSm90 { .. } | Variant::RoutedLayerMxfp4Sm90 { .. } => arch == "90a",
            Variant::QuantizeRowsE4m3 | Variant::QuantizeTilesE4m3 => arch == "90a",
            _ => true,
        }
    }
}

/// Experts a lane of a top-k warp can hold.
pub const EXPERTS_PER_LANE: [u32; 6] = [1, 2, 4, 8, 12, 16];

impl Variant {
    /// Of the Hopper kernel of 16-bit weights: whether it is gated, and its tile.
    pub fn sm90_tile(&self) -> Option<(bool, Sm90Tile)> {
        match *self {
            Variant::GroupedGemmSm90 { gated, tokens, row_tiles, consumers, stages, .. } => {
                Some((gated, Sm90Tile { tokens, row_tiles, consumers, stages }))
            }
            _ => None,
        }
    }

    fn portable_tile(&self) -> Option<PortableTile> {
        match *self {
            Variant::GroupedGemmPortable { tokens, rows, warps, stages, vector, .. } => {
                Some(PortableTile { form: PortableForm::Plain, tokens, rows, warps, stages, vector })
            }
            Variant::GroupedGemmMxfp4Portable { tokens, rows, warps, stages, vector, .. } => {
                Some(PortableTile { form: PortableForm::Mxfp4, tokens, rows, warps, stages, vector })
            }
            _ => None,
        }
    }

    fn mxfp4_sm90_tile(&self) -> Option<(bool, Mxfp4Sm90Tile)> {
        match *self {
            Variant::GroupedGemmMxfp4Sm90 { e4m3, gated, tokens, consumers, stages, blocks } => {
                Some((gated, Mxfp4Sm90Tile { e4m3, tokens, consumers, stages, blocks }))
            }
            _ => None,
        }
    }

    /// Threads of a CTA; of routing and all-reduce kernels the most that a launch may ask for.
    pub fn threads(&self) -> u32 {
        match *self {
            Variant::Fp8(kernel) => kernel.threads(),
            Variant::Mxfp8(kernel) => kernel.threads(),
            Variant::Nvfp4(kernel) => kernel.threads(),
            Variant::Dense(kernel) => kernel.threads(),
            Variant::GroupedGemmSm90 { consumers, .. } | Variant::GroupedGemmMxfp4Sm90 { consumers, .. } => {
                128 * (1 + consumers)
            }
            Variant::LayerSm90 { .. } => 256,
            Variant::RoutedLayerMxfp4Sm90 { tile, .. } => tile.threads(),
            Variant::GroupedGemmPortable { warps, .. } | Variant::GroupedGemmMxfp4Portable { warps, .. } => 32 * warps,
            Variant::Combine { .. } | Variant::Mxfp4Layout { .. } => 128,
            Variant::QuantizeRowsE4m3 | Variant::QuantizeTilesE4m3 => 128,
            Variant::Mxfp4Pack | Variant::Mxfp4Unpack => 128 * PACK_BLOCKS,
            Variant::Mxfp4ScaleBytes | Variant::Mxfp4Quantize | Variant::Mxfp4Dequantize => 256,
            Variant::AllReduce(kernel) => kernel.threads(),
            _ => 1024,
        }
    }

    /// Whether it takes both GEMMs of a layer, or either.
    pub fn has_both_gemms(&self) -> bool {
        matches!(
            self,
            Variant::GroupedGemmMxfp4Sm90 { e4m3: false, .. }
                | Variant::Mxfp8(Mxfp8::Gemm { .. })
                | Variant::Nvfp4(Nvfp4::GroupedGemmNvfp4Sm90 { .. })
        )
    }

    /// Whether its CTAs wait for each other: a layer in one launch.
    pub fn is_one_launch(&self) -> bool {
        matches!(
            self,
            Variant::LayerSm90 { .. }
                | Variant::RoutedLayerMxfp4Sm90 { .. }
                | Variant::Fp8(Fp8::RoutedLayerFp8Sm90 { .. })
        )
    }

    /// Whether it counts in counters of its workspace that no launch before it makes zero (src/counters.rs).
    pub fn counts(&self) -> bool {
        matches!(
            self,
            Variant::LayerSm90 { routed: true, .. }
                | Variant::RoutedLayerMxfp4Sm90 { .. }
                | Variant::Fp8(Fp8::RoutedLayerFp8Sm90 { .. })
                | Variant::GroupedGemmMxfp4Sm90 { e4m3: false, .. }
                | Variant::Nvfp4(Nvfp4::GroupedGemmNvfp4Sm90 { .. })
        )
    }

    /// Whether it is faster with as much L1 as there is: its loads lie there while they are on their way, and behind a GEMM's shared memory
    /// that is little. Those which were measured to be (docs/kernels/combine.md); with shared memory of its own a kernel loses.
    pub fn streams(&self) -> bool {
        matches!(self, Variant::Combine { .. } | Variant::Fp8(Fp8::RowsToE4m3) | Variant::Mxfp8(Mxfp8::RoundRows))
    }

    /// CTAs that registers and shared memory are meant to allow on one multiprocessor.
    pub fn ctas_per_multiprocessor(&self) -> u32 {
        match (self.sm90_tile(), self.portable_tile(), self) {
            (Some((gated, tile)), ..) => sm90_ctas(gated, tile),
            _ if self.mxfp4_sm90_tile().is_some() => self.mxfp4_sm90_tile().map_or(1, |(gated, tile)| tile.ctas(gated)),
            (_, Some(tile), _) => tile.ctas(),
            (.., Variant::Fp8(kernel)) => kernel.ctas(),
            (.., Variant::Mxfp8(kernel)) => kernel.ctas(),
            (.., Variant::Nvfp4(kernel)) => kernel.ctas(),
            (.., Variant::Dense(kernel)) => kernel.ctas(),
            (.., Variant::LayerSm90 { .. } | Variant::RoutedLayerMxfp4Sm90 { .. }) => 2,
            (.., Variant::Combine { .. } | Variant::Mxfp4Layout { .. }) => 8,
            (.., Variant::QuantizeRowsE4m3 | Variant::QuantizeTilesE4m3) => 8,
            (.., Variant::Mxfp4Quantize | Variant::Mxfp4Dequantize | Variant::Mxfp4ScaleBytes) => 4,
            (.., Variant::Mxfp4Pack | Variant::Mxfp4Unpack) => 2,
            (.., Variant::AllReduce(kernel)) => kernel.ctas_per_multiprocessor(),
            _ => 1,
        }
    }

    /// Dynamic shared memory of a CTA; None: the plan decides.
    pub fn shared_bytes(&self) -> Option<u32> {
        match (self.sm90_tile(), self.portable_tile(), self) {
            (Some((gated, tile)), ..) => Some(sm90_shared_bytes(gated, tile)),
            _ if self.mxfp4_sm90_tile().is_some() => {
                self.mxfp4_sm90_tile().map(|(gated, tile)| tile.shared_bytes(gated))
            }
            (_, Some(tile), _) => Some(tile.shared_bytes()),
            (.., Variant::RoutedLayerMxfp4Sm90 { .. }) => Some(Mxfp4LayerTile::SHARED_BYTES),
            (.., &Variant::LayerSm90 { tokens, stages, routed, .. }) => layer_shared_bytes(tokens, stages, routed),
            (.., Variant::Fp8(kernel)) => Some(kernel.shared_bytes()),
            (.., Variant::Mxfp8(kernel)) => Some(kernel.shared_bytes()),
            (.., Variant::Nvfp4(kernel)) => Some(kernel.shared_bytes()),
            (.., Variant::Combine { .. } | Variant::Ragged | Variant::Schedule | Variant::AllReduce(_)) => Some(0),
            (.., Variant::QuantizeRowsE4m3 | Variant::QuantizeTilesE4m3) => Some(0),
            (.., Variant::Dense(kernel)) => kernel.fixed_shared_bytes(),
            (.., variant) if CONVERSIONS.contains(variant) => Some(0),
            _ => None,
        }
    }
}
