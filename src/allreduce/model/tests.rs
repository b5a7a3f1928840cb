//! Calls and faults that the protocol survives, and the broken rules that the model finds out.

use super::scenario::{one, two};
use super::*;

fn check(scenario: &Scenario) {
    exhaust(scenario).unwrap_or_else(|violation| panic!("{violation}"));
}

/// Runs a scenario with a broken rule, which must be found out. The message says how.
fn caught(scenario: &Scenario) -> Violation {
    match exhaust(scenario) {
        Err(violation) => violation,
        Ok(states) => panic!("nothing wrong in {states} states"),
    }
}

#[test]
fn two_ranks_in_every_order() {
    for calls in [
        &[one(1), one(1), one(1)][..],
        &[two(1), two(1)],
        &[one(1), two(1)],
        &[one(1), one(0), one(1)],
        &[one(0), one(0), one(0), one(1)],
    ] {
        check(&Scenario::new(2, calls));
    }
    for calls in
        [&[one(2), one(1)][..], &[two(1), two(1), two(1)], &[two(1), one(1), two(1)], &[two(1), one(0), two(1)]]
    {
        check(&Scenario { whole: true, ..Scenario::new(2, calls) });
    }
}

#[test]
fn a_killed_rank_hangs_nobody() {
    for calls in [&[one(1)][..], &[two(1)], &[one(0), one(1)]] {
        for killed in 0..2 {
            check(&Scenario { killed: Some(killed), whole: true, ..Scenario::new(2, calls) });
        }
    }
}

#[test]
fn a_late_rank_leaves_no_wrong_results() {
    for calls in [&[one(1)][..], &[two(1)], &[one(0), one(1)]] {
        check(&Scenario { hasty: true, whole: true, ..Scenario::new(2, calls) });
    }
}

#[test]
fn ranks_that_disagree_all_say_so() {
    for (mine, theirs) in [(one(1), one(2)), (one(1), one(0)), (one(1), two(1))] {
        for before in [&[][..], &[one(1)]] {
            let mut scenario = Scenario { whole: true, ..Scenario::new(2, before) };
            scenario.calls[0].push(mine);
            scenario.calls[1].push(theirs);
            check(&scenario);
        }
    }
}

#[test]
fn more_ranks_at_random() {
    for (ranks, rounds) in [(2, 200), (3, 48), (4, 48), (8, 8)] {
        for seed in 0..rounds {
            let mut random = Random(seed + 0x1234_5678);
            let pick = |random: &mut Random| {
                let chunks = random.below(CHUNKS + 1);
                [one(chunks), two(chunks)][random.below(2)]
            };
            let calls: Vec<Call> = (0..4).map(|_| pick(&mut random)).collect();
            let mut scenario = Scenario { run: [1, CHUNKS][random.below(2)], ..Scenario::new(ranks, &calls) };
            match seed % 4 {
                0 | 1 => {}
                2 => scenario.killed = Some(random.below(ranks)),
                _ => scenario.hasty = true,
            }
            wander(&scenario, seed).unwrap_or_else(|violation| panic!("{ranks} ranks, {calls:?}: {violation}"));
        }
    }
}

#[test]
fn disagreement_among_many_is_noticed_by_all() {
    for (ranks, rounds) in [(4, 10), (8, 3)] {
        for seed in 0..rounds {
            let mut scenario = Scenario::new(ranks, &[one(2), two(3)]);
            scenario.calls[seed as usize % ranks][1] = one(3);
            wander(&scenario, seed).unwrap_or_else(|violation| panic!("{ranks} ranks: {violation}"));
        }
    }
}

#[test]
fn slots_that_are_not_emptied_are_caught() {
    let violation = caught(&Scenario::breaking(2, &[one(1), one(1), one(1)], |rules| rules.empties = false));
    assert!(violation.contains("got"), "{violation}");
    caught(&Scenario::breaking(2, &[two(1), two(1), two(1)], |rules| rules.empties = false));
}

#[test]
fn one_buffer_instead_of_two_is_caught() {
    caught(&Scenario::breaking(2, &[one(1), one(1)], |rules| rules.oneshot_turns = false));
    caught(&Scenario::breaking(2, &[two(1), two(1)], |rules| rules.scatter_turns = false));
}

#[test]
fn a_reused_epoch_is_caught() {
    caught(&Scenario::breaking(2, &[one(1), one(1)], |rules| rules.epoch_grows = false));
}

#[test]
fn emptying_that_outlives_its_call_is_caught() {
    caught(&Scenario::breaking(2, &[one(1), one(1), one(1)], |rules| rules.drains = false));
}

#[test]
fn looking_at_one_half_is_caught() {
    let violation = caught(&Scenario::breaking(2, &[one(1)], |rules| rules.both_halves = false));
    assert!(violation.contains("got") || violation.contains("header"), "{violation}");
}

#[test]
fn sending_what_looks_empty_is_caught() {
    let mut scenario = Scenario::breaking(2, &[one(1)], |rules| rules.replaces = false);
    let violation = caught(&scenario);
    assert!(violation.contains("without a cause"), "{violation}");
    scenario.rules.deadline = false;
    let violation = caught(&scenario);
    assert!(violation.contains("hangs"), "{violation}");
}

#[test]
fn empty_calls_without_headers_are_caught() {
    caught(&Scenario::breaking(2, &[one(1), one(0), one(1)], |rules| rules.headers_always = false));
}

#[test]
fn headers_that_nobody_compares_are_caught() {
    for (mine, theirs) in [(one(1), one(2)), (one(1), two(1))] {
        let mut scenario = Scenario::breaking(2, &[], |rules| rules.compares = false);
        scenario.calls = vec![vec![mine], vec![theirs]];
        caught(&scenario);
    }
}

#[test]
fn waiting_without_a_deadline_is_caught() {
    let scenario = Scenario::breaking(2, &[one(1)], |rules| rules.deadline = false);
    let violation = caught(&Scenario { killed: Some(1), ..scenario });
    assert!(violation.contains("hangs"), "{violation}");
}

/// A rank whose wait has ended goes on with the calls that its host has launched already.
#[test]
fn calls_after_a_fault_that_send_are_caught() {
    for calls in [&[one(1), one(1), one(1)][..], &[two(1), two(1), two(1)]] {
        let scenario = Scenario::breaking(2, calls, |rules| rules.silent = false);
        let violation = caught(&Scenario { hasty: true, whole: true, ..scenario });
        assert!(violation.contains("got") || violation.contains("without a cause"), "{violation}");
        check(&Scenario { hasty: true, whole: true, ..Scenario::new(2, calls) });
    }
}

#[test]
fn sums_without_all_of_their_parts_are_caught() {
    let scenario = Scenario::breaking(2, &[two(1)], |rules| rules.whole_sums = false);
    let violation = caught(&Scenario { hasty: true, whole: true, ..scenario });
    assert!(violation.contains("got 7fff7fff"), "{violation}");
}
