//! Arrays read back by their indices alone, as a kernel does. The debug audit compares the result with the plan.

use crate::error::{Error, Result};
use crate::plan::Arrays;
use crate::plan::arrays::Element;
use crate::plan::formats::index::Index;

/// Reads arrays back as a kernel indexes them: nothing is taken from the plan.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a> {
    pub(super) arrays: &'a Arrays,
    pub(super) kernel: &'static str,
}

impl<'a> Reader<'a> {
    /// An array of the phase, empty where there is none.
    pub(super) fn line<T: Element>(&self, name: &'static str) -> &'a [T] {
        self.arrays.line(name)
    }

    #[cold]
    fn outside(&self, buffer: &'static str, list: usize, index: usize, bound: usize) -> Error {
        let (request, index, bound) = (list as i64, index as i64, bound as i64);
        Error::OutOfBounds { kernel: self.kernel, buffer, request, step: -1, index, bound }
    }

    /// `of[from..from + n]`, of list `i`.
    pub(super) fn run<T>(&self, name: &'static str, of: &'a [T], i: usize, from: usize, n: usize) -> Result<&'a [T]> {
        let end = from.saturating_add(n);
        of.get(from..end).ok_or_else(|| self.outside(name, i, end, of.len()))
    }

    /// List `i` of those that start at `indptr` in the array `name`.
    pub(super) fn list<P: Index, T: Element>(
        &self,
        starts: &'static str,
        name: &'static str,
        i: usize,
    ) -> Result<&'a [T]> {
        let (indptr, all) = (self.line::<P>(starts), self.line::<T>(name));
        let (Some(first), Some(end)) = (indptr.get(i), indptr.get(i + 1)) else {
            return Err(self.outside(starts, i, i + 1, indptr.len()));
        };
        let (first, end) = (first.position(), end.position());
        all.get(first..end).ok_or_else(|| self.outside(name, i, end, all.len()))
    }

    /// The request of query `q`, the query's number in it, and the queries it has; `None` for a padded query.
    pub(super) fn request<P: Index>(&self, starts: &'static str, q: usize) -> Option<(usize, usize, usize)> {
        let indptr = self.line::<P>(starts);
        let i = indptr.partition_point(|first| first.position() <= q).checked_sub(1)?;
        let (first, end) = (indptr.get(i)?.position(), indptr.get(i + 1)?.position());
        Some((i, q - first, end.checked_sub(first)?))
    }

    /// Row `j` of the mask of request `i`, of `keys` elements, one a byte.
    pub(super) fn mask_row<P: Index>(&self, i: usize, j: usize, keys: usize) -> Result<&'a [u8]> {
        let (indptr, all) = (self.line::<P>("mask_indptr"), self.line::<u8>("custom_mask"));
        let Some(first) = indptr.get(i) else {
            return Err(self.outside("mask_indptr", i, i, indptr.len()));
        };
        self.run("custom_mask", all, i, first.position().saturating_add(j * keys), keys)
    }

    /// The element of the packed mask of request `i` at `at`, counted from the request's first.
    pub(super) fn mask_bit(&self, i: usize, at: usize) -> Result<bool> {
        let (indptr, all) = (self.line::<i32>("packed_mask_indptr"), self.line::<u8>("packed_custom_mask"));
        let Some(first) = indptr.get(i) else {
            return Err(self.outside("packed_mask_indptr", i, i, indptr.len()));
        };
        let byte = first.position().saturating_add(at / 8);
        match all.get(byte) {
            Some(byte) => Ok(byte >> (at % 8) & 1 == 1),
            None => Err(self.outside("packed_custom_mask", i, byte, all.len())),
        }
    }

    /// Check what no single query shows: the lists of requests fill `kv_indices` and those of requests without queries
    /// are empty, and masks are as long as their requests' queries and keys ask for. `own` says whether a list names
    /// the request's own tokens too.
    pub(super) fn check_requests<P: Index>(&self, own: bool) -> Result<()> {
        let (qo, kv) = (self.line::<P>("qo_indptr"), self.line::<i32>("kv_indptr"));
        let slots = self.arrays.get("kv_indices").map_or(0, |a| a.extent.elements());
        let wrong = |what: &'static str, i: usize, got: String, want: String| {
            let got = format!("{}: request {i} has {got}", self.kernel);
            Err(Error::Invalid { what, got, why: format!("it must have {want}") })
        };
        if qo.len() != kv.len() {
            return wrong("kv_indptr", 0, format!("{} starts", kv.len()), format!("{}, as qo_indptr", qo.len()));
        }
        let (mut bytes, mut bits) = (0, 0);
        for i in 0..qo.len().saturating_sub(1) {
            let n = qo[i + 1].position().saturating_sub(qo[i].position());
            let list = kv[i + 1].position().saturating_sub(kv[i].position());
            if n == 0 && list != 0 {
                return wrong("kv_indptr", i, format!("no queries and {list} slots"), "none".into());
            }
            if own && list < n {
                return wrong("kv_indptr", i, format!("{n} queries and {list} slots"), "the queries' own, too".into());
            }
            let elements = n * if own { list } else { list + n };
            bytes += elements;
            bits += elements.div_ceil(8);
            for (what, got, want) in [
                ("mask_indptr", self.line::<P>("mask_indptr").get(i + 1).map(|s| s.position()), bytes),
                ("packed_mask_indptr", self.line::<i32>("packed_mask_indptr").get(i + 1).map(|s| s.position()), bits),
            ] {
                if got.is_some_and(|got| got != want) {
                    return wrong(what, i, format!("its end at {got:?}"), format!("it at {want}"));
                }
            }
        }
        match kv.last() {
            Some(end) if end.position() as u64 != slots => {
                wrong("kv_indptr", kv.len() - 1, format!("its start at {end:?}"), format!("it at {slots}"))
            }
            _ => Ok(()),
        }
    }
}
