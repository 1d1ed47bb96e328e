/* A ProtobufCAllocator that refuses to hand out more than a limit in all: protobuf-c expands small messages to many times their size and
 * has no limits of its own. One allocator a message; the unpacked message must be freed with the same allocator. Not thread-safe. */
#pragma once
#include <protobuf-c/protobuf-c.h>
#include <stddef.h>

struct capped_alloc {
    ProtobufCAllocator pb; /* pass &alloc->pb to unpack and free_unpacked */
    size_t used, max;      /* bytes */
};

void capped_alloc_init(struct capped_alloc *alloc, size_t max);
