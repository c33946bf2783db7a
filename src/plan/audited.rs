//! [`AuditedPlan`]: a plan that was checked.

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

use crate::geometry::Geometry;
use crate::plan::{AnyFormat, Arrays, Format, Native, Plan};

/// A plan, the arrays that its format derives, and the geometry that says what its masks and slots mean.
#[derive(Debug, Default)]
pub(crate) struct Filled {
    pub(crate) plan: Plan,
    pub(crate) arrays: Arrays,
    /// Geometry that it was made for; `None` before the first plan.
    pub(crate) geometry: Option<Geometry>,
}

/// A plan that has been checked against the pool; the only kind that launches. A cheap handle: clones share the
/// arrays, and the planner takes them back when the last one is dropped.
///
/// `F` says which backend's arrays it carries, so that a kernel cannot be given another backend's plan.
#[derive(Debug)]
pub struct AuditedPlan<F: Format = Native>(pub(crate) Arc<Filled>, PhantomData<fn() -> F>);

impl<F: Format> Clone for AuditedPlan<F> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0), PhantomData)
    }
}

impl<F: Format> Deref for AuditedPlan<F> {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.0.plan
    }
}

impl<F: Format> AuditedPlan<F> {
    pub(crate) fn new(filled: Arc<Filled>) -> Self {
        Self(filled, PhantomData)
    }

    /// The arrays of the format; none where they were left to [`Planner::lower`](crate::plan::Planner::lower).
    pub fn arrays(&self) -> &Arrays {
        &self.0.arrays
    }
}

impl AuditedPlan<AnyFormat> {
    /// The plan as one for specrs's own kernels, where `format`, which it was made for, is the native one.
    pub fn native(&self, format: &AnyFormat) -> Option<AuditedPlan<Native>> {
        matches!(format, AnyFormat::Native(_)).then(|| AuditedPlan(Arc::clone(&self.0), PhantomData))
    }
}
