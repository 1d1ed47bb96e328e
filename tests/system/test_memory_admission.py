"""Admission is the arithmetic of `tidepool plan`: what fits by a byte is served, what never fits is refused with the numbers, what does not fit now waits."""
import json, os, re, subprocess, threading
import pytest
from processes import BUILD, MODEL, Stack, await_true

CONTEXT, ANSWER = 640, 40
SHAPE = ['--context', str(CONTEXT), '--chunk', '128', '--max-running', '4']


@pytest.fixture(scope='module')
def plan():
    command = [os.path.join(BUILD, 'bin', 'tidepool'), 'plan', '--model', MODEL, '--max-new', str(ANSWER), '--threads', '1', '--json', *SHAPE]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.fixture(scope='module')
def limit(plan):
    return plan['layer-major']['peak_total_bytes']


def test_wrong_use_of_plan_ends_with_2_and_names_the_option():
    for args, text in [(['--model', MODEL, '--context', '9000'], '--context 9000'), (['--model', 'none.gguf'], 'none.gguf'), (['--model', MODEL, '--workers', '0'], 'workers')]:
        run = subprocess.run([os.path.join(BUILD, 'bin', 'tidepool'), 'plan', *args], capture_output=True, text=True)
        assert run.returncode == 2 and text in run.stderr and not run.stdout, run


def start(limit):
    return Stack(workers=1, worker_args=[*SHAPE, '--memory-limit', str(limit)])


def body(n_prompt, seed=0, **options):
    """A prompt of exactly n tokens."""
    return {'prompt': [100 + (i * 37 + seed) % 4000 for i in range(n_prompt)], 'max_tokens': ANSWER, 'temperature': 0, 'ignore_eos': True, **options}


def test_request_that_needs_the_whole_limit_is_served_and_one_byte_less_is_refused(plan, limit):
    with start(limit) as s:
        answer = s.router.ask('/v1/completions', **body(CONTEXT - ANSWER))
        assert answer['usage']['completion_tokens'] == ANSWER and answer['usage']['prompt_tokens'] == CONTEXT - ANSWER
        # What it took is what was planned; when the answer's blocks go to the pool is the store's affair.
        peaks, planned = s.workers[0].memory('peak_bytes'), plan['layer-major']['peak_bytes']
        assert peaks['weights'] == plan['weights']['device_bytes']
        assert {tag: peaks[tag] for tag in planned if tag not in ('weights', 'staging')} == {tag: planned[tag] for tag in planned if tag not in ('weights', 'staging')}
        assert peaks['staging'] <= planned['staging']
    with start(limit - 1) as s:
        status, _, answer = s.router.request('POST', '/v1/completions', body(CONTEXT - ANSWER))
        assert status == 400, answer
        text = answer['error']['message']
        numbers = [int(n) for n in re.findall(r'\d+', text)]
        assert {plan['layer-major']['request_bytes'], plan['layer-major']['workspace_bytes'], limit - 1, limit} <= set(numbers), text
        assert '--memory-limit %d' % limit in text and 'max_tokens' in text
        assert answer['error']['code'] == 'context_length_exceeded'
        # One that is shorter fits.
        assert s.router.ask('/v1/completions', **body(CONTEXT - ANSWER - 128))['usage']['completion_tokens'] == ANSWER


def test_request_that_does_not_fit_now_waits_and_is_served(limit):
    """Two requests that fit alone: the second starts when the first has ended."""
    with start(limit) as s:
        first = s.router.events('/v1/completions', **body(400, max_tokens=200))
        next(first)  # its prompt is done
        answers = []
        second = threading.Thread(target=lambda: answers.append(s.router.request('POST', '/v1/completions', body(CONTEXT - ANSWER, seed=5))))
        second.start()
        await_true('a request that waits in the worker', lambda: s.router.metric('worker_requests_waiting') == 1)
        assert not answers
        assert list(first)[-1] == '[DONE]'
        second.join(60)
        status, _, answer = answers[0]
        assert status == 200 and answer['usage']['completion_tokens'] == ANSWER
        done = [line for line in s.workers[0].log().splitlines() if 'event=finished' in line or 'event=prefilled' in line]
        assert [re.search(r'event=(\w+)', line).group(1) for line in done] == ['prefilled', 'finished', 'prefilled', 'finished']
