#include "kernels/kernels.h"
#include "worker/cache/device_blocks.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

enum { INDEX_BYTES = 4096, SLAB_PIECES = 2, SLAB_BYTES = SLAB_PIECES * INDEX_BYTES };

static struct device *device;
static struct device_blocks *blocks;
static size_t at_start;

static size_t index_now(void)
{
    struct device_memory_stats stats;
    cpu_device_ops()->memory_stats(device, &stats);
    cr_assert_eq(stats.now[MEM_INDEX], stats.total_now - at_start);
    return stats.now[MEM_INDEX];
}

static void open_with(size_t limit)
{
    struct device_memory_stats stats;
    cr_assert_eq(cpu_device_ops()->open(&(struct device_config){.n_threads = 1, .memory_limit = limit}, &device), 0);
    cpu_device_ops()->memory_stats(device, &stats);
    at_start = stats.total_now;
    cr_assert_eq(device_blocks_create(cpu_device_ops(), device, INDEX_BYTES, SLAB_PIECES, &blocks), 0);
}

static void setup(void)
{
    open_with(0);
}
static void teardown(void)
{
    device_blocks_free(blocks);
    cpu_device_ops()->close(device);
}
TestSuite(device_blocks, .init = setup, .fini = teardown);

static struct block_key key_of(uint32_t n)
{
    struct block_key key = {{0}};
    memcpy(key.bytes + 8, &n, sizeof(n)); /* all in one chain */
    return key;
}

static struct device_block *use(uint32_t key, uint64_t checksum)
{
    const struct block_key k = key_of(key);
    struct device_block *block;
    cr_assert_eq(device_blocks_use(blocks, &k, checksum, &block), 0);
    return block;
}

Test(device_blocks, test_users_share_one_index)
{
    struct device_block *a = use(1, 10), *b = use(1, 10), *other = use(2, 10);
    cr_assert(a == b && other != a && other->id != a->id && a->index != other->index);
    struct device_block *third = use(3, 10);
    cr_assert_eq(index_now(), 2 * SLAB_BYTES);
    device_blocks_drop(blocks, a);
    cr_assert_eq(index_now(), 2 * SLAB_BYTES);
    device_blocks_drop(blocks, b);
    device_blocks_drop(blocks, third);
    device_blocks_drop(blocks, other);
    device_blocks_drop(blocks, NULL);
    device_slabs_trim(device_blocks_slabs(blocks));
    cr_assert_eq(index_now(), 0);
}

Test(device_blocks, test_identity_outlives_users_and_index_does_not)
{
    struct device_block *a = use(1, 10);
    const uint64_t id = a->id;
    device_blocks_drop(blocks, a);
    a = use(1, 10); /* its index has to be written again */
    cr_assert(a->id == id && a->index);
    device_blocks_drop(blocks, a);
}

/* The same key does not mean the same bytes: two runs on a GPU may differ in the last bit. */
Test(device_blocks, test_other_bytes_are_another_block)
{
    struct device_block *a = use(1, 10), *b = use(1, 11);
    cr_assert(a->id != b->id && a->index != b->index);
    device_blocks_drop(blocks, b);
    cr_assert(use(1, 10) == a);
    device_blocks_drop(blocks, a);
    device_blocks_drop(blocks, a);
}

Test(device_blocks, test_a_block_being_written_is_nobody_elses)
{
    const struct block_key key = key_of(1);
    struct device_block *mine, *second;
    cr_assert_eq(device_blocks_add(blocks, &key, &mine), 0);
    cr_assert_eq(device_blocks_add(blocks, &key, &second), 0); /* the store came back empty and gave it to another */
    cr_assert(mine != second && mine->id != second->id);
    struct device_block *sealed = use(1, 10);
    cr_assert(sealed != mine && sealed != second);
    device_blocks_drop(blocks, sealed);
    device_blocks_drop(blocks, second); /* never sealed: forgotten */
    device_blocks_seal(mine, 12);
    cr_assert(use(1, 12) == mine);
    device_blocks_drop(blocks, mine);
    device_blocks_drop(blocks, mine);
    device_slabs_trim(device_blocks_slabs(blocks));
    cr_assert_eq(index_now(), 0);
}

Test(device_blocks, test_only_the_newest_identities_are_remembered)
{
    uint64_t first = 0, second = 0;
    for (uint32_t i = 0; i < DEVICE_BLOCKS_REMEMBERED + 1; i++) {
        struct block_key key = key_of(i);
        struct device_block *block;
        memcpy(key.bytes, &i, sizeof(i)); /* spread over the chains */
        cr_assert_eq(device_blocks_use(blocks, &key, 7, &block), 0);
        first = i == 0 ? block->id : first;
        second = i == 1 ? block->id : second;
        device_blocks_drop(blocks, block);
    }
    struct block_key key = key_of(1);
    struct device_block *block;
    memcpy(key.bytes, &(uint32_t){1}, sizeof(uint32_t));
    cr_assert_eq(device_blocks_use(blocks, &key, 7, &block), 0);
    cr_assert_eq(block->id, second);
    device_blocks_drop(blocks, block);
    cr_assert_eq(device_blocks_use(blocks, &(struct block_key){{0}}, 7, &block), 0);
    cr_assert_neq(block->id, first, "the oldest was forgotten");
    device_blocks_drop(blocks, block);
}

/* What was not taken leaves nothing behind, and a known identity stays as it was. */
Test(device_blocks, test_no_memory_for_an_index_is_an_error)
{
    struct device_properties properties;
    cpu_device_ops()->properties(device, &properties);
    teardown();
    open_with(properties.fixed_bytes + SLAB_BYTES);
    struct device_block *known = use(0, 10), *block;
    const uint64_t id = known->id;
    device_blocks_drop(blocks, known);
    struct device_block *a = use(1, 10), *b = use(2, 10);
    const struct block_key key = key_of(3), first = key_of(0);
    cr_assert(a->index && b->index && a->index != b->index);
    cr_assert_eq(device_blocks_use(blocks, &key, 10, &block), -ENOMEM);
    cr_assert_eq(device_blocks_use(blocks, &first, 10, &block), -ENOMEM);
    cr_assert_eq(device_blocks_add(blocks, &key, &block), -ENOMEM);
    device_blocks_drop(blocks, a);
    known = use(0, 10);
    cr_assert_eq(known->id, id);
    device_blocks_drop(blocks, known);
    device_blocks_drop(blocks, b);
    device_slabs_trim(device_blocks_slabs(blocks));
    cr_assert_eq(index_now(), 0);
}
