//! Sources of drafts that need no head, and one tree from many sources.
//!
//! Place in the flow: right of `round`, beside `host` and `device`. Verification draws the target's own tokens and
//! follows the drafts that carry them, so nothing here can change an output: probabilities decide time alone.

pub mod automaton;
mod calibration;
mod copy;
mod corpus;
mod corpus_file;
mod edges;
mod list_beams;
mod lists;
mod map;
mod merge;
mod mix;
mod proposal;
pub mod recycle;
mod suffix;
mod weigh;

pub use calibration::{Account, Calibration, MAX_SOURCES};
pub use corpus::{Corpus, CorpusDrafts};
pub use corpus_file::{MAX_CORPUS, write_corpus};
pub use list_beams::ListBeams;
pub use lists::{Lists, list_tree};
pub use merge::{MergeLimits, MergedDrafts, merge};
pub use proposal::{BUCKETS, MAX_PROPOSED, Proposal};
pub use recycle::RecycledTokens;
pub use suffix::{FEWEST_BYTES, MOST_BYTES, SuffixDrafts};
pub use weigh::{ChosenTrees, PassTable, RoundCost};
