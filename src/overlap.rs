//! The one rule for memory that an operation writes: no other operand of it lies there.
//!
//! Every operation that writes operands of a caller, on the host or on a device, says what it writes and what it reads as
//! [`Span`]s, and asks [`disjoint`] before it begins. Addresses of host and device are one address space, so a span does
//! not say where it lies.

use crate::error::{Error, Result};

/// The memory of one operand, from its first byte to its last; what lies in gaps of a strided one counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The operand in errors.
    what: &'static str,
    first: u64,
    /// One past the last byte; `first` where there is none.
    end: u64,
}

impl Span {
    /// `bytes` at `address`, of the operand `what`.
    pub fn new(what: &'static str, address: u64, bytes: u64) -> Self {
        Self { what, first: address, end: address.saturating_add(bytes) }
    }

    /// No memory.
    pub const NONE: Span = Span { what: "", first: 0, end: 0 };

    fn overlaps(&self, other: &Self) -> bool {
        // A span without a byte lies nowhere, also where its address is within another.
        self.first.max(other.first) < self.end.min(other.end)
    }
}

/// An operand whose memory is known; one that is left out has none.
pub trait Operand {
    /// Span of the operand's memory.
    fn span(&self) -> Span;
}

impl<O: Operand> Operand for Option<O> {
    fn span(&self) -> Span {
        self.as_ref().map_or(Span::NONE, Operand::span)
    }
}

impl<O: Operand + ?Sized> Operand for &O {
    fn span(&self) -> Span {
        (**self).span()
    }
}

/// Check that no operand of `written` overlaps another operand, of `written` or of `read`. Both come in groups.
///
/// # Errors
/// [`Error::Mismatch`] with the operand that would be written and the one that shares its memory.
pub fn disjoint(written: &[&[Span]], read: &[&[Span]]) -> Result<()> {
    let (all, read) = (|| written.iter().copied().flatten(), || read.iter().copied().flatten());
    for (i, span) in all().enumerate() {
        if let Some(other) = all().take(i).chain(read()).find(|other| span.overlaps(other)) {
            return Err(shared(span, other));
        }
    }
    Ok(())
}

#[cold]
fn shared(written: &Span, other: &Span) -> Error {
    let got = format!("memory that {} uses too", other.what);
    Error::Mismatch { operand: written.what, got, want: "an output that overlaps no other operand".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_that_two_operands_share_is_refused_where_one_of_them_is_written() {
        // Each pair of spans in a small memory, against the bytes that they have.
        let spans =
            |what| (0..7u64).flat_map(move |at| (0..4).map(move |bytes| (at, bytes, Span::new(what, at, bytes))));
        for (a, n, written) in spans("out") {
            for (b, m, other) in spans("x") {
                let shared = (a..a + n).any(|byte| (b..b + m).contains(&byte));
                type Lists<'a> = &'a [&'a [Span]];
                let cases: [(Lists<'_>, Lists<'_>); 3] =
                    [(&[&[written]], &[&[], &[other]]), (&[&[other, written]], &[]), (&[&[other], &[written]], &[])];
                for (all, read) in cases {
                    let told = disjoint(all, read).map_err(|e| e.to_string());
                    let want = "out: got memory that x uses too, want an output that overlaps no other operand";
                    assert_eq!(told, if shared { Err(want.into()) } else { Ok(()) }, "{written:?} {other:?}");
                }
                assert_eq!(disjoint(&[], &[&[written, other]]), Ok(()), "what is read may lie anywhere");
            }
        }
    }

    #[test]
    fn memory_at_the_end_of_the_address_space_and_absent_operands_are_no_trouble() {
        let last = Span::new("last", u64::MAX - 3, 8);
        assert!(disjoint(&[&[last]], &[&[Span::new("x", u64::MAX - 1, 1)]]).is_err());
        struct Nothing;
        impl Operand for Nothing {
            fn span(&self) -> Span {
                Span::new("there", 0, u64::MAX)
            }
        }
        assert!(disjoint(&[&[last]], &[&[None::<Nothing>.span(), None::<&Nothing>.span()]]).is_ok());
        assert!(disjoint(&[&[last]], &[&[Some(&Nothing).span()]]).is_err());
    }
}
