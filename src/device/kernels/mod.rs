//! One file a kernel: its functions, loaded when a device is set up, and the safe function that launches them.

mod kv_move;

pub use kv_move::kv_move;

use crate::error::Result;

/// The kernels of one device.
#[derive(Debug)]
pub(super) struct Kernels {
    kv_move: kv_move::Functions,
}

impl Kernels {
    /// Load every kernel into the current context, for a device of this compute capability (major * 10 + minor).
    pub(super) fn load(capability: i32) -> Result<Self> {
        Ok(Self { kv_move: kv_move::Functions::load(capability)? })
    }
}
