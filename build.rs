//! Builds the kernels: `src/variants.rs` → one stub file per unit → nvcc → fatbins that `src/kernel.rs` embeds. cxx makes C++ headers of
//! the parameters in `src/params/`. A fatbin is compiled again only if its stub, a header of its own, the flags or the compiler change (by
//! content). Each docstring of `python/oxmoe/_oxmoe.pyi` becomes a file of its name, which `src/python.rs` embeds.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;
use std::{env, fs};

#[path = "src/platform.rs"]
mod platform;
#[allow(dead_code)]
#[path = "src/variants.rs"]
mod variants;

/// Stands in for `src/params.rs` in the table of kernels, which needs the types' names alone.
mod params {
    macro_rules! structs {
        ($($name:ident)*) => { $(pub enum $name {})* };
    }
    include!("src/variants/structs.rs");
}

/// Stands in for `src/tma.rs` in the table of kernels.
mod tma {
    pub enum TensorMap {}
}

const DEFAULT_ARCHS: &str = "80;90a;100f;120f";

/// The codes of ptxas' messages that it serialised wgmma. ptxas only informs of it; here it is an error.
const SERIALIZED: [&str; 7] = ["C7510", "C7512", "C7513", "C7514", "C7517", "C7519", "C7520"];

/// The stub with the docstrings, which Python's help() shows and type checkers read.
const STUB: &str = "python/oxmoe/_oxmoe.pyi";

/// The files from which a wheel is made. git is asked whether they changed.
const SOURCES: [&str; 7] = ["Cargo.lock", "Cargo.toml", "build.rs", "csrc", "pyproject.toml", "python", "src"];

struct Unit {
    name: String,
    archs: Vec<String>,
    source: String,
}

fn main() {
    let system = env::var("CARGO_CFG_TARGET_OS").expect("cargo sets CARGO_CFG_TARGET_OS");
    if let Some(reason) = platform::refusal(&system) {
        println!("cargo::error={reason}");
        return;
    }
    for name in [
        "OXMOE_NVCC",
        "OXMOE_CUDA_ARCHS",
        "OXMOE_KERNEL_CACHE",
        "OXMOE_LINEINFO",
        "CUDA_HOME",
        "CUDA_PATH",
        "PYO3_PYTHON",
    ] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    for path in ["csrc", "src/params", "src/variants.rs", "src/variants", "build.rs", STUB] {
        println!("cargo:rerun-if-changed={path}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    write_help(&out.join("help"));
    write_commit();
    let folder = fs::read_dir("src/params").expect("the sources are here");
    let mut bridges: Vec<PathBuf> = folder.map(|file| file.expect("a folder can be read").path()).collect();
    bridges.sort();
    cxx_build::bridges(bridges).std("c++17").compile("oxmoe-params");

    let archs = env::var("OXMOE_CUDA_ARCHS").unwrap_or_else(|_| DEFAULT_ARCHS.into());
    let archs: Vec<String> =
        archs.split([';', ',', ' ']).filter(|a| !["", "none"].contains(a)).map(String::from).collect();
    let (units, table) = write_units(&archs);
    // OXMOE_CUDA_ARCHS=none builds the CPU backend alone, for work on the host side.
    let nvcc = if units.is_empty() { Nvcc::none() } else { Nvcc::find() };
    let compiled = compile(&nvcc, &units, &out);
    fs::write(out.join("images.rs"), images(&units, &table, &out)).expect("OUT_DIR is writable");
    println!("cargo:rustc-env=OXMOE_COMPILED_ARCHS={}", archs.join(";"));
    println!("cargo:rustc-env=OXMOE_NVCC_VERSION={}", nvcc.version);
    println!("cargo:warning=nvcc from {} ({}): {compiled} of {} units compiled", nvcc.from, nvcc.version, units.len());
}

/// Sets OXMOE_BUILT_FROM to the commit, with "-dirty" if files differ from it. The commit comes from the environment's OXMOE_COMMIT, or in
/// a release build from the git checkout. Other builds do not set it, so that work on the sources compiles nothing twice.
fn write_commit() {
    println!("cargo:rerun-if-env-changed=OXMOE_COMMIT");
    let release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let given = env::var("OXMOE_COMMIT").ok().filter(|commit| !commit.is_empty());
    if let Some(commit) = given.or_else(|| if release { commit_here() } else { None }) {
        println!("cargo:rustc-env=OXMOE_BUILT_FROM={commit}");
    }
}

/// The checked-out commit, if this folder is the root of a git checkout. cargo then watches the files that change the answer.
fn commit_here() -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    // The sources of a release may lie in somebody else's repository.
    if !git(&["rev-parse", "--show-prefix"])?.is_empty() {
        return None;
    }
    let commit = git(&["rev-parse", "HEAD"])?;
    let changed = git(&[&["status", "--porcelain", "--"], &SOURCES[..]].concat())?;
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    // The files are watched one by one, because Python writes caches into its folders.
    let files = git(&[&["ls-files", "--"], &SOURCES[..]].concat())?;
    for path in files.lines().chain([log.as_str()]).filter(|path| Path::new(path).exists()) {
        println!("cargo:rerun-if-changed={path}");
    }
    Some(if changed.is_empty() { commit } else { commit + "-dirty" })
}

/// Writes each docstring of the stub to a file of its name: "_oxmoe" (the module), "moe", "ExpertWeights", "ExpertWeights.bf16".
fn write_help(folder: &Path) {
    let stub = fs::read_to_string(STUB).unwrap_or_else(|e| panic!("{STUB}: {e}"));
    fs::create_dir_all(folder).expect("OUT_DIR is writable");
    let mut lines = stub.lines();
    // Names that a docstring may belong to: (column, name), outer ones first.
    let mut owners = vec![(0, "_oxmoe")];
    let mut may_begin = true;
    while let Some(line) = lines.next() {
        let text = line.trim_start();
        let column = line.len() - text.len();
        let words = text.strip_prefix("def ").or_else(|| text.strip_prefix("class "));
        if let Some(name) = words.and_then(|words| words.split(['(', ':']).next()) {
            owners.retain(|&(outer, name)| outer < column && name != "_oxmoe");
            owners.push((column, name));
        }
        if let Some(first) = text.strip_prefix("\"\"\"").filter(|_| may_begin) {
            let mut doc = first.to_string();
            while !doc.ends_with("\"\"\"") {
                let line = lines.next().unwrap_or_else(|| panic!("{STUB}: a docstring has no end: {first}"));
                // The margin of the quotes is cut from each line, as inspect.cleandoc does.
                doc += "\n";
                doc += line.get(column..).unwrap_or_default();
            }
            let name: Vec<&str> = owners.iter().map(|&(_, name)| name).collect();
            let doc = doc.trim_end_matches("\"\"\"").trim_end();
            fs::write(folder.join(name.join(".")), doc).expect("OUT_DIR is writable");
        }
        may_begin = text.ends_with(':');
    }
}

/// The units, with a stub for each variant: (units, [(variant, symbol, index of its unit)]).
fn write_units(archs: &[String]) -> (Vec<Unit>, Vec<(variants::Variant, String, usize)>) {
    let mut groups: BTreeMap<String, Vec<variants::Variant>> = BTreeMap::new();
    for variant in variants::all() {
        groups.entry(variant.unit()).or_default().push(variant);
    }
    let (mut units, mut table) = (Vec::new(), Vec::new());
    for (name, members) in groups {
        let archs: Vec<String> = archs.iter().filter(|a| members[0].runs_on(a)).cloned().collect();
        if archs.is_empty() {
            continue;
        }
        let headers: BTreeSet<&str> = members.iter().flat_map(variants::Variant::headers).collect();
        let mut source: String = headers.iter().map(|header| format!("#include \"{header}\"\n")).collect();
        for variant in members {
            let (parameters, arguments) = variant.signature();
            let (kernel, symbol) = (variant.device_type(), variant.symbol());
            let _ = writeln!(source, "\nusing {symbol}_t = {kernel};");
            // Routing kernels take the threads and shared memory of their launch; for all others host and device must agree.
            if let Some(bytes) = variant.least_shared_bytes() {
                let threads = variant.threads();
                let _ = writeln!(
                    source,
                    "static_assert({symbol}_t::kThreads == {threads} && {symbol}_t::kSharedBytes == {bytes}, \"variants.rs\");"
                );
            }
            let _ = write!(
                source,
                "extern \"C\" __global__ void __launch_bounds__({threads}, {ctas}) {symbol}({parameters}) {{\n    {symbol}_t::run({arguments});\n}}\n",
                threads = variant.threads(),
                ctas = variant.ctas_per_multiprocessor()
            );
            table.push((variant, symbol, units.len()));
        }
        units.push(Unit { name, archs, source });
    }
    // The host finds a kernel among those of its family.
    table.sort_by_key(|(variant, ..): &(variants::Variant, String, usize)| variant.family);
    (units, table)
}

struct Nvcc {
    path: PathBuf,
    from: &'static str,
    version: String,
}

impl Nvcc {
    fn none() -> Nvcc {
        Nvcc { path: PathBuf::new(), from: "nowhere", version: "not used".into() }
    }

    /// Finds nvcc: the one that OXMOE_NVCC names, or that of the build environment's wheels, of a toolkit, or of PATH. PATH itself is not
    /// watched, because pip's isolated environment changes it at every build.
    fn find() -> Nvcc {
        let (path, from) = Self::candidates();
        let version = Command::new(&path).arg("--version").output().ok().filter(|o| o.status.success()).unwrap_or_else(|| {
            panic!(
                "no CUDA compiler: tried {} ({from}). Build with isolation (plain `pip install .`), or set CUDA_HOME or OXMOE_NVCC.",
                path.display()
            )
        });
        let version = String::from_utf8_lossy(&version.stdout);
        let version = version.lines().find_map(|l| l.split("release ").nth(1)).unwrap_or("unknown").trim().to_string();
        Nvcc { path, from, version }
    }

    fn candidates() -> (PathBuf, &'static str) {
        if let Some(path) = env::var_os("OXMOE_NVCC") {
            return (path.into(), "OXMOE_NVCC");
        }
        // maturin sets PYO3_PYTHON to the interpreter that runs the (isolated) build.
        let python = env::var_os("PYO3_PYTHON").unwrap_or_else(|| "python3".into());
        let probe = "import glob, nvidia\nfor root in nvidia.__path__:\n  for path in sorted(glob.glob(root + '/cu1*/bin/nvcc'))[::-1]: print(path)";
        if let Ok(output) = Command::new(python).args(["-c", probe]).output() {
            if let Some(path) = String::from_utf8_lossy(&output.stdout).lines().next() {
                return (path.into(), "Python wheels");
            }
        }
        for name in ["CUDA_HOME", "CUDA_PATH"] {
            if let Some(path) = env::var_os(name).map(|home| Path::new(&home).join("bin/nvcc")).filter(|p| p.exists()) {
                return (path, name);
            }
        }
        ("nvcc".into(), "PATH")
    }
}

/// Adds the headers that `source` includes by quotes, directly or not. They lie beside the file that names them, or in `folders`.
fn headers(source: &str, beside: &Path, folders: &[PathBuf], found: &mut BTreeSet<PathBuf>) {
    for name in source.lines().filter_map(|line| line.trim().strip_prefix("#include \"")?.split('"').next()) {
        let places = std::iter::once(beside).chain(folders.iter().map(PathBuf::as_path));
        let Some(path) = places.filter_map(|folder| folder.join(name).canonicalize().ok()).next() else { continue };
        if found.insert(path.clone()) {
            let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            headers(&text, path.parent().unwrap_or(beside), folders, found);
        }
    }
}

/// Compiles every unit that is not in the cache, and returns their number.
fn compile(nvcc: &Nvcc, units: &[Unit], out: &Path) -> usize {
    let include = out.join("cxxbridge/include");
    let mut flags = vec!["-fatbin", "-O3", "-std=c++17", "--compress-mode=size", "-Werror", "all-warnings"];
    flags.extend(["-allow-unsupported-compiler", "-Icsrc"]);
    // Line numbers for profilers take more than half of an image, and show the paths of this machine.
    if env::var("OXMOE_LINEINFO").is_ok_and(|value| value == "1") {
        flags.push("-lineinfo");
    }
    let mut base = DefaultHasher::new();
    (&nvcc.version, &flags).hash(&mut base);
    let folders = [PathBuf::from("csrc"), include.clone()];
    let cache = env::var_os("OXMOE_KERNEL_CACHE").map_or_else(|| out.join("kernels"), PathBuf::from);
    fs::create_dir_all(&cache).expect("the kernel cache folder can be made");

    let (next, compiled) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let failed = Mutex::new(None);
    let jobs: usize = env::var("NUM_JOBS").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    let work = || {
        while let Some(unit) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut hash = base.clone();
            (&unit.source, &unit.archs).hash(&mut hash);
            let mut used = BTreeSet::new();
            headers(&unit.source, out, &folders, &mut used);
            for path in &used {
                fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).hash(&mut hash);
            }
            let kept = cache.join(format!("{}-{:016x}.fatbin", unit.name, hash.finish()));
            if !kept.exists() {
                let stub = out.join(format!("{}.cu", unit.name));
                fs::write(&stub, &unit.source).expect("OUT_DIR is writable");
                // The process id keeps two builds that share a cache apart until the rename, which is atomic.
                let partial =
                    cache.join(format!("{}-{:016x}.{}.partial", unit.name, hash.finish(), std::process::id()));
                let mut command = Command::new(&nvcc.path);
                command.args(&flags).arg("-I").arg(&include).arg("-o").arg(&partial).arg(&stub);
                command.args(unit.archs.iter().map(|a| format!("-gencode=arch=compute_{a},code=sm_{a}")));
                let output = command.output().unwrap_or_else(|e| panic!("{}: {e}", nvcc.path.display()));
                let text =
                    String::from_utf8_lossy(&output.stdout).to_string() + &String::from_utf8_lossy(&output.stderr);
                if !output.status.success() || SERIALIZED.iter().any(|code| text.contains(code)) {
                    *failed.lock().expect("no thread panics while it holds this") =
                        Some(format!("nvcc on {}:\n{text}", stub.display()));
                    return;
                }
                fs::rename(&partial, &kept).expect("the kernel cache is writable");
                compiled.fetch_add(1, Ordering::Relaxed);
            }
            fs::copy(&kept, out.join(format!("{}.fatbin", unit.name))).expect("OUT_DIR is writable");
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, units.len().max(1)) {
            scope.spawn(work);
        }
    });
    if let Some(text) = failed.into_inner().expect("no thread panicked") {
        panic!("{text}");
    }
    compiled.into_inner()
}

/// The Rust side of the kernels: embedded images and the table of symbols.
fn images(units: &[Unit], table: &[(variants::Variant, String, usize)], out: &Path) -> String {
    let mut text = String::from(
        "#[allow(unused_imports)]\nuse crate::variants::{Element::*, Family::*, Form::*, Variant, Work::*};\n\n",
    );
    for (i, unit) in units.iter().enumerate() {
        let path = out.join(format!("{}.fatbin", unit.name));
        let _ = writeln!(text, "static IMAGE_{i}: &Image<[u8]> = &Image(*include_bytes!({path:?}));");
    }
    let _ = writeln!(text, "pub static IMAGES: [&[u8]; {}] = [", units.len());
    for i in 0..units.len() {
        let _ = writeln!(text, "    &IMAGE_{i}.0,");
    }
    let _ = writeln!(text, "];\n\npub static KERNELS: [Compiled; {}] = [", table.len());
    for (variant, symbol, unit) in table {
        let archs = &units[*unit].archs;
        let _ = writeln!(
            text,
            "    Compiled {{ variant: {variant:?}, symbol: {symbol:?}, image: {unit}, archs: &{archs:?} }},"
        );
    }
    text.push_str("];\n");
    text
}
