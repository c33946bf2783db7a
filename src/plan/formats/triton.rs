//! [`Triton`]: slot lists and masks for sglang's Triton kernels.

use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::plan::formats::index::Index;
use crate::plan::formats::reader::Reader;
use crate::plan::size::{Count, indexable, present};
use crate::plan::{Arrays, DType, Format, Phase, Plan, Size, Spec};

/// The arrays of sglang's Triton attention backend (`decode_attention_fwd`, `extend_attention_fwd`; read in
/// sglang 0.5.23).
///
/// Its decode kernel, which runs the draft steps too, is given all keys by slot. Its extend kernel, which runs prefill,
/// draft-extend and verify, is given the **prefix** by slot and the new tokens' keys and values as they come from the
/// projection; where they are written, and may be read from afterwards, is `extend_slots` (sglang's `out_cache_loc`).
///
/// | array | draft, decode | extend | verify |
/// |---|---|---|---|
/// | `kv_indptr` int32 | `[Q + 1]`, a list a query | `[B + 1]`, a list a request | the same |
/// | `kv_indices` int64 | prefix, ancestors, itself | prefix | prefix |
/// | `qo_indptr` int64 | | `[B + 1]` | `[B + 1]` |
/// | `extend_slots` int64 | | `[Q]` | `[Q]` |
/// | `mask_indptr` int64 | | | `[B + 1]` starts in `custom_mask` |
/// | `custom_mask` bool | | | `[n, L + n]` of each request, row-major |
///
/// The element types are those of the backend's preallocated buffers. Dead and padded queries have empty lists, and 0 in
/// `extend_slots`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Triton;

pub(in crate::plan) const ARRAYS: [Spec; 6] = [
    Spec::new("kv_indptr", DType::I32),
    Spec::new("kv_indices", DType::I64),
    Spec::new("qo_indptr", DType::I64),
    Spec::optional("extend_slots", DType::I64), // the plan's own out_slots, for a kernel that reads them by int64
    Spec::new("mask_indptr", DType::I64),
    Spec::new("custom_mask", DType::Bool),
];

impl Triton {
    /// Size of each array of [`ARRAYS`]; `None` where the phase has no such array.
    pub(in crate::plan) fn sizes_of(phase: Phase) -> &'static [Option<Size>; 6] {
        const STARTS: Size = Size::Line(Count::Requests, 1);
        const fn sizes(lists: Count, keys: Count, extend: bool, verify: bool) -> [Option<Size>; 6] {
            [
                Some(Size::Line(lists, 1)),
                Some(Size::Line(keys, 0)),
                STARTS.only(extend),
                Size::Line(Count::Queries, 0).only(extend),
                STARTS.only(verify),
                Size::Long(Count::Mask).only(verify),
            ]
        }
        static DRAFT: [Option<Size>; 6] = sizes(Count::Queries, Count::QueryKeys, false, false);
        static DECODE: [Option<Size>; 6] = sizes(Count::Queries, Count::Keys, false, false);
        static EXTEND: [Option<Size>; 6] = sizes(Count::Requests, Count::Prefix, true, false);
        static VERIFY: [Option<Size>; 6] = sizes(Count::Requests, Count::Prefix, true, true);
        match phase {
            Phase::Draft { .. } => &DRAFT,
            Phase::Decode => &DECODE,
            Phase::Extend => &EXTEND,
            Phase::Verify => &VERIFY,
        }
    }
}

impl Format for Triton {
    fn name(&self) -> &'static str {
        "triton"
    }

    fn arrays(&self) -> &'static [Spec] {
        &ARRAYS
    }

    fn supports(&self, geometry: &Geometry) -> Result<()> {
        let lists = ("triton", "a smaller max_batch, topk or max_context_len, or native, would do");
        let b = geometry.limits().max_batch;
        indexable(lists, "per-branch kv_indices", geometry, Phase::Draft { step: 0 }, b, Count::QueryKeys)?;
        indexable(lists, "kv_indices", geometry, Phase::Decode, b, Count::Keys)
    }

    fn sizes(&self, _: &Geometry, phase: Phase) -> Vec<(usize, Size)> {
        present(Self::sizes_of(phase))
    }

    fn reads(&self, plan: &Plan, _: &Geometry, arrays: &Arrays, q: usize, out: &mut Vec<i32>) -> Result<Option<()>> {
        let reader = Reader { arrays, kernel: "triton" };
        let phase = plan.phase();
        if let Phase::Draft { .. } | Phase::Decode = phase {
            let list = reader.list::<i32, i64>("kv_indptr", "kv_indices", q)?;
            out.extend(list.iter().map(|s| s.slot()));
            return Ok(Some(()));
        }
        if q == 0 {
            reader.check_requests::<i64>(false)?;
        }
        let Some((i, j, n)) = reader.request::<i64>("qo_indptr", q) else { return Ok(Some(())) };
        let prefix = reader.list::<i32, i64>("kv_indptr", "kv_indices", i)?;
        // A caller whose kernel gets the new tokens by themselves leaves the array out: then the plan's slots count.
        let own: Vec<i32> = match reader.arrays.get("extend_slots") {
            Some(_) => {
                let all = reader.line::<i64>("extend_slots");
                reader.run("extend_slots", all, i, q - j, n)?.iter().map(|s| s.slot()).collect()
            }
            None => reader.run("out_slots", plan.out_slots(), i, q - j, n)?.to_vec(),
        };
        let keys = prefix.iter().map(|s| s.slot()).chain(own);
        if phase == Phase::Extend {
            out.extend(keys.take(prefix.len() + j + 1));
            return Ok(Some(()));
        }
        let mask = reader.mask_row::<i64>(i, j, prefix.len() + n)?;
        if let Some(at) = mask.iter().position(|&m| m > 1) {
            return Err(Error::Invalid {
                what: "custom_mask",
                got: format!("request {i}, query {j}, key {at}: {}", mask[at]),
                why: "bytes are 0 or 1".into(),
            });
        }
        out.extend(keys.zip(mask).filter(|&(_, &m)| m == 1).map(|(slot, _)| slot));
        Ok(Some(()))
    }
}
