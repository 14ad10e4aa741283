// The safetensors file format (Hugging Face): an 8-byte little-endian header length, a JSON header
// {"name": {"dtype", "shape", "data_offsets"}, "__metadata__": {string: string}}, then the bytes.
#ifndef DATA_SAFETENSORS_H
#define DATA_SAFETENSORS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/memory.h"

enum { SAFETENSORS_DIMS = 8 }; // more is refused; vision towers in model files have five

struct safetensors_entry {
    char *name;
    char dtype[16]; // as in the file: "F32", "BF16", "I32", "I64", "U8", "BOOL", "F64", "F16", ...
    int dims;
    int64_t shape[SAFETENSORS_DIMS];
    const unsigned char *bytes; // mapped, read-only
    size_t size;
};

// A file, memory-mapped. Every offset has been checked against the file's size and the shapes, and
// every byte belongs to one tensor. Tensors need not be aligned to their dtype: copy what may not be.
struct safetensors {
    char *path;
    struct safetensors_entry *entries; // in order of names
    size_t count;
    char **metadata_keys, **metadata_values;
    size_t metadata_count;
    void *map;
    size_t map_size;
};

int safetensors_open(struct safetensors *file, const char *path, struct error *err);
void safetensors_close(struct safetensors *file);
const struct safetensors_entry *safetensors_find(const struct safetensors *file, const char *name);
// The entry, if its dtype and shape are as wanted; else an error naming file, tensor and both shapes.
// A wanted dimension of -1 is any.
const struct safetensors_entry *safetensors_get(const struct safetensors *file, const char *name,
                                                const char *dtype, int dims, const int64_t *shape,
                                                struct error *err);
const char *safetensors_metadata(const struct safetensors *file, const char *key); // NULL: absent

// Writing: declare all tensors, then write their bytes in any order and any pieces (also from several
// threads), then finish. The file is pre-sized at begin.
struct safetensors_writer;
int safetensors_writer_open(struct safetensors_writer **writer, const char *path,
                            struct error *err);
void safetensors_writer_metadata(struct safetensors_writer *writer, const char *key,
                                 const char *value);
// Returns the tensor's index.
int safetensors_writer_add(struct safetensors_writer *writer, const char *name, enum dtype dtype,
                           int dims, const int64_t *shape);
// The same with the dtype's name in the file, of elements of so many bytes: "BOOL", 1.
int safetensors_writer_add_as(struct safetensors_writer *writer, const char *name,
                              const char *dtype, size_t element_size, int dims,
                              const int64_t *shape);
// Writes header and sizes the file (a full disk shows here).
int safetensors_writer_begin(struct safetensors_writer *writer, struct error *err);
// Bytes of tensor `index` from byte `offset` of the tensor on.
int safetensors_writer_write(struct safetensors_writer *writer, int index, size_t offset,
                             const void *bytes, size_t size, struct error *err);
// fsync and close. Also frees the writer after errors (commit false: the file is removed).
int safetensors_writer_close(struct safetensors_writer *writer, bool commit, struct error *err);

#endif
