//! The all-reduce kernels.

use super::*;

/// One-shot: every rank sends everything to every rank. `flag`: one CTA takes a row, and the code of clusters is left out. With 1024
/// threads a CTA, a thread has 64 registers.
pub const ONE_SHOT: Kernels<AllReduceParams> = Kernels::new(Row {
    arguments: &[Argument::Element, RANKS, Argument::Work, Argument::Flag("", "_alone")],
    unit: "allreduce_oneshot",
    unit_by: &[Argument::Work],
    ..Row::new(Family::AllReduceOneShot, "allreduce_oneshot", "AllReduceOneShot", "allreduce/oneshot.cuh")
});

/// Two-shot: ranges go to their owners, and sums come back. A thread has `chunks` chunks of 16 bytes of a row. A thread with four chunks or
/// more has 128 registers, one with two chunks has 64.
pub const TWO_SHOT: Kernels<AllReduceParams> = Kernels::new(Row {
    family: Family::AllReduceTwoShot,
    name: "allreduce_twoshot",
    device_type: "AllReduceTwoShot",
    header: "allreduce/twoshot.cuh",
    arguments: &[Argument::Element, RANKS, Argument::Work, CHUNKS],
    unit: "allreduce_twoshot",
    threads: |_| 512,
    ctas: |v| if v.chunks == 2 { 2 } else { 1 },
    ..ONE_SHOT.row
});

/// Numbers of ranks that have kernels. With one rank the norm alone remains. Two ranks send the same bytes either way and always take one
/// shot.
pub const RANKS_SERVED: [u32; 4] = [1, 2, 4, 8];

impl Work {
    /// Chunks of a row that a thread takes in the two-shot kernels.
    pub fn chunks(self) -> &'static [u32] {
        match self {
            Work::All => &[4, 8],
            _ => &[2, 4, 8],
        }
    }
}

pub const fn one_shot(element: Element, ranks: u32, work: Work, alone: bool) -> Kernel<AllReduceParams> {
    ONE_SHOT.with(Variant { element, ranks, work, flag: alone, ..Variant::NONE })
}

pub const fn two_shot(element: Element, ranks: u32, work: Work, chunks: u32) -> Kernel<AllReduceParams> {
    TWO_SHOT.with(Variant { element, ranks, work, chunks, ..Variant::NONE })
}

/// The kernels that calls of one element type and group size can take.
pub fn of(element: Element, ranks: u32) -> Vec<Variant> {
    let mut rows = Vec::new();
    for work in [Work::Sum, Work::Norm, Work::All] {
        for alone in [false, true] {
            if work == Work::Norm || !alone {
                rows.push(one_shot(element, ranks, work, alone).variant());
            }
        }
        if ranks > 2 {
            rows.extend(work.chunks().iter().map(|&chunks| two_shot(element, ranks, work, chunks).variant()));
        }
    }
    rows
}

/// Every kernel of this file.
pub fn all() -> Vec<Variant> {
    let elements = [Element::Bf16, Element::F16, Element::F32];
    elements
        .into_iter()
        .flat_map(|element| RANKS_SERVED.into_iter().flat_map(move |ranks| of(element, ranks)))
        .collect()
}
