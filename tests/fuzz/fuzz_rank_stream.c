/* What comes over the socket of a tensor-parallel group, at either end: a stream of any bytes in pieces goes through framing and every check. What is accepted keeps its promises, all memory
 * comes back, and the walk over a stream ends. The first byte says how the rest is cut. */
#include "proto/base/base_assert.h"
#include "worker/group/rank_link.h"
#include "worker/group/rank_message.h"
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile uint32_t seen; /* so that reading is not left out */

/* Every value that the fields lead to is read, so that a sanitizer sees where they point. */
static uint32_t sum(const void *values, size_t bytes)
{
    uint32_t s = 0;
    for (size_t i = 0; i < bytes; i++)
        s += ((const uint8_t *)values)[i];
    return s;
}

static uint32_t check_create(const struct sequence_request *r, uint32_t sequence)
{
    ASSERT(sequence < RANK_SEQUENCES_MAX && r->tag == sequence);
    ASSERT(r->n_prompt >= 1 && r->max_new >= 0 && r->n_answer >= 0 && r->n_answer <= r->max_new && r->n_salt <= RANK_SALT_MAX);
    return sum(r->prompt, (size_t)r->n_prompt * sizeof(*r->prompt)) + sum(r->answer, (size_t)r->n_answer * sizeof(*r->answer)) + sum(r->salt, r->n_salt);
}

static uint32_t check_message(const struct rank_message *m)
{
    switch (m->type) {
    case GROUP_HELLO:
        ASSERT(strlen(m->settings) <= RANK_SETTINGS_MAX);
        return 0;
    case GROUP_WELCOME:
        return sum(m->communicator, COLLECTIVE_ID_BYTES);
    case GROUP_LOADED:
        ASSERT(strlen(m->backend) <= RANK_NAME_MAX && strlen(m->model_name) <= RANK_NAME_MAX);
        return sum(m->model, RANK_MODEL_BYTES);
    case GROUP_REFUSAL:
        ASSERT(strlen(m->text) <= RANK_TEXT_MAX);
        return 0;
    case GROUP_CREATE:
        return check_create(&m->request, m->sequence);
    case GROUP_PREFILL:
    case GROUP_FREE:
    case GROUP_ASK:
        ASSERT(m->sequence < RANK_SEQUENCES_MAX);
        return 0;
    case GROUP_DECODE:
        ASSERT(m->n >= 1 && m->n <= RANK_SEQUENCES_MAX);
        for (int i = 0; i < m->n; i++)
            ASSERT(m->sequences[i] < RANK_SEQUENCES_MAX);
        return sum(m->tokens, (size_t)m->n * sizeof(*m->tokens));
    case GROUP_FIGURES:
        ASSERT(m->figures.private_blocks >= 0);
        return (uint32_t)m->figures.bytes_loaded;
    case GROUP_USAGE:
        return (uint32_t)m->usage.device_bytes;
    case GROUP_AGREE:
        ASSERT(m->n >= 1 && m->n <= RANK_SEQUENCES_MAX);
        return sum(m->values, (size_t)m->n * sizeof(*m->values));
    default:
        return 0;
    }
}

/* Takes all frames that are there; returns whether the stream is still good. */
static bool take_frames(struct rank_link *link)
{
    struct frame_header header;
    const uint8_t *body;
    int rc;
    while ((rc = rank_link_receive(link, 0, &header, &body)) >= 0) {
        struct rank_message message;
        struct error err = {""};
        rc = rank_message_parse(&header, body, &message, &err);
        ASSERT(rc == 0 || (rc == -EPROTO && *err.text));
        if (rc == 0) {
            seen = check_message(&message);
            rank_message_fini(&message);
        }
        ASSERT(message.alloc.used == 0);
    }
    ASSERT(rc == -ETIMEDOUT || rc == -EPROTO || rc == -ECONNRESET);
    return rc == -ETIMEDOUT;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct rank_link link;
    int fds[2];
    if (size < 1)
        return 0;
    ASSERT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0);
    rank_link_init(&link, fds[0]);
    const size_t step = data[0] ? (size_t)data[0] * 16 : size;
    bool good = true;
    for (size_t at = 1; good && at < size; at += step) {
        const size_t n = size - at < step ? size - at : step;
        ASSERT(write(fds[1], data + at, n) == (ssize_t)n);
        good = take_frames(&link);
    }
    close(fds[1]);
    ASSERT(!good || !take_frames(&link));
    rank_link_fini(&link);
    return 0;
}
