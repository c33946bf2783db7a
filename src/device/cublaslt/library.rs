//! libcublasLt, found at run time: the library that torch brings, or an installed one.
//!
//! It is looked for where it is sure to be the one that torch uses: in the process, then in the folders that the caller
//! names (`nvidia/cu13/lib` of the same site-packages), then as the loader finds it. cudarc's binding is not used: it
//! loads by name alone and panics where there is none.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::Mutex;

use crate::error::{Error, Result};

/// Names of the library, newest first: those of CUDA 13 and of CUDA 12.
const NAMES: [&str; 2] = ["libcublasLt.so.13", "libcublasLt.so.12"];

/// An opaque object of the library.
pub(super) type Object = *mut c_void;
type Status = c_int;

/// An algorithm, which one version of the library restores from its bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Algo(pub(super) [u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Heuristic {
    pub(super) algo: Algo,
    pub(super) workspace: usize,
    pub(super) state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

impl Heuristic {
    /// A place for the library's answer.
    pub(super) const EMPTY: Self = Self { algo: Algo([0; 8]), workspace: 0, state: 0, waves: 0.0, reserved: [0; 4] };
}

/// One table of the functions, their types as in `cublasLt.h`, with enumerations as plain integers.
macro_rules! functions {
    ($($field:ident: $name:literal fn($($arg:ty),*) $(-> $ret:ty)?;)+) => {
        /// The library's functions.
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)+
        }

        impl Functions {
            fn of(library: &libloading::Library) -> std::result::Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: the type is that of `cublasLt.h`; the library is never unloaded.
                    $($field: *unsafe { library.get($name.as_bytes()) }.map_err(|_| $name)?,)+
                })
            }
        }
    };
}

functions! {
    create: "cublasLtCreate" fn(*mut Object) -> Status;
    destroy: "cublasLtDestroy" fn(Object) -> Status;
    version: "cublasLtGetVersion" fn() -> usize;
    status_name: "cublasLtGetStatusName" fn(Status) -> *const c_char;
    desc_create: "cublasLtMatmulDescCreate" fn(*mut Object, c_int, c_int) -> Status;
    desc_destroy: "cublasLtMatmulDescDestroy" fn(Object) -> Status;
    desc_set: "cublasLtMatmulDescSetAttribute" fn(Object, c_int, *const c_void, usize) -> Status;
    layout_create: "cublasLtMatrixLayoutCreate" fn(*mut Object, c_int, u64, u64, i64) -> Status;
    layout_destroy: "cublasLtMatrixLayoutDestroy" fn(Object) -> Status;
    preference_create: "cublasLtMatmulPreferenceCreate" fn(*mut Object) -> Status;
    preference_destroy: "cublasLtMatmulPreferenceDestroy" fn(Object) -> Status;
    preference_set: "cublasLtMatmulPreferenceSetAttribute" fn(Object, c_int, *const c_void, usize) -> Status;
    heuristic: "cublasLtMatmulAlgoGetHeuristic"
        fn(Object, Object, Object, Object, Object, Object, Object, c_int, *mut Heuristic, *mut c_int) -> Status;
    check: "cublasLtMatmulAlgoCheck"
        fn(Object, Object, Object, Object, Object, Object, *const Algo, *mut Heuristic) -> Status;
    config: "cublasLtMatmulAlgoConfigGetAttribute" fn(*const Algo, c_int, *mut c_void, usize, *mut usize) -> Status;
    matmul: "cublasLtMatmul"
        fn(Object, Object, *const c_void, *const c_void, Object, *const c_void, Object, *const c_void, *const c_void, Object,
           *mut c_void, Object, *const Algo, *mut c_void, usize, *mut c_void) -> Status;
}

/// The library, loaded for as long as the process lives.
pub(super) struct Library {
    pub(super) call: Functions,
    /// The version as `cublasLtGetVersion` has it: 130100 is 13.1.
    pub(super) version: usize,
    /// Path at which the library was found.
    pub(super) path: String,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cublasLt {} ({})", self.version, self.path)
    }
}

impl Library {
    /// Load it, once for the process. `folders` are searched after the process itself.
    ///
    /// # Errors
    /// [`Error::CudaUnavailable`] with every place that was looked at; a later call looks again.
    pub(super) fn load(folders: &[PathBuf]) -> Result<&'static Self> {
        static LOADED: Mutex<Option<&'static Library>> = Mutex::new(None);
        let mut loaded = LOADED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(library) = *loaded {
            return Ok(library);
        }
        let library: &'static Library = Box::leak(Box::new(find(folders)?));
        *loaded = Some(library);
        Ok(library)
    }

    /// `Err` with the library's name for a status other than success.
    pub(super) fn done(&self, call: &'static str, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library names any code by a string that lives as long as it does; null is looked for.
        let name = unsafe {
            let name = (self.call.status_name)(status);
            if name.is_null() { "no name".into() } else { CStr::from_ptr(name).to_string_lossy().into_owned() }
        };
        Err(Error::Cuda { call, message: format!("{name} ({status})") })
    }
}

fn find(folders: &[PathBuf]) -> Result<Library> {
    let mut seen = Vec::new();
    for name in NAMES {
        match in_process(name) {
            Some(library) => match usable(library, format!("{name}, in the process")) {
                Ok(library) => return Ok(library),
                Err(why) => seen.push(why),
            },
            None => seen.push(format!("{name} in the process: not there")),
        }
    }
    let files = folders.iter().flat_map(|folder| NAMES.map(|name| folder.join(name)));
    let files = files.chain(NAMES.map(PathBuf::from)); // the loader's own search comes last
    for file in files {
        let given = file.parent().is_some_and(|p| !p.as_os_str().is_empty());
        if given && !file.is_file() {
            seen.push(format!("{}: no such file", file.display()));
            continue;
        }
        // SAFETY: NVIDIA's library, whose initialisers depend on nothing of this process.
        match unsafe { libloading::Library::new(&file) } {
            Ok(library) => match usable(library, file.display().to_string()) {
                Ok(library) => return Ok(library),
                Err(why) => seen.push(why),
            },
            Err(e) => seen.push(format!("{}: {e}", file.display())),
        }
    }
    Err(Error::CudaUnavailable(format!(
        "products need cublasLt ({}), which torch with CUDA brings; looked at: {}",
        NAMES.join(" or "),
        seen.join("; ")
    )))
}

/// The library that is loaded already, torch's mostly.
#[cfg(unix)]
fn in_process(name: &str) -> Option<libloading::Library> {
    use libloading::os::unix;
    const RTLD_NOLOAD: c_int = 4; // Linux, as all that CUDA's Unix libraries run on
    // SAFETY: nothing is loaded, so no initialiser runs.
    unsafe { unix::Library::open(Some(name), unix::RTLD_LAZY | RTLD_NOLOAD) }.ok().map(Into::into)
}

#[cfg(not(unix))]
fn in_process(_name: &str) -> Option<libloading::Library> {
    None
}

fn usable(library: libloading::Library, path: String) -> std::result::Result<Library, String> {
    let call = Functions::of(&library).map_err(|name| format!("{path}: lacks {name}"))?;
    std::mem::forget(library); // never unloaded: kernels of it may be in flight, or in graphs, at any later time
    // SAFETY: no arguments.
    let version = unsafe { (call.version)() };
    Ok(Library { call, version, path })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_told_place_by_place() {
        let folder = PathBuf::from("/no/such/folder");
        match Library::load(std::slice::from_ref(&folder)) {
            Ok(library) => assert!(library.version >= 120_000, "{library:?}"), // a machine that has one installed
            Err(Error::CudaUnavailable(why)) => {
                for place in ["/no/such/folder/libcublasLt.so.13: no such file", "libcublasLt.so.12 in the process"] {
                    assert!(why.contains(place), "{why}");
                }
            }
            Err(other) => panic!("{other}"),
        }
    }
}
