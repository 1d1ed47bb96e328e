#include "kvstore/lease_table.h"

#include "proto/base/base_assert.h"
#include <errno.h>
#include <stdlib.h>

enum { FIRST_SLOTS = 256 };

void lease_table_init(struct lease_table *table, uint32_t max)
{
    ASSERT(max < 1u << LEASE_SLOT_BITS);
    *table = (struct lease_table){.max = max, .free = LEASE_NONE, .serial = 1};
}

void lease_table_fini(struct lease_table *table)
{
    free(table->slots);
    *table = (struct lease_table){.free = LEASE_NONE};
}

void lease_owner_init(struct lease_owner *owner)
{
    *owner = (struct lease_owner){.first = LEASE_NONE};
}

static int grow(struct lease_table *table)
{
    uint32_t n = table->n_slots ? table->n_slots * 2 : FIRST_SLOTS;
    struct lease *slots;

    if (n > table->max)
        n = table->max;
    if (n == table->n_slots)
        return -ENOSPC;
    slots = realloc(table->slots, n * sizeof *slots);
    if (!slots)
        return -ENOMEM;
    for (uint32_t i = n; i-- > table->n_slots;) {
        slots[i] = (struct lease){.next = table->free};
        table->free = i;
    }
    table->slots = slots;
    table->n_slots = n;
    return 0;
}

int lease_add(struct lease_table *table, struct lease_owner *owner, struct pool_block *block, bool write, struct lease **ret_lease)
{
    struct lease *lease;
    uint32_t slot;
    int rc;

    if (table->free == LEASE_NONE && (rc = grow(table)) < 0)
        return rc;
    slot = table->free;
    lease = &table->slots[slot];
    table->free = lease->next;
    *lease = (struct lease){
        .id = table->serial++ << LEASE_SLOT_BITS | slot,
        .block = block,
        .owner = owner,
        .prev = LEASE_NONE,
        .next = owner->first,
        .write = write,
    };
    if (owner->first != LEASE_NONE)
        table->slots[owner->first].prev = slot;
    owner->first = slot;
    owner->n_leases++;
    owner->n_writes += write;
    table->n_used++;
    *ret_lease = lease;
    return 0;
}

struct lease *lease_find(const struct lease_table *table, const struct lease_owner *owner, uint64_t id)
{
    uint32_t slot = id & ((1u << LEASE_SLOT_BITS) - 1);

    if (!id || slot >= table->n_slots || table->slots[slot].id != id || table->slots[slot].owner != owner)
        return NULL;
    return &table->slots[slot];
}

struct lease *lease_first(const struct lease_table *table, const struct lease_owner *owner)
{
    return owner->first == LEASE_NONE ? NULL : &table->slots[owner->first];
}

struct lease *lease_next(const struct lease_table *table, const struct lease *lease)
{
    return lease->next == LEASE_NONE ? NULL : &table->slots[lease->next];
}

void lease_set_read(struct lease *lease)
{
    ASSERT(lease->write);
    lease->write = false;
    lease->owner->n_writes--;
}

void lease_remove(struct lease_table *table, struct lease *lease)
{
    struct lease_owner *owner = lease->owner;
    uint32_t slot = (uint32_t)(lease - table->slots);

    if (lease->prev == LEASE_NONE)
        owner->first = lease->next;
    else
        table->slots[lease->prev].next = lease->next;
    if (lease->next != LEASE_NONE)
        table->slots[lease->next].prev = lease->prev;
    owner->n_leases--;
    owner->n_writes -= lease->write;
    table->n_used--;
    *lease = (struct lease){.next = table->free};
    table->free = slot;
}
