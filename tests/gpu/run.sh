#!/usr/bin/env bash
# Every GPU test, the sanitizers and the measurements of the KV move in one command:
#
#   tests/gpu/run.sh [WHEEL [OUT]]     or     make gpu-test
#
# Installs WHEEL (and nothing else, from nowhere else) beside the torch of python3, or of PYTHON. WHEEL may be the built
# extension alone (_specrs.abi3.so), which the checkout's Python files then join; without it, the checkout's own is taken.
# Writes OUT/gpu.json (default: tests/gpu/results) and the logs beside it. Exits with 1 where a test or a sanitizer found
# something. Set SPECRS_COMMIT where the checkout has no git; STEP_LIMIT bounds each step, in seconds; JOBS files run at
# once (1), where time is short, and SANITIZE names the files that run under sanitizers (all of kernels; the report tells).
set -uo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
wheel=$(realpath "${1:-$root/python/specrs/_specrs.abi3.so}")
out=${2:-$root/tests/gpu/results}
python=${PYTHON:-python3}
limit=${STEP_LIMIT:-600}
mkdir -p "$out"
out=$(realpath "$out")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

case $wheel in
*.whl) "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$work/site" "$wheel" || exit 1 ;;
*) mkdir "$work/site" && cp -r "$root/python/specrs" "$work/site" && cp "$wheel" "$work/site/specrs/_specrs.abi3.so" || exit 1 ;;
esac
export PYTHONPATH=$work/site PYTHONUNBUFFERED=1
# Choices of products that this run measures are its own: a GPU that several tests share is no clock for anybody else.
export SPECRS_CACHE=$work/cache OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
cd "$work" # so that the checkout's python/ is not what is imported

mapfile -t files < <(find "$root/tests/python" -name 'test_gpu_*.py' | sort)
# A test of more than two minutes leaves the stacks of its threads in the log, which tells where a killed file stood.
pytest=("$python" -m pytest -q -p no:cacheprovider -rs --durations 5 -o faulthandler_timeout=120)
tests=("${pytest[@]}" "${files[@]}")

# run_file FILE [PART SELECTION]
run_file() {
    local name began=$SECONDS
    name=$(basename "$1" .py)${2:+-$2}
    timeout "$limit" "${pytest[@]}" ${3:+-k "$3"} --junitxml="$work/tests-$name.xml" "$1" >"$out/$name.log" 2>&1
    echo $? >"$work/tests-$name.rc"
    echo "$name: $(tail -n 1 "$out/$name.log") (until $SECONDS s, since $began s)"
}
# Runs a command beside JOBS - 1 others, with each of the visible GPUs in turn as its first one.
queued=0
started=0
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}"
queue() {
    local first=$((started % (gpus > 0 ? gpus : 1)))
    local order=("${visible[@]:first}" "${visible[@]:0:first}")
    CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${order[*]}") "$@" &
    started=$((started + 1))
    queued=$((queued + 1))
    [ "$queued" -lt "${JOBS:-1}" ] || { wait -n; queued=$((queued - 1)); }
}
echo "== tests, a process for each file, ${JOBS:-1} at once"
# The longest file first, a process for each shape of its models.
shapes=(group1- group2-64 group2-96 group4 group7 group8 granite olmo2 gemma- gemma2 gemma3-256 eagle1)
for shape in "${shapes[@]}"; do
    queue run_file "$root/tests/python/engine/test_gpu_engine.py" "$shape" "$shape"
done
others=$(printf ' or %s' "${shapes[@]}")
queue run_file "$root/tests/python/engine/test_gpu_engine.py" others "not (${others# or })"
for form in DFlash JetSpec Markov GRU P-EAGLE Flash2; do
    queue run_file "$root/tests/python/engine/test_gpu_blocks.py" "$form" "$form"
done
queue run_file "$root/tests/python/engine/test_gpu_blocks.py" others "not (DFlash or JetSpec or Markov or GRU or P-EAGLE or Flash2)"
for file in "${files[@]}"; do
    case $file in */test_gpu_engine.py | */test_gpu_blocks.py) continue ;; esac
    queue run_file "$file"
done

# Under a sanitizer: without torch's caching allocator each tensor is an allocation of its own, so that an access
# beyond it is seen. Graphs need that allocator, and size matters only for time: small cases of every kernel.
sanitize() {
    local tool=$1 caching=$2 name=$3 select=$4
    local run=$tool-$caching-$name
    shift 4
    local no_cache=()
    [ "$caching" = off ] && no_cache=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1)
    timeout "$limit" "${no_cache[@]}" compute-sanitizer --tool "$tool" --error-exitcode 97 --log-file "$out/$run.log" \
        "${pytest[@]}" "$@" -k "$select" --junitxml="$work/$run.xml" >"$work/$run.out" 2>&1
    echo $? >"$work/$run.sanitized"
    echo "$run: $(tail -n 1 "$work/$run.out"); $(tail -n 1 "$out/$run.log")"
}
# A sanitizer makes launches wait, which is what the stream tests and those of lifetimes are about; engines and products
# run torch's and cublasLt's kernels, tried by the thousand.
left_out="four_gigabytes or largest or first_use or stream or last_use or ring_is_full or threads or every_kind"
small="ties or bad or limits or dead or outside or remap or recorded or skipped or capacities or padding or 64-dtype0"
# The cases of a file of tests that a sanitizer gets through in a minute or two.
cases() {
    case $1 in
    test_gpu_attention) echo "small or skipped or empty or refused or pages_and_their_order or rounded" ;;
    test_gpu_attention_hostile) echo "skipped or zeros or refused or numbers or any_number" ;;
    test_gpu_attention_blocks) echo "64-4 or 96-7" ;;
    test_gpu_attention_cluster) echo "3-tree" ;;
    test_gpu_backends) echo "every_phase or (head_size and 64)" ;;
    test_gpu_lists) echo "rows_of_blocks or limits or is_none or 31-3-63 or 7-3-31" ;;
    test_gpu_linear) echo "captured or does_not_fit or 72-72 or 72-320" ;;
    test_gpu_attention_pages) echo "skipped or refused or draft_steps or values" ;;
    test_gpu_plan)
        echo "recorded or no_tree_has or do_not_fit or clamped or none_of_the_pool or whole_lanes or tail_copies[3]" \
            "or every_phase[3] or every_phase[5]"
        ;;
    test_gpu_sample)
        echo "dead or outside or leave_nothing or ends_early or cannot_be_sampled or empty or (half and 31)" \
            "or test_trees[ties-31]"
        ;;
    test_gpu_sample_groups) echo "leaves_its_request and nucleus-3 and not best" ;;
    test_gpu_rows) echo "few_rows or $small" ;;
    test_gpu_faults) echo "record" ;;
    test_gpu_unite) echo "recorded or none or limits or (references and 3-2)" ;;
    *) echo "$small" ;;
    esac
}
# Engines and models, and the graph runtime: its tests plant captures that fail, drop graphs in the midst of a replay and
# loop on the device, of which a sanitizer makes errors of its own or a context that works no more.
whole() {
    case $1 in
    */engine/* | */models/* | */cli/* | */hf/* | */train/* | */capsule/* | */graph/*) true ;;
    */test_gpu_driver_calls.py | */test_gpu_products.py | */test_gpu_overlap.py | */test_gpu_real_kernels.py) true ;;
    *) false ;;
    esac
}
sanitize_files() {
    local tool=$1 caching=$2 more=$3 name
    for file in "${files[@]}"; do
        name=$(basename "$file" .py)
        if whole "$file" || [ "$name" = test_gpu_named_faults ]; then continue; fi
        case " ${SANITIZE:-$name} " in *" $name "*) ;; *) continue ;; esac
        queue sanitize "$tool" "$caching" "$name" "($(cases "$name")) and not ($left_out$more)" "$file"
    done
}
# Whether memcheck sees the kernel at all, by a move that it must complain about.
control() {
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "$limit" compute-sanitizer --tool memcheck --kernel-regex kns=kv_move \
        --log-file "$out/control.log" "$python" "$root/tests/gpu/control.py" 2>&1 | tail -n 1
    grep -q 'Invalid __global__' "$out/control.log"
}
if command -v compute-sanitizer >/dev/null; then
    echo "== memcheck, control: must find errors"
    control
    grep -m 1 -A 2 Invalid "$out/control.log"
    tail -n 1 "$out/control.log"
    echo "== memcheck, each tensor an allocation of its own"
    sanitize_files memcheck off " or graph or captured"
    echo "== memcheck, graphs"
    kernels=()
    for file in "${files[@]}"; do
        case $file in */backends/*) continue ;; esac
        whole "$file" || kernels+=("$file")
    done
    if [ -z "${SANITIZE:-}" ]; then
        queue sanitize memcheck on graphs "(graph or captured or named_faults) and not ($left_out or loop or runs_on)" "${kernels[@]}"
    fi
    echo "== racecheck, of shared memory"
    sanitize_files racecheck on ""
else
    echo "== compute-sanitizer is not installed: skipped"
fi
wait

echo "== measurements"
timeout "$limit" "$python" "$root/benches/gpu/kv_move.py" --json "$work/bench.json"

"$python" "$root/tests/gpu/report.py" --work "$work" --logs "$out" --wheel "$wheel" --root "$root" --json "$out/gpu.json"
