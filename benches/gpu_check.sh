#!/usr/bin/env bash
# Everything that needs a GPU, in one call, on an installed package: benches/gpu_check.sh OUT [PART...]
#
#   tests     GPU tests, and those of the kernels for any GPU
#   sanitize  memcheck and racecheck of small layers of every format
#   layers    times of routed fp8 layers, also on the kernels for any GPU
#   rows      times of rows in expert order
#   dense     times of dense MXFP8 and of NVFP4's quantiser
#   multi     tests, times and reliability between all GPUs (NVLink multicast stays off)
#
# Default: tests sanitize layers rows dense. OUT gets a log for each step, JSON lines and summary.txt. Environment: LIMIT, seconds a step
# (600);
# JOBS, test processes if pytest-xdist is installed (8); PEERS of the benches (none); PYTHON. To run parts beside each other, make a call
# for
# each, with CUDA_VISIBLE_DEVICES.
set -uo pipefail
out=$(realpath -m "${1:?OUT is needed}")
shift
[ $# -gt 0 ] || set -- tests sanitize layers rows dense
mkdir -p "$out"
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-python3} peers=${PEERS:-none} failed=0
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 PYTHONDONTWRITEBYTECODE=1

step() { # NAME COMMAND...
    local name=$1 status=0 start=$SECONDS
    shift
    timeout "${LIMIT:-600}" "$@" >"$out/$name.log" 2>&1 || status=$?
    [ "$status" -eq 0 ] || failed=1
    printf '%s: exit %s after %s s: %s\n' "$name" "$status" $((SECONDS - start)) "$(tail -n 1 "$out/$name.log")" | tee -a "$out/summary.txt"
}

jobs=()
if "$python" -c 'import xdist' 2>/dev/null; then jobs=(-n "${JOBS:-8}"); fi
pytest=("$python" -m pytest -p no:cacheprovider -q)
bench=("$python" -m oxmoe bench --layers 2 --peers "$peers")
few='twice or few or small or tokens0 or edges'

for part; do
    case $part in
    tests)
        step tests "${pytest[@]}" "${jobs[@]}" -m 'gpu and not multi_gpu'
        step portable env OXMOE_PORTABLE=1 "${pytest[@]}" "${jobs[@]}" -m gpu tests/core/test_moe.py tests/formats/test_mxfp4.py tests/gpu/test_e4m3_portable_gpu.py
        ;;
    sanitize)
        for tool in memcheck racecheck; do
            step "$tool" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 \
                "${pytest[@]}" -m gpu -k "$few" tests/gpu/test_nvfp4_gpu.py tests/core/test_masked.py tests/kernels/test_mm_mxfp8_few.py \
                tests/formats/test_fp8_few.py tests/formats/test_fp8.py
        done
        ;;
    layers)
        step layers "${bench[@]}" --format fp8_block --shapes dsv3-tp8,qwen3-30b-a3b,dsv3-ep8 --tokens 64,1024,4096,16384 --json "$out/layers.jsonl"
        step layers-few "${bench[@]}" --format fp8_block --shapes dsv3-tp8,qwen3-30b-a3b --tokens 1,4,16 --json "$out/layers.jsonl"
        step layers-portable env OXMOE_PORTABLE=1 "${bench[@]}" --format fp8_block,mxfp8 --shapes qwen3-30b-a3b --tokens 1,16,64,4096 --json "$out/layers.jsonl"
        step layers-grouped "${bench[@]}" --format fp8_block --shapes dsv3-tp8 --tokens 1,2,4 --pattern grouped --json "$out/layers.jsonl"
        ;;
    rows)
        step rows "${bench[@]}" --layout masked --shapes dsv3-ep8 --fill 1,10,100 \
            --format bf16,fp8_block,mxfp4,mxfp8,mxfp4-a8,fp8_tensor,fp8_tensor-token --json "$out/rows.jsonl"
        step rows-fp4 "${bench[@]}" --layout masked --shapes dsv3-ep8 --fill 0.4,1,3,10,100 --format nvfp4,nvfp4-a4,mxfp4 --json "$out/rows.jsonl"
        ;;
    dense)
        step dense "$python" benches/dense_mxfp8.py --json
        step quantise "$python" benches/nvfp4_quantize.py
        ;;
    multi)
        gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
        step multi "${pytest[@]}" -m multi_gpu
        step allreduce "$python" -m oxmoe bench --allreduce "$gpus" --json "$out/allreduce.jsonl"
        step reliability "$python" benches/reliability.py allreduce replays cycles killed --ranks "$gpus" --limit $((${LIMIT:-600} / 4)) \
            --json "$out/reliability.jsonl" --run multi
        ;;
    *)
        echo "unknown part $part" >&2
        exit 2
        ;;
    esac
done
exit "$failed"
