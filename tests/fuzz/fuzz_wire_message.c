/* Every protobuf message that stands in a frame: the first byte says which one, the rest is its body. Memory stays within the cap, all of it comes back, and a message that
 * was accepted packs again. */
#include "proto/base/base_assert.h"
#include "proto/base/capped_alloc.h"
#include "proto/wire/engine.pb-c.h"
#include "proto/wire/group.pb-c.h"
#include "proto/wire/store.pb-c.h"
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MESSAGE_MEMORY_MAX = 64 << 10 };

static const ProtobufCMessageDescriptor *const messages[] = {
    &tidepool__engine__ready__descriptor,
    &tidepool__engine__ready_ack__descriptor,
    &tidepool__engine__heartbeat__descriptor,
    &tidepool__engine__generate__descriptor,
    &tidepool__engine__cancel__descriptor,
    &tidepool__engine__drain__descriptor,
    &tidepool__engine__prefilled__descriptor,
    &tidepool__engine__prefill_progress__descriptor,
    &tidepool__engine__tokens__descriptor,
    &tidepool__engine__finished__descriptor,
    &tidepool__engine__failed__descriptor,
    &tidepool__store__hello__descriptor,
    &tidepool__store__welcome__descriptor,
    &tidepool__store__lookup__descriptor,
    &tidepool__store__lookup_result__descriptor,
    &tidepool__store__reserve__descriptor,
    &tidepool__store__reserve_result__descriptor,
    &tidepool__store__seal__descriptor,
    &tidepool__store__seal_result__descriptor,
    &tidepool__store__release__descriptor,
    &tidepool__store__release_result__descriptor,
    &tidepool__store__report_corrupt__descriptor,
    &tidepool__store__stats__descriptor,
    &tidepool__store__stats_result__descriptor,
    &tidepool__store__failure__descriptor,
    &tidepool__store__block_events__descriptor,
    &tidepool__store__snapshot_request__descriptor,
    &tidepool__store__snapshot__descriptor,
    &tidepool__group__hello__descriptor,
    &tidepool__group__welcome__descriptor,
    &tidepool__group__loaded__descriptor,
    &tidepool__group__start__descriptor,
    &tidepool__group__refusal__descriptor,
    &tidepool__group__create__descriptor,
    &tidepool__group__prefill__descriptor,
    &tidepool__group__decode__descriptor,
    &tidepool__group__free__descriptor,
    &tidepool__group__stop__descriptor,
    &tidepool__group__drain__descriptor,
    &tidepool__group__agree__descriptor,
};

static uint8_t *pack(const ProtobufCMessage *message, size_t *ret_n)
{
    size_t n = protobuf_c_message_get_packed_size(message);
    uint8_t *bytes = malloc(n ? n : 1);
    ASSERT(bytes);
    ASSERT(protobuf_c_message_pack(message, bytes) == n);
    *ret_n = n;
    return bytes;
}

/* What packs must unpack to what packs alike. protobuf-c lets an unknown field number 0 in when it is written in two bytes, and refuses it in the one
 * that packing gives it; so the second unpack may fail. */
static void check_round_trip(const ProtobufCMessage *message)
{
    struct capped_alloc alloc;
    capped_alloc_init(&alloc, 2 * MESSAGE_MEMORY_MAX);
    size_t n, n_again;
    uint8_t *bytes = pack(message, &n);
    ProtobufCMessage *again = protobuf_c_message_unpack(message->descriptor, &alloc.pb, n, bytes);
    if (again) {
        uint8_t *bytes_again = pack(again, &n_again);
        ASSERT(n_again == n && memcmp(bytes, bytes_again, n) == 0);
        free(bytes_again);
        protobuf_c_message_free_unpacked(again, &alloc.pb);
    }
    free(bytes);
    ASSERT(alloc.used == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    const ProtobufCMessageDescriptor *type = messages[data[0] % ARRAY_LEN(messages)];
    struct capped_alloc alloc;
    capped_alloc_init(&alloc, MESSAGE_MEMORY_MAX);
    ProtobufCMessage *message = protobuf_c_message_unpack(type, &alloc.pb, size - 1, data + 1);
    ASSERT(alloc.used <= alloc.max);
    if (message) {
        check_round_trip(message);
        protobuf_c_message_free_unpacked(message, &alloc.pb);
    }
    ASSERT(alloc.used == 0);
    return 0;
}
