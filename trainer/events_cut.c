// Owns the cut of earlier event files when a run resumes: what was told of steps that are taken again is
// removed, so that no reader meets a step twice.
#include <dirent.h>
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/memory.h"
#include "trainer/events_internal.h"
#include "trainer/files.h"
#include "trainer/run_folder.h"

struct bytes {
    const unsigned char *next, *end;
};

static size_t left(const struct bytes *in)
{
    return (size_t)(in->end - in->next);
}

// Of `size` bytes; false: there are not so many.
static bool take_little_endian(struct bytes *in, int size, uint64_t *value)
{
    *value = 0;
    if (left(in) < (size_t)size)
        return false;
    for (int i = 0; i < size; i++)
        *value |= (uint64_t)in->next[i] << (8 * i);
    in->next += size;
    return true;
}

static bool take_varint(struct bytes *in, uint64_t *value)
{
    *value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        uint64_t byte;
        if (!take_little_endian(in, 1, &byte))
            return false;
        *value |= (byte & 0x7f) << shift;
        if (byte < 0x80)
            return true;
    }
    return false;
}

static bool take_bytes(struct bytes *in, uint64_t size, struct bytes *part)
{
    if (size > left(in))
        return false;
    *part = (struct bytes){in->next, in->next + size};
    in->next += size;
    return true;
}

// A field of a message: its number, its value if that is a number, its bytes if it has a length.
static bool take_field(struct bytes *in, int *number, uint64_t *value, struct bytes *part)
{
    uint64_t key;
    *part = (struct bytes){in->next, in->next};
    if (!take_varint(in, &key))
        return false;
    *number = (int)(key >> 3);
    switch (key & 7) {
    case 0:
        return take_varint(in, value);
    case 1:
        return take_little_endian(in, 8, value);
    case 2:
        return take_varint(in, value) && take_bytes(in, *value, part);
    case 5:
        return take_little_endian(in, 4, value);
    default:
        return false;
    }
}

// The first field of this number that has a length.
static bool find_part(struct bytes in, int wanted, struct bytes *part)
{
    int number;
    uint64_t value;
    while (take_field(&in, &number, &value, part))
        if (number == wanted)
            return true;
    return false;
}

static int64_t step_of(struct bytes event)
{
    int number;
    uint64_t value;
    struct bytes part;
    while (take_field(&event, &number, &value, &part))
        if (number == EVENT_STEP)
            return (int64_t)value;
    return 0;
}

// Whether what the event tells is of steps behind the counters. A validation is told by tags "val...".
static bool is_kept(struct bytes event, int64_t step, int64_t validation)
{
    struct bytes summary, value, tag;
    if (!find_part(event, EVENT_SUMMARY, &summary))
        return true; // the version, or a restart
    bool scored = find_part(summary, SUMMARY_VALUE, &value) && find_part(value, VALUE_TAG, &tag) &&
                  left(&tag) > 3 && memcmp(tag.next, "val", 3) == 0;
    return step_of(event) <= (scored ? validation : step);
}

static bool take_record(struct bytes *in, struct bytes *body)
{
    uint64_t size, check;
    const unsigned char *head = in->next;
    if (!take_little_endian(in, 8, &size) || !take_little_endian(in, 4, &check) ||
        check != event_checksum(head, 8) || !take_bytes(in, size, body))
        return false;
    return take_little_endian(in, 4, &check) && check == event_checksum(body->next, size);
}

// Steps ascend in a file, so what goes is its end.
static size_t kept_size(const unsigned char *bytes, size_t size, int64_t step, int64_t validation)
{
    struct bytes in = {bytes, bytes + size}, body;
    size_t kept = 0;
    while (take_record(&in, &body) && is_kept(body, step, validation))
        kept = (size_t)(in.next - bytes);
    return kept;
}

// NULL: errno says why.
static unsigned char *read_all(FILE *in, size_t *size)
{
    if (fseek(in, 0, SEEK_END) != 0)
        return NULL;
    long end = ftell(in);
    rewind(in);
    if (end < 0)
        return NULL;
    unsigned char *bytes = memory_alloc((size_t)end + 1, 1);
    *size = fread(bytes, 1, (size_t)end, in);
    if (!ferror(in))
        return bytes;
    free(bytes); // what was not read must not be taken for torn and cut off
    return NULL;
}

static int cut_file(const char *path, int64_t step, int64_t validation, struct error *err)
{
    size_t size = 0;
    int result = 0;
    FILE *in = fopen(path, "re");
    if (in == NULL)
        return error_set(err, "%s: can not open: %s", path, strerror(errno));
    unsigned char *bytes = read_all(in, &size);
    fclose(in);
    if (bytes == NULL)
        return error_set(err, "%s: can not read: %s", path, strerror(errno));
    size_t kept = kept_size(bytes, size, step, validation);
    if (kept < size && truncate(path, (off_t)kept) != 0)
        result = error_set(err, "%s: can not cut: %s", path, strerror(errno));
    free(bytes);
    return result;
}

int event_files_cut(const char *directory, int64_t step, int64_t validation, struct error *err)
{
    DIR *folder = opendir(directory);
    int result = 0;
    if (folder == NULL)
        return errno == ENOENT ? 0
                               : error_set(err, "%s: can not open: %s", directory, strerror(errno));
    for (struct dirent *entry; result == 0 && (entry = readdir(folder)) != NULL;) {
        if (strncmp(entry->d_name, EVENT_FILE_PREFIX, strlen(EVENT_FILE_PREFIX)) != 0)
            continue;
        char *path = memory_format("%s/%s", directory, entry->d_name);
        result = cut_file(path, step, validation, err);
        free(path);
    }
    closedir(folder);
    return result;
}
