/* `tidepool bench NAME`: the benches are programs of their own, which stand beside this one; the command becomes the one that is named. */
#include "deploy/commands.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const struct {
    const char *name, *program, *summary;
} benches[] = {
    {"fidelity", "tidepool-fidelity", "what methods of KV compression cost against full attention"},
};

static int usage(FILE *out, int status)
{
    fprintf(out, "Usage: tidepool bench NAME [OPTION]...\n\nBenches:\n");
    for (size_t i = 0; i < ARRAY_LEN(benches); i++)
        fprintf(out, "  %-10s %s\n", benches[i].name, benches[i].summary);
    fprintf(out, "\nExamples:\n  tidepool bench fidelity --quick\n  tidepool bench fidelity --help\n");
    return status;
}

/* Returns only when it fails. */
static int become(const char *program, char **argv)
{
    char path[PATH_MAX];
    const ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 64);
    if (n < 0) {
        fprintf(stderr, "tidepool bench: cannot find this program: %s\n", strerror(errno));
        return 1;
    }
    path[n] = '\0';
    char *slash = strrchr(path, '/');
    ASSERT(slash);
    snprintf(slash + 1, 64, "%s", program);
    execv(path, argv);
    fprintf(stderr, "tidepool bench: %s: %s\n", path, strerror(errno));
    return 1;
}

int bench_command(int argc, char **argv)
{
    if (argc < 2)
        return usage(stderr, 2);
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)
        return usage(stdout, 0);
    for (size_t i = 0; i < ARRAY_LEN(benches); i++)
        if (strcmp(argv[1], benches[i].name) == 0)
            return become(benches[i].program, argv + 1);
    fprintf(stderr, "tidepool bench: no bench \"%s\"\n\n", argv[1]);
    return usage(stderr, 2);
}
