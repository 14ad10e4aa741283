// Small shards of seeded random content for tests. A test fills options (zeros are sensible), may
// change the arrays in memory, and writes them. Failing to write ends the test.
#ifndef TESTS_SUPPORT_SHARD_FIXTURE_H
#define TESTS_SUPPORT_SHARD_FIXTURE_H

#include "data/shard.h"

struct fixture_options {
    uint64_t seed;
    const char *target_model;     // NULL: "fixture"
    int64_t hidden_size;          // 0: 8
    int64_t vocab_size;           // 0: 64
    int64_t layers;               // 0: 2
    const int32_t *layer_ids;     // [layers]; NULL: 1, 3, 5, ...
    enum last_hidden last_hidden; // 0: pre_norm
    int64_t documents;            // 0: 1
    const int64_t *lengths;       // [documents]; NULL: 16 each
    const int32_t *input_ids;     // [tokens]; NULL: random
    const uint8_t *loss_mask;     // [tokens]; NULL: all 1
    const bf16 *hidden_states;    // [tokens, planes, hidden_size]; NULL: standard normal
    const uint64_t *doc_ids;      // [documents]; NULL: distinct for every seed and document
    bool without_doc_ids;
    bool crc;     // write doc_crc32c
    bool teacher; // write random teacher columns
};

// The arrays of a shard in memory; content points at them.
struct fixture {
    struct shard_content content;
    int32_t *layer_ids;
    int64_t *doc_offsets;
    int32_t *input_ids;
    uint8_t *loss_mask;
    bf16 *hidden_states; // [tokens, planes, hidden_size]
    uint64_t *doc_ids;
    int32_t *teacher_top1;
    float *teacher_top1_logit, *teacher_lse;
};

void fixture_make(struct fixture *fixture, const struct fixture_options *options);
void fixture_release(struct fixture *fixture);
// [hidden_size] of a token of the shard.
bf16 *fixture_hidden(const struct fixture *fixture, int64_t token, int64_t plane);
// Makes a document's captured planes finite, and what comes of them not.
void fixture_overflow(struct fixture *fixture, int64_t document);
void fixture_write(const struct fixture *fixture, const char *path);
// Makes and writes in one.
void fixture_shard(const char *path, const struct fixture_options *options);

// A fresh folder below TMPDIR (or /tmp); remove it with fixture_folder_remove. The caller frees it.
char *fixture_folder(void);
void fixture_folder_remove(char *folder);
// folder/name; the caller frees it.
char *fixture_path(const char *folder, const char *name);
// What the file folder/name holds; the caller frees it. No such file: the test ends.
char *fixture_text(const char *folder, const char *name);
// Damages a file without a change of its size.
void fixture_flip_last_bit(const char *path);
// The same so that libhdf5 1.10 crashes: the number of an attribute's text among the texts of the file.
void fixture_break_structure(const char *path);

// A test's state: a folder with one shard in it, and what the shard was made of.
struct shard_place {
    char *folder, *path;
    struct fixture fixture;
};
// For cmocka: frees *state, a struct shard_place, and removes its folder.
int shard_place_teardown(void **state);

#endif
