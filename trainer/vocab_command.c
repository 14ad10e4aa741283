// Owns `dtrain vocab`: which documents are counted, what is reported. Does not own how tokens are chosen
// nor the file (data/vocab_map.h).
#include "trainer/vocab_command.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "data/target.h"
#include "data/vocab_map.h"
#include "trainer/commands.h"
#include "trainer/files.h"

enum { SIZES = 5 }; // whose coverage is reported

static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

// Whole documents: which of them are trained on, and how they are cut, is not the map's business. Bad ones
// are left out.
static int open_shards(const struct vocab_request *request, struct documents *documents,
                       struct error *err)
{
    size_t count = request->file_count;
    char **files = memory_alloc(count, sizeof(*files));
    for (size_t i = 0; i < count; i++)
        files[i] = memory_strdup(request->files[i]);
    qsort(files, count, sizeof(*files), by_name);
    const struct config_texts paths = {.items = files, .count = count};
    int result = documents_open(documents, &paths, INT32_MAX, BAD_SAMPLE_SKIP, err);
    for (size_t i = 0; i < count; i++)
        free(files[i]);
    free(files);
    return result;
}

// A single file may be a manifest, or something that is neither.
static int open_documents(const struct vocab_request *request, struct documents *documents,
                          struct error *err)
{
    if (request->file_count > 1)
        return open_shards(request, documents, err);
    struct error as_manifest = {""};
    if (documents_open_manifest(documents, request->files[0], INT32_MAX, BAD_SAMPLE_SKIP,
                                &as_manifest) == 0)
        return 0;
    if (open_shards(request, documents, err) == 0)
        return 0;
    if (strstr(err->text, "\"dtrain-manifest\"") != NULL)
        *err = as_manifest; // it is one, with a fault
    return -1;
}

static int check_target(const struct vocab_request *request, const struct documents *documents,
                        struct error *err)
{
    struct target target;
    if (request->target == NULL)
        return 0;
    if (target_open(&target, request->target, err) != 0)
        return error_prefix(err, "--target");
    int64_t vocab = target.vocab_size;
    target_close(&target);
    if (vocab == documents->vocab_size)
        return 0;
    return error_set(err,
                     "%s: vocab_size %lld, but the head of --target %s has %lld rows: the shards "
                     "are of another target",
                     documents->shards[0].path, (long long)documents->vocab_size, request->target,
                     (long long)vocab);
}

// The chosen size with those around it, ascending and at most the vocabulary. Returns how many.
static int64_t sizes_around(int64_t size, int64_t vocab, int64_t sizes[SIZES])
{
    int64_t count = 0;
    for (int i = 0; i < SIZES; i++) {
        int64_t wanted = i < 2 ? size >> (2 - i) : size << (i - 2);
        if (wanted > vocab)
            wanted = vocab;
        if (wanted > 0 && (count == 0 || wanted > sizes[count - 1]))
            sizes[count++] = wanted;
    }
    return count;
}

static void print_report(FILE *report, const struct vocab_request *request,
                         const struct documents *documents, const struct vocab_map *map,
                         const int64_t *counts, bool there)
{
    int64_t sizes[SIZES] = {0};
    int64_t count = sizes_around(request->size, documents->vocab_size, sizes);
    double coverages[SIZES];
    int64_t seen = vocab_map_coverages(counts, documents->vocab_size, sizes, count, coverages);
    fprintf(report, "target         %s, vocabulary of %lld tokens\n", documents->target_model,
            (long long)documents->vocab_size);
    fprintf(report, "counted        %lld supervised tokens of %zu documents, %lld distinct ones\n",
            (long long)documents->supervised, documents->count, (long long)seen);
    fprintf(report, "fingerprint    %016" PRIx64 "\n", documents->fingerprint);
    fprintf(report, "%s  %s, %lld tokens, %.4f %% of the supervised ones\n",
            there ? "there already" : "written      ", request->out, (long long)map->draft_size,
            100.0 * map->coverage);
    if (seen < map->draft_size)
        fprintf(report,
                "               only %lld of them were seen; the rest are the smallest ids that "
                "were not\n",
                (long long)seen);
    fprintf(report, "\n      size    coverage\n");
    for (int64_t i = 0; i < count; i++)
        fprintf(report, "%10lld  %8.4f %%%s\n", (long long)sizes[i], 100.0 * coverages[i],
                sizes[i] == map->draft_size ? "  written" : "");
}

// Whether the file is this map, made from these documents.
static bool holds_map(const char *path, const struct vocab_map *map,
                      const struct documents *documents)
{
    struct vocab_map found;
    struct error other = {""};
    if (!files_exists(path) || vocab_map_read(&found, documents, true, path, &other) != 0)
        return false;
    bool same = vocab_map_hash(&found) == vocab_map_hash(map);
    vocab_map_release(&found);
    return same;
}

// By way of a file beside it. A map that is there already stays: runs may depend on it. *there: it is the same.
// -1: another one is there; 1: it can not be written.
static int write_map(const struct vocab_map *map, const struct documents *documents,
                     const char *out, bool *there, struct error *err)
{
    char *made = memory_format("%s.%ld", out, (long)getpid());
    int result = 0;
    if (vocab_map_write(map, documents, made, err) != 0) {
        error_prefix(err, "--out");
        result = 1;
    }
    *there = result == 0 && holds_map(out, map, documents);
    if (result == 0 && !*there && files_exists(out))
        result = error_set(err,
                           "--out %s: exists already and is another map, which runs may use; "
                           "choose another name, or remove it",
                           out);
    if (result == 0 && !*there && rename(made, out) != 0) {
        error_set(err, "--out %s: can not be written: %s", out, strerror(errno));
        result = 1;
    }
    unlink(made);
    free(made);
    return result;
}

static int make_map(const struct vocab_request *request, const struct documents *documents,
                    FILE *report, struct error *err)
{
    struct vocab_map map = {0};
    bool there = false;
    int64_t *counts = memory_alloc((size_t)documents->vocab_size, sizeof(*counts));
    int result = check_target(request, documents, err);
    if (result == 0)
        result = vocab_map_count(documents, counts, err);
    if (result == 0 && vocab_map_make(&map, counts, documents->vocab_size, request->size, err) != 0)
        result = error_prefix(err, "--size");
    if (result == 0)
        result = write_map(&map, documents, request->out, &there, err);
    if (result == 0)
        print_report(report, request, documents, &map, counts, there);
    vocab_map_release(&map);
    free(counts);
    return result;
}

int vocab_command(const struct vocab_request *request, FILE *report, struct error *err)
{
    struct documents documents;
    if (files_check_replace(request->out, err) != 0)
        return error_prefix(err, "--out");
    if (open_documents(request, &documents, err) != 0)
        return -1;
    int result = make_map(request, &documents, report, err);
    documents_close(&documents);
    return result;
}

int command_vocab(const struct options *options)
{
    struct error err = {0};
    const struct vocab_request request = {.files = (const char *const *)options->files,
                                          .file_count = (size_t)options->file_count,
                                          .size = options->size,
                                          .out = options->out,
                                          .target = options->target};
    int result = vocab_command(&request, stdout, &err);
    if (result == 0)
        return EXIT_DONE;
    log_error("%s", err.text);
    return result > 0 ? EXIT_FAILED : EXIT_REFUSED;
}
