"""Real processes for system tests. Each runs in a folder of its own and ends with the object, at the latest with the test (parent-death signal)."""
import ctypes, http.client, json, os, re, signal, socket, subprocess, tempfile, time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get('TIDEPOOL_BUILD', os.path.join(ROOT, 'build'))
MODEL = os.path.join(ROOT, 'models', 'SmolLM2-135M-Instruct.Q4_1.gguf')
DOCUMENT = os.path.join(ROOT, 'deploy', 'demo', 'handbook.txt')
PR_SET_PDEATHSIG = 1


def await_true(what, condition, timeout=60):
    """Polls until `condition()` is true and returns its value; for states of other processes that send no event."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError('timed out after %g s waiting for %s' % (timeout, what))


def _die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """A program of build/bin with its log in a file."""

    def __init__(self, program, args, folder, name=None, env=None):
        self.name = name or program
        self.log_path = os.path.join(folder, self.name + '.log')
        command = [os.path.join(BUILD, 'bin', program), *args]
        self.log_start = os.path.getsize(self.log_path) if os.path.exists(self.log_path) else 0  # of an earlier life
        with open(self.log_path, 'ab') as log:
            self.popen = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=_die_with_parent, env={**os.environ, **(env or {})})
        self.pid = self.popen.pid

    def log(self):
        with open(self.log_path, 'rb') as f:
            f.seek(self.log_start)
            return f.read().decode(errors='replace')

    def await_log(self, text, timeout=60):
        def seen():
            assert self.popen.poll() is None, '%s ended with %s:\n%s' % (self.name, self.popen.returncode, self.log())
            return text in self.log()
        await_true('"%s" in the log of %s' % (text, self.name), seen, timeout)

    def kill(self, number=signal.SIGKILL):
        self.popen.send_signal(number)

    def stop(self, timeout=30):
        """SIGTERM, then the exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.terminate()
            try:
                self.popen.wait(timeout)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
                raise AssertionError('%s did not stop within %d s:\n%s' % (self.name, timeout, self.log()[-4000:]))
        return self.popen.returncode

    def close(self):
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()


class Worker(Process):
    """tidepool-worker."""

    def memory(self, field='bytes'):
        """What it logs on SIGUSR1: {tag: bytes held}, or with 'peak_bytes' the most ever held."""
        start = len(self.log())
        self.kill(signal.SIGUSR1)
        await_true('the memory report', lambda: 'tag=heap' in self.log()[start:])
        tags = {}
        for line in self.log()[start:].splitlines():
            fields = dict(re.findall(r'(\w+)=(\S+)', line))
            if fields.get('event') == 'memory' and field in fields:
                tags[fields['tag']] = int(fields[field])
        return tags


class Router(Process):
    """tidepool-router on a free port."""

    def __init__(self, folder, args=(), env=None, model=MODEL):
        self.endpoint = 'ipc://' + os.path.join(folder, 'router.sock')
        self.port_file = os.path.join(folder, 'port')
        super().__init__('tidepool-router', ['--model', model, '--endpoint', self.endpoint, '--port', '0', '--port-file', self.port_file, *args], folder, 'router', env)
        self.await_log('event=listening')
        with open(self.port_file) as f:
            self.port = int(f.read())
        self.url = 'http://127.0.0.1:%d' % self.port

    def request(self, method, path, body=None, headers=None, timeout=60):
        """(status, headers, body); the body parsed where it is JSON."""
        c = http.client.HTTPConnection('127.0.0.1', self.port, timeout=timeout)
        data = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body)
        try:
            c.request(method, path, data, {'Content-Type': 'application/json', **(headers or {})})
            r = c.getresponse()
            raw = r.read()
        finally:
            c.close()
        is_json = (r.getheader('Content-Type') or '').startswith('application/json')
        return r.status, dict(r.getheaders()), json.loads(raw) if is_json and raw else raw

    def ask(self, path, **body):
        status, _, answer = self.request('POST', path, body)
        assert status == 200, answer
        return answer

    def events(self, path, **body):
        """The events of a stream, parsed; '[DONE]' as it is."""
        c = http.client.HTTPConnection('127.0.0.1', self.port, timeout=60)
        try:
            c.request('POST', path, json.dumps({'stream': True, **body}), {'Content-Type': 'application/json'})
            r = c.getresponse()
            assert r.status == 200, r.read()
            for line in r:
                if line.startswith(b'data: '):
                    data = line[6:].strip()
                    yield '[DONE]' if data == b'[DONE]' else json.loads(data)
        finally:
            c.close()

    def raw(self, data, timeout=20):
        """Sends bytes and returns everything that comes back until the server closes (or the timeout)."""
        with socket.create_connection(('127.0.0.1', self.port), timeout=timeout) as s:
            s.sendall(data)
            out = b''
            try:
                while True:
                    piece = s.recv(65536)
                    if not piece:
                        break
                    out += piece
            except (TimeoutError, ConnectionResetError):
                pass
        return out

    def metric(self, name, **labels):
        """The sum of the samples of that name that carry the labels."""
        _, _, text = self.request('GET', '/metrics')
        total = 0.0
        for line in text.decode().splitlines():
            head, _, value = line.rpartition(' ')
            if head.split('{')[0] == 'tidepool_' + name and all('%s="%s"' % item in head for item in labels.items()):
                total += float(value)
        return total


class Stack:
    """kvstore, workers and router with the real model."""

    def __init__(self, workers=2, router_args=(), worker_args=(), pool='512M', threads=1):
        self.folder = tempfile.TemporaryDirectory(prefix='tp-')
        self.worker_args, self.threads = list(worker_args), threads
        self.parts = []
        try:
            self.store_socket = os.path.join(self.folder.name, 'kvstore.sock')
            self.store = self._add(Process('tidepool-kvstore', ['--socket', self.store_socket, '--pool-size', pool], self.folder.name))
            self.router = self._add(Router(self.folder.name, router_args))
            self.store.await_log('event=store_ready')
            self.workers = [self.start_worker('w%d' % i) for i in range(workers)]
            await_true('all workers', lambda: self.router.request('GET', '/live')[2]['workers_ready'] == workers)
        except BaseException:
            self.close()
            raise

    def _add(self, process):
        self.parts.append(process)
        return process

    def start_worker(self, name, *args):
        return self._add(Worker('tidepool-worker', ['--model', MODEL, '--router', self.router.endpoint, '--store', self.store_socket, '--name', name, '--threads',
                                                     str(self.threads), *self.worker_args, *args], self.folder.name, name))

    def logs(self):
        return '\n'.join('--- %s\n%s' % (p.name, p.log()[-3000:]) for p in self.parts)

    def close(self):
        for process in reversed(self.parts):
            process.close()
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
