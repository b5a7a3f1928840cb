//! The all-reduce kernels among the variants.

use super::Element;

/// What a kernel can do with the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// kAllReduce.
    Sum,
    /// kARResidualRMSNorm.
    Norm,
    /// Every pattern.
    All,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AllReduce {
    /// One trip: everybody sends everything to everybody. `alone`: one CTA a row, without the code of clusters.
    OneShot { element: Element, ranks: u32, work: Work, alone: bool },
    /// Two: ranges to their owners, sums back. `chunks` of 16 bytes a thread in a row.
    TwoShot { element: Element, ranks: u32, work: Work, chunks: u32 },
}

/// Groups that have kernels; of one rank, the norm alone remains. Two ranks send the same bytes either way and take one shot always.
pub const RANKS: [u32; 4] = [1, 2, 4, 8];

impl Work {
    /// Chunks of a row that a thread takes in two shots.
    pub fn chunks(self) -> &'static [u32] {
        match self {
            Work::All => &[4, 8],
            _ => &[2, 4, 8],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Work::Sum => "sum",
            Work::Norm => "norm",
            Work::All => "all",
        }
    }
}

/// Those that calls of one element type and group size can take.
pub fn of(element: Element, ranks: u32) -> Vec<AllReduce> {
    let mut rows = Vec::new();
    for work in [Work::Sum, Work::Norm, Work::All] {
        for alone in [false, true] {
            if work == Work::Norm || !alone {
                rows.push(AllReduce::OneShot { element, ranks, work, alone });
            }
        }
        if ranks > 2 {
            rows.extend(work.chunks().iter().map(|&chunks| AllReduce::TwoShot { element, ranks, work, chunks }));
        }
    }
    rows
}

pub fn all() -> Vec<AllReduce> {
    let elements = [Element::Bf16, Element::F16, Element::F32];
    elements.into_iter().flat_map(|element| RANKS.into_iter().flat_map(move |ranks| of(element, ranks))).collect()
}

impl AllReduce {
    pub fn symbol(&self) -> String {
        match self {
            AllReduce::OneShot { element, ranks, work, alone } => {
                let alone = if *alone { "_alone" } else { "" };
                format!("allreduce_oneshot_{}_n{ranks}_{}{alone}", element.name(), work.name())
            }
            AllReduce::TwoShot { element, ranks, work, chunks } => {
                format!("allreduce_twoshot_{}_n{ranks}_{}_c{chunks}", element.name(), work.name())
            }
        }
    }

    pub fn device_type(&self) -> String {
        match self {
            AllReduce::OneShot { element, ranks, work, alone } => {
                let element = element.device_type();
                format!("oxmoe::AllReduceOneShot<{element}, {ranks}, oxmoe::allreduce::Work::k{work:?}, {alone}>")
            }
            AllReduce::TwoShot { element, ranks, work, chunks } => {
                let element = element.device_type();
                format!("oxmoe::AllReduceTwoShot<{element}, {ranks}, oxmoe::allreduce::Work::k{work:?}, {chunks}>")
            }
        }
    }

    pub fn header(&self) -> &'static str {
        match self {
            AllReduce::OneShot { .. } => "allreduce/oneshot.cuh",
            AllReduce::TwoShot { .. } => "allreduce/twoshot.cuh",
        }
    }

    /// Variants of one unit are compiled into one image.
    pub fn unit(&self) -> String {
        match self {
            AllReduce::OneShot { work, .. } => format!("allreduce_oneshot_{}", work.name()),
            AllReduce::TwoShot { work, .. } => format!("allreduce_twoshot_{}", work.name()),
        }
    }

    /// The most that a launch may ask for.
    pub fn threads(&self) -> u32 {
        match self {
            AllReduce::OneShot { .. } => 1024,
            AllReduce::TwoShot { .. } => 512,
        }
    }

    /// With all of `threads`: leaves 64 registers a thread, 128 where it holds four chunks or more.
    pub fn ctas_per_multiprocessor(&self) -> u32 {
        match self {
            AllReduce::TwoShot { chunks: 2, .. } => 2,
            _ => 1,
        }
    }
}
