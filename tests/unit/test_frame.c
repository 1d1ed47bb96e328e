#include "proto/wire/frame.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

static const struct frame_header sample = {.type = ENGINE_TOKENS, .body_bytes = 0x123456, .request_id = 0x1122334455667788ull};

Test(frame, test_frame_header_reads_back)
{
    uint8_t bytes[FRAME_HEADER_BYTES];
    struct frame_header back;
    frame_header_encode(&sample, bytes);
    cr_assert_eq(frame_header_decode(bytes, sizeof(bytes), &back), 0);
    cr_assert_eq(back.type, sample.type);
    cr_assert_eq(back.body_bytes, sample.body_bytes);
    cr_assert_eq(back.request_id, sample.request_id);
}

Test(frame, test_frame_header_is_little_endian_on_the_wire)
{
    static const uint8_t expected[FRAME_HEADER_BYTES] = {'T', 'P', 'W', '1', 1, 0, ENGINE_TOKENS, 0, 0x56, 0x34, 0x12, 0, 0, 0, 0, 0,
                                                         0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11};
    uint8_t bytes[FRAME_HEADER_BYTES];
    frame_header_encode(&sample, bytes);
    cr_assert_arr_eq(bytes, expected, sizeof(expected));
}

static int decode_with(size_t at, uint8_t value)
{
    uint8_t bytes[FRAME_HEADER_BYTES];
    struct frame_header back;
    frame_header_encode(&sample, bytes);
    bytes[at] = value;
    return frame_header_decode(bytes, sizeof(bytes), &back);
}

Test(frame, test_frame_header_refuses_what_is_wrong)
{
    struct frame_header back;
    cr_assert_eq(decode_with(0, 'X'), -EPROTO);
    cr_assert_eq(decode_with(4, 2), -EPROTONOSUPPORT);
    cr_assert_eq(decode_with(5, 1), -EPROTONOSUPPORT);
    cr_assert_eq(decode_with(11, 0x7f), -EMSGSIZE);
    cr_assert_eq(decode_with(13, 1), -EPROTO);
    cr_assert_eq(frame_header_decode((const uint8_t *)"TPW1", 4, &back), -EAGAIN);
}
