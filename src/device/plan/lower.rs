//! The arrays of an attention backend, derived from a [`DevicePlan`] on the device.

use super::{DevicePlan, DevicePlanner, on_device};
use crate::device::driver::Stream;
use crate::device::params::plan::{PlanListParams, PlanTableParams};
use crate::device::view::DeviceSlice;
use crate::error::{Error, Result, in_range};
use crate::overlap::{Operand, Span, disjoint};
use crate::plan::form::{Step, lists};
use crate::plan::{AnyFormat, DType, Format, Phase, Spec};

/// The elements of an array of a format, by type.
#[derive(Debug, Clone, Copy)]
pub enum DeviceElements {
    /// int32.
    I32(DeviceSlice<i32>),
    /// int64.
    I64(DeviceSlice<i64>),
    /// Bytes, those of bool too.
    U8(DeviceSlice<u8>),
}

/// Static device memory of one array of a format.
#[derive(Debug, Clone, Copy)]
pub struct DeviceArray {
    /// All elements of the capacity.
    pub elements: DeviceElements,
    /// Columns of a table; `None` for a line.
    pub columns: Option<usize>,
}

impl DeviceArray {
    fn address(&self) -> u64 {
        match &self.elements {
            DeviceElements::I32(s) => s.address(),
            DeviceElements::I64(s) => s.address(),
            DeviceElements::U8(s) => s.address(),
        }
    }

    fn len(&self) -> usize {
        match &self.elements {
            DeviceElements::I32(s) => s.len(),
            DeviceElements::I64(s) => s.len(),
            DeviceElements::U8(s) => s.len(),
        }
    }

    fn device(&self) -> i32 {
        match &self.elements {
            DeviceElements::I32(s) => s.device(),
            DeviceElements::I64(s) => s.device(),
            DeviceElements::U8(s) => s.device(),
        }
    }

    fn span(&self) -> Span {
        match &self.elements {
            DeviceElements::I32(s) => s.span(),
            DeviceElements::I64(s) => s.span(),
            DeviceElements::U8(s) => s.span(),
        }
    }

    fn is(&self, dtype: DType) -> bool {
        matches!(
            (&self.elements, dtype),
            (DeviceElements::I32(_), DType::I32)
                | (DeviceElements::I64(_), DType::I64)
                | (DeviceElements::U8(_), DType::U8 | DType::Bool)
        )
    }
}

/// The arrays that a caller gives for a format's, in its order.
struct GivenArrays<'a> {
    specs: &'static [Spec],
    arrays: &'a [Option<DeviceArray>],
    /// Arrays that the phase has.
    present: Vec<usize>,
    ordinal: i32,
}

impl GivenArrays<'_> {
    /// Array `i` with at least `need` elements, or rows of a table; `None` where the phase has none, or an optional one is
    /// left out.
    fn array(&self, i: usize, need: usize) -> Result<Option<DeviceArray>> {
        let spec = &self.specs[i];
        if !self.present.contains(&i) {
            return Ok(None);
        }
        let Some(array) = self.arrays.get(i).copied().flatten() else {
            if spec.optional {
                return Ok(None);
            }
            let want = format!("an array of {} with {need} elements or rows", spec.dtype.name());
            return Err(Error::Mismatch { operand: spec.name, got: "none".into(), want });
        };
        if !array.is(spec.dtype) {
            let got = format!("{:?}", array.elements);
            return Err(Error::Mismatch { operand: spec.name, got, want: spec.dtype.name().into() });
        }
        // Rows without columns hold nothing, however many there are.
        let have = match array.columns {
            None => array.len(),
            Some(0) => need,
            Some(columns) => array.len() / columns,
        };
        if have < need {
            let hint = "requests or queries of the bucket".into();
            return Err(Error::Capacity { what: spec.name, need: need as u64, have: have as u64, hint });
        }
        in_range(spec.name, array.columns.unwrap_or(0) as u64, 0, i128::from(i32::MAX))?;
        on_device(self.ordinal, &[(spec.name, array.device())])?;
        Ok(Some(array))
    }

    fn address(&self, i: usize, need: usize) -> Result<u64> {
        Ok(self.array(i, need)?.map_or(0, |a| a.address()))
    }

    /// Address and capacity, as far as int32 indexes it where `starts` are int32.
    fn capacity(&self, i: usize, wide: bool) -> Result<(u64, i64)> {
        let most = if wide { i64::MAX } else { i32::MAX.into() };
        Ok(self.array(i, 0)?.map_or((0, 0), |a| (a.address(), (a.len() as i64).min(most))))
    }
}

impl DevicePlanner {
    /// Write the arrays of `format` for `plan` into `arrays`, one for each of [`Format::arrays`] in their order; `None`
    /// for one that the phase does not have, or an optional one that is left out. They hold what the host writes
    /// ([`Lower`](crate::plan::Lower)); of a page table all of the capacity is written.
    ///
    /// A list, a mask or a row that does not fit is recorded, and empty.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a plan of another geometry, or one that the format cannot run; [`Error::Mismatch`] for an array
    /// that is missing, of another type, or elsewhere; [`Error::Capacity`] for one with fewer entries than the bucket has
    /// requests or queries.
    pub fn lower(
        &self,
        stream: Stream,
        format: &AnyFormat,
        plan: &DevicePlan,
        arrays: &[Option<DeviceArray>],
    ) -> Result<()> {
        if plan.geometry != self.geometry {
            let (got, why) = (format!("one for {:?}", plan.geometry), format!("the planner's is {:?}", self.geometry));
            return Err(Error::Invalid { what: "plan", got, why });
        }
        format.supports(&self.geometry)?;
        let written: Vec<Span> = arrays.iter().flatten().map(DeviceArray::span).collect();
        disjoint(&[&written], &[&plan.memory.spans(), &[plan.table.pages.span()]])?;
        let present = format.sizes(&self.geometry, plan.phase).into_iter().map(|(array, _)| array).collect();
        let given = GivenArrays { specs: format.arrays(), arrays, present, ordinal: self.ordinal() };
        match format {
            AnyFormat::Native(_) => Ok(()),
            AnyFormat::FlashInfer(_) => self.lists(stream, plan, &given, [0, 1, 2, 3, 8, 4, 5, 6, 7], false),
            AnyFormat::Triton(_) => self.lists(stream, plan, &given, [0, 1, 8, 2, 3, 4, 5, 8, 8], true),
            AnyFormat::FlashAttention(_) => self.tables(stream, plan, &given),
        }
    }

    /// Slot lists. `names` are the indices of the kernel's arrays in the format's, 8 for one that it does not have.
    fn lists(
        &self,
        stream: Stream,
        plan: &DevicePlan,
        given: &GivenArrays<'_>,
        names: [usize; 9],
        triton: bool,
    ) -> Result<()> {
        let (m, s) = (&plan.memory, Step::new(&self.geometry, plan.phase));
        let (b, q) = (m.rows.len(), m.positions.len());
        let lists = if lists::per_query(s) { q } else { b };
        let address = |i: usize, need| if i == 8 { Ok(0) } else { given.address(i, need) };
        let capacity = |i: usize, wide| if i == 8 { Ok((0, 0)) } else { given.capacity(i, wide) };
        let [indptr, indices, last, qo, extend, mask_indptr, mask, packed_indptr, packed] = names;
        let (kv_indices, indices) = capacity(indices, false)?;
        let (custom_mask, mask_elements) = capacity(mask, triton)?;
        let (packed_mask, packed_bytes) = capacity(packed, false)?;
        let (mask_indptr, packed_indptr) = (address(mask_indptr, b + 1)?, address(packed_indptr, b + 1)?);
        let half = (mask_indptr == 0) != (custom_mask == 0) || (packed_indptr == 0) != (packed_mask == 0);
        if plan.phase == Phase::Verify && b > 0 && (half || custom_mask == 0 && packed_mask == 0) {
            return Err(Error::Mismatch {
                operand: "custom_mask",
                got: if half { "one array of a pair".into() } else { "no array for the tree's mask".into() },
                want: "custom_mask and mask_indptr, packed_custom_mask and packed_mask_indptr, or all four".into(),
            });
        }
        let kernels = &self.device.kernels().plan;
        let report = kernels.context().report(stream)?;
        let params = PlanListParams {
            plan: m.arrays(),
            table: plan.table.params(),
            kv_indptr: address(indptr, lists + 1)?,
            kv_indices,
            last_page_len: address(last, lists)?,
            qo_out: address(qo, b + 1)?,
            extend_slots: address(extend, q)?,
            mask_indptr,
            custom_mask,
            packed_indptr,
            packed_mask,
            report,
            indices,
            mask_elements,
            packed_bytes,
            step: s.into(),
            wide: triton.into(),
            own: (!triton).into(),
        };
        kernels.launch_lists(stream, &params)
    }

    /// Page tables.
    fn tables(&self, stream: Stream, plan: &DevicePlan, given: &GivenArrays<'_>) -> Result<()> {
        let (m, s) = (&plan.memory, Step::new(&self.geometry, plan.phase));
        let (b, q) = (m.rows.len(), m.positions.len());
        let table = |i, need| {
            Ok::<_, Error>(given.array(i, need)?.map_or((0, 0), |a| (a.address(), a.columns.unwrap_or(0) as i32)))
        };
        let ((page_table, page_columns), (expand_page_table, expand_columns)) = (table(1, b)?, table(4, q)?);
        let kernels = &self.device.kernels().plan;
        let report = kernels.context().report(stream)?;
        let params = PlanTableParams {
            plan: m.arrays(),
            table: plan.table.params(),
            cache_seqlens: given.address(0, b)?,
            page_table,
            cu_seqlens_q: given.address(2, b + 1)?,
            expand_cache_seqlens: given.address(3, q)?,
            expand_page_table,
            expand_cu_seqlens_q: given.address(5, q + 1)?,
            report,
            step: s.into(),
            page_columns,
            expand_columns,
        };
        kernels.launch_tables(stream, &params)
    }
}
