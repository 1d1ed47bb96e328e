"""A worker that speaks the real protocol and computes nothing: what it answers is a pure function of the prompt, so a stream that moves between
workers can be checked token by token. For edges of the protocol only; the real worker is tested elsewhere.

It runs in a thread of its own. Everything that a test may change while it runs is an attribute."""
import threading, time, uuid
import zmq
import wire

STOP, LENGTH, CANCELLED = 0, 1, 2
INVALID, TOO_LONG, OVERLOADED, INTERNAL, DRAINING = range(5)


class Request:
    def __init__(self, request_id, message):
        self.id, self.message = request_id, message
        self.index = len(message.generated)  # tokens of the answer so far
        self.started = False


class WireWorker:
    def __init__(self, endpoint, name='w0', answer=None, delay=0.0, context_length=8192, vocab_size=49152, eos=(2,), max_running=8, cached=0, start=True):
        self.endpoint, self.name, self.delay, self.cached = endpoint, name, delay, cached
        self.answer = answer or (lambda prompt, i: prompt[i % len(prompt)])  # echo
        self.ready_fields = dict(name=name, model_id='wire', fingerprint=bytes(32), context_length=context_length, vocab_size=vocab_size, eos_ids=eos,
                                 max_running=max_running, prefix_reuse=True, description='wire worker')
        self.boot = uuid.uuid4().bytes
        self.requests, self.received, self.cancelled = {}, [], []  # running; every Generate; ids
        self.epoch = None
        self.silent = False      # as if stopped: reads and writes nothing
        self.frozen = False      # beats, but makes no progress
        self.die_after = None    # closes its socket after so many tokens in all
        self.fail_with = None    # (kind, text): answers every Generate so
        self.hold = False        # prefilled nothing yet
        self.before_tokens = None  # called with (worker, request, message) before each Tokens; may send other things
        self.tokens_sent = 0
        self.progress = 0
        self.dead = threading.Event()
        self.connected = threading.Event()
        self.stopping = False
        self.error = None
        self.thread = threading.Thread(target=self._main, daemon=True)
        if start:
            self.thread.start()
            assert self.connected.wait(20), self.error or 'the router did not acknowledge the worker'

    # -- the protocol --

    def send(self, kind, request_id, message):
        self.socket.send_multipart(wire.frame(kind, request_id, message))

    def _ready(self):
        self.send(wire.READY, 0, wire.engine('Ready', boot_uuid=self.boot, **self.ready_fields))

    def _take(self, kind, request_id, body):
        if kind == wire.READY_ACK:
            ack = wire.parse('ReadyAck', body)
            self.epoch, self.beat_s = ack.epoch, ack.heartbeat_ms / 1000
            self.connected.set()
        elif kind == wire.GENERATE:
            message = wire.parse('Generate', body)
            self.received.append(message)
            if self.fail_with:
                self.send(wire.FAILED, request_id, wire.engine('Failed', epoch=self.epoch, kind=self.fail_with[0], text=self.fail_with[1]))
            else:
                self.requests[request_id] = Request(request_id, message)
        elif kind == wire.CANCEL:
            self.cancelled.append(request_id)
            self.requests.pop(request_id, None)
        elif kind == wire.HEARTBEAT:
            self.heard = time.monotonic()

    def token(self, request, i):
        m = request.message
        token = wire.engine('Token', id=self.answer(list(m.prompt), i), logprob=-0.5)
        if m.sampling.logprobs:
            for k in range(m.sampling.n_logprobs):
                token.top.add(token=(token.id + k) % self.ready_fields['vocab_size'], logprob=-0.5 - k)
        return token

    def _prefill(self, request):
        m = request.message
        prefilled = wire.engine('Prefilled', epoch=self.epoch, prompt_tokens=len(m.prompt), cached_tokens=self.cached, bytes_loaded=1000 * self.cached,
                                queue_us=10, prefill_us=100)
        if m.prompt_logprobs:
            for i, token in enumerate(m.prompt[1:], 1):
                prefilled.prompt_logprobs.add(id=token, logprob=-float(i))
        self.send(wire.PREFILLED, request.id, prefilled)
        request.started = True

    def _step(self, request):
        m = request.message
        token = self.token(request, request.index)
        message = wire.engine('Tokens', epoch=self.epoch, first_index=request.index, tokens=[token])
        if self.before_tokens:
            self.before_tokens(self, request, message)
        self.send(wire.TOKENS, request.id, message)
        request.index += 1
        self.tokens_sent += 1
        self.progress += 1
        stopped = token.id in m.stop_ids and request.index > m.min_tokens
        if stopped or request.index >= m.max_tokens:
            self.send(wire.FINISHED, request.id, wire.engine('Finished', epoch=self.epoch, reason=STOP if stopped else LENGTH, completion_tokens=request.index,
                                                             bytes_loaded=1000 * self.cached, bytes_to_pool=7, bytes_attended=500, bytes_missed=20, stop_id=token.id if stopped else 0))
            self.requests.pop(request.id, None)

    def _beat(self):
        self.send(wire.HEARTBEAT, 0, wire.engine('Heartbeat', epoch=self.epoch, progress=self.progress, busy=bool(self.requests), n_running=len(self.requests),
                                                 pool_bytes=1 << 30, pool_used_bytes=1 << 20, store_connected=True, page_cache_bytes=4096, page_cache_used_bytes=1024,
                                                 page_cache_hits=90, page_cache_misses=10))

    # -- the thread --

    def _work(self):
        for request in list(self.requests.values()):
            if self.die_after is not None and self.tokens_sent >= self.die_after:
                self.stopping = True
                return
            if not request.started and not self.hold:
                self._prefill(request)
            elif request.started:
                self._step(request)
        if self.requests and self.delay:
            time.sleep(self.delay)

    def _main(self):
        context = zmq.Context()
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, self.name.encode() + b'-' + self.boot.hex().encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(self.endpoint)
        self.beat_s, last_beat, last_ready = 1.0, 0.0, 0.0
        self.heard = time.monotonic()
        try:
            while not self.stopping:
                if self.silent:
                    time.sleep(0.005)
                    continue
                now = time.monotonic()
                if self.epoch is None and now - last_ready > 0.2:
                    self._ready()
                    last_ready = now
                if self.epoch is not None and now - last_beat > self.beat_s / 2:
                    self._beat()
                    last_beat = now
                if self.epoch is not None and now - self.heard > 5 * self.beat_s:  # the router is gone
                    self.requests.clear()
                    self.epoch, self.heard = None, now
                while self.socket.poll(0 if self.requests and not self.frozen else 2):
                    head, body = self.socket.recv_multipart()
                    kind, _, request_id = wire.unframe(head)
                    self._take(kind, request_id, body)
                if not self.frozen:
                    self._work()
        except Exception as e:
            self.error = e
        finally:
            self.socket.close()
            context.term()
            self.dead.set()

    def close(self):
        self.stopping = True
        self.thread.join(10)
        assert not self.error, self.error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
