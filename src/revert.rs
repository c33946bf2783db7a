//! Named historical faults, and the switch that puts one back.
//!
//! Five faults of a widely used engine are told in [`FAULTS`]. Each had the same form: a buffer sized by one rule and
//! written by another, or a value read that was no longer, or never, there. `SPECRS_DEBUG_REVERT=27338,26972` puts
//! those faults back into specrs exactly where they would have been, so that one can watch the guard that stops them
//! (`tests/faults`, `docs/faults.md`) and compare runs with and without.
//!
//! A set of [`Reverts`] is a field of [`Geometry`](crate::geometry::Geometry), not a global: two geometries of one
//! process may differ, and tests need no environment. The places that consult it size buffers or write metadata once a
//! step; none of them is in a kernel's loop. With a set in force, stderr says so once per process.
//!
//! ```
//! use specrs::revert::{Fault, Reverts};
//! let reverts = Reverts::parse("27338, 26972")?;
//! assert!(reverts.has(Fault::BranchWidth) && !reverts.has(Fault::HostLengths));
//! assert_eq!(reverts.to_string(), "27338,26972");
//! assert!(Reverts::parse("27339").unwrap_err().to_string().contains("27338, 27360, 23037, 26972, 26738"));
//! # Ok::<(), specrs::Error>(())
//! ```

use std::fmt;
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// The environment variable: ids separated by commas.
pub const VARIABLE: &str = "SPECRS_DEBUG_REVERT";

/// A fault that has a place in specrs. The discriminant is its index in [`FAULTS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Fault {
    /// 27338: per-branch `kv_indices` sized without topk.
    BranchWidth,
    /// 27360: the expand page table written for all steps instead of those that are live.
    ExpandTable,
    /// 23037: dead queries of a static buffer keep the last replay's values, and its outputs are held across replays.
    StalePadding,
    /// 26972: the round's reserve without the holey layout's pages.
    HoleyReserve,
    /// 26738: a host mirror of the lengths is read where they live on the device alone.
    HostLengths,
}

/// Description of a [`Fault`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultInfo {
    /// The fault.
    pub fault: Fault,
    /// Number of the pull request that fixed it, by which it is known here.
    pub id: u32,
    /// The fault in a line.
    pub title: &'static str,
    /// The pull request.
    pub report: &'static str,
    /// The behaviour that the switch puts back.
    pub reverts: &'static str,
    /// The function that consults the switch.
    pub place: &'static str,
    /// The guard that stops the fault: the check, and the kind of its error.
    pub guard: &'static str,
}

/// The faults that can be put back, in the order of [`Fault`].
pub const FAULTS: [FaultInfo; 5] = [
    FaultInfo {
        fault: Fault::BranchWidth,
        id: 27338,
        title: "draft kv_indices of a captured graph allocated without the factor topk",
        report: "https://github.com/sgl-project/sglang/pull/27338",
        reverts: "the width of one draft step's per-branch kv_indices is max_batch * (max_context_len + steps), without topk",
        place: "Geometry::per_branch_elements",
        guard: "capacity of every array is compared with the need before the first write: Capacity",
    },
    FaultInfo {
        fault: Fault::ExpandTable,
        id: 27360,
        title: "expand page table of a draft step filled from all num_steps slots, wider than its row",
        report: "https://github.com/sgl-project/sglang/pull/27360",
        reverts: "flash_attention's holey draft step t writes the pages of all S slots of a branch, not of its t + 1 live ones",
        place: "Geometry::live_draft_tokens, asked by the flash_attention format",
        guard: "each row's pages are compared with the table's columns before they are written: Capacity",
    },
    FaultInfo {
        fault: Fault::StalePadding,
        id: 23037,
        title: "padding of a static buffer keeps the last replay's values, and outputs are held across replays",
        report: "https://github.com/sgl-project/sglang/pull/23037",
        reverts: "dead queries of a padded plan are not written into static buffers, and the lease on a buffer's content is not renewed",
        place: "plan::write::planner::write_arrays (padding), FormatBuffers (lease)",
        guard: "dead queries of every padded write are read back: Invalid; arrays of an earlier write: StaleOutput",
    },
    FaultInfo {
        fault: Fault::HoleyReserve,
        id: 26972,
        title: "reserve and row width without the holey layout's whole pages per branch",
        report: "https://github.com/sgl-project/sglang/pull/26972",
        reverts: "alloc_len_per_decode is max(steps * topk, draft_tokens) in the holey layout too; reserve and row width follow",
        place: "Geometry::with_reverts (alloc_len_per_decode)",
        guard: "every position placed is compared with what its row has allocated: OutOfBounds",
    },
    FaultInfo {
        fault: Fault::HostLengths,
        id: 26738,
        title: "host values of lengths read on the path where lengths live on the device alone",
        report: "https://github.com/sgl-project/sglang/pull/26738",
        reverts: "sizes for device lengths come from the host's lengths instead of their upper bound",
        place: "plan::Load::of_lens",
        guard: "host lengths come through Lens::host alone, which refuses device lengths: Invalid",
    },
];

/// Ids that are known and have no place here, with the reason.
pub const ABSENT: [(u32, &str); 1] = [(
    27460,
    "the twin of 27338 in the MLA backend has no place here: specrs has no MLA format; 27338 is the same fault",
)];

impl Fault {
    /// Description of the fault.
    pub fn info(self) -> &'static FaultInfo {
        &FAULTS[self as usize]
    }
}

/// A set of faults to put back; empty by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Reverts(u8);

impl Reverts {
    /// No fault.
    pub const NONE: Reverts = Reverts(0);

    /// Parse ids separated by commas, spaces allowed; an id may be there twice, an empty list is no fault.
    ///
    /// # Errors
    /// [`Error::Invalid`] for anything that is no id of [`FAULTS`]; it names the known ones.
    pub fn parse(list: &str) -> Result<Self> {
        let ids = list.split(',').map(str::trim).filter(|id| !id.is_empty());
        ids.map(one).try_fold(Self::NONE, |all, fault| Ok(all.and(fault?)))
    }

    /// The set that `SPECRS_DEBUG_REVERT` names. The variable is read once per process; where it names a fault, the
    /// first call says so on stderr.
    ///
    /// # Errors
    /// Those of [`Self::parse`], at every call.
    pub fn from_env() -> Result<Self> {
        static SET: OnceLock<Result<Reverts>> = OnceLock::new();
        SET.get_or_init(|| {
            let Some(list) = std::env::var_os(VARIABLE) else { return Ok(Self::NONE) };
            let reverts = Self::parse(&list.to_string_lossy())?;
            if let Some(warning) = reverts.warning() {
                eprintln!("{warning}");
            }
            Ok(reverts)
        })
        .clone()
    }

    /// The same set and `fault`.
    pub const fn and(self, fault: Fault) -> Self {
        Self(self.0 | 1 << fault as u8)
    }

    /// True if `fault` is to be put back.
    pub const fn has(self, fault: Fault) -> bool {
        self.0 >> fault as u8 & 1 == 1
    }

    /// True if there is nothing to put back.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The faults of the set, in the order of [`FAULTS`].
    pub fn iter(self) -> impl Iterator<Item = &'static FaultInfo> {
        FAULTS.iter().filter(move |f| self.has(f.fault))
    }

    /// Warning of a run under this set; `None` for the empty set.
    pub fn warning(self) -> Option<String> {
        let named: Vec<_> = self.iter().map(|f| format!("\n  {}: {}", f.id, f.reverts)).collect();
        (!named.is_empty()).then(|| {
            format!(
                "specrs: WARNING: {VARIABLE} PUTS HISTORICAL FAULTS BACK. For debugging alone; unset it for any other \
                 use.{}",
                named.concat()
            )
        })
    }
}

impl fmt::Display for Reverts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ids: Vec<_> = self.iter().map(|fault| fault.id.to_string()).collect();
        f.write_str(&ids.join(","))
    }
}

fn one(id: &str) -> Result<Fault> {
    let number = id.parse::<u32>().ok();
    if let Some(known) = FAULTS.iter().find(|f| Some(f.id) == number) {
        return Ok(known.fault);
    }
    let known = FAULTS.map(|f| f.id.to_string()).join(", ");
    let why = match ABSENT.iter().find(|(absent, _)| Some(*absent) == number) {
        Some((_, reason)) => format!("{reason}; faults that can be put back: {known}"),
        None => format!("no fault of that name; known ones: {known}"),
    };
    Err(Error::Invalid { what: VARIABLE, got: id.into(), why })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_registry_is_in_the_order_of_its_discriminants() {
        for (i, f) in FAULTS.iter().enumerate() {
            assert_eq!((f.fault as usize, f.fault.info().id), (i, f.id));
            assert!(f.report.ends_with(&f.id.to_string()));
        }
    }

    #[test]
    fn lists() {
        for (list, want) in [
            ("", ""),
            (" , ,", ""),
            ("27338", "27338"),
            (" 26738 ,27360,  23037", "27360,23037,26738"),
            ("26972,26972,", "26972"),
            ("27338,27360,23037,26972,26738", "27338,27360,23037,26972,26738"),
        ] {
            let set = Reverts::parse(list).unwrap();
            assert_eq!(set.to_string(), want);
            assert_eq!(set.is_empty(), want.is_empty());
            assert_eq!(Reverts::parse(&set.to_string()).unwrap(), set);
            assert_eq!(set.warning().is_some(), !want.is_empty());
        }
        for f in FAULTS {
            let set = Reverts::NONE.and(f.fault);
            assert_eq!(set.iter().map(|g| g.id).collect::<Vec<_>>(), [f.id]);
            let warning = set.warning().unwrap();
            assert!(warning.contains(VARIABLE) && warning.contains(f.reverts), "{warning}");
        }
    }

    #[test]
    fn unknown_ids_name_the_known_ones() {
        for (list, got) in [("27338,x", "x"), ("0", "0"), ("-27338", "-27338"), ("27338 27360", "27338 27360")] {
            let err = Reverts::parse(list).unwrap_err().to_string();
            let want = "no fault of that name; known ones: 27338, 27360, 23037, 26972, 26738";
            assert_eq!(err, format!("SPECRS_DEBUG_REVERT = {got}: {want}"));
        }
        let err = Reverts::parse("27460").unwrap_err().to_string();
        assert!(err.contains("no MLA format") && err.contains("27338, 27360"), "{err}");
    }
}
