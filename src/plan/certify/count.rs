//! Counting: the sizes of full batches, by a format's own arithmetic, against the capacities that it states.

use crate::error::Result;
use crate::geometry::Geometry;
use crate::plan::certify::lengths;
use crate::plan::certify::proof::{At, Proof};
use crate::plan::{Extent, Format, Lens, Load, Phase, phases};

/// Every phase of `format` at every residue of the committed length and at the context wall: what one request and a full
/// batch of such requests use, and what is sized without knowing lengths, fit what is stated.
pub(super) fn full_batches(proof: &mut Proof, format: &impl Format, g: &Geometry) {
    let context = g.limits().max_context_len;
    let mut all: Vec<u32> = (0..g.page().get()).flat_map(|residue| lengths(g, residue)).collect();
    // Where the steps of a draft and the nodes of a tree reach the wall.
    all.extend((0..=g.shape().steps().max(g.shape().draft_tokens())).filter_map(|n| context.checked_sub(n)));
    all.sort_unstable();
    all.dedup();
    for phase in phases(g) {
        if let Err(error) = phase_of(proof, format, g, phase, &all) {
            proof.error(format!("{} {}", format.name(), phase.name()), at(g, phase, context), &error);
        }
    }
}

fn phase_of(proof: &mut Proof, format: &impl Format, g: &Geometry, phase: Phase, lens: &[u32]) -> Result<()> {
    let (b, context) = (g.limits().max_batch, g.limits().max_context_len);
    let limits = [1, b].map(|n| Load::limit(g, phase, n).and_then(|load| format.extents(g, &load)));
    let [one, full] = limits;
    let (one, full) = (one?, full?);
    for &committed in lens {
        let request = Load::of_lens(g, phase, &Lens::Host(&[committed]))?;
        fits(proof, format, at(g, phase, committed), "one request", &format.extents(g, &request)?, &one);
        let batch = request.times(b as u64);
        fits(proof, format, at(g, phase, committed), "a full batch", &format.extents(g, &batch)?, &full);
    }
    // A batch counted request by request, and one whose lengths only the device knows.
    let longest = vec![context.saturating_sub(1); b as usize];
    let counted = Load::of_lens(g, phase, &Lens::Host(&longest))?;
    fits(proof, format, at(g, phase, context - 1), "a batch at the wall", &format.extents(g, &counted)?, &full);
    let unknown = Load::of_lens(g, phase, &Lens::Device { batch: b, at_most: context })?;
    let sized = format.extents(g, &unknown)?;
    fits(proof, format, at(g, phase, context), "a batch on the device", &sized, &full);
    fits(
        proof,
        format,
        at(g, phase, context - 1),
        "a batch at the wall, sized on the device",
        &format.extents(g, &counted)?,
        &sized,
    );
    Ok(())
}

/// Each array of `used` is there in `have`, and within it in every dimension.
pub(super) fn fits(
    proof: &mut Proof,
    format: &impl Format,
    at: At,
    whose: &str,
    used: &[(usize, Extent)],
    have: &[(usize, Extent)],
) {
    for &(array, used) in used {
        proof.placed += 1;
        let name = format.arrays().get(array).map_or("an array", |spec| spec.name);
        let have = have.iter().find(|h| h.0 == array).map_or(Extent::Line(0), |h| h.1);
        let over = match (used, have) {
            (Extent::Table { rows, .. }, Extent::Table { rows: have, .. }) if rows > have => Some(("rows", rows, have)),
            (Extent::Table { cols, .. }, Extent::Table { cols: have, .. }) if cols > have => {
                Some(("columns", cols, have))
            }
            (Extent::Table { .. }, Extent::Table { .. }) => None,
            _ if used.elements() > have.elements() => Some(("elements", used.elements(), have.elements())),
            _ => None,
        };
        if let Some((what, used, have)) = over {
            proof.fail(format!("{} {name} of {whose}, {what}", format.name()), at, used, have);
        }
    }
}

/// Where a phase stands behind a prefix.
pub(super) fn at(g: &Geometry, phase: Phase, committed: u32) -> At {
    let step = match phase {
        Phase::Draft { step } => step as i64,
        _ => -1,
    };
    At { committed, residue: g.page().offset(committed), branch: -1, step }
}
