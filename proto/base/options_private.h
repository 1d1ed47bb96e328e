/* Shared by the files of the option parser only. */
#pragma once
#include "proto/base/buf.h"
#include "proto/base/options.h"

enum { OPTION_FILE_MAX = 1 << 20, OPTION_WHERE_MAX = 320 };

/* Reads `text` into the option's field in `values`; `where` says where it came from. -EINVAL with a text. The field keeps pointing at `text` for strings. */
int option_value_parse(const struct option_spec *spec, const char *where, const char *text, void *values, struct error *err);
/* What is allowed, as words: "1..256", "k8v4|k8v8|bf16". */
void option_value_allowed(const struct option_spec *spec, char *text, size_t size);
/* Where an option stands: its number in the set, and where in the program's struct the struct begins that its field lies in. */
struct option_place {
    const struct option_spec *spec;
    size_t index, offset;
};
bool option_place(const struct option_set *set, size_t i, struct option_place *ret_place);
/* The option called by the first n bytes of `name`. */
bool option_find(const struct option_set *set, const char *name, size_t n, struct option_place *ret_place);
/* As option_value_parse, and marks it in given[] of all the set's options. */
int option_set_value(const struct option_place *place, const char *where, const char *text, void *values, bool *given, struct error *err);
/* Applies the lines of a file and marks the options it set in given[]. -EINVAL, -ENOMEM, -E2BIG beyond OPTION_FILE_MAX, or the errno of reading it. */
int option_file_apply(const struct option_set *set, const char *path, void *values, bool *given, struct error *err);
/* Appends a value as the file format wants it, quoted where needed. */
int option_file_quote(struct buf *out, const char *text);
void option_help_print(const struct option_set *set, FILE *out);
