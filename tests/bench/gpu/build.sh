#!/usr/bin/env bash
# Builds the CUDA plugin, the ops' test and tidepool-gpubench where there is nothing but a C compiler, libc and the CUDA Toolkit: neither CMake nor ZeroMQ, protobuf-c, libsodium, xxHash or
# Criterion. The lists of files and the options of the CPU's ops come from the CMake files; the other options are those of cmake/compiler.cmake, and change with them.
#
#   tests/bench/gpu/build.sh [OUT]            OUT: build-gpu
#   ARCHS="80 90" tests/bench/gpu/build.sh    compute capabilities; default 90
#   JOBS=1 tests/bench/gpu/build.sh           compilers at a time; default one a processor
#   CUDA=off tests/bench/gpu/build.sh         without the plugin: the CPU backend alone
#   LIST=on tests/bench/gpu/build.sh          only name the C files, with the options of each
set -euo pipefail
cd "$(dirname "$0")/../../.."
out=${1:-build-gpu} archs=${ARCHS:-90} cc=${CC:-cc} cuda=${CUDA:-on} jobs=${JOBS:-$(nproc)}

# Names in a `set(<variable>` or `function(<target>` list of a CMake file, up to its closing parenthesis.
cmake_list() { # FILE FIRST_LINE
    sed -n "/^$2/,/)/p" "$1" | grep -oE '[A-Za-z0-9_/.]+\.(c|cu)\b' | sed "s|^|$(dirname "$1")/|"
}

version=$(sed -n 's/^project(tidepool VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
common="-std=gnu17 -DTIDEPOOL_VERSION=\"$version\" -O3 -g -D_GNU_SOURCE -I. -Itests/bench/gpu/standin -fno-common -fno-strict-aliasing -ffp-contract=off -fPIC"
isa_flags() { # plain, avx2 or avx512; fails where none are found
    sed -nE "s/^set\(ISA_(RELEASE_)?FLAGS_$1 (.*)\)$/\2/p" kernels/cpu/isa_flags.cmake | grep . | tr '\n' ' '
}
ops=$(cmake_list kernels/CMakeLists.txt 'set(KERNELS_OPS')
kernels="$(cmake_list kernels/CMakeLists.txt 'add_library(kernels STATIC') kernels/backend.c"
base="$(printf 'proto/base/%s.c\n' buf clock error json_write log options options_file options_help options_value utf8) proto/block_key.c proto/block_layout.c proto/option_choices.c
    tests/bench/gpu/standin/blake2b.c"
ops_test="$(sed -n '/^set(OPS_TEST_SOURCES/p' tests/simt/CMakeLists.txt | grep -oE '[A-Za-z0-9_/.]+\.c\b' | sed 's|^\.\./|tests/|; t; s|^|tests/simt/|')"
engine="$(cmake_list formats/CMakeLists.txt 'add_library(formats STATIC') $(cmake_list worker/model/CMakeLists.txt 'add_library(worker_model_config') $(cmake_list worker/model/CMakeLists.txt 'add_library(worker_model STATIC')
    $(cmake_list worker/cache/CMakeLists.txt 'add_library(worker_cache') $(cmake_list kvstore/CMakeLists.txt 'add_library(kvstore_pool')"
bench=$(cmake_list tests/bench/CMakeLists.txt 'add_executable(tidepool-gpubench')

# cuBLAS is the toolkit's, or else that of a Python package, which has no libcublas.so to link with.
includes= cublas=
cublas_find() {
    local folder=$toolkit/lib64 place
    if [ -f "$toolkit/include/cublas_v2.h" ] && [ -e "$folder/libcublas.so" ]; then
        cublas="-L$folder -lcublas -Xlinker -rpath=$folder"
        return
    fi
    place=$(python3 -B -c 'import glob, importlib.util as u; print(next((f for p in u.find_spec("nvidia").submodule_search_locations for f in glob.glob(p + "/*/include/cublas_v2.h")), ""))' 2>/dev/null)
    place=${place%/include/cublas_v2.h}
    [ -n "$place" ] || { echo "cublas_v2.h is neither in $toolkit nor in a Python package" >&2; exit 1; }
    includes="-I$place/include"
    cublas="-Xlinker $(ls "$place"/lib/libcublas.so.* | head -n 1) -Xlinker -rpath=$place/lib"
}

commands=$(mktemp)
trap 'rm -f "$commands"' EXIT
objects= # of the last `compile`
compile() { # OPTIONS SUFFIX FILE...
    local options=$1 suffix=$2 file object
    shift 2
    objects=
    for file in "$@"; do
        object="$out/$(echo "$file" | tr / _)$suffix.o"
        objects+=" $object"
        echo "$cc $options -c $file -o $object" >>"$commands"
    done
}
mkdir -p "$out/bin"
cpu_objects=
for set in plain avx2 avx512; do
    flags=$(isa_flags "$set")
    compile "$common $flags" ".$set" $ops
    cpu_objects+=$objects
done
compile "$common" "" $kernels $base
cpu_objects+=$objects
compile "$common" "" $engine $bench
bench_objects=$objects
compile "$common" "" $ops_test
test_objects=$objects
if [ "${LIST:-off}" = on ]; then
    cat "$commands"
    exit
fi
cuda_objects= links=
if [ "$cuda" = on ]; then
    nvcc=${NVCC:-nvcc}
    toolkit=$("$nvcc" --dryrun -c -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p') # nvcc may be a script that calls the real one
    toolkit=$(cd "${toolkit:-$(dirname "$(command -v "$nvcc")")/..}" && pwd)
    cublas_find
    codes=$(for arch in $archs; do printf ' -gencode arch=compute_%s,code=sm_%s' "$arch" "$arch"; done)
    # The base, which the plugin has too, is compiled already.
    compile "$common -I$toolkit/include $includes" "" $(cmake_list kernels/cuda/sources.cmake 'set(CUDA_BACKEND_C$' | grep -v /proto/base/)
    cuda_objects=$objects
    cc="$nvcc"
    compile "-std=c++17 -O3 --fmad=false -lineinfo $codes -I. $includes -Xcompiler -fPIC,-fno-strict-aliasing" "" $(cmake_list kernels/cuda/sources.cmake 'set(CUDA_BACKEND_CU$')
    cuda_objects+=$objects
fi
# The slowest first: the largest of nvcc's files.
by_size() {
    local object
    while read -r command; do
        object=${command% -o *}
        printf '%s %s\n' "$(stat -c %s "${object##* }")" "$command"
    done | sort -rn | cut -d ' ' -f 2-
}
{ { grep '\.cu ' "$commands" || true; } | by_size; grep -v '\.cu ' "$commands"; } | xargs -P "$jobs" -d '\n' -n 1 bash -c '$0 || { echo "failed: $0" >&2; exit 255; }' || exit 1
if [ "$cuda" = on ]; then
    "$nvcc" -shared -Xlinker --no-undefined -Xlinker --version-script=kernels/cuda/plugin.map -o "$out/bin/libtidepool_cuda.so" $cuda_objects "$out"/proto_base_{clock,error}.c.o $cublas -ldl
    "$nvcc" -o "$out/bin/ops_test" $test_objects $cuda_objects $cpu_objects $cublas -lm -ldl -lpthread
fi
${CC:-cc} -o "$out/bin/tidepool-gpubench" $bench_objects $cpu_objects -lm -ldl -lpthread
ls -1 "$out"/bin
