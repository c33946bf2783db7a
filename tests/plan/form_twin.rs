//! `cuda/form.cuh` against `plan::form`: a C++ compiler builds the header into a small program, which evaluates each function
//! over a small domain, exhaustively; the values are those of the Rust functions. The header includes `params.cuh`, whose
//! assertions compare the layout of every parameter struct with Rust's. Needs no GPU and no nvcc.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::plan::geometry;
use specrs::geometry::Layout;
use specrs::plan::Phase;
use specrs::plan::form::{self, Step};

#[allow(dead_code, missing_docs, unreachable_pub, reason = "a module of the feature `cuda`, as build.rs reads it")]
#[path = "../../src/device/params/mod.rs"]
mod params;

/// The arguments that the functions choose from; `mask` and `tree` are indices.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Point {
    s: Step,
    len: u32,
    n: u32,
    j: u32,
    k: u32,
    mask: u32,
    tree: u32,
}

const ROW: usize = 128;
const MASKS: [[u64; 8]; 4] = [
    [0b1, 0b10, 0b100, 0b1000, 0x8000_0000_0000_0001, 1, 2, 3],
    [0b1101, 1 << 63, 0b11, 0xFF, 7, 6, 5, 4],
    [u64::MAX; 8],
    [1 << 40 | 0b101, 1, 0, 1 << 63 | 1, 0b1010_1010, 9, 1 << 20, u64::MAX >> 1],
];
const NODES: usize = 5;

/// Each entry, `condition => call`, is valid Rust and, as text, valid C++. Where the condition fails, a function would be
/// asked for what is not there.
macro_rules! twins {
    (|$($name:ident),*| $($valid:expr => $call:expr;)*) => {
        const TWINS: &[(&str, &str)] = &[$((stringify!($valid), stringify!($call))),*];

        #[allow(unused_variables, clippy::too_many_arguments)]
        fn values(p: Point, row: &[i32], parents: &[i32], mask: &[u64], out: &mut Vec<u64>) {
            twins!(@bind p, row, parents, mask, $($name),*);
            $(out.push(if $valid { $call as u64 } else { 0 });)*
        }
    };
    (@bind $p:ident, $r:ident, $t:ident, $m:ident, $s:ident, $len:ident, $n:ident, $j:ident, $k:ident, $row:ident, $parents:ident, $mask:ident) => {
        let ($s, $len, $n, $j, $k, $row, $parents, $mask) = ($p.s, $p.len, $p.n, $p.j, $p.k, $r, $t, $m);
    };
}

twins! { |s, len, n, j, k, row, parents, mask|
    true => form::column(s, len);
    true => form::slot(s, 5, len);
    true => form::row_slot(s, row, len);
    true => form::pages(s, len + k);
    true => form::remainder(s, len);
    true => form::stride(s, len);
    true => form::draft_pos(s, len, j, k);
    true => form::hole_len(s, len, j);
    true => form::alive(s, len);
    true => form::queries(s, n);
    true => form::prefix(s, len);
    true => form::row_pos(s, len, j);
    true => form::rope_pos(s, len, j, k);
    true => form::out_slot(s, len, row, j % s.topk);
    true => form::mask_words(s);
    true => form::run_word(len * 11, len * 9 + j * 31, k);
    true => form::own_bit(s, j);
    true => form::lane_word(s, j, k);
    true => form::earlier_word(s, k);
    true => form::node_word(parents, j, k);
    true => form::node_depth(parents, j);
    true => form::bits(mask, k);
    k < form::bits(mask, 8) => form::nth_bit(mask, k);
    true => form::bit_pos(s, len, k);
    true => form::keys(s, len, j, mask);
    len + k < form::keys(s, len, j, mask) => form::key_pos(s, len, mask, len + k);
    true => form::lists::per_query(s);
    true => form::lists::query_len(s, len, mask);
    k < form::keys(s, len, 0, mask) && mask[1] < 99 => form::lists::query_slot(s, len, row, mask, k);
    len < form::keys(s, len, 0, mask) && mask[1] < 99 => form::lists::query_slot(s, len, row, mask, len);
    true => form::lists::request_len(len, n, k % 2);
    true => form::lists::request_slot(s, row, len + k);
    true => form::lists::mask_len(len, n);
    true => form::lists::mask_len(4294967295, 1000);
    true => form::lists::packed_len(len, n);
    k + n * len < form::lists::mask_len(len, n) as u32 => form::lists::mask_at(s, len, n, mask, (k + n * len) as u64);
    k < form::lists::packed_len(len, n) as u32 => form::lists::packed_at(s, len, n, mask, k as u64);
    true => form::tables::passes(s);
    true => form::tables::tokens(s, len, len + k);
    true => form::tables::len_at(s, len, n);
    true => form::tables::page_at(s, len, n, row, k);
    true => form::tables::expand_len_at(s, len, mask);
    mask[1] < 99 => form::tables::expand_at(s, len, row, mask, j, k);
}

/// The C++ program: reads points, evaluates every twin at each, writes the values.
fn program(header: &Path) -> String {
    let cast = |text: &str| text.replace(" as u32", "").replace(" as u64", "");
    let one = |(valid, call): &(&str, &str)| {
        format!("        put({} ? static_cast<uint64_t>({}) : 0);\n", cast(valid), cast(call))
    };
    let masks: Vec<String> = MASKS.as_flattened().iter().map(|m| format!("{m}ull")).collect();
    format!(
        r#"#include {header:?}
#include <cstdio>
using namespace specrs;
struct Point {{ form::Step s; uint32_t len, n, j, k, mask, tree; }};
static void put(uint64_t value) {{ fwrite(&value, sizeof value, 1, stdout); }}
int main() {{
    static const uint64_t masks[] = {{{masks}}};
    static int32_t row[{ROW}], trees[64][{NODES}];
    if (fread(row, sizeof row, 1, stdin) != 1 || fread(trees, sizeof(int32_t) * {NODES}, {trees}, stdin) != {trees}) return 1;
    Point p;
    while (fread(&p, sizeof p, 1, stdin) == 1) {{
        const form::Step s = p.s;
        const uint32_t len = p.len, n = p.n, j = p.j, k = p.k;
        const uint64_t *mask = masks + 8 * p.mask;
        const int32_t *parents = trees[p.tree];
{calls}    }}
    return 0;
}}
"#,
        masks = masks.join(", "),
        trees = trees().len(),
        calls = TWINS.iter().map(one).collect::<String>(),
    )
}

/// Every tree of [`NODES`] nodes.
fn trees() -> Vec<[i32; NODES]> {
    let mut all = vec![[-1; NODES]];
    for node in 1..NODES {
        all = all
            .iter()
            .flat_map(|t| {
                (0..node as i32).map(|p| {
                    let mut t = *t;
                    t[node] = p;
                    t
                })
            })
            .collect();
    }
    all
}

fn points() -> Vec<Point> {
    let mut steps = Vec::new();
    for (p, (k, s)) in [1, 2, 8].into_iter().flat_map(|p| [(1, 1), (1, 3), (2, 2), (3, 2), (3, 25)].map(|ks| (p, ks))) {
        for (layout, v) in [(Layout::Dense, 70), (Layout::Holey, 3)] {
            let g = geometry(k, s, v.min(1 + k + (s - 1) * k * k), p, 1, 9, layout);
            let mut drafts = vec![0, s / 2, s - 1];
            drafts.dedup();
            steps.extend([Phase::Extend, Phase::Decode, Phase::Verify].map(|phase| Step::new(&g, phase)));
            steps.extend(drafts.into_iter().map(|step| Step::new(&g, Phase::Draft { step })));
        }
    }
    let mut all = Vec::new();
    for s in steps {
        for x in 0..10 * 4 * NODES as u32 * 6 {
            let (len, n, j, k) = (x % 10, x / 10 % 4, x / 40 % NODES as u32, x / 40 / NODES as u32);
            all.push(Point { s, len, n, j, k, mask: (len + n + k) % 4, tree: (x + s.step + len) % 24 });
        }
    }
    all
}

/// The first C++ compiler there is.
fn compiler() -> Option<String> {
    let named = std::env::var("CXX").ok().filter(|name| !name.is_empty());
    let all = named.into_iter().chain(["c++", "g++", "clang++"].map(String::from));
    all.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok_and(|o| o.status.success()))
}

#[test]
fn the_device_functions_are_the_host_s() {
    let Some(compiler) = compiler() else {
        println!("skipped: no C++ compiler (CXX, c++, g++, clang++); every machine that runs CI has one");
        return;
    };
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("form_twin");
    fs::create_dir_all(&dir).unwrap();
    let (source, binary, input) = (dir.join("twin.cpp"), dir.join("twin"), dir.join("points"));
    fs::write(&source, program(&Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda/form.cuh"))).unwrap();
    let header = params::header().unwrap();
    let build = |header: &str| {
        fs::write(dir.join("params.cuh"), header).unwrap();
        let flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-sign-compare"];
        let built =
            Command::new(&compiler).args(flags).arg("-I").arg(&dir).arg("-o").arg(&binary).arg(&source).output();
        let built = built.unwrap();
        (built.status.success(), String::from_utf8_lossy(&built.stderr).into_owned())
    };
    // A field that is not where Rust has it is refused by its name.
    let (built, said) = build(&header.replace("    uint32_t shift;\n", "    uint64_t shift;\n"));
    assert!(!built && said.contains("params/plan.rs: Step.topk: at byte 12 in Rust"), "{said}");
    let (built, said) = build(&header);
    assert!(built, "{said}");

    let (row, trees, points): (Vec<i32>, _, _) =
        ((0..ROW as i32).map(|i| i * 37 % 101 + 1).collect(), trees(), points());
    let mut bytes: Vec<u8> = row.iter().chain(trees.as_flattened()).flat_map(|v| v.to_ne_bytes()).collect();
    let mut want = Vec::new();
    for &p in &points {
        let s = p.s;
        let numbers = [s.phase, s.step, s.shift, s.topk, s.steps, s.nodes, s.context, s.holey, p.len, p.n, p.j, p.k];
        bytes.extend(numbers.into_iter().chain([p.mask, p.tree]).flat_map(u32::to_ne_bytes));
        values(p, &row, &trees[p.tree as usize], &MASKS[p.mask as usize], &mut want);
    }
    fs::write(&input, bytes).unwrap();
    let run = Command::new(&binary).stdin(fs::File::open(&input).unwrap()).output().unwrap();
    assert!(run.status.success(), "{}", run.status);
    let (got, rest) = run.stdout.as_chunks::<8>();
    assert_eq!((got.len(), rest.len()), (want.len(), 0));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let got = u64::from_ne_bytes(*got);
        assert_eq!(got, want, "{} at {:?}", TWINS[i % TWINS.len()].1, points[i / TWINS.len()]);
    }
    // A condition that is never met would compare nothing.
    for (i, (_, call)) in TWINS.iter().enumerate() {
        assert!(got.iter().skip(i).step_by(TWINS.len()).any(|v| *v != [0; 8]), "{call} is 0 everywhere");
    }
    println!("{} functions at {} points", TWINS.len(), points.len());
}

/// Each function of the Rust module is compared, and the header has no other.
#[test]
fn every_function_has_its_twin() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut rust = Vec::new();
    for (file, module) in [("mod", ""), ("lists", "lists::"), ("tables", "tables::")] {
        let text = fs::read_to_string(root.join(format!("src/plan/form/{file}.rs"))).unwrap();
        let functions = text.lines().filter_map(|l| l.strip_prefix("pub fn ")?.split('(').next());
        rust.extend(functions.map(|name| format!("form::{module}{name}")));
    }
    for name in &rust {
        let call = format!("{name}(");
        assert!(TWINS.iter().any(|(_, c)| c.replace(' ', "").starts_with(&call)), "{name} has no twin");
    }
    let header = fs::read_to_string(root.join("cuda/form.cuh")).unwrap();
    let device = header.lines().filter(|l| l.starts_with("SPECRS_FORM ")).count();
    assert_eq!(device, rust.len() + 2, "count_ones and trailing_zeros are Rust's own");
}
