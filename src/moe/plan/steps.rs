//! The parts of programs, as plain data: steps, places in memory, and what the GEMMs read and write.

use crate::kernel::{AnyLaunch, Launch};
use crate::params::{
    CombineParams, ExpandScalesParams, GemmPairParams, GroupedGemmParams, QuantizeFp8Params, QuantizeRowsParams,
    RoundNvfp4Params, RouteParams, RoutedLayerParams, ScheduleParams, TileRowsParams,
};
use crate::variants::signature::{Layer, MappedGemm, OrderedGemm, RoutedLayer, SelectAndSort};
use crate::workspace::Range;

/// Memory that a call is given or makes. Addresses in parameters are offsets into a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffer {
    /// No memory: a null pointer.
    None,
    X,
    /// Scales of codes that the caller made.
    XScales,
    Out,
    /// Ids of the chosen experts, if the caller gives them.
    Ids,
    /// Weights of the chosen experts, if the caller gives them.
    SlotWeights,
    /// Numbers of rows of each expert, in a call on rows in order.
    RowCounts,
    /// The layer's numbers for rounding x.
    UpFactors,
    /// The layer's numbers for rounding GEMM1's output.
    DownFactors,
    Workspace,
}

/// How many buffers there are.
pub const BUFFERS: usize = Buffer::Workspace as usize + 1;

/// A place in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    pub buffer: Buffer,
    pub offset: usize,
}

impl At {
    pub const NONE: At = At::start(Buffer::None);

    /// The start of a buffer.
    pub const fn start(buffer: Buffer) -> At {
        At { buffer, offset: 0 }
    }

    /// The start of a range of the workspace.
    pub const fn range(range: &Range) -> At {
        At { buffer: Buffer::Workspace, offset: range.offset }
    }

    /// The place that lies so many bytes after this one.
    pub const fn plus(self, bytes: usize) -> At {
        At { offset: self.offset + bytes, ..self }
    }
}

/// The work of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Top-k alone. GPUs have no such step, because their routing kernels choose the experts.
    Select,
    /// Sort by expert and schedule; on GPUs also the top-k.
    Route,
    /// The schedule of rows in order.
    Schedule,
    /// GEMM2's own schedule.
    DownSchedule,
    RoundX,
    Gemm1,
    RoundHidden,
    Gemm2,
    BothGemms,
    /// Both GEMMs of rows in order, in a launch that finds the tiles itself.
    BothGemmsOfRows,
    /// Both GEMMs and the combine.
    Layer,
    /// The routing, both GEMMs and the combine.
    RoutedLayer,
    Combine,
}

impl Task {
    /// The name of a task in errors.
    pub fn name(self) -> &'static str {
        match self {
            Task::Select | Task::Route => "routing",
            Task::Schedule => "schedule",
            Task::DownSchedule => "schedule of GEMM2",
            Task::RoundX => "quantisation of x",
            Task::Gemm1 => "GEMM1",
            Task::RoundHidden => "quantisation of GEMM1's output",
            Task::Gemm2 => "GEMM2",
            Task::BothGemms | Task::BothGemmsOfRows => "GEMM1 and GEMM2",
            Task::Layer => "GEMM1, GEMM2 and combine",
            Task::RoutedLayer => "layer",
            Task::Combine => "combine",
        }
    }
}

/// One step: a launch of a kernel on GPUs, a function of `crate::cpu` on CPUs, where the launch is None. The type of a step's launch names
/// the parameters of its kernel, which `moe::parameters` makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Select,
    Route(Option<RouteLaunch>),
    Schedule(Option<Launch<ScheduleParams>>),
    DownSchedule(Launch<ScheduleParams>),
    RoundX(Option<RoundLaunch>),
    Gemm1(Option<GemmLaunch>),
    RoundHidden(Option<RoundLaunch>),
    Gemm2(Option<GemmLaunch>),
    BothGemms(Launch<GemmPairParams>),
    BothGemmsOfRows(Launch<GemmPairParams>),
    Layer(Launch<Layer>),
    RoutedLayer(RoutedLayerLaunch),
    Combine(Option<Launch<CombineParams>>),
}

/// An enum of launches of one task, whose kernels take different parameters.
macro_rules! launches {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $form:ident($signature:ty),)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$of])* $form(Launch<$signature>),)*
        }

        impl $name {
            /// The launch without the types of its parameters.
            pub fn any(self) -> AnyLaunch {
                match self {
                    $($name::$form(launch) => launch.any(),)*
                }
            }
        }
    };
}

launches! {
    /// A launch of the routing.
    RouteLaunch {
        /// The kernel chooses the experts.
        Select(SelectAndSort),
        /// The experts were chosen before.
        Sort(RouteParams),
    }
}

launches! {
    /// A launch that rounds activations.
    RoundLaunch {
        Fp8(QuantizeFp8Params),
        /// The codes exist, and their scales are brought into order.
        Fp8Scales(ExpandScalesParams),
        Rows(QuantizeRowsParams),
        /// The rows are those of a schedule.
        TileRows(TileRowsParams),
        Nvfp4(RoundNvfp4Params),
    }
}

launches! {
    /// A launch of one GEMM.
    GemmLaunch {
        Plain(GroupedGemmParams),
        /// Weights are read through a tensor map.
        Mapped(MappedGemm),
        /// Weights and rows of x, which lie in the order of places, are read through tensor maps.
        Ordered(OrderedGemm),
    }
}

launches! {
    /// A launch of a whole layer with the routing inside.
    RoutedLayerLaunch {
        Plain(RoutedLayerParams),
        /// Weights are read through tensor maps.
        Mapped(RoutedLayer),
    }
}

/// A list of tiles, and the numbers by which an expert's rows are cut into tiles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The number of rows of each expert.
    pub row_counts: At,
    pub tile_tokens: i32,
    /// The step in which an expert's rows are cut into tiles.
    pub tile_step: i32,
    pub tiles: At,
    pub tile_count: At,
}

/// The places that a GEMM of the layer reads and writes, beside weights. On GPUs some kernels count K in pairs of columns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gemm {
    pub x: At,
    /// fp32 scales of groups of 128 columns of x.
    pub x_scales: At,
    /// fp32 scales of rows of x.
    pub row_scales: At,
    /// Whether a row of x is that of the place's slot, divided by `row_divisor`; otherwise it is the place itself.
    pub gathers: bool,
    pub row_divisor: i32,
    pub k: i32,
    pub out: At,
    /// fp32 scales of an e4m3 output, which the epilogue writes.
    pub out_scales: At,
    /// Factors of experts for an epilogue that rounds to NVFP4.
    pub out_factors: At,
    /// The value of `GroupedGemmParams::schedule_is_older`.
    pub schedule_is_older: bool,
    /// How the scales of x and of the output lie, for kernels that read rows in order.
    pub order: Order,
}

/// How scales lie, for kernels whose rows of x lie in the order of places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// Rows of x.
    pub rows: i64,
    /// Distances between the scales of neighbouring rows of x, and of neighbouring groups of columns.
    pub x_scales: (i64, i64),
    /// Distances between the scales of neighbouring rows of the output, and of neighbouring groups of columns.
    pub out_scales: (i64, i64),
}

impl Step {
    pub fn task(&self) -> Task {
        match self {
            Step::Select => Task::Select,
            Step::Route(_) => Task::Route,
            Step::Schedule(_) => Task::Schedule,
            Step::DownSchedule(_) => Task::DownSchedule,
            Step::RoundX(_) => Task::RoundX,
            Step::Gemm1(_) => Task::Gemm1,
            Step::RoundHidden(_) => Task::RoundHidden,
            Step::Gemm2(_) => Task::Gemm2,
            Step::BothGemms(_) => Task::BothGemms,
            Step::BothGemmsOfRows(_) => Task::BothGemmsOfRows,
            Step::Layer(_) => Task::Layer,
            Step::RoutedLayer(_) => Task::RoutedLayer,
            Step::Combine(_) => Task::Combine,
        }
    }

    /// The launch without the types of its parameters. None on CPUs.
    pub fn launch(&self) -> Option<AnyLaunch> {
        match *self {
            Step::Select => None,
            Step::Route(launch) => launch.map(RouteLaunch::any),
            Step::Schedule(launch) => launch.map(Launch::any),
            Step::RoundX(launch) | Step::RoundHidden(launch) => launch.map(RoundLaunch::any),
            Step::Gemm1(launch) | Step::Gemm2(launch) => launch.map(GemmLaunch::any),
            Step::DownSchedule(launch) => Some(launch.any()),
            Step::BothGemms(launch) | Step::BothGemmsOfRows(launch) => Some(launch.any()),
            Step::Layer(launch) => Some(launch.any()),
            Step::RoutedLayer(launch) => Some(launch.any()),
            Step::Combine(launch) => launch.map(Launch::any),
        }
    }
}
