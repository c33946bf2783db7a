//! The bounded pool that all CPU kernels share.
//!
//! A decode pass is some sixty small products, so what a parallel region costs to enter decides. Measured on the
//! development machine (4 virtual cores, two threads of 7 us of work each, medians of 2000, with 20 us of other work
//! between regions):
//!
//! | way in | overhead of a region |
//! |---|---|
//! | rayon `install` + `join` from an outside thread | 25 us (70 us after 200 us of silence) |
//! | rayon `in_place_scope`, the caller taking its share | 61 us |
//! | paralight 0.0.12 | 69 us |
//! | rayon `in_place_scope` into workers that poll (this module) | 2 us |
//!
//! All of the loss is waking a sleeping thread. So a worker polls for a while after a region, because the next one of
//! the same pass is mostly near, and sleeps when none has come for about as long as waking it takes
//! (`Watch::patience`, measured): polling for longer would cost more than it can save. Between passes, and when the
//! engine is idle, no worker uses a core. The first region after a silence does not wait for sleepers either: its
//! caller calls them and does small work alone meanwhile; regions after it find them polling. Nothing here is
//! `unsafe`: rayon lends the borrowed closures.
//!
//! A second thread that wants the pool while it is taken runs its region alone, which neither waits nor
//! oversubscribes the machine. Where the machine has no core to spare, a worker may be off its core just when it is
//! waited for, which costs a time slice (milliseconds): a region that waited much longer than it worked makes the
//! next ones run on the caller alone, twice as many each time, until a trial goes well again. Calls that came too
//! late for every region do the same. After a `fork` the child builds a pool of its own. Kernels are written so that
//! no result depends on how many threads took part.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::thread_count;
pub use super::thread_count::{MAX_DEFAULT, MAX_THREADS, num_threads};
use crate::error::{Error, Result};

/// Work smaller than this, in nanoseconds of one thread, is done by the caller: entering a region costs about 1.6 us.
pub(crate) const WORTH_A_REGION_NS: usize = 5_000;

/// Bounds of how long a worker polls for the next region, in nanoseconds: what waking it may be taken to cost.
const PATIENCE_NS: std::ops::RangeInclusive<u64> = 20_000..=150_000;

/// A wait for the workers beyond what balance explains.
const LATE: Duration = Duration::from_micros(60);

/// Regions that the caller runs alone after a late worker: at first, and at most.
const AFTER_LATE: [usize; 2] = [32, 4096];

/// The same after a call that came too late for every region: at most a pass.
const AFTER_VAIN: [usize; 2] = [4, 64];

/// The workers, once something was worth them.
static TEAM: RwLock<Option<Arc<Team>>> = RwLock::new(None);

/// Let the kernels use `n` threads, the caller's included (`1..=MAX_THREADS`). Results do not depend on `n`.
pub fn set_num_threads(n: usize) -> Result<()> {
    thread_count::set_num_threads(n)?;
    dismiss_unneeded();
    Ok(())
}

/// Take over torch's number of threads if a caller must have changed it: torch starts with what `OMP_NUM_THREADS` says,
/// or else with the CPUs or cores of a machine that has `machine_cpus`.
pub fn follow_torch(torch: usize, machine_cpus: usize) {
    thread_count::follow_torch(torch, machine_cpus);
    dismiss_unneeded();
}

/// Dismiss the workers if there is one thread, which needs none.
fn dismiss_unneeded() {
    if num_threads() == 1 {
        replace(&mut TEAM.write().unwrap_or_else(PoisonError::into_inner), None);
    }
}

/// Replace the team that is there. A team of the process that this one was forked from is left as it is: ending its
/// pool would wake threads that are not here, by locks that one of them may have held at the fork.
fn replace(slot: &mut Option<Arc<Team>>, team: Option<Arc<Team>>) {
    if let Some(old) = std::mem::replace(slot, team).filter(|old| old.process != std::process::id()) {
        std::mem::forget(old);
    }
}

/// Persistent workers (one fewer than the threads: the caller is the last).
struct Team {
    pool: rayon::ThreadPool,
    workers: usize,
    /// Process that started the workers: a forked child has the pool's memory but not its threads.
    process: u32,
    watch: Arc<Watch>,
    /// True if a caller is in a region.
    taken: AtomicBool,
    /// True if a region had help since the workers were called last.
    helped: AtomicBool,
    /// Regions that the caller still runs alone, since workers had no core or were called in vain.
    alone: AtomicUsize,
    /// The value that `alone` was set to last; 0 when all is well.
    penalty: AtomicUsize,
}

/// The time in which workers poll for regions, from the call that wakes them until the first of them gives up.
struct Watch {
    /// Regions so far, times two; odd where the watch is over.
    pulse: AtomicUsize,
    /// Workers that have been called and have not left.
    called: AtomicUsize,
    /// Workers that poll, or work.
    there: AtomicUsize,
    /// Time of the call, in nanoseconds of `clock`.
    called_at: AtomicU64,
    /// Time to wake a worker, in nanoseconds, averaged.
    waking: AtomicU64,
    clock: Instant,
}

impl Watch {
    fn new() -> Self {
        Self {
            pulse: AtomicUsize::new(1),
            called: AtomicUsize::new(0),
            there: AtomicUsize::new(0),
            called_at: AtomicU64::new(0),
            waking: AtomicU64::new(50_000),
            clock: Instant::now(),
        }
    }

    fn now(&self) -> u64 {
        self.clock.elapsed().as_nanos() as u64
    }

    /// Time for which a worker polls in vain, in nanoseconds. A wait as long as the alternative costs is never more
    /// than twice off the best choice (the ski-rental argument; Karlin et al. 1990, for spinning on locks).
    fn patience(&self) -> u64 {
        self.waking.load(Ordering::Relaxed).clamp(*PATIENCE_NS.start(), *PATIENCE_NS.end())
    }

    /// A worker's part: run regions as they come, until the watch is over.
    fn stand(&self) {
        // A thread that found no core was late for another reason.
        let late = self.now().saturating_sub(self.called_at.load(Ordering::Relaxed)).min(*PATIENCE_NS.end());
        self.waking.store((7 * self.waking.load(Ordering::Relaxed) + late) / 8, Ordering::Relaxed);
        self.there.fetch_add(1, Ordering::Release);
        let (mut seen, mut since, mut idle) = (self.pulse.load(Ordering::Relaxed), self.now(), 0u32);
        while seen % 2 == 0 {
            if rayon::yield_now() == Some(rayon::Yield::Executed) {
                (since, idle) = (self.now(), 0);
                continue;
            }
            spin_loop();
            idle = idle.wrapping_add(1);
            if idle % 16 == 0 {
                let pulse = self.pulse.load(Ordering::Relaxed);
                if pulse != seen {
                    (seen, since) = (pulse, self.now());
                } else if self.now() - since > self.patience() {
                    // All leave together: a watch that some have left would be neither used nor renewed.
                    _ = self.pulse.compare_exchange(seen, seen + 1, Ordering::Relaxed, Ordering::Relaxed);
                    seen = self.pulse.load(Ordering::Relaxed);
                }
            }
        }
        self.there.fetch_sub(1, Ordering::Relaxed);
        self.called.fetch_sub(1, Ordering::Release);
    }
}

impl Team {
    fn new(workers: usize) -> Result<Self> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(workers)
            .thread_name(|i| format!("specrs-{i}"))
            .build()
            .map_err(|e| Error::Invalid { what: "num_threads", got: (workers + 1).to_string(), why: e.to_string() })?;
        Ok(Self {
            pool,
            workers,
            process: std::process::id(),
            watch: Arc::new(Watch::new()),
            taken: AtomicBool::new(false),
            helped: AtomicBool::new(true),
            alone: AtomicUsize::new(0),
            penalty: AtomicUsize::new(0),
        })
    }

    /// The team for `threads` threads, started anew where the number or the process has changed.
    fn get(threads: usize) -> Result<Arc<Self>> {
        let fits = |t: &Arc<Self>| t.workers + 1 == threads && t.process == std::process::id();
        if let Some(team) = TEAM.read().unwrap_or_else(PoisonError::into_inner).as_ref().filter(|t| fits(t)) {
            return Ok(team.clone());
        }
        let mut slot = TEAM.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(team) = slot.as_ref().filter(|t| fits(t)) {
            return Ok(team.clone());
        }
        let team = Arc::new(Self::new(threads - 1)?);
        replace(&mut slot, Some(team.clone()));
        Ok(team)
    }

    /// True if the caller should run this region alone.
    fn avoid(&self) -> bool {
        let alone = self.alone.load(Ordering::Relaxed);
        if alone > 0 {
            self.alone.store(alone - 1, Ordering::Relaxed); // a count lost to another caller does no harm
        }
        alone > 0
    }

    /// Make the caller run regions alone for a while: twice as many as the last time, within bounds.
    fn back_off(&self, [least, most]: [usize; 2]) {
        let penalty = (2 * self.penalty.load(Ordering::Relaxed)).clamp(least, most);
        self.penalty.store(penalty, Ordering::Relaxed);
        self.alone.store(penalty, Ordering::Relaxed);
    }

    /// Learn from a region: how long its caller worked, and then waited.
    fn learn(&self, worked: Duration, waited: Duration) {
        if waited > LATE + worked / 2 {
            return self.back_off(AFTER_LATE);
        }
        let penalty = self.penalty.load(Ordering::Relaxed);
        if penalty > 0 {
            self.penalty.store(penalty / 2, Ordering::Relaxed);
        }
    }

    /// Workers for a region that takes one thread `cost_ns`, up to `most`, and whether they have to be woken first.
    /// Those who sleep are called.
    fn muster(&self, most: usize, cost_ns: usize) -> (usize, bool) {
        let watch = &self.watch;
        let pulse = watch.pulse.load(Ordering::Relaxed);
        let open = pulse.is_multiple_of(2)
            && watch.pulse.compare_exchange(pulse, pulse + 2, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !open && watch.called.load(Ordering::Acquire) == 0 {
            watch.called.store(self.workers, Ordering::Relaxed);
            watch.called_at.store(watch.now(), Ordering::Relaxed);
            watch.pulse.store((pulse | 1) + 1, Ordering::Relaxed);
            let watch = self.watch.clone();
            self.pool.spawn_broadcast(move |_| watch.stand());
            if !self.helped.swap(false, Ordering::Relaxed) {
                self.back_off(AFTER_VAIN);
            }
        }
        let there = watch.there.load(Ordering::Acquire).min(most);
        // Work that lasts for several times what waking takes is worth the wait.
        let workers = if cost_ns as u64 > 4 * watch.patience() { most } else { there };
        if workers > 0 {
            self.helped.store(true, Ordering::Relaxed);
        }
        (workers, there < workers)
    }
}

/// Sets a flag or counts on the way out, by unwinding too.
struct OnExit<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnExit<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Call `f` on every item, on all threads where `cost_ns` (the whole work's time on one thread) makes that pay.
///
/// Each thread begins at its own stretch of the items and takes what is left of the others' when it has done its own:
/// neighbouring items mostly stay on one thread, and a thread that was late does less where there are several items
/// for each. Items carry what their part of the work may write, such as disjoint slices of an output.
pub(crate) fn for_each<T: Send>(items: Vec<T>, cost_ns: usize, f: impl Fn(T) + Sync) {
    let threads = num_threads().min(items.len());
    if threads <= 1 || cost_ns < WORTH_A_REGION_NS {
        return items.into_iter().for_each(f);
    }
    // Without workers (the system refused a thread) the caller still can do everything.
    let Ok(team) = Team::get(num_threads()) else { return items.into_iter().for_each(f) };
    if team.avoid() || team.taken.swap(true, Ordering::Acquire) {
        return items.into_iter().for_each(f);
    }
    let _release = OnExit(|| team.taken.store(false, Ordering::Release));
    let (workers, asleep) = team.muster(threads - 1, cost_ns);
    if workers == 0 {
        return items.into_iter().for_each(f);
    }
    let threads = workers + 1;

    let items: Vec<Mutex<Option<T>>> = items.into_iter().map(|i| Mutex::new(Some(i))).collect();
    let left = AtomicUsize::new(workers);
    let (items, left, f) = (&items, &left, &f);
    let take_part = move |thread: usize| {
        let (before, mine) = items.split_at(thread * items.len() / threads);
        for item in mine.iter().chain(before) {
            // A lock is held only to take the item out: where it is held, another thread has the item.
            let item = item.try_lock().ok().and_then(|mut item| item.take());
            if let Some(item) = item {
                f(item);
            }
        }
    };
    team.pool.in_place_scope(|scope| {
        for thread in 1..threads {
            scope.spawn(move |_| {
                let _count = OnExit(|| {
                    left.fetch_sub(1, Ordering::Release);
                });
                take_part(thread);
            });
        }
        let start = Instant::now();
        take_part(0);
        // The scope would put this thread to sleep. The rest is short, unless a worker has lost its core: then this
        // thread must not hold one either. The few turns after the count cover the time between a job's end and the
        // scope's own count of it.
        let (worked, mut turns) = (start.elapsed(), 0u32);
        while left.load(Ordering::Acquire) != 0 {
            turns += 1;
            if turns.is_multiple_of(256) { std::thread::yield_now() } else { spin_loop() }
        }
        if asleep {
            return; // waking them took what it took
        }
        team.learn(worked, start.elapsed() - worked);
        for _ in 0..40 {
            spin_loop();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once_from_many_callers_and_after_a_panic() {
        set_num_threads(3).unwrap();
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for round in 0..200 {
                        let mut done = vec![0u32; round % 9];
                        for_each(done.iter_mut().collect(), usize::MAX, |d| *d += 1);
                        assert!(done.iter().all(|&d| d == 1));
                    }
                });
            }
        });
        let caught = std::panic::catch_unwind(|| {
            for_each(vec![1, 2, 3, 4, 5, 6], usize::MAX, |i| assert!(i != 5, "item 5"));
        });
        assert!(caught.is_err());
        let sum = AtomicUsize::new(0);
        for_each((0..100).collect(), usize::MAX, |i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 4950);
    }

    #[test]
    fn workers_poll_after_a_call_and_sleep_after_a_silence() {
        let (team, deadline) = (Team::new(1).unwrap(), Instant::now() + Duration::from_secs(20));
        let (small, large) = (WORTH_A_REGION_NS, 5_000_000);
        // Asleep: called, and not waited for where the work is small.
        assert!(!team.muster(1, small).1);
        while team.muster(1, small) != (1, false) {
            assert!(Instant::now() < deadline, "no workers came");
        }
        // Nobody calls the workers: they leave together, without being told.
        while team.watch.called.load(Ordering::Acquire) != 0 {
            assert!(Instant::now() < deadline, "still polling");
            std::thread::yield_now();
        }
        assert_eq!(team.watch.pulse.load(Ordering::Relaxed) % 2, 1);
        assert_eq!(team.watch.there.load(Ordering::Relaxed), 0);
        // Large work is worth the wait.
        assert_eq!(team.muster(1, large).0, 1);
    }

    #[test]
    fn patience_is_bounded_whatever_waking_seemed_to_take() {
        let watch = Watch::new();
        for (waking, patience) in [(0, 20_000), (40_000, 40_000), (1 << 40, 150_000)] {
            watch.waking.store(waking, Ordering::Relaxed);
            assert_eq!(watch.patience(), patience);
        }
    }

    #[test]
    fn calls_in_vain_make_the_caller_work_alone_for_a_while() {
        let team = Team::new(1).unwrap();
        let mut alone = 0;
        for _ in 0..3 {
            team.helped.store(false, Ordering::Relaxed);
            team.muster(1, WORTH_A_REGION_NS); // finds nobody, so calls
            while team.watch.called.load(Ordering::Acquire) != 0 {
                std::thread::yield_now();
            }
            while team.avoid() {
                alone += 1;
            }
        }
        assert_eq!(alone, 4 + 8 + 16);
    }
}
