//! Writing: the arrays of representative rows, written for real and read back as the format's kernel reads them.

use crate::error::Result;
use crate::geometry::{Geometry, Limits};
use crate::plan::audit::check_reads;
use crate::plan::buf::Poison;
use crate::plan::certify::count::fits;
use crate::plan::certify::proof::{FailureSite, Proof};
use crate::plan::certify::{lengths, wall};
use crate::plan::{
    AnyFormat, Arrays, AuditedPlan, Batch, Bucket, DType, DraftMask, Extent, Format, Given, HostMemory, Lens, Load,
    Lower, Phase, Planner, Trees,
};
use crate::pool::{Pool, PoolConfig, SeqId, Tables};

/// Residues whose rows are written, at most.
const RESIDUES: u32 = 64;
/// Entries of one array that a proof writes, at most: rows of longer contexts than that allows are shortened.
const ENTRIES: u64 = 1 << 22;

/// Figures of the written arrays.
#[derive(Debug, Default)]
pub(super) struct Written {
    /// Slots read back.
    pub(super) reads: u64,
    /// Longest context of a row.
    pub(super) context: u32,
}

/// Rounds of two rows of `format`: for every residue two short ones, for some a short and a long one, and two that the
/// context wall stops.
pub(super) fn rows(proof: &mut Proof, format: AnyFormat, geometry: &Geometry) -> Result<Written> {
    let (limits, shape) = (geometry.limits(), geometry.shape());
    let context = limits.max_context_len.min(longest(geometry));
    let two = Limits { max_batch: 2, max_context_len: context, ..limits };
    let g = Geometry::with_reverts(two, shape, geometry.layout(), geometry.reverts())?;
    let pool = Pool::new(PoolConfig {
        num_pages: g.pages_for_full_load()? + 1,
        page: g.page(),
        max_seqs: 2,
        row_pages: g.row_pages(),
    })?;
    let mut planner = Planner::new(g, format)?;
    planner.set_debug(true);
    planner.defer_arrays(true);
    let mut arrays = Arrays::own(format.arrays());
    arrays.set_poison(true);
    let mut rows = Rows { proof, format, g, pool, planner, arrays, reads: 0 };
    let p = g.page().get();
    let few = [0, 1, p / 2, p - 1];
    for residue in (0..p).filter(|r| p <= RESIDUES || r % (p / RESIDUES) == 0 || few.contains(r)) {
        let all = lengths(&g, residue);
        let (first, last) = (all.first().copied(), all.last().copied());
        let short: Vec<u32> = all.iter().take(2).copied().collect();
        rows.round(&short, false)?;
        if let (Some(first), Some(last), true) = (first, last, few.contains(&residue)) {
            rows.round(&[last, first], residue == 0)?;
        }
    }
    rows.round(&[context - 1, context.saturating_sub(shape.steps().max(1))], false)?;
    Ok(Written { reads: rows.reads, context })
}

/// The longest context of which two rows fit what a proof may write.
fn longest(g: &Geometry) -> u32 {
    let widest = g.shape().topk().max(g.shape().draft_tokens() / 4) as u64; // a mask's elements are bytes
    u32::try_from(ENTRIES / (2 * widest)).unwrap_or(u32::MAX)
}

struct Rows<'a> {
    proof: &'a mut Proof,
    format: AnyFormat,
    /// Geometry of two requests.
    g: Geometry,
    pool: Pool,
    planner: Planner<AnyFormat>,
    /// Poisoned before each write.
    arrays: Arrays,
    reads: u64,
}

/// One phase of a round, to plan.
#[derive(Clone, Copy)]
enum PhaseInput<'a> {
    Draft(u32, DraftMask<'a>),
    Verify(Trees<'a>),
    Extend(&'a [u32]),
    Decode,
}

impl PhaseInput<'_> {
    fn phase(self) -> Phase {
        match self {
            PhaseInput::Draft(step, _) => Phase::Draft { step },
            PhaseInput::Verify(_) => Phase::Verify,
            PhaseInput::Extend(_) => Phase::Extend,
            PhaseInput::Decode => Phase::Decode,
        }
    }
}

impl Rows<'_> {
    /// Every phase behind `lens`; with `padded` also into static arrays, padded plans after full ones.
    fn round(&mut self, lens: &[u32], padded: bool) -> Result<()> {
        let seqs: Vec<SeqId> = lens.iter().map(|_| self.pool.create()).collect::<Result<_>>()?;
        if let Err(error) = self.phases(&seqs, lens, padded) {
            let at = self.at(lens);
            self.proof.error(format!("{} row", self.format.name()), at, &error);
        }
        self.pool.release(&seqs)
    }

    fn phases(&mut self, seqs: &[SeqId], lens: &[u32], padded: bool) -> Result<()> {
        let (g, shape) = (self.g, self.g.shape());
        let pair = |n: &[u32]| seqs.iter().copied().zip(n.iter().copied()).collect::<Vec<_>>();
        self.pool.reserve(&pair(lens))?.commit(lens)?;
        let targets: Vec<u32> = lens.iter().map(|&l| g.alloc_target(l, 0)).collect::<Result<_>>()?;
        let lease = self.pool.reserve(&pair(&targets))?;
        let trees: Vec<Vec<i32>> = lens.iter().map(|&l| tree(shape.draft_tokens(), wall(&g, l))).collect();
        let sizes: Vec<u32> = trees.iter().map(|t| t.len() as u32).collect();
        let parents = trees.concat();
        let accepted: Vec<u32> = lens.iter().map(|&l| g.max_accepted().min(g.limits().max_context_len - l)).collect();
        let bits: Vec<Vec<u64>> = (0..shape.steps()).map(|step| crossed(&g, step, lens.len())).collect();
        let mut steps = vec![
            PhaseInput::Verify(Trees { sizes: &sizes, parents: &parents }),
            PhaseInput::Extend(&accepted),
            PhaseInput::Decode,
        ];
        for (step, bits) in bits.iter().enumerate() {
            for mask in [DraftMask::Lane, DraftMask::Ancestors(bits)] {
                if self.format.supports_mask(&g, mask).is_ok() {
                    steps.push(PhaseInput::Draft(step as u32, mask));
                }
            }
        }
        for step in steps {
            if let Err(error) = self.written(seqs, lens, step) {
                self.failed(lens, step, "", &error);
            }
            if padded && let Err(error) = self.padded(seqs, lens, step) {
                self.failed(lens, step, " padded, into static arrays", &error);
            }
        }
        drop(lease);
        Ok(())
    }

    /// Plan, write into poisoned memory, read back, and compare the used sizes with the counted ones.
    fn written(&mut self, seqs: &[SeqId], lens: &[u32], step: PhaseInput<'_>) -> Result<()> {
        let Self { format, g, pool, planner, arrays, reads, .. } = self;
        let (format, g) = (*format, *g);
        let plan = pool.with_tables(|t| {
            let plan = plan(planner, &t, &Batch::new(seqs, Lens::Host(lens)), step)?;
            format.lower(&plan, &t, &g, arrays)?;
            *reads += check_reads(&format, &plan, &t, &g, arrays, sample(&plan))?;
            Ok::<_, crate::Error>(plan)
        })??;
        self.proof.plans += 1;
        let at = self.at(lens).of_phase(step.phase());
        for array in self.arrays.iter() {
            if let Some(index) = poisoned(array.spec.dtype, array.bytes) {
                self.proof.fail(format!("{} {} unwritten", format.name(), array.spec.name), at, index as u64, 0);
            }
        }
        let used: Vec<(usize, Extent)> =
            self.arrays.iter().filter_map(|a| index(&format, a.spec.name, a.extent)).collect();
        let counted = format.extents(&g, &Load::of_lens(&g, step.phase(), &Lens::Host(lens))?)?;
        fits(self.proof, &format, at, "rows written, as counted", &used, &counted);
        // Only the extend of accepted tokens, and trees at the wall, take less than is counted.
        drop(plan);
        Ok(())
    }

    /// Write a full plan into static arrays of exactly the stated capacity, then one of fewer requests padded to the
    /// same size, of which nothing of the first may be left.
    fn padded(&mut self, seqs: &[SeqId], lens: &[u32], step: PhaseInput<'_>) -> Result<()> {
        let (g, format) = (self.g, self.format);
        let mut arrays = fixed(&format, &g, step.phase())?;
        let Self { pool, planner, reads, .. } = self;
        let done = pool.with_tables(|t| {
            planner.set_debug(false); // off as in production: nothing poisons what the last write left
            let full = plan(planner, &t, &Batch::new(seqs, Lens::Host(lens)), step)?;
            planner.lower(&t, &full, &mut arrays)?;
            let bucket = Bucket { batch: full.batch() as u32, queries: full.queries() as u32 };
            let batch = Batch::new(&seqs[..1], Lens::Host(&lens[..1])).padded(bucket);
            let fewer = plan(planner, &t, &batch, first_request(step, &g))?;
            planner.lower(&t, &fewer, &mut arrays)?;
            *reads += check_reads(&format, &fewer, &t, &g, &arrays, sample(&fewer))?;
            Ok(())
        });
        self.planner.set_debug(true);
        self.proof.plans += 2;
        done?
    }

    fn failed(&mut self, lens: &[u32], step: PhaseInput<'_>, how: &str, error: &crate::Error) {
        let at = self.at(lens).of_phase(step.phase());
        self.proof.error(format!("{} {}{how}", self.format.name(), step.phase().name()), at, error);
    }

    fn at(&self, lens: &[u32]) -> FailureSite {
        FailureSite::behind(&self.g, lens.first().copied().unwrap_or(0))
    }
}

fn plan(
    planner: &mut Planner<AnyFormat>,
    tables: &Tables<'_>,
    batch: &Batch<'_>,
    step: PhaseInput<'_>,
) -> Result<AuditedPlan<AnyFormat>> {
    match step {
        PhaseInput::Draft(step, mask) => planner.draft(tables, batch, step, mask),
        PhaseInput::Verify(trees) => planner.verify(tables, batch, trees),
        PhaseInput::Extend(counts) => planner.extend(tables, batch, counts),
        PhaseInput::Decode => planner.decode(tables, batch),
    }
}

/// The same step for the first request alone.
fn first_request<'a>(step: PhaseInput<'a>, g: &Geometry) -> PhaseInput<'a> {
    match step {
        PhaseInput::Draft(t, DraftMask::Ancestors(bits)) => {
            let n = (g.shape().topk() * g.draft_mask_words()) as usize;
            PhaseInput::Draft(t, DraftMask::Ancestors(&bits[..n]))
        }
        PhaseInput::Verify(Trees { sizes, parents }) => {
            PhaseInput::Verify(Trees { sizes: &sizes[..1], parents: &parents[..sizes[0] as usize] })
        }
        PhaseInput::Extend(counts) => PhaseInput::Extend(&counts[..1]),
        other => other,
    }
}

/// Queries that are read back: for each request the first, one in the middle and the last, and every padded one.
fn sample(plan: &AuditedPlan<AnyFormat>) -> Vec<usize> {
    let mut queries = Vec::new();
    for i in 0..plan.live_batch() {
        let (first, end) = (plan.qo_indptr()[i] as usize, plan.qo_indptr()[i + 1] as usize);
        queries.extend(
            [first, first + (end - first) / 2, end.max(1) - 1].into_iter().filter(|q| (first..end).contains(q)),
        );
    }
    queries.extend(plan.live_queries()..plan.queries());
    queries.sort_unstable();
    queries.dedup();
    queries
}

/// Parents of a tree of up to `nodes` nodes and up to `wall` deep, with inner nodes of two children.
fn tree(nodes: u32, wall: u32) -> Vec<i32> {
    let mut depths = vec![0u32];
    let mut parents = vec![-1];
    for j in 1..nodes {
        let parent = if depths[((j - 1) / 2) as usize] < wall { (j - 1) / 2 } else { 0 };
        if wall == 0 {
            break;
        }
        depths.push(depths[parent as usize] + 1);
        parents.push(parent as i32);
    }
    parents
}

/// Ancestor bits of a step in which every beam continues its neighbour of the step before, for `requests`.
fn crossed(g: &Geometry, step: u32, requests: usize) -> Vec<u64> {
    let (k, s, words) = (g.shape().topk(), g.shape().steps(), g.draft_mask_words() as usize);
    let mut bits = vec![0u64; k as usize * words];
    for b in 0..k {
        for t in 0..=step {
            let bit = ((b + step - t) % k * s + t) as usize;
            bits[b as usize * words + bit / 64] |= 1 << (bit % 64);
        }
    }
    bits.repeat(requests)
}

/// Static arrays of exactly the capacity that is stated for two requests.
fn fixed(format: &AnyFormat, g: &Geometry, phase: Phase) -> Result<Arrays> {
    let mut given: Vec<Option<Given>> = format.arrays().iter().map(|_| None).collect();
    for (array, extent) in format.extents(g, &Load::limit(g, phase, g.limits().max_batch)?)? {
        let spec = &format.arrays()[array];
        let memory = HostMemory::new(spec.name, extent.elements() * spec.dtype.size() as u64)?;
        given[array] = Some(Given { memory: Box::new(memory), extent });
    }
    Arrays::fixed(format.arrays(), given)
}

/// Index of an array by its name.
fn index(format: &AnyFormat, name: &str, extent: Extent) -> Option<(usize, Extent)> {
    format.arrays().iter().position(|spec| spec.name == name).map(|array| (array, extent))
}

/// The first element that holds poison; none for bytes in which any value may stand.
fn poisoned(dtype: DType, bytes: &[u8]) -> Option<usize> {
    fn first<T: bytemuck::Pod + Poison>(bytes: &[u8]) -> Option<usize> {
        bytemuck::try_cast_slice::<u8, T>(bytes).ok()?.iter().position(|v| *v == T::POISON)
    }
    match dtype {
        DType::I32 => first::<i32>(bytes),
        DType::I64 => first::<i64>(bytes),
        DType::Bool => first::<u8>(bytes),
        DType::U8 => None,
    }
}
