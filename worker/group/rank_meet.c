/* How a group comes together and how it parts: followers are started or awaited, they say who they are, everybody loads, and at the end everybody goes. */
#include "worker/group/rank_group_private.h"

#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "proto/wire/group.pb-c.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { GUEST_HELLO_US = 5 * 1000 * 1000 }; /* who connects to the socket and does not say Hello is sent away */

/* ---- children ---- */

/* Between fork and exec: only async-signal-safe calls. */
static void child_exec(int fd, const char *const *argv)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    /* An own process group: a Ctrl-C at the terminal reaches the leader alone, which ends the group in order. */
    setpgid(0, 0);
    if (fd == RANK_CHILD_FD)
        fcntl(fd, F_SETFD, 0);
    else if (dup2(fd, RANK_CHILD_FD) < 0)
        _exit(127);
    execv("/proc/self/exe", (char *const *)argv);
    _exit(127);
}

int rank_group_start(struct rank_group *g, int rank, const char *const *argv, struct error *err)
{
    struct rank_peer *peer = &g->peers[rank - 1];
    int fds[2];
    ASSERT(rank >= 1 && rank <= g->n_peers && peer->link.fd < 0);
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) < 0)
        return error_set(err, -errno, "rank %d: no socket: %s", rank, strerror(errno));
    const pid_t pid = fork();
    if (pid == 0)
        child_exec(fds[1], argv);
    const int error = errno;
    close(fds[1]);
    if (pid < 0) {
        close(fds[0]);
        return error_set(err, -error, "rank %d cannot be started: %s", rank, strerror(error));
    }
    peer->pid = pid;
    peer->link.fd = fds[0];
    return 0;
}

pid_t rank_group_pid(const struct rank_group *g, int rank)
{
    return g->peers[rank - 1].pid;
}

/* 1: it has ended, with that status (waitpid); 0: it runs. */
static int child_wait(struct rank_peer *peer, uint64_t timeout_us, int *ret_status)
{
    const int pidfd = (int)syscall(SYS_pidfd_open, peer->pid, 0);
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    if (pidfd >= 0) {
        (void)poll(&p, 1, (int)(timeout_us / 1000));
        close(pidfd);
    }
    if (waitpid(peer->pid, ret_status, WNOHANG) != peer->pid)
        return 0;
    peer->pid = 0;
    return 1;
}

/* A child that has ended has said why in the log; status 2: starting again would not help. */
static int peer_gone(struct rank_peer *peer, int rank, struct error *err)
{
    int status = 0;
    if (!peer->pid || !child_wait(peer, GROUP_CHILD_STOP_US, &status))
        return error_set(err, -ECONNRESET, "rank %d has closed its connection before the group was complete", rank);
    if (WIFSIGNALED(status))
        return error_set(err, -ECONNRESET, "rank %d was ended by signal %d before the group was complete", rank, WTERMSIG(status));
    return error_set(err, WEXITSTATUS(status) == 2 ? -EINVAL : -ECONNRESET, "rank %d has ended with status %d before the group was complete; its log says why", rank,
                     WEXITSTATUS(status));
}

/* ---- listening ---- */

int group_address(const char *path, struct sockaddr_un *ret_address)
{
    *ret_address = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof(ret_address->sun_path))
        return -ENAMETOOLONG;
    strcpy(ret_address->sun_path, path);
    return 0;
}

int group_check_user(int fd)
{
    struct ucred peer;
    socklen_t size = sizeof(peer);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0)
        return -errno;
    return peer.uid == geteuid() ? 0 : -EPERM;
}

/* A socket that nobody listens at was left by a leader that was killed. */
static bool is_stale(const struct sockaddr_un *address)
{
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const bool stale = fd >= 0 && connect(fd, (const struct sockaddr *)address, sizeof(*address)) < 0 && errno == ECONNREFUSED;
    if (fd >= 0)
        close(fd);
    return stale;
}

static int bind_socket(int fd, const struct sockaddr_un *address)
{
    const mode_t mask = umask(077);
    int rc = bind(fd, (const struct sockaddr *)address, sizeof(*address)) < 0 ? -errno : 0;
    if (rc == -EADDRINUSE && is_stale(address) && unlink(address->sun_path) == 0)
        rc = bind(fd, (const struct sockaddr *)address, sizeof(*address)) < 0 ? -errno : 0;
    umask(mask);
    return rc < 0 ? rc : listen(fd, COLLECTIVE_MAX_RANKS) < 0 ? -errno : 0;
}

int rank_group_listen(struct rank_group *g, const char *path, struct error *err)
{
    struct sockaddr_un address;
    int rc = group_address(path, &address);
    const int fd = rc < 0 ? -1 : socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (rc >= 0)
        rc = fd < 0 ? -errno : bind_socket(fd, &address);
    if (rc < 0) {
        if (fd >= 0)
            close(fd);
        return error_set(err, rc, "%.200s: %s", path, strerror(-rc));
    }
    g->listen_fd = fd;
    snprintf(g->listen_path, sizeof(g->listen_path), "%s", path);
    return 0;
}

static void stop_listening(struct rank_group *g)
{
    if (g->listen_fd < 0)
        return;
    unlink(g->listen_path);
    close(g->listen_fd);
    g->listen_fd = -1;
}

/* ---- Hello ---- */

static void refuse(struct rank_link *link, const char *text)
{
    Tidepool__Group__Refusal message = TIDEPOOL__GROUP__REFUSAL__INIT;
    message.text = (char *)text;
    (void)rank_link_send(link, GROUP_REFUSAL, &message.base, 1000000);
}

/* The first "name=value" that is not the same. */
static bool settings_differ(const char *ours, const char *theirs, char *ret_ours, char *ret_theirs, size_t size)
{
    while (*ours || *theirs) {
        const size_t n = strcspn(ours, " "), m = strcspn(theirs, " ");
        if (n != m || memcmp(ours, theirs, n) != 0) {
            snprintf(ret_ours, size, "%.*s", (int)n, ours);
            snprintf(ret_theirs, size, "%.*s", (int)m, theirs);
            return true;
        }
        ours += n + (ours[n] == ' ');
        theirs += m + (theirs[m] == ' ');
    }
    return false;
}

/* Whether the Hello is that of `rank` (0: of any that has not come yet) in this very group. */
static int check_hello(const struct rank_group *g, const struct rank_message *hello, int rank, struct error *err)
{
    char ours[100], theirs[100];
    if (hello->version != FRAME_VERSION)
        return error_set(err, -EINVAL, "a follower speaks version %u, this leader %d", hello->version, FRAME_VERSION);
    if (hello->degree != (uint32_t)g->config.degree)
        return error_set(err, -EINVAL, "a follower was started with --tp %u, this leader with --tp %d", hello->degree, g->config.degree);
    if (hello->rank < 1 || hello->rank > (uint32_t)g->n_peers || (rank && hello->rank != (uint32_t)rank))
        return error_set(err, -EINVAL, "a follower was started with --tp-rank %u; followers of this group have 1 to %d", hello->rank, g->n_peers);
    if (!rank && g->peers[hello->rank - 1].link.fd >= 0)
        return error_set(err, -EINVAL, "--tp-rank %u is there twice", hello->rank);
    if (settings_differ(g->config.settings, hello->settings, ours, theirs, sizeof(ours)))
        return error_set(err, -EINVAL, "rank %u was started with %s, the leader with %s; all ranks must have the same", hello->rank, *theirs ? theirs : "less", *ours ? ours : "less");
    return 0;
}

/* Reads a Hello and checks it; a follower that does not belong here hears why. */
static int take_hello(struct rank_group *g, struct rank_peer *peer, int rank, uint64_t timeout_us, int *ret_rank, struct error *err)
{
    struct rank_message message;
    int rc = peer_receive(peer, GROUP_HELLO, timeout_us, &message, err);
    if (rc < 0)
        return rc;
    rc = check_hello(g, &message, rank, err);
    *ret_rank = (int)message.rank;
    rank_message_fini(&message);
    if (rc < 0)
        refuse(&peer->link, err->text);
    return rc;
}

static uint64_t left_us(uint64_t end_us)
{
    const uint64_t now_us = clock_now_us();
    return now_us < end_us ? end_us - now_us : 0;
}

static int await_child(struct rank_group *g, int rank, uint64_t end_us, struct error *err)
{
    struct rank_peer *peer = &g->peers[rank - 1];
    struct error why = {""};
    int said;
    const int rc = take_hello(g, peer, rank, left_us(end_us), &said, &why);
    if (rc == -ECONNRESET)
        return peer_gone(peer, rank, err);
    if (rc == -ETIMEDOUT)
        return error_set(err, rc, "rank %d has not joined within %llu s", rank, (unsigned long long)(g->config.timeout_us / 1000000));
    return rc < 0 ? error_set(err, rc, "%s", why.text) : 0;
}

static int count_missing(const struct rank_group *g, char *ret_list, size_t size)
{
    int n = 0;
    *ret_list = '\0';
    for (int i = 0; i < g->n_peers; i++) {
        const size_t len = strlen(ret_list);
        if (g->peers[i].link.fd >= 0)
            continue;
        snprintf(ret_list + len, size - len, "%s%d", n++ ? ", " : "", i + 1);
    }
    return n;
}

/* One connection at the socket: a follower, or somebody who is none and is sent away. A follower with a wrong setting ends the attempt, since it will not come again with another. */
static int accept_one(struct rank_group *g, uint64_t end_us, struct error *err)
{
    struct pollfd p = {.fd = g->listen_fd, .events = POLLIN};
    struct rank_peer guest = {.group = g};
    int rank = 0;
    if (poll(&p, 1, (int)(left_us(end_us) / 1000) + 1) <= 0)
        return 0;
    const int fd = accept4(g->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return 0;
    rank_link_init(&guest.link, fd);
    int rc = group_check_user(fd);
    if (rc >= 0)
        rc = take_hello(g, &guest, 0, left_us(end_us) < GUEST_HELLO_US ? left_us(end_us) : GUEST_HELLO_US, &rank, err);
    if (rc < 0) {
        rank_link_fini(&guest.link);
        return rc == -EINVAL ? rc : 0;
    }
    rank_link_fini(&g->peers[rank - 1].link);
    g->peers[rank - 1].link = guest.link;
    return 0;
}

static int await_guests(struct rank_group *g, uint64_t end_us, struct error *err)
{
    char missing[200];
    while (count_missing(g, missing, sizeof(missing)) > 0) {
        if (left_us(end_us) == 0)
            return error_set(err, -ETIMEDOUT, "rank %s has not joined within %llu s: start it with --tp-rank and --tp-leader %.100s", missing,
                             (unsigned long long)(g->config.timeout_us / 1000000), g->listen_path);
        const int rc = accept_one(g, end_us, err);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int start_watch(struct rank_group *g)
{
    int fds[COLLECTIVE_MAX_RANKS];
    const struct rank_watch_config config = {.fds = fds, .n = g->n_peers}; /* a model that is being loaded is loaded to the end, so that a follower's failure can be told */
    for (int i = 0; i < g->n_peers; i++)
        fds[i] = g->peers[i].link.fd;
    const int rc = rank_watch_create(&config, &g->watch);
    for (int i = 0; rc >= 0 && i < g->n_peers; i++)
        g->peers[i].link.cancel_fd = rank_watch_fd(g->watch);
    return rc;
}

int rank_group_meet(struct rank_group *g, const uint8_t communicator[COLLECTIVE_ID_BYTES], struct error *err)
{
    Tidepool__Group__Welcome welcome = TIDEPOOL__GROUP__WELCOME__INIT;
    const uint64_t end_us = clock_now_us() + g->config.timeout_us;
    int rc = 0;
    if (g->listen_fd >= 0)
        rc = await_guests(g, end_us, err);
    else
        for (int rank = 1; rc >= 0 && rank <= g->n_peers; rank++)
            rc = await_child(g, rank, end_us, err);
    stop_listening(g);
    welcome.communicator = (ProtobufCBinaryData){.len = COLLECTIVE_ID_BYTES, .data = (uint8_t *)communicator};
    for (int rank = 1; rc >= 0 && rank <= g->n_peers; rank++)
        if (rank_link_send(&g->peers[rank - 1].link, GROUP_WELCOME, &welcome.base, g->config.timeout_us) < 0)
            rc = peer_gone(&g->peers[rank - 1], rank, err);
    if (rc < 0)
        return rc;
    rc = start_watch(g);
    return rc < 0 ? error_set(err, rc, "no watch over the ranks: %s", strerror(-rc)) : 0;
}

/* ---- loading ---- */

static int check_loaded(const struct rank_message *theirs, int rank, const struct rank_identity *ours, struct error *err)
{
    if (strcmp(theirs->backend, ours->backend) != 0)
        return error_set(err, -EINVAL, "rank %d computes on %s, the leader on %s; all ranks must have the same --device", rank, theirs->backend, ours->backend);
    if (memcmp(theirs->model, ours->model, sizeof(ours->model)) != 0)
        return error_set(err, -EINVAL, "--model of rank %d is another one (\"%s\") than the leader's (\"%s\")", rank, theirs->model_name, ours->model_name);
    return 0;
}

static int await_loaded(struct rank_group *g, int rank, const struct rank_identity *identity, struct error *err)
{
    struct rank_peer *peer = &g->peers[rank - 1];
    struct rank_message message;
    struct error why = {""};
    int rc = peer_receive(peer, GROUP_LOADED, GROUP_LOAD_US_MAX, &message, &why);
    if (rc == -ECONNRESET || rc == -ECANCELED) {
        const int gone = rc == -ECANCELED && rank_watch_gone(g->watch) >= 0 ? rank_watch_gone(g->watch) + 1 : rank;
        return peer_gone(&g->peers[gone - 1], gone, err);
    }
    if (rc < 0)
        return error_set(err, rc, "rank %d: %s", rank, why.text);
    rc = check_loaded(&message, rank, identity, err);
    rank_message_fini(&message);
    if (rc < 0)
        refuse(&peer->link, err->text);
    return rc;
}

int rank_group_load(struct rank_group *g, const struct rank_identity *identity, struct error *err)
{
    Tidepool__Group__Start start = TIDEPOOL__GROUP__START__INIT;
    int rc = 0;
    for (int rank = 1; rc >= 0 && rank <= g->n_peers; rank++)
        rc = await_loaded(g, rank, identity, err);
    for (int rank = 1; rc >= 0 && rank <= g->n_peers; rank++)
        if (rank_link_send(&g->peers[rank - 1].link, GROUP_START, &start.base, g->config.timeout_us) < 0)
            rc = peer_gone(&g->peers[rank - 1], rank, err);
    rank_watch_limit(g->watch, GROUP_GRACE_US);
    return rc;
}

/* ---- parting ---- */

/* A follower that has heard Stop closes its end. */
static void await_end(struct rank_peer *peer, uint64_t end_us)
{
    struct frame_header header;
    const uint8_t *body;
    while (rank_link_receive(&peer->link, left_us(end_us), &header, &body) >= 0)
        ;
}

/* The end of the stream ends a follower that has not heard Stop. */
static void peer_end(struct rank_peer *peer, uint64_t end_us)
{
    int status;
    rank_link_fini(&peer->link);
    if (peer->pid && !child_wait(peer, left_us(end_us), &status)) {
        kill(peer->pid, SIGKILL);
        waitpid(peer->pid, &status, 0);
    }
}

void rank_group_free(struct rank_group *g)
{
    Tidepool__Group__Stop stop = TIDEPOOL__GROUP__STOP__INIT;
    if (!g)
        return;
    const bool whole = g->watch && !*g->failure.text && rank_watch_gone(g->watch) < 0;
    const uint64_t end_us = clock_now_us() + (whole ? GROUP_CHILD_STOP_US : GROUP_CHILD_BROKEN_US);
    loop_source_free(g->gone_source);
    rank_watch_free(g->watch);
    for (int i = 0; i < g->n_peers; i++) {
        loop_source_free(g->peers[i].source);
        g->peers[i].link.cancel_fd = -1;
        if (whole)
            (void)rank_link_send(&g->peers[i].link, GROUP_STOP, &stop.base, GROUP_CHILD_STOP_US);
    }
    for (int i = 0; whole && i < g->n_peers; i++)
        await_end(&g->peers[i], end_us);
    for (int i = 0; i < g->n_peers; i++)
        peer_end(&g->peers[i], end_us);
    stop_listening(g);
    free(g);
}
