//! The allocator, goal 1 of `benches/README.md`: alloc -> commit -> free overshoot, <= 10 ns a page.
//!
//! `cargo bench --bench allocator`; `benches/bench_allocator.py` runs the same work beside vLLM's and sglang's
//! allocators. Criterion's throughput is in pages taken (and given back, but for those kept) a second.
#![allow(clippy::expect_used)]

#[path = "workload/allocator.rs"]
mod workload;

use std::time::Instant;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use specrs::bounds::PageSize;
use specrs::pool::{Pool, PoolConfig};
use workload::{Rounds, shuffle};

/// Rounds between rewinds, which are not timed.
const CHUNK: u64 = 32;

fn rounds(c: &mut Criterion) {
    for pages in [1 << 16, 1 << 20] {
        let mut group = c.benchmark_group(format!("round/{pages} pages"));
        for page_size in [1, 16, 64] {
            for batch in [1, 16, 64, 256] {
                if u64::from(batch) * 2048 > u64::from(pages) * u64::from(page_size) {
                    continue; // the requests themselves do not fit
                }
                let mut rounds = Rounds::new(page_size, batch, pages, true).expect("a valid configuration");
                let taken = rounds.round().expect("a pool that is large enough");
                group.throughput(Throughput::Elements(taken));
                group.bench_function(BenchmarkId::new(format!("P{page_size}"), batch), |b| {
                    b.iter_custom(|n| {
                        let mut spent = std::time::Duration::ZERO;
                        for first in (0..n).step_by(CHUNK as usize) {
                            let chunk = CHUNK.min(n - first) as u32;
                            rounds.rewind(chunk).expect("a live pool");
                            let start = Instant::now();
                            for _ in 0..chunk {
                                rounds.round().expect("a pool that is large enough");
                            }
                            spent += start.elapsed();
                        }
                        spent
                    });
                });
                rounds.pool.audit().expect("accounts that agree");
            }
        }
        group.finish();
    }
}

/// The rounds above with a mirror of the page table that stores the changes of each.
fn mirrored(c: &mut Criterion) {
    let mut group = c.benchmark_group("mirrored round/65536 pages");
    for page_size in [1, 16, 64] {
        let mut rounds = Rounds::new(page_size, 16, 1 << 16, true).expect("a valid configuration");
        let (pool, width) = (rounds.pool.clone(), rounds.pool.config().row_pages as usize);
        let (mut mirror, mut epoch) = pool.with_tables(|t| (t.table().to_vec(), t.epoch())).expect("a live pool");
        let mut look = || {
            pool.with_tables(|t| {
                let changes = t.changes(Some(epoch)).expect("an epoch of this pool");
                for c in changes.iter() {
                    mirror[c.row as usize * width + c.first as usize..][..c.pages.len()].copy_from_slice(c.pages);
                }
                epoch = changes.epoch();
            })
            .expect("a live pool");
        };
        group.bench_function(BenchmarkId::new(format!("P{page_size}"), 16), |b| {
            b.iter(|| {
                rounds.rewind(1).expect("a live pool");
                rounds.round().expect("a pool that is large enough");
                look();
            });
        });
    }
    group.finish();
}

fn raw(c: &mut Criterion) {
    for pages in [1u32 << 16, 1 << 20] {
        let page = PageSize::new(16).expect("a power of two");
        let pool = Pool::new(PoolConfig { num_pages: pages + 1, page, max_seqs: 1, row_pages: 1 })
            .expect("a valid configuration");
        shuffle(&pool, pages).expect("a fresh pool");
        let mut group = c.benchmark_group(format!("raw/{pages} pages"));
        for n in [1u32, 64, 4096] {
            let mut ids = Vec::with_capacity(n as usize);
            group.throughput(Throughput::Elements(n.into()));
            group.bench_function(BenchmarkId::from_parameter(n), |b| {
                b.iter(|| {
                    ids.clear();
                    pool.alloc_pages_into(n, &mut ids).expect("a pool that is large enough");
                    pool.free_pages(&ids).expect("pages that were just taken");
                });
            });
        }
        group.finish();
        pool.audit().expect("accounts that agree");
    }
}

criterion_group!(benches, rounds, mirrored, raw);
criterion_main!(benches);
