//! What programs are made of, as plain data: steps, places in memory, and what the GEMMs read and write.

use crate::kernel::Launch;
use crate::workspace::Range;

/// Memory that a call is given or makes. Addresses of parameters are offsets into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffer {
    /// No memory: a null pointer.
    None,
    X,
    /// Scales of codes that the caller made.
    XScales,
    Out,
    /// Ids of the chosen experts, and their weights, where the caller gives them.
    Ids,
    SlotWeights,
    /// Rows of each expert, of a call on rows in order.
    RowCounts,
    /// The layer's numbers for rounding x and GEMM1's output.
    UpFactors,
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

    /// Where a buffer begins.
    pub const fn start(buffer: Buffer) -> At {
        At { buffer, offset: 0 }
    }

    /// Where a range of the workspace begins.
    pub const fn range(range: &Range) -> At {
        At { buffer: Buffer::Workspace, offset: range.offset }
    }

    /// So many bytes further on.
    pub const fn plus(self, bytes: usize) -> At {
        At { offset: self.offset + bytes, ..self }
    }
}

/// What a step does. Each has one kind of parameters, which `moe::parameters` makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Top-k alone; on GPUs the routing's kernels choose.
    Select,
    /// Sort by expert and schedule, on GPUs with the top-k.
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
    /// What errors call it.
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

/// One step: on GPUs a launch of a kernel, on CPUs a function of `crate::cpu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub task: Task,
    /// None on CPUs.
    pub launch: Option<Launch>,
}

/// A list of tiles, and what cuts an expert's rows into them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The numbers of the experts' rows.
    pub row_counts: At,
    pub tile_tokens: i32,
    /// In steps of what an expert's rows are cut into tiles.
    pub tile_step: i32,
    pub tiles: At,
    pub tile_count: At,
}

/// What a GEMM of the layer reads and writes beside weights. On GPUs some kernels count K in pairs of columns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gemm {
    pub x: At,
    /// fp32 scales of groups of 128 columns of x, or of its rows.
    pub x_scales: At,
    pub row_scales: At,
    /// A row of x is that of the place's slot, divided by `row_divisor`; else the place itself.
    pub gathers: bool,
    pub row_divisor: i32,
    pub k: i32,
    pub out: At,
    /// Where the epilogue writes fp32 scales of e4m3.
    pub out_scales: At,
    /// Factors of NVFP4, to which the epilogue rounds.
    pub out_factors: At,
    pub schedule_is_older: bool,
    /// The scales of x and of the output, of kernels for rows in order.
    pub order: Order,
}

/// How scales lie, of kernels whose rows of x lie in the order of places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// Rows of x.
    pub rows: i64,
    /// Distances between the scales of neighbouring rows and groups of columns.
    pub x_scales: (i64, i64),
    pub out_scales: (i64, i64),
}

impl Step {
    pub fn launch(task: Task, launch: Launch) -> Step {
        Step { task, launch: Some(launch) }
    }
}
