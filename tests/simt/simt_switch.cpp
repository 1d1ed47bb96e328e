/* Switching between fibers: callee-saved registers and the stack pointer, a dozen instructions where swapcontext makes a system call. */
#include "tests/simt/simt_private.h"
#include <cstdlib>
#include <sys/mman.h>
#ifdef SIMT_ASAN
#include <pthread.h>
#include <sanitizer/asan_interface.h>
#endif

namespace simt {

enum { STACK_BYTES = FIBER_STACK_BYTES, GUARD_BYTES = 4096 };

#if defined(__x86_64__)
extern "C" void simt_switch(void **save_stack_pointer, void *stack_pointer);
asm(".text\n"
    ".globl simt_switch\n"
    ".type simt_switch, @function\n"
    "simt_switch:\n"
    "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
    "    ret\n"
    ".size simt_switch, .-simt_switch\n");
enum { SAVED_WORDS = 6 };
#else
#error "the emulator's fiber switch is written for x86-64"
#endif

/* Frames that were left without a return stay poisoned: for the next fiber, and behind munmap for whatever is mapped there then. */
static void stack_clean(void *stack)
{
#ifdef SIMT_ASAN
    __asan_unpoison_memory_region(stack, STACK_BYTES);
#else
    (void)stack;
#endif
}

static void *stack_take(Executor *e)
{
    if (!e->free_stacks.empty()) {
        void *stack = e->free_stacks.back();
        e->free_stacks.pop_back();
        stack_clean(stack);
        return stack;
    }
    void *mapping = mmap(nullptr, STACK_BYTES + GUARD_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED || mprotect(mapping, GUARD_BYTES, PROT_NONE) != 0)
        report("no memory for a fiber's stack", "");
    return (char *)mapping + GUARD_BYTES;
}

void executor_free()
{
    if (executor)
        for (void *stack : executor->free_stacks) {
            stack_clean(stack);
            munmap((char *)stack - GUARD_BYTES, STACK_BYTES + GUARD_BYTES);
        }
    delete executor;
    executor = nullptr;
}

#ifdef SIMT_ASAN
/* AddressSanitizer must know which stack is in use. `main` is the OS thread's own. */
static thread_local const void *main_bottom;
static thread_local size_t main_bytes;

static void asan_leave(const void *bottom, size_t bytes, void **fake)
{
    __sanitizer_start_switch_fiber(fake, bottom, bytes);
}

static void find_main_stack()
{
    pthread_attr_t attributes;
    void *bottom;
    if (main_bottom || pthread_getattr_np(pthread_self(), &attributes) != 0)
        return;
    pthread_attr_getstack(&attributes, &bottom, &main_bytes);
    pthread_attr_destroy(&attributes);
    main_bottom = bottom;
}
#define ASAN_LEAVE(bottom, bytes, fake) asan_leave(bottom, bytes, fake)
#define ASAN_ENTER(fake) __sanitizer_finish_switch_fiber(fake, nullptr, nullptr)
#else
#define ASAN_LEAVE(bottom, bytes, fake) (void)(fake)
#define ASAN_ENTER(fake) (void)(fake)
static void find_main_stack() {}
#endif

static Fiber *pick(Executor *e)
{
    if (e->ready_warps == 0)
        return nullptr;
    uint32_t warps = e->ready_warps, lanes;
    unsigned w, l;
    if (e->random.state == 0) {
        w = (unsigned)__builtin_ctz(warps);
        l = (unsigned)__builtin_ctz(e->warps[w].ready);
        return &e->fibers[w * WARP + l];
    }
    for (unsigned skip = (unsigned)(e->random.next() % (unsigned)__builtin_popcount(warps)); skip > 0; skip--)
        warps &= warps - 1;
    w = (unsigned)__builtin_ctz(warps);
    lanes = e->warps[w].ready;
    for (unsigned skip = (unsigned)(e->random.next() % (unsigned)__builtin_popcount(lanes)); skip > 0; skip--)
        lanes &= lanes - 1;
    l = (unsigned)__builtin_ctz(lanes);
    return &e->fibers[w * WARP + l];
}

static void take_turn(Executor *e, Fiber *f)
{
    Warp &w = e->warps[f->warp];
    w.ready &= ~(1u << f->lane);
    if (w.ready == 0)
        e->ready_warps &= ~(1u << f->warp);
    f->state = FIBER_RUNNING;
    e->current = f;
    self = &f->view;
}

void fiber_ready(Fiber *f)
{
    if (f->state != FIBER_NEW)
        f->state = FIBER_READY;
    executor->warps[f->warp].ready |= 1u << f->lane;
    executor->ready_warps |= 1u << f->warp;
}

static void report_deadlock(Executor *e)
{
    std::string detail = e->kernel->shape.name;
    unsigned n = 0;
    for (unsigned i = 0; i < e->n_threads; i++)
        if (e->fibers[i].state == FIBER_BLOCKED && n++ < 4)
            detail += "; " + fiber_name(&e->fibers[i]) + " waits at " + e->fibers[i].waits_at;
    report("deadlock: no thread of the block can run", detail + "; " + std::to_string(n) + " wait, " + std::to_string(e->n_threads - e->n_live) + " have exited");
}

/* One stack runs threads until one of them blocks; a thread that ends hands its stack to the next new one. */
static void fiber_main()
{
    Executor *e = executor;
    ASAN_ENTER(nullptr);
    for (;;) {
        e->kernel->call(e->kernel->pack.get());
        Fiber *f = e->current, *next;
        copies_at_exit(f);
        f->state = FIBER_DONE;
        e->n_live--;
        e->warps[f->warp].exited |= 1u << f->lane;
        meetings_after_exit(f);
        barriers_after_exit();
        next = pick(e);
        if (!next && e->n_live > 0)
            report_deadlock(e);
        if (next && next->state == FIBER_NEW) {
            next->stack = f->stack;
            take_turn(e, next);
            continue;
        }
        e->free_stacks.push_back(f->stack);
        if (next) {
            fiber_switch_in(next, &f->stack_pointer);
        } else {
            self = nullptr;
            ASAN_LEAVE(main_bottom, main_bytes, nullptr);
            simt_switch(&f->stack_pointer, e->main_stack_pointer);
        }
        abort(); /* nobody comes back to a thread that has ended */
    }
}

void fiber_switch_in(Fiber *f, void **save)
{
    Executor *e = executor;
    void *fake = nullptr;
    find_main_stack();
    if (f->state == FIBER_NEW) {
        f->stack = stack_take(e);
        void **top = (void **)((char *)f->stack + STACK_BYTES) - 1; /* the entry sees the alignment of a call */
        *--top = (void *)fiber_main;
        top -= SAVED_WORDS;
        for (int i = 0; i < SAVED_WORDS; i++)
            top[i] = nullptr;
        f->stack_pointer = top;
    }
    take_turn(e, f);
    ASAN_LEAVE(f->stack, STACK_BYTES, &fake);
    simt_switch(save, f->stack_pointer);
    ASAN_ENTER(fake);
}

static void run_another()
{
    Executor *e = executor;
    Fiber *f = e->current, *next = pick(e);
    if (!next)
        report_deadlock(e);
    if (next == f)
        take_turn(e, f);
    else
        fiber_switch_in(next, &f->stack_pointer);
}

void fiber_block(const char *what)
{
    Fiber *f = executor->current;
    f->state = FIBER_BLOCKED;
    f->waits_at = what;
    run_another();
}

void fiber_yield()
{
    fiber_ready(executor->current);
    run_another();
}

/* Runs the block that the executor's fields describe. */
void fibers_run()
{
    Executor *e = executor;
    fiber_switch_in(pick(e), &e->main_stack_pointer);
}

} /* namespace simt */
