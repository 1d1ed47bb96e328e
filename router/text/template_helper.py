"""Renders chat templates for the router: one request at a time, from standard input to standard output.

A frame is a little-endian uint32 kind or status, a uint32 length, and that many bytes. The first frame in is a JSON object with the template, the special
tokens, the limits and the system-call filter to live under; then each request is a JSON object with "messages" and "options". Each is answered by one
frame: status 0 and the text, or another status and the reason.
"""
import ctypes
import datetime
import json
import os
import resource
import struct
import time

OK, REFUSED, TOO_LARGE, BROKEN = 0, 1, 2, 3


def read_exactly(n):
    data = bytearray()
    while len(data) < n:
        part = os.read(0, min(n - len(data), 1 << 20))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


def read_frame():
    _, length = struct.unpack('<II', read_exactly(8))
    return json.loads(read_exactly(length))


def answer(status, text):
    data = text.encode('utf-8', 'replace') if isinstance(text, str) else text
    data = memoryview(struct.pack('<II', status, len(data)) + data)
    while data:
        data = data[os.write(1, data):]


try:
    import jinja2
    import jinja2.debug
    import jinja2.ext
    import jinja2.sandbox
except ImportError as e:
    answer(BROKEN, 'this Python has no jinja2: %s' % e)
    os._exit(1)


class Generation(jinja2.ext.Extension):
    """{% generation %} marks what the model wrote, for training; here it only renders its body."""
    tags = {'generation'}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(['name:endgeneration'], drop_needle=True), lineno=line)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format):
    return datetime.datetime.now().strftime(format)


def make_environment():
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters['tojson'] = tojson
    environment.globals['raise_exception'] = raise_exception
    environment.globals['strftime_now'] = strftime_now
    return environment


def render(template, variables, limit):
    """Stops as soon as the output is too large, not when it is whole."""
    parts, size = [], 0
    for part in template.generate(variables):
        size += len(part)
        if size > limit:
            return None
        parts.append(part)
    return ''.join(parts)


def warm_up(environment):
    """Loads what Python and Jinja load when first needed: later no file can be opened."""
    source = '{% for m in messages %}{{ m["a"] ~ \'\\n\' | trim }}{{ m | tojson(indent=2) }}{% if loop.first %}{% continue %}{% endif %}{% endfor %}{{ strftime_now("%d %b %Y %B %A") }}'
    environment.from_string(source).render(messages=[{'a': 'b\u00e9'}, {'a': 'c'}])
    for bad in ('{{ raise_exception("x") }}', '{{ a.b.c }}', '{% for %}', '{{ 1 + "a" }}'):
        try:
            environment.from_string(bad).render()
        except Exception as e:
            str(e)
    time.localtime()


def enter_sandbox(filter_bytes):
    """From here on: no new privileges, no file, no socket, no process, only the calls that computing needs."""
    class Program(ctypes.Structure):
        _fields_ = [('n', ctypes.c_ushort), ('code', ctypes.c_void_p)]

    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(filter_bytes, len(filter_bytes))
    program = Program(len(filter_bytes) // 8, ctypes.cast(code, ctypes.c_void_p))
    for call in ((38, 1, 0), (22, 2, ctypes.byref(program))):  # PR_SET_NO_NEW_PRIVS; PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        if libc.prctl(call[0], call[1], call[2], 0, 0) != 0:
            raise OSError(ctypes.get_errno(), 'prctl')


def reason(e):
    text = getattr(e, 'message', None) or str(e)
    line = getattr(e, 'lineno', None)
    if isinstance(e, jinja2.exceptions.TemplateSyntaxError) and line:
        return 'line %d of the chat template: %s' % (line, text)
    return text if isinstance(e, jinja2.exceptions.TemplateError) else '%s: %s' % (type(e).__name__, text)


def serve(template, tokens, limit):
    while True:
        request = read_frame()
        try:
            variables = dict(tokens, tools=None, documents=None, add_generation_prompt=False)
            variables.update(request['options'])
            variables['messages'] = request['messages']
            text = render(template, variables, limit)
            data = None if text is None else text.encode('utf-8')
            if data is None or len(data) > limit:
                answer(TOO_LARGE, 'the rendered chat template is longer than %d bytes' % limit)
            else:
                answer(OK, data)
        except MemoryError:
            answer(TOO_LARGE, 'the chat template needs more memory than it may have')
        except RecursionError:
            answer(REFUSED, 'the chat template nests too deeply')
        except Exception as e:
            answer(REFUSED, reason(e))
        request = variables = text = data = None


def main():
    first = read_frame()
    environment = make_environment()
    warm_up(environment)
    try:
        enter_sandbox(bytes.fromhex(first['filter']))
    except OSError as e:
        answer(BROKEN, 'the helper cannot be confined: %s' % e)
        os._exit(1)
    try:
        template = environment.from_string(first['template'])
    except Exception as e:
        answer(REFUSED, reason(e))
        os._exit(1)
    answer(OK, '')
    serve(template, {'bos_token': first['bos'], 'eos_token': first['eos']}, first['limit'])


main()
