#!/usr/bin/env python3
"""Writes the seed corpora gguf/, safetensors/ and model_config/ below corpus/. Standard library only; the output is always the same."""
import json
import pathlib
import struct
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "system"))
from gguf_write import ARR, BOOL, F32, I8, I32, STR, TYPES, U8, U16, U32, U64, entry, gguf  # noqa: E402

CORPUS = HERE / "corpus"


def tensor(name, kind, dims):
    """A tensor whose bytes count up to 63 again and again."""
    n = 1
    for d in dims:
        n *= d
    _, block, size = TYPES[kind]
    return name, kind, dims, bytes(i & 0x3F for i in range(n // block * size))


def model_entries(arch, **more):
    numbers = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32, "attention.head_count": 1}
    out = [entry("general.architecture", STR, arch)]
    out += [entry(f"{arch}.{k}", U32, v) for k, v in numbers.items()]
    out += [entry(f"{arch}.attention.layer_norm_rms_epsilon", F32, 1e-5)]
    return out + [entry(f"{arch}.{k.replace('__', '.')}", *v) for k, v in more.items()]


def gguf_files():
    embedding = tensor("token_embd.weight", "F16", [32, 4])
    kinds = [tensor(f"t{k}", k, [256]) for k in TYPES]
    tokens = [entry("tokenizer.ggml.tokens", ARR, ["a", "<|eot_id|>", ""], STR), entry("tokenizer.ggml.token_type", ARR, [1, 3, 2], I32),
              entry("tokenizer.ggml.eos_token_id", U32, 2)]
    yarn = {"rope__scaling__type": (STR, "yarn"), "rope__scaling__factor": (F32, 4.0)}
    return {
        "empty": gguf([], []),
        "version2": gguf([entry("k", BOOL, 1)], [], version=2),
        "alignment": gguf([entry("general.alignment", U32, 64)], [tensor("t", "F32", [3, 2])], alignment=64),
        "kinds": gguf([], kinds),
        "values": gguf([entry("a", U8, 1), entry("b", I8, -1), entry("c", U16, 2), entry("d", U64, 1 << 60), entry("e", ARR, [1.5, 2.5], F32)], []),
        "llama": gguf(model_entries("llama") + tokens, [embedding, tensor("rope_freqs.weight", "F32", [16])]),
        "qwen2": gguf(model_entries("qwen2", rope__freq_base=(F32, 1e6), **yarn), [embedding, tensor("output.weight", "Q8_0", [32, 4])]),
        "moe": gguf(model_entries("llama", expert_count=(U32, 8)), [embedding]),
        "truncated": gguf(model_entries("llama") + tokens, [embedding])[:-40],
    }


def safetensors(header, data):
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + data


def safetensors_files():
    a = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    b = {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]}
    c = {"dtype": "I64", "shape": [], "data_offsets": [24, 32]}
    return {
        "one": safetensors({"a": a}, bytes(16)),
        "three": safetensors({"__metadata__": {"format": "pt"}, "b": b, "a": a, "c": c}, bytes(range(32))),
        "empty": safetensors({}, b""),
        "zero_dim": safetensors({"z": {"dtype": "F16", "shape": [0, 5], "data_offsets": [0, 0]}}, b""),
        "beyond": safetensors({"a": a}, bytes(8)),
        "escaped": safetensors({"model.\u00e9\n": a}, bytes(16)),
        "short": b"\x08\0\0\0\0\0\0\0{}",
    }


def configs():
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
             "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "hidden_act": "silu"}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 32, "beta_slow": 1, "truncate": False,
            "mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": None}
    return {
        "llama": {"architectures": ["LlamaForCausalLM"], **shape, "rope_scaling": llama3, "rope_theta": 500000.0, "eos_token_id": [1, 2]},
        "llama_new": {"architectures": ["LlamaForCausalLM"], **shape, "rope_parameters": {**llama3, "rope_theta": 500000.0}, "head_dim": 64},
        "mistral": {"architectures": ["MistralForCausalLM"], **shape, "sliding_window": 512, "eos_token_id": 2},
        "qwen2": {"architectures": ["Qwen2ForCausalLM"], **shape, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 64,
                  "layer_types": ["full_attention", "sliding_attention"], "rope_scaling": yarn, "tie_word_embeddings": True},
        "linear": {"architectures": ["LlamaForCausalLM"], **shape, "rope_scaling": {"type": "linear", "factor": 2}, "attention_bias": True},
        "generation": {"eos_token_id": [5, 6, 7], "do_sample": True},
    }


def main():
    files = {"gguf": gguf_files(), "safetensors": safetensors_files(), "model_config": {k: json.dumps(v).encode() for k, v in configs().items()}}
    for what, seeds in files.items():
        folder = CORPUS / what
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in seeds.items():
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
