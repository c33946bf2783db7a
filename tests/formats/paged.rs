//! The `flash_attention` format: tables of small cases worked by hand, what is refused, and tables in fixed memory.

use crate::common::plan::paged::{Got, Planned, fixed, got, pages, planner};
use crate::common::plan::{Batch as Case, geometry};
use specrs::Error;
use specrs::geometry::Layout;
use specrs::plan::{
    Arrays, AuditedPlan, Batch, Bucket, DraftMask, Extent, FlashAttention, Format, Lens, Load, Need, Phase, Plan,
    Planner, Trees, phases,
};

fn draft(case: &Case, planner: &mut Planner<FlashAttention>, step: u32, mask: DraftMask<'_>) -> Planned {
    let batch = Batch::new(&case.seqs, Lens::Host(&case.lens));
    case.pool.with_tables(|t| planner.draft(&t, &batch, step, mask)).unwrap().unwrap()
}

/// L = 7, P = 4, K = 3, S = 6, the worked case of `geometry`: base 4, r = 3, three pages a branch; branches
/// start at row positions 7, 19 and 31, on columns 1, 4 and 7.
#[test]
fn draft_of_the_worked_case() {
    let g = geometry(3, 6, 16, 4, 2, 64, Layout::Holey);
    let c = Case::new(&g, &[7], 5);
    let a = pages(&c, 0);
    let mut planner = planner(g);
    let want = |keys: i32, rows: [Vec<i32>; 3]| Got {
        cache_seqlens: vec![4],
        page_table: vec![vec![a[0]]],
        cu_seqlens_q: vec![0, 3],
        expand_cache_seqlens: vec![keys; 3],
        expand_page_table: rows.to_vec(),
        expand_cu_seqlens_q: vec![0, 1, 2, 3],
    };
    // Step 0: three tokens of the tail and one of the branch fill one page.
    let plan = draft(&c, &mut planner, 0, DraftMask::Lane);
    assert_eq!(got(plan.arrays()), want(4, [vec![a[1]], vec![a[4]], vec![a[7]]]));
    // Step 1: the fifth token is on the second page.
    let plan = draft(&c, &mut planner, 1, DraftMask::Lane);
    assert_eq!(got(plan.arrays()), want(5, [vec![a[1], a[2]], vec![a[4], a[5]], vec![a[7], a[8]]]));
    // Step 2: still two pages; the table is three wide, and the last column is the sink.
    let plan = draft(&c, &mut planner, 2, DraftMask::Lane);
    assert_eq!(got(plan.arrays()), want(6, [vec![a[1], a[2], 0], vec![a[4], a[5], 0], vec![a[7], a[8], 0]]));
    // Branch 1 reads the prefix from page 0, then the copies in its holes 16..18, then its own tokens 19..21.
    let mut slots = vec![];
    FlashAttention.reads(&plan, &g, plan.arrays(), 1, &mut slots).unwrap().unwrap();
    assert_eq!(slots, [0, 1, 2, 3, 16, 17, 18, 19, 20, 21].map(|pos| c.slot(0, pos)));
    // Step 5: nine tokens on three pages.
    let plan = draft(&c, &mut planner, 5, DraftMask::Lane);
    let row = |i: usize| vec![a[i], a[i + 1], a[i + 2], 0, 0, 0];
    assert_eq!(got(plan.arrays()), want(9, [row(1), row(4), row(7)]));
}

/// The prefix ends with its page: no holes, and the first page of the prefix pass is the whole prefix. And an empty
/// prefix, whose pass reads nothing.
#[test]
fn draft_behind_whole_pages() {
    let g = geometry(2, 3, 5, 4, 2, 64, Layout::Holey);
    let c = Case::new(&g, &[8, 0], 5);
    let (a, b) = (pages(&c, 0), pages(&c, 1));
    let plan = draft(&c, &mut planner(g), 1, DraftMask::Lane);
    // n = ceil(3 / 4) = 1 page a branch.
    let want = Got {
        cache_seqlens: vec![8, 0],
        page_table: vec![vec![a[0], a[1]], vec![0, 0]],
        cu_seqlens_q: vec![0, 2, 4],
        expand_cache_seqlens: vec![2; 4],
        expand_page_table: vec![vec![a[2], 0], vec![a[3], 0], vec![b[0], 0], vec![b[1], 0]],
        expand_cu_seqlens_q: vec![0, 1, 2, 3, 4],
    };
    assert_eq!(got(plan.arrays()), want);
}

/// K = 2, S = 3, L = 5, step 1, P = 4, dense: branch b, step s at 5 + 3b + s. Both beams continue branch 1 of step 0
/// (row position 8); their own tokens are at 6 and 9.
#[test]
fn draft_of_the_dense_layout() {
    let g = geometry(2, 3, 5, 4, 2, 64, Layout::Dense);
    let c = Case::new(&g, &[5], 9);
    let a = pages(&c, 0);
    let mut planner = planner(g);
    let want = |rows: [[i32; 2]; 2]| Got {
        cache_seqlens: vec![5],
        page_table: vec![vec![a[0], a[1]]],
        cu_seqlens_q: vec![0, 2],
        expand_cache_seqlens: vec![2, 2],
        expand_page_table: rows.iter().map(|r| r.to_vec()).collect(),
        expand_cu_seqlens_q: vec![0, 1, 2],
    };
    let (six, eight, nine, five) = (a[1] * 4 + 2, a[2] * 4, a[2] * 4 + 1, a[1] * 4 + 1);
    let bits = [1 << 3 | 1 << 1, 1 << 3 | 1 << 4];
    let plan = draft(&c, &mut planner, 1, DraftMask::Ancestors(&bits));
    assert_eq!(got(plan.arrays()), want([[six, eight], [eight, nine]]));
    let plan = draft(&c, &mut planner, 1, DraftMask::Lane);
    assert_eq!(got(plan.arrays()), want([[five, six], [eight, nine]]));
}

/// K = 1: one causal pass of L + t + 1 keys, and no expand arrays.
#[test]
fn draft_of_one_branch_is_one_pass() {
    let g = geometry(1, 3, 4, 4, 2, 64, Layout::Holey);
    let c = Case::new(&g, &[7, 2], 9);
    let (a, b) = (pages(&c, 0), pages(&c, 1));
    let plan = draft(&c, &mut planner(g), 1, DraftMask::Lane);
    let want = Got {
        cache_seqlens: vec![9, 4],
        page_table: vec![vec![a[0], a[1], a[2]], vec![b[0], 0, 0]],
        cu_seqlens_q: vec![0, 1, 2],
        expand_cache_seqlens: vec![],
        expand_page_table: vec![],
        expand_cu_seqlens_q: vec![],
    };
    assert_eq!(got(plan.arrays()), want);
    assert!(plan.arrays().get("expand_page_table").is_none());
    assert_eq!(FlashAttention::expand_page_size(&g, plan.phase()), None);
}

/// The root has children 1 and 2, node 1 has child 3, and 3 has child 4; the second request verifies its root alone. Rows are as long as the deepest node's.
#[test]
fn verify_of_ragged_trees() {
    for layout in [Layout::Dense, Layout::Holey] {
        let g = geometry(2, 3, 5, 4, 4, 64, layout);
        let c = Case::new(&g, &[7, 4], 3);
        let (a, b) = (pages(&c, 0), pages(&c, 1));
        let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
        let trees = Trees { sizes: &[5, 1], parents: &[-1, 0, 0, 1, 3, -1] };
        let plan = c.pool.with_tables(|t| planner(g).verify(&t, &batch, trees)).unwrap().unwrap();
        // Nodes 0..4 are row positions 7..11: offset 3 of column 1, all of column 2.
        let (n0, n1, n2, n3, n4) = (a[1] * 4 + 3, a[2] * 4, a[2] * 4 + 1, a[2] * 4 + 2, a[2] * 4 + 3);
        let want = Got {
            cache_seqlens: vec![7, 4],
            page_table: vec![vec![a[0], a[1]], vec![b[0], 0]],
            cu_seqlens_q: vec![0, 5, 6],
            expand_cache_seqlens: vec![1, 2, 2, 3, 4, 1],
            expand_page_table: vec![
                vec![n0, 0, 0, 0],
                vec![n0, n1, 0, 0],
                vec![n0, n2, 0, 0],
                vec![n0, n1, n3, 0],
                vec![n0, n1, n3, n4],
                vec![b[1] * 4, 0, 0, 0],
            ],
            expand_cu_seqlens_q: vec![0, 1, 2, 3, 4, 5, 6],
        };
        assert_eq!(got(plan.arrays()), want);
        assert_eq!(FlashAttention::expand_page_size(&g, Phase::Verify), Some(1));
    }
}

/// A chunk of three tokens, none, and one; then a decode of all three requests.
#[test]
fn extend_and_decode() {
    let g = geometry(3, 6, 16, 4, 4, 64, Layout::Holey);
    let c = Case::new(&g, &[7, 9, 2], 5);
    let (a, b, d) = (pages(&c, 0), pages(&c, 1), pages(&c, 2));
    let mut planner = planner(g);
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let plan = c.pool.with_tables(|t| planner.extend(&t, &batch, &[3, 0, 1])).unwrap().unwrap();
    let mut want = Got {
        cache_seqlens: vec![10, 0, 3], // a request without queries is read by nobody
        page_table: vec![vec![a[0], a[1], a[2]], vec![0, 0, 0], vec![d[0], 0, 0]],
        cu_seqlens_q: vec![0, 3, 3, 4],
        expand_cache_seqlens: vec![],
        expand_page_table: vec![],
        expand_cu_seqlens_q: vec![],
    };
    assert_eq!(got(plan.arrays()), want);
    drop(plan);
    let plan = c.pool.with_tables(|t| planner.decode(&t, &batch)).unwrap().unwrap();
    want.cache_seqlens = vec![8, 10, 3];
    want.page_table = vec![vec![a[0], a[1], 0], vec![b[0], b[1], b[2]], vec![d[0], 0, 0]];
    want.cu_seqlens_q = vec![0, 1, 2, 3];
    assert_eq!(got(plan.arrays()), want);
}

/// An empty batch, a request at the context wall, and padding: nothing is read for them, and all of it is written.
#[test]
fn nothing_the_wall_and_padding() {
    let g = geometry(2, 3, 5, 4, 4, 16, Layout::Holey);
    let c = Case::new(&g, &[14, 5], 5);
    let b = pages(&c, 1);
    let mut planner = planner(g);
    let none = Batch::new(&[], Lens::Host(&[]));
    let plan = c.pool.with_tables(|t| planner.draft(&t, &none, 0, DraftMask::Lane)).unwrap().unwrap();
    let mut want = Got {
        cache_seqlens: vec![],
        page_table: vec![],
        cu_seqlens_q: vec![0],
        expand_cache_seqlens: vec![],
        expand_page_table: vec![],
        expand_cu_seqlens_q: vec![0],
    };
    assert_eq!(got(plan.arrays()), want);
    let plan = c.pool.with_tables(|t| planner.extend(&t, &none, &[])).unwrap().unwrap();
    assert_eq!(plan.arrays().get("page_table").unwrap().extent, Extent::Table { rows: 0, cols: 0 });
    drop(plan);
    // Step 2 of 14 tokens would stand at 16, the wall: its two queries and the padded ones read nothing.
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens)).padded(Bucket { batch: 3, queries: 6 });
    let plan = c.pool.with_tables(|t| planner.draft(&t, &batch, 2, DraftMask::Lane)).unwrap().unwrap();
    want.cache_seqlens = vec![0, 4, 0];
    want.page_table = vec![vec![0], vec![b[0]], vec![0]];
    want.cu_seqlens_q = vec![0, 2, 4, 4];
    want.expand_cache_seqlens = vec![0, 0, 4, 4, 0, 0];
    let row = |page: i32| vec![page, 0, 0];
    // r = 1, n = ceil(4 / 4) = 1: branches on columns 1 and 2.
    want.expand_page_table = vec![row(0), row(0), row(b[1]), row(b[2]), row(0), row(0)];
    want.expand_cu_seqlens_q = vec![0, 1, 2, 3, 4, 5, 6];
    assert_eq!(got(plan.arrays()), want);
    for q in [0, 1, 4, 5] {
        let mut slots = vec![];
        FlashAttention.reads(&plan, &g, plan.arrays(), q, &mut slots).unwrap();
        assert!(slots.is_empty());
    }
}

/// Whole pages cannot name ancestors, and one pass cannot leave a token out.
#[test]
fn what_cannot_be_said_is_refused() {
    let g = geometry(2, 3, 5, 4, 2, 64, Layout::Holey);
    let c = Case::new(&g, &[5], 9);
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let mut planner = planner(g);
    let own = [1 << 0, 1 << 3];
    let err = c.pool.with_tables(|t| planner.draft(&t, &batch, 0, DraftMask::Ancestors(&own))).unwrap().unwrap_err();
    assert!(matches!(err, Error::Invalid { what: "draft attention", .. }), "{err}");
    for works in ["lanes", "dense layout", "page_size = 1"] {
        assert!(err.to_string().contains(works), "{err}");
    }
    // A plan made elsewhere that names ancestors anyway.
    let lane = draft(&c, &mut planner, 1, DraftMask::Lane);
    let mut parts = lane.to_parts();
    parts.mask[0] = 1 << 3 | 1 << 1; // branch 0 continues branch 1
    let plan = Plan::from_parts(lane.phase(), g.page(), parts);
    let err = c.pool.with_tables(|t| AuditedPlan::audit(plan, &t, &g, &FlashAttention)).unwrap().unwrap_err();
    assert!(err.to_string().contains("request 0, branch 0, step 1"), "{err}");
    // K = 1 without its first token.
    let g = geometry(1, 3, 4, 4, 2, 64, Layout::Dense);
    let c = Case::new(&g, &[5], 9);
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let mut planner = Planner::new(g, FlashAttention).unwrap();
    let err = c.pool.with_tables(|t| planner.draft(&t, &batch, 1, DraftMask::Ancestors(&[0b10]))).unwrap().unwrap_err();
    assert!(err.to_string().contains("branch 0, step 1"), "{err}");
}

/// More ancestors than a query has: a bit of each branch of step 0. The row is as wide as the geometry says, no wider.
#[test]
fn more_ancestors_than_steps_do_not_fit() {
    let g = geometry(3, 4, 10, 4, 2, 64, Layout::Dense);
    let c = Case::new(&g, &[5], 9);
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let step_0 = 1 | 1 << 4 | 1 << 8;
    let bits = [step_0 | 1 << 1, step_0 | 1 << 5, step_0 | 1 << 9];
    let err = c.pool.with_tables(|t| planner(g).draft(&t, &batch, 1, DraftMask::Ancestors(&bits))).unwrap();
    match err.unwrap_err() {
        Error::Capacity { what: "expand_page_table", need: 4, have: 2, hint } => {
            assert!(hint.contains("request 0, query 0") && hint.contains("topk 3"), "{hint}");
        }
        err => panic!("{err}"),
    }
}

/// All cells of a table in fixed memory, row by row.
fn cells(arrays: &mut Arrays, array: usize, rows: u64, width: u64) -> Vec<Vec<i32>> {
    arrays.set_poison(false);
    let whole = Extent::Table { rows, cols: width };
    let [view] = arrays.open([Some(Need { array, used: whole, limit: whole })], String::new).unwrap();
    let all = view.slice::<i32>().unwrap();
    all.chunks_exact(width as usize).map(<[i32]>::to_vec).collect()
}

/// A static table keeps nothing of a longer batch or of a row that was live, in any of its cells.
#[test]
fn static_tables_keep_nothing() {
    let g = geometry(2, 4, 5, 4, 4, 64, Layout::Dense);
    let phase = Phase::Verify;
    for (debug, wider) in [(false, 0), (false, 3), (true, 0), (true, 3)] {
        let mut arrays = fixed(&g, phase, 4, wider);
        let mut planner = planner(g);
        planner.set_debug(debug);
        planner.defer_arrays(true);
        // Long, short, empty, padded to all rows, long again: every table is compared with one written afresh.
        for (round, (lens, pad)) in [
            (vec![40, 30, 20, 10], None),
            (vec![3, 20], None),
            (vec![], None),
            (vec![3], Some(Bucket { batch: 4, queries: 20 })),
            (vec![1, 50, 9], None),
            (vec![2, 2, 2, 2], None),
            (vec![50], Some(Bucket { batch: 4, queries: 20 })),
        ]
        .into_iter()
        .enumerate()
        {
            let c = Case::new(&g, &lens, round as u64);
            let batch = Batch { seqs: &c.seqs, lens: Lens::Host(&c.lens), pad };
            let sizes: Vec<u32> = lens.iter().map(|l| 1 + l % 5).collect();
            let parents: Vec<i32> = sizes.iter().flat_map(|&n| (0..n as i32).map(|j| j - 1)).collect();
            let trees = Trees { sizes: &sizes, parents: &parents };
            c.pool
                .with_tables(|t| {
                    let plan = planner.verify(&t, &batch, trees).unwrap();
                    planner.lower(&t, &plan, &mut arrays).unwrap();
                    let fresh = AuditedPlan::audit(Plan::clone(&plan), &t, &g, &FlashAttention).unwrap();
                    assert_eq!(got(&arrays), got(fresh.arrays()), "round {round}, {lens:?}");
                    for (array, name, rows, width) in
                        [(1, "page_table", 4, 16 + wider), (4, "expand_page_table", 20, 5 + wider)]
                    {
                        let fresh = |r: usize| {
                            let mut row = fresh.arrays().row::<i32>(name, r).to_vec();
                            row.resize(width as usize, 0);
                            row
                        };
                        let want: Vec<_> = (0..rows as usize).map(fresh).collect();
                        assert_eq!(cells(&mut arrays, array, rows, width), want, "{name} in round {round}, {lens:?}");
                    }
                })
                .unwrap();
        }
    }
}

/// A batch that does not fit a caller's arrays: need, have and the configuration, and nothing is written.
#[test]
fn a_static_array_too_small_is_left_alone() {
    let g = geometry(2, 4, 5, 4, 4, 64, Layout::Holey);
    let phase = Phase::Draft { step: 1 };
    let mut arrays = fixed(&g, phase, 2, 0);
    let mut planner = planner(g);
    planner.defer_arrays(true);
    let fits = Case::new(&g, &[9, 30], 5);
    let plan = draft(&fits, &mut planner, 1, DraftMask::Lane);
    fits.pool.with_tables(|t| planner.lower(&t, &plan, &mut arrays)).unwrap().unwrap();
    let before = got(&arrays);
    let c = Case::new(&g, &[9, 30, 2], 5);
    let plan = draft(&c, &mut planner, 1, DraftMask::Lane);
    let err = c.pool.with_tables(|t| planner.lower(&t, &plan, &mut arrays)).unwrap().unwrap_err();
    match err {
        Error::Capacity { what: "cache_seqlens", need: 3, have: 2, hint } => {
            assert!(hint.contains("draft step 1") && hint.contains("page_size 4"), "{hint}");
        }
        err => panic!("{err}"),
    }
    assert_eq!(got(&arrays), before);
    // A wider step: two more columns of the expand table.
    let plan = draft(&fits, &mut planner, 3, DraftMask::Lane);
    let err = fits.pool.with_tables(|t| planner.lower(&t, &plan, &mut arrays)).unwrap().unwrap_err();
    assert!(matches!(err, Error::Capacity { what: "expand_page_table", need: 4, have: 2, .. }), "{err}");
}

/// Device lengths size by their bound.
#[test]
fn sizes_without_lengths() {
    let g = geometry(4, 5, 20, 16, 8, 1000, Layout::Holey);
    for phase in phases(&g) {
        let of = |load: Load| FlashAttention.extents(&g, &load).unwrap();
        let limit = of(Load::limit(&g, phase, 8).unwrap());
        let device = of(Load::of_lens(&g, phase, &Lens::Device { batch: 8, at_most: 1000 }).unwrap());
        assert_eq!(device, limit);
        let cols = limit.iter().find_map(|e| match e {
            (1, Extent::Table { cols, .. }) => Some(*cols),
            _ => None,
        });
        // 1000 tokens are 63 pages of 16. A verification's prefix is 999 at most, and ends on the same page; of a
        // draft's prefix only the whole pages are read in this pass: 999 - 999 mod 16 = 992, or 62 pages.
        let want = if let Phase::Draft { .. } = phase { 62 } else { 63 };
        assert_eq!(cols, Some(want), "{phase:?}");
    }
}
