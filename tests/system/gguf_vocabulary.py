"""Writes GGUF files that hold a vocabulary and nothing else, made from a tokenizer.json or from a SentencePiece model."""
import json
import struct

U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def text(s):
    data = s if isinstance(s, bytes) else s.encode()
    return struct.pack('<Q', len(data)) + data


def items(kind, values):
    if kind == STRING:
        return b''.join(map(text, values))
    return struct.pack('<%d%s' % (len(values), {U32: 'I', I32: 'i', F32: 'f'}[kind]), *values)


def write(path, fields):
    """`fields`: (key, kind, value), with kind (ARRAY, item kind) for arrays."""
    out = bytearray(b'GGUF' + struct.pack('<IQQ', 3, 0, len(fields)))
    for key, kind, value in fields:
        out += text(key)
        if isinstance(kind, tuple):
            out += struct.pack('<IIQ', ARRAY, kind[1], len(value)) + items(kind[1], value)
        elif kind == STRING:
            out += struct.pack('<I', kind) + text(value)
        else:
            out += struct.pack('<I' + {U32: 'I', BOOL: '?'}[kind], kind, value)
    path.write_bytes(out)


def from_tokenizer_json(source, path, pre):
    j = json.loads(source.read_text())
    tokens = {i: (t, NORMAL) for t, i in j['model']['vocab'].items()}
    tokens.update({a['id']: (a['content'], CONTROL if a['special'] else USER_DEFINED) for a in j['added_tokens']})
    rows = [tokens.get(i, ('[PAD%d]' % i, UNUSED)) for i in range(max(tokens) + 1)]
    merges = [m if isinstance(m, str) else ' '.join(m) for m in j['model']['merges']]
    write(path, [('general.architecture', STRING, 'llama'), ('tokenizer.ggml.model', STRING, 'gpt2'), ('tokenizer.ggml.pre', STRING, pre), ('tokenizer.ggml.tokens', (ARRAY, STRING), [r[0] for r in rows]),
                 ('tokenizer.ggml.token_type', (ARRAY, I32), [r[1] for r in rows]), ('tokenizer.ggml.merges', (ARRAY, STRING), merges)])


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def fields(data):
    """The fields of a protobuf message: number and value."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
        elif key & 7 == 2:
            size, at = varint(data, at)
            value, at = data[at:at + size], at + size
        else:
            size = {1: 8, 5: 4}[key & 7]
            value, at = data[at:at + size], at + size
        yield key >> 3, value


def from_sentencepiece(source, path):
    """Of sentencepiece_model.proto: ModelProto.pieces is field 1, a piece has piece, score and type; the numbers of the types are GGUF's."""
    rows = []
    for number, value in fields(source.read_bytes()):
        if number == 1:
            piece = {1: b'', 2: struct.pack('<f', 0), 3: NORMAL, **dict(fields(value))}
            rows.append((piece[1], struct.unpack('<f', piece[2])[0], piece[3]))
    write(path, [('general.architecture', STRING, 'llama'), ('tokenizer.ggml.model', STRING, 'llama'), ('tokenizer.ggml.tokens', (ARRAY, STRING), [r[0] for r in rows]),
                 ('tokenizer.ggml.scores', (ARRAY, F32), [r[1] for r in rows]), ('tokenizer.ggml.token_type', (ARRAY, I32), [r[2] for r in rows]),
                 ('tokenizer.ggml.bos_token_id', U32, 1), ('tokenizer.ggml.eos_token_id', U32, 2), ('tokenizer.ggml.unknown_token_id', U32, 0)])
