/* A window of shared memory through which the ranks of one host exchange pieces of arrays, and in which they wait for one another.
 *
 * A memfd that rank 0's process makes and the others open through /proc, so that nothing is left behind however they end. Step by step, each rank writes its piece into its slot, posts it, waits for
 * the others' posts and reads their slots. There are two slots a rank, used in turn: who has seen all posts of step s knows that everybody is done with step s - 1, and may overwrite
 * the slots of that step in step s + 1. So a step needs one wait.
 *
 * One thread a rank; break may be called by any. Everything read from the window is checked before it is used: a rank's post is a number, a kind and a length, which must be the reader's own. */
#pragma once
#include "kernels/collective.h"
#include <stdbool.h>

enum { SHM_SLOT_FLOATS = 1 << 16 };

struct shm_window;

/* Makes the memory and its name. The descriptor stays open until rank 0 has opened the window, or the process ends. The errno of a system call. */
int shm_window_make(uint8_t ret_id[COLLECTIVE_ID_BYTES], struct error *err);
/* Returns when all ranks are there. -EINVAL (an id that names no such window, a rank that is taken), -ENOMEM, -ETIMEDOUT, -ECONNRESET. */
int shm_window_open(const uint8_t id[COLLECTIVE_ID_BYTES], int rank, int n_ranks, uint64_t deadline_us, struct shm_window **ret_window, struct error *err);
void shm_window_close(struct shm_window *window); /* NULL is fine */
int shm_window_rank(const struct shm_window *window);
int shm_window_ranks(const struct shm_window *window);

/* Begins a step: where this rank writes its piece, [SHM_SLOT_FLOATS]. */
float *shm_window_begin(struct shm_window *window);
/* Posts it as (kind, length), and waits until all ranks have posted the same. -ECONNRESET, -ETIMEDOUT, -EPROTO (a rank posted something else); then the window is broken. */
int shm_window_exchange(struct shm_window *window, uint32_t kind, uint64_t length);
/* Rank r's piece of the step whose exchange has returned, until the next exchange returns. */
const float *shm_window_slot(const struct shm_window *window, int rank);

/* 0, or the error that the window is broken with: every wait, on every rank, ends with it. */
int shm_window_status(const struct shm_window *window);
/* The first error stays. Any thread. */
void shm_window_break(struct shm_window *window, int error);
/* Of the part of the window that n_ranks use. */
size_t shm_window_bytes(int n_ranks);
