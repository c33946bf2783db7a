//! The code that `build.rs` compiled and embedded, and the image that a device takes.

use crate::error::{Error, Result};

/// One kernel file compiled for one virtual architecture.
pub(super) struct Image {
    /// Kernel file, without `.cu`.
    pub(super) name: &'static str,
    /// Compute capability, major * 10 + minor.
    pub(super) arch: i32,
    /// True for an `a` architecture (`90a`): it runs on exactly that capability, not on later ones.
    pub(super) exact: bool,
    /// Version of the PTX ISA that its PTX is written in.
    pub(super) isa: (i32, i32),
    /// A fat binary of nvcc: PTX, and machine code for the GPUs of today.
    pub(super) code: &'static Aligned<[u8]>,
}

/// Bytes that the driver reads in place as words.
#[repr(C, align(16))]
pub(super) struct Aligned<T: ?Sized>(pub(super) T);

include!(concat!(env!("OUT_DIR"), "/images.rs"));

impl Image {
    fn runs_on(&self, capability: i32) -> bool {
        if self.exact { self.arch == capability } else { self.arch <= capability }
    }
}

/// The best image of `name` for a device: its own architecture's special one, else the latest it can run.
pub(super) fn find(name: &str, capability: i32) -> Option<&'static Image> {
    IMAGES.iter().filter(|i| i.name == name && i.runs_on(capability)).max_by_key(|i| (i.arch, i.exact))
}

/// [`find`], for a kernel that every GPU has.
pub(super) fn select(name: &'static str, capability: i32) -> Result<&'static Image> {
    find(name, capability).ok_or_else(|| match ABSENT {
        Some(why) => Error::CudaUnavailable(format!("no CUDA kernels in this build: {why}")),
        None => Error::CudaUnavailable(format!(
            "kernel {name} needs a GPU of compute capability 8.0 or later, this one is {}.{}",
            capability / 10,
            capability % 10
        )),
    })
}

/// The first CUDA whose driver loads every image of this build, 1000 * major + 10 * minor; 0 without images.
pub(super) fn cuda_needed() -> i32 {
    IMAGES.iter().map(|image| cuda_of(image.isa)).max().unwrap_or(0)
}

/// The CUDA release that a version of the PTX ISA (7.0 or later) came with: the release notes of the PTX ISA.
fn cuda_of((major, minor): (i32, i32)) -> i32 {
    let skipped = i32::from(major == 8 && minor >= 6); // CUDA 12.6 brought no new version
    (major + 4) * 1000 + (minor + skipped) * 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_fat_binaries_whose_ptx_driver_580_loads() {
        assert_eq!(ABSENT.is_none(), !IMAGES.is_empty());
        for Image { name, isa, code, .. } in IMAGES {
            assert!(*isa <= (9, 0), "{name}: {isa:?}");
            // Magic number, version, size of the header and of what follows it.
            let word = |at: usize, bytes: usize| {
                code.0[at..at + bytes].iter().rev().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte))
            };
            assert_eq!(word(0, 4), 0xba55_ed50, "{name}");
            assert_eq!(word(6, 2) + word(8, 8), code.0.len() as u64, "{name}");
        }
    }

    #[test]
    fn isas_came_with_their_cuda() {
        let isas = [(7, 0), (7, 8), (8, 0), (8, 5), (8, 6), (8, 8), (9, 0)];
        assert_eq!(isas.map(cuda_of), [11000, 11080, 12000, 12050, 12070, 12090, 13000]);
        assert_eq!(cuda_needed() == 0, IMAGES.is_empty());
    }

    #[test]
    fn a_device_gets_the_latest_image_that_it_runs() {
        let special = Image { name: "k", arch: 90, exact: true, isa: (9, 0), code: &Aligned([]) };
        let baseline = Image { name: "k", arch: 80, exact: false, isa: (9, 0), code: &Aligned([]) };
        assert!(special.runs_on(90) && !special.runs_on(100) && !special.runs_on(89));
        assert!(baseline.runs_on(80) && baseline.runs_on(120) && !baseline.runs_on(75));
        if ABSENT.is_none() {
            assert_eq!(select("kv_move", 90).unwrap().arch, 80);
            assert!(find("linear", 90).is_some() && find("linear", 80).or(find("linear", 120)).is_none());
            assert!(matches!(select("kv_move", 75), Err(Error::CudaUnavailable(m)) if m.contains("7.5")));
        } else {
            assert!(matches!(select("kv_move", 90), Err(Error::CudaUnavailable(m)) if m.contains("in this build")));
        }
    }
}
