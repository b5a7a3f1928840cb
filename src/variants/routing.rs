//! Kernels around the GEMMs: top-k, sort, schedule, and the sum of a token's rows.

use super::*;

const SELECT_AND_SORT: &[(&str, &str)] = &[("SelectParams", "s"), ("RouteParams", "p")];
const SORT: &[(&str, &str)] = &[("RouteParams", "p")];

/// Most threads of a CTA that chooses experts. Lanes with more than 16 experts need more registers than 1024 threads can have.
const SELECT_THREADS: fn(&Variant) -> u32 = |v| if v.experts <= 16 { 1024 } else { 512 };

/// Top-k alone. Each of 32 lanes holds `experts` experts; together they hold at least all experts.
pub const SELECT: Row = Row {
    arguments: &[EXPERTS, PLAIN],
    parameters: SELECT_AND_SORT,
    threads: SELECT_THREADS,
    shared: Shared::Planned,
    ..Row::new(Family::Select, "select", "Select", "moe/select.cuh")
};

/// Top-k, sort and schedule in one launch of one CTA or one cluster.
pub const ROUTE: Row = Row {
    arguments: &[EXPERTS, PLAIN],
    parameters: SELECT_AND_SORT,
    threads: SELECT_THREADS,
    shared: Shared::Planned,
    ..Row::new(Family::Route, "route", "Route", "moe/route.cuh")
};

/// Sort and schedule of given ids in one launch.
pub const ROUTE_GIVEN_IDS: Row = Row { family: Family::RouteGivenIds, parameters: SORT, ..ROUTE };

/// Counts the slots of each expert in each block of tokens, for more tokens than one cluster takes. `Place` follows it.
pub const HISTOGRAM: Row = Row {
    parameters: SORT,
    shared: Shared::Planned,
    ..Row::new(Family::Histogram, "histogram", "Histogram", "moe/place.cuh")
};

/// Sort and schedule after `Histogram` or `Select`. `flag`: `Select` chose the ids; otherwise the caller gave them.
pub const PLACE: Row = Row {
    arguments: &[Argument::Flag("_given", "_chosen")],
    parameters: SORT,
    shared: Shared::Planned,
    ..Row::new(Family::Place, "place", "Place", "moe/place.cuh")
};

/// triton_kernels' block tables of a sorted batch.
pub const RAGGED: Row =
    Row { parameters: &[("RaggedParams", "p")], ..Row::new(Family::Ragged, "ragged", "Ragged", "moe/ragged.cuh") };

/// The schedule of rows that lie expert by expert.
pub const SCHEDULE: Row = Row {
    parameters: &[("ScheduleParams", "p")],
    ..Row::new(Family::Schedule, "schedule", "Schedule", "moe/schedule.cuh")
};

/// The weighted sum of a token's rows.
pub const COMBINE: Row = Row {
    arguments: &[Argument::Element],
    parameters: &[("CombineParams", "p")],
    threads: |_| 128,
    ctas: |_| 8,
    traits: &[Trait::Streams],
    ..Row::new(Family::Combine, "combine", "Combine", "moe/combine.cuh")
};

/// Numbers of experts that a lane of a top-k warp can hold.
pub const EXPERTS_PER_LANE: [u32; 7] = [1, 2, 4, 8, 12, 16, 32];

/// Bytes of static shared memory, rounded up, that routing kernels may use beside their dynamic part.
#[allow(dead_code)] // the build script does not plan
pub const STATIC_SHARED: u32 = 12 * 1024;

pub const fn select(experts: u32, plain: bool) -> Variant {
    Variant { experts, flag: plain, ..Variant::of(Family::Select) }
}

pub const fn route(experts: u32, plain: bool) -> Variant {
    Variant { experts, flag: plain, ..Variant::of(Family::Route) }
}

/// The kernel that sorts given ids and makes the schedule in one launch. No lane holds an expert.
pub const ROUTE_GIVEN: Variant = Variant::of(Family::RouteGivenIds).flag(true);

pub const fn place(chosen: bool) -> Variant {
    Variant::of(Family::Place).flag(chosen)
}

pub const fn combine(element: Element) -> Variant {
    Variant::of(Family::Combine).with_element(element)
}

/// Every kernel of this file, except the combine.
pub fn all() -> Vec<Variant> {
    let mut all = Vec::new();
    for plain in [true, false] {
        all.extend(EXPERTS_PER_LANE.map(|experts| select(experts, plain)));
        all.extend(EXPERTS_PER_LANE.map(|experts| route(experts, plain)));
        all.push(place(plain));
    }
    all.push(ROUTE_GIVEN);
    all.extend([Family::Histogram, Family::Ragged, Family::Schedule].map(Variant::of));
    all
}
