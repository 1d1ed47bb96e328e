#include "proto/wire/frame.h"
#include <endian.h>
#include <errno.h>
#include <string.h>

static const uint8_t magic[4] = {'T', 'P', 'W', '1'};

void frame_header_encode(const struct frame_header *header, uint8_t ret_bytes[24])
{
    uint16_t version = htole16(FRAME_VERSION), type = htole16(header->type);
    uint32_t body_bytes = htole32(header->body_bytes);
    uint64_t request_id = htole64(header->request_id);
    memset(ret_bytes, 0, FRAME_HEADER_BYTES);
    memcpy(ret_bytes, magic, sizeof(magic));
    memcpy(ret_bytes + 4, &version, sizeof(version));
    memcpy(ret_bytes + 6, &type, sizeof(type));
    memcpy(ret_bytes + 8, &body_bytes, sizeof(body_bytes));
    memcpy(ret_bytes + 16, &request_id, sizeof(request_id));
}

int frame_header_decode(const uint8_t *bytes, size_t n, struct frame_header *ret_header)
{
    uint16_t version, type;
    uint32_t body_bytes, zero;
    uint64_t request_id;
    if (n < FRAME_HEADER_BYTES)
        return -EAGAIN;
    memcpy(&version, bytes + 4, sizeof(version));
    memcpy(&type, bytes + 6, sizeof(type));
    memcpy(&body_bytes, bytes + 8, sizeof(body_bytes));
    memcpy(&zero, bytes + 12, sizeof(zero));
    memcpy(&request_id, bytes + 16, sizeof(request_id));
    if (memcmp(bytes, magic, sizeof(magic)) != 0 || zero != 0)
        return -EPROTO;
    if (le16toh(version) != FRAME_VERSION)
        return -EPROTONOSUPPORT;
    if (le32toh(body_bytes) > FRAME_BODY_MAX)
        return -EMSGSIZE;
    ret_header->type = le16toh(type);
    ret_header->body_bytes = le32toh(body_bytes);
    ret_header->request_id = le64toh(request_id);
    return 0;
}
