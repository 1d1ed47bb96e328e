#include "proto/base/options.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct config {
    const char *model, *salt;
    int64_t fetch, pool_bytes, cache;
    double temperature;
    bool verbose;
    int kv_format;
};

static const char *const kv_formats[] = {"k8v4", "k8v8", "bf16", NULL};
static const struct option_spec specs[] = {
    {.name = "model", .kind = OPTION_STR, .offset = offsetof(struct config, model), .help = "GGUF file or folder", .metavar = "PATH"},
    {.name = "salt", .kind = OPTION_STR, .offset = offsetof(struct config, salt), .help = "isolates tenants", .metavar = "TEXT", .optional = true},
    {.name = "fetch", .kind = OPTION_INT, .offset = offsetof(struct config, fetch), .fallback = "512", .help = "tokens a step", .metavar = "N", .min = 0, .max = 1 << 20, .max_word = "all"},
    {.name = "pool-size", .kind = OPTION_BYTES, .offset = offsetof(struct config, pool_bytes), .fallback = "2G", .help = "bytes of the pool", .metavar = "BYTES", .min = 1 << 20, .max = (int64_t)1 << 42},
    {.name = "temperature", .kind = OPTION_DOUBLE, .offset = offsetof(struct config, temperature), .fallback = "0.7", .help = "of sampling", .metavar = "T", .min = 0, .max = 2},
    {.name = "verbose", .kind = OPTION_BOOL, .offset = offsetof(struct config, verbose), .fallback = "off", .help = "says more"},
    {.name = "kv-format", .kind = OPTION_ENUM, .offset = offsetof(struct config, kv_format), .fallback = "k8v4", .help = "of blocks", .choices = kv_formats},
    {.name = "cache", .kind = OPTION_BYTES, .offset = offsetof(struct config, cache), .fallback = "auto", .help = "bytes of the cache", .metavar = "BYTES|auto", .min = 0, .max = INT64_MAX, .max_word = "auto"},
};
static const struct option_set set = {
    .program = "demo",
    .summary = "A demonstration.",
    .examples = "  demo --model m.gguf",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
    .positional = "TEXT",
};

static struct config config;
static struct error err;
static const char *positional;

/* Arguments end with NULL. */
static int parse(const char *first, ...)
{
    char *argv[32] = {"demo"};
    int argc = 1;
    va_list args;
    va_start(args, first);
    for (const char *a = first; a; a = va_arg(args, const char *))
        argv[argc++] = (char *)a;
    va_end(args);
    memset(&config, 0xAA, sizeof(config));
    err.text[0] = '\0';
    return options_parse(&set, argc, argv, &config, &positional, &err);
}

/* A configuration file that goes away with the process. */
static const char *file_with(const char *text, size_t n)
{
    static char path[64];
    FILE *file = tmpfile();
    cr_assert_not_null(file);
    cr_assert_eq(fwrite(text, 1, n, file), n);
    fflush(file);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fileno(file));
    return path;
}

static const char *file_of(const char *text)
{
    return file_with(text, strlen(text));
}

#define ASSERT_TEXT(part) cr_assert(strstr(err.text, part), "\"%s\" lacks \"%s\"", err.text, part)

Test(options, test_defaults)
{
    cr_assert_eq(parse("--model", "m", NULL), 0, "%s", err.text);
    cr_assert_str_eq(config.model, "m");
    cr_assert_null(config.salt);
    cr_assert_eq(config.fetch, 512);
    cr_assert_eq(config.pool_bytes, (int64_t)2 << 30);
    cr_assert_eq(config.temperature, 0.7);
    cr_assert(!config.verbose);
    cr_assert_eq(config.kv_format, 0);
    cr_assert_null(positional);
}

Test(options, test_bytes_may_have_a_word_for_their_maximum)
{
    char text[16];
    cr_assert_eq(parse("--model", "m", NULL), 0, "%s", err.text);
    cr_assert_eq(config.cache, INT64_MAX);
    cr_assert(options_format(&(struct option){&specs[7], &config}, text, sizeof(text)) >= 0 && strcmp(text, "auto") == 0);
    cr_assert_eq(parse("--model", "m", "--cache", "3G", NULL), 0, "%s", err.text);
    cr_assert_eq(config.cache, (int64_t)3 << 30);
    cr_assert_eq(parse("--model", "m", "--cache=auto", NULL), 0, "%s", err.text);
    cr_assert_eq(config.cache, INT64_MAX);
}

Test(options, test_flags_in_both_forms)
{
    cr_assert_eq(parse("--model=m=1", "--fetch", "all", "--pool-size=1.5G", "--temperature", "1e-1", "--verbose", "--kv-format", "bf16", "some text", NULL), 0, "%s", err.text);
    cr_assert_str_eq(config.model, "m=1");
    cr_assert_eq(config.fetch, 1 << 20);
    cr_assert_eq(config.pool_bytes, (int64_t)3 << 29);
    cr_assert_eq(config.temperature, 0.1);
    cr_assert(config.verbose);
    cr_assert_eq(config.kv_format, 2);
    cr_assert_str_eq(positional, "some text");
}

Test(options, test_flag_beats_environment_beats_file_beats_default)
{
    const char *path = file_of("fetch = 1\npool-size = 3M\ntemperature = 1\nmodel = file\n");
    setenv("TIDEPOOL_FETCH", "2", 1);
    setenv("TIDEPOOL_POOL_SIZE", "4M", 1);
    setenv("TIDEPOOL_UNRELATED", "x", 1);
    cr_assert_eq(parse("--config", path, "--fetch", "3", NULL), 0, "%s", err.text);
    cr_assert_eq(config.fetch, 3);
    cr_assert_eq(config.pool_bytes, 4 << 20);
    cr_assert_eq(config.temperature, 1.0);
    cr_assert_str_eq(config.model, "file");
    cr_assert_eq(config.kv_format, 0);
}

Test(options, test_config_path_from_the_environment)
{
    setenv("TIDEPOOL_CONFIG", file_of("model = from file"), 1);
    cr_assert_eq(parse(NULL), 0, "%s", err.text);
    cr_assert_str_eq(config.model, "from file");
}

Test(options, test_file_comments_quotes_and_escapes)
{
    const char *path = file_of("# a comment\r\n\n  model=a#b # behind\t\r\n salt = \" x # \\\"y\\\" \\\\ \\n\" # c\nfetch = 7 # seven");
    cr_assert_eq(parse("--config", path, NULL), 0, "%s", err.text);
    cr_assert_str_eq(config.model, "a#b");
    cr_assert_str_eq(config.salt, " x # \"y\" \\ \n");
    cr_assert_eq(config.fetch, 7);
}

Test(options, test_file_errors_name_file_and_line)
{
    static const struct {
        const char *text, *want;
    } cases[] = {
        {"\nfetch 3\n", " line 2: expected `name = value`"},
        {"nonsense = 3\n", "\"nonsense\" is not an option of demo"},
        {"fetch = -1\n", "the value \"-1\" is not allowed; allowed: 0..1048576 or all"},
        {"model = \"abc\n", "the quoted value does not end"},
        {"model = \"a\\q\"\n", "unknown escape"},
        {"model = \"a\" b\n", "the quoted value does not end"},
        {"model =\n", "any text but the empty one"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        cr_assert_eq(parse("--config", file_of(cases[i].text), NULL), -EINVAL, "case %zu", i);
        ASSERT_TEXT(cases[i].want);
        ASSERT_TEXT(" line ");
    }
    cr_assert_eq(parse("--config", file_with("model\0=x", 8), NULL), -EINVAL);
    ASSERT_TEXT("NUL");
    cr_assert_eq(parse("--config", "/nonexistent/tidepool.conf", NULL), -ENOENT);
    ASSERT_TEXT("/nonexistent/tidepool.conf");
    cr_assert_eq(parse("--config", "/dev/zero", NULL), -E2BIG);
    cr_assert_eq(parse("--config", "/proc/self", NULL), -EISDIR);
}

Test(options, test_wrong_values_name_option_source_value_and_range)
{
    static const struct {
        const char *flag, *value, *allowed;
    } cases[] = {
        {"--fetch", "1048577", "0..1048576 or all"}, {"--fetch", "", "0..1048576"},      {"--fetch", " 1", "0..1048576"},   {"--fetch", "1x", "0..1048576"},
        {"--fetch", "+1", "0..1048576"},             {"--fetch", "99999999999999999999", "0..1048576"},
        {"--cache", "Auto", "or auto"},              {"--cache", "-1", "or auto"},
        {"--pool-size", "1K", "1M..4T"},             {"--pool-size", "0x10M", "1M..4T"}, {"--pool-size", "1.M", "1M..4T"},  {"--pool-size", "1..5G", "1M..4T"},
        {"--pool-size", "2 G", "1M..4T"},            {"--pool-size", "9999999T", "1M..4T"}, {"--pool-size", "G", "1M..4T"}, {"--pool-size", "1e9", "1M..4T"},
        {"--temperature", "nan", "0..2"},            {"--temperature", "inf", "0..2"},   {"--temperature", "2.1", "0..2"},  {"--temperature", "-0.1", "0..2"},
        {"--temperature", "", "0..2"},               {"--kv-format", "K8V4", "k8v4|k8v8|bf16"}, {"--model", "", "any text"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        cr_assert_eq(parse("--model", "m", cases[i].flag, cases[i].value, NULL), -EINVAL, "%s %s", cases[i].flag, cases[i].value);
        ASSERT_TEXT(cases[i].flag);
        ASSERT_TEXT("command line");
        ASSERT_TEXT(cases[i].value);
        ASSERT_TEXT(cases[i].allowed);
    }
    setenv("TIDEPOOL_VERBOSE", "maybe", 1);
    cr_assert_eq(parse("--model", "m", NULL), -EINVAL);
    ASSERT_TEXT("TIDEPOOL_VERBOSE");
    ASSERT_TEXT("on|off");
}

Test(options, test_unknown_and_misplaced_arguments)
{
    cr_assert_eq(parse("--modle", "m", NULL), -EINVAL);
    ASSERT_TEXT("--modle is not an option of demo");
    cr_assert_eq(parse("-x", NULL), -EINVAL);
    cr_assert_eq(parse("--model", NULL), -EINVAL);
    ASSERT_TEXT("a value must follow");
    cr_assert_eq(parse("--model", "m", "one", "two", NULL), -EINVAL);
    ASSERT_TEXT("unexpected argument \"two\"");
    cr_assert_eq(parse(NULL), -EINVAL);
    ASSERT_TEXT("--model is required");
}

Test(options, test_two_dashes_end_the_flags)
{
    cr_assert_eq(parse("--model", "--", "--", "--fetch", NULL), 0, "%s", err.text);
    cr_assert_str_eq(config.model, "--");
    cr_assert_str_eq(positional, "--fetch");
}

Test(options, test_bool_words)
{
    static const char *const on[] = {"--verbose", "--verbose=on", "--verbose=true", "--verbose=1"};
    for (size_t i = 0; i < 4; i++) {
        cr_assert_eq(parse("--model", "m", on[i], NULL), 0);
        cr_assert(config.verbose);
    }
    cr_assert_eq(parse("--model", "m", "--verbose", "--verbose=off", NULL), 0);
    cr_assert(!config.verbose, "the last one counts");
    cr_assert_eq(parse("--model", "m", "--verbose", "off", NULL), 0, "%s", err.text);
    cr_assert(!config.verbose);
    cr_assert_eq(parse("--verbose", "on", "--model", "m", "on", NULL), 0, "%s", err.text);
    cr_assert(config.verbose);
}

Test(options, test_help_and_version_print_to_stdout)
{
    char text[8192] = "";
    fflush(stdout);
    int saved = dup(STDOUT_FILENO);
    FILE *file = tmpfile();
    dup2(fileno(file), STDOUT_FILENO);
    int help = parse("--model", "m", "--help", NULL);
    int version = parse("--version", NULL);
    int help_with_error = parse("-h", "--nonsense", NULL);
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    rewind(file);
    text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
    cr_assert_eq(help, 1);
    cr_assert_eq(version, 1);
    cr_assert_eq(help_with_error, 1);
    cr_assert(strstr(text, "Usage: demo [OPTIONS] [TEXT]"));
    cr_assert(strstr(text, "--pool-size BYTES"));
    cr_assert(strstr(text, "[1M..4T; default 2G]"));
    cr_assert(strstr(text, "k8v4|k8v8|bf16; default k8v4"));
    cr_assert(strstr(text, "demo --model m.gguf"));
    cr_assert(strstr(text, "\ndemo "), "the version line");
}

/* What options_print writes is a file that gives the same configuration. */
Test(options, test_printed_configuration_reads_back)
{
    char text[4096] = "";
    cr_assert_eq(parse("--model", " a # \"b\"\\\n", "--salt=x#y", "--fetch", "all", "--pool-size", "1025K", "--temperature", "0.1", "--verbose", "--kv-format=k8v8", NULL), 0);
    struct config want = config;
    FILE *file = tmpfile();
    options_print(&set, &config, file);
    rewind(file);
    text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
    cr_assert_eq(parse("--config", file_of(text), NULL), 0, "%s\n%s", err.text, text);
    cr_assert_str_eq(config.model, want.model);
    cr_assert_str_eq(config.salt, want.salt);
    cr_assert_eq(config.fetch, want.fetch);
    cr_assert_eq(config.pool_bytes, want.pool_bytes);
    cr_assert_eq(config.temperature, want.temperature);
    cr_assert_eq(config.verbose, want.verbose);
    cr_assert_eq(config.kv_format, want.kv_format);
}

/* A program's own option, and those of another struct that bear a tag. */
Test(options, test_group_within_the_programs_struct)
{
    struct program {
        bool json;
        struct config shared;
    } program;
    static const struct option_spec tagged[] = {
        {.name = "model", .kind = OPTION_STR, .offset = offsetof(struct config, model), .help = "", .tags = 3},
        {.name = "pool-size", .kind = OPTION_BYTES, .offset = offsetof(struct config, pool_bytes), .help = "", .fallback = "2G", .min = 0, .max = INT64_MAX, .tags = 1},
        {.name = "fetch", .kind = OPTION_INT, .offset = offsetof(struct config, fetch), .help = "", .fallback = "1", .min = 0, .max = 9, .tags = 2},
        {.name = NULL},
    };
    static const struct option_spec own[] = {{.name = "json", .kind = OPTION_BOOL, .offset = offsetof(struct program, json), .help = "", .fallback = "off"}};
    const struct option_group groups[] = {{.specs = tagged, .offset = offsetof(struct program, shared), .tags = 2}};
    const struct option_set with_group = {.program = "demo", .summary = "", .specs = own, .n_specs = 1, .groups = groups, .n_groups = 1};
    static const char *const names[] = {"json", "model", "fetch"}, *const values[] = {"on", "m", "4"};
    char *argv[] = {"demo", "--json", "--config", (char *)file_of("model = m\n"), NULL}, text[8];
    struct option option;
    size_t n = 0;

    cr_assert_eq(options_parse(&with_group, 2, argv, &program, NULL, &err), -EINVAL);
    ASSERT_TEXT("--model is required");
    setenv("TIDEPOOL_FETCH", "4", 1);
    cr_assert_eq(options_parse(&with_group, 4, argv, &program, NULL, &err), 0, "%s", err.text);
    for (; options_at(&with_group, n, &program, &option); n++) {
        cr_assert(n < 3 && options_format(&option, text, sizeof(text)) == 0);
        cr_expect_str_eq(option.spec->name, names[n]);
        cr_expect_str_eq(text, values[n]);
    }
    cr_assert_eq(n, 3);
    cr_assert(program.json && program.shared.fetch == 4 && program.shared.pool_bytes == (int64_t)2 << 30);
    argv[1] = "--pool-size=1M";
    cr_assert_eq(options_parse(&with_group, 4, argv, &program, NULL, &err), -EINVAL);
    ASSERT_TEXT("--pool-size is not an option of demo");
}

Test(options, test_format_says_when_it_cannot)
{
    char text[8];
    cr_assert_eq(parse("--model", "a long name", NULL), 0);
    cr_assert_eq(options_format(&(struct option){&specs[0], &config}, text, sizeof(text)), -ENOBUFS);
    cr_assert_eq(options_format(&(struct option){&specs[1], &config}, text, sizeof(text)), -ENOENT);
    cr_assert_eq(options_format(&(struct option){&specs[3], &config}, text, sizeof(text)), 0);
    cr_assert_str_eq(text, "2G");
}
