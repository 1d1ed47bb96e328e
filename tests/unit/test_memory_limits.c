#include "kvstore/memory_limits.h"
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static char root[64];

/* Writes a file below the root, making its folders. */
static void put(const char *path, const char *text)
{
    char full[512];
    FILE *f;

    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *slash = strchr(full + strlen(root) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(full, 0700);
        *slash = '/';
    }
    f = fopen(full, "w");
    cr_assert_not_null(f);
    fputs(text, f);
    fclose(f);
}

static void setup(void)
{
    strcpy(root, "/tmp/tidepool-test-XXXXXX");
    cr_assert_not_null(mkdtemp(root));
    put("/proc/meminfo", "MemTotal:       16000 kB\nMemFree:  1 kB\nMemAvailable:    8000 kB\nBuffers: 1 kB\n");
}

static void teardown(void)
{
    char command[128];

    snprintf(command, sizeof command, "rm -r '%s'", root);
    cr_assert_eq(system(command), 0);
}

static uint64_t limit(const char *name_part)
{
    const struct memory_limits_source source = {.root = root};
    const char *name;
    uint64_t bytes;
    struct error err;

    cr_assert_eq(memory_limits_read(&source, &bytes, &name, &err), 0);
    cr_assert(strstr(name, name_part), "%s", name);
    return bytes;
}

TestSuite(memory_limits, .init = setup, .fini = teardown);

Test(memory_limits, test_available_memory_without_groups)
{
    cr_assert_eq(limit("MemAvailable"), 8000 * 1024);
}

Test(memory_limits, test_tightest_level_of_version_2_less_what_can_be_reclaimed)
{
    put("/proc/self/cgroup", "0::/a/b\n");
    put("/sys/fs/cgroup/a/b/memory.max", "max\n");
    put("/sys/fs/cgroup/a/b/memory.current", "100\n");
    put("/sys/fs/cgroup/a/memory.max", "5000\n");
    put("/sys/fs/cgroup/a/memory.current", "3000\n");
    put("/sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 400\nactive_file 100\nshmem 50\n");
    cr_assert_eq(limit("cgroup"), 5000 - (3000 - 500));
}

Test(memory_limits, test_version_1_and_its_word_for_no_limit)
{
    put("/proc/self/cgroup", "5:cpu,cpuacct:/x\n3:memory:/g\n");
    put("/sys/fs/cgroup/memory/g/memory.limit_in_bytes", "9223372036854771712\n");
    put("/sys/fs/cgroup/memory/g/memory.usage_in_bytes", "100\n");
    cr_assert_eq(limit("MemAvailable"), 8000 * 1024);
    put("/sys/fs/cgroup/memory/g/memory.limit_in_bytes", "1000\n");
    put("/sys/fs/cgroup/memory/g/memory.usage_in_bytes", "1500\n");
    cr_assert_eq(limit("cgroup"), 0);
}

Test(memory_limits, test_system_that_cannot_be_read_is_an_error)
{
    const struct memory_limits_source source = {.root = root};
    const char *name;
    uint64_t bytes;
    struct error err;

    put("/proc/meminfo", "MemTotal: 5 kB\n");
    cr_assert_lt(memory_limits_read(&source, &bytes, &name, &err), 0);
    cr_assert(strstr(err.text, "MemAvailable"));
}
