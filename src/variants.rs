//! The table of kernel instantiations. `build.rs` includes this file and writes one stub per row; the host looks rows up by value.
//! No dependencies: it must compile inside the build script too.

/// Element type of activations and weights in a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    F16,
    Bf16,
}

/// One kernel instantiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    /// wgmma + TMA. `tokens`: largest token tile (wgmma N); `row_tiles` x 64 weight rows for each of `consumers` warpgroups.
    GroupedGemmSm90 { element: Element, gated: bool, tokens: u32, row_tiles: u32, consumers: u32, stages: u32 },
    /// mma.sync + cp.async, any GPU from sm_80. `vector`: elements a load (8, or 1 when k % 8 != 0).
    GroupedGemmPortable { element: Element, gated: bool, tokens: u32, rows: u32, warps: u32, stages: u32, vector: u32 },
    /// Top-k alone. `experts_per_lane` x 32 >= experts.
    Select { experts_per_lane: u32 },
    /// Top-k (or given ids), sort and schedule in one launch of one CTA or one cluster; `experts_per_lane` 0: ids are given.
    Route { experts_per_lane: u32 },
    /// Slots per expert and block of tokens, then ...
    Histogram,
    /// ... sort and schedule, for token counts beyond one cluster.
    Place,
    /// Weighted sum of a token's rows.
    Combine { element: Element },
}
