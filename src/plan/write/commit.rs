//! Commits and tail copies, planned.

use crate::error::{Error, Result, in_range, listed, same_length};
use crate::plan::write::lower::Lower;
use crate::plan::write::place::WriteSite;
use crate::plan::write::planner::{Planner, check_batch};
use crate::plan::{AuditedCommit, Batch, Paths};
use crate::pool::Tables;

impl<F: Lower> Planner<F> {
    /// Make the accepted path `n_0 = 0, n_1, ...` of each request the row positions `L, L + 1, ...`.
    ///
    /// With pages of one token the row's columns are reordered and no KV moves. With larger pages the KV of
    /// `L + n_i` moves to `L + i` where they differ, in increasing i. That order is free of hazards: the indices of
    /// a path increase strictly, so `n_i >= i`, and a later source `n_k` (`k > i`) is `>= k > i`: no move writes what
    /// a later one reads. (A destination may be an *earlier* source, so the moves of a request are not free to run
    /// at once.)
    ///
    /// # Errors
    /// A path that does not start with 0 or does not increase strictly; a node of V or more; a position beyond what the
    /// row's lease reserved; a destination on a page with other owners; a length beyond `max_context_len`, below what is
    /// committed or whose commit was planned before, or beyond what is in flight; a row twice in the batch; lengths that
    /// live on the device. Nothing is planned then.
    pub fn commit(&mut self, tables: &Tables<'_>, batch: &Batch<'_>, paths: Paths<'_>) -> Result<AuditedCommit> {
        const WHO: &str = "commit";
        let lens = batch.lens.host(WHO)?;
        check_batch(&self.geometry, tables, batch)?;
        same_length("path sizes", paths.sizes.len(), batch.seqs.len())?;
        let total = paths.sizes.iter().map(|&n| n as u64).sum::<u64>();
        same_length("path nodes", paths.nodes.len(), total as usize)?;
        let Self { geometry, commits, scratch, .. } = self;
        let (limit, v) = (geometry.limits().max_context_len, geometry.shape().draft_tokens());
        scratch.rows.resolve(tables, batch.seqs)?;
        scratch.rows.check_lens(tables, WHO, lens, false)?;
        let commit = commits.fill(|c| {
            c.begin(tables.pool(), batch.seqs.len(), paths.nodes.len());
            let mut nodes = paths.nodes;
            for (i, ((row, &len), &size)) in scratch.rows.each(tables).zip(lens).zip(paths.sizes).enumerate() {
                let at = WriteSite { kernel: WHO, request: i, tables };
                let (path, rest) = nodes.split_at(size as usize);
                nodes = rest;
                let last = check_path(path, at, v)?;
                in_range("committed length", len as i128 + size as i128, 0, limit as i128)?;
                row.check_end(at, len as u64 + last as u64 + 1)?;
                c.new_lens.push(len + size);
                if last as usize + 1 == path.len() {
                    continue; // 0, 1, 2, ...: all in place
                }
                if tables.page().get() == 1 {
                    row.check_write(at, len, len + last + 1)?;
                    c.remap(batch.seqs[i], len, path);
                    continue;
                }
                for (to, &from) in path.iter().enumerate().filter(|&(to, &from)| to as u32 != from) {
                    let src = row.read(at, len + from)?;
                    let dst = row.write(at, len + to as u32)?;
                    c.moves.push(src, dst);
                }
                c.moves.guard(scratch.rows.ids[i], scratch.rows.versions[i], len);
            }
            Ok::<(), Error>(())
        })?;
        tables.note_commit(&scratch.rows.ids, &commit.new_lens);
        Ok(AuditedCommit(commit))
    }

    /// Holey layout: fill each branch's holes with the prefix's tail, positions `[base, base + r)` to the r slots
    /// before branch b's own, for b >= 1. Slots that belong to a branch are never touched, and nothing is copied
    /// where r = 0 or in the dense layout.
    ///
    /// # Errors
    /// Those of [`Self::draft`], for the holes.
    pub fn tail_copies(&mut self, tables: &Tables<'_>, batch: &Batch<'_>) -> Result<AuditedCommit> {
        const WHO: &str = "tail copy";
        let lens = batch.lens.host(WHO)?;
        check_batch(&self.geometry, tables, batch)?;
        let Self { geometry, commits, scratch, .. } = self;
        scratch.rows.resolve(tables, batch.seqs)?;
        scratch.rows.check_lens(tables, WHO, lens, false)?;
        let commit = commits.fill(|c| {
            c.begin(tables.pool(), batch.seqs.len(), 0);
            c.new_lens.extend_from_slice(lens); // a tail copy changes no length
            for (i, (row, &len)) in scratch.rows.each(tables).zip(lens).enumerate() {
                let at = WriteSite { kernel: WHO, request: i, tables };
                let region = geometry.draft_region(len)?;
                let moves = c.moves.len();
                for b in 0..geometry.shape().topk() {
                    let Some(hole) = region.hole(b)? else { continue };
                    for o in 0..hole.len {
                        let src = row.read(at, hole.src + o)?;
                        let dst = row.write(at, hole.dst + o)?;
                        c.moves.push(src, dst);
                    }
                }
                if c.moves.len() > moves {
                    c.moves.guard(scratch.rows.ids[i], scratch.rows.versions[i], len);
                }
            }
            Ok::<(), Error>(())
        })?;
        Ok(AuditedCommit(commit))
    }
}

/// The last node of a valid path: 0, then strictly increasing, below `v`.
#[inline]
fn check_path(path: &[u32], at: WriteSite<'_>, v: u32) -> Result<u32> {
    let mut last = 0;
    let mut ok = path.first() == Some(&0);
    for &node in path.get(1..).unwrap_or(&[]) {
        ok &= node > last;
        last = node;
    }
    if !ok {
        return Err(bad_path(path, at.request));
    }
    if last >= v {
        return Err(at.outside("tree nodes", last as i64, v));
    }
    Ok(last)
}

#[cold]
fn bad_path(path: &[u32], request: usize) -> Error {
    Error::Invalid {
        what: "accepted path",
        got: format!("request {request}: {}", listed(path)),
        why: "a path starts with the root, node 0, and its indices increase".into(),
    }
}
