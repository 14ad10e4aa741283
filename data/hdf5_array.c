// Owns datasets of HDF5 files: type, shape, place, and reading rows of them. Datasets stored in one
// piece or in unfiltered chunks of whole rows are read by pread, everything else through libhdf5.
#include "data/hdf5_file.h"

#include <errno.h>
#include <hdf5.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "data/hdf5_internal.h"

enum {
    // libhdf5 walks all chunks before the one asked for, so a table costs the square of their number.
    CHUNKS_MAX = 16384,
    PIECE_BYTES = 16384,
    FILTERS_MAX = 32,
    FILTER_NAME_MAX = 32
};

// What a damaged file can make us or libhdf5 allocate is bounded by these: bytes of a filtered
// dataset (or of one chunk) are at most PLAIN_BYTES, or EXPANSION_MAX for a byte of the file (deflate
// reaches 1032).
static const int64_t PLAIN_BYTES = 64 << 20;
static const int64_t EXPANSION_MAX = 1100;

static int array_fault(const struct hdf5_array *array, const struct hdf5_file *file,
                       struct error *err, const char *what)
{
    return error_add(err, "%s: %s: %s", file->path, array->name, what);
}

static int library_fault(const struct hdf5_array *array, const struct hdf5_file *file,
                         struct error *err)
{
    char reason[HDF5_REASON_MAX];
    hdf5_reason(reason);
    return error_add(err, "%s: %s can not be read: %s", file->path, array->name, reason);
}

static int64_t row_bytes(const struct hdf5_array *array)
{
    return array->row_elements * (int64_t)array->element_size;
}

bool hdf5_array_exists(const struct hdf5_file *file, const char *name)
{
    return H5Lexists(file->id, name, H5P_DEFAULT) > 0;
}

// A link to another file would be read from this file's bytes.
static int open_dataset(struct hdf5_array *array, const struct hdf5_file *file, struct error *err)
{
    if (!hdf5_array_exists(file, array->name))
        return array_fault(array, file, err, "the dataset is missing");
    H5L_info_t link;
    if (H5Lget_info(file->id, array->name, &link, H5P_DEFAULT) < 0)
        return library_fault(array, file, err);
    if (link.type != H5L_TYPE_HARD)
        return array_fault(array, file, err, "is a link; the data must be in the shard itself");
    array->id = H5Dopen2(file->id, array->name, H5P_DEFAULT);
    return array->id < 0 ? library_fault(array, file, err) : 0;
}

static int read_integer_type(struct hdf5_array *array, const struct hdf5_file *file, hid_t type,
                             struct error *err)
{
    size_t size = H5Tget_size(type);
    if ((size != 1 && size != 2 && size != 4 && size != 8) || H5Tget_offset(type) != 0 ||
        H5Tget_precision(type) != 8 * size)
        return array_fault(array, file, err, "integers must have 8, 16, 32 or 64 bits");
    array->kind = HDF5_INTEGER;
    array->element_size = size;
    array->stored_size = size;
    array->is_signed = H5Tget_sign(type) == H5T_SGN_2;
    array->big_endian = H5Tget_order(type) == H5T_ORDER_BE;
    return 0;
}

static int read_type(struct hdf5_array *array, const struct hdf5_file *file, struct error *err)
{
    int result = 0;
    hid_t base = -1, type = H5Dget_type(array->id);
    if (type < 0)
        return library_fault(array, file, err);
    H5T_class_t kind = H5Tget_class(type);
    if (kind == H5T_INTEGER) {
        result = read_integer_type(array, file, type, err);
    } else if (kind == H5T_ENUM && (base = H5Tget_super(type)) >= 0) {
        result = read_integer_type(array, file, base, err); // how h5py writes booleans
    } else if (kind == H5T_FLOAT) {
        array->kind = HDF5_FLOAT;
        array->element_size = sizeof(float);
        array->stored_size = H5Tget_size(type);
        if (H5Tequal(type, H5T_IEEE_F32LE) <= 0)
            snprintf(array->slow_reason, sizeof(array->slow_reason),
                     "stored as other than float32");
    } else {
        result = array_fault(array, file, err, "holds neither integers nor floats");
    }
    if (base >= 0)
        H5Tclose(base);
    H5Tclose(type);
    return result;
}

static int read_shape(struct hdf5_array *array, const struct hdf5_file *file, int dims,
                      struct error *err)
{
    hid_t space = H5Dget_space(array->id);
    if (space < 0)
        return library_fault(array, file, err);
    int result = 0;
    hsize_t shape[HDF5_DIMS] = {0};
    array->dims = H5Sget_simple_extent_ndims(space);
    if (array->dims != dims) {
        result = error_add(err, "%s: %s has %d dimensions; %d are wanted", file->path, array->name,
                           array->dims, dims);
    } else if (H5Sget_simple_extent_dims(space, shape, NULL) < 0) {
        result = library_fault(array, file, err);
    }
    H5Sclose(space);
    // Anything larger than this is nonsense, and products below must not overflow.
    int64_t elements = 1;
    for (int i = 0; i < dims && result == 0; i++) {
        array->shape[i] = (int64_t)shape[i];
        if (shape[i] > INT64_MAX / 8 ||
            __builtin_mul_overflow(elements, array->shape[i], &elements) ||
            elements > INT64_MAX / 8)
            result = array_fault(array, file, err, "its shape is impossibly large");
    }
    if (result != 0)
        return result;
    array->row_elements = 1;
    for (int i = 1; i < dims; i++)
        array->row_elements *= array->shape[i];
    return 0;
}

static int place_contiguous(struct hdf5_array *array, const struct hdf5_file *file, hid_t creation,
                            struct error *err)
{
    if (H5Pget_external_count(creation) > 0)
        return array_fault(array, file, err, "is stored in other files; copy it into the shard");
    uint64_t bytes = (uint64_t)array->shape[0] * (uint64_t)array->row_elements * array->stored_size;
    if (bytes == 0)
        return 0;
    array->offset = H5Dget_offset(array->id);
    if (array->offset == HADDR_UNDEF)
        return array_fault(array, file, err, "has a shape, but was never written");
    if (array->offset > file->size || bytes > file->size - array->offset)
        return error_add(err, "%s: %s: truncated: its %llu bytes begin at %llu, the file has %llu",
                         file->path, array->name, (unsigned long long)bytes,
                         (unsigned long long)array->offset, (unsigned long long)file->size);
    if (H5Dget_storage_size(array->id) != bytes)
        return array_fault(array, file, err, "its storage is not as large as its shape");
    array->access = array->slow_reason[0] == '\0' ? HDF5_DIRECT : HDF5_LIBRARY;
    return 0;
}

// Every filter must be there, else the first read would fail after training has started.
static int check_filters(struct hdf5_array *array, const struct hdf5_file *file, hid_t creation,
                         int filters, struct error *err)
{
    for (int i = 0; i < filters && i < FILTERS_MAX; i++) {
        char name[FILTER_NAME_MAX] = "";
        unsigned flags = 0, config = 0;
        size_t values = 0;
        H5Z_filter_t filter = H5Pget_filter2(creation, (unsigned)i, &flags, &values, NULL,
                                             sizeof(name), name, &config);
        if (filter < 0)
            return library_fault(array, file, err);
        name[sizeof(name) - 1] = '\0';
        if (H5Zfilter_avail(filter) <= 0)
            return error_add(err,
                             "%s: %s is stored through the HDF5 filter %d (%s), which is not "
                             "installed here; write it without compression",
                             file->path, array->name, (int)filter, name);
        snprintf(array->slow_reason, sizeof(array->slow_reason), "stored through the filter %s",
                 name);
    }
    return 0;
}

// Number of chunks that the shape needs, or -1 when it is beyond all reason.
static int64_t chunks_needed(const struct hdf5_array *array, const hsize_t *chunk)
{
    int64_t needed = 1;
    for (int i = 0; i < array->dims; i++) {
        int64_t across = (array->shape[i] + (int64_t)chunk[i] - 1) / (int64_t)chunk[i];
        if (__builtin_mul_overflow(needed, across, &needed))
            return -1;
    }
    return needed;
}

// Without this, libhdf5 would hand out fill values for chunks that are not there, and allocate
// whatever a damaged header says.
static int check_chunks(const struct hdf5_array *array, const struct hdf5_file *file,
                        const hsize_t *chunk, struct error *err)
{
    int64_t bytes = (int64_t)array->stored_size, limit = 0;
    for (int i = 0; i < array->dims; i++)
        if (chunk[i] == 0 || chunk[i] > UINT32_MAX ||
            __builtin_mul_overflow(bytes, (int64_t)chunk[i], &bytes))
            return array_fault(array, file, err, "its chunk shape is impossible");
    if (__builtin_mul_overflow((int64_t)file->size, EXPANSION_MAX, &limit))
        limit = INT64_MAX;
    limit = limit > PLAIN_BYTES ? limit : PLAIN_BYTES;
    if (bytes > limit ||
        array->shape[0] * array->row_elements > limit / (int64_t)array->stored_size)
        return array_fault(array, file, err, "its shape is larger than the file can hold");

    hid_t space = H5Dget_space(array->id);
    hsize_t there = 0;
    int result = 0;
    if (H5Dget_num_chunks(array->id, space, &there) < 0)
        result = library_fault(array, file, err);
    H5Sclose(space);
    if (result != 0)
        return -1;
    int64_t needed = chunks_needed(array, chunk);
    if (needed < 0 || there != (hsize_t)needed)
        return error_add(err, "%s: %s: %llu of its %lld chunks were written", file->path,
                         array->name, (unsigned long long)there, (long long)needed);
    return 0;
}

static int read_chunk_table(struct hdf5_array *array, const struct hdf5_file *file, int64_t chunks,
                            struct error *err)
{
    uint64_t bytes = (uint64_t)array->chunk_rows * (uint64_t)row_bytes(array);
    array->chunk_offsets = memory_alloc((size_t)chunks, sizeof(*array->chunk_offsets));
    hid_t space = H5Dget_space(array->id);
    int result = 0;
    for (int64_t i = 0; i < chunks && result == 0; i++) {
        hsize_t at[HDF5_DIMS] = {0}, size = 0;
        haddr_t address = HADDR_UNDEF;
        unsigned mask = 0;
        if (H5Dget_chunk_info(array->id, space, (hsize_t)i, at, &mask, &address, &size) < 0) {
            result = library_fault(array, file, err);
        } else if (at[0] % (hsize_t)array->chunk_rows != 0 ||
                   at[0] / (hsize_t)array->chunk_rows >= (hsize_t)chunks || size != bytes) {
            result = array_fault(array, file, err, "its chunk index is damaged");
        } else if (address > file->size || bytes > file->size - address) {
            result = error_add(err,
                               "%s: %s: truncated: the %llu bytes from row %llu on begin at %llu, "
                               "the file has %llu",
                               file->path, array->name, (unsigned long long)bytes,
                               (unsigned long long)at[0], (unsigned long long)address,
                               (unsigned long long)file->size);
        } else {
            array->chunk_offsets[at[0] / (hsize_t)array->chunk_rows] = address;
        }
    }
    H5Sclose(space);
    // A damaged index may name a chunk twice and another never; offset 0 is the superblock's.
    for (int64_t i = 0; i < chunks && result == 0; i++)
        if (array->chunk_offsets[i] == 0)
            result = array_fault(array, file, err, "its chunk index is damaged");
    return result;
}

static int place_chunked(struct hdf5_array *array, const struct hdf5_file *file, hid_t creation,
                         struct error *err)
{
    hsize_t chunk[HDF5_DIMS] = {0};
    int filters = H5Pget_nfilters(creation);
    if (filters < 0 || H5Pget_chunk(creation, array->dims, chunk) != array->dims)
        return library_fault(array, file, err);
    if (array->shape[0] * array->row_elements == 0)
        return 0;
    if (check_filters(array, file, creation, filters, err) != 0 ||
        check_chunks(array, file, chunk, err) != 0)
        return -1;
    bool whole_rows = true;
    for (int i = 1; i < array->dims; i++)
        whole_rows &= (int64_t)chunk[i] == array->shape[i];
    int64_t chunks = chunks_needed(array, chunk);
    if (array->slow_reason[0] == '\0' && (!whole_rows || file->user_block || chunks > CHUNKS_MAX))
        snprintf(array->slow_reason, sizeof(array->slow_reason), "%s",
                 !whole_rows        ? "stored in chunks that split tokens"
                 : file->user_block ? "stored in chunks behind a user block"
                                    : "stored in very many small chunks");
    if (array->slow_reason[0] != '\0')
        return 0;
    array->access = HDF5_CHUNKS;
    array->chunk_rows = (int64_t)chunk[0];
    return read_chunk_table(array, file, chunks, err);
}

static int place(struct hdf5_array *array, const struct hdf5_file *file, struct error *err)
{
    array->access = HDF5_LIBRARY;
    hid_t creation = H5Dget_create_plist(array->id);
    if (creation < 0)
        return library_fault(array, file, err);
    int result = 0;
    switch (H5Pget_layout(creation)) {
    case H5D_CONTIGUOUS:
        result = place_contiguous(array, file, creation, err);
        break;
    case H5D_CHUNKED:
        result = place_chunked(array, file, creation, err);
        break;
    case H5D_COMPACT:
        if (H5Dget_storage_size(array->id) !=
            (hsize_t)(array->shape[0] * array->row_elements) * array->stored_size)
            result = array_fault(array, file, err, "its storage is not as large as its shape");
        snprintf(array->slow_reason, sizeof(array->slow_reason), "stored in the file's header");
        break;
    case H5D_VIRTUAL:
        result = array_fault(array, file, err, "is virtual; copy the data into the shard");
        break;
    default:
        result = array_fault(array, file, err, "has a storage layout that is not known");
    }
    H5Pclose(creation);
    return result;
}

int hdf5_array_open(struct hdf5_array *array, const struct hdf5_file *file, const char *name,
                    int dims, struct error *err)
{
    BUG_UNLESS(dims >= 1 && dims <= HDF5_DIMS);
    *array = (struct hdf5_array){.name = name, .id = -1};
    if (open_dataset(array, file, err) != 0 || read_type(array, file, err) != 0 ||
        read_shape(array, file, dims, err) != 0 || place(array, file, err) != 0) {
        hdf5_array_close(array);
        return -1;
    }
    if (array->access != HDF5_LIBRARY) {
        H5Dclose(array->id);
        array->id = -1;
    }
    return 0;
}

void hdf5_array_close(struct hdf5_array *array)
{
    if (array->id >= 0)
        H5Dclose(array->id);
    array->id = -1;
    free(array->chunk_offsets);
    array->chunk_offsets = NULL;
}

static int read_bytes(const struct hdf5_array *array, const struct hdf5_file *file, uint64_t offset,
                      void *bytes, uint64_t size, struct error *err)
{
    unsigned char *at = bytes;
    while (size > 0) {
        ssize_t got = pread(file->fd, at, size, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return error_add(err, "%s: %s: reading at byte %llu failed: %s", file->path,
                             array->name, (unsigned long long)offset, strerror(errno));
        if (got == 0)
            return error_add(err, "%s: %s: truncated since it was opened: nothing at byte %llu",
                             file->path, array->name, (unsigned long long)offset);
        at += got;
        offset += (uint64_t)got;
        size -= (uint64_t)got;
    }
    return 0;
}

static int read_chunks(const struct hdf5_array *array, const struct hdf5_file *file, int64_t first,
                       int64_t count, unsigned char *rows, struct error *err)
{
    int64_t bytes = row_bytes(array);
    while (count > 0) {
        int64_t skip = first % array->chunk_rows;
        int64_t part = array->chunk_rows - skip < count ? array->chunk_rows - skip : count;
        uint64_t offset =
            array->chunk_offsets[first / array->chunk_rows] + (uint64_t)(skip * bytes);
        if (read_bytes(array, file, offset, rows, (uint64_t)(part * bytes), err) != 0)
            return -1;
        rows += part * bytes;
        first += part;
        count -= part;
    }
    return 0;
}

static int read_library(const struct hdf5_array *array, const struct hdf5_file *file, int64_t first,
                        int64_t count, void *rows, struct error *err)
{
    hsize_t start[HDF5_DIMS] = {(hsize_t)first}, extent[HDF5_DIMS] = {(hsize_t)count};
    for (int i = 1; i < array->dims; i++)
        extent[i] = (hsize_t)array->shape[i];
    hdf5_lock();
    hid_t space = H5Dget_space(array->id);
    hid_t memory = H5Screate_simple(array->dims, extent, NULL);
    // Integers come as they are stored; converting them is hdf5_array_read_integers' work.
    hid_t type = array->kind == HDF5_FLOAT ? H5Tcopy(H5T_NATIVE_FLOAT) : H5Dget_type(array->id);
    herr_t got = H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, extent, NULL);
    if (got >= 0)
        got = H5Dread(array->id, type, memory, space, H5P_DEFAULT, rows);
    int result = 0;
    if (got < 0) {
        char reason[HDF5_REASON_MAX];
        hdf5_reason(reason);
        result = error_add(err, "%s: %s: rows %lld to %lld can not be read: %s", file->path,
                           array->name, (long long)first, (long long)(first + count - 1), reason);
    }
    H5Tclose(type);
    H5Sclose(memory);
    H5Sclose(space);
    hdf5_unlock();
    return result;
}

int hdf5_array_read(const struct hdf5_array *array, const struct hdf5_file *file, int64_t first,
                    int64_t count, void *rows, struct error *err)
{
    BUG_UNLESS(first >= 0 && count >= 0 && first + count <= array->shape[0]);
    if (count == 0 || array->row_elements == 0)
        return 0;
    int64_t bytes = row_bytes(array);
    switch (array->access) {
    case HDF5_DIRECT:
        return read_bytes(array, file, array->offset + (uint64_t)(first * bytes), rows,
                          (uint64_t)(count * bytes), err);
    case HDF5_CHUNKS:
        return read_chunks(array, file, first, count, rows, err);
    default:
        return read_library(array, file, first, count, rows, err);
    }
}

// A stored integer as 64 bits; *beyond: an unsigned value over INT64_MAX.
static int64_t load_integer(const struct hdf5_array *array, const unsigned char *bytes,
                            bool *beyond)
{
    uint64_t value = 0;
    size_t size = array->element_size;
    for (size_t i = 0; i < size; i++)
        value = value << 8 | bytes[array->big_endian ? i : size - 1 - i];
    unsigned spare = (unsigned)(64 - 8 * size);
    if (array->is_signed)
        return (int64_t)(value << spare) >> spare;
    *beyond = value > INT64_MAX;
    return (int64_t)value;
}

static void store_integer(int64_t value, bool beyond, size_t size, bool is_signed, void *out)
{
    if (size < 8) {
        int64_t highest = ((int64_t)1 << (8 * size - (is_signed ? 1 : 0))) - 1;
        // Below 0 without a sign is the highest too: as 0 it would pass for a value of the file.
        if (beyond || value > highest || (value < 0 && !is_signed))
            value = highest;
        else if (value < -highest - 1)
            value = -highest - 1;
    }
    memcpy(out, &value, size); // little-endian machines only, as for the shards' bytes themselves
}

int hdf5_array_read_integers(const struct hdf5_array *array, const struct hdf5_file *file,
                             int64_t first, int64_t count, size_t size, bool is_signed, void *rows,
                             struct error *err)
{
    BUG_UNLESS(array->kind == HDF5_INTEGER && array->dims == 1);
    size_t stored = array->element_size;
    if (stored == size && !array->big_endian && (size == 8 || array->is_signed == is_signed))
        return hdf5_array_read(array, file, first, count, rows, err);
    unsigned char piece[PIECE_BYTES] = {0};
    unsigned char *out = rows;
    while (count > 0) {
        int64_t part =
            count < (int64_t)(PIECE_BYTES / stored) ? count : (int64_t)(PIECE_BYTES / stored);
        if (hdf5_array_read(array, file, first, part, piece, err) != 0)
            return -1;
        for (int64_t i = 0; i < part; i++, out += size) {
            bool beyond = false;
            int64_t value = load_integer(array, piece + (size_t)i * stored, &beyond);
            store_integer(value, beyond, size, is_signed, out);
        }
        first += part;
        count -= part;
    }
    return 0;
}
