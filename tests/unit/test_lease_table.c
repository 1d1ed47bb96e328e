#include "kvstore/lease_table.h"
#include <criterion/criterion.h>
#include <errno.h>

/* The table never follows these. */
#define BLOCK(i) ((struct pool_block *)(uintptr_t)(64 * (i) + 64))

Test(lease_table, test_find_checks_owner_and_serial)
{
    struct lease_table table;
    struct lease_owner a, b;
    struct lease *lease;
    uint64_t old;

    lease_table_init(&table, 16);
    lease_owner_init(&a);
    lease_owner_init(&b);
    cr_assert_eq(lease_add(&table, &a, BLOCK(0), false, &lease), 0);
    old = lease->id;
    cr_assert_eq(lease_find(&table, &a, old), lease);
    cr_assert_null(lease_find(&table, &b, old));
    cr_assert_null(lease_find(&table, &a, 0));
    cr_assert_null(lease_find(&table, &a, UINT64_MAX));
    lease_remove(&table, lease);
    cr_assert_eq(lease_add(&table, &a, BLOCK(1), false, &lease), 0);
    cr_assert_neq(lease->id, old);
    cr_assert_null(lease_find(&table, &a, old));
    lease_table_fini(&table);
}

Test(lease_table, test_owner_lists_hold_what_was_added_and_not_removed)
{
    enum { N = 5000 };
    static uint64_t ids[N];
    struct lease_table table;
    struct lease_owner owners[3];
    struct lease *lease;

    lease_table_init(&table, N);
    for (int i = 0; i < 3; i++)
        lease_owner_init(&owners[i]);
    for (int i = 0; i < N; i++) {
        cr_assert_eq(lease_add(&table, &owners[i % 3], BLOCK(i), i % 2, &lease), 0);
        ids[i] = lease->id;
    }
    cr_assert_eq(lease_add(&table, &owners[0], BLOCK(0), false, &lease), -ENOSPC);
    for (int i = 0; i < N; i += 5)
        lease_remove(&table, lease_find(&table, &owners[i % 3], ids[i]));
    for (int o = 0; o < 3; o++) {
        uint32_t n = 0, n_writes = 0;
        for (lease = lease_first(&table, &owners[o]); lease; lease = lease_next(&table, lease)) {
            cr_assert_eq(lease->owner, &owners[o]);
            n++;
            n_writes += lease->write;
        }
        cr_assert_eq(n, owners[o].n_leases);
        cr_assert_eq(n_writes, owners[o].n_writes);
    }
    cr_assert_eq(owners[0].n_leases + owners[1].n_leases + owners[2].n_leases, N - N / 5);
    lease_table_fini(&table);
}
