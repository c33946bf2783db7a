//! [`FlashInfer`]: slot lists and masks for FlashInfer's wrappers.

use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::plan::formats::reader::Reader;
use crate::plan::size::{Count, indexable, present};
use crate::plan::{Arrays, DType, Format, Phase, Plan, Size, Spec};

/// The form in which a verification's ancestors are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum MaskForm {
    /// In bytes and in bits.
    #[default]
    Both,
    /// `custom_mask` and `mask_indptr`, one byte an element.
    Bool,
    /// `packed_custom_mask` and `packed_mask_indptr`, one bit an element.
    Packed,
}

/// The arrays of FlashInfer's batch wrappers for paged KV (`BatchDecodeWithPagedKVCacheWrapper`,
/// `BatchPrefillWithPagedKVCacheWrapper`; read in flashinfer-python 0.7.2).
///
/// The pool is viewed as `[num_slots, 1, heads, head_dim]`, pages of one token, whatever its page size, so that both draft
/// layouts and any ancestors can be expressed.
///
/// | array | draft, decode | extend | verify |
/// |---|---|---|---|
/// | `kv_indptr` int32 | `[Q + 1]`, a list a query | `[B + 1]`, a list a request | the same |
/// | `kv_indices` int32 | prefix, ancestors, itself | prefix and chunk, causal | prefix and nodes |
/// | `kv_last_page_len` int32 | `[Q]` of 1 | `[B]` of 1 | the same |
/// | `qo_indptr` int32 | | `[B + 1]` | `[B + 1]` |
/// | `mask_indptr` int32 | | | `[B + 1]` starts in `custom_mask`, in elements |
/// | `custom_mask` bool | | | `[n, L + n]` of each request, row-major |
/// | `packed_mask_indptr` int32 | | | `[B + 1]` starts in `packed_custom_mask`, in bytes |
/// | `packed_custom_mask` uint8 | | | the same mask in bits, the first element lowest; requests padded to bytes |
///
/// In a draft step lists follow each other as `i*K + b`: with t + 1 keys of its own, branch b of request i starts at
/// `K * sum_{j<i} (L_j + t + 1) + b * (L_i + t + 1)`. Dead and padded queries have empty lists.
///
/// The kernel reads the packed mask by **byte** offsets: what `segment_packbits(mask, mask_indptr, "little")` returns. A
/// wrapper's `plan(custom_mask=...)` packs by itself; `plan(packed_custom_mask=...)` alone goes by element offsets and
/// is right for one request only, so the packed form is for the buffers of a wrapper in graph mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FlashInfer {
    /// Form in which ancestors are written.
    pub mask: MaskForm,
}

pub(in crate::plan) const ARRAYS: [Spec; 8] = [
    Spec::new("kv_indptr", DType::I32),
    Spec::new("kv_indices", DType::I32),
    Spec::optional("kv_last_page_len", DType::I32), // all 1: an engine may keep its own
    Spec::new("qo_indptr", DType::I32),
    Spec::optional("mask_indptr", DType::I32),
    Spec::optional("custom_mask", DType::Bool),
    Spec::optional("packed_mask_indptr", DType::I32),
    Spec::optional("packed_custom_mask", DType::U8),
];

impl FlashInfer {
    /// Size of each array of [`ARRAYS`]; `None` where the phase has no such array.
    pub(in crate::plan) fn sizes_of(self, phase: Phase) -> &'static [Option<Size>; 8] {
        const STARTS: Size = Size::Line(Count::Requests, 1);
        const fn sizes(lists: Count, keys: Count, qo: bool, bytes: bool, bits: bool) -> [Option<Size>; 8] {
            [
                Some(Size::Line(lists, 1)),
                Some(Size::Line(keys, 0)),
                Some(Size::Line(lists, 0)),
                STARTS.only(qo),
                STARTS.only(bytes),
                Size::Line(Count::Mask, 0).only(bytes),
                STARTS.only(bits),
                Size::Line(Count::MaskBytes, 0).only(bits),
            ]
        }
        static DRAFT: [Option<Size>; 8] = sizes(Count::Queries, Count::QueryKeys, false, false, false);
        static DECODE: [Option<Size>; 8] = sizes(Count::Queries, Count::Keys, false, false, false);
        static EXTEND: [Option<Size>; 8] = sizes(Count::Requests, Count::Keys, true, false, false);
        static BOTH: [Option<Size>; 8] = sizes(Count::Requests, Count::Keys, true, true, true);
        static BYTES: [Option<Size>; 8] = sizes(Count::Requests, Count::Keys, true, true, false);
        static BITS: [Option<Size>; 8] = sizes(Count::Requests, Count::Keys, true, false, true);
        match (phase, self.mask) {
            (Phase::Draft { .. }, _) => &DRAFT,
            (Phase::Decode, _) => &DECODE,
            (Phase::Extend, _) => &EXTEND,
            (Phase::Verify, MaskForm::Both) => &BOTH,
            (Phase::Verify, MaskForm::Bool) => &BYTES,
            (Phase::Verify, MaskForm::Packed) => &BITS,
        }
    }
}

impl Format for FlashInfer {
    fn name(&self) -> &'static str {
        "flashinfer"
    }

    fn arrays(&self) -> &'static [Spec] {
        &ARRAYS
    }

    fn supports(&self, geometry: &Geometry) -> Result<()> {
        let b = geometry.limits().max_batch;
        let lists = ("flashinfer", "a smaller max_batch, topk or max_context_len, or native, would do");
        let verify = |what, requests, count| indexable(lists, what, geometry, Phase::Verify, requests, count);
        indexable(lists, "per-branch kv_indices", geometry, Phase::Draft { step: 0 }, b, Count::QueryKeys)?;
        indexable(lists, "kv_indices", geometry, Phase::Decode, b, Count::Keys)?;
        verify("kv_indices", b, Count::Keys)?;
        verify("mask of a request", 1, Count::Mask)?;
        verify("packed_custom_mask", b, Count::MaskBytes)?;
        if self.mask == MaskForm::Packed {
            return Ok(());
        }
        let instead =
            "the packed mask alone, a smaller max_batch, draft_tokens or max_context_len, or native, would do";
        indexable(("flashinfer", instead), "custom_mask", geometry, Phase::Verify, b, Count::Mask)
    }

    fn sizes(&self, _: &Geometry, phase: Phase) -> Vec<(usize, Size)> {
        present(self.sizes_of(phase))
    }

    fn reads(&self, plan: &Plan, _: &Geometry, arrays: &Arrays, q: usize, out: &mut Vec<i32>) -> Result<Option<()>> {
        let reader = Reader { arrays, kernel: "flashinfer" };
        if q == 0 {
            check_last_pages(&reader)?;
        }
        match plan.phase() {
            Phase::Draft { .. } | Phase::Decode => out.extend(pages(&reader, q)?),
            phase => {
                if q == 0 {
                    reader.check_requests::<i32>(true)?;
                }
                let Some((i, j, n)) = reader.request::<i32>("qo_indptr", q) else { return Ok(Some(())) };
                let list = pages(&reader, i)?;
                if phase == Phase::Extend {
                    // Causal: the last query sees all, each one before it one key less.
                    out.extend(&list[..(list.len() + j + 1).saturating_sub(n).min(list.len())]);
                    return Ok(Some(()));
                }
                for (at, &slot) in list.iter().enumerate() {
                    if allowed(&reader, i, j, at, list.len())? {
                        out.push(slot);
                    }
                }
            }
        }
        Ok(Some(()))
    }
}

/// Slots of list `i`: pages of one token.
fn pages<'a>(reader: &Reader<'a>, i: usize) -> Result<&'a [i32]> {
    reader.list::<i32, i32>("kv_indptr", "kv_indices", i)
}

/// Every list's last page is full, an empty list's too: the kernel takes a list for `pages - 1 + last` tokens.
fn check_last_pages(reader: &Reader<'_>) -> Result<()> {
    let Some(lens) = reader.arrays.get("kv_last_page_len") else { return Ok(()) }; // an engine's own
    let lists = reader.line::<i32>("kv_indptr").len().saturating_sub(1);
    let wrong = |got: String, why: String| Err(Error::Invalid { what: "kv_last_page_len", got, why });
    if lens.extent.elements() != lists as u64 {
        return wrong(format!("{} elements", lens.extent.elements()), format!("there are {lists} lists"));
    }
    match reader.line::<i32>("kv_last_page_len").iter().enumerate().find(|&(_, &len)| len != 1) {
        Some((i, len)) => wrong(format!("{len} of list {i}"), "a page has one token".into()),
        None => Ok(()),
    }
}

/// True if query `j` of request `i` attends key `at` of `keys`, by each form of the mask that there is.
fn allowed(reader: &Reader<'_>, i: usize, j: usize, at: usize, keys: usize) -> Result<bool> {
    let has = |name| reader.arrays.get(name).is_some();
    let (bytes, bits) = (has("custom_mask"), has("packed_custom_mask"));
    let byte = if bytes { Some(reader.mask_row::<i32>(i, j, keys)?[at]) } else { None };
    let bit = if bits { Some(reader.mask_bit(i, j * keys + at)?) } else { None };
    match (byte, bit) {
        (None, None) => Err(Error::Mismatch {
            operand: "custom_mask",
            got: "no array for the tree's mask".into(),
            want: "one of its forms".into(),
        }),
        (Some(byte), bit) if byte > 1 || bit.is_some_and(|bit| bit != (byte == 1)) => Err(Error::Invalid {
            what: "custom_mask",
            got: format!("request {i}, query {j}, key {at}: byte {byte}, bit {bit:?}"),
            why: "bytes are 0 or 1, and bits agree with them".into(),
        }),
        (byte, bit) => Ok(byte == Some(1) || bit == Some(true)),
    }
}
