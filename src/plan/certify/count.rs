//! Counting: the sizes of full batches, by a format's own arithmetic, against the capacities that it states.

use crate::error::Result;
use crate::geometry::Geometry;
use crate::plan::certify::lengths;
use crate::plan::certify::proof::{FailureSite, Proof};
use crate::plan::{Extent, Format, Lens, Load, Phase, phases};

/// Check every phase of `format` at every residue of the committed length and at the context wall: the needs of one
/// request and of a full batch of such requests, and sizes without known lengths, fit the stated capacities.
pub(super) fn full_batches(proof: &mut Proof, format: &impl Format, g: &Geometry) {
    let context = g.limits().max_context_len;
    let mut all: Vec<u32> = (0..g.page().get()).flat_map(|residue| lengths(g, residue)).collect();
    // Lengths at which the steps of a draft and the nodes of a tree reach the wall.
    all.extend((0..=g.shape().steps().max(g.shape().draft_tokens())).filter_map(|n| context.checked_sub(n)));
    all.sort_unstable();
    all.dedup();
    for phase in phases(g) {
        if let Err(error) = phase_of(proof, format, g, phase, &all) {
            proof.error(
                format!("{} {}", format.name(), phase.name()),
                FailureSite::behind(g, context).of_phase(phase),
                &error,
            );
        }
    }
}

fn phase_of(proof: &mut Proof, format: &impl Format, g: &Geometry, phase: Phase, lens: &[u32]) -> Result<()> {
    let (b, context) = (g.limits().max_batch, g.limits().max_context_len);
    let limits = [1, b].map(|n| Load::limit(g, phase, n).and_then(|load| format.extents(g, &load)));
    let [one, full] = limits;
    let (one, full) = (one?, full?);
    let site = |committed| FailureSite::behind(g, committed).of_phase(phase);
    let (mut alone, mut batches) = (Worst::new("one request"), Worst::new("a full batch"));
    for &committed in lens {
        let request = Load::of_lens(g, phase, &Lens::Host(&[committed]))?;
        alone.compare(proof, site(committed), &format.extents(g, &request)?, &one);
        let batch = request.times(b as u64);
        batches.compare(proof, site(committed), &format.extents(g, &batch)?, &full);
    }
    alone.report(proof, format);
    batches.report(proof, format);
    // A batch counted request by request, and one whose lengths only the device knows.
    let longest = vec![context.saturating_sub(1); b as usize];
    let counted = Load::of_lens(g, phase, &Lens::Host(&longest))?;
    fits(proof, format, site(context - 1), "a batch at the wall", &format.extents(g, &counted)?, &full);
    let unknown = Load::of_lens(g, phase, &Lens::Device { batch: b, at_most: context })?;
    let sized = format.extents(g, &unknown)?;
    fits(proof, format, site(context), "a batch on the device", &sized, &full);
    fits(
        proof,
        format,
        site(context - 1),
        "a batch at the wall, sized on the device",
        &format.extents(g, &counted)?,
        &sized,
    );
    Ok(())
}

/// Check that each array of `used` is there in `have`, and within it in every dimension.
pub(super) fn fits(
    proof: &mut Proof,
    format: &impl Format,
    at: FailureSite,
    whose: &'static str,
    used: &[(usize, Extent)],
    have: &[(usize, Extent)],
) {
    let mut worst = Worst::new(whose);
    worst.compare(proof, at, used, have);
    worst.report(proof, format);
}

/// The comparison of each array that exceeds its capacity most, so that a fault is not told once a length.
struct Worst {
    whose: &'static str,
    over: Vec<Over>,
}

struct Over {
    array: usize,
    what: &'static str,
    at: FailureSite,
    used: u64,
    have: u64,
}

impl Worst {
    fn new(whose: &'static str) -> Self {
        Self { whose, over: Vec::new() }
    }

    fn compare(&mut self, proof: &mut Proof, at: FailureSite, used: &[(usize, Extent)], have: &[(usize, Extent)]) {
        for &(array, used) in used {
            proof.placed += 1;
            let have = have.iter().find(|h| h.0 == array).map_or(Extent::Line(0), |h| h.1);
            let (what, used, have) = match (used, have) {
                (Extent::Table { rows, .. }, Extent::Table { rows: have, .. }) if rows > have => ("rows", rows, have),
                (Extent::Table { cols, .. }, Extent::Table { cols: have, .. }) => ("columns", cols, have),
                _ => ("elements", used.elements(), have.elements()),
            };
            if used <= have {
                continue;
            }
            let over = Over { array, what, at, used, have };
            match self.over.iter_mut().find(|o| o.array == array) {
                None => self.over.push(over),
                Some(worst) if over.used - over.have > worst.used - worst.have => *worst = over,
                Some(_) => {}
            }
        }
    }

    fn report(self, proof: &mut Proof, format: &impl Format) {
        for Over { array, what, at, used, have } in self.over {
            let name = format.arrays().get(array).map_or("an array", |spec| spec.name);
            proof.fail(format!("{} {name} of {}, {what}", format.name(), self.whose), at, used, have);
        }
    }
}
