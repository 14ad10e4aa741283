// Owns the making of small shards. Damaged storage is shard_edit.c's work.
#include "tests/support/shard_fixture.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/rng.h"
#include "trainer/files.h"

enum { DEFAULT_LENGTH = 16 };

// Streams of random numbers of one seed.
enum { STREAM_IDS, STREAM_HIDDEN, STREAM_TOP1, STREAM_LOGIT, STREAM_LSE };

static int64_t or_default(int64_t value, int64_t otherwise)
{
    return value != 0 ? value : otherwise;
}

static void *copy_or_alloc(const void *given, int64_t count, size_t size)
{
    void *memory = memory_alloc((size_t)count, size);
    if (given != NULL)
        memcpy(memory, given, (size_t)count * size);
    return memory;
}

static void make_documents(struct fixture *fixture, const struct fixture_options *options)
{
    struct shard_content *content = &fixture->content;
    content->documents = or_default(options->documents, 1);
    fixture->doc_offsets =
        memory_alloc((size_t)content->documents + 1, sizeof(*fixture->doc_offsets));
    for (int64_t d = 0; d < content->documents; d++)
        fixture->doc_offsets[d + 1] =
            fixture->doc_offsets[d] +
            (options->lengths != NULL ? options->lengths[d] : DEFAULT_LENGTH);
    content->tokens = fixture->doc_offsets[content->documents];
    if (options->without_doc_ids)
        return;
    fixture->doc_ids = copy_or_alloc(options->doc_ids, content->documents, sizeof(uint64_t));
    for (int64_t d = 0; d < content->documents && options->doc_ids == NULL; d++)
        fixture->doc_ids[d] = rng_mix(options->seed, (uint64_t)d);
}

static void make_tokens(struct fixture *fixture, const struct fixture_options *options)
{
    struct shard_content *content = &fixture->content;
    struct rng_key key = rng_key_make(options->seed, 0, STREAM_IDS, RNG_TEST);
    fixture->input_ids = copy_or_alloc(options->input_ids, content->tokens, sizeof(int32_t));
    fixture->loss_mask = copy_or_alloc(options->loss_mask, content->tokens, 1);
    for (int64_t i = 0; i < content->tokens && options->input_ids == NULL; i++)
        fixture->input_ids[i] =
            (int32_t)(rng_u64(key, (uint64_t)i) % (uint64_t)content->vocab_size);
    if (options->loss_mask == NULL)
        memset(fixture->loss_mask, 1, (size_t)content->tokens);
}

static void make_hidden(struct fixture *fixture, const struct fixture_options *options)
{
    struct shard_content *content = &fixture->content;
    struct rng_key key = rng_key_make(options->seed, 0, STREAM_HIDDEN, RNG_TEST);
    int64_t values = content->tokens * content->planes * content->hidden_size;
    fixture->hidden_states = copy_or_alloc(options->hidden_states, values, sizeof(bf16));
    for (int64_t i = 0; i < values && options->hidden_states == NULL; i++)
        fixture->hidden_states[i] = bf16_from_float(rng_normal(key, (uint64_t)i));
}

static void make_teacher(struct fixture *fixture, uint64_t seed)
{
    struct shard_content *content = &fixture->content;
    struct rng_key top1 = rng_key_make(seed, 0, STREAM_TOP1, RNG_TEST);
    struct rng_key logit = rng_key_make(seed, 0, STREAM_LOGIT, RNG_TEST);
    struct rng_key lse = rng_key_make(seed, 0, STREAM_LSE, RNG_TEST);
    fixture->teacher_top1 = memory_alloc((size_t)content->tokens, sizeof(int32_t));
    fixture->teacher_top1_logit = memory_alloc((size_t)content->tokens, sizeof(float));
    fixture->teacher_lse = memory_alloc((size_t)content->tokens, sizeof(float));
    for (int64_t i = 0; i < content->tokens; i++) {
        uint64_t at = (uint64_t)i;
        fixture->teacher_top1[i] = (int32_t)(rng_u64(top1, at) % (uint64_t)content->vocab_size);
        fixture->teacher_top1_logit[i] = 5.0f * rng_uniform(logit, at);
        fixture->teacher_lse[i] = fixture->teacher_top1_logit[i] + rng_uniform(lse, at);
    }
}

void fixture_make(struct fixture *fixture, const struct fixture_options *options)
{
    *fixture = (struct fixture){.layer_ids = NULL};
    struct shard_content *content = &fixture->content;
    content->target_model = options->target_model != NULL ? options->target_model : "fixture";
    content->hidden_size = or_default(options->hidden_size, 8);
    content->vocab_size = or_default(options->vocab_size, 64);
    content->layers = or_default(options->layers, 2);
    content->last_hidden = options->last_hidden;
    content->planes = content->layers + (options->last_hidden != LAST_HIDDEN_ABSENT);
    content->write_crc = options->crc;
    fixture->layer_ids = copy_or_alloc(options->layer_ids, content->layers, sizeof(int32_t));
    for (int64_t i = 0; i < content->layers && options->layer_ids == NULL; i++)
        fixture->layer_ids[i] = (int32_t)(2 * i + 1);
    make_documents(fixture, options);
    make_tokens(fixture, options);
    make_hidden(fixture, options);
    if (options->teacher)
        make_teacher(fixture, options->seed);
    content->layer_ids = fixture->layer_ids;
    content->doc_offsets = fixture->doc_offsets;
    content->input_ids = fixture->input_ids;
    content->loss_mask = fixture->loss_mask;
    content->hidden_states = fixture->hidden_states;
    content->doc_ids = fixture->doc_ids;
    content->teacher_top1 = fixture->teacher_top1;
    content->teacher_top1_logit = fixture->teacher_top1_logit;
    content->teacher_lse = fixture->teacher_lse;
}

void fixture_release(struct fixture *fixture)
{
    free(fixture->layer_ids);
    free(fixture->doc_offsets);
    free(fixture->input_ids);
    free(fixture->loss_mask);
    free(fixture->hidden_states);
    free(fixture->doc_ids);
    free(fixture->teacher_top1);
    free(fixture->teacher_top1_logit);
    free(fixture->teacher_lse);
}

bf16 *fixture_hidden(const struct fixture *fixture, int64_t token, int64_t plane)
{
    const struct shard_content *content = &fixture->content;
    return fixture->hidden_states + (token * content->planes + plane) * content->hidden_size;
}

void fixture_overflow(struct fixture *fixture, int64_t document)
{
    const struct shard_content *content = &fixture->content;
    for (int64_t t = fixture->doc_offsets[document]; t < fixture->doc_offsets[document + 1]; t++)
        for (int64_t p = 0; p < content->layers; p++)
            for (int64_t i = 0; i < content->hidden_size; i++)
                fixture_hidden(fixture, t, p)[i] =
                    (bf16)(0x7f60 + (13 * t + 5 * p + 3 * i) % 31 + (i % 3 == 0 ? 0x8000 : 0));
}

void fixture_write(const struct fixture *fixture, const char *path)
{
    struct error err = {""};
    if (shard_write(path, &fixture->content, &err) != 0)
        die("%s", err.text);
}

void fixture_shard(const char *path, const struct fixture_options *options)
{
    struct fixture fixture;
    fixture_make(&fixture, options);
    fixture_write(&fixture, path);
    fixture_release(&fixture);
}

char *fixture_folder(void)
{
    const char *base = getenv("TMPDIR");
    char *folder = memory_format("%s/dtrain-XXXXXX", base != NULL ? base : "/tmp");
    if (mkdtemp(folder) == NULL)
        die("%s can not be made", folder);
    return folder;
}

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *place)
{
    (void)status, (void)type, (void)place;
    return remove(path);
}

void fixture_folder_remove(char *folder)
{
    nftw(folder, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    free(folder);
}

char *fixture_path(const char *folder, const char *name)
{
    return memory_format("%s/%s", folder, name);
}

char *fixture_text(const char *folder, const char *name)
{
    struct error err = {""};
    char *path = fixture_path(folder, name), *text = files_read_text(path, &err);
    if (text == NULL)
        die("%s", err.text);
    free(path);
    return text;
}

void fixture_flip_last_bit(const char *path)
{
    FILE *file = fopen(path, "r+b");
    if (file == NULL || fseek(file, -1, SEEK_END) != 0)
        die("%s: can not be damaged", path);
    int byte = fgetc(file);
    if (fseek(file, -1, SEEK_END) != 0 || fputc(byte ^ 1, file) != (byte ^ 1) || fclose(file) != 0)
        die("%s: can not be damaged", path);
}

// A text is referred to by where the file's texts are, eight bytes, and its number among them, four.
void fixture_break_structure(const char *path)
{
    enum { MOST = 1 << 20 };
    char *bytes = memory_alloc(MOST, 1);
    FILE *file = fopen(path, "r+b");
    size_t size = file != NULL ? fread(bytes, 1, MOST, file) : 0;
    const char *texts = memmem(bytes, size, "GCOL", 4);
    uint64_t place = texts != NULL ? (uint64_t)(texts - bytes) : 0;
    const char *reference = memmem(bytes, size, &place, sizeof(place));
    if (texts == NULL || reference == NULL || fseek(file, reference - bytes + 11, SEEK_SET) != 0 ||
        fputc(0x01, file) == EOF || fclose(file) != 0)
        die("%s: can not be damaged", path);
    free(bytes);
}

int shard_place_teardown(void **state)
{
    struct shard_place *place = *state;
    fixture_release(&place->fixture);
    free(place->path);
    fixture_folder_remove(place->folder);
    free(place);
    return 0;
}
