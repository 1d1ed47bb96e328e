#include "bench/fidelity/private_store.h"
#include "proto/base/clock.h"
#include <errno.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { START_TIMEOUT_US = 60 * 1000 * 1000, POLL_US = 10 * 1000, LEASE_TIMEOUT_S = 86400 };

static int program_path(char path[PATH_MAX], const char *name)
{
    ssize_t n = readlink("/proc/self/exe", path, PATH_MAX - 64);
    if (n < 0)
        return -errno;
    path[n] = '\0';
    char *slash = strrchr(path, '/');
    if (!slash)
        return -ENOENT;
    snprintf(slash + 1, 64, "%s", name);
    return access(path, X_OK) < 0 ? -errno : 0;
}

/* The parent may have died between fork and prctl. */
static void run_child(const char *program, const char *socket, uint64_t pool_bytes, pid_t parent)
{
    char size[32], timeout[16];
    setpgid(0, 0); /* an interrupt from the terminal is for the run, which still needs the store */
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent)
        _exit(1);
    snprintf(size, sizeof(size), "%llu", (unsigned long long)pool_bytes);
    snprintf(timeout, sizeof(timeout), "%d", LEASE_TIMEOUT_S);
    execl(program, program, "--socket", socket, "--pool-size", size, "--lease-timeout", timeout, "--log-level", "warn", (char *)NULL);
    _exit(127);
}

static int make_folder(struct private_store *s)
{
    const char *base = getenv("XDG_RUNTIME_DIR");
    if (!base || strlen(base) > 60 || access(base, W_OK) < 0)
        base = "/tmp";
    snprintf(s->folder, sizeof(s->folder), "%s/tidepool-fidelity-XXXXXX", base);
    if (mkdtemp(s->folder))
        return 0;
    s->folder[0] = '\0';
    return -errno;
}

static int wait_for_socket(const struct private_store *s, const char *socket)
{
    const uint64_t end_us = clock_now_us() + START_TIMEOUT_US;
    while (access(socket, F_OK) < 0) {
        if (clock_now_us() > end_us)
            return -ETIMEDOUT;
        if (waitpid(s->pid, NULL, WNOHANG) == s->pid)
            return -ECHILD;
        usleep(POLL_US);
    }
    return 0;
}

static int connect_client(struct private_store *s, const char *socket, struct error *err)
{
    const struct kv_client_config config = {.socket_path = socket, .name = "fidelity", .connect_timeout_us = START_TIMEOUT_US};
    struct kv_store_info info;
    int r = loop_create(&s->loop);
    if (r >= 0)
        r = kv_client_create(s->loop, &config, &s->client, err);
    if (r < 0)
        return r;
    kv_client_info(s->client, &info);
    return info.connected ? 0 : error_set(err, -ETIMEDOUT, "%s", info.error.text);
}

int private_store_start(struct private_store *s, uint64_t pool_bytes, struct error *err)
{
    char program[PATH_MAX], socket[PATH_MAX + 16];
    const pid_t parent = getpid();
    *s = (struct private_store){.pid = 0};
    int r = program_path(program, "tidepool-kvstore");
    if (r < 0)
        return error_set(err, r, "tidepool-kvstore beside this program: %s", strerror(-r));
    r = make_folder(s);
    if (r < 0)
        return error_set(err, r, "no folder for the store's socket: %s", strerror(-r));
    snprintf(socket, sizeof(socket), "%s/kvstore.sock", s->folder);
    s->pid = fork();
    if (s->pid == 0)
        run_child(program, socket, pool_bytes, parent);
    if (s->pid < 0) {
        r = error_set(err, -errno, "fork: %s", strerror(errno));
        goto fail;
    }
    r = wait_for_socket(s, socket);
    if (r < 0) {
        if (r == -ECHILD)
            s->pid = 0; /* reaped */
        error_set(err, r, "the kvstore does not start with a pool of %llu bytes", (unsigned long long)pool_bytes);
        goto fail;
    }
    r = connect_client(s, socket, err);
    if (r >= 0)
        return 0;
fail:
    private_store_stop(s);
    return r;
}

static int remove_entry(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st, (void)flag, (void)ftw;
    return remove(path);
}

void private_store_stop(struct private_store *s)
{
    kv_client_free(s->client);
    loop_free(s->loop);
    if (s->pid > 0) {
        kill(s->pid, SIGTERM);
        waitpid(s->pid, NULL, 0);
    }
    if (s->folder[0])
        nftw(s->folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
    *s = (struct private_store){.pid = 0};
}
