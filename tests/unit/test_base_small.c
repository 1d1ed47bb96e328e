/* error, clock, capped_alloc: too small for a file each. */
#include "proto/base/capped_alloc.h"
#include "proto/base/clock.h"
#include "proto/base/error.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

Test(error, test_set_returns_the_code_and_formats)
{
    struct error err = {"untouched"};
    cr_assert_eq(error_set(&err, -EINVAL, "--threads: %d", 7), -EINVAL);
    cr_assert_str_eq(err.text, "--threads: 7");
    cr_assert_eq(error_set(NULL, -ENOMEM, "%s", "nobody reads this"), -ENOMEM);
}

Test(error, test_set_truncates_long_text)
{
    struct error err;
    char text[2048];
    memset(text, 'a', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    error_set(&err, -EINVAL, "%s", text);
    cr_assert_eq(strlen(err.text), sizeof(err.text) - 1);
}

Test(clock, test_monotonic_never_goes_back)
{
    uint64_t before = clock_now_ns();
    uint64_t us = clock_now_us();
    for (int i = 0; i < 1000; i++) {
        uint64_t now = clock_now_ns();
        cr_assert_geq(now, before);
        before = now;
    }
    cr_assert_leq(us, before / 1000);
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    cr_assert_geq((uint64_t)ts.tv_sec, us / 1000000);
}

Test(clock, test_wall_is_the_system_time)
{
    int64_t before = (int64_t)time(NULL);
    int64_t now = clock_wall_s();
    int64_t after = (int64_t)time(NULL);
    cr_assert(now >= before && now <= after + 1);
}

Test(capped_alloc, test_limit_holds_over_all_pieces)
{
    struct capped_alloc alloc;
    capped_alloc_init(&alloc, 4096);
    void *pieces[64];
    int n = 0;
    while (n < 64 && (pieces[n] = alloc.pb.alloc(alloc.pb.allocator_data, 100)))
        n++;
    cr_assert(n > 0 && n <= 40, "100-byte pieces and their headers within 4096 bytes: %d", n);
    cr_assert_leq(alloc.used, 4096);
    alloc.pb.free(alloc.pb.allocator_data, pieces[--n]);
    pieces[n] = alloc.pb.alloc(alloc.pb.allocator_data, 100);
    cr_assert_not_null(pieces[n++], "freed bytes can be used again");
    for (int i = 0; i < n; i++)
        alloc.pb.free(alloc.pb.allocator_data, pieces[i]);
    cr_assert_eq(alloc.used, 0);
}

Test(capped_alloc, test_huge_sizes_are_refused)
{
    struct capped_alloc alloc;
    capped_alloc_init(&alloc, SIZE_MAX);
    cr_assert_null(alloc.pb.alloc(alloc.pb.allocator_data, SIZE_MAX));
    cr_assert_null(alloc.pb.alloc(alloc.pb.allocator_data, SIZE_MAX - 8));
    cr_assert_eq(alloc.used, 0);
}

Test(capped_alloc, test_empty_pieces_are_counted_and_distinct)
{
    struct capped_alloc alloc;
    capped_alloc_init(&alloc, 1024);
    void *a = alloc.pb.alloc(alloc.pb.allocator_data, 0);
    void *b = alloc.pb.alloc(alloc.pb.allocator_data, 0);
    cr_assert(a && b && a != b);
    cr_assert_gt(alloc.used, 0);
    cr_assert_eq((uintptr_t)a % _Alignof(max_align_t), 0);
    alloc.pb.free(alloc.pb.allocator_data, a);
    alloc.pb.free(alloc.pb.allocator_data, b);
    alloc.pb.free(alloc.pb.allocator_data, NULL);
    cr_assert_eq(alloc.used, 0);
}
