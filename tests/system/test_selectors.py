"""The selectors against their formulas in numpy (selector_formulas.py): the same positions, on random queries and keys and on those of the real model."""
import json, os, subprocess
import numpy as np
import pytest
import selector_formulas as formulas
from processes import BUILD, MODEL, ROOT

PROBE = os.path.join(BUILD, 'tests', 'selector_probe')
SHARED = os.environ.get('TIDEPOOL_SHARED', os.path.join(ROOT, '..', 'shared'))
TOKENS = os.path.join(SHARED, 'fixtures', 'logits_smollm2.json')
NAMES = sorted(formulas.ALL)
SCALE = 0.125


def bf16(x):
    """The nearest bf16 of each value, as 16 bits and as fp32 again."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16
    return bits.astype(np.uint16), (bits << 16).astype(np.uint32).view(np.float32)


def read_kept(path):
    """{name: {layer: [positions of head 0, ...]}}."""
    kept = {}
    for line in open(path):
        name, layer, head, *positions = line.split()
        heads = kept.setdefault(name, {}).setdefault(int(layer), [])
        assert len(heads) == int(head)
        heads.append(np.array(positions, int))
    return kept


def run_case(folder, q, k_bits, first, last, n_free, threads=1):
    case, out = os.path.join(folder, 'case'), os.path.join(folder, 'out')
    n, n_heads, d = q.shape
    with open(case, 'wb') as f:
        np.array([n_heads, k_bits.shape[0], d, n, first, last, n_free, threads], np.int32).tofile(f)
        q.astype(np.float32).tofile(f)
        k_bits.tofile(f)
    subprocess.run([PROBE, 'case', case, out], check=True, timeout=300)
    return {name: layers[0] for name, layers in read_kept(out).items()}


def expect_same(name, want, got):
    assert len(want) == len(got), name
    for head, (w, g) in enumerate(zip(want, got)):
        assert np.array_equal(w, g), '%s head %d: %s only by the formula, %s only here' % (name, head, np.setdiff1d(w, g), np.setdiff1d(g, w))


def check_case(folder, q, k, first, last, n_free, threads=1):
    k_bits, k = bf16(k)
    got = run_case(folder, q, k_bits, first, last, n_free, threads)
    assert sorted(got) == NAMES
    for name in NAMES:
        expect_same(name, formulas.ALL[name](q, k, SCALE, first, last, n_free), got[name])


def random_case(seed, n_heads, n_kv_heads, d, n):
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(n, n_heads, d)).astype(np.float32), rng.normal(size=(n_kv_heads, n, d))
    return 2 * q, k + rng.normal(size=(n_kv_heads, 1, d))  # keys with a common direction, as real ones have


@pytest.mark.parametrize('n_heads, n_kv_heads, d, n, first, last, n_free', [
    (9, 3, 64, 1400, 4, 1280, 200),  # several segments of the scan, pooling across their borders
    (4, 2, 64, 1100, 4, 1030, 6),
    (8, 2, 128, 300, 4, 260, 255),   # all but one
    (8, 8, 64, 300, 4, 260, 1),
    (6, 1, 32, 200, 4, 150, 146),    # all of them
    (4, 4, 64, 70, 4, 38, 20),
    (2, 1, 64, 37, 4, 5, 1),
])
def test_random_queries_and_keys(folder, n_heads, n_kv_heads, d, n, first, last, n_free):
    q, k = random_case(n + n_free, n_heads, n_kv_heads, d, n)
    check_case(folder, q, k, first, last, n_free)


def test_budgets_that_heads_share_unevenly(folder):
    """Head 0 attends one key of many, head 1 all alike, head 2 something between: adakv's safeguard holds for the first."""
    q, k = random_case(3, 6, 3, 64, 700)
    q *= np.repeat([12, 0.05, 1], 2).astype(np.float32)[None, :, None]
    k_bits, k = bf16(k)
    got = run_case(folder, q, k_bits, 4, 640, 60)
    expect_same('adakv', formulas.adakv(q, k, SCALE, 4, 640, 60), got['adakv'])
    n = [len(h) for h in got['adakv']]
    assert sum(n) == 3 * 60 and 12 <= min(n) < 30 and max(n) > 90, n


def test_ties_go_to_the_lower_position(folder):
    """Few distinct keys, small whole numbers: equal scores everywhere, to the last bit in any arithmetic."""
    rng = np.random.default_rng(1)
    kinds = rng.integers(-2, 3, size=(2, 5, 32))
    k = np.stack([kinds[h][rng.integers(0, 5, size=500)] for h in range(2)]).astype(np.float64)
    q = np.repeat(rng.integers(-2, 3, size=(1, 4, 32)), 500, 0).astype(np.float32)
    k_bits, k = bf16(k)
    got = run_case(folder, q, k_bits, 4, 450, 77)
    for name in NAMES:
        if name in ('h2o', 'chunkkv'):  # their sums are rounded otherwise here than there, which breaks ties
            continue
        expect_same(name, formulas.ALL[name](q, k, SCALE, 4, 450, 77), got[name])


def test_threads_do_not_matter(folder):
    q, k = random_case(8, 9, 3, 64, 1200)
    k_bits, _ = bf16(k)
    one, two = (run_case(folder, q, k_bits, 4, 1100, 150, threads) for threads in (1, 2))
    for name in NAMES:
        expect_same(name, one[name], two[name])


def read_keys(path, n):
    with open(path, 'rb') as f:
        n_layers, n_heads, n_kv_heads, d = np.fromfile(f, np.int32, 4)
        for layer in range(n_layers):
            q = np.fromfile(f, np.float32, n * n_heads * d).reshape(n, n_heads, d)
            k = np.fromfile(f, np.uint16, n_kv_heads * n * d).astype(np.uint32) << 16
            yield layer, n_layers, q, k.view(np.float32).reshape(n_kv_heads, n, d)


@pytest.mark.parametrize('n, budget, recent', [(600, 128, 32), (600, 304, 0)])
def test_real_queries_and_keys(folder, n, budget, recent):
    """Every layer of the real model through the engine, kept positions with sinks and newest tokens and all. In the second case pyramidkv's first layers would have more than all
    candidates."""
    if not os.path.exists(TOKENS):
        pytest.skip('%s is not here' % TOKENS)
    prompt, out, keys = (os.path.join(folder, name) for name in ('prompt', 'out', 'keys'))
    tokens = json.load(open(TOKENS))['token_ids'][:n]
    np.array([budget, recent, 100, 2, n] + tokens, np.int32).tofile(prompt)
    subprocess.run([PROBE, 'engine', MODEL, prompt, out, keys], check=True, timeout=400)
    kept = read_kept(out)
    assert sorted(kept) == NAMES
    for layer, n_layers, q, k in read_keys(keys, n):
        for name in NAMES:
            expect_same('%s layer %d' % (name, layer), formulas.engine_kept(name, q, k, SCALE, layer, n_layers, budget, recent), kept[name][layer])
