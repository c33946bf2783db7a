//! `certify`: prove a configuration in bounds, for every residue of the committed length and for each format.
//!
//! Nothing is proved by formula against formula. Four things are run:
//!
//! * **placements** ([`proof`]): the functions that the planner places by, for every residue `L mod P`, branch and step,
//!   in both layouts, each position looked up in a bitmap of the row;
//! * **rounds** ([`rounds`]): the planner on a real pool, in debug mode, so that every query of every plan is audited;
//! * **counting** ([`count`]): a format's own arithmetic, by which it sizes what it writes, on full batches at every
//!   residue and at the context wall, against the capacities that it states;
//! * **writing** ([`written`]): the format's arrays of representative rows, poisoned before, and read back as its kernel
//!   reads them: slot by slot what the plan says.
//!
//! Sums over a batch are the sums of what its requests take, so that the largest full batch stands for all batches.

mod count;
mod formats;
mod proof;
mod rounds;
mod written;

pub use formats::{FormatArray, FormatCertificate, FormatLayout};
pub use proof::{Failure, MAX_FAILURES};

use crate::error::Result;
use crate::geometry::{Buffer, Geometry, Layout, Limits, TreeShape};
use crate::plan::AnyFormat;
use crate::revert::Reverts;
use proof::{Proof, Room};

/// The sizes of one layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayoutSizes {
    /// The layout.
    pub layout: Layout,
    /// Positions that one round may write.
    pub alloc_len_per_decode: u32,
    /// Positions that are kept reserved.
    pub reserve_per_decode: u32,
    /// Positions of a row.
    pub row_width: u32,
}

/// Findings of [`certify`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// The limits.
    pub limits: Limits,
    /// The tree.
    pub shape: TreeShape,
    /// Historical faults that were put back for this run ([`crate::revert`]); none in earnest.
    pub reverts: Reverts,
    /// Sizes of the layouts that were checked: dense, and holey where it differs.
    pub layouts: Vec<LayoutSizes>,
    /// Every array of the native format.
    pub buffers: Vec<Buffer>,
    /// The per-branch formats' `kv_indices`, for comparison; not needed by the native format.
    pub per_branch: Buffer,
    /// True if one step's per-branch `kv_indices` fit `int32` indexing.
    pub per_branch_fits: bool,
    /// Residues checked: all P of them.
    pub residues: u32,
    /// Positions placed and looked up.
    pub placements: u64,
    /// Plans made and audited.
    pub plans: u64,
    /// The first failures of placements and rounds, at most [`MAX_FAILURES`].
    pub failures: Vec<Failure>,
    /// Failures of placements and rounds that there were.
    pub failed: u64,
    /// The formats that were asked for.
    pub formats: Vec<FormatCertificate>,
}

impl Certificate {
    /// True if everything held: placements, rounds, and each format in each layout that it can do.
    pub fn holds(&self) -> bool {
        self.failed == 0 && self.formats.iter().all(FormatCertificate::holds)
    }

    /// Bytes of all arrays of the native format.
    pub fn native_bytes(&self) -> u64 {
        self.buffers.iter().map(|b| b.bytes).sum()
    }
}

/// Check `used <= capacity` and disjoint writes for every residue of the committed length, in both layouts, and each of
/// `formats` in each phase. Faults that [`SPECRS_DEBUG_REVERT`](crate::revert) names are put back.
///
/// Takes O(P * (K * S + V)) for the placements, O(max_context_len / P) pages for the planner's rows, and for each format
/// a few lists of a row's context.
///
/// # Errors
/// A configuration that cannot be constructed, as [`Geometry::new`]. A broken limit is no error of this function
/// but a [`Failure`] in the certificate.
pub fn certify(limits: Limits, shape: TreeShape, formats: &[AnyFormat]) -> Result<Certificate> {
    certify_with(limits, shape, formats, Reverts::from_env()?)
}

/// [`certify`] with the faults of `reverts` put back, whatever the environment says.
///
/// # Errors
/// Those of [`certify`].
pub fn certify_with(limits: Limits, shape: TreeShape, formats: &[AnyFormat], reverts: Reverts) -> Result<Certificate> {
    let dense = Geometry::with_reverts(limits, shape, Layout::Dense, reverts)?;
    let holey = Geometry::with_reverts(limits, shape, Layout::Holey, reverts)?;
    // Holey is dense for K = 1 or P = 1.
    let geometries: Vec<Geometry> = if holey.layout() == Layout::Dense { vec![dense] } else { vec![dense, holey] };
    let mut proof = Proof::default();
    let mut layouts = Vec::new();
    for geometry in &geometries {
        proof.layout = geometry.layout();
        layouts.push(LayoutSizes {
            layout: geometry.layout(),
            alloc_len_per_decode: geometry.alloc_len_per_decode(),
            reserve_per_decode: geometry.reserve_per_decode(),
            row_width: geometry.row_width(),
        });
        for residue in 0..geometry.page().get() {
            for committed in lengths(geometry, residue) {
                proof.placements(geometry, Room::of(geometry, committed)?, committed)?;
            }
        }
        proof.index_widths(geometry)?;
        proof.rounds(geometry)?;
    }
    let formats = formats.iter().map(|format| formats::certify(*format, &geometries)).collect::<Result<_>>()?;
    Ok(Certificate {
        limits,
        shape,
        reverts,
        layouts,
        buffers: dense.buffers(),
        per_branch: dense.per_branch_buffer()?,
        per_branch_fits: dense.per_branch_kv_indices().is_ok(),
        residues: dense.page().get(),
        placements: proof.placed,
        plans: proof.plans,
        failures: proof.failures,
        failed: proof.failed,
        formats,
    })
}

/// Committed lengths of a residue that are checked: the smallest, the one a page later, and the largest from which a
/// round can start. Placement depends on the residue and adds the base, so that these stand for all lengths.
fn lengths(geometry: &Geometry, residue: u32) -> Vec<u32> {
    let (p, last) = (geometry.page().get(), geometry.limits().max_context_len - 1);
    let mut all = vec![residue, residue + p];
    all.extend(last.checked_sub(residue).map(|room| residue + room / p * p));
    all.retain(|&l| l <= last);
    all.sort_unstable();
    all.dedup();
    all
}

/// Largest depth of a tree behind `committed` tokens: the deepest node stays inside the context.
fn wall(geometry: &Geometry, committed: u32) -> u32 {
    geometry.limits().max_context_len.saturating_sub(committed + 1)
}
