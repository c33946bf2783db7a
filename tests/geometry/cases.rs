//! Sizes and layouts against worked cases and against their formulas, written again here in `i64`.

use proptest::prelude::*;
use specrs::bounds::{MAX_BATCH, MAX_CONTEXT_LEN, PageSize};
use specrs::geometry::{Geometry, Layout, Limits, TailCopy, Tree, TreeShape};
use specrs::{Error, Result};

fn geometry(k: u32, s: u32, v: u32, p: u32, batch: u32, context: u32, layout: Layout) -> Result<Geometry> {
    Geometry::new(Limits { max_batch: batch, max_context_len: context, page_size: p }, TreeShape::new(k, s, v)?, layout)
}

/// L = 7, P = 4, K = 3, S = 6.
#[test]
fn the_worked_case() {
    let g = geometry(3, 6, 16, 4, 8, 2048, Layout::Holey).unwrap();
    let r = g.draft_region(7).unwrap();
    assert_eq!((r.remainder(), r.base(), r.pages_per_branch(), r.stride()), (3, 4, 3, 12));
    assert_eq!([0, 1, 2].map(|b| r.pos(b, 0).unwrap()), [7, 19, 31]);
    assert_eq!((r.pos(2, 5).unwrap(), r.end().unwrap()), (36, 40));
    assert_eq!(r.hole(0).unwrap(), None);
    assert_eq!(r.hole(1).unwrap(), Some(TailCopy { src: 4, dst: 16, len: 3 }));
    assert_eq!(r.hole(2).unwrap(), Some(TailCopy { src: 4, dst: 28, len: 3 }));
    // ceil((3 + 6) / 4) * 4 * 3 = 36; reserve 72; row: 2048 + max(20, 72 + 3) = 2123, up to pages of 4: 2124.
    assert_eq!((g.alloc_len_per_decode(), g.reserve_per_decode(), g.row_width()), (36, 72, 2124));
    // 7 + 72 = 79, up to 80; what is allocated already is never given up.
    assert_eq!((g.alloc_target(7, 8).unwrap(), g.alloc_target(7, 96).unwrap()), (80, 96));
    // The same request in the dense layout: 7 + 6b + s, 18 positions.
    let d = geometry(3, 6, 16, 4, 8, 2048, Layout::Dense).unwrap();
    let r = d.draft_region(7).unwrap();
    assert_eq!((r.pos(0, 0).unwrap(), r.pos(1, 0).unwrap(), r.pos(2, 5).unwrap(), r.end().unwrap()), (7, 13, 24, 25));
    assert_eq!(r.hole(1).unwrap(), None);
    assert_eq!((d.alloc_len_per_decode(), d.row_width()), (18, 2088)); // 2048 + max(20, 36 + 3), up to 2088
}

/// r = 0: every branch starts on a page of its own and nothing is copied.
#[test]
fn no_holes_without_a_remainder() {
    let g = geometry(3, 6, 16, 4, 8, 2048, Layout::Holey).unwrap();
    let r = g.draft_region(8).unwrap();
    assert_eq!([0, 1, 2].map(|b| r.pos(b, 0).unwrap()), [8, 16, 24]); // ceil(6 / 4) = 2 pages a branch
    assert!((0..3).all(|b| r.hole(b).unwrap().is_none()));
}

/// K = 1 or P = 1: holey is dense.
#[test]
fn layouts_coincide_without_branches_or_pages() {
    for (k, p) in [(1, 16), (4, 1)] {
        let holey = geometry(k, 4, 4, p, 2, 100, Layout::Holey).unwrap();
        assert_eq!(holey, geometry(k, 4, 4, p, 2, 100, Layout::Dense).unwrap());
        assert_eq!(holey.layout(), Layout::Dense);
    }
}

fn up(n: i64, p: i64) -> i64 {
    (n + p - 1) / p * p
}

/// Every residue of every page size up to 64, K and S up to 6: regions, holes, sizes and widths.
#[test]
fn formulas_over_every_residue() {
    for p in [1i64, 2, 4, 8, 16, 32, 64] {
        for k in 1..=6i64 {
            for s in 1..=6i64 {
                let v = (1 + k + (s - 1) * k * k).min(20);
                for layout in [Layout::Dense, Layout::Holey] {
                    let g = geometry(k as u32, s as u32, v as u32, p as u32, 3, 500, layout).unwrap();
                    let holey = layout == Layout::Holey && k > 1 && p > 1;
                    let alloc = if holey { v.max((p - 1 + s + p - 1) / p * p * k) } else { v.max(k * s) };
                    assert_eq!(g.alloc_len_per_decode() as i64, alloc);
                    assert_eq!(g.reserve_per_decode() as i64, 2 * alloc);
                    assert_eq!(g.row_width() as i64, up(500 + (4 + v).max(2 * alloc + p - 1), p));
                    assert_eq!(g.row_pages() as i64 * p, g.row_width() as i64);
                    assert_eq!(g.pages_for_full_load().unwrap() as i64, 3 * g.row_width() as i64 / p);
                    assert_eq!(g.per_branch_kv_indices().unwrap() as i64, 3 * k * (500 + s));
                    assert_eq!(g.draft_mask_words() as i64, (k * s + 63) / 64);
                    assert_eq!(g.verify_mask_words() as i64, (v + 63) / 64);
                    for len in 300..300 + p {
                        let (r, base) = (len % p, len - len % p);
                        let n = (r + s + p - 1) / p;
                        let region = g.draft_region(len as u32).unwrap();
                        for b in 0..k {
                            for t in 0..s {
                                let want = if holey { base + b * n * p + r + t } else { len + b * s + t };
                                assert_eq!(region.pos(b as u32, t as u32).unwrap() as i64, want);
                            }
                            let hole = region.hole(b as u32).unwrap();
                            let want = (holey && b > 0 && r > 0).then(|| TailCopy {
                                src: base as u32,
                                dst: (base + b * n * p) as u32,
                                len: r as u32,
                            });
                            assert_eq!(hole, want);
                        }
                        let end = if holey { base + k * n * p } else { len + k * s };
                        assert_eq!(region.end().unwrap() as i64, end);
                        assert!(end <= g.alloc_target(len as u32, 0).unwrap() as i64);
                    }
                }
            }
        }
    }
}

#[test]
fn limits_are_refused_with_their_numbers() {
    let cases: [(Result<Geometry>, &str); 9] = [
        (geometry(0, 4, 4, 1, 1, 10, Layout::Dense), "topk = 0 is outside 1..=64"),
        (geometry(65, 4, 4, 1, 1, 10, Layout::Dense), "topk = 65 is outside 1..=64"),
        (geometry(2, 0, 2, 1, 1, 10, Layout::Dense), "steps = 0 is outside 1..=64"),
        (geometry(2, 1, 0, 1, 1, 10, Layout::Dense), "draft_tokens = 0 is outside 1..=1024"),
        (geometry(2, 2, 8, 1, 1, 10, Layout::Dense), "draft_tokens = 8: the tree of topk=2, steps=2 has 7 nodes"),
        (geometry(2, 2, 7, 3, 1, 10, Layout::Dense), "page_size = 3: must be a power of two"),
        (geometry(2, 2, 7, 2048, 1, 10, Layout::Dense), "page_size = 2048 is outside 1..=1024"),
        (geometry(2, 2, 7, 1, 0, 10, Layout::Dense), "max_batch = 0 is outside 1..=65536"),
        (geometry(2, 2, 7, 1, 1, MAX_CONTEXT_LEN + 1, Layout::Dense), "max_context_len = 16777217 is outside"),
    ];
    for (got, want) in cases {
        let got = got.unwrap_err().to_string();
        assert!(got.starts_with(want), "{got}");
    }
}

#[test]
fn overflow_names_the_size_and_its_arithmetic() {
    // 65536 rows of 16777216 + max(4 + 7, 2 * 7) = 16777230 positions.
    match geometry(2, 2, 7, 1, MAX_BATCH, MAX_CONTEXT_LEN, Layout::Dense).unwrap_err() {
        Error::Overflow { what, expr, ty, limit } => {
            assert_eq!((what, ty, limit), ("max_batch * row_width", "int32", i32::MAX as u64));
            assert_eq!(expr, "65536 * 16777230");
        }
        other => panic!("{other}"),
    }
    // 65536 * (64 + 63 * 64 * 64) candidates.
    match geometry(64, 64, 7, 1, MAX_BATCH, 1024, Layout::Dense).unwrap_err() {
        Error::Overflow { what, expr, .. } => assert_eq!((what, &*expr), ("max_batch * candidates", "65536 * 258112")),
        other => panic!("{other}"),
    }
    // Fits as a geometry, not as a per-branch index: 1024 * 8 * (1000000 + 2).
    match geometry(8, 2, 8, 1, 1024, 1_000_000, Layout::Dense).unwrap().per_branch_kv_indices().unwrap_err() {
        Error::Overflow { what, expr, .. } => {
            assert_eq!(what, "per-branch kv_indices");
            assert_eq!(expr, "max_batch 1024 * topk 8 * (max_context_len 1000000 + steps 2)");
        }
        other => panic!("{other}"),
    }
    let g = geometry(2, 2, 7, 64, 4, 100, Layout::Dense).unwrap();
    match g.alloc_target(u32::MAX - 3, 0).unwrap_err() {
        Error::Overflow { what, expr, ty, .. } => {
            assert_eq!((what, &*expr, ty), ("allocation target", "4294967292 + 14", "uint32"));
        }
        other => panic!("{other}"),
    }
    assert_eq!(g.draft_region(101).unwrap_err().to_string(), "committed length = 101 is outside 0..=100");
    assert_eq!(g.draft_region(100).unwrap().pos(2, 0).unwrap_err().to_string(), "branch = 2 is outside 0..=1");
    assert_eq!(g.draft_region(100).unwrap().pos(0, 2).unwrap_err().to_string(), "step = 2 is outside 0..=1");
}

#[test]
fn depth_is_clamped_at_the_wall() {
    let shape = TreeShape::new(4, 5, 40).unwrap();
    assert_eq!(shape.clamp_depth(0), None);
    assert_eq!(shape.clamp_depth(1), Some(TreeShape::new(4, 1, 5).unwrap())); // the root and its 4 children
    assert_eq!(shape.clamp_depth(2), Some(TreeShape::new(4, 2, 21).unwrap())); // 1 + 4 + 16
    assert_eq!(shape.clamp_depth(4), Some(TreeShape::new(4, 4, 40).unwrap()));
    assert_eq!(shape.clamp_depth(9), Some(shape));
}

#[test]
fn buffers_add_up() {
    let g = geometry(8, 5, 64, 64, 64, 131_072, Layout::Dense).unwrap();
    let few = geometry(2, 5, 3, 4, 1, 64, Layout::Dense).unwrap();
    assert_eq!((g.max_accepted(), few.max_accepted()), (6, 3), "no path is longer than the tree");
    let all = g.buffers();
    for b in &all {
        let size = if b.dtype.ends_with("64") { 8 } else { 4 };
        assert_eq!(b.bytes, b.elements * size, "{b:?}");
        // The formula states the factors: multiply them again from its text.
        let (product, plus) = b.formula.split_once(" + ").filter(|(_, n)| n.parse::<u64>().is_ok()).unzip();
        let product = product.unwrap_or(&b.formula);
        let of_text =
            product.split(" * ").map(|f| f.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).product::<u64>()
                + plus.map_or(0, |n| n.parse().unwrap());
        assert_eq!(of_text, b.elements, "{b:?}");
    }
    let mut names: Vec<_> = all.iter().map(|b| (b.phase, b.name)).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all.len());
    assert!(!all.iter().any(|b| b.phase == "tail copy"));
    let holey = geometry(8, 5, 64, 64, 64, 131_072, Layout::Holey).unwrap().buffers();
    let sources = holey.iter().find(|b| b.phase == "tail copy").unwrap();
    assert_eq!(sources.elements, 64 * 7 * 63);
    let p1 = geometry(8, 5, 64, 1, 64, 131_072, Layout::Dense).unwrap().buffers();
    assert_eq!(p1.iter().find(|b| b.name == "remap order").unwrap().elements, 64 * 6);
}

/// A root with children 1, 2, 5; 1 has 3 and 4; 4 has 6.
#[test]
fn a_general_tree() {
    let t = Tree::from_parents(&[-1, 0, 0, 1, 1, 0, 4]).unwrap();
    assert_eq!(t.depths(), [0, 1, 1, 2, 2, 1, 3]);
    assert_eq!(t.next_child(), [1, 3, -1, -1, 6, -1, -1]);
    assert_eq!(t.next_sibling(), [-1, 2, 5, 4, -1, -1, -1]);
    let m = t.ancestor_bits();
    assert_eq!((m.words, &*m.bits), (1, &[0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100001, 0b1010011][..]));
    assert_eq!(t.depths().iter().max(), Some(&3));
}

#[test]
fn trees_that_are_none() {
    for (parents, want) in [
        (&[][..], "tree nodes = 0 is outside 1..=1024"),
        (&[0], "tree parent = parents[0] = 0: the root's parent is -1"),
        (&[-1, -1], "tree parent = parents[1] = -1: must be in 0..1"),
        (&[-1, 0, 2], "tree parent = parents[2] = 2: must be in 0..2"),
        (&[-1, 0, 5], "tree parent = parents[2] = 5: must be in 0..2"),
    ] {
        assert_eq!(Tree::from_parents(parents).unwrap_err().to_string(), want);
    }
    let chain: Vec<i32> = (0..1025).map(|i| i - 1).collect();
    assert!(Tree::from_parents(&chain[..1024]).is_ok());
    assert!(Tree::from_parents(&chain).is_err());
}

fn parents() -> impl Strategy<Value = Vec<i32>> {
    prop::collection::vec(any::<u32>(), 0..200).prop_map(|random| {
        let mut parents = vec![-1];
        parents.extend(random.iter().enumerate().map(|(i, r)| (r % (i as u32 + 1)) as i32));
        parents
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Links, depths and bits against walks up the parent array.
    #[test]
    fn trees_equal_a_walk_up_the_parents(parents in parents()) {
        let t = Tree::from_parents(&parents).unwrap();
        let bits = t.ancestor_bits();
        for i in 0..parents.len() {
            let mut path = vec![i];
            while parents[*path.last().unwrap()] >= 0 {
                path.push(parents[*path.last().unwrap()] as usize);
            }
            prop_assert_eq!(t.depths()[i] as usize, path.len() - 1);
            for j in 0..parents.len() {
                prop_assert_eq!(bits.get(i as u32, j as u32), path.contains(&j));
            }
            let children: Vec<i32> = (0..parents.len()).filter(|&j| parents[j] == i as i32).map(|j| j as i32).collect();
            let mut linked = vec![];
            let mut at = t.next_child()[i];
            while at >= 0 {
                linked.push(at);
                at = t.next_sibling()[at as usize];
            }
            prop_assert_eq!(linked, children);
        }
    }

    /// Any geometry that is constructed: every position of a round, from any committed length, is inside the row,
    /// behind the prefix, and nobody else's; and a lagging length still fits.
    #[test]
    fn regions_stay_in_their_row(
        k in 1u32..=16, s in 1u32..=16, v in 1u32..=200, shift in 0u32..=10, context in 1u32..=5000,
        at in any::<u32>(), holey in any::<bool>(),
    ) {
        let v = v.min(1 + k + (s - 1) * k * k);
        let layout = if holey { Layout::Holey } else { Layout::Dense };
        let g = geometry(k, s, v, 1 << shift, 2, context, layout).unwrap();
        let page = PageSize::new(1 << shift).unwrap();
        let len = at % context;
        let target = g.alloc_target(len, 0).unwrap();
        prop_assert!(target <= g.row_width() && (target | g.row_width()) & (page.get() - 1) == 0);
        let region = g.draft_region(len).unwrap();
        let mut owner = vec![None; target as usize];
        for b in 0..k {
            for t in 0..s {
                let pos = region.pos(b, t).unwrap();
                prop_assert!(pos >= len && pos < target);
                prop_assert_eq!(owner[pos as usize].replace((b, t)), None);
            }
            if let Some(hole) = region.hole(b).unwrap() {
                prop_assert_eq!((hole.src, hole.len), (region.base(), region.remainder()));
                for o in 0..hole.len {
                    prop_assert_eq!(owner[(hole.dst + o) as usize].replace((b, s)), None);
                }
                prop_assert_eq!(hole.dst + hole.len, region.pos(b, 0).unwrap());
            }
        }
        prop_assert!(len + v <= target);
        let later = (len + g.max_accepted()).min(context);
        prop_assert!(g.draft_region(later).unwrap().end().unwrap() <= target);
    }
}
