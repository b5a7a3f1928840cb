//! The all-reduce kernels among the variants.

use super::Element;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AllReduce {
    /// One trip: everybody sends everything to everybody.
    OneShot { element: Element, ranks: u32 },
    /// Two: ranges to their owners, sums back. `chunks` of 16 bytes a thread in a row.
    TwoShot { element: Element, ranks: u32, chunks: u32 },
}

/// Groups that have kernels; of one rank, the norm alone remains. Two ranks send the same bytes either way and take one shot always.
pub const RANKS: [u32; 4] = [1, 2, 4, 8];

/// Chunks of a row that a thread takes in two shots.
pub const TWOSHOT_CHUNKS: [u32; 2] = [2, 4];

pub fn all() -> Vec<AllReduce> {
    let mut rows = Vec::new();
    for element in [Element::Bf16, Element::F16, Element::F32] {
        for ranks in RANKS {
            rows.push(AllReduce::OneShot { element, ranks });
            let twoshot = TWOSHOT_CHUNKS.map(|chunks| AllReduce::TwoShot { element, ranks, chunks });
            rows.extend(twoshot.into_iter().filter(|_| ranks > 2));
        }
    }
    rows
}

impl AllReduce {
    pub fn symbol(&self) -> String {
        match self {
            AllReduce::OneShot { element, ranks } => format!("allreduce_oneshot_{}_n{ranks}", element.name()),
            AllReduce::TwoShot { element, ranks, chunks } => {
                format!("allreduce_twoshot_{}_n{ranks}_c{chunks}", element.name())
            }
        }
    }

    pub fn device_type(&self) -> String {
        match self {
            AllReduce::OneShot { element, ranks } => {
                format!("oxmoe::AllReduceOneShot<{}, {ranks}>", element.device_type())
            }
            AllReduce::TwoShot { element, ranks, chunks } => {
                format!("oxmoe::AllReduceTwoShot<{}, {ranks}, {chunks}>", element.device_type())
            }
        }
    }

    pub fn header(&self) -> &'static str {
        match self {
            AllReduce::OneShot { .. } => "allreduce/oneshot.cuh",
            AllReduce::TwoShot { .. } => "allreduce/twoshot.cuh",
        }
    }

    /// The most that a launch may ask for.
    pub fn threads(&self) -> u32 {
        match self {
            AllReduce::OneShot { .. } => 1024,
            AllReduce::TwoShot { .. } => 512,
        }
    }

    /// With all of `threads`: leaves 64 registers a thread, 128 where it holds four chunks.
    pub fn ctas_per_multiprocessor(&self) -> u32 {
        match self {
            AllReduce::TwoShot { chunks: 2, .. } => 2,
            _ => 1,
        }
    }
}
