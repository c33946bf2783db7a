//! The end of a round: seats advance or end, and a ring tells its reader which rounds it has.

use proptest::prelude::*;
use specrs::Error;
use specrs::round::round_end::{
    EXIT_ASKED, EXIT_BUDGET, EXIT_DONE, EXIT_FAULT, EXIT_NAN, EXIT_UNSOUND, HEADER_WORDS, RingLayout, RoundEnd,
    RoundFound, SEQUENCE_AT, SeatLimits, SeatState, Signals, SlotState, end_round,
};

/// One seat of a round, with what is meant to be wrong with it.
#[derive(Debug, Clone)]
struct Seat {
    len: i32,
    root: i32,
    depth: i32,
    done: bool,
    nan: bool,
    sound: i32,
    tokens: Vec<i32>,
    /// Added to the new length: not 0 is nonsense.
    skew: i32,
    limit: i32,
    cap: i32,
    stops: Vec<i32>,
}

const PLACES: usize = 3;

fn seat() -> impl Strategy<Value = Seat> {
    let state = (0..50i32, 0..9i32, 0..5i32, prop::bool::weighted(0.2));
    let found = (prop::bool::weighted(0.1), 0..3i32, prop::collection::vec(0..9i32, 1..6), 0..20i32);
    let under = (0..70i32, 0..6i32, prop::collection::vec(0..9i32, 0..=PLACES));
    (state, found, under).prop_map(|((len, root, depth, done), (nan, sound, tokens, skew), (limit, cap, stops))| Seat {
        len,
        root,
        depth,
        done,
        nan,
        sound,
        tokens,
        skew: if skew == 0 { 1 } else { 0 },
        limit,
        cap,
        stops,
    })
}

/// The arrays of a batch.
struct Arrays {
    offsets: Vec<i32>,
    tokens: Vec<i32>,
    found: [Vec<i32>; 4],
    limits: [Vec<i32>; 2],
    stops: Vec<i32>,
    stop_counts: Vec<i32>,
    state: [Vec<i32>; 4],
}

impl Arrays {
    fn of(seats: &[Seat]) -> Self {
        let each = |f: &dyn Fn(&Seat) -> i32| seats.iter().map(f).collect::<Vec<i32>>();
        let mut offsets = vec![0];
        for seat in seats {
            offsets.push(offsets[offsets.len() - 1] + seat.tokens.len() as i32);
        }
        Self {
            tokens: seats.iter().flat_map(|l| l.tokens.clone()).chain([7, 7]).collect(),
            found: [
                each(&|l| l.len + l.tokens.len() as i32 + l.skew),
                each(&|l| l.tokens[l.tokens.len() - 1]),
                each(&|l| i32::from(l.nan)),
                each(&|l| l.sound),
            ],
            limits: [each(&|l| l.limit), each(&|l| l.cap)],
            stops: seats
                .iter()
                .flat_map(|l| (0..PLACES).map(|i| l.stops.get(i).copied().unwrap_or(-1)).collect::<Vec<_>>())
                .collect(),
            stop_counts: each(&|l| l.stops.len() as i32),
            state: [each(&|l| l.len), each(&|l| l.root), each(&|l| l.depth), each(&|l| i32::from(l.done))],
            offsets,
        }
    }

    fn end(&mut self, live: i32, signals: Signals) -> specrs::Result<RoundEnd> {
        let [new_lens, roots, faults, sound] = &self.found;
        let found = RoundFound { offsets: &self.offsets, tokens: &self.tokens, new_lens, roots, faults, sound, live };
        let [limits, caps] = &self.limits;
        let limits = SeatLimits { limits, caps, stops: &self.stops, stop_counts: &self.stop_counts };
        let [lens, roots, depths, done] = &mut self.state;
        end_round(&found, &limits, &mut SeatState { lens, roots, depths, done }, signals)
    }

    fn state_of(&self, i: usize) -> [i32; 4] {
        [0, 1, 2, 3].map(|n: usize| self.state[n][i])
    }
}

proptest! {
    /// Each seat's fate is its own, and the exit bits are those of the live seats and of the signals.
    #[test]
    fn seats_advance_end_or_stay(
        seats in prop::collection::vec(seat(), 1..9),
        dead in 0..9usize,
        asked: bool,
        recorded: bool,
        left in prop::option::of(-1..4i32),
    ) {
        let mut arrays = Arrays::of(&seats);
        let live = seats.len() - dead.min(seats.len());
        let end = arrays.end(live as i32, Signals { asked, recorded, left }).unwrap();
        let mut want = 0;
        let mut nonsense = 0;
        for (i, l) in seats.iter().enumerate() {
            let new_len = l.len + l.tokens.len() as i32;
            let ended = [l.len, l.root, 0, 1];
            let now = arrays.state_of(i);
            if i >= live {
                prop_assert_eq!(now, [l.len, l.root, l.depth, i32::from(l.done)]);
                continue;
            }
            if l.done {
                want |= EXIT_DONE;
                prop_assert_eq!(now, ended);
                continue;
            }
            want |= if l.depth > 0 && l.sound == 0 { EXIT_UNSOUND } else { 0 };
            if l.nan {
                want |= EXIT_DONE | EXIT_NAN;
                prop_assert_eq!(now, ended);
            } else if l.skew != 0 {
                want |= EXIT_DONE | EXIT_FAULT;
                nonsense += 1;
                prop_assert_eq!(now, ended);
            } else if l.limit <= new_len || l.stops.iter().any(|s| l.tokens.contains(s)) {
                want |= EXIT_DONE;
                prop_assert_eq!(now, ended);
            } else {
                let depth = now[2];
                prop_assert_eq!(now, [new_len, *l.tokens.last().unwrap(), depth, 0]);
                // The deepest that is wanted and whose whole path, with the token behind it, stays within the limit.
                prop_assert!(depth == l.cap || (depth < l.cap && new_len + depth + 1 == l.limit), "{}", depth);
                prop_assert!(new_len + depth < l.limit);
            }
        }
        want |= if recorded { EXIT_FAULT } else { 0 } | if asked { EXIT_ASKED } else { 0 };
        want |= if left.is_some_and(|left| left <= 1) { EXIT_BUDGET } else { 0 };
        prop_assert_eq!((end.exit, end.live, end.refused.len()), (want, live as i32, nonsense));
        prop_assert_eq!(end.left, left.map(|left| (left - 1).max(0)));
        prop_assert_eq!(end.continues, left.is_some() && want == 0);
    }

    /// The parts of a slot lie behind one another, and slots apart.
    #[test]
    fn parts_of_a_slot_do_not_overlap(power in 1..6u32, batch in 1..300u64, words in 0..30_000u64) {
        let ring = RingLayout::new(1 << power, batch, words).unwrap();
        let ends = [
            (HEADER_WORDS, ring.lens_at()),
            (ring.lens_at() + ring.batch(), ring.depths_at()),
            (ring.depths_at() + ring.batch(), ring.found_at()),
            (ring.found_at() + ring.words(), ring.slot_words()),
        ];
        prop_assert!(ends.iter().all(|(end, next)| end <= next && next - end < 32));
        prop_assert!(ring.found_at().is_multiple_of(4) && ring.slot_words().is_multiple_of(32));
        prop_assert_eq!(ring.ring_words(), ring.slots() * ring.slot_words());
    }

    /// Checks the sequence words of every round near the last one, over the wrap of the 32-bit count.
    #[test]
    fn sequence_words_tell_rounds_apart(power in 1..4u32, start in prop::sample::select(vec![0u64, 5, (1 << 32) - 9])) {
        let layout = RingLayout::new(1 << power, 1, 3).unwrap();
        let slots = layout.slots() as u64;
        let mut ring = vec![0; layout.ring_words()];
        let end = RoundEnd { live: 1, exit: 5, continues: true, left: Some(1), refused: vec![] };
        // A ring begins with round 0, and its words as 0: one that has come far has written every slot.
        for round in start.saturating_sub(slots)..start {
            layout.publish(&mut ring, round as u32, &end, [&[0], &[0]], &[0; 3]).unwrap();
        }
        for round in start..start + 24 {
            layout.publish(&mut ring, round as u32, &end, [&[4], &[2]], &[round as i32, 8, 9]).unwrap();
            for other in start..round + 2 * slots {
                let at = layout.slot(other) * layout.slot_words();
                let state = layout.state(other, ring[at + SEQUENCE_AT] as u32);
                let want = match other {
                    _ if other > round => SlotState::Ahead,
                    _ if other + slots > round + 1 => SlotState::Whole,
                    // The slot's last round: it may be the next one, which is about to write.
                    _ => SlotState::Overwritten((round + 1) - (round + 1 - other) % slots),
                };
                prop_assert_eq!(state, want, "round {} after {}", other, round);
                if state == SlotState::Whole {
                    let slot = &ring[at..at + layout.slot_words()];
                    prop_assert_eq!(&slot[1..6], &[other as i32, 1, 5, 1, 0]);
                    prop_assert_eq!((slot[layout.lens_at()], slot[layout.depths_at()]), (4, 2));
                    prop_assert_eq!(&slot[layout.found_at()..][..3], &[other as i32, 8, 9]);
                }
            }
        }
    }
}

#[test]
fn nonsense_is_refused_with_its_number() {
    let seat = Seat {
        len: 5,
        root: 1,
        depth: 2,
        done: false,
        nan: false,
        sound: 1,
        tokens: vec![3, 4],
        skew: 0,
        limit: 99,
        cap: 3,
        stops: vec![],
    };
    let refused = |spoil: &dyn Fn(&mut Arrays)| {
        let mut arrays = Arrays::of(&[seat.clone(), seat.clone(), seat.clone()]);
        spoil(&mut arrays);
        let end = arrays.end(3, Signals::default()).unwrap();
        assert_eq!(end.exit, EXIT_FAULT | EXIT_DONE);
        assert_eq!(arrays.state_of(1), [arrays.state[0][1], 1, 0, 1]);
        end.refused
    };
    let outside =
        |buffer, index, bound| Error::OutOfBounds { kernel: "round_end", buffer, request: 1, step: -1, index, bound };
    let path = "accepted path";
    // Eight tokens are there. Offsets are two seats' business: the last error is the second seat's.
    assert_eq!(refused(&|a| a.offsets[2] = 9)[0], outside(path, 9, 9));
    assert_eq!(refused(&|a| a.offsets[2] = -1)[0], outside(path, -1, 9));
    assert_eq!(refused(&|a| a.offsets[2] = 1)[0], outside("offsets (decreasing)", 1, 9));
    assert_eq!(refused(&|a| a.offsets[2] = 2)[0], outside("offsets (decreasing)", 2, 9));
    let lengths = "new lengths (length plus accepted nodes)";
    assert_eq!(refused(&|a| a.found[0][1] = 8), [outside(lengths, 8, 8)]);
    assert_eq!(refused(&|a| a.found[0][1] = i32::MIN), [outside(lengths, i32::MIN.into(), 8)]);
    assert_eq!(refused(&|a| a.state[0][1] = -1), [outside(lengths, -1, 2)]);
    assert_eq!(refused(&|a| a.stop_counts[1] = 4), [outside("stop tokens", 4, 4)]);
    assert_eq!(refused(&|a| a.stop_counts[1] = -1), [outside("stop tokens", -1, 4)]);

    let mut arrays = Arrays::of(std::slice::from_ref(&seat));
    for (live, seats) in [(-1, 0), (2, 1), (i32::MAX, 1)] {
        let end = arrays.end(live, Signals::default()).unwrap();
        assert_eq!(end.live, seats);
        let want = Error::OutOfBounds {
            kernel: "round_end",
            buffer: "live",
            request: -1,
            step: -1,
            index: live.into(),
            bound: 2,
        };
        assert_eq!(end.refused[0], want);
    }
    arrays.found[3].push(0);
    let error = arrays.end(1, Signals::default()).unwrap_err().to_string();
    assert!(error.contains("sound"), "{error}");
}

#[test]
fn a_ring_has_a_power_of_two_slots() {
    let text = |slots, batch, words| RingLayout::new(slots, batch, words).unwrap_err().to_string();
    assert!(text(1, 1, 1).contains("ring slots = 1 is outside 2..="));
    assert!(text(6, 1, 1).contains("ring slots = 6: must be a power of two"));
    assert!(text(2, 0, 1).contains("ring batch = 0"));
    assert!(text(2, 1, 1 << 40).contains("ring words"));
    assert!(text(1 << 16, 1, 1 << 20).contains("words of a ring"));
}
