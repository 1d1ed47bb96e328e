#include "proto/base/clock.h"
#include "proto/base/base_assert.h"
#include <time.h>

uint64_t clock_now_ns(void)
{
    struct timespec ts;
    int rc = clock_gettime(CLOCK_MONOTONIC, &ts);
    ASSERT(rc == 0);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

uint64_t clock_now_us(void)
{
    return clock_now_ns() / 1000;
}

int64_t clock_wall_s(void)
{
    struct timespec ts;
    int rc = clock_gettime(CLOCK_REALTIME, &ts);
    ASSERT(rc == 0);
    return (int64_t)ts.tv_sec;
}
