// Owns TensorBoard event files: records of length, bytes and masked checksums (TFRecord) that hold
// Event messages of protocol buffers. Only what scalars need of both is written. Cutting them back is
// events_cut.c's.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "trainer/events_internal.h"
#include "trainer/files.h"
#include "trainer/run_folder.h"

enum {
    MOST_BYTES = 1 << 14, // of a message: the scalars of one step
    LENGTH_BYTES = 8,
    CHECKSUM_BYTES = 4
};

struct message {
    unsigned char bytes[MOST_BYTES];
    size_t size;
};

struct event_file {
    int fd;
    char *path;
    bool failed;            // said once
    struct message summary; // of the step that is being told
    int64_t step;
};

enum wire { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };

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

// A record that is not written whole is taken back: a reader stops at half a record for good.
static void write_record(struct event_file *file, const struct message *event)
{
    unsigned char record[LENGTH_BYTES + CHECKSUM_BYTES + MOST_BYTES + CHECKSUM_BYTES];
    struct message end;
    end.size = 0;
    off_t before = lseek(file->fd, 0, SEEK_END);
    put_little_endian(&end, event->size, LENGTH_BYTES);
    put_little_endian(&end, event_checksum(end.bytes, LENGTH_BYTES), CHECKSUM_BYTES);
    memcpy(record, end.bytes, end.size);
    size_t size = end.size;
    memcpy(record + size, event->bytes, event->size);
    size += event->size;
    end.size = 0;
    put_little_endian(&end, event_checksum(event->bytes, event->size), CHECKSUM_BYTES);
    memcpy(record + size, end.bytes, end.size);
    size += end.size;
    ssize_t written = write(file->fd, record, size);
    if (written == (ssize_t)size)
        return;
    int cause = written < 0 ? errno : ENOSPC;
    bool whole = written <= 0 || ftruncate(file->fd, before) == 0;
    if (!file->failed)
        log_warn("%s: writing failed: %s; its curves have %s", file->path, strerror(cause),
                 whole ? "gaps" : "no end: what follows can not be read");
    file->failed = true;
}

static void begin_event(struct message *event)
{
    struct timeval now;
    gettimeofday(&now, NULL);
    event->size = 0;
    put_double(event, EVENT_WALL_TIME, (double)now.tv_sec + 1e-6 * (double)now.tv_usec);
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
    char *path = memory_format("%s/" EVENT_FILE_PREFIX "%010lld.%06ld.%s.%ld", directory,
                               (long long)now.tv_sec, (long)now.tv_usec, host, (long)getpid());
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) {
        error_set(err, "%s: can not create: %s", path, strerror(errno));
        free(path);
        return -1;
    }
    struct event_file *f = memory_alloc(1, sizeof(*f));
    f->fd = fd;
    f->path = path;
    struct message event;
    begin_event(&event);
    put_part(&event, EVENT_FILE_VERSION, version, strlen(version));
    write_record(f, &event);
    *file = f;
    return 0;
}

void event_file_restart(struct event_file *file, int64_t step)
{
    struct message log, event;
    log.size = 0;
    put_int(&log, SESSION_STATUS, SESSION_START);
    begin_event(&event);
    put_int(&event, EVENT_STEP, step);
    put_part(&event, EVENT_SESSION_LOG, log.bytes, log.size);
    write_record(file, &event);
}

void event_file_begin(struct event_file *file, int64_t step)
{
    file->step = step;
    file->summary.size = 0;
}

void event_file_scalar(struct event_file *file, const char *tag, double value)
{
    struct message item;
    item.size = 0;
    put_part(&item, VALUE_TAG, tag, strlen(tag));
    put_float(&item, VALUE_SIMPLE, (float)value);
    put_part(&file->summary, SUMMARY_VALUE, item.bytes, item.size);
}

void event_file_end(struct event_file *file)
{
    struct message event;
    if (file->summary.size == 0)
        return;
    begin_event(&event);
    put_int(&event, EVENT_STEP, file->step);
    put_part(&event, EVENT_SUMMARY, file->summary.bytes, file->summary.size);
    write_record(file, &event);
}

void event_file_close(struct event_file *file)
{
    close(file->fd);
    free(file->path);
    free(file);
}
