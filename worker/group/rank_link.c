#include "worker/group/rank_link.h"

#include "proto/base/clock.h"
#include "proto/wire/frame_append.h"
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { READ_BYTES = 64 << 10, LINK_BYTES_MAX = FRAME_HEADER_BYTES + FRAME_BODY_MAX + READ_BYTES };

void rank_link_init(struct rank_link *link, int fd)
{
    *link = (struct rank_link){.fd = fd, .cancel_fd = -1};
    buf_init(&link->in, LINK_BYTES_MAX);
    buf_init(&link->out, LINK_BYTES_MAX);
}

void rank_link_fini(struct rank_link *link)
{
    buf_fini(&link->in);
    buf_fini(&link->out);
    if (link->fd >= 0)
        close(link->fd);
    link->fd = -1;
}

/* Until the socket is ready for `events`. */
static int wait_ready(const struct rank_link *link, short events, uint64_t end_us)
{
    for (;;) {
        struct pollfd fds[] = {{.fd = link->fd, .events = events}, {.fd = link->cancel_fd, .events = POLLIN}};
        const uint64_t now_us = clock_now_us(), left_us = now_us < end_us ? end_us - now_us : 0;
        const struct timespec left = {.tv_sec = (time_t)(left_us / 1000000), .tv_nsec = (long)(left_us % 1000000 * 1000)};
        const int n = ppoll(fds, 2, &left, NULL);
        if (n < 0 && errno != EINTR)
            return -errno;
        if (n > 0 && fds[0].revents)
            return 0;
        if (n > 0)
            return -ECANCELED;
        if (n == 0 && left_us == 0)
            return -ETIMEDOUT;
    }
}

int rank_link_send(struct rank_link *link, enum group_frame type, const ProtobufCMessage *message, uint64_t timeout_us)
{
    const uint64_t end_us = clock_now_us() + timeout_us;
    size_t sent = 0;
    buf_clear(&link->out);
    int rc = frame_append(&link->out, type, 0, message);
    while (rc >= 0 && sent < link->out.len) {
        const ssize_t n = send(link->fd, link->out.data + sent, link->out.len - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n >= 0)
            sent += (size_t)n;
        else if (errno == EAGAIN)
            rc = wait_ready(link, POLLOUT, end_us);
        else if (errno != EINTR)
            rc = -ECONNRESET;
    }
    return rc < 0 ? rc : 0;
}

/* 1: the header of a frame whose body is here, too; 0: more bytes are needed; -EPROTO. */
static int peek(const struct rank_link *link, struct frame_header *ret_header)
{
    if (link->in.len - link->taken < FRAME_HEADER_BYTES)
        return 0;
    if (frame_header_decode(link->in.data + link->taken, link->in.len - link->taken, ret_header) < 0)
        return -EPROTO;
    return link->in.len - link->taken - FRAME_HEADER_BYTES >= ret_header->body_bytes;
}

bool rank_link_has_frame(const struct rank_link *link)
{
    struct frame_header header;
    return peek(link, &header) != 0;
}

bool rank_link_next_is(const struct rank_link *link, enum group_frame type)
{
    struct frame_header header;
    return peek(link, &header) > 0 && header.type == type;
}

static int read_some(struct rank_link *link)
{
    if (buf_reserve(&link->in, READ_BYTES) < 0)
        return -ENOMEM;
    const ssize_t n = recv(link->fd, link->in.data + link->in.len, READ_BYTES, MSG_DONTWAIT);
    if (n == 0)
        return -ECONNRESET;
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : -ECONNRESET;
    link->in.len += (size_t)n;
    return 0;
}

int rank_link_receive(struct rank_link *link, uint64_t timeout_us, struct frame_header *ret_header, const uint8_t **ret_body)
{
    const uint64_t end_us = clock_now_us() + timeout_us;
    struct frame_header header;
    int rc;
    buf_consume(&link->in, link->taken);
    link->taken = 0;
    while ((rc = peek(link, &header)) == 0) {
        rc = wait_ready(link, POLLIN, end_us);
        if (rc >= 0)
            rc = read_some(link);
        if (rc < 0)
            return rc;
    }
    if (rc < 0)
        return rc;
    *ret_header = header;
    *ret_body = link->in.data + FRAME_HEADER_BYTES;
    link->taken = FRAME_HEADER_BYTES + header.body_bytes;
    return 0;
}
