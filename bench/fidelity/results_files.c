#include "bench/fidelity/results.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILE_BYTES_MAX = 64 << 20 };

/* Aside and renamed: who looks while rows run never sees half a file. */
static int write_file(const char *dir, const char *name, const struct buf *text, struct error *err)
{
    char path[4096], aside[4096 + 8];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    snprintf(aside, sizeof(aside), "%s.new", path);
    FILE *file = fopen(aside, "we");
    if (!file)
        return error_set(err, -errno, "%s: %s", aside, strerror(errno));
    const bool written = fwrite(text->data, 1, text->len, file) == text->len;
    if (fclose(file) == 0 && written && rename(aside, path) == 0)
        return 0;
    unlink(aside);
    return error_set(err, -EIO, "%s: writing failed", path);
}

static int write_one(const struct run_results *results, const char *dir, const struct plot_file *file, struct error *err)
{
    struct buf text;
    buf_init(&text, FILE_BYTES_MAX);
    int r = file->write(results, &text);
    r = r < 0 ? error_set(err, r, "no memory for %s", file->name) : write_file(dir, file->name, &text, err);
    buf_fini(&text);
    return r;
}

int results_write(const struct run_results *results, const char *dir, struct error *err)
{
    static const struct plot_file tables[] = {{"fidelity.json", results_json}, {"fidelity.md", results_markdown}};
    int r = 0;
    if (mkdir(dir, 0777) < 0 && errno != EEXIST)
        return error_set(err, -errno, "--out %s: %s", dir, strerror(errno));
    for (size_t i = 0; r >= 0 && i < sizeof(tables) / sizeof(tables[0]); i++)
        r = write_one(results, dir, &tables[i], err);
    for (int i = 0; r >= 0 && fidelity_plots[i].name; i++)
        r = write_one(results, dir, &fidelity_plots[i], err);
    return r;
}
