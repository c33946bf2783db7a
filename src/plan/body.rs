//! [`Plan`]: the row positions and slots that one step of a batch writes and attends to.

use crate::bounds::PageSize;
use crate::error::{Error, Result, in_range};
use crate::plan::Phase;
use crate::plan::buf::Buf;
use crate::pool::Tables;

/// The arrays of a plan, as plain vectors: what [`Plan::from_parts`] takes and [`Plan::to_parts`] gives.
///
/// Sizes: B requests (dead ones of a padded plan included), Q queries (dead ones included).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PlanParts {
    /// `[B]` row of each request in the pool's page table; -1 for a dead request.
    pub rows: Vec<i32>,
    /// `[B]` version of each row; 0 for a dead request.
    pub versions: Vec<u64>,
    /// `[B+1]` request i has the queries `qo_indptr[i]..qo_indptr[i+1]`.
    pub qo_indptr: Vec<i32>,
    /// `[B]` every query of request i attends row positions `[0, prefix_lens[i])`.
    pub prefix_lens: Vec<i32>,
    /// `[Q]` RoPE position of each query.
    pub positions: Vec<i32>,
    /// `[Q]` slot that takes each query's KV; 0 (the sink) for a dead query.
    pub out_slots: Vec<i32>,
    /// `[Q * mask_words]` bits; bit `b` of a query's mask is bit `b % 64` of its word `b / 64`.
    pub mask: Vec<u64>,
    /// Words per query; 0 for a causal plan.
    pub mask_words: u32,
}

/// The writes of one step of a batch, and what it attends to. See the [module](crate::plan) for the attention form.
///
/// A plan by itself launches nothing; kernels take an [`AuditedPlan`](crate::plan::AuditedPlan).
#[derive(Debug, Clone)]
pub struct Plan {
    pub(crate) phase: Phase,
    pub(crate) page: PageSize,
    pub(crate) rows: Buf<i32>,
    pub(crate) versions: Buf<u64>,
    pub(crate) qo_indptr: Buf<i32>,
    pub(crate) prefix_lens: Buf<i32>,
    /// `[live batch]` tokens that may be settled at most when the plan runs; empty where those are its prefixes.
    pub(crate) settled: Buf<u32>,
    pub(crate) positions: Buf<i32>,
    pub(crate) out_slots: Buf<i32>,
    pub(crate) mask: Buf<u64>,
    pub(crate) mask_words: u32,
    /// Identity of the pool whose rows it names; `None` for a plan made elsewhere, until it is audited.
    pub(crate) pool: Option<u32>,
    /// Requests that are not padding; always `<= rows.len()`.
    pub(crate) live_batch: usize,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            phase: Phase::Extend,
            page: PageSize::default(),
            rows: Buf::default(),
            versions: Buf::default(),
            qo_indptr: vec![0].into(),
            prefix_lens: Buf::default(),
            settled: Buf::default(),
            positions: Buf::default(),
            out_slots: Buf::default(),
            mask: Buf::default(),
            mask_words: 0,
            pool: None,
            live_batch: 0,
        }
    }
}

impl Plan {
    /// A plan from arrays made elsewhere (recorded, or planned on a device). Nothing is checked here:
    /// [`AuditedPlan::audit`](crate::plan::AuditedPlan::audit) does.
    pub fn from_parts(phase: Phase, page: PageSize, parts: PlanParts) -> Self {
        let live_batch = parts.rows.iter().filter(|&&r| r >= 0).count();
        Self {
            phase,
            page,
            rows: parts.rows.into(),
            versions: parts.versions.into(),
            qo_indptr: parts.qo_indptr.into(),
            prefix_lens: parts.prefix_lens.into(),
            settled: Buf::default(),
            positions: parts.positions.into(),
            out_slots: parts.out_slots.into(),
            mask: parts.mask.into(),
            mask_words: parts.mask_words,
            pool: None,
            live_batch,
        }
    }

    /// Copies of the arrays.
    pub fn to_parts(&self) -> PlanParts {
        PlanParts {
            rows: self.rows().to_vec(),
            versions: self.versions().to_vec(),
            qo_indptr: self.qo_indptr().to_vec(),
            prefix_lens: self.prefix_lens().to_vec(),
            positions: self.positions().to_vec(),
            out_slots: self.out_slots().to_vec(),
            mask: self.mask().to_vec(),
            mask_words: self.mask_words,
        }
    }

    /// The step.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// The page size of the pool it was made for.
    pub fn page(&self) -> PageSize {
        self.page
    }

    /// Requests, dead ones included.
    pub fn batch(&self) -> usize {
        self.rows.get().len()
    }

    /// Requests that are not padding; they come first.
    pub fn live_batch(&self) -> usize {
        self.live_batch
    }

    /// Queries, dead ones included.
    pub fn queries(&self) -> usize {
        self.positions.get().len()
    }

    /// Queries of the live requests; they come first.
    pub fn live_queries(&self) -> usize {
        self.qo_indptr.get().get(self.live_batch).map_or(0, |&q| q as usize)
    }

    /// True if the plan has dead requests or queries behind the live ones.
    pub fn is_padded(&self) -> bool {
        self.batch() > self.live_batch || self.queries() > self.live_queries()
    }

    /// A copy of its live part.
    pub(crate) fn without_padding(&self) -> Self {
        let (b, q) = (self.live_batch, self.live_queries());
        let mut parts = self.to_parts();
        parts.rows.truncate(b);
        parts.versions.truncate(b);
        parts.qo_indptr.truncate(b + 1);
        parts.prefix_lens.truncate(b);
        parts.positions.truncate(q);
        parts.out_slots.truncate(q);
        parts.mask.truncate(q * self.mask_words as usize);
        Self { pool: self.pool, settled: self.settled.clone(), ..Self::from_parts(self.phase, self.page, parts) }
    }

    /// `[batch]` row of each request in the pool's page table; -1 for a dead request.
    pub fn rows(&self) -> &[i32] {
        self.rows.get()
    }

    /// `[batch]` version of each row when the plan was made; 0 for a dead request.
    pub fn versions(&self) -> &[u64] {
        self.versions.get()
    }

    /// Committed length that each live request was planned for, in its order: the plan is refused once more is
    /// committed, or the commit of more is planned. The length is L; for an extend that starts below the committed
    /// length, that length.
    pub fn committed(&self) -> impl Iterator<Item = u32> {
        // Noted for an extend that starts below the settled length, and for a draft step behind the context wall, which
        // has no prefix; elsewhere it is the prefix.
        let noted = self.settled.get();
        let prefixes = self.prefix_lens().iter().take(self.live_batch).enumerate();
        prefixes.map(|(i, &prefix)| noted.get(i).copied().unwrap_or(prefix as u32))
    }

    /// `[batch + 1]` queries of request i are `qo_indptr[i]..qo_indptr[i+1]`; a dead request has none.
    pub fn qo_indptr(&self) -> &[i32] {
        self.qo_indptr.get()
    }

    /// `[batch]` tokens of the prefix that every query of a request attends; 0 for a dead request.
    pub fn prefix_lens(&self) -> &[i32] {
        self.prefix_lens.get()
    }

    /// `[queries]` RoPE positions; 0 for a dead query.
    pub fn positions(&self) -> &[i32] {
        self.positions.get()
    }

    /// `[queries]` slot that takes each query's KV; 0 (the sink) for a dead query.
    pub fn out_slots(&self) -> &[i32] {
        self.out_slots.get()
    }

    /// `[queries * mask_words]` ancestor bits; 0 for a dead query, which attends to nothing.
    pub fn mask(&self) -> &[u64] {
        self.mask.get()
    }

    /// Words per query; 0 for a causal plan.
    pub fn mask_words(&self) -> u32 {
        self.mask_words
    }

    /// A mask word for each query of an extend, under which it attends all queries of its request, those behind it
    /// included: `[queries]`, 0 for a dead query.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another phase; [`Error::OutOfRange`] for a request of more than 64 queries.
    pub fn block_masks(&self) -> Result<Vec<u64>> {
        if self.phase != Phase::Extend {
            let why = "blocks are planned as an extend".into();
            return Err(Error::Invalid { what: "plan of a block", got: self.phase.name().into(), why });
        }
        let mut words = vec![0; self.queries()];
        for request in self.qo_indptr().windows(2) {
            let (first, end) = (request[0] as usize, request[1] as usize);
            in_range("queries of a block", (end - first) as u64, 0, 64)?;
            words[first..end].fill(u64::MAX.checked_shr(64 - (end - first) as u32).unwrap_or(0));
        }
        Ok(words)
    }

    /// Refuse the plan over another pool, if a row's pages have changed or its lease has ended since it was made, and if
    /// more is committed by now than it was made for: it would overwrite that.
    ///
    /// # Errors
    /// [`Error::Dead`] with both pools, or the row and both versions or lengths.
    pub fn check_rows(&self, tables: &Tables<'_>) -> Result<()> {
        let what = self.phase.name();
        check_pool(tables, what, self.pool)?;
        for (&row, &version) in self.rows().iter().zip(self.versions()).take(self.live_batch) {
            check_version(tables, what, row, version)?;
        }
        for (&row, committed) in self.rows().iter().zip(self.committed()) {
            check_length(what, row, committed, tables.settled(row as u32).unwrap_or(0))?;
        }
        Ok(())
    }

    /// The pages of the plan's requests as a dense `[batch, columns]` table in `out` (cleared first); returns the
    /// columns. Columns in which a request has no page, and dead requests, hold the sink (0).
    ///
    /// Kernels that share the pool's memory need none of this: they index the pool's own table by row.
    ///
    /// # Errors
    /// [`Error::Dead`] as [`Self::check_rows`].
    pub fn page_table(&self, tables: &Tables<'_>, out: &mut Vec<i32>) -> Result<usize> {
        self.check_rows(tables)?;
        let live = |row: i32| tables.line(row as u32).map_or(&[][..], live_columns);
        let rows = self.rows().iter();
        let cols = rows.clone().take(self.live_batch).map(|&r| live(r).len()).max().unwrap_or(0);
        out.clear();
        for (i, &row) in rows.enumerate() {
            if i < self.live_batch {
                out.extend_from_slice(live(row));
            }
            out.resize((i + 1) * cols, 0);
        }
        Ok(cols)
    }

    /// The first array with an element that holds the debug poison, and its index.
    pub(crate) fn first_poison(&self) -> Option<(&'static str, usize)> {
        let named = [
            ("rows", self.rows.first_poison()),
            ("versions", self.versions.first_poison()),
            ("qo_indptr", self.qo_indptr.first_poison()),
            ("prefix_lens", self.prefix_lens.first_poison()),
            ("positions", self.positions.first_poison()),
            ("out_slots", self.out_slots.first_poison()),
            ("mask", self.mask.first_poison()),
        ];
        named.into_iter().find_map(|(name, at)| at.map(|at| (name, at)))
    }
}

/// The columns of a table line that hold pages: those before the first sink.
pub(super) fn live_columns(line: &[i32]) -> &[i32] {
    &line[..line.iter().position(|&p| p == 0).unwrap_or(line.len())]
}

/// Refuse `what` if it was made for another pool than `tables` are of. Versions of rows do not tell always: a plan may
/// have no live row.
pub(super) fn check_pool(tables: &Tables<'_>, what: &'static str, pool: Option<u32>) -> Result<()> {
    match pool {
        Some(pool) if pool != tables.pool() => {
            let why = format!("it was made for another pool than number {}, whose page table is read", tables.pool());
            Err(Error::Dead { what: "plan", id: format!("{what} of pool {pool}"), why })
        }
        _ => Ok(()),
    }
}

/// Refuse `what`, made for `committed` tokens of `row`, where `now` are settled.
#[inline]
pub(super) fn check_length(what: &'static str, row: i32, committed: u32, now: u32) -> Result<()> {
    if now <= committed {
        return Ok(());
    }
    let why = format!("it was made for {committed} committed tokens, and {now} are by now: it would overwrite them");
    Err(Error::Dead { what: "plan", id: format!("{what} of row {row}"), why })
}

/// Refuse `what` if the pages of `row` have changed, or its lease has ended, since `version`.
pub(super) fn check_version(tables: &Tables<'_>, what: &'static str, row: i32, version: u64) -> Result<()> {
    let now = u32::try_from(row).ok().and_then(|r| tables.version(r));
    if now == Some(version) {
        return Ok(());
    }
    let now = now.map_or("outside the table".to_string(), |v| format!("at {v}"));
    let why =
        format!("the row's pages changed or its lease ended: it was made for version {version}, the row is {now}");
    Err(Error::Dead { what: "plan", id: format!("{what} of row {row}"), why })
}
