/* The socket of a client: greeting, bytes in and out, and what happens when it breaks. */
#include "kvstore/client/kv_client_private.h"

#include "proto/base/base_assert.h"
#include "proto/base/capped_alloc.h"
#include "proto/base/clock.h"
#include "proto/wire/frame.h"
#include "proto/wire/frame_append.h"
#include "proto/wire/store.pb-c.h"
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { BACKOFF_MIN_US = 100000, BACKOFF_MAX_US = 5000000, READ_BYTES = 64 << 10 };

/* ---- the end of a connection ---- */

static void close_fds(struct kv_client *client)
{
    while (client->n_fds)
        close(client->fds[--client->n_fds]);
}

void kv_mapping_drop_unused(struct kv_client *client)
{
    struct kv_mapping **link = &client->mappings;

    while (*link) {
        struct kv_mapping *mapping = *link;
        if (mapping != client->current && mapping->n_leases == 0) {
            *link = mapping->next;
            kv_mapping_free(mapping);
        } else {
            link = &mapping->next;
        }
    }
}

/* The store's side is closed already if it hung up. If this side gives up, the leases must outlive the connection: a stopped store
 * would free them when it saw the end of the stream. */
static void socket_retire(struct kv_client *client)
{
    struct kv_mapping *mapping = client->current;

    if (mapping && mapping->n_leases)
        mapping->fd = client->fd;
    else
        close(client->fd);
    client->fd = -1;
    client->current = NULL;
    kv_mapping_drop_unused(client);
}

void kv_disconnect(struct kv_client *client, int error, const char *why)
{
    struct kv_pending *pending;

    if (client->state == KV_DISCONNECTED)
        return;
    error_set(&client->error, error, "%s: %s", client->socket_path, why);
    client->state = KV_DISCONNECTED;
    loop_source_free(client->fd_source);
    client->fd_source = NULL;
    close_fds(client);
    while ((pending = client->waiting.first))
        kv_finish(client, pending, -ENOTCONN);
    socket_retire(client);
    buf_clear(&client->in);
    buf_clear(&client->out);
    loop_timer_disarm(client->beat_timer);
    loop_timer_arm(client->wake_timer, 0);
    loop_timer_arm(client->retry_timer, client->backoff_us);
    client->backoff_us = client->backoff_us * 2 > BACKOFF_MAX_US ? BACKOFF_MAX_US : client->backoff_us * 2;
}

void kv_unlease(struct kv_lease *lease)
{
    ASSERT(lease->mapping->n_leases > 0);
    lease->mapping->n_leases--;
    *lease = (struct kv_lease){0};
}

/* ---- output ---- */

int kv_flush(struct kv_client *client)
{
    size_t sent = 0;

    while (sent < client->out.len) {
        ssize_t n = send(client->fd, client->out.data + sent, client->out.len - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            break;
        if (n < 0) {
            kv_disconnect(client, -errno, strerror(errno));
            return -ENOTCONN;
        }
        sent += (size_t)n;
    }
    buf_consume(&client->out, sent);
    int rc = loop_fd_set_events(client->fd_source, LOOP_READ | (client->out.len ? LOOP_WRITE : 0));
    if (rc < 0) {
        kv_disconnect(client, rc, strerror(-rc));
        return -ENOTCONN;
    }
    return 0;
}

int kv_send(struct kv_client *client, uint16_t type, uint64_t id, const ProtobufCMessage *message)
{
    int rc = client->state == KV_DISCONNECTED ? -ENOTCONN : frame_append(&client->out, type, id, message);

    if (rc < 0)
        return rc;
    client->sent_since_beat = true;
    return kv_flush(client);
}

/* ---- input ---- */

/* Whoever reads the pool by other means than this process' instructions has to know of it first. */
static int tell_mapping(struct kv_client *client, struct kv_mapping *mapping)
{
    int rc;

    if (!client->on_map)
        return 0;
    rc = client->on_map(mapping->base, mapping->bytes, client->arg);
    if (rc < 0)
        return error_set(&client->error, rc, "the pool of %llu bytes is refused here: %s", (unsigned long long)mapping->bytes, strerror(-rc));
    mapping->on_unmap = client->on_unmap;
    mapping->arg = client->arg;
    return 0;
}

static int welcome_check(struct kv_client *client, const Tidepool__Store__Welcome *welcome, struct kv_mapping **ret_mapping)
{
    struct error *err = &client->error;

    if (welcome->version != FRAME_VERSION)
        return error_set(err, -EPROTONOSUPPORT, "the store speaks version %u, this client %d", welcome->version, FRAME_VERSION);
    if (welcome->store_uuid.len != sizeof client->store_uuid || welcome->pool_bytes == 0 || welcome->pool_bytes > SIZE_MAX / 2)
        return error_set(err, -EPROTO, "Welcome without identity or size of the pool");
    if (strlen(welcome->event_endpoint) >= sizeof client->event_endpoint || strlen(welcome->snapshot_endpoint) >= sizeof client->snapshot_endpoint)
        return error_set(err, -EPROTO, "Welcome with endpoints of more than %zu characters", sizeof client->event_endpoint - 1);
    if (client->n_fds != KV_FDS_MAX)
        return error_set(err, -EPROTO, "Welcome with %d descriptors instead of %d", client->n_fds, KV_FDS_MAX);
    return kv_mapping_create(client->fds[0], client->fds[1], welcome->pool_bytes, ret_mapping, err);
}

static int handle_welcome(struct kv_client *client, const uint8_t *body, size_t n)
{
    struct capped_alloc alloc;
    Tidepool__Store__Welcome *welcome;
    struct kv_mapping *mapping;
    int rc;

    capped_alloc_init(&alloc, KV_EXPANDED_MAX);
    welcome = tidepool__store__welcome__unpack(&alloc.pb, n, body);
    if (!welcome)
        return -EPROTO;
    rc = welcome_check(client, welcome, &mapping);
    if (rc < 0)
        goto done;
    rc = tell_mapping(client, mapping);
    if (rc < 0) {
        kv_mapping_free(mapping);
        goto done;
    }
    memcpy(client->store_uuid, welcome->store_uuid.data, sizeof client->store_uuid);
    strcpy(client->event_endpoint, welcome->event_endpoint);
    strcpy(client->snapshot_endpoint, welcome->snapshot_endpoint);
    client->beat_us = welcome->lease_timeout_ms >= 3 && welcome->lease_timeout_ms < 86400000 ? welcome->lease_timeout_ms * 1000 / 3 : 1000000;
    mapping->next = client->mappings;
    client->mappings = client->current = mapping;
    client->state = KV_CONNECTED;
    client->generation++;
    client->error.text[0] = '\0';
    client->backoff_us = BACKOFF_MIN_US;
    close_fds(client);
    loop_timer_disarm(client->retry_timer);
    loop_timer_arm(client->beat_timer, client->beat_us);
    loop_timer_arm(client->wake_timer, 0);
done:
    tidepool__store__welcome__free_unpacked(welcome, &alloc.pb);
    return rc;
}

static void handle_failure(struct kv_client *client, const uint8_t *body, size_t n)
{
    struct capped_alloc alloc;
    Tidepool__Store__Failure *failure;
    char text[160];

    capped_alloc_init(&alloc, KV_EXPANDED_MAX);
    failure = tidepool__store__failure__unpack(&alloc.pb, n, body);
    snprintf(text, sizeof text, "the store refused: %s", failure ? failure->text : "(no text)");
    if (failure)
        tidepool__store__failure__free_unpacked(failure, &alloc.pb);
    kv_disconnect(client, -EPROTO, text);
}

static void handle_frame(struct kv_client *client, const struct frame_header *header, const uint8_t *body)
{
    int rc = -EPROTO;

    if (header->type == STORE_FAILURE) {
        handle_failure(client, body, header->body_bytes);
        return;
    }
    if (client->state == KV_GREETING && header->type == STORE_WELCOME)
        rc = handle_welcome(client, body, header->body_bytes);
    else if (client->state == KV_CONNECTED)
        rc = kv_answer(client, header->type, header->request_id, body, header->body_bytes);
    if (rc < 0 && client->state != KV_DISCONNECTED) {
        struct error why = client->error;
        kv_disconnect(client, rc, why.text[0] ? why.text : "an answer that makes no sense");
    }
}

/* Handles the complete frames of the input. The buffer may be cleared by any of them: a disconnect. */
static void handle_input(struct kv_client *client)
{
    size_t done = 0;

    while (client->state != KV_DISCONNECTED && client->in.len - done >= FRAME_HEADER_BYTES) {
        struct frame_header header;
        int rc = frame_header_decode(client->in.data + done, client->in.len - done, &header);
        if (rc < 0 || header.body_bytes > KV_IN_MAX) {
            kv_disconnect(client, -EPROTO, "a frame that makes no sense");
            return;
        }
        if (client->in.len - done < FRAME_HEADER_BYTES + header.body_bytes)
            break;
        handle_frame(client, &header, client->in.data + done + FRAME_HEADER_BYTES);
        done += FRAME_HEADER_BYTES + header.body_bytes;
    }
    if (client->state != KV_DISCONNECTED)
        buf_consume(&client->in, done);
}

/* Keeps descriptors that came with the bytes while greeting; all others are closed. */
static void take_fds(struct kv_client *client, struct msghdr *msg)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
        size_t n = c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS ? (c->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0;
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (client->state == KV_GREETING && client->n_fds < KV_FDS_MAX)
                client->fds[client->n_fds++] = fd;
            else
                close(fd);
        }
    }
}

/* Reads once. */
static void receive(struct kv_client *client)
{
    union {
        char bytes[CMSG_SPACE(8 * sizeof(int))];
        struct cmsghdr align;
    } control;
    uint8_t data[READ_BYTES];
    struct iovec iov = {.iov_base = data, .iov_len = sizeof data};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t n = recvmsg(client->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

    if (n < 0) {
        if (errno != EAGAIN && errno != EINTR)
            kv_disconnect(client, -errno, strerror(errno));
        return;
    }
    take_fds(client, &msg);
    if (n == 0)
        kv_disconnect(client, -ECONNRESET, "the store is gone");
    else if (buf_append(&client->in, data, (size_t)n) < 0)
        kv_disconnect(client, -ENOMEM, "no memory for an answer");
    else
        handle_input(client);
}

static void socket_ready(int fd, int events, void *arg)
{
    struct kv_client *client = arg;

    (void)fd;
    if (events & LOOP_READ)
        receive(client);
    if (client->state != KV_DISCONNECTED && (events & LOOP_WRITE))
        (void)kv_flush(client);
}

int kv_wait(struct kv_client *client, bool (*pred)(const struct kv_client *client, const void *arg), const void *arg, uint64_t deadline_us)
{
    uint64_t end = clock_now_us() + deadline_us;

    while (!pred(client, arg)) {
        struct pollfd p = {.fd = client->fd, .events = (short)(POLLIN | (client->out.len ? POLLOUT : 0))};
        uint64_t now = clock_now_us();
        if (client->state == KV_DISCONNECTED)
            return -ENOTCONN;
        if (now >= end)
            return -ETIMEDOUT;
        const struct timespec left = {.tv_sec = (time_t)((end - now) / 1000000), .tv_nsec = (long)((end - now) % 1000000 * 1000)};
        if (ppoll(&p, 1, &left, NULL) <= 0)
            continue;
        if (p.revents & POLLOUT)
            (void)kv_flush(client);
        if (client->state != KV_DISCONNECTED && (p.revents & ~POLLOUT))
            receive(client);
    }
    return 0;
}

/* ---- connecting ---- */

static int socket_connect(struct kv_client *client, int *ret_fd)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    struct ucred peer;
    socklen_t size = sizeof peer;
    int rc, fd;

    if (strlen(client->socket_path) >= sizeof addr.sun_path)
        return -ENAMETOOLONG;
    strcpy(addr.sun_path, client->socket_path);
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    if (connect(fd, (struct sockaddr *)&addr, sizeof addr) < 0 || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0) {
        rc = -errno;
        goto fail;
    }
    if (peer.uid != geteuid()) {
        rc = -EPERM;
        goto fail;
    }
    *ret_fd = fd;
    return 0;
fail:
    close(fd);
    return rc;
}

int kv_connect(struct kv_client *client)
{
    Tidepool__Store__Hello hello = TIDEPOOL__STORE__HELLO__INIT;
    int rc = socket_connect(client, &client->fd);

    if (rc == 0) {
        client->state = KV_GREETING;
        rc = loop_fd_add(client->loop, client->fd, LOOP_READ, socket_ready, client, &client->fd_source);
        if (rc < 0)
            kv_disconnect(client, rc, strerror(-rc));
    } else {
        error_set(&client->error, rc, "%s: %s", client->socket_path, strerror(-rc));
        loop_timer_arm(client->retry_timer, client->backoff_us);
        client->backoff_us = client->backoff_us * 2 > BACKOFF_MAX_US ? BACKOFF_MAX_US : client->backoff_us * 2;
    }
    if (rc < 0)
        return rc;
    hello.version = FRAME_VERSION;
    hello.client_name = client->name;
    loop_timer_arm(client->retry_timer, client->connect_timeout_us);
    rc = kv_send(client, STORE_HELLO, client->next_id++, &hello.base);
    if (rc < 0)
        kv_disconnect(client, rc, strerror(-rc));
    return rc;
}
