//! libcuda, loaded once for the process and looked over before anything of it is called.
//!
//! cudarc looks each function up at its first call and panics where the library lacks it: a stub, another vendor's, or
//! a driver too old for the function. So everything that may call the driver goes through [`start`], which finds every
//! function of [`CALLS`] first, and asks for the version and starts the driver by pointers of its own.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::OnceLock;

use cudarc::driver::sys;

use super::images;
use crate::error::{Error, Result};

/// The driver functions that this crate calls, by the names that libcuda has for them.
pub(super) const CALLS: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuThreadExchangeStreamCaptureMode",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuFuncSetAttribute",
    "cuOccupancyMaxActiveClusters",
    "cuLaunchKernelEx",
    "cuTensorMapEncodeTiled",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2",
    "cuMemFreeHost",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemsetD8_v2",
    "cuDeviceGetName",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
    "cuStreamBeginCaptureToGraph",
    "cuStreamGetCaptureInfo_v3",
    "cuStreamUpdateCaptureDependencies_v2",
    "cuGraphCreate",
    "cuGraphAddNode_v2",
    "cuGraphAddChildGraphNode",
    "cuGraphConditionalHandleCreate",
    "cuGraphInstantiateWithParams",
    "cuGraphGetNodes",
    "cuGraphNodeGetType",
    "cuGraphChildGraphNodeGetGraph",
    "cuGraphKernelNodeGetAttribute",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventElapsedTime_v2",
    "cuEventDestroy_v2",
    "cuMemGetInfo_v2",
    "cuMemsetD8Async",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
];

/// Load libcuda and start the driver, once for the process; the reason where that is not possible.
pub(super) fn start() -> Result<()> {
    static OUTCOME: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    OUTCOME.get_or_init(load).clone().map_err(Error::CudaUnavailable)
}

fn load() -> std::result::Result<(), String> {
    // SAFETY: it only tries to open the library, and opening libcuda runs no code that depends on this process.
    if !unsafe { sys::is_culib_present() } {
        return Err("libcuda is not on this machine, or cannot be loaded (no NVIDIA driver)".into());
    }
    // First, since a driver that is too old lacks functions, too.
    let found = version();
    let needed = images::cuda_needed();
    if let Some(found) = found
        && found < needed
    {
        return Err(format!(
            "the NVIDIA driver is too old: its libcuda is of CUDA {}, the kernels of this build need CUDA {} or later",
            Version(found),
            Version(needed)
        ));
    }
    let lacking: Vec<&str> = CALLS.iter().copied().filter(|name| !has(name)).collect();
    if !lacking.is_empty() {
        let version = found.map_or("its version unknown".into(), |v| format!("of CUDA {}", Version(v)));
        return Err(format!(
            "the libcuda that was found ({version}) is no NVIDIA driver's: it lacks {} of the {} functions needed, {} first; \
             CUDA {} or later is needed",
            lacking.len(),
            CALLS.len(),
            lacking[0],
            Version(needed)
        ));
    }
    match init() {
        0 => Ok(()),
        code => Err(format!("cuInit failed with code {code}{}", name_of(code))),
    }
}

/// The newest CUDA that the driver knows, 1000 * major + 10 * minor; 0 where the driver does not say, or is not loaded.
pub(super) fn driver_version() -> i32 {
    start().ok().and_then(|()| version()).unwrap_or(0)
}

/// A CUDA version as the driver numbers it: 1000 * major + 10 * minor.
struct Version(i32);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

fn has(name: &str) -> bool {
    // SAFETY: the library is there (`load` saw it); the symbol is not used.
    unsafe { sys::culib().get::<*const ()>(name.as_bytes()) }.is_ok()
}

/// The newest CUDA that the driver knows; `None` where it does not say.
fn version() -> Option<i32> {
    let mut version = 0;
    // SAFETY: the driver's signature, in plain integers: a foreign library may return any code. `version` is a valid
    // out pointer for the call.
    let code = unsafe {
        let get = sys::culib().get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"cuDriverGetVersion").ok()?;
        get(&raw mut version)
    };
    (code == 0 && version > 0).then_some(version)
}

/// `cuInit`, its code as a plain integer; -1 where there is none.
fn init() -> c_int {
    // SAFETY: as in `version`; the flags must be 0.
    unsafe { sys::culib().get::<unsafe extern "C" fn(c_uint) -> c_int>(b"cuInit").map_or(-1, |init| init(0)) }
}

/// The driver's name of an error code, in brackets; empty where it has none.
fn name_of(code: c_int) -> String {
    type GetName = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;
    let mut name: *const c_char = std::ptr::null();
    // SAFETY: as in `version`; a name that is not null is a string that lives as long as the library.
    unsafe {
        let Ok(get) = sys::culib().get::<GetName>(b"cuGetErrorName") else { return String::new() };
        if get(code, &raw mut name) != 0 || name.is_null() {
            return String::new();
        }
        format!(" ({})", CStr::from_ptr(name).to_string_lossy())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every call that names itself in its error is looked for at the start.
    #[test]
    fn calls_are_all_looked_for() {
        let mut seen = 0;
        let sources = [
            include_str!("driver.rs"),
            include_str!("context.rs"),
            include_str!("fault.rs"),
            include_str!("stream.rs"),
            include_str!("memory/raw.rs"),
            include_str!("../graph/nodes.rs"),
            include_str!("../graph/run.rs"),
            include_str!("../graph/capture.rs"),
        ];
        for source in sources {
            for at in source.split("named(\"").skip(1) {
                let name = at.split('"').next().unwrap();
                let plain =
                    |call: &str| call.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches("_v").to_owned();
                let known = |call: &&str| plain(call) == name || call.strip_suffix("WithParams") == Some(name);
                assert!(CALLS.iter().any(known), "{name}");
                seen += 1;
            }
        }
        assert!(seen >= 35, "{seen}");
    }

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!([11080, 13000, 12020].map(|v| Version(v).to_string()), ["11.8", "13.0", "12.2"]);
    }
}
