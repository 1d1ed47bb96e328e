#include "tiny_tokenizer.h"
#include "proto/base/base_assert.h"
#include <stdio.h>
#include <string.h>

static void write_special(struct json_writer *w, int id, const char *text)
{
    json_write_object(w);
    json_write_kint(w, "id", id);
    json_write_kstr(w, "content", text);
    json_write_kbool(w, "single_word", false);
    json_write_kbool(w, "lstrip", false);
    json_write_kbool(w, "rstrip", false);
    json_write_kbool(w, "normalized", false);
    json_write_kbool(w, "special", true);
    json_write_object_end(w);
}

static void write_vocab(struct json_writer *w)
{
    static const char *const merged[] = {"he", "\xc4\xa0" "a"};
    int id = 0;
    json_write_object(w);
    json_write_kint(w, "<|im_start|>", id++);
    json_write_kint(w, "<|im_end|>", id++);
    json_write_kint(w, "<s>", id++);
    for (int c = 33; c < 127; c++) {
        char name[2] = {(char)c, 0};
        json_write_kint(w, name, id++);
    }
    json_write_kint(w, "\xc4\xa0", id++); /* the space's stand-in */
    json_write_kint(w, "\xc4\x8a", id++); /* the line break's */
    for (size_t i = 0; i < 2; i++)
        json_write_kint(w, merged[i], id++);
    json_write_object_end(w);
}

static void write_merges(struct json_writer *w)
{
    json_write_array(w);
    json_write_str(w, "h e");
    json_write_str(w, "\xc4\xa0 a");
    json_write_array_end(w);
}

static void write_added(struct json_writer *w)
{
    json_write_array(w);
    write_special(w, TINY_IM_START, "<|im_start|>");
    write_special(w, TINY_IM_END, "<|im_end|>");
    write_special(w, TINY_BOS, "<s>");
    json_write_array_end(w);
}

struct tokenizer *tiny_tokenizer_open(void)
{
    return bpe_tokenizer_open(write_added, write_vocab, write_merges);
}

struct tokenizer *bpe_tokenizer_open(json_part_fn *added, json_part_fn *vocab, json_part_fn *merges)
{
    static const char byte_level[] = "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":true}";
    struct tokenizer *tok = NULL;
    struct json_writer w;
    struct error err = {.text = ""};
    struct buf text;
    buf_init(&text, 1 << 20);
    json_write_begin(&w, &text);
    json_write_object(&w);
    json_write_kstr(&w, "version", "1.0");
    json_write_key(&w, "added_tokens");
    added(&w);
    json_write_knull(&w, "normalizer");
    json_write_key(&w, "pre_tokenizer");
    json_write_raw(&w, byte_level, strlen(byte_level));
    json_write_knull(&w, "post_processor");
    json_write_key(&w, "decoder");
    json_write_raw(&w, byte_level, strlen(byte_level));
    json_write_kobject(&w, "model");
    json_write_kstr(&w, "type", "BPE");
    json_write_key(&w, "vocab");
    vocab(&w);
    json_write_key(&w, "merges");
    merges(&w);
    json_write_object_end(&w);
    json_write_object_end(&w);
    ASSERT(json_write_end(&w) == 0);
    ASSERT(tokenizer_open_json((const char *)text.data, text.len, &tok, &err) == 0);
    buf_fini(&text);
    return tok;
}
