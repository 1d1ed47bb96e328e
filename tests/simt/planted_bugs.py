#!/usr/bin/env python3
"""A test of the tests: plants one bug after the other in the CUDA backend and expects ops_test to find each on the emulator, under one of a few seeds.

Each bug is a replacement in one file. The unit that it is in is compiled anew (headers shadow the tree's by the include path), linked with the rest into a plugin, and run by
`ops_test --plugin`. Usage: planted_bugs.py CXX CC OPS_TEST BACKEND_ARCHIVE SIMT_ARCHIVE [--every=N] [NAME]... (--every: one bug of N). Exit status 0: all were found, 1: some were not, 2: a bug no longer fits the sources.
"""

import os
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FOLDER = "kernels/cuda"
SEEDS = (0, 1, 2, 3, 4, 5)
RUN_LIMIT_S = 60

SYNC = "__syncthreads();"


class Bug:
    def __init__(self, name, group, file, unit, old, new):
        self.name, self.group, self.file, self.unit, self.old, self.new = name, group, file, unit, old, new


# name, group of ops_test, file, unit to compile, old, new
BUGS = [Bug(*fields) for fields in [
    # barriers that are missing
    ("sum: partial sums are read before they are there", "elementwise", "math.cuh", "rmsnorm.cu", f"part[warp] = x;\n    {SYNC}", "part[warp] = x;"),
    ("qkv_finish: butterflies without a barrier", "elementwise", "qkv_finish.cu", "qkv_finish.cu", f"{SYNC} /* the other side", "/* the other side"),
    ("qkv_finish: one buffer for both sides", "elementwise", "qkv_finish.cu", "qkv_finish.cu", "h *= 2, side ^= 1", "h *= 2"),
    ("radix: bins are counted while others still clear them", "select", "radix_select.cuh", "topk.cu", f"r->bins[b] = 0;\n        {SYNC}", "r->bins[b] = 0;"),
    ("radix: counts of a chunk are overwritten by the next", "select", "radix_select.cuh", "topk.cu", f"= (int32_t)i;\n        {SYNC}", "= (int32_t)i;"),
    ("block_encode: codes are interleaved before they are there", "blocks", "block_encode.cu", "block_encode.cu", f"{SYNC}\n    interleave", "interleave"),
    ("block_encode: the page is read back too early", "blocks", "block_encode.cu", "block_encode.cu", f"{SYNC} /* the page is read back", "/* the page is read back"),
    ("attn_prefill: the next tile is copied over one in use", "attention", "attn_prefill.cu", "attn_prefill.cu", f"{SYNC} /* the next round", "/* the next round"),
    ("decode: results are written over tiles in use", "decode", "attn_decode_parts.cuh", "attn_decode.cu", f"{SYNC} /* nobody reads", "/* nobody reads"),
    ("decode: the warps' maxima are read before they are there", "decode", "attn_decode.cu", "attn_decode.cu", f"part[warp * n + lane] = x;\n    {SYNC}", "part[warp * n + lane] = x;"),
    ("decode: totals are read before they are there", "decode", "attn_decode.cu", "attn_decode.cu", f"head_totals(a, item, part, total);\n    {SYNC}", "head_totals(a, item, part, total);"),
    ("sample: the maximum of before is still read", "sample", "sample.cu", "sample.cu", f"s->best = 0;\n    {SYNC}", "s->best = 0;"),
    ("window_scores: keys are copied over those in use", "scores", "window_scores.cu", "window_scores.cu", f"{SYNC} /* the keys before have been read */", ""),
    ("keydiff: parts are summed before they are there", "scores", "keydiff_scores.cu", "keydiff_scores.cu", f"sum[j];\n    {SYNC}", "sum[j];"),
    ("page_summaries: butterflies overwrite what others read", "scores", "page_summaries.cu", "page_summaries.cu", f"x[t][c ^ h];\n        {SYNC}", "x[t][c ^ h];"),
    # asynchronous copies and streams
    ("attn_prefill: a tile is attended before it arrived", "attention", "attn_prefill.cu", "attn_prefill.cu", "copy_async_wait<1>();", "copy_async_wait<2>();"),
    ("decode rows: keys are attended before they arrived", "decode", "attn_decode_rows.cuh", "attn_decode.cu", "copy_async_wait<ROW_TILES - 1>();\n        __syncwarp();\n        if (at", "copy_async_wait<ROW_TILES>();\n        __syncwarp();\n        if (at"),
    ("decode rows: values are copied over keys in use", "decode", "attn_decode_rows.cuh", "attn_decode.cu", "__syncwarp();\n        if (at < p.n)", "__syncwarp();\n        row_tile_copy<D>(tile, p.rows.v, p, at);\n        if (at < p.n)"),
    ("decode rows: values are never waited for", "decode", "attn_decode_rows.cuh", "attn_decode.cu", "copy_async_wait<ROW_TILES - 1>();\n        __syncwarp();\n        if (row", "if (row"),
    ("decode rows: the warps' maxima are read before they are there", "decode", "attn_decode_rows.cuh", "attn_decode.cu", f"{SYNC}\n    UNROLL for (int half", "UNROLL for (int half"),
    ("decode rows: results are written over weights that others read", "decode_fetch", "attn_decode_rows.cuh", "attn_decode.cu", f"{SYNC} /* nobody reads values", "/* nobody reads values"),
    ("decode rows: weights of a part run into those of the next", "decode_fetch", "attn_decode.cuh", "attn_decode.cu", "a.group * DECODE_PART_ROW;", "a.group * a.head_dim;"),
    ("decode rows: a head gets the weights of the one before", "decode_fetch", "attn_decode_rows.cuh", "attn_decode.cu", "{ weight = memory; }", "{ weight = (&memory)[-8]; }"),
    ("streams do not wait for events", "device", "cuda_device.c", "cuda_device.c", "return r < 0 ? r : submit_wait(stream, event->cuda);", "return r;"),
    ("scratch of the arena is freed while it is used", "decode", "cuda_device.c", "cuda_device.c", "int r = stream_wait_idle(s);\n        cuda_arena_free", "int r = 0;\n        cuda_arena_free"),
    ("embed: the kernel gets the host's ids", "matmul", "embed.cu", "embed.cu", "(const int32_t *)ids_device", "ids"),
    ("steps: arguments are written before they were sent", "steps", "step.c", "step.c", "const int r = device_wait_event(s->device, step->args_sent);", "const int r = 0;"),
    ("steps: the gather stream does not join its graph", "decode_fetch", "step.c", "step.c", "r = submit_wait(s, s->step->joined[i]);", "r = 0;"),
    ("steps: the gather stream does not wait for a graph", "decode_fetch", "step.c", "step.c", "return r == 0 ? sides_follow(s, step->launched) : r;", "return r == 0 ? submit_record(s, step->launched) : r;"),
    ("steps: a graph is given up while it runs", "steps", "step.c", "step.c", "        wait_launched(s);\n", ""),
    ("steps: arguments are not sent", "steps", "step.c", "step.c", "r = submit_copy(s, step->args_device, step->args_host, step->args_used);", "r = 0;"),
    ("steps: any graph of the same length is launched", "steps", "step.c", "step.c", "g->record.n > 0 && memcmp(g->record.bytes, step->record.bytes, g->record.n) == 0", "g->record.n > 0"),
    ("steps: a capture of other ops is kept", "steps", "step.c", "step.c", "step->blocked = true;\n        else\n", "step->compared += bytes;\n        else\n"),
    ("page_cache: lookups do not wait for what is chosen", "page_cache", "page_cache.cu", "page_cache.cu", "r == 0 ? submit_wait(c->gather, c->chosen) : r", "r"),
    ("page_cache: pages are read before they are there", "page_cache", "page_cache.cu", "page_cache.cu", "return submit_wait(c->stream, c->fetched[round % PAGE_ROUNDS]);",
     "return 0;"),
    ("attn_prefill: the own block is read where the others are", "attention", "attn_prefill.cu", "attn_prefill.cu", "own = a.p.own_k && first >= t.own", "own = false"),
    ("block_encode: values go to the rows of another head", "blocks", "block_encode.cu", "block_encode.cu", "job.v + head * job.head_stride + row", "job.v + row"),
    ("page_cache: staging is written over while it is attended", "decode_fetch", "page_cache.cu", "page_cache.cu", "r = submit_wait(c->gather, c->attended[side]);", "r = 0;"),
    ("decode pages: pages are attended while they arrive", "decode_fetch", "attn_decode_parts.cuh", "attn_decode.cu", "(arrives != 0) != (a.pass == DECODE_ARRIVED)", "a.pass == DECODE_ARRIVED"),
    ("copy_batch: what does not fill a batch is left out", "device", "copy_batch.c", "copy_batch.c", "return r == 0 ? flush(&b) : r;", "return r;"),
    # arithmetic and indices
    ("attn_prefill: keys of the prefix are attended twice", "prefix", "attn_prefill.cu", "attn_prefill.cu", "a.first_key = a.origin", "a.first_key = a.origin - 128"),
    ("attn_prefill: a split begins a tile late", "prefix", "attn_prefill.cu", "attn_prefill.cu", "from = a.first_key + (int64_t)blockIdx.y * a.split_keys,", "from = a.first_key + (int64_t)blockIdx.y * (a.split_keys + 64),"),
    ("attn_prefill: the prefix weighs as if its maximum were the largest", "prefix", "attn_prefill.cu", "attn_prefill.cu", "merge_weight(prefix, e.max);", "merge_weight(prefix, prefix);"),
    ("cudnn_attention: queries and keys swap their lengths", "prefix", "cudnn_attention.c", "cudnn_attention.c", "run->lengths, run->lengths + 1", "run->lengths + 1, run->lengths"),
    ("page_cache: a page that the round before handed out gives way", "page_cache", "page_cache.cu", "page_cache.cu", "stamp == epoch || stamp == epoch - 1", "stamp == epoch"),
    ("gather_pages: the last piece is missing", "page_cache", "gather_pages.cu", "gather_pages.cu", "+ 32 * i < n)", "+ 32 * i < n - 1)"),
    ("attn_prefill: a query does not see itself", "attention", "attn_prefill.cu", "attn_prefill.cu", "position > a.p.pos0 + query", "position >= a.p.pos0 + query"),
    ("attn_prefill: the last key is left out", "attention", "attn_prefill.cu", "attn_prefill.cu", "end - 1) + 1; /* behind", "end - 1); /* behind"),
    ("attn_tile: half of a row's lanes have no say in the maximum", "attention", "attn_tile.cuh", "attn_prefill.cu", "x < 4; x *= 2) /* the four", "x < 2; x *= 2) /* the four"),
    ("decode rows: one row too many", "decode", "attn_decode_rows.cuh", "attn_decode.cu", "key < p.n ? decode_logit", "key <= p.n ? decode_logit"),
    ("decode pages: kept tokens are attended twice", "decode", "attn_decode_parts.cuh", "attn_decode.cu", "tokens >> key & 1 ?", "true ?"),
    ("key biases: sine and cosine are swapped", "attention", "attn_bias.cuh", "attn_prefill.cu", "ab[2 * j + 1], s, logit", "ab[2 * j + 1], c, logit"),
    ("decode: counts of pages are overwritten by the next round", "decode", "attn_decode.cu", "attn_decode.cu", f"- n_before] = i;\n        {SYNC}", "- n_before] = i;"),
    ("index: half of a page's tokens have no say in its score", "decode", "attn_index.cuh", "attn_decode.cu", "x < 32; x *= 2)\n        sum", "x < 16; x *= 2)\n        sum"),
    ("index: items that share a block get the mask of another", "decode", "attn_index.cuh", "attn_decode.cu", "tokens, owner)", "tokens, 0)"),
    ("index: who does not share an entry is scored by it all the same", "decode", "attn_index.cuh", "attn_decode.cu", "entry == shared);", "tokens != 0);"),
    ("index: the tile is used before it is there", "decode", "attn_index.cuh", "attn_decode.cu", f"{SYNC} /* the tile is there */", ""),
    ("radix: one tie too many", "select", "radix_select.cuh", "topk.cu", "equal && e < n_equal", "equal && e <= n_equal"),
    ("block_encode: ties are rounded up", "blocks", "block_encode.cu", "block_encode.cu", "rintf(code)", "floorf(code + 0.5f)"),
    ("gather_rows: the last piece of a row is missing", "select", "gather_rows.cu", "gather_rows.cu", "i < pieces;", "i < pieces - 1;"),
    ("sample: top-p cuts one too early", "sample", "sample.cu", "sample.cu", "s->bins[bin] < left; bin++", "s->bins[bin] + 1 < left; bin++"),
    ("sample: every row reads the arguments of the first", "sample", "sample.cu", "sample.cu", "a = rows[blockIdx.x];", "a = rows[0];"),
    ("sample: answers go to the rows that were refused", "sample", "sample.cu", "sample.cu", "if (rows[i].status < 0)\n            continue;\n        rows[i].status", "rows[i].status"),
    ("weights: the second half of the scales", "matmul", "weight_value.cuh", "weight_pack.cu", "s[sub - 4] >> 6 << 4, m", "s[sub - 4] >> 6 << 3, m"),
]]


def mutate(bug, folder):
    """Writes the file with the bug below `folder`, under its path in the tree."""
    with open(os.path.join(ROOT, FOLDER, bug.file), encoding="utf-8") as file:
        text = file.read()
    if text.count(bug.old) < 1:
        print(f"planted_bugs: {bug.name}: {bug.file} has no {bug.old!r}")
        sys.exit(2)
    path = os.path.join(folder, FOLDER, bug.file)
    os.makedirs(os.path.dirname(path))
    with open(path, "w", encoding="utf-8") as file:
        file.write(text.replace(bug.old, bug.new))
    return path


def build(bug, folder, cxx, cc, archives, options=()):
    mutated = mutate(bug, folder)
    source = mutated if bug.file == bug.unit else os.path.join(ROOT, FOLDER, bug.unit)
    is_c = bug.unit.endswith(".c")
    object_file, plugin = os.path.join(folder, "unit.o"), os.path.join(folder, "plugin.so")
    compiler = [cc, "-std=gnu17", "-D_GNU_SOURCE"] if is_c else [cxx, "-std=gnu++17", "-x", "c++"]
    subprocess.run([*compiler, "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", *options, f"-I{folder}", f"-I{ROOT}", "-isystem", f"{ROOT}/tests/simt/include", "-w", "-c", source, "-o",
                    object_file], check=True)
    # Members of the archive whose symbols the unit defines are not taken.
    subprocess.run([cxx, "-shared", "-o", plugin, object_file, "-Wl,-u,tidepool_cuda_backend", *archives, f"-Wl,--version-script={ROOT}/{FOLDER}/plugin.map", "-lpthread", "-ldl"], check=True)
    return plugin


def is_found(bug, plugin, ops_test):
    for seed in SEEDS:
        environment = dict(os.environ, SIMT_SEED=str(seed))
        try:
            run = subprocess.run([ops_test, "--plugin", plugin, bug.group], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=RUN_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return seed, "hangs"
        if run.returncode != 0:
            lines = run.stdout.decode(errors="replace").strip().splitlines()
            reports = [line for line in lines if line.startswith(("FAIL ", "simt: "))]
            return seed, (reports or lines or ["?"])[0][:150]
    return None, ""


def main():
    cxx, cc, ops_test, backend, simt, *names = sys.argv[1:]
    every = int(names.pop(0)[len("--every="):]) if names and names[0].startswith("--every=") else 1
    missed, chosen = [], [bug for bug in BUGS if not names or bug.name in names][::every]
    for bug in chosen:
        folder = tempfile.mkdtemp(prefix="planted-")
        try:
            seed, how = is_found(bug, build(bug, folder, cxx, cc, [backend, simt]), ops_test)
        finally:
            shutil.rmtree(folder)
        print(f"{'MISSED' if seed is None else f'seed {seed}'} | {bug.name} | {how}", flush=True)
        if seed is None:
            missed.append(bug.name)
    print(f"{len(chosen)} bugs, {len(missed)} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
