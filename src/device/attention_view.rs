//! Typed views of what attention reads and writes.

use super::params::attention::ATTENTION_SPLIT;
use super::view::{DeviceSlice, device_mismatch};
use crate::bounds::PageSize;
use crate::error::{Error, Result, in_range};
use crate::overlap::{Operand, Span};

/// Largest batch of one launch: each block keeps a table of its requests.
pub(crate) const MAX_ATTENTION_REQUESTS: usize = 1024;
/// Largest group: query heads of a key and value head.
pub(crate) const MAX_GROUP: u32 = 64;
/// Most keys of a request: the kernel rounds positions up to whole splits, in int32.
const MAX_KEYS: i32 = i32::MAX - ATTENTION_SPLIT;
/// Bits of a query's mask.
const MASK_BITS: u32 = 64;

/// A 16-bit floating-point type of keys, values and queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HalfType {
    /// bfloat16.
    Bf16,
    /// float16.
    F16,
}

/// Keys and values of one layer, each `[num_slots, kv_heads, head_dim]`, contiguous.
#[derive(Debug, Clone, Copy)]
pub struct KvLayerView {
    k: u64,
    v: u64,
    /// At least 1; fits `i32`.
    num_slots: i32,
    /// At least 1.
    kv_heads: u32,
    /// 64, 96, 128 or 256.
    head_dim: u32,
    element: HalfType,
    device: i32,
}

impl KvLayerView {
    /// View planes at `k` and `v`, aligned to 16 bytes.
    ///
    /// # Safety
    /// Both arrays are allocated on `device` and stay so until all work launched with the view has finished; nothing writes
    /// to slots that a launch reads while it runs.
    pub unsafe fn from_raw(k: u64, v: u64, shape: [u64; 3], element: HalfType, device: i32) -> Result<Self> {
        let [num_slots, kv_heads, head_dim] = shape;
        in_range("cache num_slots", num_slots, 1, i128::from(i32::MAX))?;
        in_range("cache kv_heads", kv_heads, 1, i128::from(u16::MAX))?;
        if !matches!(head_dim, 64 | 96 | 128 | 256) {
            return Err(Error::Invalid {
                what: "cache head_dim",
                got: head_dim.to_string(),
                why: "attention on a GPU takes 64, 96, 128 or 256".into(),
            });
        }
        for (operand, address) in [("keys", k), ("values", v)] {
            if address == 0 || !address.is_multiple_of(16) {
                return Err(Error::Mismatch {
                    operand,
                    got: format!("device address {address:#x}"),
                    want: "an address aligned to 16 bytes".into(),
                });
            }
        }
        let (kv_heads, head_dim) = (kv_heads as u32, head_dim as u32); // checked above
        Ok(Self { k, v, num_slots: num_slots as i32, kv_heads, head_dim, element, device })
    }

    /// Addresses of keys and values.
    pub fn addresses(&self) -> (u64, u64) {
        (self.k, self.v)
    }

    /// Slots of a plane.
    pub fn num_slots(&self) -> i32 {
        self.num_slots
    }

    /// Key and value heads.
    pub fn kv_heads(&self) -> u32 {
        self.kv_heads
    }

    /// Elements of a head.
    pub fn head_dim(&self) -> u32 {
        self.head_dim
    }

    /// The memory of keys and of values.
    pub fn spans(&self) -> [Span; 2] {
        let bytes = self.num_slots as u64 * u64::from(self.kv_heads) * u64::from(self.head_dim) * 2;
        [self.k, self.v].map(|plane| Span::new("cache", plane, bytes))
    }

    /// Element type.
    pub fn element(&self) -> HalfType {
        self.element
    }

    /// CUDA device ordinal.
    pub fn device(&self) -> i32 {
        self.device
    }
}

/// Operands by which the rows of a batch attend, in the native format: page table in place, committed lengths, and one
/// mask word for each query. The kernel checks the values, since only the device can read them.
///
/// Query j of request i, which is query `starts[i] + j` of the batch, attends to the first `lens[i]` positions of its row of
/// the table, and then
/// * without a mask: causally, to positions `lens[i] ..= lens[i] + j` (decode and chunked extend);
/// * with one: to positions `lens[i] + b` of each bit b (a tree's node: itself and its ancestors; a draft step: the slots
///   of its earlier steps and its own, by branch and step).
///
/// With `first_pages` it attends to no position before page `first_pages[i]` of its row: a draft model that began in the
/// midst of a request never wrote those. All lengths and positions stay what they are.
#[derive(Debug, Clone, Copy)]
pub struct AttentionBatch {
    table: DeviceSlice<i32>,
    /// Pages of a row of the table; at least 1, fits `i32`.
    width: u32,
    page: PageSize,
    rows: Option<DeviceSlice<i32>>,
    lens: DeviceSlice<i32>,
    starts: DeviceSlice<i32>,
    mask: Option<DeviceSlice<u64>>,
    first_pages: Option<DeviceSlice<i32>>,
    /// Branches and steps of a draft's slots; their product is at most 64.
    draft: Option<(u32, u32)>,
}

impl AttentionBatch {
    /// Check that the arrays fit each other: `table` is `[table rows, width]`, `lens`, `rows` and `first_pages` are `[requests]`
    /// (without `rows`, request i has row i), `starts` is `[requests + 1]`, `mask` is `[queries]`. `draft` gives (K, S) of a draft
    /// step, whose mask bits are `branch * S + step`.
    #[allow(clippy::too_many_arguments, reason = "the arrays of one format, checked together")]
    pub fn new(
        table: DeviceSlice<i32>,
        width: u32,
        page: PageSize,
        rows: Option<DeviceSlice<i32>>,
        lens: DeviceSlice<i32>,
        starts: DeviceSlice<i32>,
        mask: Option<DeviceSlice<u64>>,
        first_pages: Option<DeviceSlice<i32>>,
        draft: Option<(u32, u32)>,
    ) -> Result<Self> {
        let requests = lens.len();
        in_range("requests", requests as u64, 0, MAX_ATTENTION_REQUESTS as i128)?;
        in_range("page table width", width, 1, i128::from(i32::MAX))?;
        in_range("page table rows", table.len() as u64 / u64::from(width), 0, i128::from(i32::MAX))?;
        let fits = |operand, got: usize, want: usize, why: &str| match got == want {
            true => Ok(()),
            false => Err(Error::Mismatch { operand, got: format!("{got} elements"), want: format!("{want}, {why}") }),
        };
        fits("page table", table.len() % width as usize, 0, "a whole number of rows")?;
        fits("starts", starts.len(), requests + 1, "one more than lens has")?;
        let table_rows = table.len() / width as usize;
        match &rows {
            Some(rows) => fits("rows", rows.len(), requests, "as many as lens has")?,
            None => in_range("requests, without rows", requests as u64, 0, table_rows as i128).map(|_| ())?,
        }
        if let Some(pages) = &first_pages {
            fits("first pages", pages.len(), requests, "as many as lens has")?;
        }
        if let Some((topk, steps)) = draft {
            in_range("draft branches", topk, 1, MASK_BITS.into())?;
            in_range("draft steps", steps, 1, MASK_BITS.into())?;
            in_range("draft slots", topk * steps, 1, MASK_BITS.into())?;
            if mask.is_none() {
                return Err(Error::Invalid {
                    what: "mask",
                    got: "none".into(),
                    why: "a draft step needs one: its slots are not at their logical positions".into(),
                });
            }
        }
        let on = lens.device();
        let devices = [("page table", table.device()), ("starts", starts.device())];
        let optional = [
            ("rows", rows.map(|r| r.device())),
            ("mask", mask.map(|m| m.device())),
            ("first pages", first_pages.map(|p| p.device())),
        ];
        let optional = optional.into_iter().filter_map(|(name, device)| Some((name, device?)));
        for (operand, device) in devices.into_iter().chain(optional) {
            if device != on {
                return Err(device_mismatch(operand, device, on, "lens"));
            }
        }
        Ok(Self { table, width, page, rows, lens, starts, mask, first_pages, draft })
    }

    /// Requests, dead lanes of the bucket included.
    pub fn requests(&self) -> u32 {
        self.lens.len() as u32 // at most MAX_ATTENTION_REQUESTS
    }

    /// The page table.
    pub fn table(&self) -> &DeviceSlice<i32> {
        &self.table
    }

    /// Pages of a row of the table.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Rows of the table.
    pub fn table_rows(&self) -> i32 {
        (self.table.len() / self.width as usize) as i32 // `new` checked that it fits
    }

    /// Tokens that a row of the table can place, and that the kernel can count.
    pub fn capacity(&self) -> i32 {
        (u64::from(self.width) * u64::from(self.page.get())).min(MAX_KEYS as u64) as i32
    }

    /// Tokens of a page.
    pub fn page(&self) -> PageSize {
        self.page
    }

    /// Row of the table of each request.
    pub fn rows(&self) -> Option<&DeviceSlice<i32>> {
        self.rows.as_ref()
    }

    /// Committed lengths.
    pub fn lens(&self) -> &DeviceSlice<i32> {
        &self.lens
    }

    /// First query of each request, and the end.
    pub fn starts(&self) -> &DeviceSlice<i32> {
        &self.starts
    }

    /// One word for each query.
    pub fn mask(&self) -> Option<&DeviceSlice<u64>> {
        self.mask.as_ref()
    }

    /// Column of the table at which each request's keys begin.
    pub fn first_pages(&self) -> Option<&DeviceSlice<i32>> {
        self.first_pages.as_ref()
    }

    /// Branches and steps of a draft's slots.
    pub fn draft(&self) -> Option<(u32, u32)> {
        self.draft
    }

    /// CUDA device ordinal.
    pub fn device(&self) -> i32 {
        self.lens.device()
    }
}

/// Destination of attention.
#[derive(Debug, Clone, Copy)]
pub enum AttentionOut {
    /// Elements of the queries' type.
    Half(DeviceSlice<u16>),
    /// The `f32` values before they are rounded to it.
    F32(DeviceSlice<f32>),
}

impl AttentionOut {
    /// Address, elements, device.
    pub(super) fn parts(&self) -> (u64, usize, i32) {
        match self {
            Self::Half(s) => (s.address(), s.len(), s.device()),
            Self::F32(s) => (s.address(), s.len(), s.device()),
        }
    }
}

impl Operand for AttentionOut {
    fn span(&self) -> Span {
        match self {
            Self::Half(s) => s.span(),
            Self::F32(s) => s.span(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ints(len: usize, device: i32) -> DeviceSlice<i32> {
        // SAFETY: nothing is launched with it.
        unsafe { DeviceSlice::from_raw("ints", 64, len, device) }.unwrap()
    }

    fn words(len: usize) -> DeviceSlice<u64> {
        // SAFETY: nothing is launched with it.
        unsafe { DeviceSlice::from_raw("mask", 64, len, 0) }.unwrap()
    }

    fn layer(k: u64, shape: [u64; 3]) -> Result<KvLayerView> {
        // SAFETY: nothing is launched with it.
        unsafe { KvLayerView::from_raw(k, 4096, shape, HalfType::Bf16, 0) }
    }

    #[test]
    fn layers_that_no_kernel_reads_are_refused() {
        assert_eq!(layer(64, [100, 8, 128]).unwrap().kv_heads(), 8);
        let text = |l: Result<KvLayerView>| l.unwrap_err().to_string();
        assert!(text(layer(64, [100, 8, 80])).contains("80"));
        assert!(text(layer(64, [0, 8, 128])).contains("num_slots = 0"));
        assert!(text(layer(64, [1 << 31, 8, 128])).contains("num_slots = 2147483648"));
        assert!(text(layer(72, [100, 8, 128])).contains("keys: got device address 0x48"));
        assert!(text(layer(0, [100, 8, 128])).contains("0x0"));
    }

    #[test]
    fn arrays_that_do_not_fit_each_other_are_refused() {
        let page = PageSize::new(16).unwrap();
        let batch = |table, width, rows, lens, starts, mask, draft| {
            AttentionBatch::new(ints(table, 0), width, page, rows, ints(lens, 0), ints(starts, 0), mask, None, draft)
        };
        let begun =
            |pages| AttentionBatch::new(ints(40, 0), 10, page, None, ints(4, 0), ints(5, 0), None, Some(pages), None);
        let good = batch(40, 10, None, 4, 5, None, None).unwrap();
        assert_eq!((good.requests(), good.table_rows(), good.capacity()), (4, 4, 160));
        assert_eq!(batch(1 << 27, 1 << 27, None, 1, 2, None, None).unwrap().capacity(), i32::MAX - 1024);
        assert!(batch(40, 1 << 28, None, 0, 1, None, None).unwrap_err().to_string().contains("whole number"));
        let text = |b: Result<AttentionBatch>| b.unwrap_err().to_string();
        assert!(text(batch(41, 10, None, 4, 5, None, None)).contains("whole number of rows"));
        assert!(text(batch(40, 10, None, 5, 6, None, None)).contains("requests, without rows = 5"));
        assert!(batch(40, 10, Some(ints(5, 0)), 5, 6, None, None).is_ok());
        assert!(text(batch(40, 10, Some(ints(4, 0)), 5, 6, None, None)).contains("rows: got 4 elements, want 5"));
        assert!(text(batch(40, 10, None, 4, 4, None, None)).contains("starts: got 4 elements, want 5"));
        assert!(text(batch(40, 0, None, 4, 5, None, None)).contains("width = 0"));
        assert!(text(batch(1 << 20, 1, None, 1025, 1026, None, None)).contains("requests = 1025"));
        assert!(text(batch(40, 10, None, 4, 5, None, Some((8, 6)))).contains("draft step needs one"));
        assert!(text(batch(40, 10, None, 4, 5, Some(words(9)), Some((11, 6)))).contains("draft slots = 66"));
        assert!(text(batch(40, 10, Some(ints(4, 1)), 4, 5, None, None)).contains("rows: got a tensor on cuda:1"));
        assert_eq!(begun(ints(4, 0)).unwrap().first_pages().map(DeviceSlice::len), Some(4));
        assert!(text(begun(ints(5, 0))).contains("first pages: got 5 elements, want 4"));
        assert!(text(begun(ints(4, 1))).contains("first pages: got a tensor on cuda:1"));
    }
}
