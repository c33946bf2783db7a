//! Times the planner on request, for `benches/bench_planner.py`: the peers are Python, and this way the Rust core takes
//! its turn between them in the same run.
//!
//! Each line of standard input, `PAGE_SIZE BATCH MILLISECONDS`, is answered by a line of JSON: over as many rounds as fit the
//! time, the median and the 10th percentile of a round's nanoseconds, and how many rounds there were.

#[path = "../benches/workload/planner.rs"]
mod workload;

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use workload::Round;

type Failure = Box<dyn std::error::Error>;

fn answer(line: &str, rounds: &mut HashMap<(u32, u32), Round>) -> Result<String, Failure> {
    let words: Vec<u32> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let &[page_size, batch, millis] = &words[..] else { return Err("want PAGE_SIZE BATCH MILLISECONDS".into()) };
    if !rounds.contains_key(&(page_size, batch)) {
        rounds.clear(); // one pool at a time: at P = 1 and batch 256 it has four million pages
    }
    let round = match rounds.entry((page_size, batch)) {
        std::collections::hash_map::Entry::Occupied(e) => e.into_mut(),
        std::collections::hash_map::Entry::Vacant(e) => e.insert(Round::new(batch, page_size)?),
    };
    let (started, limit) = (Instant::now(), Duration::from_millis(millis.into()));
    let mut nanos = Vec::new();
    while started.elapsed() < limit || nanos.len() < 20 {
        nanos.push(round.run()?.as_nanos());
    }
    nanos.sort_unstable();
    let (median, p10, n) = (nanos[nanos.len() / 2], nanos[nanos.len() / 10], nanos.len());
    Ok(format!("{{\"median_ns\": {median}, \"p10_ns\": {p10}, \"rounds\": {n}}}"))
}

fn main() -> Result<(), Failure> {
    let mut rounds = HashMap::new();
    for line in std::io::stdin().lock().lines() {
        let answer = answer(&line?, &mut rounds).unwrap_or_else(|e| format!("{{\"error\": {:?}}}", e.to_string()));
        println!("{answer}");
        std::io::stdout().flush()?;
    }
    Ok(())
}
