//! The embedded PTX: what `build.rs` compiled, and which image a device takes.

use crate::error::{Error, Result};

/// One kernel file compiled for one virtual architecture.
pub(super) struct Image {
    /// Kernel file, without `.cu`.
    pub(super) name: &'static str,
    /// Compute capability, major * 10 + minor.
    pub(super) arch: i32,
    /// True for an `a` architecture (`90a`): it runs on exactly that capability, not on later ones.
    pub(super) exact: bool,
    /// PTX; always ends with NUL, as the driver's loader needs.
    pub(super) text: &'static str,
}

include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

impl Image {
    fn runs_on(&self, capability: i32) -> bool {
        if self.exact { self.arch == capability } else { self.arch <= capability }
    }
}

/// The best image of `name` for a device: its own architecture's special one, else the latest it can run.
pub(super) fn select(name: &'static str, capability: i32) -> Result<&'static Image> {
    let found = IMAGES.iter().filter(|i| i.name == name && i.runs_on(capability)).max_by_key(|i| (i.arch, i.exact));
    found.ok_or_else(|| match ABSENT {
        Some(why) => Error::CudaUnavailable(format!("no CUDA kernels in this build: {why}")),
        None => Error::CudaUnavailable(format!(
            "kernel {name} needs a GPU of compute capability 8.0 or later, this one is {}.{}",
            capability / 10,
            capability % 10
        )),
    })
}

impl Image {
    /// Version of the PTX ISA that the image is written in.
    fn isa(&self) -> Option<(i32, i32)> {
        let version = self.text.lines().find_map(|line| line.strip_prefix(".version "))?;
        let (major, minor) = version.trim().split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    }
}

/// The first CUDA whose driver loads every image of this build, 1000 * major + 10 * minor; 0 without images.
pub(super) fn cuda_needed() -> i32 {
    IMAGES.iter().filter_map(Image::isa).map(cuda_of).max().unwrap_or(0)
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
    fn images_end_with_nul_and_hold_a_ptx_version_that_driver_580_loads() {
        assert_eq!(ABSENT.is_none(), !IMAGES.is_empty());
        for image in IMAGES {
            assert!(image.text.ends_with('\0'), "{}", image.name);
            assert!(image.isa().unwrap() <= (9, 0), "{:?}", image.isa());
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
        let special = Image { name: "k", arch: 90, exact: true, text: "\0" };
        let baseline = Image { name: "k", arch: 80, exact: false, text: "\0" };
        assert!(special.runs_on(90) && !special.runs_on(100) && !special.runs_on(89));
        assert!(baseline.runs_on(80) && baseline.runs_on(120) && !baseline.runs_on(75));
        if ABSENT.is_none() {
            assert_eq!(select("kv_move", 90).unwrap().arch, 80);
            assert!(matches!(select("kv_move", 75), Err(Error::CudaUnavailable(m)) if m.contains("7.5")));
        } else {
            assert!(matches!(select("kv_move", 90), Err(Error::CudaUnavailable(m)) if m.contains("in this build")));
        }
    }
}
