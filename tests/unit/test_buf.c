#include "proto/base/buf.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

Test(buf, test_append_grows_and_keeps_contents)
{
    struct buf b;
    buf_init(&b, 100000);
    for (int i = 0; i < 10000; i++)
        cr_assert_eq(buf_printf(&b, "%04d,", i), 0);
    cr_assert_eq(b.len, 50000);
    cr_assert(memcmp(b.data, "0000,0001,", 10) == 0);
    cr_assert_str_eq(buf_cstr(&b) + 49995, "9999,");
    buf_fini(&b);
    cr_assert_eq(b.max, 100000);
}

Test(buf, test_append_beyond_limit_changes_nothing)
{
    struct buf b;
    buf_init(&b, 8);
    cr_assert_eq(buf_append_str(&b, "12345678"), 0);
    cr_assert_eq(buf_append(&b, "9", 1), -ENOBUFS);
    cr_assert_eq(buf_printf(&b, "%d", 9), -ENOBUFS);
    cr_assert_eq(buf_reserve(&b, SIZE_MAX), -ENOBUFS);
    cr_assert_str_eq(buf_cstr(&b), "12345678");
    buf_fini(&b);
}

Test(buf, test_printf_fills_the_limit_exactly)
{
    struct buf b;
    buf_init(&b, 5);
    cr_assert_eq(buf_printf(&b, "%s", "abcde"), 0);
    cr_assert_eq(b.len, 5);
    cr_assert_str_eq(buf_cstr(&b), "abcde");
    buf_fini(&b);
}

Test(buf, test_consume_drops_from_the_front)
{
    struct buf b;
    buf_init(&b, 64);
    cr_assert_eq(buf_append_str(&b, "hello world"), 0);
    buf_consume(&b, 6);
    cr_assert_str_eq(buf_cstr(&b), "world");
    buf_consume(&b, 5);
    cr_assert_eq(b.len, 0);
    cr_assert_eq(buf_append_str(&b, "again"), 0);
    cr_assert_str_eq(buf_cstr(&b), "again");
    buf_clear(&b);
    cr_assert_str_eq(buf_cstr(&b), "");
    buf_fini(&b);
}

Test(buf, test_empty_buffers_take_empty_data)
{
    struct buf b;
    buf_init(&b, 0);
    cr_assert_eq(buf_append(&b, NULL, 0), 0);
    cr_assert_str_eq(buf_cstr(&b), "");
    cr_assert_eq(buf_append_str(&b, "x"), -ENOBUFS);
    buf_consume(&b, 0);
    buf_fini(&b);
}

Test(buf, test_reserve_makes_room_for_direct_writes)
{
    struct buf b;
    buf_init(&b, 1 << 20);
    cr_assert_eq(buf_append_str(&b, "ab"), 0);
    cr_assert_eq(buf_reserve(&b, 5000), 0);
    cr_assert_geq(b.cap - b.len, 5000);
    memset(b.data + b.len, 'x', 5000);
    b.len += 5000;
    cr_assert_eq(strlen(buf_cstr(&b)), 5002);
    buf_fini(&b);
}
