#include "router/text/template_sandbox.h"
#include "proto/base/base_assert.h"
#include "router/text/template_script.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define THIS_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define THIS_ARCH AUDIT_ARCH_AARCH64
#else
#error "the template sandbox needs this architecture's AUDIT_ARCH value"
#endif

/* Calls that may be made with any arguments. Nothing here opens, connects, starts, signals or changes permissions. */
static const unsigned allowed[] = {
    SYS_read,          SYS_write,       SYS_close,        SYS_fstat,         SYS_munmap,       SYS_mremap,    SYS_madvise,
    SYS_brk,           SYS_futex,       SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn, SYS_exit,      SYS_exit_group,
    SYS_clock_gettime, SYS_gettimeofday, SYS_getrandom,    SYS_getpid,        SYS_gettid,       SYS_sched_yield, SYS_restart_syscall,
};
/* Calls that may be made without PROT_EXEC in their third argument. */
static const unsigned allowed_without_exec[] = {SYS_mmap, SYS_mprotect};

#define FILTER_MAX (8 + 2 * ARRAY_LEN(allowed) + 5 * ARRAY_LEN(allowed_without_exec))

struct filter {
    struct sock_filter code[FILTER_MAX];
    size_t n;
};

static void put(struct filter *f, uint16_t code, uint32_t k, uint8_t if_true, uint8_t if_false)
{
    ASSERT(f->n < FILTER_MAX);
    f->code[f->n++] = (struct sock_filter){.code = code, .k = k, .jt = if_true, .jf = if_false};
}

static void load(struct filter *f, size_t offset)
{
    put(f, BPF_LD | BPF_W | BPF_ABS, (uint32_t)offset, 0, 0);
}

static void give(struct filter *f, uint32_t verdict)
{
    put(f, BPF_RET | BPF_K, verdict, 0, 0);
}

/* In seccomp programs a jump's two distances count from the next instruction. The numbers of x32 calls, being above all others, match nothing. */
static void build(struct filter *f)
{
    load(f, offsetof(struct seccomp_data, arch));
    put(f, BPF_JMP | BPF_JEQ | BPF_K, THIS_ARCH, 1, 0);
    give(f, SECCOMP_RET_KILL_PROCESS);
    load(f, offsetof(struct seccomp_data, nr));
    for (size_t i = 0; i < ARRAY_LEN(allowed); i++) {
        put(f, BPF_JMP | BPF_JEQ | BPF_K, allowed[i], 0, 1);
        give(f, SECCOMP_RET_ALLOW);
    }
    for (size_t i = 0; i < ARRAY_LEN(allowed_without_exec); i++) {
        put(f, BPF_JMP | BPF_JEQ | BPF_K, allowed_without_exec[i], 0, 4);
        load(f, offsetof(struct seccomp_data, args[2]));
        put(f, BPF_JMP | BPF_JSET | BPF_K, PROT_EXEC, 1, 0);
        give(f, SECCOMP_RET_ALLOW);
        give(f, SECCOMP_RET_ERRNO | EPERM);
    }
    give(f, SECCOMP_RET_ERRNO | EPERM);
}

int template_sandbox_filter(struct buf *out)
{
    struct filter f = {.n = 0};
    build(&f);
    const uint8_t *bytes = (const uint8_t *)f.code;
    int r = 0;
    for (size_t i = 0; i < f.n * sizeof f.code[0] && r >= 0; i++)
        r = buf_printf(out, "%02x", bytes[i]);
    return r < 0 ? r : 0;
}

static void limit(int resource, rlim_t value)
{
    struct rlimit both = {.rlim_cur = value, .rlim_max = value};
    setrlimit((__rlimit_resource_t)resource, &both);
}

/* Between fork and exec: system calls only, since other threads of the parent may have held any lock. */
static void become_helper(int fd, pid_t parent, const char *python, char *const argv[], char *const envp[])
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(127); /* it died before the line above */
    setsid();
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    int null = open("/dev/null", O_WRONLY);
    if (dup2(fd, 0) < 0 || dup2(fd, 1) < 0 || (null >= 0 && dup2(null, 2) < 0))
        _exit(127);
    if (syscall(SYS_close_range, 3u, ~0u, 0u) < 0)
        for (int i = 3; i < 4096; i++) /* a kernel before 5.9 */
            close(i);
    limit(RLIMIT_AS, TEMPLATE_MEMORY_MAX);
    limit(RLIMIT_FSIZE, 0);
    limit(RLIMIT_CORE, 0);
    limit(RLIMIT_NOFILE, 64);
    execve(python, argv, envp);
    /* The answer of a helper that could not start: status 3 and the reason. */
    static const char reason[] = "the Python interpreter cannot be started";
    static const uint32_t head[2] = {3, sizeof reason - 1};
    ssize_t unused = write(1, head, sizeof head);
    unused = write(1, reason, sizeof reason - 1);
    (void)unused;
    _exit(127);
}

int template_sandbox_start(const char *python, int *ret_fd, pid_t *ret_pid, struct error *err)
{
    int fds[2];
    const char *zone = getenv("TZ");
    char tz[128];
    snprintf(tz, sizeof tz, "TZ=%s", zone ? zone : "");
    char *const argv[] = {(char *)(uintptr_t)python, "-I", "-B", "-X", "utf8", "-c", (char *)(uintptr_t)template_script, NULL};
    char *const envp[] = {"LANG=C.UTF-8", zone ? tz : NULL, NULL};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) < 0)
        return error_set(err, -errno, "socketpair: %s", strerror(errno));
    pid_t parent = getpid(), pid = fork();
    if (pid < 0) {
        int code = -errno;
        close(fds[0]);
        close(fds[1]);
        return error_set(err, code, "fork: %s", strerror(-code));
    }
    if (pid == 0)
        become_helper(fds[1], parent, python, argv, envp);
    close(fds[1]);
    fcntl(fds[0], F_SETFL, O_NONBLOCK);
    *ret_fd = fds[0];
    *ret_pid = pid;
    return 0;
}

int template_sandbox_allow_cpu(pid_t pid, unsigned seconds)
{
    clockid_t clock;
    struct timespec used;
    struct rlimit now;
    if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &used) < 0 || prlimit(pid, RLIMIT_CPU, NULL, &now) < 0)
        return -ESRCH;
    now.rlim_cur = (rlim_t)used.tv_sec + seconds + 1;
    if (now.rlim_max != RLIM_INFINITY && now.rlim_cur > now.rlim_max)
        now.rlim_cur = now.rlim_max;
    return prlimit(pid, RLIMIT_CPU, &now, NULL) < 0 ? -errno : 0;
}
