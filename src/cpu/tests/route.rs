use super::{Random, Routed};

fn check(ids: &[i64], top_k: usize, experts: usize, first_expert: i32, tile_tokens: i32) {
    let narrow: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
    let sizes = [ids.len(), top_k, experts];
    for r in [
        Routed::call(ids.as_ptr().cast(), true, sizes, first_expert, tile_tokens),
        Routed::call(narrow.as_ptr().cast(), false, sizes, first_expert, tile_tokens),
    ] {
        // The expected order is a stable sort of the slots that have a local expert.
        let local = |id: i64| id - i64::from(first_expert);
        let mut order: Vec<usize> = (0..ids.len()).filter(|&s| (0..experts as i64).contains(&local(ids[s]))).collect();
        order.sort_by_key(|&s| ids[s]);
        let placed = order.len();
        assert_eq!(r.slot_of_place[..placed], order.iter().map(|&s| s as i32).collect::<Vec<_>>());
        assert!(r.slot_of_place[placed..].iter().all(|&s| s == -1));
        for slot in 0..ids.len() {
            let place = order.iter().position(|&s| s == slot).map_or(-1, |p| p as i32);
            assert_eq!(r.place_of_slot[slot], place);
        }
        let mut tiles = r.tiles.iter();
        for e in 0..experts {
            let count = order.iter().filter(|&&s| local(ids[s]) == e as i64).count() as i32;
            let first = order.iter().filter(|&&s| local(ids[s]) < e as i64).count() as i32;
            assert_eq!((r.histogram[e], r.offsets[e]), (count, first));
            // The expected tiles are as few as hold the slots, cut evenly in steps of 16, the longer ones first.
            let parts = count.unsigned_abs().div_ceil(tile_tokens.unsigned_abs());
            let (mut done, mut steps_before) = (0, i32::MAX);
            for part in 0..parts {
                let tile = tiles.next().expect("a tile for every part");
                let steps = (tile.count + 15) / 16;
                assert_eq!((tile.expert, tile.first), (e as i32, first + done));
                assert!(0 < tile.count && tile.count <= tile_tokens);
                assert!(part + 1 == parts || tile.count % 16 == 0);
                let (left, tiles_left) = ((count - done + 15) / 16, (parts - part) as i32);
                assert!(steps <= steps_before && steps == (left + tiles_left - 1) / tiles_left);
                steps_before = steps;
                done += tile.count;
            }
            assert_eq!(done, count);
        }
        assert_eq!(r.offsets[experts], placed as i32);
        assert_eq!(r.tile_count as usize, r.tiles.len() - tiles.len());
        assert!(tiles.all(|t| t.expert == -1));
    }
}

#[test]
fn random_ids() {
    let mut random = Random(1);
    for (tokens, top_k, experts, tile_tokens) in
        [(1, 8, 128, 16), (7, 2, 8, 16), (64, 4, 16, 16), (301, 8, 5, 128), (900, 2, 3, 256), (901, 2, 3, 192)]
    {
        let ids: Vec<i64> = (0..tokens * top_k).map(|_| random.below(experts + 1) as i64 - 1).collect();
        check(&ids, top_k, experts, 0, tile_tokens);
    }
}

#[test]
fn ids_outside_are_skipped() {
    check(&[5, 4, -1, 9, 8, 7, 4, 1 << 20, -3, 7], 2, 4, 4, 16);
    check(&[-1; 6], 3, 4, 0, 16);
    check(&[], 3, 4, 0, 16);
    // An id beyond 32 bits must not wrap into range.
    let r = Routed::call([(1i64 << 32) + 1, 1].as_ptr().cast(), true, [2, 2, 4], 0, 16);
    assert_eq!((r.place_of_slot, r.offsets[4]), (vec![-1, 0], 1));
}

#[test]
fn one_expert_takes_all_and_repeats() {
    check(&[3; 40], 4, 4, 0, 16);
    check(&[3; 40], 4, 4, 0, 1024);
}
