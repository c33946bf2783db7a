//! Fixed arrays over random rounds: one set of memory for all phases of a format, written in any order by batches that
//! grow and shrink, padded or not, in debug mode or not, with writes between that are refused. After each round it holds
//! what arrays made afresh do, and a table nothing else at all. The same where others write into the memory between
//! two rounds: what a plan states is true, and behind it stands what they left.

use crate::common::plan::{geometry, pool};
use proptest::prelude::*;
use specrs::geometry::{Geometry, Layout};
use specrs::plan::{
    AnyFormat, Arrays, AuditedPlan, Batch, Bucket, DType, DraftMask, Extent, FlashAttention, Format, Given, HostMemory,
    Lens, Load, Lower, Need, Phase, Plan, Planner, Trees, phases,
};
use specrs::pool::{Pool, SeqId, Tables};

const MAX_BATCH: u32 = 5;
/// Tokens of an extend, at most.
const CHUNK: u32 = 9;

/// Memory for every phase, of tables `wider` columns more than any asks for.
fn fixed(format: AnyFormat, g: &Geometry, wider: u64) -> (Arrays, Vec<Option<Extent>>) {
    let mut extents: Vec<Option<Extent>> = vec![None; format.arrays().len()];
    for phase in phases(g) {
        let limit = Load::limit(g, phase, MAX_BATCH).unwrap();
        for (at, extent) in format.extents(g, &limit).unwrap() {
            // Room for dead requests and queries beyond the largest batch.
            extents[at] = Some(match (extents[at], extent) {
                (Some(Extent::Line(a)), Extent::Line(b)) => Extent::Line(a.max(b + 8)),
                (Some(Extent::Table { rows: a, cols: c }), Extent::Table { rows, cols }) => {
                    Extent::Table { rows: a.max(rows + 8), cols: c.max(cols + wider) }
                }
                (_, Extent::Line(b)) => Extent::Line(b + 8),
                (_, Extent::Table { rows, cols }) => Extent::Table { rows: rows + 8, cols: cols + wider },
            });
        }
    }
    let given = format.arrays().iter().zip(&extents).map(|(spec, extent)| {
        let extent = (*extent)?;
        let memory = Box::new(HostMemory::new(spec.name, extent.elements() * spec.dtype.size() as u64).unwrap());
        Some(Given { memory, extent })
    });
    (Arrays::fixed(format.arrays(), given.collect()).unwrap(), extents)
}

/// The used part of each array, as bytes; of a table row by row.
fn used(arrays: &Arrays) -> Vec<(&'static str, Extent, Vec<u8>)> {
    let of = |a: specrs::plan::ArrayRef<'_>| match a.extent {
        Extent::Line(_) => a.bytes.to_vec(),
        Extent::Table { rows, cols } => (0..rows as usize)
            .flat_map(|r| &a.bytes[r * a.width as usize * a.spec.dtype.size()..][..cols as usize * a.spec.dtype.size()])
            .copied()
            .collect(),
    };
    arrays.iter().map(|a| (a.spec.name, a.extent, of(a))).collect()
}

/// Every cell of every table, in use or not.
fn tables(format: AnyFormat, arrays: &mut Arrays, extents: &[Option<Extent>]) -> Vec<(usize, u64, Vec<i32>)> {
    arrays.set_poison(false);
    let mut all = Vec::new();
    for (array, extent) in extents.iter().enumerate() {
        if let Some(used @ Extent::Table { cols, .. }) = *extent {
            let [view] = arrays.open([Some(Need { array, used, limit: used })], || format.name().into()).unwrap();
            all.push((array, cols, view.slice::<i32>().unwrap().to_vec()));
        }
    }
    all
}

/// Fill every element of every array, in use or not, as others may between two rounds.
fn spoil(format: AnyFormat, arrays: &mut Arrays, extents: &[Option<Extent>], pattern: [u8; 4]) {
    arrays.set_poison(false);
    let [a, b, c, d] = pattern;
    for (array, extent) in extents.iter().enumerate() {
        let Some(used) = *extent else { continue };
        let [view] = arrays.open([Some(Need { array, used, limit: used })], || format.name().into()).unwrap();
        match format.arrays()[array].dtype {
            DType::I32 => view.slice().unwrap().fill(i32::from_ne_bytes(pattern)),
            DType::I64 => view.slice().unwrap().fill(i64::from_ne_bytes([a, b, c, d, a, b, c, d])),
            DType::Bool | DType::U8 => view.slice().unwrap().fill(a),
        }
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (((self.0 >> 32) * n as u64) >> 32) as u32
    }
}

/// A tree of up to `max` nodes that stays inside the context.
fn tree(random: &mut Random, max: u32, deep: u32) -> Vec<i32> {
    let (mut parents, mut depths) = (vec![-1i32], vec![0u32]);
    for j in 1..=random.below(max) {
        // Half of them chains.
        let p = if j % 2 == 0 { j - 1 } else { random.below(j) } as usize;
        if depths[p] >= deep {
            break;
        }
        depths.push(depths[p] + 1);
        parents.push(p as i32);
    }
    parents
}

/// The row of each request; the second one's shares its first pages with the first one's.
fn batch(pool: &Pool, g: &Geometry, lens: &[u32]) -> (Vec<SeqId>, specrs::pool::Lease) {
    let mut seqs: Vec<SeqId> = Vec::new();
    for (i, &len) in lens.iter().enumerate() {
        let from = if i == 1 { len.min(lens[0]) } else { 0 };
        let seq = if from > 0 { pool.fork(seqs[0], from).unwrap() } else { pool.create().unwrap() };
        pool.reserve(&[(seq, len)]).unwrap().commit(&[len]).unwrap();
        seqs.push(seq);
    }
    let chunk = |len: u32| (len + CHUNK).min(g.limits().max_context_len);
    let want = |l: u32| g.alloc_target(l, 0).unwrap().max(chunk(l));
    let wants: Vec<_> = seqs.iter().zip(lens).map(|(&s, &l)| (s, want(l))).collect();
    let lease = pool.reserve(&wants).unwrap();
    (seqs, lease)
}

/// Random rounds into one memory, which is filled with `spoiled` before each.
fn rounds(format: AnyFormat, g: Geometry, seed: u64, spoiled: Option<[u8; 4]>) {
    if format.supports(&g).is_err() {
        return;
    }
    let mut random = Random(seed);
    let wider = random.below(4) as u64;
    let (mut arrays, extents) = fixed(format, &g, wider);
    let mut planner = Planner::new(g, format).unwrap();
    planner.defer_arrays(true);
    let (context, shape) = (g.limits().max_context_len, g.shape());
    let pool = pool(&g, seed);
    for round in 0..10 {
        let n = random.below(MAX_BATCH + 1);
        let lens: Vec<u32> = (0..n)
            .map(|_| match random.below(4) {
                0 => 0,
                1 => context - 1 - random.below(context.min(4)),
                _ => random.below(context),
            })
            .collect();
        let (seqs, lease) = batch(&pool, &g, &lens);
        let phase = phases(&g).nth(random.below(3 + shape.steps()) as usize).unwrap();
        let trees: Vec<Vec<i32>> =
            lens.iter().map(|l| tree(&mut random, shape.draft_tokens(), context - 1 - l)).collect();
        let sizes: Vec<u32> = trees.iter().map(|t| t.len() as u32).collect();
        let parents = trees.concat();
        let counts: Vec<u32> = lens.iter().map(|l| random.below((context - l).min(CHUNK) + 1)).collect();
        let live: u32 = match phase {
            Phase::Extend => counts.iter().sum(),
            Phase::Decode => n,
            Phase::Draft { .. } => n * shape.topk(),
            Phase::Verify => sizes.iter().sum(),
        };
        let pad = (random.below(2) == 0).then(|| {
            let spare = |most: u32, random: &mut Random| random.below(most + 1);
            let largest = Load::limit(&g, phase, MAX_BATCH).unwrap();
            let queries = live + spare(7.min(largest.queries as u32 - live), &mut random);
            Bucket { batch: n + spare(MAX_BATCH - n, &mut random), queries }
        });
        planner.set_debug(random.below(2) == 0);
        let b = Batch { seqs: &seqs, lens: Lens::Host(&lens), pad };
        let plan = |planner: &mut Planner<AnyFormat>, t: &Tables<'_>| match phase {
            Phase::Extend => planner.extend(t, &b, &counts),
            Phase::Decode => planner.decode(t, &b),
            Phase::Draft { step } => planner.draft(t, &b, step, DraftMask::Lane),
            Phase::Verify => planner.verify(t, &b, Trees { sizes: &sizes, parents: &parents }),
        };
        let what = format!("round {round}: {phase:?} of {lens:?} padded to {pad:?}, {g:?}, over {spoiled:?}");
        if let Some(pattern) = spoiled {
            spoil(format, &mut arrays, &extents, pattern);
        }
        let left = spoiled.map_or(0, i32::from_ne_bytes);
        pool.with_tables(|t| {
            let plan = plan(&mut planner, &t).unwrap_or_else(|e| panic!("{e}; {what}"));
            let done = planner.lower(&t, &plan, &mut arrays);
            done.unwrap_or_else(|e| panic!("{e}; {what}"));
            let fresh = AuditedPlan::audit(Plan::clone(&plan), &t, &g, &format).unwrap();
            assert_eq!(used(&arrays), used(fresh.arrays()), "{what}");
            let written = used(fresh.arrays());
            for (array, width, cells) in tables(format, &mut arrays, &extents) {
                let name = format.arrays()[array].name;
                // A phase that does not have the table leaves it as it was, for the next that has it.
                let Some((_, Extent::Table { rows, cols }, bytes)) = written.iter().find(|w| w.0 == name) else {
                    continue;
                };
                let want: Vec<i32> = bytes.as_chunks().0.iter().map(|&cell| i32::from_ne_bytes(cell)).collect();
                for (r, row) in cells.chunks_exact(width as usize).enumerate() {
                    let live = if (r as u64) < *rows { &want[r * *cols as usize..][..*cols as usize] } else { &[] };
                    assert_eq!(&row[..live.len()], live, "{name}[{r}]; {what}");
                    // Behind it stands what specrs cleared, or what others left.
                    assert!(row[live.len()..].iter().all(|&c| c == 0 || c == left), "{name}[{r}] {row:?}; {what}");
                }
            }
        })
        .unwrap();
        drop(lease);
        pool.release(&seqs).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn fixed_arrays_hold_the_last_round_alone(
        (k, s, v) in (1u32..=9, 1u32..=9, 1u32..=140),
        shift in 0u32..=8,
        context in 1u32..=400,
        holey in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let layout = if holey { Layout::Holey } else { Layout::Dense };
        let v = v.min(1 + k + (s - 1) * k * k);
        let g = geometry(k, s, v, 1 << shift, MAX_BATCH, context, layout);
        for format in AnyFormat::ALL {
            rounds(format, g, seed, None);
        }
    }

    #[test]
    fn fixed_arrays_are_true_whatever_others_wrote(
        (k, s, v) in (1u32..=9, 1u32..=9, 1u32..=140),
        shift in 0u32..=8,
        context in 1u32..=400,
        holey in any::<bool>(),
        seed in any::<u64>(),
        nan in any::<bool>(),
    ) {
        let layout = if holey { Layout::Holey } else { Layout::Dense };
        let v = v.min(1 + k + (s - 1) * k * k);
        let g = geometry(k, s, v, 1 << shift, MAX_BATCH, context, layout);
        let pattern = if nan { f32::NAN.to_ne_bytes() } else { (-1i32).to_ne_bytes() };
        for format in AnyFormat::ALL {
            rounds(format, g, seed, Some(pattern));
        }
    }
}

/// A write that stops in the middle of a row: what it left there is cleared by the next one.
#[test]
fn nothing_is_left_of_a_write_that_failed() {
    let g = geometry(2, 4, 9, 4, MAX_BATCH, 64, Layout::Dense);
    let format = AnyFormat::FlashAttention(FlashAttention);
    let (mut arrays, extents) = fixed(format, &g, 0);
    let pool = pool(&g, 5);
    let (seqs, _lease) = batch(&pool, &g, &[9]);
    let mut planner = Planner::new(g, format).unwrap();
    planner.defer_arrays(true);
    let b = Batch::new(&seqs, Lens::Host(&[9]));
    let (chain, root) = (Trees { sizes: &[3], parents: &[-1, 0, 1] }, Trees { sizes: &[1], parents: &[-1] });
    pool.with_tables(|t| {
        let good = planner.verify(&t, &b, chain).unwrap();
        let mut parts = good.to_parts();
        parts.mask[0] = 0b1_1111; // five ancestors in a tree of three
        let bad = Plan::from_parts(Phase::Verify, good.page(), parts);
        let err = format.lower(&bad, &t, &g, &mut arrays).unwrap_err().to_string();
        assert!(err.contains("index 3 into mask bits (nodes) is outside 0..3"), "{err}");
        let plan = planner.verify(&t, &b, root).unwrap();
        planner.lower(&t, &plan, &mut arrays).unwrap();
        let table = tables(format, &mut arrays, &extents).into_iter().find(|t| t.0 == 4).unwrap().2;
        assert_eq!(table[0], plan.out_slots()[0]);
        assert!(table[1..].iter().all(|&cell| cell == 0), "{table:?}");
    })
    .unwrap();
}

/// The masks and slots of a plan mean what its geometry says, and a format's arrays are known by their place: a plan of
/// another geometry, and arrays of another format, are refused before anything is written.
#[test]
fn what_was_made_for_another_planner() {
    let g = geometry(2, 4, 9, 4, MAX_BATCH, 64, Layout::Holey);
    let dense = geometry(2, 4, 9, 4, MAX_BATCH, 64, Layout::Dense);
    let [format, other] = ["triton", "flashinfer"].map(|name| AnyFormat::named(name, "both").unwrap());
    let planner = |g: Geometry, format: AnyFormat| {
        let mut planner = Planner::new(g, format).unwrap();
        planner.defer_arrays(true);
        planner
    };
    let (mut mine, mut theirs) = (planner(g, format), planner(dense, format));
    let pool = pool(&g, 5);
    let (seqs, _lease) = batch(&pool, &g, &[9]);
    let b = Batch::new(&seqs, Lens::Host(&[9]));
    pool.with_tables(|t| {
        let plan = theirs.draft(&t, &b, 1, DraftMask::Lane).unwrap();
        let (mut arrays, _) = fixed(format, &g, 0);
        let err = mine.lower(&t, &plan, &mut arrays).unwrap_err().to_string();
        assert!(err.starts_with("plan: got a plan for Geometry") && err.contains("layout: Dense"), "{err}");
        let plan = mine.draft(&t, &b, 1, DraftMask::Lane).unwrap();
        let (mut foreign, _) = fixed(other, &g, 0);
        let err = mine.lower(&t, &plan, &mut foreign).unwrap_err().to_string();
        assert!(
            err.starts_with("arrays: got kv_indptr, kv_indices, kv_last_page_len") && err.contains("triton"),
            "{err}"
        );
        assert_eq!((arrays.generation(), foreign.generation()), (0, 0));
        mine.lower(&t, &plan, &mut arrays).unwrap();
    })
    .unwrap();
}
