#include "kernels/cpu/cpu_arena.h"
#include "kernels/memory_stats.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Stands in front of the caller's bytes; one cache line, so that these start on one too. */
struct arena_header {
    _Alignas(64) struct arena_header *prev;
    struct arena_header *next;
    struct cpu_arena *arena; /* NULL once freed */
    size_t bytes;            /* as asked for */
    void *mapping;           /* NULL: from the heap */
    size_t mapping_bytes;
    enum mem_tag tag;
};
_Static_assert(sizeof(struct arena_header) == 64, "the caller's memory starts on a cache line");

enum { HUGE_PAGE = 2 << 20 };
/* No sensible request is larger; sums of sizes cannot overflow below it. */
static const size_t allocation_max = (size_t)1 << 39;
/* AddressSanitizer watches the borders of heap memory only. */
#if defined(__SANITIZE_ADDRESS__) || defined(TIDEPOOL_SANITIZED)
static const size_t map_from = SIZE_MAX;
#else
static const size_t map_from = 1 << 20;
#endif

/* A mapping of its own goes back to the system when it is freed, and huge pages make streaming through weights and KV a tenth faster. */
static struct arena_header *header_map(size_t bytes)
{
    size_t page = bytes >= HUGE_PAGE ? HUGE_PAGE : 4096;
    size_t mapping_bytes = ((bytes + 4095) & ~(size_t)4095) + page;
    uint8_t *mapping = mmap(NULL, mapping_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED)
        return NULL;
    uint8_t *start = (uint8_t *)(((uintptr_t)mapping + page - 1) & ~(uintptr_t)(page - 1));
    if (page == HUGE_PAGE)
        madvise(start, (size_t)(mapping + mapping_bytes - start), MADV_HUGEPAGE); /* a wish; small pages work too */
    struct arena_header *header = (void *)start;
    header->mapping = mapping;
    header->mapping_bytes = mapping_bytes;
    return header;
}

static struct arena_header *header_create(size_t bytes)
{
    if (bytes > allocation_max)
        return NULL;
    if (bytes >= map_from)
        return header_map(bytes + sizeof(struct arena_header));
    void *memory;
    if (posix_memalign(&memory, 64, bytes + sizeof(struct arena_header)) != 0)
        return NULL;
    struct arena_header *header = memory;
    header->mapping = NULL;
    return header;
}

static void header_link(struct cpu_arena *arena, struct arena_header *header)
{
    header->arena = arena;
    header->prev = NULL;
    header->next = arena->head;
    if (arena->head)
        arena->head->prev = header;
    arena->head = header;
}

static void header_unlink(struct cpu_arena *arena, struct arena_header *header)
{
    if (header->prev)
        header->prev->next = header->next;
    else
        arena->head = header->next;
    if (header->next)
        header->next->prev = header->prev;
    header->arena = NULL;
}

int cpu_arena_alloc(struct cpu_arena *arena, enum mem_tag tag, size_t bytes, void **ret_memory)
{
    if ((unsigned)tag >= MEM_TAG_COUNT)
        return -EINVAL;
    if (arena->limit && bytes > arena->limit - arena->stats.total_now)
        return -ENOMEM;
    struct arena_header *header = header_create(bytes);
    if (!header)
        return -ENOMEM;
    header->bytes = bytes;
    header->tag = tag;
    header_link(arena, header);
    memory_stats_add(&arena->stats, tag, bytes);
    void *memory = header + 1;
#ifdef ARENA_FILL
    memset(memory, 0xFF, bytes); /* NaN to whoever reads what was never written */
#endif
    *ret_memory = memory;
    return 0;
}

void cpu_arena_free(struct cpu_arena *arena, void *memory)
{
    if (!memory)
        return;
    struct arena_header *header = (struct arena_header *)memory - 1;
    ASSERT(header->arena == arena);
    header_unlink(arena, header);
    memory_stats_take(&arena->stats, header->tag, header->bytes);
    if (header->mapping)
        munmap(header->mapping, header->mapping_bytes);
    else
        free(header);
}

void cpu_arena_reset_peaks(struct cpu_arena *arena)
{
    memory_stats_reset_peaks(&arena->stats);
}

void cpu_arena_init(struct cpu_arena *arena, size_t limit)
{
    *arena = (struct cpu_arena){.limit = limit};
}

void cpu_arena_fini(struct cpu_arena *arena)
{
    ASSERT(arena->head == NULL);
}
