"""Runs flashinfer's or SGLang's own tests of the calls that oxmoe has, on oxmoe, and prints the counts of each file.

usage: run.py CHECKOUT [--on-cpu] [--out FOLDER] [--limit SECONDS] [FILE ...] [-- PYTEST_ARGUMENT ...]

CHECKOUT is a clone of flashinfer or SGLang; nothing of it is copied. Each file is a pytest process of its own. With
FILE, only files of the list whose path contains it run, in the order in which FILEs are given. --on-cpu: tensors are
made on the CPU, where no file of the all-reduce runs. --limit ends a file after this many seconds, which counts as an
error; outcomes of its tests until then are counted. FOLDER has for each file a log and a .tsv with a line for each
test (outcome, id, reason), both written as the tests run.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
# Test files about calls that oxmoe has, and pytest's arguments beside their paths. Files of a multi-rank launcher get
# the number of processes.
FILES: dict[str, tuple[str, ...]] = {
    "tests/moe/test_trtllm_cutlass_fused_moe.py": (),
    "tests/moe/test_dpsk_fused_moe_fp8.py": (),
    "tests/moe/test_trtllm_gen_routed_fused_moe.py": (),
    "tests/moe/test_trtllm_gen_fused_moe.py": (),
    "tests/moe/test_trtllm_gen_fused_moe_routing_renormalize_bf16.py": (),
    "tests/moe/test_trtllm_gen_fused_moe_routing_renormalize_fp4.py": (),
    "tests/moe/test_trtllm_gen_fused_moe_routing_renormalize_fp8.py": (),
    "tests/moe/test_cute_dsl_fused_moe.py": (),
    "tests/moe/test_monomoe.py": (),
    "tests/moe/test_hash_topk.py": (),
    "tests/model_optimizations/test_dsv3_fused_routing.py": (),
    "tests/gemm/test_mm_mxfp8.py": (),
    "tests/gemm/test_unified_gemm_fuzz.py": (),
    "tests/utils/test_fp4_quantize.py": (),
    "tests/utils/test_fp4_quantize_padding.py": (),
    "tests/utils/test_fp8_quantize.py": (),
    "tests/quantization/test_per_token_group_quant_8bit_cutile.py": (),
    "tests/comm/test_trtllm_allreduce_fusion.py": (),
    "tests/comm/test_trtllm_allreduce_fusion_group_fp8_quant.py": (),
    "tests/comm/test_trtllm_allreduce_dynamic_fp8_quant.py": (),
    "tests/comm/test_trtllm_allreduce_fusion_subgroup.py": (),
    "tests/comm/test_gemma_ar_fusion.py": (),
    "tests/comm/test_allreduce_fusion_moe_unified_api.py": (),
    "tests/comm/test_trtllm_moe_allreduce_fusion.py": (),
    "tests/comm/test_trtllm_moe_allreduce_fusion_finalize.py": (),
    "tests/comm/test_allreduce_unified_api.py": ("ranks",),
    "tests/comm/test_allreduce_negative.py": ("ranks",),
}
# Test files of sgl-kernel, and of SGLang's layers, in a checkout of SGLang. Tests of per-token quantisers compare
# functions of SGLang that do not call sgl_kernel.
SGLANG_FILES: dict[str, tuple[str, ...]] = {
    "sgl-kernel/tests/test_moe_topk_softmax.py": (),
    "sgl-kernel/tests/test_moe_topk_sigmoid.py": (),
    "sgl-kernel/tests/test_moe_fused_gate.py": (),
    "sgl-kernel/tests/test_kimi_k2_moe_fused_gate.py": (),
    "test/registered/cpu/test_topk.py": (),
    "test/registered/cpu/test_moe.py": (),
    "test/registered/moe/test_fused_moe.py": (),
    "test/registered/moe/test_topk_renormalize_degenerate.py": (),
}
# The order of the counts in the output.
KINDS = ("passed", "failed", "error", "not served", "its own skips", "expected")


def is_sglang(checkout: Path) -> bool:
    return any((checkout / folder).is_dir() for folder in ("sgl-kernel/tests", "test/registered"))


def environment(checkout: Path) -> dict[str, str]:
    # The package of SGLang's checkout needs a build, so the installed one is taken.
    folders = [HERE / "stand_in_sglang", HERE] if is_sglang(checkout) else [HERE / "stand_in", HERE, checkout]
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*map(str, folders), *([before] if before else [])])
    # Options of a pytest around this one do not belong to the checkout's.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return own | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def counted(results: Path) -> Counter[str]:
    """Returns how often each outcome stands in a file that upstream_plugin.py writes."""
    lines = results.read_text(errors="replace").splitlines() if results.exists() else []
    return Counter(line.partition("\t")[0] for line in lines)


def run(checkout: Path, file: str, ranks: int, arguments: list[str], out: Path, limit: float | None) -> Counter[str]:
    """Returns the counts of one file. For a file with ranks these are the counts of rank 0, and failures of any
    rank."""
    stem = out.resolve() / Path(file).stem
    command = [sys.executable, "-m", "pytest", "-p", "upstream_plugin", "-p", "no:cacheprovider", "-q", "-rfEs"]
    if is_sglang(checkout):
        command += ["-p", "sglang_served" if file.startswith("test/") else "sgl_kernel_served"]
    command += ["--import-mode=importlib", "--tb=short", f"--rootdir={checkout}", str(checkout / file), *arguments]
    processes = []
    late = False
    # `python -m` puts the folder that it starts in before PYTHONPATH. In the checkout that would bring the checkout's
    # own package before the stand-in, so pytest starts in an empty folder.
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            results = stem.with_suffix(".tsv" if rank == 0 else f".rank{rank}.tsv")
            results.unlink(missing_ok=True)
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": "29731"}
            of_rank["MASTER_ADDR"] = "127.0.0.1"
            env = environment(checkout) | (of_rank if ranks > 1 else {})
            with stem.with_suffix(".log" if rank == 0 else f".rank{rank}.log").open("w") as stream:
                process = subprocess.Popen(
                    [*command, f"--results={results}"], cwd=folder, env=env, stdout=stream, stderr=stream,
                    start_new_session=True,
                )  # fmt: skip
            processes.append(process)
        end = None if limit is None else time.monotonic() + limit
        try:
            for process in processes:
                try:
                    process.wait(None if end is None else max(0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    late = True
                    kill(process)
        finally:
            # This run was ended itself.
            for process in processes:
                if process.poll() is None:
                    kill(process)
    counts = counted(stem.with_suffix(".tsv"))
    codes = [process.returncode for process in processes]
    if not counts["error"] and any(code not in (0, 1, 5) for code in codes):
        counts["error"] += 1
    if any(codes) and not (counts["failed"] or counts["error"]) and codes != [5] * ranks:
        counts["failed"] += 1
    if late:
        print(f"{file}: ended after {limit:.0f} s", flush=True)
    return counts


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a session's processes: pytest, and those that its tests started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def chosen(files: dict[str, tuple[str, ...]], parts: list[str]) -> list[str]:
    """Returns files of the list whose path contains one of the parts, in the order of the parts; all files without
    parts."""
    return list(dict.fromkeys(file for part in parts or [""] for file in files if part in file))


def words(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--on-cpu", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("target/upstream"), help="folder of the logs")
    parser.add_argument("--limit", type=float, help="seconds after which a file's run is ended")
    own = sys.argv[1:]
    extra = own[own.index("--") + 1 :] if "--" in own else []
    given = parser.parse_intermixed_args(own[: own.index("--")] if "--" in own else own)
    checkout = given.checkout.resolve()
    files = SGLANG_FILES if is_sglang(checkout) else FILES
    if files is FILES and not (checkout / "tests" / "conftest.py").is_file():
        parser.error(f"{checkout}: expected a checkout of flashinfer with its tests/, or of SGLang")
    gpus = torch.cuda.device_count()
    given.out.mkdir(parents=True, exist_ok=True)
    total: Counter[str] = Counter()
    for file in chosen(files, given.files):
        comm = file.startswith("tests/comm/")
        if not (checkout / file).is_file() or (comm and (given.on_cpu or gpus < 2)):
            why = "needs two GPUs" if comm and (checkout / file).is_file() else "is not in this checkout"
            print(f"{file}: {why}", flush=True)
            continue
        ranks = min(gpus, 2) if "ranks" in files[file] else 1
        arguments = extra + (["--on-cpu"] if given.on_cpu else [])
        start = time.monotonic()
        counts = run(checkout, file, ranks, arguments, given.out, given.limit)
        total += counts
        print(f"{file}: {words(counts) or 'nothing ran'} in {time.monotonic() - start:.0f} s", flush=True)
    print("all: " + words(total))
    return 1 if total["failed"] or total["error"] else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
