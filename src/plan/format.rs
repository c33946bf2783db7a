//! Metadata formats: what an attention backend wants to be told.
//!
//! The phases of the planner describe a step once, in the form of [`Plan`]: who writes where, and who attends to
//! what, in row positions. A [`Format`] derives its backend's arrays from that description and the page tables, so
//! that a new backend adds a type here and touches no phase.

use crate::error::{Error, Result};
use crate::geometry::{Geometry, Layout};
use crate::plan::Plan;
use crate::pool::Tables;

/// The arrays of one attention backend, derived from a plan.
pub trait Format: Send + Sync + 'static {
    /// The derived arrays; reused from round to round, so [`Format::lower`] overwrites all of them.
    type Arrays: Default + Send + Sync + 'static;

    /// Name in messages.
    const NAME: &'static str;

    /// Whether the backend can run the geometry.
    ///
    /// # Errors
    /// [`Error::Invalid`] that names the combination and what would work.
    fn supports(&self, geometry: &Geometry) -> Result<()>;

    /// Derive the arrays of `plan`. The plan has been checked: its rows are live, its slots are in bounds.
    ///
    /// # Errors
    /// A size that does not fit the format's index type.
    fn lower(&self, plan: &Plan, tables: &Tables<'_>, geometry: &Geometry, arrays: &mut Self::Arrays) -> Result<()>;
}

/// specrs's own kernels: they read the pool's page table in place, the prefix once for all queries of a request, and
/// the tree by ancestor bits; so there is nothing to derive and metadata is O(B*V), independent of the context.
#[derive(Debug, Clone, Copy, Default)]
pub struct Native;

impl Format for Native {
    type Arrays = ();
    const NAME: &'static str = "native";

    fn supports(&self, geometry: &Geometry) -> Result<()> {
        match geometry.layout() {
            Layout::Dense => Ok(()),
            Layout::Holey => Err(Error::Invalid {
                what: "layout",
                got: "holey".into(),
                why: "the native format reads draft KV by position and needs the dense layout".into(),
            }),
        }
    }

    fn lower(&self, _: &Plan, _: &Tables<'_>, _: &Geometry, (): &mut ()) -> Result<()> {
        Ok(())
    }
}

/// Placement alone: slots to write, in either layout, and nothing for attention. What `certify` and a KV writer
/// without an attention backend need.
#[derive(Debug, Clone, Copy, Default)]
pub struct WritesOnly;

impl Format for WritesOnly {
    type Arrays = ();
    const NAME: &'static str = "writes only";

    fn supports(&self, _: &Geometry) -> Result<()> {
        Ok(())
    }

    fn lower(&self, _: &Plan, _: &Tables<'_>, _: &Geometry, (): &mut ()) -> Result<()> {
        Ok(())
    }
}
