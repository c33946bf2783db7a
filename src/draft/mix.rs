//! What follows a text, by the contexts that it ends in: probabilities mixed over match lengths, and the best tree of them.
//!
//! Contexts are strings that occurred before. The longest one speaks first and keeps the rest of the probability for
//! shorter ones, as in prediction by partial matching (Cleary and Witten 1984): a context of length l that was followed N times,
//! by d different tokens, speaks with weight `reliability(l) * (N + 1) / (N + d)` of what is left, and each of its tokens gets
//! the share `count / N` of that. So a token behind a match of 2 never claims what one behind a match of 20 does, and
//! what two lengths agree on claims more.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::proposal::Proposal;

/// Contexts that may speak of one position.
const LEVELS: usize = 6;
/// Followers of one context that are looked at, the newest first.
const FOLLOWERS: usize = 48;
/// What is left to shorter contexts, below which they are not asked.
const RESIDUE: f32 = 0.03;
/// Children of one node at most.
const WIDTH: usize = 8;

/// Strings of a text, and what followed them.
pub(super) trait Contexts {
    /// A string that occurs.
    type State: Copy;

    /// Its tokens.
    fn length(&self, of: Self::State) -> u32;

    /// Its longest suffix with other followers; the empty string's is itself.
    fn shorter(&self, of: Self::State) -> Self::State;

    /// The longest suffix of `of` and a token behind it that occurs.
    fn advance(&self, of: Self::State, token: u32) -> Self::State;

    /// Calls `found` with tokens that follow and how often, at most `most`; whether that was all.
    fn followers(&self, of: Self::State, most: usize, found: &mut dyn FnMut(u32, u32)) -> bool;

    /// How often it occurs.
    fn occurrences(&self, of: Self::State) -> u32;
}

/// Tokens that are expected whatever the contexts say: a copy that goes on.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Copied<'a> {
    /// In their order.
    pub(super) tokens: &'a [u32],
    /// Tokens that agreed with the copy so far; `None`: it was never tried, or it has just failed.
    pub(super) agreed: Option<u32>,
    /// Tokens that disagreed since.
    pub(super) missed: u32,
}

/// How large a proposal may be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    pub(super) nodes: usize,
    pub(super) depth: usize,
    /// Smallest probability of a path.
    pub(super) floor: f32,
}

/// Share of positions at which what followed a context of this length follows again.
fn reliability(length: u32) -> f32 {
    let l = length as f32;
    (l + 0.6) / (l + 1.9)
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

/// What a node of the proposal is in every source.
struct Place<S> {
    states: Vec<S>,
    /// Index into the copied tokens; `usize::MAX` off them.
    copied: usize,
    path: f32,
    depth: usize,
}

/// The likeliest tree below a text that ends in `contexts`, of one or more sources of one kind.
pub(super) fn propose<C: Contexts>(contexts: &[(&C, C::State)], copied: Copied<'_>, bounds: Bounds) -> Proposal {
    let mut proposal = Proposal::default();
    if bounds.nodes == 0 || bounds.depth == 0 {
        return proposal;
    }
    let mut scratch = Vec::new();
    let (mut open, mut arrivals) = (BinaryHeap::new(), 0);
    let root = Place { states: contexts.iter().map(|c| c.1).collect(), copied: 0, path: 1.0, depth: 0 };
    let mut places: Vec<Place<C::State>> = Vec::new();
    let mut expand = |node: i32, place: &Place<C::State>, open: &mut BinaryHeap<Open>| {
        candidates(contexts, place, copied, &mut scratch);
        for candidate in scratch.drain(..) {
            let path = place.path * candidate.prob;
            if path >= bounds.floor && candidate.prob > 0.0 {
                open.push(Open { path, arrival: Reverse(arrivals), parent: node, candidate });
                arrivals += 1;
            }
        }
    };
    expand(-1, &root, &mut open);
    while let Some(Open { path, parent, candidate, .. }) = open.pop() {
        let Candidate { token, prob, length } = candidate;
        let node = proposal.push(parent, token, prob, bucket(length, prob));
        if proposal.len() == bounds.nodes {
            break;
        }
        let above = usize::try_from(parent).map_or(&root, |p| &places[p]);
        let states = contexts.iter().zip(&above.states).map(|((c, _), &s)| c.advance(s, token)).collect();
        let follows = copied.tokens.get(above.copied) == Some(&token);
        let along = if follows { above.copied + 1 } else { usize::MAX };
        let place = Place { states, copied: along, path, depth: above.depth + 1 };
        if place.depth < bounds.depth {
            expand(node as i32, &place, &mut open);
        }
        places.push(place);
    }
    proposal
}

/// Followers of a place, the likeliest first; their probabilities sum to less than 1.
fn candidates<C: Contexts>(
    contexts: &[(&C, C::State)],
    place: &Place<C::State>,
    copied: Copied<'_>,
    found: &mut Vec<Candidate>,
) {
    found.clear();
    let mut left = 1.0f32;
    if let Some(&token) = copied.tokens.get(place.copied) {
        let agreed = copied.agreed.map(|a| a + place.copied as u32);
        let trust = match (agreed, place.copied) {
            (Some(run), _) => reliability(run),
            (None, 0) if copied.missed == 0 => 0.6,
            (None, 0) => 0.3 / copied.missed as f32,
            (None, along) => reliability(along as u32 + 1),
        };
        found.push(Candidate { token, prob: trust, length: agreed.unwrap_or(place.copied as u32) });
        left -= trust;
    }
    let mut states = place.states.clone();
    let mut counts: Vec<(u32, u32)> = Vec::new();
    for _ in 0..LEVELS {
        if left < RESIDUE {
            break;
        }
        // The longest context of all sources speaks.
        let lengths = states.iter().enumerate().map(|(i, &s)| (contexts[i].0.length(s), i));
        let Some((length, at)) = lengths.max_by_key(|&(length, i)| (length, Reverse(i))) else { break };
        if length == 0 {
            break;
        }
        let (source, state) = (contexts[at].0, states[at]);
        states[at] = source.shorter(state);
        counts.clear();
        let all = source.followers(state, FOLLOWERS, &mut |token, count| counts.push((token, count)));
        let seen: u32 = counts.iter().map(|c| c.1).sum();
        if seen == 0 {
            continue;
        }
        let total = if all { seen } else { source.occurrences(state).max(seen) } as f32;
        let weight = left * reliability(length) * (total + 1.0) / (total + counts.len() as f32);
        for &(token, count) in &counts {
            let prob = weight * count as f32 / total;
            match found.iter_mut().find(|c| c.token == token) {
                Some(there) => there.prob += prob,
                None => found.push(Candidate { token, prob, length }),
            }
        }
        left -= weight;
    }
    found.sort_by(|a, b| b.prob.total_cmp(&a.prob));
    found.truncate(WIDTH);
}
