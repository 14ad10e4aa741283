// libhdf5 as shards need it: attributes, where datasets lie, rows of them. Only files of this folder
// include this. Knows nothing of what the datasets mean.
#ifndef DATA_HDF5_FILE_H
#define DATA_HDF5_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

struct hdf5_file {
    const char *path; // borrowed
    int64_t id;       // libhdf5's handle, -1 when closed
    int fd;           // the same file, for pread
    uint64_t size;
    int64_t time_ns; // modification time
    bool user_block; // addresses from libhdf5 may then not be file offsets
};

enum { HDF5_DIMS = 3 };

enum hdf5_kind { HDF5_INTEGER, HDF5_FLOAT };

// How the rows (first dimension) of a dataset are read.
enum hdf5_access {
    HDF5_DIRECT, // one range of the file, by pread
    HDF5_CHUNKS, // pieces of whole rows, by pread
    HDF5_LIBRARY // through libhdf5 under its lock
};

struct hdf5_array {
    const char *name; // borrowed
    int dims;
    int64_t shape[HDF5_DIMS];
    int64_t row_elements;
    enum hdf5_kind kind;
    size_t element_size; // as hdf5_array_read gives it; floats are always float32 of this machine
    size_t stored_size;  // of an element in the file
    bool is_signed, big_endian;
    enum hdf5_access access;
    char slow_reason[64];    // why it is not read by pread; "" when it is
    uint64_t offset;         // HDF5_DIRECT
    int64_t chunk_rows;      // HDF5_CHUNKS
    uint64_t *chunk_offsets; // HDF5_CHUNKS
    int64_t id;              // HDF5_LIBRARY: the open dataset, else -1
};

// libhdf5 is used by one thread at a time. Every function below but hdf5_array_read and
// hdf5_array_read_integers, which take it themselves, is called with this lock held.
void hdf5_lock(void);
void hdf5_unlock(void);

// Opens for reading; tells a truncated file by both sizes.
int hdf5_file_open(struct hdf5_file *file, const char *path, struct error *err);
// Closes libhdf5's handle (kept only for arrays with HDF5_LIBRARY) and the descriptor.
void hdf5_file_close(struct hdf5_file *file);
// Closes libhdf5's handle alone: arrays read by pread go on working.
void hdf5_file_close_library(struct hdf5_file *file);

// Attributes of the root group. Faults are added to err as lines that name file and attribute.
bool hdf5_attribute_exists(const struct hdf5_file *file, const char *name);
// Integers of any width, scalar or one-dimensional, up to `capacity`.
int hdf5_attribute_integers(const struct hdf5_file *file, const char *name, int64_t *values,
                            int64_t capacity, int64_t *count, struct error *err);
// A string, fixed or of variable length; the caller frees it.
int hdf5_attribute_text(const struct hdf5_file *file, const char *name, char **text,
                        struct error *err);

bool hdf5_array_exists(const struct hdf5_file *file, const char *name);
// Finds type, shape and place of a dataset of `dims` dimensions. Every byte of it is known to lie
// inside the file afterwards (filtered datasets: every chunk exists, and its size is plausible).
// Faults are added to err as lines. Close it also after a fault.
int hdf5_array_open(struct hdf5_array *array, const struct hdf5_file *file, const char *name,
                    int dims, struct error *err);
void hdf5_array_close(struct hdf5_array *array);

// Rows [first, first + count) as stored: [count, row_elements] of element_size bytes. Any thread.
int hdf5_array_read(const struct hdf5_array *array, const struct hdf5_file *file, int64_t first,
                    int64_t count, void *rows, struct error *err);
// The same, converted to integers of `size` (1, 2, 4, 8) bytes. Values that do not fit become the
// nearest that does; 8-byte values keep their bits.
int hdf5_array_read_integers(const struct hdf5_array *array, const struct hdf5_file *file,
                             int64_t first, int64_t count, size_t size, bool is_signed, void *rows,
                             struct error *err);

#endif
