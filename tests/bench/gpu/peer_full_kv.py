"""The peer of tidepool-gpubench's decode table: the same shape with all KV in device memory in bf16, its products by cuBLAS and its attention by the library kernel that is fastest here
(cuDNN's or flash through PyTorch), a whole step in one CUDA graph. Nothing else of a step is counted (no norms, RoPE, sampling, no host), so the figure is an upper bound of what a server
with full KV reaches. Also prints what the card and the bus give: the ceilings.

    python3 peer_full_kv.py [--context 130048] [--layers 32] [--steps 20]
"""
import argparse
import statistics
import sys

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as e:
    sys.exit(f'peer_full_kv.py: {e}: it needs PyTorch')

HEADS, KV_HEADS, D, DIM, FFN, VOCAB = 32, 8, 128, 4096, 14336, 128256
BACKENDS = {'cudnn': SDPBackend.CUDNN_ATTENTION, 'flash': SDPBackend.FLASH_ATTENTION}


def milliseconds(run, n):
    """Median of n runs, events around each."""
    times = []
    for _ in range(n + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def random(*shape):
    return torch.randn(*shape, device='cuda', dtype=torch.bfloat16)


def ceilings():
    print('\n| ceiling | measured |\n|---|---|')
    x = torch.empty(1 << 30, device='cuda', dtype=torch.uint8).random_()
    y = torch.empty_like(x)
    print(f'| device copy, read + write | {2 * x.numel() / milliseconds(lambda: y.copy_(x), 10) / 1e9:.2f} TB/s |')
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    print(f'| host to device | {x.numel() / milliseconds(lambda: x.copy_(host, non_blocking=True), 5) / 1e6:.1f} GB/s |')
    print(f'| device to host | {x.numel() / milliseconds(lambda: host.copy_(x, non_blocking=True), 5) / 1e6:.1f} GB/s |')
    a, b = random(8192, 8192), random(8192, 8192)
    print(f'| bf16 product, 8,192 cubed | {2 * 8192 ** 3 / milliseconds(lambda: a @ b, 10) / 1e9:.0f} TFLOP/s |')


def layer_weights():
    return [random(HEADS * D + 2 * KV_HEADS * D, DIM), random(DIM, HEADS * D), random(2 * FFN, DIM), random(DIM, FFN)]


def attend(q, k, v, backend):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def best_backend(q, k, v):
    times = {}
    for name, backend in BACKENDS.items():
        try:
            times[name] = milliseconds(lambda: attend(q, k, v, backend), 5)
        except RuntimeError:
            continue
    if not times:
        raise RuntimeError('no library kernel takes this shape')
    return min(times, key=times.get)


def step_ms(weights, head, caches, batch, steps):
    """caches: (k, v) of each layer, [batch, KV_HEADS, context, D], or of one sequence that all attend: then the batch goes into the query heads of a KV head, which reads KV once."""
    shared = caches[0][0].shape[0] == 1
    q = random(1, HEADS * batch, 1, D) if shared else random(batch, HEADS, 1, D)
    x = random(batch, DIM)
    backend = best_backend(q, *caches[0])

    def step():
        y = x
        for w, (k, v) in zip(weights, caches):
            y @ w[0].T
            o = attend(q, k, v, BACKENDS[backend]).reshape(batch, HEADS * D)
            y = y + o @ w[1].T
            g = y @ w[2].T
            y = y + (F.silu(g[:, :FFN]) * g[:, FFN:]) @ w[3].T
        return y @ head.T

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return milliseconds(graph.replay, steps), backend


def main():
    p = argparse.ArgumentParser()
    p.add_argument('--context', type=int, default=130048)
    p.add_argument('--layers', type=int, default=32)
    p.add_argument('--steps', type=int, default=20)
    p.add_argument('--batches', default='1,4,7')
    p.add_argument('--shared', default='4,16,64')
    o = p.parse_args()
    torch.manual_seed(1)
    print(f'{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}')
    ceilings()
    torch.cuda.empty_cache()
    weights, head = [layer_weights() for _ in range(o.layers)], random(VOCAB, DIM)
    print(f'\nFull KV in bf16 behind {o.context} tokens\n\n| KV | sequences | tokens/s | step, ms | attention by |\n|---|---|---|---|---|')
    for shared, batches in ((False, o.batches), (True, o.shared)):
        for batch in [int(x) for x in batches.split(',') if x]:
            torch.cuda.empty_cache()
            caches = None
            try:
                caches = [tuple(random(1 if shared else batch, KV_HEADS, o.context, D) for _ in range(2)) for _ in range(o.layers)]
                ms, backend = step_ms(weights, head, caches, batch, o.steps)
                print(f'| {"one document, read once" if shared else "a document each"} | {batch} | {batch * 1000 / ms:.1f} | {ms:.2f} | {backend} |', flush=True)
            except (torch.OutOfMemoryError, RuntimeError) as e:
                print(f'| {"one document" if shared else "a document each"} | {batch} | {type(e).__name__}: {str(e).splitlines()[0][:80]} | | |', flush=True)
            del caches


main()
