//! Texts of one token of JSON: regular expressions, and the texts that are in all, some or none of them.

use llguidance::derivre::{Regex, RegexAst, RegexBuilder};

/// Steps of the lexer that a question about a term may take.
const FUEL: u64 = 200_000;

/// A set of texts.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Term {
    Rx(String),
    All(Vec<Term>),
    Any(Vec<Term>),
    Not(Box<Term>),
}

impl Term {
    /// The texts that a regular expression in Rust's syntax matches as a whole; it has no `/` and no line break.
    pub(super) fn rx(text: impl Into<String>) -> Self {
        Self::Rx(text.into())
    }

    pub(super) fn all(mut terms: Vec<Term>) -> Self {
        terms.dedup();
        if terms.len() == 1 { terms.remove(0) } else { Self::All(terms) }
    }

    pub(super) fn any(mut terms: Vec<Term>) -> Self {
        if terms.len() == 1 { terms.remove(0) } else { Self::Any(terms) }
    }

    pub(super) fn not(term: Term) -> Self {
        Self::Not(Box::new(term))
    }

    /// Write the term in Lark's syntax.
    pub(super) fn lark(&self, out: &mut String) {
        let joined = |terms: &[Term], sign: &str, out: &mut String| {
            out.push('(');
            for (i, term) in terms.iter().enumerate() {
                if i > 0 {
                    out.push_str(sign);
                }
                term.lark(out);
            }
            out.push(')');
        };
        match self {
            Self::Rx(text) => {
                out.push('/');
                out.push_str(text);
                out.push('/');
            }
            Self::All(terms) => joined(terms, " & ", out),
            Self::Any(terms) => joined(terms, " | ", out),
            Self::Not(term) => {
                out.push('~');
                term.lark(out);
            }
        }
    }

    fn ast(&self) -> RegexAst {
        let each = |terms: &[Term]| terms.iter().map(Term::ast).collect();
        match self {
            Self::Rx(text) => RegexAst::Regex(text.clone()),
            Self::All(terms) => RegexAst::And(each(terms)),
            Self::Any(terms) => RegexAst::Or(each(terms)),
            Self::Not(term) => RegexAst::Not(Box::new(term.ast())),
        }
    }

    fn compiled(&self) -> Result<Regex, String> {
        let mut builder = RegexBuilder::new();
        let built = builder.mk(&self.ast()).and_then(|e| builder.to_regex_limited(e, FUEL));
        built.map_err(|_| "it is too large to tell what it matches".into())
    }

    /// True if no text is in it.
    ///
    /// # Errors
    /// That takes too long to tell.
    pub(super) fn is_empty(&self) -> Result<bool, String> {
        match self {
            Self::Rx(_) => Ok(false), // expressions that are made here match something
            Self::Any(terms) => terms.iter().try_fold(true, |empty, t| Ok(empty && t.is_empty()?)),
            _ => Ok(self.compiled()?.always_empty()),
        }
    }

    /// True if a text is in it.
    pub(super) fn has(&self, text: &str) -> Result<bool, String> {
        Ok(self.compiled()?.is_match(text))
    }
}
