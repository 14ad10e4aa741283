// Owns reading safetensors files: nothing of a header is believed before it has been checked. Writing
// is in safetensors_writer.c.
#include "data/safetensors.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEADER_LENGTH_BYTES = 8 };
#define HEADER_LIMIT ((uint64_t)100000000) // the format's own bound
#define EXACT_LIMIT  9007199254740992.0    // 2^53: integers in a JSON double are exact up to here

static const struct {
    const char *name;
    int bits;
} dtypes[] = {
    {"BOOL", 8},    {"U8", 8},          {"I8", 8},          {"U16", 16},    {"I16", 16},
    {"U32", 32},    {"I32", 32},        {"U64", 64},        {"I64", 64},    {"F16", 16},
    {"BF16", 16},   {"F32", 32},        {"F64", 64},        {"C64", 64},    {"F4", 4},
    {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"F8_E4M3", 8},     {"F8_E5M2", 8}, {"F8_E8M0", 8},
    {"F8", 8},      {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
};

static int dtype_bits(const char *name)
{
    for (size_t i = 0; i < sizeof(dtypes) / sizeof(*dtypes); i++) {
        if (strcmp(dtypes[i].name, name) == 0)
            return dtypes[i].bits;
    }
    return 0;
}

// A number that is an exact integer >= 0.
static bool read_count(const cJSON *item, int64_t *value)
{
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0.0 && item->valuedouble <= EXACT_LIMIT))
        return false;
    *value = (int64_t)item->valuedouble;
    return (double)*value == item->valuedouble;
}

// Shape, and the bytes that tensors of it take.
static int read_shape(struct safetensors_entry *entry, const cJSON *shape, int bits,
                      const char *path, struct error *err)
{
    if (!cJSON_IsArray(shape))
        return error_set(err, "%s: tensor '%s': no shape", path, entry->name);
    uint64_t total = (uint64_t)bits;
    const cJSON *item;
    cJSON_ArrayForEach(item, shape)
    {
        if (entry->dims == SAFETENSORS_DIMS)
            return error_set(err, "%s: tensor '%s' has more than %d dimensions", path, entry->name,
                             SAFETENSORS_DIMS);
        int64_t *dim = &entry->shape[entry->dims++];
        if (!read_count(item, dim))
            return error_set(err, "%s: tensor '%s': dimension %d is not a count", path, entry->name,
                             entry->dims - 1);
        if (__builtin_mul_overflow(total, (uint64_t)*dim, &total))
            return error_set(err, "%s: tensor '%s': its shape overflows 64 bits", path,
                             entry->name);
    }
    if (total % 8 != 0)
        return error_set(err, "%s: tensor '%s' does not end on a whole byte", path, entry->name);
    entry->size = (size_t)(total / 8);
    return 0;
}

// One tensor of the header; its bytes must lie in data[data_size].
static int read_entry(struct safetensors_entry *entry, const cJSON *item, const unsigned char *data,
                      size_t data_size, const char *path, struct error *err)
{
    entry->name = memory_strdup(item->string);
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(item, "dtype");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
    if (!cJSON_IsObject(item) || !cJSON_IsString(dtype))
        return error_set(err, "%s: tensor '%s': no dtype", path, entry->name);
    int bits = dtype_bits(dtype->valuestring);
    if (bits == 0)
        return error_set(err, "%s: tensor '%s': unknown dtype '%.32s'", path, entry->name,
                         dtype->valuestring);
    snprintf(entry->dtype, sizeof(entry->dtype), "%s", dtype->valuestring);
    if (read_shape(entry, cJSON_GetObjectItemCaseSensitive(item, "shape"), bits, path, err) != 0)
        return -1;

    int64_t begin, end;
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
        !read_count(cJSON_GetArrayItem(offsets, 0), &begin) ||
        !read_count(cJSON_GetArrayItem(offsets, 1), &end) || begin > end)
        return error_set(err, "%s: tensor '%s': bad data_offsets", path, entry->name);
    if ((uint64_t)end > data_size)
        return error_set(err,
                         "%s: tensor '%s' ends at byte %" PRId64
                         " of the data, but the file holds %zu: the file is truncated",
                         path, entry->name, end, data_size);
    if ((uint64_t)(end - begin) != entry->size)
        return error_set(err, "%s: tensor '%s' has %" PRId64 " bytes, its dtype and shape need %zu",
                         path, entry->name, end - begin, entry->size);
    entry->bytes = data + begin;
    return 0;
}

static int read_metadata(struct safetensors *file, const cJSON *metadata, struct error *err)
{
    if (!cJSON_IsObject(metadata))
        return error_set(err, "%s: __metadata__ is not an object", file->path);
    size_t count = (size_t)cJSON_GetArraySize(metadata);
    file->metadata_keys = memory_alloc(count, sizeof(*file->metadata_keys));
    file->metadata_values = memory_alloc(count, sizeof(*file->metadata_values));
    const cJSON *item;
    cJSON_ArrayForEach(item, metadata)
    {
        if (!cJSON_IsString(item))
            return error_set(err, "%s: __metadata__ '%s' is not a string", file->path,
                             item->string);
        file->metadata_keys[file->metadata_count] = memory_strdup(item->string);
        file->metadata_values[file->metadata_count++] = memory_strdup(item->valuestring);
    }
    return 0;
}

static int compare_places(const void *left, const void *right)
{
    const struct safetensors_entry *a = left, *b = right;
    if (a->bytes != b->bytes)
        return a->bytes < b->bytes ? -1 : 1;
    return (a->size > b->size) - (a->size < b->size); // empty ones before the one they touch
}

static int compare_names(const void *left, const void *right)
{
    const struct safetensors_entry *a = left, *b = right;
    return strcmp(a->name, b->name);
}

// The format forbids overlaps and holes; both mean that header and data do not belong together.
// Leaves the entries in order of names.
static int check_layout(struct safetensors *file, const unsigned char *data, size_t data_size,
                        struct error *err)
{
    const unsigned char *next = data;
    qsort(file->entries, file->count, sizeof(*file->entries), compare_places);
    for (size_t i = 0; i < file->count; i++) {
        const struct safetensors_entry *entry = &file->entries[i];
        if (entry->bytes != next)
            return error_set(err, "%s: tensor '%s' starts at byte %zu of the data, %s at %zu",
                             file->path, entry->name, (size_t)(entry->bytes - data),
                             entry->bytes < next ? "inside the tensor that ends"
                                                 : "behind a hole that starts",
                             (size_t)(next - data));
        next = entry->bytes + entry->size;
    }
    if ((size_t)(next - data) != data_size)
        return error_set(err, "%s: %zu bytes of data, but the tensors take %zu", file->path,
                         data_size, (size_t)(next - data));
    qsort(file->entries, file->count, sizeof(*file->entries), compare_names);
    for (size_t i = 1; i < file->count; i++) {
        if (strcmp(file->entries[i - 1].name, file->entries[i].name) == 0)
            return error_set(err, "%s: tensor '%s' is there twice", file->path,
                             file->entries[i].name);
    }
    return 0;
}

static int read_tree(struct safetensors *file, const cJSON *tree, const unsigned char *data,
                     size_t data_size, struct error *err)
{
    if (!cJSON_IsObject(tree))
        return error_set(err, "%s: the header is not a JSON object", file->path);
    file->entries = memory_alloc((size_t)cJSON_GetArraySize(tree), sizeof(*file->entries));
    const cJSON *item;
    cJSON_ArrayForEach(item, tree)
    {
        if (strcmp(item->string, "__metadata__") == 0) {
            if (file->metadata_keys != NULL)
                return error_set(err, "%s: __metadata__ is there twice", file->path);
            if (read_metadata(file, item, err) != 0)
                return -1;
        } else if (read_entry(&file->entries[file->count++], item, data, data_size, file->path,
                              err) != 0) {
            return -1;
        }
    }
    return check_layout(file, data, data_size, err);
}

static int read_header(struct safetensors *file, struct error *err)
{
    const unsigned char *bytes = file->map;
    uint64_t length = 0;
    for (int i = HEADER_LENGTH_BYTES - 1; i >= 0; i--)
        length = length << 8 | bytes[i];
    if (length > HEADER_LIMIT || length > file->map_size - HEADER_LENGTH_BYTES)
        return error_set(err,
                         "%s: not a safetensors file, or truncated: it claims a header of %" PRIu64
                         " bytes in a file of %zu",
                         file->path, length, file->map_size);
    const char *text = (const char *)bytes + HEADER_LENGTH_BYTES, *rest = NULL;
    const char *end = text + length;
    cJSON *tree = cJSON_ParseWithLengthOpts(text, (size_t)length, &rest, 0);
    if (tree == NULL)
        return error_set(err, "%s: not a safetensors file: its header is not JSON at byte %zu",
                         file->path, rest == NULL ? (size_t)0 : (size_t)(rest - text));
    int result = 0;
    for (; rest < end && result == 0; rest++) {
        if (*rest != ' ' && *rest != '\n' && *rest != '\r' && *rest != '\t')
            result = error_set(err, "%s: the header goes on behind its JSON", file->path);
    }
    size_t data_size = file->map_size - HEADER_LENGTH_BYTES - (size_t)length;
    if (result == 0)
        result = read_tree(file, tree, (const unsigned char *)end, data_size, err);
    cJSON_Delete(tree);
    return result;
}

static int map_file(struct safetensors *file, struct error *err)
{
    struct stat info;
    int descriptor = open(file->path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return error_set(err, "%s: can not open: %s", file->path, strerror(errno));
    int result = 0;
    if (fstat(descriptor, &info) != 0) {
        result = error_set(err, "%s: %s", file->path, strerror(errno));
    } else if (!S_ISREG(info.st_mode) || info.st_size < HEADER_LENGTH_BYTES) {
        result = error_set(err, "%s: not a safetensors file: %s", file->path,
                           S_ISREG(info.st_mode) ? "shorter than 8 bytes" : "not a file");
    } else {
        void *map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0);
        if (map == MAP_FAILED) {
            result = error_set(err, "%s: can not map: %s", file->path, strerror(errno));
        } else {
            file->map = map;
            file->map_size = (size_t)info.st_size;
        }
    }
    close(descriptor);
    return result;
}

int safetensors_open(struct safetensors *file, const char *path, struct error *err)
{
    *file = (struct safetensors){.path = memory_strdup(path)};
    if (map_file(file, err) == 0 && read_header(file, err) == 0)
        return 0;
    safetensors_close(file);
    return -1;
}

void safetensors_close(struct safetensors *file)
{
    for (size_t i = 0; i < file->count; i++)
        free(file->entries[i].name);
    for (size_t i = 0; i < file->metadata_count; i++) {
        free(file->metadata_keys[i]);
        free(file->metadata_values[i]);
    }
    free(file->entries);
    free(file->metadata_keys);
    free(file->metadata_values);
    free(file->path);
    if (file->map != NULL)
        munmap(file->map, file->map_size);
    *file = (struct safetensors){0};
}

const struct safetensors_entry *safetensors_find(const struct safetensors *file, const char *name)
{
    size_t low = 0, high = file->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(file->entries[middle].name, name);
        if (order == 0)
            return &file->entries[middle];
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

// "[4, any, 8]"
static void format_shape(char *text, size_t size, int dims, const int64_t *shape)
{
    size_t used = (size_t)snprintf(text, size, "[");
    for (int i = 0; i < dims && used < size; i++) {
        const char *comma = i > 0 ? ", " : "";
        if (shape[i] < 0)
            used += (size_t)snprintf(text + used, size - used, "%sany", comma);
        else
            used += (size_t)snprintf(text + used, size - used, "%s%" PRId64, comma, shape[i]);
    }
    if (used < size)
        snprintf(text + used, size - used, "]");
}

const struct safetensors_entry *safetensors_get(const struct safetensors *file, const char *name,
                                                const char *dtype, int dims, const int64_t *shape,
                                                struct error *err)
{
    const struct safetensors_entry *entry = safetensors_find(file, name);
    if (entry == NULL) {
        error_set(err, "%s: no tensor '%s'", file->path, name);
        return NULL;
    }
    bool same = strcmp(entry->dtype, dtype) == 0 && entry->dims == dims;
    for (int i = 0; same && i < dims; i++)
        same = shape[i] < 0 || shape[i] == entry->shape[i];
    if (same)
        return entry;
    char is[256], wanted[256];
    format_shape(is, sizeof(is), entry->dims, entry->shape);
    format_shape(wanted, sizeof(wanted), dims, shape);
    error_set(err, "%s: tensor '%s' is %s %s, wanted is %s %s", file->path, name, entry->dtype, is,
              dtype, wanted);
    return NULL;
}

const char *safetensors_metadata(const struct safetensors *file, const char *key)
{
    for (size_t i = 0; i < file->metadata_count; i++) {
        if (strcmp(file->metadata_keys[i], key) == 0)
            return file->metadata_values[i];
    }
    return NULL;
}
