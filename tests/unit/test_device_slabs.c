#include "kernels/kernels.h"
#include "worker/cache/device_slabs.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

enum { PIECE = 256, PIECES = 3, SPARES = 2, SLAB = PIECE * PIECES, MANY = 40 };

static struct device *device;
static struct device_slabs *slabs;
static struct device_memory_stats at_start;

static struct device_memory_stats stats_now(void)
{
    struct device_memory_stats stats;
    cpu_device_ops()->memory_stats(device, &stats);
    return stats;
}

static void open_with(size_t limit)
{
    cr_assert_eq(cpu_device_ops()->open(&(struct device_config){.n_threads = 1, .memory_limit = limit}, &device), 0);
    at_start = stats_now();
    cr_assert_eq(device_slabs_create(cpu_device_ops(), device, MEM_INDEX, PIECE, PIECES, SPARES, &slabs), 0);
}

static void setup(void)
{
    open_with(0);
}
static void teardown(void)
{
    device_slabs_free(slabs);
    cr_expect_eq(stats_now().total_now, at_start.total_now);
    cpu_device_ops()->close(device);
}
TestSuite(device_slabs, .init = setup, .fini = teardown);

static struct device_piece take(void)
{
    struct device_piece piece;
    cr_assert_eq(device_slabs_take(slabs, &piece), 0);
    cr_assert((uintptr_t)piece.memory % 64 == 0);
    return piece;
}

static void expect_slabs(int used, int spare)
{
    cr_expect_eq(device_slabs_used(slabs), (size_t)used * SLAB, "%zu bytes used, %d slabs expected", device_slabs_used(slabs), used);
    cr_expect_eq(device_slabs_spare(slabs), (size_t)spare * SLAB);
    cr_expect_eq(stats_now().now[MEM_INDEX], (size_t)(used + spare) * SLAB);
    cr_expect_eq(stats_now().n_allocations - at_start.n_allocations, (uint64_t)(used + spare));
}

Test(device_slabs, test_pieces_do_not_overlap)
{
    struct device_piece pieces[MANY];
    for (int i = 0; i < MANY; i++) {
        pieces[i] = take();
        memset(pieces[i].memory, i, PIECE);
        expect_slabs(i / PIECES + 1, 0);
    }
    for (int i = 0; i < MANY; i++) {
        for (int j = 0; j < PIECE; j++)
            cr_assert_eq(pieces[i].memory[j], i);
        device_slabs_give(slabs, pieces[i]);
    }
    expect_slabs(0, SPARES);
    device_slabs_give(slabs, (struct device_piece){0});
}

/* As many slabs as the pieces fill, unless few are left in each; those fill up before another comes. */
Test(device_slabs, test_a_slab_comes_only_when_all_are_full)
{
    struct device_piece pieces[MANY];
    int n_most = 0, n_used = 0;
    uint64_t state = 1;
    memset(pieces, 0, sizeof(pieces));
    for (int i = 0; i < 3000; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const int at = (int)((state >> 33) % MANY), before = (int)(device_slabs_used(slabs) / SLAB);
        if (pieces[at].memory) {
            device_slabs_give(slabs, pieces[at]);
            pieces[at] = (struct device_piece){0};
            n_used--;
        } else {
            pieces[at] = take();
            if ((int)(device_slabs_used(slabs) / SLAB) > before)
                cr_assert_eq(n_used, before * PIECES);
            n_used++;
        }
        n_most = n_used > n_most ? n_used : n_most;
        cr_assert(device_slabs_used(slabs) <= (size_t)((n_most + PIECES - 1) / PIECES) * SLAB && device_slabs_used(slabs) >= (size_t)((n_used + PIECES - 1) / PIECES) * SLAB);
        cr_assert(device_slabs_spare(slabs) <= SPARES * SLAB && stats_now().now[MEM_INDEX] == device_slabs_used(slabs) + device_slabs_spare(slabs));
    }
    for (int i = 0; i < MANY; i++)
        device_slabs_give(slabs, pieces[i]);
    expect_slabs(0, SPARES);
}

/* Pieces that come and go cost nothing. */
Test(device_slabs, test_some_empty_slabs_are_kept)
{
    struct device_piece pieces[4 * PIECES];
    for (int i = 0; i < 4 * PIECES; i++)
        pieces[i] = take();
    for (int i = 4 * PIECES - 1; i >= PIECES; i--)
        device_slabs_give(slabs, pieces[i]);
    expect_slabs(1, SPARES);
    struct device_piece again[SPARES * PIECES];
    for (int i = 0; i < SPARES * PIECES; i++)
        again[i] = take();
    expect_slabs(3, 0);
    for (int i = 0; i < SPARES * PIECES; i++)
        device_slabs_give(slabs, again[i]);
    expect_slabs(1, SPARES);
    device_slabs_trim(slabs);
    expect_slabs(1, 0);
    for (int i = 0; i < PIECES; i++)
        device_slabs_give(slabs, pieces[i]);
    expect_slabs(0, 1);
    device_slabs_trim(slabs);
    expect_slabs(0, 0);
    cr_expect(device_slabs_used(NULL) == 0 && device_slabs_spare(NULL) == 0);
    device_slabs_trim(NULL);
}

Test(device_slabs, test_no_memory_for_a_slab)
{
    struct device_properties properties;
    struct device_piece pieces[PIECES], none;
    cpu_device_ops()->properties(device, &properties);
    teardown();
    open_with(properties.fixed_bytes + SLAB);
    for (int i = 0; i < PIECES; i++)
        pieces[i] = take();
    cr_expect_eq(device_slabs_take(slabs, &none), -ENOMEM);
    device_slabs_give(slabs, pieces[1]);
    cr_expect(take().memory == pieces[1].memory);
    for (int i = 0; i < PIECES; i++)
        device_slabs_give(slabs, pieces[i]);
}
