//! One round of planning on a live pool: what `benches/planner.rs` and `examples/planner_driver.rs` time.
#![allow(unreachable_pub, dead_code)] // each uses its part

use std::hint::black_box;
use std::time::{Duration, Instant};

use specrs::geometry::{Geometry, Layout, Limits, TreeShape};
use specrs::plan::{AuditedPlan, Batch, DraftMask, Lens, Lower, Paths, Planner, Trees};
use specrs::pool::{Lease, Pool, PoolConfig, SeqId};

pub const K: u32 = 8;
pub const S: u32 = 6;
pub const V: u32 = 64;
pub const L: u32 = 8192;

/// A batch in the middle of a round, and what its draft and its verification would deliver.
pub struct Round {
    pub pool: Pool,
    pub seqs: Vec<SeqId>,
    pub lens: Vec<u32>,
    lease: Option<Lease>,
    pub geometry: Geometry,
    /// Ancestor bits of each step, `[B * K]`.
    pub bits: Vec<Vec<u64>>,
    pub sizes: Vec<u32>,
    pub parents: Vec<i32>,
    pub path_sizes: Vec<u32>,
    pub path_nodes: Vec<u32>,
    starts: Vec<u32>,
}

/// Durations of a round of plans.
#[derive(Debug, Clone, Copy, Default)]
pub struct Took {
    pub round: Duration,
    /// Part of it for the draft steps, the verification and the commit; draft_extend and tail copies are the rest.
    pub draft: Duration,
    pub verify: Duration,
    pub commit: Duration,
    /// Bytes of the arrays of the format that were written.
    pub bytes: u64,
}

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as u32) % n
    }
}

impl Round {
    pub fn new(batch: u32, page_size: u32, layout: Layout) -> specrs::Result<Self> {
        let limits = Limits { max_batch: batch, max_context_len: 2 * L, page_size };
        let geometry = Geometry::new(limits, TreeShape::new(K, S, V)?, layout)?;
        let mut rng = Rng(batch as u64 + 1);
        let lens: Vec<u32> = (0..batch).map(|_| L - 500 + rng.below(500)).collect();
        let wants: Vec<u32> = lens.iter().map(|&l| geometry.alloc_target(l, 0)).collect::<specrs::Result<_>>()?;
        let pages = geometry.pages_for_full_load()?;
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
            lease: Some(lease),
            geometry,
            bits,
            sizes: vec![V; batch as usize],
            parents,
            path_sizes,
            path_nodes,
            seqs,
        })
    }

    /// Plan one round and say what that took; every plan is kept until the round's end, as an engine may.
    ///
    /// With `split` the clock is read between the parts too.
    pub fn run<F: Lower>(&mut self, planner: &mut Planner<F>, lanes: bool, split: bool) -> specrs::Result<Took> {
        let Self { pool, seqs, lens, bits, sizes, parents, path_sizes, path_nodes, starts, geometry, .. } = self;
        let mut took = Took::default();
        let clock = |split: bool, before: Instant| if split { before.elapsed() } else { Duration::ZERO };
        let before = Instant::now();
        let batch = Batch::new(seqs, Lens::Host(lens));
        let copies = match geometry.layout() {
            Layout::Dense => None,
            Layout::Holey => Some(pool.with_tables(|t| planner.tail_copies(&t, &batch))??),
        };
        let start = clock(split, before);
        let mut drafts: [Option<AuditedPlan<F>>; S as usize - 1] = Default::default();
        for (t, bits) in bits.iter().enumerate() {
            let mask = if lanes { DraftMask::Lane } else { DraftMask::Ancestors(bits) };
            drafts[t] = Some(pool.with_tables(|tables| planner.draft(&tables, &batch, t as u32, mask))??);
        }
        let drafted = clock(split, before);
        took.draft = drafted - start;
        let trees = Trees { sizes, parents };
        let verify = pool.with_tables(|t| planner.verify(&t, &batch, trees))??;
        took.verify = clock(split, before) - drafted;
        let paths = Paths { sizes: path_sizes, nodes: path_nodes };
        let commit = pool.with_tables(|t| planner.commit(&t, &batch, paths))??;
        took.round = before.elapsed();
        took.commit = took.round - drafted - took.verify;

        let mut lease = self.lease.take();
        for remap in commit.remaps() {
            lease.iter_mut().try_for_each(|l| l.remap(remap.seq, remap.first, remap.order))?;
        }
        lease.map_or(Ok(()), |l| l.commit(commit.new_lens()).map_err(|r| r.error))?;
        starts.copy_from_slice(lens);

        let before = Instant::now();
        let accepted = Batch::new(seqs, Lens::Host(starts));
        let extend = pool.with_tables(|t| planner.extend(&t, &accepted, path_sizes))??;
        took.round += before.elapsed();
        black_box((&copies, &drafts, &verify, &commit, &extend));
        let plans = drafts.iter().flatten().chain([&verify, &extend]);
        took.bytes = plans.flat_map(|plan| plan.arrays().iter()).map(|array| array.bytes.len() as u64).sum();
        lens.copy_from_slice(commit.new_lens());
        self.reserve()?;
        Ok(took)
    }

    /// Reserve the next round; start again where a length has left the neighbourhood of L: the bytes of some formats grow
    /// with it, and other sides of a comparison stay at L.
    fn reserve(&mut self) -> specrs::Result<()> {
        let Self { pool, seqs, lens, geometry, .. } = self;
        if lens.iter().any(|&l| l > L + 500) {
            pool.release(seqs)?;
            seqs.iter_mut().try_for_each(|s| pool.create().map(|new| *s = new))?;
            lens.iter_mut().for_each(|l| *l = L - 500 + *l % 500);
            let prompts: Vec<_> = seqs.iter().copied().zip(lens.iter().copied()).collect();
            pool.reserve(&prompts)?.commit(lens).map_err(|r| r.error)?;
        }
        let want = |(&s, &l): (&SeqId, &u32)| geometry.alloc_target(l, 0).map(|n| (s, n));
        let wants: Vec<_> = seqs.iter().zip(lens.iter()).map(want).collect::<specrs::Result<_>>()?;
        self.lease = Some(pool.reserve(&wants)?);
        Ok(())
    }
}
