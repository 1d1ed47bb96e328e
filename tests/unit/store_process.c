#include "tests/unit/store_process.h"
#include "proto/base/clock.h"
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { START_US = 20000000 };

static void spawn(struct store_process *store, const char *pool_size)
{
    store->pid = fork();
    cr_assert(store->pid >= 0);
    if (store->pid > 0)
        return;
    execl(TIDEPOOL_BIN_DIR "/tidepool-kvstore", "tidepool-kvstore", "--socket", store->socket, "--pool-size", pool_size, "--log-level", "error", (char *)NULL);
    _exit(127);
}

void store_process_start(struct store_process *store, const char *pool_size)
{
    strcpy(store->folder, "/tmp/tidepool-test-XXXXXX");
    cr_assert(mkdtemp(store->folder));
    snprintf(store->socket, sizeof(store->socket), "%s/kvstore.sock", store->folder);
    spawn(store, pool_size);
}

void store_process_restart(struct store_process *store, const char *pool_size)
{
    cr_assert(store->pid == 0);
    spawn(store, pool_size);
}

void store_process_kill(struct store_process *store)
{
    int status;
    cr_assert(store->pid > 0 && kill(store->pid, SIGKILL) == 0 && waitpid(store->pid, &status, 0) == store->pid);
    cr_assert(WIFSIGNALED(status), "the store had ended by itself with status %d", status);
    store->pid = 0;
}

void store_process_end(struct store_process *store)
{
    char command[128];
    if (store->pid)
        store_process_kill(store);
    snprintf(command, sizeof(command), "rm -r %s", store->folder);
    cr_expect(system(command) == 0);
}

void store_process_wait(struct loop *loop, const struct kv_client *client, bool connected)
{
    const uint64_t end_us = clock_now_us() + START_US;
    struct kv_store_info info;
    for (kv_client_info(client, &info); info.connected != connected; kv_client_info(client, &info)) {
        cr_assert(clock_now_us() < end_us, "the store is %s", info.connected ? "still there" : info.error.text);
        loop_poll(loop);
    }
}

struct kv_client *store_process_client(struct store_process *store, struct loop *loop, const char *name)
{
    const struct kv_client_config config = {.socket_path = store->socket, .name = name, .connect_timeout_us = 1000000};
    struct kv_client *client;
    struct error err;
    cr_assert(kv_client_create(loop, &config, &client, &err) >= 0, "%s", err.text);
    store_process_wait(loop, client, true);
    return client;
}
