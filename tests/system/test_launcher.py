"""`tidepool serve` as a whole: start, faults, stop. Real processes and the real model."""
import os, signal, subprocess, tempfile, time
import pytest
from processes import BUILD, DOCUMENT, MODEL, await_true
from serve_process import Serve

pytestmark = pytest.mark.skipif(not os.path.exists(MODEL), reason='the model is not there: run deploy/get-model.sh')
STORY = 'Once upon a time there was a lighthouse keeper who counted the pools of the shore. '


def memfds():
    """Pools that some process still holds open."""
    found = set()
    for entry in os.listdir('/proc'):
        if entry.isdigit():
            try:
                for fd in os.listdir('/proc/%s/fd' % entry):
                    if 'tidepool' in os.readlink('/proc/%s/fd/%s' % (entry, fd)) and 'memfd' in os.readlink('/proc/%s/fd/%s' % (entry, fd)):
                        found.add((int(entry), fd))
            except OSError:
                pass
    return found


def test_stop_leaves_nothing_behind():
    before = memfds()
    s = Serve(workers=2)
    assert s.complete(STORY)['choices'][0]['text']
    assert len(s.tree()) >= 4
    s.process.terminate()
    assert s.process.wait(30) == 0, s.log()
    assert s.tree() == []
    assert [n for n in os.listdir(s.runtime) if n.endswith('.sock')] == []
    assert memfds() <= before
    s.close()


def test_second_request_comes_from_the_other_worker_and_the_pool():
    text = open(DOCUMENT).read()[:9000]
    with Serve(workers=2) as s:
        first = s.complete(text + '\nQuestion one?')
        second = s.complete(text + '\nQuestion two?')
        u = second['usage']
        assert first['usage']['prompt_tokens_details']['cached_tokens'] == 0
        assert u['prompt_tokens_details']['cached_tokens'] >= u['prompt_tokens'] * 0.8
        assert first['usage']['tidepool']['worker'] != u['tidepool']['worker']
        assert u['tidepool']['bytes_loaded'] > 0


def test_killed_worker_restarts_and_its_stream_goes_on():
    with Serve(workers=2) as s:
        expected = ''.join(s.stream(STORY, max_tokens=160))
        pieces = s.stream(STORY, max_tokens=160)
        got = next(pieces)
        log = s.log()
        old = [s.kill('worker-0'), s.kill('worker-1')][0]
        got += ''.join(pieces)
        assert got == expected, log
        s.await_restart('worker-0', old)
        assert s.await_complete(STORY)['choices'][0]['text']


def test_killed_kvstore_restarts_and_the_stream_does_not_notice():
    text = open(DOCUMENT).read()[:6000]
    with Serve(workers=1) as s:
        expected = ''.join(s.stream(text, max_tokens=160))
        pieces = s.stream(text, max_tokens=160)
        got = next(pieces)
        old = s.kill('kvstore')
        got += ''.join(pieces)
        assert got == expected
        s.await_restart('kvstore', old)
        assert s.await_complete(text)['choices'][0]['text']
        # The new store fills again: sooner or later a repeated prompt is cached.
        await_true('a hit in the new store', lambda: s.complete(text)['usage']['prompt_tokens_details']['cached_tokens'] > 0, 60)


def test_killed_router_restarts_on_its_port():
    with Serve(workers=1) as s:
        pieces = s.stream(STORY, max_tokens=200)
        next(pieces)
        old = s.kill('router')
        with pytest.raises(Exception):
            list(pieces)
        s.await_restart('router', old)
        assert s.await_complete(STORY)['choices'][0]['text']
        assert len(s.tree()) >= 3


def test_killed_launcher_takes_its_children_along():
    s = Serve(workers=1)
    s.process.kill()
    s.process.wait()
    await_true('the children to end', lambda: not s.tree(), 40)
    s.close()


def test_second_signal_ends_at_once():
    with Serve(workers=1) as s:
        pieces = s.stream(STORY, max_tokens=2000)
        next(pieces)
        s.process.terminate()
        await_true('the first signal to be seen', lambda: 'event=stopping' in s.log(), 10)
        s.process.terminate()
        s.process.wait(10)
        assert s.tree() == []


def test_wrong_option_names_flag_value_and_what_is_allowed():
    r = subprocess.run([os.path.join(BUILD, 'bin', 'tidepool'), 'serve', '--model', MODEL, '--kv-format', 'k9'], capture_output=True, text=True, timeout=20)
    assert r.returncode == 2
    assert '--kv-format' in r.stderr and 'k9' in r.stderr and 'k8v4' in r.stderr


def test_environment_and_file_set_options():
    r = subprocess.run([os.path.join(BUILD, 'bin', 'tidepool'), 'serve', '--model', MODEL], capture_output=True, text=True, timeout=20, env={**os.environ, 'TIDEPOOL_FETCH': 'some'})
    assert r.returncode == 2 and 'TIDEPOOL_FETCH' in r.stderr


def test_file_named_in_the_environment_is_for_the_launcher_alone():
    with tempfile.NamedTemporaryFile('w', suffix='.conf') as file:
        file.write('max-running = 3\n')
        file.flush()
        with Serve(workers=1, env={'TIDEPOOL_CONFIG': file.name}) as s:
            assert s.complete(STORY)['choices'][0]['text']
            assert '--max-running=3' in s.command_of('worker-0')
            assert '--drain-timeout=20' in s.command_of('router')


@pytest.mark.parametrize('program', ['tidepool', 'tidepool-router', 'tidepool-worker', 'tidepool-kvstore'])
def test_help_has_examples(program):
    r = subprocess.run([os.path.join(BUILD, 'bin', program), '--help'], capture_output=True, text=True, timeout=20)
    assert r.returncode == 0 and 'xample' in r.stdout


def test_model_that_cannot_be_loaded_ends_it_at_once(tmp_path):
    broken = tmp_path / 'broken.gguf'
    broken.write_bytes(b'GGUF' + bytes(60))
    r = subprocess.run([os.path.join(BUILD, 'bin', 'tidepool'), 'serve', '--model', str(broken), '--port', '0', '--pool-size', '64M'], capture_output=True, text=True, timeout=60)
    assert r.returncode == 2, r.stderr
    assert 'broken.gguf' in r.stderr and r.stderr.count('event=child_restart') == 0
