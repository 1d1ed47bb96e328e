/* Device memory that cuBLAS, cuDNN and NCCL take for themselves, with their kernels' code: no library says how much, so it is what the driver has less of afterwards. Where another process
 * allocates on the same GPU meanwhile that is counted too; measured is only while a library opens or builds. Owner thread only. */
#pragma once
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif

struct device;

struct library_mark {
    size_t free, held; /* bytes of the driver, and of the arena */
};

/* Bytes that the driver would still give; 0 when it does not say. */
size_t cuda_free_memory(void);
void library_memory_begin(const struct device *device, struct library_mark *ret_mark);
/* Returns what went since, which is counted (MEM_LIBRARIES). */
size_t library_memory_end(struct device *device, const struct library_mark *mark);
/* So much of it has been given back. */
void library_memory_return(struct device *device, size_t bytes);
#ifdef __cplusplus
}
#endif
