//! Places of draft KV behind a request's committed prefix: the dense and the holey layout.

use std::fmt;

use crate::bounds::{PageSize, add, mul};
use crate::error::{Result, in_range};
use crate::geometry::TreeShape;

/// Layout of the draft region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Branch b, step s at row position `L + b*S + s`. For kernels that read by slot.
    Dense,
    /// Each branch starts on a page of its own, at the prefix's offset in its tail page; the slots before it are
    /// holes that must hold a copy of the prefix's tail. For kernels that read whole pages. With K = 1 or P = 1 it
    /// coincides with [`Layout::Dense`].
    Holey,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Layout {
    /// Name by which users choose the layout.
    pub fn name(self) -> &'static str {
        match self {
            Layout::Dense => "dense",
            Layout::Holey => "holey",
        }
    }

    /// The layout that is in force: holey only where it differs from dense (`K > 1` and `P > 1`).
    pub fn effective(self, shape: TreeShape, page: PageSize) -> Layout {
        if shape.topk() > 1 && page.get() > 1 { self } else { Layout::Dense }
    }
}

/// A run of row positions whose KV is copied: the prefix's tail into the hole before a branch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TailCopy {
    /// First source position (`base`).
    pub src: u32,
    /// First destination position.
    pub dst: u32,
    /// Positions copied (`r`); never 0.
    pub len: u32,
}

/// The draft region of one request whose committed length is known.
#[derive(Debug, Clone, Copy)]
pub struct DraftRegion {
    pub(super) layout: Layout, // always effective
    pub(super) shape: TreeShape,
    pub(super) page: PageSize,
    pub(super) committed: u32,
}

impl DraftRegion {
    /// The layout in force.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// `L mod P`: tokens in the prefix's tail page.
    pub fn remainder(&self) -> u32 {
        self.page.offset(self.committed)
    }

    /// `L - r`: first position of the prefix's tail page.
    pub fn base(&self) -> u32 {
        self.page.base(self.committed)
    }

    /// Pages per branch, `n = ceil((r + S) / P)`.
    pub fn pages_per_branch(&self) -> u32 {
        self.page.pages_for(self.remainder() + self.shape.steps())
    }

    /// Row positions from a step of one branch to the same step of the next: S (dense) or `n*P` (holey).
    pub fn stride(&self) -> u32 {
        match self.layout {
            Layout::Dense => self.shape.steps(),
            Layout::Holey => self.pages_per_branch() * self.page.get(),
        }
    }

    /// Row position of branch `b`, step `s`.
    ///
    /// # Errors
    /// An error if `b >= K`, `s >= S` or the position exceeds `u32`.
    pub fn pos(&self, b: u32, s: u32) -> Result<u32> {
        in_range("branch", b, 0, self.shape.topk() as i128 - 1)?;
        in_range("step", s, 0, self.shape.steps() as i128 - 1)?;
        add("draft position", self.branch_start(b)?, s)
    }

    /// Row position of the first draft slot of branch `b`.
    fn branch_start(&self, b: u32) -> Result<u32> {
        const WHAT: &str = "draft position";
        add(WHAT, self.committed, mul(WHAT, b, self.stride())?)
    }

    /// One past the last row position of the region (the row needs this many).
    pub fn end(&self) -> Result<u32> {
        const WHAT: &str = "draft region end";
        let start = match self.layout {
            Layout::Dense => self.committed,
            Layout::Holey => self.base(),
        };
        add(WHAT, start, mul(WHAT, self.shape.topk(), self.stride())?)
    }

    /// The copy that fills the hole before branch `b`; `None` for branch 0, for `r = 0`, and in the dense layout.
    pub fn hole(&self, b: u32) -> Result<Option<TailCopy>> {
        let r = self.remainder();
        if self.layout == Layout::Dense || b == 0 || r == 0 {
            return Ok(None);
        }
        Ok(Some(TailCopy { src: self.base(), dst: self.pos(b, 0)? - r, len: r }))
    }
}
