/* Command-line options that can also come from the environment and a configuration file. One table a program.
 * Precedence: flag > environment (TIDEPOOL_<NAME>, dashes as underscores) > file (--config FILE or TIDEPOOL_CONFIG) > default.
 * The file holds `name = value` lines; # at the start of a line or after a space begins a comment; a value in double quotes is taken as it stands,
 * with \n, \t, \r, \" and \\ as escapes. A flag's value follows as `--name value` or `--name=value`; `--` ends the flags; a repeated flag replaces.
 * An unknown name in the file or on the command line is an error, an unknown TIDEPOOL_ variable is not (programs share an environment).
 * A wrong value gives -EINVAL with a text that names the option, where it came from, the value and what is allowed. Single-threaded. */
#pragma once
#include "proto/base/error.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum option_kind {
    OPTION_STR,    /* const char *; never empty */
    OPTION_INT,    /* int64_t within [min, max]; `max_word` (e.g. "all") may stand for max */
    OPTION_BYTES,  /* int64_t; 512M, 2G, 1.5G (powers of 1024) within [min, max]; `max_word` may stand for max */
    OPTION_DOUBLE, /* double within [min, max] */
    OPTION_BOOL,   /* bool; --x, --x=on|off, --x on|off; on|off in the environment and the file */
    OPTION_ENUM,   /* int: index into `choices` */
};

struct option_spec {
    const char *name;           /* without dashes; also the key in the file */
    enum option_kind kind;
    size_t offset;              /* of the field in the caller's struct */
    const char *fallback;       /* default as text; NULL: required (OPTION_STR: stays NULL if `optional`) */
    const char *help;           /* one line; name the unit */
    const char *metavar;        /* e.g. "PATH"; NULL for bool and enum */
    int64_t min, max;           /* OPTION_INT, OPTION_BYTES, OPTION_DOUBLE */
    const char *const *choices; /* OPTION_ENUM, NULL-terminated */
    const char *max_word;       /* OPTION_INT, OPTION_BYTES: a word that means `max`, or NULL */
    bool optional;              /* OPTION_STR without default may be missing */
    unsigned tags;              /* bits for whoever walks over the options, and for option_group */
};

/* Options that several programs have: declared once, with their fields in a struct of their own, which each program's struct holds at `offset`. */
struct option_group {
    const struct option_spec *specs; /* ended by one without a name */
    size_t offset;
    unsigned tags;              /* the program has only the options with all of these bits; the fields of the others get their defaults */
};

struct option_set {
    const char *program;      /* "tidepool serve" */
    const char *summary;      /* one sentence */
    const char *examples;     /* shown under Examples: by --help */
    const struct option_spec *specs;
    size_t n_specs;
    const struct option_group *groups; /* [n_groups] further options, behind those */
    size_t n_groups;
    const char *positional;   /* name of an optional positional argument, or NULL */
};

/* Fills the struct at `values`. Returns 0; 1 after printing --help (-h) or --version to stdout; -EINVAL, -ENOMEM or the errno of reading the file;
 * `values` is undefined unless 0 came back. `ret_positional` may be NULL; it is set to NULL when the argument is missing.
 * --config and --help, --version are understood without standing in the table. Strings live until the process ends. */
int options_parse(const struct option_set *set, int argc, char **argv, void *values, const char **ret_positional, struct error *err);
/* Prints the effective configuration as lines that --config reads back. */
void options_print(const struct option_set *set, const void *values, FILE *out);
/* One option of a set, and the struct that its field lies in. */
struct option {
    const struct option_spec *spec;
    const void *values;
};
/* The i-th option of a set, the program's own first; false behind the last one. `values` is what options_parse has filled. */
bool options_at(const struct option_set *set, size_t i, const void *values, struct option *ret_option);
/* The value of one option as text that options_parse reads back to the same value; for handing options to a child process.
 * -ENOBUFS when `size` is too small, -ENOENT for an optional string that is not set. */
int options_format(const struct option *option, char *text, size_t size);
