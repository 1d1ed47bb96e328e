/* LAUNCH(kernel, grid, block, shared_bytes, stream, arguments...) on a struct stream: 0 or a negative errno. In a step the arguments are noted as the bytes of the kernel's parameters: the padding
 * of a struct counts, so fill it with zeros first ({}), or its launches are never the same ones. */
#pragma once
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/submit.h"
#include <type_traits>

#define LAUNCH(kernel, grid, block, shared_bytes, s, ...) \
    (submit_kernel_noted(s, kernel, grid, block, shared_bytes, __VA_ARGS__) ? 0 : cuda_error(LAUNCH_ON(kernel, grid, block, shared_bytes, (s)->cuda, __VA_ARGS__)))

/* An argument as the parameter P that it becomes. */
template <class P, class A> static inline void submit_note_argument(struct step *step, const A &argument)
{
    if constexpr (std::is_same<P, A>::value) {
        step_note(step, &argument, sizeof argument);
    } else {
        const P parameter = argument;
        step_note(step, &parameter, sizeof parameter);
    }
}

/* Notes the launch where a step wants it. Whether that is all there is to do. */
template <class... P, class... A> static inline bool submit_kernel_noted(struct stream *s, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, const A &...arguments)
{
    struct step *step = step_noting(s);
    if (!step)
        return false;
    const uintptr_t shape[] = {(uintptr_t)kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes};
    step_note_begin(step, s, SUBMIT_KERNEL);
    step_note(step, shape, sizeof shape);
    (submit_note_argument<P>(step, arguments), ...);
    return step->mode == STEP_QUIET;
}

/* Before the launch of a kernel with that much dynamic shared memory. A step has run without a graph before, so that it is set. */
template <class K> static inline int submit_shared_bytes(struct stream *s, K *kernel, size_t bytes)
{
    return step_noting(s) ? 0 : cuda_error(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}
