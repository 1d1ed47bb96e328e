#!/usr/bin/env python3
"""Runs a program of the emulator's checked build with the access profiler and prints what the accesses of its kernels cost.

Usage: access_profile.py [--top N] [--kernel PART] [--all] [--raw FILE] PROGRAM [ARGUMENT]...
       access_profile.py [--top N] [--kernel PART] [--all] --read FILE

A table of kernels, then for each kernel the source lines that waste most: `excess` is what is beyond the least that the bytes need, in sectors of 32 bytes (global, host) or wavefronts (shared).
--top N: lines of a kernel (default 8; 0: all). --kernel PART: only kernels with PART in their names. --all: lines that waste nothing, too. --raw FILE: keep the profiler's own file, --read FILE: print
one. PROGRAM: of a checked build, such as build/tests/ops_test_checked, with its arguments. Counted in the emulator, by rules: no time, no caches, no compiler for GPUs (simt_check_profile.cpp).
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field


@dataclass
class Line:
    space: str
    op: str
    size: int
    place: str
    requests: int
    lanes: int
    bytes: int
    units: int
    least: int

    @property
    def excess(self):
        return self.units - self.least


@dataclass
class Kernel:
    name: str
    launches: int
    blocks: int
    lines: list = field(default_factory=list)

    def total(self, spaces, attribute):
        return sum(getattr(line, attribute) for line in self.lines if line.space in spaces)


def read(path):
    """Kernels, and how many requests were cut because too many were open."""
    kernels, cut = [], 0
    with open(path, encoding="utf-8") as file:
        for row in file:
            fields = row.rstrip("\n").split("\t")
            if fields[0] == "cut":
                cut = int(fields[1])
            elif fields[0] == "kernel":
                kernels.append(Kernel(fields[1].strip("()"), int(fields[2]), int(fields[3])))
            else:
                space, op, size, place, *counts = fields
                kernels[-1].lines.append(Line(space, op, int(size), place, *map(int, counts)))
    return kernels, cut


def run(program, path):
    return subprocess.run(program, env=dict(os.environ, SIMT_PROFILE=path), stdout=subprocess.DEVNULL, check=False).returncode


def ratio(units, least):
    return f"{units / least:.2f}" if least else "-"


def print_kernels(kernels):
    print(f"{'kernel':44} {'launches':>8} {'requests':>10} {'sectors':>10} {'of least':>8} {'KiB':>9} {'wavefronts':>10} {'of least':>8} {'host KiB':>8}")
    for k in kernels:
        sectors, least, waves, waves_least = (k.total(s, a) for s in (("global", "host"), ("shared",)) for a in ("units", "least"))
        print(f"{k.name:44} {k.launches:8} {k.total(('global', 'host', 'shared'), 'requests'):10} {sectors:10} {ratio(sectors, least):>8} {k.total(('global', 'host'), 'bytes') / 1024:9.0f} "
              f"{waves:10} {ratio(waves, waves_least):>8} {k.total(('host',), 'bytes') / 1024:8.0f}")


def print_lines(kernel, top, everything):
    lines = sorted(kernel.lines, key=lambda line: (-line.excess, -line.units, line.place))
    lines = [line for line in lines if everything or line.excess > 0]
    if not lines:
        return
    print(f"\n{kernel.name}: {kernel.launches} launches, {kernel.blocks} blocks\n{'excess':>10} {'units':>10} {'of least':>8} {'requests':>10} {'lanes':>5}  access")
    for line in lines[:top or None]:
        print(f"{line.excess:10} {line.units:10} {ratio(line.units, line.least):>8} {line.requests:10} {line.lanes / line.requests:5.1f}  {line.space} {line.op} {line.size} B  {line.place}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, default=8)
    parser.add_argument("--kernel", default="")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--raw")
    parser.add_argument("--read")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if bool(options.read) == bool(options.program):
        parser.error("a program, or --read FILE")
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        path = options.read or options.raw or os.path.join(folder, "profile")
        status = run(options.program, path) if options.program else 0
        if status != 0:
            print(f"{options.program[0]}: exit status {status}", file=sys.stderr)
            return 1
        kernels, cut = read(path)
    kernels = sorted((k for k in kernels if options.kernel in k.name), key=lambda k: k.name)
    if cut:
        print(f"{cut} requests were counted before their lanes had come together: too many were open\n")
    print_kernels(kernels)
    for kernel in kernels:
        print_lines(kernel, options.top, options.all)
    return 0


if __name__ == "__main__":
    sys.exit(main())
