/* A client of the store that speaks the bare protocol, blocking: for what the real library never does. Fails the test on any surprise. */
#pragma once
#include "proto/wire/frame.h"
#include "proto/wire/store.pb-c.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct store_wire {
    int fd;
    int fds[2]; /* pool and statistics page, from Welcome; -1 before */
    uint64_t next_id;
};

void store_wire_connect(struct store_wire *wire, const char *socket_path);
/* Connects and says Hello. */
void store_wire_open(struct store_wire *wire, const char *socket_path);
void store_wire_close(struct store_wire *wire);
/* Returns false if the store has closed the connection. */
bool store_wire_send(struct store_wire *wire, uint16_t type, const ProtobufCMessage *message);
bool store_wire_send_raw(struct store_wire *wire, const void *data, size_t n);
/* Receives one message; the caller frees it with protobuf_c_message_free_unpacked(message, NULL). NULL: closed by the store. */
ProtobufCMessage *store_wire_receive(struct store_wire *wire, uint16_t *ret_type);
/* Sends and expects an answer of `type`. */
ProtobufCMessage *store_wire_call(struct store_wire *wire, uint16_t request, const ProtobufCMessage *message, uint16_t type);
/* The store's statistics; freed by the next call. */
const Tidepool__Store__StatsResult *store_wire_stats(struct store_wire *wire);
