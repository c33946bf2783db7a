//! 26738: sizes from host values of lengths that live on the device alone.

use specrs::Error;
use specrs::geometry::Layout;
use specrs::plan::{
    AnyFormat, Batch, DraftMask, FlashAttention, FlashInfer, Format, Lens, Load, MaskForm, Phase, Triton,
};
use specrs::plan::{Planner, phases};
use specrs::revert::{Fault, Reverts};

use crate::Config;
use crate::common::plan::Batch as Case;

const REVERTED: Reverts = Reverts::NONE.and(Fault::HostLengths);
const CASE: Config = Config { k: 2, s: 2, v: 4, p: 2, batch: 3, context: 16, layout: Layout::Dense };

/// The smallest by requests and bound: a batch of none.
#[test]
fn the_smallest_configuration() {
    let c = Config { k: 1, s: 1, v: 1, p: 1, batch: 1, context: 1, layout: Layout::Dense };
    let sizes =
        |reverts, batch, at_most| Load::of_lens(&c.geometry(reverts), Phase::Verify, &Lens::Device { batch, at_most });
    let small = (0..2).flat_map(|batch| (0..2).map(move |at_most| (batch, at_most)));
    assert_eq!(small.clone().find(|&(b, l)| sizes(REVERTED, b, l).is_err()), Some((0, 0)));
    assert!(small.clone().all(|(b, l)| sizes(Reverts::NONE, b, l).is_ok()));
}

#[test]
fn the_guard_fires_in_every_phase() {
    let g = CASE.geometry(REVERTED);
    for phase in phases(&g) {
        let got = Load::of_lens(&g, phase, &Lens::Device { batch: 3, at_most: 9 });
        let want = Error::Invalid {
            what: "lens",
            got: "device lengths of 3 requests (<= 9)".into(),
            why: "sizing on the host reads lengths; plan on the device, or copy the lengths to the host".into(),
        };
        assert_eq!(got, Err(want));
        // Lengths that the host has are its to read.
        assert_eq!(
            Load::of_lens(&g, phase, &Lens::Host(&[9, 0, 3])),
            Load::of_lens(&CASE.geometry(Reverts::NONE), phase, &Lens::Host(&[9, 0, 3]))
        );
    }
}

/// Without the switch the bound sizes every array, and every batch within the bound fits what it gives.
#[test]
fn the_same_configuration_without_the_switch() {
    let g = CASE.geometry(Reverts::NONE);
    let formats = [
        AnyFormat::FlashInfer(FlashInfer { mask: MaskForm::Both }),
        AnyFormat::FlashAttention(FlashAttention),
        AnyFormat::Triton(Triton),
    ];
    for format in formats {
        for step in 0..2 {
            let phase = Phase::Draft { step };
            let bound = Load::of_lens(&g, phase, &Lens::Device { batch: 3, at_most: 9 }).unwrap();
            for lens in [[9, 9, 9], [0, 9, 4], [0, 0, 0]] {
                let case = Case::new(&g, &lens, 5);
                let mut planner = Planner::new(g, format).unwrap();
                let batch = Batch::new(&case.seqs, Lens::Host(&lens));
                let plan =
                    case.pool.with_tables(|t| planner.draft(&t, &batch, step, DraftMask::Lane)).unwrap().unwrap();
                for (at, extent) in format.extents(&g, &bound).unwrap() {
                    let spec = &format.arrays()[at];
                    let used = plan.arrays().get(spec.name).unwrap();
                    assert!(used.extent.elements() <= extent.elements(), "{format:?} {} {lens:?}", spec.name);
                }
            }
        }
    }
}
