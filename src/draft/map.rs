//! A file of the operator's, mapped into memory: read where it lies, and shared by all processes that open it.
//!
//! Mapping is `unsafe`, and no safe call does it. Reading a corpus by calls instead takes a system call for each of the
//! 20 to 60 probes of a search; reading it whole takes its size in memory for each process.
#![allow(unsafe_code)]

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

/// The bytes of a file.
#[derive(Debug)]
pub(super) struct MappedFile(Mmap);

impl MappedFile {
    /// Map a file. Whoever changes it in place while it is mapped changes what is read here; a shorter file ends the
    /// process (SIGBUS), as with any mapped weights. A new file under the same name, by renaming, is safe: this one
    /// stays.
    ///
    /// # Errors
    /// Those of opening and mapping; an empty file cannot be mapped everywhere.
    pub(super) fn open(path: &Path) -> std::io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the mapping is read-only and lives as long as `Mmap`, which owns it. That nobody writes to the file
        // while it is mapped is asked of the operator, here and in the documentation of the corpus; no value read from
        // it is trusted as an index, so changed bytes can only be wrong drafts.
        unsafe { Mmap::map(&file) }.map(Self)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}
