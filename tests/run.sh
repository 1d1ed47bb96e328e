#!/usr/bin/env bash
# Installs what is missing, builds (Release, ASan+UBSan, fuzz) and runs every test. Nothing has to be prepared; a second run does what is new only.
set -uo pipefail
cd "$(dirname "$0")/.."

usage() {
    cat <<'TXT'
Usage: bash tests/run.sh [release] [asan] [fuzz]

Installs packages, gets the model, builds and runs the tests of the named builds (default: all three).
The exit status is 0 when all tests passed. The last line counts the tests of all builds together.
TXT
}

presets=()
for argument in "$@"; do
    case "$argument" in
    release | asan | fuzz) presets+=("$argument") ;;
    -h | --help) usage; exit 0 ;;
    *) echo "run.sh: unknown argument: $argument" >&2; usage >&2; exit 2 ;;
    esac
done
[ ${#presets[@]} -gt 0 ] || presets=(release asan fuzz)

# A hung test must not hang the run: each has its own limit, and each ctest has this one.
ctest_limit_s=1200
jobs=$(nproc)
venv=.venv-tests
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

step() { printf '\n==> [%4d s] %s\n' "$SECONDS" "$*"; }
fail() { printf 'run.sh: %s\n' "$*" >&2; exit 1; }

# The virtual environment of the system tests, made anew when the list of packages changed.
make_venv() {
    local wanted
    wanted=$(sha256sum tests/requirements.txt)
    [ -x "$venv/bin/python" ] && [ "$(cat "$venv/requirements.sha256" 2>/dev/null)" = "$wanted" ] && return 0
    rm -rf "$venv"
    python3 -m venv "$venv" && "$venv/bin/python" -m pip install --quiet --retries 5 --timeout 60 --requirement tests/requirements.txt || return 1
    echo "$wanted" >"$venv/requirements.sha256"
}

build() {
    local preset=$1
    cmake --preset "$preset" >"$logs/configure-$preset" 2>&1 || { cat "$logs/configure-$preset" >&2; return 1; }
    cmake --build --preset "$preset" -j "$jobs"
}

# Runs one build's tests and adds its counts, which ctest prints as "N% tests passed, F tests failed out of T", to the totals. A build counts as passed
# only when ctest said so and said how many: a ctest that was killed prints no counts.
n_tests=0 n_failed=0 passed_presets=()
run_tests() {
    local preset=$1 log=$logs/ctest-$1 status failed='' all=''
    timeout --kill-after=30 "$ctest_limit_s" ctest --preset "$preset" -j "$jobs" --timeout 300 --no-tests=error 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    [ "$status" -ne 124 ] || echo "run.sh: the tests of $preset did not end within $ctest_limit_s s" >&2
    read -r failed all < <(sed -n 's/^[0-9]*% tests passed, \([0-9]*\) tests failed out of \([0-9]*\)$/\1 \2/p' "$log")
    n_failed=$((n_failed + ${failed:-1}))
    n_tests=$((n_tests + ${all:-1}))
    if [ "$status" -eq 0 ] && [ "$failed" = 0 ]; then
        passed_presets+=("$preset")
    fi
}

step "Packages"
bash deploy/install-packages.sh --fuzz || exit 1
step "Model"
bash deploy/get-model.sh || exit 1
step "Python packages of the system tests"
make_venv || fail "the virtual environment $venv could not be made"
for preset in "${presets[@]}"; do
    step "Build: $preset"
    build "$preset" || fail "the $preset build failed"
done
for preset in "${presets[@]}"; do
    step "Tests: $preset"
    run_tests "$preset"
done

step "Done: ${#passed_presets[@]} of ${#presets[@]} builds passed all their tests"
echo "$((100 * (n_tests - n_failed) / n_tests))% tests passed, $n_failed tests failed out of $n_tests"
[ ${#passed_presets[@]} -eq ${#presets[@]} ]
