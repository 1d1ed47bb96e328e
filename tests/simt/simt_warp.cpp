/* What the lanes of a warp do together: shuffles, votes, reductions, matrix loads and products. */
#include "tests/simt/simt_private.h"
#include <algorithm>

namespace simt {

static std::string here()
{
    return std::string(executor->kernel->shape.name) + ", " + fiber_name(executor->current);
}

static void meeting_end(Warp &w, MeetingSlot &slot)
{
    Fiber *lanes = &executor->fibers[(&w - executor->warps) * WARP];
    slot.fn(slot.meeting);
    if (slot.fn == vote_none)
        check::warp_synced((unsigned)(&w - executor->warps), slot.meeting.mask);
    check::warp_met((unsigned)(&w - executor->warps), (slot.meeting.mask | w.exited) == ~0u);
    slot.used = false;
    for (uint32_t left = slot.arrived; left; left &= left - 1)
        fiber_ready(&lanes[__builtin_ctz(left)]);
}

/* A lane that has exited can never arrive. Masks name live lanes, so this is a bug wherever it is met. */
void meetings_after_exit(Fiber *f)
{
    for (MeetingSlot &slot : executor->warps[f->warp].slots)
        if (slot.used && (slot.meeting.mask >> f->lane & 1))
            report("a thread exited while its warp waits for it", here());
}

static MeetingSlot *slot_for(Warp &w, MeetingFn fn, uint32_t mask)
{
    MeetingSlot *unused = nullptr;
    for (MeetingSlot &slot : w.slots) {
        if (slot.used && slot.meeting.mask == mask) {
            if (slot.fn != fn)
                report("lanes of one warp are in different collectives with the same mask", here());
            return &slot;
        }
        if (slot.used && (slot.meeting.mask & mask))
            report("warp collectives with masks that overlap but differ", here());
        if (!slot.used && !unused)
            unused = &slot;
    }
    if (!unused)
        report("too many warp collectives at once", here());
    unused->used = true;
    unused->fn = fn;
    unused->arrived = 0;
    unused->meeting.mask = mask;
    return unused;
}

void meet(MeetingFn fn, uint32_t mask, void *argument)
{
    Fiber *f = executor->current;
    Warp &w = executor->warps[f->warp];
    const uint32_t bit = 1u << f->lane;
    if (!(mask & bit))
        report("a warp collective by a lane that is not in its mask", here());
    if (mask & w.exited)
        report("a warp collective waits for a lane that has exited or does not exist", here());
    MeetingSlot *slot = slot_for(w, fn, mask);
    slot->arrived |= bit;
    slot->meeting.argument[f->lane] = argument;
    f->called_from = __builtin_return_address(0);
    if (slot->arrived == mask) {
        meeting_end(w, *slot);
        fiber_yield();
    } else {
        fiber_block("a warp collective");
    }
}

template <class F> static void each_lane(const Meeting &m, F f)
{
    for (uint32_t left = m.mask; left; left &= left - 1)
        f(__builtin_ctz(left));
}

static Exchange &exchange_of(const Meeting &m, int lane)
{
    return *(Exchange *)m.argument[lane];
}

/* ---- shuffles; a segment is `width` lanes ---- */
template <class F> static void shuffle(Meeting &m, F source)
{
    each_lane(m, [&](int l) {
        Exchange &e = exchange_of(m, l);
        const int from = source(l, e.lane, e.width);
        if (!(m.mask >> from & 1))
            report("a shuffle reads a lane that does not take part", here());
        e.result = exchange_of(m, from).value;
    });
}

void exchange_index(Meeting &m)
{
    shuffle(m, [](int l, int lane, int width) { return (l & ~(width - 1)) | (lane & (width - 1)); });
}

void exchange_up(Meeting &m)
{
    shuffle(m, [](int l, int n, int width) { return l - n < (l & ~(width - 1)) ? l : l - n; });
}

void exchange_down(Meeting &m)
{
    shuffle(m, [](int l, int n, int width) { return l + n > (l | (width - 1)) ? l : l + n; });
}

void exchange_xor(Meeting &m)
{
    shuffle(m, [](int l, int x, int width) { return (l ^ x) > (l | (width - 1)) ? l : l ^ x; });
}

/* ---- votes and reductions ---- */
static void all_get(Meeting &m, uint32_t result)
{
    each_lane(m, [&](int l) { exchange_of(m, l).result = result; });
}

static uint32_t ballot(Meeting &m)
{
    uint32_t bits = 0;
    each_lane(m, [&](int l) { bits |= exchange_of(m, l).value ? 1u << l : 0; });
    return bits;
}

void vote_none(Meeting &) {}
void vote_ballot(Meeting &m) { all_get(m, ballot(m)); }
void vote_any(Meeting &m) { all_get(m, ballot(m) != 0); }
void vote_all(Meeting &m) { all_get(m, ballot(m) == m.mask); }

template <class T, class F> static void reduce(Meeting &m, T start, F combine)
{
    each_lane(m, [&](int l) { start = combine(start, (T)exchange_of(m, l).value); });
    all_get(m, (uint32_t)start);
}

void reduce_add(Meeting &m) { reduce<uint32_t>(m, 0, [](uint32_t a, uint32_t b) { return a + b; }); }
void reduce_max_unsigned(Meeting &m) { reduce<uint32_t>(m, 0, [](uint32_t a, uint32_t b) { return std::max(a, b); }); }
void reduce_min_unsigned(Meeting &m) { reduce<uint32_t>(m, ~0u, [](uint32_t a, uint32_t b) { return std::min(a, b); }); }
void reduce_max_signed(Meeting &m) { reduce<int32_t>(m, INT32_MIN, [](int32_t a, int32_t b) { return std::max(a, b); }); }
void reduce_min_signed(Meeting &m) { reduce<int32_t>(m, INT32_MAX, [](int32_t a, int32_t b) { return std::min(a, b); }); }

/* ---- matrices. Fragment layouts: PTX ISA, "Matrix fragments for mma.m16n8k16" (bf16) and "mma.m16n8k32" (8-bit). With g = lane / 4 and t = lane % 4, a 32-bit
 * register holds neighbours along k. A: rows g (registers 0, 2) and g + 8 (1, 3), the second half of k in 2 and 3. B: column g, the second half of k in 1.
 * C and D: rows g (0, 1) and g + 8 (2, 3), columns 2 t and 2 t + 1. ---- */
template <class Value, class Sum, class Unpack> static void multiply(Meeting &m, Unpack unpack)
{
    enum { PER = sizeof(uint32_t) / sizeof(Value), K = 8 * PER };
    static thread_local Sum a[16][K], b[K][8];
    if (m.mask != ~0u)
        report("mma.sync without all 32 lanes", here());
    for (int l = 0; l < WARP; l++) {
        const MatrixMultiply &x = *(MatrixMultiply *)m.argument[l];
        const int g = l / 4, t = l % 4;
        for (int r = 0; r < 4; r++)
            for (int i = 0; i < PER; i++)
                a[g + r % 2 * 8][r / 2 * K / 2 + t * PER + i] = unpack(x.a[r], i);
        for (int r = 0; r < 2; r++)
            for (int i = 0; i < PER; i++)
                b[r * K / 2 + t * PER + i][g] = unpack(x.b[r], i);
    }
    for (int l = 0; l < WARP; l++) {
        const MatrixMultiply &x = *(MatrixMultiply *)m.argument[l];
        Sum d[4];
        for (int r = 0; r < 4; r++) {
            const int row = l / 4 + r / 2 * 8, column = l % 4 * 2 + r % 2;
            Sum sum = 0;
            for (int k = 0; k < K; k++)
                sum += a[row][k] * b[k][column];
            d[r] = ((const Sum *)x.c)[r] + sum;
        }
        memcpy(x.d, d, sizeof d); /* d may be c */
    }
}

void multiply_bf16(Meeting &m)
{
    multiply<uint16_t, float>(m, [](uint32_t word, int i) {
        const uint32_t bits = word >> 16 * i << 16;
        float f;
        memcpy(&f, &bits, sizeof f);
        return f;
    });
}

void multiply_s8(Meeting &m)
{
    multiply<int8_t, int32_t>(m, [](uint32_t word, int i) { return (int32_t)(int8_t)(word >> 8 * i); });
}

/* Four 8 x 8 matrices of 16-bit values. Lane l gives the address of row l % 8 of matrix l / 8 and gets, of each, row l / 4, columns 2 (l % 4) and the next. */
static void load(Meeting &m, bool transposed)
{
    uint16_t value[4][8][8];
    if (m.mask != ~0u)
        report("ldmatrix without all 32 lanes", here());
    for (int l = 0; l < WARP; l++) {
        const void *row = ((MatrixLoad *)m.argument[l])->row;
        if ((uintptr_t)row % 16)
            report("a row of ldmatrix is not 16-byte aligned", here());
        check::warp_read(executor->current->warp, (unsigned)l, row, 16, executor->current->called_from);
        memcpy(value[l / 8][l % 8], row, 16);
    }
    for (int l = 0; l < WARP; l++)
        for (int i = 0; i < 4; i++) {
            const int r = l / 4, c = l % 4 * 2;
            const uint16_t low = transposed ? value[i][c][r] : value[i][r][c], high = transposed ? value[i][c + 1][r] : value[i][r][c + 1];
            ((MatrixLoad *)m.argument[l])->registers[i] = low | (uint32_t)high << 16;
        }
}

void load_matrix(Meeting &m) { load(m, false); }
void load_matrix_transposed(Meeting &m) { load(m, true); }

/* ---- cp.async: a copy may land at any time between its issue and the wait. With seed 0 it lands as late as it may; else half of the copies land at once, and again at
 * the wait, so that whoever reads too early or writes too early is found by one or the other. ---- */
static void move(const AsyncCopy &c)
{
    memcpy(c.dst, c.src, c.n_valid);
    memset((char *)c.dst + c.n_valid, 0, c.n_bytes - c.n_valid);
}

static void land(const AsyncCopy &c)
{
    check::copy_landed(c.dst, c.n_bytes, c.src, c.n_valid, c.called_from);
    move(c);
}

void copy_async(void *dst, const void *src, unsigned n_bytes, unsigned n_valid)
{
    if (((uintptr_t)dst | (n_valid ? (uintptr_t)src : 0)) % 16)
        report("cp.async with an address that is not 16-byte aligned", here());
    const AsyncCopy copy = {dst, src, n_bytes, n_valid, __builtin_return_address(0)};
    check::copy_started(dst, n_bytes, src, n_valid, copy.called_from);
    if (executor->random.state && executor->random.next() % 2)
        move(copy);
    executor->current->open.push_back(copy);
}

void copy_commit()
{
    Fiber *f = executor->current;
    f->groups.emplace_back();
    f->groups.back().swap(f->open);
}

void copy_wait(unsigned n_left)
{
    Fiber *f = executor->current;
    while (f->groups.size() > n_left) {
        for (const AsyncCopy &c : f->groups.front())
            land(c);
        f->groups.erase(f->groups.begin());
    }
}

void copies_at_exit(Fiber *f)
{
    bool pending = !f->open.empty();
    for (const auto &group : f->groups)
        pending |= !group.empty();
    if (pending)
        report("cp.async that is never waited for", here());
    f->groups.clear();
}

} /* namespace simt */
