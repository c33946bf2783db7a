//! The formats without arrays: [`Native`] and [`WritesOnly`].

use crate::error::{Error, Result};
use crate::geometry::{Geometry, Layout};
use crate::plan::Format;

/// specrs's own kernels: they read the pool's page table in place, the prefix once for all queries of a request, and
/// the tree by ancestor bits; so there is nothing to derive and metadata is O(B*V), independent of the context.
#[derive(Debug, Clone, Copy, Default)]
pub struct Native;

impl Format for Native {
    fn name(&self) -> &'static str {
        "native"
    }

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
}

/// Placement alone: slots to write, in either layout, and nothing for attention: enough for `certify` and for a
/// KV writer without an attention backend.
#[derive(Debug, Clone, Copy, Default)]
pub struct WritesOnly;

impl Format for WritesOnly {
    fn name(&self) -> &'static str {
        "writes only"
    }

    fn supports(&self, _: &Geometry) -> Result<()> {
        Ok(())
    }
}
