/* What is ordered before what: streams, events and the host by vector clocks; threads of the running block by intervals and clocks; blocks of a launch by fences around atomics. */
#include "tests/simt/simt_check_private.h"
#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <set>

namespace simt {
namespace check {

std::recursive_mutex &lock = *new std::recursive_mutex(); /* outlives every thread, as all of this */
thread_local bool in_operation;
uint32_t running;
Block block;

/* ---- operations ---- */
struct Host {
    Clock clock = {1};          /* [0]: its time, which a submission moves on */
    uint32_t moment = 0;        /* the operation that stands for its accesses at this time; 0: none yet */
    unsigned n_streams = 0;
};

static Host &host = *new Host();
static std::deque<Operation> &operations = *new std::deque<Operation>(1);

static void join(Clock &to, const Clock &from)
{
    if (to.size() < from.size())
        to.resize(from.size());
    for (size_t i = 0; i < from.size(); i++)
        to[i] = std::max(to[i], from[i]);
}

static bool includes(const Clock &clock, const Operation &o)
{
    return o.stream < clock.size() && clock[o.stream] >= o.serial;
}

const Operation &operation(uint32_t id)
{
    return operations[id];
}

static uint32_t operation_add(Operation o)
{
    operations.push_back(std::move(o));
    return (uint32_t)(operations.size() - 1);
}

uint32_t host_moment()
{
    if (host.moment == 0)
        host.moment = operation_add({"the host", 0, host.clock[0], nullptr, {}});
    return host.moment;
}

OperationId submitted(StreamClock &s, const char *name)
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (s.stream == 0)
        s.stream = ++host.n_streams;
    join(s.clock, host.clock);
    if (s.clock.size() <= s.stream)
        s.clock.resize(s.stream + 1);
    const uint64_t serial = ++s.clock[s.stream];
    if (host.moment) {
        host.clock[0]++;
        host.moment = 0;
    }
    return operation_add({name, s.stream, serial, std::make_shared<Clock>(s.clock), stack_now()});
}

void stream_waits(StreamClock &s, const Clock &for_clock)
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    join(s.clock, for_clock);
}

void host_waited(const Clock &for_clock)
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    const uint64_t now = host.clock[0];
    join(host.clock, for_clock);
    host.clock[0] = now;
}

bool operation_is_over(uint32_t id)
{
    const Operation &o = operations[id];
    if (!in_operation)
        return o.stream == 0 || includes(host.clock, o);
    return includes(*operations[running].clock, o);
}

/* ---- blocks that learn of one another by atomics between fences. A block counts as one here: what any of its threads fenced is published by any of its atomics. ---- */
struct Launch {
    std::vector<std::pair<uint32_t, std::string>> blocks; /* first interval, name; ascending */
    std::map<uintptr_t, std::set<uint32_t>> published;    /* by address of an atomic: first intervals */
    std::set<uint32_t> known;                             /* to the running block */
    bool fenced = false;                                  /* the running block */
};
static Launch &launch = *new Launch();

void operation_begin(OperationId id)
{
    lock.lock();
    in_operation = true;
    running = id;
    launch = {};
}

void operation_end()
{
    if (profiling)
        profile_block_end();
    running = 0;
    block = {};
    in_operation = false;
    lock.unlock();
}

void fence(bool of_device)
{
    launch.fenced |= of_device;
}

void atomic_met(uintptr_t address)
{
    std::set<uint32_t> &p = launch.published[address];
    launch.known.insert(p.begin(), p.end());
    if (!launch.fenced)
        return;
    p.insert(launch.known.begin(), launch.known.end());
    p.insert(block.first);
}

static const std::pair<uint32_t, std::string> &block_of(uint32_t interval)
{
    auto next = std::upper_bound(launch.blocks.begin(), launch.blocks.end(), interval, [](uint32_t i, const std::pair<uint32_t, std::string> &b) { return i < b.first; });
    return *--next;
}

std::string block_name(uint32_t interval)
{
    return block_of(interval).second;
}

static bool is_published(const Access &a)
{
    if (a.flags & BY_BLOCKS)
        return launch.known.size() + 1 >= launch.blocks.size();
    return launch.known.count(block_of(a.interval).first) > 0;
}

/* ---- threads of the running block ---- */
enum { CLOCK_LIMIT = 1 << 17 };
static uint32_t n_intervals;
/* Of each thread: its clock, and up to which clock of each other it is ordered after that one. Both as of interval rows_of[thread]; of an older one they mean 1 and nothing. */
static uint32_t rows_of[MAX_THREADS], own[MAX_THREADS];
static uint32_t (*const seen)[MAX_THREADS] = new uint32_t[MAX_THREADS][MAX_THREADS];

static void row_renew(unsigned thread)
{
    if (rows_of[thread] == block.interval)
        return;
    rows_of[thread] = block.interval;
    own[thread] = 1;
    memset(seen[thread], 0, sizeof *seen[thread] * block.executor->n_threads);
}

uint32_t thread_clock(unsigned thread)
{
    return rows_of[thread] == block.interval ? own[thread] : 1;
}

static uint32_t known_to(unsigned thread, unsigned other)
{
    return rows_of[thread] == block.interval ? seen[thread][other] : 0;
}

static void interval_begin()
{
    block.interval = ++n_intervals;
    block.is_joined = false;
}

void block_begin(const Executor &e, const void *function, const unsigned char *shared, size_t shared_bytes)
{
    shared_areas_set(function, shared, shared_bytes);
    block.executor = &e;
    if (profiling)
        profile_block_begin();
    interval_begin();
    block.first = block.interval;
    const uint3 b = e.fibers[0].view.block;
    launch.blocks.emplace_back(block.first, "(" + std::to_string(b.x) + "," + std::to_string(b.y) + "," + std::to_string(b.z) + ")");
    launch.known.clear();
    launch.fenced = false;
}

/* Threads meet and then know what each of them knew, of the threads first .. first + n - 1. */
static void meet_threads(const std::vector<unsigned> &threads, unsigned first, unsigned n)
{
    uint32_t known[MAX_THREADS] = {0}, now = 0;
    for (unsigned t : threads) {
        row_renew(t);
        now = std::max(now, own[t]);
        for (unsigned i = first; i < first + n; i++)
            known[i] = std::max(known[i], seen[t][i]);
    }
    if (now + 1 >= CLOCK_LIMIT)
        report("the checker cannot count", "threads met " + std::to_string(now) + " times between two barriers of their block");
    for (unsigned t : threads)
        known[t] = now; /* one time for all, so that the largest of several clocks stands for each */
    for (unsigned t : threads) {
        memcpy(&seen[t][first], &known[first], n * sizeof *known);
        own[t] = now + 1;
    }
}

void barrier_opened(const std::vector<Fiber *> &met, bool is_whole_block)
{
    if (profiling)
        profile_barrier(met);
    if (is_whole_block) {
        interval_begin();
        return;
    }
    std::vector<unsigned> threads;
    for (const Fiber *f : met)
        threads.push_back(f->linear);
    block.is_joined = true;
    meet_threads(threads, 0, block.executor->n_threads);
}

void warp_met(unsigned warp, bool is_whole_warp)
{
    if (profiling && is_whole_warp)
        profile_warp_end(warp);
}

void warp_synced(unsigned warp, uint32_t mask)
{
    static std::vector<unsigned> threads;
    threads.clear();
    for (uint32_t left = mask; left; left &= left - 1)
        threads.push_back(warp * WARP + (unsigned)__builtin_ctz(left));
    if (block.is_joined)
        meet_threads(threads, 0, block.executor->n_threads);
    else
        meet_threads(threads, warp * WARP, std::min<unsigned>(WARP, block.executor->n_threads - warp * WARP));
}

static bool is_after_lanes(unsigned thread, unsigned first, uint32_t lanes, uint32_t clock)
{
    for (uint32_t left = lanes; left; left &= left - 1) {
        const unsigned other = first + (unsigned)__builtin_ctz(left);
        if (other != thread && other < block.executor->n_threads && known_to(thread, other) < clock)
            return false;
    }
    return true;
}

bool is_ordered_for(const Access &a, uint32_t mask, unsigned thread)
{
    if (!block.executor)
        return true;
    if (a.interval < block.first || (a.flags & BY_BLOCKS))
        return is_published(a);
    if (a.interval != block.interval)
        return true;
    if (!(a.flags & (BY_LANES | BY_WARPS)))
        return a.thread == thread || known_to(thread, a.thread) >= a.clock;
    if (!block.is_joined && ((a.flags & BY_WARPS) || a.thread / WARP != thread / WARP))
        return false;
    if (a.flags & BY_LANES)
        return is_after_lanes(thread, a.thread / WARP * WARP, mask, a.clock);
    for (uint32_t left = mask; left; left &= left - 1)
        if (!is_after_lanes(thread, (unsigned)__builtin_ctz(left) * WARP, ~0u, a.clock))
            return false;
    return true;
}

} /* namespace check */
} /* namespace simt */
