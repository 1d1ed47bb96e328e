/* One event loop a process, over libevent: descriptors, timers, signals, child processes (pidfd) and ZeroMQ sockets.
 * One thread owns a loop and makes every call on it; callbacks run on that thread. A source is freed by its owner, also from its own
 * callback and before its descriptor is closed; the loop itself is freed last. All _add calls return -ENOMEM or the errno of the system call
 * (-ESRCH: no such process; -EEXIST: LOOP_CLOSED is watched for that descriptor already). loop_run and loop_poll return 0 or -EIO. */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct event_base;
struct loop;
struct loop_source;

enum { LOOP_READ = 1, LOOP_WRITE = 2, LOOP_CLOSED = 4 /* the peer hung up; needs no read */ };

typedef void loop_fd_cb(int fd, int events, void *arg);
typedef void loop_cb(void *arg);
typedef void loop_signal_cb(int signal, void *arg);
typedef void loop_child_cb(pid_t pid, void *arg);

int loop_create(struct loop **ret_loop);
void loop_free(struct loop *loop);
struct event_base *loop_event_base(struct loop *loop); /* borrowed, for evhttp */

/* Runs until loop_stop (which also ends a run that comes later); loop_poll handles what is ready and returns without waiting. */
int loop_run(struct loop *loop);
int loop_poll(struct loop *loop);
void loop_stop(struct loop *loop);

/* Level-triggered, persistent. `events` is a set of LOOP_*, which may be empty. The descriptor stays the caller's. LOOP_CLOSED (hang-up, half-close or
 * reset) comes in a call of its own, maybe before the last bytes were read, and again until the source is freed or stops asking. */
int loop_fd_add(struct loop *loop, int fd, int events, loop_fd_cb *cb, void *arg, struct loop_source **ret_source);
int loop_fd_set_events(struct loop_source *source, int events);
/* A timer that is not armed. loop_timer_arm fires once after `delay_us`, never early; arming again moves it. */
int loop_timer_add(struct loop *loop, loop_cb *cb, void *arg, struct loop_source **ret_source);
int loop_timer_arm(struct loop_source *source, uint64_t delay_us);
void loop_timer_disarm(struct loop_source *source);
int loop_signal_add(struct loop *loop, int signal, loop_signal_cb *cb, void *arg, struct loop_source **ret_source);
/* Fires once when `pid` (a child or any process of this user) has ended; does not reap it. */
int loop_pid_add(struct loop *loop, pid_t pid, loop_child_cb *cb, void *arg, struct loop_source **ret_source);
/* Calls `cb` whenever the ZeroMQ socket has messages to receive, and once for every batch: ZMQ_FD is edge-triggered, so the source
 * re-arms itself until ZMQ_EVENTS shows nothing pending. `cb` should receive at most 50 messages and return. After sending on the
 * socket outside `cb`, call loop_zmq_kick. */
int loop_zmq_add(struct loop *loop, void *zmq_socket, loop_cb *cb, void *arg, struct loop_source **ret_source);
void loop_zmq_kick(struct loop_source *source);
void loop_source_free(struct loop_source *source); /* NULL is fine */
