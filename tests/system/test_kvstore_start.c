/* When the store refuses to start, and how it says so. */
#include "tests/system/child_process.h"
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WAIT_MS = 20000 };

static char folder[64], path[96];

static void setup(void)
{
    folder_make(folder);
    snprintf(path, sizeof path, "%s/kvstore.sock", folder);
}

static void teardown(void)
{
    folder_remove(folder);
}

TestSuite(kvstore_start, .init = setup, .fini = teardown, .timeout = 60);

/* Starts it and expects an exit status and a text on stderr. */
static void refuses(const char *pool_size, long limit_fsize, int status, const char *text)
{
    const char *argv[] = {program_path("tidepool-kvstore"), "--socket", path, "--pool-size", pool_size, NULL};
    struct child child;

    child_start(&child, argv, limit_fsize);
    cr_assert_eq(child_wait(&child, WAIT_MS), status);
    cr_assert(strstr(child.log, text), "%s", child.log);
    child_end(&child);
}

Test(kvstore_start, test_pool_beyond_the_memory_of_the_host)
{
    refuses("60T", 0, 1, "--pool-size 62914560.0 MiB does not fit");
    refuses("60T", 0, 1, "choose a smaller pool");
}

Test(kvstore_start, test_pool_beyond_the_file_size_limit)
{
    refuses("100M", 80 << 20, 1, "RLIMIT_FSIZE");
}

Test(kvstore_start, test_wrong_option_names_it)
{
    refuses("2X", 0, 2, "pool-size");
}

Test(kvstore_start, test_folder_that_others_can_enter)
{
    cr_assert_eq(chmod(folder, 0755), 0);
    refuses("1M", 0, 1, "must belong to user");
}

Test(kvstore_start, test_second_store_on_a_socket)
{
    const char *argv[] = {program_path("tidepool-kvstore"), "--socket", path, "--pool-size", "1M", NULL};
    struct child child;

    child_start(&child, argv, 0);
    cr_assert(child_wait_line(&child, "event=store_ready", WAIT_MS));
    refuses("1M", 0, 1, "another store runs there");
    kill(child.pid, SIGKILL);
    cr_assert_eq(child_wait(&child, WAIT_MS), 128 + SIGKILL);
    child_end(&child);
    /* What a killed store left does not stand in the way. */
    child_start(&child, argv, 0);
    cr_assert(child_wait_line(&child, "event=store_ready", WAIT_MS));
    kill(child.pid, SIGTERM);
    cr_assert_eq(child_wait(&child, WAIT_MS), 0);
    child_end(&child);
}
