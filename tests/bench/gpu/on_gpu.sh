#!/usr/bin/env bash
# Everything that is checked and measured on a GPU, the parts of most worth first: build, every op against the CPU's, prefixes by cuDNN, hot ops, decoding, prefill, counters of the kernels by
# Nsight Compute, compute-sanitizer on small shapes, and beside it full KV by the best library kernel. Each part is a process or several, with a limit of its own, so that one that fails, hangs or
# breaks the device ends alone. Meant to take under eight minutes, under four with --quick, which nobody has timed yet: at DEADLINE seconds it ends, and says what it left out.
#
#   tests/bench/gpu/on_gpu.sh [--quick] [BUILD]        BUILD: build-gpu
#   PARTS="ops hot_ops" tests/bench/gpu/on_gpu.sh      some parts; without `build` the programs are those of BUILD/bin, or of the folder BIN
#
# Tables go to stdout as they come, short enough for a terminal's last 12,000 characters; everything to files in the folder OUT (BUILD/results), written as it comes too:
#   summary.md  what stdout says      log  all output     cudnn.log  what cuDNN has to say      ncu.csv  the counters
set -uo pipefail
cd "$(dirname "$0")/../../.."
here=tests/bench/gpu quick=
if [ "${1:-}" = --quick ]; then
    quick=1
    shift
fi
build=${1:-build-gpu}
export bin=${BIN:-$build/bin} results=${OUT:-$build/results}
parts=${PARTS:-build ops prefix hot_ops decode prefill ncu sanitizer peer}
deadline=${DEADLINE:-$([ "$quick" ] && echo 230 || echo 470)}
log=$results/log
mkdir -p "$build" "$results"
export work
work=$(mktemp -d "$build/parts.XXXXXX")
: >"$log"

# ---- parts ----

failed= skipped=
wanted() { [[ " $parts " == *" $1 "* ]]; }
left() { echo $((deadline - SECONDS)); }

# Lines of a part's output that are worth a line on stdout: tables, failures, errors, and the last line of what failed.
show() { # FILE STATUS
    grep -aE '^(\||FAIL|ok |device |tidepool-gpubench:|ops_test:|simt:|pool of |.*weights loaded|========= (ERROR|RACECHECK|Error)|.*: exit status)' "$1" | cut -c 1-260 | head -n 60
    [ "$2" = 0 ] || tail -n 4 "$1" | cut -c 1-260
}

part() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 start=$SECONDS from rc
    shift 2
    wanted "$name" || return 0
    if [ "$(left)" -lt 8 ]; then
        skipped+=" $name"
        return 0
    fi
    [ "$limit" -lt "$(left)" ] || limit=$(left)
    printf '\n## %s\n' "$name"
    printf '\n## %s\n' "$name" >>"$log"
    from=$(stat -c %s "$log")
    timeout -k 5 "$limit" "$@" >>"$log" 2>&1
    rc=$?
    tail -c "+$((from + 1))" "$log" >"$work/$name.log"
    show "$work/$name.log" "$rc"
    printf '%s: exit status %d after %d s%s\n' "$name" "$rc" $((SECONDS - start)) "$([ "$rc" = 124 ] || [ "$rc" = 137 ] && echo ", which was all it had")" | tee -a "$log"
    [ "$rc" = 0 ] || failed+=" $name"
}

# A group of ops_test, in a process of its own: a kernel that breaks its context hides no other group.
group() { # LABEL GROUP COMMAND...
    local label=$1 name=$2 start=$SECONDS rc
    shift 2
    timeout -k 3 "${GROUP_SECONDS:-40}" "$@" "$name" >"$work/$label.$name" 2>&1
    rc=$?
    if [ "$rc" = 0 ]; then
        grep -a '^ok ' "$work/$label.$name" | sed "s/$/, $label, $((SECONDS - start)) s/"
    else
        echo "FAIL $name, $label: exit status $rc after $((SECONDS - start)) s"
        grep -aE '^FAIL|^cuDNN|^========= (ERROR|Error|Invalid|  *at|Program hit)|hazard' "$work/$label.$name" | head -n 6
        tail -n 2 "$work/$label.$name"
    fi
    return "$rc"
}
export -f group

groups() { # LABEL JOBS COMMAND...   with the names on stdin
    local label=$1 jobs=$2
    shift 2
    xargs -P "$jobs" -I{} bash -c 'group "$0" {} "$@"' "$label" "$@"
}
export -f groups

ops() {
    "$bin/ops_test" --list | grep -xE "${GROUPS_WANTED:-.*}" | groups ops 4 "$bin/ops_test"
}

# What is cuDNN's must be done by cuDNN, and then once more by the own kernel.
prefix() {
    local r=0
    echo prefix | TIDEPOOL_CUDNN=require CUDNN_LOGLEVEL_DBG=2 CUDNN_LOGDEST_DBG="$results/cudnn.log" groups 'cuDNN required' 1 "$bin/ops_test" || r=1
    grep -a '^device' "$work/cuDNN required.prefix"
    echo prefix | TIDEPOOL_CUDNN=off groups 'own kernel' 1 "$bin/ops_test" || r=1
    return $r
}

# The shapes of ops_test are small; still, the tools slow a kernel down by tens to hundreds of times. cuBLAS, cuDNN and the registration of gigabytes are left out.
sanitizer() {
    local tool r=0
    compute-sanitizer --version | tail -n 1
    for tool in memcheck racecheck; do
        printf '%s\n' blocks select attention decode scores page_cache elementwise sample | TIDEPOOL_CUDNN=off GROUP_SECONDS=60 groups "$tool" 4 \
            compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 --launch-timeout 60 "$bin/ops_test" || r=1
    done
    return $r
}

# Every kernel once, in its fourth launch, in a model of two layers of the real shape: prefill, then a batch that decodes.
ncu_run() {
    ncu --clock-control none --target-processes all --kernel-id :::4 --print-units base --csv --log-file "$results/ncu.csv" --metrics \
        gpu__time_duration.sum,dram__bytes.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,sm__throughput.avg.pct_of_peak_sustained_elapsed,sm__warps_active.avg.pct_of_peak_sustained_active,l1tex__data_bank_conflicts_pipe_lsu.sum,launch__registers_per_thread,launch__waves_per_multiprocessor \
        "$bin/tidepool-gpubench" --device cuda --shape "$here/llama_two_layers.json" --ops-context 0 --prefill 16384 --bridges device --chunks 2048 --decode 16 --decode-context 65536 --decode-steps 2 \
        --fetch 512 --page-cache 1 --pool-size 4G
    local rc=$?
    python3 "$here/ncu_table.py" "$results/ncu.csv"
    return $rc
}
export -f ops prefix sanitizer ncu_run
export here

# ---- where libraries are ----

# CUDA's and cuDNN's libraries may be inside Python packages, which only Python finds by itself.
python_library_folders() {
    python3 -B - <<'END' 2>/dev/null
import glob, importlib.util, os
spec = importlib.util.find_spec('nvidia')
for place in spec.submodule_search_locations if spec else []:
    for folder in sorted(glob.glob(os.path.join(place, '*', 'lib'))):
        print(folder)
END
}

libraries() {
    local folder
    while read -r folder; do
        LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
    done < <(python_library_folders)
    export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}
}

# ---- all of it ----

main() {
    local bench=$bin/tidepool-gpubench shape=${SHAPE:-llama-3.1-8b} steps=32 peer=
    nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used --format=csv,noheader || true
    libraries
    # PyTorch measures on the GPU while the compilers have the processors; nothing else runs there then.
    if [ ! "$quick" ] && wanted peer; then
        timeout -k 5 150 python3 -B "$here/peer_full_kv.py" >"$work/peer" 2>&1 &
        peer=$!
    fi
    part build 170 "$here/build.sh" "$build"
    if wanted build && [[ "$failed" == *" build"* ]]; then
        parts=peer
    fi
    part ops 90 bash -c ops
    part prefix 40 bash -c prefix
    if [ "$peer" ]; then
        wait "$peer"
        part peer 5 cat "$work/peer"
        [ -s "$work/peer" ] && grep -q '^| one document, read once | 64' "$work/peer" || failed+=" peer"
        parts=${parts/peer/}
    fi
    part hot_ops 60 "$bench" --device cuda --shape "$here/llama_two_layers.json" --prefill none --decode none --pool-size 64M
    if [ "$quick" ]; then
        part decode 80 "$bench" --device cuda --shape "$shape" --ops-context 0 --prefill none --decode 1,16,64 --fetch 512 --page-cache 32 --decode-steps 16 ${SIZES:-}
        part prefill 60 "$bench" --device cuda --shape "$shape" --ops-context 0 --decode none --prefill 131072,8192 --chunks 2048 --bridges host --pool-size 20G ${SIZES:-}
    else
        part decode 150 "$bench" --device cuda --shape "$shape" --ops-context 0 --prefill none --decode-steps "$steps" ${SIZES:-}
        part prefill 120 "$bench" --device cuda --shape "$shape" --ops-context 0 --decode none --prefill 131072,32768,8192 ${SIZES:-}
        part ncu 60 bash -c ncu_run
    fi
    part sanitizer 90 bash -c sanitizer
    printf '\n%d s%s%s\n' "$SECONDS" "${skipped:+; no time left for:$skipped}" "${failed:+; FAILED:$failed}"
    rm -rf "$work"
    [ -z "$failed$skipped" ]
}
main 2>&1 | tee "$results/summary.md"
