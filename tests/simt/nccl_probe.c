/* Loads libnccl.so.2 as the CUDA backend does and says what came of it. */
#include "kernels/cuda/nccl_api.h"
#include <stdio.h>

int main(void)
{
    const struct nccl_api *api, *again;
    struct error err = {0};
    if (nccl_api_load(&api, &err) < 0) {
        printf("refused: %s\n", err.text);
        return 1;
    }
    printf("%s\n", nccl_api_load(&again, NULL) == 0 && again == api ? "loaded" : "not loaded twice");
    return 0;
}
