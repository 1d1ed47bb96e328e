#!/usr/bin/env python3
"""A test of the access profiler: the costs that it gives the kernels of profile_kernels.cu, which were worked out by hand. Usage: profile_check.py PROFILE_PROBE."""

import os
import sys
import tempfile

import access_profile

# kernel, space, operation, bytes a lane: requests, bytes wanted, sectors or wavefronts, the least
EXPECTED = {
    ("coalesced", "global", "load", 4): (1, 128, 4, 4),
    ("coalesced", "global", "store", 4): (1, 128, 4, 4),
    ("strided", "global", "load", 4): (1, 128, 32, 4),
    ("strided", "global", "store", 4): (1, 128, 4, 4),
    ("misaligned", "global", "load", 4): (1, 128, 5, 4),
    ("misaligned", "global", "store", 4): (2, 256, 8, 8),
    ("misaligned", "host", "load", 4): (1, 128, 5, 4),
    ("broadcast", "global", "load", 4): (1, 4, 1, 1),
    ("broadcast", "global", "store", 4): (1, 128, 4, 4),
    ("rounds", "global", "load", 4): (6, 576, 18, 18),
    ("rounds", "global", "store", 4): (2, 192, 6, 6),
    ("ragged", "global", "load", 4): (2, 192, 6, 6),
    ("ragged", "global", "store", 4): (1, 128, 4, 4),
    ("transpose_conflicting", "global", "load", 4): (32, 4096, 128, 128),
    ("transpose_conflicting", "global", "store", 4): (32, 4096, 128, 128),
    ("transpose_conflicting", "shared", "load", 4): (32, 4096, 1024, 32),
    ("transpose_conflicting", "shared", "store", 4): (32, 4096, 32, 32),
    ("transpose_padded", "global", "load", 4): (32, 4096, 128, 128),
    ("transpose_padded", "global", "store", 4): (32, 4096, 128, 128),
    ("transpose_padded", "shared", "load", 4): (32, 4096, 32, 32),
    ("transpose_padded", "shared", "store", 4): (32, 4096, 32, 32),
    ("wide", "global", "load", 16): (1, 512, 16, 16),
    ("wide", "global", "store", 16): (1, 512, 16, 16),
    ("wide", "shared", "load", 16): (1, 512, 4, 4),
    ("wide", "shared", "store", 16): (1, 512, 4, 4),
    ("pairs", "global", "load", 8): (1, 256, 8, 8),
    ("pairs", "global", "store", 4): (1, 128, 4, 4),
    ("pairs", "shared", "store", 8): (1, 256, 4, 2),
    ("pairs", "shared", "load", 4): (1, 128, 4, 1),
    ("matrix_conflicting", "global", "cp.async", 16): (1, 512, 16, 16),
    ("matrix_conflicting", "global", "store", 4): (1, 128, 4, 4),
    ("matrix_conflicting", "shared", "cp.async", 16): (1, 512, 32, 4),
    ("matrix_conflicting", "shared", "ldmatrix", 16): (1, 512, 32, 4),
    ("matrix_padded", "global", "cp.async", 16): (1, 512, 16, 16),
    ("matrix_padded", "global", "store", 4): (1, 128, 4, 4),
    ("matrix_padded", "shared", "cp.async", 16): (1, 512, 4, 4),
    ("matrix_padded", "shared", "ldmatrix", 16): (1, 512, 4, 4),
    ("counters", "global", "load", 4): (1, 4, 1, 1),
    ("counters", "global", "store", 4): (1, 128, 4, 4),
    ("counters", "shared", "load", 4): (2, 256, 2, 2),
    ("counters", "shared", "store", 4): (2, 132, 2, 2),
    ("counters", "shared", "atomic", 4): (2, 256, 33, 2),
}


def counted(kernels):
    sums = {}
    for kernel in kernels:
        for line in kernel.lines:
            key = (kernel.name, line.space, line.op, line.size)
            if "profile_kernels.cu:" not in line.place:
                print(f"{key}: no source line: {line.place}")
                continue
            sums[key] = tuple(map(sum, zip(sums.get(key, (0, 0, 0, 0)), (line.requests, line.bytes, line.units, line.least))))
    return sums


def main():
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        path = os.path.join(folder, "profile")
        if access_profile.run(sys.argv[1:2], path) != 0:
            print("the probe fails")
            return 1
        kernels, cut = access_profile.read(path)
    sums = counted(kernels)
    wrong = [key for key in sorted(EXPECTED.keys() | sums.keys()) if sums.get(key) != EXPECTED.get(key)]
    for key in wrong:
        print(f"{key}: {sums.get(key)}, expected {EXPECTED.get(key)}")
    print(f"{len(EXPECTED)} costs, {len(wrong)} wrong, {cut} cut")
    return 1 if wrong or cut else 0


if __name__ == "__main__":
    sys.exit(main())
