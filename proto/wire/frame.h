/* The header in front of every protobuf message. On a unix stream it precedes the body; over ZeroMQ it is the first of two parts and the body
 * the second. 24 bytes, little-endian:
 *
 *   0  u32 magic "TPW1"     8  u32 body bytes      16  u64 request id
 *   4  u16 version         12  u32 zero
 *   6  u16 type
 *
 * A reader refuses another version, a body beyond FRAME_BODY_MAX and a type that it does not know. Any thread. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { FRAME_HEADER_BYTES = 24, FRAME_VERSION = 1, FRAME_BODY_MAX = 8 << 20 };

/* Router <-> worker, engine.proto. */
enum engine_frame {
    ENGINE_READY = 1,        /* worker -> router */
    ENGINE_READY_ACK,        /* router -> worker */
    ENGINE_HEARTBEAT,        /* both ways */
    ENGINE_GENERATE,         /* router -> worker */
    ENGINE_CANCEL,           /* router -> worker */
    ENGINE_DRAIN,            /* router -> worker */
    ENGINE_PREFILLED,        /* worker -> router, as all that follow */
    ENGINE_PREFILL_PROGRESS,
    ENGINE_TOKENS,
    ENGINE_FINISHED,
    ENGINE_FAILED,
    ENGINE_FRAME_END
};

/* Worker <-> kvstore and kvstore -> router, store.proto. */
enum store_frame {
    STORE_HELLO = 64,
    STORE_WELCOME,
    STORE_LOOKUP,
    STORE_LOOKUP_RESULT,
    STORE_RESERVE,
    STORE_RESERVE_RESULT,
    STORE_SEAL,
    STORE_SEAL_RESULT,
    STORE_RELEASE,
    STORE_RELEASE_RESULT,
    STORE_REPORT_CORRUPT,
    STORE_STATS,
    STORE_STATS_RESULT,
    STORE_FAILURE,
    STORE_BLOCK_EVENTS,
    STORE_SNAPSHOT_REQUEST,
    STORE_SNAPSHOT,
    STORE_FRAME_END
};

/* Leader <-> follower of a tensor-parallel group, group.proto. */
enum group_frame {
    GROUP_HELLO = 128,       /* follower -> leader */
    GROUP_WELCOME,           /* leader -> follower */
    GROUP_LOADED,            /* follower -> leader */
    GROUP_START,             /* leader -> follower, as Refusal */
    GROUP_REFUSAL,
    GROUP_CREATE,            /* leader -> follower, as all up to Stop */
    GROUP_PREFILL,
    GROUP_DECODE,
    GROUP_FREE,
    GROUP_STOP,
    GROUP_DRAIN,             /* follower -> leader */
    GROUP_AGREE,             /* both ways */
    GROUP_ASK,               /* leader -> follower */
    GROUP_FIGURES,           /* follower -> leader, as Usage */
    GROUP_USAGE,
    GROUP_FRAME_END
};

struct frame_header {
    uint16_t type;
    uint32_t body_bytes;
    uint64_t request_id;
};

void frame_header_encode(const struct frame_header *header, uint8_t ret_bytes[/*FRAME_HEADER_BYTES*/ 24]);
/* -EPROTO: not a header; -EPROTONOSUPPORT: another version; -EMSGSIZE: body too large; -EAGAIN: n is below FRAME_HEADER_BYTES. */
int frame_header_decode(const uint8_t *bytes, size_t n, struct frame_header *ret_header);
