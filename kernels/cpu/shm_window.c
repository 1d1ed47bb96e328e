#include "kernels/cpu/shm_window.h"
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    NONCE_BYTES = 16,
    KIND_JOIN = INT_MAX, /* no caller's */
    SPINS = 200,      /* looks before a wait sleeps; ranks may share cores, so few */
    SLICE_US = 20000, /* a sleep at most: then deadline, breakage and the lives of the others are looked at */
};
static const uint64_t window_magic = 0x314d485350444954; /* "TIDPSHM1" */

/* What a rank says of its step. Padded so that no two ranks write to one cache line. */
struct rank_state {
    _Atomic uint32_t posted; /* steps posted so far: the futex that the others wait on */
    _Atomic int32_t pid;     /* 0: not there yet */
    _Atomic uint32_t left;   /* has closed the window */
    uint32_t pad;
    struct { uint64_t kind, length; } step[2]; /* written before posted */
    uint8_t pad_line[16];
};
static_assert(sizeof(struct rank_state) == 64, "one cache line");

struct window_memory {
    uint64_t magic;
    _Atomic uint32_t n_ranks; /* 0 until the first rank has opened it */
    _Atomic int32_t broken;   /* 0 or an errno */
    uint8_t nonce[NONCE_BYTES];
    uint8_t pad[32];
    struct rank_state ranks[COLLECTIVE_MAX_RANKS];
    /* float slots[n_ranks][2][SHM_SLOT_FLOATS] follow */
};
static_assert(sizeof(struct window_memory) == 64 * (1 + COLLECTIVE_MAX_RANKS), "no padding");

/* What the opaque id holds. */
struct window_id {
    uint64_t magic;
    int32_t pid, fd;
    uint8_t nonce[NONCE_BYTES];
};
static_assert(sizeof(struct window_id) <= COLLECTIVE_ID_BYTES, "fits the id");

struct shm_window {
    struct window_memory *memory;
    size_t bytes;
    int rank, n_ranks;
    uint32_t step;                      /* posted by this rank */
    uint64_t deadline_us;
    int pidfd[COLLECTIVE_MAX_RANKS];    /* of the other ranks' processes; -1: the same process, or a kernel without pidfds */
};

size_t shm_window_bytes(int n_ranks)
{
    return sizeof(struct window_memory) + (size_t)n_ranks * 2 * SHM_SLOT_FLOATS * sizeof(float);
}

static int fail_errno(struct error *err, const char *what)
{
    const int code = errno;
    return error_set(err, -code, "shared memory of the ranks: %s: %s", what, strerror(code));
}

/* ---- making ---- */

/* Room for as many ranks as there may be; what nobody touches takes no memory. */
static int fill_memory(int fd, const uint8_t nonce[NONCE_BYTES], struct error *err)
{
    if (ftruncate(fd, (off_t)shm_window_bytes(COLLECTIVE_MAX_RANKS)) < 0)
        return fail_errno(err, "ftruncate");
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        return fail_errno(err, "sealing");
    struct window_memory *m = mmap(NULL, sizeof(*m), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (m == MAP_FAILED)
        return fail_errno(err, "mmap");
    memcpy(m->nonce, nonce, NONCE_BYTES);
    m->magic = window_magic;
    munmap(m, sizeof(*m));
    return 0;
}

int shm_window_make(uint8_t ret_id[COLLECTIVE_ID_BYTES], struct error *err)
{
    struct window_id id = {.magic = window_magic, .pid = (int32_t)getpid()};
    if (getrandom(id.nonce, sizeof(id.nonce), 0) != sizeof(id.nonce))
        return fail_errno(err, "getrandom");
    id.fd = memfd_create("tidepool-ranks", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (id.fd < 0)
        return fail_errno(err, "memfd_create");
    int r = fill_memory(id.fd, id.nonce, err);
    if (r < 0) {
        close(id.fd);
        return r;
    }
    memset(ret_id, 0, COLLECTIVE_ID_BYTES);
    memcpy(ret_id, &id, sizeof(id));
    return 0;
}

/* ---- waiting ---- */

static void futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void futex_sleep(_Atomic uint32_t *word, uint32_t seen, uint64_t us)
{
    const struct timespec most = {.tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000) * 1000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &most, NULL, 0);
}

int shm_window_status(const struct shm_window *window)
{
    return -atomic_load_explicit(&window->memory->broken, memory_order_acquire);
}

void shm_window_break(struct shm_window *window, int error)
{
    int32_t whole = 0;
    atomic_compare_exchange_strong(&window->memory->broken, &whole, -error);
    for (int i = 0; i < window->n_ranks; i++)
        futex_wake_all(&window->memory->ranks[i].posted);
}

static bool rank_has_posted(const struct rank_state *rank, uint32_t step, uint32_t *ret_posted)
{
    *ret_posted = atomic_load_explicit(&rank->posted, memory_order_acquire);
    return (int32_t)(*ret_posted - step) >= 0;
}

/* A process that is gone, or that has closed its end, posts nothing any more; what it posted before counts. */
static bool rank_is_gone(const struct shm_window *window, int i)
{
    struct pollfd life = {.fd = window->pidfd[i], .events = POLLIN};
    return atomic_load(&window->memory->ranks[i].left) || (life.fd >= 0 && poll(&life, 1, 0) > 0);
}

/* Until rank i has posted `step`. */
static int wait_for_rank(struct shm_window *window, int i, uint32_t step, uint64_t end_us)
{
    struct rank_state *rank = &window->memory->ranks[i];
    uint32_t posted;
    for (int spin = 0; !rank_has_posted(rank, step, &posted); spin++) {
        const int broken = shm_window_status(window);
        if (broken < 0)
            return broken;
        if (spin < SPINS)
            continue;
        const uint64_t now_us = clock_now_us();
        if (now_us >= end_us)
            return -ETIMEDOUT;
        if (rank_is_gone(window, i) && !rank_has_posted(rank, step, &posted))
            return -ECONNRESET;
        futex_sleep(&rank->posted, posted, end_us - now_us < SLICE_US ? end_us - now_us : SLICE_US);
    }
    return 0;
}

int shm_window_exchange(struct shm_window *window, uint32_t kind, uint64_t length)
{
    struct window_memory *m = window->memory;
    struct rank_state *own = &m->ranks[window->rank];
    const unsigned side = window->step % 2;
    const uint64_t end_us = clock_now_us() + window->deadline_us;
    int r = shm_window_status(window);
    if (r < 0)
        return r;
    own->step[side].kind = kind;
    own->step[side].length = length;
    window->step++;
    atomic_store_explicit(&own->posted, window->step, memory_order_release);
    futex_wake_all(&own->posted);
    for (int i = 0; r == 0 && i < window->n_ranks; i++) {
        r = wait_for_rank(window, i, window->step, end_us);
        if (r == 0 && (m->ranks[i].step[side].kind != kind || m->ranks[i].step[side].length != length))
            r = -EPROTO;
    }
    if (r < 0)
        shm_window_break(window, r);
    return r < 0 ? shm_window_status(window) : 0;
}

static float *slot_at(const struct shm_window *window, int rank, unsigned side)
{
    return (float *)(window->memory + 1) + ((size_t)rank * 2 + side) * SHM_SLOT_FLOATS;
}

float *shm_window_begin(struct shm_window *window)
{
    return slot_at(window, window->rank, window->step % 2);
}

const float *shm_window_slot(const struct shm_window *window, int rank)
{
    return slot_at(window, rank, (window->step - 1) % 2);
}

int shm_window_rank(const struct shm_window *window)
{
    return window->rank;
}

int shm_window_ranks(const struct shm_window *window)
{
    return window->n_ranks;
}

/* ---- opening ---- */

/* The descriptor of another process' memory is checked for what it is: someone else may have that number by now. */
static int check_memory(int fd, struct error *err)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return fail_errno(err, "fstat");
    const int seals = fcntl(fd, F_GET_SEALS);
    if (st.st_size != (off_t)shm_window_bytes(COLLECTIVE_MAX_RANKS) || seals < 0 || !(seals & F_SEAL_SHRINK))
        return error_set(err, -EINVAL, "the id names memory that is none of a group's");
    return 0;
}

static int map_memory(struct shm_window *window, const struct window_id *id, struct error *err)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)id->pid, (int)id->fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return error_set(err, -EINVAL, "%s: %s: the group's first rank is not there, or not ours", path, strerror(errno));
    int r = check_memory(fd, err);
    if (r == 0) {
        void *memory = mmap(NULL, window->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (memory == MAP_FAILED)
            r = fail_errno(err, "mmap");
        else
            window->memory = memory;
    }
    close(fd);
    if (r == 0 && (window->memory->magic != window_magic || memcmp(window->memory->nonce, id->nonce, NONCE_BYTES) != 0))
        return error_set(err, -EINVAL, "the id names another group's memory");
    return r;
}

/* Takes the rank's place and waits for the others, whose processes can be watched from then on. */
static int join(struct shm_window *window, struct error *err)
{
    struct window_memory *m = window->memory;
    int32_t nobody = 0;
    uint32_t n_ranks = 0;
    if (!atomic_compare_exchange_strong(&m->n_ranks, &n_ranks, (uint32_t)window->n_ranks) && n_ranks != (uint32_t)window->n_ranks)
        return error_set(err, -EINVAL, "rank %d has %d ranks, the group %u", window->rank, window->n_ranks, n_ranks);
    if (!atomic_compare_exchange_strong(&m->ranks[window->rank].pid, &nobody, (int32_t)getpid()))
        return error_set(err, -EINVAL, "rank %d is taken by process %d", window->rank, (int)nobody);
    int r = shm_window_exchange(window, KIND_JOIN, 0);
    if (r < 0)
        return error_set(err, r, "not all of %d ranks came: %s", window->n_ranks, strerror(-r));
    for (int i = 0; i < window->n_ranks; i++) {
        const pid_t pid = atomic_load(&m->ranks[i].pid);
        if (pid != getpid())
            window->pidfd[i] = (int)syscall(SYS_pidfd_open, pid, 0);
    }
    return 0;
}

int shm_window_open(const uint8_t id_bytes[COLLECTIVE_ID_BYTES], int rank, int n_ranks, uint64_t deadline_us, struct shm_window **ret_window, struct error *err)
{
    struct window_id id;
    memcpy(&id, id_bytes, sizeof(id));
    if (n_ranks < 2 || n_ranks > COLLECTIVE_MAX_RANKS || rank < 0 || rank >= n_ranks || deadline_us == 0 || id.magic != window_magic)
        return error_set(err, -EINVAL, "rank %d of %d: the id is not this group's", rank, n_ranks);
    struct shm_window *window = calloc(1, sizeof(*window));
    if (!window)
        return error_set(err, -ENOMEM, "no memory for a rank");
    window->rank = rank;
    window->n_ranks = n_ranks;
    window->deadline_us = deadline_us;
    window->bytes = shm_window_bytes(n_ranks);
    for (int i = 0; i < COLLECTIVE_MAX_RANKS; i++)
        window->pidfd[i] = -1;
    int r = map_memory(window, &id, err);
    if (r == 0)
        r = join(window, err);
    /* All have it mapped, or it is of no use to anybody. */
    if (rank == 0 && id.pid == (int32_t)getpid())
        close(id.fd);
    if (r < 0) {
        shm_window_close(window);
        return r;
    }
    *ret_window = window;
    return 0;
}

void shm_window_close(struct shm_window *window)
{
    if (!window)
        return;
    for (int i = 0; i < window->n_ranks; i++)
        if (window->pidfd[i] >= 0)
            close(window->pidfd[i]);
    if (window->memory) {
        struct rank_state *own = &window->memory->ranks[window->rank];
        if (window->step > 0) {
            atomic_store(&own->left, 1);
            futex_wake_all(&own->posted);
        }
        munmap(window->memory, window->bytes);
    }
    free(window);
}
