"""A worker of two ranks behind a real router, with the real model: the texts of a worker of one, and streams that outlive a rank."""
import json, os, re, signal, subprocess, threading
from processes import BUILD, DOCUMENT, MODEL, Stack, await_true
from serve_process import Serve

with open(DOCUMENT) as f:
    TEXT = f.read()
# Greedy, and nowhere a near tie: the sums of two ranks have another order than those of one, which shows in the third digit of a log-probability.
PROMPTS = [TEXT[:1500] + '\nIn short, this handbook', TEXT[:1500] + '\nThe first rule is', 'The days of the week are Monday, Tuesday,', 'The alphabet: a, b, c, d, e, f,']
LONG = PROMPTS[1]


def ask(router, prompt, **options):
    answer = router.ask('/v1/completions', prompt=prompt, max_tokens=24, temperature=0, ignore_eos=True, **options)
    return answer['choices'][0]['text'], answer['usage']


def ask_all(router):
    """All prompts at once: the texts, the workers and the cached tokens."""
    out = [None] * len(PROMPTS)

    def one(i):
        out[i] = ask(router, PROMPTS[i])
    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [text for text, _ in out], {u['tidepool']['worker'] for _, u in out}, [u['prompt_tokens_details']['cached_tokens'] for _, u in out]


def ranks_of(log):
    """The newest pid of each follower that a leader has logged."""
    return {rank: int(pid) for rank, pid in re.findall(r'event=rank_started .*rank=(\d+) pid=(\d+)', log)}


def is_gone(pid):
    try:
        with open('/proc/%d/stat' % pid) as f:
            return f.read().rsplit(')', 1)[1].split()[0] == 'Z'
    except OSError:
        return True


def stream(router, prompt, on_text=None, **options):
    text, usage, pieces = '', None, 0
    for event in router.events('/v1/completions', prompt=prompt, temperature=0, ignore_eos=True, stream_options={'include_usage': True}, **options):
        if event == '[DONE]':
            return text, usage
        assert 'error' not in event, event
        if event['choices']:
            text += event['choices'][0]['text']
            pieces += 1
            if on_text and pieces >= 3:
                on_text()
                on_text = None
        else:
            usage = event['usage']
    raise AssertionError('the stream broke off behind ' + repr(text))


def test_two_ranks_say_what_one_says_and_their_streams_outlive_them():
    with Stack(workers=1, router_args=['--heartbeat-ms', '200']) as s:
        plain = s.workers[0]
        expected, workers, _ = ask_all(s.router)
        long_text, _ = stream(s.router, LONG, max_tokens=80)
        assert workers == {plain.name} and plain.stop() == 0
        group = s.start_worker('group', '--tp', '2')
        await_true('the group', lambda: s.router.request('GET', '/live')[2]['workers_ready'] == 1)
        cold, workers, cached = ask_all(s.router)
        assert cold == expected and workers == {'group'}
        assert min(cached[:2]) == 0, 'blocks of one rank are none of two'
        warm, _, cached = ask_all(s.router)
        assert warm == expected and min(cached[:2]) >= 256
        # A client that leaves.
        events = s.router.events('/v1/completions', prompt=PROMPTS[3], temperature=0, ignore_eos=True, max_tokens=2000)
        next(events)
        events.close()
        await_true('the cancelled request to end', lambda: s.router.metric('worker_requests_inflight') == 0)
        plan = json.loads(subprocess.check_output([os.path.join(BUILD, 'bin', 'tidepool-plan'), '--model', MODEL, '--tp', '2', '--threads', '1', '--json']))
        memory = group.memory()
        assert memory['weights'] == plan['weights']['device_bytes'] and memory['workspace'] == plan['layer-major']['workspace_bytes'], (memory, plan)
        again = s.start_worker('plain')
        await_true('two workers', lambda: s.router.request('GET', '/live')[2]['workers_ready'] == 2)
        struck = []

        def strike():
            if s.router.metric('worker_requests_inflight', worker='group') > 0:
                os.kill(ranks_of(group.log())['1'], signal.SIGKILL)
                struck.append(True)
        while not struck:  # until the group is the one that is chosen
            text, usage = stream(s.router, LONG, strike, max_tokens=80)
            assert text == long_text
        assert usage['tidepool']['retries'] == 1 and usage['tidepool']['worker'] == 'plain'
        assert group.popen.wait(20) == 1, group.log()
        assert all(is_gone(pid) for pid in ranks_of(group.log()).values())


def test_launcher_starts_a_group_again_as_a_whole():
    with Serve(workers=1, args=['--tp', '2']) as s:
        expected = ''.join(s.stream(LONG, max_tokens=60))
        first = ranks_of(s.log())
        pieces = s.stream(LONG, max_tokens=60)
        got = next(pieces)
        leader = s.pid_of('worker-0')
        os.kill(first['1'], signal.SIGKILL)
        got += ''.join(pieces)  # with no other worker it waits for the next life of this one
        assert got == expected
        assert s.pid_of('worker-0') != leader and ranks_of(s.log()) != first
        s.process.terminate()
        assert s.process.wait(30) == 0, s.log()
        assert s.tree() == []
