//! Pages of one token: speculative positions get another order, told so that a copy of the row can follow.

use crate::error::{Error, Result, in_range};
use crate::pool::changes::ChangeKind;
use crate::pool::reserved::Buffers;
use crate::pool::row::SeqId;
use crate::pool::state::State;

impl State {
    /// Permute the rows of a lease, all of them or none. Afterwards `buffers` has the permutations, which are those
    /// that the table got.
    pub(super) fn remap_all<'a>(
        &mut self,
        id: u64,
        buffers: &mut Buffers,
        mut remaps: impl Iterator<Item = (SeqId, u32, &'a [u32])>,
    ) -> Result<()> {
        buffers.clear_permutations();
        let checked = remaps.try_for_each(|(seq, first, order)| self.permutation(id, buffers, seq, first, order));
        checked.inspect_err(|_| buffers.clear_permutations())?;
        let width = self.config.row_pages as usize;
        for p in buffers.permutations() {
            let (row, first) = (p.seq.row() as usize, p.first as usize);
            p.apply(&mut self.table[row * width..][..width], &mut self.scratch);
            let r = &mut self.rows[row];
            r.version += u64::from(!p.order.is_empty());
            self.changes.note(&mut r.changed, row, ChangeKind::Order, first, first + p.order.len());
        }
        Ok(())
    }

    /// Check one remap and complete its order to a permutation.
    fn permutation(&mut self, id: u64, buffers: &mut Buffers, seq: SeqId, first: u32, order: &[u32]) -> Result<()> {
        let row = self.live_row(seq)?;
        let r = &self.rows[row];
        let refuse = |why: &str| Error::Invalid { what: "remap", got: format!("sequence {seq}"), why: why.into() };
        if r.lease != id {
            return Err(refuse("the sequence is not in this lease"));
        }
        if self.config.page.get() != 1 {
            return Err(refuse("pages hold more than one token; move the KV instead"));
        }
        in_range("first position to remap", first, r.committed.into(), r.pages.into())?;
        if let Some(last) = order.iter().copied().max() {
            in_range("position to remap", last, 0, i128::from(r.pages - first) - 1)?;
            let named = &mut self.scratch;
            named.clear();
            named.resize(last as usize + 1, 0);
            for &o in order {
                if std::mem::replace(&mut named[o as usize], 1) == 1 {
                    let why = "the order names it twice".into();
                    return Err(Error::Invalid { what: "position to remap", got: o.to_string(), why });
                }
            }
            buffers.orders.extend_from_slice(order);
            buffers.orders.extend((0..=last).filter(|&o| named[o as usize] == 0));
        }
        buffers.permuted.push((seq, first, buffers.orders.len()));
        Ok(())
    }
}
