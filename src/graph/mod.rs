//! CUDA graphs that own the memory they point at (feature `cuda`).
//!
//! A captured graph is a list of addresses. Freeing or moving memory at one of them corrupts a later replay silently.
//! So a [`Graph`] of this module holds everything that its work reads and writes, and gives nothing back before its
//! last replay has finished on the device, wherever and whenever it is dropped.
//!
//! ```text
//! Turn -> Capture::of_stream | Capture::of_loop -> (work on the stream) -> Capture::finish -> Graph -> launch
//!                                                                                  drop -> list -> collect
//! ```
//!
//! ```no_run
//! # use specrs::device::{Device, Stream};
//! # use specrs::graph::{self, Capture, Turn};
//! # fn f(device: &'static Device, stream: Stream, work: impl Fn(), arena: std::sync::Arc<specrs::device::Arena>)
//! # -> specrs::Result<()> {
//! let capture = Capture::of_stream(device, stream, Turn::take()?)?;
//! work(); // launches on `stream`; nothing runs yet
//! let graph = capture.finish(Box::new(arena))?; // kept until the last replay has finished
//! graph.launch(stream)?;
//! drop(graph); // waits for nothing
//! graph::collect(false)?; // destroys dropped graphs whose replays are over, and what they held
//! # Ok(()) }
//! ```
//!
//! One capture runs at a time in the process ([`Turn`]). A capture that fails leaves no graph and a stream that works as
//! before; [`Error::GraphCapture`] names the call, and for a node that may not be there its type and its path.
//!
//! | file | what lives there; each imports from those above it |
//! |---|---|
//! | `nodes` | what a graph is made of, child graphs included; what the body of a loop may hold |
//! | `turn` | one capture at a time |
//! | `retire` | graphs that were dropped, until the device is done with them |
//! | `run` | [`Graph`]: launches, and the end of the last one |
//! | `capture` | from a stream, or a loop's body, to a graph; graphs of others as child nodes |
#![allow(unsafe_code)]

mod capture;
mod nodes;
mod retire;
mod run;
mod turn;

pub use capture::{Capture, add_child};
pub use nodes::NodeCounts;
pub use retire::{Held, collect, waiting};
pub use run::Graph;
pub use turn::Turn;

#[cfg(doc)]
use crate::error::Error;
