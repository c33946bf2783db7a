//! The tensors of one call, taken together.
//!
//! A tensor is imported by code of its own class. That code may be anybody's, and it can resize the storage of a tensor
//! that was imported before. So a call first imports all of its tensors. If one of them, or of the tensors that it
//! holds on loan, has such code, the call then looks once more at each tensor that can be resized, last at those whose
//! look runs no foreign code. Only then it compares written tensors with all others, by [`crate::overlap`].
//!
//! ```text
//! let ([x, weight], [norm], [mut out]) =
//!     Call::on_host().take([("x", x), ("weight", weight)], [("norm", norm)], [("out", out)])?;
//! ```

use pyo3::prelude::*;

use super::lender::Lender;
use super::output::Output;
use super::producer::runs_python;
use super::tensor::Tensor;
use crate::overlap::{Operand, Span, disjoint};

/// An argument of a call, with its name in errors.
pub(in crate::py) type Named<'a, 'py> = (&'static str, &'a Bound<'py, PyAny>);
/// An argument that may be left out, with its name in errors.
pub(in crate::py) type Maybe<'a, 'py> = (&'static str, Option<&'a Bound<'py, PyAny>>);
/// The tensors that a call reads, those that it reads if they are given, and those that it writes.
type Taken<const R: usize, const M: usize, const W: usize> = ([Tensor; R], [Option<Tensor>; M], [Output; W]);
/// The tensors that a call reads and those that it writes, each of which may be left out.
type TakenLists = (Vec<Option<Tensor>>, Vec<Option<Output>>);

/// The context of a call: everything besides the tensors that it is given.
#[derive(Clone, Copy)]
pub(in crate::py) struct Call<'a> {
    /// The argument `stream` of [`Tensor::import`].
    stream: Option<isize>,
    /// Lenders of the memory that was lent before and that the call uses.
    lenders: &'a [&'a Lender],
    /// Lent memory that the call reads.
    read: &'a [Span],
    /// Lent memory that the call writes.
    written: &'a [Span],
}

impl<'a> Call<'a> {
    /// A call whose work runs on the CPU.
    pub(in crate::py) fn on_host() -> Self {
        Self { stream: None, lenders: &[], read: &[], written: &[] }
    }

    /// A call whose work runs on a stream of the caller's: producers need not order streams for it (-1).
    pub(in crate::py) fn on_device() -> Self {
        Self { stream: Some(-1), ..Self::on_host() }
    }

    /// The same call, which also reads memory that was lent.
    pub(in crate::py) fn reading(self, lenders: &'a [&'a Lender], read: &'a [Span]) -> Self {
        Self { lenders, read, ..self }
    }

    /// The same call, which also writes memory that was lent.
    pub(in crate::py) fn writing(self, lenders: &'a [&'a Lender], written: &'a [Span]) -> Self {
        Self { lenders, written, ..self }
    }

    /// Import the tensors: `read`, `maybe` (read where they are given) and `written`. None of them is missing
    /// afterwards.
    ///
    /// # Errors
    /// Those of [`Tensor::import`] and [`Output::import`]; [`crate::Error::Mismatch`] for a tensor whose memory was
    /// freed while another was imported, and for a written tensor that overlaps another operand.
    pub(in crate::py) fn take<const R: usize, const M: usize, const W: usize>(
        self,
        read: [Named<'_, '_>; R],
        maybe: [Maybe<'_, '_>; M],
        written: [Named<'_, '_>; W],
    ) -> PyResult<Taken<R, M, W>> {
        let there = maybe.iter().filter_map(|&(what, object)| Some((what, object?)));
        let mut looks = Looks::new(self, read.iter().copied().chain(there).chain(written.iter().copied()))?;
        let (mut inputs, mut options, mut outputs) = ([const { None }; R], [const { None }; M], [const { None }; W]);
        for (slot, &(what, object)) in inputs.iter_mut().zip(&read) {
            *slot = Some(looks.import(what, object)?);
        }
        for (slot, &(what, object)) in options.iter_mut().zip(&maybe) {
            *slot = object.map(|object| looks.import(what, object)).transpose()?;
        }
        for (slot, &(what, object)) in outputs.iter_mut().zip(&written) {
            *slot = Some(looks.import_output(what, object)?);
        }
        looks.again()?;
        let (ins, options_in, outs) = (
            inputs.each_ref().map(Operand::span),
            options.each_ref().map(Operand::span),
            outputs.each_ref().map(Operand::span),
        );
        disjoint(&[self.written, &outs], &[self.read, &ins, &options_in])?;
        Ok((whole(inputs)?, options, whole(outputs)?))
    }

    /// [`Self::take`] for lists, without the check for overlaps: a launch does that itself, since it has operands of
    /// its own. Written tensors are neither read-only nor expanded.
    pub(in crate::py) fn take_lists(self, read: &[Maybe<'_, '_>], written: &[Maybe<'_, '_>]) -> PyResult<TakenLists> {
        let given = read.iter().chain(written).filter_map(|&(what, object)| Some((what, object?)));
        let mut looks = Looks::new(self, given)?;
        let import = |&(what, object): &Maybe<'_, '_>| object.map(|o| looks.import(what, o)).transpose();
        let inputs = read.iter().map(import).collect::<PyResult<_>>()?;
        let import = |&(what, object): &Maybe<'_, '_>| object.map(|o| looks.import_output(what, o)).transpose();
        let outputs: Vec<Option<Output>> = written.iter().map(import).collect::<PyResult<_>>()?;
        looks.again()?;
        outputs.iter().flatten().try_for_each(|output| output.writable())?;
        Ok((inputs, outputs))
    }
}

/// The imports of a call, and the tensors to look at again after them.
struct Looks<'a> {
    call: Call<'a>,
    /// True if an import may run code that frees the memory of another tensor.
    careful: bool,
    /// The imported tensors that can be resized; empty unless `careful`.
    taken: Vec<Lender>,
}

impl<'a> Looks<'a> {
    fn new<'b, 'py: 'b>(call: Call<'a>, given: impl Iterator<Item = Named<'b, 'py>>) -> PyResult<Self> {
        let mut tensors = call.lenders.len();
        let mut careful = call.lenders.iter().any(|lender| lender.runs_python());
        for (_, object) in given {
            tensors += 1;
            careful |= runs_python(object)?;
        }
        Ok(Self { call, careful: careful && tensors > 1, taken: Vec::new() })
    }

    fn import(&mut self, what: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Tensor> {
        let tensor = Tensor::import(object, what, self.call.stream)?;
        self.keep(object, &tensor)?;
        Ok(tensor)
    }

    fn import_output(&mut self, what: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Output> {
        let output = Output::import(object, what, self.call.stream)?;
        self.keep(object, &output)?;
        Ok(output)
    }

    fn keep(&mut self, object: &Bound<'_, PyAny>, tensor: &Tensor) -> PyResult<()> {
        if self.careful {
            self.taken.extend(Lender::of_call(object, tensor)?);
        }
        Ok(())
    }

    /// Look at every tensor once more if an import may have freed memory.
    fn again(&self) -> PyResult<()> {
        if !self.careful {
            return Ok(());
        }
        let all = || self.call.lenders.iter().copied().chain(&self.taken);
        Python::attach(|py| {
            let look = |mine: bool| all().filter(move |l| l.runs_python() == mine).try_for_each(|l| l.check(py));
            look(true).and_then(|()| look(false))
        })
    }
}

/// Check several lent tensors together, as [`Call::take`] checks the tensors of a call.
///
/// # Errors
/// Those of [`Lender::check`].
pub(in crate::py) fn check_lenders(py: Python<'_>, lenders: &[Lender]) -> PyResult<()> {
    lenders.iter().try_for_each(|lender| lender.check(py))?;
    if lenders.len() > 1 && lenders.iter().any(Lender::runs_python) {
        lenders.iter().filter(|lender| !lender.runs_python()).try_for_each(|lender| lender.check(py))?;
    }
    Ok(())
}

/// The operands as an array; none is missing, since each was imported.
fn whole<T, const N: usize>(all: [Option<T>; N]) -> PyResult<[T; N]> {
    let all: Vec<T> = all.into_iter().flatten().collect();
    all.try_into().map_err(|_| pyo3::exceptions::PySystemError::new_err("an operand was not imported"))
}
