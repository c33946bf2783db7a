//! The crate's own order: data flows one way, no files import each other in a circle, and every test file is compiled.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Modules from left to right: one imports only from those before it, and none from its neighbours in an entry.
const ORDER: &[&[&str]] = &[
    &["error", "bounds", "overlap", "revert", "simd"],
    &["geometry"],
    &["pool", "round"],
    &["grammar"],
    &["plan"],
    &["plan::write"],
    &["plan::certify"],
    &["draft", "host", "device"],
    &["graph"],
    &["py"],
];
/// Neighbours that may import each other, as long as there is no circle.
const BASE: usize = 0;

/// Circles that wait to be cut, by the first file of each; none.
const ALLOWED: &[&str] = &[];

/// A path from the crate's root, such as `plan::write::planner`; the root itself is empty.
type Module = Vec<String>;

/// One file: its module, and its code without comments and unit tests.
struct File {
    module: Module,
    code: String,
}

impl File {
    /// True if its `pub use` lines are a table of contents, and no imports.
    fn is_facade(&self, all: &[File]) -> bool {
        all.iter().any(|f| f.module.len() == self.module.len() + 1 && f.module.starts_with(&self.module))
    }

    /// Every `use`, flattened: whether it is public, the path, the name it gets.
    fn uses(&self) -> Vec<(bool, String, String)> {
        let mut all = Vec::new();
        let mut rest = self.code.as_str();
        while let Some(at) = rest.find("use ") {
            let (before, from) = (&rest[..at], &rest[at + 4..]);
            let line = before.rsplit('\n').next().unwrap_or("").trim();
            rest = from;
            if !(line.is_empty() || line.starts_with("pub")) {
                continue;
            }
            let Some(end) = from.find(';') else { break };
            let tree: String = from[..end].split_whitespace().collect::<Vec<_>>().join(" ");
            rest = &from[end..];
            flatten("", &tree, &mut |path, name| all.push((line.starts_with("pub"), path, name)));
        }
        all
    }

    /// Paths that begin with `crate::` or `super::` outside of `use`.
    fn inline(&self) -> Vec<String> {
        let ident = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        let words = self.code.split(|c| !ident(c));
        let paths = words.filter(|w| w.starts_with("crate::") || w.starts_with("super::"));
        paths.map(|w| w.trim_end_matches(':').to_string()).collect()
    }
}

/// The paths of a `use` tree.
fn flatten(prefix: &str, tree: &str, found: &mut impl FnMut(String, String)) {
    let tree = tree.trim();
    if let Some(open) = tree.find('{') {
        let (head, inner) = (&tree[..open], &tree[open + 1..tree.rfind('}').unwrap()]);
        let (mut depth, mut start) = (0, 0);
        for (i, c) in inner.char_indices().chain([(inner.len(), ',')]) {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    if !inner[start..i].trim().is_empty() {
                        flatten(&format!("{prefix}{head}"), &inner[start..i], found);
                    }
                    start = i + 1;
                }
                _ => {}
            }
        }
        return;
    }
    let (path, name) = tree.split_once(" as ").unwrap_or((tree, tree.rsplit("::").next().unwrap()));
    found(format!("{prefix}{path}").trim_end_matches("::self").to_string(), name.trim().to_string());
}

/// The lines of a formatted file that are not of an item under `#[cfg(test)]`.
fn without_tests(text: &str) -> Vec<&str> {
    let (mut kept, mut lines) = (Vec::new(), text.lines());
    while let Some(line) = lines.next() {
        if line.trim_start() != "#[cfg(test)]" {
            kept.push(line);
            continue;
        }
        let indent = &line[..line.len() - line.trim_start().len()];
        // The item ends with a line of its own indentation: the `}` that closes it, or one with `;` (`mod tests;`).
        let within = |l: &str| l.strip_prefix(indent).is_none_or(|l| !(l == "}" || l.ends_with([';', ','])));
        let deeper = |l: &str| l.strip_prefix(indent).is_some_and(|l| l.starts_with([' ', ')']));
        while lines.next().is_some_and(|l| deeper(l) || within(l)) {}
    }
    kept
}

/// Every file of `src`.
fn files() -> Vec<File> {
    fn walk(dir: &Path, module: &[String], out: &mut Vec<File>) {
        for entry in fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()) {
            let name = entry.file_stem().unwrap().to_str().unwrap().to_string();
            let own = [module, std::slice::from_ref(&name)].concat();
            if entry.is_dir() {
                walk(&entry, &own, out);
            } else if entry.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(&entry).unwrap();
                let lines = without_tests(&text).into_iter().map(|l| l.split("//").next().unwrap());
                let code = lines.collect::<Vec<_>>().join("\n");
                out.push(File { module: if matches!(&*name, "mod" | "lib") { module.to_vec() } else { own }, code });
            }
        }
    }
    let mut all = Vec::new();
    walk(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &[], &mut all);
    all
}

/// The file that defines what `path` names in `from`; `None` for what another crate has.
fn resolve(all: &[File], from: &Module, path: &str, depth: usize) -> Option<Module> {
    let is_module = |m: &[String]| all.iter().any(|f| f.module == m);
    let mut segments = path.split("::").peekable();
    let mut at = from.clone();
    match segments.peek() {
        Some(&"crate") => {
            at.clear();
            segments.next();
        }
        Some(&"self" | &"super") => {}
        Some(first) if is_module(&[&from[..], &[first.to_string()]].concat()) => {}
        _ => return None,
    }
    for segment in segments {
        let inner = [&at[..], &[segment.to_string()]].concat();
        match segment {
            "self" => {}
            "super" => drop(at.pop()),
            _ if is_module(&inner) => at = inner,
            _ => {
                let file = all.iter().find(|f| f.module == at)?;
                let given = file.uses().into_iter().find(|(public, _, name)| *public && name == segment);
                return match given {
                    Some((_, path, _)) if depth < 8 => resolve(all, &at, &path, depth + 1),
                    _ => Some(at),
                };
            }
        }
    }
    Some(at)
}

/// Imports of every file.
fn imports() -> BTreeMap<Module, BTreeSet<Module>> {
    let all = files();
    let of = |file: &File| {
        let facade = file.is_facade(&all);
        let uses = file.uses().into_iter().filter(|(public, ..)| !(*public && facade)).map(|(_, path, _)| path);
        let paths = uses.chain(file.inline());
        let found = paths.filter_map(|path| resolve(&all, &file.module, &path, 0));
        (file.module.clone(), found.filter(|m| *m != file.module).collect())
    };
    all.iter().map(of).collect()
}

#[test]
fn lines_behind_a_test_module_are_read() {
    let text = "mod a;\n#[cfg(test)]\nmod tests;\n\npub use a::A;\n\n#[cfg(test)]\n#[rustfmt::skip]\nmod more {\n    \
                use super::b;\n}\nuse c;\nimpl A {\n    #[cfg(test)]\n    fn f() {\n        g();\n    }\n    fn h() {}\n}";
    let want = ["mod a;", "", "pub use a::A;", "", "use c;", "impl A {", "    fn h() {}", "}"];
    assert_eq!(without_tests(text), want);
    let pool = files().into_iter().find(|f| f.module == ["pool"]).unwrap();
    assert!(pool.uses().iter().any(|(public, _, name)| *public && name == "Lease"), "`pub use` behind `mod tests;`");
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    let imports = imports();
    assert!(imports.len() > 60 && imports.values().map(BTreeSet::len).sum::<usize>() > 200, "imports are seen");
    let mut circles = Vec::new();
    for start in imports.keys() {
        // The shortest way back.
        let (mut seen, mut ways) = (BTreeSet::new(), vec![vec![start]]);
        'search: while !ways.is_empty() {
            let mut longer = Vec::new();
            for way in ways {
                for next in &imports[way[way.len() - 1]] {
                    if next == start {
                        let names: Vec<String> = way.iter().map(|m| m.join("::")).collect();
                        // Told once, by its first file.
                        if names.iter().min() == names.first() && !ALLOWED.contains(&&*names[0]) {
                            circles.push(names.join(" -> "));
                        }
                        break 'search;
                    }
                    if seen.insert(next) && imports.contains_key(next) {
                        longer.push([&way[..], &[next]].concat());
                    }
                }
            }
            ways = longer;
        }
    }
    assert!(circles.is_empty(), "{} circles:\n{}", circles.len(), circles.join("\n"));
}

#[test]
fn a_module_imports_only_from_those_on_its_left() {
    // The longest name that fits: plan::write before plan.
    let rank = |m: &Module| {
        let path = m.join("::");
        let inside = |name: &str| path == name || path.starts_with(&format!("{name}::"));
        let names = ORDER.iter().enumerate().flat_map(|(i, names)| names.iter().map(move |name| (i, *name)));
        names.filter(|(_, name)| inside(name)).max_by_key(|(_, name)| name.len())
    };
    for (file, imported) in imports() {
        let Some((mine, name)) = rank(&file) else {
            assert!(file.is_empty(), "{} has no place in the order", file.join("::"));
            continue;
        };
        for other in imported.iter().filter(|m| !m.is_empty()) {
            let (theirs, their_name) = rank(other).unwrap();
            let fine = theirs < mine || name == their_name || theirs == mine && mine == BASE;
            assert!(fine, "{} imports {}, which is on its right", file.join("::"), other.join("::"));
        }
    }
}

#[test]
fn rayon_runs_in_pools_of_ours() {
    // rayon's global pool does not survive a fork: the child waits for threads that it does not have. Both of these
    // make pools of their own, and run everything in them.
    let users = files().into_iter().filter(|f| f.code.contains("rayon")).map(|f| f.module.join("::"));
    assert_eq!(users.collect::<BTreeSet<_>>(), ["draft::corpus_file", "host::threads"].map(String::from).into());
}

#[test]
fn contributing_has_the_same_order() {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("CONTRIBUTING.md")).unwrap();
    let order = text.split_once("Rust: ").unwrap().1.split_once("Python: ").unwrap().0;
    let floors = order.split("->").map(|names| names.split('|').map(str::trim).collect::<BTreeSet<_>>());
    let listed: Vec<BTreeSet<&str>> = ORDER.iter().map(|names| names.iter().copied().collect()).collect();
    assert_eq!(floors.collect::<Vec<_>>(), listed);
}

#[test]
fn every_test_file_is_a_module_of_its_binary() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let mut open: Vec<_> = fs::read_dir(&tests).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect();
    let mut seen = 0;
    while let Some(dir) = open.pop() {
        let Some(root) = ["main.rs", "mod.rs"].map(|name| dir.join(name)).into_iter().find(|p| p.is_file()) else {
            continue; // Python, results
        };
        let text = fs::read_to_string(&root).unwrap();
        for path in fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).filter(|p| *p != root) {
            let named = format!("mod {};", path.file_stem().unwrap().to_str().unwrap());
            assert!(text.contains(&named), "{} is no module of {}", path.display(), root.display());
            if path.is_dir() {
                open.push(path);
            }
            seen += 1;
        }
    }
    assert!(seen > 40, "files are seen");
}
