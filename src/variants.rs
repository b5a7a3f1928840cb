//! The table of kernels. A *family* is a row: the name of its kernels, their header, their parameters, their threads and shared memory.
//! A *variant* is one kernel of a family: its template arguments. `build.rs` includes this file and writes one stub for each
//! variant; the host finds kernels by value. A [`Kernel`] is a variant whose type names its parameters. The file depends only on the names
//! of the parameters' types, since it is compiled inside the build script too.

// NOTE: the modules have paths, since the build script has this file elsewhere in its tree.
#[path = "variants/allreduce.rs"]
pub mod allreduce;
#[path = "variants/dense.rs"]
pub mod dense;
#[path = "variants/forms.rs"]
pub mod forms;
#[path = "variants/fp8.rs"]
pub mod fp8;
#[path = "variants/kernel.rs"]
mod kernel;
#[path = "variants/layer.rs"]
pub mod layer;
#[path = "variants/packed.rs"]
pub mod packed;
#[path = "variants/portable.rs"]
pub mod portable;
#[path = "variants/quant.rs"]
pub mod quant;
#[path = "variants/routing.rs"]
pub mod routing;
#[path = "variants/signature.rs"]
pub mod signature;
#[path = "variants/sm90.rs"]
pub mod sm90;

use crate::params::*;
pub use forms::Form;
pub use kernel::{Kernel, Kernels};
use signature::{Layer, MappedGemm, OrderedGemm, RoutedLayer, SelectAndSort, Signature};

/// The families of [`FAMILIES`], in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    // 16-bit weights on Hopper.
    GroupedGemmSm90,
    LayerSm90,
    RoutedLayerSm90,
    // Packed weights on Hopper.
    GroupedGemmPackedSm90,
    GroupedGemmMxfp4E4m3Sm90,
    RoutedLayerPackedSm90,
    // e4m3 weights on Hopper.
    GroupedGemmFp8Sm90,
    GroupedGemmFp8WideSm90,
    GroupedGemmFp8WideCutSm90,
    GroupedGemmFp8OrderedSm90,
    GroupedGemmFp8StationarySm90,
    RoutedLayerFp8Sm90,
    // All weights on any GPU from sm_80.
    GroupedGemmPortable,
    GroupedGemmPackedPortable,
    GroupedGemmMxfp4Portable,
    GroupedGemmFp8Portable,
    // Routing, schedules and the combine.
    Select,
    Route,
    RouteGivenIds,
    Histogram,
    Place,
    Ragged,
    Schedule,
    Combine,
    // Activations that are rounded on their way.
    QuantizeRowsE4m3,
    QuantizeTilesE4m3,
    QuantizeFp8,
    QuantizeFp8Tiles,
    QuantizeFp8Slots,
    QuantizeFp8Rows,
    QuantizeFp8Peak,
    QuantizeFp8TileRows,
    QuantizeFp8TilePeak,
    ExpandScales,
    RoundRowsMxfp8,
    RoundTilesMxfp8,
    RoundTilesMxfp8Portable,
    RoundRowsNvfp4,
    RoundRowsNvfp4Portable,
    // Weights that are packed or laid out anew.
    Mxfp4Peak,
    Mxfp4Pack,
    Mxfp4Unpack,
    Mxfp4ScaleBytes,
    Mxfp4LayoutCodes,
    Mxfp4LayoutScales,
    Mxfp8Peak,
    Mxfp8Pack,
    Pack,
    // Dense tensors.
    QuantizeMxfp4,
    DequantizeMxfp4,
    QuantizeMxfp8,
    DequantizeMxfp8,
    QuantizeNvfp4,
    MmMxfp8FewSm90,
    MmMxfp8WideSm90,
    MmMxfp8Tokens,
    // Between ranks.
    AllReduceOneShot,
    AllReduceTwoShot,
}

/// Every family.
pub static FAMILIES: [Row; 58] = [
    sm90::GEMM.row,
    layer::LAYER.row,
    layer::ROUTED_LAYER.row,
    packed::GEMM.row,
    packed::MXFP4_E4M3.row,
    packed::LAYER.row,
    fp8::GEMM.row,
    fp8::WIDE.row,
    fp8::WIDE_CUT.row,
    fp8::ORDERED.row,
    fp8::STATIONARY.row,
    fp8::LAYER.row,
    portable::PLAIN.row,
    portable::PACKED.row,
    portable::MXFP4.row,
    portable::FP8.row,
    routing::SELECT.row,
    routing::ROUTE.row,
    routing::ROUTE_GIVEN_IDS.row,
    routing::HISTOGRAM.row,
    routing::PLACE.row,
    routing::RAGGED.row,
    routing::SCHEDULE.row,
    routing::COMBINE.row,
    quant::QUANTIZE_ROWS_E4M3.row,
    quant::QUANTIZE_TILES_E4M3.row,
    quant::QUANTIZE_FP8.row,
    quant::QUANTIZE_FP8_TILES.row,
    quant::QUANTIZE_FP8_SLOTS.row,
    quant::QUANTIZE_FP8_ROWS.row,
    quant::QUANTIZE_FP8_PEAK.row,
    quant::QUANTIZE_FP8_TILE_ROWS.row,
    quant::QUANTIZE_FP8_TILE_PEAK.row,
    quant::EXPAND_SCALES.row,
    quant::ROUND_ROWS_MXFP8.row,
    quant::ROUND_TILES_MXFP8.row,
    quant::ROUND_TILES_MXFP8_PORTABLE.row,
    quant::ROUND_ROWS_NVFP4.row,
    quant::ROUND_ROWS_NVFP4_PORTABLE.row,
    quant::MXFP4_PEAK.row,
    quant::MXFP4_PACK.row,
    quant::MXFP4_UNPACK.row,
    quant::MXFP4_SCALE_BYTES.row,
    quant::MXFP4_LAYOUT_CODES.row,
    quant::MXFP4_LAYOUT_SCALES.row,
    quant::MXFP8_PEAK.row,
    quant::MXFP8_PACK.row,
    quant::PACK.row,
    quant::QUANTIZE_MXFP4.row,
    quant::DEQUANTIZE_MXFP4.row,
    quant::QUANTIZE_MXFP8.row,
    quant::DEQUANTIZE_MXFP8.row,
    quant::QUANTIZE_NVFP4.row,
    dense::MM_MXFP8_FEW.row,
    dense::MM_MXFP8_WIDE.row,
    dense::MM_MXFP8_TOKENS.row,
    allreduce::ONE_SHOT.row,
    allreduce::TWO_SHOT.row,
];

// A family finds its row by its number.
const _: () = {
    let mut number = 0;
    while number < FAMILIES.len() {
        assert!(FAMILIES[number].family as usize == number);
        number += 1;
    }
};

/// A row of the table: the properties that the kernels of a family have in common.
#[derive(Clone, Copy)]
pub struct Row {
    pub family: Family,
    /// The beginning of the kernels' symbols. `{form}` stands for the name of a packed form.
    pub name: &'static str,
    /// The struct template in namespace oxmoe whose static `run` is the kernel's body.
    pub device_type: &'static str,
    /// The header under csrc/ that defines `device_type`.
    pub header: &'static str,
    /// The template arguments, in their order. Symbols name these arguments.
    pub arguments: &'static [Argument],
    /// The parameters in C++, as (type, name). [`Kernels`] takes them from its type.
    parameters: &'static [(&'static str, &'static str)],
    /// The beginning of the family's unit names, if it is not the header's name. `{form}` stands for the name of a packed form.
    pub unit: &'static str,
    /// The arguments by which a family is cut into units; variants of one unit are compiled into one image.
    pub unit_by: &'static [Argument],
    /// Whether the family needs sm_90a.
    pub hopper: bool,
    /// Threads of a CTA, or the most that a launch may ask for.
    pub threads: fn(&Variant) -> u32,
    pub shared: Shared,
    /// CTAs that registers and shared memory are meant to allow on one multiprocessor.
    pub ctas: fn(&Variant) -> u32,
    pub traits: fn(&Variant) -> &'static [Trait],
}

impl Row {
    /// The row from which most rows are made: one CTA of 1024 threads, without shared memory, in one unit, for every GPU.
    pub const fn new(family: Family, name: &'static str, device_type: &'static str, header: &'static str) -> Row {
        Row {
            family,
            name,
            device_type,
            header,
            arguments: &[],
            parameters: &[],
            unit: "",
            unit_by: &[],
            hopper: false,
            threads: |_| 1024,
            shared: Shared::Fixed(|_| 0),
            ctas: |_| 1,
            traits: |_| &[],
        }
    }
}

/// Dynamic shared memory of a CTA, in bytes.
#[derive(Clone, Copy)]
pub enum Shared {
    /// All launches have this size.
    Fixed(fn(&Variant) -> u32),
    /// Launches add to this size what their shapes need.
    AtLeast(fn(&Variant) -> u32),
    /// The plan decides the size.
    Planned,
}

/// A property of a family that the host must know beyond its sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trait {
    /// A launch takes both GEMMs of a layer, or either of them.
    BothGemms,
    /// The CTAs of a launch wait for each other: the family runs a layer in one launch.
    OneLaunch,
    /// The kernel counts in counters that no launch before it sets to 0 (src/counters.rs).
    Counts,
    /// The kernel is faster with as much L1 as there is: its loads occupy L1 while they are in flight, and after a GEMM's shared memory
    /// little L1 is left. Families that were measured to gain have this trait (docs/kernels/combine.md); a kernel with shared memory of its
    /// own loses.
    Streams,
}

/// A template argument: which field of the variant it is, and how symbols show it.
#[derive(Clone, Copy)]
pub enum Argument {
    Element,
    Gated,
    /// `flag`, with its names if it is false and if it is true. Symbols do not show an empty name.
    Flag(&'static str, &'static str),
    Work,
    /// The packed form of the weights. Symbols show its option here, and its name where the family's name has `{form}`.
    Form,
    /// The struct that packs weights of a form.
    Packer,
    /// A number after a letter. Symbols do not show a number whose letter is empty.
    Number(fn(&Variant) -> u32, &'static str),
}

pub const TOKENS: Argument = Argument::Number(|v| v.tokens, "t");
pub const ROW_TILES: Argument = Argument::Number(|v| v.row_tiles, "r");
pub const ROWS: Argument = Argument::Number(|v| v.rows, "r");
pub const CONSUMERS: Argument = Argument::Number(|v| v.consumers, "c");
pub const WARPS: Argument = Argument::Number(|v| v.warps, "w");
pub const STAGES: Argument = Argument::Number(|v| v.stages, "s");
pub const BLOCKS: Argument = Argument::Number(|v| v.blocks, "b");
pub const VECTOR: Argument = Argument::Number(|v| v.vector, "v");
pub const EXPERTS: Argument = Argument::Number(|v| v.experts, "e");
pub const CTAS: Argument = Argument::Number(|v| v.ctas, "x");
pub const RANKS: Argument = Argument::Number(|v| v.ranks, "n");
pub const CHUNKS: Argument = Argument::Number(|v| v.chunks, "c");
/// Whether top-k is plain: without bias, groups and order by id. Such a kernel has a third of the code.
pub const PLAIN: Argument = Argument::Flag("_any", "");

/// Element type of activations and weights in a kernel. All-reduces alone have F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    F16,
    Bf16,
    F32,
}

/// The patterns of an all-reduce that a kernel serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// kAllReduce.
    Sum,
    /// kARResidualRMSNorm.
    Norm,
    /// Every pattern.
    All,
}

/// One kernel, as plain data. A field that its family does not use has the value of [`Variant::NONE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    pub family: Family,
    pub element: Element,
    /// The packed form of weights.
    pub form: Form,
    /// Whether w13 has a gate and an up row for each column of GEMM1's output.
    pub gated: bool,
    /// An option of the family, which its `arguments` name.
    pub flag: bool,
    pub work: Work,
    /// Most tokens of a tile.
    pub tokens: u32,
    /// Tiles of 64 weight rows that a consumer takes at a time. In the dense GEMM for few tokens a tile has 16 rows.
    pub row_tiles: u32,
    /// Weight rows of a tile of the portable kernels.
    pub rows: u32,
    /// Warpgroups that multiply.
    pub consumers: u32,
    /// Warps that multiply, in kernels without consumer warpgroups.
    pub warps: u32,
    /// Pipeline stages.
    pub stages: u32,
    /// Blocks of K in a stage. In GEMM2 with tokens that stay: blocks of 128 weight rows. In a quantiser: numbers of a block.
    pub blocks: u32,
    /// Elements of a load.
    pub vector: u32,
    /// Experts that a lane of a top-k warp holds. In a layer in one launch: most experts with a router logit.
    pub experts: u32,
    /// CTAs on a multiprocessor, if they are a template argument.
    pub ctas: u32,
    pub ranks: u32,
    /// Chunks of 16 bytes that a thread has of a row.
    pub chunks: u32,
}

impl Variant {
    /// A variant without arguments, from which others are made. Its family has no meaning.
    pub const NONE: Variant = Variant {
        family: Family::GroupedGemmSm90,
        element: Element::Bf16,
        form: Form::Mxfp4,
        gated: false,
        flag: false,
        work: Work::All,
        tokens: 0,
        row_tiles: 1,
        rows: 0,
        consumers: 0,
        warps: 0,
        stages: 0,
        blocks: 0,
        vector: 8,
        experts: 0,
        ctas: 0,
        ranks: 0,
        chunks: 0,
    };

    /// The kernel of a family without arguments.
    pub const fn of(family: Family) -> Variant {
        Variant { family, ..Variant::NONE }
    }

    pub fn row(&self) -> &'static Row {
        &FAMILIES[self.family as usize]
    }

    fn is(&self, what: Trait) -> bool {
        (self.row().traits)(self).contains(&what)
    }

    pub fn has_both_gemms(&self) -> bool {
        self.is(Trait::BothGemms)
    }

    pub fn is_one_launch(&self) -> bool {
        self.is(Trait::OneLaunch)
    }

    pub fn counts(&self) -> bool {
        self.is(Trait::Counts)
    }

    pub fn streams(&self) -> bool {
        self.is(Trait::Streams)
    }

    /// The kernel's name in the image.
    pub fn symbol(&self) -> String {
        self.row().arguments.iter().fold(self.named(self.row().name), |name, argument| name + &argument.name(self))
    }

    /// The text with the form's name in the place of `{form}`.
    fn named(&self, text: &str) -> String {
        text.replace("{form}", self.form.row().name)
    }

    /// The headers under csrc/ that define the kernel and its packed form.
    pub fn headers(&self) -> Vec<&'static str> {
        let Row { header, arguments, .. } = self.row();
        let has_form = arguments.iter().any(|argument| matches!(argument, Argument::Form | Argument::Packer));
        std::iter::once(*header).chain(has_form.then_some(self.form.row().header)).collect()
    }

    /// The struct whose static `run` is the kernel's body.
    pub fn device_type(&self) -> String {
        let Row { device_type, arguments, .. } = self.row();
        let values: Vec<String> = arguments.iter().map(|argument| argument.value(self)).collect();
        match values.is_empty() {
            true => format!("oxmoe::{device_type}"),
            false => format!("oxmoe::{device_type}<{}>", values.join(", ")),
        }
    }

    /// The name of the unit in which the kernel is compiled.
    pub fn unit(&self) -> String {
        let Row { header, unit, unit_by, .. } = self.row();
        let stem = header.rsplit('/').next().unwrap_or_default().trim_end_matches(".cuh");
        let first = if unit.is_empty() { stem.into() } else { self.named(unit) };
        unit_by.iter().fold(first, |name, argument| name + &argument.name(self))
    }

    /// The text (parameter list of the kernel, arguments of `run`) in C++.
    pub fn signature(&self) -> (String, String) {
        let parameter = |(of_type, name): &(&str, &str)| format!("const __grid_constant__ {of_type} {name}");
        let parameters = self.row().parameters;
        let names: Vec<&str> = parameters.iter().map(|(_, name)| *name).collect();
        (parameters.iter().map(parameter).collect::<Vec<_>>().join(", "), names.join(", "))
    }

    /// Whether the kernel is compiled for an architecture, which has nvcc's name ("80", "90a", ...).
    pub fn runs_on(&self, arch: &str) -> bool {
        !self.row().hopper || arch == "90a"
    }

    /// Threads of a CTA. For routing and all-reduce kernels: the most that a launch may ask for.
    pub fn threads(&self) -> u32 {
        (self.row().threads)(self)
    }

    /// CTAs that registers and shared memory are meant to allow on one multiprocessor.
    pub fn ctas_per_multiprocessor(&self) -> u32 {
        (self.row().ctas)(self)
    }

    /// Dynamic shared memory of a CTA. None if the plan decides.
    pub fn shared_bytes(&self) -> Option<u32> {
        match self.row().shared {
            Shared::Fixed(bytes) => Some(bytes(self)),
            _ => None,
        }
    }

    /// The least dynamic shared memory of a launch, which the device code states too. None if the plan alone decides.
    pub fn least_shared_bytes(&self) -> Option<u32> {
        match self.row().shared {
            Shared::Fixed(bytes) | Shared::AtLeast(bytes) => Some(bytes(self)),
            Shared::Planned => None,
        }
    }

    /// Weight rows of a work unit of a grouped GEMM.
    pub fn unit_rows(&self) -> u32 {
        if self.rows > 0 {
            self.rows
        } else {
            64 * self.row_tiles * self.consumers
        }
    }

    /// The shape (row tiles, consumers) of the tensor map through which the kernel reads weights.
    pub fn map_shape(&self) -> (u32, u32) {
        (self.row_tiles, self.consumers)
    }
}

impl Argument {
    /// The argument's text in symbols, with its separator.
    fn name(&self, variant: &Variant) -> String {
        match *self {
            Argument::Element => format!("_{}", variant.element.name()),
            Argument::Gated => if variant.gated { "_gated" } else { "_plain" }.into(),
            Argument::Flag(no, yes) => if variant.flag { yes } else { no }.into(),
            Argument::Work => format!("_{}", variant.work.name()),
            Argument::Form => variant.form.row().option.into(),
            Argument::Packer => String::new(),
            Argument::Number(_, "") => String::new(),
            Argument::Number(value, letter) => format!("_{letter}{}", value(variant)),
        }
    }

    /// The argument's text in C++.
    fn value(&self, variant: &Variant) -> String {
        match *self {
            Argument::Element => variant.element.device_type().into(),
            Argument::Gated => variant.gated.to_string(),
            Argument::Flag(..) => variant.flag.to_string(),
            Argument::Work => format!("oxmoe::allreduce::Work::k{:?}", variant.work),
            Argument::Form => format!("oxmoe::{}", variant.form.row().device_type),
            Argument::Packer => format!("oxmoe::{}", variant.form.row().packer),
            Argument::Number(value, _) => value(variant).to_string(),
        }
    }
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

impl Work {
    fn name(self) -> &'static str {
        match self {
            Work::Sum => "sum",
            Work::Norm => "norm",
            Work::All => "all",
        }
    }
}

/// CTAs that fit beside each other on an SM of Hopper. It has 228 KB, of which the system takes 1 KB for each CTA.
pub const fn ctas_by_shared(bytes: u32) -> u32 {
    228 * 1024 / (bytes + 1024)
}

/// The lesser of two numbers, as a `const fn`.
pub const fn least(a: u32, b: u32) -> u32 {
    if a < b {
        a
    } else {
        b
    }
}

/// The gated and the plain form of each tile.
pub fn both_forms<P>(tiles: &[Kernel<P>]) -> impl Iterator<Item = Variant> + '_ {
    tiles.iter().flat_map(|tile| [true, false].map(|gated| tile.gated(gated).variant()))
}

/// The form of each tile for an element type.
fn forms<P>(tiles: &[Kernel<P>], element: Element, gated: bool) -> impl Iterator<Item = Variant> + '_ {
    tiles.iter().map(move |tile| tile.with_element(element).gated(gated).variant())
}

/// Every kernel in the wheel. A variant that no plan chooses is removed (tests/plan.rs compares).
pub fn all() -> Vec<Variant> {
    let mut all = Vec::new();
    for element in [Element::Bf16, Element::F16] {
        for gated in [true, false] {
            all.extend(forms(&sm90::TILES, element, gated));
            all.extend(forms(&[layer::LAYER_TILE], element, gated));
            all.extend(forms(&[layer::ROUTED_TILE], element, gated));
            all.extend(forms(&portable::PLAIN_TILES, element, gated));
        }
        all.push(routing::combine(element).variant());
    }
    all.extend(forms::all());
    all.extend(packed::all());
    all.extend(fp8::all());
    all.extend(both_forms(&portable::FP8_TILES));
    all.extend(routing::all());
    all.extend(quant::all());
    all.extend(dense::all());
    all.extend(allreduce::all());
    all
}
