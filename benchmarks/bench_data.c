// Times how fast rows of the size of a real step come from shards: prefetch and all checks, without a
// step. Usage: bench_data FOLDER [rows of 8,192 tokens: 2]
// Writes a shard with made-up values there and removes it again.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/memory.h"
#include "base/rng.h"
#include "base/timer.h"
#include "data/prefetch.h"

// Hidden size, captured layers and one more plane, vocabulary: those of a target of 27 G parameters.
enum { HIDDEN = 5120, LAYERS = 5, PLANES = LAYERS + 1, VOCAB = 248320 };
enum { ROW_TOKENS = 8192, DOCUMENT_TOKENS = 2048, ROWS = 2, AHEAD = 2 };
static const double enough_seconds = 0.7;

static const int32_t layer_ids[LAYERS] = {1, 16, 31, 46, 61};

// A shard whose documents fill `rows` rows, all supervised.
static int write_shard(const char *path, int64_t rows, struct error *err)
{
    int64_t documents = rows * (ROW_TOKENS / DOCUMENT_TOKENS), tokens = rows * ROW_TOKENS;
    size_t values = (size_t)(tokens * PLANES * HIDDEN);
    int64_t *offsets = memory_alloc((size_t)documents + 1, sizeof(*offsets));
    int32_t *ids = memory_alloc((size_t)tokens, sizeof(*ids));
    uint8_t *mask = memory_alloc((size_t)tokens, sizeof(*mask));
    uint64_t *doc_ids = memory_alloc((size_t)documents, sizeof(*doc_ids));
    bf16 *hidden = memory_alloc(values, sizeof(*hidden));
    for (int64_t d = 0; d <= documents; d++)
        offsets[d] = d * DOCUMENT_TOKENS;
    for (int64_t d = 0; d < documents; d++)
        doc_ids[d] = (uint64_t)d + 1;
    for (int64_t t = 0; t < tokens; t++) {
        ids[t] = (int32_t)(rng_mix(1, (uint64_t)t) % VOCAB);
        mask[t] = 1;
    }
    for (size_t i = 0; i < values; i++)
        hidden[i] = (bf16)(rng_mix(2, i) & 0xbfffu); // magnitudes up to 2, either sign
    struct shard_content content = {.target_model = "made up",
                                    .layer_ids = layer_ids,
                                    .layers = LAYERS,
                                    .planes = PLANES,
                                    .hidden_size = HIDDEN,
                                    .vocab_size = VOCAB,
                                    .documents = documents,
                                    .tokens = tokens,
                                    .doc_offsets = offsets,
                                    .input_ids = ids,
                                    .loss_mask = mask,
                                    .hidden_states = hidden,
                                    .doc_ids = doc_ids,
                                    .write_crc = true};
    int result = shard_write(path, &content, err);
    free(offsets);
    free(doc_ids);
    free(ids);
    free(mask);
    free(hidden);
    return result;
}

static void pack(void *context, uint64_t epoch, struct packing *packing)
{
    packing_make(packing, context, ROW_TOKENS, 1, epoch, true);
}

// Touched, as pinned memory is, so that no page is made while reading is timed.
static void *touched(size_t bytes)
{
    void *memory = memory_alloc(bytes, 1);
    memset(memory, 1, bytes);
    return memory;
}

struct result {
    double seconds, read_seconds;
    int64_t bytes, rows;
};

// Epochs of the documents until enough_seconds have passed, or one.
static int read_rows(struct documents *documents, int readers, bool check_crc, bool one_epoch,
                     struct result *result, struct error *err)
{
    struct source *source = NULL;
    struct prefetch *prefetch = NULL;
    struct row *row;
    struct prefetch_options options = {.depth = AHEAD,
                                       .threads = readers,
                                       .seq_len = ROW_TOKENS,
                                       .host_alloc = touched,
                                       .host_free = free};
    *result = (struct result){0};
    int status = source_open_shards(&source, documents, check_crc, err);
    double begin, wait;
    if (status == 0)
        status = prefetch_open(&prefetch, source, &options, pack, documents, 0, 0,
                               one_epoch ? 1 : 1000000, err);
    begin = timer_now();
    while (status == 0 && (one_epoch || timer_now() - begin < enough_seconds)) {
        int got = prefetch_next(prefetch, &row, &wait, err);
        if (got != 1) {
            status = got < 0 ? -1 : 0;
            break;
        }
        result->bytes += row->read_bytes;
        result->read_seconds += row->read_seconds;
        result->rows++;
        prefetch_return(prefetch, row);
    }
    result->seconds = timer_now() - begin;
    if (prefetch != NULL)
        prefetch_close(prefetch);
    if (source != NULL)
        source_close(source);
    return status;
}

// What the page cache has of the file is dropped; false where the file system does not do so.
static bool drop_cache(const char *path)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    bool done =
        file >= 0 && fdatasync(file) == 0 && posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) == 0;
    if (file >= 0)
        close(file);
    return done;
}

static int bench(struct documents *documents, const char *path, struct error *err)
{
    static const int readers[] = {1, 2, 4};
    struct result r;
    printf("from,readers,crc,rows,gbytes_per_s,ms_per_row,reading_ms_per_row\n");
    for (size_t i = 0; i < sizeof(readers) / sizeof(readers[0]); i++) {
        for (int kind = 0; kind < 3; kind++) {
            bool cold = kind == 2, crc = kind != 1;
            if (cold && !drop_cache(path))
                continue;
            if (read_rows(documents, readers[i], crc, cold, &r, err) != 0)
                return -1;
            double rows = (double)r.rows;
            printf("%s,%d,%s,%.0f,%.2f,%.1f,%.1f\n", cold ? "disk" : "page cache", readers[i],
                   crc ? "yes" : "no", rows, 1e-9 * (double)r.bytes / r.seconds,
                   1e3 * r.seconds / rows, 1e3 * r.read_seconds / rows);
            fflush(stdout);
        }
    }
    return 0;
}

int main(int argc, char **argv)
{
    int rows = argc > 2 ? atoi(argv[2]) : ROWS;
    if (argc < 2 || rows < 1) {
        fprintf(stderr, "usage: bench_data FOLDER [rows]\n");
        return 2;
    }
    struct error err = {{0}};
    struct documents documents = {0};
    char *path = memory_format("%s/bench-data.h5", argv[1]);
    struct config_texts paths = {.items = &path, .count = 1};
    int status = write_shard(path, rows, &err);
    if (status == 0)
        status = documents_open(&documents, &paths, ROW_TOKENS, BAD_SAMPLE_FAIL, &err);
    if (status == 0)
        status = bench(&documents, path, &err);
    if (status != 0)
        fprintf(stderr, "%s\n", err.text);
    documents_close(&documents);
    unlink(path);
    free(path);
    return status == 0 ? 0 : 1;
}
