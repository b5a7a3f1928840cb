//! The protocol played step by step: ranks, their slots, and stores that become visible in any order, half a chunk at a time.
//!
//! A step makes one store visible, or lets one thread read one half of a slot. Everything else follows at once: what a thread sends can
//! wait in flight for as long as it likes, so sending early loses no behaviour. Every received half is compared with what its sender had,
//! so lost, stale and mixed data all show. A state in which nobody can go on is a hang, and there the deadline fires.
//!
//! Two ranks are played exhaustively, four and eight at random. Every rule of the protocol can be broken, and each broken rule must be
//! found out.

use super::protocol::{is_written, parity, sendable, Algorithm, Chunk, Fault, FaultKind, EMPTY};
use std::collections::hash_map::DefaultHasher;
use std::collections::HashSet;
use std::hash::{Hash, Hasher};

mod scenario;
mod tests;

use scenario::{Call, Region, Scenario};

/// Most chunks of a call.
const CHUNKS: usize = 4;
/// The first epoch of a scenario. From it, epochs wrap in the middle of a test.
const FIRST_EPOCH: u32 = u32::MAX - 1;

/// Half a chunk in some rank's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Cell {
    region: Region,
    turn: usize,
    sender: usize,
    chunk: usize,
    half: usize,
}

/// A store that is on its way.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Store {
    owner: usize,
    writer: usize,
    /// The cell that the store writes, or None for the error word, which the first store wins.
    cell: Option<Cell>,
    value: u64,
}

/// A thread that waits for slots. It waits for all peers for a header, a one-shot chunk or a sum to be made, and for the owner for a sum.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Thread {
    region: Region,
    chunk: usize,
    /// The ranks whose slots are still to be read. The first entry is the next to be read.
    from: Vec<usize>,
    /// The word of the first half, once it was read.
    first: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Status {
    Running,
    Done,
    Failed(u64),
    Dead,
}

#[derive(Clone, Hash)]
struct Rank {
    status: Status,
    call: usize,
    epoch: u32,
    threads: Vec<Thread>,
    /// The cells that are not empty, in order of cells.
    memory: Vec<(Cell, u32)>,
    error: u64,
}

impl Rank {
    fn load(&self, cell: Cell) -> u32 {
        self.memory.binary_search_by_key(&cell, |entry| entry.0).map_or(EMPTY, |i| self.memory[i].1)
    }

    fn store(&mut self, cell: Cell, word: u32) {
        match (self.memory.binary_search_by_key(&cell, |entry| entry.0), word) {
            (Ok(i), EMPTY) => {
                self.memory.remove(i);
            }
            (Ok(i), _) => self.memory[i].1 = word,
            (Err(_), EMPTY) => {}
            (Err(i), _) => self.memory.insert(i, (cell, word)),
        }
    }
}

#[derive(Clone, Hash)]
struct State {
    ranks: Vec<Rank>,
    flying: Vec<Store>,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Arrive(usize),
    Vanish(usize),
    Read(usize, usize),
    Notice(usize),
    TimeOut(usize, usize),
    Die(usize),
}

/// A description of what went wrong.
type Violation = String;

/// The word that one half of a rank's input holds; some inputs are raw bits that look empty.
fn input(rank: usize, call: usize, chunk: usize) -> u32 {
    if (rank + call + chunk).is_multiple_of(3) {
        return EMPTY;
    }
    0x1000_0000 | (call << 16 | rank << 8 | chunk) as u32
}

fn sum(call: usize, chunk: usize) -> u32 {
    0x2000_0000 | (call << 16 | chunk) as u32
}

/// The word of a sum of which a part is missing: a NaN.
const UNFINISHED: u32 = 0x7FFF_7FFF;

fn header(call: Call) -> u32 {
    0x3000_0000 | (call.chunks << 4) as u32 | (call.algorithm == Algorithm::TwoShot) as u32
}

fn chunk_of(word: u32) -> Chunk {
    [word; 4]
}

impl State {
    fn new(scenario: &Scenario) -> State {
        let ranks = scenario.ranks();
        let rank = Rank {
            status: Status::Running,
            call: 0,
            epoch: FIRST_EPOCH,
            threads: Vec::new(),
            memory: Vec::new(),
            error: 0,
        };
        let mut state = State { ranks: vec![rank; ranks], flying: Vec::new() };
        for rank in 0..ranks {
            state.begin(scenario, rank);
        }
        state
    }

    fn turn(&self, scenario: &Scenario, rank: usize, region: Region) -> usize {
        let turns = match region {
            Region::Header | Region::OneShot => scenario.rules.oneshot_turns,
            Region::Scatter => scenario.rules.scatter_turns,
            Region::Gathered => false,
        };
        if turns {
            parity(self.ranks[rank].epoch)
        } else {
            0
        }
    }

    /// Sends a chunk of one word to `owner`.
    fn send(&mut self, scenario: &Scenario, place: (Region, usize), from: usize, owner: usize, word: u32) {
        let (region, chunk) = place;
        let word = if scenario.rules.replaces { sendable(chunk_of(word))[0] } else { word };
        let turn = self.turn(scenario, from, region);
        for half in 0..scenario.halves(region) {
            // Sums lie where they belong in the message, whoever sent them.
            let sender = if region == Region::Gathered { 0 } else { from };
            let cell = Some(Cell { region, turn, sender, chunk, half });
            self.flying.push(Store { owner, writer: from, cell, value: word as u64 });
        }
    }

    /// Starts a rank's next call: everything it can send without waiting is in flight.
    fn begin(&mut self, scenario: &Scenario, rank: usize) {
        let Some(&call) = scenario.calls[rank].get(self.ranks[rank].call) else {
            self.ranks[rank].status = Status::Done;
            return;
        };
        let peers: Vec<usize> = (0..scenario.ranks()).filter(|&peer| peer != rank).collect();
        let mut threads = Vec::new();
        let mut wait =
            |region, chunk, from: &[usize]| threads.push(Thread { region, chunk, from: from.to_vec(), first: None });
        if call.chunks > 0 || scenario.rules.headers_always {
            wait(Region::Header, 0, &peers);
        }
        for chunk in 0..call.chunks {
            match call.algorithm {
                Algorithm::OneShot => wait(Region::OneShot, chunk, &peers),
                Algorithm::TwoShot => {
                    let owner = scenario.owner(chunk);
                    if owner == rank {
                        wait(Region::Scatter, chunk, &peers);
                    }
                    wait(Region::Gathered, chunk, &[owner]);
                }
            }
        }
        self.send_parts(scenario, rank, self.ranks[rank].call, call);
        self.ranks[rank].threads = threads;
        self.end_if_finished(scenario, rank);
    }

    /// Sends what a call sends without waiting: headers and this rank's own rows.
    fn send_parts(&mut self, scenario: &Scenario, rank: usize, at: usize, call: Call) {
        let peers = || (0..scenario.ranks()).filter(move |&peer| peer != rank);
        if call.chunks > 0 || scenario.rules.headers_always {
            for peer in peers() {
                self.send(scenario, (Region::Header, 0), rank, peer, header(call));
            }
        }
        for chunk in 0..call.chunks {
            let word = input(rank, at, chunk);
            match call.algorithm {
                Algorithm::OneShot => {
                    for peer in peers() {
                        self.send(scenario, (Region::OneShot, chunk), rank, peer, word);
                    }
                }
                Algorithm::TwoShot if scenario.owner(chunk) != rank => {
                    self.send(scenario, (Region::Scatter, chunk), rank, scenario.owner(chunk), word);
                }
                Algorithm::TwoShot => {}
            }
        }
    }

    /// Ends a rank's call with a fault. Its stream goes on with the calls that were launched behind it; every wait in them ends at once.
    fn leave(&mut self, scenario: &Scenario, rank: usize, word: u64) {
        self.ranks[rank].status = Status::Failed(word);
        let call = self.ranks[rank].call;
        for thread in std::mem::take(&mut self.ranks[rank].threads) {
            if thread.region == Region::Scatter && !scenario.rules.whole_sums {
                for owner in 0..scenario.ranks() {
                    self.send(scenario, (Region::Gathered, thread.chunk), rank, owner, UNFINISHED);
                }
            }
        }
        if !scenario.rules.silent {
            for (at, &later) in scenario.calls[rank].iter().enumerate().skip(call + 1) {
                self.ranks[rank].epoch = self.ranks[rank].epoch.wrapping_add(1);
                self.send_parts(scenario, rank, at, later);
            }
        }
    }

    fn end_if_finished(&mut self, scenario: &Scenario, rank: usize) {
        let own = |store: &Store| store.writer == rank && store.owner == rank;
        let drained = !scenario.rules.drains || !self.flying.iter().any(own);
        let this = &mut self.ranks[rank];
        if this.status == Status::Running && this.threads.is_empty() && drained {
            this.call += 1;
            this.epoch = if scenario.rules.epoch_grows { this.epoch.wrapping_add(1) } else { this.epoch };
            self.begin(scenario, rank);
        }
    }

    fn cell(&self, scenario: &Scenario, rank: usize, thread: &Thread, half: usize) -> Cell {
        let turn = self.turn(scenario, rank, thread.region);
        let sender = if thread.region == Region::Gathered { 0 } else { thread.from[0] };
        Cell { region: thread.region, turn, sender, chunk: thread.chunk, half }
    }

    fn load(&self, scenario: &Scenario, rank: usize, thread: &Thread, half: usize) -> u32 {
        self.ranks[rank].load(self.cell(scenario, rank, thread, half))
    }

    /// The word of one half as a whole chunk would show it to `is_written`.
    fn looks_written(scenario: &Scenario, half: usize, word: u32) -> bool {
        is_written(chunk_of(word)) || (half == 1 && !scenario.rules.both_halves)
    }

    fn steps(&self, scenario: &Scenario) -> Vec<Step> {
        let mut steps = Vec::new();
        for (i, store) in self.flying.iter().enumerate() {
            // The stores of one writer to one place stay in order. They are neighbours because the list is sorted.
            let place = |s: &Store| (s.owner, s.writer, s.cell);
            if i == 0 || place(&self.flying[i - 1]) != place(store) {
                steps.push(Step::Arrive(i));
            }
            if self.ranks[store.writer].status == Status::Dead {
                steps.push(Step::Vanish(i));
            }
        }
        let mut waiting = Vec::new();
        for (r, rank) in self.ranks.iter().enumerate().filter(|(_, rank)| rank.status == Status::Running) {
            for (t, thread) in rank.threads.iter().enumerate() {
                let half = thread.first.is_some() as usize;
                // A poll that finds nothing changes nothing, unless it starts over.
                if half == 1 || Self::looks_written(scenario, 0, self.load(scenario, r, thread, 0)) {
                    steps.push(Step::Read(r, t));
                }
                // A thread that waits for a sum of its own rank waits for the reducing thread of that rank, which knows the peer.
                if thread.from[0] != r {
                    waiting.push(Step::TimeOut(r, t));
                }
            }
            if rank.error != 0 {
                steps.push(Step::Notice(r));
            }
            if scenario.killed == Some(r) {
                steps.push(Step::Die(r));
            }
        }
        let stuck = self.at_rest(scenario, &steps);
        if scenario.rules.deadline && (scenario.hasty || stuck) {
            steps.extend(waiting);
        }
        steps
    }

    /// Whether these steps lead nowhere: deaths, and polls of a slot of which one half never came.
    fn at_rest(&self, scenario: &Scenario, steps: &[Step]) -> bool {
        steps.iter().all(|step| match *step {
            Step::Die(_) => true,
            Step::Read(rank, thread) => {
                let thread = &self.ranks[rank].threads[thread];
                let last = scenario.halves(thread.region) - 1;
                !Self::looks_written(scenario, last, self.load(scenario, rank, thread, last))
            }
            _ => false,
        })
    }

    fn fail(&mut self, scenario: &Scenario, rank: usize, peer: usize, kind: FaultKind) {
        let fault = Fault { kind, finder: rank as u8, peer: peer as u8, epoch: self.ranks[rank].epoch };
        for owner in (0..self.ranks.len()).filter(|&owner| owner != rank) {
            self.flying.push(Store { owner, writer: rank, cell: None, value: fault.word() });
        }
        let word = if self.ranks[rank].error == 0 { fault.word() } else { self.ranks[rank].error };
        self.ranks[rank].error = word;
        self.leave(scenario, rank, word);
    }

    fn take(&mut self, scenario: &Scenario, step: Step) -> Result<(), Violation> {
        match step {
            Step::Arrive(i) => {
                let store = self.flying.remove(i);
                let owner = &mut self.ranks[store.owner];
                match store.cell {
                    Some(cell) => owner.store(cell, store.value as u32),
                    None if owner.error == 0 => owner.error = store.value,
                    None => {}
                }
                if store.owner == store.writer {
                    self.end_if_finished(scenario, store.writer);
                }
            }
            Step::Vanish(i) => {
                self.flying.remove(i);
            }
            Step::Notice(rank) => {
                self.leave(scenario, rank, self.ranks[rank].error);
            }
            Step::TimeOut(rank, thread) => {
                let peer = self.ranks[rank].threads[thread].from[0];
                self.fail(scenario, rank, peer, FaultKind::Timeout);
            }
            Step::Die(rank) => {
                self.ranks[rank].status = Status::Dead;
                self.ranks[rank].threads.clear();
            }
            Step::Read(rank, thread) => self.read(scenario, rank, thread)?,
        }
        // States that differ only in the order of unrelated stores become one state. The sort keeps one writer's stores to one place in
        // order.
        self.flying.sort_by_key(|store| (store.owner, store.writer, store.cell));
        Ok(())
    }

    fn read(&mut self, scenario: &Scenario, rank: usize, at: usize) -> Result<(), Violation> {
        let thread = self.ranks[rank].threads[at].clone();
        let half = thread.first.is_some() as usize;
        let word = self.load(scenario, rank, &thread, half);
        if !Self::looks_written(scenario, half, word) {
            self.ranks[rank].threads[at].first = None;
            return Ok(());
        }
        if thread.first.is_none() && scenario.halves(thread.region) == 2 {
            self.ranks[rank].threads[at].first = Some(word);
            return Ok(());
        }
        let first = thread.first.unwrap_or(word);
        let (call, peer) = (self.ranks[rank].call, thread.from[0]);
        let own = header(scenario.calls[rank][call]);
        let expected = match thread.region {
            Region::Header => own,
            Region::OneShot | Region::Scatter => sendable(chunk_of(input(peer, call, thread.chunk)))[0],
            Region::Gathered => sum(call, thread.chunk),
        };
        let header_taken = thread.region == Region::Header && !scenario.rules.compares;
        if thread.region == Region::Header && !header_taken && (first, word) != (own, own) {
            // A header that is not another call's whole header is data that came apart.
            let known = scenario.calls[peer].get(call).map(|&theirs| header(theirs));
            if known != Some(first) || first != word {
                return Err(format!("rank {rank}, call {call}: header {first:x} {word:x} of rank {peer}"));
            }
            self.fail(scenario, rank, peer, FaultKind::Mismatch);
            return Ok(());
        }
        if !header_taken && (first, word) != (expected, expected) {
            let what = format!("{:?} chunk {} of rank {peer}", thread.region, thread.chunk);
            return Err(format!("rank {rank}, call {call}: {what}: got {first:x} {word:x}, expected {expected:x}"));
        }
        if scenario.rules.empties {
            for half in 0..scenario.halves(thread.region) {
                let cell = Some(self.cell(scenario, rank, &thread, half));
                self.flying.push(Store { owner: rank, writer: rank, cell, value: EMPTY as u64 });
            }
        }
        let waiting = &mut self.ranks[rank].threads[at];
        waiting.from.remove(0);
        waiting.first = None;
        if waiting.from.is_empty() {
            self.ranks[rank].threads.remove(at);
            if thread.region == Region::Scatter {
                for owner in 0..scenario.ranks() {
                    self.send(scenario, (Region::Gathered, thread.chunk), rank, owner, sum(call, thread.chunk));
                }
            }
            self.end_if_finished(scenario, rank);
        }
        Ok(())
    }

    /// Judges a state in which nothing can happen any more.
    fn verdict(&self, scenario: &Scenario) -> Result<(), Violation> {
        let agree = scenario.calls.iter().all(|calls| calls == &scenario.calls[0]);
        for (r, rank) in self.ranks.iter().enumerate() {
            match rank.status {
                Status::Running => {
                    return Err(format!("rank {r} hangs in call {}, waiting for {:?}", rank.call, rank.threads))
                }
                Status::Dead => {}
                Status::Done if agree => {}
                Status::Done => return Err(format!("rank {r} took no notice of another shape")),
                Status::Failed(word) => {
                    let Some(fault) = Fault::from_word(word) else { return Err(format!("rank {r}: fault {word:x}")) };
                    if fault.finder == fault.peer || fault.epoch.wrapping_sub(FIRST_EPOCH) > 8 {
                        return Err(format!("rank {r}: {fault:?}"));
                    }
                    let cause = if agree {
                        scenario.killed.is_some() || scenario.hasty
                    } else {
                        fault.kind == FaultKind::Mismatch
                    };
                    if !cause {
                        return Err(format!("rank {r} failed without a cause: {fault:?}"));
                    }
                }
            }
        }
        Ok(())
    }

    fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }
}

/// Plays every order of steps, and gives the number of different states.
fn exhaust(scenario: &Scenario) -> Result<usize, Violation> {
    let first = State::new(scenario);
    let mut seen = HashSet::from([first.fingerprint()]);
    let mut open = vec![first];
    while let Some(state) = open.pop() {
        let steps = state.steps(scenario);
        if state.at_rest(scenario, &steps) {
            state.verdict(scenario)?;
        }
        for step in steps {
            let mut next = state.clone();
            next.take(scenario, step)?;
            if seen.insert(next.fingerprint()) {
                open.push(next);
            }
        }
    }
    Ok(seen.len())
}

/// xorshift64*: a reproducible generator without a dependency.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % n
    }
}

/// Plays one random order of steps, with a rank that is slow to compute and one whose stores travel slowly.
fn wander(scenario: &Scenario, seed: u64) -> Result<(), Violation> {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let (slow, far) = (random.below(scenario.ranks()), random.below(scenario.ranks()));
    let rare = [1, 8, 64][random.below(3)];
    let mut state = State::new(scenario);
    loop {
        let steps = state.steps(scenario);
        if state.at_rest(scenario, &steps) {
            return state.verdict(scenario).map_err(|text| format!("seed {seed}: {text}"));
        }
        let mut step = steps[random.below(steps.len())];
        for _ in 0..8 {
            let held_back = match step {
                Step::Read(rank, _) => rank == slow && random.below(rare) > 0,
                Step::Arrive(i) => state.flying[i].writer == far && random.below(rare) > 0,
                Step::TimeOut(..) | Step::Die(_) => random.below(200) > 0,
                _ => false,
            };
            if !held_back {
                break;
            }
            step = steps[random.below(steps.len())];
        }
        state.take(scenario, step).map_err(|text| format!("seed {seed}: {text}"))?;
    }
}
