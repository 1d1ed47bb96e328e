/* What instrumented code calls: the functions that compilers emit for -fsanitize=thread, in place of ThreadSanitizer's own, and the copies of simt_check_calls.h. Three sorts of code come here: kernels
 * (a block runs), stand-ins for libraries of the device (an operation runs, but no block), and the host's part of the backend. */
#include "tests/simt/simt_check_private.h"
#include <cstdio>
#include <cstring>

namespace simt {
namespace check {

static void host_access(uintptr_t address, size_t bytes, AccessKind kind, const void *pc)
{
    std::lock_guard<std::recursive_mutex> guard(lock);
    Area *area = area_of_host(address);
    if (area)
        touch(*area, address, bytes, kind, pc);
}

static std::string address_text(uintptr_t address)
{
    char text[32];
    snprintf(text, sizeof text, "address 0x%lx", (unsigned long)address);
    return text;
}

static bool is_within(uintptr_t address, const void *base, size_t bytes)
{
    return address - (uintptr_t)base < bytes;
}

/* Neither shared nor device memory, nor the thread's own: constants, the arguments, what the emulator tells a thread; and memory of the host that the device can reach. */
static void far_access(uintptr_t address, size_t bytes, AccessKind kind, const void *pc)
{
    const Executor &e = *block.executor;
    Area *area = area_of_host(address);
    if (area && profiling)
        profile_thread(PROFILE_HOST, kind, address, bytes, pc);
    if (area)
        touch(*area, address, bytes, kind, pc);
    else if (kind != READ || !(is_within(address, e.kernel->pack.get(), e.kernel->shape.pack_bytes) || is_within(address, &self, sizeof self) || is_program_memory(address)))
        report("a kernel accesses memory of the host that is neither pinned nor registered", std::string(e.kernel->shape.name) + ", " + fiber_name(e.current) + ", " + place_of(pc) + ", " + address_text(address));
}

static inline void thread_access(uintptr_t address, size_t bytes, AccessKind kind, const void *pc)
{
    const Executor &e = *block.executor;
    if (is_within(address, e.current->stack, FIBER_STACK_BYTES) || (kind == READ && is_within(address, &e, sizeof e)))
        return;
    if (address - dynamic_shared.base < dynamic_shared.bytes) {
        if (profiling)
            profile_thread(PROFILE_SHARED, kind, address, bytes, pc);
        touch(dynamic_shared, address, bytes, kind, pc);
    } else if (address - region_base < region_size) {
        Area *area = area_find(address, true);
        if (profiling)
            profile_thread(PROFILE_GLOBAL, kind, address, bytes, pc);
        if (area && (kind == ATOMIC_READ || kind == ATOMIC_UPDATE))
            atomic_met(address);
        if (area)
            touch(*area, address, bytes, kind, pc);
    } else if (address - static_shared.base < static_shared.bytes) {
        if (profiling)
            profile_thread(PROFILE_SHARED, kind, address, bytes, pc);
        touch(static_shared, address, bytes, kind, pc);
    } else {
        far_access(address, bytes, kind, pc);
    }
}

static inline void access(const volatile void *p, size_t bytes, AccessKind kind, const void *pc)
{
    const uintptr_t address = (uintptr_t)p;
    if (bytes == 0)
        return;
    if (!in_operation) {
        host_access(address, bytes, kind, pc);
    } else if (block.executor) {
        thread_access(address, bytes, kind, pc);
    } else {
        Area *area = area_find(address, false);
        if (area)
            touch(*area, address, bytes, kind, pc);
    }
}

} /* namespace check */
} /* namespace simt */

using namespace simt::check;
#define PC __builtin_return_address(0)

extern "C" {

/* Volatile accesses order nothing either, and race as others do. */
#define PLAIN(n)                                                                   \
    void __tsan_read##n(void *p) { access(p, n, READ, PC); }                       \
    void __tsan_write##n(void *p) { access(p, n, WRITE, PC); }                     \
    void __tsan_unaligned_read##n(void *p) { access(p, n, READ, PC); }             \
    void __tsan_unaligned_write##n(void *p) { access(p, n, WRITE, PC); }           \
    void __tsan_read##n##_pc(void *p, void *pc) { access(p, n, READ, pc); }        \
    void __tsan_write##n##_pc(void *p, void *pc) { access(p, n, WRITE, pc); }      \
    void __tsan_volatile_read##n(void *p) { access(p, n, READ, PC); }              \
    void __tsan_volatile_write##n(void *p) { access(p, n, WRITE, PC); }            \
    void __tsan_unaligned_volatile_read##n(void *p) { access(p, n, READ, PC); }    \
    void __tsan_unaligned_volatile_write##n(void *p) { access(p, n, WRITE, PC); }
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)

void __tsan_read_range(void *p, size_t bytes) { access(p, bytes, READ, PC); }
void __tsan_write_range(void *p, size_t bytes) { access(p, bytes, WRITE, PC); }

void *simt_memcpy(void *to, const void *from, size_t bytes)
{
    access(from, bytes, READ, PC);
    access(to, bytes, WRITE, PC);
    return memcpy(to, from, bytes);
}

void *simt_memmove(void *to, const void *from, size_t bytes)
{
    access(from, bytes, READ, PC);
    access(to, bytes, WRITE, PC);
    return memmove(to, from, bytes);
}

void *simt_memset(void *to, int value, size_t bytes)
{
    access(to, bytes, WRITE, PC);
    return memset(to, value, bytes);
}

int simt_memcmp(const void *a, const void *b, size_t bytes)
{
    access(a, bytes, READ, PC);
    access(b, bytes, READ, PC);
    return memcmp(a, b, bytes);
}

void __tsan_init(void) {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit(void) {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}

/* The argument behind the operands is the memory order; whatever it is, the emulator's atomics are sequentially consistent, and the checker's order only what fences say. */
#define ATOMIC_OPERATION(bits, T, name)                        \
    T __tsan_atomic##bits##_##name(volatile T *p, T v, int)    \
    {                                                          \
        access(p, sizeof(T), ATOMIC_UPDATE, PC);               \
        return __atomic_##name(p, v, __ATOMIC_SEQ_CST);        \
    }
#define ATOMICS(bits, T)                                                                                    \
    T __tsan_atomic##bits##_load(const volatile T *p, int)                                                  \
    {                                                                                                       \
        access(p, sizeof(T), ATOMIC_READ, PC);                                                              \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                        \
    }                                                                                                       \
    void __tsan_atomic##bits##_store(volatile T *p, T v, int)                                               \
    {                                                                                                       \
        access(p, sizeof(T), ATOMIC_UPDATE, PC);                                                            \
        __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                           \
    }                                                                                                       \
    T __tsan_atomic##bits##_exchange(volatile T *p, T v, int)                                               \
    {                                                                                                       \
        access(p, sizeof(T), ATOMIC_UPDATE, PC);                                                            \
        return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                                 \
    }                                                                                                       \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile T *p, T *expected, T v, int, int)            \
    {                                                                                                       \
        access(p, sizeof(T), ATOMIC_UPDATE, PC);                                                            \
        return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);      \
    }                                                                                                       \
    int __tsan_atomic##bits##_compare_exchange_weak(volatile T *p, T *expected, T v, int, int)              \
    {                                                                                                       \
        access(p, sizeof(T), ATOMIC_UPDATE, PC);                                                            \
        return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);      \
    }                                                                                                       \
    T __tsan_atomic##bits##_compare_exchange_val(volatile T *p, T expected, T v, int, int)                  \
    {                                                                                                       \
        access(p, sizeof(T), ATOMIC_UPDATE, PC);                                                            \
        __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);            \
        return expected;                                                                                    \
    }                                                                                                       \
    ATOMIC_OPERATION(bits, T, fetch_add)                                                                    \
    ATOMIC_OPERATION(bits, T, fetch_sub)                                                                    \
    ATOMIC_OPERATION(bits, T, fetch_and)                                                                    \
    ATOMIC_OPERATION(bits, T, fetch_or)                                                                     \
    ATOMIC_OPERATION(bits, T, fetch_xor)
ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)

/* __threadfence is sequentially consistent in the stand-in header, __threadfence_block is not. */
void __tsan_atomic_thread_fence(int order)
{
    if (in_operation && block.executor)
        fence(order == __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

void __tsan_atomic_signal_fence(int) {}

}
