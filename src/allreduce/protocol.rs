//! The protocol between GPUs, as pure functions: the layout of a rank's workspace, what is sent, when a slot is full, which of the two
//! algorithms a message takes, and the words that name a call and a fault. `model.rs` plays it against every order in which stores can
//! become visible.
//!
//! Data is its own flag: a slot is empty until its peer's data is in it, and its reader empties it again in the same call, after reading.
//! For each call and pair of ranks there is one header chunk, which names the call's shape, and the data chunks.
//!
//! Two buffers by epoch parity are enough. A peer writes call e + 2 only after it got our part of call e + 1. We sent that part after our
//! call e had ended with its slots empty. Three rules are necessary for this, and the model fails without any of them. Every call, also one
//! of no tokens, exchanges headers. Emptying stores are visible before the next call begins (the end of a kernel). Ranks make the same
//! calls in the same order. Sums that owners send out need one buffer: an owner sends a sum of call e + 1 only after it got our part of it.
//!
//! A wait for a sum that this rank itself makes names no peer: the thread that makes the sum reports the peer that it waits for. Kernels
//! let every wait for a sum last two deadlines. So the thread that makes the sum, which waits too, reports first.
//!
//! A rank whose wait has ended goes on with the calls that its host has launched already, while a peer may still be in the call of the
//! fault. So two more rules hold after a fault. A rank that knows of one sends nothing in later calls: with two turns the next but one call
//! has the slots of the fault's call. And a sum is sent only if all of its parts were there.

use crate::params::Dtype;

/// Largest group that the layout serves.
pub const MAX_RANKS: usize = 8;
/// Bytes of a chunk: the widest store of a thread.
pub const CHUNK_BYTES: u64 = 16;
/// Slots and ranges start at multiples of a memory line: stores that straddle lines cost 7 % of the whole two-shot (H200).
pub const LINE_BYTES: u64 = 128;
/// Bytes of the control words at the start of a workspace: error word, epoch, arrivals, and two header chunks for each rank.
pub const CONTROL_BYTES: u64 = 1024;

/// Sixteen bytes as the wire sees them. PTX promises that each 8-byte half arrives whole, but not that both halves arrive together.
pub type Chunk = [u32; 4];

/// The word that an empty slot holds, written by memset(0xFF). It reads as two NaNs in bf16 or f16, and as one NaN in f32. No conversion or
/// addition produces these NaNs (they give 0x7FFF and 0x7FFFFFFF), so only a caller's raw bits can hold the word. Zeros of either sign and
/// subnormals are ordinary values.
pub const EMPTY: u32 = 0xFFFF_FFFF;
/// The word that is sent in place of EMPTY. It is a NaN as well (two NaNs in 16-bit types).
pub const OTHER_NAN: u32 = 0x7FFF_FFFF;

/// The words that are tested: one word of each half.
const TESTED: [usize; 2] = [0, 2];

/// A chunk that never looks empty. Its values are those of `chunk`, except for the payload of a NaN.
pub fn sendable(mut chunk: Chunk) -> Chunk {
    for word in TESTED {
        if chunk[word] == EMPTY {
            chunk[word] = OTHER_NAN;
        }
    }
    chunk
}

/// Whether both halves have arrived. It compares bits, because a comparison of floats could take a flushed subnormal or a zero for
/// something else.
pub fn is_written(chunk: Chunk) -> bool {
    TESTED.iter().all(|&word| chunk[word] != EMPTY)
}

/// The number of the slot, of the two of a pair, that a call uses.
pub fn parity(epoch: u32) -> usize {
    (epoch & 1) as usize
}

/// How a message travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Every rank sends everything to every rank: (N - 1) x bytes, one trip.
    OneShot,
    /// Ranks send ranges to their owners, and owners send sums back: 2 (N - 1) / N x bytes, two trips.
    TwoShot,
}

/// The algorithm of a message: a function of bytes and ranks alone, so that all ranks agree. Two ranks send the same bytes either way and
/// save a trip in one shot. With four ranks, 560 KB took the same time either way, smaller messages were faster in one shot, and 672 KB in
/// two (H200). For eight ranks the limit was not measured but scaled by the bytes on the wire.
pub fn algorithm(bytes: u64, ranks: usize) -> Algorithm {
    if bytes <= oneshot_limit(ranks) {
        Algorithm::OneShot
    } else {
        Algorithm::TwoShot
    }
}

fn oneshot_limit(ranks: usize) -> u64 {
    match ranks {
        0..=2 => u64::MAX,
        3..=4 => 600 << 10,
        _ => 256 << 10,
    }
}

/// Byte offsets in a rank's workspace: control, one-shot slots [2][ranks], scatter slots [2][ranks], gathered sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub ranks: usize,
    /// Bytes of one slot of one-shot: the largest one-shot message.
    pub oneshot: u64,
    /// Bytes of the gathered sums: the largest two-shot message, or 0 if there is none.
    pub twoshot: u64,
}

impl Layout {
    /// The layout for messages of up to `bytes`. `force_oneshot` makes room for all of them in one shot.
    pub fn new(bytes: u64, ranks: usize, force_oneshot: bool) -> Layout {
        let oneshot = if force_oneshot { bytes } else { bytes.min(oneshot_limit(ranks)) };
        let twoshot = if algorithm(bytes, ranks) == Algorithm::TwoShot { bytes } else { 0 };
        Layout {
            ranks,
            oneshot: oneshot.next_multiple_of(LINE_BYTES),
            twoshot: twoshot.next_multiple_of(LINE_BYTES * ranks as u64),
        }
    }

    /// The offset of `sender`'s header of a call.
    pub fn header(&self, epoch: u32, sender: usize) -> u64 {
        LINE_BYTES + (parity(epoch) * MAX_RANKS + sender) as u64 * CHUNK_BYTES
    }

    pub fn oneshot_slot(&self, epoch: u32, sender: usize) -> u64 {
        CONTROL_BYTES + (parity(epoch) * self.ranks + sender) as u64 * self.oneshot
    }

    pub fn scatter_slot(&self, epoch: u32, sender: usize) -> u64 {
        let first = CONTROL_BYTES + 2 * self.ranks as u64 * self.oneshot;
        first + (parity(epoch) * self.ranks + sender) as u64 * (self.twoshot / self.ranks as u64)
    }

    pub fn gathered(&self) -> u64 {
        CONTROL_BYTES + 2 * self.ranks as u64 * self.oneshot + 2 * self.twoshot
    }

    /// Bytes of the whole workspace.
    pub fn bytes(&self) -> u64 {
        self.gathered() + self.twoshot
    }
}

/// Chunks that `owner` sums in two-shot. They are flat ranges of whole lines; the last ones are shorter or empty.
pub fn owned(chunks: u64, ranks: usize, owner: usize) -> std::ops::Range<u64> {
    let range = chunks.div_ceil(ranks as u64).next_multiple_of(LINE_BYTES / CHUNK_BYTES);
    (owner as u64 * range).min(chunks)..((owner as u64 + 1) * range).min(chunks)
}

/// The shape that every rank must agree on. One word holds it and travels in the header, so ranks that disagree report it instead of
/// waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub pattern: u8,
    pub dtype: Dtype,
    pub tokens: u32,
    pub hidden: u32,
}

impl Shape {
    /// The largest hidden size that fits into the word.
    pub const MAX_HIDDEN: i64 = (1 << 24) - 1;

    pub fn word(&self) -> u64 {
        (self.tokens as u64) << 32
            | (self.hidden as u64 & 0xFF_FFFF) << 8
            | (self.dtype.repr as u64 & 3) << 6
            | (self.pattern as u64 & 0x3F)
    }

    pub fn from_word(word: u64) -> Shape {
        Shape {
            pattern: (word & 0x3F) as u8,
            dtype: Dtype { repr: (word >> 6 & 3) as i32 },
            tokens: (word >> 32) as u32,
            hidden: (word >> 8 & 0xFF_FFFF) as u32,
        }
    }
}

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Nothing came within the deadline.
    Timeout = 1,
    /// A peer's header names another shape.
    Mismatch = 2,
}

/// The first fault of a workspace, in the word that the finder writes into every rank's error word. The fault stays: after it slots are not
/// empty, so the workspace must be made anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub kind: FaultKind,
    pub finder: u8,
    pub peer: u8,
    pub epoch: u32,
}

impl Fault {
    /// The word of this fault, which is never 0.
    pub fn word(&self) -> u64 {
        (self.kind as u64) << 56 | (self.finder as u64) << 48 | (self.peer as u64) << 40 | self.epoch as u64
    }

    /// The fault that a word names. None for 0 (no fault) and for words that name no fault.
    pub fn from_word(word: u64) -> Option<Fault> {
        let kind = match word >> 56 {
            1 => FaultKind::Timeout,
            2 => FaultKind::Mismatch,
            _ => return None,
        };
        Some(Fault { kind, finder: (word >> 48) as u8, peer: (word >> 40) as u8, epoch: word as u32 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_empty_pattern_is_replaced_and_stays_nan() {
        for word in [0, 0x8000_8000, 0x8000_0000, 1, 0x8001_8001, 0x7F80_FF80, 0xFFFF_7FFF, 0xFFFF_FFFE, 0x7FFF_FFFF] {
            assert_eq!(sendable([word; 4]), [word; 4]);
            assert!(is_written([word; 4]));
        }
        let sent = sendable([EMPTY; 4]);
        assert!(is_written(sent));
        for word in sent {
            assert!(f32::from_bits(word).is_nan());
            for half in [word as u16, (word >> 16) as u16] {
                assert!(half::bf16::from_bits(half).is_nan() && half::f16::from_bits(half).is_nan());
            }
        }
        // One half has arrived, the other has not.
        assert!(!is_written([1, 1, EMPTY, EMPTY]) && !is_written([EMPTY, EMPTY, 1, 1]) && !is_written([EMPTY; 4]));
        // Words that are not tested may hold EMPTY.
        assert_eq!(sendable([1, EMPTY, 2, EMPTY]), [1, EMPTY, 2, EMPTY]);
    }

    #[test]
    fn conversions_never_give_the_empty_pattern() {
        for bits in (0..=u32::MAX).step_by(65_521).chain([EMPTY, 0xFFFF_0000, 0x7F80_0001, 0xFFC0_0000]) {
            let x = f32::from_bits(bits);
            let sum = crate::cpu::canonical(x + -0.0);
            assert_ne!(sum.to_bits(), EMPTY);
            assert_ne!(half::bf16::from_f32(sum).to_bits(), 0xFFFF);
            assert_ne!(half::f16::from_f32(sum).to_bits(), 0xFFFF);
        }
    }

    #[test]
    fn slots_are_disjoint_and_start_lines() {
        for ranks in 2..=MAX_RANKS {
            for bytes in [0, 16, 5760, 448 << 10, 896 << 10, 28 << 20] {
                for force in [false, true] {
                    let layout = Layout::new(bytes, ranks, force);
                    let mut ranges = vec![(0, LINE_BYTES)];
                    for epoch in 0..2 {
                        for sender in 0..ranks {
                            ranges.push((layout.header(epoch, sender), CHUNK_BYTES));
                            ranges.push((layout.oneshot_slot(epoch, sender), layout.oneshot));
                            ranges.push((layout.scatter_slot(epoch, sender), layout.twoshot / ranks as u64));
                        }
                    }
                    ranges.push((layout.gathered(), layout.twoshot));
                    ranges.retain(|r| r.1 > 0);
                    ranges.sort();
                    assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{layout:?}");
                    let (last, size) = ranges[ranges.len() - 1];
                    assert!(last + size <= layout.bytes());
                    let slots = ranges.iter().filter(|r| r.0 >= CONTROL_BYTES);
                    assert!(slots.clone().all(|r| r.0 % LINE_BYTES == 0));
                    let room = if algorithm(bytes, ranks) == Algorithm::OneShot || force {
                        layout.oneshot
                    } else {
                        layout.twoshot
                    };
                    assert!(room >= bytes);
                    for owner in 0..ranks {
                        let part = owned(bytes / CHUNK_BYTES, ranks, owner);
                        assert!(
                            layout.twoshot == 0
                                || (part.end - part.start) * CHUNK_BYTES <= layout.twoshot / ranks as u64
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn every_chunk_has_one_owner() {
        for ranks in 2..=MAX_RANKS {
            for chunks in [0, 1, 7, 8, 9, 63, 64, 360, 896, 12345] {
                let ranges: Vec<_> = (0..ranks).map(|owner| owned(chunks, ranks, owner)).collect();
                assert!(ranges[0].start == 0 && ranges[ranks - 1].end == chunks);
                assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            }
        }
    }

    #[test]
    fn words_survive() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            for pattern in 0..=14 {
                let shape = Shape { pattern, dtype, tokens: u32::MAX - 7, hidden: Shape::MAX_HIDDEN as u32 };
                assert_eq!(Shape::from_word(shape.word()), shape);
            }
        }
        for kind in [FaultKind::Timeout, FaultKind::Mismatch] {
            let fault = Fault { kind, finder: 7, peer: 3, epoch: u32::MAX };
            assert_eq!(Fault::from_word(fault.word()), Some(fault));
        }
        assert_eq!(Fault::from_word(0), None);
    }

    #[test]
    fn the_algorithm_depends_on_bytes_and_ranks() {
        assert_eq!(algorithm(28 << 20, 2), Algorithm::OneShot);
        assert_eq!(algorithm(448 << 10, 4), Algorithm::OneShot);
        assert_eq!(algorithm(896 << 10, 4), Algorithm::TwoShot);
        assert_eq!(algorithm(896 << 10, 8), Algorithm::TwoShot);
    }
}
