/* Structured log: one line an event on stderr, as logfmt (default) or JSON lines. Any thread. A line is written with one write(2);
 * when that fails the line is dropped and counted. Libraries do not log: they return errors, programs log once.
 *
 *     LOG_INFO("worker_ready", LOG_STR("worker", name), LOG_INT("n_layers", n));
 *     event=worker_ready ts=2026-01-02T03:04:05.678Z level=info proc=worker worker=w0 n_layers=30
 */
#pragma once
#include "proto/base/base_assert.h"
#include <stdbool.h>
#include <stdint.h>

enum log_level { LOG_LEVEL_DEBUG, LOG_LEVEL_INFO, LOG_LEVEL_WARN, LOG_LEVEL_ERROR };
enum log_format { LOG_FORMAT_LOGFMT, LOG_FORMAT_JSON };
/* Their words, NULL-terminated, for options. */
extern const char *const log_level_choices[], *const log_format_choices[];

struct log_field {
    const char *key;
    enum { LOG_KIND_STR, LOG_KIND_INT, LOG_KIND_DOUBLE } kind;
    const char *str;
    int64_t num;
    double dbl;
};

#define LOG_STR(k, v) ((struct log_field){.key = (k), .kind = LOG_KIND_STR, .str = (v)})
#define LOG_INT(k, v) ((struct log_field){.key = (k), .kind = LOG_KIND_INT, .num = (int64_t)(v)})
#define LOG_DOUBLE(k, v) ((struct log_field){.key = (k), .kind = LOG_KIND_DOUBLE, .dbl = (double)(v)})

#define LOG_EVENT(level, event, ...)                                                               \
    log_write((level), (event), (const struct log_field[]){__VA_ARGS__},                           \
              ARRAY_LEN(((const struct log_field[]){__VA_ARGS__})))
#define LOG_DEBUG(event, ...) LOG_EVENT(LOG_LEVEL_DEBUG, event, __VA_ARGS__)
#define LOG_INFO(event, ...) LOG_EVENT(LOG_LEVEL_INFO, event, __VA_ARGS__)
#define LOG_WARN(event, ...) LOG_EVENT(LOG_LEVEL_WARN, event, __VA_ARGS__)
#define LOG_ERROR(event, ...) LOG_EVENT(LOG_LEVEL_ERROR, event, __VA_ARGS__)

/* Call once, before threads start. `process` (borrowed for ever) is printed as proc=. */
void log_init(const char *process, enum log_level level, enum log_format format);
/* At least one field; values are quoted and escaped as the format needs. */
void log_write(enum log_level level, const char *event, const struct log_field *fields, size_t n);
/* Lines that could not be written since the start. */
uint64_t log_dropped(void);
