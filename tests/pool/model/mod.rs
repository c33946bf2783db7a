//! A state machine over all operations of the pool against a plain model, with an audit after each step.
//!
//! The model (`world.rs`) keeps lists of pages and counts owners by walking them; it also plays the engine: it runs
//! a lease's copies, writes KV into every slot it may write, and checks after each step that every sequence still
//! reads its own. So a page with two writers, a missed copy, or a cache entry of other tokens shows as wrong KV, and
//! a leak or a double free as a difference in the accounts. `SPECRS_TEST_LONG` asks for a longer run.

/// Check with operands; the `?` of the model.
macro_rules! ensure {
    ($ok:expr, $($why:tt)+) => {
        if !$ok {
            return Err(format!($($why)+));
        }
    };
}

mod mirror;
mod refusals;
mod world;

use std::cell::Cell;
use std::sync::atomic::Ordering;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

use world::World;

/// One operation. Numbers choose among what there is (taken modulo the choices), so that every sequence of
/// operations means something and shrinks well.
#[derive(Debug, Clone)]
enum Op {
    Create {
        salt: bool,
    },
    Fork {
        src: u16,
        len: u16,
    },
    /// Sequences by bits, positions beyond the committed length.
    Reserve {
        who: u16,
        more: [u16; 3],
    },
    /// A sequence that is leased or given twice among the others.
    ReserveRefused {
        who: u16,
        twice: bool,
    },
    /// Positions beyond the committed length.
    Renew {
        lease: u16,
        more: [u16; 3],
    },
    /// A round that the device runs ahead of the host.
    Launch {
        lease: u16,
        accept: [u16; 3],
        tokens: u16,
    },
    /// A fork of a sequence with a round in flight, and a renewal behind it.
    Share {
        lease: u16,
        more: [u16; 3],
        tokens: u16,
    },
    /// The host learns of the oldest one.
    Land {
        lease: u16,
    },
    /// A mirror that looks now and then.
    Look {
        which: u16,
        anew: u8,
    },
    Commit {
        lease: u16,
        accept: [u16; 3],
        tokens: u16,
    },
    CommitRefused {
        lease: u16,
        how: u8,
    },
    Rollback {
        lease: u16,
        explicit: bool,
    },
    Remap {
        lease: u16,
        entry: u16,
        first: u16,
        order: Vec<u16>,
        twice: bool,
    },
    Release {
        who: u16,
    },
    ReleaseRefused {
        who: u16,
        twice: bool,
    },
    Stale {
        which: u16,
        call: u8,
    },
    Alloc {
        n: u16,
    },
    Retain {
        which: u16,
    },
    Free {
        which: u16,
        n: u16,
    },
    FreeRefused {
        which: u16,
        how: u8,
    },
    CacheInsert {
        seq: u16,
        len: u16,
        drafted: u16,
    },
    CacheInsertRefused {
        seq: u16,
    },
    CacheLookup {
        tokens: u16,
        len: u16,
        max: u16,
    },
    CacheLookupOf {
        seq: u16,
        len: u16,
    },
    CacheClear,
}

fn op() -> impl Strategy<Value = Op> {
    let n = any::<u16>;
    prop_oneof![
        6 => any::<bool>().prop_map(|salt| Op::Create { salt }),
        6 => (n(), n()).prop_map(|(src, len)| Op::Fork { src, len }),
        16 => (n(), any::<[u16; 3]>()).prop_map(|(who, more)| Op::Reserve { who, more }),
        1 => (n(), any::<bool>()).prop_map(|(who, twice)| Op::ReserveRefused { who, twice }),
        10 => (n(), any::<[u16; 3]>()).prop_map(|(lease, more)| Op::Renew { lease, more }),
        12 => (n(), any::<[u16; 3]>(), n()).prop_map(|(lease, accept, tokens)| Op::Launch { lease, accept, tokens }),
        6 => (n(), any::<[u16; 3]>(), n()).prop_map(|(lease, more, tokens)| Op::Share { lease, more, tokens }),
        10 => n().prop_map(|lease| Op::Land { lease }),
        4 => (n(), any::<u8>()).prop_map(|(which, anew)| Op::Look { which, anew }),
        10 => (n(), any::<[u16; 3]>(), n()).prop_map(|(lease, accept, tokens)| Op::Commit { lease, accept, tokens }),
        2 => (n(), any::<u8>()).prop_map(|(lease, how)| Op::CommitRefused { lease, how }),
        4 => (n(), any::<bool>()).prop_map(|(lease, explicit)| Op::Rollback { lease, explicit }),
        4 => (n(), n(), n(), vec(n(), 0..5), prop::bool::weighted(0.2))
            .prop_map(|(lease, entry, first, order, twice)| Op::Remap { lease, entry, first, order, twice }),
        6 => n().prop_map(|who| Op::Release { who }),
        1 => (n(), any::<bool>()).prop_map(|(who, twice)| Op::ReleaseRefused { who, twice }),
        1 => (n(), any::<u8>()).prop_map(|(which, call)| Op::Stale { which, call }),
        4 => n().prop_map(|n| Op::Alloc { n }),
        1 => n().prop_map(|which| Op::Retain { which }),
        4 => (n(), n()).prop_map(|(which, n)| Op::Free { which, n }),
        1 => (n(), any::<u8>()).prop_map(|(which, how)| Op::FreeRefused { which, how }),
        8 => (n(), n(), n()).prop_map(|(seq, len, drafted)| Op::CacheInsert { seq, len, drafted }),
        1 => n().prop_map(|seq| Op::CacheInsertRefused { seq }),
        3 => (n(), n(), n()).prop_map(|(tokens, len, max)| Op::CacheLookup { tokens, len, max }),
        4 => (n(), n()).prop_map(|(seq, len)| Op::CacheLookupOf { seq, len }),
        1 => Just(Op::CacheClear),
    ]
}

fn sizes() -> impl Strategy<Value = (u32, u32, u32, u32)> {
    let page = prop_oneof![3 => Just(1u32), 2 => Just(2), 3 => Just(4), 1 => Just(16), 1 => Just(64)];
    (1u32..40, page, 1u32..8, 1u32..12)
}

#[test]
fn agrees_with_the_model() {
    let default = Config::default();
    let cases = if std::env::var_os("SPECRS_TEST_LONG").is_some() { 40_000 } else { 3000 };
    let config = Config { cases, failure_persistence: None, ..default };
    let steps = Cell::new(0u64);
    let done = TestRunner::new(config).run(&(sizes(), vec(op(), 1..200)), |((pages, page, seqs, width), ops)| {
        let mut world = World::new(pages, page, seqs, width);
        for op in ops {
            world.apply(&op).map_err(|e| TestCaseError::fail(format!("{op:?}: {e}")))?;
            steps.set(steps.get() + 1);
        }
        world.finish().map_err(TestCaseError::fail)
    });
    if let Err(e) = done {
        panic!("{e}");
    }
    assert!(steps.get() >= 100_000, "only {} steps ran", steps.get());
    let upgraded = world::UPGRADED.load(Ordering::Relaxed);
    assert!(upgraded > 50, "only {upgraded} cached pages got draft KV later");
    let met = mirror::MET.each_ref().map(|n| n.load(Ordering::Relaxed));
    assert!(met.iter().all(|&n| n > 50), "whole rows, late looks, rounds and copies in flight: {met:?}");
}
