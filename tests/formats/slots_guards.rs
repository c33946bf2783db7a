//! Errors of the slot-list formats, and the checks that see a wrong element: the closed forms of their sizes, the
//! context wall, and the debug audit, which reads arrays back as a kernel would.

use crate::common::plan::{Batch as Case, geometry};
use specrs::Error;
use specrs::geometry::{Geometry, Layout};
use specrs::plan::{
    Arrays, Batch, Bucket, Count, DType, DraftMask, Extent, FlashInfer, Format, Lens, Load, Lower, MaskForm, Need,
    Phase, Plan, Planner, Spec, Trees, Triton,
};
use specrs::pool::Tables;

/// Draft step t: entry z = i*K + b of `kv_indptr` is `K * sum_{j<i} (L_j + t + 1) + b * (L_i + t + 1)`, and what is used
/// `K * sum(L) + B*K*(t + 1)`; verify with full trees: `qo_indptr[i] = i*V`, `kv_indptr` over L_i + V.
#[test]
fn closed_forms() {
    // 96 draft slots are more than one word of a mask.
    let (small, large) = ((3u32, 4u32), (8, 12));
    for (layout, p, (k, s)) in [
        (Layout::Dense, 1, small),
        (Layout::Dense, 4, large),
        (Layout::Holey, 4, small),
        (Layout::Holey, 4, large),
        (Layout::Holey, 16, small),
    ] {
        let v = 10u32;
        let g = geometry(k, s, v, p, 3, 64, layout);
        let c = Case::new(&g, &[7, 12, 0], 5);
        let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
        let mut flashinfer = Planner::new(g, FlashInfer::default()).unwrap();
        let mut triton = Planner::new(g, Triton).unwrap();
        let (b, sum) = (3, 7 + 12);
        for t in 0..s {
            let plan = c.pool.with_tables(|x| flashinfer.draft(&x, &batch, t, DraftMask::Lane)).unwrap().unwrap();
            let other = c.pool.with_tables(|x| triton.draft(&x, &batch, t, DraftMask::Lane)).unwrap().unwrap();
            let (a, o) = (plan.arrays(), other.arrays());
            let mut want = vec![];
            for i in 0..b {
                let before: u32 = c.lens[..i].iter().map(|l| l + t + 1).sum();
                want.extend((0..k).map(|b| (k * before + b * (c.lens[i] + t + 1)) as i32));
            }
            let used = k * sum + b as u32 * k * (t + 1);
            want.push(used as i32);
            assert_eq!(a.line::<i32>("kv_indptr"), want);
            assert_eq!(o.line::<i32>("kv_indptr"), want);
            assert_eq!(a.line::<i32>("kv_indices").len() as u32, used);
            assert!(used <= g.per_branch_kv_indices().unwrap());
            let mut slots = vec![];
            for (i, &len) in c.lens.iter().enumerate() {
                let region = g.draft_region(len).unwrap();
                for b in 0..k {
                    let own = (0..=t).map(|u| region.pos(b, u).unwrap());
                    slots.extend((0..len).chain(own).map(|pos| c.slot(i, pos)));
                }
            }
            assert_eq!(a.line::<i32>("kv_indices"), slots);
            let narrow: Vec<i64> = a.line::<i32>("kv_indices").iter().map(|&s| s.into()).collect();
            assert_eq!(o.line::<i64>("kv_indices"), narrow);
        }
        let parents: Vec<i32> = (0..b).flat_map(|_| (0..v as i32).map(|j| j - 1)).map(|p| p.min(2)).collect();
        let trees = Trees { sizes: &[v; 3], parents: &parents };
        let plan = c.pool.with_tables(|x| flashinfer.verify(&x, &batch, trees)).unwrap().unwrap();
        let v = v as i32;
        assert_eq!(plan.arrays().line::<i32>("qo_indptr"), [0, v, 2 * v, 3 * v]);
        assert_eq!(plan.arrays().line::<i32>("kv_indptr"), [0, 7 + v, 19 + 2 * v, 19 + 3 * v]);
        assert_eq!(plan.arrays().line::<i32>("mask_indptr")[3], v * (19 + 3 * v));
    }
}

/// C = 32: a request of 31 tokens drafts step 0 and no more; its lists are empty then, and the others' are not moved.
#[test]
fn a_request_at_the_context_wall_has_empty_lists() {
    for layout in [Layout::Dense, Layout::Holey] {
        let g = geometry(2, 3, 4, 4, 3, 32, layout);
        let c = Case::new(&g, &[31, 2, 30], 5);
        let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
        let mut planner = Planner::new(g, FlashInfer::default()).unwrap();
        planner.set_debug(true);
        for (t, want) in
            [[0, 32, 64, 67, 70, 101, 132], [0, 0, 0, 4, 8, 40, 72], [0, 0, 0, 5, 10, 10, 10]].iter().enumerate()
        {
            let plan = c.pool.with_tables(|x| planner.draft(&x, &batch, t as u32, DraftMask::Lane)).unwrap().unwrap();
            assert_eq!(plan.arrays().line::<i32>("kv_indptr"), want, "{layout:?} step {t}");
            let region = g.draft_region(2).unwrap();
            let list = &plan.arrays().line::<i32>("kv_indices")[want[3] as usize..want[4] as usize];
            let own = (0..=t as u32).map(|u| region.pos(1, u).unwrap());
            assert_eq!(list, (0..2).chain(own).map(|pos| c.slot(1, pos)).collect::<Vec<_>>());
        }
        // The tree is clamped: only the root fits behind 31 tokens.
        let trees = Trees { sizes: &[1, 4, 3], parents: &[-1, -1, 0, 0, 1, -1, 0, 0] };
        let plan = c.pool.with_tables(|x| planner.verify(&x, &batch, trees)).unwrap().unwrap();
        assert_eq!(plan.arrays().line::<i32>("kv_indptr"), [0, 32, 38, 71]);
    }
}

/// A format that writes what the inner one does and then changes one element of one array.
#[derive(Debug, Clone)]
struct Broken<F> {
    inner: F,
    name: &'static str,
    at: usize,
    add: i64,
}

impl<F: Format + Clone> Format for Broken<F> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn arrays(&self) -> &'static [Spec] {
        self.inner.arrays()
    }

    fn supports(&self, geometry: &Geometry) -> specrs::Result<()> {
        self.inner.supports(geometry)
    }

    fn extents(&self, geometry: &Geometry, load: &Load) -> specrs::Result<Vec<(usize, Extent)>> {
        self.inner.extents(geometry, load)
    }

    fn reads(
        &self,
        plan: &Plan,
        geometry: &Geometry,
        arrays: &Arrays,
        q: usize,
        out: &mut Vec<i32>,
    ) -> specrs::Result<Option<()>> {
        self.inner.reads(plan, geometry, arrays, q, out)
    }
}

impl<F: Lower + Clone> Lower for Broken<F> {
    fn lower(&self, plan: &Plan, tables: &Tables<'_>, geometry: &Geometry, arrays: &mut Arrays) -> specrs::Result<()> {
        self.inner.lower(plan, tables, geometry, arrays)?;
        // Opened again without poison, the arrays hold what was written.
        arrays.set_poison(false);
        let mut needs = [const { None }; 8];
        for (array, used) in self.inner.extents(geometry, &Load::of(plan))? {
            needs[array] = Some(Need { array, used, limit: used });
        }
        for (i, view) in arrays.open(needs, || "a test".into())?.into_iter().enumerate() {
            let Some(spec) = self.arrays().get(i).filter(|spec| spec.name == self.name) else { continue };
            match spec.dtype {
                DType::I32 => view.slice::<i32>()?[self.at] += self.add as i32,
                DType::I64 => view.slice::<i64>()?[self.at] += self.add,
                _ => view.slice::<u8>()?[self.at] ^= self.add as u8,
            }
        }
        Ok(())
    }
}

/// Change element `at` of every array of every phase in turn: the debug audit refuses each.
fn every_element_is_seen<F: Lower + Clone>(inner: F) {
    let g = geometry(2, 3, 4, 4, 7, 32, Layout::Dense);
    let c = Case::new(&g, &[5, 2], 9);
    let bucket = Bucket { batch: 3, queries: 7 };
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens)).padded(bucket);
    let trees = Trees { sizes: &[4, 2], parents: &[-1, 0, 0, 1, -1, 0] };
    let run = |format: Broken<F>, phase: Phase| {
        let mut planner = Planner::new(g, format).unwrap();
        planner.set_debug(true);
        let plan = c.pool.with_tables(|t| match phase {
            Phase::Extend => planner.extend(&t, &batch, &[3, 1]),
            Phase::Decode => planner.decode(&t, &batch),
            Phase::Draft { step } => planner.draft(&t, &batch, step, DraftMask::Lane),
            Phase::Verify => planner.verify(&t, &batch, trees),
        });
        plan.unwrap().map(|plan| {
            let sizes = plan.arrays().iter().map(|a| (a.spec.name, a.extent.elements() as usize));
            sizes.collect::<Vec<_>>()
        })
    };
    let mut tried = 0;
    for phase in [Phase::Extend, Phase::Decode, Phase::Draft { step: 1 }, Phase::Verify] {
        let whole = Broken { inner: inner.clone(), name: "none", at: 0, add: 0 };
        for (name, n) in run(whole, phase).unwrap() {
            for at in 0..n {
                // No kernel reads the slots of dead queries, nor the bits behind the last row of a packed mask.
                if name == "extend_slots" && at >= if phase == Phase::Extend { 4 } else { 6 } {
                    continue;
                }
                // A byte of a mask may become the other value, or one that it must not have.
                for add in if name == "custom_mask" { 1..=2 } else { 1..=1 } {
                    let broken = Broken { inner: inner.clone(), name, at, add };
                    let result = run(broken, phase);
                    assert!(result.is_err(), "{name}[{at}] of {} unseen", phase.name());
                    tried += 1;
                }
            }
        }
    }
    assert!(tried > 100, "{tried}");
}

#[test]
fn the_audit_sees_every_element_of_flashinfer() {
    every_element_is_seen(FlashInfer::default());
    every_element_is_seen(FlashInfer { mask: MaskForm::Packed });
}

#[test]
fn the_audit_sees_every_element_of_triton() {
    every_element_is_seen(Triton);
}

/// A configuration whose arrays int32 does not index is refused at construction, with the numbers and what would do.
#[test]
fn configurations_beyond_int32_are_refused() {
    // 1024 * 8 * 1000000 slots a step.
    let g = geometry(8, 2, 8, 1, 1024, 1_000_000, Layout::Dense);
    for (name, err) in [
        ("flashinfer", Planner::new(g, FlashInfer::default()).unwrap_err()),
        ("triton", Planner::new(g, Triton).unwrap_err()),
    ] {
        let Error::Invalid { what, got, why } = &err else { panic!("{err}") };
        assert_eq!(*what, "format");
        assert!(got.starts_with(name), "{got}");
        assert!(got.contains("max_batch 1024 * topk 8 * max_context_len 1000000"), "{got}");
        assert!(why.contains("2147483647") && why.contains("native"), "{why}");
    }
    // The format's sizes are refused as well, whoever asks for them.
    let load = Load::limit(&g, Phase::Draft { step: 0 }, 1024).unwrap();
    for result in [FlashInfer::default().extents(&g, &load), Triton.extents(&g, &load)] {
        let err = result.unwrap_err();
        assert!(matches!(err, Error::Overflow { what: "kv_indices", ty: "int32", .. }), "{err}");
    }
    // Lists fit, the mask in bytes does not: 256 * 64 * (199999 + 64); in bits, or by int64, it does.
    let g = geometry(2, 20, 64, 16, 256, 200_000, Layout::Dense);
    let err = Planner::new(g, FlashInfer::default()).unwrap_err().to_string();
    assert!(err.contains("max_batch 256 * draft_tokens 64") && err.contains("packed"), "{err}");
    Planner::new(g, FlashInfer { mask: MaskForm::Bool }).unwrap_err();
    Planner::new(g, FlashInfer { mask: MaskForm::Packed }).unwrap();
    Planner::new(g, Triton).unwrap();
}

/// Widths by hand: B = 2, K = 3, S = 4, V = 10, C = 100.
#[test]
fn widths_by_hand() {
    let g = geometry(3, 4, 10, 4, 5, 100, Layout::Holey);
    assert_eq!(g.per_branch_kv_indices().unwrap(), 5 * 3 * 104);
    let (draft, verify) = (Phase::Draft { step: 3 }, Phase::Verify);
    let most = |phase, count| Load::limit(&g, phase, 2).unwrap().get(count);
    assert_eq!(most(Phase::Decode, Count::Keys), 200);
    assert_eq!(most(Phase::Extend, Count::Keys), 200);
    assert_eq!(most(Phase::Extend, Count::Prefix), 198);
    assert_eq!(most(verify, Count::Keys), 2 * 109);
    assert_eq!(most(verify, Count::Mask), 2 * 10 * 109);
    assert_eq!(most(verify, Count::MaskBytes), 2 * 137); // 1090 bits are 136.25 bytes
    let find = |phase, name| {
        let all = FlashInfer::default().capacities(&g, phase, 2).unwrap();
        let found = all.into_iter().find(|c| FlashInfer::default().arrays()[c.array].name == name).unwrap();
        let spec = FlashInfer::default().arrays()[found.array];
        (found.extent.elements(), found.extent.elements() * spec.dtype.size() as u64, spec.dtype.name(), found.formula)
    };
    let (elements, bytes, dtype, formula) = find(draft, "kv_indices");
    assert_eq!((elements, bytes, dtype), (2 * 3 * 100, 2400, "int32"));
    assert_eq!(formula.to_string(), "max_batch 2 * topk 3 * max_context_len 100");
    let (elements, bytes, dtype, formula) = find(verify, "custom_mask");
    assert_eq!((elements, bytes, dtype), (2180, 2180, "bool"));
    assert_eq!(formula.to_string(), "max_batch 2 * draft_tokens 10 * (max_context_len - 1 + draft_tokens) 109");
    assert_eq!(find(draft, "kv_indptr").3.to_string(), "max_batch 2 * topk 3 + 1");
    // 4096 * 64 * 32000 indices are more than int32 counts.
    let big = geometry(64, 1, 2, 1, 4096, 32_000, Layout::Dense);
    let Error::Overflow { what, ty, limit, .. } = Triton.capacities(&big, Phase::Draft { step: 0 }, 4096).unwrap_err()
    else {
        panic!()
    };
    assert_eq!((what, ty, limit), ("kv_indices", "int32", i32::MAX as u64));
    let err = Planner::new(big, Triton).unwrap_err().to_string();
    let want = "triton, whose per-branch kv_indices has max_batch 4096 * topk 64 * max_context_len 32000 elements";
    assert!(err.contains(want) && err.contains("int32 indexes up to 2147483647 of them"), "{err}");
}

/// At least one form of the mask must have been given.
#[test]
fn a_verification_needs_one_form_of_the_mask() {
    let g = geometry(2, 3, 4, 4, 3, 32, Layout::Dense);
    let c = Case::new(&g, &[5], 9);
    let batch = Batch::new(&c.seqs, Lens::Host(&c.lens));
    let mut planner = Planner::new(g, FlashInfer::default()).unwrap();
    planner.defer_arrays(true);
    let trees = Trees { sizes: &[2], parents: &[-1, 0] };
    let plan = c.pool.with_tables(|t| planner.verify(&t, &batch, trees)).unwrap().unwrap();
    let lower = |without: &[&str]| {
        let sizes = planner.format().extents(&g, &Load::limit(&g, Phase::Verify, 3).unwrap()).unwrap();
        let given = sizes.iter().map(|&(i, extent)| {
            let spec = planner.format().arrays()[i];
            let bytes = extent.elements() * spec.dtype.size() as u64;
            let memory = Box::new(specrs::plan::HostMemory::new(spec.name, bytes).unwrap());
            (!without.contains(&spec.name)).then_some(specrs::plan::Given { memory, extent })
        });
        let mut arrays = Arrays::fixed(planner.format().arrays(), given.collect()).unwrap();
        c.pool
            .with_tables(|t| planner.lower(&t, &plan, &mut arrays))
            .unwrap()
            .map(|()| arrays.iter().map(|a| a.spec.name).collect::<Vec<_>>())
    };
    let all = lower(&[]).unwrap();
    assert_eq!(all.len(), 8);
    assert_eq!(lower(&["custom_mask", "mask_indptr", "kv_last_page_len"]).unwrap().len(), 5);
    assert_eq!(lower(&["packed_custom_mask", "packed_mask_indptr"]).unwrap().len(), 6);
    let none = ["mask_indptr", "custom_mask", "packed_mask_indptr", "packed_custom_mask"];
    let err = lower(&none).unwrap_err().to_string();
    assert!(err.starts_with("custom_mask: got no array for the tree's mask"), "{err}");
    // Half of a form would never be written, and show what the memory held before.
    for without in [&none[..1], &none[1..2], &none[2..3], &none[3..], &["custom_mask", "packed_mask_indptr"]] {
        let there: Vec<_> = none.into_iter().filter(|name| !without.contains(name)).collect();
        let err = lower(without).unwrap_err().to_string();
        assert!(err.starts_with(&format!("custom_mask: got {}, want", there.join(", "))), "{err}");
    }
    let err = lower(&["kv_indices"]).unwrap_err();
    assert!(matches!(err, Error::Mismatch { operand: "kv_indices", .. }), "{err}");
}
