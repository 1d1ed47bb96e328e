#!/usr/bin/env python3
"""What nvcc makes of each kernel: registers, spills, stack, shared memory, and how many blocks a multiprocessor holds.

Usage: kernel_resources.py [--arch 80,90] [--nvcc NVCC] [--jobs N] [--launches FILE | --profile-ops PROGRAM] [--kernel PART] [--spill-limit BYTES] [SOURCE.cu]...

Compiles the sources of kernels/cuda (or those named) with the options of build.sh and `-Xptxas -v`, through ccache where it is there; the objects are thrown away. Threads and dynamic shared memory of a
launch are not in the code: they come from the access profiler's report (FILE, of SIMT_PROFILE, or what build/tests/profile_ops leaves in one), which has a real model's launches; kernels that it
does not have get no occupancy. Needs no GPU. Exit status 0, 1: a kernel spills more than the limit (default 64: ptxas spills a few bytes where a multiprocessor would otherwise hold fewer warps), 2: nvcc
failed.
"""

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
OPTIONS = ["-std=c++17", "-O3", "--fmad=false", "-I.", "-Xcompiler", "-fPIC,-fno-strict-aliasing", "-Xptxas", "-v"]
# CUDA C++ programming guide, "Technical specifications per compute capability": shared memory of a multiprocessor in KiB. The rest is the same for both.
SHARED_KIB = {80: 164, 90: 228}
WARPS, BLOCKS, REGISTERS, RESERVED_SHARED = 64, 32, 65536, 1024
REGISTER_UNIT, WARP_UNIT, SHARED_UNIT = 256, 4, 128


@dataclass
class Launch:
    threads: int
    shared: int


@dataclass
class Kernel:
    source: str
    name: str
    arch: int
    stack: int = 0
    spilled: int = 0
    registers: int = 0
    shared: int = 0


def round_up(n, unit):
    return -(-n // unit) * unit


def blocks_a_multiprocessor(kernel, launch):
    warps = math.ceil(launch.threads / 32)
    by_registers = REGISTERS // round_up(kernel.registers * 32, REGISTER_UNIT) // WARP_UNIT * WARP_UNIT // warps
    by_shared = SHARED_KIB[kernel.arch] * 1024 // round_up(kernel.shared + launch.shared + RESERVED_SHARED, SHARED_UNIT)
    return min(BLOCKS, WARPS // warps, by_registers, by_shared)


def sources():
    with open(os.path.join(ROOT, "kernels/cuda/sources.cmake"), encoding="utf-8") as file:
        text = file.read()
    return ["kernels/cuda/" + name for name in re.search(r"set\(CUDA_BACKEND_CU\n(.*?)\)", text, re.S).group(1).split()]


def demangled(names):
    return subprocess.run(["c++filt", "-p"], input="\n".join(names), stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines() if names else []


def parse(source, text):
    kernels = []
    for line in text.splitlines():
        begins = re.search(r"Compiling entry function '(\w+)' for 'sm_(\d+)'", line)
        if begins:
            kernels.append(Kernel(source, begins.group(1), int(begins.group(2))))
        for field, pattern in (("stack", r"(\d+) bytes stack frame"), ("registers", r"Used (\d+) registers"), ("shared", r"(\d+) bytes smem")):
            found = re.search(pattern, line)
            if found and kernels:
                setattr(kernels[-1], field, int(found.group(1)))
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if spills and kernels:
            kernels[-1].spilled = int(spills.group(1)) + int(spills.group(2))
    for kernel, name in zip(kernels, demangled([k.name for k in kernels])):
        kernel.name = re.match(r"(?:void )?([\w:]+(?:<.*>)?)", name).group(1)
    return kernels


def compiled(source, nvcc, archs, folder):
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    command = ([ccache] if (ccache := shutil.which("ccache")) else []) + [nvcc, *OPTIONS, *codes, "-c", source, "-o", os.path.join(folder, os.path.basename(source) + ".o")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout, file=sys.stderr)
        return None
    return parse(source, done.stdout)


def launches_of(path):
    """By the name of a kernel without its template arguments."""
    launches = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            fields = line.rstrip("\n").split("\t")
            if fields[0] == "kernel":
                launches[re.sub(r"[(<].*", "", fields[1].lstrip("("))] = Launch(int(fields[4]), int(fields[5]))
    return launches


def find_launches(options, folder):
    if options.launches:
        return launches_of(options.launches)
    program = options.profile_ops or os.path.join(ROOT, "build/tests/profile_ops")
    if not os.path.exists(program):
        return {}
    path = os.path.join(folder, "profile")
    subprocess.run([program], env=dict(os.environ, SIMT_PROFILE=path), check=True)
    return launches_of(path)


def table(kernels, launches):
    print("| kernel | sm | registers | spilled, bytes | stack | static shared | threads | dynamic shared | blocks a multiprocessor | warps of 64 |\n|---|---|---|---|---|---|---|---|---|---|")
    for k in kernels:
        launch = launches.get(k.name.split("<")[0])
        # The launch's dynamic shared memory is that of the model's head dim.
        known = launch and (launch.shared == 0 or "<" not in k.name or "<128>" in k.name)
        blocks = blocks_a_multiprocessor(k, launch) if known else 0
        rest = f"{launch.threads} | {launch.shared} | {blocks} | {blocks * math.ceil(launch.threads / 32)}" if known else " | | |"
        print(f"| {k.name} | {k.arch} | {k.registers} | {k.spilled} | {k.stack} | {k.shared} | {rest} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="80,90")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--launches")
    parser.add_argument("--profile-ops")
    parser.add_argument("--kernel", default="")
    parser.add_argument("--spill-limit", type=int, default=64)
    parser.add_argument("sources", nargs="*")
    options = parser.parse_args()
    archs = [int(arch) for arch in options.arch.split(",")]
    with tempfile.TemporaryDirectory(prefix="kernel-resources-") as folder:
        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(lambda source: compiled(source, options.nvcc, archs, folder), options.sources or sources()))
        if None in results:
            return 2
        launches = find_launches(options, folder)
    kernels = {(k.name, k.arch): k for result in results for k in result if options.kernel in k.name}  # a header's kernel is in several sources
    table([kernels[key] for key in sorted(kernels)], launches)
    spilling = sorted({k.name for k in kernels.values() if k.spilled > options.spill_limit})
    if spilling:
        print("spills: " + ", ".join(spilling))
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
