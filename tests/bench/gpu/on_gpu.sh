#!/usr/bin/env bash
# Everything that is checked and measured on a GPU: build, every op against the CPU's, compute-sanitizer on small shapes, hot ops, prefill, decoding, and beside it full KV by the best
# library kernel. Meant to take under eight minutes, which nobody has timed yet. Prints tables; the whole log goes to OUT/log.
#
#   tests/bench/gpu/on_gpu.sh [OUT]      OUT: build-gpu; what each part may take stands in main
#   PARTS="build ops" tests/bench/gpu/on_gpu.sh
set -uo pipefail
cd "$(dirname "$0")/../../.."
out=${1:-build-gpu}
parts=${PARTS:-build ops sanitizer hot_ops prefill decode peer}
mkdir -p "$out"
failed=
part() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 start=$SECONDS rc
    shift 2
    [[ " $parts " == *" $name "* ]] || return 0
    printf '\n## %s\n' "$name"
    timeout "$limit" "$@"
    rc=$?
    printf '%s: exit status %d after %d s\n' "$name" "$rc" $((SECONDS - start))
    [ "$rc" = 0 ] || failed+=" $name"
}
# The shapes of ops_test are small; still, the tools slow a kernel down by tens to hundreds of times.
sanitizer() {
    local tool
    for tool in memcheck racecheck; do
        echo "$tool:"
        compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 5 "$out/bin/ops_test" blocks select attention decode scores || return 1
    done
}
export -f sanitizer
export out
bench=$out/bin/tidepool-gpubench
main() {
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    part build 150 tests/bench/gpu/build.sh "$out"
    part ops 60 "$out/bin/ops_test"
    part sanitizer 90 bash -c sanitizer
    part hot_ops 60 "$bench" --device cuda --prefill none --decode none --pool-size 64M
    part prefill 120 "$bench" --device cuda --ops-context 0 --decode none
    part decode 150 "$bench" --device cuda --ops-context 0 --prefill none --decode-steps 32
    part peer 60 python3 tests/bench/gpu/peer_full_kv.py
    printf '\n%s\n' "${failed:+FAILED:$failed}"
    [ -z "$failed" ]
}
main 2>&1 | tee "$out/log"
