//! Products with weights by cublasLt, whose rows' bits do not depend on the batch.
//!
//! `y = x W^T` for bf16 and f16, summed in float32. All algorithms of the library that split K alike give a row the same
//! bits, whatever their tiles, stages and clusters, for every number of rows (measured on H100 and H200). So a weight gets one
//! *class of bits*, and each number of rows the fastest algorithm of it. Nothing of this is taken on trust: the
//! algorithms that will be used are compared on the device at load ([`Products::choice`]), all rows of them, and a class is
//! told apart by its bits, not by what the library says of it.
//!
//! Up to 16 rows may take the package's own kernel (`cuda/linear.cu`, compute capability 9.0) instead: where its rows have the
//! class's bits, compared in the same way, and where it is faster in a chain of launches, in which it reads its weights
//! while the launch in front still runs.
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use specrs::device::{Device, DeviceSlice, FloatType, LinearShape, Products, Rows, Stream};
//! # fn f(w: Rows, x: Rows, y: Rows, space: DeviceSlice<u8>, stream: Stream) -> specrs::Result<()> {
//! let products = Arc::new(Products::open(Device::get(0)?, &[])?);
//! let element = FloatType::Bf16;
//! let shape = LinearShape { outputs: 4096, inputs: 14336, element, f32_output: false, bias: false, max_rows: 2048 };
//! let choice = products.choice(shape, None)?; // measured once, then from the user's cache, checked
//! let bytes = choice.workspace_bytes(); // what `space` has
//! # let _ = bytes;
//! // SAFETY: the weight outlives the launches.
//! let down = unsafe { products.linear(&choice, &w, None) }?;
//! down.launch(stream, 64, &x, &y, &space)?;
//! # Ok(()) }
//! ```
//!
//! | file | what lives there; each imports from those above it |
//! |---|---|
//! | `library` | the library, found and loaded at run time |
//! | `shape` | a weight's shape and its buckets of rows |
//! | `api` | the library's objects; proposals and products |
//! | `choice` | which class a weight gets: a function of measurements |
//! | `cache` | choices kept in a file |
//! | `bench` | a product run, compared and timed |
//! | `own` | the package's own products of a few rows, where they have the bits and are faster |
//! | `tune` | from a shape to a choice |
//! | `linear` | a device's products; a weight's launch |

mod api;
mod bench;
mod cache;
mod choice;
mod library;
mod linear;
mod own;
mod shape;
mod tune;

pub use choice::{Choice, Classes};
pub use linear::{Linear, Products};
pub use shape::LinearShape;
