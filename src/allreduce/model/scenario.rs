//! The calls that ranks make, and the rules that tests break.

use crate::allreduce::protocol::Algorithm;

/// The kinds of a rank's slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Region {
    Header,
    OneShot,
    Scatter,
    Gathered,
}

/// One call as a rank makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Call {
    pub(super) chunks: usize,
    pub(super) algorithm: Algorithm,
}

pub(super) const fn one(chunks: usize) -> Call {
    Call { chunks, algorithm: Algorithm::OneShot }
}

pub(super) const fn two(chunks: usize) -> Call {
    Call { chunks, algorithm: Algorithm::TwoShot }
}

/// The protocol; every field is a rule that a test breaks.
#[derive(Clone, Copy)]
pub(super) struct Rules {
    /// A reader empties the slot it has read.
    pub(super) empties: bool,
    /// One-shot slots and headers take turns by epoch.
    pub(super) oneshot_turns: bool,
    /// Scatter slots take turns by epoch.
    pub(super) scatter_turns: bool,
    /// Emptying stores are visible before the next call begins.
    pub(super) drains: bool,
    /// A reader tests both halves of a chunk.
    pub(super) both_halves: bool,
    /// A sender replaces words that look empty before it sends them.
    pub(super) replaces: bool,
    /// Calls without tokens exchange headers too.
    pub(super) headers_always: bool,
    /// The epoch grows with every call.
    pub(super) epoch_grows: bool,
    /// Headers are compared.
    pub(super) compares: bool,
    /// A wait ends at its deadline.
    pub(super) deadline: bool,
    /// A rank that knows of a fault sends nothing in its later calls.
    pub(super) silent: bool,
    /// A thread that has given up its wait for the parts of a sum sends no sum.
    pub(super) whole_sums: bool,
}

pub(super) const PROTOCOL: Rules = Rules {
    empties: true,
    oneshot_turns: true,
    scatter_turns: true,
    drains: true,
    both_halves: true,
    replaces: true,
    headers_always: true,
    epoch_grows: true,
    compares: true,
    deadline: true,
    silent: true,
    whole_sums: true,
};

pub(super) struct Scenario {
    pub(super) rules: Rules,
    /// Calls of each rank, in order.
    pub(super) calls: Vec<Vec<Call>>,
    /// The rank that may die at any step.
    pub(super) killed: Option<usize>,
    /// Whether deadlines may fire at any poll, not only when nobody can go on. This plays a rank that is merely late.
    pub(super) hasty: bool,
    /// Chunks that one rank owns come in runs of this many: with a large one the last ranks own nothing.
    pub(super) run: usize,
    /// Whether chunks arrive whole. Scenarios in which the halves do not matter have fewer states then.
    pub(super) whole: bool,
}

impl Scenario {
    pub(super) fn new(ranks: usize, calls: &[Call]) -> Scenario {
        Scenario {
            rules: PROTOCOL,
            calls: vec![calls.to_vec(); ranks],
            killed: None,
            hasty: false,
            run: 1,
            whole: false,
        }
    }

    pub(super) fn breaking(ranks: usize, calls: &[Call], change: impl Fn(&mut Rules)) -> Scenario {
        let mut scenario = Scenario::new(ranks, calls);
        change(&mut scenario.rules);
        scenario
    }

    pub(super) fn ranks(&self) -> usize {
        self.calls.len()
    }

    /// Halves of a slot. A header is one 8-byte word; a chunk of data has two.
    pub(super) fn halves(&self, region: Region) -> usize {
        if self.whole || region == Region::Header {
            1
        } else {
            2
        }
    }

    pub(super) fn owner(&self, chunk: usize) -> usize {
        chunk / self.run % self.ranks()
    }
}
