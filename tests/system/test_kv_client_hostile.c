/* A client of a store that misbehaves: descriptors that are none, extents outside the pool, answers nobody asked for. Nothing is handed out and nothing
 * crashes. The store here is a process that plays a script. */
#include "kvstore/client/kv_client.h"
#include "proto/base/buf.h"
#include "proto/wire/frame.h"
#include "proto/wire/frame_append.h"
#include "proto/wire/stats_page.h"
#include "proto/wire/store.pb-c.h"
#include "tests/system/child_process.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

enum { POOL_BYTES = 1 << 16, BLOCK_BYTES = 4096, WAIT_US = 10000000, WAIT_MS = 10000 };

static char folder[64], path[96];
static struct loop *loop;

static void setup(void)
{
    folder_make(folder);
    snprintf(path, sizeof path, "%s/kvstore.sock", folder);
    cr_assert_eq(loop_create(&loop), 0);
}

static void teardown(void)
{
    loop_free(loop);
    folder_remove(folder);
}

TestSuite(kv_client_hostile, .init = setup, .fini = teardown, .timeout = 60);

/* ---- the store's side, in a process of its own; it ends with a status ---- */

struct script {
    size_t pool_file_bytes;     /* size of the memfd; POOL_BYTES is what Welcome says */
    bool unsealed, bad_magic, one_fd;
    uint64_t offset, length;    /* of the extent in the answer to Lookup */
    int n_extents;
    uint64_t id_step;           /* added to the request id of the answer */
    int junk_after;             /* answers before garbage; -1: never */
    int released;               /* pipe: a byte comes when the client is about to release */
};

static int memory_make(size_t bytes, bool sealed)
{
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (ftruncate(fd, (off_t)bytes) < 0 || (sealed && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) < 0))
        _exit(10);
    return fd;
}

static int stats_make(bool bad_magic)
{
    const struct stats_page page = {.magic = bad_magic ? 1 : STATS_PAGE_MAGIC, .version = STATS_PAGE_VERSION, .bytes = sizeof page};
    int fd = memory_make(STATS_PAGE_BYTES, true);

    if (pwrite(fd, &page, sizeof page, 0) != sizeof page)
        _exit(11);
    return fd;
}

static void send_fds(int socket, const struct buf *out, const int *fds, int n)
{
    union {
        char bytes[CMSG_SPACE(2 * sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec iov = {.iov_base = out->data, .iov_len = out->len};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = CMSG_SPACE((size_t)n * sizeof(int))};
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);

    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN((size_t)n * sizeof(int));
    memcpy(CMSG_DATA(c), fds, (size_t)n * sizeof(int));
    if (sendmsg(socket, &msg, 0) < 0)
        _exit(12);
}

/* Reads one frame; false at the end of the stream. */
static bool frame_read(int socket, struct frame_header *ret_header)
{
    uint8_t bytes[FRAME_HEADER_BYTES], body[1 << 16];

    if (recv(socket, bytes, sizeof bytes, MSG_WAITALL) != sizeof bytes || frame_header_decode(bytes, sizeof bytes, ret_header) < 0)
        return false;
    return !ret_header->body_bytes || recv(socket, body, ret_header->body_bytes, MSG_WAITALL) == (ssize_t)ret_header->body_bytes;
}

static void welcome(int socket, const struct script *s, uint64_t id)
{
    Tidepool__Store__Welcome message = TIDEPOOL__STORE__WELCOME__INIT;
    uint8_t uuid[16] = {1};
    int fds[2] = {memory_make(s->pool_file_bytes, !s->unsealed), stats_make(s->bad_magic)};
    struct buf out;

    message.version = FRAME_VERSION;
    message.store_uuid = (ProtobufCBinaryData){sizeof uuid, uuid};
    message.pool_bytes = POOL_BYTES;
    message.lease_timeout_ms = 30000;
    buf_init(&out, 1 << 20);
    frame_append(&out, STORE_WELCOME, id, &message.base);
    send_fds(socket, &out, fds, s->one_fd ? 1 : 2);
}

static void answer(int socket, const struct script *s, uint64_t id)
{
    static const uint8_t zeros[BLOCK_BYTES];
    Tidepool__Store__LookupResult result = TIDEPOOL__STORE__LOOKUP_RESULT__INIT;
    Tidepool__Store__Extent extent = TIDEPOOL__STORE__EXTENT__INIT, *list[8] = {&extent, &extent, &extent, &extent};
    struct buf out;

    extent.offset = s->offset;
    extent.length = s->length;
    extent.checksum = XXH3_64bits(zeros, sizeof zeros);
    extent.lease = 77;
    result.extents = list;
    result.n_extents = (size_t)s->n_extents;
    buf_init(&out, 1 << 20);
    frame_append(&out, STORE_LOOKUP_RESULT, id + s->id_step, &result.base);
    if (send(socket, out.data, out.len, MSG_NOSIGNAL) < 0)
        _exit(13);
}

/* After the garbage the client must not close before it has released: a real store would end its leases. */
static void watch_end(int socket, int released)
{
    struct pollfd p[2] = {{.fd = socket, .events = POLLIN}, {.fd = released, .events = POLLIN}};
    char byte;

    if (poll(p, 2, WAIT_MS) <= 0 || !(p[1].revents & POLLIN))
        _exit(20);
    if (read(released, &byte, 1) != 1)
        _exit(21);
    while (recv(socket, &byte, 1, 0) > 0)
        ;
    _exit(0);
}

static void play(int listener, const struct script *s)
{
    int socket = accept(listener, NULL, NULL), answered = 0;
    struct frame_header header;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (frame_read(socket, &header)) {
        if (header.type == STORE_HELLO) {
            welcome(socket, s, header.request_id);
        } else if (header.type == STORE_LOOKUP && answered == s->junk_after) {
            if (send(socket, "this is no frame, not even nearly", 33, MSG_NOSIGNAL) < 0)
                _exit(14);
            watch_end(socket, s->released);
        } else if (header.type == STORE_LOOKUP) {
            answer(socket, s, header.request_id);
            answered++;
        }
    }
    _exit(0);
}

static pid_t store_start(const struct script *s)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    pid_t pid;

    strcpy(addr.sun_path, path);
    unlink(path);
    cr_assert_eq(bind(listener, (struct sockaddr *)&addr, sizeof addr), 0);
    cr_assert_eq(listen(listener, 4), 0);
    pid = fork();
    cr_assert_geq(pid, 0);
    if (pid == 0)
        play(listener, s);
    close(listener);
    return pid;
}

static const struct script good = {.pool_file_bytes = POOL_BYTES, .length = BLOCK_BYTES, .n_extents = 1, .junk_after = -1};

static struct kv_client *client_make(bool expect_connected, const char *error)
{
    const struct kv_client_config config = {.socket_path = path, .name = "c", .connect_timeout_us = WAIT_US};
    struct kv_store_info info;
    struct kv_client *client;
    struct error err;

    cr_assert_eq(kv_client_create(loop, &config, &client, &err), 0);
    kv_client_info(client, &info);
    cr_assert_eq(info.connected, expect_connected, "%s", info.error.text);
    cr_assert(!error || strstr(info.error.text, error), "%s", info.error.text);
    return client;
}

Test(kv_client_hostile, test_descriptors_that_are_not_what_they_should_be)
{
    struct script scripts[4] = {good, good, good, good};
    const char *const errors[4] = {"sealed against shrinking", "32768 bytes instead of 65536", "another layout", "1 descriptors"};

    scripts[0].unsealed = true;
    scripts[1].pool_file_bytes = POOL_BYTES / 2;
    scripts[2].bad_magic = true;
    scripts[3].one_fd = true;
    for (int i = 0; i < 4; i++) {
        pid_t pid = store_start(&scripts[i]);
        kv_client_free(client_make(false, errors[i]));
        waitpid(pid, NULL, 0);
    }
}

Test(kv_client_hostile, test_extents_outside_the_pool_and_answers_to_nobody)
{
    const struct block_key key = {{1}};
    struct script scripts[7];
    struct kv_lease leases[8];

    for (int i = 0; i < 7; i++)
        scripts[i] = good;
    scripts[0].offset = POOL_BYTES - BLOCK_BYTES + 1;
    scripts[1].offset = UINT64_MAX - 100;
    scripts[2].length = UINT64_MAX;
    scripts[3].length = 0;
    scripts[4].n_extents = 2; /* for one key */
    scripts[5].id_step = 1;
    for (int i = 0; i < 7; i++) {
        pid_t pid = store_start(&scripts[i]);
        struct kv_client *client = client_make(true, NULL);
        int rc = kv_client_lookup(client, &key, 1, WAIT_US, leases);
        cr_assert_eq(rc, i < 6 ? -ENOTCONN : 1, "script %d: %d", i, rc);
        kv_client_free(client);
        waitpid(pid, NULL, 0);
    }
}

Test(kv_client_hostile, test_connection_given_up_stays_open_while_leases_are_held)
{
    const struct block_key key = {{1}};
    struct script script = good;
    struct kv_lease lease, other;
    struct kv_client *client;
    int released[2], status;
    pid_t pid;

    cr_assert_eq(pipe(released), 0);
    script.junk_after = 1;
    script.released = released[0];
    pid = store_start(&script);
    client = client_make(true, NULL);
    cr_assert_eq(kv_client_lookup(client, &key, 1, WAIT_US, &lease), 1);
    cr_assert_eq(kv_client_lookup(client, &key, 1, WAIT_US, &other), -ENOTCONN);
    cr_assert_eq(lease.data[BLOCK_BYTES - 1], 0);
    cr_assert_eq(write(released[1], "r", 1), 1);
    kv_client_release(client, &lease, 1);
    waitpid(pid, &status, 0);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", (unsigned)status);
    kv_client_free(client);
}
