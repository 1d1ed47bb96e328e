"""Random matrices in ggml's tensor types, and what they mean: (raw bytes, float64 values) of a matrix [rows, cols]. The formulas are those of
ggml/src/ggml-quants.c (dequantize_row_*), written for whole arrays."""
import numpy as np

STD = 0.05  # about the spread of all values, so that activations keep their size


def _halves(rng, n, centre):
    """n fp16 scales around `centre`."""
    return (centre * rng.uniform(0.6, 1.4, size=(n, 1))).astype(np.float16)


def _bytes(a):
    return np.ascontiguousarray(a).view(np.uint8).reshape(a.shape[0], -1)


def f32(rng, n):
    x = rng.normal(0, STD, size=(n, 1)).astype(np.float32)
    return _bytes(x), x.astype(np.float64)


def f16(rng, n):
    x = rng.normal(0, STD, size=(n, 1)).astype(np.float16)
    return _bytes(x), x.astype(np.float64)


def bf16(rng, n):
    bits = (rng.normal(0, STD, size=(n, 1)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return _bytes(bits), (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _nibbles(qs):
    """Low nibbles of all bytes, then the high ones."""
    return np.concatenate([qs & 15, qs >> 4], axis=1).astype(np.float64)


def q4_0(rng, n):
    d, qs = _halves(rng, n, STD / 4.6), rng.integers(0, 256, (n, 16), dtype=np.uint8)
    return np.hstack([_bytes(d), qs]), d.astype(np.float64) * (_nibbles(qs) - 8)


def q4_1(rng, n):
    d, qs = _halves(rng, n, STD / 4.6), rng.integers(0, 256, (n, 16), dtype=np.uint8)
    m = (d.astype(np.float32) * rng.uniform(-9, -6, (n, 1))).astype(np.float16)
    return np.hstack([_bytes(d), _bytes(m), qs]), d.astype(np.float64) * _nibbles(qs) + m.astype(np.float64)


def q5_0(rng, n):
    d, qh, qs = _halves(rng, n, STD / 9.2), rng.integers(0, 256, (n, 4), dtype=np.uint8), rng.integers(0, 256, (n, 16), dtype=np.uint8)
    high = np.unpackbits(qh, axis=1, bitorder="little").astype(np.float64)
    return np.hstack([_bytes(d), qh, qs]), d.astype(np.float64) * (_nibbles(qs) + 16 * high - 16)


def q8_0(rng, n):
    d, qs = _halves(rng, n, STD / 73), rng.integers(-127, 128, (n, 32)).astype(np.int8)
    return np.hstack([_bytes(d), _bytes(qs)]), d.astype(np.float64) * qs


def _scales_k4(packed):
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes."""
    q = packed.astype(np.int64)
    scale = np.hstack([q[:, 0:4] & 63, (q[:, 8:12] & 15) | (q[:, 0:4] >> 6) << 4])
    minimum = np.hstack([q[:, 4:8] & 63, (q[:, 8:12] >> 4) | (q[:, 4:8] >> 6) << 4])
    return scale, minimum


def _values_k4(d, dmin, packed, codes):
    """codes [n, 8, 32]"""
    scale, minimum = _scales_k4(packed)
    x = (d.astype(np.float64) * scale)[:, :, None] * codes - (dmin.astype(np.float64) * minimum)[:, :, None]
    return x.reshape(len(d), 256)


def _codes_k4(qs):
    """[n, 128] bytes: groups of 32 bytes hold 32 low nibbles, then 32 high ones."""
    q = qs.reshape(-1, 4, 1, 32).astype(np.float64)
    low = (qs & 15).reshape(q.shape)
    return np.concatenate([low, (qs >> 4).reshape(q.shape)], axis=2).reshape(-1, 8, 32).astype(np.float64)


def q4_k(rng, n):
    d, dmin = _halves(rng, n, STD / 250), _halves(rng, n, STD / 33)
    packed, qs = rng.integers(0, 256, (n, 12), dtype=np.uint8), rng.integers(0, 256, (n, 128), dtype=np.uint8)
    return np.hstack([_bytes(d), _bytes(dmin), packed, qs]), _values_k4(d, dmin, packed, _codes_k4(qs))


def q5_k(rng, n):
    d, dmin = _halves(rng, n, STD / 500), _halves(rng, n, STD / 33)
    packed, qs = rng.integers(0, 256, (n, 12), dtype=np.uint8), rng.integers(0, 256, (n, 128), dtype=np.uint8)
    qh = rng.integers(0, 256, (n, 32), dtype=np.uint8)
    high = np.stack([(qh >> bit) & 1 for bit in range(8)], axis=1)  # bit g of byte l: the fifth bit of value l of group g
    return np.hstack([_bytes(d), _bytes(dmin), packed, qh, qs]), _values_k4(d, dmin, packed, _codes_k4(qs) + 16.0 * high)


def q6_k(rng, n):
    """The scale d is subnormal in fp16 here, as it may be in real files."""
    ql, qh = rng.integers(0, 256, (n, 128), dtype=np.uint8), rng.integers(0, 256, (n, 64), dtype=np.uint8)
    scale, d = rng.integers(-64, 64, (n, 16)).astype(np.int8), _halves(rng, n, STD / 1000)
    x = np.empty((n, 256))
    for half in range(2):
        low, high = ql[:, 64 * half:64 * half + 64].astype(np.int64), qh[:, 32 * half:32 * half + 32].astype(np.int64)
        nibbles = [low[:, :32] & 15, low[:, 32:] & 15, low[:, :32] >> 4, low[:, 32:] >> 4]
        for k in range(4):
            q = (nibbles[k] | (high >> 2 * k & 3) << 4) - 32
            group = np.repeat(scale[:, 8 * half + 2 * k:8 * half + 2 * k + 2].astype(np.float64), 16, axis=1)
            x[:, 128 * half + 32 * k:128 * half + 32 * k + 32] = d.astype(np.float64) * group * q
    return np.hstack([ql, qh, _bytes(scale), _bytes(d)]), x


MAKERS = {"F32": (f32, 1), "F16": (f16, 1), "BF16": (bf16, 1), "Q8_0": (q8_0, 32), "Q4_0": (q4_0, 32), "Q4_1": (q4_1, 32), "Q5_0": (q5_0, 32),
          "Q4_K": (q4_k, 256), "Q5_K": (q5_k, 256), "Q6_K": (q6_k, 256)}


def matrix(rng, kind, rows, cols):
    """(raw bytes, float64 [rows, cols]) of a random matrix of the type."""
    maker, block = MAKERS[kind]
    raw, values = maker(rng, rows * cols // block)
    return raw.tobytes(), values.reshape(rows, cols)
