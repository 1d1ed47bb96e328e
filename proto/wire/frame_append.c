#include "proto/wire/frame_append.h"
#include "proto/wire/frame.h"
#include <errno.h>

int frame_append(struct buf *out, uint16_t type, uint64_t request_id, const ProtobufCMessage *message)
{
    size_t body = protobuf_c_message_get_packed_size(message);
    int rc;

    if (body > FRAME_BODY_MAX)
        return -EMSGSIZE;
    rc = buf_reserve(out, FRAME_HEADER_BYTES + body);
    if (rc < 0)
        return rc;
    const struct frame_header header = {.type = type, .body_bytes = (uint32_t)body, .request_id = request_id};
    frame_header_encode(&header, out->data + out->len);
    protobuf_c_message_pack(message, out->data + out->len + FRAME_HEADER_BYTES);
    out->len += FRAME_HEADER_BYTES + body;
    return 0;
}
