/* Loads libcudnn.so.9 as the CUDA backend does and says what came of it. */
#include "kernels/cuda/cudnn_api.h"
#include <stdio.h>

int main(void)
{
    const struct cudnn_api *api, *again;
    struct error err = {0};
    if (cudnn_api_load(&api, &err) < 0) {
        printf("refused: %s\n", err.text);
        return 1;
    }
    printf("%s\n", cudnn_api_load(&again, NULL) == 0 && again == api ? "loaded" : "not loaded twice");
    return 0;
}
