//! CUDA kernels on the caller's stream (feature `cuda`).
//!
//! The way from `cuda/<job>.cu` to a launch, the same for every kernel:
//!
//! 1. `build.rs` compiles the file to PTX and machine code, and embeds both.
//! 2. [`params`] declares the kernel's parameter struct, once for Rust and C++.
//! 3. [`Device`] retains the device's *primary* context, which is torch's: raw pointers and stream handles
//!    interoperate. It loads each image once and lives as long as the process.
//! 4. A safe launch per kernel ([`KvMove::launch`]; one file each in `kernels/`, which owns its functions) takes typed
//!    views ([`view`]), checks everything the host can know before the launch, and launches on a [`Stream`] that the
//!    caller owns. It allocates nothing and waits for nothing, so that it can be captured into a graph.
//! 5. The kernel checks what only the device can know (an index in a tensor); it skips the access and leaves a record in
//!    mapped memory, which [`Device::check`] turns into [`Error::OutOfBounds`] at the next boundary. Scores from which
//!    nothing can be chosen come back the same way, as [`Error::NonFinite`].
//!
//! ```no_run
//! use specrs::device::{self, Device, KvCacheView, MovesView, Stream};
//! # fn f(cache: KvCacheView, moves: MovesView, stream: Stream) -> specrs::Result<()> {
//! device::available()?; // typed error where there is no driver, no GPU, or no kernels in this build
//! let device = Device::get(0)?;
//! device.kernels().kv_move.launch(stream, &cache, &moves)?;
//! // ... later, once the stream has got there:
//! device.check()?;
//! # Ok(()) }
//! ```
//!
//! Nothing here runs until asked: importing the Python package or using the CPU needs neither libcuda nor a GPU.
//! cudarc's safe layer is not used: it tracks each buffer by events, which breaks stream capture, and has no way
//! to adopt a stream. Ordering is the caller's stream's.
#![allow(unsafe_code)]

mod attention_view;
mod context;
pub mod cublaslt;
mod devices;
mod driver;
mod fault;
mod images;
mod kernels;
mod libcuda;
pub mod memory;
pub mod params;
pub mod plan;
mod ring;
pub mod rows;
mod stream;
mod table;
mod tensor_map;
pub mod view;
mod words;

pub use attention_view::{AttentionBatch, AttentionOut, HalfType, KvLayerView};
pub use cublaslt::{Choice, Classes, Linear, LinearShape, Products};
pub use devices::{Device, available};
pub use driver::Stream;
pub(crate) use driver::{Relaxed, named};
pub use fault::Faults;
pub use kernels::*;
pub use memory::{Arena, ArenaPlan, Budget, DeviceBuffer, Guards, Loan, PinnedBuffer, REGION_ALIGN, Region};
pub use plan::{
    DeviceArray, DeviceBatch, DeviceElements, DevicePlan, DevicePlanner, DeviceStep, DeviceTable, PlanMemory,
};
pub use ring::RoundRing;
pub use rows::{FloatType, Rows};
pub(crate) use stream::{Alive, RawEvent, capture_into};
pub use table::{TableMirror, TableShape, Uploaded};
pub use view::{DeviceSlice, KvCacheView, MovesView};

#[cfg(doc)]
use crate::error::Error;
