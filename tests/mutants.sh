#!/usr/bin/env bash
# mutants.sh PYTHON EXTENSION [NAME...]: mutmut on the modules named in pyproject.toml ([tool.mutmut]).
# PYTHON has the packages of the tests, EXTENSION is the built module. NAME: patterns of mutants, "oxmoe.rows*"; default: all.
#
# It runs in a folder of its own, target/mutants, where the package lies beside the tests: mutmut knows modules by their paths.
# A mutant's tests run in a process forked from one that ran none: threads of torch and of rayon do not survive a fork.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$1 extension=$(realpath "$2")
shift 2
stage=$root/target/mutants
mkdir -p "$stage"
cd "$stage"
# Results are kept in mutants/: a second run goes on where the first ended.
rm -rf oxmoe tests src csrc docs
cp -r "$root"/python/oxmoe "$root"/{tests,src,csrc,docs,Cargo.toml,README.md,pyproject.toml} .
cp "$extension" oxmoe/
export OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1
status=0
"$python" -m mutmut run --max-children "${CHILDREN:-2}" "$@" || status=$?
echo "Mutants that no test notices (mutmut show NAME, in $stage):"
"$python" -m mutmut results
exit "$status"
