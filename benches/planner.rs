//! All host arrays of one round: the draft steps' plans, verify, commit and draft_extend, checks included.
//!
//! Goal 2 of `performance.md`: K = 8, S = 6, V = 64, L about 8k; <= 1.5 / 4 / 10 / 35 us at batch 1 / 16 / 64 / 256.
//! `cargo bench --bench planner`; `benches/bench_planner.py` runs it beside sglang's functions.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use specrs::geometry::{Geometry, Layout, Limits, TreeShape};
use specrs::plan::{AuditedPlan, Batch, DraftMask, Lens, Native, Paths, Planner, Trees};
use specrs::pool::{Lease, Pool, PoolConfig, SeqId};

const K: u32 = 8;
const S: u32 = 6;
const V: u32 = 64;
const L: u32 = 8192;

/// A batch in the middle of a round, and what its draft and its verification would deliver.
struct Round {
    pool: Pool,
    seqs: Vec<SeqId>,
    lens: Vec<u32>,
    _lease: Lease,
    planner: Planner<Native>,
    /// Ancestor bits of each step, `[B * K]`.
    bits: Vec<Vec<u64>>,
    sizes: Vec<u32>,
    parents: Vec<i32>,
    path_sizes: Vec<u32>,
    path_nodes: Vec<u32>,
    starts: Vec<u32>,
}

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as u32) % n
    }
}

impl Round {
    fn new(batch: u32, page_size: u32) -> specrs::Result<Self> {
        let limits = Limits { max_batch: batch, max_context_len: 2 * L, page_size };
        let geometry = Geometry::new(limits, TreeShape::new(K, S, V)?, Layout::Dense)?;
        let mut rng = Rng(batch as u64 + 1);
        let lens: Vec<u32> = (0..batch).map(|_| L - 500 + rng.below(500)).collect();
        let wants: Vec<u32> = lens.iter().map(|&l| geometry.alloc_target(l, 0)).collect::<specrs::Result<_>>()?;
        let pages: u32 = wants.iter().map(|w| w / page_size).sum();
        let pool = Pool::new(PoolConfig {
            num_pages: pages + 1,
            page: geometry.page(),
            max_seqs: batch,
            row_pages: geometry.row_pages(),
        })?;
        // Pages in no order, as a pool that has served for a while hands them out.
        let mut ids = pool.alloc_pages(pages)?;
        for i in (1..ids.len()).rev() {
            ids.swap(i, rng.below(i as u32 + 1) as usize);
        }
        pool.free_pages(&ids)?;
        let seqs: Vec<SeqId> = (0..batch).map(|_| pool.create()).collect::<specrs::Result<_>>()?;
        let pair = |n: &[u32]| seqs.iter().copied().zip(n.iter().copied()).collect::<Vec<_>>();
        pool.reserve(&pair(&lens))?.commit(&lens).map_err(|r| r.error)?;
        let lease = pool.reserve(&pair(&wants))?;
        // Beams re-ranked at every step: each continues a random one of the step before.
        let mut bits: Vec<Vec<u64>> = Vec::new();
        for t in 0..S - 1 {
            let row = |i: u32, rng: &mut Rng| {
                let (request, b) = (i / K, i % K);
                let parent = rng.below(K);
                let own = 1u64 << (b * S + t);
                t.checked_sub(1).map_or(own, |u| own | bits[u as usize][(request * K + parent) as usize])
            };
            let step = (0..batch * K).map(|i| row(i, &mut rng)).collect();
            bits.push(step);
        }
        // Trees of V nodes and depth up to S, paths of 4 nodes: the first children and some others.
        let (mut parents, mut path_sizes, mut path_nodes) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..batch {
            let mut depth = vec![0u32];
            let mut tree = vec![-1i32];
            while tree.len() < V as usize {
                let p = rng.below(tree.len() as u32) as usize;
                if depth[p] < S {
                    depth.push(depth[p] + 1);
                    tree.push(p as i32);
                }
            }
            let mut path = vec![0u32];
            while path.len() < 4 {
                let at = *path.last().unwrap_or(&0) as i32;
                let Some(child) = (0..V).filter(|&j| tree[j as usize] == at).nth(rng.below(2) as usize) else { break };
                path.push(child);
            }
            parents.extend(tree);
            path_sizes.push(path.len() as u32);
            path_nodes.extend(path);
        }
        Ok(Self {
            pool,
            starts: lens.clone(),
            lens,
            _lease: lease,
            planner: Planner::new(geometry, Native)?,
            bits,
            sizes: vec![V; batch as usize],
            parents,
            path_sizes,
            path_nodes,
            seqs,
        })
    }

    /// Every plan of one round, kept until its end as an engine may.
    fn run(&mut self) -> specrs::Result<()> {
        let Self { pool, seqs, lens, planner, bits, sizes, parents, path_sizes, path_nodes, starts, .. } = self;
        let batch = Batch::new(seqs, Lens::Host(lens));
        let mut drafts: [Option<AuditedPlan>; S as usize - 1] = Default::default();
        for (t, bits) in bits.iter().enumerate() {
            let mask = DraftMask::Ancestors(bits);
            drafts[t] = Some(pool.with_tables(|tables| planner.draft(&tables, &batch, t as u32, mask))??);
        }
        let trees = Trees { sizes, parents };
        let verify = pool.with_tables(|t| planner.verify(&t, &batch, trees))??;
        let paths = Paths { sizes: path_sizes, nodes: path_nodes };
        let commit = pool.with_tables(|t| planner.commit(&t, &batch, paths))??;
        let accepted = Batch::new(seqs, Lens::Host(starts));
        let extend = pool.with_tables(|t| planner.extend(&t, &accepted, path_sizes))??;
        black_box((&drafts, &verify, &commit, &extend));
        Ok(())
    }
}

fn rounds(c: &mut Criterion) {
    for page_size in [1, 16, 64] {
        let mut group = c.benchmark_group(format!("round_p{page_size}"));
        for batch in [1, 16, 64, 256] {
            let mut round = Round::new(batch, page_size).expect("the shapes are in range");
            group.bench_function(BenchmarkId::from_parameter(batch), |b| {
                b.iter(|| round.run().expect("the round is in range"));
            });
        }
        group.finish();
    }
}

/// The parts of a round at batch 64 and 256.
fn parts(c: &mut Criterion) {
    for batch in [64, 256] {
        let mut group = c.benchmark_group(format!("parts_b{batch}"));
        let mut r = Round::new(batch, 1).expect("the shapes are in range");
        let Round { pool, seqs, lens, planner, bits, sizes, parents, path_sizes, path_nodes, .. } = &mut r;
        let b = Batch::new(seqs, Lens::Host(lens));
        group.bench_function("draft", |x| {
            x.iter(|| pool.with_tables(|t| black_box(planner.draft(&t, &b, 2, DraftMask::Ancestors(&bits[2])))));
        });
        group.bench_function("verify", |x| {
            x.iter(|| pool.with_tables(|t| black_box(planner.verify(&t, &b, Trees { sizes, parents }))));
        });
        let paths = Paths { sizes: path_sizes, nodes: path_nodes };
        group.bench_function("commit", |x| x.iter(|| pool.with_tables(|t| black_box(planner.commit(&t, &b, paths)))));
        group.bench_function("extend", |x| {
            x.iter(|| pool.with_tables(|t| black_box(planner.extend(&t, &b, path_sizes))));
        });
        group.finish();
    }
}

criterion_group!(benches, rounds, parts);
criterion_main!(benches);
