//! Times the planner on request, for `benches/bench_planner.py` and `benches/bench_formats.py`: the peers are Python, and
//! this way the Rust core takes its turn between them in the same run.
//!
//! Each line of standard input, `PAGE_SIZE BATCH MILLISECONDS [FORMAT [LAYOUT [MASK]]]`, is answered by a line of JSON:
//! over as many rounds as fit the time, the median and the 10th percentile of a round's nanoseconds, how many rounds
//! there were, and the bytes of the format's arrays that one round wrote (the mean, rounded down).
//!
//! * FORMAT: `native` (default), `flashinfer` (the mask in bytes and in bits), `flashinfer_bool`, `flashinfer_packed`,
//!   `flash_attention`, `triton`. Those other than `native` also answer `draft_ns` and `verify_ns`, the medians of these parts.
//! * LAYOUT: `dense` (default) or `holey`, whose rounds plan the tail copies too.
//! * MASK: `ancestors` (default) or `lanes`.
//!
//! Arrays are the planner's own, reused from round to round; a round keeps its plans until its end.

#[path = "../benches/workload/planner.rs"]
mod workload;

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use specrs::geometry::Layout;
use specrs::plan::{AnyFormat, FlashAttention, FlashInfer, Lower, MaskForm, Native, Planner, Triton};
use workload::{Round, Took};

type Failure = Box<dyn std::error::Error>;
/// One round; lanes, and whether to time its parts.
type Run = Box<dyn FnMut(&mut Round, bool, bool) -> specrs::Result<Took>>;

fn run<F: Lower>(round: &Round, format: F) -> specrs::Result<Run> {
    let mut planner = Planner::new(round.geometry, format)?;
    Ok(Box::new(move |round, lanes, split| round.run(&mut planner, lanes, split)))
}

fn planner(round: &Round, format: &str) -> Result<Run, Failure> {
    let flashinfer = |mask| AnyFormat::FlashInfer(FlashInfer { mask });
    let format = match format {
        "native" => return Ok(run(round, Native)?),
        "flashinfer" => flashinfer(MaskForm::Both),
        "flashinfer_bool" => flashinfer(MaskForm::Bool),
        "flashinfer_packed" => flashinfer(MaskForm::Packed),
        "flash_attention" => AnyFormat::FlashAttention(FlashAttention),
        "triton" => AnyFormat::Triton(Triton),
        other => return Err(format!("no format {other}").into()),
    };
    Ok(run(round, format)?)
}

/// The round of a pool, and the planners that took turns on it.
struct Turn {
    round: Round,
    planners: HashMap<String, Run>,
}

fn answer(line: &str, turns: &mut HashMap<(u32, u32, bool), Turn>) -> Result<String, Failure> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let &[page_size, batch, millis, ref rest @ ..] = &words[..] else {
        return Err("want PAGE_SIZE BATCH MILLISECONDS [FORMAT [LAYOUT [MASK]]]".into());
    };
    let (page_size, batch, millis): (u32, u32, u64) = (page_size.parse()?, batch.parse()?, millis.parse()?);
    let word = |i: usize, default: &'static str| rest.get(i).copied().unwrap_or(default);
    let holey = match word(1, "dense") {
        "dense" => false,
        "holey" => true,
        other => return Err(format!("no layout {other}").into()),
    };
    let lanes = match word(2, "ancestors") {
        "ancestors" => false,
        "lanes" => true,
        other => return Err(format!("no mask {other}").into()),
    };
    let key = (page_size, batch, holey);
    if !turns.contains_key(&key) {
        turns.clear(); // one pool at a time: at P = 1 and batch 256 it has four million pages
    }
    let turn = match turns.entry(key) {
        std::collections::hash_map::Entry::Occupied(e) => e.into_mut(),
        std::collections::hash_map::Entry::Vacant(e) => {
            let layout = if holey { Layout::Holey } else { Layout::Dense };
            e.insert(Turn { round: Round::new(batch, page_size, layout)?, planners: HashMap::new() })
        }
    };
    let format = word(0, "native");
    if !turn.planners.contains_key(format) {
        turn.planners.insert(format.to_string(), planner(&turn.round, format)?);
    }
    let Some(run) = turn.planners.get_mut(format) else { return Err("no planner".into()) };
    let split = format != "native"; // its rounds are so short that reading the clock would show
    let (started, limit) = (Instant::now(), Duration::from_millis(millis));
    let mut all = Vec::new();
    while started.elapsed() < limit || all.len() < 20 {
        all.push(run(&mut turn.round, lanes, split)?);
    }
    let at = |of: fn(&Took) -> Duration, percent: usize| {
        let mut nanos: Vec<u128> = all.iter().map(|took| of(took).as_nanos()).collect();
        nanos.sort_unstable();
        nanos[nanos.len() * percent / 100]
    };
    let (median, p10) = (at(|t| t.round, 50), at(|t| t.round, 10));
    let (n, bytes) = (all.len(), all.iter().map(|t| t.bytes).sum::<u64>() / all.len() as u64);
    let mut json = format!("{{\"median_ns\": {median}, \"p10_ns\": {p10}, \"rounds\": {n}, \"bytes\": {bytes}");
    if split {
        let (draft, verify) = (at(|t| t.draft, 50), at(|t| t.verify, 50));
        json += &format!(", \"draft_ns\": {draft}, \"verify_ns\": {verify}");
    }
    Ok(json + "}")
}

fn main() -> Result<(), Failure> {
    let mut turns = HashMap::new();
    for line in std::io::stdin().lock().lines() {
        let answer = answer(&line?, &mut turns).unwrap_or_else(|e| format!("{{\"error\": {:?}}}", e.to_string()));
        println!("{answer}");
        std::io::stdout().flush()?;
    }
    Ok(())
}
