#include "proto/base/log.h"
#include "proto/base/json_write.h"
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A line fits into PIPE_BUF, so that lines of several processes on one pipe never mix. Long values are cut, and fields that do
 * not fit are left out; both are said in the line. */
enum {
    LOG_LINE_MAX = PIPE_BUF,
    LOG_TAIL_MAX = 64, /* room kept for the truncation mark and the end of the line */
    LOG_VALUE_MAX = 1024,
};

const char *const log_level_choices[] = {"debug", "info", "warn", "error", NULL};
const char *const log_format_choices[] = {"logfmt", "json", NULL};

static const char *log_process = "tidepool";
static enum log_level log_level_min = LOG_LEVEL_INFO;
static enum log_format log_line_format = LOG_FORMAT_LOGFMT;
static atomic_uint_fast64_t log_n_dropped;

void log_init(const char *process, enum log_level level, enum log_format format)
{
    log_process = process;
    log_level_min = level;
    log_line_format = format;
}

uint64_t log_dropped(void)
{
    /* Relaxed: a counter that orders nothing. */
    return atomic_load_explicit(&log_n_dropped, memory_order_relaxed);
}

static const char *level_name(enum log_level level)
{
    return log_level_choices[level];
}

static void stamp(char *text, size_t size)
{
    struct timespec ts;
    struct tm tm;
    clock_gettime(CLOCK_REALTIME, &ts);
    gmtime_r(&ts.tv_sec, &tm);
    size_t n = strftime(text, size, "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(text + n, size - n, ".%03ldZ", ts.tv_nsec / 1000000);
}

static bool needs_quotes(const char *s, size_t n)
{
    if (n == 0)
        return true;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c <= ' ' || c == '"' || c == '=' || c == '\\' || c >= 0x7F)
            return true;
    }
    return false;
}

/* A quoted logfmt value is a JSON string, so that control characters cannot forge a line. */
static int put_logfmt_str(struct buf *line, const char *s, size_t n)
{
    if (!needs_quotes(s, n))
        return buf_append(line, s, n);
    struct json_writer w;
    json_write_begin(&w, line);
    json_write_str_n(&w, s, n);
    return json_write_end(&w);
}

static int put_logfmt_field(struct buf *line, const struct log_field *f)
{
    int rc = buf_printf(line, "%s%s=", line->len ? " " : "", f->key);
    if (rc < 0)
        return rc;
    switch (f->kind) {
    case LOG_KIND_INT:
        return buf_printf(line, "%lld", (long long)f->num);
    case LOG_KIND_DOUBLE:
        return buf_printf(line, "%.6g", f->dbl);
    case LOG_KIND_STR:
        break;
    }
    const char *s = f->str ? f->str : "";
    return put_logfmt_str(line, s, strnlen(s, LOG_VALUE_MAX));
}

static int put_json_field(struct json_writer *w, const struct log_field *f)
{
    json_write_key(w, f->key);
    switch (f->kind) {
    case LOG_KIND_INT:
        json_write_int(w, f->num);
        break;
    case LOG_KIND_DOUBLE:
        json_write_double(w, f->dbl);
        break;
    case LOG_KIND_STR:
        if (f->str)
            json_write_str_n(w, f->str, strnlen(f->str, LOG_VALUE_MAX));
        else
            json_write_null(w);
        break;
    }
    return w->error;
}

/* Adds one field or, if it does not fit, nothing. */
static bool put_field(struct buf *line, struct json_writer *w, const struct log_field *f)
{
    size_t len = line->len;
    struct json_writer before = *w;
    int rc = log_line_format == LOG_FORMAT_JSON ? put_json_field(w, f) : put_logfmt_field(line, f);
    if (rc == 0)
        return true;
    line->len = len;
    *w = before;
    return false;
}

static bool is_cut(const struct log_field *f)
{
    return f->kind == LOG_KIND_STR && f->str && strnlen(f->str, LOG_VALUE_MAX + 1) > LOG_VALUE_MAX;
}

static int build_line(struct buf *line, enum log_level level, const char *event, const struct log_field *fields, size_t n)
{
    char ts[64];
    stamp(ts, sizeof(ts));
    const struct log_field head[] = {LOG_STR("event", event), LOG_STR("ts", ts), LOG_STR("level", level_name(level)), LOG_STR("proc", log_process)};
    struct json_writer w;
    json_write_begin(&w, line);
    if (log_line_format == LOG_FORMAT_JSON)
        json_write_object(&w);
    int n_cut = 0;
    for (size_t i = 0; i < ARRAY_LEN(head); i++)
        n_cut += !put_field(line, &w, &head[i]);
    for (size_t i = 0; i < n; i++)
        n_cut += !put_field(line, &w, &fields[i]) || is_cut(&fields[i]);
    line->max = LOG_LINE_MAX;
    if (n_cut) {
        const struct log_field mark = LOG_INT("fields_cut", n_cut);
        put_field(line, &w, &mark);
    }
    if (log_line_format == LOG_FORMAT_JSON)
        json_write_object_end(&w);
    int rc = json_write_end(&w);
    return rc < 0 ? rc : buf_append_str(line, "\n");
}

void log_write(enum log_level level, const char *event, const struct log_field *fields, size_t n)
{
    if (level < log_level_min)
        return;
    int saved = errno;
    struct buf line;
    buf_init(&line, LOG_LINE_MAX - LOG_TAIL_MAX);
    bool written = false;
    if (build_line(&line, level, event, fields, n) == 0) {
        ssize_t rc;
        do
            rc = write(STDERR_FILENO, line.data, line.len);
        while (rc < 0 && errno == EINTR);
        written = rc == (ssize_t)line.len;
    }
    if (!written)
        atomic_fetch_add_explicit(&log_n_dropped, 1, memory_order_relaxed);
    buf_fini(&line);
    errno = saved;
}
