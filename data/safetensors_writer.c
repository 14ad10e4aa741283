// Owns writing safetensors files: layout in order of declaration, a file of its final size before the
// first byte of data. Does not own where files go or when they count (checkpoints do).
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "data/safetensors.h"

// Data starts at a multiple of this in the file, so that a mapped first tensor is aligned.
enum { DATA_ALIGNMENT = 64, LENGTH_BYTES = 8 };

struct written_tensor {
    char *name;
    uint64_t offset; // in the data
    uint64_t size;
};

struct safetensors_writer {
    char *path;
    int descriptor;
    bool begun;
    cJSON *header;
    cJSON *metadata; // NULL: none yet; inside header
    struct written_tensor *tensors;
    int count, capacity;
    uint64_t data_offset; // in the file
    uint64_t data_size;
};

int safetensors_writer_open(struct safetensors_writer **writer, const char *path, struct error *err)
{
    int descriptor = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (descriptor < 0)
        return error_set(err, "%s: can not create: %s", path, strerror(errno));
    *writer = memory_alloc(1, sizeof(**writer));
    (*writer)->path = memory_strdup(path);
    (*writer)->descriptor = descriptor;
    (*writer)->header = cJSON_CreateObject();
    return 0;
}

void safetensors_writer_metadata(struct safetensors_writer *writer, const char *key,
                                 const char *value)
{
    BUG_UNLESS(!writer->begun);
    if (writer->metadata == NULL)
        writer->metadata = cJSON_AddObjectToObject(writer->header, "__metadata__");
    cJSON_AddStringToObject(writer->metadata, key, value);
}

static const char *dtype_in_file(enum dtype dtype)
{
    static const char *const names[] = {
        [DTYPE_F32] = "F32", [DTYPE_BF16] = "BF16", [DTYPE_I32] = "I32",
        [DTYPE_U8] = "U8",   [DTYPE_I64] = "I64",   [DTYPE_F64] = "F64",
    };
    return names[dtype];
}

// cJSON prints a double; text keeps every digit.
static void add_count(cJSON *array, uint64_t value)
{
    char text[24];
    snprintf(text, sizeof(text), "%llu", (unsigned long long)value);
    cJSON_AddItemToArray(array, cJSON_CreateRaw(text));
}

int safetensors_writer_add(struct safetensors_writer *writer, const char *name, enum dtype dtype,
                           int dims, const int64_t *shape)
{
    return safetensors_writer_add_as(writer, name, dtype_in_file(dtype), dtype_size(dtype), dims,
                                     shape);
}

int safetensors_writer_add_as(struct safetensors_writer *writer, const char *name,
                              const char *dtype, size_t element_size, int dims,
                              const int64_t *shape)
{
    BUG_UNLESS(!writer->begun && dims >= 0 && dims <= SAFETENSORS_DIMS);
    BUG_UNLESS(cJSON_GetObjectItemCaseSensitive(writer->header, name) == NULL);
    if (writer->count == writer->capacity) {
        writer->capacity = writer->capacity > 0 ? 2 * writer->capacity : 64;
        writer->tensors =
            memory_resize(writer->tensors, (size_t)writer->capacity, sizeof(*writer->tensors));
    }
    cJSON *entry = cJSON_AddObjectToObject(writer->header, name);
    cJSON_AddStringToObject(entry, "dtype", dtype);
    cJSON *sizes = cJSON_AddArrayToObject(entry, "shape");
    uint64_t size = element_size;
    for (int i = 0; i < dims; i++) {
        BUG_UNLESS(shape[i] >= 0);
        size *= (uint64_t)shape[i];
        add_count(sizes, (uint64_t)shape[i]);
    }
    cJSON *offsets = cJSON_AddArrayToObject(entry, "data_offsets");
    add_count(offsets, writer->data_size);
    add_count(offsets, writer->data_size + size);
    writer->tensors[writer->count] =
        (struct written_tensor){memory_strdup(name), writer->data_size, size};
    writer->data_size += size;
    return writer->count++;
}

static int write_at(int descriptor, uint64_t offset, const void *bytes, size_t size)
{
    const char *next = bytes;
    while (size > 0) {
        ssize_t n = pwrite(descriptor, next, size, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        next += n;
        offset += (uint64_t)n;
        size -= (size_t)n;
    }
    return 0;
}

// Takes the space for good, where the file system can; else only sets the size.
static int take_space(int descriptor, uint64_t size)
{
    int result;
    do {
        result = fallocate(descriptor, 0, 0, (off_t)size);
    } while (result != 0 && errno == EINTR);
    if (result != 0 && (errno == EOPNOTSUPP || errno == ENOSYS))
        result = ftruncate(descriptor, (off_t)size);
    return result;
}

int safetensors_writer_begin(struct safetensors_writer *writer, struct error *err)
{
    BUG_UNLESS(!writer->begun);
    char *text = cJSON_PrintUnformatted(writer->header);
    if (text == NULL)
        die("out of host memory for the header of %s", writer->path);
    size_t used = strlen(text);
    writer->data_offset =
        (LENGTH_BYTES + used + DATA_ALIGNMENT - 1) / DATA_ALIGNMENT * DATA_ALIGNMENT;
    size_t padded = (size_t)writer->data_offset - LENGTH_BYTES;
    unsigned char *head = memory_alloc((size_t)writer->data_offset, 1);
    for (int i = 0; i < LENGTH_BYTES; i++)
        head[i] = (unsigned char)(padded >> (8 * i));
    memcpy(head + LENGTH_BYTES, text, used);
    memset(head + LENGTH_BYTES + used, ' ', padded - used);

    int result = 0;
    uint64_t total = writer->data_offset + writer->data_size;
    if (take_space(writer->descriptor, total) != 0)
        result = error_set(err, "%s: no room for %llu bytes: %s", writer->path,
                           (unsigned long long)total, strerror(errno));
    else if (write_at(writer->descriptor, 0, head, (size_t)writer->data_offset) != 0)
        result = error_set(err, "%s: writing the header failed: %s", writer->path, strerror(errno));
    writer->begun = result == 0;
    free(head);
    cJSON_free(text);
    return result;
}

int safetensors_writer_write(struct safetensors_writer *writer, int index, size_t offset,
                             const void *bytes, size_t size, struct error *err)
{
    BUG_UNLESS(writer->begun && index >= 0 && index < writer->count);
    const struct written_tensor *tensor = &writer->tensors[index];
    BUG_UNLESS(offset <= tensor->size && size <= tensor->size - offset);
    uint64_t place = writer->data_offset + tensor->offset + offset;
    if (write_at(writer->descriptor, place, bytes, size) != 0)
        return error_set(err, "%s: writing tensor '%s' failed: %s", writer->path, tensor->name,
                         strerror(errno));
    return 0;
}

int safetensors_writer_close(struct safetensors_writer *writer, bool commit, struct error *err)
{
    int result = 0;
    if (commit && fsync(writer->descriptor) != 0)
        result = error_set(err, "%s: fsync failed: %s", writer->path, strerror(errno));
    // close() may report what an earlier write on a network file system could not
    if (close(writer->descriptor) != 0 && commit && result == 0)
        result = error_set(err, "%s: closing failed: %s", writer->path, strerror(errno));
    if (!commit || result != 0)
        unlink(writer->path);
    for (int i = 0; i < writer->count; i++)
        free(writer->tensors[i].name);
    free(writer->tensors);
    cJSON_Delete(writer->header);
    free(writer->path);
    free(writer);
    return result;
}
