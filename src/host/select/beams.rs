//! The dynamic draft tree: candidates, beams, and the inputs that the draft model's next forward takes from them.

use super::TopK;
use crate::bounds::fits_i32;
use crate::error::{Error, Result, in_range};
use crate::geometry::{TreeShape, words_for};
use crate::host::sample::check_tokens;
use crate::host::sample::scan::{key_index, rank_key};
use crate::round::{MAX_VOCAB, TreeBatch};

/// Candidate tables and beams of a batch, reused from round to round.
///
/// **Candidates** of a request have indices in the order of steps: `0..K` are the children of the root; then, for each
/// step s >= 1, `K + (s-1)*K*K + b*K + j` is the j-th best child of beam b of step s-1. So `parent < child`, and all
/// candidates of depth <= d are a prefix. **Beams** of a step are the K best of its candidates by cumulative
/// log-probability, best first, ties by lower index.
///
/// **Faults.** Logits without a distribution (NaN, +inf, no finite value) end the drafting of their request alone: the
/// levels before stay, later logits of the request are ignored, and its tree ends at the last sound level, which may be
/// the root. Its beams go on as placeholders with valid tokens, so that the batch keeps its rows.
///
/// **Slots.** Beam b of step s has draft slot `b*S + s` (the dense layout of the draft region). A row of ancestor bits has
/// `words_for(K*S)` words of 64 bits; bit i of a row is slot i.
#[derive(Debug)]
pub struct DraftBeams {
    shape: TreeShape,
    /// Size of the target's vocabulary.
    vocab: u32,
    /// Size of the draft's vocabulary; always `>= K`.
    draft_vocab: usize,
    /// Draft id -> target id, each in `0..vocab`; `None` is the identity.
    to_target: Option<Vec<i32>>,
    /// Requests of the round.
    batch: usize,
    /// Steps whose candidates are in the tables.
    steps: usize,
    /// Steps of each request before its first fault.
    sound: Vec<u32>,
    /// The first fault of each request that has one, in the order in which they were met.
    faults: Vec<Error>,
    /// Per request `shape.candidates()` entries: cumulative log-probability, token, index of the parent candidate
    /// (-1 below the root). Only the first `steps` steps are of this round.
    scores: Vec<f32>,
    candidate_tokens: Vec<i32>,
    candidate_parents: Vec<i32>,
    /// `[batch, K]`: the candidate that each beam is.
    beams: Vec<u32>,
    tokens: Vec<i32>,
    parents: Vec<i32>,
    ancestors: Vec<u64>,
    topk: TopK,
    keys: Vec<u64>,
    spare_beams: Vec<u32>,
    spare_bits: Vec<u64>,
    node_of: Vec<u32>,
}

impl DraftBeams {
    /// Tables for trees of `shape`. `vocab` is the target's vocabulary; `d2t` holds the offset to add to each draft id
    /// (the EAGLE-3 format), `None` where the draft shares the target's vocabulary.
    ///
    /// `d2t` may map two draft ids to one token. Both stay candidates; verification follows the one that comes first
    /// among its siblings, which is the more probable one.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a vocabulary or a mapped id out of range; [`Error::Invalid`] where `topk` exceeds the
    /// draft vocabulary.
    pub fn new(shape: TreeShape, vocab: u32, d2t: Option<&[i64]>) -> Result<Self> {
        in_range("vocab", vocab, 1, i128::from(MAX_VOCAB))?;
        let to_target = d2t.map(|offsets| to_target(offsets, vocab)).transpose()?;
        let draft_vocab = to_target.as_ref().map_or(vocab as usize, Vec::len);
        if shape.topk() as usize > draft_vocab {
            let why = format!("the draft vocabulary has only {draft_vocab} tokens");
            return Err(Error::Invalid { what: "topk", got: shape.topk().to_string(), why });
        }
        Ok(Self {
            shape,
            vocab,
            draft_vocab,
            to_target,
            batch: 0,
            steps: 0,
            sound: Vec::new(),
            faults: Vec::new(),
            scores: Vec::new(),
            candidate_tokens: Vec::new(),
            candidate_parents: Vec::new(),
            beams: Vec::new(),
            tokens: Vec::new(),
            parents: Vec::new(),
            ancestors: Vec::new(),
            topk: TopK::default(),
            keys: Vec::new(),
            spare_beams: Vec::new(),
            spare_bits: Vec::new(),
            node_of: Vec::new(),
        })
    }

    /// Step 0 of a new round: `logits` `[B, draft_vocab]` (f32) of the position after each root. Sets the batch to B.
    ///
    /// # Errors
    /// Those of [`TopK::compute`]; [`Error::Overflow`] or [`Error::Invalid`] for more candidates than int32 counts, or
    /// than there is memory for. The tables are as before then.
    pub fn start(&mut self, logits: &[f32]) -> Result<()> {
        let (k, stride) = (self.shape.topk() as usize, self.shape.candidates() as usize);
        let batch = logits.len() / self.draft_vocab;
        self.reserve(batch)?;
        self.topk.compute(logits, self.draft_vocab, k)?;
        (self.batch, self.steps) = (batch, 1);
        self.scores.resize(batch * stride, 0.0);
        self.candidate_tokens.resize(batch * stride, 0);
        self.candidate_parents.resize(batch * stride, -1);
        self.beams.resize(batch * k, 0);
        self.tokens.resize(batch * k, 0);
        self.parents.resize(batch * k, 0);
        let words = self.mask_words();
        self.ancestors.clear();
        self.ancestors.resize(batch * k * words, 0);
        for i in 0..batch {
            for b in 0..k {
                let (row, candidate) = (i * k + b, i * stride + b);
                self.scores[candidate] = self.topk.log_probs()[row];
                self.candidate_tokens[candidate] = self.target_id(self.topk.ids()[row]);
                self.candidate_parents[candidate] = -1;
                self.beams[row] = b as u32;
                self.tokens[row] = self.candidate_tokens[candidate];
                self.parents[row] = i as i32;
            }
        }
        self.mark_slots(0);
        self.sound.clear();
        self.sound.resize(batch, 0);
        self.faults.clear();
        self.note_faults(0, 1);
        Ok(())
    }

    /// Room for the tables of `batch` requests, whose content is kept.
    fn reserve(&mut self, batch: usize) -> Result<()> {
        fn room<T>(table: &mut Vec<T>, len: usize) -> bool {
            table.try_reserve(len.saturating_sub(table.len())).is_ok()
        }
        let (k, stride) = (self.shape.topk() as usize, self.shape.candidates() as usize);
        check_batch(batch, self.shape)?;
        let (rows, words) = (batch * k, batch * k * self.mask_words());
        let there = room(&mut self.sound, batch)
            && room(&mut self.scores, batch * stride)
            && room(&mut self.candidate_tokens, batch * stride)
            && room(&mut self.candidate_parents, batch * stride)
            && room(&mut self.beams, rows)
            && room(&mut self.spare_beams, rows)
            && room(&mut self.tokens, rows)
            && room(&mut self.parents, rows)
            && room(&mut self.ancestors, words)
            && room(&mut self.spare_bits, words);
        if there {
            return Ok(());
        }
        Err(Error::Invalid {
            what: "draft candidates",
            got: format!("{batch} requests of {stride} candidates"),
            why: "no memory for their tables; a smaller batch, topk or steps takes less".into(),
        })
    }

    /// The next step: `logits` `[B*K, draft_vocab]` (f32) of the beams' own positions.
    ///
    /// # Errors
    /// [`Error::Invalid`] before [`DraftBeams::start`] or after S steps; [`Error::Mismatch`] for another number of rows;
    /// those of [`TopK::compute`]. The tables are as before then.
    pub fn advance(&mut self, logits: &[f32]) -> Result<()> {
        let (k, stride) = (self.shape.topk() as usize, self.shape.candidates() as usize);
        let step = self.steps;
        if step == 0 || step >= self.shape.steps() as usize {
            let why =
                format!("advance() follows start() and runs at most steps - 1 = {} times", self.shape.steps() - 1);
            return Err(Error::Invalid { what: "draft step", got: step.to_string(), why });
        }
        let rows = self.batch * k;
        if logits.len() != rows * self.draft_vocab {
            return Err(Error::Mismatch {
                operand: "draft logits",
                got: format!("{} values", logits.len()),
                want: format!("{rows} x {} (batch * topk, draft vocabulary)", self.draft_vocab),
            });
        }
        self.topk.compute(logits, self.draft_vocab, k)?;
        self.steps = step + 1;
        let words = self.mask_words();
        self.spare_beams.resize(rows, 0);
        self.spare_bits.resize(rows * words, 0);
        let first = k + (step - 1) * k * k; // first of this step's candidates
        for i in 0..self.batch {
            self.keys.clear();
            for b in 0..k {
                let parent = self.beams[i * k + b];
                let score = self.scores[i * stride + parent as usize];
                let (entry, candidate) = ((i * k + b) * k, i * stride + first + b * k);
                for j in 0..k {
                    self.scores[candidate + j] = score + self.topk.log_probs()[entry + j];
                    self.candidate_tokens[candidate + j] = self.target_id(self.topk.ids()[entry + j]);
                }
                self.candidate_parents[candidate..][..k].fill(parent as i32);
                offer(&mut self.keys, k, b, &self.scores[candidate..][..k]);
            }
            for b in 0..k {
                let child = key_index(self.keys[b]);
                let (row, parent_row) = (i * k + b, i * k + child / k);
                self.spare_beams[row] = (first + child) as u32;
                self.tokens[row] = self.candidate_tokens[i * stride + first + child];
                self.parents[row] = parent_row as i32;
                self.spare_bits[row * words..][..words].copy_from_slice(&self.ancestors[parent_row * words..][..words]);
            }
        }
        std::mem::swap(&mut self.beams, &mut self.spare_beams);
        std::mem::swap(&mut self.ancestors, &mut self.spare_bits);
        self.mark_slots(step);
        self.note_faults(step, k);
        Ok(())
    }

    /// After step `step`: requests that had no fault before and have none now have one sound step more.
    fn note_faults(&mut self, step: usize, rows_per_request: usize) {
        let (before, now) = (step as u32, step as u32 + 1);
        self.sound.iter_mut().filter(|n| **n == before).for_each(|n| *n = now);
        for (row, fault) in self.topk.faults() {
            let request = row / rows_per_request;
            if self.sound[request] == now {
                self.sound[request] = before;
                self.faults.push(match fault {
                    Error::NonFinite { what, value, row, position, index, .. } => {
                        Error::NonFinite { what, value, request: request as i64, row, position, index }
                    }
                    fault => fault,
                });
            }
        }
    }

    /// Make each request's tree: its root token and the best candidates of all steps so far.
    ///
    /// Request i gets the `max_nodes[i] - 1` best candidates of depth <= `max_depths[i]` (or all there are) by
    /// cumulative log-probability, ties by lower index, in the order of their indices. The choice is closed under
    /// ancestors: a parent's score is not below its child's and its index is lower, so it ranks above. A request with a
    /// fault has candidates of its sound steps alone.
    ///
    /// `out` is overwritten; after an error its content is unspecified.
    ///
    /// # Errors
    /// [`Error::Mismatch`] unless the three slices have B entries; [`Error::OutOfRange`] for a root outside the
    /// vocabulary or a node limit outside `1..=V`.
    pub fn finish(&mut self, roots: &[i32], max_depths: &[u32], max_nodes: &[u32], out: &mut TreeBatch) -> Result<()> {
        self.finish_above(roots, max_depths, max_nodes, f32::NEG_INFINITY, out)
    }

    /// [`DraftBeams::finish`] with candidates of a cumulative log-probability >= `min_score` alone. The choice stays
    /// closed under ancestors, whose score is never lower.
    ///
    /// # Errors
    /// Those of [`DraftBeams::finish`]; [`Error::Invalid`] for a `min_score` that is NaN.
    pub fn finish_above(
        &mut self,
        roots: &[i32],
        max_depths: &[u32],
        max_nodes: &[u32],
        min_score: f32,
        out: &mut TreeBatch,
    ) -> Result<()> {
        if min_score.is_nan() {
            let why = "want a log-probability, or -inf for no limit".into();
            return Err(Error::Invalid { what: "min_score", got: min_score.to_string(), why });
        }
        for (operand, len) in [("roots", roots.len()), ("max_depths", max_depths.len()), ("max_nodes", max_nodes.len())]
        {
            if len != self.batch {
                let want = format!("{} (the batch of the last start())", self.batch);
                return Err(Error::Mismatch { operand, got: format!("{len} entries"), want });
            }
        }
        check_tokens("root token", roots, self.vocab)?;
        let limit = i128::from(self.shape.draft_tokens());
        max_nodes.iter().try_for_each(|&n| in_range("max_nodes", n, 1, limit).map(|_| ()))?;
        out.clear();
        for i in 0..self.batch {
            let within = self.candidates_within(i, max_depths[i]);
            self.finish_one(i, roots[i], within, (max_nodes[i] as usize - 1).min(within), min_score, out);
        }
        Ok(())
    }

    /// Append the tree of request i: its root and the best `count` of its first `within` candidates, of those
    /// that reach `min_score`.
    fn finish_one(&mut self, i: usize, root: i32, within: usize, count: usize, min_score: f32, out: &mut TreeBatch) {
        let base = i * self.shape.candidates() as usize;
        out.push_node(root, -1, 0.0);
        let last = if count == 0 {
            None // no key is below the bound
        } else {
            self.keys.clear();
            self.keys.extend(self.scores[base..][..within].iter().enumerate().map(|(c, &score)| rank_key(score, c)));
            Some(*self.keys.select_nth_unstable(count - 1).1)
        };
        self.node_of.resize(within.max(self.node_of.len()), 0);
        let mut nodes = 1;
        for c in 0..within {
            let score = self.scores[base + c];
            if score >= min_score && last.is_some_and(|last| rank_key(score, c) <= last) {
                let parent = match usize::try_from(self.candidate_parents[base + c]) {
                    Ok(candidate) => self.node_of[candidate] as i32,
                    Err(_) => 0, // the root's child
                };
                out.push_node(self.candidate_tokens[base + c], parent, score);
                self.node_of[c] = nodes;
                nodes += 1;
            }
        }
        out.end_tree();
    }

    /// Sound candidates of this round at depth <= `depth` of request `i`: a prefix of its table.
    fn candidates_within(&self, i: usize, depth: u32) -> usize {
        let (k, levels) = (self.shape.topk() as usize, self.sound[i].min(depth) as usize);
        if levels == 0 { 0 } else { k + (levels - 1) * k * k }
    }

    fn target_id(&self, draft_id: u32) -> i32 {
        self.to_target.as_ref().map_or(draft_id as i32, |map| map[draft_id as usize])
    }

    /// Set the slot of each beam of `step` in its row of the ancestor bits.
    fn mark_slots(&mut self, step: usize) {
        let (k, s, words) = (self.shape.topk() as usize, self.shape.steps() as usize, self.mask_words());
        for row in 0..self.batch * k {
            let slot = row % k * s + step;
            self.ancestors[row * words + slot / 64] |= 1 << (slot % 64);
        }
    }

    /// The shape.
    pub fn shape(&self) -> TreeShape {
        self.shape
    }

    /// Columns of a row of draft logits.
    pub fn draft_vocab(&self) -> usize {
        self.draft_vocab
    }

    /// Requests of this round (B).
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Steps done in this round, 0 before the first [`DraftBeams::start`]; the beams are of step `steps_done() - 1`.
    pub fn steps_done(&self) -> usize {
        self.steps
    }

    /// Reasons why requests of this round stopped drafting: [`Error::NonFinite`] (`draft logits`) with the request and
    /// the row of its first bad logits. One a request at most; empty in a sound round.
    pub fn faults(&self) -> &[Error] {
        &self.faults
    }

    /// Token of each beam in the target's vocabulary, `[B, K]`: the draft model's next input.
    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    /// Row of the previous hidden states that each beam continues, `[B, K]`: the request after
    /// [`DraftBeams::start`] (one row a request), `request * K + parent beam` after [`DraftBeams::advance`].
    pub fn parents(&self) -> &[i32] {
        &self.parents
    }

    /// 64-bit words of a row of ancestor bits: `words_for(K*S)`.
    pub fn mask_words(&self) -> usize {
        words_for(self.shape.draft_slots()) as usize
    }

    /// Draft slots of each beam's true ancestors and of itself: `[B*K, mask_words()]`, row-major; the bits of
    /// [`DraftMask::Ancestors`](crate::round::DraftMask::Ancestors).
    pub fn ancestors(&self) -> &[u64] {
        &self.ancestors
    }

    /// Cumulative log-probability of each beam of request `i`, best first; empty where there is no such request.
    pub fn beam_scores(&self, i: usize) -> impl Iterator<Item = f32> {
        let (k, stride) = (self.shape.topk() as usize, self.shape.candidates() as usize);
        let beams = self.beams.get(i * k..(i + 1) * k).unwrap_or(&[]);
        beams.iter().map(move |&c| self.scores[i * stride + c as usize])
    }
}

/// Check that int32 counts the candidates of `batch` trees of `shape`, as a geometry of that batch has it.
///
/// # Errors
/// [`Error::Overflow`] with both numbers.
pub fn check_batch(batch: usize, shape: TreeShape) -> Result<()> {
    let candidates = (batch as u64).saturating_mul(shape.candidates().into());
    fits_i32("batch * candidates", candidates, || format!("{batch} * {}", shape.candidates())).map(|_| ())
}

/// Merge the scores of beam `b`'s `k` children, best first, into `keys`: the rank keys of the best `k` children of the
/// beams so far (index `b*k + j`), in order. A child that is not among them ends the merge, since its siblings after
/// it rank below.
fn offer(keys: &mut Vec<u64>, k: usize, b: usize, scores: &[f32]) {
    for (j, &score) in scores.iter().enumerate() {
        let key = rank_key(score, b * k + j);
        if keys.len() == k {
            if keys[k - 1] < key {
                return;
            }
            keys.pop();
        }
        let mut at = keys.len();
        keys.push(key);
        while at > 0 && keys[at - 1] > key {
            keys[at] = keys[at - 1];
            at -= 1;
        }
        keys[at] = key;
    }
}

/// Check offsets and apply them.
fn to_target(offsets: &[i64], vocab: u32) -> Result<Vec<i32>> {
    in_range("draft vocabulary", offsets.len() as i128, 1, i128::from(MAX_VOCAB))?;
    let map = |(id, &offset): (usize, &i64)| {
        let target = id as i128 + i128::from(offset);
        in_range("d2t target id", target, 0, i128::from(vocab) - 1).map(|t| t as i32)
    };
    offsets.iter().enumerate().map(map).collect()
}
