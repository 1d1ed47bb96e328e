/* Loads libnccl.so.2 or libcudnn.so.9 (argument: nccl or cudnn) as the CUDA backend does and says what came of it. */
#include "kernels/cuda/cudnn_api.h"
#include "kernels/cuda/nccl_api.h"
#include <stdio.h>
#include <string.h>

static int load(const char *library, const void **ret_api, struct error *err)
{
    const struct nccl_api *nccl = NULL;
    const struct cudnn_api *cudnn = NULL;
    int r;

    if (strcmp(library, "nccl") == 0) {
        r = nccl_api_load(&nccl, err);
        *ret_api = nccl;
    } else {
        r = cudnn_api_load(&cudnn, err);
        *ret_api = cudnn;
    }
    return r;
}

int main(int argc, char **argv)
{
    const char *library = argc > 1 ? argv[1] : "";
    const void *api, *again;
    struct error err = {0};

    if (load(library, &api, &err) < 0) {
        printf("refused: %s\n", err.text);
        return 1;
    }
    printf("%s\n", load(library, &again, NULL) == 0 && again == api ? "loaded" : "not loaded twice");
    return 0;
}
