/* A few threads for work that would stall the loop: parsing a body, tokenizing a prompt, hashing its blocks. The loop's thread submits and is
 * told when a piece is done; between, the piece's data belongs to the pool's thread alone. */
#pragma once
#include "proto/base/loop.h"

struct work_pool;

struct work { /* embedded in the owner's struct, untouched until `done` */
    void (*run)(void *arg);  /* on a thread of the pool */
    void (*done)(void *arg); /* on the loop, exactly once */
    void *arg;
    struct work *next;       /* private */
};

int work_pool_create(struct loop *loop, int n_threads, struct work_pool **ret_pool);
/* Waits for the pieces that run; what is done or waiting is dropped without `done`. NULL is fine. */
void work_pool_free(struct work_pool *pool);
void work_pool_submit(struct work_pool *pool, struct work *work);
