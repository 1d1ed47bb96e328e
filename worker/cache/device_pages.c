/* The page cache of a device with memory of its own (kernels/device_page_cache.h): what decode steps fetch from the pool stays in extents of device memory, as many as admission leaves. When it
 * leaves less, extents are given back before a sequence takes its memory; when it leaves more, they are taken again. Without any, pages are staged for the time of a step. */
#include "worker/cache/engine_private.h"

static const size_t extent_bytes_least = (size_t)64 << 20; /* where there is enough for several: of less, an allocation each is not worth it */

/* Staging is for what finds no slot, and there are slots wherever memory is left: a quarter of what a step asks for takes four rounds where there are none. */
static int staged_pages(int64_t n_pages)
{
    enum { LEAST = 256 };
    const int64_t n = n_pages / 4 < LEAST ? LEAST : n_pages / 4;
    return n < DEVICE_PAGE_STAGED_MAX ? (int)n : DEVICE_PAGE_STAGED_MAX;
}

static struct device_page_cache_config cache_config(const struct engine *e, size_t extent_bytes)
{
    const int n_items = e->config.max_batch * e->model->config.n_kv_heads, all = e->config.max_context / SUBPAGE_TOKENS + 1;
    const int fetch = e->fetch_pages < all ? e->fetch_pages : all, per_item = (fetch + 15) / 16 * 16; /* attn_decode looks up 16 pages of an item at a time */
    const int64_t n_pages = (int64_t)n_items * per_item;
    return (struct device_page_cache_config){
        .layout = &e->layout, .n_pages = n_pages < DEVICE_PAGE_CALL_MAX ? (int)n_pages : DEVICE_PAGE_CALL_MAX, .n_staged = staged_pages(n_pages), .extent_bytes = extent_bytes};
}

size_t device_pages_bytes(const struct engine *e)
{
    const struct device_page_cache_config config = cache_config(e, 0);
    return e->fetch_pages > 0 ? e->model->ops->page_cache_bytes(&config) : 0;
}

/* Equal extents of what there is in all: many enough that a sequence that comes or goes moves a small part of it. */
static void choose_extents(const struct engine *e, size_t bytes, struct device_pages *p)
{
    size_t n = bytes / extent_bytes_least;
    for (n = n < 8 ? 8 : n < DEVICE_PAGE_EXTENTS_MAX ? n : DEVICE_PAGE_EXTENTS_MAX; n > 0; n /= 2) {
        const struct device_page_cache_config config = cache_config(e, bytes / n / 256 * 256);
        if (config.extent_bytes == 0 || e->model->ops->page_cache_bytes(&config) == 0)
            continue;
        p->extent_bytes = config.extent_bytes;
        p->n_max = (int)n;
        return;
    }
}

/* Extents first .. n_extents - 1 are given back. Nobody looks into them any more. */
static void free_extents(const struct engine *e, struct device_pages *p, int first)
{
    for (; p->n_extents > first; p->n_extents--)
        e->model->dev->free(e->model->device, p->extents[p->n_extents - 1]);
}

int device_pages_refresh(struct engine *e)
{
    struct device_page_cache_stats s;
    if (!e->pages.cache)
        return 0;
    const int r = e->model->ops->page_cache_stats(e->pages.cache, &s);
    if (r >= 0)
        e->pages.stats = (struct page_cache_stats){.hits = s.hits, .misses = s.misses, .evictions = s.evictions, .capacity_bytes = s.capacity_bytes, .used_bytes = s.used_bytes};
    return r;
}

static int fit(struct engine *e, size_t bytes)
{
    const struct model *m = e->model;
    struct device_pages *p = &e->pages;
    const size_t room = p->extent_bytes ? bytes / p->extent_bytes : 0;
    const int n = room < (size_t)p->n_max ? (int)room : p->n_max, before = p->n_extents;
    int r = n < before ? m->ops->page_cache_resize(p->cache, p->extents, n) : 0;
    if (r >= 0 && n < before)
        r = device_pages_refresh(e);
    if (r < 0)
        return r;
    free_extents(e, p, n);
    for (; p->n_extents < n; p->n_extents++) /* memory that others have taken is no error */
        if (m->dev->alloc(m->device, MEM_PAGE_CACHE, p->extent_bytes, &p->extents[p->n_extents]) < 0)
            break;
    if (p->n_extents <= before)
        return 0;
    r = m->ops->page_cache_resize(p->cache, p->extents, p->n_extents);
    if (r < 0) {
        free_extents(e, p, before);
        return r;
    }
    return device_pages_refresh(e);
}

int device_pages_open(struct engine *e, size_t bytes)
{
    const struct model *m = e->model;
    struct device_pages *p = &e->pages;
    if (e->sizes.pages == 0)
        return 0;
    choose_extents(e, bytes, p);
    const struct device_page_cache_config config = cache_config(e, p->extent_bytes);
    int r = m->dev->alloc(m->device, MEM_PAGE_CACHE, e->sizes.pages, &p->memory);
    if (r >= 0)
        r = m->ops->page_cache_open(m->stream, &config, p->memory, &p->cache);
    return r < 0 ? r : fit(e, bytes);
}

/* A cache that could not be fitted has failed with its device; the next step finds that out. */
void device_pages_fit(struct engine *e, size_t bytes)
{
    if (e->pages.cache)
        fit(e, bytes);
}

void device_pages_close(struct engine *e)
{
    const struct model *m = e->model;
    m->ops->page_cache_close(e->pages.cache);
    free_extents(e, &e->pages, 0);
    m->dev->free(m->device, e->pages.memory);
    e->pages = (struct device_pages){0};
}
