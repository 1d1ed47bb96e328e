#!/usr/bin/env python3
"""Writes tiny random models and what they must answer, for tests/unit/test_tiny_models.c.

    make_tiny_models.py FOLDER

makes in FOLDER GGUF files (one for each tensor type, and one for each architecture) and Hugging Face folders with the same weights, and beside each model
NAME a file NAME.expected: int32 n_tokens, n_positions, n_vocab, tokens, positions, then float32 logits [n_positions, n_vocab] by the float64
forward pass below. Needs numpy; the output is always the same."""
import json
import math
import pathlib
import struct
import sys

import numpy as np

import ggml_blocks
from gguf_write import F32, STR, U32, entry, gguf

N_LAYERS, DIM, FFN, VOCAB, EPS = 2, 256, 512, 263, 1e-5  # 263: the last panel of 16 rows is not full
LARGE_BIASES = (2, 21)  # channels of every head whose key bias is many times the key: it is kept out of the cache
N_TOKENS, POSITIONS = 150, [0, 17, 127, 128, 149]  # over the border of a block of 128
MATRICES = {  # role: (GGUF, Hugging Face)
    "q": ("attn_q", "self_attn.q_proj"), "k": ("attn_k", "self_attn.k_proj"), "v": ("attn_v", "self_attn.v_proj"), "o": ("attn_output", "self_attn.o_proj"),
    "gate": ("ffn_gate", "mlp.gate_proj"), "up": ("ffn_up", "mlp.up_proj"), "down": ("ffn_down", "mlp.down_proj"),
}
NORMS = {"attn_norm": ("attn_norm", "input_layernorm"), "ffn_norm": ("ffn_norm", "post_attention_layernorm")}


class Spec:
    """One model: shape, RoPE and the types of its tensors."""

    def __init__(self, name, arch="llama", kind="F32", n_heads=4, n_kv_heads=2, head_dim=64, tied=False, theta=10000.0, scaling=None, bias=(), seed=1):
        self.name, self.arch, self.kind = name, arch, kind
        self.n_heads, self.n_kv_heads, self.head_dim, self.tied = n_heads, n_kv_heads, head_dim, tied
        self.theta, self.scaling, self.bias, self.seed = theta, scaling, bias, seed
        self.gguf_arch = "qwen2" if arch == "qwen2" else "llama"
        self.gguf_interleaved = self.gguf_arch == "llama"

    def shapes(self):
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return {"q": (q, DIM), "k": (kv, DIM), "v": (kv, DIM), "o": (DIM, q), "gate": (FFN, DIM), "up": (FFN, DIM), "down": (DIM, FFN)}


class Weights:
    """Raw bytes and values of every tensor, in the row order of the GGUF file."""

    def __init__(self, spec):
        rng = np.random.default_rng(spec.seed)
        self.raw, self.values = {}, {}
        self.add("embedding", *ggml_blocks.matrix(rng, spec.kind, VOCAB, DIM))
        if not spec.tied:
            self.add("head", *ggml_blocks.matrix(rng, spec.kind, VOCAB, DIM))
        self.vector(rng, "final_norm", DIM, 1.0)
        for layer in range(N_LAYERS):
            for role, (rows, cols) in spec.shapes().items():
                self.add((layer, role), *ggml_blocks.matrix(rng, spec.kind, rows, cols))
                if role in spec.bias:
                    large = np.isin(np.arange(rows) % spec.head_dim, LARGE_BIASES) & (role == "k")
                    self.vector(rng, (layer, role + "_bias"), rows, 0.0, 0.5, np.where(large, 32, 1))
            for role in NORMS:
                self.vector(rng, (layer, role), DIM, 1.0)

    def add(self, key, raw, values):
        self.raw[key], self.values[key] = raw, values

    def vector(self, rng, key, n, mean, std=0.1, power_of_two=1):
        """Values that bf16 holds, so that every file can store them exactly."""
        bits = rng.normal(mean, std, n).astype(np.float32).view(np.uint32) & 0xFFFF0000
        x = bits.view(np.float32) * np.float32(power_of_two)
        self.add(key, x.tobytes(), x.astype(np.float64))


# ---- RoPE ----

def llama3_divisors(spec):
    """What GGUF stores instead of the parameters; formula of transformers' _compute_llama3_parameters."""
    s = spec.scaling
    freq = spec.theta ** (-np.arange(0, spec.head_dim, 2) / spec.head_dim)
    old = s["original_max_position_embeddings"]
    smooth = np.clip((old * freq / (2 * math.pi) - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"]), 0, 1)
    return 1 / ((1 - smooth) / s["factor"] + smooth)


def yarn_freqs(spec, freq):
    s, d = spec.scaling, spec.head_dim
    low, high = (d * math.log(s["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(spec.theta)) for turns in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), d - 1)
    ramp = np.clip((np.arange(d // 2) - low) / max(high - low, 0.001), 0, 1)
    return freq / s["factor"] * ramp + freq * (1 - ramp), 0.1 * math.log(s["factor"]) + 1


def rope_freqs(spec):
    freq = spec.theta ** (-np.arange(0, spec.head_dim, 2) / spec.head_dim)
    kind = spec.scaling["rope_type"] if spec.scaling else None
    if kind == "llama3":
        return freq / llama3_divisors(spec), 1.0
    if kind == "linear":
        return freq / spec.scaling["factor"], 1.0
    if kind == "yarn":
        return yarn_freqs(spec, freq)
    return freq, 1.0


def rotate_pairs(x, cos, sin, interleaved):
    """x [n, heads, d]; cos and sin [n, 1, d/2]."""
    out = np.empty_like(x)
    half = x.shape[-1] // 2
    first, second = (np.s_[..., 0::2], np.s_[..., 1::2]) if interleaved else (np.s_[..., :half], np.s_[..., half:])
    out[first] = x[first] * cos - x[second] * sin
    out[second] = x[second] * cos + x[first] * sin
    return out


# ---- forward ----

def hadamard(d):
    """Sylvester's matrix over sqrt of its size; in blocks of the largest power of two that divides d."""
    block = d & -d
    i = np.arange(block)
    signs = np.array([[(-1) ** bin(a & b).count("1") for b in i] for a in i])
    return np.kron(np.eye(d // block), signs / math.sqrt(block))


def to_bf16(x):
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def rmsnorm(x, gamma):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * gamma


def attention(spec, q, k, v):
    n, group = len(q), spec.n_heads // spec.n_kv_heads
    out = np.empty_like(q)
    mask = np.where(np.tril(np.ones((n, n), bool)), 0.0, -np.inf)
    for h in range(spec.n_heads):
        logits = q[:, h] @ k[:, h // group].T / math.sqrt(spec.head_dim) + mask
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        out[:, h] = p / p.sum(axis=-1, keepdims=True) @ v[:, h // group]
    return out


def key_bias_parts(spec, values, layer, interleaved):
    """K's bias as (left in the key, kept out of the cache): per head the largest RoPE pairs, until the others have no more energy than the key itself or 24 are marked."""
    d, half = spec.head_dim, spec.head_dim // 2
    bias = values.get((layer, "k_bias"), np.zeros(spec.n_kv_heads * d)).reshape(-1, d)
    own = ((values[layer, "k"] * values[layer, "attn_norm"]) ** 2).reshape(spec.n_kv_heads, -1).sum(axis=1)
    large = np.zeros_like(bias)
    channels = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    for h, head in enumerate(bias):
        energy = [(head[list(c)] ** 2).sum() for c in channels]
        for i in sorted(range(half), key=lambda i: -energy[i])[:24]:
            if ((head - large[h]) ** 2).sum() <= own[h]:
                break
            large[h, list(channels[i])] = head[list(channels[i])]
    return bias - large, large


def forward(spec, values, tokens, interleaved):
    """Logits [n_positions, vocab]. K and V are rounded to bf16 after the rotation, as the cache holds them; large key biases are added behind that."""
    n, d = len(tokens), spec.head_dim
    freq, factor = rope_freqs(spec)
    angles = np.arange(n)[:, None] * freq
    cos, sin = (factor * f(angles)[:, None, :] for f in (np.cos, np.sin))
    rotation = hadamard(d)
    x = values["embedding"][tokens]
    linear = lambda layer, role, y: y @ values[layer, role].T + values.get((layer, role + "_bias"), 0.0)
    for layer in range(N_LAYERS):
        y = rmsnorm(x, values[layer, "attn_norm"])
        q, v = (linear(layer, role, y).reshape(n, -1, d) for role in "qv")
        rest, large = key_bias_parts(spec, values, layer, interleaved)
        k = (y @ values[layer, "k"].T).reshape(n, -1, d) + rest
        q, k, large = (rotate_pairs(a, cos, sin, interleaved) @ rotation for a in (q, k, np.broadcast_to(large, k.shape)))
        x = x + linear(layer, "o", attention(spec, q, to_bf16(k) + large, to_bf16(v)).reshape(n, -1))
        y = rmsnorm(x, values[layer, "ffn_norm"])
        gate = linear(layer, "gate", y)
        x = x + linear(layer, "down", gate / (1 + np.exp(-gate)) * linear(layer, "up", y))
    head = values["embedding"] if spec.tied else values["head"]
    return rmsnorm(x, values["final_norm"])[POSITIONS] @ head.T


# ---- files ----

def write_expected(folder, name, spec, values, interleaved):
    tokens = np.random.default_rng(7).integers(0, VOCAB, N_TOKENS)
    logits = forward(spec, values, tokens, interleaved)
    header = np.array([N_TOKENS, len(POSITIONS), VOCAB, *tokens, *POSITIONS], np.int32)
    (folder / f"{name}.expected").write_bytes(header.tobytes() + logits.astype(np.float32).tobytes())


def gguf_entries(spec):
    a = spec.gguf_arch
    numbers = {"block_count": N_LAYERS, "context_length": 1024, "embedding_length": DIM, "feed_forward_length": FFN, "attention.head_count": spec.n_heads,
               "attention.head_count_kv": spec.n_kv_heads, "attention.key_length": spec.head_dim, "attention.value_length": spec.head_dim,
               "rope.dimension_count": spec.head_dim}
    out = [entry("general.architecture", STR, a), entry("general.name", STR, spec.name), entry("tokenizer.ggml.eos_token_id", U32, 2)]
    out += [entry(f"{a}.{k}", U32, v) for k, v in numbers.items()]
    out += [entry(f"{a}.attention.layer_norm_rms_epsilon", F32, EPS), entry(f"{a}.rope.freq_base", F32, spec.theta)]
    if spec.scaling and spec.scaling["rope_type"] in ("linear", "yarn"):
        out += [entry(f"{a}.rope.scaling.type", STR, spec.scaling["rope_type"]), entry(f"{a}.rope.scaling.factor", F32, spec.scaling["factor"])]
        if "original_max_position_embeddings" in spec.scaling:
            out += [entry(f"{a}.rope.scaling.original_context_length", U32, spec.scaling["original_max_position_embeddings"])]
    return out


def gguf_tensors(spec, w):
    shapes = spec.shapes()
    out = [("token_embd.weight", spec.kind, [DIM, VOCAB], w.raw["embedding"]), ("output_norm.weight", "F32", [DIM], w.raw["final_norm"])]
    if not spec.tied:
        out.append(("output.weight", spec.kind, [DIM, VOCAB], w.raw["head"]))
    if spec.scaling and spec.scaling["rope_type"] == "llama3":
        out.append(("rope_freqs.weight", "F32", [spec.head_dim // 2], llama3_divisors(spec).astype(np.float32).tobytes()))
    for layer in range(N_LAYERS):
        for role, (name, _) in MATRICES.items():
            rows, cols = shapes[role]
            out.append((f"blk.{layer}.{name}.weight", spec.kind, [cols, rows], w.raw[layer, role]))
            if role in spec.bias:
                out.append((f"blk.{layer}.{name}.bias", "F32", [rows], w.raw[layer, role + "_bias"]))
        for role, (name, _) in NORMS.items():
            out.append((f"blk.{layer}.{name}.weight", "F32", [DIM], w.raw[layer, role]))
    return out


def write_gguf(folder, spec, w):
    name = f"{spec.name}.gguf"
    (folder / name).write_bytes(gguf(gguf_entries(spec), gguf_tensors(spec, w)))
    write_expected(folder, name, spec, w.values, spec.gguf_interleaved)


def to_halves(spec, role, values):
    """Rows of Q and K (and their biases) from neighbouring pairs to halves, as Hugging Face has them."""
    if role not in ("q", "k") or not spec.gguf_interleaved:
        return values
    heads = values.reshape(-1, spec.head_dim // 2, 2, *values.shape[1:])
    return heads.swapaxes(1, 2).reshape(values.shape)


def hf_values(spec, w):
    out = {}
    for key, values in w.values.items():
        role = key[1].removesuffix("_bias") if isinstance(key, tuple) else key
        out[key] = to_halves(spec, role, values)
    return out


def hf_config(spec, newer):
    arch = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}[spec.arch]
    config = {"architectures": [arch], "model_type": spec.arch, "hidden_size": DIM, "intermediate_size": FFN, "num_hidden_layers": N_LAYERS,
              "num_attention_heads": spec.n_heads, "num_key_value_heads": spec.n_kv_heads, "head_dim": spec.head_dim, "vocab_size": VOCAB,
              "rms_norm_eps": EPS, "max_position_embeddings": 1024, "hidden_act": "silu", "tie_word_embeddings": spec.tied,
              "attention_bias": spec.arch == "llama" and bool(spec.bias), "bos_token_id": 1, "eos_token_id": 2}
    if newer:
        config |= {"rope_parameters": {"rope_type": "default", **(spec.scaling or {}), "rope_theta": spec.theta}, "dtype": "float32"}
    else:
        config |= {"rope_theta": spec.theta, "rope_scaling": spec.scaling, "torch_dtype": "float32"}
    return config


def hf_tensors(spec, values):
    out = {"model.embed_tokens.weight": values["embedding"], "model.norm.weight": values["final_norm"]}
    if not spec.tied:
        out["lm_head.weight"] = values["head"]
    for layer in range(N_LAYERS):
        for role, (_, name) in {**MATRICES, **NORMS}.items():
            out[f"model.layers.{layer}.{name}.weight"] = values[layer, role]
            if role in spec.bias:
                out[f"model.layers.{layer}.{name}.bias"] = values[layer, role + "_bias"]
    return out


def encode(values, dtype):
    if dtype == "BF16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(np.float16 if dtype == "F16" else np.float32).tobytes()


def safetensors(tensors, dtype):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, values in tensors.items():
        raw = encode(values, dtype)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write_hf(folder, spec, w, dtype, n_shards=1, newer=False):
    target = folder / spec.name
    target.mkdir(exist_ok=True)
    values = hf_values(spec, w)
    tensors = hf_tensors(spec, values)
    (target / "config.json").write_text(json.dumps(hf_config(spec, newer), indent=2))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    if n_shards == 1:
        (target / "model.safetensors").write_bytes(safetensors(tensors, dtype))
    else:
        index = {name: f"model-{i % n_shards + 1:05}-of-{n_shards:05}.safetensors" for i, name in enumerate(tensors)}
        for file in sorted(set(index.values())):
            (target / file).write_bytes(safetensors({n: t for n, t in tensors.items() if index[n] == file}, dtype))
        (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    write_expected(folder, spec.name, spec, values, False)


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for i, kind in enumerate(ggml_blocks.MAKERS):
        spec = Spec(f"type_{kind.lower()}", kind=kind, tied=i % 2 == 0, seed=100 + i)
        write_gguf(folder, spec, Weights(spec))
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    pairs = [
        (Spec("llama", "llama", "BF16", scaling=llama3, theta=500000.0, tied=True, seed=2), "BF16", 1, False),
        (Spec("llama_bias", "llama", "F16", bias=("q", "k", "v", "o"), scaling={"rope_type": "linear", "factor": 2.0}, seed=3), "F32", 1, True),
        (Spec("mistral", "mistral", "Q8_0", n_heads=6, n_kv_heads=2, head_dim=32, seed=4), "F32", 1, False),
        (Spec("qwen2", "qwen2", "F16", n_heads=2, n_kv_heads=1, head_dim=96, theta=1000000.0, scaling=yarn, bias=("q", "k", "v"), tied=True, seed=5), "F16", 3, False),
    ]
    for spec, dtype, n_shards, newer in pairs:
        w = Weights(spec)
        write_gguf(folder, spec, w)
        write_hf(folder, spec, w, dtype, n_shards, newer)


if __name__ == "__main__":
    main()
