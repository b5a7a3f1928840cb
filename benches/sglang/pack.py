"""pack.py OUT: packs SGLang and what it needs into one archive, for a machine with a GPU and without a network.

    python benches/sglang/pack.py sglang.tar.xz --python 3.12 --there installed.txt --marlin bf16 bf16-bias
    mkdir site && tar -C site -xJf sglang.tar.xz && PYTHONPATH=site SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1 python ...

The archive has the packages of tests/requirements-sglang.txt and sglang-kernel, as wheels of that Python unpack them,
without the packages that the other machine has (--there: a file with a name in each line, as `pip list
--format=freeze` prints them). Large files that no server of serve.py reads are left out (LEFT_OUT), which makes 30 MiB
of 360. torch, Triton and numpy are the other machine's.

SGLang compiles Marlin's kernels at the first call, for four minutes and more. --marlin compiles them here, with the
nvcc in CUDA_HOME, ninja and the SGLang that is installed here, and the packed copy of SGLang loads them. Layers of
MXFP4 need those with biases: SGLang gives them biases of zeros.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "tests" / "requirements-sglang.txt"
KERNEL = "sglang-kernel==0.4.2.post2"  # the newest one for torch 2.11
# Wheels say which C library they need at least; pip compares these names exactly.
PLATFORMS = ("1", "2014", *(f"_2_{minor}" for minor in (17, 24, 26, 27, 28, 31, 34, 35)))
# Files that the servers of serve.py and SGLang's tests do without on Hopper.
LEFT_OUT = (
    "sgl_kernel/flash_ops.abi3.so",  # FlashAttention 3: servers run with --attention-backend triton
    "sgl_kernel/flashmla_ops.abi3.so",
    "sgl_kernel/sm100/*",
    "lib/*",  # MSCCL++ of sglang-kernel
    "lib64/*",
    "include/*",
    "_mscclpp*",
    "sglang/multimodal_gen/*",
    "sglang/srt/rust_extensions/*.so",  # servers run without --grpc
    "sglang/test/*/*",
    "*.pyc",
)
# Modules that moe_wna16_marlin.py of SGLang 0.5.23 compiles for a layer of a dtype, with and without biases, one for
# each GEMM: (is_ep, has_bias, expert_ids_are_sorted, zero_inactive_output, has_inactive_prefix_count).
MARLIN = {
    f"{dtype}{'-bias' if bias else ''}": [(dtype, (False, bias, True, last, True)) for last in (False, True)]
    for dtype in ("bf16", "f16")
    for bias in (False, True)
}
MARLIN_FILE = "sglang/kernels/ops/moe/moe_wna16_marlin.py"
MARLIN_HEAD = "    args = make_cpp_args(\n        dtype,\n"
MARLIN_LOADER = """    from pathlib import Path

    flags = (is_ep, has_bias, expert_ids_are_sorted, zero_inactive_output, has_inactive_prefix_count)
    name = "-".join(["marlin", str(dtype).rpartition(".")[2], *(str(int(flag)) for flag in flags)])
    compiled = Path(__file__).with_name(f"{name}.so")
    if compiled.exists():
        from tvm_ffi import load_module

        return load_module(str(compiled))
"""
# Compiles one module for sm_90a without a GPU, and prints where it lies.
COMPILER = """
import sys
import torch
from sglang.kernels.jit.utils import arch
from sglang.kernels.jit.utils.compile import loader
from sglang.kernels.ops.moe import moe_wna16_marlin
arch._init_jit_cuda_arch_once()
arch._CUDA_ARCH = arch.make_jit_cuda_arch(9, 0)
loader._load = lambda library: library
dtype, *flags = sys.argv[1:]
print(moe_wna16_marlin._jit_moe_wna16_marlin_module(getattr(torch, dtype), *(flag == "1" for flag in flags)))
"""
DTYPES = {"bf16": "bfloat16", "f16": "float16"}


def plain(name: str) -> str:
    """Returns a package's name as packaging tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(there: set[str]) -> list[str]:
    """Returns the requirements of packages that the other machine has not."""
    lines = [line.strip() for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines()]
    wanted = [line for line in lines if line and not line.startswith("#")] + [KERNEL]
    return [line for line in wanted if plain(line.partition("==")[0]) not in there]


def download(requirements: list[str], python: str, folder: Path) -> list[Path]:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", f"manylinux{platform}_x86_64"]
    subprocess.run([*command, *requirements], check=True)
    return sorted(folder.glob("*.whl"))


def left_out(path: str) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in LEFT_OUT)


def unpack(wheels: list[Path], site: Path) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                if not left_out(member.filename):
                    archive.extract(member, site)


def compile_marlin(dtype: str, flags: tuple[bool, ...], cache: Path) -> Path:
    """Compiles one module of Marlin's kernels and returns its file."""
    scratch = cache / "-".join([dtype, *(str(int(flag)) for flag in flags)])
    environment = {**os.environ, "SGLANG_JIT_CACHE_DIR": str(scratch)}
    command = [sys.executable, "-c", COMPILER, DTYPES[dtype], *(str(int(flag)) for flag in flags)]
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    (library,) = scratch.rglob("deps-*/*.so")
    return library


def add_marlin(kinds: list[str], site: Path, jobs: int) -> None:
    """Puts compiled modules beside SGLang's file that would compile them, and has it look for them."""
    modules = [module for kind in kinds for module in MARLIN[kind]]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        made = pool.map(lambda module: compile_marlin(*module, Path(folder)), modules)
        for (dtype, flags), library in zip(modules, made, strict=True):
            name = "-".join(["marlin", DTYPES[dtype], *(str(int(flag)) for flag in flags)])
            (site / MARLIN_FILE).with_name(f"{name}.so").write_bytes(library.read_bytes())
    loads_compiled(site / MARLIN_FILE)


def loads_compiled(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    if text.count(MARLIN_HEAD) != 1:
        raise SystemExit(f"{file}: expected the function that compiles Marlin's modules, as in SGLang 0.5.23")
    file.write_text(text.replace(MARLIN_HEAD, MARLIN_LOADER + MARLIN_HEAD), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="archive, .tar.xz")
    parser.add_argument("--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}", help="of the other machine")
    parser.add_argument("--there", type=Path, help="file with the packages that the other machine has, one a line")
    parser.add_argument("--marlin", nargs="*", default=[], choices=MARLIN, metavar="KIND", help=", ".join(MARLIN))
    parser.add_argument("--jobs", type=int, default=2, help="Marlin modules that are compiled at a time")
    given = parser.parse_args()
    lines = given.there.read_text(encoding="utf-8").split("\n") if given.there else []
    there = {plain(re.split(r"[=<>!~;@ ]", line)[0]) for line in lines if line.strip()}
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        unpack(download(needed(there), given.python, Path(folder, "wheels")), site)
        if given.marlin:
            add_marlin(given.marlin, site, given.jobs)
        with tarfile.open(given.out, "w:xz", preset=6) as archive:
            for path in sorted(site.iterdir()):
                archive.add(path, path.name)
    print(f"{given.out}: {given.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
