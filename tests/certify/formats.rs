//! `certify` per format: what holds, what is refused, what the arrays cost, and what fails where a fault is put back.

use specrs::geometry::{Geometry, Layout, Limits, TreeShape};
use specrs::plan::{
    AnyFormat, Certificate, Extent, Format, FormatCertificate, FormatLayout, Lens, Load, Phase, certify, certify_with,
    phases,
};
use specrs::revert::{Fault, Reverts};

const ALL: [AnyFormat; 4] = AnyFormat::ALL;

fn limits(max_batch: u32, max_context_len: u32, page_size: u32) -> Limits {
    Limits { max_batch, max_context_len, page_size }
}

fn shape(k: u32, s: u32, v: u32) -> TreeShape {
    TreeShape::new(k, s, v).unwrap()
}

fn of<'a>(c: &'a Certificate, name: &str) -> &'a FormatCertificate {
    c.formats.iter().find(|f| f.format == name).unwrap()
}

fn layout(f: &FormatCertificate, layout: Layout) -> &FormatLayout {
    f.layouts.iter().find(|l| l.layout == layout).unwrap()
}

/// Every format, layout and phase of small configurations, context walls of every kind among them.
#[test]
fn small_configurations_hold() {
    for p in [1, 4, 16] {
        for (k, s, v) in [(1, 1, 1), (1, 3, 4), (2, 2, 5), (3, 4, 16), (4, 1, 5), (8, 2, 70)] {
            for context in [1, 2, 5, 90] {
                let c = certify(limits(3, context, p), shape(k, s, v), &ALL).unwrap();
                for f in &c.formats {
                    for l in &f.layouts {
                        let at = format!("{} {:?} K={k} S={s} V={v} P={p} context {context}", f.format, l.layout);
                        assert!(l.failed == 0, "{at}: {}", l.failures[0]);
                        let native = f.format == "native";
                        assert_eq!(l.refused.is_some(), native && l.layout == Layout::Holey, "{at}");
                        assert_eq!(l.plans > 0, l.refused.is_none(), "{at}");
                        assert!(native || (l.reads > 0 && l.sizes > 0), "{at}");
                        assert_eq!(l.written_context, if l.refused.is_some() { 0 } else { context }, "{at}");
                    }
                }
                assert!(c.holds());
            }
        }
    }
}

/// The number of elements read back, counted by hand: one branch, one step, one node, pages of one token and a context
/// of 5. Rounds of two rows behind 0 and 1, 4 and 0, 4 and 4 tokens; in each verify, extend, decode and the draft step
/// with either mask, of one query a row and L + 1 keys: 5 * (1 + 2 + 5 + 1 + 5 + 5). The round of 4 and 0 is padded,
/// too: twice a plan, and the first row alone is read again, 5 * 5.
#[test]
fn every_plan_is_read_back() {
    let c = certify(limits(2, 5, 1), shape(1, 1, 1), &ALL[1..]).unwrap();
    for f in &c.formats {
        let l = layout(f, Layout::Dense);
        assert_eq!((l.plans, l.reads), (3 * 5 + 2 * 5, 5 * 19 + 25), "{}", f.format);
    }
}

/// A full batch that is one request's numbers times its size is the batch counted request by request.
#[test]
fn batches_of_equal_requests_are_multiples() {
    let g = Geometry::new(limits(7, 100, 4), shape(3, 4, 16), Layout::Holey).unwrap();
    for phase in phases(&g) {
        for len in [0, 1, 50, 97, 99] {
            let of = |n: usize| Load::of_lens(&g, phase, &Lens::Host(&vec![len; n])).unwrap();
            assert_eq!(of(1).times(7), of(7), "{phase:?} behind {len}");
        }
    }
}

/// A production configuration: topk 8, steps 5, draft tokens 64, page 64, batch 64, context 131072.
#[test]
fn a_context_of_131072_side_by_side() {
    let c = certify(limits(64, 131_072, 64), shape(8, 5, 64), &ALL).unwrap();
    assert!(c.holds(), "{:?}", c.formats.iter().flat_map(|f| &f.layouts).flat_map(|l| &l.failures).next());
    let native = layout(of(&c, "native"), Layout::Dense);
    let flashinfer = layout(of(&c, "flashinfer"), Layout::Dense);
    let flash = layout(of(&c, "flash_attention"), Layout::Holey);
    let triton = layout(of(&c, "triton"), Layout::Holey);
    // 5 steps of 64 * 8 * 131072 indices of 4 bytes, an indptr of 513 and 512 last page lengths each.
    assert_eq!(flashinfer.bytes("draft"), 5 * 4 * (64 * 8 * 131_072 + 513 + 512));
    // The width for comparison has S more a branch, which live ones do not need.
    assert_eq!(flashinfer.bytes("draft"), c.per_branch.bytes - 5 * 4 * (64 * 8 * 5) + 5 * 4 * 1025);
    assert_eq!(triton.bytes("draft"), 5 * (8 * 64 * 8 * 131_072 + 4 * 513));
    // A prefix table of floor((131072 - t - 1) / 64) = 2047 columns, an expand table of t + 1; lengths and starts.
    let steps = (1..=5u64).map(|t| 4 * (64 * 2047 + 64 + 65 + 512 * t + 512 + 513)).sum::<u64>();
    assert_eq!(flash.bytes("draft"), steps);
    let table = flash.arrays.iter().find(|a| a.step == Some(4) && a.name == "expand_page_table").unwrap();
    assert_eq!((&table.shape[..], table.bytes), (&[512, 5][..], 512 * 5 * 4));
    assert_eq!(table.formula, "max_batch 64 * topk 8 * step + 1 5");
    // The table of the pool is 64 * 2051 pages; what is drafted adds 8 kB a step.
    assert_eq!(native.round_bytes(), c.native_bytes() + 4 * (512 * 4 + 512 * 4 + 512 * 8));
    assert!(native.round_bytes() < 1_000_000 && flash.round_bytes() < 10_000_000);
    assert!(flashinfer.round_bytes() > 1_300_000_000 && triton.round_bytes() > 2_600_000_000);
    assert_eq!(flashinfer.written_context, 131_072);
}

/// Every array that is listed is as large as the format says for the limits, and says where its size comes from.
#[test]
fn capacities_are_those_of_the_formats() {
    for (p, s) in [(1, 3), (16, 4)] {
        for k in [1, 4] {
            let (limits, shape) = (limits(8, 1000, p), shape(k, s, k + 1));
            let c = certify(limits, shape, &ALL[1..]).unwrap();
            for (f, format) in c.formats.iter().zip(&ALL[1..]) {
                for l in &f.layouts {
                    let g = Geometry::new(limits, shape, l.layout).unwrap();
                    for a in &l.arrays {
                        let phase = match (a.phase, a.step) {
                            ("draft", Some(step)) => Phase::Draft { step },
                            ("verify", None) => Phase::Verify,
                            ("decode", None) => Phase::Decode,
                            ("extend" | "draft_extend", None) => Phase::Extend,
                            other => panic!("{other:?}"),
                        };
                        let extents = format.extents(&g, &Load::limit(&g, phase, 8).unwrap()).unwrap();
                        let (array, extent) =
                            extents.into_iter().find(|e| format.arrays()[e.0].name == a.name).unwrap();
                        let size = format.arrays()[array].dtype.size() as u64;
                        assert!(a.bytes == a.shape.iter().product::<u64>() * size && !a.formula.is_empty(), "{a:?}");
                        if a.phase == "draft_extend" {
                            assert!(a.bytes <= extent.elements() * size, "{a:?}");
                            continue;
                        }
                        assert_eq!(a.shape, extent.shape(), "{a:?}");
                        // The formula's product, and what it adds.
                        let number = |term: &str| term.rsplit(' ').next().unwrap().trim_end_matches(')').parse::<u64>();
                        let (product, plus) = a.formula.rsplit_once(" + ").unwrap_or((&a.formula, "0"));
                        if let (Ok(plus), false) =
                            (plus.parse::<u64>(), a.formula.contains('(') && a.name == "kv_indices")
                        {
                            let value = product.split(" * ").map(|t| number(t).unwrap()).product::<u64>() + plus;
                            assert_eq!(value, extent.elements(), "{a:?}");
                        }
                    }
                    // Each phase is there, each step of the draft for itself.
                    let steps = l.arrays.iter().filter_map(|a| a.step).max();
                    assert_eq!(steps, Some(s - 1));
                    for phase in ["extend", "draft_extend", "decode", "draft", "verify"] {
                        assert!(l.bytes(phase) > 0, "{phase}");
                    }
                    let sum: u64 = l.arrays.iter().map(|a| a.bytes).sum();
                    assert_eq!(sum - l.bytes("extend"), l.round_bytes());
                    if let AnyFormat::FlashAttention(_) = format {
                        assert_eq!(
                            format.extents(&g, &Load::limit(&g, Phase::Verify, 8).unwrap()).unwrap()[4].1,
                            Extent::Table { rows: 8 * (k as u64 + 1), cols: k as u64 + 1 }
                        );
                    }
                }
            }
        }
    }
}

/// 65536 requests of 8 branches overflow the slot lists' int32; page tables do not care.
#[test]
fn what_a_format_cannot_do_is_said() {
    let c = certify(limits(65_536, 4096, 64), shape(8, 2, 8), &ALL).unwrap();
    assert!(c.holds(), "a refusal is no failure");
    for name in ["flashinfer", "triton"] {
        let f = of(&c, name);
        assert!(!f.usable());
        for l in &f.layouts {
            let why = l.refused.as_ref().unwrap();
            assert!(why.contains("2148532224") || why.contains("65536"), "{why}");
            assert!(why.contains("native, would do"), "{why}");
            assert!(l.arrays.is_empty() && l.plans == 0);
        }
    }
    assert!(of(&c, "flash_attention").usable() && of(&c, "native").usable());
    let holey = layout(of(&c, "native"), Layout::Holey);
    assert!(holey.refused.as_ref().unwrap().contains("dense layout"));
}

/// A fault that is put back fails, in the formats that it concerns and in no other, with its operands.
fn failing(fault: Fault) -> Vec<(&'static str, FormatLayout)> {
    let c = certify_with(limits(4, 200, 4), shape(3, 4, 16), &ALL, Reverts::NONE.and(fault)).unwrap();
    assert_eq!(c.reverts.to_string(), fault.info().id.to_string());
    assert!(!c.holds());
    let layouts = c.formats.into_iter().flat_map(|f| f.layouts.into_iter().map(move |l| (f.format, l)));
    layouts.filter(|(_, l)| l.failed > 0).collect()
}

#[test]
fn fault_27338_is_found() {
    let failed = failing(Fault::BranchWidth);
    let names: Vec<_> = failed.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["flashinfer", "flashinfer", "triton", "triton"]);
    for (name, l) in failed {
        // One step's width without topk: 4 * (200 + 4); used behind L = 199 at step 0: 4 * 3 * 200.
        let f = l.failures.iter().find(|f| f.what.contains("a full batch") && f.committed == 199 && f.step == 0);
        let f = f.unwrap_or_else(|| panic!("{name}: {:?}", l.failures));
        assert_eq!((f.got, f.limit), (4 * 3 * 200, 4 * 204), "{f}");
        assert!(f.what.contains(name) && f.what.contains("kv_indices"));
        // In a real run the writer refuses two rows.
        assert!(l.failures.len() > 1);
    }
}

#[test]
fn fault_26972_is_found() {
    let c = certify_with(limits(4, 200, 4), shape(3, 4, 16), &[], Reverts::NONE.and(Fault::HoleyReserve)).unwrap();
    assert!(!c.holds());
    let f = c.failures.iter().find(|f| f.layout == Layout::Holey && f.what.contains("draft slot")).unwrap();
    assert!(f.got >= f.limit, "{f}");
    for (_, l) in failing(Fault::HoleyReserve) {
        assert_eq!(l.layout, Layout::Holey);
    }
}
#[test]
fn fault_27360_is_found() {
    let failed = failing(Fault::ExpandTable);
    assert_eq!(failed.len(), 1);
    let (name, l) = &failed[0];
    assert_eq!((*name, l.layout), ("flash_attention", Layout::Holey));
    // r = 1 and S = 4 are two pages, where step 0 has one column.
    let f = l.failures.iter().find(|f| f.residue == 1 && f.step == 0).unwrap();
    assert_eq!((f.got, f.limit), (2, 1), "{f}");
    assert!(f.what.contains("expand_page_table"), "{f}");
}

#[test]
fn fault_26738_is_found() {
    for (name, l) in failing(Fault::HostLengths) {
        assert!(l.failures.iter().any(|f| f.what.contains("lens")), "{name}: {:?}", l.failures);
    }
}

#[test]
fn fault_23037_is_found() {
    for (name, l) in failing(Fault::StalePadding) {
        assert!(name != "native" && l.failures.iter().all(|f| f.what.contains("padded")), "{name}: {:?}", l.failures);
    }
}
