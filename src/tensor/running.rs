//! The memory that this process's CPU calls use at the moment.
//!
//! A CPU call lets go of the interpreter lock, so another thread may begin a call meanwhile. If that one had the same workspace, each would
//! read the other's schedule and leave its tensors. So a call notes what it reads and writes, and one that would disturb another is an
//! error.

use super::Span;
use crate::contract;
use crate::error::Result;
use crate::fork::PerProcess;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Memory that a call reads or writes.
#[derive(Clone, Copy, Debug)]
pub struct Use {
    pub span: Span,
    pub written: bool,
}

#[derive(Default)]
struct Calls {
    running: Vec<(u64, Vec<Use>)>,
    next: u64,
}

fn calls() -> MutexGuard<'static, Calls> {
    static CALLS: PerProcess<Mutex<Calls>> = PerProcess::new();
    // The lock is held for a few comparisons, which leave the list whole.
    CALLS.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call that runs, until this is dropped.
#[derive(Debug)]
pub struct Running(u64);

impl Drop for Running {
    fn drop(&mut self) {
        calls().running.retain(|(number, _)| *number != self.0);
    }
}

/// Notes a call that begins now. It is an error if it writes what another call reads or writes, or reads what another call writes.
pub fn begin(uses: Vec<Use>) -> Result<Running> {
    let mut calls = calls();
    for own in &uses {
        let mut others = calls.running.iter().flat_map(|(_, uses)| uses);
        if let Some(other) = others.find(|other| (own.written || other.written) && own.span.overlaps(&other.span)) {
            let does = if other.written { "writes" } else { "reads" };
            contract!(
                "{}: a call on another thread {does} this memory now, as its {}; calls that run at the same time need a workspace and outputs \
                 each",
                own.span.operand,
                other.span.operand
            );
        }
    }
    let number = calls.next;
    calls.next += 1;
    calls.running.push((number, uses));
    Ok(Running(number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Place;

    /// Addresses that no other test uses.
    const BASE: usize = 1 << 40;

    fn a_use(operand: &'static str, start: usize, bytes: usize, written: bool) -> Use {
        Use { span: Span::new(operand, Place::Cpu, (BASE + start) as *const u8, bytes), written }
    }

    #[test]
    fn calls_that_disturb_each_other_are_refused() {
        let first = begin(vec![a_use("x", 0, 8, false), a_use("workspace", 8, 8, true)]).unwrap();
        // Both may read.
        drop(begin(vec![a_use("x", 0, 8, false), a_use("out", 16, 8, true)]).unwrap());
        for (again, text) in [
            (
                a_use("workspace", 15, 8, true),
                "workspace: a call on another thread writes this memory now, as its workspace;",
            ),
            (a_use("x", 12, 1, false), "x: a call on another thread writes this memory now, as its workspace;"),
            (a_use("out", 7, 1, true), "out: a call on another thread reads this memory now, as its x;"),
        ] {
            let error = begin(vec![a_use("b2", 64, 8, false), again]).unwrap_err().to_string();
            assert!(error.starts_with(text), "{error}");
        }
        drop(first);
        begin(vec![a_use("workspace", 0, 32, true)]).unwrap();
    }
}
