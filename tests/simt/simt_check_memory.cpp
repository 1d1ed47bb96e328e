/* The memory that is watched, and its cells. Cells of device memory lie in two mappings beside the region that device memory comes from; registered and pinned memory has mappings of its own. Pages
 * of them that nobody touches take no memory; a cell of zeros is a word that nobody accessed. */
#include "tests/simt/simt_check_private.h"
#include <algorithm>
#include <link.h>
#include <map>
#include <sys/mman.h>

namespace simt {
namespace check {

enum { PAGE_SHIFT = 12, WORD = 4 };

Area dynamic_shared, static_shared;
uintptr_t region_base, region_size;
static Cell *region_words, *region_parts;
static uint32_t *region_pages; /* of each page the area that it belongs to, 0: none */
static std::vector<Area *> &areas = *new std::vector<Area *>(1);
static std::map<uintptr_t, Area *> &host_areas = *new std::map<uintptr_t, Area *>();

/* Below the addresses of programs, heaps and stacks, so that check_argument does not take a number for a pointer to here. */
static void *map(size_t bytes)
{
    static char *next = (char *)((uintptr_t)1 << 43);
    void *m = mmap(next, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m == MAP_FAILED)
        report("no address space for the checker", std::to_string(bytes) + " bytes");
    next += (bytes + (1 << PAGE_SHIFT)) >> PAGE_SHIFT << PAGE_SHIFT;
    return m;
}

Cell *cells_map(size_t n)
{
    return (Cell *)map(n * sizeof(Cell));
}

void region_opened(const void *base, size_t bytes)
{
    region_words = cells_map(bytes / WORD);
    region_parts = cells_map(bytes);
    region_pages = (uint32_t *)map((bytes >> PAGE_SHIFT) * sizeof *region_pages);
    region_base = (uintptr_t)base;
    region_size = bytes;
}

static void host_area_opened(Area &a)
{
    const size_t n_words = a.bytes / WORD + 2;
    a.shadow_base = a.base / WORD * WORD;
    a.words = cells_map(n_words);
    a.parts = cells_map(n_words * WORD);
    host_areas[a.base] = &a;
}

void area_opened(const void *base, size_t bytes, MemoryKind kind)
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    Area *a = new Area();
    a->base = (uintptr_t)base;
    a->bytes = bytes;
    a->kind = kind;
    a->made_at = stack_now();
    if (kind != MEMORY_DEVICE) {
        host_area_opened(*a);
        return;
    }
    a->shadow_base = region_base;
    a->words = region_words;
    a->parts = region_parts;
    areas.push_back(a);
    for (uintptr_t page = (a->base - region_base) >> PAGE_SHIFT; page <= (a->base - region_base + bytes - 1) >> PAGE_SHIFT; page++)
        region_pages[page] = (uint32_t)(areas.size() - 1);
}

/* Whole pages of cells only: the others stay as they are. Addresses of device memory are never used again. */
static void cells_drop(Cell *from, Cell *to)
{
    const uintptr_t page = 1 << PAGE_SHIFT, first = ((uintptr_t)from + page - 1) / page * page, last = (uintptr_t)to / page * page;
    if (first < last)
        madvise((void *)first, last - first, MADV_DONTNEED);
}

void area_closed(const void *base)
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    auto it = host_areas.find((uintptr_t)base);
    const bool is_host = it != host_areas.end();
    Area *a = is_host ? it->second : area_find((uintptr_t)base, true);
    for (uint32_t user : a->users)
        if (!operation_is_over(user))
            report("memory is freed before work that uses it is over", std::string(operation(user).name) + ", submitted at " + place_of_stack(operation(user).made_at) + "; freed at " +
                   place_of_stack(stack_now()) + "; allocated at " + place_of_stack(a->made_at));
    a->is_closed = true;
    if (!is_host) {
        const size_t at = a->base - region_base;
        cells_drop(region_words + at / WORD, region_words + (at + a->bytes) / WORD);
        cells_drop(region_parts + at, region_parts + at + a->bytes);
        return;
    }
    const size_t n_words = a->bytes / WORD + 2;
    munmap(a->words, n_words * sizeof(Cell));
    munmap(a->parts, n_words * WORD * sizeof(Cell));
    host_areas.erase(it);
    delete a;
}

Area *area_of_host(uintptr_t address)
{
    auto next = host_areas.upper_bound(address);
    if (next == host_areas.begin())
        return nullptr;
    Area *a = (--next)->second;
    return address - a->base < a->bytes ? a : nullptr;
}

Area *area_find(uintptr_t address, bool device_only)
{
    const uintptr_t at = address - region_base;
    if (at < region_size)
        return areas[region_pages[at >> PAGE_SHIFT]];
    return device_only ? nullptr : area_of_host(address);
}

/* ---- shared memory ---- */
struct Module {
    uintptr_t data, data_end; /* what may be written: static shared memory is in it */
    Area area;
};

static int find_module(struct dl_phdr_info *info, size_t, void *argument)
{
    auto &wanted = *(std::pair<uintptr_t, Module *> *)argument;
    uintptr_t low = 0, high = 0;
    bool is_it = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) &p = info->dlpi_phdr[i];
        const uintptr_t start = info->dlpi_addr + p.p_vaddr;
        if (p.p_type != PT_LOAD)
            continue;
        is_it |= wanted.first - start < p.p_memsz;
        if (p.p_flags & PF_W) {
            low = low ? std::min(low, start) : start;
            high = std::max(high, start + p.p_memsz);
        }
    }
    if (is_it) {
        wanted.second->data = low;
        wanted.second->data_end = high;
    }
    return is_it;
}

/* The data segment of the module that has the kernel. Its kernels have no other variables than __shared__ ones. */
static const Module &module_of(const void *function)
{
    static std::map<const void *, Module *> &by_function = *new std::map<const void *, Module *>();
    static std::map<uintptr_t, Module *> &by_data = *new std::map<uintptr_t, Module *>();
    auto known = by_function.find(function);
    if (known != by_function.end())
        return *known->second;
    Module found = {};
    std::pair<uintptr_t, Module *> wanted((uintptr_t)function, &found);
    dl_iterate_phdr(find_module, &wanted);
    Module *&m = by_data[found.data];
    if (!m) {
        const size_t bytes = found.data_end - found.data;
        m = new Module(found);
        m->area.base = found.data;
        m->area.bytes = bytes;
        m->area.is_shared = true;
        m->area.shadow_base = found.data / WORD * WORD;
        m->area.words = cells_map(bytes / WORD + 2);
        m->area.parts = cells_map(bytes + 2 * WORD);
    }
    return *(by_function[function] = m);
}

void shared_areas_set(const void *function, const unsigned char *shared, size_t bytes)
{
    enum { ROOM = SHARED_LIMIT + 128 };
    Area &d = dynamic_shared;
    const Module &m = module_of(function);
    if (!d.words) {
        d.is_shared = true;
        d.words = cells_map(ROOM / WORD);
        d.parts = cells_map(ROOM);
    }
    d.base = d.shadow_base = (uintptr_t)shared;
    d.bytes = bytes;
    if (static_shared.base != m.area.base)
        static_shared = m.area;
}

static int covers(struct dl_phdr_info *info, size_t, void *address)
{
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) &p = info->dlpi_phdr[i];
        if (p.p_type == PT_LOAD && *(uintptr_t *)address - (info->dlpi_addr + p.p_vaddr) < p.p_memsz)
            return 1;
    }
    return 0;
}

bool is_program_memory(uintptr_t address)
{
    return dl_iterate_phdr(covers, &address) != 0;
}

} /* namespace check */
} /* namespace simt */
