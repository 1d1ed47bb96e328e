/* Inside the checker. Operations of the device run one at a time here (lazy streams, operation_begin holds a lock), so that one running operation and one running block exist and records can be
 * compared by number.
 *
 * Every word of four bytes of memory that is watched has a Cell: who wrote it last, who has read it since. A word that is accessed in parts has a Cell for each byte. An Access is compared with those
 * in the cell: one that is not ordered after them is a race (vector clocks, as in FastTrack: Flanagan and Freund, PLDI 2009; epochs where a barrier of the whole block orders all of its threads).
 *
 * Order inside a block: an *interval* is the run of a block from one barrier of all its threads to the next. Intervals are numbered on and on, so a number tells block, launch and age. Accesses of
 * different intervals of a block are ordered. Inside an interval each thread has a clock and knows of each other thread up to which of its clocks it is ordered after it; __syncwarp and barriers of
 * some threads join what their threads know. Shuffles, votes, reductions, ldmatrix and mma.sync order nothing. */
#pragma once
#include "tests/simt/simt_private.h"
#include <mutex>
#include <string>

namespace simt {
namespace check {

enum AccessFlag : uint32_t {
    ATOMIC = 1,
    BY_LANES = 2,  /* several lanes of the thread's warp: Cell's mask has them; clock: the largest of theirs */
    BY_WARPS = 4,  /* several warps of the block: Cell's mask has them */
    BY_BLOCKS = 8, /* several blocks of the launch */
    UNWRITTEN = 16 /* a copy of bytes that were never written */
};

/* Who touched a word, and when. */
struct Access {
    uint32_t operation; /* 0: nobody */
    uint32_t interval;  /* 0: an operation without threads, or the host */
    uint32_t pc;        /* the lower half: names a place in the program well enough */
    uint32_t thread : 10, clock : 17, flags : 5;
};

struct Cell {
    Access write, read;
    uint32_t write_mask, read_mask; /* of lanes or warps: AccessFlag */
    uint32_t more_reads;            /* reads of other streams that the last one is not ordered after: a place in that list, 0: none */
    uint32_t in_flight : 31;        /* first interval of the block that has a cp.async on its way to here; 0: none */
    uint32_t split : 1;             /* the word's bytes have cells of their own */
};

struct Area {
    uintptr_t base;
    size_t bytes;
    MemoryKind kind;
    bool is_shared, is_closed;
    uintptr_t shadow_base;
    Cell *words, *parts;     /* of [shadow_base, ...): one for four bytes; one for a byte, used where a word is split */
    uint32_t last_operation; /* that touched it */
    std::vector<uint32_t> users; /* the operations that did, the last of each stream */
    std::vector<void *> made_at; /* stack of the allocation */
};

struct Operation {
    std::string name;
    unsigned stream; /* 0: a moment of the host */
    uint64_t serial; /* in its stream */
    std::shared_ptr<const Clock> clock;
    std::vector<void *> made_at;
};

enum AccessKind { READ, WRITE, ATOMIC_READ, ATOMIC_UPDATE };

/* ---- order ---- */
extern std::recursive_mutex &lock; /* of everything here; held while an operation runs */
extern thread_local bool in_operation;
extern uint32_t running;          /* the operation; 0: none */
const Operation &operation(uint32_t id);
uint32_t host_moment();           /* the host's accesses until the next submission, as an operation */
bool operation_is_over(uint32_t id); /* ordered before what runs: before the running operation, or before the host */

struct Block {
    const Executor *executor; /* null: the running operation has no threads */
    uint32_t first, interval;
    bool is_joined; /* some threads of different warps met in this interval */
};
extern Block block;
uint32_t thread_clock(unsigned thread);
/* `mask`: of the cell that the access stands in. For an access of the running operation. */
bool is_ordered_for(const Access &a, uint32_t mask, unsigned thread);
void fence(bool of_device);          /* __threadfence, __threadfence_block */
void atomic_met(uintptr_t address);  /* an atomic operation on it: may publish and learn what fences ordered */
std::string block_name(uint32_t interval); /* of the running operation */

/* ---- memory ---- */
Area *area_find(uintptr_t address, bool device_only); /* null: not watched. A closed area of the device is found, and so are the 4 KiB pages around an open one */
Area *area_of_host(uintptr_t address);
extern Area dynamic_shared, static_shared;
extern uintptr_t region_base, region_size;
void shared_areas_set(const void *function, const unsigned char *shared, size_t bytes);
Cell *cells_map(size_t n);
bool is_program_memory(uintptr_t address); /* constants and code of the loaded modules */

/* ---- accesses ---- */
void touch(Area &area, uintptr_t address, size_t bytes, AccessKind kind, const void *pc);
void touch_by_warp(Area &area, uintptr_t address, size_t bytes, unsigned warp, const void *pc);
std::vector<uint32_t> &more_reads(uint32_t at);

/* ---- the access profiler (simt_check_profile.cpp): SIMT_PROFILE names the file that it writes at the end; all is empty without ---- */
enum ProfileSpace { PROFILE_GLOBAL, PROFILE_SHARED, PROFILE_HOST /* pinned or registered */ };
enum ProfileOp { PROFILE_LOAD, PROFILE_STORE, PROFILE_ATOMIC, PROFILE_COPY /* cp.async */, PROFILE_MATRIX /* ldmatrix */ };
extern const bool profiling;
void profile_lane(ProfileSpace space, ProfileOp op, unsigned warp, unsigned lane, uintptr_t address, size_t bytes, const void *pc);
void profile_thread(ProfileSpace space, AccessKind kind, uintptr_t address, size_t bytes, const void *pc); /* the current one */
void profile_copy(uintptr_t to, size_t bytes, uintptr_t from, size_t from_bytes, const void *pc);
/* Where lanes of a warp, of several warps, of the block come together: what each executes next begins there. */
void profile_warp_end(unsigned warp);
void profile_barrier(const std::vector<Fiber *> &met);
void profile_block_begin();
void profile_block_end();

/* ---- reports ---- */
std::string place_of(const void *pc);
std::vector<std::string> places_of(const std::vector<const void *> &pcs); /* the same for many, in less time */
std::string place_of_stack(const std::vector<void *> &stack);
std::vector<void *> stack_now();
/* A line of what happened, then lines of who and where; then abort. `cell` and `other` may be null. */
[[noreturn]] void report_access(const char *what, const Area &area, uintptr_t address, size_t bytes, AccessKind kind, const void *pc, const Access *other, const char *other_did);

} /* namespace check */
} /* namespace simt */
