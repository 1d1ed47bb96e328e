#include "tests/system/store_wire.h"

#include "proto/base/buf.h"
#include "proto/wire/frame_append.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

enum { TIMEOUT_S = 20 };

void store_wire_connect(struct store_wire *wire, const char *socket_path)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    const struct timeval timeout = {.tv_sec = TIMEOUT_S};

    *wire = (struct store_wire){.fds = {-1, -1}, .next_id = 1};
    strcpy(addr.sun_path, socket_path);
    wire->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    cr_assert_geq(wire->fd, 0);
    setsockopt(wire->fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    setsockopt(wire->fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
    cr_assert_eq(connect(wire->fd, (struct sockaddr *)&addr, sizeof addr), 0, "connect: %s", strerror(errno));
}

void store_wire_close(struct store_wire *wire)
{
    close(wire->fd);
    for (int i = 0; i < 2; i++) {
        if (wire->fds[i] >= 0)
            close(wire->fds[i]);
    }
}

bool store_wire_send_raw(struct store_wire *wire, const void *data, size_t n)
{
    for (size_t done = 0; done < n;) {
        ssize_t sent = send(wire->fd, (const char *)data + done, n - done, MSG_NOSIGNAL);
        if (sent < 0) {
            cr_assert(errno == EPIPE || errno == ECONNRESET, "send: %s", strerror(errno));
            return false;
        }
        done += (size_t)sent;
    }
    return true;
}

bool store_wire_send(struct store_wire *wire, uint16_t type, const ProtobufCMessage *message)
{
    struct buf out;
    bool ok;

    buf_init(&out, FRAME_BODY_MAX + FRAME_HEADER_BYTES);
    cr_assert_eq(frame_append(&out, type, wire->next_id++, message), 0);
    ok = store_wire_send_raw(wire, out.data, out.len);
    buf_fini(&out);
    return ok;
}

/* Reads exactly n bytes; keeps descriptors that come along. False at the end of the stream. */
static bool read_exactly(struct store_wire *wire, uint8_t *data, size_t n)
{
    union {
        char bytes[CMSG_SPACE(sizeof wire->fds)];
        struct cmsghdr align;
    } control;

    for (size_t done = 0; done < n;) {
        struct iovec iov = {.iov_base = data + done, .iov_len = n - done};
        struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
        ssize_t got = recvmsg(wire->fd, &msg, MSG_CMSG_CLOEXEC);
        cr_assert(got >= 0 || errno == ECONNRESET, "recvmsg: %s", strerror(errno));
        if (got <= 0)
            return false;
        if (CMSG_FIRSTHDR(&msg))
            memcpy(wire->fds, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof wire->fds);
        done += (size_t)got;
    }
    return true;
}

static const ProtobufCMessageDescriptor *descriptor_of(uint16_t type)
{
    switch (type) {
    case STORE_WELCOME: return &tidepool__store__welcome__descriptor;
    case STORE_LOOKUP_RESULT: return &tidepool__store__lookup_result__descriptor;
    case STORE_RESERVE_RESULT: return &tidepool__store__reserve_result__descriptor;
    case STORE_SEAL_RESULT: return &tidepool__store__seal_result__descriptor;
    case STORE_RELEASE_RESULT: return &tidepool__store__release_result__descriptor;
    case STORE_STATS_RESULT: return &tidepool__store__stats_result__descriptor;
    case STORE_FAILURE: return &tidepool__store__failure__descriptor;
    default: return NULL;
    }
}

ProtobufCMessage *store_wire_receive(struct store_wire *wire, uint16_t *ret_type)
{
    static uint8_t body[FRAME_BODY_MAX];
    uint8_t bytes[FRAME_HEADER_BYTES];
    struct frame_header header;
    ProtobufCMessage *message;

    if (!read_exactly(wire, bytes, sizeof bytes))
        return NULL;
    cr_assert_eq(frame_header_decode(bytes, sizeof bytes, &header), 0);
    if (!read_exactly(wire, body, header.body_bytes))
        return NULL;
    cr_assert_not_null(descriptor_of(header.type), "message type %u", header.type);
    message = protobuf_c_message_unpack(descriptor_of(header.type), NULL, header.body_bytes, body);
    cr_assert_not_null(message);
    *ret_type = header.type;
    return message;
}

ProtobufCMessage *store_wire_call(struct store_wire *wire, uint16_t request, const ProtobufCMessage *message, uint16_t type)
{
    ProtobufCMessage *answer;
    uint16_t got = 0;

    cr_assert(store_wire_send(wire, request, message));
    answer = store_wire_receive(wire, &got);
    cr_assert_not_null(answer);
    cr_assert_eq(got, type, "answer of type %u: %s", got, got == STORE_FAILURE ? ((Tidepool__Store__Failure *)answer)->text : "");
    return answer;
}

void store_wire_open(struct store_wire *wire, const char *socket_path)
{
    Tidepool__Store__Hello hello = TIDEPOOL__STORE__HELLO__INIT;

    store_wire_connect(wire, socket_path);
    hello.version = FRAME_VERSION;
    hello.client_name = "wire";
    protobuf_c_message_free_unpacked(store_wire_call(wire, STORE_HELLO, &hello.base, STORE_WELCOME), NULL);
}

const Tidepool__Store__StatsResult *store_wire_stats(struct store_wire *wire)
{
    static Tidepool__Store__StatsResult last;
    Tidepool__Store__Stats stats = TIDEPOOL__STORE__STATS__INIT;
    ProtobufCMessage *answer = store_wire_call(wire, STORE_STATS, &stats.base, STORE_STATS_RESULT);

    last = *(Tidepool__Store__StatsResult *)answer;
    protobuf_c_message_free_unpacked(answer, NULL);
    return &last;
}
