"""A real `tidepool serve` with its children, for system tests. Nothing outlives the object: the launcher's children end with it."""
import http.client, json, os, signal, subprocess, tempfile
from processes import BUILD, MODEL, await_true


class Serve:
    def __init__(self, workers=1, args=(), env=None):
        self.dir = tempfile.TemporaryDirectory(prefix='tp-')
        self.port_file = os.path.join(self.dir.name, 'port')
        self.log_path = os.path.join(self.dir.name, 'log')
        self.runtime = os.path.join(self.dir.name, 'run')
        command = [os.path.join(BUILD, 'bin', 'tidepool'), 'serve', '--model', MODEL, '--workers', str(workers), '--port', '0', '--port-file', self.port_file,
                   '--runtime-dir', self.runtime, '--pool-size', '512M', '--drain-timeout', '20', *args]
        self.process = subprocess.Popen(command, stderr=open(self.log_path, 'wb'), env={**os.environ, **(env or {})})
        try:
            await_true('the API', self._ready, 90)
        except AssertionError:
            self.close()
            raise AssertionError('serve did not become ready:\n' + self.log())

    def _ready(self):
        if self.process.poll() is not None:
            raise AssertionError('serve ended with %d:\n%s' % (self.process.returncode, self.log()))
        if not os.path.exists(self.port_file):
            return False
        self.port = int(open(self.port_file).read())
        return True

    def log(self):
        return open(self.log_path, errors='replace').read()

    def pid_of(self, child):
        """The newest pid that the launcher logged for a child ("router", "kvstore", "worker-0")."""
        pids = [line.split('pid=')[1].split()[0] for line in self.log().splitlines() if 'event=child_started' in line and ' child=%s ' % child in line]
        return int(pids[-1])

    def command_of(self, child):
        return open('/proc/%d/cmdline' % self.pid_of(child)).read().split('\0')

    def kill(self, child):
        old = self.pid_of(child)
        os.kill(old, signal.SIGKILL)
        return old

    def await_restart(self, child, old):
        return await_true('a new %s' % child, lambda: self.pid_of(child) != old and self.pid_of(child), 30)

    def request(self, method, path, body=None, timeout=120):
        c = http.client.HTTPConnection('127.0.0.1', self.port, timeout=timeout)
        c.request(method, path, json.dumps(body) if body is not None else None, {'Content-Type': 'application/json'} if body is not None else {})
        r = c.getresponse()
        data = r.read()
        c.close()
        return r.status, data

    def complete(self, prompt, **options):
        status, data = self.request('POST', '/v1/completions', {'prompt': prompt, 'max_tokens': 8, 'temperature': 0, **options})
        assert status == 200, data
        return json.loads(data)

    def await_complete(self, prompt, **options):
        """The next request that succeeds, while parts are being restarted."""
        def attempt():
            try:
                status, data = self.request('POST', '/v1/completions', {'prompt': prompt, 'max_tokens': 8, 'temperature': 0, **options})
            except OSError:
                return None
            except http.client.HTTPException:
                return None
            assert status in (200, 503), (status, data)
            return json.loads(data) if status == 200 else None
        return await_true('a request that succeeds', attempt, 60)

    def stream(self, prompt, **options):
        """Yields the text pieces of a streamed completion; raises on a broken connection."""
        c = http.client.HTTPConnection('127.0.0.1', self.port, timeout=120)
        c.request('POST', '/v1/completions', json.dumps({'prompt': prompt, 'temperature': 0, 'stream': True, **options}), {'Content-Type': 'application/json'})
        r = c.getresponse()
        assert r.status == 200, r.read()
        done = False
        for line in r:
            if not line.startswith(b'data: '):
                continue
            if line.strip() == b'data: [DONE]':
                done = True
                break
            event = json.loads(line[6:])
            assert 'error' not in event, event
            if event['choices'] and event['choices'][0].get('text'):
                yield event['choices'][0]['text']
        c.close()
        if not done:
            raise ConnectionError('the stream broke off')

    def tree(self):
        """Pids of the launcher's children that are alive."""
        out = []
        for entry in os.listdir('/proc'):
            if entry.isdigit():
                try:
                    cmd = open('/proc/%s/cmdline' % entry, 'rb').read()
                    state = open('/proc/%s/stat' % entry).read().rsplit(')', 1)[1].split()[0]
                except OSError:
                    continue
                if state != 'Z' and self.runtime.encode() in cmd and int(entry) != self.process.pid:
                    out.append(int(entry))
        return out

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.dir.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
