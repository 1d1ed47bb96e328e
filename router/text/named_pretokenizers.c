/* The pre-tokenizers that GGUF metadata names (tokenizer.ggml.pre), with llama.cpp's names and the patterns of the models' own tokenizer.json. */
#include "router/text/tokenizer_private.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Patterns without a scanner. */
#define DEFAULT_PUNCTUATION "[\\p{P}\\$\\+<=>\\^~\\|]+"
#define DEFAULT_GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)"
#define NEWLINE "[\r\n]"
#define CODER_LETTERS "\\s?\\p{L}+"
#define CODER_PUNCTUATION "\\s?\\p{P}+"
#define CODER_HAN "[\\x{4e00}-\\x{9fa5}\\x{0800}-\\x{4e00}\\x{ac00}-\\x{d7ff}]+"
#define LLM_PUNCTUATION "\\s?[!-/:-~\\x{ff01}-\\x{ff0f}\\x{ff1a}-\\x{ff5e}\\x{2018}-\\x{201f}\\x{3000}-\\x{3002}]+"
#define TRAILING_SPACE "\\s+$"
/* DeepSeek LLM's own list of cased letters. */
#define LLM_LETTERS \
    "\\s?[A-Za-z\\x{00b5}\\x{00c0}-\\x{00d6}\\x{00d8}-\\x{00f6}\\x{00f8}-\\x{01ba}\\x{01bc}-\\x{01bf}\\x{01c4}-\\x{0293}\\x{0295}-\\x{02af}" \
    "\\x{0370}-\\x{0373}\\x{0376}\\x{0377}\\x{037b}-\\x{037d}\\x{037f}\\x{0386}\\x{0388}-\\x{038a}\\x{038c}\\x{038e}-\\x{03a1}\\x{03a3}-\\x{03f5}" \
    "\\x{03f7}-\\x{0481}\\x{048a}-\\x{052f}\\x{0531}-\\x{0556}\\x{10a0}-\\x{10c5}\\x{13a0}-\\x{13f5}\\x{13f8}-\\x{13fd}\\x{1c90}-\\x{1cba}" \
    "\\x{1cbd}-\\x{1cbf}\\x{1d00}-\\x{1d2b}\\x{1d6b}-\\x{1d77}\\x{1d79}-\\x{1d9a}\\x{1e00}-\\x{1f15}\\x{1f18}-\\x{1f1d}\\x{1f20}-\\x{1f45}" \
    "\\x{1f48}-\\x{1f4d}\\x{1f50}-\\x{1f57}\\x{1f59}\\x{1f5b}\\x{1f5d}\\x{1f5f}-\\x{1f7d}\\x{1f80}-\\x{1fb4}\\x{1fb6}-\\x{1fbc}\\x{1fbe}" \
    "\\x{1fc2}-\\x{1fc4}\\x{1fc6}-\\x{1fcc}\\x{1fd0}-\\x{1fd3}\\x{1fd6}-\\x{1fdb}\\x{1fe0}-\\x{1fec}\\x{1ff2}-\\x{1ff4}\\x{1ff6}-\\x{1ffc}\\x{2102}" \
    "\\x{2107}\\x{210a}-\\x{2113}\\x{2115}\\x{2119}-\\x{211d}\\x{2124}\\x{2126}\\x{2128}\\x{212a}-\\x{212d}\\x{212f}-\\x{2134}\\x{2139}\\x{213c}-\\x{213f}" \
    "\\x{2145}-\\x{2149}\\x{214e}\\x{2183}\\x{2184}\\x{2c00}-\\x{2c7b}\\x{2c7e}-\\x{2ce4}\\x{2ceb}-\\x{2cee}\\x{2cf2}\\x{2cf3}\\x{a640}-\\x{a66d}" \
    "\\x{a680}-\\x{a69b}\\x{a722}-\\x{a76f}\\x{a771}-\\x{a787}\\x{a78b}-\\x{a78e}\\x{ab70}-\\x{abbf}\\x{fb00}-\\x{fb06}\\x{fb13}-\\x{fb17}" \
    "\\x{ff21}-\\x{ff3a}\\x{ff41}-\\x{ff5a}\\x{10400}-\\x{1044f}\\x{104b0}-\\x{104d3}\\x{104d8}-\\x{104fb}\\x{10c80}-\\x{10cb2}\\x{10cc0}-\\x{10cf2}" \
    "\\x{118a0}-\\x{118df}\\x{1e900}-\\x{1e943}]+"

#define OPS_MAX 6

struct named {
    const char *names[12];
    const char *patterns[OPS_MAX + 1];
    bool ignore_merges, add_bos, nfc;
};

static const struct named table[] = {
    {.names = {"gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"}, .patterns = {SCAN_GPT2}},
    {.names = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}, .patterns = {SCAN_DIGIT, SCAN_GPT2}},
    {.names = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"}, .patterns = {SCAN_LLAMA3}, .ignore_merges = true, .add_bos = true},
    {.names = {"dbrx", "smaug-bpe"}, .patterns = {SCAN_LLAMA3}},
    /* Qwen's own tokenizer normalizes; GGUF metadata does not say so. */
    {.names = {"qwen2", "deepseek-r1-qwen"}, .patterns = {SCAN_QWEN2}, .nfc = true},
    {.names = {"stablelm2", "megrez", "hunyuan"}, .patterns = {SCAN_QWEN2}},
    {.names = {"tekken"}, .patterns = {SCAN_TEKKEN}, .ignore_merges = true, .add_bos = true},
    {.names = {"gpt-4o", "llama4"}, .patterns = {SCAN_GPT4O}},
    {.names = {"deepseek-v3"}, .patterns = {SCAN_DIGITS3, SCAN_CJK, SCAN_DEEPSEEK3}},
    {.names = {"deepseek-coder"}, .patterns = {NEWLINE, CODER_LETTERS, CODER_PUNCTUATION, CODER_HAN, SCAN_DIGIT}},
    {.names = {"deepseek-llm"}, .patterns = {NEWLINE, LLM_LETTERS, LLM_PUNCTUATION, TRAILING_SPACE, CODER_HAN, "\\p{N}+"}},
    {.names = {"default"}, .patterns = {DEFAULT_PUNCTUATION, DEFAULT_GPT2, "\\p{N}+", "[0-9][0-9][0-9]"}},
};

int tokenizer_add_isolated(struct pretokenizer *pt, const char *pattern, size_t len, struct error *err)
{
    if (pt->n == PRETOK_OPS_MAX)
        return error_set(err, -ENOTSUP, "more than %d pre-tokenizers", PRETOK_OPS_MAX);
    struct pretok_op op = {.kind = PRETOK_SCAN, .behavior = PRETOK_ISOLATED, .scan = scan_find(pattern, len)};
    if (!op.scan) {
        op.kind = PRETOK_REGEX;
        int r = regex_compile(pattern, len, &op.regex, err);
        if (r < 0)
            return r;
    }
    pt->ops[pt->n++] = op;
    return 0;
}

static bool has_name(const struct named *entry, const char *name, size_t len)
{
    for (size_t i = 0; i < sizeof entry->names / sizeof entry->names[0] && entry->names[i]; i++)
        if (strlen(entry->names[i]) == len && memcmp(entry->names[i], name, len) == 0)
            return true;
    return false;
}

int tokenizer_named_pretokenizer(struct tokenizer *tok, const char *name, size_t len, bool *ret_ignore_merges, bool *ret_add_bos, struct error *err)
{
    const struct named *entry = table, *end = table + sizeof table / sizeof table[0];
    while (entry < end && !has_name(entry, name, len))
        entry++;
    if (entry == end)
        return error_set(err, -ENOTSUP, "tokenizer.ggml.pre \"%.*s\" is not supported", (int)(len < 64 ? len : 64), name);
    for (size_t i = 0; entry->patterns[i]; i++) {
        int r = tokenizer_add_isolated(&tok->pretokenizer, entry->patterns[i], strlen(entry->patterns[i]), err);
        if (r < 0)
            return r;
    }
    if (entry->nfc)
        tok->normalizer.ops[tok->normalizer.n++] = (struct normalize_op){.kind = NORMALIZE_NFC};
    *ret_ignore_merges = entry->ignore_merges;
    *ret_add_bos = entry->add_bos;
    return 0;
}
