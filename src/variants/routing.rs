//! Kernels around the GEMMs: top-k, sort, schedule, and the sum of a token's rows.

use super::*;

/// Most threads of a CTA that chooses experts. Lanes with more than 16 experts need more registers than 1024 threads can have.
const SELECT_THREADS: fn(&Variant) -> u32 = |v| if v.experts <= 16 { 1024 } else { 512 };

/// Top-k alone. Each of 32 lanes holds `experts` experts; together they hold at least all experts.
pub const SELECT: Kernels<SelectAndSort> = Kernels::new(Row {
    arguments: &[EXPERTS, PLAIN],
    threads: SELECT_THREADS,
    shared: Shared::Planned,
    ..Row::new(Family::Select, "select", "Select", "moe/select.cuh")
});

/// Top-k, sort and schedule in one launch of one CTA or one cluster.
pub const ROUTE: Kernels<SelectAndSort> = Kernels::new(Row {
    arguments: &[EXPERTS, PLAIN],
    threads: SELECT_THREADS,
    shared: Shared::Planned,
    ..Row::new(Family::Route, "route", "Route", "moe/route.cuh")
});

/// Sort and schedule of given ids in one launch.
pub const ROUTE_GIVEN_IDS: Kernels<RouteParams> = Kernels::new(Row { family: Family::RouteGivenIds, ..ROUTE.row });

/// Counts the slots of each expert in each block of tokens, for more tokens than one cluster takes. `Place` follows it.
pub const HISTOGRAM: Kernels<RouteParams> = Kernels::new(Row {
    shared: Shared::Planned,
    ..Row::new(Family::Histogram, "histogram", "Histogram", "moe/place.cuh")
});

/// Sort and schedule after `Histogram` or `Select`. `flag`: `Select` chose the ids; otherwise the caller gave them.
pub const PLACE: Kernels<RouteParams> = Kernels::new(Row {
    arguments: &[Argument::Flag("_given", "_chosen")],
    shared: Shared::Planned,
    ..Row::new(Family::Place, "place", "Place", "moe/place.cuh")
});

/// triton_kernels' block tables of a sorted batch.
pub const RAGGED: Kernels<RaggedParams> = Kernels::new(Row::new(Family::Ragged, "ragged", "Ragged", "moe/ragged.cuh"));

/// The schedule of rows that lie expert by expert.
pub const SCHEDULE: Kernels<ScheduleParams> =
    Kernels::new(Row::new(Family::Schedule, "schedule", "Schedule", "moe/schedule.cuh"));

/// The weighted sum of a token's rows.
pub const COMBINE: Kernels<CombineParams> = Kernels::new(Row {
    arguments: &[Argument::Element],
    threads: |_| 128,
    ctas: |_| 8,
    traits: |_| &[Trait::Streams],
    ..Row::new(Family::Combine, "combine", "Combine", "moe/combine.cuh")
});

/// Numbers of experts that a lane of a top-k warp can hold.
pub const EXPERTS_PER_LANE: [u32; 7] = [1, 2, 4, 8, 12, 16, 32];

/// Bytes of static shared memory, rounded up, that routing kernels may use beside their dynamic part.
#[allow(dead_code)] // the build script does not plan
pub const STATIC_SHARED: u32 = 12 * 1024;

pub const fn select(experts: u32, plain: bool) -> Kernel<SelectAndSort> {
    SELECT.with(Variant { experts, flag: plain, ..Variant::NONE })
}

pub const fn route(experts: u32, plain: bool) -> Kernel<SelectAndSort> {
    ROUTE.with(Variant { experts, flag: plain, ..Variant::NONE })
}

/// The kernel that sorts given ids and makes the schedule in one launch. No lane holds an expert.
pub const ROUTE_GIVEN: Kernel<RouteParams> = ROUTE_GIVEN_IDS.kernel().flag(true);

pub const fn place(chosen: bool) -> Kernel<RouteParams> {
    PLACE.kernel().flag(chosen)
}

pub const fn combine(element: Element) -> Kernel<CombineParams> {
    COMBINE.kernel().with_element(element)
}

/// Every kernel of this file, except the combine.
pub fn all() -> Vec<Variant> {
    let mut all = Vec::new();
    for plain in [true, false] {
        all.extend(EXPERTS_PER_LANE.map(|experts| select(experts, plain).variant()));
        all.extend(EXPERTS_PER_LANE.map(|experts| route(experts, plain).variant()));
        all.push(place(plain).variant());
    }
    all.push(ROUTE_GIVEN.variant());
    all.extend([Family::Histogram, Family::Ragged, Family::Schedule].map(Variant::of));
    all
}
