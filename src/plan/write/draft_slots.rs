//! The draft queries of a batch: the slots of every branch and step, placed once a round.
//!
//! The steps of a round differ in what their queries attend to, not in where the branches lie. So the whole region is
//! placed and checked when the first step is planned, and each step takes its slot of each branch from it.

use crate::error::Result;
use crate::geometry::{Geometry, Layout};
use crate::plan::write::place::{Rows, WriteSite};
use crate::pool::Tables;

/// Slots of the K branches of every request at each step.
#[derive(Debug, Default)]
pub(super) struct DraftSlots {
    /// [`Rows::serial`] that the rest was placed for; 0 for none.
    serial: u64,
    lens: Vec<u32>,
    /// `[B * K]` committed length of each query's request.
    starts: Vec<i32>,
    /// `[B * K][S]`: branch by branch.
    slots: Vec<i32>,
    steps: usize,
    /// `[B * K]` bit of each query's step 0, where masks have one word.
    pub(super) bits: Vec<u64>,
    /// The largest of `lens`.
    longest: u32,
}

impl DraftSlots {
    /// Place the branches behind `lens`. Does nothing if rows and lengths are unchanged since the last call.
    ///
    /// A request at the context wall (`L = max_context_len`) has no region and gets slot 0.
    pub(super) fn place(
        &mut self,
        geometry: &Geometry,
        tables: &Tables<'_>,
        rows: &Rows,
        lens: &[u32],
        kernel: &'static str,
    ) -> Result<()> {
        if self.serial == rows.serial() && self.lens == lens {
            return Ok(());
        }
        self.serial = 0; // 0 until all is placed
        let (shape, limit) = (geometry.shape(), geometry.limits().max_context_len);
        let (k, s) = (shape.topk() as usize, shape.steps() as usize);
        let queries = lens.len() * k;
        self.lens.clear();
        self.lens.extend_from_slice(lens);
        self.longest = lens.iter().copied().max().unwrap_or(0);
        self.starts.resize(queries, 0);
        for (starts, &len) in self.starts.chunks_exact_mut(k).zip(lens) {
            starts.fill(len as i32);
        }
        if self.bits.len() != queries && k * s <= 64 {
            self.bits.clear();
            self.bits.extend((0..queries).map(|x| 1 << (x % k * s)));
        }
        self.slots.resize(queries * s, 0);
        self.steps = s;
        let regions = self.slots.chunks_exact_mut(k * s);
        for (i, ((row, &len), region)) in rows.each(tables).zip(lens).zip(regions).enumerate() {
            let at = WriteSite { kernel, request: i, tables };
            if len >= limit {
                if len > limit {
                    return Err(at.outside("context", len as i64, limit));
                }
                region.fill(0);
            } else if geometry.layout() == Layout::Dense {
                row.run(at, len, region)?;
            } else {
                let stride = geometry.region(len).stride();
                // From the last branch, so that a row that is too short is refused by its end.
                for (b, branch) in region.chunks_exact_mut(s).enumerate().rev() {
                    row.run(at, len + b as u32 * stride, branch)?;
                }
            }
        }
        self.serial = rows.serial();
        Ok(())
    }

    /// Write step `step` of every request, then the dead queries of those that the wall stops.
    pub(super) fn write(&self, step: u32, limit: u32, prefix: &mut [i32], positions: &mut [i32], slots: &mut [i32]) {
        debug_assert_eq!(slots.len(), self.starts.len());
        for (slot, branch) in slots.iter_mut().zip(self.slots.chunks_exact(self.steps)) {
            *slot = branch[step as usize];
        }
        for (p, &start) in positions.iter_mut().zip(&self.starts) {
            *p = start + step as i32;
        }
        for (p, &len) in prefix.iter_mut().zip(&self.lens) {
            *p = len as i32;
        }
        if self.longest >= limit.saturating_sub(step) {
            let k = self.starts.len() / self.lens.len().max(1);
            for i in self.dead(step, limit) {
                prefix[i] = 0;
                positions[i * k..][..k].fill(0);
                slots[i * k..][..k].fill(0);
            }
        }
    }

    /// Requests that the context wall stops before `step`.
    pub(super) fn dead(&self, step: u32, limit: u32) -> impl Iterator<Item = usize> {
        let wall = limit.saturating_sub(step);
        let lens: &[u32] = if self.longest >= wall { &self.lens } else { &[] };
        lens.iter().enumerate().filter(move |&(_, &len)| len >= wall).map(|(i, _)| i)
    }
}
