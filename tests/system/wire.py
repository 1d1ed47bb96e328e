"""The wire protocol in Python, from the .proto files themselves: protoc-c writes their descriptors, protobuf builds the classes."""
import functools, os, struct, subprocess, tempfile
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HEADER = struct.Struct('<4sHHIIQ')  # proto/wire/frame.h
READY, READY_ACK, HEARTBEAT, GENERATE, CANCEL, DRAIN, PREFILLED, PREFILL_PROGRESS, TOKENS, FINISHED, FAILED = range(1, 12)
STORE_BLOCK_EVENTS, STORE_SNAPSHOT_REQUEST, STORE_SNAPSHOT = 78, 79, 80


@functools.cache
def _pool():
    with tempfile.NamedTemporaryFile() as out:
        subprocess.run(['protoc-c', '--descriptor_set_out=' + out.name, '-I', os.path.join(ROOT, 'proto', 'wire'), 'engine.proto', 'store.proto'], check=True)
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


@functools.cache
def _class(name):
    descriptor = _pool().FindMessageTypeByName('tidepool.' + name)
    if hasattr(message_factory, 'GetMessageClass'):
        return message_factory.GetMessageClass(descriptor)
    return message_factory.MessageFactory(_pool()).GetPrototype(descriptor)


def engine(name, /, **fields):
    return _class('engine.' + name)(**fields)


def parse(name, body):
    return _class('engine.' + name).FromString(body)


def frame(kind, request_id, message):
    body = message if isinstance(message, bytes) else message.SerializeToString()
    return [HEADER.pack(b'TPW1', 1, kind, len(body), 0, request_id), body]


def unframe(head):
    magic, version, kind, length, zero, request_id = HEADER.unpack(head)
    assert magic == b'TPW1' and version == 1 and zero == 0
    return kind, length, request_id
