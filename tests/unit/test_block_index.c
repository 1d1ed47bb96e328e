#include "kvstore/block_index.h"
#include <criterion/criterion.h>
#include <string.h>

static struct block_key key_of(uint32_t i)
{
    struct block_key key = {{0}};

    memcpy(key.bytes, &i, sizeof i);
    return key;
}

Test(block_index, test_find_sees_every_node_while_the_table_grows)
{
    enum { N = 40000 };
    static struct chain_node *nodes[N];
    static struct pool_block *const block = (struct pool_block *)&nodes; /* any address: the index never follows it */
    struct block_index index;

    cr_assert_eq(block_index_init(&index), 0);
    for (uint32_t i = 0; i < N; i++) {
        struct block_key key = key_of(i);
        cr_assert_null(block_index_find(&index, &key));
        cr_assert_eq(block_index_get(&index, &key, i, &nodes[i]), 0);
        nodes[i]->block = block;
        for (uint32_t j = i; j < N && j > 0; j = j / 2) {
            key = key_of(j);
            cr_assert_eq(block_index_find(&index, &key), nodes[j]);
        }
    }
    cr_assert_eq(index.n_nodes, N);
    for (uint32_t i = 0; i < N; i++) {
        struct block_key key = key_of(i);
        struct chain_node *again;
        cr_assert_eq(block_index_get(&index, &key, 7, &again), 0);
        cr_assert_eq(again, nodes[i]);
        cr_assert_eq(again->position, i);
        if (i % 3 == 0)
            continue;
        nodes[i]->block = NULL;
        block_index_prune(&index, nodes[i]);
        cr_assert_null(block_index_find(&index, &key));
    }
    cr_assert_eq(index.n_nodes, (N + 2) / 3);
    block_index_fini(&index);
}

Test(block_index, test_prune_keeps_a_node_that_has_children)
{
    struct block_index index;
    struct chain_node *node;
    struct block_key key = key_of(1);

    cr_assert_eq(block_index_init(&index), 0);
    cr_assert_eq(block_index_get(&index, &key, 0, &node), 0);
    node->n_children = 1;
    block_index_prune(&index, node);
    cr_assert_eq(block_index_find(&index, &key), node);
    node->n_children = 0;
    block_index_prune(&index, node);
    cr_assert_null(block_index_find(&index, &key));
    block_index_fini(&index);
}
