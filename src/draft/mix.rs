//! Predictions of a text's next tokens, by the contexts that it ends in: probabilities mixed over match lengths, and
//! the best tree of them.
//!
//! Contexts are strings that occurred before. The longest one speaks first and keeps the rest of the probability for
//! shorter ones, as in prediction by partial matching (Cleary and Witten 1984). A context of length l that was followed
//! N times, by d different tokens, met something new d times; so it speaks with weight `(N - d + a) / (N + a)` of what
//! is left, where `a(l) = l / 4 + 0.006 l^2` is what a match of that length is worth by itself. Each of its tokens gets
//! the share `count / N` of that. So a token behind a match of 2 never claims what one behind a match of 20 does, and
//! what two lengths agree on claims more. The weight was fitted to source code and prose in a vocabulary of 8192
//! tokens: behind a match of 2 / 4 / 8 / 16 / 32 tokens that was met once, what followed it follows again in 35 / 55 /
//! 68 / 81 / 95% of places.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::copy::Expected;
use super::proposal::Proposal;

/// Contexts that may speak of one position.
const LEVELS: usize = 5;
/// Followers of one context that are looked at, the newest first.
const FOLLOWERS: usize = 24;
/// Share that is left to shorter contexts, below which they are not asked.
const RESIDUE: f32 = 0.05;
/// Children of one node at most.
const WIDTH: usize = 8;

/// Strings of a text, and what followed them.
pub(super) trait Contexts {
    /// A string that occurs.
    type State: Copy;

    /// Number of the context's tokens.
    fn length(&self, of: Self::State) -> u32;

    /// The context's longest suffix with other followers; the empty string's is itself.
    fn shorter(&self, of: Self::State) -> Self::State;

    /// The longest suffix of `of` and a token behind it that occurs.
    fn advance(&self, of: Self::State, token: u32) -> Self::State;

    /// Calls `found` with tokens that follow and how often, at most `most`; whether that was all.
    fn followers(&self, of: Self::State, most: usize, found: &mut dyn FnMut(u32, u32)) -> bool;

    /// Number of the context's occurrences.
    fn occurrences(&self, of: Self::State) -> u32;
}

/// Limits of a proposal's size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    pub(super) nodes: usize,
    pub(super) depth: usize,
    /// Smallest probability of a path.
    pub(super) floor: f32,
}

/// Weight of a match of this length, in occurrences.
fn worth(length: u32) -> f32 {
    let l = length as f32;
    0.25 * l + 0.006 * l * l
}

/// Share of positions at which one of `distinct` tokens, that followed a match of this length `total` times, follows
/// again.
pub(super) fn weight(length: u32, total: f32, distinct: usize) -> f32 {
    let a = worth(length);
    (total - distinct as f32 + a) / (total + a)
}

/// Class of a claim for calibration: length of match in eight classes, probability in eight.
fn bucket(length: u32, prob: f32) -> u8 {
    let long = match length {
        0 | 1 => 0,
        2 => 1,
        3 => 2,
        4..=5 => 3,
        6..=8 => 4,
        9..=16 => 5,
        17..=32 => 6,
        _ => 7,
    };
    let likely = [1.0 / 16.0, 0.125, 0.25, 0.5, 0.75, 0.875, 0.9375].iter().filter(|&&p| prob >= p).count();
    (long * 8 + likely) as u8
}

/// A follower with what was said for it.
struct Candidate {
    token: u32,
    prob: f32,
    /// Longest match that names it.
    length: u32,
}

/// A candidate below a node of the proposal.
struct Open {
    path: f32,
    /// Order of arrival, which breaks ties.
    arrival: Reverse<u32>,
    parent: i32,
    candidate: Candidate,
}

impl PartialEq for Open {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Open {}

impl Ord for Open {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.path.total_cmp(&other.path).then(self.arrival.cmp(&other.arrival))
    }
}

impl PartialOrd for Open {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// A node of the proposal, beside its states.
struct Place {
    /// Index into the copied tokens; `usize::MAX` off them.
    copied: usize,
    path: f32,
    depth: usize,
}

/// The likeliest tree below a text that ends in `contexts`, of one or more sources of one kind, where `copied` is
/// expected in any case.
pub(super) fn propose<C: Contexts>(contexts: &[(&C, C::State)], copied: &[Expected], bounds: Bounds) -> Proposal {
    let mut proposal = Proposal::default();
    if bounds.nodes == 0 || bounds.depth == 0 {
        return proposal;
    }
    let mut mixer =
        Mixer { contexts, copied, floor: bounds.floor, states: Vec::new(), counts: Vec::new(), found: Vec::new() };
    let (mut open, mut arrivals) = (BinaryHeap::new(), 0);
    // The root is first; node n is at n + 1.
    let mut places = vec![Place { copied: 0, path: 1.0, depth: 0 }];
    let mut states: Vec<C::State> = contexts.iter().map(|c| c.1).collect();
    let each = contexts.len();
    loop {
        let at = places.len() - 1;
        let place = &places[at];
        if place.depth < bounds.depth {
            for candidate in mixer.candidates(place, &states[at * each..]) {
                let path = place.path * candidate.prob;
                if path >= bounds.floor {
                    open.push(Open { path, arrival: Reverse(arrivals), parent: at as i32 - 1, candidate });
                    arrivals += 1;
                }
            }
        }
        let Some(Open { path, parent, candidate, .. }) = open.pop() else { break };
        let Candidate { token, prob, length } = candidate;
        proposal.push(parent, token, prob, bucket(length, prob));
        if proposal.len() == bounds.nodes {
            break;
        }
        let above = (parent + 1) as usize;
        for (i, (source, _)) in contexts.iter().enumerate() {
            states.push(source.advance(states[above * each + i], token));
        }
        let Place { copied: from, depth, .. } = places[above];
        let along = if copied.get(from).is_some_and(|c| c.token == token) { from + 1 } else { usize::MAX };
        places.push(Place { copied: along, path, depth: depth + 1 });
    }
    proposal
}

/// Finds followers; keeps its lists from place to place.
struct Mixer<'a, C: Contexts> {
    contexts: &'a [(&'a C, C::State)],
    copied: &'a [Expected],
    floor: f32,
    states: Vec<C::State>,
    counts: Vec<(u32, u32)>,
    found: Vec<Candidate>,
}

impl<C: Contexts> Mixer<'_, C> {
    /// Followers of a place, the likeliest first; their probabilities are above 0 and sum to at most 1.
    fn candidates(&mut self, place: &Place, states: &[C::State]) -> impl Iterator<Item = Candidate> + '_ {
        let Self { contexts, copied, floor, states: now, counts, found } = self;
        found.clear();
        let mut left = 1.0f32;
        if let Some(&Expected { token, trust, length }) = copied.get(place.copied).filter(|c| c.trust > 0.0) {
            found.push(Candidate { token, prob: trust, length });
            left -= trust;
        }
        now.clear();
        now.extend_from_slice(states);
        for _ in 0..LEVELS {
            // The share that is left cannot make a path, or hardly.
            if left < RESIDUE || left * place.path < *floor {
                break;
            }
            // The longest context of all sources speaks.
            let lengths = now.iter().enumerate().map(|(i, &s)| (contexts[i].0.length(s), i));
            let Some((length, at)) = lengths.max_by_key(|&(length, i)| (length, Reverse(i))) else { break };
            if length == 0 || length == 1 && !found.is_empty() {
                break; // one token says little, and much of it
            }
            let (source, state) = (contexts[at].0, now[at]);
            now[at] = source.shorter(state);
            counts.clear();
            let all = source.followers(state, FOLLOWERS, &mut |token, count| counts.push((token, count)));
            let seen: u32 = counts.iter().fold(0, |sum, c| sum.saturating_add(c.1));
            if seen == 0 {
                continue;
            }
            let total = if all { seen } else { source.occurrences(state).max(seen) } as f32;
            let weight = left * weight(length, total, counts.len());
            for &(token, count) in counts.iter() {
                let prob = weight * count as f32 / total;
                match found.iter_mut().find(|c| c.token == token) {
                    Some(there) => there.prob += prob,
                    None => found.push(Candidate { token, prob, length }),
                }
            }
            left -= weight;
        }
        found.retain(|c| c.prob > 0.0);
        found.sort_by(|a, b| b.prob.total_cmp(&a.prob));
        found.truncate(WIDTH);
        found.drain(..)
    }
}
