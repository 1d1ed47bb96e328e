#include "router/route/message_parts.h"
#include <errno.h>

int message_parts_receive(void *socket, zmq_msg_t *parts, int max)
{
    int n = 0, more = 1;
    for (int p = 0; p < max; p++)
        zmq_msg_init(&parts[p]);
    while (more) {
        zmq_msg_t part;
        zmq_msg_init(&part);
        if (zmq_msg_recv(&part, socket, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close(&part);
            break;
        }
        more = zmq_msg_more(&part);
        if (n < max)
            zmq_msg_move(&parts[n], &part);
        n++;
        zmq_msg_close(&part);
    }
    return n ? n : -EAGAIN;
}

void message_parts_close(zmq_msg_t *parts, int max)
{
    for (int p = 0; p < max; p++)
        zmq_msg_close(&parts[p]);
}
