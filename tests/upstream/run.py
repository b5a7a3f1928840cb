"""Runs flashinfer's own tests of the calls that oxmoe has, on oxmoe, and prints the counts of each file.

usage: run.py CHECKOUT [--on-cpu] [--out FOLDER] [FILE ...] [-- PYTEST_ARGUMENT ...]

CHECKOUT is a clone of flashinfer; nothing of it is copied. Each file is a pytest process of its own. With FILE, only
those of the list whose path contains it. --on-cpu: tensors are made on the CPU, where no file of the all-reduce runs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
# Test files that are about calls of oxmoe's, and what pytest is told beside their paths. Files of a multi-rank launcher
# get the number of processes.
FILES: dict[str, tuple[str, ...]] = {
    "tests/moe/test_trtllm_cutlass_fused_moe.py": (),
    "tests/moe/test_dpsk_fused_moe_fp8.py": (),
    "tests/moe/test_trtllm_gen_routed_fused_moe.py": (),
    "tests/moe/test_trtllm_gen_fused_moe.py": (),
    "tests/moe/test_trtllm_gen_fused_moe_routing_renormalize_fp8.py": (),
    "tests/moe/test_cute_dsl_fused_moe.py": (),
    "tests/moe/test_monomoe.py": (),
    "tests/gemm/test_mm_mxfp8.py": (),
    "tests/utils/test_fp4_quantize.py": (),
    "tests/utils/test_fp4_quantize_padding.py": (),
    "tests/utils/test_fp8_quantize.py": (),
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
COUNTS = re.compile(r"^upstream: (.*)$", re.M)


def environment(checkout: Path) -> dict[str, str]:
    paths = [HERE / "stand_in", HERE, checkout]
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*map(str, paths), *([before] if before else [])])
    # Options of a pytest around this one are not those of the checkout's.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return own | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def run(checkout: Path, file: str, ranks: int, arguments: list[str], log: Path) -> Counter[str]:
    """Counts of one file; of one with ranks those of rank 0, and failures of any."""
    command = [sys.executable, "-m", "pytest", "-p", "upstream_plugin", "-p", "no:cacheprovider", "-q", "-rfEs"]
    command += ["--import-mode=importlib", "--tb=short", file, *arguments]
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank{rank}.log" for rank in range(ranks)]
        for rank, output in enumerate(outputs):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": "29731"}
            of_rank["MASTER_ADDR"] = "127.0.0.1"
            env = environment(checkout) | (of_rank if ranks > 1 else {})
            with output.open("w") as stream:
                processes.append(subprocess.Popen(command, cwd=checkout, env=env, stdout=stream, stderr=stream))
        codes = [process.wait() for process in processes]
        log.write_text("".join(output.read_text(errors="replace") for output in outputs))
        first = outputs[0].read_text(errors="replace")
    found = COUNTS.search(first)
    counts: Counter[str] = Counter()
    for part in found.group(1).split(", ") if found else ():
        number, _, name = part.partition(" ")
        counts[name] = int(number)
    if not counts["error"] and (not found or any(code not in (0, 1, 5) for code in codes)):
        counts["error"] += 1
    if any(codes) and not (counts["failed"] or counts["error"]) and codes != [5] * ranks:
        counts["failed"] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--on-cpu", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("target/upstream"), help="folder of the logs")
    own = sys.argv[1:]
    extra = own[own.index("--") + 1 :] if "--" in own else []
    given = parser.parse_intermixed_args(own[: own.index("--")] if "--" in own else own)
    checkout = given.checkout.resolve()
    if not (checkout / "tests" / "conftest.py").is_file():
        parser.error(f"{checkout}: expected a checkout of flashinfer with its tests/")
    gpus = torch.cuda.device_count()
    given.out.mkdir(parents=True, exist_ok=True)
    total: Counter[str] = Counter()
    for file, needs in FILES.items():
        comm = file.startswith("tests/comm/")
        if given.files and not any(part in file for part in given.files):
            continue
        if not (checkout / file).is_file() or (comm and (given.on_cpu or gpus < 2)):
            why = "needs two GPUs" if comm and (checkout / file).is_file() else "is not in this checkout"
            print(f"{file}: {why}", flush=True)
            continue
        ranks = min(gpus, 2) if "ranks" in needs else 1
        arguments = extra + (["--on-cpu"] if given.on_cpu else [])
        start = time.monotonic()
        counts = run(checkout, file, ranks, arguments, given.out / f"{Path(file).stem}.log")
        total += counts
        words = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
        print(f"{file}: {words or 'nothing ran'} in {time.monotonic() - start:.0f} s", flush=True)
    print("all: " + ", ".join(f"{number} {name}" for name, number in total.items() if number))
    return 1 if total["failed"] or total["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
