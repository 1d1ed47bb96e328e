/* Controls of the emulated device, for tests. C and C++. Call simt_configure before the first call of the runtime; the environment (SIMT_SEED, SIMT_THREADS=1) sets the same. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* seed 0: threads of a block in ascending order, streams in order of creation. Other seeds: random orders, asynchronous copies land early or late.
 * threads: one OS thread for each stream. Otherwise lazy: operations run when the host waits for them, in an order that the seed draws among what the events allow, and
 * device memory cannot be touched by the host at all. */
void simt_configure(uint64_t seed, bool threads);
/* The n-th cudaMalloc from now on fails; 0: none. */
void simt_fail_malloc(int n);
/* The n-th launch from now on of a kernel with `name` in its name fails, and from then on so does every call: the device is broken. Also by SIMT_FAIL_LAUNCH=NAME:N. */
void simt_fail_launch(const char *name, int n);
/* From now on the driver has no batches of copies, or has them. */
void simt_refuse_batches(bool refuse);
/* From now on a kernel faults where it touches registered memory, unless it has `name` in its name; NULL: all may. In lazy mode alone. */
void simt_registered_readers(const char *name);
/* Threads of kernels run so far in this process. */
uint64_t simt_threads_run(void);

#ifdef __cplusplus
}
#endif
