/* `tidepool tokenize`: text to token ids and back, by the tokenizer of a model. */
#include "deploy/tokenize_command.h"
#include "deploy/commands.h"
#include "formats/json.h"
#include "proto/base/base_assert.h"
#include "proto/base/buf.h"
#include "proto/base/json_write.h"
#include "proto/base/options.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define FIELD(f) .offset = offsetof(struct tokenize_options, f)
static const struct option_spec specs[] = {
    {.name = "tokenizer", .kind = OPTION_STR, FIELD(tokenizer), .metavar = "PATH", .help = "a GGUF file, a tokenizer.json, or a folder that holds one"},
    {.name = "json-lines", .kind = OPTION_BOOL, FIELD(json_lines), .fallback = "off", .help = "read one JSON string a line instead of one text"},
    {.name = "special", .kind = OPTION_BOOL, FIELD(special), .fallback = "off", .help = "the text of a special token becomes that token; otherwise it stays text"},
    {.name = "add-special", .kind = OPTION_BOOL, FIELD(add_special), .fallback = "off", .help = "add what the model begins and ends a text with (BOS, EOS)"},
    {.name = "decode", .kind = OPTION_BOOL, FIELD(decode), .fallback = "off", .help = "read ids, one text a line, and print the text (as a JSON string with --json-lines)"},
};
static const struct option_set option_set = {
    .program = "tidepool tokenize",
    .summary = "Reads text from standard input and prints its token ids, separated by spaces.",
    .examples = "  echo -n 'Hello, world!' | tidepool tokenize --tokenizer models/SmolLM2-135M-Instruct.Q4_1.gguf\n"
                "  tidepool tokenize --tokenizer tokenizer.json --json-lines < strings.jsonl\n"
                "  echo '19556 28 905 17' | tidepool tokenize --tokenizer models/SmolLM2-135M-Instruct.Q4_1.gguf --decode\n",
    .specs = specs,
    .n_specs = ARRAY_LEN(specs),
};

enum { OUT_BYTES_MAX = 1 << 30 };

/* One run over the input. */
struct tokenize_run {
    const struct tokenizer *tok;
    const struct tokenize_options *options;
    FILE *out;
    struct token_ids ids;
    struct buf text;
    struct error *err;
};

static int print_ids(struct tokenize_run *run)
{
    for (size_t i = 0; i < run->ids.n; i++)
        fprintf(run->out, i ? " %d" : "%d", run->ids.data[i]);
    fputc('\n', run->out);
    return 0;
}

static int encode(struct tokenize_run *run, const char *text, size_t len)
{
    int flags = (run->options->special ? TOKENIZE_PARSE_SPECIAL : 0) | (run->options->add_special ? TOKENIZE_ADD_SPECIAL : 0);
    run->ids.n = 0;
    int r = tokenizer_encode(run->tok, text, len, flags, &run->ids, run->err);
    return r < 0 ? r : print_ids(run);
}

static int encode_json(struct tokenize_run *run, const char *line, size_t len)
{
    struct json j;
    struct json_str s;
    json_init(&j, line, len);
    json_string(&j, &s);
    int r = json_end(&j) < 0 ? error_set(run->err, -EINVAL, "not a JSON string: %s at byte %zu", j.error_text, j.error_pos) : encode(run, s.data, s.len);
    json_fini(&j);
    return r;
}

/* Ids separated by white space or commas, with or without brackets. `line` is NUL-terminated. */
static int parse_ids(struct tokenize_run *run, const char *line)
{
    static const char between[] = " \t\r\n,[]";
    run->ids.n = 0;
    for (line += strspn(line, between); *line; line += strspn(line, between)) {
        char *end;
        errno = 0;
        long id = strtol(line, &end, 10);
        if (end == line || errno || id < 0 || id > INT32_MAX)
            return error_set(run->err, -EINVAL, "not a token id: %.20s", line);
        if (token_ids_append(&run->ids, (int32_t)id) < 0)
            return error_set(run->err, -ENOMEM, "out of memory");
        line = end;
    }
    return 0;
}

static int decode(struct tokenize_run *run, const char *line)
{
    int r = parse_ids(run, line);
    if (r < 0)
        return r;
    buf_clear(&run->text);
    r = tokenizer_decode(run->tok, run->ids.data, run->ids.n, false, &run->text);
    if (r < 0)
        return error_set(run->err, r, r == -ERANGE ? "an id is outside the vocabulary" : "the text is too long");
    if (!run->options->json_lines) {
        fwrite(run->text.data, 1, run->text.len, run->out);
        fputc('\n', run->out);
        return 0;
    }
    struct buf quoted;
    struct json_writer w;
    buf_init(&quoted, OUT_BYTES_MAX);
    json_write_begin(&w, &quoted);
    json_write_str_n(&w, (const char *)run->text.data, run->text.len);
    r = json_write_end(&w);
    if (r == 0)
        fprintf(run->out, "%s\n", buf_cstr(&quoted));
    buf_fini(&quoted);
    return r < 0 ? error_set(run->err, r, "the text is too long") : 0;
}

static int each_line(struct tokenize_run *run, FILE *in)
{
    char *line = NULL;
    size_t cap = 0, number = 0;
    ssize_t len;
    int r = 0;
    while (r == 0 && (len = getline(&line, &cap, in)) >= 0) {
        number++;
        if (len > 0 && line[len - 1] == '\n')
            line[--len] = '\0';
        r = run->options->decode ? decode(run, line) : encode_json(run, line, (size_t)len);
    }
    if (r == 0 && ferror(in))
        r = error_set(run->err, -EIO, "reading failed: %s", strerror(errno));
    free(line);
    if (r < 0) {
        struct error reason = *run->err;
        error_set(run->err, r, "line %zu: %s", number, reason.text);
    }
    return r;
}

static int whole_text(struct tokenize_run *run, FILE *in)
{
    struct buf text;
    buf_init(&text, TOKENIZER_TEXT_MAX);
    int r;
    for (;;) {
        r = buf_reserve(&text, 65536 < text.max - text.len ? 65536 : text.max - text.len);
        if (r < 0)
            break;
        size_t n = fread(text.data + text.len, 1, text.cap - text.len, in);
        text.len += n;
        if (n == 0)
            break;
    }
    if (r < 0)
        r = error_set(run->err, r, "out of memory");
    else if (ferror(in) || !feof(in))
        r = error_set(run->err, -EIO, ferror(in) ? "reading failed: %s" : "the text is longer than can be encoded", strerror(errno));
    else
        r = encode(run, (const char *)text.data, text.len);
    buf_fini(&text);
    return r;
}

int tokenize_stream(const struct tokenizer *tok, const struct tokenize_options *options, FILE *in, FILE *out, struct error *err)
{
    struct tokenize_run run = {.tok = tok, .options = options, .out = out, .err = err};
    buf_init(&run.text, OUT_BYTES_MAX);
    int r = options->json_lines || options->decode ? each_line(&run, in) : whole_text(&run, in);
    if (r == 0 && (fflush(out) != 0 || ferror(out)))
        r = error_set(err, -EIO, "writing failed: %s", strerror(errno));
    buf_fini(&run.text);
    token_ids_fini(&run.ids);
    return r;
}

int tokenize_command(int argc, char **argv)
{
    struct tokenize_options options;
    struct tokenizer *tok;
    struct error err;
    int r = options_parse(&option_set, argc, argv, &options, NULL, &err);
    if (r > 0)
        return 0;
    if (r < 0) {
        fprintf(stderr, "tidepool tokenize: %s\n", err.text);
        return 2;
    }
    r = tokenizer_open(options.tokenizer, &tok, &err);
    if (r == 0) {
        r = tokenize_stream(tok, &options, stdin, stdout, &err);
        tokenizer_close(tok);
    }
    if (r < 0)
        fprintf(stderr, "tidepool tokenize: %s\n", err.text);
    return r < 0 ? 1 : 0;
}
