/* --help. */
#include "proto/base/options_private.h"
#include <string.h>

enum { HELP_COLUMN = 30, HELP_WIDTH = 100 };

/* Prints words from column HELP_COLUMN on, wrapped at HELP_WIDTH. */
static void print_wrapped(FILE *out, const char *text)
{
    int column = HELP_COLUMN;
    while (*text) {
        int n = (int)strcspn(text, " ");
        if (column > HELP_COLUMN && column + 1 + n > HELP_WIDTH) {
            fprintf(out, "\n%*s", HELP_COLUMN, "");
            column = HELP_COLUMN;
        } else if (column > HELP_COLUMN) {
            fputc(' ', out);
            column++;
        }
        fprintf(out, "%.*s", n, text);
        column += n;
        text += n;
        text += strspn(text, " ");
    }
    fputc('\n', out);
}

static void print_entry(FILE *out, const char *flag, const char *metavar, const char *help)
{
    int n = fprintf(out, "  --%s%s%s", flag, metavar ? " " : "", metavar ? metavar : "");
    if (n + 2 > HELP_COLUMN) {
        fputc('\n', out);
        n = 0;
    }
    fprintf(out, "%*s", HELP_COLUMN - n, "");
    print_wrapped(out, help);
}

static void print_option(FILE *out, const struct option_spec *spec)
{
    char text[1024], allowed[256] = "";
    const char *metavar = spec->metavar;
    if (spec->kind != OPTION_STR)
        option_value_allowed(spec, allowed, sizeof(allowed));
    if (spec->kind == OPTION_ENUM && !metavar)
        metavar = "NAME";
    const char *fallback = spec->fallback ? spec->fallback : spec->optional ? "none" : "required";
    snprintf(text, sizeof(text), "%s [%s%s%s%s]", spec->help, allowed, allowed[0] ? "; " : "", spec->fallback || spec->optional ? "default " : "", fallback);
    print_entry(out, spec->name, spec->kind == OPTION_BOOL ? NULL : metavar ? metavar : "VALUE", text);
}

void option_help_print(const struct option_set *set, FILE *out)
{
    fprintf(out, "Usage: %s [OPTIONS]%s%s%s\n\n%s\n\nOptions:\n", set->program, set->positional ? " [" : "", set->positional ? set->positional : "",
            set->positional ? "]" : "", set->summary);
    struct option_place place;
    for (size_t i = 0; option_place(set, i, &place); i++)
        print_option(out, place.spec);
    print_entry(out, "config", "FILE", "read `name = value` lines from FILE; flags and the environment come first");
    print_entry(out, "version", NULL, "print the version and exit");
    print_entry(out, "help", NULL, "print this text and exit");
    fprintf(out, "\nEach option can also be given in the environment as TIDEPOOL_<NAME>, in capitals and with dashes as\n"
                 "underscores. A flag wins over the environment, the environment over the file.\n");
    if (set->examples)
        fprintf(out, "\nExamples:\n%s\n", set->examples);
}
