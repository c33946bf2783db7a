//! The slot-list formats over random geometries, layouts, batches and phases, against a plain reference: which row
//! positions each query attends to, in which order, and what follows for every array.

use std::collections::HashSet;

use crate::common::plan::random::{PAGES, Setting, path_to, setting};
use crate::common::plan::{Batch as Case, bucket};
use proptest::prelude::*;
use specrs::geometry::{Geometry, Layout};
use specrs::plan::{
    AnyFormat, Arrays, AuditedPlan, Batch, DType, DraftMask, Extent, FlashAttention, FlashInfer, Format, Given,
    HostMemory, Lens, Load, MaskForm, Phase, Planner, Trees, Triton, phases,
};
use specrs::pool::Tables;

const MAX_BATCH: u32 = 5;

/// The forms of the mask that flashinfer writes.
fn form(s: &Setting) -> MaskForm {
    [MaskForm::Both, MaskForm::Bool, MaskForm::Packed][(s.seed >> 32) as usize % 3]
}

/// Row position of branch `b`, step `s` behind `len` tokens.
fn draft_pos(g: &Geometry, len: u32, b: u32, s: u32) -> u32 {
    let (steps, p) = (g.shape().steps(), g.page().get());
    if g.layout() == Layout::Dense {
        return len + b * steps + s;
    }
    let r = len % p;
    len - r + b * (r + steps).div_ceil(p) * p + r + s
}

/// One request of the reference.
#[derive(Debug, Clone, Default)]
struct Request {
    prefix: u32,
    /// Row positions that the request's own tokens take.
    own: Vec<u32>,
    /// Row positions that each query attends to, in order.
    queries: Vec<Vec<u32>>,
}

/// Expected elements of an array, whatever their type.
type Want = Vec<(&'static str, DType, Vec<i64>)>;

/// Slots of row positions of request `i`.
fn slots(case: &Case, i: usize, positions: impl IntoIterator<Item = u32>) -> Vec<i64> {
    positions.into_iter().map(|pos| case.slot(i, pos).into()).collect()
}

/// `kv_indptr` and `kv_indices` of `lists` lists, of which those that are not given are empty.
fn lists(given: &[Vec<i64>], lists: usize) -> (Vec<i64>, Vec<i64>) {
    let mut indptr = vec![0];
    for list in given {
        indptr.push(indptr[indptr.len() - 1] + list.len() as i64);
    }
    indptr.resize(lists + 1, indptr[indptr.len() - 1]);
    (indptr, given.concat())
}

/// The mask over prefix and own tokens: its starts and its elements, and those of its bits in bytes.
fn mask(requests: &[Request], batch: usize) -> ([Vec<i64>; 2], [Vec<i64>; 2]) {
    let (mut bytes, mut bits) = ((vec![0], vec![]), (vec![0], vec![]));
    for r in requests {
        let mut all: Vec<i64> = Vec::new();
        for q in &r.queries {
            let allowed: HashSet<u32> = q.iter().copied().collect();
            all.extend((0..r.prefix).chain(r.own.iter().copied()).map(|pos| i64::from(allowed.contains(&pos))));
        }
        bits.1.extend(all.chunks(8).map(|c| c.iter().enumerate().map(|(b, one)| one << b).sum::<i64>()));
        bytes.1.extend(all);
        bytes.0.push(bytes.1.len() as i64);
        bits.0.push(bits.1.len() as i64);
    }
    for (starts, all) in [&mut bytes, &mut bits] {
        starts.resize(batch + 1, all.len() as i64);
    }
    ([bytes.0, bytes.1], [bits.0, bits.1])
}

/// Every array of both formats.
fn wants(s: &Setting, case: &Case, requests: &[Request], phase: Phase, plan: (usize, usize)) -> [Want; 2] {
    let (batch, queries) = plan;
    let per_query = matches!(phase, Phase::Draft { .. } | Phase::Decode);
    let of_query = |(i, r): (usize, &Request)| r.queries.iter().map(|q| slots(case, i, q.clone())).collect::<Vec<_>>();
    let every: Vec<Vec<i64>> = requests.iter().enumerate().flat_map(of_query).collect();
    // No kernel reads the list of a request without queries: it is empty.
    let read = |r: &Request| if r.queries.is_empty() { 0 } else { r.prefix };
    let prefixes: Vec<_> = requests.iter().enumerate().map(|(i, r)| slots(case, i, 0..read(r))).collect();
    let own: Vec<_> = requests.iter().enumerate().map(|(i, r)| slots(case, i, r.own.clone())).collect();
    let both: Vec<_> = prefixes.iter().zip(&own).map(|(p, o)| [p.clone(), o.clone()].concat()).collect();
    let mut qo = vec![0];
    for r in requests {
        qo.push(qo[qo.len() - 1] + r.queries.len() as i64);
    }
    qo.resize(batch + 1, qo[qo.len() - 1]);
    let n = if per_query { queries } else { batch };
    let (indptr, indices) = lists(if per_query { &every } else { &both }, n);
    let mut flashinfer: Want = vec![
        ("kv_indptr", DType::I32, indptr.clone()),
        ("kv_indices", DType::I32, indices.clone()),
        ("kv_last_page_len", DType::I32, vec![1; n]),
    ];
    let (indptr, indices) = if per_query { (indptr, indices) } else { lists(&prefixes, n) };
    let mut triton: Want = vec![("kv_indptr", DType::I32, indptr), ("kv_indices", DType::I64, indices)];
    if !per_query {
        flashinfer.push(("qo_indptr", DType::I32, qo.clone()));
        triton.push(("qo_indptr", DType::I64, qo));
        let mut out = own.concat();
        out.resize(queries, 0);
        triton.push(("extend_slots", DType::I64, out));
    }
    if phase == Phase::Verify {
        let ([starts, bytes], [packed_starts, packed]) = mask(requests, batch);
        if form(s) != MaskForm::Packed {
            flashinfer.push(("mask_indptr", DType::I32, starts.clone()));
            flashinfer.push(("custom_mask", DType::Bool, bytes.clone()));
        }
        if form(s) != MaskForm::Bool {
            flashinfer.push(("packed_mask_indptr", DType::I32, packed_starts));
            flashinfer.push(("packed_custom_mask", DType::U8, packed));
        }
        triton.push(("mask_indptr", DType::I64, starts));
        triton.push(("custom_mask", DType::Bool, bytes));
    }
    [flashinfer, triton]
}

/// The elements of every array of a plan.
fn got(arrays: &Arrays) -> Want {
    let elements = |name, dtype| match dtype {
        DType::I32 => arrays.line::<i32>(name).iter().map(|&v| v.into()).collect(),
        DType::I64 => arrays.line::<i64>(name).to_vec(),
        DType::Bool | DType::U8 => arrays.line::<u8>(name).iter().map(|&v| v.into()).collect(),
    };
    arrays.iter().map(|a| (a.spec.name, a.spec.dtype, elements(a.spec.name, a.spec.dtype))).collect()
}

/// Every list is inside the pool, off the sink, and has no slot twice.
fn check_lists(case: &Case, arrays: &[(&'static str, DType, Vec<i64>)]) {
    let p = i64::from(case.pool.config().page.get());
    let find = |name| &arrays.iter().find(|a| a.0 == name).unwrap().2;
    let (indptr, indices) = (find("kv_indptr"), find("kv_indices"));
    for w in indptr.windows(2) {
        let mut seen = HashSet::new();
        for &slot in &indices[w[0] as usize..w[1] as usize] {
            assert!(slot >= p && slot < p * i64::from(case.pool.config().num_pages), "slot {slot}");
            assert!(seen.insert(slot), "slot {slot} twice in a list");
        }
    }
}

/// Memory of exactly the sizes in `want`.
fn exact(format: &AnyFormat, want: &Want, less: Option<usize>) -> Arrays {
    let given = format.arrays().iter().map(|spec| {
        let at = want.iter().position(|w| w.0 == spec.name)?;
        let n = want[at].2.len() - usize::from(less == Some(at));
        let memory = Box::new(HostMemory::new(spec.name, (n * spec.dtype.size()) as u64).unwrap());
        Some(Given { memory, extent: Extent::Line(n as u64) })
    });
    Arrays::fixed(format.arrays(), given.collect()).unwrap()
}

/// Make the plan in both formats, twice, of which the second reuses the arrays of the first; then into memory that fits
/// exactly, and into memory that is one element short.
fn compare(
    s: &Setting,
    case: &Case,
    planners: &mut [Planner<AnyFormat>; 2],
    requests: &[Request],
    phase: Phase,
    make: impl Fn(&mut Planner<AnyFormat>, &Tables<'_>, &Batch<'_>) -> specrs::Result<AuditedPlan<AnyFormat>>,
) {
    let dead = if let Phase::Draft { .. } = phase { s.g.shape().topk() as usize } else { 0 };
    let live: usize = requests.iter().map(|r| if r.queries.is_empty() { dead } else { r.queries.len() }).sum();
    let pad = s.pad.map(|more| bucket(&s.g, phase, s.lens.len(), live, more));
    let batch = Batch { seqs: &case.seqs, lens: Lens::Host(&s.lens), pad };
    let size = pad.map_or((s.lens.len(), live), |p| (p.batch as usize, p.queries as usize));
    // A request behind the wall keeps its queries, whose lists are empty.
    let mut requests = requests.to_vec();
    requests.iter_mut().filter(|r| r.queries.is_empty()).for_each(|r| r.queries = vec![vec![]; dead]);
    let wants = wants(s, case, &requests, phase, size);
    for (planner, want) in planners.iter_mut().zip(&wants) {
        let format = *planner.format();
        planner.defer_arrays(false);
        for _ in 0..2 {
            let plan = case.pool.with_tables(|t| make(planner, &t, &batch)).unwrap().unwrap();
            assert_eq!(&got(plan.arrays()), want);
            check_lists(case, want);
            check_sizes(s, &format, &plan, want);
        }
        planner.defer_arrays(true);
        let plan = case.pool.with_tables(|t| make(planner, &t, &batch)).unwrap().unwrap();
        let mut arrays = exact(&format, want, None);
        case.pool.with_tables(|t| planner.lower(&t, &plan, &mut arrays)).unwrap().unwrap();
        assert_eq!(&got(&arrays), want);
        let less = s.below(7, want.len() as u32) as usize;
        if !want[less].2.is_empty() {
            let mut arrays = exact(&format, want, Some(less));
            let err = case.pool.with_tables(|t| planner.lower(&t, &plan, &mut arrays)).unwrap().unwrap_err();
            let n = want[less].2.len() as u64;
            match err {
                specrs::Error::Capacity { what, need, have, ref hint } => {
                    assert_eq!((what, need, have), (want[less].0, n, n - 1));
                    assert!(hint.contains(phase.name()) && hint.contains("max_context_len"), "{hint}");
                }
                other => panic!("{other}"),
            }
            assert!(got(&arrays).iter().all(|a| a.2.iter().all(|&v| v == 0)), "written before it was checked");
        }
    }
}

/// Sizes: those of the load are what was written, and none is above the limit.
fn check_sizes(s: &Setting, format: &AnyFormat, plan: &AuditedPlan<AnyFormat>, want: &Want) {
    let sizes = |load: &Load| -> Vec<(&'static str, u64)> {
        let all = format.extents(&s.g, load).unwrap();
        all.iter().map(|&(i, extent)| (format.arrays()[i].name, extent.elements())).collect()
    };
    let used = sizes(&Load::of(plan));
    assert_eq!(used, want.iter().map(|w| (w.0, w.2.len() as u64)).collect::<Vec<_>>());
    if s.pad.is_none() {
        // Most that any batch of this many requests may take, known without a look at the lengths.
        let bound = Lens::Device { batch: s.lens.len() as u32, at_most: s.lens.iter().copied().max().unwrap_or(0) };
        let most = [
            Load::limit(&s.g, plan.phase(), s.lens.len() as u32).unwrap(),
            Load::limit(&s.g, plan.phase(), MAX_BATCH).unwrap(),
            Load::of_lens(&s.g, plan.phase(), &Lens::Host(&s.lens)).unwrap(),
            Load::of_lens(&s.g, plan.phase(), &bound).unwrap(),
        ];
        for load in &most {
            for (used, most) in used.iter().zip(sizes(load)) {
                assert!(used.0 == most.0 && used.1 <= most.1, "{used:?} against {most:?} of {load:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_phase_equals_the_reference(s in setting(PAGES, MAX_BATCH)) {
        let (g, shape, context) = (s.g, s.g.shape(), s.g.limits().max_context_len);
        let case = Case::new(&g, &s.lens, s.seed);
        let formats = [AnyFormat::FlashInfer(FlashInfer { mask: form(&s) }), AnyFormat::Triton(Triton)];
        let mut planners = formats.map(|f| Planner::new(g, f).unwrap());
        planners.iter_mut().for_each(|p| p.set_debug(s.seed % 2 == 0));

        let counts = s.counts();
        let append = |counts: &[u32]| -> Vec<Request> {
            s.lens.iter().zip(counts).map(|(&l, &n)| Request {
                prefix: l,
                own: (l..l + n).collect(),
                queries: (l..l + n).map(|pos| (0..=pos).collect()).collect(),
            }).collect()
        };
        compare(&s, &case, &mut planners, &append(&counts), Phase::Extend, |p, t, b| p.extend(t, b, &counts));
        let ones = vec![1; s.lens.len()];
        compare(&s, &case, &mut planners, &append(&ones), Phase::Decode, |p, t, b| p.decode(t, b));

        let k = shape.topk() as usize;
        let mut beams = vec![];
        for step in 0..shape.steps() {
            s.rerank(&mut beams, step, true);
            let bits = s.bits(&beams);
            for lane in [false, true] {
                let requests: Vec<Request> = s.lens.iter().enumerate().map(|(i, &l)| {
                    if l + step >= context {
                        return Request::default();
                    }
                    let queries = (0..shape.topk()).map(|b| {
                        let slots: Vec<u32> = match lane {
                            true => (0..=step).map(|t| b * shape.steps() + t).collect(),
                            false => beams[i * k + b as usize].iter().copied().collect(),
                        };
                        let own = slots.iter().map(|slot| draft_pos(&g, l, slot / shape.steps(), slot % shape.steps()));
                        (0..l).chain(own).collect()
                    }).collect();
                    Request { prefix: l, own: vec![], queries }
                }).collect();
                let mask = if lane { DraftMask::Lane } else { DraftMask::Ancestors(&bits) };
                compare(&s, &case, &mut planners, &requests, Phase::Draft { step }, |p, t, b| p.draft(t, b, step, mask));
            }
        }

        let trees = s.trees();
        let sizes: Vec<u32> = trees.iter().map(|t| t.len() as u32).collect();
        let parents = trees.concat();
        let requests: Vec<Request> = s.lens.iter().zip(&trees).map(|(&l, tree)| {
            let n = tree.len() as u32;
            let queries = (0..n).map(|j| (0..l).chain(path_to(tree, j).iter().map(|node| l + node)).collect()).collect();
            Request { prefix: l, own: (l..l + n).collect(), queries }
        }).collect();
        let trees = Trees { sizes: &sizes, parents: &parents };
        compare(&s, &case, &mut planners, &requests, Phase::Verify, |p, t, b| p.verify(t, b, trees));
    }

    /// Capacities are the sizes of the largest load, phase by phase, and their formulas multiply to the same elements.
    #[test]
    fn capacities_are_those_of_the_largest_load(s in setting(PAGES, MAX_BATCH), requests in 0..=MAX_BATCH) {
        let flashinfer = AnyFormat::FlashInfer(FlashInfer::default());
        for format in [flashinfer, AnyFormat::Triton(Triton), AnyFormat::FlashAttention(FlashAttention)] {
            for phase in phases(&s.g) {
                let sizes = format.extents(&s.g, &Load::limit(&s.g, phase, requests).unwrap()).unwrap();
                let capacities = format.capacities(&s.g, phase, requests).unwrap();
                prop_assert_eq!(capacities.iter().map(|c| (c.array, c.extent)).collect::<Vec<_>>(), sizes);
                for c in capacities {
                    let name = format.arrays()[c.array].name;
                    prop_assert_eq!(c.formula.elements(), c.extent.elements(), "{} {}: {}", phase, name, c.formula);
                }
            }
        }
    }
}
