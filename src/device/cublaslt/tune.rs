//! Makes the choice for a shape: by measurement, or from the file and checked.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use super::api::{Config, Handle, no_class};
use super::bench::{Bench, MAX_WORKSPACE, Ran, Way};
use super::cache::{self, Saved};
use super::choice::{Bucket, Choice, Class, Classes, pick};
use super::library::Algo;
use super::own;
use super::shape::LinearShape;
use crate::device::devices::Device;
use crate::error::Result;

/// Proposals asked for at each number of rows.
const PROPOSALS: usize = 12;
/// Up to so many rows, those of decoding and verification, every algorithm is tried, wherever it was proposed: for a
/// down projection on an H200, the fastest for 64 rows, by a sixth, is proposed only for other numbers.
const TRY_ALL: u32 = 256;
/// Fastest algorithms of a bucket that are timed again.
const FINALISTS: usize = 6;
/// Fastest algorithms of each split of K that the next bucket tries, too, whether or not they are proposed for it.
const CARRIED: usize = 5;

/// A candidate in a bucket, run once.
struct Trial {
    candidate: usize,
    bucket: usize,
    /// `None`: its rows had other bits than they had in another run of their class.
    class: Option<u64>,
    us: f32,
}

/// The choice for `shape`: the file's, if it is there and holds on this device, else a new one. `split` asks for one
/// split of K instead of the fastest.
pub(super) fn choose(
    handle: &Handle,
    device: &'static Device,
    shape: LinearShape,
    split: Option<u32>,
    file: Option<&Path>,
) -> Result<Choice> {
    let key = key(handle, device, &shape, split);
    if let Some(saved) = file.and_then(|file| cache::load(file, &key))
        && let Some(choice) = check(handle, device, shape, &saved)?
    {
        return Ok(choice);
    }
    let choice = measure(handle, device, shape, split, Classes::One)?;
    if let Some(file) = file {
        let _ = cache::store(file, &key, &choice); // without the file the next process measures again
    }
    Ok(choice)
}

/// The fastest algorithm of each bucket, of any class. No file has such a choice: only a measurement takes it.
pub(super) fn fastest_of_any(handle: &Handle, device: &'static Device, shape: LinearShape) -> Result<Choice> {
    measure(handle, device, shape, None, Classes::Any)
}

/// Give the file a choice that was made before, unless it has one.
pub(super) fn keep(handle: &Handle, device: &Device, choice: &Choice, split: Option<u32>, file: &Path) {
    let key = key(handle, device, choice.shape(), split);
    if cache::load(file, &key).is_none() {
        let _ = cache::store(file, &key, choice); // a failure is ignored, as above
    }
}

/// The name of a choice in the file.
fn key(handle: &Handle, device: &Device, shape: &LinearShape, split: Option<u32>) -> String {
    let by = split.map_or(String::new(), |s| format!(", split {s}"));
    format!("{} | {shape}{by}", place(handle, device))
}

/// Key of the place for which a choice holds: device, driver, library.
pub(super) fn place(handle: &Handle, device: &Device) -> String {
    let (name, capability) = (device.name(), device.capability());
    let multiprocessors = device.context().multiprocessors();
    let (driver, library) = (crate::device::libcuda::driver_version(), handle.library.version);
    format!("{name}, sm_{capability}, {multiprocessors} SMs | CUDA {driver} | cublasLt {library}")
}

/// The saved choice, where every algorithm of it gives the bits that were saved.
fn check(handle: &Handle, device: &'static Device, shape: LinearShape, saved: &Saved) -> Result<Option<Choice>> {
    let borders = shape.buckets();
    if !saved.buckets.iter().map(|b| b.0).eq(borders.iter().copied()) {
        return Ok(None);
    }
    let workspace = workspace_bound(&shape, saved.buckets.iter().map(|b| b.1), handle)?;
    let mut bench = Bench::new(handle, device, shape, false, workspace)?;
    let mut buckets = Vec::new();
    for (i, (rows, algo, us, _)) in saved.buckets.iter().enumerate() {
        match finish(&mut bench, handle, *algo, Some(saved.fingerprint), &shape, &borders, i)? {
            Some((config, workspace)) => {
                buckets.push(Bucket { rows: *rows, algo: *algo, config, us: *us, workspace, own: None })
            }
            None => return Ok(None),
        }
    }
    if !own::restore(&mut bench, saved, &shape, &mut buckets)? {
        return Ok(None);
    }
    let (fingerprint, candidates, dropped) = (saved.fingerprint, saved.candidates, saved.dropped);
    let classes = Classes::One;
    Ok(Some(Choice { shape, classes, fingerprint, buckets, candidates, dropped, measured: false }))
}

/// Bytes that the algorithms' partial sums can take.
fn workspace_bound(shape: &LinearShape, algos: impl Iterator<Item = Algo>, handle: &Handle) -> Result<usize> {
    let mut split = 1;
    for algo in algos {
        split = split.max(algo.config(handle.library)?.split.clamp(1, 64) as usize);
    }
    let sums = split * shape.max_rows as usize * shape.outputs as usize * 4;
    Ok(if split == 1 { 64 << 20 } else { (sums + (64 << 20)).min(MAX_WORKSPACE) })
}

/// Config and workspace of an algorithm that holds in bucket `i`, or of any that runs there where no class is asked for;
/// `None` where it does not.
fn finish(
    bench: &mut Bench<'_>,
    handle: &Handle,
    algo: Algo,
    class: Option<u64>,
    shape: &LinearShape,
    borders: &[u32],
    i: usize,
) -> Result<Option<(Config, usize)>> {
    let samples = shape.samples(borders, i);
    if let Some(class) = class
        && !bench.holds(Way::Library(algo), class, &samples)?
    {
        return Ok(None);
    }
    let mut most = 0;
    for rows in samples {
        match bench.workspace(Way::Library(algo), rows)? {
            Some(bytes) => most = most.max(bytes),
            None => return Ok(None),
        }
    }
    Ok(Some((algo.config(handle.library)?, most)))
}

/// Measure every algorithm that the library proposes, in every bucket. `split` is of one class alone.
fn measure(
    handle: &Handle,
    device: &'static Device,
    shape: LinearShape,
    split: Option<u32>,
    allowed: Classes,
) -> Result<Choice> {
    let borders = shape.buckets();
    let mut bench = Bench::new(handle, device, shape, true, MAX_WORKSPACE)?;
    let (candidates, proposed) = candidates(handle, device, &bench, &shape, &borders)?;
    let (mut trials, mut tried, mut dropped) = (Vec::new(), HashSet::new(), 0);
    // Go up, and down again: the fast algorithms of a bucket, of each split, are tried in both its neighbours, so that
    // no class has a hole where the library would rather have another class.
    let up = 0..borders.len();
    for bucket in up.clone().chain(up.rev()) {
        let mut wanted: Vec<usize> = Vec::new();
        if borders[bucket] <= TRY_ALL {
            wanted.extend(0..candidates.len());
        }
        for near in bucket.saturating_sub(1)..=bucket + 1 {
            wanted.extend(proposed.get(near).into_iter().flatten());
            wanted.extend(fastest(&trials, &candidates, near));
        }
        for candidate in wanted {
            if !tried.insert((bucket, candidate)) {
                continue;
            }
            let algo = Way::Library(candidates[candidate].0);
            let class = match bench.run(algo, borders[bucket], 0, None)? {
                Ran::Class(class) => Some(class),
                Ran::Differs => {
                    dropped += 1;
                    None
                }
                Ran::Unable => continue,
            };
            if class.is_some() || allowed == Classes::Any {
                let us = bench.glance(algo, borders[bucket])?;
                trials.push(Trial { candidate, bucket, class, us });
            }
        }
    }
    let classes = classes(&trials, &candidates, borders.len());
    let one = || {
        pick(&borders, &classes, split).map(|i| classes[i].fingerprint).ok_or_else(|| {
            let seen: Vec<String> = classes
                .iter()
                .map(|c| format!("split {} in {} of {} buckets", c.split, c.us.iter().flatten().count(), borders.len()))
                .collect();
            let asked = split.map_or(String::new(), |s| format!(" with split {s} of K"));
            let found = if seen.is_empty() { "no algorithm runs".into() } else { seen.join(", ") };
            no_class(&shape, format!("no class of cublasLt's algorithms{asked} covers every number of rows ({found})"))
        })
    };
    let class = match allowed {
        Classes::One => Some(one()?),
        Classes::Any => None,
    };
    let mut buckets: Vec<Bucket> = Vec::new();
    // Go from the largest down: an algorithm for more rows must be beaten by one for fewer.
    let mut larger = None;
    for (i, rows) in borders.iter().enumerate().rev() {
        let mut of: Vec<&Trial> =
            trials.iter().filter(|t| t.bucket == i && (class.is_none() || t.class == class)).collect();
        of.sort_by(|a, b| a.us.total_cmp(&b.us));
        let mut timed = Vec::new();
        let (finalists, others): (Vec<_>, Vec<_>) =
            of.iter().enumerate().partition(|(rank, t)| *rank < FINALISTS || Some(t.candidate) == larger);
        for (_, trial) in finalists {
            timed.push((trial.candidate, bench.time(Way::Library(candidates[trial.candidate].0), *rows, 5)?));
        }
        timed.sort_by(|a, b| a.1.total_cmp(&b.1));
        timed.extend(others.into_iter().map(|(_, t)| (t.candidate, t.us)));
        let mut taken = None;
        for (candidate, us) in timed {
            let algo = candidates[candidate].0;
            if let Some((config, workspace)) = finish(&mut bench, handle, algo, class, &shape, &borders, i)? {
                taken = Some(Bucket { rows: *rows, algo, config, us, workspace, own: None });
                larger = Some(candidate);
                break;
            }
            dropped += 1;
        }
        let why =
            || no_class(&shape, format!("every algorithm of the class differs between numbers of rows up to {rows}"));
        buckets.push(taken.ok_or_else(why)?);
    }
    buckets.reverse();
    own::measure(&mut bench, class, &shape, &mut buckets)?;
    let (fingerprint, candidates) = (class.unwrap_or(0), candidates.len());
    Ok(Choice { shape, classes: allowed, fingerprint, buckets, candidates, dropped, measured: true })
}

/// The library's proposals at the ends and in the middle of every bucket: each algorithm once, and for each bucket the
/// indices of its own.
#[allow(clippy::type_complexity, reason = "two lists that belong together, taken apart at once")]
fn candidates(
    handle: &Handle,
    device: &Device,
    bench: &Bench<'_>,
    shape: &LinearShape,
    borders: &[u32],
) -> Result<(Vec<(Algo, Config)>, Vec<Vec<usize>>)> {
    let _current = device.context().enter()?;
    let (mut found, mut seen, mut proposed) = (Vec::new(), HashMap::new(), vec![Vec::new(); borders.len()]);
    for (i, proposed) in proposed.iter_mut().enumerate() {
        for rows in shape.samples(borders, i) {
            for algo in bench.operation().candidates(handle, rows, MAX_WORKSPACE, PROPOSALS)? {
                let config = algo.config(handle.library)?;
                proposed.push(*seen.entry(config).or_insert_with(|| {
                    found.push((algo, config));
                    found.len() - 1
                }));
            }
        }
    }
    Ok((found, proposed))
}

/// The fastest candidates of each split of K in a bucket.
fn fastest(trials: &[Trial], candidates: &[(Algo, Config)], bucket: usize) -> Vec<usize> {
    let mut of: Vec<&Trial> = trials.iter().filter(|t| t.bucket == bucket).collect();
    of.sort_by(|a, b| a.us.total_cmp(&b.us));
    let mut taken: HashMap<i32, usize> = HashMap::new();
    of.retain(|t| {
        let n = taken.entry(candidates[t.candidate].1.split).or_default();
        *n += 1;
        *n <= CARRIED
    });
    of.into_iter().map(|t| t.candidate).collect()
}

fn classes(trials: &[Trial], candidates: &[(Algo, Config)], buckets: usize) -> Vec<Class> {
    let mut classes: HashMap<u64, Class> = HashMap::new();
    for (t, fingerprint) in trials.iter().filter_map(|t| Some((t, t.class?))) {
        let split = candidates[t.candidate].1.split.max(1);
        let new = || Class { fingerprint, split, us: vec![None; buckets] };
        let class = classes.entry(fingerprint).or_insert_with(new);
        class.split = class.split.min(split);
        let us = &mut class.us[t.bucket];
        *us = Some(us.map_or(t.us, |u| u.min(t.us)));
    }
    let mut classes: Vec<Class> = classes.into_values().collect();
    classes.sort_by_key(|c| (c.split, c.fingerprint));
    classes
}
