// One feature shard (HDF5, docs/file-formats.md): its index read once through libhdf5, its bytes with
// pread at file offsets from any thread.
#ifndef DATA_SHARD_H
#define DATA_SHARD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/bf16.h"
#include "base/error.h"
#include "data/features.h"

enum last_hidden { LAST_HIDDEN_PRE_NORM, LAST_HIDDEN_POST_NORM, LAST_HIDDEN_ABSENT };

struct shard {
    char *path;
    char *target_model;
    int64_t *layer_ids; // [layers] output of decoder layer i, 0-based
    int64_t layers;     // L of the shard
    int64_t planes;     // P = L + 1 with the last hidden state as last plane, or L
    int64_t hidden_size, vocab_size;
    enum last_hidden last_hidden;
    struct feature_layout features; // of what shard_read_hidden gives
    int64_t tokens;                 // N
    int64_t documents;              // D
    int64_t *doc_offsets;           // [D + 1]
    uint64_t *doc_ids;              // [D]; made from file name and index when the shard has none
    bool has_doc_ids;
    uint32_t *doc_crc32c; // [D] or NULL
    bool manifest;        // documents only: no hidden states, no teacher columns
    bool has_teacher;     // teacher_top1, teacher_top1_logit, teacher_lse are there
    uint64_t file_size;
    int64_t file_time_ns;      // modification time
    struct shard_files *files; // private: descriptors, dataset locations
};

// Reads attributes and doc_offsets, and finds where every dataset lies. Structural faults (missing or
// wrong attributes, shapes that disagree, truncated file, bad offsets) are errors that name file,
// dataset and document. Must be called from one thread at a time
// (libhdf5); the reads below from any.
int shard_open(struct shard *shard, const char *path, struct error *err);
// A manifest: attributes, documents, ids and masks as in a shard, and nothing else is read of it.
int shard_open_manifest(struct shard *shard, const char *path, struct error *err);
void shard_close(struct shard *shard);

// Tokens [first, first + count) of the shard.
int shard_read_ids(const struct shard *shard, int64_t first, int64_t count, int32_t *ids,
                   struct error *err);
int shard_read_mask(const struct shard *shard, int64_t first, int64_t count, uint8_t *mask,
                    struct error *err);
// hidden: `count` tokens, laid out as shard->features says; without float8, [count, P, H] bf16.
int shard_read_hidden(const struct shard *shard, int64_t first, int64_t count, bf16 *hidden,
                      struct error *err);
int shard_read_teacher(const struct shard *shard, int64_t first, int64_t count, int32_t *top1,
                       float *top1_logit, float *lse, struct error *err);

// Faults of one document's values, in the words that `data check` and training share: "FILE: document
// D: row R of plane P: NaN". Looks at ids (range), mask (0 or 1), hidden (NaN, inf, all-zero or
// constant planes, two planes bitwise equal) and the CRC where there is one, check_crc, and the
// document is whole. ids, mask [length] and hidden (as shard_read_hidden fills it): of the document's
// first `length` tokens, all of them unless it was cut.
// Returns 0 when clean, else -1 with the first fault of each kind as a line in err.
int shard_check_document(const struct shard *shard, int64_t document, int64_t length,
                         const int32_t *ids, const uint8_t *mask, const bf16 *hidden,
                         bool check_crc, struct error *err);
// What two shards of one data set must have in common: hidden size, vocabulary, layers, last hidden
// state, target. Differences are added to err, a line each.
int shard_compare(const struct shard *first, const struct shard *second, struct error *err);

// Writing (tests, importers in C): arrays of the whole shard at once.
struct shard_content {
    const char *target_model;
    const int32_t *layer_ids;
    int64_t layers, planes, hidden_size, vocab_size;
    enum last_hidden last_hidden;
    int64_t documents, tokens;
    const int64_t *doc_offsets; // [D + 1]
    const int32_t *input_ids;   // [N]
    const uint8_t *loss_mask;   // [N]
    // [N, P, H]; with codes only the last plane [N, H], or NULL when absent
    const bf16 *hidden_states;
    const uint8_t *codes;    // float8: [N, L, H] e4m3; NULL: bf16
    const float *scales;     // float8: [N, L]
    bool manifest;           // write a manifest: none of the three above
    bool float8;             // manifest: dtype of the features to come
    const uint64_t *doc_ids; // [D] or NULL
    bool write_crc;
    const int32_t *teacher_top1; // [N] or NULL, then all three
    const float *teacher_top1_logit, *teacher_lse;
};
// Contiguous layout, early allocation, no fill, alignment 4096; temporary name, fsync, rename.
int shard_write(const char *path, const struct shard_content *content, struct error *err);

#endif
