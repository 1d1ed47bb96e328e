"""What each selector keeps, written from its formula alone: everything in float64, the attention matrix and all. q [n, n_heads, d] and k [n_kv_heads, n, d] are a layer's queries
and keys of the whole prompt; candidates are the positions first..last-1, and a KV head keeps n_free of them on average. Each function gives one ascending list of positions a KV head."""
import numpy as np

SINKS, NEWEST, WINDOW, POOL, CHUNK = 4, 32, 32, 7, 16


def attention(q, k, head, scale, rows):
    """softmax rows of the queries `rows` in one query head, [len(rows), n]; 0 for keys behind the query."""
    group = q.shape[1] // k.shape[0]
    logits = q[rows, head].astype(np.float64) @ k[head // group].astype(np.float64).T * scale
    logits[np.arange(k.shape[1])[None] > np.asarray(rows)[:, None]] = -np.inf
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def window_mean(q, k, head, scale, window):
    """Mean over the newest `window` queries, for the keys before them."""
    n = k.shape[1]
    return attention(q, k, head, scale, np.arange(n - window, n)).mean(0)[:n - window]


def max_pool(s, width):
    half = width // 2
    padded = np.pad(s, half, constant_values=-np.inf)
    return np.max([padded[i:i + len(s)] for i in range(width)], 0)


def of_group(q, k, kv_head):
    group = q.shape[1] // k.shape[0]
    return range(kv_head * group, (kv_head + 1) * group)


def best(scores, first, last, n):
    """The n largest, ties to the lower position."""
    order = np.argsort(-scores[first:last], kind='stable')[:n]
    return np.sort(order + first)


def snapkv_scores(q, k, scale):
    return [np.mean([max_pool(window_mean(q, k, h, scale, WINDOW), POOL) for h in of_group(q, k, g)], 0) for g in range(k.shape[0])]


def snapkv(q, k, scale, first, last, n_free):
    return [best(s, first, last, n_free) for s in snapkv_scores(q, k, scale)]


pyramidkv = snapkv  # inside a layer; pyramidkv_layer_free has the budgets


def adakv(q, k, scale, first, last, n_free):
    heads = k.shape[0]
    scores = [max_pool(np.mean([window_mean(q, k, h, scale, WINDOW) for h in of_group(q, k, g)], 0), POOL) for g in range(heads)]
    flat = np.concatenate([s[first:last] for s in scores])
    winners = np.argsort(-flat, kind='stable')[:heads * n_free] // (last - first)
    share = [4 * int((winners == g).sum()) + n_free for g in range(heads)]  # in fifths of a row: .8 of what the head won and .2 of the even share
    rows = [s // 5 for s in share]
    for g in sorted(range(heads), key=lambda g: (-(share[g] % 5), g))[:heads * n_free - sum(rows)]:
        rows[g] += 1
    return [best(s, first, last, n) for s, n in zip(scores, rows)]


def chunkkv(q, k, scale, first, last, n_free):
    scores = np.mean([window_mean(q, k, h, scale, WINDOW) for h in range(q.shape[1])], 0)
    chunks = {c: np.arange(max(first, c * CHUNK), min(last, (c + 1) * CHUNK)) for c in range(first // CHUNK, (last - 1) // CHUNK + 1)}
    kept = []
    for c in sorted(chunks, key=lambda c: (-scores[chunks[c]].mean(), c)):
        kept += list(chunks[c][:n_free - len(kept)])
    return [np.sort(kept)] * k.shape[0]


def keydiff(q, k, scale, first, last, n_free):
    kept = []
    for keys in k.astype(np.float64):
        unit = keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), 1e-12)
        anchor = unit.mean(0)
        kept.append(best(-(unit * anchor).sum(1) / max(np.linalg.norm(anchor), 1e-12), first, last, n_free))
    return kept


def h2o(q, k, scale, first, last, n_free):
    rows = np.arange(k.shape[1])
    return [best(np.sum([attention(q, k, h, scale, rows).sum(0) for h in of_group(q, k, g)], 0), first, last, n_free) for g in range(k.shape[0])]


def tova(q, k, scale, first, last, n_free):
    scores = np.mean([window_mean(q, k, h, scale, 1) for h in range(q.shape[1])], 0)
    return [best(scores, first, last, n_free)] * k.shape[0]


def streaming(q, k, scale, first, last, n_free):
    return [np.arange(last - n_free, last)] * k.shape[0]


ALL = {f.__name__: f for f in (snapkv, adakv, chunkkv, keydiff, h2o, tova, streaming)} | {'pyramidkv': pyramidkv}


# ---- what the engine adds: who is a candidate, how many a layer keeps, what is kept anyway ----

def candidates(n, budget, recent):
    """first, last, n_free (even), and where the kept newest tokens begin; what the recent window holds is not kept."""
    recent_first = (n - recent) // 128 * 128 if n > recent else 0
    sinks = min(SINKS, budget, n)
    newest = min(NEWEST, budget - sinks, n - sinks)
    first, tail = min(sinks, recent_first), min(n - newest, recent_first)
    last = max(first, tail)
    return first, last, min(budget - sinks - newest, last - first), tail, recent_first


def layer_free(name, layer, n_layers, n, n_candidates, n_free):
    if name != 'pyramidkv' or n < 2 * n_free or n_layers == 1:
        return n_free
    most = min(2 * n_free - n_free // 20, n_candidates)
    exact = most - layer * 2 * (most - n_free) / (n_layers - 1)
    away = np.sign(exact - n_free)
    return int(n_free + away * np.floor(abs(exact - n_free) + 0.5))


def engine_kept(name, q, k, scale, layer, n_layers, budget, recent):
    n = k.shape[1]
    first, last, even, tail, recent_first = candidates(n, budget, recent)
    n_free = layer_free(name, layer, n_layers, n, last - first, even)
    chosen = ALL[name](q, k, scale, first, last, n_free) if n_free else [np.arange(0)] * k.shape[0]
    return [np.concatenate([np.arange(first), c, np.arange(tail, recent_first)]).astype(int) for c in chosen]
