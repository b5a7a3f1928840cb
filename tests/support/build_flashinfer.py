"""Builds the CUDA modules of an installed flashinfer that tests/peers/test_flashinfer_*.py call, without a GPU.

usage: build_flashinfer.py [--jobs N] [--limit SECONDS] [--formats NAME,... [--untuned]] [MODULE ...]

A module lies in flashinfer's data/aot/MODULE/MODULE.so afterwards, where flashinfer loads it from and where the tests
look for it. All modules are one run of ninja, in the order in which they are given. Each is put in place as soon as it
is linked, and one that fails does not keep the others from being built. The objects stay in flashinfer's cache, so a
run that was ended goes on where it was.

fused_moe_90 has hundreds of generated files and takes hours of CPU time. --formats builds those of some formats only.
With --untuned each format has only the kernel that flashinfer takes without its autotuner, which is a few files. A call
of any other kernel throws the exception that flashinfer throws for a tile that a GPU does not support. flashinfer
leaves such a tile out when it sizes its workspace, and the tests skip such a call.

The compiler is nvcc of CUDA_HOME, or else the one on PATH. Headers and libraries that this toolkit lacks are taken from
the CUDA packages that torch depends on.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

# Module -> the file of flashinfer.jit and its function that describe it.
GENERATORS = {
    "dsv3_fused_routing": ("dsv3_optimizations", "gen_dsv3_fused_routing_module"),
    "trtllm_comm": ("comm", "gen_trtllm_comm_module"),
    "monomoe": ("monomoe", "gen_monomoe_module"),
    "fused_moe_90": ("fused_moe", "gen_cutlass_fused_moe_sm90_module"),
}
MODULES = tuple(GENERATORS)
# Format of the tests -> activations and weights of its kernels, in the words of fused_moe_90's file names.
FORMATS = {
    "bf16": ("bf16", "bf16"),
    "f16": ("fp16", "fp16"),
    "fp8_tensor": ("fp8", "fp8"),
    "fp8_block": ("bf16", "fp8"),
    "mxfp4": ("bf16", "fp4"),
}
TYPES = {"__nv_bfloat16": "bf16", "half": "fp16", "__nv_fp8_e4m3": "fp8"}
# flashinfer 0.6.11 has the last of these, and 0.7 the other two.
TYPES |= dict.fromkeys(("SafeFP4", "Fp4Type", "__nv_fp4_e2m1"), "fp4")
# Launchers in generated files are a macro for weights of the activations' type, and a template for others.
OPERANDS = (
    re.compile(r"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM\(\s*Sm90\s*,\s*(\w+)\s*,\s*(\w+)\s*,"),
    re.compile(r"sm90_generic_mixed_moe_gemm_kernelLauncher<\s*(\w+)\s*,\s*([\w:]+)\s*,"),
)
# Tile and schedule of weights of fewer bits that a call takes without autotuning, and those that size its workspace.
UNTUNED = {("64", "16", "128", "Pingpong"), ("128", "64", "256", "Cooperative")}
MIXED = re.compile(r"^template void sm90_generic_mixed_moe_gemm_kernelLauncher<[^;]*;\n", re.MULTILINE)
TILE = re.compile(
    r"cute::Shape<cute::Int<(\d+)>, cute::Int<(\d+)>, cute::Int<(\d+)>>, "
    r"cute::Shape<cute::Int<1>, cute::Int<1>, cute::Int<1>>, cutlass::gemm::KernelTmaWarpSpecialized(\w+),"
)
# A call with weights of the activations' type takes this kernel without autotuning: how it ends, its tile (columns of
# 128 bytes), its cluster, and flags of block scales, dynamic clusters, biases and exchanged operands.
EQUAL = re.compile(r"^ *INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM\(([^;]*)\);\n", re.MULTILINE)
UNTUNED_EQUAL = "NONE,128,16,{columns},1,1,1,false,false,false,false"
# Matches the layer's code, and its GEMMs' code, for one pair of types. flashinfer has all layers in one file, which
# takes longest by far.
RUNNER = re.compile(r"^template class CutlassMoeFCRunner<([^;]*)>;\n", re.MULTILINE)
GEMMS = re.compile(r"^template class MoeGemmRunner<([^;]*)>;\n", re.MULTILINE)
# Kernels for sm_80 and sm_89 that a GEMM of equal types falls back to. Without autotuning a Hopper GPU takes none.
NO_FALLBACK = """namespace tensorrt_llm::kernels::cutlass_kernels_oss {{
template <typename Output, typename arch, cutlass::WeightOnlyQuantOp QuantOp, typename EpilogueTag,
          typename ThreadblockShape, typename WarpShape, int Stages>
struct genericMoeGemmKernelLauncher<{type}, {type}, Output, arch, QuantOp, EpilogueTag, ThreadblockShape, WarpShape,
                                    Stages> {{
  static void call(GroupedGemmInput<{type}, {type}, Output, Output> inputs, int sm_count_) {{
    TLLM_THROW("{message}");
  }}
}};
}}  // namespace tensorrt_llm::kernels::cutlass_kernels_oss
"""
# The exception of a kernel that was left out says this.
NOT_BUILT = "build_flashinfer.py was not asked for this kernel"
# A kernel that was left out is a jump to this function.
THROW = f"""#include "tensorrt_llm/common/tllmException.h"
extern "C" [[noreturn]] void oxmoe_not_built() {{
  throw tensorrt_llm::common::TllmException(__FILE__, __LINE__, "{NOT_BUILT}");
}}
"""
JUMP = {"x86_64": "jmp oxmoe_not_built@PLT", "aarch64": "b oxmoe_not_built"}


class Module(NamedTuple):
    """A module's own ninja file, where it is linked, and where flashinfer looks for it."""

    name: str
    ninja: Path
    linked: Path
    place: Path


def cuda_home() -> Path:
    if home := os.environ.get("CUDA_HOME"):
        return Path(home)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        sys.exit("no nvcc: expected CUDA_HOME, or nvcc on PATH")
    return Path(nvcc).resolve().parent.parent


def torch_cuda() -> Iterator[Path]:
    """Yields folders of the CUDA packages that torch depends on, which have include/ and lib/."""
    spec = find_spec("nvidia")
    for parent in spec.submodule_search_locations or [] if spec else []:
        yield from (folder for folder in Path(parent).iterdir() if (folder / "include").is_dir())


def library(name: str, folders: list[Path]) -> Path | None:
    """Returns lib*.so of a library, or its file that has a version."""
    for folder in folders:
        for found in (*folder.glob(f"lib{name}.so"), *sorted(folder.glob(f"lib{name}.so.*"))):
            return found
    return None


def complete(home: Path, links: Path) -> None:
    """Tells flashinfer of headers and libraries that its toolkit may lack; `links` is a folder for links to these."""
    links.mkdir(parents=True, exist_ok=True)
    others = list(torch_cuda())
    toolkit = [home / "lib64", home / "lib64" / "stubs", home / "lib"]
    libraries = [f"-L{links}"]
    for name in ("cudart", "nvrtc"):
        found = library(name, [*toolkit, *(folder / "lib" for folder in others)])
        if found is None:
            sys.exit(f"lib{name}.so: expected in {home / 'lib64'} or in a CUDA package of torch, got neither")
        link = links / f"lib{name}.so"
        link.unlink(missing_ok=True)
        link.symlink_to(found)
        # A process that has not loaded this library finds it where it was when the module was linked.
        libraries.append(f"-Wl,-rpath,{found.resolve().parent}")
    if library("cuda", toolkit) is None:
        # The driver's library is loaded before the module, so its names need no file when they are linked.
        command = ["g++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(links / "libcuda.so"), "-x", "c"]
        subprocess.run([*command, "/dev/null"], check=True)
    include = " ".join(f"-isystem {folder / 'include'}" for folder in others)
    for variable, more in (
        ("FLASHINFER_EXTRA_CFLAGS", include), ("FLASHINFER_EXTRA_CUDAFLAGS", include),
        ("FLASHINFER_EXTRA_LDFLAGS", " ".join(libraries)),
    ):  # fmt: skip
        os.environ[variable] = f"{os.environ.get(variable, '')} {more}".strip()


def generator(name: str) -> Callable[[], Any]:
    """Returns flashinfer's function that describes a module."""
    from flashinfer import jit

    file, function = GENERATORS[name]
    if find_spec(f"{jit.__name__}.{file}") is None:
        sys.exit(f"{name}: expected a flashinfer that has jit.{file}, got {metadata.version('flashinfer-python')}")
    made: Callable[[], Any] = getattr(import_module(f"{jit.__name__}.{file}"), function)
    return made


def has_operands(text: str, formats: set[tuple[str, str]]) -> bool:
    """Whether generated code has a kernel of the formats."""
    pairs = (pair for pattern in OPERANDS for pair in pattern.findall(text))
    return any((TYPES.get(activations), TYPES.get(weights)) in formats for activations, weights in pairs)


def needed(source: Path, formats: set[tuple[str, str]]) -> bool:
    """Whether a source of fused_moe_90 has a kernel of the formats, or code of all formats."""
    if runner := re.fullmatch(r"moe_gemm_kernels_(\w+)_(\w+)", source.stem):
        return runner.groups() in formats
    if not source.name.endswith(".generated.cu"):
        return True
    return "_sm80_" in source.name or has_operands(source.read_text(), formats)


def types(arguments: str) -> tuple[str | None, str | None]:
    """Returns activations and weights of a template's arguments, in the words of fused_moe_90's file names."""
    first, second = (word.strip() for word in arguments.split(",")[:2])
    return TYPES.get(first), TYPES.get(second)


def untuned_runner(arguments: str) -> bool:
    """Whether a runner has the output that the tests ask for and no block scales: f16 for f16, bf16 for all others."""
    words = [word.strip() for word in arguments.split(",")]
    output = words[2] if len(words) > 2 else words[0]
    return output == ("half" if words[0] == "half" else "__nv_bfloat16") and "true" not in words


def untuned_kernel(arguments: str) -> bool:
    """Whether a kernel of equal types is the one that a call takes without autotuning."""
    words = [word.strip() for word in arguments.split(",")]
    columns = 128 if words[1] == "__nv_fp8_e4m3" else 64
    return untuned_runner(",".join(words[1:4])) and ",".join(words[6:]) == UNTUNED_EQUAL.format(columns=columns)


def one_each(
    source: Path,
    pattern: re.Pattern[str],
    wanted: Callable[[re.Match[str]], bool],
    stem: Path,
    head: Callable[[re.Match[str]], str] = lambda match: "",
) -> list[Path]:
    """Returns files that are a source with one of the pattern's matches each, for the matches that are wanted.

    `head` gives text that a match needs after the source's first #include.
    """
    text = source.read_text()
    made = []
    for index, match in enumerate(match for match in pattern.finditer(text) if wanted(match)):
        before, after = (pattern.sub("", part) for part in (text[: match.start()], text[match.end() :]))
        if index > 0:
            # Definitions that all files share stay in the first one only.
            after = re.sub(r"^INSTANTIATE_FINALIZE_MOE_ROUTING.*\n", "", after, flags=re.MULTILINE)
        file = stem.with_name(f"{stem.name}_{index}.cu")
        include = re.search(r"^#include .*\n", before, flags=re.MULTILINE)
        start = include.end() if include else 0
        own = before[:start] + head(match) + before[start:] + match[0] + after
        # ninja compiles again every file that is newer than its object.
        if not file.exists() or file.read_text() != own:
            file.write_text(own)
        made.append(file)
    return made


def no_fallback(match: re.Match[str]) -> str:
    """Returns code after which a runner of equal types has no kernels for older GPUs."""
    first, second = (word.strip() for word in match[1].split(",")[:2])
    return NO_FALLBACK.format(type=first, message=NOT_BUILT) if first == second else ""


def split(spec: Any, formats: set[tuple[str, str]], untuned: bool, folder: Path) -> None:
    """Replaces files of fused_moe_90 that take longest by a file for each part of the formats: the layer's code, and
    without autotuning the GEMMs' code and the kernels."""
    folder.mkdir(parents=True, exist_ok=True)
    made, others = [], []
    for source in map(Path, spec.sources):
        if source.stem == "cutlass_fused_moe_instantiation":
            made += one_each(
                source, RUNNER,
                lambda match: types(match[1]) in formats and (not untuned or untuned_runner(match[1])),
                folder / "runner",
            )  # fmt: skip
            spec.extra_include_dirs = [*(spec.extra_include_dirs or []), source.parent]
        elif untuned and source.stem.startswith("moe_gemm_kernels_"):
            if needed(source, formats):
                made += one_each(
                    source, GEMMS, lambda match: untuned_runner(match[1]),
                    folder / source.stem.replace("moe_gemm_kernels", "gemms"), no_fallback,
                )  # fmt: skip
                spec.extra_include_dirs = [*(spec.extra_include_dirs or []), source.parent]
        elif untuned and "_Mixed_" in source.name:
            made += one_each(
                source, MIXED,
                lambda match: has_operands(match[0], formats) and bool(UNTUNED & set(TILE.findall(match[0]))),
                folder / source.name.partition(".")[0],
            )  # fmt: skip
        elif untuned and source.name.endswith(".generated.cu"):
            made += one_each(
                source, EQUAL,
                lambda match: has_operands(match[0], formats) and untuned_kernel(match[1]),
                folder / source.name.partition(".")[0],
            )  # fmt: skip
        else:
            others.append(source)
    if not made:
        sys.exit(f"fused_moe_90: expected a file of its runners for {formats}, got none")
    throws = folder / "not_built.cpp"
    if not throws.exists():
        throws.write_text(THROW)
    spec.sources[:] = [*made, *others, throws]


def partial(module: Module, formats: list[str], untuned: bool = False) -> Module:
    """Returns fused_moe_90 of some formats: a ninja file beside the module's own that links fewer objects."""
    pairs = {FORMATS[name] for name in formats}
    text = re.sub(r" *\$\n *", " ", module.ninja.read_text())
    edges = re.findall(r"^build (\S+): \w*compile (\S+)$", text, re.MULTILINE)
    kept = [out for out, source in edges if needed(Path(source), pairs)]
    if not edges or (len(kept) == len(edges) and not untuned):
        sys.exit(f"{module.ninja}: expected generated files of more formats than {','.join(formats)}")
    linked = module.linked.with_name(f"{module.name}_{'_'.join(formats)}{'_untuned' * untuned}.so")
    start = text.index(f"build {module.linked}: ")
    own = f"rule link_without\n  command = {sys.executable} {Path(__file__).resolve()} --link $out $in $ldflags\n\n"
    ninja = module.ninja.with_name("partial.ninja")
    ninja.write_text(f"{text[:start]}{own}build {linked}: link_without {' '.join(kept)}\ndefault {linked}\n")
    print(f"{module.name}: {len(kept)} of {len(edges)} files, for {', '.join(formats)}", flush=True)
    return module._replace(ninja=ninja, linked=linked)


def link(out: Path, arguments: list[str]) -> None:
    """Links a module without some of its kernels; a call of one of these throws."""
    # The files that the layer's code was split into have common definitions, each with the same text.
    command = ["g++", *arguments, "-Wl,--unresolved-symbols=ignore-all", "-Wl,--allow-multiple-definition"]
    with tempfile.TemporaryDirectory() as folder:
        first, source = Path(folder) / "first.so", Path(folder) / "not_built.s"
        subprocess.run([*command, "-o", str(first)], check=True)
        listed = subprocess.run(["nm", "-uD", str(first)], check=True, capture_output=True, text=True).stdout
        names = {word.partition("@")[0] for line in listed.splitlines() for word in line.split()[-1:]}
        missing = sorted(name for name in names if "tensorrt_llm" in name or "cutlass" in name)
        if data := [name for name in missing if name.startswith("_ZT")]:
            sys.exit(f"{out.name}: expected that functions alone are left out, got {' '.join(data)}")
        jump = JUMP[os.uname().machine]
        lines = [f".globl {name}\n.type {name},%function\n{name}: {jump}\n" for name in missing]
        source.write_text(".text\n" + "".join(lines) + '.section .note.GNU-stack,"",%progbits\n')
        subprocess.run([*command, str(source), "-o", str(out)], check=True)
    print(f"{out.name}: {len(missing)} functions of kernels were left out", flush=True)


def build(modules: list[Module], jobs: int, limit: float | None, folder: Path) -> int:
    lines = ["rule put", "  command = cp $in $out.part && mv $out.part $out", ""]
    for module in modules:
        module.place.parent.mkdir(parents=True, exist_ok=True)
        lines += [f"subninja {module.ninja}", f"build {module.place}: put {module.linked}"]
    lines += ["default " + " ".join(str(module.place) for module in modules), ""]
    file = folder / "oxmoe.ninja"
    file.write_text("\n".join(lines))
    command = ["ninja", "-C", str(folder), "-f", str(file), "-j", str(jobs), "-k", "0"]
    with subprocess.Popen(command) as ninja:
        try:
            return ninja.wait(limit)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            # ninja ends its compilers and removes what they had not finished.
            ninja.send_signal(signal.SIGINT)
            return ninja.wait()


def seconds(log: Path) -> dict[str, tuple[float, float]]:
    """Returns start and end of each output of ninja, as its log has them."""
    rows = [line.split("\t") for line in log.read_text().splitlines()[1:]]
    return {row[3]: (int(row[0]) / 1000, int(row[1]) / 1000) for row in rows if len(row) == 5}


def report(modules: list[Module], folder: Path) -> None:
    """Prints seconds of each module: of its files together, and from the start of the run to its end; and the slowest
    files."""
    log = folder / ".ninja_log"
    times = seconds(log) if log.exists() else {}
    for module in modules:
        own = {out: took for out, took in times.items() if Path(out).parent == module.linked.parent}
        total = sum(end - start for start, end in own.values())
        state = f"in place after {times[str(module.place)][1]:.0f} s" if str(module.place) in times else "not built"
        print(f"{module.name}: {state}; {len(own)} files took {total:.0f} s together")
        for out, (start, end) in sorted(own.items(), key=lambda item: item[1][0] - item[1][1])[:3]:
            print(f"  {end - start:6.1f} s {Path(out).name}")


def main() -> int:
    if sys.argv[1:2] == ["--link"]:
        link(Path(sys.argv[2]), sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"default: {' '.join(MODULES)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="files compiled at a time")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="ends the run, which a later one goes on with")
    parser.add_argument("--formats", help=f"of fused_moe_90, comma-separated: {','.join(FORMATS)}")
    parser.add_argument("--untuned", action="store_true", help="of --formats: one kernel each")
    given = parser.parse_args()
    formats = given.formats.split(",") if given.formats else []
    for words, known in ((given.modules, MODULES), (formats, FORMATS)):
        if unknown := [word for word in words if word not in known]:
            parser.error(f"{unknown[0]}: expected one of {', '.join(known)}")
    if given.untuned and not formats:
        parser.error("--untuned: expected --formats beside it")
    if shutil.which("ninja") is None:
        parser.error("ninja is not on PATH (pip install ninja)")
    if find_spec("flashinfer") is None:
        parser.error("flashinfer is not installed (pip install flashinfer-python)")
    # flashinfer reads these variables when it is imported.
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    home = cuda_home()
    os.environ["CUDA_HOME"] = str(home)
    import flashinfer
    from flashinfer.jit import env

    folder = Path(env.FLASHINFER_JIT_DIR)
    complete(home, folder / "oxmoe_links")
    modules = []
    for name in given.modules or MODULES:
        spec = generator(name)()
        some = formats if name == "fused_moe_90" else []
        # The layer's code is compiled before the GEMMs, because a file of it takes longer.
        spec.sources.sort(key=lambda source: not Path(source).stem.endswith("_instantiation"))
        if some:
            pairs = {FORMATS[word] for word in some}
            split(spec, pairs, given.untuned, Path(env.FLASHINFER_GEN_SRC_DIR) / "oxmoe")
        spec.write_ninja()
        linked = Path(spec.jit_library_path).resolve()
        place = Path(env.FLASHINFER_AOT_DIR) / spec.name / f"{spec.name}.so"
        module = Module(name, Path(spec.ninja_path), linked, place)
        modules.append(partial(module, some, given.untuned) if some else module)
    print(f"flashinfer {flashinfer.__version__}, {home}, {given.jobs} files at a time", flush=True)
    start = time.monotonic()
    code = build(modules, given.jobs, given.limit, folder)
    report(modules, folder)
    print(f"{'done' if code == 0 else 'not all were built'} in {time.monotonic() - start:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
