"""Writes GGUF files: the header, metadata and tensors of given raw bytes. Format: ggml/docs/gguf.md. Standard library only."""
import struct

U8, I8, U16, U32, I32, F32, BOOL, STR, ARR, U64 = 0, 1, 2, 4, 5, 6, 7, 8, 9, 10
FORMATS = {U8: "<B", I8: "<b", U16: "<H", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q"}
# name: (ggml's number, values of a block, bytes of a block)
TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "BF16": (30, 1, 2),
}


def text(s):
    raw = s.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind, v):
    return text(v) if kind == STR else struct.pack(FORMATS[kind], v)


def entry(key, kind, v, item=None):
    """One metadata entry; `item` is the type of an array's elements."""
    if kind != ARR:
        return text(key) + struct.pack("<I", kind) + value(kind, v)
    return text(key) + struct.pack("<IIQ", ARR, item, len(v)) + b"".join(value(item, x) for x in v)


def gguf(entries, tensors, version=3, alignment=32):
    """entries: from entry(); tensors: (name, type name, dims with the contiguous one first, raw bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries)
    data = []
    offset = 0
    for name, kind, dims, raw in tensors:
        out += text(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d) for d in dims)
        out += struct.pack("<IQ", TYPES[kind][0], offset)
        padded = raw + b"\0" * (-len(raw) % alignment)
        data.append(padded)
        offset += len(padded)
    return out + b"\0" * (-len(out) % alignment) + b"".join(data)
