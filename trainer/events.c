// Owns TensorBoard event files: records of length, bytes and masked checksums (TFRecord) that hold
// Event messages of protocol buffers. Only what scalars need of both is written.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/log.h"
#include "base/memory.h"
#include "trainer/files.h"
#include "trainer/run_folder.h"

struct event_file {
    FILE *out;
    char *path;
    bool failed; // said once
};

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
enum wire { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };

struct message {
    unsigned char bytes[512];
    size_t size;
};

static void put_bytes(struct message *message, const void *bytes, size_t size)
{
    BUG_UNLESS(size <= sizeof(message->bytes) - message->size);
    memcpy(message->bytes + message->size, bytes, size);
    message->size += size;
}

static void put_little_endian(struct message *message, uint64_t value, int size)
{
    unsigned char bytes[8];
    for (int i = 0; i < size; i++)
        bytes[i] = (unsigned char)(value >> (8 * i));
    put_bytes(message, bytes, (size_t)size);
}

static void put_varint(struct message *message, uint64_t value)
{
    do {
        unsigned char byte = (unsigned char)((value & 0x7f) | (value > 0x7f ? 0x80 : 0));
        put_bytes(message, &byte, 1);
        value >>= 7;
    } while (value > 0);
}

static void put_key(struct message *message, int field, enum wire wire)
{
    put_varint(message, (uint64_t)field << 3 | (uint64_t)wire);
}

static void put_double(struct message *message, int field, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    put_key(message, field, WIRE_64);
    put_little_endian(message, bits, 8);
}

static void put_float(struct message *message, int field, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    put_key(message, field, WIRE_32);
    put_little_endian(message, bits, 4);
}

static void put_int(struct message *message, int field, int64_t value)
{
    put_key(message, field, WIRE_VARINT);
    put_varint(message, (uint64_t)value);
}

static void put_part(struct message *message, int field, const void *bytes, size_t size)
{
    put_key(message, field, WIRE_BYTES);
    put_varint(message, size);
    put_bytes(message, bytes, size);
}

// The format's own mask: a checksum of data that holds checksums would be weak.
static uint32_t masked_crc(const void *bytes, size_t size)
{
    uint32_t crc = crc32c(0, bytes, size);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static void write_record(struct event_file *file, const struct message *event)
{
    struct message head = {.size = 0}, tail = {.size = 0};
    put_little_endian(&head, event->size, 8);
    put_little_endian(&head, masked_crc(head.bytes, 8), 4);
    put_little_endian(&tail, masked_crc(event->bytes, event->size), 4);
    fwrite(head.bytes, 1, head.size, file->out);
    fwrite(event->bytes, 1, event->size, file->out);
    fwrite(tail.bytes, 1, tail.size, file->out);
}

static struct message begin_event(void)
{
    struct message event = {.size = 0};
    struct timeval now;
    gettimeofday(&now, NULL);
    put_double(&event, EVENT_WALL_TIME, (double)now.tv_sec + 1e-6 * (double)now.tv_usec);
    return event;
}

int event_file_open(struct event_file **file, const char *directory, struct error *err)
{
    static const char version[] = "brain.Event:2";
    if (files_make_folder(directory, err) != 0)
        return -1;
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    struct timeval now;
    gettimeofday(&now, NULL);
    // Readers take the files in the order of their names.
    char *path = memory_format("%s/events.out.tfevents.%010lld.%06ld.%s.%ld", directory,
                               (long long)now.tv_sec, (long)now.tv_usec, host, (long)getpid());
    FILE *out = fopen(path, "wxe");
    if (out == NULL) {
        error_set(err, "%s: can not create: %s", path, strerror(errno));
        free(path);
        return -1;
    }
    *file = memory_alloc(1, sizeof(**file));
    (*file)->out = out;
    (*file)->path = path;
    struct message event = begin_event();
    put_part(&event, EVENT_FILE_VERSION, version, strlen(version));
    write_record(*file, &event);
    return 0;
}

void event_file_restart(struct event_file *file, int64_t step)
{
    struct message log = {.size = 0};
    put_int(&log, SESSION_STATUS, SESSION_START);
    struct message event = begin_event();
    put_int(&event, EVENT_STEP, step);
    put_part(&event, EVENT_SESSION_LOG, log.bytes, log.size);
    write_record(file, &event);
}

void event_file_scalar(struct event_file *file, int64_t step, const char *tag, double value)
{
    struct message item = {.size = 0}, summary = {.size = 0};
    put_part(&item, VALUE_TAG, tag, strlen(tag));
    put_float(&item, VALUE_SIMPLE, (float)value);
    put_part(&summary, SUMMARY_VALUE, item.bytes, item.size);
    struct message event = begin_event();
    put_int(&event, EVENT_STEP, step);
    put_part(&event, EVENT_SUMMARY, summary.bytes, summary.size);
    write_record(file, &event);
}

void event_file_flush(struct event_file *file)
{
    if (fflush(file->out) == 0 || file->failed)
        return;
    file->failed = true;
    log_warn("%s: writing failed: %s; its curves will have gaps", file->path, strerror(errno));
}

void event_file_close(struct event_file *file)
{
    event_file_flush(file);
    fclose(file->out);
    free(file->path);
    free(file);
}
