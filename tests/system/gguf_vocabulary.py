"""GGUF files that hold a vocabulary and nothing else, made from a tokenizer.json or from a SentencePiece model."""
import json
import struct

from gguf_write import ARR, F32, STR, U32, entry, gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def write(path, model, tokens, types, *more):
    path.write_bytes(gguf([entry('general.architecture', STR, 'llama'), entry('tokenizer.ggml.model', STR, model), entry('tokenizer.ggml.tokens', ARR, tokens, STR),
                           entry('tokenizer.ggml.token_type', ARR, types, U32), *more], []))


def from_tokenizer_json(source, path, pre):
    j = json.loads(source.read_text())
    tokens = {i: (t, NORMAL) for t, i in j['model']['vocab'].items()}
    tokens.update({a['id']: (a['content'], CONTROL if a['special'] else USER_DEFINED) for a in j['added_tokens']})
    rows = [tokens.get(i, ('[PAD%d]' % i, UNUSED)) for i in range(max(tokens) + 1)]
    merges = [m if isinstance(m, str) else ' '.join(m) for m in j['model']['merges']]
    write(path, 'gpt2', [r[0] for r in rows], [r[1] for r in rows], entry('tokenizer.ggml.pre', STR, pre), entry('tokenizer.ggml.merges', ARR, merges, STR))


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
    write(path, 'llama', [r[0].decode() for r in rows], [r[2] for r in rows], entry('tokenizer.ggml.scores', ARR, [r[1] for r in rows], F32),
          entry('tokenizer.ggml.bos_token_id', U32, 1), entry('tokenizer.ggml.eos_token_id', U32, 2), entry('tokenizer.ggml.unknown_token_id', U32, 0))
