// What writing and cutting TensorBoard event files share: names, field numbers, checksums.
#ifndef TRAINER_EVENTS_INTERNAL_H
#define TRAINER_EVENTS_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "base/crc32c.h"

#define EVENT_FILE_PREFIX "events.out.tfevents."

// Field numbers of tensorflow's event.proto and summary.proto.
enum {
    EVENT_WALL_TIME = 1,
    EVENT_STEP = 2,
    EVENT_FILE_VERSION = 3,
    EVENT_SUMMARY = 5,
    EVENT_SESSION_LOG = 7,
    SUMMARY_VALUE = 1,
    VALUE_TAG = 1,
    VALUE_SIMPLE = 2,
    SESSION_STATUS = 1,
    SESSION_START = 1,
};

// The format's own mask: a checksum of data that holds checksums would be weak.
static inline uint32_t event_checksum(const void *bytes, size_t size)
{
    uint32_t crc = crc32c(0, bytes, size);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

#endif
