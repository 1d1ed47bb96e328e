/* Any bytes as a configuration file: it is refused with a text, or what options_print writes is read back to the same values. */
#include "proto/base/base_assert.h"
#include "proto/base/options.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

struct config {
    const char *model;
    int64_t fetch, pool_bytes;
    double temperature;
    bool verbose;
    int kv_format;
};

static const char *const kv_formats[] = {"k8v4", "k8v8", "bf16", NULL};
static const struct option_spec specs[] = {
    {.name = "model", .kind = OPTION_STR, .offset = offsetof(struct config, model), .help = "", .optional = true},
    {.name = "fetch", .kind = OPTION_INT, .offset = offsetof(struct config, fetch), .help = "", .fallback = "512", .min = -5, .max = INT64_MAX, .max_word = "all"},
    {.name = "pool-size", .kind = OPTION_BYTES, .offset = offsetof(struct config, pool_bytes), .help = "", .fallback = "2G", .min = 0, .max = (int64_t)1 << 50},
    {.name = "temperature", .kind = OPTION_DOUBLE, .offset = offsetof(struct config, temperature), .help = "", .fallback = "0.7", .min = -100, .max = 100},
    {.name = "verbose", .kind = OPTION_BOOL, .offset = offsetof(struct config, verbose), .help = "", .fallback = "off"},
    {.name = "kv-format", .kind = OPTION_ENUM, .offset = offsetof(struct config, kv_format), .help = "", .fallback = "k8v4", .choices = kv_formats},
};
static const struct option_set set = {.program = "fuzz", .summary = "", .specs = specs, .n_specs = ARRAY_LEN(specs)};

static int config_fd;
static char config_path[64];

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    config_fd = memfd_create("config", MFD_CLOEXEC);
    ASSERT(config_fd >= 0);
    snprintf(config_path, sizeof(config_path), "/proc/self/fd/%d", config_fd);
    unsetenv("TIDEPOOL_CONFIG");
    return 0;
}

static int parse(const void *text, size_t n, struct config *config, struct error *err)
{
    char *argv[] = {"fuzz", "--config", config_path, NULL};
    ASSERT(ftruncate(config_fd, 0) == 0 && pwrite(config_fd, text, n, 0) == (ssize_t)n);
    err->text[0] = '\0';
    return options_parse(&set, 3, argv, config, NULL, err);
}

static void check_reads_back(const struct config *config)
{
    char *text = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);
    ASSERT(out);
    options_print(&set, config, out);
    fclose(out);
    struct config again;
    struct error err;
    int rc = parse(text, n, &again, &err);
    ASSERT(rc == 0);
    ASSERT(again.fetch == config->fetch && again.pool_bytes == config->pool_bytes && again.temperature == config->temperature);
    ASSERT(again.verbose == config->verbose && again.kv_format == config->kv_format);
    ASSERT(!again.model == !config->model && (!again.model || strcmp(again.model, config->model) == 0));
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct config config;
    struct error err;
    int rc = parse(data, size, &config, &err);
    if (rc < 0)
        ASSERT(err.text[0] != '\0');
    else
        check_reads_back(&config);
    return 0;
}
