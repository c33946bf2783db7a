//! The JSON schemas that a grammar in Lark's syntax has in it, which go the way of all schemas.

use llguidance::api::GrammarWithLexer;
use serde_json::Value;

use super::rules;

const MARK: &str = "%json";

/// A grammar in which each `%json` is the name of a grammar beside it, and these grammars. `widest` rises to the widest
/// of theirs.
///
/// # Errors
/// A schema that is refused; `%json` where none can stand.
pub(super) fn apart(text: &str, widest: &mut usize) -> Result<(String, Vec<GrammarWithLexer>), String> {
    let (mut out, mut grammars, mut rest, mut count) = (String::with_capacity(text.len()), Vec::new(), text, 0);
    while !rest.is_empty() {
        let length = token(rest);
        let (found, behind) = rest.split_at(length);
        rest = behind;
        match found {
            MARK => {
                let (schema, length) = value(rest).map_err(|why| format!("{MARK}: {why}"))?;
                rest = &rest[length..];
                let name = format!("specrs_json_{count}");
                count += 1;
                let made = rules::of_schema(schema, None, Some(r"[ \t\r\n]+"), &name)
                    .map_err(|why| format!("{MARK}: {why}"))?;
                *widest = (*widest).max(made.widest);
                grammars.extend(made.grammars);
                out.push_str(&format!(" @{name} "));
            }
            "%regex" | "%llguidance" => {
                let length = value(rest).map_or(0, |(_, length)| length);
                out.push_str(found);
                out.push_str(&rest[..length]);
                rest = &rest[length..];
            }
            _ => out.push_str(found),
        }
    }
    // llguidance compiles a schema itself wherever it sees one: nothing that looks like one may be left.
    match out.contains(MARK) {
        true => Err(format!("{MARK} stands in a text or a comment; write it otherwise")),
        false => Ok((out, grammars)),
    }
}

/// The bytes of what a grammar begins with: a text, an expression, a special token, a comment, or one character.
fn token(text: &str) -> usize {
    let closed = |close: u8, bytes: &[u8]| {
        let mut i = 1;
        while i < bytes.len() && bytes[i] != close {
            i += if bytes[i] == b'\\' { 2 } else { 1 };
        }
        if i < bytes.len() { i + 1 } else { 1 }
    };
    let bytes = text.as_bytes();
    let length = match bytes[0] {
        b'"' => closed(b'"', text.lines().next().unwrap_or(text).as_bytes()),
        b'#' => text.find('\n').unwrap_or(text.len()),
        b'/' if bytes.get(1) == Some(&b'/') => text.find('\n').unwrap_or(text.len()),
        b'/' => closed(b'/', bytes),
        b'<' => match text[1..].find(|c: char| c == '<' || c == '>' || c.is_whitespace()) {
            Some(end) if end > 0 && bytes[end + 1] == b'>' => end + 2,
            _ => 1,
        },
        b'%' => ["%json", "%regex", "%llguidance"].iter().find(|w| text.starts_with(**w)).map_or(1, |w| w.len()),
        _ => text.chars().next().map_or(1, char::len_utf8),
    };
    (length..=text.len()).find(|&end| text.is_char_boundary(end)).unwrap_or(text.len())
}

/// The JSON value that a text begins with, and its bytes.
fn value(text: &str) -> Result<(Value, usize), String> {
    let mut stream = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    match stream.next() {
        Some(Ok(value)) => Ok((value, stream.byte_offset())),
        Some(Err(error)) => Err(error.to_string()),
        None => Err("no schema stands behind it".into()),
    }
}
