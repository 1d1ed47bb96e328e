/* What is planned for: a known model, a GGUF file, a config.json or a folder. Of files only configuration and tensor tables are read. */
#include "formats/file_map.h"
#include "worker/model/known_models.h"
#include "worker/model/model_shard.h"
#include "worker/plan/plan_report.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

static bool ends_with(const char *text, const char *end)
{
    const size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

static int read_json(const char *path, struct model_config *ret_config, struct error *err)
{
    struct file_map map;
    struct error reason = {""};
    int r = file_map_open(path, &map, err);
    if (r < 0)
        return r;
    r = model_config_from_json(map.data, map.size, NULL, 0, ret_config, &reason);
    file_map_close(&map);
    return r < 0 ? error_set(err, r, "%s: %.400s", path, reason.text) : 0;
}

static int no_such_model(const char *name, struct error *err)
{
    char names[300] = "";
    for (int i = 0; known_model_name(i); i++)
        snprintf(names + strlen(names), sizeof(names) - strlen(names), "%s%s", i ? ", " : "", known_model_name(i));
    return error_set(err, -ENOENT, "--model %.100s: there is no such file or folder, and it is none of the known models: %s", name, names);
}

/* Rank 0 has the largest share of everything. */
static int take_part(const struct plan_options *o, int ffn_unit, struct plan_report *report, struct error *err)
{
    struct error reason = {""};
    report->whole = report->model;
    const int r = model_shard_split(&report->whole, 0, (int)o->engine.tp, ffn_unit, &report->model, &reason);
    return r < 0 ? error_set(err, r, "--tp %lld: %.400s", (long long)o->engine.tp, reason.text) : 0;
}

/* The tensors of a GGUF file or of a folder's safetensors; a folder without any is planned like a config.json. */
static int measure_files(const struct plan_options *o, const struct model_weights_params *params, struct plan_report *report, struct error *err)
{
    const char *path = o->model;
    struct model_weights_params p = *params;
    struct weight_source source = {0};
    struct stat st;
    const bool folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    int r = weight_source_open(path, &source, err);
    if (r == -ENOENT && folder)
        return take_part(o, 1, report, err);
    if (r < 0)
        return r;
    p.source = &source;
    r = take_part(o, model_weights_ffn_unit(&source, report->model.n_layers), report, err);
    if (r >= 0)
        r = model_weights_measure(&p, WEIGHT_BF16, &report->stored, err);
    weight_source_close(&source);
    if (r >= 0 && report->stored.has_key_bias)
        report->model.qkv_bias = true;
    return r;
}

static int choose_weights(const struct plan_options *o, const struct model_weights_params *params, struct plan_report *report, struct error *err)
{
    struct model_weights_size size;
    int r = model_weights_measure(params, WEIGHT_BF16, &report->bf16, err);
    if (r < 0)
        return r;
    if (o->weights == PLAN_WEIGHTS_STORED) {
        report->weights = report->stored.device_bytes ? report->stored.device_bytes : report->bf16.device_bytes;
        report->weights_name = report->stored.device_bytes ? "as stored" : weight_dtype_name(WEIGHT_BF16);
        return 0;
    }
    struct error reason = {""};
    r = model_weights_measure(params, (enum weight_dtype)(o->weights - 1), &size, &reason);
    if (r < 0)
        return error_set(err, r, "--weights %s: %.400s", weight_dtype_name((enum weight_dtype)(o->weights - 1)), reason.text);
    report->weights = size.device_bytes;
    report->weights_name = weight_dtype_name((enum weight_dtype)(o->weights - 1));
    return 0;
}

int plan_model_read(const struct plan_options *o, const struct kernel_ops *ops, struct plan_report *report, struct error *err)
{
    struct stat st;
    const struct model_weights_params params = {.config = &report->model, .ops = ops};
    const bool exists = stat(o->model, &st) == 0, json = ends_with(o->model, ".json");
    int r;
    if (!exists) {
        r = known_model_config(o->model, &report->model, err);
        if (r == -ENOENT)
            return no_such_model(o->model, err);
    } else {
        r = json ? read_json(o->model, &report->model, err) : model_config_load(o->model, &report->model, err);
    }
    if (r >= 0)
        r = exists && !json ? measure_files(o, &params, report, err) : take_part(o, 1, report, err);
    if (r >= 0)
        r = choose_weights(o, &params, report, err);
    if (r < 0)
        return r;
    if (!report->model.name[0])
        snprintf(report->model.name, sizeof(report->model.name), "%.*s", (int)sizeof(report->model.name) - 1, o->model);
    return 0;
}
