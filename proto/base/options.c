#include "proto/base/options.h"
#include "proto/base/base_assert.h"
#include "proto/base/options_private.h"
#include <ctype.h>
#include <errno.h>
#include <string.h>

#define ENV_PREFIX "TIDEPOOL_"

/* The spec that has `left` others with these tags before it; counts them off where there are not so many. */
static const struct option_spec *find_tagged(const struct option_group *group, size_t *left)
{
    for (const struct option_spec *spec = group->specs; spec->name; spec++)
        if ((spec->tags & group->tags) == group->tags && (*left)-- == 0)
            return spec;
    return NULL;
}

bool option_place(const struct option_set *set, size_t i, struct option_place *ret_place)
{
    size_t left = i - set->n_specs;
    if (i < set->n_specs) {
        *ret_place = (struct option_place){.spec = &set->specs[i], .index = i};
        return true;
    }
    for (size_t g = 0; g < set->n_groups; g++) {
        const struct option_spec *spec = find_tagged(&set->groups[g], &left);
        if (!spec)
            continue;
        *ret_place = (struct option_place){.spec = spec, .index = i, .offset = set->groups[g].offset};
        return true;
    }
    return false;
}

bool option_find(const struct option_set *set, const char *name, size_t n, struct option_place *ret_place)
{
    struct option_place place;
    for (size_t i = 0; option_place(set, i, &place); i++) {
        if (strlen(place.spec->name) != n || memcmp(place.spec->name, name, n) != 0)
            continue;
        *ret_place = place;
        return true;
    }
    return false;
}

bool options_at(const struct option_set *set, size_t i, const void *values, struct option *ret_option)
{
    struct option_place place;
    const bool found = option_place(set, i, &place);
    if (found)
        *ret_option = (struct option){place.spec, (const char *)values + place.offset};
    return found;
}

static size_t count_options(const struct option_set *set)
{
    struct option_place place;
    size_t n = 0;
    while (option_place(set, n, &place))
        n++;
    return n;
}

int option_set_value(const struct option_place *place, const char *where, const char *text, void *values, bool *given, struct error *err)
{
    given[place->index] = true;
    return option_value_parse(place->spec, where, text, (char *)values + place->offset, err);
}

static const char *from_environment(const char *name, char *variable, size_t size)
{
    int n = snprintf(variable, size, ENV_PREFIX "%s", name);
    ASSERT(n > 0 && (size_t)n < size);
    for (char *p = variable; *p; p++)
        *p = *p == '-' ? '_' : (char)toupper((unsigned char)*p);
    return getenv(variable);
}

static int apply_spec_defaults(const struct option_spec *specs, size_t n_max, char *values, struct error *err)
{
    for (size_t i = 0; i < n_max && specs[i].name; i++) {
        if (specs[i].kind == OPTION_STR)
            *(const char **)(values + specs[i].offset) = specs[i].fallback;
        else if (specs[i].fallback) {
            int rc = option_value_parse(&specs[i], "default", specs[i].fallback, values, err);
            if (rc < 0)
                return rc;
        }
    }
    return 0;
}

static int apply_defaults(const struct option_set *set, void *values, struct error *err)
{
    int rc = apply_spec_defaults(set->specs, set->n_specs, values, err);
    for (size_t g = 0; rc == 0 && g < set->n_groups; g++)
        rc = apply_spec_defaults(set->groups[g].specs, SIZE_MAX, (char *)values + set->groups[g].offset, err);
    return rc;
}

static int apply_environment(const struct option_set *set, void *values, bool *given, struct error *err)
{
    struct option_place place;
    for (size_t i = 0; option_place(set, i, &place); i++) {
        char variable[128], where[160];
        const char *text = from_environment(place.spec->name, variable, sizeof(variable));
        if (!text)
            continue;
        snprintf(where, sizeof(where), "environment %s", variable);
        int rc = option_set_value(&place, where, text, values, given, err);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* What a walk over the arguments found besides the options of the table. */
struct special_args {
    const char *config, *positional;
    bool help, version;
};

/* One argument split into its parts. */
struct flag {
    const char *name;
    size_t n_name;
    const char *value; /* NULL: none given with it */
};

static bool flag_is(const struct flag *f, const char *name)
{
    return strlen(name) == f->n_name && memcmp(name, f->name, f->n_name) == 0;
}

static struct flag split_flag(const char *arg)
{
    const char *name = arg + 2;
    size_t n = strcspn(name, "=");
    return (struct flag){name, n, name[n] == '=' ? name + n + 1 : NULL};
}

/* A switch may stand alone. Only the two words that help names for it are taken from the next argument, which may also be a positional one. */
static const char *switch_value(const struct flag *f, int argc, char **argv, int *i)
{
    const char *next = *i + 1 < argc ? argv[*i + 1] : "";
    if (f->value)
        return f->value;
    if (strcmp(next, "on") == 0 || strcmp(next, "off") == 0)
        return argv[++*i];
    return "on";
}

/* The value of a flag that needs one: behind its '=', else the next argument. */
static const char *flag_value(const struct flag *f, int argc, char **argv, int *i)
{
    if (f->value)
        return f->value;
    return *i + 1 < argc ? argv[++*i] : NULL;
}

static int apply_flag(const struct option_set *set, int argc, char **argv, int *i, void *values, bool *given, struct special_args *special, struct error *err)
{
    struct flag f = split_flag(argv[*i]);
    int n_shown = (int)(f.n_name < 64 ? f.n_name : 64);
    if (flag_is(&f, "help") || flag_is(&f, "version")) {
        *(flag_is(&f, "help") ? &special->help : &special->version) = true;
        return 0;
    }
    struct option_place place;
    const bool known = option_find(set, f.name, f.n_name, &place);
    if (!known && !flag_is(&f, "config"))
        return error_set(err, -EINVAL, "--%.*s is not an option of %s; see %s --help", n_shown, f.name, set->program, set->program);
    const char *text = known && place.spec->kind == OPTION_BOOL ? switch_value(&f, argc, argv, i) : flag_value(&f, argc, argv, i);
    if (!text)
        return error_set(err, -EINVAL, "--%.*s (command line): a value must follow", n_shown, f.name);
    if (!known) {
        special->config = text;
        return 0;
    }
    return values ? option_set_value(&place, "command line", text, values, given, err) : 0;
}

/* Walks over the arguments: with `values` NULL only to find --config, --help and the positional argument, else to set the options. */
static int walk_arguments(const struct option_set *set, int argc, char **argv, void *values, bool *given, struct special_args *special, struct error *err)
{
    bool flags = true;
    *special = (struct special_args){0};
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        if (flags && strcmp(arg, "--") == 0) {
            flags = false;
        } else if (flags && strcmp(arg, "-h") == 0) {
            special->help = true;
        } else if (flags && arg[0] == '-' && arg[1] == '-') {
            int rc = apply_flag(set, argc, argv, &i, values, given, special, err);
            if (rc < 0)
                return rc;
        } else if (flags && arg[0] == '-' && arg[1]) {
            return error_set(err, -EINVAL, "%.64s is not an option of %s; see %s --help", arg, set->program, set->program);
        } else if (set->positional && !special->positional) {
            special->positional = arg;
        } else {
            return error_set(err, -EINVAL, "unexpected argument \"%.64s\"; see %s --help", arg, set->program);
        }
    }
    return 0;
}

static int check_required(const struct option_set *set, const bool *given, struct error *err)
{
    struct option_place place;
    for (size_t i = 0; option_place(set, i, &place); i++)
        if (!place.spec->fallback && !place.spec->optional && !given[i])
            return error_set(err, -EINVAL, "--%s is required: %s", place.spec->name, place.spec->help);
    return 0;
}

static int print_special(const struct option_set *set, const struct special_args *special)
{
    if (special->help)
        option_help_print(set, stdout);
    else
        printf("%s %s\n", set->program, TIDEPOOL_VERSION);
    return 1;
}

int options_parse(const struct option_set *set, int argc, char **argv, void *values, const char **ret_positional, struct error *err)
{
    struct special_args special;
    int rc = walk_arguments(set, argc, argv, NULL, NULL, &special, err);
    if (special.help || special.version)
        return print_special(set, &special);
    if (rc < 0)
        return rc;
    bool *given = calloc(count_options(set) + 1, sizeof(*given));
    if (!given)
        return error_set(err, -ENOMEM, "out of memory");
    rc = apply_defaults(set, values, err);
    if (rc == 0) {
        char variable[128];
        const char *config = special.config ? special.config : from_environment("config", variable, sizeof(variable));
        rc = config ? option_file_apply(set, config, values, given, err) : 0;
    }
    if (rc == 0)
        rc = apply_environment(set, values, given, err);
    if (rc == 0)
        rc = walk_arguments(set, argc, argv, values, given, &special, err);
    if (rc == 0)
        rc = check_required(set, given, err);
    if (rc == 0 && ret_positional)
        *ret_positional = special.positional;
    free(given);
    return rc;
}

void options_print(const struct option_set *set, const void *values, FILE *out)
{
    struct option option;
    for (size_t i = 0; options_at(set, i, values, &option); i++) {
        char text[8192];
        int rc = options_format(&option, text, sizeof(text));
        struct buf line;
        buf_init(&line, 3 * sizeof(text));
        if (rc == -ENOENT)
            fprintf(out, "# %s is not set\n", option.spec->name);
        else if (rc < 0 || option_file_quote(&line, text) < 0)
            fprintf(out, "# %s is too long to print\n", option.spec->name);
        else
            fprintf(out, "%s = %s\n", option.spec->name, buf_cstr(&line));
        buf_fini(&line);
    }
}
