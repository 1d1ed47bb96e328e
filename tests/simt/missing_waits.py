#!/usr/bin/env python3
"""Leaves out, one after the other, each wait of one stream for another that the engine submits, and expects test_overlap_emulated to find each under one of several orders of the streams.

    missing_waits.py TEST [ORDER]...

TEST is test_overlap_emulated, or test_overlap_checked, which finds all but one under the first order.
"""
import os
import re
import subprocess
import sys

ORDERS = ("natural_order", "streams_in_turns", "one_stream_after_the_other", "a_thread_for_each_stream")
LIMIT_S = 300


def run(test, order, left_out):
    environment = dict(os.environ, SIDE_LEAVE_OUT=str(left_out))
    try:
        return subprocess.run([test, "--filter", f"overlap_emulated/{order}"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return None


def main():
    test, orders = sys.argv[1], sys.argv[2:] or ORDERS
    whole = run(test, orders[0], -1)
    places = re.search(rb"waits at (\d+) places", whole.stdout) if whole else None
    if not places or whole.returncode != 0:
        print("missing_waits: the test fails with all waits in place")
        return 2
    missed = 0
    for left_out in range(int(places.group(1))):
        found = None
        for order in orders:
            result = run(test, order, left_out)
            if result is None or result.returncode != 0:
                found = order
                break
        missed += found is None
        print(f"wait {left_out}: {found or 'MISSED'}", flush=True)
    print(f"{int(places.group(1))} waits, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
