//! Load of a step by its lengths alone: checked as a batch is, and never more than the batch takes.

use crate::common::plan::geometry;
use specrs::geometry::Layout;
use specrs::plan::{AnyFormat, Extent, Format, Lens, Load, Phase};

/// A step that the tree does not have, and a batch beyond the limits, whoever knows the lengths.
#[test]
fn a_batch_that_cannot_be() {
    let g = geometry(2, 3, 5, 4, 2, 64, Layout::Dense);
    for lens in [Lens::Host(&[1, 2, 3]), Lens::Device { batch: 3, at_most: 9 }] {
        let err = Load::of_lens(&g, Phase::Verify, &lens).unwrap_err().to_string();
        assert_eq!(err, "requests = 3 is outside 0..=2");
    }
    for lens in [Lens::Host(&[1]), Lens::Device { batch: 1, at_most: 9 }] {
        let err = Load::of_lens(&g, Phase::Draft { step: 3 }, &lens).unwrap_err().to_string();
        assert_eq!(err, "step = 3 is outside 0..=2");
        assert!(Load::of_lens(&g, Phase::Draft { step: 2 }, &lens).is_ok());
    }
    let bound = Lens::Device { batch: 1, at_most: 65 };
    assert!(Load::of_lens(&g, Phase::Decode, &bound).unwrap_err().to_string().starts_with("length bound = 65"));
    let err = Load::of_lens(&g, Phase::Decode, &Lens::Host(&[65])).unwrap_err().to_string();
    assert_eq!(err, "committed length = 65 is outside 0..=64");
}

/// C = 64: behind 60, 64 and 10 tokens an extend has at most 4, 0 and 54 queries; triton lists the prefixes of those that
/// have any, and where every query writes.
#[test]
fn an_extend_ends_at_the_context() {
    let g = geometry(2, 3, 5, 4, 3, 64, Layout::Dense);
    let load = Load::of_lens(&g, Phase::Extend, &Lens::Host(&[60, 64, 10])).unwrap();
    assert_eq!((load.requests, load.queries, load.prefix, load.keys), (3, 58, 70, 128));
    let triton = AnyFormat::named("triton", "both").unwrap();
    let sizes = triton.extents(&g, &load).unwrap();
    assert_eq!(sizes, [(0, Extent::Line(4)), (1, Extent::Line(70)), (2, Extent::Line(4)), (3, Extent::Line(58))]);
}
