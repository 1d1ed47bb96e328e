/* What the emulator tells the race and memory checker (tests/simt/README.md, "the checked build"). With SIMT_CHECK the functions are those of simt_check_*.cpp, else they are empty.
 *
 * Who calls what: simt_memory.cpp the areas, simt_stream.cpp the order of operations, simt_block.cpp and simt_warp.cpp the order of threads, and whoever stands in for an engine or a library of the
 * device (copies, GEMM) the ranges that it reads and writes. Accesses of compiled code come by themselves, through the functions of simt_check_hooks.cpp. */
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace simt {

struct Fiber;
struct Executor;
enum MemoryKind : int;

namespace check {

#ifdef SIMT_CHECK
enum { ENABLED = 1 };

/* For each stream the number of its operations that are over, as somebody knows it; [0] is the host's time. */
typedef std::vector<uint64_t> Clock;

struct StreamClock {
    unsigned stream = 0; /* its place in a Clock; 0: none yet */
    Clock clock;
};
typedef uint32_t OperationId; /* 0: none */

/* ---- areas ---- */
void area_opened(const void *base, size_t bytes, MemoryKind kind);
void area_closed(const void *base); /* freed or unregistered: reports work that may still use it */
void region_opened(const void *base, size_t bytes);

/* ---- operations of streams, in the order of their submission ---- */
OperationId submitted(StreamClock &stream, const char *name);
void stream_waits(StreamClock &stream, const Clock &for_clock);
void host_waited(const Clock &for_clock);
void operation_begin(OperationId operation); /* until the end nothing else runs on the device */
void operation_end();

/* ---- what an operation without threads does ---- */
void range_read(const void *from, size_t bytes);
void range_written(void *to, size_t bytes);
void range_copied(void *to, const void *from, size_t bytes); /* bytes that were never written stay so */

/* ---- threads of a block ---- */
void block_begin(const Executor &e, const void *function, const unsigned char *shared, size_t shared_bytes);
void barrier_opened(const std::vector<Fiber *> &met, bool is_whole_block);
void warp_synced(unsigned warp, uint32_t mask);
void warp_met(unsigned warp, bool is_whole_warp); /* in a collective of any kind */
void warp_read(unsigned warp, unsigned lane, const void *row, size_t bytes, const void *pc); /* by all its lanes; `lane` names the row */
void copy_started(void *to, size_t bytes, const void *from, size_t from_bytes, const void *pc);
void copy_landed(void *to, size_t bytes, const void *from, size_t from_bytes, const void *pc);
#else
enum { ENABLED = 0 };
struct Clock {};
struct StreamClock {
    Clock clock;
};
struct OperationId {};

inline void area_opened(const void *, size_t, MemoryKind) {}
inline void area_closed(const void *) {}
inline void region_opened(const void *, size_t) {}
inline OperationId submitted(StreamClock &, const char *) { return {}; }
inline void stream_waits(StreamClock &, const Clock &) {}
inline void host_waited(const Clock &) {}
inline void operation_begin(OperationId) {}
inline void operation_end() {}
inline void range_read(const void *, size_t) {}
inline void range_written(void *, size_t) {}
inline void range_copied(void *, const void *, size_t) {}
inline void block_begin(const Executor &, const void *, const unsigned char *, size_t) {}
inline void barrier_opened(const std::vector<Fiber *> &, bool) {}
inline void warp_synced(unsigned, uint32_t) {}
inline void warp_met(unsigned, bool) {}
inline void warp_read(unsigned, unsigned, const void *, size_t, const void *) {}
inline void copy_started(void *, size_t, const void *, size_t, const void *) {}
inline void copy_landed(void *, size_t, const void *, size_t, const void *) {}
#endif

} /* namespace check */
} /* namespace simt */
