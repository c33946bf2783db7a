//! Strings of a JSON schema: patterns, formats and lengths as regular expressions of JSON's text.
//!
//! A character is written as JSON must: `"` and `\` behind a backslash, a control character by its short escape or as
//! `\u00XX`, any other as itself. So sets of strings meet as their texts do, and no name has a second spelling but for
//! control characters, whose spellings all stand wherever the character does.

use regex_syntax::hir::{Class, Hir, HirKind, Look};

use super::reason::shortened;
use super::term::Term;

/// Any one character within a JSON string.
pub(super) const CHARACTER: &str = r#"(?:[^"\\\x00-\x1f]|\\(?:["\\bfnrt]|u00[01][0-9a-fA-F]))"#;
/// A bound of a length or a count that no output reaches: there is none.
pub(super) const UNREACHED: u64 = 10_000_000;

/// Conditions on a string.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Strings {
    pub(super) shortest: u64,
    pub(super) longest: Option<u64>,
    /// All of these, of JSON's text with its quotes.
    pub(super) patterns: Vec<Term>,
    pub(super) listed: Option<Vec<String>>,
}

impl Strings {
    pub(super) fn meet(&self, other: &Self) -> Self {
        let mut patterns = self.patterns.clone();
        patterns.extend(other.patterns.iter().filter(|p| !self.patterns.contains(p)).cloned());
        let listed = match (&self.listed, &other.listed) {
            (Some(a), Some(b)) => Some(a.iter().filter(|s| b.contains(s)).cloned().collect()),
            (a, b) => a.clone().or_else(|| b.clone()),
        };
        let longest = self.longest.into_iter().chain(other.longest).min();
        Self { shortest: self.shortest.max(other.shortest), longest, patterns, listed }
    }

    /// `None` where no string is so.
    ///
    /// # Errors
    /// Patterns of which that cannot be told.
    pub(super) fn told(&self) -> Result<Option<Term>, String> {
        let longest = self.longest.filter(|&n| n < UNREACHED);
        if longest.is_some_and(|n| n < self.shortest) {
            return Ok(None);
        }
        if let Some(listed) = &self.listed {
            let mut found = Vec::new();
            for text in listed {
                let length = text.chars().count() as u64;
                let (quoted, fits) = (quoted(text), length >= self.shortest && longest.is_none_or(|n| length <= n));
                let json = serde_json::Value::from(text.as_str()).to_string();
                if fits
                    && self.patterns.iter().try_fold(true, |all, p| {
                        Ok::<_, String>(all && p.has(&json).map_err(|why| format!("pattern: {why}"))?)
                    })?
                {
                    found.push(Term::rx(quoted));
                }
            }
            return Ok((!found.is_empty()).then(|| Term::any(found)));
        }
        let mut all = self.patterns.clone();
        if self.shortest > 0 || longest.is_some() || all.is_empty() {
            let times = match (self.shortest, longest) {
                (0, None) => "*".into(),
                (low, None) => format!("{{{low},}}"),
                (low, Some(high)) => format!("{{{low},{high}}}"),
            };
            all.push(Term::rx(format!("\"{CHARACTER}{times}\"")));
        }
        let term = Term::all(all);
        Ok((!term.is_empty().map_err(|why| format!("pattern: {why}"))?).then_some(term))
    }
}

/// The regular expression of one string's JSON text.
pub(super) fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    text.chars().for_each(|c| character(c, &mut out));
    out.push('"');
    out
}

/// The strings in which a schema's pattern is found, as JSON's text.
///
/// Patterns are ECMA 262's, as far as Rust's syntax has them. Where engines differ in what a class has (`\s`, `\w`, `.`),
/// it has what ECMA 262 and Python agree on.
///
/// # Errors
/// A reason for a text that is not a pattern, or for a pattern that cannot be enforced.
pub(super) fn pattern(text: &str) -> Result<Term, String> {
    let hir = regex_syntax::parse(&translated(text)?).map_err(|e| shortened(&e.to_string()))?;
    let mut alternatives = Vec::new();
    apart(vec![hir], &mut alternatives)?;
    let mut found = Vec::new();
    for parts in alternatives {
        let (mut parts, mut begins, mut ends) = (&parts[..], false, false);
        while let [first, rest @ ..] = parts
            && *first.kind() == HirKind::Look(Look::Start)
        {
            (begins, parts) = (true, rest);
        }
        while let [rest @ .., last] = parts
            && *last.kind() == HirKind::Look(Look::End)
        {
            (ends, parts) = (true, rest);
        }
        let mut out = String::from("\"");
        if !begins {
            out.push_str(&format!("{CHARACTER}*"));
        }
        for part in parts {
            if !part.properties().look_set().is_empty() {
                return Err("^, $ and word boundaries work at its beginning and its end alone".into());
            }
            written(part, &mut out)?;
        }
        if !ends {
            out.push_str(&format!("{CHARACTER}*"));
        }
        out.push('"');
        found.push(out);
    }
    if found.is_empty() {
        return Err("matches nothing".into());
    }
    Ok(Term::rx(found.join("|")))
}

/// A concatenation as alternatives of concatenations whose first and last parts are anchors where they have any.
fn apart(parts: Vec<Hir>, found: &mut Vec<Vec<Hir>>) -> Result<(), String> {
    if found.len() > 200 {
        return Err("has anchors in too many alternatives".into());
    }
    for at in [0, parts.len().saturating_sub(1)] {
        let Some(part) = parts.get(at) else { continue };
        let replaced = |with: &[Hir]| [&parts[..at], with, &parts[at + 1..]].concat();
        match part.kind() {
            HirKind::Concat(inner) if at == 0 || !part.properties().look_set().is_empty() => {
                return apart(replaced(inner), found);
            }
            HirKind::Capture(inner) if !part.properties().look_set().is_empty() => {
                return apart(replaced(std::slice::from_ref(&inner.sub)), found);
            }
            HirKind::Alternation(inner) if !part.properties().look_set().is_empty() => {
                return inner.iter().try_for_each(|one| apart(replaced(std::slice::from_ref(one)), found));
            }
            // Behind an anchor stands another one, perhaps.
            HirKind::Look(Look::Start) if at == 0 && parts.len() > 1 => {
                if let Some(HirKind::Alternation(_) | HirKind::Capture(_)) = parts.get(1).map(Hir::kind)
                    && !parts[1].properties().look_set().is_empty()
                {
                    let mut inner = Vec::new();
                    apart(parts[1..].to_vec(), &mut inner)?;
                    found.extend(inner.into_iter().map(|rest| [&parts[..1], &rest[..]].concat()));
                    return Ok(());
                }
            }
            _ => {}
        }
    }
    found.push(parts);
    Ok(())
}

/// Write an expression without anchors, over JSON's text of the strings that it matches.
fn written(hir: &Hir, out: &mut String) -> Result<(), String> {
    match hir.kind() {
        HirKind::Empty => out.push_str("(?:)"),
        HirKind::Look(_) => return Err("anchors work at its beginning and its end alone".into()),
        HirKind::Literal(literal) => {
            let text = std::str::from_utf8(&literal.0).map_err(|_| "matches what is no text")?;
            text.chars().for_each(|c| character(c, out));
        }
        HirKind::Class(Class::Unicode(class)) => {
            class_of(class.ranges().iter().map(|r| (r.start() as u32, r.end() as u32)), out)?;
        }
        HirKind::Class(Class::Bytes(class)) => {
            if !class.is_ascii() {
                return Err("matches what is no text".into());
            }
            class_of(class.ranges().iter().map(|r| (r.start().into(), r.end().into())), out)?;
        }
        HirKind::Repetition(repetition) => {
            out.push_str("(?:");
            written(&repetition.sub, out)?;
            out.push_str(&match (repetition.min, repetition.max) {
                (0, None) => ")*".into(),
                (1, None) => ")+".into(),
                (low, None) => format!("){{{low},}}"),
                (low, Some(high)) => format!("){{{low},{high}}}"),
            });
        }
        HirKind::Capture(capture) => written(&capture.sub, out)?,
        HirKind::Concat(parts) => parts.iter().try_for_each(|part| written(part, out))?,
        HirKind::Alternation(parts) => {
            for (i, part) in parts.iter().enumerate() {
                out.push_str(if i == 0 { "(?:" } else { "|" });
                written(part, out)?;
            }
            out.push(')');
        }
    }
    Ok(())
}

fn class_of(ranges: impl Iterator<Item = (u32, u32)>, out: &mut String) -> Result<(), String> {
    let (mut escaped, mut plain) = (Vec::new(), String::new());
    for (from, to) in ranges {
        escapes(from, to, &mut escaped);
        unescaped(from, to, &mut plain);
    }
    if !plain.is_empty() {
        escaped.push(format!("[{plain}]"));
    }
    match &escaped[..] {
        [] => return Err("has a class of no characters".into()),
        [one] => out.push_str(one),
        many => out.push_str(&format!("(?:{})", many.join("|"))),
    }
    Ok(())
}

fn character(c: char, out: &mut String) {
    let mut escaped = Vec::new();
    escapes(c as u32, c as u32, &mut escaped);
    match escaped.pop() {
        Some(escape) => out.push_str(&escape),
        None if c.is_ascii_alphanumeric() => out.push(c),
        None => out.push_str(&format!(r"\x{{{:x}}}", c as u32)),
    }
}

/// Escapes of those characters of a range that JSON escapes.
fn escapes(from: u32, to: u32, found: &mut Vec<String>) {
    for c in from..=to.min(0x1f) {
        let short = match c {
            8 => "b|",
            9 => "t|",
            10 => "n|",
            12 => "f|",
            13 => "r|",
            _ => "",
        };
        let (high, low) = (c / 16, char::from_digit(c % 16, 16).unwrap_or('0'));
        let low = if low.is_ascii_digit() { low.to_string() } else { format!("[{low}{}]", low.to_ascii_uppercase()) };
        found.push(format!(r"\\(?:{short}u00{high}{low})"));
    }
    for (special, escape) in [('"', r#"\\""#), ('\\', r"\\\\")] {
        if (from..=to).contains(&(special as u32)) {
            found.push(escape.into());
        }
    }
}

/// Those characters of a range that stand for themselves, within brackets.
fn unescaped(from: u32, to: u32, out: &mut String) {
    for (low, high) in [(0x20, 0x21), (0x23, 0x5b), (0x5d, 0x10_ffff)] {
        let (low, high) = (low.max(from), high.min(to));
        if low <= high {
            out.push_str(&format!(r"\x{{{low:x}}}-\x{{{high:x}}}"));
        }
    }
}

const SPACES: &str = r" \t\n\v\f\r\u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}";
const MORE_SPACES: &str = r"\x1c-\x1f\u{85}\u{feff}";

/// A pattern of ECMA 262 in Rust's syntax.
fn translated(text: &str) -> Result<String, String> {
    let mut out = String::new();
    let mut chars = text.chars().peekable();
    // Within a class: whether it is negated.
    let mut class: Option<bool> = None;
    while let Some(c) = chars.next() {
        match (c, class) {
            ('\\', _) => {
                let escaped = chars.next().ok_or("ends in a backslash")?;
                let wide = class == Some(true); // a class excludes what any engine excludes
                let narrow = match (escaped, class.is_some()) {
                    ('d' | 'w' | 's' | 'D' | 'W' | 'S', inside) => Some(shorthand(escaped, wide, inside)),
                    ('/', _) => Some(r"\x2F".into()),
                    ('c' | 'A' | 'z' | 'Z' | '<' | '>', _) => {
                        return Err(format!(r"has \{escaped}, which is not supported"));
                    }
                    ('b', true) => Some(r"\x08".into()),
                    ('0', _) if !chars.peek().is_some_and(char::is_ascii_digit) => Some(r"\x00".into()),
                    _ => None,
                };
                out.push_str(&narrow.unwrap_or_else(|| format!(r"\{escaped}")));
            }
            ('[', None) => {
                out.push('[');
                let negated = chars.next_if_eq(&'^').is_some();
                if negated {
                    out.push('^');
                }
                if chars.peek() == Some(&']') {
                    return Err("has an empty class".into());
                }
                class = Some(negated);
            }
            (']', Some(_)) => {
                out.push(']');
                class = None;
            }
            ('[' | '&' | '~', Some(_)) => out.extend(['\\', c]),
            ('-', Some(_)) if chars.peek() == Some(&'-') => return Err("has -- in a class; write \\-".into()),
            ('.', None) => out.push_str(r"[^\n\r\u{2028}\u{2029}]"),
            ('(', None) if chars.peek() == Some(&'?') => {
                let ahead: String = chars.clone().skip(1).take(2).collect();
                let named = ahead.starts_with('<') && !ahead.ends_with(['=', '!']);
                if !(ahead.starts_with(':') || named || ["i)", "i:"].contains(&&ahead[..])) {
                    return Err("has a group that begins with (?: those of (?:, (?<name> and (?i) are supported".into());
                }
                out.push('(');
            }
            ('/', _) => out.push_str(r"\x2F"),
            _ => out.push(c),
        }
    }
    Ok(out)
}

fn shorthand(name: char, wide: bool, inside: bool) -> String {
    let (set, negated) = match (name, wide) {
        ('d', false) | ('D', true) => ("0-9".to_string(), name == 'D'),
        ('d', true) | ('D', false) => (r"\p{Nd}".to_string(), name == 'D'),
        ('w', false) | ('W', true) => ("0-9A-Za-z_".to_string(), name == 'W'),
        ('w', true) | ('W', false) => (r"\w\p{N}".to_string(), name == 'W'),
        ('s', false) | ('S', true) => (SPACES.to_string(), name == 'S'),
        (_, _) => (format!("{SPACES}{MORE_SPACES}"), name == 'S'),
    };
    match (negated, inside) {
        (true, _) => format!("[^{set}]"),
        (false, true) => set,
        (false, false) => format!("[{set}]"),
    }
}

/// The strings of a format; `None` for one that is not enforced.
pub(super) fn format(name: &str) -> Option<Vec<Term>> {
    let found = match name {
        "date" => vec![date()],
        "time" => vec![TIME.to_string()],
        "date-time" => vec![format!("(?:{})T{TIME}", date())],
        "duration" => vec![duration()],
        "email" => vec![format!("{ATOM}(?:\\.{ATOM})*@{HOST}"), r"[^@]{1,64}@[^@]{1,255}".into()],
        "hostname" => vec![HOST.to_string(), ".{1,253}".into()],
        "ipv4" => vec![IPV4.to_string()],
        "ipv6" => vec![ipv6()],
        "uuid" => vec!["[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}".to_string()],
        "uri" => vec![uri()],
        _ => return None,
    };
    found.iter().map(|rx| pattern(&format!("^(?:{rx})$")).ok()).collect()
}

/// The names that [`format`] knows.
pub(super) const FORMATS: &str = "date, time, date-time, duration, email, hostname, ipv4, ipv6, uuid, uri";
const TIME: &str = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
const ATOM: &str = r"[A-Za-z0-9!#$%&'*+\x2F=?^_`{|}~-]+";
const HOST: &str = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*";
const IPV4: &str =
    r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";

/// A day that the Gregorian calendar has, from the year 1 on.
fn date() -> String {
    let year = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})";
    let leap = "(?:0[48]|[2468][048]|[13579][26])";
    format!(
        "{year}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)\
         |02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{leap}|{leap}00)-02-29"
    )
}

fn duration() -> String {
    let chain = |units: [&str; 3]| {
        let [a, b, c] = units.map(|u| format!("[0-9]+{u}"));
        format!("(?:{a}(?:{b}(?:{c})?)?|{b}(?:{c})?|{c})")
    };
    let (days, hours) = (chain(["Y", "M", "D"]), chain(["H", "M", "S"]));
    format!("P(?:{days}(?:T{hours})?|T{hours}|[0-9]+W)")
}

fn ipv6() -> String {
    let (h, mut found) = ("[0-9a-fA-F]{1,4}", Vec::new());
    let upto = |n: usize| if n == 0 { "(?:)".into() } else { format!("(?:{h}(?::{h}){{0,{}}})?", n - 1) };
    found.push(format!("(?:{h}:){{7}}{h}"));
    found.push(format!("(?:{h}:){{6}}{IPV4}"));
    for before in 0..8usize {
        let first = if before == 0 { String::new() } else { format!("{h}(?::{h}){{{}}}", before - 1) };
        found.push(format!("{first}::{}", upto(7 - before)));
        if before < 6 {
            let room = 5 - before;
            let groups = if room == 0 { String::new() } else { format!("(?:{h}:){{0,{room}}}") };
            found.push(format!("{first}::{groups}{IPV4}"));
        }
    }
    found.join("|")
}

/// RFC 3986's URI.
fn uri() -> String {
    let of = |more: &str| format!("(?:[A-Za-z0-9._~!$&'()*+,;={more}-]|%[0-9a-fA-F]{{2}})");
    let (segment, userinfo, name, query) = (of(":@"), of(":"), of(""), of(":@\\x2F?"));
    let host = format!(r"(?:\[(?:{}|v[0-9a-fA-F]+\.[A-Za-z0-9._~!$&'()*+,;=:-]+)\]|{name}*)", ipv6());
    let path = format!(r"(?:\x2F{segment}*)*");
    let rest = format!(r"{segment}+{path}");
    format!(
        r"[A-Za-z][A-Za-z0-9+.-]*:(?:\x2F\x2F(?:{userinfo}*@)?{host}(?::[0-9]*)?{path}|\x2F(?:{rest})?|(?:{rest})?)(?:\?{query}*)?(?:#{query}*)?"
    )
}
