//! Reasons why a form is refused, or a request fails, as a person reads them.

use serde_json::Value;

/// Characters of a reason at most.
const MAX_WHY: usize = 400;
/// Characters of a value that a refusal repeats.
const SHOWN: usize = 60;

/// The first line of an error, and where that is a heading the line that says what is wrong; as far as a person reads.
pub(super) fn shortened(why: &str) -> String {
    let line = why.lines().find(|l| !l.trim().is_empty()).unwrap_or("it is refused").trim();
    // regex-syntax: "regex parse error:", the pattern, a caret below it, "error: unclosed group".
    let cause = why.lines().skip(1).find_map(|l| l.trim().strip_prefix("error: ")).filter(|_| line.ends_with(':'));
    let joined = cause.map(|cause| format!("{line} {cause}"));
    let line = joined.as_deref().unwrap_or(line);
    // A caught panic of llguidance: it refuses in this way numbers for which it has no room.
    let line = line.strip_prefix("panic: assertion failed: ").map_or(line, |_| "it is larger than its parser can hold");
    match line.char_indices().nth(MAX_WHY) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line.to_string(),
    }
}

/// The beginning of a value, as a refusal repeats it.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// A name within a JSON pointer, on one line.
pub(super) fn step(name: &str) -> String {
    let mut out = String::new();
    for c in name.chars().take(SHOWN) {
        match c {
            '~' => out.push_str("~0"),
            '/' => out.push_str("~1"),
            c if c.is_control() => out.extend(c.escape_default()),
            c => out.push(c),
        }
    }
    out
}
