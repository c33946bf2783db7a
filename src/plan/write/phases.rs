//! The phases of a round: the positions that each step writes and attends to.

use crate::error::{Error, Result, in_range, same_length};
use crate::plan::form::{self, Step};
use crate::plan::write::lower::Lower;
use crate::plan::write::place::WriteSite;
use crate::plan::write::planner::{Planner, Scratch};
use crate::plan::{AuditedPlan, Batch, DraftMask, Phase, Trees};
use crate::pool::Tables;
use crate::simd::dispatch;

impl<F: Lower> Planner<F> {
    /// Append `counts[i]` tokens behind the first `batch.lens[i]` of request i, attended causally.
    ///
    /// This is chunked prefill, and the draft model's pass over the accepted tokens, which alone may start below what is
    /// committed: up to there it needs no lease.
    ///
    /// # Errors
    /// Positions at or beyond `max_context_len`, beyond what the row's lease reserved, or in a page with other owners; a
    /// start beyond what is committed or in flight; a row twice in the batch; `counts` of another length; lengths that
    /// live on the device.
    pub fn extend(&mut self, tables: &Tables<'_>, batch: &Batch<'_>, counts: &[u32]) -> Result<AuditedPlan<F>> {
        let starts = batch.lens.host("extend")?;
        same_length("counts", counts.len(), batch.seqs.len())?;
        self.append(tables, batch, Phase::Extend, starts, counts)
    }

    /// One token behind the first `batch.lens[i]` of each request: plain decoding.
    ///
    /// # Errors
    /// Those of [`Self::extend`], and errors for a length below the length that is committed, or whose commit was
    /// planned.
    pub fn decode(&mut self, tables: &Tables<'_>, batch: &Batch<'_>) -> Result<AuditedPlan<F>> {
        let starts = batch.lens.host("decode")?;
        let mut ones = std::mem::take(&mut self.scratch.ones);
        ones.resize(starts.len(), 1);
        let plan = self.append(tables, batch, Phase::Decode, starts, &ones);
        self.scratch.ones = ones;
        plan
    }

    /// Causal queries behind each prefix.
    fn append(
        &mut self,
        tables: &Tables<'_>,
        batch: &Batch<'_>,
        phase: Phase,
        starts: &[u32],
        counts: &[u32],
    ) -> Result<AuditedPlan<F>> {
        let who = phase.name();
        let limit = self.geometry.limits().max_context_len;
        // Checked before anything is sized by the counts, which may be any numbers.
        for (request, (&start, &count)) in starts.iter().zip(counts).enumerate() {
            let end = start as u64 + count as u64;
            if end > limit as u64 {
                let at = WriteSite { kernel: who, request, tables };
                return Err(at.outside("context", end as i64 - 1, limit));
            }
        }
        let queries = counts.iter().map(|&c| c as u64).sum();
        let plan = self.build(tables, batch, phase, queries, 0, |_, scratch, plan| {
            let (indptr, prefix) = (plan.qo_indptr.get_mut(), plan.prefix_lens.get_mut());
            let (mut positions, mut slots) = (plan.positions.get_mut(), plan.out_slots.get_mut());
            let mut q = 0;
            for (i, ((row, &start), &count)) in scratch.rows.each(tables).zip(starts).zip(counts).enumerate() {
                let at = WriteSite { kernel: who, request: i, tables };
                let (pos, rest) = positions.split_at_mut(count as usize);
                positions = rest;
                for (j, p) in pos.iter_mut().enumerate() {
                    *p = start as i32 + j as i32;
                }
                let (out, rest) = slots.split_at_mut(count as usize);
                slots = rest;
                row.run(at, start, out)?;
                q += count as i32;
                (indptr[i + 1], prefix[i]) = (q, start as i32);
            }
            Ok(())
        })?;
        self.scratch.rows.note_pass(tables, starts, counts);
        Ok(plan)
    }

    /// Draft step `step`: for each request K queries at RoPE position `L + step`, branch b's KV at row position
    /// `region.pos(b, step)`, its mask over the draft slots `b*S + s`.
    ///
    /// A request with `L + step >= max_context_len` has dead queries: what such a step would propose lies behind the
    /// context wall (its tree is clamped), so its queries attend to nothing and write to the sink.
    ///
    /// # Errors
    /// `step >= S`; a draft region that ends beyond what the row's lease reserved, or a page of it with other owners;
    /// ancestor bits of a slot that no earlier step has written, or without the query's own bit; lengths as in
    /// [`Self::decode`]; a row twice in the batch.
    pub fn draft(
        &mut self,
        tables: &Tables<'_>,
        batch: &Batch<'_>,
        step: u32,
        mask: DraftMask<'_>,
    ) -> Result<AuditedPlan<F>> {
        const WHO: &str = "draft";
        let lens = batch.lens.host(WHO)?;
        self.format.supports_mask(&self.geometry, mask)?;
        let shape = self.geometry.shape();
        in_range("step", step, 0, shape.steps() as i128 - 1)?;
        let (k, words) = (shape.topk() as usize, self.geometry.draft_mask_words());
        let n = k * words as usize; // mask words of a request
        if let DraftMask::Ancestors(bits) = mask {
            same_length("ancestor bits", bits.len(), batch.seqs.len() * n)?;
        }
        let queries = batch.seqs.len() as u64 * k as u64;
        self.build(tables, batch, Phase::Draft { step }, queries, words, |geometry, scratch, plan| {
            let limit = geometry.limits().max_context_len;
            scratch.draft_slots.place(geometry, tables, &scratch.rows, lens, WHO)?;
            let (b, queries) = (batch.seqs.len(), batch.seqs.len() * k);
            for (i, q) in plan.qo_indptr.get_mut()[..=b].iter_mut().enumerate() {
                *q = (i * k) as i32;
            }
            let positions = &mut plan.positions.get_mut()[..queries];
            let slots = &mut plan.out_slots.get_mut()[..queries];
            scratch.draft_slots.write(step, limit, &mut plan.prefix_lens.get_mut()[..b], positions, slots);
            if scratch.draft_slots.dead(step, limit).next().is_some() {
                scratch.rows.write_settled(lens, &mut plan.settled)?; // the prefixes of such rows are stated as 0
            }
            let bits = &mut plan.mask.get_mut()[..b * n];
            draft_patterns(scratch, Step::new(geometry, Phase::Draft { step }), mask);
            match mask {
                DraftMask::Lane => bits.chunks_exact_mut(n).for_each(|m| m.copy_from_slice(&scratch.pattern)),
                DraftMask::Ancestors(given) => {
                    let same = match scratch.allowed[..] {
                        [allowed] => {
                            let own = &scratch.draft_slots.bits;
                            dispatch(
                                #[inline(always)]
                                || copy_bits(bits, given, own, step, allowed),
                            )
                        }
                        _ => copy_words(bits, given, &scratch.pattern, &scratch.allowed),
                    };
                    if !same {
                        bad_ancestors(scratch, given, step, limit, n)?;
                    }
                }
            }
            for i in scratch.draft_slots.dead(step, limit) {
                bits[i * n..][..n].fill(0);
            }
            Ok(())
        })
    }

    /// The target's pass over one token tree per request: node j at row position `L + j`, RoPE position
    /// `L + depth(j)`, attending the prefix and its ancestors. Trees may differ in size and form over the batch.
    ///
    /// # Errors
    /// A tree of no node or of more than V; a parent that is not before its child; a node at or beyond
    /// `max_context_len`; a row position beyond what the lease reserved or in a page with other owners; lengths as in
    /// [`Self::decode`]; a row twice in the batch.
    pub fn verify(&mut self, tables: &Tables<'_>, batch: &Batch<'_>, trees: Trees<'_>) -> Result<AuditedPlan<F>> {
        const WHO: &str = "verify";
        let lens = batch.lens.host(WHO)?;
        same_length("tree sizes", trees.sizes.len(), batch.seqs.len())?;
        let queries = trees.sizes.iter().map(|&n| n as u64).sum::<u64>();
        same_length("tree parents", trees.parents.len(), queries as usize)?;
        let words = self.geometry.verify_mask_words();
        let plan = self.build(tables, batch, Phase::Verify, queries, words, |geometry, scratch, plan| {
            let (limit, v) = (geometry.limits().max_context_len, geometry.shape().draft_tokens());
            let w = words as usize;
            let (indptr, prefix) = (plan.qo_indptr.get_mut(), plan.prefix_lens.get_mut());
            let (positions, slots, masks) = (plan.positions.get_mut(), plan.out_slots.get_mut(), plan.mask.get_mut());
            let mut q = 0;
            let rows = &scratch.rows;
            dispatch(
                #[inline(always)]
                || {
                    for (i, ((row, &len), &size)) in rows.each(tables).zip(lens).zip(trees.sizes).enumerate() {
                        let at = WriteSite { kernel: WHO, request: i, tables };
                        if size == 0 || size > v {
                            in_range("tree nodes", size, 1, v as i128)?;
                        }
                        if len >= limit {
                            return Err(at.outside("context", len as i64, limit));
                        }
                        let n = size as usize;
                        let (up, pos) = (&trees.parents[q..q + n], &mut positions[q..q + n]);
                        let (out, bits) = (&mut slots[q..q + n], &mut masks[q * w..(q + n) * w]);
                        q += n;
                        let bad = if w == 1 {
                            tree_1(up, len as i32, pos, bits)
                        } else {
                            tree_w(up, len as i32, pos, bits, w)
                        };
                        if let Some(j) = bad {
                            return Err(bad_parent(i, j, up[j]));
                        }
                        // Depth is less than the node count, so that only trees near the wall need a look at each node.
                        if len as u64 + n as u64 > limit as u64
                            && let Some(&p) = pos.iter().find(|&&p| p >= limit as i32)
                        {
                            return Err(at.outside("context", p as i64, limit));
                        }
                        row.run(at, len, out)?;
                        (indptr[i + 1], prefix[i]) = (q as i32, len as i32);
                    }
                    Ok(())
                },
            )
        })?;
        self.scratch.rows.note_pass(tables, lens, trees.sizes);
        Ok(plan)
    }
}

/// Positions and ancestor bits of a tree of at most 64 nodes; the first node whose parent is not before it.
#[inline(always)]
fn tree_1(parents: &[i32], root: i32, pos: &mut [i32], bits: &mut [u64]) -> Option<usize> {
    let n = parents.len().min(64);
    let (parents, pos, bits) = (&parents[..n], &mut pos[..n], &mut bits[..n]);
    if parents[0] != -1 {
        return Some(0);
    }
    pos[0] = root;
    bits[0] = 1;
    let mut node = |j: usize, own: u64| {
        let p = parents[j] as u32 as usize; // a negative one becomes larger than any node
        if p < j {
            pos[j] = pos[p] + 1;
            bits[j] = bits[p] | own;
        }
        p < j
    };
    // Works in blocks, which the compiler unrolls: the loop's own instructions would be a third of it.
    let mut j = 1;
    while j + BLOCK <= n {
        let own = 1 << j;
        for i in 0..BLOCK {
            if !node(j + i, own << i) {
                return Some(j + i);
            }
        }
        j += BLOCK;
    }
    (j..n).find(|&j| !node(j, 1 << j))
}

/// Nodes that [`tree_1`] does between two looks at the loop's end.
const BLOCK: usize = 8;

/// [`tree_1`] for masks of `w` words.
fn tree_w(parents: &[i32], root: i32, pos: &mut [i32], bits: &mut [u64], w: usize) -> Option<usize> {
    for (j, &p) in parents.iter().enumerate() {
        let (before, rest) = bits.split_at_mut(j * w);
        let own = &mut rest[..w];
        let p = p as u32 as usize;
        if j == 0 {
            if p != -1i32 as u32 as usize {
                return Some(0);
            }
            pos[0] = root;
            own.fill(0);
        } else {
            if p >= j {
                return Some(j);
            }
            pos[j] = pos[p] + 1;
            own.copy_from_slice(&before[p * w..(p + 1) * w]);
        }
        own[j / 64] |= 1 << (j % 64);
    }
    None
}

/// Prepare the parts of a draft step's masks. Ancestors: `pattern` is each branch's own bit, `allowed` the slots of the
/// earlier steps. Lanes: `pattern` is each branch's mask.
fn draft_patterns(scratch: &mut Scratch, s: Step, mask: DraftMask<'_>) {
    let words = form::mask_words(s);
    let branch = |b: u32, w: u32| match (mask, form::own_bit(s, b)) {
        (DraftMask::Lane, _) => form::lane_word(s, b, w),
        (DraftMask::Ancestors(_), own) => form::run_word(own, own + 1, w),
    };
    scratch.pattern.clear();
    scratch.pattern.extend((0..s.topk * words).map(|x| branch(x / words, x % words)));
    scratch.allowed.clear();
    scratch.allowed.extend((0..words).map(|w| form::earlier_word(s, w)));
}

/// Copy the ancestor bits of queries with one word each; whether each has its own bit (`own << step`) and otherwise only
/// `allowed` ones.
#[inline(always)]
fn copy_bits(out: &mut [u64], given: &[u64], own: &[u64], step: u32, allowed: u64) -> bool {
    let mut stray = 0;
    for ((o, &g), &own) in out.iter_mut().zip(given).zip(own) {
        *o = g;
        stray |= (g ^ own << step) & !allowed;
    }
    stray == 0
}

/// [`copy_bits`] for masks of any width, request by request.
fn copy_words(out: &mut [u64], given: &[u64], own: &[u64], allowed: &[u64]) -> bool {
    out.copy_from_slice(given);
    let mut stray = 0;
    for request in given.chunks_exact(own.len()) {
        for (g, own) in request.chunks_exact(allowed.len()).zip(own.chunks_exact(allowed.len())) {
            for ((g, own), allowed) in g.iter().zip(own).zip(allowed) {
                stray |= (g ^ own) & !allowed;
            }
        }
    }
    stray == 0
}

/// The first stray or missing bit of a request that is not dead.
#[cold]
fn bad_ancestors(scratch: &Scratch, given: &[u64], step: u32, limit: u32, n: usize) -> Result<()> {
    let w = scratch.allowed.len();
    let dead: Vec<usize> = scratch.draft_slots.dead(step, limit).collect();
    for (x, &g) in given.iter().enumerate().filter(|(x, _)| !dead.contains(&(x / n))) {
        let stray = (g ^ scratch.pattern[x % n]) & !scratch.allowed[x % w];
        if stray != 0 {
            let bit = stray.trailing_zeros() as usize + x % w * 64;
            let has = g >> (bit % 64) & 1;
            let (request, branch) = (x / n, x % n / w);
            return Err(Error::Invalid {
                what: "ancestor bits",
                got: format!("request {request}, branch {branch}, step {step}: draft slot {bit} is {has}"),
                why: if has == 1 { "no earlier step has written it" } else { "a query attends to itself" }.into(),
            });
        }
    }
    Ok(())
}

#[cold]
fn bad_parent(request: usize, node: usize, parent: i32) -> Error {
    let why = if node == 0 { "the root's parent is -1".to_string() } else { format!("must be in 0..{node}") };
    Error::Invalid { what: "tree parent", got: format!("request {request}: parents[{node}] = {parent}"), why }
}
