"""What a request takes it gives back: the memory of worker, router and store after 150 requests is what it was after 10. The worker has a limit, and so a page cache."""
import os, re
import pytest
from processes import DOCUMENT, Stack, await_true

REQUESTS, WARM = 150, 10
# Without the allocator's caches of freed pieces, which it counts as used. What is left are ZeroMQ's queues: they grow in segments of 16 KiB, of which one or two come between
# request 10 and 150, and none between 150 and 300.
TUNABLES = {'GLIBC_TUNABLES': 'glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0'}
HEAP_TOLERANCE = 64 << 10
# Of the process: the same, in pages, and freed memory between pieces in use.
PRIVATE_TOLERANCE = 512 << 10


def private_bytes(process):
    """What the process holds alone; the pool is shared memory."""
    with open('/proc/%d/status' % process.pid) as status:
        return int(re.search(r'RssAnon:\s+(\d+) kB', status.read()).group(1)) << 10


def ask(router, i, document):
    """Long prompts that come again, short ones that are all different, a stream, several answers, log-probabilities, one that is refused."""
    kind = i % 6
    prompt = document[:900] if kind < 2 else 'Request number %d asks:' % i
    if kind == 2:
        events = list(router.events('/v1/completions', prompt=prompt, max_tokens=3, temperature=0))
        assert events[-1] == '[DONE]'
    elif kind == 3:
        assert router.request('POST', '/v1/completions', {'prompt': prompt, 'max_tokens': 0})[0] == 400
    elif kind == 4:
        assert len(router.ask('/v1/completions', prompt=prompt, max_tokens=3, n=2, temperature=1, seed=i, logprobs=2, echo=True)['choices']) == 2
    else:
        answer = router.ask('/v1/completions', prompt=prompt, max_tokens=3, temperature=0)
        assert answer['usage']['completion_tokens'] > 0


@pytest.fixture(scope='module')
def stack():
    os.environ.update(TUNABLES)
    with Stack(workers=1, pool='256M', worker_args=['--chunk', '256', '--memory-limit', '64M']) as s:
        for name in TUNABLES:
            del os.environ[name]
        yield s


def await_idle(stack):
    await_true('an idle worker', lambda: stack.router.metric('worker_requests_running') + stack.router.metric('worker_requests_waiting') == 0)


def measure(stack):
    await_idle(stack)
    return stack.workers[0].memory(), {p.name: private_bytes(p) for p in (stack.workers[0], stack.router, stack.store)}


def test_memory_after_150_requests_is_that_after_10(stack):
    with open(DOCUMENT) as f:
        document = f.read()
    for i in range(WARM):
        ask(stack.router, i, document)
    tags, processes = measure(stack)
    for i in range(WARM, REQUESTS):
        ask(stack.router, i, document)
    tags_after, processes_after = measure(stack)
    heap, heap_after = tags.pop('heap'), tags_after.pop('heap')
    print('heap of the worker: %d, then %d bytes' % (heap, heap_after))
    for name in processes:
        print('%s: %d, then %d bytes' % (name, processes[name], processes_after[name]))
    assert tags_after == tags
    assert tags['fast'] == tags['active_kv'] == tags['bridge'] == tags['staging'] == 0
    assert abs(heap_after - heap) <= HEAP_TOLERANCE
    for name in processes:
        assert processes_after[name] <= processes[name] + PRIVATE_TOLERANCE, name
