/* Packs a protobuf message behind its frame header, for streams. */
#pragma once
#include "proto/base/buf.h"
#include <protobuf-c/protobuf-c.h>
#include <stdint.h>

/* Appends header and body to `out`. -EMSGSIZE (body beyond FRAME_BODY_MAX), -ENOBUFS (the buffer's limit), -ENOMEM; `out` is unchanged then. */
int frame_append(struct buf *out, uint16_t type, uint64_t request_id, const ProtobufCMessage *message);
