//! Compiles `cuda/*.cu` with nvcc to images of PTX and machine code, and writes the table that `src/device/images.rs`
//! embeds (feature `cuda` only).
//! `params.cuh`, which the kernels include, comes from the declarations of `src/device/params/`.
//!
//! nvcc is searched in this order, and the first one whose PTX the oldest supported driver loads is used:
//! `NVCC`; `CUDA_HOME`, `CUDA_PATH`; the PyPI wheel `cuda-toolkit[nvcc,cccl]` on `sys.path` of the building Python
//! (`PYO3_PYTHON`, `VIRTUAL_ENV`, `python3`): this is what an isolated `pip install .` or `maturin build` finds, since
//! `pyproject.toml` asks for that wheel; `PATH`; `/usr/local/cuda`.
//!
//! Without nvcc, or without the host C++ compiler that nvcc needs, the crate builds with a warning and without kernels, and
//! `specrs::device::available()` says why. `SPECRS_NO_CUDA=1` asks for that; `SPECRS_REQUIRE_CUDA=1` makes it an error. An
//! `NVCC` that cannot be used, and a kernel that does not compile, are always errors.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicUsize, Ordering};

#[allow(dead_code, unreachable_pub, reason = "a module of the crate, of which the header is read here")]
#[path = "src/device/params/mod.rs"]
mod params;

/// Files whose images are compiled for `90a` too, since they were measured to gain from Hopper's own instructions. Every
/// image is compiled for `80`, the baseline that every supported GPU runs.
const HOPPER: &[&str] = &["attention", "rows", "sample"];

/// Files that are compiled for `90a` alone: other GPUs have other means for what these do.
const HOPPER_ALONE: &[&str] = &["linear"];

/// The images of the files that have several, each under macros of its own: image, file, macros. The driver compiles an
/// image when it is loaded, so each holds no more than a model needs. Any other file of `cuda/` is one image of its name.
const VARIANTS: &[(&str, &str, &[&str])] = &[
    ("attention_bf16_64", "attention", &["SPECRS_ELEMENT=Bf16", "SPECRS_HEAD_DIM=64"]),
    ("attention_bf16_96", "attention", &["SPECRS_ELEMENT=Bf16", "SPECRS_HEAD_DIM=96"]),
    ("attention_bf16_128", "attention", &["SPECRS_ELEMENT=Bf16", "SPECRS_HEAD_DIM=128"]),
    ("attention_f16_64", "attention", &["SPECRS_ELEMENT=F16", "SPECRS_HEAD_DIM=64"]),
    ("attention_f16_96", "attention", &["SPECRS_ELEMENT=F16", "SPECRS_HEAD_DIM=96"]),
    ("attention_f16_128", "attention", &["SPECRS_ELEMENT=F16", "SPECRS_HEAD_DIM=128"]),
    ("attention_bf16_256", "attention", &["SPECRS_ELEMENT=Bf16", "SPECRS_HEAD_DIM=256"]),
    ("attention_f16_256", "attention", &["SPECRS_ELEMENT=F16", "SPECRS_HEAD_DIM=256"]),
    ("attention_bf16_128_capped", "attention", &["SPECRS_ELEMENT=Bf16", "SPECRS_HEAD_DIM=128", "SPECRS_CAPPED=1"]),
    ("attention_f16_128_capped", "attention", &["SPECRS_ELEMENT=F16", "SPECRS_HEAD_DIM=128", "SPECRS_CAPPED=1"]),
    ("attention_bf16_256_capped", "attention", &["SPECRS_ELEMENT=Bf16", "SPECRS_HEAD_DIM=256", "SPECRS_CAPPED=1"]),
    ("attention_f16_256_capped", "attention", &["SPECRS_ELEMENT=F16", "SPECRS_HEAD_DIM=256", "SPECRS_CAPPED=1"]),
    ("round_end", "round_end", &[]),
    ("round_end_loop", "round_end", &["SPECRS_LOOP"]),
];

/// Images of PTX alone: they call what no library of ours has, and the driver resolves when it compiles them.
const PTX_ONLY: &[&str] = &["round_end_loop"];

/// Content of an image for an architecture: PTX for GPUs to come, which their driver compiles when it loads an image
/// (seconds), and machine code for those of today: `sm_80` runs on every 8.x.
const CODE: &[(&str, &str)] = &[("80", "[compute_80,sm_80,sm_90]"), ("90a", "sm_90a")];

/// The same where the file has an image of `90a` beside it, which every GPU of capability 9.0 takes.
const BASELINE_CODE: &str = "[compute_80,sm_80]";

/// Newest PTX ISA that the oldest supported driver (580, CUDA 13.0) loads; the toolkit that writes it.
const MAX_PTX: Version = Version(9, 0);
const MAX_TOOLKIT: Version = Version(13, 0);

const ADVICE: &str = "Ways on:\n  \
    - pip install \"cuda-toolkit[nvcc,cccl]==13.0.*\" into a small environment of its own (not torch's: torch pins a newer one) \
    and set NVCC=<environment>/lib/python3.X/site-packages/nvidia/cu13/bin/nvcc\n  \
    - set NVCC or CUDA_HOME to an installed CUDA toolkit, at most 13.0\n  \
    - set SPECRS_NO_CUDA=1 to build without CUDA kernels";

const INPUTS: &[&str] = &[
    "NVCC",
    "NVCC_CCBIN",
    "CUDA_HOME",
    "CUDA_PATH",
    "PYO3_PYTHON",
    "VIRTUAL_ENV",
    "SPECRS_NO_CUDA",
    "SPECRS_REQUIRE_CUDA",
    "DOCS_RS",
];

/// Reason why there is no PTX.
enum Failure {
    /// This machine has no way to compile it: a build without kernels is an honest answer.
    NoCompiler(String),
    /// Something is wrong that a build without kernels would hide.
    Broken(String),
}

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Failure::Broken(why)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    println!("cargo::rerun-if-changed=cuda");
    for name in INPUTS {
        println!("cargo::rerun-if-env-changed={name}");
    }
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            // One directive a line: cargo ends a message at the first newline.
            for line in why.lines() {
                println!("cargo::error={line}");
            }
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: run through cargo")?);
    let (absent, images) = if env::var_os("DOCS_RS").is_some() {
        (Some("built for documentation"), String::new())
    } else if is_set("SPECRS_NO_CUDA") {
        (Some("built with SPECRS_NO_CUDA=1"), String::new())
    } else {
        match compile_all(&out) {
            Ok(images) => (None, images),
            Err(Failure::NoCompiler(why)) if !is_set("SPECRS_REQUIRE_CUDA") => {
                println!("cargo::warning=building WITHOUT CUDA kernels (SPECRS_REQUIRE_CUDA=1 makes this an error)");
                for line in why.lines() {
                    println!("cargo::warning={line}");
                }
                (Some("nvcc, or the C++ compiler that it needs, was missing when this was built"), String::new())
            }
            Err(Failure::NoCompiler(why) | Failure::Broken(why)) => return Err(why),
        }
    };
    let text = format!(
        "/// Why there are no kernels in this build, if there are none.\npub(super) const ABSENT: Option<&str> = {absent:?};\n\
         /// The embedded code, one image for each kernel file and architecture.\n\
         pub(super) static IMAGES: &[Image] = &[\n{images}];\n"
    );
    let table = out.join("images.rs");
    fs::write(&table, text).map_err(|e| format!("cannot write {}: {e}", table.display()))
}

fn is_set(name: &str) -> bool {
    env::var(name).is_ok_and(|v| !matches!(v.as_str(), "" | "0"))
}

/// An image compiled from a file of `cuda/`, which is its name and `.cu`, under some macros.
struct KernelImage {
    name: String,
    file: String,
    macros: &'static [&'static str],
}

impl KernelImage {
    fn archs(&self) -> &'static [&'static str] {
        match &*self.file {
            file if HOPPER_ALONE.contains(&file) => &["90a"],
            file if HOPPER.contains(&file) => &["80", "90a"],
            _ => &["80"],
        }
    }
}

/// The images of every file of `cuda/`, the longest to compile first.
fn kernel_images(cuda: &Path) -> Result<Vec<KernelImage>, String> {
    let refused = |e| format!("cannot list {}: {e}", cuda.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(cuda).map_err(refused)? {
        let path = entry.map_err(refused)?.path();
        if path.extension().is_some_and(|e| e == "cu") {
            files.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
        }
    }
    if let Some((image, file, _)) = VARIANTS.iter().find(|(_, file, _)| !files.iter().any(|f| f == file)) {
        return Err(format!("build.rs: VARIANTS: image {image}: {} has no {file}.cu", cuda.display()));
    }
    let image = |name: &str, file: &str, macros| KernelImage { name: name.to_owned(), file: file.to_owned(), macros };
    let mut images: Vec<KernelImage> = VARIANTS.iter().map(|(name, file, macros)| image(name, file, *macros)).collect();
    files.sort();
    files.retain(|file| !VARIANTS.iter().any(|(_, of, _)| of == file));
    images.extend(files.iter().map(|file| image(file, file, &[])));
    Ok(images)
}

/// Compile every kernel for each of its architectures, as many at once as there are processors; the entries of the table.
fn compile_all(out: &Path) -> Result<String, Failure> {
    let nvcc = find_nvcc()?;
    let header = out.join("params.cuh");
    fs::write(&header, params::header()?).map_err(|e| format!("cannot write {}: {e}", header.display()))?;
    let root =
        env::var_os("CARGO_MANIFEST_DIR").ok_or("CARGO_MANIFEST_DIR is not set: run through cargo".to_owned())?;
    let root = Path::new(&root);
    let jobs = kernel_images(&root.join("cuda"))?;
    let jobs: Vec<(&KernelImage, &str)> =
        jobs.iter().flat_map(|image| image.archs().iter().map(move |arch| (image, *arch))).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some(&(image, arch)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            done.push(compile(&nvcc, root, image, arch, out)?);
        }
        Ok::<_, Failure>(done)
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    let mut images = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let mut images = Vec::new();
        for worker in workers {
            images.extend(worker.join().map_err(|_| "a thread of the build panicked".to_owned())??);
        }
        Ok::<_, Failure>(images)
    })?;
    images.sort();
    Ok(images.concat())
}

/// The first nvcc of the search order that is there and not too new; else what was looked at, and what to do.
fn find_nvcc() -> Result<PathBuf, Failure> {
    let mut seen = Vec::new();
    for (origin, path) in candidates() {
        let found = toolkit_version(&path);
        match found {
            Ok(version) if version <= MAX_TOOLKIT => return Ok(path),
            Ok(version) => seen.push(format!(
                "{origin}: {} is CUDA {version}, whose PTX driver 580 (CUDA {MAX_TOOLKIT}) refuses",
                path.display()
            )),
            Err(why) => seen.push(format!("{origin}: {}: {why}", path.display())),
        }
        if origin == "NVCC" {
            // A compiler that the user named is used or refused, never silently replaced.
            return Err(Failure::Broken(format!("{}\n{ADVICE}", seen.join("\n"))));
        }
    }
    let seen = if seen.is_empty() { "nothing found".to_owned() } else { seen.join("\n  ") };
    Err(Failure::NoCompiler(format!(
        "feature `cuda` needs nvcc (CUDA <= {MAX_TOOLKIT}). Looked at:\n  {seen}\n{ADVICE}"
    )))
}

fn candidates() -> Vec<(&'static str, PathBuf)> {
    let exe = format!("nvcc{}", env::consts::EXE_SUFFIX);
    let mut found = Vec::new();
    if let Some(path) = env::var_os("NVCC").filter(|v| !v.is_empty()) {
        found.push(("NVCC", PathBuf::from(path)));
    }
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(root) = env::var_os(name).filter(|v| !v.is_empty()) {
            found.push((name, Path::new(&root).join("bin").join(&exe)));
        }
    }
    for site in python_path() {
        let path = site.join("nvidia").join("cu13").join("bin").join(&exe);
        if path.is_file() {
            found.push(("cuda-toolkit wheel", path));
        }
    }
    if let Some(dirs) = env::var_os("PATH") {
        found.extend(env::split_paths(&dirs).map(|d| d.join(&exe)).filter(|p| p.is_file()).map(|p| ("PATH", p)));
    }
    let usual = Path::new("/usr/local/cuda/bin").join(&exe);
    if usual.is_file() {
        found.push(("/usr/local/cuda", usual));
    }
    found
}

/// `sys.path` of each Python that may be the building one, in order. In pip's isolated build it holds the overlay
/// into which the build requirements were installed.
fn python_path() -> Vec<PathBuf> {
    let mut pythons = Vec::new();
    if let Some(python) = env::var_os("PYO3_PYTHON").filter(|v| !v.is_empty()) {
        pythons.push(PathBuf::from(python));
    }
    if let Some(root) = env::var_os("VIRTUAL_ENV").filter(|v| !v.is_empty()) {
        pythons.push(Path::new(&root).join("bin").join("python"));
    }
    pythons.push(PathBuf::from("python3"));
    let mut dirs: Vec<PathBuf> = Vec::new();
    for python in pythons {
        let Ok(output) = Command::new(&python).args(["-c", "import sys; print('\\n'.join(sys.path))"]).output() else {
            continue;
        };
        for line in String::from_utf8_lossy(&output.stdout).lines().filter(|l| !l.is_empty()) {
            let dir = PathBuf::from(line);
            if !dirs.contains(&dir) {
                dirs.push(dir);
            }
        }
    }
    dirs
}

/// Release that `nvcc --version` prints (`... release 13.0, V13.0.88`).
fn toolkit_version(nvcc: &Path) -> Result<Version, String> {
    let output = Command::new(nvcc).arg("--version").output().map_err(|e| format!("does not run: {e}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.split("release ")
        .nth(1)
        .and_then(|rest| parse_version(rest.split(',').next()?))
        .ok_or_else(|| "prints no release number for --version".to_owned())
}

fn parse_version(text: &str) -> Option<Version> {
    let (major, minor) = text.trim().split_once('.')?;
    Some(Version(major.parse().ok()?, minor.parse().ok()?))
}

/// A file and all that it includes, by path, with their text.
fn with_includes(path: PathBuf, out: &Path, found: &mut BTreeMap<PathBuf, String>) -> Result<(), String> {
    if found.contains_key(&path) {
        return Ok(());
    }
    let text = fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    let names: Vec<String> =
        text.lines().filter_map(|l| Some(l.strip_prefix("#include \"")?.split('"').next()?.to_owned())).collect();
    let beside = path.parent().unwrap_or(Path::new("")).to_owned();
    found.insert(path, text);
    for name in names {
        let own = beside.join(&name);
        with_includes(if own.is_file() { own } else { out.join(&name) }, out, found)?;
    }
    Ok(())
}

/// Compile `image` for `arch` to PTX, and that to the image, unless they lie there from the same text, arguments and
/// compiler; its entry of the table.
fn compile(nvcc: &Path, root: &Path, image: &KernelImage, arch: &str, out: &Path) -> Result<String, Failure> {
    let KernelImage { name, file: source, macros } = image;
    let name = &**name;
    let ptx = &out.join(format!("{name}.compute_{arch}.ptx"));
    let file = format!("{name}.{arch}.fatbin");
    let ptx_alone = format!("compute_{arch}");
    let code = match CODE.iter().find(|(a, _)| *a == arch) {
        _ if PTX_ONLY.contains(&name) => &*ptx_alone,
        _ if arch == "80" && image.archs().contains(&"90a") => BASELINE_CODE,
        found => found.map_or(arch, |(_, code)| *code),
    };
    let source = format!("cuda/{source}.cu");
    let mut texts = BTreeMap::new();
    with_includes(root.join(&source), out, &mut texts)?;
    let mut hash = DefaultHasher::new();
    (texts.values().collect::<Vec<_>>(), macros, code, nvcc, include_str!("build.rs")).hash(&mut hash);
    let key = format!("{:016x}", hash.finish());
    let stamp = out.join(format!("{name}.{arch}.key"));
    if fs::read_to_string(&stamp).is_ok_and(|old| old == key) && out.join(&file).is_file() {
        return Ok(entry(name, arch, &file, ptx_version(ptx)?));
    }
    let _ = fs::remove_file(&stamp); // without it, no file there counts as whole
    // Relative source path: what the compiler writes about its input does not depend on where the checkout lies.
    let output = Command::new(nvcc)
        .current_dir(root)
        .args(["-ptx", "-O3", "-std=c++17", "--Werror", "all-warnings"])
        .arg(format!("-arch=compute_{arch}"))
        .args(macros.iter().map(|m| format!("-D{m}")))
        .arg("-I")
        .arg(out)
        .arg("-o")
        .arg(ptx)
        .arg(&source)
        .output()
        .map_err(|e| format!("{} does not run: {e}\n{ADVICE}", nvcc.display()))?;
    if !output.status.success() {
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let said = format!("{} {source} for compute_{arch} failed ({}):\n{said}", nvcc.display(), output.status);
        let host = ["cc1plus", "gcc: not found", "gcc: No such file", "g++: not found", "failed to preprocess host"];
        if host.iter().any(|h| said.contains(h)) || said.contains("unsupported GNU version") {
            let hint = "nvcc needs a host C++ compiler even for PTX: install g++ (Debian: apt install g++), or set NVCC_CCBIN to one \
                 that this nvcc supports";
            return Err(Failure::NoCompiler(format!("{said}\n{hint}")));
        }
        return Err(Failure::Broken(said));
    }
    let version = ptx_version(ptx)?;
    if version > MAX_PTX {
        return Err(Failure::Broken(format!(
            "{} wrote PTX ISA {version} for {source}; driver 580 loads at most {MAX_PTX}\n{ADVICE}",
            nvcc.display()
        )));
    }
    let output = Command::new(nvcc)
        .args(["-fatbin", "-O3", "--fatbin-options", "-compress-all"]) // a quarter of the bytes
        .args(["-gencode", &format!("arch=compute_{arch},code={code}"), "-o"])
        .arg(out.join(&file))
        .arg(ptx)
        .output()
        .map_err(|e| format!("{} does not run: {e}\n{ADVICE}", nvcc.display()))?;
    if !output.status.success() {
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        return Err(Failure::Broken(format!(
            "{} cannot assemble {name} for {code} ({}):\n{said}",
            nvcc.display(),
            output.status
        )));
    }
    fs::write(&stamp, key).map_err(|e| format!("cannot write {}: {e}", stamp.display()))?;
    Ok(entry(name, arch, &file, version))
}

/// The version of the PTX ISA that a file is written in.
fn ptx_version(ptx: &Path) -> Result<Version, String> {
    let text = fs::read_to_string(ptx).map_err(|e| format!("cannot read {}: {e}", ptx.display()))?;
    text.lines()
        .find_map(|l| l.strip_prefix(".version "))
        .and_then(parse_version)
        .ok_or_else(|| format!("{}: no .version line: no nvcc that writes PTX made it", ptx.display()))
}

/// An image's entry of the table.
fn entry(name: &str, arch: &str, file: &str, Version(major, minor): Version) -> String {
    let (number, exact) = (arch.trim_end_matches('a'), arch.ends_with('a'));
    format!(
        "    Image {{ name: {name:?}, arch: {number}, exact: {exact}, isa: ({major}, {minor}), \
         code: &Aligned(*include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{file}\"))) }},\n"
    )
}
