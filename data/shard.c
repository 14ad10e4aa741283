// Owns opening a shard: its attributes, that its datasets fit each other, its documents; and reads of
// token ranges. Values of documents are judged in shard_scan.c, writing is in shard_write.c.
#include "data/shard.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/rng.h"
#include "base/timer.h"
#include "data/hdf5_file.h"

enum {
    FORMAT_VERSION = 1,
    LAYERS_MAX = 1024,
    HIDDEN_SIZE_MAX = 1 << 20,
    APART_BYTES = 128 << 10,
};

struct shard_files {
    struct hdf5_file file;
    struct hdf5_array ids, mask, hidden;
    struct hdf5_array scales, last; // float8
    struct hdf5_array top1, top1_logit, lse;
    atomic_bool slow_told;
};

static int missing_attribute(const struct shard *shard, const char *name, struct error *err)
{
    return error_add(err, "%s: attribute %s is missing; it is required and never guessed",
                     shard->path, name);
}

static int required_text(const struct shard *shard, const char *name, char **text,
                         struct error *err)
{
    if (!hdf5_attribute_exists(&shard->files->file, name))
        return missing_attribute(shard, name, err);
    return hdf5_attribute_text(&shard->files->file, name, text, err);
}

static int required_integer(const struct shard *shard, const char *name, int64_t highest,
                            int64_t *value, struct error *err)
{
    int64_t count = 0;
    if (!hdf5_attribute_exists(&shard->files->file, name))
        return missing_attribute(shard, name, err);
    if (hdf5_attribute_integers(&shard->files->file, name, value, 1, &count, err) != 0)
        return -1;
    if (*value < 1 || *value > highest)
        return error_add(err, "%s: attribute %s is %lld; 1 to %lld are possible", shard->path, name,
                         (long long)*value, (long long)highest);
    return 0;
}

// A shard of another format or version is not looked at further: nothing else in it need make sense.
static int check_format(const struct shard *shard, struct error *err)
{
    const char *wanted = shard->manifest ? "dtrain-manifest" : "dtrain-features";
    char *format = NULL;
    int64_t version = 0;
    int result = required_text(shard, "format", &format, err);
    if (result == 0 && strcmp(format, wanted) != 0)
        result = error_add(err, "%s: attribute format is \"%s\", not \"%s\"", shard->path, format,
                           wanted);
    free(format);
    if (result == 0)
        result = required_integer(shard, "format_version", INT64_MAX, &version, err);
    if (result == 0 && version > FORMAT_VERSION)
        result = error_add(err,
                           "%s: format_version %lld is newer than this program reads (%d); use a "
                           "newer dtrain",
                           shard->path, (long long)version, FORMAT_VERSION);
    return result;
}

static int read_dtype(const struct shard *shard, bool *float8, struct error *err)
{
    char *dtype = NULL;
    int result = required_text(shard, "dtype", &dtype, err);
    if (result != 0)
        return -1;
    *float8 = strcmp(dtype, "float8_e4m3") == 0;
    if (strcmp(dtype, "float16") == 0)
        result = error_add(
            err, "%s: dtype float16 is refused: hidden states overflow it; write bfloat16",
            shard->path);
    else if (!*float8 && strcmp(dtype, "bfloat16") != 0)
        result =
            error_add(err, "%s: attribute dtype is \"%s\"; bfloat16 and float8_e4m3 are possible",
                      shard->path, dtype);
    free(dtype);
    return result;
}

static int read_last_hidden(struct shard *shard, struct error *err)
{
    static const char *const names[] = {"pre_norm", "post_norm", "absent"};
    char *text = NULL;
    if (required_text(shard, "last_hidden", &text, err) != 0)
        return -1;
    int result = -1;
    for (int i = 0; i < 3; i++)
        if (strcmp(text, names[i]) == 0) {
            shard->last_hidden = (enum last_hidden)i;
            result = 0;
        }
    if (result != 0)
        error_add(
            err, "%s: attribute last_hidden is \"%s\"; pre_norm, post_norm and absent are possible",
            shard->path, text);
    free(text);
    return result;
}

// Ascending, because servers collect the layers in the order of the model, whatever a list says.
static int read_layer_ids(struct shard *shard, struct error *err)
{
    const char *name = "target_layer_ids";
    if (!hdf5_attribute_exists(&shard->files->file, name))
        return missing_attribute(shard, name, err);
    shard->layer_ids = memory_alloc(LAYERS_MAX, sizeof(*shard->layer_ids));
    if (hdf5_attribute_integers(&shard->files->file, name, shard->layer_ids, LAYERS_MAX,
                                &shard->layers, err) != 0)
        return -1;
    int result = 0;
    const int64_t *ids = shard->layer_ids;
    for (int64_t i = 0; i < shard->layers; i++) {
        if (ids[i] < 0)
            result =
                error_add(err,
                          "%s: target_layer_ids holds %lld; ids are outputs of decoder layers, "
                          "from 0 on",
                          shard->path, (long long)ids[i]);
        else if (i > 0 && ids[i] == ids[i - 1])
            result = error_add(err, "%s: target_layer_ids holds %lld twice", shard->path,
                               (long long)ids[i]);
        else if (i > 0 && ids[i] < ids[i - 1])
            result = error_add(err, "%s: target_layer_ids are not ascending: %lld comes after %lld",
                               shard->path, (long long)ids[i], (long long)ids[i - 1]);
    }
    return result;
}

static int read_attributes(struct shard *shard, struct error *err)
{
    if (check_format(shard, err) != 0)
        return -1;
    int result = 0;
    bool float8 = false;
    result |= required_text(shard, "target_model", &shard->target_model, err);
    result |= read_layer_ids(shard, err);
    result |= required_integer(shard, "hidden_size", HIDDEN_SIZE_MAX, &shard->hidden_size, err);
    result |= required_integer(shard, "vocab_size", INT32_MAX, &shard->vocab_size, err);
    result |= read_dtype(shard, &float8, err);
    result |= read_last_hidden(shard, err);
    bool has_last = shard->last_hidden != LAST_HIDDEN_ABSENT;
    shard->planes = shard->layers + has_last;
    shard->features = feature_layout_make(shard->planes, has_last, shard->hidden_size, float8);
    return result;
}

// A dataset of integers, or of floats.
static int open_array(const struct shard *shard, struct hdf5_array *array, const char *name,
                      int dims, enum hdf5_kind kind, struct error *err)
{
    if (hdf5_array_open(array, &shard->files->file, name, dims, err) != 0)
        return -1;
    if (array->kind != kind)
        return error_add(err, "%s: %s must hold %s", shard->path, name,
                         kind == HDF5_INTEGER ? "integers" : "floats");
    return 0;
}

// A dataset of the bits of floats: bytes of e4m3, or bfloat16.
static int open_bits(const struct shard *shard, struct hdf5_array *array, const char *name,
                     int dims, size_t size, struct error *err)
{
    const char *wanted = size == 1 ? "codes of float8_e4m3 as uint8"
                                   : "the bits of bfloat16 as little-endian uint16";
    if (hdf5_array_open(array, &shard->files->file, name, dims, err) != 0)
        return -1;
    if (array->kind == HDF5_FLOAT)
        return error_add(err, "%s: %s is float%d; %s are wanted", shard->path, name,
                         (int)(8 * array->stored_size), wanted);
    if (array->stored_size != size || (size > 1 && array->big_endian))
        return error_add(err, "%s: %s has %s integers of %d bits; %s are wanted", shard->path, name,
                         array->big_endian ? "big-endian" : "little-endian",
                         (int)(8 * array->stored_size), wanted);
    if (array->shape[dims - 1] != shard->hidden_size)
        return error_add(err, "%s: %s is %lld wide; hidden_size is %lld", shard->path, name,
                         (long long)array->shape[dims - 1], (long long)shard->hidden_size);
    return 0;
}

// What a float8 shard has beside its codes.
static int open_float8(const struct shard *shard, struct error *err)
{
    struct shard_files *files = shard->files;
    int result = open_array(shard, &files->scales, "scales", 2, HDF5_FLOAT, err);
    if (result == 0 && files->scales.shape[1] != shard->layers)
        result = error_add(err, "%s: scales has %lld planes; there are %lld layer ids", shard->path,
                           (long long)files->scales.shape[1], (long long)shard->layers);
    if (shard->last_hidden != LAST_HIDDEN_ABSENT)
        result |= open_bits(shard, &files->last, "last_hidden", 2, 2, err);
    return result;
}

static int open_hidden(const struct shard *shard, struct error *err)
{
    struct hdf5_array *hidden = &shard->files->hidden;
    const struct feature_layout *f = &shard->features;
    int result = open_bits(shard, hidden, "hidden_states", 3, f->float8 ? 1 : 2, err);
    int64_t planes = f->float8 ? f->layers : f->planes;
    if (result == 0 && hidden->shape[1] != planes)
        result =
            error_add(err, "%s: hidden_states has %lld planes; %lld layer ids%s make %lld",
                      shard->path, (long long)hidden->shape[1], (long long)shard->layers,
                      planes > shard->layers ? " and a last hidden state" : "", (long long)planes);
    if (f->float8)
        result |= open_float8(shard, err);
    return result;
}

static int open_teacher(struct shard *shard, struct error *err)
{
    static const char *const names[] = {"teacher_top1", "teacher_top1_logit", "teacher_lse"};
    struct shard_files *files = shard->files;
    struct hdf5_array *arrays[] = {&files->top1, &files->top1_logit, &files->lse};
    int there = 0, result = 0;
    for (int i = 0; i < 3; i++)
        there += hdf5_array_exists(&files->file, names[i]);
    if (there == 0)
        return 0;
    for (int i = 0; i < 3; i++)
        result |=
            open_array(shard, arrays[i], names[i], 1, i == 0 ? HDF5_INTEGER : HDF5_FLOAT, err);
    shard->has_teacher = result == 0;
    return result;
}

// Datasets of one value a document, needed only while the shard is opened.
struct document_arrays {
    struct hdf5_array offsets, ids, crc;
    bool has_ids, has_crc;
};

static int open_document_arrays(const struct shard *shard, struct document_arrays *arrays,
                                struct error *err)
{
    const struct hdf5_file *file = &shard->files->file;
    arrays->has_ids = hdf5_array_exists(file, "doc_id");
    arrays->has_crc = hdf5_array_exists(file, "doc_crc32c");
    int result = open_array(shard, &arrays->offsets, "doc_offsets", 1, HDF5_INTEGER, err);
    if (arrays->has_ids)
        result |= open_array(shard, &arrays->ids, "doc_id", 1, HDF5_INTEGER, err);
    if (arrays->has_crc)
        result |= open_array(shard, &arrays->crc, "doc_crc32c", 1, HDF5_INTEGER, err);
    return result;
}

// Under the lock of libhdf5: everything that is not rows of datasets.
static int open_index(struct shard *shard, struct document_arrays *arrays, struct error *err)
{
    struct shard_files *files = shard->files;
    if (hdf5_file_open(&files->file, shard->path, err) != 0)
        return -1;
    shard->file_size = files->file.size;
    shard->file_time_ns = files->file.time_ns;
    if (read_attributes(shard, err) != 0)
        return -1;
    int result = open_document_arrays(shard, arrays, err);
    result |= open_array(shard, &files->ids, "input_ids", 1, HDF5_INTEGER, err);
    result |= open_array(shard, &files->mask, "loss_mask", 1, HDF5_INTEGER, err);
    if (shard->manifest && !arrays->has_ids)
        result = error_add(err, "%s: doc_id is missing; a manifest needs it", shard->path);
    if (shard->manifest)
        return result;
    result |= open_hidden(shard, err);
    result |= open_teacher(shard, err);
    return result;
}

static int read_offsets(struct shard *shard, const struct document_arrays *arrays,
                        struct error *err)
{
    int64_t documents = arrays->offsets.shape[0] - 1;
    shard->tokens = shard->files->ids.shape[0];
    if (documents < 1)
        return error_add(err, "%s: empty: it has no documents", shard->path);
    shard->documents = documents;
    shard->doc_offsets = memory_alloc((size_t)documents + 1, sizeof(*shard->doc_offsets));
    if (hdf5_array_read_integers(&arrays->offsets, &shard->files->file, 0, documents + 1, 8, true,
                                 shard->doc_offsets, err) != 0)
        return -1;
    const int64_t *offsets = shard->doc_offsets;
    if (offsets[0] != 0)
        return error_add(err, "%s: doc_offsets: document 0 begins at token %lld, not at 0",
                         shard->path, (long long)offsets[0]);
    for (int64_t d = 0; d < documents; d++) {
        // In this order nothing can overflow: offsets[d] is known to be 0 or more.
        if (offsets[d + 1] <= offsets[d] || offsets[d + 1] - offsets[d] > INT32_MAX)
            return error_add(err,
                             "%s: doc_offsets: document %lld begins at token %lld and ends at "
                             "%lld; at least 1 token and at most %d are possible",
                             shard->path, (long long)d, (long long)offsets[d],
                             (long long)offsets[d + 1], INT32_MAX);
    }
    if (offsets[documents] != shard->tokens)
        return error_add(err,
                         "%s: doc_offsets: document %lld ends at token %lld; input_ids has %lld",
                         shard->path, (long long)(documents - 1), (long long)offsets[documents],
                         (long long)shard->tokens);
    return 0;
}

static int check_document_rows(const struct shard *shard, const struct hdf5_array *array,
                               struct error *err)
{
    if (array->shape[0] == shard->documents)
        return 0;
    return error_add(err, "%s: %s has %lld values for %lld documents", shard->path, array->name,
                     (long long)array->shape[0], (long long)shard->documents);
}

static int read_document_arrays(struct shard *shard, const struct document_arrays *arrays,
                                struct error *err)
{
    const struct hdf5_file *file = &shard->files->file;
    size_t documents = (size_t)shard->documents;
    if ((arrays->has_ids && check_document_rows(shard, &arrays->ids, err) != 0) ||
        (arrays->has_crc && check_document_rows(shard, &arrays->crc, err) != 0))
        return -1;
    shard->doc_ids = memory_alloc(documents, sizeof(*shard->doc_ids));
    shard->has_doc_ids = arrays->has_ids;
    if (!arrays->has_ids) {
        const char *slash = strrchr(shard->path, '/');
        uint64_t name = 14695981039346656037u; // FNV-1a
        for (const char *c = slash != NULL ? slash + 1 : shard->path; *c != '\0'; c++)
            name = (name ^ (unsigned char)*c) * 1099511628211u;
        for (size_t d = 0; d < documents; d++)
            shard->doc_ids[d] = rng_mix(name, d);
    } else if (hdf5_array_read_integers(&arrays->ids, file, 0, shard->documents, 8, false,
                                        shard->doc_ids, err) != 0) {
        return -1;
    }
    if (!arrays->has_crc)
        return 0;
    shard->doc_crc32c = memory_alloc(documents, sizeof(*shard->doc_crc32c));
    return hdf5_array_read_integers(&arrays->crc, file, 0, shard->documents, 4, false,
                                    shard->doc_crc32c, err);
}

// Names the first token that a dataset lacks by its document and row.
static int check_token_rows(const struct shard *shard, const struct hdf5_array *array,
                            struct error *err)
{
    int64_t rows = array->shape[0];
    if (rows == shard->tokens)
        return 0;
    if (rows > shard->tokens)
        return error_add(err, "%s: %s has %lld rows for %lld tokens", shard->path, array->name,
                         (long long)rows, (long long)shard->tokens);
    int64_t document = 0;
    while (shard->doc_offsets[document + 1] <= rows)
        document++;
    return error_add(err,
                     "%s: %s has %lld rows for %lld tokens: row %lld of document %lld is missing",
                     shard->path, array->name, (long long)rows, (long long)shard->tokens,
                     (long long)(rows - shard->doc_offsets[document]), (long long)document);
}

static int check_rows(const struct shard *shard, struct error *err)
{
    const struct shard_files *files = shard->files;
    int result = check_token_rows(shard, &files->mask, err);
    if (shard->manifest)
        return result;
    result |= check_token_rows(shard, &files->hidden, err);
    if (shard->features.float8)
        result |= check_token_rows(shard, &files->scales, err);
    if (shard->features.float8 && shard->features.last >= 0)
        result |= check_token_rows(shard, &files->last, err);
    if (shard->has_teacher) {
        result |= check_token_rows(shard, &files->top1, err);
        result |= check_token_rows(shard, &files->top1_logit, err);
        result |= check_token_rows(shard, &files->lse, err);
    }
    return result;
}

enum { ARRAYS = 8 };

static void arrays_of(struct shard_files *files, struct hdf5_array *arrays[ARRAYS])
{
    struct hdf5_array *all[ARRAYS] = {&files->ids,        &files->mask, &files->hidden,
                                      &files->scales,     &files->last, &files->top1,
                                      &files->top1_logit, &files->lse};
    memcpy(arrays, all, sizeof(all));
}

static void files_init(struct shard_files *files)
{
    struct hdf5_array *arrays[ARRAYS];
    files->file = (struct hdf5_file){.id = -1, .fd = -1};
    arrays_of(files, arrays);
    for (int i = 0; i < ARRAYS; i++)
        arrays[i]->id = -1;
}

// With every array read by pread, libhdf5's handle and its caches are not needed any more.
static void drop_library(struct shard_files *files)
{
    struct hdf5_array *arrays[ARRAYS];
    arrays_of(files, arrays);
    for (int i = 0; i < ARRAYS; i++)
        if (arrays[i]->id >= 0)
            return;
    hdf5_file_close_library(&files->file);
}

static int open_as(struct shard *shard, const char *path, bool manifest, struct error *err)
{
    struct error found = {""};
    struct document_arrays arrays = {.offsets.id = -1, .ids.id = -1, .crc.id = -1};
    *shard = (struct shard){.path = memory_strdup(path), .manifest = manifest};
    shard->files = memory_alloc(1, sizeof(*shard->files));
    files_init(shard->files);

    hdf5_lock();
    int result = open_index(shard, &arrays, &found);
    hdf5_unlock();
    if (result == 0)
        result = read_offsets(shard, &arrays, &found);
    if (result == 0) {
        result = read_document_arrays(shard, &arrays, &found);
        result |= check_rows(shard, &found);
    }

    hdf5_lock();
    hdf5_array_close(&arrays.offsets);
    hdf5_array_close(&arrays.ids);
    hdf5_array_close(&arrays.crc);
    drop_library(shard->files);
    hdf5_unlock();
    if (result != 0) {
        shard_close(shard);
        *err = found;
    }
    return result;
}

int shard_open(struct shard *shard, const char *path, struct error *err)
{
    return open_as(shard, path, false, err);
}

int shard_open_manifest(struct shard *shard, const char *path, struct error *err)
{
    return open_as(shard, path, true, err);
}

void shard_close(struct shard *shard)
{
    struct shard_files *files = shard->files;
    if (files != NULL) {
        struct hdf5_array *arrays[ARRAYS];
        arrays_of(files, arrays);
        hdf5_lock();
        for (int i = 0; i < ARRAYS; i++)
            hdf5_array_close(arrays[i]);
        hdf5_file_close(&files->file);
        hdf5_unlock();
        free(files);
    }
    free(shard->doc_crc32c);
    free(shard->doc_ids);
    free(shard->doc_offsets);
    free(shard->layer_ids);
    free(shard->target_model);
    free(shard->path);
    *shard = (struct shard){.path = NULL};
}

// A reader starts a new message: what it calls only adds lines.
static int read_integers(const struct shard *shard, const struct hdf5_array *array, int64_t first,
                         int64_t count, size_t size, bool is_signed, void *values,
                         struct error *err)
{
    struct error found = {""};
    if (hdf5_array_read_integers(array, &shard->files->file, first, count, size, is_signed, values,
                                 &found) == 0)
        return 0;
    *err = found;
    return -1;
}

static int read_rows(const struct shard *shard, const struct hdf5_array *array, int64_t first,
                     int64_t count, void *values, struct error *err)
{
    struct error found = {""};
    if (hdf5_array_read(array, &shard->files->file, first, count, values, &found) == 0)
        return 0;
    *err = found;
    return -1;
}

int shard_read_ids(const struct shard *shard, int64_t first, int64_t count, int32_t *ids,
                   struct error *err)
{
    return read_integers(shard, &shard->files->ids, first, count, sizeof(*ids), true, ids, err);
}

int shard_read_mask(const struct shard *shard, int64_t first, int64_t count, uint8_t *mask,
                    struct error *err)
{
    return read_integers(shard, &shard->files->mask, first, count, sizeof(*mask), false, mask, err);
}

// Rows of one dataset to `to`, `stride` bytes apart, through a piece that stays in the cache.
static int read_apart(const struct shard *shard, const struct hdf5_array *array, int64_t first,
                      int64_t count, unsigned char *to, size_t stride, struct error *err)
{
    size_t row = (size_t)array->row_elements * array->element_size;
    if (row == 0)
        return 0;
    int64_t rows = (int64_t)(APART_BYTES / row) + 1;
    unsigned char *piece = memory_alloc((size_t)(rows < count ? rows : count), row);
    int result = 0;
    for (int64_t at = 0; at < count && result == 0; at += rows) {
        int64_t some = count - at < rows ? count - at : rows;
        result = read_rows(shard, array, first + at, some, piece, err);
        for (int64_t i = 0; i < some && result == 0; i++)
            memcpy(to + (size_t)(at + i) * stride, piece + (size_t)i * row, row);
    }
    free(piece);
    return result;
}

static int read_features(const struct shard *shard, int64_t first, int64_t count, bf16 *hidden,
                         struct error *err)
{
    const struct shard_files *files = shard->files;
    const struct feature_layout *f = &shard->features;
    size_t stride = (size_t)f->stride * sizeof(*hidden);
    unsigned char *scales = (unsigned char *)hidden;
    if (!f->float8)
        return read_rows(shard, &files->hidden, first, count, hidden, err);
    if (read_apart(shard, &files->scales, first, count, scales, stride, err) != 0 ||
        read_apart(shard, &files->hidden, first, count, (unsigned char *)(hidden + f->codes),
                   stride, err) != 0)
        return -1;
    return f->last < 0 ? 0
                       : read_apart(shard, &files->last, first, count,
                                    (unsigned char *)(hidden + f->last), stride, err);
}

int shard_read_hidden(const struct shard *shard, int64_t first, int64_t count, bf16 *hidden,
                      struct error *err)
{
    const struct hdf5_array *array = &shard->files->hidden;
    if (array->access != HDF5_LIBRARY)
        return read_features(shard, first, count, hidden, err);
    double start = timer_now();
    int result = read_features(shard, first, count, hidden, err);
    double seconds = timer_now() - start;
    if (result == 0 && !atomic_exchange(&shard->files->slow_told, true)) {
        double bytes = (double)(count * feature_layout_file_bytes(&shard->features));
        log_warn("%s: hidden_states is %s, so one thread at a time reads it: %.1f MB/s measured on "
                 "%.3f MB; h5repack -l hidden_states:CONTI -f hidden_states:NONE makes it fast",
                 shard->path, array->slow_reason, bytes / (seconds > 1e-9 ? seconds : 1e-9) * 1e-6,
                 bytes * 1e-6);
    }
    return result;
}

int shard_read_teacher(const struct shard *shard, int64_t first, int64_t count, int32_t *top1,
                       float *top1_logit, float *lse, struct error *err)
{
    const struct shard_files *files = shard->files;
    BUG_UNLESS(shard->has_teacher);
    if (read_integers(shard, &files->top1, first, count, sizeof(*top1), true, top1, err) != 0 ||
        read_rows(shard, &files->top1_logit, first, count, top1_logit, err) != 0)
        return -1;
    return read_rows(shard, &files->lse, first, count, lse, err);
}

static int differs(const struct shard *first, const struct shard *second, const char *what,
                   int64_t a, int64_t b, struct error *err)
{
    if (a == b)
        return 0;
    return error_add(err, "%s: %s is %lld, but %lld in %s", second->path, what, (long long)b,
                     (long long)a, first->path);
}

int shard_compare(const struct shard *first, const struct shard *second, struct error *err)
{
    static const char *const kinds[] = {"pre_norm", "post_norm", "absent"};
    static const char *const dtypes[] = {"bfloat16", "float8_e4m3"};
    int result =
        differs(first, second, "hidden_size", first->hidden_size, second->hidden_size, err);
    result |= differs(first, second, "vocab_size", first->vocab_size, second->vocab_size, err);
    int layers = differs(first, second, "the number of target_layer_ids", first->layers,
                         second->layers, err);
    for (int64_t i = 0; i < first->layers && layers == 0; i++)
        layers = differs(first, second, "a value of target_layer_ids", first->layer_ids[i],
                         second->layer_ids[i], err);
    result |= layers;
    if (first->features.float8 != second->features.float8)
        result =
            error_add(err, "%s: dtype is %s, but %s in %s", second->path,
                      dtypes[second->features.float8], dtypes[first->features.float8], first->path);
    if (first->last_hidden != second->last_hidden)
        result = error_add(err, "%s: last_hidden is %s, but %s in %s", second->path,
                           kinds[second->last_hidden], kinds[first->last_hidden], first->path);
    if (strcmp(first->target_model, second->target_model) != 0)
        result = error_add(err, "%s: target_model is \"%s\", but \"%s\" in %s", second->path,
                           second->target_model, first->target_model, first->path);
    return result;
}
