#include "formats/file_map.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static int map_descriptor(int fd, const char *path, struct file_map *ret_map, struct error *err)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return error_set(err, -errno, "%s: cannot be examined: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return error_set(err, -EINVAL, "%s: is not a regular file", path);
    struct file_map map = {.size = (size_t)st.st_size};
    if (map.size > 0) {
        void *data = mmap(NULL, map.size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (data == MAP_FAILED)
            return error_set(err, -errno, "%s: cannot be mapped: %s", path, strerror(errno));
        map.data = data;
    }
    *ret_map = map;
    return 0;
}

int file_map_open(const char *path, struct file_map *ret_map, struct error *err)
{
    /* Non-blocking, so that the path of a FIFO is refused instead of waited on. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return error_set(err, -errno, "%s: cannot be opened: %s", path, strerror(errno));
    int r = map_descriptor(fd, path, ret_map, err);
    close(fd);
    return r;
}

void file_map_close(struct file_map *map)
{
    if (map->data)
        munmap((void *)map->data, map->size);
    *map = (struct file_map){0};
}
