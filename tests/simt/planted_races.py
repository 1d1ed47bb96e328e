#!/usr/bin/env python3
"""A test of the checked build: faults that the fast build of the emulator misses or finds under some seeds alone, and that the checker has to report under the first one.

Two sorts: the scenarios of race_probe, which run in both builds without their fault too (and then nothing may be found), and faults planted in kernels/cuda as in planted_bugs.py, compiled and run in both
builds. Each line says how many of six seeds show the fault in the fast build, and what the checker says. Exit status 0: as expected, 1: not, 2: a fault no longer fits the sources.

Usage: planted_races.py CXX CC FOLDER ARCHIVES [NAME]... ; FOLDER has ops_test, race_probe and both again with _checked, ARCHIVES the libraries of both builds.
"""

import os
import shutil
import subprocess
import sys
import tempfile

from planted_bugs import FOLDER, ROOT, RUN_LIMIT_S, SEEDS, SYNC, Bug, build

CHECKED = ["-g1", "-fsanitize=thread", "-include", os.path.join(ROOT, "tests/simt/simt_check_calls.h"), "-DSIMT_CHECK", "-DSIMT_SERIAL"]
SYNCWARP = "__syncwarp();"

# name, group of ops_test, file, unit to compile, old, new
BUGS = [Bug(*fields) for fields in [
    ("columns: a strip is read by ldmatrix before it is there", "scores", "attn_columns.cuh", "attn_column_sums.cu", f"(uint16_t)0;\n    {SYNCWARP}", "(uint16_t)0;"),
    ("columns: the strip before is overwritten while it is read", "scores", "attn_columns.cuh", "attn_column_sums.cu", f"{SYNCWARP} /* the strip before has been read */", ""),
    ("radix: what is left is overwritten while lanes read it", "select", "radix_select.cuh", "topk.cu", f"unsigned left = r->left;\n    {SYNCWARP}", "unsigned left = r->left;"),
    ("radix: every lane writes its warp's counts", "select", "radix_select.cuh", "topk.cu", "if (lane == 0) {\n            r->warp_greater", "{\n            r->warp_greater"),
    ("columns: sums are written again while they are read", "scores", "attn_columns.cuh", "window_scores.cu", f"{SYNC} /* sums may be written again */", ""),
    ("matmul: two streams share the library's workspace", "matmul", "cuda_device.c", "cuda_device.c", "r = submit_wait(s, device->blas_event);", "r = 0;"),
]]


def run(command, seed):
    """Exit status and the first line that says why; a hang counts as a fault that was found."""
    environment = dict(os.environ, SIMT_SEED=str(seed))
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=RUN_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return 1, "hangs"
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    return done.returncode, ([line for line in lines if line.startswith(("simt: ", "FAIL "))] or lines or [""])[0]


def judge(name, fast, checked, problems):
    n_found = sum(run(fast, seed)[0] != 0 for seed in SEEDS)
    status, line = run(checked, 0)
    reported = status != 0 and line.startswith("simt: ")
    print(f"{n_found} of {len(SEEDS)} | {'reported' if reported else 'MISSED'} | {name} | {line[:230]}", flush=True)
    if not reported:
        problems.append(f"{name}: the checker does not report it")
    if n_found == len(SEEDS):
        problems.append(f"{name}: every seed of the fast build finds it, so that it belongs to planted_bugs.py")


def probe(scenario, folder, problems):
    fast, checked = os.path.join(folder, "race_probe"), os.path.join(folder, "race_probe_checked")
    for program in (fast, checked):
        for seed in SEEDS[:2]:
            status, line = run([program, scenario, "right"], seed)
            if status != 0:
                problems.append(f"{scenario}: {os.path.basename(program)} finds a fault where there is none: {line}")
    judge(scenario, [fast, scenario, "bug"], [checked, scenario, "bug"], problems)


def plant(bug, cxx, cc, folder, archives, problems):
    places = [tempfile.mkdtemp(prefix="planted-") for _ in range(2)]
    try:
        fast = build(bug, places[0], cxx, cc, archives[:2], [])
        checked = build(bug, places[1], cxx, cc, archives[2:], CHECKED)
        judge(bug.name, [os.path.join(folder, "ops_test"), "--plugin", fast, bug.group], [os.path.join(folder, "ops_test_checked"), "--plugin", checked, bug.group], problems)
    finally:
        for place in places:
            shutil.rmtree(place)


def main():
    cxx, cc, folder, backend, simt, backend_checked, simt_checked, *names = sys.argv[1:]
    problems = []
    scenarios = subprocess.run([os.path.join(folder, "race_probe")], stdout=subprocess.PIPE, check=True).stdout.decode().split()
    print("seeds of the fast build that find it | the checked build | fault")
    for scenario in scenarios:
        if not names or scenario in names:
            probe(scenario, folder, problems)
    for bug in BUGS:
        if not names or bug.name in names:
            plant(bug, cxx, cc, folder, [backend, simt, backend_checked, simt_checked], problems)
    print("\n".join(problems) or f"{len(scenarios) + len(BUGS)} faults, all reported (kernels in {FOLDER})")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
