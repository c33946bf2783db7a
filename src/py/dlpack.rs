//! DLPack, both ways: tensors of any producer as checked typed views, and specrs's buffers as capsules.
//!
//! This module and `cuda::tensors`, which makes the views that kernels take, are the only Python-facing places with
//! `unsafe`. Importing takes ownership of the producer's managed tensor (its deleter runs exactly once, when [`Tensor`]
//! drops, on whichever thread that is) and copies shape and strides out, so that the producer cannot change them after
//! they were checked. A view is handed out only after its device, element type, shape, contiguity and alignment were
//! checked, and an output only after it was compared with every other tensor of the call: a `&mut` slice never overlaps
//! another slice. A call with several tensors takes them together.
//!
//! Rust cannot check the contract with the caller, which torch's and numpy's own operations have, too: *while a call
//! runs, no other thread writes to its tensors, reads its outputs, or resizes their storage.*
//!
//! ```text
//! let ([x], [], [mut out]) = Call::on_host().take([("x", x)], [], [("out", out)])?; // owners of the producers' tensors
//! let (xs, os) = (x.input::<f32>(&[m, k])?, out.slice::<f32>(&[m, n])?);
//! ```
//!
//! | file | what lives there; each imports from those above it |
//! |---|---|
//! | `abi` | DLPack's C structures |
//! | `place` | memory that stays where it is |
//! | `buffer` | memory as capsules |
//! | `array` | `Array`, the tensors that specrs returns |
//! | `producer` | how an object hands out its tensor |
//! | `tensor` | tensors that are read |
//! | `output` | tensors that a call writes |
//! | `lent`, `lender` | tensors that a caller lends for many calls |
//! | `operands` | the tensors of one call, taken together |

mod abi;
mod array;
mod buffer;
mod lender;
mod lent;
mod operands;
mod output;
mod place;
mod producer;
mod tensor;

pub(super) use self::abi::{DType, Device as TensorDevice};
pub(super) use self::array::{Array, ViewGuard};
pub(super) use self::buffer::{Buffer, View};
pub(super) use self::lender::Lender;
pub(super) use self::lent::Lent;
pub(super) use self::operands::{Call, check_lenders};
pub(super) use self::output::Output;
pub(super) use self::place::Place;
pub(super) use self::tensor::{Tensor, as_array};
