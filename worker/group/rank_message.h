/* Frames of group.proto, unpacked and checked: whatever a peer sends, what is in a struct rank_message may be used as its fields say. Any thread. */
#pragma once
#include "kernels/collective.h"
#include "proto/base/capped_alloc.h"
#include "proto/base/error.h"
#include "proto/wire/frame.h"
#include "worker/cache/engine.h"

enum {
    RANK_SEQUENCES_MAX = 256, /* also of values in Agree: one a sequence of a step */
    RANK_SETTINGS_MAX = 2048, /* characters */
    RANK_NAME_MAX = 128,
    RANK_TEXT_MAX = 512,
    RANK_SALT_MAX = 1024,
    RANK_MODEL_BYTES = 32,
};

/* What a rank's process holds. */
struct rank_usage {
    uint64_t device_bytes, device_peak_bytes;
    uint64_t page_cache_bytes, page_cache_used_bytes, page_cache_hits, page_cache_misses;
};

/* Only the fields of its type are set. Pointers are into the message and live until rank_message_fini. */
struct rank_message {
    enum group_frame type;
    uint32_t version, degree, rank;  /* HELLO */
    const char *settings;            /*   up to RANK_SETTINGS_MAX characters */
    const uint8_t *communicator;     /* WELCOME: [COLLECTIVE_ID_BYTES] */
    const char *backend, *model_name; /* LOADED: up to RANK_NAME_MAX characters each */
    const uint8_t *model;            /*   [RANK_MODEL_BYTES] */
    const char *text;                /* REFUSAL: up to RANK_TEXT_MAX characters */
    uint32_t sequence;               /* CREATE, PREFILL, FREE, ASK: below RANK_SEQUENCES_MAX */
    struct sequence_request request; /* CREATE: counts are those of the arrays; ids and sums are the engine's to check */
    bool retire_answer;              /* FREE */
    const uint32_t *sequences;       /* DECODE: [n], each below RANK_SEQUENCES_MAX */
    const int32_t *tokens;           /*   [n] */
    const int32_t *values;           /* AGREE: [n] */
    int n;                           /*   1 to RANK_SEQUENCES_MAX, as for DECODE */

    struct sequence_stats figures;   /* FIGURES: those that a rank has of its own */
    struct rank_usage usage;         /* USAGE */

    ProtobufCMessage *unpacked;      /* owned */
    struct capped_alloc alloc;
};

/* -EPROTO: no such type, no such message, or a field out of its range; the text says which. */
int rank_message_parse(const struct frame_header *header, const uint8_t *body, struct rank_message *ret_message, struct error *err);
/* A zeroed struct is fine. */
void rank_message_fini(struct rank_message *message);
/* "Hello", "Create"; for logs. */
const char *group_frame_name(uint16_t type);
