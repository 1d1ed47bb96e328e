/* The rules for one access: is the memory there, was it written, is a copy on its way to it, and is the access ordered after those before it. */
#include "tests/simt/simt_check_private.h"
#include <algorithm>

namespace simt {
namespace check {

enum { WORD = 4 };

/* What accesses, as it is written to cells: one thread, or all lanes of a warp (mask), or an operation or the host. */
struct Accessor {
    Access access;
    uint32_t mask;
    bool is_warp;
};

/* Place of an access, for reports. */
struct Site {
    Area &area;
    AccessKind kind;
    const void *pc;
    uintptr_t address;
    size_t bytes;
};

static std::vector<std::vector<Access>> &lists = *new std::vector<std::vector<Access>>(1);

static Accessor accessor_now(const void *pc)
{
    Accessor me = {};
    me.access.pc = (uint32_t)(uintptr_t)pc;
    me.access.operation = in_operation ? running : host_moment();
    if (in_operation && block.executor) {
        const unsigned thread = block.executor->current->linear;
        me.access.interval = block.interval;
        me.access.thread = thread & (MAX_THREADS - 1);
        me.access.clock = thread_clock(thread) & 0x1FFFF;
    }
    return me;
}

static bool is_ordered(const Access &a, uint32_t mask, const Accessor &me)
{
    if (a.operation != me.access.operation)
        return a.operation == 0 || operation_is_over(a.operation);
    if (!in_operation || !block.executor)
        return true;
    if (a.interval == block.interval && a.thread == me.access.thread && a.flags <= ATOMIC && !me.is_warp)
        return true;
    if (!me.is_warp)
        return is_ordered_for(a, mask, me.access.thread);
    for (unsigned lane = 0; lane < WARP; lane++)
        if (!is_ordered_for(a, mask, me.access.thread / WARP * WARP + lane))
            return false;
    return true;
}

/* An access beside one that stands in a cell and may go on standing there: a read beside reads, an atomic one beside atomic ones. */
static void stand_beside(Access &a, uint32_t &mask, const Accessor &me)
{
    const bool same = a.operation == me.access.operation && in_operation && block.executor, other_block = same && (a.interval < block.first || (a.flags & BY_BLOCKS));
    if (!same || other_block || a.interval != block.interval || is_ordered(a, mask, me)) {
        a = me.access;
        mask = me.mask;
        a.flags |= other_block ? (uint32_t)BY_BLOCKS : 0;
        return;
    }
    const unsigned warp = a.thread / WARP, my_warp = me.access.thread / WARP;
    if (!(a.flags & BY_WARPS) && warp == my_warp) {
        mask = (a.flags & BY_LANES ? mask : 1u << a.thread % WARP) | (me.is_warp ? me.mask : 1u << me.access.thread % WARP);
        a.flags |= BY_LANES;
    } else {
        mask = (a.flags & BY_WARPS ? mask : 1u << warp) | 1u << my_warp;
        a.flags = (a.flags & ~(uint32_t)BY_LANES) | BY_WARPS;
    }
    a.clock = std::max<uint32_t>(a.clock, me.access.clock);
    a.thread = me.access.thread;
    a.pc = me.access.pc;
}

static void record_read(Cell &c, const Accessor &me)
{
    if (c.read.operation && c.read.operation != me.access.operation && !operation_is_over(c.read.operation)) {
        if (c.more_reads == 0) {
            lists.emplace_back();
            c.more_reads = (uint32_t)(lists.size() - 1);
        }
        lists[c.more_reads].push_back(c.read);
    }
    stand_beside(c.read, c.read_mask, me);
}

static void check_reads(const Cell &c, const Accessor &me, const Site &site)
{
    if (!is_ordered(c.read, c.read_mask, me))
        report_access("race", site.area, site.address, site.bytes, site.kind, site.pc, &c.read, "read");
    if (c.more_reads)
        for (const Access &a : lists[c.more_reads])
            if (!is_ordered(a, 0, me))
                report_access("race", site.area, site.address, site.bytes, site.kind, site.pc, &a, "read");
}

/* Cells of shared memory hold what earlier blocks did until they are met again. */
static void renew(const Area &area, Cell &c)
{
    if (area.is_shared && c.write.interval < block.first)
        c.write = {};
    if (area.is_shared && c.read.interval < block.first)
        c.read = {};
}

static bool is_unwritten(const Area &area, const Cell &c)
{
    return (c.write.flags & UNWRITTEN) || (c.write.operation == 0 && (area.is_shared || area.kind == MEMORY_DEVICE));
}

static void check_in_flight(const Cell &c, const Site &site)
{
    if (c.in_flight && site.area.is_shared && c.in_flight == block.first)
        report_access("an asynchronous copy is on its way to it", site.area, site.address, site.bytes, site.kind, site.pc, &c.write, "copy was started");
}

static void touch_cell(Cell &c, const Accessor &me, const Site &site)
{
    const bool atomic = site.kind == ATOMIC_READ || site.kind == ATOMIC_UPDATE;
    renew(site.area, c);
    check_in_flight(c, site);
    if (site.kind != WRITE && in_operation && is_unwritten(site.area, c))
        report_access("memory that was never written is used", site.area, site.address, site.bytes, site.kind, site.pc, nullptr, nullptr);
    if (!(atomic && (c.write.flags & ATOMIC)) && !is_ordered(c.write, c.write_mask, me))
        report_access("race", site.area, site.address, site.bytes, site.kind, site.pc, &c.write, "write");
    if (site.kind == READ || site.kind == ATOMIC_READ) {
        record_read(c, me);
        return;
    }
    if (!(atomic && (c.read.flags & ATOMIC)))
        check_reads(c, me, site);
    if (atomic && (c.write.flags & ATOMIC)) {
        stand_beside(c.write, c.write_mask, me);
        return;
    }
    c.write = me.access;
    c.write_mask = me.mask;
    c.read = {};
    c.more_reads = 0;
}

static Cell *parts_of(const Area &area, uintptr_t word)
{
    return area.parts + (word - area.shadow_base);
}

static void split(const Area &area, Cell &c, uintptr_t word)
{
    for (int i = 0; i < WORD; i++)
        parts_of(area, word)[i] = c;
    c.split = 1;
}

static void touch_part(const Area &area, Cell &c, uintptr_t word, unsigned offset, unsigned n, const Accessor &me, const Site &site)
{
    if (!c.split)
        split(area, c, word);
    for (unsigned i = offset; i < offset + n; i++)
        touch_cell(parts_of(area, word)[i], me, site);
    if (n == WORD && site.kind == WRITE) { /* the bytes have one history again */
        c = parts_of(area, word)[0];
        c.split = 0;
    }
}

/* The operation uses the area; the last of each stream stays in its list. */
static void note_user(Area &area)
{
    area.last_operation = running;
    for (uint32_t &user : area.users)
        if (operation(user).stream == operation(running).stream) {
            user = running;
            return;
        }
    area.users.push_back(running);
}

static void check_area(Area &area, uintptr_t address, size_t bytes, AccessKind kind, const void *pc)
{
    if (area.is_closed)
        report_access("freed memory is used", area, address, bytes, kind, pc, nullptr, nullptr);
    if (address - area.base >= area.bytes || bytes > area.bytes - (address - area.base))
        report_access("access out of bounds", area, address, bytes, kind, pc, nullptr, nullptr);
    if (in_operation && area.last_operation != running && !area.is_shared)
        note_user(area);
}

static void touch_as(Area &area, uintptr_t address, size_t bytes, AccessKind kind, const void *pc, const Accessor &me)
{
    const Site site = {area, kind, pc, address, bytes};
    check_area(area, address, bytes, kind, pc);
    while (bytes > 0) {
        const uintptr_t word = address / WORD * WORD;
        const unsigned offset = (unsigned)(address - word), n = (unsigned)std::min<size_t>(bytes, WORD - offset);
        Cell &c = area.words[(word - area.shadow_base) / WORD];
        if (n == WORD && !c.split)
            touch_cell(c, me, site);
        else
            touch_part(area, c, word, offset, n, me, site);
        address += n;
        bytes -= n;
    }
}

void touch(Area &area, uintptr_t address, size_t bytes, AccessKind kind, const void *pc)
{
    Accessor me = accessor_now(pc);
    me.access.flags = kind == ATOMIC_READ || kind == ATOMIC_UPDATE ? (uint32_t)ATOMIC : 0;
    touch_as(area, address, bytes, kind, pc, me);
}

static Area *area_here(uintptr_t address)
{
    if (block.executor && address - dynamic_shared.base < dynamic_shared.bytes)
        return &dynamic_shared;
    if (block.executor && address - static_shared.base < static_shared.bytes)
        return &static_shared;
    return area_find(address, false);
}

/* ldmatrix: whichever lane it was that named the row, its words go to several, so all of them must be ordered after who wrote it. */
void warp_read(unsigned warp, unsigned lane, const void *row, size_t bytes, const void *pc)
{
    Accessor me = accessor_now(pc);
    Area *area = area_here((uintptr_t)row);
    if (!area)
        return;
    if (profiling)
        profile_lane(area->is_shared ? PROFILE_SHARED : PROFILE_GLOBAL, PROFILE_MATRIX, warp, lane, (uintptr_t)row, bytes, pc);
    for (unsigned i = 0; i < WARP; i++)
        me.access.clock = std::max<uint32_t>(me.access.clock, thread_clock(warp * WARP + i)) & 0x1FFFF;
    me.access.flags = BY_LANES;
    me.mask = ~0u;
    me.is_warp = true;
    touch_as(*area, (uintptr_t)row, bytes, READ, pc, me);
}

/* ---- copies: bytes that were never written are copied as such, and reported where they are used ---- */
static bool source_is_unwritten(Area *area, uintptr_t address)
{
    if (!area)
        return false;
    const uintptr_t word = address / WORD * WORD;
    const Cell &c = area->words[(word - area->shadow_base) / WORD];
    return is_unwritten(*area, c.split ? parts_of(*area, word)[address - word] : c);
}

static void read_source(Area *area, uintptr_t address, size_t bytes, const void *pc)
{
    if (!area || bytes == 0)
        return;
    const Accessor me = accessor_now(pc);
    const Site site = {*area, READ, pc, address, bytes};
    check_area(*area, address, bytes, READ, pc);
    for (size_t i = 0; i < bytes; i++) {
        const uintptr_t word = (address + i) / WORD * WORD;
        Cell &c = area->words[(word - area->shadow_base) / WORD];
        if (!c.split && i > 0 && (address + i) % WORD)
            continue;
        Cell &one = c.split ? parts_of(*area, word)[address + i - word] : c;
        renew(*area, one);
        check_in_flight(one, site);
        if (!is_ordered(one.write, one.write_mask, me))
            report_access("race", *area, address, bytes, READ, pc, &one.write, "write");
        record_read(one, me);
    }
}

static void mark_unwritten(Area &to, uintptr_t address, uintptr_t from, Area *source, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        const uintptr_t word = (address + i) / WORD * WORD;
        Cell &c = to.words[(word - to.shadow_base) / WORD];
        if (!source_is_unwritten(source, from + i))
            continue;
        if (!c.split)
            split(to, c, word);
        parts_of(to, word)[address + i - word].write.flags |= UNWRITTEN;
    }
}

static bool has_unwritten(Area *area, uintptr_t address, size_t bytes)
{
    for (size_t i = 0; area && i < bytes; i++)
        if (source_is_unwritten(area, address + i))
            return true;
    return false;
}

static void copy(void *to, size_t bytes, const void *from, size_t from_bytes, const void *pc)
{
    Area *source = area_find((uintptr_t)from, false), *target = area_here((uintptr_t)to);
    const bool unwritten = has_unwritten(source, (uintptr_t)from, from_bytes);
    read_source(source, (uintptr_t)from, from_bytes, pc);
    if (!target)
        return;
    touch(*target, (uintptr_t)to, bytes, WRITE, pc);
    if (unwritten)
        mark_unwritten(*target, (uintptr_t)to, (uintptr_t)from, source, from_bytes);
}

static void set_in_flight(Area &area, uintptr_t address, size_t bytes, uint32_t value)
{
    for (size_t i = 0; i < bytes; i += WORD) {
        Cell &c = area.words[(address + i - area.shadow_base) / WORD];
        c.in_flight = value & 0x7FFFFFFF;
    }
}

/* cp.async, 16 bytes to a multiple of 16: from its start to the thread's wait nobody may touch what it writes, and then it counts as written by the thread. */
void copy_started(void *to, size_t bytes, const void *from, size_t from_bytes, const void *pc)
{
    Area *target = area_here((uintptr_t)to);
    read_source(area_find((uintptr_t)from, false), (uintptr_t)from, from_bytes, pc);
    if (!target || !target->is_shared)
        report("cp.async to memory that is not shared", place_of(pc));
    if (profiling)
        profile_copy((uintptr_t)to, bytes, (uintptr_t)from, from_bytes, pc);
    touch(*target, (uintptr_t)to, bytes, WRITE, pc);
    set_in_flight(*target, (uintptr_t)to, bytes, block.first);
}

void copy_landed(void *to, size_t bytes, const void *from, size_t from_bytes, const void *pc)
{
    set_in_flight(*area_here((uintptr_t)to), (uintptr_t)to, bytes, 0);
    copy(to, bytes, from, from_bytes, pc);
}

/* ---- operations without threads ---- */
static void range(const void *at, size_t bytes, AccessKind kind)
{
    Area *area = area_find((uintptr_t)at, false);
    if (area && bytes > 0)
        touch(*area, (uintptr_t)at, bytes, kind, nullptr);
}

void range_read(const void *from, size_t bytes)
{
    range(from, bytes, READ);
}

void range_written(void *to, size_t bytes)
{
    range(to, bytes, WRITE);
}

void range_copied(void *to, const void *from, size_t bytes)
{
    copy(to, bytes, from, bytes, nullptr);
}

} /* namespace check */
} /* namespace simt */
