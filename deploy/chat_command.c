/* `tidepool chat`: talks to a running server from the terminal, or asks one question about a document and prints what it cost. */
#include "deploy/commands.h"
#include "deploy/http_client.h"
#include "deploy/sse.h"
#include "proto/base/base_assert.h"
#include "proto/base/buf.h"
#include "proto/base/clock.h"
#include "proto/base/json_write.h"
#include "proto/base/options.h"
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DOCUMENT_MAX = 16 << 20, HISTORY_MAX = 64 << 20, SILENCE_S = 600 };

struct chat_options {
    const char *url, *api_key, *message, *file, *system, *model;
    int64_t max_tokens, seed;
    double temperature;
    bool stats;
};

#define FIELD(f) .offset = offsetof(struct chat_options, f)
static const struct option_spec specs[] = {
    {.name = "url", .kind = OPTION_STR, FIELD(url), .fallback = "http://127.0.0.1:8080", .metavar = "URL", .help = "the server"},
    {.name = "api-key", .kind = OPTION_STR, FIELD(api_key), .optional = true, .metavar = "KEY", .help = "key, when the server asks for one"},
    {.name = "message", .kind = OPTION_STR, FIELD(message), .optional = true, .metavar = "TEXT", .help = "ask this and end; without it: a conversation"},
    {.name = "file", .kind = OPTION_STR, FIELD(file), .optional = true, .metavar = "PATH", .help = "a document that stands before the first message"},
    {.name = "system", .kind = OPTION_STR, FIELD(system), .optional = true, .metavar = "TEXT", .help = "system message"},
    {.name = "model", .kind = OPTION_STR, FIELD(model), .fallback = "default", .metavar = "NAME", .help = "model name; \"default\" is whatever is served"},
    {.name = "max-tokens", .kind = OPTION_INT, FIELD(max_tokens), .fallback = "512", .min = 1, .max = 1 << 20, .metavar = "N", .help = "longest answer in tokens"},
    {.name = "temperature", .kind = OPTION_DOUBLE, FIELD(temperature), .fallback = "0.2", .min = 0, .max = 2, .metavar = "T", .help = "0: always the likeliest token"},
    {.name = "seed", .kind = OPTION_INT, FIELD(seed), .fallback = "1", .min = 0, .max = INT64_MAX, .metavar = "N", .help = "same seed, same answer"},
    {.name = "stats", .kind = OPTION_BOOL, FIELD(stats), .fallback = "off", .help = "print time to first token, cached tokens, tokens/s and bytes moved from the pool"},
};
static const struct option_set option_set = {
    .program = "tidepool chat",
    .summary = "Talks to a running server. Ctrl-C stops an answer, Ctrl-D ends.",
    .examples = "  tidepool chat\n"
                "  tidepool chat --message 'What is a tide pool?' --max-tokens 64\n"
                "  tidepool chat --file report.txt --message 'Summarize the report.' --stats\n",
    .specs = specs,
    .n_specs = ARRAY_LEN(specs),
};

struct chat {
    struct chat_options options;
    struct loop *loop;
    struct loop_source *interrupt;
    struct http_request *request;
    struct buf history; /* JSON of the messages so far, comma-separated */
    struct buf answer;
    struct sse_reader sse;
    char host[256];
    uint16_t port;
    uint64_t sent_us, first_us, last_us;
    int status;         /* HTTP status or negative errno of the last request */
    bool interrupted;
};

static int parse_url(const char *url, char *host, size_t size, uint16_t *ret_port, struct error *err)
{
    static const char scheme[] = "http://";
    unsigned port = 80;
    if (strncmp(url, scheme, strlen(scheme)) != 0)
        return error_set(err, -EINVAL, "--url %s: must begin with http://", url);
    const char *at = url + strlen(scheme);
    size_t n = strcspn(at, ":/");
    if (n == 0 || n >= size)
        return error_set(err, -EINVAL, "--url %s: no host name", url);
    if (at[n] == ':') {
        char *end;
        port = (unsigned)strtoul(at + n + 1, &end, 10);
        if (end == at + n + 1 || (*end && *end != '/') || port == 0 || port > 65535)
            return error_set(err, -EINVAL, "--url %s: the port must be 1 to 65535", url);
    }
    memcpy(host, at, n);
    host[n] = '\0';
    *ret_port = (uint16_t)port;
    return 0;
}

static int read_document(const char *path, struct buf *ret_text, struct error *err)
{
    char piece[65536];
    size_t n;
    FILE *f = fopen(path, "re");
    if (!f)
        return error_set(err, -errno, "--file %s: %s", path, strerror(errno));
    int r = 0;
    while (r == 0 && (n = fread(piece, 1, sizeof(piece), f)) > 0)
        r = buf_append(ret_text, piece, n);
    fclose(f);
    return r < 0 ? error_set(err, r, "--file %s: longer than %d bytes", path, DOCUMENT_MAX) : 0;
}

/* Appends {"role": ..., "content": ...} to the history. */
static int add_message(struct chat *c, const char *role, const char *text, size_t n)
{
    struct buf one;
    struct json_writer w;
    buf_init(&one, HISTORY_MAX);
    json_write_begin(&w, &one);
    json_write_object(&w);
    json_write_kstr(&w, "role", role);
    json_write_key(&w, "content");
    json_write_str_n(&w, text, n);
    json_write_object_end(&w);
    int r = json_write_end(&w);
    if (r >= 0 && c->history.len > 0)
        r = buf_append_str(&c->history, ",");
    if (r >= 0)
        r = buf_append(&c->history, one.data, one.len);
    buf_fini(&one);
    return r;
}

static int write_body(const struct chat *c, struct buf *ret_body)
{
    struct json_writer w;
    json_write_begin(&w, ret_body);
    json_write_object(&w);
    if (strcmp(c->options.model, "default") != 0)
        json_write_kstr(&w, "model", c->options.model);
    json_write_karray(&w, "messages");
    json_write_raw(&w, (const char *)c->history.data, c->history.len);
    json_write_array_end(&w);
    json_write_kint(&w, "max_tokens", c->options.max_tokens);
    json_write_kdouble(&w, "temperature", c->options.temperature);
    json_write_kint(&w, "seed", c->options.seed);
    json_write_kbool(&w, "stream", true);
    json_write_kobject(&w, "stream_options");
    json_write_kbool(&w, "include_usage", true);
    json_write_object_end(&w);
    json_write_object_end(&w);
    return json_write_end(&w);
}

static void on_text(const char *text, size_t len, void *arg)
{
    struct chat *c = arg;
    c->last_us = clock_now_us();
    if (c->first_us == 0)
        c->first_us = c->last_us;
    fwrite(text, 1, len, stdout);
    fflush(stdout);
    buf_append(&c->answer, text, len);
}

static void on_data(int status, const char *data, size_t len, void *arg)
{
    struct chat *c = arg;
    if (status == 200)
        sse_reader_feed(&c->sse, data, len);
    else
        sse_reader_error_body(&c->sse, data, len);
}

static void on_done(int status, void *arg)
{
    struct chat *c = arg;
    c->status = status;
    loop_stop(c->loop);
}

static void on_interrupt(int signal, void *arg)
{
    struct chat *c = arg;
    (void)signal;
    c->interrupted = true;
    loop_stop(c->loop);
}

static void print_stats(const struct chat *c)
{
    const struct chat_usage *u = &c->sse.usage;
    double decode_s = (double)(c->last_us - c->first_us) / 1e6;
    fprintf(stderr, "  time to first token  %.0f ms\n", (double)(c->first_us - c->sent_us) / 1e3);
    fprintf(stderr, "  prompt tokens        %lld, of them cached %lld\n", (long long)u->prompt_tokens, (long long)u->cached_tokens);
    if (u->completion_tokens > 1 && decode_s > 0)
        fprintf(stderr, "  answer               %lld tokens, %.1f tokens/s\n", (long long)u->completion_tokens, (double)(u->completion_tokens - 1) / decode_s);
    if (u->bytes_loaded >= 0)
        fprintf(stderr, "  prefix from the pool %.1f MB\n", (double)u->bytes_loaded / 1e6);
    if (u->bytes_attended >= 0 && u->bytes_missed >= 0)
        fprintf(stderr, "  slow tier attended   %.1f MB, of them fetched from the pool %.1f MB\n", (double)u->bytes_attended / 1e6, (double)u->bytes_missed / 1e6);
    if (u->worker[0])
        fprintf(stderr, "  answered by          %s\n", u->worker);
}

/* Sends the history and prints the answer. 0, or -EIO after printing why. */
static int ask(struct chat *c)
{
    const struct http_handler handler = {.on_data = on_data, .on_done = on_done, .arg = c};
    struct buf body;
    buf_init(&body, HISTORY_MAX);
    buf_clear(&c->answer);
    sse_reader_fini(&c->sse);
    sse_reader_init(&c->sse, on_text, c);
    c->first_us = c->last_us = 0;
    c->status = 0;
    c->interrupted = false;
    int r = write_body(c, &body);
    c->sent_us = clock_now_us();
    if (r >= 0)
        r = http_request_start(c->loop, c->host, c->port, "/v1/chat/completions", c->options.api_key, (const char *)body.data, body.len, SILENCE_S, &handler, &c->request);
    if (r >= 0)
        r = loop_run(c->loop);
    http_request_free(c->request);
    c->request = NULL;
    buf_fini(&body);
    printf("\n");
    if (r < 0)
        c->status = r;
    if (c->interrupted)
        return 0;
    if (c->status != 200 || c->sse.error.len > 0) {
        const char *why = c->sse.error.len > 0 ? buf_cstr(&c->sse.error) : c->status < 0 ? strerror(-c->status) : "no message";
        fprintf(stderr, "tidepool chat: %s: %s\n", c->options.url, why);
        return -EIO;
    }
    if (c->options.stats && c->sse.has_usage)
        print_stats(c);
    return 0;
}

static int first_message(struct chat *c, const char *message, struct error *err)
{
    struct buf text;
    buf_init(&text, DOCUMENT_MAX);
    int r = 0;
    if (c->options.file) {
        r = read_document(c->options.file, &text, err);
        if (r >= 0)
            r = buf_append_str(&text, "\n\n");
    }
    if (r >= 0)
        r = buf_append_str(&text, message);
    if (r >= 0)
        r = add_message(c, "user", (const char *)text.data, text.len);
    buf_fini(&text);
    return r;
}

static int converse(struct chat *c, struct error *err)
{
    char *line = NULL;
    size_t cap = 0;
    bool first = true;
    int r = 0;
    while (r >= 0) {
        if (isatty(STDIN_FILENO))
            printf("> "), fflush(stdout);
        ssize_t n = getline(&line, &cap, stdin);
        if (n < 0)
            break;
        if (n > 0 && line[n - 1] == '\n')
            line[--n] = '\0';
        if (n == 0)
            continue;
        size_t mark = c->history.len;
        r = first ? first_message(c, line, err) : add_message(c, "user", line, (size_t)n);
        if (r < 0)
            break;
        if (ask(c) < 0) {
            c->history.len = mark; /* the question can be asked again */
            if (!isatty(STDIN_FILENO))
                r = -EIO;
            continue;
        }
        first = false;
        r = add_message(c, "assistant", (const char *)c->answer.data, c->answer.len);
    }
    free(line);
    return r;
}

static int chat_run(struct chat *c, struct error *err)
{
    int r = loop_create(&c->loop);
    if (r >= 0)
        r = loop_signal_add(c->loop, SIGINT, on_interrupt, c, &c->interrupt);
    if (r >= 0 && c->options.system)
        r = add_message(c, "system", c->options.system, strlen(c->options.system));
    if (r < 0)
        return r;
    if (!c->options.message)
        return converse(c, err);
    r = first_message(c, c->options.message, err);
    return r < 0 ? r : ask(c);
}

int chat_command(int argc, char **argv)
{
    struct chat c = {.status = 0};
    struct error err = {.text = ""};
    int r = options_parse(&option_set, argc, argv, &c.options, NULL, &err);
    if (r > 0)
        return 0;
    if (r >= 0)
        r = parse_url(c.options.url, c.host, sizeof(c.host), &c.port, &err);
    if (r < 0) {
        fprintf(stderr, "tidepool chat: %s\n", err.text);
        return 2;
    }
    buf_init(&c.history, HISTORY_MAX);
    buf_init(&c.answer, HISTORY_MAX);
    sse_reader_init(&c.sse, on_text, &c);
    r = chat_run(&c, &err);
    if (r < 0 && r != -EIO)
        fprintf(stderr, "tidepool chat: %s\n", err.text[0] ? err.text : strerror(-r));
    loop_source_free(c.interrupt);
    loop_free(c.loop);
    sse_reader_fini(&c.sse);
    buf_fini(&c.answer);
    buf_fini(&c.history);
    return r < 0 ? 1 : 0;
}
