/* Shared by the files of the option parser only. */
#pragma once
#include "proto/base/buf.h"
#include "proto/base/options.h"

enum { OPTION_FILE_MAX = 1 << 20, OPTION_WHERE_MAX = 320 };

/* Reads `text` into the option's field; `where` says where it came from. -EINVAL with a text. The field keeps pointing at `text` for strings. */
int option_value_parse(const struct option_spec *spec, const char *where, const char *text, void *values, struct error *err);
/* What is allowed, as words: "1..256", "k8v4|k8v8|bf16". */
void option_value_allowed(const struct option_spec *spec, char *text, size_t size);
/* The option called by the first n bytes of `name`, or NULL. */
const struct option_spec *option_find(const struct option_set *set, const char *name, size_t n);
/* Applies the lines of a file and marks the options it set in given[n_specs]. -EINVAL, -ENOMEM, -E2BIG beyond OPTION_FILE_MAX, or the errno of reading it. */
int option_file_apply(const struct option_set *set, const char *path, void *values, bool *given, struct error *err);
/* Appends a value as the file format wants it, quoted where needed. */
int option_file_quote(struct buf *out, const char *text);
void option_help_print(const struct option_set *set, FILE *out);
