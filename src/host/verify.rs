//! Verification: walk each request's tree along the tokens that plain decoding would have drawn.
//!
//! At a node, the target's own token is drawn from the node's row of logits, exactly as plain decoding would draw it
//! after the same tokens ([`Sampler::draw`]). A child that carries it is accepted and becomes the next node; otherwise
//! the walk ends. So the emitted tokens are those of plain decoding, whatever the tree: the tree decides only how many
//! of them come out of one round. Greedy is the case of temperature 0. Rows of nodes that no walk reaches are not read.

use crate::error::{Error, Result};
use crate::host::sample::{Sampler, Scratch};
use crate::host::select::TreeBatch;
use crate::host::threads::{self, num_threads};
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a vocabulary entry takes in a request's walk (a few rows) on one thread, in picoseconds, greedy and sampled:
/// decides whether threads pay.
const COST_PS: [usize; 2] = [300, 1500];

/// What a round accepted.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Accepts {
    paths: Vec<u32>,
    tokens: Vec<i32>,
    /// Where each request's entries start in both arrays.
    offsets: Vec<usize>,
}

impl Accepts {
    /// Requests.
    pub fn len(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    /// Whether there are no requests.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Accepted nodes of request `i`, the root (0) first, each the parent of the next.
    pub fn path(&self, i: usize) -> &[u32] {
        self.range(i).and_then(|r| self.paths.get(r)).unwrap_or(&[])
    }

    /// Tokens that request `i` emits, as many as its path has nodes: the accepted drafts, and the token drawn at the last
    /// accepted node (the next root).
    pub fn tokens(&self, i: usize) -> &[i32] {
        self.range(i).and_then(|r| self.tokens.get(r)).unwrap_or(&[])
    }

    fn range(&self, i: usize) -> Option<std::ops::Range<usize>> {
        Some(*self.offsets.get(i)?..*self.offsets.get(i + 1)?)
    }

    fn clear(&mut self) {
        self.paths.clear();
        self.tokens.clear();
        self.offsets.clear();
    }
}

/// A thread's buffers: its walks behind one another.
#[derive(Debug, Default)]
struct Worker {
    scratch: Scratch,
    paths: Vec<u32>,
    tokens: Vec<i32>,
    /// (request, where its walk starts), in the order of both.
    walks: Vec<(usize, usize)>,
    fault: Option<(usize, Error)>,
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
    /// [`Error::Mismatch`] where counts, vocabularies or sizes differ; [`Error::NonFinite`] with the request and the
    /// row of `logits` for a bad row that a walk reads; [`Error::Overflow`] for a position beyond u32. `out` is empty
    /// then.
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
        // The first request with a fault, so that the error does not depend on the threads either.
        if let Some((_, e)) = workers.iter().filter_map(|w| w.fault.as_ref()).min_by_key(|f| f.0) {
            return Err(e.clone());
        }
        self.order.resize(batch, (0, 0));
        for (w, worker) in workers.iter().enumerate() {
            for (n, &(request, _)) in worker.walks.iter().enumerate() {
                self.order[request] = (w, n);
            }
        }
        out.offsets.push(0);
        for &(w, n) in &self.order {
            let worker = &workers[w];
            let end = worker.walks.get(n + 1).map_or(worker.paths.len(), |&(_, start)| start);
            let walk = worker.walks[n].1..end;
            out.paths.extend_from_slice(&worker.paths[walk.clone()]);
            out.tokens.extend_from_slice(&worker.tokens[walk]);
            out.offsets.push(out.paths.len());
        }
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
        Ok(Self { trees, logits, vocab, samplers, lens })
    }
}

impl Worker {
    fn run(&mut self, round: Round<'_>, next: &AtomicUsize) {
        self.paths.clear();
        self.tokens.clear();
        self.walks.clear();
        self.fault = None;
        loop {
            let request = next.fetch_add(1, Ordering::Relaxed);
            if request >= round.trees.len() {
                return;
            }
            self.walks.push((request, self.paths.len()));
            if let Err(e) = self.walk(round, request) {
                self.fault = Some((request, e));
                return;
            }
        }
    }

    fn walk(&mut self, round: Round<'_>, request: usize) -> Result<()> {
        let first = round.trees.range(request).start;
        let start = self.tokens.len();
        let mut node = 0;
        loop {
            let depth = self.tokens.len() - start;
            let position = round.lens[request].checked_add(depth as u32 + 1).ok_or_else(|| Error::Overflow {
                what: "token position",
                expr: format!("{} + {depth} + 1", round.lens[request]),
                ty: "uint32",
                limit: u64::from(u32::MAX),
            })?;
            let row = first + node;
            let logits = &round.logits[row * round.vocab..][..round.vocab];
            let path = &self.tokens[start..]; // the tokens emitted so far are those below the root
            let token = round.samplers[request]
                .draw_unchecked(&mut self.scratch, logits, position, path)
                .map_err(|f| f.at("target logits", request as i64, row as i64))?;
            self.paths.push(node as u32);
            self.tokens.push(token);
            match child_with(round.trees, first, node, token) {
                Some(child) => node = child,
                None => return Ok(()),
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
