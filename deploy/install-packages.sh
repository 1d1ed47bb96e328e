#!/usr/bin/env bash
# Installs the Debian packages that Tidepool is built and run with. Does nothing when all of them are there, so it works offline then.
set -euo pipefail

usage() {
    cat <<'TXT'
Usage: bash deploy/install-packages.sh [--fuzz]

Installs what is missing of the Debian 12 packages that building, running and testing Tidepool need.
Needs root or sudo when something is missing.

  --fuzz   also clang and libFuzzer, for the fuzz targets
TXT
}

packages=(
    # tools
    build-essential cmake ninja-build pkg-config ccache git curl ca-certificates
    # libraries of the programs
    libevent-dev libzmq3-dev libprotobuf-c-dev protobuf-c-compiler libsodium-dev libxxhash-dev libonig-dev libutf8proc-dev
    # chat templates; virtual environments for the model's package and the tests' clients
    python3 python3-jinja2 python3-venv python3-pip
    # libraries of the tests
    libcriterion-dev libjansson-dev python3-numpy
)

while [ $# -gt 0 ]; do
    case "$1" in
    --fuzz) packages+=(clang libclang-rt-14-dev) ;;
    -h | --help) usage; exit 0 ;;
    *) echo "install-packages: unknown argument: $1" >&2; usage >&2; exit 2 ;;
    esac
    shift
done

fail() { printf 'install-packages: %s\n' "$*" >&2; exit 1; }

command -v dpkg-query >/dev/null && command -v apt-get >/dev/null ||
    fail "this script is for Debian 12 (no apt-get here). Install these packages' equivalents by hand: ${packages[*]}"

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
    echo "install-packages: all ${#packages[@]} packages are installed"
    exit 0
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null ||
        fail "${#missing[@]} packages are missing, and this is neither root nor is there sudo. As root: apt-get install ${missing[*]}"
    as_root=(sudo)
fi

echo "install-packages: installing ${missing[*]}"
options=(-o Acquire::Retries=3 -o DPkg::Lock::Timeout=300)
# A list that cannot be refreshed may still name what is needed; the installation decides.
"${as_root[@]}" apt-get "${options[@]}" -qq update || echo "install-packages: the package lists could not be refreshed; trying with those that are here" >&2
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get "${options[@]}" -y --no-install-recommends install "${missing[@]}" ||
    fail "apt-get failed. Missing are: ${missing[*]}"
