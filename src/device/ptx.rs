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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_end_with_nul_and_hold_a_ptx_version_that_driver_580_loads() {
        assert_eq!(ABSENT.is_none(), !IMAGES.is_empty());
        for image in IMAGES {
            assert!(image.text.ends_with('\0'), "{}", image.name);
            let version = image.text.lines().find_map(|l| l.strip_prefix(".version ")).unwrap();
            let (major, minor) = version.trim().split_once('.').unwrap();
            assert!((major.parse::<u32>().unwrap(), minor.parse::<u32>().unwrap()) <= (9, 0), "{version}");
        }
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
