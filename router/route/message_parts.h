/* Messages of several parts from a ZeroMQ socket, without blocking. The socket's thread. */
#pragma once
#include <zmq.h>

/* Receives the parts of one message into parts[max], all of which it initialises; parts beyond max are dropped. Returns how many there were, or -EAGAIN. Close all of parts[max]
 * with message_parts_close, whatever was returned. */
int message_parts_receive(void *socket, zmq_msg_t *parts, int max);
void message_parts_close(zmq_msg_t *parts, int max);
