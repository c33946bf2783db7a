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
//! | rayon `in_place_scope` into workers **kept awake** (this module) | 2 us |
//!
//! All of the loss is waking a sleeping thread. So the first region of a burst gives each worker a job that does
//! nothing but look for other jobs (`rayon::yield_now`) until nothing has happened for [`AWAKE`]; regions that follow
//! find the workers polling. The caller always takes its share itself and spins for the rest. Nothing here is
//! `unsafe`: rayon lends the borrowed closures.
//!
//! A second thread that wants the pool while it is taken runs its region alone, which neither waits nor
//! oversubscribes the machine. Where the machine has no core to spare, a worker may be off its core just when it is
//! waited for, which costs a time slice (milliseconds): a region that waited much longer than it worked makes the
//! next ones run on the caller alone, twice as many each time, until a trial goes well again. After a `fork` the
//! child builds a pool of its own. Kernels are written so that no result depends on how many threads took part.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use crate::error::{Error, Result, in_range};

/// Largest number of threads the kernels may be given.
pub const MAX_THREADS: usize = 64;

/// How long idle workers go on polling after the last region: longer than what lies between two passes of a model.
pub const AWAKE: Duration = Duration::from_micros(1500);

/// Work smaller than this, in nanoseconds of one thread, is done by the caller: entering a region costs about 1.6 us.
pub(crate) const WORTH_A_REGION_NS: usize = 5_000;

/// A wait for the workers beyond what balance explains.
const LATE: Duration = Duration::from_micros(60);

/// Most regions that the caller runs alone before it tries the workers again.
const MAX_PENALTY: usize = 4096;

/// Threads asked for; 0 stands for the default.
static THREADS: AtomicUsize = AtomicUsize::new(0);
/// The workers, once something was worth them.
static TEAM: RwLock<Option<Arc<Team>>> = RwLock::new(None);

/// Let the kernels use `n` threads, the caller's included (`1..=MAX_THREADS`). Results do not depend on `n`.
pub fn set_num_threads(n: usize) -> Result<()> {
    in_range("num_threads", n as u64, 1, MAX_THREADS as i128)?;
    THREADS.store(n, Ordering::Relaxed);
    Ok(())
}

/// Threads the kernels may use, the caller's included: what [`set_num_threads`] set, or the machine's parallelism,
/// at most 8.
pub fn num_threads() -> usize {
    match THREADS.load(Ordering::Relaxed) {
        0 => {
            // Asking the system reads cgroup files: ask once.
            static DEFAULT: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
            *DEFAULT.get_or_init(|| std::thread::available_parallelism().map_or(1, |n| n.get().min(8)))
        }
        n => n,
    }
}

/// Persistent workers (one fewer than the threads: the caller is the last).
struct Team {
    pool: rayon::ThreadPool,
    workers: usize,
    /// Process that started the workers: a forked child has the pool's memory but not its threads.
    process: u32,
    /// Workers whose polling job has not ended yet.
    awake: Arc<AtomicUsize>,
    /// Counts regions, so that polling workers see that more may come.
    pulse: Arc<AtomicUsize>,
    /// Whether a caller is in a region.
    taken: AtomicBool,
    /// Regions that the caller still runs alone, since the last one had to wait for a worker without a core.
    alone: AtomicUsize,
    /// What `alone` was set to last; 0 when all is well.
    penalty: AtomicUsize,
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
            awake: Arc::default(),
            pulse: Arc::default(),
            taken: AtomicBool::new(false),
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
        *slot = Some(team.clone());
        Ok(team)
    }

    /// Whether the caller should run this region alone.
    fn avoid(&self) -> bool {
        let alone = self.alone.load(Ordering::Relaxed);
        if alone > 0 {
            self.alone.store(alone - 1, Ordering::Relaxed); // a count lost to another caller does no harm
        }
        alone > 0
    }

    /// Learn from a region: how long its caller worked, and then waited.
    fn learn(&self, worked: Duration, waited: Duration) {
        let penalty = self.penalty.load(Ordering::Relaxed);
        if waited > LATE + worked / 2 {
            let penalty = (2 * penalty).clamp(32, MAX_PENALTY);
            self.penalty.store(penalty, Ordering::Relaxed);
            self.alone.store(penalty, Ordering::Relaxed);
        } else if penalty > 0 {
            self.penalty.store(penalty / 2, Ordering::Relaxed);
        }
    }

    /// Keep the workers polling for [`AWAKE`] from now on; whether they had to be woken.
    fn keep_awake(&self) -> bool {
        self.pulse.fetch_add(1, Ordering::Relaxed);
        if self.awake.load(Ordering::Acquire) != 0 {
            return false; // a worker that is just giving up costs one slow region
        }
        self.awake.store(self.workers, Ordering::Release);
        let (awake, pulse) = (self.awake.clone(), self.pulse.clone());
        self.pool.spawn_broadcast(move |_| {
            poll(&pulse);
            awake.fetch_sub(1, Ordering::AcqRel);
        });
        true
    }
}

/// Run other jobs as they come, until `pulse` has stood still for [`AWAKE`].
fn poll(pulse: &AtomicUsize) {
    let (mut seen, mut since, mut idle) = (pulse.load(Ordering::Relaxed), Instant::now(), 0u32);
    loop {
        if rayon::yield_now() == Some(rayon::Yield::Executed) {
            idle = 0;
            continue;
        }
        spin_loop();
        idle = idle.wrapping_add(1);
        if idle % 64 == 0 {
            let now = pulse.load(Ordering::Relaxed);
            if now != seen {
                (seen, since) = (now, Instant::now());
            } else if since.elapsed() > AWAKE {
                return;
            } else if since.elapsed() > AWAKE / 16 {
                std::thread::yield_now(); // let others have the core while nothing happens
            }
        }
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
    let asleep = team.keep_awake();

    let items: Vec<Mutex<Option<T>>> = items.into_iter().map(|i| Mutex::new(Some(i))).collect();
    let left = AtomicUsize::new(threads - 1);
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
        // The scope would put this thread to sleep; what is left is short, unless a worker has lost its core: then
        // this thread must not hold one either. The few turns after the count cover the time between a job's end and
        // the scope's own count of it.
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
    fn the_number_of_threads_is_bounded() {
        assert!(set_num_threads(0).is_err());
        assert!(set_num_threads(MAX_THREADS + 1).is_err());
    }
}
