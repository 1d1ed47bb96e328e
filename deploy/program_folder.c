#include "deploy/program_folder.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <string.h>
#include <unistd.h>

int program_folder(char *ret_folder, size_t size)
{
    ssize_t n = readlink("/proc/self/exe", ret_folder, size);
    if (n < 0)
        return -errno;
    if ((size_t)n == size)
        return -ENAMETOOLONG;
    ret_folder[n] = '\0';
    char *slash = strrchr(ret_folder, '/');
    ASSERT(slash);
    *slash = '\0';
    return 0;
}
