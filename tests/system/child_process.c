#include "tests/system/child_process.h"

#include "proto/base/clock.h"
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

const char *program_path(const char *name)
{
    static char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s", TIDEPOOL_BIN_DIR, name);
    return path;
}

static void run(const char *const *argv, int log_fd, long limit_fsize, pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(126);
    if (limit_fsize > 0) {
        const struct rlimit limit = {(rlim_t)limit_fsize, (rlim_t)limit_fsize};
        setrlimit(RLIMIT_FSIZE, &limit);
    }
    dup2(log_fd, STDERR_FILENO);
    execv(argv[0], (char *const *)argv);
    _exit(127);
}

void child_start(struct child *child, const char *const *argv, long limit_fsize)
{
    int fds[2];
    pid_t parent = getpid();

    *child = (struct child){.log = calloc(1, CHILD_LOG_MAX)};
    cr_assert_not_null(child->log);
    cr_assert_eq(pipe2(fds, O_CLOEXEC), 0);
    child->pid = fork();
    cr_assert_geq(child->pid, 0);
    if (child->pid == 0)
        run(argv, fds[1], limit_fsize, parent);
    close(fds[1]);
    child->log_fd = fds[0];
}

/* Reads once, waiting until `end_us`. False at the deadline or at the end of the stream. */
static bool read_more(struct child *child, uint64_t end_us)
{
    struct pollfd p = {.fd = child->log_fd, .events = POLLIN};
    uint64_t now = clock_now_us();
    ssize_t n;

    if (now >= end_us || child->log_fd < 0 || poll(&p, 1, (int)((end_us - now) / 1000) + 1) <= 0)
        return false;
    /* The log of a test is short; should it not be, the older half goes. */
    if (child->log_len > CHILD_LOG_MAX - 8192) {
        memmove(child->log, child->log + CHILD_LOG_MAX / 2, child->log_len - CHILD_LOG_MAX / 2);
        child->log_len -= CHILD_LOG_MAX / 2;
        child->log_seen = child->log_seen > CHILD_LOG_MAX / 2 ? child->log_seen - CHILD_LOG_MAX / 2 : 0;
    }
    n = read(child->log_fd, child->log + child->log_len, 4096);
    if (n <= 0)
        return false;
    child->log_len += (size_t)n;
    child->log[child->log_len] = '\0';
    return true;
}

bool child_wait_line(struct child *child, const char *text, int timeout_ms)
{
    uint64_t end_us = clock_now_us() + (uint64_t)timeout_ms * 1000;

    do {
        char *found = strstr(child->log + child->log_seen, text);
        char *line_end = found ? strchr(found, '\n') : NULL;
        if (line_end) {
            child->log_seen = (size_t)(line_end - child->log) + 1;
            return true;
        }
    } while (read_more(child, end_us));
    fprintf(stderr, "no \"%s\" in the log of pid %d:\n%s\n", text, child->pid, child->log + child->log_seen);
    return false;
}

int child_wait(struct child *child, int timeout_ms)
{
    uint64_t end_us = clock_now_us() + (uint64_t)timeout_ms * 1000;
    int pidfd = (int)syscall(SYS_pidfd_open, child->pid, 0), status;
    struct pollfd p = {.fd = pidfd, .events = POLLIN};

    cr_assert_geq(pidfd, 0);
    /* A full pipe would keep it from ending. */
    while (poll(&p, 1, 0) == 0 && clock_now_us() < end_us) {
        if (!read_more(child, clock_now_us() + 10000))
            poll(&p, 1, 10);
    }
    close(pidfd);
    if (waitpid(child->pid, &status, WNOHANG) != child->pid)
        return -1;
    child->pid = 0;
    while (read_more(child, clock_now_us() + 1000))
        ;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

void child_end(struct child *child)
{
    if (child->pid > 0) {
        kill(child->pid, SIGKILL);
        waitpid(child->pid, NULL, 0);
    }
    if (child->log)
        close(child->log_fd);
    free(child->log);
    *child = (struct child){.log_fd = -1};
}

void folder_make(char *ret_path)
{
    strcpy(ret_path, "/tmp/tidepool-test-XXXXXX");
    cr_assert_not_null(mkdtemp(ret_path));
}

void folder_remove(const char *path)
{
    DIR *dir = opendir(path);
    struct dirent *entry;
    char file[PATH_MAX];

    while (dir && (entry = readdir(dir))) {
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        unlink(file);
    }
    if (dir)
        closedir(dir);
    rmdir(path);
}
