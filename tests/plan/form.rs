//! Compares the arrays of the planner and the formats, element by element, with the pure functions of `plan::form`:
//! every phase and every array, over random configurations, batches and paddings.

use crate::common::plan::random::{Setting, setting};
use crate::common::plan::{Batch as Case, bucket, geometry};
use proptest::prelude::*;
use specrs::geometry::Layout;
use specrs::plan::form::{self, Step, lists, tables};
use specrs::plan::{
    AnyFormat, Arrays, AuditedPlan, Batch, Bucket, DraftMask, FlashAttention, FlashInfer, Format, Lens, Phase,
    PlanParts, Planner, Trees, Triton, WritesOnly,
};
use specrs::pool::Tables;

/// One live request: what the functions are asked about.
struct Request {
    len: u32,
    row: Vec<i32>,
    /// Queries.
    n: u32,
    /// `[n * words]`.
    mask: Vec<u64>,
    /// Depth of each query.
    depths: Vec<u32>,
}

impl Request {
    fn mask(&self, s: Step, j: u32) -> &[u64] {
        let w = form::mask_words(s) as usize;
        &self.mask[j as usize * w..][..w]
    }
}

/// Requests behind the setting's lengths, with `n(i)` queries each.
fn requests(
    case: &Case,
    s: Step,
    n: impl Fn(usize) -> u32,
    word: impl Fn(usize, u32, u32) -> u64,
    depth: impl Fn(usize, u32) -> u32,
) -> Vec<Request> {
    let request = |(i, &len): (usize, &u32)| {
        let n = form::queries(s, n(i));
        let live = form::alive(s, len);
        let words = (0..n).flat_map(|j| (0..form::mask_words(s)).map(move |w| (j, w)));
        Request {
            len,
            row: case.pool.pages(case.seqs[i]).unwrap().iter().map(|p| p.as_i32()).collect(),
            n,
            mask: words.map(|(j, w)| if live { word(i, j, w) } else { 0 }).collect(),
            depths: (0..n).map(|j| depth(i, j)).collect(),
        }
    };
    case.lens.iter().enumerate().map(request).collect()
}

/// The arrays of the plan, dead queries included.
fn parts(case: &Case, s: Step, requests: &[Request], bucket: Bucket) -> PlanParts {
    let mut p = PlanParts { qo_indptr: vec![0], mask_words: form::mask_words(s), ..PlanParts::default() };
    for (i, r) in requests.iter().enumerate() {
        p.rows.push(case.seqs[i].row() as i32);
        p.versions.push(case.pool.version(case.seqs[i]).unwrap());
        p.prefix_lens.push(form::prefix(s, r.len) as i32);
        for j in 0..r.n {
            p.positions.push(form::rope_pos(s, r.len, j, r.depths[j as usize]) as i32);
            p.out_slots.push(form::out_slot(s, r.len, &r.row, j));
        }
        p.mask.extend(&r.mask);
        p.qo_indptr.push(p.positions.len() as i32);
    }
    let (b, q, last) = (bucket.batch as usize, bucket.queries as usize, p.positions.len() as i32);
    p.rows.resize(b, -1);
    p.versions.resize(b, 0);
    p.prefix_lens.resize(b, 0);
    p.qo_indptr.resize(b + 1, last);
    p.positions.resize(q, 0);
    p.out_slots.resize(q, 0);
    p.mask.resize(q * p.mask_words as usize, 0);
    p
}

type Want = Vec<(&'static str, Vec<i64>)>;

/// Starts of lists of `lens`, `n` of them with those that are empty behind the live ones.
fn starts(lens: impl Iterator<Item = u64>, n: usize) -> Vec<i64> {
    let mut all = vec![0];
    all.extend(lens.scan(0, |sum, len| {
        *sum += len as i64;
        Some(*sum)
    }));
    all.resize(n + 1, all[all.len() - 1]);
    all
}

/// The slot lists and masks of `flashinfer` (`own` = 1) and `triton` (0).
fn slot_lists(s: Step, requests: &[Request], parts: &PlanParts, own: u32) -> Want {
    let (b, q) = (parts.rows.len(), parts.positions.len());
    let queries = || requests.iter().flat_map(|r| (0..r.n).map(move |j| (r, r.mask(s, j))));
    let wide = |all: &[i32]| all.iter().map(|&v| v.into()).collect::<Vec<i64>>();
    let slots = |all: Vec<i32>| wide(&all);
    let mut want: Want = vec![];
    if lists::per_query(s) {
        let lens = queries().map(|(r, mask)| lists::query_len(s, r.len, mask));
        let of = |(r, mask)| {
            let r: &Request = r;
            (0..lists::query_len(s, r.len, mask)).map(move |o| lists::query_slot(s, r.len, &r.row, mask, o))
        };
        want.push(("kv_indptr", starts(lens.map(u64::from), q)));
        want.push(("kv_indices", slots(queries().flat_map(of).collect())));
    } else {
        let lens = requests.iter().map(|r| lists::request_len(r.len, r.n, own));
        let of =
            |r: &Request| (0..lists::request_len(r.len, r.n, own)).map(|o| lists::request_slot(s, &r.row, o)).collect();
        want.push(("kv_indptr", starts(lens.map(u64::from), b)));
        want.push(("kv_indices", slots(requests.iter().flat_map::<Vec<i32>, _>(of).collect())));
        want.push(("qo_indptr", wide(&parts.qo_indptr)));
    }
    if own == 1 {
        want.push(("kv_last_page_len", vec![1; want[0].1.len() - 1]));
    } else if !lists::per_query(s) {
        want.push(("extend_slots", wide(&parts.out_slots)));
    }
    if s.phase == form::VERIFY {
        want.push(("mask_indptr", starts(requests.iter().map(|r| lists::mask_len(r.len, r.n)), b)));
        let bytes = |r: &Request| {
            (0..lists::mask_len(r.len, r.n)).map(|e| lists::mask_at(s, r.len, r.n, &r.mask, e).into()).collect()
        };
        want.push(("custom_mask", requests.iter().flat_map::<Vec<i64>, _>(bytes).collect()));
        if own == 1 {
            want.push(("packed_mask_indptr", starts(requests.iter().map(|r| lists::packed_len(r.len, r.n)), b)));
            let packed = |r: &Request| {
                (0..lists::packed_len(r.len, r.n)).map(|x| lists::packed_at(s, r.len, r.n, &r.mask, x).into()).collect()
            };
            want.push(("packed_custom_mask", requests.iter().flat_map::<Vec<i64>, _>(packed).collect()));
        }
    }
    want
}

/// The page tables of `flash_attention`; those of `arrays` say how many columns there are.
fn page_tables(s: Step, requests: &[Request], parts: &PlanParts, arrays: &Arrays) -> Want {
    let (b, q) = (parts.rows.len(), parts.positions.len());
    let cols = |name| arrays.get(name).map_or(0, |a| a.extent.shape()[1] as u32);
    let padded = |mut all: Vec<i64>, n: usize| {
        all.resize(n, 0);
        all
    };
    let mut want: Want = vec![("cu_seqlens_q", parts.qo_indptr.iter().map(|&v| v.into()).collect())];
    let lens = requests.iter().map(|r| tables::len_at(s, r.len, r.n).into()).collect();
    want.push(("cache_seqlens", padded(lens, b)));
    let n = cols("page_table");
    let row = |r: &Request| (0..n).map(|c| tables::page_at(s, r.len, r.n, &r.row, c).into()).collect::<Vec<i64>>();
    want.push(("page_table", padded(requests.iter().flat_map(row).collect(), b * n as usize)));
    if tables::passes(s) == tables::ONE {
        return want;
    }
    want.push(("expand_cu_seqlens_q", (0..=q as i64).collect()));
    let queries = || requests.iter().flat_map(|r| (0..r.n).map(move |j| (r, j)));
    let lens = queries().map(|(r, j)| tables::expand_len_at(s, r.len, r.mask(s, j)).into()).collect();
    want.push(("expand_cache_seqlens", padded(lens, q)));
    let n = cols("expand_page_table");
    let row = |(r, j): (&Request, u32)| {
        (0..n).map(|c| tables::expand_at(s, r.len, &r.row, r.mask(s, j), j, c).into()).collect::<Vec<i64>>()
    };
    want.push(("expand_page_table", padded(queries().flat_map(row).collect(), q * n as usize)));
    want
}

/// The elements of every array.
fn got(arrays: &Arrays) -> Want {
    let elements = |a: specrs::plan::ArrayRef<'_>| match a.spec.dtype.size() {
        1 => a.bytes.iter().map(|&v| v.into()).collect(),
        4 => bytemuck::cast_slice::<u8, i32>(a.bytes).iter().map(|&v| v.into()).collect(),
        _ => bytemuck::cast_slice::<u8, i64>(a.bytes).to_vec(),
    };
    let mut all: Want = arrays.iter().map(|a| (a.spec.name, elements(a))).collect();
    all.sort();
    all
}

/// Plan a step in every format and compare each array.
fn check(
    setting: &Setting,
    case: &Case,
    phase: Phase,
    requests: &[Request],
    make: impl Fn(&mut Planner<AnyFormat>, &Tables<'_>, &Batch<'_>) -> specrs::Result<AuditedPlan<AnyFormat>>,
) {
    let (g, s) = (setting.g, Step::new(&setting.g, phase));
    let queries = requests.iter().map(|r| r.n).sum::<u32>();
    let bucket = bucket(&g, phase, requests.len(), queries as usize, setting.pad.unwrap_or((0, 0)));
    let batch = Batch::new(&case.seqs, Lens::Host(&case.lens)).padded(bucket);
    let want = parts(case, s, requests, bucket);
    for format in [AnyFormat::FlashInfer(FlashInfer::default()), AnyFormat::Triton(Triton), FLASH_ATTENTION] {
        let lanes = matches!(phase, Phase::Draft { .. }) && tables::passes(s) != tables::SLOTS;
        let mut planner = Planner::new(g, format).unwrap();
        let plan = match case.pool.with_tables(|t| make(&mut planner, &t, &batch)).unwrap() {
            // Page tables cannot name a caller's ancestors: the format says so.
            Err(_) if lanes && format.name() == "flash_attention" => continue,
            plan => plan.unwrap(),
        };
        assert_eq!(plan.to_parts(), want, "{phase}");
        let mut arrays = match format {
            AnyFormat::FlashInfer(_) => slot_lists(s, requests, &want, 1),
            AnyFormat::Triton(_) => slot_lists(s, requests, &want, 0),
            _ => page_tables(s, requests, &want, plan.arrays()),
        };
        arrays.sort();
        assert_eq!(got(plan.arrays()), arrays, "{} {phase}", format.name());
    }
}

const FLASH_ATTENTION: AnyFormat = AnyFormat::FlashAttention(FlashAttention);

proptest! {
    #![proptest_config(ProptestConfig { cases: if std::env::var_os("SPECRS_TEST_LONG").is_some() { 4000 } else { 256 }, ..ProptestConfig::default() })]
    #[test]
    fn every_element_is_that_of_its_function(s in setting(&[1, 2, 4, 16, 64], 5)) {
        let case = Case::new(&s.g, &s.lens, s.seed);
        let context = s.g.limits().max_context_len;

        let room = |l: u32| s.g.alloc_target(l, 0).unwrap().min(context) - l;
        let counts: Vec<u32> = s.lens.iter().enumerate().map(|(i, &l)| s.below(i, room(l) + 1)).collect();
        let step = Step::new(&s.g, Phase::Extend);
        let all = requests(&case, step, |i| counts[i], |_, _, _| 0, |_, _| 0);
        check(&s, &case, Phase::Extend, &all, |p, t, b| p.extend(t, b, &counts));

        let step = Step::new(&s.g, Phase::Decode);
        let all = requests(&case, step, |_| 1, |_, _, _| 0, |_, _| 0);
        check(&s, &case, Phase::Decode, &all, |p, t, b| p.decode(t, b));

        for t in 0..s.g.shape().steps() {
            let (phase, bits) = (Phase::Draft { step: t }, s.ancestors(t));
            let step = Step::new(&s.g, phase);
            let all = requests(&case, step, |_| 0, |_, j, w| form::lane_word(step, j, w), |_, _| 0);
            check(&s, &case, phase, &all, |p, tables, b| p.draft(tables, b, t, DraftMask::Lane));
            let words = form::mask_words(step);
            let given = |i: usize, j: u32, w: u32| bits[((i as u32 * step.topk + j) * words + w) as usize];
            let all = requests(&case, step, |_| 0, given, |_, _| 0);
            for (word, i) in all.iter().flat_map(|r| r.mask.chunks(words.max(1) as usize)).zip(0..) {
                for (w, &word) in (0..words).zip(word) {
                    let own = form::own_bit(step, i % step.topk);
                    assert_eq!(word & !form::earlier_word(step, w) & !form::run_word(own, own + 1, w), 0);
                }
            }
            check(&s, &case, phase, &all, |p, tables, b| p.draft(tables, b, t, DraftMask::Ancestors(&bits)));
        }

        let trees = s.trees();
        let (sizes, parents) = (trees.iter().map(|t| t.len() as u32).collect::<Vec<_>>(), trees.concat());
        let step = Step::new(&s.g, Phase::Verify);
        let word = |i: usize, j, w| form::node_word(&trees[i], j, w);
        let all = requests(&case, step, |i| sizes[i], word, |i, j| form::node_depth(&trees[i], j));
        let trees = Trees { sizes: &sizes, parents: &parents };
        check(&s, &case, Phase::Verify, &all, |p, t, b| p.verify(t, b, trees));

        // The copies of the prefix's tail, branch by branch.
        let mut planner = Planner::new(s.g, WritesOnly).unwrap();
        let batch = Batch::new(&case.seqs, Lens::Host(&case.lens));
        let copies = case.pool.with_tables(|t| planner.tail_copies(&t, &batch)).unwrap().unwrap();
        let (mut src, mut dst) = (vec![], vec![]);
        let step = Step::new(&s.g, Phase::Draft { step: 0 });
        for (r, b) in all.iter().flat_map(|r| (0..step.topk).map(move |b| (r, b))) {
            let n = form::hole_len(step, r.len, b);
            src.extend((0..n).map(|o| form::row_slot(step, &r.row, r.len - n + o)));
            dst.extend((0..n).map(|o| form::row_slot(step, &r.row, form::draft_pos(step, r.len, b, 0) - n + o)));
        }
        prop_assert_eq!(copies.moves().src(), src);
        prop_assert_eq!(copies.moves().dst(), dst);
    }
}

/// The residue algebra of `geometry`, which sizes regions, against the functions that place elements.
#[test]
fn draft_regions_are_those_of_the_geometry() {
    for (p, k, s) in
        [1, 2, 4, 16, 64].into_iter().flat_map(|p| (1..=5).flat_map(move |k| (1..=6).map(move |s| (p, k, s))))
    {
        for layout in [Layout::Dense, Layout::Holey] {
            let g = geometry(k, s, 1, p, 1, 400, layout);
            for len in 200..200 + p {
                let region = g.draft_region(len).unwrap();
                for (b, t) in (0..k).flat_map(|b| (0..s).map(move |t| (b, t))) {
                    let step = Step::new(&g, Phase::Draft { step: t });
                    assert_eq!(form::draft_pos(step, len, b, t), region.pos(b, t).unwrap());
                    let n = form::hole_len(step, len, b);
                    let hole = region.hole(b).unwrap();
                    assert_eq!(hole.map_or(0, |h| h.len), n);
                    if let Some(hole) = hole {
                        assert_eq!((hole.src, hole.dst), (len - n, form::draft_pos(step, len, b, 0) - n));
                    }
                }
            }
        }
    }
}
