/* The access profiler: how many sectors and wavefronts the accesses of kernels cost, by kernel and source line. A mode of the checked build: SIMT_PROFILE names the file that it writes when the process
 * ends; access_profile.py runs a program with it and prints tables.
 *
 * A *request* is what a warp's lanes do with one instruction: here the n-th execution of one place in the program by each lane since the lanes last came together (a collective of the whole warp, a
 * barrier). Lanes that skip a round of a loop are joined with those of another round until then, and a place that the compiler of the emulator has twice is two.
 *
 * Device and host memory come in sectors of 32 bytes: a request costs as many as it touches, and could cost as few as its distinct bytes fill. Shared memory has 32 banks of 4 bytes: a request of up to 4
 * bytes a lane takes a wavefront for each distinct word of the bank that has most; 8 bytes a lane go by halves of the warp, 16 bytes, cp.async and ldmatrix by quarters. It could take as few as its distinct
 * words fill. Atomics on one word of shared memory take turns (CUDA programming guide, "Shared memory"; Nsight Compute's metrics count the same things).
 *
 * Caches, and what nvcc makes of the source (wider accesses, hoisted loads), are not seen. Memory is bounded: REQUESTS_MAX open requests; beyond, they are counted as they are, and the report says so. */
#include "tests/simt/simt_check_private.h"
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <unordered_map>

namespace simt {
namespace check {

enum { SECTOR = 32, BANKS = 32, BANK_BYTES = 4, REQUESTS_MAX = 1 << 18 };
const bool profiling = getenv("SIMT_PROFILE") != nullptr;

struct Request {
    uint32_t lanes;
    std::array<uintptr_t, WARP> address;
};

/* What one place of a kernel has cost. `units`: sectors or wavefronts; `least`: how few could do. */
struct Cost {
    uint64_t requests, lanes, bytes, units, least;
};

struct Site {
    ProfileSpace space;
    ProfileOp op;
    unsigned bytes; /* of a lane */
    const void *pc;
    Cost cost;
};

struct KernelProfile {
    std::vector<Site> sites;
    std::unordered_map<uint64_t, uint32_t> by_key;
    uint64_t launches, blocks;
    unsigned threads;    /* of a block, the most; */
    size_t shared_bytes; /*   and of dynamic shared memory */
};

/* The open requests of one site in one warp, by how manieth execution. */
struct Open {
    std::array<uint32_t, WARP> n_executed;
    std::vector<Request> requests;
};

static std::map<std::string, KernelProfile> &kernels = *new std::map<std::string, KernelProfile>();
static KernelProfile *kernel;        /* the running one */
static std::vector<Open> *const open_sites = new std::vector<Open>[MAX_WARPS]; /* of each warp, by the index of the site */
static size_t n_open, n_cut;
static uint64_t launch_serial;

/* ---- what a request costs ---- */

/* Sectors touched, and the distinct bytes. */
static unsigned count_sectors(const Request &r, unsigned bytes, uint64_t *ret_bytes)
{
    uintptr_t at[WARP], end = 0, sector_end = 0;
    unsigned n = 0, sectors = 0;
    for (uint32_t left = r.lanes; left; left &= left - 1)
        at[n++] = r.address[(unsigned)__builtin_ctz(left)];
    std::sort(at, at + n);
    *ret_bytes = 0;
    for (unsigned i = 0; i < n; i++) {
        const uintptr_t first = std::max(at[i], end), last = at[i] + bytes, from = std::max(at[i] / SECTOR, sector_end), to = (last - 1) / SECTOR + 1;
        *ret_bytes += last > first ? last - first : 0;
        sectors += to > from ? (unsigned)(to - from) : 0;
        end = std::max(end, last);
        sector_end = std::max(sector_end, to);
    }
    return sectors;
}

/* Wavefronts of the lanes in `lanes`, which go together; adds their distinct bytes. */
static unsigned count_wavefronts(const Request &r, uint32_t lanes, unsigned bytes, bool atomic, unsigned *ret_least)
{
    uintptr_t words[WARP * 4];
    unsigned n = 0, in_bank[BANKS] = {0};
    for (uint32_t left = lanes; left; left &= left - 1) {
        const uintptr_t at = r.address[(unsigned)__builtin_ctz(left)];
        for (uintptr_t word = at / BANK_BYTES; word <= (at + bytes - 1) / BANK_BYTES && n < WARP * 4; word++)
            words[n++] = word;
    }
    std::sort(words, words + n);
    const unsigned n_distinct = (unsigned)(std::unique(words, words + n) - words);
    *ret_least = (n_distinct + BANKS - 1) / BANKS;
    if (atomic) { /* not distinct ones */
        for (uint32_t left = lanes; left; left &= left - 1)
            in_bank[r.address[(unsigned)__builtin_ctz(left)] / BANK_BYTES % BANKS]++;
    } else {
        for (unsigned i = 0; i < n_distinct; i++)
            in_bank[words[i] % BANKS]++;
    }
    return *std::max_element(in_bank, in_bank + BANKS);
}

static void add_shared(Site &site, const Request &r)
{
    const unsigned n_parts = site.bytes <= 4 ? 1 : site.bytes == 8 ? 2 : 4, lanes = WARP / n_parts;
    for (unsigned part = 0; part < n_parts; part++) {
        const uint32_t mask = r.lanes & (lanes == WARP ? ~0u : ((1u << lanes) - 1) << part * lanes);
        unsigned least;
        if (mask) {
            site.cost.units += count_wavefronts(r, mask, site.bytes, site.op == PROFILE_ATOMIC, &least);
            site.cost.least += least;
        }
    }
    site.cost.bytes += (uint64_t)__builtin_popcount(r.lanes) * site.bytes;
}

static void add_request(Site &site, const Request &r)
{
    site.cost.requests++;
    site.cost.lanes += (uint64_t)__builtin_popcount(r.lanes);
    if (site.space == PROFILE_SHARED) {
        add_shared(site, r);
        return;
    }
    uint64_t bytes;
    site.cost.units += count_sectors(r, site.bytes, &bytes);
    site.cost.least += (bytes + SECTOR - 1) / SECTOR;
    site.cost.bytes += bytes;
}

/* ---- requests of the running block ---- */

void profile_warp_end(unsigned warp)
{
    std::vector<Open> &sites = open_sites[warp];
    for (size_t i = 0; i < sites.size(); i++) {
        if (sites[i].requests.empty())
            continue;
        for (const Request &r : sites[i].requests)
            add_request(kernel->sites[i], r);
        n_open -= sites[i].requests.size();
        sites[i].requests.clear();
        sites[i].n_executed = {};
    }
}

void profile_barrier(const std::vector<Fiber *> &met)
{
    uint32_t warps = 0;
    for (const Fiber *f : met)
        warps |= 1u << f->warp;
    for (uint32_t left = warps; left; left &= left - 1)
        profile_warp_end((unsigned)__builtin_ctz(left));
}

void profile_block_end()
{
    for (unsigned warp = 0; kernel && warp < MAX_WARPS; warp++) {
        profile_warp_end(warp);
        open_sites[warp].clear();
    }
    kernel = nullptr;
}

void profile_block_begin()
{
    const Kernel &k = *block.executor->kernel;
    profile_block_end();
    kernel = &kernels[k.shape.name];
    kernel->blocks++;
    kernel->launches += k.serial != launch_serial || kernel->launches == 0;
    launch_serial = k.serial;
    kernel->threads = std::max(kernel->threads, block.executor->n_threads);
    kernel->shared_bytes = std::max(kernel->shared_bytes, k.shape.shared_bytes);
}

static uint32_t site_of(ProfileSpace space, ProfileOp op, unsigned bytes, const void *pc)
{
    const uint64_t key = (uint64_t)(uintptr_t)pc << 16 | (uint64_t)space << 14 | (uint64_t)op << 8 | bytes;
    const auto known = kernel->by_key.emplace(key, (uint32_t)kernel->sites.size());
    if (known.second)
        kernel->sites.push_back({space, op, bytes, pc, {}});
    return known.first->second;
}

void profile_lane(ProfileSpace space, ProfileOp op, unsigned warp, unsigned lane, uintptr_t address, size_t bytes, const void *pc)
{
    if (!kernel)
        return;
    const uint32_t site = site_of(space, op, (unsigned)bytes, pc);
    std::vector<Open> &sites = open_sites[warp];
    if (sites.size() <= site)
        sites.resize(site + 1);
    if (n_open >= REQUESTS_MAX) {
        n_cut += n_open;
        for (unsigned w = 0; w < MAX_WARPS; w++)
            profile_warp_end(w);
    }
    Open &open = sites[site];
    const uint32_t n = open.n_executed[lane]++;
    if (n == open.requests.size()) {
        open.requests.push_back({});
        n_open++;
    }
    open.requests[n].lanes |= 1u << lane;
    open.requests[n].address[lane] = address;
}

/* Structures are copied by the widest accesses that their place allows, as compilers do. */
void profile_thread(ProfileSpace space, AccessKind kind, uintptr_t address, size_t bytes, const void *pc)
{
    const Fiber *f = block.executor->current;
    const ProfileOp op = kind == READ ? PROFILE_LOAD : kind == WRITE ? PROFILE_STORE : PROFILE_ATOMIC;
    while (bytes > 0) {
        size_t piece = 16;
        while (piece > bytes || address % piece)
            piece /= 2;
        profile_lane(space, op, f->warp, f->lane, address, piece, pc);
        address += piece;
        bytes -= piece;
    }
}

void profile_copy(uintptr_t to, size_t bytes, uintptr_t from, size_t from_bytes, const void *pc)
{
    const Fiber *f = block.executor->current;
    if (from_bytes)
        profile_lane(area_of_host(from) ? PROFILE_HOST : PROFILE_GLOBAL, PROFILE_COPY, f->warp, f->lane, from, from_bytes, pc);
    profile_lane(PROFILE_SHARED, PROFILE_COPY, f->warp, f->lane, to, bytes, pc);
}

/* ---- the report: lines of fields between tabs, that of a kernel before those of its places ---- */

static void add_cost(Cost &to, const Cost &c)
{
    to.requests += c.requests;
    to.lanes += c.lanes;
    to.bytes += c.bytes;
    to.units += c.units;
    to.least += c.least;
}

static void report_kernel(FILE *out, const std::string &name, const KernelProfile &k)
{
    static const char *const spaces[] = {"global", "shared", "host"}, *const ops[] = {"load", "store", "atomic", "cp.async", "ldmatrix"};
    std::vector<const void *> pcs;
    std::map<std::string, Cost> lines; /* several places of the program can be one line */
    for (const Site &s : k.sites)
        pcs.push_back(s.pc);
    const std::vector<std::string> places = places_of(pcs);
    for (size_t i = 0; i < k.sites.size(); i++) {
        const Site &s = k.sites[i];
        add_cost(lines[std::string(spaces[s.space]) + "\t" + ops[s.op] + "\t" + std::to_string(s.bytes) + "\t" + places[i]], s.cost);
    }
    fprintf(out, "kernel\t%s\t%llu\t%llu\t%u\t%zu\n", name.c_str(), (unsigned long long)k.launches, (unsigned long long)k.blocks, k.threads, k.shared_bytes);
    for (const auto &line : lines) {
        const Cost &c = line.second;
        fprintf(out, "%s\t%llu\t%llu\t%llu\t%llu\t%llu\n", line.first.c_str(), (unsigned long long)c.requests, (unsigned long long)c.lanes, (unsigned long long)c.bytes, (unsigned long long)c.units,
                (unsigned long long)c.least);
    }
}

static void write_report()
{
    FILE *out = fopen(getenv("SIMT_PROFILE"), "w");
    if (!out) {
        fprintf(stderr, "simt: SIMT_PROFILE: cannot write the file\n");
        return;
    }
    if (n_cut)
        fprintf(out, "cut\t%zu\n", n_cut);
    for (const auto &k : kernels)
        report_kernel(out, k.first, k.second);
    fclose(out);
}

[[maybe_unused]] static const int registered = profiling ? atexit(write_report) : 0;

} /* namespace check */
} /* namespace simt */
