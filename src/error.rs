//! The one error type of the core. Each variant carries its operands (what, got, limit, where), so that a message
//! can name them and `py` can map each kind to its own Python exception by an explicit table.

/// `Result` with the core's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong in the core. Construction and planning errors are raised before anything is
/// allocated or written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A scalar argument outside its declared range.
    #[error("{what} = {got} is outside {min}..={max}")]
    OutOfRange {
        /// Name of the operand.
        what: &'static str,
        /// The value that was given.
        got: i128,
        /// Smallest allowed value.
        min: i128,
        /// Largest allowed value.
        max: i128,
    },
    /// An argument that is in range but cannot be honoured (not a power of two, an unsupported combination, ...).
    #[error("{what} = {got}: {why}")]
    Invalid {
        /// Name of the operand.
        what: &'static str,
        /// The value that was given, printed.
        got: String,
        /// Reason why it is refused, and an alternative that would work.
        why: String,
    },
    /// A size that does not fit the integer type that indexes it.
    #[error("{what} = {expr} does not fit {ty} indexing (limit {limit})")]
    Overflow {
        /// Name of the size.
        what: &'static str,
        /// The arithmetic with its numbers, such as `64 * 8 * 131072`.
        expr: String,
        /// Integer type.
        ty: &'static str,
        /// Largest value of that type.
        limit: u64,
    },
    /// A buffer is smaller than what must be written to it.
    #[error("{what}: need {need} elements, have {have}; {hint}")]
    Capacity {
        /// Name of the buffer.
        what: &'static str,
        /// Elements needed.
        need: u64,
        /// Elements there are.
        have: u64,
        /// The configuration that asks for this size.
        hint: String,
    },
    /// The pool has too few free pages; nothing was changed.
    #[error("KV pool exhausted: need {need} pages, {free} of {total} are free")]
    PoolExhausted {
        /// Pages asked for.
        need: u64,
        /// Pages free (after evicting what the prefix cache alone held).
        free: u64,
        /// Pages of the pool, without the sink.
        total: u64,
    },
    /// The table of sequences is full; nothing was changed.
    #[error("sequence table full: {limit} sequences are live (max_batch or max_seqs)")]
    TooManySequences {
        /// Declared limit.
        limit: u64,
    },
    /// A handle to a sequence or lease that no longer exists.
    #[error("{what} {id} is not live: {why}")]
    Dead {
        /// `sequence` or `lease`.
        what: &'static str,
        /// Printed handle.
        id: String,
        /// Event by which it ended.
        why: String,
    },
    /// A page freed more often than it is owned; nothing was changed.
    #[error("double free of page {page}: {owners} owner(s), {frees} free(s) asked; history: {history}")]
    DoubleFree {
        /// Page.
        page: u32,
        /// References the page has.
        owners: u32,
        /// References the call would drop.
        frees: u32,
        /// The page's last events.
        history: String,
    },
    /// The ledger disagrees with the free list or a sequence: a bug in specrs or in the caller's use of raw pages.
    #[error("pool audit failed: {what}; history: {history}")]
    Audit {
        /// The two things that disagree, with both values.
        what: String,
        /// Events of the page concerned.
        history: String,
    },
    /// A computed index is outside the buffer it indexes; the access was skipped.
    #[error(
        "{kernel}: index {index} into {buffer} is outside 0..{bound} (request {request}, step {step}){}",
        remedy(buffer)
    )]
    OutOfBounds {
        /// Kernel or planner phase.
        kernel: &'static str,
        /// Buffer.
        buffer: &'static str,
        /// Request row of the batch, -1 where none applies.
        request: i64,
        /// Branch, step or node, -1 where none applies.
        step: i64,
        /// The index.
        index: i64,
        /// One past the largest allowed index.
        bound: i64,
    },
    /// NaN, or a row with no finite value, where scores are needed.
    #[error("{what}: {value} at request {request}, row {row}, position {position}, index {index}")]
    NonFinite {
        /// Operand, such as `target logits`.
        what: &'static str,
        /// `NaN`, `+inf` or `all -inf`.
        value: &'static str,
        /// Request row of the batch, -1 where none applies.
        request: i64,
        /// Row of the operand, -1 where none applies.
        row: i64,
        /// Absolute position of the token that could not be drawn, -1 where none applies.
        position: i64,
        /// Column of the first offending value.
        index: i64,
    },
    /// A grammar that cannot be honoured: malformed, too large, or not for this vocabulary.
    #[error("{what}: {why}")]
    Grammar {
        /// The part that is meant, such as `json`.
        what: &'static str,
        /// Reason.
        why: String,
    },
    /// A request's grammar has no next token, or following it met a limit.
    #[error("grammar: {why} (request {request}, row {row}, position {position})")]
    GrammarFailed {
        /// Reason.
        why: String,
        /// Request row of the batch, -1 where none applies.
        request: i64,
        /// Row of logits, -1 where none applies.
        row: i64,
        /// Absolute position of the token that could not be drawn, -1 where none applies.
        position: i64,
    },
    /// Shapes, strides or element types of operands that do not fit each other.
    #[error("{operand}: got {got}, want {want}")]
    Mismatch {
        /// Operand.
        operand: &'static str,
        /// The value that was given.
        got: String,
        /// The value that is needed.
        want: String,
    },
    /// A view of memory that is written again and again (static buffers, a graph's output) was read after a later
    /// write.
    #[error(
        "{what} is stale: it holds write {held} of its memory, which write {current} has overwritten; read a view \
             before the next write, or copy it"
    )]
    StaleOutput {
        /// The view.
        what: String,
        /// Generation that the view was made of.
        held: u64,
        /// Generation of the memory now.
        current: u64,
    },
    /// Work could not be captured into a graph; nothing of the graph is left, and its stream works as before.
    #[error("graph capture: {call}: {why}")]
    GraphCapture {
        /// Call that failed, or that found the node.
        call: &'static str,
        /// Type of the node that may not be there; empty where it is none.
        node: String,
        /// Path to that node, from the outermost graph in; empty where it is none.
        path: String,
        /// Reason.
        why: String,
    },
    /// A device has too little free memory; nothing was allocated.
    #[error("device memory of cuda:{device}: {what} needs {need} bytes, {have} are free; {hint}")]
    DeviceMemory {
        /// The thing that was to be allocated.
        what: String,
        /// Ordinal of the device.
        device: i32,
        /// Bytes needed.
        need: u64,
        /// Bytes free.
        have: u64,
        /// A size or an option that would fit.
        hint: String,
    },
    /// The CUDA driver, or a library of CUDA, refused a call.
    #[error("CUDA: {call} failed: {message}")]
    Cuda {
        /// Call.
        call: &'static str,
        /// The library's message, with its code.
        message: String,
    },
    /// CUDA is asked for and not there.
    #[error("CUDA is unavailable: {0}")]
    CudaUnavailable(String),
}

/// A remedy for an index that the caller can do something about: the end of the message.
fn remedy(buffer: &str) -> &'static str {
    match buffer {
        "allocated positions" => "; reserve them first (`Pool.reserve`)",
        _ => "",
    }
}

/// Entries of a list that an error shows.
const SHOWN: usize = 16;

/// A list of a caller's, as an error shows it: its first entries, and how many there are.
pub(crate) fn listed<T: std::fmt::Debug>(list: &[T]) -> String {
    match list.get(..SHOWN) {
        Some(first) if list.len() > SHOWN => {
            let shown = format!("{first:?}");
            format!("{}, ...] of {} entries", &shown[..shown.len() - 1], list.len())
        }
        _ => format!("{list:?}"),
    }
}

/// Check `min <= got <= max` for an operand named `what`.
pub fn in_range<T: Copy + Into<i128>>(what: &'static str, got: T, min: i128, max: i128) -> Result<T> {
    let g = got.into();
    if g < min || g > max { Err(Error::OutOfRange { what, got: g, min, max }) } else { Ok(got) }
}

/// Check that an operand has the length, or another number, that is needed.
#[inline]
pub(crate) fn same_length(operand: &'static str, got: usize, want: usize) -> Result<()> {
    if got == want { Ok(()) } else { Err(other_length(operand, got, want)) }
}

#[cold]
fn other_length(operand: &'static str, got: usize, want: usize) -> Error {
    Error::Mismatch { operand, got: got.to_string(), want: want.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_shown_whole_where_it_is_short() {
        assert_eq!(listed::<i32>(&[]), "[]");
        assert_eq!(listed(&[1, -2]), "[1, -2]");
        assert_eq!(listed(&[7; SHOWN]), format!("{:?}", [7; SHOWN]));
        let long: Vec<u32> = (0..1_000_000).collect();
        let text = listed(&long);
        assert!(text.starts_with("[0, 1, 2, ") && text.ends_with("14, 15, ...] of 1000000 entries"), "{text}");
        assert_eq!(listed(&vec![vec![1]; 17]).matches("[1]").count(), SHOWN);
    }

    #[test]
    fn an_index_behind_what_is_allocated_names_the_remedy() {
        let outside = |buffer| {
            Error::OutOfBounds { kernel: "decode", buffer, request: 0, step: -1, index: 9, bound: 0 }.to_string()
        };
        let text = "decode: index 9 into allocated positions is outside 0..0 (request 0, step -1); reserve them first (`Pool.reserve`)";
        assert_eq!(outside("allocated positions"), text);
        assert!(outside("cache (slot)").ends_with("(request 0, step -1)"));
    }
}
