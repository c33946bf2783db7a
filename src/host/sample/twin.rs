//! `cuda/draw.cuh` against the functions that it mirrors: a C++ compiler builds the header into a small program, whose bits are
//! compared with those of the Rust functions over large domains. Needs no GPU and no nvcc.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use super::history::Penalty;
use super::scan::{key_logit, rank_key};
use crate::round::SamplerConfig;
use crate::round::philox::{Purpose, uniform53};
use crate::round::weight::{Softmax, fraction, mass};

/// Inputs of the program: every function takes those that it needs.
#[derive(Debug, Clone, Copy)]
struct Point {
    a: u64,
    b: u64,
    x: f32,
    y: f32,
    z: f32,
    n: u32,
}

const PROGRAM: &str = r#"
#include <cstdio>
#include <vector>
using namespace specrs;
struct Point { uint64_t a, b; float x, y, z; uint32_t n; };
int main() {
    std::vector<Point> points(1 << 16);
    std::vector<uint64_t> out;
    size_t read;
    while ((read = fread(points.data(), sizeof(Point), points.size(), stdin)) != 0) {
        out.clear();
        for (size_t i = 0; i < read; ++i) {
            const Point p = points[i];
            const float log_weight = draw::log_weight(p.x, p.y, p.z);
            out.push_back(draw::bits32(log_weight));
            out.push_back(draw::weight(log_weight));
            out.push_back(draw::vanishes(log_weight) ? 1 : 0);
            out.push_back(draw::uniform53(p.a, p.n, static_cast<uint32_t>(p.b)));
            out.push_back(draw::fraction(p.a >> 11, p.b >> 3));
            out.push_back(draw::mass(static_cast<double>((p.a >> 11) + 1) / 9007199254740992.0, (p.b >> 4) + 1));
            out.push_back(draw::rank_of(p.x));
            out.push_back(draw::bits32(draw::logit_of(draw::rank_of(p.x))));
            out.push_back(draw::bits32(draw::penalised(p.x, p.n % 5, p.z, p.y, p.z)));
            out.push_back(draw::bits32(draw::penalised(p.x, p.n, p.z, p.y, 0.1f)));
        }
        fwrite(out.data(), sizeof(uint64_t), out.size(), stdout);
    }
    return 0;
}
"#;
const NAMES: [&str; 10] = [
    "log_weight",
    "weight",
    "vanishes",
    "uniform53",
    "fraction",
    "mass",
    "rank_of",
    "logit_of",
    "penalised",
    "penalised (many)",
];

fn values(p: Point) -> [u64; 10] {
    let softmax = Softmax::of(p.y, p.z);
    let log_weight = softmax.log_weight(p.x);
    let penalty = |frequency: f32| {
        Penalty::new(&SamplerConfig {
            repetition_penalty: p.z.into(),
            presence_penalty: p.y.into(),
            frequency_penalty: frequency.into(),
            ..SamplerConfig::default()
        })
    };
    let key = rank_key(p.x, 0);
    [
        log_weight.to_bits().into(),
        softmax.weight(p.x),
        u64::from(log_weight < -29.0),
        uniform53(p.a, p.n, Purpose(p.b as u32)),
        fraction(p.a >> 11, p.b >> 3),
        mass(((p.a >> 11) + 1) as f64 / 9007199254740992.0, (p.b >> 4) + 1),
        key >> 32,
        key_logit(key).to_bits().into(),
        penalty(p.z).apply(p.x, p.n % 5).to_bits().into(),
        penalty(0.1).apply(p.x, p.n).to_bits().into(),
    ]
}

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }
}

/// Log-weights of every magnitude at close steps, logits and temperatures as models and users have them, and the edges.
fn points() -> Vec<Point> {
    let mut random = Random(7);
    let mut all = Vec::new();
    let mut point = |random: &mut Random, x: f32, y: f32, z: f32| {
        let (a, b, n) = (random.next(), random.next() >> (random.next() % 64), random.next() as u32);
        all.push(Point { a, b, x, y, z, n: n >> (n % 32) });
    };
    for i in 0..1_500_000 {
        point(&mut random, i as f32 * -2.8e-5, 0.0, 1.0); // to -42
    }
    for _ in 0..1_000_000 {
        let (x, max, t) = (random.unit() * 60.0 - 30.0, random.unit() * 40.0, random.unit() * 2.0 + 1e-3);
        point(&mut random, x.min(max), max, 1.0 / t);
    }
    let edges = [
        f32::NEG_INFINITY,
        f32::MIN,
        -1e30,
        -41.0,
        -40.0,
        -39.999_996,
        -29.0,
        -28.42,
        -1.0,
        -1e-45,
        -0.0,
        0.0,
        1e-45,
        1.0,
        1e30,
        f32::MAX,
    ];
    for x in edges {
        for y in edges.into_iter().filter(|&y| y.is_finite() && x <= y) {
            for z in [f32::MIN_POSITIVE, 1e-6, 0.5, 1.0, 1e6, f32::MAX] {
                point(&mut random, x, y, z);
            }
        }
    }
    all
}

#[test]
fn the_device_functions_are_the_host_s() {
    let named = std::env::var("CXX").ok().filter(|name| !name.is_empty());
    let mut compilers = named.into_iter().chain(["c++", "g++", "clang++"].map(String::from));
    let works = |name: &String| Command::new(name).arg("--version").output().is_ok_and(|o| o.status.success());
    let Some(compiler) = compilers.find(works) else {
        println!("skipped: no C++ compiler (CXX, c++, g++, clang++); every machine that runs CI has one");
        return;
    };
    let dir = std::env::temp_dir().join(format!("specrs-draw-twin-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda/draw.cuh");
    let (source, binary) = (dir.join("twin.cpp"), dir.join("twin"));
    fs::write(&source, format!("#include {header:?}\n{PROGRAM}")).unwrap();
    let flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"];
    let built = Command::new(&compiler).args(flags).arg("-o").arg(&binary).arg(&source).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));

    let points = points();
    let mut child = Command::new(&binary).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let bytes: Vec<u8> = points
        .iter()
        .flat_map(|p| {
            let wide = [p.a, p.b].map(u64::to_ne_bytes).concat();
            let narrow = [p.x.to_bits(), p.y.to_bits(), p.z.to_bits(), p.n].map(u32::to_ne_bytes).concat();
            [wide, narrow].concat()
        })
        .collect();
    let writer = std::thread::spawn(move || input.write_all(&bytes).unwrap());
    let run = child.wait_with_output().unwrap();
    writer.join().unwrap();
    fs::remove_dir_all(&dir).unwrap();
    assert!(run.status.success(), "{}", run.status);
    let (got, rest) = run.stdout.as_chunks::<8>();
    assert_eq!((got.len(), rest.len()), (points.len() * NAMES.len(), 0));
    for (got, &p) in got.chunks(NAMES.len()).zip(&points) {
        for ((got, want), name) in got.iter().zip(values(p)).zip(NAMES) {
            assert_eq!(u64::from_ne_bytes(*got), want, "{name} at {p:?}");
        }
    }
    println!("{} functions at {} points", NAMES.len(), points.len());
}
