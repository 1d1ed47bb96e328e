/* Device memory, pinned and registered host memory.
 *
 * Device memory comes from one reserved region, each allocation with pages of its own and a gap behind it, its end close to the gap; addresses are never used again. So
 * an access beyond the end or after cudaFree faults. In lazy mode the region is without access rights while the host runs, so that a host that touches device
 * memory faults too. Kernels may read what host memory they like here; check_argument looks for pointers to it in what is passed. */
#include "tests/simt/simt_stream_private.h"
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <execinfo.h>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>

namespace simt {

static const size_t region_bytes = (size_t)1 << 38, page_bytes = 4096;

struct Allocation {
    size_t bytes;
    char *mapping; /* device: pages that hold it */
    size_t mapping_bytes;
    MemoryKind kind;
    bool read_only; /* registered so */
};

struct Memory {
    std::mutex lock;
    std::map<uintptr_t, Allocation> allocations;
    char *region = nullptr, *next = nullptr;
    bool locked = false, registered_closed = false;
};

static Memory &memory()
{
    static Memory &m = *new Memory(); /* outlives every thread */
    return m;
}

static const Allocation *find(const Memory &m, const void *address, size_t *ret_left);

/* Names what a fault in the region means; any other fault takes its usual way. */
static void on_fault(int signal, siginfo_t *info, void *)
{
    const Memory &m = memory();
    const char *address = (const char *)info->si_addr, *text;
    size_t left;
    const Allocation *a = m.registered_closed ? find(m, address, &left) : nullptr;
    if (a && a->kind == MEMORY_REGISTERED && self) {
        text = "simt: a kernel touches registered memory, which it is to leave alone: ";
        ssize_t ignored = write(STDERR_FILENO, text, strlen(text));
        ignored = write(STDERR_FILENO, executor->kernel->shape.name, strlen(executor->kernel->shape.name));
        ignored = write(STDERR_FILENO, "\n", 1);
        (void)ignored;
        abort();
    }
    if (m.region && address >= m.region && address < m.region + region_bytes) {
        text = self ? "simt: a kernel accesses device memory out of bounds or after it was freed\n" :
               m.locked ? "simt: the host touches device memory\n" : "simt: access to device memory that is out of bounds or freed\n";
        ssize_t ignored = write(STDERR_FILENO, text, strlen(text));
        (void)ignored;
        if (self && executor) {
            const char *name = executor->kernel->shape.name;
            ignored = write(STDERR_FILENO, name, strlen(name));
            ignored = write(STDERR_FILENO, "\n", 1);
        } else {
            void *frames[16]; /* where the host was; addr2line names static functions */
            backtrace_symbols_fd(frames, backtrace(frames, 16), STDERR_FILENO);
        }
        abort();
    }
    struct sigaction fallback = {};
    fallback.sa_handler = SIG_DFL;
    sigaction(signal, &fallback, nullptr);
}

static void region_open(Memory &m)
{
    struct sigaction action = {};
    void *region = mmap(nullptr, region_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED)
        report("no address space for device memory", "");
    m.region = m.next = (char *)region;
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    check::region_opened(region, region_bytes);
}

static void protect(const Allocation &a, int rights)
{
    if (a.kind == MEMORY_DEVICE && mprotect(a.mapping, a.mapping_bytes, rights) != 0)
        report("mprotect of device memory failed", "");
}

static void protect_all(Memory &m, int rights)
{
    for (const auto &entry : m.allocations)
        protect(entry.second, rights);
}

void memory_unlock()
{
    Memory &m = memory();
    std::lock_guard<std::mutex> guard(m.lock);
    if (m.locked)
        protect_all(m, PROT_READ | PROT_WRITE);
    m.locked = false;
}

void memory_lock()
{
    Memory &m = memory();
    std::lock_guard<std::mutex> guard(m.lock);
    if (options().threads || m.locked)
        return;
    protect_all(m, PROT_NONE);
    m.locked = true;
}

static void registered_protect(bool open)
{
    Memory &m = memory();
    std::lock_guard<std::mutex> guard(m.lock);
    for (const auto &entry : m.allocations) {
        void *base = (void *)entry.first;
        if (entry.second.kind != MEMORY_REGISTERED)
            continue;
        /* A mapping of what may only be read refuses to be written. */
        if (mprotect(base, entry.second.bytes, open ? PROT_READ | PROT_WRITE : PROT_NONE) != 0 && mprotect(base, entry.second.bytes, PROT_READ) != 0)
            report("mprotect of registered memory failed", "");
    }
    m.registered_closed = !open;
}

void registered_close()
{
    registered_protect(false);
}

void registered_open()
{
    registered_protect(true);
}

static const Allocation *find(const Memory &m, const void *address, size_t *ret_left)
{
    auto next = m.allocations.upper_bound((uintptr_t)address);
    if (next == m.allocations.begin())
        return nullptr;
    --next;
    const size_t at = (uintptr_t)address - next->first;
    if (at >= next->second.bytes)
        return nullptr;
    *ret_left = next->second.bytes - at;
    return &next->second;
}

MemoryKind memory_find(const void *address, size_t *ret_bytes_left)
{
    Memory &m = memory();
    std::lock_guard<std::mutex> guard(m.lock);
    const Allocation *a = find(m, address, ret_bytes_left);
    return a ? a->kind : MEMORY_UNKNOWN;
}

bool memory_is_read_only(const void *address)
{
    Memory &m = memory();
    std::lock_guard<std::mutex> guard(m.lock);
    size_t left;
    const Allocation *a = find(m, address, &left);
    return a && a->read_only;
}

bool memory_is_device_address(const void *address)
{
    const Memory &m = memory();
    return m.region && (const char *)address >= m.region && (const char *)address < m.region + region_bytes;
}

/* A word that is the address of mapped host memory which is not pinned. */
void check_argument(const LaunchShape &shape, int index, const void *argument, size_t bytes, bool is_pointer)
{
    /* Programs, heaps and stacks lie above 2^45; below it two neighbouring numbers of a struct would look like addresses of a sanitizer's shadow. */
    const uintptr_t lowest = is_pointer ? 1 << 16 : (uintptr_t)1 << 45;
    /* So does a small number whose word ends in padding, where the upper half of some address may be left. */
    const uint32_t lowest_half = is_pointer ? 0 : 1 << 20;
    for (size_t i = 0; i + sizeof(void *) <= bytes; i += sizeof(void *)) {
        uintptr_t word;
        size_t left;
        unsigned char resident;
        const std::string where = std::string(shape.name) + ", argument " + std::to_string(index) + ", byte " + std::to_string(i);
        memcpy(&word, (const char *)argument + i, sizeof word);
        if (word < lowest || (uint32_t)word < lowest_half || word >> 47 || memory_find((void *)word, &left) != MEMORY_UNKNOWN)
            continue;
        if (memory_is_device_address((void *)word)) {
            /* One past the end is an address that code may form. */
            if (is_pointer && memory_find((void *)(word - 1), &left) == MEMORY_UNKNOWN)
                report("a pointer to device memory that is freed or was never allocated", where);
        } else if (mincore((void *)(word & ~(page_bytes - 1)), page_bytes, &resident) == 0) {
            report("a kernel gets a pointer to host memory", where);
        }
    }
}

static cudaError_t device_allocate(Memory &m, size_t bytes, void **ret_memory)
{
    if (!m.region)
        region_open(m);
    const size_t pages = (bytes + page_bytes - 1) / page_bytes * page_bytes, room = (size_t)(m.region + region_bytes - m.next);
    if (bytes == 0 || pages + page_bytes > room)
        return bytes == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
    if (mprotect(m.next, pages, PROT_READ | PROT_WRITE) != 0)
        return cudaErrorMemoryAllocation;
    char *start = m.next + (pages - (bytes + 255) / 256 * 256); /* aligned to 256, as the real ones */
    memset(m.next, 0xFF, pages);
    m.allocations[(uintptr_t)start] = {bytes, m.next, pages, MEMORY_DEVICE, false};
    if (m.locked)
        protect(m.allocations[(uintptr_t)start], PROT_NONE);
    m.next += pages + page_bytes;
    *ret_memory = start;
    check::area_opened(start, bytes, MEMORY_DEVICE);
    return cudaSuccess;
}

} /* namespace simt */

using namespace simt;

cudaError_t cudaMalloc(void **ret_memory, size_t bytes)
{
    if (capture_forbids_thread() != cudaSuccess)
        return cudaErrorStreamCaptureUnsupported;
    Memory &m = memory();
    need_device("cudaMalloc");
    std::lock_guard<std::mutex> guard(m.lock);
    *ret_memory = nullptr;
    if (device_error() != cudaSuccess)
        return device_error();
    if (options().fail_malloc > 0 && --options().fail_malloc == 0)
        return set_error(cudaErrorMemoryAllocation);
    return set_error(device_allocate(m, bytes, ret_memory));
}

/* Does not wait for the streams, as the real one happens to do: whoever relies on that has an early free. */
cudaError_t cudaFree(void *address)
{
    if (capture_forbids_thread() != cudaSuccess)
        return cudaErrorStreamCaptureUnsupported;
    Memory &m = memory();
    std::lock_guard<std::mutex> guard(m.lock);
    auto it = m.allocations.find((uintptr_t)address);
    if (!address)
        return cudaSuccess;
    if (it == m.allocations.end() || it->second.kind != MEMORY_DEVICE)
        report("cudaFree of an address that cudaMalloc did not give, or twice", "");
    check::area_closed(address);
    protect(it->second, PROT_NONE);
    madvise(it->second.mapping, it->second.mapping_bytes, MADV_DONTNEED);
    m.allocations.erase(it);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **ret_memory, size_t bytes, unsigned)
{
    if (capture_forbids_thread() != cudaSuccess)
        return cudaErrorStreamCaptureUnsupported;
    Memory &m = memory();
    need_device("cudaHostAlloc");
    std::lock_guard<std::mutex> guard(m.lock);
    void *address;
    *ret_memory = nullptr;
    if (posix_memalign(&address, page_bytes, bytes ? bytes : 1) != 0)
        return set_error(cudaErrorMemoryAllocation);
    memset(address, 0xFF, bytes);
    m.allocations[(uintptr_t)address] = {bytes, nullptr, 0, MEMORY_PINNED, false};
    check::area_opened(address, bytes, MEMORY_PINNED);
    *ret_memory = address;
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *address)
{
    if (capture_forbids_thread() != cudaSuccess)
        return cudaErrorStreamCaptureUnsupported;
    Memory &m = memory();
    std::lock_guard<std::mutex> guard(m.lock);
    auto it = m.allocations.find((uintptr_t)address);
    if (!address)
        return cudaSuccess;
    if (it == m.allocations.end() || it->second.kind != MEMORY_PINNED)
        report("cudaFreeHost of an address that cudaHostAlloc did not give, or twice", "");
    check::area_closed(address);
    m.allocations.erase(it);
    free(address);
    return cudaSuccess;
}

/* Pages are pinned for writing, which a mapping for reading alone refuses. */
static bool mapping_is_read_only(const void *address)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    unsigned long first, end;
    char line[512], rights[5];
    bool read_only = false;
    while (maps && fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %4s", &first, &end, rights) == 3 && (uintptr_t)address >= first && (uintptr_t)address < end)
            read_only = rights[1] != 'w';
    if (maps)
        fclose(maps);
    return read_only;
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags)
{
    if (capture_forbids_thread() != cudaSuccess)
        return cudaErrorStreamCaptureUnsupported;
    Memory &m = memory();
    need_device("cudaHostRegister");
    std::lock_guard<std::mutex> guard(m.lock);
    size_t left;
    auto next = m.allocations.upper_bound((uintptr_t)address);
    if (!address || bytes == 0 || (uintptr_t)address % page_bytes || (!(flags & cudaHostRegisterReadOnly) && mapping_is_read_only(address)))
        return set_error(cudaErrorInvalidValue);
    if (find(m, address, &left) || (next != m.allocations.end() && next->first < (uintptr_t)address + bytes))
        return set_error(cudaErrorHostMemoryAlreadyRegistered);
    m.allocations[(uintptr_t)address] = {bytes, nullptr, 0, MEMORY_REGISTERED, (flags & cudaHostRegisterReadOnly) != 0};
    check::area_opened(address, bytes, MEMORY_REGISTERED);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *address)
{
    if (capture_forbids_thread() != cudaSuccess)
        return cudaErrorStreamCaptureUnsupported;
    Memory &m = memory();
    std::lock_guard<std::mutex> guard(m.lock);
    auto it = m.allocations.find((uintptr_t)address);
    if (it == m.allocations.end() || it->second.kind != MEMORY_REGISTERED)
        return set_error(cudaErrorHostMemoryNotRegistered);
    check::area_closed(address);
    m.allocations.erase(it);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address)
{
    size_t left;
    const MemoryKind kind = memory_find(address, &left);
    attributes->type = kind == MEMORY_UNKNOWN ? cudaMemoryTypeUnregistered : kind == MEMORY_DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    return cudaSuccess;
}

static std::atomic<size_t> library_bytes;

void simt::library_memory(ptrdiff_t bytes)
{
    library_bytes += (size_t)bytes;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    Memory &m = memory();
    std::lock_guard<std::mutex> guard(m.lock);
    size_t used = library_bytes + options().others_bytes;
    for (const auto &entry : m.allocations)
        used += entry.second.kind == MEMORY_DEVICE ? entry.second.bytes : 0;
    *total_bytes = DEVICE_BYTES;
    *free_bytes = *total_bytes - (used < *total_bytes ? used : *total_bytes);
    return cudaSuccess;
}
