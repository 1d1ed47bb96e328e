/* One end of the socket between the leader of a group and a follower: whole frames (proto/wire/group.proto), sent and received with a deadline. Owner thread only.
 * Every wait also ends when `cancel_fd` becomes readable, so that nobody waits for one rank when another has died. */
#pragma once
#include "proto/base/buf.h"
#include "proto/wire/frame.h"
#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stdint.h>

struct rank_link {
    int fd;             /* owned, non-blocking; -1: none */
    int cancel_fd;      /* borrowed, -1: none */
    struct buf in, out;
    size_t taken;       /* bytes of `in` that the last frame occupies */
};

/* Takes the descriptor over; -1 for an end that comes later. */
void rank_link_init(struct rank_link *link, int fd);
void rank_link_fini(struct rank_link *link);
/* Blocks until all of it is with the kernel. -ETIMEDOUT, -ECONNRESET (the peer is gone), -ECANCELED (cancel_fd), -EMSGSIZE, -ENOMEM. After an error the link can only be ended. */
int rank_link_send(struct rank_link *link, enum group_frame type, const ProtobufCMessage *message, uint64_t timeout_us);
/* Waits for one frame. Its body is valid until the next call. Errors as above, and -EPROTO for what is no frame. */
int rank_link_receive(struct rank_link *link, uint64_t timeout_us, struct frame_header *ret_header, const uint8_t **ret_body);
/* Whether a whole frame is here already, or bytes that are none. */
bool rank_link_has_frame(const struct rank_link *link);
/* Whether it is one of this type. */
bool rank_link_next_is(const struct rank_link *link, enum group_frame type);
