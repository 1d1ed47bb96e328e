/* The leader's side of a tensor-parallel group: one worker in several processes, one a rank. Rank 0, the leader, has scheduler, router and sampling; each call of the engine that it makes here is
 * first sent to the followers (rank_follower.h), which make it too, in the same order. That is all it takes for the ranks to meet in their collectives, because what the engine does follows
 * from its calls alone, and what only one rank can find out is agreed on inside them (engine.h, struct engine_peers).
 *
 * A NULL group is a worker with one rank: the calls are then the engine's own.
 *
 * Death: a rank that ends, hangs longer than the timeout or breaks the protocol is the end of the group. Every call returns -EIO from then on, within the timeout, and the descriptor of
 * its watch is readable. Nobody joins a running group: the processes end, and whoever keeps them running starts them together again. Owner thread only. */
#pragma once
#include "kernels/collective.h"
#include "proto/base/error.h"
#include "proto/base/loop.h"
#include "worker/cache/engine.h"
#include "worker/group/rank_message.h"
#include "worker/group/rank_watch.h"
#include <sys/types.h>

struct rank_group;

struct rank_group_config {
    int degree;           /* ranks, the leader included: 2 to COLLECTIVE_MAX_RANKS */
    uint64_t timeout_us;  /* of every wait for another rank, but for the loading of the model */
    const char *settings; /* borrowed for the group's life: "name=value ..." that every rank must have alike, up to RANK_SETTINGS_MAX characters */
};

/* The ranks of one model have this in common. */
struct rank_identity {
    const char *backend, *model_name;
    uint8_t model[32];
};

int rank_group_create(const struct rank_group_config *config, struct rank_group **ret_group, struct error *err); /* -ENOMEM */
/* Starts follower `rank` as a child: argv[0] is a name, the program is this process's own. Its end of the socket is descriptor RANK_CHILD_FD. Before threads are made.
 * -ENOMEM, or the errno of a system call. */
int rank_group_start(struct rank_group *group, int rank, const char *const *argv, struct error *err);
enum { RANK_CHILD_FD = 3 };
pid_t rank_group_pid(const struct rank_group *group, int rank); /* of a child; 0: it is none */
/* Instead: followers are started by somebody else and come to this unix socket. -EADDRINUSE, -ENAMETOOLONG, or the errno of a system call. */
int rank_group_listen(struct rank_group *group, const char *path, struct error *err);
/* Waits until all followers have said Hello, and tells them the communicator's id. -ETIMEDOUT, -ECONNRESET (one has ended), -EINVAL (a rank or a setting that does not belong here; also when a child
 * has ended because its configuration is wrong), all with a text that names the rank. */
int rank_group_meet(struct rank_group *group, const uint8_t communicator[COLLECTIVE_ID_BYTES], struct error *err);
/* Waits until all followers have loaded the same model, however long that takes. Errors as rank_group_meet. */
int rank_group_load(struct rank_group *group, const struct rank_identity *identity, struct error *err);
/* What breaks the collectives when a rank is gone; there from rank_group_meet on. */
struct rank_watch *rank_group_watch(struct rank_group *group);
/* From now on the loop stops (loop_stop) when a rank is gone, or a follower wants the group to drain. */
int rank_group_serve(struct rank_group *group, struct loop *loop);
/* Whether a follower has asked since the last call. */
bool rank_group_take_drain(struct rank_group *group);
/* For engine_config.peers. */
const struct engine_peers *rank_group_peers(struct rank_group *group);
/* Stops the followers: those that run get their time to end, children that do not are killed. NULL is fine. */
void rank_group_free(struct rank_group *group);
/* Which rank is gone, or what else has ended the group; "" while it is whole, and for NULL. */
const char *rank_group_failure(struct rank_group *group);

/* As engine.h says, on every rank; request.tag is the group's. -EIO: the group is at its end. Each calls the engine alone when group is NULL. */
int group_sequence_create(struct rank_group *group, struct engine *engine, const struct sequence_request *request, struct sequence **ret_sequence, struct error *err);
int group_sequence_prefill_step(struct rank_group *group, struct sequence *sequence);
int group_decode(struct rank_group *group, struct engine *engine, struct sequence **sequences, const int32_t *tokens, int n);
/* sequence_stats, with bytes, pages, tokens and private blocks those of all ranks: a question to each follower and its answer, so for the end of a prompt and of an answer. Those of this rank
 * alone when the group is at its end. */
void group_sequence_stats(struct rank_group *group, const struct sequence *sequence, struct sequence_stats *ret_stats);
/* Adds what the followers have last said of their processes. NULL adds nothing. */
void rank_group_usage(const struct rank_group *group, struct rank_usage *usage);
/* sequence_free, behind sequence_retire_answer where nobody will go on with the answer. NULL is fine. */
void group_sequence_free(struct rank_group *group, struct sequence *sequence, bool retire_answer);
