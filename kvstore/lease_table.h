/* Leases: who may read or write which extent of the pool. Lease ids go over the socket, so they are checked against this table and never reused:
 * an id is a slot of the table and a serial number. Not thread-safe. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct pool_block;
struct lease_owner;

struct lease {
    uint64_t id;               /* 0: the slot is free */
    struct pool_block *block;
    struct lease_owner *owner;
    uint32_t prev, next;       /* slots: in the owner's list, or `next` in the list of free slots; LEASE_NONE ends it */
    bool write;                /* an unsealed slot of the pool */
};

enum { LEASE_NONE = UINT32_MAX };

/* A client, or a process that is gone from the socket but may still write. Zero leases: {LEASE_NONE, 0, 0}. */
struct lease_owner {
    uint32_t first;    /* slot */
    uint32_t n_leases; /* in all */
    uint32_t n_writes;
};

struct lease_table {
    struct lease *slots; /* [n_slots]; grows, so pointers to leases are valid until the next lease_add only */
    uint32_t n_slots, n_used, max;
    uint32_t free;       /* first free slot */
    uint64_t serial;     /* of the next lease */
};

enum { LEASE_SLOT_BITS = 24 };

void lease_table_init(struct lease_table *table, uint32_t max); /* at most 2^24 - 1 */
void lease_table_fini(struct lease_table *table);
void lease_owner_init(struct lease_owner *owner);
/* -ENOSPC (the table's limit), -ENOMEM. */
int lease_add(struct lease_table *table, struct lease_owner *owner, struct pool_block *block, bool write, struct lease **ret_lease);
/* The lease of that id if it belongs to `owner`, else NULL. */
struct lease *lease_find(const struct lease_table *table, const struct lease_owner *owner, uint64_t id);
/* First lease of an owner, or NULL. */
struct lease *lease_first(const struct lease_table *table, const struct lease_owner *owner);
/* The one behind it in the owner's list, or NULL. */
struct lease *lease_next(const struct lease_table *table, const struct lease *lease);
void lease_set_read(struct lease *lease); /* a write slot was sealed */
void lease_remove(struct lease_table *table, struct lease *lease);
