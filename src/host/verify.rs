//! Verification: walk each request's tree along the tokens that plain decoding would have drawn.
//!
//! At a node, the target's own token is drawn from the node's row of logits, exactly as plain decoding would draw it
//! after the same tokens ([`Sampler::draw`]). A child that carries it is accepted and becomes the next node; otherwise
//! the walk ends. So the emitted tokens are those of plain decoding, whatever the tree: the tree decides only how many
//! of them come out of one round. Greedy is the case of temperature 0. Rows of nodes that no walk reaches are not read.
//!
//! A row that a walk reads and that cannot be sampled ends that walk alone, where plain decoding would have ended:
//! [`Accepts::fault`]. The other requests' walks go on.

use crate::error::{Error, Result};
use crate::host::sample::{Sampler, Scratch};
use crate::host::threads::{self, num_threads};
use crate::round::accepts::NO_TOKEN;
use crate::round::{Accepts, TreeBatch};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Time of a vocabulary entry in a request's walk (a few rows) on one thread, in picoseconds, greedy and sampled: it
/// decides whether threads pay.
const COST_PS: [usize; 2] = [300, 1500];

/// A thread's buffers: its walks behind one another.
#[derive(Debug, Default)]
struct Worker {
    scratch: Scratch,
    paths: Vec<u32>,
    tokens: Vec<i32>,
    /// (request, where its walk starts), in the order of both.
    walks: Vec<(usize, usize)>,
    faults: Vec<(usize, Error)>,
}

/// Verification with buffers that are reused from round to round.
#[derive(Debug, Default)]
pub struct Verifier {
    workers: Vec<Worker>,
    /// Worker of each request, and which of its walks.
    order: Vec<(usize, usize)>,
}

/// The operands of a round, checked against each other.
#[derive(Clone, Copy)]
struct Round<'a> {
    trees: &'a TreeBatch,
    logits: &'a [f32],
    vocab: usize,
    samplers: &'a [&'a Sampler],
    lens: &'a [u32],
}

impl Verifier {
    /// Walk all trees. `logits` is `[trees.nodes(), vocab]` (f32), `samplers` and `lens` (committed lengths: the root's
    /// absolute position) have one entry a request. Large rounds are spread over the kernels' threads; the
    /// result does not depend on them. Samplers are not changed: commit the emitted tokens that are kept.
    ///
    /// # Errors
    /// [`Error::Mismatch`] where counts, vocabularies or sizes differ; [`Error::Overflow`] for a tree whose positions
    /// could leave u32. `out` is empty then. A row that cannot be sampled is a fault of its request alone
    /// ([`Accepts::fault`]).
    pub fn verify(
        &mut self,
        trees: &TreeBatch,
        logits: &[f32],
        samplers: &[&Sampler],
        lens: &[u32],
        out: &mut Accepts,
    ) -> Result<()> {
        out.clear();
        let round = Round::new(trees, logits, samplers, lens)?;
        let batch = trees.len();
        let cost_ps = |s: &&Sampler| round.vocab * COST_PS[usize::from(s.config().temperature > 0.0)];
        let cost_ns = samplers.iter().map(cost_ps).sum::<usize>() / 1000;
        let threads = if cost_ns < threads::WORTH_A_REGION_NS { 1 } else { num_threads() }.min(batch);
        if self.workers.len() < threads {
            self.workers.resize_with(threads, Worker::default);
        }
        let next = AtomicUsize::new(0); // requests are handed out one by one: their costs differ
        match &mut self.workers[..threads] {
            [] => {}
            [worker] => worker.run(round, &next),
            workers => threads::for_each(workers.iter_mut().collect(), cost_ns, |w| w.run(round, &next)),
        }
        let workers = &self.workers[..threads];
        self.order.resize(batch, (0, 0));
        for (w, worker) in workers.iter().enumerate() {
            for (n, &(request, _)) in worker.walks.iter().enumerate() {
                self.order[request] = (w, n);
            }
        }
        for &(w, n) in &self.order {
            let worker = &workers[w];
            let end = worker.walks.get(n + 1).map_or(worker.paths.len(), |&(_, start)| start);
            let walk = worker.walks[n].1..end;
            out.push(&worker.paths[walk.clone()], &worker.tokens[walk]);
        }
        out.add_faults(workers.iter().flat_map(|w| &w.faults).cloned());
        Ok(())
    }
}

impl<'a> Round<'a> {
    fn new(trees: &'a TreeBatch, logits: &'a [f32], samplers: &'a [&'a Sampler], lens: &'a [u32]) -> Result<Self> {
        let same = |operand, got: usize, want: usize| {
            let error = || Error::Mismatch { operand, got: got.to_string(), want: want.to_string() };
            if got == want { Ok(()) } else { Err(error()) }
        };
        same("samplers", samplers.len(), trees.len())?;
        same("lens", lens.len(), trees.len())?;
        let vocab = samplers.first().map_or(0, |s| s.vocab()) as usize;
        samplers.iter().try_for_each(|s| same("sampler vocabulary", s.vocab() as usize, vocab))?;
        if trees.nodes().checked_mul(vocab) != Some(logits.len()) {
            let want = format!("{} x {vocab} (nodes, vocabulary)", trees.nodes());
            return Err(Error::Mismatch { operand: "target logits", got: format!("{} values", logits.len()), want });
        }
        for (&len, size) in lens.iter().zip(trees.sizes()) {
            // A walk of n nodes draws at len + 1 ..= len + n.
            len.checked_add(size).ok_or_else(|| Error::Overflow {
                what: "token position",
                expr: format!("{len} + {size}"),
                ty: "uint32",
                limit: u64::from(u32::MAX),
            })?;
        }
        Ok(Self { trees, logits, vocab, samplers, lens })
    }
}

impl Worker {
    fn run(&mut self, round: Round<'_>, next: &AtomicUsize) {
        self.paths.clear();
        self.tokens.clear();
        self.walks.clear();
        self.faults.clear();
        loop {
            let request = next.fetch_add(1, Ordering::Relaxed);
            if request >= round.trees.len() {
                return;
            }
            self.walks.push((request, self.paths.len()));
            self.walk(round, request);
        }
    }

    fn walk(&mut self, round: Round<'_>, request: usize) {
        let first = round.trees.range(request).start;
        let start = self.tokens.len();
        let mut node = 0;
        loop {
            let depth = (self.tokens.len() - start) as u32;
            let position = round.lens[request] + depth + 1; // `Round::new`: no overflow
            let row = first + node;
            let logits = &round.logits[row * round.vocab..][..round.vocab];
            let path = &self.tokens[start..]; // the tokens emitted so far are those below the root
            let drawn = round.samplers[request].draw_unchecked(&mut self.scratch, logits, position, path);
            self.paths.push(node as u32);
            let token = match drawn {
                Ok(token) => token,
                Err(fault) => {
                    self.tokens.push(NO_TOKEN);
                    self.faults.push((request, fault.at(request as i64, row as i64, position)));
                    return;
                }
            };
            self.tokens.push(token);
            match child_with(round.trees, first, node, token) {
                Some(child) => node = child,
                None => return,
            }
        }
    }
}

/// The first child of `node` that carries `token`.
fn child_with(trees: &TreeBatch, first: usize, node: usize, token: i32) -> Option<usize> {
    let mut child = trees.next_child()[first + node];
    while let Ok(c) = usize::try_from(child) {
        if trees.tokens()[first + c] == token {
            return Some(c);
        }
        child = trees.next_sibling()[first + c];
    }
    None
}
