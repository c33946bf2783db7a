//! Choices that were measured before, in a file of the user's: a hint, checked on the device before it is used.
//!
//! The file is JSON, an entry for each device, driver, library and shape. One that cannot be read, is of another format,
//! or fails its check is as good as none, and is written anew: beside the old one and then in its place, so that no
//! reader sees a half.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::choice::Choice;
use super::library::Algo;

/// Goes up with the meaning of an entry.
const FORMAT: u64 = 2;

/// An entry as the file has it: algorithms that are not checked yet.
#[derive(Debug, PartialEq)]
pub(super) struct Saved {
    pub(super) fingerprint: u64,
    /// `(most rows, algorithm, microseconds)` of each bucket, and the own product's and the library's in a chain.
    pub(super) buckets: Vec<(u32, Algo, f32, Option<[f32; 2]>)>,
    pub(super) candidates: usize,
    pub(super) dropped: usize,
}

/// The file: `cublaslt.json` in `SPECRS_CACHE`, or in `specrs` under `XDG_CACHE_HOME` or `~/.cache`; `None` where
/// the environment names no folder.
pub(super) fn path() -> Option<PathBuf> {
    let var = |name| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let folder = var("SPECRS_CACHE")
        .or_else(|| var("XDG_CACHE_HOME").map(|p| p.join("specrs")))
        .or_else(|| var("HOME").map(|p| p.join(".cache").join("specrs")))?;
    Some(folder.join("cublaslt.json"))
}

/// The entries of the file; empty where it cannot be read.
fn entries(file: &Path) -> serde_json::Map<String, Value> {
    let text = fs::read_to_string(file).unwrap_or_default();
    let Ok(Value::Object(mut whole)) = serde_json::from_str::<Value>(&text) else { return Default::default() };
    if whole.get("format").and_then(Value::as_u64) != Some(FORMAT) {
        return Default::default();
    }
    match whole.remove("choices") {
        Some(Value::Object(choices)) => choices,
        _ => Default::default(),
    }
}

fn hex(value: &Value) -> Option<u64> {
    u64::from_str_radix(value.as_str()?.strip_prefix("0x")?, 16).ok()
}

/// The entry of `key`, where it is whole.
pub(super) fn load(file: &Path, key: &str) -> Option<Saved> {
    let all = entries(file);
    let entry = all.get(key)?;
    let bucket = |b: &Value| {
        let words = b.get("algorithm")?.as_array()?;
        let words: Vec<u64> = words.iter().map(hex).collect::<Option<_>>()?;
        let rows = u32::try_from(b.get("rows")?.as_u64()?).ok()?;
        let own = match b.get("own")? {
            Value::Null => None,
            own => Some([own.get("us")?.as_f64()? as f32, own.get("library_us")?.as_f64()? as f32]),
        };
        Some((rows, Algo(words.try_into().ok()?), b.get("us")?.as_f64()? as f32, own))
    };
    let count = |name| entry.get(name).and_then(Value::as_u64).map(|n| n as usize);
    Some(Saved {
        fingerprint: hex(entry.get("fingerprint")?)?,
        buckets: entry.get("buckets")?.as_array()?.iter().map(bucket).collect::<Option<_>>()?,
        candidates: count("candidates")?,
        dropped: count("dropped")?,
    })
}

/// Put the choice into the file, beside the choices that it holds for others.
pub(super) fn store(file: &Path, key: &str, choice: &Choice) -> io::Result<()> {
    let mut all = entries(file);
    all.insert(key.to_owned(), of(choice));
    let text = serde_json::to_string_pretty(&json!({ "format": FORMAT, "choices": all }))?;
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    let beside = file.with_extension(format!("json.{}", std::process::id()));
    fs::write(&beside, text + "\n")?;
    fs::rename(&beside, file).inspect_err(|_| _ = fs::remove_file(&beside))
}

/// An entry; also what a report says of a choice.
pub(super) fn of(choice: &Choice) -> Value {
    let word = |w: u64| format!("{w:#018x}");
    let buckets: Vec<Value> = choice
        .buckets
        .iter()
        .map(|b| {
            let us = |us| (f64::from(us) * 100.0).round() / 100.0;
            let own =
                b.own.map(|own| // Not rounded: which is the lesser decides.
                json!({ "us": own.us, "library_us": own.library_us, "taken": b.own().is_some() }));
            json!({ "rows": b.rows, "us": us(b.us), "workspace": b.workspace, "config": b.config.to_string(),
                    "algorithm": b.algo.0.map(word), "own": own })
        })
        .collect();
    json!({ "split": choice.split(), "fingerprint": word(choice.fingerprint), "candidates": choice.candidates,
            "dropped": choice.dropped, "buckets": buckets })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cublaslt::api::Config;
    use crate::device::cublaslt::choice::{Bucket, Classes};
    use crate::device::cublaslt::shape::LinearShape;
    use crate::device::rows::FloatType;

    fn choice(fingerprint: u64) -> Choice {
        let element = FloatType::Bf16;
        let shape = LinearShape { outputs: 8, inputs: 16, element, f32_output: false, bias: false, max_rows: 64 };
        let config =
            Config { id: 66, tile: 1, split: 2, reduction: 2, swizzle: 0, custom: 3, stages: 4, inner: 5, cluster: 6 };
        let bucket = |rows| Bucket {
            rows,
            algo: Algo([u64::MAX, 1, 2, 3, 4, 5, 6, 7]),
            config,
            us: 12.25,
            workspace: 9,
            own: None,
        };
        let (buckets, classes) = (vec![bucket(8), bucket(64)], Classes::One);
        Choice { shape, classes, fingerprint, buckets, candidates: 50, dropped: 1, measured: true }
    }

    #[test]
    fn choices_come_back_as_they_were_and_what_is_broken_does_not() {
        let folder = env::temp_dir().join(format!("specrs-cache-{}", std::process::id()));
        let file = folder.join("deep").join("cublaslt.json");
        assert_eq!(load(&file, "a"), None);
        store(&file, "a", &choice(0xFEDC_BA98_7654_3210)).unwrap();
        store(&file, "b", &choice(7)).unwrap();
        let saved = load(&file, "a").unwrap();
        assert_eq!(saved.fingerprint, 0xFEDC_BA98_7654_3210);
        assert_eq!(saved.buckets, [8, 64].map(|rows| (rows, Algo([u64::MAX, 1, 2, 3, 4, 5, 6, 7]), 12.25, None)));
        assert_eq!((saved.candidates, saved.dropped), (50, 1));
        assert_eq!((load(&file, "b").unwrap().fingerprint, load(&file, "c")), (7, None));
        assert_eq!(fs::read_dir(file.parent().unwrap()).unwrap().count(), 1, "nothing is left beside it");
        // Cut anywhere, of another format, or of another kind of JSON: none of it is taken, and a store repairs it.
        let whole = fs::read_to_string(&file).unwrap();
        let other = whole.replace("\"format\": 2", "\"format\": 3");
        let bad = whole.replace("0xffffffffffffffff", "0xfffffffffffffffff");
        for text in ["", "{", "[]", "{\"format\": 2}", &whole[..whole.len() / 2], &other, &bad] {
            fs::write(&file, text).unwrap();
            assert_eq!(load(&file, "a"), None, "{text}");
        }
        store(&file, "a", &choice(5)).unwrap();
        assert_eq!(load(&file, "a").unwrap().fingerprint, 5);
        fs::remove_dir_all(folder).unwrap();
    }
}
