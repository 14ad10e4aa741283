// Owns writing a shard: contiguous datasets, allocated early, without fill and filter, aligned.
#include "data/shard.h"

#include <errno.h>
#include <fcntl.h>
#include <hdf5.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/memory.h"
#include "data/hdf5_file.h"

enum { SHARD_ALIGNMENT = 4096 };

// A file being written. ok falls once and stays; every call after that does nothing.
struct writer {
    hid_t file, dataset_options;
    bool ok;
};

static void write_attribute(struct writer *writer, const char *name, hid_t type, hid_t memory_type,
                            int64_t count, const void *values)
{
    if (!writer->ok)
        return;
    hsize_t extent = (hsize_t)count;
    hid_t space = count > 0 ? H5Screate_simple(1, &extent, NULL) : H5Screate(H5S_SCALAR);
    hid_t id = H5Acreate2(writer->file, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    writer->ok = id >= 0 && H5Awrite(id, memory_type, values) >= 0;
    if (id >= 0)
        H5Aclose(id);
    H5Sclose(space);
}

static void write_text(struct writer *writer, const char *name, const char *text)
{
    hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, H5T_VARIABLE);
    H5Tset_cset(type, H5T_CSET_UTF8);
    write_attribute(writer, name, type, type, 0, &text);
    H5Tclose(type);
}

static void write_dataset(struct writer *writer, const char *name, hid_t type, hid_t memory_type,
                          int dims, const hsize_t *shape, const void *values)
{
    if (!writer->ok)
        return;
    hid_t space = H5Screate_simple(dims, shape, NULL);
    hid_t id = H5Dcreate2(writer->file, name, type, space, H5P_DEFAULT, writer->dataset_options,
                          H5P_DEFAULT);
    writer->ok = id >= 0 && H5Dwrite(id, memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) >= 0;
    if (id >= 0)
        H5Dclose(id);
    H5Sclose(space);
}

static void write_attributes(struct writer *writer, const struct shard_content *content)
{
    static const char *const last_hidden[] = {"pre_norm", "post_norm", "absent"};
    int32_t version = 1;
    write_text(writer, "format", content->manifest ? "dtrain-manifest" : "dtrain-features");
    write_attribute(writer, "format_version", H5T_STD_I32LE, H5T_NATIVE_INT32, 0, &version);
    write_text(writer, "target_model", content->target_model);
    write_attribute(writer, "target_layer_ids", H5T_STD_I32LE, H5T_NATIVE_INT32, content->layers,
                    content->layer_ids);
    write_attribute(writer, "hidden_size", H5T_STD_I64LE, H5T_NATIVE_INT64, 0,
                    &content->hidden_size);
    write_attribute(writer, "vocab_size", H5T_STD_I64LE, H5T_NATIVE_INT64, 0, &content->vocab_size);
    bool float8 = content->codes != NULL || (content->manifest && content->float8);
    write_text(writer, "dtype", float8 ? "float8_e4m3" : "bfloat16");
    write_text(writer, "last_hidden", last_hidden[content->last_hidden]);
    write_text(writer, "created_by", "dtrain");
}

// Tokens [first, first + count) of the features, as datasets follow each other.
static uint32_t features_crc(const struct shard_content *content, uint32_t crc, size_t first,
                             size_t count)
{
    size_t width = (size_t)content->hidden_size, layers = (size_t)content->layers;
    size_t planes = (size_t)content->planes;
    if (content->codes != NULL) {
        crc = crc32c(crc, content->codes + first * layers * width, count * layers * width);
        crc = crc32c(crc, content->scales + first * layers, count * layers * sizeof(float));
        planes -= layers;
    }
    return planes == 0 ? crc
                       : crc32c(crc, content->hidden_states + first * planes * width,
                                count * planes * width * sizeof(bf16));
}

static uint32_t *document_crcs(const struct shard_content *content)
{
    uint32_t *crcs = memory_alloc((size_t)content->documents, sizeof(*crcs));
    for (int64_t d = 0; d < content->documents; d++) {
        int64_t first = content->doc_offsets[d];
        size_t count = (size_t)(content->doc_offsets[d + 1] - first);
        uint32_t crc = crc32c(0, content->input_ids + first, count * sizeof(int32_t));
        crc = crc32c(crc, content->loss_mask + first, count);
        crcs[d] = features_crc(content, crc, (size_t)first, count);
    }
    return crcs;
}

static void write_features(struct writer *writer, const struct shard_content *content)
{
    hsize_t tokens = (hsize_t)content->tokens, layers = (hsize_t)content->layers;
    hsize_t width = (hsize_t)content->hidden_size;
    if (content->codes == NULL) {
        write_dataset(writer, "hidden_states", H5T_STD_U16LE, H5T_NATIVE_UINT16, 3,
                      (hsize_t[]){tokens, (hsize_t)content->planes, width}, content->hidden_states);
        return;
    }
    write_dataset(writer, "hidden_states", H5T_STD_U8LE, H5T_NATIVE_UINT8, 3,
                  (hsize_t[]){tokens, layers, width}, content->codes);
    write_dataset(writer, "scales", H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, 2,
                  (hsize_t[]){tokens, layers}, content->scales);
    if (content->last_hidden != LAST_HIDDEN_ABSENT)
        write_dataset(writer, "last_hidden", H5T_STD_U16LE, H5T_NATIVE_UINT16, 2,
                      (hsize_t[]){tokens, width}, content->hidden_states);
}

static void write_datasets(struct writer *writer, const struct shard_content *content)
{
    hsize_t documents = (hsize_t)content->documents, offsets = documents + 1;
    hsize_t tokens = (hsize_t)content->tokens;
    write_dataset(writer, "doc_offsets", H5T_STD_I64LE, H5T_NATIVE_INT64, 1, &offsets,
                  content->doc_offsets);
    if (content->doc_ids != NULL)
        write_dataset(writer, "doc_id", H5T_STD_U64LE, H5T_NATIVE_UINT64, 1, &documents,
                      content->doc_ids);
    if (content->write_crc) {
        uint32_t *crcs = document_crcs(content);
        write_dataset(writer, "doc_crc32c", H5T_STD_U32LE, H5T_NATIVE_UINT32, 1, &documents, crcs);
        free(crcs);
    }
    write_dataset(writer, "input_ids", H5T_STD_I32LE, H5T_NATIVE_INT32, 1, &tokens,
                  content->input_ids);
    write_dataset(writer, "loss_mask", H5T_STD_U8LE, H5T_NATIVE_UINT8, 1, &tokens,
                  content->loss_mask);
    if (content->teacher_top1 != NULL) {
        write_dataset(writer, "teacher_top1", H5T_STD_I32LE, H5T_NATIVE_INT32, 1, &tokens,
                      content->teacher_top1);
        write_dataset(writer, "teacher_top1_logit", H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, 1, &tokens,
                      content->teacher_top1_logit);
        write_dataset(writer, "teacher_lse", H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, 1, &tokens,
                      content->teacher_lse);
    }
    if (!content->manifest)
        write_features(writer, content);
}

static bool write_file(const char *path, const struct shard_content *content)
{
    hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    H5Pset_alignment(access, 1, SHARD_ALIGNMENT);
    struct writer writer = {.dataset_options = H5Pcreate(H5P_DATASET_CREATE), .ok = true};
    H5Pset_layout(writer.dataset_options, H5D_CONTIGUOUS);
    H5Pset_alloc_time(writer.dataset_options, H5D_ALLOC_TIME_EARLY);
    H5Pset_fill_time(writer.dataset_options, H5D_FILL_TIME_NEVER);
    writer.file = H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, access);
    writer.ok = writer.file >= 0;
    write_attributes(&writer, content);
    write_datasets(&writer, content);
    if (writer.file >= 0 && H5Fclose(writer.file) < 0)
        writer.ok = false;
    H5Pclose(writer.dataset_options);
    H5Pclose(access);
    return writer.ok;
}

// A file's name is durable only once its folder is.
static int sync_path(const char *path, int flags)
{
    int fd = open(path, flags | O_CLOEXEC);
    if (fd < 0)
        return -1;
    int result = fsync(fd);
    close(fd);
    return result;
}

static int sync_folder_of(const char *path)
{
    char *copy = memory_strdup(path);
    int result = sync_path(dirname(copy), O_RDONLY | O_DIRECTORY);
    free(copy);
    return result;
}

int shard_write(const char *path, const struct shard_content *content, struct error *err)
{
    char *temporary = memory_format("%s.%ld.tmp", path, (long)getpid());
    errno = 0;
    hdf5_lock();
    bool written = write_file(temporary, content);
    hdf5_unlock();
    int result = 0;
    if (!written || sync_path(temporary, O_RDONLY) != 0 || rename(temporary, path) != 0 ||
        sync_folder_of(path) != 0) {
        result = error_set(err, "%s: can not be written: %s", path,
                           errno != 0 ? strerror(errno) : "libhdf5 failed");
        unlink(temporary);
    }
    free(temporary);
    return result;
}
