//! Times the allocator on request, for `benches/bench_allocator.py`: the peers are Python, and this way the Rust core
//! takes its turn between them in the same run.
//!
//! Each line of standard input is answered by a line of JSON:
//! * `raw PAGES N SHUFFLED`: take N pages of a pool of PAGES and give them back: nanoseconds a cycle, pages free afterwards;
//! * `round PAGE_SIZE BATCH PAGES SHUFFLED`: one round of a batch: nanoseconds a round, pages taken a round, the committed
//!   lengths' sum after 32 rounds from the start and the pages free then, which the peers' accounts must equal;
//!   SHUFFLED is 1 for a free list in random order, 0 for one in order;
//! * `geometry PAGE_SIZE`: positions that a round reserves beyond the committed length.

#[path = "../benches/workload/allocator.rs"]
mod workload;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{BufRead, Write};
use std::time::Instant;

use specrs::pool::{Pool, PoolConfig};
use workload::Rounds;

/// Rounds after which the accounts are compared with the peers'.
const COMPARED: u32 = 32;
/// Nanoseconds that one answer measures for, at least.
const TOTAL: f64 = 20e6;
/// Nanoseconds between two looks at the clock, at least: the clock's own time is 0.1% of it, and what another process
/// takes from us falls on few of them, which the median leaves out.
const WINDOW: f64 = 20e3;

type Failure = Box<dyn std::error::Error>;

/// Median nanoseconds of one `cycle`. `before` is told how many cycles follow, and is not timed.
fn median_ns(
    mut before: impl FnMut(u32) -> specrs::Result<()>,
    mut cycle: impl FnMut() -> specrs::Result<()>,
) -> specrs::Result<f64> {
    let (mut cycles, mut samples, mut total) = (1u32, Vec::new(), 0.0);
    while total < TOTAL || samples.len() < 9 {
        before(cycles)?;
        let start = Instant::now();
        for _ in 0..cycles {
            cycle()?;
        }
        let ns = start.elapsed().as_nanos() as f64;
        total += ns;
        if ns < WINDOW && cycles < 64 {
            cycles *= 2;
            samples.clear();
        } else {
            samples.push(ns / f64::from(cycles));
        }
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples[samples.len() / 2])
}

/// Pools by what they were asked for, so that an answer times no set-up.
#[derive(Default)]
struct Driver {
    raw: HashMap<(u32, u32), Pool>,
    rounds: HashMap<[u32; 4], (Rounds, u64, u32)>,
}

impl Driver {
    fn answer(&mut self, line: &str) -> Result<String, Failure> {
        let mut words = line.split_whitespace();
        let what = words.next().unwrap_or_default();
        let n: Vec<u32> = words.map(str::parse).collect::<Result<_, _>>()?;
        match (what, n.as_slice()) {
            ("raw", &[pages, n, shuffled]) => self.raw(pages, n, shuffled),
            ("round", &[page, batch, pages, shuffled]) => self.round([page, batch, pages, shuffled]),
            ("geometry", &[page]) => {
                let rounds = Rounds::new(page, 1, 1 << 14, false)?;
                Ok(format!(r#"{{"reserve": {}}}"#, rounds.geometry.reserve_per_decode()))
            }
            _ => Err(format!("unknown request {line:?}").into()),
        }
    }

    fn raw(&mut self, pages: u32, n: u32, shuffled: u32) -> Result<String, Failure> {
        if let Entry::Vacant(new) = self.raw.entry((pages, shuffled)) {
            let page = specrs::bounds::PageSize::new(16)?;
            let pool = Pool::new(PoolConfig { num_pages: pages + 1, page, max_seqs: 1, row_pages: 1 })?;
            if shuffled != 0 {
                workload::shuffle(&pool, pages)?;
            }
            new.insert(pool);
        }
        let pool = &self.raw[&(pages, shuffled)];
        let mut ids = Vec::with_capacity(n as usize);
        let cycle = || {
            ids.clear();
            pool.alloc_pages_into(n, &mut ids)?;
            pool.free_pages(&ids)
        };
        let ns = median_ns(|_| Ok(()), cycle)?;
        let free = pool.audit()?.free_pages;
        Ok(format!(r#"{{"ns": {ns}, "free": {free}}}"#))
    }

    fn round(&mut self, key: [u32; 4]) -> Result<String, Failure> {
        let [page, batch, pages, shuffled] = key;
        if let Entry::Vacant(new) = self.rounds.entry(key) {
            let mut rounds = Rounds::new(page, batch, pages, shuffled != 0)?;
            for _ in 0..COMPARED {
                rounds.round()?;
            }
            let sum = rounds.lens.iter().map(|&l| u64::from(l)).sum();
            let free = rounds.pool.audit()?.free_pages;
            new.insert((rounds, sum, free));
        }
        let Some((rounds, sum, free)) = self.rounds.get_mut(&key) else { return Err("no such pool".into()) };
        let (mut taken, mut cycles) = (0, 0u64);
        let shared = std::cell::RefCell::new(rounds);
        let ns = median_ns(
            |cycles| shared.borrow_mut().rewind(cycles),
            || {
                taken += shared.borrow_mut().round()?;
                cycles += 1;
                Ok(())
            },
        )?;
        shared.borrow().pool.audit()?;
        let taken = taken as f64 / cycles as f64;
        Ok(format!(r#"{{"ns": {ns}, "pages": {taken}, "sum_after_32": {sum}, "free_after_32": {free}}}"#))
    }
}

fn main() -> Result<(), Failure> {
    let mut driver = Driver::default();
    let mut out = std::io::stdout();
    for line in std::io::stdin().lock().lines() {
        let answer = match driver.answer(&line?) {
            Ok(answer) => answer,
            Err(e) => format!(r#"{{"error": "{}"}}"#, e.to_string().replace(['"', '\\'], "'")),
        };
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}
