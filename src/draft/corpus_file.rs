//! The file of a corpus: tokens and their suffixes, sorted; written once, mapped by readers.
//!
//! All numbers are little-endian.
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | `SPECRSTC` |
//! | 8..12 | version of the format, 1 |
//! | 12..16 | size of the vocabulary |
//! | 16..24 | n: tokens, with a boundary (2^32 - 2) behind each document |
//! | 24..32 | documents |
//! | 32..40 | tokens by which suffixes are sorted, 64 |
//! | 40..48 | checksum of bytes 0..40 and of what follows the header |
//! | 48..64 | 0 |
//! | 64..64 + 4n | tokens, u32 |
//! | .. + 4n | positions of all suffixes, u32, sorted by their first 64 tokens, then by position |

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use super::automaton::NO_TOKEN;
use super::map::MappedFile;
use crate::error::{Error, Result, in_range};
use crate::round::MAX_VOCAB;

const MAGIC: &[u8; 8] = b"SPECRSTC";
const VERSION: u32 = 1;
const HEADER: usize = 64;
/// Tokens by which suffixes are sorted.
pub(super) const SORTED: usize = 64;
/// Ends a document.
pub(super) const BOUNDARY: u32 = NO_TOKEN;
/// Most tokens of a corpus, boundaries included.
pub const MAX_CORPUS: u64 = 1 << 31;

/// A corpus that was opened.
#[derive(Debug)]
pub(super) struct CorpusFile {
    map: MappedFile,
    vocab: u32,
    tokens: usize,
    documents: u64,
}

fn refused(path: &Path, why: impl Into<String>) -> Error {
    Error::Invalid { what: "corpus file", got: path.display().to_string(), why: why.into() }
}

impl CorpusFile {
    /// Open a corpus. `verify` reads all of it: the checksum, every token, every position.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a file that cannot be read or is no corpus, with what is wrong.
    pub(super) fn open(path: &Path, verify: bool) -> Result<Self> {
        let bad = |why: String| refused(path, why);
        let length = std::fs::metadata(path).map_err(|e| bad(e.to_string()))?;
        if !length.is_file() || length.len() < HEADER as u64 {
            return Err(bad(format!("no file of at least {HEADER} bytes, the header of a corpus")));
        }
        let map = MappedFile::open(path).map_err(|e| bad(e.to_string()))?;
        let bytes = map.bytes();
        let word = |at: usize| bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if !bytes.starts_with(MAGIC) {
            return Err(bad("it does not begin with SPECRSTC: no corpus of specrs".into()));
        }
        if word(8) != VERSION {
            return Err(bad(format!("version {}; this build reads version {VERSION}", word(8))));
        }
        let (vocab, tokens, documents, sorted) = (word(12), long(16), long(24), long(32));
        if !(1..=MAX_VOCAB).contains(&vocab) {
            return Err(bad(format!("a vocabulary of {vocab} tokens is outside 1..={MAX_VOCAB}")));
        }
        if !(1..=MAX_CORPUS).contains(&tokens) || !(1..=tokens).contains(&documents) {
            return Err(bad(format!("{tokens} tokens in {documents} documents; at most {MAX_CORPUS}, at least one")));
        }
        if sorted != SORTED as u64 || bytes[48..HEADER].iter().any(|&b| b != 0) {
            return Err(bad(format!(
                "its suffixes are sorted by {sorted} tokens, or its header has more than version 1"
            )));
        }
        let want = HEADER as u64 + 8 * tokens;
        if bytes.len() as u64 != want {
            return Err(bad(format!("{} bytes; {tokens} tokens take {want}: it is cut short, or longer", bytes.len())));
        }
        let file = Self { map, vocab, tokens: tokens as usize, documents };
        if verify {
            file.verify().map_err(bad)?;
        }
        Ok(file)
    }

    fn verify(&self) -> std::result::Result<(), String> {
        let bytes = self.map.bytes();
        let stored = u64::from_le_bytes(bytes[40..48].try_into().map_err(|_| "no checksum")?);
        let mut sum = Checksum::default();
        sum.add(&bytes[..40]);
        sum.add(&bytes[HEADER..]);
        if sum.0 != stored {
            return Err(format!("its checksum is {:#018x}, its bytes give {:#018x}: it was damaged", stored, sum.0));
        }
        if let Some(at) = self.tokens().iter().position(|&t| t.to_le() >= self.vocab && t.to_le() != BOUNDARY) {
            return Err(format!("token {at} is {}, outside its vocabulary of {}", self.tokens()[at], self.vocab));
        }
        match self.suffixes().iter().position(|&s| s.to_le() as usize >= self.tokens) {
            Some(at) => {
                Err(format!("suffix {at} begins at {}, behind its {} tokens", self.suffixes()[at], self.tokens))
            }
            None => Ok(()),
        }
    }

    /// Tokens as they lie in the file; `to_le` makes one of them a number.
    fn tokens(&self) -> &[u32] {
        bytemuck::cast_slice(&self.map.bytes()[HEADER..HEADER + 4 * self.tokens])
    }

    fn suffixes(&self) -> &[u32] {
        bytemuck::cast_slice(&self.map.bytes()[HEADER + 4 * self.tokens..])
    }

    /// The token at a position, [`BOUNDARY`] outside the corpus.
    #[inline]
    pub(super) fn token(&self, at: usize) -> u32 {
        self.tokens().get(at).map_or(BOUNDARY, |t| t.to_le())
    }

    /// The position of the suffix of a rank; outside the corpus where there is none.
    #[inline]
    pub(super) fn suffix(&self, rank: usize) -> usize {
        self.suffixes().get(rank).map_or(usize::MAX / 2, |s| s.to_le() as usize)
    }

    pub(super) fn len(&self) -> usize {
        self.tokens
    }

    pub(super) fn vocab(&self) -> u32 {
        self.vocab
    }

    pub(super) fn documents(&self) -> u64 {
        self.documents
    }

    pub(super) fn bytes(&self) -> usize {
        self.map.bytes().len()
    }
}

/// Write the corpus of some documents, none of them empty, for a vocabulary of `vocab` tokens. A file that is there is
/// replaced at once, by renaming; who has it open keeps the old one. Takes 8 bytes of memory a token, and all cores.
///
/// # Errors [`Error::OutOfRange`] for the vocabulary or a token, [`Error::Invalid`] for no documents, an empty one, too
/// many tokens, a file that cannot be written, or a folder, device or pipe in its place.
pub fn write_corpus(path: &Path, vocab: u32, documents: &[&[u32]]) -> Result<()> {
    in_range("vocab", vocab, 1, MAX_VOCAB.into())?;
    let total: u64 = documents.iter().map(|d| d.len() as u64 + 1).sum();
    if documents.is_empty() || documents.iter().any(|d| d.is_empty()) || total > MAX_CORPUS {
        let got = format!("{} documents of {} tokens", documents.len(), total - documents.len() as u64);
        let why = format!("a corpus has documents, each has tokens, all together at most {MAX_CORPUS}");
        return Err(Error::Invalid { what: "corpus", got, why });
    }
    if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(refused(path, "it is there and no regular file: a corpus replaces files alone"));
    }
    let mut tokens: Vec<u32> = Vec::with_capacity(total as usize);
    for document in documents {
        document.iter().try_for_each(|&t| in_range("corpus token", t, 0, i128::from(vocab) - 1).map(drop))?;
        tokens.extend_from_slice(document);
        tokens.push(BOUNDARY);
    }
    let mut suffixes: Vec<u32> = (0..total as u32).collect();
    let first = |at: u32| &tokens[at as usize..tokens.len().min(at as usize + SORTED)];
    let order = |&a: &u32, &b: &u32| first(a).cmp(first(b)).then(a.cmp(&b));
    // A pool of this call's own: a forked child has the memory of rayon's global one, and waits for ever for its threads.
    match rayon::ThreadPoolBuilder::new().thread_name(|i| format!("specrs-corpus-{i}")).build() {
        Ok(pool) => pool.install(|| suffixes.par_sort_unstable_by(order)),
        Err(_) => suffixes.sort_unstable_by(order), // the system refused a thread
    }
    let mut header = [0u8; HEADER];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&vocab.to_le_bytes());
    header[16..24].copy_from_slice(&total.to_le_bytes());
    header[24..32].copy_from_slice(&(documents.len() as u64).to_le_bytes());
    header[32..40].copy_from_slice(&(SORTED as u64).to_le_bytes());
    for list in [&mut tokens, &mut suffixes] {
        list.iter_mut().for_each(|v| *v = v.to_le());
    }
    let body: [&[u8]; 2] = [bytemuck::cast_slice(&tokens), bytemuck::cast_slice(&suffixes)];
    let mut sum = Checksum::default();
    sum.add(&header[..40]);
    body.iter().for_each(|part| sum.add(part));
    header[40..48].copy_from_slice(&sum.0.to_le_bytes());
    let (file, beside) = beside(path).map_err(|e| refused(path, e.to_string()))?;
    let write = || -> std::io::Result<()> {
        let mut out = BufWriter::new(file);
        out.write_all(&header)?;
        body.iter().try_for_each(|part| out.write_all(part))?;
        out.into_inner().map_err(|e| e.into_error())?.sync_all()?;
        std::fs::rename(&beside, path)
    };
    write().map_err(|e| {
        let _ = std::fs::remove_file(&beside);
        refused(path, e.to_string())
    })
}

/// A new file in the folder of `path`, whose name no other writer has, of this process or another one.
fn beside(path: &Path) -> std::io::Result<(File, PathBuf)> {
    static WRITERS: AtomicU64 = AtomicU64::new(0);
    loop {
        let writer = WRITERS.fetch_add(1, Ordering::Relaxed);
        let name = path.with_file_name(format!(".corpus-{}-{writer}.partial", std::process::id()));
        match File::create_new(&name) {
            // Left behind by a process that ended in the midst, or of one that shares the folder from another machine.
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            made => return made.map(|file| (file, name)),
        }
    }
}

/// A sum of 32-bit words in which each bit and the order matter: damage is seen, malice is not.
#[derive(Default)]
struct Checksum(u64);

impl Checksum {
    fn add(&mut self, bytes: &[u8]) {
        for word in bytes.chunks(4) {
            let mut number = [0; 4];
            number[..word.len()].copy_from_slice(word);
            let mixed = (self.0 ^ u64::from(u32::from_le_bytes(number))).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            self.0 = mixed ^ mixed >> 29;
        }
    }
}
