"""A worker dies while it streams: the client sees the very text that a run without the fault gives, whoever goes on with it."""
import re, signal, threading
import pytest
from processes import DOCUMENT, Stack, await_true

with open(DOCUMENT) as f:
    PROMPT = f.read()[:1200]  # more than two blocks, so that the pool has a part in it
N = 150
ASK = dict(prompt=PROMPT, max_tokens=N, temperature=0.8, seed=7, ignore_eos=True)


def read(router, on_text=None, after=1, **ask):
    """The text and the usage; on_text is called once, behind `after` pieces of text."""
    text, usage, pieces = '', None, 0
    for event in router.events('/v1/completions', stream_options={'include_usage': True}, **{**ASK, **ask}):
        if event == '[DONE]':
            return text, usage
        assert 'error' not in event, event
        if event['choices']:
            text += event['choices'][0]['text']
            pieces += bool(event['choices'][0]['text'])
            if on_text and pieces >= after:
                on_text()
                on_text = None
        else:
            usage = event['usage']
    raise AssertionError('the stream broke off behind ' + repr(text))


@pytest.fixture(scope='module')
def own_stack():
    with Stack(workers=2, router_args=['--heartbeat-ms', '200', '--worker-wait', '60']) as s:
        yield s


def holder(stack):
    """The worker that has the request."""
    for worker in stack.workers:
        if stack.router.metric('worker_requests_inflight', worker=worker.name) > 0:
            return worker
    raise AssertionError('nobody has it')


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGSTOP])
def test_stream_continues_on_the_other_worker(own_stack, number):
    router = own_stack.router
    expected, usage = read(router)
    assert usage['completion_tokens'] == N
    hit = []

    def strike():
        hit.append(holder(own_stack))
        hit[0].kill(number)
    text, usage = read(router, strike)
    assert text == expected
    assert usage['completion_tokens'] == N and usage['tidepool']['retries'] == 1 and usage['tidepool']['worker'] != hit[0].name
    if number == signal.SIGSTOP:
        hit[0].kill(signal.SIGCONT)  # it cancels what it had, says Ready and is back
    else:
        own_stack.workers[own_stack.workers.index(hit[0])] = own_stack.start_worker(hit[0].name)
    await_true('two workers', lambda: router.request('GET', '/live')[2]['workers_ready'] == 2)
    assert read(router)[0] == expected


def test_stream_continues_from_the_blocks_of_the_answer(own_stack):
    """What the dead worker had made is loaded, not made again: at most a block and what was on its way to the pool."""
    router = own_stack.router
    expected, _ = read(router, max_tokens=420)
    hit = []

    def strike():
        hit.append(holder(own_stack))
        hit[0].kill()
    text, usage = read(router, strike, after=330, max_tokens=420)
    assert text == expected
    assert usage['completion_tokens'] == 420 and usage['tidepool']['retries'] == 1
    own_stack.workers[own_stack.workers.index(hit[0])] = own_stack.start_worker(hit[0].name)
    other = next(w for w in own_stack.workers if w.name == usage['tidepool']['worker'])
    known, restored = max(tuple(map(int, m)) for m in re.findall(r'event=prefilled .*known_tokens=(\d+) restored_tokens=(\d+)', other.log()))
    assert known >= 330 and restored >= 128 and known - restored < 128 + 128, (known, restored)
    await_true('two workers', lambda: router.request('GET', '/live')[2]['workers_ready'] == 2)


def test_stream_waits_for_a_worker_when_none_is_left(own_stack):
    router = own_stack.router
    expected, _ = read(router)
    started = threading.Event()

    def strike():
        for worker in own_stack.workers:
            worker.kill()
            worker.popen.wait()
        started.set()
    out = []
    reader = threading.Thread(target=lambda: out.append(read(router, strike)))
    reader.start()
    assert started.wait(60)
    own_stack.workers = [own_stack.start_worker('w0')]
    reader.join(120)
    assert out and out[0][0] == expected


def test_stream_survives_the_kvstore(own_stack):
    router = own_stack.router
    expected, _ = read(router)
    text, usage = read(router, lambda: (own_stack.store.kill(), own_stack.store.popen.wait()))
    assert text == expected and usage['tidepool']['retries'] == 0
    await_true('the index to be emptied', lambda: router.metric('prefix_index_blocks') == 0)
    assert read(router)[0] == expected, 'without a store'
