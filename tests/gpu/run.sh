#!/usr/bin/env bash
# Every GPU test, the sanitizers and the measurements of the KV move in one command, from a built wheel:
#
#   tests/gpu/run.sh WHEEL [OUT]
#
# Installs WHEEL (and nothing else, from nowhere else) beside the torch of python3, or of PYTHON; WHEEL may be the built
# extension alone (_specrs.abi3.so), which the checkout's Python files then join. Writes
# OUT/kv_move.json (default: tests/gpu/results) and the logs beside it. Exits with 1 where a test or a sanitizer found
# something. Set SPECRS_COMMIT where the checkout has no git; STEP_LIMIT bounds each step, in seconds.
set -uo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
wheel=$(realpath "${1:?usage: tests/gpu/run.sh WHEEL|EXTENSION [OUT]}")
out=${2:-$root/tests/gpu/results}
python=${PYTHON:-python3}
limit=${STEP_LIMIT:-300}
mkdir -p "$out"
out=$(realpath "$out")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

case $wheel in
*.whl) "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$work/site" "$wheel" || exit 1 ;;
*) mkdir "$work/site" && cp -r "$root/python/specrs" "$work/site" && cp "$wheel" "$work/site/specrs/_specrs.abi3.so" || exit 1 ;;
esac
export PYTHONPATH=$work/site PYTHONUNBUFFERED=1
cd "$work" # so that the checkout's python/ is not what is imported

# --noconftest: the fixtures there are for the engine's tests.
mapfile -t files < <(find "$root/tests/python" -name 'test_gpu_*.py' | sort)
tests=("$python" -m pytest -q --noconftest -p no:cacheprovider -rs "${files[@]}")

echo "== tests"
timeout "$limit" "${tests[@]}" --junitxml="$work/tests.xml" 2>&1 | tee "$out/tests.log" | tail -n 15

# Under a sanitizer: without torch's caching allocator each tensor is an allocation of its own, so that an access
# beyond it is seen. Graphs need that allocator, and size matters only for time.
filter=(--kernel-regex kns=kv_move)
sanitize() {
    local tool=$1 caching=$2 select=$3
    echo "== $tool (caching allocator: $caching)"
    local no_cache=()
    [ "$caching" = off ] && no_cache=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1)
    timeout "$limit" "${no_cache[@]}" compute-sanitizer --tool "$tool" "${filter[@]}" --error-exitcode 97 \
        --log-file "$out/$tool-$caching.log" "${tests[@]}" -k "$select" --junitxml="$work/$tool-$caching.xml" 2>&1 | tail -n 3
    tail -n 2 "$out/$tool-$caching.log"
}
# A sanitizer makes launches wait, which is what the stream tests and those of lifetimes are about; products are
# cublasLt's kernels, tried by the thousand.
left_out="four_gigabytes or largest_batch or first_use or stream or last_use or ring_is_full or gpu_products"
# Whether memcheck sees the kernel at all, by a move that it must complain about.
control() {
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "$limit" compute-sanitizer --tool memcheck "${filter[@]}" \
        --log-file "$out/control.log" "$python" "$root/tests/gpu/control.py" 2>&1 | tail -n 1
    grep -q 'Invalid __global__' "$out/control.log"
}
if command -v compute-sanitizer >/dev/null; then
    echo "== memcheck, control: must find errors"
    control || { echo "nothing found with ${filter[*]}: without it" && filter=() && control; }
    grep -m 1 -A 2 Invalid "$out/control.log"
    tail -n 1 "$out/control.log"
    sanitize memcheck off "not ($left_out or graph)"
    sanitize memcheck on "graph and not ($left_out)"
    sanitize racecheck on "not ($left_out)" # of shared memory, which a kernel may come to use
else
    echo "== compute-sanitizer is not installed: skipped"
fi

echo "== measurements"
timeout "$limit" "$python" "$root/benches/gpu/kv_move.py" --json "$work/bench.json"

"$python" "$root/tests/gpu/report.py" --work "$work" --logs "$out" --wheel "$wheel" --root "$root" --json "$out/kv_move.json"
