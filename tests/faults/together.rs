//! Any of the faults together: what one of them lets through, the guard of another must not take for right.

use specrs::geometry::Layout;
use specrs::plan::{AnyFormat, AuditedPlan, Batch, Bucket, DraftMask, Format, Lens, Phase, Plan};
use specrs::revert::{FAULTS, Reverts};

use crate::common::plan::Batch as Case;
use crate::fixed::Fixed;
use crate::{Config, Error, planner};

/// Draft steps of a full batch and then of one request padded to the same size, into static buffers as in production:
/// each write is refused with operands, or every query reads what it reads without any fault. Returns the refusals.
fn refused(c: Config, lens: &[u32], format: AnyFormat, reverts: Reverts) -> usize {
    let (g, plain, mut refused) = (c.geometry(reverts), c.geometry(Reverts::NONE), 0);
    let case = Case::new(&g, lens, 5);
    let mut planner = planner(g, format);
    planner.set_debug(false);
    for step in 0..c.s {
        let mut fixed = Fixed::new(&format, &g, Phase::Draft { step }, c.batch);
        let bucket = Bucket { batch: c.batch, queries: c.batch * c.k };
        for (n, pad) in [(lens.len(), None), (1, Some(bucket))] {
            let batch = Batch { seqs: &case.seqs[..n], lens: Lens::Host(&lens[..n]), pad };
            let written = case.pool.with_tables(|t| {
                let plan = planner.draft(&t, &batch, step, DraftMask::Lane)?;
                planner.lower(&t, &plan, &mut fixed.arrays)?;
                let fresh = AuditedPlan::audit(Plan::clone(&plan), &t, &plain, &format).unwrap();
                for q in 0..plan.queries() {
                    let (mut got, mut want) = (Vec::new(), Vec::new());
                    format.reads(&plan, &g, &fixed.arrays, q, &mut got).unwrap().unwrap();
                    format.reads(&plan, &plain, fresh.arrays(), q, &mut want).unwrap().unwrap();
                    assert_eq!(got, want, "{reverts}: {} step {step}, query {q}", format.name());
                }
                Ok(())
            });
            match written.unwrap() {
                Ok(()) => {}
                Err(e) => {
                    let known = matches!(e, Error::Capacity { .. } | Error::OutOfBounds { .. })
                        || matches!(e, Error::Invalid { what: "dead query", .. });
                    assert!(known, "{reverts}: {e}");
                    refused += 1;
                }
            }
        }
        fixed.finish();
    }
    refused
}

#[test]
fn every_set_of_faults_is_refused_or_right() {
    let cases = [
        Config { k: 2, s: 3, v: 4, p: 2, batch: 3, context: 16, layout: Layout::Holey },
        Config { k: 3, s: 6, v: 16, p: 4, batch: 3, context: 64, layout: Layout::Holey },
        Config { k: 4, s: 2, v: 5, p: 16, batch: 3, context: 64, layout: Layout::Dense },
    ];
    for set in 0u32..1 << FAULTS.len() {
        let chosen = FAULTS.iter().enumerate().filter(|(i, _)| set >> i & 1 == 1);
        let reverts = chosen.fold(Reverts::NONE, |all, (_, f)| all.and(f.fault));
        let mut all = 0;
        for c in cases {
            for format in AnyFormat::ALL.into_iter().filter(|f| !f.arrays().is_empty()) {
                all += refused(c, &[c.context - 1, 7, 5], format, reverts);
            }
        }
        // Rows of these contexts are wide enough for 26972, and 26738 has no place in a draft on the host.
        assert_eq!(all > 0, set & 0b111 != 0, "{reverts}: {all} refused");
    }
}
