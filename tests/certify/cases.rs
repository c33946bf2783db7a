//! `certify` over many configurations, a production one among them whose figures are worked by hand.

use specrs::geometry::{Layout, Limits, TreeShape};
use specrs::plan::certify;

fn limits(max_batch: u32, max_context_len: u32, page_size: u32) -> Limits {
    Limits { max_batch, max_context_len, page_size }
}

/// Every residue of every page size up to 64, small trees of every form.
#[test]
fn every_residue_of_small_configurations() {
    for p in [1, 2, 4, 8, 16, 32, 64] {
        for k in 1..=4 {
            for s in 1..=4 {
                for v in [1, 2, 1 + k + (s - 1) * k * k] {
                    let shape = TreeShape::new(k, s, v.min(1 + k + (s - 1) * k * k)).unwrap();
                    let c = certify(limits(3, 200, p), shape, &[]).unwrap();
                    assert!(c.holds(), "K={k} S={s} V={v} P={p}: {}", c.failures[0]);
                    assert_eq!(c.residues, p);
                    assert_eq!(c.layouts.len(), if k > 1 && p > 1 { 2 } else { 1 });
                    // Three lengths a residue at least two of which differ, K*S draft slots and V nodes each.
                    assert!(c.placements >= (p * (k * s + v)) as u64, "{}", c.placements);
                }
            }
        }
    }
}

/// topk 8, steps 5, draft tokens 64, page 64, batch 64, context 131072.
#[test]
fn a_context_of_131072() {
    let c = certify(limits(64, 131_072, 64), TreeShape::new(8, 5, 64).unwrap(), &[]).unwrap();
    assert!(c.holds(), "{:?}", c.failures);
    let holey = c.layouts.iter().find(|l| l.layout == Layout::Holey).unwrap();
    // ceil((63 + 5) / 64) = 2 pages a branch: 2 * 64 * 8 = 1024; twice that in reserve; the row is
    // 131072 + 2048 + 63, rounded up to pages: 133184.
    assert_eq!((holey.alloc_len_per_decode, holey.reserve_per_decode, holey.row_width), (1024, 2048, 133_184));
    let dense = c.layouts.iter().find(|l| l.layout == Layout::Dense).unwrap();
    // max(8 * 5, 64) = 64; 128; 131072 + max(68, 128 + 63) = 131263, rounded up: 131264.
    assert_eq!((dense.alloc_len_per_decode, dense.reserve_per_decode, dense.row_width), (64, 128, 131_264));
    let bytes = |phase: &str, name: &str| {
        c.buffers.iter().find(|b| b.phase == phase && b.name == name).map(|b| (b.elements, b.bytes)).unwrap()
    };
    assert_eq!(bytes("pool", "page_table"), (64 * 2051, 64 * 2051 * 4));
    assert_eq!(bytes("draft", "positions"), (512, 2048));
    assert_eq!(bytes("draft", "mask"), (512, 4096)); // 40 bits: one word
    assert_eq!(bytes("verify", "mask"), (4096, 32_768));
    assert_eq!(bytes("commit", "move sources"), (64 * 5, 1280));
    // 1.3 GB, plus the steps behind the context: 5 * 64 * 8 * (131072 + 5) * 4.
    assert_eq!(c.per_branch.bytes, 1_342_228_480);
    assert!(c.per_branch_fits);
    assert!(c.native_bytes() < 1_000_000, "{}", c.native_bytes());
    assert_eq!(c.native_bytes(), c.buffers.iter().map(|b| b.bytes).sum::<u64>());
}

/// P = 1024, and trees at their largest.
#[test]
fn the_largest_pages_and_trees() {
    let c = certify(limits(2, 4096, 1024), TreeShape::new(8, 8, 64).unwrap(), &[]).unwrap();
    assert!(c.holds(), "{:?}", c.failures);
    assert_eq!(c.residues, 1024);
    let c = certify(limits(2, 20_000, 16), TreeShape::new(64, 64, 1024).unwrap(), &[]).unwrap();
    assert!(c.holds(), "{:?}", c.failures);
}

/// A context that is shorter than a page or than the tree.
#[test]
fn contexts_of_a_few_tokens() {
    for context in 1..=9 {
        for p in [1, 4, 16] {
            let c = certify(limits(1, context, p), TreeShape::new(3, 4, 12).unwrap(), &[]).unwrap();
            assert!(c.holds(), "context {context} P={p}: {:?}", c.failures);
        }
    }
}

#[test]
fn a_configuration_that_does_not_fit_is_an_error() {
    let err = certify(limits(65_536, 1 << 24, 1), TreeShape::new(8, 5, 64).unwrap(), &[]).unwrap_err();
    assert!(err.to_string().contains("does not fit int32"), "{err}");
    // Constructible, but too large for the per-branch formats: 65536 * 8 * 4096 overflows int32.
    let c = certify(limits(65_536, 4096, 64), TreeShape::new(8, 2, 8).unwrap(), &[]).unwrap();
    assert!(c.holds() && !c.per_branch_fits);
}
