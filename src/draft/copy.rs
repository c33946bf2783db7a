//! A text that repeats another one with edits: the place that it repeats, and its edits so far.
//!
//! The output that edits a file repeats the file, departs from it, and comes back to it. A [`Copy`] follows it: it
//! agrees with the source token by token; where it departs it gathers what comes instead; and where the source's next
//! tokens turn up it goes on behind them. What stood in the source and what came instead is an [`Edit`]. Edits recur,
//! as a name that is changed is changed wherever it stands, so an edit that was made more often than it was left out is
//! expected where its old tokens stand again, and the copy goes on behind them. A longest match alone does neither: a
//! departure resets it, and each occurrence of a changed name is one.

/// Tokens of the source that one edit may replace.
const OLD: usize = 8;
/// Tokens that may stand in their place.
const NEW: usize = 12;
/// Edits that are remembered.
const EDITS: usize = 8;
/// Agreement in a row that settles where a departure ended.
const SETTLED: u32 = 2;
/// Agreement that a copy starts with, where its first token agrees or a departure seems to end.
const FOUND: u32 = 4;
/// Trust in the first token of a source that has not been tried: a prediction of the user's.
const UNTRIED: f32 = 0.6;

/// A few tokens, inline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span<const N: usize> {
    tokens: [u32; N],
    len: u8,
}

impl<const N: usize> Default for Span<N> {
    fn default() -> Self {
        Self { tokens: [0; N], len: 0 }
    }
}

impl<const N: usize> Span<N> {
    fn of(tokens: impl IntoIterator<Item = u32>) -> Option<Self> {
        tokens.into_iter().try_fold(Self::default(), Self::with)
    }

    /// One token more; `None` where it is full.
    fn with(mut self, token: u32) -> Option<Self> {
        *self.tokens.get_mut(usize::from(self.len))? = token;
        self.len += 1;
        Some(self)
    }

    fn get(&self) -> &[u32] {
        &self.tokens[..usize::from(self.len)]
    }
}

/// Tokens of the source, and what came in their place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Edit {
    old: Span<OLD>,
    new: Span<NEW>,
}

/// An edit with how often it was made, and how often its old tokens stayed.
#[derive(Debug, Clone, Copy, Default)]
struct Habit {
    edit: Edit,
    made: u32,
    left: u32,
}

impl Habit {
    /// Probability that it is made once more.
    fn rate(&self) -> f32 {
        (self.made as f32 + 0.5) / ((self.made + self.left) as f32 + 1.0)
    }
}

/// Habits of a text: its departures from what it repeats.
#[derive(Debug, Clone, Copy)]
pub(super) struct Habits {
    known: [Habit; EDITS],
    /// Departures that came back one token of the source for one of the text, and all of them; decayed.
    aligned: f32,
    departures: f32,
}

impl Default for Habits {
    /// Habits of a text of which nothing is known; a departure is rather no edit.
    fn default() -> Self {
        Self { known: [Habit::default(); EDITS], aligned: 0.2, departures: 2.0 }
    }
}

impl Habits {
    /// Probability that behind one changed token the source goes on.
    fn alignment(&self) -> f32 {
        self.aligned / self.departures
    }

    fn departed(&mut self, aligned: bool) {
        const KEPT: f32 = 0.95;
        self.aligned = self.aligned * KEPT + if aligned { 1.0 } else { 0.0 };
        self.departures = self.departures * KEPT + 1.0;
    }

    /// The edit was made.
    fn made(&mut self, edit: Edit) {
        if let Some(habit) = self.known.iter_mut().find(|h| h.made > 0 && h.edit == edit) {
            habit.made += 1;
        } else if let Some(least) = self.known.iter_mut().min_by(|a, b| a.rate().total_cmp(&b.rate())) {
            *least = Habit { edit, made: 1, left: 0 };
        }
    }

    /// Old tokens of edits stand at `position` of the source, and the first of them came.
    fn left(&mut self, source: impl Fn(usize) -> Option<u32>, position: usize) {
        for habit in self.known.iter_mut().filter(|h| h.made > 0) {
            if stands(habit.edit.old.get(), &source, position) {
                habit.left += 1;
            }
        }
    }

    /// The likeliest edit of the tokens at `position`, among edits that begin with `new`.
    fn expected(&self, source: impl Fn(usize) -> Option<u32>, position: usize, new: &[u32]) -> Option<&Habit> {
        let fits =
            |h: &&Habit| h.made > 0 && h.edit.new.get().starts_with(new) && stands(h.edit.old.get(), &source, position);
        // Among equally likely ones, take the one that replaces most.
        let all = self.known.iter().filter(fits);
        all.max_by(|a, b| a.rate().total_cmp(&b.rate()).then(a.edit.old.len.cmp(&b.edit.old.len)))
    }
}

/// True if the source has these tokens at a position.
fn stands(tokens: &[u32], source: impl Fn(usize) -> Option<u32>, position: usize) -> bool {
    tokens.iter().enumerate().all(|(i, &t)| source(position + i) == Some(t))
}

/// Tokens that came where the source has others.
#[derive(Debug, Clone, Copy)]
struct Departure {
    /// Position in the source.
    from: usize,
    new: Span<NEW>,
}

/// A position of a source whose tokens the text repeats.
#[derive(Debug, Clone, Copy)]
pub(super) struct Copy {
    position: usize,
    /// Tokens that agreed, less what departures cost; 0: not yet tried.
    agreed: u32,
    departure: Option<Departure>,
    /// The departure that `agreed` tokens ago came to an end, perhaps, and the tokens of the source that it replaced.
    ended: Option<(Departure, usize, u32)>,
}

/// One token that a copy expects.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Expected {
    pub(super) token: u32,
    /// Probability, where all before it came.
    pub(super) trust: f32,
    /// Tokens of agreement behind it, as the length of a match.
    pub(super) length: u32,
}

impl Copy {
    /// A copy from `position` on, after so many tokens that agreed; 0: nobody knows whether there is one.
    pub(super) fn new(position: usize, agreed: u32) -> Self {
        Self { position, agreed, departure: None, ended: None }
    }

    /// Tokens since the text departed from the source; 0 where it agrees.
    pub(super) fn astray(&self) -> usize {
        self.departure.map_or(0, |d| usize::from(d.new.len))
    }

    /// True if a token has come yet that the source has.
    pub(super) fn tried(&self) -> bool {
        self.agreed > 0
    }

    /// The copy behind `token`; `None` where it is none any more, or at the source's end. Habits are told of edits.
    pub(super) fn told(
        mut self,
        token: u32,
        source: impl Fn(usize) -> Option<u32>,
        mut habits: Option<&mut Habits>,
    ) -> Option<Self> {
        if let Some(departure) = self.departure {
            return self.away(departure, token, source);
        }
        if source(self.position)? == token {
            if let Some(h) = &mut habits {
                h.left(&source, self.position);
            }
            self.position += 1;
            self.agreed += 1;
            if let Some((departure, old, agreed)) = &mut self.ended {
                *agreed += 1;
                if *agreed >= SETTLED {
                    if let Some(h) = habits {
                        let old = (0..*old).map_while(|i| source(departure.from + i));
                        h.departed(departure.new.len == 1);
                        if let Some(old) = Span::of(old).filter(|o| o.len > 0 && departure.new.len > 0) {
                            h.made(Edit { old, new: departure.new });
                        }
                    }
                    self.ended = None;
                }
            }
            return Some(self);
        }
        let departure = match self.ended.take() {
            // The departure had not come to an end: the tokens agreed by chance.
            Some((departure, old, agreed)) => {
                if let Some(h) = habits {
                    h.departed(false);
                }
                let mut by_chance = (0..agreed as usize).map_while(|i| source(departure.from + old + i));
                Departure { new: by_chance.try_fold(departure.new, Span::with)?, ..departure }
            }
            None => Departure { from: self.position, new: Span::default() },
        };
        self.away(departure, token, source)
    }

    /// A token while the text has departed from the source.
    fn away(mut self, departure: Departure, token: u32, source: impl Fn(usize) -> Option<u32>) -> Option<Self> {
        let new = departure.new.get();
        let here = |m: usize| source(departure.from + m) == Some(token);
        // Most likely the text has replaced as many tokens of the source as came; then fewer or more.
        let replaced = (0..=OLD).filter(|&m| here(m)).min_by_key(|&m| m.abs_diff(new.len()));
        let Some(old) = replaced else {
            self.departure = Some(Departure { new: departure.new.with(token)?, ..departure });
            return Some(self);
        };
        self.position = departure.from + old + 1;
        self.agreed = (self.agreed / 2).max(FOUND);
        self.departure = None;
        self.ended = Some((departure, old, 1));
        Some(self)
    }

    /// The tokens expected next, as far as the source reaches, at most `depth`.
    pub(super) fn expected(
        &self,
        depth: usize,
        source: impl Fn(usize) -> Option<u32>,
        habits: &Habits,
        weight: impl Fn(u32) -> f32,
        out: &mut Vec<Expected>,
    ) {
        out.clear();
        let (mut position, mut run) = (self.position, self.agreed);
        if let Some(departure) = &self.departure {
            let came = departure.new.get();
            run = (run / 2).max(FOUND);
            if let Some(habit) = habits.expected(&source, departure.from, came) {
                let (new, trust) = (habit.edit.new.get(), habit.rate());
                out.extend(new[came.len()..].iter().map(|&token| Expected { token, trust, length: run }));
                position = departure.from + habit.edit.old.get().len();
            } else {
                position = departure.from + came.len();
                let Some(token) = source(position) else { return };
                // The longer it is away, the less one knows where it comes back.
                let trust = habits.alignment() / came.len() as f32;
                out.push(Expected { token, trust, length: 0 });
                position += 1;
            }
        } else if run == 0 {
            let Some(token) = source(position) else { return };
            out.push(Expected { token, trust: UNTRIED, length: 0 });
            (position, run) = (position + 1, FOUND);
        }
        while out.len() < depth {
            run += 1;
            let trust = weight(run - 1);
            match habits.expected(&source, position, &[]).filter(|h| h.rate() > 0.5) {
                Some(habit) => {
                    let (new, rate) = (habit.edit.new.get(), habit.rate());
                    out.push(Expected { token: new[0], trust: trust.min(rate), length: run });
                    out.extend(new[1..].iter().map(|&token| Expected { token, trust, length: run }));
                    position += habit.edit.old.get().len();
                }
                None => {
                    let Some(token) = source(position) else { break };
                    out.push(Expected { token, trust, length: run });
                    position += 1;
                }
            }
        }
        out.truncate(depth);
    }
}
