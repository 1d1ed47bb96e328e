/* A follower of a tensor-parallel group: joins its leader, and makes the leader's calls of the engine on its own rank (rank_group.h). What arrives is checked before anything acts on it, and a
 * leader that is gone is the end. Owner thread only. */
#pragma once
#include "kernels/collective.h"
#include "proto/base/error.h"
#include "proto/base/loop.h"
#include "worker/cache/engine.h"
#include "worker/group/rank_group.h"

struct rank_follower;

struct rank_follower_config {
    int degree, rank;     /* 1 <= rank < degree */
    const char *leader;   /* path of its socket, or "fd:N", a connected descriptor that was inherited */
    uint64_t timeout_us;  /* of every wait for the leader, but for others that load the model */
    const char *settings; /* as rank_group_config */
    uint64_t usage_us;    /* how often the leader hears what this process holds, where that has changed */
};

/* What a follower's owner does for it, from the loop. */
struct rank_follower_owner {
    void (*ended)(void *arg, int result, const char *why); /* once: with 0 after the leader's Stop, else with the reason */
    void (*usage)(void *arg, struct rank_usage *ret_usage);
    void *arg;
};

/* Connects, tries again while nobody listens there yet, says Hello, and waits for the communicator's id. -ETIMEDOUT, -ECONNRESET (the leader is gone), -EINVAL (refused, or an address that is
 * none), with a text. */
int rank_follower_join(const struct rank_follower_config *config, struct rank_follower **ret_follower, uint8_t ret_communicator[COLLECTIVE_ID_BYTES], struct error *err);
/* The model is here: waits until everybody has it. Errors as above. */
int rank_follower_load(struct rank_follower *follower, const struct rank_identity *identity, struct error *err);
struct rank_watch *rank_follower_watch(struct rank_follower *follower);
const struct engine_peers *rank_follower_peers(struct rank_follower *follower);
/* From now on commands are carried out from the loop, until owner->ended is called. */
int rank_follower_serve(struct rank_follower *follower, struct loop *loop, struct engine *engine, const struct rank_follower_owner *owner);
/* Asks the leader to finish what runs and end. */
void rank_follower_drain(struct rank_follower *follower);
/* Frees the sequences that are left, before their engine goes. */
void rank_follower_end_sequences(struct rank_follower *follower);
void rank_follower_free(struct rank_follower *follower); /* NULL is fine */
