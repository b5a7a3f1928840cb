//! Rules that every launch of a plan keeps to, for the tests of plans.

use _oxmoe::device::{Arch, Device};
use _oxmoe::kernel::AnyLaunch;
use _oxmoe::moe::plan::Workspace;
use _oxmoe::variants;
use _oxmoe::workspace::{Range, ALIGNMENT};

/// Checks that the device can run a launch. `say` tells whose launch it is.
pub fn assert_launch(l: &AnyLaunch, device: &Device, say: &dyn Fn() -> String) {
    assert!(l.variant.runs_on(device.arch.image()), "{}", say());
    assert!(l.grid >= 1 && l.grid <= i32::MAX as u32 && l.grid.is_multiple_of(l.cluster), "{}", say());
    assert!((32..=1024).contains(&l.block) && l.block.is_multiple_of(32), "{}", say());
    assert!(l.block <= l.variant.threads(), "{}", say());
    match l.variant.shared_bytes() {
        Some(bytes) => {
            assert_eq!((l.shared_bytes, l.block), (bytes, l.variant.threads()), "{}", say());
            assert!(bytes <= device.shared_bytes, "{}", say());
        }
        None => {
            let most = device.shared_bytes - variants::routing::STATIC_SHARED;
            assert!(l.shared_bytes <= most, "{}", say());
        }
    }
    assert!(l.cluster == 1 || device.arch >= Arch::SM90, "{}", say());
}

/// Every range of a workspace.
#[allow(dead_code)] // not all tests that have this module need it
pub fn ranges(w: &Workspace) -> [Range; 21] {
    [
        w.ids,
        w.weights,
        w.histogram,
        w.offsets,
        w.place_of_slot,
        w.slot_of_place,
        w.tiles,
        w.tile_count,
        w.counters,
        w.block_histogram,
        w.hidden,
        w.rows,
        w.x_codes,
        w.x_scales,
        w.hidden_codes,
        w.hidden_scales,
        w.hidden_e4m3,
        w.row_scales,
        w.x_rounded,
        w.down_tiles,
        w.down_tile_count,
    ]
}

/// Checks that ranges are aligned, overlap nothing, and end before the workspace does.
#[allow(dead_code)] // not all tests that have this module need it
pub fn assert_workspace(w: &Workspace, say: &dyn Fn() -> String) {
    let mut ranges = ranges(w);
    ranges.sort_unstable_by_key(|range| (range.offset, range.bytes));
    let mut end = 0;
    for range in ranges.iter().filter(|range| range.bytes > 0) {
        assert!(range.offset.is_multiple_of(ALIGNMENT) && range.offset >= end, "{range:?}: {w:?} {}", say());
        end = range.offset + range.bytes;
    }
    assert!(end <= w.bytes, "{w:?} {}", say());
}
