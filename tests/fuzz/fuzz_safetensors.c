/* Any bytes as a safetensors file: every tensor of a set that opens can be read and is found by its name. */
#include "formats/safetensors.h"
#include <stdlib.h>

static volatile uint64_t sink; /* keeps the reads */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct safetensors *set;
    struct error err;
    if (safetensors_open_memory(data, size, &set, &err) < 0)
        return 0;
    for (size_t i = 0; i < safetensors_n_tensors(set); i++) {
        const struct st_tensor *t = safetensors_at(set, i);
        for (uint64_t j = 0; j < t->bytes; j++)
            sink += ((const uint8_t *)t->data)[j];
        if (safetensors_find(set, t->name) != t)
            abort();
    }
    safetensors_close(set);
    return 0;
}
