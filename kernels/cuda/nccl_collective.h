/* Waits on a device that has a communicator: a collective whose peer is gone never ends by itself, so nobody may block in the driver while one may be in flight. Owner thread. */
#pragma once
#include "kernels/collective.h"
#include <cuda_runtime_api.h>

/* Until the stream, the event or whatever collectives were submitted are done; then 0, or the error that broke the communicator, which by then has been aborted so that nothing waits on the
 * device any more. A CUDA error as cuda_error gives it. */
int nccl_wait_stream(struct collective *collective, cudaStream_t stream);
int nccl_wait_event(struct collective *collective, cudaEvent_t event);
int nccl_wait_all(struct collective *collective);
/* The stream, which has been waited for, goes away. */
void nccl_forget_stream(struct collective *collective, const struct stream *stream);

const struct collective_ops *nccl_collective_ops(void);
