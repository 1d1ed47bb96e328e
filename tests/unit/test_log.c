#include "proto/base/log.h"
#include <criterion/criterion.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

/* What one test logged: stderr is a pipe while it runs. Criterion runs each test in a process of its own. */
static int read_end, saved_stderr;
static char captured[65536];

static void capture_start(void)
{
    int fds[2];
    cr_assert_eq(pipe2(fds, O_CLOEXEC), 0);
    saved_stderr = dup(STDERR_FILENO);
    dup2(fds[1], STDERR_FILENO);
    close(fds[1]);
    read_end = fds[0];
}

static const char *capture_end(void)
{
    dup2(saved_stderr, STDERR_FILENO);
    size_t n = 0;
    ssize_t got;
    while ((got = read(read_end, captured + n, sizeof(captured) - 1 - n)) > 0)
        n += (size_t)got;
    captured[n] = '\0';
    close(read_end);
    return captured;
}

Test(log, test_logfmt_quotes_what_needs_it)
{
    log_init("worker", LOG_LEVEL_INFO, LOG_FORMAT_LOGFMT);
    capture_start();
    LOG_INFO("worker_ready", LOG_STR("worker", "w0"), LOG_INT("n_layers", 30), LOG_DOUBLE("load", 0.25), LOG_STR("why", "a \"b\"\nevent=forged"), LOG_STR("none", NULL), LOG_STR("empty", ""));
    const char *line = capture_end();
    cr_assert(strncmp(line, "event=worker_ready ts=2", 23) == 0, "%s", line);
    cr_assert(strstr(line, " level=info proc=worker worker=w0 n_layers=30 load=0.25 why=\"a \\\"b\\\"\\nevent=forged\" none=\"\" empty=\"\"\n"), "%s", line);
    cr_assert_eq(strchr(line, '\n'), line + strlen(line) - 1, "one line");
}

Test(log, test_json_lines_parse)
{
    log_init("router", LOG_LEVEL_DEBUG, LOG_FORMAT_JSON);
    capture_start();
    LOG_DEBUG("bad_bytes", LOG_STR("text", "x\xFF\x01y"), LOG_INT("n", -1), LOG_STR("none", NULL));
    const char *line = capture_end();
    json_error_t error;
    json_t *doc = json_loads(line, JSON_REJECT_DUPLICATES, &error);
    cr_assert_not_null(doc, "%s: %s", error.text, line);
    cr_assert_str_eq(json_string_value(json_object_get(doc, "event")), "bad_bytes");
    cr_assert_str_eq(json_string_value(json_object_get(doc, "level")), "debug");
    cr_assert_str_eq(json_string_value(json_object_get(doc, "proc")), "router");
    cr_assert_eq(json_integer_value(json_object_get(doc, "n")), -1);
    cr_assert(json_is_null(json_object_get(doc, "none")));
    json_decref(doc);
}

Test(log, test_levels_below_the_minimum_are_silent)
{
    log_init("worker", LOG_LEVEL_WARN, LOG_FORMAT_LOGFMT);
    capture_start();
    LOG_INFO("quiet", LOG_INT("n", 1));
    LOG_ERROR("loud", LOG_INT("n", 2));
    const char *line = capture_end();
    cr_assert(strncmp(line, "event=loud ", 11) == 0, "%s", line);
}

/* A line never exceeds PIPE_BUF; long values are cut and fields that find no room are left out, and the line says so. */
static void check_long_fields(enum log_format format)
{
    char text[3000];
    memset(text, 'a', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    log_init("worker", LOG_LEVEL_INFO, format);
    capture_start();
    LOG_INFO("long", LOG_STR("a", text), LOG_STR("b", text), LOG_STR("c", text), LOG_STR("d", text), LOG_STR("e", text), LOG_INT("last", 7));
    const char *line = capture_end();
    cr_assert_leq(strlen(line), PIPE_BUF);
    cr_assert_gt(strlen(line), 3000);
    cr_assert_eq(line[strlen(line) - 1], '\n');
    cr_assert(strstr(line, format == LOG_FORMAT_JSON ? "\"last\":7" : " last=7"), "a short field after long ones still fits");
    cr_assert(strstr(line, format == LOG_FORMAT_JSON ? "\"fields_cut\":5" : " fields_cut=5"), "%s", line);
    if (format == LOG_FORMAT_JSON) {
        json_t *doc = json_loads(line, 0, NULL);
        cr_assert_not_null(doc);
        json_decref(doc);
    }
}

Test(log, test_long_fields_are_cut_in_logfmt)
{
    check_long_fields(LOG_FORMAT_LOGFMT);
}

Test(log, test_long_fields_are_cut_in_json)
{
    check_long_fields(LOG_FORMAT_JSON);
}

Test(log, test_lines_that_cannot_be_written_are_counted)
{
    log_init("worker", LOG_LEVEL_INFO, LOG_FORMAT_LOGFMT);
    int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
    cr_assert_geq(full, 0);
    saved_stderr = dup(STDERR_FILENO);
    dup2(full, STDERR_FILENO);
    LOG_INFO("lost", LOG_INT("n", 1));
    LOG_INFO("lost", LOG_INT("n", 2));
    dup2(saved_stderr, STDERR_FILENO);
    cr_assert_eq(log_dropped(), 2);
}
