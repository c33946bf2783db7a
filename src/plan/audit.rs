//! The full check of a plan: from its arrays, the page tables and the geometry alone, query by query. It shares no code
//! with the phases that write plans, so that each finds the other's faults.

use crate::error::{Error, Result, in_range, same_length};
use crate::geometry::Geometry;
use crate::plan::body::{check_version, live_columns};
use crate::plan::{Arrays, Format, Phase, Plan};
use crate::pool::{RowView, Tables};

/// One request of the plan under check.
struct AuditedRequest<'a> {
    index: usize,
    kernel: &'static str,
    /// Pages that the row has.
    pages: &'a [i32],
    /// Positions that may be written.
    limit: u64,
    prefix: u64,
    first: usize,
    end: usize,
}

/// Check every array, query and page of `plan`.
pub(super) fn check(plan: &Plan, tables: &Tables<'_>, geometry: &Geometry) -> Result<()> {
    sizes(plan, tables, geometry)?;
    let mut rows = Vec::with_capacity(plan.live_batch);
    let mut written = Vec::with_capacity(plan.queries());
    for i in 0..plan.batch() {
        let request = request(plan, tables, i)?;
        if i < plan.live_batch {
            rows.push(plan.rows()[i]);
            for q in request.first..request.end {
                query(plan, tables, geometry, &request, q)?;
                written.push(plan.out_slots()[q]);
            }
        }
    }
    for q in plan.live_queries()..plan.queries() {
        dead(plan, q, plan.live_batch, "a padded query")?;
    }
    written.retain(|&slot| slot != 0);
    twice(&mut written, "slot written", "write slots are disjoint over the batch")?;
    twice(&mut rows, "row", "a sequence may be in a batch once")
}

fn twice(values: &mut [i32], what: &'static str, why: &str) -> Result<()> {
    values.sort_unstable();
    match values.windows(2).find(|w| w[0] == w[1]) {
        None => Ok(()),
        Some(w) => Err(Error::Invalid { what, got: format!("{} twice", w[0]), why: why.into() }),
    }
}

/// The arrays fit each other, the geometry and the pool.
fn sizes(plan: &Plan, tables: &Tables<'_>, geometry: &Geometry) -> Result<()> {
    let (b, q) = (plan.batch(), plan.queries());
    in_range("batch", plan.live_batch as i128, 0, geometry.limits().max_batch as i128)?;
    for page in [plan.page, tables.page()] {
        same_length("page size", page.get() as usize, geometry.page().get() as usize)?;
    }
    same_length("versions", plan.versions().len(), b)?;
    same_length("prefix_lens", plan.prefix_lens().len(), b)?;
    same_length("qo_indptr", plan.qo_indptr().len(), b + 1)?;
    same_length("out_slots", plan.out_slots().len(), q)?;
    let words = match plan.phase {
        Phase::Extend | Phase::Decode => 0,
        Phase::Draft { step } => {
            in_range("step", step, 0, geometry.shape().steps() as i128 - 1)?;
            geometry.draft_mask_words()
        }
        Phase::Verify => geometry.verify_mask_words(),
    };
    same_length("mask words", plan.mask_words as usize, words as usize)?;
    same_length("mask", plan.mask().len(), q * words as usize)?;
    let indptr = plan.qo_indptr();
    let ordered = indptr[0] == 0 && indptr.windows(2).all(|w| w[0] <= w[1]) && indptr[b] as usize <= q;
    if !ordered {
        let got = format!("{:?} for {q} queries", &indptr[..indptr.len().min(16)]);
        return Err(Error::Invalid { what: "qo_indptr", got, why: "starts at 0 and never goes down".into() });
    }
    Ok(())
}

/// The row of request `i` is live and current, its prefix allocated, the number of its queries right.
fn request<'a>(plan: &Plan, tables: &Tables<'a>, i: usize) -> Result<AuditedRequest<'a>> {
    let (row, version, prefix) = (plan.rows()[i], plan.versions()[i], plan.prefix_lens()[i]);
    let (first, end) = (plan.qo_indptr()[i] as usize, plan.qo_indptr()[i + 1] as usize);
    let kernel = plan.phase.name();
    if i >= plan.live_batch {
        if (row, version, prefix, end) != (-1, 0, 0, first) {
            let got = format!("request {i}: row {row}, version {version}, prefix {prefix}, {} queries", end - first);
            return Err(Error::Invalid { what: "dead request", got, why: "must be -1, 0, 0, 0".into() });
        }
        return Ok(AuditedRequest { index: i, kernel, pages: &[], limit: 0, prefix: 0, first, end });
    }
    check_version(tables, kernel, row, version)?;
    let pages = live_columns(tables.line(row as u32).unwrap_or(&[]));
    let allocated = pages.len() as i128 * tables.page().get() as i128;
    in_range("prefix length", prefix, 0, allocated)?;
    let limit = tables.row(row as u32).map_or(0, |r| u64::from(r.limit));
    let request = AuditedRequest { index: i, kernel, pages, limit, prefix: prefix as u64, first, end };
    // All queries of a draft step behind the context wall are dead, and its prefix is stated as 0.
    if !(matches!(plan.phase, Phase::Draft { .. })
        && prefix == 0
        && plan.out_slots()[first..end].iter().all(|&s| s == 0))
    {
        lengths(plan, tables, &request, row as u32)?;
    }
    Ok(request)
}

/// Check that the prefix ends where the settled tokens do, or among those in flight; the prefix of an extend may end
/// before.
fn lengths(plan: &Plan, tables: &Tables<'_>, r: &AuditedRequest<'_>, row: u32) -> Result<()> {
    let Some(RowView { committed, .. }) = tables.row(row) else { return Ok(()) }; // the row's version was right
    let (settled, reach) = (tables.settled(row).unwrap_or(0), tables.reach(row).unwrap_or(0));
    let least = if plan.phase == Phase::Extend { 0 } else { settled };
    if (u64::from(least)..=u64::from(reach)).contains(&r.prefix) {
        return Ok(());
    }
    let got = format!("{}: request {}, {} tokens", r.kernel, r.index, r.prefix);
    let why = format!("{committed} are committed, {settled} settled, {reach} with those in flight");
    Err(Error::Invalid { what: "prefix length", got, why })
}

/// The most that may be settled when a plan runs, request by request; for a plan that [`check`] takes.
pub(super) fn settled(plan: &Plan, tables: &Tables<'_>) -> Vec<u32> {
    let rows = plan.rows().iter().zip(plan.prefix_lens()).take(plan.live_batch);
    rows.map(|(&row, &prefix)| tables.settled(row as u32).unwrap_or(0).max(prefix as u32)).collect()
}

/// Check query `q`: where it writes, what it attends to, and its position.
fn query(plan: &Plan, tables: &Tables<'_>, geometry: &Geometry, r: &AuditedRequest<'_>, q: usize) -> Result<()> {
    let (shape, j) = (geometry.shape(), (q - r.first) as u32);
    let w = plan.mask_words as usize;
    let mask = &plan.mask()[q * w..(q + 1) * w];
    let bits = set_bits(mask);
    if plan.out_slots()[q] == 0 {
        // In a live request only a draft step behind the context wall has dead queries, and then all of them.
        return match plan.phase {
            Phase::Draft { .. } if r.prefix == 0 => dead(plan, q, r.index, "a query that writes to the sink"),
            _ => Err(outside(r, "queries that write to the sink", q as i64, q as i64)),
        };
    }
    let pos = match plan.phase {
        Phase::Extend => r.prefix + j as u64,
        Phase::Decode => {
            same_length("decode queries of a request", r.end - r.first, 1)?;
            r.prefix
        }
        Phase::Verify => {
            in_range("tree nodes", (r.end - r.first) as i128, 1, shape.draft_tokens() as i128)?;
            for b in bits {
                if b > j {
                    return Err(outside(r, "mask bits (nodes up to the query's own)", b as i64, j as i64 + 1));
                }
            }
            r.prefix + j as u64
        }
        Phase::Draft { step } => {
            same_length("draft queries of a request", r.end - r.first, shape.topk() as usize)?;
            for b in bits {
                let own = j * shape.steps() + step;
                if b >= shape.draft_slots() || (b != own && b % shape.steps() >= step) {
                    let written = (shape.topk() * shape.steps()) as i64;
                    return Err(outside(r, "mask bits (draft slots of earlier steps)", b as i64, written));
                }
            }
            geometry.draft_region(r.prefix as u32)?.pos(j, step)? as u64
        }
    };
    if w > 0 {
        let own = match plan.phase {
            Phase::Draft { step } => j * shape.steps() + step,
            _ => j,
        };
        if mask[(own / 64) as usize] >> (own % 64) & 1 == 0 {
            return Err(outside(r, "mask bits (the query's own is missing)", own as i64, own as i64));
        }
    }
    let page_len = tables.page().get() as u64;
    let Some(&page) = r.pages.get((pos / page_len) as usize) else {
        return Err(outside(r, "allocated positions", pos as i64, (r.pages.len() as u64 * page_len) as i64));
    };
    let slot = page as i64 * page_len as i64 + (pos % page_len) as i64;
    if plan.out_slots()[q] as i64 != slot {
        let got = format!("{}: request {}, query {q}: slot {}", r.kernel, r.index, plan.out_slots()[q]);
        return Err(Error::Invalid { what: "out_slots", got, why: format!("row position {pos} is slot {slot}") });
    }
    if pos >= r.limit {
        return Err(outside(r, "allocated positions", pos as i64, r.limit as i64));
    }
    let owners = tables.owners(page as u32);
    if page <= 0 || owners != Some(1) {
        let got = format!("{}: request {}, position {pos} on page {page} with {owners:?} owners", r.kernel, r.index);
        return Err(Error::Invalid { what: "write position", got, why: "a page is written by its one owner".into() });
    }
    let rope = match plan.phase {
        Phase::Extend | Phase::Decode => pos,
        Phase::Draft { step } => r.prefix + u64::from(step),
        Phase::Verify => r.prefix + set_bits(mask).count() as u64 - 1, // the ancestors; its own bit is there
    };
    if plan.positions()[q] as i64 != rope as i64 {
        let got = format!("{}: request {}, query {q}: position {}", r.kernel, r.index, plan.positions()[q]);
        return Err(Error::Invalid { what: "positions", got, why: format!("its RoPE position is {rope}") });
    }
    in_range("RoPE position", rope, 0, geometry.limits().max_context_len as i128 - 1).map(drop)
}

/// Indices of the set bits of a mask row, in increasing order: a mask has thousands of bits and few that are set.
fn set_bits(mask: &[u64]) -> impl Iterator<Item = u32> {
    (0u32..).step_by(64).zip(mask).flat_map(|(base, &word)| {
        let mut left = word;
        std::iter::from_fn(move || {
            let bit = (left != 0).then(|| base + left.trailing_zeros());
            left &= left.wrapping_sub(1);
            bit
        })
    })
}

/// A dead query has its stated values.
fn dead(plan: &Plan, q: usize, request: usize, which: &str) -> Result<()> {
    let w = plan.mask_words as usize;
    let (pos, slot) = (plan.positions()[q], plan.out_slots()[q]);
    let mask = &plan.mask()[q * w..(q + 1) * w];
    if pos == 0 && slot == 0 && mask.iter().all(|&m| m == 0) {
        return Ok(());
    }
    Err(Error::Invalid {
        what: "dead query",
        got: format!("request {request}, query {q}: position {pos}, slot {slot}, mask {mask:x?}"),
        why: format!("{which} has position 0, slot 0, mask 0"),
    })
}

/// Read the dead queries of a padded plan back from the arrays, as the kernel would: they attend to nothing.
///
/// Always on where a plan is padded: what an earlier round left where nobody wrote a query is a read of pages that may be
/// another request's by now (sglang pull request 23037).
pub(super) fn check_padding<F: Format>(format: &F, plan: &Plan, geometry: &Geometry, arrays: &Arrays) -> Result<()> {
    let mut slots = Vec::new();
    // In phases whose kernels find queries by request, no query may be left behind the last live one either.
    let behind = usize::from(matches!(plan.phase, Phase::Extend | Phase::Verify));
    for q in plan.live_queries()..plan.queries() + behind {
        let found = match format.reads(plan, geometry, arrays, q, &mut slots) {
            Ok(None) => return Ok(()),
            Ok(Some(())) => match slots.first() {
                None => continue,
                Some(slot) => format!("reads slot {slot}, the first of {}", slots.len()),
            },
            Err(e) => format!("reads what is not there: {e}"),
        };
        let (name, phase) = (format.name(), plan.phase);
        return Err(Error::Invalid {
            what: "dead query",
            got: format!("{name} {phase}: padded query {q} {found}"),
            why: format!(
                "a padded query attends to nothing; {} of {} requests and {} of {} queries are live",
                plan.live_batch,
                plan.batch(),
                plan.live_queries(),
                plan.queries()
            ),
        });
    }
    Ok(())
}

/// Read the arrays of a format back as its kernel would, for each of `queries`, and compare with what the plan says;
/// the number of slots read.
pub(super) fn check_reads<F: Format>(
    format: &F,
    plan: &Plan,
    tables: &Tables<'_>,
    geometry: &Geometry,
    arrays: &Arrays,
    queries: impl IntoIterator<Item = usize>,
) -> Result<u64> {
    let (mut got, mut want, mut reads) = (Vec::new(), Vec::new(), 0);
    for q in queries {
        got.clear();
        want.clear();
        if format.reads(plan, geometry, arrays, q, &mut got)?.is_none() {
            break;
        }
        reads += got.len() as u64;
        let i = plan.qo_indptr().partition_point(|&first| first as usize <= q) - 1;
        if i < plan.live_batch() && plan.out_slots()[q] != 0 {
            attended(plan, tables, geometry, i, q, format.reads_holes(geometry), &mut want)?;
        }
        if got != want {
            let at = got.iter().zip(&want).position(|(g, w)| g != w).unwrap_or(got.len().min(want.len()));
            let show = |all: &[i32]| all.get(at).map_or("nothing".to_string(), |s| format!("slot {s}"));
            return Err(Error::Invalid {
                what: "arrays",
                got: format!(
                    "{} {}: request {i}, query {q} reads {} at key {at} of {}",
                    format.name(),
                    plan.phase().name(),
                    show(&got),
                    got.len()
                ),
                why: format!("the plan says {} of {}", show(&want), want.len()),
            });
        }
    }
    Ok(reads)
}

/// Slots of the keys of query `q` of the live request `i`, by the plan's attention form.
fn attended(
    plan: &Plan,
    tables: &Tables<'_>,
    geometry: &Geometry,
    i: usize,
    q: usize,
    holes: bool,
    out: &mut Vec<i32>,
) -> Result<()> {
    let pages = tables.line(plan.rows()[i] as u32).unwrap_or(&[]);
    let p = tables.page().get();
    let slot = |pos: u32| match pages.get((pos / p) as usize) {
        Some(&page) => Ok(page * p as i32 + (pos % p) as i32),
        None => {
            let (kernel, bound) = (plan.phase().name(), pages.len() as i64 * p as i64);
            Err(Error::OutOfBounds {
                kernel,
                buffer: "row",
                request: i as i64,
                step: q as i64,
                index: pos as i64,
                bound,
            })
        }
    };
    let (prefix, j) = (plan.prefix_lens()[i] as u32, q as u32 - plan.qo_indptr()[i] as u32);
    let draft = match plan.phase() {
        Phase::Draft { .. } => Some(geometry.draft_region(prefix)?),
        _ => None,
    };
    let hole = match &draft {
        Some(region) if holes => region.hole(j)?,
        _ => None,
    };
    for pos in 0..prefix {
        out.push(slot(hole.filter(|h| pos >= h.src).map_or(pos, |h| h.dst + pos - h.src))?);
    }
    let w = plan.mask_words() as usize;
    if w == 0 {
        for pos in prefix..=prefix + j {
            out.push(slot(pos)?);
        }
    }
    let mask = &plan.mask()[q * w..(q + 1) * w];
    for bit in set_bits(mask) {
        let steps = geometry.shape().steps();
        out.push(slot(match &draft {
            Some(region) => region.pos(bit / steps, bit % steps)?,
            None => prefix + bit,
        })?);
    }
    Ok(())
}

#[cold]
fn outside(r: &AuditedRequest<'_>, buffer: &'static str, index: i64, bound: i64) -> Error {
    Error::OutOfBounds { kernel: r.kernel, buffer, request: r.index as i64, step: -1, index, bound }
}
