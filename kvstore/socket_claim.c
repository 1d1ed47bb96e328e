#include "kvstore/socket_claim.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* The folder is what keeps other users away: on some systems a socket's own mode means nothing. */
static int folder_check(const char *socket_path, struct error *err)
{
    char copy[PATH_MAX];
    const char *folder;
    struct stat st;

    snprintf(copy, sizeof copy, "%s", socket_path);
    folder = dirname(copy);
    if (mkdir(folder, 0700) < 0 && errno != EEXIST)
        return error_set(err, -errno, "--socket %s: cannot make the folder %s: %s", socket_path, folder, strerror(errno));
    if (stat(folder, &st) < 0)
        return error_set(err, -errno, "--socket %s: %s", socket_path, strerror(errno));
    if (st.st_uid != geteuid() || (st.st_mode & 077))
        return error_set(err, -EPERM, "--socket %s: the folder %s belongs to user %u with mode %03o, but must belong to user %u with mode 700",
                         socket_path, folder, st.st_uid, st.st_mode & 0777, geteuid());
    return 0;
}

int socket_claim(const char *socket_path, int *ret_lock_fd, struct error *err)
{
    enum { PATH_LIMIT = sizeof(((struct sockaddr_un *)0)->sun_path) };
    char lock[PATH_LIMIT + 8];
    int fd, rc;

    if (strlen(socket_path) >= PATH_LIMIT)
        return error_set(err, -ENAMETOOLONG, "--socket %s: at most %d characters", socket_path, PATH_LIMIT - 1);
    rc = folder_check(socket_path, err);
    if (rc < 0)
        return rc;
    snprintf(lock, sizeof lock, "%s.lock", socket_path);
    fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return error_set(err, -errno, "%s: %s", lock, strerror(errno));
    if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        rc = errno == EWOULDBLOCK ? error_set(err, -EADDRINUSE, "--socket %s: another store runs there", socket_path)
                                  : error_set(err, -errno, "%s: %s", lock, strerror(errno));
        goto fail;
    }
    if (unlink(socket_path) < 0 && errno != ENOENT) {
        rc = error_set(err, -errno, "--socket %s: %s", socket_path, strerror(errno));
        goto fail;
    }
    *ret_lock_fd = fd;
    return 0;
fail:
    close(fd);
    return rc;
}
