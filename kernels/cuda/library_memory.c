#include "kernels/cuda/library_memory.h"
#include "kernels/cuda/cuda_private.h"

size_t cuda_free_memory(void)
{
    size_t free_bytes = 0, total = 0;
    return cuda_error(cudaMemGetInfo(&free_bytes, &total)) == 0 ? free_bytes : 0;
}

void library_memory_begin(const struct device *device, struct library_mark *ret_mark)
{
    *ret_mark = (struct library_mark){.free = cuda_free_memory(), .held = device->arena.stats.total_now};
}

size_t library_memory_end(struct device *device, const struct library_mark *mark)
{
    const size_t now = cuda_free_memory(), left = now + device->arena.stats.total_now - mark->held, took = now > 0 && mark->free > left ? mark->free - left : 0; /* 0: the device has failed */
    device->library_bytes += took;
    return took;
}

void library_memory_return(struct device *device, size_t bytes)
{
    device->library_bytes -= bytes;
}
