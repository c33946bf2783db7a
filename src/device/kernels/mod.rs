//! One file a kernel: its functions, loaded when a device is set up, and their safe launch.

mod kv_move;

pub use kv_move::KvMove;

use std::sync::Arc;

use super::context::Context;
use crate::error::Result;

/// The kernels of one device.
#[derive(Debug)]
pub struct Kernels {
    /// Moves of KV rows between slots.
    pub kv_move: KvMove,
}

impl Kernels {
    /// Load every kernel into `context`, which is current.
    pub(super) fn load(context: &Arc<Context>) -> Result<Self> {
        Ok(Self { kv_move: KvMove::load(context.clone())? })
    }
}
