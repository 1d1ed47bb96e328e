/* A stream of any bytes, as a unix socket delivers it: headers are read one after the other, a header that is accepted encodes back to the same
 * bytes, one byte too few is never accepted, and the walk over a stream ends. */
#include "proto/base/base_assert.h"
#include "proto/wire/frame.h"
#include <errno.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_round_trip(const uint8_t *bytes, const struct frame_header *header)
{
    uint8_t again[FRAME_HEADER_BYTES];
    frame_header_encode(header, again);
    ASSERT(memcmp(again, bytes, sizeof(again)) == 0);
    ASSERT(header->body_bytes <= FRAME_BODY_MAX);
    struct frame_header cut = {0};
    ASSERT(frame_header_decode(bytes, FRAME_HEADER_BYTES - 1, &cut) == -EAGAIN);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t done = 0;
    for (;;) {
        struct frame_header header;
        int rc = frame_header_decode(data + done, size - done, &header);
        if (rc < 0) {
            ASSERT((rc == -EAGAIN) == (size - done < FRAME_HEADER_BYTES));
            return 0;
        }
        check_round_trip(data + done, &header);
        if (header.body_bytes > size - done - FRAME_HEADER_BYTES)
            return 0;
        done += FRAME_HEADER_BYTES + header.body_bytes;
    }
}
