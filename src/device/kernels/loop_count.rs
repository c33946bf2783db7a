//! The launch of `cuda/loop_count.cu`: the condition of a graph's loop.

use std::sync::Arc;

use crate::device::context::Context;
use crate::device::driver::{Function, Module, Stream};
use crate::device::images;
use crate::device::params::loop_count::LoopCountParams;
use crate::device::view::{DeviceSlice, device_mismatch};
use crate::error::{Error, Result};
use crate::overlap::{Operand, disjoint};

/// The kernel of `cuda/loop_count.cu` on one device.
#[derive(Debug)]
pub struct LoopCount {
    function: Function,
    _module: Module,
    context: Arc<Context>,
}

impl LoopCount {
    /// Load it into `context`, which is current.
    pub(super) fn load(context: Arc<Context>) -> Result<Self> {
        let module = Module::load(images::select("loop_count", context.capability())?)?;
        Ok(Self { function: module.function("loop_count")?, _module: module, context })
    }

    /// Take one from `left` (one word), and set the condition `handle` to whether any is left and `stop` (one word, or
    /// absent) is 0. The last launch of the body of the loop that `handle` is of, on the stream that is captured.
    ///
    /// # Errors
    /// [`Error::Capacity`] for an array without a word; [`Error::Mismatch`] for one of another device; [`Error::Invalid`] for
    /// a handle of 0, and on a stream that is not being captured.
    pub fn launch(
        &self,
        stream: Stream,
        handle: u64,
        left: &DeviceSlice<i32>,
        stop: Option<&DeviceSlice<i32>>,
    ) -> Result<()> {
        let context = &self.context;
        for (operand, slice) in [("left", Some(left)), ("stop", stop)] {
            let Some(slice) = slice else { continue };
            if slice.device() != context.ordinal() {
                return Err(device_mismatch(operand, slice.device(), context.ordinal(), "the kernel is launched"));
            }
            if slice.is_empty() {
                return Err(Error::Capacity { what: operand, need: 1, have: 0, hint: "one int32".into() });
            }
        }
        disjoint(&[&[left.span()]], &[&[stop.span()]])?;
        let refuse = |what, got: String, why: &str| Err(Error::Invalid { what, got, why: why.to_owned() });
        if handle == 0 {
            return refuse("handle", "0".into(), "the handle of a loop is wanted, which its work gets");
        }
        let _current = context.enter()?;
        if !stream.is_capturing()? {
            return refuse(
                "stream",
                format!("{:#x}", stream.raw()),
                "a condition is set within the body of a loop alone",
            );
        }
        let params = LoopCountParams { left: left.address(), stop: stop.map_or(0, DeviceSlice::address), handle };
        // SAFETY: the device's module is loaded for the process and its context is current; capacities were checked, and
        // the views' makers promised their memory. A handle that is none makes the driver refuse the graph.
        unsafe { self.function.launch((1, 1, 1), 1, stream, &params) }
    }
}
