#include "bench/fidelity/results.h"
#include "formats/json.h"
#include "proto/base/json_write.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RESULTS_BYTES_MAX = 64 << 20 };

/* ---- writing ---- */

static void write_settings(struct json_writer *w, const struct run_settings *s)
{
    json_write_object(w);
    json_write_kstr(w, "model", s->model);
    json_write_kstr(w, "texts", s->texts);
    json_write_kint(w, "contexts", s->contexts);
    json_write_kint(w, "context_tokens", s->context_tokens);
    json_write_kint(w, "positions", s->positions);
    json_write_karray(w, "recall_tokens");
    for (int i = 0; i < s->n_lengths; i++)
        json_write_int(w, s->lengths[i]);
    json_write_array_end(w);
    json_write_kint(w, "recall_samples", s->recall_samples);
    json_write_kint(w, "needle_samples", s->needle_samples);
    json_write_kint(w, "needle_tokens", s->needle_tokens);
    json_write_kint(w, "seed", s->seed);
    json_write_object_end(w);
}

static void write_labelled(struct json_writer *w, const char *key, const double *values, const char *const *labels, int n)
{
    json_write_kobject(w, key);
    for (int i = 0; i < n; i++)
        json_write_kdouble(w, labels[i], values[i]);
    json_write_object_end(w);
}

static void write_tokens(struct json_writer *w, const char *key, int n)
{
    if (n == FIDELITY_ALL)
        json_write_kstr(w, key, "all");
    else
        json_write_kint(w, key, n);
}

static const char *const needle_labels[] = {"seen", "unseen"};

static void write_row(struct json_writer *w, const struct run_results *results, const struct fidelity_row *row)
{
    const struct row_result *r = &row->result;
    json_write_object(w);
    json_write_kstr(w, "name", row->name);
    json_write_kstr(w, "group", fidelity_group_name(row->method->group));
    json_write_kstr(w, "method", row->method->name);
    write_tokens(w, "budget", row->budget);
    write_tokens(w, "fetch", row->fetch);
    if (r->error[0])
        json_write_kstr(w, "error", r->error);
    json_write_kdouble(w, "kl", r->kl);
    json_write_kdouble(w, "kl_p99", r->kl_p99);
    json_write_kdouble(w, "jsd", r->jsd);
    json_write_kdouble(w, "top1", r->top1);
    json_write_kdouble(w, "perplexity", r->perplexity);
    json_write_kdouble(w, "recall_all", r->recall_all);
    write_labelled(w, "recall", r->recall, results->recall_labels, results->n_recall_labels);
    write_labelled(w, "needle", r->needle, needle_labels, 2);
    json_write_kdouble(w, "attended_tokens", r->attended);
    json_write_kdouble(w, "bytes_attended_per_token", r->bytes_attended);
    json_write_kdouble(w, "bytes_fetched_per_token", r->bytes_fetched);
    json_write_kobject(w, "values");
    for (int i = 0; i < r->n_values; i++)
        json_write_kdouble(w, r->values[i].name, r->values[i].value);
    json_write_object_end(w);
    json_write_kdouble(w, "seconds", r->seconds);
    json_write_kdouble(w, "cpu_seconds", r->cpu_seconds);
    json_write_object_end(w);
}

int results_json(const struct run_results *results, struct buf *out)
{
    struct json_writer w;
    json_write_begin(&w, out);
    json_write_object(&w);
    json_write_kstr(&w, "what", "tidepool fidelity");
    json_write_key(&w, "settings");
    write_settings(&w, &results->settings);
    json_write_kint(&w, "needles_that_full_attention_finds", results->settings.n_needles);
    json_write_kdouble(&w, "seconds", results->seconds);
    json_write_karray(&w, "rows");
    for (int i = 0; i < results->list->n; i++)
        if (results->list->rows[i].result.done)
            write_row(&w, results, &results->list->rows[i]);
    json_write_array_end(&w);
    json_write_object_end(&w);
    const int r = json_write_end(&w);
    return r < 0 ? r : buf_append_str(out, "\n");
}

/* ---- reading back ---- */

static void read_number(struct json *j, double *value)
{
    *value = NAN;
    if (json_peek(j) == JSON_NULL)
        json_null(j);
    else
        json_double(j, value);
}

static void read_labelled(struct json *j, double *values, const char *const *labels, int n)
{
    struct json_str key;
    json_object(j);
    while (json_next_key(j, &key)) {
        double value;
        read_number(j, &value);
        for (int i = 0; i < n; i++)
            if (json_str_eq(&key, labels[i]))
                values[i] = value;
    }
}

static void read_values(struct json *j, struct row_result *r)
{
    struct json_str key;
    json_object(j);
    while (json_next_key(j, &key)) {
        double value;
        read_number(j, &value);
        if (r->n_values == FIDELITY_VALUES_MAX)
            continue;
        struct row_value *v = &r->values[r->n_values++];
        snprintf(v->name, sizeof(v->name), "%.*s", (int)key.len, key.data);
        v->value = value;
    }
}

static double *figure(struct row_result *r, const struct json_str *key)
{
    const struct {
        const char *key;
        double *value;
    } figures[] = {
        {"kl", &r->kl}, {"kl_p99", &r->kl_p99}, {"jsd", &r->jsd}, {"top1", &r->top1}, {"perplexity", &r->perplexity}, {"recall_all", &r->recall_all},
        {"attended_tokens", &r->attended}, {"bytes_attended_per_token", &r->bytes_attended}, {"bytes_fetched_per_token", &r->bytes_fetched},
        {"seconds", &r->seconds}, {"cpu_seconds", &r->cpu_seconds},
    };
    for (size_t i = 0; i < sizeof(figures) / sizeof(figures[0]); i++)
        if (json_str_eq(key, figures[i].key))
            return figures[i].value;
    return NULL;
}

static int read_row(struct json *j, const struct run_results *results, struct row_list *list)
{
    struct json_str key, name = {NULL, 0};
    struct row_result r;
    bool failed = false;
    row_result_init(&r);
    json_object(j);
    while (json_next_key(j, &key)) {
        double *value = figure(&r, &key);
        if (value)
            read_number(j, value);
        else if (json_str_eq(&key, "recall"))
            read_labelled(j, r.recall, results->recall_labels, results->n_recall_labels);
        else if (json_str_eq(&key, "needle"))
            read_labelled(j, r.needle, needle_labels, 2);
        else if (json_str_eq(&key, "values"))
            read_values(j, &r);
        else if (json_str_eq(&key, "name"))
            json_string(j, &name);
        else {
            failed = failed || json_str_eq(&key, "error");
            json_skip(j);
        }
    }
    struct fidelity_row *row = j->error || failed ? NULL : row_list_find(list, name.data ? name.data : "", name.len);
    if (!row)
        return 0;
    r.done = true;
    row->result = r;
    return 1;
}

/* Equal settings are equal text: both come from write_settings. */
static bool same_settings(const struct run_settings *settings, const struct json_str *text)
{
    struct buf mine;
    struct json_writer w;
    buf_init(&mine, RESULTS_BYTES_MAX);
    json_write_begin(&w, &mine);
    write_settings(&w, settings);
    const bool same = json_write_end(&w) == 0 && mine.len == text->len && memcmp(mine.data, text->data, mine.len) == 0;
    buf_fini(&mine);
    return same;
}

static int read_results(struct json *j, const struct run_results *results, struct row_list *list, bool *ret_other)
{
    struct json_str key, settings = {NULL, 0};
    int n = 0;
    json_object(j);
    while (json_next_key(j, &key)) {
        if (json_str_eq(&key, "settings")) {
            json_raw(j, &settings);
        } else if (json_str_eq(&key, "rows") && settings.data) {
            *ret_other = !same_settings(&results->settings, &settings);
            json_array(j);
            while (json_next_item(j)) {
                if (*ret_other)
                    json_skip(j);
                else
                    n += read_row(j, results, list);
            }
        } else {
            json_skip(j);
        }
    }
    return json_end(j) < 0 ? -EINVAL : n;
}

static int read_file(const char *path, struct buf *out)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return -errno;
    int r = 0;
    for (;;) {
        char piece[65536];
        const size_t n = fread(piece, 1, sizeof(piece), file);
        if (n == 0 || (r = buf_append(out, piece, n)) < 0)
            break;
    }
    if (r >= 0 && ferror(file))
        r = -EIO;
    fclose(file);
    return r;
}

int results_resume(const struct run_results *results, struct row_list *list, const char *dir, struct error *err)
{
    char path[4096];
    struct buf text;
    struct json j;
    bool other = true;
    snprintf(path, sizeof(path), "%s/fidelity.json", dir);
    buf_init(&text, RESULTS_BYTES_MAX);
    int r = read_file(path, &text);
    if (r < 0) {
        buf_fini(&text);
        return r == -ENOENT ? 0 : error_set(err, r, "--resume: %s: %s", path, strerror(-r));
    }
    json_init(&j, (const char *)text.data, text.len);
    r = read_results(&j, results, list, &other);
    if (r < 0)
        error_set(err, r, "--resume: %s is no file of results: %s at byte %zu", path, j.error_text, j.error_pos);
    else if (other)
        r = error_set(err, -EINVAL, "--resume: %s was measured with other settings; choose another --out", path);
    json_fini(&j);
    buf_fini(&text);
    return r;
}
