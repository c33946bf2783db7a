//! A warm planner allocates nothing, whatever the format: counted in an allocator, over whole rounds.

use crate::common::counting::allocations;
use crate::common::plan::{Batch as Case, geometry};
use specrs::geometry::{Geometry, Layout};
use specrs::plan::{
    AnyFormat, Arrays, AuditedPlan, Batch, DraftMask, FlashAttention, FlashInfer, Format, Given, HostMemory, Lens,
    Load, Native, Phase, Planner, Trees, Triton, phases,
};
use specrs::pool::Tables;

const K: u32 = 4;
const S: u32 = 3;
const SIZES: [u32; 3] = [5, 1, 3];
const PARENTS: [i32; 9] = [-1, 0, 0, 1, 3, -1, -1, 0, 1];

fn setting(format: AnyFormat, layout: Layout) -> (Geometry, Case, Planner<AnyFormat>) {
    let g = geometry(K, S, 9, 4, 3, 256, layout);
    let mut planner = Planner::new(g, format).unwrap();
    planner.set_debug(false); // a debug audit allocates
    (g, Case::new(&g, &[37, 0, 90], 5), planner)
}

fn settings() -> Vec<(AnyFormat, Layout)> {
    let flashinfer = AnyFormat::FlashInfer(FlashInfer::default());
    let flash_attention = AnyFormat::FlashAttention(FlashAttention);
    vec![
        (AnyFormat::Native(Native), Layout::Dense),
        (flashinfer, Layout::Dense),
        (flashinfer, Layout::Holey),
        (AnyFormat::Triton(Triton), Layout::Dense),
        (AnyFormat::Triton(Triton), Layout::Holey),
        (flash_attention, Layout::Dense),
        (flash_attention, Layout::Holey),
    ]
}

/// Plan one phase.
fn plan(
    planner: &mut Planner<AnyFormat>,
    tables: &Tables<'_>,
    batch: &Batch<'_>,
    phase: Phase,
) -> AuditedPlan<AnyFormat> {
    match phase {
        Phase::Extend => planner.extend(tables, batch, &[3, 2, 1]),
        Phase::Decode => planner.decode(tables, batch),
        Phase::Draft { step } => planner.draft(tables, batch, step, DraftMask::Lane),
        Phase::Verify => planner.verify(tables, batch, Trees { sizes: &SIZES, parents: &PARENTS }),
    }
    .unwrap()
}

#[test]
fn a_warm_planner_allocates_nothing() {
    for (format, layout) in settings() {
        let (g, case, mut planner) = setting(format, layout);
        let batch = Batch::new(&case.seqs, Lens::Host(&case.lens));
        let all: Vec<Phase> = phases(&g).collect();
        let mut round = || {
            case.pool
                .with_tables(|t| all.iter().for_each(|&phase| drop(plan(&mut planner, &t, &batch, phase))))
                .unwrap();
        };
        assert!(allocations(&mut round) > 0, "counts nothing");
        assert_eq!(allocations(&mut round), 0, "{format:?} in {layout:?}");
    }
}

/// Into memory of a caller, which cannot grow.
#[test]
fn fixed_arrays_allocate_nothing() {
    for (format, layout) in settings() {
        let (g, case, mut planner) = setting(format, layout);
        planner.defer_arrays(true);
        let batch = Batch::new(&case.seqs, Lens::Host(&case.lens));
        let phase_and_arrays = |phase: Phase| {
            let sizes = format.extents(&g, &Load::limit(&g, phase, 3).unwrap()).unwrap();
            let given = |i: usize| {
                let (spec, extent) = (format.arrays()[i], sizes.iter().find(|(at, _)| *at == i)?.1);
                let memory = HostMemory::new(spec.name, extent.elements() * spec.dtype.size() as u64).unwrap();
                Some(Given { memory: Box::new(memory), extent })
            };
            let given = (0..format.arrays().len()).map(given).collect();
            (phase, Arrays::fixed(format.arrays(), given).unwrap())
        };
        let mut all: Vec<(Phase, Arrays)> = phases(&g).map(phase_and_arrays).collect();
        for round in 0..3 {
            let n = allocations(|| {
                case.pool
                    .with_tables(|t| {
                        for (phase, arrays) in &mut all {
                            let plan = plan(&mut planner, &t, &batch, *phase);
                            planner.lower(&t, &plan, arrays).unwrap();
                        }
                    })
                    .unwrap();
            });
            assert!(round == 0 || n == 0, "{n} allocations of {format:?} in {layout:?}");
        }
    }
}

/// A context that grows by one token a round: arrays grow ahead, so that few rounds of many allocate.
#[test]
fn growing_contexts_seldom_allocate() {
    let (_, mut case, mut planner) = setting(AnyFormat::FlashInfer(FlashInfer::default()), Layout::Dense);
    let mut rounds = 0;
    let first = *case.lens.last().unwrap();
    for len in first..first + 89 {
        case.lease.renew(&[0, 0, 0].map(|_| len + 40)).unwrap();
        case.lease.advance(&[case.lens[0], case.lens[1], len]).unwrap();
        let lens = [case.lens[0], case.lens[1], len];
        let batch = Batch::new(&case.seqs, Lens::Host(&lens));
        let allocated = allocations(|| {
            case.pool.with_tables(|t| drop(plan(&mut planner, &t, &batch, Phase::Draft { step: 0 }))).unwrap();
        });
        rounds += usize::from(allocated > 0);
    }
    assert!((1..=9).contains(&rounds), "{rounds} of 89 rounds allocate");
}
